"""What `--mode=infer` reads: the split of a task, or the lines of a file.

Examples of a task are cut as in training. Lines of a file that are too long are refused, unless the
user says that they may be cut. Source: T5X t5x/infer.py. Imports no jax.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import queue
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from absl import logging
from ml_collections import ConfigDict

import tasks
import tasks.open
from messages import Refused, named
from run.examples import RECORDS_AT_ONCE, Example
from sources import files, tables, value_at
from sources.heads import check_head, open_unzipped, read_head
from sources.templates import Template
from stream import TokenizedTask
from tasks.names import look_up
from vocabulary import Vocabulary

STANDARD_INPUT = '-'


def open_tasks(config: ConfigDict, vocabulary: Vocabulary) -> Iterator[TokenizedTask]:
    """Open a task, or each task of a mixture; `config`: config.data."""
    for name, task in tasks.open.tasks_of(tasks.open.find(config)).items():
        if not task.takes_inputs:
            raise Refused(f'data.task={name!r} has no inputs: name another, or a file with --input')
        opened = tasks.open.opened_task(task, tasks.open.open_task(task, config))
        yield TokenizedTask(opened, config, vocabulary)


def with_templates(config: ConfigDict) -> ConfigDict:
    """Return config.data with the templates of its task, unless it has its own."""
    row = None if config.inputs else look_up(config.task, config.module)
    if not isinstance(row, tasks.Task) or not row.templates:
        return config
    own = config.copy_and_resolve_references()
    own.inputs = row.inputs
    if not own.targets and not own.references:
        own.update(targets=row.targets, references=row.references)
    return own


def as_they_come(examples: Iterable[Example], size: int) -> Iterator[list[Example]]:
    """Yield the examples that are there: at least one and at most `size`."""
    arrived: queue.Queue = queue.Queue(maxsize=size)

    def read() -> None:
        try:
            for example in examples:
                arrived.put(example)
            arrived.put(None)
        except Exception as error:
            arrived.put(error)

    threading.Thread(target=read, daemon=True).start()
    is_open = True
    while is_open:
        group = [arrived.get()]
        while len(group) < size and not arrived.empty():
            group.append(arrived.get())
        is_open = isinstance(group[-1], Example)
        if not is_open:
            error = group.pop()
        if group:
            yield group
    if error is not None:
        raise error


class FileExamples:
    """The lines of a file: JSON objects, rows of a table or of Parquet, or texts that are inputs.

    The inputs and targets of an object or row are those of data.inputs and data.targets, if they
    are set, else its fields of that name. Standard input is JSON Lines if it begins with '{', blanks apart.
    """

    def __init__(
        self,
        path: str,
        config: ConfigDict,
        vocabulary: Vocabulary,
        needs_targets: bool,
        trim: bool,
        fields: Sequence[str] = (),  # read beside those of the templates; 'all' for all
    ):
        self.path = path
        self.title = path
        self.delimiter = tables.delimiter_of(config)
        self.kind = config.kind or files.kind_of(path)
        if path == STANDARD_INPUT:
            self.title = 'standard input'
            self.name = 'stdin'
            if sys.stdin is None or self.kind == 'parquet':
                raise Refused('--input=-: standard input is closed, or is no Parquet: name a file')
            standard_input: Any = sys.stdin.buffer
            head = standard_input.peek(1)
            if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b'{':
                self.kind = config.kind or 'jsonl'
        else:
            [self.path, *others] = files.matching_files(path)
            if others:
                raise Refused(f'--input={path} stands for {len(others) + 1} files: name one')
            self.name = Path(self.path.removesuffix('.gz')).stem
            head = read_head(self.path)
        check_head(self.title, self.kind, head)
        tables.check_delimiter(config, {self.kind: self.title})
        self.kind = tables.kind_with_delimiter(self.kind, self.delimiter)
        self.unit = 'row' if self.kind == 'parquet' else 'line'
        self.text_field = 'inputs'  # the field of a line of text
        if config.inputs and self.kind != 'jsonl':
            self.text_field = config.text_field
        targets = config.targets or '{targets}'
        if config.references:
            targets = f'{config.references[:-1]}/0}}'  # the first
        self.templates = {
            'inputs': Template('data.inputs', config.inputs or '{inputs}'),
            'targets': Template('data.targets', targets),
        }
        if self.kind == 'text':
            self.check_columns([self.text_field], self.templates['inputs'].fields)
        if needs_targets and self.kind == 'text':
            raise Refused(f'--score needs targets, and {self.title} is text: write JSON Lines')
        self.fields = fields
        self.header: list[str] = []  # a table's
        self.has_warned = False
        self.needs_targets = needs_targets
        self.trim = trim
        self.lengths = dict(config.lengths)
        self.vocabulary = vocabulary

    def __iter__(self) -> Iterator[Example]:
        lines: Iterator[tuple[int, str | dict]] = self.lines()
        if self.kind == 'parquet':
            lines = self.parquet_rows()
        # Typed or piped lines are answered as they come.
        num_at_once = 1 if self.path == STANDARD_INPUT else RECORDS_AT_ONCE
        while group := list(itertools.islice(lines, num_at_once)):
            yield from self.items(group)

    def lines(self) -> Iterator[tuple[int, str | dict]]:
        """Yield the lines of a file, which may be gzipped, with their numbers; those of a table without its header.

        A row of CSV is one line, whatever newlines its quoted fields hold.
        """
        opened: contextlib.AbstractContextManager[BinaryIO | io.BufferedIOBase]
        if self.path == STANDARD_INPUT:
            opened = contextlib.nullcontext(sys.stdin.buffer)
        else:
            opened = open_unzipped(self.path, files.SEQUENTIAL_READ_AHEAD)
        number = 0
        try:
            with opened as file:
                for number, content in tables.whole_rows(tables.numbered_lines(file), self.kind):
                    line = content.decode('utf-8-sig').removesuffix('\n').removesuffix('\r')
                    if self.kind in ('csv', 'tsv') and not self.header:
                        self.header = tables.header_of(line, self.kind, self.delimiter, self.title)
                        self.check_columns(self.header, self.templates['inputs'].fields)
                    else:
                        yield number, line
        except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            rule = 'write it in UTF-8, or copy it again'
            raise Refused(
                f'line {number} of {self.title} cannot be read ({error}): {rule}'
            ) from None
        if number == 0:
            raise Refused(f'{self.title} is empty: write a line for each example')

    def check_columns(self, columns: Sequence[str], fields: Sequence[str]) -> None:
        """Raise Refused for a file without a column that the settings name."""
        remedy = f'correct --config.data.inputs, data.kind (now {self.kind!r}) or data.delimiter'
        tables.check_columns(self.title, columns, fields, remedy)

    def parquet_rows(self) -> Iterator[tuple[int, str | dict]]:
        """Yield the rows of Parquet with their numbers: what the templates read of them, and `fields`."""
        from sources import parquet  # pyarrow takes a while

        try:
            named = [*self.templates['inputs'].fields, *self.templates['targets'].fields]
            fields = [*named, *self.fields]
            if 'all' in self.fields:
                fields = []
            footer = parquet.read_footer(self.path, fields)
            if not footer.columns:
                others = [name for name in footer.values if name not in named]
                self.check_columns(others, named[:1])
            tables.check_names(footer.names, self.title)
            for group in footer.groups:
                table = parquet.decode(group, footer.columns)
                for first in range(0, group.num_rows, RECORDS_AT_ONCE):
                    rows = parquet.rows_of(group, table, first, RECORDS_AT_ONCE)
                    yield from enumerate(rows, start=group.first_row + first)
        except parquet.DamagedFile as error:
            raise Refused(f'{self.title}: {error}') from None

    def items(self, lines: Sequence[tuple[int, str | dict]]) -> Iterator[Example]:
        fields = []
        texts = []
        for number, line in lines:
            if self.kind == 'tsv' and not self.has_warned and tables.is_quoted(str(line)):
                self.has_warned = True
                logging.warning('line %d of %s: %s', number, self.title, tables.QUOTED_TSV)
            with named(f'{self.unit} {number} of {self.title}'):
                fields.append(self.fields_of(line))
                texts.append(self.texts_of(fields[-1]))
        ids = {}
        for name in ('inputs', 'targets'):
            of_name = [of_line.get(name, '') for of_line in texts]
            ids[name] = self.vocabulary.encode_as_arrays(of_name, glued_sentinels=True)
        for i, (number, _) in enumerate(lines):
            where = f'in {self.unit} {number} of {self.title}'
            inputs = self.ended('inputs', ids['inputs'][i], where)
            is_trimmed = len(inputs) <= len(ids['inputs'][i])
            targets = None
            if 'targets' in texts[i]:
                targets = self.ended('targets', ids['targets'][i], where)
                is_trimmed |= len(targets) <= len(ids['targets'][i])
            yield Example(fields[i] | texts[i], inputs, targets, is_trimmed)

    def fields_of(self, line: str | dict) -> dict:
        """Return the fields of a line, or of a row of Parquet."""
        fields: dict = {}
        if isinstance(line, dict):
            fields = tables.as_json(line)
        elif line.strip():
            fields = tables.fields_of_line(
                line, self.kind, self.text_field, self.header, self.delimiter
            )
        if self.kind != 'jsonl' and not any(fields.values()):
            raise Refused('no text: remove it, each line or row is an example')
        return fields

    def texts_of(self, fields: Mapping) -> dict[str, str]:
        """Return the inputs of a line and, if it has them, its targets."""
        texts = {'inputs': self.filled('inputs', fields)}
        is_text = []
        for field in self.templates['targets'].fields:
            value = value_at(fields, field)
            is_text.append(isinstance(value, str) or tables.is_number(value))
        if self.needs_targets or all(is_text):
            texts['targets'] = self.filled('targets', fields)
        return texts

    def filled(self, name: str, fields: Mapping) -> str:
        """Return the inputs or targets of a line. Numbers are written as in the line, in Parquet as in JSON."""
        template = self.templates[name]
        values = {}
        for field in template.fields:
            value = value_at(fields, field)
            if tables.is_number(value):
                values[field] = tables.text_of_number(value)
                continue
            remedy = f'add it, or name others with --config.data.{name}'
            values[field] = tables.json_string(dict(fields), field, remedy=remedy)
        return template.fill(values)

    def ended(self, name: str, ids: np.ndarray, where: str) -> np.ndarray:
        title = f'the {name} {where}'
        return ended(title, [*ids, self.vocabulary.eos_id], name, self.lengths[name], self.trim)


def ended(title: str, ids: Sequence[int], name: str, length: int, trim: bool) -> np.ndarray:
    """Return ids, int32, which end with EOS. Those that are too long are cut if the user says so."""
    if len(ids) > length and not trim:
        raise Refused(
            f'{title} have {len(ids)} tokens, EOS included, more than data.lengths.{name}={length}: use --trim'
        )
    return np.array([*ids[:-1][: length - 1], ids[-1]], np.int32)


def encode_text(
    text: str, vocabulary: Vocabulary, length: int, trim: bool, title: str = '--text'
) -> np.ndarray:
    """Return the ids of --text, EOS included."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(f'{title} is not UTF-8: write it in UTF-8') from None
    [ids] = vocabulary.encode([text], glued_sentinels=True)
    return ended(f'the words of {title}', [*ids, vocabulary.eos_id], 'inputs', length, trim)
