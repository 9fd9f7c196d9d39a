"""LongT5: T5 whose encoder attends to near tokens, and to one global token for every few tokens.

With `encoder_attention='local'` a token sees the tokens at most `local_radius` away. With
'transient_global' it also sees the global tokens of its segment. Each layer makes them anew: a global
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


@dataclasses.dataclass(frozen=True)
class Options:
    encoder_attention: str = dataclasses.field(
        default='local',
        metadata={'choices': ('local', 'transient_global'), 'help': 'What a token sees.'},
    )
    local_radius: int = dataclasses.field(
        default=127, metadata={'range': (1, 100_000), 'help': 'The distance that a token sees.'}
    )
    tokens_per_block: int = dataclasses.field(
        default=16, metadata={'range': (1, 100_000), 'help': 'The tokens of a global token.'}
    )


class Globals(NamedTuple):
    """The global tokens of a batch."""

    is_in_bMG: jax.Array  # float32, 1 where a token belongs to a global token
    mask_bn1cG: jax.Array  # bool, the global tokens that a token sees
    relpos_bnhcG: jax.Array  # what each head adds to their logits


class Positions(NamedTuple):
    """What the attentions of the encoder share: positions in the keys of a block, and global tokens."""

    queries_T: jax.Array  # int32 [c]
    keys_M: jax.Array  # int32 [e]
    globals: Globals | None


class Encoder(model.Encoder):
    @hk.name_like('__call__')
    def shared(self, segments_bM):
        """Return mask_bn1ce, and the positions."""
        size = self.config.options.local_radius + 1
        queries_c = size + jnp.arange(size)
        keys_e = jnp.arange(3 * size)
        is_near_ce = jnp.abs(keys_e[None, :] - queries_c[:, None]) < size
        segments_bnc = blocks(segments_bM, size)
        segments_bnce = segments_bnc[..., None]
        mask_bnce = segments_bnce == with_neighbours(segments_bnc)[:, :, None]
        mask_bnce &= (segments_bnce > 0) & is_near_ce[None, None]
        global_tokens = None
        if self.config.options.encoder_attention == 'transient_global':
            global_tokens = self.global_tokens(segments_bM)
        return mask_bnce[:, :, None], Positions(queries_c, keys_e, global_tokens)

    @hk.name_like('__call__')
    def global_tokens(self, segments_bM):
        c = self.config
        size = c.options.local_radius + 1
        ids_bM, num_globals = global_ids(segments_bM, c.options.tokens_per_block)
        is_in_bMG = jax.nn.one_hot(ids_bM, num_globals)
        segments_bG = jnp.max(is_in_bMG * segments_bM[..., None], axis=1, initial=0)
        mask_bncG = blocks(segments_bM, size)[..., None] == segments_bG[:, None, None]
        # The distances between all ids, those of tokens with -1 among them, and then those of the tokens.
        all_ids = model.Positions(jnp.arange(-1, num_globals), jnp.arange(num_globals))
        bias = c.modules.relpos_bias(c, bidirectional=True, name='side_relpos_bias')
        relpos_GhG = bias(all_ids)[0].transpose(1, 0, 2)
        relpos_bnchG = relpos_GhG[blocks(ids_bM, size) + 1]
        return Globals(is_in_bMG, mask_bncG[:, :, None], relpos_bnchG.swapaxes(2, 3))


def global_ids(segments_bM, tokens_per_block):
    """Return the global token of each token, int32 [b, M], -1 for none, and the most that a row may have.

    A global token stands for each whole block of `tokens_per_block` tokens of a segment. The tokens after the last
    one belong to it. A segment without a whole block has none. Source: flaxformer make_etc_fixed_block_ids.
    """
    length = segments_bM.shape[1]
    index_1M = jnp.arange(length)[None]
    before_bM = jnp.pad(segments_bM, ((0, 0), (1, 0)))[:, :length]
    start_bM = lax.cummax(
        jnp.where(segments_bM != before_bM, index_1M, 0), axis=1
    )  # of the segment
    last = tokens_per_block - 1
    is_whole_bM = segments_bM == jnp.pad(segments_bM, ((0, 0), (0, last)))[:, last:]
    begins_bM = is_whole_bM & (segments_bM > 0) & ((index_1M - start_bM) % tokens_per_block == 0)
    ids_bM = jnp.cumsum(begins_bM, axis=1, dtype=jnp.int32) - 1
    has_one_bM = jnp.take_along_axis(begins_bM, start_bM, axis=1) & (segments_bM > 0)
    return jnp.where(has_one_bM, ids_bM, -1), length // tokens_per_block


def blocks(x_bM, size):
    """Return x_bM..., padded with zeros to whole blocks, as [b, n, size, ...]."""
    num_rows, length = x_bM.shape[:2]
    padding = [(0, 0)] * x_bM.ndim
    padding[1] = (0, -length % size)
    return jnp.pad(x_bM, padding).reshape(num_rows, -1, size, *x_bM.shape[2:])


def with_neighbours(x_bnc):
    """Return each block of x_bnc... between the one before and the one after, [b, n, e, ...]."""
    padding = [(0, 0)] * x_bnc.ndim
    padding[1] = (1, 1)
    padded = jnp.pad(x_bnc, padding)
    return jnp.concatenate([padded[:, :-2], x_bnc, padded[:, 2:]], axis=2)


class Attention(model.Attention):
    """Attention in blocks where the positions are the encoder's; that of the decoder is T5's."""

    @hk.name_like('__call__')
    def keys_values(self, memory_bMD, positions):
        """Return k_bMhK and v_bMhK, those of the global tokens last."""
        if isinstance(positions, Positions) and positions.globals is not None:
            inputs_bMD = memory_bMD.astype(jnp.float32)
            sums_bGD = jnp.einsum('bMG,bMD->bGD', positions.globals.is_in_bMG, inputs_bMD)
            norm = self.config.modules.norm(self.config, name='T5LayerNorm_0')  # Flax's name
            memory_bMD = jnp.concatenate([memory_bMD, norm(sums_bGD)], axis=1)
        return super().keys_values(memory_bMD, positions)

    @hk.name_like('__call__')
    def attend(self, q_bThK, k_bhKM, v_bhKM, mask_b1TM, relpos_1hTM, positions, rows_b):
        """Return heads_bThK. In the encoder, mask and bias are those of the blocks."""
        if not isinstance(positions, Positions):
            return super().attend(q_bThK, k_bhKM, v_bhKM, mask_b1TM, relpos_1hTM, positions, rows_b)
        c = self.config
        dtype = jnp.float32 if c.float32_attention_logits else c.dtype
        num_rows, length = q_bThK.shape[:2]
        size = len(positions.queries_T)
        k_bMhK = k_bhKM.transpose(0, 3, 1, 2)
        v_bMhK = v_bhKM.transpose(0, 3, 1, 2)
        q_bnchK = blocks(q_bThK, size).astype(dtype)
        k_bnehK = with_neighbours(blocks(k_bMhK[:, :length], size)).astype(dtype)
        logits_bnhce = jnp.einsum('bnchK,bnehK->bnhce', q_bnchK, k_bnehK)
        logits_bnhce += kernels.broadcast(relpos_1hTM[0], logits_bnhce.shape, c.dtype)
        mask_bn1ce = mask_b1TM
        if positions.globals is not None:
            k_bGhK = k_bMhK[:, length:].astype(dtype)
            logits_bnhcG = jnp.einsum('bnchK,bGhK->bnhcG', q_bnchK, k_bGhK)
            logits_bnhcG += positions.globals.relpos_bnhcG
            logits_bnhce = jnp.concatenate([logits_bnhce, logits_bnhcG], axis=-1)
            mask_bn1ce = jnp.concatenate([mask_bn1ce, positions.globals.mask_bn1cG], axis=-1)
        probs_bnhce = model.attention_weights(logits_bnhce, mask_bn1ce, None, c.dtype)
        num_blocks, _, _, num_keys = probs_bnhce.shape[1:]
        mask_shape = (num_blocks, c.num_heads, 1, num_keys)
        probs_bnhce = model.dropout(probs_bnhce, c.dropout_rate, rows_b, mask_shape, split_dim=2)
        v_bnehK = with_neighbours(blocks(v_bMhK[:, :length], size))
        local_bnhce = probs_bnhce[..., : 3 * size]
        heads_bnchK = jnp.einsum('bnhce,bnehK->bnchK', local_bnhce, v_bnehK)
        if positions.globals is not None:
            probs_bnhcG = probs_bnhce[..., 3 * size :]
            heads_bnchK += jnp.einsum('bnhcG,bGhK->bnchK', probs_bnhcG, v_bMhK[:, length:])
        return heads_bnchK.reshape(num_rows, -1, *q_bThK.shape[2:])[:, :length]


def modules(default):
    """Return the parts of LongT5."""
    return dataclasses.replace(
        default,
        encoder=Encoder,
        attention=Attention,
        specs=(
            *default.specs,
            (r'encoder/side_relpos_bias/rel_embedding', P('model', None)),  # [heads, buckets]
            (r'encoder/.+/T5LayerNorm_0/scale', P(None)),  # [embed]
        ),
    )
