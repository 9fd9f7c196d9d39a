"""The best step: histories against a loop over them, what a run keeps and when it ends, kills."""

import json
import shutil

import chex
import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from runs import metrics_of, run, small_config, state_of

import best
import checkpoint
import convert
import evaluate
import evaluate_mode
import infer
import infer_mode
import train
import workdir
from configs import base

LOSS = 'training_eval/span_corruption/loss'


def make_history(values, best_is='lower'):
    return best.History('x', best_is, dict(enumerate(values, start=1)))


def wait_of_keras(values, best_is):
    """keras.callbacks.EarlyStopping's count of evaluations that were no better than the best."""
    best_value = np.inf if best_is == 'lower' else -np.inf
    wait = 0
    for value in values:
        is_better = value < best_value if best_is == 'lower' else value > best_value
        if is_better:
            best_value = value
            wait = 0
        else:
            wait += 1
    return wait


@pytest.mark.parametrize('best_is', ['lower', 'higher'])
def test_the_history_is_that_of_a_loop(best_is):
    rng = np.random.default_rng(0)
    for num_values in range(12):
        values = rng.choice([1.0, 2.0, 3.0, 4.0, np.nan], num_values).tolist()
        found = make_history(values, best_is)
        wait = wait_of_keras(values, best_is)
        assert found.num_without_improvement() == wait
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
    assert best.history('training_eval/a/loss', 'lower', lines).values == {3: 2.0, 6: 1.0}
    assert best.history('inference_eval/a/b/loss', 'lower', lines).values == {3: 7.0}
    assert best.history('', '', lines).values == {}
    content = ''.join(json.dumps(line) + '\n' for line in lines)
    (tmp_path / 'metrics.jsonl').write_text(content + '{"step": 9, "run": "tr')
    assert best.read_metrics(tmp_path) == lines


@pytest.mark.parametrize('best_is', ['lower', 'higher'])
@pytest.mark.parametrize('keep', [1, 2, 3])
def test_the_best_and_the_newest_checkpoints_are_kept(tmp_path, keep, best_is):
    """One deletion after each save leaves what sorting all that was saved would."""
    values = {2: 5.0, 4: 3.0, 6: 4.0, 8: 3.0, 10: float('nan'), 12: 6.0, 16: 4.0}
    known = best.History('x', best_is, values)
    saver = checkpoint.Saver(tmp_path, keep=keep, keep_every=7, rank=known.rank)
    saved = []
    for step in (*range(2, 18, 2), 17):  # 14 and 17 have no value
        saver.save(step, {'state/step': np.int32(step)})
        saver.wait()
        saved.append(step)
        sign = 1 if best_is == 'lower' else -1
        ranked = [(sign * values[s], s) for s in saved if values.get(s, np.nan) == values.get(s)]
        kept = {s for _, s in sorted(ranked)[:keep]}
        kept |= {step}
        kept |= {s for s in saved if s % 7 == 0}
        assert checkpoint.steps(tmp_path) == sorted(kept)


# Runs. One run is expected; others are stopped or killed on their way and go on.


def best_config(corpus, steps=9):
    """A run that ends early, whose parameters are averaged.

    The learning rate is so large that the loss goes up and down.
    """
    config = small_config(corpus, steps=steps)
    config.learning_rate.base_learning_rate = 0.7
    config.optimizer.ema_decay = 0.5
    config.eval.every_steps = 1
    config.eval.steps = 2
    config.save.every_steps = 1
    config.save.keep = 4
    config.save.best_metric = LOSS
    config.save.best_is = 'lower'
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
    assert (
        f'Step {last}: train.early_stopping=3 evaluation(s) without a better {LOSS}: this run is '
        'finished.'
    ) in text
    line = f'The best saved step is {best_step}, with {LOSS} {losses[best_step]:.6g}: checkpoint_'
    assert f'{line}{best_step}, which --step=best opens.' in text
    assert text.endswith('; --config.train.early_stopping=0 goes on.\n')
    assert_same(tmp_path / 'run', expected)
    assert evaluate_mode.last_step(expected) == last
    assert evaluate_mode.choose(str(expected), 'best', watch=False).steps == [best_step]
    found = infer.load(expected, step='best')
    of_best = infer.load(expected / f'checkpoint_{best_step}')
    chex.assert_trees_all_equal(found.arrays, of_best.arrays)
    chex.assert_trees_all_equal(infer.load(expected, step=best_step).arrays, of_best.arrays)


@pytest.mark.slow
def test_more_patience_goes_on(corpus, expected, tmp_path, capsys):
    """The history goes on, too: the evaluations before count."""
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
    assert capsys.readouterr().out.endswith('; a larger --config.train.steps goes on.\n')


class Killed(BaseException):
    """Nothing is saved after it, as after SIGKILL."""


def die_at(monkeypatch, owner, name, number):
    """Make the function OWNER.NAME end the process, so to speak, at its call of this number."""
    function = getattr(owner, name)
    calls = []

    def call(*arguments):
        calls.append(name)
        if len(calls) == number:
            raise Killed
        return function(*arguments)

    monkeypatch.setattr(owner, name, call)


PLACES = {
    'between evaluation and saving': (checkpoint.Saver, 'save'),
    'before a line is written': (workdir.Metrics, 'write'),
    'between saving and deleting': (checkpoint.Saver, 'prune'),
}


def kill(corpus, folder, place, number):
    with pytest.MonkeyPatch.context() as patch:
        die_at(patch, *PLACES[place], number)
        with pytest.raises(Killed):
            run(best_config(corpus), folder)


@pytest.mark.slow
@pytest.mark.parametrize('place', PLACES)
def test_killed_anywhere_and_started_again(corpus, expected, tmp_path, place):
    num_calls = max(losses_of(expected))
    if place == 'before a line is written':
        num_calls *= 2  # of training and of the evaluation
    for number in range(1, num_calls + 1):
        folder = tmp_path / str(number)
        kill(corpus, folder, place, number)
        run(best_config(corpus), folder)
        assert_same(folder, expected)


def stop_at(corpus, folder, number):
    """Stop at the call of this number, which come after a step and after each of two batches."""
    calls = []

    def stop():
        calls.append(number)
        return 15 if len(calls) == number else 0

    assert train.train(train.prepare(best_config(corpus), folder), stop) == 15


@pytest.mark.slow
def test_stopped_in_its_last_evaluation_and_started_again(corpus, expected, tmp_path):
    """The checkpoint is there before the evaluation that ends the run."""
    stop_at(corpus, tmp_path, 3 * max(losses_of(expected)))
    assert len(losses_of(tmp_path)) == len(losses_of(expected)) - 1
    run(best_config(corpus), tmp_path)
    assert_same(tmp_path, expected)


@pytest.mark.slow
def test_stopped_anywhere_and_started_again(corpus, expected, tmp_path):
    for number in range(1, 3 * max(losses_of(expected)) + 1):
        folder = tmp_path / str(number)
        stop_at(corpus, folder, number)
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
    prepared = train.prepare(best_config(corpus), shutil.copytree(expected, tmp_path / 'run'))
    prepared.lock.close()
    [evaluation] = prepared.evaluations
    assert evaluation(average)['loss'] == losses_of(expected)[last]
    assert evaluation(prepared.state.params)['loss'] != losses_of(expected)[last]

    config = best_config(corpus)
    config.restore.path = str(expected)
    config.train.relative_steps = 1
    started = train.prepare(config, tmp_path / 'new')
    started.lock.close()
    chex.assert_trees_all_equal(dict(started.state.params), dict(average))
    chex.assert_trees_all_equal(
        train.optimizer.averaged({}, started.state.opt_state), dict(started.state.params)
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
    started = train.prepare(config, tmp_path)
    params = started.state.params
    average = train.optimizer.averaged({}, started.state.opt_state)
    assert average.keys() == params.keys()
    for path, x in params.items():
        assert average[path].sharding == x.sharding, path
    initial = jax.tree.map(np.asarray, dict(params))
    train.train(started)
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
    assert infer_mode.prepare(request, None, {}).directory == expected / written.name


# Bad input.


BAD = [
    (
        {'train.early_stopping': 2},
        'train.early_stopping=2 counts evaluations without a better save',
    ),
    ({'save.best_metric': LOSS}, f"save.best_metric='{LOSS}': whether higher or lower values are"),
    (
        {'save.best_metric': LOSS, 'save.best_is': 'lower', 'eval.every_steps': 2},
        'save.every_steps=3 and eval.every_steps=2: most saved steps would have no value of',
    ),
    (
        {'save.best_metric': 'inference_eval/qa/f1', 'save.best_is': 'higher'},
        "save.best_metric='inference_eval/qa/f1' is a task metric, and infer_eval.every_steps=0",
    ),
]


@pytest.mark.parametrize('changes, message', BAD, ids=lambda value: str(value)[:40])
def test_settings_that_do_not_fit_together(corpus, tmp_path, changes, message):
    config = small_config(corpus)
    config.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message) as error:
        train.prepare(config, tmp_path / 'run')
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('save_every, eval_every', [(3, 3), (3, 1), (2, 6)])
def test_periods_that_fit_together(save_every, eval_every):
    config = ConfigDict(base.get_config().to_dict())
    config.save.update(best_metric=LOSS, best_is='lower', every_steps=save_every)
    config.eval.every_steps = eval_every
    best.check_settings(config)


def test_a_metric_that_no_evaluation_gives(corpus, uninterrupted, tmp_path):
    config = small_config(corpus)
    config.save.best_is = 'lower'
    config.save.best_metric = LOSS.replace('loss', 'los')
    with pytest.raises(
        ValueError, match=f'is none of the metrics of this run: .*{LOSS}, '
    ) as error:
        train.prepare(config, tmp_path)
    assert '\n' not in str(error.value)
    assert not checkpoint.steps(tmp_path)
    [line, _] = [
        x for x in metrics_of(uninterrupted) if x['run'] == 'training_eval/span_corruption'
    ]
    assert set(evaluate.validation_tags()) == line.keys() - {'step', 'run', 'corpus'}


@pytest.mark.slow
def test_a_run_without_a_best_step(uninterrupted, expected):
    with pytest.raises(ValueError, match='step=best: .* has no save.best_metric.*steps, 3, 6$'):
        infer.load(uninterrupted, step='best')
    with pytest.raises(ValueError, match='step=best: .* has no save.best_metric'):
        evaluate_mode.choose(str(uninterrupted), 'best', watch=False)
    with pytest.raises(
        ValueError, match='step=4: .* has no such checkpoint, but those of 3, 6: na'
    ):
        infer.load(uninterrupted, step=4)
    with pytest.raises(
        ValueError, match='step=best: .*checkpoint_3 is no run with checkpoint_STEP'
    ):
        infer.load(uninterrupted / 'checkpoint_3', step='best')
    with pytest.raises(
        ValueError, match=f'step=best: .* has no value of .*{LOSS}.* one of them, 7000$'
    ):
        best.best_step(expected, [7_000])
