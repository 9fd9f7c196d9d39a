"""A user's own Python files: loading one, and naming their line where their code fails.

Imports no jax.
"""

import contextlib
import functools
import pathlib
import sysconfig
import traceback
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import paths

LIBRARIES = [sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib')]
PROGRAM = pathlib.Path(__file__).parent
MAX_LENGTH = 600  # of a message; some of JAX's are pages
LOADED: set[str] = set()  # the files that were loaded; they may lie beside this one


class UserError(ValueError):
    """An error in a user's code, in one line. `frames`: their lines of its traceback."""

    def __init__(self, message: str, frames: str = ''):
        super().__init__(message)
        self.frames = frames


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

    Raises UserError for whatever the file raises.
    """
    module = ModuleType('user_module')
    module.__file__ = str(file)
    LOADED.add(str(file))
    with running(file):
        exec(compile(content, str(file), 'exec', dont_inherit=True), module.__dict__)
    return module


@contextlib.contextmanager
def running(code: Any, task: str = '') -> Iterator[None]:
    """Raise UserError for whatever a user's code raises, but for an interrupt.

    `code`: the file, place or function that runs, which is named where no line of the user's is in
    the traceback. `task`: the name of the task that it is of. An error without a line of the user's that
    has a message of ours about no task is raised as it is.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        found = traceback.extract_tb(error.__traceback__)
        frames = found[2:]  # without this function and its caller
        own = [frame for frame in frames if is_users(frame.filename)]
        program = [frame for frame in frames if is_in_program(frame.filename)]
        is_ours = isinstance(error, ValueError) and frames[-1:] == program[-1:]
        if is_ours and not own and not task:
            raise
        text = f'{type(error).__name__}: {error}'.removesuffix(': ')
        place = place_of(code)
        if own:
            place = place_of_frame(own[-1])
        elif program and not task:
            text += f' ({place_of_frame(program[-1])})'
        lines = traceback.format_list(own)
        if isinstance(error, SyntaxError) and not str(error.filename).startswith('<'):
            place = f'{error.filename or code}, line {error.lineno or 1}'
            text = error.msg
            lines += traceback.format_exception_only(error)[:-1]
        name = f'task {task!r}' if task else ''
        message = ': '.join(filter(None, [name, place, text]))
        raise UserError(f'{" ".join(message.split()):.{MAX_LENGTH}}', ''.join(lines)) from error


def is_users(file: str) -> bool:
    """Return whether a file with code is a user's."""
    return file in LOADED or not file.startswith(('<', f'{PROGRAM}/', *LIBRARIES))


def is_in_program(file: str) -> bool:
    """Return whether a file with code is one of this program's."""
    return pathlib.Path(file).parent == PROGRAM and file not in LOADED


def place_of_frame(frame: traceback.FrameSummary) -> str:
    return f'{frame.filename}, line {frame.lineno}'


def place_of(code: Any) -> str:
    """Return the file, or the file and line where a user's function begins; '' for one of ours."""
    if isinstance(code, pathlib.Path | str):
        return str(code)
    while isinstance(code, functools.partial):
        code = code.func
    if not hasattr(code, '__code__'):
        code = type(code).__call__
    found = getattr(code, '__code__', None)
    if found is None or not is_users(found.co_filename):
        return ''
    return f'{found.co_filename}, line {found.co_firstlineno}'


def frames_of(error: BaseException) -> str:
    """Return the user's lines of the traceback behind an error; '' if their code did not run."""
    cause: BaseException | None = error
    seen = []  # a handler that raises the cause of its error closes a ring
    while cause is not None and cause not in seen:
        if isinstance(cause, UserError):
            return cause.frames
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return ''
