"""Whole arrays to files and back, in T5X's native layout; each process touches only its part.

    checkpoint_STEP/checkpoint                    msgpack index: small arrays, specs of the others
    checkpoint_STEP/target.encoder.….kernel/0.0   one zarr array a folder, one chunk a file
    checkpoint_STEP/….json                        side files of the caller's; T5X ignores them

A tree is flat here: {'target/encoder/layers_0/attention/query/kernel': array, 'state/step': array}.
Source: t5x/checkpoints.py, t5x/checkpoint_utils.py; flax/serialization.py for msgpack's extensions.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import msgpack
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils

VERSION = 3  # before it, bfloat16 arrays were stored as uint16
ARRAYS_IN_FLIGHT = 8  # bounds the host memory that saving and restoring take
NATIVE = "the native layout is read, not Orbax or Mesh-TF: save with T5X's use_orbax=False"
Shapes = dict[str, tuple[int, ...]]


def save(workdir: Path, step: int, tree: Mapping, files: Mapping[str, bytes] = {}) -> Path:
    """Writes `workdir/checkpoint_STEP`: the flat `tree`, and `files` beside it; all or nothing. Every
    process calls it with the same paths and writes the shards it owns. The folder gets its name when all
    is on disk: a crash leaves at most a `.tmp-SECONDS` folder, which no reader takes."""
    final = Path(workdir).absolute() / f'checkpoint_{step}'
    if final.exists():
        raise ValueError(f'{final} exists, a step is saved once: remove it or use another workdir')
    seconds = multihost_utils.broadcast_one_to_all(np.int32(time.time()))
    tmp = final.with_name(f'{final.name}.tmp-{seconds}')
    if jax.process_index() == 0:
        for stale in tmp.parent.glob('checkpoint_*.tmp-*'):
            shutil.rmtree(stale)
        tmp.mkdir(parents=True)
    multihost_utils.sync_global_devices(f'{tmp} is there')

    index = {path: _index_leaf(path, tree[path]) for path in sorted(tree)}
    stored = [path for path, leaf in index.items() if isinstance(leaf, dict)]
    with ThreadPoolExecutor(ARRAYS_IN_FLIGHT) as pool:
        list(pool.map(lambda path: _write_array(tmp, index[path], tree[path]), stored))
    multihost_utils.sync_global_devices(f'{tmp} holds all arrays')

    if jax.process_index() == 0:
        packed = msgpack.packb({'version': VERSION, 'optimizer': unflatten(index)})
        for name, content in {**files, 'checkpoint': packed}.items():
            (tmp / name).write_bytes(content)
        for path in [*tmp.iterdir(), tmp]:  # TensorStore has synced the chunks
            _sync(path)
        tmp.rename(final)
        _sync(final.parent)
    multihost_utils.sync_global_devices(f'{final} is whole')
    return final


def restore(
    directory: Path,
    wanted: Callable[[str], bool] = lambda path: True,
    shardings: Mapping[str, jax.sharding.Sharding] = {},
) -> dict[str, jax.Array | np.ndarray]:
    """Reads the leaves of a `checkpoint_STEP` whose path is `wanted`, in their stored dtypes. A path in
    `shardings` gives a jax.Array, of which a process reads only its part; others numpy."""
    index = {path: leaf for path, leaf in read_index(directory).items() if wanted(path)}

    def read(path):
        leaf, sharding = index[path], shardings.get(path)
        array = _open_array(directory, path, leaf) if isinstance(leaf, dict) else ts.array(leaf)
        if sharding is None:
            return array.read().result()
        parts = sharding.addressable_devices_indices_map(array.shape).values()
        reads = {str(part): array[part].read() for part in parts}  # once for all its replicas
        return jax.make_array_from_callback(array.shape, sharding, lambda i: reads[str(i)].result())

    with ThreadPoolExecutor(ARRAYS_IN_FLIGHT) as pool:
        return dict(zip(index, pool.map(read, index), strict=True))


def read_index(directory: Path) -> dict[str, np.ndarray | dict]:
    """{path: the array if it is stored inline, else its TensorStore spec}; no nil leaves."""
    file = Path(directory) / 'checkpoint'
    if not file.is_file():
        raise ValueError(f'{file} is missing: name a workdir or a checkpoint_STEP folder; {NATIVE}')
    try:
        hook = {'strict_map_key': False, 'ext_hook': _unpack_extension}
        top = dict(msgpack.unpackb(file.read_bytes(), **hook))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{file} is no T5X index ({error}); {NATIVE}') from error
    if (version := top.get('version', 0)) != VERSION:
        raise ValueError(f'{file} has version {version}, not {VERSION}; {NATIVE}')
    return {path: leaf for path, leaf in flatten(top['optimizer']).items() if leaf is not None}


def steps(workdir: Path) -> list[int]:
    """Steps of the whole checkpoints in `workdir`, ascending."""
    indices = Path(workdir).glob('checkpoint_*/checkpoint')
    matches = (re.fullmatch(r'checkpoint_(\d+)', index.parent.name) for index in indices)
    return sorted(int(match[1]) for match in matches if match)


def newest(workdir: Path) -> int | None:
    return max(steps(workdir), default=None)


def shapes(index: Mapping) -> Shapes:
    """{path: shape} of a flat tree, or of what `read_index` returns."""
    shape = lambda x: x['metadata']['shape'] if isinstance(x, dict) else np.shape(x)  # noqa: E731
    return {path: tuple(shape(leaf)) for path, leaf in index.items()}


def compare(expected: Shapes, found: Shapes) -> None:
    """Raises ValueError unless the shapes of a checkpoint, `found`, are the model's, both ways."""
    names = sorted(path for path in expected | found if expected.get(path) != found.get(path))
    words = [f'{p} is {found.get(p, "missing")}, not {expected.get(p, "there")}' for p in names]
    if words:
        more = f' and {len(words) - 10} more' if len(words) > 10 else ''
        raise ValueError(f'checkpoint of another model: {"; ".join(words[:10])}{more}')


def flatten(tree: Mapping, prefix: str = '') -> dict:
    """Nested dicts to {'a/b': leaf}. A TensorStore spec is a leaf."""
    flat: dict = {}
    for name, node in tree.items():
        if isinstance(node, dict) and not {'driver', 'kvstore', 'metadata'} <= node.keys():
            flat |= flatten(node, f'{prefix}{name}/')
        else:
            flat[f'{prefix}{name}'] = node
    return flat


def unflatten(flat: Mapping) -> dict:
    tree: dict = {}
    for path, leaf in flat.items():
        node, (*parents, name) = tree, path.split('/')
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def _index_leaf(path, array):
    """What T5X's index holds: small arrays packed whole, of others the spec of their folder."""
    # T5X packs what has no logical axes: the step, Adafactor's vectors and (1,) placeholders.
    is_small = array.shape in ((), (1,)) or path.endswith(('/v_row', '/v_col'))
    if is_small and not path.startswith('target/'):
        if isinstance(array, jax.Array):  # whole, though it may be split over processes
            array = multihost_utils.process_allgather(array, tiled=True)
        content = (array.shape, array.dtype.name, np.asarray(array).tobytes())
        return msgpack.ExtType(1, msgpack.packb(content))
    # A chunk is a shard, so no two processes write into one file.
    is_jax = isinstance(array, jax.Array)
    chunks = array.sharding.shard_shape(array.shape) if is_jax else array.shape
    # Differs from T5X: not gzipped, which T5X restores as well and is several times faster.
    metadata = {'chunks': list(chunks), 'compressor': None, 'shape': list(array.shape)}
    kvstore = {'driver': 'file', 'path': path.replace('/', '.') + '/'}
    return {'driver': 'zarr', 'dtype': array.dtype.name, 'kvstore': kvstore, 'metadata': metadata}


def _write_array(directory, spec, array):
    """Writes the shards of this process. Of a shard's replicas the first writes."""
    shards = [((), array)] if jax.process_index() == 0 else []
    if isinstance(array, jax.Array):
        shards = [(s.index, s.data) for s in array.addressable_shards if s.replica_id == 0]
    kvstore = {'driver': 'file', 'path': f'{directory}/{spec["kvstore"]["path"]}'}
    store = ts.open({**spec, 'kvstore': kvstore}, create=True, open=True).result()
    for write in [store[index].write(np.asarray(data)) for index, data in shards]:
        write.result()


def _open_array(directory, path, spec):
    """Opens what a stranger's index names: no file outside of `directory` is read."""
    drivers = spec['driver'], spec['kvstore'].get('driver')
    if drivers not in (('zarr', 'file'), ('zarr', 'gfile')):
        raise ValueError(f'{path} has drivers {drivers}, not zarr and file: save it to a disk')
    name, root = spec['kvstore']['path'], Path(directory).resolve()
    folder = root / name
    files = [folder, *folder.rglob('*')]
    if '..' in folder.parts or not all(file.resolve().is_relative_to(root) for file in files):
        raise ValueError(f'{path} lies at {name}, outside of {root}: do not trust this checkpoint')
    if not (folder / '.zarray').is_file():
        raise ValueError(f'{path} lacks {folder}/.zarray: copy the checkpoint again')
    # Only .zarray is right about chunks and compressor. A lost chunk must not be read as zeros.
    kvstore = {'driver': 'file', 'path': f'{folder}/'}
    here = {'driver': 'zarr', 'kvstore': kvstore, 'fill_missing_data_reads': False}
    array, shape = ts.open(here).result(), tuple(spec['metadata']['shape'])
    if array.shape != shape:
        raise ValueError(f'{path} has shape {array.shape}, its index {shape}: copy both again')
    return array


def _unpack_extension(code, payload):
    """Flax's msgpack extensions 1, array, and 3, numpy scalar."""
    if code not in (1, 3):
        raise ValueError(f'msgpack extension {code}')
    shape, dtype, content = msgpack.unpackb(payload)
    return np.frombuffer(content, dtype).reshape(shape)  # jax teaches numpy the name 'bfloat16'


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
