"""The order of examples: a resumable stream of batches from a task or a mixture.

    records -> texts -> ids -> an objective -> examples -> drawn by rate -> packed rows -> batch

The host does all of this with numpy. Row r of every batch is lane r. Each lane reads its own part of every
epoch of every task, so a process parses and tokenizes only for its own rows. All randomness is a function
of the seed and of a position in the data, so a position is enough to resume. Imports no jax.
"""

import collections
import copy
import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

import data
from data import Example, Objective
from messages import Refused, first_ten
from randomness import permutation, random_bits
from sources import Document, FileRecord, Record, Share, Source, names_of_values, weight_at
from vocabulary import Vocabulary

# A lane packs a window at a time: examples that fill ROWS_PER_WINDOW rows, at most EXAMPLES_PER_WINDOW.
ROWS_PER_WINDOW = 64
MIN_ROWS_PER_WINDOW = 8  # the minimum, once ROWS_IN_ALL_WINDOWS is reached
ROWS_IN_ALL_WINDOWS = 1 << 16
EXAMPLES_PER_WINDOW = 512

DRAWS_PER_BLOCK = 1024  # tasks drawn at once in a lane


class StreamedTask(Protocol):
    """The part of a tasks.Task that a stream uses."""

    @property
    def name(self) -> str: ...

    def preprocess(self, records: Iterable[dict]) -> Iterator[dict]: ...

    def open_objective(self, data_group: ConfigDict, vocabulary: Vocabulary) -> Objective: ...


AnyTask = TypeVar('AnyTask', bound=StreamedTask)


class OpenTask(NamedTuple, Generic[AnyTask]):
    """A task whose source is open. `rate` is its share of the mixture."""

    task: AnyTask
    source: Source
    rate: float = 1.0

    @property
    def name(self) -> str:
        return self.task.name

    def texts_of(self, record: Record) -> list[dict]:
        """Return the texts of the examples of a record, none for a bad one (data.on_bad_line=skip).

        If the task's own function stops the run, its error has a note that names the record.
        """
        try:
            return list(self.task.preprocess([record.fields]))
        except Refused as error:
            reason = str(error)
        except Exception as error:
            reason = f'{type(error).__name__}: {error}'
            if self.source.bad_lines.action == 'stop':
                names = first_ten([repr(name) for name in names_of_values(record.fields)])
                where = self.source.bad_lines.place_of(record.name)
                error.add_note(f'{where}, task {self.name}; its fields: {names}')
                raise
        self.source.bad_lines.add_record(record.name, reason)
        return []


@dataclasses.dataclass(frozen=True)
class OpenMixture:
    """The open task or mixture of config.data.task; its tasks are sorted by name. A task is a mixture of one."""

    name: str
    tasks: tuple[OpenTask, ...]
    fingerprint: str  # a run resumes only with a mixture of the same fingerprint
    # config.data -> the same mixture, opened in another process.
    reopen: Callable[[ConfigDict], 'OpenMixture'] | None = None

    @property
    def is_single(self) -> bool:
        return len(self.tasks) == 1

    @property
    def corpus(self) -> str:
        return ', '.join(sorted({task.source.corpus for task in self.tasks}))

    @property
    def files(self) -> list[FileRecord]:
        return [file for task in self.tasks for file in task.source.files]

    def faults(self) -> tuple[list[str], int]:
        """Return the lines left out since the last call, and their total number."""
        descriptions = []
        total = 0
        for task in self.tasks:
            new, count = task.source.faults()
            descriptions += new
            total += count
        return descriptions, total


@dataclasses.dataclass(eq=False)
class Stream:
    """Iterator of batches: [rows, length] under T5X's names, for `rows` of the global batch.

    After `num_epochs` of a task, a row is padding; when all rows are, the stream ends. A mixture repeats its tasks
    forever. Raises Refused for settings that do not fit, and for a split without a document.
    """

    mixture: OpenMixture
    split: str
    vocabulary: Vocabulary
    data_group: ConfigDict  # config.data
    batch_size: int
    seed: int
    rows: range = range(0)  # empty: all
    num_epochs: int | None = None
    numbers: tuple[str, ...] = ()  # names, from users' objectives
    shares_rows: bool = False

    def __post_init__(self):
        self.rows = self.rows or range(self.batch_size)
        if not self.mixture.is_single:
            self.num_epochs = None
        self.tasks = []
        for task in self.mixture.tasks:
            self.tasks.append(TokenizedTask(task, self.data_group, self.vocabulary))
        num_sentinels = max(task.objective.num_sentinels for task in self.tasks)
        # The ids that mark spans in these tasks; other sentinels are text here.
        self.sentinel_ids = tuple(self.vocabulary.sentinel_ids[:num_sentinels].tolist())
        self.pack_examples = data.PACKINGS[self.data_group.pack]
        share = ROWS_IN_ALL_WINDOWS // self.batch_size
        self.rows_per_window = min(max(share, MIN_ROWS_PER_WINDOW), ROWS_PER_WINDOW)
        # Training needs text in every task, validation in one.
        tasks_with_text = []
        for task in self.tasks:
            if task.has_text(self.split):
                tasks_with_text.append(task)
            elif self.split != 'validation':
                task.source.raise_empty(self.split)
        if not tasks_with_text:
            self.tasks[0].source.raise_empty(self.split)
        self.tasks = tasks_with_text
        # Numbers of examples so far, and of trimmed ones: int64 [tasks, 2].
        self.counts = np.zeros((len(self.tasks), 2), np.int64)
        self.seek(np.zeros((len(self.rows), len(self.tasks) + 1, 4), np.int64))

    @property
    def position(self) -> NDArray:
        """The position of the next batch, as saved in a checkpoint: int64 [rows, tasks + 1, 4].

        Each row has the fields of a TaskPosition for each task, then `draw` and `given` of its lane.
        """
        numbers: list[int] = []
        for lane in self._lanes:
            starts = itertools.chain.from_iterable(lane.starts)
            numbers += [*starts, lane.draw, lane.given, 0, 0]
        return np.array(numbers, np.int64).reshape(len(self._lanes), len(self.tasks) + 1, 4)

    def seek(self, position: NDArray) -> None:
        self._lanes = []
        for row, (*tasks, window) in zip(self.rows, position.tolist(), strict=True):
            starts = [TaskPosition(*task) for task in tasks]
            self._lanes.append(Lane(self, row, starts, draw=window[0], given=window[1]))

    def of_each_task(self) -> list['Stream']:
        """Return a stream of one epoch of each task alone, for the same rows."""
        if self.mixture.is_single:
            return [self]
        streams = []
        for task in self.tasks:
            opened = task.opened._replace(rate=1.0)
            mixture = OpenMixture(task.name, (opened,), self.mixture.fingerprint)
            streams.append(dataclasses.replace(self, mixture=mixture, num_epochs=1))
        return streams

    def describe(self, position: NDArray) -> list[str]:
        """Return the names of the records in each row of the batch at `position`."""
        stream = copy.copy(self)
        stream.seek(position)
        descriptions = []
        for lane in stream._lanes:
            names = [name for _, example in lane.next_row() for name in example.names]
            descriptions.append(', '.join(dict.fromkeys(names)))
        return descriptions

    def __iter__(self) -> 'Stream':
        return self

    def __next__(self) -> dict[str, NDArray]:
        rows = [lane.next_row() for lane in self._lanes]
        if not any(rows):
            raise StopIteration
        drawn = [(task, example.is_trimmed) for row in rows for task, example in row]
        tasks, is_trimmed = np.array(drawn).T
        np.add.at(self.counts, tasks, np.stack([np.ones_like(tasks), is_trimmed], axis=1))
        return self.batch_of([[example for _, example in row] for row in rows])

    def batch_of(self, rows: Sequence[Sequence[Example]]) -> dict[str, NDArray]:
        is_packed = self.shares_rows or self.pack_examples is not None
        has_weights = bool(self.data_group.weight)
        lengths = self.data_group.lengths
        return data.encoder_decoder(rows, lengths, is_packed, has_weights, self.numbers)


class TaskPosition(NamedTuple):
    """A lane's position in a task: at example `given` of the group that begins at `offset` in `pool`."""

    epoch: int = 0
    pool: int = 0
    offset: int = 0
    given: int = 0


# Lanes: the rows of a batch.


class Item(NamedTuple):
    """Examples that share a row, and the index of their task in the mixture."""

    task: int
    examples: Sequence[Example]

    @property
    def sizes(self) -> tuple[int, int]:
        return sum(len(x.inputs) for x in self.examples), sum(len(x.targets) for x in self.examples)


class Lane:
    """The rows of one lane. The next is row `given` of a window, whose first item has the number `draw` in the lane."""

    def __init__(self, stream: Stream, row: int, starts: list[TaskPosition], draw: int, given: int):
        self.starts = starts  # the window's beginning in each task
        self.draw = draw
        self.given = given
        self._stream = stream
        self._row = row
        lengths = stream.data_group.lengths
        self._limits = (lengths.inputs, lengths.targets)  # reading a ConfigDict is slow
        self._readers = []
        for task, start in zip(stream.tasks, starts, strict=True):
            self._readers.append(ExampleReader(stream, task, row, start))
        self._draws = draw_tasks(stream, row, first=draw)
        self._window: list[list[Item]] = []  # rows; none if the next window is due

    def next_row(self) -> list[tuple[int, Example]]:
        """Return the next row, each example with the index of its task, and advance; [] after the last epoch."""
        if not self._window:
            items = list(self._read_window())
            if not items:
                return []
            self._window = [items]
            if self._stream.pack_examples is not None:
                sizes = np.array([item.sizes for item in items])
                rows = self._stream.pack_examples(sizes, np.array(self._limits))
                order = permutation(len(rows), 'rows', self._stream.seed, self._row, self.draw)
                self._window = [[items[i] for i in rows[k]] for k in order]
        row = self._window[self.given]
        self.given += 1
        if self.given == len(self._window):
            self.starts = [reader.position for reader in self._readers]
            self.draw += sum(map(len, self._window))
            self.given = 0
            self._window = []
        return [(item.task, example) for item in row for example in item.examples]

    def _read_window(self) -> Iterator[Item]:
        """Yield the items of the next window: one, if rows are not packed.

        A window of a single task ends with its epoch, so that a small data set starts quickly.
        """
        max_rows = self._stream.rows_per_window
        if self.draw == 0:  # stagger the first windows: lanes refill at different steps
            max_rows = 1 + self._row % max_rows
        num_rows = 0.0
        for task in itertools.islice(self._draws, EXAMPLES_PER_WINDOW):
            examples = self._readers[task].next_examples()
            if examples is None:
                return
            item = Item(task, examples)
            yield item
            num_rows += max(map(operator.truediv, item.sizes, self._limits))
            if self._stream.pack_examples is None or num_rows >= max_rows:
                return
            if self._stream.mixture.is_single and self._readers[task].is_at_end_of_epoch():
                return


def draw_tasks(stream: Stream, row: int, first: int) -> Iterator[int]:
    """Yield the task of each item of a lane, from number `first` on: a function of seed and rates."""
    rates = np.array([task.opened.rate for task in stream.tasks])
    ends = np.cumsum(rates / rates.sum())[:-1]  # [0, 1) is cut into a part per task
    block, offset = divmod(first, DRAWS_PER_BLOCK)
    while True:
        bits = random_bits((DRAWS_PER_BLOCK,), 'draws', stream.seed, row, block)
        yield from np.searchsorted(ends, bits / 2**64, side='right')[offset:].tolist()
        block += 1
        offset = 0


class ExampleReader:
    """Reads the items of one lane in one task: its own part of every epoch, in groups of records.

    `position` is the position of the next item.
    """

    def __init__(self, stream: Stream, task: 'TokenizedTask', row: int, position: TaskPosition):
        self._split = stream.split
        self._num_epochs = stream.num_epochs or math.inf
        self._task = task
        seed: int | str = stream.seed
        if not stream.mixture.is_single:
            seed = f'{seed} {task.name}'
        self._share = Share(seed, position.epoch, lane=row, num_lanes=stream.batch_size)
        self._go_to(position)

    def _go_to(self, position: TaskPosition) -> None:
        self.position = position
        self._end = position  # the next group's
        self._examples: collections.deque[Sequence[Example]] = collections.deque()
        self._share = self._share._replace(epoch=position.epoch)
        self._documents: Iterator[Document] = iter(())
        if position.epoch < self._num_epochs:
            self._documents = self._task.source.documents(
                self._split, self._share, position.pool, position.offset
            )

    def next_examples(self) -> Sequence[Example] | None:
        """Return the examples of the next item; None after the last epoch."""
        while self.is_at_end_of_epoch():
            share = self._share._replace(epoch=self._end.epoch + 1)
            start = TaskPosition(self._task.source.next_epoch(self._split, share))
            if start.epoch >= self._num_epochs:
                return None
            self._go_to(start)
        examples = self._examples.popleft()
        self.position = self.position._replace(given=self.position.given + 1)
        if not self._examples:
            self.position = self._end
        return examples

    def is_at_end_of_epoch(self) -> bool:
        """Return whether the epoch has no more examples; first make the next group's if it is due."""
        while not self._examples:
            group_size = self._task.objective.records_per_group
            documents = list(itertools.islice(self._documents, group_size))
            if not documents:
                return True
            seed, epoch, lane, _ = self._share
            key = (seed, epoch, lane, self._end.pool, self._end.offset)
            records = [document.record for document in documents]
            tokenized = self._task.tokenize(records, *(key if self._split == 'train' else ()))
            examples = self._task.examples(tokenized, *key)
            # Differs from T5X, which shuffles in a buffer of 1,000 examples: lanes read far apart, and each
            # shuffles the examples of its group. (Old runs rely on the word 'pieces' in the key.)
            order = permutation(len(examples), 'pieces', *key)
            self._examples.extend(examples[i] for i in order[self._end.given :])
            self.position = self._end
            last = documents[-1]
            self._end = TaskPosition(epoch, pool=last.pool, offset=last.offset + 1)
        return False


class Tokenized(NamedTuple):
    """One example: the name of its record, its texts, and their ids without EOS."""

    name: str
    texts: dict[str, str]  # empty if the record has ids
    ids: dict[str, NDArray]  # int32; with data.weight also 'weight', float32 []


class TokenizedTask:
    """A task whose records become ids, for the features of its objective."""

    def __init__(self, task: OpenTask, data_group: ConfigDict, vocabulary: Vocabulary):
        self.opened = task
        self.name = task.name
        self.task = task.task
        self.source = task.source
        self.vocabulary = vocabulary
        self.draws_targets = data_group.target_choice == 'random'
        self.weight_field = data_group.weight[1:-1]  # '' for none
        self.objective = task.task.open_objective(data_group, vocabulary)
        takes_inputs = 'inputs' in self.objective.features
        self.must_answer = takes_inputs and not data_group.allow_empty_targets
        self.source.check_ids(self.objective.features, vocabulary.hash)

    def tokenize(self, records: Sequence[Record], *key: int | str) -> list[Tokenized]:
        """Return the examples of records: one for each, or as many as the task's function gives.

        With a `key`, in training, data.target_choice draws their targets. A bad record stops the run or is
        skipped (data.on_bad_line).
        """
        examples = []
        if self.source.is_tokenized:
            for record in records:
                cached = {name: record.fields[name] for name in self.objective.features}
                for name, x in cached.items():
                    if x.size and x[-1] == self.vocabulary.eos_id:
                        cached[name] = x[:-1]
                joined = np.concatenate(list(cached.values()))
                if joined.min(initial=0) >= 0 and joined.max(initial=0) < self.vocabulary.size:
                    examples.append(Tokenized(record.name, {}, cached))
                    continue
                self.source.bad_lines.add_record(
                    record.name,
                    f'ids from {joined.min()} to {joined.max()}, but the vocabulary has '
                    f"{self.vocabulary.size}: set data.vocabulary to the cache's vocabulary",
                )
            return examples
        for i, record in enumerate(records):
            all_texts = self.opened.texts_of(record)
            for texts in all_texts if key and self.draws_targets else ():
                references = texts.get('references') or [texts['targets']]
                bits = random_bits((), 'target', i, *key)
                texts['targets'] = references[int(bits) % len(references)]
            if self.must_answer and not all(texts['targets'].strip() for texts in all_texts):
                self.source.bad_lines.add_record(
                    record.name,
                    'its targets are empty; correct it, or set data.allow_empty_targets=True if an '
                    'empty answer is valid',
                )
                continue
            for texts in all_texts:
                ids: dict[str, NDArray] = {}
                if self.weight_field:
                    try:
                        ids['weight'] = weight_at({**record.fields, **texts}, self.weight_field)
                    except Refused as error:
                        self.source.bad_lines.add_record(record.name, str(error))
                        continue
                examples.append(Tokenized(record.name, texts, ids))
        for feature in self.objective.features:
            feature_texts = [example.texts.get(feature, '') for example in examples]
            all_ids = self.vocabulary.encode_as_arrays(feature_texts)
            for example, feature_ids in zip(examples, all_ids, strict=True):
                example.ids[feature] = feature_ids
        return examples

    def examples(self, tokenized: Sequence[Tokenized], *key: int | str) -> list[Sequence[Example]]:
        """Return the objective's items, random by `key`: each an example, or some that share a row."""
        names = [x.name for x in tokenized]
        records = [{**x.ids, 'fields': x.texts} for x in tokenized]
        items = self.objective.examples(names, records, *key)
        return [[item] if isinstance(item, Example) else item for item in items]

    def has_text(self, split: str) -> bool:
        """Return whether the objective makes an example with an id from the records of a split."""
        if not self.source.may_hold(split):
            return False
        for record in self.source.records(split):
            for example in self.tokenize([record]):
                examples = self.examples([example])
                if examples and any(example.ids[x].size for x in self.objective.features):
                    return True
        return False
