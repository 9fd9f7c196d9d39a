"""Files that are not what their names say: one table, through training, --mode=cache and --input."""

import csv
import gzip
import io
import json
import pathlib
import re
import tarfile
import zipfile

import pyarrow.parquet
import pytest
from corpora import LFS_POINTER, epoch_documents, make_config
from forms import first_quick
from permissions import another_user, open_folder

import sources.deal
import sources.heads
import sources.open
import sources.tables
import tasks
import tasks.open
import vocabulary as vocabularies
from formats.vocabulary import named_vocabulary
from modes import cache, infer_input
from stream import Stream

HUNT = pathlib.Path(__file__).parent / 'golden' / 'hunt'
QA = {'inputs': '{question}', 'targets': '{answer}'}
TABLE = 'question,answer\n' + ''.join(f'q{i},a{i}\n' for i in range(40))
JSON = [{'question': f'q{i}', 'answer': f'a{i}'} for i in range(40)]
PAIRS = sorted((f'q{i}', f'a{i}') for i in range(40))


def tarred(text):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode='w') as archive:
        info = tarfile.TarInfo('a.csv')
        info.size = len(text)
        archive.addfile(info, io.BytesIO(text.encode()))
    return file.getvalue()


def zipped(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w') as archive:
        archive.writestr('a.csv', content)
    return file.getvalue()


def train(path, **settings):
    """The (question, answer) pairs that training reads."""
    config = make_config(files=str(path), vocabulary='bytes', validation_fraction=0.0, **settings)
    source = tasks.open.open_mixture(config).tasks[0].source
    fields = []
    for lane in range(3):
        share = sources.Share(seed=0, epoch=0, lane=lane, num_lanes=3)
        fields += [document.record.fields for document in source.documents('train', share)]
    return sorted((each['question'], each['answer']) for each in fields)


def write_cache(path, **settings):
    """The pairs that --mode=cache writes."""
    config = make_config(
        files=str(path),
        vocabulary='bytes',
        validation_fraction=0.0,
        cache_dirs=str(path.parent / 'caches'),
        num_workers=1,
        **settings,
    )
    config.use_cached = 'no'
    vocabulary = named_vocabulary('data.vocabulary', config.vocabulary, config.extra_ids)
    task = cache.open_task(tasks.open.find(config), config, vocabulary)
    pairs = []
    for job in cache.jobs_of(task):
        records = [record for _, record in cache.records_of(task.source, job)]
        for example in task.tokenize(records):
            pairs.append((example.texts['inputs'], example.texts['targets']))
    return sorted(pairs)


def infer(path, **settings):
    """The pairs that --mode=infer reads of --input."""
    config = make_config(**settings)
    config.lengths.inputs = config.lengths.targets = 1 << 20
    examples = infer_input.FileExamples(
        str(path), config, vocabularies.ByteVocabulary(), needs_targets=True, trim=False
    )
    pairs = []
    for item in examples:
        pairs.append((item.fields['inputs'], item.fields['targets']))
    return sorted(pairs)


READERS = [train, write_cache, infer]

# For each file its content, a part of the message, and data.kind.
ODD = {
    'my.csv.txt': (TABLE, "a template names 'question'", ''),
    'data.json.1': (json.dumps(JSON[0]), "a template names 'question'", ''),
    'qa.data': (TABLE, "a template names 'question'", ''),
    'qa.csv': (TABLE, "a template names 'question'", 'text'),
    'twice.csv': ('question,answer,question\na,b,c\n', "has the columns 'question'", ''),
    'spaces.csv': ('question,answer,question \na,b,c\n', "has the columns 'question'", ''),
    'twice.tsv': ('question\tanswer\tn\tn\na\tb\tc\td\n', "line 1 of {file} has the columns '", ''),
    'twice.csv.gz': ('n,n,question,answer\n1,2,a,b\n', "line 1 of {file} has the columns '", ''),
    'header.csv': ('question,"answer\na,b\n' * 99, 'line 1 of {file}: no CSV', ''),
    'header.csv.gz': ('question,"answer\na,b\n' * 99, 'line 1 of {file}: no CSV', ''),
    'row.csv': (TABLE + 'q,"a\n' + 'q,a\n' * 99, 'line 42 of {file}: no CSV', ''),
    'row.csv.gz': (TABLE + 'q,"a\n' + 'q,a\n' * 99, 'line 42 of {file}: no CSV', ''),
    'blank.csv': ('\n' + TABLE, 'line 1 of {file} has the columns', ''),
    'latin.csv': ('frage,antwört\n'.encode('latin-1'), 'line 1 of {file}: byte 11 is not UTF-8', ''),
    'latin.csv.gz': ('frage,antwört\n'.encode('latin-1'), 'line 1 of {file}: byte 11 is not UTF-8', ''),
    'semicolons.csv': (TABLE.replace(',', ';'), "'question;answer'", ''),
    'tabs.csv': (TABLE.replace(',', '\t'), r"'question\tanswer'", ''),
    'quote.csv': (TABLE + 'q,a 5" pipe\nq,a\n', 'line 42 of {file}: no CSV: a quote or', ''),
    'quote.csv.gz': (TABLE + 'q,a 5" pipe\nq,a\n', 'line 42 of {file}: no CSV: a quote or', ''),
    'return.csv': (TABLE + 'q,a\rq,a\n', 'line 42 of {file}: no CSV: a quote or', ''),
    'quoted.csv': (TABLE.replace('question,answer', '"question";"answer"'), "line 1 of {file}: no CSV: ',' expected", ''),
    'mac.csv': (TABLE.replace('\n', '\r'), '{file} has line ends of old Macs', ''),
    'mac.jsonl': ('\r'.join(map(json.dumps, JSON)), '{file} has line ends of old Macs', ''),
    'indented.json': (json.dumps(JSON[0], indent=1), '{file} is JSON over many lines', ''),
    'indented.json.gz': (json.dumps(JSON[0], indent=1), '{file} is JSON over many lines', ''),
    'windows.json': (json.dumps(JSON, indent=4).replace('\n', '\r\n'), '{file} is JSON over many lines', ''),
    'bom.json': ('\ufeff' + json.dumps(JSON, indent=4), '{file} is JSON over many lines', ''),
    'list.jsonl': (json.dumps(JSON), '{file} is JSON over many lines', ''),
    'list.data': (json.dumps(JSON), '{file} is JSON over many lines', 'jsonl'),
    'a.xlsx': (zipped(TABLE), '{file} is a zip archive, as .xlsx is, not text', ''),
    'a.jsonl': (zipped(TABLE), '{file} is a zip archive, as .xlsx is, not jsonl', ''),
    'a.csv': (b'PAR1' + bytes(99), '{file} is Parquet, not csv', ''),
    'gzipped.csv': (gzip.compress(TABLE.encode()), '{file} is gzipped, not csv: gunzip it', ''),
    'gzipped.data': (gzip.compress(TABLE.encode()), '{file} is gzipped, not tsv: gunzip it', 'tsv'),
    'pointer.jsonl': (LFS_POINTER, 'git lfs pull', ''),
    'a.tar': (tarred(TABLE), '{file} is a tar archive: unpack it', ''),
    'a.tar.gz': (tarred(TABLE), '{file} is a tar archive: unpack it', ''),
    'a.pdf': (b'%PDF-1.7\n', '{file} is PDF, not text', ''),
    'utf-16.csv': (TABLE.encode('utf-16'), '{file} is UTF-16 or UTF-32, not csv', ''),
    'utf-16le.tsv': (TABLE.encode('utf-16-le'), '{file} holds zero bytes', ''),
    'utf-16be.jsonl': (json.dumps(JSON[0]).encode('utf-16-be'), '{file} holds zero bytes', ''),
}  # fmt: skip


def write(folder, name, content):
    """Write a file, gzipped if its name says so. Return its path."""
    if isinstance(content, str):
        content = content.encode()
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
    return path


@pytest.mark.parametrize('read', READERS)
@pytest.mark.parametrize('name', ODD)
def test_a_file_that_is_not_what_its_name_says(tmp_path, name, read):
    content, message, kind = ODD[name]
    path = write(tmp_path, name, content)
    with pytest.raises(ValueError) as error:
        read(path, kind=kind, **QA)
    text = str(error.value)
    assert str(path) in text and message.replace('{file}', str(path)) in text and '\n' not in text


@pytest.mark.parametrize('read', READERS)
@pytest.mark.parametrize('name', ['a.jsonl', 'a.json.gz'])
@pytest.mark.parametrize('field', ['question', 'answer'])
def test_numbers_that_json_does_not_have_are_missing(tmp_path, name, read, field):
    """As null, in whatever field: `json.dumps(float('nan'))` writes NaN."""
    messages = set()
    for value in ('null', 'NaN', 'Infinity', '-Infinity'):
        lines = list(map(json.dumps, JSON))
        lines[7] = f'{{"question": 7, "answer": 0.5, "{field}": {value}}}'
        path = write(tmp_path, name, '\n'.join(lines))
        with pytest.raises(ValueError, match=f'line 8 of {path}: field {field!r} is None') as error:
            read(path, **QA)
        messages.add(str(error.value))
        if read is not infer:
            pairs = read(path, **QA, on_bad_line='skip')
            assert pairs == sorted(set(PAIRS) - {('q7', 'a7')})
    assert len(messages) == 1
    lines[7] = '{"question": 7, "answer": 0.5, "other": [NaN, {"x": -Infinity}]}'
    assert ('7', '0.5') in read(write(tmp_path, name, '\n'.join(lines)), **QA)
    lines[7] = f'{{"question": 7, "answer": 0.5, "{field}": 1e999}}'
    with pytest.raises(ValueError, match='line 8 of .*is inf'):
        read(write(tmp_path, name, '\n'.join(lines)), **QA)


def test_a_file_of_a_script_that_wrote_nan(tmp_path):
    config = make_config(
        files=str(HUNT / 'nan_target.jsonl'),
        inputs='{inputs}',
        targets='{targets}',
        validation_fraction=0.0,
    )
    with pytest.raises(ValueError, match="line 1 of .*/nan_target.jsonl: field 'targets' is None"):
        list(sources.open.open_source(config).records('train'))
    config.on_bad_line = 'skip'
    config.max_bad_fraction = 0.5
    source = sources.open.open_source(config)
    targets = {record.fields['targets'] for record in source.records('train')}
    assert targets == {'Lima', 'Quito', 'Kyoto', 'Cairo'}
    assert source.faults()[1] == 12


def test_targets_nan_are_no_targets(tmp_path):
    """As null: inference needs none."""
    config = make_config()
    path = write(
        tmp_path, 'a.jsonl', '{"inputs": "q", "targets": NaN, "n": NaN}\n{"inputs": "r"}\n'
    )
    vocabulary = vocabularies.ByteVocabulary()
    examples = list(
        infer_input.FileExamples(str(path), config, vocabulary, needs_targets=False, trim=False)
    )
    assert [example.targets for example in examples] == [None, None]
    assert examples[0].fields == {'inputs': 'q', 'targets': None, 'n': None}


@pytest.mark.parametrize('suffix', ['jsonl', 'jsonl.gz', 'parquet'])
def test_own_tasks_are_given_none_for_nan(tmp_path, suffix):
    path = tmp_path / f'a.{suffix}'
    if suffix == 'parquet':
        column = pyarrow.array([float('nan'), float('inf'), 1.5])
        pyarrow.parquet.write_table(pyarrow.table({'q': ['a', 'b', 'c'], 'n': column}), path)
    else:
        lines = ['{"q": "a", "n": NaN}', '{"q": "b", "n": -Infinity}', '{"q": "c", "n": 1.5}']
        write(tmp_path, path.name, '\n'.join(lines))
    config = make_config(files=str(path), validation_fraction=0.0)
    source = sources.open.open_source(config, whole_records=True)
    records = [record.fields for record in source.records('train')]
    assert records == [{'q': 'a', 'n': None}, {'q': 'b', 'n': None}, {'q': 'c', 'n': 1.5}]


LONG = 'x' * 1_000_000
EVEN = {
    'qa.data': (TABLE, 'csv', PAIRS),
    'qa.txt.gz': (TABLE, 'csv', PAIRS),
    'qa.csv': (TABLE.replace(',', '\t'), 'tsv', PAIRS),
    'qa.1': ('\n'.join(map(json.dumps, JSON)), 'jsonl', PAIRS),
    'windows.csv': (TABLE.replace('\n', '\r\n').removesuffix('\r\n'), '', PAIRS),
    'bom.csv': ('\ufeff' + TABLE, '', PAIRS),
    'bom.jsonl': ('\ufeff' + '\n'.join(map(json.dumps, JSON)), '', PAIRS),
    'bom.jsonl.gz': ('\ufeff' + '\n'.join(map(json.dumps, JSON)), '', PAIRS),
    'spaces.csv': (TABLE.replace(',', ' , '), '', PAIRS),
    'spaces before quotes.csv': (TABLE.replace('a5', ' "a5"'), '', PAIRS),
    'no names.csv': (TABLE.replace('\n', ',,\n'), '', PAIRS),
    'long.csv': (TABLE + f'long,"{LONG}"\n', '', sorted([*PAIRS, ('long', LONG)])),
    'long.csv.gz': (TABLE + f'long,"{LONG}"\n', '', sorted([*PAIRS, ('long', LONG)])),
    'long.tsv': (TABLE.replace(',', '\t') + f'long\t{LONG}', '', sorted([*PAIRS, ('long', LONG)])),
}  # fmt: skip


@pytest.mark.parametrize('read', READERS)
@pytest.mark.parametrize('name', EVEN)
def test_a_file_whose_form_is_odd_is_read(tmp_path, name, read):
    content, kind, expected = EVEN[name]
    assert read(write(tmp_path, name, content), kind=kind, **QA) == expected


@pytest.mark.parametrize('read', READERS)
@pytest.mark.parametrize('name', first_quick(['a.csv', 'a.csv.gz']))
@pytest.mark.parametrize('line', first_quick([1, 2]))
def test_an_unclosed_quote_in_a_large_file(tmp_path, name, read, line):
    """Eight megabytes: a reader that begins again at every line takes hours."""
    lines = [b'question,answer\n', *([b'some words,an answer\n'] * 400_000)]
    lines[line - 1] = lines[line - 1].replace(b',', b',"')
    path = write(tmp_path, name, b''.join(lines))
    with pytest.raises(ValueError, match=f'line {line} of {path}: no CSV: unexpected end of data'):
        read(path, **QA)


# As csv.writer, pandas and Excel write them.
ROWS = [
    ['question', 'answer'],
    ['Say "hi"', 'a;b'],
    ['tab\there', '"'],
    ['two\nlines', ''],
    ['', 'x'],
]
ROWS += [[f'q{i}', f'a{i}'] for i in range(9)]
DIALECTS = {
    'excel.tsv': ('tab', {'dialect': 'excel-tab'}),
    'excel.tsv.gz': ('\t', {'dialect': 'excel-tab', 'lineterminator': '\n'}),
    'all.tsv': ('\\t', {'delimiter': '\t', 'quoting': csv.QUOTE_ALL}),
    'semicolons.csv': (';', {'delimiter': ';'}),
    'semicolons.csv.gz': (';', {'delimiter': ';', 'quoting': csv.QUOTE_ALL}),
    'bars.tsv': ('|', {'delimiter': '|', 'lineterminator': '\n'}),
    'commas.csv': (',', {}),
}


def write_rows(folder, name, rows, **options):
    file = io.StringIO(newline='')
    csv.writer(file, **options).writerows(rows)
    return write(folder, name, file.getvalue())


@pytest.mark.parametrize('read', READERS)
@pytest.mark.parametrize('name', DIALECTS)
def test_a_table_with_a_delimiter_is_read_by_the_rules_of_csv(tmp_path, caplog, name, read):
    delimiter, options = DIALECTS[name]
    path = write_rows(tmp_path, name, ROWS, **options)
    pairs = read(path, delimiter=delimiter, allow_empty_targets=True, **QA)
    assert pairs == sorted(map(tuple, ROWS[1:])) and not caplog.records


def test_validation_files_have_the_delimiter(tmp_path):
    paths = [write_rows(tmp_path, f'{i}.tsv', [*ROWS, [i, i]], delimiter=';') for i in range(2)]
    names = {'files': str(paths[0]), 'validation_files': str(paths[1])}
    settings = {'delimiter': ';', 'allow_empty_targets': True, **QA}
    source = tasks.open.open_mixture(make_config(**names, **settings)).tasks[0].source
    found = [record.fields['question'] for record in source.records('validation')]
    assert found == [*(row[0] for row in ROWS[1:]), '1']


def test_test_files_have_the_delimiter(tmp_path):
    train = write_rows(tmp_path, 'train.csv', ROWS, delimiter=';')
    test = write_rows(tmp_path, 'test.tsv', [ROWS[0], ['a', '"b"; c']], delimiter=';')
    settings = {'delimiter': ';', 'allow_empty_targets': True, **QA}
    for files in (str(train), ''):
        config = make_config(files=files, test_files=str(test), **settings)
        source = sources.open.open_source(config)
        expected = {'question': 'a', 'answer': '"b"; c'}
        assert [record.fields for record in source.records('test')] == [expected]
    text_file = tmp_path / 'test.txt'
    text_file.write_text('a;b\n')
    config = make_config(files=str(train), test_files=str(text_file), **settings)
    with pytest.raises(ValueError, match=f"data.delimiter=';' is for tables, and {text_file} is"):
        sources.open.open_source(config)


def test_another_delimiter_is_another_text(tmp_path):
    """A run may not continue with it, whatever it was called."""
    path = write(tmp_path, 'a.tsv', 'text\none\ntwo\n')
    fingerprints = []
    for delimiter in ('', ';', 'tab', '\t', '\\t'):
        config = make_config(files=str(path), delimiter=delimiter)
        fingerprints.append(sources.open.open_source(config).fingerprint)
    assert len(set(fingerprints[:3])) == 3 and len(set(fingerprints[2:])) == 1


@pytest.mark.parametrize('read', READERS)
@pytest.mark.parametrize(
    'name, header, remedy',
    [
        ('a.csv', 'question;answer', "data.delimiter=';'"),
        ('a.csv', 'question\tanswer', "data.delimiter='tab'"),
        ('a.csv', '"question"\t"answer"', "data.delimiter='tab'"),
        ('a.csv.gz', 'question|answer', "data.delimiter='|'"),
        ('a.tsv', '"question"\t"answer"', "data.delimiter='tab'"),
        ('a.tsv', 'question,answer', "data.delimiter=','"),
    ],
)
def test_a_header_with_another_delimiter(tmp_path, name, header, remedy, read):
    path = write(tmp_path, name, f'{header}\n{header}\n')
    with pytest.raises(ValueError, match=f'{path}.*set {re.escape(remedy)} if that'):
        read(path, **QA)


def test_a_header_that_is_not_utf_8_has_no_other_remedy(tmp_path):
    path = write(tmp_path, 'a.csv', 'frage;antwört\n'.encode('latin-1'))
    with pytest.raises(ValueError, match='byte 11 is not UTF-8; convert the file$'):
        train(path, **QA)


def test_a_table_without_a_header():
    config = make_config(files=str(HUNT / 'headerless.tsv'), **QA)
    message = "headerless.tsv has no column 'question'.*if line 1 is a record, put a line"
    with pytest.raises(ValueError, match=message):
        sources.open.open_source(config)


# A line, and whether all its quotes are those of quoted fields.
LINES_OF_TSV = {
    '"Say ""hi"""\ta': True,
    'q\t"1,000"': True,
    '"q"\t"a"\r\n': True,
    '""\ta': True,
    '"two': True,  # the first line of a field
    '"one, two"': True,
    'say "hi"': False,
    'q\ta': False,
    '"who\ta': False,
    '5" pipe\ta': False,
    '"a" and "b"\ta': False,
    '"a"\t6"': False,
    "q\t''a''": False,
}


@pytest.mark.parametrize('line', LINES_OF_TSV)
def test_quotes_in_tsv(line):
    assert sources.tables.is_quoted(line) == LINES_OF_TSV[line]


@pytest.mark.parametrize('read', READERS)
@pytest.mark.parametrize('name', ['a.tsv', 'a.tsv.gz', 'late.tsv', 'a.data'])
def test_quoted_tsv_is_said_once(tmp_path, caplog, monkeypatch, name, read):
    """With its file and line; the quotes stay in the text."""
    if name == 'late.tsv':
        monkeypatch.setattr(sources.heads, 'HEAD_BYTES', 20)
    rows = [
        ['question', 'answer'],
        *[[f'q{i}', 'a'] for i in range(9)],
        ['Say "hi"', 'a'],
        ['"', 'b'],
    ]
    path = write_rows(tmp_path, name, rows, dialect='excel-tab')
    pairs = read(path, kind='tsv', **QA)
    assert ('"Say ""hi"""', 'a') in pairs and ('""""', 'b') in pairs
    [warning] = [record.getMessage() for record in caplog.records]
    line = '(11|12)' if name == 'late.tsv' else '11'
    assert re.match(f"line {line} of {path}: .*set data.delimiter='tab'", warning)


@pytest.mark.parametrize('read', READERS)
def test_a_quoted_tab_in_tsv(tmp_path, read):
    path = write_rows(
        tmp_path, 'a.tsv', [['question', 'answer'], ['a\tb', 'c']], dialect='excel-tab'
    )
    with pytest.raises(ValueError, match=f"line 2 of {path}: 3 columns.*data.delimiter='tab'"):
        read(path, **QA)


@pytest.mark.parametrize('name', ['a.txt', 'a.jsonl', 'a.parquet'])
def test_a_delimiter_of_no_table_is_refused(tmp_path, name):
    path = write(tmp_path, name, TABLE)
    for read in (train, infer):
        if read is train or name != 'a.parquet':
            with pytest.raises(
                ValueError, match=f"data.delimiter='tab' is for tables, and {path} is"
            ):
                read(path, delimiter='tab', **QA)


def test_rows_around_an_unclosed_quote(tmp_path, monkeypatch):
    """Whatever the blocks, a row that is too long is bad, and counts as its lines."""
    monkeypatch.setattr(sources.tables, 'MAX_ROW_BYTES', 100)
    rows = [f'q{i},a{i}' for i in range(60)]
    rows[20] = 'q20,"a20'
    path = write(tmp_path, 'a.csv', '\n'.join(['question,answer', *rows]))
    for block_bytes in (1, 7, 64):
        monkeypatch.setattr(sources.deal, 'MAX_BLOCK_BYTES', block_bytes)
        config = make_config(
            files=str(path), on_bad_line='skip', validation_fraction=0.0, max_bad_fraction=1.0, **QA
        )
        source = sources.open.open_source(config)
        found = [record.fields['question'] for record in source.records('train')]
        assert found == [f'q{i}' for i in range(20)]
        [fault], count = source.faults()
        assert count == 13 and f'line 22 of {path}: no CSV: unexpected end of data' in fault


def test_the_rows_of_random_blocks(tmp_path, monkeypatch):
    """Each row is in one block, however the quotes and line ends lie in the blocks."""
    rows = []
    for i in range(200):
        rows.append([f'q{i}', ['a', 'b\nc', '"', '\n\n', 'd,"\n"'][i % 5] + f'{i}'])
    file = io.StringIO()
    csv.writer(file, lineterminator='\n').writerows([['question', 'answer'], *rows])
    path = write(tmp_path, 'a.csv', file.getvalue())
    for block_bytes in (1, 2, 3, 5, 64, 10_000):
        monkeypatch.setattr(sources.deal, 'MAX_BLOCK_BYTES', block_bytes)
        monkeypatch.setattr(sources.deal, 'MIN_BLOCKS', 1)
        expected = sorted((question, answer.strip()) for question, answer in rows)
        assert train(path, **QA) == expected


@pytest.mark.parametrize('name', ['a.csv', 'a.csv.gz', 'a.tsv.gz', 'a.txt', 'a.parquet'])
def test_a_file_without_a_record_is_told(tmp_path, name):
    """The message does not blame data.validation_fraction, and --mode=cache writes nothing."""
    path = write(tmp_path, name, '\n \n' if name == 'a.txt' else 'text\n')
    if name == 'a.parquet':
        pyarrow.parquet.write_table(pyarrow.table({'text': [' ']}), path)
    config = make_config(files=str(path), vocabulary='bytes', validation_fraction=0.1)
    mixture = tasks.open.open_mixture(config)
    with pytest.raises(ValueError, match=f'no document is in .*{path}') as error:
        Stream(mixture, 'train', vocabularies.ByteVocabulary(), config, batch_size=2, seed=0)
    assert 'validation_fraction' not in str(error.value)
    config.cache_dirs = str(tmp_path / 'caches')
    with pytest.raises(ValueError, match=f'no document is in .*{path}'):
        cache.cache(config)
    assert not (tmp_path / 'caches').exists()


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name in ('a.txt', 'a.txt.gz'):
        path = write(tmp_path, name, '\ufefffirst\nsecond\n')
        source = sources.open.open_source(make_config(files=str(path), validation_fraction=0.0))
        assert sorted(text for _, text in sum(epoch_documents(source), [])) == ['first', 'second']


def test_a_template_over_text_may_name_the_text(tmp_path):
    path = write(tmp_path, 'a.txt', 'one\ntwo\n')
    config = make_config(inputs='say: {text}', targets='{text}')
    examples = infer_input.FileExamples(
        str(path), config, vocabularies.ByteVocabulary(), needs_targets=False, trim=False
    )
    found = [item.fields['inputs'] for item in examples]
    assert found == ['say: one', 'say: two']
    config.files = str(path)
    records = sources.open.open_source(config).records('train')
    assert [record.fields for record in records] == [{'text': 'one'}, {'text': 'two'}]


def test_own_tasks_have_a_kind(tmp_path):
    path = write(tmp_path, 'qa.data', TABLE)
    module = tmp_path / 'own.py'
    row = "Task('qa', files={!r}, inputs='{{question}}', targets='{{answer}}', kind={!r})"
    for kind, message in (('', 'is read as lines of text'), ('xls', "task 'qa': data.kind='xls'")):
        module.write_text(f'from tasks import Task\nTASKS = [{row.format(str(path), kind)}]\n')
        with pytest.raises(ValueError, match=message):
            tasks.open.open_mixture(make_config(task='qa', module=str(module)))
    module.write_text(f'from tasks import Task\nTASKS = [{row.format(str(path), "csv")}]\n')
    opened = tasks.open.open_mixture(make_config(task='qa', module=str(module)))
    assert len(list(opened.tasks[0].source.records('train'))) > 30


def test_own_tasks_have_a_delimiter(tmp_path):
    path = write(tmp_path, 'qa.tsv', TABLE.replace(',', ';'))
    module = tmp_path / 'own.py'
    row = "Task('qa', files={!r}, inputs='{{question}}', targets='{{answer}}', delimiter={!r})"
    for delimiter, message in (
        ('', "set data.delimiter=';'"),
        ('; ', "task 'qa': data.delimiter='; '"),
    ):
        module.write_text(f'from tasks import Task\nTASKS = [{row.format(str(path), delimiter)}]\n')
        with pytest.raises(ValueError, match=message):
            tasks.open.open_mixture(make_config(task='qa', module=str(module)))
    module.write_text(f'from tasks import Task\nTASKS = [{row.format(str(path), ";")}]\n')
    opened = tasks.open.open_mixture(make_config(task='qa', module=str(module)))
    assert len(list(opened.tasks[0].source.records('train'))) > 30


def test_text_that_ends_in_zeros(tmp_path):
    """As a download does that broke off."""
    (tmp_path / 'hole.txt').write_bytes(b'words\n' * 2000 + bytes(2000))
    source = sources.open.open_source(make_config(files=f'{tmp_path}/hole.txt'))
    with pytest.raises(ValueError, match=r'line 2001 of .*hole.txt: it holds zero bytes'):
        list(epoch_documents(source, 0))


def test_a_kind_without_files_is_refused():
    with pytest.raises(ValueError, match="data.kind='csv'"):
        sources.open.open_source(make_config(kind='csv'))


def test_columns_of_one_name_in_parquet(tmp_path):
    table = pyarrow.Table.from_arrays([['a'], ['b']], names=['text', 'text'])
    path = tmp_path / 'a.parquet'
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(ValueError, match=f"{path} has the columns 'text', 'text'"):
        sources.open.open_source(make_config(files=str(path)))
    pyarrow.parquet.write_table(pyarrow.table({'text': ['a']}), tmp_path / 'a.data')
    source = sources.open.open_source(make_config(files=str(tmp_path / 'a.data'), kind='parquet'))
    assert len(list(source.records('train'))) == 1


@pytest.mark.parametrize('read', READERS)
@pytest.mark.parametrize('name', ['a.csv', 'a.jsonl.gz'])
def test_a_file_that_one_may_not_read(name, read):
    with open_folder() as folder:
        path = write(folder, name, TABLE)
        path.chmod(0)
        message = rf'{path} cannot be read \(Permission denied\): correct its permissions'
        with another_user(), pytest.raises(ValueError, match=message):
            read(path, **QA)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = write(tmp_path, 'a.txt', 'some words\n' * 100)
    source = sources.open.open_source(make_config(files=str(path)))
    path.write_text('some words\n' * 99)
    with pytest.raises(ValueError, match=f'{path} no longer has 1,100 bytes'):
        epoch_documents(source)
