"""A user's loss (loss.module): a Python file with a function `weighted_sums` like loss.py's.

Its settings are the fields of its frozen dataclass `Options`, as in a model's file. A run and its checkpoints record the
file; a run resumes only with the same one.
"""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import paths
import user_code
from formats import own_model
from loss import LossConfig
from messages import Refused
from model import T5Config

RECORD = 'own_loss.py'
EXAMPLE = 'examples/preferences/preferences.py'


def load(settings: Mapping) -> LossConfig:
    """Return the loss of config.loss, with its file loaded and an absolute path.

    Raises Refused for invalid settings; errors of the file are raised unchanged.
    """
    if not settings['module']:
        own_model.options_of(None, "loss.module=''", settings['options'], 'loss')
        return LossConfig(**{**settings, 'options': None})
    file, content, code = read(settings['module'])
    if not callable(getattr(code, 'weighted_sums', None)):
        raise Refused(f'loss.module={file} has no function weighted_sums: see {EXAMPLE}')
    cls = getattr(code, 'Options', None)
    options = own_model.options_of(cls, f'loss.module={file}', settings['options'], 'loss')
    settings = {**settings, 'module': str(file), 'options': options}
    return LossConfig(**settings, own=code.weighted_sums, content=content)


def resolved(config: LossConfig) -> dict:
    """Return the file's settings for config.json."""
    return {'module': config.module, 'options': own_model.as_dict(config.options)}


def default_options(model_config: T5Config, config: LossConfig) -> dict:
    """Return the default options of the model and the loss, for a config.json that lacks them."""
    groups = {'model': model_config.options, 'loss': config.options}
    return {
        group: {'options': own_model.default_options(options)} for group, options in groups.items()
    }


def files_of(config: LossConfig) -> dict[str, bytes]:
    """Return {name: content} of the file that a checkpoint records."""
    return {RECORD: config.content} if config.own else {}


def check_same(directory: paths.AnyPath, config: LossConfig) -> None:
    """Raise Refused unless the checkpoint of a resumed run was saved with this loss."""
    content = b''
    if paths.is_file(directory / RECORD):
        content = paths.own_file(directory / RECORD).read_bytes()
    if content != config.content:
        record = directory / RECORD if content else "''"
        raise Refused(
            f'loss.module={config.module!r}: the run has another loss, {record}: set it, or name another --workdir'
        )


def describe_options(module: str) -> list[str]:
    """Return the lines of --help about the options of loss.module."""
    if not module:
        return []
    _, _, code = read(module)
    cls = getattr(code, 'Options', None)
    return own_model.lines_of_options(cls, f'loss.module={module}', 'loss')


def read(module: str) -> tuple[Path, bytes, ModuleType]:
    """Return the file that loss.module names, its content, and the loaded code."""
    file = user_code.module_file('loss.module', module)
    content = file.read_bytes()
    return file, content, user_code.load_module(file, content)
