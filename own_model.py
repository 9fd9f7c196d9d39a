"""A user's own model (model.module): a Python file that changes a copy of model.py.

    def change(model):
        model.ACTIVATIONS['squared_relu'] = lambda x: jax.nn.relu(x) ** 2

`change` sets names of model.py: tables, functions, modules. Each own model is a copy of its own, and
model.py stays as it is, so that models do not mix in a process. A checkpoint records the file,
without which its parameters have no meaning.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import model
import partition
import paths
import user_code

RECORD = 'own_model.py'  # in a checkpoint: the file that the run had; no code is run from there


class OwnModel(NamedTuple):
    """A copy of model.py, and the user's file that changed it."""

    module: ModuleType
    content: bytes
    place: str  # of what the file puts into the model


# By the class T5Config, of which each copy has its own.
MODELS = {model.T5Config: OwnModel(model, content=b'', place='')}


def of(config: model.T5Config) -> ModuleType:
    """Return the module that computes a model: model.py, or the copy that config.module changed."""
    return MODELS[type(config)].module


def make_config(settings: Mapping[str, Any]) -> model.T5Config:
    """Return the T5Config of the settings of config.model; its `module` is an absolute path.

    Raises ValueError for settings that are invalid, and UserError for whatever is wrong with the file
    of model.module.
    """
    if not settings['module']:
        return model.T5Config(**settings)
    file = user_code.module_file('model.module', settings['module'])
    return config_of(file, file.read_bytes(), settings)


def config_of(file: Path, content: bytes, settings: Mapping[str, Any]) -> model.T5Config:
    """Return the T5Config of the own model in a file that has this content."""
    changed = changed_copy(file, content)
    with user_code.running(file):
        config = changed.T5Config(**{**settings, 'module': str(file)})
        shapes = changed.shapes(config)
        try:
            partition.param_specs(changed.PARAMETER_SPECS, shapes)
        except ValueError as error:
            raise ValueError(f'{file}: {error} (model.PARAMETER_SPECS)') from error
    return config


@functools.cache
def changed_copy(file: Path, content: bytes) -> ModuleType:
    """Return a copy of model.py that the function `change` in a user's file has changed."""
    user_module = user_code.load_module(file, content)
    for name, value in vars(user_module).items():
        if value is model or getattr(value, '__module__', None) == model.__name__:
            raise ValueError(
                f'{file} imports {name} of model.py, which stays as it is: take it from the argument of '
                'change(model), the copy that is yours'
            )
    change = getattr(user_module, 'change', None)
    if not callable(change):
        raise ValueError(
            f'{file} has no function change(model): write one, as examples/squared_relu/squared_relu.py '
            'does'
        )
    copy = copy_of_model(f'model_of_{file.stem}')
    copy.MODULE = str(file)
    config_class = copy.T5Config
    with user_code.running(change):
        change(copy)
        for name, activation in copy.ACTIVATIONS.items():
            if callable(activation):
                copy.ACTIVATIONS[name] = giving_arrays(activation)
    for name in vars(copy):
        if name not in vars(model) and not name.startswith('__'):
            raise ValueError(
                f'{file} sets model.{name}, which nothing in model.py uses: correct the name, or '
                'keep it out of `model`'
            )
    if copy.T5Config is not config_class:
        raise ValueError(
            f'{file} sets model.T5Config, whose fields are the settings of configs/base.py: keep '
            'constants of your model in your file'
        )
    place = place_of_layers(file, copy, user_module)
    for name, value in vars(copy).items():
        if inspect.isfunction(value) and value.__module__ in (copy.__name__, user_module.__name__):
            setattr(copy, name, naming(place, value))
    MODELS[config_class] = OwnModel(copy, content, place)
    return copy


def place_of_layers(file: Path, copy: Any, user_module: ModuleType) -> str:
    """Return the file, and the lines of the classes of a user's that a copy of model.py has.

    What they return may fail in the lines of model.py that call them.
    """
    places = []
    for name, value in vars(copy).items():
        if not inspect.isclass(value) or value.__module__ != user_module.__name__:
            continue
        methods = [inspect.unwrap(x) for x in vars(value).values() if inspect.isfunction(x)]
        lines = [x.__code__.co_firstlineno for x in methods if x.__code__.co_filename == str(file)]
        if lines:
            places.append(f'line {min(lines)} ({name})')
    return ', '.join([str(file), *places])


def naming(place: str, function: Callable) -> Callable:
    """Return a function that raises UserError, with a place, where the code of an own model fails."""

    @functools.wraps(function)
    def named(*arguments: Any, **keywords: Any) -> Any:
        with user_code.running(place):
            return function(*arguments, **keywords)

    return named


def traced(config: model.T5Config, function: Callable) -> Callable:
    """Return a function that is traced with a model; where an own model fails it names its file."""
    if not config.module:
        return function
    return naming(MODELS[type(config)].place, function)


def giving_arrays(activation: Callable) -> Callable:
    """Return an activation that names its line where it gives no array, or one of another shape."""

    @functools.wraps(activation)
    def checked(*arguments: Any) -> jax.Array:
        with user_code.running(activation):
            x = jnp.asarray(activation(*arguments))
        if x.shape != arguments[0].shape:
            raise user_code.UserError(
                f'{user_code.place_of(activation)}: an activation of {arguments[0].shape} gave '
                f'{x.shape}: keep the shape'
            )
        return x

    return checked


def copy_of_model(name: str) -> Any:
    """Return model.py as a new module, which shares nothing that can be changed with `model`."""
    spec = importlib.util.spec_from_file_location(name, model.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


# In checkpoints.


def record_of(config: model.T5Config) -> dict[str, bytes]:
    """Return {name: content} of the file that a checkpoint of an own model has; {} for model.py's."""
    if not config.module:
        return {}
    return {RECORD: MODELS[type(config)].content}


def recorded(directory: Any) -> bytes:
    """Return the file of the own model that a checkpoint was saved with; b'' if it had none."""
    if not paths.is_file(directory / RECORD):
        return b''
    return paths.own_file(directory / RECORD).read_bytes()


def check_same(directory: Any, config: model.T5Config, otherwise: str) -> None:
    """Raise ValueError unless `config` has the own model that a checkpoint was saved with, or both none.

    `otherwise`: what to do to use another one.
    """
    old = recorded(directory)
    if MODELS[type(config)].content == old:
        return
    if not old:
        raise ValueError(
            f'model.module={config.module!r}, and {directory} was saved without it: leave it out, or '
            f'{otherwise}'
        )
    raise ValueError(
        f'model.module={config.module!r} is not the own model of {directory}: set it to a copy of '
        f'{directory / RECORD}, or {otherwise}'
    )


def config_of_checkpoint(directory: Any, settings: Mapping[str, Any]) -> model.T5Config:
    """Return the T5Config that a checkpoint was saved with; `settings` are those of its config.json.

    The file of an own model is looked for where it was, then by its name in the current folder. Its
    content must be the recorded one. A file in the folder of the checkpoint or of its run may be a
    stranger's: it is never run. Raises ValueError.
    """
    if not settings['module']:
        return model.T5Config(**settings)
    content = recorded(directory)
    if not content:
        raise ValueError(
            f'model.module={settings["module"]!r}, and {directory / RECORD} is missing: bring all files '
            'of the checkpoint'
        )
    then = Path(settings['module'])
    now = Path.cwd() / then.name
    for file in (then, now):
        if file.is_file() and file.read_bytes() == content and not is_in_run(file, directory):
            return config_of(file, content, settings)
    raise ValueError(
        f'model.module={settings["module"]!r} is gone, was changed, or is in the folder of the run, '
        f'from which no code is run: look at {directory / RECORD}, and copy it to {now}'
    )


def is_in_run(file: Path, directory: Any) -> bool:
    """Return whether `file` is in the folder of a checkpoint, or in that of its run."""
    if not isinstance(directory, Path):
        return False  # in a bucket
    run = directory
    if directory.name.startswith('checkpoint_'):
        run = directory.parent
    return file.resolve().is_relative_to(run.resolve())
