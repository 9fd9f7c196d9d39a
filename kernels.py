"""Skip this file: each function equals the JAX call that its docstring begins with.

XLA compiles these calls poorly for one kind of device, so a second form stands next to plain JAX. Only this file asks
which device it runs on. docs/log.md has the figures.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STAGE = 32  # longest dimension that XLA reduces in one loop
FEW_ROWS = 64  # up to this many, a kernel stored column by column is faster
HOPPER = re.compile(r'NVIDIA G?H[12]00\b')
MAX_HEAD_DIM = 112  # 128 with codes, the limit of cuDNN's older backward passes
BLOCK = 128  # `top_k` first takes the maximum of each block


def is_on_cpu(mesh: AbstractMesh | None = None) -> bool:
    """Return whether the devices of a mesh, by default the program's, are CPUs."""
    device = (mesh or jax.sharding.get_abstract_mesh()).abstract_device
    return device is not None and device.device_kind == 'cpu'


def is_on_hopper() -> bool:
    """Return whether the program's devices are GPUs with NVIDIA's Hopper chip: H100, H200, GH200."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and HOPPER.match(device.device_kind) is not None


def fuses_attention(q_bThK: jax.Array, k_bhKM: jax.Array, queries_bT: jax.Array | None) -> bool:
    """Return whether to use kernels_gpu.attention; `queries_bT` has the segments of queries, None in decoding.

    A step of T5 1.1 base then moves 0.56 times the bytes. cuDNN's limits: bfloat16, even lengths, and a head size
    divisible by 8.
    """
    head_dim, num_keys = k_bhKM.shape[2:]
    return (
        is_on_hopper()
        and queries_bT is not None
        and k_bhKM.dtype == jnp.bfloat16
        and q_bThK.shape[1] % 2 == num_keys % 2 == head_dim % 8 == 0
        and head_dim <= MAX_HEAD_DIM
    )


# Products with kernels.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """A kernel stored column by column, as its transpose."""

    kernel_FD: jax.Array
    new_shape: tuple[int, ...] = dataclasses.field(default=(), metadata={'static': True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.new_shape or self.kernel_FD.shape[::-1]

    def reshape(self, *shape: int) -> 'Columns':
        return Columns(self.kernel_FD, shape)

    def astype(self, dtype: str) -> 'Columns':
        return Columns(self.kernel_FD.astype(dtype), self.new_shape)


@functools.partial(jax.jit, static_argnames='equation')
def einsum(equation: str, x: jax.Array, kernel: jax.Array | Columns) -> jax.Array:
    """Return jnp.einsum(equation, x, kernel), [b, T, *columns], for x of [b, T, *rows].

    On CPUs, flatten x to 2-D: otherwise XLA transposes and copies dy to sum the kernel's gradient over b and T
    (4 MLPs, forward and backward: 0.52 s, down from 0.85). Columns become the left factor; with few rows, so does a
    kernel whose rows are last in the equation (8 rows: 22 ms, down from 29; 35 with its rows first).
    """
    if not is_on_cpu():
        return jnp.einsum(equation, x, kernel)
    x_letters, kernel_letters = equation.split('->')[0].split(',')
    x_rD = x.reshape(-1, math.prod(x.shape[2:]))
    if isinstance(kernel, jax.Array) and kernel_letters[-1] == x_letters[-1]:
        kernel = Columns(kernel) if len(x_rD) <= FEW_ROWS else kernel.T
    columns = kernel.shape[x.ndim - 2 :]
    if isinstance(kernel, Columns):
        # The barrier keeps XLA from restoring the slow form.
        y_rF = lax.optimization_barrier(kernel.kernel_FD @ x_rD.T).T
    else:
        y_rF = matmul(*vary_alike(x_rD, kernel.reshape(x_rD.shape[1], -1)))
    return y_rF.reshape(*x.shape[:2], *columns)


@jax.custom_vjp
def matmul(x_rD: jax.Array, kernel_DF: jax.Array) -> jax.Array:
    """Return x @ kernel, [r, F], on a CPU, where XLA multiplies bfloat16 fast if the sums are float32.

    JAX's own gradient would multiply the float32 gradient of the sums (4 MLPs: 0.47 s instead of 0.25).
    """
    return jnp.matmul(x_rD, kernel_DF, preferred_element_type=jnp.float32).astype(x_rD.dtype)


def _matmul_backward(matrices, grad_rF):
    def transpose(x):
        if x.dtype == jnp.bfloat16:  # store both row by row: 7 ms, down from 14
            return with_layout_constraint(x.T, Layout(major_to_minor=(0, 1)))
        return x.T

    x_rD, kernel_DF = matrices
    return matmul(grad_rF, transpose(kernel_DF)), matmul(transpose(x_rD), grad_rF)


matmul.defvjp(lambda *matrices: (matmul(*matrices), matrices), _matmul_backward)


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Mark arrays as varying over the mesh axes of each other, as JAX does for its own products."""
    axes = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    new_axes = [tuple(sorted(frozenset().union(*axes) - old)) for old in axes]
    return [lax.pcast(x, new, to='varying') for x, new in zip(arrays, new_axes, strict=True)]


def for_decoding(
    mesh: Mesh, params: Mapping[str, jax.Array], dtypes: Mapping[str, str]
) -> dict[str, Columns]:
    """Return Columns for the kernels in `dtypes`, {path: dtype}, which decoding on CPUs reads faster; elsewhere {}.

    Making them takes as long as several steps. XLA would copy an array of layout (1, 0) back into rows (39 ms a step).
    """
    if not is_on_cpu(mesh.abstract_mesh):
        return {}
    return {path: _columns(params[path], dtype) for path, dtype in dtypes.items()}


@functools.partial(jax.jit, static_argnums=1)
def _columns(kernel_DF, dtype):
    return Columns(kernel_DF.T.astype(dtype))


def specs_of(params: Mapping[str, jax.Array | Columns], specs: Mapping[str, P]) -> dict[str, P]:
    """Return the specs of parameters, reversed for Columns."""
    all_specs = dict(specs)
    for path, x in params.items():
        if isinstance(x, Columns):
            all_specs[path] = P(*specs[path][::-1])
    return all_specs


# Sums.


def sum(x: jax.Array, axis: int | None = None, keepdims: bool = False) -> jax.Array:
    """Return x.sum(axis), float32."""
    return reduce(jnp.sum, x.astype(jnp.float32), axis, keepdims)


def mean(x: jax.Array, axis: int, keepdims: bool = False) -> jax.Array:
    """Return x.mean(axis), float32."""
    return sum(x, axis, keepdims) / x.shape[axis]


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def reduce(operation: Callable, x: jax.Array, axis: int | None, keepdims: bool) -> jax.Array:
    """Return operation(x, axis); the operation is jnp.sum, for float32, or _max.

    On CPUs, reduce blocks of 32 first. XLA also blocks, but materializes the input first; it fuses a reduction over 32
    elements into the loop that computes them. The barrier keeps XLA from joining the two stages. The window keeps it
    from computing the first stage inside the second, which would read memory with strides.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_shared = mesh.size > 1 and not mesh.manual_axes  # XLA splits the array
    if not is_on_cpu() or is_shared or not x.ndim:
        return operation(x, axis, keepdims=keepdims)
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


@jax.custom_vjp
def softmax(logits: jax.Array) -> jax.Array:
    """Return jax.nn.softmax(logits). Its gradient reduces in float32."""
    exps = jnp.exp(logits - reduce(_max, logits, -1, True))
    return exps / sum(exps, axis=-1, keepdims=True).astype(exps.dtype)


def _max(x: jax.Array, axis: int, keepdims: bool = False) -> jax.Array:
    return x.max(axis, keepdims=keepdims, initial=-jnp.inf)  # decoding begins without keys


def _softmax_backward(probs, grad):
    weighted = grad * probs
    total = sum(weighted, axis=-1, keepdims=True)
    return (weighted - probs * total.astype(probs.dtype),)


softmax.defvjp(lambda logits: (softmax(logits),) * 2, _softmax_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def broadcast(x: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Return float32 x repeated along new leading dimensions, in `dtype`. Its gradient reduces in float32."""
    return jnp.broadcast_to(x, shape).astype(dtype)


def _broadcast_backward(shape, dtype, x_shape, grad):
    return (sum(grad.reshape(-1, *x_shape), axis=0),)


broadcast.defvjp(lambda x, *others: (broadcast(x, *others), x.shape), _broadcast_backward)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return lax.top_k(x, k): the largest numbers, in a tie the lowest index first, and their indices.

    XLA sorts all numbers. The k largest lie in the k blocks with the largest maxima: one pass and a sort of these
    blocks take 0.05 ms for float32 [8, 32128] and k = 8, down from 0.27 (on an H200, 256 rows: 0.04 ms, down from 0.13).
    """
    num_blocks = x.shape[-1] // BLOCK
    if x.shape[-1] % BLOCK or num_blocks <= k:
        values, indices = lax.top_k(x, k)
        return values, indices
    blocks = x.reshape(*x.shape[:-1], num_blocks, BLOCK)
    _, numbers = lax.top_k(blocks.max(axis=-1), k)
    numbers = jnp.sort(numbers, axis=-1)  # keeps ties in the order of their indices
    candidates = jnp.take_along_axis(blocks, numbers[..., None], axis=-2)
    values, positions = lax.top_k(candidates.reshape(*x.shape[:-1], k * BLOCK), k)
    number = jnp.take_along_axis(numbers, positions // BLOCK, axis=-1)
    return values, number * BLOCK + positions % BLOCK


# How a train step is compiled.


def kept_in_loop(x: jax.Array) -> jax.Array:
    """Return a sum over devices that XLA leaves in its loop: for TPUs, XLA fails to move a bfloat16 sum out."""
    return x if x.dtype == jnp.float32 else lax.optimization_barrier(x)


YNNPACK = 'xla_cpu_experimental_ynn_fusion_type'
PRODUCTS = 'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'  # YNNPACK computes only products
# Flags in /proc/cpuinfo of a CPU, x86 or ARM, that multiplies bfloat16.
BFLOAT16_PRODUCTS = re.compile(r'\b(avx512_bf16|amx_bf16|bf16)\b')


def compiler_options(mesh: Mesh, dtype: str) -> dict[str, str | bool]:
    """Return compiler options for a train step that computes in `dtype`. The user's XLA_FLAGS win.

    On CPUs, the XLA of JAX 0.10 gives sums and products to YNNPACK, which plans them again in every step and slows
    the loading of a program. But only YNNPACK uses a CPU's bfloat16 instructions. docs/log.md has figures.
    """
    if not is_on_cpu(mesh.abstract_mesh) or YNNPACK in os.environ.get('XLA_FLAGS', ''):
        return {}
    program = jax.jit(lambda: 0, out_shardings=NamedSharding(mesh, P())).lower()
    try:
        program.compile({YNNPACK: ''})
    except jax.errors.JaxRuntimeError:  # an XLA without this option
        return {}
    return {YNNPACK: PRODUCTS if dtype == 'bfloat16' and multiplies_bfloat16() else ''}


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16; False if unknown."""
    try:
        return BFLOAT16_PRODUCTS.search(Path('/proc/cpuinfo').read_text()) is not None
    except OSError:  # not Linux
        return False
