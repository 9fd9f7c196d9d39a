"""Adafactor against its formulas in float64 and T5X's own cases; schedules against T5X's definitions.

The formulas: t5x/adafactor.py; the cases: t5x/adafactor_test.py and t5x/utils.py. AdamW and Muon against
nanoT5's AdamWScale (nanoT5/utils/copied_utils.py), Keller Jordan's iteration and optax.contrib.muon.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forms import first_quick
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict
from small_models import assert_close

import checkpoint
import optimizer
import partition
import state_names
from configs import base, nano


def optimizer_config(**changes):
    return ConfigDict(base.get_config().optimizer.to_dict() | changes)


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


@pytest.mark.parametrize('settings', first_quick([
    {},
    {'factored': False},
    {'beta1': 0.9},
    {'weight_decay_rate': 0.01},
    {'clipping_threshold': 0.0},
    {'clipping_threshold': 0.3, 'decay_rate': 0.5},
    {'multiply_by_parameter_scale': False},
    {'global_norm_clip_threshold': 1.0},
    {'step_offset': -3},
], num_quick=2), ids=str)  # fmt: skip
def test_adafactor_is_its_formula(settings):
    config, steps, rng = optimizer_config(**settings), 4, np.random.default_rng(0)
    shapes = {'square': (128, 128), 'tall': (300, 130), 'wide': (130, 300), 'small': (127, 200)}
    shapes |= {'scale': (64,), 'zero': (5, 3)}
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    params['zero'] *= 0  # its scale is epsilon2
    grads = []
    for _ in range(steps):
        scaled = {k: rng.normal(size=s, scale=rng.uniform(0.1, 3)) for k, s in shapes.items()}
        grads.append({k: x.astype(np.float32) for k, x in scaled.items()})
    tx = optimizer.make_optimizer(config, lambda step: 0.05)
    state, found = tx.init(params), params
    for step, g in enumerate(grads):
        updates, state = tx.update(g, state, found, step=jnp.int32(step))
        found = optax.apply_updates(found, updates)
    expected, slots = numpy_adafactor(params, grads, config, 0.05, steps)
    arrays = state_names.to_t5x(jnp.int32(steps), found, state)
    assert len(arrays) == 1 + len(params) * (1 + len(state_names.T5X_SLOTS))
    for k in params:
        assert_close({k: found[k]}, {k: expected[k]}, 1e-5)
        for name in state_names.T5X_SLOTS:
            want = slots[k].get(name, np.zeros(1))  # T5X keeps [1] zeros for a slot without use
            path = f'state/param_states/{k}/{name}'
            assert_close({path: arrays[path]}, {path: want}, 1e-5)

    *_, again = state_names.from_t5x(arrays, jax.eval_shape(tx.init, params))
    chex.assert_trees_all_equal(again, state)


@pytest.mark.parametrize('factored', first_quick([True, False]))
def test_experts_one_by_one(factored):
    """As each matrix alone, of E times the gradient, and factored however small they are."""
    config = optimizer_config(factored=factored)
    rng = np.random.default_rng(0)
    path = 'encoder/layers_1/mlp/expert/wi/kernel'
    param = jnp.asarray(rng.normal(size=(3, 4, 6)), jnp.float32)
    grad = jnp.asarray(rng.normal(size=(3, 4, 6)), jnp.float32)
    ours = optimizer.adafactor(config, lambda step: 0.05)
    state = ours.init({path: param})
    updates, state = ours.update({path: grad}, state, {path: param}, step=0)
    tree = state_names.to_t5x(0, {path: param}, state)
    alone = optax.adafactor(0.05, min_dim_size_to_factor=1, factored=factored)
    for expert in range(3):
        matrix = {path: param[expert]}
        expected, slots = alone.update({path: 3 * grad[expert]}, alone.init(matrix), matrix)
        assert_close(updates[path][expert], expected[path], 1e-6)
        slots = state_names.to_t5x(0, matrix, slots)
        for name in ('v_row', 'v_col') if factored else ('v',):
            slot = f'state/param_states/{path}/{name}'
            assert_close(tree[slot][expert], slots[slot], 1e-6)


@pytest.mark.parametrize(
    'clip, v_row, v_col', [(0.0, 0.9574349, 0.6169143), (1.0, 0.478811, 0.13829)]
)
def test_the_case_of_T5X(clip, v_row, v_col):
    """[3, 2] ones, gradients of ones, step 1, slots .9 and .1: factored means, parameters to 0.9."""
    config = optimizer_config(global_norm_clip_threshold=clip)
    tx = optimizer.make_optimizer(config, lambda step: 0.1)
    params = {'w': jnp.ones([3, 2])}
    moments = optimizer.Moments(v_row=jnp.full(2, 0.9), v_col=jnp.full(3, 0.1))
    start = (optax.EmptyState(), {'w': moments}) if clip else ({'w': moments},)
    updates, new = tx.update({'w': jnp.ones([3, 2])}, start, params, step=1)
    arrays = state_names.to_t5x(2, params, new)
    np.testing.assert_allclose(arrays['state/param_states/w/v_row'], v_row, rtol=1e-5)
    np.testing.assert_allclose(arrays['state/param_states/w/v_col'], v_col, rtol=1e-5)
    np.testing.assert_allclose(optax.apply_updates(params, updates)['w'], 0.9, rtol=1e-6)


def t5x_rate(step, config):
    """The learning rate of t5x/utils.py create_learning_rate_scheduler, in float64."""
    t = max(0, step - config.step_offset)
    warmup = config.warmup_steps
    rate = 1.0
    for name in config.factors.split(' * '):
        if name == 'constant':
            rate *= config.base_learning_rate
        elif name == 'linear_warmup':
            rate *= min(1.0, t / warmup)
        elif name == 'linear_decay':
            slope = 1.0 + config.decay_factor * (warmup - t)
            rate *= config.base_learning_rate * min(t / warmup, slope)
        elif name == 'rsqrt_decay':
            rate /= max(t, warmup) ** 0.5
        elif name == 'rsqrt_normalized_decay':
            rate *= warmup**0.5 / max(t, warmup) ** 0.5
        elif name == 'decay_every':
            rate *= config.decay_factor ** (t // config.steps_per_decay)
        elif name == 'cosine_decay':
            progress = max(0.0, (t - warmup) / config.steps_per_cycle)
            rate *= max(0.0, 0.5 * (1.0 + np.cos(np.pi * (progress % 1.0))))
    return max(rate, config.min_learning_rate)


# nanoT5's rate: torch's LinearLR(start_factor=0.5, total_iters=10000), then CosineAnnealingLR(eta_min=1e-5).
NANO_RATES = {
    0: 0.01,
    1: 0.010001,
    5000: 0.015,
    9999: 0.019999,
    10000: 0.02,
    20000: 0.018442991035748358,
    37768: 0.010005,
    60000: 0.0004961197748259659,
    65000: 1.4594091728348932e-05,
    65535: 1.0000015992021298e-05,
}


def test_the_schedule_of_nanoT5():  # noqa: N802
    """Up to the floor: nanoT5's cosine ends there, ours is cut off."""
    found = optimizer.make_schedule(nano.get_config().learning_rate)(jnp.asarray([*NANO_RATES]))
    np.testing.assert_allclose(found, [*NANO_RATES.values()], rtol=1e-5, atol=1e-5)


FACTORS = (
    'constant',
    'linear_warmup',
    'linear_decay',
    'rsqrt_decay',
    'rsqrt_normalized_decay',
    'decay_every',
    'cosine_decay',
)


@pytest.mark.parametrize('factors', [*FACTORS, 'constant * linear_warmup * cosine_decay'])
def test_a_schedule_is_the_formula_of_T5X(factors):
    rng = np.random.default_rng(0)
    for _ in range(3):
        config = ConfigDict(base.get_config().learning_rate.to_dict())
        config.factors = factors
        config.base_learning_rate = float(rng.uniform(0.1, 2.0))
        config.warmup_steps = int(rng.integers(1, 50))
        config.decay_factor = float(rng.uniform(0.001, 0.1))
        config.steps_per_decay = int(rng.integers(1, 40))
        config.steps_per_cycle = int(rng.integers(20, 90))
        config.step_offset = int(rng.integers(0, 9))
        steps = np.arange(120)
        found = optimizer.make_schedule(config)(jnp.asarray(steps))
        expected = [t5x_rate(int(step), config) for step in steps]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.fixture
def params():
    """A parameter that Adafactor factors, one that it does not, and a vector; under T5X's paths."""
    rng = np.random.default_rng(0)
    shapes = {
        'encoder/layers_0/mlp/wi/kernel': (128, 130),
        'encoder/relpos_bias/rel_embedding': (4, 32),
        'encoder/encoder_norm/scale': (128,),
    }
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}


def train_state(tx, params, steps):
    """Parameters and optimizer state after `steps` updates with gradients that depend on both."""
    state = tx.init(params)
    for step in range(steps):
        params, state = updated(tx, params, state, step)
    return params, state


def updated(tx, params, state, step):
    grads = jax.tree.map(lambda x: jnp.sin(3 * x + step), params)
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(grads, state, params, step=step)
    return optax.apply_updates(params, updates), state


def schedule(step):
    return 0.01 / (step + 1)


def labels(params):
    return {path: 'norm' if path.endswith('scale') else 'matrix' for path in params}


FOREIGN = {
    'lion': lambda: optax.lion(schedule),
    'sgd with two momenta': lambda: optax.chain(
        optax.trace(0.9), optax.trace(0.5, nesterov=True), optax.scale(-0.01)
    ),
    'every second step': lambda: optax.MultiSteps(
        optax.adafactor(schedule, momentum=0.9), every_k_schedule=2
    ).gradient_transformation(),
    'labels': lambda: optax.multi_transform(
        {'norm': optax.sgd(0.01, momentum=0.9), 'matrix': optax.adam(schedule)}, labels
    ),
}
OURS = {
    'adafactor': {},
    'adafactor with momentum': {'beta1': 0.9},
    'adafactor after a clip': {'global_norm_clip_threshold': 1.0},
    'adafactor with all': {'beta1': 0.9, 'global_norm_clip_threshold': 1.0, 'factored': False},
    'adamw': {'name': 'adamw'},
    'adamw after a clip': {'name': 'adamw', 'global_norm_clip_threshold': 1.0},
    'adafactor with an average': {'ema_decay': 0.9, 'global_norm_clip_threshold': 1.0},
    'adamw with an average': {'name': 'adamw', 'ema_decay': 0.9},
    'muon': {'name': 'muon'},
    'muon with all': {'name': 'muon', 'ema_decay': 0.9, 'global_norm_clip_threshold': 1.0},
}


def make(name):
    if name in FOREIGN:
        return FOREIGN[name]()
    return optimizer.make_optimizer(optimizer_config(**OURS[name]), schedule)


QUICK = ('adafactor', 'adamw', 'adamw with an average', 'muon', 'lion', 'labels')
OPTIMIZERS = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in (*OURS, *FOREIGN)
]


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_any_optimizer_goes_on_from_a_checkpoint(name, params, tmp_path):
    """Three steps, saved and restored, then two more, are five steps, bit for bit."""
    tx = make(name)
    expected = train_state(tx, params, 5)
    saved = train_state(tx, params, 3)
    saver = checkpoint.Saver(tmp_path)
    saver.save(3, state_names.to_t5x(jnp.int32(3), *saved), {})
    saver.wait()
    tree = checkpoint.restore(tmp_path / 'checkpoint_3')
    step, *found = state_names.from_t5x(tree, jax.eval_shape(tx.init, params))
    assert step == 3
    chex.assert_trees_all_equal(tuple(found), saved)
    chex.assert_trees_all_equal_dtypes(tuple(found), saved)
    for step in (3, 4):
        found = updated(tx, *found, step)
    chex.assert_trees_all_equal(found, expected)


def names_of_state(tx, params):
    """The paths of the optimizer's state, a parameter's below 'PARAM'."""
    tree = state_names.to_t5x(jnp.int32(0), params, tx.init(params))
    names = set()
    for path in tree:
        if not path.startswith('target/'):
            for parameter in params:
                path = path.replace(parameter, 'PARAM')
            names.add(path)
    return names


def slots(*names):
    return {f'state/param_states/PARAM/{name}' for name in names}


def test_names_of_the_state(params):
    adafactor = slots('m', 'v', 'v_col', 'v_row')
    every_second = slots('ema', 'm', 'v', 'v_col', 'v_row', 'acc_grads')
    counts = ('count', 'count_1', 'count_2')
    for name in ('mini_step', 'gradient_step', *(f'inner_opt_state/{x}' for x in counts)):
        every_second.add(f'state/optimizer/{name}')
    for name, expected in {
        'adafactor': adafactor,
        'adafactor with momentum': adafactor,
        'adafactor after a clip': adafactor,
        'adafactor with an average': adafactor | slots('ema_params'),  # T5X finds all of its own
        'adamw': slots('mu', 'nu') | {'state/optimizer/count'},
        'muon': slots('mu', 'nu') | {'state/optimizer/count'},
        'sgd with two momenta': slots('trace', 'trace_1'),
        'every second step': every_second,
    }.items():
        assert names_of_state(make(name), params) == {'state/step'} | expected


def test_the_rate_is_that_of_the_step(params):
    """Also of a step that came without optimizer state, as for Adafactor in T5X."""
    tx = optimizer.make_optimizer(optimizer_config(name='adamw'), schedule)
    grads = jax.tree.map(jnp.ones_like, params)
    first, later = (tx.update(grads, tx.init(params), params, step=i)[0] for i in (0, 999))
    assert_close(later, jax.tree.map(lambda x: x / 1000, first), 1e-6)


@pytest.mark.parametrize('name', [*OURS, *FOREIGN])
def test_slots_are_split_like_their_parameters(name, params):
    tx = make(name)
    split = {
        'encoder/layers_0/mlp/wi/kernel': P(None, 'model'),
        'encoder/relpos_bias/rel_embedding': P('model', None),
        'encoder/encoder_norm/scale': P(None),
    }
    opt_state = jax.eval_shape(tx.init, params)
    specs = state_names.state_specs(opt_state, params, split)
    chex.assert_trees_all_equal_structs(specs, opt_state)
    arrays = state_names.to_t5x(jnp.int32(0), params, tx.init(params))
    num_split = 0
    for path, spec in state_names.to_t5x(P(), split, specs).items():
        parameter = next((p for p in params if f'param_states/{p}/' in path), None)
        if parameter and arrays[path].shape == params[parameter].shape:
            assert spec == split[parameter], path
            num_split += 1
        elif path.endswith(('/v_row', '/v_col')) and len(arrays[path]) > 1:
            kept = params[parameter].shape.index(len(arrays[path]))
            assert spec == P(split[parameter][kept])
        elif path.startswith('state/') and isinstance(spec, P):
            assert spec == P(), path
    assert num_split >= 2


def by_formula(x, beta1, beta2, update_of):
    """Return a parameter after three steps. `update_of`: a function of it, Adam's moments and the count of steps."""
    p = x.astype(np.float64)
    m = v = 0.0
    for step in range(3):
        g = np.sin(3 * p + step)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        p = p - schedule(step) * update_of(p, m, v, step + 1)
    return p


def test_adamw_is_its_formula(params):
    """The tolerance can tell these betas and this decay from others."""
    beta1, beta2, decay, epsilon = 0.7, 0.9, 0.5, 0.1
    config = optimizer_config(name='adamw')
    config.adamw.update(beta1=beta1, beta2=beta2, weight_decay=decay, epsilon=epsilon)
    found, _ = train_state(optimizer.make_optimizer(config, schedule), params, 3)

    def update_of(p, m, v, count):
        u = m / (1 - beta1**count) / (np.sqrt(v / (1 - beta2**count)) + epsilon)
        return u + decay * p

    for path, x in params.items():
        expected = by_formula(x, beta1, beta2, update_of)
        assert_close({path: found[path]}, {path: expected}, 1e-5)


def test_adamw_in_proportion_is_that_of_nanoT5(params):  # noqa: N802
    """Norms and relative biases do not decay. The scale of a small parameter is 1e-3.

    Without epsilon, which nanoT5 adds before it corrects the bias.
    """
    beta1, beta2, decay = 0.9, 0.95, 0.5
    config = optimizer_config(name='adamw')
    config.adamw.update(beta2=beta2, weight_decay=decay, epsilon=0.0)
    config.adamw.update(multiply_by_parameter_scale=True, decay_norms=False)
    params['token_embedder/embedding'] = params['encoder/relpos_bias/rel_embedding'] * 1e-5
    found, _ = train_state(optimizer.make_optimizer(config, schedule), params, 3)

    def update_of(p, m, v, count):
        correction = np.sqrt(1 - beta2**count) / (1 - beta1**count)
        rms = np.linalg.norm(p) / p.size**0.5
        return correction * max(1e-3, rms) * m / np.sqrt(v)

    def decayed_update_of(p, *others):
        return update_of(p, *others) + decay * p

    for path, x in params.items():
        is_decayed = path.endswith(('kernel', 'embedding')) and 'rel_' not in path
        expected = by_formula(x, beta1, beta2, decayed_update_of if is_decayed else update_of)
        assert_close({path: found[path]}, {path: expected}, 1e-6)


MATRICES = {
    'encoder/layers_0/mlp/wi/kernel': (24, 40),
    'encoder/layers_0/mlp/wo/kernel': (40, 24),
    'encoder/layers_0/attention/key/kernel': (24, 24),
    'decoder/layers_11/self_attention/out/kernel': (24, 24),
    'decoder/layers_0/mlp/expert/wi/kernel': (8, 24, 40),
}
OTHERS = {
    'decoder/logits_dense/kernel': (24, 48),
    'token_embedder/embedding': (48, 24),
    'encoder/layers_0/relpos_bias/rel_embedding': (4, 32),
    'encoder/layers_0/pre_mlp_layer_norm/scale': (24,),
}


def random_parameters():
    rng = np.random.default_rng(0)
    shapes = MATRICES | OTHERS
    return {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}


def compiled_steps(tx, params):
    """The parameters after three updates, as `train_state`, but compiled."""
    step = jax.jit(functools.partial(updated, tx))
    state = tx.init(params)
    for i in range(3):
        params, state = step(params, state, i)
    return params


def test_muon_is_that_of_optax():
    """Kernels of layers, those of experts one by one; the others have AdamW's updates."""
    params = random_parameters()
    config = optimizer_config(name='muon')
    config.adamw.weight_decay = 0.1
    found = compiled_steps(optimizer.make_optimizer(config, schedule), params)
    dimensions = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    theirs = optax.contrib.muon(
        schedule,
        weight_decay=0.1,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=dict.fromkeys(MATRICES, dimensions),
    )
    expected = compiled_steps(theirs, {path: params[path] for path in MATRICES})
    assert_close({path: found[path] for path in MATRICES}, expected, 1e-6)
    config.name = 'adamw'
    others = {path: params[path] for path in OTHERS}
    expected = compiled_steps(optimizer.make_optimizer(config, schedule), others)
    assert_close({path: found[path] for path in OTHERS}, expected, 1e-6)


@pytest.mark.parametrize('shape', [(12, 20), (20, 12), (3, 12, 12), (1, 7)])
def test_orthogonalized_is_its_formula(shape):
    """Five steps of Keller Jordan's iteration, in float64, on the matrix's wide form."""
    rng = np.random.default_rng(0)
    matrices = {'a': rng.normal(size=shape), 'b': 1e-4 * rng.normal(size=shape)}
    found = optimizer.orthogonalized({k: x.astype(np.float32) for k, x in matrices.items()})
    for name, matrix in matrices.items():
        x = matrix if shape[-2] <= shape[-1] else matrix.swapaxes(-2, -1)
        x = x / (np.sqrt((x**2).sum((-2, -1), keepdims=True)) + 1e-8)
        for _ in range(5):
            a = x @ x.swapaxes(-2, -1)
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        expected = x if x.shape == shape else x.swapaxes(-2, -1)
        expected = expected * 0.2 * max(shape[-2:]) ** 0.5
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-6)


def test_orthogonalizing_is_traced_once_per_shape():
    """However many layers there are."""
    counts = []
    for num_layers in (2, 20):
        matrices = {}
        for i in range(num_layers):
            matrices |= {f'{i}/wi': jnp.ones((8, 16)), f'{i}/wo': jnp.ones((16, 8))}
        program = jax.jit(optimizer.orthogonalized).lower(matrices).as_text()
        counts.append(program.count('dot_general'))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize('name, mesh', [
    ('muon', (1, 8, 1)),
    ('muon', (2, 2, 2)),
    ('muon', (1, 2, 4)),
    ('adamw', (2, 2, 2)),
])  # fmt: skip
def test_the_same_updates_on_every_mesh(name, mesh):
    """On global arrays; each slot is split as its parameter. With fsdp alone nothing is gathered."""
    params = random_parameters()
    table = {
        r'.+/(key|mlp/wi|logits_dense)/kernel': P('fsdp', 'model'),
        r'.+/expert/wi/kernel': P('model', None, 'fsdp'),
        r'.+/(out|wo)/kernel|token_embedder/embedding': P('model', 'fsdp'),
        '.+/rel_embedding': P('model', None),
        '.+/scale': P(None),
    }
    config = optimizer_config(name=name)
    config.adamw.update(multiply_by_parameter_scale=True, decay_norms=False)
    tx = optimizer.make_optimizer(config, schedule)
    data, fsdp, model_axis = mesh
    mesh = partition.make_mesh(data=data, fsdp=fsdp, model=model_axis)
    specs = partition.param_specs(table, params)
    state_specs = state_names.state_specs(jax.eval_shape(tx.init, params), params, specs)
    shardings = partition.shardings(mesh, (specs, state_specs))

    @functools.partial(jax.jit, out_shardings=shardings)
    def step(params, state, i):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # as train.jit_step
            return updated(tx, params, state, i)

    found = jax.device_put((params, tx.init(params)), shardings)
    if fsdp == 8:
        assert 'all-gather' not in step.lower(*found, 0).compile().as_text()
    expected = (params, tx.init(params))
    for i in range(3):
        found = step(*found, i)
        expected = updated(tx, *expected, i)
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize('name, decay', [('adafactor', 0.999), ('adamw', 0.5)])
def test_the_average_of_parameters_is_its_formula(params, name, decay):
    """tf.train.ExponentialMovingAverage: from the initial parameters, without a correction."""
    without = optimizer.make_optimizer(optimizer_config(name=name), schedule)
    averaging = optimizer.make_optimizer(optimizer_config(name=name, ema_decay=decay), schedule)
    expected = {path: x.astype(np.float64) for path, x in params.items()}
    for step in range(1, 5):
        raw, _ = train_state(without, params, step)
        found, state = train_state(averaging, params, step)
        chex.assert_trees_all_equal(found, raw)  # the updates are the same
        for path, x in raw.items():
            expected[path] = decay * expected[path] + (1 - decay) * np.asarray(x, np.float64)
        average = optimizer.averaged(found, state)
        assert_close(dict(average), expected, 1e-6)
    assert optimizer.averaged(params, without.init(params)) == params
