"""The name t5_in_haiku: aliases in the checkout; elsewhere the program beside a user's own modules."""

import importlib
import importlib.metadata
import json
import shutil
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from forms import first_quick
from runs import ENVIRONMENT, ROOT, small_config

import formats.open
import model
import t5_in_haiku.formats.open
import t5_in_haiku.model
import tasks.names
from t5_in_haiku import checkpoint, data
from t5_in_haiku.tasks import Task

FOREIGN = ('model', 'data', 'tasks', 'evaluate')  # the last one is a stub of Hugging Face's
# An editable install adds a finder that knows one name.
EDITABLE = f"""
import importlib.util, sys

class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == 't5_in_haiku':
            return importlib.util.spec_from_file_location(name, {str(ROOT)!r} + '/t5_in_haiku/__init__.py')

sys.meta_path.insert(0, Editable)
"""
SEEN = f"""
import pathlib
import sys

ROOT = pathlib.Path({str(ROOT)!r})

def modules():
    '''Return [name, module, file without suffix] of all modules that are files of the checkout.'''
    found = []
    for name, module in list(sys.modules.items()):
        file = pathlib.Path(getattr(module, '__file__', None) or '/').resolve()
        is_library = 'site-packages' in file.parts  # of a .venv in the checkout, as README makes it
        is_ours = file.is_relative_to(ROOT) and not is_library
        if is_ours and name not in ('__main__', 't5_in_haiku'):
            found.append([name, module, str(file.relative_to(ROOT).with_suffix(''))])
    return found

def check_once():
    '''Assert that each of our files is loaded once.'''
    objects = {{}}
    for name, module, file in modules():
        assert objects.setdefault(file, module) is module, name

def check():
    '''Assert that each of our files has one name, below t5_in_haiku, and the user's have theirs.'''
    for name, _, file in modules():
        assert name == 't5_in_haiku.' + file.removesuffix('/__init__').replace('/', '.'), name
    for name in {FOREIGN!r}:
        if name in sys.modules:
            assert sys.modules[name].FOREIGN == name
"""
OWN_TASKS = """
import os
import pathlib
import sys

import data  # the user's
import seen
from t5_in_haiku import tasks
from t5_in_haiku.tasks import Task

FOLDER = pathlib.Path(__file__).parent
CHECKED = set()

def spell(record):
    assert data.FOREIGN == 'data'
    if len(sys.modules) not in CHECKED:
        seen.check()
        CHECKED.add(len(sys.modules))
        (FOLDER / f'process-{os.getpid()}').touch()
    if 'FAILS' in os.environ:
        raise KeyError(record['text'])
    return [{'inputs': record['text'], 'targets': record['text'][::-1]}]

assert Task is tasks.Task
TASKS = [Task('spell', files=f'{FOLDER}/words.parquet', preprocess_fn=spell)]
"""
TRAIN = """
import json
import sys

import seen
from t5_in_haiku import tasks
from t5_in_haiku.configs import base

if __name__ == '__main__':
    from t5_in_haiku import infer, model
    import t5_in_haiku.prepare
    import t5_in_haiku.train

    config = base.get_config()
    config.update(json.loads(sys.argv[1]))
    t5_in_haiku.train.train(t5_in_haiku.prepare.prepare(config, 'run'))
    t5 = infer.load('run')
    assert isinstance(t5.config, model.T5Config)
    assert len(t5.generate(['one two'], max_length=4)) == 1
    assert t5_in_haiku.infer is infer
    for name in ('run.prefetch', 'formats.open', 'run.start', 'sources.parquet'):
        assert f't5_in_haiku.{name}' in sys.modules, name  # the last one is imported late
    assert not set(sys.modules) & {'model', 'tasks', 'evaluate'}
    import data, evaluate, model, tasks
    seen.check()
"""


@pytest.fixture
def folder(tmp_path):
    """A user's folder with modules of our names. In `site`, t5_in_haiku alone is installed."""
    for name in FOREIGN:
        (tmp_path / f'{name}.py').write_text(f'FOREIGN = {name!r}\n')
    (tmp_path / 'seen.py').write_text(SEEN)
    (tmp_path / 'own.py').write_text(OWN_TASKS)
    words = pyarrow.table({'text': [f'{i} words' for i in range(100)]})
    pyarrow.parquet.write_table(words, tmp_path / 'words.parquet')
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site' / 'sitecustomize.py').write_text(EDITABLE)
    return tmp_path


@pytest.fixture
def empty(tmp_path):
    """A user's folder without modules of our names."""
    (tmp_path / 'seen.py').write_text(SEEN)
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site' / 'sitecustomize.py').write_text(EDITABLE)
    return tmp_path


def errors_of(*arguments, cwd, **environment):
    """Run Python in a folder, with what `site` there has. Return its errors; '' after status 0."""
    environment = ENVIRONMENT | {'PYTHONPATH': str(cwd / 'site')} | environment
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    return done.stderr if done.returncode else ''


def settings_of(folder):
    """Return the settings of two steps on the user's task, with two workers."""
    config = small_config('', steps=2)
    config.model.dropout_rate = 0.0
    config.data.module = str(folder / 'own.py')
    config.data.task = 'spell'
    config.data.vocabulary = 'bytes'
    config.data.num_workers = 2
    return json.dumps(config.to_dict())


# Elsewhere.


@pytest.mark.slow
def test_train_and_generate_beside_modules_of_the_same_names(folder):
    (folder / 'train_it.py').write_text(TRAIN)
    assert errors_of('train_it.py', settings_of(folder), cwd=folder) == ''
    assert len(list(folder.glob('process-*'))) == 3


@pytest.mark.slow
def test_an_error_in_a_worker_names_the_users_line(folder):
    (folder / 'train_it.py').write_text(TRAIN)
    errors = errors_of('train_it.py', settings_of(folder), cwd=folder, FAILS='yes')
    line = 1 + OWN_TASKS.splitlines().index("        raise KeyError(record['text'])")
    assert f'{folder}/own.py, line {line}: KeyError' in errors.splitlines()[-1]


CACHE = """
import seen
from t5_in_haiku.configs import base
from t5_in_haiku.modes import cache

if __name__ == '__main__':
    config = base.get_config().data
    config.update(module='own.py', task='spell', vocabulary='bytes', cache_dirs='caches', num_workers=2)
    config.validation_fraction = 0.1
    print(*cache.cache(config, 1, 1))
    seen.check()
"""


@pytest.mark.slow
def test_cache_beside_modules_of_the_same_names(folder):
    (folder / 'cache_it.py').write_text(CACHE)
    assert errors_of('cache_it.py', cwd=folder) == ''
    assert list(folder.glob('process-*'))


BESIDE_FOREIGN = {
    'all files': """
import importlib, pathlib, pkgutil, seen, sys
for file in sorted([*seen.ROOT.glob('*.py'), *seen.ROOT.glob('*/*.py')]):
    parts = file.relative_to(seen.ROOT).with_suffix('').parts
    is_program = (file.parent / '__init__.py').exists() or len(parts) == 1
    if is_program and parts[0] not in ('setup', 't5_in_haiku') and parts[-1] != 'promptsource':
        importlib.import_module('.'.join(['t5_in_haiku', *parts]).removesuffix('.__init__'))
seen.check()
assert len(seen.modules()) > 90
import data, evaluate, model, tasks
seen.check()
""",
    'other names': """
import importlib, seen
for name in ('setup', 'tests', 'docs', 'nothing', 'tasks.nothing', 't5_in_haiku'):
    try:
        importlib.import_module(f't5_in_haiku.{name}')
    except ModuleNotFoundError as error:
        assert error.name == f't5_in_haiku.{name}'
    else:
        raise AssertionError(name)
try:
    from t5_in_haiku.paths import nothing
except ImportError as error:
    assert "'nothing' from 't5_in_haiku.paths'" in str(error)
""",
    'lines, source and pickles': """
import importlib, inspect, pickle, traceback
from t5_in_haiku import paths, sources, tasks
try:
    tasks.get('nothing')
except ValueError as error:
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[1].filename == tasks.__file__
    assert frames[1].line.startswith('raise names.unknown(')
assert inspect.getsource(tasks.get).startswith('def get(')
assert pickle.loads(pickle.dumps(sources.FileRecord)) is sources.FileRecord
disk_path = paths.disk_path
assert importlib.reload(paths) is paths and paths.disk_path is not disk_path
""",
    "a user's files": """
import pathlib, seen
from t5_in_haiku import model, user_code
from t5_in_haiku.tasks import names
assert set(names.own_tasks('own.py')) == {'spell'}
file = pathlib.Path('own_model.py')
file.write_text('from t5_in_haiku import model, kernels\\nfrom model import FOREIGN')
assert user_code.load_module(file, file.read_bytes()).model is model
seen.check()
""",
    'the checkout in sys.path, first': """
import seen, sys
sys.path.append(str(seen.ROOT))
from t5_in_haiku import stream, tasks
seen.check()
import data, paths
assert paths is sys.modules['t5_in_haiku.paths'] and data.FOREIGN
seen.check_once()
""",
    'the checkout in sys.path, later': """
import seen, sys
import t5_in_haiku.tasks
sys.path.append(str(seen.ROOT))
import paths, sources.parquet, tasks
assert paths is sys.modules['t5_in_haiku.paths'] and tasks.FOREIGN
assert sources.parquet is sys.modules['t5_in_haiku.sources.parquet']
seen.check_once()
""",
    'one of ours is loaded': """
import seen, sys
sys.path.append(str(seen.ROOT))
import checkpoint, sources.files
from t5_in_haiku import checkpoint as ours, sources as our_sources, tasks
assert ours is checkpoint and our_sources is sources
assert tasks.Task.__module__ == 't5_in_haiku.tasks.mixtures'
seen.check_once()
""",
    'a stub without a file': """
import sys, types
sys.modules['paths'] = types.ModuleType('paths')
from t5_in_haiku import paths, user_code
assert user_code.paths is paths is not sys.modules['paths']
""",
}


@pytest.mark.parametrize('case', first_quick(BESIDE_FOREIGN, 2))
def test_beside_modules_of_the_same_names(folder, case):
    assert errors_of('-c', BESIDE_FOREIGN[case], cwd=folder) == ''


IN_EMPTY = {
    'elsewhere': """
import importlib, seen
from t5_in_haiku import stream, tasks
seen.check()
try:
    import tasks
except ModuleNotFoundError as error:
    assert error.name == 'tasks'
else:
    raise AssertionError
""",
    'the checkout in sys.path, first': """
import seen, sys
sys.path.append(str(seen.ROOT))
from t5_in_haiku import tasks as ours
import tasks, tasks.open
assert ours is tasks and tasks.__name__ == 'tasks'
seen.check_once()
""",
    'the checkout in sys.path, later': """
import pathlib, seen, sys
from t5_in_haiku.tasks import names
sys.path.insert(0, str(seen.ROOT))
pathlib.Path('own_tasks.py').write_text('from tasks import Task\\nTASKS = [Task("a", files="a")]')
assert set(names.own_tasks('own_tasks.py')) == {'a'}
seen.check_once()
""",
    'in the checkout, then here': """
import os, pathlib, sys
folder = os.getcwd()
os.chdir(sys.argv[1])
from t5_in_haiku import paths
os.chdir(folder)
pathlib.Path('user_code.py').write_text('FOREIGN = 1')
from t5_in_haiku import user_code as ours
import seen, user_code
assert ours is user_code and user_code.__name__ == 'user_code' and user_code.paths is paths
seen.check_once()
""",
    'one of ours is loaded in the checkout': """
import os, sys
folder = os.getcwd()
os.chdir(sys.argv[1])
import paths
os.chdir(folder)
from t5_in_haiku import paths as ours, user_code
import seen
assert ours is paths is user_code.paths
seen.check_once()
""",
}


@pytest.mark.parametrize('case', IN_EMPTY)
def test_in_another_folder(empty, case):
    assert errors_of('-c', IN_EMPTY[case], str(ROOT), cwd=empty) == ''


def test_without_its_checkout(tmp_path):
    """A package that is copied, as `pip install .` does, says how to install it."""
    shutil.copytree(ROOT / 't5_in_haiku', tmp_path / 'site' / 't5_in_haiku')
    errors = errors_of('-c', 'from t5_in_haiku import infer', cwd=tmp_path).splitlines()
    assert errors[-1].startswith('ImportError') and 'pip install -e .' in errors[-1]


# In the checkout.


def test_members_are_the_modules_that_are_loaded():
    assert t5_in_haiku.model is model
    assert t5_in_haiku.formats.open is formats.open
    assert Task is tasks.Task
    assert checkpoint.__name__ == checkpoint.__spec__.name == 'checkpoint'
    assert data is sys.modules['data'] is sys.modules['t5_in_haiku.data']
    with pytest.raises(ModuleNotFoundError, match=r"'t5_in_haiku\.tasks\.nothing'"):
        importlib.import_module('t5_in_haiku.tasks.nothing')


@pytest.mark.parametrize('first', ['import tasks.open', 'from t5_in_haiku.tasks import open'])
def test_python_in_the_checkout(first):
    program = f"""{first}
import t5_in_haiku, tasks.open
from t5_in_haiku import tasks as ours
assert ours is tasks and ours.open is tasks.open and tasks.open.__spec__.name == 'tasks.open'
assert t5_in_haiku.IN_CHECKOUT
"""
    assert errors_of('-c', program, cwd=ROOT) == ''


CONFIG = """
from t5_in_haiku.configs import tiny
from configs import base

def get_config():
    config = tiny.get_config()
    assert config.keys() == base.get_config().keys()
    config.data.module = 'tasks.py'
    config.data.task = 'spell'
    return config
"""
TASKS = """
import t5_in_haiku.tasks
from tasks import Task

assert t5_in_haiku.tasks.Task is Task
TASKS = [t5_in_haiku.tasks.Task('spell', files='words.parquet', inputs='{text}', targets='{text}')]
"""


def test_main_py_with_files_of_another_folder(folder):
    """A user's config and tasks may name the program's modules either way."""
    (folder / 'config.py').write_text(CONFIG)
    (folder / 'tasks.py').write_text(TASKS)
    arguments = ('--mode=tasks', 'spell', '--config=config.py', '--examples=1')
    assert errors_of(ROOT / 'main.py', *arguments, cwd=folder) == ''


# The install.


def test_one_name_is_published():
    program = (
        'import setuptools; setuptools.setup = lambda **x: print(x["packages"], x["py_modules"])'
    )
    done = subprocess.run(
        [sys.executable, '-c', f'{program}\nimport setup'],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["['t5_in_haiku']", '[]'], done.stderr
    assert not (ROOT / '__init__.py').exists()


@pytest.mark.slow
def test_the_editable_install(folder):
    origins = []
    for installed in importlib.metadata.distributions(name='t5-haiku'):  # one is the egg-info here
        origins.append(json.loads(installed.read_text('direct_url.json') or '{}').get('url'))
    if ROOT.as_uri() not in origins:
        pytest.skip('needs pip install -e . of this checkout')
    for file in (folder / 'site').iterdir():
        file.unlink()
    assert errors_of('-c', BESIDE_FOREIGN['all files'], cwd=folder) == ''
