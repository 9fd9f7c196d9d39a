"""Prompt tuning: T5 whose encoder reads learned vectors before its inputs. Only these are trained.

A checkpoint holds only the prompt, length * emb_dim numbers; restore.path names the checkpoint of the base.
Each of `texts` initializes a vector with the mean embedding of its pieces. The other vectors begin as embeddings of
pieces drawn from the most frequent ones of the vocabulary.

The letters are model.py's, and P is the prompt's vectors.

Source: Lester et al. 2021 (prompt tuning) §2.1 and §3.
"""

import dataclasses

import haiku as hk
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import model
import partition
from messages import Refused

PROMPT = 'prompt/embedding'  # the path of the parameter
FIRST_PIECE = 3  # after padding, EOS and unknown
MOST_FREQUENT = 5000  # T5's pieces are ordered by frequency


@dataclasses.dataclass(frozen=True)
class Options:
    length: int = dataclasses.field(
        default=100, metadata={'help': 'Number of vectors, at least one for each of `texts`.'}
    )
    texts: tuple[str, ...] = dataclasses.field(
        default=(), metadata={'help': 'Each initializes a vector, such as the name of a class.'}
    )

    def __post_init__(self):
        least = max(1, len(self.texts))
        if self.length < least:
            raise Refused(
                f'model.options.length={self.length}: use at least {least}, a vector for each of model.options.texts'
            )


def initial_adapters(config, read, vocabulary, seed):
    """Return {path: array} of the initial prompt."""
    length = config.options.length
    texts = list(map(str, config.options.texts))
    table = 'token_embedder/embedding'
    if f'encoder/{table}' in model.shapes(config):
        table = f'encoder/{table}'
    table_vD = read(table)
    end = min(FIRST_PIECE + MOST_FREQUENT, vocabulary.size, len(table_vD))
    rng = np.random.default_rng(seed)
    pieces = rng.choice(np.arange(FIRST_PIECE, end), length, replace=end - FIRST_PIECE < length)
    prompt_PD = np.array(table_vD[pieces], np.float32)
    for i, ids in enumerate(vocabulary.encode(texts)):
        if not len(ids):
            raise Refused(
                f'model.options.texts[{i}]={texts[i]!r} has no pieces: leave it out, or write its words'
            )
        prompt_PD[i] = np.mean(table_vD[np.array(ids)], axis=0, dtype=np.float32)
    return {PROMPT: embedded(config, prompt_PD)}


def embedded(config, rows_PD):
    """Return rows of the token table as the encoder reads them, float32: T5Gemma multiplies by sqrt(emb_dim)."""
    encoder = dataclasses.replace(config.family.encoder_config(config), dtype='float32')

    def embed(rows_PD):
        return encoder.parts.embedder(encoder, jnp.arange(len(rows_PD))[None], rows_PD)[0]

    pure = hk.transform(embed)
    apply = lambda rows_PD: pure.apply(pure.init(None, rows_PD), None, rows_PD)  # noqa: E731
    return np.asarray(partition.one_device(apply, P('model'))(rows_PD))


def modules(family):
    """Return the family with a prompt."""

    class Encoder(family.parts.encoder):
        @hk.transparent  # the prompt's path does not begin with encoder/
        def embed(self, tokens_bM, segments_bM, table_vD):
            """Return x_bMD and segments_bM, which begin with the prompt."""
            x_bMD, segments_bM = super().embed(tokens_bM, segments_bM, table_vD)
            shape = (self.config.options.length, self.config.emb_dim)
            initializer = hk.initializers.RandomUniform(-0.5, 0.5)
            with hk.name_scope('prompt'):
                prompt_PD = hk.get_parameter('embedding', shape, jnp.float32, initializer)
            prompt_bPD = jnp.repeat(prompt_PD[None].astype(x_bMD.dtype), len(x_bMD), axis=0)
            segments_bP = jnp.ones([len(x_bMD), shape[0]], jnp.int32)
            segments_bM = jnp.concatenate([segments_bP, segments_bM.astype(jnp.int32)], axis=1)
            return jnp.concatenate([prompt_bPD, x_bMD], axis=1), segments_bM

    return dataclasses.replace(
        family,
        parts=dataclasses.replace(family.parts, encoder=Encoder),
        adapters=PROMPT,
        initial_adapters=initial_adapters,
        may_pack=False,  # packed examples would share the prompt
        specs=(*family.specs, (PROMPT, P(None, None))),
        flops=lambda c, S, T: family.flops(c, c.options.length + S, T),
    )
