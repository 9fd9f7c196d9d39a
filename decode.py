"""Decoding over any step `(tokens_r, cache) -> (logits_rv, cache)`, of this model or of another.

`sample` takes one token after the other, the most likely one or a random one; `beam_search` keeps
the best sequences. Filters change the logits that both choose by. All run inside `jax.shard_map`. The
suffixes are those of model.py and

    n  decodes of one example: samples or beams
    r  rows, b * n of them; the rows of one example are adjacent
    c  candidates of a step of beam search, 2 * n of them
    g  groups of rows that share a cache of targets: a row, or the n beams of an example
    S  slots of a cache, position * n + beam, or the positions of the inputs

`cache` is any pytree; `Cache` is model.py's. Source: T5X t5x/decoding.py.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

import partition

EOS_ID = 1  # T5's
MASKED = -1e7  # T5X's logit of a token never taken, and its score of a missing sequence
MISSING = MASKED / 100  # beams score less if they are missing: the brevity penalty divides MASKED
MIN_TEMPERATURE = 1e-4  # up to here the most likely token is taken
FIRST_ROOM = 64  # tokens of the first cache

C = TypeVar('C')  # a cache
Step = Callable[[jax.Array, C], tuple[jax.Array, C]]
Choose = Callable[[jax.Array, jax.Array], jax.Array]  # (logits_rv, position) -> the next tokens_r
Filter = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # see `filtered`
Grow = Callable[[C, int], C]  # (cache, room) -> a cache with room for so many tokens
Text = str | Sequence[int] | NDArray  # or its ids


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How answers are found: the options of `infer.T5.generate` and config.decode."""

    max_length: int = 128
    beam_size: int = 1
    alpha: float = 0.6
    temperature: float | Sequence[float] = 0.0  # one number, or one for each example
    top_k: int = 0
    top_p: float = 0.0
    min_p: float = 0.0
    seed: int = 0
    num_return: int = 1
    return_scores: bool = False
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_length: int = 0
    bad_words: Text | Sequence[Text] = ()
    allowed: Sequence = ()  # of Text, or a list of them for each input
    stop: str | Sequence[str] = ()
    filters: Sequence[Filter] = ()

    def __post_init__(self):
        for field in dataclasses.fields(self):  # programs are kept by their options
            value = hashable(getattr(self, field.name))
            if field.name in ('bad_words', 'allowed', 'stop') and isinstance(value, str):
                value = (value,)
            object.__setattr__(self, field.name, value)

    @property
    def is_random(self) -> bool:
        return bool((np.ravel(self.temperature) > 0).any())

    @property
    def room(self) -> int:
        """The positions of an answer in a program: a power of two."""
        return max(FIRST_ROOM, next_power(self.max_length))

    @property
    def num_decodes(self) -> int:
        return max(self.beam_size, self.num_return)

    @property
    def is_allowed_per_input(self) -> bool:
        """Whether `allowed` has a list for each input, of texts or of lists of ids."""
        lists = [x for x in self.allowed if isinstance(x, tuple)]
        return any(not isinstance(x, int) for x in itertools.chain(*lists))

    @property
    def program(self) -> 'Decoding':
        """The options that a program is compiled for; the others are its arguments."""
        return dataclasses.replace(
            self,
            max_length=0,
            seed=0,
            temperature=float(self.is_random),
            bad_words=('any',) if self.bad_words else (),
            allowed=('any',) if self.allowed else (),
            stop=('any',) if self.stop else (),
        )


def next_power(n: int) -> int:
    """Return the first of 1, 2, 4, 8 ... that reaches `n`."""
    return 1 << max(int(n) - 1, 0).bit_length()


def hashable(value):
    """Return `value` with tuples for its lists and arrays, and Python's numbers for numpy's."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = value.tolist()
    if isinstance(value, list | tuple | range):
        return tuple(map(hashable, value))
    return value


def decode(
    decoding: Decoding,
    step: 'Step[Cache]',
    cache: 'Cache',
    batch: Mapping[str, jax.Array],
    eos_id: int = EOS_ID,
) -> tuple[jax.Array, jax.Array | None]:
    """Return tokens_bnT and scores_bn, the best last; None for the scores of samples without `return_scores`.

    `batch` has prompt_bT, lengths_b, temperature_b, seed_b, example_b, the numbers of the examples, and the texts of
    `decoding` as ids, each padded with -1 and the list with -2: bad_words_bnW and stop_bnW, padded on the left, and
    allowed_bnA, which end with EOS.
    """
    num_decodes = decoding.num_decodes
    rows = {name: jnp.repeat(x, num_decodes, axis=0) for name, x in batch.items()}
    filters = filters_of(decoding, rows, eos_id)
    if decoding.beam_size > 1:
        tokens_bnT, scores_bn = beam_search(
            step,
            reorder_beams,
            cache,
            batch['prompt_bT'],
            batch['lengths_b'],
            num_beams=num_decodes,
            alpha=decoding.alpha,
            eos_id=eos_id,
            grow=grow_cache,
            filters=filters,
        )
    else:
        choose: Choose = most_likely
        if decoding.is_random:
            keys_r = jax.vmap(jax.random.key)(rows['seed_b'])
            for number_r in (rows['example_b'], jnp.arange(len(keys_r)) % num_decodes):
                keys_r = jax.vmap(jax.random.fold_in)(keys_r, number_r)
            kept = (decoding.top_k, decoding.top_p, decoding.min_p)
            choose = random_tokens(keys_r, rows['temperature_b'], *kept)
        tokens_rT, scores_r = sample(
            step,
            cache,
            rows['prompt_bT'],
            rows['lengths_b'],
            choose,
            eos_id=eos_id,
            grow=grow_cache,
            filters=filters,
        )
        tokens_bnT = tokens_rT.reshape(-1, num_decodes, tokens_rT.shape[1])
        scores_bn = scores_r.reshape(-1, num_decodes)
        if num_decodes > 1:
            scores_bn, order_bn = best_last(scores_bn, num_decodes)
            tokens_bnT = pick(tokens_bnT, order_bn)
    if not decoding.return_scores and decoding.beam_size == 1:
        return tokens_bnT, None  # XLA then computes no scores
    return tokens_bnT, scores_bn


class SampleState(NamedTuple, Generic[C]):
    position: jax.Array  # int32: where the next token goes
    running_r: jax.Array  # bool: the row takes another token
    tokens_r: jax.Array  # int32: the newest token of each row, BOS (0) at first
    output_rT: jax.Array  # int32
    scores_r: jax.Array  # float32: log-probability of the tokens that were chosen
    cache: C


def most_likely(logits_rv: jax.Array, position: jax.Array) -> jax.Array:
    """Choose the token with the largest logit; the lowest id wins a tie."""
    return partition.argmax(logits_rv, 'model')


def random_tokens(
    keys_r: jax.Array,
    temperature_r: jax.Array,
    top_k: int = 0,
    top_p: float = 0.0,
    min_p: float = 0.0,
) -> Choose:
    """Return a function that chooses a random token among those that `keep_largest` keeps.

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
        random_r = partition.argmax(noisy_rv, 'model')
        is_random_r = temperature_r > MIN_TEMPERATURE
        return jnp.where(is_random_r, random_r, partition.argmax(logits_rv, 'model'))

    return choose


def sample(
    step: Step[C],
    cache: C,
    prompt_rT: jax.Array,
    lengths_r: jax.Array,
    choose: Choose = most_likely,
    eos_id: int = EOS_ID,
    grow: Grow[C] = lambda cache, room: cache,
    filters: Sequence[Filter] = (),
) -> tuple[jax.Array, jax.Array]:
    """Return the tokens of each row, int32 [r, T], and their scores, float32 [r]. This is T5X's temperature_sample.

    A row begins with the tokens of `prompt` that are not 0; an EOS among them does not end it. It ends with EOS or
    with `lengths` tokens; 0 follows. Its score is the sum of the model's log-probabilities of the tokens after the
    prompt. Differs from T5X: a score ignores temperature, top_k, top_p (rescale_log_probs) and filters.
    """

    def next_state(state: SampleState[C]) -> SampleState[C]:
        logits_rv, cache = step(state.tokens_r, state.cache)
        filtered_rv = filtered(filters, logits_rv, state.output_rT, state.position)
        chosen_r = choose(filtered_rv, state.position)
        log_probs_r = log_probs(logits_rv, chosen_r)
        forced_r = prompt_rT[:, state.position]
        is_free_r = forced_r == 0
        tokens_r = jnp.where(is_free_r, chosen_r, forced_r)
        tokens_r = jnp.where(state.running_r, tokens_r, 0)
        has_ended_r = (tokens_r == eos_id) & is_free_r
        return SampleState(
            position=state.position + 1,
            running_r=state.running_r & ~has_ended_r & (state.position + 1 < lengths_r),
            tokens_r=tokens_r,
            output_rT=state.output_rT.at[:, state.position].set(tokens_r),
            scores_r=state.scores_r + jnp.where(state.running_r & is_free_r, log_probs_r, 0.0),
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

    position: jax.Array  # int32: where the next token goes
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
    eos_id: int = EOS_ID,
    grow: Grow[C] = lambda cache, room: cache,
    filters: Sequence[Filter] = (),
) -> tuple[jax.Array, jax.Array]:
    """Return the best sequences, int32 [b, n, T], and their scores, float32 [b, n]; the best is last.

    `reorder(cache, parents_bn)` gives each beam the part of the cache of its parent, 0 to n - 1. A score is the
    log-probability of a sequence divided by `brevity_penalty` of its length with EOS; one near MASKED marks a missing
    sequence. If no sequence has ended, return the beams and their log-probabilities. An example ends when no beam can
    beat its finished sequences. Prompt and lengths are as in `sample`. T5X's beam_search.
    """
    num_examples, length = prompt_bT.shape
    num_candidates = 2 * num_beams
    longest_penalty_b = brevity_penalty(alpha, lengths_b + 1)  # T5X counts BOS here

    def is_running(state: BeamState[C]) -> jax.Array:
        best_possible_b = state.live_log_probs_bn[:, -1] / longest_penalty_b
        can_improve_b = state.finished_scores_bn.min(axis=1) <= best_possible_b
        return can_improve_b & (state.position < lengths_b)

    def next_state(state: BeamState[C]) -> BeamState[C]:
        logits_rv, cache = step(state.tokens_bn.reshape(-1), state.cache)
        normalizer_r1 = partition.logsumexp(logits_rv, 'model')[:, None]
        if filters:
            live_rT = state.live_bnT.reshape(-1, length)
            logits_rv = filtered(filters, logits_rv - normalizer_r1, live_rT, state.position)
            normalizer_r1 = jnp.zeros_like(normalizer_r1)
        # The best continuations of each beam, then those of each example, the best first.
        best_rk, tokens_rk = partition.top_k(logits_rv, num_candidates, 'model')
        best_rk = best_rk - normalizer_r1 + state.live_log_probs_bn.reshape(-1, 1)
        num_best = best_rk.shape[1]  # fewer than 2 * n if the vocabulary is small
        log_probs_bc, index_bc = lax.top_k(best_rk.reshape(num_examples, -1), num_candidates)
        tokens_bc = pick(tokens_rk.reshape(num_examples, -1), index_bc)
        # A token of the prompt is the only continuation, of one beam.
        forced_b1 = prompt_bT[:, state.position][:, None]
        in_prompt_1c = jnp.where(jnp.arange(num_candidates) == 0, 0.0, MASKED)[None]
        log_probs_bc = jnp.where(forced_b1 > 0, in_prompt_1c, log_probs_bc)
        tokens_bc = jnp.where(forced_b1 > 0, forced_b1, tokens_bc)
        parents_bc = index_bc // num_best
        candidates_bcT = pick(state.live_bnT, parents_bc)
        candidates_bcT = candidates_bcT.at[:, :, state.position].set(tokens_bc)

        is_finished_bc = (tokens_bc == eos_id) & (forced_b1 == 0)
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

    The cache grows to 64, 128, ... `length` tokens, so a step reads at most twice the tokens there are.
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


def pick(x: jax.Array, index_bn: jax.Array) -> jax.Array:
    """Return x[b, index[b, n], ...]."""
    index = index_bn.reshape(*index_bn.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)


def log_probs(logits_rv: jax.Array, tokens_r: jax.Array) -> jax.Array:
    """Return the log-probability of one token of each row, float32 [r]."""
    logit_r = partition.take(logits_rv, tokens_r, 'model')
    return logit_r - partition.logsumexp(logits_rv, 'model')


def keep_largest(logits_rv: jax.Array, top_k: int, top_p: float, min_p: float = 0.0) -> jax.Array:
    """Return the logits with MASKED for all but the `top_k` most likely tokens.

    Among these, `top_p` keeps the fewest tokens with this total probability, then `min_p` those with this share of the
    most likely token's probability. 0 keeps all.
    """
    if top_k:
        lowest_r1 = largest_threshold(logits_rv, jnp.ones_like(logits_rv, jnp.int32), top_k)
        logits_rv = jnp.where(logits_rv >= lowest_r1, logits_rv, MASKED)
    if top_p:
        probs_rv = jnp.exp(logits_rv - partition.logsumexp(logits_rv, 'model')[:, None])
        lowest_r1 = largest_threshold(probs_rv, probs_rv, top_p)
        logits_rv = jnp.where(probs_rv >= lowest_r1, logits_rv, MASKED)
    if min_p:
        probs_rv = jnp.exp(logits_rv - partition.logsumexp(logits_rv, 'model')[:, None])
        largest_r1 = lax.pmax(probs_rv.max(axis=1, keepdims=True), 'model')
        logits_rv = jnp.where(probs_rv >= min_p * largest_r1, logits_rv, MASKED)
    return logits_rv


def largest_threshold(x_rv: jax.Array, weights_rv: jax.Array, enough: float) -> jax.Array:
    """Return the largest float32 of each row, [r, 1], such that the x >= it weigh `enough`; -inf if none do.

    Bisecting its bits takes 32 sums over the split vocabulary, and no sorting (T5X t5x/binary_search.py).
    """

    def as_float(ordered_r1: jax.Array) -> jax.Array:
        # Ordered by their bits as integers, negative floats run backwards.
        bits_r1 = jnp.where(ordered_r1 < 0, ordered_r1 ^ 0x7FFFFFFF, ordered_r1)
        return lax.bitcast_convert_type(bits_r1, jnp.float32)

    def next_bit(i: jax.Array, ordered_r1: jax.Array) -> jax.Array:
        # The first bit is the sign: added to the smallest integer, it gives 0.
        higher_r1 = ordered_r1 + lax.shift_left(jnp.int32(1), 31 - i.astype(jnp.int32))
        kept_rv = jnp.where(x_rv >= as_float(higher_r1), weights_rv, 0)
        sum_r1 = partition.psum(kept_rv.sum(axis=1, keepdims=True), 'model')
        return jnp.where(sum_r1 >= enough, higher_r1, ordered_r1)

    max_r1 = lax.pmax(x_rv.max(axis=1, keepdims=True), 'model')
    smallest_r1 = jnp.full_like(max_r1, jnp.iinfo(jnp.int32).min, dtype=jnp.int32)
    threshold_r1 = as_float(lax.fori_loop(0, 32, next_bit, smallest_r1))
    partition.check_summed('the threshold', threshold_r1, ('model',))
    return jnp.where(jnp.isnan(threshold_r1), -jnp.inf, threshold_r1)


# Filters: transformers' LogitsProcessors. `filtered` has the shapes.


def filters_of(decoding: Decoding, rows: Mapping[str, jax.Array], eos_id: int) -> list[Filter]:
    """Return the filters in transformers' order, then the user's own, and stop texts last."""
    num_given_r = 1 + (rows['prompt_bT'] > 0).sum(axis=1)  # with BOS
    found: list[Filter] = []
    if decoding.repetition_penalty != 1:
        found.append(partial(penalize_repetition, decoding.repetition_penalty))
    if decoding.no_repeat_ngram_size:
        found.append(partial(forbid_repeated_ngrams, decoding.no_repeat_ngram_size))
    if decoding.bad_words:
        found.append(partial(forbid_words, rows['bad_words_bnW']))
    if decoding.min_length:
        found.append(partial(forbid_early_end, eos_id, decoding.min_length + num_given_r))
    if decoding.allowed:
        found.append(partial(allow_only, eos_id, rows['allowed_bnA']))
    found += decoding.filters
    if decoding.stop:
        found.append(partial(end_after, eos_id, rows['stop_bnW'], num_given_r))
    return found


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


def penalize_repetition(penalty, logits_rv, tokens_rT, ids_v):
    """Divide the positive logits of tokens that have occurred by `penalty`, multiply negative ones (CTRL §4.1)."""
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


def forbid_early_end(eos_id, min_length_r, logits_rv, tokens_rT, ids_v):
    """Forbid EOS before `min_length` tokens, BOS and prompt included."""
    is_early_r = (tokens_rT >= 0).sum(axis=1) < min_length_r
    return forbid(logits_rv, jnp.where(is_early_r, eos_id, -1)[:, None], ids_v)


def forbid_words(words_rnW, logits_rv, tokens_rT, ids_v):
    """Forbid the last token of each word after its others."""
    follows_rn = ends_with(tokens_rT, words_rnW[:, :, :-1])
    return forbid(logits_rv, jnp.where(follows_rn, words_rnW[:, :, -1], -1), ids_v)


def allow_only(eos_id, answers_rnA, logits_rv, tokens_rT, ids_v):
    """Forbid tokens that continue none of the answers; if nothing continues one, allow EOS alone."""
    length = answers_rnA.shape[2]
    decoded_r1A = tokens_rT[:, None, 1 : 1 + length]
    begins_rn = ((decoded_r1A < 0) | (decoded_r1A == answers_rnA)).all(axis=2)
    position_r11 = jnp.clip((tokens_rT >= 0).sum(axis=1) - 1, max=length - 1)[:, None, None]
    next_rn = jnp.take_along_axis(answers_rnA, position_r11, axis=2)[..., 0]
    next_rn = jnp.where(begins_rn, next_rn, -1)
    next_rn = jnp.where((next_rn < 0).all(axis=1, keepdims=True), eos_id, next_rn)
    return jnp.where(among(next_rn, ids_v), logits_rv, -jnp.inf)


def end_after(eos_id, words_rnW, num_given_r, logits_rv, tokens_rT, ids_v):
    """Allow EOS alone after one of the words, but not within the first `num_given` tokens, BOS and prompt."""
    is_answer_r = (tokens_rT >= 0).sum(axis=1) > num_given_r
    has_ended_r1 = (is_answer_r & ends_with(tokens_rT, words_rnW).any(axis=1))[:, None]
    only_eos_1v = jnp.where(ids_v == eos_id, 0.0, -jnp.inf)[None]
    return jnp.where(has_ended_r1, only_eos_1v, logits_rv)


def ends_with(tokens_rT: jax.Array, words_rnW: jax.Array) -> jax.Array:
    """Return which words the newest tokens of each row are, bool [r, n]; words have -1 on the left."""
    newest_r1W = newest(tokens_rT, words_rnW.shape[2])[:, None]
    return ((words_rnW == -1) | (words_rnW == newest_r1W)).all(axis=2)


def newest(tokens_rT: jax.Array, num: int) -> jax.Array:
    """Return the `num` newest decoded tokens, with -1 before the first."""
    padded_rT = jnp.pad(tokens_rT, ((0, 0), (num, 0)), constant_values=-1)
    first_r1 = (tokens_rT >= 0).sum(axis=1, keepdims=True)
    return jnp.take_along_axis(padded_rT, first_r1 + jnp.arange(num)[None], axis=1)


def forbid(logits_rv: jax.Array, ids_rn: jax.Array, ids_v: jax.Array) -> jax.Array:
    """Return the logits with -inf for the ids; -1 stands for none."""
    return jnp.where(among(ids_rn, ids_v), -jnp.inf, logits_rv)


def among(ids_rn: jax.Array, ids_v: jax.Array) -> jax.Array:
    """Return which of this device's ids are among those of each row, bool [r, v]; -1 stands for none."""
    num_ids = ids_v.shape[0]
    index_rn = ids_rn - ids_v[0]
    index_rn = jnp.where((ids_rn < 0) | (index_rn < 0), num_ids, index_rn)
    rows_r1 = jnp.arange(ids_rn.shape[0])[:, None]
    none_rv = jnp.zeros((ids_rn.shape[0], num_ids), bool)
    return none_rv.at[rows_r1, index_rn].set(True, mode='drop')


# A cache of keys and values, for groups of rows that decode together, such as the beams of an example.


class KeysValues(NamedTuple):
    """Keys and values read in decoding. Slots are last, so products need no copy."""

    keys_ghKS: jax.Array
    values_ghKS: jax.Array

    def write(self, new: 'KeysValues', slot: jax.Array | int) -> 'KeysValues':
        write = partial(lax.dynamic_update_slice_in_dim, start_index=slot, axis=3)
        return jax.tree.map(write, self, new)


class LayerCache(NamedTuple):
    """Keys and values of a decoder layer; None in training. T5X recomputes those of the inputs in each step."""

    targets: KeysValues | None = None  # the tokens read so far, with room for more
    inputs: KeysValues | None = None  # the encoded inputs


class Cache(NamedTuple):
    length: jax.Array  # int32: the tokens read so far, and the position of the next one
    mask_b11M: jax.Array  # bool: False for padding of the inputs
    # int32, writers[g, n, m]: the beam that wrote position m of beam n's current sequence. Reordering
    # beams changes these numbers alone.
    writers_gnM: jax.Array
    layers: tuple[LayerCache, ...]


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
    num_beams = cache.writers_gnM.shape[1]
    beams_n = jnp.arange(num_beams, dtype=jnp.int32)
    own_gn1 = jnp.zeros_like(cache.writers_gnM[:, :, :1]) + beams_n[None, :, None]
    writers_gnM = lax.dynamic_update_slice_in_dim(cache.writers_gnM, own_gn1, cache.length, axis=2)
    return cache._replace(writers_gnM=writers_gnM)


def read_mask(cache: Cache) -> jax.Array:
    """Return mask_g1nS, bool: the slots that each beam reads, those of its sequence."""
    num_groups, num_beams, room = cache.writers_gnM.shape
    is_writer_gnMn = cache.writers_gnM[..., None] == jnp.arange(num_beams)[None, None, None]
    is_read_M = jnp.arange(room) <= cache.length
    mask_gnMn = is_writer_gnMn & is_read_M[None, None, :, None]
    return mask_gnMn.reshape(num_groups, 1, num_beams, room * num_beams)
