"""Whole arrays to files and back, in T5X's native layout; each process touches only its part.

    checkpoint_STEP/checkpoint                    msgpack index: small arrays, specs of the others
    checkpoint_STEP/target.encoder.….kernel/0.0   one zarr array a folder, one chunk a file
    checkpoint_STEP/….json                        side files of the caller's; T5X ignores them
    checkpoint_STEP/manifest.json                 size and crc32c of each of these files

Saving goes on behind the next steps: one copy in memory, then threads write it to `checkpoint_STEP.tmp-…`,
a folder that no reader takes, and rename it when all is on disk. A crash at any instant leaves at most that.

A tree is flat here: {'target/encoder/layers_0/attention/query/kernel': array, 'state/step': array}.
Source: t5x/checkpoints.py, t5x/checkpoint_utils.py; flax/serialization.py for msgpack's extensions.
"""

import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import google_crc32c
import jax
import msgpack
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils

import convert

VERSION = 3  # before it, bfloat16 arrays were stored as uint16
CHUNK_BYTES = 64 * 2**20
ARRAYS_IN_FLIGHT = 8  # threads; bounds the host memory that restoring takes
MANIFEST = 'manifest.json'
OURS = (MANIFEST, 'config.json', 'data_position.npy')  # none of them in a checkpoint of T5X
PATIENCE_SECONDS = 600  # without a new file, until other processes are given up
NATIVE = "Orbax is not read: save with T5X's use_orbax=False"
Shapes = dict[str, tuple[int, ...]]


class Saver:
    """Saves into `workdir` behind the training steps. Every process makes one and calls it alike. After
    each save all but the newest `keep` checkpoints go (0: all stay), never a multiple of `keep_every`
    (0: no such) nor one that holds T5X's marker file PINNED."""

    def __init__(self, workdir: Path, keep: int = 0, keep_every: int = 0) -> None:
        if min(keep, keep_every) < 0:
            raise ValueError(f'keep={keep}, keep_every={keep_every}: must be at least 0')
        self.workdir, self.keep, self.keep_every = Path(workdir).absolute(), keep, keep_every
        self._pool = futures.ThreadPoolExecutor(ARRAYS_IN_FLIGHT)
        self._saving: futures.Future | None = None
        # Names the tmp folder alike in all processes, and another in every save.
        self._stamp = int(multihost_utils.broadcast_one_to_all(np.int32(time.time())))
        if jax.process_index() == 0:
            for stale in self.workdir.glob('checkpoint_*.tmp-*'):
                shutil.rmtree(stale)
        multihost_utils.sync_global_devices(f'{self.workdir} is clean')

    def save(self, step: int, tree: Mapping, files: Mapping[str, bytes] = {}) -> None:
        """Copies the flat `tree` and returns: the caller may donate it. Later all of it is in
        `checkpoint_STEP`, `files` beside it. Waits for the save before, raising its OSError."""
        self.wait()
        final = self.workdir / f'checkpoint_{step}'
        if final.exists():
            words = f'{final} exists, a step is saved once'
            raise ValueError(f'{words}: remove it or use another workdir')
        self._stamp += 1
        tmp = final.with_name(f'{final.name}.tmp-{self._stamp}')
        index = {path: _index_leaf(path, tree[path]) for path in sorted(tree)}
        packed = msgpack.packb({'version': VERSION, 'optimizer': unflatten(index)})
        specs = {path: leaf for path, leaf in index.items() if isinstance(leaf, dict)}
        copies = list(self._pool.map(_copy_shards, [tree[path] for path in specs]))
        # All is queued now: even an interpreter that exits does it first.
        written = self._pool.map(_write_array, itertools.repeat(tmp), specs.values(), copies)
        files = {**files, 'checkpoint': packed}
        self._saving = self._pool.submit(self._commit, step, tmp, final, written, files)

    def check(self) -> None:
        """Raises the OSError of a save that failed. Never waits: made to be called every step."""
        if self._saving and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Until the last save is whole, all processes' parts; raises its OSError."""
        if self._saving:
            futures.wait([self._saving])
            saving, self._saving = self._saving, None
            saving.result()

    def _commit(self, step, tmp, final, written, files):
        """Runs in a thread: jax's collectives belong to the steps, so processes meet in files."""
        try:
            sums = {name: pair for pairs in written for name, pair in pairs.items()}
            tmp.mkdir(parents=True, exist_ok=True)
            parts = [tmp / f'part-{i}' for i in range(jax.process_count())]
            unfinished = tmp / f'unfinished-{jax.process_index()}'
            unfinished.write_text(json.dumps(sums))
            unfinished.rename(parts[jax.process_index()])
            if jax.process_index() > 0:
                return _await([final], tmp)
            _await(parts, tmp)
            for part in parts:
                sums |= json.loads(part.read_text())
                part.unlink()
            for name, content in files.items():
                (tmp / name).write_bytes(content)
                sums[name] = _checksum(tmp / name)
            (tmp / MANIFEST).write_bytes(_pack_manifest(step, sums))
            for path in [*tmp.iterdir(), tmp]:  # TensorStore has synced the chunks
                _sync(path)
            tmp.rename(final)
            _sync(final.parent)
        except Exception as error:
            words = f'{final} is not saved ({error}); the checkpoints before it are whole'
            raise OSError(f'{words}: see to the disk and start again') from error
        self._prune()

    def _prune(self):
        for step in steps(self.workdir)[: -self.keep] if self.keep else []:
            directory = self.workdir / f'checkpoint_{step}'
            is_kept = self.keep_every and step % self.keep_every == 0
            if not is_kept and not (directory / 'PINNED').exists():
                doomed = directory.rename(f'{directory}.tmp-deleted')  # first: no half checkpoint
                _sync(self.workdir)
                shutil.rmtree(doomed)


def save(workdir: Path, step: int, tree: Mapping, files: Mapping[str, bytes] = {}) -> Path:
    """Writes `workdir/checkpoint_STEP`: the flat `tree`, and `files` beside it; all or nothing. Every
    process calls it with the same paths and writes the shards it owns. OSError if the disk refuses."""
    saver = Saver(workdir)
    saver.save(step, tree, files)
    saver.wait()
    return saver.workdir / f'checkpoint_{step}'


def restore(
    directory: Path,
    wanted: Callable[[str], bool] = lambda path: True,
    shardings: Mapping[str, jax.sharding.Sharding] = {},
    dtype: str | None = None,
    index: Mapping[str, Any] | None = None,
) -> dict[str, jax.Array | np.ndarray]:
    """Reads the leaves of a checkpoint, in any format of `read_index`, whose path is `wanted`, parameters
    cast to `dtype` if there is one. A path in `shardings` gives a jax.Array, of which a process reads only
    its part (of a foreign checkpoint all, one array after the other); others give numpy. `index`: of
    read_index, where it has been read."""
    index = read_index(directory) if index is None else index
    index = {path: leaf for path, leaf in index.items() if wanted(path)}

    def read(path):
        leaf, sharding = index[path], shardings.get(path)
        if isinstance(leaf, dict):
            array = _open_array(directory, path, leaf)
        else:
            array = ts.array(leaf.read() if hasattr(leaf, 'read') else leaf)
        if dtype and path.startswith('target/'):
            array = ts.cast(array, ts.dtype(dtype))
        if sharding is None:
            return array.read().result()
        parts = sharding.addressable_devices_indices_map(array.shape).values()
        reads = {str(part): array[part].read() for part in parts}  # once for all its replicas
        return jax.make_array_from_callback(array.shape, sharding, lambda i: reads[str(i)].result())

    is_foreign = any(hasattr(leaf, 'read') for leaf in index.values())
    with futures.ThreadPoolExecutor(1 if is_foreign else ARRAYS_IN_FLIGHT) as pool:
        return dict(zip(index, pool.map(read, index), strict=True))


def read_index(directory: str | Path) -> dict[str, Any]:
    """{path: leaf} of T5X's native layout, a Mesh-TF checkpoint (its prefix or folder) or a Hugging Face
    folder. A leaf is an array if it is small; a TensorStore spec; or has `shape` and `read()`."""
    if prefix := convert.mesh_tf_prefix(directory):
        return dict(convert.mesh_tf_index(prefix))
    if convert.is_hugging_face(directory):
        return dict(convert.hugging_face_index(directory, convert.hugging_face_config(directory)))
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


def verify(directory: Path) -> bool:
    """True if every file is as it was saved; False if nobody knows, as T5X saves no checksums. ValueError
    names up to ten damaged files. Every process calls it and reads its share."""
    directory = Path(directory).absolute()
    is_ours = any((directory / name).exists() for name in OURS)
    if not is_ours or convert.mesh_tf_prefix(directory) or convert.is_hugging_face(directory):
        return False
    faults, sums = [], {}
    try:
        content = (directory / MANIFEST).read_bytes()
        step, sums = (json.loads(content)[name] for name in ('step', 'files'))
        if content != _pack_manifest(step, sums):
            raise ValueError('changed')
        if _numbers([directory]) not in ([], [step]):
            raise ValueError(f'of step {step}')
    except FileNotFoundError:
        faults = [f'{MANIFEST} is missing']
    except (OSError, ValueError, TypeError, KeyError) as error:
        faults = [f'{MANIFEST} is damaged ({error})']

    def fault(name):
        if not (directory / name).is_file():  # a stranger might name a device, which never ends
            return f'{name} is missing'
        try:
            size, crc32c = _checksum(directory / name)
        except OSError as error:
            return f'{name} cannot be read ({error.strerror})'
        if size != sums[name][0]:
            return f'{name} has {size} bytes, not {sums[name][0]}'
        return f'{name} has changed' if crc32c != sums[name][1] else None

    own = sorted(sums)[jax.process_index() :: jax.process_count()]
    with futures.ThreadPoolExecutor(ARRAYS_IN_FLIGHT) as pool:
        faults += filter(None, pool.map(fault, own))
    text = '\n'.join(faults).encode()[:4095].ljust(4096, b'\n')
    texts = multihost_utils.process_allgather(np.frombuffer(text, np.uint8)).tobytes()
    faults = list(filter(None, texts.decode(errors='replace').split('\n')))
    if not faults and (stored := read_index(directory).get('state/step', step)) != step:
        faults = [f'checkpoint holds step {stored}']
    if faults:
        raise ValueError(f'{directory} is damaged: {"; ".join(faults[:10])}: use an older one')
    return True


def newest_whole(workdir: Path, report: Callable[[str], None] = print) -> int | None:
    """The newest step that verifies; None if `workdir` has no checkpoint. A damaged one is reported and
    renamed `checkpoint_STEP.damaged-N`; ValueError if no other is left. Every process calls it."""
    workdir = Path(workdir).absolute()
    for step in reversed(_numbers(workdir.glob('checkpoint_*/'))):
        directory = workdir / f'checkpoint_{step}'
        names = (Path(f'{directory}.damaged-{n}') for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        try:
            verify(directory)
            return step
        except ValueError as error:
            report(f'{error}. It is set aside as {aside.name}.')
        if jax.process_index() == 0:
            directory.rename(aside)
        multihost_utils.sync_global_devices(f'{directory} is set aside')
    if damaged := sorted(workdir.glob('checkpoint_*.damaged-*')):
        words = f'{workdir} has only damaged checkpoints, the last {damaged[-1].name}'
        raise ValueError(f'{words}: mend one and name it checkpoint_STEP, or use another workdir')
    return None


def steps(workdir: Path) -> list[int]:
    """Steps of the checkpoints in `workdir`, ascending; a half one has no index or another name."""
    return _numbers(index.parent for index in Path(workdir).glob('checkpoint_*/checkpoint'))


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


def chunk_shape(shape: tuple[int, ...], max_elements: int) -> tuple[int, ...]:
    """The largest dimension shrinks to its next smaller divisor until a chunk has few enough elements.
    Source: t5x/checkpoints.py choose_chunk_shape."""
    chunk = list(shape)
    while math.prod(chunk) > max_elements:
        dim = chunk.index(max(chunk))
        chunk[dim] = max(n for n in range(1, chunk[dim]) if shape[dim] % n == 0)
    return tuple(chunk)


def _index_leaf(path, array):
    """What T5X's index holds: small arrays packed whole, of others the spec of their folder."""
    # T5X packs what has no logical axes: the step, Adafactor's vectors and (1,) placeholders.
    is_small = array.shape in ((), (1,)) or path.endswith(('/v_row', '/v_col'))
    if is_small and not path.startswith('target/'):
        if isinstance(array, jax.Array):  # whole, though it may be split over processes
            array = multihost_utils.process_allgather(array, tiled=True)
        content = (array.shape, array.dtype.name, np.asarray(array).tobytes())
        return msgpack.ExtType(1, msgpack.packb(content))
    # A shard is whole chunks, so no two processes write into one file.
    is_jax = isinstance(array, jax.Array)
    shard = array.sharding.shard_shape(array.shape) if is_jax else array.shape
    chunks = chunk_shape(shard, CHUNK_BYTES // array.dtype.itemsize)
    # Differs from T5X: not gzipped, which T5X restores as well and is several times faster.
    metadata = {'chunks': list(chunks), 'compressor': None, 'shape': list(array.shape)}
    kvstore = {'driver': 'file', 'path': path.replace('/', '.') + '/'}
    return {'driver': 'zarr', 'dtype': array.dtype.name, 'kvstore': kvstore, 'metadata': metadata}


def _pack_manifest(step, sums):
    """Its checksum is one of the step and of {name: (bytes, crc32c)}, and there is one way to write it."""
    content = {'step': step, 'files': sums}
    crc32c = google_crc32c.value(json.dumps(content, sort_keys=True).encode())
    return json.dumps({'crc32c': crc32c, **content}, sort_keys=True, indent=1).encode()


def _copy_shards(array):
    """[(index, numpy copy)] of what this process writes: of a shard's replicas the first."""
    if isinstance(array, jax.Array):
        return [(s.index, np.array(s.data)) for s in array.addressable_shards if s.replica_id == 0]
    whole = (slice(None),) * array.ndim
    return [(whole, np.array(array))] if jax.process_index() == 0 else []


def _write_array(directory, spec, shards):
    """Writes `shards`; {file: (bytes, crc32c)} of their chunks, and of .zarray in the first process."""
    folder, metadata = spec['kvstore']['path'], spec['metadata']
    kvstore = {'driver': 'file', 'path': f'{directory}/{folder}'}
    store = ts.open({**spec, 'kvstore': kvstore}, create=True, open=True).result()
    for write in [store[index].write(data) for index, data in shards]:
        write.result()
    names = ['.zarray'] if jax.process_index() == 0 else []
    for index, _ in shards:
        parts = zip(index, metadata['shape'], metadata['chunks'], strict=True)
        starts = [[i // c for i in range(*part.indices(n)[:2], c)] for part, n, c in parts]
        names += ['.'.join(map(str, chunk)) or '0' for chunk in itertools.product(*starts)]
    return {folder + name: _checksum(directory / folder / name) for name in names}


def _await(files, directory):
    """Returns when all `files` exist. TimeoutError if nothing new comes into `directory` for long."""
    count, deadline = -1, 0.0
    while missing := [file for file in files if not file.exists()]:
        now = sum(len(names) for _, _, names in os.walk(directory))
        if now != count:
            count, deadline = now, time.monotonic() + PATIENCE_SECONDS
        if time.monotonic() > deadline:
            words = f'{missing[0]} is not there and nothing new came for {PATIENCE_SECONDS} s'
            raise TimeoutError(f'{words}: see how its process ended')
        time.sleep(0.1)


def _checksum(file):
    """(bytes, crc32c) of a file."""
    checksum, size = google_crc32c.Checksum(), 0
    with file.open('rb', buffering=0) as stream:
        while block := stream.read(2**20):
            checksum.update(block)
            size += len(block)
    return size, int.from_bytes(checksum.digest())


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


def _numbers(folders):
    matches = (re.fullmatch(r'checkpoint_(\d+)', folder.name) for folder in folders)
    return sorted(int(match[1]) for match in matches if match)


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
