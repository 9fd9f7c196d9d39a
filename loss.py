"""Cross entropy over a split vocabulary, as T5X defines it: z-loss, label smoothing, normalization.

Runs inside `jax.shard_map`; the suffixes are model.py's. Source: T5X t5x/losses.py and t5x/models.py.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import partition

NORMALIZERS = ('NUM_REAL_TARGET_TOKENS', 'NUM_TOTAL_TARGET_TOKENS', 'AVERAGE_PER_SEQUENCE')


def cross_entropy(
    logits_bTv: jax.Array, targets_bT: jax.Array, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Nats per token: (loss including the z-term, z-term alone), float32 [b, T], whole over 'model'. The
    z-term is z_loss * log(Z)^2. Smoothed targets hold 1 - label_smoothing on the target, the rest evenly on
    the others; their own entropy is subtracted, so a perfect prediction costs zero."""
    v = logits_bTv.shape[-1]
    max_bT1 = lax.pmax(lax.stop_gradient(logits_bTv).max(axis=-1, keepdims=True), 'model')
    partial_sum_bT = jnp.exp(logits_bTv - max_bT1).sum(axis=-1)
    log_z_bT = jnp.log(lax.psum(partial_sum_bT, 'model')) + max_bT1[..., 0]

    own_bT1 = (targets_bT - lax.axis_index('model') * v)[..., None]
    here_bT1 = (own_bT1 >= 0) & (own_bT1 < v)
    own_logit_bT1 = jnp.take_along_axis(logits_bTv, jnp.clip(own_bT1, 0, v - 1), axis=-1)
    partial_target_bT = jnp.where(here_bT1, own_logit_bT1, 0.0)[..., 0]
    loss_bT = log_z_bT - lax.psum(partial_target_bT, 'model')  # one device has it, the others add 0
    if label_smoothing:
        vocab_size = lax.psum(v, 'model')
        on, off = 1.0 - label_smoothing, label_smoothing / (vocab_size - 1)
        all_bT = vocab_size * log_z_bT - lax.psum(logits_bTv.sum(axis=-1), 'model')  # sum of -log p
        entropy = -(on * jnp.log(on) + (vocab_size - 1) * off * jnp.log(off + 1e-20))
        loss_bT = (on - off) * loss_bT + off * all_bT - entropy
    z_loss_bT = z_loss * lax.square(log_z_bT)
    return loss_bT + z_loss_bT, z_loss_bT


def is_correct(logits_bTv: jax.Array, targets_bT: jax.Array) -> jax.Array:
    """Whether the largest logit, the lowest id among equals, is the target's; bool [b, T]."""
    return partition.argmax(lax.stop_gradient(logits_bTv), 'model') == targets_bT


def parse_normalizing_factor(value: str) -> float | str:
    """What to divide the sum by: '' (1, T5X's None), a number, or one of NORMALIZERS in any case."""
    try:
        number = float(value or 1)
    except ValueError:
        number = 0.0
    if value.upper() not in NORMALIZERS and not 1e-30 <= number <= 1e30:
        names = ', '.join(NORMALIZERS)
        raise ValueError(
            f"loss.loss_normalizing_factor={value!r}: use '' (the sum), a positive, finite number, or {names}"
        )
    return number or value.upper()


def weights_and_divisor(
    batch: Mapping[str, jax.Array], normalizing_factor: float | str
) -> tuple[jax.Array, jax.Array]:
    """Loss weights [b, T] and what their sum is divided by, a scalar whole over 'data'; float32."""
    weights_bT = batch['decoder_loss_weights'].astype(jnp.float32)
    if isinstance(normalizing_factor, float):
        return weights_bT, jnp.float32(normalizing_factor)
    if normalizing_factor == 'NUM_TOTAL_TARGET_TOKENS':
        return weights_bT, jnp.float32(lax.psum(weights_bT.size, 'data'))
    if normalizing_factor == 'AVERAGE_PER_SEQUENCE':
        ones = jnp.ones_like(batch['decoder_target_tokens'])  # not packed: a row is a sequence
        segments_bT = batch.get('decoder_segment_ids', ones)
        same_bTM = (segments_bT[:, :, None] == segments_bT[:, None]) & (segments_bT > 0)[..., None]
        sums_bT = jnp.where(same_bTM, weights_bT[:, None], 0.0).sum(axis=-1)
        weights_bT = jnp.where(sums_bT > 0, weights_bT / jnp.where(sums_bT > 0, sums_bT, 1.0), 0.0)
    return weights_bT, lax.psum(weights_bT.sum(), 'data')


def weighted_sums(logits_bTv, batch, weights_bT, divisor, config: Any) -> dict[str, jax.Array]:
    """This device's share of the sums that T5X's metrics are made of; 'loss' is what is minimized. `batch`:
    T5X's features; `weights_bT`, `divisor`: of weights_and_divisor; `config`: z_loss, label_smoothing."""
    targets_bT = batch['decoder_target_tokens']
    loss_bT, z_loss_bT = cross_entropy(
        logits_bTv, targets_bT, config.z_loss, config.label_smoothing
    )
    return {
        'loss': (loss_bT * weights_bT).sum() / divisor,
        'z_loss': (z_loss_bT * weights_bT).sum() / divisor,
        'nats': ((loss_bT - z_loss_bT) * weights_bT).sum(),
        'correct': (is_correct(logits_bTv, targets_bT) * weights_bT).sum(),
        'weights': weights_bT.sum(),
        'encoder_tokens': (batch['encoder_input_tokens'] > 0).sum(),
        'decoder_tokens': (targets_bT > 0).sum(),
    }
