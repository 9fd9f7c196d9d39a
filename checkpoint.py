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

import functools
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import google_crc32c
import jax
import msgpack
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils

import paths

VERSION = 3  # in 2 bfloat16 arrays lay as uint16; else they are alike
CHUNK_BYTES = 64 * 2**20
ARRAYS_IN_FLIGHT = 8  # threads; bounds the host memory that restoring takes
MANIFEST = 'manifest.json'
OURS = (MANIFEST, 'config.json', 'data_position.npy')  # none of them in a checkpoint of T5X
PATIENCE_SECONDS = 600  # without a new file, until other processes are given up
GZIP_RATIO = 1032  # at most, of what a file holds to its size
DRIVERS = [('zarr', driver) for driver in ('file', 'gfile', 'gcs')]  # of T5X's specs
# What a damaged or hostile msgpack may lead to, by its types, sizes or depth.
DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
NATIVE = "Orbax is not read: save with T5X's use_orbax=False"
FORMS = 'a workdir, a checkpoint_STEP folder, a Mesh-TensorFlow prefix or a Hugging Face folder'
RUN_FILES = ('lock', 'metrics.jsonl', 'model-info.txt')  # of a workdir
# What `Saver` calls a folder that is not whole; users have backups of other names.
UNFINISHED = re.compile(r'checkpoint_[0-9]+\.tmp-([0-9]+|deleted)')
POINTER_BYTES = 200  # of git-lfs, at most
Shapes = dict[str, tuple[int, ...]]


class LazyArray(Protocol):
    """A large array of a checkpoint's index, which is read later."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def read(self) -> np.ndarray:
        """Return the whole array in its stored dtype."""
        ...


def read_leaf(leaf: Any) -> Any:
    """Return the array that a leaf of a checkpoint's index is, or reads."""
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return leaf
    return leaf.read()


class Damaged(ValueError):
    """A checkpoint of ours of which some files are not as they were saved."""


class Unreadable(OSError):
    """A checkpoint of which the system does not let this process read some files: it may be whole."""


class Saver:
    """Saves into `workdir` behind the training steps. Every process makes one and calls it alike. After
    each save all but the newest `keep` checkpoints go (0: all stay), never a multiple of `keep_every`
    (0: no such) nor one that holds T5X's marker file PINNED. Parameters are saved in `dtype`, '' for
    theirs."""

    def __init__(
        self, workdir: str | Path, keep: int = 0, keep_every: int = 0, dtype: str = ''
    ) -> None:
        if min(keep, keep_every) < 0:
            raise ValueError(f'keep={keep}, keep_every={keep_every}: must be at least 0')
        self.workdir, self.keep, self.keep_every = paths.disk_path(workdir), keep, keep_every
        self.dtype = dtype
        paths.to_kvstore(self.workdir)  # refuses at once a name that TensorStore cannot open
        self._pool = futures.ThreadPoolExecutor(ARRAYS_IN_FLIGHT)
        self._saving: futures.Future | None = None
        # Names the tmp folder alike in all processes, and another in every save.
        self._stamp = int(multihost_utils.broadcast_one_to_all(np.int32(time.time())))
        if jax.process_index() == 0:
            for stale in self.workdir.glob('checkpoint_*.tmp-*/'):
                if UNFINISHED.fullmatch(stale.name) and not stale.is_symlink():
                    shutil.rmtree(stale)
        multihost_utils.sync_global_devices(f'{self.workdir} is clean')

    def save(self, step: int, tree: Mapping, files: Mapping[str, bytes] = {}) -> None:
        """Copies the flat `tree` and returns: the caller may donate it. Later all of it is in
        `checkpoint_STEP`, `files` beside it. Leaves of `read_index` are read only when they are written.
        Waits for the save before, raising its OSError."""
        self.wait()
        final = self.workdir / f'checkpoint_{step}'
        if final.exists():
            words = f'{final} exists, a step is saved once'
            raise ValueError(f'{words}: remove it or use another workdir')
        self._stamp += 1
        tmp = final.with_name(f'{final.name}.tmp-{self._stamp}')
        index = {path: _index_leaf(path, tree[path], self.dtype) for path in sorted(tree)}
        packed = msgpack.packb({'version': VERSION, 'optimizer': unflatten(index)})
        specs = {path: index[path] for path in tree if isinstance(index[path], dict)}
        dtypes = [spec['dtype'] for spec in specs.values()]
        copies = list(self._pool.map(_copy_shards, [tree[path] for path in specs], dtypes))
        # All is queued now: even an interpreter that exits does it first. What has yet to be read comes one
        # array after the other, for the memory's sake.
        is_read = all(
            isinstance(leaf, np.ndarray | np.generic | jax.Array) for leaf in tree.values()
        )
        write: Any = self._pool.map if is_read else map
        written = write(_write_array, itertools.repeat(tmp), specs.values(), copies)
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


def save(workdir: str | Path, step: int, tree: Mapping, files: Mapping[str, bytes] = {}) -> Path:
    """Writes `workdir/checkpoint_STEP`: the flat `tree`, and `files` beside it; all or nothing. Every
    process calls it with the same paths and writes the shards it owns. OSError if the disk refuses."""
    saver = Saver(workdir)
    try:
        saver.save(step, tree, files)
        saver.wait()
    finally:  # after an error other threads may still write
        saver._pool.shutdown(cancel_futures=True)
    return saver.workdir / f'checkpoint_{step}'


def restore(
    source: str | Path | Mapping[str, Any],
    shardings: Mapping[str, jax.sharding.Sharding] = {},
    dtype: str = '',
) -> dict[str, jax.Array | np.ndarray]:
    """Reads a checkpoint, or those leaves of its `read_index` that are given; parameters are cast to `dtype`
    if there is one. A path in `shardings` gives a jax.Array, of which a process reads only its part (of a
    foreign checkpoint all, one array after the other); others give numpy."""
    index = source if isinstance(source, Mapping) else read_index(source)

    def read(path):
        leaf, sharding = index[path], shardings.get(path)
        array = leaf.open() if isinstance(leaf, ZarrEntry) else ts.array(read_leaf(leaf))
        if dtype and path.startswith('target/'):
            array = ts.cast(array, ts.dtype(dtype))
        if sharding is None:
            return array.read().result()
        parts = sharding.addressable_devices_indices_map(array.shape).values()
        reads = {str(part): array[part].read() for part in parts}  # once for all its replicas
        return jax.make_array_from_callback(array.shape, sharding, lambda i: reads[str(i)].result())

    is_foreign = not all(isinstance(leaf, ZarrEntry | np.ndarray) for leaf in index.values())
    with futures.ThreadPoolExecutor(1 if is_foreign else ARRAYS_IN_FLIGHT) as pool:
        return dict(zip(index, pool.map(read, index), strict=True))


def read_index(path: str | Path) -> dict[str, Any]:
    """{path: leaf} of T5X's native layout (a folder, or a file alone), a Mesh-TF checkpoint (its prefix or
    folder) or a Hugging Face folder. A leaf is an array if it is small, else it has `shape`, `dtype` and
    `read()`."""
    directory = paths.to_path(path)
    is_alone = paths.is_file(directory)
    file = directory if is_alone else directory / 'checkpoint'
    for other in ('_METADATA', '_CHECKPOINT_METADATA', 'checkpoint_*/_CHECKPOINT_METADATA'):
        for found in directory.glob(other):
            raise ValueError(f'{found.parent} has the layout of Orbax: {NATIVE}')
    if not paths.is_file(file):
        raise ValueError(_nothing_there(directory))
    hooks: dict = {'object_hook': functools.partial(_unpack_map, file.parent)}
    hooks |= {'ext_hook': _unpack_extension, 'strict_map_key': False}
    content = paths.own_file(file).read_bytes()
    try:
        top = dict(msgpack.unpackb(content, **hooks))
        leaves = {path: x for path, x in flatten(top.get('optimizer', {})).items() if x is not None}
        leaves = {path: x if hasattr(x, 'shape') else np.asarray(x) for path, x in leaves.items()}
    except DAMAGE as error:
        folder = file.parent
        if is_alone and ((folder / 'checkpoint').is_file()):
            rule = f'it is one file of a checkpoint: name its folder, {folder}'
        else:
            rule = f'name {FORMS}; {NATIVE}'
        raise ValueError(f'{file} is no T5X index ({error}): {rule}') from error
    if (version := top.get('version', 0)) not in (2, VERSION):
        raise ValueError(f'{file} has version {version}, not 2 or {VERSION}; {NATIVE}')
    return leaves


def _nothing_there(directory):
    """Why a place has no checkpoint, and what to name, in one line."""
    missing = f'{directory / "checkpoint"} is missing: name {FORMS}'
    if not isinstance(directory, Path):
        return missing
    if directory.is_symlink() and not directory.exists():
        return f'{missing}, not a link to {os.readlink(directory)}, which does not exist'
    if not directory.exists():
        return f'{missing}, not {directory}, which does not exist'
    names = sorted(file.name for file in _listed(directory))
    if any(name in RUN_FILES for name in names):
        return (
            f'{directory} has no checkpoint yet: wait until its run has saved one, or name {FORMS}'
        )
    holds = f'holds {", ".join(names[:5])}{", …" if len(names) > 5 else ""}'
    return f'{missing}, not {directory}, which {holds if names else "is empty"}'


@dataclass(frozen=True, eq=False)
class ZarrEntry:
    """An array of which T5X's index has a TensorStore spec: it lies in a folder below `directory`."""

    directory: Path
    spec: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.spec['metadata']['shape'])

    @property
    def dtype(self) -> np.dtype:
        return self.open().dtype.numpy_dtype

    def read(self) -> np.ndarray:
        return self.open().read().result()

    def open(self) -> ts.TensorStore:
        """Believes nothing that a stranger's spec says but shape and dtype, which it checks: T5X puts the
        folder beside the index wherever it was, and only .zarray is right about chunks and compressor."""
        spec, kvstore = self.spec, self.spec['kvstore']
        name = str(kvstore.get('path') or spec.get('path'))  # in old ones it is not the kvstore's
        if (drivers := (spec['driver'], kvstore.get('driver'))) not in DRIVERS:
            raise ValueError(f'{name} has drivers {drivers}, not zarr and file: save it to a disk')
        root, folder = self.directory, self.directory / name
        # The caller's own part of the path may hold anything.
        is_own = '..' not in PurePosixPath(name).parts and folder.is_relative_to(root)
        files = _listed(folder) if is_own and folder.is_dir() else []
        if isinstance(root, Path):  # a disk has links, and devices that never end
            is_own &= all(file.is_file() for file in files)
            root, places = root.resolve(), [place.resolve() for place in (folder, *files)]
            is_own &= all(place.is_relative_to(root) for place in places)
        if not is_own:
            raise ValueError(f'{name} is not all files in {root}: do not trust this checkpoint')
        if folder / '.zarray' not in files:
            raise ValueError(f'{folder}/.zarray is missing: copy the checkpoint again')
        sizes = {file: paths.file_size(file) for file in files}
        for file, size in sizes.items():
            if size < POINTER_BYTES and isinstance(file, Path):
                paths.check_not_lfs(file)
        # A lost chunk must not be read as zeros.
        here = {'driver': 'zarr', 'fill_missing_data_reads': False}
        array = ts.open({**here, 'kvstore': paths.to_kvstore(folder)}).result()
        if array.shape != self.shape:
            raise ValueError(f'{folder} has shape {array.shape}, its index {self.shape}: copy both')
        if array.dtype == ts.uint16:
            raise ValueError(f'{folder} holds uint16, which T5X refuses too: use its bfloat16')
        dtype = spec.get('dtype', array.dtype.name)  # old ones have none
        if array.dtype.name != dtype:
            raise ValueError(
                f'{folder} holds {array.dtype.name}, its index says {dtype}: copy both'
            )
        chunks: Any = array.chunk_layout.write_chunk.shape or ()  # None for a scalar
        need = math.prod(-(-n // c) * c for n, c in zip(array.shape, chunks, strict=True))
        held = sum(size for file, size in sizes.items() if file.name != '.zarray')
        if need * int(array.dtype.numpy_dtype.itemsize) > held * GZIP_RATIO:
            words = f'{held} bytes cannot hold {array.shape}, or chunks are missing'
            raise ValueError(f'{folder}: {words}: copy the checkpoint again')
        return array


class Fault(NamedTuple):
    """What is wrong with a checkpoint, in one line. `kind`: damaged, unreadable, refused, or unknown where
    there are no checksums."""

    kind: str
    words: str


def verify(directory: str | Path) -> bool:
    """Return True if every file is as it was saved, False if nobody knows, as T5X saves no checksums.

    Raises Damaged, which names up to ten files; Unreadable where the system refuses to read some; ValueError for
    what is not to be trusted. Every process calls it and reads its share, and all return or raise alike.
    """
    try:
        faults = _faults(paths.to_path(directory))
    except ValueError as error:
        faults = [Fault('refused', str(error))]
    except OSError as error:
        faults = [Fault('unreadable', _reason(error, str(directory)))]
    words: dict[str, list[str]] = {}
    for fault in _from_all_processes(faults):
        words.setdefault(fault.kind, []).append(fault.words)
    if 'refused' in words:
        raise ValueError(words['refused'][0])
    if 'unreadable' in words:
        listed = '; '.join(words['unreadable'][:10])
        remedy = 'it may be whole, so it stays as it is: correct its permissions or its disk'
        raise Unreadable(f'{directory} cannot be read ({listed}): {remedy}')
    if 'damaged' in words:
        raise Damaged(
            f'{directory} is damaged: {"; ".join(words["damaged"][:10])}: use an older one'
        )
    return 'unknown' not in words


def _faults(directory):
    """The faults of this process's share of the files. Raises ValueError and OSError for those of the whole."""
    has_index = paths.is_file(directory / 'checkpoint')
    is_ours = any(paths.is_file(directory / name) for name in OURS)
    if not has_index and not _numbers([directory]):  # a config.json alone makes no checkpoint
        is_ours = paths.is_file(directory / MANIFEST)
    if not is_ours:
        return [Fault('unknown', '')]
    try:
        content = (directory / MANIFEST).read_bytes()
        step, sums = (json.loads(content)[name] for name in ('step', 'files'))
        if content != _pack_manifest(step, sums):
            raise ValueError('changed')
        if _numbers([directory]) not in ([], [step]):
            raise ValueError(f'of step {step}')
    except FileNotFoundError:
        return [Fault('damaged', f'{MANIFEST} is missing')]
    except (IsADirectoryError, ValueError, TypeError, KeyError) as error:
        return [Fault('damaged', f'{MANIFEST} is damaged ({error})')]

    def find_fault(name):
        try:
            if not paths.is_file(
                directory / name
            ):  # a stranger might name a device, which never ends
                return Fault('damaged', f'{name} is missing')
            size, crc32c = _checksum(directory / name)
            if size < POINTER_BYTES and size != sums[name][0]:
                paths.check_not_lfs(directory / name)
        except ValueError as error:
            return Fault('refused', str(error))
        except OSError as error:
            return Fault('unreadable', _reason(error, directory))
        if size != sums[name][0]:
            return Fault('damaged', f'{name} has {size} bytes, not {sums[name][0]}')
        return Fault('damaged', f'{name} has changed') if crc32c != sums[name][1] else None

    own = sorted(sums)[jax.process_index() :: jax.process_count()]
    with futures.ThreadPoolExecutor(ARRAYS_IN_FLIGHT) as pool:
        faults = [fault for fault in pool.map(find_fault, own) if fault]
    if 'checkpoint' in own and not faults:
        stored = read_index(directory).get('state/step', step)
        if stored != step:
            faults = [Fault('damaged', f'checkpoint holds step {stored}')]
    return faults


def _from_all_processes(faults):
    """The first ten faults of each process, the same list in all."""
    if jax.process_count() == 1:
        return faults
    lines = [f'{fault.kind} {" ".join(fault.words.split())[:6000]}' for fault in faults[:10]]
    padded = '\n'.join(lines).encode(errors='replace').ljust(2**16, b'\n')
    texts = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8)[: 2**16]).tobytes()
    found = filter(None, texts.decode(errors='replace').split('\n'))
    return [Fault(*line.split(' ', maxsplit=1)) for line in found]


def _reason(error, directory):
    """An OSError in words: the file, seen from `directory`, and what the system says."""
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if not cause.filename:
        return str(error)
    file = Path(cause.filename)
    if file.is_relative_to(directory):
        file = file.relative_to(directory)
    return f'{file}: {cause.strerror}'


def newest_whole(workdir: str | Path, report: Callable[[str], None] = print) -> int | None:
    """Return the newest step that verifies; None if `workdir` has no checkpoint.

    A damaged one is reported and renamed `checkpoint_STEP.damaged-N`; ValueError if no other is left. One that
    cannot be read may be whole: it stays, and the OSError goes to the caller. Every process calls it.
    """
    workdir = paths.disk_path(workdir)
    for step in reversed(_numbers(folder for folder in _listed(workdir) if folder.is_dir())):
        directory = workdir / f'checkpoint_{step}'
        names = (Path(f'{directory}.damaged-{n}') for n in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        try:
            verify(directory)
            return step
        except Damaged as error:
            report(f'{error}. It is set aside as {aside.name}.')
        if jax.process_index() == 0:
            directory.rename(aside)
        multihost_utils.sync_global_devices(f'{directory} is set aside')
    if damaged := sorted(workdir.glob('checkpoint_*.damaged-*')):
        words = f'{workdir} has only damaged checkpoints, the last {damaged[-1].name}'
        raise ValueError(f'{words}: repair one and name it checkpoint_STEP, or use another workdir')
    return None


def steps(workdir: str | Path) -> list[int]:
    """Steps of the checkpoints in `workdir`, ascending; a half one has no index or another name."""
    place = paths.to_path(workdir)
    if not isinstance(place, Path):
        return _numbers(index.parent for index in place.glob('checkpoint_*/checkpoint'))
    folders = [folder for folder in _listed(place) if _numbers([folder])]
    return _numbers(folder for folder in folders if paths.is_file(folder / 'checkpoint'))


def _listed(workdir):
    """What is in a folder on a disk, nothing where there is none. Raises OSError if it may not be listed."""
    try:
        return list(workdir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise Unreadable(
            f'{workdir} cannot be listed ({error.strerror}): correct its permissions or its disk'
        ) from error


def newest(workdir: str | Path) -> int | None:
    return max(steps(workdir), default=None)


def shapes(tree: Mapping) -> Shapes:
    """{path: shape} of a flat tree, or of what `read_index` returns."""
    return {path: tuple(np.shape(leaf)) for path, leaf in tree.items()}


def parameters(tree: Mapping[str, Any]) -> dict[str, Any]:
    """{parameter's own path: leaf} of a flat tree."""
    return {p.removeprefix('target/'): x for p, x in tree.items() if p.startswith('target/')}


def choose(
    index: Mapping[str, Any], expected: Shapes, pattern: str = '.*', strict: bool = True
) -> dict[str, Any]:
    """The leaves of `index` whose whole path matches `pattern`, to be restored. ValueError lists up to ten
    paths in `expected` that have another shape or, where it is `strict`, are missing or are too many."""
    matches = re.compile(pattern).fullmatch
    found = {path: leaf for path, leaf in index.items() if matches(path)}
    known = {path: shape for path, shape in expected.items() if matches(path)}
    if not found:
        words = f'{pattern!r} matches none of its {len(index)} paths'
        raise ValueError(f'{words}, which are like {max(index, default="")!r}')
    if not strict:
        known = {path: shape for path, shape in known.items() if path in found}
        found = {path: leaf for path, leaf in found.items() if path in known}
    compare(known, shapes(found))
    return found


def compare(expected: Shapes, found: Shapes) -> None:
    """Raises ValueError unless the shapes of a checkpoint, `found`, are the model's, both ways."""
    names = [path for path in expected | found if expected.get(path) != found.get(path)]
    names.sort(key=lambda path: (not path.startswith('target/'), path))  # parameters first
    words = [f'{p} is {found.get(p, "missing")}, not {expected.get(p, "there")}' for p in names]
    if words:
        more = f' and {len(words) - 10} more' if len(words) > 10 else ''
        raise ValueError(f'checkpoint of another model: {"; ".join(words[:10])}{more}')


def flatten(tree: Mapping, prefix: str = '') -> dict:
    """Nested dicts to {'a/b': leaf}."""
    flat: dict = {}
    for name, node in tree.items():
        if isinstance(node, dict):
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


def _index_leaf(path, array, dtype):
    """What T5X's index holds: small arrays packed whole, of others the spec of their folder."""
    # T5X packs what has no logical axes: the step, Adafactor's vectors and (1,) placeholders.
    is_parameter = path.startswith('target/')
    is_small = np.shape(array) in ((), (1,)) or path.endswith(('/v_row', '/v_col'))
    if is_small and not is_parameter:
        array = read_leaf(array)
        if isinstance(array, jax.Array):  # whole, though it may be split over processes
            array = multihost_utils.process_allgather(array, tiled=True)
        content = (array.shape, array.dtype.name, np.asarray(array).tobytes())
        return msgpack.ExtType(1, msgpack.packb(content))
    # A shard is whole chunks, so no two processes write into one file.
    is_jax = isinstance(array, jax.Array)
    shard = array.sharding.shard_shape(array.shape) if is_jax else array.shape
    dtype = ts.dtype(dtype if dtype and is_parameter else array.dtype.name)
    chunks = chunk_shape(shard, CHUNK_BYTES // dtype.numpy_dtype.itemsize)
    # Differs from T5X: not gzipped, which T5X restores as well and is several times faster.
    metadata = {'chunks': list(chunks), 'compressor': None, 'shape': list(array.shape)}
    kvstore = {'driver': 'file', 'path': path.replace('/', '.') + '/'}
    return {'driver': 'zarr', 'dtype': dtype.name, 'kvstore': kvstore, 'metadata': metadata}


def _pack_manifest(step, sums):
    """Its checksum is one of the step and of {name: (bytes, crc32c)}, and there is one way to write it."""
    content = {'step': step, 'files': sums}
    crc32c = google_crc32c.value(json.dumps(content, sort_keys=True).encode())
    return json.dumps({'crc32c': crc32c, **content}, sort_keys=True, indent=1).encode()


def _copy_shards(array, dtype):
    """[(index, numpy copy in `dtype`)] of what this process writes: of a shard's replicas the first. What has
    yet to be read is left so."""
    dtype = np.dtype(dtype)  # jax teaches numpy the name 'bfloat16'
    if isinstance(array, jax.Array):
        shards = [s for s in array.addressable_shards if s.replica_id == 0]
        return [(s.index, np.array(s.data, dtype)) for s in shards]
    whole = (slice(None),) * len(array.shape)
    copy = (
        np.array(array, dtype) if isinstance(array, np.ndarray | np.generic | jax.Array) else array
    )
    return [(whole, copy)] if jax.process_index() == 0 else []


def _write_array(directory, spec, shards):
    """Writes `shards`; {file: (bytes, crc32c)} of their chunks, and of .zarray in the first process."""
    folder, metadata = spec['kvstore']['path'], spec['metadata']
    kvstore = paths.to_kvstore(directory / folder)
    store = ts.open({**spec, 'kvstore': kvstore}, create=True, open=True).result()
    for write in [store[index].write(read_leaf(data)) for index, data in shards]:
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
    with file.open('rb') as stream:
        while block := stream.read(2**20):
            checksum.update(block)
            size += len(block)
    return size, int.from_bytes(checksum.digest())


def _numbers(folders):
    """The steps in names as T5X writes them, ascending: no zeros in front, no other digits than ours."""
    matches = (re.fullmatch('checkpoint_(0|[1-9][0-9]*)', folder.name) for folder in folders)
    return sorted(int(match[1]) for match in matches if match)


def _unpack_map(directory, node):
    """What is no map but stands for an array: a TensorStore spec, and Flax's pieces of one over 1 GiB."""
    if '__msgpack_chunked_array__' in node:
        parts = node['shape'], node['chunks']
        shape, chunks = ([part[str(i)] for i in range(len(part))] for part in parts)
        return np.concatenate(chunks).reshape(shape)
    if not {'driver', 'kvstore', 'metadata'} <= node.keys():
        return node
    entry, name = ZarrEntry(directory, node), node['kvstore'].get('path')
    if not all(type(n) is int and n >= 0 for n in entry.shape):
        raise ValueError(f'{name} has shape {entry.shape}')
    return entry


def _unpack_extension(code, payload):
    """Flax's msgpack extensions: 1 array, 2 complex number, 3 numpy scalar."""
    if code == 2:
        return np.asarray(complex(*msgpack.unpackb(payload)))
    if code not in (1, 3):
        raise ValueError(f'msgpack extension {code}')
    shape, dtype, content = msgpack.unpackb(payload)
    return np.frombuffer(content, dtype).reshape(shape)  # jax teaches numpy the name 'bfloat16'


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
