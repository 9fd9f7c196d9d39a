"""Which file may import which: imports point down, and the core opens packages through few doors."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ('configs', 'families', 'formats', 'modes', 'run', 'sources', 't5_in_haiku', 'tasks')
# From the bottom to the top: a module imports from rows above its own row, or from its own package.
LAYERS = (
    {'kernels', 'randomness', 'messages'},
    {'paths'},
    {'partition', 'user_code', 'configs', 'run.buckets'},
    {'decode'},
    {'model', 'loss', 'optimizer', 'state_names', 'checkpoint', 'vocabulary'},
    {'data', 'sources', 'families'},
    {'stream'},
    {'tasks', 'formats'},
    {'validation', 'infer'},
    {'run'},
    {'train'},
    {'prepare'},
    {'modes'},
    {'main'},
)
CORE = {
    'main', 'train', 'model', 'kernels', 'loss', 'optimizer', 'partition', 'data', 'stream', 'vocabulary', 'validation',
    'checkpoint', 'decode', 'infer', 'messages', 'paths', 'prepare', 'randomness', 'state_names', 'user_code',
}  # fmt: skip
# Through which files the core opens a package. All may read the settings and their ranges.
DOORS = {
    'main': {'modes'},
    'prepare': {'run', 'sources', 'tasks', 'formats'},
    'train': {'run'},
    'stream': {'sources'},
    'infer': {'formats'},
    'paths': {'run'},
}
# What is imported inside of functions alone: foreign formats, and the clients of clouds, which lie above `paths`.
LATE_DOORS = {'infer': 'formats', 'paths': 'run.buckets'}
HOST_SIDE = {'data', 'stream', 'vocabulary', 'paths', 'randomness', 'user_code'}  # without jax
MATH = {
    'model',
    'kernels',
    'loss',
    'decode',
    'optimizer',
    'partition',
    'state_names',
}  # without files and ConfigDict
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


def rows_of(name):
    """Return the rows of LAYERS that name a module or its package."""
    return [i for i, layer in enumerate(LAYERS) if name in layer or room_of(name) in layer]


def test_only_the_core_lies_at_the_top():
    assert {name for name in FILES if name not in PACKAGES and '.' not in name} == CORE


@pytest.mark.parametrize('name', sorted(FILES))
def test_imports_point_down(name):
    for imported in ours_of(name):
        is_beside = room_of(imported) == room_of(name)
        is_empty = not FILES[imported].read_text()
        is_below = min(rows_of(imported)) < min(rows_of(name))
        assert is_beside or is_empty or is_below or imported == LATE_DOORS.get(name), imported
    assert not {room_of(module) for module in imports_of(name)} & OTHER_FRAMEWORKS


@pytest.mark.parametrize('name', sorted(CORE))
def test_the_core_opens_packages_through_its_doors(name):
    packages = {room_of(imported) for imported in ours_of(name)} & set(PACKAGES)
    assert packages - {'configs'} <= DOORS.get(name, set())
    if name in LATE_DOORS:
        at_import = ours_of(name, late=False)
        assert not any(imported.startswith(LATE_DOORS[name]) for imported in at_import)
    if name == 'stream':
        assert not any(imported.startswith('sources.') for imported in ours_of(name))  # its types


def test_imports_have_no_circle():
    done = set()

    def visit(name, path):
        assert name not in path, [*path, name]
        if name not in done:
            for imported in ours_of(name, late=False):
                # A package's own modules are imported while it is.
                if not name.startswith(f'{imported}.'):
                    visit(imported, [*path, name])
            done.add(name)

    for name in FILES:
        visit(name, [])


@pytest.mark.parametrize('name', sorted(HOST_SIDE))
def test_the_host_side_needs_no_jax(name):
    assert not imports_of(name) & {'jax', 'haiku', 'optax', 'partition', 'model'}


@pytest.mark.parametrize('name', sorted(MATH))
def test_the_math_knows_no_files_and_no_config_objects(name):
    assert not imports_of(name) & {'checkpoint', 'paths', 'tensorstore'}
    if name != 'optimizer':  # its table reads config.optimizer
        assert 'ml_collections' not in imports_of(name)
    assert not {room_of(imported) for imported in ours_of(name)} & set(PACKAGES)


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
    [('train', 28, 8200, 12000), ('infer', 12, 4600, 8300), ('model', 5, 2270, 2270)],
)
def test_how_much_an_import_brings(name, max_files, max_lines, max_lines_late):
    """Who wants to read or fork a part of the program reads what it imports."""

    def num_lines(modules):
        return sum(len(FILES[module].read_text().splitlines()) for module in modules)

    brought = brought_by(name, late=False)
    assert len(brought) <= max_files, sorted(brought)
    assert num_lines(brought) <= max_lines
    assert num_lines(brought_by(name, late=True)) <= max_lines_late


def test_partition_kernels_and_optimizer_stand_alone():
    assert not ours_of('kernels')
    assert ours_of('partition') <= {'kernels', 'messages'}
    assert ours_of('optimizer') <= {'kernels', 'messages'}  # global arrays: no axis names


def test_nothing_imports_the_name_for_other_folders():
    assert {room_of(module) for module in imports_of('t5_in_haiku')} <= sys.stdlib_module_names
    assert not any('t5_in_haiku' in map(room_of, imports_of(name)) for name in FILES)


@pytest.mark.parametrize('name', sorted(FILES))
def test_names_known_at_run_time_are_relative(name):
    """t5_in_haiku rewrites `import`: import_module('.t5', tasks.__name__), not 'tasks.t5'."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith('import_module'):
            [first, *_] = ast.unparse(node.args[0]).strip('f\'"').split('.')
            assert first not in map(room_of, FILES), ast.unparse(node)


def test_sources_types_know_no_format():
    assert {name for name in ours_of('sources') if room_of(name) == 'sources'} <= {'sources.files'}


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


# The process is left alone. The names that change it, and who may use them outside modes/process.py: worker processes
# change themselves, and train() in a notebook listens to SIGINT.
CHANGES = re.compile(
    r'os\.(_exit|dup2|execv\w*|environ|putenv|unsetenv)|signal\.(signal|set_wakeup_fd)|gc\.\w+|mallopt|'
    r'(sys|threading)\.excepthook|sys\.std(in|out|err)|warnings\.(showwarning|\w*filter\w*)|csv\.field_size_limit|'
    r'faulthandler\.\w+|resource\.setrlimit|_exit|execv'
)
MAY_CHANGE = {
    'run.prefetch': {'gc.set_threshold', 'signal.signal'},
    'run.agreement': {'signal.signal'},
    'sources.tables': {'csv.field_size_limit'},  # only its own csv module
}


def changes_of(name):
    """Return what a module assigns to or calls that changes the process."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call):
            function = node.func
            if ast.unparse(function).startswith('os.environ.'):
                if function.attr in ('setdefault', 'update', 'pop', 'clear'):
                    found.add('os.environ')
            else:
                targets = [function]
        for target in targets:
            if isinstance(target, ast.Subscript):
                target = target.value
            if CHANGES.fullmatch(ast.unparse(target)):
                found.add(ast.unparse(target))
    return found


@pytest.mark.parametrize('name', sorted(FILES))
def test_one_file_changes_the_process(name):
    if name == 'modes.process':
        assert changes_of(name) >= {'os._exit', 'os.dup2', 'os.execv', 'os.environ', 'gc.disable'}
    else:
        assert changes_of(name) <= MAY_CHANGE.get(name, set())


STATE = """
import csv, gc, importlib, os, signal, sys, threading, warnings
import absl.flags, jax, ml_collections.config_flags, numpy, tensorstore  # libraries are as they are

def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    hooks = [sys.excepthook, threading.excepthook, warnings.showwarning, sys.stdout, sys.stderr]
    return hooks, handlers, dict(os.environ), gc.isenabled(), gc.get_threshold(), csv.field_size_limit()

before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
    if state() != before:
        print(name)
        before = state()
"""


def test_imports_change_nothing_of_the_process():
    done = subprocess.run(
        [sys.executable, '-c', STATE, *sorted(FILES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


def test_tensorboards_writer_leaves_tensorflow_alone(tmp_path):
    """TensorBoard imports it where it is installed, in seconds."""
    (tmp_path / 'tensorflow.py').write_text("raise RuntimeError('imported')")
    program = (
        'import pathlib, sys; from run import workdir; folder = pathlib.Path(sys.argv[1]); '
        "workdir.Events(folder).write('train', 1, {'loss': 2.0})"
    )
    environment = os.environ | {'PYTHONPATH': str(tmp_path), 'JAX_PLATFORMS': 'cpu'}
    words = [sys.executable, '-c', program, str(tmp_path)]
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    assert len(list(tmp_path.glob('train/events.*'))) == 1
