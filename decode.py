"""Decoding over any step `(tokens_r, cache) -> (logits_rv, cache)`, of this model or of another.

`sample` takes one token at a time, the most likely one or a random one; `beam_search` keeps the best sequences. Filters
modify the logits before either one chooses. All run inside `jax.shard_map`. The suffixes are model.py's and

    n  decodes of one example: samples or beams
    r  rows, b * n of them; the rows of one example are adjacent
    c  candidates of a step of beam search, 2 * n of them if one token ends a sequence
    g  groups of rows that share a cache of targets: a row, or the n beams of an example
    S  slots of a cache, position * n + beam, or the positions of the inputs

`cache` is any pytree; `Cache` is model.py's. Source: T5X t5x/decoding.py.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

import kernels
import loss
import partition

EOS_ID = 1  # T5's
MASKED = -1e7  # T5X's logit of a token never taken, and its score of a missing sequence
MISSING = MASKED / 100  # missing beams score below it: the brevity penalty divides MASKED
MIN_TEMPERATURE = 1e-4  # at or below this, take the most likely token
FIRST_ROOM = 64  # tokens of the first cache

C = TypeVar('C')  # a cache
Step = Callable[[jax.Array, C], tuple[jax.Array, C]]
Choose = Callable[[jax.Array, jax.Array], jax.Array]  # (logits_rv, position) -> the next tokens_r
Filter = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # see `filtered`
Grow = Callable[[C, int], C]  # (cache, room) -> a cache with room for `room` tokens


class SampleState(NamedTuple, Generic[C]):
    position: jax.Array  # int32: position of the next token
    running_r: jax.Array  # bool: the row has not ended
    tokens_r: jax.Array  # int32: the newest token of each row, BOS (0) at first
    output_rT: jax.Array  # int32
    scores_r: jax.Array  # float32: log-probability of the chosen tokens
    cache: C


def most_likely(logits_rv: jax.Array, position: jax.Array) -> jax.Array:
    """Choose the token with the largest logit; the lowest id wins a tie."""
    return loss.argmax(logits_rv)


def random_tokens(
    keys_r: jax.Array,
    temperature_r: jax.Array,
    top_k: int = 0,
    top_p: float = 0.0,
    min_p: float = 0.0,
) -> Choose:
    """Return a function that chooses a random token among the tokens that `keep_largest` keeps.

    A row whose temperature is at most MIN_TEMPERATURE takes the most likely token. Differs from T5X:
    each row has its own key, so its tokens depend neither on other rows nor on the mesh.
    """

    def choose(logits_rv: jax.Array, position: jax.Array) -> jax.Array:
        scaled_rv = logits_rv / jnp.maximum(temperature_r, MIN_TEMPERATURE)[:, None]
        scaled_rv = keep_largest(scaled_rv, top_k, top_p, min_p)
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys_r, position)
        vocab_size = lax.psum(logits_rv.shape[1], 'model')
        noise_rV = jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))(keys)
        noisy_rv = scaled_rv + partition.own_slice(noise_rV, 'model', 1)
        is_random_r1 = (temperature_r > MIN_TEMPERATURE)[:, None]
        return loss.argmax(jnp.where(is_random_r1, noisy_rv, logits_rv))

    return choose


def sample(
    step: Step[C],
    cache: C,
    prompt_rT: jax.Array,
    lengths_r: jax.Array,
    choose: Choose = most_likely,
    end_ids: Sequence[int] = (EOS_ID,),
    grow: Grow[C] = lambda cache, room: cache,
    filters: Sequence[Filter] = (),
) -> tuple[jax.Array, jax.Array]:
    """Return the tokens of each row, int32 [r, T], and their scores, float32 [r]. This is T5X's temperature_sample.

    A row begins with the tokens of `prompt` that are not 0; an EOS among them does not end it. It ends with one of
    `end_ids` or after `lengths` tokens; zeros follow. Its score is the sum of the model's log-probabilities of the
    tokens after the prompt. Differs from T5X: scores ignore temperature, top_k, top_p (rescale_log_probs) and filters.
    """

    def next_state(state: SampleState[C]) -> SampleState[C]:
        logits_rv, cache = step(state.tokens_r, state.cache)
        filtered_rv = filtered(filters, logits_rv, state.output_rT, state.position)
        chosen_r = choose(filtered_rv, state.position)
        nats_r, _ = loss.cross_entropy(logits_rv, chosen_r)
        forced_r = prompt_rT[:, state.position]
        is_free_r = forced_r == 0
        tokens_r = jnp.where(is_free_r, chosen_r, forced_r)
        tokens_r = jnp.where(state.running_r, tokens_r, 0)
        has_ended_r = jnp.isin(tokens_r, jnp.array(end_ids)) & is_free_r
        return SampleState(
            position=state.position + 1,
            running_r=state.running_r & ~has_ended_r & (state.position + 1 < lengths_r),
            tokens_r=tokens_r,
            output_rT=state.output_rT.at[:, state.position].set(tokens_r),
            scores_r=state.scores_r + jnp.where(state.running_r & is_free_r, -nats_r, 0.0),
            cache=cache,
        )

    bos_r = jnp.zeros_like(prompt_rT[:, 0])
    start = SampleState(
        position=jnp.int32(0),
        running_r=lengths_r > 0,
        tokens_r=bos_r,
        output_rT=jnp.zeros_like(prompt_rT),
        scores_r=bos_r.astype(jnp.float32),
        cache=cache,
    )
    end = run(next_state, lambda state: state.running_r, start, prompt_rT.shape[1], grow)
    return end.output_rT, end.scores_r


class BeamState(NamedTuple, Generic[C]):
    """The state of `beam_search`. The best beam and the best finished sequence are last."""

    position: jax.Array  # int32: position of the next token
    tokens_bn: jax.Array  # int32: the newest token of each beam, BOS (0) at first
    live_bnT: jax.Array  # int32: the beams
    live_log_probs_bn: jax.Array  # float32
    finished_bnT: jax.Array  # int32: the best sequences that end with EOS
    finished_scores_bn: jax.Array  # float32, MASKED where there is none
    cache: C


def beam_search(
    step: Step[C],
    reorder: Callable[[C, jax.Array], C],
    cache: C,
    prompt_bT: jax.Array,
    lengths_b: jax.Array,
    num_beams: int,
    alpha: float,
    end_ids: Sequence[int] = (EOS_ID,),
    grow: Grow[C] = lambda cache, room: cache,
    filters: Sequence[Filter] = (),
) -> tuple[jax.Array, jax.Array]:
    """Return the best sequences, int32 [b, n, T], and their scores, float32 [b, n]; the best is last.

    `reorder(cache, parents_bn)` gives each beam its parent's part of the cache; parents are 0 to n - 1. A score is the
    log-probability of a sequence divided by `brevity_penalty` of its length with EOS; one near MASKED marks a missing
    sequence. If no sequence has ended, return the beams and their log-probabilities. An example ends when no beam can
    beat its finished sequences. Prompt and lengths are as in `sample`. This is T5X's beam_search.
    """
    num_examples, length = prompt_bT.shape
    num_candidates = (1 + len(end_ids)) * num_beams  # n survive
    longest_penalty_b = brevity_penalty(alpha, lengths_b + 1)  # T5X counts BOS here

    def is_running(state: BeamState[C]) -> jax.Array:
        best_possible_b = state.live_log_probs_bn[:, -1] / longest_penalty_b
        can_improve_b = state.finished_scores_bn.min(axis=1) <= best_possible_b
        return can_improve_b & (state.position < lengths_b)

    def next_state(state: BeamState[C]) -> BeamState[C]:
        logits_rv, cache = step(state.tokens_bn.reshape(-1), state.cache)
        normalizer_r1 = loss.logsumexp(logits_rv)[:, None]
        if filters:
            live_rT = state.live_bnT.reshape(-1, length)
            logits_rv = filtered(filters, logits_rv - normalizer_r1, live_rT, state.position)
            normalizer_r1 = jnp.zeros_like(normalizer_r1)
        # The best continuations of each beam, then of each example, best first.
        best_rk, tokens_rk = top_k(logits_rv, num_candidates)
        best_rk = best_rk - normalizer_r1 + state.live_log_probs_bn.reshape(-1, 1)
        num_best = best_rk.shape[1]  # fewer than c if the vocabulary is small
        log_probs_bc, index_bc = lax.top_k(best_rk.reshape(num_examples, -1), num_candidates)
        tokens_bc = pick(tokens_rk.reshape(num_examples, -1), index_bc)
        # A token of the prompt is the only continuation, and only of one beam.
        forced_b1 = prompt_bT[:, state.position][:, None]
        in_prompt_1c = jnp.where(jnp.arange(num_candidates) == 0, 0.0, MASKED)[None]
        log_probs_bc = jnp.where(forced_b1 > 0, in_prompt_1c, log_probs_bc)
        tokens_bc = jnp.where(forced_b1 > 0, forced_b1, tokens_bc)
        parents_bc = index_bc // num_best
        candidates_bcT = pick(state.live_bnT, parents_bc)
        candidates_bcT = candidates_bcT.at[:, :, state.position].set(tokens_bc)

        is_finished_bc = jnp.isin(tokens_bc, jnp.array(end_ids)) & (forced_b1 == 0)
        live_log_probs_bc = log_probs_bc + jnp.where(is_finished_bc, MASKED, 0.0)
        live_log_probs_bn, live_bn = best_last(live_log_probs_bc, num_beams)

        scores_bc = log_probs_bc / brevity_penalty(alpha, state.position + 1)
        scores_bc = scores_bc + jnp.where(is_finished_bc, 0.0, MASKED)
        all_scores = jnp.concatenate([state.finished_scores_bn, scores_bc], axis=1)
        finished_scores_bn, best_bn = best_last(all_scores, num_beams)
        all_finished = jnp.concatenate([state.finished_bnT, candidates_bcT], axis=1)
        finished_bnT = pick(all_finished, best_bn)

        run_b1 = is_running(state)[:, None]
        run_b11 = run_b1[..., None]
        return BeamState(
            position=state.position + 1,
            tokens_bn=pick(tokens_bc, live_bn),
            live_bnT=jnp.where(run_b11, pick(candidates_bcT, live_bn), state.live_bnT),
            live_log_probs_bn=jnp.where(run_b1, live_log_probs_bn, state.live_log_probs_bn),
            finished_bnT=jnp.where(run_b11, finished_bnT, state.finished_bnT),
            finished_scores_bn=jnp.where(run_b1, finished_scores_bn, state.finished_scores_bn),
            cache=reorder(cache, pick(parents_bc, live_bn)),
        )

    zeros_bnT = jnp.zeros_like(prompt_bT, shape=(num_examples, num_beams, length))
    bos_bn = zeros_bnT[:, :, 0]
    masked_bn = bos_bn.astype(jnp.float32) + MASKED
    start = BeamState(
        position=jnp.int32(0),
        tokens_bn=bos_bn,
        live_bnT=zeros_bnT,
        live_log_probs_bn=masked_bn.at[:, 0].set(0.0),  # the beams are equal: one counts
        finished_bnT=zeros_bnT,
        finished_scores_bn=masked_bn,
        cache=cache,
    )
    end = run(next_state, is_running, start, length, grow)
    any_finished_b1 = (end.finished_scores_bn > MASKED).any(axis=1)[:, None]
    sequences_bnT = jnp.where(any_finished_b1[..., None], end.finished_bnT, end.live_bnT)
    scores_bn = jnp.where(any_finished_b1, end.finished_scores_bn, end.live_log_probs_bn)
    return sequences_bnT, scores_bn


State = TypeVar('State', SampleState, BeamState)


def run(
    next_state: Callable[[State], State],
    running_rows: Callable[[State], jax.Array],
    state: State,
    length: int,
    grow: Grow,
) -> State:
    """Return the state after all rows have ended, or all `length` positions are taken.

    The cache grows to 64, 128, ... `length` tokens, so a step reads at most twice as many slots as needed.
    """

    def is_running(state: State) -> jax.Array:
        # All devices leave the loop together: a step may have collectives over any axis.
        num_running = lax.psum(running_rows(state).sum(), partition.BATCH_AXES)
        partition.check_summed('the number of running rows', num_running, partition.BATCH_AXES)
        return (state.position < length) & (num_running > 0)

    if length % 2 == 0 and length > FIRST_ROOM:
        state = run(next_state, running_rows, state, length // 2, grow)
    state = state._replace(cache=grow(state.cache, length))
    return lax.while_loop(is_running, next_state, state)


def brevity_penalty(alpha: float, length: jax.Array) -> jax.Array:
    """Return T5X's divisor of the log-probability of a sequence of `length` tokens."""
    return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** alpha


def best_last(scores: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """Return the `num` best scores of each example, the best last, and their indices."""
    best, index = lax.top_k(scores, num)
    return best[:, ::-1], index[:, ::-1]


def top_k(logits_rv: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the k largest logits of each row, or all, in `lax.top_k`'s order, and their ids, both [r, k]."""
    local_rk, ids_rk = kernels.top_k(logits_rv, min(k, logits_rv.shape[1]))
    ids_rk = ids_rk + lax.axis_index('model') * logits_rv.shape[1]
    all_rk = lax.all_gather(local_rk, 'model', axis=1, tiled=True, to='invarying')
    ids_rk = lax.all_gather(ids_rk, 'model', axis=1, tiled=True, to='invarying')
    # Equal logits are ordered by id here, and lax.top_k takes the first.
    best_rk, index_rk = lax.top_k(all_rk, min(k, all_rk.shape[1]))
    return best_rk, pick(ids_rk, index_rk)


def pick(x: jax.Array, index_bn: jax.Array) -> jax.Array:
    """Return x[b, index[b, n], ...]."""
    index = index_bn.reshape(*index_bn.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)


def keep_largest(logits_rv: jax.Array, top_k: int, top_p: float, min_p: float = 0.0) -> jax.Array:
    """Return the logits with MASKED for all but the `top_k` most likely tokens.

    Among these, `top_p` keeps the fewest tokens with this total probability; then `min_p` keeps tokens with at least
    this share of the most likely token's probability. 0 keeps all.
    """
    if top_k:
        is_kept_rv = are_largest(logits_rv, jnp.ones_like(logits_rv, jnp.int32), top_k)
        logits_rv = jnp.where(is_kept_rv, logits_rv, MASKED)
    if top_p:
        probs_rv = jnp.exp(logits_rv - loss.logsumexp(logits_rv)[:, None])
        logits_rv = jnp.where(are_largest(probs_rv, probs_rv, top_p), logits_rv, MASKED)
    if min_p:
        probs_rv = jnp.exp(logits_rv - loss.logsumexp(logits_rv)[:, None])
        largest_r1 = lax.pmax(probs_rv.max(axis=1, keepdims=True), 'model')
        logits_rv = jnp.where(probs_rv >= min_p * largest_r1, logits_rv, MASKED)
    return logits_rv


def are_largest(x_rv: jax.Array, weights_rv: jax.Array, enough: float) -> jax.Array:
    """Return whether each x reaches its row's highest threshold above which the weights sum to `enough`, bool [r, v].

    All do if none exists. Bisecting the threshold's bits takes 32 sums over the split vocabulary, and no sorting (T5X
    t5x/binary_search.py).
    """
    # Integers in the order of the floats: without the XOR, negative floats are in reverse order.
    bits_rv = lax.bitcast_convert_type(x_rv, jnp.int32)
    order_rv = jnp.where(bits_rv < 0, bits_rv ^ 0x7FFFFFFF, bits_rv)

    def next_bit(i: jax.Array, threshold_r1: jax.Array) -> jax.Array:
        # The first bit is the sign: added to the smallest integer, it gives 0.
        higher_r1 = threshold_r1 + lax.shift_left(jnp.int32(1), 31 - i.astype(jnp.int32))
        above_rv = jnp.where(order_rv >= higher_r1, weights_rv, 0)
        sum_r1 = partition.psum(above_rv.sum(axis=1, keepdims=True), 'model')
        return jnp.where(sum_r1 >= enough, higher_r1, threshold_r1)

    largest_r1 = lax.pmax(order_rv.max(axis=1, keepdims=True), 'model')
    smallest_r1 = jnp.full_like(largest_r1, jnp.iinfo(jnp.int32).min)
    threshold_r1 = lax.fori_loop(0, 32, next_bit, smallest_r1)
    partition.check_summed('the threshold', threshold_r1, ('model',))
    return order_rv >= threshold_r1


def filtered(
    filters: Sequence[Filter], logits_rv: jax.Array, output_rT: jax.Array, position: jax.Array
) -> jax.Array:
    """Return the logits for `position` after all filters, one after the other.

    A filter is a pure function (logits_rv, tokens_rT, ids_v) -> logits_rv. tokens_rT, int32, begins with BOS (0) and
    has -1 at positions not decoded yet. ids_v, int32, has the ids of this device's slice of the vocabulary.
    """
    if not filters:
        return logits_rv
    vocab_size = lax.psum(logits_rv.shape[1], 'model')
    ids_v = partition.own_slice(jnp.arange(vocab_size, dtype=jnp.int32), 'model', 0)
    tokens_rT = jnp.pad(output_rT, ((0, 0), (1, 0)))
    is_decoded_1T = (jnp.arange(tokens_rT.shape[1]) <= position)[None]
    tokens_rT = jnp.where(is_decoded_1T, tokens_rT, -1)
    for change in filters:
        logits_rv = change(logits_rv, tokens_rT, ids_v)
    return logits_rv


# A cache of keys and values, for groups of rows that decode together, such as the beams of an example.


class KeysValues(NamedTuple):
    """Keys and values read in decoding. Slots are last, so products need no copy."""

    keys_ghKS: jax.Array
    values_ghKS: jax.Array

    def write(self, new: 'KeysValues', slot: jax.Array | int) -> 'KeysValues':
        write = partial(lax.dynamic_update_slice_in_dim, start_index=slot, axis=3)
        return jax.tree.map(write, self, new)


class LayerCache(NamedTuple):
    """Keys and values of a decoder layer; None in training. T5X recomputes the inputs' keys and values in each step."""

    targets: KeysValues | None = None  # the tokens read so far, with room for more
    inputs: KeysValues | None = None  # the encoded inputs


class Cache(NamedTuple):
    length: jax.Array  # int32: the tokens read so far, and the position of the next one
    mask_b11M: jax.Array  # bool: False for padding of the inputs
    # int32, writers[g, n, m]: the beam that wrote position m of beam n's current sequence. Reordering
    # beams changes these numbers alone.
    writers_gnM: jax.Array
    layers: tuple[LayerCache, ...]


def empty_cache(
    inputs: Iterable[KeysValues], mask_b11M: jax.Array, num_groups: int, num_beams: int
) -> Cache:
    """Return a cache with the keys and values of the inputs for each layer, and no room for tokens."""

    def empty(x_bhKM: jax.Array) -> jax.Array:
        return jnp.zeros_like(x_bhKM, shape=(num_groups, *x_bhKM.shape[1:3], 0))

    layers = [LayerCache(jax.tree.map(empty, memory), memory) for memory in inputs]
    writers_gnM = jnp.zeros_like(mask_b11M, jnp.int32, (num_groups, num_beams, 0))
    return Cache(jnp.int32(0), mask_b11M, writers_gnM, tuple(layers))


def grow_cache(cache: Cache, max_length: int) -> Cache:
    """Return `cache` with room for `max_length` target tokens in all."""
    num_beams, length = cache.writers_gnM.shape[1:]
    num_more = max_length - length
    padding = ((0, 0), (0, 0), (0, 0), (0, num_more * num_beams))
    layers = []
    for layer in cache.layers:
        targets = jax.tree.map(lambda x_ghKS: jnp.pad(x_ghKS, padding), layer.targets)
        layers.append(layer._replace(targets=targets))
    writers_gnM = jnp.pad(cache.writers_gnM, ((0, 0), (0, 0), (0, num_more)))
    return cache._replace(writers_gnM=writers_gnM, layers=tuple(layers))


def reorder_beams(cache: Cache, parents_bn: jax.Array) -> Cache:
    """Give each beam the sequence of its parent, 0 to n - 1. Differs from T5X, which copies keys and values."""
    writers_gnM = jnp.take_along_axis(cache.writers_gnM, parents_bn[:, :, None], axis=1)
    return cache._replace(writers_gnM=writers_gnM)


def add_writers(cache: Cache) -> Cache:
    """Mark each beam as the writer of the next position of its sequence."""
    beams_1n = jnp.arange(cache.writers_gnM.shape[1], dtype=jnp.int32)[None]
    return cache._replace(writers_gnM=cache.writers_gnM.at[:, :, cache.length].set(beams_1n))


def read_mask(cache: Cache) -> jax.Array:
    """Return mask_g1nS, bool: the slots of each beam's sequence."""
    num_groups, num_beams, room = cache.writers_gnM.shape
    is_writer_gnMn = cache.writers_gnM[..., None] == jnp.arange(num_beams)[None, None, None]
    is_read_M = jnp.arange(room) <= cache.length
    mask_gnMn = is_writer_gnMn & is_read_M[None, None, :, None]
    return mask_gnMn.reshape(num_groups, 1, num_beams, room * num_beams)
