"""What `--mode=infer` reads: the split of a task, or the lines of a file.

`TaskExamples` are cut as in training. Those of `FileExamples` are refused where they are too long,
unless the user says that they may be cut. Source: T5X t5x/infer.py. Imports no jax.
"""

import contextlib
import gzip
import itertools
import json
import pickle
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

import data
import mixtures
import paths
import sources
import tasks
from objectives import takes_inputs
from vocabulary import EOS_ID, Vocabulary

RECORDS_AT_ONCE = 128  # that are tokenized
STANDARD_INPUT = '-'
PRETOKENIZED = '_pretokenized'  # T5X's name of a text is that of its ids with this at its end


class Item(NamedTuple):
    """An example, and what may be written of it: T5X's features by name, and its other fields."""

    fields: dict[str, Any]
    inputs: np.ndarray  # ids, EOS included
    targets: np.ndarray | None
    is_trimmed: bool


class Examples(Protocol):
    """Examples that are read once."""

    name: str

    def __iter__(self) -> Iterator[Item]: ...

    def faults(self) -> list[str]:
        """Return descriptions of records that were left out."""
        ...


class Spool:
    """Examples with their numbers in a temporary file: they are read and tokenized once."""

    def __init__(self):
        self.file = tempfile.TemporaryFile(prefix='examples-')  # noqa: SIM115
        self.num_examples = 0

    def add(self, number: int, item: Item) -> None:
        """Append an example. Raises OSError where the disk is full."""
        try:
            pickle.dump((number, item), self.file)
        except OSError as error:
            raise OSError(
                f'{tempfile.gettempdir()} cannot hold the tokenized examples ({error.strerror}): name a '
                'larger folder with the environment variable TMPDIR'
            ) from error
        self.num_examples += 1

    def __len__(self) -> int:
        return self.num_examples

    def __iter__(self) -> Iterator[tuple[int, Item]]:
        self.file.seek(0)
        for _ in range(self.num_examples):
            yield pickle.load(self.file)


def examples_of_tasks(config: Any, vocabulary: Vocabulary, split: str) -> Iterator[Examples]:
    """Yield the examples of a task, or of each task of a mixture; `config`: config.data."""
    for name, task in mixtures.tasks_of(tasks.find(config)).items():
        if not takes_inputs(task.objective):
            raise ValueError(
                f'data.task={name!r} has no inputs to answer: name a text-to-text task with '
                '--config.data.task, a file with --input, or a text with --text'
            )
        opened = mixtures.OpenTask(task, mixtures.open_task(task, config), rate=1.0)
        tokenized = data.TokenizedTask(opened, config, vocabulary)
        yield TaskExamples(tokenized, split)


class TaskExamples:
    """The examples of a split of a task, cut as in training."""

    def __init__(self, task: data.TokenizedTask, split: str):
        self.name = task.name
        self.task = task
        self.split = split

    def __iter__(self) -> Iterator[Item]:
        source = self.task.source
        records = source.records(self.split, whole=True)
        if source.is_tokenized:
            for record in records:
                yield from self.items(self.task.tokenize([record]), record.fields, texts={})
            return
        while group := list(itertools.islice(records, RECORDS_AT_ONCE)):
            for tokenized in self.task.tokenize(group):
                yield from self.items([tokenized], tokenized.texts, texts_of(tokenized.texts))

    def faults(self) -> list[str]:
        return self.task.source.faults()[0]

    def items(
        self,
        examples: Sequence[data.Tokenized],
        fields: Mapping[str, Any],
        texts: Mapping[str, str],
    ) -> Iterator[Item]:
        """Yield an example cut to its row; none where it is bad or the objective drops it."""
        names = [example.name for example in examples]
        ids = [example.ids for example in examples]
        for made in self.task.objective.examples(names, ids):
            yield Item(
                fields=features_of(fields, texts, made.inputs, made.targets),
                inputs=made.inputs,
                targets=made.targets,
                is_trimmed=made.is_trimmed,
            )


def texts_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return {'inputs': text, 'targets': text}, those of them that an example has."""
    return {name: fields[name] for name in ('inputs', 'targets') if name in fields}


def features_of(
    fields: Mapping[str, Any],
    texts: Mapping[str, str],
    inputs: np.ndarray,
    targets: np.ndarray | None,
) -> dict[str, Any]:
    """Return the fields of an example in SeqIO's order: in place of a text, the text and its ids.

    Source: seqio/preprocessors.py tokenize.
    """
    ids = {'inputs': inputs}
    if targets is not None:
        ids['targets'] = targets
    found: dict[str, Any] = {}
    for name in dict.fromkeys([*fields, *ids]):
        if name in texts:
            found[name + PRETOKENIZED] = texts[name]
        if name in ids:
            found[name] = ids[name]
        else:
            found.setdefault(name, fields[name])
    return found


class FileExamples:
    """The lines of a file: JSON objects, rows of a table, or texts that are inputs.

    The inputs and targets of an object or row are those of data.inputs and data.targets, if they
    are set, else its fields of that name. Standard input is JSON Lines if its first character is
    '{'.
    """

    def __init__(
        self, path: str, config: Any, vocabulary: Vocabulary, needs_targets: bool, trim: bool
    ):
        self.path = path
        self.title = path
        self.kind = config.kind or sources.kind_of(path)
        if self.kind == 'parquet':
            raise ValueError(
                f'--input={path}: only text, JSON Lines (.jsonl, .json, .ndjson), CSV and TSV, each also '
                'gzipped, are read: convert it'
            )
        if path == STANDARD_INPUT:
            self.title = 'standard input'
            self.name = 'stdin'
            standard_input: Any = sys.stdin.buffer
            head = standard_input.peek(1)
            if head[:1] == b'{':
                self.kind = config.kind or 'jsonl'
        else:
            [self.path, *others] = paths.matching_files(path)
            if others:
                raise ValueError(f'--input={path} stands for {len(others) + 1} files: name one')
            self.name = Path(self.path.removesuffix('.gz')).stem
            head = sources.read_head(self.path)
        sources.check_head(self.title, self.kind, head)
        self.text_field = config.text_field if config.inputs else 'inputs'  # of a line of text
        self.templates = {
            'inputs': sources.Template('data.inputs', config.inputs or '{inputs}'),
            'targets': sources.Template('data.targets', config.targets or '{targets}'),
        }
        for field in self.templates['inputs'].fields:
            if self.kind == 'text' and field != self.text_field:
                raise sources.no_field_of_text(
                    self.title,
                    field,
                    self.text_field,
                    kind=config.kind,
                    remedy="set data.inputs='' if each line is the inputs",
                )
        if needs_targets and self.kind == 'text':
            raise ValueError(
                f'--score needs targets, and {self.title} is plain text: write JSON Lines, each with the '
                "fields 'inputs' and 'targets'"
            )
        self.needs_targets = needs_targets
        self.trim = trim
        self.lengths = dict(config.lengths)
        self.vocabulary = vocabulary

    def __iter__(self) -> Iterator[Item]:
        lines = numbered_lines(self.path, self.title, self.kind)
        if self.kind in ('csv', 'tsv'):
            _, line = next(lines)
            self.header = sources.header_of(line, self.kind, self.title)
            sources.check_columns(
                self.title,
                self.header,
                self.templates['inputs'].fields,
                remedy='add it, or name others with --config.data.inputs',
            )
        while group := list(itertools.islice(lines, RECORDS_AT_ONCE)):
            yield from self.items(group)

    def faults(self) -> list[str]:
        return []  # a line that cannot be read stops the job

    def items(self, lines: Sequence[tuple[int, str]]) -> Iterator[Item]:
        """Yield the examples of some lines."""
        fields = [self.fields_of(number, line) for number, line in lines]
        texts = []
        for i, (number, _) in enumerate(lines):
            texts.append(self.texts_of(number, fields[i]))
        ids = {}
        for name in ('inputs', 'targets'):
            of_name = [of_line.get(name, '') for of_line in texts]
            ids[name] = self.vocabulary.encode_as_arrays(of_name, glued_sentinels=True)
        for i, (number, _) in enumerate(lines):
            inputs = self.ended('inputs', ids['inputs'][i], number)
            is_trimmed = len(inputs) <= len(ids['inputs'][i])
            targets = None
            if 'targets' in texts[i]:
                targets = self.ended('targets', ids['targets'][i], number)
                is_trimmed |= len(targets) <= len(ids['targets'][i])
            features = features_of(fields[i], texts[i], inputs, targets)
            yield Item(features, inputs, targets, is_trimmed)

    def fields_of(self, number: int, line: str) -> dict[str, Any]:
        """Return the fields of a line."""
        title = f'line {number} of {self.title}'
        if not line.strip():
            raise ValueError(f'{title} is empty: remove it, each line is an example')
        if self.kind == 'text':
            return {self.text_field: line}
        try:
            if self.kind == 'jsonl':
                return sources.json_object(line.strip(), 'inputs')
            fields = sources.fields_of_row(line, self.kind, self.header)
        except ValueError as error:
            raise ValueError(f'{title}: {error}') from None
        if not any(fields.values()):
            raise ValueError(f'{title} is empty: remove it, each row is an example')
        return fields

    def texts_of(self, number: int, fields: Mapping[str, Any]) -> dict[str, str]:
        """Return the inputs of a line and, if it has them, its targets."""
        texts = {}
        try:
            texts['inputs'] = self.filled('inputs', fields)
            is_text = []
            for field in self.templates['targets'].fields:
                is_text.append(isinstance(fields.get(field), str | int | float))
            if self.needs_targets or all(is_text):
                texts['targets'] = self.filled('targets', fields)
        except ValueError as error:
            raise ValueError(f'line {number} of {self.title}: {error}') from None
        return texts

    def filled(self, name: str, fields: Mapping[str, Any]) -> str:
        """Return the inputs or targets of a line. Numbers are written as JSON writes them."""
        template = self.templates[name]
        values = {}
        for field in template.fields:
            value = fields.get(field)
            if isinstance(value, int | float):
                values[field] = json.dumps(value)
                continue
            values[field] = sources.json_string(
                dict(fields), field, remedy=f'add it, or name others with --config.data.{name}'
            )
        return template.fill(values)

    def ended(self, name: str, ids: np.ndarray, number: int) -> np.ndarray:
        """Return ids with EOS at their end. Those that are too long are cut if the user says so."""
        length = self.lengths[name]
        if len(ids) >= length:
            if not self.trim:
                title = f'the {name} in line {number} of {self.title}'
                raise too_long(title, len(ids) + 1, name, length)
            ids = ids[: length - 1]
        return np.append(ids, np.int32(EOS_ID)).astype(np.int32)


def too_long(title: str, num_tokens: int, name: str, length: int) -> ValueError:
    """Return the error that a text has more tokens than its row."""
    return ValueError(
        f'{title} have {num_tokens} tokens, EOS included, more than data.lengths.{name}={length}: shorten them, '
        f'cut them with --trim, or set --config.data.lengths.{name}={num_tokens}'
    )


def encode_text(text: str, vocabulary: Vocabulary, length: int, trim: bool) -> list[int]:
    """Return the ids of --text, EOS included. Raises ValueError for one that is too long."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError('--text is not UTF-8: write it in UTF-8') from None
    [ids] = vocabulary.encode([text], glued_sentinels=True)
    if len(ids) >= length and not trim:
        raise too_long('the words of --text', len(ids) + 1, 'inputs', length)
    return [*ids[: length - 1], EOS_ID]


def numbered_lines(path: str, title: str, kind: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of a file, which may be gzipped. Raises ValueError for what is no text.

    A row of CSV is one line, whatever newlines its quoted fields hold.
    """
    number = 0
    opened: Any = contextlib.nullcontext(sys.stdin.buffer)
    if path != STANDARD_INPUT:
        opened = sources.open_unzipped(path, sources.SEQUENTIAL_READ_AHEAD)
    try:
        with opened as file:
            for number, line in sources.whole_rows(sources.numbered_lines(file), kind):
                encoding = 'utf-8-sig' if number == 1 else 'utf-8'
                yield number, line.decode(encoding).removesuffix('\n').removesuffix('\r')
    except UnicodeDecodeError as error:
        raise ValueError(
            f'line {number} of {title}: byte {error.start + 1} is not UTF-8: convert the file'
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f'{title} is broken gzip ({error}): copy it again') from None
    if number == 0:
        raise ValueError(f'{title} is empty: write a line for each example')
