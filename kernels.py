"""The functions that XLA compiles badly for one kind of device: plain JAX first, the other form beside it.

docs/log.md has the figures.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

STAGE = 32  # the longest dimension that XLA reduces in one loop


def for_device(plain: Callable, on_cpu: Callable, *arrays: jax.Array) -> jax.Array:
    """Call the form of a function that the devices of this program need.

    It is the plain one for arrays that devices share, which XLA splits: outside shard_map, on a mesh
    of several devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1 and not mesh.manual_axes:
        return lax.platform_dependent(*arrays, cpu=on_cpu, default=plain)
    if mesh.manual_axes and is_on_cpu():
        return on_cpu(*arrays)
    return plain(*arrays)


def is_on_cpu() -> bool:
    """Return whether the devices of this `jax.shard_map` are those of a CPU; False outside of one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.device_kind == 'cpu'


# Products with kernels.


@functools.partial(jax.jit, static_argnames='equation')  # traced once for each shape
def einsum(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return jnp.einsum(equation, x, kernel), [b, T, *columns], for x of [b, T, *rows].

    On a CPU it is a product of matrices: to sum the kernel's gradient over b and T, XLA would copy the
    gradient of the result, transposed (3.94 s a step of T5 1.1 small, down to 3.28).
    """
    if not is_on_cpu():
        return jnp.einsum(equation, x, kernel)
    num_rows = math.prod(x.shape[2:])
    matrices = vary_alike(x.reshape(-1, num_rows), kernel.reshape(num_rows, -1))
    return matmul(*matrices).reshape(*x.shape[:2], *kernel.shape[x.ndim - 2 :])


@jax.custom_vjp
def matmul(x_rD: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """Return x @ kernel, [r, F], on a CPU, where XLA multiplies bfloat16 fast if the sums are float32.

    JAX's own gradient would multiply the float32 gradient of the sums, not the bfloat16 one.
    """
    return jnp.matmul(x_rD, kernel_DF, preferred_element_type=jnp.float32).astype(x_rD.dtype)


def _matmul_forward(x_rD, kernel_DF):
    return matmul(x_rD, kernel_DF), (x_rD, kernel_DF)


def _matmul_backward(matrices, grad_rF):
    x_rD, kernel_DF = matrices
    return matmul(grad_rF, _transpose(kernel_DF)), matmul(_transpose(x_rD), grad_rF)


matmul.defvjp(_matmul_forward, _matmul_backward)


def _transpose(x: jax.Array) -> jax.Array:
    if (
        x.dtype == jnp.bfloat16
    ):  # multiplied fast only if both matrices lie row by row: 7 ms, not 14
        return with_layout_constraint(x.T, Layout(major_to_minor=(0, 1)))
    return x.T


def vary_alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return both arrays, each marked as varying over the mesh axes of the other one, too.

    JAX does so for its own products, but not for a function with a gradient of its own.
    """
    axes_x = jax.typeof(x).manual_axis_type.varying
    axes_y = jax.typeof(y).manual_axis_type.varying
    x = lax.pcast(x, tuple(sorted(axes_y - axes_x)), to='varying')
    return x, lax.pcast(y, tuple(sorted(axes_x - axes_y)), to='varying')


# Sums.


def sum(x: jax.Array, axis: int | None = None, keepdims: bool = False) -> jax.Array:
    """Return x.sum(axis), float32."""
    return reduce(jnp.sum, x.astype(jnp.float32), axis, keepdims)


def mean(x: jax.Array, axis: int, keepdims: bool = False) -> jax.Array:
    """Return x.mean(axis), float32."""
    return sum(x, axis, keepdims) / x.shape[axis]


@functools.partial(jax.jit, static_argnums=(0, 2, 3))  # traced once for each shape
def reduce(operation: Callable, x: jax.Array, axis: int | None, keepdims: bool) -> jax.Array:
    """Return operation(x, axis), where the operation is jnp.sum, of float32 numbers, or _max.

    A CPU adds up 32 numbers of a dimension at a time. XLA does so, too, but writes all numbers to
    memory first; a dimension of 32 is reduced in the loop that computes the numbers, vectorized along
    the last dimension. The barrier keeps XLA from joining both stages again, and a window from
    computing the first one within the second, where its numbers would not be adjacent.
    """

    def in_stages(x):
        x = jnp.atleast_1d(x)
        last = x.ndim - 1
        dim = 0 if axis is None else axis % x.ndim
        size = x.shape[dim]
        if size > STAGE and size % STAGE == 0:
            parts = (STAGE, size // STAGE) if dim == last else (size // STAGE, STAGE)
            blocks = x.reshape(*x.shape[:dim], *parts, *x.shape[dim + 1 :])
            x = lax.optimization_barrier(operation(blocks, dim if dim == last else dim + 1))
        if axis is not None and dim != last:
            window = [1] * x.ndim
            window[dim] = x.shape[dim]
            x = lax.reduce_window(x, 0.0, lax.add, window, window, 'VALID')
        return operation(x, axis, keepdims=keepdims)

    return for_device(lambda x: operation(x, axis, keepdims=keepdims), in_stages, x)


@jax.custom_vjp
def softmax(logits: jax.Array) -> jax.Array:
    """Return jax.nn.softmax(logits). Its gradient reduces in float32."""
    exps = jnp.exp(logits - reduce(_max, logits, -1, True))
    return exps / sum(exps, axis=-1, keepdims=True).astype(exps.dtype)


def _max(x: jax.Array, axis: int, keepdims: bool = False) -> jax.Array:
    return x.max(axis, keepdims=keepdims, initial=-jnp.inf)  # before a sequence there are no keys


def _softmax_forward(logits):
    probs = softmax(logits)
    return probs, probs


def _softmax_backward(probs, grad):
    weighted = grad * probs
    total = sum(weighted, axis=-1, keepdims=True)
    return (weighted - probs * total.astype(probs.dtype),)


softmax.defvjp(_softmax_forward, _softmax_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def broadcast(x: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Return float32 x repeated along new first dimensions, in `dtype`.

    Its gradient reduces in float32, like that of softmax.
    """
    return jnp.broadcast_to(x, shape).astype(dtype)


def _broadcast_forward(x, shape, dtype):
    return broadcast(x, shape, dtype), x.shape


def _broadcast_backward(shape, dtype, x_shape, grad):
    return (sum(grad.reshape(-1, *x_shape), axis=0),)


broadcast.defvjp(_broadcast_forward, _broadcast_backward)
