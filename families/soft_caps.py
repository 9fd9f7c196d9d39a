"""T5 with soft caps on the logits of attention and of tokens, as in Gemma 2.

Source: Bello et al. 2016 §5.1 (tokens); Gemma 2 (Gemma Team 2024) §2, "logit soft-capping".
"""

import dataclasses

import jax.numpy as jnp

from messages import Refused


@dataclasses.dataclass(frozen=True)
class Options:
    attention_cap: float = dataclasses.field(
        default=50.0, metadata={'help': 'Cap of the logits of attention; 0: none.'}
    )
    logits_cap: float = dataclasses.field(
        default=30.0, metadata={'help': 'Cap of the logits of tokens; 0: none.'}
    )

    def __post_init__(self):
        for name in ('attention_cap', 'logits_cap'):
            value = getattr(self, name)
            if value < 0:
                raise Refused(f'model.options.{name}={value}: use 0 or more')


def capped(x, cap):
    """Return cap * tanh(x / cap); x if the cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def modules(family):
    """Return the family with caps."""

    class Attention(family.parts.attention):
        def logits(self, q_bThK, k_bhKM):
            return capped(super().logits(q_bThK, k_bhKM), self.config.options.attention_cap)

    def logits(c, *args):
        return capped(family.parts.logits(c, *args), c.options.logits_cap)

    parts = dataclasses.replace(family.parts, attention=Attention, logits=logits)
    return dataclasses.replace(family, parts=parts)
