"""Mesh-TensorFlow's checkpoints (TensorBundle) as T5X's tree; read with numpy alone.

    model.ckpt-1000000.index                sorted table: name -> dtype, shape, place, checksum
    model.ckpt-1000000.data-00001-of-00002  arrays one behind the other, little-endian, C order
    checkpoint                              text that names the newest prefix

No TensorFlow, no pickle. Any file may be damaged or hostile: sizes are checked before they are used, and only
files of the checkpoint's own folder are opened. Source: T5X t5x/checkpoint_importer.py; TensorFlow
core/util/tensor_bundle, core/protobuf/tensor_bundle.proto; LevelDB doc/table_format.md; Snappy
format_description.txt.
"""

import math
import os
import re
from dataclasses import dataclass
from typing import Any

import google_crc32c
import ml_dtypes
import numpy as np

import paths

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


def find_prefix(path: Any) -> Any:
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


def read_index(prefix: Any) -> dict[str, BundleEntry | np.ndarray]:
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
