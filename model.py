"""T5 encoder-decoder: T5 1.0, 1.1 and every model of their shape.

All of it is one device's part, to be called inside `jax.shard_map` over the mesh axes 'data' and 'model' (or
through `partition.one_device`). A name's suffix gives its dimensions: an upper-case letter is a whole
dimension, a lower-case letter this device's slice of it; `partial_` marks a sum over 'model' still due.

    b  rows of the batch ('data')       D  embed (emb_dim)         T  query positions
    h  attention heads   ('model')      K  head size (head_dim)    M  key and value positions
    f  mlp width         ('model')      R  relative position buckets
    v  vocabulary        ('model')      1  a dimension of size one

Source: T5X t5x/examples/t5/{network,layers}.py; Raffel et al. 2020 (T5) §2.1; Shazeer 2020 (gated MLPs).
Parameters have T5X's paths and shapes and are float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import partition

# What is split: path (a regular expression, matched whole) -> PartitionSpec. Each function below asks Haiku
# for its local shape, so a row that disagrees fails by path.
PARAMETER_SPECS = {
    r'token_embedder/embedding': P('model', None),  # [vocab, embed]
    r'.+/relpos_bias/rel_embedding': P('model', None),  # [heads, buckets]
    r'.+/(query|key|value)/kernel': P(None, 'model'),  # [embed, heads * head size]
    r'.+/out/kernel': P('model', None),  # [heads * head size, embed]
    r'.+/mlp/wi(_\d)?/kernel': P(None, 'model'),  # [embed, mlp]
    r'.+/mlp/wo/kernel': P('model', None),  # [mlp, embed]
    r'decoder/logits_dense/kernel': P(None, 'model'),  # [embed, vocab]
    r'.+_norm/scale': P(None),  # [embed]
}
ACTIVATIONS: dict[str, Callable] = {
    'relu': jax.nn.relu,
    'gelu': lambda x: jax.nn.gelu(x, approximate=True),  # the tanh form, as in Flax and Mesh-TF
    'silu': jax.nn.silu,
    'swish': jax.nn.silu,
    'linear': lambda x: x,
}
DTYPES = ('float32', 'bfloat16')
NUM_BUCKETS, MAX_DISTANCE = 32, 128  # of relative positions; fixed in every T5


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and numerics, under T5X's field names (t5x/examples/t5/network.py)."""

    vocab_size: int
    dtype: str = 'float32'  # of the computation; parameters are float32 always
    emb_dim: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    head_dim: int = 64
    mlp_dim: int = 2048
    mlp_activations: tuple[str, ...] = ('relu',)  # several are multiplied: ('gelu', 'linear')
    dropout_rate: float = 0.1
    logits_via_embedding: bool = False  # True: tied, the logits rescaled by 1/sqrt(emb_dim)
    float32_attention_logits: bool = False
    relpos_bias_per_layer: bool = False  # umT5: each layer has a table; else one for a whole stack

    def __post_init__(self):
        object.__setattr__(self, 'mlp_activations', tuple(self.mlp_activations))  # JSON has lists
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type is int}
        activations = (
            f'mlp_activations={self.mlp_activations}: use some of {", ".join(ACTIVATIONS)}'
        )
        rules = {f'{name}={n}: must be at least 1': n >= 1 for name, n in sizes.items()} | {
            f"dtype={self.dtype!r}: use 'float32' or 'bfloat16'": self.dtype in DTYPES,
            activations: set() < set(self.mlp_activations) <= set(ACTIVATIONS),
            f'dropout_rate={self.dropout_rate}: must lie in [0, 1)': 0 <= self.dropout_rate < 1,
        }
        if broken := [words for words, holds in rules.items() if not holds]:
            raise ValueError(f'model.{broken[0]}')


def init(config: T5Config, key: jax.Array) -> dict[str, jax.Array]:
    """T5X's initial parameters, {path: float32 array of whole shape}; the same bits on every mesh."""
    tokens = jnp.ones([1, 1], jnp.int32)
    names = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
    transformed = hk.transform(lambda: logits(config, dict.fromkeys(names, tokens)))
    tree = partition.one_device(transformed.init)(key)
    return {f'{scope}/{name}': x for scope, leaves in tree.items() for name, x in leaves.items()}


def shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    """The whole shape of each parameter, {path: shape}; nothing is computed."""
    return dict(_shapes(config))


@functools.lru_cache(maxsize=16)
def _shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    """Kept, because many ask and tracing a large model takes seconds."""
    tree = jax.eval_shape(lambda: init(config, jax.random.key(0)))
    return {path: x.shape for path, x in tree.items()}


def apply(f: Callable, params: Mapping[str, jax.Array], key: jax.Array | None = None):
    """Runs `f`, a function of this module's parts, on this device's slices of `params`."""
    tree: dict[str, dict[str, jax.Array]] = {}
    for path, x in params.items():
        scope, name = path.rsplit('/', 1)
        tree.setdefault(scope, {})[name] = x
    return hk.transform(f).apply(tree, key)


def check_mesh(config: T5Config, mesh: Mesh) -> None:
    """Raises ValueError, in words, unless every split dimension divides by the mesh."""
    for name in ('num_heads', 'mlp_dim', 'vocab_size'):
        partition.check_divides(f'model.{name}', getattr(config, name), 'model', mesh)


def logits(
    config: T5Config, batch: Mapping[str, jax.Array], rows_b: jax.Array | None = None
) -> jax.Array:
    """The whole model, teacher forced: float32 logits_bTv of the next target token. `batch`: T5X's features,
    int32 [b, length]: encoder_input_tokens, decoder_input_tokens, decoder_target_tokens and, when packed,
    both segment_ids. (Positions are unused, as in T5X: inside a segment, array indices differ by the same
    amounts.) `rows_b` numbers the rows within the global batch and turns dropout on."""
    c, dropout = config, Dropout(config.dropout_rate, rows_b)
    # A sequence that is not packed is segment 1; padding is segment 0 and sees nothing. T5X goes by the
    # targets, so the BOS of decoder_input_tokens, which is 0 like padding, is seen.
    segments_bM = (batch['encoder_input_tokens'] > 0) * batch.get('encoder_segment_ids', 1)
    segments_bT = (batch['decoder_target_tokens'] > 0) * batch.get('decoder_segment_ids', 1)
    table_vD = embedding_table('token_embedder', c)
    x_bMD = embed(c, table_vD, batch['encoder_input_tokens'])
    encoded_bMD = encoder('encoder', c, x_bMD, attention_mask(segments_bM, segments_bM), dropout)
    x_bTD = embed(c, table_vD, batch['decoder_input_tokens'])
    mask_b1TT = attention_mask(segments_bT, segments_bT, causal=True)
    mask_b1TM = attention_mask(segments_bT, segments_bM)
    masks = (mask_b1TT, mask_b1TM)
    logits_bTv, _ = decoder('decoder', c, x_bTD, *masks, table_vD, dropout, encoded_bMD)
    return logits_bTv


class Cache(NamedTuple):
    """What decoding remembers, for each layer of the decoder keys and values [b, M, h, K]. Differs from T5X,
    which computes those of the inputs again at each step."""

    length: jax.Array  # int32: how many tokens have been read, and so where the next one goes
    targets: tuple  # (keys, values) of those tokens, with room for more
    inputs: tuple  # (keys, values) of the encoded inputs
    mask_b11M: jax.Array  # which of the inputs are not padding


def start_decoding(config: T5Config, inputs_bM: jax.Array, max_length: int) -> Cache:
    """Encodes `inputs`, int32 ids padded with 0, and makes room for `max_length` decoder input tokens, which
    is how many steps may follow: one more would overwrite the last."""
    c, mask_bM = config, inputs_bM > 0
    x_bMD = embed(c, embedding_table('token_embedder', c), inputs_bM)
    mask_b1MM = attention_mask(mask_bM, mask_bM)
    encoded_bMD = encoder('encoder', c, x_bMD, mask_b1MM, Dropout(0.0, None))
    inputs = []
    with hk.name_scope('decoder'):
        for i in range(c.num_decoder_layers):
            with hk.name_scope(f'layers_{i}/encoder_decoder_attention'):
                inputs.append((heads('key', c, encoded_bMD), heads('value', c, encoded_bMD)))
    room = (len(inputs_bM), max_length, partition.split(c.num_heads, 'model'), c.head_dim)
    zeros_bMhK = lax.pcast(jnp.zeros(room, c.dtype), ('data', 'model'), to='varying')
    targets = ((zeros_bMhK, zeros_bMhK),) * c.num_decoder_layers
    return Cache(jnp.int32(0), targets, tuple(inputs), mask_bM[:, None, None])


def decode_step(config: T5Config, tokens_b: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Reads the next decoder input token of each row, int32, the first being BOS, 0. Returns float32
    logits_bv of the one to follow, what `logits` has at that position, and the cache that has it read."""
    c, table_vD = config, embedding_table('token_embedder', config)
    x_b1D = embed(c, table_vD, tokens_b[:, None])
    seen_M = jnp.arange(cache.targets[0][0].shape[1]) <= cache.length
    masks, dropout = (seen_M[None, None, None], cache.mask_b11M), Dropout(0.0, None)
    logits_b1v, targets = decoder('decoder', c, x_b1D, *masks, table_vD, dropout, cache=cache)
    return logits_b1v[:, 0], cache._replace(length=cache.length + 1, targets=targets)


def attention_mask(segments_bT, segments_bM, causal: bool = False) -> jax.Array:
    """Who sees whom, bool [b, 1, T, M]: positions of the same segment that are not padding."""
    queries_b1T1, keys_b11M = segments_bT[:, None, :, None], segments_bM[:, None, None, :]
    mask_b1TM = (queries_b1T1 == keys_b11M) & (queries_b1T1 > 0)
    return mask_b1TM & jnp.tril(jnp.ones_like(mask_b1TM)) if causal else mask_b1TM


class Dropout(NamedTuple):
    """Drops the same places on every mesh. Differs from T5X, which draws one mask for a whole batch: a row's
    key is the site's key folded with its global number; a device takes its part of the row's mask."""

    rate: float
    rows_b: jax.Array | None  # global number of each row, int32; None: no dropout

    def __call__(self, x: jax.Array, mask_shape: tuple[int, ...], split_dim: int | None = None):
        """`mask_shape`: a row's whole mask, 1 where it is shared; `split_dim`: what 'model' splits."""
        if self.rows_b is None or self.rate == 0:
            return x
        keys_b = jax.vmap(jax.random.fold_in, (None, 0))(hk.next_rng_key(), self.rows_b)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, mask_shape))(keys_b)
        if split_dim is not None:
            keep = partition.own_slice(keep, 'model', split_dim)
        return jnp.where(keep, x / (1 - self.rate), jnp.zeros_like(x))


def scoped(f: Callable) -> Callable:
    """f(name, ...): a part of the model, its parameters below `name` as in a Haiku module."""

    @functools.wraps(f)
    def named(name, *args, **kwargs):
        with hk.name_scope(name):
            return f(*args, **kwargs)

    return named


@scoped
def encoder(c, x_bTD, mask_b1TT, dropout):
    """Embedded tokens to encoded_bTD."""
    x_bTD, _ = layers(c, x_bTD, mask_b1TT, dropout)
    # The one place where T5X's dropout mask is not shared along the length.
    return dropout(rms_norm('encoder_norm', c, x_bTD), x_bTD.shape[1:])


@scoped
def decoder(c, x_bTD, mask_b1TT, mask_b1TM, table_vD, dropout, encoded_bMD=None, cache=None):
    """Embedded shifted targets, and encoded inputs or a cache, to float32 logits_bTv; and as `layers`."""
    x_bTD, keys_values = layers(c, x_bTD, mask_b1TT, dropout, mask_b1TM, encoded_bMD, cache)
    x_bTD = dropout(rms_norm('decoder_norm', c, x_bTD), (1, c.emb_dim))
    x_bTD = x_bTD.astype(jnp.float32)  # logits are a float32 island, whatever the compute dtype
    if c.logits_via_embedding:
        return jnp.einsum('bTD,vD->bTv', x_bTD, table_vD) / jnp.sqrt(c.emb_dim), keys_values
    shape = (c.emb_dim, partition.split(c.vocab_size, 'model'))
    logits_Dv = kernel('logits_dense', shape, 'truncated_normal', 'float32')
    return jnp.einsum('bTD,Dv->bTv', x_bTD, logits_Dv), keys_values


def layers(c, x_bTD, mask_b1TM, dropout, cross_mask_b1TM=None, encoded_bMD=None, cache=None):
    """The layers of the encoder or, given a cross attention mask, of the decoder: pre-norm; relative positions
    count in self attention only. With a cache, x goes on after what was read, and cross attention has its
    keys and values from there. Returns also self attention's (keys, values) of every layer."""
    is_decoder = cross_mask_b1TM is not None
    name = 'self_attention' if is_decoder else 'attention'
    x_bTD = dropout(x_bTD, (1, c.emb_dim))
    start = 0 if cache is None else cache.length
    positions = (start + jnp.arange(x_bTD.shape[1]), jnp.arange(mask_b1TM.shape[-1]))
    bias = functools.partial(relative_position_bias, 'relpos_bias', c, *positions, not is_decoder)
    shared_1hTM = None if c.relpos_bias_per_layer else bias()
    keys_values = []
    for i in range(c.num_decoder_layers if is_decoder else c.num_encoder_layers):
        with hk.name_scope(f'layers_{i}'):
            relpos_1hTM = bias() if c.relpos_bias_per_layer else shared_1hTM
            y_bTD = rms_norm(f'pre_{name}_layer_norm', c, x_bTD)
            with hk.name_scope(name):
                q_bThK = heads('query', c, y_bTD)
                k_bMhK, v_bMhK = heads('key', c, y_bTD), heads('value', c, y_bTD)
                if cache is not None:
                    keys_bMhK, values_bMhK = cache.targets[i]
                    k_bMhK = lax.dynamic_update_slice_in_dim(keys_bMhK, k_bMhK, start, axis=1)
                    v_bMhK = lax.dynamic_update_slice_in_dim(values_bMhK, v_bMhK, start, axis=1)
                keys_values.append((k_bMhK, v_bMhK))
                y_bTD = attention(c, q_bThK, k_bMhK, v_bMhK, mask_b1TM, relpos_1hTM, dropout)
            x_bTD = x_bTD + dropout(y_bTD, (1, c.emb_dim))
            if is_decoder:
                y_bTD = rms_norm('pre_cross_attention_layer_norm', c, x_bTD)
                with hk.name_scope('encoder_decoder_attention'):
                    q_bThK = heads('query', c, y_bTD)
                    if cache is None:
                        k_bMhK, v_bMhK = (
                            heads('key', c, encoded_bMD),
                            heads('value', c, encoded_bMD),
                        )
                    else:
                        k_bMhK, v_bMhK = cache.inputs[i]
                    y_bTD = attention(c, q_bThK, k_bMhK, v_bMhK, cross_mask_b1TM, None, dropout)
                x_bTD = x_bTD + dropout(y_bTD, (1, c.emb_dim))
            y_bTD = mlp('mlp', c, rms_norm('pre_mlp_layer_norm', c, x_bTD), dropout)
            x_bTD = x_bTD + dropout(y_bTD, (1, c.emb_dim))
    return x_bTD, tuple(keys_values)


def heads(name, c, x_bTD):
    """The queries, keys or values of this device's heads: bThK. There is no 1/sqrt(head_dim) in T5's
    attention: the query's initial values have it."""
    num_heads = partition.split(c.num_heads, 'model')
    root = jnp.sqrt(c.head_dim).astype(c.dtype).astype(jnp.float32)  # rounded as T5X does
    shape, divisor = (c.emb_dim, num_heads * c.head_dim), root if name == 'query' else 1.0
    w_DhK = kernel(name, shape, 'normal', c.dtype, divisor).reshape(-1, num_heads, c.head_dim)
    return jnp.einsum('bTD,DhK->bThK', x_bTD, w_DhK)


def attention(c, q_bThK, k_bMhK, v_bMhK, mask_b1TM, relpos_1hTM, dropout):
    """Attention and its output projection, no biases; `relpos` is None in cross attention."""
    if c.float32_attention_logits:
        q_bThK, k_bMhK = q_bThK.astype(jnp.float32), k_bMhK.astype(jnp.float32)
    logits_bhTM = jnp.einsum('bThK,bMhK->bhTM', q_bThK, k_bMhK)
    bias = jnp.where(mask_b1TM, 0.0, -1e10).astype(c.dtype)
    bias = bias if relpos_1hTM is None else bias + relpos_1hTM
    probs_bhTM = jax.nn.softmax(logits_bhTM + bias.astype(logits_bhTM.dtype)).astype(c.dtype)
    probs_bhTM = dropout(probs_bhTM, (c.num_heads, 1, probs_bhTM.shape[-1]), split_dim=1)
    out_bThK = jnp.einsum('bhTM,bMhK->bThK', probs_bhTM, v_bMhK)
    shape = (math.prod(out_bThK.shape[2:]), c.emb_dim)
    wo_hKD = kernel('out', shape, 'normal', c.dtype).reshape(*out_bThK.shape[2:], c.emb_dim)
    partial_bTD = jnp.einsum('bThK,hKD->bTD', out_bThK, wo_hKD)
    return lax.psum(partial_bTD, 'model')  # the sum that the split heads are owed


@scoped
def mlp(c, x_bTD, dropout):
    """Feed-forward, plain ('relu',) or gated ('gelu', 'linear'). Its width is split over 'model'."""
    width, gates = partition.split(c.mlp_dim, 'model'), []
    for i, activation in enumerate(c.mlp_activations):
        name = 'wi' if len(c.mlp_activations) == 1 else f'wi_{i}'
        wi_Df = kernel(name, (c.emb_dim, width), 'truncated_normal', c.dtype)
        gates.append(ACTIVATIONS[activation](jnp.einsum('bTD,Df->bTf', x_bTD, wi_Df)))
    hidden_bTf = dropout(math.prod(gates), (1, c.mlp_dim), split_dim=2)
    wo_fD = kernel('wo', (width, c.emb_dim), 'truncated_normal', c.dtype)
    partial_bTD = jnp.einsum('bTf,fD->bTD', hidden_bTf, wo_fD)
    return lax.psum(partial_bTD, 'model')  # the sum that wo's split rows are owed


@scoped
def embedding_table(c):
    """The token table of encoder and decoder, float32, its rows split over 'model'."""
    shape = (partition.split(c.vocab_size, 'model'), c.emb_dim)
    return hk.get_parameter('embedding', shape, jnp.float32, hk.initializers.RandomNormal(1.0))


def embed(c, table_vD, tokens_bT):
    own_bT = tokens_bT - lax.axis_index('model') * table_vD.shape[0]
    here_bT1 = ((own_bT >= 0) & (own_bT < table_vD.shape[0]))[..., None]
    # A row is read in float32 and then cast, so that its gradient is summed in float32.
    rows_bTD = jnp.take(table_vD, own_bT, axis=0, mode='clip').astype(c.dtype)
    partial_bTD = jnp.where(here_bT1, rows_bTD, 0)
    return lax.psum(partial_bTD, 'model')  # one device holds the row, the others add zero


@scoped
def relative_position_bias(c, query_T, key_M, bidirectional):
    """What each head adds to its attention logits for memory position - query position: [1, h, T, M]."""
    shape = (partition.split(c.num_heads, 'model'), NUM_BUCKETS)
    init = hk.initializers.VarianceScaling(1.0, 'fan_avg', 'uniform')
    table_hR = hk.get_parameter('rel_embedding', shape, jnp.float32, init).astype(c.dtype)
    bucket_TM = relative_position_bucket(key_M[None, :] - query_T[:, None], bidirectional)
    # A product with one-hot rows, not a lookup: its gradient is a matmul, not a scatter of length^2
    # updates into 32 places.
    one_hot_TMR = jax.nn.one_hot(bucket_TM, NUM_BUCKETS, dtype=c.dtype)
    bias_hTM = jnp.einsum('hR,TMR->hTM', table_hR, one_hot_TMR)
    return bias_hTM[None]


def relative_position_bucket(relative_TM: jax.Array, bidirectional: bool) -> jax.Array:
    """Memory position minus query position -> bucket in [0, 32), int32: exact when near, logarithmic up to
    a distance of 128. Memory to the right: the upper half of the buckets in the encoder, bucket 0 in the
    decoder. (Mesh-TF transformer_layers.py; epsilon as in T5X.)"""
    num_buckets = NUM_BUCKETS // 2 if bidirectional else NUM_BUCKETS
    offset = jnp.where(relative_TM > 0, num_buckets, 0) if bidirectional else 0
    distance = jnp.abs(relative_TM) if bidirectional else jnp.maximum(-relative_TM, 0)
    num_exact = num_buckets // 2
    ratio = distance.astype(jnp.float32) / num_exact + jnp.finfo(jnp.float32).eps
    scale = (num_buckets - num_exact) / jnp.log(MAX_DISTANCE / num_exact)
    far = num_exact + (jnp.log(ratio) * scale).astype(jnp.int32)
    return offset + jnp.where(distance < num_exact, distance, jnp.minimum(far, num_buckets - 1))


@scoped
def rms_norm(c, x_bTD):
    """x / rms(x) * scale, no mean and no bias; statistics in float32, the product in the compute dtype."""
    scale_D = hk.get_parameter('scale', (c.emb_dim,), jnp.float32, jnp.ones)
    x_bTD = x_bTD.astype(jnp.float32)
    mean_square_bT1 = jnp.mean(lax.square(x_bTD), axis=-1, keepdims=True)
    y_bTD = (x_bTD * lax.rsqrt(mean_square_bT1 + 1e-6)).astype(c.dtype)
    return y_bTD * scale_D.astype(c.dtype)[None, None]


@scoped
def kernel(shape, distribution, dtype, divisor=1.0):
    """A float32 matrix, cast to the dtype that it is used in. Its initial deviation is the inverse root of
    its rows (fan in), after truncation where truncated, over `divisor`."""
    initial = hk.initializers.VarianceScaling(1.0, 'fan_in', distribution)
    values = lambda shape, dtype: initial(shape, dtype) / divisor  # noqa: E731
    return hk.get_parameter('kernel', shape, jnp.float32, values).astype(dtype)
