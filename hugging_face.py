"""Hugging Face's folders as T5X's tree, read and written: safetensors, no torch, no pickle.

    config.json, spiece.model               sizes, vocabulary
    model.safetensors                       arrays by name; large models in several files and an index

torch's Linear keeps a kernel transposed; token table and norms are alike. Source: transformers (4.57, 5.23)
models/{t5,mt5,umt5}.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

import checkpoint
import model
import paths

WEIGHTS, WEIGHTS_INDEX = 'model.safetensors', 'model.safetensors.index.json'
# Weights that are not read: how to save them as safetensors.
REMEDY = 'load it with transformers, if you trust it, and save_pretrained it as safetensors'
OTHER_WEIGHTS = {
    'pytorch_model.bin': f'a pickle can run code: {REMEDY}',
    'pytorch_model.bin.index.json': f'pickles can run code: {REMEDY}',
    'flax_model.msgpack': f'only safetensors are read: {REMEDY} (from_flax=True)',
    'tf_model.h5': f'only safetensors are read: {REMEDY} (from_tf=True)',
}
ARCHITECTURES = {
    't5': 'T5ForConditionalGeneration',
    'mt5': 'MT5ForConditionalGeneration',
    'umt5': 'UMT5ForConditionalGeneration',
}
SIZES = {
    'vocab_size': 'vocab_size',
    'd_model': 'emb_dim',
    'num_heads': 'num_heads',
    'num_layers': 'num_encoder_layers',
    'num_decoder_layers': 'num_decoder_layers',
    'd_kv': 'head_dim',
    'd_ff': 'mlp_dim',
}
FEED_FORWARDS = {  # feed_forward_proj -> dense_act_fn, mlp_activations; gelu_new is the tanh form
    'relu': ('relu', ('relu',)),
    'gated-gelu': ('gelu_new', ('gelu', 'linear')),
    'gated-silu': ('silu', ('silu', 'linear')),
}
FIXED = {  # what model.py and data.py leave no choice about
    'is_encoder_decoder': True,
    'layer_norm_epsilon': 1e-6,
    'relative_attention_num_buckets': model.NUM_BUCKETS,
    'relative_attention_max_distance': model.MAX_DISTANCE,
    'pad_token_id': 0,
    'eos_token_id': 1,
    'decoder_start_token_id': 0,
}
SAFETENSORS_DTYPES = {
    'F64': np.dtype(np.float64),
    'F32': np.dtype(np.float32),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F16': np.dtype(np.float16),
}
# Names of the token table; a folder has one of them or equal copies.
TOKEN_TABLES = ('shared.weight', 'encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
# Stored in old folders, read by no model.
UNUSED = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'

# Per stack and in Hugging Face's order of a layer's parts: our norm, our module, theirs.
SUBLAYERS = {
    'encoder': (
        ('pre_attention_layer_norm', 'attention', 'SelfAttention'),
        ('pre_mlp_layer_norm', 'mlp', 'DenseReluDense'),
    ),
    'decoder': (
        ('pre_self_attention_layer_norm', 'self_attention', 'SelfAttention'),
        ('pre_cross_attention_layer_norm', 'encoder_decoder_attention', 'EncDecAttention'),
        ('pre_mlp_layer_norm', 'mlp', 'DenseReluDense'),
    ),
}
ATTENTION = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}


def parameter_names(config: model.T5Config) -> dict[str, str]:
    """{our path: Hugging Face's name} of every parameter."""
    gated = len(config.mlp_activations) > 1
    mlp = {name: name for name in (('wi_0', 'wi_1', 'wo') if gated else ('wi', 'wo'))}
    names = {'token_embedder/embedding': 'shared.weight'}
    depths = {'encoder': config.num_encoder_layers, 'decoder': config.num_decoder_layers}
    for stack, depth in depths.items():
        names[f'{stack}/{stack}_norm/scale'] = f'{stack}.final_layer_norm.weight'
        for i in range(depth):
            layer, block = f'{stack}/layers_{i}', f'{stack}.block.{i}.layer'
            for j, (norm, module, theirs) in enumerate(SUBLAYERS[stack]):
                names[f'{layer}/{norm}/scale'] = f'{block}.{j}.layer_norm.weight'
                for kernel, letter in (mlp if module == 'mlp' else ATTENTION).items():
                    path = f'{layer}/{module}/{kernel}/kernel'
                    names[path] = f'{block}.{j}.{theirs}.{letter}.weight'
            if config.relpos_bias_per_layer or i == 0:
                owner = layer if config.relpos_bias_per_layer else stack
                bias = f'{block}.0.SelfAttention.relative_attention_bias.weight'
                names[f'{owner}/relpos_bias/rel_embedding'] = bias
    if not config.logits_via_embedding:
        names['decoder/logits_dense/kernel'] = 'lm_head.weight'
    return names


def is_transposed(path: str) -> bool:
    return path.endswith(('/kernel', '/rel_embedding'))


class SafetensorsEntry(NamedTuple):
    """An array in a safetensors file, its shape as in our tree."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    transposed: bool = False

    def read(self) -> np.ndarray:
        """The array in its stored dtype, as our tree has it."""
        with safetensors.safe_open(self.file, framework='numpy') as file:
            x = file.get_tensor(self.name)
        return _transpose(x) if self.transposed else x


def _transpose(x: np.ndarray) -> np.ndarray:
    """A copy, in strips: numpy itself goes through memory five times slower."""
    y = np.empty(x.shape[::-1], x.dtype)
    for i in range(0, len(x), 16):
        y[:, i : i + 16] = x[i : i + 16].T
    return y


def is_folder(folder: str | Path) -> bool:
    """Whether the folder has weights under one of transformers' names, or a config.json with a model_type."""
    place = paths.to_path(folder)
    if any(paths.is_file(place / name) for name in (WEIGHTS, WEIGHTS_INDEX, *OTHER_WEIGHTS)):
        return True
    if not paths.is_file(place / 'config.json'):
        return False
    content = paths.own_file(place / 'config.json').read_bytes()
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and 'model_type' in settings


def check_not_weights(file: Any) -> None:
    """Raise ValueError for a file of weights, which is not a checkpoint without the config beside it."""
    if file.name in OTHER_WEIGHTS:
        raise ValueError(f'{file} is not read: {OTHER_WEIGHTS[file.name]}')
    if file.suffix == '.safetensors':
        raise ValueError(
            f'{file} is one file of a checkpoint: name its folder, {file.parent}, with config.json'
        )


def read_index(folder: str | Path) -> tuple[model.T5Config, dict[str, SafetensorsEntry]]:
    """The config of a folder, to compute in float32, and {'target/' + our path: entry}; nothing is read but
    headers and the copies of the token table. ValueError for what is no T5 of ours, or lists up to ten names
    that are missing or unknown; shapes are the caller's to compare."""
    if not isinstance(folder := paths.to_path(folder), Path):
        raise ValueError(f'{folder}: safetensors are read from a disk only: copy the folder')
    if paths.is_file(folder / 'config.json'):
        _check_model_type(folder)  # first: other models have other arrays
    found, settings = _find_arrays(folder), paths.read_json(folder / 'config.json')
    try:
        config = _config(settings, found)
    except (ValueError, TypeError) as error:
        raise ValueError(f'{folder}/config.json: {error}') from error
    if config.logits_via_embedding and found['lm_head.weight'] == found['shared.weight']:
        del found['lm_head.weight']
    names = parameter_names(config)
    _check_names(set(names.values()), set(found), f'{folder} is of another model than its config')
    index = {}
    for path, name in names.items():
        entry, transposed = found[name], is_transposed(path)
        shape = entry.shape[::-1] if transposed else entry.shape
        index[f'target/{path}'] = entry._replace(shape=shape, transposed=transposed)
    return config, index


def _check_model_type(folder: Path) -> None:
    model_type = paths.read_json(folder / 'config.json').get('model_type')
    if str(model_type) not in ARCHITECTURES:
        known = ', '.join(ARCHITECTURES)
        raise ValueError(
            f'{folder}/config.json: model_type={model_type}: only {known} are read: bring one of these'
        )


def _config(settings: dict[str, Any], found: Mapping[str, SafetensorsEntry]) -> model.T5Config:
    model_type = str(settings['model_type'])
    for name, value in FIXED.items():
        if settings.get(name) not in (None, value):
            raise ValueError(f'{name}={settings[name]}: only {value} is supported')
    if settings.get('num_decoder_layers') is None:
        settings['num_decoder_layers'] = settings.get('num_layers')
    most = max([len(found), *(n for entry in found.values() for n in entry.shape)])
    for name in SIZES:
        size = settings.get(name)
        if type(size) is not int or not 1 <= size <= most:
            words = f'an integer from 1 to {most}, the most that its arrays allow'
            raise ValueError(f'{name}={size}: must be {words}')
    forward = settings.get('feed_forward_proj', 'relu' if model_type == 't5' else 'gated-gelu')
    activation, activations = FEED_FORWARDS.get(forward, (None, ()))
    if not activations or settings.get('dense_act_fn', activation) != activation:
        words = f'feed_forward_proj={forward}, dense_act_fn={settings.get("dense_act_fn")}'
        raise ValueError(f'{words}: only {", ".join(FEED_FORWARDS)} are read')
    return model.T5Config(
        **{ours: settings[theirs] for theirs, ours in SIZES.items()},
        dropout_rate=settings.get('dropout_rate', 0.1),
        mlp_activations=activations,
        logits_via_embedding=_is_tied(settings, found),
        relpos_bias_per_layer=model_type == 'umt5',
    )


def _is_tied(settings: Mapping[str, Any], found: Mapping[str, SafetensorsEntry]) -> bool:
    """Whether the logits are the token table's, rescaled by 1/sqrt(emb_dim): the arrays are asked first, as
    transformers 5 writes tie_word_embeddings=true for every model. Its T5 adds scale_decoder_outputs."""
    is_rescaled = settings.get('scale_decoder_outputs', settings.get('tie_word_embeddings', True))
    if found['lm_head.weight'] != found['shared.weight']:
        if settings.get('scale_decoder_outputs'):
            words = 'scale_decoder_outputs=true with an lm_head that is not the token table'
            raise ValueError(f'{words}: T5X has no such model, multiply lm_head by 1/sqrt(d_model)')
        return False
    if is_rescaled and settings['model_type'] == 'mt5':
        words = 'a tied mt5 is rescaled by transformers 4 but not by 5'
        raise ValueError(f'{words}: set model_type to t5, or tie_word_embeddings to false')
    return bool(is_rescaled)


def _find_arrays(folder: Path) -> dict[str, SafetensorsEntry]:
    """{Hugging Face's name: entry} from the files' headers. The token table is there once, shared.weight;
    lm_head.weight is that same entry where it is absent or holds the same."""
    if (folder / WEIGHTS).is_file():  # first, as transformers has it
        files = [WEIGHTS]
    elif (folder / WEIGHTS_INDEX).is_file():
        weight_map = paths.read_json(folder / WEIGHTS_INDEX).get('weight_map')
        if not isinstance(weight_map, dict):
            raise ValueError(f'{folder / WEIGHTS_INDEX} has no weight_map: copy the folder again')
        files = sorted({str(name) for name in weight_map.values()})
        if outside := [name for name in files if not re.fullmatch(r'[\w.-]+\.safetensors', name)]:
            words = f'{folder / WEIGHTS_INDEX} names {outside[0]!r}, no safetensors file beside it'
            raise ValueError(f'{words}: do not trust this folder')
    else:
        others = [name for name in OTHER_WEIGHTS if paths.is_file(folder / name)]
        if others:
            raise ValueError(
                f'{folder} has no {WEIGHTS} but {others[0]}: {OTHER_WEIGHTS[others[0]]}'
            )
        raise ValueError(
            f'{folder} has a config.json but no weights: copy {WEIGHTS} (or its parts and their index) into it'
        )
    found: dict[str, SafetensorsEntry] = {}
    for file in [paths.own_file(folder / name) for name in files]:
        try:
            with safetensors.safe_open(file, framework='numpy') as arrays:
                for name in arrays.keys():
                    header = arrays.get_slice(name)
                    dtype, shape = header.get_dtype(), tuple(header.get_shape())
                    if name in found or dtype not in SAFETENSORS_DTYPES or 0 in shape:
                        words = f'{name} is there twice, empty or {dtype}'
                        raise ValueError(
                            f'{words}: use once and one of {", ".join(SAFETENSORS_DTYPES)}'
                        )
                    found[name] = SafetensorsEntry(file, name, shape, SAFETENSORS_DTYPES[dtype])
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise ValueError(f'{file} cannot be read ({error}): copy it again') from error
    found.pop(UNUSED, None)
    tables = [found.pop(name) for name in TOKEN_TABLES if name in found]
    if not tables:
        raise ValueError(f'{folder} has no shared.weight: it holds no T5')
    for other in tables[1:]:
        if not _are_equal(tables[0], other):
            words = f'{other.name} is not {tables[0].name}'
            raise ValueError(f'{folder}: {words}: T5 has one token table for both stacks')
    found['shared.weight'] = tables[0]
    if 'lm_head.weight' not in found or _are_equal(tables[0], found['lm_head.weight']):
        found['lm_head.weight'] = tables[0]
    return found


def _are_equal(a: SafetensorsEntry, b: SafetensorsEntry) -> bool:
    """Whether two stored matrices are equal, a block of rows at a time."""
    if a.shape != b.shape or len(a.shape) != 2:
        return False
    open_a = safetensors.safe_open(a.file, framework='numpy')
    open_b = safetensors.safe_open(b.file, framework='numpy')
    with open_a as file_a, open_b as file_b:
        x, y = file_a.get_slice(a.name), file_b.get_slice(b.name)
        blocks = [slice(i, min(i + 4096, a.shape[0])) for i in range(0, a.shape[0], 4096)]
        return all(np.array_equal(x[block], y[block]) for block in blocks)


def write(
    folder: str | Path,
    config: model.T5Config,
    arrays: Mapping[str, Any],
    vocabulary_model: bytes | None = None,
    shard_bytes: int = 5 * 10**9,
    model_type: str | None = None,
) -> None:
    """Writes a new folder that transformers opens: all or nothing. `arrays`: {our path: array, or a leaf of an
    index, then read once}; at most `shard_bytes` (or one array) are in memory. `vocabulary_model` becomes
    spiece.model. Source: transformers modeling_utils.py save_pretrained."""
    folder = paths.disk_path(folder)
    paths.check_new(folder)
    if folder.exists():
        raise ValueError(f'{folder} exists: remove it or name another folder')
    settings = _settings(config, model_type)
    with paths.unfinished(folder) as whole:
        _write_json(whole / 'config.json', settings)
        if vocabulary_model is not None:
            (whole / 'spiece.model').write_bytes(vocabulary_model)
        shards: list[tuple[Path, list[str]]] = []
        weight_map: dict[str, str] = {}
        total_size = 0
        for shard in _shards(config, arrays, shard_bytes):
            file = whole / f'{len(shards)}.safetensors'
            safetensors.numpy.save_file(shard, file, {'format': 'pt'})
            shards.append((file, list(shard)))
            total_size += sum(x.nbytes for x in shard.values())
        for i, (file, names) in enumerate(shards, 1):
            many = f'model-{i:05}-of-{len(shards):05}.safetensors'
            file = file.rename(whole / (many if len(shards) > 1 else WEIGHTS))
            weight_map |= dict.fromkeys(names, file.name)
        if len(shards) > 1:
            index = {'metadata': {'total_size': total_size}, 'weight_map': weight_map}
            _write_json(whole / WEIGHTS_INDEX, index)
        whole.rename(folder)


def _settings(config: model.T5Config, model_type: str | None) -> dict[str, Any]:
    """config.json's content. ValueError for a model that transformers does not have."""
    per_layer = config.relpos_bias_per_layer
    model_type = model_type or ('umt5' if per_layer else 't5')
    if model_type not in ARCHITECTURES or (model_type == 'umt5') != per_layer:
        words = f'model_type={model_type!r}, relpos_bias_per_layer={per_layer}'
        raise ValueError(f'{words}: use umt5 where it is true, else t5 or mt5')
    if model_type == 'mt5' and config.logits_via_embedding:
        words = "model_type='mt5', logits_via_embedding=True: transformers 5 does not rescale these"
        raise ValueError(f"{words}: use 't5'")
    activations = tuple('silu' if x == 'swish' else x for x in config.mlp_activations)
    matching = [(x, act) for x, (act, ours) in FEED_FORWARDS.items() if ours == activations]
    if not matching:
        known = ', '.join(str(ours) for _, ours in FEED_FORWARDS.values())
        raise ValueError(f'mlp_activations={activations}: transformers has only {known}')
    feed_forward, activation = matching[0]
    return {
        'architectures': [ARCHITECTURES[model_type]],
        'model_type': model_type,
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        'dropout_rate': config.dropout_rate,
        'feed_forward_proj': feed_forward,
        'dense_act_fn': activation,
        'is_gated_act': len(activations) > 1,
        'tie_word_embeddings': config.logits_via_embedding,
        **FIXED,
    }


def _shards(
    config: model.T5Config, arrays: Mapping[str, Any], shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """{Hugging Face's name: array} of each file, in its order."""
    names, shapes = parameter_names(config), model.shapes(config)
    _check_names(set(names), set(arrays), 'the parameters are not those of the config')
    shard: dict[str, np.ndarray] = {}
    for path in arrays:
        x = np.asarray(checkpoint.read_leaf(arrays[path]))
        if x.shape != shapes[path]:
            raise ValueError(f'{path} has shape {x.shape}, the config asks for {shapes[path]}')
        if shard and sum(y.nbytes for y in shard.values()) + x.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[names[path]] = _transpose(x) if is_transposed(path) else np.ascontiguousarray(x)
    yield shard


def _check_names(expected: set[str], found: set[str], words: str) -> None:
    if faults := sorted(expected ^ found):
        listed = [f'{x} is {"unknown" if x in found else "missing"}' for x in faults[:10]]
        more = f' and {len(faults) - 10} more' if len(faults) > 10 else ''
        raise ValueError(f'{words}: {"; ".join(listed)}{more}')


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + '\n')
