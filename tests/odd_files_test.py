"""Files that are not what their names say: each is refused once, and odd forms that are right are read."""

import bz2
import csv
import gzip
import io
import json
import lzma
import pathlib

import pytest
from corpora import LFS_POINTER, epoch_documents, make_config
from permissions import another_user, open_folder

import sources.deal
import sources.open
import sources.tables
import tasks.open
import vocabulary as vocabularies
from messages import Refused
from modes import infer_input

HUNT = pathlib.Path(__file__).parent / 'golden' / 'hunt'
QA = {'inputs': '{question}', 'targets': '{answer}'}
TABLE = 'question,answer\n' + ''.join(f'q{i},a{i}\n' for i in range(40))
JSON = [{'question': f'q{i}', 'answer': f'a{i}'} for i in range(40)]
LINES = '\n'.join(map(json.dumps, JSON))
PAIRS = sorted((f'q{i}', f'a{i}') for i in range(40))


def train(path, **settings):
    """The (question, answer) pairs that training reads."""
    config = make_config(files=str(path), validation_fraction=0.0, **settings)
    source = tasks.open.open_mixture(config).tasks[0].source
    fields = [record.fields for record in source.records('train')]
    return sorted((each['question'], each['answer']) for each in fields)


def infer(path, **settings):
    """The pairs that --mode=infer reads of --input."""
    config = make_config(**settings)
    config.lengths.inputs = config.lengths.targets = 1 << 20
    examples = examples_of(path, config)
    return sorted((item.fields['inputs'], item.fields['targets']) for item in examples)


def examples_of(path, config):
    vocabulary = vocabularies.ByteVocabulary()
    return infer_input.FileExamples(str(path), config, vocabulary, needs_targets=False, trim=False)


def write(folder, name, content):
    """Write a file, gzipped if its name says so. Return its path."""
    if isinstance(content, str):
        content = content.encode()
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
    return path


# 8 MB: a reader that begins again at every line takes hours.
LONG_TABLE = b'question,answer\n' + b'some words,an answer\n' * 400_000
# For each file its content, the line that the message names, and settings.
ODD = {
    'my.csv.txt': (TABLE, None, {}),
    'twice.csv': ('question,answer,question \na,b,c\n', 1, {}),
    'twice.tsv.gz': ('question\tanswer\tn\tn\na\tb\tc\td\n', 1, {}),
    'header.csv.gz': ('question,"answer\na,b\n' * 99, 1, {}),
    'row.csv': (TABLE + 'q,"a\n' + 'q,a\n' * 99, 42, {}),
    'row.csv.gz': (TABLE + 'q,"a\n' + 'q,a\n' * 99, 42, {}),
    'long row.csv': (LONG_TABLE.replace(b's,an', b's,"an', 1), 2, {}),
    'latin.csv': ('frage,antwört\n'.encode('latin-1'), 1, {}),
    'no header.tsv': ((HUNT / 'headerless.tsv').read_bytes(), None, {}),
    'semicolons.csv': (TABLE.replace(',', ';'), None, {}),
    'quote.csv': (TABLE + 'q,a 5" pipe\nq,a\n', 42, {}),
    'return.csv.gz': (TABLE + 'q,a\rq,a\n', 42, {}),
    'quoted.csv': (TABLE.replace('question,answer', '"question";"answer"'), 1, {}),
    'quoted tab.tsv': ('question\tanswer\n"a\tb"\tc\n', 2, {}),
    'mac.csv': (TABLE.replace('\n', '\r'), None, {}),
    'indented.json.gz': (json.dumps(JSON[0], indent=1), None, {}),
    'list.data': (json.dumps(JSON), None, {'kind': 'jsonl'}),
    'zip.jsonl': (b'PK\x03\x04' + bytes(99), None, {}),
    'parquet.csv': (b'PAR1' + bytes(99), None, {}),
    'gzipped.data': (gzip.compress(TABLE.encode()), None, {'kind': 'tsv'}),
    'pointer.jsonl': (LFS_POINTER, None, {}),
    **{f'level {n}.tsv': (bz2.compress(TABLE.encode(), n), None, {}) for n in range(1, 10)},
    'none.txt': (bz2.compress(b''), None, {}),
    'a.csv': (lzma.compress(TABLE.encode(), lzma.FORMAT_ALONE), None, {}),
    'b.jsonl': (lzma.compress(LINES.encode(), lzma.FORMAT_ALONE, preset=0), None, {}),
    'a.tar.gz': (b'a.csv'.ljust(257, b'\0') + b'ustar\x0000', None, {}),
    'a.pdf': (b'%PDF-1.7\n', None, {}),
    'utf-16.csv': (TABLE.encode('utf-16'), None, {}),
    'utf-16be.jsonl': (json.dumps(JSON[0]).encode('utf-16-be'), None, {}),
    'hole.txt': (b'words\n' * 2000 + bytes(2000), 2001, {'inputs': '', 'targets': ''}),
    'null.jsonl': (LINES.replace('"q7"', 'null'), 8, {}),
    'infinite.jsonl': (LINES.replace('"a7"', '1e999'), 8, {}),
    'delimiter.txt': (TABLE, None, {'delimiter': 'tab'}),
}  # fmt: skip


def test_files_that_are_not_what_their_names_say(tmp_path):
    """The message names the file and, if one is wrong, the line."""
    for name, (content, line, settings) in ODD.items():
        path = write(tmp_path, name, content)
        with pytest.raises(Refused) as error:
            train(path, **QA | settings)
        message = str(error.value)
        assert str(path) in message and '\n' not in message, name
        assert 'level' not in name or 'compressed by bzip2' in message, message
        assert line is None or f'line {line} of ' in message, message


LONG = 'x' * 1_000_000
EVEN = {
    'qa.data': (TABLE, {'kind': 'csv'}, PAIRS),
    'qa.txt.gz': (TABLE, {'kind': 'csv'}, PAIRS),
    'qa.csv': (TABLE.replace(',', '\t'), {'kind': 'tsv'}, PAIRS),
    'qa.1': (LINES, {'kind': 'jsonl'}, PAIRS),
    'windows.csv': (TABLE.replace('\n', '\r\n').removesuffix('\r\n'), {}, PAIRS),
    'bom.csv': ('\ufeff' + TABLE, {}, PAIRS),
    'joined.jsonl': ('\ufeff' + LINES[:99].replace('\n', '\n\ufeff') + LINES[99:], {}, PAIRS),
    'joined.tsv': (TABLE.replace(',', '\t').replace('\n', '\n\ufeff').rstrip('\ufeff'), {}, PAIRS),
    'bom.jsonl.gz': ('\ufeff' + LINES, {}, PAIRS),
    'spaces.csv': (TABLE.replace(',', ' , ').replace('a5', ' "a5"'), {}, PAIRS),
    'no names.csv': (TABLE.replace('\n', ',,\n'), {}, PAIRS),
    'long.csv.gz': (TABLE + f'long,"{LONG}"\n', {}, sorted([*PAIRS, ('long', LONG)])),
    'long.tsv': (TABLE.replace(',', '\t') + f'long\t{LONG}', {}, sorted([*PAIRS, ('long', LONG)])),
    'numbers.jsonl': ('{"question": 7, "answer": 0.5, "n": [NaN, {"x": -Infinity}]}', {}, [('7', '0.5')]),
    'literals.jsonl.gz': (
        '{"question": 2.50, "answer": -0}\n{"question": -0.0E+3, "answer": 98765432109876543210}\n'
        '{"question": 0.1234567890123456789, "answer": true}',
        {},
        [('-0.0E+3', '98765432109876543210'), ('0.1234567890123456789', 'true'), ('2.50', '-0')],
    ),
}  # fmt: skip
# As csv.writer, pandas and Excel write them.
NAMES = ['question', 'answer']
ROWS = [NAMES, ['Say "hi"', 'a;b'], ['tab\there', '"'], ['two\nlines', 'a'], ['b', 'x']]
ROWS += [[f'q{i}', f'a{i}'] for i in range(9)]
DIALECTS = {
    'excel.tsv': ('tab', {'dialect': 'excel-tab'}),
    'excel.tsv.gz': ('\t', {'dialect': 'excel-tab', 'lineterminator': '\n'}),
    'all.tsv': ('\\t', {'delimiter': '\t', 'quoting': csv.QUOTE_ALL}),
    'semicolons.csv': (';', {'delimiter': ';'}),
    'commas.csv': (',', {}),
}  # fmt: skip


def table_of(rows, **options):
    file = io.StringIO(newline='')
    csv.writer(file, **options).writerows(rows)
    return file.getvalue()


@pytest.mark.parametrize('read', [train, infer])
def test_files_whose_form_is_odd_are_read(tmp_path, caplog, read):
    for name, (content, settings, expected) in EVEN.items():
        assert read(write(tmp_path, name, content), **QA, **settings) == expected, name
    for name, (delimiter, options) in DIALECTS.items():
        path = write(tmp_path, name, table_of(ROWS, **options))
        assert read(path, delimiter=delimiter, **QA) == sorted(map(tuple, ROWS[1:])), name
    assert not caplog.records


def test_numbers_that_json_does_not_have_are_missing(tmp_path):
    content = LINES.replace('"a7"', 'NaN').replace('"a8"', '-Infinity').replace('"a9"', 'null')
    path = write(tmp_path, 'a.jsonl', content)
    left_out = {(f'q{i}', f'a{i}') for i in (7, 8, 9)}
    assert train(path, on_bad_line='skip', **QA) == sorted(set(PAIRS) - left_out)
    source = sources.open.open_source(make_config(files=str(path)), whole_records=True)
    assert [x.fields['answer'] for x in source.records('train')].count(None) == 3
    source = sources.open.open_source(
        make_config(files=str(write(tmp_path, 'c.jsonl', '{"answer": [6.0e1, -0]}'))),
        whole_records=True,
    )
    [x, zero] = next(source.records('train')).fields['answer']
    assert (f'{x} {zero}', x, zero) == ('6.0e1 -0', 60, 0)  # to own tasks, numbers
    content = '{"inputs": "q", "targets": NaN, "n": NaN}\n{"inputs": "r"}\n'
    examples = list(examples_of(write(tmp_path, 'b.jsonl', content), make_config()))
    assert [example.targets for example in examples] == [None, None]
    assert examples[0].fields == {'inputs': 'q', 'targets': None, 'n': None}


def test_other_splits_have_the_delimiter(tmp_path):
    settings = {'delimiter': ';', **QA}
    names = {}
    for i, name in enumerate(('files', 'validation_files', 'test_files')):
        content = table_of([*ROWS, [i, i]], delimiter=';')
        names[name] = str(write(tmp_path, f'{i}.tsv', content))
    source = sources.open.open_source(make_config(**names, **settings))
    for split, last in (('validation', '1'), ('test', '2')):
        found = [record.fields['question'] for record in source.records(split)]
        assert found == [*(row[0] for row in ROWS[1:]), last]


def test_another_delimiter_is_another_text(tmp_path):
    """A run may not continue with it, whatever it was called."""
    path = write(tmp_path, 'a.tsv', 'text\none\ntwo\n')
    fingerprints = []
    for delimiter in ('', ';', 'tab', '\t', '\\t'):
        source = sources.open.open_source(make_config(files=str(path), delimiter=delimiter))
        fingerprints.append(source.fingerprint)
    assert len(set(fingerprints[:3])) == 3 and len(set(fingerprints[2:])) == 1


def test_the_rows_of_random_blocks(tmp_path, monkeypatch):
    """Each row is in one block, however quotes and line ends lie; a row that is too long counts as its lines."""
    answers = ['a', 'b\nc', '"', '\n\n', 'd,"\n"']
    rows = [(f'q{i}', f'{answers[i % 5]}{i}') for i in range(200)]
    path = write(tmp_path, 'a.csv', table_of([NAMES, *rows], lineterminator='\n'))
    monkeypatch.setattr(sources.deal, 'MIN_BLOCKS', 1)
    for block_bytes in (1, 5, 64, 10_000):
        monkeypatch.setattr(sources.deal, 'MAX_BLOCK_BYTES', block_bytes)
        assert train(path, **QA) == sorted((question, answer.strip()) for question, answer in rows)
    monkeypatch.setattr(sources.tables, 'MAX_ROW_BYTES', 100)
    lines = [f'q{i},a{i}' for i in range(60)]
    lines[20] = 'q20,"a20'
    found = sorted((f'q{i}', f'a{i}') for i in range(20))
    path = write(tmp_path, 'b.csv', '\n'.join(['question,answer', *lines]))
    for block_bytes in (1, 64):
        monkeypatch.setattr(sources.deal, 'MAX_BLOCK_BYTES', block_bytes)
        assert train(path, on_bad_line='skip', max_bad_fraction=1.0, **QA) == found


def test_a_template_over_text_may_name_the_text(tmp_path):
    """A byte order mark is no text."""
    path = write(tmp_path, 'a.txt', '\ufeffone\ntwo\n')
    config = make_config(inputs='say: {text}', targets='{text}', files=str(path))
    found = [item.fields['inputs'] for item in examples_of(path, config)]
    assert found == ['say: one', 'say: two']
    records = sources.open.open_source(config).records('train')
    assert [record.fields for record in records] == [{'text': 'one'}, {'text': 'two'}]


def test_a_file_that_one_may_not_read_or_that_shrinks(tmp_path):
    with open_folder() as folder:
        path = write(folder, 'a.csv', TABLE)
        path.chmod(0)
        with another_user(), pytest.raises(PermissionError, match=str(path)):
            train(path, **QA)
    path = write(tmp_path, 'a.txt', 'some words\n' * 100)
    source = sources.open.open_source(make_config(files=str(path)))
    path.write_text('some words\n' * 99)
    with pytest.raises(Refused, match=str(path)):
        epoch_documents(source)
