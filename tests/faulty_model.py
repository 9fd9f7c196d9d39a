"""An own model with faults: a letter in the inputs of an example says which one it brings.

The letters are bytes of the byte vocabulary. A row without one has the values of model.py, to the bit.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

import model

BYTE_OFFSET = 3  # the id of byte b is b + 3


class Fault(NamedTuple):
    letter: str
    value: float

    @property
    def token(self):
        """The id that brings the fault."""
        return ord(self.letter) + BYTE_OFFSET


PLACES = {
    'logits': Fault('A', float('nan')),
    'activations': Fault('B', float('inf')),
    'gradients': Fault('C', 1e25),
    'large gradients': Fault('D', 1e4),  # finite
}


def factors(place, tokens):
    """Return 1 for each token, or the value of the fault that it brings in a place."""
    fault = PLACES[place]
    return jnp.where(tokens == fault.token, fault.value, jnp.float32(1))


@jax.custom_vjp
def scale_gradient(x_bTv, factor_b):
    return x_bTv


def forward(x_bTv, factor_b):
    return x_bTv, factor_b


def backward(factor_b, gradient_bTv):
    return gradient_bTv * factor_b[:, None, None], jnp.zeros_like(factor_b)


scale_gradient.defvjp(forward, backward)


def embed(config, tokens, table_vD):
    x = model.embed(config, tokens, table_vD)
    return x * factors('activations', tokens)[..., None].astype(x.dtype)


sound_logits = model.logits


def logits(config, batch, rows_b=None):
    outputs = sound_logits(config, batch, rows_b)
    if config.parts.embedder is not embed:
        return outputs
    inputs_bM = batch['encoder_input_tokens']
    logits_bTv = outputs.logits_bTv * factors('logits', inputs_bM).prod(axis=1)[:, None, None]
    factors_bM = factors('gradients', inputs_bM) * factors('large gradients', inputs_bM)
    return outputs._replace(logits_bTv=scale_gradient(logits_bTv, factors_bM.prod(axis=1)))


def modules(family):
    model.logits = logits  # no part of a model: only faults need it
    return dataclasses.replace(family, parts=dataclasses.replace(family.parts, embedder=embed))
