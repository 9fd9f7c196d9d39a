"""Sources of records: files of text and tables, task caches, TFDS data sets, pydoc.

A source shuffles its records and divides each epoch among the lanes of the batch. It knows no
tokens. Imports no jax.
"""

import ast
import bisect
import collections
import concurrent.futures
import contextlib
import csv
import dataclasses
import functools
import gzip
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import pathlib
import re
import string
import sysconfig
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
from absl import logging

import parquet_source
import paths
import seqio_cache
import settings
import tfds_source

# Plain files. A pool is what a lane holds in memory and shuffles.
MAX_BLOCK_BYTES = 1 << 16
MIN_BLOCKS = 4096  # of a corpus; a small one has smaller blocks
BLOCKS_PER_POOL = 8
MAX_SMALL_BYTES = 1 << 22  # of a corpus whose lines are counted when it is opened

MAX_CACHE_BLOCKS = 1 << 20  # of a task cache
MAX_INDEXED_BYTES = 1 << 28  # of a task cache whose examples are found when it is opened

# Parquet. Lanes read from as many row groups at a time.
WINDOW_BYTES = 128 << 20

# Gzipped files.
POOL_LINES = 100_000  # in the pools of all lanes together
MIN_POOL_LINES = 256  # in the pool of one lane
MIN_OPEN_SHARDS = 16  # by all lanes together
# Numbers set aside for the pools of a round of shards, far more than there are.
POOLS_PER_ROUND = 1 << 32

# A longer line of plain text is cut into documents of at most CUT_BYTES.
MAX_LINE_BYTES = 1 << 20
CUT_BYTES = 1 << 11
# A longer row of CSV has a quote that nobody closed.
MAX_ROW_BYTES = 1 << 24
csv.field_size_limit(2**31 - 1)
BYTES_PER_LINE = 100  # at least, where nobody has counted the lines
NEWLINE = ord('\n')

# The digest of a file counts all of a small file, and some blocks of a larger one.
MAX_BYTES_DIGESTED_WHOLE = 1 << 20
DIGEST_BLOCKS = 16
DIGEST_BLOCK_BYTES = 1 << 12

# Files in buckets. A lane holds SEQUENTIAL_READ_AHEAD bytes of each gzipped shard that it reads.
SEQUENTIAL_READ_AHEAD = 2 << 20
LINE_READ_AHEAD = 1 << 14  # after a block, for the end of its last line

NUM_THREADS = 16  # that open files when a source is opened
# How files are read, by the last part of their names but .gz; others are plain text.
KIND_OF_SUFFIX = {
    '.json': 'jsonl',
    '.jsonl': 'jsonl',
    '.ndjson': 'jsonl',
    '.csv': 'csv',
    '.tsv': 'tsv',
    '.parquet': 'parquet',
}
# How a digest names them. (The first two are those of runs that knew no other.)
KIND_IN_DIGEST = {
    'text': False,
    'jsonl': True,
    'csv': 'csv',
    'tsv': 'tsv',
    'parquet': 'parquet',
}

NO_SPLIT = 'none'  # in place of the name of a split: a task has no such records

EMPTY_FILE = 'the file is empty; copy it again, or remove it'

HEAD_BYTES = 1 << 16  # of a file, which tell what it holds
GZIP = b'\x1f\x8b'
PARQUET = b'PAR1'
# What files begin with that are no text, what they are, and what to do with them.
FORMATS = {
    GZIP: ('gzipped', 'gunzip it, or add .gz to its name'),
    PARQUET: ('Parquet', "let its name end in .parquet, or set data.kind='parquet'"),
    paths.LFS_HEADER: ('a pointer of git-lfs', 'run `git lfs pull` in its repository'),
    b'PK\x03\x04': ('a zip archive, as .xlsx is', 'unzip it, or save the spreadsheet as CSV'),
    b'\xd0\xcf\x11\xe0': ('an old Office document', 'save it as CSV or as text'),
    b'%PDF-': ('PDF', 'convert it to text'),
    b'BZh91AY': ('compressed by bzip2', 'decompress it, or gzip it'),
    b'\xfd7zXZ': ('compressed by xz', 'decompress it, or gzip it'),
    b'\x28\xb5\x2f\xfd': ('compressed by zstd', 'decompress it, or gzip it'),
    b'ARROW1': ('Arrow', 'write it as Parquet'),
    b'SQLite format 3': ('an SQLite database', 'export the table as CSV'),
    b'\xff\xfe': ('UTF-16 or UTF-32', 'convert it to UTF-8'),
    b'\xfe\xff': ('UTF-16 or UTF-32', 'convert it to UTF-8'),
}


class Record(NamedTuple):
    """A stored record: its name and its fields.

    The name is path:offset, in a gzipped file path:line, in Parquet path:row.

    A field is a text, in a task cache an array of ids. Where no field is asked for, the fields of a
    TFDS record are all its features, as Python's own types.
    """

    name: str
    fields: dict[str, Any]
    split_key: str = ''  # whose hash decides on the split; '' is the fields


class Share(NamedTuple):
    """The part of an epoch that one lane reads. Lane r fills row r of every batch."""

    seed: int | str
    epoch: int
    lane: int
    num_lanes: int

    @property
    def slot(self) -> int:
        """The index of this part among the parts of the epoch.

        It changes every epoch, so that each lane gets text where there is less of it than there are
        lanes.
        """
        return (self.lane + self.epoch) % self.num_lanes


class Document(NamedTuple):
    """A record and where a lane reads it: a pool, and an offset in the shuffled pool."""

    pool: int
    offset: int
    record: Record


class FileChange(NamedTuple):
    """A correction of a file: the text at the offsets `before` lay at `after` from a step on.

    Both are [0, begin, end, size]: only the text between begin and end is another one.
    """

    step: int
    before: Sequence[int]
    after: Sequence[int]


class FileRecord(NamedTuple):
    """A file of a corpus. `digest` identifies what it holds, whatever its name."""

    split: str  # 'train' or 'validation'
    path: str
    num_bytes: int
    digest: str
    samples: Sequence[int] = ()  # hashes of the parts that `sampled_ranges` returns
    # What beside its size tells how it was cut into blocks when the run began: PlainFiles.find_lines,
    # or (rows, bytes) of Parquet's row groups. '' where that is nothing.
    layout: Any = None
    changes: Sequence[FileChange] = ()  # since then

    @property
    def content(self) -> tuple[str, int, str]:
        return self.split, self.num_bytes, self.digest

    @property
    def name(self) -> tuple[str, str]:
        return self.split, self.path

    @property
    def base_name(self) -> tuple[str, str]:
        return self.split, os.path.basename(self.path)

    @property
    def first_num_bytes(self) -> int:
        """Its size when the run began."""
        return self.changes[0].before[-1] if self.changes else self.num_bytes

    def is_changed_at(self, step: int) -> bool:
        """Return whether its text is another one from `step` on."""
        return bool(self.changes) and self.changes[-1].step == step


@dataclasses.dataclass(frozen=True)
class Source:
    """A corpus. Without files for validation, a hash of each record decides on its split."""

    description: str
    corpus: str  # 'files', 'cache', 'tfds', 'pydoc' or 'pydoc instead of C4'
    fingerprint: str  # a run may go on with a corpus of the same fingerprint only
    validation_fraction: float
    bad_lines: 'BadLines'
    train: 'Blocks | GzippedFiles'
    validation: 'Blocks | GzippedFiles | None' = None
    open_test: 'Callable[[], Blocks] | None' = None  # training needs no such files
    files: tuple[FileRecord, ...] = ()  # in the order in which they are read
    parser: 'LineParser | None' = None  # of data.files
    is_tokenized: bool = False  # the fields are ids, under the names of features
    vocabulary_hash: str | None = None  # of these ids, in a cache of this program

    def documents(
        self, split: str, share: Share, pool: int = 0, offset: int = 0
    ) -> Iterator[Document]:
        """Yield the documents of one lane in one epoch, from `offset` in pool number `pool` on."""
        part = self.part_of(split)
        keep = functools.partial(self.is_in_split, split)
        for number, records in part.pools(share, first=pool, keep=keep):
            order = permutation(len(records), 'pool', share.seed, share.epoch, share.lane, number)
            for i in range(offset, len(records)):
                record = records[order[i]]
                if record is not None:
                    yield Document(pool=number, offset=i, record=record)
            offset = 0

    def records(self, split: str, whole: bool = False) -> Iterator[Record]:
        """Yield the records of a split once, in the order in which they are stored.

        With `whole` those of a task cache have all features that are stored, not only ids.
        """
        part = self.part_of(split)
        if whole and isinstance(part, CachedRecords):
            part = part.whole()
        for record in part.in_order():
            if record is not None and self.is_in_split(split, record):
                yield record

    def num_lines_to_find(self, split: str, num_records: int) -> int:
        """Return about how many lines are read to find so many records of a split."""
        num_lines = self.train.num_records
        if num_lines is None:
            num_lines = sum(file.num_bytes for file in self.files) // BYTES_PER_LINE
        if self.validation is not None:
            return min(num_records, num_lines)
        share = self.validation_fraction if split == 'validation' else 1 - self.validation_fraction
        return min(math.ceil(num_records / share), num_lines)

    def next_epoch(self, split: str, share: Share) -> int:
        """Return the first epoch, from that of `share` on, in which its lane has a part.

        Where there is less to read than there are lanes, a lane has none in most epochs.
        """
        part = self.part_of(split)
        if isinstance(part, GzippedFiles) or share.slot < part.num_blocks:
            return share.epoch
        return share.epoch + share.num_lanes - share.slot

    def part_of(self, split: str) -> 'Blocks | GzippedFiles':
        """Return what holds the records of a split."""
        if split == 'test':
            return self.test
        if split == 'validation' and self.validation is not None:
            return self.validation
        return self.train

    @functools.cached_property
    def test(self) -> 'Blocks':
        """The records of the split test. Raises ValueError if there are none."""
        if self.open_test is None:
            raise ValueError(f'{self.description} have no split test: evaluate another split')
        return self.open_test()

    def is_in_split(self, split: str, record: Record) -> bool:
        """Return whether a record of the files of `split` is in it."""
        if self.validation is not None or split == 'test':
            return True
        if self.validation_fraction == 0:
            return split == 'train'
        if self.is_tokenized:
            record = ids_of(record)
        content = record.split_key.encode() or content_of(record)
        is_validation = zlib.crc32(content) < self.validation_fraction * 2**32
        return is_validation == (split == 'validation')

    def may_hold(self, split: str) -> bool:
        """Return False where the settings alone leave `split` without a document."""
        if split == 'test':
            return self.open_test is not None
        if self.part_of(split).num_records == 0:
            return False
        if self.validation is not None:
            return True
        if split == 'validation':
            return self.validation_fraction != 0
        return self.validation_fraction != 1

    def check_not_empty(self, split: str) -> None:
        """Raise ValueError if there is no document in the files that hold those of `split`."""
        part = self.part_of(split)
        for other in ('train', 'validation'):
            if self.part_of(other) is part and next(self.records(other), None) is not None:
                return
        files = [file.path for file in self.files if self.part_of(file.split) is part]
        if not files:  # the records of a split are in no file of their own
            return
        raise ValueError(
            f'no document is in {settings.first_ten(files)}: name files with lines of text, or with rows '
            'below the header'
        )

    def going_on(self, old: Sequence[FileRecord], step: int) -> 'Source | None':
        """Return the source cut as in a run whose files were `old` up to `step`.

        None unless it has files of the same number and names.
        """
        files = follow(old, self.files, step)
        if files is None:
            return None
        if not any(file.changes for file in files):
            return self
        if self.parser is None:
            return None
        parts = open_parts(files, self.parser)
        return dataclasses.replace(
            self,
            train=parts.get('train', self.train),
            validation=parts.get('validation'),
            files=tuple(files),
        )

    def faults(self) -> tuple[list[str], int]:
        """Return the lines left out since the last call, at most ten, and the number of all."""
        return self.bad_lines.take()

    def files_as_json(self) -> list[dict[str, Any]]:
        """Return `files` as `describe_changes` and JSON take them."""
        return [file._asdict() for file in self.files]


def ids_of(record: Record) -> Record:
    """Return a record of a task cache without its other features."""
    ids = {name: record.fields[name] for name in seqio_cache.FEATURES if name in record.fields}
    return Record(record.name, ids)


def content_of(record: Record) -> bytes:
    """Return the fields of a record as bytes."""
    return b''.join(map(bytes_of, record.fields.values()))


def bytes_of(value: Any) -> bytes:
    """Return a text, an array of ids, or another value of JSON or TFDS as bytes."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return json.dumps(value, default=repr).encode()


def open_source(config, whole_records: bool = False, test_split: str = '') -> Source:
    """Open the files of `config.files` (globs, comma-separated), else the prose of this Python.

    Before them come the task cache of `config.task` and the TFDS data set `config.tfds`. A record
    has the fields that the settings name; with `whole_records` all of them, as they are in JSON.
    `test_split`: as config.validation_split; '' is the split test, if there is one. Files are read in
    the order of their digests, so that names and folders change nothing. Raises ValueError for
    settings that do not fit together, for files that cannot be read and, unless bad lines are skipped,
    for empty files.
    """
    if not config.text_field:
        raise ValueError("data.text_field='' names no field: name one, C4's is 'text'")
    cache = find_cache(config, config.task)
    if cache is not None:
        return cached_source(config, cache)
    folders = find_tfds(config)
    if folders:
        return tfds_source_of(config, folders, whole_records, test_split)
    bad_lines = BadLines(config.on_bad_line, config.max_bad_fraction, config.kind)
    names = find_files('data.files', config.files, bad_lines)
    validation_names = find_files('data.validation_files', config.validation_files, bad_lines)
    if names or validation_names:
        return files_source(config, names, validation_names, bad_lines, whole_records)
    if config.kind:
        raise ValueError(
            f"data.kind={config.kind!r} is of files: name them with data.files, or set data.kind=''"
        )
    is_of_pydoc = config.task.startswith('pydoc_')
    if config.targets or (whole_records and not is_of_pydoc):
        raise ValueError(
            f'task {config.task!r} with inputs={config.inputs!r} and targets={config.targets!r} '
            'needs records: name its files or data set (data.files, data.tfds)'
        )
    return pydoc_source(config)


def files_source(
    config,
    names: list[str],
    validation_names: list[str],
    bad_lines: 'BadLines',
    whole_records: bool,
) -> Source:
    """Open files for training and files for validation; either may be none."""
    if not names and config.train_split != NO_SPLIT:
        raise ValueError(
            f'data.validation_files={config.validation_files!r} needs data.files besides: name both'
        )
    train = read_records('data.files', 'train', names)
    validation = read_records('data.validation_files', 'validation', validation_names)
    check_disjoint(train, validation)
    parser = LineParser(config, bad_lines, whole_records)
    check_files(names + validation_names, parser)
    num_bytes = sum(record.num_bytes for record in train or validation)
    parts = open_parts(train + validation, parser)
    files = [file for part in parts.values() for file in part.files]
    return Source(
        description=f'{len(train or validation):,} text file(s), {num_bytes:,} bytes',
        corpus='files',
        fingerprint=fingerprint_of_files(files, parser),
        validation_fraction=config.validation_fraction,
        bad_lines=bad_lines,
        train=parts.get('train', RecordsInMemory([])),
        validation=parts.get('validation'),
        files=tuple(files),
        parser=parser,
    )


def open_parts(files: list[FileRecord], parser: 'LineParser') -> 'dict[str, Blocks | GzippedFiles]':
    """Return {split: its part of a source}, without a split that has no files."""
    parts = {}
    for split in ('train', 'validation'):
        own = [file for file in files if file.split == split]
        if own:
            parts[split] = open_files(own, parser)
    return parts


def fingerprint_of_files(files: Sequence[FileRecord], parser: 'LineParser') -> str:
    """Return the fingerprint of a source of files."""
    content: list[Any] = sorted(file.content for file in files)
    train = [file for file in files if file.split == 'train']
    num_bytes = sum(file.num_bytes for file in train)
    is_plain = (
        train and not is_gzipped(train[0].path) and parser.kind_of(train[0].path) != 'parquet'
    )
    if is_plain and num_bytes <= MAX_SMALL_BYTES:
        content.append('blocks with lines')  # earlier versions read all blocks, in another order
    if parser.kind:
        content.append(f'kind {parser.kind}')
    return digest(content)


def find_cache(config, task: str) -> pathlib.Path | None:
    """Return the folder of the cache of a task, if it is to be read.

    Raises ValueError if there is none and `config.use_cached` is yes, and where no root is a folder.
    """
    if config.use_cached == 'no':
        return None
    roots = cache_roots(config)
    if roots and not any(root.is_dir() for root in roots):
        raise ValueError(
            f'data.cache_dirs={config.cache_dirs!r}: {roots[0]} is no folder: correct it, or make it '
            'with --mode=cache'
        )
    folder = seqio_cache.find(roots, task)
    if folder is None and config.use_cached == 'yes':
        raise ValueError(
            f'data.use_cached=yes, and data.cache_dirs={config.cache_dirs!r} holds no complete cache '
            f'of data.task={task!r}: name its root, or set data.use_cached=auto'
        )
    return folder


def cache_roots(config) -> list[pathlib.Path]:
    """Return the folders of data.cache_dirs."""
    names = split_names(config.cache_dirs)
    for name in names:
        if paths.is_in_bucket(name):
            raise ValueError(
                f'data.cache_dirs: {name!r} is in a bucket, and the examples of a cache are read one '
                'by one: copy it to a disk, and name the copy'
            )
    return [disk_path('data.cache_dirs', name) for name in names]


def cached_source(config, folder: pathlib.Path) -> Source:
    """Return the splits of a task cache as a source of ids."""
    bad_lines = BadLines(config.on_bad_line, config.max_bad_fraction)
    available = seqio_cache.splits(folder)
    splits = ['train'] if config.train_split != NO_SPLIT else []
    if 'validation' in available:
        splits.append('validation')
    parts = {}
    files = []
    for split in splits:
        split_files = files_of_cache(folder, split)
        parts[split] = open_cache(folder, split, split_files, bad_lines)
        files += split_files
    open_test = None
    if 'test' in available:
        test_files = files_of_cache(folder, 'test')
        open_test = functools.partial(open_cache, folder, 'test', test_files, bad_lines)
    num_records = next((part.num_records for part in parts.values()), 0)
    count = 'uncounted'  # without stats
    if num_records is not None:
        count = f'{num_records:,}'
    return Source(
        description=f'{count} cached examples of {folder}',
        corpus='cache',
        fingerprint=digest([file.content for file in files]),
        validation_fraction=validation_fraction_of(config),
        bad_lines=bad_lines,
        train=parts.get('train', RecordsInMemory([])),
        validation=parts.get('validation'),
        open_test=open_test,
        files=tuple(files),
        is_tokenized=True,
        vocabulary_hash=seqio_cache.vocabulary_hash(folder),
    )


def validation_fraction_of(config) -> float:
    """Return the fraction that is held out: none where the settings say what validation is."""
    return 0.0 if config.validation_split else config.validation_fraction


def files_of_cache(folder: pathlib.Path, split: str) -> list[FileRecord]:
    """Return the files of a split of a task cache that hold something."""
    opened = seqio_cache.open_split(folder, split)
    names = [str(file) for file in opened.files if file.stat().st_size]
    return read_records('data.cache_dirs', split, names)


def open_cache(
    folder: pathlib.Path, split: str, files: list[FileRecord], bad_lines: 'BadLines'
) -> 'CachedRecords':
    """Return a split of a task cache: from its ids, if they lie beside the records."""
    names = [file.path for file in files]
    reader: type[CachedRecords] = CachedRecords
    if all(os.path.exists(file) for name in names for file in seqio_cache.ids_files(name)):
        reader = CachedIds
    elif sum(file.num_bytes for file in files) > MAX_INDEXED_BYTES:
        reader = LargeCache
    return reader(seqio_cache.open_split(folder, split), names, bad_lines)


def find_tfds(config) -> list[pathlib.Path]:
    """Return the folders of the TFDS data sets `config.tfds`, none without it."""
    name = config.tfds
    files = config.files or config.validation_files
    if name and files:
        raise ValueError(
            f'data.tfds={name!r} and files, {files!r}, are two corpora: name one, and set data.tfds '
            "or data.files and data.validation_files to ''"
        )
    if name:
        return [prepared_data_set(config, each) for each in split_names(name)]
    if config.train_split not in ('train', NO_SPLIT) or config.validation_split not in (
        '',
        NO_SPLIT,
    ):
        raise ValueError(
            f'data.train_split={config.train_split!r}, '
            f'data.validation_split={config.validation_split!r}: splits are of a TFDS data set: name '
            "it with data.tfds, or set them to 'train' and ''"
        )
    return []


def prepared_data_set(config, name: str) -> pathlib.Path:
    """Return the folder of a TFDS data set."""
    try:
        return tfds_source.find(tfds_root(config), name)
    except ValueError as error:
        raise ValueError(f'data.tfds={name!r}: {error}') from None


def prepared_version(config, name: str) -> str | None:
    """Return a data set NAME:VERSION if it is prepared, NAME for another version, None without any.

    Of several, None unless all are there.
    """
    if ',' in name:
        found = [prepared_version(config, each) for each in split_names(name)]
        return None if None in found else ','.join(map(str, found))
    path, _, version = name.partition(':')
    folder = tfds_root(config) / path
    if version in tfds_source.versions_of(folder):
        return name
    return path if folder.is_dir() else None


def tfds_root(config) -> pathlib.Path:
    """Return the folder of TFDS data sets."""
    return disk_path('data.tfds_dir', config.tfds_dir or tfds_source.default_root())


def tfds_source_of(
    config, folders: list[pathlib.Path], whole_records: bool, test_split: str
) -> Source:
    """Return splits of TFDS data sets as a source of texts, or of whole records."""
    bad_lines = BadLines(config.on_bad_line, config.max_bad_fraction)
    data_sets = [tfds_source.DataSet(folder) for folder in folders]
    data_set = data_sets[0]
    fields = () if whole_records else fields_named(config)
    try:
        decode = data_set.decoder(fields)
    except ValueError as error:
        setting = 'data.inputs or data.targets' if config.targets else 'data.text_field'
        raise ValueError(f'{error}: correct {setting}') from None

    def open_split(split: str, expression: str) -> TfdsRecords:
        try:
            shards = tfds_source.open_all(data_sets, expression)
        except ValueError as error:
            raise ValueError(f'data.{split}_split={expression!r}: {error}') from None
        return TfdsRecords(shards, decode, fields, bad_lines)

    expressions = {
        'train': config.train_split,
        'validation': config.validation_split,
        'test': test_split,
    }
    splits = splits_of(data_set, expressions)
    open_test = None
    if 'test' in splits:
        open_test = functools.partial(open_split, 'test', splits.pop('test'))
    parts = {}
    files = []
    for split, expression in splits.items():
        parts[split] = open_split(split, expression)
        names = sorted({run.path for run in parts[split].shards.runs})
        files += read_records('data.tfds', split, names)
    if len(parts) == 2:
        check_runs_disjoint(splits, parts['train'].shards.runs, parts['validation'].shards.runs)
    counts = [f'{part.num_records:,} records ({splits[split]})' for split, part in parts.items()]
    names = [data_set.name for data_set in data_sets]
    return Source(
        description=(
            f'{(counts or ["records"])[0]} of the TFDS data set {", ".join(names)} in {folders[0]}'
        ),
        corpus='tfds',
        fingerprint=digest([splits, [file.content for file in files]]),
        validation_fraction=validation_fraction_of(config),
        bad_lines=bad_lines,
        train=parts.get('train', RecordsInMemory([])),
        validation=parts.get('validation'),
        open_test=open_test,
        files=tuple(files),
    )


def splits_of(data_set: tfds_source.DataSet, expressions: Mapping[str, str]) -> dict[str, str]:
    """Return {split: expression} of the splits that are read.

    '' stands for the split of that name, if there is one, and NO_SPLIT for none.
    """
    found = {}
    for split, expression in expressions.items():
        if expression == '' and data_set.num_records.get(split):
            found[split] = split
        elif expression not in ('', NO_SPLIT):
            found[split] = expression
    return found


def check_runs_disjoint(
    splits: Mapping[str, str], train: list[tfds_source.Run], validation: list[tfds_source.Run]
) -> None:
    """Raise ValueError if a record of a TFDS data set is in both splits."""
    runs_of_path = collections.defaultdict(list)
    for run in train:
        runs_of_path[run.path].append(run)
    for run in validation:
        for other in runs_of_path[run.path]:
            start = max(run.first, other.first)
            end = min(run.first + run.num_records, other.first + other.num_records)
            if start < end:
                raise ValueError(
                    f'data.train_split={splits["train"]!r} and '
                    f'data.validation_split={splits["validation"]!r} share {end - start:,} records '
                    f"of {run.path}: name disjoint splits, as 'train[:99%]' and 'train[99%:]'"
                )


def pydoc_source(config) -> Source:
    """Return this Python's documentation as a source.

    A record has a text and its two parts, 'summary' and 'rest'. Texts of one summary are in one
    split, so that no task sees the answers of its validation in training.
    """
    records = []
    for name, text in pydoc_documents():
        summary, _, rest = text.partition('\n')
        fields = {config.text_field: ' '.join(text.split()), 'summary': summary, 'rest': rest}
        words = re.findall(r'\w+', summary.lower())
        records.append(Record(name, fields, split_key=' '.join(words)))
    corpus = 'pydoc'
    if config.task.startswith('c4'):
        corpus = 'pydoc instead of C4'
    return in_memory(
        records,
        name="this Python's documentation",
        corpus=corpus,
        validation_fraction=config.validation_fraction,
    )


def in_memory(records: list[Record], name: str, corpus: str, validation_fraction: float) -> Source:
    """Return a source of `records`, which has no bad lines."""
    texts = [record.split_key.join(record.fields.values()) for record in records]
    return Source(
        description=f'{len(records):,} texts of {name}',
        corpus=corpus,
        fingerprint=digest(texts),
        validation_fraction=validation_fraction,
        bad_lines=BadLines('stop', max_fraction=0.0),
        train=RecordsInMemory(records),
    )


# What changed in the files of a run.


def describe_changes(old: list[dict] | None, new: list[dict]) -> str:
    """Describe in one line how the corpus of a run differs from today's, with the remedy.

    `old` and `new` are what `Source.files_as_json` returned then and returns now: empty for the
    documentation of Python. None: the run kept no list.
    """
    if old is None:
        return (
            'the corpus is another one, and the run kept no list of its files: name the files it '
            'began with, or another --workdir'
        )
    if not old and not new:
        return (
            "the run learned from another Python's documentation: use that Python, or name "
            'another --workdir'
        )
    if not old:
        return (
            "the run learned from this Python's documentation, not from files: set data.files='' and "
            "data.tfds='' (with data.tfds_dir=/nowhere if it holds C4), or name another --workdir"
        )
    old_files = [file_from_json(record) for record in old]
    new_files = [file_from_json(record) for record in new]
    missing = without(old_files, new_files)
    added = without(new_files, old_files)
    missing_names = {file.base_name for file in missing}
    added_names = {file.base_name for file in added}
    changed = []
    new_names = []
    for file in added:
        if file.base_name in missing_names:
            changed.append(f'{file.path} (changed)')
        else:
            new_names.append(f'{file.path} (new)')
    gone = []
    for file in missing:
        if file.base_name not in added_names:
            gone.append(f'{file.path} (missing)')
    if not missing and not added:
        return (
            'the files hold what they held, so tasks or rates of data.module changed, or an earlier '
            'version of this program read the files in another order: restore those, or name '
            'another --workdir'
        )
    changes = settings.first_ten(changed + gone + new_names)
    remedy = 'restore those files'
    if not gone and not new_names:
        remedy += ', go on with what they hold today (data.allow_changed_files=True)'
    return (
        f"the files do not hold what the run's held: {changes}: {remedy}, or name another --workdir"
    )


def without(files: list[FileRecord], others: list[FileRecord]) -> list[FileRecord]:
    """Return those of `files` whose content is not in `others`, counting equal content."""
    remaining = collections.Counter(file.content for file in others)
    only = []
    for file in files:
        if remaining[file.content]:
            remaining[file.content] -= 1
        else:
            only.append(file)
    return only


def follow(
    old: Sequence[FileRecord], new: Sequence[FileRecord], step: int
) -> list[FileRecord] | None:
    """Return the files of a run as they are today, in the order in which the run reads them.

    A file is found by its content, else by its path or base name: then it changed at `step`. None
    unless each of `old` is one of `new`.
    """
    found: dict[int, FileRecord] = {}
    remaining = list(new)
    for attribute in ('content', 'name', 'base_name'):
        waiting = collections.defaultdict(list)
        for file in remaining:
            waiting[getattr(file, attribute)].append(file)
        for i, file in enumerate(old):
            same = waiting[getattr(file, attribute)]
            if i not in found and same:
                found[i] = same.pop(0)
        remaining = list(itertools.chain.from_iterable(waiting.values()))
    if remaining or len(found) < len(old):
        return None
    followed = []
    for i, file in enumerate(old):
        changes = file.changes
        if found[i].content != file.content:
            if file.layout is None:  # the run began with an earlier version
                return None
            changes = [*changes, change_between(file, found[i], step)]
        followed.append(found[i]._replace(layout=file.layout, changes=changes))
    return followed


def change_between(old: FileRecord, new: FileRecord, step: int) -> FileChange:
    """Return where the text of a file changed, as far as `old.samples` tell."""
    shift = new.num_bytes - old.num_bytes
    samples = list(zip(sampled_ranges(old.num_bytes), old.samples, strict=bool(old.samples)))
    begin = 0
    end = old.num_bytes
    with paths.open_file(new.path) as file:
        for (start, length), sample in samples:
            if hash_at(file, start, length) != sample:
                break
            begin = start + length
        for (start, length), sample in reversed(samples):
            if start + shift < 0 or hash_at(file, start + shift, length) != sample:
                break
            end = start
        begin = start_of_line(file, begin) or 0
    end = max(end, begin, begin - shift)  # the two parts that are the same do not overlap
    before = (0, begin, end, old.num_bytes)
    return FileChange(step, before, after=(0, begin, end + shift, new.num_bytes))


def hash_at(file: IO[bytes], start: int, length: int) -> int:
    """Return a hash of a part of a file, as FileRecord.samples has it."""
    file.seek(start)
    return zlib.crc32(file.read(length))


def file_from_json(content: Mapping[str, Any]) -> FileRecord:
    """Return one of the files that `Source.files_as_json` returned."""
    file = FileRecord(**content)
    return file._replace(changes=[FileChange(*change) for change in file.changes])


# From the names that a user gives to files, ordered by their content.


def find_files(key: str, patterns: str, bad_lines: 'BadLines') -> list[str]:
    """Return the absolute paths that `patterns` names, sorted, without empty files."""
    if patterns == '':
        return []
    names = split_names(patterns)
    if not names:
        raise ValueError(f"{key}={patterns!r} names no file: name one, or set it to ''")
    found = set()
    for name in names:
        found.update(matching_files(key, name))
    empty = {path for path in found if paths.file_size(path) == 0}
    if found == empty:
        raise ValueError(f'{key}={patterns!r} matches empty files only: name files with text')
    for path in sorted(empty):
        bad_lines.add(path, 0, EMPTY_FILE)
    return sorted(found - empty)


def split_names(patterns: str) -> list[str]:
    """Return the names between the commas; the name of an existing file may hold a comma itself."""
    if os.path.isfile(patterns):
        return [patterns]
    names = [name.strip() for name in patterns.split(',')]
    return [name for name in names if name]


def matching_files(key: str, name: str) -> list[str]:
    """Return the names of the files that `name` stands for; errors name the setting `key`."""
    try:
        return paths.matching_files(name)
    except ValueError as error:
        raise ValueError(f'{key}: {error}') from error


def disk_path(key: str, name: str) -> pathlib.Path:
    """Return the absolute path on a disk; errors name the setting `key`."""
    try:
        return paths.disk_path(name)
    except ValueError as error:
        raise ValueError(f'{key}: {error}') from error


def read_records(key: str, split: str, names: list[str]) -> list[FileRecord]:
    """Return the records of files, in the order in which the files are read."""
    read = functools.partial(read_file_record, key, split)
    with concurrent.futures.ThreadPoolExecutor(max_workers=NUM_THREADS) as threads:
        records = list(threads.map(read, names))
    return sorted(records, key=lambda record: (record.num_bytes, record.digest))


def read_file_record(key: str, split: str, path: str) -> FileRecord:
    """Return the record of one file."""
    try:
        if not paths.is_in_bucket(path):
            paths.check_not_lfs(pathlib.Path(path))
        num_bytes = paths.file_size(path)
        content, samples = content_digest(path, num_bytes)
        return FileRecord(split, path, num_bytes, digest=content, samples=samples)
    except (ValueError, paths.ReadError) as error:
        raise ValueError(f'{key}: {error}') from error
    except OSError as error:
        if error.strerror is None:  # `paths` says what is wrong
            raise ValueError(f'{key}: {error}') from error
        raise ValueError(
            f'{key}: {path} cannot be read ({error.strerror}): correct its permissions, or '
            'leave it out'
        ) from error


def content_digest(path: str, num_bytes: int) -> tuple[str, tuple[int, ...]]:
    """Return a hash of a file's kind (text or JSON Lines), size and content, and FileRecord.samples.

    Of a file above 1 MiB, sixteen evenly spaced blocks of 4 KiB count, the first and the last among
    them, so that terabytes open in seconds. A change of the same size between these blocks goes
    unnoticed, except in a gzipped file, whose last bytes are a checksum of all.

    Of a file in a bucket the checksum counts that the bucket keeps of it, and there are no samples:
    16,000 reads of 1,024 files take a minute. So a run that began in a bucket goes on there, and not
    on a disk. (S3's checksum also depends on the parts in which the file was uploaded.)
    """
    content = hashlib.blake2b(
        f'{KIND_IN_DIGEST[kind_of(path)]} {num_bytes}'.encode(), digest_size=16
    )
    checksum = paths.stored_checksum(path)
    if checksum is not None:
        content.update(checksum.encode())
        return content.hexdigest(), ()
    samples = []
    with paths.open_file(path) as file:
        for start, length in sampled_ranges(num_bytes):
            file.seek(start)
            part = file.read(length)
            content.update(part)
            samples.append(zlib.crc32(part))
    return content.hexdigest(), tuple(samples)


def sampled_ranges(num_bytes: int) -> list[tuple[int, int]]:
    """Return (start, length) of sixteen parts of a file: all of a small one, blocks of others."""
    if num_bytes <= MAX_BYTES_DIGESTED_WHOLE:
        bounds = [i * num_bytes // DIGEST_BLOCKS for i in range(DIGEST_BLOCKS + 1)]
        return [(start, end - start) for start, end in itertools.pairwise(bounds)]
    last = num_bytes - DIGEST_BLOCK_BYTES
    starts = [i * last // (DIGEST_BLOCKS - 1) for i in range(DIGEST_BLOCKS)]
    return [(start, DIGEST_BLOCK_BYTES) for start in starts]


def check_disjoint(train: list[FileRecord], validation: list[FileRecord]) -> None:
    """Raise ValueError if a file, under any name, or a copy of it is in both splits."""
    in_train: dict[tuple, FileRecord] = {}
    for file in train:
        in_train[identity(file)] = file
        in_train[file.num_bytes, file.digest] = file
    for file in validation:
        same = in_train.get(identity(file)) or in_train.get((file.num_bytes, file.digest))
        if same:
            raise ValueError(
                f'{same.path} of data.files and {file.path} of data.validation_files hold the '
                'same: a file is for one split: leave one of them out'
            )


def identity(file: FileRecord) -> tuple:
    """Return what all names and links of a file share."""
    if paths.is_in_bucket(file.path):
        return 'url', file.path
    stat = os.stat(file.path)
    return 'inode', stat.st_dev, stat.st_ino


# What files hold, whatever their names say.


def check_files(names: list[str], parser: 'LineParser') -> None:
    """Raise ValueError for a file that is not of its kind or has not the fields that are named."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=NUM_THREADS) as threads:
        for _ in threads.map(functools.partial(check_file, parser), names):
            pass


def check_file(parser: 'LineParser', path: str) -> None:
    """Raise ValueError as `check_files` does. Warn of JSON Lines that are read as plain text."""
    kind = parser.kind_of(path)
    head = read_head(path)
    check_head(path, kind, head)
    if kind == 'text':
        parser.check_text(path)
        if begins_with_json(head):
            logging.warning(
                '%s is read as plain text, but its lines are JSON objects: rename it to .jsonl, or '
                "set data.kind='jsonl', to read a field of them",
                path,
            )
    elif kind in ('csv', 'tsv') and head:
        parser.check_columns(path, table_header(path, kind))


def read_head(path: str) -> bytes:
    """Return the first bytes of a file, unzipped; of broken gzip those before the damage."""
    head = b''
    try:
        with open_unzipped(path) as file:
            while len(head) < HEAD_BYTES:
                part = file.read1(HEAD_BYTES - len(head))
                if not part:
                    break
                head += part
    except (EOFError, zlib.error):
        pass
    except gzip.BadGzipFile:
        if not head:
            raise ValueError(
                f'{path} is not gzipped, and its name ends in .gz: remove .gz from the name, or copy the '
                'file again'
            ) from None
    except PermissionError as error:
        raise ValueError(
            f'{path} cannot be read ({error.strerror}): correct its permissions'
        ) from error
    return head


def check_head(title: str, kind: str, head: bytes) -> None:
    """Raise ValueError if a file that begins with `head` is not read as what it is."""
    for start, (what, remedy) in FORMATS.items():
        if head.startswith(start) and not (kind == 'parquet' and start == PARQUET):
            raise ValueError(f'{title} is {what}, not {kind}: {remedy}')
    if kind == 'parquet':
        return
    if head.count(b'\0') > len(head) / 4:
        raise ValueError(
            f'{title} holds zero bytes, as UTF-16 and binary files do: text must be UTF-8: convert it'
        )
    if b'\r' in head.strip() and b'\n' not in head:
        raise ValueError(
            f'{title} has line ends of old Macs (CR): lines end with LF or CR LF: convert it, as `tr '
            "'\\r' '\\n'` does"
        )
    if kind == 'jsonl' and re.match(rb'(\xef\xbb\xbf)?\s*(\[\s*\{|[\[{][ \t\r]*\n)', head):
        raise ValueError(
            f'{title} is JSON over many lines or in a list: a record is one object on one line: write '
            'it again, as `jq -c .` does, or `jq -c .[]` of a list'
        )


def begins_with_json(head: bytes) -> bool:
    """Return whether the first lines that are not blank, twenty at most, are JSON objects."""
    lines = head.splitlines(keepends=True)
    if len(head) == HEAD_BYTES:
        lines = lines[:-1]  # the last one is cut
    lines = [line for line in lines if line.strip()][:20]
    for line in lines:
        try:
            if not isinstance(json.loads(line), dict):
                return False
        except (ValueError, RecursionError):
            return False
    return bool(lines)


@contextlib.contextmanager
def open_unzipped(path: str, read_ahead: int = MAX_BLOCK_BYTES) -> Iterator[Any]:
    """Open a file for reading, its content if it is gzipped."""
    with paths.open_file(path, read_ahead) as file:
        if is_gzipped(path):
            with gzip.open(file) as unzipped:
                yield unzipped
        else:
            yield file


def is_gzipped(path: str) -> bool:
    return path.lower().endswith('.gz')


@functools.lru_cache(maxsize=100_000)  # it is asked for every line
def kind_of(path: str) -> str:
    """Return 'jsonl', 'csv', 'tsv', 'parquet' or 'text': how a file is read, by its name."""
    suffix = os.path.splitext(path.lower().removesuffix('.gz'))[1]
    return KIND_OF_SUFFIX.get(suffix, 'text')


def open_files(files: list[FileRecord], parser: 'LineParser') -> 'Blocks | GzippedFiles':
    """Return the files as a part of a source. Each line or row is a record."""
    names = [file.path for file in files]
    parquet = [name for name in names if parser.kind_of(name) == 'parquet']
    if parquet:
        for name in parquet:
            if is_gzipped(name):
                raise ValueError(
                    f'{name} is gzipped, and the columns in a Parquet file are compressed one by '
                    'one: gunzip it'
                )
        others = [name for name in names if parser.kind_of(name) != 'parquet']
        if others:
            raise ValueError(
                f'{parquet[0]} is Parquet, {others[0]} is not: name files of one of the two'
            )
        return ParquetFiles(files, parser)
    gzipped = [name for name in names if is_gzipped(name)]
    plain = [name for name in names if not is_gzipped(name)]
    if gzipped and plain:
        raise ValueError(f'{gzipped[0]} is gzipped, {plain[0]} is not: gzip all files, or none')
    if gzipped:
        return GzippedFiles(files, parser)
    return PlainFiles(files, parser)


# Lines.


class LineParser:
    """Makes a record of a line: some fields of a JSON object or of a row of a table, or the line.

    A record without templates has one field, `config.text_field`; with `whole_records` it has all,
    which a task's function reads.
    """

    def __init__(self, config, bad_lines: 'BadLines', whole_records: bool = False):
        self.kind = config.kind
        self.text_field = config.text_field
        self.templates = templates_of(config)
        self.bad_lines = bad_lines
        self.whole_records = whole_records
        self.fields = () if whole_records else fields_named(config)

    def kind_of(self, path: str) -> str:
        """Return how a file is read: as data.kind, or by its name if that is ''."""
        return self.kind or kind_of(path)

    def __call__(self, path: str, position: int, line: bytes) -> Record | None:
        """Return the record of a line; None for a blank line and for a bad one that is skipped.

        `position` is the offset of the line in bytes, in a gzipped file the number of the line.
        """
        self.bad_lines.num_read += 1
        try:
            is_first = position < 2 and position == first_position(path)
            fields = self.fields_of(
                path, is_first, line.decode('utf-8-sig' if is_first else 'utf-8')
            )
        except UnicodeDecodeError as error:
            reason = f'byte {error.start + 1} is not UTF-8; convert the file'
            self.bad_lines.add(path, position, reason)
            return None
        except ValueError as error:
            self.bad_lines.add(path, position, str(error))
            return None
        return record_of(path, position, fields)

    def parse_row(self, path: str, number: int, values: dict[str, Any]) -> Record | None:
        """Return the record of row `number` of a Parquet file, as for a JSON object."""
        self.bad_lines.num_read += 1
        try:
            for field, value in values.items():
                if isinstance(value, bytes):
                    values[field] = utf8_text(field, value)
            fields = values
            if not self.whole_records:
                fields = {field: self.json_text(values, field) for field in self.fields}
        except ValueError as error:
            self.bad_lines.add(path, number, str(error))
            return None
        return record_of(path, number, fields)

    def fields_of(self, path: str, is_first: bool, line: str) -> dict[str, Any] | None:
        """Return the fields of a line; None for a blank line and for the header of a table."""
        kind = self.kind_of(path)
        if not line.strip():
            return None
        if kind == 'jsonl':
            content = json_object(line.strip(), self.text_field)
            if self.whole_records:
                return content
            return {field: self.json_text(content, field) for field in self.fields}
        if kind == 'text':
            return {self.text_field: line.strip()}
        if is_first:
            return None
        columns = fields_of_row(line, kind, table_header(path, kind))
        return {field: columns[field] for field in self.fields or columns}

    def check_text(self, path: str) -> None:
        """Raise ValueError if the settings name fields that a line of text has not."""
        for field in self.fields:
            if field != self.text_field:
                raise no_field_of_text(
                    path,
                    field,
                    self.text_field,
                    kind=self.kind,
                    remedy='correct data.inputs and data.targets',
                )

    def check_columns(self, path: str, columns: Collection[str]) -> None:
        """Raise ValueError for a table without a column that the settings name."""
        setting = 'data.inputs or data.targets' if self.templates else 'data.text_field'
        check_columns(path, columns, self.fields, remedy=f'correct {setting}')

    def json_text(self, content: dict, field: str) -> str:
        """Return a field of a JSON object as text."""
        if not self.templates:
            return json_string(content, field, remedy='set data.text_field').strip()
        if isinstance(content.get(field), int | float):  # as JSON writes it
            return json.dumps(content[field])
        return json_string(content, field, remedy='correct data.inputs and data.targets').strip()


def no_field_of_text(title: str, field: str, text_field: str, kind: str, remedy: str) -> ValueError:
    """Return the error that a template names a field that a line of text has not."""
    reason = f'data.kind={kind!r}' if kind else 'neither its name nor data.kind says otherwise'
    return ValueError(
        f'{title} is read as lines of text ({reason}), and a template names the field {field!r}: a line '
        f"of text has the field {text_field!r} alone: set data.kind to what the file is ('csv', 'tsv', "
        f"'jsonl' or 'parquet'), or {remedy}"
    )


def record_of(path: str, position: int, fields: dict[str, str] | None) -> Record | None:
    """Return a record; None if it has no text."""
    if fields is None or not any(fields.values()):
        return None
    return Record(name=f'{path}:{position}', fields=fields)


def utf8_text(field: str, value: bytes) -> str:
    """Return the text of a field. Raises ValueError if it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f'byte {error.start + 1} of field {field!r} is not UTF-8; write the file again'
        ) from None


def json_object(line: str, field: str) -> dict:
    """Return the JSON object on a line. Raises ValueError for what is wrong with it."""
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f'no JSON: {error.msg} at character {error.pos + 1}; correct it') from None
    except RecursionError:
        raise ValueError('JSON that is nested too deeply; correct it') from None
    if not isinstance(content, dict):
        raise ValueError(f'{line!r:.40} is no JSON object; write {{"{field}": ...}}')
    return content


def json_string(content: dict, field: str, remedy: str) -> str:
    """Return a field that is a string. Raises ValueError for any other."""
    if field not in content:
        names = ', '.join(repr(name) for name in list(content)[:10]) or 'none'
        raise ValueError(f'no field {field!r}, its fields are: {names}; {remedy}')
    text = content[field]
    if not isinstance(text, str):
        raise ValueError(f'field {field!r} is {text!r:.40}, no string; {remedy}')
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can write half a surrogate pair, as \ud800
        raise ValueError(f'field {field!r} holds half a surrogate pair; correct it') from None
    return text


# Templates: texts with slots for the fields of a record.


class Template:
    """A text such as 'question: {question}'; '{{' and '}}' are braces."""

    def __init__(self, key: str, text: str):
        self.parts: list[tuple[str, str | None]] = []  # a literal, and the field after it
        try:
            for literal, field, spec, conversion in string.Formatter().parse(text):
                if field == '' or spec or conversion:
                    raise ValueError('a slot is {FIELD} and nothing else')
                self.parts.append((literal, field))
        except ValueError as error:
            raise ValueError(f'{key}={text!r}: {error}; write {{{{ for a brace') from None
        self.fields = [field for _, field in self.parts if field is not None]

    def fill(self, fields: Mapping[str, str]) -> str:
        """Return the text with the fields of a record in its slots."""
        texts = []
        for literal, field in self.parts:
            texts.append(literal)
            if field is not None:
                texts.append(fields[field])
        return ''.join(texts)


def templates_of(config) -> dict[str, Template]:
    """Return {feature: template} of `data.inputs` and `data.targets`; none if both are ''."""
    if not config.targets:
        if config.inputs:
            raise ValueError(f'data.inputs={config.inputs!r} needs data.targets: name both')
        return {}
    templates = {
        'inputs': Template('data.inputs', config.inputs),
        'targets': Template('data.targets', config.targets),
    }
    if not templates['targets'].fields:
        raise ValueError(
            f'data.targets={config.targets!r} names no field, so all targets are the same: write '
            "one as '{answer}'"
        )
    return templates


def fields_named(config) -> tuple[str, ...]:
    """Return the fields of a record that the settings name."""
    templates = templates_of(config)
    if not templates:
        return (config.text_field,)
    found = [field for template in templates.values() for field in template.fields]
    return tuple(dict.fromkeys(found))


# Tables: CSV and TSV, whose first row names the columns.


@functools.lru_cache(maxsize=100_000)
def table_header(path: str, kind: str) -> list[str]:
    """Return the names of the columns of a table."""
    with open_unzipped(path) as file:
        for _, line in whole_rows(numbered_lines(file), kind):
            try:
                return header_of(line.decode('utf-8-sig'), kind, title=path)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f'line 1 of {path}: byte {error.start + 1} is not UTF-8: convert the file'
                ) from None
    return []


def header_of(line: str, kind: str, title: str) -> list[str]:
    """Return the names of the columns in the first line of a table; those without a name are ''."""
    try:
        names = table_row(line, kind)
    except ValueError as error:
        raise ValueError(f'line 1 of {title}: {error}') from None
    if not any(names):
        raise ValueError(
            f'line 1 of {title} is empty: the first row names the columns: write their names there'
        )
    check_names(names, f'line 1 of {title}')
    return names


def check_names(names: list[str], title: str) -> None:
    """Raise ValueError if two columns have the same name; a template cannot name those of ''."""
    counts = collections.Counter(filter(None, names))
    repeated = [repr(name) for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            f'{title} has more than one column {settings.first_ten(repeated)}: each name stands for one '
            'column: rename or remove the others'
        )


def check_columns(title: str, columns: Collection[str], fields: Iterable[str], remedy: str) -> None:
    """Raise ValueError for a table that has not all of `fields`."""
    for field in fields:
        if field not in columns:
            found = settings.first_ten([repr(column) for column in columns])
            if len(columns) == 1 and any(mark in found for mark in (';', '|', ',', r'\t')):
                remedy += ", or separate the columns by commas (data.kind='csv') or tabs ('tsv')"
            raise ValueError(f'{title} has no column {field!r}, it has {found}: {remedy}')


def table_row(line: str, kind: str) -> list[str]:
    """Return the columns of a row. In CSV a field may be quoted, in TSV a quote is a character."""
    row = line.removesuffix('\n').removesuffix('\r')
    if kind == 'tsv':
        columns = row.split('\t')
    else:
        try:
            rows = list(
                csv.reader(io.StringIO(row, newline=''), skipinitialspace=True, strict=True)
            )
        except csv.Error as error:
            raise ValueError(f'no CSV: {error}; correct the quotes') from None
        if len(rows) > 1:
            raise ValueError(
                'no CSV: a field that is not quoted holds a quote or a carriage return (CR); quote the '
                'field, and double the quotes in it'
            )
        columns = rows[0] if rows else ['']
    return [column.strip() for column in columns]


def fields_of_row(line: str, kind: str, header: list[str]) -> dict[str, str]:
    """Return the columns of a row by name."""
    row = table_row(line, kind)
    if len(row) != len(header):
        raise ValueError(f'{len(row)} columns, and the header has {len(header)}; correct the row')
    return dict(zip(header, row, strict=True))


def first_position(path: str) -> int:
    """Return the position of the first line: an offset, in a gzipped file a number."""
    return 1 if is_gzipped(path) else 0


def numbered_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of the lines of a file, the first being 1."""
    return enumerate(iter(file.readline, b''), start=1)


def whole_rows(lines: Iterable[tuple[int, bytes]], kind: str) -> Iterator[tuple[int, bytes]]:
    """Yield (position, row): in CSV, lines are joined where a quoted field holds a newline.

    A row of more than MAX_ROW_BYTES ends there: one of its quotes is not closed.
    """
    if kind != 'csv':
        yield from lines
        return
    row: list[bytes] = []
    num_bytes = 0
    in_quotes = False
    for position, line in lines:
        if not row:
            first = position
            num_bytes = 0
        row.append(line)
        num_bytes += len(line)
        in_quotes ^= line.count(b'"') % 2 == 1
        if not in_quotes or num_bytes > MAX_ROW_BYTES:
            yield first, b''.join(row)
            row = []
            in_quotes = False
    if row:
        yield first, b''.join(row)


class BadLines:
    """The lines that cannot be read.

    With action 'stop' the first one raises. With 'skip' they are left out and each is counted once,
    as long as they are few. Threads may share it.
    """

    def __init__(self, action: str, max_fraction: float, kind: str = ''):
        self.action = action
        self.max_fraction = max_fraction
        self.kind = kind  # of the files; '' for by their names
        self.num_read = 0  # lines, roughly: two threads may lose one
        self._found: set[tuple[str, int]] = set()
        self._unreported: collections.deque[BadLine] = collections.deque(maxlen=10)
        self._lock = threading.Lock()

    def add(self, path: str, position: int, reason: str) -> None:
        """Count a line. Raises ValueError where that stops the run.

        `position` is the offset of the line in bytes, in a gzipped file the number of the line.
        """
        line = BadLine(path, position, reason, self.kind or kind_of(path))
        if self.action == 'stop':
            raise ValueError(
                f'data.on_bad_line=stop (skip leaves it out): {line.describe()}; to go on '
                'after a correction, a run needs data.allow_changed_files=True'
            )
        with self._lock:
            if (path, position) in self._found:
                return
            self._found.add((path, position))
            self._unreported.append(line)
            bound = max(10, self.max_fraction * self.num_read)
            if len(self._found) > bound:
                raise ValueError(
                    f'{len(self._found):,} bad lines among the {self.num_read:,} read, more than '
                    f'{bound:,.0f} (data.max_bad_fraction={self.max_fraction}, or 10): correct the '
                    f'files; the last is {line.describe()}'
                )

    def take(self) -> tuple[list[str], int]:
        """Return the lines since the last call, at most ten, described, and the number of all."""
        with self._lock:
            unreported = list(self._unreported)
            num_found = len(self._found)
            self._unreported.clear()
        return [line.describe() for line in unreported], num_found


class BadLine(NamedTuple):
    path: str
    position: int  # offset in bytes, in a gzipped file the number of the line, in Parquet the row
    reason: str
    kind: str  # of the file

    def describe(self) -> str:
        """Return one line of text. To number the line, a plain file is read up to there."""
        if self.reason.startswith(self.path):  # what read the record names it
            return self.reason
        if '.array_record-' in self.path or '.ids-' in self.path:
            return f'record {self.position} of {self.path}: {self.reason}'
        if '.tfrecord-' in self.path:
            return f'the record at byte {self.position} of {self.path}: {self.reason}'
        if self.kind == 'parquet':
            return f'row {max(self.position, 1)} of {self.path}: {self.reason}'
        number = max(self.position, 1)  # an empty file has no line
        if not is_gzipped(self.path):
            number = 1 + count_newlines(self.path, self.position)
        return f'line {number} of {self.path}: {self.reason}'


def count_newlines(path: str, num_bytes: int) -> int:
    """Return how many newlines are in the first bytes of a file."""
    count = 0
    with paths.open_file(path, SEQUENTIAL_READ_AHEAD) as file:
        while file.tell() < num_bytes:
            chunk = file.read(min(1 << 20, num_bytes - file.tell()))
            count += chunk.count(b'\n')
            if not chunk:
                break
    return count


# Records that can be read in any order.


class Blocks:
    """Records in `num_blocks` blocks, each of which `read` returns.

    An epoch permutes the blocks and deals them out to the lanes. A lane reads pools of
    BLOCKS_PER_POOL blocks.
    """

    num_blocks: int
    num_records: int | None = None  # where it is known without reading all of them
    files: Sequence[FileRecord] = ()  # of data.files

    def read(self, block: int) -> list[Record | None]:
        """Return the records of a block; None for a line that holds none."""
        raise NotImplementedError

    def count_records(self) -> int | None:
        """Return the number of records, None where counting would take reading all of them."""
        return self.num_records

    def in_order(self) -> Iterator[Record | None]:
        """Yield the records of all blocks."""
        for block in range(self.num_blocks):
            yield from self.read(block)

    def read_all(self, blocks: list[int]) -> Iterable[list[Record | None]]:
        """Return the records of each of the blocks of a pool."""
        return map(self.read, blocks)

    def order(self, seed: int | str, epoch: int) -> np.ndarray:
        """Return the random order of all blocks in an epoch."""
        return epoch_order(self.num_blocks, seed, epoch)

    def is_changed(self, block: int, step: int) -> bool:
        """Return whether the text of a block is another one from `step` on."""
        raise NotImplementedError

    def are_changed(self, share: Share, first: int, last: int, step: int) -> bool:
        """Return whether a pool of a lane, from number `first` to `last`, changed at `step`."""
        blocks = self.order(share.seed, share.epoch)[share.slot :: share.num_lanes]
        own = blocks[first * BLOCKS_PER_POOL : (last + 1) * BLOCKS_PER_POOL]
        return any(self.is_changed(block, step) for block in own.tolist())

    def pools(
        self, share: Share, first: int, keep: Callable[[Record], bool]
    ) -> Iterator[tuple[int, list[Record | None]]]:
        """Yield (number, records) of the pools of a lane, from number `first` on.

        None stands for a line without a record and for a record that `keep` refuses, so that an
        offset in a pool means the same line in every split.
        """
        order = self.order(share.seed, share.epoch)
        blocks = order[share.slot :: share.num_lanes].tolist()
        for start in range(first * BLOCKS_PER_POOL, len(blocks), BLOCKS_PER_POOL):
            records: list[Record | None] = []
            for found in self.read_all(blocks[start : start + BLOCKS_PER_POOL]):
                records += blank_out(found, keep)
            yield start // BLOCKS_PER_POOL, records


def blank_out(
    records: Iterable[Record | None], keep: Callable[[Record], bool]
) -> Iterator[Record | None]:
    """Yield the records, and None in place of those that `keep` refuses."""
    for record in records:
        if record is not None and keep(record):
            yield record
        else:
            yield None


class RecordsInMemory(Blocks):
    """Each record is a block."""

    def __init__(self, records: list[Record]):
        self.records = records
        self.num_blocks = len(records)
        self.num_records = len(records)

    def read(self, block: int) -> list[Record | None]:
        return [self.records[block]]


class CachedRecords(Blocks):
    """Examples of a task cache. Their fields are ids, the other features are not read.

    A block has one example.
    """

    def __init__(
        self,
        split: seqio_cache.Split,
        names: list[str],
        bad_lines: BadLines,
        features: Collection[str] = seqio_cache.FEATURES,
    ):
        found = {name: split.features[name] for name in features if name in split.features}
        self.whole_split = split
        self.split = split._replace(features=found)
        self.names = names
        self.bad_lines = bad_lines
        self.open_blocks()

    def open_blocks(self) -> None:
        """Find where each example begins."""
        self.offsets = [seqio_cache.record_offsets(name) for name in self.names]
        sizes = [len(offsets) for offsets in self.offsets]
        self.first_records = [0, *itertools.accumulate(sizes)]  # [files + 1]
        self.num_blocks = self.first_records[-1]
        self.num_records = self.num_blocks

    def read(self, block: int) -> list[Record | None]:
        file_index = bisect.bisect(self.first_records, block) - 1
        name = self.names[file_index]
        offset = int(self.offsets[file_index][block - self.first_records[file_index]])
        self.bad_lines.num_read += 1
        try:
            fields = seqio_cache.read_example(name, offset, self.split)
        except ValueError as error:
            self.bad_lines.add(name, offset, str(error))
            return [None]
        return [Record(f'{name}:{offset}', fields)]

    def whole(self) -> 'CachedRecords':
        """Return the same examples with all their features."""
        reader = LargeCache if isinstance(self, LargeCache) else CachedRecords
        return reader(self.whole_split, self.names, self.bad_lines, self.whole_split.features)


class CachedIds(CachedRecords):
    """A task cache of this program, from its files of ids.

    A block has one example, or a few where they are many.
    """

    def open_blocks(self) -> None:
        self.shards = [seqio_cache.open_ids(name) for name in self.names]
        sizes = [len(shard.entries) for shard in self.shards]
        self.first_records = [0, *itertools.accumulate(sizes)]  # [files + 1]
        self.num_records: int = self.first_records[-1]
        self.records_per_block = max(-(-self.num_records // MAX_CACHE_BLOCKS), 1)
        self.num_blocks = -(-self.num_records // self.records_per_block)

    def read(self, block: int) -> list[Record | None]:
        first = block * self.records_per_block
        last = min(first + self.records_per_block, self.num_records)
        return [self.read_example(i) for i in range(first, last)]

    def read_example(self, number: int) -> Record | None:
        """Return an example; None for a bad one that is skipped."""
        file_index = bisect.bisect(self.first_records, number) - 1
        i = number - self.first_records[file_index]
        shard = self.shards[file_index]
        self.bad_lines.num_read += 1
        try:
            return Record(f'{shard.path}:{i}', seqio_cache.read_ids(shard, i))
        except ValueError as error:
            self.bad_lines.add(shard.path, i, str(error))
            return None


class LargeCache(CachedRecords):
    """A task cache with too many examples to find all of them when it is opened.

    A block has the examples that begin in a range of bytes.
    """

    def open_blocks(self) -> None:
        self.num_records = self.split.num_examples
        self.sizes = [os.path.getsize(name) for name in self.names]
        blocks_per_file = [-(-size // MAX_BLOCK_BYTES) for size in self.sizes]
        self.first_blocks = [0, *itertools.accumulate(blocks_per_file)]  # [files + 1]
        self.num_blocks = self.first_blocks[-1]

    def read(self, block: int) -> list[Record | None]:
        file_index = bisect.bisect(self.first_blocks, block) - 1
        size = self.sizes[file_index]
        start = (block - self.first_blocks[file_index]) * MAX_BLOCK_BYTES
        stored = seqio_cache.records_in_range(
            self.names[file_index],
            start=start,
            end=min(start + MAX_BLOCK_BYTES, size),
            first=0,
            last=size,
        )
        return [self.parse(record) for record in stored]

    def parse(self, stored: seqio_cache.StoredRecord) -> Record | None:
        """Return a stored example; None for a bad one that is skipped."""
        self.bad_lines.num_read += 1
        try:
            if stored.fault:
                raise ValueError(stored.fault)
            fields = seqio_cache.decode(stored.content, self.split)
        except ValueError as error:
            self.bad_lines.add(stored.path, stored.position, str(error))
            return None
        return Record(f'{stored.path}:{stored.position}', fields)


class ParquetFiles(Blocks):
    """Rows of Parquet files. A block is a run of rows of one row group.

    A row group is decoded whole. So that lanes share what is decoded, an epoch goes through windows
    of some row groups, in a random order, and permutes the blocks of a window.
    """

    def __init__(self, files: list[FileRecord], parser: LineParser):
        self.parser = parser
        self.bad_lines = parser.bad_lines
        self.fields = parser.fields or parquet_source.columns_that_are_read(files[0].path)
        self.files = []
        self.groups: list[parquet_source.RowGroup] = []
        for file, groups in zip(files, self.read_row_groups(files), strict=True):
            layout = [(group.num_rows, group.num_bytes) for group in groups]
            if file.layout is not None and len(file.layout) != len(layout):
                raise ValueError(
                    f'{file.path} has {len(layout)} row groups and had {len(file.layout)} when the '
                    'run began: write it again with as many (row_group_size of pandas and pyarrow)'
                )
            self.files.append(file._replace(layout=file.layout or layout))
            self.groups += groups
        self.row_groups = parquet_source.RowGroups(self.fields)
        sizes = [size for file in self.files for size in file.layout]
        num_rows, self.num_bytes = np.array(sizes, np.int64).reshape(-1, 2).T
        self.num_records = int(num_rows.sum())
        bytes_per_row = self.num_bytes.sum() / max(num_rows.sum(), 1)
        rows_per_block = min(num_rows.sum() // MIN_BLOCKS, MAX_BLOCK_BYTES // max(bytes_per_row, 1))
        self.rows_per_block = max(int(rows_per_block), 1)
        self.blocks_per_group = -(-num_rows // self.rows_per_block)
        self.first_blocks = np.cumsum([0, *self.blocks_per_group])  # [groups + 1]
        self.num_blocks = int(self.first_blocks[-1])
        self.order_in_windows = functools.lru_cache(maxsize=4)(self._order_in_windows)

    def read_row_groups(self, files: list[FileRecord]) -> list[list[parquet_source.RowGroup]]:
        """Return the row groups of each file."""
        with concurrent.futures.ThreadPoolExecutor(max_workers=NUM_THREADS) as threads:
            return list(threads.map(self.row_groups_of_file, [file.path for file in files]))

    def row_groups_of_file(self, name: str) -> list[parquet_source.RowGroup]:
        """Return the row groups of a file; none of a bad one that is skipped."""
        try:
            footer = parquet_source.read_footer(name, self.fields)
        except parquet_source.DamagedFile as error:
            self.bad_lines.add(name, 0, str(error))
            return []
        check_names(footer.names, name)
        self.parser.check_columns(name, footer.columns)
        for field in self.parser.fields:
            kind = footer.columns[field]
            if kind == 'number' and not self.parser.templates:
                raise ValueError(f'{name}: column {field!r} has numbers: correct data.text_field')
            if kind not in ('text', 'number'):
                raise ValueError(
                    f'{name}: column {field!r} is {kind}, and only texts and numbers are read: '
                    'name another column, or write the file again with a text'
                )
        if not any(group.num_rows for group in footer.groups):
            self.bad_lines.add(name, 0, EMPTY_FILE)
        return footer.groups

    def order(self, seed: int | str, epoch: int) -> np.ndarray:
        """Return the random order of all blocks in an epoch."""
        if self.num_bytes.sum() <= WINDOW_BYTES:
            return epoch_order(self.num_blocks, seed, epoch)
        return self.order_in_windows(seed, epoch)

    def _order_in_windows(self, seed: int | str, epoch: int) -> np.ndarray:
        group_order = permutation(len(self.groups), 'row groups', seed, epoch)
        windows = np.zeros(len(self.groups), np.int64)
        windows[group_order] = np.cumsum(self.num_bytes[group_order]) // WINDOW_BYTES
        order = epoch_order(self.num_blocks, seed, epoch)
        window_of_block = np.repeat(windows, self.blocks_per_group)
        return order[np.argsort(window_of_block[order], kind='stable')]

    def is_changed(self, block: int, step: int) -> bool:
        path = self.groups[int(np.searchsorted(self.first_blocks, block, side='right')) - 1].path
        return any(file.path == path and file.is_changed_at(step) for file in self.files)

    def read(self, block: int) -> list[Record | None]:
        index = int(np.searchsorted(self.first_blocks, block, side='right')) - 1
        group = self.groups[index]
        first = (block - int(self.first_blocks[index])) * self.rows_per_block
        number = group.first_row + first
        num_rows = self.rows_per_block
        if block + 1 == self.first_blocks[index + 1]:  # the last of the group
            num_rows = max(group.num_rows - first, 0)
        try:
            rows = self.row_groups.rows(group, first, num_rows)
        except parquet_source.DamagedFile as error:
            self.bad_lines.add(group.path, group.first_row, str(error))
            return []
        return [self.parser.parse_row(group.path, number + i, row) for i, row in enumerate(rows)]


class TfdsRecords(Blocks):
    """Records of a TFDS data set: `fields` of them as texts; if there are none, all features."""

    def __init__(
        self,
        shards: tfds_source.Shards,
        decode: Callable[[bytes], dict[str, Any]],
        fields: tuple[str, ...],
        bad_lines: BadLines,
    ):
        self.shards = shards
        self.decode = decode
        self.fields = fields
        self.bad_lines = bad_lines
        self.num_records = shards.num_records
        self.num_blocks = shards.num_blocks

    def read(self, block: int) -> list[Record | None]:
        return [self.parse(stored) for stored in self.shards.read(block)]

    def parse(self, stored: seqio_cache.StoredRecord) -> Record | None:
        """Return a stored record; None for a blank one and for a bad one that is skipped."""
        self.bad_lines.num_read += 1
        name = f'{stored.path}:{stored.position}'
        try:
            if stored.fault:
                raise ValueError(stored.fault)
            example = self.decode(stored.content)
            if not self.fields:
                return Record(name, example)
            texts = {field: tfds_source.text_at(example, field) for field in self.fields}
        except ValueError as error:
            self.bad_lines.add(stored.path, stored.position, str(error))
            return None
        return Record(name, texts) if any(texts.values()) else None


class PlainFiles(Blocks):
    """Files that are not compressed. A line is in the block in which it starts.

    A file that changed is cut at the same places of its text, into as many blocks as before.
    A line of plain text of more than MAX_LINE_BYTES is cut, and each block has the parts in it.
    Blocks in a bucket are fetched at the same time; a corpus of small blocks is fetched at once,
    and kept.
    """

    def __init__(self, files: list[FileRecord], parse: LineParser):
        names = [file.path for file in files]
        self.names = names
        self.parse = parse
        sizes = [file.first_num_bytes for file in files]
        block_bytes = max(sum(sizes) // MIN_BLOCKS, 1)
        self.block_bytes = min(block_bytes, MAX_BLOCK_BYTES, MAX_LINE_BYTES // 2)
        in_buckets = [name for name in names if paths.is_in_bucket(name)]
        self.reads_buckets = bool(in_buckets)
        self.contents: dict[str, bytes] = {}
        if self.block_bytes < MAX_BLOCK_BYTES:
            with concurrent.futures.ThreadPoolExecutor(max_workers=NUM_THREADS) as threads:
                contents = threads.map(read_file, in_buckets)
                self.contents = dict(zip(in_buckets, contents, strict=True))
        self.files = []
        self.starts: list[Sequence[int]] = []  # of the blocks of each file
        self.readers: list[Callable] = []
        for file in files:
            # In a small corpus most blocks lie within a line: only those count in which one starts.
            layout = file.layout
            if layout is None:
                layout = self.find_lines(file.path) if sum(sizes) <= MAX_SMALL_BYTES else ''
            self.files.append(file._replace(layout=layout))
            starts = self.starts_of(self.files[-1])
            self.starts.append(starts)
            kind = parse.kind_of(file.path)
            if kind == 'text':
                self.readers.append(TextReader(file.num_bytes, starts).lines)
            elif kind == 'csv':
                self.readers.append(CsvReader(file.path, starts, file.num_bytes).lines)
            else:
                self.readers.append(lines_that_start_in)
        self.first_blocks = np.cumsum([0, *map(len, self.starts)])  # [files + 1]
        self.num_blocks = int(self.first_blocks[-1])

    def starts_of(self, file: FileRecord) -> Sequence[int]:
        """Return where the blocks of a file start."""
        starts: Any = range(0, file.first_num_bytes, self.block_bytes)
        if file.layout:
            bits = np.frombuffer(bytes.fromhex(file.layout), np.uint8)
            starts = np.flatnonzero(np.unpackbits(bits)) * self.block_bytes
        for change in file.changes:
            starts = np.interp(starts, change.before, change.after).astype(np.int64)
            starts[0] = 0
        return starts

    def open_file(self, name: str) -> IO[bytes]:
        """Open a file for reading a block."""
        if name in self.contents:
            return io.BytesIO(self.contents[name])
        return paths.open_file(name, read_ahead=self.block_bytes + LINE_READ_AHEAD)

    def read_all(self, blocks: list[int]) -> Iterable[list[Record | None]]:
        if self.contents or not self.reads_buckets:
            return map(self.read, blocks)
        with concurrent.futures.ThreadPoolExecutor(max_workers=len(blocks)) as threads:
            return threads.map(self.read, blocks)

    def count_records(self) -> int | None:
        """Return the number of lines that hold a record, by counting newlines."""
        if self.reads_buckets:
            return None
        total = 0
        for name in self.names:
            num_lines = count_newlines(name, os.path.getsize(name)) + (not ends_with_newline(name))
            has_header = self.parse.kind_of(name) in ('csv', 'tsv')
            total += num_lines - has_header
        return total

    def find_lines(self, name: str) -> str:
        """Return the blocks of a file in which a line starts or a line that is cut goes on.

        They are bits, written in hexadecimal digits.
        """
        with self.open_file(name) as file:
            content = np.frombuffer(file.read(), np.uint8)
        starts = np.flatnonzero(content == NEWLINE) + 1
        starts = np.concatenate([[0], starts[starts < len(content)]])
        lengths = np.diff(starts, append=len(content))
        is_found = np.zeros(-(-len(content) // self.block_bytes), bool)
        is_found[starts // self.block_bytes] = True
        for start, length in zip(starts, lengths, strict=True):
            if length > MAX_LINE_BYTES:
                last = start + length - 1
                is_found[start // self.block_bytes : last // self.block_bytes + 1] = True
        return np.packbits(is_found).tobytes().hex()

    def bounds_of(self, block: int) -> tuple[int, int, int]:
        """Return the index of the file of a block, and where in the file it starts and ends."""
        file_index = int(np.searchsorted(self.first_blocks, block, side='right')) - 1
        starts = self.starts[file_index]
        i = block - int(self.first_blocks[file_index])
        end = self.files[file_index].num_bytes
        if i + 1 < len(starts):
            end = int(starts[i + 1])
        return file_index, int(starts[i]), end

    def is_changed(self, block: int, step: int) -> bool:
        file_index, start, end = self.bounds_of(block)
        file = self.files[file_index]
        if not file.is_changed_at(step):
            return False
        _, change_begin, change_end, _ = file.changes[-1].after
        return start <= change_end and end >= change_begin

    def read(self, block: int) -> list[Record | None]:
        file_index, start, end = self.bounds_of(block)
        if start == end:  # a correction has left nothing of it
            return []
        name = self.names[file_index]
        with self.open_file(name) as file:
            num_bytes = self.files[file_index].num_bytes
            if file.seek(0, os.SEEK_END) < num_bytes:
                raise ValueError(
                    f'{name} has no longer {num_bytes:,} bytes: restore it, and start again'
                )
            file.seek(start)
            lines = self.readers[file_index](file, start, end)
            return [self.parse(name, offset, line) for offset, line in lines]


def ends_with_newline(name: str) -> bool:
    """Return whether the last byte of a file that is not empty ends a line."""
    with open(name, 'rb') as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b'\n'


def read_file(name: str) -> bytes:
    """Return the content of a file."""
    with paths.open_file(name) as file:
        return file.read(paths.file_size(name))


def lines_that_start_in(file: IO[bytes], start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that start in [start, end)."""
    offset = start
    if start:
        file.seek(start - 1)
        rest = file.readline(end - start)  # of a line that began in an earlier block
        if not rest.endswith(b'\n'):
            return
        offset = start - 1 + len(rest)
    while offset < end:
        line = file.readline()
        if not line:
            return
        yield offset, line
        offset += len(line)


class TextReader:
    """Reads blocks of one file of plain text, and cuts lines of more than MAX_LINE_BYTES.

    A long line is cut at the ends of blocks, and the part in each block again every CUT_BYTES.
    Whether a line is long and where it is cut depends on the file alone. So blocks agree, and have
    every byte once.
    """

    def __init__(self, num_bytes: int, starts: Sequence[int]):
        self.num_bytes = num_bytes
        self.starts = starts  # of the blocks
        # Whether a block begins inside a long line, as far as lines have been read.
        self.begins_in_long_line = np.zeros(len(starts), bool)

    def lines(self, file: IO[bytes], start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, line) of short lines of a block [start, end) and of parts of long ones."""
        offset = start
        if begins_inside_line(file, start):
            line_end = self.end_of_short_line(file, start)
            if line_end is not None:
                offset = line_end
            else:
                offset = self.cut_at(file, start)
                line = self.part_of_long_line(file, offset, end)
                yield from parts_with_offsets(offset, line)
                if not line.endswith(b'\n'):
                    return
                offset += len(line)
        file.seek(offset)
        while offset < end:
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                self.remember_long_line(offset, offset + len(line))
                line = self.part_of_long_line(file, offset, end)
                yield from parts_with_offsets(offset, line)
                return
            yield offset, line
            offset += len(line)

    def end_of_short_line(self, file: IO[bytes], position: int) -> int | None:
        """Return where the line at a block's first byte `position` ends; None if it is long."""
        if self.begins_in_long_line[bisect.bisect_left(self.starts, position)]:
            return None
        start = start_of_line(file, position)
        if start is None:
            self.remember_long_line(position - MAX_LINE_BYTES, position + 1)
            return None
        file.seek(start)
        line = file.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES:
            self.remember_long_line(start, start + len(line))
            return None
        return start + len(line)

    def remember_long_line(self, start: int, end: int) -> None:
        """Note that all of [start, end) is in one long line."""
        first_block = bisect.bisect_right(self.starts, start)
        end_block = bisect.bisect_left(self.starts, end)
        self.begins_in_long_line[first_block:end_block] = True

    def part_of_long_line(self, file: IO[bytes], offset: int, end: int) -> bytes:
        """Return a long line from `offset` to its end or its cut at `end`, the block's end."""
        file.seek(offset)
        line = file.readline(end - offset)
        if line.endswith(b'\n') or end >= self.num_bytes:
            return line
        return line[: self.cut_at(file, end) - offset]

    def cut_at(self, file: IO[bytes], end: int) -> int:
        """Return where in a block that ends at `end` the long line is cut that goes on there."""
        start = self.starts[bisect.bisect_left(self.starts, end) - 1]
        file.seek(start)
        block = file.read(end - start)
        line = block[block.rfind(b'\n') + 1 :]
        return end - len(line) + cut_before(line + file.read(1), len(line))


class CsvReader:
    """Reads blocks of one CSV file, in which a quoted field may hold newlines.

    The file is read once to know where the first row of each block starts.
    """

    def __init__(self, path: str, starts: Sequence[int], num_bytes: int):
        self.first_rows: dict[int, int] = {}  # {start of a block: that of the first row in it}
        with paths.open_file(path, SEQUENTIAL_READ_AHEAD) as file:
            is_row_start = True
            in_quotes = False
            for first, last in zip(starts, [*starts[1:], num_bytes], strict=True):
                if first == last:  # a correction has left nothing of the block
                    continue
                content = file.read(last - first)
                start = 0
                while not is_row_start and start < len(content):
                    end = content.find(b'\n', start) + 1 or len(content)
                    in_quotes ^= content.count(b'"', start, end) % 2 == 1
                    is_row_start = not in_quotes and content[end - 1] == NEWLINE
                    start = end
                self.first_rows[int(first)] = int(first) + start
                in_quotes ^= content.count(b'"', start) % 2 == 1
                is_row_start = not in_quotes and content.endswith(b'\n')

    def lines(self, file: IO[bytes], start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, row) of the rows that start in [start, end)."""
        offset = self.first_rows[start]
        file.seek(offset)
        rows = whole_rows(numbered_lines(file), 'csv')
        while offset < end:
            _, row = next(rows, (0, b''))
            if not row:
                return
            yield offset, row
            offset += len(row)


def begins_inside_line(file: IO[bytes], position: int) -> bool:
    """Return whether the byte at `position` goes on a line."""
    if position == 0:
        return False
    file.seek(position - 1)
    return file.read(1) != b'\n'


def start_of_line(file: IO[bytes], position: int) -> int | None:
    """Return the start of the line that goes on at `position`; None if too far before."""
    for look_back in (1 << 12, 1 << 16, MAX_LINE_BYTES):
        width = min(look_back, position, MAX_LINE_BYTES)
        file.seek(position - width)
        newline = file.read(width).rfind(b'\n')
        if newline >= 0:
            return position - width + newline + 1
        if width == position:
            return 0
    return None


def parts_with_offsets(offset: int, line: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, part) of the parts of a long line that begins at `offset`."""
    for part in cut(line):
        yield offset, part
        offset += len(part)


def cut(line: bytes) -> Iterator[bytes]:
    """Yield the parts of a long line, at most CUT_BYTES each."""
    start = 0
    while len(line) - start > CUT_BYTES:
        window = line[start : start + CUT_BYTES + 1]
        length = cut_before(window, CUT_BYTES) or CUT_BYTES
        yield window[:length]
        start += length
    if start < len(line):
        yield line[start:]


def cut_before(line: bytes, limit: int) -> int:
    """Return where to cut a line, `limit` at most: after the last space, else a character."""
    last_space = max(line.rfind(space, 0, limit) for space in (b' ', b'\t', b'\r', b'\v', b'\f'))
    if last_space >= 0:
        return last_space + 1
    position = limit
    while position > max(limit - 3, 0) and line[position] & 0xC0 == 0x80:  # inside of a character
        position -= 1
    if line[position] >= 0xC0:
        return position
    return limit


# Gzipped files, which can be read from their beginning only.


class GzippedFiles:
    """Gzipped files, each a shard.

    An epoch permutes the shards and deals them out to the lanes. A lane reads rounds of some
    shards, interleaved line by line, in pools of equally many lines. Where shards are fewer than
    lanes, lanes that are neighbours share a shard line by line: each of them decompresses all of it
    and skips the lines of the others.

    The pools of round r are numbered from r * POOLS_PER_ROUND on.
    """

    num_records = None  # nobody knows before reading all of them

    def __init__(self, files: list[FileRecord], parse: LineParser):
        self.files = [file._replace(layout='') for file in files]
        self.names = [file.path for file in files]
        self.parse = parse
        self.bad_lines = parse.bad_lines

    def pools(
        self, share: Share, first: int, keep: Callable[[Record], bool]
    ) -> Iterator[tuple[int, list[Record | None]]]:
        """Yield (number, records) of the pools of a lane, as `Blocks.pools` does."""
        pool_lines = max(POOL_LINES // share.num_lanes, MIN_POOL_LINES)
        round_number, pool = divmod(first, POOLS_PER_ROUND)
        while round_number < self.num_rounds(share):
            lines = self.lines_of_round(share, round_number)
            own_lines = itertools.islice(lines, pool * pool_lines, None)
            while True:
                parsed = itertools.starmap(self.parse, itertools.islice(own_lines, pool_lines))
                records = list(blank_out(parsed, keep))
                if not records:
                    break
                yield round_number * POOLS_PER_ROUND + pool, records
                pool += 1
            round_number += 1
            pool = 0

    def count_records(self) -> None:
        """Return None: to count the lines, all files would have to be decompressed."""

    def in_order(self) -> Iterator[Record | None]:
        """Yield the records of all files."""
        for name in self.names:
            yield from itertools.starmap(self.parse, self.lines(name))

    def are_changed(self, share: Share, first: int, last: int, step: int) -> bool:
        """Return whether a pool of a lane, from number `first` to `last`, may have changed."""
        shards = []
        for round_number in range(first // POOLS_PER_ROUND, last // POOLS_PER_ROUND + 1):
            shards += self.shards_of_round(share, round_number)
        return any(self.files[shard].is_changed_at(step) for shard in shards)

    def num_rounds(self, share: Share) -> int:
        """Return how many rounds of shards a lane reads in an epoch."""
        if len(self.names) < share.num_lanes:
            return 1
        num_own = len(range(share.slot, len(self.names), share.num_lanes))
        return -(-num_own // shards_per_round(share.num_lanes))

    def lines_of_round(self, share: Share, round_number: int) -> Iterator[tuple[str, int, bytes]]:
        """Yield (name, number, line) of the lines that a lane reads in one round."""
        num_shards = len(self.names)
        num_lanes = share.num_lanes
        shards = self.shards_of_round(share, round_number)
        lines = [self.lines(self.names[shard]) for shard in shards]
        if num_shards < num_lanes:
            index = share.slot * num_shards // num_lanes
            first_slot = -(-index * num_lanes // num_shards)
            next_shards_slot = -(-(index + 1) * num_lanes // num_shards)
            num_sharing = next_shards_slot - first_slot
            return itertools.islice(lines[0], share.slot - first_slot, None, num_sharing)
        return interleave(lines)

    def shards_of_round(self, share: Share, round_number: int) -> list[int]:
        """Return the shards that a lane reads in one round."""
        order = epoch_order(len(self.names), share.seed, share.epoch)
        if len(self.names) < share.num_lanes:
            return [order[share.slot * len(self.names) // share.num_lanes]]
        num_open = shards_per_round(share.num_lanes)
        own = order[share.slot :: share.num_lanes]
        return own[round_number * num_open : (round_number + 1) * num_open].tolist()

    def lines(self, name: str) -> Iterator[tuple[str, int, bytes]]:
        """Yield (name, number, line) of the lines of a shard; of a long line each part."""
        number = 1
        kind = self.parse.kind_of(name)
        limit = -1  # no line is cut
        if kind == 'text':
            limit = MAX_LINE_BYTES + 1
        try:
            with open_unzipped(name, SEQUENTIAL_READ_AHEAD) as file:
                lines = enumerate(iter(functools.partial(file.readline, limit), b''), start=1)
                for number, line in whole_rows(lines, kind):
                    if len(line) == limit:
                        for part in cut_while_reading(file, line):
                            yield name, number, part
                    else:
                        yield name, number, line
                    number += 1
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.bad_lines.add(name, number, f'broken gzip ({error}); copy the file again')
            return
        if number == 1:
            self.bad_lines.add(name, 0, EMPTY_FILE)


def shards_per_round(num_lanes: int) -> int:
    """Return how many shards a lane interleaves."""
    return -(-MIN_OPEN_SHARDS // num_lanes)


def interleave(iterators: list[Iterator]) -> Iterator:
    """Yield one item of each iterator in turn, until all are at their end."""
    for items in itertools.zip_longest(*iterators):
        for item in items:
            if item is not None:
                yield item


def cut_while_reading(file: IO[bytes] | gzip.GzipFile, line: bytes) -> Iterator[bytes]:
    """Yield the parts of a long line that begins with `line` and goes on in `file`."""
    while not line.endswith(b'\n'):
        more = file.readline(MAX_LINE_BYTES)
        if not more:
            break
        *parts, rest = cut(line)
        yield from parts
        line = rest + more
    yield from cut(line)


# This Python's documentation.


def pydoc_documents() -> list[tuple[str, str]]:
    """Return (name, text) of the English that comes with Python: docstrings and help topics.

    A text has one line, or two: a docstring's first paragraph, which is its summary, and the rest.
    """
    documents: dict[str, tuple[str, str]] = {}  # by their words: equal texts count once
    root = pathlib.Path(sysconfig.get_path('stdlib'))
    excluded = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
    for path in sorted(root.rglob('*.py')):
        parts = path.relative_to(root).with_suffix('').parts
        if excluded.isdisjoint(parts):
            for name, text in docstrings(path, parts):
                documents.setdefault(' '.join(text.split()), (name, text))
    try:
        topics = importlib.import_module('pydoc_data.topics').topics
    except ImportError:  # some distributions leave it out
        topics = {}
    for topic in sorted(topics):
        text = ' '.join(topics[topic].split())
        documents.setdefault(text, (f'topics.{topic}', text))
    return [(name, text) for name, text in documents.values() if len(text) >= 40]


def docstrings(path: pathlib.Path, parts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each docstring in a Python file; `parts` are of the module's name."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = '.'.join([*parts, getattr(node, 'name', '')]).rstrip('.')
                summary, _, rest = text.partition('\n\n')
                yield name, f'{" ".join(summary.split())}\n{" ".join(rest.split())}'.strip()


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield a module and its statements, breadth first, without their expressions."""
    nodes: collections.deque[ast.AST] = collections.deque([tree])
    while nodes:
        node = nodes.popleft()
        yield node
        for field in ('body', 'handlers', 'orelse', 'finalbody', 'cases'):
            nodes.extend(getattr(node, field, []))


# Randomness: a function of the seed and of the position in the data, which resuming needs alone.


def random_bits(shape: tuple[int, ...], *key: int | str) -> np.ndarray:
    """Return uint64 of a shape, the same on every machine: Philox, keyed by a hash of `key`.

    A key has the purpose first, then the seed and the position in the data.
    """
    philox = random_generator.keyed(int(digest(list(key)), base=16))
    return philox.random_raw(math.prod(shape)).reshape(shape)


class RandomGenerator(threading.local):
    """One Philox generator in each thread: to set its key is faster than to make another."""

    def __init__(self):
        self._philox = np.random.Philox(key=0)
        self._state = self._philox.state  # before the first number

    def keyed(self, key: int) -> np.random.Philox:
        """Return the generator before its first number under a key of 128 bits."""
        high, low = divmod(key, 1 << 64)
        self._state['state']['key'][:] = (low, high)
        self._philox.state = self._state
        return self._philox


random_generator = RandomGenerator()


def permutation(length: int, *key: int | str) -> np.ndarray:
    """Return a random order of `length` items."""
    return np.argsort(random_bits((length,), *key), kind='stable')


def epoch_order(num_blocks: int, seed: int | str, epoch: int) -> np.ndarray:
    """Return the random order of all blocks in an epoch; kept, because every lane asks for it."""
    if num_blocks <= 2 * MIN_BLOCKS:  # then lanes are in many epochs at the same time
        return order_of_few(num_blocks, seed, epoch)
    return order_of_many(num_blocks, seed, epoch)


@functools.lru_cache(maxsize=256)
def order_of_few(num_blocks: int, seed: int | str, epoch: int) -> np.ndarray:
    return permutation(num_blocks, 'epoch', seed, epoch)


@functools.lru_cache(maxsize=128)  # a mixture has many tasks
def order_of_many(num_blocks: int, seed: int | str, epoch: int) -> np.ndarray:
    return permutation(num_blocks, 'epoch', seed, epoch).astype(np.uint32)


def digest(content: list) -> str:
    """Return a hash of what `content` prints as."""
    return hashlib.blake2b(str(content).encode(), digest_size=16).hexdigest()
