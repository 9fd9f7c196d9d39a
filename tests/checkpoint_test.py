"""T5X's own checkpoints read and rewritten leaf by leaf; meshes, processes, crashes, strangers."""

import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import msgpack
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoint

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / 'tests/golden'  # written by google-research/t5x, commit cc342d4
TESTDATA = ROOT.parent / 'shared/testdata'

MODELS = {
    't5x_t5_1_1_tiny': GOLDEN / 't5x_t5_1_1_tiny',
    't5x_t5_1_0_tiny': GOLDEN / 't5x_t5_1_0_tiny',
    't5x_factored': TESTDATA / 'golden/t5x_factored',
}


@pytest.fixture(params=[f'{name}/checkpoint_{step}' for name in MODELS for step in (0, 6)])
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
    assert actual.keys() == expected.keys()
    for path in expected:
        a, b = np.asarray(actual[path]), np.asarray(expected[path])
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), path


def write_index(directory, tree, version=3):
    """A foreign checkpoint: `tree` as it shall lie in the msgpack."""
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
    params = checkpoint.restore(directory, wanted=lambda path: path.startswith('target/'))
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
    with pytest.raises(ValueError, match=r'state.param_states.bias/.zarray'):
        checkpoint.restore(directory)


def test_array_without_zarray(tmp_path):
    directory = checkpoint.save(tmp_path, 1, {'target/a': np.zeros(3, np.float32)})
    (directory / 'target.a/.zarray').unlink()
    with pytest.raises(ValueError, match=r'target/a lacks .*target.a/.zarray'):
        checkpoint.restore(directory)


def test_foreign_leaf_forms(tmp_path):
    """gfile, Flax's extensions and nil."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    ext = lambda code, array: msgpack.ExtType(  # noqa: E731
        code, msgpack.packb((array.shape, array.dtype.name, array.tobytes()))
    )
    directory = write_index(
        tmp_path / 'checkpoint_1',
        {
            'target': {
                'gfile': spec('target.gfile/', [3, 4], driver='gfile'),
                'half': ext(1, values.astype(ml_dtypes.bfloat16)),
                'frozen': None,
            },
            'state': {'step': ext(3, np.int32(7)), 'count': 5},
        },
    )
    write_zarr(directory / 'target.gfile', values)
    restored = checkpoint.restore(directory)
    expected = {
        'target/gfile': values,
        'target/half': values.astype(ml_dtypes.bfloat16),
        'state/step': np.int32(7),
        'state/count': np.int64(5),
    }
    assert_same(restored, expected)


def test_lost_chunk_is_not_zeros(tmp_path):
    directory = checkpoint.save(tmp_path, 1, {'target/a': np.zeros((2, 2), np.float32)})
    (
        directory / 'target.a/0.0'
    ).unlink()  # zeros are written too, else they could not be told apart
    with pytest.raises(ValueError, match='target.a/0.0" is missing'):
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


TWO_PROCESSES = """
import shutil, sys
import jax, numpy as np
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(sys.argv[3], 2, int(sys.argv[4]), initialization_timeout=60)
import checkpoint, checkpoint_test
workdir = Path(sys.argv[5])
on_mesh = checkpoint_test.mesh(2, 4)  # 'data' separates the processes
tree = {
    path: jax.make_array_from_callback(array.shape, sharding, lambda i, a=array: np.asarray(a)[i])
    for (path, array), sharding in zip(
        checkpoint_test.example_tree().items(), checkpoint_test.shardings(on_mesh).values())
}
tree['target/on_host'] = np.arange(6, dtype=np.int32) + 100 * jax.process_index()  # the first writes
directory = checkpoint.save(workdir, 3, tree, {'position.json': b'{}'})
try:
    checkpoint.save(workdir, 3, tree)
    raise SystemExit('the second save should fail')
except ValueError as error:
    assert 'a step is saved once' in str(error)

# Without the chunks of the other process, what this process needs is still there.
mine = Path(f'{workdir}-{jax.process_index()}')
shutil.copytree(directory, mine)
(mine / 'target.ids' / str(1 - jax.process_index())).unlink()
for path in mine.glob(f'target.embedding/*.{1 - jax.process_index()}'):
    path.unlink()
wanted = lambda path: path in ('target/ids', 'target/embedding')
restored = checkpoint.restore(mine, wanted, checkpoint_test.shardings(on_mesh))
for path, array in restored.items():
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, checkpoint_test.example_tree()[path][shard.index])
print('done')
"""


def test_two_processes_save_one_process_restores(tmp_path):
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
    assert os.listdir(tmp_path / 'run') == ['checkpoint_3']


# Whole or not at all


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


def test_steps_are_the_whole_ones(tmp_path):
    assert checkpoint.steps(tmp_path / 'nowhere') == [] and checkpoint.newest(tmp_path) is None
    for name in ['checkpoint_9', 'checkpoint_10', 'checkpoint_11.tmp-1700000000', 'checkpoint_x']:
        write_index(tmp_path / name, {})
    (tmp_path / 'checkpoint_12').mkdir()  # no index
    assert checkpoint.steps(tmp_path) == [9, 10] and checkpoint.newest(tmp_path) == 10
    checkpoint.save(tmp_path, 13, {'state/step': np.int32(13)})
    assert not (tmp_path / 'checkpoint_11.tmp-1700000000').exists()


SAVE_FOREVER = """
import sys
sys.path.insert(0, sys.argv[1])
import checkpoint, numpy as np
while True:
    step = (checkpoint.newest(sys.argv[2]) or 0) + 1
    tree = {f'target/{i}': np.full((512, 1024), step, np.float32) for i in range(24)}
    checkpoint.save(sys.argv[2], step, {**tree, 'state/step': np.int32(step)})
    print(step, flush=True)
"""


def test_killed_in_the_middle_of_saving(tmp_path):
    arguments = [sys.executable, '-c', SAVE_FOREVER, str(ROOT), str(tmp_path)]
    last_printed, num_torn = 0, 0
    for num_arrays in (1, 12, 24):
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        try:
            last_printed = int(process.stdout.readline())
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob('checkpoint_*.tmp-*/target.*/0.0'))) < num_arrays:
                assert process.poll() is None and time.monotonic() < deadline
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
        num_torn += len(list(tmp_path.glob('checkpoint_*.tmp-*')))
        assert checkpoint.newest(tmp_path) >= last_printed
        for step in checkpoint.steps(tmp_path):
            restored = checkpoint.restore(tmp_path / f'checkpoint_{step}')
            assert len(restored) == 25
            assert all((array == step).all() for array in restored.values())
            if step < last_printed:
                shutil.rmtree(tmp_path / f'checkpoint_{step}')
    assert num_torn > 0
    checkpoint.save(tmp_path, 1_000_000, {'state/step': np.int32(1_000_000)})
    assert not list(tmp_path.glob('*.tmp-*'))


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
    with pytest.raises(ValueError, match='outside of .*do not trust this checkpoint'):
        checkpoint.restore(directory)


def test_chunk_that_links_outside(tmp_path):
    directory = checkpoint.save(tmp_path, 1, {'target/a': np.ones(3, np.float32)})
    (directory / 'target.a/0').rename(tmp_path / 'secret')
    (directory / 'target.a/0').symlink_to(tmp_path / 'secret')
    with pytest.raises(ValueError, match='outside of .*do not trust this checkpoint'):
        checkpoint.restore(directory)


@pytest.mark.parametrize(
    'change, message',
    [
        (
            {'kvstore': {'driver': 'gcs', 'bucket': 'b', 'path': 'target.a/'}},
            "drivers ('zarr', 'gcs')",
        ),
        (
            {'kvstore': {'driver': 'http', 'base_url': 'http://example.com/'}},
            "drivers ('zarr', 'http')",
        ),
        ({'driver': 'n5'}, "drivers ('n5', 'file')"),
        ({'metadata': {'shape': [4]}}, 'shape (3,), its index (4,)'),
    ],
)
def test_specs_refused(tmp_path, change, message):
    directory = tmp_path / 'checkpoint_1'
    write_index(directory, {'target': {'a': spec('target.a/', [3]) | change}})
    write_zarr(directory / 'target.a', np.ones(3, np.float32))
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoint.restore(directory)


@pytest.mark.parametrize('version', [0, 1, 2, 4])
def test_versions_refused(tmp_path, version):
    directory = write_index(tmp_path / 'checkpoint_1', {'target': {}}, version)
    with pytest.raises(ValueError, match=f'has version {version}, not 3'):
        checkpoint.read_index(directory)


@pytest.mark.parametrize(
    'name, content, message',
    [
        ('_METADATA', b'{}', 'missing.*use_orbax=False'),
        (
            'checkpoint',
            msgpack.packb({'a': 'PLACEHOLDER://a'}),
            'version 0, not 3.*use_orbax=False',
        ),
        (
            'checkpoint',
            b'model_checkpoint_path: "model.ckpt-0"\n',
            'no T5X index .*not Orbax or Mesh-TF',
        ),
        ('checkpoint', b'', 'no T5X index'),
        ('checkpoint', b'\x83\x01', 'no T5X index'),
        ('checkpoint', b'\x05', 'no T5X index'),
        ('config.json', b'{}', 'checkpoint is missing'),
    ],
)
def test_other_layouts_are_recognized(tmp_path, name, content, message):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        checkpoint.restore(tmp_path)
    assert '\n' not in str(error.value)


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
    with pytest.raises(ValueError, match='and 20 more') as error:
        checkpoint.compare({f'target/{i}': () for i in range(30)}, {})
    assert str(error.value).count('target/') == 10


def test_flatten_and_unflatten():
    nested = {'a': {'b': 1, 'c': {'d': 2}}, 'e': spec('e/', [3])}
    flat = {'a/b': 1, 'a/c/d': 2, 'e': spec('e/', [3])}
    assert checkpoint.flatten(nested) == flat and checkpoint.unflatten(flat) == nested
