"""T5Gemma: T5 with the layers of Gemma 2.

Self-attention has rotary positions and a window, except in the last of every `full_every` layers. Several query heads
share keys and values. Scores and logits are capped. Norms, with scales around 0, come before and after each block. Each
stack has a token table. Embeddings are multiplied by sqrt(emb_dim); tied logits are not divided by it. The decoder
starts with id 2. The letters are model.py's, and

    k  key and value heads    g  the query heads of each

Source: Zhang et al. 2025 (T5Gemma); google-deepmind/gemma research/t5gemma/modules.py, gm/nn/_modules.py.
"""

import dataclasses

import haiku as hk
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import model
import partition
from configs import check, setting
from families import post_norms, soft_caps
from families.rotary import no_bias, rotate
from messages import Refused

START_ID = 2  # Gemma's token before a text
EMBEDDING = hk.initializers.VarianceScaling(1.0, 'fan_out', 'normal')  # tied logits begin around 1


def option(default, text, limits=setting.NOT_NEGATIVE):
    return dataclasses.field(default=default, metadata={'help': text, 'limits': limits})


@dataclasses.dataclass(frozen=True)
class Options:
    num_kv_heads: int = option(1, 'Key and value heads: must divide num_heads.', setting.SIZE)
    query_pre_attn_scalar: int = option(0, 'Scores are divided by its root; 0: head_dim.')
    attention_cap: float = option(50.0, 'Cap of the scores; 0: none.')
    logits_cap: float = option(30.0, 'Cap of the logits; 0: none.')
    window: int = option(4096, 'A query sees keys at smaller distances.', setting.SIZE)
    full_every: int = option(2, 'One layer of this many, the last, has no window.', setting.SIZE)
    rope_theta: float = option(10_000.0, 'Longest period / 2 pi.', setting.POSITIVE)
    encoder_emb_dim: int = option(0, "Of the encoder; 0: the decoder's, as in the next four.")
    encoder_num_heads: int = option(0, 'Of the encoder.')
    encoder_num_kv_heads: int = option(0, 'Of the encoder.')
    encoder_head_dim: int = option(0, 'Of the encoder.')
    encoder_mlp_dim: int = option(0, 'Of the encoder.')
    bos: bool = option(True, 'Whether inputs begin with id 2.', None)
    eos: bool = option(False, 'Whether inputs end with EOS.', None)
    more_ends: tuple = option((), 'Ids that end an answer, as EOS does.', None)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            key = f'model.options.{field.name}'
            value = getattr(self, field.name)
            check.check_allowed(key, value, field.default, field.metadata.get('limits'))


def encoder_config(c):
    """Return the T5Config of the encoder's modules."""
    o = c.options
    sizes = {}
    for name in ('emb_dim', 'num_heads', 'head_dim', 'mlp_dim'):
        sizes[name] = getattr(o, f'encoder_{name}') or getattr(c, name)
    o = dataclasses.replace(o, num_kv_heads=o.encoder_num_kv_heads or o.num_kv_heads)
    return dataclasses.replace(c, **sizes, options=o)


def embed(c, tokens_bT, table_vD):
    """Return the embedded tokens, [b, T, D]."""
    return model.embed(c, tokens_bT, table_vD) * jnp.sqrt(c.emb_dim).astype(c.dtype)


class Encoder(model.Encoder):
    """T5's encoder, with a token table of its own unless it is alone."""

    @hk.name_like('__call__')
    def embed(self, tokens_bT, segments_bT, table_vD):
        """Return the embedded tokens x_bTD, and the segments of their positions, 0 for padding."""
        if self.config.num_decoder_layers:
            table_vD = model.token_table(self.config)
        return super().embed(tokens_bT, segments_bT, table_vD)


class Decoder(model.Decoder):
    @hk.name_like('__call__')
    def embed(self, tokens_bT, table_vD):
        """Return the embedded tokens x_bTD. T5X's targets begin with 0."""
        return super().embed(jnp.where(tokens_bT == 0, START_ID, tokens_bT), table_vD)


def logits(c, x_bTD, table_vD, rows_b):
    """Return float32 logits_bTv. Unlike T5's, tied logits are not divided by sqrt(emb_dim)."""
    logits_bTv = model.decoder_logits(c, x_bTD, table_vD, rows_b)
    return logits_bTv * jnp.sqrt(c.emb_dim) if c.logits_via_embedding else logits_bTv


class Norm(model.RMSNorm):
    """x / rms(x) * (1 + scale), in float32."""

    def __call__(self, x_bTD):
        scale_D = hk.get_parameter('scale', x_bTD.shape[-1:], jnp.float32, jnp.zeros)
        weight_D = 1 + scale_D.astype(jnp.float32)  # bfloat16 would round this sum
        return model.normalize(x_bTD, weight_D, 'float32').astype(self.config.dtype)


class Attention(model.Attention):
    """Grouped attention. Cross-attention has neither positions nor a window."""

    @hk.name_like('__call__')
    def queries(self, x_bTD, positions):
        """Return q_bThK, which includes the scale of the scores."""
        c = self.config
        q_bThK = self.heads(x_bTD, 'query', c.parts.initializers.attention)
        scalar = c.options.query_pre_attn_scalar or c.head_dim
        return self.rotated(q_bThK, positions) * scalar**-0.5

    @hk.name_like('__call__')
    def keys_values(self, memory_bMD, positions):
        """Return k_bMkK and v_bMkK, the heads that this device's queries use."""
        c = self.config
        num_heads = c.options.num_kv_heads
        if c.num_heads % num_heads or c.head_dim % 2:
            raise Refused(
                f'num_kv_heads={num_heads} must divide num_heads={c.num_heads}, and 2 must divide head_dim={c.head_dim}'
            )
        initializer = c.parts.initializers.attention
        k_bMkK = self.heads(memory_bMD, 'key', initializer, num_heads)
        v_bMkK = self.heads(memory_bMD, 'value', initializer, num_heads)
        return self.rotated(k_bMkK, positions), v_bMkK

    @hk.name_like('__call__')
    def heads(self, x_bTD, name, initializer, num_heads=None):
        """Return x_bTD projected to this device's heads; of fewer heads than devices, to the one that it uses."""
        c = self.config
        num_devices = lax.psum(1, 'model')
        if num_heads is None or num_heads % num_devices == 0:
            return super().heads(x_bTD, name, initializer, num_heads)
        shape = (x_bTD.shape[-1], partition.split(num_heads * c.head_dim, 'model'))
        kernel = c.parts.kernel(c, shape, initializer, c.dtype, name=name)
        x_bTc = checkpoint_name(kernel('bTD,Dc->bTc', x_bTD), 'projection')
        x_bTC = lax.all_gather(x_bTc, 'model', axis=2, tiled=True)
        start = lax.axis_index('model') * num_heads // num_devices * c.head_dim
        return lax.dynamic_slice_in_dim(x_bTC, start, c.head_dim, axis=2)[:, :, None]

    def is_full(self):
        """Return whether the layer has no window."""
        return (self.index + 1) % self.config.options.full_every == 0

    def rotated(self, x_bThK, positions):
        """Rotate the heads by their positions, unless these are None."""
        if positions is None:
            return x_bThK
        return rotate(x_bThK, positions.queries_T[None], self.config.options.rope_theta)

    def seen(self, mask, positions):
        """Return mask_b1TM without the keys outside of the window. The decoder's mask is causal already."""
        if positions is None or self.is_full():
            return mask.dense()
        distance_TM = positions.queries_T[:, None] - positions.keys_M[None, :]
        return mask.dense() & (jnp.abs(distance_TM) < self.config.options.window)[None, None]

    def attend(self, q_bThK, k_bkKM, v_bkKM, mask, relpos_1hTM, positions, rows_b):
        """Return heads_bThK, the means of the values weighted by the softmax of the logits."""
        c = self.config
        logits_bhTM = self.logits(q_bThK, k_bkKM)
        mask_b1TM = self.seen(mask, positions)
        probs_bhTM = model.attention_weights(logits_bhTM, mask_b1TM, None, c.dtype)
        mask_shape = (c.num_heads, 1, probs_bhTM.shape[-1])
        probs_bhTM = model.dropout(probs_bhTM, c.dropout_rate, rows_b, mask_shape, split_dim=1)
        probs_bkgTM = in_groups(probs_bhTM, 1, v_bkKM.shape[1])
        return jnp.einsum('bkgTM,bkKM->bTkgK', probs_bkgTM, v_bkKM).reshape(q_bThK.shape)

    def logits(self, q_bThK, k_bkKM):
        """Return logits_bhTM, the products of queries and keys, before cap and mask."""
        c = self.config
        dtype = jnp.float32 if c.float32_attention_logits else c.dtype
        q_bTkgK = in_groups(q_bThK.astype(dtype), 2, k_bkKM.shape[1])
        logits_bkgTM = jnp.einsum('bTkgK,bkKM->bkgTM', q_bTkgK, k_bkKM.astype(dtype))
        return logits_bkgTM.reshape(len(q_bThK), q_bThK.shape[2], *logits_bkgTM.shape[3:])


def in_groups(x, dim, num_groups):
    """Split the query heads, dimension `dim` of x, into [num_groups, heads per group]."""
    return x.reshape(*x.shape[:dim], num_groups, x.shape[dim] // num_groups, *x.shape[dim + 1 :])


def flops(c, S, T):
    """Return the FLOPs of the matrix products in the forward pass of a row of S inputs and T targets."""
    e = encoder_config(c)
    total = 2 * T * c.emb_dim * c.vocab_size
    for stack, length, layers in ((e, S, c.num_encoder_layers), (c, T, c.num_decoder_layers)):
        a = stack.num_heads * stack.head_dim
        kv_width = 2 * stack.options.num_kv_heads * stack.head_dim
        matrices = stack.emb_dim * (2 * a + kv_width + 3 * stack.mlp_dim)
        total += layers * (2 * length * matrices + 4 * length * length * a)
    cross = 4 * T * c.emb_dim * a + 2 * S * e.emb_dim * kv_width + 4 * T * S * a
    return total + c.num_decoder_layers * cross


def ends(c, t5_ends):
    """Return the special ids around inputs and answers."""
    o = c.options
    answers = (*t5_ends.answers, *o.more_ends)
    inputs = ((START_ID,) * o.bos, t5_ends.answers * o.eos)
    return t5_ends._replace(answers=answers, inputs=inputs, start=START_ID)


def modules(family, **others):
    """Return T5Gemma. `others` replace its parts."""

    def check_mesh(c, mesh):
        size = mesh.shape['model']
        for stack in (c, encoder_config(c)):
            family.check_mesh(stack, mesh)
            num_heads = stack.options.num_kv_heads
            columns = num_heads * stack.head_dim
            if num_heads % size and (size % num_heads or columns % size):
                raise Refused(
                    f'num_kv_heads={num_heads}, mesh.model={size}: one must divide the other, and mesh.model {columns}'
                )

    parts = dict(
        embedder=embed,
        encoder=Encoder,
        decoder=Decoder,
        attention=Attention,
        norm=Norm,
        relpos_bias=no_bias,
        logits=logits,
        initializers=family.parts.initializers._replace(embedding=EMBEDDING),
    )
    gemma = dataclasses.replace(
        family,
        parts=dataclasses.replace(family.parts, **parts | others),
        specs=(*family.specs, (r'encoder/token_embedder/embedding', P('model', 'fsdp'))),
        encoder_config=encoder_config,
        ends=ends,
        period=lambda c: c.options.full_every,
        check_mesh=check_mesh,
        flops=flops,
    )
    return post_norms.modules(soft_caps.modules(gemma))
