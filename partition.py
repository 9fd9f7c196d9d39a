"""The mesh, and what it takes to write collectives by hand.

Two axes: rows of the batch are split over 'data'; heads, MLP and vocabulary over 'model'. Inside
`jax.shard_map` all is one device's part, and a collective stands beside the math it completes: `lax.psum`,
`lax.pmax`, `lax.axis_index` as JAX has them. Here are the few helpers that remove a trap.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH = P('data')  # arrays of rows


def make_mesh(data: int = -1, model: int = 1, devices: list | None = None) -> Mesh:
    """A mesh of `data` x `model` devices; -1 for one of the two takes what is left."""
    devices = jax.devices() if devices is None else devices
    sizes = f'mesh.data={data}, mesh.model={model}'
    known = max(data, model)
    if min(data, model) < -1 or 0 in (data, model) or known == -1:
        raise ValueError(f'{sizes}: each must be a positive count, and at most one may be -1')
    on_a_cpu = (
        'on a CPU, the environment variable XLA_FLAGS=--xla_force_host_platform_device_count='
        f'{known if -1 in (data, model) else data * model} makes as many'
    )
    if -1 in (data, model) and len(devices) % known:
        raise ValueError(
            f'{sizes}: {known} must divide the number of devices, {len(devices)}; {on_a_cpu}'
        )
    data, model = (size if size != -1 else len(devices) // known for size in (data, model))
    if data * model > len(devices):
        raise ValueError(
            f'{sizes}: the product must be at most the {len(devices)} devices; {on_a_cpu}'
        )
    auto = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), ('data', 'model'), auto, devices=devices[: data * model])


def check_divides(name: str, n: int, axis: str, mesh: Mesh) -> None:
    """Raises ValueError, in words, unless `n` things called `name` split evenly over `axis`."""
    if n % mesh.shape[axis]:
        fits = ', '.join(str(k) for k in range(1, n + 1) if n % k == 0)
        fits = ' or '.join(fits.rsplit(', ', 1))
        raise ValueError(f'{name}={n} cannot be split over {axis}={mesh.shape[axis]}; use {fits}')


def split(n: int, axis: str) -> int:
    """This device's count out of `n`; only inside a function that has `axis` bound."""
    assert n % lax.psum(1, axis) == 0  # check_divides has run before anything is traced
    return n // lax.psum(1, axis)


def own_slice(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's part of a whole array: `x` cut along `dim` over the mesh axis."""
    n = split(x.shape[dim], axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * n, n, dim)


def argmax(x: jax.Array, axis: str) -> jax.Array:
    """The index in the whole last dimension, which is split over `axis`, of its largest value, the lowest
    among equals; int32 [...], whole."""
    n, max_value = x.shape[-1], x.max(axis=-1)
    index = x.argmax(axis=-1) + lax.axis_index(axis) * n
    winner = jnp.where(max_value == lax.pmax(max_value, axis), index, lax.psum(n, axis))
    return lax.pmin(winner, axis)


def one_device(f: Callable) -> Callable:
    """`f` with both axes bound to size one, to be called outside a mesh. Initialization goes through it,
    under `jax.jit(..., out_shardings=...)`: local shapes are whole, and bits the same on every mesh."""

    def bound(*args):
        over_data = jax.vmap(f, in_axes=None, axis_size=1, axis_name='data')
        over_both = jax.vmap(over_data, in_axes=None, axis_size=1, axis_name='model')
        return jax.tree.map(lambda x: x[0, 0], over_both(*args))

    return bound


def param_specs(table: Mapping[str, P], paths: Any) -> dict[str, P]:
    """The row of `table` for each path; every path must match exactly one pattern, whole."""
    rows = {path: [p for p in table if re.fullmatch(p, path)] for path in paths}
    for path, patterns in rows.items():
        if len(patterns) != 1:
            raise ValueError(f'parameter {path!r} matches {len(patterns)} rows: {patterns}')
    return {path: table[patterns[0]] for path, patterns in rows.items()}


def shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def own_rows(mesh: Mesh, batch_size: int) -> range:
    """The rows of a global batch that this process feeds to its devices."""
    parts = NamedSharding(mesh, BATCH).addressable_devices_indices_map((batch_size,)).values()
    rows = np.concatenate([np.arange(batch_size)[part] for part in parts])
    return range(rows.min(), rows.max() + 1)


def place_rows(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """This process's rows of each feature as global arrays, split over 'data'."""
    place = NamedSharding(mesh, BATCH)
    return {k: jax.make_array_from_process_local_data(place, x) for k, x in batch.items()}


def from_processes(x: np.ndarray) -> np.ndarray:
    """What every process has as `x`, stacked: [processes, ...]. It goes as bytes: jax would cut 64 bits."""
    content = np.frombuffer(x.tobytes(), np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(content, tiled=True))
    return gathered.reshape(-1, x.nbytes).view(x.dtype).reshape(-1, *x.shape)


def cut_rows(tree: Any, num_parts: int) -> Any:
    """This device's rows in parts: [b, ...] -> [num_parts, b / num_parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), tree)


def per_device(params: Any, specs: Any) -> Any:
    """Marks what every 'data' device holds alike as that device's own, before `jax.grad`: gradients then
    stay the device's, and `sum_gradients` is one visible line, not hidden in every use's transpose."""
    mark = lambda x, spec: x if 'data' in spec else lax.pcast(x, 'data', to='varying')  # noqa: E731
    return jax.tree.map(mark, params, specs)


def sum_gradients(grads: Any, specs: Any) -> Any:
    """The gradients of the global loss: each device's own, summed over 'data'."""
    return jax.tree.map(lambda g, spec: g if 'data' in spec else lax.psum(g, 'data'), grads, specs)
