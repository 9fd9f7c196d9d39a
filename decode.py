"""Decoding over any step `(tokens_b, cache) -> (logits_bv, cache)`, of this model or of another.

It runs inside `jax.shard_map`; the suffixes of names are those of model.py. Source: T5X
t5x/decoding.py.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import partition


class State(NamedTuple):
    """What a step of decoding changes."""

    position: jax.Array  # int32: where the next token goes
    running_b: jax.Array  # bool: the row has no EOS yet
    tokens_b: jax.Array  # int32: the newest token of each row, BOS (0) at first
    output_bT: jax.Array  # int32
    cache: Any


def greedy(step: Callable, cache: Any, prompt_bT: jax.Array, eos_id: int = 1) -> jax.Array:
    """Return the most likely token at each position, int32 [b, T], and 0 after the EOS of a row.

    A row begins with the tokens of `prompt` that are not 0; an EOS among them does not end the row.
    This is T5X's temperature_sample at temperature 0.
    """
    length = prompt_bT.shape[1]

    def is_running(state: State) -> jax.Array:
        # All devices leave together, because a step may have collectives over any axis.
        num_running = lax.psum(state.running_b.sum(), partition.BATCH_AXES)
        return (state.position < length) & (num_running > 0)

    def next_state(state: State) -> State:
        logits_bv, cache = step(state.tokens_b, state.cache)
        forced_b = prompt_bT[:, state.position]
        tokens_b = jnp.where(forced_b > 0, forced_b, partition.argmax(logits_bv, 'model'))
        tokens_b = jnp.where(state.running_b, tokens_b, 0)
        return State(
            position=state.position + 1,
            running_b=state.running_b & ((tokens_b != eos_id) | (forced_b > 0)),
            tokens_b=tokens_b,
            output_bT=state.output_bT.at[:, state.position].set(tokens_b),
            cache=cache,
        )

    output_bT = jnp.zeros_like(prompt_bT)
    bos_b = output_bT[:, 0]
    start = State(
        position=jnp.int32(0),
        running_b=bos_b == 0,
        tokens_b=bos_b,
        output_bT=output_bT,
        cache=cache,
    )
    return lax.while_loop(is_running, next_state, start).output_bT
