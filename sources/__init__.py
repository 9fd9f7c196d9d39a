"""Sources of records: the types that all of them share. `sources.open` opens one.

A source shuffles its records and divides each epoch among the lanes of the batch. It knows nothing about
tokens. Imports no format and no jax.
"""

import abc
import collections
import dataclasses
import functools
import json
import math
import threading
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from messages import Refused, first_ten
from randomness import permutation
from sources.files import FileRecord, count_newlines, is_gzipped, kind_of

FEATURES = ('inputs', 'targets')
NO_SPLIT = 'none'  # the name of a split that a task lacks
MAX_WEIGHT = 1e30  # the largest weight of an example


class Record(NamedTuple):
    """A stored record. Its fields are texts, arrays of ids in a task cache, or other values of JSON."""

    name: str  # path:offset; in a gzipped file path:line, in Parquet path:row
    fields: dict
    split_key: str = ''  # its hash chooses the split; '': the hash of the fields


def value_at(fields: Mapping, name: str) -> Any:
    """Return a value of a record: 'answers/text/0' is the first of a list within a field.

    A field of exactly this name takes precedence. Returns None if there is no value.
    """
    if name in fields:
        return fields[name]
    value: Any = fields
    for part in name.split('/'):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value


def weight_at(fields: Mapping, name: str) -> np.ndarray:
    """Return the weight of an example, float32 [], which is a value of its record."""
    value = value_at(fields, name)
    try:
        weight = float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight <= MAX_WEIGHT:
        raise Refused(f'its weight {name!r} is {value!r:.40}; use a number of 0 or more')
    return np.array(weight, np.float32)


def names_of_values(value: Any, name: str = '') -> Iterator[str]:
    """Yield the names that `value_at` takes for the values in a record; in a list, for the first one."""
    if isinstance(value, list):
        value = dict(enumerate(value[:1]))
    if not isinstance(value, Mapping):
        yield name
        return
    for part, child in value.items():
        yield from names_of_values(child, f'{name}/{part}' if name else str(part))


class Share(NamedTuple):
    """The part of an epoch that one lane reads. Lane r fills row r of every batch."""

    seed: int | str
    epoch: int
    lane: int
    num_lanes: int

    @property
    def slot(self) -> int:
        """The index of this part, which changes from epoch to epoch, so that every lane gets text."""
        return (self.lane + self.epoch) % self.num_lanes


class Document(NamedTuple):
    """A record and where a lane reads it: a pool, and an offset in the shuffled pool."""

    pool: int
    offset: int
    record: Record


class Part(abc.ABC):
    """The records of one split, or of two that a hash of each record separates."""

    num_records: int | None = None  # None if counting requires reading all of them
    files: list[FileRecord] = []
    features: Collection[str] | None = None  # the names of ids; None if records are texts

    @functools.cached_property
    def order(self) -> Callable[[int, int | str, int], np.ndarray]:
        """Return `compute_order`, cached for the last epochs: every lane asks for them."""
        return functools.lru_cache(maxsize=16)(self.compute_order)

    def compute_order(self, num_items: int, seed: int | str, epoch: int) -> np.ndarray:
        """Return the random order of all blocks or shards in an epoch."""
        return permutation(num_items, 'epoch', seed, epoch).astype(np.uint32)

    @abc.abstractmethod
    def pools(self, share: Share, first: int) -> Iterator[tuple[int, list[Record | None]]]:
        """Yield (number, records) of the pools of a lane, from number `first` on.

        None stands for a line without a record, because offsets in a pool count lines.
        """

    @abc.abstractmethod
    def in_order(self) -> Iterator[Record | None]:
        """Yield all records in the order in which they are stored."""

    def whole(self) -> 'Part':
        """Return the same records with all stored features."""
        return self

    def has_share(self, share: Share) -> bool:
        """Return whether a lane has something to read in its epoch."""
        return True

    def count_records(self) -> int | None:
        """Return the number of records, None if counting would require reading all of them."""
        return self.num_records


@dataclasses.dataclass(frozen=True)
class Source:
    """A corpus. Without files for validation, a hash of each record chooses its split."""

    description: str
    corpus: str  # 'files', 'cache', 'tfds', 'cmudict', 'pydoc' or 'pydoc instead of C4'
    fingerprint: str  # a run resumes only with a corpus of the same fingerprint
    validation_fraction: float
    bad_lines: 'BadLines'
    train: Part
    validation: Part | None = None
    open_test: Callable[[], Part] | None = None  # opened when needed: training does not read it
    files: tuple[FileRecord, ...] = ()  # in the order in which they are read
    is_tokenized: bool = False  # the fields are ids, under the names of features
    vocabulary_hash: str | None = None  # known only for a cache of this program

    @property
    def features(self) -> Collection[str] | None:
        """The features of a task cache; None if records are texts."""
        part = self.train
        if self.validation is not None and not self.may_hold('train'):
            part = self.validation
        return part.features

    def documents(
        self, split: str, share: Share, pool: int = 0, offset: int = 0
    ) -> Iterator[Document]:
        """Yield the documents of one lane in one epoch, from `offset` in pool number `pool` on."""
        part = self.part_of(split)
        for number, records in part.pools(share, first=pool):
            order = permutation(len(records), 'pool', share.seed, share.epoch, share.lane, number)
            for i in range(offset, len(records)):
                record = records[order[i]]
                if record is not None and self.is_in_split(split, record):
                    yield Document(pool=number, offset=i, record=record)
            offset = 0

    def records(self, split: str, whole: bool = False) -> Iterator[Record]:
        """Yield the records of a split in stored order; with `whole`, all features of a cache."""
        part = self.part_of(split)
        if whole:
            part = part.whole()
        for record in part.in_order():
            if record is not None and self.is_in_split(split, record):
                yield record

    def next_epoch(self, split: str, share: Share) -> int:
        """Return the first epoch, from `share.epoch` on, in which its lane has something to read."""
        if self.part_of(split).has_share(share):
            return share.epoch
        return share.epoch + share.num_lanes - share.slot

    def part_of(self, split: str) -> Part:
        """Return the part that holds the records of a split."""
        if split == 'test':
            return self.test
        if split == 'validation' and self.validation is not None:
            return self.validation
        return self.train

    @functools.cached_property
    def test(self) -> Part:
        """The records of the split test."""
        if self.open_test is None:
            raise Refused(f'{self.description} have no split test: evaluate another split')
        return self.open_test()

    def is_in_split(self, split: str, record: Record) -> bool:
        """Return whether a record of the files of `split` is in it."""
        if self.validation is not None or split == 'test':
            return True
        if self.validation_fraction == 0:
            return split == 'train'
        fields = record.fields
        if self.is_tokenized:
            fields = {name: fields[name] for name in FEATURES if name in fields}
        content = record.split_key.encode() or b''.join(map(bytes_of, fields.values()))
        is_validation = zlib.crc32(content) < self.validation_fraction * 2**32
        return is_validation == (split == 'validation')

    def may_hold(self, split: str) -> bool:
        """Return False if the settings alone leave `split` without a document."""
        if split == 'test':
            return self.open_test is not None
        if self.part_of(split).num_records == 0:
            return False
        if split == 'validation' and self.validation is None:
            return self.validation_fraction != 0
        return True

    def check_not_empty(self, split: str) -> None:
        """Raise Refused if the files of `split` have no document."""
        if all(record is None for record in self.part_of(split).in_order()):
            self.raise_empty(split)

    def raise_empty(self, split: str) -> None:
        """Raise Refused for a split without text."""
        part = self.part_of(split)
        files = [file.path for file in self.files if self.part_of(file.split) is part]
        where = first_ten(files) or self.description
        raise Refused(
            f'no document of split {split!r} is in {where}: name files with records, or change '
            f'data.validation_fraction={self.validation_fraction}'
        )

    def check_ids(self, features: Collection[str], vocabulary_hash: str) -> None:
        """Raise Refused for a cache without the features of a task, or with ids of another vocabulary."""
        if self.features is None:
            return
        if self.vocabulary_hash not in (None, vocabulary_hash):
            raise Refused(
                f'{self.description} have ids of another vocabulary: set data.vocabulary and data.extra_ids to match'
            )
        absent_features = set(features) - set(self.features)
        if absent_features:
            raise Refused(
                f'{self.description} have no feature {min(absent_features)!r}: set data.use_cached=no'
            )

    def faults(self) -> tuple[list[str], int]:
        """Return the bad lines since the last call, at most ten, and the number of all."""
        return self.bad_lines.take()


def bytes_of(value: Any) -> bytes:
    """Return a text, an array of ids, or another value of JSON or TFDS as bytes."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return json.dumps(value, default=repr).encode()


class BadLines:
    """Lines that cannot be read: the first stops the run, or a few are skipped, each counted once. Thread-safe."""

    def __init__(self, action: str, max_fraction: float, kind: str = ''):
        self.action = action
        self.max_fraction = max_fraction
        self.kind = kind  # '' if the names of the files tell
        self.num_read = 0  # lines, roughly: two threads may lose one
        self._positions: set[tuple[str, int]] = set()
        self._num_lines = 0  # a row of a table may have several
        self._unreported: collections.deque[BadLine] = collections.deque(maxlen=10)
        self._lock = threading.Lock()

    def add(self, path: str, position: int, reason: str, num_lines: int = 1) -> None:
        """Count a bad line, or the lines of a row. Raises Refused if that stops the run.

        `position` is the offset of the line in bytes, or in a gzipped file its number.
        """
        line = self.line(path, position, reason)
        if self.action == 'stop':
            raise Refused(f'data.on_bad_line=stop (skip leaves it out): {line.describe()}')
        with self._lock:
            if (path, position) in self._positions:
                return
            self._positions.add((path, position))
            self._num_lines += num_lines
            self._unreported.append(line)
            bound = max(10, self.max_fraction * self.num_read)
            if self._num_lines > bound:
                raise Refused(
                    f'{self._num_lines:,} bad lines of {self.num_read:,}, more than {bound:,.0f} '
                    f'(data.max_bad_fraction={self.max_fraction}, or 10): correct {line.describe()}'
                )

    def add_record(self, name: str, reason: str) -> None:
        """Count a bad record. Raises Refused if that stops the run."""
        path, _, position = name.rpartition(':')
        if not path:  # not in a file: it cannot be skipped
            raise Refused(f'{name}: {reason}')
        self.add(path, int(position), reason)

    def place_of(self, name: str) -> str:
        """Return the place of a record: 'line 15 of mine.jsonl', or its name if it is in no file."""
        path, _, position = name.rpartition(':')
        if not path:
            return name
        return self.line(path, int(position)).name()

    def line(self, path: str, position: int, reason: str = '') -> 'BadLine':
        return BadLine(path, position, reason, self.kind or kind_of(path))

    def record(
        self, path: str, position: int, read: Callable, *arguments, num_lines: int = 1
    ) -> Record | None:
        """Return the record of the fields that `read` returns; None for a blank line (None) or a bad one (Refused)."""
        self.num_read += num_lines
        try:
            fields = read(*arguments)
        except Refused as error:
            self.add(path, position, str(error), num_lines)
            return None
        if fields is None:
            return None
        return Record(f'{path}:{position}', fields)

    def take(self) -> tuple[list[str], int]:
        """Return descriptions of the lines since the last call, at most ten, and the number of all lines."""
        with self._lock:
            unreported = list(self._unreported)
            self._unreported.clear()
            return [line.describe() for line in unreported], self._num_lines


class BadLine(NamedTuple):
    path: str
    position: int  # offset in bytes; in a gzipped file the number of the line, in Parquet the row
    reason: str
    kind: str  # the file's

    def describe(self) -> str:
        """Return one line of text. To number the line, this reads a plain file up to there."""
        if self.reason.startswith(self.path):  # the reader has named the record
            return self.reason
        return f'{self.name()}: {self.reason}'

    def name(self) -> str:
        """Return the name of the record: 'line 15 of mine.jsonl'."""
        if '.array_record-' in self.path or '.ids-' in self.path:
            item = f'record {self.position}'
        elif '.tfrecord-' in self.path:
            item = f'the record at byte {self.position}'
        elif self.kind == 'parquet':
            item = f'row {max(self.position, 1)}'  # an empty file has none
        elif is_gzipped(self.path):
            item = f'line {max(self.position, 1)}'
        else:
            item = f'line {1 + count_newlines(self.path, self.position)}'
        return f'{item} of {self.path}'
