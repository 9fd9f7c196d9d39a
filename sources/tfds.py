"""TFDS data sets that are prepared on a disk or in a bucket, read without TensorFlow.

    ROOT/NAME[/CONFIG]/VERSION/dataset_info.json   splits, and the number of records of each shard
    ROOT/NAME[/CONFIG]/VERSION/features.json       how a record is decoded
    ROOT/NAME[/CONFIG]/VERSION/NAME-SPLIT.tfrecord-00000-of-00064 ...

The shards are ArrayRecord files, on a disk, or TFRecord files of tf.train.Example. tensorflow-datasets reads the two
JSON files, parses the slices of splits and decodes the records. It is imported when a data set is
opened, which takes a second. Imports no jax.
"""

import abc
import contextlib
import functools
import importlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import paths
from messages import Refused, first_ten
from sources import deal
from sources.cache import text_of
from sources.files import matching_files
from sources.tables import LineParser, check_columns
from sources.tfrecord import ByteRange, ByteRanges, StoredRecord, StoredRecords, record_offsets

if TYPE_CHECKING:
    from array_record.python.array_record_module import ArrayRecordReader
    from tensorflow_datasets.core import DatasetInfo
    from tensorflow_datasets.core.features import FeaturesDict

VERSION = re.compile(r'\d+\.\d+\.\d+')
NAME = re.compile(rf'\w+(/[\w.+-]+)?(:{VERSION.pattern})?')

NUM_READERS = 128  # ArrayRecord files kept open
BLOCKS_OF_LARGE_FILE = 1024
READER_OPTIONS = 'readahead_buffer_size:0,max_parallelism:0'  # for reading in any order


class ShardRun(NamedTuple):
    """Consecutive records of a shard, from number `first` on."""

    path: str
    first: int
    num_records: int
    num_in_shard: int
    status: paths.FileStatus  # the shard's


def find(root: paths.AnyPath, name: str) -> paths.AnyPath:
    """Return the folder of a data set NAME[/CONFIG][:VERSION], by default the newest."""
    path, _, version = name.partition(':')
    versions = versions_of(root / path)
    if versions and not version:
        version = versions[-1]
    folder = root / path / version
    files = [folder / 'dataset_info.json', folder / 'features.json']
    if not NAME.fullmatch(name) or version not in versions or not all(map(paths.is_file, files)):
        raise Refused(
            f'{root} does not hold this data set; its versions of {path!r}: {first_ten(versions) or "none"}: '
            f"name one, or prepare it there with 'tfds build {path}'"
        )
    return folder


def versions_of(folder: paths.AnyPath) -> list[str]:
    """Return the versions in the folder of a data set, from the oldest to the newest."""
    names = [child.name for child in paths.list_folder(folder)]
    versions = [name for name in names if VERSION.fullmatch(name)]
    return sorted(versions, key=lambda version: [int(part) for part in version.split('.')])


class DataSet:
    """A data set in the folder that `find` returns."""

    def __init__(self, folder: paths.AnyPath):
        self.folder = folder
        self._tfds = importlib.import_module('tensorflow_datasets')
        with any_error_named(f'{folder} cannot be opened: prepare it again'):
            info = self._read_info(folder)
            self.name = ':'.join(info.full_name.rsplit('/', maxsplit=1))
            self.file_format: str = info.file_format.value
            self.num_records = {name: split.num_examples for name, split in info.splits.items()}
            self._info = info
        # ArrayRecord files can only be read from a disk.
        formats = list(SHARDS_OF_FORMAT) if isinstance(folder, Path) else ['tfrecord']
        if self.file_format not in formats:
            raise Refused(f'{folder} is stored as {self.file_format}: prepare it as {formats[-1]}')

    def _read_info(self, folder: paths.AnyPath) -> 'DatasetInfo':
        """Return TFDS's DatasetInfo. TFDS reads from a disk: files in a bucket, except shards, are copied."""
        if isinstance(folder, Path):
            return self._tfds.builder_from_directory(folder).info
        with tempfile.TemporaryDirectory() as copy:
            for file in paths.list_folder(folder):
                if '-of-' not in file.name:
                    Path(copy, file.name).write_bytes(file.read_bytes())
            return self._tfds.builder_from_directory(copy).info

    def runs(self, expression: str) -> list[ShardRun]:
        """Return the runs of records of a split, or of slices of splits."""
        names = ', '.join(f'{name} ({n:,})' for name, n in self.num_records.items())
        with any_error_named(f'{self.name} has the splits {names}'):
            instructions = self._info.splits[expression].file_instructions
        if not instructions:
            raise Refused(f'it has no record of {self.name}: name more of them')
        statuses = matching_files(f'{self.folder}/*')  # one request for all files
        runs = []
        absent_files = []
        for instruction in instructions:
            path = str(self.folder / os.path.basename(instruction.filename))
            if path in statuses and statuses[path].num_bytes:
                numbers = (instruction.skip, instruction.take, instruction.examples_in_shard)
                runs.append(ShardRun(path, *numbers, statuses[path]))
            elif path not in absent_files:
                absent_files.append(path)
        if absent_files:
            raise Refused(f'{self.name} lacks {first_ten(absent_files)}: copy it again')
        return runs

    def decoder(self, fields: Collection[str], remedy: str = '') -> Callable[[bytes], dict]:
        """Return a function that decodes the features of a stored record that contain `fields`.

        Without fields it decodes all features, and does not shorten floats.
        """
        features = self._info.features
        if not fields:
            return functools.partial(decode, features)
        values = []  # the first one of each feature, as 'answers/text/0'
        for name, info in flat(features.get_tensor_info()):
            values.append(name + '/0' * len(info.shape))
        columns = sorted(values)
        for field in fields:
            name = re.sub(r'(/\d+)+$', '', field)
            if name + '/0' * (field.count('/') - name.count('/')) in values:
                columns.append(field)
        check_columns(self.name, columns, fields, remedy)
        # TFDS's PartialDecoding does the same but needs TensorFlow.
        names = {field.split('/')[0] for field in fields}
        selection = self._tfds.features.FeaturesDict({name: features[name] for name in names})
        return functools.partial(decode, selection, short_floats=True)


def open_all(
    data_sets: Sequence[DataSet],
    expression: str,
    decode: Callable[[bytes], dict],
    parser: LineParser,
) -> 'TfdsRecords':
    """Return the records of a split of several data sets with the same features, in order."""
    formats = sorted({data_set.file_format for data_set in data_sets})
    if len(formats) > 1:
        raise Refused(f'its data sets are stored as {" and ".join(formats)}: use one format')
    runs = []
    for data_set in data_sets:
        runs += data_set.runs(expression)
    return SHARDS_OF_FORMAT[formats[0]](runs, decode, parser)


def decode(features: 'FeaturesDict', content: bytes, short_floats: bool = False) -> dict:
    """Return {feature: value} of a stored record."""
    with any_error_named('not a record of these features: copy the file again'):
        example = features.deserialize_example_np(content)
    return as_python(example, short_floats)


@contextlib.contextmanager
def any_error_named(fault: str) -> Iterator[None]:
    """Raise Refused for any error: TFDS, protobuf and ArrayRecord have classes of their own."""
    try:
        yield
    except Exception as error:
        raise Refused(f'{fault} ({first_line(error)})') from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, else its class."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip('.')


def flat(tree: Mapping, prefix: str = '') -> Iterator[tuple]:
    """Yield (name, value) of the leaves of nested dicts, the names joined by slashes."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f'{prefix}{name}/')
        else:
            yield f'{prefix}{name}', value


def as_python(value, short_floats: bool = False):
    """Return TFDS's values as Python's own types: dicts, lists, numbers, str, or bytes if they are not UTF-8.

    `short_floats`: write a float32 as 3.8, not as 3.799999952316284.
    """
    if isinstance(value, Mapping):
        return {name: as_python(x, short_floats) for name, x in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [as_python(x, short_floats) for x in value]
    if isinstance(value, bytes):
        return text_of(value)
    if short_floats and isinstance(value, float) and float(np.float32(value)) == value:
        return float(str(np.float32(value)))
    return value


class TfdsRecords(StoredRecords):
    """Records of shard runs: the fields that the settings name, or all features."""

    def __init__(self, runs: list[ShardRun], decode: Callable[[bytes], dict], parser: LineParser):
        self.runs = runs
        self.decode = decode
        self.parser = parser
        self.bad_lines = parser.bad_lines
        self.num_records: int = sum(run.num_records for run in runs)
        self.open_blocks()

    @abc.abstractmethod
    def open_blocks(self) -> None:
        """Divide the runs into blocks of about the same size in bytes."""

    def parse(self, content: bytes) -> dict | None:
        example = self.decode(content)
        return example if self.parser.whole_records else self.parser.fields_named_in(example)


class TFRecords(ByteRanges, TfdsRecords):
    """Records of TFRecord files.

    If a slice begins or ends inside of a shard, all record lengths in that shard are read to find the
    byte.
    """

    def open_blocks(self) -> None:
        ranges = []
        for run in self.runs:
            first = 0
            last = run.status.num_bytes
            if run.num_records != run.num_in_shard:
                bounds = [*record_offsets(run.path).tolist(), last]
                first = bounds[run.first]
                last = bounds[run.first + run.num_records]
            ranges.append(ByteRange(run.path, run.status.num_bytes, first, last))
        num_bytes = sum(part.last - part.first for part in ranges)
        self.divide_ranges(ranges, block_size(num_bytes, self.num_records))


class ArrayRecords(TfdsRecords):
    """A block has consecutive records.

    If not all files can be kept open, blocks are larger, because reading most of them begins with
    reading a file's index, about 10 bytes per record.
    """

    def open_blocks(self) -> None:
        num_bytes = sum(run.status.num_bytes for run in self.runs)
        num_stored = sum(run.num_in_shard for run in self.runs)
        block_bytes = block_size(num_bytes * self.num_records // num_stored, self.num_records)
        self.records_per_block = max(block_bytes * num_stored // num_bytes, 1)
        if len(self.runs) > NUM_READERS:
            largest = max(run.num_in_shard for run in self.runs)
            self.records_per_block = max(self.records_per_block, largest // BLOCKS_OF_LARGE_FILE)
        self.divide(-(-run.num_records // self.records_per_block) for run in self.runs)
        self.lock = threading.Lock()  # a reader has a position
        self.reader = functools.lru_cache(maxsize=NUM_READERS)(open_array_record)

    def stored(self, block: int) -> Iterator[StoredRecord]:
        index, number = self.locate(block)
        run = self.runs[index]
        start = number * self.records_per_block
        end = min(start + self.records_per_block, run.num_records)
        for i in range(run.first + start, run.first + end):
            try:
                yield StoredRecord(run.path, i, self.read_record(run, i))
            except RuntimeError as error:
                fault = Refused(f'it is damaged ({first_line(error)}): copy the file again')
                yield StoredRecord(run.path, i, fault)

    def read_record(self, run: ShardRun, i: int) -> bytes:
        """Return record number `i` of a file. Raises RuntimeError for a damaged one."""
        with self.lock:
            reader = self.reader(run.path)
            try:
                if reader.record_index() != i:
                    reader.seek(i)
                return reader.read()
            except RuntimeError:
                self.reader.cache_clear()  # a reader does not work after an error
                raise


def open_array_record(path: str) -> 'ArrayRecordReader':
    module = importlib.import_module('array_record.python.array_record_module')
    with any_error_named(f'{path} cannot be opened: copy the file again'):
        reader = module.ArrayRecordReader(
            path, READER_OPTIONS, file_reader_buffer_size=deal.MAX_BLOCK_BYTES
        )
        reader.seek(0)
    return reader


def block_size(num_bytes: int, num_records: int) -> int:
    """Return the number of bytes of a block, which holds at least one record on average."""
    return max(min(num_bytes // deal.MIN_BLOCKS, deal.MAX_BLOCK_BYTES), num_bytes // num_records, 1)


SHARDS_OF_FORMAT: dict[str, type[TfdsRecords]] = {
    'array_record': ArrayRecords,
    'tfrecord': TFRecords,
}
