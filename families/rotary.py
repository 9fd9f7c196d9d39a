"""T5 with rotary positions instead of the relative position bias.

Queries and keys of self-attention are rotated by angles that grow with their positions, so that
their products depend on the distance alone. A cache holds rotated keys. Training, where all
positions of a sequence are read at once, and decoding go through the same two methods. The class
extends the attention of the family, so that it combines with grouped_heads.py.

Source: Su et al. 2021 (RoFormer) §3.4.2.
"""

import dataclasses

import jax.numpy as jnp


def rotate(x_bThK, positions_bT, theta=10_000.0):
    """Return x_bThK with its pairs of features, [K / 2] apart, rotated by their positions.

    The longest period of an angle is 2 pi * theta. Positions may be one row for all.
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
        """Cross attention has no positions and stays as it is."""

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
