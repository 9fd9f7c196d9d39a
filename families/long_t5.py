"""LongT5: T5 whose encoder attends to nearby tokens, and optionally to a global token for each block.

With `encoder_attention='local'` a token sees the tokens at most `local_radius` away. With
'transient_global' it also sees the global tokens of its segment. Each layer computes its own: the
normalized sum of the inputs of `tokens_per_block` tokens, which then goes through the same key and
value kernels. The decoder is T5's.

The letters are model.py's, and

    n  blocks of local_radius + 1 tokens    c  the queries of a block    e  the keys of it and its two neighbors
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
        default=127, metadata={'help': 'The distance up to which a token sees others.'}
    )
    tokens_per_block: int = dataclasses.field(
        default=16, metadata={'help': 'Tokens per global token.'}
    )

    def __post_init__(self):
        kinds = ('local', 'transient_global')
        key = 'model.options.encoder_attention'
        check.check_allowed(key, self.encoder_attention, 'local', None, kinds)
        sizes = base.Range(1, 100_000)
        check.check_allowed('model.options.local_radius', self.local_radius, 127, sizes)
        check.check_allowed('model.options.tokens_per_block', self.tokens_per_block, 16, sizes)


class Positions(NamedTuple):
    """Shared by the encoder's attention layers: positions within a block's keys, and the global tokens."""

    queries_T: jax.Array  # int32 [c]
    keys_M: jax.Array  # int32 [e]
    is_in_bMG: jax.Array | None = None  # float32, 1 if a token belongs to a global token
    relpos_bnhcG: jax.Array | None = None  # the bias of the global tokens' logits


class Encoder(model.Encoder):
    @hk.name_like('__call__')
    def shared(self, segments_bM):
        """Return the mask of local keys and global tokens, bool [b, n, 1, c, e + G], and the positions."""
        c = self.config
        size = c.options.local_radius + 1
        positions = Positions(size + jnp.arange(size), jnp.arange(3 * size))
        is_near_ce = jnp.abs(positions.keys_M[None, :] - positions.queries_T[:, None]) < size
        segments_bnc1 = blocks(segments_bM, size)[..., None]
        mask_bnce = segments_bnc1 == blocks(segments_bM, size, num_neighbors=1)[:, :, None]
        mask_bnce &= (segments_bnc1 > 0) & is_near_ce[None, None]
        if c.options.encoder_attention == 'transient_global':
            ids_bM, segments_bG, is_in_bMG = global_tokens(segments_bM, c.options.tokens_per_block)
            mask_bncG = segments_bnc1 == segments_bG[:, None, None]
            mask_bnce = jnp.concatenate([mask_bnce, mask_bncG], axis=-1)
            ids_G = jnp.arange(segments_bG.shape[1])
            all_ids = model.Positions(jnp.arange(-1, len(ids_G)), ids_G)  # -1: none
            bias = c.parts.relpos_bias(c, bidirectional=True, name='side_relpos_bias')
            relpos_MhG = bias(all_ids)[0].astype(c.dtype).swapaxes(0, 1)
            relpos_bnhcG = relpos_MhG[blocks(ids_bM, size) + 1].swapaxes(2, 3)
            positions = positions._replace(is_in_bMG=is_in_bMG, relpos_bnhcG=relpos_bnhcG)
        return model.Mask(mask_bnce[:, :, None]), positions


def global_tokens(segments_bM, size):
    """Return ids_bM, each token's candidate for a global token, segments_bG, and is_in_bMG, whether it belongs to it.

    Each full block of `size` tokens of a segment makes a global token. The tokens after the last full block belong to
    the last global token. A segment without a full block has none. Source: flaxformer make_etc_fixed_block_ids.
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


def blocks(x_bM, size, num_neighbors=0):
    """Return x_bM... as [b, n, c, ...], padded with zeros; with `num_neighbors` on each side, [b, n, e, ...]."""
    margin = num_neighbors * size
    padding = [(0, 0), (margin, -x_bM.shape[1] % size + margin), *[(0, 0)] * (x_bM.ndim - 2)]
    padded = jnp.pad(x_bM, padding).reshape(len(x_bM), -1, size, *x_bM.shape[2:])
    num_blocks = padded.shape[1] - 2 * num_neighbors
    parts = [padded[:, i : i + num_blocks] for i in range(1 + 2 * num_neighbors)]
    return jnp.concatenate(parts, axis=2)


class Attention(model.Attention):
    """Attention in blocks in the encoder, which passes `Positions`; T5's in the decoder."""

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
        """Return heads_bThK. In the encoder, mask and bias have the shapes of blocks."""
        if not isinstance(positions, Positions):
            return super().attend(q_bThK, k_bhKM, v_bhKM, mask, relpos_1hTM, positions, rows_b)
        c = self.config
        dtype = jnp.float32 if c.float32_attention_logits else c.dtype
        length = q_bThK.shape[1]
        size = len(positions.queries_T)
        k_bMhK = k_bhKM.transpose(0, 3, 1, 2).astype(dtype)
        v_bMhK = v_bhKM.transpose(0, 3, 1, 2)
        q_bnchK = blocks(q_bThK, size).astype(dtype)
        k_bnehK = blocks(k_bMhK[:, :length], size, num_neighbors=1)
        logits_bnhce = jnp.einsum('bnchK,bnehK->bnhce', q_bnchK, k_bnehK)
        logits_bnhce += kernels.broadcast(relpos_1hTM[0], logits_bnhce.shape, c.dtype)
        if positions.is_in_bMG is not None:
            logits_bnhcG = jnp.einsum('bnchK,bGhK->bnhcG', q_bnchK, k_bMhK[:, length:])
            logits_bnhcG += positions.relpos_bnhcG
            logits_bnhce = jnp.concatenate([logits_bnhce, logits_bnhcG], axis=-1)
        probs_bnhce = model.attention_weights(logits_bnhce, mask.dense(), None, c.dtype)
        mask_shape = (probs_bnhce.shape[1], c.num_heads, 1, probs_bnhce.shape[-1])
        probs_bnhce = model.dropout(probs_bnhce, c.dropout_rate, rows_b, mask_shape, split_dim=2)
        v_bnehK = blocks(v_bMhK[:, :length], size, num_neighbors=1)
        probs_bnhce, probs_bnhcG = jnp.split(probs_bnhce, [3 * size], axis=-1)
        heads_bnchK = jnp.einsum('bnhce,bnehK->bnchK', probs_bnhce, v_bnehK)
        if positions.is_in_bMG is not None:
            heads_bnchK += jnp.einsum('bnhcG,bGhK->bnchK', probs_bnhcG, v_bMhK[:, length:])
        return heads_bnchK.reshape(len(q_bThK), -1, *q_bThK.shape[2:])[:, :length]


def flops(c, S, T):
    """Return the FLOPs of a row's forward pass: T5's, except for the number of keys that an input token sees."""
    a = c.num_heads * c.head_dim
    has_globals = c.options.encoder_attention == 'transient_global'
    num_globals = has_globals * (S // c.options.tokens_per_block)
    num_keys = 3 * (c.options.local_radius + 1) + num_globals
    global_flops = num_globals * c.emb_dim * (4 * a + 2 * S)  # keys and values, and sums
    return t5_flops(c, S, T) + c.num_encoder_layers * (4 * S * (num_keys - S) * a + global_flops)


def modules(family):
    """Return LongT5."""
    parts = dataclasses.replace(family.parts, encoder=Encoder, attention=Attention)
    specs = (
        *family.specs,
        (r'encoder/side_relpos_bias/rel_embedding', P('model', None)),  # [heads, buckets]
        (r'encoder/.+/T5LayerNorm_0/scale', P(None)),  # [embed]
    )
    return dataclasses.replace(family, parts=parts, specs=specs, flops=flops)
