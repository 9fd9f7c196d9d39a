"""The same numbers on every mesh, dropout on: what finds a missing or doubled collective.

Tolerances are max|a-b| <= 1e-5 * max|b| per array: the order of sums differs between meshes.
"""

from typing import NamedTuple

import chex
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from small_models import assert_close, random_batch, random_params, run_config

import model
import optimizer
import partition
import train

STEPS = 3

gradients = jax.jit(train.gradients, static_argnums=0)


class Numbers(NamedTuple):
    """What is equal on every mesh."""

    start: dict  # the initial parameters
    losses: list
    end: dict  # parameters and optimizer state after STEPS steps


def run(config):
    trainer = train.make_trainer(config)
    state = train.jit_init(trainer)()
    start = {name: np.asarray(x) for name, x in state.params.items()}
    batches = [random_batch(i, config.model.vocab_size) for i in range(STEPS)]
    losses = []
    for batch in batches:
        state, metrics = train.jit_step(trainer)(state, batch)
        losses.append(float(metrics['loss']))
    end = jax.tree.map(np.asarray, optimizer.to_t5x(*state))
    return Numbers(start=start, losses=losses, end=end)


def assert_same(found, expected):
    chex.assert_trees_all_equal(found.start, expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert_close(found.end, expected.end, 1e-5)


@pytest.fixture(scope='module')
def single():
    return run(run_config(1, 1))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    'data, model_axis', [pytest.param(8, 1, marks=SLOW), pytest.param(4, 2, marks=SLOW), (2, 4)]
)
def test_same_on_every_mesh(single, data, model_axis):
    assert_same(run(run_config(data, model_axis)), single)


def gradients_of(config):
    trainer = train.make_trainer(config)
    params = random_params(model.T5Config(**config.model))
    grads, _ = gradients(trainer, params, random_batch(0), np.arange(8), jax.random.key(1))
    return jax.tree.map(np.asarray, grads)


@pytest.mark.slow
def test_same_gradients_on_another_mesh():
    assert_close(gradients_of(run_config(4, 2)), gradients_of(run_config(1, 1)), 1e-5)


SMALL = dict(emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32)
SIX_HEADS = dict(num_heads=6, head_dim=24, mlp_dim=96, logits_via_embedding=True)


@pytest.mark.slow
@pytest.mark.parametrize('data, model_axis', [(1, 2), (2, 3)])
def test_sizes_that_are_no_powers_of_two(data, model_axis):
    assert_same(run(run_config(data, model_axis, **SIX_HEADS)), run(run_config(1, 1, **SIX_HEADS)))


@pytest.mark.slow
def test_dropout_is_on_and_differs_between_rows_steps_and_seeds():
    config = run_config(1, 1, **SMALL)
    trainer = train.make_trainer(config)
    params = random_params(model.T5Config(**config.model))
    batch = {name: np.repeat(x[:1], 8, axis=0) for name, x in random_batch(0).items()}

    def loss(rows, seed):
        _, sums = gradients(trainer, params, batch, rows, jax.random.key(seed))
        return float(sums['loss'])

    rows = np.arange(8)
    assert loss(rows, 0) == loss(rows, 0)
    assert loss(rows, 0) != loss(rows, 1)
    assert loss(rows, 0) != loss(rows + 8, 0)
    np.testing.assert_allclose(loss(rows, 0), loss(rows[::-1].copy(), 0), rtol=1e-6)


@pytest.mark.parametrize('data, model_axis, words', [
    (2, 3, 'model.num_heads=8 cannot be split over mesh.model=3: use 1, 2, 4 or 8'),
    (3, 1, 'train.batch_size=8 cannot be split over mesh.data=3: use 1, 2, 4 or 8'),
    (-1, 3, '3 must divide the number of devices, 8'),
    (16, 1, 'at most the 8 devices'),
    (-1, -1, 'at most one may be -1'),
])  # fmt: skip
def test_a_mesh_that_cannot_be_is_said_in_words(data, model_axis, words):
    with pytest.raises(ValueError, match=words):
        train.make_trainer(run_config(data, model_axis))


def test_a_spec_may_split_over_several_axes():
    assert partition.splits_over(P(None, ('data', 'model')), 'data')
    assert partition.splits_over(P('data'), 'data')
    assert not partition.splits_over(P('model', None), 'data')
    assert partition.replicated_batch_axes(P(None, ('data', 'model'))) == ()
    assert partition.replicated_batch_axes(P('model')) == partition.BATCH_AXES


def test_every_parameter_has_one_row():
    with pytest.raises(ValueError, match="'encoder/bias' matches 0 rows"):
        partition.param_specs({'.+/kernel': None}, ['encoder/bias'])


@SLOW
@pytest.mark.parametrize(
    'data, model_axis, num_microbatches',
    [(1, 1, 8), (1, 1, 2), (2, 2, 4)],
)
def test_microbatches_give_the_gradients_of_the_whole_batch(data, model_axis, num_microbatches):
    """Dropout on, and divided by the tokens of the whole batch.

    Small matrices: the float32 rounding of large ones, which differs between batch sizes, is itself
    about 1e-6 of some gradients.
    """
    config, found = run_config(data, model_axis, **SMALL), {}
    params = random_params(model.T5Config(**config.model))
    for count in (1, num_microbatches):
        trainer = train.make_trainer(config, count)
        found[count] = gradients(trainer, params, random_batch(0), np.arange(8), jax.random.key(1))
    (grads, sums), (expected, expected_sums) = found[num_microbatches], found[1]
    assert_close(grads, expected, 1e-6)
    assert_close(sums, expected_sums, 1e-6)
