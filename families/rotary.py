"""T5 with rotary positions instead of the relative position bias.

Self-attention rotates queries and keys by angles proportional to their positions, so their products
depend only on the distance. A cache holds rotated keys. Training and decoding use the same two methods.
The class extends the family's attention, so it combines with grouped_heads.py.

Source: Su et al. 2021 (RoFormer) §3.4.2.
"""

import dataclasses

import jax.numpy as jnp


def rotate(x_bThK, positions_bT, theta=10_000.0):
    """Rotate each pair of features, K / 2 apart, by an angle that depends on the position.

    The longest period is 2 pi * theta. Positions may be one row for all.
    """
    half = x_bThK.shape[-1] // 2
    frequencies_k = theta ** -(jnp.arange(half) / half)
    angles_bT1k = positions_bT[:, :, None, None] * frequencies_k[None, None, None]
    cos = jnp.cos(angles_bT1k).astype(x_bThK.dtype)
    sin = jnp.sin(angles_bT1k).astype(x_bThK.dtype)
    left, right = jnp.split(x_bThK, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def no_bias(config, bidirectional, name):
    return lambda positions: None


def modules(family):
    class Attention(family.parts.attention):
        """Cross-attention has no positions and does not change."""

        def queries(self, x_bTD, positions):
            q_bThK = super().queries(x_bTD, positions)
            if positions is None:
                return q_bThK
            return rotate(q_bThK, positions.queries_T[None])

        def keys_values(self, memory_bMD, positions):
            k_bMhK, v_bMhK = super().keys_values(memory_bMD, positions)
            if positions is None:
                return k_bMhK, v_bMhK
            return rotate(k_bMhK, positions.queries_T[None]), v_bMhK

    parts = dataclasses.replace(family.parts, attention=Attention, relpos_bias=no_bias)
    return dataclasses.replace(family, parts=parts)
