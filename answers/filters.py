"""Filters of the logits, like transformers' LogitsProcessors. `decode.filtered` has the shapes."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from answers.options import Decoding
from decode import Filter
from vocabulary import Ends


def filters_of(decoding: Decoding, rows: Mapping[str, jax.Array], ends: Ends) -> list[Filter]:
    """Return transformers' filters in its order, then the user's, then the filter for stop texts."""
    num_prompt_r = 1 + (rows['prompt_bT'] > 0).sum(axis=1)  # with BOS
    eos_id = ends.answers[0]
    filters: list[Filter] = []
    if decoding.repetition_penalty != 1:
        filters.append(partial(penalize_repetition, decoding.repetition_penalty))
    if decoding.no_repeat_ngram_size:
        filters.append(partial(forbid_repeated_ngrams, decoding.no_repeat_ngram_size))
    if 'bad_words_bnW' in rows:
        filters.append(partial(forbid_words, rows['bad_words_bnW']))
    if decoding.min_length:
        filters.append(partial(forbid_early_end, ends.answers, decoding.min_length + num_prompt_r))
    if 'allowed_bnA' in rows:
        filters.append(partial(allow_only, eos_id, rows['allowed_bnA']))
    filters += decoding.filters
    if 'stop_bnW' in rows:
        filters.append(partial(end_after, eos_id, rows['stop_bnW'], num_prompt_r))
    if ends.start:
        filters = [partial(with_start, ends.start, change) for change in filters]
    return filters


def with_start(start, change, logits_rv, tokens_rT, ids_v):
    """Apply the filter `change` to tokens that begin with `start` instead of the 0 of `decode.filtered`."""
    return change(logits_rv, tokens_rT.at[:, 0].set(start), ids_v)


def penalize_repetition(penalty, logits_rv, tokens_rT, ids_v):
    """Divide positive logits of earlier tokens by `penalty`; multiply negative ones by it (CTRL §4.1)."""
    penalized_rv = jnp.where(logits_rv < 0, logits_rv * penalty, logits_rv / penalty)
    return jnp.where(among(tokens_rT, ids_v), penalized_rv, logits_rv)


def forbid_repeated_ngrams(size, logits_rv, tokens_rT, ids_v):
    """Forbid tokens that would repeat an n-gram of `size` tokens."""
    num_ngrams = max(0, tokens_rT.shape[1] - size + 1)
    newest_rt = newest(tokens_rT, size - 1)
    is_repeated_rT = jnp.ones_like(tokens_rT[:, :num_ngrams], bool)
    for i in range(size - 1):
        is_repeated_rT &= tokens_rT[:, i : i + num_ngrams] == newest_rt[:, i, None]
    last_rT = tokens_rT[:, size - 1 :]
    return forbid(logits_rv, jnp.where(is_repeated_rT, last_rT, -1), ids_v)


def forbid_early_end(end_ids, min_length_r, logits_rv, tokens_rT, ids_v):
    """Forbid end tokens before `min_length` tokens, counting BOS and prompt."""
    is_early_r1 = ((tokens_rT >= 0).sum(axis=1) < min_length_r)[:, None]
    return forbid(logits_rv, jnp.where(is_early_r1, jnp.array([end_ids]), -1), ids_v)


def forbid_words(words_rnW, logits_rv, tokens_rT, ids_v):
    """Forbid the last token of a word where it would complete the word."""
    follows_rn = ends_with(tokens_rT, words_rnW[:, :, :-1])
    return forbid(logits_rv, jnp.where(follows_rn, words_rnW[:, :, -1], -1), ids_v)


def allow_only(eos_id, answers_rnA, logits_rv, tokens_rT, ids_v):
    """Allow only tokens that continue one of the answers; if there are none, only EOS."""
    length = answers_rnA.shape[2]
    decoded_r1A = tokens_rT[:, None, 1 : 1 + length]
    begins_rn = ((decoded_r1A < 0) | (decoded_r1A == answers_rnA)).all(axis=2)
    position_r11 = jnp.clip((tokens_rT >= 0).sum(axis=1) - 1, max=length - 1)[:, None, None]
    next_rn = jnp.take_along_axis(answers_rnA, position_r11, axis=2)[..., 0]
    next_rn = jnp.where(begins_rn, next_rn, -1)
    next_rn = jnp.where((next_rn < 0).all(axis=1, keepdims=True), eos_id, next_rn)
    return jnp.where(among(next_rn, ids_v), logits_rv, -jnp.inf)


def end_after(eos_id, words_rnW, num_prompt_r, logits_rv, tokens_rT, ids_v):
    """Allow only EOS once an answer ends with one of the words; `num_prompt` tokens, with BOS, precede it."""
    is_answer_r = (tokens_rT >= 0).sum(axis=1) > num_prompt_r
    has_ended_r1 = (is_answer_r & ends_with(tokens_rT, words_rnW).any(axis=1))[:, None]
    only_eos_1v = jnp.where(ids_v == eos_id, 0.0, -jnp.inf)[None]
    return jnp.where(has_ended_r1, only_eos_1v, logits_rv)


def ends_with(tokens_rT: jax.Array, words_rnW: jax.Array) -> jax.Array:
    """Return which words each row ends with, bool [r, n]; words are padded with -1 on the left."""
    newest_r1W = newest(tokens_rT, words_rnW.shape[2])[:, None]
    return ((words_rnW == -1) | (words_rnW == newest_r1W)).all(axis=2)


def newest(tokens_rT: jax.Array, num: int) -> jax.Array:
    """Return the last `num` decoded tokens, padded with -1 on the left."""
    padded_rT = jnp.pad(tokens_rT, ((0, 0), (num, 0)), constant_values=-1)
    first_r1 = (tokens_rT >= 0).sum(axis=1, keepdims=True)
    return jnp.take_along_axis(padded_rT, first_r1 + jnp.arange(num)[None], axis=1)


def forbid(logits_rv: jax.Array, ids_rn: jax.Array, ids_v: jax.Array) -> jax.Array:
    """Set the logits of the ids to -inf; -1 is padding."""
    return jnp.where(among(ids_rn, ids_v), -jnp.inf, logits_rv)


def among(ids_rn: jax.Array, ids_v: jax.Array) -> jax.Array:
    """Return which of this device's ids are in each row of `ids_rn`, bool [r, v]; -1 is padding."""
    num_ids = ids_v.shape[0]
    index_rn = ids_rn - ids_v[0]
    index_rn = jnp.where((ids_rn < 0) | (index_rn < 0), num_ids, index_rn)
    rows_r1 = jnp.arange(ids_rn.shape[0])[:, None]
    none_rv = jnp.zeros((ids_rn.shape[0], num_ids), bool)
    return none_rv.at[rows_r1, index_rn].set(True, mode='drop')
