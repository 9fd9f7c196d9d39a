"""Checks a config by the ranges and choices of configs/base.py, and lists its settings for `--help`.

`check` runs before JAX is imported: no other module checks the range of one setting. A rule about
two settings, files or devices belongs to the module that uses them. Imports no jax.
"""

import functools
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

import paths
from configs import base
from configs.base import Range, Setting, Value
from messages import Refused

# data.delimiter: a character, or a name for a tab.
DELIMITER = re.compile(r'|tab|\\t|\t|[^\s"]')
DELIMITER_RULE = "must be one character, no space and no quote, such as ';', or 'tab'"

# data.references and data.weight: a slot alone.
SLOT = re.compile(r'|\{([^{}]|\{[^{}]*\})+\}')


class Needs(NamedTuple):
    """Settings that act only with another one."""

    setting: str
    value: str | None  # the value it needs; None for any but '', 0 and False
    dependents: tuple[str, ...]


ADAMW = ('optimizer.adamw.beta1', 'optimizer.adamw.beta2', 'optimizer.adamw.weight_decay')
ADAFACTOR = (
    'optimizer.decay_rate',
    'optimizer.step_offset',
    'optimizer.multiply_by_parameter_scale',
    'optimizer.clipping_threshold',
    'optimizer.factored',
    'optimizer.beta1',
    'optimizer.weight_decay_rate',
)
# A dependent that is given on the command line without the other one is refused: it has no effect.
NEEDS = (
    Needs('model.lora_rank', None, ('model.lora_alpha', 'model.lora_targets')),
    Needs('data.targets', '', ('data.text_field', 'data.references')),
    Needs('data.references', '', ('data.text_field',)),
    Needs('data.on_bad_line', 'skip', ('data.max_bad_fraction',)),
    Needs('optimizer.name', 'adafactor', ADAFACTOR),
    Needs('optimizer.name', 'adamw', ADAMW),
    Needs('infer_eval.every_steps', None, ('infer_eval.task', 'infer_eval.num_examples')),
    Needs('save.best_metric', None, ('save.best_is',)),
    Needs('restore.path', None, ('restore.only', 'restore.strict', 'restore.dtype')),
)

# The names of types in messages.
KINDS: dict[type, str] = {
    bool: 'true or false',
    int: 'a whole number',
    float: 'a number',
    str: 'text',
    tuple: 'values in parentheses',
}

OPTIONS = 'model.options.'  # the prefix of the settings of an own model, which its file declares
INTEGER_OR_AUTO = 'train.num_microbatches'  # run/memory.py checks the number


@functools.cache
def declared() -> dict[str, Setting]:
    """Return {key: setting} of configs/base.py, the keys with dots as on the command line."""
    found = {}
    for key, value in leaves(base.settings()):
        found[key] = value if isinstance(value, Setting) else Setting(value)
    return found


def check(config: ConfigDict) -> None:
    """Refuse a `config` that lacks the settings of configs/base.py with valid values."""
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise Refused(f'--config: get_config() gave a {kind}: start as configs/tiny.py does')
    found = dict(leaves(config))
    for key in sorted(found.keys() - declared().keys()):
        if not key.startswith(OPTIONS):  # formats/own_model.py checks those
            raise Refused(f'{key} is not a setting: remove it, or add it to configs/base.py')
    for key in declared():
        if key not in found:
            raise Refused(f'{key} is missing from the config: start as configs/tiny.py does')
        check_value(key, found[key])


def check_value(key: str, value: Value) -> None:
    """Refuse a `value` that is not valid for the setting `key`."""
    if key == INTEGER_OR_AUTO:
        if value != 'auto' and not has_type_of(0, value):
            raise Refused(f"{key}={value!r}: must be a whole number or 'auto'")
        return
    setting = declared()[key]
    check_allowed(key, value, setting.default, setting.range, setting.choices)
    if key == 'data.delimiter' and not DELIMITER.fullmatch(str(value)):
        raise Refused(f'{key}={value!r}: {DELIMITER_RULE}')
    if key in ('data.references', 'data.weight') and not SLOT.fullmatch(str(value)):
        raise Refused(f"{key}={value!r}: must be one slot and nothing else, such as '{{answers}}'")


def check_allowed(
    key: str,
    value: Value,
    default: Value,
    limits: Range | None,
    choices: Collection[Value] | None = None,
) -> None:
    """Refuse a `value` of another type than `default`, or outside of the range or the choices."""
    if not has_type_of(default, value):
        raise Refused(f'{key}={value!r}: {kind_of(default)}')
    if limits is not None and isinstance(value, int | float) and not limits.holds(value):
        raise Refused(f'{key}={value}: must be {limits}; the default is {default!r}')
    if choices and value not in choices:
        raise Refused(f'{key}={value!r}: must be one of {", ".join(map(repr, choices))}')


def check_effects(config: ConfigDict, given: Collection[str]) -> None:
    """Refuse settings `given` on the command line that have no effect."""
    found = dict(leaves(config))
    for setting, value, dependents in NEEDS:
        needed = setting
        acts = bool(found[setting])
        if value is not None:
            needed = f'{setting}={value!r}'
            acts = found[setting] == value
        for key in dependents:
            if key in given and not acts and found[key] != declared()[key].default:
                raise Refused(f'{key}={found[key]!r} has no effect without {needed}: set that, too')


def set_options(config: ConfigDict, values: Mapping[str, Value]) -> None:
    """Give a config those of the settings `values`, {'seed': value}, that are model.options.

    They may be new ones, and texts for numbers: formats/own_model.py checks them.
    """
    group = config.model.options
    with group.unlocked(), group.ignore_type():
        for key, value in values.items():
            if key.startswith(OPTIONS):
                group[key.removeprefix(OPTIONS)] = value


def read_stored(folder: paths.AnyPath) -> dict[str, Any]:
    """Return the config.json of a run or checkpoint of ours; {} where there is none. It may have other settings."""
    file = folder / 'config.json'
    if not paths.is_file(file):
        return {}
    content = paths.read_json(file)
    return content if 'model' in content else {}  # another program's


def kind_of(default: Value) -> str:
    """Return what the values of a setting must be, for a message about one that is not."""
    example = ('a', 'b') if default == () else default
    return f'must be {KINDS[type(default)]}, such as {example!r}'


def has_type_of(default: Value, value: object) -> bool:
    """Return whether `value` has the type of `default`: an int may stand for a float, a list for a tuple."""
    if isinstance(default, bool) or isinstance(value, bool):
        return type(value) is type(default)
    others = {float: int, tuple: list}
    return isinstance(value, (type(default), others.get(type(default), type(default))))


def leaves(config: ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every setting, the key with dots as on the command line."""
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from leaves(value, f'{prefix}{name}.')
        else:
            yield f'{prefix}{name}', value


def describe() -> str:
    """Return every setting with its default, its range and the comment above it in configs/base.py."""
    lines = ['Settings, with the defaults of configs/base.py:']
    comment: list[str] = []
    for line in inspect.getsource(base.settings).splitlines():
        line = line.strip()
        assigned = re.match(r'config\.([\w.]+) = ', line)
        if line.startswith('# '):
            comment.append(line.removeprefix('# '))
        elif assigned:
            setting = declared().get(assigned[1])
            if setting is None:  # a group
                lines += ['', *comment]
            else:
                lines.append(f'  --config.{assigned[1]}={setting.default!r}')
                lines += [f'      {text}' for text in comment]
            if setting is not None and setting.range is not None:
                lines.append(f'      ({setting.range})')
            comment = []
    return '\n'.join(lines)
