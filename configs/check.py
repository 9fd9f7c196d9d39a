"""The values that the settings of configs/base.py may have, and their list for `--help`.

`check` runs before JAX is imported: no other module checks the range of one setting. A rule about
two settings, files or devices belongs to the module that uses them. Imports no jax.
"""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

import paths
from configs import base

INT32_MAX = 2**31 - 1  # steps and token ids are int32
LARGEST_FLOAT = 1e30  # float32 has no much larger ones


class Range(NamedTuple):
    """The numbers from `low` to `high`, both included unless they are in `without`."""

    low: float
    high: float
    without: tuple[float, ...] = ()

    def holds(self, value: float) -> bool:
        """Return whether `value` is in the range; nan and infinities are in none."""
        return self.low <= value <= self.high and value not in self.without

    def __str__(self) -> str:
        low = 'above' if self.low in self.without else 'at least'
        high = 'below' if self.high in self.without else 'at most'
        if self.without == (0,):
            return f'{self.low}, or at least 1 and at most {self.high:,}'
        if self.high == LARGEST_FLOAT:
            return f'{low} {self.low:g} and finite'
        return f'{low} {self.low:,} and {high} {self.high:,}'


STEPS = Range(1, INT32_MAX)
STEPS_OR_NONE = Range(0, INT32_MAX)
SIZE = Range(1, 2**20)
LAYERS = Range(1, 1000)
NOT_NEGATIVE = Range(0, LARGEST_FLOAT)
FRACTION = Range(0, 1)
DEVICES = Range(-1, 2**20, without=(0,))
BELOW_ONE = Range(0, 1, without=(1,))

# The range of each number of configs/base.py.
RANGES = {
    'seed': Range(0, 2**32 - 1),
    'model.vocab_size': Range(1, 2**24),
    'model.emb_dim': SIZE,
    'model.num_heads': SIZE,
    'model.num_encoder_layers': LAYERS,
    'model.num_decoder_layers': LAYERS,
    'model.head_dim': SIZE,
    'model.mlp_dim': SIZE,
    'model.dropout_rate': BELOW_ONE,
    'model.lora_rank': Range(0, 2**20),
    'model.lora_alpha': Range(1e-6, LARGEST_FLOAT),
    'data.max_bad_fraction': FRACTION,
    'data.num_pieces': Range(1, 1_000_000),
    'data.extra_ids': Range(0, 100_000),
    'data.lengths.inputs': SIZE,
    'data.lengths.targets': SIZE,
    'data.noise_density': Range(0, 1, without=(0, 1)),
    'data.mean_noise_span_length': Range(1, 2**20),
    'data.num_workers': Range(0, 1024),
    'data.validation_fraction': BELOW_ONE,
    'loss.z_loss': NOT_NEGATIVE,
    'loss.label_smoothing': BELOW_ONE,
    'optimizer.decay_rate': FRACTION,
    'optimizer.step_offset': STEPS_OR_NONE,
    'optimizer.clipping_threshold': NOT_NEGATIVE,
    'optimizer.beta1': BELOW_ONE,
    'optimizer.weight_decay_rate': FRACTION,
    'optimizer.global_norm_clip_threshold': NOT_NEGATIVE,
    'optimizer.ema_decay': BELOW_ONE,
    'optimizer.adamw.beta1': BELOW_ONE,
    'optimizer.adamw.beta2': BELOW_ONE,
    'optimizer.adamw.weight_decay': FRACTION,
    'learning_rate.base_learning_rate': NOT_NEGATIVE,
    'learning_rate.warmup_steps': STEPS,
    'learning_rate.decay_factor': NOT_NEGATIVE,
    'learning_rate.steps_per_decay': STEPS,
    'learning_rate.steps_per_cycle': STEPS,
    'learning_rate.step_offset': STEPS_OR_NONE,
    'learning_rate.min_learning_rate': NOT_NEGATIVE,
    'train.steps': STEPS,
    'train.relative_steps': STEPS_OR_NONE,
    'train.epochs': STEPS_OR_NONE,
    'train.early_stopping': STEPS_OR_NONE,
    'train.max_not_finite': STEPS,
    'train.batch_size': SIZE,
    'eval.every_steps': STEPS,
    'eval.steps': STEPS,
    'infer_eval.every_steps': STEPS_OR_NONE,
    'infer_eval.batch_size': SIZE,
    'infer_eval.num_examples': STEPS_OR_NONE,
    'log.every_steps': STEPS,
    'decode.beam_size': Range(1, 1024),
    'decode.temperature': Range(0, 1e6),
    'decode.top_k': Range(0, 2**24),
    'decode.top_p': FRACTION,
    'decode.max_length': SIZE,
    'decode.num_return': Range(1, 1024),
    'decode.alpha': Range(0, 100),
    'decode.seed': Range(0, 2**32 - 1),
    'decode.batch_size': SIZE,
    'save.every_steps': STEPS,
    'save.keep': STEPS_OR_NONE,
    'save.keep_every': STEPS_OR_NONE,
    'mesh.data': DEVICES,
    'mesh.fsdp': DEVICES,
    'mesh.model': DEVICES,
}

# The strings that a setting may be, where they are few. (data.task, data.metrics, optimizer.name,
# learning_rate.factors and model.mlp_activations are checked by the modules that define their names.)
CHOICES = {
    'model.dtype': ('float32', 'bfloat16'),
    'model.remat': ('none', 'dots', 'full'),
    'data.kind': ('', 'text', 'jsonl', 'csv', 'tsv', 'parquet'),
    'data.on_bad_line': ('stop', 'skip'),
    'data.use_cached': ('auto', 'yes', 'no'),
    'data.concatenate': ('auto', 'yes', 'no'),
    'data.pack': ('no', 'greedily', 'tightly'),
    'train.on_not_finite': ('stop', 'skip', 'back'),
    'train.gradient_dtype': ('float32', 'bfloat16'),
    'infer_eval.split': ('train', 'validation', 'test'),
    'save.best_is': ('higher', 'lower', ''),
    'save.dtype': ('float32', 'bfloat16'),
    'restore.dtype': ('float32', 'bfloat16', 'float16', ''),
}
# data.delimiter: a character, or a name for a tab.
DELIMITER = re.compile(r'|tab|\\t|\t|[^\s"]')
DELIMITER_RULE = "must be one character, no space and no quote, such as ';', or 'tab'"


class Needs(NamedTuple):
    """Settings that act only with another one."""

    setting: str
    value: Any  # that it must have; None for any but '', 0 and False
    dependents: tuple[str, ...]


ADAFACTOR: tuple[str, ...] = ('decay_rate', 'step_offset', 'multiply_by_parameter_scale')
ADAFACTOR += ('clipping_threshold', 'factored', 'beta1', 'weight_decay_rate')
ADAMW = ('adamw.beta1', 'adamw.beta2', 'adamw.weight_decay')
# A dependent that is given on the command line without the other one is refused: it has no effect.
NEEDS = (
    Needs('model.lora_rank', None, ('model.lora_alpha', 'model.lora_targets')),
    Needs('data.targets', '', ('data.text_field',)),
    Needs('data.on_bad_line', 'skip', ('data.max_bad_fraction',)),
    Needs('optimizer.name', 'adafactor', tuple(f'optimizer.{name}' for name in ADAFACTOR)),
    Needs('optimizer.name', 'adamw', tuple(f'optimizer.{name}' for name in ADAMW)),
    Needs('infer_eval.every_steps', None, ('infer_eval.task', 'infer_eval.num_examples')),
    Needs('save.best_metric', None, ('save.best_is',)),
    Needs('restore.path', None, ('restore.only', 'restore.strict', 'restore.dtype')),
)

# What a value of a type is, in messages.
KINDS = {
    bool: 'true or false',
    int: 'a whole number',
    float: 'a number',
    str: 'text',
    tuple: 'values in parentheses',
}

OPTIONS = 'model.options.'  # the prefix of the settings of an own model, which its file declares
# Settings that are a whole number or 'auto'. The module that uses one checks the number.
INTEGER_OR_AUTO = ('train.num_microbatches',)


def check(config: Any) -> None:
    """Raise ValueError unless `config` has the settings of configs/base.py with valid values."""
    if not isinstance(config, ConfigDict):
        kind = type(config).__name__
        raise ValueError(f'the config is a {kind}, not a ConfigDict: start as configs/tiny.py does')
    found: dict[str, Any] = dict(leaves(config))
    defaults: dict[str, Any] = dict(leaves(base.get_config()))
    for key in sorted(found.keys() - defaults.keys()):
        if key.startswith(OPTIONS):  # formats/own_model.py checks them
            continue
        raise ValueError(f'{key} is no setting: remove it, or add it to configs/base.py')
    for key in sorted(defaults.keys() - found.keys()):
        raise ValueError(f'{key} is missing from the config: start as configs/tiny.py does')
    for key, default in defaults.items():
        check_value(key, found[key], default)


def set_options(config: Any, values: Mapping[str, Any]) -> None:
    """Give a config those of the settings `values`, {'seed': value}, that are model.options.

    They may be new ones, and texts for numbers: formats/own_model.py checks them.
    """
    group = config.model.options
    with group.unlocked(), group.ignore_type():
        for key, value in values.items():
            if key.startswith(OPTIONS):
                group[key.removeprefix(OPTIONS)] = value


def check_value(key: str, value: Any, default: Any) -> None:
    """Raise ValueError unless `value` is valid for setting `key`, whose default is `default`."""
    if key in INTEGER_OR_AUTO:
        if value != 'auto' and not has_type_of(0, value):
            raise ValueError(f"{key}={value!r}: must be a whole number or 'auto'")
        return
    limits = RANGES[key] if type(default) in (int, float) else None
    check_allowed(key, value, default, limits, CHOICES.get(key))
    if key == 'data.delimiter' and not DELIMITER.fullmatch(value):
        raise ValueError(f'{key}={value!r}: {DELIMITER_RULE}')


def check_allowed(
    key: str, value: Any, default: Any, limits: Range | None, choices: Collection[Any] | None
) -> None:
    """Raise ValueError unless `value` has the type of `default`, and is in the range and the choices."""
    if not has_type_of(default, value):
        raise ValueError(f'{key}={value!r}: {kind_of(default)}')
    if limits is not None and not limits.holds(value):
        raise ValueError(f'{key}={value}: must be {limits}; the default is {default!r}')
    if choices is not None and value not in choices:
        raise ValueError(f'{key}={value!r}: must be one of {", ".join(map(repr, choices))}')


def read_stored(folder: Any) -> dict[str, Any]:
    """Return the config.json of a run or checkpoint of ours; {} where there is none.

    It may have fewer settings, and other keys. Raises ValueError for a damaged file, and for a
    setting of another type. `folder`: a path of `paths.to_path`.
    """
    file = folder / 'config.json'
    if not paths.is_file(file):
        return {}
    content = paths.read_json(file)
    if 'model' not in content:  # of another program
        return {}
    check_types(content, base.get_config(), str(file), group='')
    return content


def check_types(stored: Mapping[str, Any], defaults: ConfigDict, file: str, group: str) -> None:
    """Raise ValueError for a setting of the wrong type in a config.json."""
    for name, default in defaults.items():
        key = group + name
        if name not in stored or key in INTEGER_OR_AUTO:
            continue
        value = stored[name]
        if isinstance(default, ConfigDict) and isinstance(value, dict):
            check_types(value, default, file, group=f'{key}.')
        elif not has_type_of(default, value):
            rule = f'must be {KINDS.get(type(default), "a group of settings")}'
            raise ValueError(f'{file} has {key}={value!r}: {rule}: restore it from a copy')


def check_effects(config: Any, given: Collection[str]) -> None:
    """Raise ValueError where one of the settings `given` on the command line has no effect."""
    found: dict[str, Any] = dict(leaves(config))
    defaults: dict[str, Any] = dict(leaves(base.get_config()))
    for setting, value, dependents in NEEDS:
        needed = setting
        acts = bool(found[setting])
        if value is not None:
            needed = f'{setting}={value!r}'
            acts = found[setting] == value
        for key in dependents:
            if key in given and not acts and found[key] != defaults[key]:
                raise ValueError(
                    f'{key}={found[key]!r} has no effect without {needed}: set that, too'
                )


def kind_of(default: Any) -> str:
    """Return what the values of a setting must be, for a message about one that is not."""
    return f'must be {KINDS[type(default)]}, such as {default!r}'


def has_type_of(default: Any, value: Any) -> bool:
    """Return whether `value` has the type of `default`: an int may stand for a float, a list for a tuple."""
    if isinstance(default, bool) or isinstance(value, bool):
        return type(value) is type(default)
    others = {float: int, tuple: list}
    return isinstance(value, (type(default), others.get(type(default), type(default))))


def leaves(config: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every setting, the key with dots as on the command line."""
    for name, value in config.items():
        if isinstance(value, ConfigDict):
            yield from leaves(value, f'{prefix}{name}.')
        else:
            yield f'{prefix}{name}', value


def describe() -> str:
    """Return every setting with its default, its range and the comment above it in configs/base.py."""
    defaults = dict(leaves(base.get_config()))
    lines = ['Settings, with the defaults of configs/base.py:']
    comment: list[str] = []
    for line in inspect.getsource(base.get_config).splitlines():
        line = line.strip()
        setting = re.match(r'config\.([\w.]+) = ', line)
        if line.startswith('# '):
            comment.append(line.removeprefix('# '))
        elif setting and setting[1] not in defaults:  # a group of settings
            lines += ['', *comment]
            comment = []
        elif setting:
            lines.append(f'  --config.{setting[1]}={defaults[setting[1]]!r}')
            lines += [f'      {text}' for text in comment]
            if setting[1] in RANGES:
                lines.append(f'      ({RANGES[setting[1]]})')
            comment = []
    return '\n'.join(lines)
