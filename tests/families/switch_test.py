"""Switch Transformer's numbers, from flaxformer under T5X: golden/switch/README.md says what each array proves."""

import json
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import assert_close, golden_batch

import checkpoint
import infer
import model
import partition
import state_names
import train
from configs import base
from families import switch
from formats import own_model
from prepare import make_spec, restore

pytestmark = pytest.mark.usefixtures('highest_precision')
GOLDEN = pathlib.Path(__file__).parent.parent / 'golden/switch'
SETTINGS = json.loads((GOLDEN / 'config.json').read_text())
CASES = json.loads((GOLDEN / 'report.json').read_text())['cases']
# Of other cases config.json has them. Of parts of a row the two stacks have different sizes, at most these.
CAPACITY = {
    'drops': {'eval_expert_capacity_factor': 0.5, 'min_expert_capacity': 2},
    'drops_padded': {'eval_expert_capacity_factor': 0.5, 'min_expert_capacity': 2},
    'groups_of_part_of_a_row': {'eval_expert_capacity_factor': 0.5, 'min_expert_capacity': 1},
    'groups_of_several_rows': {'eval_expert_capacity_factor': 1.0, 'min_expert_capacity': 2},
    'eval': {},
    'train': {},
}
FEATURES = ('encoder_', 'decoder_')


@pytest.fixture(scope='module')
def arrays():
    return dict(np.load(GOLDEN / 'golden.npz'))


def golden_config(num_rows=1, **options):
    """Our config for the run that golden/config.json describes."""
    config = base.get_config()
    config.model.update(module='switch', dropout_rate=0.0)
    for name in set(SETTINGS) & set(config.model):
        is_tuple = name == 'mlp_activations'
        config.model[name] = tuple(SETTINGS[name]) if is_tuple else SETTINGS[name]
    known = {name: SETTINGS[name] for name in vars(switch.Options()).keys() & SETTINGS.keys()}
    known |= {'group_size': 0}  # T5X's, of which a row is left
    config.model.options.update(known | options)
    config.loss.z_loss = SETTINGS['z_loss']
    config.loss.label_smoothing = SETTINGS['label_smoothing']
    config.loss.loss_normalizing_factor = SETTINGS['loss_normalizing_factor']
    assert SETTINGS['learning_rate'] == 'constant(0.05) * rsqrt_decay, warmup_steps=10'
    config.learning_rate.update(
        factors='constant * rsqrt_decay', base_learning_rate=0.05, warmup_steps=10
    )
    config.train.batch_size = num_rows
    config.mesh.update(data=1, fsdp=1, model=1)
    return config


def options_of(case):
    if case not in CAPACITY:
        return {'eval_expert_capacity_factor': float(SETTINGS['num_experts'])}
    group_size = 0
    if case.startswith('groups'):
        group_size = max(layer['group_size'] for layer in CASES[case]['layers'].values())
    return {**CAPACITY[case], 'group_size': group_size}


def batch_of(arrays, case):
    batch = golden_batch(arrays, case)
    return {name: x for name, x in batch.items() if name.startswith(FEATURES)}


def compute(config, params, batch, rows=None):
    """Return the logits, aux, and of each sparse layer (router logits, place of each token, places)."""
    routed = {}

    def spy(next_method, args, kwargs, context):
        out = next_method(*args, **kwargs)
        layer = context.module.module_name.partition('/mlp')[0]
        if context.module.module_name.endswith('router_weights/w'):
            routed[layer] = out
        if context.method_name == 'pass_experts':
            _, place_nt, num_places, _ = args
            routed[layer] = (routed[layer], place_nt, jnp.full((), num_places))
        return out

    def f(params, batch):
        with hk.intercept_methods(spy):
            logits, aux = model.apply(
                lambda: model.logits(config, batch, rows), params, jax.random.key(0)
            )
        return logits, aux, dict(routed)

    return jax.device_get(partition.one_device(f)(params, batch))


@pytest.mark.parametrize('case', CASES)
def test_logits_and_routes(arrays, case):
    config = own_model.load(golden_config(**options_of(case)).model)
    params = checkpoint.parameters(checkpoint.restore(GOLDEN / 'checkpoint_0'))
    batch = batch_of(arrays, case)
    rows = np.arange(len(batch['decoder_target_tokens'])) if CASES[case]['train'] else None
    logits, aux, routed = compute(config, params, batch, rows)
    mask = (batch['decoder_target_tokens'] > 0)[..., None]
    assert_close(logits * mask, arrays[f'{case}/logits'] * mask, 1e-5)
    if case == 'tokens_not_a_multiple_of_experts':  # whose groups straddle rows
        return
    layers = CASES[case]['layers']
    assert sorted(routed) == sorted(layers)
    for layer, (router_logits, places, num_places) in routed.items():
        expected = arrays[f'{case}/{layer}/router_logits']
        np.testing.assert_allclose(router_logits.reshape(expected.shape), expected, atol=2e-5)
        expert = arrays[f'{case}/{layer}/expert']
        np.testing.assert_array_equal(router_logits.argmax(-1).reshape(expert.shape), expert)
        kept = arrays[f'{case}/{layer}/kept']
        num_all = SETTINGS['num_experts'] * num_places
        np.testing.assert_array_equal((places < num_all).reshape(kept.shape), kept)
        np.testing.assert_array_equal(
            (places // num_places).reshape(kept.shape)[kept], expert[kept]
        )
    factors = {'auxiliary_loss': 'aux_loss_factor', 'router_z_loss': 'router_z_loss_factor'}
    for name, value_b in aux.items():
        name = name.removeprefix('experts/')
        factor = SETTINGS[factors[name]] if name in factors else 1.0
        of_layers = [layer[name] for layer in layers.values()]
        np.testing.assert_allclose(
            value_b.mean(), factor * np.mean(of_layers), rtol=2e-6, atol=1e-6
        )


def test_encoded_inputs(arrays, monkeypatch):
    cases = [x for x in CASES if not x.startswith(('groups', 'train', 'tokens', 'packed'))]
    assert len(cases) == 5
    for case in cases:
        tokens = arrays[f'{case}/encoder_input_tokens']
        monkeypatch.setattr(infer, 'LENGTH_MULTIPLE', tokens.shape[1])
        inputs = [row[row > 0].tolist() for row in tokens]
        outputs, mask = load(**options_of(case)).encode(inputs)
        expected = arrays[f'{case}/encoded'][:, : outputs.shape[1]]
        assert_close(outputs, expected * mask[..., None], 1e-5)


def load(**options):
    config = own_model.load(golden_config(**options).model)
    params = checkpoint.parameters(checkpoint.restore(GOLDEN / 'checkpoint_0'))
    return infer.T5(config, params, partition.make_mesh(data=1))


def test_scores_and_answers(arrays, monkeypatch):
    monkeypatch.setattr(infer, 'LENGTH_MULTIPLE', 8)  # the places of a row go by its padded length
    t5 = load()
    batch = batch_of(arrays, 'eval')
    inputs = [row[row > 0].tolist() for row in batch['encoder_input_tokens']]
    targets = [row[row > 0].tolist() for row in batch['decoder_target_tokens']]
    assert_close(np.array(t5.score(inputs, targets)), arrays['eval/score'], 1e-5)
    length = batch['decoder_target_tokens'].shape[1]
    for name, options in (('greedy', {}), ('beam2', {'beam_size': 2, 'num_return': 2})):
        found = t5.generate(inputs, length, return_scores=True, **options)
        decodes = arrays[f'eval/{name}_decodes']
        if name == 'beam2':  # the best last; of greedy answers the file has no scores
            decodes = decodes[:, ::-1]
            scores = arrays[f'eval/{name}_scores'][:, ::-1]
            assert_close(np.array(found.scores), scores, 1e-5)
        expected = [[row[row > 1].tolist() for row in np.atleast_2d(x)] for x in decodes]
        of_each = found.tokens if name == 'beam2' else [[x] for x in found.tokens]
        assert of_each == expected


def run_steps(arrays, mesh=(1, 1, 1), num_microbatches=1, options=None, **settings):
    """Return the losses and the state of the golden run's steps."""
    state = None
    losses = []
    for i in range(len(arrays['train_losses'])):
        batch = batch_of(arrays, f'train_batch{i}')
        config = golden_config(num_rows=len(batch['encoder_input_tokens']), **(options or {}))
        config.mesh.update(dict(zip(partition.MESH_AXES, mesh, strict=True)))
        config.update_from_flattened_dict(settings)
        spec = make_spec(config, num_microbatches)
        if state is None:
            state = restore(spec, checkpoint.read_index(GOLDEN / 'checkpoint_0'))
        state, metrics = train.jit_step(spec)(state, batch)
        losses.append(float(metrics['loss']))
    return losses, state_names.to_t5x(*jax.device_get(state))


def test_steps(arrays):
    expected = checkpoint.restore(GOLDEN / 'checkpoint_4')
    losses, found = run_steps(arrays)
    np.testing.assert_allclose(losses, arrays['train_losses'], rtol=1e-6)
    assert sorted(found) == sorted(expected)
    assert_close(found, expected, 1e-5)


MESHES = [(1, 2, 2), (2, 2, 2), (1, 4, 2), (1, 1, 8)]
WAYS = [
    ('model', {}),
    ('fsdp', {}),
    ('model', {'model.remat': 'full', 'model.scan_layers': True}),
    ('fsdp', {'model.remat': 'dots', 'model.scan_layers': True}),
]


@pytest.mark.parametrize('axis, settings', WAYS)
@pytest.mark.parametrize('mesh', MESHES)
def test_experts_on_many_devices(arrays, mesh, axis, settings):
    """Losses and state are those of one device."""
    if mesh == (1, 1, 8):  # of two heads
        pytest.skip('heads')
    expected_losses, expected = run_steps(arrays)
    losses, found = run_steps(arrays, mesh, options={'split_experts': axis}, **settings)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    assert_close(found, expected, 1e-5)
