"""An own model: T5 whose encoder reads learned vectors before its inputs. They alone are trained.

A checkpoint holds the prompt, beside the checkpoint of the base that restore.path names. The vectors
count as tokens of each row: set data.pack='no', because packed examples would share a row.

Source: Lester et al. 2021 (prompt tuning) §2.
"""

import dataclasses

import haiku as hk
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Options:
    length: int = dataclasses.field(
        default=20, metadata={'range': (1, 1000), 'help': 'Vectors of the prompt.'}
    )


class Prompt(hk.Module):
    def __call__(self, config, x_bMD, segments_bM):
        shape = (config.options.length, config.emb_dim)
        prompt_PD = hk.get_parameter(
            'embedding', shape, init=hk.initializers.RandomUniform(-0.5, 0.5)
        )
        prompt_bPD = jnp.repeat(prompt_PD[None].astype(x_bMD.dtype), len(x_bMD), axis=0)
        segments_bP = jnp.ones([len(x_bMD), config.options.length], jnp.int32)
        x_bMD = jnp.concatenate([prompt_bPD, x_bMD], axis=1)
        return x_bMD, jnp.concatenate([segments_bP, segments_bM.astype(jnp.int32)], axis=1)


def encoder_inputs(config, x_bMD, segments_bM):
    return Prompt(name='prompt')(config, x_bMD, segments_bM)


def modules(default):
    return dataclasses.replace(
        default,
        encoder_inputs=encoder_inputs,
        adapters='prompt/embedding',
        specs=(*default.specs, ('prompt/embedding', P(None, None))),
    )
