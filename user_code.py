"""Load a user's own Python files: a config, model.module, data.module, decode.module. Imports no jax."""

import contextlib
import linecache
import pathlib
import sys
from types import ModuleType

import paths
from messages import Refused
from randomness import digest

MODULE = 'user_module'  # prefix of the names of users' files in sys.modules


def module_file(setting: str, module: str, or_else: str = '') -> pathlib.Path:
    """Return the file that a setting such as data.module names: a path, or a name in the current folder."""
    file = paths.disk_path(module)
    if not file.is_file() and file.name and file.suffix != '.py':
        file = file.with_name(file.name + '.py')
    if not file.is_file():
        raise Refused(f'{setting}={module!r}: {file} is not a file: name a Python file{or_else}')
    return file


def load_module(file: pathlib.Path, content: bytes) -> ModuleType:
    """Run a user's Python file, with this content, once, with its folder first in sys.path.

    The module has a private name, so a file `tasks.py` never collides with ours. Its errors pass unchanged.
    """
    name = f'{MODULE} {digest([content])} {file}'
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module  # dataclasses look here
    linecache.checkcache(str(file))  # a traceback shows the lines that run
    sys.path.insert(0, str(file.parent))  # as Python does for a script
    try:
        exec(compile(content, str(file), 'exec', dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        with contextlib.suppress(ValueError):  # the file may have changed the list
            sys.path.remove(str(file.parent))
    return module
