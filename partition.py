"""The mesh, and the helpers for collectives that are written by hand.

The rows of a batch are split over BATCH_AXES; heads, MLP width and vocabulary over 'model'; parameters
over 'model' and 'fsdp', and gathered over 'fsdp' when they are used. Inside `jax.shard_map` every array
is one device's part, and a collective follows the math that it completes. `lax.pmax`, `lax.axis_index` and
`lax.psum` of a count are JAX's; each helper here removes a trap.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

import kernels
from messages import Refused

MESH_AXES = ('data', 'fsdp', 'model')  # from the slowest links to the fastest
BATCH_AXES = ('data', 'fsdp')  # split the rows of a batch; sum over both
BATCH = P(BATCH_AXES)  # spec of an array of rows
AXIS_TYPES = (AxisType.Auto,) * len(MESH_AXES)

Tree = TypeVar('Tree')  # a pytree


def make_mesh(data: int = -1, fsdp: int = 1, model: int = 1, devices: list | None = None) -> Mesh:
    """Return a mesh of `data` x `fsdp` x `model` devices; -1 takes the remaining devices."""
    if not __debug__:
        raise Refused('Haiku needs assertions: run python without -O and PYTHONOPTIMIZE')
    devices = devices or jax.devices()
    sizes = [data, fsdp, model]
    settings = f'mesh.data={data}, mesh.fsdp={fsdp}, mesh.model={model}'
    if min(sizes) < -1 or 0 in sizes or sizes.count(-1) > 1:
        raise Refused(f'{settings}: each must be a positive count, and at most one may be -1')
    count = abs(math.prod(sizes))
    if count > len(devices) or (-1 in sizes and len(devices) % count):
        remedy = f'on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={count}'
        raise Refused(f'{settings} does not fit {len(devices)} devices: {remedy}')
    sizes = [len(devices) // count if size == -1 else size for size in sizes]
    devices = devices[: math.prod(sizes)]
    slices = len({getattr(x, 'slice_index', 0) for x in devices if x.platform == 'tpu'}) or 1
    if sizes[0] % slices:
        raise Refused(f'{settings}: mesh.data must be a multiple of {slices}, the TPU slices')
    parts = (sizes[0] // slices, *sizes[1:])
    try:
        if slices > 1:  # only 'data' crosses the slow links between slices
            grid = mesh_utils.create_hybrid_device_mesh(
                parts, (slices, 1, 1), devices, allow_split_physical_axes=True
            )
        else:
            grid = mesh_utils.create_device_mesh(parts, devices, allow_split_physical_axes=True)
    except AssertionError as error:  # raised for TPUs
        raise Refused(f'{settings}: these TPUs do not form a box: set an axis to -1') from error
    return Mesh(grid, MESH_AXES, axis_types=AXIS_TYPES)


def axes_size(mesh: Mesh, axes: Iterable[str]) -> int:
    """Return the number of parts of a dimension that is split over `axes`."""
    return math.prod(mesh.shape[axis] for axis in axes)


def check_divides(name: str, n: int, axes: tuple[str, ...], mesh: Mesh) -> None:
    """Raise Refused unless `n`, the value of `name`, is divisible by the size of the mesh axes."""
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
    """Return lax.psum(x, axes). Raises ValueError if x is equal along an axis: JAX would multiply x by its size."""
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
    """Gather a parameter along `dim` as `dtype`, sent in the narrower dtype; sum its gradients in `gradient_dtype`."""
    if x.dtype.itemsize > jnp.dtype(dtype).itemsize:
        x = x.astype(dtype)
    return lax.all_gather(x, axis, axis=dim, tiled=True).astype(dtype)


def _all_gather_forward(x, axis, dim, dtype, gradient_dtype):
    return all_gather(x, axis, dim, dtype, gradient_dtype), None


def _all_gather_backward(axis, dim, dtype, gradient_dtype, _, grad):
    grad = grad.astype(gradient_dtype)
    total = lax.psum_scatter(grad, axis, scatter_dimension=dim, tiled=True)
    return (kernels.kept_in_loop(total).astype(jnp.float32),)


all_gather.defvjp(_all_gather_forward, _all_gather_backward)


def one_device(f: Callable, in_specs: P | tuple) -> Callable:
    """Return `f`, compiled, with every mesh axis bound to size one, to be called outside a mesh.

    Initialization uses it, in a `jax.jit(..., out_shardings=...)`: local shapes are then unsplit shapes, and a seed
    gives the same bits on every mesh. `in_specs`: how a mesh would split the arguments, for `psum` and `check_summed`.
    """
    mesh = AbstractMesh((1,) * len(MESH_AXES), MESH_AXES, axis_types=AXIS_TYPES)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=P()))


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


def split_stack(x: jax.Array) -> jax.Array:
    """Split a stack of global arrays over 'fsdp', not each array: Muon sends 0.4 times their bytes, down from 13."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return lax.with_sharding_constraint(x, P('fsdp', *[P.UNCONSTRAINED] * (x.ndim - 1)))


def place_rows(mesh: Mesh, batch: Mapping[str, NDArray]) -> dict[str, jax.Array]:
    """Return global arrays, split over BATCH_AXES, from each process's own rows."""
    return jax.make_array_from_process_local_data(NamedSharding(mesh, BATCH), dict(batch))


def cut_rows(tree: Tree, num_parts: int) -> Tree:
    """Return this device's rows in equal parts: [b, ...] -> [num_parts, b / num_parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), tree)


def per_device(params: Tree, specs: Mapping[str, P]) -> Tree:
    """Mark parameters that are equal along a batch axis as varying, before `jax.grad`.

    Gradients then stay on their devices, and `sum_gradients` is one visible line. Without the mark, JAX hides a sum in
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
