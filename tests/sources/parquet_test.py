"""Parquet: every row once per epoch, from row groups of every size; types, damage and bounds."""

import datetime
import gzip
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import HUNT, epoch_documents, make_config

import sources.deal
import sources.open
import sources.parquet
from messages import Refused
from sources import parquet as parquet_source

QA = {'inputs': 'question: {question} n: {n}', 'targets': '{answer}'}
TEXT_TYPES = {
    'string': pa.string(),
    'large_string': pa.large_string(),
    'string_view': pa.string_view(),
    'binary': pa.binary(),
    'dictionary': pa.dictionary(pa.int32(), pa.string()),
}


def write(path, columns, group_rows=1000, **options):
    """Write {name: values or an array} with `group_rows` rows in a row group."""
    pq.write_table(pa.table(columns), path, row_group_size=group_rows, **options)


def texts_of(source, epoch=0, num_lanes=3):
    return [text for _, text in sum(epoch_documents(source, epoch, num_lanes), [])]


def records_of(source, num_lanes=3):
    """The fields of all records of an epoch."""
    found = []
    for lane in range(num_lanes):
        share = sources.Share(seed=0, epoch=0, lane=lane, num_lanes=num_lanes)
        for document in source.documents('train', share):
            found.append(document.record.fields)
    return found


@pytest.mark.parametrize('kind', TEXT_TYPES)
@pytest.mark.parametrize('min_blocks', [1, 16, 4096])
def test_every_row_comes_once_per_epoch(tmp_path, monkeypatch, kind, min_blocks):
    """From a file of one row, and files with row groups of 1, 7 and 1,000 rows."""
    monkeypatch.setattr(sources.deal, 'MIN_BLOCKS', min_blocks)
    sizes = {'a': (1, 1), 'b': (60, 7), 'c': (5, 1), 'd': (64, 1000)}
    expected = []
    for name, (num_rows, group_rows) in sizes.items():
        texts = [f'{name} {i % 10} é日' for i in range(num_rows)]
        column = pa.array([text.encode() for text in texts], pa.binary())
        path = tmp_path / f'{name}.parquet'
        try:
            if kind != 'binary':
                column = pa.array(texts).cast(TEXT_TYPES[kind])
            write(path, {'id': range(num_rows), 'text': column}, group_rows)
        except pa.ArrowNotImplementedError:
            pytest.skip(f'this pyarrow writes no {kind}')
        expected += [(f'{path}:{row}', text) for row, text in enumerate(texts, start=1)]
    source = sources.open.open_source(make_config(files=f'{tmp_path}/*', validation_fraction=0.3))
    for epoch in range(2):
        assert sorted(sum(epoch_documents(source, epoch), [])) == sorted(expected)
    assert epoch_documents(source, 0) != epoch_documents(source, 1)


def test_parquet_gives_the_records_that_json_gives(tmp_path):
    """Numbers as JSON writes them: a float32 without the digits that it does not have."""
    rows = [{'question': f' q {i} ', 'answer': i / 8, 'n': i % 3 == 0} for i in range(40)]
    rows += [{'question': 'x', 'answer': answer, 'n': 2**40} for answer in (3.8, 1e-9, 1e30, -0.0)]
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    for dtype in (pa.float32(), pa.float64()):
        columns = {name: [row[name] for row in rows] for name in ('question', 'answer')}
        columns['answer'] = pa.array(columns['answer'], dtype)
        columns['n'] = [int(row['n']) for row in rows]
        columns['nested'] = [{'x': [1, 2]} for _ in rows]  # is not read
        write(tmp_path / f'{dtype}.parquet', columns)
    (tmp_path / 'b.jsonl').write_text(
        ''.join(json.dumps({**row, 'n': int(row['n'])}) + '\n' for row in rows)
    )
    expected = {}
    for name in ('b.jsonl', 'float.parquet', 'double.parquet'):
        config = make_config(files=f'{tmp_path}/{name}', validation_fraction=0.0, **QA)
        found = records_of(sources.open.open_source(config))
        expected.setdefault('fields', sorted(map(str, found)))
        assert sorted(map(str, found)) == expected['fields'], name
    assert len(expected['fields']) == 44 and "'answer': '3.8'" in str(expected)


def test_numbers_beside_gaps_are_those_of_the_file(tmp_path):
    """pandas stores integers beside a gap as floats, those of its type Int64 as integers."""
    columns = {
        'float': [1.0, None, float('nan'), -0.0],
        'integer': [2**60, None, None, 0],
        'repeated': pa.array([1.0, None, None, 1.0]).dictionary_encode(),
    }
    write(tmp_path / 'a.parquet', {'q': ['a', 'b', 'c', 'd'], **columns}, group_rows=1)
    settings = {'inputs': '{q}', 'targets': '{float} {integer} {repeated}'}
    config = make_config(files=f'{tmp_path}/*', validation_fraction=0.0, **settings)
    config.on_bad_line = 'skip'
    source = sources.open.open_source(config)
    found = [tuple(record.fields.values()) for record in source.records('train')]
    assert sorted(found) == [('a', '1.0', str(2**60), '1.0'), ('d', '-0.0', '0', '1.0')]
    assert source.faults()[1] == 2
    whole = sources.open.open_source(config, whole_records=True)
    found = [json.dumps(record.fields) for record in whole.records('train')]
    gap = '"float": null, "integer": null, "repeated": null}'
    assert sorted(found) == [
        f'{{"q": "a", "float": 1.0, "integer": {2**60}, "repeated": 1.0}}',
        f'{{"q": "b", {gap}',
        f'{{"q": "c", {gap}',
        '{"q": "d", "float": -0.0, "integer": 0, "repeated": 1.0}',
    ]


def test_lanes_share_decoded_row_groups(tmp_path, monkeypatch):
    """A corpus of many windows: each row group is decoded once, and few are kept."""
    monkeypatch.setattr(sources.deal, 'MAX_BLOCK_BYTES', 200)
    monkeypatch.setattr(sources.parquet, 'WINDOW_BYTES', 20_000)
    monkeypatch.setattr(parquet_source, 'MAX_CACHED_BYTES', 80_000)
    texts = [f'{i} ' * 10 for i in range(6000)]
    write(tmp_path / 'a.parquet', {'text': texts}, 100, use_dictionary=False)
    source = sources.open.open_source(make_config(files=f'{tmp_path}/*', validation_fraction=0.0))
    lanes = []
    for lane in range(8):
        share = sources.Share(seed=0, epoch=0, lane=lane, num_lanes=8)
        lanes.append(source.documents('train', share))
    found = []
    for documents in itertools.zip_longest(*lanes):  # in step, as batches read them
        found += [document.record.fields['text'] for document in documents if document]
    cache = source.train.decode.cache_info()
    assert cache.currsize < 30
    assert 60 <= cache.misses < 1.2 * 60
    assert sorted(found) == sorted(text.strip() for text in texts)
    num_blocks = source.train.num_blocks
    first, second = [source.train.order(num_blocks, 0, epoch) for epoch in range(2)]
    assert sorted(first) == sorted(second) == list(range(num_blocks))
    assert not np.array_equal(first, second)


# Columns, settings, and what the message names beside the file.
NOT_READ = [
    ({'txt': ['a'], 'id': [1]}, {}, "'text'"),
    ({'question': ['a'], 'n': [1]}, QA, "'answer'"),
    ({'text': [1, 2]}, {}, "'text'"),
    ({'text': [['a'], []]}, {}, "'text'"),
    ({'text': [{'a': 'b'}]}, {}, "'text'"),
    ({'text': pa.array([1], pa.timestamp('us'))}, {}, "'text'"),
    ({'text': ['a', None]}, {}, 'row 2'),
    ({'question': ['a'], 'n': pa.array([None], pa.int64()), 'answer': ['b']}, QA, 'row 1'),
    ({'text': pa.array([b'a', b'sch\xf6n'])}, {}, 'row 2'),
    ({'text': pa.array([], pa.string())}, {}, 'row 1'),
]


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / 'a.parquet'
    for columns, settings, part in NOT_READ:
        write(path, columns)
        with pytest.raises(Refused) as error:
            texts_of(sources.open.open_source(make_config(files=str(path), **settings)))
        message = str(error.value)
        assert str(path) in message and part in message and '\n' not in message
    table = pa.Table.from_arrays([['a'], ['b']], names=['text', 'text'])
    pq.write_table(table, path)
    with pytest.raises(Refused, match=str(path)):
        sources.open.open_source(make_config(files=str(path)))
    struct = pa.struct([('text', pa.string()), ('day', pa.date32())])
    write(path, {'a': pa.array([{'text': 'x', 'day': 10**9}], struct)})  # beyond Python's dates
    with pytest.raises(Refused, match=f'row 1 of {path}'):
        list(sources.open.open_source(make_config(files=str(path)), True).records('train'))
    monkeypatch.setattr(parquet_source, 'MAX_GROUP_BYTES', 10_000)
    write(path, {'text': [f'{i} ' * 100 for i in range(100)], 'id': range(100)})
    with pytest.raises(Refused, match=f'{path}: row group 1 '):
        sources.open.open_source(make_config(files=str(path)))
    config = make_config(
        files=str(path), inputs='', targets='{id}'
    )  # the columns that are read count
    assert len(records_of(sources.open.open_source(config))) > 90


# {damage: the row, the rows that are left}
DAMAGE = {
    'cut': (lambda content: content[:-100], 1, 0),
    'not Parquet': (lambda content: b'words' * 100, 1, 0),
    'a flipped byte': (lambda content: content.replace(b'row 40', b'row 4x', 1), 31, 70),
}


@pytest.mark.parametrize('kind', DAMAGE)
def test_a_damaged_file_stops_or_is_left_out(tmp_path, kind):
    """A flipped byte costs its row group; it is found by the checksums of the pages."""
    damage, row, num_left = DAMAGE[kind]
    write(tmp_path / 'good.parquet', {'text': [f'good {i}' for i in range(20)]})
    bad = tmp_path / 'bad.parquet'
    texts = [f'row {i}' for i in range(100)]
    write(bad, {'text': texts}, 30, compression='none', write_page_checksum=True)
    bad.write_bytes(damage(bad.read_bytes()))
    files = {'files': f'{tmp_path}/*', 'validation_fraction': 0.0}
    with pytest.raises(Refused, match=rf'data.on_bad_line.*row {row} of {bad}') as error:
        texts_of(sources.open.open_source(make_config(**files)))
    assert '\n' not in str(error.value)
    config = make_config(**files, on_bad_line='skip', max_bad_fraction=1.0)
    source = sources.open.open_source(config)
    for epoch in range(2):
        assert len(texts_of(source, epoch)) == 20 + num_left
    # 1 for a file that is not Parquet
    assert source.faults()[1] == (100 - num_left if num_left else 1)
    whole = sources.open.open_source(config, whole_records=True)
    assert len(records_of(whole)) == 20 + num_left


def test_whole_records_have_the_same_columns_in_all_files(tmp_path):
    write(tmp_path / 'a.parquet', {'q': ['q'], 'a': ['a'], 'extra': ['x']})
    numbers = [str(i) for i in range(1000)]
    config = make_config(files=f'{tmp_path}/*', validation_fraction=0.0)
    for more in ({}, {'extra': [datetime.date(2026, 1, 1)] * 1000}):
        write(tmp_path / 'b.parquet', {'q': numbers, 'a': numbers, **more})
        with pytest.raises(Refused, match=r"b.parquet .*'extra'"):
            sources.open.open_source(config, whole_records=True)
    config.files = f'{tmp_path}/a.parquet'
    source = sources.open.open_source(config, whole_records=True)
    assert records_of(source) == [{'q': 'q', 'a': 'a', 'extra': 'x'}]


def test_a_column_without_values_in_the_smallest_file(tmp_path):
    """Arrow writes it with the type null; the others have texts there."""
    write(tmp_path / 'a.parquet', {'q': ['one'], 'extra': pa.array([None])})
    write(tmp_path / 'b.parquet', {'q': ['two', 'three'], 'extra': ['x', 'y']})
    config = make_config(files=f'{tmp_path}/*', validation_fraction=0.0)
    source = sources.open.open_source(config, whole_records=True)
    found = {record['q']: record.get('extra') for record in records_of(source)}
    assert found == {'one': None, 'two': 'x', 'three': 'y'}


@pytest.mark.parametrize('encoding', ['DELTA_BYTE_ARRAY', 'DELTA_LENGTH_BYTE_ARRAY'])
def test_delta_encodings(tmp_path, encoding):
    texts = [f'text {i}' for i in range(50)]
    options = {'use_dictionary': False, 'column_encoding': {'text': encoding}}
    write(tmp_path / 'a.parquet', {'text': texts}, 20, **options)
    source = sources.open.open_source(make_config(files=f'{tmp_path}/*', validation_fraction=0.0))
    assert sorted(texts_of(source)) == sorted(texts)


def test_kinds_that_do_not_mix(tmp_path):
    write(tmp_path / 'a.parquet', {'text': ['a']})
    (tmp_path / 'b.txt').write_text('b')
    (tmp_path / 'b.txt.gz').write_bytes(gzip.compress(b'other'))
    (tmp_path / 'c.parquet.gz').write_bytes(gzip.compress((tmp_path / 'a.parquet').read_bytes()))
    for names in (['a.parquet', 'b.txt'], ['b.txt', 'b.txt.gz'], ['c.parquet.gz']):
        with pytest.raises(Refused) as error:
            sources.open.open_source(make_config(files=','.join(f'{tmp_path}/{x}' for x in names)))
        assert all(f'{tmp_path}/{name}' in str(error.value) for name in names)
    source = sources.open.open_source(
        make_config(files=f'{tmp_path}/a.*', validation_files=f'{tmp_path}/b.txt')
    )
    assert sorted(texts_of(source)) == ['a', 'b']


# Structs and lists, as data sets have them on the Hugging Face hub.


def test_kinds_of_structs_and_lists(tmp_path):
    """As JSON Lines with the same values: bytes that are no text are a bad row, NaN is null."""
    rows = [
        {'a': {'b': [{'c': 'é'}, {'c': None}], 'd': 1.5}},
        {'a': {'b': [], 'd': float('nan')}},
        {'a': None},
    ]
    write(tmp_path / 'a.parquet', {'a': [row['a'] for row in rows], 'b': ['x'] * 3}, group_rows=1)
    config = make_config(files=f'{tmp_path}/a.parquet', validation_fraction=0.0)
    rows[1]['a']['d'] = None
    found = records_of(sources.open.open_source(config, whole_records=True))
    assert sorted(map(repr, found)) == sorted(repr(row | {'b': 'x'}) for row in rows)
    settings = {'inputs': '{b}', 'targets': '{a/b/0/c} {a/d}'}
    config = make_config(
        files=f'{tmp_path}/a.parquet', validation_fraction=0.0, on_bad_line='skip', **settings
    )
    source = sources.open.open_source(config)
    assert records_of(source) == [{'b': 'x', 'a/b/0/c': 'é', 'a/d': '1.5'}]
    messages, count = source.faults()
    assert count == 2 and 'row 2 of' in messages[0] and "'a/b/0/c'" in messages[0]
    write(tmp_path / 'b.parquet', {'a': [{'b': b'sch\xf6n'}], 'a/b': ['this one']})
    config = make_config(files=f'{tmp_path}/b.parquet', validation_fraction=0.0)
    config.text_field = 'a/b'
    assert records_of(sources.open.open_source(config)) == [{'a/b': 'this one'}]
    with pytest.raises(Refused, match="'a/b'"):
        records_of(sources.open.open_source(config, whole_records=True))


def test_a_slot_that_no_row_fills():
    for slot in ('answers/txt/0', 'answers', 'answers/text', 'question/0'):
        config = make_config(inputs='{question}', targets=f'{{{slot}}}')
        config.files = str(HUNT / 'squad.parquet')
        with pytest.raises(Refused, match=f"'{slot}'") as error:
            sources.open.open_source(config)
        assert 'row ' not in str(error.value)
