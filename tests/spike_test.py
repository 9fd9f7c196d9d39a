"""Spikes: steps whose loss or gradient norm lies far above those of the last updates, and which are skipped."""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import first_quick
from not_finite_test import faulty_config, make_batch, write_records
from runs import (
    assert_close_runs,
    assert_same_run,
    in_two_processes,
    metrics_of,
    run,
    stop_after,
    write_corpus,
)

import partition
import train
from prepare import make_spec
from run.interval import recent_steps


def is_spike(updates, latest, window, sigma):
    """OLMo-core's rule in plain numpy, with the steps that made an update."""
    recent = np.array(updates[-window:], np.float64)
    if len(recent) < window // 2:
        return False
    return bool((latest > recent.mean(axis=0) + sigma * recent.std(axis=0, ddof=1)).any())


@pytest.mark.parametrize('window, sigma', [(4, 3.0), (5, 2.0), (32, 1.5), (31, 6.0)])
def test_the_rule(window, sigma):
    """Series of losses and norms: each step with the window, as it is filled, and with its limits."""
    rng = np.random.default_rng(window)
    series = rng.normal([3, 0.5], [0.4, 0.2], (80, 2)).astype(np.float32)
    series[rng.integers(2, 80, 9), rng.integers(0, 2, 9)] *= 3
    compiled = jax.jit(functools.partial(train.is_spike, sigma=sigma))
    recent = jnp.full([2, window], jnp.inf)
    updates = []
    spikes = []
    for latest in series:
        spikes.append(is_spike(updates, latest, window, sigma))
        assert bool(compiled(recent, latest)) == spikes[-1]
        if not spikes[-1]:
            updates.append(latest)
            recent = jnp.concatenate([recent[:, 1:], latest[:, None]], axis=1)
    assert 2 <= sum(spikes) < 40


@pytest.mark.parametrize('num_saved', [0, 1, 4, 6])
def test_a_window_that_changes(num_saved):
    """The newest steps stay, at the end, to the bit."""
    saved = np.random.default_rng(0).random((2, num_saved), np.float32)
    unknown = jnp.full([2, 4], jnp.inf)
    text = json.dumps(saved.tolist())
    expected = np.full((2, 4), np.inf, np.float32)
    for i in range(min(4, num_saved)):
        expected[:, -1 - i] = saved[:, -1 - i]
    np.testing.assert_array_equal(recent_steps(json.loads(text), unknown), expected)
    assert recent_steps(None, unknown) is unknown


WINDOW = {'train.on_spike': 'skip', 'train.spike_window': 24, 'train.spike_sigma': 20.0}


@pytest.mark.parametrize(
    'mesh, num_microbatches', first_quick([((2, 2, 2), 2), ((1, 1, 1), 1), ((8, 1, 1), 1)])
)
def test_each_mesh_skips_the_same(mesh, num_microbatches):
    """Large gradients in steps 6 and 7. The state is that of step 5, but for the count of steps."""
    data, fsdp, model = mesh
    config = faulty_config('stop', **WINDOW)
    config.mesh.update(data=data, fsdp=fsdp, model=model)
    config.train.update(batch_size=16, spike_window=7)  # full at step 9
    spec = make_spec(config, num_microbatches)
    state = train.compile_init(spec)()
    step = train.compile_step(spec)
    spikes = []
    updates = []
    for i in range(1, 13):
        place = 'large gradients' if i in (6, 7) else ''
        before = jax.device_get(state)
        state, metrics = jax.device_get(step(state, make_batch(spec, i, place)))
        latest = np.array([metrics['loss'], metrics['gradient_norm']])
        assert metrics['finite']
        assert metrics['spike'] == is_spike(updates, latest, 7, 20.0)
        spikes += [i] * bool(metrics['spike'])
        if metrics['spike']:
            chex.assert_trees_all_equal(state, before._replace(step=before.step + 1))
        else:
            updates.append(latest)
            np.testing.assert_array_equal(state.recent[:, -len(updates[-7:]) :].T, updates[-7:])
        state = jax.device_put(state, partition.shardings(spec.mesh, spec.state_specs))
    assert spikes == [6, 7]


@pytest.mark.slow
def test_a_run_with_spikes(tmp_path):
    """Stopped between two of them and resumed, it is the uninterrupted run, and ends as if there were none."""
    steps = {'train.steps': 100, 'eval.every_steps': 100, 'save.every_steps': 50}
    write_records(tmp_path, {})
    run(faulty_config('stop', tmp_path, **steps), tmp_path / 'clean')
    run(faulty_config('stop', tmp_path, **steps, **WINDOW), tmp_path / 'guarded')
    assert_close_runs(tmp_path / 'guarded', tmp_path / 'clean', 100)  # another program

    write_records(tmp_path, {15: 'large gradients', 16: 'large gradients'})
    run(faulty_config('stop', tmp_path, **steps), tmp_path / 'ruined')
    config = faulty_config('stop', tmp_path, **steps, **WINDOW)
    run(config, tmp_path / 'expected')
    stop_after(15, config, tmp_path / 'run')
    run(config, tmp_path / 'run')
    assert_same_run(tmp_path / 'run', tmp_path / 'expected', 100)
    for step in (50, 100):
        files = [tmp_path / x / f'checkpoint_{step}/recent.json' for x in ('run', 'expected')]
        assert files[0].read_bytes() == files[1].read_bytes()
    lines = [x for x in metrics_of(tmp_path / 'run') if x['run'] == 'train']
    assert [x['step'] for x in lines if x.get('skipped_steps')][:1] == [16]
    losses = {}
    for name in ('clean', 'ruined', 'run'):
        lines = [x for x in metrics_of(tmp_path / name) if x['run'] == 'train']
        losses[name] = np.mean([x['nats_per_token'] for x in lines[-5:]])
    assert losses['ruined'] > 4.2
    assert losses['run'] == pytest.approx(losses['clean'], abs=0.15)


TWO = """
import sys
sys.path[:0] = sys.argv[1:3]
import pathlib
import jax
jax.distributed.initialize(sys.argv[3], 2, int(sys.argv[4]))
import runs
folder = pathlib.Path(sys.argv[5])
for name, steps in (('expected', 7), ('run', 5), ('run', 7)):
    config = runs.small_config(str(folder / 'made_up.txt'), steps, data_axis=2)
    config.data.vocabulary = 'bytes'
    config.train.update(on_spike='skip', spike_sigma=0.5, spike_window=4)
    runs.run(config, folder / name)
"""


@pytest.mark.slow
def test_two_processes_skip_the_same_when_resumed(tmp_path):
    write_corpus(tmp_path)
    in_two_processes(TWO, str(tmp_path))
    training = []
    for name in ('run', 'expected'):
        training.append([x for x in metrics_of(tmp_path / name) if x['run'] == 'train'])
    assert training[0] == training[1]
    assert [x['step'] for x in training[0] if x.get('skipped_steps')] == [4, 6]
