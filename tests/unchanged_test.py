"""Runs of earlier commits continue with the same batches: hashes of those of each reader.

A hash that changes says that old runs do not continue with what they have not read yet.
"""

import gzip
import hashlib
import json

import corpora
import data_sets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import tasks.open
import vocabulary as vocabularies
from modes import cache
from stream import Stream

NUM_BATCHES = 20
BATCH_SIZE = 4
TEMPLATE = {'inputs': 'q: {question}', 'targets': '{answer}'}
OF_TFDS = {'inputs': '{number}', 'targets': '{text}'}
# What is read, of each kind of source, beside the settings that all have, and its hash.
SOURCES = {
    'text': ({'files': 'words.txt'}, '8e716db4d4c9ede6e354c8052eb09ca0'),
    'several files': (
        {'files': 'words.txt,more.txt,qa.jsonl', 'pack': 'tightly'},
        'fddcd543896eed5e26410e6a6c27b334',
    ),
    'gzipped json': ({'files': 'qa.jsonl.gz', **TEMPLATE}, '1719356ceb6b0af4933e215f1220bb8d'),
    'csv': ({'files': 'qa.csv', 'pack': 'tightly', **TEMPLATE}, '69fe55ea5c9d65e94d0593336e08c8ef'),
    'parquet': ({'files': 'qa.parquet', **TEMPLATE}, '2d020c129e38479ce413916146f9cc81'),
    'array_record': ({'tfds': 'made_up', **OF_TFDS}, '8ef583eb5fbe4ecdfa4197488ab1ac33'),
    'tfrecord': ({'tfds': 'made_up', **OF_TFDS}, '3b425af19193279db404d9b33aafcd18'),
    'cache': ({'task': 'qa', 'cache_dirs': 'caches'}, '1bfcd133d5a0ce9def2c4eddd001e442'),
    'ul2': (
        {'task': 'ul2', 'files': 'words.txt', 'lengths.targets': 64},
        '3e64adb0240c9d92d0a7079df096c184',
    ),
    'own mixture': (
        {'task': 'both', 'module': 'own.py', 'pack': 'tightly'},
        '44a888a3d37993224fcd15084f702b37',
    ),
}
OWN_TASKS = """
from tasks import Mixture, Task, proportional

TASKS = [
    Task('qa', files='FOLDER/qa.csv', inputs='q: {question}', targets='{answer}'),
    Task('words', files='FOLDER/words.txt', objective='span_corruption'),
    Mixture('both', {'qa': proportional(maximum=100), 'words': 30}),
]
"""


def write_files(folder):
    """Write a file of each kind with the same records."""
    rng = np.random.default_rng(0)
    words = [''.join(rng.choice(list('aeioulnrst'), rng.integers(2, 8))) for _ in range(120)]
    lines = [' '.join(rng.choice(words, rng.integers(3, 40))) for _ in range(500)]
    (folder / 'words.txt').write_text('\n'.join(lines))
    (folder / 'more.txt').write_text('\n'.join(lines[::-3]) + '\n')
    rows = []
    for i, line in enumerate(lines[:200]):
        rows.append({'question': f'{i}, "{line[:20]}"', 'answer': line[-30:], 'text': line})
    text = '\n'.join(json.dumps(row) for row in rows)
    (folder / 'qa.jsonl').write_text(text)
    (folder / 'qa.jsonl.gz').write_bytes(gzip.compress(text.encode()))
    table = ['question,answer']
    for row in rows:
        quoted = row['question'].replace('"', '""')
        table.append(f'"{quoted}",{row["answer"]}')
    (folder / 'qa.csv').write_text('\n'.join(table))
    columns = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(columns, folder / 'qa.parquet', row_group_size=30)
    (folder / 'own.py').write_text(OWN_TASKS.replace('FOLDER', str(folder)))
    config = settings_of({'task': 'qa', 'module': 'own.py'}, folder)
    config.cache_dirs = str(folder / 'caches')
    config.num_workers = 1
    for _ in cache.cache(config, 1, 1):
        pass


def settings_of(changes, folder):
    """config.data of a source whose files lie in a folder."""
    changes = dict(changes)
    for name in ('files', 'module', 'cache_dirs'):
        if name in changes:
            paths = [f'{folder}/{file}' for file in changes[name].split(',')]
            changes[name] = ','.join(paths)
    return corpora.make_config(vocabulary='bytes', validation_fraction=0.1, **changes)


@pytest.fixture(scope='module')
def tfds_roots(make_once):
    return make_once('tfds', data_sets.write_roots)


@pytest.fixture(scope='module')
def folder(make_once):
    return make_once('unchanged', write_files)


@pytest.mark.parametrize('name', SOURCES)
def test_batches_and_positions(name, folder, tfds_roots):
    changes, expected = SOURCES[name]
    config = settings_of(changes, folder)
    if config.tfds:
        config.tfds_dir = str(tfds_roots / name)
    mixture = tasks.open.open_mixture(config)
    vocabulary = vocabularies.ByteVocabulary(config.extra_ids)
    digest = hashlib.blake2b(digest_size=16)
    for split in ('train', 'validation'):
        stream = Stream(mixture, split, vocabulary, config, batch_size=BATCH_SIZE, seed=1)
        for _ in range(NUM_BATCHES):
            batch = next(stream)
            for feature in sorted(batch):
                digest.update(feature.encode() + batch[feature].tobytes())
            digest.update(stream.position.tobytes())
    assert digest.hexdigest() == expected
