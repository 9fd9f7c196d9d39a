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
from answers import options
from configs import base
from configs.setting import Setting, Value, check_allowed, has_type_of
from messages import Refused

# data.delimiter: a character, or a name for a tab.
DELIMITER = re.compile(r'|tab|\\t|\t|[^\s"]')
DELIMITER_RULE = "must be one character, no space and no quote, such as ';', or 'tab'"

# data.references and data.weight: a slot alone.
SLOT = re.compile(r'|\{([^{}]|\{[^{}]*\})+\}')


class Needs(NamedTuple):
    """Settings that have an effect only with another one."""

    setting: str
    any_of: tuple[str, ...]  # one of these values is needed; () for any but '', 0 and False
    dependents: tuple[str, ...]


ADAMW = (
    'optimizer.adamw.beta1',
    'optimizer.adamw.beta2',
    'optimizer.adamw.weight_decay',
    'optimizer.adamw.decay_norms',
    'optimizer.adamw.multiply_by_parameter_scale',
    'optimizer.adamw.epsilon',
)
ADAFACTOR = (
    'optimizer.decay_rate',
    'optimizer.step_offset',
    'optimizer.multiply_by_parameter_scale',
    'optimizer.clipping_threshold',
    'optimizer.factored',
    'optimizer.beta1',
    'optimizer.weight_decay_rate',
)
# A dependent on the command line without the other one is refused: it has no effect.
NEEDS = (
    Needs('model.lora_rank', (), ('model.lora_alpha', 'model.lora_targets')),
    Needs('train.on_spike', ('skip',), ('train.spike_sigma', 'train.spike_window')),
    Needs('data.targets', ('',), ('data.text_field', 'data.references')),
    Needs('data.references', ('',), ('data.text_field',)),
    Needs('data.on_bad_line', ('skip',), ('data.max_bad_fraction',)),
    Needs('optimizer.name', ('adafactor',), ADAFACTOR),
    Needs('optimizer.name', ('adamw', 'muon'), ADAMW),
    Needs('infer_eval.every_steps', (), ('infer_eval.task', 'infer_eval.num_examples')),
    Needs('save.best_metric', (), ('save.best_is',)),
    Needs('restore.path', (), ('restore.only', 'restore.strict', 'restore.dtype')),
)

OPTIONS = ('model.options.', 'loss.options.')  # prefixes of settings that a user's file declares
INTEGER_OR_AUTO = 'train.num_microbatches'  # run/memory.py checks the number


@functools.cache
def declared() -> dict[str, Setting]:
    """Return {key: setting} of configs/base.py, the keys with dots as on the command line."""
    settings = {}
    for key, value in leaves(base.settings()):
        settings[key] = value if isinstance(value, Setting) else Setting(value)
    return settings


def check(tree: ConfigDict) -> None:
    """Refuse the tree of all settings if it lacks one of configs/base.py, or a value is not valid."""
    if not isinstance(tree, ConfigDict):
        kind = type(tree).__name__
        raise Refused(f'--config: get_config() gave a {kind}: start as configs/tiny.py does')
    values = dict(leaves(tree))
    for key in sorted(values.keys() - declared().keys()):
        if not key.startswith(OPTIONS):  # formats/own_model.py checks those
            raise Refused(f'{key} is not a setting: remove it, or add it to configs/base.py')
    for key in declared():
        if key not in values:
            raise Refused(f'{key} is missing from the config: start as configs/tiny.py does')
        check_value(key, values[key])


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


def check_effects(tree: ConfigDict, given: Collection[str]) -> None:
    """Refuse settings `given` on the command line that have no effect in the tree of all settings."""
    values = dict(leaves(tree))
    for setting, any_of, dependents in NEEDS:
        condition = setting
        acts = bool(values[setting])
        if any_of:
            condition = f'{setting}={" or ".join(map(repr, any_of))}'
            acts = values[setting] in any_of
        for key in dependents:
            if key in given and not acts and values[key] != declared()[key].default:
                raise Refused(
                    f'{key}={values[key]!r} has no effect without {condition}: also set that'
                )


def set_options(config: ConfigDict, values: Mapping[str, Value]) -> None:
    """Set the options of users' files among the settings `values`, {'seed': value}.

    Names may be new, and numbers may be texts: formats/own_model.py checks them.
    """
    for key, value in values.items():
        if key.startswith(OPTIONS):
            group, _, name = key.split('.', 2)
            options = config[group].options
            with options.unlocked(), options.ignore_type():
                options[name] = value


def read_stored(folder: paths.AnyPath) -> dict[str, Any]:
    """Return the config.json of a run or checkpoint of ours, {} if there is none. It may have other settings."""
    file = folder / 'config.json'
    if not paths.is_file(file):
        return {}
    content = paths.read_json(file)
    return content if 'model' in content else {}  # another program's


def leaves(tree: Mapping, prefix: str = '', separator: str = '.') -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every setting in a tree or group, the key with dots as on the command line."""
    for name, value in tree.items():
        if isinstance(value, ConfigDict | dict):
            yield from leaves(value, f'{prefix}{name}{separator}', separator)
        else:
            yield f'{prefix}{name}', value


def flatten(content: Mapping) -> dict[str, Any]:
    """Return {'model/vocab_size': 32128} of the content of a config.json."""
    return dict(leaves(content, separator='/'))


def describe() -> str:
    """Return every setting with its default, its range and the comment above it in configs/base.py, or its help."""
    lines = ['Settings, with the defaults of configs/base.py:']
    comment: list[str] = []
    for line in inspect.getsource(base.settings).splitlines():
        line = line.strip()
        assignment = re.match(r'config\.([\w.]+) = ', line)
        if line.startswith('# '):
            comment.append(line.removeprefix('# '))
        elif assignment and comment:
            if assignment[1] in declared():
                lines += describe_setting(assignment[1], *comment)
            else:
                lines += ['', *comment]
            if assignment[1] == 'decode':
                for name in options.SETTINGS:
                    lines += describe_setting(f'decode.{name}', options.OPTIONS[name]['help'])
            comment = []
    return '\n'.join(lines)


def describe_setting(key: str, *texts: str) -> list[str]:
    setting = declared()[key]
    lines = [f'  --config.{key}={setting.default!r}']
    lines += [f'      {text}' for text in texts]
    if setting.range is not None:
        lines.append(f'      ({setting.range})')
    return lines
