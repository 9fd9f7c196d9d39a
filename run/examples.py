"""The examples of a split that a model answers, scores or encodes, in the order of their records.

Imports no jax.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from messages import Refused
from stream import TokenizedTask
from tasks.preprocessors import Fields, text_of
from vocabulary import Vocabulary

SPLITS = ('train', 'validation', 'test')
RECORDS_AT_ONCE = 128  # tokenized in one call
FIRST_TARGETS = 100  # targets per task that a new run encodes and decodes as a check
PRETOKENIZED = '_pretokenized'  # T5X's suffix for the text behind the ids


class RecordExample(NamedTuple):
    """An example of a split of a task, or of a file."""

    fields: Fields  # including its texts; from a task cache, the full record
    inputs: np.ndarray  # int32 [length]: ids, EOS included, at most data.lengths
    targets: np.ndarray | None  # the same; None for a line of a file without targets
    is_trimmed: bool = False  # only for tasks: the texts were longer than a row
    numbers: Mapping[str, float] = {}  # only for tasks: inputs of a user's model

    def text(self, feature: str, vocabulary: Vocabulary) -> str:
        """Return the inputs or targets as text: from the record, or from the ids if it has none."""
        text = self.text_of_record(feature)
        if text is None:
            text = vocabulary.decode(getattr(self, feature).tolist())
        return text

    def text_of_record(self, feature: str) -> str | None:
        """Return the text of the inputs or targets in the record; None if it has only ids."""
        for name in (feature + PRETOKENIZED, feature):
            if isinstance(self.fields.get(name), str | bytes):
                return text_of(self.fields[name])
        return None

    def features(self) -> dict[str, object]:
        """Return the fields in SeqIO's order, each text followed by its ids. Source: seqio/preprocessors.py tokenize."""
        ids = {'inputs': self.inputs}
        if self.targets is not None:
            ids['targets'] = self.targets
        features: dict[str, object] = {}
        for name in dict.fromkeys([*self.fields, *ids]):
            if name not in ids:
                features.setdefault(name, self.fields[name])
                continue
            if isinstance(self.fields.get(name), str):
                features[name + PRETOKENIZED] = self.fields[name]
            features[name] = ids[name]
        return features


def check_split(split: str) -> None:
    if split not in SPLITS:
        raise Refused(f'--split={split}: use one of {", ".join(SPLITS)}')


def read_split(
    task: TokenizedTask, split: str, limit: int | None = None, with_choices: bool = False
) -> Iterator[RecordExample]:
    """Yield the examples of a split, at most `limit`, cut as in training.

    `with_choices`: also the next examples with the inputs of the last one, its other choices.
    Bad records, and records that the objective drops, yield no example.
    """
    examples = _read(task, split, is_limited=limit is not None)
    for last in itertools.islice(examples, limit):
        yield last
    if with_choices:
        yield from itertools.takewhile(lambda x: np.array_equal(x.inputs, last.inputs), examples)


def _read(task: TokenizedTask, split: str, is_limited: bool) -> Iterator[RecordExample]:
    records = task.source.records(split, whole=True)
    num_at_once = RECORDS_AT_ONCE
    if task.source.is_tokenized or is_limited:  # no record is read after the last example
        num_at_once = 1
    while group := list(itertools.islice(records, num_at_once)):
        for tokenized in task.tokenize(group):
            fields = group[0].fields if task.source.is_tokenized else tokenized.texts
            for one in itertools.chain(*task.examples([tokenized])):
                yield RecordExample(fields, one.inputs, one.targets, one.is_trimmed, one.numbers)


def changes_of_targets(tasks: Sequence[TokenizedTask]) -> Iterator[str]:
    """Yield a line for each text-to-text task if the vocabulary changes some of its first targets.

    A model cannot answer with such a text. Targets of task caches that have only ids are skipped.
    """
    for task in tasks:
        if not task.task.takes_inputs:
            continue
        examples: list[RecordExample] = []
        with contextlib.suppress(Exception):  # a bad record: training raises its error later
            examples.extend(read_split(task, 'train', FIRST_TARGETS))
        texts = [example.text_of_record('targets') for example in examples]
        targets = [text for text in texts if text is not None]
        num_changed = 0
        sample = ''
        for text, ids in zip(targets, task.vocabulary.encode_as_arrays(targets), strict=True):
            decoded = task.vocabulary.decode(ids)
            if decoded != text:
                num_changed += 1
                if not sample:  # the text around the first difference
                    first = len(os.path.commonprefix([text, decoded]))
                    part = slice(max(first - 30, 0), first + 30)
                    sample = f'{text[part]!r} becomes {decoded[part]!r}'
        if num_changed:
            yield (
                f'task {task.name}: {num_changed} of the first {len(targets)} targets change by '
                f'encoding and decoding: {sample}'
            )
