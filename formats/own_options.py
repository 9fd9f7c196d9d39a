"""The settings of an own model: fields of a frozen dataclass `Options`, which get values from config.model.options."""

import ast
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import partition
from configs import base, check
from model import Options, T5Config

# How absl reads the value of a flag that is true or false.
BOOLS = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}


def options_of(declared: type[Options] | None, file: str, given: Mapping) -> Options | None:
    """Return the options of a model, an instance of the class `Options` of its file; None without one.

    `given`: {name: value}; a value from the command line may be text. Raises ValueError for options
    that are invalid.
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
            raise ValueError(
                f'{key}={value!r} is unknown: {file} has {known}: remove it, or declare it there'
            )
        default: Any = fields[name].default
        if isinstance(value, str) and not isinstance(default, str):
            value = parsed(value, default)
        check_option(key, value, fields[name])
        values[name] = type(default)(value)
    return None if declared is None else declared(**values)


def check_declaration(declared: type[Options], file: str) -> None:
    """Raise ValueError unless `declared` is a frozen dataclass whose fields have valid defaults."""
    params = getattr(declared, '__dataclass_params__', None)
    if not isinstance(declared, type) or params is None or not params.frozen:
        raise ValueError(
            f'{file}: Options={declared!r:.60}: must be a frozen dataclass: write @dataclasses.dataclass(frozen=True) '
            'above its class'
        )
    kinds: dict[str | type, type] = {kind.__name__: kind for kind in check.KINDS}
    kinds |= {kind: kind for kind in check.KINDS}
    for field in dataclasses.fields(declared):
        kind = kinds.get(field.type, type(field.default))
        has_default = type(field.default) in check.KINDS and kind is type(field.default)
        if not has_default or not field.init:
            raise ValueError(
                f'{file}: the option {field.name} has no default of its type, bool, int, float, str or tuple: '
                'give it one, such as 1.0 for a float, or make it a property'
            )
        if 'range' in field.metadata and kind not in (int, float):
            raise ValueError(
                f"{file}: the option {field.name} has a range, as only numbers have: use 'choices'"
            )
        axis = field.metadata.get('axis')
        axis = getattr(declared, str(axis), axis)  # that of another option
        if axis is not None and (kind is not int or axis not in partition.MESH_AXES):
            raise ValueError(
                f'{file}: axis={axis!r} of the option {field.name}: a whole number may have one of '
                f'{", ".join(partition.MESH_AXES)}'
            )
        check_option(f'{file}: the default of {field.name}', field.default, field)


def check_option(key: str, value: Any, field: dataclasses.Field) -> None:
    """Raise ValueError unless a value has the type of a field's default, and is in its metadata.

    They may have 'range', the smallest and the largest number, and 'choices'.
    """
    default: Any = field.default
    if isinstance(default, tuple) and isinstance(value, list):  # JSON has lists
        value = tuple(value)
    limits = None
    if 'range' in field.metadata:
        limits = check.Range(*field.metadata['range'])
    check.check_allowed(key, value, default, limits, field.metadata.get('choices'))
    if isinstance(default, tuple):
        for x in value:
            like = default[0] if default else x
            if not isinstance(x, bool | int | float | str) or not check.has_type_of(like, x):
                raise ValueError(
                    f'{key}={value!r}: {x!r} is not like the values of {default!r}: use others'
                )
    if isinstance(default, float) and not abs(value) <= base.LARGEST_FLOAT:
        raise ValueError(
            f'{key}={value!r}: must be finite, at most {base.LARGEST_FLOAT:g}; the default is {default!r}'
        )


def parsed(text: str, default: Any) -> Any:
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
    """Return the options that a run has whose config.json lacks them."""
    if config.options is None:
        return {}
    fields = dataclasses.fields(config.options)
    return json.loads(json.dumps({field.name: field.default for field in fields}))
