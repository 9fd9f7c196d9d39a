"""Compiling a step ahead of time: whether it fits into memory, and in how many microbatches.

Nothing is run here. What is compiled is an argument: a function from a number of microbatches to a
compiled step.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import partition

MEMORY_FRACTION = 0.9  # of the memory, for a step; the rest is left to data, program and system
# The memory limits of a container, in the two versions of cgroups.
CGROUP_LIMITS = (
    '/sys/fs/cgroup/memory.max',
    '/sys/fs/cgroup/memory/memory.limit_in_bytes',
)


class Attempt(NamedTuple):
    """A step that was compiled to see how much memory it needs."""

    num_microbatches: int
    step: jax.stages.Compiled
    num_bytes: float


class Plan(NamedTuple):
    """The step to run."""

    step: jax.stages.Compiled | None  # None where a run is finished
    num_microbatches: int
    note: str  # why 'auto' splits the batch; '' where it does not


def microbatch_counts(requested: int | str, num_rows: int) -> list[int]:
    """Return the numbers of microbatches to try, ascending, from `requested` on.

    `num_rows`: the rows of a batch on one device, which the microbatches divide. Raises ValueError
    where `requested`, a number or 'auto', does not divide them.
    """
    counts = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
    if requested == 'auto':
        return counts
    if requested not in counts:
        raise ValueError(
            f'train.num_microbatches={requested!r} does not divide the {num_rows} rows of a device; '
            f"use 'auto' or one of {', '.join(map(str, counts))}"
        )
    return [n for n in counts if n >= requested]


def fit_step(
    compile_step: Callable[[int], jax.stages.Compiled],
    counts: list[int],
    requested: int | str,
    mesh: Mesh,
    state_bytes: int,
) -> Plan:
    """Compile the step in the first of `counts` microbatches with which it fits into memory.

    Raises ValueError where it fits with none. Where it does not fit with the `requested` number,
    the error names the smallest number that fits.
    """
    limit = memory_limit(mesh)
    attempts: list[Attempt] = []
    for n in counts:
        if attempts and least_bytes(attempts[-1], n) > limit:
            continue
        step = compile_step(n)
        attempts.append(Attempt(n, step, step_bytes(step, mesh, state_bytes)))
        if attempts[-1].num_bytes <= limit:
            break

    first = attempts[0]
    last = attempts[-1]
    comparison = (
        f'a step in {first.num_microbatches} microbatch(es) needs {first.num_bytes / 2**30:.1f} GiB of memory, and '
        f'{limit / 2**30:.1f} are available'
    )
    if last.num_bytes > limit:
        raise ValueError(
            f'{comparison}; {last.num_microbatches} do not fit either: use more devices or a smaller train.batch_size'
        )
    note = ''
    if len(attempts) > 1:
        if requested != 'auto':
            raise ValueError(
                f'train.num_microbatches={requested}: {comparison}; use {last.num_microbatches}, or auto'
            )
        note = f'train.num_microbatches=auto: {comparison}; so it takes {last.num_microbatches}, with the same gradients.'
    return Plan(step=last.step, num_microbatches=last.num_microbatches, note=note)


def least_bytes(attempt: Attempt, num_microbatches: int) -> float:
    """Return the least memory that a step in more microbatches can need.

    At best all of it shrinks with the rows.
    """
    return 0.95 * attempt.num_bytes * attempt.num_microbatches / num_microbatches


def check_state_fits(mesh: Mesh, state: Any, state_specs: Any) -> None:
    """Raise ValueError where parameters and optimizer state alone do not fit into memory."""
    limit = memory_limit(mesh)
    need = device_bytes(mesh, state, state_specs)
    if is_on_cpu(mesh):
        need *= len(mesh.local_devices)
    if need > limit:
        raise ValueError(
            f'parameters and optimizer state take {need / 2**30:,.1f} GiB of memory, and '
            f'{limit / 2**30:,.1f} are available: use more devices for mesh.model or a smaller model'
        )


def step_shapes(
    mesh: Mesh,
    state: Any,
    state_specs: Any,
    feature_lengths: Mapping[str, int],
    batch_size: int,
) -> tuple[Any, dict[str, jax.ShapeDtypeStruct]]:
    """Return the arguments of a step, (state, batch), as shapes with shardings.

    `state`: a tree of jax.ShapeDtypeStruct; `state_specs`: its PartitionSpecs.
    """

    def with_sharding(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = jax.tree.map(with_sharding, state, partition.shardings(mesh, state_specs))
    batch_sharding = partition.shardings(mesh, partition.BATCH)
    batch = {}
    for name, length in feature_lengths.items():
        shape = (batch_size, length)
        batch[name] = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding)
    return state, batch


def num_elements(tree: Any) -> int:
    """Return the number of elements of all arrays."""
    return sum(x.size for x in jax.tree.leaves(tree))


def num_state_bytes(state: Any) -> int:
    """Return the bytes of a training state, which are also those of its checkpoint."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def device_bytes(mesh: Mesh, state: Any, state_specs: Any) -> int:
    """Return the bytes that each device holds of a state, of whose arrays some are split."""

    def num_bytes(x: Any, sharding: Any) -> int:
        return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize

    of_arrays = jax.tree.map(num_bytes, state, partition.shardings(mesh, state_specs))
    return sum(jax.tree.leaves(of_arrays))


def step_bytes(step: jax.stages.Compiled, mesh: Mesh, state_bytes: int) -> float:
    """Return the bytes that a compiled step takes of the memory of `memory_limit`."""
    analysis: Any = step.memory_analysis()
    num_bytes = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    num_bytes += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    if is_on_cpu(mesh):
        num_bytes *= len(mesh.local_devices)
        num_bytes += state_bytes  # the copy that is being saved
    return num_bytes


def memory_limit(mesh: Mesh) -> float:
    """Return the bytes that a step may take.

    They are those of one device or, on a CPU, those of the machine, which all devices share. Of
    several processes the smallest limit counts, so that all decide alike.
    """
    limits: list[float] = []
    if is_on_cpu(mesh):
        limits.append(os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))
        for file in CGROUP_LIMITS:
            text = Path(file).read_text().strip() if os.path.exists(file) else ''
            if text.isdigit():
                limits.append(int(text))
    else:
        for device in mesh.local_devices:
            statistics = device.memory_stats() or {}
            limits.append(statistics.get('bytes_limit', math.inf))
    limits = [limit for limit in limits if limit > 0]
    limit = min(limits, default=math.inf)
    return MEMORY_FRACTION * float(partition.from_processes(np.array([limit])).min())


def is_on_cpu(mesh: Mesh) -> bool:
    """Return whether the devices of the mesh are a CPU's, which share one memory."""
    return mesh.devices.flat[0].platform == 'cpu'
