"""Foreign checkpoints as T5X's tree: Mesh-TensorFlow's, read; Hugging Face folders, read and written.

    model.ckpt-1000000.index                sorted table: name -> dtype, shape, place, checksum
    model.ckpt-1000000.data-00001-of-00002  arrays one behind the other, little-endian, C order
    checkpoint                              text that names the newest prefix

    config.json, spiece.model               sizes, vocabulary
    model.safetensors                       arrays by name; large models in several files and an index

With numpy alone: no TensorFlow, no torch, no pickle. Any file may be damaged or hostile: sizes are checked
before they are used, and only files of the checkpoint's own folder are opened. Source: T5X
t5x/checkpoint_importer.py; TensorFlow core/util/tensor_bundle, core/protobuf/tensor_bundle.proto; LevelDB
doc/table_format.md; Snappy format_description.txt; transformers (4.57, 5.23) models/{t5,mt5,umt5}.
"""

import contextlib
import functools
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

import model
import paths


def read_leaf(leaf: Any) -> Any:
    """The array that a leaf of a checkpoint's index is or, if it is large, reads."""
    return leaf.read() if hasattr(leaf, 'read') else leaf


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
        x = _read_stack(self.stack) if hasattr(self.stack, 'read') else self.stack
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


# Mesh-TensorFlow: TensorBundle checkpoints.

NORM = '(?:rms|layer)_norm/scale'
OUTSIDE = {
    'shared/embedding': 'token_embedder/embedding',
    '(encoder|decoder)/embedding': r'\1/token_embedder/embedding',
    '(encoder|decoder)/(?:rms|final_layer)_norm/scale': r'\1/\1_norm/scale',
    'decoder/logits/kernel': 'decoder/logits_dense/kernel',
}
IN_BLOCK = {  # behind encoder/block_NNN/, and in T5X behind encoder/layers_N/
    'encoder': {
        'layer_000/SelfAttention/relative_attention_bias': 'relpos_bias/rel_embedding',
        'layer_000/SelfAttention/([qkvo])': r'attention/\1/kernel',
        f'layer_000/{NORM}': 'pre_attention_layer_norm/scale',
        'layer_001/DenseReluDense/(wi|wi_0|wi_1|wo)/kernel': r'mlp/\1/kernel',
        f'layer_001/{NORM}': 'pre_mlp_layer_norm/scale',
    },
    'decoder': {
        'layer_000/SelfAttention/relative_attention_bias': 'relpos_bias/rel_embedding',
        'layer_000/SelfAttention/([qkvo])': r'self_attention/\1/kernel',
        f'layer_000/{NORM}': 'pre_self_attention_layer_norm/scale',
        'layer_001/EncDecAttention/([qkvo])': r'encoder_decoder_attention/\1/kernel',
        f'layer_001/{NORM}': 'pre_cross_attention_layer_norm/scale',
        'layer_002/DenseReluDense/(wi|wi_0|wi_1|wo)/kernel': r'mlp/\1/kernel',
        f'layer_002/{NORM}': 'pre_mlp_layer_norm/scale',
    },
}
MATRICES = {'q': 'query', 'k': 'key', 'v': 'value', 'o': 'out'}
SLOTS = {'v': 'v', 'vr': 'v_row', 'vc': 'v_col'}

TENSORFLOW_DTYPES = {1: np.float32, 3: np.int32, 9: np.int64, 14: ml_dtypes.bfloat16}
PLAIN, SNAPPY = 0, 1
TRAILER_BYTES, FOOTER_BYTES, MAGIC = 5, 48, 0xDB4775248B80FB57.to_bytes(8, 'little')
INDEX_BYTES = 2**22  # at most; the 1,500 variables of T5 11B take some 70 KB
NAME_BYTES = 1000  # at most; names share prefixes, so that a small file could claim huge ones


@dataclass(frozen=True)
class BundleEntry:
    """An array and where it lies. `crc32c` is masked, as TensorFlow stores it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Any
    offset: int
    size: int
    crc32c: int

    def read(self) -> np.ndarray:
        """The array in its stored dtype, read into the memory that it keeps."""
        end = self.offset + self.size
        if end > (size := paths.file_size(paths.own_file(self.file))):
            raise ValueError(f'{self.file} ends at {size}, {self.name} at {end}: copy it again')
        with self.file.open('rb') as stream:
            content = np.empty(self.size, np.uint8)
            stream.seek(self.offset)
            stream.readinto(content.data)
        if _masked_crc32c(content) != self.crc32c:
            raise ValueError(f'{self.file}: {self.name} has changed (crc32c): copy it again')
        return content.view(self.dtype).reshape(self.shape)


def mesh_tf_prefix(path: Any) -> Any:
    """`path` if it is a prefix as `.../model.ckpt-1000000`; the prefix of one of a checkpoint's files; of a
    folder the one that its `checkpoint` names, else its only one; None if this is no Mesh-TF checkpoint."""
    path = paths.to_path(path)
    if path.name and paths.is_file(path.with_name(f'{path.name}.index')):
        return path
    if part := re.fullmatch(r'(.+)\.(index|meta|data-\d{5}-of-\d{5})', path.name):
        if paths.is_file(path.with_name(f'{part[1]}.index')):
            return path.with_name(part[1])
    pointer, indices = path / 'checkpoint', sorted(path.glob('*.index'))
    if paths.is_file(pointer):  # T5X's file of this name is no text
        with paths.own_file(pointer).open('rb') as stream:
            # Of a path only the last part: it is where the files once were, and a stranger's word.
            pattern = rb'model_checkpoint_path: *"(?:[^"]*/)?([^"/]+)"'
            match = re.match(pattern, stream.read(4096))
        return path / os.fsdecode(match[1]) if match else None
    if len(indices) > 1:
        names = ', '.join(index.stem for index in indices[:10])
        raise ValueError(f'{path} has {len(indices)} checkpoints ({names}): name one of them')
    return indices[0].with_suffix('') if indices else None


def mesh_tf_index(prefix: Any) -> dict[str, BundleEntry | np.ndarray]:
    """{T5X's path: where its array lies}, the array itself where it is small: `state/step`, int32, and T5X's
    placeholders, float32 zeros [1], for the slots that a parameter's `v`, or `v_row` and `v_col`, lack."""
    index: dict[str, BundleEntry | np.ndarray] = {}
    unknown = []
    for name, entry in read_bundle_index(prefix).items():
        if name == 'global_step':
            step = entry.read()
            if step.shape or step.dtype.kind != 'i' or not 0 <= step < 2**31:
                raise ValueError(f'{prefix} has global_step {step}, not an int32: correct it')
            index['state/step'] = step.astype(np.int32)
        elif (path := _t5x_path(name)) and path not in index:
            index[path] = entry
        else:
            unknown.append(name)
    if unknown:
        words = f'{prefix}: T5 1.0 and 1.1 have no place for {len(unknown)} variables'
        raise ValueError(f'{words} ({", ".join(unknown[:10])}): bring one of these models')
    biases = [path for path in index if '/relpos_bias/' in path]
    if all('/layers_0/' in path for path in biases):  # shared by all layers
        index |= {path.replace('/layers_0', ''): index.pop(path) for path in biases}
    for parameter in [path for path in index if path.startswith('target/')]:
        state = parameter.replace('target', 'state/param_states', 1)
        slots = {slot for slot in SLOTS.values() if f'{state}/{slot}' in index}
        if slots not in (set(), {'v'}, {'v_row', 'v_col'}):
            words = f'{prefix}: {parameter} has only {slots}'
            raise ValueError(f'{words}, not v, or v_row and v_col: correct it')
        rows, *columns = index[parameter].shape or (0,)
        # Differs from T5X's importer. Mesh-TF's vr is the mean over the first of the largest dimensions,
        # T5X's v_row that over the last: the same of [512, 1024], each other's of a square matrix. The
        # importer copies vr to v_row and so gives square matrices rows for columns.
        if slots == {'v_row', 'v_col'} and [rows] == columns:
            row, column = f'{state}/v_row', f'{state}/v_col'
            index[row], index[column] = index[column], index[row]
        missing = {'m', 'v', 'v_row', 'v_col'} - slots if slots else set()
        index |= {f'{state}/{slot}': np.zeros(1, np.float32) for slot in missing}
    return index


def read_bundle_index(prefix: Any) -> dict[str, BundleEntry]:
    """{variable: BundleEntry} of `PREFIX.index`. No .data file is opened."""
    file = prefix.with_name(f'{prefix.name}.index')
    with paths.own_file(file).open('rb') as stream:
        content = stream.read(INDEX_BYTES + 1)
    try:
        if len(content) > INDEX_BYTES:
            raise ValueError(f'more than {INDEX_BYTES} bytes')
        table = _read_table(content)
        header = _read_message(table.pop(b''))
        num_shards = _last(header, 1)
        if _last(header, 2) != 0:
            raise ValueError('it is big-endian')
        entries = {}
        for key, value in table.items():
            name = key.decode('ascii')
            entries[name] = _read_entry_proto(prefix, name, _read_message(value), num_shards)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f'{file} cannot be read ({error}): copy it again') from error
    return entries


def _t5x_path(name):
    stem, mark, slot = name.partition('_slot_')
    if mark and slot not in SLOTS:
        return None
    rules, folder = OUTSIDE, ''
    if match := re.fullmatch(r'(encoder|decoder)/block_(\d{3})/(.+)', stem):
        tower, block, stem = match.groups()
        rules, folder = IN_BLOCK[tower], f'{tower}/layers_{int(block)}/'
    for pattern, template in rules.items():
        if match := re.fullmatch(pattern, stem):
            parts = (folder + match.expand(template)).split('/')
            path = '/'.join(MATRICES.get(part, part) for part in parts)
            return f'state/param_states/{path}/{SLOTS[slot]}' if mark else f'target/{path}'
    return None


def _read_entry_proto(prefix, name, fields, num_shards):
    """BundleEntryProto: 1 dtype, 2 shape, 3 shard, 4 offset, 5 size, 6 crc32c, 7 slices."""
    number, shard, offset, size, crc32c = (_last(fields, n) for n in (1, 3, 4, 5, 6))
    if number not in TENSORFLOW_DTYPES:
        raise ValueError(
            f'{name} has dtype {number} of TensorFlow, not one of {list(TENSORFLOW_DTYPES)}'
        )
    if 7 in fields:
        raise ValueError(f'{name} is partitioned into slices')
    if not shard < num_shards:
        raise ValueError(f'{name} is in shard {shard} of {num_shards}')
    dims = _read_message(_last(fields, 2, b'')).get(2, [])
    shape = tuple(_last(_read_message(dim), 1) for dim in dims)
    dtype = np.dtype(TENSORFLOW_DTYPES[number])
    if len(shape) > 8 or min(shape, default=1) < 1 or math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f'{name} has shape {shape[:8]} and {size} bytes')
    file = prefix.with_name(f'{prefix.name}.data-{shard:05d}-of-{num_shards:05d}')
    return BundleEntry(name, shape, dtype, file, offset, size, crc32c)


def _read_table(content):
    """{key: value} of a LevelDB table. Each byte is under a checksum or has only one right value."""
    end = len(content) - FOOTER_BYTES
    if end < 0 or content[-len(MAGIC) :] != MAGIC:
        raise ValueError('it does not end with the magic of a TensorFlow index')
    (*meta, index_at, index_size), padding_at = _read_varints(content, end, 4)
    if any(content[padding_at : -len(MAGIC)]):
        raise ValueError('bytes in the padding of its footer')
    index = [value for _, value in _read_block(content, index_at, index_size)]
    blocks = [*(_read_varints(value, 0, 2)[0] for value in index), meta]
    at = 0
    for start, size in [*blocks, (index_at, index_size)]:
        if start != at:
            raise ValueError(f'no block begins at byte {at}')
        at = start + size + TRAILER_BYTES
    if at != end:
        raise ValueError(f'no block ends at byte {end}')
    table = {}
    for start, size in blocks:
        for key, value in _read_block(content, start, size):
            if table and key <= next(reversed(table)):
                raise ValueError(f'{key!r} is out of order')
            table[key] = value
    return table


def _read_block(content, start, size):
    """Yields (key, value). A key stores how many bytes it shares with the one before it, and the rest."""
    end = start + size
    stored, kind, crc32c = content[start:end], content[end], content[end + 1 : end + TRAILER_BYTES]
    if _masked_crc32c(content[start : end + 1]) != int.from_bytes(crc32c, 'little'):
        raise ValueError(f'the block at byte {start} has changed (crc32c)')
    if kind not in (PLAIN, SNAPPY):
        raise ValueError(f'the block at byte {start} has compression {kind}')
    block = stored if kind == PLAIN else _decompress_snappy(stored)
    num_restarts = int.from_bytes(block[-4:], 'little')  # where a search may start: not needed here
    entries, _ = _take(block, 0, len(block) - 4 * (num_restarts + 1))
    key, at = b'', 0
    while at < len(entries):
        (shared, unshared, length), at = _read_varints(entries, at, 3)
        if shared > len(key) or shared + unshared > NAME_BYTES:
            raise ValueError(f'a name of {shared} + {unshared} bytes behind {key!r}')
        rest, at = _take(entries, at, unshared)
        value, at = _take(entries, at, length)
        key = key[:shared] + rest
        yield key, value


def _decompress_snappy(content):
    """Literals, and copies of what is `offset` bytes back, which run into themselves when longer."""
    [size], at = _read_varints(content, 0, 1)
    output = bytearray()
    while at < len(content):
        tag, at = content[at], at + 1
        kind, length = tag & 3, (tag >> 2) + 1
        if kind == 0:
            if length > 60:  # then it is in the next one to four bytes
                extra, at = _take(content, at, length - 60)
                length = int.from_bytes(extra, 'little') + 1
            literal, at = _take(content, at, length)
            output += literal
            continue
        extra, at = _take(content, at, (1, 2, 4)[kind - 1])
        offset = int.from_bytes(extra, 'little')
        if kind == 1:
            length, offset = (tag >> 2 & 7) + 4, offset | tag >> 5 << 8
        if not 0 < offset <= len(output):
            raise ValueError(f'Snappy copies from {offset} bytes back at {len(output)}')
        start = len(output) - offset
        period = output[start : start + length]
        output += (period * -(-length // offset))[:length]
    if len(output) != size:
        raise ValueError(f'Snappy yields {len(output)} bytes, not {size}')
    return bytes(output)


def _read_message(content):
    """A protobuf message as {field: values in order}: int, or bytes for what has a length."""
    fields = {}
    at = 0
    while at < len(content):
        [tag], at = _read_varints(content, at, 1)
        if tag & 7 == 0:
            [value], at = _read_varints(content, at, 1)
        elif tag & 7 == 2:
            [length], at = _read_varints(content, at, 1)
            value, at = _take(content, at, length)
        elif tag & 7 == 5:
            value, at = _take(content, at, 4)
            value = int.from_bytes(value, 'little')
        else:
            raise ValueError(f'protobuf wire type {tag & 7}')
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _last(fields, number, default=0):
    """The field's value, of the type of `default`: what is zero or empty is not stored."""
    value = fields.get(number, [default])[-1]
    if type(value) is not type(default):
        raise ValueError(f'field {number} is {value!r}')
    return value


def _read_varints(content, at, count):
    """(`count` unsigned integers of 64 bits, where they end): 7 bits a byte, the lowest first."""
    numbers = []
    for _ in range(count):
        number = 0
        for shift in range(0, 64, 7):
            byte, at = content[at], at + 1
            number |= (byte & 127) << shift
            if byte < 128:
                break
        if byte >= 128 or (byte == 0 and shift) or number >= 2**64:
            raise ValueError(f'no integer ends at byte {at}')
        numbers.append(number)
    return numbers, at


def _take(content, at, length):
    if not 0 <= length <= len(content) - at:
        raise ValueError(f'{length} bytes wanted at byte {at} of {len(content)}')
    return content[at : at + length], at + length


def _masked_crc32c(content):
    """TensorFlow and LevelDB rotate a checksum and add a constant, as data may hold checksums itself."""
    crc32c = google_crc32c.value(content)
    return ((crc32c >> 15 | crc32c << 17) + 0xA282EAD8) % 2**32


# Hugging Face. torch's Linear keeps a kernel transposed; token table and norms are alike.

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


def hugging_face_names(config: model.T5Config) -> dict[str, str]:
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


def is_hugging_face(folder: str | Path) -> bool:
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


def hugging_face_index(folder: str | Path) -> tuple[model.T5Config, dict[str, SafetensorsEntry]]:
    """The config of a folder, to compute in float32, and {'target/' + our path: entry}; nothing is read but
    headers and the copies of the token table. ValueError for what is no T5 of ours, or lists up to ten names
    that are missing or unknown; shapes are the caller's to compare."""
    if not isinstance(folder := paths.to_path(folder), Path):
        raise ValueError(f'{folder}: safetensors are read from a disk only: copy the folder')
    if paths.is_file(folder / 'config.json'):
        _check_model_type(folder)  # first: other models have other arrays
    found, settings = _find_arrays(folder), read_json(folder / 'config.json')
    try:
        config = _config(settings, found)
    except (ValueError, TypeError) as error:
        raise ValueError(f'{folder}/config.json: {error}') from error
    if config.logits_via_embedding and found['lm_head.weight'] == found['shared.weight']:
        del found['lm_head.weight']
    names = hugging_face_names(config)
    _check_names(set(names.values()), set(found), f'{folder} is of another model than its config')
    index = {}
    for path, name in names.items():
        entry, transposed = found[name], is_transposed(path)
        shape = entry.shape[::-1] if transposed else entry.shape
        index[f'target/{path}'] = entry._replace(shape=shape, transposed=transposed)
    return config, index


def _check_model_type(folder: Path) -> None:
    model_type = read_json(folder / 'config.json').get('model_type')
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
        dtype='float32',
        float32_attention_logits=False,
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
        weight_map = read_json(folder / WEIGHTS_INDEX).get('weight_map')
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


def read_json(file: Path) -> dict[str, Any]:
    file = paths.own_file(file)
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{file} cannot be read ({error}): copy the folder again') from error
    if not isinstance(content, dict):
        raise ValueError(f'{file} holds no JSON object: copy the folder again')
    return content


def write_hugging_face(
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
    check_new(folder)
    if folder.exists():
        raise ValueError(f'{folder} exists: remove it or name another folder')
    settings = _settings(config, model_type)
    with unfinished(folder) as whole:
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


def check_new(folder: Path) -> None:
    """Raise ValueError where no folder can be made, nor written into: at, below or behind what is none."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            raise ValueError(
                f'{folder} cannot be written: {place} is a link to nothing: remove it or name another folder'
            )
        if place.exists() and not place.is_dir():
            raise ValueError(f'{folder} cannot be written: {place} is a file: name another folder')


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yield a new folder on the disk of `folder`, to be renamed to it when all is written.

    At the end what is left of it is removed and, after an error, every folder that was made for it.
    """
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f'{folder.name[:50]}.tmp-'
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as tmp:
            whole = Path(tmp, 'whole')  # which, unlike `tmp`, everybody may read
            whole.mkdir()
            yield whole
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):  # such as somebody else's files in it
                parent.rmdir()
        raise


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
    names, shapes = hugging_face_names(config), model.shapes(config)
    _check_names(set(names), set(arrays), 'the parameters are not those of the config')
    shard: dict[str, np.ndarray] = {}
    for path in arrays:
        x = np.asarray(read_leaf(arrays[path]))
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
