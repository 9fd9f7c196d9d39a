"""Own models: the example trains, decodes, saves and loads; models do not mix; what is refused."""

import dataclasses
import json
import re
import runpy
import shutil

import jax
import numpy as np
import pytest
import questions
from runs import ROOT, metrics_of, run, small_config, state_of
from small_models import assert_close, random_batch, random_params, t5_config

import checkpoint
import convert
import evaluate_mode
import infer
import model
import own_model
import partition
import settings
import train
from configs import base

EXAMPLE = ROOT / 'examples/squared_relu/squared_relu.py'
# An Mlp with parameters of its own, and rotary positions (Su et al. 2021) in place of T5's biases.
ROTARY = """
import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import partition


def rotate(x_bThK, positions_T):
    half = x_bThK.shape[-1] // 2
    frequencies_k = 100.0 ** -(jnp.arange(half) / half)
    angles_1T1k = positions_T[None, :, None, None] * frequencies_k[None, None, None]
    left, right = jnp.split(x_bThK, 2, axis=-1)
    cos, sin = jnp.cos(angles_1T1k), jnp.sin(angles_1T1k)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def change(model):
    class Attention(model.Attention):
        def __call__(self, x_bTD, memory_bMD, mask_b1TM, relpos_1hTM, rows_b):
            if x_bTD is not memory_bMD:  # cross attention
                return super().__call__(x_bTD, memory_bMD, mask_b1TM, relpos_1hTM, rows_b)
            positions_T = jnp.arange(x_bTD.shape[1])
            q_bThK = rotate(self.queries(x_bTD), positions_T)
            keys_bThK, values_bThK = self.keys_values(x_bTD)
            keys_values = model.KeysValues(rotate(keys_bThK, positions_T), values_bThK)
            return self.attend(q_bThK, keys_values, mask_b1TM, None, rows_b)

        @hk.name_like('__call__')
        def step(self, x_r1D, cache, position, mask_g1TS, relpos_1h1S):
            q_r1hK = rotate(self.queries(x_r1D), position[None])
            keys_r1hK, values_r1hK = self.keys_values(x_r1D)
            new = model.KeysValues(rotate(keys_r1hK, position[None]), values_r1hK)
            cache = model.write_cache(cache, new, position)
            return self.attend_cache(q_r1hK, cache, mask_g1TS), cache

    class Mlp(model.Mlp):
        def __call__(self, x_bTD, rows_b=None):
            width = partition.split(self.config.mlp_dim, 'model')
            up_Df = hk.get_parameter('up', (x_bTD.shape[-1], width), init=model.NORMAL)
            down_fD = hk.get_parameter('down', (width, x_bTD.shape[-1]), init=model.NORMAL)
            hidden_bTf = jax.nn.softplus(jnp.einsum('bTD,Df->bTf', x_bTD, up_Df))
            return lax.psum(jnp.einsum('bTf,fD->bTD', hidden_bTf, down_fD), 'model')

    model.Attention = Attention
    model.Mlp = Mlp
    model.PARAMETER_SPECS[r'.+/mlp/up'] = P(None, 'model')
    model.PARAMETER_SPECS[r'.+/mlp/down'] = P('model', None)
"""
SIZES = {
    'vocab_size': 384,
    'emb_dim': 16,
    'num_heads': 2,
    'num_encoder_layers': 1,
    'num_decoder_layers': 1,
    'head_dim': 8,
    'mlp_dim': 16,
    'mlp_activations': ('relu',),
}


def own_config(file, **settings):
    """The T5Config of an own model."""
    return own_model.make_config(
        base.get_config().model.to_dict() | SIZES | {'module': str(file)} | settings
    )


def make_mesh(data, model_axis):
    return partition.make_mesh(data, model_axis, jax.devices()[: data * model_axis])


def example_config(corpus, mesh=(1, 1), steps=2, file=EXAMPLE):
    """Two steps of a run with the example's model, every one saved."""
    config = small_config(corpus, steps, *mesh)
    config.model.module = str(file)
    config.model.mlp_activations = ('squared_relu',)
    config.model.dropout_rate = 0.0  # a step compiles twice as fast
    config.save.every_steps = 1
    return config


@pytest.fixture(scope='module')
def trained(corpus, make_once):
    """The workdir of such a run, and beside it the file of its model. Tests only read it."""

    def train_it(folder):
        (folder / 'files').mkdir()
        file = shutil.copy(EXAMPLE, folder / 'files/own.py')
        run(example_config(corpus, file=file), folder / 'run')

    return make_once('own_model', train_it)


# The numbers of an own model.


@pytest.mark.parametrize('first', ['own', pytest.param('plain', marks=pytest.mark.slow)])
def test_own_and_plain_models_do_not_mix(first):
    """relu(x)^2 is the gated Mlp ('relu', 'relu') of model.py with the same kernel twice."""
    plain_config = t5_config(**SIZES)
    params = random_params(plain_config)
    gated_params = {}
    for path, x in params.items():
        if path.endswith('mlp/wi/kernel'):
            gated_params[path.replace('wi', 'wi_0')] = x
            gated_params[path.replace('wi', 'wi_1')] = x
        else:
            gated_params[path] = x

    def of_name(name):
        if name == 'own':
            config = own_config(EXAMPLE, mlp_activations=('squared_relu',))
            return infer.T5(config, params, make_mesh(1, 2))
        gated = dataclasses.replace(plain_config, mlp_activations=('relu', 'relu'))
        return infer.T5(gated, gated_params, make_mesh(1, 2))

    batch = random_batch(seed=0)
    last = 'plain' if first == 'own' else 'own'
    of_first = of_name(first)
    of_last = of_name(last)
    expected = of_last.logits(batch)  # compiled before the one that was made first
    assert_close(of_first.logits(batch), expected, 1e-6)
    with pytest.raises(ValueError, match='squared_relu'):
        t5_config(**SIZES | {'mlp_activations': ('squared_relu',)})


@pytest.mark.slow
def test_own_attention_and_parameters(tmp_path):
    """The answers are those of the uncached logits, on a mesh, whose logits are those of one device."""
    file = tmp_path / 'rotary.py'
    file.write_text(ROTARY)
    config = own_config(file)
    shapes = own_model.of(config).shapes(config)
    assert shapes['decoder/layers_0/mlp/up'] == (16, 16)
    assert 'decoder/layers_0/mlp/wi/kernel' not in shapes
    rng = np.random.default_rng(0)
    params = {}
    for path, shape in shapes.items():
        params[path] = rng.normal(0, 0.5, shape).astype(np.float32)
    t5 = infer.T5(config, params, make_mesh(2, 2))
    batch = check_answers(t5)
    assert_close(infer.T5(config, params, make_mesh(1, 1)).logits(batch), t5.logits(batch), 1e-5)


def check_answers(t5):
    """Assert that each token of a cached greedy answer is the most likely one of the logits.

    Return the batch of the answers.
    """
    batch = random_batch(seed=0)
    inputs = [[int(i) for i in row if i > 0] for row in batch['encoder_input_tokens']]
    tokens_bnT, scores_bn = t5.generate_tokens(inputs, max_length=16)
    answers_bT = tokens_bnT[:, 0, :16]
    batch['decoder_target_tokens'] = answers_bT
    batch['decoder_input_tokens'] = np.pad(answers_bT[:, :-1], ((0, 0), (1, 0)))
    logits_bTV = np.asarray(t5.logits(batch))
    is_token_bT = answers_bT > 0
    assert is_token_bT.sum() > 20 and len(np.unique(answers_bT)) > 3
    np.testing.assert_array_equal(logits_bTV.argmax(axis=-1)[is_token_bT], answers_bT[is_token_bT])
    log_probs_bTV = jax.nn.log_softmax(logits_bTV)
    log_probs_bT = np.take_along_axis(log_probs_bTV, answers_bT[:, :, None], axis=2)[:, :, 0]
    assert_close(scores_bn[:, 0], (log_probs_bT * is_token_bT).sum(axis=1), 1e-5)
    return batch


def test_the_config_of_the_example():
    config = runpy.run_path(str(EXAMPLE.with_name('tiny_squared_relu.py')))['get_config']()
    settings.check(config)
    found = own_model.make_config(config.model)
    assert found.module == str(EXAMPLE)
    assert found.mlp_activations == ('squared_relu',)


def test_a_changed_file_is_another_model(tmp_path):
    file = tmp_path / 'own.py'
    file.write_text('def change(model):\n    model.NUM_BUCKETS = 16\n')
    old = own_config(file)
    file.write_text('def change(model):\n    model.NUM_BUCKETS = 24\n')
    new = own_config(file)
    assert old != new and old.module == new.module
    bias = 'encoder/relpos_bias/rel_embedding'
    assert own_model.of(old).shapes(old)[bias] == (2, 16)
    assert own_model.of(new).shapes(new)[bias] == (2, 24)
    assert model.shapes(t5_config(**SIZES))[bias] == (2, 32)


# Adapters that are merged by a rule of the user's own.

ADAPTERS = """
import jax.numpy as jnp


def change(model):
    def adapted_kernel(config, kernel, lora_a, lora_b):
        return kernel * (1 + config.lora_alpha * jnp.tanh(lora_a @ lora_b))

    model.adapted_kernel = adapted_kernel
"""


def with_adapters(config):
    """The parameters of a model whose adapters all count."""
    rng = np.random.default_rng(0)
    params = {}
    for path, shape in own_model.of(config).shapes(config).items():
        params[path] = rng.normal(0, 0.5, shape).astype(np.float32)
    return params


def test_merged_is_unmerged(tmp_path):
    file = tmp_path / 'own.py'
    file.write_text(ADAPTERS)
    config = own_config(file, lora_rank=2, lora_alpha=1.0, lora_targets='.+/kernel')
    params = with_adapters(config)
    batch = random_batch(seed=0)
    expected = np.asarray(infer.T5(config, params, make_mesh(1, 1)).logits(batch))
    base = own_model.of(config).without_adapters(config)
    merged = infer.T5(base, train.merged_parameters(config, params), make_mesh(1, 1))
    assert_close(merged.logits(batch), expected, 1e-5)
    plain = {path: params[path] for path in own_model.of(base).shapes(base)}
    difference = np.abs(infer.T5(base, plain, make_mesh(1, 1)).logits(batch) - expected).max()
    assert difference > 1e-2 * np.abs(expected).max()


@pytest.mark.slow
def test_adapters_of_a_run_are_merged_everywhere(tmp_path):
    """By infer.load, for the task metrics in training and afterwards, and by a conversion."""
    questions.write_task(tmp_path)
    file = tmp_path / 'own.py'
    file.write_text(ADAPTERS)
    config = questions.make_config(tmp_path)
    config.infer_eval.task = 'rank'
    config.infer_eval.every_steps = 0
    config.model.dropout_rate = 0.0
    run(config, tmp_path / 'base')
    config.infer_eval.every_steps = 6
    config.restore.path = str(tmp_path / 'base')
    config.model.update(module=str(file), lora_rank=2, lora_alpha=1.0, lora_targets='.+/kernel')
    config.optimizer.name = 'adamw'
    config.learning_rate.base_learning_rate = 0.1
    run(config, tmp_path / 'run')
    base = infer.load(tmp_path / 'base')
    params = base.arrays | checkpoint.parameters(state_of(tmp_path / 'run', 6))
    unmerged = infer.T5(own_model.make_config(config.model), params, base.mesh, base.vocabulary)
    batch = random_batch(seed=0)
    expected = unmerged.logits(batch)
    assert np.abs(base.logits(batch) - expected).max() > 1e-2 * np.abs(expected).max()
    assert_close(infer.load(tmp_path / 'run').logits(batch), expected, 1e-5)
    convert.convert_checkpoint(tmp_path / 'run', tmp_path / 'converted', 't5x')
    assert_close(infer.load(tmp_path / 'converted').logits(batch), expected, 1e-5)
    evaluate_mode.CheckpointEvaluation(config, str(tmp_path / 'run'), str(tmp_path / 'again')).run()
    for folder in ('run', 'again'):
        lines = (tmp_path / folder / 'inference_eval/rank-000006.jsonl').read_text().splitlines()
        examples = [json.loads(line) for line in lines]
        scores = []
        for example in examples:
            inputs = [example['input']['inputs']]
            [[score]] = unmerged.score_choices(inputs, [[example['input']['targets']]])
            scores.append(score)
        assert len(scores) > 5
        np.testing.assert_allclose([x['score'] for x in examples], scores, rtol=1e-5)


# The run of the example.


@pytest.mark.slow
def test_the_example_trains_on_every_mesh(corpus, trained, tmp_path):
    run(example_config(corpus, mesh=(2, 2)), tmp_path)
    losses = []
    for workdir in (trained / 'run', tmp_path):
        lines = [line for line in metrics_of(workdir) if line['run'] == 'train']
        losses.append([line['loss'] for line in lines])
    assert len(losses[0]) == 2
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.slow
def test_the_example_is_loaded_and_decodes(trained):
    t5 = infer.load(trained / 'run', mesh=make_mesh(2, 2))
    assert t5.config.module == str(trained / 'files/own.py')
    check_answers(t5)


@pytest.mark.parametrize('num_taken', [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_goes_on(corpus, trained, tmp_path, num_taken):
    """Also where its file has another name; the steps are those of a run that was not stopped."""
    workdir = shutil.copytree(trained / 'run', tmp_path / 'run')
    moved = shutil.copy(trained / 'files/own.py', tmp_path / 'moved.py')
    if num_taken == 1:
        shutil.rmtree(workdir / 'checkpoint_2')
    run(example_config(corpus, file=moved), workdir)
    expected = state_of(trained / 'run', 2)
    found = state_of(workdir, 2)
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x)
    assert json.loads((workdir / 'config.json').read_bytes())['model']['module'] == str(moved)


def refusal_of_prepare(config, workdir):
    with pytest.raises(ValueError) as error:
        train.prepare(config, workdir)
    return str(error.value)


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_model_alone(corpus, trained, uninterrupted, tmp_path):
    recorded = trained / 'run/checkpoint_2/own_model.py'
    remedy = f'set it to a copy of {recorded}, or name another --workdir'
    config = example_config(corpus)
    config.model.module = ''
    config.model.mlp_activations = ('gelu', 'linear')
    assert refusal_of_prepare(config, trained / 'run') == (
        f"model.module='' is not the own model of {trained}/run/checkpoint_2: {remedy}"
    )
    changed = tmp_path / 'changed.py'
    changed.write_text(EXAMPLE.read_text().replace('jnp.square', '3 * jnp.square'))
    message = refusal_of_prepare(example_config(corpus, file=changed), trained / 'run')
    assert message == (
        f'model.module={str(changed)!r} is not the own model of {trained}/run/checkpoint_2: {remedy}'
    )
    config = small_config(corpus)
    config.model.module = str(EXAMPLE)
    assert refusal_of_prepare(config, uninterrupted) == (
        f'model.module={str(EXAMPLE)!r}, and {uninterrupted}/checkpoint_6 was saved without it: '
        'leave it out, or name another --workdir'
    )


@pytest.mark.slow
def test_another_run_starts_from_its_parameters(corpus, trained, tmp_path):
    config = example_config(corpus)
    config.restore.update(path=str(trained / 'run'), only='target/.*')
    config.model.update(module='', mlp_activations=('relu',))
    assert refusal_of_prepare(config, tmp_path / 'run').endswith(
        'own_model.py, or restore its parameters with restore.strict=False'
    )
    trainer = train.make_trainer(config)
    config.restore.strict = False
    assert 'target/encoder/layers_0/mlp/wi/kernel' in train.choose_initial(config, trainer).leaves
    config.restore.strict = True
    config.model.update(module=str(EXAMPLE), mlp_activations=('squared_relu',))
    start = train.choose_initial(config, train.make_trainer(config))
    assert start.step == 0


# Finding the file of a checkpoint.


@pytest.mark.slow
def test_a_file_that_is_gone_or_changed(trained, tmp_path, monkeypatch):
    folder = shutil.copytree(trained, tmp_path / 'copy')
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config_file = folder / 'run/checkpoint_2/config.json'
    file = folder / 'files/own.py'
    text = config_file.read_text().replace(str(trained / 'files'), str(folder / 'files'))
    rewrite(config_file, text.encode())
    assert infer.load(folder / 'run').config.module == str(file)
    message = (
        f'{config_file}: model.module={str(file)!r} is gone, was changed, or is in the folder of the '
        f'run, from which no code is run: look at {config_file.parent}/own_model.py, and copy it to '
        f'{elsewhere}/own.py'
    )
    file.write_text(file.read_text() + '\n')
    with pytest.raises(ValueError, match=re.escape(message)):
        infer.load(folder / 'run')
    file.unlink()
    with pytest.raises(ValueError, match=re.escape(message)):
        infer.load(folder / 'run')
    shutil.copy(config_file.parent / 'own_model.py', elsewhere / 'own.py')
    assert infer.load(folder / 'run').config.module == str(elsewhere / 'own.py')


@pytest.mark.slow
def test_no_code_of_a_checkpoint_is_run(trained, tmp_path, monkeypatch):
    """A folder from the network may name a file that it brings."""
    folder = shutil.copytree(trained / 'run', tmp_path / 'run')
    evil = b"raise SystemExit('run')\n"
    directory = folder / 'checkpoint_2'
    (folder / 'evil.py').write_bytes(evil)
    monkeypatch.chdir(folder)
    config = json.loads((directory / 'config.json').read_bytes())
    for name in (str(folder / 'evil.py'), 'evil.py', f'{directory}/own_model.py', 'no/../evil.py'):
        config['model']['module'] = name
        rewrite(directory / 'config.json', json.dumps(config).encode())
        rewrite(directory / 'own_model.py', evil)
        with pytest.raises(ValueError, match='from which no code is run'):
            infer.load(folder)


def rewrite(file, content):
    """Write a file of a checkpoint, and its checksum into the manifest."""
    file.write_bytes(content)
    manifest = checkpoint._read_manifest(file.parent)
    checksums = manifest.checksums | {file.name: checkpoint._checksum(file)}
    packed = checkpoint._pack_manifest(manifest.step, checksums)
    (file.parent / checkpoint.MANIFEST).write_bytes(packed)


@pytest.mark.slow
def test_conversions(trained, tmp_path):
    with pytest.raises(ValueError, match=r'own.py.: transformers has no such model'):
        convert.convert_checkpoint(trained / 'run', tmp_path / 'hf', 'hf')
    assert not (tmp_path / 'hf').exists()
    written = convert.convert_checkpoint(trained / 'run', tmp_path / 't5x', 't5x')
    assert infer.load(written).config == infer.load(trained / 'run').config


@pytest.mark.slow
def test_a_config_without_the_own_model(trained):
    config = t5_config(**SIZES | {'mlp_dim': 32})
    with pytest.raises(ValueError, match="model.module='' is not the own model of .*own_model.py"):
        infer.load(trained / 'run', config=config)


# What is refused.

BAD_FILES = {
    'syntax': ('def change(:\n', '{file}, line 1: invalid syntax'),
    'null bytes': ('\0', '{file}, line 1: source code string cannot contain null bytes'),
    'import': (
        'import not_there\n',
        "{file}, line 1: ModuleNotFoundError: No module named 'not_there'",
    ),
    'exit': ('import sys\nsys.exit(3)\n', '{file}, line 2: SystemExit: 3'),
    'empty': ('', '{file} has no function change(model): write one, as examples/'),
    'other name': ('def main(model):\n    pass\n', '{file} has no function change(model)'),
    'no function': ('change = 3\n', '{file} has no function change(model)'),
    'error': (
        'def change(model):\n    model.ACTIVATION["x"] = abs\n',
        "{file}, line 2: AttributeError: module 'model_of_own' has no attribute 'ACTIVATION'",
    ),
    'arguments': (
        'def change():\n    pass\n',
        '{file}, line 1: TypeError: change() takes 0 positional arguments',
    ),
    'import of the model': (
        'import model as m\ndef change(model):\n    m.NUM_BUCKETS = 16\n',
        '{file} imports m of model.py, which stays as it is: take it from the argument of change(model)',
    ),
    'import from the model': (
        'from model import Mlp\ndef change(model):\n    model.Mlp = Mlp\n',
        '{file} imports Mlp of model.py',
    ),
    'unknown name': (
        'def change(model):\n    model.MLP = model.Mlp\n',
        '{file} sets model.MLP, which nothing in model.py uses: correct the name, or keep it out',
    ),
    'T5Config': (
        'def change(model):\n    class T5Config(model.T5Config):\n        x: int = 1\n'
        '    model.T5Config = T5Config\n',
        '{file} sets model.T5Config, whose fields are the settings of configs/base.py: keep constants',
    ),
}


@pytest.mark.parametrize('text, message', BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_no_own_model(tmp_path, text, message):
    file = tmp_path / 'own.py'
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message.format(file=file))) as error:
        own_config(file)
    assert '\n' not in str(error.value)


def test_a_file_that_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match="^model.module='mine': .*mine.py is no file: name a Python"
    ):
        own_config('mine')
    (tmp_path / 'model.py').write_text(EXAMPLE.read_text())  # the name of one of ours
    config = own_config('model', mlp_activations=('squared_relu',))
    assert config.module == str(tmp_path / 'model.py')


def test_a_parameter_without_a_row(tmp_path, corpus):
    file = tmp_path / 'own.py'
    file.write_text(ROTARY.replace("/mlp/down']", "/mlp/dawn']"))
    config = example_config(corpus, file=file)
    config.model.mlp_activations = ('relu',)
    assert refusal_of_prepare(config, tmp_path / 'run').startswith(
        f"{file}: parameter 'decoder/layers_0/mlp/down' matches 0 rows of the table of specs"
    )
    assert not (tmp_path / 'run/config.json').exists()


def test_functions_of_another_model():
    """A caller that forgets own_model.of gets no other numbers, but an error."""
    config = own_config(EXAMPLE)
    with pytest.raises(AssertionError):
        model.shapes(config)
    with pytest.raises(
        ValueError, match='make the config of an own model with own_model.make_config'
    ):
        t5_config(**SIZES | {'module': str(EXAMPLE)})
