"""From records to batches: a stream of one task or of a mixture, which resumes.

    records -> texts -> ids -> an objective -> examples -> drawn by rate -> packed rows -> batch

The host does all of this with numpy. Row r of every batch is lane r. Each lane reads its own part
of every epoch of every task, so a process parses and tokenizes only what its own rows need. All
randomness is a function of the seed and of a position in the data, so a position is all that
resuming needs. Imports no jax.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import features
import settings
import sources
from mixtures import OpenMixture, OpenTask, Task
from objectives import OBJECTIVES, Example
from sources import NO_SPLIT, CachedRecords, Document, Record, Share, permutation
from user_code import UserError
from vocabulary import EOS_ID, Vocabulary

# A window is what a lane packs at a time: examples that fill so many rows, and no more than these.
ROWS_PER_WINDOW = 64
MIN_ROWS_PER_WINDOW = 8
ROWS_IN_ALL_WINDOWS = 1 << 16  # of all lanes together, where there are more than the least
EXAMPLES_PER_WINDOW = 512

DRAWS_PER_BLOCK = 1024  # tasks that a lane draws at once


class Position(NamedTuple):
    """Where a lane is in a task: at example `given` of the group that begins at `offset` in `pool`."""

    epoch: int = 0
    pool: int = 0
    offset: int = 0
    given: int = 0


class WindowPosition(NamedTuple):
    """Where a lane is: at row `given` of the window that begins with its example number `draw`."""

    draw: int = 0
    given: int = 0


class Drawn(NamedTuple):
    """An example, and the index of its task in the mixture."""

    task: int
    example: Example


class Stream:
    """Iterator of batches: int32 [rows, length] under T5X's names, for `rows` of the global batch.

    After `num_epochs` of a task a row is padding. When all rows are, the stream ends. A mixture has
    no epochs: a task that ends begins its next one. Raises ValueError for settings that do not fit
    together and for a split without a document.
    """

    def __init__(
        self,
        mixture: OpenMixture,
        split: str,
        vocabulary: Vocabulary,
        config: Any,
        batch_size: int,
        seed: int,
        rows: range | None = None,
        num_epochs: int | None = None,
    ):
        self.mixture = mixture
        self.split = split
        self.vocabulary = vocabulary
        self.config = config
        self.batch_size = batch_size
        self.seed = seed
        self.rows = range(batch_size) if rows is None else rows
        self.num_epochs = num_epochs if mixture.is_single else None
        self.tasks = [TokenizedTask(task, config, vocabulary) for task in mixture.tasks]
        num_sentinels = max(task.objective.num_sentinels for task in self.tasks)
        self.first_sentinel = vocabulary.size - num_sentinels
        self.pack_examples = PACKINGS[config.pack] if split == 'train' else None
        self._check_not_empty()
        # Of each task, the examples given so far, and those that were cut: int64 [tasks, 2].
        self.counts = np.zeros((len(self.tasks), 2), np.int64)
        self.seek(np.zeros((len(self.rows), len(self.tasks) + 1, len(Position._fields)), np.int64))

    @property
    def position(self) -> np.ndarray:
        """The position of the next batch: int64 [rows, tasks + 1, 4].

        Fields of Position for each task, then those of WindowPosition.
        """
        return np.array([lane.position for lane in self._lanes], np.int64)

    def seek(self, position: np.ndarray, step: int | None = None) -> None:
        """Go to a position. Those of older runs, [rows, 4] and [rows, 1, 4], have no window.

        Where text that a lane was reading changed at `step`, the lane begins to read it anew.
        """
        if position.ndim == 2:
            position = position[:, None]
        if position.shape[1] == len(self.tasks):
            position = np.pad(position, ((0, 0), (0, 1), (0, 0)))
        self._lanes = self._open_lanes(position)
        if step is not None and any(file.is_changed_at(step) for file in self.mixture.files):
            position = np.array([lane.position_before_changes(step) for lane in self._lanes])
            self._lanes = self._open_lanes(position)

    def first_epoch(self) -> 'Stream':
        """Return a stream of the first epoch, the same rows; of a mixture, one without end."""
        stream = copy.copy(self)
        if self.mixture.is_single:
            stream.num_epochs = 1
        stream.counts = np.zeros_like(self.counts)
        stream.seek(np.zeros_like(self.position))
        return stream

    def of_each_task(self) -> list['Stream']:
        """Return a stream of one epoch of each task alone, the same rows."""
        if self.mixture.is_single:
            return [self]
        streams = []
        for task in self.tasks:
            opened = OpenTask(task.task, task.source, rate=1.0)
            stream = Stream(
                OpenMixture(task.name, (opened,), self.mixture.fingerprint),
                self.split,
                self.vocabulary,
                self.config,
                batch_size=self.batch_size,
                seed=self.seed,
                rows=self.rows,
                num_epochs=1,
            )
            streams.append(stream)
        return streams

    def describe(self, position: np.ndarray) -> list[str]:
        """Return the names of the records in each row of the batch at `position`."""
        lanes = self._open_lanes(position)
        return [', '.join(lane.next_record_names()) for lane in lanes]

    def __iter__(self) -> 'Stream':
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rows = [next(lane, []) for lane in self._lanes]
        if not any(rows):
            raise StopIteration
        self._count(rows)
        examples = []
        for row in rows:
            examples.append([{'inputs': x.inputs, 'targets': x.targets} for _, x in row])
        is_packed = self.pack_examples is not None
        return features.encoder_decoder(examples, self.config.lengths, is_packed)

    def _count(self, rows: list[list[Drawn]]) -> None:
        """Add the examples of a batch to `counts`."""
        drawn = list(itertools.chain.from_iterable(rows))
        given = np.array([task for task, _ in drawn])
        is_trimmed = np.array([example.is_trimmed for _, example in drawn])
        self.counts[:, 0] += np.bincount(given, minlength=len(self.tasks))
        self.counts[:, 1] += np.bincount(given[is_trimmed], minlength=len(self.tasks))

    def _open_lanes(self, position: np.ndarray) -> list['Lane']:
        return [Lane(self, row, x) for row, x in zip(self.rows, position, strict=True)]

    def seed_of(self, task: int) -> int | str:
        """Return the seed of a task: in a mixture each has its own."""
        if self.mixture.is_single:
            return self.seed
        return f'{self.seed} {self.tasks[task].name}'

    def rows_per_window(self) -> int:
        """Return how many rows a lane packs at a time: fewer where there are many lanes."""
        share = max(ROWS_IN_ALL_WINDOWS // self.batch_size, MIN_ROWS_PER_WINDOW)
        return min(share, ROWS_PER_WINDOW)

    def num_lines_to_start(self) -> int:
        """Return about how many lines all lanes read before the first batch."""
        total = 0
        for task in self.tasks:
            num_records = self.batch_size * task.objective.records_per_group
            total += task.source.num_lines_to_find(self.split, num_records)
        return total

    def _check_not_empty(self) -> None:
        """Raise ValueError for a task without text in the split.

        For validation it is enough that one task of a mixture has some.
        """
        without_text = [task for task in self.tasks if not self._has_text(task)]
        if self.split == 'validation':
            self.tasks = [task for task in self.tasks if task not in without_text]
            if self.tasks:
                return
        for task in without_text:
            task.raise_empty(self.split)

    def _has_text(self, task: 'TokenizedTask') -> bool:
        """Return whether an example of the first epoch has an id."""
        if not task.source.may_hold(self.split):
            return False
        seed = self.seed_of(self.tasks.index(task))
        for lane in range(self.batch_size):
            share = Share(seed=seed, epoch=0, lane=lane, num_lanes=self.batch_size)
            for document in task.source.documents(self.split, share):
                for example in task.tokenize([document.record]):
                    if example.ids['targets'].size:
                        return True
        return False


class Tokenized(NamedTuple):
    """One example: the name of its record, its texts, and their ids without EOS."""

    name: str
    texts: dict[str, str]  # none where the record has ids
    ids: dict[str, np.ndarray]  # int32


class BadRecord(ValueError):
    """A record that has no texts or ids."""


class TokenizedTask:
    """A task whose records become ids: those of the features that its objective takes."""

    def __init__(self, task: OpenTask, config: Any, vocabulary: Vocabulary):
        self.name = task.name
        self.task = task.task
        self.source = task.source
        self.rate = task.rate
        self.vocabulary = vocabulary
        self.allow_empty_targets = config.allow_empty_targets
        self.objective = OBJECTIVES[task.task.objective](config, vocabulary)
        self._check_features()

    def tokenize(self, records: Sequence[Record]) -> list[Tokenized]:
        """Return the examples of records: one of each, or as many as the task's function gives.

        A bad record stops the run, or has none (data.on_bad_line).
        """
        if self.source.is_tokenized:
            return self._cached(records)
        examples = []
        for record in records:
            try:
                for texts in self._texts(record):
                    examples.append(Tokenized(record.name, texts, ids={}))
            except BadRecord as error:
                add_bad(self.source, record.name, str(error))
        self._encode(examples)
        return examples

    def _encode(self, examples: list[Tokenized]) -> None:
        """Add the ids of the texts of examples."""
        for feature in self.objective.features:
            texts = [example.texts.get(feature, '') for example in examples]
            for example, ids in zip(examples, self.vocabulary.encode_as_arrays(texts), strict=True):
                example.ids[feature] = ids

    def _texts(self, record: Record) -> list[dict[str, str]]:
        """Return the texts of the examples of a record. Raise BadRecord for one without."""
        try:
            examples = list(self.task.preprocess([record.fields]))
        except UserError as error:
            reason = str(error)
            if isinstance(error.__cause__, KeyError):
                names = settings.first_ten([repr(name) for name in record.fields])
                reason += f', and the fields of the record are {names}'
            raise BadRecord(reason) from error
        if 'inputs' in self.objective.features:
            for texts in examples:
                if not texts['targets'] and not self.allow_empty_targets:
                    raise BadRecord(
                        'its targets are empty; correct it, or set data.allow_empty_targets=True if '
                        'no answer is an answer'
                    )
        return examples

    def _cached(self, records: Sequence[Record]) -> list[Tokenized]:
        """Return the examples of a task cache, ids without EOS at their ends."""
        features_taken = self.objective.features
        examples = []
        for record in records:
            by_feature = {name: without_eos(record.fields[name]) for name in features_taken}
            examples.append(Tokenized(record.name, {}, by_feature))
        if self._are_in_vocabulary(examples):
            return examples
        good = []
        for example in examples:
            if self._are_in_vocabulary([example]):
                good.append(example)
                continue
            ids = np.concatenate(list(example.ids.values()))
            reason = (
                f'ids from {ids.min()} to {ids.max()}, and the vocabulary has '
                f'{self.vocabulary.size}: name the one of the cache with data.vocabulary'
            )
            add_bad(self.source, example.name, reason)
        return good

    def _are_in_vocabulary(self, examples: Sequence[Tokenized]) -> bool:
        arrays = [ids for example in examples for ids in example.ids.values()]
        all_ids = np.concatenate([np.zeros(1, np.int32), *arrays])
        return bool(all_ids.min() >= 0 and all_ids.max() < self.vocabulary.size)

    def _check_features(self) -> None:
        """Raise ValueError for a task cache with other features or of another vocabulary."""
        part = self.source.train
        if self.source.validation is not None and not self.source.may_hold('train'):
            part = self.source.validation
        if not isinstance(part, CachedRecords):
            return
        if self.source.vocabulary_hash not in (None, self.vocabulary.hash):
            raise ValueError(
                f'{self.source.description} have ids of another vocabulary: name the folder of the '
                'cache, which has it, with data.vocabulary, or set data.use_cached=no'
            )
        found = part.split.features
        for feature in self.objective.features:
            if feature not in found:
                raise ValueError(
                    f'{self.source.description} have no feature {feature!r}, which '
                    f'data.task={self.name!r} needs: cache it, or set data.use_cached=no'
                )

    def raise_empty(self, split: str) -> None:
        """Raise ValueError because a split has no text."""
        source = self.source
        if split == 'validation' and self.task.validation_split == NO_SPLIT:
            raise ValueError(
                f'task {self.name!r} has no split for validation: name records for it, as in '
                "data.validation_split='test', or as in data.train_split='train[:90%]' and "
                "data.validation_split='train[90%:]'"
            )
        if split == 'validation' and source.validation is not None:
            raise ValueError(
                f'data.validation_files={self.task.validation_files!r} holds no document: '
                "name files with text, or '' to validate on a part of data.files"
            )
        source.check_not_empty(split)
        raise ValueError(
            f'no document is in split {split!r} of {source.description} at '
            f'data.validation_fraction={source.validation_fraction}: both splits need '
            'documents: change the fraction, or name more files'
        )


def without_eos(ids: np.ndarray) -> np.ndarray:
    """Return ids without the EOS at their end, if there is one."""
    if len(ids) and ids[-1] == EOS_ID:
        return ids[:-1]
    return ids


class Window(NamedTuple):
    """The rows that a lane packs at a time, and the number of the draw after it."""

    rows: list[list[Drawn]]
    end: int


class Lane:
    """Iterator of the rows of one lane: the examples that share a row of a batch.

    `position` is that of the next row, int64 [tasks + 1, 4].
    """

    def __init__(self, stream: Stream, row: int, position: np.ndarray):
        self.position = position.copy()
        self._stream = stream
        self._row = row
        self._lengths = dict(stream.config.lengths)  # reading a ConfigDict takes long
        self._readers = []
        for task in range(len(stream.tasks)):
            start = Position(*position[task].tolist())
            self._readers.append(ExampleReader(stream, task, row, start))
        self._draws = Draws(stream, row)
        self._window = Window(rows=[], end=0)
        self._given = 0  # rows of the window

    def __iter__(self) -> 'Lane':
        return self

    def __next__(self) -> list[Drawn]:
        self._go_to_row()
        row = self._window.rows[self._given]
        self._given += 1
        if self._given < len(self._window.rows):
            self.position[-1, 1] = self._given
        else:
            drawn = itertools.chain.from_iterable(self._window.rows)
            for task in {task for task, _ in drawn}:
                self.position[task] = self._readers[task].position
            self.position[-1, :2] = WindowPosition(draw=self._window.end, given=0)
        return row

    def next_record_names(self) -> list[str]:
        """Return the names of the records in the next row; none after the last row."""
        try:
            self._go_to_row()
        except StopIteration:
            return []
        names = [name for drawn in self._window.rows[self._given] for name in drawn.example.names]
        return list(dict.fromkeys(names))

    def position_before_changes(self, step: int) -> np.ndarray:
        """Return the position, before the text that changed at `step` and is being read.

        That is the start of the pools that hold it, and of the window that has rows from them.
        """
        before = self.position.copy()
        if self.position[-1, 1]:
            self.next_record_names()  # reads the window
        for task, reader in enumerate(self._readers):
            if reader.reads_change(Position(*self.position[task].tolist()), step):
                before[task] = Position(*before[task, :2])
                before[-1, 1] = 0
        return before

    def _go_to_row(self) -> None:
        """Read a window where all rows are given. Raise StopIteration after the last epoch."""
        if self._given < len(self._window.rows):
            return
        draw, given = self.position[-1, :2].tolist()
        examples = list(self._read_window(draw))
        if not examples:
            raise StopIteration
        self._window = Window(rows=self._pack(examples, draw), end=draw + len(examples))
        self._given = min(given, len(self._window.rows) - 1)  # of corrected text rows may be fewer

    def _read_window(self, first_draw: int) -> Iterator[Drawn]:
        """Yield the examples of the next window: one, if rows are not packed.

        A window of a single task ends with its epoch, so that few records start quickly.
        """
        is_packed = self._stream.pack_examples is not None
        max_rows = self._stream.rows_per_window()
        if first_draw == 0:
            max_rows = (
                1 + self._row % max_rows
            )  # so that lanes read at different times from then on
        num_rows = 0.0
        for draw in range(first_draw, first_draw + EXAMPLES_PER_WINDOW):
            task = self._draws[draw]
            example = next(self._readers[task], None)
            if example is None:
                return
            yield Drawn(task, example)
            num_rows += self._share_of_row(example)
            if not is_packed or num_rows >= max_rows:
                return
            if self._stream.mixture.is_single and self._readers[task].is_at_end_of_epoch():
                return

    def _share_of_row(self, example: Example) -> float:
        inputs = len(example.inputs) / self._lengths['inputs']
        targets = len(example.targets) / self._lengths['targets']
        return max(inputs, targets)

    def _pack(self, examples: list[Drawn], draw: int) -> list[list[Drawn]]:
        """Return the rows of a window, packed and in a random order."""
        if self._stream.pack_examples is None:
            return [examples]
        sizes = np.array([[len(x.inputs), len(x.targets)] for _, x in examples])
        limits = np.array([self._lengths['inputs'], self._lengths['targets']])
        rows = self._stream.pack_examples(sizes, limits)
        order = permutation(len(rows), 'rows', self._stream.seed, self._row, draw)
        return [[examples[i] for i in rows[k]] for k in order]


class Draws:
    """Which task each example of a lane comes from: draws[i] is that of example number i.

    A function of the seed, the lane, i and the rates alone.
    """

    def __init__(self, stream: Stream, row: int):
        self._stream = stream
        self._row = row
        rates = np.array([task.rate for task in stream.tasks])
        self._ends = np.cumsum(rates / rates.sum())[:-1]  # of each task's part of [0, 1)
        self._block: int | None = None
        self._tasks: list[int] = []  # of the draws of the block

    def __getitem__(self, draw: int) -> int:
        if len(self._ends) == 0:
            return 0
        block, i = divmod(draw, DRAWS_PER_BLOCK)
        if block != self._block:
            bits = sources.random_bits(
                (DRAWS_PER_BLOCK,), 'draws', self._stream.seed, self._row, block
            )
            self._tasks = np.searchsorted(self._ends, bits / 2**64, side='right').tolist()
            self._block = block
        return self._tasks[i]


class ExampleReader:
    """Iterator of the examples of one lane in one task. `position` is that of the next one.

    It reads its own part of every epoch, in groups of records.
    """

    def __init__(self, stream: Stream, task: int, row: int, position: Position):
        self.position = position
        self._stream = stream
        self._task = stream.tasks[task]
        self._seed = stream.seed_of(task)
        self._row = row
        self._documents = self._open_epoch(position)
        self._group = Group(end=position)
        self._given = 0  # examples of the group

    def __iter__(self) -> 'ExampleReader':
        return self

    def __next__(self) -> Example:
        self._go_to_example()
        example = self._group.examples[self._given]
        self._given += 1
        if self._given < len(self._group.examples):
            self.position = self._group.start._replace(given=self._given)
        else:
            self.position = self._group.end
        return example

    def is_at_end_of_epoch(self) -> bool:
        """Return whether the epoch of the last example has no other."""
        return not self._go_to_example_of_epoch()

    def reads_change(self, start: Position, step: int) -> bool:
        """Return whether text changed at `step` from the pool of `start` on, as far as it was read."""
        part = self._task.source.part_of(self._stream.split)
        if not any(file.is_changed_at(step) for file in part.files):
            return False
        if start.given:
            self._go_to_example_of_epoch()  # reads the group
        end = self._group.end
        share = self._share(start.epoch)
        return end.epoch != start.epoch or part.are_changed(share, start.pool, end.pool, step)

    def _go_to_example(self) -> None:
        """Read groups until one has an example left. Raise StopIteration after the last epoch."""
        while not self._go_to_example_of_epoch():
            share = self._share(self._group.end.epoch + 1)
            start = Position(self._task.source.next_epoch(self._stream.split, share))
            if self._is_past_the_end(start):
                raise StopIteration
            self._documents = self._open_epoch(start)
            self._group = Group(end=start)

    def _go_to_example_of_epoch(self) -> bool:
        """Read groups of this epoch until one has an example left. Return whether there is one."""
        while self._given >= len(self._group.examples):
            group_size = self._task.objective.records_per_group
            documents = list(itertools.islice(self._documents, group_size))
            if not documents:
                return False
            self._group = self._make_group(documents, start=self._group.end)
            self._given = self._group.start.given
        return True

    def _open_epoch(self, position: Position) -> Iterator[Document]:
        """Return the documents of the epoch of `position`, from there on."""
        if self._is_past_the_end(position):
            return iter(())
        return self._task.source.documents(
            self._stream.split,
            self._share(position.epoch),
            pool=position.pool,
            offset=position.offset,
        )

    def _share(self, epoch: int) -> Share:
        """Return the part of an epoch that this lane reads."""
        return Share(
            seed=self._seed,
            epoch=epoch,
            lane=self._row,
            num_lanes=self._stream.batch_size,
        )

    def _is_past_the_end(self, position: Position) -> bool:
        num_epochs = self._stream.num_epochs
        return num_epochs is not None and position.epoch >= num_epochs

    def _make_group(self, documents: list[Document], start: Position) -> 'Group':
        """Tokenize the documents, and make examples of them in a random order."""
        key = (self._seed, start.epoch, self._row, start.pool, start.offset)
        tokenized = self._task.tokenize([document.record for document in documents])
        names = [example.name for example in tokenized]
        ids = [example.ids for example in tokenized]
        examples = self._task.objective.examples(names, ids, *key)
        # Differs from T5X, which shuffles in a buffer of 1,000 examples: lanes read far apart, and
        # each shuffles the examples of its group. (The key's words make the order: keep them.)
        order = permutation(len(examples), 'pieces', *key)
        last = documents[-1]
        return Group(
            start=start,
            end=Position(epoch=start.epoch, pool=last.pool, offset=last.offset + 1),
            examples=[examples[i] for i in order],
        )


class Group(NamedTuple):
    """The examples of a few documents, in the order of a lane."""

    end: Position  # where the next group begins
    start: Position = Position()
    examples: Sequence[Example] = ()


class EvaluationBatch(NamedTuple):
    """Features of rows that are not packed, and the examples in the first of them."""

    features: dict[str, np.ndarray]
    examples: list[Tokenized]


def evaluation_batches(
    task: TokenizedTask, split: str, config: Any, batch_size: int
) -> Iterator[EvaluationBatch]:
    """Yield every example of a text-to-text task once, in the order in which they are stored.

    Examples keep their texts, whatever was cut from the rows. The last batch ends with rows of
    padding, whose loss weights are 0.
    """
    examples: list[Tokenized] = []
    for record in task.source.records(split):
        examples += task.tokenize([record])
        while len(examples) >= batch_size:
            yield evaluation_batch(task, examples[:batch_size], config, batch_size)
            examples = examples[batch_size:]
    if examples:
        yield evaluation_batch(task, examples, config, batch_size)


def evaluation_batch(
    task: TokenizedTask, examples: list[Tokenized], config: Any, batch_size: int
) -> EvaluationBatch:
    """Return a batch of examples, an example a row, with rows of padding up to `batch_size`."""
    rows: list[list[dict[str, np.ndarray]]] = []
    kept = []
    for example in examples:
        # One by one, because an objective may drop an example.
        for made in task.objective.examples([example.name], [example.ids]):
            rows.append([{'inputs': made.inputs, 'targets': made.targets}])
            kept.append(example)
    rows += [[]] * (batch_size - len(rows))
    return EvaluationBatch(features.encoder_decoder(rows, config.lengths, pack=False), kept)


def feature_lengths(config: Any) -> dict[str, int]:
    """Return the length of each feature of a training batch; `config`: config.data."""
    empty = features.encoder_decoder([], config.lengths, PACKINGS[config.pack] is not None)
    return {name: x.shape[1] for name, x in empty.items()}


def training_texts(mixture: OpenMixture) -> Iterator[str]:
    """Yield texts from all over the corpus, of all tasks in turn: a vocabulary is trained on them."""
    share = Share(seed=0, epoch=0, lane=0, num_lanes=1)
    iterators = []
    for task, source, _ in mixture.tasks:
        if source.is_tokenized:
            raise ValueError(
                "data.vocabulary='' would train a vocabulary, and the ids of a task cache have one: "
                'name it with data.vocabulary'
            )
        records = (document.record for document in source.documents('train', share))
        iterators.append(good_examples(task, source, records))
    for example in sources.interleave(iterators):
        for feature in ('inputs', 'targets'):
            if example.get(feature):
                yield example[feature]


def good_examples(
    task: Task, source: sources.Source, records: Iterable[Record]
) -> Iterator[dict[str, Any]]:
    """Yield the examples of records, but of those on which the task's function fails."""
    for record in records:
        try:
            yield from task.preprocess([record.fields])
        except UserError as error:
            add_bad(source, record.name, str(error))


def add_bad(source: sources.Source, name: str, reason: str) -> None:
    """Count a bad record. Raises ValueError where that stops the run (data.on_bad_line)."""
    path, _, position = name.rpartition(':')
    source.bad_lines.add(path, int(position), reason)


# Every value of data.pack.
PACKINGS: dict[str, Callable[[np.ndarray, np.ndarray], list[list[int]]] | None] = {
    'no': None,
    'greedily': features.pack_greedily,
    'tightly': features.pack_tightly,
}
