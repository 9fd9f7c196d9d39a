"""The bytes and FLOPs of a train step on a GPU, counted in its compiled program; no GPU is needed.

    pip install -e '.[cuda]'
    python benchmarks/bytes.py [--topology=h200:1] [--sizes=small,base,large] [--layers=2] [--pack=no] [--text=FILE]

Compiles T5 1.1 in bfloat16 for rows of 512 inputs and 114 targets, with dropout 0.1. A kernel reads its operands, or
slices of them, once, and writes its results. Workspaces are not counted, including the one in which cuDNN sums the
bias's gradient, [b, h, T, M]. A kernel takes as long as its bytes at the memory's bandwidth or its FLOPs at PEAKS: the
roofline. An H200 took 1.24 times as long. --text keeps the last program.
"""

import collections
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Before the folder of this file, so that `import train` imports the measured module.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from absl import app, flags

import train
from configs import t5_1_1
from modes import topology
from modes.collectives import Computation, Instruction, called, executed, numbers, parse, size_of
from prepare import make_spec

BATCH_SIZE = 256
PEAKS = {'bf16': 750e12, 'f32': 375e12}  # FLOP/s of products on Hopper; float32 as TF32
FREE = ('parameter', 'constant', 'bitcast', 'tuple', 'get-tuple-element', 'while', 'call')
UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}  # index of the operand written in place
# A kernel's kind has the first pattern that matches its operation. Products and copies in layers are other kinds.
KINDS = {
    'optimizer': r'^(?!.*/while/body/)',
    'logits and loss': r'/logits_dense/|/body/closed_call/(?!.*coder)',
    'attention': r'/attend/|attention_weights',
    'gelu and gate': r'/mlp/',
    'norms and residuals': r'',
}

FLAGS = flags.FLAGS
flags.DEFINE_string('topology', 'h200:1', 'h100:N or h200:N.')
flags.DEFINE_list('sizes', ['base'], 'Sizes of T5 1.1.')
flags.DEFINE_integer('layers', 0, 'Layers of each stack; 0: as many as the size has.')
flags.DEFINE_string('pack', 'tightly', 'data.pack.')
flags.DEFINE_string('text', '/dev/null', 'File for the compiled program.')


def kernels_of(text: str, bandwidth: float) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (kind, [runs, GB, TFLOP, ms] of a step) of the kernels of an optimized program for a GPU."""
    computations, _ = parse(text)
    for x, computation, times in executed(text):
        if x.opcode in FREE:
            continue
        num_bytes = bytes_written(x, computations)
        for i, name in enumerate(x.operands):
            num_bytes += bytes_read(x, i, computation[name].type, computations)
        flops = flops_of(x, computation)
        peak = PEAKS.get(re.findall(r'\w+', x.type)[0], 1.0)
        seconds = max(num_bytes / bandwidth, flops / peak)
        yield kind_of(x), times * np.array([1, num_bytes / 1e9, flops / 1e12, seconds * 1e3])


def kind_of(x: Instruction) -> str:
    name = re.search(r'op_name="([^"]*)"', x.text)
    kind = next(k for k, pattern in KINDS.items() if re.search(pattern, name[1] if name else ''))
    if '__cublas' in x.text and kind not in ('attention', 'logits and loss'):
        return 'products'
    return 'copies' if re.search(r'transpose|copy|concatenate|pad_', x.name) else kind


def bytes_written(x: Instruction, computations: dict[str, Computation]) -> int:
    body = computations[called(x, 'calls')] if x.opcode == 'fusion' else {}
    for y in body.values():
        if y.opcode in UPDATES and size_of(y.type) == size_of(x.type):
            return size_of(body[y.operands[UPDATES[y.opcode]]].type)
    return size_of(re.sub(r', [su]8\[\d+\]\{0\}\)', '', x.type))  # without a workspace


def bytes_read(x: Instruction, i: int, type: str, computations: dict[str, Computation]) -> int:
    if x.opcode != 'fusion':
        return size_of(type)
    names = set()
    total = 0
    for y in computations[called(x, 'calls')].values():
        if y.opcode == 'parameter' and y.text.startswith(f'{i})'):
            names.add(y.name)
        elif names.isdisjoint(y.operands):
            continue
        elif y.opcode == 'bitcast':
            names.add(y.name)
        elif y.opcode in ('slice', 'dynamic-slice', 'gather'):
            total += size_of(y.type)
        elif y.opcode not in UPDATES or y.operands[0] not in names:
            return size_of(type)
    return total


def flops_of(x: Instruction, computation: Computation) -> float:
    shapes = [numbers(computation[name].type.partition(']')[0])[1:] for name in x.operands]
    if '"__cudnn$fmha' in x.text:  # arrays are [b, T, h, K]
        return (10.0 if 'Backward' in x.text else 4.0) * math.prod(shapes[0]) * shapes[1][1]
    if '"__cublas' not in x.text:
        return 0.0
    contracting = re.findall(r'"lhs_contracting_dimensions":\[([^]]*)\]', x.text)[0]
    result = numbers(x.type.partition(']')[0])[1:]  # after the bits of the dtype
    return 2.0 * math.prod(result) * math.prod(shapes[0][k] for k in numbers(contracting))


def compile_step(size: str) -> jax.stages.Compiled:
    config = t5_1_1.get_config(size)
    config.model.update(dtype='bfloat16', dropout_rate=0.1)
    if FLAGS.layers:
        config.model.update(num_encoder_layers=FLAGS.layers, num_decoder_layers=FLAGS.layers)
    config.train.batch_size = BATCH_SIZE
    config.data.lengths.update(inputs=512, targets=114)
    config.data.pack = FLAGS.pack
    return train.compile_step(make_spec(config, devices=topology.devices_of(FLAGS.topology)))


def main(argv: list[str]) -> None:
    jax.config.update('jax_threefry_gpu_kernel_lowering', True)  # as main.py does
    bandwidth = topology.GPUS[FLAGS.topology.partition(':')[0]][2]
    print('| kernels of a step | runs | GB | TFLOP | ms |\n|---|---|---|---|---|')
    for size in FLAGS.sizes:
        began = time.process_time()
        step = compile_step(size)
        cpu_seconds = time.process_time() - began
        Path(FLAGS.text).write_text(step.as_text() or '')
        rows: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(4))
        for kind, costs in kernels_of(step.as_text() or '', bandwidth):
            rows[kind] += costs
            rows[size] += costs
        speed = BATCH_SIZE / rows[size][3] * 1e3
        for kind, row in sorted(rows.items(), key=lambda x: x[1][1]):  # the step is the last
            print(f'| {kind} | {row[0]:,.0f} | {row[1]:,.1f} | {row[2]:,.1f} | {row[3]:,.1f} |')
        memory = step.memory_analysis().temp_size_in_bytes / 1e9
        print(
            f'{size}: {memory:.1f} GB of temporary memory, compiled in {cpu_seconds:.0f} CPU s; {speed:,.0f} rows/s'
        )


if __name__ == '__main__':
    app.run(main)
