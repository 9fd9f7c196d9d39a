"""From documents to batches: a stream that resumes.

    documents -> ids -> groups of 128 documents -> rows of raw ids -> an objective -> examples ->
    batch

The host does all of this with numpy. Row r of every batch is lane r. Each lane reads its own part
of every epoch, so a process parses and tokenizes only what its own rows need. All randomness is a
function of the seed and of a position in the data, so a position is all that resuming needs.
Imports no jax.
"""

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import features
from objectives import OBJECTIVES, Example, task_of
from sources import (
    CachedRecords,
    Document,
    Record,
    Share,
    Source,
    Template,
    permutation,
    templates_of,
)
from vocabulary import EOS_ID, Vocabulary

# A window is what a lane packs at a time: examples that fill so many rows, and no more than these.
ROWS_PER_WINDOW = 64
EXAMPLES_PER_WINDOW = 512

NUM_TASKS = 1  # on the second axis of a position, before the window


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
    unused: int = 0  # as many fields as Position has
    reserved: int = 0


class Stream:
    """Iterator of batches: int32 [rows, length] under T5X's names, for `rows` of the global batch.

    After `num_epochs` a row is padding. When all rows are, the stream ends. Raises ValueError for
    settings that do not fit together and for a split without a document.
    """

    def __init__(
        self,
        source: Source,
        split: str,
        vocabulary: Vocabulary,
        config: Any,
        batch_size: int,
        seed: int,
        rows: range | None = None,
        num_epochs: int | None = None,
    ):
        self.task = task_of(config)
        self.source = source
        self.split = split
        self.vocabulary = vocabulary
        self.config = config
        self.batch_size = batch_size
        self.seed = seed
        self.rows = range(batch_size) if rows is None else rows
        self.num_epochs = num_epochs
        self.templates = templates_of(config)
        self.objective = OBJECTIVES[self.task](config, vocabulary)
        self.first_sentinel = vocabulary.size - self.objective.num_sentinels
        self.pack_examples = PACKINGS[config.pack] if split == 'train' else None
        self._check_features()
        self._check_not_empty()
        self.seek(np.zeros((len(self.rows), NUM_TASKS + 1, len(Position._fields)), np.int64))

    @property
    def position(self) -> np.ndarray:
        """The position of the next batch: int64 [rows, tasks + 1, 4].

        Fields of Position for each task, then those of WindowPosition.
        """
        return np.array([lane.position for lane in self._lanes], np.int64)

    def seek(self, position: np.ndarray) -> None:
        """Go to a position. Those of older runs, [rows, 4] and [rows, 1, 4], have no window."""
        if position.ndim == 2:
            position = position[:, None]
        if position.shape[1] == NUM_TASKS:
            position = np.pad(position, ((0, 0), (0, 1), (0, 0)))
        self._lanes = self._open_lanes(position)

    def describe(self, position: np.ndarray) -> list[str]:
        """Return the names of the documents in each row of the batch at `position`."""
        lanes = self._open_lanes(position)
        return [', '.join(lane.next_record_names()) for lane in lanes]

    def __iter__(self) -> 'Stream':
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rows = [next(lane, []) for lane in self._lanes]
        if not any(rows):
            raise StopIteration
        is_packed = self.pack_examples is not None
        return features.encoder_decoder(rows, self.config.lengths, is_packed)

    def tokenize(self, records: Sequence[Record]) -> list[dict[str, np.ndarray]]:
        """Return {feature: ids without EOS} of each record, of the features of the objective."""
        if self.source.is_tokenized:
            return [self._cached_ids(record) for record in records]
        tokenized: list[dict[str, np.ndarray]] = [{} for _ in records]
        for feature in self.objective.features:
            texts = [text_of(record, feature, self.config, self.templates) for record in records]
            for record, ids in zip(tokenized, self.vocabulary.encode_as_arrays(texts), strict=True):
                record[feature] = ids
        return tokenized

    def _cached_ids(self, record: Record) -> dict[str, np.ndarray]:
        """Return the ids of a record of a task cache, without EOS at their ends."""
        found = {}
        for feature in self.objective.features:
            ids = record.fields[feature]
            if ids.size and not 0 <= ids.min() <= ids.max() < self.vocabulary.size:
                raise ValueError(
                    f'{record.name}: feature {feature!r} has ids from {ids.min()} to {ids.max()}, and '
                    f'the vocabulary has {self.vocabulary.size}: name the one of the cache with '
                    'data.vocabulary'
                )
            if ids.size and ids[-1] == EOS_ID:
                ids = ids[:-1]
            found[feature] = ids
        return found

    def _open_lanes(self, position: np.ndarray) -> list['Lane']:
        return [Lane(self, row, x) for row, x in zip(self.rows, position, strict=True)]

    def _check_features(self) -> None:
        if not isinstance(self.source.train, CachedRecords):
            return
        found = self.source.train.split.features
        for feature in self.objective.features:
            if feature not in found:
                raise ValueError(
                    f'{self.source.description} have no feature {feature!r}, which '
                    f'data.task={self.config.task!r} needs: cache it, or set data.use_cached=no'
                )

    def _check_not_empty(self) -> None:
        if self.source.may_hold(self.split) and self._has_text():
            return
        if self.split == 'validation' and self.source.validation is not None:
            raise ValueError(
                f'data.validation_files={self.config.validation_files!r} holds no document: '
                "name files with text, or '' to validate on a part of data.files"
            )
        raise ValueError(
            f'no document is in split {self.split!r} of {self.source.description} at '
            f'data.validation_fraction={self.source.validation_fraction}: both splits need '
            'documents: change the fraction, or name more files'
        )

    def _has_text(self) -> bool:
        """Return whether a document of the first epoch has an id."""
        for lane in range(self.batch_size):
            share = Share(seed=self.seed, epoch=0, lane=lane, num_lanes=self.batch_size)
            for document in self.source.documents(self.split, share):
                [record] = self.tokenize([document.record])
                if record['targets'].size:
                    return True
        return False


class Lane:
    """Iterator of the rows of one lane: the examples, {feature: ids}, that share a row of a batch.

    `position` is that of the next row, int64 [tasks + 1, 4].
    """

    def __init__(self, stream: Stream, row: int, position: np.ndarray):
        self.position = position.copy()
        self._stream = stream
        self._row = row
        self._reader = ExampleReader(stream, row, Position(*position[0].tolist()))
        self._window: list[list[Example]] = []  # rows
        self._num_examples = 0  # of the window
        self._given = 0  # rows of the window

    def __iter__(self) -> 'Lane':
        return self

    def __next__(self) -> list[dict[str, np.ndarray]]:
        self._go_to_row()
        row = self._window[self._given]
        self._given += 1
        draw, *_ = self.position[-1]
        if self._given < len(self._window):
            self.position[-1] = WindowPosition(draw, self._given)
        else:
            self.position[0] = self._reader.position
            self.position[-1] = WindowPosition(draw + self._num_examples)
        return [{'inputs': example.inputs, 'targets': example.targets} for example in row]

    def next_record_names(self) -> list[str]:
        """Return the names of the records in the next row; none after the last row."""
        try:
            self._go_to_row()
        except StopIteration:
            return []
        names = [name for example in self._window[self._given] for name in example.names]
        return list(dict.fromkeys(names))

    def _go_to_row(self) -> None:
        """Read a window where all rows are given. Raise StopIteration after the last epoch."""
        if self._given < len(self._window):
            return
        window = WindowPosition(*self.position[-1].tolist())
        examples = list(self._read_window())
        if not examples:
            raise StopIteration
        self._window = self._pack(examples, window.draw)
        self._num_examples = len(examples)
        self._given = window.given

    def _read_window(self) -> Iterator[Example]:
        """Yield the examples of the next window: one, if rows are not packed."""
        num_rows = 0.0
        for example in itertools.islice(self._reader, EXAMPLES_PER_WINDOW):
            yield example
            if self._stream.pack_examples is None:
                return
            num_rows += max(self._sizes(example) / self._limits())
            if num_rows >= ROWS_PER_WINDOW:
                return

    def _pack(self, examples: list[Example], draw: int) -> list[list[Example]]:
        """Return the rows of a window, packed and in a random order."""
        if self._stream.pack_examples is None:
            return [examples]
        sizes = np.array([self._sizes(example) for example in examples])
        rows = self._stream.pack_examples(sizes, self._limits())
        order = permutation(len(rows), 'rows', self._stream.seed, self._row, draw)
        return [[examples[i] for i in rows[k]] for k in order]

    def _sizes(self, example: Example) -> np.ndarray:
        return np.array([len(example.inputs), len(example.targets)])

    def _limits(self) -> np.ndarray:
        lengths = self._stream.config.lengths
        return np.array([lengths.inputs, lengths.targets])


class ExampleReader:
    """Iterator of the examples of one lane in one task. `position` is that of the next one.

    It reads its own part of every epoch, in groups of records.
    """

    def __init__(self, stream: Stream, row: int, position: Position):
        self.position = position
        self._stream = stream
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

    def _go_to_example(self) -> None:
        """Read groups until one has an example left. Raise StopIteration after the last epoch."""
        while self._given >= len(self._group.examples):
            self._group = self._read_group(self._group.end)
            self._given = self._group.start.given

    def _read_group(self, start: Position) -> 'Group':
        group_size = self._stream.objective.records_per_group
        documents = list(itertools.islice(self._documents, group_size))
        while not documents:
            share = self._share(start.epoch + 1)
            start = Position(self._stream.source.next_epoch(self._stream.split, share))
            if self._is_past_the_end(start):
                raise StopIteration
            self._documents = self._open_epoch(start)
            documents = list(itertools.islice(self._documents, group_size))
        return self._make_group(documents, start)

    def _open_epoch(self, position: Position) -> Iterator[Document]:
        """Return the documents of the epoch of `position`, from there on."""
        if self._is_past_the_end(position):
            return iter(())
        return self._stream.source.documents(
            self._stream.split,
            self._share(position.epoch),
            pool=position.pool,
            offset=position.offset,
        )

    def _share(self, epoch: int) -> Share:
        """Return the part of an epoch that this lane reads."""
        return Share(
            seed=self._stream.seed,
            epoch=epoch,
            lane=self._row,
            num_lanes=self._stream.batch_size,
        )

    def _is_past_the_end(self, position: Position) -> bool:
        num_epochs = self._stream.num_epochs
        return num_epochs is not None and position.epoch >= num_epochs

    def _make_group(self, documents: list[Document], start: Position) -> 'Group':
        """Tokenize the documents, and make examples of them in a random order."""
        stream = self._stream
        key = (stream.seed, start.epoch, self._row, start.pool, start.offset)
        records = stream.tokenize([document.record for document in documents])
        names = [document.record.name for document in documents]
        examples = stream.objective.examples(names, records, *key)
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


def feature_lengths(config: Any) -> dict[str, int]:
    """Return the length of each feature of a training batch; `config`: config.data."""
    empty = features.encoder_decoder([], config.lengths, PACKINGS[config.pack] is not None)
    return {name: x.shape[1] for name, x in empty.items()}


def training_texts(source: Source, config: Any) -> Iterator[str]:
    """Yield the texts of an epoch from all over the corpus: what a vocabulary is trained on."""
    if source.is_tokenized:
        raise ValueError(
            "data.vocabulary='' would train a vocabulary, and the ids of a task cache have one: name "
            'it with data.vocabulary'
        )
    templates = templates_of(config)
    share = Share(seed=0, epoch=0, lane=0, num_lanes=1)
    for document in source.documents('train', share):
        for feature in templates or ('targets',):
            yield text_of(document.record, feature, config, templates)


def text_of(record: Record, feature: str, config: Any, templates: Mapping[str, Template]) -> str:
    """Return the text of a feature: a template's, or the one field of a document."""
    if templates:
        return templates[feature].fill(record.fields)
    return record.fields[config.text_field]


# Every value of data.pack.
PACKINGS: dict[str, Callable[[np.ndarray, np.ndarray], list[list[int]]] | None] = {
    'no': None,
    'greedily': features.pack_greedily,
    'tightly': features.pack_tightly,
}


class PrefetchedBatch(NamedTuple):
    """A batch, and the stream's positions before and after it."""

    features: dict[str, np.ndarray]
    before: np.ndarray
    after: np.ndarray


def prefetch(stream: Stream, depth: int = 2) -> Iterator[PrefetchedBatch]:
    """Yield the batches of a stream, made ahead in a thread.

    An error in the thread is raised where its batch would have come.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        ahead = collections.deque(thread.submit(next_batch, stream) for _ in range(depth))
        while True:
            batch = ahead.popleft().result()
            if batch is None:
                return
            ahead.append(thread.submit(next_batch, stream))
            yield batch


def next_batch(stream: Stream) -> PrefetchedBatch | None:
    """Return the next batch, None at the end of the stream."""
    before = stream.position
    features = next(stream, None)
    if features is None:
        return None
    return PrefetchedBatch(features, before, after=stream.position)
