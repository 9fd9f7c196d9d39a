"""Which file may import which: imports point down, and the core opens packages through few doors."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = (
    'answers',
    'configs',
    'families',
    'formats',
    'modes',
    'run',
    'sources',
    't5_in_haiku',
    'tasks',
)
# From the bottom to the top: a module imports from rows above its own row, or from its own package.
LAYERS = (
    {'kernels', 'randomness', 'messages'},
    {'kernels_gpu', 'run.buckets', 'run.hub', 'configs.setting'},
    {'run.hub_client'},
    {'paths', 'answers.options'},
    {'partition', 'user_code', 'configs'},
    {'family'},
    {'loss'},
    {'decode'},
    {'model', 'optimizer', 'state_names', 'checkpoint', 'vocabulary'},
    {'data', 'sources', 'families'},
    {'stream', 'answers'},
    {'tasks', 'formats'},
    {'validation', 'infer'},
    {'run'},
    {'train'},
    {'loop'},
    {'prepare'},
    {'modes'},
    {'main'},
)
# The core in reading order, and how many lines each file may have.
CORE = {
    'main': 76,
    'train': 259,
    'loop': 304,
    'model': 895,
    'family': 90,
    'kernels': 284,
    'kernels_gpu': 97,
    'loss': 192,
    'optimizer': 284,
    'partition': 207,
    'prepare': 365,
    'data': 475,
    'stream': 471,
    'vocabulary': 231,
    'validation': 270,
    'checkpoint': 537,
    'decode': 425,
    'infer': 423,
    'messages': 42,
    'paths': 248,
    'randomness': 56,
    'state_names': 103,
    'user_code': 47,
}
# Through which files the core opens a package. All may read the settings and their ranges.
DOORS = {
    'main': {'modes'},
    'prepare': {'run', 'sources', 'tasks', 'formats', 'families'},
    'loop': {'run'},
    'stream': {'sources'},
    'infer': {'formats', 'answers'},
    'paths': {'run'},
}
# What is imported inside of functions alone.
LATE_DOORS = {'infer': 'formats'}
# What a part of the program does without: jax on the host side; files and settings in the math.
HOST_SIDE = ('data', 'stream', 'vocabulary', 'paths', 'randomness', 'user_code')
MATH = (
    'model',
    'family',
    'kernels',
    'kernels_gpu',
    'loss',
    'decode',
    'optimizer',
    'partition',
    'state_names',
)
ABSENT = dict.fromkeys(HOST_SIDE, {'jax', 'haiku', 'optax', 'partition', 'model'})
ABSENT |= dict.fromkeys(MATH, {'checkpoint', 'paths', 'tensorstore', *PACKAGES})
OTHER_FRAMEWORKS = {'tensorflow', 'torch', 'flax', 'gin', 'seqio', 't5', 't5x', 'clu'}


def files():
    """Return {dotted name: file} of all modules of the program."""
    found = {}
    for file in [*ROOT.glob('*.py'), *(x for name in PACKAGES for x in ROOT.glob(f'{name}/*.py'))]:
        parts = file.relative_to(ROOT).with_suffix('').parts
        found['.'.join(part for part in parts if part != '__init__')] = file
    del found['setup']
    return found


FILES = files()


def imports_of(name, late=True):
    """Return the dotted names that a module imports; `late`: also inside its functions."""
    tree = ast.parse(FILES[name].read_text())
    modules = set()
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module)
            modules |= {f'{node.module}.{alias.name}' for alias in node.names}
    return modules


def ours_of(name, late=True):
    return (imports_of(name, late) & FILES.keys()) - {name}


def room_of(name):
    """Return the package of a module, or the module if it lies at the top."""
    return name.split('.')[0]


def row_of(name):
    """Return the lowest row of LAYERS that names a module or its package."""
    return min(i for i, layer in enumerate(LAYERS) if name in layer or room_of(name) in layer)


def num_lines(modules):
    return sum(len(FILES[module].read_text().splitlines()) for module in modules)


def test_only_the_core_lies_at_the_top_and_keeps_its_budget():
    at_the_top = {name for name in FILES if name not in PACKAGES and '.' not in name}
    assert at_the_top == CORE.keys()
    for name, budget in CORE.items():
        assert num_lines([name]) <= budget, name


@pytest.mark.parametrize('name', sorted(FILES))
def test_imports_point_down(name):
    for imported in ours_of(name):
        is_beside = room_of(imported) == room_of(name)
        is_empty = not FILES[imported].read_text()
        is_below = row_of(imported) < row_of(name)
        assert is_beside or is_empty or is_below or imported == LATE_DOORS.get(name), imported
    assert not {room_of(module) for module in imports_of(name)} & OTHER_FRAMEWORKS


@pytest.mark.parametrize('name', sorted(CORE))
def test_the_core_knows_only_what_it_has_to(name):
    packages = {room_of(imported) for imported in ours_of(name)} & set(PACKAGES)
    assert packages - {'configs'} <= DOORS.get(name, set())
    if name in LATE_DOORS:
        at_import = ours_of(name, late=False)
        assert not any(imported.startswith(LATE_DOORS[name]) for imported in at_import)
    if name == 'stream':
        assert not any(imported.startswith('sources.') for imported in ours_of(name))  # its types
    assert not {room_of(imported) for imported in imports_of(name)} & ABSENT.get(name, set())


def brought_by(name, late):
    """Return the modules that importing `name` imports, with the packages that they lie in."""
    brought = set()
    todo = [name]
    while todo:
        module = todo.pop()
        if module not in brought:
            brought.add(module)
            todo += ours_of(module, late) | {room_of(module)} & FILES.keys()
    return {module for module in brought if room_of(module) != 'configs'}


@pytest.mark.parametrize(
    'name, max_files, max_lines, max_lines_late',
    [('loop', 35, 8100, 8100), ('infer', 22, 4650, 8500), ('model', 8, 2240, 2240)],
)
def test_how_much_an_import_brings(name, max_files, max_lines, max_lines_late):
    """Who wants to read or fork a part of the program reads what it imports."""
    brought = brought_by(name, late=False)
    assert len(brought) <= max_files, sorted(brought)
    assert num_lines(brought) <= max_lines
    assert num_lines(brought_by(name, late=True)) <= max_lines_late


@pytest.mark.parametrize(
    'modules, absent',
    [
        ('checkpoint', 'haiku model optimizer train'),
        ('data, stream, sources, vocabulary', 'jax tensorflow_datasets pyarrow'),
        ('tasks, tasks.open', 'jax scipy sklearn nltk'),  # each takes a second or more
        ('main', 'jax tensorflow torch'),
        ('t5_in_haiku', 'jax numpy absl'),
    ],
)
def test_what_an_import_brings(modules, absent):
    """The same in a process of its own, with all that is imported on the way."""
    program = f'import sys, {modules}; print([m for m in {absent.split()} if m in sys.modules])'
    done = subprocess.run(
        [sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == '[]'
