"""From texts to rows: an objective turns ids into examples, which are packed into T5X's features.

    text -> ids, by a vocabulary -> examples, by an Objective -> rows, by packing -> a batch

Span corruption and text to text are here, the other objectives in tasks/objectives.py. Everything runs on the host in
numpy. All randomness is a function of a key. Imports no jax.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from messages import Refused
from randomness import permutation, random_bits
from vocabulary import PAD_ID, Vocabulary

DROPPED = -1  # replaces the id of a dropped token
MAX_RAW_LENGTH = 1 << 20
MAX_DOCUMENT_TOKENS = 65536  # longer documents contribute one chunk of this length, as in T5
MIN_LENGTH = 3  # inputs and targets hold a token, a sentinel and EOS
Pair = tuple[NDArray, NDArray]  # inputs and targets
Records = Sequence[Mapping]  # {feature: ids without EOS, 'weight' if set, 'fields': the texts}


class Example(NamedTuple):
    """The ids of one example, int32 without padding.

    Both features have their ends, EOS or the family's, except the rows of `FullLm`, T0's inputs, and T0's targets if
    they are cut. Inputs are never empty: without tokens, their end gives the decoder something to read.
    """

    inputs: NDArray
    targets: NDArray
    names: Sequence[str]  # names of its records
    is_trimmed: bool = False  # its texts were longer than a row
    weight: float = 1.0  # for the loss of its targets
    numbers: Mapping[str, float] = {}  # keys: `numbers` of the objective


class Objective(Protocol):
    """Makes examples from tokenized records. tasks.objectives, or a task in a user's file, names the class."""

    features: tuple[str, ...]  # names of the required texts of a record
    records_per_group: int  # records per call of `examples`
    num_sentinels: int  # sentinels for its spans, from <extra_id_0> on
    # A class may also have `numbers`, the names of the numbers of its examples, and `shares_rows = True`.

    def __init__(self, data_group: ConfigDict, vocabulary: Vocabulary):
        """Take config.data. Raise Refused for settings that do not fit the objective."""

    def examples(self, names: Sequence[str], records: Records, *key: int | str) -> Sequence:
        """Make examples of named records, random by `key`; if they share rows, a tuple of examples for each row."""


class TextToText:
    """Makes each record an example, with inputs and targets cut to the lengths of a row."""

    features: tuple[str, ...] = ('inputs', 'targets')
    records_per_group = 16
    num_sentinels = 0

    def __init__(self, data_group: ConfigDict, vocabulary: Vocabulary):
        self.lengths = data_group.lengths
        self.bos, self.end, self.eos = ends_of(vocabulary)
        self.begin = np.array(vocabulary.ends.begin, np.int32)

    def examples(self, names: Sequence[str], records: Records, *key: int | str) -> list[Example]:
        max_inputs = self.lengths.inputs
        max_targets = self.lengths.targets
        examples = []
        for name, record in zip(names, records, strict=True):
            inputs, targets = self.with_ends(record)
            is_trimmed = len(inputs) > max_inputs or len(targets) > max_targets
            inputs = self.cut(inputs, max_inputs, self.end)
            targets = self.cut(targets, max_targets, self.eos)
            weight = float(record.get('weight', 1.0))
            examples.append(Example(inputs, targets, [name], is_trimmed, weight))
        return examples

    def with_ends(self, record: Mapping[str, NDArray]) -> Pair:
        """Return inputs, never empty, and targets, with their ends, before they are cut."""
        inputs = np.concatenate([self.bos, record['inputs'], self.end])
        return inputs, np.concatenate([self.begin, record['targets'], self.eos])

    def cut(self, ids: NDArray, length: int, end: NDArray) -> NDArray:
        """Return at most `length` ids, with `end` at the end."""
        return ids if len(ids) <= length else np.concatenate([ids[: length - len(end)], end])


def ends_of(vocabulary: Vocabulary) -> list[NDArray]:
    """Return the ids before inputs, after inputs, and after targets, each int32."""
    assert any(vocabulary.ends.inputs), 'inputs need an id before or after: a text may be empty'
    return [np.array(ids, np.int32) for ids in (*vocabulary.ends.inputs, (vocabulary.eos_id,))]


# Denoising: span corruption, and the base class of other objectives that corrupt text.


class Denoising:
    """Cuts documents, concatenated or one by one, into rows of raw ids, and corrupts each row.

    Source: t5/data/preprocessors.py select_random_chunk, reduce_concat_tokens, split_tokens, denoise.
    """

    features: tuple[str, ...] = ('targets',)
    records_per_group = 128  # concatenated, as in t5/data/preprocessors.py
    concatenates = True  # T5's; data.concatenate can change it
    min_inputs_length = MIN_LENGTH
    num_sentinels = 0

    def __init__(self, data_group: ConfigDict, vocabulary: Vocabulary):
        self.lengths = data_group.lengths
        self.vocabulary_size = vocabulary.size
        self.bos, self.end, self.eos = ends_of(vocabulary)
        self.sentinel_ids = vocabulary.sentinel_ids
        self.noise_density = data_group.noise_density
        length = self.lengths.inputs
        self.num_inputs = length + 1 - len(self.bos) - len(self.end)  # ids and one end, as in T5
        self.raw_length = self.num_inputs - 1  # ids that fill a row
        if data_group.concatenate != 'auto':
            self.concatenates = data_group.concatenate == 'yes'
        if self.num_inputs < self.min_inputs_length:
            least = self.min_inputs_length + length - self.num_inputs
            raise Refused(f'data.lengths.inputs={length}: use {least} or more')
        self.set_lengths(data_group, vocabulary)

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        """Change the defaults of `num_sentinels` and `raw_length`. Raise Refused for settings that do not fit."""

    def corrupt(self, raw_ids: NDArray, *key: int | str) -> Pair:
        """Return inputs and targets, without EOS, of raw ids, all int32 [rows, length]; DROPPED marks gaps."""
        raise NotImplementedError('write corrupt, as SpanCorruption does')

    def examples(self, names: Sequence[str], records: Records, *key: int | str) -> list[Example]:
        documents = join_documents(names, records, *key)
        rows = split_tokens(self.text_ends(documents), itertools.repeat(self.raw_length))
        return self.corrupt_rows(documents, rows, self.corrupt, *key)

    def corrupt_rows(
        self, documents: 'Documents', rows: NDArray, corrupt: Callable, *key: int | str
    ) -> list[Example]:
        """Return the examples of rows, int [rows, 2]; `corrupt` takes all rows of one length at once."""
        examples: list[Example] = []
        row_lengths = rows[:, 1] - rows[:, 0]
        for length in np.unique(row_lengths)[::-1]:
            equal_rows = rows[row_lengths == length]
            raw_ids = sliding_window_view(documents.ids, length)[equal_rows[:, 0]]
            inputs, targets = corrupt(raw_ids, *key)
            all_inputs = append_eos_after_trim(inputs, self.lengths.inputs, self.end, self.bos)
            all_targets = append_eos_after_trim(targets, self.lengths.targets, self.eos)
            names = documents.names_of(equal_rows)
            is_trimmed = np.count_nonzero(targets != DROPPED, axis=1) >= self.lengths.targets
            examples += map(Example, all_inputs, all_targets, names, is_trimmed.tolist())
        return examples

    def text_ends(self, documents: 'Documents') -> list[int]:
        """Return the ends of the texts to cut into rows: of all documents joined, or of each document."""
        if self.concatenates:
            return [len(documents.ids)]
        return documents.ends.tolist()

    def check_targets(self, length: int) -> None:
        """Raise Refused unless a row has room for targets of `length`, EOS included."""
        targets = self.lengths.targets
        if targets < length:
            raise Refused(f'data.lengths.targets={targets}: too short for the inputs: use {length}')

    def check_sentinels(self, num_spans: int, vocabulary: Vocabulary) -> None:
        if vocabulary.num_sentinels < num_spans:
            raise Refused(
                f'data.extra_ids={vocabulary.num_extra_ids}, data.lengths.inputs={self.lengths.inputs}: {num_spans} '
                'sentinels are needed: use more, data.sentinels, or shorter inputs'
            )


class SpanCorruption(Denoising):
    """Replaces spans of noise with sentinels. The targets are the spans, each after its sentinel.

    Source: T5 (Raffel et al. 2020) §3.1.4; t5/data/preprocessors.py span_corruption.
    """

    def set_lengths(self, data_group: ConfigDict, vocabulary: Vocabulary) -> None:
        self.mean_span_length = data_group.mean_noise_span_length
        self.raw_length, targets_length = random_spans_helper(
            self.num_inputs, self.noise_density, self.mean_span_length
        )
        _, self.num_sentinels = num_noise_tokens_and_spans(
            self.raw_length, self.noise_density, self.mean_span_length
        )
        self.check_targets(max(targets_length, MIN_LENGTH))
        self.check_sentinels(self.num_sentinels, vocabulary)

    def corrupt(self, raw_ids: NDArray, *key: int | str) -> Pair:
        mask = random_spans_noise_mask(
            raw_ids.shape, self.noise_density, self.mean_span_length, *key
        )
        return mark_spans(raw_ids, mask, self.sentinel_ids)


def mark_spans(raw_ids: NDArray, mask: NDArray, sentinel_ids: NDArray) -> Pair:
    """Return inputs, with a sentinel for each span of noise, and targets, with a sentinel for each other span."""
    inputs = noise_span_to_unique_sentinel(raw_ids, mask, sentinel_ids)
    return inputs, noise_span_to_unique_sentinel(raw_ids, ~mask, sentinel_ids)


# Joining documents and cutting them into rows.


class Documents(NamedTuple):
    """The ids of some documents, one after another."""

    ids: NDArray  # int32 [tokens]
    ends: NDArray  # index after the last token of each document
    names: list[str]

    def names_of(self, rows: NDArray) -> list[list[str]]:
        """Return the names of the documents in each row, int [rows, 2]: its begin and end."""
        first, last = np.searchsorted(self.ends, rows - [0, 1], side='right').T.tolist()
        return [self.names[i : j + 1] for i, j in zip(first, last, strict=True)]


def join_documents(
    names: Sequence[str], records: Records, *key: int | str, eos: NDArray | None = None
) -> Documents:
    """Join the targets of records that are not empty, each followed by `eos` if given.

    A long document contributes one aligned chunk; all chunks, even the short last one, are equally likely.
    """
    chunks = []
    chunk_names = []
    for i, record in enumerate(records):
        chunk = record['targets']
        if len(chunk) > MAX_DOCUMENT_TOKENS:
            num_chunks = -(-len(chunk) // MAX_DOCUMENT_TOKENS)
            start = int(permutation(num_chunks, 'chunk', i, *key)[0]) * MAX_DOCUMENT_TOKENS
            chunk = chunk[start : start + MAX_DOCUMENT_TOKENS]
        if len(chunk):
            chunks.append(chunk if eos is None else np.append(chunk, eos))
            chunk_names.append(names[i])
    return Documents(
        ids=np.concatenate([np.zeros(0, np.int32), *chunks], dtype=np.int32),
        ends=np.cumsum([len(chunk) for chunk in chunks], dtype=np.int64),
        names=chunk_names,
    )


def split_tokens(ends: Sequence[int], lengths: Iterable[int]) -> NDArray:
    """Cut texts that end at `ends` into rows of `lengths`, the last shorter; return begins and ends, int [rows, 2]."""
    rows = []
    begin = 0
    next_length = iter(lengths)
    for text_end in ends:
        while begin < text_end:
            end = min(begin + next(next_length), text_end)
            rows.append((begin, end))
            begin = end
    return np.array(rows, np.int64).reshape(-1, 2)


def append_eos_after_trim(
    tokens: NDArray, length: int, eos: NDArray, bos: Sequence[int] | NDArray = ()
) -> list[NDArray]:
    """Return `bos`, the ids of each row of [rows, n] that are not DROPPED, and `eos`: at most `length` ids."""
    parts = [np.tile(bos, (len(tokens), 1)), tokens, np.tile(eos, (len(tokens), 1))]
    with_eos = np.concatenate(parts, axis=1, dtype=np.int32, casting='unsafe')
    end = with_eos.shape[1] - len(eos)
    is_kept = with_eos != DROPPED
    sizes = np.count_nonzero(is_kept, axis=1)
    if sizes.max(initial=0) > length:
        is_kept[:, :end] &= np.cumsum(is_kept[:, :end], axis=1) <= length - len(eos)
        sizes = np.count_nonzero(is_kept, axis=1)
    ids = with_eos[is_kept]
    ends = np.cumsum(sizes).tolist()
    return [ids[begin:end] for begin, end in itertools.pairwise([0, *ends])]


# Spans of noise and their sentinels, under the names of t5/data/preprocessors.py.


def random_spans_helper(
    inputs_length: int, noise_density: float, mean_length: float
) -> tuple[int, int]:
    """Return (number of raw ids, targets length) for inputs of `inputs_length`, EOS included."""

    def corrupted_lengths(raw_length: int) -> tuple[int, int]:
        num_noise = round(raw_length * noise_density)
        num_spans = round(num_noise / mean_length)
        # A sentinel marks a span in both, and both end with EOS.
        return raw_length - num_noise + num_spans + 1, num_noise + num_spans + 1

    raw_length = inputs_length - 1
    while raw_length < MAX_RAW_LENGTH and corrupted_lengths(raw_length + 1)[0] <= inputs_length:
        raw_length += 1
    inputs, targets = corrupted_lengths(raw_length)
    if noise_density == 0.5 and targets > inputs:
        raw_length -= 1
        targets -= 1
    return raw_length, targets


def num_noise_tokens_and_spans(length: int, density: float, mean_length: float) -> tuple[int, int]:
    """Return how many of `length` tokens are noise, and in how many spans."""
    num_noise = int(np.round(np.float32(length) * np.float32(density)))  # T5 rounds in float32
    num_noise = min(max(num_noise, 1), length - 1)
    num_spans = max(round(num_noise / mean_length), 1)
    # Differs from T5X, which fails if too few tokens are left to keep the spans apart.
    return num_noise, min(num_spans, length - num_noise)


def random_spans_noise_mask(
    shape: tuple[int, int], density: float, mean_length: float, *key: int | str
) -> NDArray:
    """Return a mask of alternating spans of non-noise and noise, the same number in every row."""
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


def random_segments(num_rows: int, num_items: int, num_segments: int, *key: int | str) -> NDArray:
    """Return segment lengths [rows, num_segments], uniform over all ways to cut `num_items`."""
    if num_segments == 1:
        return np.full((num_rows, 1), num_items)
    bits = random_bits((num_rows, num_items - 1), *key)
    # Cut after the items with the smallest random bits; argpartition is faster than sorting.
    least = np.argpartition(bits, num_segments - 2, axis=1)[:, : num_segments - 1]
    cuts = np.sort(least, axis=1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=num_items)


def noise_span_to_unique_sentinel(tokens: NDArray, mask: NDArray, sentinel_ids: NDArray) -> NDArray:
    """Replace the spans of noise of each row with the sentinels, in order."""
    is_first = first_of_spans(mask)
    numbers = np.cumsum(is_first, axis=1, dtype=np.int32) - 1  # -1 before the first span
    return drop_noise_tokens(np.where(is_first, sentinel_ids[numbers], tokens), mask & ~is_first)


def drop_noise_tokens(tokens: NDArray, mask: NDArray) -> NDArray:
    """Replace the noise with DROPPED."""
    return tokens | -mask.astype(np.int32)  # all bits of DROPPED, -1, are set


def first_of_spans(mask: NDArray) -> NDArray:
    """Return a mask of the first token of each span of noise."""
    is_first = mask.copy()
    is_first[:, 1:] &= ~mask[:, :-1]
    return is_first


# Packing: which examples share a row.


def pack_greedily(sizes: NDArray, limits: NDArray) -> list[list[int]]:
    """Return the examples of each row, as SeqIO packs them: in order, with one open row.

    `sizes` [examples, features] are lengths, at most `limits` [features]. A row does not span two groups
    of max(limits) examples.
    """
    rows: list[list[int]] = []
    group_size = max(limits)
    free = np.zeros(len(limits), np.int64)
    for i, size in enumerate(sizes):
        if i % group_size == 0 or (size > free).any():
            rows.append([])
            free = limits
        rows[-1].append(i)
        free = free - size
    return rows


def pack_tightly(sizes: NDArray, limits: NDArray) -> list[list[int]]:
    """Return the examples of each row: longest first, each in the first row with room. T5X packs greedily."""
    filled = (sizes / limits).max(axis=1, initial=0)
    rows: list[list[int]] = []
    free = np.tile(limits, (len(sizes), 1))  # in every possible row
    for i in np.argsort(-filled, kind='stable').tolist():
        fits = (free[: len(rows) + 1] >= sizes[i]).all(axis=1)
        row = int(fits.argmax())
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        free[row] -= sizes[i]
    return rows


PACKINGS = {'no': None, 'greedily': pack_greedily, 'tightly': pack_tightly}  # for data.pack


def encoder_decoder(
    rows: Sequence[Sequence[Example]],
    lengths: Mapping[str, int],
    pack: bool,
    has_weights: bool = False,
    numbers: Iterable[str] = (),
) -> dict[str, NDArray]:
    """Return the features of rows of examples under T5X's names: [rows, length], int32; weights and numbers float32."""
    inputs = fill(rows, 'inputs', lengths['inputs'])
    targets = fill(rows, 'targets', lengths['targets'])
    # The decoder reads the targets one position later, after BOS, which is 0 in T5. In a packed row every
    # example begins with BOS, and padding is 0. Otherwise the last target is read at the first position
    # of the padding, as in SeqIO.
    shifted = np.pad(targets.ids[:, :-1], ((0, 0), (1, 0)))
    if pack:
        shifted[targets.positions == 0] = 0
    is_target = targets.ids != PAD_ID
    loss_weights = is_target.astype(np.int32)
    if has_weights:
        weights = [[x.weight for x in row] for row in rows]
        loss_weights = is_target * spread(weights, targets.segment_ids)
    # batch_crc32 hashes the features in this order.
    batch = {
        'encoder_input_tokens': inputs.ids,
        'decoder_input_tokens': shifted,
        'decoder_target_tokens': targets.ids,
        'decoder_loss_weights': loss_weights,
    }
    if pack:
        batch |= {
            'decoder_segment_ids': targets.segment_ids,
            'decoder_positions': targets.positions,
            'encoder_segment_ids': inputs.segment_ids,
            'encoder_positions': inputs.positions,
        }
    for name in numbers:
        values = [[x.numbers.get(name, 0.0) for x in row] for row in rows]  # some tasks lack it
        batch[f'encoder_{name}'] = spread(values, inputs.segment_ids)
        batch[f'decoder_{name}'] = spread(values, targets.segment_ids)
    return batch


class PackedRows(NamedTuple):
    """One feature of a batch, int32 [rows, length]; padding is 0 in all three."""

    ids: NDArray
    segment_ids: NDArray  # 1, 2, ... for the examples of a row
    positions: NDArray  # 0, 1, ... in each example


def fill(rows: Sequence[Sequence[Example]], feature: str, length: int) -> PackedRows:
    """Concatenate a feature of the examples of each row, and pad it to `length`.

    Differs from T5X if an example has no ids of this feature: its segment number is skipped, so that the
    segments of inputs and targets stay aligned.
    """
    packed = PackedRows(*np.zeros((3, len(rows), length), np.int32))
    count = np.arange(length, dtype=np.int32)
    for row, ids, segment_ids, positions in zip(rows, *packed, strict=True):
        begin = 0
        for segment, example in enumerate(row, start=1):
            example_ids = getattr(example, feature)
            end = begin + len(example_ids)
            ids[begin:end] = example_ids
            segment_ids[begin:end] = segment
            positions[begin:end] = count[: len(example_ids)]
            begin = end
    return packed


def spread(values: Sequence[Sequence[float]], segment_ids: NDArray) -> NDArray:
    """Return the values of each row's examples at their positions, float32 [rows, length]; 0 for padding."""
    numbers = np.zeros(segment_ids.shape, np.float32)
    for i, row in enumerate(values):
        numbers[i] = np.array([0, *row], np.float32)[segment_ids[i]]
    return numbers
