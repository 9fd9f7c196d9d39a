"""Task metrics in training and of checkpoints: the numbers, the files, kills and bad input."""

import errno
import json
import os
import shutil

import numpy as np
import pytest
from permissions import another_user
from questions import make_config, write_task
from report_runs import DAMAGED_LINES, damage_line
from runs import ROOT, metrics_of, run
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import evaluate_mode
import infer
import infer_eval
import metrics
import paths
import results
import tasks
import train
import workdir


@pytest.fixture(scope='module')
def evaluated(make_once):
    """A folder with the task and, in `run`, a finished run with task metrics of steps 3 and 6."""

    def make(folder):
        write_task(folder)
        run(make_config(folder), folder / 'run')

    return make_once('evaluated', make)


@pytest.fixture(scope='module')
def loaded(evaluated):
    """The model of checkpoint_6, which is compiled once for all tests, and its parameters."""
    t5 = infer.load(evaluated / 'run' / 'checkpoint_6')
    return t5, t5.arrays


@pytest.fixture
def compiled(loaded):
    """The same model with its own parameters: an evaluation gives it those of other steps."""
    t5, arrays = loaded
    t5.set_parameters(arrays)
    return t5


def open_evaluation(evaluated, compiled, output_dir, step='all', **changes):
    """A CheckpointEvaluation of the run in `evaluated` on one device."""
    config = make_config(evaluated)
    config.update_from_flattened_dict(changes)
    evaluation = evaluate_mode.CheckpointEvaluation(
        config, str(evaluated / 'run'), str(output_dir), step
    )
    evaluation.t5 = compiled
    return evaluation


def lines_of(folder, name):
    return [json.loads(line) for line in (folder / 'inference_eval' / name).open()]


def files_of(folder):
    """{path: content} of all files but TensorBoard's."""
    found = {}
    for file in folder.rglob('*'):
        if file.is_file() and not file.name.startswith('events.'):
            found[str(file.relative_to(folder))] = file.read_bytes()
    return found


def test_a_run_writes_what_its_model_answers_and_scores(evaluated, compiled):
    workdir = evaluated / 'run'
    lines = lines_of(workdir, 'qa-000006.jsonl')
    rows = [json.loads(line) for line in (evaluated / 'validation.jsonl').open()]
    assert [line['input']['inputs_pretokenized'] for line in lines] == [row['q'] for row in rows]
    assert [line['target'] for line in lines] == [[row['a']] for row in rows]
    inputs = [line['input']['inputs'] for line in lines]
    assert max(map(len, inputs)) == 32  # of a question that was cut
    answers = compiled.generate(inputs, max_length=7)
    vocabulary = compiled.vocabulary
    assert [line['output'] for line in lines] == [vocabulary.decode(ids) for ids in answers]
    expected = metrics.squad([line['target'] for line in lines], [line['output'] for line in lines])
    [_, of_last] = [x for x in metrics_of(workdir) if x['run'] == 'inference_eval/qa']
    assert of_last['step'] == 6
    assert {name: of_last[f'eval/{name}'] for name in expected} == expected
    assert 'score' not in lines[0]

    lines = lines_of(workdir, 'rank-000006.jsonl')
    assert len(lines) == sum(len(row['choices']) for row in rows)
    targets = [line['input']['targets'] for line in lines]
    scores = compiled.score([line['input']['inputs'] for line in lines], targets)
    np.testing.assert_allclose([line['score'] for line in lines], scores, rtol=1e-4)
    assert 'output' not in lines[0]
    for task, lengths in (('rank', [1] * len(lines)), ('rank_by_length', map(len, targets))):
        best = {}
        for line, length in zip(lines, lengths, strict=True):
            (example, _), is_correct, _, num_tokens = line['target']
            assert num_tokens == len(line['input']['targets'])
            best.setdefault(example, []).append((line['score'] / length, is_correct))
        accuracy = 100 * np.mean([max(x, key=lambda pair: pair[0])[1] for x in best.values()])
        [_, of_last] = [x for x in metrics_of(workdir) if x['run'] == f'inference_eval/{task}']
        assert of_last['eval/accuracy'] == pytest.approx(accuracy)


def test_what_task_metrics_leave_in_a_workdir(evaluated):
    workdir = evaluated / 'run'
    names = ('qa', 'rank', 'rank_by_length')
    files = {f'{name}{end}' for name in names for end in ('', '-000003.jsonl', '-000006.jsonl')}
    files |= {f'{name}-metrics.jsonl' for name in names}
    files |= {f'{name}-settings.json' for name in names}
    assert {file.name for file in (workdir / 'inference_eval').iterdir()} == files
    table = (workdir / 'results.csv').read_text().splitlines()
    header = 'step,qa/em,qa/f1,rank/accuracy,rank_by_length/accuracy'
    assert table[0] == header
    assert [row.partition(',')[0] for row in table[1:]] == ['3', '6', 'max', 'step']
    [events] = (workdir / 'inference_eval' / 'rank').iterdir()
    found = []
    for event in EventFileLoader(str(events)).Load():
        found += [(event.step, value.tag) for value in event.summary.value]
    assert found == [(3, 'eval/accuracy'), (6, 'eval/accuracy')]


def test_a_run_that_goes_on_does_the_evaluation_that_is_missing(evaluated, tmp_path, capsys):
    shutil.copytree(evaluated / 'run', tmp_path / 'run')
    lines = metrics_of(tmp_path / 'run')
    kept = [line for line in lines if (line['step'], line['run']) != (6, 'inference_eval/rank')]
    assert len(kept) == len(lines) - 1
    content = ''.join(json.dumps(line) + '\n' for line in kept)
    (tmp_path / 'run' / 'metrics.jsonl').write_text(content)
    run(make_config(evaluated), tmp_path / 'run')
    assert sorted(map(str, metrics_of(tmp_path / 'run'))) == sorted(map(str, lines))
    text = capsys.readouterr().out
    assert 'examples of qa ' in text and 'were cut to data.lengths' in text
    assert 'Step 6, validation:\n  rank  accuracy' in text


def test_a_checkpoint_has_the_results_of_its_run(evaluated, compiled, tmp_path, capsys):
    evaluation = open_evaluation(evaluated, compiled, tmp_path)
    evaluation.run()
    of_run = files_of(evaluated / 'run')
    found = files_of(tmp_path)
    for name in ('qa-000003.jsonl', 'qa-000006.jsonl'):
        assert found[f'inference_eval/{name}'] == of_run[f'inference_eval/{name}']
    assert found['results.csv'] == of_run['results.csv']
    capsys.readouterr()
    evaluate_mode.CheckpointEvaluation(make_config(evaluated), str(evaluated / 'run')).run()
    assert 'Step 6: rank is evaluated already' in capsys.readouterr().out
    assert files_of(evaluated / 'run') == of_run


def test_killed_anywhere_and_started_again_gives_the_same_files(
    evaluated, compiled, tmp_path, monkeypatch
):
    replace_file = paths.replace_file
    num_writes = 0
    dies_at = 10**6

    def replace_or_die(file, content):
        nonlocal num_writes
        num_writes += 1
        if num_writes == dies_at:
            file.with_name(f'.{file.name}.unfinished').write_bytes(content[: len(content) // 2])
            raise KeyboardInterrupt
        replace_file(file, content)

    monkeypatch.setattr(paths, 'replace_file', replace_or_die)
    task = {'infer_eval.task': 'qa,rank'}
    open_evaluation(evaluated, compiled, tmp_path / 'never', 'last', **task).run()
    expected = files_of(tmp_path / 'never')
    total = num_writes
    assert total == 8  # examples, metrics, settings and table of two tasks
    for dies_at in range(1, total + 1):
        num_writes = 0
        folder = tmp_path / str(dies_at)
        with pytest.raises(KeyboardInterrupt):
            open_evaluation(evaluated, compiled, folder, 'last', **task).run()
        open_evaluation(evaluated, compiled, folder, 'last', **task).run()
        assert files_of(folder) == expected


def test_each_new_checkpoint_is_evaluated_as_it_appears(evaluated, compiled, tmp_path, monkeypatch):
    workdir = tmp_path / 'run'
    shutil.copytree(evaluated / 'run', workdir)
    shutil.rmtree(workdir / 'inference_eval')
    (workdir / 'results.csv').unlink()
    (workdir / 'checkpoint_6').rename(tmp_path / 'later')
    sleeps = []

    def sleep(seconds):
        sleeps.append(sorted(file.name for file in (workdir / 'inference_eval').glob('*.jsonl')))
        (tmp_path / 'later').rename(workdir / 'checkpoint_6')

    monkeypatch.setattr(evaluate_mode.time, 'sleep', sleep)
    config = make_config(evaluated)
    config.infer_eval.task = 'qa'
    evaluation = evaluate_mode.CheckpointEvaluation(config, str(workdir), watch=True)
    evaluation.t5 = compiled
    evaluation.run()
    assert sleeps == [['qa-000003.jsonl', 'qa-metrics.jsonl']]
    assert [line['step'] for line in results.Results(workdir).lines('qa')] == [3, 6]
    name = 'inference_eval/qa-metrics.jsonl'
    assert (workdir / name).read_text() == (evaluated / 'run' / name).read_text()


def test_a_watch_ends_where_the_run_has_ended_early(evaluated, compiled, tmp_path, monkeypatch):
    """As with train.epochs."""
    folder = tmp_path / 'run'
    shutil.copytree(evaluated / 'run', folder)
    content = json.loads((folder / 'config.json').read_text())
    content['train']['steps'] = 1000
    (folder / 'config.json').write_text(json.dumps(content))
    monkeypatch.setattr(evaluate_mode.time, 'sleep', lambda seconds: workdir.record_end(folder, 6))
    evaluation = evaluate_mode.CheckpointEvaluation(make_config(evaluated), str(folder), watch=True)
    evaluation.run()
    assert evaluate_mode.last_step(folder) == 6
    assert json.loads((folder / 'config.json').read_text()) == content | {'last_step': 6}


def test_some_examples_of_another_split(evaluated, compiled, tmp_path):
    config = make_config(evaluated)
    config.infer_eval.task = 'qa'
    config.infer_eval.num_examples = 3
    evaluation = evaluate_mode.CheckpointEvaluation(
        config, str(evaluated / 'run' / 'checkpoint_3'), str(tmp_path), split='train'
    )
    evaluation.t5 = compiled
    evaluation.run()
    assert len(lines_of(tmp_path, 'qa-train-000003.jsonl')) == 3
    assert (tmp_path / 'results.csv').read_text().startswith('step,qa-train/em,')


def best_config(evaluated, metric):
    config = make_config(evaluated)
    config.save.best_metric = metric
    config.save.best_is = 'higher'
    return config


def test_the_best_step_by_a_task_metric(evaluated, compiled, tmp_path, capsys):
    metric = 'inference_eval/rank/accuracy'
    workdir = shutil.copytree(evaluated / 'run', tmp_path / 'run')
    values = results.Results(workdir).scores()['rank/accuracy']
    best_step = max(sorted(values), key=values.get)
    run(best_config(evaluated, metric), workdir)
    text = f'The best saved step is {best_step}, with {metric} {values[best_step]:.6g}: checkpoint_'
    assert text in capsys.readouterr().out
    config = best_config(evaluated, metric)
    config.infer_eval.task = 'qa'
    evaluation = evaluate_mode.CheckpointEvaluation(
        config, str(workdir), str(tmp_path / 'o'), 'best'
    )
    evaluation.t5 = compiled
    evaluation.run()
    name = f'inference_eval/qa-{best_step:06}.jsonl'
    assert files_of(tmp_path / 'o')[name] == files_of(workdir)[name]


@pytest.mark.parametrize(
    'metric, nearest',
    [
        ('inference_eval/qa/f2', 'inference_eval/qa/f1'),
        ('inference_eval/ranks/accuracy', 'inference_eval/rank/METRIC'),
        ('training_eval/rank/accuracy', 'training_eval/qa/accuracy'),
    ],
)
def test_a_task_metric_that_is_not_computed(evaluated, tmp_path, metric, nearest):
    config = best_config(evaluated, metric)
    message = f'save.best_metric={metric!r} is none of the metrics of this run: name one of '
    with pytest.raises(ValueError, match=f'^{message}.*{nearest}') as error:
        train.prepare(config, tmp_path)
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'metrics.jsonl').exists()


def test_only_what_a_metric_needs_is_computed(evaluated, compiled, monkeypatch):
    """The rank of choices needs scores and no answers."""
    monkeypatch.setattr(compiled, 'generate_tokens', None)
    monkeypatch.setattr(
        compiled, 'score_choices', lambda inputs, choices, num_rows: [np.zeros(len(choices[0]))]
    )
    config = make_config(evaluated)
    config.infer_eval.task = 'rank'
    config.infer_eval.batch_size = 1
    config.infer_eval.num_examples = 1
    opened = infer_eval.open_tasks(config, 'validation')
    found = infer_eval.TaskMetrics(config, 'validation', compiled.vocabulary, opened, print)
    assert found(compiled, found.tasks[0]).values == {'accuracy': 100.0}
    assert found(compiled, found.tasks[0], stop=lambda count: 14 + count) is None


BAD = [
    ({'infer_eval.task': 'without_metrics'}, {}, "'without_metrics' has no metrics: evaluate one"),
    ({'infer_eval.task': 'missing'}, {}, "all targets of split 'validation' are missing .'<unk>'"),
    ({'infer_eval.task': 'qa'}, {'split': 'test'}, "no split 'test', but train, validation: name"),
    ({}, {'split': 'dev'}, '--split=dev: must be one of train, validation, test'),
    ({}, {'split': 'test'}, "mixture 'all' has no task with metrics and the split 'test'"),
    ({'infer_eval.task': 'qa, span_corruption'}, {}, "'span_corruption' has no metrics"),
    ({'infer_eval.task': 'qu'}, {}, "data.task='qu' is unknown: the nearest names are qa"),
    ({'decode.num_return': 2}, {}, 'decode.num_return=2: an evaluation takes one answer'),
    ({'decode.beam_size': 2, 'decode.temperature': 1.0}, {}, 'a beam search draws nothing'),
    ({}, {'step': '4'}, '--step=4: .* has no checkpoint_4, but those of 3, 6: name some of'),
    ({}, {'step': 'x'}, '--step=x: .* has no checkpoint_x'),
    ({}, {'step': '3', 'watch': True}, '--step=3 with --watch: all checkpoints are evaluated'),
    ({}, {'path': 'checkpoint_3', 'watch': True}, '--watch: .*checkpoint_3 is no run with check'),
    ({}, {'path': 'checkpoint_3', 'step': 'all'}, '--step=all: .*checkpoint_3 is no run with'),
    ({}, {'path': 'nothing'}, 'nothing'),
    ({}, {'output_dir': '/dev/null/x'}, '--output_dir=/dev/null/x: /dev/null is a file'),
]


@pytest.mark.parametrize('changes, flags, message', BAD, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_in_one_line(evaluated, changes, flags, message):
    config = make_config(evaluated)
    config.update_from_flattened_dict(changes)
    flags = dict(flags)
    path = evaluated / 'run' / flags.pop('path', '')
    with pytest.raises((ValueError, OSError), match=message) as error:
        evaluate_mode.CheckpointEvaluation(config, str(path), **flags)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'name, text, step',
    [
        *[
            ('inference_eval/qa-metrics.jsonl', x, 'last')
            for x in DAMAGED_LINES['inference_eval/qa-metrics.jsonl']
        ],
        *[('metrics.jsonl', x, 'best') for x in DAMAGED_LINES['metrics.jsonl'][:5]],
    ],
    ids=lambda text: text[:30],
)
def test_a_damaged_line_is_named(evaluated, tmp_path, name, text, step):
    shutil.copytree(evaluated / 'run', tmp_path / 'run')
    damage_line(tmp_path / 'run' / name, 2, text)
    before = files_of(tmp_path / 'run')
    with pytest.raises(ValueError) as error:
        evaluate_mode.CheckpointEvaluation(make_config(evaluated), str(tmp_path / 'run'), step=step)
    assert f'line 2 of {tmp_path / "run" / name}' in str(error.value)
    assert 'restore the file from a copy' in str(error.value)
    assert files_of(tmp_path / 'run') == before


def test_damaged_files_on_the_command_line(evaluated, command_line, tmp_path):
    run = shutil.copytree(evaluated / 'run', tmp_path / 'run')
    good = (run / 'config.json').read_text()
    arguments = ['--mode=evaluate', f'--checkpoint={run}']
    odd = json.loads(good)
    odd['decode']['beam_size'] = 'one'
    for text in (good[:99], '[1]', json.dumps(odd)):
        (run / 'config.json').write_text(text)
        result = command_line(*arguments)
        assert result.status == 2
        assert f'{run}/config.json' in result.stderr
        assert len(result.stderr.splitlines()) == 1
    (run / 'config.json').write_text(good)
    damage_line(run / 'inference_eval/qa-metrics.jsonl', 1, '{"step": 3, "f1": "5"}')
    result = command_line(*arguments)
    assert result.status == 2
    assert f'line 1 of {run}/inference_eval/qa-metrics.jsonl' in result.stderr
    (run / 'inference_eval/qa-metrics.jsonl').unlink()
    (run / 'results.csv').write_text('odd')
    result = command_line(*arguments, '--config.infer_eval.task=rank')
    assert result.status == 0, result.stderr
    assert (run / 'results.csv').read_text().startswith('step,rank/accuracy')


def test_a_folder_that_may_not_be_written_is_named(evaluated, open_path):
    (open_path / 'there').mkdir(mode=0o555)
    chosen = evaluate_mode.Chosen(evaluated / 'run', is_run=True, steps=[6])
    for name in ('there', 'there/new/below'):
        with pytest.raises(ValueError) as error, another_user():
            evaluate_mode.output_folder(chosen, str(open_path / name))
        assert f'{open_path / name} cannot be written' in str(error.value)
        assert '--output_dir' in str(error.value)


def test_a_full_disk_is_named(evaluated, compiled, tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    evaluation = open_evaluation(
        evaluated, compiled, tmp_path / 'out', 'last', **{'infer_eval.task': 'rank'}
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, 'fsync', fail)
        with pytest.raises(OSError) as error:
            evaluation.run()
    assert f'{tmp_path / "out"} cannot be written (No space left' in str(error.value)
    assert '--output_dir' in str(error.value)
    evaluation.run()
    assert (tmp_path / 'out/results.csv').exists()


def test_training_refuses_tasks_that_cannot_be_evaluated(evaluated, tmp_path):
    config = make_config(evaluated)
    config.infer_eval.task = 'without_metrics'
    with pytest.raises(ValueError, match="task 'without_metrics' has no metrics"):
        train.prepare(config, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
    config.infer_eval.every_steps = 0
    infer_eval.check_settings(config)


def test_another_vocabulary_and_a_folder_without_one(evaluated, tmp_path, uninterrupted):
    config = make_config(evaluated)
    with pytest.raises(ValueError, match="data.vocabulary='bytes' .* is not the vocabulary of"):
        evaluate_mode.CheckpointEvaluation(config, str(uninterrupted))
    golden = ROOT / 'tests' / 'golden' / 't5x_t5_1_1_tiny'
    with pytest.raises(ValueError, match='is in no run of this program, .* name a folder with'):
        evaluate_mode.CheckpointEvaluation(config, str(golden / 'checkpoint_6'))
    config.data.vocabulary = ''
    with pytest.raises(ValueError, match='has no vocabulary: texts need the one that it was'):
        evaluate_mode.CheckpointEvaluation(config, str(golden / 'checkpoint_6'), str(tmp_path))


def test_records_of_the_settings_are_those_of_data_task_alone(evaluated):
    config = make_config(evaluated).data
    config.files = 'mine.jsonl'
    config.validation_split = 'test'
    assert infer_eval.settings_of_task(config, 'qa') is config
    other = infer_eval.settings_of_task(config, 'rank')
    assert (other.task, other.files, other.validation_split) == ('rank', '', '')
    assert tasks.find(other).files.endswith('train.jsonl')


@pytest.mark.slow
def test_the_choices_of_an_input_are_scored_as_if_alone(compiled):
    inputs = ['é', 'two words', 'x' * 40]
    choices = [['a'], ['b', 'longer than b', ''], ['c', 'd' * 40]]
    found = compiled.score_choices(inputs, choices, num_rows=4)
    for text, of_input, scores in zip(inputs, choices, found, strict=True):
        expected = compiled.score([text] * len(of_input), of_input)
        np.testing.assert_allclose(scores, expected, rtol=1e-5)
    with pytest.raises(ValueError, match='3 inputs and the choices of 2: give each input one'):
        compiled.score_choices(inputs, choices[:2])
    with pytest.raises(ValueError, match='1 inputs and the choices of 1: give each input one'):
        compiled.score_choices(['a'], [[]])


def test_the_command_line(evaluated, command_line):
    """Without --config the settings are those of the run."""
    mode = '--mode=evaluate'
    result = command_line(mode, f'--checkpoint={evaluated / "run"}', '--step=3')
    assert result.status == 0, result.stderr
    assert 'Step 3: rank_by_length is evaluated already' in result.stdout
    result = command_line(mode)
    assert (result.status, result.stdout) == (2, '')
    assert '--mode=evaluate needs --checkpoint=RUN' in result.stderr
    result = command_line('--config=configs/tiny.py', '--step=3')
    assert result.status == 2
    assert '--step is not for --mode=train: it needs --mode=evaluate' in result.stderr


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on(evaluated, command_line, tmp_path):
    """Killed when the first results are there, before the others are."""
    arguments = ['--mode=evaluate', f'--checkpoint={evaluated / "run"}', '--step=all']
    never = command_line(*arguments, f'--output_dir={tmp_path / "never"}')
    assert never.status == 0, never.stderr
    process = command_line.start(*arguments, f'--output_dir={tmp_path / "killed"}')
    while not (tmp_path / 'killed' / 'inference_eval' / 'qa-000003.jsonl').exists():
        assert process.poll() is None
    process.send_signal(9)
    assert process.wait().status == -9
    again = command_line(*arguments, f'--output_dir={tmp_path / "killed"}')
    assert again.status == 0, again.stderr
    assert files_of(tmp_path / 'killed') == files_of(tmp_path / 'never')


@pytest.mark.slow
def test_a_mesh_gives_the_same_results(evaluated, compiled, tmp_path):
    open_evaluation(evaluated, compiled, tmp_path / 'one').run()
    changes = {'mesh.data': 2, 'mesh.model': 2}
    open_evaluation(evaluated, None, tmp_path / 'four', **changes).run()
    for name in ('qa-000006.jsonl', 'rank-000006.jsonl'):
        lines = zip(
            lines_of(tmp_path / 'one', name), lines_of(tmp_path / 'four', name), strict=True
        )
        for line, on_four in lines:
            assert on_four.pop('score', 0) == pytest.approx(line.pop('score', 0), rel=1e-4)
            assert on_four == line
