"""Adafactor against its formulas in float64 and T5X's own cases; schedules against T5X's definitions.

The formulas: t5x/adafactor.py; the cases: t5x/adafactor_test.py and t5x/utils.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict
from small_models import assert_close

import optimizer
from configs import base


def adafactor_config(**settings):
    return ConfigDict(base.get_config().optimizer.to_dict() | settings)


def numpy_adafactor(params, grads, config, learning_rate, steps=1):
    """T5X's update, float64, on {name: array} with gradients of each step; returns params, slots."""
    p = {k: x.astype(np.float64) for k, x in params.items()}
    slots = {k: {} for k in p}
    for step in range(steps):
        g = {k: x.astype(np.float64) for k, x in grads[step].items()}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        clip = config.global_norm_clip_threshold
        if clip:
            g = {k: x * clip * min(1 / clip, 1 / norm) for k, x in g.items()}
        rho = 1 - (step - config.step_offset + 1.0) ** -config.decay_rate
        for k in p:
            square, slot = g[k] ** 2 + 1e-30, slots[k]
            order = np.argsort(p[k].shape)
            if config.factored and p[k].ndim == 2 and p[k].shape[order[-2]] >= 128:
                d1, d0 = order[-2], order[-1]
                for name, axis in (('v_row', d0), ('v_col', d1)):
                    slot[name] = rho * slot.get(name, 0) + (1 - rho) * square.mean(axis)
                row = np.expand_dims(slot['v_row'] / slot['v_row'].mean(), d0)
                u = g[k] * row**-0.5 * np.expand_dims(slot['v_col'], d1) ** -0.5
            else:
                slot['v'] = rho * slot.get('v', 0) + (1 - rho) * square
                u = g[k] * slot['v'] ** -0.5
            if config.clipping_threshold:
                u = u / max(1, np.sqrt((u**2).mean()) / config.clipping_threshold)
            delta = learning_rate * u
            if config.multiply_by_parameter_scale:
                delta = delta * max(np.sqrt((p[k] ** 2).mean()), 1e-3)
            if config.beta1:
                slot['m'] = config.beta1 * slot.get('m', 0) + (1 - config.beta1) * delta
                delta = slot['m']
            p[k] = (1 - config.weight_decay_rate) * p[k] - delta
    return p, slots


@pytest.mark.parametrize('settings', [
    {},
    {'factored': False},
    {'beta1': 0.9},
    {'weight_decay_rate': 0.01},
    {'clipping_threshold': 0.0},
    {'clipping_threshold': 0.3, 'decay_rate': 0.5},
    {'multiply_by_parameter_scale': False},
    {'global_norm_clip_threshold': 1.0},
    {'step_offset': -3},
], ids=str)  # fmt: skip
def test_adafactor_is_its_formula(settings):
    config, steps, rng = adafactor_config(**settings), 4, np.random.default_rng(0)
    shapes = {'square': (128, 128), 'tall': (300, 130), 'wide': (130, 300), 'small': (127, 200)}
    shapes |= {'scale': (64,), 'zero': (5, 3)}
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    params['zero'] *= 0  # its scale is epsilon2
    grads = [
        {
            k: rng.normal(size=s, scale=rng.uniform(0.1, 3)).astype(np.float32)
            for k, s in shapes.items()
        }
        for _ in range(steps)
    ]
    tx = optimizer.make_optimizer(config, lambda step: 0.05)
    state, found = tx.init(params), params
    for g in grads:
        updates, state = tx.update(g, state, found)
        found = optax.apply_updates(found, updates)
    expected, slots = numpy_adafactor(params, grads, config, 0.05, steps)
    arrays = optimizer.to_t5x(jnp.int32(steps), found, state)
    assert len(arrays) == 1 + len(params) * (1 + len(optimizer.T5X_SLOTS))
    for k in params:
        assert_close({k: found[k]}, {k: expected[k]}, 1e-5)
        for name in optimizer.T5X_SLOTS:
            want = slots[k].get(name, np.zeros(1))  # T5X keeps [1] zeros for a slot without use
            path = f'state/param_states/{k}/{name}'
            assert_close({path: arrays[path]}, {path: want}, 1e-5)

    # There and back: a fresh state takes on T5X's arrays, counts included, and goes on the same.
    *_, again = optimizer.from_t5x(arrays, jax.eval_shape(tx.init, params))
    a, b = tx.update(grads[0], state, found)[0], tx.update(grads[0], again, found)[0]
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    'clip, v_row, v_col', [(0.0, 0.9574349, 0.6169143), (1.0, 0.478811, 0.13829)]
)
def test_the_case_of_T5X(clip, v_row, v_col):
    """[3, 2] ones, gradients of ones, step 1, slots .9 and .1: factored means, parameters to 0.9."""
    state = optax.adafactor(0.1, min_dim_size_to_factor=0)
    state = optax.chain(optax.clip_by_global_norm(clip), state) if clip else state
    params = {'w': jnp.ones([3, 2])}
    slots = {'v_row': jnp.full(2, 0.9), 'v_col': jnp.full(3, 0.1), 'v': jnp.zeros(1)}
    tree = {f'state/param_states/w/{name}': x for name, x in slots.items()}
    tree |= {'target/w': params['w'], 'state/step': jnp.int32(1)}
    *_, start = optimizer.from_t5x(tree, state.init(params))
    updates, new = state.update({'w': jnp.ones([3, 2])}, start, params)
    arrays = optimizer.to_t5x(2, params, new)
    np.testing.assert_allclose(arrays['state/param_states/w/v_row'], v_row, rtol=1e-5)
    np.testing.assert_allclose(arrays['state/param_states/w/v_col'], v_col, rtol=1e-5)
    np.testing.assert_allclose(optax.apply_updates(params, updates)['w'], 0.9, rtol=1e-6)


def rate(step, **settings):
    config = ConfigDict(base.get_config().learning_rate.to_dict() | settings)
    return float(optimizer.make_schedule(config)(jnp.int32(step)))


@pytest.mark.parametrize('step, settings, expected', [
    (0, {}, 0.01),  # T5's pretraining: 0.01 for 10,000 steps, then 1/sqrt(step)
    (10_000, {}, 0.01),
    (40_000, {}, 0.005),
    (7, {'factors': 'constant', 'base_learning_rate': 0.001}, 0.001),  # and its fine-tuning
    (0, {'factors': 'constant * linear_warmup', 'warmup_steps': 100}, 1e-8),  # never zero
    (25, {'factors': 'constant * linear_warmup', 'warmup_steps': 100}, 0.25),
    (500, {'factors': 'constant * linear_warmup', 'warmup_steps': 100}, 1.0),
    (400, {'factors': 'rsqrt_normalized_decay', 'warmup_steps': 100}, 0.5),
    (45_000, {'factors': 'constant * decay_every'}, 0.25),
    (50, {'factors': 'constant * cosine_decay', 'warmup_steps': 100}, 1.0),
    (50_000 + 100, {'factors': 'constant * cosine_decay', 'warmup_steps': 100}, 0.5),
    (100_000 + 100, {'factors': 'constant * cosine_decay', 'warmup_steps': 100}, 1.0),
    (5, {'factors': 'linear_decay', 'warmup_steps': 10, 'decay_factor': 0.1}, 0.5),
    (15, {'factors': 'linear_decay', 'warmup_steps': 10, 'decay_factor': 0.1}, 0.5),
    (30, {'factors': 'linear_decay', 'warmup_steps': 10, 'decay_factor': 0.1}, 1e-8),
    (1_000_400, {'factors': 'rsqrt_decay', 'warmup_steps': 1, 'step_offset': 1_000_000}, 0.05),
])  # fmt: skip
def test_schedules(step, settings, expected):
    assert rate(step, **settings) == pytest.approx(expected, rel=1e-6)


def test_an_unknown_factor_is_named():
    with pytest.raises(ValueError, match="'rsqrt' is none of constant, linear_warmup"):
        rate(0, factors='constant * rsqrt')
