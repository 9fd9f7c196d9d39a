"""The settings of an own model: fields of a frozen dataclass `Options`, which get values from config.model.options."""

import ast
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from configs import check, setting
from family import Options
from messages import Refused
from model import T5Config

# How absl reads the value of a flag that is true or false.
BOOLS = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}
ITEM = bool | int | float | str  # of a tuple
FINITE = setting.Range(-setting.LARGEST_FLOAT, setting.LARGEST_FLOAT)


def options_of(declared: type[Options] | None, file: str, given: Mapping) -> Options | None:
    """Return the options of a model, an instance of the class `Options` of its file; None without one.

    `given`: {name: value}; a value from the command line may be text. Raises Refused for an unknown name and for a value
    that has not the type of the default. The `__post_init__` of the class may raise it, too.
    """
    defaults: dict[str, Any] = {}
    if declared is not None:
        defaults = dataclasses.asdict(declared())
    has_kinds = {type(default) for default in defaults.values()} <= setting.KINDS.keys()
    assert has_kinds, f'{file}: the defaults of Options must be bool, int, float, str or tuple'
    values = {}
    for name, value in given.items():
        key = f'model.options.{name}'
        if name not in defaults:
            known = ', '.join(defaults) or 'no options'
            raise Refused(f'{key}={value!r} is unknown: {file} has {known}: remove it')
        default = defaults[name]
        if isinstance(value, str) and not isinstance(default, str):
            value = parsed(value, default)
        check.check_allowed(key, value, default, FINITE)
        if isinstance(default, tuple) and not all(isinstance(x, ITEM) for x in value):
            raise Refused(f'{key}={value!r}: {setting.kind_of(default)}, each a number or a text')
        values[name] = type(default)(value)
    return None if declared is None else declared(**values)


def parsed(text: str, default: check.Value) -> check.Value:
    """Return the value that a text on the command line stands for; else the text."""
    if isinstance(default, bool):
        return BOOLS.get(text.lower(), text)
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def as_dict(options: Options | None) -> dict:
    """Return options as JSON has them."""
    return {} if options is None else json.loads(json.dumps(dataclasses.asdict(options)))


def default_options(config: T5Config) -> dict:
    """Return the options of a run whose config.json lacks them."""
    return {} if config.options is None else as_dict(type(config.options)())
