"""A model of one's own (model.module): a Python file that replaces parts of model.py.

    def modules(default):
        return dataclasses.replace(default, mlp=Mlp)

`modules` gets T5's `model.Modules` and returns others. The settings of the model are a frozen dataclass
`Options` in the same file. A family, a file of the package families, has the same form and is found by
its name. A checkpoint records a user's file, without which its parameters have no meaning; no code is
run from there.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

import families
import model
import partition
import paths
import user_code
from configs import base, check
from model import Modules, T5Config

RECORD = 'own_model.py'  # the name of a user's file in a checkpoint
EXAMPLE = 'examples/squared_relu/squared_relu.py'


def load(settings: Mapping[str, Any]) -> T5Config:
    """Return the T5Config of the settings of config.model.

    A user's file model.module is loaded; its path is absolute in the T5Config. Raises ValueError for
    settings that are invalid, and UserError for an error in the file.
    """
    if not settings['module']:
        return config_of(None, 'model.py', b'', settings)
    module, file, content = find(settings['module'])
    if content:
        settings = {**settings, 'module': file}
    return config_of(module, file, content, settings)


def find(name: str) -> tuple[ModuleType, str, bytes]:
    """Return the loaded module that model.module names, its file and the content; b'' of a family."""
    if name.isidentifier() and importlib.util.find_spec(f'.{name}', families.__name__):
        family = importlib.import_module(f'.{name}', families.__name__)
        return family, str(family.__file__), b''
    file = user_code.module_file('model.module', name)
    content = file.read_bytes()
    return user_code.load_module(file, content), str(file), content


def config_of(
    module: ModuleType | None, file: str, content: bytes, settings: Mapping[str, Any]
) -> T5Config:
    """Return the T5Config of a module, None for T5 itself, whose parts are checked."""
    declared = getattr(module, 'Options', None)
    options = options_of(declared, file, settings.get('options') or {})
    settings = {**settings, 'options': options}
    own = None
    if module is not None:
        own = modules_of(module, file, content)
    config = T5Config(**settings, own=own)
    check_values(config)
    if own is None:
        return config
    with user_code.running(file):
        try:
            model.param_specs(config)
        except ValueError as error:
            raise ValueError(f'{file}: {error} (Modules.specs)') from error
        unknown = own.losses(config).keys() - trace(config)
        if unknown:
            raise ValueError(
                f'{file}: losses(config) names {min(unknown)!r}, which no layer reports: report it in '
                'the aux of a layer or of its Mlp, or remove it'
            )
    return config


def complete(config: T5Config) -> T5Config:
    """Return a T5Config that a program made, checked, and with the modules of its `module`."""
    if config.module and config.own is None:
        return load(as_settings(config))
    check_values(config)
    return config


def check_values(config: T5Config) -> None:
    """Raise ValueError for sizes, names and patterns that are not valid."""
    for name, default in base.get_config().model.items():
        value = getattr(config, name)
        is_encoder = name == 'num_decoder_layers' and value == 0
        if name != 'options' and not is_encoder:
            check.check_value(f'model.{name}', value, default)
    known = [name for name, _ in config.modules.activations]
    if not config.mlp_activations or not set(known).issuperset(config.mlp_activations):
        raise ValueError(
            f'model.mlp_activations={config.mlp_activations}: use some of {", ".join(known)}'
        )
    try:
        re.compile(config.lora_targets)
    except re.error as error:
        raise ValueError(
            f'model.lora_targets={config.lora_targets!r} is no regular expression ({error}): correct '
            "it, as in '.+/(query|value)/kernel'"
        ) from error


@functools.cache
def modules_of(module: ModuleType, file: str, content: bytes) -> Modules:
    """Return what the function `modules` of a module returns, once for each."""
    make = getattr(module, 'modules', None)
    if not callable(make):
        raise ValueError(f'{file} has no function modules(default): see {EXAMPLE}')
    with user_code.running(make):
        made = make(model.T5_MODULES)
    if not isinstance(made, Modules):
        raise ValueError(
            f'{file}: modules(default) returned {made!r:.60}: return dataclasses.replace(default, ...)'
        )
    try:
        hash(made)
    except TypeError as error:
        raise ValueError(
            f'{file}: modules(default) returned a field that cannot be hashed ({error}): use tuples of '
            'pairs instead of dicts'
        ) from error
    return dataclasses.replace(made, source=content)


def trace(config: T5Config) -> set[str]:
    """Return the names of the values that the layers of a model report.

    Nothing is computed: what the layers do with a small batch is traced, so that it raises its errors.
    """
    batch = {'encoder_input_tokens': jnp.ones([2, 4], jnp.int32)}
    for name in ('decoder_input_tokens', 'decoder_target_tokens'):
        batch[name] = jnp.ones([2, 3], jnp.int32)

    def aux(params):
        return model.apply(lambda: model.logits(config, batch)[1], params)

    params = {}
    for path, shape in model.shapes(config).items():
        params[path] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return set(jax.eval_shape(partition.one_device(aux), params))


# Options.


def options_of(declared: Any, file: str, given: Mapping[str, Any]) -> Any:
    """Return the options of a model, an instance of the class `Options` of its file; None without one.

    `given`: {name: value}; a value from the command line may be text. Raises ValueError for options
    that are invalid.
    """
    if declared is None:
        for name in given:
            raise ValueError(
                f'model.options.{name}: {file} declares no options: remove it, or write a frozen dataclass '
                'Options in the file that model.module names'
            )
        return None
    check_declaration(declared, file)
    fields = {field.name: field for field in dataclasses.fields(declared)}
    values = {}
    for name, value in given.items():
        key = f'model.options.{name}'
        if name not in fields:
            raise ValueError(f'{key} is no option of {file}: use one of {", ".join(fields)}')
        default: Any = fields[name].default
        if isinstance(value, str) and not isinstance(default, str):
            value = parsed(value)
        check_option(key, value, fields[name])
        values[name] = type(default)(value)
    return declared(**values)


def check_declaration(declared: Any, file: str) -> None:
    """Raise ValueError unless `declared` is a frozen dataclass whose fields have valid defaults."""
    is_frozen = dataclasses.is_dataclass(declared) and declared.__dataclass_params__.frozen  # type: ignore
    if not is_frozen:
        raise ValueError(f'{file}: Options must be a frozen dataclass: @dataclass(frozen=True)')
    for field in dataclasses.fields(declared):
        if type(field.default) not in check.KINDS:
            raise ValueError(
                f'{file}: the option {field.name} has no default that is a bool, int, float, str or '
                'tuple of texts: give it one'
            )
        check_option(f'{file}: the default of {field.name}', field.default, field)


def check_option(key: str, value: Any, field: dataclasses.Field) -> None:
    """Raise ValueError unless a value has the type of a field's default, and is in its metadata.

    They may have 'range', the smallest and the largest number, and 'choices'.
    """
    if not check.has_type_of(field.default, value):
        raise ValueError(f'{key}={value!r}: {check.kind_of(field.default)}')
    if 'range' in field.metadata:
        limits = check.Range(*field.metadata['range'])
        if not limits.holds(value):
            raise ValueError(f'{key}={value}: must be {limits}; the default is {field.default!r}')
    choices = field.metadata.get('choices')
    if choices is not None and value not in choices:
        raise ValueError(f'{key}={value!r}: must be one of {", ".join(map(repr, choices))}')


def parsed(text: str) -> Any:
    """Return the value that a text on the command line stands for; the text if it is no other."""
    if text.lower() in ('true', 'false'):
        return text.lower() == 'true'
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def describe_options(name: str) -> list[str]:
    """Return a line for each option of model.module, and what its metadata say, as --help has them."""
    module, file, _ = find(name)
    declared: Any = getattr(module, 'Options', None)
    if declared is None:
        return []
    check_declaration(declared, file)
    lines = ['', f'Options of model.module={name}:']
    for field in dataclasses.fields(declared):
        lines.append(f'  --config.model.options.{field.name}={field.default!r}')
        if 'help' in field.metadata:
            lines.append(f'      {field.metadata["help"]}')
        if 'range' in field.metadata:
            lines.append(f'      ({check.Range(*field.metadata["range"])})')
        if 'choices' in field.metadata:
            lines.append(f'      ({", ".join(map(repr, field.metadata["choices"]))})')
    return lines


def as_settings(config: T5Config) -> dict[str, Any]:
    """Return a T5Config as config.json has it: without the modules, the options as a dict."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del settings['own']
    settings['options'] = as_dict(config.options)
    return settings


def as_dict(options: Any) -> dict[str, Any]:
    """Return options as JSON has them."""
    return {} if options is None else json.loads(json.dumps(dataclasses.asdict(options)))


def default_options(config: T5Config) -> dict[str, Any]:
    """Return the options that a run has whose config.json lacks them."""
    options: Any = config.options
    return as_dict(options and type(options)())


# In checkpoints.


def recorded(directory: Any) -> bytes:
    """Return the file of the own model that a checkpoint was saved with; b'' if it had none."""
    if not paths.is_file(directory / RECORD):
        return b''
    return paths.own_file(directory / RECORD).read_bytes()


def files_of(config: T5Config) -> dict[str, bytes]:
    """Return {name: content} of the file that a checkpoint of this model records, if there is one."""
    return {RECORD: config.modules.source} if config.modules.source else {}


def check_same(directory: Any, config: T5Config, otherwise: str) -> None:
    """Raise ValueError unless a checkpoint was saved with this model.

    `otherwise`: what to do to use another one.
    """
    old = recorded(directory)
    stored = check.read_stored(directory).get('model')  # None for a checkpoint of another program
    family = stored['module'] if stored and not old else config.module
    if config.modules.source == old and config.module == family:
        return
    if old:
        raise ValueError(
            f'model.module={config.module!r} is not the own model of {directory}: set it to a copy of '
            f'{directory / RECORD}, or {otherwise}'
        )
    raise ValueError(
        f'model.module={config.module!r}, and {directory} was saved without it: leave it out, or '
        f'{otherwise}'
    )


def load_recorded(directory: Any, settings: Mapping[str, Any]) -> T5Config:
    """Return what `load` does, of a checkpoint; `settings` are those of its config.json."""
    content = recorded(directory)
    name = settings['module']
    if not content and (not name or name.isidentifier()):  # T5, or a family
        return load(settings)
    return load({**settings, 'module': str(find_recorded(directory, name))})


def find_recorded(directory: Any, module: str) -> Path:
    """Return the file of the own model of a checkpoint, whose run had it at `module`.

    It is looked for where it was, then by its name in the current folder. Its content must be the
    recorded one. A file in the folder of the checkpoint or of its run may be a stranger's: it is never
    run. Raises ValueError.
    """
    content = recorded(directory)
    if not content:
        raise ValueError(
            f'model.module={module!r}, and {directory / RECORD} is missing: bring all files'
        )
    then = Path(module)
    now = Path.cwd() / then.name
    for file in (then, now):
        if file.is_file() and file.read_bytes() == content and not is_in_run(file, directory):
            return file
    raise ValueError(
        f'model.module={module!r} is gone, was changed, or is in the folder of the run, '
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
