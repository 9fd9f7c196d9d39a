"""A user's own model (model.module): a Python file that changes a copy of model.py.

    def change(model):
        model.ACTIVATIONS['squared_relu'] = lambda x: jax.nn.relu(x) ** 2

`change` sets names of model.py: tables, functions, modules. Each own model is a copy of its own, and
model.py stays as it is, so that models do not mix in a process. A checkpoint records the file,
without which its parameters have no meaning; no code is run from there.
"""

import functools
import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import model
import partition
import paths
import user_code


def load(settings: Mapping[str, Any]) -> tuple[ModuleType, model.T5Config]:
    """Return the model of the settings of config.model, and its T5Config.

    The model is model.py, or a copy that the file model.module has changed; that file's path is
    absolute in the T5Config. Raises ValueError for settings that are invalid, and UserError for an
    error in the file.
    """
    if not settings['module']:
        return model, model.T5Config(**settings)
    file = user_code.module_file('model.module', settings['module'])
    return load_file(file, file.read_bytes(), settings)


def load_file(
    file: Path, content: bytes, settings: Mapping[str, Any]
) -> tuple[ModuleType, model.T5Config]:
    """Return the own model in a file that has this content, and its T5Config."""
    changed = changed_copy(file, content)
    with user_code.running(file):
        config = changed.T5Config(**{**settings, 'module': str(file)})
        shapes = changed.shapes(config)
        try:
            partition.param_specs(changed.PARAMETER_SPECS, shapes)
        except ValueError as error:
            raise ValueError(f'{file}: {error} (model.PARAMETER_SPECS)') from error
    return changed, config


@functools.cache
def changed_copy(file: Path, content: bytes) -> Any:
    """Return a copy of model.py that the function `change` in a user's file has changed."""
    user_module = user_code.load_module(file, content)
    for name, value in vars(user_module).items():
        if value is model or getattr(value, '__module__', None) == model.__name__:
            raise ValueError(
                f'{file} imports {name} of model.py: take it from the argument of change(model), your copy'
            )
    change = getattr(user_module, 'change', None)
    if not callable(change):
        raise ValueError(
            f'{file} has no function change(model): see examples/squared_relu/squared_relu.py'
        )
    spec = importlib.util.spec_from_file_location(f'model_of_{file.stem}', model.__file__)
    assert spec is not None and spec.loader is not None
    copy: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    copy.SOURCE = content
    config_class = copy.T5Config
    with user_code.running(change):
        change(copy)
    for name in vars(copy):
        if name not in vars(model) and not name.startswith('__'):
            raise ValueError(
                f'{file} sets model.{name}, which nothing in model.py uses: correct or remove it'
            )
    if copy.T5Config is not config_class:
        raise ValueError(
            f'{file} sets model.T5Config, the settings of configs/base.py: keep constants in your file'
        )
    for name, value in vars(copy).items():
        own_class = inspect.isclass(value) and value.__module__ == user_module.__name__
        if own_class and 'step' in vars(value):
            raise ValueError(
                f'{file}: {name} has a method step, which nothing calls: decoding calls '
                '__call__(..., cache), as examples/rotary/rotary.py has it'
            )
    copy.PLACE = place_of_parts(file, copy)
    for name, value in vars(copy).items():
        if inspect.isfunction(value) and value.__module__ in (copy.__name__, user_module.__name__):
            setattr(copy, name, user_code.naming(copy.PLACE, value))
    return copy


def place_of_parts(file: Path, copy: Any) -> str:
    """Return a user's file with the lines of its classes and activations in a copy of model.py.

    Errors of what they return are raised in lines of model.py.
    """
    places = []
    for name, value in (vars(copy) | copy.ACTIVATIONS).items():
        functions = vars(value).values() if inspect.isclass(value) else [value]
        lines = []
        for function in map(inspect.unwrap, filter(inspect.isfunction, functions)):
            if function.__code__.co_filename == str(file):
                lines.append(function.__code__.co_firstlineno)
        if lines:
            places.append(f'line {min(lines)} ({name})')
    return ', '.join([str(file), *places])


# In checkpoints.


def recorded(directory: Any) -> bytes:
    """Return the file of the own model that a checkpoint was saved with; b'' if it had none."""
    if not paths.is_file(directory / model.RECORD):
        return b''
    return paths.own_file(directory / model.RECORD).read_bytes()


def check_same(directory: Any, model: ModuleType, config: model.T5Config, otherwise: str) -> None:
    """Raise ValueError unless a checkpoint was saved with this model.

    `otherwise`: what to do to use another one.
    """
    old = recorded(directory)
    if old and model.SOURCE != old:
        raise ValueError(
            f'model.module={config.module!r} is not the own model of {directory}: set it to a copy of '
            f'{directory / model.RECORD}, or {otherwise}'
        )
    if model.SOURCE != old:
        raise ValueError(
            f'model.module={config.module!r}, and {directory} was saved without it: leave it out, or '
            f'{otherwise}'
        )


def load_recorded(directory: Any, settings: Mapping[str, Any]) -> tuple[ModuleType, model.T5Config]:
    """Return what `load` does, of a checkpoint; `settings` are those of its config.json."""
    if not settings['module']:
        return model, model.T5Config(**settings)
    file = find_recorded(directory, settings['module'])
    return load_file(file, recorded(directory), settings)


def find_recorded(directory: Any, module: str) -> Path:
    """Return the file of the own model of a checkpoint, whose run had it at `module`.

    It is looked for where it was, then by its name in the current folder. Its content must be the
    recorded one. A file in the folder of the checkpoint or of its run may be a stranger's: it is never
    run. Raises ValueError.
    """
    content = recorded(directory)
    if not content:
        raise ValueError(
            f'model.module={module!r}, and {directory / model.RECORD} is missing: bring all files'
        )
    then = Path(module)
    now = Path.cwd() / then.name
    for file in (then, now):
        if file.is_file() and file.read_bytes() == content and not is_in_run(file, directory):
            return file
    raise ValueError(
        f'model.module={module!r} is gone, was changed, or is in the folder of the run, '
        f'from which no code is run: look at {directory / model.RECORD}, and copy it to {now}'
    )


def is_in_run(file: Path, directory: Any) -> bool:
    """Return whether `file` is in the folder of a checkpoint, or in that of its run."""
    if not isinstance(directory, Path):
        return False  # in a bucket
    run = directory
    if directory.name.startswith('checkpoint_'):
        run = directory.parent
    return file.resolve().is_relative_to(run.resolve())
