"""Compiling a step ahead of time: whether it fits into memory, and in how many microbatches."""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import kernels
import partition
from messages import Refused
from run.agreement import from_processes

GIB = 2**30
# Bytes available to XLA by kind of device, to plan for absent devices. TPUs: as libtpu 0.0.42.1 reports
# when it refuses a program. GPUs: three quarters of the memory, JAX's default.
DEVICE_MEMORY = {
    'TPU v5 lite': 15.75 * GIB,
    'TPU v5': 95.74 * GIB,
    'TPU v6 lite': 31.25 * GIB,
    'NVIDIA H100 80GB HBM3': 0.75 * 84_942_979_072,
    'NVIDIA H200': 0.75 * 151_397_597_184,
}
MEMORY_FRACTION = 0.9  # a step's share; the rest is left to data, program and system


class Plan(NamedTuple):
    """The step to run."""

    step: jax.stages.Compiled | None  # None if the run is finished
    num_microbatches: int
    note: str  # why 'auto' splits the batch; '' if it does not


def microbatch_counts(requested: int | str, num_rows: int) -> list[int]:
    """Return the numbers of microbatches to try: `requested`, or for 'auto' all divisors of the rows, ascending.

    `num_rows`: the rows of a batch on one device.
    """
    counts = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
    if requested == 'auto':
        return counts
    if requested not in counts:
        raise Refused(f"train.num_microbatches={requested!r}: use 'auto' or one of {counts}")
    return [int(requested)]


def fit_step(
    compile_step: Callable[[int], jax.stages.Compiled],
    num_rows: int,
    requested: int | str,
    mesh: Mesh,
    state_bytes: int,
) -> Plan:
    """Compile the step with the fewest microbatches that fit into memory. `num_rows`: rows on a device.

    Raises Refused if no number fits, or the `requested` one does not.
    """
    limit = memory_limit(mesh)
    note = ''
    tried = 0  # the last number of microbatches compiled
    need = 0.0  # its bytes
    for n in microbatch_counts(requested, num_rows):
        # Skip n if it would not fit even with memory proportional to its rows.
        if 0.95 * need * tried / n > limit:
            continue
        tried = n
        try:
            step = compile_step(n)
            need = step_bytes(step, mesh, state_bytes)
        except jax.errors.JaxRuntimeError as error:
            # On a TPU, XLA's error says how many bytes the step needs.
            match = re.match(r'RESOURCE_EXHAUSTED.*?([\d.]+)([KMGT])\b', str(error), re.DOTALL)
            if match is None:
                raise
            need = float(match[1]) * 1024 ** (1 + 'KMGT'.index(match[2]))
        if need <= limit:
            if note:
                note += f'; so it takes {n}, with the same gradients.'
            return Plan(step, n, note)
        if not note:
            note = (
                f'train.num_microbatches={requested}: a step in {n} microbatch(es) needs {need / GIB:.1f} GiB of '
                f'memory, and {limit / GIB:.1f} are available'
            )
    remedy = 'use auto, more devices or a smaller train.batch_size'
    if requested == 'auto':
        remedy = f'{tried} do not fit either: use more devices or a smaller train.batch_size'
    raise Refused(f'{note}: {remedy}')


def check_state_fits(mesh: Mesh, state: Any, state_specs: Any) -> None:
    """Raise Refused if parameters and optimizer state alone do not fit into memory."""
    need = bytes_on_device(mesh, state, state_specs)
    limit = memory_limit(mesh)
    if kernels.is_on_cpu(mesh.abstract_mesh):
        need *= len(mesh.local_devices)
    if need > limit:
        raise Refused(
            f'parameters and optimizer state take {need / GIB:,.1f} of {limit / GIB:,.1f} GiB: use more of mesh.fsdp'
        )


def bytes_on_device(mesh: Mesh, arrays: Any, specs: Any) -> int:
    """Return the bytes that a tree of arrays, split as `specs` say, takes on a device."""

    def size(x: Any, sharding: Any) -> int:
        return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, arrays, partition.shardings(mesh, specs))))


def num_state_bytes(state: Any) -> int:
    """Return the bytes of a training state, which are also the bytes of its checkpoint."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def step_bytes(step: jax.stages.Compiled, mesh: Mesh, state_bytes: int) -> float:
    """Return the bytes that a compiled step takes, to compare with `memory_limit`."""
    num_bytes = program_bytes(step)
    if kernels.is_on_cpu(mesh.abstract_mesh):
        num_bytes *= len(mesh.local_devices)
        num_bytes += state_bytes  # the copy that is being saved
    return num_bytes


def program_bytes(program: jax.stages.Compiled) -> int:
    """Return a program's peak memory on a device, in bytes."""
    analysis: Any = program.memory_analysis()
    num_bytes = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    return num_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes


def memory_limit(mesh: Mesh) -> float:
    """Return the bytes that a step may take on a device, or on a CPU's machine: the minimum of all processes."""
    limits: list[float] = [math.inf]
    if kernels.is_on_cpu(mesh.abstract_mesh):
        limits.append(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))
        limits += cgroup_limits()
    else:
        for device in mesh.local_devices:
            try:
                statistics = device.memory_stats() or {}
            except jax.errors.JaxRuntimeError:  # --mode=plan compiles for absent devices
                statistics = {'bytes_limit': DEVICE_MEMORY[device.device_kind]}
            limits.append(statistics.get('bytes_limit', math.inf))
    limit = min(x for x in limits if x > 0)
    return MEMORY_FRACTION * float(from_processes(np.array([limit])).min())


def cgroup_limits(root: Path = Path('/')) -> list[int]:
    """Return the memory limits of this process's cgroup and its ancestors, in bytes. See cgroups(7)."""
    if not (root / 'proc/self/cgroup').exists():  # not Linux
        return []
    limits = []
    for line in (root / 'proc/self/cgroup').read_text().splitlines():
        _, controllers, path = line.split(':', 2)
        if 'memory' in controllers.split(','):
            file = root / f'sys/fs/cgroup/memory{path}/memory.limit_in_bytes'
        elif not controllers:  # version 2
            file = root / f'sys/fs/cgroup{path}/memory.max'
        else:
            continue
        for folder in file.parents:
            level = folder / file.name
            text = level.read_text().strip() if level.exists() else ''
            if text.isdigit():  # version 2 writes max for none
                limits.append(int(text))
    return limits
