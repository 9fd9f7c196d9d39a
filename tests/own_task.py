"""A task whose function of the kind that the environment variable FAIL names raises an error."""

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

def as_text(text, example, is_target):
    if os.environ.get('FAIL') == 'postprocessor' and not is_target:
        raise KeyError('no answer')
    return text

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
        postprocess_fn=as_text,
        metric_fns=[count],
    )
]
"""


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
