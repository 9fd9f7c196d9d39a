"""Steps that are not finite: found, and then stopped at or skipped.

faulty_model.py brings faults into the model. Each is in one batch, by a letter in its inputs.
"""

import dataclasses
import functools
import json

import chex
import faulty_model
import jax
import numpy as np
import pytest
from runs import ROOT, assert_same_run, run, small_config, state_of, stop_after

import checkpoint
import loop
import partition
import state_names
import train
from messages import LossNotFinite
from prepare import make_spec, prepare
from run import verify

STEPS = 12


def faulty_config(action, folder=ROOT, **settings):
    """Return the config of a run whose batches may bring faults, with the records in `folder`."""
    config = small_config(str(folder / 'qa.jsonl'), steps=STEPS)
    config.model.module = str(ROOT / 'tests/faulty_model.py')
    config.model.dropout_rate = 0.0  # compiles twice as fast
    config.data.vocabulary = 'bytes'
    config.data.pack = 'no'
    config.data.inputs = '{q}'
    config.data.targets = '{a}'
    config.data.validation_files = str(folder / 'dev.jsonl')
    config.train.on_not_finite = action
    config.log.every_steps = 2
    config.save.every_steps = 4
    config.eval.every_steps = STEPS
    config.eval.steps = 1
    config.update_from_flattened_dict(settings)
    return config


# One step.


def make_batch(spec, seed, place=''):
    """Return random rows; with `place`, one of them brings its fault."""
    rng = np.random.default_rng(seed)
    batch = {}
    for name, (length, _) in spec.features.items():
        batch[name] = rng.integers(2, 60, (spec.batch_size, length), np.int32)
    if place:
        batch['encoder_input_tokens'][1, 3] = faulty_model.PLACES[place].token
    return partition.place_rows(spec.mesh, batch)


compiled = functools.cache(train.compile_step)


def step_from(spec, state, batch):
    """Return a state on the host and the metrics."""
    placed = jax.device_put(state, partition.shardings(spec.mesh, spec.state_specs))
    return jax.device_get(compiled(spec)(placed, batch))


@functools.cache
def trained_state(spec):
    """The state after two steps, on the host."""
    state = train.compile_init(spec)()
    for seed in range(2):
        state, metrics = step_from(spec, state, make_batch(spec, seed))
        assert metrics['finite']
    return state


def with_state(tree, like):
    return train.TrainState(*state_names.from_t5x(tree, like))


MODES = {
    'adafactor, two microbatches': {},
    'adamw, average, clip': {
        'optimizer.name': 'adamw',
        'optimizer.ema_decay': 0.9,
        'optimizer.global_norm_clip_threshold': 1.0,
    },
    'adafactor, momentum, average': {'optimizer.beta1': 0.9, 'optimizer.ema_decay': 0.9},
    'frozen encoder': {'optimizer.trainable': 'decoder/.+'},
    'adapters': {'model.lora_rank': 2, 'optimizer.multiply_by_parameter_scale': False},
    'eight devices, bfloat16': {
        'mesh.data': 2,
        'mesh.fsdp': 2,
        'mesh.model': 2,
        'model.dtype': 'bfloat16',
        'train.gradient_dtype': 'bfloat16',
        'model.remat': 'full',
        'model.scan_layers': True,
    },
}
FIRST, *OTHERS = MODES


@pytest.mark.parametrize(
    'mode', [FIRST, *(pytest.param(x, marks=pytest.mark.chaos) for x in OTHERS)]
)
def test_a_skipped_step(mode):
    """Parameters and optimizer state stay. The state is that of a run that restores its checkpoint."""
    config = faulty_config('skip', **{'train.batch_size': 8, **MODES[mode]})
    spec = make_spec(config, num_microbatches=2 if mode == FIRST else 1)
    before = trained_state(spec)
    for place in ('logits', 'activations', 'gradients'):
        skipped, metrics = step_from(spec, before, make_batch(spec, seed=2, place=place))
        assert not metrics['finite']
        tree = state_names.to_t5x(*skipped)
        expected = state_names.to_t5x(*before) | {'state/step': before.step + 1}
        chex.assert_trees_all_equal(tree, expected)
        chex.assert_trees_all_equal(skipped, with_state(tree, before.opt_state))
        _, metrics = step_from(spec, skipped, make_batch(spec, seed=3))
        assert metrics['finite']


@pytest.mark.parametrize('value', [np.nan, np.inf, -1.0])
def test_a_fault_of_the_optimizer_state(value):
    """Infinite second moments alone give a finite update, 0; negative ones an update that is not finite."""
    spec = make_spec(faulty_config('stop'))
    before = trained_state(spec)
    tree = state_names.to_t5x(*before)
    [path] = [
        path for path in tree if path.endswith('encoder_norm/scale/v') and 'states/encoder' in path
    ]
    tree[path] = np.full_like(tree[path], value)
    before = with_state(tree, before.opt_state)
    _, metrics = step_from(spec, before, make_batch(spec, seed=2))
    assert np.isfinite(metrics['loss'] + metrics['gradient_norm'])
    assert not metrics['finite']


# Runs of STEPS steps, which are logged every 2 and saved every 4.

RECORD_OF_STEP = {5: 52, 9: 88, 13: 95, 15: 67, 16: 188}  # one of those in the batch of the step
RECORD_BYTES = 33


def write_records(folder, faults):
    """Write the records of a run; `faults`: {step: place of the fault that its batch brings}."""
    lines = [json.dumps({'q': f'what is {i:03}', 'a': f'{i:03}'}) + '\n' for i in range(200)]
    (folder / 'dev.jsonl').write_text(''.join(lines[:4]))
    for step, place in faults.items():
        i = RECORD_OF_STEP[step]
        lines[i] = lines[i].replace('w', faulty_model.PLACES[place].letter)
    (folder / 'qa.jsonl').write_text(''.join(lines))


def document_of(step):
    return f'qa.jsonl:{RECORD_OF_STEP[step] * RECORD_BYTES}'


def count_of(workdir, step):
    return json.loads((workdir / f'checkpoint_{step}/not_finite.json').read_text())


@pytest.mark.slow
def test_stop_and_then_skip(tmp_path, capsys):
    """The run that continues is that of a step 5 without an update."""
    write_records(tmp_path, {5: 'logits'})
    with pytest.raises(LossNotFinite, match='step 5 ') as error:
        run(faulty_config('stop', tmp_path), tmp_path / 'run')
    remedies = 'learning_rate.base_learning_rate', 'train.on_not_finite=skip'
    for words in (document_of(5), 'keeps checkpoint_4', *remedies):
        assert words in str(error.value)
    assert checkpoint.steps(tmp_path / 'run') == [4]
    assert verify.verify(tmp_path / 'run' / 'checkpoint_4')
    config = faulty_config('skip', tmp_path)
    run(config, tmp_path / 'run')
    [line] = [x for x in capsys.readouterr().out.splitlines() if 'skipped' in x]
    assert line.startswith(
        'Step 5 is not finite: loss nan, gradient norm nan. It is skipped, 1 of '
    )
    assert document_of(5) in line

    prepared = prepare(config, tmp_path / 'expected')
    spec = make_spec(faulty_config('stop'))

    def step(state, batch):
        before = jax.tree.map(np.array, state)
        after, metrics = compiled(spec)(state, batch)
        if before.step + 1 == 5:
            tree = state_names.to_t5x(*before) | {'state/step': before.step + 1}
            after = with_state(tree, before.opt_state)
            after = jax.device_put(after, partition.shardings(spec.mesh, spec.state_specs))
        return after, metrics

    loop.train(dataclasses.replace(prepared, train_step=step))
    assert_same_run(tmp_path / 'run', tmp_path / 'expected', STEPS)


@pytest.mark.slow
def test_the_budget(tmp_path):
    """Two such steps in the life of a run, before and after it is stopped."""
    write_records(tmp_path, dict.fromkeys((5, 9, 13), 'gradients'))
    settings = {'train.max_not_finite': 2, 'train.steps': 16, 'save.every_steps': 2}
    config = faulty_config('skip', tmp_path, **settings)
    stop_after(7, config, tmp_path / 'run')
    with pytest.raises(
        LossNotFinite, match='step 13 .* loss [0-9.]+, gradient norm inf. '
    ) as error:
        run(config, tmp_path / 'run')
    assert document_of(13) in str(error.value) and 'train.max_not_finite=2' in str(error.value)
    assert count_of(tmp_path / 'run', checkpoint.steps(tmp_path / 'run')[-1]) == 2
    config.train.max_not_finite = 3
    run(config, tmp_path / 'run')
    assert count_of(tmp_path / 'run', 16) == 3
    chex.assert_tree_all_finite(state_of(tmp_path / 'run', 16))
