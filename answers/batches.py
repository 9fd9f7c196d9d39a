"""Batches of few shapes for any number of questions. Imports no jax."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

LENGTH_MULTIPLE = 32  # divides padded lengths, because each length is compiled
EXAMPLES_PER_CHUNK = 4096  # questions sorted by length at a time

Ids = Sequence[int] | NDArray
Numbers = Mapping[str, Sequence[float]] | None  # {name: a number for each input}
Result = TypeVar('Result')


class Question(NamedTuple):
    """Ids to answer or to score, EOS included."""

    inputs: Ids
    targets: Sequence | NDArray = ()  # to score: ids, or the ids of each choice
    number: int = 0  # samples depend on the seed and on this number
    prompt: Ids = ()  # the beginning of the answers
    numbers: Mapping[str, float] = {}  # inputs of a user's model


class Answer(NamedTuple):
    """The answers to a question, best first."""

    tokens: list[list[int]]  # with EOS, without padding
    texts: list[str]  # empty without a vocabulary
    scores: list[float]  # empty without return_scores


def in_batches(
    compute: Callable[[Sequence[Question], int], Iterable[Result]],
    questions: Iterable[Question],
    batch_size: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Iterator[Result]:
    """Yield the results of `compute(batch, number of rows)`, in the order of the questions.

    One chunk of questions at a time is read and sorted by length, to reduce padding. The longest come
    first, because they need the most memory. All batches of a chunk have the same number of rows, so
    few programs are compiled. `progress` is called with the number of questions of each batch.
    """

    def lengths(i: int) -> tuple[int, int, int]:
        num_inputs = len(chunk[i].inputs)
        return next_size(num_inputs, LENGTH_MULTIPLE), len(chunk[i].targets), num_inputs

    iterator = iter(questions)
    while chunk := list(itertools.islice(iterator, EXAMPLES_PER_CHUNK)):
        order = sorted(range(len(chunk)), key=lengths, reverse=True)
        num_rows = min(batch_size, len(chunk))
        results: dict[int, Result] = {}
        for start in range(0, len(chunk), batch_size):
            indices = order[start : start + batch_size]
            batch_results = compute([chunk[i] for i in indices], num_rows)
            results.update(zip(indices, batch_results, strict=True))
            progress(len(indices))
        for i in range(len(chunk)):
            yield results[i]


def numbers_of(questions: Sequence[Question], inputs_bM: NDArray) -> dict[str, NDArray]:
    """Return {'encoder_NAME': float32 [b, M]}, each question's numbers at its inputs; 0 for padding."""
    arrays: dict[str, NDArray] = {}
    for i, question in enumerate(questions):
        assert question.numbers.keys() == questions[0].numbers.keys(), 'all need the same numbers'
        for name, value in question.numbers.items():
            array = arrays.setdefault(f'encoder_{name}', np.zeros(inputs_bM.shape, np.float32))
            array[i] = value * (inputs_bM[i] > 0)
    return arrays


def padded_rows(ids: Sequence[Ids], num_rows: int, multiple: int) -> NDArray:
    """Return ids as int32 [rows, length], padded with 0 to sizes of `next_size`; `multiple` divides the rows."""
    num_rows = next_size(max(len(ids), num_rows), multiple)
    rows = np.zeros((num_rows, next_size(max(map(len, ids)), LENGTH_MULTIPLE)), np.int32)
    for i, row_ids in enumerate(ids):
        rows[i, : len(row_ids)] = row_ids
    return rows


def next_size(n: int, multiple: int) -> int:
    """Return the smallest of `multiple` times 1, 2, 3, 4, 6, 8, 12, 16 ... that is at least `n`."""
    size = multiple
    while size < n:
        if size + size // 2 >= n and size > multiple:
            return size + size // 2
        size *= 2
    return size
