"""Sources: every line once per epoch, from files of every kind; faults, names and changes."""

import csv
import gzip
import itertools
import json
import os
import shutil
import zlib

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
from corpora import (
    HUNT,
    documents_of,
    epoch_documents,
    lane_documents,
    make_config,
    source_of,
    write_shards,
    write_text_files,
)

import configs.check
import paths
import sources.deal
import sources.files
import sources.gzipped
import sources.open
import sources.pydoc
import sources.templates
import sources.text
from messages import Refused


@pytest.fixture(autouse=True)
def small_corpora_have_few_blocks(monkeypatch):
    """Each block opens its file: thousands of blocks take seconds."""
    monkeypatch.setattr(sources.deal, 'MIN_BLOCKS', 64)


def test_pydoc_is_two_megabytes_of_distinct_prose(pydoc):
    texts = [text for _, text in documents_of(pydoc)]
    size = sum(map(len, texts))
    assert 1_500_000 < size < 4_000_000 and len(texts) > 5000
    assert len(set(texts)) == len(texts) and all(text == ' '.join(text.split()) for text in texts)
    letters = sum(c.isalpha() or c == ' ' for text in texts for c in text)
    assert letters > 0.85 * size
    assert 'json.decoder.decode' in dict(documents_of(pydoc))
    assert source_of(documents_of(pydoc)[:-1]).fingerprint != pydoc.fingerprint


def test_texts_of_one_summary_are_in_one_split(monkeypatch):
    summaries = ['Return it.', 'return It', 'Open a file.', 'Close: a file!']
    documents = [(f'{i}', f'{summaries[i % 4]}\nText {i}.') for i in range(400)]
    monkeypatch.setattr(sources.pydoc, 'documents', lambda: documents)
    source = sources.open.open_source(make_config(validation_fraction=0.5))
    found = {}
    for split in ('train', 'validation'):
        for record in source.records(split):
            assert record.fields['text'] == f'{record.fields["summary"]} {record.fields["rest"]}'
            found.setdefault(record.fields['summary'], set()).add(split)
    assert len(found) == 4
    assert all(len(splits) == 1 for splits in found.values())
    assert found['Return it.'] == found['return It']
    assert set().union(*found.values()) == {'train', 'validation'}


def test_splits_are_disjoint_and_sized_as_asked(pydoc):
    train, validation = (
        {text for lane in epoch_documents(pydoc, splits=[split]) for _, text in lane}
        for split in ('train', 'validation')
    )
    assert not train & validation
    assert 0.005 < len(validation) / len(train) < 0.015
    twice = source_of([('a', 'same text'), ('b', 'same text')], validation_fraction=0.5)
    assert [] in epoch_documents(twice, num_lanes=1)


def write_random_text(folder, random):
    """Files of lines of every kind; returns {name: text} of what must be read from them."""
    expected, letters = {}, ['a', 'b ', 'é', '日', '😀', '\u2028', '\x0b', ' ']
    for number in range(random.integers(1, 5)):
        path, content = folder / f'{number}.txt', b''
        for _ in range(random.integers(0, 12)):
            size = random.choice([0, 1, 5, 200])
            text = ''.join(random.choice(letters, size))
            if text.strip():
                expected[f'{path}:{len(content)}'] = text.strip()
            content += text.encode() + random.choice([b'\n', b'\r\n', b'\n\n', b'\n \n'])
        path.write_bytes((content.rstrip(b'\n') if random.integers(2) else content) or b'\n')
    return expected


@pytest.mark.parametrize('block_bytes', [1, 3, 16, 1000])
def test_every_line_of_random_files_comes_once_per_epoch(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(sources.deal, 'MAX_BLOCK_BYTES', block_bytes)
    monkeypatch.setattr(sources.deal, 'MIN_BLOCKS', 1)
    random = np.random.default_rng(block_bytes)
    for trial in range(12):
        folder = tmp_path / str(trial)
        folder.mkdir()
        expected = write_random_text(folder, random)
        config = make_config(files=f'{folder}/*.txt', validation_fraction=0.3)
        source = sources.open.open_source(config)
        found = sum(epoch_documents(source, epoch=trial), [])
        assert sorted(found) == sorted(expected.items())


def test_files_of_another_split(tmp_path):
    train, validation = tmp_path / 'train', tmp_path / 'validation'
    train.mkdir()
    validation.mkdir()
    expected = {
        'train': write_shards(train, [40, 9]),
        'validation': write_shards(validation, [20], '.txt', start=30),  # some texts are in both
    }
    files = {'files': f'{train}/*.gz', 'validation_files': f'{validation}/*'}
    source = sources.open.open_source(make_config(**files))
    for split, documents in expected.items():
        found = sum(epoch_documents(source, splits=[split]), [])
        assert sorted(found) == sorted(documents.items())
    train_only = sources.open.open_source(make_config(files=files['files']))
    fingerprints = {source.fingerprint, train_only.fingerprint}
    assert len(fingerprints) == 2
    (validation / '00.txt').write_text('shorter')
    assert sources.open.open_source(make_config(**files)).fingerprint not in fingerprints


# Lines that are left out, or stop the run.
BAD_LINES = {
    'json': [
        b'{"text": "cut',
        b'plain words',
        b'\x0b{"text": ""}',  # no space of JSON's
        b'["text"]',
        b'{"txt": "", "url": ""}',
        b'{"text": 7}',
        b'{"text": "\\ud800"}',  # half a surrogate pair
        b'{"text": "\xff"}',
        b'{"text": ' + b'[' * 100_000,
        b'{"text": ' + b'1' * 5000 + b'}',
    ],
    'txt': [b'sch\xf6n', b'long ' * 250_000],
}
GZIP_HEADER = gzip.compress(b'')[:10]
BROKEN_GZIPS = {
    'truncated': lambda good, rest: good + gzip.compress(rest)[:-9],
    'no checksum': lambda good, rest: good[:-8],
    'crc': lambda good, rest: good[:-8] + b'\1\2\3\4' + good[-4:],
    'deflate': lambda good, rest: good + GZIP_HEADER + b'\xff' * 99,
    'garbage': lambda good, rest: good + b'garbage',
}
GOOD_LINES = {
    'txt': [b'first', b'', b'third', b'fifth'],
    'json': [b'{"text": "first"}', b'', b'{"text": "third"}', b'{"text": "fifth"}'],
}


def test_half_a_surrogate_pair_in_a_field_that_no_setting_names(tmp_path):
    """A task with a function is given all fields, others only the text."""
    path = tmp_path / 'bad.json'
    path.write_bytes(b'{"text": "first", "more": ["\\ud800"]}\n')
    config = make_config(files=str(path), validation_fraction=0.0)
    assert len(list(sources.open.open_source(config).records('train'))) == 1
    whole = sources.open.open_source(config, whole_records=True)
    with pytest.raises(Refused, match=f'line 1 of {path}'):
        list(whole.records('train'))


def check_fault(folder, kind, line, left):
    """It stops the run, or is left out, told and counted once however often it is read."""
    files = {'files': f'{folder}/*.{kind}', 'validation_fraction': 0.3}
    place = f'line {line} of {folder}/bad.{kind}: '
    with pytest.raises(Refused) as error:
        epoch_documents(sources.open.open_source(make_config(**files)))
    assert place in str(error.value) and 'data.on_bad_line' in str(error.value)
    source = sources.open.open_source(make_config(**files, on_bad_line='skip'))
    for epoch in range(2):
        texts = [text for _, text in sum(epoch_documents(source, epoch, num_lanes=2), [])]
        assert sorted(texts) == sorted([f'good {i}' for i in range(20)] + left)
    messages, count = source.faults()
    assert len(messages) == count == 1 and messages[0].startswith(place)
    assert source.faults() == ([], 1)


def write_good_file(folder, kind):
    texts = [f'good {i}' for i in range(20)]
    lines = [json.dumps({'text': text}) if 'json' in kind else text for text in texts]
    write = gzip.open if kind.endswith('.gz') else open
    with write(folder / f'good.{kind}', 'wb') as file:
        file.write('\n'.join(lines).encode())


@pytest.mark.parametrize('kind', ['txt', 'json', 'txt.gz', 'json.gz'])
def test_a_bad_line_is_named_and_stops_or_is_left_out(tmp_path, monkeypatch, kind):
    """So is the rest of a broken gzip, and an empty file."""
    monkeypatch.setattr(sources.deal, 'MIN_BLOCKS', 8)
    write_good_file(tmp_path, kind)
    bad_file = tmp_path / f'bad.{kind}'
    is_gzipped = kind.endswith('.gz')
    *good, last = GOOD_LINES[kind.removesuffix('.gz')]
    good = b''.join(line + b'\n' for line in good)
    for bad in BAD_LINES[kind.removesuffix('.gz')]:
        content = good + bad + b'\n' + last + b'\n'
        bad_file.write_bytes(gzip.compress(content) if is_gzipped else content)
        check_fault(tmp_path, kind, 4, ['first', 'third', 'fifth'])
    for broken in BROKEN_GZIPS.values() if is_gzipped else ():
        bad_file.write_bytes(broken(gzip.compress(good), last))
        check_fault(tmp_path, kind, 4, ['first', 'third'])
    for empty in (b'', gzip.compress(b'', mtime=0))[: 1 + is_gzipped]:
        bad_file.write_bytes(empty)
        check_fault(tmp_path, kind, 1, [])
    (tmp_path / f'good.{kind}').unlink()
    bad_file.write_bytes(b'')
    with pytest.raises(Refused):  # pydoc is not read instead
        sources.open.open_source(make_config(files=f'{tmp_path}/*', on_bad_line='skip'))


@pytest.mark.parametrize('size', [100, 70_000])
def test_the_line_of_a_fault_far_inside_a_file(tmp_path, size):
    lines = [b'%d ' % i + b'x' * size for i in range(40)]
    lines[33] = b'\xff'
    (tmp_path / 'a.txt').write_bytes(b'\n'.join(lines))
    with pytest.raises(Refused, match='line 34 of .*a.txt'):
        epoch_documents(sources.open.open_source(make_config(files=f'{tmp_path}/a.txt')))
    whole = gzip.compress(b'\n'.join(lines[:33]))
    half = whole[: len(whole) // 2]
    (tmp_path / 'a.txt.gz').write_bytes(half)
    line = zlib.decompressobj(31).decompress(half).count(b'\n') + 1
    with pytest.raises(Refused, match=f'line {line} of .*a.txt.gz'):
        epoch_documents(sources.open.open_source(make_config(files=f'{tmp_path}/a.txt.gz')))


@pytest.mark.parametrize('kind', ['.jsonl', '.jsonl.gz'])
def test_bad_lines_must_be_few(tmp_path, kind):
    for num_bad, fraction, allowed in [(10, 0.0, 10), (11, 0.001, 10), (30, 0.05, 30)]:
        lines = [b'{"text": "good"}'] * 2000
        for i in range(num_bad):
            lines[50 * i + 60] = b'{}'
        content = b'\n'.join(lines)
        path = tmp_path / f'a{kind}'
        path.write_bytes(gzip.compress(content) if kind.endswith('.gz') else content)
        config = make_config(files=str(path), on_bad_line='skip', max_bad_fraction=fraction)
        source = sources.open.open_source(config)
        if num_bad > allowed:
            with pytest.raises(Refused, match=f'data.max_bad_fraction={fraction}'):
                epoch_documents(source, num_lanes=1, splits=['train'])
            continue
        for epoch in range(2):
            epoch_documents(source, epoch, num_lanes=1)
        messages, count = source.faults()
        assert count == num_bad and len(messages) == 10  # the last ten are told


NAMES = [
    'plain.txt',
    './plain.txt',
    'folder/../plain.txt',
    '~/plain.txt',
    'plain.txt/',
    ' plain.txt ',
]
NAMES += ['with space é日.txt', 'a, comma.txt', 'link.txt', 'set[1].txt', 'folder[1]/*.txt']
NAMES += ['fold*/inside.txt', '*ain.txt, ,plain.txt', '**/inside.txt']


def test_names_of_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'folder[1]').mkdir()
    for path in ('plain.txt', 'with space é日.txt', 'a, comma.txt', 'set[1].txt', 'set1.txt'):
        (tmp_path / path).write_text(path)
    (tmp_path / 'folder[1]/inside.txt').write_text('plain.txt')
    (tmp_path / 'folder/other.txt').write_text('other')
    (tmp_path / 'link.txt').symlink_to('plain.txt')
    for name in NAMES:
        source = sources.open.open_source(make_config(files=name))
        [file] = source.files
        assert file.split == 'train' and os.path.isabs(file.path) and '..' not in file.path
        text = name if ' ' in name.strip() and '*' not in name or '[1].' in name else 'plain.txt'
        assert [text for _, text in documents_of(source)] == [text.strip()], name


def test_json_in_a_text_file_is_told(tmp_path, caplog):
    contents = {
        '\n{"text": "a"}\nwords\n': True,
        '{"a": 1}': True,
        'words\n{"a": 1}': False,
        '{a}': False,
    }
    for content, is_told in contents.items():
        caplog.clear()
        path = tmp_path / 'a.txt'
        path.write_text(content)
        sources.open.open_source(make_config(files=str(path)))
        assert [str(path) in message for message in caplog.messages] == [True] * is_told


def test_a_file_is_of_one_split_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'a.txt').write_text('some words')
    (tmp_path / 'soft.txt').symlink_to('a.txt')
    os.link(tmp_path / 'a.txt', tmp_path / 'hard.txt')
    shutil.copy(tmp_path / 'a.txt', tmp_path / 'copy.txt')
    for name in ('./a.txt', 'folder/../a.txt', 'soft.txt', 'hard.txt', 'copy.txt'):
        with pytest.raises(Refused, match=f'a.txt .*{name[-5:]}'):
            sources.open.open_source(make_config(files='a.txt', validation_files=name))


def test_changes_of_files_are_described(tmp_path):
    old = write_text_files(tmp_path / 'a').files
    changed = tmp_path / 'a/3.txt'
    changed.write_text(changed.read_text().replace('line 3 7', 'line 3 8', 1))  # same size
    (tmp_path / 'a/0.txt').rename(tmp_path / 'moved.txt')
    (tmp_path / 'a/1.txt').unlink()
    (tmp_path / 'a/4.txt').write_text('new')
    files = f'{tmp_path}/a/*.txt,{tmp_path}/moved.txt'
    new = sources.open.open_source(make_config(files=files)).files
    words = sources.files.describe_changes(old, new)
    for name, state in (('1', 'missing'), ('3', 'missing'), ('3', 'new'), ('4', 'new')):
        assert f'{tmp_path}/a/{name}.txt ({state} or changed)' in words
    assert 'moved' not in words and words.count(' or changed') == 4
    # Equal contents count.
    assert f'{old[0].path} (new or changed)' in sources.files.describe_changes(old, [*old, old[0]])


def test_large_files_are_sampled(tmp_path):
    path = tmp_path / 'a.txt'
    size = 3_000_001
    content = bytearray(os.urandom(size))
    digests = set()
    seen = [0, 4095, size - 4096, size - 1, (size - 4096) // 15, 14 * (size - 4096) // 15 + 4095]
    for place in (None, *seen):
        changed = bytearray(content)
        if place is not None:
            changed[place] ^= 1
        path.write_bytes(changed)
        digests.add(sources.files.content_digest(str(path), paths.FileStatus(size)))
    assert len(digests) == 1 + len(seen)
    path.write_bytes(content[: size - 1])
    assert sources.files.content_digest(str(path), paths.FileStatus(size - 1)) not in digests
    found = set()
    for _ in range(2):  # all of a small file counts
        path.write_bytes(content[: 1 << 20])
        found.add(sources.files.content_digest(str(path), paths.FileStatus(1 << 20)))
        content[500_000] ^= 1
    assert len(found) == 2


@pytest.fixture
def small_pools(monkeypatch):
    monkeypatch.setattr(sources.gzipped, 'POOL_LINES', 60)
    monkeypatch.setattr(sources.gzipped, 'MIN_POOL_LINES', 4)


SHARD_SIZES = [40, 3, 1, 77, 250, 12, 0, 31, 18]


@pytest.mark.parametrize(
    'num_lanes, copies', [(1, 1), (1, 4), (2, 4), (4, 1), (8, 1), (9, 1), (10, 1), (15, 1), (40, 1)]
)
def test_every_line_of_shards_comes_once_per_epoch(tmp_path, small_pools, num_lanes, copies):
    """Lanes that share shards, in whatever order they read, divide the lines among them."""
    expected = write_shards(tmp_path, SHARD_SIZES * copies)  # in one round or several
    config = make_config(files=f'{tmp_path}/*', validation_fraction=0.0, on_bad_line='skip')
    source = sources.open.open_source(config)
    random = np.random.default_rng(num_lanes)
    orders = []
    for epoch in range(3):
        alone = epoch_documents(source, epoch, num_lanes, splits=['train'], seed=5)
        orders.append(sum(alone, []))
        assert sorted(orders[-1]) == sorted(expected.items())
        reading = {
            lane: lane_documents(source, 'train', epoch, lane, num_lanes, 5)
            for lane in range(num_lanes)
        }
        found = [[] for _ in range(num_lanes)]
        while reading:
            lane = int(random.choice(list(reading)))
            documents = list(itertools.islice(reading[lane], int(random.integers(1, 60))))
            found[lane] += [(name, text) for *_, name, text in documents]
            if not documents:
                del reading[lane]
        assert found == alone
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize('kind', ['.txt', '.jsonl.gz'])
def test_a_lane_goes_on_from_any_document(tmp_path, small_pools, kind):
    write_shards(tmp_path, [40, 33, 40, 31], kind)
    source = sources.open.open_source(make_config(files=f'{tmp_path}/*'))
    for lane, num_lanes in [(0, 1), (1, 2), (0, 8), (7, 8)]:
        documents = list(lane_documents(source, 'train', 2, lane, num_lanes, 7))
        assert len({pool for pool, *_ in documents}) > 2 or num_lanes == 8
        for i, (pool, offset, *_) in enumerate(documents):
            for more in (0, 1):
                rest = lane_documents(source, 'train', 2, lane, num_lanes, 7, pool, offset + more)
                assert list(rest) == documents[i + more :]


# Tables and templates.

ANSWERS = ['one', 'a, b', 'say "so"', 'two\nlines', '']
ROWS = [{'question': f'what is {i}?', 'answer': ANSWERS[i % 5], 'n': i} for i in range(300)]
QA = {'inputs': 'question: {question} n: {n}', 'targets': '{answer}'}


def write_table(path, rows=ROWS, names=('n', 'question', 'answer')):
    """Write rows as a user's tools do: csv.writer, or JSON Lines."""
    open_file = gzip.open if path.name.endswith('.gz') else open
    with open_file(path, 'wt', newline='', encoding='utf-8') as file:
        if '.jsonl' in path.name:
            file.writelines(json.dumps(row) + '\n' for row in rows)
            return
        if '.tsv' in path.name:
            file.write('\t'.join(names) + '\n')
            for row in rows:
                file.write('\t'.join(str(row[name]).replace('\n', ' ') for name in names) + '\n')
            return
        writer = csv.DictWriter(file, names, lineterminator='\r\n')
        writer.writeheader()
        writer.writerows({name: row[name] for name in names} for row in rows)


@pytest.mark.parametrize('suffix', ['.csv', '.tsv', '.jsonl', '.csv.gz', '.tsv.gz', '.jsonl.gz'])
@pytest.mark.parametrize('min_blocks', [1, 4096])
def test_tables_and_json_give_the_same_records(tmp_path, monkeypatch, suffix, min_blocks):
    """Quoted commas, quotes and newlines; blocks that begin anywhere."""
    monkeypatch.setattr(sources.deal, 'MIN_BLOCKS', min_blocks)
    write_table(tmp_path / f'a{suffix}')
    write_table(tmp_path / f'b{suffix}', rows=ROWS[:1])
    source = sources.open.open_source(
        make_config(files=f'{tmp_path}/*', validation_fraction=0.0, **QA)
    )
    found = []
    for lane in range(3):
        share = sources.Share(seed=0, epoch=0, lane=lane, num_lanes=3)
        for document in source.documents('train', share):
            found.append(document.record.fields)
    newline = ' ' if '.tsv' in suffix else '\n'
    expected = []
    for row in [*ROWS, ROWS[0]]:
        expected.append(row | {'n': str(row['n']), 'answer': row['answer'].replace('\n', newline)})
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_a_template_may_hold_braces():
    template = sources.templates.Template('data.inputs', '{{{a}}} {b c}{a}')
    assert template.fill({'a': '{1}', 'b c': '2'}) == '{{1}} 2{1}'


def test_a_column_may_have_any_name(tmp_path):
    names = ['label:0', ':', 'ok?!', '!r', 'x!s:>9', 'set{a}', 'set{}', 'rdf/a:b']
    row = {name: f'value {i}' for i, name in enumerate(names)}
    write_table(tmp_path / 'a.csv.gz', [row], names)
    write_table(tmp_path / 'a.jsonl', [row])
    pq.write_table(pyarrow.Table.from_pylist([row]), tmp_path / 'a.parquet')
    text = ' '.join(f'{{{name}}}' for name in [*names, 'set{{a}}'])
    for file in tmp_path.iterdir():
        config = make_config(files=str(file), inputs=text, references='{set{a}}')
        config.validation_fraction = 0.0
        configs.check.check_value('data.references', config.references)
        [record] = sources.open.open_source(config).records('train')
        filled = sources.templates.templates_of(config)['inputs'].fill(record.fields)
        assert filled == ' '.join([*row.values(), row['set{a}']])
    for text in ('{', '}', '{a', 'a}', '{}', '{{}', '{a{}', '{a}}', '{a{b}'):
        with pytest.raises(Refused, match='data.inputs='):
            sources.templates.Template('data.inputs', text)


@pytest.mark.parametrize('suffix', ['.jsonl', '.csv.gz', '.parquet'])
def test_files_of_the_split_test(tmp_path, suffix):
    """Training knows nothing of them: its fingerprint, files and records are the same without."""
    test = tmp_path / f'test{suffix}'
    rows = [{'question': f'what is {i}?', 'answer': f'it is {i}', 'n': str(i)} for i in range(30)]
    if suffix == '.parquet':
        pq.write_table(pyarrow.Table.from_pylist(rows), test)
    else:
        write_table(test, rows)
    write_table(tmp_path / 'train.csv')
    train = str(tmp_path / 'train.csv')
    alone = sources.open.open_source(make_config(test_files=str(test), **QA))
    with_test = sources.open.open_source(make_config(files=train, test_files=str(test), **QA))
    for source in (alone, with_test):
        found = [record.fields for record in source.records('test')]
        assert sorted(found, key=str) == sorted(rows, key=str)
    without = sources.open.open_source(make_config(files=train, **QA))
    assert not without.may_hold('test')
    assert (with_test.fingerprint, with_test.files) == (without.fingerprint, without.files)
    for split in ('train', 'validation'):
        assert list(with_test.records(split)) == list(without.records(split))


# Values in objects and lists.


def test_values_in_objects_and_lists(tmp_path):
    config = make_config(
        files=str(HUNT / 'hf_translation.jsonl'),
        inputs='{translation/en}',
        targets='{translation/ro}',
        validation_fraction=0.0,
    )
    lines = (HUNT / 'hf_translation.jsonl').read_text().splitlines()
    pairs = [tuple(json.loads(line)['translation'].values()) for line in lines]
    records = sources.open.open_source(config).records('train')
    assert [tuple(record.fields.values()) for record in records] == pairs
    file = tmp_path / 'a.jsonl'
    file.write_text('{"a": {"b": [[1, 2.5], "x"]}, "a/b/1": "the name itself"}\n')
    config = make_config(files=str(file), inputs='{a/b/0/1}', targets='{a/b/1}')
    config.validation_fraction = 0.0
    [record] = sources.open.open_source(config).records('train')
    assert record.fields == {'a/b/0/1': '2.5', 'a/b/1': 'the name itself'}


def test_a_slot_that_no_record_fills_is_the_templates_error(tmp_path):
    """Also where bad lines are skipped."""
    for field in ('translation/de', 'translation', 'translation/en/0', 'text'):
        config = make_config(inputs='{translation/en}', targets=f'{{{field}}}')
        config.files = str(HUNT / 'hf_translation.jsonl')
        for config.on_bad_line in ('stop', 'skip'):
            with pytest.raises(Refused, match=f"'{field}'.*'translation/en', 'translation/ro'"):
                list(sources.open.open_source(config).records('train'))
