"""T5Gemma 2: T5Gemma with the layers of Gemma 3, and with a decoder that attends to targets and inputs at once.

A query of the decoder weights the keys of the targets and of the inputs in one softmax. Both come from the same kernels,
but only target keys are rotated, by their positions in their segments. Queries and keys are normalized. Layers with and
without a window have different angles. Both stacks share a token table, with an extra row for the token that ends an
image; nothing else supports images.

The letters are model.py's and t5gemma.py's. Source: transformers (5.24) models/t5gemma2/modular_t5gemma2.py.
"""

import dataclasses
import functools
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import model
from configs import setting
from decode import KeysValues, LayerCache
from families import t5gemma
from families.rotary import rotate
from families.t5gemma import option


@dataclasses.dataclass(frozen=True)
class Options(t5gemma.Options):
    attention_cap: float = option(0.0, 'Cap of the scores; 0: none.')
    logits_cap: float = option(0.0, 'Cap of the logits; 0: none.')
    full_every: int = option(6, 'One layer of this many, the last, has no window.', setting.SIZE)
    encoder_emb_dim: int = option(0, 'Both stacks have the same width.', setting.Range(0, 0))
    full_rope_theta: float = option(1e6, 'rope_theta of layers without a window.', setting.POSITIVE)
    full_rope_factor: float = option(1.0, 'Divides positions in these layers.', setting.POSITIVE)
    eoi_id: int = option(256_000, 'The token that ends an image.')


class Positions(NamedTuple):
    """Positions, keys and masks of targets and inputs for the decoder's attention."""

    queries_T: jax.Array  # int32, as in model.Positions
    keys_M: jax.Array
    places_bT: jax.Array  # int32: positions of the queries in their segments
    inputs: KeysValues | None = None
    mask_b1TM: jax.Array | None = None  # the inputs' mask


def embed(c, tokens_bT, table_vD):
    """Return the embedded tokens, [b, T, D]. The extra row is not scaled."""
    x_bTD = t5gemma.embed(c, tokens_bT, table_vD)
    with hk.name_scope(hk.force_name('token_embedder')):  # one for both stacks
        row_D = hk.get_parameter('eoi_embedding', (c.emb_dim,), jnp.float32, jnp.zeros)
    is_end_bT1 = (tokens_bT == c.options.eoi_id)[..., None]
    return jnp.where(is_end_bT1, row_D.astype(x_bTD.dtype)[None, None], x_bTD)


class Decoder(t5gemma.Decoder):
    def __call__(self, x_bTD, encoded_bMD, mask, inputs_mask, positions, **others):
        """Return float32 logits_bTv, the caches, and aux."""
        # A query sees the targets of its segment up to itself: their number tells its position.
        places_bT = mask.dense().sum(axis=(1, 3), dtype=jnp.int32) - 1
        positions = Positions(*positions, places_bT, mask_b1TM=inputs_mask.dense())
        return super().__call__(x_bTD, encoded_bMD, mask, inputs_mask, positions, **others)


class DecoderLayer(model.DecoderLayer):
    """Attention and MLP, each after a norm and with a residual connection."""

    def __call__(
        self, x_bTD, encoded_bMD, mask, inputs_mask, positions, relpos_1hTM, rows_b, cache
    ):
        """Return x_bTD, the LayerCache and aux."""
        c = self.config
        inputs = cache.inputs
        if inputs is None:
            inputs = self.read_inputs(encoded_bMD)
        positions = positions._replace(inputs=inputs)
        y_bTD = c.parts.norm(c, name='pre_self_attention_layer_norm')(x_bTD)
        attention = c.parts.attention(c, self.index, name='self_attention')
        y_bTD, targets = attention(y_bTD, y_bTD, mask, None, rows_b, positions, cache.targets)
        x_bTD = model.add(c, x_bTD, 'self_attention', y_bTD, rows_b)
        y_bTD = c.parts.norm(c, name='pre_mlp_layer_norm')(x_bTD)
        if cache.targets is not None:
            mask = None
        y_bTD, aux = c.parts.mlp(c, self.index, name='mlp')(y_bTD, rows_b, mask)
        return model.add(c, x_bTD, 'mlp', y_bTD, rows_b), LayerCache(targets, inputs), aux

    @hk.name_like('__call__')
    def read_inputs(self, encoded_bMD):
        """Return the KeysValues of the inputs."""
        attention = self.config.parts.attention(self.config, self.index, name='self_attention')
        return attention.read(encoded_bMD, None)


class Attention(t5gemma.Attention):
    """Attention; in the decoder, which passes `Positions`, to targets and inputs."""

    @hk.name_like('__call__')
    def heads(self, x_bTD, name, initializer, num_heads=None):
        """Return x_bTD projected to heads, normalized unless they are values."""
        x_bThK = super().heads(x_bTD, name, initializer, num_heads)
        if name == 'value':
            return x_bThK
        return self.config.parts.norm(self.config, name=f'{name}_norm')(x_bThK)

    def rotated(self, x_bThK, positions):
        """Rotate the heads by their positions in their segments, unless `positions` is None."""
        o = self.config.options
        if positions is None:
            return x_bThK
        places_bT = positions.queries_T[None]
        if isinstance(positions, Positions):
            places_bT = positions.places_bT
        if self.is_full():
            return rotate(x_bThK, places_bT / o.full_rope_factor, o.full_rope_theta)
        return rotate(x_bThK, places_bT, o.rope_theta)

    def seen(self, mask, positions):
        """Return mask_b1TM without the keys outside of the window; the encoder's has half on each side."""
        if not isinstance(positions, model.Positions) or self.is_full():
            return super().seen(mask, positions)
        window = self.config.options.window
        distance_TM = positions.queries_T[:, None] - positions.keys_M[None, :]
        is_near_TM = (-(window // 2) <= distance_TM) & (distance_TM < (window + 1) // 2)
        return mask.dense() & is_near_TM[None, None]

    def attend(self, q_bThK, k_bkKM, v_bkKM, mask, relpos_1hTM, positions, rows_b):
        """Return heads_bThK. Even layers with a window see all inputs."""
        if isinstance(positions, Positions):
            # An example may be decoded by several adjacent rows.
            num_decodes = len(k_bkKM) // len(positions.mask_b1TM)
            repeat = functools.partial(jnp.repeat, repeats=num_decodes, axis=0)
            inputs, inputs_mask_b1TM = jax.tree.map(repeat, (positions.inputs, positions.mask_b1TM))
            k_bkKM = jnp.concatenate([k_bkKM, inputs.keys_ghKS], axis=3)
            v_bkKM = jnp.concatenate([v_bkKM, inputs.values_ghKS], axis=3)
            mask_b1TM = self.seen(mask, positions)
            shape = (*mask_b1TM.shape[:3], inputs_mask_b1TM.shape[3])
            masks = [mask_b1TM, jnp.broadcast_to(inputs_mask_b1TM, shape)]
            mask = model.Mask(jnp.concatenate(masks, axis=3))
            positions = None  # the mask includes the window
        return super().attend(q_bThK, k_bkKM, v_bkKM, mask, relpos_1hTM, positions, rows_b)


def flops(c, S, T):
    """Return the FLOPs of a row's forward pass: T5Gemma's without the queries and outputs of cross attention."""
    return (
        t5gemma.flops(c, S, T) - 4 * c.num_decoder_layers * T * c.emb_dim * c.num_heads * c.head_dim
    )


def modules(family):
    """Return T5Gemma 2."""
    family = t5gemma.modules(
        family,
        embedder=embed,
        encoder=model.Encoder,  # without a table of its own
        decoder=Decoder,
        decoder_layer=DecoderLayer,
        attention=Attention,
    )
    specs = (*family.specs, (r'token_embedder/eoi_embedding', P(None)))
    return dataclasses.replace(family, specs=specs, flops=flops)
