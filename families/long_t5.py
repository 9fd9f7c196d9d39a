"""LongT5: T5 whose encoder attends to near tokens, and to one global token for every few tokens.

With `encoder_attention='local'` a token sees the tokens at most `local_radius` away. With
'transient_global' it also sees the global tokens of its segment. Each layer makes its own: a global
token is the normed sum of the inputs of `tokens_per_block` tokens, with the keys and values of the
tokens' kernels. The decoder is T5's.

The letters are model.py's, and

    n  blocks of the length b = local_radius + 1    c  a block as queries    e  it and its two neighbours
    G  global tokens

Source: Guo et al. 2022 (LongT5) §3.1; flaxformer architectures/longt5/long_attention.py.
"""

import dataclasses
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import kernels
import model
from configs import base, check
from family import t5_flops


@dataclasses.dataclass(frozen=True)
class Options:
    encoder_attention: str = dataclasses.field(
        default='local', metadata={'help': 'local or transient_global.'}
    )
    local_radius: int = dataclasses.field(
        default=127, metadata={'help': 'The distance that a token sees.'}
    )
    tokens_per_block: int = dataclasses.field(
        default=16, metadata={'help': 'The tokens of a global token.'}
    )

    def __post_init__(self):
        kinds = ('local', 'transient_global')
        key = 'model.options.encoder_attention'
        check.check_allowed(key, self.encoder_attention, 'local', None, kinds)
        sizes = base.Range(1, 100_000)
        check.check_allowed('model.options.local_radius', self.local_radius, 127, sizes)
        check.check_allowed('model.options.tokens_per_block', self.tokens_per_block, 16, sizes)


class Positions(NamedTuple):
    """Shared by the attentions of the encoder: positions in the keys of a block, and the global tokens."""

    queries_T: jax.Array  # int32 [c]
    keys_M: jax.Array  # int32 [e]
    is_in_bMG: jax.Array | None = None  # float32, 1 where a token belongs to a global token
    relpos_bnhcG: jax.Array | None = None  # added to each head's logits of global tokens


class Encoder(model.Encoder):
    @hk.name_like('__call__')
    def shared(self, segments_bM):
        """Return the mask of local keys and global tokens, bool [b, n, 1, c, e + G], and the positions."""
        c = self.config
        size = c.options.local_radius + 1
        positions = Positions(size + jnp.arange(size), jnp.arange(3 * size))
        is_near_ce = jnp.abs(positions.keys_M[None, :] - positions.queries_T[:, None]) < size
        segments_bnc1 = blocks(segments_bM, size)[..., None]
        mask_bnce = segments_bnc1 == blocks(segments_bM, size, beside=1)[:, :, None]
        mask_bnce &= (segments_bnc1 > 0) & is_near_ce[None, None]
        if c.options.encoder_attention == 'transient_global':
            ids_bM, segments_bG, is_in_bMG = global_tokens(segments_bM, c.options.tokens_per_block)
            mask_bncG = segments_bnc1 == segments_bG[:, None, None]
            mask_bnce = jnp.concatenate([mask_bnce, mask_bncG], axis=-1)
            ids_G = jnp.arange(segments_bG.shape[1])
            all_ids = model.Positions(jnp.arange(-1, len(ids_G)), ids_G)  # a token may have -1
            bias = c.parts.relpos_bias(c, bidirectional=True, name='side_relpos_bias')
            relpos_MhG = bias(all_ids)[0].astype(c.dtype).swapaxes(0, 1)
            relpos_bnhcG = relpos_MhG[blocks(ids_bM, size) + 1].swapaxes(2, 3)
            positions = positions._replace(is_in_bMG=is_in_bMG, relpos_bnhcG=relpos_bnhcG)
        return model.Mask(mask_bnce[:, :, None]), positions


def global_tokens(segments_bM, size):
    """Return ids_bM, the global token that a token would belong to, segments_bG, and is_in_bMG, whether it does.

    Each whole block of `size` tokens of a segment makes a global token, to which the tokens after the last one also
    belong. A segment without a whole block has none. Source: flaxformer make_etc_fixed_block_ids.
    """
    length = segments_bM.shape[1]
    index_1M = jnp.arange(length)[None]
    before_bM = jnp.pad(segments_bM, ((0, 0), (1, 0)))[:, :length]
    # The start of each token's segment.
    start_bM = lax.cummax(jnp.where(segments_bM != before_bM, index_1M, 0), axis=1)
    last_bM = jnp.pad(segments_bM, ((0, 0), (0, size - 1)))[:, size - 1 :]
    begins_bM = ((index_1M - start_bM) % size == 0) & (segments_bM == last_bM)
    ids_bM = jnp.cumsum(begins_bM & (segments_bM > 0), axis=1, dtype=jnp.int32) - 1
    one_hot_bMG = jax.nn.one_hot(ids_bM, length // size)
    segments_bG = jnp.max(one_hot_bMG * (begins_bM * segments_bM)[..., None], axis=1, initial=0)
    return ids_bM, segments_bG, one_hot_bMG * (segments_bM[..., None] == segments_bG[:, None])


def blocks(x_bM, size, beside=0):
    """Return x_bM... as [b, n, c, ...], padded with zeros; with the blocks `beside` each one, [b, n, e, ...]."""
    outside = beside * size
    padding = [(0, 0), (outside, -x_bM.shape[1] % size + outside), *[(0, 0)] * (x_bM.ndim - 2)]
    padded = jnp.pad(x_bM, padding).reshape(len(x_bM), -1, size, *x_bM.shape[2:])
    num_blocks = padded.shape[1] - 2 * beside
    parts = [padded[:, i : i + num_blocks] for i in range(1 + 2 * beside)]
    return jnp.concatenate(parts, axis=2)


class Attention(model.Attention):
    """Attention in blocks where the positions are the encoder's; the decoder's is T5's."""

    @hk.name_like('__call__')
    def keys_values(self, memory_bMD, positions):
        """Return k_bMhK and v_bMhK, the global tokens last."""
        if isinstance(positions, Positions) and positions.is_in_bMG is not None:
            inputs_bMD = memory_bMD.astype(jnp.float32)
            sums_bGD = jnp.einsum('bMG,bMD->bGD', positions.is_in_bMG, inputs_bMD)
            norm = self.config.parts.norm(self.config, name='T5LayerNorm_0')  # Flax's name
            memory_bMD = jnp.concatenate([memory_bMD, norm(sums_bGD)], axis=1)
        return super().keys_values(memory_bMD, positions)

    @hk.name_like('__call__')
    def attend(self, q_bThK, k_bhKM, v_bhKM, mask, relpos_1hTM, positions, rows_b):
        """Return heads_bThK. In the encoder, mask and bias belong to the blocks."""
        if not isinstance(positions, Positions):
            return super().attend(q_bThK, k_bhKM, v_bhKM, mask, relpos_1hTM, positions, rows_b)
        c = self.config
        dtype = jnp.float32 if c.float32_attention_logits else c.dtype
        length = q_bThK.shape[1]
        size = len(positions.queries_T)
        k_bMhK = k_bhKM.transpose(0, 3, 1, 2).astype(dtype)
        v_bMhK = v_bhKM.transpose(0, 3, 1, 2)
        q_bnchK = blocks(q_bThK, size).astype(dtype)
        k_bnehK = blocks(k_bMhK[:, :length], size, beside=1)
        logits_bnhce = jnp.einsum('bnchK,bnehK->bnhce', q_bnchK, k_bnehK)
        logits_bnhce += kernels.broadcast(relpos_1hTM[0], logits_bnhce.shape, c.dtype)
        if positions.is_in_bMG is not None:
            logits_bnhcG = jnp.einsum('bnchK,bGhK->bnhcG', q_bnchK, k_bMhK[:, length:])
            logits_bnhcG += positions.relpos_bnhcG
            logits_bnhce = jnp.concatenate([logits_bnhce, logits_bnhcG], axis=-1)
        probs_bnhce = model.attention_weights(logits_bnhce, mask.dense(), None, c.dtype)
        mask_shape = (probs_bnhce.shape[1], c.num_heads, 1, probs_bnhce.shape[-1])
        probs_bnhce = model.dropout(probs_bnhce, c.dropout_rate, rows_b, mask_shape, split_dim=2)
        v_bnehK = blocks(v_bMhK[:, :length], size, beside=1)
        probs_bnhce, probs_bnhcG = jnp.split(probs_bnhce, [3 * size], axis=-1)
        heads_bnchK = jnp.einsum('bnhce,bnehK->bnchK', probs_bnhce, v_bnehK)
        if positions.is_in_bMG is not None:
            heads_bnchK += jnp.einsum('bnhcG,bGhK->bnchK', probs_bnhcG, v_bMhK[:, length:])
        return heads_bnchK.reshape(len(q_bThK), -1, *q_bThK.shape[2:])[:, :length]


def flops(c, S, T):
    """Return the FLOPs of a row's forward pass: T5's, but for the keys that a token of the inputs sees."""
    a = c.num_heads * c.head_dim
    has_globals = c.options.encoder_attention == 'transient_global'
    num_globals = has_globals * (S // c.options.tokens_per_block)
    num_keys = 3 * (c.options.local_radius + 1) + num_globals
    of_globals = num_globals * c.emb_dim * (4 * a + 2 * S)  # their keys and values, and their sums
    return t5_flops(c, S, T) + c.num_encoder_layers * (4 * S * (num_keys - S) * a + of_globals)


def modules(family):
    """Return LongT5."""
    parts = dataclasses.replace(family.parts, encoder=Encoder, attention=Attention)
    specs = (
        *family.specs,
        (r'encoder/side_relpos_bias/rel_embedding', P('model', None)),  # [heads, buckets]
        (r'encoder/.+/T5LayerNorm_0/scale', P(None)),  # [embed]
    )
    return dataclasses.replace(family, parts=parts, specs=specs, flops=flops)
