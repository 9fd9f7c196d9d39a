"""Lines as records: JSON objects, rows of CSV and TSV, and plain lines.

The first row of a table names its columns.
"""

import collections
import csv
import functools
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator
from typing import IO, Any

from configs import check as settings
from sources import BadLines, Record
from sources.files import is_gzipped, kind_of
from sources.heads import open_unzipped
from sources.templates import fields_named, templates_of

csv.field_size_limit(2**31 - 1)

# A longer row of CSV has a quote that nobody closed.
MAX_ROW_BYTES = 1 << 24
# Python also writes NaN, Infinity and -Infinity, which JSON does not have: missing values, as null.
JSON = json.JSONDecoder(parse_constant=lambda name: None)


class LineParser:
    """Makes a record of a line: the fields that the settings name, all with `whole_records`."""

    def __init__(self, config, bad_lines: BadLines, whole_records: bool = False):
        self.kind = config.kind
        self.text_field = config.text_field
        self.templates = templates_of(config)
        self.bad_lines = bad_lines
        self.whole_records = whole_records
        self.fields = () if whole_records else fields_named(config)
        self.integers: Collection[str] = ()  # of Parquet: parquet.integer_columns

    def kind_of(self, path: str) -> str:
        """Return how a file is read: as data.kind, or by its name if that is ''."""
        return self.kind or kind_of(path)

    def __call__(self, path: str, position: int, line: bytes) -> Record | None:
        """Return the record of a line; None for a blank line and for a bad one that is skipped.

        `position` is the offset of the line in bytes, in a gzipped file the number of the line.
        """
        # A quote that is not closed makes thousands of lines one row.
        num_lines = max(line.count(b'\n'), 1)
        return self.bad_lines.record(
            path, position, self.fields_of, path, position, line, num_lines=num_lines
        )

    def fields_of_row(self, values: dict[str, Any]) -> dict[str, Any] | None:
        """Return the fields of a row of Parquet, as of a JSON object."""
        for field, value in values.items():
            if isinstance(value, bytes):
                values[field] = decoded(value, 'utf-8', f' of field {field!r}')
            elif isinstance(value, float) and not is_number(value):
                values[field] = None
        return self.fields_named_in(values)

    def fields_of(self, path: str, position: int, content: bytes) -> dict[str, Any] | None:
        """Return the fields of a line; None for a blank line and for the header of a table."""
        kind = self.kind_of(path)
        is_first = position < 2 and position == int(is_gzipped(path))
        line = decoded(content, 'utf-8-sig' if is_first else 'utf-8')
        if not line.strip() or (is_first and kind in ('csv', 'tsv')):
            return None
        if kind == 'text':
            if '\0' in line:
                raise ValueError('it holds zero bytes: copy the file again')
            return {self.text_field: line.strip()}
        header = table_header(path, kind) if kind in ('csv', 'tsv') else []
        found = fields_of_line(line, kind, self.text_field, header)
        if kind == 'jsonl':
            if self.whole_records and '\\u' in line:
                check_encodes(found)
            return self.fields_named_in(found)
        fields = {field: found[field] for field in self.fields or found}
        return fields if any(fields.values()) else None

    def fields_named_in(self, content: dict[str, Any]) -> dict[str, Any] | None:
        """Return the fields of a JSON object, or of a row of Parquet; None if all are blank."""
        fields = content
        if not self.whole_records:
            fields = {field: self.json_text(content, field) for field in self.fields}
        return fields if any(fields.values()) else None

    def check_columns(self, path: str, columns: Collection[str]) -> None:
        """Raise ValueError for a table without a column that the settings name."""
        setting = 'data.inputs or data.targets' if self.templates else 'data.text_field'
        check_columns(path, columns, self.fields, remedy=f'correct {setting}')

    def json_text(self, content: dict, field: str) -> str:
        """Return a field of a JSON object as text."""
        remedy = 'set data.text_field'
        if self.templates:
            remedy = 'correct data.inputs and data.targets'
            if is_number(content.get(field)):  # as JSON writes it
                return json.dumps(content[field])
        return json_string(content, field, remedy).strip()


def decoded(content: bytes, encoding: str, where: str = '') -> str:
    """Return bytes as text. Raises ValueError for what is not UTF-8."""
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f'byte {error.start + 1}{where} is not UTF-8; convert the file') from None


def check_text(title: str, fields: Iterable[str], text_field: str, remedy: str) -> None:
    """Raise ValueError if a template names another field than `text_field`, of a line of text."""
    for field in fields:
        if field != text_field:
            raise ValueError(
                f'{title} is read as lines of text, each the field {text_field!r}, and a template names '
                f"{field!r}: set data.kind ('csv', 'tsv', 'jsonl' or 'parquet'), or {remedy}"
            )


def fields_of_line(line: str, kind: str, text_field: str, header: list[str]) -> dict[str, Any]:
    """Return the fields of a JSON object or a row of a table; a plain line is `text_field`.

    `header`: the columns of a table. Raises ValueError for what is wrong with the line.
    """
    if kind == 'text':
        return {text_field: line}
    if kind == 'jsonl':
        try:
            content = JSON.decode(line.strip(' \t\r\n'))  # JSON's spaces
        except (ValueError, RecursionError) as error:
            raise ValueError(f'no JSON: {error}; correct it') from None
        if not isinstance(content, dict):
            raise ValueError(
                f'{line.strip()!r:.40} is no JSON object; write {{"{text_field}": ...}}'
            )
        return content
    row = table_row(line, kind)
    if len(row) != len(header):
        raise ValueError(f'{len(row)} columns, and the header has {len(header)}; correct the row')
    return dict(zip(header, row, strict=True))


def is_number(value: Any) -> bool:
    """Return whether a value is a number that JSON has: NaN and the infinities are missing values."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def json_string(content: dict, field: str, remedy: str) -> str:
    """Return a field that is a string. Raises ValueError for any other."""
    text = content.get(field)
    if not isinstance(text, str):
        names = ', '.join(repr(name) for name in list(content)[:10]) or 'none'
        if text is None and field in content:
            remedy += ', or fill it in: null and NaN are missing values'
        raise ValueError(f'field {field!r} is {text!r:.40}, no string, of fields {names}; {remedy}')
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can write half a surrogate pair, as \ud800
        raise ValueError(f'field {field!r} holds half a surrogate pair; correct it') from None
    return text


def check_encodes(content: dict) -> None:
    """Raise ValueError for a JSON object of which a text is not UTF-8."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON can write half a surrogate pair, as \ud800
        raise ValueError('a field holds half a surrogate pair; correct it') from None


@functools.lru_cache(maxsize=100_000)
def table_header(path: str, kind: str) -> list[str]:
    """Return the names of the columns of a table."""
    with open_unzipped(path) as file:
        for _, line in whole_rows(numbered_lines(file), kind):
            return header_of(line, kind, title=path)
    return []


def header_of(line: str | bytes, kind: str, title: str) -> list[str]:
    """Return the names of the columns in the first line of a table; those without a name are ''."""
    try:
        if isinstance(line, bytes):
            line = decoded(line, 'utf-8-sig')
        names = table_row(line, kind)
    except ValueError as error:
        raise ValueError(f'line 1 of {title}: {error}') from None
    check_names(names, f'line 1 of {title}')
    return names


def check_names(names: list[str], title: str) -> None:
    """Raise ValueError if two columns have the same name, or none has one."""
    counts = collections.Counter(filter(None, names))
    if not counts or max(counts.values()) > 1:
        raise ValueError(
            f'{title} has the columns {settings.first_ten(list(map(repr, names)))}: give each a name of its own'
        )


def check_columns(title: str, columns: Collection[str], fields: Iterable[str], remedy: str) -> None:
    """Raise ValueError for a table that has not all of `fields`."""
    for field in fields:
        if field not in columns:
            found = settings.first_ten([repr(column) for column in columns])
            raise ValueError(f'{title} has no column {field!r}, it has {found}: {remedy}')


def table_row(line: str, kind: str) -> list[str]:
    """Return the columns of a row. In CSV a field may be quoted, in TSV a quote is a character."""
    row = line.removesuffix('\n').removesuffix('\r')
    if kind == 'tsv':
        columns = row.split('\t')
    else:
        file = io.StringIO(row, newline='')
        try:
            rows = list(csv.reader(file, skipinitialspace=True, strict=True))
            if len(rows) > 1:
                raise csv.Error('a quote or a carriage return (CR) in a field that is not quoted')
        except csv.Error as error:
            raise ValueError(f'no CSV: {error}; quote the field, and double its quotes') from None
        columns = rows[0] if rows else ['']
    return [column.strip() for column in columns]


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
