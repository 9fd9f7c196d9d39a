"""What the vocabulary changes of the texts of examples, before a run and beside its results."""

import contextlib
import json
import re
import types

import numpy as np
import pytest
from runs import ROOT, Program, metrics_of, small_config

import vocabulary as vocabularies
from messages import Refused
from prepare import prepare
from run import task_metrics
from run.examples import Example, text_changes
from run.train_vocabulary import train_vocabulary

MEMO = ROOT / 'tests/golden/hunt/multiline_memo.jsonl'
GOOD = vocabularies.SentencePieceVocabulary((ROOT / 'tests/golden/hunt/good.model').read_bytes())
IDS = np.array([5, 1], np.int32)


def example_of(inputs, targets):
    return Example({'inputs': inputs, 'targets': targets}, IDS, IDS, is_trimmed=False)


# Inputs, targets, whether each changes, unknown tokens, and what the sample has. This vocabulary has no
# blank for a newline, as T5's has.
TEXTS = {
    'nothing': ('Who lives?', 'it is: me', False, False, 0, ''),
    'newlines': ('Who lives?', 'it\nis', False, True, 1, r"'it\nis' becomes 'it ⁇ is'"),
    'two blanks': ('Who lives?', 'it  is', False, True, 0, "'it  is' becomes 'it is'"),
    'blanks around': ('Who lives?', ' it is ', False, True, 0, "' it is ' becomes 'it is'"),
    'characters that it lacks': ('Who lives?', 'it is éü', False, True, 1, "'it is éü' becomes"),
    'inputs': ('Who\tlives#?', 'it is', True, False, 2, r"'Who\tlives#?'"),
    'both': ('Who  is it?', 'it\r\nis', True, True, 1, r"'it\r\nis' becomes"),
    'the end of a long text': ('Who?', 'it is ' * 99 + '\n', False, True, 1, r"it is \n' becomes"),
}


@pytest.mark.parametrize('kind', TEXTS)
def test_texts_that_change(kind):
    inputs, targets, inputs_change, targets_change, num_unknown, sample = TEXTS[kind]
    same = example_of('Who?', 'it is')
    found = text_changes([same, example_of(inputs, targets)], GOOD)
    if not sample:
        assert found is None
        return
    assert found.num_changed == {'inputs': inputs_change, 'targets': targets_change}
    assert found.num_texts == {'inputs': 2, 'targets': 2}
    assert found.num_unknown_tokens == num_unknown
    assert sample in found.sample and len(found.sample) < 150 and '\n' not in str(found)
    assert text_changes([example_of(inputs, targets)], vocabularies.ByteVocabulary()) is None


def test_texts_of_task_caches():
    """They are compared where the cache has them beside the ids."""
    ids = Example({'inputs': IDS, 'targets': IDS}, IDS, IDS, is_trimmed=False)
    assert text_changes([ids], GOOD) is None
    with_text = ids._replace(fields={**ids.fields, 'targets_pretokenized': b'it\nis'})
    found = text_changes([ids, with_text], GOOD)
    assert str(found).startswith('1 of 1 targets and 0 of 0 inputs change in the vocabulary')


MODULE = """
from tasks import Task, metrics

def distance(targets, predictions):
    return {'distance': sum(t != p for t, p in zip(targets, predictions)) / len(targets)}

def closeness(targets, predictions):
    return {'closeness': -distance(targets, predictions)['distance']}

def words(targets, predictions):
    return {'words': sum(t.split() == p.split() for t, p in zip(targets, predictions)) / len(targets)}

def strict(targets, predictions):
    return {'strict': float(sum(p.index(t) == 0 for t, p in zip(targets, predictions)))}

def nothing(targets, predictions):
    return {'nothing': 0.0}

def likelihood(targets, scores):
    return {'likelihood': sum(scores) / len(scores)}

TASKS = [Task('memo', files=FILE, inputs='{inputs}', targets='{targets}',
              metric_fns=[metrics.accuracy, distance, closeness, words, nothing, likelihood]),
         Task('strict', files=FILE, inputs='{inputs}', targets='{targets}', metric_fns=[strict])]
"""
SETTINGS = {
    'data.task': 'text_to_text',
    'data.inputs': '{inputs}',
    'data.targets': '{targets}',
    'data.metrics': 'accuracy',
    'data.validation_fraction': 0.4,
    'data.lengths.targets': 24,
    'data.num_pieces': 100,
    'infer_eval.every_steps': 2,
    'train.steps': 2,
}


def memo_config(tmp_path, **changes):
    (tmp_path / 'mine.py').write_text(MODULE.replace('FILE', repr(str(MEMO))))
    config = small_config('')
    settings = {**SETTINGS, 'data.task': 'memo', 'data.module': f'{tmp_path}/mine.py'}
    settings |= {'data.inputs': '', 'data.targets': '', 'data.metrics': '', **changes}
    config.update_from_flattened_dict(settings)
    return config


def flags_of(settings):
    return [f'--config.{name}={value}' for name, value in settings.items()]


@pytest.mark.slow
def test_a_run_and_an_evaluation_say_what_changes(tmp_path, command_line):
    program = Program(tmp_path, str(MEMO), steps=2, log=1, save=2, evaluate=2)
    result = command_line(*program.arguments(tmp_path / 'run'), *flags_of(SETTINGS))
    assert result.status == 0, result.stderr
    [line] = [x for x in metrics_of(tmp_path / 'run') if x['run'].startswith('inference_eval')]
    count = line['num_targets_changed']
    assert count > 30 and line['num_inputs_changed'] == line['num_unknown_tokens'] == 0
    assert line['eval/accuracy'] == line['eval_limit/accuracy'] == 0
    changes = f'{count} of {count} targets and 0 of {count} inputs change in the vocabulary'
    sample = r"'name: \w+\\nkind: \w+' becomes 'name: \w+ kind: \w+'"
    said = f'text_to_text: {changes}, with 0 unknown token(s): '
    before, _, after = result.stdout.partition('step 1/2')
    for output in (before, after):
        assert output.count(said) == 1
        assert re.search(sample, output)
    limited = f'accuracy  0.000, of at most 0.000: {count} of {count} targets change in the voc'
    assert limited in after
    arguments = ['--mode=evaluate', f'--checkpoint={tmp_path}/run', f'--output_dir={tmp_path}/out']
    result = command_line(*arguments)
    assert result.status == 0, result.stderr
    assert limited in result.stdout and result.stdout.count(said) == 2
    metrics = (tmp_path / 'out/inference_eval/text_to_text-metrics.jsonl').read_text()
    assert json.loads(metrics) == {'step': 2, 'accuracy': 0.0}  # as SeqIO's logger writes it


# The metric, which values are better, the vocabulary, and whether it is refused.
BEST = [
    ('memo/accuracy', 'higher', '', True),
    ('memo/accuracy', 'lower', '', False),
    ('memo/accuracy', 'higher', 'bytes', False),
    ('memo/nothing', 'higher', 'bytes', True),  # also for answers that are the targets
    ('memo/closeness', 'higher', 'bytes', False),  # 0 is its best value
    ('memo/distance', 'lower', '', False),
    ('memo/words', 'higher', '', False),
    ('memo/likelihood', 'higher', '', False),  # nothing is known of scores
]


@pytest.fixture(scope='module')
def pieces():
    texts = [json.loads(line)['targets'] for line in MEMO.open()]
    return vocabularies.SentencePieceVocabulary(train_vocabulary(texts, 60))


def test_which_best_metrics_are_refused(tmp_path, pieces):
    config = memo_config(tmp_path)
    opened = task_metrics.open_tasks(config, 'validation')
    tasks = {}
    for name, vocabulary in (('', pieces), ('bytes', vocabularies.ByteVocabulary())):
        tasks[name] = task_metrics.read_tasks(config, 'validation', vocabulary, opened, print)
    held_out = types.SimpleNamespace(of_each_task=lambda: [])
    for name, best_is, vocabulary, is_refused in BEST:
        config.save.update(best_metric=f'inference_eval/{name}', best_is=best_is)
        expected = contextlib.nullcontext()
        if is_refused:
            expected = pytest.raises(Refused, match=f'save.best_metric=.*{name}')
        with expected:
            task_metrics.check_best_metric(config, held_out, tasks[vocabulary])


def test_the_limits_of_metrics(tmp_path, pieces):
    """Of those that are worse for the targets as the vocabulary decodes them, in both directions."""
    config = memo_config(tmp_path, **{'infer_eval.task': 'memo,strict'})
    opened = task_metrics.open_tasks(config, 'validation')
    memo, strict = task_metrics.read_tasks(config, 'validation', pieces, opened, print)
    limits = {name: (limit.side, limit.value) for name, limit in memo.limits.items()}
    assert limits == {
        'accuracy': ('at most', 0),
        'distance': ('at least', 1),
        'closeness': ('at most', -1),
    }
    assert strict.limits == {} and strict.changes is not None  # its metric fails on such answers
    described = memo.describe(2, {'accuracy': 0.0, 'words': 0.5})
    lines = described.splitlines()
    assert lines[0] == 'Step 2, validation:' and lines[2] == '  memo  words     0.500'
    assert ', of at most 0.000: ' in lines[1] and lines[3].startswith('memo: ')


@pytest.mark.parametrize(
    'vocabulary', ['', pytest.param('bytes', marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_without_task_metrics_the_first_training_texts_are_compared(
    tmp_path, monkeypatch, capsys, vocabulary
):
    monkeypatch.setattr('train.compile_step', None)
    config = memo_config(tmp_path, **{'infer_eval.every_steps': 0, 'data.vocabulary': vocabulary})
    with pytest.raises(TypeError):
        prepare(config, tmp_path / 'run')
    said = re.search(r'memo, the first \d\d training examples: ', capsys.readouterr().out)
    assert bool(said) == (vocabulary == '')


def test_settings_of_the_records_are_not_those_of_other_tasks(tmp_path):
    """Records of data.task may have semicolons, and those of the task that is evaluated have commas."""
    (tmp_path / 'a.csv').write_text('inputs;targets\na;b\n')
    (tmp_path / 'b.csv').write_text('inputs,targets\na,b; c\n')
    changes = {
        'data.task': 'text_to_text',
        'data.files': f'{tmp_path}/a.csv',
        'data.delimiter': ';',
    }
    config = memo_config(tmp_path, **changes, **{'infer_eval.task': 'memo'})
    module = MODULE.replace('FILE', repr(f'{tmp_path}/b.csv'))
    (tmp_path / 'mine.py').write_text(module)
    [task] = task_metrics.open_tasks(config, 'train')
    assert [record.fields['targets'] for record in task.source.records('train')] == ['b; c']
