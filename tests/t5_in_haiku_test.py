"""The name t5_in_haiku: aliases in the checkout; elsewhere the program beside modules of its names."""

import importlib.metadata
import inspect
import json
import pathlib
import subprocess
import sys
import traceback

import pytest
from runs import ENVIRONMENT, ROOT, small_config

import formats.open
import model
import t5_in_haiku.formats.open
import t5_in_haiku.model
from t5_in_haiku import checkpoint, run, tasks
from t5_in_haiku.tasks import Task

FOREIGN = ('model', 'data', 'tasks', 'evaluate')  # the last one is a stub of Hugging Face's
SEEN = """
import pathlib
import sys

ROOT = pathlib.Path({root!r})

def ours():
    '''Return {{name: file}} of all modules of the checkout.'''
    found = {{}}
    for name, module in list(sys.modules.items()):
        file = pathlib.Path(getattr(module, '__file__', None) or '/').resolve()
        if file.is_relative_to(ROOT) and file.name != 't5_in_haiku/__init__.py':
            found[name] = str(file.relative_to(ROOT).with_suffix(''))
    return found

def check():
    '''Assert that each of them is there once, below t5_in_haiku, and no other name is taken.'''
    for name, file in ours().items():
        if name not in ('t5_in_haiku', '__main__'):
            assert name == 't5_in_haiku.' + file.removesuffix('/__init__').replace('/', '.'), name
    for name in {foreign!r}:
        if name in sys.modules:
            assert sys.modules[name].FOREIGN == name
"""
OWN_TASKS = """
import os
import pathlib

import data  # the user's
import seen
from t5_in_haiku import tasks
from t5_in_haiku.tasks import Task

FOLDER = pathlib.Path(__file__).parent

def spell(record):
    assert data.FOREIGN == 'data'
    seen.check()
    (FOLDER / f'process-{os.getpid()}').touch()
    if os.environ.get('FAILS') and record['text'].startswith('3'):
        raise KeyError('no 3')
    return [{'inputs': record['text'], 'targets': record['text'][::-1]}]

TASKS = [tasks.Task('spell', files=f'{FOLDER}/words.jsonl', preprocess_fn=spell)]
assert Task is tasks.Task
"""
TRAIN = """
import json
import sys

import seen
from t5_in_haiku import tasks
from t5_in_haiku.configs import base

if __name__ == '__main__':
    from t5_in_haiku import infer, model
    import t5_in_haiku.modes.train
    import t5_in_haiku.train

    config = base.get_config()
    config.update(json.loads(sys.argv[1]))
    t5_in_haiku.train.train(t5_in_haiku.modes.train.prepare(config, 'run'))
    t5 = infer.load('run')
    assert isinstance(t5.config, model.T5Config)
    assert len(t5.generate(['one two'], max_length=4)) == 1
    assert t5_in_haiku.infer is infer
    for name in ('train', 'infer', 'run.prefetch', 'formats.open', 'modes.start', 'sources.tables'):
        assert f't5_in_haiku.{name}' in sys.modules, name
    assert not set(sys.modules) & {'model', 'tasks', 'evaluate'}
    import data, evaluate, model, tasks
    for module in (data, evaluate, model, tasks):
        assert module.FOREIGN == module.__name__
    seen.check()
"""


@pytest.fixture
def folder(tmp_path):
    """A user's folder, with modules of our names; `site` has t5_in_haiku alone, as an editable install."""
    for name in FOREIGN:
        (tmp_path / f'{name}.py').write_text(f'FOREIGN = {name!r}\n')
    (tmp_path / 'seen.py').write_text(SEEN.format(root=str(ROOT), foreign=FOREIGN))
    (tmp_path / 'own.py').write_text(OWN_TASKS)
    words = [json.dumps({'text': f'{i} words'}) for i in range(100)]
    (tmp_path / 'words.jsonl').write_text('\n'.join(words))
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site' / 't5_in_haiku').symlink_to(ROOT / 't5_in_haiku')
    return tmp_path


def python(*arguments, cwd, path=None, **environment):
    """Run Python in a folder, where `path` alone is added to sys.path. Return its errors."""
    environment = ENVIRONMENT | {'PYTHONPATH': str(path or cwd / 'site')} | environment
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    return done.stderr if done.returncode else ''


def settings_of(folder, **data):
    """Return the settings of two steps on the user's task, with two workers."""
    config = small_config('', steps=2)
    config.data.module = str(folder / 'own.py')
    config.data.task = 'spell'
    config.data.vocabulary = 'bytes'
    config.data.num_workers = 2
    config.data.update(data)
    return json.dumps(config.to_dict())


def test_train_and_generate_beside_modules_of_the_same_names(folder):
    (folder / 'train_it.py').write_text(TRAIN)
    assert python('train_it.py', settings_of(folder), cwd=folder) == ''
    assert len(list(folder.glob('process-*'))) == 3
