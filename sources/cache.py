"""SeqIO's task caches: TFRecord files of tf.train.Example, with info and stats.

    ROOT/TASK/COMPLETED                            empty, written last
    ROOT/TASK/info.SPLIT.json                      dtype and shape of each feature, number of shards
    ROOT/TASK/stats.SPLIT.json                     numbers of examples and tokens
    ROOT/TASK/SPLIT.tfrecord-00000-of-00064 ...

Our caches also store the ids in files that need no parsing and that SeqIO ignores:

    ROOT/TASK/SPLIT.ids-00000-of-00064 ...         int32, one example after another
    ROOT/TASK/SPLIT.index-00000-of-00064 ...       int64 [examples, 4], an IndexEntry for each

A colon in a task's name separates folders. Source: seqio/dataset_providers.py `_CachedDataProvider`,
seqio/utils.py. Imports no jax and no TensorFlow.
"""

import functools
import importlib
import itertools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import google_crc32c
import numpy as np

import paths
from messages import Refused
from sources import FEATURES, BadLines, Record, deal
from sources.deal import Blocks
from sources.files import FileRecord
from sources.tfrecord import ByteRange, ByteRanges, read_record, record_offsets

MAX_CACHE_BLOCKS = 1 << 20
MAX_INDEXED_BYTES = 1 << 28  # a larger cache is not indexed when it is opened
TEXT = 'string'  # the dtype of bytes in info.json
# Our caches: the dtypes, the file that records the origin, and the version of SeqIO whose layout they have.
STORED_DTYPES = {'b': 'bool', 'i': 'int64', 'u': 'int64', 'f': 'float32'}
ORIGIN = 'cache.json'
SEQIO_VERSION = '0.0.20'


class FeatureInfo(NamedTuple):
    dtype: str  # numpy's, or 'string'
    shape: tuple[int | None, ...]
    stored_name: str  # in the files


class IndexEntry(NamedTuple):
    """The position of an example's ids: its inputs, followed by its targets."""

    start: int  # index of the first id in the file of ids
    num_inputs: int
    num_targets: int
    crc32c: int  # the checksum of these ids


class Ids(NamedTuple):
    """The ids of the examples of a shard, and the position of each example's."""

    path: str
    ids: np.ndarray  # int32, memory-mapped
    entries: np.ndarray  # int64 [examples, 4], memory-mapped


class Split(NamedTuple):
    """One split of a cached task. `files` are its shards, in order."""

    features: dict[str, FeatureInfo]
    files: list[paths.AnyPath]
    num_examples: int | None  # None without stats


def find(roots: Sequence[paths.AnyPath], task: str) -> paths.AnyPath | None:
    """Return the folder of a task in the first of `roots` that holds it completely."""
    for root in roots:
        folder = root.joinpath(*task.split(':'))
        if (folder / 'COMPLETED').is_file():
            return folder
    return None


def splits(folder: paths.AnyPath) -> list[str]:
    """Return the names of the splits of a cached task that hold examples."""
    infos = {file.name for file in folder.glob('info.*.json')}
    for file in folder.glob('*.tfrecord-*'):
        infos.add(f'info.{file.name.partition(".tfrecord-")[0]}.json')
    names = []
    for name in sorted(infos):
        if read_json(folder / name):  # {} stands for a split without examples, as in P3
            names.append(name.removeprefix('info.').removesuffix('.json'))
    return names


def open_split(folder: paths.AnyPath, split: str) -> Split:
    """Return the info of a split."""
    available = splits(folder)
    if split not in available:
        raise Refused(f'{folder} has no split {split!r}: use one of {available}')
    features = {}
    num_examples = None
    info_file = folder / f'info.{split}.json'
    try:
        info = read_json(info_file)
        for stored_name, feature in info['features'].items():
            name = re.sub('_plaintext$', '_pretokenized', stored_name)  # old caches have the former
            dtype = feature['dtype']
            if 'seqio_version' not in info and dtype == 'int64':
                dtype = 'int32'
            features[name] = FeatureInfo(dtype, tuple(feature['shape']), stored_name)
        num_shards = info['num_shards']
        files: list[paths.AnyPath] = sorted(folder.glob(f'{split}.tfrecord-*-of-*{num_shards}'))
        stats_file = folder / f'stats.{split}.json'
        if stats_file.is_file():
            num_examples = read_json(stats_file).get('examples')
    except (AttributeError, KeyError, TypeError) as error:
        raise Refused(f'{info_file} is damaged ({error!r:.200}): copy the folder again') from error
    if not files or len(files) != num_shards:
        raise Refused(
            f'{info_file}: {len(files)} of {num_shards} shards are there: copy all of them'
        )
    return Split(features, files, num_examples)


def vocabulary_hash(folder: paths.AnyPath) -> str | None:
    """Return the hash of the vocabulary that made a cache, None for a cache of SeqIO."""
    file = folder / ORIGIN
    if not file.exists() and not any(folder.glob('*.ids-*')):
        return None
    # If the hash is missing, 'None' matches no vocabulary.
    return str(read_json(file).get('vocabulary_hash'))


def read_json(file: paths.AnyPath) -> dict:
    """Return the object in a file of JSON."""
    return paths.json_object(file.read_bytes(), title=str(file), remedy='copy the folder again')


def read_example(path: str | Path, offset: int, split: Split) -> dict:
    """Return the example at `offset`. Raises Refused if it is damaged."""
    with open(path, 'rb', buffering=0) as file:
        file.seek(offset)
        return decode(read_record(file, path) or b'', split)


def described(value: Any) -> dict | None:
    """Return the description in info.json of a field's value; None for a value that a cache cannot hold.

    A cache holds texts, numbers and flat lists of them. An empty list has the dtype ''.
    """
    shape: list[None] = []
    if isinstance(value, list | tuple | np.ndarray):
        shape = [None]
        values = list(value)
        if not values:
            return {'dtype': '', 'shape': shape}
    else:
        values = [value]
    if all(isinstance(x, str | bytes) for x in values):
        return {'dtype': TEXT, 'shape': shape}
    try:
        array = np.array(values)
    except ValueError:  # lists of different lengths
        return None
    if array.ndim != 1 or array.dtype.kind not in STORED_DTYPES or array.dtype == np.uint64:
        return None
    return {'dtype': STORED_DTYPES[array.dtype.kind], 'shape': shape}


def described_by_both(one: dict, other: dict) -> dict:
    """Return the fields that have the same description in both, as `described` gives it."""
    both = {}
    for name in one.keys() & other.keys():
        dtypes = {one[name]['dtype'], other[name]['dtype']} - {''}
        if one[name]['shape'] == other[name]['shape'] and len(dtypes) <= 1:
            both[name] = {'dtype': ''.join(dtypes), 'shape': one[name]['shape']}
    return both


def write_info(folder: Path, split: str, statistics: Sequence[Mapping]) -> None:
    """Write info and stats of a split from the statistics of its shards."""
    total = {'examples': sum(shard['examples'] for shard in statistics)}
    fields = [shard['fields'] for shard in statistics if shard['examples']]
    features: dict = {}
    if fields:
        for name, field in functools.reduce(described_by_both, fields).items():
            features[name] = {**field, 'dtype': field['dtype'] or TEXT}
    for name in FEATURES:
        total[f'{name}_tokens'] = sum(shard[f'{name}_tokens'] for shard in statistics)
        total[f'{name}_max_tokens'] = max(shard[f'{name}_max_tokens'] for shard in statistics)
        features[name] = {'dtype': 'int32', 'shape': [None]}
        features[f'{name}_pretokenized'] = {'dtype': TEXT, 'shape': []}
    info: dict = {
        'features': features,
        'num_shards': len(statistics),
        'seqio_version': SEQIO_VERSION,
    }
    if total['examples'] == 0:
        info = {}  # as SeqIO writes for a split without examples
    for name, content in (('stats', total), ('info', info)):
        text = json.dumps(content, indent=2, sort_keys=True)  # as SeqIO writes it
        paths.replace_file(folder / f'{name}.{split}.json', text.encode())


# Examples.


def decode(content: bytes, split: Split) -> dict:
    """Return the features of a serialized tf.train.Example."""
    message = example_class()()
    try:
        message.ParseFromString(content)
    except Exception as error:  # the class of protobuf's errors depends on its version
        raise Refused(f'not a tf.train.Example ({error}): copy the file again') from None
    example = {}
    for name, info in split.features.items():
        feature = message.features.feature[info.stored_name]  # empty if not stored
        kind = feature.WhichOneof('kind')
        values = getattr(feature, kind).value if kind else []
        try:
            example[name] = shaped(values, info)
        except (AttributeError, OverflowError, ValueError):  # another kind, too large
            raise Refused(
                f'feature {name!r} is not {info.dtype} of shape {list(info.shape)}: cache the task again'
            ) from None
    return example


def shaped(values: Sequence, info: FeatureInfo) -> Any:
    """Return a feature's values: an array, a list of texts, or a scalar. Raises ValueError for a too large integer."""
    if info.dtype == TEXT:
        values = [text_of(value) for value in values]
        if info.shape:
            return values
        array = np.array(values, object)
    else:
        exact = np.array(values)
        array = exact.astype(info.dtype)
        if array.dtype.kind == 'i' and (array != exact).any():
            raise ValueError(array)
    array = array.reshape([-1 if size is None else size for size in info.shape])
    return array if info.shape else array.item()


def text_of(value: bytes) -> str | bytes:
    """Return bytes as text, if they are UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def encode(example: Mapping) -> bytes:
    """Return a serialized tf.train.Example: arrays flattened, texts as UTF-8."""
    message = example_class()()
    for name, value in example.items():
        feature = message.features.feature[name]
        if isinstance(value, str | bytes):
            value = [value]
        if isinstance(value, list) and all(isinstance(x, str | bytes) for x in value):
            feature.bytes_list.value.extend(x.encode() if isinstance(x, str) else x for x in value)
            continue
        array = np.asarray(value).ravel()
        if array.dtype.kind == 'f':
            feature.float_list.value.extend(array.tolist())
        else:
            feature.int64_list.value.extend(array.astype(np.int64).tolist())
    return message.SerializeToString(deterministic=True)


@functools.cache
def example_class() -> Any:
    """Return TFDS's class for tf.train.Example, which needs no TensorFlow."""
    return importlib.import_module('tensorflow_datasets.proto.tf_example_generated_pb2').Example


# Files of ids.


def ids_files(path: str) -> tuple[str, str]:
    """Return the names of the files of ids and index that belong to a TFRecord file."""
    folder, name = os.path.split(path)
    names = (name.replace('.tfrecord-', '.ids-'), name.replace('.tfrecord-', '.index-'))
    return os.path.join(folder, names[0]), os.path.join(folder, names[1])


def write_ids(file: IO[bytes], start: int, inputs: np.ndarray, targets: np.ndarray) -> IndexEntry:
    """Append the ids of an example to a file with `start` ids. Return its entry."""
    content = inputs.astype('<i4').tobytes() + targets.astype('<i4').tobytes()
    file.write(content)
    return IndexEntry(start, len(inputs), len(targets), google_crc32c.value(content))


def open_ids(path: str) -> Ids:
    """Open the ids that belong to a TFRecord file."""
    ids_path, index_path = ids_files(path)
    try:
        index = np.memmap(index_path, '<i8', mode='r').reshape(-1, len(IndexEntry._fields))
        last = IndexEntry(*index[-1].tolist())
        num_ids = last.start + last.num_inputs + last.num_targets
        is_cut_off = os.path.getsize(ids_path) != 4 * num_ids
    except ValueError:  # the file ends within an entry
        is_cut_off = True
    if is_cut_off:
        raise Refused(f'{index_path} or {ids_path} is cut off: cache the task again')
    ids = np.zeros(0, np.int32)
    if num_ids:
        ids = np.memmap(ids_path, '<i4', mode='r')
    # A view as a plain array is faster to read.
    return Ids(ids_path, ids.view(np.ndarray), index.view(np.ndarray))


def read_ids(shard: Ids, i: int) -> dict[str, np.ndarray]:
    """Return the ids of example `i` of a shard."""
    start, num_inputs, num_targets, crc = shard.entries[i].tolist()
    ids = shard.ids[start : start + num_inputs + num_targets]
    end_of_last = sum(itertools.chain(*shard.entries[i - 1 : i, :3].tolist()))
    if start != end_of_last or google_crc32c.value(ids.tobytes()) != crc:  # zeros have a valid crc
        raise Refused(f'{shard.path}: example {i} is damaged: cache the task again')
    return {'inputs': ids[:num_inputs], 'targets': ids[num_inputs:]}


# Parts of a source.


class CachedRecords(Blocks):
    """Examples of a task cache, each a block. Their fields are ids; the other features are not read."""

    def __init__(
        self,
        split: Split,
        files: list[FileRecord],
        bad_lines: BadLines,
        features: Collection[str] = FEATURES,
    ):
        infos = {name: split.features[name] for name in features if name in split.features}
        for name in infos.keys() & set(FEATURES):
            if 'int' not in infos[name].dtype or len(infos[name].shape) != 1:
                folder = split.files[0].parent
                raise Refused(
                    f'{folder}: feature {name!r} is not a list of ids: set data.use_cached=no'
                )
        self.whole_split = split
        self.split = split._replace(features=infos)
        self.features = infos.keys()
        self.files: list[FileRecord] = files
        self.names = [file.path for file in files]
        self.bad_lines = bad_lines
        self.open_blocks()
        if split.num_examples not in (None, self.num_records):
            folder = split.files[0].parent
            raise Refused(f'{folder}: its stats describe other examples: copy the folder again')

    def open_blocks(self) -> None:
        """Find where each example begins."""
        self.offsets = [record_offsets(name) for name in self.names]
        self.divide(map(len, self.offsets))
        self.num_records = self.num_blocks

    def read(self, block: int) -> list[Record | None]:
        file_index, i = self.locate(block)
        name = self.names[file_index]
        offset = int(self.offsets[file_index][i])
        return [self.bad_lines.record(name, offset, read_example, name, offset, self.split)]

    def whole(self) -> 'CachedRecords':
        """Return the same examples with all their features."""
        reader = LargeCache if isinstance(self, LargeCache) else CachedRecords
        return reader(self.whole_split, self.files, self.bad_lines, self.whole_split.features)


class CachedIds(CachedRecords):
    """One of our task caches, read from its files of ids. A block has one example, or a few of very many."""

    def open_blocks(self) -> None:
        self.shards = [open_ids(name) for name in self.names]
        self.divide(len(shard.entries) for shard in self.shards)
        self.num_records: int = self.num_blocks  # so far each is a block
        self.records_per_block = max(-(-self.num_records // MAX_CACHE_BLOCKS), 1)
        self.num_blocks = -(-self.num_records // self.records_per_block)

    def read(self, block: int) -> list[Record | None]:
        first = block * self.records_per_block
        records = []
        for number in range(first, min(first + self.records_per_block, self.num_records)):
            file_index, i = self.locate(number)
            shard = self.shards[file_index]
            records.append(self.bad_lines.record(shard.path, i, read_ids, shard, i))
        return records


class LargeCache(ByteRanges, CachedRecords):
    """A task cache that is too large to index when it is opened, or is in a bucket."""

    def open_blocks(self) -> None:
        self.num_records = self.split.num_examples
        ranges = [ByteRange(x.path, x.num_bytes, 0, x.num_bytes) for x in self.files]
        self.divide_ranges(ranges, deal.MAX_BLOCK_BYTES)

    def parse(self, content: bytes) -> dict:
        return decode(content, self.split)
