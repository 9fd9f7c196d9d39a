"""The best step: histories against a loop over them, what a run keeps and when it ends, kills."""

import json
import shutil
from functools import partial

import chex
import jax
import numpy as np
import pytest
from forms import first_in_ci
from ml_collections import ConfigDict
from runs import damage_line, metrics_of, run, small_config, state_of
from small_models import assert_refused

import checkpoint
import infer
import loop
import loss
import optimizer
from configs import base
from formats import best
from modes import convert
from modes import evaluate as evaluate_mode
from modes import infer as infer_mode
from prepare import prepare
from run import task_metrics, workdir

LOSS = 'training_eval/span_corruption/loss'


def make_history(values, best_is='lower'):
    return best.History('x', best_is, dict(enumerate(values, start=1)))


def wait_of_keras(values, best_is):
    """keras.callbacks.EarlyStopping's count of evaluations that were no better than the best."""
    sign = 1 if best_is == 'lower' else -1
    best_value = np.inf
    wait = 0
    for value in values:
        wait += 1
        if sign * value < best_value:
            best_value = sign * value
            wait = 0
    return wait


LINE = '"step": 2, "run": "train", "corpus": "c"'


@pytest.mark.parametrize(
    'text',
    [
        '{"step": 2, "ru',
        'null',
        f'{{{LINE}, "loss": "3.1"}}',
        '{"step": 2.5, "run": "train", "corpus": "c"}',
        '{"step": 2, "run": "train", "corpus": null}',
        '[' * 100_000,
        '\udc89PNG',
    ],
)
def test_a_damaged_line_is_named(tmp_path, text):
    """Lines that no run writes; a last one that a kill cut is skipped."""
    file = tmp_path / 'metrics.jsonl'
    line = f'{{{LINE}, "loss": 3.5}}'
    file.write_text(f'{line}\n{line}\n{{"step": 3')
    assert best.read_metrics(tmp_path) == [json.loads(line)] * 2
    damage_line(file, 2, text)
    assert_refused(partial(best.read_metrics, tmp_path), f'line 2 of {file}')


@pytest.mark.parametrize('best_is', ['lower', 'higher'])
def test_the_history_is_that_of_a_loop(best_is):
    rng = np.random.default_rng(0)
    for num_values in range(12):
        values = rng.choice([1.0, 2.0, 3.0, 4.0, np.nan], num_values).tolist()
        found = make_history(values, best_is)
        wait = wait_of_keras(values, best_is)
        for early_stopping in range(4):
            assert found.ends(early_stopping) == (early_stopping > 0 and wait >= early_stopping)
        known = [value for value in values if value == value]
        if not known:
            assert found.best_of(found.values) is None
            continue
        best_value = min(known) if best_is == 'lower' else max(known)
        assert found.best_of(found.values) == values.index(best_value) + 1
        assert found.best_of([99]) is None


def test_the_values_are_those_of_metrics_jsonl(tmp_path):
    lines = [
        {'step': 3, 'run': 'training_eval/a', 'loss': 2.0, 'corpus': 'c'},
        {'step': 3, 'run': 'inference_eval/a/b', 'eval/loss': 7.0, 'corpus': 'c'},
        {'step': 6, 'run': 'training_eval/a', 'loss': 1.0, 'accuracy': 0.5, 'corpus': 'c'},
    ]
    expected = {
        'training_eval/a/loss': {3: 2.0, 6: 1.0},
        'inference_eval/a/b/loss': {3: 7.0},
        '': {},
    }
    for metric, values in expected.items():
        assert best.history({'best_metric': metric, 'best_is': 'lower'}, lines).values == values
    content = ''.join(json.dumps(line) + '\n' for line in lines)
    (tmp_path / 'metrics.jsonl').write_text(content + '{"step": 9, "run": "tr')
    assert best.read_metrics(tmp_path) == lines


@pytest.mark.parametrize('keep, best_is', [(1, 'lower'), (2, 'higher'), (3, 'lower')])
def test_the_best_and_the_newest_checkpoints_are_kept(tmp_path, keep, best_is):
    """One deletion after each save leaves what sorting all that was saved would."""
    values = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: float('nan'), 12: 6.0, 16: 4.0}
    known = best.History('x', best_is, values)
    save = ConfigDict({'keep': keep, 'keep_every': 7})
    saver = checkpoint.Saver(tmp_path, prune=lambda: workdir.prune(tmp_path, save, known.rank))
    saved = []
    for step in (*range(2, 18, 2), 17):  # 14 and 17 have no value
        saver.save(step, {'state/step': np.int32(step)})
        saver.wait()
        saved.append(step)
        sign = 1 if best_is == 'lower' else -1
        ranked = [(sign * values[s], s) for s in saved if values.get(s, np.nan) == values.get(s)]
        kept = {step, *(s for _, s in sorted(ranked)[:keep]), *(s for s in saved if s % 7 == 0)}
        assert checkpoint.steps(tmp_path) == sorted(kept)


# Runs. One run is expected; others are stopped or killed on their way and resume.


def best_config(corpus, steps=9):
    """A run that ends early, whose parameters are averaged.

    The learning rate is so large that the loss goes up and down.
    """
    config = small_config(corpus, steps=steps)
    config.learning_rate.base_learning_rate = 0.65
    config.optimizer.ema_decay = 0.5
    config.eval.update(every_steps=1, steps=2)
    config.save.update(every_steps=1, keep=4, best_metric=LOSS, best_is='lower')
    config.train.early_stopping = 3
    return config


@pytest.fixture(scope='module')
def expected(corpus, make_once):
    return make_once('best', lambda folder: run(best_config(corpus), folder))


def losses_of(folder):
    values = {}
    for line in metrics_of(folder):
        if line['run'] == 'training_eval/span_corruption':
            values[line['step']] = line['loss']
    return values


def assert_same(found, expected):
    """Assert that two runs have the same metrics and checkpoints, bit for bit."""
    assert metrics_of(found) == metrics_of(expected)
    assert checkpoint.steps(found) == checkpoint.steps(expected)
    for step in checkpoint.steps(expected):
        chex.assert_trees_all_equal(state_of(found, step), state_of(expected, step))
    assert not list(found.glob('*tmp*'))


@pytest.mark.slow
def test_a_run_ends_early_and_keeps_its_best(corpus, expected, tmp_path, capsys):
    losses = losses_of(expected)
    last = max(losses)
    best_step = min(losses, key=losses.get)
    assert list(losses) == list(range(1, last + 1))
    assert last < best_config(corpus).train.steps
    assert 1 < best_step == last - 3  # it went down before it went up
    four_best = sorted(losses, key=losses.get)[:4]
    assert checkpoint.steps(expected) == sorted({*four_best, last})
    assert last in four_best  # so that a checkpoint is superfluous once it is evaluated

    shutil.copytree(expected, tmp_path / 'run')
    run(best_config(corpus), tmp_path / 'run')
    text = capsys.readouterr().out
    assert f'Step {last}: train.early_stopping=3 ' in text
    assert f'The best saved step is {best_step}, with {LOSS} {losses[best_step]:.6g}' in text
    assert text.endswith('; --config.train.early_stopping=0 continues.\n')
    assert_same(tmp_path / 'run', expected)
    assert evaluate_mode.last_step(expected) == last
    _, [(_, chosen_step)] = evaluate_mode.choose(str(expected), 'best', watch=False)
    assert chosen_step == best_step
    found = infer.load(expected, step='best')
    of_best = infer.load(expected / f'checkpoint_{best_step}')
    chex.assert_trees_all_equal(found.arrays, of_best.arrays)
    chex.assert_trees_all_equal(infer.load(expected, step=best_step).arrays, of_best.arrays)


@pytest.mark.slow
def test_more_patience_goes_on(corpus, expected, tmp_path, capsys):
    """The history continues, too: the evaluations before count."""
    shutil.copytree(expected, tmp_path / 'run')
    config = best_config(corpus)
    config.train.early_stopping = 4
    run(config, tmp_path / 'run')
    found = losses_of(tmp_path / 'run')
    assert len(found) > len(losses_of(expected))
    whole = run(config, tmp_path / 'whole')
    assert_same(tmp_path / 'run', whole)
    config.train.early_stopping = 0
    run(config, tmp_path / 'run')
    assert max(losses_of(tmp_path / 'run')) == config.train.steps
    assert capsys.readouterr().out.endswith('; a larger --config.train.steps continues.\n')


class Killed(BaseException):
    """Nothing is saved after it, as after SIGKILL."""


PLACES = {
    'between evaluation and saving': (checkpoint.Saver, 'save'),
    'before a line is written': (workdir.Metrics, 'write'),
    'between saving and deleting': (workdir, 'prune'),
}


def kill(corpus, folder, place, number):
    """Kill a run at the call of this number of a function of PLACES."""
    owner, name = PLACES[place]
    function = getattr(owner, name)
    numbers = iter(range(1, number + 1))

    def call(*arguments):
        if next(numbers) == number:
            raise Killed
        return function(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, call)
        run(best_config(corpus), folder)


@pytest.mark.slow
@pytest.mark.parametrize('place', first_in_ci(PLACES))
def test_killed_anywhere_and_started_again(corpus, expected, tmp_path, place):
    num_calls = max(losses_of(expected))
    if place == 'before a line is written':
        num_calls *= 2  # training and the evaluation
    for number in range(1, num_calls + 1):
        folder = tmp_path / str(number)
        kill(corpus, folder, place, number)
        run(best_config(corpus), folder)
        assert_same(folder, expected)


# The average of the parameters.


@pytest.mark.slow
def test_what_is_used_of_a_run_is_the_average(corpus, expected, tmp_path):
    last = max(losses_of(expected))
    average = infer.load(expected).arrays
    state = state_of(expected, last)
    for path, x in average.items():
        np.testing.assert_array_equal(x, state[f'state/param_states/{path}/ema_params'])
        assert (x != state[f'target/{path}']).any()
    prepared = prepare(best_config(corpus), shutil.copytree(expected, tmp_path / 'run'))
    prepared.workdir.lock.close()
    [evaluation] = prepared.evaluations
    assert evaluation(average, last, lambda count: 0)['loss'] == losses_of(expected)[last]
    assert (
        evaluation(prepared.state.params, last, lambda count: 0)['loss']
        != losses_of(expected)[last]
    )

    config = best_config(corpus)
    config.restore.path = str(expected)
    config.train.relative_steps = 1
    started = prepare(config, tmp_path / 'new')
    started.workdir.lock.close()
    chex.assert_trees_all_equal(dict(started.state.params), dict(average))
    chex.assert_trees_all_equal(
        optimizer.averaged({}, started.state.opt_state),
        dict(started.state.params),
    )


@pytest.mark.slow
@pytest.mark.parametrize('is_restored', [False, True])
def test_the_average_is_split_like_its_parameter(corpus, expected, tmp_path, is_restored):
    config = best_config(corpus)
    config.mesh.update(data=2, model=2)
    config.train.steps = 1
    if is_restored:
        config.restore.path = str(expected)
        config.restore.only = 'target/.*'
    started = prepare(config, tmp_path)
    params = started.state.params
    average = optimizer.averaged({}, started.state.opt_state)
    assert average.keys() == params.keys()
    for path, x in params.items():
        assert average[path].sharding == x.sharding, path
    initial = jax.tree.map(np.asarray, dict(params))
    loop.train(started)
    state = state_of(tmp_path, 1)
    for path, x in initial.items():
        mean = 0.5 * x + 0.5 * state[f'target/{path}']
        found = state[f'state/param_states/{path}/ema_params']
        np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_what_is_converted_and_answers_is_the_average(expected, tmp_path):
    best_step = best.best_step(expected, checkpoint.steps(expected))
    written = convert.convert_checkpoint(expected, tmp_path / 'out', 't5x', step='best')
    assert written == tmp_path / 'out' / f'checkpoint_{best_step}'
    average = infer.load(expected, step='best').arrays
    tree = checkpoint.restore(written)
    assert not [path for path in tree if path.endswith('ema_params')]
    chex.assert_trees_all_equal(
        checkpoint.parameters(tree), jax.tree.map(np.asarray, dict(average))
    )
    request = infer_mode.Request(str(expected), step='best', text='a lake')
    assert infer_mode.Job(request, None, {}).opened.directory == expected / written.name


# Names and bad input.


def test_the_names_of_metrics(uninterrupted):
    lines = metrics_of(uninterrupted)
    line = next(x for x in lines if x['run'] == 'training_eval/span_corruption')
    assert set(
        task_metrics.validation_tags(base.get_config().data, loss.T5X_SUMS)
    ) == line.keys() - {
        'step',
        'run',
        'corpus',
    }


@pytest.mark.slow
def test_a_run_without_a_best_step(uninterrupted, expected):
    for folder, step, name in (
        (uninterrupted, 'best', 'step=best'),
        (uninterrupted, 'best', 'save.best_metric'),
        (uninterrupted, 4, 'step=4'),
        (uninterrupted / 'checkpoint_3', 'best', 'step=best'),
    ):
        assert_refused(partial(infer.load, folder, step=step), name)
    choosing = partial(evaluate_mode.choose, str(uninterrupted), 'best', watch=False)
    assert_refused(choosing, 'save.best_metric')
    assert_refused(partial(best.best_step, expected, [7_000]), LOSS)
