"""Parquet files: their columns, row groups and rows. Imports no jax.

A row group is the smallest unit that pyarrow decodes.
"""

import concurrent.futures
import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.parquet
import pyarrow.types

import paths
from messages import Refused
from randomness import permutation
from run.buckets import ReadError
from sources import Record, deal
from sources.deal import Blocks
from sources.files import EMPTY_FILE, NUM_THREADS, FileRecord
from sources.tables import LineParser, check_names

WINDOW_BYTES = 128 << 20  # the size of the row groups that lanes read from at a time
MAX_GROUP_BYTES = 256 << 20  # read from a row group, uncompressed
MAX_CACHED_BYTES = 512 << 20  # memory for decoded row groups
LISTS = (pyarrow.ListType, pyarrow.LargeListType, pyarrow.FixedSizeListType)
KINDS = {  # patterns of the names of supported types
    'text': re.compile('(large_)?(string|binary)(_view)?|null'),  # null: a column without values
    'number': re.compile(r'u?int\d+|halffloat|float|double|bool'),
}


class DamagedFile(Exception):
    """A file, or a row group of it, that pyarrow cannot read."""


class RowGroup(NamedTuple):
    """Rows that are stored together. `num_bytes` counts the columns that are read."""

    path: str
    number: int  # in the file, from 0
    first_row: int  # in the file, from 1
    num_rows: int
    num_bytes: int


class Footer(NamedTuple):
    path: str
    names: list[str]  # all columns
    values: dict[str, str]  # {value in a column: 'text', 'number' or its type}
    columns: list[str]  # to read
    groups: list[RowGroup]


def read_footer(path: str, fields: Sequence[str]) -> Footer:
    """Return the footer of a file for reading `fields`, or all readable columns. Raises DamagedFile."""
    values: dict[str, str] = {}
    groups = []
    first_row = 1
    with paths.open_file(path) as stream, damage_named('not Parquet'):
        file = pyarrow.parquet.ParquetFile(stream)
        for column in file.schema_arrow:
            values.update(kinds_of_values(column.name, column.type))
        columns = columns_of(fields, file.schema_arrow.names, values)
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            num_bytes = 0
            for i in range(group.num_columns):
                name = group.column(i).path_in_schema
                if name in columns or name.split('.')[0] in columns:
                    num_bytes += group.column(i).total_uncompressed_size
            if num_bytes > MAX_GROUP_BYTES:
                raise Refused(
                    f'{path}: row group {number + 1} of {num_bytes:,} bytes is too large: use a smaller row_group_size'
                )
            groups.append(RowGroup(path, number, first_row, group.num_rows, num_bytes))
            first_row += group.num_rows
    return Footer(path, file.schema_arrow.names, values, columns, groups)


def kinds_of_values(name: str, arrow_type: pyarrow.DataType) -> Iterator[tuple[str, str]]:
    """Yield the values of a column and their kinds, including values in structs and the first in lists."""
    if pyarrow.types.is_struct(arrow_type):
        for child in arrow_type:
            yield from kinds_of_values(f'{name}/{child.name}', child.type)
    elif isinstance(arrow_type, LISTS):
        yield from kinds_of_values(f'{name}/0', arrow_type.value_type)
    else:
        yield name, kind_of_type(arrow_type)


def kind_of_type(arrow_type: pyarrow.DataType) -> str:
    """Return 'text' or 'number' for a type that is read, else the name of the type."""
    if pyarrow.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    name = str(arrow_type)
    for kind, pattern in KINDS.items():
        if pattern.fullmatch(name):
            return kind
    return name


def columns_of(fields: Sequence[str], names: list[str], values: dict[str, str]) -> list[str]:
    """Return the columns that hold `fields`; without these, all that hold texts or numbers."""
    columns = [value for value, kind in values.items() if kind in KINDS]
    columns += [value.split('/')[0] for value in columns]
    readable = [name for name in names if name in columns]
    candidates = [x if x in names else x.split('/')[0] for x in fields or readable]
    return [name for name in dict.fromkeys(candidates) if name in readable]


def decode(group: RowGroup, columns: Sequence[str]) -> pyarrow.Table:
    """Return columns of a row group. Raises DamagedFile.

    Texts are dictionary-encoded: a repeated text takes memory once, as in the file.
    """
    with (
        paths.open_file(group.path) as stream,
        damage_named(f'row group {group.number + 1} is damaged'),
    ):
        read = functools.partial(
            pyarrow.parquet.ParquetFile, stream, page_checksum_verification=True
        )
        try:
            file = read(read_dictionary=columns)
            table = file.read_row_group(group.number, columns=columns, use_threads=False)
        except (OSError, KeyError):  # no dictionaries from delta encodings and structs
            table = read().read_row_group(group.number, columns=columns, use_threads=False)
        return table.select(columns)


def rows_of(group: RowGroup, table: pyarrow.Table, first: int, num_rows: int) -> list[dict]:
    """Return {column: value} of rows of a decoded group, texts as bytes. Raises DamagedFile."""
    columns = {}
    with damage_named(f'row group {group.number + 1} is damaged'):  # a date may be beyond Python's
        for name in table.column_names:
            column = table.column(name).slice(first, num_rows)
            if kind_of_type(column.type) == 'text':
                column = column.cast(pyarrow.large_binary())  # it may not be UTF-8
            elif column.type == pyarrow.float32():
                # 3.8, not 3.79999995
                column = column.cast(pyarrow.string()).cast(pyarrow.float64())
            columns[name] = column
        return pyarrow.table(columns).to_pylist()


@contextlib.contextmanager
def damage_named(fault: str) -> Iterator[None]:
    """Raise DamagedFile for pyarrow's errors."""
    try:
        yield
    except (ReadError, Refused):
        raise
    except (pyarrow.ArrowException, OSError, OverflowError, ValueError) as error:
        cause = ' '.join(str(error).split())
        raise DamagedFile(f'{fault} ({cause}); copy the file again') from error


class ParquetFiles(Blocks):
    """Rows of Parquet files. A block is a run of rows of one row group.

    A row group is decoded in full. To let lanes share the decoded rows, an epoch goes through windows
    of several row groups in a random order, and permutes the blocks within each window.
    """

    def __init__(self, files: list[FileRecord], parser: LineParser):
        self.parser = parser
        self.bad_lines = parser.bad_lines
        names = [file.path for file in files]
        with concurrent.futures.ThreadPoolExecutor(max_workers=NUM_THREADS) as threads:
            footers = list(filter(None, threads.map(self.read_footer, names)))
        self.columns: list[str] = []
        self.groups: list[RowGroup] = []
        for footer in footers:
            self.columns = self.columns or footer.columns
            if parser.whole_records and set(footer.columns) != set(self.columns):
                raise Refused(
                    f'{footer.path} has other columns than {self.columns}: write the same in all files'
                )
            self.groups += footer.groups
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
        # Cache about MAX_CACHED_BYTES if row groups come in a random order, and at most four times that in any order.
        mean = self.num_bytes.sum() / max(len(self.groups), 1)
        num_cached = MAX_CACHED_BYTES // max(mean, self.num_bytes.max(initial=4) / 4)
        self.decode = functools.lru_cache(int(num_cached))(
            functools.partial(decode, columns=self.columns)
        )

    def read_footer(self, name: str) -> Footer | None:
        """Return the footer of a file, with the columns that the settings name; None for a bad file that is skipped."""
        try:
            footer = read_footer(name, self.parser.fields)
        except DamagedFile as error:
            self.bad_lines.add(name, 0, str(error))
            return None
        check_names(footer.names, name)
        kinds = {}
        for field in self.parser.fields:
            slot = field
            if field not in footer.values:
                slot = re.sub(r'/\d+(?=/|$)', '/0', field)
            if field == self.parser.references and f'{slot}/0' in footer.values:
                slot += '/0'
            kinds[field] = footer.values.get(slot)
        self.parser.check_columns(name, [*footer.values, *filter(kinds.get, kinds)])
        for field, kind in kinds.items():
            if kind != 'text' and (kind != 'number' or not self.parser.templates):
                raise Refused(f'{name}: column {field!r} is {kind}: name a column of texts')
        if not any(group.num_rows for group in footer.groups):
            self.bad_lines.add(name, 0, EMPTY_FILE)
        return footer

    def compute_order(self, num_items: int, seed: int | str, epoch: int) -> np.ndarray:
        order = super().compute_order(num_items, seed, epoch)
        group_order = permutation(len(self.groups), 'row groups', seed, epoch)
        windows = np.zeros(len(self.groups), np.int64)
        windows[group_order] = np.cumsum(self.num_bytes[group_order]) // WINDOW_BYTES
        window_of_block = np.repeat(windows, self.blocks_per_group)
        return order[np.argsort(window_of_block[order], kind='stable')]

    def read(self, block: int) -> list[Record | None]:
        index, i = self.locate(block)
        group = self.groups[index]
        first = i * self.rows_per_block
        try:
            rows = rows_of(group, self.decode(group), first, self.rows_per_block)
        except DamagedFile as error:
            self.bad_lines.num_read += group.num_rows
            self.bad_lines.add(group.path, group.first_row, str(error), num_lines=group.num_rows)
            return []
        records = []
        for i, row in enumerate(rows, start=group.first_row + first):
            records.append(self.bad_lines.record(group.path, i, self.parser.fields_of_row, row))
        return records
