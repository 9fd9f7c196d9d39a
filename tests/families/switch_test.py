"""Switch Transformer's numbers, from flaxformer under T5X: golden/switch/README.md says what each array proves."""

import json
import pathlib

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import first_in_ci, first_quick
from small_models import (
    as_one_device,
    assert_close,
    check_same_folder,
    check_scores_and_answers,
    golden_batch,
    golden_run_config,
    make_mesh,
    random_batch,
    random_params,
    run_config,
    sharded,
)

import checkpoint
import infer
import model
import partition
import state_names
import train
from answers import batches
from families import lora, switch
from formats import own_model, write_hugging_face
from messages import Refused
from modes import collectives
from prepare import make_spec, restore

pytestmark = pytest.mark.usefixtures('highest_precision')
GOLDEN = pathlib.Path(__file__).parent.parent / 'golden/switch'
SETTINGS = json.loads((GOLDEN / 'config.json').read_text())
CASES = json.loads((GOLDEN / 'report.json').read_text())['cases']
# Other cases have them in config.json. If groups are parts of a row, the two stacks have different sizes, at most these.
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
    config = golden_run_config(SETTINGS, num_rows, module='switch', dropout_rate=0.0)
    known = {name: SETTINGS[name] for name in vars(switch.Options()).keys() & SETTINGS.keys()}
    known |= {'group_size': 0}  # T5X's, of which a row is left
    config.model.options.update(known | options)
    config.loss.loss_normalizing_factor = SETTINGS['loss_normalizing_factor']
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
            _, place_t, num_places, _ = args
            routed[layer] = (routed[layer], place_t, jnp.full((), num_places))
        return out

    def f(params, batch):
        with hk.intercept_methods(spy):
            logits, *_, aux = model.apply(
                model.logits, params, config, batch, rows, key=jax.random.key(0)
            )
        return logits, aux, dict(routed)

    specs = (model.param_specs(config), partition.BATCH)
    return jax.device_get(as_one_device(f, specs)(params, batch))


@pytest.mark.parametrize('case', first_quick(CASES))
def test_logits_and_routes(arrays, case):
    config = own_model.load(golden_config(**options_of(case)).model)
    params = checkpoint.parameters(checkpoint.restore(GOLDEN / 'checkpoint_0'))
    batch = batch_of(arrays, case)
    rows = np.arange(len(batch['decoder_target_tokens'])) if CASES[case]['train'] else None
    logits, aux, routed = compute(config, params, batch, rows)
    mask = (batch['decoder_target_tokens'] > 0)[..., None]
    assert_close(logits * mask, arrays[f'{case}/logits'] * mask, 1e-5)
    if case == 'tokens_not_a_multiple_of_experts':  # its groups straddle rows
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
    for expert in range(SETTINGS['num_experts']):
        loads = [(arrays[f'{case}/{layer}/expert'] == expert).mean() for layer in layers]
        np.testing.assert_allclose(aux[f'experts/load/{expert}'].mean(), np.mean(loads), atol=1e-6)
    factors = {'auxiliary_loss': 'aux_loss_factor', 'router_z_loss': 'router_z_loss_factor'}
    for name in layers['decoder/layers_1'].keys() - {'groups', 'group_size', 'capacity'}:
        factor = SETTINGS[factors[name]] if name in factors else 1.0
        expected = factor * np.mean([layer[name] for layer in layers.values()])
        np.testing.assert_allclose(
            aux[f'experts/{name}'].mean(), expected, rtol=2e-6, atol=1e-6, err_msg=name
        )


@pytest.mark.slow
def test_encoded_inputs(arrays, monkeypatch):
    cases = [x for x in CASES if not x.startswith(('groups', 'train', 'tokens', 'packed'))]
    assert len(cases) == 5
    for case in cases:
        tokens = arrays[f'{case}/encoder_input_tokens']
        monkeypatch.setattr(batches, 'LENGTH_MULTIPLE', tokens.shape[1])
        inputs = [row[row > 0].tolist() for row in tokens]
        outputs, mask = load(**options_of(case)).encode(inputs)
        expected = arrays[f'{case}/encoded'][:, : outputs.shape[1]]
        assert_close(outputs, expected * mask[..., None], 1e-5)


def load(**options):
    config = own_model.load(golden_config(**options).model)
    params = checkpoint.parameters(checkpoint.restore(GOLDEN / 'checkpoint_0'))
    return infer.T5(config, params, partition.make_mesh(data=1))


@pytest.mark.slow
def test_scores_and_answers(arrays, monkeypatch):
    monkeypatch.setattr(
        batches, 'LENGTH_MULTIPLE', 8
    )  # the places of a row go by its padded length
    check_scores_and_answers(load(), arrays, 'eval', batch_of(arrays, 'eval'))


@pytest.mark.slow
@pytest.mark.parametrize(
    'mesh, axis', first_in_ci([((1, 2, 2), 'fsdp'), ((1, 1, 1), 'model'), ((1, 2, 2), 'model')], 2)
)
def test_steps(arrays, mesh, axis):
    """Four steps of training on T5X's batches, from its state to its state."""
    batches = [batch_of(arrays, f'train_batch{i}') for i in range(len(arrays['train_losses']))]
    config = golden_config(len(batches[0]['encoder_input_tokens']), split_experts=axis)
    config.mesh.update(dict(zip(partition.MESH_AXES, mesh, strict=True)))
    spec = make_spec(config)
    step = train.jit_step(spec)  # traced again for batches of another shape
    state = restore(spec, checkpoint.read_index(GOLDEN / 'checkpoint_0'))
    for batch, expected_loss in zip(batches, arrays['train_losses'], strict=True):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics['loss'], expected_loss, rtol=1e-6)
    expected = checkpoint.restore(GOLDEN / 'checkpoint_4')
    found = state_names.to_t5x(*jax.device_get(state))
    assert sorted(found) == sorted(expected)
    assert_close(found, expected, 1e-5)


# A mesh, the axis of the experts, microbatches, remat, scan.
WAYS = [
    ((2, 2, 2), 'fsdp', 2, 'full', True),
    ((1, 1, 8), 'model', 1, 'full', False),
    ((1, 4, 2), 'fsdp', 1, 'none', False),
    ((2, 2, 2), 'model', 1, 'dots', True),
    ((1, 4, 2), 'model', 2, 'none', True),
    ((1, 1, 8), 'fsdp', 2, 'none', True),
    ((1, 1, 1), 'model', 4, 'dots', True),
]


def take_steps(mesh, axis='model', num_microbatches=1, remat='none', scan_layers=False, count=2):
    """Return the metrics of some steps, and the last state."""
    data, fsdp, model_axis = mesh
    sizes = {'num_encoder_layers': 4, 'num_decoder_layers': 2}
    ways = {'remat': remat, 'scan_layers': scan_layers}
    config = run_config(data, model_axis, fsdp, module='switch', **sizes, **ways)
    config.model.options.update(split_experts=axis, expert_dropout_rate=0.3)
    spec = make_spec(config, num_microbatches)
    state = train.compile_init(spec)()
    metrics = []
    for seed in range(count):
        state, found = train.jit_step(spec)(state, random_batch(seed))
        metrics.append(jax.device_get(found))
    return metrics, state_names.to_t5x(*jax.device_get(state))


@pytest.fixture(scope='module')
def on_one_device():
    with jax.default_matmul_precision('highest'):
        return take_steps((1, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize('mesh, axis, num_microbatches, remat, scan_layers', first_in_ci(WAYS))
def test_the_same_in_all_ways(on_one_device, mesh, axis, num_microbatches, remat, scan_layers):
    """Losses, what the experts report, and the state. Dropout is on, and tokens are dropped."""
    expected, expected_state = on_one_device
    assert expected[0]['aux/experts/fraction_tokens_left_behind'] > 0.1
    found, state = take_steps(mesh, axis, num_microbatches, remat, scan_layers)
    for metrics, expected_metrics in zip(found, expected, strict=True):
        for name, value in expected_metrics.items():
            if name == 'aux/experts/router_confidence' and num_microbatches > 1:
                continue  # it counts the tokens of a microbatch
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert_close(state, expected_state, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('axis', ['fsdp', 'model'])
def test_inference_on_many_devices(axis):
    """Experts stay on the devices of their axis."""
    t5s = []
    for mesh in [(1, 1, 1), (2, 2, 2)]:
        data, fsdp, model_axis = mesh
        config = own_model.load(golden_config(split_experts=axis).model)
        params = checkpoint.parameters(checkpoint.restore(GOLDEN / 'checkpoint_0'))
        t5s.append(infer.T5(config, params, make_mesh(data, model_axis, fsdp)))
    one, many = t5s
    many.arrays = many.arrays  # a training run gives it parameters
    kernel = many.arrays['decoder/layers_1/mlp/expert/wi/kernel']
    assert kernel.sharding.shard_shape(kernel.shape)[0] == len(kernel) // 2
    batch = random_batch(0, vocab_size=SETTINGS['vocab_size'])
    assert_close(many.logits(batch), one.logits(batch), 1e-5)
    inputs = [row[row > 0].tolist() for row in batch['encoder_input_tokens']]
    targets = [row[row > 0].tolist() for row in batch['decoder_target_tokens']]
    assert_close(np.array(many.score(inputs, targets)), np.array(one.score(inputs, targets)), 1e-5)
    for options in ({}, {'beam_size': 2}):
        answers = many.generate(inputs, max_length=8, return_scores=True, **options)
        expected = one.generate(inputs, max_length=8, return_scores=True, **options)
        assert answers.tokens == expected.tokens
        assert_close(np.array(answers.scores), np.array(expected.scores), 1e-5)


@pytest.mark.slow
def test_hugging_faces_folder(arrays, tmp_path):
    """transformers has `expert_capacity` places for a row and expert, and routes padding as it is."""
    t5 = infer.load(GOLDEN / 'hf')
    for name in ('vocab_size', 'num_encoder_layers', 'logits_via_embedding'):
        assert getattr(t5.config, name) == SETTINGS[name]
    options = t5.config.options
    assert (options.num_experts, options.sparse_step, options.min_expert_capacity) == (8, 2, 64)
    assert not options.zero_padding and options.eval_expert_capacity_factor == 0
    expected = checkpoint.parameters(checkpoint.restore(GOLDEN / 'checkpoint_0'))
    assert sorted(t5.arrays) == sorted(expected)
    for path, array in expected.items():
        np.testing.assert_array_equal(t5.arrays[path], array)
    batch = batch_of(arrays, 'no_drops_padded')
    mask = (batch['decoder_target_tokens'] > 0)[..., None]
    logits = np.array(t5.logits(batch))
    assert_close(logits * mask, arrays['no_drops_padded/logits'] * mask, 1e-5)
    # And back again.
    write_hugging_face.write(tmp_path / 'hf', t5.config, t5.arrays)
    written = check_same_folder(tmp_path / 'hf', GOLDEN / 'hf')
    assert {'num_experts', 'expert_capacity', 'encoder_sparse_step'} <= written.keys()


@pytest.mark.parametrize('changes, name', [
    ({'decoder_sparse_step': 1}, 'decoder_sparse_step'),
    ({'num_layers': 1, 'num_decoder_layers': 1}, 'encoder_sparse_step'),
    ({'num_layers': 128}, 'encoder/layers_100/'),
    ({'num_experts': 9}, 'layers_1'),
    ({'num_experts': 'many'}, 'num_experts'),
])  # fmt: skip
def test_a_config_of_hugging_face_that_is_refused(tmp_path, changes, name):
    settings = json.loads((GOLDEN / 'hf/config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps(settings | changes))
    weights = (GOLDEN / 'hf/model.safetensors').read_bytes()
    (tmp_path / 'model.safetensors').write_bytes(weights)
    with pytest.raises(Refused) as error:
        infer.load(tmp_path)
    assert name in str(error.value)


def test_models_that_hugging_face_does_not_have(tmp_path):
    config = golden_config()
    config.model.mlp_activations = ('gelu', 'linear')
    config = own_model.load(config.model)
    with pytest.raises(Refused):
        write_hugging_face.write(tmp_path / 'hf', config, random_params(config))


def test_adapters_of_all_kernels():
    """Routers and experts have none; a merged model computes the same."""
    config = golden_config()
    config.model.update(lora_rank=2, lora_targets='.+/kernel')
    config = own_model.load(config.model)
    params = random_params(config)
    scopes = {path.rpartition('/')[0] for path in model.adapter_paths(config)}
    assert 'encoder/layers_0/mlp/wo' in scopes
    assert not [x for x in scopes if 'router' in x or 'expert' in x]
    batch = random_batch(0, vocab_size=SETTINGS['vocab_size'])
    merged = lora.without_adapters(config), lora.merge(config, params)
    expected = infer.T5(config, params, make_mesh(1, 1)).logits(batch)
    assert_close(infer.T5(*merged, make_mesh(1, 1)).logits(batch), expected, 1e-5)


def test_a_model_without_a_layer_with_experts():
    with pytest.raises(Refused):
        own_model.load(golden_config(sparse_step=5).model)


def test_a_checkpoint_of_t5x_without_a_config(caplog):
    t5 = infer.load(GOLDEN / 'checkpoint_0')
    assert t5.config.module == 'switch'
    assert t5.config.options == switch.Options(num_experts=SETTINGS['num_experts'], sparse_step=2)
    config = own_model.load(golden_config().model)
    assert infer.load(GOLDEN / 'checkpoint_0', config=config).config == config


@pytest.mark.slow
def test_the_bytes_of_the_experts():
    """Over 'fsdp', tokens travel to the experts and back, twice; no expert is gathered. Over 'model' nothing is new."""
    tokens = 8 * 32 + 8 * 12  # rows times lengths
    for axis, mesh in (('fsdp', (1, 2, 1)), ('model', (1, 1, 2))):
        options = {'train_expert_capacity_factor': 2.0, 'min_expert_capacity': 1}
        config = golden_config(8, split_experts=axis, **options)
        config.model.update(num_encoder_layers=2)
        config.mesh.update(dict(zip(partition.MESH_AXES, mesh, strict=True)))
        config.data.lengths.update(inputs=32, targets=12)
        spec = make_spec(config)
        found = collectives.collectives_of(train.compile_step(spec).as_text(), spec.mesh)
        exchanged = [x for x in found if x.kind == 'all-to-all']
        if axis == 'model':
            assert not exchanged
            continue
        num_bytes = sum(x.times * x.num_bytes for x in exchanged if x.num_bytes > 2_000)
        of_a_device = tokens // 2 * 2  # its tokens, times the capacity factor
        assert num_bytes == 4 * of_a_device * config.model.emb_dim * 4


@pytest.mark.slow
def test_the_routers_confidence_is_that_of_all_tokens():
    """Each row reports the same number, on every mesh."""
    settings = run_config(1, 1, module='switch', emb_dim=16, mlp_dim=32).model
    settings.options.sparse_step = 1
    config = own_model.load(settings)
    params = random_params(config)

    def confidence(params, batch):
        *_, aux = model.apply(model.logits, params, config, batch)
        return aux['experts/router_confidence']

    found = []
    for mesh in (make_mesh(1, 1), make_mesh(2, 1, 2)):
        found.append(np.asarray(sharded(confidence, config, mesh)(params, random_batch(0))))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    assert found[0].std() == 0 and 0 < found[0][0] < 1


@pytest.mark.slow
def test_gates_share_a_sum_of_gradients():
    """The gradient of the tokens is summed over 'model' once for an MLP, however many gates its experts have."""
    counts = []
    for activations in (('relu',), ('gelu', 'linear')):
        config = run_config(1, 2, 2, module='switch', mlp_activations=activations)
        config.model.options.update(split_experts='fsdp', sparse_step=1)
        counts.append(train.lower_step(make_spec(config)).as_text().count('stablehlo.all_reduce'))
    assert counts[1] - counts[0] == 2  # the gradients of the second gate's kernels, of two MLPs


@pytest.mark.slow
def test_a_copy_in_a_folder_is_an_own_model(tmp_path):
    """Its checkpoint keeps the file, and opens with it."""
    file = tmp_path / 'my_switch.py'
    file.write_bytes(pathlib.Path(switch.__file__).read_bytes())
    config = run_config(1, 1, module=str(file), num_encoder_layers=2, num_decoder_layers=2)
    config.model.options.num_experts = 4
    spec = make_spec(config)
    state, metrics = train.jit_step(spec)(train.compile_init(spec)(), random_batch(0))
    assert metrics['aux/experts/auxiliary_loss'] > 0
    files = own_model.files_of(spec.model_config) | {
        'config.json': json.dumps(config.to_dict()).encode()
    }
    checkpoint.save(tmp_path / 'run', 1, state_names.to_t5x(*state), files=files)
    t5 = infer.load(tmp_path / 'run/checkpoint_1')
    assert t5.config.module == str(file) and t5.config.options.num_experts == 4
