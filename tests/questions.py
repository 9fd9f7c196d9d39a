"""Small tasks from text to text with metrics: questions, and the same with choices to rank."""

import json

from runs import small_config

MODULE = """
import functools
from tasks import metrics
from tasks import t0 as tasks_t0
from sources import NO_SPLIT
from tasks import Mixture, Task

FILES = {{'files': {folder!r} + '/train.jsonl', 'validation_files': {folder!r} + '/validation.jsonl'}}


def question(fields):
    yield {{'inputs': fields['q'], 'targets': fields['a']}}


def choices(fields):
    for i, choice in enumerate(fields['choices']):
        yield {{
            'inputs': fields['q'],
            'targets': choice,
            'idx': [fields['n'], i],
            'is_correct': choice == fields['a'],
        }}


def rank(name, normalize):
    metric = functools.partial(
        metrics.rank_classification, normalize_by_target_length=normalize
    )
    return Task(
        name,
        **FILES,
        preprocess_fn=choices,
        postprocess_fn=tasks_t0.rank_classification,
        metric_fns=[metric],
    )


TASKS = [
    Task('qa', **FILES, preprocess_fn=question, metric_fns=[metrics.squad],
         postprocess_fn=lambda text, example, is_target: [text] if is_target else text),
    rank('rank', False),
    rank('rank_by_length', True),
    Task('without_metrics', **FILES, preprocess_fn=question),
    Task('missing', **FILES, preprocess_fn=lambda fields: [{{'inputs': 'a', 'targets': '<unk>'}}],
         metric_fns=[metrics.accuracy]),
    Mixture('all', {{'qa': 1, 'rank': 1, 'rank_by_length': 0, 'without_metrics': 1}}),
]
"""
WORDS = ['yes', 'no', 'perhaps, said nobody']


def write_task(folder):
    """Write questions of several lengths, with 1 to 3 choices, and a file of tasks on them."""
    for name, num_rows in (('train', 30), ('validation', 7)):
        rows = []
        for n in range(num_rows):
            choices = WORDS[: 1 + n % 3]
            row = {'n': n, 'q': f'is {n} é?' + ' or' * (n % 5 * 3), 'choices': choices}
            rows.append(row | {'a': choices[n % len(choices)]})
        (folder / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    (folder / 'mine.py').write_text(MODULE.format(folder=str(folder)))


def make_config(folder):
    """Return the config of a small run on `qa` with task metrics of all."""
    config = small_config('')
    config.data.files = ''
    config.data.module = f'{folder}/mine.py'
    config.data.task = 'qa'
    config.data.vocabulary = 'bytes'
    config.infer_eval.every_steps = 3
    config.infer_eval.task = 'all'
    config.infer_eval.batch_size = 16
    config.decode.max_length = 7
    return config
