"""The mesh, and the helpers for collectives that are written by hand.

The rows of a batch are split over BATCH_AXES; heads, MLP width and vocabulary over 'model'; parameters
over 'model' and 'fsdp', and gathered over 'fsdp' when they are used. Inside `jax.shard_map` every array
is one device's part, and a collective stands beside the math that it completes. `lax.pmax`, `lax.axis_index` and
`lax.psum` of a count are JAX's; each helper here removes a trap.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

import kernels
from messages import Refused

MESH_AXES = ('data', 'fsdp', 'model')  # from the slowest links to the fastest
BATCH_AXES = ('data', 'fsdp')  # split the rows of a batch; sum over both
BATCH = P(BATCH_AXES)  # spec of an array of rows

Tree = TypeVar('Tree')  # a pytree
Result = TypeVar('Result')


def make_mesh(data: int = -1, fsdp: int = 1, model: int = 1, devices: list | None = None) -> Mesh:
    """Return a mesh of `data` x `fsdp` x `model` devices; -1 takes the remaining devices."""
    if not __debug__:
        raise Refused('Haiku needs assertions: run python without -O and PYTHONOPTIMIZE')
    devices = devices or jax.devices()
    sizes = [data, fsdp, model]
    settings = f'mesh.data={data}, mesh.fsdp={fsdp}, mesh.model={model}'
    if min(sizes) < -1 or 0 in sizes or sizes.count(-1) > 1:
        raise Refused(f'{settings}: each must be a positive count, and at most one may be -1')
    num_wanted = abs(math.prod(sizes))
    if num_wanted > len(devices) or (-1 in sizes and len(devices) % num_wanted):
        remedy = f'on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={num_wanted}'
        raise Refused(f'{settings} does not fit {len(devices)} devices: {remedy}')
    sizes = [len(devices) // num_wanted if size == -1 else size for size in sizes]
    devices = devices[: math.prod(sizes)]
    slices = len({getattr(x, 'slice_index', 0) for x in devices if x.platform == 'tpu'}) or 1
    if sizes[0] % slices:
        raise Refused(f'{settings}: mesh.data must be a multiple of {slices}, the TPU slices')
    parts = (sizes[0] // slices, *sizes[1:])
    try:
        if slices > 1:  # only 'data' crosses the slow links between them
            grid = mesh_utils.create_hybrid_device_mesh(
                parts, (slices, 1, 1), devices, allow_split_physical_axes=True
            )
        else:
            grid = mesh_utils.create_device_mesh(parts, devices, allow_split_physical_axes=True)
    except AssertionError as error:  # raised for TPUs
        raise Refused(f'{settings}: these TPUs do not form a box: set an axis to -1') from error
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def axes_size(mesh: Mesh, axes: Iterable[str]) -> int:
    """Return the number of parts of a dimension that is split over `axes`."""
    return math.prod(mesh.shape[axis] for axis in axes)


def check_divides(name: str, n: int, axes: tuple[str, ...], mesh: Mesh) -> None:
    """Refuse an `n`, the value of `name`, that does not divide by the size of the mesh axes."""
    count = axes_size(mesh, axes)
    if n % count:
        over = ' * '.join(f'mesh.{axis}' for axis in axes if mesh.shape[axis] > 1)
        divisors = ', '.join(str(k) for k in range(1, n + 1) if n % k == 0)
        raise Refused(f'{name}={n} cannot be split over {over}={count}: use one of {divisors}')


def split(n: int, axis: str) -> int:
    """Return this device's count out of `n`, in a function with `axis` bound."""
    assert n % lax.psum(1, axis) == 0  # check_divides has run
    return n // lax.psum(1, axis)


def varying(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes between whose devices `x` may differ, which JAX tracks while it traces."""
    return jax.typeof(x).manual_axis_type.varying


def check_summed(name: str, x: jax.Array, axes: Iterable[str]) -> None:
    """Raise ValueError if `x` may differ between the devices of `axes`. Axes of size one count."""
    for axis in sorted(varying(x) & set(axes)):
        raise ValueError(
            f'{name} differs between the devices of {axis!r}: add partition.psum(partial, {axis!r})'
        )


def psum(x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """Return lax.psum(x, axes). Raises ValueError if x is equal on an axis: JAX would multiply it by the axis's size."""
    for axis in (axes,) if isinstance(axes, str) else axes:
        if axis not in varying(x):
            raise ValueError(f'psum over {axis!r}: its devices have equal values: remove this sum')
    return lax.psum(x, axes)


def own_slice(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Return this device's part of `x`, split along `dim` over the mesh axis."""
    n = split(x.shape[dim], axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * n, n, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def all_gather(x: jax.Array, axis: str, dim: int, dtype: str, gradient_dtype: str) -> jax.Array:
    """Unsplit a float32 parameter along `dim`, sent in `dtype`; sum its gradients in `gradient_dtype`."""
    return lax.all_gather(x.astype(dtype), axis, axis=dim, tiled=True)


def _all_gather_forward(x, axis, dim, dtype, gradient_dtype):
    return all_gather(x, axis, dim, dtype, gradient_dtype), None


def _all_gather_backward(axis, dim, dtype, gradient_dtype, _, grad):
    grad = grad.astype(gradient_dtype)
    total = lax.psum_scatter(grad, axis, scatter_dimension=dim, tiled=True)
    return (kernels.kept_in_loop(total).astype(jnp.float32),)


all_gather.defvjp(_all_gather_forward, _all_gather_backward)


def argmax(x: jax.Array, axis: str) -> jax.Array:
    """Return the index of the largest value in the last dimension, which is split over `axis`; the lowest wins a tie.

    The index counts in the unsplit dimension. int32 [...], the same on every device of `axis`.
    """
    n = x.shape[-1]
    own_max = x.max(axis=-1)
    index = kernels.argmax(x) + lax.axis_index(axis) * n
    winner = jnp.where(own_max == lax.pmax(own_max, axis), index, lax.psum(n, axis))
    return lax.pmin(winner, axis)


def top_k(x: jax.Array, k: int, axis: str) -> tuple[jax.Array, jax.Array]:
    """Return the k largest values, or all, in the last dimension, which is split over `axis`, and indices.

    They are in `lax.top_k`'s order. The indices, int32, count in the unsplit dimension. Both are [..., k], the same
    on every device of `axis`.
    """
    n = x.shape[-1]
    values, indices = kernels.top_k(x, min(k, n))
    indices = indices + lax.axis_index(axis) * n
    last = x.ndim - 1
    values = lax.all_gather(values, axis, axis=last, tiled=True, to='invarying')
    indices = lax.all_gather(indices, axis, axis=last, tiled=True, to='invarying')
    # Equal values are ordered by index here, and top_k takes the first.
    values, winners = lax.top_k(values, min(k, values.shape[-1]))
    return values, jnp.take_along_axis(indices, winners, axis=-1)


def logsumexp(x: jax.Array, axis: str) -> jax.Array:
    """Return log(sum(exp(x))) over the last dimension, which is split over `axis`."""
    max_value = lax.pmax(lax.stop_gradient(x).max(axis=-1), axis)
    partial_sum = jnp.exp(x - max_value[..., None]).sum(axis=-1)
    return jnp.log(psum(partial_sum, axis)) + max_value


def take(x: jax.Array, indices: jax.Array, axis: str) -> jax.Array:
    """Return x[..., indices[...]], one value of the last dimension, which is split over `axis`."""
    n = x.shape[-1]
    own = indices - lax.axis_index(axis) * n
    value = jnp.take_along_axis(x, jnp.clip(own, 0, n - 1)[..., None], axis=-1)[..., 0]
    partial_value = jnp.where((own >= 0) & (own < n), value, 0)
    return psum(partial_value, axis)  # one device has the value, the others add zero


def one_device(f: Callable, in_specs: P | tuple = ()) -> Callable:
    """Return `f`, compiled, with every mesh axis bound to size one, to be called outside a mesh.

    Initialization uses it, in a `jax.jit(..., out_shardings=...)`: local shapes are then unsplit shapes, and a seed
    gives the same bits on every mesh. `in_specs`: how a mesh would split the arguments, for `psum` and `check_summed`.
    """

    def alike(x: jax.Array) -> jax.Array:  # equal already; pmax only tells JAX's checker
        axes = varying(x)
        return lax.pmax(x, tuple(sorted(axes))) if axes else x

    auto = (AxisType.Auto,) * len(MESH_AXES)
    mesh = AbstractMesh((1,) * len(MESH_AXES), MESH_AXES, axis_types=auto)
    on_one = jax.shard_map(
        lambda *xs: jax.tree.map(alike, f(*xs)), mesh=mesh, in_specs=in_specs or P(), out_specs=P()
    )
    return jax.jit(on_one)


def param_specs(table: Mapping[str, P], paths: Iterable[str]) -> dict[str, P]:
    """Return {path: spec} from a table of {regular expression that matches a full path: spec}."""
    specs = {}
    for path in paths:
        patterns = [pattern for pattern in table if re.fullmatch(pattern, path)]
        if len(patterns) != 1:
            raise ValueError(f'{path!r} matches {len(patterns)} rows of specs, not one: {patterns}')
        specs[path] = table[patterns[0]]
    return specs


def gathered(spec: P) -> P:
    """Return the spec of an array after it is gathered over 'fsdp'."""
    return P(*[None if entry == 'fsdp' else entry for entry in spec])


def shardings(mesh: Mesh, specs):
    """Return a tree of NamedShardings for a tree of specs, such as {path: spec}."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def place_rows(mesh: Mesh, batch: Mapping[str, NDArray]) -> dict[str, jax.Array]:
    """Return global arrays, split over BATCH_AXES, made of each process's own rows."""
    sharding = NamedSharding(mesh, BATCH)
    return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()}


def place_batch(mesh: Mesh, batch: Mapping[str, NDArray]) -> dict[str, jax.Array]:
    """Return global arrays, split over BATCH_AXES, from a batch that every process has in full."""
    sharding = NamedSharding(mesh, BATCH)
    placed: dict[str, jax.Array] = {}
    for name, x in batch.items():
        placed[name] = jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
    return placed


def from_processes(x: NDArray) -> NDArray:
    """Return the arrays that all processes pass as `x`, stacked: [processes, ...]."""
    content = np.frombuffer(x.tobytes(), np.uint8)  # JAX would cut 64-bit numbers
    all_bytes = np.asarray(multihost_utils.process_allgather(content, tiled=True))
    return all_bytes.reshape(-1, x.nbytes).view(x.dtype).reshape(-1, *x.shape)


def from_first_process(x: NDArray) -> NDArray:
    """Return the `x` of the first process; all have equal shapes."""
    return from_processes(x)[0]


class ProcessFailed(OSError):
    """Another process has failed."""


def in_all(f: Callable[[], Result]) -> Result:
    """Call `f` in every process; if it fails in one, that one raises its error and all others ProcessFailed."""
    error = None
    try:
        result = f()
    except Exception as raised:
        error = raised
    failed = from_processes(np.array([error is not None]))
    if error is not None:
        raise error
    if failed.any():
        raise ProcessFailed(f'process {failed.argmax()} failed: fix the error that it reports')
    return result


def cut_rows(tree: Tree, num_parts: int) -> Tree:
    """Return this device's rows in equal parts: [b, ...] -> [num_parts, b / num_parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), tree)


def per_device(params: Tree, specs: Mapping[str, P]) -> Tree:
    """Mark parameters that devices of a batch axis share as each device's own, before `jax.grad`.

    Gradients then stay the device's own, and `sum_gradients` is one visible line. Without the mark, JAX hides a sum in
    the transpose of every use.
    """

    def mark(x: jax.Array, spec: P) -> jax.Array:
        return lax.pcast(x, replicated_batch_axes(spec), to='varying')

    return jax.tree.map(mark, params, specs)


def sum_gradients(grads: Tree, specs: Mapping[str, P]) -> Tree:
    """Return the gradients of the global loss: each device's own gradients, summed over the batch axes."""

    def total(grad: jax.Array, spec: P) -> jax.Array:
        axes = replicated_batch_axes(spec)
        return psum(grad, axes) if axes else grad

    return jax.tree.map(total, grads, specs)


def replicated_batch_axes(spec: P) -> tuple[str, ...]:
    """Return the batch axes over which `spec` splits nothing: their devices hold equal values."""
    split_over = jax.tree.leaves(tuple(spec))  # entries are a name, several names, or None
    return tuple(axis for axis in BATCH_AXES if axis not in split_over)
