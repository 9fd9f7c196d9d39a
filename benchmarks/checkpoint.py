"""Our checkpoints against Orbax's and against plain files: saving, restoring, and how long training waits.

    pip install orbax-checkpoint
    python benchmarks/checkpoint.py [--sizes=1GB,4GB] [--rounds=3] [--folder=DIR] [--only=REGEX]

The state is a TrainState of T5 1.1 with Adafactor, float32: 1GB is the shape of base, 4GB that of large
with 31 layers in encoder and decoder. The contenders take turns, each in a new process on one CPU device:

    ours            checkpoint.Saver as train.py calls it, and prepare.py restores; `with checksums`
                    first compares every file with its checksum, as a run does that resumes
    orbax           CheckpointManager with its default options, StandardSave and StandardRestore
    plain           a file per array from as many threads as ours has, each synced, then their folder

Where main.py restarts itself with huge pages (modes/process.py), so do all of them.

Saving: each process saves four times, and the first one is not counted. `copy` is one in-memory copy of
the state by that many threads, and `call` the time until save returns: the fastest of three each, since a
copy into fresh pages takes two to four times as long as one into memory that was freed before, and chance
decides which. Both follow an update that is donated the state (-x for every array). `next step` is what an
update takes more after the call than before it: a contender that does not copy makes the step copy, and
threads that write compete with it. `finished` is the time from the call until wait returns. All three have
synced their files then.

Restoring: from the folder to a TrainState on the device, once after the files were dropped from the page
cache (`cold`, by posix_fadvise; a host below a virtual machine may still have them) and once more in
another process (`warm`). Every array must be the saved one, bit for bit.

Prints a line per contender, the medians of the rounds and their range; GB per second; how many times
as fast ours is; then the speed of the disk, with one file of the same size that is written and synced,
and read after it was dropped, and what ours has of it. Without Orbax the others are measured. The
folder holds four checkpoints at a time, the memory the state and at least one copy of it.

The goal: finished at least 1.5 times as fast as Orbax, restored 2.3 times, and training blocked for at
most one copy and 20 ms.
"""

import importlib.util
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# Before the folder of this file, so that `import checkpoint` is what is measured.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import numpy as np
from absl import app, flags

import checkpoint
import partition
import prepare
import train
from configs import t5_1_1
from modes import process
from prepare import make_spec
from run import memory, verify

SIZES = {
    # A size for tests.
    'tiny': (
        'small',
        dict(emb_dim=64, vocab_size=1024, num_encoder_layers=1, num_decoder_layers=1),
    ),
    '1GB': ('base', {}),
    '4GB': ('large', dict(num_encoder_layers=31, num_decoder_layers=31)),
}
NUM_SAVES = 3  # measured, after a first one; an odd number
NUM_UPDATES = 3 * NUM_SAVES  # before the last of them, which is the one to restore
BLOCK_BYTES = 2**24  # to measure the disk's own speed

FLAGS = flags.FLAGS
flags.DEFINE_list('sizes', ['1GB', '4GB'], f'Some of {", ".join(SIZES)}.')
flags.DEFINE_integer('rounds', 3, 'How often each contender is measured.', lower_bound=1)
flags.DEFINE_string('folder', None, "Where to write; the system's temporary folder if not given.")
flags.DEFINE_string('only', '.*', 'Regular expression of the contenders that are measured.')
flags.register_validator(
    'sizes', lambda sizes: set(sizes) <= SIZES.keys(), f'use some of {", ".join(SIZES)}'
)


class Contender(Protocol):
    """Checkpoints of a spec's states in a folder."""

    def __init__(self, spec: train.StepSpec, folder: Path) -> None: ...

    def save(self, step: int, state: train.TrainState) -> None:
        """Start to save. The caller may donate the state when this returns."""
        ...

    def wait(self) -> None:
        """Wait until the last save is finished."""
        ...

    def restore(self, step: int) -> train.TrainState: ...


class Saved(NamedTuple):
    """The seconds of a save of one process."""

    copy: float  # until the state is copied in memory
    call: float  # until save returned
    next_step: float  # by which an update took longer after the call than before it
    finished: float  # from the call until wait returned


class Restored(NamedTuple):
    """The seconds of restoring in new processes."""

    cold: float
    warm: float


class Disk(NamedTuple):
    """The seconds for one file."""

    write: float
    read: float


def main(argv: list[str]) -> None:
    contenders: dict[str, type[Contender]] = {'ours': Ours}
    names = ['jax', 'tensorstore']
    if importlib.util.find_spec('orbax') is None:
        print('Orbax is not installed, so the others alone: pip install orbax-checkpoint')
    else:
        contenders['orbax'] = Orbax
        names.append('orbax-checkpoint')
    contenders['plain'] = Plain
    contenders = {name: x for name, x in contenders.items() if re.search(FLAGS.only, name)}
    print(', '.join(f'{name} {version(name)}' for name in names), end='; ')
    print(f'{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}')
    for size in FLAGS.sizes:
        saved: dict[str, list[Saved]] = {}
        restored: dict[str, list[Restored]] = {}
        disk = []
        for _ in range(FLAGS.rounds):
            for name, contender in contenders.items():
                readers = {name: contender}
                if contender is Ours:
                    readers[f'{name}, with checksums'] = OursVerified
                with tempfile.TemporaryDirectory(dir=FLAGS.folder) as folder:
                    seconds = in_new_process(measure_save, contender, size, folder)
                    saved.setdefault(name, []).append(seconds)
                    for reader_name, reader in readers.items():
                        drop_from_cache(folder)
                        cold = in_new_process(measure_restore, reader, size, folder)
                        warm = in_new_process(measure_restore, reader, size, folder)
                        restored.setdefault(reader_name, []).append(Restored(cold, warm))
            with tempfile.TemporaryDirectory(dir=FLAGS.folder) as folder:
                disk.append(in_new_process(measure_disk, num_bytes(size), folder))
        report(size, saved, restored, disk)


def in_new_process(function: Callable, *arguments: Any) -> Any:
    with futures.ProcessPoolExecutor(1, get_context('spawn')) as pool:
        return pool.submit(function, *arguments).result()


# The tables.


def report(
    size: str,
    saved: dict[str, list[Saved]],
    restored: dict[str, list[Restored]],
    disk: Sequence[Disk],
) -> None:
    """Print the lines of a size."""
    gigabytes = num_bytes(size) / 1e9
    print(f'\n{size}: {num_arrays(size)} arrays, {gigabytes:.3f} GB')
    print_cells(['saving', 'copy', 'call', 'next step', 'finished', 'min..max', 'GB/s', 'ours is'])
    for name, rounds in saved.items():
        finished = [x.finished for x in rounds]
        cells = [
            name,
            f'{median(x.copy for x in rounds):.3f}',
            f'{median(x.call for x in rounds):.3f}',
            f'{median(x.next_step for x in rounds):+.3f}',
            f'{median(finished):.2f}',
            f'{min(finished):.2f}..{max(finished):.2f}',
            f'{gigabytes / median(finished):.2f}',
            ratio(finished, [x.finished for x in saved.get('ours', [])]),
        ]
        print_cells(cells)
    print_cells(
        ['restoring', 'cold', 'min..max', 'GB/s', 'ours is', 'warm', 'min..max', 'GB/s', 'ours is']
    )
    for name, reads in restored.items():
        cells = [name]
        for field in Restored._fields:
            seconds = [getattr(x, field) for x in reads]
            cells += [
                f'{median(seconds):.2f}',
                f'{min(seconds):.2f}..{max(seconds):.2f}',
                f'{gigabytes / median(seconds):.2f}',
                ratio(seconds, [getattr(x, field) for x in restored.get('ours', [])]),
            ]
        print_cells(cells)
    writing = gigabytes / median(x.write for x in disk)
    reading = gigabytes / median(x.read for x in disk)
    print(f'{size}: the disk writes {writing:.2f} GB/s and reads {reading:.2f}', end='')
    if 'ours' not in saved:
        print()
        return
    finished_rate = gigabytes / median(x.finished for x in saved['ours'])
    cold_rate = gigabytes / median(x.cold for x in restored['ours'])
    excess = median(x.call - x.copy for x in saved['ours'])
    print(f'; ours has {finished_rate / writing:.0%} and, cold, {cold_rate / reading:.0%} of it')
    print(f'{size}: training is blocked for one copy and {1000 * excess:.0f} ms')


def print_cells(cells: Sequence[str]) -> None:
    padded = [cells[0].ljust(20)] + [cell.rjust(12) for cell in cells[1:]]
    print(' '.join(padded), flush=True)


def median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def ratio(seconds: Sequence[float], ours: Sequence[float]) -> str:
    """Return how many times as fast ours is."""
    if not ours or seconds == ours:
        return '-'
    return f'{median(seconds) / median(ours):.2f} x'


# The contenders.


class Ours:
    def __init__(self, spec: train.StepSpec, folder: Path) -> None:
        self.spec = spec
        _ = spec.state_specs  # are traced here, as those of the others
        self.saver = checkpoint.Saver(folder)

    def save(self, step: int, state: train.TrainState) -> None:
        self.saver.save(step, train.saved_tree(self.spec, state))

    def wait(self) -> None:
        self.saver.wait()

    def restore(self, step: int) -> train.TrainState:
        index = checkpoint.read_index(self.saver.workdir / f'checkpoint_{step}')
        return prepare.restore(self.spec, index)


class OursVerified(Ours):
    def restore(self, step: int) -> train.TrainState:
        assert verify.newest_valid(self.saver.workdir) == step
        return super().restore(step)


class Orbax:
    def __init__(self, spec: train.StepSpec, folder: Path) -> None:
        import orbax.checkpoint

        self.args = orbax.checkpoint.args
        self.manager = orbax.checkpoint.CheckpointManager(folder)
        shardings = partition.shardings(spec.mesh, spec.state_specs)
        self.shapes = jax.tree.map(
            lambda x, to: x.update(sharding=to), spec.state_shapes, shardings
        )

    def save(self, step: int, state: train.TrainState) -> None:
        self.manager.save(step, args=self.args.StandardSave(state))

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def restore(self, step: int) -> train.TrainState:
        return self.manager.restore(step, args=self.args.StandardRestore(self.shapes))


class Plain:
    """Saves before `save` returns, without a copy."""

    def __init__(self, spec: train.StepSpec, folder: Path) -> None:
        self.folder = folder
        self.shapes = spec.state_shapes
        self.shardings = partition.shardings(spec.mesh, spec.state_specs)
        self.pool = futures.ThreadPoolExecutor(checkpoint.ARRAYS_IN_FLIGHT)

    def save(self, step: int, state: train.TrainState) -> None:
        folder = self.folder / str(step)
        folder.mkdir()

        def write(i: int, x: jax.Array) -> None:
            with open(folder / str(i), 'wb') as file:
                np.asarray(x).tofile(file)
                os.fsync(file.fileno())

        leaves = jax.tree.leaves(state)
        list(self.pool.map(write, range(len(leaves)), leaves))
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def wait(self) -> None:
        pass

    def restore(self, step: int) -> train.TrainState:
        def read(i: int, like: jax.ShapeDtypeStruct) -> np.ndarray:
            x = np.empty(like.shape, like.dtype)
            with open(self.folder / str(step) / str(i), 'rb', buffering=0) as file:
                file.readinto(x.reshape(-1).view(np.uint8))
            return x

        leaves, structure = jax.tree.flatten(self.shapes)
        arrays = list(self.pool.map(read, range(len(leaves)), leaves))
        return jax.device_put(jax.tree.unflatten(structure, arrays), self.shardings)


# Measuring.


def measure_save(contender: type[Contender], size: str, folder: str) -> Saved:
    """Measure the saves of a process after its first."""
    spec = spec_of(size)
    saves = contender(spec, Path(folder))
    shardings = partition.shardings(spec.mesh, spec.state_specs)
    advance = jax.jit(update, donate_argnums=0)
    state = jax.device_put(random_state(spec), shardings)
    saves.save(1, state)
    saves.wait()
    state = jax.block_until_ready(advance(state))  # compiles
    os.sync()

    pool = futures.ThreadPoolExecutor(checkpoint.ARRAYS_IN_FLIGHT)
    measure_copy(pool, state)  # the first one has no freed memory
    copies, calls, next_steps, finished = [], [], [], []
    for i in range(NUM_SAVES):
        state = jax.block_until_ready(advance(state))
        copies.append(measure_copy(pool, state))
        began = time.perf_counter()
        state = jax.block_until_ready(advance(state))
        step_seconds = time.perf_counter() - began
        began = time.perf_counter()
        saves.save(3 * i + 4, state)
        calls.append(time.perf_counter() - began)
        state = jax.block_until_ready(advance(state))
        next_steps.append(time.perf_counter() - began - calls[-1] - step_seconds)
        saves.wait()
        finished.append(time.perf_counter() - began)
    return Saved(min(copies), min(calls), median(next_steps), median(finished))


def random_state(spec: train.StepSpec) -> train.TrainState:
    """Return a state of random numbers, which no compression shortens much. All counts are 1."""
    rng = np.random.default_rng(0)

    def random(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if x.dtype == np.float32:
            return rng.standard_normal(x.shape, np.float32)
        return np.ones(x.shape, x.dtype)

    return jax.tree.map(random, spec.state_shapes)


def update(state: train.TrainState) -> train.TrainState:
    """Return the state with each number negated, and each count one higher."""
    return jax.tree.map(lambda x: -x if x.dtype == np.float32 else x + 1, state)


def measure_copy(pool: futures.Executor, state: train.TrainState) -> float:
    """Return the seconds of a copy by the threads of a pool."""
    began = time.perf_counter()
    copies = list(pool.map(np.array, jax.tree.leaves(state)))
    seconds = time.perf_counter() - began
    assert len(copies) == len(jax.tree.leaves(state))
    return seconds


def measure_restore(contender: type[Contender], size: str, folder: str) -> float:
    """Return the seconds of restoring, after comparing all arrays with the saved ones."""
    spec = spec_of(size)
    saves = contender(spec, Path(folder))
    began = time.perf_counter()
    state = jax.block_until_ready(saves.restore(1 + NUM_UPDATES))
    seconds = time.perf_counter() - began

    def differs(found: jax.Array, first: np.ndarray) -> bool:
        saved = -first if first.dtype == np.float32 else first + NUM_UPDATES
        return not np.array_equal(found, saved)

    wrong = jax.tree.map(differs, state, random_state(spec))
    assert not any(jax.tree.leaves(wrong)), f'{contender.__name__}: restored arrays differ'
    return seconds


def measure_disk(num_bytes: int, folder: str) -> Disk:
    """Write, sync and read one file of so many bytes."""
    block = np.random.default_rng(0).bytes(BLOCK_BYTES)
    path = Path(folder, 'file')
    os.sync()
    began = time.perf_counter()
    with path.open('wb', buffering=0) as file:
        for _ in range(0, num_bytes, BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
    write_seconds = time.perf_counter() - began
    drop_from_cache(folder)
    buffer = bytearray(BLOCK_BYTES)
    began = time.perf_counter()
    with path.open('rb', buffering=0) as file:
        while file.readinto(buffer):
            pass
    return Disk(write_seconds, time.perf_counter() - began)


def drop_from_cache(folder: str) -> None:
    """Write the files of a folder to the disk and drop them from the page cache."""
    for path in Path(folder).rglob('*'):
        if path.is_file():
            with path.open('rb') as file:
                os.fsync(file.fileno())  # the cache keeps what is not on the disk yet
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def spec_of(size: str) -> train.StepSpec:
    """Return the spec whose states are saved."""
    name, changes = SIZES[size]
    config = t5_1_1.get_config(name)
    config.model.update(changes)
    return make_spec(config, devices=jax.devices()[:1])


def num_bytes(size: str) -> int:
    """Return the bytes of a state."""
    return memory.num_state_bytes(spec_of(size).shapes)


def num_arrays(size: str) -> int:
    """Return the number of arrays of a state."""
    return len(jax.tree.leaves(spec_of(size).shapes))


if __name__ == '__main__':
    process.restart()
    app.run(main)
