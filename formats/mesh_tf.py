"""Mesh-TensorFlow's checkpoints (TensorBundle) as T5X's tree, read with numpy alone.

    model.ckpt-1000000.index                sorted table: name -> dtype, shape, position, checksum
    model.ckpt-1000000.data-00001-of-00002  arrays one after another, little-endian, C order
    checkpoint                              text that names the newest prefix

Each block of the table and each array has a checksum. Source: T5X t5x/checkpoint_importer.py; TensorFlow
core/util/tensor_bundle, core/protobuf/tensor_bundle.proto; LevelDB doc/table_format.md.
"""

import importlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import google_crc32c
import ml_dtypes
import numpy as np

import paths
from formats.names import inverse, names_of, translate
from messages import Refused, first_ten

# Mesh-TF's names -> transformers': patterns and their replacements, applied in this order.
REPLACEMENTS = (
    (r'^shared/embedding$', 'shared'),
    (r'^decoder/logits/kernel$', 'lm_head'),
    (r'^(encoder|decoder)/rms_norm/', r'\1/final_layer_norm/'),
    (r'/block_(?=\d{3}/)0{0,2}(\d+)/layer_00(\d)/', r'/block/\1/layer/\2/'),
    (r'/rms_norm/', '/layer_norm/'),
    (r'/(kernel|scale)$', ''),
    (r'/', '.'),
)
SLOTS = {'v': 'v', 'vr': 'v_row', 'vc': 'v_col'}  # Adafactor's: Mesh-TF's name and T5X's

TENSORFLOW_DTYPES = {1: np.float32, 3: np.int32, 9: np.int64, 14: ml_dtypes.bfloat16}

# A LevelDB table: blocks, each with a trailer (compression, checksum), and a footer that ends with the magic.
SNAPPY = 1
FOOTER_BYTES = 48
MAGIC = 0xDB4775248B80FB57.to_bytes(8, 'little')


@dataclass(frozen=True)
class BundleEntry:
    """An array in a .data file: a `checkpoint.LazyArray`. `crc32c` is masked, as TensorFlow stores it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: paths.AnyPath
    offset: int
    size: int
    crc32c: int

    def read(self) -> np.ndarray:
        """Return the array in its stored dtype."""
        content = np.empty(self.size, np.uint8)
        with paths.open_file(str(paths.own_file(self.file)), read_ahead=0) as stream:
            stream.seek(self.offset)
            num_bytes = stream.readinto(content.data)
        if num_bytes < self.size or _masked_crc32c(content) != self.crc32c:
            raise Refused(
                f'{self.file}: {self.name} is cut off or has changed (crc32c): copy it again'
            )
        return content.view(self.dtype).reshape(self.shape)


def find_prefix(path: paths.AnyPath) -> paths.AnyPath | None:
    """Return the prefix of the Mesh-TF checkpoint that `path` names; None if there is none.

    `path` is a prefix such as `.../model.ckpt-1000000`, one of the checkpoint's files, or a folder, for the prefix that
    the folder's file `checkpoint` names, or else its only prefix.
    """
    path = paths.to_path(path)
    if path.name and paths.is_file(_index_file(path)):
        return path
    match = re.fullmatch(r'(.+)\.(index|meta|data-\d{5}-of-\d{5})', path.name)
    if match and paths.is_file(path.with_name(f'{match[1]}.index')):
        return path.with_name(match[1])
    if paths.is_file(path / 'checkpoint'):
        with paths.own_file(path / 'checkpoint').open('rb') as stream:
            content = stream.read(4096)
        # Only the last part of the path counts: the others tell where the files were written. T5X's file has none.
        prefix = re.match(rb'model_checkpoint_path: *"(?:[^"]*/)?([^"/]+)"', content)
        return path / os.fsdecode(prefix[1]) if prefix else None
    indices = [file for file in sorted(paths.list_folder(path)) if file.suffix == '.index']
    if len(indices) > 1:
        raise Refused(
            f'{path} has {first_ten([index.stem for index in indices])}: name one of them'
        )
    return indices[0].with_suffix('') if indices else None


def _index_file(prefix: paths.AnyPath) -> paths.AnyPath:
    return prefix.with_name(f'{prefix.name}.index')


def read_index(prefix: paths.AnyPath) -> dict[str, BundleEntry | np.ndarray]:
    """Return {T5X's path: leaf} of the checkpoint `prefix`, without reading parameters.

    Only `state/step`, int32, and placeholders are arrays: for the slots that a parameter lacks, T5X has float32 zeros of
    shape [1].
    """
    index: dict[str, BundleEntry | np.ndarray] = {}
    unknown = []
    entries = read_bundle_index(prefix)
    biases = [name for name in entries if name.endswith('relative_attention_bias')]
    is_per_layer = not all('/block_000/' in name for name in biases)
    names = inverse(names_of(is_per_layer))
    for name, entry in entries.items():
        path = _t5x_path(name, names)
        if name == 'global_step':
            index['state/step'] = entry.read().astype(np.int32)
        elif not path or path in index:
            unknown.append(name)
        else:
            index[path] = entry

    # A parameter that has any slot gets all of T5X's.
    for path in list(index):
        state = path.replace('target', 'state/param_states', 1)
        slots = [slot for slot in ('v', 'v_row', 'v_col') if f'{state}/{slot}' in index]
        if not path.startswith('target/') or not slots:
            continue
        # Differs from T5X's importer, which copies vr to v_row. Mesh-TF's vr is the mean over the first of the
        # largest dimensions, T5X's v_row the mean over the last. They agree, except for square matrices: swapped.
        shape = index[path].shape
        if slots == ['v_row', 'v_col'] and len(shape) == 2 and shape[0] == shape[1]:
            row = index[f'{state}/v_row']
            index[f'{state}/v_row'] = index[f'{state}/v_col']
            index[f'{state}/v_col'] = row
        for slot in ('m', 'v', 'v_row', 'v_col'):
            index.setdefault(f'{state}/{slot}', np.zeros(1, np.float32))
    if unknown:
        raise Refused(f'{prefix} is not a T5 1.0 or 1.1: it has {first_ten(unknown)}')
    return index


def _t5x_path(variable: str, names: Mapping[str, str]) -> str:
    """Return T5X's path of a variable of Mesh-TF; '' if T5X has none. `names`: {transformers' name: T5X's path}."""
    name, is_slot, slot = variable.partition('_slot_')
    for pattern, replacement in REPLACEMENTS:
        name = re.sub(pattern, replacement, name)
    path = translate(name, names)
    if path and not is_slot:
        return f'target/{path}'
    if path and slot in SLOTS:
        return f'state/param_states/{path}/{SLOTS[slot]}'
    return ''


# TensorBundle: a table of protocol buffers.


def read_bundle_index(prefix: paths.AnyPath) -> dict[str, BundleEntry]:
    """Return {variable: BundleEntry} of `PREFIX.index`. No .data file is opened."""
    file = _index_file(prefix)
    content = paths.own_file(file).read_bytes()
    entries = {}
    try:
        table = _read_table(content)
        # The first key is empty: BundleHeaderProto, 1 num_shards.
        [num_shards] = _read_message(table.pop(b''))[1]
        for key, value in table.items():
            name = key.decode('ascii')
            entries[name] = _read_entry(prefix, name, _read_message(value), num_shards)
    except (ValueError, LookupError, OSError) as error:  # also Snappy's
        raise Refused(f'{file} cannot be read ({error}): copy it again') from error
    return entries


def _read_entry(
    prefix: paths.AnyPath, name: str, fields: dict[int, list], num_shards: int
) -> BundleEntry:
    """Read BundleEntryProto: 1 dtype, 2 shape, 3 shard, 4 offset, 5 size, 6 crc32c, 7 slices."""
    dtype_number = _field(fields, 1)
    shard = _field(fields, 3)
    # TensorShapeProto: 2 dimensions, each a message with 1 size.
    dims = _read_message(_field(fields, 2, default=b'')).get(2, [])
    shape = tuple(_field(_read_message(dim), 1) for dim in dims)
    if dtype_number not in TENSORFLOW_DTYPES or 7 in fields:
        raise Refused(
            f'{name} has dtype {dtype_number}: must be one of {list(TENSORFLOW_DTYPES)}, unsliced'
        )
    dtype = np.dtype(TENSORFLOW_DTYPES[dtype_number])
    file = prefix.with_name(f'{prefix.name}.data-{shard:05d}-of-{num_shards:05d}')
    offset = _field(fields, 4)
    size = _field(fields, 5)
    return BundleEntry(name, shape, dtype, file, offset, size, crc32c=_field(fields, 6))


def _read_message(content: bytes) -> dict[int, list]:
    """Return a protobuf message as {field number: its values in order}, int, or bytes if it has a length."""
    fields: dict[int, list] = {}
    cursor = Cursor(content)
    while not cursor.is_at_end():
        tag = cursor.varint()
        wire_type = tag & 7
        value: int | bytes
        if wire_type == 0:
            value = cursor.varint()
        elif wire_type == 2:
            value = cursor.take(cursor.varint())
        else:
            value = int.from_bytes(cursor.take({1: 8, 5: 4}[wire_type]), 'little')
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _field(fields: dict[int, list], number: int, default: Any = 0) -> Any:
    """Return the last value of a field; `default` if it is not stored."""
    return fields.get(number, [default])[-1]


# LevelDB's table.


class Block(NamedTuple):
    """The position of a block in the file, without its trailer."""

    start: int
    size: int


def _read_table(content: bytes) -> dict[bytes, bytes]:
    """Return {key: value} of a LevelDB table."""
    footer_start = len(content) - FOOTER_BYTES
    if footer_start < 0 or not content.endswith(MAGIC):
        raise Refused('it does not end with the magic of a TensorFlow index')
    footer = Cursor(content, footer_start)
    footer.block()  # metadata, empty in TensorFlow
    table: dict[bytes, bytes] = {}
    for _, value in _read_block(content, footer.block()):
        table.update(_read_block(content, Cursor(value).block()))
    return table


def _read_block(content: bytes, block: Block) -> Iterator[tuple[bytes, bytes]]:
    """Yield (key, value). A stored key is the number of bytes that it shares with the previous key, and the rest."""
    cursor = Cursor(content, block.start)
    body = cursor.take(block.size)
    compression = cursor.take(1)
    crc32c = int.from_bytes(cursor.take(4), 'little')
    if _masked_crc32c(body + compression) != crc32c:
        raise Refused(f'the block at byte {block.start} has changed (crc32c)')
    if compression[0] == SNAPPY:  # as in T5X's own test data
        size = Cursor(body).varint()
        body = importlib.import_module('pyarrow').decompress(body, size, 'snappy', asbytes=True)
    # Restart positions for searches, and their number, follow the entries. We read all entries in order.
    num_restarts = int.from_bytes(body[-4:], 'little')
    entries = Cursor(Cursor(body).take(len(body) - 4 * (num_restarts + 1)))
    key = b''
    while not entries.is_at_end():
        num_shared = entries.varint()
        num_unshared = entries.varint()
        value_size = entries.varint()
        key = key[:num_shared] + entries.take(num_unshared)
        yield key, entries.take(value_size)


class Cursor:
    """A position in bytes that are read in order."""

    def __init__(self, content: bytes, position: int = 0):
        self.content = content
        self.position = position

    def is_at_end(self) -> bool:
        return self.position >= len(self.content)

    def take(self, length: int) -> bytes:
        """Return the next `length` bytes; fewer at the end."""
        self.position += length
        return self.content[self.position - length : self.position]

    def varint(self) -> int:
        """Return the next unsigned integer, stored as 7 bits a byte, the lowest first."""
        number = 0
        shift = 0
        while True:
            [byte] = self.take(1)
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    def block(self) -> Block:
        return Block(start=self.varint(), size=self.varint())


def _masked_crc32c(content: bytes | np.ndarray) -> int:
    """Return the checksum, rotated and shifted by a constant, because data may itself contain checksums."""
    crc32c = google_crc32c.value(content)
    return ((crc32c >> 15 | crc32c << 17) + 0xA282EAD8) % 2**32
