"""Whole arrays to files and back, in T5X's native layout.

    checkpoint_STEP/checkpoint                    msgpack index: small arrays, specs of the others
    checkpoint_STEP/target.encoder.….kernel/0.0   one zarr array per folder, one chunk per file
    checkpoint_STEP/….json                        side files of the caller, which T5X ignores
    checkpoint_STEP/manifest.json                 size and crc32c of each of these files

A tree is flat here: {'target/encoder/layers_0/attention/query/kernel': array, 'state/step': array}. Every
process calls the functions alike, and reads or writes only its own shards.

A save copies the arrays once in host memory and returns. Threads write the copies to `checkpoint_STEP.tmp-…`,
which no reader opens, and rename this folder when everything is on the disk. A crash leaves at most that folder.

Source: T5X t5x/checkpoints.py, t5x/checkpoint_utils.py; Flax flax/serialization.py for msgpack's extensions.
"""

import collections
import contextlib
import ctypes
import enum
import functools
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import google_crc32c
import jax
import msgpack
import numpy as np
import tensorstore as ts
from absl import logging
from jax.experimental import multihost_utils

import paths
import settings

VERSION = 3  # version 2 differs in bfloat16 arrays alone, which it stores as uint16
CHUNK_BYTES = 64 * 2**20
ARRAYS_IN_FLIGHT = 8  # threads; bounds the host memory that restoring takes
M_TRIM_THRESHOLD = -1  # of malloc.h
M_MMAP_THRESHOLD = -3
TIMEOUT_SECONDS = 600  # without a new file, before a save gives up the other processes
MANIFEST = 'manifest.json'
RUN_FILES = ('lock', 'metrics.jsonl', 'model-info.txt')  # of a workdir
# A temporary folder of `Saver`. Users have backups with other names.
UNFINISHED = re.compile(r'checkpoint_[0-9]+\.tmp-([0-9]+|deleted)')
PARAMETER_PREFIX = 'target/'
SLOT_PREFIX = 'state/param_states/'
DRIVERS = [('zarr', 'file'), ('zarr', 'gfile'), ('zarr', 'gcs')]  # in specs that T5X has written
MAX_GZIP_RATIO = 1032
LFS_POINTER_BYTES = 200  # at most
FAULT_BYTES = 2**16  # of the faults that a process sends to the others
# What unpacking damaged or hostile content raises, by its types, sizes or depth.
UNPACK_ERRORS = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
FORMATS = 'a workdir, a checkpoint_STEP folder, a Mesh-TensorFlow prefix or a Hugging Face folder'
ORBAX_REMEDY = "Orbax is not read: save with T5X's use_orbax=False"
Shapes = dict[str, tuple[int, ...]]


class LazyArray(Protocol):
    """An array of a checkpoint that is read later."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self) -> np.ndarray:
        """Return the whole array in its stored dtype."""
        ...


def is_lazy(leaf: Any) -> bool:
    """Return whether a leaf of a flat tree is a LazyArray, not an array of numpy or JAX."""
    return not isinstance(leaf, np.ndarray | np.generic | jax.Array)


def read_leaf(leaf: Any) -> Any:
    """Return a leaf of a flat tree as an array, which reads a LazyArray."""
    if is_lazy(leaf):
        return leaf.read()
    return leaf


class Damaged(ValueError):
    """Some files of a checkpoint are not as they were saved."""


class Unreadable(OSError):
    """The system does not let this process read some files of a checkpoint, which may be valid."""


class Checksum(NamedTuple):
    """Size and crc32c of a file."""

    num_bytes: int
    crc32c: int


# Saving.


class Saver:
    """Saves checkpoints into a workdir while the training steps go on.

    Every process makes one and calls it alike. After each save it deletes all checkpoints but the `keep`
    (0 keeps all) of the highest rank, which are the newest unless `rank` says otherwise, and the newest.
    Those of rank -inf are not among the former. The multiples of `keep_every` (0 is none) and those with
    T5X's marker file PINNED stay. It saves parameters in `dtype`, or in their own dtype where that is ''.
    """

    def __init__(
        self,
        workdir: str | Path,
        keep: int = 0,
        keep_every: int = 0,
        dtype: str = '',
        rank: Callable[[int], float] = float,
    ) -> None:
        if keep < 0 or keep_every < 0:
            raise ValueError(
                f'keep={keep}, keep_every={keep_every}: must be at least 0: use 0 to switch one off'
            )
        self.workdir = paths.disk_path(workdir)
        self.keep = keep
        self.keep_every = keep_every
        self.dtype = dtype
        self.rank = rank  # of a step
        paths.to_kvstore(self.workdir)  # raises early for a name that TensorStore cannot open
        self._pool = futures.ThreadPoolExecutor(ARRAYS_IN_FLIGHT)
        self._saving: futures.Future | None = None
        # The temporary folder has the same name in all processes, and another one in every save.
        self._stamp = int(multihost_utils.broadcast_one_to_all(np.int32(time.time())))
        if jax.process_index() == 0:
            self._remove_unfinished()
        multihost_utils.sync_global_devices(f'{self.workdir} is clean')

    def save(self, step: int, tree: Mapping, files: Mapping[str, bytes] = {}) -> None:
        """Start to save the flat `tree` as `checkpoint_STEP`, with `files` beside it.

        Returns when the arrays are copied, so the caller may donate them. A LazyArray is read when it is
        written. Waits for the save before, and raises its OSError. Raises ValueError if the step is saved.
        """
        self.wait()
        final = self.workdir / f'checkpoint_{step}'
        if final.exists():
            raise ValueError(
                f'{final} exists, and a step is saved once: remove it or use another workdir'
            )
        self._stamp += 1
        tmp = final.with_name(f'{final.name}.tmp-{self._stamp}')
        index = _make_index(tree, self.dtype)
        packed = msgpack.packb({'version': VERSION, 'optimizer': unflatten(index)})
        specs = {path: index[path] for path in tree if isinstance(index[path], dict)}
        leaves = [tree[path] for path in specs]
        shards = list(self._pool.map(_copy_shards, leaves, specs.values()))
        write_array = functools.partial(_write_array, tmp)
        written: Iterator[dict[str, Checksum]]
        if any(is_lazy(leaf) for leaf in leaves):
            # `_commit` reads and writes one array after the other, which bounds the memory.
            written = map(write_array, specs.values(), shards)
        else:
            # The pool has everything queued now. An interpreter that exits finishes its queue first.
            written = self._pool.map(write_array, specs.values(), shards)
        contents = {**files, 'checkpoint': packed}
        self._saving = self._pool.submit(self._commit, step, tmp, final, written, contents)

    def check(self) -> None:
        """Raise the OSError of a save that failed. Does not wait, so it may be called every step."""
        if self._saving and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is complete in all processes. Raises its OSError, once."""
        if self._saving:
            futures.wait([self._saving])
            saving = self._saving
            self._saving = None
            saving.result()

    def close(self) -> None:
        """Drop what is queued and wait until no thread writes."""
        self._pool.shutdown(cancel_futures=True)

    def _commit(
        self,
        step: int,
        tmp: Path,
        final: Path,
        written: Iterable[dict[str, Checksum]],
        files: Mapping[str, bytes],
    ) -> None:
        """Finish a save: wait for the arrays, write `files` and the manifest, rename `tmp` to `final`.

        Runs in a thread. JAX's collectives belong to the training steps, so the processes meet through files.
        """
        try:
            tmp.mkdir(parents=True, exist_ok=True)
            _write_part(tmp, written)
            if jax.process_index() > 0:
                _await([final], tmp)
                return
            checksums = _collect_parts(tmp)
            for name, content in files.items():
                (tmp / name).write_bytes(content)
                checksums[name] = _checksum(tmp / name)
            (tmp / MANIFEST).write_bytes(_pack_manifest(step, checksums))
            for path in tmp.iterdir():  # TensorStore has synced the chunks in them
                _sync(path)
            _sync(tmp)
            tmp.rename(final)
            _sync(final.parent)
        except Exception as error:
            raise OSError(
                f'{final} is not saved ({paths.reason(error)}); the checkpoints before it are valid: correct the '
                'disk and start again'
            ) from error
        self.prune()

    def prune(self) -> None:
        """Delete the checkpoints that are not kept, which only the first process does."""
        if not self.keep or jax.process_index() > 0:
            return
        found = steps(self.workdir)
        ranked = [step for step in found if self.rank(step) > -math.inf]
        ranked.sort(key=self.rank, reverse=True)  # of equal ones the first stays in front
        kept = ranked[: self.keep] + found[-1:]
        for step in found:
            if step in kept:
                continue
            directory = self.workdir / f'checkpoint_{step}'
            if self.keep_every and step % self.keep_every == 0:
                continue
            if (directory / 'PINNED').exists():
                continue
            # The name changes first, so that no reader finds a checkpoint with half of its files.
            deleted = directory.rename(f'{directory}.tmp-deleted')
            _sync(self.workdir)
            shutil.rmtree(deleted)

    def _remove_unfinished(self) -> None:
        """Remove the temporary folders that earlier runs have left."""
        for folder in self.workdir.glob('checkpoint_*.tmp-*/'):
            if UNFINISHED.fullmatch(folder.name) and not folder.is_symlink():
                shutil.rmtree(folder)


def save(workdir: str | Path, step: int, tree: Mapping, files: Mapping[str, bytes] = {}) -> Path:
    """Write the flat `tree` to `workdir/checkpoint_STEP`, with `files` beside it; return its path.

    All or nothing. Every process calls it with the same paths. Raises OSError if the disk refuses.
    """
    saver = Saver(workdir)
    try:
        saver.save(step, tree, files)
        saver.wait()
    finally:
        saver.close()
    return saver.workdir / f'checkpoint_{step}'


def _make_index(tree: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return {path: packed array or spec} of a flat tree, sorted; parameters have `dtype` if it is given."""
    index: dict[str, Any] = {}
    for path in sorted(tree):
        leaf = tree[path]
        if _is_packed(path, tree):
            index[path] = _pack_array(leaf)
        elif dtype and is_parameter(path):
            index[path] = _make_spec(path, leaf, dtype)
        else:
            index[path] = _make_spec(path, leaf, leaf.dtype.name)
    return index


def _is_packed(path: str, tree: Mapping[str, Any]) -> bool:
    """Return whether T5X has this array in its index, because it gives it no logical axes.

    These are the step, placeholders of shape [1], and vectors of the optimizer that are not shaped like
    their parameter, such as those of Adafactor's factored second moments.
    """
    if is_parameter(path):
        return False
    shape = np.shape(tree[path])
    if shape in ((), (1,)):
        return True
    owner, _, _ = path.removeprefix(SLOT_PREFIX).rpartition('/')
    parameter = tree.get(f'{PARAMETER_PREFIX}{owner}')
    return parameter is not None and len(shape) == 1 and np.shape(parameter) != shape


def _pack_array(leaf: Any) -> msgpack.ExtType:
    """Return an array as Flax packs it: shape, dtype and bytes."""
    array = read_leaf(leaf)
    if isinstance(array, jax.Array):  # it may be split over processes
        array = multihost_utils.process_allgather(array, tiled=True)
    content = (array.shape, array.dtype.name, np.asarray(array).tobytes())
    return msgpack.ExtType(1, msgpack.packb(content))


def _make_spec(path: str, leaf: Any, dtype: str) -> dict[str, Any]:
    """Return TensorStore's spec of an array. A shard is whole chunks, so no two processes share a file."""
    shard_shape = leaf.shape
    if isinstance(leaf, jax.Array):
        shard_shape = leaf.sharding.shard_shape(leaf.shape)
    max_elements = CHUNK_BYTES // ts.dtype(dtype).numpy_dtype.itemsize
    return {
        'driver': 'zarr',
        'dtype': dtype,
        'kvstore': {'driver': 'file', 'path': path.replace('/', '.') + '/'},
        'metadata': {
            'chunks': list(chunk_shape(shard_shape, max_elements)),
            # Differs from T5X: not gzipped, which T5X restores as well and is several times faster.
            'compressor': None,
            'shape': list(leaf.shape),
        },
    }


def chunk_shape(shape: tuple[int, ...], max_elements: int) -> tuple[int, ...]:
    """Return T5X's shape of a chunk.

    The largest dimension shrinks to its next smaller divisor until a chunk has few enough elements.
    Source: t5x/checkpoints.py choose_chunk_shape.
    """
    chunk = list(shape)
    while math.prod(chunk) > max_elements:
        dim = chunk.index(max(chunk))
        chunk[dim] = max(n for n in range(1, chunk[dim]) if shape[dim] % n == 0)
    return tuple(chunk)


@dataclass(frozen=True)
class Shard:
    """A part of an array that this process writes."""

    index: tuple[slice, ...]
    data: np.ndarray | LazyArray


def _copy_shards(leaf: Any, spec: Mapping[str, Any]) -> list[Shard]:
    """Return copies of what this process writes, in the dtype of `spec`; a LazyArray stays one.

    The first replica of a shard writes it. The first process writes what is not a jax.Array.
    """
    dtype = np.dtype(spec['dtype'])  # jax registers 'bfloat16' with numpy
    shards = []
    if isinstance(leaf, jax.Array):
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                shards.append(Shard(shard.index, np.array(shard.data, dtype)))
    elif jax.process_index() == 0:
        data = leaf if is_lazy(leaf) else np.array(leaf, dtype)
        shards.append(Shard((slice(None),) * len(leaf.shape), data))
    return shards


def _write_array(
    directory: Path, spec: Mapping[str, Any], shards: Sequence[Shard]
) -> dict[str, Checksum]:
    """Write `shards`; return the checksums of the files that this process has written."""
    folder = spec['kvstore']['path']
    kvstore = paths.to_kvstore(directory / folder)
    with paths.library_errors(directory / folder):
        store = ts.open({**spec, 'kvstore': kvstore}, create=True, open=True).result()
    writes = [store[shard.index].write(read_leaf(shard.data)) for shard in shards]
    with paths.library_errors(directory / folder):
        for write in writes:
            write.result()
    names = []
    if jax.process_index() == 0:
        names.append('.zarray')
    for shard in shards:
        names += _chunk_names(shard.index, spec['metadata']['shape'], spec['metadata']['chunks'])
    return {f'{folder}{name}': _checksum(directory / folder / name) for name in names}


def _chunk_names(
    index: tuple[slice, ...], shape: Sequence[int], chunks: Sequence[int]
) -> list[str]:
    """Return the files of the chunks that a shard is made of."""
    numbers = []
    for part, size, chunk_size in zip(index, shape, chunks, strict=True):
        start, stop, _ = part.indices(size)
        numbers.append(range(start // chunk_size, math.ceil(stop / chunk_size)))
    # A scalar has no dimension, and its chunk is '0'.
    return ['.'.join(map(str, chunk)) or '0' for chunk in itertools.product(*numbers)]


def _write_part(tmp: Path, written: Iterable[dict[str, Checksum]]) -> None:
    """Tell the first process that this one has written its arrays, and their checksums."""
    checksums: dict[str, Checksum] = {}
    for files in written:
        checksums |= files
    paths.replace_file(tmp / f'part-{jax.process_index()}', json.dumps(checksums).encode())


def _collect_parts(tmp: Path) -> dict[str, Checksum]:
    """Wait for all processes; return the checksums of all arrays."""
    parts = [tmp / f'part-{i}' for i in range(jax.process_count())]
    _await(parts, tmp)
    checksums: dict[str, Checksum] = {}
    for part in parts:
        checksums |= json.loads(part.read_text())
        part.unlink()
    return checksums


def _await(files: Sequence[Path], directory: Path) -> None:
    """Wait until all `files` exist. Raises TimeoutError if `directory` gets no new file for long."""
    count = -1
    deadline = 0.0
    while True:
        missing = [file for file in files if not file.exists()]
        if not missing:
            return
        new_count = sum(len(names) for _, _, names in os.walk(directory))
        if new_count != count:
            count = new_count
            deadline = time.monotonic() + TIMEOUT_SECONDS
        if time.monotonic() > deadline:
            raise TimeoutError(
                f'{missing[0]} is not there and nothing new came for {TIMEOUT_SECONDS} s: find out how '
                'its process ended'
            )
        time.sleep(0.1)


def _sync(path: Path) -> None:
    """Wait until a file or a folder's list of files is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# Reading.


def restore(
    source: str | Path | Mapping[str, Any],
    shardings: Mapping[str, jax.sharding.Sharding] = {},
    dtype: str = '',
) -> dict[str, jax.Array | np.ndarray]:
    """Return the arrays of a checkpoint, or of those leaves of an index that are given.

    A path in `shardings` gives a jax.Array, of which a process reads only its own shards; any other path
    gives a numpy array. Parameters are cast to `dtype` unless that is ''. Raises ValueError for an array
    that is damaged or not to be trusted.
    """
    if isinstance(source, Mapping):
        index = source
    else:
        index = read_index(source)
    num_threads = ARRAYS_IN_FLIGHT
    for leaf in index.values():
        if is_lazy(leaf) and not isinstance(leaf, ZarrEntry):
            num_threads = 1  # other formats read whole arrays, and one at a time bounds the memory

    def restore_leaf(path):
        target_dtype = dtype if is_parameter(path) else ''
        return _restore_leaf(index[path], shardings.get(path), target_dtype)

    # The largest first: while one is read it takes memory several times, when there are few others.
    ordered = sorted(index, key=lambda path: math.prod(np.shape(index[path])), reverse=True)
    with _large_blocks_returned(), futures.ThreadPoolExecutor(num_threads) as pool:
        arrays = dict(zip(ordered, pool.map(restore_leaf, ordered), strict=True))
    return {path: arrays[path] for path in index}


@contextlib.contextmanager
def _large_blocks_returned() -> Iterator[None]:
    """Let the C library return large blocks to the system as soon as they are freed.

    glibc comes to keep blocks of up to 32 MiB, between arrays that stay: of an XL encoder a tenth of its size.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)  # only glibc has it
    if mallopt is None:
        yield
        return
    mallopt(M_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:  # to what glibc comes to by itself
        mallopt(M_MMAP_THRESHOLD, 2**25)
        mallopt(M_TRIM_THRESHOLD, 2**26)


def saved_step(leaves: Mapping[str, Any]) -> int:
    """Return the step of a checkpoint; 0 for one that does not say it, such as Hugging Face's."""
    if 'state/step' not in leaves:
        return 0
    return int(restore({'state/step': leaves['state/step']})['state/step'])


def read_index(path: str | Path) -> dict[str, Any]:
    """Return {path: leaf} of a checkpoint in T5X's native layout: its folder, or an index alone.

    A small array is a numpy array, any other a LazyArray. Raises ValueError for other layouts and versions.
    """
    location = paths.to_path(path)
    is_alone = paths.is_file(location)
    if is_alone:
        folder = location.parent
        file = location
    else:
        folder = location
        file = location / 'checkpoint'
    if not paths.is_file(file):
        raise ValueError(_describe_missing(folder))
    content = paths.own_file(file).read_bytes()
    leaves: dict[str, Any] = {}
    try:
        top = dict(
            msgpack.unpackb(
                content,
                object_hook=functools.partial(_unpack_map, folder),
                ext_hook=_unpack_extension,
                strict_map_key=False,
            )
        )
        for name, leaf in flatten(top.get('optimizer', {})).items():
            if isinstance(leaf, ZarrEntry):
                leaves[name] = leaf
            elif leaf is not None:  # nil stands for a parameter without optimizer state
                leaves[name] = np.asarray(leaf)
    except UNPACK_ERRORS as error:
        if is_alone and file.name != 'checkpoint' and (folder / 'checkpoint').is_file():
            raise ValueError(
                f'{file} is no T5X index ({error}): it is one file of a checkpoint: name its folder, '
                f'{folder}'
            ) from error
        raise ValueError(
            f'{file} is no T5X index ({error}): name {FORMATS}; {ORBAX_REMEDY}'
        ) from error
    version = top.get('version', 0)
    if version not in (2, VERSION):
        raise ValueError(f'{file} has version {version}, not 2 or {VERSION}; {ORBAX_REMEDY}')
    return leaves


@dataclass(frozen=True, eq=False)
class ZarrEntry:
    """A LazyArray of T5X's layout: `spec` of the index describes a zarr folder in `directory`."""

    directory: Any
    spec: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.spec['metadata']['shape'])

    @property
    def dtype(self) -> np.dtype:
        return self.open().dtype.numpy_dtype

    @property
    def folder(self) -> Any:
        return self.directory / self._name()

    def read(self) -> np.ndarray:
        return self.result_of(self.open().read())

    def open(self) -> ts.TensorStore:
        """Return the stored array. Raises ValueError unless it is complete and as the spec says.

        Of the spec, only shape and dtype count. T5X finds the folder beside the index, wherever that was
        copied, and only .zarray is right about chunks and compressor.
        """
        sizes = {file: paths.file_size(file) for file in self._find_files()}
        for file, size in sizes.items():
            if size < LFS_POINTER_BYTES and isinstance(file, Path):
                paths.check_not_lfs(file)
        stored = {
            'driver': 'zarr',
            'kvstore': paths.to_kvstore(self.folder),
            'fill_missing_data_reads': False,  # a lost chunk must not be read as zeros
        }
        array = self.result_of(ts.open(stored))
        self._check_type(array)
        self._check_size(array, sizes)
        return array

    def result_of(self, future: Any) -> Any:
        """Return the result of a TensorStore operation on this array; its error names the remedy."""
        try:
            return future.result()
        except ValueError as error:  # TensorStore's for damaged, missing and forbidden files alike
            raise ValueError(
                f'{self.folder} cannot be read ({error}): copy the checkpoint again, or correct its '
                'permissions'
            ) from error

    def _name(self) -> str:
        """Return the folder's name in the spec. TensorStore before 0.1.14 put it at the top level."""
        return str(self.spec['kvstore'].get('path') or self.spec.get('path'))

    def _find_files(self) -> list[Any]:
        """Return the files of the array. Raises ValueError unless all of them lie in the checkpoint."""
        name = self._name()
        drivers = (self.spec['driver'], self.spec['kvstore'].get('driver'))
        if drivers not in DRIVERS:
            raise ValueError(f'{name} has drivers {drivers}, not zarr and file: save it to a disk')
        files = []
        # The user's own part of the path may hold a '..'.
        is_inside = '..' not in PurePosixPath(name).parts
        is_inside = is_inside and self.folder.is_relative_to(self.directory)
        if is_inside and self.folder.is_dir():
            files = _list_folder(self.folder)
        if not is_inside or not _lie_in(self.directory, self.folder, files):
            raise ValueError(
                f'{name} is not all files in {self.directory}: do not trust this checkpoint'
            )
        if self.folder / '.zarray' not in files:
            raise ValueError(f'{self.folder}/.zarray is missing: copy the checkpoint again')
        return files

    def _check_type(self, array: ts.TensorStore) -> None:
        """Raise ValueError unless shape and dtype are those of the spec."""
        if array.shape != self.shape:
            raise ValueError(
                f'{self.folder} has shape {array.shape}, its index {self.shape}: copy both'
            )
        if array.dtype == ts.uint16:
            raise ValueError(f'{self.folder} holds uint16, which T5X refuses too: use its bfloat16')
        dtype = self.spec.get('dtype', array.dtype.name)  # old specs have none
        if array.dtype.name != dtype:
            raise ValueError(
                f'{self.folder} holds {array.dtype.name}, its index says {dtype}: copy both'
            )

    def _check_size(self, array: ts.TensorStore, sizes: Mapping[Any, int]) -> None:
        """Raise ValueError before memory is allocated for more than the files can hold."""
        num_elements = 1
        chunks: Any = array.chunk_layout.write_chunk.shape or ()  # None for a scalar
        for size, chunk in zip(array.shape, chunks, strict=True):
            num_elements *= math.ceil(size / chunk) * chunk
        num_bytes = sum(size for file, size in sizes.items() if file.name != '.zarray')
        if num_elements * int(array.dtype.numpy_dtype.itemsize) > num_bytes * MAX_GZIP_RATIO:
            raise ValueError(
                f'{self.folder}: {num_bytes} bytes cannot hold {array.shape}, or chunks are missing: '
                'copy the checkpoint again'
            )


def _restore_leaf(leaf: Any, sharding: jax.sharding.Sharding | None, dtype: str) -> Any:
    """Return a leaf as a numpy array, or as a jax.Array where there is a sharding."""
    result_of: Callable[[Any], Any]
    if isinstance(leaf, ZarrEntry):
        array = leaf.open()
        result_of = leaf.result_of
    else:
        array = ts.array(read_leaf(leaf))
        result_of = ts.Future.result
    if dtype:
        array = ts.cast(array, ts.dtype(dtype))
    if sharding is None:
        return result_of(array.read())
    reads: dict[str, ts.Future] = {}  # one for all replicas of a shard
    for part in sharding.addressable_devices_indices_map(array.shape).values():
        if str(part) not in reads:
            reads[str(part)] = array[part].read()
    return jax.make_array_from_callback(
        array.shape, sharding, lambda part: result_of(reads[str(part)])
    )


def _lie_in(root: Any, folder: Any, files: Iterable[Any]) -> bool:
    """Return whether `folder` and `files` lie in `root` after links are followed, and all are files."""
    if not isinstance(root, Path):
        return True  # a bucket has neither links nor devices
    for file in files:
        if not file.is_file():
            return False
    root = root.resolve()
    return all(path.resolve().is_relative_to(root) for path in (folder, *files))


def _unpack_map(directory: Any, node: dict) -> Any:
    """Return the array that a map of the index stands for, or the map itself."""
    if '__msgpack_chunked_array__' in node:
        return _join_chunks(node)
    if not {'driver', 'kvstore', 'metadata'} <= node.keys():
        return node
    entry = ZarrEntry(directory, node)
    name = node['kvstore'].get('path')
    if not all(type(size) is int and size >= 0 for size in entry.shape):
        raise ValueError(f'{name} has shape {entry.shape}')
    return entry


def _join_chunks(node: dict) -> np.ndarray:
    """Return an array of more than 1 GiB, which Flax splits.

    Its lists are maps {'0': first, '1': second, ...}.
    """
    shape = _list_of_map(node['shape'])
    chunks = _list_of_map(node['chunks'])
    return np.concatenate(chunks).reshape(shape)


def _list_of_map(items: dict) -> list[Any]:
    return [items[str(i)] for i in range(len(items))]


def _unpack_extension(code: int, payload: bytes) -> np.ndarray:
    """Return the array of one of Flax's msgpack extensions: 1 array, 2 complex number, 3 numpy scalar."""
    if code == 2:
        real, imaginary = msgpack.unpackb(payload)
        return np.asarray(complex(real, imaginary))
    if code not in (1, 3):
        raise ValueError(f'msgpack extension {code}')
    shape, dtype, content = msgpack.unpackb(payload)
    return np.frombuffer(content, dtype).reshape(shape)  # jax registers 'bfloat16' with numpy


def _describe_missing(folder: Any) -> str:
    """Return why there is no checkpoint in a folder, and what to name instead, in one line."""
    missing = f'{folder / "checkpoint"} is missing: name {FORMATS}'
    if not isinstance(folder, Path):
        return missing
    if folder.is_symlink() and not folder.exists():
        return f'{missing}, not a link to {os.readlink(folder)}, which does not exist'
    if not folder.exists():
        return f'{missing}, not {folder}, which does not exist'
    names = sorted(file.name for file in _list_folder(folder))
    if not names:
        return f'{missing}, not {folder}, which is empty'
    if any(name in RUN_FILES for name in names):
        return (
            f'{folder} has no checkpoint yet: wait until its run has saved one, or name {FORMATS}'
        )
    return f'{missing}, not {folder}, which holds {settings.first_ten(names)}'


# The checkpoints of a workdir.


def steps(workdir: str | Path) -> list[int]:
    """Return the steps of the checkpoints in `workdir`, ascending. An unfinished one does not count."""
    folders = _step_folders(paths.to_path(workdir))
    return [step for step in folders if paths.is_file(folders[step] / 'checkpoint')]


def newest(workdir: str | Path) -> int | None:
    """Return the newest step of the checkpoints in `workdir`; None if there is none."""
    return max(steps(workdir), default=None)


def newest_valid(
    workdir: str | Path, report: Callable[[str], None] = logging.warning
) -> int | None:
    """Return the newest step that verifies; None if `workdir` has no checkpoint.

    Reports a damaged checkpoint in one line and renames it `checkpoint_STEP.damaged-N`. Raises ValueError if
    no other is left. One that cannot be read may be valid: it stays, and the OSError goes to the caller. Every
    process calls it.
    """
    workdir = paths.disk_path(workdir)
    for step, directory in reversed(_step_folders(workdir).items()):
        if not directory.is_dir():
            continue
        set_aside = _unused_name(f'{directory}.damaged-')
        try:
            verify(directory)
            return step
        except Damaged as error:
            report(f'{error}. It is set aside as {set_aside.name}.')
        if jax.process_index() == 0:
            directory.rename(set_aside)
        multihost_utils.sync_global_devices(f'{directory} is set aside')
    damaged = sorted(workdir.glob('checkpoint_*.damaged-*'))
    if damaged:
        raise ValueError(
            f'{workdir} has only damaged checkpoints, the last {damaged[-1].name}: repair one and '
            'name it checkpoint_STEP, or use another workdir'
        )
    return None


def _step_folders(workdir: Any) -> dict[int, Any]:
    """Return {step: path} of what has a checkpoint's name in `workdir`, ascending."""
    folders = {}
    for folder in _list_folder(workdir):
        step = _step_of(folder)
        if step is not None:
            folders[step] = folder
    return dict(sorted(folders.items()))


def _step_of(folder: Any) -> int | None:
    """Return the step in a checkpoint's name as T5X writes it: ASCII digits without zeros in front."""
    match = re.fullmatch('checkpoint_(0|[1-9][0-9]*)', folder.name)
    if match is None:
        return None
    return int(match[1])


def _list_folder(folder: Any) -> list[Any]:
    """Return what is in a folder, nothing where there is none. Raises Unreadable if it may not be listed."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Unreadable(
            f'{folder} cannot be listed ({error.strerror}): correct its permissions or its disk'
        ) from error


def _unused_name(prefix: str) -> Path:
    """Return the first path of `prefix` and a number, from 1, that does not exist."""
    for number in itertools.count(1):
        path = Path(f'{prefix}{number}')
        if not path.exists():
            return path
    raise AssertionError('the numbers do not end')


# Verification.


def verify(directory: str | Path, ignored: str = '') -> bool:
    """Return True if every file is as it was saved; False if there are no checksums, as in T5X.

    Files whose whole names match `ignored` are not read. Raises Damaged, which names up to ten files; Unreadable where
    the system refuses to read some; ValueError for what is not to be trusted. Every process calls it and reads its
    share; all return or raise alike.
    """
    messages: dict[FaultKind, list[str]] = collections.defaultdict(list)
    for fault in _from_all_processes(_find_faults(paths.to_path(directory), ignored)):
        messages[fault.kind].append(fault.message)
    refused = messages[FaultKind.REFUSED]
    unreadable = '; '.join(messages[FaultKind.UNREADABLE][:10])
    damaged = '; '.join(messages[FaultKind.DAMAGED][:10])
    if refused:
        raise ValueError(refused[0])
    if unreadable:
        raise Unreadable(
            f'{directory} cannot be read ({unreadable}); it may be valid, so it stays as it is: '
            'correct its permissions or its disk'
        )
    if damaged:
        raise Damaged(f'{directory} is damaged: {damaged}: use an older one')
    return not messages[FaultKind.NO_CHECKSUMS]


class FaultKind(enum.Enum):
    """What a fault means for the checkpoint."""

    NO_CHECKSUMS = enum.auto()  # T5X saves none
    DAMAGED = enum.auto()
    UNREADABLE = enum.auto()
    REFUSED = enum.auto()  # not to be trusted, or not the file itself


class Fault(NamedTuple):
    """What is wrong with a checkpoint, in one line."""

    kind: FaultKind
    message: str


class Manifest(NamedTuple):
    """The content of manifest.json: the checksum of every other file by its name."""

    step: int
    checksums: dict[str, Checksum]


def _find_faults(directory: Any, ignored: str) -> list[Fault]:
    """Return the faults of the checkpoint as a whole, or else of this process's share of the files."""
    try:
        if not _should_have_manifest(directory):
            return [Fault(FaultKind.NO_CHECKSUMS, '')]
        manifest = _read_manifest(directory)
        files = [name for name in sorted(manifest.checksums) if not re.fullmatch(ignored, name)]
        own_files = files[jax.process_index() :: jax.process_count()]

        def find_fault(name):
            return _find_fault(directory, name, manifest.checksums[name])

        with futures.ThreadPoolExecutor(ARRAYS_IN_FLIGHT) as pool:
            faults = [fault for fault in pool.map(find_fault, own_files) if fault]
        if 'checkpoint' in own_files and not faults:
            _check_step(directory, manifest.step)
        return faults
    except Damaged as error:
        return [Fault(FaultKind.DAMAGED, str(error))]
    except ValueError as error:
        return [Fault(FaultKind.REFUSED, str(error))]
    except OSError as error:
        return [Fault(FaultKind.UNREADABLE, _reason(error, directory))]


def _should_have_manifest(directory: Any) -> bool:
    """Return whether this program has saved the checkpoint, not T5X or another program."""
    if paths.is_file(directory / MANIFEST):
        return True
    if not paths.is_file(directory / 'checkpoint') and _step_of(directory) is None:
        return False  # a workdir without checkpoints, which has a config.json, too
    if paths.is_file(directory / 'data_position.npy'):
        return True
    config = directory / 'config.json'
    return paths.is_file(config) and 'model' in paths.read_json(config)  # other formats have none


def _find_fault(directory: Any, name: str, saved: Checksum) -> Fault | None:
    """Compare one file with its checksum."""
    file = directory / name
    try:
        if not paths.is_file(file):  # a foreign manifest may name a device, which never ends
            return Fault(FaultKind.DAMAGED, f'{name} is missing')
        found = _checksum(file)
        if found.num_bytes < LFS_POINTER_BYTES and found.num_bytes != saved.num_bytes:
            paths.check_not_lfs(file)
    except ValueError as error:
        return Fault(FaultKind.REFUSED, str(error))
    except OSError as error:
        return Fault(FaultKind.UNREADABLE, _reason(error, directory))
    if found.num_bytes != saved.num_bytes:
        return Fault(
            FaultKind.DAMAGED, f'{name} has {found.num_bytes} bytes, not {saved.num_bytes}'
        )
    if found.crc32c != saved.crc32c:
        return Fault(FaultKind.DAMAGED, f'{name} has changed')
    return None


def _check_step(directory: Any, step: int) -> None:
    """Raise Damaged unless the index, too, holds the step of the manifest, if it holds one."""
    stored = read_index(directory).get('state/step', step)
    if stored != step:
        raise Damaged(f'checkpoint holds step {stored}')


def _read_manifest(directory: Any) -> Manifest:
    """Return the manifest. Raises Damaged unless it is as it was saved, and of this checkpoint."""
    try:
        content = (directory / MANIFEST).read_bytes()
        manifest = _unpack_manifest(content)
    except FileNotFoundError:
        raise Damaged(f'{MANIFEST} is missing') from None
    except (IsADirectoryError, *UNPACK_ERRORS) as error:
        raise Damaged(f'{MANIFEST} is damaged ({error})') from error
    if _step_of(directory) not in (None, manifest.step):
        raise Damaged(f'{MANIFEST} is damaged (of step {manifest.step})')
    return manifest


def _unpack_manifest(content: bytes) -> Manifest:
    """Undo `_pack_manifest`. Raises one of UNPACK_ERRORS for any other content."""
    top = json.loads(content)
    checksums = {}
    for name, (num_bytes, crc32c) in top['files'].items():
        checksums[name] = Checksum(num_bytes, crc32c)
    if content != _pack_manifest(top['step'], checksums):
        raise ValueError('changed')
    return Manifest(top['step'], checksums)


def _pack_manifest(step: int, checksums: Mapping[str, Checksum]) -> bytes:
    """Return the manifest, with a checksum of its own. One content has one form."""
    content = {'step': step, 'files': checksums}
    crc32c = google_crc32c.value(json.dumps(content, sort_keys=True).encode())
    return json.dumps({'crc32c': crc32c, **content}, sort_keys=True, indent=1).encode()


def _checksum(file: Any) -> Checksum:
    """Return the checksum of a file, which is read in blocks."""
    checksum = google_crc32c.Checksum()
    size = 0
    with file.open('rb') as stream:
        for block in checksum.consume(stream, 2**20):
            size += len(block)
    return Checksum(size, int.from_bytes(checksum.digest()))


def _from_all_processes(faults: Sequence[Fault]) -> Sequence[Fault]:
    """Return the first ten faults of each process, the same list in all."""
    if jax.process_count() == 1:
        return faults
    lines = []
    for fault in faults[:10]:
        message = ' '.join(fault.message.split())  # without line breaks
        lines.append(f'{fault.kind.name} {message}'.encode(errors='replace')[:6000])
    sent = np.frombuffer(b'\n'.join(lines).ljust(FAULT_BYTES, b'\n'), np.uint8)
    received = multihost_utils.process_allgather(sent).tobytes().decode(errors='replace')
    found = []
    for line in received.split('\n'):
        if line:
            kind, _, message = line.partition(' ')
            found.append(Fault(FaultKind[kind], message))
    return found


def _reason(error: OSError, directory: Any) -> str:
    """Return the file of an OSError, relative to `directory`, and what the system says."""
    cause = error
    if isinstance(error.__cause__, OSError):
        cause = error.__cause__
    if not cause.filename:
        return str(error)
    file = Path(cause.filename)
    if file.is_relative_to(directory):
        file = file.relative_to(directory)
    return f'{file}: {cause.strerror}'


# Flat trees and their shapes.


def is_parameter(path: str) -> bool:
    """Return whether a path of T5X's tree is of a parameter."""
    return path.startswith(PARAMETER_PREFIX)


def parameters(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return {parameter's own path: leaf} of a flat tree: without 'target/'."""
    return {
        path.removeprefix(PARAMETER_PREFIX): leaf
        for path, leaf in tree.items()
        if is_parameter(path)
    }


def shapes(tree: Mapping) -> Shapes:
    """Return {path: shape} of a flat tree, or of an index."""
    return {path: tuple(np.shape(leaf)) for path, leaf in tree.items()}


def choose(
    index: Mapping[str, Any], expected: Shapes, pattern: str = '.*', strict: bool = True
) -> dict[str, Any]:
    """Return the leaves of `index` to restore: their whole path matches `pattern`.

    Raises ValueError for paths in `expected` that have another shape and, if `strict`, for matching paths
    that only `index` or only `expected` has. Without `strict` these are left out.
    """
    found = _matching(index, pattern)
    known = _matching(expected, pattern)
    if not found:
        raise ValueError(
            f'{pattern!r} matches none of its {len(index)} paths, which are like '
            f'{max(index, default="")!r}'
        )
    if not strict:
        found = {path: leaf for path, leaf in found.items() if path in known}
        known = {path: known[path] for path in found}
    compare(known, shapes(found))
    return found


def compare(expected: Shapes, found: Shapes) -> None:
    """Raise ValueError unless a checkpoint's shapes, `found`, are the model's, `expected`."""
    differences = []
    for path in sorted(expected | found, key=lambda path: (not is_parameter(path), path)):
        if expected.get(path) != found.get(path):
            differences.append(
                f'{path} is {found.get(path, "missing")}, not {expected.get(path, "there")}'
            )
    if differences:
        raise ValueError(
            f'checkpoint of another model: {settings.first_ten(differences, separator="; ")}'
        )


def _matching(tree: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """Return the part of a flat tree whose whole paths match `pattern`."""
    return {path: leaf for path, leaf in tree.items() if re.fullmatch(pattern, path)}


def flatten(tree: Mapping, prefix: str = '') -> dict:
    """Return {'a/b': leaf} of nested dicts."""
    flat: dict = {}
    for name, node in tree.items():
        if isinstance(node, dict):
            flat |= flatten(node, f'{prefix}{name}/')
        else:
            flat[f'{prefix}{name}'] = node
    return flat


def unflatten(flat: Mapping) -> dict:
    """Return the nested dicts of a flat tree."""
    tree: dict = {}
    for path, leaf in flat.items():
        *parents, name = path.split('/')
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
