"""An own model: T5 in which self-attention sees only near positions.

A query sees the keys that are less than `window` positions away: on both sides in the encoder, on the
left in the decoder. Cross attention has no positions and sees all of the inputs. In decoding, the
queries are the beams at one position and the keys are the slots of the cache, which come with their
positions: the same comparison serves both.

Source: Beltagy et al. 2020 (Longformer) §3.1.
"""

import dataclasses

import jax.numpy as jnp

import model
from messages import Refused


@dataclasses.dataclass(frozen=True)
class Options:
    window: int = dataclasses.field(
        default=128, metadata={'help': 'the first distance that self-attention does not see'}
    )

    def __post_init__(self):
        if self.window < 1:
            raise Refused(f'model.options.window={self.window}: use at least 1')


def modules(family):
    class Attention(family.parts.attention):
        def attend(self, q_bThK, k_bhKM, v_bhKM, mask, relpos_1hTM, positions, rows_b):
            if positions is not None:
                distance_TM = positions.queries_T[:, None] - positions.keys_M[None, :]
                is_near_TM = jnp.abs(distance_TM) < self.config.options.window
                mask = model.Mask(mask.dense() & is_near_TM[None, None])
            return super().attend(q_bThK, k_bhKM, v_bhKM, mask, relpos_1hTM, positions, rows_b)

    parts = dataclasses.replace(family.parts, attention=Attention)
    return dataclasses.replace(family, parts=parts)
