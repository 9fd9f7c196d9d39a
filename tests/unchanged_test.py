"""What a reader of old runs relies on: the batches of each kind of source and the programs of a step.

tests/golden/unchanged.json has their hashes. `python tests/unchanged_test.py` writes it again, which
says that old runs do not continue with the same batches or losses.
"""

import functools
import gzip
import hashlib
import json
import pathlib
import sys

if __name__ == '__main__':
    import conftest  # noqa: F401  sets the environment before JAX starts

import corpora
import data_sets
import jax
import numpy as np
import pytest
import runs
import small_models

import decode
import infer
import model
import partition
import tasks.open
import train
import vocabulary as vocabularies
from modes import cache
from prepare import make_spec
from stream import Stream

FILE = pathlib.Path(__file__).parent / 'golden' / 'unchanged.json'
NUM_BATCHES = 20
BATCH_SIZE = 4
TEMPLATE = {'inputs': 'q: {question}', 'targets': '{answer}'}
# What is read, of each kind of source, beside the settings that all have.
SOURCES = {
    'text': {'files': 'words.txt'},
    'gzipped text': {'files': 'words.txt.gz'},
    'several files': {'files': 'words.txt,more.txt,qa.jsonl', 'pack': 'tightly'},
    'json': {'files': 'qa.jsonl', **TEMPLATE},
    'gzipped json': {'files': 'qa.jsonl.gz', **TEMPLATE},
    'csv': {'files': 'qa.csv', **TEMPLATE},
    'csv, packed tightly': {'files': 'qa.csv', 'pack': 'tightly', **TEMPLATE},
    'csv, packed greedily': {'files': 'qa.csv', 'pack': 'greedily', **TEMPLATE},
    'tsv': {'files': 'qa.tsv', **TEMPLATE},
    'parquet': {'files': 'qa.parquet', **TEMPLATE},
    'array_record': {'tfds': 'made_up', 'inputs': '{number}', 'targets': '{text}'},
    'tfrecord': {'tfds': 'made_up', 'inputs': '{number}', 'targets': '{text}'},
    'cache': {'task': 'qa', 'cache_dirs': 'caches'},
    'ul2': {'task': 'ul2', 'files': 'words.txt', 'lengths.targets': 64},
    'prefix_lm': {'task': 'prefix_lm', 'files': 'words.txt', 'pack': 'tightly'},
    'own mixture': {'task': 'both', 'module': 'own.py', 'pack': 'tightly'},
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
    import pyarrow
    import pyarrow.parquet

    rng = np.random.default_rng(0)
    words = [''.join(rng.choice(list('aeioulnrst'), rng.integers(2, 8))) for _ in range(120)]
    lines = [' '.join(rng.choice(words, rng.integers(3, 40))) for _ in range(500)]
    (folder / 'words.txt').write_text('\n'.join(lines))
    (folder / 'more.txt').write_text('\n'.join(lines[::-3]) + '\n')
    (folder / 'words.txt.gz').write_bytes(gzip.compress('\n'.join(lines).encode()))
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
    table = [f'{row["question"]}\t{row["answer"]}' for row in rows]
    (folder / 'qa.tsv').write_text('\n'.join(['question\tanswer', *table]))
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


def hash_batches(name, folder, tfds_roots):
    """Return a hash of the batches of a source and of the positions behind them."""
    config = settings_of(SOURCES[name], folder)
    if config.tfds:
        config.tfds_dir = str(tfds_roots / name)
    vocabulary = vocabularies.ByteVocabulary(config.extra_ids)
    digest = hashlib.blake2b(digest_size=16)
    for split in ('train', 'validation'):
        stream = Stream(
            tasks.open.open_mixture(config),
            split,
            vocabulary,
            config,
            batch_size=BATCH_SIZE,
            seed=1,
        )
        for _ in range(NUM_BATCHES):
            batch = next(stream)
            for feature in sorted(batch):
                digest.update(feature.encode() + batch[feature].tobytes())
            digest.update(stream.position.tobytes())
    return digest.hexdigest()


@pytest.fixture(scope='module')
def roots(make_once):
    return make_once('tfds', data_sets.write_roots)


@pytest.fixture(scope='module')
def folder(make_once):
    return make_once('unchanged', write_files)


@pytest.fixture(scope='module')
def expected():
    return json.loads(FILE.read_text())


@pytest.mark.parametrize('name', SOURCES)
def test_batches(name, folder, roots, expected):
    assert hash_batches(name, folder, roots) == expected['batches'][name]


MESHES = {'one device': (1, 1), 'eight devices': (4, 2)}
DECODING_MESHES = {'one device': (1, 1), 'two devices': (1, 2)}


# How a lowered program writes the axis 'fsdp'. It has size one here, and does nothing.
FSDP = (
    ('"fsdp"=1, ', ''),
    (', "fsdp"', ''),
    ('{"fsdp"}', '{}'),
    ('{name = "fsdp", size = 1 : i64}, ', ''),
)


def hash_program(text):
    """Return a hash of a lowered program, but for the axis 'fsdp': a mesh without it has the same."""
    for written, without in FSDP:
        text = text.replace(written, without)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def lower_step(name):
    """Return the program of a train step, before XLA compiles it."""
    data_axis, model_axis = MESHES[name]
    config = runs.small_config('', data_axis=data_axis, model_axis=model_axis)
    spec = make_spec(config, num_microbatches=1)
    return train.lower_step(spec).as_text()


def lower_logits():
    sizes = {'vocab_size': 384, 'emb_dim': 16, 'num_heads': 2, 'head_dim': 8, 'mlp_dim': 32}
    layers = {'num_encoder_layers': 1, 'num_decoder_layers': 1}
    config = small_models.t5_config(**sizes, **layers)
    t5 = infer.T5(config, small_models.random_params(config), partition.make_mesh(data=1))
    batch = small_models.random_batch(seed=0)
    return jax.jit(t5.logits).lower(batch).as_text()


def lower_decoding(name):
    """Return the program of a greedy step of decoding, as it is on other devices than CPUs."""
    sizes = {'vocab_size': 384, 'emb_dim': 16, 'num_heads': 2, 'head_dim': 8, 'mlp_dim': 32}
    config = small_models.t5_config(**sizes, num_encoder_layers=1, num_decoder_layers=2)
    specs = model.param_specs(config)

    def step(params, inputs_bM):
        start = functools.partial(model.start_decoding, config, inputs_bM, max_length=4)
        cache = model.apply(start, params)
        step = functools.partial(model.decode_step, config, inputs_bM[:, 0], cache)
        logits_rv, _ = model.apply(step, params)
        tokens_r = decode.most_likely(logits_rv, cache.length)
        return tokens_r, decode.log_probs(logits_rv, tokens_r)

    mapped = jax.shard_map(
        step,
        mesh=small_models.make_mesh(*DECODING_MESHES[name]),
        in_specs=(specs, partition.BATCH),
        out_specs=partition.BATCH,
    )
    inputs = np.full((4, 8), 5, np.int32)
    return jax.jit(mapped).lower(small_models.random_params(config), inputs).as_text()


@pytest.fixture
def programs(expected):
    """The hashes of programs."""
    if jax.__version__ != expected['jax']:
        pytest.skip(f'the hashes are of JAX {expected["jax"]}')
    return expected


@pytest.mark.parametrize('name', DECODING_MESHES)
def test_the_program_of_decoding(name, programs):
    assert hash_program(lower_decoding(name)) == programs['decoding'][name]


@pytest.mark.slow
@pytest.mark.parametrize('name', MESHES)
def test_the_program_of_a_step(name, programs):
    assert hash_program(lower_step(name)) == programs['steps'][name]


def test_the_program_of_logits(programs):
    assert hash_program(lower_logits()) == programs['logits']


def write_hashes():
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / 'tfds').mkdir()
        data_sets.write_roots(folder / 'tfds')
        write_files(folder)
        batches = {}
        for source in SOURCES:
            batches[source] = hash_batches(source, folder, folder / 'tfds')
    hashes = {
        'jax': jax.__version__,
        'batches': batches,
        'steps': {mesh: hash_program(lower_step(mesh)) for mesh in MESHES},
        'logits': hash_program(lower_logits()),
        'decoding': {mesh: hash_program(lower_decoding(mesh)) for mesh in DECODING_MESHES},
    }
    FILE.write_text(json.dumps(hashes, indent=1) + '\n')


if __name__ == '__main__':
    sys.exit(write_hashes())
