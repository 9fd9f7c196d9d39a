"""A user's model (model.module): Python files that replace parts of model.py.

    def modules(family):
        return dataclasses.replace(family, parts=dataclasses.replace(family.parts, mlp=Mlp))

`modules` takes a `family.Family` and returns another: the first file gets T5's, each further file the result of the
file before it, and LoRA comes last. The settings of a file are its frozen dataclass `Options`. A family, a file of the
package families, has the same form and is found by its name. A checkpoint records users' files, because its parameters
mean nothing without them; no code is run from there.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import families
import model
import paths
import user_code
from configs import base, check, setting
from families import lora
from family import Family, Options
from messages import Refused
from model import Parts, T5Config

EXAMPLE = 'examples/squared_relu/squared_relu.py'
# absl's values of a boolean flag.
BOOLS = {'true': True, 't': True, '1': True, 'false': False, 'f': False, '0': False}
ITEM = bool | int | float | str  # in a tuple
FINITE = setting.Range(-setting.LARGEST_FLOAT, setting.LARGEST_FLOAT)


class Module(NamedTuple):
    """A file that model.module names."""

    code: ModuleType
    name: str  # a family's name, or the absolute path of a user's file
    content: bytes  # b'' for a family


def load(settings: Mapping) -> T5Config:
    """Return the T5Config of the settings of config.model.

    Users' files are loaded; their paths are absolute in the T5Config. Raises Refused for invalid settings; errors of a
    file are raised unchanged.
    """
    modules = find(settings['module'])
    module = ','.join(x.name for x in modules)
    values = settings.get('options') or {}
    options = options_of(options_class(modules), f'model.module={module!r}', values)
    settings = {**settings, 'module': module, 'options': options}
    config = T5Config(**settings, own=family_of(modules, bool(settings.get('lora_rank'))))
    check_values(config)
    if modules:
        # Raise errors of the files before a run makes its folder.
        model.shapes(config)
        config.family.losses(config)
    adapters = config.family.adapters
    has_adapters = not adapters or config.lora_rank or model.adapter_paths(config)
    assert has_adapters, f'{module}: adapters={adapters!r} matches the full path of no parameter'
    return config


def names_of(module: str) -> list[str]:
    return module.split(',') if module else []


def find(module: str) -> tuple[Module, ...]:
    """Return the loaded files that model.module names."""
    modules = []
    for name in names_of(module):
        if is_family(name):
            code = importlib.import_module(f'.{name}', families.__name__)
            modules.append(Module(code, name, b''))
        else:
            names = [x.name for x in pkgutil.iter_modules(families.__path__)]
            file = user_code.module_file('model.module', name, f', or one of {", ".join(names)}')
            content = file.read_bytes()
            modules.append(Module(user_code.load_module(file, content), str(file), content))
    return tuple(modules)


@functools.cache  # so equal options compare equal
def options_class(modules: tuple[Module, ...]) -> type[Options] | None:
    """Return one class for the options of all files; None if there are none."""
    owners: dict[str, str] = {}
    classes = []
    for module in modules:
        if hasattr(module.code, 'Options'):
            classes.append(module.code.Options)
            for field in dataclasses.fields(classes[-1]):
                owner = owners.setdefault(field.name, module.name)
                if owner != module.name:
                    raise Refused(
                        f'model.options.{field.name} is declared by {owner} and {module.name}: rename one'
                    )
    if len(classes) < 2:
        return next(iter(classes), None)

    def check_values(self):
        for cls in classes:
            getattr(cls, '__post_init__', lambda self: None)(self)

    return dataclasses.make_dataclass(
        'Options', (), bases=tuple(classes), frozen=True, namespace={'__post_init__': check_values}
    )


def is_family(name: str) -> bool:
    """Return whether `name` is a family's, which takes precedence over a file of this name."""
    return name.isidentifier() and bool(importlib.util.find_spec(f'.{name}', families.__name__))


@functools.cache  # so equal settings have equal families
def family_of(modules: tuple[Module, ...], has_adapters: bool) -> Family[T5Config, Parts] | None:
    """Return the family that model.module and LoRA make of T5; None for T5."""
    if not modules and not has_adapters:
        return None
    family = model.T5
    for module in modules:
        make = getattr(module.code, 'modules', None)
        if not callable(make) or 'family' not in inspect.signature(make).parameters:
            raise Refused(f'{module.name} has no function modules(family): see {EXAMPLE}')
        family = make(family)
        assert isinstance(family, Family), f'{module.name}: modules returned {family!r:.60}'
        hash(family)  # TypeError for a field with a dict instead of pairs
    if has_adapters:
        family = lora.modules(family)
    files = tuple(module.content for module in modules if module.content)
    return dataclasses.replace(family, files=files)


def complete(config: T5Config) -> T5Config:
    """Check a T5Config that a program made; return it with the family of its `module`."""
    if config.own is None:
        return load(as_settings(config))
    check_values(config)
    return config


def as_family(config: T5Config, family: str, options: Mapping) -> T5Config:
    """Return the T5Config of a family with the sizes of `config`."""
    return load(as_settings(config) | {'module': family, 'options': options})


def check_values(config: T5Config) -> None:
    """Raise Refused for invalid sizes, names and patterns."""
    for name in base.get_config().model:
        value = getattr(config, name)
        is_encoder = name == 'num_decoder_layers' and value == 0
        if name != 'options' and not is_encoder:
            check.check_value(f'model.{name}', value)
    names = [name for name, _ in config.parts.activations]
    if not config.mlp_activations or not all(x in names for x in config.mlp_activations):
        raise Refused(f'model.mlp_activations={config.mlp_activations}: use {", ".join(names)}')
    num_buckets = config.relative_attention_num_buckets
    max_distance = config.relative_attention_max_distance
    if max_distance <= num_buckets // 2:
        raise Refused(
            f'model.relative_attention_max_distance={max_distance}: must be above {num_buckets // 2}, half of '
            'relative_attention_num_buckets'
        )
    try:
        re.compile(config.lora_targets)
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(f'model.lora_targets={config.lora_targets!r}: {error}: correct it') from error


def describe_options(module: str) -> list[str]:
    """Return the lines of --help about the options of model.module."""
    return lines_of_options(options_class(find(module)), f'model.module={module}', 'model')


def lines_of_options(cls: type[Options] | None, file: str, group: str) -> list[str]:
    """Return the lines of --help about the options of a file, with the help from their metadata."""
    if cls is None:
        return []
    lines = ['', f'Options of {file}:']
    for field in dataclasses.fields(cls):
        default = getattr(cls(), field.name)
        lines.append(f'  --config.{group}.options.{field.name}={default!r}')
        if 'help' in field.metadata:
            lines.append(f'      {field.metadata["help"]}')
    return lines


# The settings of a file: config.model.options.


def options_of(
    cls: type[Options] | None, file: str, settings: Mapping, group: str = 'model'
) -> Options | None:
    """Return the options of a model or loss, an instance of its file's class `Options`; None without one.

    `settings`: {name: value}; a value from the command line may be text. Raises Refused for an unknown name and for a
    value without the type of the default. The class's `__post_init__` may also raise it.
    """
    defaults: dict[str, Any] = {}
    if cls is not None:
        defaults = dataclasses.asdict(cls())
    has_kinds = {type(default) for default in defaults.values()} <= setting.KINDS.keys()
    assert has_kinds, f'{file}: the defaults of Options must be bool, int, float, str or tuple'
    values = {}
    for name, value in settings.items():
        key = f'{group}.options.{name}'
        if name not in defaults:
            names = ', '.join(defaults) or 'no options'
            raise Refused(f'{key}={value!r} is unknown: {file} has {names}: remove it')
        default = defaults[name]
        if isinstance(value, str) and not isinstance(default, str):
            value = parse(value, default)
        check.check_allowed(key, value, default, FINITE)
        if isinstance(default, tuple) and not all(isinstance(x, ITEM) for x in value):
            raise Refused(f'{key}={value!r}: {setting.kind_of(default)}, each a number or a text')
        values[name] = type(default)(value)
    return None if cls is None else cls(**values)


def parse(text: str, default: check.Value) -> check.Value:
    """Return the value of a text on the command line, or the text if it is none."""
    if isinstance(default, bool):
        return BOOLS.get(text.lower(), text)
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def as_dict(options: Options | None) -> dict:
    """Return options as JSON's values."""
    return {} if options is None else json.loads(json.dumps(dataclasses.asdict(options)))


def default_options(options: Options | None) -> dict:
    """Return the default options, for a config.json that lacks them."""
    return {} if options is None else as_dict(type(options)())


# In checkpoints.


def as_settings(config: T5Config) -> dict:
    """Return a T5Config as settings of config.json: without the modules, the options as a dict."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del settings['own']
    settings['options'] = as_dict(config.options)
    return settings


def record_of(index: int) -> str:
    """Return the name of a user's file in a checkpoint."""
    return f'own_model_{index + 1}.py' if index else 'own_model.py'


def files_of(config: T5Config) -> dict[str, bytes]:
    """Return {name: content} of the users' files that a checkpoint of this model records."""
    return {record_of(i): content for i, content in enumerate(config.family.files)}


def recorded(directory: paths.AnyPath) -> list[bytes]:
    """Return the users' files that a checkpoint was saved with, in order."""
    contents: list[bytes] = []
    while paths.is_file(directory / record_of(len(contents))):
        contents.append(paths.own_file(directory / record_of(len(contents))).read_bytes())
    return contents


def identity(module: str, contents: Sequence[bytes]) -> list[str | bytes]:
    """Return the parts that identify a model: names of families, and the `contents` of users' files."""
    files = list(contents)
    parts: list[str | bytes] = []
    for name in names_of(module):
        parts.append(name if is_family(name) or not files else files.pop(0))
    return [*parts, *files]


def check_same(
    directory: paths.AnyPath, config: T5Config, otherwise: str, may_be_plain: bool = False
) -> None:
    """Raise Refused unless a checkpoint was saved with this model or, with `may_be_plain`, with plain T5.

    `otherwise`: the remedy for using another one.
    """
    contents = recorded(directory)
    module = check.read_stored(directory).get('model', {}).get('module', '')
    model_id = identity(module, contents)
    if model_id != identity(config.module, config.family.files) and (model_id or not may_be_plain):
        records = [str(directory / record_of(i)) for i in range(len(contents))]
        raise Refused(
            f'model.module={config.module!r}: {directory} needs {", ".join([repr(module), *records])}: set it, or '
            f'{otherwise}'
        )


def module_of(directory: paths.AnyPath, module: str) -> str:
    """Return model.module for a checkpoint whose run had `module`, with the current paths of the files."""
    names = names_of(module)
    num_files = 0
    for i, name in enumerate(names):
        if not is_family(name):
            names[i] = current_path(directory, record_of(num_files), name)
            num_files += 1
    return ','.join(names)


def current_path(directory: paths.AnyPath, record: str, name: str) -> str:
    """Return the current path of a user's file: the run's path, `name`, or its last part in the current folder.

    The content must be the recorded one. A file in the folder of the checkpoint or of its run may be a stranger's and is
    never run.
    """
    run = directory.parent if directory.name.startswith('checkpoint_') else directory
    now = Path.cwd() / Path(name).name
    remedy = f'restore {directory / record}'
    if paths.is_file(directory / record):
        content = paths.own_file(directory / record).read_bytes()
        for file in (Path(name), now):
            is_strangers = run.resolve() in file.resolve().parents
            if file.is_file() and file.read_bytes() == content and not is_strangers:
                return str(file)
        remedy = f'review {directory / record}, and copy it to {now}'
    raise Refused(f'model.module={name!r} is missing or has changed: {remedy}')
