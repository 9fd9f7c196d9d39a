"""How time and memory of a train step grow with batch, length, depth and vocabulary.

    python benchmarks/scaling.py [--steps=3] [--axes=batch,length,...] [--points=7] [--svg=FILE]

The model is T5 1.1 with half the width of small: embeddings 256, 4 heads of 64, MLP 512, 2 + 2 layers,
8,192 ids, dropout 0.1, Adafactor, float32; a batch of 4 rows of 512 inputs and 128 targets. One of these
is doubled from point to point, the others stay:

    batch         2 to 32 rows
    length        128 to 8,192 inputs, and a quarter of them targets; 1 row
    no attention  the same lengths without attention's weights (no_attention.py): queries read a mean
    depth         1 to 8 layers in the encoder and as many in the decoder
    vocabulary    8,192 to 131,072 ids
    local         2,048 to 16,384 inputs of LongT5 with local attention, and 128 targets; 1 row
    global        the same with transient global tokens, one for each 16 inputs

Each point runs in a new process on one CPU device: the step is compiled, two steps are not counted, then
`steps` are. Prints a line per point: seconds of a step, their median and range; the bytes of the
compiled step as --mode=plan counts them (run/memory.py), state included; the largest memory of the process;
and the seconds of compiling. Then the exponents of each axis: the slopes of the logarithms
over the last two doublings, for local and global over all. Draws all of it to FILE. Where main.py
restarts itself with huge pages, so does this program.

The goal: no exponent above 1.05, or 1.1 of local, but those of length and global, which are at most 2: the
weights of attention have queries times keys, and 16 inputs more are a key more of each. What does not grow,
such as the parameters, makes exponents smaller.
"""

import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

# Before the folder of this file, so that `import train` is what is measured.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ['JAX_PLATFORMS'] = 'cpu'

import chart
import figure
import jax
import numpy as np
from absl import app, flags

import partition
import train
from configs import t5_1_1
from modes import process
from prepare import make_spec
from run import memory

AXES = {  # {name: the value of its first point}
    'batch': 2,
    'length': 128,
    'no attention': 128,
    'depth': 1,
    'vocabulary': 8192,
    'local': 2048,
    'global': 2048,
}
NUM_POINTS = {
    'batch': 5,
    'length': 7,
    'no attention': 7,
    'depth': 4,
    'vocabulary': 5,
    'local': 4,
    'global': 4,
}
# The attention of LongT5's encoder.
LONG = {'local': 'local', 'global': 'transient_global'}
WARM_UP_STEPS = 2
TARGETS_SHARE = 4  # inputs for each target

FLAGS = flags.FLAGS
flags.DEFINE_integer('steps', 3, 'Steps of each point that are measured.', lower_bound=1)
flags.DEFINE_list('axes', list(AXES), f'Some of {", ".join(AXES)}.')
flags.DEFINE_integer('points', 7, 'Most points of an axis, from its first.', lower_bound=3)
flags.DEFINE_string('svg', 'scaling.svg', 'The figure.')
flags.register_validator(
    'axes', lambda axes: set(axes) <= AXES.keys(), f'use some of {", ".join(AXES)}'
)


class Point(NamedTuple):
    """What is measured for one value of an axis."""

    value: int
    seconds: list[float]  # per step
    step_bytes: float  # as compiled
    peak_bytes: int  # the process's
    compile_seconds: float


def main(argv: list[str]) -> None:
    print(
        f'jax {jax.__version__}; {len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}'
    )
    print_cells(['axis', 'value', 'seconds', 'min..max', 'step GB', 'process GB', 'compiling'])
    found: dict[str, list[Point]] = {}
    for axis in FLAGS.axes:
        found[axis] = []
        for i in range(min(FLAGS.points, NUM_POINTS[axis])):
            point = in_new_process(measure, axis, AXES[axis] * 2**i, FLAGS.steps)
            found[axis].append(point)
            cells = [
                axis,
                f'{point.value:,}',
                f'{statistics.median(point.seconds):.4g}',
                f'{min(point.seconds):.4g}..{max(point.seconds):.4g}',
                f'{point.step_bytes / 1e9:.3f}',
                f'{point.peak_bytes / 1e9:.2f}',
                f'{point.compile_seconds:.1f} s',
            ]
            print_cells(cells)
    print()
    print_cells(['axis', 'from', 'to', 'time', 'memory'])
    for axis, points in found.items():
        time_exponent = exponent(axis, points, seconds_of)
        memory_exponent = exponent(axis, points, gigabytes_of)
        cells = [
            axis,
            f'{points[-1 - num_doublings(axis, points)].value:,}',
            f'{points[-1].value:,}',
            f'{time_exponent:.2f}',
            f'{memory_exponent:.2f}',
        ]
        print_cells(cells)
    if {'local', 'global'} <= found.keys():
        for local, both in zip(found['local'], found['global'], strict=True):
            share = 1 - seconds_of(local) / seconds_of(both)
            print(f'Global tokens take {share:.0%} of a step on {local.value:,} inputs.')
    Path(FLAGS.svg).write_text(draw(found))
    print(f'The figure is in {FLAGS.svg}.')


def in_new_process(function: Callable, *arguments: Any) -> Any:
    with futures.ProcessPoolExecutor(1, get_context('spawn')) as pool:
        return pool.submit(function, *arguments).result()


def print_cells(cells: Sequence[str]) -> None:
    padded = [cells[0].ljust(12)] + [cell.rjust(14) for cell in cells[1:]]
    print(' '.join(padded), flush=True)


def seconds_of(point: Point) -> float:
    return statistics.median(point.seconds)


def gigabytes_of(point: Point) -> float:
    return point.step_bytes / 1e9


def num_doublings(axis: str, points: Sequence[Point]) -> int:
    """Return the doublings, the last of an axis, that its exponent is measured over."""
    return len(points) - 1 if axis in LONG else 2


def exponent(axis: str, points: Sequence[Point], quantity: Callable[[Point], float]) -> float:
    """Return the slope of the logarithms over the last doublings of an axis."""
    doublings = num_doublings(axis, points)
    return math.log2(quantity(points[-1]) / quantity(points[-1 - doublings])) / doublings


# Measuring.


def config_of(axis: str, value: int) -> Any:
    """Return the config of a point."""
    config = t5_1_1.get_config('small')
    config.model.update(
        emb_dim=256,
        num_heads=4,
        mlp_dim=512,
        num_encoder_layers=2,
        num_decoder_layers=2,
        vocab_size=8192,
        dropout_rate=0.1,
        dtype='float32',
    )
    config.train.batch_size = 4
    config.data.lengths.update(inputs=512, targets=512 // TARGETS_SHARE)
    if axis == 'batch':
        config.train.batch_size = value
    elif axis in ('length', 'no attention'):
        config.train.batch_size = 1
        config.data.lengths.update(inputs=value, targets=value // TARGETS_SHARE)
    elif axis in LONG:
        config.train.batch_size = 1
        config.data.lengths.inputs = value
        config.model.module = 'long_t5'
        config.model.options.update(encoder_attention=LONG[axis])
    elif axis == 'depth':
        config.model.update(num_encoder_layers=value, num_decoder_layers=value)
    else:
        config.model.vocab_size = value
    if axis == 'no attention':
        config.model.module = str(Path(__file__).with_name('no_attention.py'))
    return config


def measure(axis: str, value: int, num_steps: int) -> Point:
    """Take some steps of a point on random ids."""
    config = config_of(axis, value)
    spec = make_spec(config, devices=jax.devices()[:1])
    began = time.perf_counter()
    train_step = train.compile_step(spec)
    compile_seconds = time.perf_counter() - began
    rng = np.random.default_rng(0)
    batch = {}
    for name, length in spec.feature_lengths.items():
        shape = (spec.batch_size, length)
        batch[name] = np.ones(shape, np.int32)  # one segment
        if name.endswith('tokens'):
            batch[name] = rng.integers(2, config.model.vocab_size, shape, np.int32)
        if name.endswith('positions'):
            batch[name] = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    on_device = partition.place_rows(spec.mesh, batch)
    state = train.compile_init(spec)()
    seconds = []
    for _ in range(WARM_UP_STEPS + num_steps):
        began = time.perf_counter()
        state, metrics = jax.block_until_ready(train_step(state, on_device))
        seconds.append(time.perf_counter() - began)
    assert metrics['finite']
    return Point(
        value=value,
        seconds=seconds[WARM_UP_STEPS:],
        step_bytes=memory.step_bytes(train_step, spec.mesh, 0),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        compile_seconds=compile_seconds,
    )


# The figure.


def draw(found: Mapping[str, Sequence[Point]]) -> str:
    """Return an SVG: time to the left and memory to the right, a row for each axis."""
    rows = []
    for axis in found:
        if axis == 'no attention' and 'length' in found:
            continue
        row = []
        for column, quantity in enumerate((seconds_of, gigabytes_of)):
            curves = [make_curve(axis, found[axis], quantity, 'first')]
            title = f'{"GB" if column else "seconds"} of a step, by {axis}'
            if axis == 'length' and 'no attention' in found:
                without = found['no attention']
                curves.append(make_curve('no attention', without, quantity, 'second'))
            drawing = chart.draw(curves, is_logarithmic=True)
            row.append(figure.Panel(title, drawing))
        rows.append(row)
    return figure.svg(rows)


def make_curve(
    axis: str, points: Sequence[Point], quantity: Callable[[Point], float], css_class: str
) -> chart.Curve:
    """Return a curve whose name ends with its exponent."""
    name = f'{axis} {exponent(axis, points, quantity):.2f}'
    return chart.Curve(name, css_class, [chart.Point(x.value, quantity(x)) for x in points])


if __name__ == '__main__':
    process.restart()
    app.run(main)
