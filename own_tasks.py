"""A user's own file of tasks: a Python file with a list TASKS. Imports no jax."""

import contextlib
import functools
import pathlib
import traceback
from collections.abc import Iterator
from types import ModuleType

import paths
import settings
from mixtures import Mixture, Task
from objectives import OBJECTIVES


def own_tasks(module: str) -> dict[str, Task | Mixture]:
    """Return {name: task or mixture} of the list TASKS in data.module; none if that is ''."""
    if not module:
        return {}
    file = module_file('data.module', module)
    found = getattr(load_module(file, file.read_bytes()), 'TASKS', None)
    if not isinstance(found, list | tuple):
        raise ValueError(f'{file} has no list TASKS: write TASKS = [Task(...), Mixture(...)]')
    named: dict[str, Task | Mixture] = {}
    for entry in found:
        if not isinstance(entry, Task | Mixture):
            raise ValueError(f'{file}: TASKS has {entry!r:.40}: use tasks.Task and tasks.Mixture')
        if entry.name in named or entry.name in OBJECTIVES:
            raise ValueError(f'{file}: two tasks have the name {entry.name!r}: rename one')
        if isinstance(entry, Task) and entry.objective not in OBJECTIVES:
            raise ValueError(
                f'{file}: task {entry.name!r} has objective={entry.objective!r}: use one of '
                f'{", ".join(OBJECTIVES)}'
            )
        if isinstance(entry, Task) and entry.kind not in settings.CHOICES['data.kind']:
            raise ValueError(
                f'{file}: task {entry.name!r} has kind={entry.kind!r}: use one of '
                f'{", ".join(map(repr, settings.CHOICES["data.kind"]))}'
            )
        named[entry.name] = entry
    return named


def module_file(setting: str, module: str) -> pathlib.Path:
    """Return the file of a setting such as data.module: a path, or a name in the current folder."""
    file = paths.disk_path(module)
    if not file.is_file() and file.suffix != '.py':
        file = file.with_name(file.name + '.py')
    if not file.is_file():
        raise ValueError(f'{setting}={module!r}: {file} is no file: name a Python file')
    return file


@functools.lru_cache(maxsize=4)
def load_module(file: pathlib.Path, content: bytes) -> ModuleType:
    """Run a user's Python file, which has this content, under a name that collides with no other.

    Raises ValueError, in one line, for whatever the file raises.
    """
    module = ModuleType('user_module')
    module.__file__ = str(file)
    with in_one_line(file):
        exec(compile(content, str(file), 'exec', dont_inherit=True), module.__dict__)
    return module


@contextlib.contextmanager
def in_one_line(file: pathlib.Path) -> Iterator[None]:
    """Raise ValueError, with line and message, for an error in a user's Python file."""
    try:
        yield
    except SyntaxError as error:
        raise ValueError(
            f'{error.filename or file}, line {error.lineno or 1}: {error.msg}'
        ) from error
    except (Exception, SystemExit) as error:  # a program of the user's may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        place = str(file)
        if any(frame.filename == place for frame in frames):
            place = f'{frames[-1].filename}, line {frames[-1].lineno}'
        raise ValueError(f'{place}: {type(error).__name__}: {error}') from error
