"""Which file may import which: imports point down, and each half knows nothing of the other."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
# From the bottom to the top. A file imports files of the rows above its own row only.
LAYERS = (
    ('paths', 'partition', 'settings', 'metrics', 'preprocessors', 'chart'),
    ('postprocessors', 'results', 'user_code'),
    ('best',),
    ('model', 'vocabulary', 'seqio_cache', 'parquet_source', 'checkpoint', 'optimizer', 'report'),
    ('tfds_source',),
    ('sources',),
    ('denoising',),
    ('loss', 'decode', 'objectives', 'features', 'mesh_tf', 'hugging_face'),
    ('mixtures',),
    ('own_tasks', 'task_listing', 'tasks_mt5', 'tasks_t0'),
    ('promptsource', 'own_model'),
    ('tasks',),
    ('data',),
    ('prefetch',),
    ('cache', 'infer_input'),
    ('convert', 'workdir', 'plan'),
    ('infer',),
    ('evaluate', 'infer_mode'),
    ('infer_eval',),
    ('evaluate_mode',),
    ('train',),
    ('main',),
)
HOST_SIDE = {  # without jax
    'best',
    'cache',
    'chart',
    'data',
    'denoising',
    'features',
    'infer_input',
    'metrics',
    'mixtures',
    'objectives',
    'own_tasks',
    'postprocessors',
    'prefetch',
    'preprocessors',
    'promptsource',
    'report',
    'results',
    'sources',
    'task_listing',
    'tasks',
    'tasks_mt5',
    'tasks_t0',
    'vocabulary',
    'parquet_source',
    'paths',
    'seqio_cache',
    'settings',
    'tfds_source',
    'user_code',
}
MATH = {'model', 'loss', 'decode', 'optimizer', 'partition'}  # without files and ConfigDict
FOREIGN_FORMATS = {'mesh_tf', 'hugging_face', 'convert'}
OTHER_FRAMEWORKS = {'tensorflow', 'torch', 'flax', 'gin', 'seqio', 't5', 't5x', 'clu'}


def imports_of(name):
    """Return the modules that a file of ours imports anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse((ROOT / f'{name}.py').read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.split('.')[0])
    return modules


OURS = {name for layer in LAYERS for name in layer}


def test_every_file_has_a_layer():
    assert {file.stem for file in ROOT.glob('*.py')} == OURS | {'setup'}


@pytest.mark.parametrize('name', sorted(OURS))
def test_imports_point_down(name):
    imported = imports_of(name)
    below = set()
    for layer in LAYERS:
        if name in layer:
            break
        below |= set(layer)
    assert imported & OURS <= below
    assert not imported & OTHER_FRAMEWORKS


@pytest.mark.parametrize('name', sorted(HOST_SIDE))
def test_the_host_side_needs_no_jax(name):
    assert not imports_of(name) & {'jax', 'haiku', 'optax', 'partition', 'model'}


@pytest.mark.parametrize('name', sorted(MATH))
def test_the_math_knows_no_files_and_no_config_objects(name):
    files = {'checkpoint', 'paths', 'workdir', 'ml_collections', 'settings', 'tensorstore'}
    assert not imports_of(name) & (files | FOREIGN_FORMATS)


def test_partition_and_optimizer_stand_alone():
    assert not imports_of('partition') & OURS
    assert not imports_of('optimizer') & OURS  # global arrays: no axis names


def test_checkpoint_knows_no_other_format_and_no_model():
    assert not imports_of('checkpoint') & (FOREIGN_FORMATS | {'model', 'haiku', 'train'})


def test_only_the_run_knows_training():
    for name in OURS - {'main', 'train'}:
        assert 'train' not in imports_of(name), name
    for name in ('infer', 'evaluate', 'infer_eval'):
        assert 'optimizer' not in imports_of(name), name


@pytest.mark.parametrize(
    'modules, absent',
    [
        ('checkpoint', 'haiku model convert mesh_tf hugging_face optimizer train'),
        ('data, sources, vocabulary', 'jax tensorflow_datasets'),
        ('metrics', 'jax scipy sklearn nltk'),  # each takes a second or more
        ('main', 'jax tensorflow torch'),
    ],
)
def test_what_an_import_brings(modules, absent):
    """The same in a process of its own, with all that is imported on the way."""
    program = f'import sys, {modules}; print([m for m in {absent.split()} if m in sys.modules])'
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == '[]'
