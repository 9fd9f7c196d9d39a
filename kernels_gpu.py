"""Skip this file: forms for NVIDIA GPUs that move fewer bytes. Each equals the plain form that its docstring names.

kernels.py decides where they are used. The suffixes are model.py's. docs/log.md has figures.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kernels

# The digits of a segment's number, in base 8, as points on a circle: all exact in bfloat16, and a point times itself is
# at least 132 more than a point times another one.
POINTS = ((22, 0), (16, 16), (0, 22), (-16, 16), (-22, 0), (-16, -16), (0, -22), (16, -16))


def attention(
    q_bThK: jax.Array,
    k_bhKM: jax.Array,
    v_bhKM: jax.Array,
    relpos_1hTM: jax.Array | None,
    queries_bT: jax.Array,
    keys_bM: jax.Array,
    causal: bool,
    implementation: Literal['cudnn', 'xla'] = 'cudnn',
) -> jax.Array:
    """Return heads_bThK as model.Attention.attend does, without arrays of [b, h, T, M].

    For bool segments, rows with padding at their ends, cuDNN takes the lengths. It supports no other segments: for
    these, queries and keys are extended by codes of their segments, so that keys of other segments have negligible
    weights. Queries without keys in their segment, such as padding, see other keys than in the plain form.
    """
    head_dim = q_bThK.shape[-1]
    k_bMhK = k_bhKM.transpose(0, 3, 1, 2)
    v_bMhK = v_bhKM.transpose(0, 3, 1, 2)
    lengths_b: tuple = (None, None)  # queries and keys
    if queries_bT.dtype == keys_bM.dtype == bool:
        lengths_b = (num_tokens(queries_bT), num_tokens(keys_bM))
    else:
        num_digits = 4 if keys_bM.shape[1] < 8**4 else 8  # keeps the head size divisible by 8
        q_bThK = with_codes(q_bThK, queries_bT, num_digits)
        k_bMhK = with_codes(k_bMhK, keys_bM, num_digits)
        v_bMhK = jnp.pad(v_bMhK, ((0, 0), (0, 0), (0, 0), (0, 2 * num_digits)))
    if relpos_1hTM is not None:
        # If devices share the bias, JAX would take cuDNN's local gradient for their sum, without a psum.
        q_bThK, relpos_1hTM = kernels.vary_alike(q_bThK, relpos_1hTM)
        relpos_1hTM = relpos_1hTM.astype(q_bThK.dtype)
    heads_bThK = jax.nn.dot_product_attention(
        q_bThK,
        k_bMhK,
        v_bMhK,
        relpos_1hTM,
        scale=1.0,
        is_causal=causal,
        query_seq_lengths=lengths_b[0],
        key_value_seq_lengths=lengths_b[1],
        implementation=implementation,
    )
    return heads_bThK[..., :head_dim]


def num_tokens(is_token_bT: jax.Array) -> jax.Array:
    """Return the number of tokens in each row, at least 1: a softmax over no keys is NaN."""
    return jnp.maximum(is_token_bT.sum(axis=1, dtype=jnp.int32), 1)


def with_codes(x_bThK: jax.Array, segments_bT: jax.Array, num_digits: int) -> jax.Array:
    """Return queries or keys with the points of their segments, [b, T, h, K + 2 * num_digits]."""
    digits_bTd = segments_bT[..., None] // 8 ** np.arange(num_digits)[None, None] % 8
    shape = (*x_bThK.shape[:3], 2 * num_digits)
    codes_bT1C = jnp.array(POINTS, x_bThK.dtype)[digits_bTd].reshape(*shape[:2], 1, shape[3])
    return jnp.concatenate([x_bThK, jnp.broadcast_to(codes_bT1C, shape)], axis=-1)


def recomputed(f: Callable) -> Callable:
    """Return f, a cheap function of arrays; on Hopper, its gradient keeps only the arrays.

    Without barriers, XLA also keeps intermediate arrays; it would merge equal barriers, so the two differ. The barrier
    of jax.checkpoint also includes the gradient of the result, which is then written once more.
    """
    return without_residuals(f) if kernels.is_on_hopper() else f


def without_residuals(f: Callable) -> Callable:
    @jax.custom_vjp
    def g(*arrays):
        return f(*[lax.optimization_barrier(x) for x in arrays])

    def backward(arrays, grad):
        return jax.vjp(f, *lax.optimization_barrier(arrays))[1](grad)

    g.defvjp(lambda *arrays: (g(*arrays), arrays), backward)
    return g
