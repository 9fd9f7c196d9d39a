"""T5 encoder-decoder: T5 1.0, T5 1.1 and every model of their shape.

All code here is one device's part of the computation. It runs inside `jax.shard_map` over the mesh, or inside
`partition.one_device`. The suffix of a name gives the dimensions of an array: an upper-case letter is a full
dimension, a lower-case letter this device's slice of it. `partial_` marks a value whose sum over 'model' is due:
`check_output` raises an error for a module that returns one.

    b  rows of the batch (BATCH_AXES)  D  embed (emb_dim)         T  query positions
    h  attention heads   ('model')     K  head size (head_dim)    M  key and value positions
    f  MLP width         ('model')     R  relative position buckets
    v  vocabulary        ('model')     1  a dimension of size one

Decoding uses the same modules. Several adjacent rows r may decode one example, as its samples or beams;
the n beams of a group g are the queries T of a step (decode.py defines the letters).

The modules build their submodules inside `__call__`, each with an explicit name: parameters then have T5X's paths and
shapes. Trained parameters are float32. `rows_b` numbers the rows within the global batch and turns dropout on; None
turns it off. Code shared by all layers is wrapped in `jax.jit`, so JAX traces it once per shape, not once per layer.

Source: T5X t5x/examples/t5/{network,layers}.py; Raffel et al. 2020 (T5) §2.1; Shazeer 2020 (gated MLPs).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import kernels
import kernels_gpu
import partition
from decode import Cache, KeysValues, LayerCache, add_writers, empty_cache, read_mask
from family import Family, Options
from loss import Outputs

# How parameters are split: regular expression of a path -> PartitionSpec. Each module asks Haiku for
# its local shape, unsplit over 'fsdp', which `apply` gathers: a row that disagrees is an error.
PARAMETER_SPECS = {
    r'token_embedder/embedding': P('model', 'fsdp'),  # [vocab, embed]
    r'.+/relpos_bias/rel_embedding': P('model', None),  # [heads, buckets]
    r'.+/(query|key|value)/kernel': P('fsdp', 'model'),  # [embed, heads * head size]
    r'.+/out/kernel': P('model', 'fsdp'),  # [heads * head size, embed]
    r'.+/mlp/wi(_\d)?/kernel': P('fsdp', 'model'),  # [embed, mlp]
    r'.+/mlp/wo/kernel': P('model', 'fsdp'),  # [mlp, embed]
    r'decoder/logits_dense/kernel': P('fsdp', 'model'),  # [embed, vocab]
    r'.+_norm/scale': P(None),  # [embed]
}
ACTIVATIONS: dict[str, Callable] = {
    'relu': jax.nn.relu,
    'gelu': lambda x: jax.nn.gelu(x, approximate=True),  # the tanh form, as in Flax and Mesh-TF
    'silu': jax.nn.silu,
    'swish': jax.nn.silu,
    'linear': lambda x: x,
}
# Values of a layer kept for the backward pass in addition to its inputs; all others are recomputed.
REMAT_POLICIES = {
    'full': None,
    'dots': jax.checkpoint_policies.save_only_these_names('projection', 'sum'),
}

NORMAL = hk.initializers.VarianceScaling(1.0, 'fan_in', 'normal')
TRUNCATED_NORMAL = hk.initializers.VarianceScaling(1.0, 'fan_in', 'truncated_normal')
UNIFORM = hk.initializers.VarianceScaling(1.0, 'fan_avg', 'uniform')


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and numerics, under T5X's field names. configs/base.py explains them and has the defaults."""

    vocab_size: int
    dtype: str  # for the computation; parameters are float32
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
    logits_dtype: str = 'float32'
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128  # farther positions share the last bucket
    lora_rank: int = 0  # 0: no adapters
    lora_alpha: float = 16.0
    lora_targets: str = r'.+/(query|value)/kernel'  # paths of the kernels with adapters
    module: str = ''  # files of an own model and names of families, with commas; '' for T5
    options: Options | None = None  # the settings of `module`
    remat: str = 'none'
    scan_layers: bool = False
    own: 'Family[T5Config, Parts] | None' = dataclasses.field(default=None, repr=False)

    @property
    def family(self) -> 'Family[T5Config, Parts]':
        """T5, or what formats.own_model.complete makes of `module` and `lora_rank`."""
        assert self.own or not (self.module or self.lora_rank), 'complete the config'
        return self.own or T5

    @property
    def parts(self) -> 'Parts':
        """The classes and functions that the model computes with."""
        return self.family.parts

    def __post_init__(self):
        object.__setattr__(self, 'mlp_activations', tuple(self.mlp_activations))  # JSON has lists
        object.__setattr__(self, 'options', self.options or None)  # configs have an empty group


@functools.partial(jax.jit, static_argnums=0)  # traced once, for `shapes` and for a run
def init(config: T5Config, key: jax.Array) -> dict[str, jax.Array]:
    """Return T5X's initial parameters, {path: float32 array, unsplit}, the same on every mesh."""
    features = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')

    def read(next_getter, x, context):
        # Mark the axes that split the parameter, as on a mesh: a step has the same checks.
        path = context.full_name
        if '~' in path:
            raise ValueError(f"{path}: the method that makes it needs @hk.name_like('__call__')")
        [spec] = param_specs(config, [path]).values()
        return lax.pcast(next_getter(x), tuple(jax.tree.leaves(tuple(spec))), to='varying')

    def forward(tokens_bT):
        with hk.custom_getter(read):
            if config.num_decoder_layers == 0:
                return encode(config, tokens_bT)
            return logits(config, dict.fromkeys(features, tokens_bT))

    on_one = partition.one_device(hk.transform(forward).init, (P(), partition.BATCH))
    tree = on_one(key, jnp.ones([1, 1], jnp.int32))
    return {f'{scope}/{name}': x for scope, leaves in tree.items() for name, x in leaves.items()}


def shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    """Return {path: unsplit shape} of all parameters, without computing them."""
    tree = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return {path: x.shape for path, x in tree.items()}


def param_specs(config: T5Config, paths: Iterable[str] | None = None) -> dict[str, P]:
    """Return {path: spec} of `paths`, by default of all parameters."""
    return config.family.param_specs(config, shapes(config) if paths is None else paths)


def apply(
    f: Callable,
    params: Mapping[str, jax.Array],
    *args,
    key: jax.Array | None = None,
    gradient_dtype: str = 'float32',
):
    """Return f(*args) on this device's slices of `params`; f is a function such as `logits`.

    A parameter is cast to the dtype in which a module reads it. If it is split over 'fsdp', it is gathered in the
    narrower of the two dtypes, and the backward pass sums and scatters its gradient in `gradient_dtype`.
    """
    tree: dict[str, dict[str, jax.Array]] = {}
    for path, x in params.items():
        scope, name = path.rsplit('/', 1)
        tree.setdefault(scope, {})[name] = x

    def read(next_getter, x, context):
        x = next_getter(x)
        for dim, size in enumerate(context.original_shape):
            if x.shape[dim] < size:
                x = partition.all_gather(x, 'fsdp', dim, context.original_dtype, gradient_dtype)
        return x.astype(context.original_dtype)

    def read_and_call(*args):
        with hk.custom_getter(read):
            return f(*args)

    return hk.transform(read_and_call).apply(tree, key, *args)


def adapter_paths(config: T5Config) -> tuple[str, ...]:
    """Return the paths of the adapters: only they are trained and saved, on top of a base checkpoint."""
    return tuple(path for path in shapes(config) if re.fullmatch(config.family.adapters, path))


# The model.

Aux = dict[str, jax.Array]  # {name: float32 [b]}: values that layers report of each row


def logits(
    config: T5Config, batch: Mapping[str, jax.Array], rows_b: jax.Array | None = None
) -> Outputs:
    """Return the teacher-forced logits of the next target token, and the other outputs for a loss.

    `batch` has T5X's features, int32 [b, length]: encoder_input_tokens, decoder_input_tokens, decoder_target_tokens
    and, when packed, both segment_ids. The decoder may have several adjacent rows for each row of the inputs.
    """
    # Padding is segment 0 and sees nothing; an unpacked sequence is segment 1. As in T5X, targets mark the
    # decoder's padding, because BOS in decoder_input_tokens is also 0.
    segments_bM = (batch['encoder_input_tokens'] > 0) * batch.get('encoder_segment_ids', True)
    segments_bT = (batch['decoder_target_tokens'] > 0) * batch.get('decoder_segment_ids', True)
    table_vD = token_table(config)
    inputs_bM = batch['encoder_input_tokens']
    encoded_bMD, segments_bM, encoder_aux = encode(
        config, inputs_bM, segments_bM, rows_b, table_vD, batch
    )
    num_targets = len(segments_bT) // len(segments_bM)
    if num_targets > 1:
        encoded_bMD = jnp.repeat(encoded_bMD, num_targets, axis=0)
        segments_bM = jnp.repeat(segments_bM, num_targets, axis=0)
        encoder_aux = {name: jnp.repeat(x, num_targets, axis=1) for name, x in encoder_aux.items()}
    decoder = config.parts.decoder(config, name='decoder')
    decoder.batch = batch
    mask, positions = decoder.shared(segments_bT)
    logits_bTv, _, decoder_aux = decoder(
        decoder.embed(batch['decoder_input_tokens'], table_vD),
        encoded_bMD,
        mask=mask,
        inputs_mask=segment_mask(segments_bT, segments_bM),
        positions=positions,
        rows_b=rows_b,
        table_vD=table_vD,
    )
    aux = {}
    for name in encoder_aux.keys() | decoder_aux.keys():
        values = [stack[name] for stack in (encoder_aux, decoder_aux) if name in stack]
        aux[name] = jnp.concatenate(values).mean(axis=0)
        check_output('layers', aux[name], segments_bT.shape[:1], jnp.float32, f'aux {name!r}')
    return Outputs(logits_bTv, encoded_bMD, segments_bM, aux)


def encode(
    config: T5Config,
    inputs_bM: jax.Array,
    segments_bM: jax.Array | None = None,
    rows_b: jax.Array | None = None,
    table_vD: jax.Array | None = None,
    batch: Mapping[str, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array, Aux]:
    """Return encoded_bMD in the dtype of the computation, the segments of its positions, and aux, [layers, b].

    `inputs`: int32 ids. `segments`: 0 for padding, by default where inputs are 0. `table_vD`: see `token_table`.
    """
    if segments_bM is None:
        segments_bM = (inputs_bM > 0).astype(jnp.int32)
    if table_vD is None:
        table_vD = token_table(config)
    encoder = config.parts.encoder(config.family.encoder_config(config), name='encoder')
    encoder.batch = batch
    x_bMD, segments_bM = encoder.embed(inputs_bM, segments_bM, table_vD)
    check_output('encoder', x_bMD, x_bMD.shape, jnp.float32, 'embedding')
    encoded_bMD, aux = encoder(x_bMD, segments_bM, rows_b)
    check_output('encoder', encoded_bMD, x_bMD.shape, config.dtype)
    return encoded_bMD, segments_bM, aux


def token_table(config: T5Config) -> jax.Array:
    """Read this device's rows of the token table, float32 [v, D]. Call it once: it may gather them over 'fsdp'."""
    shape = (partition.split(config.vocab_size, 'model'), config.emb_dim)
    with hk.name_scope('token_embedder'):
        return hk.get_parameter(
            'embedding', shape, jnp.float32, config.parts.initializers.embedding
        )


def start_decoding(
    config: T5Config,
    inputs_bM: jax.Array,
    num_decodes: int = 1,
    is_beam_search: bool = False,
    batch: Mapping[str, jax.Array] | None = None,
) -> Cache:
    """Encode `inputs`, int32 ids padded with 0; return a cache for `num_decodes` rows each, with no room for tokens."""
    encoded_bMD, segments_bM, _ = encode(config, inputs_bM, batch=batch)
    inputs = config.parts.decoder(config, name='decoder').read_inputs(encoded_bMD)
    num_beams = num_decodes if is_beam_search else 1
    num_groups = len(inputs_bM) * num_decodes // num_beams
    return empty_cache(inputs, (segments_bM > 0)[:, None, None], num_groups, num_beams)


def decode_step(config: T5Config, tokens_r: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Run the decoder on a token per row, int32, first BOS (0); return float32 logits_rv of the next, and the cache."""
    cache = add_writers(cache)
    num_groups, num_beams, room = cache.writers_gnM.shape
    table_vD = token_table(config)
    decoder = config.parts.decoder(config, name='decoder')
    logits_gTv, layers, _ = decoder(
        decoder.embed(tokens_r.reshape(num_groups, num_beams), table_vD),
        None,
        mask=Mask(read_mask(cache)),
        inputs_mask=Mask(cache.mask_b11M),
        positions=Positions(cache.length[None], jnp.repeat(jnp.arange(room), num_beams)),
        rows_b=None,
        table_vD=table_vD,
        caches=cache.layers,
    )
    cache = cache._replace(length=cache.length + 1, layers=layers)
    return logits_gTv.reshape(len(tokens_r), -1), cache


class Mask(NamedTuple):
    """The keys that each query sees: as a dense mask, and as segments for an attention that builds none."""

    mask_b1TM: jax.Array  # bool
    queries_bT: jax.Array | None = None  # segments; None if they do not determine the mask
    keys_bM: jax.Array | None = None
    causal: bool = False

    def dense(self) -> jax.Array:
        return self.mask_b1TM


def segment_mask(queries_bT, keys_bM, causal: bool = False) -> Mask:
    """Return the mask of the keys in a query's segment, up to its position if `causal`. Segment 0 is padding.

    Segments are int32, or bool for rows with padding only at their ends.
    """
    queries_b1T1 = queries_bT[:, None, :, None]
    keys_b11M = keys_bM[:, None, None, :]
    mask_b1TM = (queries_b1T1 == keys_b11M) & (queries_b1T1 > 0)
    if causal:
        mask_b1TM &= jnp.tril(jnp.ones_like(mask_b1TM))
    return Mask(mask_b1TM, queries_bT, keys_bM, causal)


class Positions(NamedTuple):
    """The positions of queries and keys in self-attention, int32."""

    queries_T: jax.Array  # in decoding [1]: all beams are at one position
    keys_M: jax.Array  # in decoding, of all slots


@dataclasses.dataclass
class Encoder(hk.Module):
    """Tokens to encoded_bTD, and the aux of the layers."""

    config: T5Config
    name: str
    batch: Mapping[str, jax.Array] | None = None  # with the numbers of examples

    @hk.name_like('__call__')
    def embed(self, tokens_bT, segments_bT, table_vD):
        """Return the embedded tokens x_bTD, and the segments of their positions, 0 for padding."""
        return self.config.parts.embedder(self.config, tokens_bT, table_vD), segments_bT

    def __call__(self, x_bTD, segments_bT, rows_b):
        """Return encoded_bTD and aux."""
        c = self.config
        x_bTD = dropout(x_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))
        mask, positions = self.shared(segments_bT)
        relpos_1hTT = None
        if not c.relpos_bias_per_layer:
            relpos_1hTT = c.parts.relpos_bias(c, bidirectional=True, name='relpos_bias')(positions)

        def layer(index, x_bTD):
            encoder_layer = c.parts.encoder_layer(c, index, name=f'layers_{index}')
            return encoder_layer(x_bTD, mask, positions, relpos_1hTT, rows_b)

        x_bTD, aux = apply_layers(c, c.num_encoder_layers, layer, x_bTD)
        x_bTD = c.parts.norm(c, name='encoder_norm')(x_bTD)
        # T5X shares dropout masks along the length everywhere but here.
        return dropout(x_bTD, c.dropout_rate, rows_b, mask_shape=x_bTD.shape[1:]), aux

    @hk.name_like('__call__')
    def shared(self, segments_bT):
        """Return the mask and the positions, shared by the attentions of all layers."""
        positions_T = jnp.arange(segments_bT.shape[1])
        return segment_mask(segments_bT, segments_bT), Positions(positions_T, positions_T)


def apply_layers(
    c: T5Config, num_layers: int, layer: Callable, x_bTD: jax.Array
) -> tuple[jax.Array, Aux]:
    """Apply the layers, functions `layer(index, x_bTD)`, with `c.remat` and `c.scan_layers`; return x_bTD and aux.

    Aux is stacked over the layers that report it, [layers, b]. A layer gathers its own parameters: remat
    gathers them again, a scan gathers one period of layers at a time.
    """
    if c.scan_layers and not hk.running_init() and num_layers >= c.family.period(c):
        return scan_layers(c, num_layers, layer, x_bTD)
    return loop_over_layers(c, range(num_layers), layer, x_bTD)


def loop_over_layers(
    c: T5Config, indices: Iterable[int], layer: Callable, x_bTD: jax.Array, in_scan: bool = False
) -> tuple[jax.Array, Aux]:
    """Apply the layers of `indices`, as `apply_layers` does, one by one."""
    aux: dict[str, list] = {}
    for index in indices:
        run = functools.partial(layer, index)
        if c.remat != 'none':
            run = hk.remat(run, policy=REMAT_POLICIES[c.remat], prevent_cse=not in_scan)
        before_bTD = x_bTD
        x_bTD, layer_aux = run(x_bTD)
        check_output(f'layers_{index}', x_bTD, before_bTD.shape, before_bTD.dtype)
        for name, value_b in layer_aux.items():
            aux.setdefault(name, []).append(value_b)
    return x_bTD, {name: jnp.stack(values) for name, values in aux.items()}


def scan_layers(
    c: T5Config, num_layers: int, layer: Callable, x_bTD: jax.Array
) -> tuple[jax.Array, Aux]:
    """Apply the layers, as `apply_layers` does, with one program for all periods of layers: it compiles faster.

    The modules of the first period read the slices of each period; `index` counts within a period. The layers after the
    last full period are applied one by one. The dropout key passes from layer to layer, as it does without a scan.
    """
    period = c.family.period(c)
    num_scanned = num_layers - num_layers % period
    tree = hk.get_params()
    stack = hk.experimental.current_name()
    stacked = {}
    for scope in tree:
        match = re.match(rf'{stack}/layers_(\d+)/', scope)
        if match and int(match[1]) < period:
            numbers = range(int(match[1]), num_scanned, period)
            scopes = [f'{stack}/layers_{i}/{scope[match.end() :]}' for i in numbers]
            for name in tree[scope]:
                stacked[f'{scope}/{name}'] = jnp.stack([tree[scope][name] for scope in scopes])

    def apply_period(x_bTD, slices):
        read = lambda next_getter, _, context: next_getter(slices[context.full_name])  # noqa: E731
        with hk.custom_getter(read):
            return loop_over_layers(c, range(period), layer, x_bTD, in_scan=True)

    x_bTD, aux = hk.scan(apply_period, x_bTD, stacked)
    aux = {name: x.reshape(-1, x.shape[-1]) for name, x in aux.items()}
    x_bTD, last_aux = loop_over_layers(c, range(num_scanned, num_layers), layer, x_bTD)
    for name, values in last_aux.items():
        aux[name] = jnp.concatenate([aux[name], values])
    return x_bTD, aux


@dataclasses.dataclass
class EncoderLayer(hk.Module):
    """Self-attention and MLP, each after a norm and with a residual connection."""

    config: T5Config
    index: int  # in the stack; in a scan, in its period
    name: str

    def __call__(self, x_bTD, mask, positions, relpos_1hTT, rows_b):
        """Return x_bTD and aux. `relpos_1hTT` is None if each layer has its own."""
        c = self.config
        if c.relpos_bias_per_layer:
            relpos_1hTT = c.parts.relpos_bias(c, bidirectional=True, name='relpos_bias')(positions)
        y_bTD = c.parts.norm(c, name='pre_attention_layer_norm')(x_bTD)
        attention = c.parts.attention(c, self.index, name='attention')
        y_bTD, _ = attention(y_bTD, y_bTD, mask, relpos_1hTT, rows_b, positions)
        x_bTD = add(c, x_bTD, 'attention', y_bTD, rows_b)
        y_bTD = c.parts.norm(c, name='pre_mlp_layer_norm')(x_bTD)
        y_bTD, aux = c.parts.mlp(c, self.index, name='mlp')(y_bTD, rows_b, mask)
        return add(c, x_bTD, 'mlp', y_bTD, rows_b), aux


@dataclasses.dataclass
class Decoder(hk.Module):
    """Tokens and encoded inputs to float32 logits, all at once or step by step."""

    config: T5Config
    name: str
    batch: Mapping[str, jax.Array] | None = None  # with the numbers of examples; not in decoding

    @hk.name_like('__call__')
    def embed(self, tokens_bT, table_vD):
        """Return the embedded tokens x_bTD."""
        return self.config.parts.embedder(self.config, tokens_bT, table_vD)

    @hk.name_like('__call__')
    def shared(self, segments_bT):
        """Return the mask and the positions, shared by the self-attentions of all layers; not called in decoding."""
        positions_T = jnp.arange(segments_bT.shape[1])
        mask = segment_mask(segments_bT, segments_bT, causal=True)
        return mask, Positions(positions_T, positions_T)

    def __call__(
        self, x_bTD, encoded_bMD, mask, inputs_mask, positions, rows_b, table_vD, caches=None
    ):
        """Return float32 logits_bTv, the caches, and aux.

        Decoding passes no encoded_bMD, but a LayerCache per layer with the inputs' keys and values. It gets no aux.
        """
        c = self.config
        x_bTD = dropout(x_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))
        relpos_1hTT = None
        if not c.relpos_bias_per_layer:
            relpos_1hTT = c.parts.relpos_bias(c, bidirectional=False, name='relpos_bias')(positions)

        def layer(index, x_bTD, cache):
            return self.layer(index)(
                x_bTD, encoded_bMD, mask, inputs_mask, positions, relpos_1hTT, rows_b, cache
            )

        def layer_without_cache(index, x_bTD):
            x_bTD, _, aux = layer(index, x_bTD, LayerCache())
            return x_bTD, aux

        aux = {}
        new_caches = []
        if caches is None:
            x_bTD, aux = apply_layers(c, c.num_decoder_layers, layer_without_cache, x_bTD)
        for index, cache in enumerate(caches or ()):
            x_bTD, cache, _ = layer(index, x_bTD, cache)
            new_caches.append(cache)
        return c.parts.logits(c, x_bTD, table_vD, rows_b), tuple(new_caches), aux

    @hk.name_like('__call__')
    def read_inputs(self, encoded_bMD):
        """Return the KeysValues of the inputs for each layer; decoding caches them."""
        layers = range(self.config.num_decoder_layers)
        return [self.layer(index).read_inputs(encoded_bMD) for index in layers]

    @hk.name_like('__call__')
    def layer(self, index):
        return self.config.parts.decoder_layer(self.config, index, name=f'layers_{index}')


def decoder_logits(c, x_bTD, table_vD, rows_b):
    """Return float32 logits_bTv after the last layer of the decoder. `table_vD`: for tied logits."""
    x_bTD = c.parts.norm(c, name='decoder_norm')(x_bTD)
    x_bTD = dropout(x_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))
    check_output('decoder_norm', x_bTD, x_bTD.shape, jnp.float32)
    x_bTD = x_bTD.astype(c.logits_dtype)
    if c.logits_via_embedding:
        logits_bTv = kernels.einsum('bTD,vD->bTv', x_bTD, table_vD.astype(c.logits_dtype))
        return logits_bTv.astype(jnp.float32) / jnp.sqrt(c.emb_dim)
    shape = (c.emb_dim, partition.split(c.vocab_size, 'model'))
    initializer = c.parts.initializers.logits
    kernel = c.parts.kernel(c, shape, initializer, c.logits_dtype, name='logits_dense')
    return kernel('bTD,Dv->bTv', x_bTD).astype(jnp.float32)


@dataclasses.dataclass
class DecoderLayer(hk.Module):
    """Self-attention, cross attention and MLP, each after a norm and with a residual connection."""

    config: T5Config
    index: int  # in the stack; in a scan, in its period
    name: str

    def __call__(
        self, x_bTD, encoded_bMD, mask, inputs_mask, positions, relpos_1hTT, rows_b, cache
    ):
        """Return x_bTD, the LayerCache and aux. Only self-attention has a bias."""
        c = self.config
        if c.relpos_bias_per_layer:
            relpos_1hTT = c.parts.relpos_bias(c, bidirectional=False, name='relpos_bias')(positions)
        y_bTD = c.parts.norm(c, name='pre_self_attention_layer_norm')(x_bTD)
        attention = c.parts.attention(c, self.index, name='self_attention')
        y_bTD, targets = attention(
            y_bTD, y_bTD, mask, relpos_1hTT, rows_b, positions, cache.targets
        )
        x_bTD = add(c, x_bTD, 'self_attention', y_bTD, rows_b)
        y_bTD = c.parts.norm(c, name='pre_cross_attention_layer_norm')(x_bTD)
        attention = c.parts.attention(c, self.index, name='encoder_decoder_attention')
        y_bTD, inputs = attention(y_bTD, encoded_bMD, inputs_mask, None, rows_b, None, cache.inputs)
        x_bTD = add(c, x_bTD, 'encoder_decoder_attention', y_bTD, rows_b)
        y_bTD = c.parts.norm(c, name='pre_mlp_layer_norm')(x_bTD)
        mask = mask if cache.targets is None else None
        y_bTD, aux = c.parts.mlp(c, self.index, name='mlp')(y_bTD, rows_b, mask)
        x_bTD = add(c, x_bTD, 'mlp', y_bTD, rows_b)
        return x_bTD, LayerCache(targets, inputs), aux

    @hk.name_like('__call__')
    def read_inputs(self, encoded_bMD):
        """Return the KeysValues of cross attention."""
        c = self.config
        attention = c.parts.attention(c, self.index, name='encoder_decoder_attention')
        return attention.read(encoded_bMD, None)


def add(c, x_bTD, part, y_bTD, rows_b):
    """Return the residual stream x_bTD plus, after dropout, y_bTD, the output of the module `part`."""
    check_output(part, y_bTD, x_bTD.shape, x_bTD.dtype)
    return x_bTD + dropout(y_bTD, c.dropout_rate, rows_b, mask_shape=(1, c.emb_dim))


@dataclasses.dataclass
class Attention(hk.Module):
    """Multi-head attention and its output projection; the heads are split over 'model'."""

    config: T5Config
    index: int  # the layer
    name: str

    def __call__(self, x_bTD, memory_bMD, mask, relpos_1hTM, rows_b, positions=None, cache=None):
        """Return y_bTD, the attention of x_bTD to memory_bMD, and the KeysValues attended to.

        Self-attention passes x_bTD as memory, and `positions`. With a cache, a KeysValues, the memory's keys and
        values are written to it, and attention reads all of it; the memory may then be None.
        """
        c = self.config
        q_bThK = self.queries(x_bTD, positions)
        if memory_bMD is not None:
            new = self.read(memory_bMD, positions)
            if cache is None:
                cache = new
            else:
                cache = cache.write(new, positions.queries_T[0] * memory_bMD.shape[1])
        k_bhKM, v_bhKM = cache
        shape = q_bThK.shape
        q_bThK = q_bThK.reshape(len(k_bhKM), -1, *shape[2:])  # an example's rows become queries
        heads_bThK = self.attend(q_bThK, k_bhKM, v_bhKM, mask, relpos_1hTM, positions, rows_b)
        heads_bThK = heads_bThK.reshape(shape)
        initializer = c.parts.initializers.attention
        out = c.parts.kernel(c, (shape[2] * shape[3], c.emb_dim), initializer, c.dtype, name='out')
        partial_bTD = out('bThK,hKD->bTD', heads_bThK)
        y_bTD = partition.psum(partial_bTD, 'model')  # the sum over the split heads
        return checkpoint_name(y_bTD, 'sum'), cache

    @hk.name_like('__call__')
    def read(self, memory_bMD, positions):
        """Return the KeysValues of a memory."""
        k_bMhK, v_bMhK = self.keys_values(memory_bMD, positions)
        return KeysValues(k_bMhK.transpose(0, 2, 3, 1), v_bMhK.transpose(0, 2, 3, 1))

    @hk.name_like('__call__')
    def attend(self, q_bThK, k_bhKM, v_bhKM, mask, relpos_1hTM, positions, rows_b):
        """Return heads_bThK: the mean of the values, weighted by the softmax of queries times keys.

        `relpos_1hTM` and `positions` are None in cross attention. In decoding, T are the beams of a group and
        M the slots of the cache.
        """
        c = self.config
        # T5X drops a key's weights for all queries at once. Dropping its values has the same result and is less work.
        mask_shape = (c.num_heads, 1, v_bhKM.shape[-1])
        v_bhKM = dropout(v_bhKM, c.dropout_rate, rows_b, mask_shape, split_dim=1)
        has_own_logits = type(self).logits is not Attention.logits or c.float32_attention_logits
        if not has_own_logits and kernels.fuses_attention(q_bThK, k_bhKM, mask.queries_bT):
            return kernels_gpu.attention(q_bThK, k_bhKM, v_bhKM, relpos_1hTM, *mask[1:])
        logits_bhTM = self.logits(q_bThK, k_bhKM)
        probs_bhTM = attention_weights(logits_bhTM, mask.dense(), relpos_1hTM, c.dtype)
        heads_bhTK = jnp.einsum('bhTM,bhKM->bhTK', probs_bhTM, v_bhKM)
        return heads_bhTK.transpose(0, 2, 1, 3)

    def logits(self, q_bThK, k_bhKM):
        """Return logits_bhTM, the products of queries and keys, before bias and mask."""
        dtype = jnp.float32 if self.config.float32_attention_logits else self.config.dtype
        return jnp.einsum('bThK,bhKM->bhTM', q_bThK.astype(dtype), k_bhKM.astype(dtype))

    @hk.name_like('__call__')
    def queries(self, x_bTD, positions):
        """Return q_bThK. Their scale, 1/sqrt(head_dim), is folded into the initial values, as in T5X."""
        head_dim = self.config.head_dim
        root = jnp.sqrt(head_dim).astype(self.config.dtype).astype(jnp.float32)  # rounded as in T5X
        initializer = self.config.parts.initializers.attention
        return self.heads(x_bTD, 'query', lambda *shape: initializer(*shape) / root)

    @hk.name_like('__call__')
    def keys_values(self, memory_bMD, positions):
        """Return k_bMhK and v_bMhK, in self-attention at `positions.queries_T`."""
        initializer = self.config.parts.initializers.attention
        k_bMhK = self.heads(memory_bMD, 'key', initializer)
        return k_bMhK, self.heads(memory_bMD, 'value', initializer)

    @hk.name_like('__call__')
    def heads(self, x_bTD, name, initializer, num_heads=None):
        """Return x_bTD projected to this device's share of `num_heads`, by default all, [b, T, h, K]."""
        c = self.config
        num_heads = partition.split(num_heads or c.num_heads, 'model')
        shape = (x_bTD.shape[-1], num_heads * c.head_dim)
        kernel = c.parts.kernel(c, shape, initializer, c.dtype, name=name)
        heads_bThK = kernel('bTD,DhK->bThK', x_bTD, columns=(num_heads, c.head_dim))
        return checkpoint_name(heads_bThK, 'projection')


@functools.partial(jax.jit, static_argnames='dtype')
def attention_weights(logits_bhTM, mask_b1TM, relpos_1hTM, dtype):
    """Return the weights of the keys of each query, [b, h, T, M] in `dtype`."""
    bias = jnp.where(mask_b1TM, 0.0, -1e10).astype(dtype)
    if relpos_1hTM is not None:
        bias = bias + kernels.broadcast(relpos_1hTM[0], logits_bhTM.shape, dtype)
    return kernels.softmax(logits_bhTM + bias.astype(logits_bhTM.dtype)).astype(dtype)


@dataclasses.dataclass
class Mlp(hk.Module):
    """Feed-forward, plain ('relu',) or gated ('gelu', 'linear'), its width split over 'model'."""

    config: T5Config
    index: int  # the layer
    name: str

    def __call__(self, x_bTD, rows_b, mask):
        """Return y_bTD and aux, {name: float32 [b]}, both the same on all devices of 'model'.

        `mask`: self-attention's, where padding sees nothing; None in decoding. T5 ignores it.
        """
        c = self.config
        initializer = c.parts.initializers.mlp
        activations = dict(c.parts.activations)
        width = partition.split(c.mlp_dim, 'model')
        inputs = []
        for i in range(len(c.mlp_activations)):
            name = 'wi' if len(c.mlp_activations) == 1 else f'wi_{i}'
            wi = c.parts.kernel(c, (c.emb_dim, width), initializer, c.dtype, name=name)
            x_bTf = checkpoint_name(wi('bTD,Df->bTf', x_bTD), 'projection')
            inputs.append(x_bTf)

        def multiply(*inputs):
            gates = []
            for activation, x_bTf in zip(c.mlp_activations, inputs, strict=True):
                gate_bTf = activations[activation](x_bTf)
                assert gate_bTf.shape == x_bTf.shape, f'{activation} gave {gate_bTf.shape}'
                gates.append(gate_bTf)
            return math.prod(gates)

        hidden_bTf = kernels_gpu.recomputed(multiply)(*inputs)
        hidden_bTf = dropout(hidden_bTf, c.dropout_rate, rows_b, (1, c.mlp_dim), split_dim=2)
        wo = c.parts.kernel(c, (width, c.emb_dim), initializer, c.dtype, name='wo')
        partial_bTD = wo('bTf,fD->bTD', hidden_bTf)
        y_bTD = partition.psum(partial_bTD, 'model')  # the sum over the split width
        return checkpoint_name(y_bTD, 'sum'), {}


def embed(c, tokens_bT, table_vD):
    """Return the embedded tokens, [b, T, D] in the dtype of the residual stream."""
    index_bT = tokens_bT - lax.axis_index('model') * table_vD.shape[0]
    is_here_bT1 = ((index_bT >= 0) & (index_bT < table_vD.shape[0]))[..., None]
    # Cast after the lookup, so the gradient of a row is summed in float32.
    rows_bTD = jnp.take(table_vD, index_bT, axis=0, mode='clip').astype(c.dtype)
    partial_bTD = jnp.where(is_here_bT1, rows_bTD, 0)
    return partition.psum(partial_bTD, 'model')  # one device has the row, the others add zero


@dataclasses.dataclass
class RelativePositionBias(hk.Module):
    """The term that each head adds to its attention logits for each relative position."""

    config: T5Config
    bidirectional: bool
    name: str

    def __call__(self, positions):
        """Return the bias, float32 [1, h, T, M]."""
        c = self.config
        relative_TM = positions.keys_M[None, :] - positions.queries_T[:, None]
        num_buckets = c.relative_attention_num_buckets
        shape = (partition.split(c.num_heads, 'model'), num_buckets)
        initializer = c.parts.initializers.relpos_bias
        table_hR = hk.get_parameter('rel_embedding', shape, jnp.float32, initializer)
        table_hR = table_hR.astype(c.dtype)
        bucket_TM = relative_position_bucket(
            relative_TM, self.bidirectional, num_buckets, c.relative_attention_max_distance
        )
        # The gradient of a product with one-hot rows is a matmul; a lookup's would be a scatter of
        # length^2 updates into few buckets.
        one_hot_TMR = jax.nn.one_hot(bucket_TM, num_buckets, dtype=c.dtype)
        einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        return einsum('hR,TMR->hTM', table_hR, one_hot_TMR)[None]


def relative_position_bucket(
    relative_TM: jax.Array, bidirectional: bool, num_buckets: int, max_distance: int
) -> jax.Array:
    """Return the bucket in [0, num_buckets) of key position minus query position, int32.

    Near positions have a bucket each, others share buckets that grow logarithmically up to `max_distance`.
    Keys to the right have the upper half of the buckets in the encoder (bidirectional), and bucket 0 in
    the decoder. Source: Mesh-TF transformer_layers.py; the epsilon is T5X's.
    """
    offset = jnp.int32(0)
    distance = jnp.maximum(-relative_TM, 0)
    if bidirectional:
        num_buckets = num_buckets // 2
        offset = jnp.where(relative_TM > 0, num_buckets, 0)
        distance = jnp.abs(relative_TM)
    num_exact = num_buckets // 2
    ratio = distance.astype(jnp.float32) / num_exact + jnp.finfo(jnp.float32).eps
    scale = (num_buckets - num_exact) / jnp.log(max_distance / num_exact)
    far = num_exact + (jnp.log(ratio) * scale).astype(jnp.int32)
    return offset + jnp.where(distance < num_exact, distance, jnp.minimum(far, num_buckets - 1))


@dataclasses.dataclass
class RMSNorm(hk.Module):
    """x / rms(x) * scale, without mean and bias; the statistics are float32."""

    config: T5Config
    name: str

    def __call__(self, x_bTD):
        c = self.config
        scale_D = hk.get_parameter('scale', (c.emb_dim,), jnp.float32, jnp.ones)
        return normalize(x_bTD, scale_D, c.dtype)


@functools.partial(jax.jit, static_argnames='dtype')
def normalize(x_bTD: jax.Array, scale_D: jax.Array, dtype: str) -> jax.Array:
    """Return RMSNorm's result, [b, T, D] in `dtype`."""
    x_bTD = x_bTD.astype(jnp.float32)
    mean_square_bT1 = kernels.mean(lax.square(x_bTD), axis=-1, keepdims=True)
    y_bTD = (x_bTD * lax.rsqrt(mean_square_bT1 + 1e-6)).astype(dtype)
    return y_bTD * kernels.broadcast(scale_D, y_bTD.shape, dtype)


@dataclasses.dataclass
class Kernel(hk.Module):
    """A product with a float32 matrix, cast to `dtype`. The caller sums over split rows."""

    config: T5Config
    shape: tuple[int, int]
    initializer: Callable
    dtype: str
    name: str

    def __call__(self, equation, x, columns=()):
        """Return einsum(equation, x, matrix), [b, T, *columns], for x of [b, T, *rows]."""
        columns = columns or self.shape[1:]
        kernel = self.matrix(self.dtype).astype(self.dtype)
        return kernels.einsum(equation, x, kernel.reshape(*x.shape[2:], *columns))

    @hk.name_like('__call__')
    def matrix(self, dtype):
        """Return the matrix, gathered in `dtype`."""
        initializer = lambda shape, _: self.initializer(shape, jnp.float32)  # noqa: E731
        return hk.get_parameter('kernel', self.shape, dtype, initializer)


def dropout(
    x: jax.Array,
    rate: float,
    rows_b: jax.Array | None,
    mask_shape: tuple[int, ...],
    split_dim: int | None = None,
) -> jax.Array:
    """Return x with a fraction `rate` of it set to zero and the rest scaled up.

    `mask_shape`: the shape of a row's mask, 1 for a dimension that shares it. `split_dim`: the dimension of x
    split over 'model'. Differs from T5X, which draws one mask for a batch: each row has its own key, and
    a device takes its slice of the row's mask, so dropout is the same on every mesh.
    """
    if rows_b is None or rate == 0:
        return x
    keys_b = jax.vmap(jax.random.fold_in, (None, 0))(hk.next_rng_key(), rows_b)
    draw = lambda key: jax.random.bernoulli(key, jnp.float32(1 - rate), mask_shape)  # noqa: E731
    keep = jax.vmap(draw)(keys_b)
    if split_dim is not None:
        keep = partition.own_slice(keep, 'model', split_dim)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def check_output(part: str, y: jax.Array, shape, dtype, name: str = 'output') -> None:
    """Raise ValueError unless y has `shape`, does not promote `dtype`, and is equal on all devices of 'model'.

    y: the output of the submodule `part` of the current module. The checks run while JAX traces.
    """
    path = f'{hk.experimental.current_name()}/{part}'.removeprefix('~/')
    aval = jax.typeof(y)
    if aval.shape != shape or jnp.promote_types(aval.dtype, dtype) != dtype:
        expected = f'{jnp.dtype(dtype)}{[*shape]}'
        raise ValueError(f'{path}: its {name} is {aval.dtype}{[*aval.shape]}, must be {expected}')
    partition.check_summed(f'{path}: its {name}', y, ('model',))


# The parts of a model; a user's file may replace some (formats/own_model.py).


class Initializers(NamedTuple):
    """Initializers of kernels and tables. Adapters and norms have fixed ones."""

    embedding: hk.initializers.Initializer = hk.initializers.RandomNormal(1.0)
    # Standard deviation 1 / sqrt(rows), in a truncated normal after truncation.
    attention: hk.initializers.Initializer = NORMAL
    mlp: hk.initializers.Initializer = TRUNCATED_NORMAL
    logits: hk.initializers.Initializer = TRUNCATED_NORMAL
    relpos_bias: hk.initializers.Initializer = UNIFORM


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a model. A class has the fields and methods of T5's; parts compare by identity."""

    embedder: Callable = embed
    encoder: Callable = Encoder
    decoder: Callable = Decoder
    encoder_layer: Callable = EncoderLayer
    decoder_layer: Callable = DecoderLayer
    attention: Callable = Attention
    mlp: Callable = Mlp
    norm: Callable = RMSNorm
    relpos_bias: Callable = RelativePositionBias
    kernel: Callable = Kernel
    logits: Callable = decoder_logits
    activations: tuple[tuple[str, Callable], ...] = tuple(ACTIVATIONS.items())
    initializers: Initializers = Initializers()


T5: Family[T5Config, Parts] = Family(Parts(), specs=tuple(PARAMETER_SPECS.items()))
