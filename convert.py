"""Checkpoints of any format: detect which one it is, open it, write it as another.

Source: T5X t5x/checkpoints.py; t5x/examples/scalable_t5 for stacked layers.
"""

import dataclasses
import enum
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import logging

import best
import checkpoint
import hugging_face
import mesh_tf
import model
import optimizer
import own_model
import paths
from configs import base
from settings import first_ten
from vocabulary import ByteVocabulary, find_vocabulary, read_settings


class Format(enum.Enum):
    """The formats that are read. Those that are written have the names of `--format`."""

    T5X = 't5x'
    MESH_TF = 'mesh_tf'
    HUGGING_FACE = 'hf'


# What a checkpoint is opened for: a model that decodes, its encoder alone, or whatever it holds.
PARTS = ('whole', 'encoder', '')
# The paths of a decoder's arrays, and the names of their files.
DECODER = r'(target|state[./]param_states)[./]decoder[./].+'


class OpenedCheckpoint(NamedTuple):
    """A checkpoint whose large arrays are not read yet.

    `directory` is its folder, or its prefix if the user named that of a Mesh-TF checkpoint. `leaves` is
    {T5X's path: leaf}; a leaf is an array if it is small, else a `checkpoint.LazyArray`. `config` is that of a
    Hugging Face folder, else None.
    """

    directory: Any
    format: Format
    leaves: dict[str, Any]
    config: model.T5Config | None


class OpenedModel(NamedTuple):
    """An opened checkpoint whose parameters are those of `config`.

    `note` says in one line what is assumed of it; '' for nothing. It is for users whose command is not refused.
    """

    directory: Any
    leaves: dict[str, Any]
    config: model.T5Config
    note: str


def detect_format(path: str | Path) -> Format:
    """Return the format of the checkpoint that `path` names. Every reader asks this function only.

    T5X's is the format of all that is no other: `checkpoint.read_index` says what such a path lacks. Raises
    ValueError for formats that are recognized but not read (Orbax, pickles and other weights of transformers),
    and for one file of a Hugging Face folder.
    """
    directory = paths.to_path(path)
    if checkpoint.newest(directory) is not None:
        return Format.T5X
    if paths.is_file(directory):
        hugging_face.check_not_part(directory)
    if hugging_face.is_folder(directory) or hugging_face.is_single_file(directory):
        return Format.HUGGING_FACE
    if mesh_tf.find_prefix(directory) is not None:
        return Format.MESH_TF
    for name in ('_METADATA', '_CHECKPOINT_METADATA', 'checkpoint_*/_CHECKPOINT_METADATA'):
        for file in directory.glob(name):
            raise ValueError(f'{file.parent} has the layout of Orbax: {checkpoint.ORBAX_REMEDY}')
    return Format.T5X


def open_model(
    path: str | Path, config: model.T5Config | None = None, step: str = '', part: str = 'whole'
) -> OpenedModel:
    """Open the checkpoint that `path`, `step` and `part` name, as in `open_checkpoint`, as a model of `config`.

    Without `config`, takes the checkpoint's own config, or else derives one from the shapes. That of an encoder alone
    has no decoder layers. Raises ValueError unless the checkpoint is valid and its parameters are those of the config.
    """
    opened = open_checkpoint(path, step, part)
    note = ''
    shapes = checkpoint.shapes(checkpoint.parameters(opened.leaves))
    if config is None:
        config = opened.config or _config_beside(opened.directory)
        if config is None:
            config = config_from_shapes(shapes)
            if len(config.mlp_activations) > 1:
                note = (
                    f'{opened.directory} has no config, and its arrays do not tell the activation: '
                    f'mlp_activations={config.mlp_activations} is assumed: name another with '
                    "config=dataclasses.replace(t5.config, mlp_activations=('silu', 'linear')), or with --config=FILE"
                )
    elif own_model.recorded(opened.directory):
        own_model.check_same(opened.directory, config, 'leave the config out')
    config = own_model.of(config).without_adapters(config)  # they are merged
    if is_encoder(opened.leaves):
        config = dataclasses.replace(config, num_decoder_layers=0, logits_via_embedding=True)
    try:
        checkpoint.compare(own_model.of(config).shapes(config), shapes)
    except ValueError as error:
        raise ValueError(f'{opened.directory}: {error}') from None
    return OpenedModel(opened.directory, opened.leaves, config, note)


def open_checkpoint(path: str | Path, step: str = '', part: str = 'whole') -> OpenedCheckpoint:
    """Open a workdir, a checkpoint of any format, or T5X's index file in one.

    `step` names the checkpoint of a workdir: 'best', a number, or 'last', which is the default. Adapters are
    opened with their base and merged. `part` is one of PARTS: of 'encoder' no file of the decoder is read. Raises
    ValueError for what is no checkpoint, for a checkpoint of ours that is damaged, and for an encoder alone where
    the whole model is asked for.
    """
    opened = _open_checkpoint(path, step, part)
    if part == 'whole' and is_encoder(opened.leaves):
        raise ValueError(
            f'{opened.directory} is an encoder alone: only infer.load, --mode=infer --encode and, with '
            'restore.strict=False, training take it: name a checkpoint that has a decoder'
        )
    if part != 'encoder':
        return opened
    leaves = {}
    for name, leaf in opened.leaves.items():
        if not re.fullmatch(DECODER, name):
            leaves[name] = leaf
    return opened._replace(leaves=leaves)


def is_encoder(leaves: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has the parameters of an encoder, and none of a decoder."""
    stacks = {path.split('/')[0] for path in checkpoint.parameters(leaves)}
    return 'encoder' in stacks and 'decoder' not in stacks


def _open_checkpoint(path: str | Path, step: str, part: str) -> OpenedCheckpoint:
    directory = paths.to_path(path)
    steps = checkpoint.steps(directory)
    if steps:
        directory /= f'checkpoint_{find_step(directory, step, steps)}'
    elif step:
        raise ValueError(
            f'step={step}: {path} is no run with checkpoint_STEP folders: name the folder of a run, or '
            'leave step out'
        )
    elif directory.name == 'checkpoint' and paths.is_file(directory):
        directory = directory.parent
    detected = detect_format(directory)
    if detected is Format.HUGGING_FACE:
        folder = hugging_face.read_index(directory, is_encoder=part == 'encoder')
        config = None if hugging_face.is_single_file(directory) else folder.config
        return OpenedCheckpoint(directory, detected, dict(folder.entries), config)
    if detected is Format.T5X:
        checkpoint.verify(directory, ignored=DECODER if part == 'encoder' else '')
    opened = OpenedCheckpoint(
        directory=directory,
        format=detected,
        leaves=_read_index(directory, detected),
        config=None,
    )
    base = open_base(directory)
    if base is None:
        return opened
    return merge(opened, base)


def find_step(run: Any, step: str, steps: Sequence[int]) -> int:
    """Return the one of the steps of a run that `step` names, as in `open_checkpoint`."""
    if step in ('', 'last'):
        return steps[-1]
    if step == 'best':
        return best.best_step(run, steps)
    for number in steps:
        if step == str(number):
            return number
    raise ValueError(
        f'step={step}: {run} has no such checkpoint, but those of '
        f'{first_ten([str(number) for number in steps])}: name one of these, last or best'
    )


def read_index(path: str | Path) -> dict[str, Any]:
    """Return {T5X's path: leaf} of a checkpoint of any format, as `OpenedCheckpoint.leaves` has it.

    Unlike `open_checkpoint` it does not look for the newest checkpoint of a workdir, and verifies nothing.
    """
    directory = paths.to_path(path)
    return _read_index(directory, detect_format(directory))


def _read_index(directory: Any, detected: Format) -> dict[str, Any]:
    if detected is Format.HUGGING_FACE:
        return dict(hugging_face.read_index(directory).entries)
    if detected is Format.MESH_TF:
        return dict(mesh_tf.read_index(mesh_tf.find_prefix(directory)))
    return use_averages(unstack(checkpoint.read_index(directory)))


def use_averages(index: dict[str, Any]) -> dict[str, Any]:
    """Return `index` with the moving averages of parameters, where it has them, in their place.

    A run with `optimizer.ema_decay` saves them. Its raw parameters are those of `checkpoint.read_index`.
    """
    averages = optimizer.average_paths(index)
    used = {path: leaf for path, leaf in index.items() if path not in averages}
    for path, parameter in averages.items():
        used[parameter] = index[path]
    return used


def _config_beside(directory: Any) -> model.T5Config | None:
    """Return the config in a checkpoint of ours; None where there is none."""
    settings = read_settings(directory).get('model')
    if not settings:
        return None
    # A setting that did not exist when the checkpoint was written has its default.
    settings = base.get_config().model.to_dict() | settings
    try:
        return own_model.config_of_checkpoint(directory, settings)
    except (ValueError, TypeError) as error:
        raise ValueError(f'{directory}/config.json: {error}') from error


def config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> model.T5Config:
    """Return the T5Config of a parameter tree. What shapes cannot tell (gelu or silu, dtype) is T5 1.1's."""
    is_per_layer = 'encoder/layers_0/relpos_bias/rel_embedding' in shapes
    bias = 'encoder/relpos_bias/rel_embedding'
    if is_per_layer:
        bias = 'encoder/layers_0/relpos_bias/rel_embedding'
    activations: tuple[str, ...] = ('relu',)
    if 'encoder/layers_0/mlp/wi_0/kernel' in shapes:
        activations = ('gelu', 'linear')
    try:
        vocab_size, emb_dim = shapes['token_embedder/embedding']
        num_heads, _ = shapes[bias]
        mlp_dim, _ = shapes['encoder/layers_0/mlp/wo/kernel']
        joined_heads_dim, _ = shapes['encoder/layers_0/attention/out/kernel']
    except KeyError as missing:
        raise ValueError(f'not a T5 of T5X: the checkpoint has no parameter {missing}') from None
    return model.T5Config(
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
    )


def _count_layers(shapes: Mapping[str, tuple[int, ...]], stack: str) -> int:
    return sum(bool(re.fullmatch(rf'{stack}/layers_\d+/mlp/wo/kernel', path)) for path in shapes)


# Adapters (LoRA): a checkpoint that holds the trained parameters alone, and names the one that has the others.

# The fingerprint of a base has the values of these arrays, which training changes first of all: to read all arrays
# would take as long as restoring them.
FINGERPRINTED = r'target/(.+_norm/scale|(encoder|decoder)/layers_0/.+)'


@dataclass(frozen=True, eq=False)
class MergedKernel:
    """A kernel of the base with its adapters: a `checkpoint.LazyArray`."""

    config: model.T5Config
    kernel: Any
    lora_a: Any
    lora_b: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.kernel.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype('float32')

    def read(self) -> np.ndarray:
        """Return what model.Kernel computes with, float32."""
        arrays = []
        for leaf in (self.kernel, self.lora_a, self.lora_b):
            arrays.append(jnp.asarray(checkpoint.read_leaf(leaf), jnp.float32))
        kernel, lora_a, lora_b = arrays
        model = own_model.of(self.config)
        return np.asarray(model.adapted_kernel(self.config, kernel, lora_a, lora_b))


def describe_base(base: OpenedCheckpoint) -> dict[str, str]:
    """Return what config.json has of the checkpoint that adapters belong to: where it is, and a fingerprint.

    Raises ValueError for one that holds adapters itself.
    """
    if any(isinstance(leaf, MergedKernel) for leaf in base.leaves.values()):
        raise ValueError(
            f'{base.directory} holds adapters, which are no base for others: merge it with --mode=convert '
            f'--from={base.directory} --to=FOLDER, and name that folder'
        )
    fingerprint = hashlib.blake2b(digest_size=16)
    for path, leaf in sorted(base.leaves.items()):
        if checkpoint.is_parameter(path):
            fingerprint.update(f'{path} {tuple(leaf.shape)}'.encode())
        if re.fullmatch(FINGERPRINTED, path):
            fingerprint.update(np.asarray(checkpoint.read_leaf(leaf), np.float32).tobytes())
    return {'directory': str(base.directory), 'fingerprint': fingerprint.hexdigest()}


def open_base(directory: Any, restore_path: str = '') -> OpenedCheckpoint | None:
    """Open the checkpoint that the adapters in `directory` belong to; None where it holds none.

    It is where the run found it, or at `restore_path` if that is another path than the run's. Raises ValueError
    unless it is there, with the parameters that it had.
    """
    settings = read_settings(directory)
    if 'base' not in settings:
        return None
    path = settings['base']['directory']
    if restore_path and restore_path != settings['restore']['path']:
        path = restore_path
    try:
        base = open_checkpoint(path)
    except ValueError as error:
        raise ValueError(
            f'{directory} holds adapters of {path}, which cannot be opened ({error}): put it back there, or a link '
            'to it'
        ) from error
    if describe_base(base)['fingerprint'] != settings['base']['fingerprint']:
        raise ValueError(
            f'{directory} holds adapters of another model than {base.directory} has now: put the checkpoint back '
            f'that restore.path={settings["restore"]["path"]!r} named when its run began'
        )
    return base


def merge(adapters: OpenedCheckpoint, base: OpenedCheckpoint) -> OpenedCheckpoint:
    """Return the model of adapters and their base: its parameters and the step, without optimizer state."""
    config = _config_beside(adapters.directory)
    assert config is not None
    parameters = checkpoint.parameters(base.leaves) | checkpoint.parameters(adapters.leaves)
    model = own_model.of(config)
    merged = model.merge_adapters(parameters, functools.partial(MergedKernel, config))
    leaves = {'state/step': adapters.leaves['state/step']}
    for path, leaf in merged.items():
        leaves[f'{checkpoint.PARAMETER_PREFIX}{path}'] = leaf
    return adapters._replace(leaves=leaves, config=model.without_adapters(config))


# Writing.


def convert_checkpoint(source: str | Path, target: str | Path, form: str, step: str = '') -> Path:
    """Write the checkpoint that `infer.load` would open at `source` to the folder `target`; return its path.

    `form` is 't5x', with whatever optimizer state there is, as `target`/checkpoint_STEP, or 'hf', parameters
    only. Arrays keep their dtypes and are read as they are written. All or nothing: an error leaves `target` as
    it was. Raises ValueError for a target that has other files or lies in the source, and warns where there is no
    vocabulary.
    """
    if form not in (Format.T5X.value, Format.HUGGING_FACE.value):
        raise ValueError(f"format={form!r}: must be 't5x' or 'hf'")
    target = paths.disk_path(target)
    paths.check_new(target)
    source_path = paths.to_path(source)
    if isinstance(source_path, Path) and target.resolve().is_relative_to(source_path.resolve()):
        raise ValueError(
            f'{target} is or lies in {source_path}, which is read: name a folder elsewhere'
        )
    opened = open_model(source_path, step=step)
    vocabulary = find_vocabulary(opened.directory)
    vocabulary_model = vocabulary.model if vocabulary else b''
    if Format(form) is Format.HUGGING_FACE:
        parameters = checkpoint.parameters(opened.leaves)
        hugging_face.write(target, opened.config, parameters, vocabulary_model or None)
        written = target
        brings_vocabulary = bool(vocabulary_model)
    else:
        written = _write_t5x(target, opened, vocabulary_model)
        # config.json has what a vocabulary of bytes needs.
        brings_vocabulary = bool(vocabulary_model) or isinstance(vocabulary, ByteVocabulary)
    if opened.note:
        logging.warning(opened.note)
    if not brings_vocabulary:
        logging.warning(
            '%s brings no vocabulary file, so %s has none: pass vocabulary=... to load it, '
            'or copy spiece.model into it',
            opened.directory,
            written,
        )
    return written


def _write_t5x(target: Path, opened: OpenedModel, vocabulary_model: bytes) -> Path:
    """Write `target`/checkpoint_STEP, with the vocabulary in it, and beside it in a new folder."""
    tree = {'state/step': np.int32(0), **opened.leaves}
    step = int(checkpoint.read_leaf(tree['state/step']))
    final = target / f'checkpoint_{step}'
    run_vocabulary = target / 'vocabulary.model'
    _check_t5x_target(target, final, run_vocabulary, vocabulary_model)
    is_new = not target.exists() or not any(target.iterdir())
    data_settings = read_settings(opened.directory)['data']
    settings = {
        'model': dataclasses.asdict(opened.config),
        'data': {name: data_settings[name] for name in ('extra_ids', 'vocabulary')},
    }
    files = {
        'config.json': json.dumps(settings).encode(),
        **own_model.record_of(opened.config),
    }
    if vocabulary_model:
        files['vocabulary.model'] = vocabulary_model
    with paths.unfinished(final) as unfinished:
        try:
            checkpoint.save(unfinished, step, tree, files).rename(final)
        except OSError as error:  # it names the unfinished folder, which is removed now
            cause = error.__cause__
            if isinstance(cause, ValueError | OSError):
                raise cause from None
            raise
        if vocabulary_model and is_new:  # other checkpoints must not find it
            (unfinished / 'vocabulary.model').write_bytes(vocabulary_model)
            (unfinished / 'vocabulary.model').rename(run_vocabulary)
    return final


def _check_t5x_target(
    target: Path, final: Path, run_vocabulary: Path, vocabulary_model: bytes
) -> None:
    """Raise ValueError unless `target` is new, or a folder of checkpoints that lacks `final`."""
    has_other_vocabulary = (
        run_vocabulary.exists() and run_vocabulary.read_bytes() != vocabulary_model
    )
    if (target / 'lock').exists() or has_other_vocabulary:
        raise ValueError(f"{target} is a run's, or has another vocabulary: name another folder")
    if target.exists():
        for file in sorted(target.iterdir()):
            if file != run_vocabulary and not file.name.startswith('checkpoint_'):
                raise ValueError(
                    f'{target} holds {file.name}: name a new folder, or one of checkpoints'
                )
    if final.exists():
        raise ValueError(f'{final} exists: remove it or name another folder')


# umT5 in T5X (t5x/examples/scalable_t5): one array has a parameter of all layers, which are its axis 1, and
# heads have an axis of their own.

STACKED_PARAMETER = re.compile(r'target/(encoder|decoder)/\1/(.+)')
MAX_LAYERS = 1000  # a few bytes could claim any number


@dataclass(frozen=True, eq=False)
class LayerEntry:
    """One layer of a stacked array, with its shape in our tree: a `checkpoint.LazyArray`."""

    stack: Any
    layer: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.stack.dtype

    def read(self) -> np.ndarray:
        """Return the layer in its stored dtype."""
        return _read_stack(self.stack)[:, self.layer].reshape(self.shape)


def _read_stack(stack: Any) -> np.ndarray:
    if isinstance(stack, np.ndarray):
        return stack
    return _read_once(stack)


@functools.lru_cache(maxsize=1)
def _read_once(stack: checkpoint.LazyArray) -> np.ndarray:
    """Read an array once for all its layers, which follow each other in an index."""
    return stack.read()


def unstack(index: dict[str, Any]) -> dict[str, Any]:
    """Return `index` of a T5X checkpoint with one leaf a layer and parameter, if its layers are stacked.

    Then it has no optimizer state, which was factored over all layers at once.
    """
    layers: dict[str, LayerEntry] = {}
    others: dict[str, Any] = {}
    for path, leaf in index.items():
        match = STACKED_PARAMETER.fullmatch(path)
        if match:
            stack, name = match.groups()
            for i, entry in enumerate(_layers_of(path, leaf)):
                layers[f'target/{stack}/layers_{i}/{name}'] = entry
        elif not path.startswith('state/param_states/'):
            others[path] = leaf
    if not layers:
        return index
    return others | layers


def _layers_of(path: str, leaf: Any) -> list[LayerEntry]:
    """Return the layers of a stacked array [first dimension, layers, the other dimensions]."""
    if len(leaf.shape) < 2 or leaf.shape[1] > MAX_LAYERS:
        raise ValueError(
            f'{path} has shape {leaf.shape}: it is no stack of 1 to {MAX_LAYERS} layers on axis 1: '
            'do not trust this checkpoint'
        )
    first, num_layers, *rest = leaf.shape
    shape: tuple[int, ...]
    if path.endswith('out/kernel'):  # [heads, layers, head size, embed]
        shape = (first * math.prod(rest[:-1]), *rest[-1:])
    elif rest:  # [embed, layers, heads, head size], [embed, layers, mlp]
        shape = (first, math.prod(rest))
    else:  # [embed, layers]
        shape = (first,)
    return [LayerEntry(leaf, layer, shape) for layer in range(num_layers)]
