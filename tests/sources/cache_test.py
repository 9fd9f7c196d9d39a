"""SeqIO's task caches, against what SeqIO reads from them.

shared/testdata/seqio_t5: `seqio_cached` holds real caches of SeqIO, `p3_like` one in P3's layout.
"""

import json
from pathlib import Path

import data_sets
import numpy as np
import pytest
from corpora import oracle

from messages import Refused
from sources import cache as task_cache
from sources import tfrecord

P3 = ['tiny_complete_that', 'tiny_complete_that_score_eval']


def as_json(example):
    """Arrays as lists."""
    return {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in example.items()}


def test_caches_of_seqio():
    folder = oracle('seqio_cached')
    expected = json.loads((folder / 'expected_read.json').read_text())
    assert len(expected) == 3
    for name, content in expected.items():
        task, split_name = name.split('/')
        split = task_cache.open_split(task_cache.find([folder], task), split_name)
        assert {name: x.dtype for name, x in split.features.items()} == content['dtypes']
        assert {name: list(x.shape) for name, x in split.features.items()} == content['shapes']
        assert split.num_examples == content['num_input_examples']
        assert [file.name for file in split.files] == content['shards']
        examples = data_sets.cached_examples(split)
        assert [as_json(example) for example in examples] == content['examples']
        for example in examples:
            for name, x in example.items():
                if isinstance(x, np.ndarray):
                    assert x.dtype == content['dtypes'][name]


@pytest.mark.parametrize('task', P3)
def test_caches_of_p3(task):
    folder = task_cache.find([Path('nowhere'), oracle('p3_like')], task)
    assert task_cache.splits(folder) == ['validation']  # its test split is {}
    split = task_cache.open_split(folder, 'validation')
    expected = json.loads((folder / 'expected_validation.json').read_text())
    assert [as_json(example) for example in data_sets.cached_examples(split)] == expected
    assert split.num_examples == len(expected)
    with pytest.raises(Refused, match="'test'"):
        task_cache.open_split(folder, 'test')


INFO = {
    'ids': ('int32', [None]),
    'pairs': ('int32', [None, 2]),
    'fixed': ('float32', [2]),
    'n': ('int64', []),
    'is_good': ('bool', []),
    'text': ('string', []),
    'texts': ('string', [None]),
}
EXAMPLES = [
    {
        'ids': np.array([5, 2**31 - 1, -1], np.int32),
        'pairs': np.array([[1, 2], [3, 4]], np.int32),
        'fixed': np.array([0.5, -1.0], np.float32),
        'n': 2**40,
        'is_good': True,
        'text': 'läuft\n',
        'texts': ['a', ''],
    },
    {
        'ids': np.zeros(0, np.int32),
        'pairs': np.zeros([0, 2], np.int32),
        'fixed': np.array([2.0, 3.0], np.float32),
        'n': -1,
        'is_good': False,
        'text': '',
        'texts': [],
    },
]


def write_cache(folder, examples=EXAMPLES, info=INFO):
    folder.mkdir(parents=True)
    features = {name: {'dtype': dtype, 'shape': shape} for name, (dtype, shape) in info.items()}
    content = {'features': features, 'num_shards': 2, 'seqio_version': '0.0.20'}
    (folder / 'info.train.json').write_text(json.dumps(content))
    for shard in range(2):
        with (folder / f'train.tfrecord-0000{shard}-of-00002').open('wb') as file:
            for example in examples[shard::2]:
                tfrecord.write_record(file, task_cache.encode(example))
    (folder / 'COMPLETED').touch()
    return folder


def test_written_and_read(tmp_path):
    write_cache(tmp_path / 'a/b_1')
    assert task_cache.find([tmp_path], 'b_1') is None
    split = task_cache.open_split(task_cache.find([tmp_path], 'a:b_1'), 'train')
    assert split.num_examples is None
    found = data_sets.cached_examples(split)
    for example, expected in zip(found, EXAMPLES, strict=True):
        assert example.keys() == expected.keys()
        for name, x in expected.items():
            np.testing.assert_array_equal(example[name], x)
            assert type(example[name]) is type(x)


def test_every_byte_of_a_record_is_checked(tmp_path):
    """A flipped bit or a cut anywhere is named with file and offset."""
    folder = write_cache(tmp_path / 'task', EXAMPLES[:1] * 4)
    split = task_cache.open_split(folder, 'train')
    file = split.files[0]
    content = file.read_bytes()
    second = len(content) // 2
    for i in range(0, len(content), 7):
        broken = bytearray(content)
        broken[i] ^= 4
        file.write_bytes(broken)
        offset = second if i >= second else 0
        with pytest.raises(Refused, match=f'{file}: .* byte {offset} '):
            data_sets.cached_examples(split)
    for length in range(second + 1, len(content), 9):
        file.write_bytes(content[:length])
        with pytest.raises(Refused, match=f'byte {second} '):
            data_sets.cached_examples(split)
    file.write_bytes(b'')
    assert len(data_sets.cached_examples(split)) == 2  # those of the other shard


def test_a_damaged_cache_is_named(tmp_path):
    folder = write_cache(tmp_path / 'task')
    info = folder / 'info.train.json'
    right = json.loads(info.read_text())
    for content in ('{', '[]', '{"num_shards": 2}'):
        info.write_text(content)
        with pytest.raises(Refused, match=str(info)) as error:
            task_cache.open_split(folder, 'train')
        assert '\n' not in str(error.value)
    info.write_text(json.dumps(right))
    (folder / 'train.tfrecord-00001-of-00002').unlink()
    with pytest.raises(Refused, match=str(info)):
        task_cache.open_split(folder, 'train')


# Values that are not as info.json says.
WRONG = [{'ids': ['text']}, {'ids': [0.5]}, {'fixed': ['text']}, {'text': [1]}, {'ids': [2**40]}]
WRONG += [{'n': [1, 2]}, {'text': ['a', 'b']}, {'fixed': [1.0]}, {'pairs': [1, 2, 3]}]


def test_a_record_that_is_not_as_info_says(tmp_path):
    for i, change in enumerate(WRONG):
        folder = write_cache(tmp_path / str(i), [EXAMPLES[0] | change] * 2)
        split = task_cache.open_split(folder, 'train')
        with pytest.raises(Refused, match=f"byte 0 of {folder}.*'{min(change)}'"):
            data_sets.cached_examples(split)
    with split.files[0].open('wb') as file:
        tfrecord.write_record(file, b'\xff\xff')
    with pytest.raises(Refused, match='byte 0 of'):
        data_sets.cached_examples(split)
