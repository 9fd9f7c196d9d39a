"""Hugging Face's folders as T5X's tree, read and written: safetensors only, no torch, no pickle.

    config.json, spiece.model               sizes, vocabulary
    model.safetensors                       arrays by name; large models in several files and an index

torch's Linear keeps a kernel transposed; token table and norms have the same shape in both. Source: transformers
(4.57, 5.23) models/{t5,mt5,umt5}.
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
from settings import first_ten

WEIGHTS = 'model.safetensors'
WEIGHTS_INDEX = 'model.safetensors.index.json'
# Weights that are not read, and why.
SAVE_AGAIN = 'load it with transformers, if you trust it, and save_pretrained it as safetensors'
OTHER_WEIGHTS = {
    'pytorch_model.bin': f'a pickle can run code: {SAVE_AGAIN}',
    'pytorch_model.bin.index.json': f'pickles can run code: {SAVE_AGAIN}',
    'flax_model.msgpack': f'only safetensors are read: {SAVE_AGAIN} (from_flax=True)',
    'tf_model.h5': f'only safetensors are read: {SAVE_AGAIN} (from_tf=True)',
}
ARCHITECTURES = {
    't5': 'T5ForConditionalGeneration',
    'mt5': 'MT5ForConditionalGeneration',
    'umt5': 'UMT5ForConditionalGeneration',
}

# config.json: Hugging Face's name of each size -> the field of T5Config.
SIZES = {
    'vocab_size': 'vocab_size',
    'd_model': 'emb_dim',
    'num_heads': 'num_heads',
    'num_layers': 'num_encoder_layers',
    'num_decoder_layers': 'num_decoder_layers',
    'd_kv': 'head_dim',
    'd_ff': 'mlp_dim',
}
# config.json: settings that model.py and data.py support with one value only.
FIXED_SETTINGS = {
    'layer_norm_epsilon': 1e-6,
    'relative_attention_num_buckets': 32,
    'relative_attention_max_distance': 128,
    'pad_token_id': 0,
    'eos_token_id': 1,
    'decoder_start_token_id': 0,
}


class FeedForward(NamedTuple):
    """An activation of the MLP: `dense_act_fn` of config.json, and T5Config's `mlp_activations`."""

    dense_act_fn: str
    mlp_activations: tuple[str, ...]


# config.json: feed_forward_proj. gelu_new is the tanh form.
FEED_FORWARDS = {
    'relu': FeedForward('relu', ('relu',)),
    'gated-gelu': FeedForward('gelu_new', ('gelu', 'linear')),
    'gated-silu': FeedForward('silu', ('silu', 'linear')),
}


class Sublayer(NamedTuple):
    """A part of a layer: our norm, our module behind it, and Hugging Face's name of the module."""

    norm: str
    module: str
    their_module: str


# In Hugging Face's order, which numbers them.
SUBLAYERS = {
    'encoder': [
        Sublayer('pre_attention_layer_norm', 'attention', 'SelfAttention'),
        Sublayer('pre_mlp_layer_norm', 'mlp', 'DenseReluDense'),
    ],
    'decoder': [
        Sublayer('pre_self_attention_layer_norm', 'self_attention', 'SelfAttention'),
        Sublayer('pre_cross_attention_layer_norm', 'encoder_decoder_attention', 'EncDecAttention'),
        Sublayer('pre_mlp_layer_norm', 'mlp', 'DenseReluDense'),
    ],
}
ATTENTION_KERNELS = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}
TOKEN_TABLE = 'shared.weight'
# A folder has the token table under one of these names, or equal copies.
TOKEN_TABLES = (TOKEN_TABLE, 'encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
LM_HEAD = 'lm_head.weight'
# Old folders store this array, which no model reads.
UNUSED = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'

DTYPES = {
    'F64': np.dtype(np.float64),
    'F32': np.dtype(np.float32),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F16': np.dtype(np.float16),
}


def parameter_names(config: model.T5Config) -> dict[str, str]:
    """Return {our path: Hugging Face's name} of every parameter."""
    names = {'token_embedder/embedding': TOKEN_TABLE}
    depths = {'encoder': config.num_encoder_layers}
    if config.num_decoder_layers:
        depths['decoder'] = config.num_decoder_layers
    for stack, depth in depths.items():
        names[f'{stack}/{stack}_norm/scale'] = f'{stack}.final_layer_norm.weight'
        for i in range(depth):
            names |= _layer_names(config, stack, i)
    if config.num_decoder_layers and not config.logits_via_embedding:
        names['decoder/logits_dense/kernel'] = LM_HEAD
    return names


def _layer_names(config: model.T5Config, stack: str, i: int) -> dict[str, str]:
    """Return the part of `parameter_names` that is in layer `i` of a stack."""
    layer = f'{stack}/layers_{i}'
    block = f'{stack}.block.{i}.layer'
    names = {}
    for j, sublayer in enumerate(SUBLAYERS[stack]):
        names[f'{layer}/{sublayer.norm}/scale'] = f'{block}.{j}.layer_norm.weight'
        if sublayer.module == 'mlp':
            kernels = _mlp_kernels(config)
        else:
            kernels = ATTENTION_KERNELS
        for kernel, their_kernel in kernels.items():
            path = f'{layer}/{sublayer.module}/{kernel}/kernel'
            names[path] = f'{block}.{j}.{sublayer.their_module}.{their_kernel}.weight'
    bias = f'{block}.0.SelfAttention.relative_attention_bias.weight'
    if config.relpos_bias_per_layer:
        names[f'{layer}/relpos_bias/rel_embedding'] = bias
    elif i == 0:
        names[f'{stack}/relpos_bias/rel_embedding'] = bias
    return names


def _mlp_kernels(config: model.T5Config) -> dict[str, str]:
    if len(config.mlp_activations) > 1:
        return {'wi_0': 'wi_0', 'wi_1': 'wi_1', 'wo': 'wo'}
    return {'wi': 'wi', 'wo': 'wo'}


def is_transposed(path: str) -> bool:
    """Return whether Hugging Face stores the parameter at our `path` transposed."""
    return path.endswith(('/kernel', '/rel_embedding'))


# Reading.


class SafetensorsEntry(NamedTuple):
    """An array in a safetensors file, with its shape in our tree: a `checkpoint.LazyArray`."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    transposed: bool = False

    def read(self) -> np.ndarray:
        """Return the array in its stored dtype, with its shape in our tree."""
        with safetensors.safe_open(self.file, framework='numpy') as file:
            x = file.get_tensor(self.name)
        if self.transposed:
            return _transpose(x)
        return x


class Folder(NamedTuple):
    """A folder whose arrays are not read yet: its config, dtype float32, and {'target/' + our path: entry}."""

    config: model.T5Config
    entries: dict[str, SafetensorsEntry]


class StoredArrays(NamedTuple):
    """The arrays of a folder by Hugging Face's names.

    The token table is there once, as shared.weight. `lm_head.weight` is that same entry where `has_own_lm_head`
    is False: where the folder has no lm_head, or an equal one.
    """

    entries: dict[str, SafetensorsEntry]
    has_own_lm_head: bool

    @property
    def has_decoder(self) -> bool:
        return any(name.startswith('decoder.') for name in self.entries)

    def without_decoder(self) -> 'StoredArrays':
        """Return the arrays of the encoder, and the token table."""
        entries = {}
        for name, entry in self.entries.items():
            if not name.startswith('decoder.') and name != LM_HEAD:
                entries[name] = entry
        return StoredArrays(entries, has_own_lm_head=False)


def is_folder(folder: Any) -> bool:
    """Return whether this path of `paths.to_path` is a folder of transformers.

    It has weights under one of transformers' names, or a config.json with a model_type.
    """
    for name in (WEIGHTS, WEIGHTS_INDEX, *OTHER_WEIGHTS):
        if paths.is_file(folder / name):
            return True
    if not paths.is_file(folder / 'config.json'):
        return False
    content = paths.own_file(folder / 'config.json').read_bytes()
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(settings, dict) and 'model_type' in settings


def is_single_file(file: Any) -> bool:
    """Return whether `file` has all weights of a model, and no config.json beside it."""
    if file.suffix != '.safetensors' or not paths.is_file(file):
        return False
    return not paths.is_file(file.parent / 'config.json')


def check_not_part(file: Any) -> None:
    """Raise ValueError if `file` is a part of a folder of transformers: users name the folder."""
    if file.name in OTHER_WEIGHTS:
        raise ValueError(f'{file} is not read: {OTHER_WEIGHTS[file.name]}')
    if is_single_file(file):
        return
    if file.suffix in ('.json', '.model', '.safetensors') and is_folder(file.parent):
        raise ValueError(
            f'{file} is no checkpoint, it is one file of a checkpoint: name its folder, {file.parent}'
        )


def read_index(folder: str | Path, is_encoder: bool = False) -> Folder:
    """Return the config of a folder and its arrays, of which only headers and copies of the token table are read.

    Of an encoder alone, which `is_encoder` asks for where there is a decoder, too, the config has no decoder layers.
    A single safetensors file has its sizes in its shapes. Raises ValueError for a model that we do not have, for files
    that are damaged or not to be trusted, and for names that are missing or unknown, of which it lists ten. The caller
    compares shapes.
    """
    folder = paths.to_path(folder)
    if not isinstance(folder, Path):
        raise ValueError(f'{folder}: safetensors are read from a disk only: copy the folder')
    config_file = folder / 'config.json'
    settings: dict[str, Any] = {}
    if paths.is_file(config_file):
        settings = paths.read_json(config_file)
        _check_model_type(config_file, settings)  # first: other models have other arrays
    arrays = _read_headers(folder)
    if is_single_file(folder):
        config_file = folder
        settings = _settings_of_shapes(folder, arrays)
    if not settings:
        raise ValueError(f'{config_file} is missing: bring all files of the checkpoint')
    if is_encoder or not settings.get('is_encoder_decoder', True) or not arrays.has_decoder:
        arrays = arrays.without_decoder()
    try:
        config = _config(settings, arrays)
    except (ValueError, TypeError) as error:
        raise ValueError(f'{config_file}: {error}') from error
    stored = dict(arrays.entries)
    if config.logits_via_embedding:
        stored.pop(LM_HEAD, None)
    names = parameter_names(config)
    _check_names(
        expected=set(names.values()),
        found=set(stored),
        fault=f'{folder} is of another model than its config',
    )
    entries = {}
    for path, name in names.items():
        entry = stored[name]
        if is_transposed(path):
            entry = entry._replace(shape=entry.shape[::-1], transposed=True)
        entries[f'target/{path}'] = entry
    return Folder(config, entries)


def _check_model_type(config_file: Path, settings: Mapping[str, Any]) -> None:
    model_type = settings.get('model_type')
    if str(model_type) not in ARCHITECTURES:
        raise ValueError(
            f'{config_file}: model_type={model_type}: only {", ".join(ARCHITECTURES)} are read: '
            'bring one of these models'
        )


def _config(settings: Mapping[str, Any], arrays: StoredArrays) -> model.T5Config:
    """Return the T5Config of config.json. Raises ValueError for a model that we do not have."""
    for name, value in FIXED_SETTINGS.items():
        if settings.get(name) not in (None, value):
            raise ValueError(f'{name}={settings[name]}: only {value} is supported')
    sizes: dict[str, Any] = {ours: settings.get(theirs) for theirs, ours in SIZES.items()}
    if sizes['num_decoder_layers'] is None or not arrays.has_decoder:
        sizes['num_decoder_layers'] = sizes['num_encoder_layers']
    _check_sizes(sizes, arrays)
    if not arrays.has_decoder:
        sizes['num_decoder_layers'] = 0
    return model.T5Config(
        **sizes,
        dtype='float32',
        mlp_activations=_mlp_activations(settings),
        dropout_rate=settings.get('dropout_rate', 0.1),
        logits_via_embedding=not arrays.has_decoder or _is_tied(settings, arrays.has_own_lm_head),
        float32_attention_logits=False,
        relpos_bias_per_layer=settings['model_type'] == 'umt5',
    )


def _settings_of_shapes(file: Path, arrays: StoredArrays) -> dict[str, Any]:
    """Return what a config.json would say of a single file. Raises ValueError for one that holds no T5."""
    layer = 'encoder.block.0.layer'
    names = {
        'table': TOKEN_TABLE,
        'bias': f'{layer}.0.SelfAttention.relative_attention_bias.weight',
        'out': f'{layer}.0.SelfAttention.o.weight',
        'wo': f'{layer}.1.DenseReluDense.wo.weight',
    }
    shapes = {}
    for key, name in names.items():
        if name not in arrays.entries or len(arrays.entries[name].shape) != 2:
            raise ValueError(f'{file} has no matrix {name}: it holds no T5')
        shapes[key] = arrays.entries[name].shape
    num_heads = shapes['bias'][1]
    is_gated = f'{layer}.1.DenseReluDense.wi_0.weight' in arrays.entries
    is_umt5 = names['bias'].replace('block.0', 'block.1') in arrays.entries
    return {
        'model_type': 'umt5' if is_umt5 else 't5',
        'vocab_size': shapes['table'][0],
        'd_model': shapes['table'][1],
        'num_heads': num_heads,
        'd_kv': shapes['out'][1] // num_heads,
        'd_ff': shapes['wo'][1],
        'num_layers': _count_layers(arrays, 'encoder'),
        'num_decoder_layers': _count_layers(arrays, 'decoder'),
        'feed_forward_proj': 'gated-gelu' if is_gated else 'relu',
    }


def _count_layers(arrays: StoredArrays, stack: str) -> int:
    pattern = rf'{stack}\.block\.\d+\.layer\.0\.layer_norm\.weight'
    return sum(bool(re.fullmatch(pattern, name)) for name in arrays.entries)


def _check_sizes(sizes: Mapping[str, Any], arrays: StoredArrays) -> None:
    """Raise ValueError for a size that no array can have: a config.json may claim any number of layers."""
    largest = len(arrays.entries)
    for entry in arrays.entries.values():
        largest = max(largest, *entry.shape, 0)
    for theirs, ours in SIZES.items():
        size = sizes[ours]
        if type(size) is not int or not 1 <= size <= largest:
            raise ValueError(
                f'{theirs}={size}: must be an integer from 1 to {largest}, the most that its arrays allow'
            )


def _mlp_activations(settings: Mapping[str, Any]) -> tuple[str, ...]:
    default = 'gated-gelu'
    if settings['model_type'] == 't5':
        default = 'relu'
    name = settings.get('feed_forward_proj', default)
    feed_forward = FEED_FORWARDS.get(name)
    if feed_forward is None:
        raise ValueError(
            f'feed_forward_proj={name}: only {", ".join(FEED_FORWARDS)} are read: bring one of these models'
        )
    dense_act_fn = settings.get('dense_act_fn', feed_forward.dense_act_fn)
    if dense_act_fn != feed_forward.dense_act_fn:
        raise ValueError(
            f'dense_act_fn={dense_act_fn}: feed_forward_proj={name} is read with '
            f'{feed_forward.dense_act_fn} only: bring such a model'
        )
    return feed_forward.mlp_activations


def _is_tied(settings: Mapping[str, Any], has_own_lm_head: bool) -> bool:
    """Return whether the logits are those of the token table, divided by sqrt(emb_dim).

    An lm_head of its own decides before the settings do, because transformers 5 writes tie_word_embeddings=true
    for every model. Its T5 has scale_decoder_outputs beside it.
    """
    if has_own_lm_head:
        if settings.get('scale_decoder_outputs'):
            raise ValueError(
                'scale_decoder_outputs=true with an lm_head that is not the token table: T5X has no such model: '
                'multiply lm_head by 1/sqrt(d_model) and set scale_decoder_outputs=false'
            )
        return False
    is_tied = settings.get('tie_word_embeddings', True)
    is_rescaled = bool(settings.get('scale_decoder_outputs', is_tied))
    if is_rescaled and settings['model_type'] == 'mt5':
        raise ValueError(
            'model_type=mt5 with the token table as lm_head: transformers 4 divides its logits by sqrt(d_model), '
            'transformers 5 does not: set tie_word_embeddings=false to load it as transformers 5 does'
        )
    return is_rescaled


def _read_headers(folder: Path) -> StoredArrays:
    """Return the arrays that the headers of the folder's files name."""
    entries: dict[str, SafetensorsEntry] = {}
    for file in _weight_files(folder):
        try:
            _read_header(file, entries)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise ValueError(f'{file} cannot be read ({error}): copy it again') from error
    entries.pop(UNUSED, None)
    tables = [entries.pop(name) for name in TOKEN_TABLES if name in entries]
    if not tables:
        raise ValueError(f'{folder} has no {TOKEN_TABLE}: it holds no T5')
    for other in tables[1:]:
        if not _are_equal(tables[0], other):
            raise ValueError(
                f'{folder}: {other.name} is not {tables[0].name}: T5 has one token table for both stacks'
            )
    entries[TOKEN_TABLE] = tables[0]
    has_own_lm_head = LM_HEAD in entries and not _are_equal(tables[0], entries[LM_HEAD])
    if not has_own_lm_head:
        entries[LM_HEAD] = tables[0]
    return StoredArrays(entries, has_own_lm_head)


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder. Raises ValueError where it has others, or none."""
    if is_single_file(folder):
        paths.check_not_lfs(folder)  # a link of the user's own may lead anywhere
        return [folder]
    if paths.is_file(folder / WEIGHTS):  # first, as transformers has it
        return [paths.own_file(folder / WEIGHTS)]
    if paths.is_file(folder / WEIGHTS_INDEX):
        return _files_of_index(folder / WEIGHTS_INDEX)
    for name, reason in OTHER_WEIGHTS.items():
        if paths.is_file(folder / name):
            raise ValueError(f'{folder} has no {WEIGHTS} but {name}: {reason}')
    raise ValueError(
        f'{folder} has a config.json but no weights: copy {WEIGHTS} (or its parts and their index) into it'
    )


def _files_of_index(index_file: Path) -> list[Path]:
    weight_map = paths.read_json(index_file).get('weight_map')
    if not isinstance(weight_map, dict):
        raise ValueError(f'{index_file} has no weight_map: copy the folder again')
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not re.fullmatch(r'[\w.-]+\.safetensors', name):
            raise ValueError(
                f'{index_file} names {name!r}, no safetensors file beside it: do not trust this folder'
            )
    return [paths.own_file(index_file.with_name(name)) for name in names]


def _read_header(file: Path, entries: dict[str, SafetensorsEntry]) -> None:
    """Add the arrays of a safetensors file to `entries`."""
    with safetensors.safe_open(file, framework='numpy') as arrays:
        for name in arrays.keys():
            header = arrays.get_slice(name)
            dtype = header.get_dtype()
            shape = tuple(header.get_shape())
            if name in entries or dtype not in DTYPES or 0 in shape:
                raise ValueError(
                    f'{name} is there twice, empty or {dtype}: an array is there once, with a dtype of '
                    f'{", ".join(DTYPES)}'
                )
            entries[name] = SafetensorsEntry(file, name, shape, DTYPES[dtype])


def _are_equal(a: SafetensorsEntry, b: SafetensorsEntry) -> bool:
    """Return whether two stored matrices are equal. Reads a block of rows at a time."""
    if a.shape != b.shape or len(a.shape) != 2:
        return False
    num_rows = a.shape[0]
    open_a = safetensors.safe_open(a.file, framework='numpy')
    open_b = safetensors.safe_open(b.file, framework='numpy')
    with open_a as file_a, open_b as file_b:
        rows_of_a = file_a.get_slice(a.name)
        rows_of_b = file_b.get_slice(b.name)
        for start in range(0, num_rows, 4096):
            block = slice(start, min(start + 4096, num_rows))
            if not np.array_equal(rows_of_a[block], rows_of_b[block]):
                return False
    return True


# Writing.


def write(
    folder: str | Path,
    config: model.T5Config,
    arrays: Mapping[str, Any],
    vocabulary_model: bytes | None = None,
    shard_bytes: int = 5 * 10**9,
    model_type: str | None = None,
) -> None:
    """Write a new folder that transformers opens: all or nothing.

    `arrays` is {our path: array, or leaf of an index, which is then read once}. At most `shard_bytes`, or one
    array, are in memory. `vocabulary_model` becomes spiece.model. Raises ValueError for a folder that exists and
    for a model that transformers does not have. Source: transformers modeling_utils.py save_pretrained.
    """
    folder = paths.disk_path(folder)
    paths.check_new(folder)
    if folder.exists():
        raise ValueError(f'{folder} exists: remove it or name another folder')
    settings = _settings(config, model_type)
    with paths.unfinished(folder) as unfinished:
        _write_json(unfinished / 'config.json', settings)
        if vocabulary_model is not None:
            (unfinished / 'spiece.model').write_bytes(vocabulary_model)
        _write_weights(unfinished, config, arrays, shard_bytes)
        unfinished.rename(folder)


def _settings(config: model.T5Config, model_type: str | None) -> dict[str, Any]:
    """Return the content of config.json. Raises ValueError for a model that transformers does not have."""
    if config.module:
        raise ValueError(
            f"model.module={config.module!r}: transformers has no such model: write T5X's layout with --format=t5x"
        )
    is_umt5 = config.relpos_bias_per_layer
    if model_type is None:
        model_type = 'umt5' if is_umt5 else 't5'
    if model_type not in ARCHITECTURES or (model_type == 'umt5') != is_umt5:
        raise ValueError(
            f'model_type={model_type!r}, relpos_bias_per_layer={is_umt5}: use umt5 where it is true, '
            'else t5 or mt5'
        )
    if model_type == 'mt5' and config.logits_via_embedding:
        raise ValueError(
            "model_type='mt5', logits_via_embedding=True: transformers 5 does not divide the logits of an mt5 "
            "by sqrt(d_model): use 't5', which has the same layers and does"
        )
    name = _feed_forward_name(config)
    sizes = {theirs: getattr(config, ours) for theirs, ours in SIZES.items()}
    return {
        'architectures': [ARCHITECTURES[model_type]],
        'model_type': model_type,
        **sizes,
        'dropout_rate': config.dropout_rate,
        'feed_forward_proj': name,
        'dense_act_fn': FEED_FORWARDS[name].dense_act_fn,
        'is_gated_act': len(config.mlp_activations) > 1,
        'tie_word_embeddings': config.logits_via_embedding,
        'is_encoder_decoder': True,
        **FIXED_SETTINGS,
    }


def _feed_forward_name(config: model.T5Config) -> str:
    activations = tuple(config.mlp_activations)
    if activations == ('swish', 'linear'):  # another name of silu
        activations = ('silu', 'linear')
    for name, feed_forward in FEED_FORWARDS.items():
        if feed_forward.mlp_activations == activations:
            return name
    known = [str(feed_forward.mlp_activations) for feed_forward in FEED_FORWARDS.values()]
    raise ValueError(
        f'mlp_activations={activations}: transformers has only {", ".join(known)}: write t5x instead'
    )


def _write_weights(
    folder: Path, config: model.T5Config, arrays: Mapping[str, Any], shard_bytes: int
) -> None:
    """Write the safetensors files, and their index where there are several."""
    files: list[Path] = []
    names_of_files: list[list[str]] = []
    total_size = 0
    for shard in _shards(config, arrays, shard_bytes):
        file = folder / f'{len(files)}.safetensors'  # until the number of files is known
        with paths.library_errors(file):
            safetensors.numpy.save_file(shard, file, {'format': 'pt'})
        files.append(file)
        names_of_files.append(list(shard))
        total_size += sum(x.nbytes for x in shard.values())
    if len(files) == 1:
        files[0].rename(folder / WEIGHTS)
        return
    weight_map: dict[str, str] = {}
    for i, (file, names) in enumerate(zip(files, names_of_files, strict=True), start=1):
        file = file.rename(folder / f'model-{i:05}-of-{len(files):05}.safetensors')
        weight_map |= dict.fromkeys(names, file.name)
    index = {'metadata': {'total_size': total_size}, 'weight_map': weight_map}
    _write_json(folder / WEIGHTS_INDEX, index)


def _shards(
    config: model.T5Config, arrays: Mapping[str, Any], shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield {Hugging Face's name: array} of each file, in the order of `arrays`."""
    names = parameter_names(config)
    shapes = model.shapes(config)
    _check_names(
        expected=set(names),
        found=set(arrays),
        fault='the parameters are not those of the config',
    )
    shard: dict[str, np.ndarray] = {}
    num_bytes = 0
    for path in arrays:
        x = np.asarray(checkpoint.read_leaf(arrays[path]))
        if x.shape != shapes[path]:
            raise ValueError(f'{path} has shape {x.shape}, the config asks for {shapes[path]}')
        if shard and num_bytes + x.nbytes > shard_bytes:
            yield shard
            shard = {}
            num_bytes = 0
        num_bytes += x.nbytes
        if is_transposed(path):
            shard[names[path]] = _transpose(x)
        else:
            shard[names[path]] = np.ascontiguousarray(x)
    yield shard


def _transpose(x: np.ndarray) -> np.ndarray:
    """Return a transposed copy. Copies 16 rows at a time, because numpy's own way is five times slower."""
    y = np.empty(x.shape[::-1], x.dtype)
    for i in range(0, len(x), 16):
        y[:, i : i + 16] = x[i : i + 16].T
    return y


def _check_names(expected: set[str], found: set[str], fault: str) -> None:
    """Raise ValueError, which begins with `fault`, unless the names are the expected ones."""
    listed = []
    for name in sorted(expected ^ found):
        if name in found:
            listed.append(f'{name} is unknown')
        else:
            listed.append(f'{name} is missing')
    if listed:
        raise ValueError(f'{fault}: {first_ten(listed, separator="; ")}')


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + '\n')
