"""`--mode=plan`: compile the step of a config for local or absent devices.

It prints whether the step fits, its FLOPs and its communication. libtpu compiles for a slice of
TPUs on any machine; a CPU stands in for many devices.
"""

import collections
import re
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl.flags import FlagValues
from jax.sharding import Mesh
from ml_collections import ConfigDict

import kernels
import train
from family import t5_flops
from messages import Refused
from modes import command_line, process
from modes.collectives import Collective, collectives_of, executed
from modes.of_checkpoint import with_restored_sizes
from modes.topology import CHIPS, Chip, devices_of
from prepare import fit_step, make_spec
from run import memory
from run.console import Console


def main(config: ConfigDict, flags: FlagValues, signals: process.Signals) -> int:
    # First, because opening a checkpoint starts JAX.
    devices = devices_of(flags.topology)
    config, line = with_restored_sizes(config, command_line.changes())
    if line:
        Console().line(line)
    spec = make_spec(config, devices=devices)
    if flags.topology and spec.mesh.size < len(devices):
        raise Refused(
            f'--topology={flags.topology} has {len(devices)} devices, and the mesh {spec.mesh.size}: set mesh.data=-1'
        )
    signals.begin_work()
    process.print_lines(lines_of(config, spec), sys.stdout)
    return 0


def lines_of(config: ConfigDict, spec: train.StepSpec) -> Iterator[str]:
    """Yield the lines of a plan. Iterating compiles, and raises Refused if the step does not fit."""
    mesh = spec.mesh
    lengths = config.data.lengths
    num_parameters = sum(x.size for x in spec.state_shapes.params.values())
    yield (
        f'T5 with {num_parameters:,} parameters in {config.model.dtype} on {mesh.size:,} devices '
        f'({mesh.devices.flat[0].device_kind}), mesh {dict(mesh.shape)}'
    )
    yield (f'Batch: {spec.batch_size:,} rows of {lengths.inputs:,} + {lengths.targets:,} tokens')
    began = time.monotonic()
    try:
        memory.check_state_fits(mesh, spec.state_shapes, spec.state_specs)
        with Console().working('Compiling'):
            step, num_microbatches, _ = fit_step(config, spec)
    except Refused:
        yield 'Fits: NO'
        raise
    assert step is not None
    yield f'Compiled in {time.monotonic() - began:.0f} s'

    # Its memory, by use.
    shapes = spec.state_shapes
    need = memory.step_bytes(step, mesh, memory.num_state_bytes(shapes)) / memory.GIB
    limit = memory.memory_limit(mesh) / memory.GIB
    whose = 'each device'
    if kernels.is_on_cpu(mesh.abstract_mesh):
        whose = f'this machine, with {mesh.size} devices and a copy that is being saved'
    yield (
        f'Fits: yes, in {num_microbatches} microbatch(es): {need:.2f} of {limit:.2f} GiB of {whose}'
    )
    parameters = memory.bytes_on_device(mesh, shapes.params, spec.state_specs.params)
    optimizer = memory.bytes_on_device(mesh, shapes.opt_state, spec.state_specs.opt_state)
    total = memory.program_bytes(step)
    yield (
        f'Memory of a device: {total / memory.GIB:.2f} GiB at the peak: parameters {parameters / memory.GIB:.2f}, '
        f'optimizer {optimizer / memory.GIB:.2f}, activations, gradients and the batch '
        f'{(total - parameters - optimizer) / memory.GIB:.2f}'
    )

    # Its FLOPs and traffic.
    flops = flops_of_step(spec)
    whose = "T5's" if spec.model_config.family.flops is t5_flops else "the model's"
    yield f'FLOPs of a step by {whose} formula: {flops:.4g}'
    try:
        program = step.as_text() or ''
    except jax.errors.JaxRuntimeError as error:  # seen with large programs
        yield f'Collectives, estimate: not known, XLA does not print this program: {error}'
        return
    collectives = collectives_of(program, mesh)
    yield 'Collectives of a step on each device, in MB of whole arrays:'
    yield f'  {"kind":18} {"axes":12} {"arrays":>7} {"MB":>11}  asynchronous'
    totals: dict[tuple, np.ndarray] = collections.defaultdict(lambda: np.zeros(3, np.int64))
    for x in collectives:
        moved = x.times * x.num_bytes
        totals[x.kind, x.axes] += [x.times, moved, moved * x.is_async]
    for (kind, axes), (times, moved, hidden) in sorted(totals.items(), key=lambda x: -x[1][1]):
        yield (
            f'  {kind:18} {", ".join(axes):12} {times:7,} {moved / 1e6:11,.2f}  {hidden / moved:.0%}'
        )
    if mesh.devices.flat[0].device_kind in CHIPS:
        yield line_of_estimate(program, collectives, flops, mesh)


def flops_of_step(spec: train.StepSpec) -> float:
    """Return the FLOPs of a step: three times the matrix products of the forward pass.

    Without recomputation, lookups and the optimizer; causal attention counts in full.
    """
    c = spec.model_config
    S, _ = spec.features['encoder_input_tokens']
    T, _ = spec.features['decoder_target_tokens']
    return 3 * spec.batch_size * c.family.flops(c, S, T)


def line_of_estimate(
    program: str, collectives: Sequence[Collective], flops: float, mesh: Mesh
) -> str:
    """Return an estimate of the time of a step on TPUs, and its assumptions."""
    chip = CHIPS[mesh.devices.flat[0].device_kind]
    cycles = 0
    for instruction, _, times in executed(program):
        for number in re.findall(r'"estimated_cycles":"(\d+)"', instruction.text):
            cycles += times * int(number)
    computing = cycles / chip.clock
    exposed = sum(x.times * seconds_of(x, mesh, chip) for x in collectives if not x.is_async)
    overlapped = sum(x.times * seconds_of(x, mesh, chip) for x in collectives if x.is_async)
    seconds = exposed + max(computing, overlapped)
    mfu = flops / (seconds * chip.flops * mesh.size)
    return (
        f'Estimate: {seconds:.3g} s a step, MFU {mfu:.2f}. It assumes {computing:.3g} s of computing, '
        f"XLA's own count of cycles at {chip.clock / 1e9} GHz; {exposed:.3g} s of exposed collectives "
        f'and {overlapped:.3g} s of asynchronous ones, hidden for as long as computing lasts, at '
        f'{chip.link / 1e9:.0f} GB/s along a ring of the torus and half of that along a line; '
        f'a peak of {chip.flops / 1e12:.0f} TFLOP/s; no wait for data'
    )


def seconds_of(collective: Collective, mesh: Mesh, chip: Chip) -> float:
    """Return the seconds that a collective takes at the full speed of all links along its axes.

    A collective along no axis ('others') takes the links along all of them.
    """
    axes = mesh.axis_names if collective.axes == ('others',) else collective.axes
    index = tuple(slice(None) if axis in axes else 0 for axis in mesh.axis_names)
    devices = mesh.devices[index].flatten()
    speed = 0.0
    for places in np.array([device.coords for device in devices]).T:
        size = len(set(places))
        if size > 1:
            speed += chip.link if size % chip.ring == 0 else chip.link / 2
    passes = 2 if collective.kind == 'all-reduce' else 1
    return passes * collective.num_bytes * (1 - 1 / devices.size) / speed
