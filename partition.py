"""The mesh, and what it takes to write collectives by hand.

Two axes. Rows of the batch are split over 'data'; heads, MLP and vocabulary over 'model'. Everything
between `jax.shard_map`'s braces is one device's part, and a collective stands beside the math it
completes: `lax.psum`, `lax.pmax` and `lax.axis_index` as JAX has them. Here are the few helpers that
remove a trap. This module knows nothing of T5.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ('data', 'model')


def make_mesh(data: int = -1, model: int = 1, devices: list | None = None) -> Mesh:
    """A mesh of `data` x `model` devices; -1 for one of the two takes what is left."""
    devices = jax.devices() if devices is None else devices
    sizes = f'mesh.data={data} and mesh.model={model}'
    if min(data, model) < -1 or 0 in (data, model) or data == model == -1:
        raise ValueError(f'{sizes}: each must be a positive count, and at most one may be -1')
    if -1 in (data, model):
        known = max(data, model)
        if len(devices) % known:
            raise ValueError(f'{sizes}: {known} must divide the number of devices, {len(devices)}')
        data, model = (size if size != -1 else len(devices) // known for size in (data, model))
    if data * model > len(devices):
        raise ValueError(
            f'{sizes}: the product must be at most the {len(devices)} devices there are'
        )
    auto = (AxisType.Auto,) * 2
    return jax.make_mesh((data, model), AXES, auto, devices=devices[: data * model])


def check_divides(name: str, n: int, axis: str, mesh: Mesh) -> None:
    """Raises ValueError, in words, unless `n` things called `name` split evenly over `axis`."""
    size = mesh.shape[axis]
    if n % size:
        *fits, last = [str(k) for k in range(1, n + 1) if n % k == 0]
        fits = f'{", ".join(fits)} or {last}' if fits else last
        raise ValueError(f'{name}={n} cannot be split over {axis}={size}; use {fits}')


def split(n: int, axis: str) -> int:
    """This device's count out of `n`; only inside a function that has `axis` bound."""
    size = lax.psum(1, axis)
    assert n % size == 0, (n, axis, size)  # check_divides has run before anything is traced
    return n // size


def own_slice(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's part of a whole array: `x` cut along `dim` over the mesh axis."""
    n = split(x.shape[dim], axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * n, n, dim)


def one_device(f: Callable) -> Callable:
    """`f` with both axes bound to size one, to be called outside a mesh.

    Initialization goes through it, under `jax.jit(..., out_shardings=...)`: local shapes are then whole
    shapes, and the same key gives the same bits on every mesh.
    """

    def bound(*args):
        over_data = jax.vmap(f, in_axes=None, axis_size=1, axis_name='data')
        over_both = jax.vmap(over_data, in_axes=None, axis_size=1, axis_name='model')
        return jax.tree.map(lambda x: x[0, 0], over_both(*args))

    return bound


def param_specs(table: Mapping[str, P], paths: list[str]) -> dict[str, P]:
    """The row of `table` for each path; every path must match exactly one pattern, whole."""
    specs = {}
    for path in paths:
        rows = [pattern for pattern in table if re.fullmatch(pattern, path)]
        if len(rows) != 1:
            raise ValueError(f'parameter {path!r} matches {len(rows)} rows of the table: {rows}')
        specs[path] = table[rows[0]]
    return specs


def shardings(mesh: Mesh, specs: Any) -> Any:
    """A tree of PartitionSpecs as a tree of NamedShardings."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, P))


def own_rows(mesh: Mesh, batch_size: int) -> range:
    """The rows of a global batch that this process feeds to its devices."""
    parts = NamedSharding(mesh, P('data')).addressable_devices_indices_map((batch_size,)).values()
    bounds = [part[0].indices(batch_size) for part in parts]
    return range(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))


def place_rows(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's rows of each feature as global arrays, split over 'data'."""
    sharding = NamedSharding(mesh, P('data'))
    return {k: jax.make_array_from_process_local_data(sharding, x) for k, x in batch.items()}


def per_device(params: Any, specs: Any) -> Any:
    """Marks what every 'data' device holds alike as that device's own.

    Before `jax.grad`: gradients then stay this device's, and the sum over 'data' is one visible line,
    `sum_gradients`, instead of one hidden in the transpose of every use.
    """

    def mark(param, spec):
        return param if 'data' in spec else lax.pcast(param, 'data', to='varying')

    return jax.tree.map(mark, params, specs)


def sum_gradients(grads: Any, specs: Any) -> Any:
    """The gradients of the global loss: each device's own, summed over 'data'."""
    return jax.tree.map(lambda g, spec: g if 'data' in spec else lax.psum(g, 'data'), grads, specs)
