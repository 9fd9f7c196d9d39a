"""Load a user's own Python files, and name the line if their code fails. Imports no jax."""

import contextlib
import functools
import inspect
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType

import paths
from randomness import digest

LIBRARIES = [sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib')]
PROGRAM = pathlib.Path(__file__).parent
MAX_LENGTH = 600  # characters; some messages of JAX are pages
Code = pathlib.Path | str | type | Callable  # a user's file, its name, class or function
MODULE = 'user_module'  # prefix of the names of users' files in sys.modules


class UserError(ValueError):
    """An error in a user's code, in one line. `frames`: the user's lines of its traceback."""

    def __init__(self, message: str, frames: str = ''):
        super().__init__(message)
        self.frames = frames


def module_file(setting: str, module: str) -> pathlib.Path:
    """Return the file that a setting such as data.module names: a path, or a name in the current folder."""
    file = paths.disk_path(module)
    if not file.is_file() and file.name and file.suffix != '.py':
        file = file.with_name(file.name + '.py')
    if not file.is_file():
        raise ValueError(f'{setting}={module!r}: {file} is not a file: name a Python file')
    return file


def load_module(file: pathlib.Path, content: bytes) -> ModuleType:
    """Run a user's Python file, with this content, once. Raises UserError for its errors."""
    name = f'{MODULE} {digest([content])} {file}'
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses look here
    try:
        with running(file):
            exec(compile(content, str(file), 'exec', dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def running(code: Code | None = None, task: str = '') -> Iterator[None]:
    """Raise UserError for an error of a user's code, with the user's line that led to it.

    If no line is known, the message names the beginning of `code`. `task`: the name of its task. These errors are raised
    as they are: an interrupt; a ValueError of this program to which no line of the user led, without `task`; without
    `code`, any error to which no line of the user led.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        # The first two frames are this function and its caller.
        frames = traceback.extract_tb(error.__traceback__)[2:]
        own = [frame for frame in frames if is_users(frame.filename)]
        program = [frame for frame in frames if is_in_program(frame.filename)]
        is_ours = isinstance(error, ValueError) and frames[-1:] == program[-1:]
        if code is None and not (own and isinstance(error, Exception)):
            raise
        if is_ours and not own and not task:
            raise
        text = f'{type(error).__name__}: {error}'.removesuffix(': ')
        place = place_of_frame(own[-1]) if own else place_of(code or '')
        if program and not own and not task:
            text += f' ({place_of_frame(program[-1])})'
        lines = traceback.format_list(own)
        if isinstance(error, SyntaxError) and not str(error.filename).startswith('<'):
            place = f'{error.filename or code}, line {error.lineno or 1}'
            text = error.msg
            lines += traceback.format_exception_only(error)[:-1]
        name = f'task {task!r}' if task else ''
        message = ' '.join(': '.join(filter(None, [name, place, text])).split())
        raise UserError(message[:MAX_LENGTH], ''.join(lines)) from error


def is_users(file: str) -> bool:
    """Return whether a file with code is a user's; a loaded one may lie beside this file."""
    is_loaded = any(x.startswith(MODULE) and x.endswith(f' {file}') for x in sys.modules)
    return is_loaded or not file.startswith(('<', f'{PROGRAM}/', *LIBRARIES))


def is_in_program(file: str) -> bool:
    """Return whether a file with code belongs to this program."""
    is_below = file.startswith(f'{PROGRAM}/') and not file.startswith(tuple(LIBRARIES))
    return is_below and not is_users(file)


def place_of_frame(frame: traceback.FrameSummary) -> str:
    return f'{frame.filename}, line {frame.lineno}'


def place_of(code: Code) -> str:
    """Return the file, or the file and first line of a user's function or class; '' for one of ours."""
    if isinstance(code, pathlib.Path | str):
        return str(code)
    while isinstance(code, functools.partial):
        code = code.func
    if not isinstance(code, type) and not hasattr(code, '__code__'):
        code = type(code).__call__
    with contextlib.suppress(OSError, TypeError):  # no source
        file = inspect.getsourcefile(code)
        if file is not None and is_users(file):
            return f'{file}, line {inspect.getsourcelines(code)[1]}'
    return ''


def frames_of(error: BaseException) -> str:
    """Return the user's lines of the traceback behind an error; '' if their code did not run."""
    cause: BaseException | None = error
    seen = []  # causes may form a ring
    while cause is not None and cause not in seen:
        if isinstance(cause, UserError):
            return cause.frames
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return ''
