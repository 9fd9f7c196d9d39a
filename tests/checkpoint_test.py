"""T5X's own checkpoints read and rewritten leaf by leaf; meshes, processes, crashes, damage, foreign files."""

import errno
import gzip
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from permissions import another_user, full_disk

import checkpoint
import convert

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / 'tests/golden'  # written by google-research/t5x, commit cc342d4
TESTDATA = ROOT.parent / 'shared/testdata'

MODELS = {
    't5x_t5_1_1_tiny': GOLDEN / 't5x_t5_1_1_tiny',
    't5x_t5_1_0_tiny': GOLDEN / 't5x_t5_1_0_tiny',
    't5x_factored': TESTDATA / 'golden/t5x_factored',
}


@pytest.fixture(
    params=[
        't5x_t5_1_1_tiny/checkpoint_0',
        't5x_t5_1_1_tiny/checkpoint_6',
        't5x_t5_1_0_tiny/checkpoint_0',
        't5x_t5_1_0_tiny/checkpoint_6',
        pytest.param('t5x_factored/checkpoint_0', marks=pytest.mark.slow),
        't5x_factored/checkpoint_6',
    ]
)
def golden(request):
    name, step = request.param.split('/')
    if not MODELS[name].exists():
        pytest.skip(f'{MODELS[name]} is not there')
    return MODELS[name] / step


def raw_index(directory):
    """The index without any of checkpoint.py: {path: spec, ExtType or None}, in stored order."""
    top = msgpack.unpackb((directory / 'checkpoint').read_bytes())
    assert list(top) == ['version', 'optimizer'] and top['version'] == 3
    leaves = {}

    def walk(node, path):
        for name, child in node.items():
            if isinstance(child, dict) and 'driver' not in child:
                walk(child, [*path, name])
            else:
                leaves['/'.join([*path, name])] = child

    walk(top['optimizer'], [])
    return leaves


def read_by_hand(directory, leaf):
    """One leaf by the formats' descriptions: msgpack extension 1, or gzipped zarr of one chunk."""
    if isinstance(leaf, msgpack.ExtType):
        assert leaf.code == 1
        shape, dtype, content = msgpack.unpackb(leaf.data)
        return np.frombuffer(content, dtype).reshape(shape)
    folder = directory / leaf['kvstore']['path']
    zarray = json.loads((folder / '.zarray').read_text())
    assert zarray['chunks'] == zarray['shape'] and zarray['order'] == 'C'
    chunk = folder / '.'.join('0' * len(zarray['shape']))
    return np.frombuffer(gzip.decompress(chunk.read_bytes()), '<f4').reshape(zarray['shape'])


def assert_same(actual, expected):
    """Bit for bit, with dtype and shape."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal(as_bytes(actual), as_bytes(expected))


def as_bytes(tree):
    return {path: np.frombuffer(np.asarray(x).tobytes(), np.uint8) for path, x in tree.items()}


def write_index(directory, tree, version=3):
    """Write a foreign checkpoint, whose msgpack holds `tree` as it is."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / 'checkpoint').write_bytes(
        msgpack.packb({'version': version, 'optimizer': tree} if version else tree)
    )
    return directory


def spec(path, shape, driver='file', dtype='float32'):
    kvstore = {'driver': driver, 'path': path}
    metadata = {'shape': shape, 'chunks': shape, 'compressor': None}
    return {'driver': 'zarr', 'dtype': dtype, 'kvstore': kvstore, 'metadata': metadata}


def write_zarr(folder, array):
    store = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{folder}/'}}
    ts.open(store, create=True, shape=array.shape, dtype=array.dtype).result().write(array).result()


# T5X's checkpoints


def test_reads_every_leaf(golden):
    expected = {path: read_by_hand(golden, leaf) for path, leaf in raw_index(golden).items()}
    assert len(expected) > 200
    restored = checkpoint.restore(golden)
    assert_same(restored, expected)
    assert restored['state/step'] == int(golden.name.split('_')[1])
    assert checkpoint.shapes(checkpoint.read_index(golden)) == checkpoint.shapes(expected)
    assert checkpoint.verify(golden) is False  # T5X keeps no checksums


def test_relative_paths(golden, tmp_path, monkeypatch):
    """A path with `..` means the same from inside another folder."""
    expected = checkpoint.restore(golden)
    monkeypatch.chdir(tmp_path)
    relative = os.path.relpath(golden)
    assert relative.startswith('..')
    assert_same(checkpoint.restore(relative), expected)
    assert_same(checkpoint.restore(os.path.join(relative, 'checkpoint')), expected)
    assert checkpoint.shapes(checkpoint.read_index(relative)) == checkpoint.shapes(expected)
    assert checkpoint.verify(relative) is False
    assert checkpoint.newest(os.path.join(relative, '..')) == checkpoint.newest(golden.parent)


def test_rewrites_the_same_index(golden, tmp_path):
    restored = checkpoint.restore(golden)
    directory = checkpoint.save(tmp_path, 6, dict(reversed(restored.items())))
    assert_same(checkpoint.restore(directory), restored)
    theirs, ours = raw_index(golden), raw_index(directory)
    assert list(ours) == list(theirs)
    for path, leaf in theirs.items():
        if isinstance(leaf, dict):
            assert leaf['metadata'].pop('compressor') == {'id': 'gzip', 'level': 1}
            assert ours[path]['metadata'].pop('compressor') is None
            zarrays = [
                json.loads((d / leaf['kvstore']['path'] / '.zarray').read_text())
                for d in (golden, directory)
            ]
            assert zarrays[0] | {'compressor': None} == zarrays[1]
        assert ours[path] == leaf, path


def test_restores_only_what_is_wanted(tmp_path):
    directory = tmp_path / 'checkpoint_0'
    shutil.copytree(GOLDEN / 't5x_t5_1_1_tiny/checkpoint_0', directory)
    for folder in directory.glob('state.*'):
        shutil.rmtree(folder)
    index = checkpoint.read_index(directory)
    params = checkpoint.restore({p: x for p, x in index.items() if p.startswith('target/')})
    assert len(params) == 52 and all(path.startswith('target/') for path in params)


def test_t5x_sample_without_zarray():
    directory = TESTDATA / 't5x/tiny_t5/checkpoint_1'
    if not directory.exists():
        pytest.skip(f'{directory} is not there')
    index = checkpoint.read_index(directory)
    assert index['state/step'].dtype == np.int32 and index['state/step'] == 1  # extension 3
    assert checkpoint.shapes(index) == {
        'state/param_states/bias': (5,),
        'state/param_states/kernel': (10, 5),
        'state/param_states/step': (),
        'state/step': (),
    }
    with pytest.raises(ValueError, match=r'state.param_states.kernel/.zarray is missing: copy'):
        checkpoint.restore(directory)


def test_array_without_zarray(tmp_path):
    directory = checkpoint.save(tmp_path, 1, {'target/a': np.zeros(3, np.float32)})
    (directory / 'target.a/.zarray').unlink()
    with pytest.raises(ValueError, match=r'/target.a/.zarray is missing: copy'):
        checkpoint.restore(directory)


def extension(code, array):
    content = (array.shape, array.dtype.name, array.tobytes())
    return msgpack.ExtType(code, msgpack.packb(content))


@pytest.mark.parametrize('version', [2, 3])
def test_foreign_leaf_forms(tmp_path, version):
    """All that T5X and Flax have written: drivers, old and long specs, msgpack's extensions, chunks, nil."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    old = spec('', [3, 4]) | {'path': 'target.old/', 'kvstore': {'driver': 'file'}}
    transform = {'input_inclusive_min': [0, 0], 'input_exclusive_max': [3, 4]}
    gcs = {'driver': 'gcs', 'bucket': 't5x-dummy-bucket', 'path': 'target.gcs/'}
    chunks = {str(i): extension(1, part) for i, part in enumerate(np.split(values.ravel(), 3))}
    tree = {
        'target': {
            'gfile': spec('target.gfile/', [3, 4], driver='gfile'),
            'gcs': spec('', [3, 4]) | {'kvstore': gcs, 'transform': transform},
            'old': old,
            'half': extension(1, values.astype(ml_dtypes.bfloat16)),
            'chunked': {
                '__msgpack_chunked_array__': True,
                'shape': {'0': 3, '1': 4},
                'chunks': dict(reversed(chunks.items())),
            },
            'frozen': None,
        },
        'state': {
            'step': extension(3, np.int32(7)),
            'count': 5,
            'phase': msgpack.ExtType(2, msgpack.packb((1.5, -2.0))),
            'param_states': {'0': {'mu': {'a': extension(1, np.float32([1]))}}, '1': None},
        },
        'flax_mutables': {'statistics': {'mean': extension(1, np.float64(3))}},
    }
    directory = write_index(tmp_path / 'checkpoint_1', tree, version)
    for name in ('gfile', 'gcs', 'old'):
        write_zarr(directory / f'target.{name}', values)
    expected = dict.fromkeys(('target/gfile', 'target/gcs', 'target/old', 'target/chunked'), values)
    expected |= {
        'target/half': values.astype(ml_dtypes.bfloat16),
        'state/step': np.int32(7),
        'state/count': np.int64(5),
        'state/phase': np.complex128(1.5 - 2j),
        'state/param_states/0/mu/a': np.float32([1]),
        'flax_mutables/statistics/mean': np.float64(3),
    }
    restored = checkpoint.restore(directory)
    assert_same(restored, expected)
    assert checkpoint.shapes(checkpoint.read_index(directory)) == checkpoint.shapes(expected)
    assert_same(checkpoint.restore(checkpoint.save(tmp_path, 2, restored)), expected)
    index = checkpoint.read_index(directory)  # which is read as it is written
    assert_same(checkpoint.restore(checkpoint.save(tmp_path, 3, index)), expected)


def test_parameters_in_another_dtype(tmp_path):
    tree = example_tree()
    for like in (tree, sharded(tree, mesh(2, 2))):
        saver = checkpoint.Saver(tmp_path / str(like is tree), dtype='bfloat16')
        saver.save(3, like)
        saver.wait()
        directory = saver.workdir / 'checkpoint_3'
        is_parameter = {path: path.startswith('target/') for path in tree}
        expected = {
            path: x.astype(ml_dtypes.bfloat16) if is_parameter[path] else x
            for path, x in tree.items()
        }
        assert_same(checkpoint.restore(directory), expected)
        spec = raw_index(directory)['target/embedding']
        assert spec['dtype'] == 'bfloat16' and checkpoint.verify(directory)
        assert (directory / 'target.embedding/0.0').stat().st_size in (24 * 16 * 2, 12 * 8 * 2)
    restored = checkpoint.restore(directory, shardings(mesh(2, 4)), 'float32')
    widened = {
        path: x.astype(np.float32) if is_parameter[path] else x for path, x in expected.items()
    }
    assert_same(restored, widened)


def test_lost_chunk_is_not_zeros(tmp_path):
    tree = {'target/embedding': np.zeros((24, 16), np.float32)}
    directory = checkpoint.save(tmp_path, 1, sharded(tree, mesh(4, 2)))
    # Zeros are written too, else they could not be told apart.
    (directory / 'target.embedding/1.3').unlink()
    with pytest.raises(ValueError, match='target.embedding/1.3" is missing.*: copy the checkpoint'):
        checkpoint.restore(directory)
    for chunk in directory.glob('target.embedding/[01]*'):
        chunk.unlink()
    with pytest.raises(ValueError, match=r'0 bytes cannot hold \(24, 16\), or chunks are missing'):
        checkpoint.restore(directory)


# Meshes


def mesh(data, model):
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return Mesh(devices, ('data', 'model'))


SPECS = {
    'target/embedding': P('model', 'data'),
    'target/half': P(None, 'model'),
    'target/ids': P('data'),
    'target/temperature': P(),
    'target/scale': P(),
    'state/param_states/embedding/v_row': P('data'),
    'state/param_states/embedding/v_col': P('model'),
    'state/param_states/embedding/v': P(),
    'state/param_states/half/v': P('data', 'model'),
    'state/step': P(),
}


def example_tree():
    rng = np.random.default_rng(0)
    return {
        'target/embedding': rng.standard_normal((24, 16), np.float32),
        'target/half': rng.standard_normal((3, 8), np.float32).astype(ml_dtypes.bfloat16),
        'target/ids': rng.integers(0, 2**31 - 1, 8, np.int32),
        'target/temperature': np.float32(0.5),
        'target/scale': np.float32([np.nan]),  # a parameter of shape (1,) is no placeholder
        'state/param_states/embedding/v_row': rng.standard_normal(16, np.float32),
        'state/param_states/embedding/v_col': rng.standard_normal(24, np.float32),
        'state/param_states/embedding/v': np.zeros(1, np.float32),
        'state/param_states/half/v': rng.standard_normal((4, 8), np.float32),
        'state/step': np.int32(3),
    }


def shardings(on_mesh):
    return {path: NamedSharding(on_mesh, spec) for path, spec in SPECS.items()}


def sharded(tree, on_mesh):
    return {path: jax.device_put(array, shardings(on_mesh)[path]) for path, array in tree.items()}


def test_any_mesh_restores_what_another_wrote(tmp_path):
    tree = example_tree()
    directory = checkpoint.save(tmp_path, 3, sharded(tree, mesh(4, 2)))
    kinds = {path: type(leaf) for path, leaf in checkpoint.read_index(directory).items()}
    inline = {path for path, kind in kinds.items() if kind is np.ndarray}
    assert inline == {
        *(f'state/param_states/embedding/{slot}' for slot in ('v', 'v_row', 'v_col')),
        'state/step',
    }
    files = {file.name for file in (directory / 'target.embedding').iterdir()}
    assert len(files - {'.zarray'}) == 8  # a chunk is a shard
    assert_same(checkpoint.restore(directory), tree)
    for data, model in [(2, 4), (1, 1)]:
        asked = shardings(mesh(data, model))
        restored = checkpoint.restore(directory, shardings=asked)
        assert {path: array.sharding for path, array in restored.items()} == asked
        assert_same(restored, tree)


@pytest.mark.parametrize(
    'shape, max_elements, chunk',
    [
        ((8192, 8192), 2**24, (4096, 4096)),
        ((8192, 8193), 2**24, (4096, 2731)),
        ((8193,), 4096, (2731,)),
        ((32128, 512), 2**24, (32128, 512)),
        ((32128, 4096), 2**24, (4016, 4096)),
        ((4096, 10240), 2**24, (4096, 2560)),
        ((1024, 65536), 2**24, (1024, 16384)),
        ((250112, 768), 2**24, (15632, 768)),
        ((), 1, ()),
    ],
)
def test_chunk_shapes_of_t5x(shape, max_elements, chunk):
    assert checkpoint.chunk_shape(shape, max_elements) == chunk


def test_a_shard_of_many_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, 'CHUNK_BYTES', 64)
    tree = example_tree()
    directory = checkpoint.save(tmp_path, 3, sharded(tree, mesh(2, 2)))
    sizes = {f.stat().st_size for f in directory.glob('target.embedding/[0-9]*')}
    assert len(list(directory.glob('target.embedding/[0-9]*'))) == 24 and sizes == {64}
    sums = json.loads((directory / 'manifest.json').read_text())['files']
    assert sums.keys() == contents(directory).keys() - {'manifest.json'}
    assert checkpoint.verify(directory)
    assert_same(checkpoint.restore(directory, shardings=shardings(mesh(4, 2))), tree)


TWO_PROCESSES = """
import contextlib, json, shutil, sys, time
import jax, numpy as np, pytest
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(sys.argv[3], 2, int(sys.argv[4]), initialization_timeout=60)
import checkpoint, checkpoint_test
from jax.experimental import multihost_utils
workdir = Path(sys.argv[5])
on_mesh = checkpoint_test.mesh(2, 4)  # 'data' separates the processes
tree = {
    path: jax.make_array_from_callback(array.shape, sharding, lambda i, a=array: np.asarray(a)[i])
    for (path, array), sharding in zip(
        checkpoint_test.example_tree().items(), checkpoint_test.shardings(on_mesh).values())
}
tree['target/on_host'] = np.arange(6, dtype=np.int32) + 100 * jax.process_index()  # the first writes
saver = checkpoint.Saver(workdir)
saver.save(3, tree, {'position.json': b'{}'})
saver.check()
saver.wait()
directory = workdir / 'checkpoint_3'
assert checkpoint.verify(directory)
with pytest.raises(ValueError, match='a step is saved once'):
    checkpoint.save(workdir, 3, tree)

# Without the chunks of the other process, what this process needs is still there.
mine = Path(f'{workdir}-{jax.process_index()}')
shutil.copytree(directory, mine)
(mine / 'target.ids' / str(1 - jax.process_index())).unlink()
for path in mine.glob(f'target.embedding/*.{1 - jax.process_index()}'):
    path.unlink()
index = checkpoint.read_index(mine)
wanted = {path: index[path] for path in ('target/ids', 'target/embedding')}
restored = checkpoint.restore(wanted, checkpoint_test.shardings(on_mesh))
for path, array in restored.items():
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, checkpoint_test.example_tree()[path][shard.index])

# Damage that only one process reads is known to both, one file of each share.
saver.save(4, {**tree, 'state/step': np.int32(4)})
saver.wait()
sums = json.loads((workdir / 'checkpoint_4/manifest.json').read_text())['files']
damaged = sorted(sums)[2:4]
if jax.process_index() == 0:
    for name in damaged:
        (workdir / 'checkpoint_4' / name).write_bytes(b'')
multihost_utils.sync_global_devices('damaged')
reports = []
assert checkpoint.newest_valid(workdir, reports.append) == 3
assert len(reports) == 1 and all(f'{name} has 0 bytes' in reports[0] for name in damaged), reports

# What only one process may not read is known to both, and stays.
sums = json.loads((workdir / 'checkpoint_3/manifest.json').read_text())['files']
closed = workdir / 'checkpoint_3' / sorted(sums)[1]
if jax.process_index() == 0:
    closed.chmod(0)
multihost_utils.sync_global_devices('closed')
with checkpoint_test.another_user() if jax.process_index() == 1 else contextlib.nullcontext():
    with pytest.raises(checkpoint.Unreadable, match=f'{sorted(sums)[1]}: Permission denied'):
        checkpoint.newest_valid(workdir, reports.append)
multihost_utils.sync_global_devices('seen')
if jax.process_index() == 0:
    closed.chmod(0o644)
multihost_utils.sync_global_devices('open')
assert checkpoint.newest_valid(workdir, reports.append) == 3 and len(reports) == 1

# A process that does not finish its part: the other gives up.
checkpoint.TIMEOUT_SECONDS = 1
commit = checkpoint.Saver._commit
for step, dead, lost in [(5, 1, 'part-1'), (6, 0, 'checkpoint_6')]:
    checkpoint.Saver._commit = commit if jax.process_index() != dead else lambda *_: None
    saver.save(step, tree)
    if jax.process_index() == dead:
        saver.wait()
    else:
        with pytest.raises(OSError, match=f'{lost} is not there and nothing new came for 1 s'):
            saver.wait()
    multihost_utils.sync_global_devices(f'{step} is given up')
    assert checkpoint.newest_valid(workdir, reports.append) == 3

# The same step once more: what the first attempt left is not taken for a part of the second.
checkpoint.Saver._commit, write_array = commit, checkpoint._write_array
def late(*args):
    time.sleep(jax.process_index() * 0.1)
    return write_array(*args)
checkpoint._write_array = late
saver.save(6, {path: x + 1 for path, x in tree.items()} | {'state/step': np.int32(6)})
saver.wait()
assert checkpoint.newest_valid(workdir, reports.append) == 6
checkpoint.Saver(workdir)
print('done')
"""


@pytest.mark.slow
def test_two_processes_save_one_process_restores(open_path):
    tmp_path = open_path
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{probe.getsockname()[1]}'
    environment = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=4'}
    arguments = [ROOT, ROOT / 'tests', address]
    processes = [
        subprocess.Popen(
            [sys.executable, '-c', TWO_PROCESSES, *map(str, arguments), str(i), tmp_path / 'run'],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0 and 'done' in output, output
    directory = tmp_path / 'run/checkpoint_3'
    expected = example_tree() | {'target/on_host': np.arange(6, dtype=np.int32)}
    assert_same(checkpoint.restore(directory), expected)
    restored = checkpoint.restore(directory, shardings=shardings(mesh(4, 2)))
    assert_same(restored, expected)
    more = {path: np.asarray(array + np.array(1, array.dtype)) for path, array in expected.items()}
    more['state/step'] = np.int32(6)
    assert_same(checkpoint.restore(tmp_path / 'run/checkpoint_6'), more)
    left = ['checkpoint_3', 'checkpoint_4.damaged-1', 'checkpoint_6']
    assert sorted(os.listdir(tmp_path / 'run')) == left


# All or nothing


def test_files_lie_beside(tmp_path):
    tree = {'state/step': jnp.int32(5)}
    directory = checkpoint.save(tmp_path / 'new' / 'run', 5, tree, {'position.json': b'{"row": 1}'})
    assert directory == tmp_path / 'new/run/checkpoint_5'
    assert (directory / 'position.json').read_bytes() == b'{"row": 1}'
    assert_same(checkpoint.restore(directory), tree)


def test_a_step_is_saved_once(tmp_path):
    checkpoint.save(tmp_path, 5, {'state/step': np.int32(5)})
    with pytest.raises(ValueError, match='checkpoint_5 exists.*remove it or use another workdir'):
        checkpoint.save(tmp_path, 5, {'state/step': np.int32(6)})
    assert checkpoint.restore(tmp_path / 'checkpoint_5')['state/step'] == 5


def test_steps_are_the_complete_ones(tmp_path):
    assert checkpoint.steps(tmp_path / 'nowhere') == [] and checkpoint.newest(tmp_path) is None
    for name in ['checkpoint_9', 'checkpoint_10', 'checkpoint_11.tmp-1700000000', 'checkpoint_x']:
        write_index(tmp_path / name, {})
    (tmp_path / 'checkpoint_12').mkdir()  # no index
    assert checkpoint.steps(tmp_path) == [9, 10] and checkpoint.newest(tmp_path) == 10
    checkpoint.save(tmp_path, 13, {'state/step': np.int32(13)})
    assert not (tmp_path / 'checkpoint_11.tmp-1700000000').exists()


def test_only_names_as_a_saver_makes_them_are_deleted(tmp_path):
    backups = ['checkpoint_5.tmp-backup', 'checkpoint_x.tmp-1', 'checkpoint_5.tmp-1.old', 'tmp-1']
    ours = ['checkpoint_5.tmp-1700000000', 'checkpoint_12.tmp-deleted']
    for name in (*backups, *ours):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'file').write_text('')
    (tmp_path / 'checkpoint_6.tmp-7').write_text('a file of mine')
    (tmp_path / 'checkpoint_7.tmp-7').symlink_to('checkpoint_5.tmp-backup')
    left = {*backups, 'checkpoint_6.tmp-7', 'checkpoint_7.tmp-7'}
    checkpoint.Saver(tmp_path)
    assert set(os.listdir(tmp_path)) == left
    assert (tmp_path / 'checkpoint_5.tmp-backup/file').exists()


def test_names_with_leading_zeros_are_no_steps(tmp_path):
    directory = checkpoint.save(tmp_path, 7, {'state/step': np.int32(7)})
    for name in ('checkpoint_007', 'checkpoint_٨'):
        shutil.copytree(directory, tmp_path / name)
    assert checkpoint.steps(tmp_path) == [7] and checkpoint.newest_valid(tmp_path) == 7
    shutil.rmtree(directory)
    assert checkpoint.steps(tmp_path) == [] and checkpoint.newest_valid(tmp_path) is None
    assert checkpoint.verify(tmp_path / 'checkpoint_007')
    assert checkpoint.restore(tmp_path / 'checkpoint_007')['state/step'] == 7


@pytest.mark.parametrize(
    'name', ['{}', '../{}', 'sub/../../{}', '~/{}', 'link', 'link/../{}', '{}/']
)
@pytest.mark.parametrize('workdir', ["a b, größe 文 #?%&'[]*"])
def test_any_name_of_a_workdir(tmp_path, monkeypatch, name, workdir):
    name = name.format(workdir)
    (tmp_path / 'here/sub').mkdir(parents=True)
    monkeypatch.chdir(tmp_path / 'here')
    monkeypatch.setenv('HOME', str(tmp_path))
    home = tmp_path if name.startswith(('..', '~', 'sub', 'link')) else tmp_path / 'here'
    (tmp_path / workdir).mkdir()
    (tmp_path / 'here/link').symlink_to(tmp_path / workdir)
    tree = {'target/a': np.ones((2, 3), np.float32), 'state/step': np.int32(3)}
    saver = checkpoint.Saver(name, keep=1)
    for step in (2, 3):
        saver.save(step, {**tree, 'state/step': np.int32(step)})
        saver.wait()
    assert os.listdir(home / workdir) == ['checkpoint_3']
    assert checkpoint.newest(name) == checkpoint.newest_valid(name, pytest.fail) == 3
    directory = os.path.join(name, 'checkpoint_3')
    assert checkpoint.verify(directory)
    assert_same(checkpoint.restore(directory), tree)
    (home / workdir / 'checkpoint_3/checkpoint').write_bytes(b'')
    with pytest.raises(ValueError, match='has only damaged checkpoints'):
        checkpoint.newest_valid(name, lambda words: None)
    assert os.listdir(home / workdir) == ['checkpoint_3.damaged-1']


SAVE_FOREVER = """
import sys
sys.path.insert(0, sys.argv[1])
import checkpoint, numpy as np
step = checkpoint.newest_valid(sys.argv[2]) or 0
saver = checkpoint.Saver(sys.argv[2], keep=2)
while True:
    step += 1
    tree = {f'target/{i}': np.full((256, 1024), step, np.float32) for i in range(12)}
    saver.save(step, {**tree, 'state/step': np.int32(step)}, {'config.json': b'{}'})
    saver.check()
    print(step, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize('num_moments', [3, 40])
def test_killed_at_any_moment(tmp_path, num_moments):
    """Only the newest valid checkpoint is promised, and it is never a damaged one."""
    random_seconds = random.Random(0)
    num_torn = 0
    for _ in range(num_moments):
        process = subprocess.Popen(
            [sys.executable, '-c', SAVE_FOREVER, str(ROOT), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            handed_over = int(process.stdout.readline())
            time.sleep(random_seconds.uniform(0, 0.2))
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
        num_torn += len(list(tmp_path.glob('*.tmp-*')))
        steps = checkpoint.steps(tmp_path)
        if not steps:
            assert handed_over == 1  # killed within the very first save
            continue
        assert steps[-1] >= handed_over - 1
        for step in steps:
            assert checkpoint.verify(tmp_path / f'checkpoint_{step}')
            restored = checkpoint.restore(tmp_path / f'checkpoint_{step}')
            assert len(restored) == 13
            assert all((array == step).all() for array in restored.values())
    if num_moments >= 40:  # of few moments, none may be inside of a save
        assert num_torn > num_moments / 4
    checkpoint.Saver(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(f'checkpoint_{step}' for step in steps)


# Behind the training steps


@pytest.fixture
def gate(monkeypatch):
    """While it is shut, nothing is written."""
    event, write_array = threading.Event(), checkpoint._write_array

    def wait_and_write(*args):
        assert event.wait(60)
        return write_array(*args)

    monkeypatch.setattr(checkpoint, '_write_array', wait_and_write)
    yield event
    event.set()


def test_the_caller_donates_what_is_being_saved(tmp_path, gate):
    values = {
        f'target/{i}': np.random.default_rng(i).random((16, 32), np.float32) for i in range(4)
    }
    on_host = np.arange(10)
    arrays = sharded({'target/embedding': values['target/0']}, mesh(2, 4))
    tree = {path: jnp.array(x) for path, x in values.items()} | arrays | {'target/on_host': on_host}
    saver = checkpoint.Saver(tmp_path)
    saver.save(1, tree, {'config.json': b'{}'})
    next_step = jax.jit(lambda x: -x, donate_argnums=0)
    donated = {path: next_step(x) for path, x in tree.items() if isinstance(x, jax.Array)}
    jax.block_until_ready(donated)
    assert all(x.is_deleted() for x in tree.values() if isinstance(x, jax.Array))
    on_host[:] = -1
    saver.check()
    assert checkpoint.steps(tmp_path) == []
    gate.set()
    saver.wait()
    expected = values | {'target/embedding': values['target/0'], 'target/on_host': np.arange(10)}
    assert_same(checkpoint.restore(tmp_path / 'checkpoint_1'), expected)


def test_a_second_save_waits_for_the_first(tmp_path, gate):
    saver = checkpoint.Saver(tmp_path)
    saver.save(1, {'target/a': np.ones(3)})
    second = threading.Thread(target=saver.save, args=(2, {'target/a': np.ones(3)}))
    second.start()
    second.join(0.3)
    assert second.is_alive() and checkpoint.steps(tmp_path) == []
    gate.set()
    second.join(60)
    assert not second.is_alive() and 1 in checkpoint.steps(tmp_path)
    saver.wait()
    assert checkpoint.steps(tmp_path) == [1, 2]


def raised_by_check(saver):
    for _ in range(600):
        saver.check()
        time.sleep(0.01)


@pytest.mark.parametrize('num_numbers', [2, 2**20])
def test_a_disk_that_refuses(tmp_path, num_numbers):
    """A limit on the size of files is as real as a full disk: hit by the index or by a chunk."""
    saver = checkpoint.Saver(tmp_path)
    tree = {
        'target/a': np.ones(num_numbers, np.float32),
        'state/param_states/a/v_row': np.ones(2**16),
    }
    saver.save(1, tree)
    saver.wait()
    with full_disk(2**16):
        saver.save(2, tree)
        with pytest.raises(OSError, match='checkpoint_2 is not saved .*File too large.*are valid'):
            raised_by_check(saver)
    saver.wait()  # an error is raised once
    assert checkpoint.newest_valid(tmp_path, pytest.fail) == 1
    assert_same(checkpoint.restore(tmp_path / 'checkpoint_1'), tree)
    saver.save(2, tree)
    saver.wait()
    assert checkpoint.verify(tmp_path / 'checkpoint_2')


def test_a_workdir_that_is_gone(tmp_path):
    saver = checkpoint.Saver(tmp_path / 'run')
    (tmp_path / 'run').write_text('a file')
    saver.save(1, {'state/step': np.int32(1)})
    with pytest.raises(OSError, match='run/checkpoint_1 is not saved .*Not a directory'):
        raised_by_check(saver)
    saver.save(2, {'target/a': np.ones(3)})
    with pytest.raises(OSError, match='run/checkpoint_2 is not saved .*'):
        saver.save(3, {'state/step': np.int32(3)})


def test_an_error_of_the_caller_loses_no_save(tmp_path):
    script = (
        'import sys; sys.path.insert(0, sys.argv[1]); import checkpoint, numpy as np\n'
        "tree = {f'target/{i}': np.ones((512, 512)) for i in range(40)}\n"
        'checkpoint.Saver(sys.argv[2]).save(1, tree)\n'
        "raise SystemExit('a loss that is not finite')"
    )
    arguments = [sys.executable, '-c', script, str(ROOT), str(tmp_path)]
    assert subprocess.run(arguments, capture_output=True).stderr == b'a loss that is not finite\n'
    assert checkpoint.verify(tmp_path / 'checkpoint_1') and os.listdir(tmp_path) == ['checkpoint_1']


@pytest.mark.parametrize(
    'keep, keep_every, left',
    [
        (0, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, 0, [1, 5, 6, 7]),
        (1, 3, [0, 1, 3, 6, 7]),
        (9, 2, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_what_is_kept(tmp_path, keep, keep_every, left):
    saver = checkpoint.Saver(tmp_path, keep, keep_every)
    for step in range(8):
        saver.save(step, {'state/step': np.int32(step), 'target/a': np.ones(3)})
        saver.wait()
        if step == 1:
            (tmp_path / 'checkpoint_1/PINNED').write_text('1')
    assert sorted(os.listdir(tmp_path)) == [f'checkpoint_{step}' for step in left]
    assert all(checkpoint.verify(tmp_path / f'checkpoint_{step}') for step in left)


def test_deleting_that_stops_half_way(tmp_path, monkeypatch):
    def stop(directory):
        (directory / 'target.a/0').unlink()
        raise OSError('power is out')

    saver = checkpoint.Saver(tmp_path, keep=1)
    saver.save(1, {'target/a': np.ones(3)})
    saver.wait()
    monkeypatch.setattr(shutil, 'rmtree', stop)
    saver.save(2, {'target/a': np.ones(3)})
    with pytest.raises(OSError, match='power is out'):
        saver.wait()
    assert checkpoint.steps(tmp_path) == [2] and checkpoint.verify(tmp_path / 'checkpoint_2')
    monkeypatch.undo()
    checkpoint.Saver(tmp_path)
    assert os.listdir(tmp_path) == ['checkpoint_2']


def test_a_name_that_is_not_utf_8(tmp_path):
    with pytest.raises(ValueError, match='is not UTF-8, and TensorStore opens no other names'):
        checkpoint.Saver(tmp_path / os.fsdecode(b'latin-\xe9'))


def test_keep_is_not_negative(tmp_path):
    with pytest.raises(ValueError, match='keep=-1, keep_every=0: must be at least 0'):
        checkpoint.Saver(tmp_path, keep=-1)


# Damage

FILES = {
    'index': 'checkpoint',
    'chunk': 'target.embedding/[0-9]*',
    '.zarray': 'target.*/.zarray',
    'config': 'config.json',
    'position': 'data_position.npy',
    'interval': 'interval.json',
    'manifest': 'manifest.json',
}


def flip(rng, file, others, older):
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(rng, file, others, older):
    os.truncate(file, rng.randrange(file.stat().st_size))


def delete(rng, file, others, older):
    file.unlink()


def zero(rng, file, others, older):
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content))
    end = rng.randint(start + 1, len(content))
    content[start:end] = bytes(end - start)
    file.write_bytes(content)


def swap(rng, file, others, older):
    other = rng.choice(others)
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def stale(rng, file, others, older):
    file.write_bytes(older.read_bytes())


def contents(directory):
    files = [file for file in directory.rglob('*') if file.is_file()]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


FAULTS = [flip, truncate, delete, zero, swap, stale]
# Each fault of each file, but one: .zarray is the same in every step.
EVERY = [(kind, fault) for kind in FILES for fault in FAULTS if (kind, fault) != ('.zarray', stale)]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A workdir with checkpoints 3 and 5, and the tree of each."""
    workdir = tmp_path_factory.mktemp('saved')
    trees = {3: example_tree(), 5: example_tree()}
    trees[5] |= {'target/embedding': -trees[3]['target/embedding'], 'state/step': np.int32(5)}
    for step, tree in trees.items():
        position = io.BytesIO()
        np.save(position, np.full((8, 4), step))
        files = {
            'config.json': b'{"train": {"steps": %d}}' % step,
            'data_position.npy': position.getvalue(),
            'interval.json': b'[{"loss": %d}]' % step,
        }
        checkpoint.save(workdir, step, sharded(tree, mesh(4, 2)), files)
    assert checkpoint.newest_valid(workdir, pytest.fail) == 5
    return workdir, trees


def damage_and_recover(rng, saved, workdir, kind, fault):
    """One fault is found, named and set aside; the checkpoint before it comes back, bit for bit.

    Returns False where the fault has changed nothing, such as zeros that are zeroed.
    """
    source, trees = saved
    directory = workdir / 'checkpoint_5'
    shutil.rmtree(workdir, ignore_errors=True)
    shutil.copytree(source, workdir)
    original = contents(directory)
    file = rng.choice(sorted(directory.glob(FILES[kind])))
    others = sorted(other for other in directory.rglob('*') if other.is_file() and other != file)
    fault(rng, file, others, workdir / 'checkpoint_3' / file.relative_to(directory))
    damaged = contents(directory)
    changed = {name for name in original if damaged.get(name) != original[name]}
    if not changed:
        return False
    if 'manifest.json' in changed:
        changed = {'manifest.json'}  # what should be in the others is not known then
    with pytest.raises(ValueError) as error:
        checkpoint.verify(directory)
    reports = []
    assert checkpoint.newest_valid(workdir, reports.append) == 3
    assert reports == [f'{error.value}. It is set aside as checkpoint_5.damaged-1.']
    assert all(name in reports[0] for name in changed), (changed, reports)
    assert checkpoint.steps(workdir) == [3]
    assert contents(workdir / 'checkpoint_5.damaged-1') == damaged
    assert_same(checkpoint.restore(workdir / 'checkpoint_3'), trees[3])
    return True


def test_every_fault_of_every_file(tmp_path, saved):
    rng = random.Random(1)
    for kind, fault in EVERY:
        while not damage_and_recover(rng, saved, tmp_path / 'run', kind, fault):
            pass


@pytest.mark.slow
def test_200_faults(tmp_path, saved):
    rng, seen = random.Random(1), []
    while len(seen) < 200:
        kind, fault = rng.choice(list(FILES)), rng.choice(FAULTS)
        if damage_and_recover(rng, saved, tmp_path / 'run', kind, fault):
            seen.append((kind, fault))
    assert set(seen) == set(EVERY)


def test_200_faults_of_gzipped_arrays(tmp_path):
    """T5X's own checkpoints have no other checksums than those of gzip."""
    golden, rng, seen = GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6', random.Random(2), []
    expected = checkpoint.restore(golden)
    shutil.copytree(golden, tmp_path / 'checkpoint_6')
    chunks = sorted((tmp_path / 'checkpoint_6').glob('*/[0-9]*'))
    while len(seen) < 200:
        file, fault = rng.choice(chunks), rng.choice([flip, truncate, delete, zero])
        content = file.read_bytes()
        fault(rng, file, None, None)
        path = file.parent.name.replace('.', '/')
        leaf = {path: checkpoint.read_index(tmp_path / 'checkpoint_6')[path]}
        if not file.exists() or file.read_bytes()[10:] != content[10:]:  # before: time, system
            with pytest.raises(ValueError, match=f'^{file.parent}.*: copy the checkpoint again'):
                checkpoint.restore(leaf)
            seen.append(fault)
        elif file.read_bytes()[:4] == content[:4]:  # of what gzip has no checksum nothing depends
            assert_same(checkpoint.restore(leaf), {path: expected[path]})
        file.write_bytes(content)
    assert set(seen) == {flip, truncate, delete, zero}


def test_a_checkpoint_under_a_wrong_name(tmp_path):
    directory = checkpoint.save(tmp_path, 3, {'state/step': np.int32(3)}, {'config.json': b'{}'})
    shutil.copytree(directory, tmp_path / 'copy')
    assert checkpoint.verify(tmp_path / 'copy')
    with pytest.raises(ValueError, match='checkpoint_4 is damaged: manifest.json .*of step 3'):
        checkpoint.verify(directory.rename(tmp_path / 'checkpoint_4'))
    directory = checkpoint.save(tmp_path, 7, {'state/step': np.int32(6)})
    with pytest.raises(ValueError, match='checkpoint_7 is damaged: checkpoint holds step 6'):
        checkpoint.verify(directory)


@pytest.mark.parametrize(
    'files',
    [
        {'config.json': '{"model_type": "t5"}', 'model.safetensors': ''},
        {'config.json': '{"emb_dim": 32}', 'checkpoint': 'model_checkpoint_path: "model.ckpt-5"'},
    ],
    ids=['Hugging Face', 'Mesh-TensorFlow'],
)
def test_other_formats_under_a_name_of_ours_are_not_damaged(tmp_path, files):
    directory = tmp_path / 'checkpoint_5'
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_text(content)
    assert checkpoint.verify(directory) is False
    assert checkpoint.newest_valid(tmp_path, pytest.fail) == 5
    # One of ours that has lost its manifest is damaged.
    (directory / 'config.json').write_text('{"model": {}}')
    with pytest.raises(checkpoint.Damaged, match='manifest.json is missing'):
        checkpoint.verify(directory)


def test_a_file_that_never_ends(tmp_path):
    directory = checkpoint.save(tmp_path, 1, {'target/a': np.ones(3)})
    (directory / 'target.a/0').unlink()
    (directory / 'target.a/0').symlink_to('/dev/zero')
    with pytest.raises(ValueError, match='target.a/0 is missing'):
        checkpoint.verify(directory)


def test_at_most_ten_files_are_named(tmp_path):
    directory = checkpoint.save(tmp_path, 1, {f'target/{i}': np.ones(3) for i in range(30)})
    for folder in directory.glob('target.*'):
        shutil.rmtree(folder)
    with pytest.raises(ValueError) as error:
        checkpoint.verify(directory)
    assert str(error.value).count('target.') == 10 and '\n' not in str(error.value)


def test_no_run_starts_from_scratch_over_damage(tmp_path):
    assert checkpoint.newest_valid(tmp_path / 'nowhere') is None
    for step in (1, 2):
        directory = checkpoint.save(tmp_path, step, {'state/step': np.int32(step)})
        (directory / 'checkpoint').unlink()
    reports = []
    for _ in range(2):  # nor when it is started once more
        with pytest.raises(ValueError, match='has only damaged checkpoints'):
            checkpoint.newest_valid(tmp_path, reports.append)
    assert len(reports) == 2 and 'checkpoint_2 is damaged: checkpoint is missing' in reports[0]
    checkpoint.save(tmp_path, 2, {'state/step': np.int32(2)})
    assert checkpoint.newest_valid(tmp_path, pytest.fail) == 2
    (tmp_path / 'checkpoint_2/manifest.json').write_text('[]')
    with pytest.raises(ValueError, match='has only damaged checkpoints'):
        checkpoint.newest_valid(tmp_path, reports.append)
    assert 'set aside as checkpoint_2.damaged-2' in reports[2]


@pytest.mark.parametrize(
    'closed', ['manifest.json', 'config.json', 'checkpoint', 'target.a', 'target.a/0.0', '.']
)
def test_what_may_not_be_read_is_not_damaged(open_path, closed):
    tmp_path = open_path
    tree = {'target/a': np.ones((2, 3), np.float32), 'state/step': np.int32(2)}
    directory = checkpoint.save(tmp_path, 2, tree, {'config.json': b'{}'})
    checkpoint.save(tmp_path, 1, {'state/step': np.int32(1)})
    (directory / closed).chmod(0)
    words = (
        'checkpoint_2 cannot be read .*Permission denied.*; it may be valid, so it stays as it is'
    )
    with another_user():
        for check in (checkpoint.verify, lambda path: checkpoint.newest_valid(path.parent)):
            with pytest.raises(checkpoint.Unreadable, match=words) as error:
                check(directory)
            assert '\n' not in str(error.value) and str(directory) in str(error.value)
        if closed in ('checkpoint', 'target.a', 'target.a/0.0', '.'):
            with pytest.raises((OSError, ValueError), match='(?i)permission.denied'):
                checkpoint.restore(directory)
    assert sorted(os.listdir(tmp_path)) == ['checkpoint_1', 'checkpoint_2']
    (directory / closed).chmod(0o755)
    assert checkpoint.newest_valid(tmp_path, pytest.fail) == 2


def test_a_disk_that_fails_is_no_damage(tmp_path, monkeypatch):
    def fail(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))

    directory = checkpoint.save(tmp_path, 2, {'target/a': np.ones(3, np.float32)})
    monkeypatch.setattr(checkpoint, '_checksum', fail)
    words = f'{directory} cannot be read (checkpoint: Input/output error; target.a/.zarray: Input'
    with pytest.raises(checkpoint.Unreadable, match=re.escape(words)):
        checkpoint.newest_valid(tmp_path)
    assert os.listdir(tmp_path) == ['checkpoint_2']


def test_a_workdir_that_may_not_be_listed_is_not_empty(open_path):
    tmp_path = open_path
    checkpoint.save(tmp_path / 'run', 2, {'state/step': np.int32(2)})
    (tmp_path / 'run').chmod(0o311)
    with another_user():
        for find in (checkpoint.newest, checkpoint.newest_valid, checkpoint.steps):
            with pytest.raises(OSError, match='run cannot be listed .Permission denied.: correct'):
                find(tmp_path / 'run')


def test_pointers_of_git_lfs_are_not_damage(tmp_path):
    pointer = b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n'
    tree = {'target/a': np.ones((20, 30), np.float32), 'state/step': np.int32(2)}
    directory = checkpoint.save(tmp_path, 2, tree)
    for name in ('target.a/0.0', 'target.a/.zarray', 'checkpoint'):
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(pointer)
        for read in (
            checkpoint.verify,
            checkpoint.restore,
            lambda x: checkpoint.newest_valid(x.parent),
        ):
            with pytest.raises(ValueError, match=f'{name} is a pointer of git-lfs.*git lfs pull'):
                read(directory)
        (directory / name).write_bytes(content)
    assert checkpoint.newest_valid(tmp_path, pytest.fail) == 2


# Refused


@pytest.mark.parametrize(
    'path',
    ['../secret/', 'target.a/../../secret/', 'target.a/../target.a/', '/{}/secret/', 'link/'],
)
def test_paths_that_lead_outside(tmp_path, path):
    write_zarr(tmp_path / 'secret', np.ones(3, np.float32))
    leaf = spec(path.format(tmp_path), [3])
    directory = write_index(tmp_path / 'checkpoint_1', {'target': {'a': leaf}})
    write_zarr(directory / 'target.a', np.ones(3, np.float32))
    (directory / 'link').symlink_to(tmp_path / 'secret')
    with pytest.raises(ValueError, match='is not all files in .*: do not trust this checkpoint'):
        checkpoint.restore(directory)


def test_chunk_that_links_outside(tmp_path):
    directory = checkpoint.save(tmp_path, 1, {'target/a': np.ones(3, np.float32)})
    (directory / 'target.a/0').rename(tmp_path / 'secret')
    (directory / 'target.a/0').symlink_to(tmp_path / 'secret')
    with pytest.raises(ValueError, match='is not all files in .*: do not trust this checkpoint'):
        checkpoint.restore(directory)


def test_a_folder_in_place_of_a_chunk(tmp_path):
    directory = checkpoint.save(tmp_path, 1, {'target/a': np.ones(3, np.float32)})
    (directory / 'target.a/0').rename(directory / 'target.a/1')
    (directory / 'target.a/0').mkdir()
    with pytest.raises(ValueError, match='is not all files in .*: do not trust this checkpoint'):
        checkpoint.restore(directory)


@pytest.mark.parametrize('shape, chunks', [([2**20, 2**20], [3, 1]), ([3, 1], [2**20, 2**20])])
def test_an_array_that_no_file_could_hold(tmp_path, shape, chunks):
    leaf = spec('target.a/', shape)
    directory = write_index(tmp_path / 'checkpoint_1', {'target': {'a': leaf}})
    write_zarr(directory / 'target.a', np.ones([3, 1], np.float32))
    metadata = json.loads((directory / 'target.a/.zarray').read_text())
    metadata |= {'shape': shape, 'chunks': chunks, 'compressor': {'id': 'gzip', 'level': 1}}
    (directory / 'target.a/.zarray').write_text(json.dumps(metadata))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match='bytes cannot hold'):
        checkpoint.restore(directory)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # KiB


def test_zeros_compress_as_well_as_anything(tmp_path):
    """T5X's gzip at its best is no fault."""
    zeros = np.zeros([4096, 4096], np.float32)
    leaf = spec('target.a/', list(zeros.shape))
    directory = write_index(tmp_path / 'checkpoint_1', {'target': {'a': leaf}})
    store = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{directory}/target.a/'}}
    store['metadata'] = {'compressor': {'id': 'gzip', 'level': 9}}
    opened = ts.open(store, create=True, shape=zeros.shape, dtype=ts.float32).result()
    opened.write(zeros).result()
    assert (checkpoint.restore(directory)['target/a'] == 0).all()


@pytest.mark.parametrize(
    'change, message',
    [
        (
            {'kvstore': {'driver': 'http', 'base_url': 'http://example.com/'}},
            "drivers ('zarr', 'http')",
        ),
        ({'driver': 'n5'}, "drivers ('n5', 'file')"),
        ({'metadata': {'shape': [4]}}, 'shape (3,), its index (4,)'),
        ({'dtype': 'bfloat16'}, 'target.a holds float32, its index says bfloat16: copy both'),
        ({'dtype': ['float32']}, "its index says ['float32']"),
        ({'metadata': {'shape': [-3]}}, 'no T5X index (target.a/ has shape (-3,))'),
        ({'metadata': {'shape': ['3']}}, 'no T5X index'),
        ({'metadata': {}}, 'no T5X index'),
        ({'kvstore': 'file:///etc/'}, 'no T5X index'),
    ],
)
def test_specs_refused(tmp_path, change, message):
    directory = tmp_path / 'checkpoint_1'
    write_index(directory, {'target': {'a': spec('target.a/', [3]) | change}})
    write_zarr(directory / 'target.a', np.ones(3, np.float32))
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoint.restore(directory)


def test_old_specs_without_a_dtype(tmp_path):
    leaf = spec('target.a/', [3])
    del leaf['dtype']
    directory = write_index(tmp_path / 'checkpoint_1', {'target': {'a': leaf}})
    write_zarr(directory / 'target.a', np.ones(3, ml_dtypes.bfloat16))
    assert checkpoint.restore(directory)['target/a'].dtype == ml_dtypes.bfloat16


def test_bfloat16_of_version_2_is_refused_as_by_T5X(tmp_path):
    directory = write_index(tmp_path / 'a', {'target': {'a': spec('target.a/', [3])}}, version=2)
    write_zarr(directory / 'target.a', np.ones(3, np.uint16))
    with pytest.raises(ValueError, match='target.a holds uint16, which T5X refuses too'):
        checkpoint.restore(directory)


@pytest.mark.parametrize('version', [0, 1, 4])
def test_versions_refused(tmp_path, version):
    directory = write_index(tmp_path / 'checkpoint_1', {'target': {}}, version)
    with pytest.raises(ValueError, match=f'has version {version}, not 2 or 3'):
        checkpoint.read_index(directory)


@pytest.mark.parametrize(
    'name, content, message',
    [
        ('_METADATA', b'{}', 'has the layout of Orbax: .*use_orbax=False'),
        ('_CHECKPOINT_METADATA', b'{}', 'has the layout of Orbax: .*use_orbax=False'),
        ('checkpoint_7/_CHECKPOINT_METADATA', b'{}', 'checkpoint_7 has the layout of Orbax'),
        (
            'checkpoint',
            msgpack.packb({'a': 'PLACEHOLDER://a'}),
            'version 0, not 2 or 3.*use_orbax=False',
        ),
        (
            'checkpoint',
            b'model_checkpoint_path: "model.ckpt-0"\n',
            'model.ckpt-0.index is missing: bring all files',
        ),
        ('checkpoint', b'', 'no T5X index'),
        ('checkpoint', b'\x83\x01', 'no T5X index'),
        ('checkpoint', b'\x05', 'no T5X index'),
        ('config.json', b'{}', 'checkpoint is missing.* which holds config.json'),
        ('lock', b'', 'has no checkpoint yet: wait until its run has saved one'),
    ],
)
def test_other_layouts_are_recognized(tmp_path, name, content, message):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        convert.read_index(tmp_path)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'tree, words',
    [
        (b'\x81\xa1a' * 1100 + b'\x80', 'no T5X index'),
        ({'a': msgpack.ExtType(1, msgpack.packb(([2**63], 'float32', b'')))}, 'dimension exceeded'),
        ({'a': msgpack.ExtType(1, msgpack.packb(([2**62, 4], 'float32', b'')))}, 'no T5X index'),
        ({'a': msgpack.ExtType(1, msgpack.packb(([1], {'x': 1}, b'1234')))}, 'no T5X index'),
        ({'a': msgpack.ExtType(5, b'')}, 'msgpack extension 5'),
        ({'a': {'__msgpack_chunked_array__': True, 'shape': 5, 'chunks': {}}}, 'no T5X index'),
        ({'a': {'__msgpack_chunked_array__': True, 'shape': {'0': 2**63}, 'chunks': {}}}, 'no T5X'),
        ({'target': {'encoder': {'encoder': {'x': spec('x', [3, 10**9])}}}}, 'no stack of'),
        ({'target': {'encoder': {'encoder': {'x': spec('x', [3])}}}}, 'no stack of'),
        (5, 'no T5X index'),
    ],
)
def test_indices_made_to_harm(tmp_path, tree, words):
    directory = tmp_path / 'checkpoint_1'
    directory.mkdir()
    packed = tree if isinstance(tree, bytes) else msgpack.packb(tree)
    (directory / 'checkpoint').write_bytes(b'\x82\xa7version\x03\xa9optimizer' + packed)
    with pytest.raises(ValueError, match=words) as error:
        convert.read_index(directory)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize('dtype', ['O', 'no_such_type', 'float32'])
def test_index_with_bad_array(tmp_path, dtype):
    leaf = msgpack.ExtType(1, msgpack.packb(((2,), dtype, b'12345678901234567890')))
    directory = write_index(tmp_path / 'checkpoint_1', {'state': {'step': leaf}})
    with pytest.raises(ValueError, match='no T5X index'):
        checkpoint.restore(directory)


def test_compare():
    model = {'target/a': (2, 3), 'target/b': (4,), 'target/c': ()}
    checkpoint.compare(model, dict(reversed(model.items())))
    with pytest.raises(ValueError) as error:
        checkpoint.compare(model, {'target/a': (3, 2), 'target/b': (4,), 'target/d': (1,)})
    assert str(error.value) == (
        'checkpoint of another model: target/a is (3, 2), not (2, 3); '
        'target/c is missing, not (); target/d is (1,), not there'
    )
    found = {path: np.zeros(shape) for path, shape in model.items()}
    assert checkpoint.choose(found, model).keys() == model.keys()
    assert checkpoint.choose(found, model, 'target/[ab]').keys() == {'target/a', 'target/b'}
    less, more = dict(list(found.items())[1:]), found | {'target/d': np.zeros(1)}
    for index, words in [(less, 'target/a is missing'), (more, 'target/d is (1,), not there')]:
        with pytest.raises(ValueError, match=re.escape(words)):
            checkpoint.choose(index, model)
        chosen = checkpoint.choose(index, model, strict=False)
        assert chosen.keys() == index.keys() & model.keys()
    other = found | {'target/a': np.zeros([3, 3])}
    for strict in (True, False):
        with pytest.raises(ValueError, match=re.escape('target/a is (3, 3), not (2, 3)')):
            checkpoint.choose(other, model, strict=strict)
    with pytest.raises(
        ValueError, match="'encoder' matches none of its 3 paths, .* like 'target/c'"
    ):
        checkpoint.choose(found, model, 'encoder')
    with pytest.raises(ValueError, match='and 20 more') as error:
        checkpoint.compare({f'target/{i}': () for i in range(30)}, {})
    assert str(error.value).count('target/') == 10


def test_flatten_and_unflatten():
    nested = {'a': {'b': 1, 'c': {'d': 2}}, 'e': 3}
    flat = {'a/b': 1, 'a/c/d': 2, 'e': 3}
    assert checkpoint.flatten(nested) == flat and checkpoint.unflatten(flat) == nested


def test_the_patterns_of_the_readme():
    """Each takes what the text says: all parameters; all but the vocabulary's arrays, with their slots."""
    patterns = re.findall(r"restore\.only='([^']+)'", (ROOT / 'README.md').read_text())
    index = checkpoint.read_index(GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6')
    expected = checkpoint.shapes(index)
    parameters = {path for path in index if path.startswith('target/')}
    ends = ('token_embedder/embedding', 'decoder/logits_dense/kernel')
    vocabulary = {f'target/{end}' for end in ends}
    vocabulary |= {
        f'state/param_states/{end}/{slot}' for end in ends for slot in ('m', 'v', 'v_row', 'v_col')
    }
    assert vocabulary < index.keys() and len(parameters) == 52
    others = index.keys() - vocabulary
    assert 'target/encoder/relpos_bias/rel_embedding' in others
    taken = [checkpoint.choose(index, expected, pattern).keys() for pattern in patterns]
    assert taken == [parameters, others]
