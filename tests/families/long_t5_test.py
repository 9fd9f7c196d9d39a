"""LongT5's numbers, from flaxformer under T5X: golden/long_t5_*/README.md says what each array proves."""

import json
import pathlib

import jax
import numpy as np
import pytest
from forms import first_in_ci
from small_models import (
    assert_close,
    check_same_folder,
    check_scores_and_answers,
    golden_batch,
    golden_run_config,
)

import checkpoint
import infer
import partition
import state_names
import train
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
    assert settings['loss_normalizing_factor'] is None
    config = golden_run_config(settings, num_rows, module='long_t5', dropout_rate=0.0)
    options = {name: settings[name] for name in ('local_radius', 'tokens_per_block')}
    options['encoder_attention'] = KINDS[settings['encoder_attention']]
    config.model.options.update(options | changes)
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


@pytest.mark.slow
def test_scores_and_answers(golden):
    arrays = np.load(golden / 'golden.npz')
    t5 = load(golden)
    batch = batch_of(arrays, 'batch')
    assert_close(logits_of(t5, batch), answered(arrays['batch/logits'], batch), 1e-5)
    check_scores_and_answers(t5, arrays, 'batch', batch)


def run_steps(golden, **settings):
    """Take the golden run's steps, compare the losses, and return the state."""
    arrays = np.load(golden / 'golden.npz')
    batches = [batch_of(arrays, f'train_batch{i}') for i in range(len(arrays['train_losses']))]
    config = golden_config(golden, num_rows=len(batches[0]['encoder_input_tokens']))
    config.update_from_flattened_dict(settings)
    spec = make_spec(config)
    step = train.jit_step(spec)  # traced again for batches of another shape
    state = restore(spec, checkpoint.read_index(golden / 'checkpoint_0'))
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics['loss']))
    np.testing.assert_allclose(losses, arrays['train_losses'], rtol=1e-6)
    return state_names.to_t5x(*jax.device_get(state))


@pytest.mark.slow
@pytest.mark.parametrize(
    'golden',
    ['long_t5_tglobal', pytest.param('long_t5_local', marks=pytest.mark.long)],
    indirect=True,
)
def test_steps(golden):
    expected = checkpoint.restore(golden / 'checkpoint_4')
    found = run_steps(golden)
    assert sorted(found) == sorted(expected)
    assert_close(found, expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    'settings', first_in_ci([{'model.scan_layers': True}, {'model.remat': 'full'}])
)
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
    written = check_same_folder(tmp_path / 'hf', golden / 'hf')
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
