"""The name t5_in_haiku: aliases in the checkout; elsewhere the program beside a user's own modules."""

import importlib.metadata
import shutil
import subprocess
import sys

import pytest
from runs import ENVIRONMENT, ROOT, small_config

import t5_in_haiku.tasks.open
import tasks.names
import tasks.open

FOREIGN = ('model', 'data', 'tasks', 'utils', 'evaluate')  # the last is a stub of Hugging Face's
# A user's file. `check` asserts that the program's files have their names, and the user's theirs.
OWN = """
import os, pathlib, sys
import data, evaluate, model, tasks, utils
from t5_in_haiku import ROOT
from t5_in_haiku.tasks import Task

def check():
    for name, module in sorted(sys.modules.items()):
        file = pathlib.Path(getattr(module, '__file__', None) or '/')
        if file.is_relative_to(ROOT) and 'site-packages' not in file.parts:
            assert name.startswith('t5_in_haiku') and name == module.__name__, name
    for module in (data, evaluate, model, tasks, utils):
        assert module is sys.modules[module.FOREIGN]

def spell(record):
    check()
    pathlib.Path(f'process-{os.getpid()}').touch()
    if 'FAILS' in os.environ:
        raise KeyError(record['text'])
    return [{'inputs': record['text'], 'targets': record['text'][::-1]}]

TASKS = [Task('spell', files='words.jsonl', preprocess_fn=spell)]
"""
BESIDE = """
import builtins, concurrent.futures, importlib, multiprocessing, sys, traceback
import own, t5_in_haiku.tasks.names
from t5_in_haiku import paths, tasks
assert 'jax' not in sys.modules and vars(paths)['__builtins__'] is vars(builtins)
assert set(tasks.names.own_tasks('own.py')) == {'spell'}
try:
    tasks.get('nothing')
except ValueError as error:
    [_, frame, *_] = traceback.extract_tb(error.__traceback__)
assert frame.filename == tasks.__file__ and frame.line.startswith('raise names.unknown(')
with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
    assert pool.submit(paths.disk_path, 'file').result() == paths.disk_path('file')
    pool.submit(own.check).result()
for name in ('setup', 'tests', 'tasks.nothing', 't5_in_haiku'):
    assert importlib.util.find_spec(f't5_in_haiku.{name}') is None
for name, file in t5_in_haiku.FILES.items():
    importlib.import_module(f't5_in_haiku.{name}')
    for below in file.parent.glob('[!_]*.py') if file.stem == '__init__' else ():
        if below.stem != 'promptsource':  # needs an extra
            importlib.import_module(f't5_in_haiku.{name}.{below.stem}')
own.check()
sys.path.append(str(own.ROOT))
import paths as plain_paths, sources.open
assert plain_paths is paths and sources.open is t5_in_haiku.sources.open
"""
TRAIN = """
import json, os, pathlib, sys

if __name__ == '__main__':
    import own
    from t5_in_haiku import infer, loop, prepare
    from t5_in_haiku.configs import base
    config = base.get_config()
    config.update(json.loads(sys.argv[1]))
    loop.train(prepare.prepare(config, 'run'))
    assert len(list(pathlib.Path().glob('process-*'))) == 3  # two are workers
    assert len(infer.load('run').generate(['one two'], max_length=4)) == 1
    own.check()
    os.environ['FAILS'] = 'yes'
    loop.train(prepare.prepare(config, 'other'))
"""


@pytest.fixture
def folder(tmp_path):
    """A user's folder with modules of our names. Without an editable install, t5_in_haiku is a link."""
    for name in FOREIGN:
        (tmp_path / f'{name}.py').write_text(f'FOREIGN = {name!r}')
    (tmp_path / 'own.py').write_text(OWN)
    (tmp_path / 'words.jsonl').write_text(''.join(f'{{"text": "{i} words"}}\n' for i in range(100)))
    installs = importlib.metadata.distributions(name='t5-haiku')
    if not any(f'"{ROOT.as_uri()}"' in str(x.read_text('direct_url.json')) for x in installs):
        (tmp_path / 't5_in_haiku').symlink_to(ROOT / 't5_in_haiku')
    return tmp_path


def errors_of(*arguments, cwd):
    """Run Python in a folder. Return its errors; '' after status 0."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True)
    return done.stderr if done.returncode else ''


def test_beside_a_users_modules(folder):
    assert errors_of('-c', BESIDE, cwd=folder) == ''


@pytest.mark.slow
def test_train_generate_and_fail_in_a_worker_beside_a_users_modules(folder):
    (folder / 'train_it.py').write_text(TRAIN)
    config = small_config('', steps=2)
    config.model.dropout_rate = 0.0
    config.data.update(module='own.py', task='spell', vocabulary='bytes', num_workers=2)
    errors = errors_of('train_it.py', config.to_json(), cwd=folder)
    line = 1 + OWN.splitlines().index("        raise KeyError(record['text'])")
    assert f'File "{folder}/own.py", line {line}' in errors and 'KeyError' in errors


def test_a_process_stays_in_the_checkout():
    program = """if True:
        import os, t5_in_haiku.paths
        os.chdir('/')
        import t5_in_haiku.user_code, user_code
        assert t5_in_haiku.user_code is user_code and user_code.paths is t5_in_haiku.paths"""
    assert errors_of('-c', program, cwd=ROOT) == ''


def test_both_names_are_one_module_in_the_checkout(tmp_path):
    assert t5_in_haiku.tasks is tasks and t5_in_haiku.tasks.open is tasks.open
    assert tasks.open.__name__ == tasks.open.__spec__.name == 'tasks.open'
    own = tmp_path / 'own.py'
    own.write_text('import t5_in_haiku.tasks as t\nTASKS = [t.Task("a", files="a")]')
    assert isinstance(tasks.names.own_tasks(str(own))['a'], tasks.Task)


def test_rewritten_imports_bind_the_same_names_and_are_not_cached(tmp_path):
    file = tmp_path / 'a.py'
    file.write_text('import os.path, tasks.open, data as n')
    bound = {}
    exec(t5_in_haiku.Importer('t5_in_haiku.a', str(file)).get_code('t5_in_haiku.a'), bound)
    assert bound.keys() - {'__builtins__'} == {'os', 'tasks', 'n', 't5_in_haiku'}
    assert bound['tasks'] is tasks
    assert list(tmp_path.iterdir()) == [file]


def test_without_its_checkout(tmp_path):
    """A package that is copied, as `pip install .` does, says how to install it."""
    shutil.copytree(ROOT / 't5_in_haiku', tmp_path / 't5_in_haiku')
    errors = errors_of('-c', 'import t5_in_haiku', cwd=tmp_path).splitlines()
    assert errors[-1].startswith('ImportError') and 'pip install -e .' in errors[-1]
