"""Objectives: from raw ids to examples. Denoising, language modelling, UL2's mixture, text to text.

An objective is a class and its row in OBJECTIVES; denoising.py has the parts. All randomness is a
function of a key: the seed and a position in the data. Imports no jax.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from denoising import (
    DROPPED,
    EOS,
    MAX_RAW_LENGTH,
    Documents,
    append_eos_after_trim,
    append_eos_to_each,
    drop_noise_tokens,
    drop_nonnoise_tokens,
    iid_noise_mask,
    join_documents,
    noise_span_to_unique_sentinel,
    noise_token_to_random_token_or_sentinel,
    noise_token_to_sentinel,
    nonnoise_span_to_unique_sentinel,
    num_noise_tokens_and_spans,
    permute_noise_tokens,
    random_fractions,
    random_integers,
    random_prefix_noise_mask,
    random_spans_helper,
    random_spans_noise_mask,
    split_tokens,
    without_spans_after,
)
from vocabulary import UNK_ID, Vocabulary

MIN_LENGTH = 3  # of inputs and targets: a token, a sentinel and EOS


class Example(NamedTuple):
    """The ids of one example, without padding. Both end with EOS.

    Only the rows of `FullLm` end where they are cut. Inputs are never empty: those without a token
    are EOS alone, so that the decoder has something to read, in a packed row, too.
    """

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


Pair = tuple[np.ndarray, np.ndarray]


class Denoising:
    """Cuts documents, concatenated or each alone, into rows of raw ids, and corrupts each row.

    Source: t5/data/preprocessors.py `select_random_chunk`, `reduce_concat_tokens`, `split_tokens`,
    `denoise`.
    """

    features: tuple[str, ...] = ('targets',)
    records_per_group = 128  # that are concatenated, as in t5/data/preprocessors.py
    concatenates = True  # in T5; data.concatenate can change it
    min_inputs_length = MIN_LENGTH
    num_sentinels = 0
    raw_length: int  # ids that fill a row of the batch

    def __init__(self, config: Any, vocabulary: Vocabulary):
        self.lengths = config.lengths
        self.vocabulary_size = vocabulary.size
        if config.concatenate != 'auto':
            self.concatenates = config.concatenate == 'yes'
        if self.lengths.inputs < self.min_inputs_length:
            raise ValueError(
                f'data.lengths.inputs={self.lengths.inputs} is too short: a row holds a token, a '
                f'sentinel and EOS: use {self.min_inputs_length} or more'
            )
        self._set_lengths(config, vocabulary)

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        """Set `raw_length` and `num_sentinels`. Raise ValueError for settings that do not fit."""
        raise NotImplementedError

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        """Return inputs and targets, without EOS, of each row of int32 [rows, raw_length or less].

        Both are int32 [rows, any length], with DROPPED in place of what is left out.
        """
        raise NotImplementedError

    def examples(
        self, names: Sequence[str], records: Sequence[Mapping[str, np.ndarray]], *key: int | str
    ) -> list[Example]:
        documents = join_documents(names, records, *key)
        rows = split_tokens(self.text_ends(documents), itertools.repeat(self.raw_length))
        return corrupt_rows(documents, rows, self.corrupt, self.lengths, *key)

    def text_ends(self, documents: Documents) -> list[int]:
        """Return where the texts end that are cut into rows: all documents in one, or each."""
        if self.concatenates:
            return [len(documents.ids)]
        return documents.ends.tolist()

    def check_targets(self, length: int) -> None:
        """Raise ValueError unless a row has room for targets of `length`, EOS included."""
        if self.lengths.targets < length:
            raise ValueError(
                f'data.lengths.targets={self.lengths.targets}: too short for the inputs; use '
                f'{length} or more'
            )

    def check_sentinels(self, num_spans: int, vocabulary: Vocabulary) -> None:
        """Raise ValueError unless there is a sentinel for each span of noise."""
        if vocabulary.num_sentinels == 0:
            raise ValueError(
                'data.extra_ids=0: the objective marks noise with sentinels, and this vocabulary '
                f'has none: use {num_spans} or more (T5 has 100)'
            )
        if vocabulary.num_sentinels < num_spans:
            raise ValueError(
                f'data.lengths.inputs={self.lengths.inputs} gives {num_spans} noise spans '
                f'for {vocabulary.num_sentinels} sentinels: use shorter inputs, fewer or longer '
                'spans, or more sentinels'
            )


def corrupt_rows(
    documents: Documents,
    rows: np.ndarray,
    corrupt: Callable[..., Pair],
    lengths: Any,
    *key: int | str,
) -> list[Example]:
    """Return the examples of rows, int [rows, 2], which `corrupt` makes of all that are equally long."""
    examples = []
    row_lengths = rows[:, 1] - rows[:, 0]
    for length in np.unique(row_lengths)[::-1]:
        equal_rows = rows[row_lengths == length]
        raw_ids = sliding_window_view(documents.ids, length)[equal_rows[:, 0]]
        inputs, targets = corrupt(raw_ids, *key)
        all_inputs = append_eos_after_trim(inputs, lengths.inputs)
        all_targets = append_eos_after_trim(targets, lengths.targets)
        names = documents.names_of(equal_rows)
        is_trimmed = np.count_nonzero(targets != DROPPED, axis=1) >= lengths.targets
        for parts in zip(all_inputs, all_targets, names, is_trimmed.tolist(), strict=True):
            examples.append(Example(*parts))
    return examples


# Spans of noise.


class SpanCorruption(Denoising):
    """Replaces spans of noise by sentinels. The targets are the spans, each after its sentinel.

    Source: T5 (Raffel et al. 2020) §3.1.4; t5/data/preprocessors.py `span_corruption`.
    """

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        self.noise_density = config.noise_density
        self.mean_span_length = config.mean_noise_span_length
        self.raw_length, targets_length = random_spans_helper(
            self.lengths.inputs, self.noise_density, self.mean_span_length
        )
        _, self.num_sentinels = num_noise_tokens_and_spans(
            self.raw_length, self.noise_density, self.mean_span_length
        )
        if self.raw_length >= MAX_RAW_LENGTH:
            raise ValueError(
                f'data.noise_density={self.noise_density}, '
                f'data.mean_noise_span_length={self.mean_span_length}: '
                f'data.lengths.inputs={self.lengths.inputs} would hold {MAX_RAW_LENGTH:,} tokens '
                'or more before the corruption: lower the density'
            )
        self.check_targets(max(targets_length, MIN_LENGTH))
        self.check_sentinels(self.num_sentinels, vocabulary)

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        return replace_random_spans(
            raw_ids, self.noise_density, self.mean_span_length, self.vocabulary_size, *key
        )


def replace_random_spans(
    raw_ids: np.ndarray, density: float, mean_length: float, vocabulary_size: int, *key: int | str
) -> Pair:
    """Return inputs and targets of span corruption."""
    mask = random_spans_noise_mask(raw_ids.shape, density, mean_length, *key)
    inputs = noise_span_to_unique_sentinel(raw_ids, mask, vocabulary_size)
    targets = nonnoise_span_to_unique_sentinel(raw_ids, mask, vocabulary_size)
    return inputs, targets


# Noise that falls on each token alone, at data.noise_density.


class IidDenoising(Denoising):
    """Replaces each run of noise by a sentinel. The targets are the noise, and sentinels for the rest.

    Differs from T5, whose sentinels go on among the ordinary ids: a row has no more noise after as
    many spans as there are sentinels. Source: t5/data/preprocessors.py `iid_denoising`;
    t5/models/gin/objectives/iid_15_u_u.gin.
    """

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        self.noise_density = config.noise_density
        self.raw_length = self.lengths.inputs - 1
        most_spans = self.raw_length // 2 + 1  # of either kind
        self.num_sentinels = min(most_spans, vocabulary.num_sentinels)
        mean_noise = self.raw_length * self.noise_density
        mean_spans = (1 - self.noise_density) * (1 + (self.raw_length - 1) * self.noise_density)
        self.check_sentinels(max(math.ceil(mean_spans), 2), vocabulary)
        self.check_targets(max(math.ceil(mean_noise + mean_spans) + 1, MIN_LENGTH))

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        mask = iid_noise_mask(raw_ids.shape, self.noise_density, *key)
        # There may be one more span that is not noise.
        mask = without_spans_after(mask, self.num_sentinels - 1)
        inputs = noise_span_to_unique_sentinel(raw_ids, mask, self.vocabulary_size)
        targets = nonnoise_span_to_unique_sentinel(raw_ids, mask, self.vocabulary_size)
        return inputs, targets


class DropCorruptedTokens(Denoising):
    """Drops the noise, without a trace. The targets are the noise.

    Source: T5 §3.3.2; t5/models/gin/objectives/iid_15_d_d.gin.
    """

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        self.noise_density = config.noise_density
        self.raw_length = self.lengths.inputs - 1
        self.check_targets(math.ceil(self.raw_length * self.noise_density) + 1)

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        mask = iid_noise_mask(raw_ids.shape, self.noise_density, *key)
        return drop_noise_tokens(raw_ids, mask), drop_nonnoise_tokens(raw_ids, mask)


class MassStyle(Denoising):
    """Replaces each token of noise by a sentinel, the same one. The targets are the whole text.

    Source: T5 §3.3.2; t5/models/gin/objectives/iid_15_m_f.gin.
    """

    num_sentinels = 1

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        self.noise_density = config.noise_density
        self.raw_length = self.lengths.inputs - 1
        self.check_targets(self.raw_length + 1)
        self.check_sentinels(self.num_sentinels, vocabulary)

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        mask = iid_noise_mask(raw_ids.shape, self.noise_density, *key)
        return self.mark(raw_ids, mask, *key), raw_ids

    def mark(self, raw_ids: np.ndarray, mask: np.ndarray, *key: int | str) -> np.ndarray:
        """Return the inputs."""
        return noise_token_to_sentinel(raw_ids, mask, self.vocabulary_size)


class BertStyle(MassStyle):
    """Replaces nine of ten tokens of noise by a sentinel, one by a random id, as BERT does.

    Source: T5 §3.3.1; t5/models/gin/objectives/iid_15_r10s90_f.gin.
    """

    def mark(self, raw_ids: np.ndarray, mask: np.ndarray, *key: int | str) -> np.ndarray:
        return noise_token_to_random_token_or_sentinel(raw_ids, mask, self.vocabulary_size, *key)


class Deshuffling(Denoising):
    """Permutes the tokens of a text. The targets are the text.

    Source: T5 §3.3.1; t5/models/gin/objectives/all_permute.gin.
    """

    concatenates = False

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        self.raw_length = self.lengths.inputs - 1
        self.check_targets(self.raw_length + 1)

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        everything = np.ones(raw_ids.shape, bool)
        return permute_noise_tokens(raw_ids, everything, *key), raw_ids


# Language modelling.


class PrefixLm(Denoising):
    """Splits a text at a random place: the inputs come before it, the targets after it.

    Targets that are longer than a row are cut, as in T5, and counted. Source: t5/data/preprocessors.py
    `prefix_lm`.
    """

    concatenates = False

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        self.raw_length = self.lengths.inputs - 1
        self.check_targets(2)

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        return split_prefix(raw_ids, 0.5, *key)


def split_prefix(raw_ids: np.ndarray, density: float, *key: int | str) -> Pair:
    """Return inputs and targets of prefix language modelling."""
    mask = random_prefix_noise_mask(raw_ids.shape, density, *key)
    return drop_nonnoise_tokens(raw_ids, mask), drop_noise_tokens(raw_ids, mask)


class Lm(Denoising):
    """Targets alone: each row is a text that ends with EOS. The inputs are EOS.

    Source: t5/models/gin/objectives/lm.gin.
    """

    min_inputs_length = 1

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        if self.lengths.targets < 2:
            raise ValueError(
                'data.lengths.targets=1 is too short: a row holds a token and EOS: use 2 or more'
            )
        self.raw_length = self.lengths.targets - 1

    def corrupt(self, raw_ids: np.ndarray, *key: int | str) -> Pair:
        return np.zeros((len(raw_ids), 0), np.int32), raw_ids


class FullLm(Denoising):
    """Targets alone: rows that are full, with EOS where a document ends. The inputs are EOS.

    Source: t5/data/preprocessors.py `full_lm`.
    """

    min_inputs_length = 1

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        self.raw_length = self.lengths.targets

    def examples(
        self, names: Sequence[str], records: Sequence[Mapping[str, np.ndarray]], *key: int | str
    ) -> list[Example]:
        documents = join_documents(names, records, *key, with_eos=True)
        rows = split_tokens(self.text_ends(documents), itertools.repeat(self.raw_length))
        splits = self.splits(rows, *key)
        examples = []
        for row, split, row_names in zip(rows, splits, documents.names_of(rows), strict=True):
            ids = documents.ids[row[0] : row[1]]
            inputs = ids[:split] if split else EOS
            examples.append(Example(inputs, ids[split:], names=row_names))
        return examples

    def splits(self, rows: np.ndarray, *key: int | str) -> np.ndarray:
        """Return how many ids of each row are inputs, int [rows]."""
        return np.zeros(len(rows), np.int64)


class PackPrefixLm(FullLm):
    """Splits full rows in pairs: where one has p inputs of n ids, the other has n - p.

    Differs from T5, which packs the two into one row: here packing finds what fits. Source:
    t5/data/preprocessors.py `targets_for_prefix_lm_objective`, `pack_prefix_lm_encoder_decoder`.
    """

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        inputs = self.lengths.inputs
        if self.lengths.targets != inputs or inputs % 2:
            raise ValueError(
                f'data.lengths.inputs={inputs}, data.lengths.targets={self.lengths.targets}: two '
                'examples fill a row of this objective, so both lengths are the same even number: '
                f'use {inputs + inputs % 2} for both'
            )
        super()._set_lengths(config, vocabulary)

    def splits(self, rows: np.ndarray, *key: int | str) -> np.ndarray:
        lengths = rows[:, 1] - rows[:, 0]
        shortest = np.minimum(1, lengths - 1)  # one token alone is a target
        splits = shortest + random_integers(lengths.shape, 0, lengths - shortest, 'split', *key)
        num_pairs = np.count_nonzero(lengths == self.raw_length) // 2
        full = np.flatnonzero(lengths == self.raw_length)[: 2 * num_pairs]
        splits[full[1::2]] = self.raw_length - splits[full[::2]]
        return splits


# UL2's mixture of denoisers.


class Denoiser(NamedTuple):
    """Span corruption, or prefix language modelling if `mean_span_length` is None."""

    mode: str  # the text that the inputs begin with
    rate: float  # the share of the examples
    noise_density: float
    mean_span_length: float | None

    def lengths(self, inputs_length: int, num_sentinels: int) -> tuple[int, int, int]:
        """Return how many raw ids fill inputs of `inputs_length`, the targets' length and the spans."""
        if self.mean_span_length is None:
            return inputs_length - 1, inputs_length, 0
        density = self.noise_density
        mean_length = self.mean_span_length
        raw_length, _ = random_spans_helper(inputs_length, density, mean_length)
        num_noise, num_spans = num_noise_tokens_and_spans(raw_length, density, mean_length)
        while num_spans > num_sentinels:
            raw_length -= 1
            num_noise, num_spans = num_noise_tokens_and_spans(raw_length, density, mean_length)
        return raw_length, num_noise + num_spans + 1, num_spans

    def corrupt(self, raw_ids: np.ndarray, vocabulary_size: int, *key: int | str) -> Pair:
        """Return inputs, without the mode, and targets."""
        if self.mean_span_length is None:
            return split_prefix(raw_ids, self.noise_density, *key)
        return replace_random_spans(
            raw_ids, self.noise_density, self.mean_span_length, vocabulary_size, *key
        )


# UL2 (Tay et al. 2022) §3.1.2 and table 1: R-denoisers, X-denoisers, and the S-denoiser.
DENOISERS = (
    Denoiser('[NLU]', rate=0.2, noise_density=0.15, mean_span_length=3),
    Denoiser('[NLU]', rate=0.2, noise_density=0.15, mean_span_length=8),
    Denoiser('[NLG]', rate=0.1, noise_density=0.5, mean_span_length=3),
    Denoiser('[NLG]', rate=0.1, noise_density=0.5, mean_span_length=8),
    Denoiser('[NLG]', rate=0.1, noise_density=0.15, mean_span_length=64),
    Denoiser('[NLG]', rate=0.1, noise_density=0.5, mean_span_length=64),
    Denoiser('[S2S]', rate=0.2, noise_density=0.5, mean_span_length=None),
)


class Ul2(Denoising):
    """Draws one of DENOISERS for each example, and puts its mode before the inputs.

    Each takes as many ids as it needs from the documents, one after another. Differs from UL2, whose
    sentinels go on among the ordinary ids: texts are shorter where spans would outnumber sentinels.
    Source: UL2 §3.1 and appendix 9.2, whose modes are text that the vocabulary encodes.
    """

    def _set_lengths(self, config: Any, vocabulary: Vocabulary) -> None:
        self.check_sentinels(1, vocabulary)
        self.modes = [self._encode_mode(denoiser.mode, vocabulary) for denoiser in DENOISERS]
        self.raw_lengths = []
        longest_targets = 0
        for denoiser, mode in zip(DENOISERS, self.modes, strict=True):
            raw_length, targets_length, num_spans = denoiser.lengths(
                self.lengths.inputs - len(mode), vocabulary.num_sentinels
            )
            self.raw_lengths.append(raw_length)
            self.num_sentinels = max(self.num_sentinels, num_spans)
            longest_targets = max(longest_targets, targets_length)
        self.check_targets(longest_targets)

    def _encode_mode(self, mode: str, vocabulary: Vocabulary) -> np.ndarray:
        """Return the ids of a mode. Raise ValueError if it is unknown or leaves no room for a text."""
        [ids] = vocabulary.encode_as_arrays([mode])
        if UNK_ID in ids:
            raise ValueError(
                f'the vocabulary has no piece for a character of {mode!r}, with which inputs of UL2 '
                'begin: name another one with data.vocabulary'
            )
        if self.lengths.inputs < len(ids) + MIN_LENGTH:
            raise ValueError(
                f'data.lengths.inputs={self.lengths.inputs} is too short: a row holds {mode!r}, '
                f'{len(ids)} ids, a token, a sentinel and EOS: use {len(ids) + MIN_LENGTH} or more'
            )
        return ids

    def examples(
        self, names: Sequence[str], records: Sequence[Mapping[str, np.ndarray]], *key: int | str
    ) -> list[Example]:
        documents = join_documents(names, records, *key)
        text_ends = self.text_ends(documents)
        most_rows = len(documents.ids) // min(self.raw_lengths) + len(text_ends)
        draws = self._draw(most_rows, *key)
        rows = split_tokens(text_ends, [self.raw_lengths[i] for i in draws])
        draws = draws[: len(rows)]
        examples = []
        for i in range(len(DENOISERS)):
            corrupt = functools.partial(self.corrupt_as, i)
            examples += corrupt_rows(documents, rows[draws == i], corrupt, self.lengths, *key)
        return examples

    def _draw(self, count: int, *key: int | str) -> np.ndarray:
        """Return the indices of `count` denoisers, drawn by their rates."""
        rates = np.array([denoiser.rate for denoiser in DENOISERS])
        ends = np.cumsum(rates / rates.sum())[:-1]  # of each one's part of [0, 1)
        return np.searchsorted(ends, random_fractions((count,), 'denoiser', *key), side='right')

    def corrupt_as(self, i: int, raw_ids: np.ndarray, *key: int | str) -> Pair:
        """Return the inputs and targets of denoiser `i`, as `corrupt` does."""
        inputs, targets = DENOISERS[i].corrupt(raw_ids, self.vocabulary_size, i, *key)
        mode = np.tile(self.modes[i], (len(raw_ids), 1))
        return np.concatenate([mode, inputs], axis=1), targets


# Text to text.


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


class PromptedTextToText(TextToText):
    """Text to text as T0 has it: the inputs have no EOS, and targets that are cut lose theirs.

    Source: t-zero, t0/seqio_tasks/tasks.py.
    """

    def examples(
        self, names: Sequence[str], records: Sequence[Mapping[str, np.ndarray]], *key: int | str
    ) -> list[Example]:
        examples = []
        for name, record in zip(names, records, strict=True):
            inputs = record['inputs'] if len(record['inputs']) else EOS
            targets = np.append(record['targets'], EOS)
            inputs_are_long = len(inputs) > self.lengths.inputs
            targets_are_long = len(targets) > self.lengths.targets
            example = Example(
                inputs=inputs[: self.lengths.inputs],
                targets=targets[: self.lengths.targets],
                names=[name],
                is_trimmed=inputs_are_long or targets_are_long,
            )
            examples.append(example)
        return examples


class TextToTextWithSentinel(TextToText):
    """A sentinel ends the inputs and begins the targets, as where a span of noise ends a text.

    As in T5 the last id of either stays where they are cut. Source: seqio/experimental.py
    `add_task_with_sentinels`.
    """

    num_sentinels = 1

    def __init__(self, config: Any, vocabulary: Vocabulary):
        super().__init__(config, vocabulary)
        self.sentinel = np.array([vocabulary.size - 1], np.int32)
        if vocabulary.num_sentinels == 0:
            raise ValueError(
                'data.extra_ids=0: the inputs of this task end with a sentinel, and this vocabulary '
                'has none: use 1 or more (T5 has 100)'
            )
        for feature, length in self.lengths.items():
            if length < MIN_LENGTH:
                raise ValueError(
                    f'data.lengths.{feature}={length} is too short: a row holds a token, a sentinel '
                    f'and EOS: use {MIN_LENGTH} or more'
                )

    def examples(
        self, names: Sequence[str], records: Sequence[Mapping[str, np.ndarray]], *key: int | str
    ) -> list[Example]:
        examples = []
        for name, record in zip(names, records, strict=True):
            inputs = np.concatenate([record['inputs'], self.sentinel])
            targets = np.concatenate([self.sentinel, record['targets']])
            inputs_are_long = len(inputs) >= self.lengths.inputs
            targets_are_long = len(targets) >= self.lengths.targets
            example = Example(
                inputs=cut_before_last(inputs, self.lengths.inputs),
                targets=cut_before_last(targets, self.lengths.targets),
                names=[name],
                is_trimmed=inputs_are_long or targets_are_long,
            )
            examples.append(example)
        return examples


def cut_before_last(ids: np.ndarray, length: int) -> np.ndarray:
    """Append EOS to ids, which are cut before their last one so that EOS is at `length` at most."""
    if len(ids) >= length:
        ids = np.concatenate([ids[: length - 2], ids[-1:]])
    return np.concatenate([ids, EOS])


class TriviaQaTruncateInputs(TextToText):
    """Of long inputs there is a random part that holds the targets; without them no example.

    Source: t5/data/preprocessors.py `trivia_qa_truncate_inputs`. As there the part fills the row, so
    that EOS takes the place of its last id.
    """

    def examples(
        self, names: Sequence[str], records: Sequence[Mapping[str, np.ndarray]], *key: int | str
    ) -> list[Example]:
        kept_names = []
        kept = []
        for i, record in enumerate(records):
            part = part_with_targets(
                record['inputs'], record['targets'], self.lengths.inputs, i, *key
            )
            if part is not None:
                kept_names.append(names[i])
                kept.append({'inputs': part, 'targets': record['targets']})
        return super().examples(kept_names, kept, *key)


def part_with_targets(
    inputs: np.ndarray, targets: np.ndarray, length: int, *key: int | str
) -> np.ndarray | None:
    """Return `length` ids of the inputs around the first place of the targets; None without one."""
    if len(inputs) <= length:
        return inputs
    if not 0 < len(targets) <= length:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(inputs, len(targets))
    places = np.flatnonzero((windows == targets[None]).all(axis=1))
    if not len(places):
        return None
    first = int(places[0])
    low = max(first + len(targets) - length, 0)
    high = min(first, len(inputs) - length) + 1
    start = int(random_integers((), low, high, 'part', *key))
    return inputs[start : start + length]


# Every value of Task.objective. Those of documents are values of data.task, too.
OBJECTIVES: dict[str, type[Objective]] = {
    'span_corruption': SpanCorruption,
    'text_to_text': TextToText,
    'prompted_text_to_text': PromptedTextToText,
    'text_to_text_1_sentinel': TextToTextWithSentinel,
    'trivia_qa_truncate_inputs': TriviaQaTruncateInputs,
    'iid_denoising': IidDenoising,
    'drop_corrupted_tokens': DropCorruptedTokens,
    'mass_style': MassStyle,
    'bert_style': BertStyle,
    'deshuffling': Deshuffling,
    'prefix_lm': PrefixLm,
    'lm': Lm,
    'full_lm': FullLm,
    'pack_prefix_lm_encoder_decoder': PackPrefixLm,
    'ul2': Ul2,
}


def takes_inputs(objective: str) -> bool:
    """Return whether an objective is from text to text."""
    return 'inputs' in OBJECTIVES[objective].features
