"""Detect the format of a checkpoint, and open it.

Source: T5X t5x/checkpoints.py; t5x/examples/scalable_t5 for stacked layers.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

import checkpoint
import model
import paths
from checkpoint import Leaf
from configs import base
from configs.check import flatten, read_stored
from families import lora
from formats import best, gemma, hugging_face, mesh_tf, own_model, peft, t5x
from formats.vocabulary import base_of, folders_of
from messages import Refused, first_ten, named
from model import T5Config
from randomness import digest
from run import hub

# Parts of a checkpoint to open: a model with a decoder, its encoder alone, or everything.
PARTS = ('whole', 'encoder', '')
# The paths of a decoder's arrays, and the names of their files.
DECODER = r'(target|state[./]param_states)[./]decoder[./].+'
# The names of foreign models' files; results may be in the same folder.
MODEL_FILE = re.compile(
    r'(?!.+-encodings-\d).+\.(safetensors|model|index|index\.json|data-.+)|checkpoint|'
    r'(.+_)?(config|map|modules|tokens|tokenizer)\.json'
)

Config = TypeVar('Config', bound=T5Config | None)


class OpenedCheckpoint(NamedTuple, Generic[Config]):
    """A checkpoint whose large arrays are not read yet."""

    directory: paths.AnyPath  # a folder, or Mesh-TF's prefix if the user named one
    leaves: dict[str, Leaf]  # by T5X's path
    config: Config  # known for Hugging Face's files and merged adapters; None for others
    note: str = ''  # an assumption to report, in one line, or ''
    is_assumed: bool = False  # whether `note` names settings that shapes cannot tell


OpenedModel = OpenedCheckpoint[T5Config]  # its parameters match the config


def open_model(
    path: str | paths.AnyPath,
    config: T5Config | None = None,
    step: str = '',
    part: str = 'whole',
) -> OpenedModel:
    """Open a checkpoint, as `open_checkpoint` does, as a model of `config`.

    Without `config`, use the checkpoint's own config, or else derive one from the shapes. An encoder alone has no
    decoder layers. The parameters match the config.
    """
    opened = open_checkpoint(path, step, part)
    directory = opened.directory
    leaves = opened.leaves
    note = opened.note
    is_assumed = False
    shapes = checkpoint.shapes(checkpoint.parameters(leaves))
    if config is None:
        config = opened.config or config_beside(directory)
        if config is None:
            config = config_from_shapes(directory, shapes)
            is_assumed = len(config.mlp_activations) > 1 or config.module == hugging_face.SWITCH
        if is_assumed:
            assumed = f'mlp_activations={config.mlp_activations}'
            if config.options is not None:
                assumed += f', options={config.options}'
            note = (
                f'{directory} has no config, so {assumed} is assumed: set others with config=dataclasses.replace('
                "t5.config, mlp_activations=('silu', 'linear')), or in --mode=infer with --config=FILE"
            )
    else:
        config = own_model.complete(config)
        own_model.check_same(directory, config, 'leave the config out', may_be_plain=True)
    check_family(directory, config)
    config = lora.without_adapters(config)  # they are merged
    if is_encoder(leaves):
        config, leaves = gemma.encoder_alone(config, leaves)
        shapes = checkpoint.shapes(checkpoint.parameters(leaves))
    compare(model.shapes(config), shapes, str(directory))
    return OpenedModel(directory, leaves, config, note, is_assumed)


def compare(
    expected: checkpoint.Shapes, actual: checkpoint.Shapes, name: str = 'the checkpoint'
) -> None:
    """Raise Refused unless a checkpoint's shapes, `actual`, are the model's, `expected`."""
    differences = []
    for path in sorted(expected | actual, key=lambda x: (not checkpoint.is_parameter(x), x)):
        shape = actual.get(path, 'missing')
        if shape != expected.get(path, 'there'):
            differences.append(f'{path} is {shape}, not {expected.get(path, "there")}')
    if differences:
        raise Refused(f'{name} is of another model: {first_ten(differences, separator="; ")}')


def open_checkpoint(
    path: str | paths.AnyPath, step: str = '', part: str = 'whole'
) -> OpenedCheckpoint:
    """Open a workdir, a checkpoint of any format, or T5X's index file in one.

    `step` names the checkpoint of a workdir: 'best', a number, or 'last', the default. Adapters, including peft's, are
    merged into their base. `part` is one of PARTS: 'encoder' reads no file of the decoder; 'whole' refuses an encoder
    alone.
    """
    directory = checkpoint_folder(path, step)
    if paths.is_file(directory):
        hugging_face.check_file(directory, is_adapter=directory.name in peft.FILES)
        if directory.suffix != '.safetensors':
            # The other files are in the folder of the link's target.
            directory = directory.resolve()
    leaves: dict[str, Leaf] = {}
    if peft.is_folder(directory):
        opened = _open_peft(directory)
    elif hugging_face.is_single_file(directory):
        leaves = dict(hugging_face.read_single_file(directory))
        opened = OpenedCheckpoint(directory, leaves, config=None)
    elif hugging_face.is_folder(directory):
        config, entries, note = hugging_face.read_index(directory, is_encoder=part == 'encoder')
        opened = OpenedCheckpoint(directory, dict(entries), config, note)
    else:
        base = open_base(directory)
        prefix = mesh_tf.find_prefix(directory)
        if prefix is not None:
            leaves.update(mesh_tf.read_index(prefix))
        else:
            leaves = t5x.read_index(directory, ignored=DECODER if part == 'encoder' else '')
        opened = OpenedCheckpoint(directory, leaves, config=None)
        if base is not None:
            opened = merge(opened, base)
    if part == 'whole' and is_encoder(opened.leaves):
        raise Refused(
            f'{opened.directory} is an encoder alone: use --encode or restore.strict=False'
        )
    if part == 'encoder':
        for name in list(opened.leaves):
            if re.fullmatch(DECODER, name):
                del opened.leaves[name]
    return opened


def checkpoint_folder(path: str | paths.AnyPath, step: str = '') -> paths.AnyPath:
    """Return the checkpoint of a workdir, the folder of T5X's index file, or `path`."""
    directory = paths.source_path(path)
    steps = checkpoint.steps(directory)
    if steps or step:
        [chosen, *others] = choose_steps(directory, step, steps)
        if others:
            raise Refused(f'step={step}: name one number, last or best')
        directory /= f'checkpoint_{chosen}'
    elif directory.name == 'checkpoint' and paths.is_file(directory):
        directory = directory.parent
    return directory


def identity(directory: paths.AnyPath) -> str:
    """Return a hash that changes if another model is written to `directory`, or to the base of its adapters.

    It covers the manifest of our own checkpoints, the commit of a model on the hub, or else the names, sizes and times
    of the model's files.
    """
    facts: list[object] = []
    files = []
    if hub.is_name(hub.name_of(directory)):
        facts.append(hub.name_of(directory))
    elif paths.is_file(directory / checkpoint.MANIFEST):
        facts.append((directory / checkpoint.MANIFEST).read_bytes())
    elif directory.is_dir():
        files = [file for file in paths.list_folder(directory) if MODEL_FILE.fullmatch(file.name)]
        if not any(file.suffix == '.safetensors' for file in files):
            files += directory.glob(hugging_face.FLAX_WEIGHTS)
        files += directory.glob('target.*/*')
        if paths.is_file(directory / 'modules.json'):  # sentence-transformers'
            files += directory.glob('[0-9]_*/*')
    else:  # one file, or the prefix of several
        name = directory.stem if paths.is_file(directory) else directory.name
        for file in paths.list_folder(directory.parent):
            if file.name.startswith(f'{name}.'):
                files.append(file)
    for file in sorted(files, key=str):
        if paths.is_file(file):
            status = paths.status_of(file)
            facts += [str(file), status]
            if status.checksum is None:
                facts.append(file.stat().st_mtime_ns)
    base = flatten(read_stored(directory)).get('base/directory')
    if peft.is_folder(directory):
        base = base_of(directory)
    if base:
        facts.append(identity(checkpoint_folder(str(base))))
    return digest(facts)


LONG_T5 = re.compile(r'long[-_. ]?t5(?!x)', re.IGNORECASE)


def check_family(directory: paths.AnyPath, config: T5Config) -> None:
    """Raise Refused if a T5's parameters seem to be a LongT5's: same shapes, another attention.

    The signs are a folder's name in its path, or T5X's gin file next to it. Our own checkpoints have a config instead.
    """
    if config.module or read_stored(directory):
        return
    target = directory.resolve()
    signs = [part for part in f'{directory}/{target}'.split('/') if LONG_T5.search(part)]
    for folder in folders_of(target):
        for file in folder.glob('*.gin'):
            if LONG_T5.search(re.sub('#.*', '', file.read_bytes().decode(errors='replace'))):
                signs.append(file.name)
    if signs:
        raise Refused(
            f'{directory}: {signs[0]!r} names a LongT5, whose answers are wrong if it is read as a T5: set '
            'model.module=long_t5, or rename it'
        )


def saved_step(leaves: Mapping[str, Leaf]) -> int:
    """Return the step of a checkpoint; 0 if it has none, as Hugging Face's."""
    if 'state/step' not in leaves:
        return 0
    return int(checkpoint.restore({'state/step': leaves['state/step']})['state/step'])


def choose_steps(run: paths.AnyPath, text: str, steps: Sequence[int]) -> list[int]:
    """Return the steps of a run that `text` names: last (or ''), best, all, or comma-separated numbers."""
    if steps:
        match text.lower():
            case '' | 'last':
                return [steps[-1]]
            case 'all':
                return list(steps)
            case 'best':
                return [best.best_step(run, steps)]
    names = {name.strip() for name in text.split(',')}
    available = list(map(str, steps))
    if not names <= set(available):
        raise Refused(
            f'step={text}: {run} has the steps {first_ten(available) or "of no run"}: name these'
        )
    return sorted(map(int, names))


def is_encoder(leaves: Mapping[str, Leaf]) -> bool:
    """Return whether a checkpoint has the parameters of an encoder, and none of a decoder."""
    stacks = {path.split('/')[0] for path in checkpoint.parameters(leaves)}
    return 'encoder' in stacks and 'decoder' not in stacks


def config_beside(directory: paths.AnyPath) -> T5Config | None:
    """Return the config of one of our checkpoints; None for others."""
    settings = read_stored(directory).get('model')
    if not settings:
        return None
    # A setting that is newer than the checkpoint has its default.
    defaults = base.get_config().model.to_dict()
    unknown = sorted(settings.keys() - defaults.keys())
    with named(f'{directory}/config.json'):
        if unknown:
            raise Refused(f'model has {unknown}: restore it from a copy')
        module = own_model.module_of(directory, (defaults | settings)['module'])
        return own_model.load({**defaults, **settings, 'module': module})


def config_from_shapes(directory: paths.AnyPath, shapes: Mapping[str, tuple[int, ...]]) -> T5Config:
    """Return the T5Config of a parameter tree. Shapes do not tell gelu from silu: T5 1.1's settings are assumed."""
    bias = 'encoder/layers_0/relpos_bias/rel_embedding'
    is_per_layer = bias in shapes
    if not is_per_layer:
        bias = 'encoder/relpos_bias/rel_embedding'
    mlp = 'encoder/layers_0/mlp'
    if f'{mlp}/expert/wo/kernel' in shapes:  # Switch-C: experts in all layers
        mlp = f'{mlp}/expert'
    activations: tuple[str, ...] = ('relu',)
    if f'{mlp}/wi_0/kernel' in shapes:
        activations = ('gelu', 'linear')
    embedding = 'token_embedder/embedding'
    wo = f'{mlp}/wo/kernel'
    out = 'encoder/layers_0/attention/out/kernel'
    for path in (embedding, bias, wo, out):
        num_dims = 3 if '/expert/' in path else 2
        if len(shapes.get(path, ())) != num_dims:
            raise Refused(f'{directory} has no matrix {path!r}: name {t5x.FORMATS}')
    vocab_size, emb_dim = shapes[embedding]
    num_heads, num_buckets = shapes[bias]
    mlp_dim = shapes[wo][-2]
    joined_heads_dim = shapes[out][0]
    config = T5Config(
        vocab_size=vocab_size,
        dtype='float32',
        emb_dim=emb_dim,
        num_heads=num_heads,
        num_encoder_layers=_count_layers(shapes, 'encoder'),
        num_decoder_layers=_count_layers(shapes, 'decoder'),
        head_dim=joined_heads_dim // num_heads,
        mlp_dim=mlp_dim,
        mlp_activations=activations,
        dropout_rate=0.1,
        logits_via_embedding='decoder/logits_dense/kernel' not in shapes,
        float32_attention_logits=False,
        relpos_bias_per_layer=is_per_layer,
        relative_attention_num_buckets=num_buckets,
    )
    own_model.check_values(config)
    if 'encoder/side_relpos_bias/rel_embedding' in shapes:
        options = {'encoder_attention': 'transient_global'}
        config = own_model.as_family(config, hugging_face.LONG_T5, options)
    for i in range(config.num_encoder_layers):
        router = shapes.get(f'encoder/layers_{i}/mlp/router/router_weights/w/kernel')
        if router:
            experts = {'num_experts': router[-1], 'sparse_step': i + 1}
            return own_model.as_family(config, hugging_face.SWITCH, experts)
    return config


def _count_layers(shapes: Mapping[str, tuple[int, ...]], stack: str) -> int:
    pattern = rf'{stack}/layers_\d+/mlp/(expert/)?wo/kernel'
    return sum(bool(re.fullmatch(pattern, path)) for path in shapes)


# Adapters: a checkpoint with only the trained parameters, and the name of the base with the others.

# A base's fingerprint covers only the values of these arrays: reading all would take as long as restoring them.
FINGERPRINTED = r'target/(.+_norm/scale|(encoder|decoder)/layers_0/.+)'


def describe_base(base: OpenedCheckpoint) -> dict[str, str]:
    """Return what config.json records about the base of adapters: its directory and a fingerprint."""
    if any(isinstance(leaf, peft.MergedKernel) for leaf in base.leaves.values()):
        raise Refused(
            f'{base.directory} holds adapters: merge them with --mode=convert, and name the result'
        )
    fingerprint = hashlib.blake2b(digest_size=16)
    for path, leaf in sorted(base.leaves.items()):
        if checkpoint.is_parameter(path):
            fingerprint.update(f'{path} {tuple(leaf.shape)}'.encode())
        if re.fullmatch(FINGERPRINTED, path):
            fingerprint.update(np.asarray(checkpoint.read_leaf(leaf), np.float32).tobytes())
    return {'directory': hub.name_of(base.directory), 'fingerprint': fingerprint.hexdigest()}


def open_base(directory: paths.AnyPath, restore_path: str = '') -> OpenedCheckpoint | None:
    """Open the base of the adapters in `directory`; return None if it holds none.

    The base is where the run recorded it, or at `restore_path` if that differs from the run's.
    """
    settings = read_stored(directory)
    if 'base' not in settings:
        return None
    record = settings['base'] if isinstance(settings['base'], dict) else {}
    path = str(record.get('directory'))
    if restore_path and restore_path != settings.get('restore', {}).get('path'):
        path = restore_path
    try:
        base = open_checkpoint(path)
        if describe_base(base)['fingerprint'] != record.get('fingerprint'):
            raise Refused('it is another model now')
    except Refused as error:
        raise Refused(
            f'{directory} holds adapters of {path}: {error}: restore the checkpoint of restore.path'
        ) from error
    return base


def merge(adapters: OpenedCheckpoint, base: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return the model of adapters and their base: its parameters and step."""
    config = config_beside(adapters.directory)
    assert config is not None
    parameters = checkpoint.parameters(base.leaves) | checkpoint.parameters(adapters.leaves)
    parameters = lora.merge(config, parameters, peft.MergedKernel)
    leaves = {'state/step': adapters.leaves['state/step']}
    for path, leaf in parameters.items():
        leaves[f'{checkpoint.PARAMETER_PREFIX}{path}'] = leaf
    return adapters._replace(leaves=leaves, config=lora.without_adapters(config))


def _open_peft(folder: paths.AnyPath) -> OpenedCheckpoint:
    """Return the model of peft's adapters and their base: only its parameters."""
    settings = peft.read_settings(folder)
    name = settings.get('base_model_name_or_path')
    try:
        directory = paths.source_path(base_of(folder))
        if peft.is_folder(directory):
            raise Refused('it holds adapters itself')
        base = open_model(directory, part='')
    except (Refused, OSError) as error:
        raise Refused(
            f'{folder}: base_model_name_or_path={name!r} cannot be opened ({error}): write the path of the base'
        ) from error
    parameters = checkpoint.parameters(base.leaves)
    adapters = peft.read_index(folder, settings, base.config, parameters)
    config = base.config
    if peft.PROMPT in adapters:
        length = {'length': adapters[peft.PROMPT].shape[0]}
        config = own_model.as_family(config, peft.PROMPT_FAMILY, length)
    parameters |= adapters
    leaves = {f'{checkpoint.PARAMETER_PREFIX}{path}': x for path, x in parameters.items()}
    return OpenedCheckpoint(folder, leaves, config, base.note)
