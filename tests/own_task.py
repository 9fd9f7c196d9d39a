"""Own tasks: one whose function of the kind that the environment variable FAIL names raises an error, and two with own objectives."""

import json

from runs import small_config

OWN_TASK = """
import os
import pathlib
from tasks import Task

FOLDER = pathlib.Path(__file__).parent

def read(record):
    if os.environ.get('FAIL') == 'preprocessor' and record['q'] == '50':
        raise RuntimeError('no 50')
    return [{'inputs': record['q'], 'targets': record['a']}]

def count(targets, predictions):
    if os.environ.get('FAIL') == 'metric':
        raise ZeroDivisionError('no examples')
    return {'count': len(targets)}

TASKS = [
    Task(
        'own',
        files=f'{FOLDER}/qa.jsonl',
        validation_files=f'{FOLDER}/dev.jsonl',
        preprocess_fn=read,
        metric_fns=[count],
    )
]
"""

# One objective of documents, and one of inputs and targets from scratch.
OBJECTIVES = """
import numpy as np

from data import DROPPED, Denoising, Example
from randomness import permutation, random_fractions
from tasks import Mixture, Task


class Dropping(Denoising):
    def corrupt(self, raw_ids, *key):
        is_kept = random_fractions(raw_ids.shape, 'kept', *key) < 0.5
        return np.where(is_kept, raw_ids, DROPPED), raw_ids


class Shuffled:
    features = ['inputs', 'targets']
    records_per_group = 4
    num_sentinels = 0

    def __init__(self, data_group, vocabulary):
        self.lengths = data_group.lengths

    def examples(self, names, records, *key):
        for i, name in enumerate(names):
            inputs = records[i]['inputs'][: self.lengths.inputs - 1]
            order = permutation(len(inputs), 'order', i, *key)
            targets = records[i]['targets'][: self.lengths.targets - 1]
            yield Example(np.append(inputs[order], 1), np.append(targets, 1), [name])


TASKS = [
    Task('text', files='FOLDER/text.txt', objective=Dropping),
    Task('add', files='FOLDER/add.jsonl', inputs='add: {a} {b}', targets='{sum}', objective=Shuffled),
    Mixture('all', {'text': 1, 'add': 1}),
]
"""


def write_objectives(folder, module=OBJECTIVES):
    """Write the tasks of OBJECTIVES and their records into a folder. Return the module's path."""
    lines = [f'this is line {i} of a text ' + 'and on ' * (i % 9) for i in range(60)]
    (folder / 'text.txt').write_text('\n'.join(lines))
    sums = [json.dumps({'a': i, 'b': i % 7, 'sum': i + i % 7}) for i in range(90)]
    (folder / 'add.jsonl').write_text('\n'.join(sums))
    (folder / 'objectives.py').write_text(module.replace('FOLDER', str(folder)))
    return str(folder / 'objectives.py')


def write(folder, num_rows=60):
    """Write the task and its records into a folder."""
    rows = [json.dumps({'q': f'{i}', 'a': 'yes' * (1 + i % 3)}) for i in range(num_rows)]
    (folder / 'qa.jsonl').write_text('\n'.join(rows))
    (folder / 'dev.jsonl').write_text('\n'.join(reversed(rows[20:29])))
    (folder / 'own.py').write_text(OWN_TASK)


def insert_bad_line(file, index):
    lines = file.read_text().splitlines()
    lines.insert(index, '{"q": ')
    file.write_text('\n'.join(lines))


def config(folder):
    """Return the config of a run on the task in a folder."""
    config = small_config('', steps=20)
    config.model.dropout_rate = 0.0
    config.data.files = ''
    config.data.module = str(folder / 'own.py')
    config.data.task = 'own'
    config.data.vocabulary = 'bytes'
    config.data.pack = 'no'
    config.save.every_steps = 100
    config.eval.every_steps = 4
    config.infer_eval.every_steps = 4
    config.decode.max_length = 4
    return config


def fail(*_, **__):
    raise KeyError('a fault of the host')
