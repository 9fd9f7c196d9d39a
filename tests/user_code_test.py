"""A user's own files: how they are loaded. tests/mistakes_test.py has their mistakes."""

import sys

import numpy as np
import pytest

import tasks
import user_code
from messages import Refused
from run import task_metrics
from run.examples import RecordExample


def load(folder, text):
    file = folder / 'own.py'
    file.write_text(text)
    return user_code.load_module(file, file.read_bytes())


def test_dataclasses_with_annotations_as_text(tmp_path):
    lines = ['from __future__ import annotations', 'import dataclasses', '@dataclasses.dataclass']
    lines += ['class Prompt:', '    text: str', "NAME = Prompt('x').text"]
    assert load(tmp_path, '\n'.join(lines)).NAME == 'x'


def test_a_file_imports_its_neighbour_and_no_file_of_ours_is_hidden(tmp_path):
    """Its folder is first in sys.path while it runs, as for a script; a module of ours stays ours."""
    (tmp_path / 'neighbour_of_own.py').write_text('X = 3')
    (tmp_path / 'messages.py').write_text('X = 4')
    before = list(sys.path)
    module = load(tmp_path, 'import messages\nfrom neighbour_of_own import X\n')
    assert module.X == 3 and module.messages.Refused is Refused
    assert sys.path == before
    assert load(tmp_path, 'import messages\nfrom neighbour_of_own import X\n') is module


@pytest.mark.parametrize('text, error', [
    ('1 / 0', ZeroDivisionError), ('x = [', SyntaxError), ('raise SystemExit(3)', SystemExit), ('import gone', ImportError),
])  # fmt: skip
def test_an_error_of_a_file_is_raised_as_it_is(tmp_path, text, error):
    before = list(sys.path)
    for _ in range(2):  # a file that failed is run again
        with pytest.raises(error):
            load(tmp_path, text)
    assert sys.path == before


def evaluated(metric_fns):
    """The metrics of a task of three examples, whose answers are their targets."""
    one = np.ones(1)
    fields = [{'inputs': 'x', 'targets': text} for text in 'cab']
    examples = [RecordExample(x, one, one, is_trimmed=False) for x in fields]
    task = tasks.Task('own', files='x', metric_fns=metric_fns)
    of_test = task_metrics.EvaluatedTask(task, 'own', 'test', examples, None, None, settings='')
    return task_metrics.compute_metrics(of_test, answers=list('cab'), scores=None)


def test_a_metric_may_change_its_lists():
    """Neither the next metric nor the examples that are written notice it."""

    def sort_and_clear(targets, predictions):
        targets.sort()
        predictions.clear()
        return {'a': 1}

    def exact(targets, predictions):
        return {'b': sum(x == y for x, y in zip(targets, predictions, strict=True)), 'c': np.nan}

    found = evaluated([sort_and_clear, exact])
    assert found.values['a'] == 1 and found.values['b'] == 3 and np.isnan(found.values['c'])
    assert [line['target'] for line in found.lines] == list('cab')


def test_metrics_that_are_none():
    for metric_fns in (
        [lambda targets, predictions: {'a': 1}] * 2,
        [lambda targets, predictions: 1.0],
    ):
        with pytest.raises((AssertionError, AttributeError)):
            evaluated(metric_fns)
