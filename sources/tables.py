"""Lines as records: JSON objects, rows of CSV and TSV, and plain lines.

The first row of a table names its columns. In CSV, a field may be quoted; in TSV, a quote is a plain
character. A table with data.delimiter is CSV with that delimiter, whatever its name.
"""

import codecs
import contextlib
import functools
import gzip
import importlib.util
import io
import itertools
import json
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from messages import Refused, first_ten, named
from sources import BadLines, Record, names_of_values, value_at
from sources.files import MAX_LINE_BYTES, is_gzipped, kind_of
from sources.heads import open_unzipped
from sources.templates import fields_named, templates_of

# A longer row of CSV has an unclosed quote.
MAX_ROW_BYTES = 1 << 24


class Number(float):
    """A number of JSON that keeps its text: 1.50, 1e5, or 20 digits."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text


def number_of(text: str) -> float:
    if text == '-0':
        return Number(text)
    return int(text)


JSON = json.JSONDecoder(
    parse_float=Number,
    parse_int=number_of,
    # Python also writes NaN, Infinity and -Infinity, which JSON lacks: they are missing values, like null.
    parse_constant=lambda name: None,
)


class LineParser:
    """Turns a line into a record of the fields that the settings name, or of all with `whole_records`."""

    def __init__(self, data_group, bad_lines: BadLines, whole_records: bool = False):
        self.kind = data_group.kind
        self.delimiter = delimiter_of(data_group)
        self.text_field = data_group.text_field
        self.templates = templates_of(data_group)
        self.references = data_group.references[1:-1]  # the field that is a list
        self.bad_lines = bad_lines
        self.whole_records = whole_records
        self.fields = () if whole_records else fields_named(data_group)
        keys = [template.key for template in self.templates.values()] or ['data.text_field']
        if self.templates and data_group.weight:
            keys.append('data.weight')
        self.remedy = f'correct {" or ".join(keys)}'  # for a slot that a record does not fill
        self._kinds: dict[str, str] = {}  # by file; every line needs its kind
        self._headers: dict[str, list[str]] = {}

    def kind_of(self, path: str) -> str:
        """Return the kind of a file: data.kind, or by the file's name if that is ''."""
        if path not in self._kinds:
            self._kinds[path] = kind_with_delimiter(self.kind or kind_of(path), self.delimiter)
        return self._kinds[path]

    def header(self, path: str) -> list[str]:
        """Return the names of the columns of a table."""
        if path not in self._headers:
            kind = self.kind_of(path)
            line = b''
            with (
                contextlib.suppress(EOFError, zlib.error, gzip.BadGzipFile),
                open_unzipped(path) as file,
            ):
                _, line = next(whole_rows(numbered_lines(file), kind), (0, b''))
            self._headers[path] = header_of(line, kind, self.delimiter, title=path)
        return self._headers[path]

    def __call__(self, path: str, position: int, line: bytes) -> Record | None:
        """Return the record of a line; None for a blank line and for a bad one that is skipped.

        `position` is the offset of the line in bytes, or in a gzipped file its number.
        """
        # An unclosed quote makes thousands of lines one row.
        num_lines = max(line.count(b'\n'), 1)
        return self.bad_lines.record(
            path, position, self.fields_of, path, position, line, num_lines=num_lines
        )

    def fields_of_row(self, values: dict) -> dict | None:
        """Return the fields of a row of Parquet, as for a JSON object."""
        return self.fields_named_in(as_json(values))

    def fields_of(self, path: str, position: int, content: bytes) -> dict | None:
        """Return the fields of a line; None for a blank line and for the header of a table."""
        kind = self.kind_of(path)
        if kind == 'text' and len(content) > MAX_LINE_BYTES:
            raise Refused(
                f'it has more than {MAX_LINE_BYTES:,} bytes: cut the lines with `fold -s -w 2000 FILE`'
            )
        is_first = position < 2 and position == int(is_gzipped(path))
        line = decoded(content.removeprefix(codecs.BOM_UTF8))  # also within concatenated files
        if not line.strip() or (is_first and kind in ('csv', 'tsv')):
            return None
        if kind == 'text' and '\0' in line:
            raise Refused('it holds zero bytes: copy the file again')
        header: list[str] = []
        if kind in ('csv', 'tsv'):
            header = self.header(path)
        values = fields_of_line(line, kind, self.text_field, header, self.delimiter)
        if kind == 'jsonl':
            if self.whole_records and '\\u' in line:
                check_encodes(json.dumps(values, ensure_ascii=False))
            return self.fields_named_in(values)
        fields = {field: values[field].strip() for field in self.fields or values}
        return fields if any(fields.values()) else None

    def fields_named_in(self, content: dict) -> dict | None:
        """Return the fields of a JSON object, or of a row of Parquet; None if all are blank."""
        fields = content
        if not self.whole_records:
            fields = {}
            for field in self.fields:
                value = value_at(content, field)
                if field == self.references and isinstance(value, list):
                    texts = {f'{field}/{i}': text for i, text in enumerate(value)}
                    fields[field] = [json_string(texts, x, self.remedy).strip() for x in texts]
                elif self.templates and is_number(value):
                    fields[field] = text_of_number(value)
                else:
                    fields[field] = json_string(content, field, self.remedy).strip()
        return fields if any(fields.values()) else None

    def check_columns(self, path: str, columns: Collection[str]) -> None:
        """Raise Refused for a file without a column that the settings name."""
        remedy = f'{self.remedy}, data.kind (now {self.kind_of(path)!r}) or data.delimiter'
        check_columns(path, columns, self.fields, remedy)


def delimiter_of(data_group) -> str:
    """Return the character that data.delimiter names, '' for none."""
    return {'tab': '\t', '\\t': '\t'}.get(data_group.delimiter, data_group.delimiter)


def kind_with_delimiter(kind: str, delimiter: str) -> str:
    """Return the kind of a file, which is CSV for a TSV table with a delimiter."""
    return 'csv' if delimiter and kind == 'tsv' else kind


def check_delimiter(data_group, files: Mapping[str, str]) -> None:
    """Raise Refused if data.delimiter applies to no table. `files`: {kind: a file of this kind}."""
    if data_group.delimiter and ('text' in files or not files.keys() & {'csv', 'tsv'}):
        file = files.get('text') or next(iter(files.values()))
        raise Refused(
            f"data.delimiter={data_group.delimiter!r} is for tables, and {file} is not one: set data.kind='csv'"
        )


def decoded(content: bytes, where: str = '') -> str:
    """Return bytes as text."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Refused(f'byte {error.start + 1}{where} is not UTF-8; convert the file') from None


def fields_of_line(
    line: str, kind: str, text_field: str, header: list[str], delimiter: str
) -> dict:
    """Return the fields of a JSON object or of a row of a table with `header`; a plain line is `text_field`."""
    if kind == 'text':
        return {text_field: line}
    if kind == 'jsonl':
        try:
            content = JSON.decode(line.strip(' \t\r\n'))  # JSON's spaces
        except (ValueError, RecursionError) as error:
            raise Refused(f'not JSON: {error}; correct it') from None
        if not isinstance(content, dict):
            raise Refused(f'{line.strip()!r:.40} is not a JSON object; correct it')
        return content
    row = table_row(line, kind, delimiter)
    if len(row) != len(header):
        raise Refused(f'{len(row)} columns, and the header has {len(header)}; correct the row')
    return dict(zip(header, row, strict=True))


def is_number(value: Any) -> bool:
    """Return whether a value is a number that JSON has: NaN and the infinities are missing values."""
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def text_of_number(value: Any) -> str:
    if isinstance(value, Number):
        return str(value)
    return json.dumps(value)  # true, not True


def as_json(value: Any, name: str = '') -> Any:
    """Return a value of Parquet, called `name` in its record, as a value of JSON."""
    if isinstance(value, bytes):
        return decoded(value, f' of field {name!r}')
    if isinstance(value, float) and not is_number(value):
        return None
    prefix = f'{name}/' if name else ''
    if isinstance(value, dict):
        return {key: as_json(x, f'{prefix}{key}') for key, x in value.items()}
    if isinstance(value, list):
        return [as_json(x, f'{prefix}{i}') for i, x in enumerate(value)]
    return value


def json_string(content: dict, field: str, remedy: str) -> str:
    """Return a field that is a string."""
    text = value_at(content, field)
    if not isinstance(text, str):
        names = ', '.join(map(repr, itertools.islice(names_of_values(content), 10))) or 'none'
        raise Refused(f'field {field!r} is {text!r:.40}, not a string, of fields {names}; {remedy}')
    check_encodes(text)
    return text


def check_encodes(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can write half a surrogate pair, as \ud800
        raise Refused('a field holds half a surrogate pair; correct it') from None


def header_of(line: str | bytes, kind: str, delimiter: str, title: str) -> list[str]:
    """Return the names of the columns in the first line of a table, '' for a column without one."""
    with named(f'line 1 of {title}'):
        if isinstance(line, bytes):
            line = decoded(line.removeprefix(codecs.BOM_UTF8))
        names = table_row(line, kind, delimiter)
    check_names(names, f'line 1 of {title}')
    return names


def check_names(names: list[str], title: str) -> None:
    """Raise Refused if two columns have the same name, or none has one."""
    with_names = list(filter(None, names))
    if not with_names or len(set(with_names)) < len(with_names):
        raise Refused(
            f'{title} has the columns {first_ten(list(map(repr, names)))}: name each differently'
        )


def check_columns(title: str, columns: Collection[str], fields: Iterable[str], remedy: str) -> None:
    """Raise Refused for a table, or another file, that lacks one of `fields`."""
    for field in fields:
        if field not in columns:
            names = first_ten([repr(column) for column in columns])
            raise Refused(f'{title} has no column {field!r}, it has {names}: {remedy}')


@functools.cache
def csv_module() -> Any:
    """Return a private csv module, whose limit does not change the limit of the process."""
    spec = importlib.util.find_spec('_csv')
    assert spec and spec.loader
    csv = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(csv)
    csv.field_size_limit(2**31 - 1)
    return csv


def table_row(line: str, kind: str, delimiter: str) -> list[str]:
    row = line.removesuffix('\n').removesuffix('\r')
    if kind == 'tsv':
        columns = row.split('\t')
    else:
        csv = csv_module()
        file = io.StringIO(row, newline='')
        try:
            reader = csv.reader(
                file, delimiter=delimiter or ',', skipinitialspace=True, strict=True
            )
            rows = list(reader)
            if len(rows) > 1:
                raise csv.Error('a quote or a carriage return (CR) in a field that is not quoted')
        except csv.Error as error:
            raise Refused(f'not CSV: {error}; quote the field, or set data.delimiter') from None
        columns = rows[0] if rows else ['']
    return [column.strip() for column in columns]


def numbered_lines(file: BinaryIO | io.BufferedIOBase) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of the lines of a file, from 1 on."""
    return enumerate(iter(file.readline, b''), start=1)


def whole_rows(lines: Iterable[tuple[int, bytes]], kind: str) -> Iterator[tuple[int, bytes]]:
    """Yield (position, row). In CSV, join lines if a quoted field holds a newline.

    A row ends after more than MAX_ROW_BYTES: it has an unclosed quote.
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
