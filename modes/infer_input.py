"""The input of `--mode=infer`: the split of a task, or the lines of a file.

Examples of a task are cut as in training. Lines of a file that are too long are refused, unless
`--trim` is given. Source: T5X t5x/infer.py. Imports no jax.
"""

import codecs
import dataclasses
import gzip
import itertools
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

import tasks
import tasks.open
from messages import Refused, named
from run.examples import RECORDS_AT_ONCE, RecordExample
from sources import files, tables, value_at
from sources.heads import check_head, open_unzipped, read_head
from sources.templates import Template
from stream import TokenizedTask
from tasks.names import look_up, own_features
from vocabulary import Ends, Vocabulary

STANDARD_INPUT = '-'
BYTES_AT_ONCE = 1 << 20  # the largest read from standard input


def open_tasks(config: ConfigDict, vocabulary: Vocabulary) -> Iterator[TokenizedTask]:
    """Open a task, or each task of a mixture; `config`: config.data."""
    for name, task in tasks.open.tasks_of(tasks.open.find(config)).items():
        if not task.takes_inputs:
            raise Refused(f'data.task={name!r} has no inputs: name another, or a file with --input')
        yield TokenizedTask(tasks.open.open_task(task, config), config, vocabulary)


def with_templates(config: ConfigDict) -> ConfigDict:
    """Return config.data with the templates of its task, unless it has its own."""
    row = None if config.inputs else look_up(config.task, config.module)
    if not isinstance(row, tasks.Task) or not row.templates:
        return config
    copy = config.copy_and_resolve_references()
    copy.inputs = row.inputs
    if not copy.targets and not copy.references:
        copy.update(targets=row.targets, references=row.references)
    return copy


@dataclasses.dataclass
class FileExamples:
    """The lines of a file: JSON objects, rows of a table or of Parquet, or texts that are inputs.

    The inputs and targets of an object or row follow data.inputs and data.targets, if they are set, else its
    fields of that name. Standard input is JSON Lines if '{' is its first character that is not blank.
    """

    path: str
    config: ConfigDict  # config.data
    vocabulary: Vocabulary
    needs_targets: bool
    trim: bool
    fields: Sequence[str] = ()  # read in addition to the templates' fields; 'all' for all

    def __post_init__(self) -> None:
        path = self.path
        config = self.config
        self.title = path
        self.kind = config.kind or files.kind_of(path)
        if path == STANDARD_INPUT:
            self.title = 'standard input'
            self.name = 'stdin'
            if sys.stdin is None or self.kind == 'parquet':
                raise Refused('--input=-: stdin is closed, or cannot be Parquet: name a file')
            standard_input: Any = sys.stdin.buffer
            head = standard_input.peek(1)
            if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b'{':
                self.kind = config.kind or 'jsonl'
        else:
            [self.path, *others] = files.matching_files(path)
            if others:
                raise Refused(f'--input={path} matches {len(others) + 1} files: name one')
            self.name = Path(self.path.removesuffix('.gz')).stem
            head = read_head(self.path)
        check_head(self.title, self.kind, head)
        tables.check_delimiter(config, {self.kind: self.title})
        self.delimiter = tables.delimiter_of(config)
        self.kind = tables.kind_with_delimiter(self.kind, self.delimiter)
        self.unit = 'row' if self.kind == 'parquet' else 'line'
        targets = config.targets or '{targets}'
        if config.references:
            targets = f'{config.references[:-1]}/0}}'  # the first
        self.templates = {
            'inputs': Template('data.inputs', config.inputs or '{inputs}'),
            'targets': Template('data.targets', targets),
        }
        self.text_field = config.text_field if config.inputs else 'inputs'  # for a line of text
        self.numbers = own_features(config).numbers
        self.header: list[str] = []  # the names of a table's columns
        self.has_more = False  # whether more lines of standard input have arrived

    def __iter__(self) -> Iterator[RecordExample]:
        rows: Iterator[tuple[int, str | dict]] = self.lines()
        if self.kind == 'parquet':
            rows = self.parquet_rows()
        # Typed or piped lines are answered as they arrive.
        num_at_once = 1 if self.path == STANDARD_INPUT else RECORDS_AT_ONCE
        while group := list(itertools.islice(rows, num_at_once)):
            yield from self.examples_of(group)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield the numbered lines of a file, which may be gzipped, without a table's header.

        A row of CSV is one line, even if its quoted fields hold newlines.
        """
        number = 0
        try:
            for number, content in tables.whole_rows(self.numbered_lines(), self.kind):
                line = content.decode('utf-8-sig').removesuffix('\n').removesuffix('\r')
                if self.kind in ('csv', 'tsv') and not self.header:
                    self.header = tables.header_of(line, self.kind, self.delimiter, self.title)
                else:
                    yield number, line
        except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            rule = 'write it in UTF-8, or copy it again'
            raise Refused(
                f'line {number} of {self.title} cannot be read ({error}): {rule}'
            ) from None

    def numbered_lines(self) -> Iterator[tuple[int, bytes]]:
        if self.path == STANDARD_INPUT:
            yield from enumerate(self.arriving_lines(), start=1)
            return
        with open_unzipped(self.path, files.SEQUENTIAL_READ_AHEAD) as file:
            yield from tables.numbered_lines(file)

    def arriving_lines(self) -> Iterator[bytes]:
        """Yield the lines of standard input; `has_more` tells whether the next one has arrived."""
        last = b''
        while content := sys.stdin.buffer.read1(BYTES_AT_ONCE):  # type: ignore[union-attr]
            *lines, last = (last + content).split(b'\n')
            for i, line in enumerate(lines, start=1):
                self.has_more = i < len(lines)
                yield line + b'\n'
        if last:
            yield last

    def parquet_rows(self) -> Iterator[tuple[int, dict]]:
        """Yield the rows of Parquet with their numbers: the fields of the templates, and `fields`."""
        from sources import parquet  # late: pyarrow takes a while

        fields: list[str] = []  # all
        if 'all' not in self.fields and not self.numbers:
            fields = [*self.templates['inputs'].fields, *self.templates['targets'].fields]
            fields += self.fields
        try:
            footer = parquet.read_footer(self.path, fields)
            if not footer.columns:
                others = sorted(footer.values.keys() - {*fields})
                tables.check_columns(self.title, others, fields[:1], 'correct --config.data.inputs')
            tables.check_names(footer.names, self.title)
            for group in footer.groups:
                table = parquet.decode(group, footer.columns)
                for first in range(0, group.num_rows, RECORDS_AT_ONCE):
                    rows = parquet.rows_of(group, table, first, RECORDS_AT_ONCE)
                    yield from enumerate(rows, start=group.first_row + first)
        except parquet.DamagedFile as error:
            raise Refused(f'{self.title}: {error}') from None

    def examples_of(self, rows: Sequence[tuple[int, str | dict]]) -> Iterator[RecordExample]:
        fields = []
        texts = []
        numbers = []
        for number, row in rows:
            with named(f'{self.unit} {number} of {self.title}'):
                fields.append(self.fields_of(row))
                texts.append(self.texts_of(fields[-1]))
                numbers.append(self.numbers_of(fields[-1]))
        every_text = [text for row_texts in texts for text in row_texts.values()]
        every_ids = iter(self.vocabulary.encode_as_arrays(every_text, glued_sentinels=True))
        for i, (number, _) in enumerate(rows):
            ids = {}
            for name in texts[i]:
                title = f'the {name} in {self.unit} {number} of {self.title}'
                text_ids = next(every_ids)
                length = self.config.lengths[name]
                ids[name] = ended(title, text_ids, self.vocabulary.ends, name, length, self.trim)
            yield RecordExample(
                fields[i] | texts[i], ids['inputs'], ids.get('targets'), numbers=numbers[i]
            )

    def fields_of(self, row: str | dict) -> dict:
        """Return the fields of a line, or of a row of Parquet."""
        fields: dict = {}
        if isinstance(row, dict):
            fields = tables.as_json(row)
        elif row.strip():
            fields = tables.fields_of_line(
                row, self.kind, self.text_field, self.header, self.delimiter
            )
        if self.kind != 'jsonl' and not any(fields.values()):
            raise Refused('no text: remove it, each line or row is an example')
        return fields

    def numbers_of(self, fields: dict) -> dict[str, float]:
        """Return the numbers in a line that the task's objective uses."""
        numbers = {}
        for name in self.numbers:
            if name in fields:
                try:
                    numbers[name] = float(fields[name])
                except (TypeError, ValueError) as error:
                    raise Refused(f'{name} is {fields[name]!r:.40}: write a number') from error
        return numbers

    def texts_of(self, fields: dict) -> dict[str, str]:
        """Return the inputs of a line and, if it has them, its targets. Numbers are written as in JSON."""
        texts = {}
        for name, template in self.templates.items():
            remedy = f'add it, or correct --config.data.{name}, data.kind or data.delimiter'
            values = {}
            for field in template.fields:
                value = value_at(fields, field)
                if tables.is_number(value):
                    values[field] = tables.text_of_number(value)
                elif isinstance(value, str) or name == 'inputs' or self.needs_targets:
                    values[field] = tables.json_string(fields, field, remedy)
            if values.keys() >= {*template.fields}:
                texts[name] = template.fill(values)
        return texts


def ended(
    title: str, ids: Sequence[int] | np.ndarray, ends: Ends, name: str, length: int, trim: bool
) -> np.ndarray:
    """Return ids with their ends, int32. With `trim`, cut them to `length`."""
    begin, end = getattr(ends, name)
    with_ends = [*begin, *ids, *end]
    if len(with_ends) > length and not trim:
        raise Refused(
            f'{title} have {len(with_ends)} tokens, EOS included, more than data.lengths.{name}={length}: use --trim'
        )
    return np.array([*with_ends[: min(len(with_ends), length) - len(end)], *end], np.int32)
