"""One device's computation, inside `jax.shard_map`. model.py and decode.py define the suffixes."""

import re
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

import decode
import loss
import model
from answers.filters import filters_of
from answers.options import Decoding
from model import T5Config
from vocabulary import Ends

Batch = Mapping[str, jax.Array]
Parameters = Mapping[str, jax.Array]

LOGITS_KERNEL = 'decoder/logits_dense/kernel'
# The kernels that a decoding step uses: all but the inputs' keys and values.
STEP_KERNELS = (
    r'decoder/(layers_\d+/(?!encoder_decoder_attention/(key|value)/).+|logits_dense)/kernel'
)


def logits(config: T5Config, params: Parameters, batch: Batch) -> jax.Array:
    # Without segments, padding would be allowed only at the ends of rows.
    segments = {
        'encoder_segment_ids': jnp.ones_like(batch['encoder_input_tokens']),
        'decoder_segment_ids': jnp.ones_like(batch['decoder_target_tokens']),
    }
    return model.apply(model.logits, params, config, {**segments, **batch})[0]


def scores(config: T5Config, params: Parameters, batch: Batch) -> jax.Array:
    logits_bTv = logits(config, params, batch)
    targets_bT = batch['decoder_target_tokens']
    nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
    return -(nats_bT * (targets_bT > 0)).sum(axis=-1)


def encodings(config: T5Config, params: Parameters, batch: Batch) -> jax.Array:
    inputs_bM = batch['encoder_input_tokens']
    encoded_bMD, _, _ = model.apply(
        model.encode, params, config, inputs_bM, None, None, None, batch
    )
    encoded_bMD = encoded_bMD[:, -inputs_bM.shape[1] :]  # without a learned prompt
    return jnp.where(inputs_bM[..., None] > 0, encoded_bMD.astype(jnp.float32), 0)


def answers(
    config: T5Config, decoding: Decoding, ends: Ends, params: Parameters, batch: Batch
) -> tuple[jax.Array, jax.Array | None]:
    """Return tokens_bnT and scores_bn, best last; None for the scores of samples without `return_scores`.

    `batch` has inputs_bM, prompt_bT, lengths_b; temperature_b, seed_b and example_b for samples; and the arrays of
    `batches.numbers_of` and `words.words_of`.
    """
    num_decodes = decoding.num_decodes
    has_beams = decoding.beam_size > 1

    def step(tokens_r: jax.Array, cache: decode.Cache) -> tuple[jax.Array, decode.Cache]:
        return model.apply(model.decode_step, params, config, tokens_r, cache)

    inputs_bM = batch['inputs_bM']
    cache = model.apply(
        model.start_decoding, params, config, inputs_bM, num_decodes, has_beams, batch
    )
    rows = {name: jnp.repeat(x, num_decodes, axis=0) for name, x in batch.items()}
    filters = filters_of(decoding, rows, ends)
    if has_beams:
        return decode.beam_search(
            step,
            decode.reorder_beams,
            cache,
            batch['prompt_bT'],
            batch['lengths_b'],
            num_beams=num_decodes,
            alpha=decoding.alpha,
            end_ids=ends.answers,
            grow=decode.grow_cache,
            filters=filters,
        )
    choose: decode.Choose = decode.most_likely
    if 'seed_b' in rows:
        keys_r = jax.vmap(jax.random.key)(rows['seed_b'])
        for number_r in (rows['example_b'], jnp.arange(len(keys_r)) % num_decodes):
            keys_r = jax.vmap(jax.random.fold_in)(keys_r, number_r)
        limits = (decoding.top_k, decoding.top_p, decoding.min_p)
        choose = decode.random_tokens(keys_r, rows['temperature_b'], *limits)
    prompt_rT = rows['prompt_bT']
    tokens_rT, scores_r = decode.sample(
        step,
        cache,
        prompt_rT,
        rows['lengths_b'],
        choose,
        end_ids=ends.answers,
        grow=decode.grow_cache,
        filters=filters,
    )
    tokens_bnT = tokens_rT.reshape(-1, num_decodes, prompt_rT.shape[1])
    scores_bn = scores_r.reshape(-1, num_decodes)
    if num_decodes > 1:
        scores_bn, order_bn = decode.best_last(scores_bn, num_decodes)
        tokens_bnT = decode.pick(tokens_bnT, order_bn)
    if not decoding.return_scores:
        return tokens_bnT, None  # XLA then computes no scores
    return tokens_bnT, scores_bn


def step_kernels(config: T5Config, paths: Iterable[str]) -> dict[str, str]:
    """Return {path: dtype} of the kernels that a decoding step uses; {} if some may not be `Kernel`s."""
    if config.module or config.lora_rank:
        return {}
    dtypes = {path: config.dtype for path in paths if re.fullmatch(STEP_KERNELS, path)}
    if LOGITS_KERNEL in dtypes:
        dtypes[LOGITS_KERNEL] = config.logits_dtype
    return dtypes
