"""The same numbers on every mesh, dropout on: what finds a missing or doubled collective.

Tolerances are max|a-b| <= 1e-5 * max|b| per array: the order of sums differs between meshes.
"""

import jax
import numpy as np
import pytest
from parity_test import assert_close

import optimizer
import partition
import train
from configs import base

STEPS = 3
gradients = jax.jit(train.gradients, static_argnums=0)


def small_config(data, model, **model_settings):
    """Matrices of 128 x 128 and more, so that Adafactor factors them. Where it does not, its first update is
    the gradient's sign: an element that is zero but for rounding would differ between any two meshes."""
    config = base.get_config()
    config.model.update(
        vocab_size=384,
        emb_dim=128,
        num_heads=8,
        num_encoder_layers=1,
        num_decoder_layers=1,
        head_dim=16,
        mlp_dim=128,
        dropout_rate=0.1,
    )
    config.model.update(model_settings)
    config.loss.label_smoothing = 0.1
    config.loss.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'
    config.learning_rate.update(factors='constant', base_learning_rate=0.01)
    config.train.batch_size = 8
    config.mesh.update(data=data, model=model)
    return config


def random_batch(seed, vocab_size=384):
    rng = np.random.default_rng(seed)
    lengths = {'encoder_input_tokens': 24, 'decoder_target_tokens': 16}
    batch = {name: rng.integers(2, vocab_size, (8, n), np.int32) for name, n in lengths.items()}
    for x in batch.values():
        x[np.arange(x.shape[1]) >= rng.integers(4, x.shape[1] + 1, (8, 1))] = 0
    targets = batch['decoder_target_tokens']
    batch['decoder_input_tokens'] = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    batch['decoder_loss_weights'] = (targets > 0).astype(np.int32)
    return batch


def run(config):
    """Gradients of the first step, then losses and parameters after STEPS steps."""
    trainer = train.make_trainer(config)
    state = train.jit_init(trainer)()
    start = {name: np.asarray(x) for name, x in state.params.items()}
    batches = [random_batch(i, config.model.vocab_size) for i in range(STEPS)]
    grads, _ = gradients(trainer, state.params, batches[0], np.arange(8), jax.random.key(1))
    grads = jax.tree.map(np.asarray, grads)
    losses = []
    for batch in batches:
        state, metrics = train.jit_step(trainer)(state, batch)
        losses.append(float(metrics['loss']))
    return start, grads, losses, jax.tree.map(np.asarray, optimizer.to_t5x(*state))


def assert_same(found, expected):
    for name, x in expected[0].items():
        np.testing.assert_array_equal(found[0][name], x, err_msg=name)  # the same initial bits
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-5)
    for part in (1, 3):
        for name, x in expected[part].items():
            assert_close(found[part][name], x, 1e-5, name)


@pytest.fixture(scope='module')
def single():
    return run(small_config(1, 1))


@pytest.mark.parametrize('data, model', [(8, 1), (4, 2), (2, 4)])
def test_same_on_every_mesh(single, data, model):
    assert_same(run(small_config(data, model)), single)


SIX_HEADS = dict(num_heads=6, head_dim=24, mlp_dim=96, logits_via_embedding=True)


@pytest.mark.parametrize('data, model', [(1, 2), (2, 3)])
def test_sizes_that_are_no_powers_of_two(data, model):
    assert_same(run(small_config(data, model, **SIX_HEADS)), run(small_config(1, 1, **SIX_HEADS)))


def test_dropout_is_on_and_differs_between_rows_steps_and_seeds():
    config = small_config(1, 1)
    trainer = train.make_trainer(config)
    params = train.jit_init(trainer)().params
    batch = {name: np.repeat(x[:1], 8, axis=0) for name, x in random_batch(0).items()}

    def loss(rows, seed):
        _, sums = gradients(trainer, params, batch, rows, jax.random.key(seed))
        return float(sums['loss'])

    rows = np.arange(8)
    assert loss(rows, 0) == loss(rows, 0)
    assert loss(rows, 0) != loss(rows, 1)
    assert loss(rows, 0) != loss(rows + 8, 0)
    np.testing.assert_allclose(loss(rows, 0), loss(rows[::-1].copy(), 0), rtol=1e-6)


@pytest.mark.parametrize('data, model, words', [
    (2, 3, 'model.num_heads=8 cannot be split over model=3; use 1, 2, 4 or 8'),
    (3, 1, 'train.batch_size=8 cannot be split over data=3; use 1, 2, 4 or 8'),
    (-1, 3, '3 must divide the number of devices, 8'),
    (16, 1, 'at most the 8 devices'),
    (-1, -1, 'at most one may be -1'),
])  # fmt: skip
def test_a_mesh_that_cannot_be_is_said_in_words(data, model, words):
    with pytest.raises(ValueError, match=words):
        train.make_trainer(small_config(data, model))


def test_every_parameter_has_one_row():
    with pytest.raises(ValueError, match="'encoder/bias' matches 0 rows"):
        partition.param_specs({'.+/kernel': None}, ['encoder/bias'])


@pytest.mark.parametrize('data, model, num_microbatches', [(1, 1, 2), (1, 1, 8), (2, 2, 4)])
def test_microbatches_give_the_gradients_of_the_whole_batch(data, model, num_microbatches):
    """Dropout on, and divided by the tokens of the whole batch. Small matrices: the float32 rounding of large
    ones, which differs between batch sizes, is itself about 1e-6 of some gradients."""
    sizes = dict(emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32)
    config, found = small_config(data, model, **sizes), {}
    params = train.jit_init(train.make_trainer(config))().params
    for count in (1, num_microbatches):
        trainer = train.make_trainer(config, count)
        found[count] = gradients(trainer, params, random_batch(0), np.arange(8), jax.random.key(1))
    (grads, sums), (expected, expected_sums) = found[num_microbatches], found[1]
    for name, x in expected.items():
        assert_close(grads[name], x, 1e-6, name)
    for name, x in expected_sums.items():
        assert_close(sums[name], x, 1e-6, name)
