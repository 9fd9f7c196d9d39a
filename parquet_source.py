"""Parquet files: their columns, their row groups and the rows in these. Imports no jax.

pyarrow reads them (extra `parquet`). A row group is the least that it decodes.
"""

import collections
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import paths

MAX_GROUP_BYTES = 256 << 20  # of the columns of a row group that are read, uncompressed
MAX_CACHED_BYTES = 512 << 20  # of decoded row groups that are kept


class DamagedFile(Exception):
    """A file, or a row group of it, that pyarrow cannot read."""


class RowGroup(NamedTuple):
    """Rows that are stored together. `num_bytes` are those of the columns that are read."""

    path: str
    number: int  # in the file, from 0
    first_row: int  # of the file; the first one is 1
    num_rows: int
    num_bytes: int


class Footer(NamedTuple):
    """What the footer of a file says: {column: 'text', 'number' or another type}, row groups."""

    names: list[str]  # of the columns
    columns: dict[str, str]
    groups: list[RowGroup]


def read_footer(path: str, columns: Sequence[str]) -> Footer:
    """Return what the footer of a file says; of `columns`, those that it has, sizes count.

    Raises DamagedFile, and ValueError for a row group that is too large to decode and without
    pyarrow.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path} needs pyarrow: pip install -e '.[parquet]'") from error
    with paths.open_file(path) as stream, damage_named('no Parquet'):
        file = pyarrow.parquet.ParquetFile(stream)
        types = {field.name: kind_of_type(field.type) for field in file.schema_arrow}
        groups = list(row_groups(path, file.metadata, columns))
    return Footer(file.schema_arrow.names, types, groups)


def columns_that_are_read(path: str) -> tuple[str, ...]:
    """Return the columns of a file that hold texts or numbers."""
    columns = read_footer(path, columns=()).columns
    return tuple(name for name, kind in columns.items() if kind in ('text', 'number'))


def kind_of_type(arrow_type: Any) -> str:
    """Return 'text' or 'number' for a type that is read, else the name of the type."""
    import pyarrow.types

    if pyarrow.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    name = str(arrow_type)
    if name.removeprefix('large_').removesuffix('_view') in ('string', 'binary'):
        return 'text'
    is_number = pyarrow.types.is_integer(arrow_type) or pyarrow.types.is_floating(arrow_type)
    if is_number or pyarrow.types.is_boolean(arrow_type):
        return 'number'
    return name


def row_groups(path: str, metadata: Any, columns: Sequence[str]) -> Iterator[RowGroup]:
    """Yield the row groups of a file. Raises ValueError for one that is too large."""
    first_row = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        num_bytes = 0
        for i in range(group.num_columns):
            column = group.column(i)
            if column.path_in_schema in columns:
                num_bytes += column.total_uncompressed_size
        if num_bytes > MAX_GROUP_BYTES:
            raise ValueError(
                f'{path}: row group {number + 1} has {num_bytes:,} bytes in the columns '
                f'{", ".join(map(repr, columns))}, and at most {MAX_GROUP_BYTES:,} are decoded at '
                'once: write the file again with fewer rows in a group (row_group_size of pandas '
                'and pyarrow)'
            )
        yield RowGroup(path, number, first_row, group.num_rows, num_bytes)
        first_row += group.num_rows


class RowGroups:
    """Reads rows of `columns`, and keeps the row groups that it decoded last.

    Threads may share it.
    """

    def __init__(self, columns: Sequence[str]):
        self.columns = columns
        self._kept: collections.OrderedDict[RowGroup, list] = collections.OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def rows(self, group: RowGroup, first: int, num_rows: int) -> list[dict[str, Any]]:
        """Return {column: value} of rows of a group: bytes, numbers and None.

        Raises DamagedFile.
        """
        values = []
        for column in self._decoded(group):
            indices = column.indices.slice(first, num_rows)
            values.append(column.dictionary.take(indices).to_pylist())
        return [dict(zip(self.columns, row, strict=True)) for row in zip(*values, strict=True)]

    def _decoded(self, group: RowGroup) -> list:
        """Return the columns of a row group, which `decode` returns."""
        with self._lock:
            if group not in self._kept:
                self._kept[group] = decode(group, self.columns)
                self._num_bytes += size_of(self._kept[group])
            self._kept.move_to_end(group)
            while self._num_bytes > MAX_CACHED_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._num_bytes -= size_of(oldest)
            return self._kept[group]


def size_of(columns: list) -> int:
    """Return the number of bytes of decoded columns."""
    return sum(column.nbytes for column in columns)


def decode(group: RowGroup, columns: Sequence[str]) -> list:
    """Return columns of a row group as pyarrow.DictionaryArray: a value that is repeated is kept once.

    So they take about as much memory as in the file. Raises DamagedFile.
    """
    import pyarrow.parquet

    with (
        paths.open_file(group.path) as stream,
        damage_named(f'row group {group.number + 1} is damaged'),
    ):
        file = pyarrow.parquet.ParquetFile(
            stream, read_dictionary=columns, page_checksum_verification=True
        )
        table = file.read_row_group(group.number, columns=columns, use_threads=False)
        return [dictionary_array(table.column(name)) for name in columns]


def dictionary_array(column: Any) -> Any:
    """Return a column with bytes for texts, which may not be UTF-8."""
    import pyarrow

    if not pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    column = column.unify_dictionaries().combine_chunks()
    values = column.dictionary
    if kind_of_type(values.type) == 'text':
        values = values.cast(pyarrow.large_binary())
    elif values.type == pyarrow.float32():
        values = values.cast(pyarrow.string()).cast(pyarrow.float64())  # 3.8, not 3.79999995
    return pyarrow.DictionaryArray.from_arrays(column.indices, values)


@contextlib.contextmanager
def damage_named(what: str) -> Iterator[None]:
    """Raise DamagedFile for what pyarrow cannot read."""
    import pyarrow

    try:
        yield
    except paths.ReadError:
        raise
    except (pyarrow.ArrowException, OSError) as error:
        cause = ' '.join(str(error).split())
        raise DamagedFile(f'{what} ({cause}); copy the file again') from error
