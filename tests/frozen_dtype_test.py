"""restore.frozen_dtype: what is not trained is bfloat16, and the run computes as with the same values in float32."""

import re

import chex
import haiku as hk
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from forms import first_quick
from questions import write_task
from runs import ROOT, assert_close_runs, assert_same_run, run, small_config, state_of
from small_models import FAMILIES, assert_close, random_batch, random_params, run_config

import checkpoint
import infer
import model
import train
from modes import convert
from prepare import make_spec, restore, wanted
from run import memory
from run.start import choose_initial

T5X = ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6'
SIZES = dict(vocab_size=64, emb_dim=16, num_heads=4, head_dim=4, mlp_dim=16, dropout_rate=0.0)
LORA = {'lora_rank': 2, 'lora_alpha': 0.2, 'lora_targets': r'.+/(query|out|wi_0|wo)/kernel'}
SAVING = {'num_encoder_layers': 2, 'remat': 'full', 'scan_layers': True}
# The mesh (data, fsdp, model), microbatches, optimizer.trainable, settings of the model.
CASES = {
    'LoRA': ((1, 2, 1), 2, '', LORA),
    'LoRA, scanned': ((2, 2, 2), 1, '', LORA | SAVING),
    'tied logits': ((1, 1, 1), 1, 'decoder/layers_.+', {'logits_via_embedding': True}),
    'a prompt': ((2, 2, 1), 1, '', {'module': 'prompt_tuning', 'options': {'length': 3}}),
    'some layers': ((1, 2, 1), 1, 'encoder/layers_1/.+|.+_norm/scale', SAVING),
    **{name: ((1, 2, 1), 1, 'decoder/layers_.+', {'module': name, 'options': options})
       for name, options in FAMILIES.items()},
}  # fmt: skip

gradients = jax.jit(train.gradients, static_argnums=0)


def rounded(x):
    return np.asarray(x).astype(ml_dtypes.bfloat16)


def step_config(mesh, trainable, model_settings):
    config = run_config(mesh[0], mesh[2], mesh[1], **SIZES)
    options = dict(model_settings).pop('options', {})
    config.model.update({name: x for name, x in model_settings.items() if name != 'options'})
    config.model.options.update(options)
    config.optimizer.trainable = trainable
    if config.model.module:
        config.data.pack = 'no'
    return config


@pytest.mark.parametrize('name', first_quick(CASES))
def test_the_gradients_are_those_of_the_rounded_base(name):
    mesh, num_microbatches, trainable, model_settings = CASES[name]
    config = step_config(mesh, trainable, model_settings)
    spec = make_spec(config, num_microbatches)
    config.restore.frozen_dtype = 'bfloat16'
    narrow_spec = make_spec(config, num_microbatches)
    params = random_params(spec.model_config)
    narrow = {}
    wide = {}
    for path, x in params.items():
        narrow[path] = x.astype(narrow_spec.state_shapes.params[path].dtype)
        wide[path] = x if path in spec.trained else rounded(x).astype(np.float32)
    args = random_batch(0, SIZES['vocab_size']), np.arange(8), jax.random.key(1)
    expected = gradients(spec, wide, *args)
    found = gradients(narrow_spec, narrow, *args)
    assert found[0].keys() == set(spec.trained)
    assert_close(found, expected, 1e-6)
    moved = gradients(spec, params, *args)
    assert abs(moved[1]['loss'] - expected[1]['loss']) > 1e-5 * expected[1]['loss']


def test_a_module_gets_the_dtype_that_it_asks_for():
    def own_module():
        with hk.name_scope('norm'):
            return 1 + hk.get_parameter('scale', [2], jnp.float32)

    scale = rounded([0.001, 3.3])
    np.testing.assert_array_equal(
        model.apply(own_module, {'norm/scale': jnp.asarray(scale)}), 1 + scale.astype(np.float32)
    )


def test_a_state_is_smaller_and_its_gathers_move_bfloat16():
    config = step_config((1, 2, 1), '', LORA)
    wide = make_spec(config).state_shapes
    config.restore.frozen_dtype = 'bfloat16'
    spec = make_spec(config)
    frozen = wide.params.keys() - set(spec.trained)
    saved = 2 * sum(wide.params[path].size for path in frozen)
    assert memory.num_state_bytes(wide) - memory.num_state_bytes(spec.state_shapes) == saved
    program = train.lower_step(spec).as_text()
    gathers = re.findall(r'"stablehlo.all_gather"[^\n]*-> tensor<[\dx]*x(\w+)>', program)
    assert gathers and set(gathers) == {'bf16'}


@pytest.mark.parametrize('only', ['target/.*', 'target/decoder/.*'])
def test_it_is_rounded_when_it_is_read(corpus, only, monkeypatch):
    """From a checkpoint or from initial values; the rest stays float32, and so does the optimizer's state."""
    config = small_config(corpus, steps=8)
    config.model.update(vocab_size=384, emb_dim=32, num_heads=4, head_dim=8, mlp_dim=64)
    config.model.update(num_encoder_layers=2, num_decoder_layers=2)
    config.data.vocabulary = 'bytes'
    config.restore.update(path=str(T5X), only=only, strict=False)
    config.optimizer.trainable = 'decoder/.+'
    config.restore.frozen_dtype = 'bfloat16'
    spec = make_spec(config)
    begin = choose_initial(wanted(spec), config.restore, config.data)
    read = {}

    def recorded(*args):
        arrays = restore_arrays(*args)
        read.update(arrays)
        return arrays

    restore_arrays = checkpoint.restore
    monkeypatch.setattr(checkpoint, 'restore', recorded)
    state = restore(spec, begin.leaves)
    for path, x in checkpoint.parameters(read).items():
        assert x.dtype == state.params[path].dtype, path  # a base may not fit in float32
    expected = {**train.compile_init(spec)().params}
    for path, x in checkpoint.parameters(checkpoint.restore(T5X)).items():
        if re.fullmatch(only, f'target/{path}'):
            expected[path] = x if path in spec.trained else rounded(x)
    for path, x in state.params.items():
        assert x.dtype == (jnp.float32 if path in spec.trained else jnp.bfloat16), path
        np.testing.assert_array_equal(x, expected[path], err_msg=path)
    assert {x.dtype for x in jax.tree.leaves(state.opt_state)} == {np.dtype('float32')}


# Runs.


@pytest.mark.slow
def test_a_run_continues_to_the_bit_and_saves_bfloat16(corpus, tmp_path):
    def config(steps):
        config = small_config(corpus, steps)
        config.model.dropout_rate = 0.0
        config.optimizer.trainable = 'decoder/layers_.+'
        config.restore.frozen_dtype = 'bfloat16'
        return config

    run(config(6), tmp_path / 'all')
    run(config(3), tmp_path / 'some')
    run(config(6), tmp_path / 'some')
    assert_same_run(tmp_path / 'some', tmp_path / 'all', 6)
    found = state_of(tmp_path / 'all', 6)
    for path, x in checkpoint.parameters(found).items():
        is_trained = path.startswith('decoder/layers_')
        assert x.dtype == (np.float32 if is_trained else ml_dtypes.bfloat16), path
    convert.convert_checkpoint(tmp_path / 'all', tmp_path / 'hf', 'hf')
    chex.assert_trees_all_equal(
        infer.load(tmp_path / 'hf').arrays, infer.load(tmp_path / 'all').arrays
    )


@pytest.mark.slow
def test_adapters_of_a_run_are_those_on_a_rounded_base(tmp_path):
    """Losses and answers in the run are those of the rounded base; a merge takes the base as its file has it."""
    write_task(tmp_path)

    def config(steps=6):
        config = small_config('', steps)
        config.data.update(files='', module=f'{tmp_path}/mine.py', task='qa', vocabulary='bytes')
        return config

    def lora_config(base, steps=6, **restored):
        lora = config(steps)
        lora.model.update(lora_rank=2, lora_targets='.+/kernel', dropout_rate=0.0)
        lora.optimizer.name = 'adamw'
        lora.restore.update(path=str(base), **restored)
        lora.infer_eval.every_steps = 3
        lora.decode.max_length = 7
        return lora

    run(config(), tmp_path / 'base')
    tree = state_of(tmp_path / 'base', 6)
    for path, x in tree.items():
        if checkpoint.is_parameter(path):
            tree[path] = rounded(x).astype(np.float32)
    folder = tmp_path / 'base/checkpoint_6'
    files = {name: (folder / name).read_bytes() for name in ('config.json',)}
    checkpoint.save(tmp_path / 'rounded', 6, tree, files)
    run(lora_config(tmp_path / 'rounded/checkpoint_6'), tmp_path / 'expected')
    narrow = {'frozen_dtype': 'bfloat16'}
    run(lora_config(tmp_path / 'base', **narrow), tmp_path / 'run')
    for name in ('inference_eval/qa-000003.jsonl', 'inference_eval/qa-000006.jsonl'):
        found = (tmp_path / 'run' / name).read_bytes()
        assert found == (tmp_path / 'expected' / name).read_bytes(), name
    assert_close_runs(tmp_path / 'run', tmp_path / 'expected', 6)
    assert_close(state_of(tmp_path / 'run', 6), state_of(tmp_path / 'expected', 6), 1e-4)
    # Resumed to the bit.
    run(lora_config(tmp_path / 'base', 3, **narrow), tmp_path / 'again')
    run(lora_config(tmp_path / 'base', **narrow), tmp_path / 'again')
    assert_same_run(tmp_path / 'again', tmp_path / 'run', 6)
    # Merged with the file's float32.
    found = infer.load(tmp_path / 'run').arrays
    base = checkpoint.parameters(state_of(tmp_path / 'base', 6))
    table = 'token_embedder/embedding'
    np.testing.assert_array_equal(found[table], base[table])
