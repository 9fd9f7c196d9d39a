"""How time and memory of a train step grow with batch, length, depth and vocabulary.

    python benchmarks/scaling.py [--axes=batch,length,...] [--steps=3]

The model is T5 1.1 with half the width of small: embeddings 256, 4 heads of 64, MLP 512, 2 + 2 layers,
8,192 ids, dropout 0.1, Adafactor, float32; a batch of 4 rows of 512 inputs and 128 targets. One of these
grows from a first to a last value, the others stay:

    batch       rows
    length      inputs, and a quarter of them targets; 1 row
    depth       layers in the encoder and as many in the decoder
    vocabulary  ids
    local       inputs of LongT5 with local attention, and 128 targets; 1 row
    global      the same with transient global tokens, one for each 16 inputs

Each value runs in a new process on one CPU device: the step is compiled, two steps are not counted, then
`steps` are. Prints a row per axis: the median seconds of a step; its bytes as --mode=plan counts them
(run/memory.py), state included; and the exponents of both, the slopes of their logarithms. If main.py
restarts itself with huge pages, so does this program.

The goal: no exponent above 1.05, or 1.1 for local, except at most 2 for length and global: attention has a
weight for each query and key, and each query gets one more key for every 16 inputs. Constant costs, such as
the parameters, make exponents smaller.
"""

import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

# Before the folder of this file, so that `import train` imports the measured module.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import numpy as np
import turns
from absl import app, flags

import partition
import train
from configs import t5_1_1
from modes import process
from prepare import make_spec
from run import memory

AXES = {  # {name: its first and last value}
    'batch': (8, 32),
    'length': (2048, 8192),
    'depth': (2, 8),
    'vocabulary': (32768, 131072),
    'local': (2048, 16384),
    'global': (2048, 16384),
}
# The attention of LongT5's encoder.
LONG = {'local': 'local', 'global': 'transient_global'}
WARM_UP_STEPS = 2
TARGETS_SHARE = 4  # inputs per target

FLAGS = flags.FLAGS
flags.DEFINE_list('axes', list(AXES), f'Some of {", ".join(AXES)}.')
flags.DEFINE_integer('steps', 3, 'Steps of each value that are measured.', lower_bound=1)


class Point(NamedTuple):
    """The figures for one value of an axis."""

    seconds: float  # median of a step
    gigabytes: float  # memory of the compiled step


def main(argv: list[str]) -> None:
    turns.print_conditions('jax')
    turns.print_header('axis', 'values', 'seconds', 'GB', 'exponent of time', 'of memory')
    for axis in FLAGS.axes:
        first, last = AXES[axis]
        low: Point = turns.in_new_process(measure, axis, first, FLAGS.steps)
        high: Point = turns.in_new_process(measure, axis, last, FLAGS.steps)
        doublings = math.log2(last / first)
        turns.print_row(
            axis,
            f'{first:,} → {last:,}',
            f'{low.seconds:.3g} → {high.seconds:.3g}',
            f'{low.gigabytes:.2f} → {high.gigabytes:.2f}',
            f'{math.log2(high.seconds / low.seconds) / doublings:.2f}',
            f'{math.log2(high.gigabytes / low.gigabytes) / doublings:.2f}',
        )


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
    elif axis == 'length':
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
    return config


def measure(axis: str, value: int, num_steps: int) -> Point:
    """Take some steps of a point on random ids."""
    config = config_of(axis, value)
    spec = make_spec(config, devices=jax.devices()[:1])
    train_step = train.compile_step(spec)
    rng = np.random.default_rng(0)
    batch = {}
    for name, (length, _) in spec.features.items():
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
        seconds=statistics.median(seconds[WARM_UP_STEPS:]),
        gigabytes=memory.step_bytes(train_step, spec.mesh, 0) / 1e9,
    )


if __name__ == '__main__':
    process.restart()
    app.run(main)
