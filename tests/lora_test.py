"""LoRA: adapters are trained and saved alone, and a model with merged adapters is the trained one."""

import json
import re
import shutil

import chex
import jax
import numpy as np
import pytest
from questions import write_task
from runs import ROOT, assert_same_run, metrics_of, run, small_config, state_of
from small_models import (
    assert_close,
    assert_refused,
    check_merged,
    random_batch,
    random_params,
    run_config,
    t5_config,
)

import checkpoint
import families.lora
import infer
import model
import train
from formats import own_model
from modes import convert
from modes import evaluate as evaluate_mode
from prepare import make_spec, prepare, restore, wanted
from run.start import choose_initial

T5X = ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6'
ALL_KERNELS = '.+/kernel'
SIZES = dict(vocab_size=64, emb_dim=16, num_heads=4, head_dim=4, mlp_dim=16)
MOST_TARGETS = r'.+/(query|value|out|wi_0|wo)/kernel'

gradients = jax.jit(train.gradients, static_argnums=0)


def step_config(mesh_data=1, mesh_model=1, rank=2, targets=ALL_KERNELS):
    config = run_config(mesh_data, mesh_model, **SIZES)
    # Random adapters are then small beside their kernels.
    config.model.update(lora_rank=rank, lora_alpha=0.2, lora_targets=targets)
    config.optimizer.multiply_by_parameter_scale = False
    return config


# The model.


def test_the_kernels_that_match_have_adapters():
    sizes = SIZES | {'num_encoder_layers': 2, 'num_decoder_layers': 1}
    base = t5_config(**sizes)
    config = t5_config(**sizes, lora_rank=3)
    found = model.shapes(config)
    adapters = found.keys() - model.shapes(base).keys()
    kernels = {path.rsplit('/', 1)[0] for path in adapters}
    assert {kernel.rsplit('/', 1)[1] for kernel in kernels} == {'query', 'value'}
    # In every attention: one in a layer of the encoder, two in one of the decoder.
    assert len(kernels) == 2 * (base.num_encoder_layers + 2 * base.num_decoder_layers)
    for kernel in kernels:
        rows, columns = found[f'{kernel}/kernel']
        assert found[f'{kernel}/lora_a'] == (rows, 3)
        assert found[f'{kernel}/lora_b'] == (3, columns)
    assert model.shapes(families.lora.without_adapters(config)) == model.shapes(base)
    config = t5_config(**sizes, lora_rank=3, lora_targets=ALL_KERNELS)
    every = model.param_specs(config)  # raises an error for a path without a row
    assert sum(path.endswith('/lora_a') for path in every) == sum(
        path.endswith('/kernel') for path in every
    )


@pytest.mark.slow
def test_the_initial_model_is_the_base():
    spec = make_spec(step_config())
    params = train.compile_init(spec)().params
    config = spec.model_config
    for path, x in params.items():
        if path.endswith('/lora_a'):
            assert np.std(x) > 0
        if path.endswith('/lora_b'):
            assert not np.any(x)
    merged = families.lora.merge(config, params)
    base = {path: params[path] for path in model.shapes(families.lora.without_adapters(config))}
    chex.assert_trees_all_equal(merged, base)


def gradients_of(config):
    """Gradients of parameters of which none is zero."""
    config.model.dropout_rate = 0.0  # it compiles faster
    spec = make_spec(config)
    params = random_params(spec.model_config)
    batch = random_batch(0, SIZES['vocab_size'])
    return gradients(spec, params, batch, np.arange(8), jax.random.key(1))


@pytest.mark.slow
def test_same_gradients_on_a_mesh():
    found = gradients_of(step_config(2, 4))
    expected = gradients_of(step_config(1, 1))
    assert_close(found, expected, 1e-5)
    grads, _ = found
    assert all(re.fullmatch(families.lora.ADAPTER, path) for path in grads)
    assert all(np.any(x) for x in grads.values())


# Settings that do not fit.


def test_adapters_that_cannot_be():
    for name, value in [
        ('lora_targets', '('),
        ('lora_targets', 'query'),
        ('lora_targets', '.+_norm/scale'),
        ('lora_rank', -1),
        ('lora_alpha', 0.0),
    ]:
        config = step_config()
        config.model[name] = value
        assert_refused(lambda config=config: make_spec(config), f'model.{name}={value!r}')
    config = step_config(targets='encoder/layers_1/.+/kernel')
    config.model.update(num_encoder_layers=2, scan_layers=True)
    assert_refused(lambda: make_spec(config), 'model.scan_layers=True')
    config.model.lora_targets = 'encoder/.+/kernel'
    make_spec(config)


@pytest.mark.slow
def test_same_gradients_in_a_scan():
    config = step_config(2, 2)
    config.mesh.fsdp = 2
    config.model.num_encoder_layers = 3
    expected = gradients_of(config)
    config.model.update(scan_layers=True, remat='full')
    assert_close(gradients_of(config), expected, 1e-5)


def test_a_base_that_cannot_be(corpus, uninterrupted):
    for name, settings in [
        ('restore.path', {'path': ''}),
        ('restore.frozen_dtype', {'dtype': 'bfloat16'}),
        ('restore.only', {'only': 'target/(?!decoder/decoder_norm).+'}),
        ('restore.only', {'only': 'target/encoder/.+', 'strict': False}),
    ]:
        config = lora_config(corpus, uninterrupted)
        config.restore.update(settings)
        spec = make_spec(config)
        assert_refused(lambda c=config, s=spec: choose_initial(wanted(s), c.restore, c.data), name)


# Runs.


def lora_config(corpus, base, steps=6):
    config = small_config(corpus, steps, data_axis=2, model_axis=2)
    config.model.update(lora_rank=2, lora_targets=MOST_TARGETS, dropout_rate=0.0)
    config.optimizer.name = 'adamw'
    config.restore.path = str(base)
    return config


@pytest.fixture(scope='module')
def lora(corpus, uninterrupted, make_once):
    """A finished run of 6 steps on the newest checkpoint of `uninterrupted`."""
    return make_once('lora', lambda folder: run(lora_config(corpus, uninterrupted), folder))


@pytest.fixture(scope='module')
def merged(lora):
    return infer.load(lora)


@pytest.mark.slow
def test_a_checkpoint_has_adapters_alone(lora, uninterrupted):
    found = state_of(lora, 6)
    assert found['state/step'] == 6  # it starts at 0
    for path in found.keys() - {'state/step'}:
        if not path.startswith('state/optimizer/'):
            assert re.search('/lora_[ab]', path), path
    settings = json.loads((lora / 'checkpoint_6/config.json').read_text())
    assert settings['base']['directory'] == str(uninterrupted / 'checkpoint_6')
    losses = [line['loss'] for line in metrics_of(lora) if line['run'] == 'train']
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_train_all_is_train_some_restore_and_go_on(corpus, uninterrupted, lora, tmp_path):
    run(lora_config(corpus, uninterrupted, steps=3), tmp_path)
    run(lora_config(corpus, uninterrupted, steps=6), tmp_path)
    assert_same_run(tmp_path, lora, 6)


@pytest.mark.slow
def test_merged_is_unmerged(merged, lora, uninterrupted):
    """The model with its adapters beside the kernels computes the same."""
    base = infer.load(uninterrupted)
    settings = json.loads((lora / 'checkpoint_6/config.json').read_text())['model']
    params = base.arrays | checkpoint.parameters(state_of(lora, 6))
    unmerged = infer.T5(own_model.load(settings), params, base.mesh)
    check_merged(merged, unmerged, base, 1e-6)
    assert merged.vocabulary.model == base.vocabulary.model
    encoder = {path: x for path, x in merged.arrays.items() if not path.startswith('decoder/')}
    chex.assert_trees_all_equal(infer.load(lora, part='encoder').arrays, encoder)


@pytest.mark.parametrize('form', ['t5x', 'hf'])
@pytest.mark.slow
def test_converted_is_merged(merged, lora, tmp_path, form):
    convert.convert_checkpoint(lora, tmp_path / 'converted', form)
    found = infer.load(tmp_path / 'converted')
    chex.assert_trees_all_equal(found.arrays, merged.arrays)
    assert model.shapes(found.config) == model.shapes(merged.config)


@pytest.mark.slow
def test_converted_for_peft_is_merged(merged, lora, uninterrupted, caplog, tmp_path):
    """The folder of adapters names their base, in any format that opens."""
    convert.convert_checkpoint(lora, tmp_path / 'peft', 'peft')
    assert f'--mode=convert --from={uninterrupted}/checkpoint_6 ' in caplog.text
    found = infer.load(tmp_path / 'peft')
    chex.assert_trees_all_equal(found.arrays, merged.arrays)
    assert found.vocabulary.model == merged.vocabulary.model
    convert.convert_checkpoint(tmp_path / 'peft', tmp_path / 'hf', 'hf')
    chex.assert_trees_all_equal(infer.load(tmp_path / 'hf').arrays, merged.arrays)


@pytest.mark.slow
def test_a_run_may_start_from_adapters(merged, lora, corpus):
    """From the merged parameters, without optimizer state, at step 0."""
    config = small_config(corpus)
    config.restore.path = str(lora)
    spec = make_spec(config)
    begin = choose_initial(wanted(spec), config.restore, config.data)
    state = restore(spec, begin.leaves, config.restore.dtype)
    chex.assert_trees_all_equal(state.params, dict(merged.arrays))
    assert begin.description == f'From step 0 of {lora}/checkpoint_6, without any optimizer state'
    assert not begin.base


@pytest.mark.slow
def test_adapters_are_no_base(corpus, lora):
    config = lora_config(corpus, lora)
    assert_refused(
        lambda: choose_initial(wanted(make_spec(config)), config.restore, config.data), str(lora)
    )


@pytest.fixture
def moved(lora, uninterrupted, tmp_path):
    """A copy of the run whose base has moved away from `base`."""
    shutil.copytree(uninterrupted, tmp_path / 'moved')
    shutil.copytree(lora, tmp_path / 'lora')
    shutil.rmtree(tmp_path / 'lora/checkpoint_3')
    for file in (tmp_path / 'lora/config.json', tmp_path / 'lora/checkpoint_6/config.json'):
        text = file.read_text().replace(str(uninterrupted), str(tmp_path / 'base'))
        file.write_text(text)
    [manifest] = tmp_path.glob('lora/checkpoint_6/manifest.json')
    checksums = json.loads(manifest.read_text())['files'] | {
        'config.json': checkpoint.checksum(file)
    }
    manifest.write_bytes(checkpoint.pack_manifest(6, checksums))
    return tmp_path


@pytest.mark.slow
def test_a_base_that_has_moved(merged, corpus, moved):
    assert_refused(lambda: infer.load(moved / 'lora'), f'{moved}/base/checkpoint_6')
    (moved / 'base').symlink_to(moved / 'moved')
    chex.assert_trees_all_equal(infer.load(moved / 'lora').arrays, merged.arrays)
    (moved / 'base').unlink()
    config = lora_config(corpus, moved / 'moved', steps=6)  # a run that resumes takes another path
    prepare(config, moved / 'lora').workdir.lock.close()
    settings = json.loads((moved / 'lora/config.json').read_text())
    assert settings['base']['directory'] == f'{moved}/moved/checkpoint_6'


@pytest.mark.slow
def test_another_base_is_refused(corpus, moved):
    config = lora_config(corpus, moved / 'moved/checkpoint_3')
    assert_refused(lambda: prepare(config, moved / 'lora'), 'moved/checkpoint_3')
    (moved / 'base').mkdir()
    (moved / 'base/checkpoint_6').symlink_to(T5X)
    assert_refused(lambda: infer.load(moved / 'lora'), 'restore.path')


@pytest.mark.slow
def test_a_run_does_not_take_up_or_drop_adapters(corpus, uninterrupted, lora):
    assert_refused(lambda: prepare(small_config(corpus), lora), 'lora_rank')
    config = lora_config(corpus, uninterrupted)
    assert_refused(lambda: prepare(config, uninterrupted), 'lora_rank')


# The programs.


def task_config(folder, **model_settings):
    config = small_config('')
    config.data.files = ''
    config.data.module = f'{folder}/mine.py'
    config.data.task = 'qa'
    config.data.vocabulary = 'bytes'
    config.model.update(model_settings)
    return config


@pytest.mark.slow
def test_evaluated_in_training_is_evaluated_afterwards(tmp_path):
    """The run merges its adapters for each evaluation, --mode=evaluate when it opens them."""
    write_task(tmp_path)
    run(task_config(tmp_path), tmp_path / 'base')
    config = task_config(tmp_path, lora_rank=2, lora_targets=ALL_KERNELS)
    config.optimizer.name = 'adamw'
    config.learning_rate.base_learning_rate = 0.1
    config.restore.path = str(tmp_path / 'base')
    config.infer_eval.every_steps = 3
    config.decode.max_length = 7
    run(config, tmp_path / 'run')
    evaluate_mode.CheckpointEvaluation(
        config, str(tmp_path / 'run'), str(tmp_path / 'again'), 'all'
    ).run()
    for name in ('inference_eval/qa-000003.jsonl', 'inference_eval/qa-000006.jsonl', 'results.csv'):
        found = (tmp_path / 'again' / name).read_bytes()
        assert found == (tmp_path / 'run' / name).read_bytes(), name
