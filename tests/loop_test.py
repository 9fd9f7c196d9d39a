"""The loop, with a step of a few numbers."""

import functools
import itertools
import json
import shutil
import time

import jax.numpy as jnp
import numpy as np
import pytest
from runs import metrics_of, small_config

import checkpoint
import loop
import tasks.open
import train
from formats import best
from loss import T5X_SUMS
from messages import LossNotFinite
from prepare import make_spec
from run.console import Console
from run.interval import Interval, Skips
from run.lock import lock
from run.workdir import Metrics, Workdir
from stream import Stream
from vocabulary import ByteVocabulary


class Losses:
    """An evaluation with the values that a test gives it, {step: loss}, 1.0 at other steps."""

    def __init__(self, name, every_steps, values=(), seen=None):
        self.name = name
        self.every_steps = every_steps
        self.values = dict(values)
        self.seen = [] if seen is None else seen

    def __call__(self, params, step, stop):
        if stop(len(self.seen) + 1):
            return None
        assert params['w'] == step  # those of the step
        self.seen.append((self.name, step))
        return {'loss': self.values.get(step, 1.0)}


@functools.cache
def small_spec():
    return make_spec(small_config('a.txt'))


def take_step(state, batch, losses=(), seen=None):
    """Count in 'w', and give the metrics of a step whose loss is in `losses`, {step: loss}."""
    step = int(state.step) + 1
    loss = dict(losses).get(step, 1.0)
    if seen is not None:
        seen.append(int(np.asarray(batch['encoder_input_tokens']).sum()))
    metrics = dict.fromkeys(T5X_SUMS, 1.0)
    metrics |= {'loss': loss, 'learning_rate': 0.1, 'gradient_norm': loss}
    metrics['finite'] = np.isfinite(loss)
    return train.TrainState(jnp.int32(step), {'w': jnp.float32(step)}, ()), metrics


class Loop:
    """A run in `folder` with records of its own, one of which fills a row of a batch."""

    def __init__(self, folder, num_records=400, **settings):
        self.folder = folder
        config = small_config('', steps=8)
        config.update_from_flattened_dict({'log.every_steps': 2, 'save.every_steps': 4} | settings)
        config.data.update(task='text_to_text', inputs='{q}', targets='{a}', pack='no')
        file = folder.parent / 'records.jsonl'
        lines = [json.dumps({'q': f'{i:03}', 'a': 'yes'}) for i in range(num_records)]
        file.write_text('\n'.join(lines))
        config.data.files = str(file)
        config.data.validation_fraction = 0.0
        self.config = config
        self.seen = []  # the evaluations, in their order

    def run(
        self,
        evaluations=(),
        losses=(),
        step=0,
        end=None,
        stop=lambda: 0,
        take=take_step,
        hooks=(),
    ):
        """Train from `step` on. Return the number of the signal."""
        config = self.config
        opened = tasks.open.open_mixture(config.data)
        stream = Stream(
            opened,
            'train',
            ByteVocabulary(100),
            config.data,
            batch_size=config.train.batch_size,
            seed=0,
            num_epochs=config.train.epochs or None,
        )
        self.folder.mkdir(exist_ok=True)
        (self.folder / 'config.json').write_text(config.to_json())
        lines = []
        if (self.folder / 'metrics.jsonl').exists():
            lines = best.read_metrics(self.folder)
        metrics = Metrics(self.folder, lines, opened.corpus, config.save)
        saver = checkpoint.Saver(self.folder)
        held = lock(self.folder / 'lock', 'the run', 'wait')
        self.batches = []
        train_step = None
        if end is None:
            train_step = functools.partial(take, losses=losses, seen=self.batches)
        run = loop.Run(
            train=config.train,
            log_every_steps=config.log.every_steps,
            save_every_steps=config.save.every_steps,
            workdir=Workdir(self.folder, held, metrics, saver, files={}),
            console=Console(),
            stream=stream,
            evaluations=evaluations,
            spec=small_spec(),
            train_step=train_step,
            skips=Skips(config.train, self.folder, step, num_not_finite=0),
            step=step,
            state=state_of_step(step),
            interval=Interval(),
            end=end,
            hooks=[*hooks, *loop.default_hooks()],
        )
        self.prepared = run
        return loop.train(run, stop)

    def steps_of(self, name):
        return [line['step'] for line in metrics_of(self.folder) if line['run'] == name]


def state_of_step(step):
    return train.TrainState(jnp.int32(step), {'w': jnp.float32(step)}, ())


@pytest.fixture
def make(tmp_path):
    return functools.partial(Loop, tmp_path / 'run')


@pytest.mark.parametrize(
    'settings, evaluate_every, logged, evaluated, saved',
    [
        ({}, 3, [2, 4, 6, 8], [3, 6, 8], [4, 8]),
        ({'train.steps': 7}, 7, [2, 4, 6, 7], [7], [4, 7]),
        ({'train.steps': 1}, 5, [1], [1], [1]),
        (
            {'log.every_steps': 9, 'save.every_steps': 1},
            1,
            [8],
            list(range(1, 9)),
            list(range(1, 9)),
        ),
    ],
)
def test_what_is_due_when(make, settings, evaluate_every, logged, evaluated, saved):
    """After the last step, everything; in the order log, evaluate, save."""
    run = make(**settings)
    run.config.save.keep = 0
    assert run.run([Losses('training_eval/a', evaluate_every)]) == 0
    assert run.steps_of('train') == logged
    assert run.steps_of('training_eval/a') == evaluated
    assert checkpoint.steps(run.folder) == saved


def test_a_hook_before_the_others(make):
    seen = []
    own = loop.Hook('own', lambda run: run.step == 3, lambda run: seen.append(run.step))
    run = make()
    assert run.run(hooks=[own]) == 0
    assert seen == [3]
    assert run.steps_of('train') == [2, 4, 6, 8]


def test_a_signal_stops_after_its_step(make):
    """The step is saved, what it was due for is left to the run that resumes, which does it first."""
    run = make()
    counts = itertools.count(1)
    stop = lambda: 15 * (next(counts) == 3)  # noqa: E731
    seen = []
    assert run.run([Losses('training_eval/a', 3, seen=seen)], stop=stop) == 15
    assert checkpoint.steps(run.folder) == [3]
    assert seen == []
    assert run.run([Losses('training_eval/a', 3, seen=seen)], step=3) == 0
    assert [step for _, step in seen] == [3, 6, 8]
    assert checkpoint.steps(run.folder) == [3, 4, 8]


def test_early_stopping_ends_with_all_evaluations(make):
    """After two values without a better one; config.json says where the run has ended."""
    settings = {'train.early_stopping': 2, 'save.best_is': 'lower'}
    run = make(**settings, **{'save.best_metric': 'training_eval/a/loss'})
    values = {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.1}
    seen = []
    found = [Losses('training_eval/a', 1, values, seen), Losses('training_eval/b', 100, (), seen)]
    assert run.run(found) == 0
    assert seen == [
        (f'training_eval/{name}', i) for name, i in zip('aaaab', [1, 2, 3, 4, 4], strict=True)
    ]
    assert checkpoint.steps(run.folder) == [4]
    assert json.loads((run.folder / 'config.json').read_text())['last_step'] == 4
    assert run.prepared.end == loop.End.EARLY_STOPPING
    # It is finished: nothing is left, and an evaluation that is missing is made up for.
    assert run.run(found, step=4, end=loop.End.EARLY_STOPPING) == 0
    assert len(seen) == 5
    more = Losses('training_eval/c', 100, (), seen)
    assert run.run([*found, more], step=4, end=loop.End.EARLY_STOPPING) == 0
    assert seen[5:] == [('training_eval/c', 4)]


def test_epochs_end_a_run(make):
    """Twelve records are three batches of four; a run that resumes there has nothing to do."""
    run = make(num_records=12, **{'train.epochs': 1})
    assert run.run() == 0
    assert run.prepared.end == loop.End.EPOCHS
    assert checkpoint.steps(run.folder) == [3] == run.steps_of('train')[-1:]


def test_a_step_that_is_not_finite_stops_the_loop(make):
    run = make()
    with pytest.raises(LossNotFinite, match='step 3'):
        run.run(losses={3: np.nan})
    assert checkpoint.steps(run.folder) == []


def test_skipped_steps_count(make):
    """A logged line has the means of the other steps; without one it has no loss."""
    run = make(**{'train.on_not_finite': 'skip', 'train.max_not_finite': 3})
    assert run.run(losses={2: np.nan, 3: np.nan, 4: np.inf}) == 0
    assert run.prepared.skips.num_not_finite == 3
    lines = metrics_of(run.folder)
    assert [line.get('skipped_steps') for line in lines] == [1, 2, None, None]
    assert ['loss' in line for line in lines] == [True, False, True, True]
    assert lines[0]['weight_gradient_norm'] == 1.0
    other = make(**{'train.on_not_finite': 'skip', 'train.max_not_finite': 1})
    shutil.rmtree(run.folder)
    with pytest.raises(LossNotFinite, match='train.max_not_finite'):
        other.run(losses={2: np.nan, 3: np.nan})


def test_spikes_in_succession_end_a_run(make, capsys):
    """As many as the window has steps may be skipped; they do not use up train.max_not_finite."""
    settings = {'train.on_spike': 'skip', 'train.spike_window': 4, 'train.max_not_finite': 1}
    run = make(**settings, **{'train.steps': 20, 'log.every_steps': 6})

    def take(state, batch, losses, seen):
        new, metrics = take_step(state, batch, losses, seen)
        return new, {**metrics, 'spike': len(seen) in (3, 4, 5, 6, 8, *range(10, 20))}

    with pytest.raises(LossNotFinite, match=r'step 14 is a spike.*train\.on_spike=no'):
        run.run(take=take)
    lines = metrics_of(run.folder)
    assert [line.get('skipped_steps') for line in lines] == [4, 4]
    assert checkpoint.steps(run.folder)[-1] == 12
    output = capsys.readouterr().out
    assert output.count('is a spike') == 9
    [line] = [line for line in output.splitlines() if line.startswith('Step 8 is a spike')]
    assert line.count('records.jsonl:') == 4


def test_the_time_of_a_run(make, capsys, monkeypatch):
    """All that the loop does is somebody's, also a hook's; a checkpoint keeps the seconds so far."""
    now = [100.0]
    monkeypatch.setattr(time, 'perf_counter', lambda: now[0])

    def take(state, batch, losses, seen):
        now[0] += 5
        return take_step(state, batch, losses, seen)

    def sleep(run):
        now[0] += 60

    run = make()
    own = loop.Hook('sleeping', lambda run: run.step % 4 == 0, sleep)
    run.run(take=take, hooks=[own])
    assert 'Time 0:02:40: sleeping 0:02:00, steps 0:00:40\n' in capsys.readouterr().out
    assert [x['timing/seconds'] for x in best.read_metrics(run.folder)] == [10] * 4
    seconds = json.loads((run.folder / 'checkpoint_8/seconds.json').read_text())
    assert (seconds['sleeping'], seconds['steps']) == (120, 40)


def test_a_run_that_lost_its_lock_saves_nothing(make):
    """Another process has the workdir: two would write the same checkpoints."""
    run = make()

    def take(state, batch, losses, seen):
        run.prepared.workdir.lock.is_lost = len(seen) == 2
        return take_step(state, batch, losses, seen)

    with pytest.raises(OSError):
        run.run(take=take)
    assert len(run.batches) == 3 and checkpoint.steps(run.folder) == []


@pytest.mark.parametrize('step', [1, 3])
def test_an_error_of_a_step_saves_those_before(make, step, capsys):
    """Step 1 has none before it."""
    run = make()

    def take(state, batch, losses, seen):
        if len(seen) == step - 1:
            raise OSError('the disk is full')
        return take_step(state, batch, losses, seen)

    with pytest.raises(OSError, match='the disk is full'):
        run.run(take=take)
    assert checkpoint.steps(run.folder) == [2][: step - 1]
    assert ('Step 2 is saved before the error' in capsys.readouterr().out) == (step == 3)
