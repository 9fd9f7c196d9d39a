"""Save and restore unsharded arrays, in T5X's native layout.

    checkpoint_STEP/checkpoint                    msgpack index: small arrays, specs of the others
    checkpoint_STEP/target.encoder.….kernel/0.0   one zarr array per folder, one chunk per file
    checkpoint_STEP/….json                        side files of the caller, which T5X ignores
    checkpoint_STEP/manifest.json                 size and crc32c of each of these files

A tree is flat here: {'target/encoder/layers_0/attention/query/kernel': array, 'state/step': array}. Every
process makes the same calls, and reads or writes only its own shards.

A save copies the arrays once in host memory and returns. Threads write the copies to `checkpoint_STEP.tmp-…`,
which no reader opens, and rename this folder when everything is on the disk. A crash leaves at most that folder.
A bucket cannot rename: there the index is written last, and a folder without it is an unfinished checkpoint.

Source: T5X t5x/checkpoints.py, t5x/checkpoint_utils.py; Flax flax/serialization.py for msgpack's extensions.
"""

import contextlib
import functools
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import google_crc32c
import jax
import msgpack
import numpy as np
import tensorstore as ts
from absl import logging
from jax.experimental import multihost_utils
from numpy.typing import NDArray

import paths
from messages import Refused, first_ten
from paths import AnyPath, list_folder

VERSION = 3  # version 2 stores bfloat16 arrays as uint16
CHUNK_BYTES = 64 * 2**20
# Shared: otherwise each array looks up credentials, and logs it. Memory mapping avoids a copy of each file.
CONTEXT = ts.Context({'file_io_mode': {'mode': 'memmap'}})
ARRAYS_IN_FLIGHT = 8  # threads; bounds the host memory
TIMEOUT_SECONDS = 600  # wait for another process's next file
INDEX = 'checkpoint'
MANIFEST = 'manifest.json'
PARAMETER_PREFIX = 'target/'
SLOT_PREFIX = 'state/param_states/'
UNPACK_ERRORS = (ValueError, TypeError, KeyError, AttributeError)  # from damaged content
ORBAX_REMEDY = "Orbax is not read: save with T5X's use_orbax=False"
Shapes = dict[str, tuple[int, ...]]


class LazyArray(Protocol):
    """An array of a checkpoint that is read later, in its stored dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self): ...  # np.dtype: mypy reads Any in its parameter

    def read(self) -> NDArray: ...


Leaf = NDArray | jax.Array | LazyArray  # in a flat tree
IN_MEMORY = (np.ndarray, np.generic, jax.Array)  # a leaf of another type is a LazyArray
T = TypeVar('T')


def read_leaf(leaf: Leaf) -> NDArray | jax.Array:
    """Return a leaf as an array; read a LazyArray."""
    return leaf if isinstance(leaf, IN_MEMORY) else leaf.read()


class Checksum(NamedTuple):
    num_bytes: int
    crc32c: int


# Saving.


@dataclass(eq=False)
class Saver:
    """Saves checkpoints into a workdir during training. Every process makes one and makes the same calls."""

    folder: str | AnyPath
    dtype: str = ''  # widest dtype of saved parameters; '': no limit
    # Deletes old checkpoints: called in the first process, after each save.
    prune: Callable[[], None] = lambda: None
    num_threads: int = ARRAYS_IN_FLIGHT

    def __post_init__(self) -> None:
        self.workdir = paths.to_path(self.folder)
        paths.to_kvstore(self.workdir)  # raises early for a name that TensorStore cannot open
        self._pool = futures.ThreadPoolExecutor(self.num_threads)
        self._saving: futures.Future | None = None
        # In the name of the temporary folder: the same in all processes, new in every save.
        self._stamp = int(multihost_utils.broadcast_one_to_all(np.int32(time.time() % 2**31)))
        if jax.process_index() == 0:
            for folder in unfinished(self.workdir):  # left by earlier runs
                paths.remove_folder(folder)
        multihost_utils.sync_global_devices(f'{self.workdir} is clean')

    def save(self, step: int, tree: Mapping, files: Mapping[str, bytes] = {}) -> None:
        """Start saving the flat `tree` and the side `files` as `checkpoint_STEP`.

        Waits for the previous save, and raises its OSError. Returns when the arrays are copied: the caller may donate
        them. A LazyArray is read when it is written.
        """
        self.wait()
        final = self.workdir / f'checkpoint_{step}'
        assert not commit_of(final).exists(), final  # a step is saved once
        self._stamp += 1
        tmp = final
        if isinstance(final, Path):
            tmp = final.with_name(f'{final.name}.tmp-{self._stamp}')
        index = _make_index(tree, self.dtype)
        specs = {path: index[path] for path in tree if isinstance(index[path], dict)}
        shards = list(self._pool.map(_copy_shards, [tree[path] for path in specs], specs.values()))
        # All are queued now; an interpreter that exits drains the queue first.
        checksums = self._pool.map(functools.partial(_write_array, tmp), specs.values(), shards)
        packed = msgpack.packb({'version': VERSION, 'optimizer': unflatten(index)})
        files = {**files, INDEX: packed}  # written in this order
        self._saving = self._pool.submit(self._commit, step, tmp, checksums, files)

    def check(self) -> None:
        """Raise the OSError of a save that failed, without waiting."""
        if self._saving and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is complete in all processes. Raise its OSError, once."""
        if self._saving:
            futures.wait([self._saving])
            saving = self._saving
            self._saving = None
            saving.result()

    def close(self) -> None:
        """Cancel the queued writes and wait until no thread writes."""
        self._pool.shutdown(cancel_futures=True)

    def _commit(
        self, step: int, tmp: AnyPath, arrays: Iterable[Mapping], files: Mapping[str, bytes]
    ) -> None:
        """Finish a save: wait for the arrays, write the manifest and `files`, rename `tmp`.

        Runs in a thread. The processes synchronize through files, because collectives belong to the training steps.
        """
        final = self.workdir / f'checkpoint_{step}'
        parts = [tmp / f'part-{self._stamp}-{i}' for i in range(jax.process_count())]
        try:
            if isinstance(tmp, Path):
                tmp.mkdir(parents=True, exist_ok=True)
            checksums: dict[str, Checksum] = {}
            for array_files in arrays:
                checksums |= array_files
            paths.replace_file(parts[jax.process_index()], json.dumps(checksums).encode())
            if jax.process_index() > 0:
                _await([commit_of(final)], tmp)
                return
            _await(parts, tmp)
            for part in parts:
                checksums |= json.loads(part.read_bytes())
                part.unlink()
            for name, content in files.items():
                checksums[name] = Checksum(len(content), google_crc32c.value(content))
            for name, content in {MANIFEST: pack_manifest(step, checksums), **files}.items():
                paths.replace_file(tmp / name, content)
            if isinstance(tmp, Path):
                for path in (*tmp.iterdir(), tmp):  # TensorStore has synced the chunks
                    _sync(path)
                tmp.rename(final)
                _sync(tmp.parent)
        except (OSError, ValueError) as error:  # TensorStore's errors are ValueErrors
            raise OSError(f'{final} is not saved ({paths.reason(error)})') from error
        self.prune()


def delete(directory: AnyPath) -> None:
    """Delete a checkpoint. Unmark it first, so that no reader finds half of its files."""
    if directory.is_symlink():
        directory.unlink()  # its target is the user's
        return
    if isinstance(directory, Path):
        directory = directory.rename(f'{directory}.tmp-deleted')
        _sync(directory.parent)
    else:
        commit_of(directory).unlink()
    paths.remove_folder(directory)


def save(
    workdir: str | AnyPath, step: int, tree: Mapping, files: Mapping[str, bytes] = {}
) -> AnyPath:
    """Write the flat `tree` and the side `files` to `workdir/checkpoint_STEP`, or nothing; return its path.

    Writes one array at a time, to save memory.
    """
    with contextlib.closing(Saver(workdir, num_threads=1)) as saver:
        saver.save(step, tree, files)
        saver.wait()
    return saver.workdir / f'checkpoint_{step}'


def _make_index(tree: Mapping[str, Leaf], dtype: str) -> dict:
    """Return {path: packed array or spec for TensorStore} of a flat tree, sorted; `dtype` is for parameters.

    As in T5X, arrays without logical axes are packed into the index: the step, placeholders of shape [1], and the
    vectors of Adafactor's factored second moments.
    """
    index: dict = {}
    for path in sorted(tree):
        leaf = tree[path]
        shape = np.shape(leaf)
        owner, _, _ = path.removeprefix(SLOT_PREFIX).rpartition('/')
        is_factor = len(shape) == 1 and np.shape(tree.get(PARAMETER_PREFIX + owner, leaf)) != shape
        if not is_parameter(path) and (shape in ((), (1,)) or is_factor):
            array = read_leaf(leaf)
            if isinstance(array, jax.Array):  # may be split over processes
                array = multihost_utils.process_allgather(array, tiled=True)
            content = (array.shape, array.dtype.name, np.asarray(array).tobytes())
            index[path] = msgpack.ExtType(1, msgpack.packb(content))  # as Flax packs an array
            continue
        saved_dtype = leaf.dtype.name
        if dtype and is_parameter(path) and leaf.dtype.itemsize > np.dtype(dtype).itemsize:
            saved_dtype = dtype
        shard_shape = shape
        if isinstance(leaf, jax.Array):  # chunks lie within a shard: processes share no file
            shard_shape = leaf.sharding.shard_shape(shape)
        max_elements = CHUNK_BYTES // ts.dtype(saved_dtype).numpy_dtype.itemsize
        index[path] = {
            'driver': 'zarr',
            'dtype': saved_dtype,
            'kvstore': {'driver': 'file', 'path': path.replace('/', '.') + '/'},
            'metadata': {
                'chunks': list(chunk_shape(shard_shape, max_elements)),
                # Differs from T5X: uncompressed, several times faster; T5X reads it.
                'compressor': None,
                'shape': list(shape),
            },
        }
    return index


def chunk_shape(shape: tuple[int, ...], max_elements: int) -> tuple[int, ...]:
    """Return T5X's chunk shape (choose_chunk_shape): the largest dimension shrinks to its next divisor until it fits."""
    chunk = list(shape)
    while math.prod(chunk) > max_elements:
        dim = chunk.index(max(chunk))
        chunk[dim] = max(n for n in range(1, chunk[dim]) if shape[dim] % n == 0)
    return tuple(chunk)


class Shard(NamedTuple):
    slices: 'tuple[slice[int | None, int | None, int | None], ...]'
    data: NDArray | LazyArray


def _copy_shards(leaf: Leaf, spec: Mapping) -> list[Shard]:
    """Return copies of this process's shards, in the dtype of `spec`; a LazyArray is not copied."""
    dtype = np.dtype(spec['dtype'])  # jax registers 'bfloat16' with numpy
    if isinstance(leaf, jax.Array):
        shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        return [Shard(shard.index, np.array(shard.data, dtype)) for shard in shards]
    if jax.process_index() > 0:
        return []
    data = np.array(leaf, dtype) if isinstance(leaf, IN_MEMORY) else leaf
    return [Shard((slice(None),) * len(leaf.shape), data)]


def _write_array(directory: AnyPath, spec: Mapping, shards: Sequence[Shard]) -> dict[str, Checksum]:
    """Write `shards`; return the checksums of their files."""
    folder = spec['kvstore']['path']
    spec = {**spec, 'kvstore': paths.to_kvstore(directory / folder)}
    store = ts.open(spec, create=True, open=True, context=CONTEXT).result()
    writes = [store[shard.slices].write(read_leaf(shard.data)) for shard in shards]
    for write in writes:
        write.result()
    chunks = spec['metadata']['chunks']
    names = ['.zarray']
    for shard in shards:
        numbers = []  # chunk numbers, in each dimension
        for part, size, chunk in zip(shard.slices, store.shape, chunks, strict=True):
            start, stop, _ = part.indices(size)
            numbers.append(range(start // chunk, math.ceil(stop / chunk)))
        for position in itertools.product(*numbers):
            names.append('.'.join(map(str, position)) or '0')  # '0': a scalar's chunk
    return {f'{folder}{name}': checksum(directory / folder / name) for name in names}


def _await(files: Sequence[AnyPath], directory: AnyPath) -> None:
    """Wait until all `files` exist. Raise TimeoutError if `directory` gets no new file in TIMEOUT_SECONDS."""
    num_entries = 0
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        pending = [file for file in files if not file.exists()]
        if not pending:
            return
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            count = len(list(directory.glob('**/*')))
            if count != num_entries:
                num_entries = count
                deadline = time.monotonic() + TIMEOUT_SECONDS
        if time.monotonic() > deadline:
            raise TimeoutError(f'{pending[0]} is missing after {TIMEOUT_SECONDS} s')
        time.sleep(0.1 if isinstance(directory, Path) else 1.0)


def _sync(path: Path) -> None:
    """Wait until a file or a folder's list of files is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def pack_manifest(step: int, checksums: Mapping[str, Checksum]) -> bytes:
    """Return the manifest, with a checksum of its own."""
    content = {'step': step, 'files': checksums}
    crc32c = google_crc32c.value(json.dumps(content, sort_keys=True).encode())
    return json.dumps({'crc32c': crc32c, **content}, sort_keys=True, indent=1).encode()


def checksum(file: AnyPath) -> Checksum:
    crc32c = google_crc32c.Checksum()
    size = 0
    with paths.open_file(str(file)) as stream:
        for block in crc32c.consume(stream, 2**20):
            size += len(block)
    return Checksum(size, int.from_bytes(crc32c.digest()))


# Reading.


def restore(
    source: str | AnyPath | Mapping[str, Leaf],
    shardings: Mapping[str, jax.sharding.Sharding] = {},
    dtype: str = '',
) -> dict[str, jax.Array | NDArray]:
    """Return the arrays of a checkpoint, or of the leaves of an index.

    A path in `shardings` gives a jax.Array, and a process reads only its shards; other paths give numpy arrays.
    Parameters are cast to `dtype` if given. Refuses a damaged array; warns of NaN or infinity in parameters.
    """
    index = source if isinstance(source, Mapping) else read_index(source)
    num_threads = ARRAYS_IN_FLIGHT
    if not all(isinstance(leaf, (*IN_MEMORY, ZarrEntry)) for leaf in index.values()):
        num_threads = 1  # other formats read unsplit arrays: one at a time bounds the memory

    not_finite = []

    def restore_leaf(path):
        leaf = index[path]
        sharding = shardings.get(path)
        if isinstance(leaf, ZarrEntry):
            array = leaf.open()
            result_of = leaf.result_of
        else:
            array = ts.array(read_leaf(leaf))
            result_of = ts.Future.result
        if dtype and is_parameter(path):
            array = ts.cast(array, ts.dtype(dtype))
        if sharding is None:
            return result_of(array.read())
        reads: dict[str, ts.Future] = {}  # shared by the replicas of a shard
        for part in sharding.addressable_devices_indices_map(array.shape).values():
            if str(part) not in reads:
                reads[str(part)] = array[part].read()
        shards = {part: result_of(read) for part, read in reads.items()}
        if is_parameter(path):  # sums are one pass over memory that was just read
            sums = [shard.sum(dtype=np.float32) for shard in shards.values()]
            if not np.isfinite(sums).all():
                not_finite.append(path)
        return jax.make_array_from_callback(array.shape, sharding, lambda part: shards[str(part)])

    # Largest first: reading needs several copies of an array, so do it while little else is in memory.
    ordered = sorted(index, key=lambda path: math.prod(np.shape(index[path])), reverse=True)
    with futures.ThreadPoolExecutor(num_threads) as pool:
        arrays = dict(zip(ordered, pool.map(restore_leaf, ordered), strict=True))
    if not_finite:
        names = first_ten(sorted(not_finite))
        logging.warning(f'NaN or infinity in {names}: its answers are wrong')
    return {path: arrays[path] for path in index}


def read_index(path: str | AnyPath) -> dict[str, Leaf]:
    """Return {path: numpy array or LazyArray} of a folder or index in T5X's native layout; refuse others."""
    path = paths.to_path(path)
    file = path if paths.is_file(path) else path / INDEX
    content = paths.own_file(file).read_bytes()

    def leaf_of_map(node: dict) -> 'dict | ZarrEntry':
        if not {'driver', 'kvstore', 'metadata'} <= node.keys():
            return node
        # TensorStore before 0.1.14 put the name at the top level.
        name = str(node['kvstore'].get('path') or node.get('path'))
        return ZarrEntry(file.parent / name, node)

    def array_of_extension(code: int, payload: bytes) -> NDArray:
        shape, dtype, content = msgpack.unpackb(payload)
        return np.frombuffer(content, dtype).reshape(shape)  # jax registers 'bfloat16' with numpy

    leaves: dict[str, Leaf] = {}
    try:
        top = msgpack.unpackb(content, object_hook=leaf_of_map, ext_hook=array_of_extension)
        if top.get('version') not in (2, VERSION):
            raise Refused(f'its version is {top.get("version")}')
        # JAX leaves out nil, a parameter without optimizer state.
        for keys, leaf in jax.tree_util.tree_leaves_with_path(top.get('optimizer', {})):
            name = jax.tree_util.keystr(keys, simple=True, separator='/')
            leaves[name] = leaf if isinstance(leaf, ZarrEntry) else np.asarray(leaf)
    except UNPACK_ERRORS as error:
        rule = f'name a checkpoint; {ORBAX_REMEDY}'
        raise Refused(f'{file} is not a T5X index ({error}): {rule}') from error
    return leaves


@dataclass(frozen=True, eq=False)
class ZarrEntry:
    """A LazyArray in T5X's layout: the index's `spec` describes the zarr folder `folder`."""

    folder: AnyPath
    spec: Mapping

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.spec['metadata']['shape'])

    @property
    def dtype(self):
        return self.open().dtype.numpy_dtype

    def read(self) -> NDArray:
        return self.result_of(self.open().read())

    def open(self) -> ts.TensorStore:
        """Return the stored array. Refuses one that is incomplete or does not match the spec.

        Only name, shape and dtype of the spec count: only .zarray is right about chunks and compressor.
        """
        if isinstance(self.folder, Path):
            for file in paths.list_folder(self.folder):
                if file.stat().st_size < 200:  # may be a pointer of git-lfs: refuse it
                    paths.own_file(file)
        spec = {
            'driver': 'zarr',
            'kvstore': paths.to_kvstore(self.folder),
            'fill_missing_data_reads': False,  # a lost chunk is an error, not zeros
        }
        array = self.result_of(ts.open(spec, context=CONTEXT))
        actual = (array.dtype.name, array.shape)
        expected = (self.spec.get('dtype', array.dtype.name), self.shape)  # old specs have no dtype
        if actual != expected or 'uint16' in actual:  # T5X also refuses uint16
            raise Refused(f'{self.folder} has {actual}, not {expected}: copy it again')
        return array

    def result_of(self, future: ts.Future[T]) -> T:
        """Return the result of a TensorStore operation on this array, or raise an error with a remedy."""
        try:
            return future.result()
        except ValueError as error:  # a damaged, missing or forbidden file
            raise Refused(f'{self.folder} cannot be read ({error}): copy it again') from error


# The checkpoints of a workdir.


def steps(workdir: str | AnyPath) -> list[int]:
    """Return the steps of the finished checkpoints in `workdir`, ascending."""
    folders = step_folders(paths.to_path(workdir))
    return [step for step in folders if paths.is_file(folders[step] / INDEX)]


def commit_of(directory: AnyPath) -> AnyPath:
    """Return the path whose existence marks a finished checkpoint: its folder, in a bucket its index."""
    return directory if isinstance(directory, Path) else directory / INDEX


def unfinished(workdir: AnyPath) -> list[AnyPath]:
    """Return the folders that interrupted saves and deletions left in a workdir."""
    if not isinstance(workdir, Path):
        return [x for x in step_folders(workdir).values() if not commit_of(x).exists()]
    pattern = re.compile(r'checkpoint_[0-9]+\.tmp-([0-9]+|deleted)')  # others: a user's backups
    return [x for x in workdir.glob('*/') if pattern.fullmatch(x.name) and not x.is_symlink()]


def step_folders(workdir: AnyPath) -> dict[int, AnyPath]:
    """Return {step: path} of paths with a checkpoint's name in `workdir`, ascending."""
    folders = {}
    for folder in list_folder(workdir):
        step = step_of(folder)
        if step is not None:
            folders[step] = folder
    return dict(sorted(folders.items()))


def step_of(folder: AnyPath) -> int | None:
    """Return the step in a checkpoint's name, ASCII digits without leading zeros as T5X writes them."""
    match = re.fullmatch('checkpoint_(0|[1-9][0-9]*)', folder.name)
    return int(match[1]) if match else None


# Flat trees and their shapes.


def is_parameter(path: str) -> bool:
    return path.startswith(PARAMETER_PREFIX)


def parameters(tree: Mapping[str, T]) -> dict[str, T]:
    """Return {path without 'target/': leaf} of the parameters in a flat tree."""
    start = len(PARAMETER_PREFIX)
    return {path[start:]: leaf for path, leaf in tree.items() if is_parameter(path)}


def shapes(tree: Mapping) -> Shapes:
    return {path: tuple(np.shape(leaf)) for path, leaf in tree.items()}


def unflatten(flat: Mapping) -> dict:
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, name = path.split('/')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
