"""Task metrics in training and of checkpoints: the numbers, the files, kills and bad input."""

import gzip
import json
import os
import shutil

import numpy as np
import pytest
from permissions import another_user
from questions import make_config
from runs import ROOT, metrics_of, run
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import infer
import paths
from messages import Refused
from modes import evaluate as evaluate_mode
from prepare import prepare
from run import results, workdir
from run import task_metrics as infer_eval
from run.console import Console
from tasks import metrics

GOLDEN = ROOT / 'tests' / 'golden' / 't5x_t5_1_1_tiny' / 'checkpoint_6'


@pytest.fixture(scope='module')
def loaded(evaluated):
    """The model of checkpoint_6, which is compiled once for all tests, and its parameters."""
    t5 = infer.load(evaluated / 'run' / 'checkpoint_6')
    return t5, t5.arrays


@pytest.fixture
def compiled(loaded):
    """The same model with its own parameters: an evaluation gives it those of other steps."""
    t5, arrays = loaded
    t5.arrays = arrays
    return t5


def open_evaluation(
    evaluated, compiled, output_dir='', step='', path='', split='', watch=False, **changes
):
    """A CheckpointEvaluation of a run, by default that in `evaluated`, on one device."""
    config = make_config(evaluated)
    config.update_from_flattened_dict(changes)
    evaluation = evaluate_mode.CheckpointEvaluation(
        config, str(path or evaluated / 'run'), str(output_dir), step, split, watch
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
    assert max(map(len, inputs)) == 32  # a question was cut
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
    numbers = [[row['n'], i] for row in rows for i in range(len(row['choices']))]
    assert [line['input']['idx'] for line in lines] == numbers
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
    files |= {f'{name}-settings.json' for name in names} | {'.lock'}
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
    evaluation = open_evaluation(evaluated, compiled, tmp_path, 'all')
    evaluation.run()
    of_run = files_of(evaluated / 'run')
    found = files_of(tmp_path)
    for name in ('qa-000003.jsonl', 'qa-000006.jsonl'):
        assert found[f'inference_eval/{name}'] == of_run[f'inference_eval/{name}']
    assert found['results.csv'] == of_run['results.csv']
    capsys.readouterr()
    open_evaluation(evaluated, None).run()
    assert 'Step 6: rank is evaluated already' in capsys.readouterr().out
    assert files_of(evaluated / 'run') == of_run


def test_the_settings_of_the_model_count(evaluated, tmp_path):
    flags = {'checkpoint': str(evaluated / 'run'), 'output_dir': str(tmp_path)}
    evaluation = evaluate_mode.prepare(None, {'model.num_encoder_layers': 5}, **flags)
    with pytest.raises(Refused, match='checkpoint_6'):
        evaluation.run()
    with pytest.raises(Refused, match='model.module='):
        evaluate_mode.prepare(None, {'model.module': 'nothing.py'}, **flags)
    changes = {'restore.dtype': 'bfloat16', 'infer_eval.task': 'rank'}
    evaluate_mode.prepare(None, changes, **flags).run()
    hashes = results.Results(tmp_path).entries('rank')
    assert hashes.keys() == {'6'}
    assert hashes != results.Results(evaluated / 'run').entries('rank')


def test_results_of_a_model_that_was_exchanged_are_not_taken(evaluated, tmp_path):
    """Also beside the model."""
    model = shutil.copytree(ROOT / 'tests/golden/hf_t5_1_1', tmp_path / 'model')
    changes = {'data.module': f'{evaluated}/mine.py', 'data.task': 'rank', 'mesh.data': 1}
    changes['data.vocabulary'] = 'bytes'
    for output_dir in (tmp_path, tmp_path / 'out', model):
        flags = {'checkpoint': str(model), 'output_dir': str(output_dir)}
        evaluate_mode.prepare(None, changes, **flags).run()
        evaluate_mode.prepare(None, changes, **flags)
        os.utime(model / 'model.safetensors', ns=(0, 0))
        with pytest.raises(Refused, match='rank at step 0 from other files'):
            evaluate_mode.prepare(None, changes, **flags)
        shutil.copy2(ROOT / 'tests/golden/hf_t5_1_1/model.safetensors', model)


@pytest.fixture
def evaluated_copy(evaluated, tmp_path):
    """A copy of the run that a test may change, beside another file of questions."""
    text = (evaluated / 'validation.jsonl').read_text().replace('perhaps', 'never')
    (tmp_path / 'other.jsonl').write_text(text)
    (tmp_path / 'other.jsonl.gz').write_bytes(gzip.compress(text.encode()))
    return shutil.copytree(evaluated / 'run', tmp_path / 'run')


def evaluation_of(evaluated, run, changes, **flags):
    """Return an evaluation of `qa`, as the command line prepares it."""
    changes = {'mesh.data': 1, 'infer_eval.task': 'qa', **changes}
    if 'data.validation_files' in changes:
        changes['data.files'] = f'{evaluated}/train.jsonl'
    flags = {'checkpoint': str(run), **flags}
    return evaluate_mode.prepare(None, changes, **flags)


def test_other_files_and_settings_never_replace_the_results_of_a_run(evaluated, evaluated_copy):
    """They are refused before anything is compiled, with what differs and where to write them."""
    folder = evaluated_copy.parent
    before = files_of(evaluated_copy)
    for changes, flags, names in [
        ({'data.validation_files': f'{folder}/oth*.jsonl'}, {}, [f'{folder}/other.jsonl']),
        ({'data.validation_files': f'{folder}/other.jsonl.gz'}, {}, [f'{folder}/other.jsonl.gz']),
        ({'decode.beam_size': 4}, {}, ['qa at step 6 ']),
        ({'infer_eval.num_examples': 3}, {}, ['qa at step 6 ']),
        ({'restore.dtype': 'bfloat16'}, {}, ['qa at step 6 ']),
        ({'data.lengths.inputs': 16}, {}, ['qa at step 6 ']),
        ({'decode.alpha': 1.0}, {'step': 'all'}, ['qa at step 3, 6 ']),
        ({'decode.alpha': 1.0}, {'watch': True}, ['qa at step 3, 6 ']),
        (
            {'decode.alpha': 1.0},
            {'checkpoint': f'{evaluated_copy}/checkpoint_3'},
            ['qa at step 3 '],
        ),
    ]:
        with pytest.raises(Refused) as error:
            evaluation_of(evaluated, evaluated_copy, changes, **flags)
        assert all(name in str(error.value) for name in [*names, '--output_dir'])
    assert files_of(evaluated_copy) == before


def test_other_files_are_refused_before_the_run_has_results(evaluated, evaluated_copy, capsys):
    """Else they would have the name of its own. Its own file may have moved, but not changed."""
    shutil.rmtree(evaluated_copy / 'inference_eval')
    other = evaluated_copy.parent / 'other.jsonl'
    with pytest.raises(Refused, match=str(other)):
        evaluation_of(evaluated, evaluated_copy, {'data.validation_files': str(other)})
    moved = evaluated_copy.parent / 'moved.jsonl'
    text = (evaluated / 'validation.jsonl').read_text()
    moved.write_text(text)
    shutil.copytree(evaluated / 'run/inference_eval', evaluated_copy / 'inference_eval')
    evaluation_of(evaluated, evaluated_copy, {'data.validation_files': str(moved)}).run()
    assert 'Step 6: qa is evaluated already.' in capsys.readouterr().out
    moved.write_text(text.replace('"a": "yes"', '"a": "yez"'))  # of the same size
    with pytest.raises(Refused, match=str(moved)):
        evaluation_of(evaluated, evaluated_copy, {'data.validation_files': str(moved)})


def test_the_split_test_of_one_file_and_of_another(evaluated, evaluated_copy, capsys):
    """The first has a column of its own; the second is refused, and may be written elsewhere."""
    folder = evaluated_copy.parent
    (folder / 'b').mkdir()
    for name, word in (('other.jsonl', 'maybe'), ('b/other.jsonl', 'never')):
        text = (evaluated / 'validation.jsonl').read_text().replace('perhaps', word)
        (folder / name).write_text(text)

    def evaluate(name):
        changes = {'data.test_files': f'{folder}/{name}'}
        evaluation_of(evaluated, evaluated_copy, changes, split='test').run()

    table = (evaluated_copy / 'results.csv').read_text()
    events = sorted((evaluated_copy / 'inference_eval' / 'qa').iterdir())
    evaluate('other.jsonl')
    rows = (evaluated_copy / 'results.csv').read_text().splitlines()
    assert rows[0] == 'step,qa-test/em,qa-test/f1,' + table.splitlines()[0].removeprefix('step,')
    for row, row_before in zip(rows, table.splitlines(), strict=True):
        assert row.endswith(row_before.partition(',')[2])
    assert len(lines_of(evaluated_copy, 'qa-test-000006.jsonl')) == 7
    assert sorted((evaluated_copy / 'inference_eval' / 'qa').iterdir()) == events
    assert metrics_of(evaluated_copy) == metrics_of(evaluated / 'run')  # they tell the best step
    before = files_of(evaluated_copy)
    with pytest.raises(Refused, match='qa-test at step 6 '):
        evaluate('b/other.jsonl')
    evaluate('other.jsonl')
    assert 'qa-test is evaluated already' in capsys.readouterr().out
    assert files_of(evaluated_copy) == before


def test_a_run_that_goes_on_with_other_settings_keeps_its_results(evaluated, tmp_path, capsys):
    """Files for the split test are such settings, too, which do not concern the examples of `rank`."""
    folder = shutil.copytree(evaluated / 'run', tmp_path / 'run')
    lines = [line for line in metrics_of(folder) if line['run'] != 'inference_eval/qa']
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    before = files_of(folder / 'inference_eval')
    config = make_config(evaluated)
    config.infer_eval.num_examples = 3
    config.data.test_files = f'{evaluated}/validation.jsonl'
    run(config, folder)
    assert 'keeps its results of qa' in capsys.readouterr().out
    assert files_of(folder / 'inference_eval') == before
    assert metrics_of(folder)[-1]['run'] == 'inference_eval/qa'
    assert (folder / 'results.csv').read_text() == (evaluated / 'run/results.csv').read_text()


@pytest.mark.slow
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
    task = {'infer_eval.task': 'qa'}
    open_evaluation(evaluated, compiled, path=workdir, watch=True, **task).run()
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
    open_evaluation(evaluated, compiled, path=folder, watch=True).run()
    assert evaluate_mode.last_step(folder) == 6
    assert json.loads((folder / 'config.json').read_text()) == content | {'last_step': 6}


def test_some_examples_of_another_split(evaluated, compiled, tmp_path):
    changes = {'infer_eval.task': 'qa', 'infer_eval.num_examples': 3}
    path = evaluated / 'run' / 'checkpoint_3'
    open_evaluation(evaluated, compiled, tmp_path, path=path, split='train', **changes).run()
    assert len(lines_of(tmp_path, 'qa-train-000003.jsonl')) == 3
    assert (tmp_path / 'results.csv').read_text().startswith('step,qa-train/em,')


def test_a_limit_leaves_no_input_without_some_of_its_choices(evaluated, compiled):
    config = make_config(evaluated)
    config.infer_eval.task = 'rank'
    numbers = {}
    for limit in (0, 1, 2, 3, 4, 5):  # the inputs have 1, 2, 3, 1, ... choices
        config.infer_eval.num_examples = limit
        groups = (config.data, config.infer_eval, config.decode)
        opened = infer_eval.open_tasks(*groups)
        found = infer_eval.read_tasks(Console(), opened, compiled.vocabulary, *groups)
        numbers[limit] = [example.fields['idx'] for example in found[0].examples]
    complete = numbers[0]
    for limit in (1, 2, 3, 4, 5):
        assert numbers[limit] == complete[: len(numbers[limit])]
    assert [len(numbers[limit]) for limit in (1, 2, 3, 4, 5)] == [1, 3, 3, 6, 6]


def test_the_best_step_by_a_task_metric(evaluated, compiled, tmp_path, capsys):
    metric = 'inference_eval/rank/accuracy'
    workdir = shutil.copytree(evaluated / 'run', tmp_path / 'run')
    values = results.Results(workdir).scores()['rank/accuracy']
    best_step = max(sorted(values), key=values.get)
    best = {'save.best_metric': metric, 'save.best_is': 'higher'}
    config = make_config(evaluated)
    config.update_from_flattened_dict(best)
    run(config, workdir)
    text = f'The best saved step is {best_step}, with {metric} {values[best_step]:.6g}: checkpoint_'
    assert text in capsys.readouterr().out
    best['infer_eval.task'] = 'qa'
    open_evaluation(evaluated, compiled, tmp_path / 'o', 'best', workdir, **best).run()
    name = f'inference_eval/qa-{best_step:06}.jsonl'
    assert files_of(tmp_path / 'o')[name] == files_of(workdir)[name]


def test_training_refuses_what_cannot_be_evaluated(evaluated, tmp_path):
    """The nearest metric is named first."""
    config = make_config(evaluated)
    config.save.best_is = 'higher'
    for config.save.best_metric, nearest in [
        ('inference_eval/qa/f2', 'inference_eval/qa/f1'),
        ('inference_eval/ranks/accuracy', 'inference_eval/rank/METRIC'),
        ('training_eval/rank/accuracy', 'training_eval/qa/accuracy'),
    ]:
        with pytest.raises(Refused, match=f'{config.save.best_metric}.* {nearest}'):
            prepare(config, tmp_path / 'run')
    assert not (tmp_path / 'run' / 'metrics.jsonl').exists()


# Settings, flags, and what is named.
BAD = [
    ({'infer_eval.task': 'without_metrics'}, {}, "'without_metrics'"),
    ({'infer_eval.task': 'qa'}, {'split': 'test'}, "'qa' .*'test'"),
    ({}, {'split': 'dev'}, '--split=dev'),
    ({}, {'split': 'test'}, "'all' .*'test'"),
    ({'infer_eval.task': 'qa, span_corruption'}, {}, "'span_corruption'"),
    ({'infer_eval.task': 'qu'}, {}, "data.task='qu'"),
    ({'decode.num_return': 2}, {}, 'decode.num_return=2'),
    ({'decode.beam_size': 2, 'decode.temperature': 1.0}, {}, 'beam'),
    ({}, {'step': '4'}, 'step=4: .* 3, 6'),
    ({}, {'step': '3', 'watch': True}, '--step=3 with --watch'),
    ({}, {'path': 'checkpoint_3', 'watch': True}, '--watch: .*checkpoint_3'),
    ({}, {'path': 'checkpoint_3', 'step': 'all'}, '--step=all: .*checkpoint_3'),
    ({}, {'path': 'nothing'}, 'nothing'),
    ({}, {'output_dir': '/dev/null/x'}, '/dev/null/x: '),
    ({}, {'path': GOLDEN}, '--output_dir'),
    ({'data.vocabulary': ''}, {'path': GOLDEN, 'output_dir': '/tmp'}, 'data.vocabulary'),
]


def test_bad_input_is_refused(evaluated):
    for changes, flags, named in BAD:
        flags = flags | {'path': evaluated / 'run' / flags.get('path', '')}
        with pytest.raises((Refused, OSError), match=named):
            open_evaluation(evaluated, None, **flags, **changes)


def test_damaged_files_of_a_run(evaluated, tmp_path):
    folder = shutil.copytree(evaluated / 'run', tmp_path / 'run')
    good = (folder / 'config.json').read_text()
    for text in (good[:99], '[1]'):
        (folder / 'config.json').write_text(text)
        with pytest.raises(Refused, match=f'{folder}/config.json'):
            evaluation_of(evaluated, folder, {})
    (folder / 'config.json').write_text(good)
    (folder / 'results.csv').write_text('odd')
    evaluation_of(evaluated, folder, {'infer_eval.task': 'rank'}).run()
    assert (folder / 'results.csv').read_text() == (evaluated / 'run/results.csv').read_text()


def test_a_folder_that_cannot_be_written_is_named(evaluated, compiled, open_path, monkeypatch):
    """One that is read-only, and one on a full disk."""
    (open_path / 'there').mkdir(mode=0o555)
    for name in ('there', 'there/new/below'):
        with pytest.raises(Refused) as error, another_user():
            evaluate_mode.output_folder(evaluated / 'run', str(open_path / name))
        assert str(open_path / name) in str(error.value)
    task = {'infer_eval.task': 'rank'}
    evaluation = open_evaluation(evaluated, compiled, open_path / 'out', 'last', **task)
    with monkeypatch.context() as patch:
        full = open('/dev/full', 'wb', buffering=0)  # noqa: SIM115
        patch.setattr(os, 'fsync', lambda descriptor: full.write(b'a'))
        with pytest.raises(OSError) as error:
            evaluation.run()
    assert str(open_path / 'out') in str(error.value)
    evaluation.run()
    assert (open_path / 'out/results.csv').exists()


def test_the_command_line(evaluated, command_line):
    """Without --config the settings are those of the run."""
    mode = '--mode=evaluate'
    result = command_line(mode, f'--checkpoint={evaluated / "run"}', '--step=3')
    assert result.status == 0, result.stderr
    assert 'Step 3: rank_by_length is evaluated already' in result.stdout
    with pytest.raises(Refused, match='--checkpoint'):
        evaluate_mode.prepare(None, {}, checkpoint='')
