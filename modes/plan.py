"""`--mode=plan`: compile the steps of a config for devices that need not be here.

It says whether a step fits, what it computes and what it sends, and the smallest change that makes
it fit. libtpu compiles for a slice of TPUs on any machine; a CPU stands in for many devices.
"""

import collections
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl.flags import FlagValues
from jax.sharding import Mesh
from ml_collections import ConfigDict

import kernels
import model
import partition
import train
from configs.base import Value
from messages import Refused
from modes import command_line, plan_decoding, process
from modes.collectives import Collective, collectives_of, executed
from modes.of_checkpoint import with_restored_sizes
from modes.topology import CHIPS, SLICES, Chip, devices_of, keep_jax_on_cpu
from prepare import fit_step, make_spec
from run import memory
from run.console import Console

Traffic = dict[tuple[str, tuple[str, ...]], float]  # {(kind, axes): bytes of a step on each device}


def main(config: ConfigDict, flags: FlagValues, signals: process.Signals) -> int:
    # Before a checkpoint is opened, which starts JAX.
    if flags.topology == 'all':
        keep_jax_on_cpu()
    else:
        devices = devices_of(flags.topology)
    config, line = with_restored_sizes(config, command_line.changes())
    if line:
        Console().line(line)
    if flags.topology == 'all':
        lines = table(config)
    else:
        lines = lines_of(config, spec_of(config, flags.topology, devices), devices)
    signals.begin_work()
    process.print_lines(lines, sys.stdout)
    return 0


def spec_of(config: ConfigDict, topology: str, devices: list) -> train.StepSpec:
    """Return the spec of a config on all the devices that --topology names."""
    spec = make_spec(config, devices=devices)
    if topology and spec.mesh.size < len(devices):
        raise Refused(
            f'--topology={topology} has {len(devices)} devices, and the mesh {spec.mesh.size}: set mesh.data=-1'
        )
    return spec


def lines_of(config: ConfigDict, spec: train.StepSpec, devices: list) -> Iterator[str]:
    """Yield the lines of a plan. Drawing them compiles, and raises Refused if a step does not fit."""
    mesh = spec.mesh
    kind = mesh.devices.flat[0].device_kind
    lengths = spec.feature_lengths
    num_parameters = sum(x.size for x in spec.state_shapes.params.values())
    yield (
        f'T5 with {num_parameters:,} parameters in {config.model.dtype} on {mesh.size:,} devices '
        f'({kind}), mesh {dict(mesh.shape)}'
    )
    yield (
        f'Batch: {spec.batch_size:,} rows of {lengths["encoder_input_tokens"]:,} + '
        f'{lengths["decoder_target_tokens"]:,} tokens'
    )
    began = time.monotonic()
    try:
        step, num_microbatches = fit(config, spec)
    except Refused as error:
        yield 'Fits: NO'
        raise Refused(f'{error}{smallest_change(config, spec, devices)}') from error
    yield f'Compiled in {time.monotonic() - began:.0f} s'

    # What it needs of the memory, and what for.
    state_bytes = memory.num_state_bytes(spec.state_shapes)
    need = memory.step_bytes(step, mesh, state_bytes) / memory.GIB
    limit = memory.memory_limit(mesh) / memory.GIB
    whose = 'each device'
    if kernels.is_on_cpu(mesh.abstract_mesh):
        whose = f'this machine, with {mesh.size} devices and a copy that is being saved'
    yield (
        f'Fits: yes, in {num_microbatches} microbatch(es): {need:.2f} of {limit:.2f} GiB of {whose}'
    )
    analysis = step.memory_analysis()
    assert analysis is not None
    shapes = spec.state_shapes
    parameters = memory.bytes_on_device(mesh, shapes.params, spec.state_specs.params)
    optimizer = memory.bytes_on_device(mesh, shapes.opt_state, spec.state_specs.opt_state)
    total = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    total += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    yield (
        f'Memory of a device: {total / memory.GIB:.2f} GiB at the peak: parameters {parameters / memory.GIB:.2f}, '
        f'optimizer {optimizer / memory.GIB:.2f}, activations, gradients and the batch '
        f'{(total - parameters - optimizer) / memory.GIB:.2f}'
    )

    # What it computes and sends.
    flops, formula = flops_of_step(spec)
    whose = "T5's" if spec.model_config.modules.flops is model.flops else "the model's"
    yield f'FLOPs of a step by {whose} formula: {flops:.4g} = {formula}'
    try:
        program = step.as_text() or ''
    except jax.errors.JaxRuntimeError as error:  # seen of large programs
        yield f'Collectives, estimate: not known, XLA does not print this program: {error}'
    else:
        found = collectives_of(program, mesh)
        least = least_traffic(spec)
        yield 'Collectives of a step on each device, in MB of whole arrays:'
        yield f'  {"kind":18} {"axes":12} {"arrays":>7} {"MB":>11} {"least":>11}  asynchronous'
        moved: Traffic = collections.defaultdict(float)
        hidden: Traffic = collections.defaultdict(float)
        times: Traffic = collections.defaultdict(float)
        for x in found:
            moved[x.kind, x.axes] += x.times * x.num_bytes
            hidden[x.kind, x.axes] += x.times * x.num_bytes * x.is_async
            times[x.kind, x.axes] += x.times
        for key in sorted(moved | least, key=lambda key: -moved[key]):
            part = hidden[key] / moved[key] if moved[key] else 0
            yield (
                f'  {key[0]:18} {", ".join(key[1]):12} {times[key]:7,.0f} {moved[key] / 1e6:11,.2f} '
                f'{least[key] / 1e6:11,.2f}  {part:.0%}'
            )
        if kind in CHIPS:
            chip = CHIPS[kind]
            estimated = estimate(program, found, flops, mesh)
            yield (
                f'Estimate: {estimated.step:.3g} s a step, MFU {estimated.mfu:.2f}. It assumes '
                f"{estimated.computing:.3g} s of computing, XLA's own count of cycles at {chip.clock / 1e9} GHz; "
                f'{estimated.alone:.3g} s of collectives that nothing hides and {estimated.beside:.3g} s of '
                f'asynchronous ones hidden as far as computing lasts, at {chip.link / 1e9:.0f} GB/s along a ring of '
                f'the torus and half of it along a line; a peak of {chip.flops / 1e12:.0f} TFLOP/s; no wait for data'
            )
    decoding = plan_decoding.plan_decoding(config, spec)
    yield from plan_decoding.lines_of(decoding, spec)
    try:
        plan_decoding.check_fits(decoding)
    except Refused as error:
        raise Refused(f'{error}{smallest_change(config, spec, devices)}') from error


def fit(config: ConfigDict, spec: train.StepSpec) -> tuple[jax.stages.Compiled, int]:
    """Return the step in as few microbatches as fit, and their number.

    Raises Refused where none fits, as a run does.
    """
    memory.check_state_fits(spec.mesh, spec.state_shapes, spec.state_specs)
    with Console().working('Compiling'):
        planned = fit_step(config, spec)
    assert planned.step is not None
    return planned.step, planned.num_microbatches


def smallest_change(config: ConfigDict, spec: train.StepSpec, devices: list) -> str:
    """Return the first of some changes of settings with which a step fits, which is compiled."""
    for changes in changes_to_try(config, spec.mesh):
        changed = config.copy_and_resolve_references()
        with changed.ignore_type():  # num_microbatches is a number or 'auto'
            changed.update_from_flattened_dict(changes)
        try:
            changed_spec = make_spec(changed, devices=devices)
            if config.infer_eval.every_steps:
                plan_decoding.check_fits(plan_decoding.plan_decoding(changed, changed_spec))
            _, num_microbatches = fit(changed, changed_spec)
        except Refused:
            continue
        flags = ' '.join(f'--config.{name}={value}' for name, value in changes.items())
        return f'. The smallest change that fits: {flags}, in {num_microbatches} microbatch(es)'
    return ''


def changes_to_try(config: ConfigDict, mesh: Mesh) -> Iterator[dict[str, Value]]:
    """Yield changes of settings that save memory, those that cost least first."""
    changes: dict[str, Value] = {}
    if config.train.num_microbatches != 'auto':
        changes = {'train.num_microbatches': 'auto'}
        yield changes
    levels = ('none', 'dots', 'full')
    for remat in levels[levels.index(config.model.remat) + 1 :]:
        changes = changes | {'model.remat': remat}
        yield changes
    for wide, others in (('data', ('fsdp', 'model')), ('fsdp', ('model',))):
        factor = 2
        while mesh.shape[wide] % factor == 0:
            for axis in others:
                sizes = dict(mesh.shape)
                sizes[wide] //= factor
                sizes[axis] *= factor
                yield changes | {f'mesh.{name}': size for name, size in sizes.items()}
            factor *= 2


def flops_of_step(spec: train.StepSpec) -> tuple[float, str]:
    """Return the FLOPs of a step, and their formula: T5's, unless the model has another.

    It counts the matrix products of the forward pass three times: no recomputing, no causal half,
    no lookups, no optimizer. An own model may have another number for the forward pass.
    """
    c = spec.model_config
    B = spec.batch_size
    S = spec.feature_lengths['encoder_input_tokens']
    T = spec.feature_lengths['decoder_target_tokens']
    formula = f'3B flops(config, S, T) of {c.module}, {B=}, {S=}, {T=}'
    if c.modules.flops is model.flops:
        d = c.emb_dim
        a = c.num_heads * c.head_dim
        f = c.mlp_dim
        V = c.vocab_size
        g = len(c.mlp_activations) + 1  # matrices of an MLP
        formula = (
            f'3B({c.num_encoder_layers}(2S(4da + {g}df) + 4SSa) + {c.num_decoder_layers}(2T(4da + {g}df) + 4TTa '
            f'+ 4Tda + 4Sda + 4TSa) + 2TdV), {B=}, {S=}, {T=}, {d=}, {a=}, {f=}, {V=}'
        )
    return 3 * B * c.modules.flops(c, S, T), formula


def least_traffic(spec: train.StepSpec) -> Traffic:
    """Return what the collectives of this layout must at least move, in bytes of whole arrays.

    Over 'model' the sums of heads, MLPs and vocabulary, forward and backward, in the dtype of the
    computation; over the others each gradient once, and each parameter that 'fsdp' splits gathered
    once. Experts on 'fsdp' stay there: tokens travel to them and back, forward and backward.
    """
    c = spec.model_config
    mesh = spec.mesh
    width = jnp.dtype(c.dtype).itemsize
    rows = spec.rows_per_device
    inputs = rows * spec.feature_lengths['encoder_input_tokens']
    targets = rows * spec.feature_lengths['decoder_target_tokens']
    found: Traffic = collections.defaultdict(float)
    # The embedding once, a layer's attentions and MLP forward and backward, the encoder's output
    # and the logits backward.
    sums_of_inputs = 1 + 4 * c.num_encoder_layers + 1
    sums_of_targets = 1 + 6 * c.num_decoder_layers + 1
    vectors = sums_of_inputs * inputs + sums_of_targets * targets
    # The loss: the largest logit, the sum, the target's logit; one more for the accuracy.
    found['all-reduce', ('model',)] = vectors * c.emb_dim * width + 4 * targets * 4
    for path, param_spec in spec.state_specs.params.items():
        own = memory.bytes_on_device(mesh, spec.state_shapes.params[path], param_spec)
        replicated = partition.replicated_batch_axes(param_spec)
        split = tuple(axis for axis in partition.BATCH_AXES if axis not in replicated)
        whole = own * partition.axes_size(mesh, split)
        if path in spec.trained:
            found['all-reduce', replicated] += own
        if re.fullmatch(c.modules.split_in_use(c), path):
            tokens = inputs if path.startswith('encoder/') else targets
            if path.endswith('/wo/kernel'):
                found['all-to-all', split] += 4 * tokens * c.emb_dim * width
            continue
        found['all-gather', split] += whole / 4 * width
        if path in spec.trained:
            found['reduce-scatter', split] += whole / 4 * jnp.dtype(spec.gradient_dtype).itemsize
    least: Traffic = collections.defaultdict(float)
    for (kind, axes), num_bytes in found.items():
        axes = tuple(axis for axis in axes if mesh.shape[axis] > 1)
        if axes:
            least[kind, axes] += num_bytes
    return least


class Estimate(NamedTuple):
    """The time of a step, in seconds."""

    step: float
    mfu: float
    computing: float
    alone: float  # collectives that nothing hides
    beside: float  # collectives that computing hides, as far as it lasts


def estimate(program: str, found: Sequence[Collective], flops: float, mesh: Mesh) -> Estimate:
    """Return an estimate of the time of a step on TPUs."""
    chip = CHIPS[mesh.devices.flat[0].device_kind]
    cycles = 0
    for instruction, _, times in executed(program):
        estimated = re.search(r'"estimated_cycles":"(\d+)"', instruction.text)
        cycles += times * int(estimated[1]) if estimated else 0
    computing = cycles / chip.clock
    moving = {False: 0.0, True: 0.0}
    for x in found:
        moving[x.is_async] += x.times * seconds_of(x, mesh, chip)
    seconds = moving[False] + max(computing, moving[True])
    mfu = flops / (seconds * chip.flops * mesh.size)
    return Estimate(seconds, mfu, computing, alone=moving[False], beside=moving[True])


def seconds_of(collective: Collective, mesh: Mesh, chip: Chip) -> float:
    """Return how long a collective takes at the full speed of all the links along its axes.

    One that lies along no axis ('others') takes the links along all of them.
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


def table(config: ConfigDict) -> Iterator[str]:
    """Yield a line for each of SLICES: whether the train step fits there, and what it takes.

    Drawing the last line raises Refused if it fits on none of them.
    """
    yield (
        f'{"slice":10} {"mesh":>9} {"microbatches":>12} {"GiB of limit":>15} {"exchanged GB":>12} '
        f'{"step s":>8} {"MFU":>5} {"CPU s":>6}'
    )
    num_fits = 0
    for topology in SLICES:
        began = time.process_time()
        try:
            spec = spec_of(config, topology, devices_of(topology))
        except Refused as error:
            yield f'{topology:10} not planned: {error}'
            continue
        mesh = spec.mesh
        sizes = 'x'.join(str(size) for size in mesh.shape.values())
        try:
            step, num_microbatches = fit(config, spec)
            program = step.as_text() or ''
        except (Refused, jax.errors.JaxRuntimeError) as error:
            answer = 'NO' if isinstance(error, Refused) else 'failed'
            text = ' '.join(str(error).split())  # XLA's has tens of lines
            yield f'{topology:10} {sizes:>9} {answer}: {text:.300}'
            continue
        num_fits += 1
        need = memory.step_bytes(step, mesh, memory.num_state_bytes(spec.state_shapes)) / memory.GIB
        limit = memory.memory_limit(mesh) / memory.GIB
        found = collectives_of(program, mesh)
        exchanged = sum(x.times * x.num_bytes for x in found) / 1e9
        seconds = mfu = '-'
        if mesh.devices.flat[0].device_kind in CHIPS:
            estimated = estimate(program, found, flops_of_step(spec)[0], mesh)
            seconds = f'{estimated.step:.3g}'
            mfu = f'{estimated.mfu:.2f}'
        memory_cell = f'{need:.2f} of {limit:.2f}'
        yield (
            f'{topology:10} {sizes:>9} {num_microbatches:12} {memory_cell:>15} {exchanged:12.3g} '
            f'{seconds:>8} {mfu:>5} {time.process_time() - began:6.0f}'
        )
    if not num_fits:
        raise Refused('--topology=all: it fits on none: plan one of them to see what does')
