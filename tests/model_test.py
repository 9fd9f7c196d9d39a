"""What the model is, apart from T5X's numbers: buckets, masks, causality, initial values, names."""

import ast
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import slow
from jax import lax
from jax.sharding import PartitionSpec as P
from small_models import (
    as_one_device,
    random_batch,
    random_params,
    run_config,
    t5_config,
    with_parts,
)

import model
import partition
import tasks
import tasks.open
import train
import vocabulary as vocabularies
from configs import base
from formats import own_model
from messages import Refused
from prepare import make_spec
from tasks import objectives

ROOT = pathlib.Path(__file__).parents[1]


def model_config(**settings):
    return t5_config(**run_config(1, 1, **settings).model)


def apply_logits(config):
    """(params, batch, key, rows) -> logits, on one device."""

    def f(params, batch, key, rows):
        return model.apply(model.logits, params, config, batch, rows, key=key)[0]

    specs = (model.param_specs(config), partition.BATCH, P(), partition.BATCH)
    on_one = as_one_device(f, specs)
    return lambda params, batch, key=None, rows=None: on_one(params, batch, key, rows)


@pytest.fixture(scope='module')
def tiny():
    config = model_config()
    return config, random_params(config), apply_logits(config)


# Inclusive distances at which each bucket begins (T5X's and Mesh-TF's formulas agree on them).
ENCODER_STARTS = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
DECODER_STARTS = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_relative_position_buckets():
    relative = jnp.arange(-2000, 2001)[None]
    distance = np.abs(relative)
    to_right = np.asarray(relative) > 0
    expected = np.searchsorted(ENCODER_STARTS, distance, side='right') - 1 + 16 * to_right
    np.testing.assert_array_equal(model.relative_position_bucket(relative, True, 32, 128), expected)
    expected = np.where(to_right, 0, np.searchsorted(DECODER_STARTS, distance, side='right') - 1)
    np.testing.assert_array_equal(
        model.relative_position_bucket(relative, False, 32, 128), expected
    )


def test_decoder_mask_is_T5Xs():
    segments = jnp.array(
        [[1, 1, 1, 2, 2, 0]]
    )  # for targets 6 7 3 4 5 0; t5x/examples/t5/layers_test.py
    rows = ['100000', '110000', '111000', '000100', '000110', '000000']
    mask = model.segment_mask(segments, segments, causal=True).dense()
    assert [''.join(str(int(x)) for x in row) for row in mask[0, 0]] == rows


def test_causality_by_gradients(tiny):
    """Logits at t depend on decoder inputs up to t, and on no later one."""
    config, params, _ = tiny
    batch = {n: x[:1] for n, x in random_batch(0).items()}
    batch = {n: jnp.where(x == 0, 5, x) for n, x in batch.items()}  # no padding

    def logit_sums(offset_bTD, params, batch):
        """Sums of logits per position, with `offset` added to the decoder's embedded inputs."""

        def add_offset(embed, args, kwargs, context):
            x_bTD = embed(*args, **kwargs)
            if isinstance(context.module, model.Decoder) and context.method_name == 'embed':
                return x_bTD + offset_bTD
            return x_bTD

        def shifted_logits():
            with hk.intercept_methods(add_offset):
                return model.logits(config, batch)[0]

        logits = model.apply(shifted_logits, params)
        return (logits * jnp.arange(1.0, 385.0)[None, None]).sum((0, 2))

    length = batch['decoder_input_tokens'].shape[1]
    specs = (P(), model.param_specs(config), partition.BATCH)
    jacobian = as_one_device(jax.jacobian(logit_sums), specs)(
        jnp.zeros([1, length, config.emb_dim]), params, batch
    )
    depends = np.abs(np.asarray(jacobian)).max((1, 3)) > 0  # [logits at, input at]
    np.testing.assert_array_equal(depends, np.tril(np.ones([length, length], bool)))


@pytest.mark.parametrize('num_inputs', [10, 1])
def test_neighbours_in_a_packed_row_and_padding_change_nothing(tiny, num_inputs):
    """Also where a language model's inputs are EOS alone."""
    config, params, apply = tiny
    rng = np.random.default_rng(0)
    (a_in, a_out), (b_in, b_out) = [
        (rng.integers(3, 384, n), rng.integers(3, 384, t)) for n, t in ((10, 5), (14, 11))
    ]
    if num_inputs == 1:
        a_in = np.array([vocabularies.EOS_ID])

    def features(inputs, targets, lengths):
        batch = {'encoder_input_tokens': inputs, 'decoder_target_tokens': targets}
        batch['decoder_input_tokens'] = [np.pad(t[:-1], (1, 0)) for t in targets]
        for name, length in zip(list(batch), (lengths[0], lengths[1], lengths[1]), strict=True):
            x = np.concatenate(batch[name])
            batch[name] = np.pad(x, (0, length - len(x)))[None].astype(np.int32)
        for name, parts, length in (
            ('encoder', inputs, lengths[0]),
            ('decoder', targets, lengths[1]),
        ):
            ids = np.repeat([1, 2][: len(parts)], [len(p) for p in parts])
            batch[f'{name}_segment_ids'] = np.pad(ids, (0, length - len(ids)))[None]
        return batch

    packed = apply(params, features([a_in, b_in], [a_out, b_out], (30, 20)))[0]
    alone_a = apply(params, features([a_in], [a_out], (10, 5)))[0]
    alone_b = apply(params, features([b_in], [b_out], (20, 16)))[0]  # with padding
    np.testing.assert_allclose(packed[:5], alone_a, atol=2e-4)
    np.testing.assert_allclose(packed[5:16], alone_b[:11], atol=2e-4)


def test_dropout_is_off_without_rows_and_its_expectation_is_the_identity(tiny):
    x = jnp.ones([64, 50, 40])
    drop = hk.transform(
        lambda shape: model.dropout(x, rate=0.3, rows_b=jnp.arange(64), mask_shape=shape)
    )
    for shape in ((1, 40), (50, 40), (50, 1)):
        y = np.asarray(drop.apply({}, jax.random.key(0), shape))
        assert set(np.unique(y)) == {0, np.float32(1 / np.float32(0.7))}
        kept = (y > 0).mean()
        places = 64 * np.prod(shape)
        assert abs(kept - 0.7) < 5 * (0.21 / places) ** 0.5
        for axis in (1, 2):  # shared exactly where the mask says so
            assert (y == y.take([0], axis)).all() == (shape[axis - 1] == 1)
    config, params, apply = tiny
    batch = random_batch(0)
    np.testing.assert_array_equal(apply(params, batch), apply(params, batch, jax.random.key(1)))


def test_dropout_is_at_the_places_of_T5X(monkeypatch):
    """The mask of each, from t5x/examples/t5/network.py and layers.py: 1 where positions share it."""
    config = model_config(dropout_rate=0.3, num_encoder_layers=2)
    d, f, h = config.emb_dim, config.mlp_dim, config.num_heads
    batch = random_batch(0)
    m = batch['encoder_input_tokens'].shape[1]
    t = batch['decoder_target_tokens'].shape[1]
    of_position = (1, d)
    encoder_layer = [(h, 1, m), of_position, (1, f), of_position]
    decoder_layer = [(h, 1, t), of_position, (h, 1, m), of_position, (1, f), of_position]
    expected = [of_position, *2 * encoder_layer, (m, d)]
    expected += [of_position, *decoder_layer, of_position]
    params = random_params(config)
    found = []
    dropout = model.dropout

    def record(x, rate, rows_b, mask_shape, split_dim=None):
        assert rate == 0.3
        found.append(mask_shape)
        return dropout(x, rate, rows_b, mask_shape, split_dim)

    monkeypatch.setattr(model, 'dropout', record)
    logits = apply_logits(config)
    jax.eval_shape(logits, params, batch, jax.random.key(0), np.arange(8))
    assert found == expected


def test_dropout_of_attention_drops_weights(tiny):
    """As T5X does it: a key's weight is dropped for all queries of a head, and each row has its own mask."""
    config = dataclasses.replace(tiny[0], dropout_rate=0.5)
    rng = np.random.default_rng(0)
    h, k = config.num_heads, config.head_dim
    q_bThK, k_bhKM, v_bhKM, relpos_1hTM = [
        rng.normal(size=shape).astype(np.float32)
        for shape in ((3, 5, h, k), (3, h, k, 7), (3, h, k, 7), (1, h, 5, 7))
    ]
    segments_bM = np.array([[1, 1, 1, 2, 2, 2, 0]] * 3)
    mask = model.segment_mask(segments_bM[:, 1:6], segments_bM)

    def attend(*arrays):
        attention = model.Attention(config, 0, name='attention')
        return attention.attend(*arrays[:3], mask, arrays[3], None, jnp.arange(3))

    def drop():
        ones_bh1M = jnp.ones((3, h, 1, 7))
        return model.dropout(ones_bh1M, 0.5, jnp.arange(3), (h, 1, 7), split_dim=1)

    def compute(f, *arrays):
        key = jax.random.key(0)
        return np.asarray(as_one_device(hk.transform(f).apply, P())({}, key, *arrays))

    logits_bhTM = np.einsum('bThK,bhKM->bhTM', q_bThK, k_bhKM) + relpos_1hTM
    exps_bhTM = np.exp(logits_bhTM) * np.asarray(mask.dense())
    probs_bhTM = exps_bhTM / exps_bhTM.sum(axis=-1, keepdims=True)
    drops_bh1M = compute(drop)
    assert 0.2 < (drops_bh1M == 0).mean() < 0.8 and len(np.unique(drops_bh1M, axis=0)) == 3
    expected = np.einsum('bhTM,bhKM->bThK', probs_bhTM * drops_bh1M, v_bhKM)
    found = compute(attend, q_bThK, k_bhKM, v_bhKM, relpos_1hTM)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


WIDE_BFLOAT16 = pytest.param({'dtype': 'bfloat16', 'head_dim': 128}, marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [{}, WIDE_BFLOAT16], ids=str)
def test_initial_values_have_the_deviations_of_T5X(settings):
    sizes = dict(vocab_size=2048, emb_dim=256, num_heads=8, head_dim=32, mlp_dim=512)
    config = model_config(**sizes | settings)
    d, h, k, f = config.emb_dim, config.num_heads, config.head_dim, config.mlp_dim
    root = float(jnp.sqrt(k).astype(config.dtype))  # in bfloat16: 11.3125 for 128
    expected = {
        'token_embedder/embedding': 1.0,
        'query/kernel': d**-0.5 / root,
        'key/kernel': d**-0.5,
        'value/kernel': d**-0.5,
        'out/kernel': (h * k) ** -0.5,
        'wi_0/kernel': d**-0.5,
        'wi_1/kernel': d**-0.5,
        'wo/kernel': f**-0.5,
        'logits_dense/kernel': d**-0.5,
        'rel_embedding': (6 / (h + 32)) ** 0.5 / 3**0.5,  # uniform up to the first root
        'scale': 0.0,
    }
    truncated = ('wi_0/kernel', 'wi_1/kernel', 'wo/kernel', 'logits_dense/kernel')
    for path, x in jax.jit(lambda: model.init(config, jax.random.key(0)))().items():
        name, std = next((n, s) for n, s in expected.items() if path.endswith(n))
        assert x.dtype == jnp.float32
        assert abs(float(x.std()) - std) <= 5 * std / (2 * x.size) ** 0.5, path
        assert abs(float(x.mean()) - (name == 'scale')) <= 5 * std / x.size**0.5, path
        if std and name in truncated:
            assert float(jnp.abs(x).max()) <= 2 * std / 0.87962566 * 1.0001, path
        elif x.size > 10_000:
            assert float(jnp.abs(x).max()) > 3 * std, path


def test_parameter_tree_is_T5Xs():
    """tests/golden/parameters.json: from the shapes of T5X's own checkpoints (see its 'made_by')."""
    pinned = json.loads((ROOT / 'tests/golden/parameters.json').read_text())
    for name, settings in pinned['configs'].items():
        shapes = model.shapes(t5_config(**settings))
        assert {path: list(shape) for path, shape in shapes.items()} == pinned[name]


def saved_bytes(remat):
    """The bytes that the backward pass keeps, parameters included."""
    config = model_config(emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, remat=remat)
    batch = random_batch(0)

    def backward(params, batch, key):
        def loss(params):
            logits, *_ = model.apply(model.logits, params, config, batch, jnp.arange(8), key=key)
            return (logits**2).mean()

        return jax.vjp(loss, params)[1]

    specs = (model.param_specs(config), partition.BATCH, P())
    on_one = as_one_device(backward, specs)
    kept = jax.eval_shape(on_one, random_params(config), batch, jax.random.key(0))
    return sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(kept))


def test_remat_keeps_less():
    assert saved_bytes('full') < 0.8 * saved_bytes('dots') < 0.8 * 0.8 * saved_bytes('none')


# Every released size; the numbers are from T5X's gins, layer by layer (UL2: from its
# model card; T5Gemma: from google-deepmind/gemma's sizes, with 256,000 rows).
COUNTS = {
    't5:small': 60_506_624,
    't5:base': 222_903_552,
    't5:large': 737_668_096,
    't5:3b': 2_851_598_336,
    't5:11b': 11_307_321_344,
    't5_1_1:small': 76_961_152,
    't5_1_1:base': 247_577_856,
    't5_1_1:large': 783_150_080,
    't5_1_1:xl': 2_849_757_184,
    't5_1_1:xxl': 11_135_332_352,
    't0:3b': 2_849_757_184,
    't0:11b': 11_135_332_352,
    'mt5:small': 300_176_768,
    'mt5:base': 582_401_280,
    'mt5:large': 1_229_581_312,
    'mt5:xl': 3_742_619_648,
    'mt5:xxl': 12_921_057_280,
    'byt5:small': 299_637_760,
    'byt5:base': 581_653_248,
    'byt5:large': 1_228_183_552,
    'byt5:xl': 3_737_801_728,
    'byt5:xxl': 12_906_899_328,
    'umt5:small': 306_601_984,
    'umt5:base': 592_043_520,
    'umt5:large': 1_242_449_920,
    'umt5:xl': 3_768_356_864,
    'umt5:xxl': 12_972_531_712,
    'long_t5:base': 247_587_456,
    'long_t5:large': 783_175_168,
    'long_t5:xl': 2_849_807_360,
    'mlong_t5:base': 592_044_672,
    'mlong_t5:large': 1_242_451_456,
    'mlong_t5:xl': 3_768_359_936,
    'switch:base_8': 619_339_008,
    'switch:base_16': 1_072_397_568,
    'switch:base_32': 1_978_514_688,
    'switch:base_64': 3_790_748_928,
    'switch:base_128': 7_415_217_408,
    'switch:base_256': 14_664_154_368,
    'switch:large_128': 26_309_291_008,
    'switch:xxl_128': 394_675_073_024,
    'switch:c_2048': 1_571_327_875_360,
    't5gemma:s': 312_517_632,
    't5gemma:b': 591_490_560,
    't5gemma:l': 1_241_761_792,
    't5gemma:ml': 2_200_345_344,
    't5gemma:xl': 3_766_980_608,
    't5gemma:2b': 5_596_853_760,
    't5gemma:9b': 20_333_401_088,
    't5gemma:9b_2b': 12_292_375_296,
    'ul2:20b': 19_591_209_984,
    'ul2:flan': 19_591_209_984,
}
for size in ('small', 'base', 'large', 'xl', 'xxl'):  # same shapes
    COUNTS |= {f'{name}:{size}': COUNTS[f't5_1_1:{size}'] for name in ('t5_1_1_lm', 'flan_t5')}


@functools.cache
def num_parameters_by_depth(config):
    """The parameters of a deep model, from those of a model with one period of layers in each stack."""
    period = config.family.period(config)
    shallow = dataclasses.replace(config, num_encoder_layers=period, num_decoder_layers=period)
    depths = {}
    for i in range(period):
        depths[f'encoder/layers_{i}/'] = config.num_encoder_layers // period
        depths[f'decoder/layers_{i}/'] = config.num_decoder_layers // period
    total = 0
    for path, shape in model.shapes(shallow).items():
        depth = next((n for layer, n in depths.items() if path.startswith(layer)), 1)
        total += depth * math.prod(shape)
    return total


def released(name):
    family, size = name.split(':')
    return importlib.import_module(f'configs.{family}').get_config(size)


QUICK = (
    't5:small',
    't5_1_1:base',
    't0:3b',
    'mt5:large',
    'byt5:xl',
    'umt5:xxl',
    'long_t5:base',
    't5gemma:9b_2b',
    'ul2:20b',
)
SLOW = ('t5:11b', 't5_1_1:xxl', 'mt5:xxl', 'mlong_t5:xl', 'switch:base_8', 'switch:c_2048')
LONG = [pytest.mark.slow, pytest.mark.long]
REST = [pytest.param(x, marks=LONG) for x in sorted(COUNTS.keys() - {*QUICK, *SLOW})]


@pytest.mark.parametrize('name', [*QUICK, *slow(SLOW), *REST])
def test_parameter_counts_of_released_models(name):
    config = released(name)
    # Many families have the shapes of another.
    sizes = dataclasses.replace(own_model.load(config.model), dropout_rate=0.0)
    assert num_parameters_by_depth(sizes) == COUNTS[name]
    assert config.model.dtype == 'bfloat16'
    task = tasks.open.find(config.data)
    if isinstance(task, tasks.Task) and task.objective == 'span_corruption':
        # Inputs and targets are what span corruption makes of a piece.
        settings, lengths = config.data, config.data.lengths
        vocabulary = vocabularies.ByteVocabulary(settings.extra_ids)
        raw_length = objectives.OBJECTIVES[task.objective](settings, vocabulary).raw_length
        known = {(512, 114): 568, (1024, 229): 1137, (1024, 189): 1193}
        assert raw_length == known[lengths.inputs, lengths.targets]
        assert config.loss.loss_normalizing_factor in (
            str(config.train.batch_size * lengths.targets),
            'NUM_REAL_TARGET_TOKENS',
        )


def test_every_size_is_counted_and_an_unknown_one_is_said_in_words():
    for family in {name.split(':')[0] for name in COUNTS}:
        with pytest.raises(Refused) as error:
            released(f'{family}:huge')
        sizes = str(error.value).split('use one of ')[1].split(', ')
        assert {name for name in COUNTS if name.startswith(f'{family}:')} == {
            f'{family}:{size}' for size in sizes if size != 'tiny'
        }


@pytest.mark.slow
def test_each_layer_of_umt5_has_its_relative_positions():
    """The tree of t5x/examples/scalable_t5 with scan_layers=False, and its numbers: layers that have equal
    tables are layers that share one; others are not."""
    shared = model_config(num_decoder_layers=2)
    apart = dataclasses.replace(shared, relpos_bias_per_layer=True)
    params = random_params(apart)
    tables = {path: x for path, x in params.items() if 'relpos_bias' in path}
    assert {path: x.shape for path, x in tables.items()} == {
        'encoder/layers_0/relpos_bias/rel_embedding': (8, 32),
        'decoder/layers_0/relpos_bias/rel_embedding': (8, 32),
        'decoder/layers_1/relpos_bias/rel_embedding': (8, 32),
    }
    first = {path: x for path, x in tables.items() if 'layers_0' in path}
    rest = {path: x for path, x in params.items() if path not in tables}
    merged = rest | {path.replace('layers_0/', ''): x for path, x in first.items()}
    batch, name = random_batch(0), 'decoder/layers_1/relpos_bias/rel_embedding'
    expected = apply_logits(shared)(merged, batch)
    equal = params | {name: params[name.replace('layers_1', 'layers_0')]}
    np.testing.assert_allclose(apply_logits(apart)(equal, batch), expected, atol=1e-5)
    assert np.abs(apply_logits(apart)(params, batch) - expected).max() > 1e-3


def test_logits_in_bfloat16(tiny):
    """Their factors and their sums are rounded, and nothing else."""
    config, params, logits_of = tiny
    path = 'decoder/logits_dense/kernel'
    batch = random_batch(0)
    identity = jnp.eye(*params[path].shape)
    x_bTD = logits_of({**params, path: identity}, batch)[..., : config.emb_dim]
    factors = [x.astype(jnp.bfloat16).astype(np.float32) for x in (x_bTD, params[path])]
    expected = np.einsum('bTD,Dv->bTv', *factors)
    rounded = apply_logits(dataclasses.replace(config, logits_dtype='bfloat16'))(params, batch)
    assert rounded.dtype == np.float32
    assert np.array_equal(rounded, rounded.astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_allclose(rounded, expected, rtol=2**-8, atol=1e-5)

    tied = model_config(logits_via_embedding=True)
    params = random_params(tied)
    expected = apply_logits(tied)(params, batch)
    rounded = apply_logits(dataclasses.replace(tied, logits_dtype='bfloat16'))(params, batch)
    error = np.abs(rounded - expected).max() / np.abs(expected).max()
    assert 1e-4 < error < 1e-2


@pytest.mark.slow
def test_one_step_in_bfloat16():
    config = base.get_config()
    vocab_size = 1000
    config.model.update(vocab_size=vocab_size, emb_dim=128, num_heads=4, head_dim=32, mlp_dim=128)
    config.model.update(num_encoder_layers=1, num_decoder_layers=1, dtype='bfloat16')
    config.train.batch_size = 2
    config.mesh.update(data=1, model=1)
    spec = make_spec(config)
    rng, state = np.random.default_rng(0), train.compile_init(spec)()
    lengths = dict(encoder_input_tokens=512, decoder_input_tokens=114, decoder_target_tokens=114)
    batch = {name: rng.integers(2, vocab_size, (2, n), np.int32) for name, n in lengths.items()}
    batch['decoder_loss_weights'] = np.ones((2, 114), np.int32)
    state, metrics = train.jit_step(spec)(state, batch)
    assert all(x.dtype == jnp.float32 for x in state.params.values())
    assert metrics['finite'] and metrics['weights'] == 228
    # Untrained, logits have variance one: log(vocab_size) + 1/2, but for the noise of 228 tokens.
    assert abs(metrics['nats'] / 228 - (np.log(vocab_size) + 0.5)) < 0.5


@pytest.mark.parametrize('settings', [
    {'num_heads': 0},
    {'dtype': 'float16'},
    {'mlp_activations': ('gelo',)},
    {'dropout_rate': 1.0},
])  # fmt: skip
def test_a_model_that_cannot_be(settings):
    """A program made its config: no command line has checked it."""
    with pytest.raises(Refused) as error:
        own_model.complete(model_config(**settings))
    assert f'model.{next(iter(settings))}=' in str(error.value)


def test_a_table_that_disagrees_fails_by_path():
    row = (r'.+/mlp/wo/kernel', jax.sharding.PartitionSpec(None, 'model'))
    own = dataclasses.replace(model.T5, specs=(*model.T5.specs, row))
    spec = make_spec(run_config(1, 2))
    config = dataclasses.replace(spec.model_config, own=own)
    spec = dataclasses.replace(spec, model_config=config)
    with pytest.raises(ValueError, match='mlp/wo'):
        train.jit_step(spec).lower(spec.state_shapes, random_batch(0))


@pytest.mark.parametrize('dtype, name', [('float32', 'f32'), ('bfloat16', 'bf16')])
def test_a_step_on_a_cpu_multiplies_matrices(dtype, name):
    """Its products with kernels, gradients too, have two dimensions each, because its mesh is a CPU's.

    The sums are float32: XLA multiplies bfloat16 fast for them alone.
    """
    config = run_config(1, 1)
    config.model.dtype = dtype
    spec = make_spec(config)
    text = train.jit_step(spec).lower(spec.state_shapes, random_batch(0)).as_text()
    width = spec.model_config.mlp_dim
    logits = f'x{spec.model_config.vocab_size}x'
    products = [line for line in text.splitlines() if 'stablehlo.dot_general' in line]
    of_mlp = [line for line in products if f'x{width}x' in line and '-> tensor<f32>' not in line]
    assert len([line for line in of_mlp if logits not in line]) >= 6
    for line in of_mlp:
        operand = rf'tensor<\d+x\d+x{"f32" if logits in line else name}>'
        assert re.search(rf'{operand}, {operand}\) -> tensor<\d+x\d+xf32>', line), line


def test_einsum_letters_are_the_suffixes():
    """In model.py and loss.py each equation repeats the suffixes of its operands and its result."""
    checked = 0
    for file in ('model.py', 'loss.py'):
        tree = ast.parse((ROOT / file).read_text())
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            equation = node.args[0]
            if not (isinstance(equation, ast.Constant) and '->' in str(equation.value)):
                continue
            operands, result = equation.value.split('->')
            # A Kernel has the last operand itself.
            is_einsum = ast.unparse(node.func) in ('jnp.einsum', 'kernels.einsum')
            for letters, operand in zip(operands.split(','), node.args[1:], strict=is_einsum):
                name = re.match(r'\w+', ast.unparse(operand))[0]
                assert name.rsplit('_', 1)[1] == letters, ast.unparse(node)
            parents = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and n.value is node]
            for parent in parents:
                assert parent.targets[0].id.rsplit('_', 1)[1] == result, ast.unparse(parent)
            checked += 1
    assert checked >= 9


# Mistakes in a module. Tracing its initialization on one device finds them.

# mistakes_test.py has others.
BAD_OUTPUTS = {
    'a forgotten sum': (
        lambda self, x, y, aux: (y + lax.axis_index('model'), aux),
        "encoder/layers_0/mlp: its output differs between the devices of 'model': add partition.psum",
    ),
    'a shape': (
        lambda self, x, y, aux: (y[..., :1], aux),
        'encoder/layers_0/mlp: its output is bfloat16[1, 1, 1], must be bfloat16[1, 1, 128]',
    ),
    'an aux that differs': (
        lambda self, x, y, aux: (y, {'size': x[:, 0, 0] + lax.axis_index('model')}),
        "layers: its aux 'size' differs between the devices of 'model'",
    ),
}


def shapes_with(**parts):
    return model.shapes(with_parts(model_config(dtype='bfloat16'), **parts))


@pytest.mark.parametrize('output, message', BAD_OUTPUTS.values(), ids=list(BAD_OUTPUTS))
def test_a_module_with_a_wrong_output(output, message):
    class Mlp(model.Mlp):
        def __call__(self, x_bTD, rows_b, mask):
            return output(self, x_bTD, *super().__call__(x_bTD, rows_b, mask))

    with pytest.raises(ValueError, match=re.escape(message)):
        shapes_with(mlp=Mlp)


def test_an_encoder_without_a_sum():
    class Encoder(model.Encoder):
        def __call__(self, x_bTD, segments_bT, rows_b):
            encoded_bTD, aux = super().__call__(x_bTD, segments_bT, rows_b)
            return encoded_bTD + lax.axis_index('model'), aux

    with pytest.raises(
        ValueError, match="^encoder: its output differs between the devices of 'model'"
    ):
        shapes_with(encoder=Encoder)


def test_an_embedder_without_its_sum():
    def embed(config, tokens_bT, table_vD):
        return model.embed(config, tokens_bT, table_vD) + lax.axis_index('model')

    with pytest.raises(ValueError, match='encoder: its embedding'):
        shapes_with(embedder=embed)


def test_a_parameter_without_a_row_of_specs():
    class Mlp(model.Mlp):
        def __call__(self, x_bTD, rows_b, mask):
            y_bTD, aux = super().__call__(x_bTD, rows_b, mask)
            return y_bTD * hk.get_parameter('gain', (), y_bTD.dtype, jnp.ones), aux

    with pytest.raises(ValueError, match="'encoder/layers_0/mlp/gain' matches 0 rows"):
        shapes_with(mlp=Mlp)
