"""T5X's own checkpoints read and rewritten leaf by leaf; meshes, processes, crashes, damage, foreign files."""

import gzip
import json
import os
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
from faults import contents
from forms import first_quick
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

import checkpoint
import formats.open
from messages import Refused
from run import verify, workdir

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / 'tests/golden'  # written by google-research/t5x, commit cc342d4
TESTDATA = ROOT.parent / 'shared/testdata'

MODELS = {
    't5x_t5_1_1_tiny': GOLDEN / 't5x_t5_1_1_tiny',
    't5x_t5_1_0_tiny': GOLDEN / 't5x_t5_1_0_tiny',
    't5x_factored': TESTDATA / 'golden/t5x_factored',
}


NAMES = [f'{name}/checkpoint_{step}' for step in (6, 0) for name in MODELS]


@pytest.fixture(params=first_quick(NAMES, 3))
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
    assert verify.verify(golden) is False  # T5X keeps no checksums


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


def extension(code, array):
    content = (array.shape, array.dtype.name, array.tobytes())
    return msgpack.ExtType(code, msgpack.packb(content))


@pytest.mark.parametrize('version', [2, 3])
def test_foreign_leaf_forms(tmp_path, version):
    """All that T5X has written: drivers, old and long specs, msgpack's extensions, nil."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    old = spec('', [3, 4]) | {'path': 'target.old/', 'kvstore': {'driver': 'file'}}
    transform = {'input_inclusive_min': [0, 0], 'input_exclusive_max': [3, 4]}
    gcs = {'driver': 'gcs', 'bucket': 't5x-dummy-bucket', 'path': 'target.gcs/'}
    tree = {
        'target': {
            'gfile': spec('target.gfile/', [3, 4], driver='gfile'),
            'gcs': spec('', [3, 4]) | {'kvstore': gcs, 'transform': transform},
            'old': old,
            'half': extension(1, values.astype(ml_dtypes.bfloat16)),
            'frozen': None,
        },
        'state': {
            'step': extension(3, np.int32(7)),
            'count': 5,
            'param_states': {'0': {'mu': {'a': extension(1, np.float32([1]))}}, '1': None},
        },
        'flax_mutables': {'statistics': {'mean': extension(1, np.float64(3))}},
    }
    directory = write_index(tmp_path / 'checkpoint_1', tree, version)
    for name in ('gfile', 'gcs', 'old'):
        write_zarr(directory / f'target.{name}', values)
    expected = dict.fromkeys(('target/gfile', 'target/gcs', 'target/old'), values)
    expected |= {
        'target/half': values.astype(ml_dtypes.bfloat16),
        'state/step': np.int32(7),
        'state/count': np.int64(5),
        'state/param_states/0/mu/a': np.float32([1]),
        'flax_mutables/statistics/mean': np.float64(3),
    }
    restored = checkpoint.restore(directory)
    assert_same(restored, expected)
    assert checkpoint.shapes(checkpoint.read_index(directory)) == checkpoint.shapes(expected)
    assert_same(checkpoint.restore(checkpoint.save(tmp_path, 2, restored)), expected)
    index = checkpoint.read_index(directory)  # the index that is written is read
    assert_same(checkpoint.restore(checkpoint.save(tmp_path, 3, index)), expected)


def test_parameters_in_another_dtype(tmp_path):
    tree = example_tree()
    params = {path: x for path, x in tree.items() if path.startswith('target/')}
    narrow = {path: x.astype(ml_dtypes.bfloat16) for path, x in params.items()}
    for like in (tree, sharded(tree, mesh(2, 2))):
        saver = checkpoint.Saver(tmp_path / str(like is tree), dtype='bfloat16')
        saver.save(3, like)
        saver.wait()
        directory = saver.workdir / 'checkpoint_3'
        assert_same(checkpoint.restore(directory), tree | narrow)
        spec = raw_index(directory)['target/embedding']
        assert spec['dtype'] == 'bfloat16' and verify.verify(directory)
        assert (directory / 'target.embedding/0.0').stat().st_size in (24 * 16 * 2, 12 * 8 * 2)
    restored = checkpoint.restore(directory, shardings(mesh(2, 4)), 'float32')
    assert_same(restored, tree | {path: x.astype(np.float32) for path, x in narrow.items()})
    saver = checkpoint.Saver(tmp_path / 'mixed', dtype='float32')  # widens none
    saver.save(3, tree | narrow)
    saver.wait()
    assert_same(checkpoint.restore(saver.workdir / 'checkpoint_3'), tree | narrow)


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
        'target/scale': np.float32([np.nan]),  # a parameter of shape (1,) is not a placeholder
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


def test_chunk_shapes_of_t5x():
    for shape, chunk in [
        ((8192, 8192), (4096, 4096)),
        ((8192, 8193), (4096, 2731)),
        ((32128, 512), (32128, 512)),
        ((32128, 4096), (4016, 4096)),
        ((4096, 10240), (4096, 2560)),
        ((1024, 65536), (1024, 16384)),
        ((250112, 768), (15632, 768)),
        ((), ()),
    ]:
        assert checkpoint.chunk_shape(shape, 2**24) == chunk
    assert checkpoint.chunk_shape((8193,), 4096) == (2731,)


def test_a_shard_of_many_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, 'CHUNK_BYTES', 64)
    tree = example_tree()
    directory = checkpoint.save(tmp_path, 3, sharded(tree, mesh(2, 2)))
    sizes = {f.stat().st_size for f in directory.glob('target.embedding/[0-9]*')}
    assert len(list(directory.glob('target.embedding/[0-9]*'))) == 24 and sizes == {64}
    sums = json.loads((directory / 'manifest.json').read_text())['files']
    assert sums.keys() == contents(directory).keys() - {'manifest.json'}
    assert verify.verify(directory)
    assert_same(checkpoint.restore(directory, shardings=shardings(mesh(4, 2))), tree)


TWO_PROCESSES = """
import contextlib, json, shutil, sys, time
import jax, numpy as np, pytest
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(sys.argv[3], 2, int(sys.argv[4]), initialization_timeout=300)
import checkpoint, checkpoint_test, permissions
from run import verify
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
assert verify.verify(directory)
with pytest.raises(AssertionError, match='checkpoint_3'):  # a step is saved once
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
assert verify.newest_valid(workdir, reports.append) == 3
assert len(reports) == 1 and all(f'{name} has 0 bytes' in reports[0] for name in damaged), reports

# A file that only one process may not read is known to both, and stays.
sums = json.loads((workdir / 'checkpoint_3/manifest.json').read_text())['files']
closed = workdir / 'checkpoint_3' / sorted(sums)[1]
if jax.process_index() == 0:
    closed.chmod(0)
multihost_utils.sync_global_devices('closed')
with permissions.another_user() if jax.process_index() == 1 else contextlib.nullcontext():
    with pytest.raises(OSError, match=f'{sorted(sums)[1]}: Permission denied'):
        verify.newest_valid(workdir, reports.append)
multihost_utils.sync_global_devices('seen')
if jax.process_index() == 0:
    closed.chmod(0o644)
multihost_utils.sync_global_devices('open')
assert verify.newest_valid(workdir, reports.append) == 3 and len(reports) == 1

# A process that does not finish its part: the other gives up.
checkpoint.TIMEOUT_SECONDS = 1
commit = checkpoint.Saver._commit
for step, dead, lost in [(5, 1, r'part-[0-9]+-1'), (6, 0, 'checkpoint_6')]:
    checkpoint.Saver._commit = commit if jax.process_index() != dead else lambda *_: None
    saver.save(step, tree)
    if jax.process_index() == dead:
        saver.wait()
    else:
        with pytest.raises(OSError, match=lost):
            saver.wait()
    multihost_utils.sync_global_devices(f'{step} is given up')
    assert verify.newest_valid(workdir, reports.append) == 3

# The same step once more: what the first attempt left is not taken for a part of the second.
checkpoint.Saver._commit, write_array = commit, checkpoint._write_array
checkpoint.TIMEOUT_SECONDS = 40
def late(*args):
    time.sleep(jax.process_index() * 0.1)
    return write_array(*args)
checkpoint._write_array = late
saver.save(6, {path: x + 1 for path, x in tree.items()} | {'state/step': np.int32(6)})
saver.wait()
assert verify.newest_valid(workdir, reports.append) == 6
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
        outputs = [process.communicate(timeout=600)[0] for process in processes]
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
    with pytest.raises(AssertionError, match='checkpoint_5'):  # a step is saved once
        checkpoint.save(directory.parent, 5, {'state/step': np.int32(6)})
    assert_same(checkpoint.restore(directory), tree)


def test_steps_are_the_complete_ones(tmp_path):
    assert checkpoint.steps(tmp_path / 'nowhere') == []
    for name in ['checkpoint_9', 'checkpoint_10', 'checkpoint_11.tmp-1700000000', 'checkpoint_x']:
        write_index(tmp_path / name, {})
    (tmp_path / 'checkpoint_12').mkdir()  # no index
    assert checkpoint.steps(tmp_path) == [9, 10]
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


def test_of_a_checkpoint_that_was_moved_only_the_link_is_deleted(tmp_path):
    moved = checkpoint.save(tmp_path / 'elsewhere', 7, {'state/step': np.int32(7)})
    (tmp_path / 'run').mkdir()
    link = tmp_path / 'run/checkpoint_7'
    link.symlink_to(moved)
    checkpoint.delete(link)
    assert os.listdir(tmp_path / 'run') == [] and verify.verify(moved)


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


def test_a_workdir_that_is_gone(tmp_path):
    saver = checkpoint.Saver(tmp_path / 'run')
    (tmp_path / 'run').write_text('a file')
    saver.save(1, {'state/step': np.int32(1)})
    with pytest.raises(OSError, match='run/checkpoint_1 .*Not a directory'):
        raised_by_check(saver)
    saver.save(2, {'target/a': np.ones(3)})
    with pytest.raises(OSError, match='run/checkpoint_2 '):
        saver.save(3, {'state/step': np.int32(3)})


@pytest.mark.slow
def test_an_error_of_the_caller_loses_no_save(tmp_path):
    script = (
        'import sys; sys.path.insert(0, sys.argv[1]); import checkpoint, numpy as np\n'
        "tree = {f'target/{i}': np.ones((512, 512)) for i in range(40)}\n"
        'checkpoint.Saver(sys.argv[2]).save(1, tree)\n'
        "raise SystemExit('a loss that is not finite')"
    )
    arguments = [sys.executable, '-c', script, str(ROOT), str(tmp_path)]
    assert subprocess.run(arguments, capture_output=True).stderr == b'a loss that is not finite\n'
    assert verify.verify(tmp_path / 'checkpoint_1') and os.listdir(tmp_path) == ['checkpoint_1']


@pytest.mark.parametrize(
    'keep, keep_every, left', [(3, 0, [1, 5, 6, 7]), (1, 3, [0, 1, 3, 6, 7]), (9, 2, range(8))]
)
def test_what_is_kept(tmp_path, keep, keep_every, left):
    save = ConfigDict({'keep': keep, 'keep_every': keep_every})
    saver = checkpoint.Saver(tmp_path, prune=lambda: workdir.prune(tmp_path, save))
    for step in range(8):
        saver.save(step, {'state/step': np.int32(step), 'target/a': np.ones(3)})
        saver.wait()
        if step == 1:
            (tmp_path / 'checkpoint_1/PINNED').write_text('1')
    assert sorted(os.listdir(tmp_path)) == [f'checkpoint_{step}' for step in left]
    assert all(verify.verify(tmp_path / f'checkpoint_{step}') for step in left)


# Refused


def write_array(folder, leaf, stored):
    """Write a foreign checkpoint of one array: `leaf` of its index, and what is stored."""
    directory = write_index(folder / 'checkpoint_1', {'target': {'a': leaf}})
    write_zarr(directory / 'target.a', stored)
    return directory


def put_a_folder_in_its_place(array):
    (array / '0').unlink()
    (array / '0').mkdir()


def test_files_of_an_array_that_are_refused(tmp_path):
    faults = [
        put_a_folder_in_its_place,
        lambda array: (array / '0').unlink(),
        lambda array: (array / '.zarray').unlink(),
        lambda array: (array / '.zarray').write_text('{'),
    ]
    for i, fault in enumerate(faults):
        directory = checkpoint.save(tmp_path / str(i), 1, {'target/a': np.zeros(3, np.float32)})
        fault(directory / 'target.a')
        with pytest.raises(Refused, match='target.a'):
            checkpoint.restore(directory)


def test_specs_refused(tmp_path):
    for i, (change, stored) in enumerate(
        [
            ({'metadata': {'shape': [4]}}, 'float32'),
            ({'dtype': 'bfloat16'}, 'float32'),
            ({'dtype': 'uint16'}, 'uint16'),  # bfloat16 of version 2; T5X refuses it, too
        ]
    ):
        directory = write_array(
            tmp_path / str(i), spec('target.a/', [3]) | change, np.ones(3, stored)
        )
        with pytest.raises(Refused, match=str(directory)):
            checkpoint.restore(directory)


def test_old_specs_without_a_dtype(tmp_path):
    leaf = spec('target.a/', [3])
    del leaf['dtype']
    directory = write_array(tmp_path, leaf, np.ones(3, ml_dtypes.bfloat16))
    assert checkpoint.restore(directory)['target/a'].dtype == ml_dtypes.bfloat16


def test_other_layouts_are_recognized(tmp_path):
    for i, (name, content) in enumerate(
        [
            *((name, b'{}') for name in ('_METADATA', '_CHECKPOINT_METADATA', 'config.json')),
            ('checkpoint_7/_CHECKPOINT_METADATA', b'{}'),
            ('checkpoint', msgpack.packb({'a': 'PLACEHOLDER://a'})),  # Orbax, too
            *(('checkpoint', msgpack.packb({'version': v, 'optimizer': {}})) for v in (1, 4)),
            ('checkpoint', b'model_checkpoint_path: "model.ckpt-0"\n'),
            *(('checkpoint', content) for content in (b'', b'\x83\x01', b'\x05')),
        ]
    ):
        folder = tmp_path / str(i)
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(content)
        with pytest.raises(Refused, match=str(folder)) as error:
            formats.open.open_checkpoint(folder)
        assert '\n' not in str(error.value)
        assert 'METADATA' not in name or 'use_orbax=False' in str(error.value)
