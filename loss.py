"""Cross entropy over a split vocabulary, as T5X defines it: z-loss, label smoothing, normalization.

It runs inside `jax.shard_map`; the suffixes of names are model.py's. Source: T5X t5x/losses.py and t5x/models.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import partition
from family import Options
from messages import Refused

# The sums from which metrics are computed.
T5X_SUMS: tuple[str, ...] = ('loss', 'z_loss', 'nats', 'weights', 'correct')
T5X_SUMS += ('encoder_tokens', 'decoder_tokens', 'encoder_examples', 'decoder_examples')
AUX = 'aux/'  # prefix of the sums of values that layers report
NORMALIZERS = ('NUM_REAL_TARGET_TOKENS', 'NUM_TOTAL_TARGET_TOKENS', 'AVERAGE_PER_SEQUENCE')


class Outputs(NamedTuple):
    """The outputs of a model for a loss."""

    logits_bTv: jax.Array  # float32, of the next target token
    encoded_bMD: jax.Array  # the encoder's outputs, in the dtype of the computation
    segments_bM: jax.Array  # 0 for padding
    aux: dict[str, jax.Array]  # {name: float32 [b]}: means over layers; {} for T5


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The settings of config.loss."""

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    loss_normalizing_factor: str = ''
    module: str = ''  # a file with its own `weighted_sums`
    options: Options | None = None  # the settings of that file
    own: 'WeightedSums | None' = None  # the file's function
    content: bytes = b''


Batch = Mapping[str, jax.Array]
WeightedSums = Callable[[Outputs, Batch, jax.Array, jax.Array, LossConfig], dict[str, jax.Array]]


def weighted_sums(
    outputs: Outputs, batch: Batch, weights_bT: jax.Array, divisor: jax.Array, settings: LossConfig
) -> dict[str, jax.Array]:
    """Return this device's share of the sums for T5X's metrics. Training minimizes 'loss'.

    `batch` has T5X's features. A sum that you add here is logged under its name, divided by 'weights'.
    """
    inputs_bM = batch['encoder_input_tokens']
    targets_bT = batch['decoder_target_tokens']
    partition.check_summed('the divisor', divisor, partition.MESH_AXES)
    loss_bT, z_loss_bT = cross_entropy(
        outputs.logits_bTv, targets_bT, settings.z_loss, settings.label_smoothing
    )
    is_correct_bT = argmax(lax.stop_gradient(outputs.logits_bTv)) == targets_bT
    return {
        'loss': (loss_bT * weights_bT).sum() / divisor,
        'z_loss': (z_loss_bT * weights_bT).sum() / divisor,
        'nats': ((loss_bT - z_loss_bT) * weights_bT).sum(),
        'correct': (is_correct_bT * weights_bT).sum(),
        'weights': weights_bT.sum(),
        'encoder_tokens': (inputs_bM > 0).sum(),
        'decoder_tokens': (targets_bT > 0).sum(),
        'encoder_examples': num_segments(batch.get('encoder_segment_ids', inputs_bM > 0)),
        'decoder_examples': num_segments(batch.get('decoder_segment_ids', targets_bT > 0)),
    }


def all_sums(
    outputs: Outputs,
    batch: Batch,
    weights_bT: jax.Array,
    divisor: jax.Array,
    settings: LossConfig,
    coefficients: Mapping[str, float],
    num_rows: int,
) -> dict[str, jax.Array]:
    """Return the `weighted_sums` of `settings`, with this device's share of the sums and losses of aux.

    An aux loss is coefficient * mean over the `num_rows` rows of the global batch, whatever divides the other losses.
    Source: T5X t5x/contrib/moe/models.py.
    """
    sums = dict((settings.own or weighted_sums)(outputs, batch, weights_bT, divisor, settings))
    assert sums.keys() >= set(T5X_SUMS), f'{settings.module}: weighted_sums must return {T5X_SUMS}'
    for name, value_b in outputs.aux.items():
        sums[f'{AUX}{name}'] = value_b.sum()
    if coefficients:
        products = [factor * sums[f'{AUX}{name}'] for name, factor in coefficients.items()]
        sums['aux_loss'] = jnp.stack(products).sum() / num_rows
        sums['loss'] += sums['aux_loss']
    for name, value in sums.items():
        partition.check_summed(f'the sum {name!r}', value, ('model',))
    return sums


def num_segments(segments_bT: jax.Array) -> jax.Array:
    """Return the number of segments in rows of segment ids, int or bool; padding is 0 or False."""
    before_bT = jnp.pad(segments_bT[:, :-1], ((0, 0), (1, 0)))
    return ((segments_bT > 0) & (segments_bT != before_bT)).sum()


def cross_entropy(
    logits_bTv: jax.Array, targets_bT: jax.Array, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Return the nats of each token: (loss with the z-term, z-term alone), float32 [b, T].

    The z-term is z_loss * log(Z)^2. Smoothed targets have 1 - label_smoothing on the target and the rest
    spread evenly over the other tokens; their entropy is subtracted, so a perfect prediction has loss 0.
    """
    log_z_bT = logsumexp(logits_bTv)
    # One device has the target's logit; the others add zero.
    size = logits_bTv.shape[-1]
    index_bT = targets_bT - lax.axis_index('model') * size
    clipped_bT1 = jnp.clip(index_bT, 0, size - 1)[..., None]
    logit_bT = jnp.take_along_axis(logits_bTv, clipped_bT1, axis=-1)[..., 0]
    partial_logit_bT = jnp.where((index_bT >= 0) & (index_bT < size), logit_bT, 0)
    loss_bT = log_z_bT - partition.psum(partial_logit_bT, 'model')
    if label_smoothing:
        vocab_size = lax.psum(size, 'model')
        on = 1.0 - label_smoothing
        off = label_smoothing / (vocab_size - 1)
        partial_all_bT = logits_bTv.sum(axis=-1)
        all_bT = vocab_size * log_z_bT - partition.psum(partial_all_bT, 'model')  # sum of -log p
        entropy = -(on * jnp.log(on) + (vocab_size - 1) * off * jnp.log(off + 1e-20))
        loss_bT = (on - off) * loss_bT + off * all_bT - entropy
    z_loss_bT = z_loss * lax.square(log_z_bT)
    return loss_bT + z_loss_bT, z_loss_bT


def parse_normalizing_factor(value: str) -> float | str:
    """Return the divisor of the sum of losses: a number, 1 for '' (T5X's None), or one of NORMALIZERS."""
    if value == '':
        return 1.0
    if value.upper() in NORMALIZERS:
        return value.upper()
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 1e-30 <= number <= 1e30:
        rule = f"use '' (the sum), a positive number, or {', '.join(NORMALIZERS)}"
        raise Refused(f'loss.loss_normalizing_factor={value!r}: {rule}')
    return number


def weights_and_divisor(
    batch: Mapping[str, jax.Array], normalizing_factor: float | str
) -> tuple[jax.Array, jax.Array]:
    """Return the loss weights [b, T] and the divisor of the weighted sum of a batch's losses, float32."""
    weights_bT = batch['decoder_loss_weights'].astype(jnp.float32)
    if isinstance(normalizing_factor, float):
        return weights_bT, jnp.float32(normalizing_factor)
    if normalizing_factor == 'NUM_TOTAL_TARGET_TOKENS':
        return weights_bT, jnp.float32(lax.psum(weights_bT.size, partition.BATCH_AXES))
    if normalizing_factor == 'AVERAGE_PER_SEQUENCE':
        # Divide by the sum over the sequence: all sequences then weigh the same.
        ones_bT = jnp.ones_like(batch['decoder_target_tokens'])  # not packed: one sequence a row
        segments_bT = batch.get('decoder_segment_ids', ones_bT)
        is_same_bTM = segments_bT[:, :, None] == segments_bT[:, None]
        is_same_bTM &= (segments_bT > 0)[..., None]
        sums_bT = jnp.where(is_same_bTM, weights_bT[:, None], 0.0).sum(axis=-1)
        weights_bT = weights_bT / jnp.where(sums_bT > 0, sums_bT, jnp.inf)
    divisor = partition.psum(weights_bT.sum(), partition.BATCH_AXES)
    return weights_bT, jnp.where(divisor > 0, divisor, 1.0)  # all weights may be 0


# Reductions over the vocabulary, the last dimension, split over 'model'.


def logsumexp(x: jax.Array) -> jax.Array:
    """Return log(sum(exp(x))) over the vocabulary."""
    max_value = lax.pmax(lax.stop_gradient(x).max(axis=-1), 'model')
    partial_sum = jnp.exp(x - max_value[..., None]).sum(axis=-1)
    return jnp.log(partition.psum(partial_sum, 'model')) + max_value


def argmax(x: jax.Array) -> jax.Array:
    """Return the id of the largest value, int32; the lowest id wins a tie."""
    size = x.shape[-1]
    # Two vectorized passes. On CPUs, lax.argmax takes three times as long.
    ids = lax.axis_index('model') * size + lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    is_largest = x == lax.pmax(x.max(axis=-1), 'model')[..., None]
    return lax.pmin(jnp.where(is_largest, ids, lax.psum(size, 'model')).min(axis=-1), 'model')
