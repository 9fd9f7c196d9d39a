"""The settings of an own model: fields of a frozen dataclass `Options`, which get values from config.model.options."""

import ast
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import partition
from configs import base, check
from messages import Refused
from model import Options, T5Config

# How absl reads the value of a flag that is true or false.
BOOLS = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}


def options_of(declared: type[Options] | None, file: str, given: Mapping) -> Options | None:
    """Return the options of a model, an instance of the class `Options` of its file; None without one.

    `given`: {name: value}; a value from the command line may be text.
    """
    fields = {}
    if declared is not None:
        check_declaration(declared, file)
        fields = {field.name: field for field in dataclasses.fields(declared)}
    values = {}
    for name, value in given.items():
        key = f'model.options.{name}'
        if name not in fields:
            known = ', '.join(fields) or 'no options'
            raise Refused(f'{key}={value!r} is unknown: {file} has {known}: remove it')
        default: Any = fields[name].default
        if isinstance(value, str) and not isinstance(default, str):
            value = parsed(value, default)
        check_option(key, value, fields[name])
        values[name] = type(default)(value)
    return None if declared is None else declared(**values)


def check_declaration(declared: type[Options], file: str) -> None:
    """Raise TypeError unless the fields of a frozen dataclass have valid defaults and metadata."""
    kinds: dict[str | type, type] = {kind.__name__: kind for kind in check.KINDS}
    kinds |= {kind: kind for kind in check.KINDS}
    for field in dataclasses.fields(declared):
        kind = type(field.default)
        is_typed = kind in check.KINDS and kinds.get(field.type, kind) is kind and field.init
        is_typed &= declared.__dataclass_params__.frozen  # type: ignore[attr-defined]
        has_range = 'range' in field.metadata
        axis = field.metadata.get('axis')
        axis = getattr(declared, str(axis), axis)  # or the name of another option
        has_wrong_axis = axis is not None and (kind is not int or axis not in partition.MESH_AXES)
        is_right = is_typed and not has_wrong_axis and (not has_range or kind in (int, float))
        assert is_right, (
            f'{file}: the option {field.name} must be of a frozen dataclass, with a default of its type (bool, '
            f'int, float, str, tuple); a number may have a range, an int an axis of {partition.MESH_AXES}'
        )
        check_option(f'{file}: the default of {field.name}', field.default, field)


def check_option(key: str, value: Any, field: dataclasses.Field) -> None:
    """Raise Refused unless a value has the type of a field's default, and is in its metadata.

    They may have 'range', the smallest and the largest number, and 'choices'.
    """
    default: Any = field.default
    if isinstance(default, tuple) and isinstance(value, list):  # JSON has lists
        value = tuple(value)
    limits = None
    if 'range' in field.metadata:
        limits = check.Range(*field.metadata['range'])
    elif isinstance(default, float):
        limits = check.Range(-base.LARGEST_FLOAT, base.LARGEST_FLOAT)
    check.check_allowed(key, value, default, limits, field.metadata.get('choices'))
    if isinstance(default, tuple):
        for x in value:
            like = default[0] if default else x
            if not isinstance(x, bool | int | float | str) or not check.has_type_of(like, x):
                raise Refused(f'{key}={value!r}: its values must be like those of {default!r}')


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
