"""Decoding over any step `(tokens_b, cache) -> (logits_bv, cache)`; which model it is does not matter.

Runs inside `jax.shard_map`; the suffixes are model.py's. Source: T5X t5x/decoding.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import partition


def greedy(step: Callable, cache: Any, prompt_bT: jax.Array, eos_id: int = 1) -> jax.Array:
    """The likeliest token again and again: int32 [b, T], 0 after a row's EOS. Rows begin with the tokens of
    `prompt` that are not 0; an EOS among them ends nothing. (T5X's temperature_sample at temperature 0.)"""
    length = prompt_bT.shape[1]

    def is_running(state):
        i, running_b, *_ = state
        # All devices leave together: a step may hold collectives over 'data' too.
        return (i < length) & (lax.psum(running_b.sum(), 'data') > 0)

    def body(state):
        i, running_b, tokens_b, output_bT, cache = state
        logits_bv, cache = step(tokens_b, cache)
        forced_b = prompt_bT[:, i]
        tokens_b = jnp.where(forced_b > 0, forced_b, partition.argmax(logits_bv, 'model'))
        tokens_b = jnp.where(running_b, tokens_b, 0)
        running_b &= (tokens_b != eos_id) | (forced_b > 0)
        return i + 1, running_b, tokens_b, output_bT.at[:, i].set(tokens_b), cache

    output_bT = jnp.zeros_like(prompt_bT)
    bos_b = output_bT[:, 0]
    state = (jnp.int32(0), bos_b == 0, bos_b, output_bT, cache)
    return lax.while_loop(is_running, body, state)[3]
