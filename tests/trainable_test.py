"""optimizer.trainable: the parameters that it matches are trained, all others stay bit-equal."""

import re

import jax
import numpy as np
import pytest
from forms import first_in_ci
from runs import ROOT, assert_same_run, run, small_config, state_of
from small_models import assert_close, random_batch, random_params, run_config

import checkpoint
import model
import state_names
import train
from messages import Refused
from prepare import make_spec, prepare, restore, wanted
from run.start import choose_initial

T5X = ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6'  # with Adafactor's slots of all parameters
FROZEN_ENCODER = '(?!encoder/).+'
SIZES = dict(vocab_size=64, emb_dim=16, num_heads=4, head_dim=4, mlp_dim=16)

gradients = jax.jit(train.gradients, static_argnums=0)


def step_config(trainable, mesh_data=1, mesh_model=1, **settings):
    config = run_config(mesh_data, mesh_model, **SIZES)
    config.optimizer.update(trainable=trainable, **settings)
    return config


def parameters_of(tree):
    return {path: np.asarray(x) for path, x in checkpoint.parameters(tree).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    'settings',
    first_in_ci([{'name': 'adamw', 'global_norm_clip_threshold': 1.0}, {'name': 'muon'}, {}]),
)
def test_only_what_matches_changes(settings):
    """Weight decay does not touch the others either, and the optimizer has no state of them."""
    spec = make_spec(step_config(FROZEN_ENCODER, **settings))
    state = train.compile_init(spec)()
    before = jax.tree.map(np.asarray, state.params)
    for i in range(2):
        state, metrics = train.jit_step(spec)(state, random_batch(i, SIZES['vocab_size']))
    assert metrics['finite']
    for path, x in state.params.items():
        is_equal = np.array_equal(np.asarray(x), before[path])
        assert is_equal == path.startswith('encoder/'), path
    for path in state_names.to_t5x(*state):
        assert not path.startswith('state/param_states/encoder'), path


@pytest.mark.slow
def test_the_gradients_are_those_of_a_run_that_trains_all():
    """On a mesh, too, where frozen parameters are not marked as each device's own."""
    params = random_params(model.T5Config(**step_config('').model))
    found = {}
    for name, trainable, mesh in [('all', '', (1, 1)), ('some', FROZEN_ENCODER, (2, 2))]:
        spec = make_spec(step_config(trainable, *mesh))
        batch = random_batch(0, SIZES['vocab_size'])
        grads, sums = gradients(spec, params, batch, np.arange(8), jax.random.key(1))
        found[name] = grads, sums
    expected, expected_sums = found['all']
    grads, sums = found['some']
    assert grads.keys() == {path for path in expected if not path.startswith('encoder/')}
    assert_close(grads, {path: expected[path] for path in grads}, 1e-5)
    assert_close(sums, expected_sums, 1e-5)


def num_flops(trainable):
    config = step_config(trainable)
    config.model.num_encoder_layers = 3
    spec = make_spec(config)
    lowered = train.jit_step(spec).lower(spec.state_shapes, random_batch(0, SIZES['vocab_size']))
    return lowered.cost_analysis()['flops']


@pytest.mark.slow
def test_what_is_frozen_costs_no_backward_pass():
    """Of the three matmuls per kernel the encoder keeps two, or one if its embedding is frozen too."""
    num_of_all = num_flops('')
    num_of_decoder = num_flops('decoder/.+')
    saved = num_of_all - num_of_decoder
    assert num_of_decoder < 0.75 * num_of_all
    assert 0.3 * saved < num_of_all - num_flops(FROZEN_ENCODER) < 0.7 * saved


@pytest.fixture(scope='module')
def frozen_encoder(corpus, make_once):
    """A finished run of 6 steps that trains the decoder's layers alone."""

    def make(folder):
        run(decoder_config(corpus), folder)

    return make_once('frozen_encoder', make)


def decoder_config(corpus, steps=6):
    config = small_config(corpus, steps)
    config.model.dropout_rate = 0.0  # it compiles faster
    config.optimizer.trainable = 'decoder/layers_.+'
    return config


@pytest.mark.slow
def test_a_checkpoint_has_all_parameters_and_the_state_of_the_trained_ones(frozen_encoder):
    first, last = state_of(frozen_encoder, 3), state_of(frozen_encoder, 6)
    changed = {path for path in first if not np.array_equal(first[path], last[path])}
    trained = {path for path in first if path.startswith('target/decoder/layers_')}
    assert trained <= changed
    for path in changed - trained:
        assert path == 'state/step' or path.startswith('state/param_states/decoder/layers_'), path
    assert (
        parameters_of(first).keys() == model.shapes(model.T5Config(**small_config('').model)).keys()
    )


@pytest.mark.slow
def test_model_info_marks_and_counts(frozen_encoder, capsys):
    sizes = {path: x.size for path, x in parameters_of(state_of(frozen_encoder, 6)).items()}
    num_trained = sum(size for path, size in sizes.items() if path.startswith('decoder/layers_'))
    text = (frozen_encoder / 'model-info.txt').read_text()
    assert f'Total number of parameters: {sum(sizes.values())}\n' in text
    assert f'Number of trained parameters: {num_trained}\n' in text
    for path in sizes:
        [line] = re.findall(rf'^Variable {re.escape(path)} .*$', text, re.M)
        assert line.endswith(' frozen') == (not path.startswith('decoder/layers_'))


@pytest.mark.slow
def test_train_all_is_train_some_restore_and_go_on(corpus, frozen_encoder, tmp_path):
    run(decoder_config(corpus, steps=3), tmp_path)
    run(decoder_config(corpus, steps=6), tmp_path)
    assert_same_run(tmp_path, frozen_encoder, 6)
    changed = decoder_config(corpus, steps=9)
    changed.optimizer.trainable = ''
    with pytest.raises(Refused, match='optimizer/trainable: '):
        prepare(changed, tmp_path)


@pytest.mark.slow
def test_of_a_checkpoint_of_T5X_the_matching_slots_are_taken(corpus):
    config = small_config(corpus, steps=8)
    config.model.update(vocab_size=384, emb_dim=32, num_heads=4, head_dim=8, mlp_dim=64)
    config.model.update(num_encoder_layers=2, num_decoder_layers=2)
    config.data.vocabulary = 'bytes'
    config.restore.path = str(T5X)
    config.optimizer.trainable = FROZEN_ENCODER
    spec = make_spec(config)
    begin = choose_initial(wanted(spec), config.restore, config.data)
    state = restore(spec, begin.leaves, config.restore.dtype)
    found = jax.device_get(state_names.to_t5x(*state))
    expected = checkpoint.restore(T5X)
    frozen = {path for path in expected if path.startswith('state/param_states/encoder/')}
    assert found.keys() == expected.keys() - frozen and found['state/step'] == 6
    for path, x in found.items():
        np.testing.assert_array_equal(x, expected[path], err_msg=path)
    assert begin.description == (
        f'From step 6 of {T5X}, with the optimizer state; not used: {len(frozen)} arrays of the '
        'optimizer state of frozen parameters'
    )
