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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import features
from objectives import OBJECTIVES, Example, task_of
from sources import Document, Record, Share, Source, Template, permutation, templates_of
from vocabulary import Vocabulary

NUM_TASKS = 1  # on the second axis of a position, which is for mixtures


class Position(NamedTuple):
    """Where a lane is: at example `given` of the group that begins at `offset` in `pool`."""

    epoch: int = 0
    pool: int = 0
    offset: int = 0
    given: int = 0


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
        task = task_of(config)
        self.source = source
        self.split = split
        self.vocabulary = vocabulary
        self.config = config
        self.batch_size = batch_size
        self.seed = seed
        self.rows = range(batch_size) if rows is None else rows
        self.num_epochs = num_epochs
        self.templates = templates_of(config)
        self.objective = OBJECTIVES[task](config, vocabulary)
        self.first_sentinel = vocabulary.size - self.objective.num_sentinels
        self._check_not_empty()
        self.seek(np.zeros((len(self.rows), NUM_TASKS, len(Position._fields)), np.int64))

    @property
    def position(self) -> np.ndarray:
        """The position of the next batch: int64 [rows, 1 task, fields of Position]."""
        return np.array([[lane.position] for lane in self._lanes], np.int64)

    def seek(self, position: np.ndarray) -> None:
        """Go to a position. The position of an older run, [rows, fields], has no axis of tasks."""
        self._lanes = self._open_lanes(position)

    def describe(self, position: np.ndarray) -> list[str]:
        """Return the names of the documents in each row of the batch at `position`."""
        lanes = self._open_lanes(position)
        return [', '.join(lane.next_document_names()) for lane in lanes]

    def __iter__(self) -> 'Stream':
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rows: list[list[dict[str, np.ndarray]]] = []
        for lane in self._lanes:
            example = next(lane, None)
            if example is None:
                rows.append([])
            else:
                rows.append([{'inputs': example.inputs, 'targets': example.targets}])
        if not any(rows):
            raise StopIteration
        return features.encoder_decoder(rows, self.config.lengths, pack=False)

    def tokenize(self, records: Sequence[Record]) -> list[dict[str, list[int]]]:
        """Return {feature: ids without EOS} of each record, of the features of the objective."""
        tokenized: list[dict[str, list[int]]] = [{} for _ in records]
        for feature in self.objective.features:
            texts = [text_of(record, feature, self.config, self.templates) for record in records]
            for record, ids in zip(tokenized, self.vocabulary.encode(texts), strict=True):
                record[feature] = ids
        return tokenized

    def _open_lanes(self, position: np.ndarray) -> list['Lane']:
        tasks = np.reshape(position, (len(self.rows), NUM_TASKS, len(Position._fields)))
        lanes = []
        for row, fields in zip(self.rows, tasks[:, 0].tolist(), strict=True):
            lanes.append(Lane(self, row, Position(*fields)))
        return lanes

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
                if record['targets']:
                    return True
        return False


class Lane:
    """Iterator of the examples of one row of the batch. `position` is that of the next one.

    It reads its own part of every epoch, in groups of documents.
    """

    def __init__(self, stream: Stream, row: int, position: Position):
        self.position = position
        self._stream = stream
        self._row = row
        self._documents = self._open_epoch(position)
        self._group = Group(end=position)
        self._given = 0  # examples of the group

    def __iter__(self) -> 'Lane':
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

    def next_document_names(self) -> list[str]:
        """Return the names of the documents in the next example; none after the last example."""
        try:
            self._go_to_example()
        except StopIteration:
            return []
        return self._group.document_names(self._given)

    def _go_to_example(self) -> None:
        """Read groups until one has an example left. Raise StopIteration after the last epoch."""
        while self._given >= len(self._group.examples):
            self._group = self._read_group(self._group.end)
            self._given = self._group.start.given

    def _read_group(self, start: Position) -> 'Group':
        group_size = self._stream.objective.records_per_group
        documents = list(itertools.islice(self._documents, group_size))
        while not documents:
            start = Position(epoch=start.epoch + 1)
            if self._is_past_the_end(start):
                raise StopIteration
            self._documents = self._open_epoch(start)
            documents = list(itertools.islice(self._documents, group_size))
        return self._make_group(documents, start)

    def _open_epoch(self, position: Position) -> Iterator[Document]:
        """Return the documents of the epoch of `position`, from there on."""
        if self._is_past_the_end(position):
            return iter(())
        share = Share(
            seed=self._stream.seed,
            epoch=position.epoch,
            lane=self._row,
            num_lanes=self._stream.batch_size,
        )
        return self._stream.source.documents(
            self._stream.split, share, pool=position.pool, offset=position.offset
        )

    def _is_past_the_end(self, position: Position) -> bool:
        num_epochs = self._stream.num_epochs
        return num_epochs is not None and position.epoch >= num_epochs

    def _make_group(self, documents: list[Document], start: Position) -> 'Group':
        """Tokenize the documents, and make examples of them in a random order."""
        stream = self._stream
        key = (stream.seed, start.epoch, self._row, start.pool, start.offset)
        records = stream.tokenize([document.record for document in documents])
        examples = stream.objective.examples(records, *key)
        # Differs from T5X, which shuffles in a buffer of 1,000 examples: lanes read far apart, and
        # each shuffles the examples of its group. (The key's words make the order: keep them.)
        order = permutation(len(examples), 'pieces', *key)
        last = documents[-1]
        return Group(
            start=start,
            end=Position(epoch=start.epoch, pool=last.pool, offset=last.offset + 1),
            examples=[examples[i] for i in order],
            names=[document.record.name for document in documents],
        )


class Group(NamedTuple):
    """The examples of a few documents, in the order of a lane."""

    end: Position  # where the next group begins
    start: Position = Position()
    examples: Sequence[Example] = ()
    names: Sequence[str] = ()  # of the documents

    def document_names(self, i: int) -> list[str]:
        """Return the names of the documents that have ids in example `i`."""
        names = [self.names[k] for k in self.examples[i].records]
        return list(dict.fromkeys(names))  # the parts of a long line have one name


def feature_lengths(lengths) -> dict[str, int]:
    """Return the length of each feature of a batch of `Stream`; `lengths`: config.data.lengths."""
    return {
        'encoder_input_tokens': lengths.inputs,
        'decoder_input_tokens': lengths.targets,
        'decoder_target_tokens': lengths.targets,
        'decoder_loss_weights': lengths.targets,
    }


def training_texts(source: Source, config: Any) -> Iterator[str]:
    """Yield the texts of an epoch from all over the corpus: what a vocabulary is trained on."""
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
