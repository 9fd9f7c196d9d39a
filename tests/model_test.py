"""What the model is, apart from T5X's numbers: buckets, masks, causality, initial values, names."""

import ast
import json
import pathlib
import re

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_test import random_batch, small_config

import model
import partition
import train
from configs import base

ROOT = pathlib.Path(__file__).parents[1]


def model_config(**settings):
    return model.T5Config(**small_config(1, 1, **settings).model)


def apply_logits(config):
    """(params, batch, key, rows) -> logits, on one device."""

    def f(params, batch, key=None, rows=None):
        return model.apply(lambda: model.logits(config, batch, rows), params, key)

    return jax.jit(partition.one_device(f))


@pytest.fixture(scope='module')
def tiny():
    config = model_config()
    return config, jax.jit(lambda: model.init(config, jax.random.key(0)))(), apply_logits(config)


# Inclusive distances at which each bucket begins (T5X's and Mesh-TF's formulas agree on them).
ENCODER_STARTS = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
DECODER_STARTS = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_relative_position_buckets():
    relative = jnp.arange(-2000, 2001)[None]
    distance = np.abs(relative)
    to_right = np.asarray(relative) > 0
    expected = np.searchsorted(ENCODER_STARTS, distance, side='right') - 1 + 16 * to_right
    np.testing.assert_array_equal(model.relative_position_bucket(relative, True), expected)
    expected = np.where(to_right, 0, np.searchsorted(DECODER_STARTS, distance, side='right') - 1)
    np.testing.assert_array_equal(model.relative_position_bucket(relative, False), expected)


def test_decoder_mask_is_T5Xs():
    segments = jnp.array(
        [[1, 1, 1, 2, 2, 0]]
    )  # of targets 6 7 3 4 5 0; t5x/examples/t5/layers_test.py
    rows = ['100000', '110000', '111000', '000100', '000110', '000000']
    mask = model.attention_mask(segments, segments, causal=True)
    assert [''.join(str(int(x)) for x in row) for row in mask[0, 0]] == rows


def test_causality_by_gradients(tiny):
    """Logits at t depend on decoder inputs up to t, and on no later one."""
    config, params, _ = tiny
    batch = {n: x[:1] for n, x in random_batch(0).items()}
    batch = {n: jnp.where(x == 0, 5, x) for n, x in batch.items()}  # no padding

    def logit_sums(offset_bTD):
        """Sums of logits per position, with `offset` added to the decoder's embedded inputs."""

        def shifted(c, table_vD, tokens_bT):
            x_bTD = original(c, table_vD, tokens_bT)
            return x_bTD + offset_bTD if tokens_bT is batch['decoder_input_tokens'] else x_bTD

        original, model.embed = model.embed, shifted
        try:
            logits = model.apply(lambda: model.logits(config, batch), params)
        finally:
            model.embed = original
        return (logits * jnp.arange(1.0, 385.0)[None, None]).sum((0, 2))

    length = batch['decoder_input_tokens'].shape[1]
    jacobian = partition.one_device(jax.jacobian(logit_sums))(
        jnp.zeros([1, length, config.emb_dim])
    )
    depends = np.abs(np.asarray(jacobian)).max((1, 3)) > 0  # [logits at, input at]
    np.testing.assert_array_equal(depends, np.tril(np.ones([length, length], bool)))


def test_neighbours_in_a_packed_row_and_padding_change_nothing(tiny):
    config, params, apply = tiny
    rng = np.random.default_rng(0)
    (a_in, a_out), (b_in, b_out) = [
        (rng.integers(3, 384, n), rng.integers(3, 384, t)) for n, t in ((10, 5), (14, 11))
    ]

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
    dropout = model.Dropout(0.3, jnp.arange(64))
    drop = hk.transform(lambda shape: dropout(x, shape))
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


@pytest.mark.parametrize('settings', [{}, {'dtype': 'bfloat16', 'head_dim': 128}], ids=str)
def test_initial_values_have_the_deviations_of_T5X(settings):
    sizes = dict(vocab_size=2048, emb_dim=256, num_heads=8, head_dim=32, mlp_dim=512)
    config = model_config(**sizes | settings)
    d, h, k, f = config.emb_dim, config.num_heads, config.head_dim, config.mlp_dim
    root = float(jnp.sqrt(k).astype(config.dtype))  # of bfloat16: 11.3125 for 128
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
        shapes = model.shapes(model.T5Config(**settings))
        assert {path: list(shape) for path, shape in shapes.items()} == pinned[name]


def count(**settings):
    shapes = model.shapes(model.T5Config(**base.get_config().model.to_dict() | settings))
    return sum(int(np.prod(shape)) for shape in shapes.values())


def test_parameter_counts_of_published_sizes():
    assert count() == 76_961_152  # T5 1.1 small
    t5_small = dict(num_heads=8, num_encoder_layers=6, num_decoder_layers=6, mlp_dim=2048)
    assert count(**t5_small, mlp_activations=('relu',), logits_via_embedding=True) == 60_506_624
    byt5_small = dict(vocab_size=384, emb_dim=1472, mlp_dim=3584)
    assert count(**byt5_small, num_encoder_layers=12, num_decoder_layers=4) == 299_637_760


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_one_step_of_t5_1_1_small(dtype):
    config = base.get_config()
    config.model.dtype = dtype
    config.train.batch_size = 2
    config.mesh.update(data=1, model=1)
    trainer = train.make_trainer(config)
    rng, state = np.random.default_rng(0), trainer.init()
    lengths = dict(encoder_input_tokens=512, decoder_input_tokens=114, decoder_target_tokens=114)
    batch = {name: rng.integers(2, 32100, (2, n), np.int32) for name, n in lengths.items()}
    batch['decoder_loss_weights'] = np.ones((2, 114), np.int32)
    state, metrics = trainer.train_step(state, batch)
    assert all(x.dtype == jnp.float32 for x in state.params.values())
    assert metrics['finite'] and metrics['weights'] == 228
    # Untrained, logits have variance one: log(32128) + 1/2, but for the noise of 228 tokens.
    assert abs(metrics['nats'] / 228 - (np.log(32128) + 0.5)) < 0.5


@pytest.mark.parametrize('settings, words', [
    ({'num_heads': 0}, 'model.num_heads=0: must be at least 1'),
    ({'dtype': 'float16'}, "model.dtype='float16': use 'float32' or 'bfloat16'"),
    ({'mlp_activations': ('gelo',)}, 'use some of relu, gelu'),
    ({'mlp_activations': ()}, 'use some of relu, gelu'),
    ({'dropout_rate': 1.0}, r'must lie in \[0, 1\)'),
])  # fmt: skip
def test_a_model_that_cannot_be_is_said_in_words(settings, words):
    with pytest.raises(ValueError, match=words):
        model_config(**settings)


def test_a_table_that_disagrees_fails_by_path(monkeypatch):
    pattern = r'.+/mlp/wo/kernel'
    monkeypatch.setitem(model.PARAMETER_SPECS, pattern, jax.sharding.PartitionSpec(None, 'model'))
    trainer = train.make_trainer(small_config(1, 2))
    with pytest.raises(ValueError, match='mlp/wo'):
        trainer.train_step(trainer.init(), random_batch(0))


def test_einsum_letters_are_the_suffixes():
    """In model.py and loss.py each einsum string repeats the suffixes of its operands and its result."""
    checked = 0
    for file in ('model.py', 'loss.py'):
        tree = ast.parse((ROOT / file).read_text())
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == 'jnp.einsum'):
                continue
            operands, result = node.args[0].value.split('->')
            for letters, operand in zip(operands.split(','), node.args[1:], strict=True):
                name = re.match(r'\w+', ast.unparse(operand))[0]
                assert name.rsplit('_', 1)[1] == letters, ast.unparse(node)
            parents = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and n.value is node]
            for parent in parents:
                assert parent.targets[0].id.rsplit('_', 1)[1] == result, ast.unparse(parent)
            checked += 1
    assert checked >= 11


IMPORTS = {
    'main': {'train'},
    'train': {'checkpoint', 'data', 'evaluate', 'loss', 'model', 'optimizer', 'partition'},
    'evaluate': {'checkpoint', 'data', 'loss', 'model', 'partition'},
    'model': {'partition'},
    'loss': set(),
    'optimizer': set(),
    'data': set(),
    'checkpoint': set(),
    'partition': set(),
}
FORBIDDEN = {'tensorflow', 'torch', 'flax', 'gin', 'seqio', 't5', 't5x', 'clu'}


def test_imports_point_down_and_need_no_other_framework():
    for file in ROOT.glob('*.py'):
        if file.stem == 'setup':
            continue
        names = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split('.')[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.split('.')[0])
        assert names & set(IMPORTS) == IMPORTS[file.stem], file.name
        assert not names & FORBIDDEN, file.name
        assert file.stem != 'data' or 'jax' not in names
