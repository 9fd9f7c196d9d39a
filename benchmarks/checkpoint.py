"""Our checkpoints against Orbax's and against plain files: saving, restoring, and how long training waits.

    pip install orbax-checkpoint
    python benchmarks/checkpoint.py [--size=base] [--rounds=3]

The state is a TrainState of T5 1.1 with Adafactor, float32; base has 1 GB. The contenders take turns,
each in new processes on one CPU device:

    ours     checkpoint.Saver as train.py calls it, and prepare.py restores
    orbax    CheckpointManager with its default options, StandardSave and StandardRestore
    plain    the limit: a file per array, written from as many threads as ours and synced, then their
             folder

If main.py restarts itself with huge pages (modes/process.py), so do all contenders.

Saving: each process saves four times, without counting the first. `call` is the time until save returns:
the fastest of three, since a copy into fresh pages takes two to four times as long as a copy into freed
memory, and chance decides which. It follows an update that is donated the state (-x for every array).
`next step` is the additional time of an update after the call: a contender that does not copy makes the
step copy, and threads that write compete with it. `saved` is the time from the call until wait returns;
all three have then synced their files.

Restoring: from the folder to a TrainState on the device, once after dropping the files from the page
cache (`cold`, by posix_fadvise; the host of a virtual machine may still have them) and once more in
another process (`warm`). Every array must equal the saved one, bit for bit.

Prints a row per contender: the seconds, medians of the rounds and their range, and how many times as
fast ours saves and restores. Without Orbax, the others are measured. The temporary folder (TMPDIR) needs
room for four checkpoints, the memory for the state and at least one copy of it.

The goal: saved at least 1.5 times as fast as Orbax, restored 2.3 times, and training blocked for at
most one copy of the state and 20 ms.
"""

import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent import futures
from pathlib import Path
from typing import NamedTuple, Protocol

# Before the folder of this file, so that `import checkpoint` imports the measured module.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import numpy as np
import turns
from absl import app, flags

import checkpoint
import partition
import prepare
import train
from configs import t5_1_1
from modes import process
from prepare import make_spec
from run import memory

TINY = dict(emb_dim=64, vocab_size=1024, num_encoder_layers=1, num_decoder_layers=1)
NUM_SAVES = 3  # measured, after a first one; an odd number
NUM_UPDATES = 3 * NUM_SAVES  # before the last save, which is restored

FLAGS = flags.FLAGS
flags.DEFINE_string('size', 'base', 'A size of T5 1.1, or tiny for a first try.')
flags.DEFINE_integer('rounds', 3, 'How often each contender is measured.', lower_bound=1)


class Contender(Protocol):
    """Checkpoints of a spec's states in a folder."""

    def __init__(self, spec: train.StepSpec, folder: Path) -> None: ...

    def save(self, step: int, state: train.TrainState) -> None:
        """Start saving. The caller may donate the state when this returns."""
        ...

    def wait(self) -> None:
        """Wait until the last save is finished."""
        ...

    def restore(self, step: int) -> train.TrainState: ...


class Saved(NamedTuple):
    """The seconds of a save of one process."""

    call: float  # until save returned
    next_step: float  # additional time of an update after the call
    finished: float  # from the call until wait returned


class Measurement(NamedTuple):
    """The seconds of one contender in one round."""

    saved: Saved
    cold: float
    warm: float


def main(argv: list[str]) -> None:
    contenders: dict[str, type[Contender]] = {'ours': Ours, 'orbax': Orbax, 'plain': Plain}
    if turns.print_conditions('jax', 'tensorstore', 'orbax-checkpoint'):
        del contenders['orbax']
    spec = spec_of(FLAGS.size)
    gigabytes = memory.num_state_bytes(spec.state_shapes) / 1e9
    print(f'{FLAGS.size}: {len(jax.tree.leaves(spec.state_shapes))} arrays, {gigabytes:.3f} GB')
    measures = {name: functools.partial(measure, x) for name, x in contenders.items()}
    measurements = turns.take_turns(measures, FLAGS.rounds, FLAGS.size)
    ours = measurements['ours']
    turns.print_header(
        *('', 'saved', 'ours is', 'call', 'next step', 'cold', 'ours is', 'warm', 'ours is')
    )
    for name, rounds in measurements.items():
        cells = [
            *cells_of([x.saved.finished for x in rounds], [x.saved.finished for x in ours]),
            f'{statistics.median(x.saved.call for x in rounds):.3f}',
            f'{statistics.median(x.saved.next_step for x in rounds):+.3f}',
            *cells_of([x.cold for x in rounds], [x.cold for x in ours]),
            *cells_of([x.warm for x in rounds], [x.warm for x in ours]),
        ]
        turns.print_row(name, *cells)


def cells_of(seconds: Sequence[float], ours: Sequence[float]) -> tuple[str, str]:
    """Return the seconds, and how many times as fast ours is."""
    ratio = statistics.median(seconds) / statistics.median(ours)
    return turns.spread(seconds), f'{ratio:.2f} x'


# The contenders.


class Ours:
    def __init__(self, spec: train.StepSpec, folder: Path) -> None:
        self.spec = spec
        _ = spec.state_specs  # traced here, as for the others
        self.saver = checkpoint.Saver(folder)

    def save(self, step: int, state: train.TrainState) -> None:
        self.saver.save(step, train.saved_tree(self.spec, state))

    def wait(self) -> None:
        self.saver.wait()

    def restore(self, step: int) -> train.TrainState:
        index = checkpoint.read_index(self.saver.workdir / f'checkpoint_{step}')
        return prepare.restore(self.spec, index)


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


def measure(contender: type[Contender], size: str) -> Measurement:
    """Save in one process, and restore in two others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = turns.in_new_process(measure_save, contender, size, folder)
        drop_from_cache(folder)
        cold = turns.in_new_process(measure_restore, contender, size, folder)
        warm = turns.in_new_process(measure_restore, contender, size, folder)
    return Measurement(seconds, cold, warm)


def measure_save(contender: type[Contender], size: str, folder: Path) -> Saved:
    """Measure the saves of a process after its first."""
    spec = spec_of(size)
    saves = contender(spec, folder)
    shardings = partition.shardings(spec.mesh, spec.state_specs)
    advance = jax.jit(update, donate_argnums=0)
    state = jax.device_put(random_state(spec), shardings)
    saves.save(1, state)
    saves.wait()
    state = jax.block_until_ready(advance(state))  # compiles
    os.sync()
    calls = []
    next_steps = []
    finished = []
    for i in range(NUM_SAVES):
        state = jax.block_until_ready(advance(state))
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
    return Saved(min(calls), statistics.median(next_steps), statistics.median(finished))


def random_state(spec: train.StepSpec) -> train.TrainState:
    """Return a state of random numbers, which hardly compress. All counts are 1."""
    rng = np.random.default_rng(0)

    def random(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if x.dtype == np.float32:
            return rng.standard_normal(x.shape, np.float32)
        return np.ones(x.shape, x.dtype)

    return jax.tree.map(random, spec.state_shapes)


def update(state: train.TrainState) -> train.TrainState:
    """Return the state with each number negated, and each count one higher."""
    return jax.tree.map(lambda x: -x if x.dtype == np.float32 else x + 1, state)


def measure_restore(contender: type[Contender], size: str, folder: Path) -> float:
    """Return the seconds of restoring, after comparing all arrays with the saved ones."""
    spec = spec_of(size)
    saves = contender(spec, folder)
    began = time.perf_counter()
    state = jax.block_until_ready(saves.restore(1 + NUM_UPDATES))
    seconds = time.perf_counter() - began

    def differs(restored: jax.Array, first: np.ndarray) -> bool:
        last = -first if first.dtype == np.float32 else first + NUM_UPDATES
        return not np.array_equal(restored, last)

    wrong = jax.tree.map(differs, state, random_state(spec))
    assert not any(jax.tree.leaves(wrong)), f'{contender.__name__}: restored arrays differ'
    return seconds


def drop_from_cache(folder: Path) -> None:
    """Write the files of a folder to the disk and drop them from the page cache."""
    for path in folder.rglob('*'):
        if path.is_file():
            with path.open('rb') as file:
                os.fsync(file.fileno())  # the cache keeps pages until they are on the disk
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def spec_of(size: str) -> train.StepSpec:
    """Return the spec whose states are saved."""
    config = t5_1_1.get_config('small' if size == 'tiny' else size)
    if size == 'tiny':
        config.model.update(TINY)
    return make_spec(config, devices=jax.devices()[:1])


if __name__ == '__main__':
    process.restart()
    app.run(main)
