"""T5 encoder-decoder: T5 1.0, T5 1.1 and every model of their shape.

All code here is one device's part of the computation. It runs inside `jax.shard_map` over the axes
of the mesh, or inside `partition.one_device`. The suffix of a name gives the dimensions of an
array: an upper-case letter is a whole dimension, a lower-case letter is this device's slice of it.
`partial_` marks a sum over 'model' that is due.

    b  rows of the batch (BATCH_AXES)  D  embed (emb_dim)         T  query positions
    h  attention heads   ('model')     K  head size (head_dim)    M  key and value positions
    f  MLP width         ('model')     R  relative position buckets
    v  vocabulary        ('model')     1  a dimension of size one

Decoding has a few more. Several rows may decode one example, which are neighbours.

    r  rows of decoding (BATCH_AXES)   n  beams of an example
    g  groups of rows that share a cache of targets: a row, or the n beams of an example
    S  slots of a cache, position * n + beam, or the positions of the inputs

The modules build their submodules inside `__call__`, each with an explicit name, so that parameters
have T5X's paths and shapes. Parameters are float32. `rows_b`, where a module takes it, numbers the
rows within the global batch and turns dropout on; None turns it off.

Source: T5X t5x/examples/t5/{network,layers}.py; Raffel et al. 2020 (T5) §2.1; Shazeer 2020 (gated
MLPs); Hu et al. 2021 (LoRA).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import partition

# How parameters are split: path (a regular expression that matches all of it) -> PartitionSpec.
# Each module asks Haiku for its local shape, so a row that disagrees with its module raises an
# error with the path.
PARAMETER_SPECS = {
    r'token_embedder/embedding': P('model', None),  # [vocab, embed]
    r'.+/relpos_bias/rel_embedding': P('model', None),  # [heads, buckets]
    r'.+/(query|key|value)/kernel': P(None, 'model'),  # [embed, heads * head size]
    r'.+/out/kernel': P('model', None),  # [heads * head size, embed]
    r'.+/mlp/wi(_\d)?/kernel': P(None, 'model'),  # [embed, mlp]
    r'.+/mlp/wo/kernel': P('model', None),  # [mlp, embed]
    r'decoder/logits_dense/kernel': P(None, 'model'),  # [embed, vocab]
    r'.+_norm/scale': P(None),  # [embed]
    # The adapters of a kernel are split like its rows and its columns.
    r'.+/(query|key|value|wi(_\d)?|logits_dense)/lora_a': P(None, None),  # [rows, rank]
    r'.+/(query|key|value|wi(_\d)?|logits_dense)/lora_b': P(None, 'model'),  # [rank, columns]
    r'.+/(out|wo)/lora_a': P('model', None),  # [rows, rank]
    r'.+/(out|wo)/lora_b': P(None, None),  # [rank, columns]
}
ADAPTER = r'.+/lora_[ab]'  # the paths of adapters
ACTIVATIONS: dict[str, Callable] = {
    'relu': jax.nn.relu,
    'gelu': lambda x: jax.nn.gelu(x, approximate=True),  # the tanh form, as in Flax and Mesh-TF
    'silu': jax.nn.silu,
    'swish': jax.nn.silu,
    'linear': lambda x: x,
}
DTYPES = ('float32', 'bfloat16')
MODULE = ''  # in a copy that a user's own file has changed (own_model.py): the path of that file
NUM_BUCKETS = 32  # of relative positions, in every T5
MAX_DISTANCE = 128  # from here on, relative positions share the last bucket

# Standard deviation 1 / sqrt(rows of the kernel). A truncated normal has it after truncation.
NORMAL = hk.initializers.VarianceScaling(1.0, 'fan_in', 'normal')
TRUNCATED_NORMAL = hk.initializers.VarianceScaling(1.0, 'fan_in', 'truncated_normal')
UNIFORM = hk.initializers.VarianceScaling(1.0, 'fan_avg', 'uniform')


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and numerics, under T5X's field names (t5x/examples/t5/network.py).

    configs/base.py has the defaults and says what each field means.
    """

    vocab_size: int
    dtype: str  # of the computation; parameters are float32
    emb_dim: int
    num_heads: int
    num_encoder_layers: int
    num_decoder_layers: int  # 0: an encoder alone
    head_dim: int
    mlp_dim: int
    mlp_activations: tuple[str, ...]  # their outputs are multiplied
    dropout_rate: float
    logits_via_embedding: bool  # True: tied, and the logits are divided by sqrt(emb_dim)
    float32_attention_logits: bool
    relpos_bias_per_layer: bool  # False: the layers of a stack share one table
    lora_rank: int = 0  # of the adapters; 0: none
    lora_alpha: float = 16.0
    lora_targets: str = r'.+/(query|value)/kernel'  # the paths of the kernels that have adapters
    module: str = ''  # the file of an own model; '' for this one

    def __post_init__(self):
        if self.module != MODULE:
            raise ValueError(
                f'model.module={self.module!r}, and this T5Config is of {MODULE or "model.py"}: make the '
                'config of an own model with own_model.make_config'
            )
        object.__setattr__(self, 'mlp_activations', tuple(self.mlp_activations))  # JSON has lists
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            smallest = 0 if field.name in ('lora_rank', 'num_decoder_layers') else 1
            if field.type is int and size < smallest:
                raise ValueError(f'model.{field.name}={size}: must be at least {smallest}')
        if self.dtype not in DTYPES:
            raise ValueError(f"model.dtype={self.dtype!r}: use 'float32' or 'bfloat16'")
        if not self.mlp_activations or not set(self.mlp_activations) <= set(ACTIVATIONS):
            raise ValueError(
                f'model.mlp_activations={self.mlp_activations}: use some of {", ".join(ACTIVATIONS)}, as in '
                "('gelu', 'linear')"
            )
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f'model.dropout_rate={self.dropout_rate}: must lie in [0, 1)')
        try:
            re.compile(self.lora_targets)
        except re.error as error:
            raise ValueError(
                f'model.lora_targets={self.lora_targets!r} is no regular expression ({error}): write '
                "one of the paths of kernels, such as '.+/(query|value)/kernel'"
            ) from error


def init(config: T5Config, key: jax.Array) -> dict[str, jax.Array]:
    """Return T5X's initial parameters, {path: float32 array of whole shape}.

    They have the same bits on every mesh.
    """
    tokens_11 = jnp.ones([1, 1], jnp.int32)
    batch = {
        'encoder_input_tokens': tokens_11,
        'decoder_input_tokens': tokens_11,
        'decoder_target_tokens': tokens_11,
    }
    transformed = hk.transform(lambda: logits(config, batch))
    if config.num_decoder_layers == 0:
        transformed = hk.transform(lambda: encode(config, tokens_11))
    tree = partition.one_device(transformed.init)(key)
    return {f'{scope}/{name}': x for scope, leaves in tree.items() for name, x in leaves.items()}


def shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    """Return {path: whole shape} of all parameters; nothing is computed."""
    return dict(_shapes(config))


@functools.lru_cache(maxsize=16)
def _shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    """The cached part of `shapes`: many callers ask, and tracing a large model takes seconds."""
    tree = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return {path: x.shape for path, x in tree.items()}


def apply(f: Callable, params: Mapping[str, jax.Array], key: jax.Array | None = None):
    """Call `f`, a function that uses this file's modules, on this device's slices of `params`."""
    tree: dict[str, dict[str, jax.Array]] = {}
    for path, x in params.items():
        scope, name = path.rsplit('/', 1)
        tree.setdefault(scope, {})[name] = x
    return hk.transform(f).apply(tree, key)


def check_mesh(config: T5Config, mesh: Mesh) -> None:
    """Raise ValueError unless the mesh splits heads, MLP width and vocabulary evenly."""
    for name in ('num_heads', 'mlp_dim', 'vocab_size'):
        partition.check_divides(f'model.{name}', getattr(config, name), ('model',), mesh)


def check_adapters(config: T5Config) -> None:
    """Raise ValueError where adapters are asked for and no kernel has one."""
    paths = shapes(config)
    if config.lora_rank and not any(re.fullmatch(ADAPTER, path) for path in paths):
        kernels = [path for path in paths if path.endswith('/kernel')]
        raise ValueError(
            f'model.lora_targets={config.lora_targets!r} matches none of the {len(kernels)} kernels: '
            f'it must match the whole path of one or more, such as {kernels[0]!r}'
        )


def without_adapters(config: T5Config) -> T5Config:
    """Return the config of the base, which is also that of the merged model."""
    return dataclasses.replace(config, lora_rank=0)


def merge_adapters(params: Mapping[str, Any], merge: Callable) -> dict[str, Any]:
    """Return the parameters without adapters: a kernel that has some is `merge(kernel, a, b)`."""
    merged = {}
    for path, x in params.items():
        scope, name = path.rsplit('/', 1)
        if name == 'kernel' and f'{scope}/lora_a' in params:
            merged[path] = merge(x, params[f'{scope}/lora_a'], params[f'{scope}/lora_b'])
        elif not re.fullmatch(ADAPTER, path):
            merged[path] = x
    return merged


def adapted_kernel(
    config: T5Config, kernel: jax.Array, lora_a: jax.Array, lora_b: jax.Array
) -> jax.Array:
    """Return a kernel with its adapters: Hu et al. 2021 (LoRA) §4.1, float32."""
    product = jnp.matmul(lora_a, lora_b, precision='highest')
    return kernel + config.lora_alpha / config.lora_rank * product


def logits(
    config: T5Config, batch: Mapping[str, jax.Array], rows_b: jax.Array | None = None
) -> jax.Array:
    """Return float32 logits_bTv of the next target token, teacher-forced: the whole model.

    `batch` has T5X's features, int32 [b, length]: encoder_input_tokens, decoder_input_tokens,
    decoder_target_tokens and, when packed, both segment_ids. Positions are unused, as in T5X:
    within a segment, array indices differ by the same amounts. The decoder's features may have
    several rows for each row of the inputs, one after another: the inputs are encoded once.
    """
    # A sequence that is not packed is segment 1. Padding is segment 0 and sees nothing. T5X goes by
    # the targets, so that the BOS of decoder_input_tokens, which is 0 like padding, is seen.
    segments_bM = (batch['encoder_input_tokens'] > 0) * batch.get('encoder_segment_ids', 1)
    segments_bT = (batch['decoder_target_tokens'] > 0) * batch.get('decoder_segment_ids', 1)
    embedder = Embedder(config, name='token_embedder')
    encoded_bMD = Encoder(config, name='encoder')(
        embedder(batch['encoder_input_tokens']),
        mask_b1TT=attention_mask(segments_bM, segments_bM),
        rows_b=rows_b,
    )
    num_targets = len(segments_bT) // len(segments_bM)
    if num_targets > 1:
        encoded_bMD = jnp.repeat(encoded_bMD, num_targets, axis=0)
        segments_bM = jnp.repeat(segments_bM, num_targets, axis=0)
    return Decoder(config, embedder, name='decoder')(
        embedder(batch['decoder_input_tokens']),
        encoded_bMD,
        mask_b1TT=attention_mask(segments_bT, segments_bT, causal=True),
        mask_b1TM=attention_mask(segments_bT, segments_bM),
        rows_b=rows_b,
    )


def encode(config: T5Config, inputs_bM: jax.Array, embedder: 'Embedder | None' = None) -> jax.Array:
    """Return encoded_bMD of `inputs`, int32 ids padded with 0, in the dtype of the computation.

    `embedder` is that of the decoder, where there is one.
    """
    mask_bM = inputs_bM > 0
    embedder = embedder or Embedder(config, name='token_embedder')
    return Encoder(config, name='encoder')(
        embedder(inputs_bM), mask_b1TT=attention_mask(mask_bM, mask_bM), rows_b=None
    )


class KeysValues(NamedTuple):
    """What attention reads."""

    keys_bMhK: jax.Array
    values_bMhK: jax.Array


class CachedKeysValues(NamedTuple):
    """What attention reads when decoding: the tokens of all beams of a group.

    The slots come last, as in T5X, because XLA then multiplies without copying.
    """

    keys_ghKS: jax.Array
    values_ghKS: jax.Array


class LayerCache(NamedTuple):
    """What decoding remembers for one layer of the decoder.

    Differs from T5X, which computes keys and values of the inputs again at each step, and for each
    beam.
    """

    targets: CachedKeysValues  # of the tokens that have been read, with room for more
    inputs: CachedKeysValues  # of the encoded inputs


class Cache(NamedTuple):
    """What decoding remembers."""

    length: jax.Array  # int32: tokens that have been read, which is the position of the next one
    mask_b11M: jax.Array  # bool: which inputs are not padding
    # int32: the beam that wrote position M of the sequence that each beam has now. Beams are
    # reordered here. Keys and values stay, and each beam sees those that belong to it.
    writers_gnM: jax.Array
    layers: tuple[LayerCache, ...]


def start_decoding(
    config: T5Config,
    inputs_bM: jax.Array,
    max_length: int,
    num_decodes: int = 1,
    is_beam_search: bool = False,
) -> Cache:
    """Encode `inputs`, int32 ids padded with 0, and return a cache for `max_length` target tokens.

    As many steps may follow. One more would overwrite the last token; `grow_cache` makes more room.
    `num_decodes` rows decode each example. Those of a beam search may be reordered.
    """
    embedder = Embedder(config, name='token_embedder')
    encoded_bMD = encode(config, inputs_bM, embedder)
    num_beams = num_decodes if is_beam_search else 1
    num_groups = len(inputs_bM) * num_decodes // num_beams
    layers = Decoder(config, embedder, name='decoder').start(encoded_bMD, num_groups)
    cache = Cache(
        length=jnp.int32(0),
        mask_b11M=(inputs_bM > 0)[:, None, None],
        writers_gnM=jnp.zeros_like(inputs_bM, shape=(num_groups, num_beams, 0)),
        layers=layers,
    )
    return grow_cache(cache, max_length)


def grow_cache(cache: Cache, max_length: int) -> Cache:
    """Return `cache` with room for `max_length` target tokens in all."""
    num_beams, length = cache.writers_gnM.shape[1:]
    num_more = max_length - length

    def grown(x_ghKS: jax.Array) -> jax.Array:
        return jnp.pad(x_ghKS, ((0, 0), (0, 0), (0, 0), (0, num_more * num_beams)))

    layers = []
    for layer in cache.layers:
        layers.append(layer._replace(targets=jax.tree.map(grown, layer.targets)))
    writers_gnM = jnp.pad(cache.writers_gnM, ((0, 0), (0, 0), (0, num_more)))
    return cache._replace(writers_gnM=writers_gnM, layers=tuple(layers))


def reorder_beams(cache: Cache, parents_bn: jax.Array) -> Cache:
    """Return the cache in which each beam has the sequence of the beam `parents`, 0 to n - 1.

    Differs from T5X, which copies all keys and values.
    """
    writers_gnM = jnp.take_along_axis(cache.writers_gnM, parents_bn[:, :, None], axis=1)
    return cache._replace(writers_gnM=writers_gnM)


def decode_step(
    config: T5Config, tokens_r: jax.Array, cache: Cache, transposed: bool = False
) -> tuple[jax.Array, Cache]:
    """Read the next decoder input token of each row, int32; the first is BOS, 0.

    Returns float32 logits_rv of the token that follows, which are those of `logits` at that
    position, and the cache with the token read. `transposed`: the parameters are those of
    `transpose_for_steps`.
    """
    embedder = Embedder(config, name='token_embedder')
    decoder = Decoder(config, embedder, name='decoder', transposed=transposed)
    logits_r1v, cache = decoder.step(embedder(tokens_r[:, None]), cache)
    return logits_r1v[:, 0], cache


# The matrices that a step of decoding multiplies by.
STEP_KERNELS = (
    r'decoder/layers_\d+/(self_attention/(query|key|value|out)'
    r'|encoder_decoder_attention/(query|out)|mlp/wi(_\d)?|mlp/wo)/kernel|decoder/logits_dense/kernel'
)


def transpose_for_steps(config: T5Config, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the parameters of the decoder with the kernels of `decode_step` transposed.

    A CPU multiplies a matrix by a few columns about twice as fast as a few rows by a matrix, and
    transposing takes as long as several steps. So one who decodes more than once keeps them.
    """
    transposed = {}
    for path, x in params.items():
        if re.fullmatch(STEP_KERNELS, path):
            dtype = 'float32' if path == 'decoder/logits_dense/kernel' else config.dtype
            transposed[path] = x.T.astype(dtype)
        elif not path.startswith('encoder/'):
            transposed[path] = x
    return transposed


def step_specs(specs: Mapping[str, P]) -> dict[str, P]:
    """Return the specs of what `transpose_for_steps` returns, of the parameters' own."""
    transposed = {}
    for path, spec in specs.items():
        if re.fullmatch(STEP_KERNELS, path):
            transposed[path] = P(*spec[::-1])
        elif not path.startswith('encoder/'):
            transposed[path] = spec
    return transposed


def attention_mask(segments_bT, segments_bM, causal: bool = False) -> jax.Array:
    """Return which keys a query sees, bool [b, 1, T, M]: those of its segment, but not padding."""
    queries_b1T1 = segments_bT[:, None, :, None]
    keys_b11M = segments_bM[:, None, None, :]
    mask_b1TM = (queries_b1T1 == keys_b11M) & (queries_b1T1 > 0)
    if causal:
        mask_b1TM &= jnp.tril(jnp.ones_like(mask_b1TM))
    return mask_b1TM


class Encoder(hk.Module):
    """Embedded tokens to encoded_bTD."""

    def __init__(self, config: T5Config, name: str):
        super().__init__(name)
        self.config = config

    def __call__(self, x_bTD, mask_b1TT, rows_b):
        c = self.config
        length = x_bTD.shape[1]
        x_bTD = dropout(x_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))
        relative_TT = relative_positions(jnp.arange(length), jnp.arange(length))
        relpos_1hTT = None
        if not c.relpos_bias_per_layer:
            relpos_bias = RelativePositionBias(c, bidirectional=True, name='relpos_bias')
            relpos_1hTT = relpos_bias(relative_TT)
        for i in range(c.num_encoder_layers):
            layer = EncoderLayer(c, name=f'layers_{i}')
            x_bTD = layer(x_bTD, mask_b1TT, relative_TT, relpos_1hTT, rows_b)
        x_bTD = RMSNorm(c, name='encoder_norm')(x_bTD)
        # The one place where T5X's dropout mask is not shared along the length.
        return dropout(x_bTD, c.dropout_rate, rows_b, mask_shape=(length, c.emb_dim))


class EncoderLayer(hk.Module):
    """Self-attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: T5Config, name: str):
        super().__init__(name)
        self.config = config

    def __call__(self, x_bTD, mask_b1TT, relative_TT, relpos_1hTT, rows_b):
        """Return x_bTD. `relpos_1hTT`: the bias that all layers share; None: each has its own."""
        c = self.config
        if c.relpos_bias_per_layer:
            relpos_bias = RelativePositionBias(c, bidirectional=True, name='relpos_bias')
            relpos_1hTT = relpos_bias(relative_TT)
        y_bTD = RMSNorm(c, name='pre_attention_layer_norm')(x_bTD)
        y_bTD = Attention(c, name='attention')(y_bTD, y_bTD, mask_b1TT, relpos_1hTT, rows_b)
        x_bTD = x_bTD + dropout(y_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))
        y_bTD = RMSNorm(c, name='pre_mlp_layer_norm')(x_bTD)
        y_bTD = Mlp(c, name='mlp')(y_bTD, rows_b)
        return x_bTD + dropout(y_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))


class Decoder(hk.Module):
    """Embedded decoder inputs and encoded inputs to float32 logits, all at once or step by step."""

    def __init__(self, config: T5Config, embedder: 'Embedder', name: str, transposed: bool = False):
        super().__init__(name)
        self.config = config
        self.embedder = embedder
        self.transposed = transposed

    def __call__(self, x_bTD, encoded_bMD, mask_b1TT, mask_b1TM, rows_b):
        """Return logits_bTv, teacher-forced."""
        c = self.config
        length = x_bTD.shape[1]
        x_bTD = dropout(x_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))
        relative_TT = relative_positions(jnp.arange(length), jnp.arange(length))
        relpos_1hTT = self.shared_relpos_bias(relative_TT)
        for i in range(c.num_decoder_layers):
            layer = DecoderLayer(c, name=f'layers_{i}')
            x_bTD = layer(
                x_bTD, encoded_bMD, mask_b1TT, mask_b1TM, relative_TT, relpos_1hTT, rows_b
            )
        return self.logits(x_bTD, rows_b)

    @hk.name_like('__call__')
    def start(self, encoded_bMD, num_groups):
        """Return each layer's cache before the first step, without room for tokens."""
        layers = []
        for i in range(self.config.num_decoder_layers):
            layer = DecoderLayer(self.config, name=f'layers_{i}')
            layers.append(layer.start(encoded_bMD, num_groups))
        return tuple(layers)

    @hk.name_like('__call__')
    def step(self, x_r1D, cache):
        """Read one token of each row; return logits_r1v and the cache with the token read."""
        c = self.config
        num_beams, max_length = cache.writers_gnM.shape[1:]
        beams_n = jnp.arange(num_beams)
        own_gn1 = jnp.zeros_like(cache.writers_gnM[:, :, :1]) + beams_n[None, :, None]
        writers_gnM = lax.dynamic_update_slice_in_dim(
            cache.writers_gnM, own_gn1, cache.length, axis=2
        )
        # The query T of a beam sees what its sequence has at a position, whichever beam wrote it.
        positions_M = jnp.arange(max_length)
        is_writer_gTMn = writers_gnM[..., None] == beams_n[None, None, None]
        is_read_M = positions_M <= cache.length
        mask_gTMn = is_writer_gTMn & is_read_M[None, None, :, None]
        mask_g1TS = mask_gTMn.reshape(-1, 1, num_beams, max_length * num_beams)
        positions_S = jnp.repeat(positions_M, num_beams)
        relative_1S = relative_positions(cache.length[None], positions_S)
        relpos_1h1S = self.shared_relpos_bias(relative_1S)
        layers = []
        for i in range(c.num_decoder_layers):
            layer = DecoderLayer(c, name=f'layers_{i}', transposed=self.transposed)
            x_r1D, layer_cache = layer.step(
                x_r1D,
                cache.layers[i],
                position=cache.length,
                mask_g1TS=mask_g1TS,
                inputs_mask_b11M=cache.mask_b11M,
                relative_1S=relative_1S,
                relpos_1h1S=relpos_1h1S,
            )
            layers.append(layer_cache)
        cache = cache._replace(
            length=cache.length + 1, writers_gnM=writers_gnM, layers=tuple(layers)
        )
        return self.logits(x_r1D, rows_b=None), cache

    @hk.name_like('__call__')
    def shared_relpos_bias(self, relative_TM):
        """Return the bias that the layers share, [1, h, T, M]; None where each has its own."""
        if self.config.relpos_bias_per_layer:
            return None
        relpos_bias = RelativePositionBias(self.config, bidirectional=False, name='relpos_bias')
        return relpos_bias(relative_TM)

    @hk.name_like('__call__')
    def logits(self, x_bTD, rows_b):
        """Return logits_bTv, which are float32 whatever the dtype of the computation."""
        c = self.config
        x_bTD = RMSNorm(c, name='decoder_norm')(x_bTD)
        x_bTD = dropout(x_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))
        x_bTD = x_bTD.astype(jnp.float32)
        if c.logits_via_embedding:
            table_vD = self.embedder.table()
            if self.transposed:
                logits_bTv = multiply_transposed(table_vD, x_bTD[:, 0])[:, None]
            else:
                logits_bTv = jnp.einsum('bTD,vD->bTv', x_bTD, table_vD)
            return logits_bTv / jnp.sqrt(c.emb_dim)
        shape = (c.emb_dim, partition.split(c.vocab_size, 'model'))
        logits_dense = Kernel(
            c, shape, TRUNCATED_NORMAL, 'float32', name='logits_dense', transposed=self.transposed
        )
        return logits_dense('bTD,Dv->bTv', x_bTD)


class DecoderLayer(hk.Module):
    """Self-attention, cross attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: T5Config, name: str, transposed: bool = False):
        super().__init__(name)
        self.config = config
        self.transposed = transposed

    def __call__(self, x_bTD, encoded_bMD, mask_b1TT, mask_b1TM, relative_TT, relpos_1hTT, rows_b):
        """Return x_bTD of all positions. Self-attention has a bias; cross attention has none."""
        c = self.config
        if c.relpos_bias_per_layer:
            relpos_bias = RelativePositionBias(c, bidirectional=False, name='relpos_bias')
            relpos_1hTT = relpos_bias(relative_TT)
        y_bTD = RMSNorm(c, name='pre_self_attention_layer_norm')(x_bTD)
        y_bTD = Attention(c, name='self_attention')(y_bTD, y_bTD, mask_b1TT, relpos_1hTT, rows_b)
        x_bTD = x_bTD + dropout(y_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))
        y_bTD = RMSNorm(c, name='pre_cross_attention_layer_norm')(x_bTD)
        cross_attention = Attention(c, name='encoder_decoder_attention')
        y_bTD = cross_attention(y_bTD, encoded_bMD, mask_b1TM, None, rows_b)
        x_bTD = x_bTD + dropout(y_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))
        y_bTD = RMSNorm(c, name='pre_mlp_layer_norm')(x_bTD)
        y_bTD = Mlp(c, name='mlp')(y_bTD, rows_b)
        return x_bTD + dropout(y_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))

    @hk.name_like('__call__')
    def start(self, encoded_bMD, num_groups):
        """Return the cache before the first step, without room for tokens."""
        c = self.config
        num_heads = partition.split(c.num_heads, 'model')
        nothing_ghKS = jnp.zeros((num_groups, num_heads, c.head_dim, 0), c.dtype)
        axes = (*partition.BATCH_AXES, 'model')
        nothing_ghKS = lax.pcast(nothing_ghKS, axes, to='varying')
        cross_attention = Attention(c, name='encoder_decoder_attention')
        keys_bMhK, values_bMhK = cross_attention.keys_values(encoded_bMD)
        return LayerCache(
            targets=CachedKeysValues(nothing_ghKS, nothing_ghKS),
            inputs=CachedKeysValues(
                keys_ghKS=keys_bMhK.transpose(0, 2, 3, 1),
                values_ghKS=values_bMhK.transpose(0, 2, 3, 1),
            ),
        )

    @hk.name_like('__call__')
    def step(self, x_r1D, cache, position, mask_g1TS, inputs_mask_b11M, relative_1S, relpos_1h1S):
        """Return x_r1D at `position`, as __call__ has it without dropout, and the new cache."""
        c = self.config
        if c.relpos_bias_per_layer:
            relpos_bias = RelativePositionBias(c, bidirectional=False, name='relpos_bias')
            relpos_1h1S = relpos_bias(relative_1S)
        y_r1D = RMSNorm(c, name='pre_self_attention_layer_norm')(x_r1D)
        self_attention = Attention(c, name='self_attention', transposed=self.transposed)
        y_r1D, targets = self_attention.step(y_r1D, cache.targets, position, mask_g1TS, relpos_1h1S)
        x_r1D = x_r1D + y_r1D
        y_r1D = RMSNorm(c, name='pre_cross_attention_layer_norm')(x_r1D)
        cross_attention = Attention(c, name='encoder_decoder_attention', transposed=self.transposed)
        q_r1hK = cross_attention.queries(y_r1D)
        x_r1D = x_r1D + cross_attention.attend_cache(q_r1hK, cache.inputs, inputs_mask_b11M)
        y_r1D = RMSNorm(c, name='pre_mlp_layer_norm')(x_r1D)
        x_r1D = x_r1D + Mlp(c, name='mlp', transposed=self.transposed)(y_r1D)
        return x_r1D, cache._replace(targets=targets)


def write_cache(cache: CachedKeysValues, new: KeysValues, position: jax.Array) -> CachedKeysValues:
    """Return `cache` with the keys and values of one token of each row written at `position`."""

    def written(cached_ghKS: jax.Array, new_r1hK: jax.Array) -> jax.Array:
        num_groups, num_heads, head_dim, _ = cached_ghKS.shape
        new_gnhK = new_r1hK.reshape(num_groups, -1, num_heads, head_dim)
        new_ghKn = new_gnhK.transpose(0, 2, 3, 1)
        slot = position * new_ghKn.shape[3]
        return lax.dynamic_update_slice_in_dim(cached_ghKS, new_ghKn, slot, axis=3)

    return CachedKeysValues(
        keys_ghKS=written(cache.keys_ghKS, new.keys_bMhK),
        values_ghKS=written(cache.values_ghKS, new.values_bMhK),
    )


class Attention(hk.Module):
    """Multi-head attention and its output projection; the heads are split over 'model'."""

    def __init__(self, config: T5Config, name: str, transposed: bool = False):
        super().__init__(name)
        self.config = config
        self.transposed = transposed

    def __call__(self, x_bTD, memory_bMD, mask_b1TM, relpos_1hTM, rows_b):
        """Return what x_bTD reads from memory_bMD, which is x_bTD itself in self-attention."""
        q_bThK = self.queries(x_bTD)
        keys_values = self.keys_values(memory_bMD)
        return self.attend(q_bThK, keys_values, mask_b1TM, relpos_1hTM, rows_b)

    @hk.name_like('__call__')
    def step(self, x_r1D, cache, position, mask_g1TS, relpos_1h1S):
        """Return what self-attention reads at `position`, [r, 1, D], and the cache with x_r1D in it."""
        q_r1hK = self.queries(x_r1D)
        cache = write_cache(cache, self.keys_values(x_r1D), position)
        return self.attend_cache(q_r1hK, cache, mask_g1TS, relpos_1h1S), cache

    @hk.name_like('__call__')
    def queries(self, x_bTD):
        """Return q_bThK. Their scale, 1/sqrt(head_dim), is in the initial values, as in T5X."""
        head_dim = self.config.head_dim
        root = jnp.sqrt(head_dim).astype(self.config.dtype).astype(jnp.float32)  # rounded as in T5X
        return self.heads(x_bTD, 'query', lambda *shape: NORMAL(*shape) / root)

    @hk.name_like('__call__')
    def keys_values(self, memory_bMD):
        """Return the KeysValues of memory_bMD."""
        keys_bMhK = self.heads(memory_bMD, 'key', NORMAL)
        values_bMhK = self.heads(memory_bMD, 'value', NORMAL)
        return KeysValues(keys_bMhK, values_bMhK)

    @hk.name_like('__call__')
    def heads(self, x_bTD, name, initializer):
        """Return x_bTD projected to this device's heads, [b, T, h, K]."""
        c = self.config
        num_heads = partition.split(c.num_heads, 'model')
        shape = (c.emb_dim, num_heads * c.head_dim)
        kernel = Kernel(c, shape, initializer, c.dtype, name=name, transposed=self.transposed)
        return kernel('bTD,DhK->bThK', x_bTD, columns=(num_heads, c.head_dim))

    @hk.name_like('__call__')
    def attend(self, q_bThK, keys_values, mask_b1TM, relpos_1hTM=None, rows_b=None):
        """Return y_bTD, whole: the values that the queries read, projected."""
        c = self.config
        k_bMhK, v_bMhK = keys_values
        if c.float32_attention_logits:
            q_bThK = q_bThK.astype(jnp.float32)
            k_bMhK = k_bMhK.astype(jnp.float32)
        logits_bhTM = jnp.einsum('bThK,bMhK->bhTM', q_bThK, k_bMhK)
        probs_bhTM = self.probabilities(logits_bhTM, mask_b1TM, relpos_1hTM)
        mask_shape = (c.num_heads, 1, probs_bhTM.shape[-1])
        probs_bhTM = dropout(probs_bhTM, c.dropout_rate, rows_b, mask_shape, split_dim=1)
        return self.out(jnp.einsum('bhTM,bMhK->bThK', probs_bhTM, v_bMhK))

    @hk.name_like('__call__')
    def attend_cache(self, q_r1hK, keys_values, mask_g1TS, relpos_1h1S=None):
        """Return y_r1D: what each row reads from the cache of its group, projected.

        The rows of a group are its queries T. `keys_values` are CachedKeysValues.
        """
        c = self.config
        k_ghKS, v_ghKS = keys_values
        num_groups, num_heads = k_ghKS.shape[:2]
        q_gThK = q_r1hK.reshape(num_groups, -1, num_heads, c.head_dim)
        if c.float32_attention_logits:
            q_gThK = q_gThK.astype(jnp.float32)
            k_ghKS = k_ghKS.astype(jnp.float32)
        logits_ghTS = jnp.einsum('gThK,ghKS->ghTS', q_gThK, k_ghKS)
        probs_ghTS = self.probabilities(logits_ghTS, mask_g1TS, relpos_1h1S)
        heads_gThK = jnp.einsum('ghTS,ghKS->gThK', probs_ghTS, v_ghKS)
        return self.out(heads_gThK.reshape(q_r1hK.shape))

    def probabilities(self, logits_bhTM, mask_b1TM, relpos_1hTM):
        """Return probs_bhTM, how much of each position that it sees a query reads."""
        dtype = self.config.dtype
        bias = jnp.where(mask_b1TM, 0.0, -1e10).astype(dtype)
        if relpos_1hTM is not None:
            bias = bias + relpos_1hTM
        return jax.nn.softmax(logits_bhTM + bias.astype(logits_bhTM.dtype)).astype(dtype)

    @hk.name_like('__call__')
    def out(self, heads_bThK):
        """Return y_bTD, whole: what the heads have read, projected."""
        c = self.config
        num_heads = partition.split(c.num_heads, 'model')
        shape = (num_heads * c.head_dim, c.emb_dim)
        out = Kernel(c, shape, NORMAL, c.dtype, name='out', transposed=self.transposed)
        partial_bTD = out('bThK,hKD->bTD', heads_bThK)
        return lax.psum(partial_bTD, 'model')  # the sum over the split heads


class Mlp(hk.Module):
    """Feed-forward, plain ('relu',) or gated ('gelu', 'linear'), its width split over 'model'."""

    def __init__(self, config: T5Config, name: str, transposed: bool = False):
        super().__init__(name)
        self.config = config
        self.transposed = transposed

    def __call__(self, x_bTD, rows_b=None):
        c = self.config
        width = partition.split(c.mlp_dim, 'model')
        gates = []
        for i, activation in enumerate(c.mlp_activations):
            name = 'wi' if len(c.mlp_activations) == 1 else f'wi_{i}'
            shape = (c.emb_dim, width)
            wi = Kernel(c, shape, TRUNCATED_NORMAL, c.dtype, name=name, transposed=self.transposed)
            gate_bTf = wi('bTD,Df->bTf', x_bTD)
            gates.append(ACTIVATIONS[activation](gate_bTf))
        hidden_bTf = math.prod(gates)
        hidden_bTf = dropout(hidden_bTf, c.dropout_rate, rows_b, (1, c.mlp_dim), split_dim=2)
        shape = (width, c.emb_dim)
        wo = Kernel(c, shape, TRUNCATED_NORMAL, c.dtype, name='wo', transposed=self.transposed)
        partial_bTD = wo('bTf,fD->bTD', hidden_bTf)
        return lax.psum(partial_bTD, 'model')  # the sum over the split width


class Embedder(hk.Module):
    """The token table of encoder and decoder, float32, its rows split over 'model'."""

    def __init__(self, config: T5Config, name: str):
        super().__init__(name)
        # An own model has another T5Config, and its functions are those of own_model.of(config).
        assert isinstance(config, T5Config)
        self.config = config

    def __call__(self, tokens_bT):
        """Return the embedded tokens, [b, T, D] in the dtype of the computation."""
        table_vD = self.table()
        own_bT = tokens_bT - lax.axis_index('model') * table_vD.shape[0]
        is_own_bT1 = ((own_bT >= 0) & (own_bT < table_vD.shape[0]))[..., None]
        # The cast comes after the lookup, so that the gradient of a row is summed in float32.
        rows_bTD = jnp.take(table_vD, own_bT, axis=0, mode='clip').astype(self.config.dtype)
        partial_bTD = jnp.where(is_own_bT1, rows_bTD, 0)
        return lax.psum(partial_bTD, 'model')  # one device has the row, the others add zero

    def table(self):
        """Return this device's rows of the table, float32 [v, D]."""
        shape = (partition.split(self.config.vocab_size, 'model'), self.config.emb_dim)
        initializer = hk.initializers.RandomNormal(1.0)
        return hk.get_parameter('embedding', shape, jnp.float32, initializer)


class RelativePositionBias(hk.Module):
    """What each head adds to its attention logits for each relative position."""

    def __init__(self, config: T5Config, bidirectional: bool, name: str):
        super().__init__(name)
        self.config = config
        self.bidirectional = bidirectional

    def __call__(self, relative_TM):
        """Return the bias of relative_TM, as `relative_positions` has them: [1, h, T, M]."""
        c = self.config
        shape = (partition.split(c.num_heads, 'model'), NUM_BUCKETS)
        table_hR = hk.get_parameter('rel_embedding', shape, jnp.float32, UNIFORM).astype(c.dtype)
        bucket_TM = relative_position_bucket(relative_TM, self.bidirectional)
        # A product with one-hot rows, not a lookup: its gradient is a matmul, where that of a
        # lookup is a scatter of length^2 updates into 32 buckets.
        one_hot_TMR = jax.nn.one_hot(bucket_TM, NUM_BUCKETS, dtype=c.dtype)
        bias_hTM = jnp.einsum('hR,TMR->hTM', table_hR, one_hot_TMR)
        return bias_hTM[None]


def relative_positions(query_T: jax.Array, key_M: jax.Array) -> jax.Array:
    """Return key position minus query position, int32 [T, M]."""
    return key_M[None, :] - query_T[:, None]


def relative_position_bucket(relative_TM: jax.Array, bidirectional: bool) -> jax.Array:
    """Return the bucket in [0, 32) of key position minus query position, int32.

    Buckets are exact when near and logarithmic up to a distance of 128. Keys to the right of the
    query have the upper half of the buckets in the encoder (bidirectional), and bucket 0 in the
    decoder. Source: Mesh-TF transformer_layers.py; the epsilon is T5X's.
    """
    num_buckets = NUM_BUCKETS
    offset = jnp.int32(0)
    distance = jnp.maximum(-relative_TM, 0)
    if bidirectional:
        num_buckets = NUM_BUCKETS // 2
        offset = jnp.where(relative_TM > 0, num_buckets, 0)
        distance = jnp.abs(relative_TM)
    num_exact = num_buckets // 2
    ratio = distance.astype(jnp.float32) / num_exact + jnp.finfo(jnp.float32).eps
    scale = (num_buckets - num_exact) / jnp.log(MAX_DISTANCE / num_exact)
    far = num_exact + (jnp.log(ratio) * scale).astype(jnp.int32)
    return offset + jnp.where(distance < num_exact, distance, jnp.minimum(far, num_buckets - 1))


class RMSNorm(hk.Module):
    """x / rms(x) * scale, without mean and bias; the statistics are float32."""

    def __init__(self, config: T5Config, name: str):
        super().__init__(name)
        self.config = config

    def __call__(self, x_bTD):
        c = self.config
        scale_D = hk.get_parameter('scale', (c.emb_dim,), jnp.float32, jnp.ones)
        x_bTD = x_bTD.astype(jnp.float32)
        mean_square_bT1 = jnp.mean(lax.square(x_bTD), axis=-1, keepdims=True)
        y_bTD = (x_bTD * lax.rsqrt(mean_square_bT1 + 1e-6)).astype(c.dtype)
        return y_bTD * scale_D.astype(c.dtype)[None, None]


class Kernel(hk.Module):
    """The product with a float32 matrix, cast to `dtype`.

    The caller completes a sum over split rows. The matrix has adapters if `config.lora_targets`
    matches its path. `transposed`: the tree has the transposed matrix of `transpose_for_steps`.
    """

    def __init__(
        self,
        config: T5Config,
        shape: tuple[int, int],
        initializer: Callable,
        dtype: str,
        name: str,
        transposed: bool = False,
    ):
        super().__init__(name)
        self.config = config
        self.shape = shape
        self.initializer = initializer
        self.dtype = dtype
        self.transposed = transposed

    def __call__(self, equation, x, columns=(-1,)):
        """Return einsum(equation, x, matrix), [b, T, *columns], for x of [b, T, *rows].

        `columns`: the shape in which the equation has them.
        """
        if self.transposed:
            kernel = hk.get_parameter('kernel', self.shape[::-1], self.dtype)
            y = multiply_transposed(kernel, x.reshape(len(x), -1))
            return y.reshape(*x.shape[:2], *columns)
        kernel = self.kernel().astype(self.dtype)
        return jnp.einsum(equation, x, kernel.reshape(*x.shape[2:], *columns))

    @hk.name_like('__call__')
    def kernel(self):
        """Return the float32 matrix, changed by its adapters if it has some."""
        c = self.config
        rows, columns = self.shape
        kernel = hk.get_parameter('kernel', self.shape, jnp.float32, self.initializer)
        if c.lora_rank and re.fullmatch(c.lora_targets, f'{self.module_name}/kernel'):
            lora_a = hk.get_parameter('lora_a', (rows, c.lora_rank), jnp.float32, NORMAL)
            lora_b = hk.get_parameter('lora_b', (c.lora_rank, columns), jnp.float32, jnp.zeros)
            kernel = adapted_kernel(c, kernel, lora_a, lora_b)
        return kernel


def multiply_transposed(kernel_FD: jax.Array, x_bD: jax.Array) -> jax.Array:
    """Return x @ kernel.T, [b, F], as kernel @ x.T, the form that is fast on a CPU."""
    y_Fb = kernel_FD @ x_bD.T
    # Without the barrier, XLA would turn it into the slow form again.
    return lax.optimization_barrier(y_Fb).T


def dropout(
    x: jax.Array,
    rate: float,
    rows_b: jax.Array | None,
    mask_shape: tuple[int, ...],
    split_dim: int | None = None,
) -> jax.Array:
    """Return x with a fraction `rate` of it set to zero and the rest scaled up.

    `rows_b`: int32, the number of each row in the global batch; None: no dropout. `mask_shape`: the
    whole mask of a row, 1 where the dimension shares it. `split_dim`: the dimension of x that
    'model' splits.

    Differs from T5X, which draws one mask for a whole batch. Here the key of a row is the key of
    the call folded with the row's number, and a device takes its part of the row's mask: the same
    on every mesh.
    """
    if rows_b is None or rate == 0:
        return x
    keys_b = jax.vmap(jax.random.fold_in, (None, 0))(hk.next_rng_key(), rows_b)
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, mask_shape))(keys_b)
    if split_dim is not None:
        keep = partition.own_slice(keep, 'model', split_dim)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))
