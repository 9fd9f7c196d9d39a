"""A small model of each family trains, stops, resumes and answers as T5 does, on any mesh."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from forms import first_in_ci
from runs import assert_same_run, run, small_config, state_of, stop_after
from small_models import (
    FAMILIES,
    assert_close,
    check_answers,
    check_merged,
    make_mesh,
    random_batch,
    random_params,
    run_config,
    with_adapters,
)

import checkpoint
import infer
import state_names
import train
from formats import own_model
from prepare import make_spec

pytestmark = pytest.mark.usefixtures('highest_precision')


@pytest.fixture(scope='module', params=FAMILIES)
def family(request):
    return request.param


def packed_batch(seed):
    """Rows of two examples each, the first of one to three ids."""
    batch = random_batch(seed)
    cuts = np.random.default_rng(seed).integers(1, 4, (8, 1))
    for side, name in (('encoder', 'encoder_input_tokens'), ('decoder', 'decoder_target_tokens')):
        place = np.arange(batch[name].shape[1])
        is_second = place >= cuts
        is_token = batch[name] > 0
        batch[f'{side}_segment_ids'] = np.where(is_token, 1 + is_second, 0).astype(np.int32)
        position = np.where(is_second, place - cuts, place)
        batch[f'{side}_positions'] = np.where(is_token, position, 0).astype(np.int32)
    batch['decoder_input_tokens'] *= batch['decoder_positions'] > 0
    return batch


# On a mesh.


def config_on(mesh, family, **settings):
    data, fsdp, model_axis = mesh
    config = run_config(data, model_axis, fsdp, num_encoder_layers=2, module=family, **settings)
    config.model.options.update(FAMILIES[family])
    return config


@pytest.mark.slow
def test_logits_on_a_mesh(family):
    batch = packed_batch(0)
    config = own_model.load(config_on((1, 1, 1), family).model)
    params = random_params(config)
    expected = infer.T5(config, params, make_mesh(1, 1)).logits(batch)
    assert_close(infer.T5(config, params, make_mesh(1, 2, 2)).logits(batch), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('scan_layers, remat', first_in_ci([(True, 'full'), (False, 'none')]))
def test_training_on_a_mesh(family, scan_layers, remat):
    """Three steps, packed, with dropout."""

    def trained(mesh, **settings):
        spec = make_spec(config_on(mesh, family, **settings))
        state = train.compile_init(spec)()
        losses = []
        for i in range(3):
            state, metrics = train.jit_step(spec)(state, packed_batch(i))
            losses.append(float(metrics['loss']))
        return losses, jax.tree.map(np.asarray, state_names.to_t5x(*state))

    losses, state = trained((1, 1, 1))
    assert losses[0] != losses[2]
    found_losses, found = trained((1, 2, 2), scan_layers=scan_layers, remat=remat)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    assert_close(found, state, 1e-5)


# A run.


def family_config(corpus, family, **settings):
    config = small_config(corpus)
    config.model.module = family
    config.model.options.update(FAMILIES[family])
    config.update_from_flattened_dict(settings)
    return config


@pytest.fixture(scope='module')
def finished(corpus, make_once, family):
    """The workdir of a finished run. Tests only read it."""
    return make_once(f'run of {family}', lambda folder: run(family_config(corpus, family), folder))


@pytest.mark.slow
def test_a_run_stopped_and_resumed(corpus, family, finished, tmp_path):
    stop_after(2, family_config(corpus, family), tmp_path)
    run(family_config(corpus, family), tmp_path)
    assert_same_run(tmp_path, finished, 6)


# Prints {path: [dtype, shape, sum]} of what T5X restores from the folder sys.argv[2].
T5X = """
import importlib.util, json, sys, types


class Absent(types.ModuleType):  # AirIO is on no package index
    def __getattr__(self, name):
        return type(name, (), {})


sys.path.insert(0, sys.argv[1])
if importlib.util.find_spec('airio') is None:
    sys.modules |= {'airio': Absent('airio'), 'airio.core': Absent('airio.core')}
    sys.modules['airio'].core = sys.modules['airio.core']
import jax
import numpy as np
from jax.experimental import pjit

pjit.PartitionSpec = jax.sharding.PartitionSpec
from flax import traverse_util
from t5x import checkpoints

found = {}
for path, x in traverse_util.flatten_dict(checkpoints.load_t5x_checkpoint(sys.argv[2])).items():
    total = float(np.asarray(x, np.float64).sum())
    found['/'.join(path)] = [str(np.asarray(x).dtype), list(np.shape(x)), total]
print(json.dumps(found))
"""


@pytest.mark.skipif(
    'T5X_CHECKOUT' not in os.environ, reason='T5X_CHECKOUT names no checkout of T5X'
)
def test_t5x_opens_a_checkpoint(family, finished):
    python = os.environ.get('T5X_PYTHON', sys.executable)
    command = [python, '-c', T5X, os.environ['T5X_CHECKOUT'], str(finished / 'checkpoint_6')]
    found = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    expected = state_of(finished, 6)
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        dtype, shape, total = found[path]
        assert (dtype, tuple(shape)) == (str(x.dtype), x.shape), path
        assert total == np.asarray(x, np.float64).sum(), path


@pytest.mark.slow
def test_answers(family, finished):
    """With a cache, each token is the most likely one of the logits without."""
    t5 = infer.load(finished)
    assert t5.config.module == family
    options = dataclasses.asdict(t5.config.options)
    assert {name: options[name] for name in FAMILIES[family]} == FAMILIES[family]
    check_answers(t5, is_long=False)


@pytest.mark.slow
def test_encodings_are_those_of_each_input_alone(finished):
    t5 = infer.load(finished, part='encoder')
    texts = ['aa oo', 'e', 'lost in a long line of letters']
    outputs, mask = t5.encode(texts)
    assert mask.sum(axis=1).min() < mask.shape[1]
    for text, found, is_token in zip(texts, outputs, mask, strict=True):
        [expected], _ = t5.encode([text])
        assert_close(found[is_token], expected, 1e-5)


@pytest.mark.slow
def test_adapters_of_attention(corpus, family, finished, tmp_path):
    """They are trained and saved alone, and the merged model is the unmerged one."""
    lora = {'lora_rank': 2, 'lora_targets': '.+/attention/(query|key|value|out)/kernel'}
    settings = {f'model.{name}': value for name, value in lora.items()}
    settings |= {'optimizer.name': 'adamw', 'restore.path': str(finished)}
    run(family_config(corpus, family, **settings), tmp_path)
    adapters = checkpoint.parameters(state_of(tmp_path, 6))
    assert all(re.search('/lora_[ab]$', path) for path in adapters)
    base = infer.load(finished)
    merged = infer.load(tmp_path)
    config = with_adapters(base.config, **lora)
    unmerged = infer.T5(config, base.arrays | adapters, base.mesh)
    check_merged(merged, unmerged, base, 1e-5)


@pytest.mark.slow
def test_an_encoder_alone(family):
    settings = config_on((1, 1, 1), family).model.to_dict()
    config = own_model.load(settings | {'num_decoder_layers': 0})
    t5 = infer.T5(config, random_params(config), make_mesh(1, 1))
    outputs, _ = t5.encode([[5, 6, 7, 1], [8, 1]])
    assert outputs.shape[::2] == (2, 128) and np.isfinite(outputs).all()
