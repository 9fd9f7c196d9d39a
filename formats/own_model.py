"""A model of one's own (model.module): a Python file that replaces parts of model.py.

    def modules(default):
        return dataclasses.replace(default, mlp=Mlp)

`modules` gets T5's `model.Modules` and returns others. The settings of the model are a frozen dataclass
`Options` in the same file. A family, a file of the package families, has the same form and is found by
its name. A checkpoint records a user's file, without which its parameters have no meaning; no code is
run from there.
"""

import dataclasses
import functools
import importlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp

import families
import model
import partition
import paths
import user_code
from configs import base, check
from formats import own_options
from messages import Refused
from model import Modules, T5Config

RECORD = 'own_model.py'  # the name of a user's file in a checkpoint
EXAMPLE = 'examples/squared_relu/squared_relu.py'


def load(settings: Mapping) -> T5Config:
    """Return the T5Config of the settings of config.model.

    A user's file model.module is loaded; its path is absolute in the T5Config. Raises Refused for settings that are
    invalid; an error of the file is raised as it is.
    """
    if not settings['module']:
        own_options.options_of(None, "model.module=''", settings.get('options') or {})
        config = T5Config(**settings)
        check_values(config)
        return config
    module, file, content = find(settings['module'])
    if content:
        settings = {**settings, 'module': file}
    return config_of(module, file, content, settings)


def find(name: str) -> tuple[ModuleType, str, bytes]:
    """Return the loaded module that model.module names, its file and the content; b'' of a family."""
    if is_family(name):
        family = importlib.import_module(f'.{name}', families.__name__)
        return family, str(family.__file__), b''
    file = user_code.module_file('model.module', name)
    content = file.read_bytes()
    return user_code.load_module(file, content), str(file), content


def is_family(name: str) -> bool:
    """Return whether `name` is that of a family, which comes before a file of this name."""
    return name.isidentifier() and bool(importlib.util.find_spec(f'.{name}', families.__name__))


def config_of(module: ModuleType, file: str, content: bytes, settings: Mapping) -> T5Config:
    """Return the T5Config of a module, whose parts are checked."""
    own = modules_of(module, file, content)
    declared = getattr(module, 'Options', None)
    options = own_options.options_of(declared, file, settings.get('options') or {})
    config = T5Config(**{**settings, 'options': options}, own=own)
    check_values(config)
    model.param_specs(config)  # each parameter has a row
    has_adapters = not own.adapters or any(
        re.fullmatch(own.adapters, x) for x in model.shapes(config)
    )
    assert has_adapters, f'{file}: adapters={own.adapters!r} matches the full path of no parameter'
    unknown = own.losses(config).keys() - trace(config)
    assert not unknown, (
        f'{file}: losses(config) names {min(unknown)!r}, which no aux of a layer has'
    )
    return config


def complete(config: T5Config) -> T5Config:
    """Return a T5Config that a program made, checked, and with the modules of its `module`."""
    if config.module and config.own is None:
        return load(as_settings(config))
    check_values(config)
    return config


def as_family(config: T5Config, family: str, options: Mapping) -> T5Config:
    """Return the T5Config of a family that has the sizes of `config`."""
    return load(as_settings(config) | {'module': family, 'options': options})


def check_values(config: T5Config) -> None:
    """Raise Refused for sizes, names and patterns that are not valid."""
    for name in base.get_config().model:
        value = getattr(config, name)
        is_encoder = name == 'num_decoder_layers' and value == 0
        if name != 'options' and not is_encoder:
            check.check_value(f'model.{name}', value)
    known = [name for name, _ in config.modules.activations]
    if not config.mlp_activations or not all(x in known for x in config.mlp_activations):
        raise Refused(f'model.mlp_activations={config.mlp_activations}: use {", ".join(known)}')
    try:
        re.compile(config.lora_targets)
    except (re.error, OverflowError, RecursionError) as error:
        raise Refused(f'model.lora_targets={config.lora_targets!r}: {error}: correct it') from error


@functools.cache
def modules_of(module: ModuleType, file: str, content: bytes) -> Modules:
    """Return what the function `modules` of a module returns. It is called once."""
    make = getattr(module, 'modules', None)
    if not callable(make):
        raise Refused(f'{file} has no function modules(default): see {EXAMPLE}')
    made = make(model.T5_MODULES)
    assert isinstance(made, Modules), f'{file}: modules(default) returned {made!r:.60}'
    hash(made)  # a TypeError names a field that has a dict where pairs belong
    return dataclasses.replace(made, source=content)


def trace(config: T5Config) -> set[str]:
    """Return the names of the values that the layers of a model report.

    Nothing is computed: what the layers do with a small batch is traced, so that it raises its errors.
    """
    # prepare.py checks what a scan needs, and names the setting.
    config = dataclasses.replace(config, scan_layers=False)
    batch = {'encoder_input_tokens': jnp.ones([2, 4], jnp.int32)}
    for name in ('decoder_input_tokens', 'decoder_target_tokens'):
        batch[name] = jnp.ones([2, 3], jnp.int32)

    def aux(params, batch):
        if config.num_decoder_layers == 0:
            return model.apply(
                lambda: model.encode(config, batch['encoder_input_tokens'])[2], params
            )
        return model.apply(lambda: model.logits(config, batch)[1], params)

    params = {}
    for path, shape in model.shapes(config).items():
        params[path] = jax.ShapeDtypeStruct(shape, jnp.float32)
    in_specs = (model.param_specs(config), partition.BATCH)
    return set(jax.eval_shape(partition.one_device(aux, in_specs), params, batch))


def describe_options(name: str) -> list[str]:
    """Return the lines of --help about the options of model.module, with the help of their metadata."""
    declared = getattr(find(name)[0], 'Options', None)
    if declared is None:
        return []
    lines = ['', f'Options of model.module={name}:']
    for field in dataclasses.fields(declared):
        default = getattr(declared(), field.name)
        lines.append(f'  --config.model.options.{field.name}={default!r}')
        if 'help' in field.metadata:
            lines.append(f'      {field.metadata["help"]}')
    return lines


# In checkpoints.


def as_settings(config: T5Config) -> dict:
    """Return a T5Config as config.json has it: without the modules, the options as a dict."""
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    del settings['own']
    settings['options'] = own_options.as_dict(config.options)
    return settings


def files_of(config: T5Config) -> dict[str, bytes]:
    """Return {name: content} of the file that a checkpoint of this model records, if there is one."""
    return {RECORD: config.modules.source} if config.modules.source else {}


def recorded(directory: paths.AnyPath) -> bytes:
    """Return the file of the own model that a checkpoint was saved with; b'' if it had none."""
    if not paths.is_file(directory / RECORD):
        return b''
    return paths.own_file(directory / RECORD).read_bytes()


def check_same(
    directory: paths.AnyPath, config: T5Config, otherwise: str, may_be_plain: bool = False
) -> None:
    """Raise Refused unless a checkpoint was saved with this model or, if it `may_be_plain`, with T5's.

    `otherwise`: what to do to use another one.
    """
    content = recorded(directory)
    module = check.read_stored(directory).get('model', {}).get('module', '')
    is_same = config.modules.source == content and (content or config.module == module)
    if not is_same and not (may_be_plain and not content and not module):
        saved = f'a copy of {directory / RECORD}' if content else repr(module)
        raise Refused(
            f'model.module={config.module!r}: {directory} needs {saved}: set it, or {otherwise}'
        )


def module_of(directory: paths.AnyPath, module: str) -> str:
    """Return model.module for a checkpoint whose run had `module`: a family, or where its file is now.

    A file is looked for where it was, then by its name in the current folder. Its content must be the
    recorded one. A file in the folder of the checkpoint or of its run may be a stranger's: it is never run.
    """
    content = recorded(directory)
    if not content and (not module or is_family(module)):
        return module
    run = directory.parent if directory.name.startswith('checkpoint_') else directory
    now = Path.cwd() / Path(module).name
    for file in (Path(module), now):
        is_strangers = run.resolve() in file.resolve().parents
        if content and file.is_file() and file.read_bytes() == content and not is_strangers:
            return str(file)
    remedy = f'look at {directory / RECORD}, and copy it to {now}'
    if not content:
        remedy = f'bring {directory / RECORD}'
    raise Refused(f'model.module={module!r} is not here as it was: {remedy}')
