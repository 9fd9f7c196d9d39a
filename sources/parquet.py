"""Parquet files: their columns, their row groups and the rows in these. Imports no jax.

A row group is the least that pyarrow decodes.
"""

import collections
import concurrent.futures
import contextlib
import functools
import io
import itertools
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.parquet
import pyarrow.types

import paths
from messages import Refused
from randomness import permutation
from sources import Record, bytes_of, deal
from sources.deal import Blocks
from sources.files import EMPTY_FILE, NUM_THREADS, FileRecord
from sources.tables import LineParser, check_names

WINDOW_BYTES = 128 << 20  # lanes read from row groups of this size at a time
MAX_GROUP_BYTES = 256 << 20  # the limit of what is read of a row group, uncompressed
MAX_CACHED_BYTES = 512 << 20  # the memory for decoded row groups
LISTS = (pyarrow.ListType, pyarrow.LargeListType, pyarrow.FixedSizeListType)
READ = ('text', 'number')  # the kinds of values that are read
FIRST_ROWS = 1000  # read to find out whether a list has a value at an index
MAX_INTEGER = 2**53  # beyond it float64 rounds integers


class DamagedFile(Exception):
    """A file, or a row group of it, that pyarrow cannot read."""


class RowGroup(NamedTuple):
    """Rows that are stored together. `num_bytes` are those of the columns that are read."""

    path: str
    number: int  # in the file, from 0
    first_row: int  # in the file, from 1
    num_rows: int
    num_bytes: int


class Footer(NamedTuple):
    names: list[str]  # the columns'
    values: dict[str, str]  # {column, or value within: 'text', 'number' or another type}
    groups: list[RowGroup]


def read_footer(path: str, columns: Sequence[str]) -> Footer:
    """Return what the footer of a file says; sizes are those of `columns`. Raises DamagedFile."""
    with paths.open_file(path) as stream, damage_named('no Parquet'):
        file = pyarrow.parquet.ParquetFile(stream)
        values: dict[str, str] = {}
        for field in file.schema_arrow:
            values |= kinds_of_values(field.name, field.type)
        groups = list(row_groups(path, file.metadata, columns))
    return Footer(file.schema_arrow.names, values, groups)


def kinds_of_values(name: str, arrow_type: pyarrow.DataType) -> dict[str, str]:
    """Return the kinds of a column and of the values within; a list stands for its first value."""
    kinds = {name: kind_of_type(arrow_type)}
    if pyarrow.types.is_struct(arrow_type):
        for child in arrow_type:
            kinds |= kinds_of_values(f'{name}/{child.name}', child.type)
    elif isinstance(arrow_type, LISTS):
        kinds |= kinds_of_values(f'{name}/0', arrow_type.value_type)
    return kinds


def kind_of_type(arrow_type: pyarrow.DataType) -> str:
    """Return 'text' or 'number' for a type that is read, else the name of the type."""
    if pyarrow.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    name = str(arrow_type)
    # A column without any value is of type null.
    if name.removeprefix('large_').removesuffix('_view') in ('string', 'binary', 'null'):
        return 'text'
    is_number = pyarrow.types.is_integer(arrow_type) or pyarrow.types.is_floating(arrow_type)
    if is_number or pyarrow.types.is_boolean(arrow_type):
        return 'number'
    return name


def row_groups(
    path: str, metadata: pyarrow.parquet.FileMetaData, columns: Sequence[str]
) -> Iterator[RowGroup]:
    """Yield the row groups of a file."""
    first_row = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        num_bytes = 0
        for i in range(group.num_columns):
            column = group.column(i)
            path_in_schema = column.path_in_schema
            if path_in_schema in columns or path_in_schema.split('.')[0] in columns:
                num_bytes += column.total_uncompressed_size
        if num_bytes > MAX_GROUP_BYTES:
            raise Refused(
                f'{path}: row group {number + 1} of {num_bytes:,} bytes is too large: use a smaller row_group_size'
            )
        yield RowGroup(path, number, first_row, group.num_rows, num_bytes)
        first_row += group.num_rows


class Numbers(NamedTuple):
    """The columns of a file that have numbers or no value at all. A column may be in several sets."""

    floats: set[str]
    whole: set[str]  # no number has a fraction
    with_gaps: set[str]


def integer_columns(
    files: Sequence[str], test_files: Sequence[str], fields: Sequence[str]
) -> tuple[set[str], set[str]]:
    """Return the columns whose floats are written as integers, in `files` and in `test_files`.

    pandas makes floats of integers where a value is missing: a column of whole numbers and gaps alone is
    one of integers. All `files`, those of training and validation, decide together, so that a number is
    written the same way in each. Floats without a gap stay floats. Training does not depend on
    `test_files`, which are written as it is. `fields`: the columns that are read; if there are none, all.
    """
    read = functools.partial(numbers_in_file, fields=fields)
    with concurrent.futures.ThreadPoolExecutor(max_workers=NUM_THREADS) as threads:
        in_files = list(filter(None, threads.map(read, files)))
        in_test_files = list(filter(None, threads.map(read, test_files)))
    integers = whole_beside_gaps(in_files)
    test_integers = whole_beside_gaps(in_test_files).union(*[x.whole for x in in_files])
    return integers, test_integers.difference(*[x.floats - integers for x in in_files])


def whole_beside_gaps(in_files: Sequence[Numbers]) -> set[str]:
    """Return the columns of whole numbers in all files, with a gap in some."""
    if not in_files:
        return set()
    whole = set.intersection(*[numbers.whole for numbers in in_files])
    return {name for name in whole if any(name in numbers.with_gaps for numbers in in_files)}


def numbers_in_file(path: str, fields: Sequence[str]) -> Numbers | None:
    """Return the columns of numbers of a file, None if it is damaged.

    Floats are read row group by row group, up to the first that is not whole.
    """
    found = Numbers(set(), set(), set())
    try:
        with paths.open_file(path) as stream, damage_named('no Parquet'):
            file = pyarrow.parquet.ParquetFile(stream)
            for column in file.schema_arrow:
                if fields and column.name not in fields:
                    continue
                value_type = column.type
                if pyarrow.types.is_dictionary(value_type):
                    value_type = value_type.value_type
                has_gap: bool | None = pyarrow.types.is_null(value_type)  # None: not whole
                if pyarrow.types.is_floating(value_type):
                    found.floats.add(column.name)
                    has_gap = has_gaps(file, column.name)
                elif not has_gap and not pyarrow.types.is_integer(value_type):
                    continue
                if has_gap is not None:
                    found.whole.add(column.name)
                if has_gap:
                    found.with_gaps.add(column.name)
    except DamagedFile:
        return None
    return found


def has_gaps(file: pyarrow.parquet.ParquetFile, name: str) -> bool | None:
    """Return whether a column of floats has a null or NaN; None if a number of it is not whole."""
    has_gap = False
    for number in range(file.metadata.num_row_groups):
        batches = file.iter_batches(row_groups=[number], columns=[name], use_threads=False)
        # Damage is reported when the rows are read.
        with contextlib.suppress(DamagedFile), damage_named('damaged'):
            for batch in batches:
                values = batch.column(0).cast(pyarrow.float64()).to_numpy(zero_copy_only=False)
                is_gap = np.isnan(values)
                is_whole = (values == np.trunc(values)) & (np.abs(values) <= MAX_INTEGER)
                if not (is_gap | is_whole).all():
                    return None
                has_gap |= bool(is_gap.any())
    return has_gap


def make_integers(row: dict, names: Collection[str]) -> None:
    """Make the whole floats of the columns that `integer_columns` names integers again."""
    for name in names:
        if isinstance(row[name], float) and row[name].is_integer():
            row[name] = int(row[name])


def readable(footer: Footer) -> list[str]:
    """Return the columns of texts and numbers, and those that hold some in structs and lists."""
    kinds = {name.split('/')[0] for name, kind in footer.values.items() if kind in READ}
    return [name for name in footer.names if name in kinds or footer.values[name] in READ]


class RowGroups:
    """Reads rows of `columns`, and keeps the row groups that it decoded last. Thread-safe."""

    def __init__(self, columns: Sequence[str]):
        self.columns = columns
        self._kept: collections.OrderedDict[RowGroup, list] = collections.OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def rows(self, group: RowGroup, first: int, num_rows: int) -> list[dict]:
        """Return {column: value} of rows of a group: bytes, numbers and None.

        Raises DamagedFile.
        """
        values = []
        for column in self._decoded(group):
            rows = column.slice(first, num_rows)
            if pyarrow.types.is_dictionary(rows.type):
                rows = rows.dictionary.take(rows.indices)
            with damage_named(f'row group {group.number + 1} is damaged'):
                values.append(rows.to_pylist())  # dates may be beyond Python's
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*values, strict=True)]

    def _decoded(self, group: RowGroup) -> list:
        """Return the columns of a row group, which `decode` returns."""
        with self._lock:
            if group not in self._kept:
                self._kept[group] = decode(group, self.columns)
                self._num_bytes += sum(column.nbytes for column in self._kept[group])
            self._kept.move_to_end(group)
            while self._num_bytes > MAX_CACHED_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= sum(column.nbytes for column in oldest)
            return self._kept[group]


def decode(group: RowGroup, columns: Sequence[str]) -> list:
    """Return columns of a row group as pyarrow.DictionaryArray: a value that is repeated is kept once.

    So they take about as much memory as in the file. Structs and lists are arrays of their own types.
    Raises DamagedFile.
    """
    with (
        paths.open_file(group.path) as stream,
        damage_named(f'row group {group.number + 1} is damaged'),
    ):
        try:
            table = read_table(stream, group.number, columns, read_dictionary=columns)
        except (OSError, KeyError):  # pyarrow has no dictionaries of delta encodings and structs
            table = read_table(stream, group.number, columns, read_dictionary=[])
        arrays = []
        for name in columns:
            column = table.column(name)
            if pyarrow.types.is_nested(column.type):
                arrays.append(column.cast(with_bytes(column.type)).combine_chunks())
                continue
            if not pyarrow.types.is_dictionary(column.type):
                column = column.dictionary_encode()
            column = column.unify_dictionaries().combine_chunks()
            values = column.dictionary
            if kind_of_type(values.type) == 'text':
                values = values.cast(pyarrow.large_binary())  # texts may not be UTF-8
            elif values.type == pyarrow.float32():
                # 3.8, not 3.79999995
                values = values.cast(pyarrow.string()).cast(pyarrow.float64())
            arrays.append(pyarrow.DictionaryArray.from_arrays(column.indices, values))
    return arrays


def with_bytes(arrow_type: pyarrow.DataType) -> pyarrow.DataType:
    """Return a type of structs and lists with bytes for texts, which may not be UTF-8."""
    if pyarrow.types.is_struct(arrow_type):
        fields = [field.with_type(with_bytes(field.type)) for field in arrow_type]
        return pyarrow.struct(fields)
    if isinstance(arrow_type, LISTS):
        return pyarrow.list_(with_bytes(arrow_type.value_type))
    return pyarrow.large_binary() if kind_of_type(arrow_type) == 'text' else arrow_type


def read_table(
    stream: io.BufferedReader, number: int, columns: Sequence[str], read_dictionary: Sequence[str]
) -> pyarrow.Table:
    """Return columns of row group `number` of an open file as a pyarrow.Table."""
    file = pyarrow.parquet.ParquetFile(
        stream, page_checksum_verification=True, read_dictionary=read_dictionary
    )
    return file.read_row_group(number, columns=columns, use_threads=False)


@contextlib.contextmanager
def damage_named(what: str) -> Iterator[None]:
    """Raise DamagedFile for what pyarrow cannot read."""
    try:
        yield
    except (paths.ReadError, Refused):
        raise
    except (pyarrow.ArrowException, OSError, OverflowError, ValueError) as error:
        cause = ' '.join(str(error).split())
        raise DamagedFile(f'{what} ({cause}); copy the file again') from error


class ParquetFiles(Blocks):
    """Rows of Parquet files. A block is a run of rows of one row group.

    A row group is decoded whole. So that lanes share what is decoded, an epoch goes through windows
    of some row groups, in a random order, and permutes the blocks of a window.
    """

    def __init__(self, files: list[FileRecord], parser: LineParser):
        self.parser = parser
        self.bad_lines = parser.bad_lines
        self.columns: tuple[str, ...] = ()
        for file in files:
            footer = self.read_footer(file.path)
            if footer is not None:  # the first file that can be read
                fields = parser.fields or readable(footer)
                named = [x if x in footer.names else x.split('/')[0] for x in fields]
                self.columns = tuple(dict.fromkeys(named))
                break
        self.files = files
        with concurrent.futures.ThreadPoolExecutor(max_workers=NUM_THREADS) as threads:
            found = threads.map(self.row_groups_of_file, [file.path for file in files])
            self.groups = list(itertools.chain.from_iterable(found))
        self.row_groups = RowGroups(self.columns)
        # A list may be too short for a field.
        if any(re.search(r'/\d+(/|$)', field) for field in parser.fields):
            parser.check_filled({file.path: self.first_rows(file.path) for file in files})
        sizes = [(group.num_rows, group.num_bytes) for group in self.groups]
        num_rows, self.num_bytes = np.array(sizes, np.int64).reshape(-1, 2).T
        self.num_records = int(num_rows.sum())
        bytes_per_row = self.num_bytes.sum() / max(num_rows.sum(), 1)
        rows_per_block = min(
            num_rows.sum() // deal.MIN_BLOCKS, deal.MAX_BLOCK_BYTES // max(bytes_per_row, 1)
        )
        self.rows_per_block = max(int(rows_per_block), 1)
        self.blocks_per_group = -(-num_rows // self.rows_per_block)
        self.divide(self.blocks_per_group)

    def read_footer(self, name: str) -> Footer | None:
        """Return the footer of a file; None of a bad one that is skipped."""
        try:
            return read_footer(name, self.columns)
        except DamagedFile as error:
            self.bad_lines.add(name, 0, str(error))
            return None

    def row_groups_of_file(self, name: str) -> list[RowGroup]:
        """Return the row groups of a file; none of a bad one that is skipped."""
        footer = self.read_footer(name)
        if footer is None:
            return []
        check_names(footer.names, name)
        slots = {field: re.sub(r'/\d+(?=/|$)', '/0', field) for field in self.parser.fields}
        slots |= {field: field for field in slots if field in footer.values}
        found = [field for field, slot in slots.items() if slot in footer.values]
        ends = [x for x in footer.values if not any(y.startswith(f'{x}/') for y in footer.values)]
        self.parser.check_columns(name, [*ends, *found])
        if self.parser.whole_records and set(readable(footer)) != set(self.columns):
            raise Refused(
                f'{name} has other columns than {self.columns}: write the same in all files'
            )
        are_numbers_read = self.parser.templates or self.parser.whole_records
        for field, slot in slots.items():
            kind = footer.values[slot]
            if field == self.parser.references:
                kind = footer.values.get(f'{slot}/0', kind)
            if kind != 'text' and (kind != 'number' or not are_numbers_read):
                raise Refused(f'{name}: column {field!r} is {kind}: name a column of texts')
        if not any(group.num_rows for group in footer.groups):
            self.bad_lines.add(name, 0, EMPTY_FILE)
        return footer.groups

    def first_rows(self, name: str) -> list[dict]:
        """Return the first rows of a file; none if bad ones may be skipped for later ones."""
        with contextlib.suppress(DamagedFile), paths.open_file(name) as stream:
            with damage_named('damaged'):
                file = pyarrow.parquet.ParquetFile(stream)
                batches = file.iter_batches(FIRST_ROWS, columns=self.columns, use_threads=False)
                num_rows = file.metadata.num_rows
                if num_rows and (self.bad_lines.action == 'stop' or num_rows <= FIRST_ROWS):
                    return next(batches).to_pylist()
        return []

    def compute_order(self, num_items: int, seed: int | str, epoch: int) -> np.ndarray:
        order = super().compute_order(num_items, seed, epoch)
        if self.num_bytes.sum() <= WINDOW_BYTES:
            return order
        group_order = permutation(len(self.groups), 'row groups', seed, epoch)
        windows = np.zeros(len(self.groups), np.int64)
        windows[group_order] = np.cumsum(self.num_bytes[group_order]) // WINDOW_BYTES
        window_of_block = np.repeat(windows, self.blocks_per_group)
        return order[np.argsort(window_of_block[order], kind='stable')]

    def read(self, block: int) -> list[Record | None]:
        index, i = self.locate(block)
        group = self.groups[index]
        first = i * self.rows_per_block
        number = group.first_row + first
        num_rows = min(self.rows_per_block, group.num_rows - first)
        try:
            rows = self.row_groups.rows(group, first, num_rows)
        except DamagedFile as error:
            self.bad_lines.num_read += group.num_rows
            self.bad_lines.add(group.path, group.first_row, str(error), num_lines=group.num_rows)
            return []
        records = []
        for i, row in enumerate(rows, start=number):
            record = self.bad_lines.record(group.path, i, self.parser.fields_of_row, row)
            if record is not None and self.parser.integers:
                record = self.with_integers(record, row)
            records.append(record)
        return records

    def with_integers(self, record: Record, row: dict) -> Record:
        """Return the record of a row with integers for the floats of `integer_columns`.

        The floats decide on its split, as they did in runs of earlier versions.
        """
        split_key = b''.join(map(bytes_of, record.fields.values())).decode()
        make_integers(row, self.parser.integers)
        fields = self.parser.fields_of_row(row)
        assert fields is not None
        return record._replace(fields=fields, split_key=split_key)
