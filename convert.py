"""Checkpoints of any format: which one is this, open it, write it as another.

Source: T5X t5x/checkpoints.py; t5x/examples/scalable_t5 for stacked layers.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

import checkpoint
import hugging_face
import mesh_tf
import model
import paths
from vocabulary import find_vocabulary, read_settings


def open_model(
    path: str | Path, config: model.T5Config | None = None
) -> tuple[Any, model.T5Config, dict[str, Any]]:
    """Where the checkpoint of `load` lies, its config and its index. ValueError unless the checkpoint is whole
    and its parameters are those of the config."""
    directory, index, own_config = find_checkpoint(path)
    shapes = checkpoint.shapes(checkpoint.parameters(index))
    config = config or own_config or config_from_shapes(shapes)
    try:
        checkpoint.compare(model.shapes(config), shapes)
    except ValueError as error:
        raise ValueError(f'{directory}: {error}') from None
    return directory, config, index


def find_checkpoint(path: str | Path) -> tuple[Any, dict[str, Any], model.T5Config | None]:
    """Where the checkpoint of `load` lies, its index, and the config beside it if there is one. ValueError
    where it is damaged."""
    directory = paths.to_path(path)
    step = checkpoint.newest(directory)
    if step is not None:
        directory /= f'checkpoint_{step}'
    elif directory.name == 'checkpoint' and paths.is_file(directory):
        directory = directory.parent
    checkpoint.verify(directory)
    if hugging_face.is_folder(directory):
        config, entries = hugging_face.read_index(directory)
        return directory, dict(entries), config
    index, sizes = read_index(directory), read_settings(directory).get('model')
    try:
        return directory, index, model.T5Config(**sizes) if sizes else None
    except (ValueError, TypeError) as error:
        raise ValueError(f'{directory}/config.json: {error}') from error


def read_index(path: str | Path) -> dict[str, Any]:
    """{path: leaf} of a checkpoint of any format. A leaf is an array if it is small, else it has `shape`,
    `dtype` and `read()`."""
    directory = paths.to_path(path)
    if prefix := mesh_tf.find_prefix(directory):
        return dict(mesh_tf.read_index(prefix))
    if hugging_face.is_folder(directory):
        return dict(hugging_face.read_index(directory)[1])
    if paths.is_file(directory):
        hugging_face.check_not_weights(directory)
    return unstack(checkpoint.read_index(directory))


def convert_checkpoint(source: str | Path, target: str | Path, form: str) -> Path:
    """Write what `load` would open at `source` to the folder `target`, in its dtypes; return its path.

    `form` is 't5x', with whatever optimizer state there is, as `target`/checkpoint_STEP, or 'hf', parameters
    alone. Arrays are read as they are written. All or nothing: an error leaves `target` as it was. Raises
    ValueError for a target that has other files or lies in the source, and warns where there is no vocabulary.
    """
    if form not in ('t5x', 'hf'):
        raise ValueError(f"format={form!r}: must be 't5x' or 'hf'")
    target = paths.disk_path(target)
    paths.check_new(target)
    place = paths.to_path(source)
    if isinstance(place, Path) and target.resolve().is_relative_to(place.resolve()):
        raise ValueError(f'{target} is or lies in {place}, which is read: name a folder elsewhere')
    directory, config, index = open_model(place)
    vocabulary = find_vocabulary(directory)
    pieces = vocabulary.model if vocabulary else b''
    if form == 'hf':
        arrays = checkpoint.parameters(index)
        hugging_face.write(target, config, arrays, pieces or None)
        written = target
    else:
        written = _write_t5x(target, directory, config, index, pieces)
    if not pieces and (form == 'hf' or not vocabulary):
        logging.warning(
            '%s brings no vocabulary file, so %s has none: pass vocabulary=... to load it, '
            'or copy spiece.model into it',
            *(directory, written),
        )
    return written


def _write_t5x(
    target: Path, directory: Any, config: model.T5Config, index: Mapping[str, Any], pieces: bytes
) -> Path:
    """Write `index` as `target`/checkpoint_STEP, with the vocabulary in it and beside it."""
    tree = {'state/step': np.int32(0), **index}
    step = int(checkpoint.read_leaf(tree['state/step']))
    final, kept = target / f'checkpoint_{step}', target / 'vocabulary.model'
    if (target / 'lock').exists() or (kept.exists() and kept.read_bytes() != pieces):
        raise ValueError(f"{target} is a run's, or has another vocabulary: name another folder")
    names = sorted(file.name for file in target.iterdir()) if target.exists() else []
    if others := [x for x in names if x != kept.name and not x.startswith('checkpoint_')]:
        raise ValueError(f'{target} holds {others[0]}: name a new folder, or one of checkpoints')
    if final.exists():
        raise ValueError(f'{final} exists: remove it or name another folder')
    own = {name: read_settings(directory)['data'][name] for name in ('extra_ids', 'vocabulary')}
    settings = {'model': dataclasses.asdict(config), 'data': own}
    files = {'config.json': json.dumps(settings).encode()}
    if pieces:
        files['vocabulary.model'] = pieces
    with paths.unfinished(final) as whole:
        try:
            checkpoint.save(whole, step, tree, files).rename(final)
        except OSError as error:  # the folder that it names is gone soon
            cause = error.__cause__ or error
            if isinstance(cause, ValueError):
                raise cause from None
            raise OSError(f'{final} is not written ({cause}): see to the disk') from error
        if pieces and not names:  # checkpoints of others must not find it
            (whole / kept.name).write_bytes(pieces)
            (whole / kept.name).rename(kept)
    return final


def config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> model.T5Config:
    """T5Config of a parameter tree; what shapes cannot tell (gelu or silu, dtype) is T5 1.1's."""
    layers = [name.split('/')[0] for name in shapes if name.endswith('/mlp/wo/kernel')]
    per_layer = 'encoder/layers_0/relpos_bias/rel_embedding' in shapes
    bias = f'encoder/{"layers_0/" if per_layer else ""}relpos_bias/rel_embedding'
    try:
        vocab_size, emb_dim = shapes['token_embedder/embedding']
        num_heads, _ = shapes[bias]
        mlp_dim, _ = shapes['encoder/layers_0/mlp/wo/kernel']
        joined, _ = shapes['encoder/layers_0/attention/out/kernel']
    except KeyError as missing:
        raise ValueError(f'not a T5 of T5X: the checkpoint has no parameter {missing}') from None
    activations = ('gelu', 'linear') if 'encoder/layers_0/mlp/wi_0/kernel' in shapes else ('relu',)
    depths = (layers.count('encoder'), layers.count('decoder'))
    sizes = (emb_dim, num_heads, *depths, joined // num_heads, mlp_dim)
    return model.T5Config(
        *(vocab_size, 'float32', *sizes),
        mlp_activations=activations,
        logits_via_embedding='decoder/logits_dense/kernel' not in shapes,
        relpos_bias_per_layer=per_layer,
    )


# umT5 in T5X (t5x/examples/scalable_t5): one array has a parameter of all layers, which are its axis 1, and
# heads have an axis of their own.

MAX_LAYERS = 1000  # a few bytes could claim any number


@dataclass(frozen=True, eq=False)
class LayerEntry:
    """One layer of a stacked array, shaped as in our tree."""

    stack: Any
    layer: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.stack.dtype

    def read(self) -> np.ndarray:
        x = self.stack if isinstance(self.stack, np.ndarray) else _read_stack(self.stack)
        return x[:, self.layer].reshape(self.shape)


@functools.lru_cache(1)  # chunks hold all layers, and an index has an array's layers in a row
def _read_stack(stack):
    return stack.read()


def unstack(index: Mapping[str, Any]) -> dict[str, Any]:
    """The `index` of a T5X checkpoint with each layer's parameters apart, if they are stacked; then without the
    optimizer's state, which was factored over all layers at once."""
    layers = {}
    for path, leaf in index.items():
        if match := re.fullmatch(r'target/(encoder|decoder)/\1/(.+)', path):
            stack, name = match.groups()
            if len(leaf.shape) < 2 or leaf.shape[1] > MAX_LAYERS:
                raise ValueError(f'{path} of shape {leaf.shape} is no stack of {MAX_LAYERS} layers')
            first, num_layers, *rest = leaf.shape
            if name.endswith('out/kernel'):
                shape = (first * math.prod(rest[:-1]), *rest[-1:])  # [heads, head size, embed]
            else:
                shape = (first, math.prod(rest))[: 1 + len(rest)]  # [embed, heads, head size]
            for i in range(num_layers):
                layers[f'target/{stack}/layers_{i}/{name}'] = LayerEntry(leaf, i, shape)
    stacked = re.compile(r'target/(encoder|decoder)/\1/.+|state/param_states/.+')
    others = {path: x for path, x in index.items() if not layers or not stacked.fullmatch(path)}
    return others | layers
