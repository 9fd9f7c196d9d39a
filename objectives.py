"""Objectives: from raw ids to examples. Span corruption is the first.

All randomness is a function of a key: the seed and a position in the data. Imports no jax.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sources import permutation, random_bits
from vocabulary import EOS_ID, Vocabulary


class Example(NamedTuple):
    """The ids of one example, without padding. Both end with EOS."""

    inputs: np.ndarray
    targets: np.ndarray
    names: Sequence[str]  # of the records that it is made of
    is_trimmed: bool = False  # its texts were longer than a row


class Objective(Protocol):
    """Makes examples of tokenized records. A new objective is such a class and a row in OBJECTIVES."""

    features: tuple[str, ...]  # the texts of a record that it takes, tokenized
    records_per_group: int  # records that it takes at once
    num_sentinels: int  # ids at the end of the vocabulary that mark its spans

    def __init__(self, config: Any, vocabulary: Vocabulary):
        """`config`: config.data. Raise ValueError for settings that do not fit the objective."""

    def examples(
        self, names: Sequence[str], records: Sequence[Mapping[str, np.ndarray]], *key: int | str
    ) -> list[Example]:
        """Make examples of a group of named records, {feature: ids without EOS}, random by `key`."""


class Denoising:
    """Concatenates documents, cuts them into rows of raw ids, and makes an example of each row.

    Source: t5/data/preprocessors.py `select_random_chunk`, `reduce_concat_tokens`, `split_tokens`.
    """

    features: tuple[str, ...] = ('targets',)
    records_per_group = 128  # that are concatenated, as in t5/data/preprocessors.py
    raw_length: int  # ids that fill a row of the batch

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (inputs, targets) of each row of int32 [rows, raw_length or less]."""
        raise NotImplementedError

    def examples(
        self, names: Sequence[str], records: Sequence[Mapping[str, np.ndarray]], *key: int | str
    ) -> list[Example]:
        chunks = []
        chunk_names = []
        for i, record in enumerate(records):
            if len(record['targets']):
                chunks.append(select_random_chunk(record['targets'], i, *key))
                chunk_names.append(names[i])
        tokens = np.concatenate([np.zeros(0, np.int32), *chunks], dtype=np.int32)
        rows = []
        for raw_ids in split_tokens(tokens, self.raw_length):
            rows += self.corrupt(raw_ids, *key)
        ends = np.cumsum([len(chunk) for chunk in chunks])
        begins = np.arange(len(rows)) * self.raw_length
        first = np.searchsorted(ends, begins, side='right')
        last = np.searchsorted(ends, begins + self.raw_length - 1, side='right')
        examples = []
        for (inputs, targets), i, j in zip(rows, first, last, strict=True):
            examples.append(Example(inputs, targets, names=chunk_names[i : j + 1]))
        return examples


class SpanCorruption(Denoising):
    """Replaces spans of noise by sentinels. The targets are the spans, each after its sentinel.

    Source: T5 (Raffel et al. 2020) §3.1.4; t5/data/preprocessors.py `span_corruption`.
    """

    def __init__(self, config: Any, vocabulary: Vocabulary):
        self.noise_density = config.noise_density
        self.mean_span_length = config.mean_noise_span_length
        self.lengths = config.lengths
        self.vocabulary_size = vocabulary.size
        if self.lengths.inputs < MIN_LENGTH:
            raise ValueError(
                f'data.lengths.inputs={self.lengths.inputs} is too short: a row holds a token, a '
                f'sentinel and EOS: use {MIN_LENGTH} or more'
            )
        self.raw_length, targets_length = random_spans_helper(
            self.lengths.inputs, self.noise_density, self.mean_span_length
        )
        _, self.num_sentinels = num_noise_tokens_and_spans(
            self.raw_length, self.noise_density, self.mean_span_length
        )
        self._check_lengths(max(targets_length, MIN_LENGTH))
        self._check_sentinels(vocabulary)

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> list[tuple[np.ndarray, np.ndarray]]:
        mask = random_spans_noise_mask(
            raw_ids.shape, self.noise_density, self.mean_span_length, *key
        )
        inputs = noise_span_to_unique_sentinel(raw_ids, mask, self.vocabulary_size)
        targets = noise_span_to_unique_sentinel(raw_ids, ~mask, self.vocabulary_size)
        inputs = append_eos_after_trim(inputs, self.lengths.inputs)
        targets = append_eos_after_trim(targets, self.lengths.targets)
        return list(zip(inputs, targets, strict=True))

    def _check_lengths(self, targets_length: int) -> None:
        if self.raw_length >= MAX_RAW_LENGTH:
            raise ValueError(
                f'data.noise_density={self.noise_density}, '
                f'data.mean_noise_span_length={self.mean_span_length}: '
                f'data.lengths.inputs={self.lengths.inputs} would hold {MAX_RAW_LENGTH:,} tokens '
                'or more before the corruption: lower the density'
            )
        if self.lengths.targets < targets_length:
            raise ValueError(
                f'data.lengths.targets={self.lengths.targets}: too short for the inputs; use '
                f'{targets_length} or more'
            )

    def _check_sentinels(self, vocabulary: Vocabulary) -> None:
        if vocabulary.num_sentinels == 0:
            raise ValueError(
                'data.extra_ids=0: span corruption marks its spans with sentinels, and this '
                f'vocabulary has none: use {self.num_sentinels} or more (T5 has 100)'
            )
        if vocabulary.num_sentinels < self.num_sentinels:
            raise ValueError(
                f'data.lengths.inputs={self.lengths.inputs} gives {self.num_sentinels} noise spans '
                f'for {vocabulary.num_sentinels} sentinels: use shorter inputs or longer spans'
            )


class TextToText:
    """Each record is an example, its inputs and targets as they are, cut to the lengths of a row."""

    features: tuple[str, ...] = ('inputs', 'targets')
    records_per_group = 16  # that are tokenized at once
    num_sentinels = 0

    def __init__(self, config: Any, vocabulary: Vocabulary):
        self.lengths = config.lengths

    def examples(
        self, names: Sequence[str], records: Sequence[Mapping[str, np.ndarray]], *key: int | str
    ) -> list[Example]:
        max_inputs = self.lengths.inputs
        max_targets = self.lengths.targets
        all_inputs = append_eos_to_each([record['inputs'] for record in records], max_inputs)
        all_targets = append_eos_to_each([record['targets'] for record in records], max_targets)
        examples = []
        for i, record in enumerate(records):
            inputs_are_long = len(record['inputs']) >= max_inputs
            targets_are_long = len(record['targets']) >= max_targets
            example = Example(
                inputs=all_inputs[i],
                targets=all_targets[i],
                names=[names[i]],
                is_trimmed=inputs_are_long or targets_are_long,
            )
            examples.append(example)
        return examples


# Every value of data.task.
OBJECTIVES: dict[str, type[Objective]] = {
    'span_corruption': SpanCorruption,
    'c4_v220_span_corruption': SpanCorruption,
    'text_to_text': TextToText,
}


# The parts of the objectives, under the names of t5/data/preprocessors.py.

EOS = np.array([EOS_ID], np.int32)
MIN_LENGTH = 3  # of inputs and targets: a token, a sentinel and EOS
MAX_RAW_LENGTH = 1 << 20
MAX_DOCUMENT_TOKENS = 65536  # of a longer document one chunk is taken, as there


def select_random_chunk(ids: np.ndarray, *key: int | str) -> np.ndarray:
    """Return one aligned chunk of a long document; the last, short one is as likely as others."""
    num_chunks = -(-len(ids) // MAX_DOCUMENT_TOKENS)
    if num_chunks <= 1:
        return ids
    start = int(permutation(num_chunks, 'chunk', *key)[0]) * MAX_DOCUMENT_TOKENS
    return ids[start : start + MAX_DOCUMENT_TOKENS]


def split_tokens(tokens: np.ndarray, length: int) -> list[np.ndarray]:
    """Cut ids [n] into full rows [n // length, length] and a rest [1, n % length]; no empty ones."""
    full = len(tokens) // length * length
    full_rows = tokens[:full].reshape(-1, length)
    last_row = tokens[None, full:]
    return [rows for rows in (full_rows, last_row) if rows.size]


def random_spans_helper(
    inputs_length: int,
    noise_density: float,
    mean_length: float,
    extra_inputs: int = 1,
    extra_targets: int = 1,
) -> tuple[int, int]:
    """Return (number of raw ids, targets length) for inputs of `inputs_length`, EOS included.

    `extra_inputs` and `extra_targets` are the tokens that mark a span.
    """

    def corrupted_lengths(raw_length: int) -> tuple[int, int]:
        num_noise = round(raw_length * noise_density)
        num_spans = round(num_noise / mean_length)
        inputs = raw_length - num_noise + num_spans * extra_inputs + 1
        targets = num_noise + num_spans * extra_targets + 1
        return inputs, targets

    raw_length = inputs_length - 1
    while raw_length < MAX_RAW_LENGTH and corrupted_lengths(raw_length + 1)[0] <= inputs_length:
        raw_length += 1
    inputs, targets = corrupted_lengths(raw_length)
    if noise_density == 0.5 and targets > inputs:
        raw_length -= 1
        targets -= 1
    return raw_length, targets


def random_spans_noise_mask(
    shape: tuple[int, int], density: float, mean_length: float, *key: int | str
) -> np.ndarray:
    """Return bool [rows, length]: spans of non-noise and noise in turn, as many in every row."""
    num_rows = shape[0]
    length = max(shape[1], 2)  # a single token is not noise
    num_noise, num_spans = num_noise_tokens_and_spans(length, density, mean_length)
    noise = random_segments(num_rows, num_noise, num_spans, 'noise', length, *key)
    nonnoise = random_segments(num_rows, length - num_noise, num_spans, 'nonnoise', length, *key)
    ends = np.cumsum(np.stack([nonnoise, noise], axis=2).reshape(num_rows, -1), axis=1)
    is_start = np.zeros((num_rows, length), np.int8)
    np.put_along_axis(is_start, ends[:, :-1], 1, axis=1)
    is_noise = np.bitwise_xor.accumulate(is_start, axis=1) == 1  # an odd number of starts
    return is_noise[:, : shape[1]]


def num_noise_tokens_and_spans(length: int, density: float, mean_length: float) -> tuple[int, int]:
    """Return how many of `length` tokens are noise, and in how many spans."""
    num_noise = int(np.round(np.float32(length) * np.float32(density)))  # T5 rounds in float32
    num_noise = min(max(num_noise, 1), length - 1)
    num_spans = max(round(num_noise / mean_length), 1)
    # Differs from T5X, which fails where too few tokens are left to keep the spans apart.
    return num_noise, min(num_spans, length - num_noise)


def random_segments(
    num_rows: int, num_items: int, num_segments: int, *key: int | str
) -> np.ndarray:
    """Return segment lengths [rows, num_segments], uniform over all ways to cut `num_items`."""
    if num_segments == 1:
        return np.full((num_rows, 1), num_items)
    bits = random_bits((num_rows, num_items - 1), *key)
    # A cut after each of the items that have the least bits: sorting all of them takes longer.
    least = np.argpartition(bits, num_segments - 2, axis=1)[:, : num_segments - 1]
    cuts = np.sort(least, axis=1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=num_items)


def noise_span_to_unique_sentinel(
    tokens: np.ndarray, mask: np.ndarray, vocabulary_size: int
) -> np.ndarray:
    """Replace the i-th masked span of each row by the i-th last id; rows must shrink equally."""
    is_first = mask.copy()
    is_first[:, 1:] &= ~mask[:, :-1]
    sentinels = vocabulary_size - np.cumsum(is_first, axis=1, dtype=np.int32)
    return np.where(is_first, sentinels, tokens)[is_first | ~mask].reshape(len(tokens), -1)


def append_eos_to_each(sequences: Sequence[np.ndarray], length: int) -> list[np.ndarray]:
    """Append EOS to each of some ids [n], which are cut first so that it is at `length` at most."""
    parts = []
    for ids in sequences:
        parts += [ids[: length - 1], EOS]
    whole = np.concatenate([np.zeros(0, np.int32), *parts])
    with_eos = []
    begin = 0
    for ids in sequences:
        end = begin + min(len(ids), length - 1) + 1
        with_eos.append(whole[begin:end])
        begin = end
    return with_eos


def append_eos_after_trim(tokens: np.ndarray, length: int | None = None) -> np.ndarray:
    """Append EOS to each row, which is cut first so that it has `length` ids at most."""
    if length is not None:
        tokens = tokens[:, : length - 1]
    num_rows, num_tokens = tokens.shape
    with_eos = np.full((num_rows, num_tokens + 1), EOS_ID, np.int32)
    with_eos[:, :-1] = tokens
    return with_eos
