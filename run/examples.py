"""The examples of a split that a model answers, scores or encodes, in the order of their records.

Imports no jax.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from stream import TokenizedTask
from tasks.preprocessors import text_of
from vocabulary import Vocabulary

SPLITS = ('train', 'validation', 'test')
RECORDS_AT_ONCE = 128  # that are tokenized
PRETOKENIZED = '_pretokenized'  # T5X's name of a text is that of its ids with this at its end


class Example(NamedTuple):
    """An example of a split of a task, or of a file."""

    fields: Mapping[str, Any]  # its texts among them; of a task cache, what the record has
    inputs: np.ndarray  # int32 [length]: ids, EOS included, at most data.lengths
    targets: np.ndarray | None  # the same; None for a line of a file without targets
    is_trimmed: bool

    def text(self, feature: str, vocabulary: Vocabulary) -> str:
        """Return the inputs or targets as text: that of the record, or that of the ids if it has none."""
        for name in (feature + PRETOKENIZED, feature):
            if isinstance(self.fields.get(name), str | bytes):
                return text_of(self.fields[name])
        return vocabulary.decode(getattr(self, feature).tolist())

    def features(self) -> dict[str, Any]:
        """Return the fields in SeqIO's order: in place of a text, the text and its ids.

        Source: seqio/preprocessors.py tokenize.
        """
        ids = {'inputs': self.inputs}
        if self.targets is not None:
            ids['targets'] = self.targets
        found: dict[str, Any] = {}
        for name in dict.fromkeys([*self.fields, *ids]):
            if name not in ids:
                found.setdefault(name, self.fields[name])
                continue
            if isinstance(self.fields.get(name), str):
                found[name + PRETOKENIZED] = self.fields[name]
            found[name] = ids[name]
        return found


def check_split(split: str) -> None:
    """Raise ValueError for a value of --split that names no split."""
    if split not in SPLITS:
        raise ValueError(f'--split={split}: use one of {", ".join(SPLITS)}')


def read_split(
    task: TokenizedTask, split: str, limit: int | None = None, with_choices: bool = False
) -> Iterator[Example]:
    """Yield the examples of a split, at most `limit`, cut as in training.

    `with_choices`: and those after the last one that have its inputs, the other choices of one input.
    A bad record has none, and so has one that the objective drops. Raises ValueError for a split that
    the task does not have.
    """
    examples = _read(task, split, is_limited=limit is not None)
    for last in itertools.islice(examples, limit):
        yield last
    if with_choices:
        yield from itertools.takewhile(lambda x: np.array_equal(x.inputs, last.inputs), examples)


def _read(task: TokenizedTask, split: str, is_limited: bool) -> Iterator[Example]:
    records = task.source.records(split, whole=True)
    num_at_once = RECORDS_AT_ONCE
    if task.source.is_tokenized or is_limited:  # no record is read after the last example
        num_at_once = 1
    while group := list(itertools.islice(records, num_at_once)):
        for tokenized in task.tokenize(group):
            fields = group[0].fields if task.source.is_tokenized else tokenized.texts
            for made in task.objective.examples([tokenized.name], [tokenized.ids]):
                yield Example(fields, made.inputs, made.targets, made.is_trimmed)
