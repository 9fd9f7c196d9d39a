"""LongT5's numbers, from flaxformer under T5X: golden/long_t5_*/README.md says what each array proves."""

import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
from small_models import assert_close, golden_batch

import checkpoint
import infer
import partition
import state_names
import train
from configs import base
from formats import own_model, write_hugging_face
from prepare import make_spec, restore

pytestmark = pytest.mark.usefixtures('highest_precision')
GOLDEN = pathlib.Path(__file__).parent.parent / 'golden'
KINDS = {'local': 'local', 'tglobal': 'transient_global'}
FEATURES = ('encoder_', 'decoder_')


@pytest.fixture(scope='module', params=['long_t5_local', 'long_t5_tglobal'])
def golden(request):
    return GOLDEN / request.param


def golden_config(golden, num_rows=1, **changes):
    """Our config for the run that golden/config.json describes."""
    settings = json.loads((golden / 'config.json').read_text())
    config = base.get_config()
    config.model.update(module='long_t5', dropout_rate=0.0)
    for name in set(settings) & set(config.model):
        config.model[name] = tuple(settings[name]) if name == 'mlp_activations' else settings[name]
    options = {name: settings[name] for name in ('local_radius', 'tokens_per_block')}
    options['encoder_attention'] = KINDS[settings['encoder_attention']]
    config.model.options.update(options | changes)
    config.loss.z_loss = settings['z_loss']
    config.loss.label_smoothing = settings['label_smoothing']
    assert settings['loss_normalizing_factor'] is None
    assert settings['learning_rate'] == 'constant(0.05) * rsqrt_decay, warmup_steps=10'
    config.learning_rate.update(
        factors='constant * rsqrt_decay', base_learning_rate=0.05, warmup_steps=10
    )
    config.train.batch_size = num_rows
    config.mesh.update(data=1, fsdp=1, model=1)
    return config


def load(golden, **options):
    config = own_model.load(golden_config(golden, **options).model)
    params = checkpoint.parameters(checkpoint.restore(golden / 'checkpoint_0'))
    return infer.T5(config, params, partition.make_mesh(data=1))


def batch_of(arrays, case):
    batch = golden_batch(arrays, case)
    return {name: x for name, x in batch.items() if name.startswith(FEATURES)}


def check_cases(golden, cases):
    """Compare encodings and logits of the cases, which have a radius and a block size of their own."""
    arrays = np.load(golden / 'golden.npz')
    report = json.loads((golden / 'report.json').read_text())['cases']
    for case in cases:
        sizes = {name: report[case][name] for name in ('local_radius', 'tokens_per_block')}
        t5 = load(golden, **sizes)
        batch = batch_of(arrays, case)
        assert_close(logits_of(t5, batch), answered(arrays[f'{case}/logits'], batch), 1e-5)
        inputs = [row[row > 0].tolist() for row in arrays[f'{case}/encoder_input_tokens']]
        outputs, mask = t5.encode(inputs)
        expected = arrays[f'{case}/encoded'][:, : outputs.shape[1]]
        assert_close(outputs, expected * mask[..., None], 1e-5)


def answered(logits_bTV, batch):
    """The logits of real targets, zero elsewhere."""
    return logits_bTV * (batch['decoder_target_tokens'] > 0)[..., None]


def logits_of(t5, batch):
    return answered(np.array(t5.logits(batch)), batch)


def test_rows_of_many_lengths(golden):
    """From one token to three blocks and a half."""
    check_cases(golden, ['odd_padded'])


@pytest.mark.slow
def test_all_cases(golden):
    cases = json.loads((golden / 'report.json').read_text())['cases']
    assert len(cases) > 5
    check_cases(golden, cases)


def test_packed_rows(golden):
    arrays = np.load(golden / 'golden.npz')
    batch = batch_of(arrays, 'packed')
    expected = answered(arrays['packed/logits'], batch)
    assert_close(logits_of(load(golden), batch), expected, 1e-5)


def test_scores_and_answers(golden):
    arrays = np.load(golden / 'golden.npz')
    t5 = load(golden)
    batch = batch_of(arrays, 'batch')
    assert_close(logits_of(t5, batch), answered(arrays['batch/logits'], batch), 1e-5)
    inputs = [row[row > 0].tolist() for row in batch['encoder_input_tokens']]
    targets = [row[row > 0].tolist() for row in batch['decoder_target_tokens']]
    assert_close(np.array(t5.score(inputs, targets)), arrays['batch/score'], 1e-5)
    length = batch['decoder_target_tokens'].shape[1]
    for name, options in (('greedy', {}), ('beam2', {'beam_size': 2, 'num_return': 2})):
        found = t5.generate(inputs, length, return_scores=True, **options)
        decodes = arrays[f'batch/{name}_decodes']
        if name == 'beam2':  # the best last; of greedy answers the file has no scores
            decodes = decodes[:, ::-1]
            scores = arrays[f'batch/{name}_scores'][:, ::-1]
            assert_close(np.array(found.scores), scores, 1e-5)
        expected = [[row[row > 1].tolist() for row in np.atleast_2d(x)] for x in decodes]
        of_each = found.tokens if name == 'beam2' else [[x] for x in found.tokens]
        assert of_each == expected


def run_steps(golden, **settings):
    """Return the losses and the state of the golden run's steps."""
    arrays = np.load(golden / 'golden.npz')
    state = None
    losses = []
    for i in range(len(arrays['train_losses'])):
        batch = batch_of(arrays, f'train_batch{i}')
        config = golden_config(golden, num_rows=len(batch['encoder_input_tokens']))
        config.update_from_flattened_dict(settings)
        spec = make_spec(config)
        if state is None:
            state = restore(spec, checkpoint.read_index(golden / 'checkpoint_0'))
        state, metrics = train.jit_step(spec)(state, batch)
        losses.append(float(metrics['loss']))
    np.testing.assert_allclose(losses, arrays['train_losses'], rtol=1e-6)
    return state_names.to_t5x(*jax.device_get(state))


@pytest.mark.parametrize(
    'golden',
    ['long_t5_tglobal', pytest.param('long_t5_local', marks=pytest.mark.slow)],
    indirect=True,
)
def test_steps(golden):
    expected = checkpoint.restore(golden / 'checkpoint_4')
    found = run_steps(golden)
    assert sorted(found) == sorted(expected)
    assert_close(found, expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('settings', [{'model.remat': 'full'}, {'model.scan_layers': True}])
def test_steps_with_less_memory(golden, settings):
    assert_close(run_steps(golden, **settings), run_steps(golden), 1e-5)


def test_hugging_faces_folder(golden, tmp_path):
    t5 = infer.load(golden / 'hf')
    settings = golden_config(golden).model
    for name in ('module', 'vocab_size', 'logits_via_embedding'):
        assert getattr(t5.config, name) == settings[name]
    assert vars(t5.config.options) == settings.options.to_dict()
    expected = checkpoint.parameters(checkpoint.restore(golden / 'checkpoint_0'))
    assert sorted(t5.arrays) == sorted(expected)
    for path, array in expected.items():
        np.testing.assert_array_equal(t5.arrays[path], array)
    # And back again.
    write_hugging_face.write(tmp_path / 'hf', t5.config, t5.arrays)
    theirs = safetensors.numpy.load_file(golden / 'hf/model.safetensors')
    ours = safetensors.numpy.load_file(tmp_path / 'hf/model.safetensors')
    assert sorted(ours) == sorted(theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)
    stored = json.loads((golden / 'hf/config.json').read_text())
    written = json.loads((tmp_path / 'hf/config.json').read_text())
    assert {name: written[name] for name in stored.keys() & written.keys()} == {
        name: stored[name] for name in stored.keys() & written.keys()
    }
    assert {'encoder_attention_type', 'local_radius', 'global_block_size'} <= written.keys()


def test_a_checkpoint_of_t5x_without_a_config(golden, tmp_path):
    """Global tokens have arrays of their own. Without them, the name of a folder is all that tells."""
    if 'local' in golden.name:
        with pytest.raises(ValueError, match='read as a T5.*model.module=long_t5'):
            infer.load(golden / 'checkpoint_0')
    else:
        t5 = infer.load(golden / 'checkpoint_0')
        assert (
            t5.config.options
            == own_model.load(
                golden_config(golden, local_radius=127, tokens_per_block=16).model
            ).options
        )
    config = own_model.load(golden_config(golden).model)
    assert infer.load(golden / 'checkpoint_0', config=config).config == config
