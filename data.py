"""From documents to batches: span corruption, and a stream that resumes.

    documents -> ids -> groups of 128 documents -> pieces of 568 ids -> {'inputs', 'targets'} -> batch

Host side only: numpy, no devices. Row r of every batch is lane r, and each lane owns a disjoint part of
every epoch, so a process parses and tokenizes what its own rows need. All randomness is a function of the
seed and of a place in the stream, so a place is all that resuming needs.
"""

import collections
import concurrent.futures
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from sources import permutation, random_bits
from vocabulary import EOS_ID, PAD_ID

TASKS = ('span_corruption', 'c4_v220_span_corruption')
DOCUMENTS_PER_GROUP, MAX_DOCUMENT_TOKENS = 128, 65536  # as in t5/data/preprocessors.py
MIN_LENGTH, MAX_LENGTH = 3, 1 << 20  # of inputs and targets: at least a token, a sentinel and EOS


class Stream:
    """Iterator of batches: this process's `rows` of them, a dict of int32 arrays [rows, length].

    `position` is int64 [rows, 4]: the epoch, unit and index where a row's current group of documents
    begins, and how many of its pieces were given out. After `num_epochs` a row is padding, and when all
    are, the stream ends. Raises ValueError for settings that do not fit together.
    """

    def __init__(
        self, source, split, vocabulary, config, batch_size, seed, rows=None, num_epochs=None
    ):
        check_task(config.task)
        self.source, self.split, self.vocabulary, self.config = source, split, vocabulary, config
        self.batch_size, self.seed, self.num_epochs = batch_size, seed, num_epochs
        self.rows = range(batch_size) if rows is None else rows
        self.raw_length, num_spans = span_corruption_sizes(config, vocabulary)
        self.first_sentinel = vocabulary.size - num_spans  # <extra_id_0> is the last id
        self._check_not_empty()
        self.seek(np.zeros((len(self.rows), 4), np.int64))

    def seek(self, position: np.ndarray) -> None:
        """Goes to where `position` was read off."""
        self.position, self._lanes = np.array(position, np.int64), self._open_lanes(position)

    def describe(self, position: np.ndarray) -> list[str]:
        """The names of the documents in each row of the batch that starts at `position`."""
        examples = [next(lane, (None, list, None)) for lane in self._open_lanes(position)]
        return [', '.join(names()) for _, names, _ in examples]

    def __iter__(self) -> 'Stream':
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """SeqIO's EncDecFeatureConverter, unpacked."""
        inputs = np.zeros((len(self.rows), self.config.lengths.inputs), np.int32)
        targets = np.zeros((len(self.rows), self.config.lengths.targets), np.int32)
        for row, lane in enumerate(self._lanes):
            example, _, self.position[row] = next(lane, (([], []), list, self.position[row]))
            for array, ids in zip((inputs, targets), example, strict=True):
                array[row, : len(ids)] = ids
        if not inputs.any():
            raise StopIteration
        return {
            'encoder_input_tokens': inputs,
            'decoder_input_tokens': np.pad(targets[:, :-1], ((0, 0), (1, 0))),  # T5's BOS is 0
            'decoder_target_tokens': targets,
            'decoder_loss_weights': (targets != PAD_ID).astype(np.int32),
        }

    def _check_not_empty(self) -> None:
        lanes = range(self.batch_size)
        if self.source.may_hold(self.split):
            starts = dict.fromkeys(lanes, (0, 0))
            documents = self.source.open(self.split, self.batch_size, self.seed, starts)
            texts = (text for lane in lanes for *_, text in documents(0, lane))
            if any(self.vocabulary.encode([text])[0] for text in texts):
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

    def _open_lanes(self, position: np.ndarray) -> list[Iterator[tuple]]:
        starts = dict(zip(self.rows, np.asarray(position).tolist(), strict=True))
        units = {lane: (epoch, unit) for lane, (epoch, unit, _, _) in starts.items()}
        documents = self.source.open(self.split, self.batch_size, self.seed, units)
        return [self._examples(documents, *start) for start in starts.items()]

    def _examples(self, documents: Callable, lane: int, start: list[int]) -> Iterator[tuple]:
        """Yields ((inputs, targets), names(), position after it), from `start` on."""
        epoch, unit, index, piece = start
        while self.num_epochs is None or epoch < self.num_epochs:
            own = documents(epoch, lane, unit, index)
            while group := list(itertools.islice(own, DOCUMENTS_PER_GROUP)):
                examples = self._group_examples(group, self.seed, epoch, lane, unit, index)
                after = [(epoch, unit, index, given + 1) for given in range(len(examples))]
                unit, index = group[-1][0], group[-1][1] + 1
                after[-1:] = [(epoch, unit, index, 0)]
                yield from [(*e, a) for e, a in zip(examples, after, strict=False)][piece:]
                piece = 0
            epoch, unit, index = epoch + 1, 0, 0

    def _group_examples(self, group: list[tuple], *key: int) -> list[tuple]:
        """((inputs, targets), names() of the documents) of each piece, in the stream's order."""
        encoded = self.vocabulary.encode([text for *_, text in group])
        encoded = [select_random_chunk(ids, i, *key) for i, ids in enumerate(encoded)]
        tokens = np.array(list(itertools.chain(*encoded)), np.int32)
        examples: list[tuple] = []
        for pieces in split_tokens(tokens, self.raw_length):
            corrupted = span_corruption(pieces, self.config, self.vocabulary.size, *key)
            examples += zip(*corrupted, strict=True)
        ends = np.cumsum([len(ids) for ids in encoded])

        def names(i: int) -> list[str]:
            places = np.arange(i * self.raw_length, min((i + 1) * self.raw_length, ends[-1]))
            inside = np.unique(np.searchsorted(ends, places, side='right'))
            return list(dict.fromkeys(group[k][2] for k in inside))

        # Differs from T5X, which shuffles in a buffer of 1,000 examples: lanes read far apart, and
        # each permutes the pieces of its group.
        order = permutation(len(examples), 'pieces', *key)
        return [(examples[i], functools.partial(names, int(i))) for i in order]


def check_task(name: str) -> None:
    """Raise ValueError unless there is a task of this name."""
    if name not in TASKS:
        raise ValueError(f'data.task={name!r} is unknown; use {", ".join(TASKS)}')


def feature_lengths(lengths) -> dict[str, int]:
    """Return the length of each feature of a batch of `Stream`; `lengths`: config.data.lengths."""
    return {
        'encoder_input_tokens': lengths.inputs,
        'decoder_input_tokens': lengths.targets,
        'decoder_target_tokens': lengths.targets,
        'decoder_loss_weights': lengths.targets,
    }


def prefetch(stream: Stream, depth: int = 2) -> Iterator[tuple]:
    """Yields (batch, position before it, position after it), made ahead in a thread. An error in the
    thread is raised where its batch would have come."""

    def step():
        before = stream.position.copy()
        return next(stream, None), before, stream.position.copy()

    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        ahead = collections.deque(thread.submit(step) for _ in range(depth))
        while (item := ahead.popleft().result())[0] is not None:
            ahead.append(thread.submit(step))
            yield item


# Span corruption: T5 (Raffel et al. 2020) §3.1.4; t5/data/preprocessors.py `span_corruption`.


def span_corruption_sizes(config, vocabulary) -> tuple[int, int]:
    """(number of ids that fill `lengths.inputs` once corrupted, noise spans in them); ValueError where the
    settings do not fit together."""
    density, mean, lengths = config.noise_density, config.mean_noise_span_length, config.lengths
    noise = f'data.noise_density={density}, data.mean_noise_span_length={mean}'
    if not (0 < density < 1 <= mean < math.inf):
        raise ValueError(
            f'{noise}: the first must lie in (0, 1), the second be 1 or more and finite: '
            'T5 has 0.15 and 3'
        )
    for name in ('inputs', 'targets'):
        if lengths[name] > MAX_LENGTH:
            raise ValueError(
                f'data.lengths.{name}={lengths[name]} is too long: use {MAX_LENGTH:,} or less'
            )
    if lengths.inputs < MIN_LENGTH:
        raise ValueError(
            f'data.lengths.inputs={lengths.inputs} is too short: a row holds a token, a sentinel '
            f'and EOS: use {MIN_LENGTH} or more'
        )
    raw_length, targets = random_spans_helper(lengths.inputs, density, mean)
    targets = max(targets, MIN_LENGTH)
    if raw_length >= MAX_LENGTH:
        raise ValueError(
            f'{noise}: data.lengths.inputs={lengths.inputs} would hold {MAX_LENGTH:,} tokens or more '
            'before the corruption: lower the density'
        )
    if lengths.targets < targets:
        given = f'data.lengths.targets={lengths.targets}'
        raise ValueError(f'{given}: too short for the inputs; use {targets} or more')
    _, num_spans = num_noise_tokens_and_spans(raw_length, density, mean)
    if vocabulary.num_sentinels == 0:
        raise ValueError(
            'data.extra_ids=0: span corruption marks its spans with sentinels, and this vocabulary '
            f'has none: use {num_spans} or more (T5 has 100)'
        )
    if vocabulary.num_sentinels < num_spans:
        raise ValueError(
            f'data.lengths.inputs={lengths.inputs} gives {num_spans} noise spans for '
            f'{vocabulary.num_sentinels} sentinels: use shorter inputs or longer spans'
        )
    return raw_length, num_spans


def random_spans_helper(
    inputs_length: int, noise_density: float, mean_length: float, extra_inputs=1, extra_targets=1
) -> tuple[int, int]:
    """(number of raw ids, targets length) for inputs of `inputs_length`; EOS counts in both. `extra_*`:
    tokens that stand for a span."""

    def corrupted_lengths(raw_length: int) -> tuple[int, int]:
        num_noise = round(raw_length * noise_density)
        num_spans = round(num_noise / mean_length)
        inputs = raw_length - num_noise + num_spans * extra_inputs + 1
        return inputs, num_noise + num_spans * extra_targets + 1

    raw_length = inputs_length - 1
    while raw_length < MAX_LENGTH and corrupted_lengths(raw_length + 1)[0] <= inputs_length:
        raw_length += 1
    inputs, targets = corrupted_lengths(raw_length)
    shorter = int(noise_density == 0.5 and targets > inputs)
    return raw_length - shorter, targets - shorter


def select_random_chunk(ids: list[int], *key: int) -> list[int]:
    """One aligned chunk of a long document; the last, short one is as likely as the others."""
    num_chunks = -(-len(ids) // MAX_DOCUMENT_TOKENS)
    if num_chunks <= 1:
        return ids
    start = int(permutation(num_chunks, 'chunk', *key)[0]) * MAX_DOCUMENT_TOKENS
    return ids[start : start + MAX_DOCUMENT_TOKENS]


def split_tokens(tokens: np.ndarray, length: int) -> list[np.ndarray]:
    """[n] -> the full pieces [n // length, length] and the rest [1, n % length], unless empty."""
    full = len(tokens) // length * length
    pieces = [tokens[:full].reshape(-1, length), tokens[None, full:]]
    return [rows for rows in pieces if rows.size]


def span_corruption(tokens: np.ndarray, config, vocabulary_size: int, *key: int):
    """Pieces [rows, length] -> inputs and targets [rows, ...], with EOS."""
    density, mean = config.noise_density, config.mean_noise_span_length
    mask = random_spans_noise_mask(tokens.shape, density, mean, *key)
    inputs = noise_span_to_unique_sentinel(tokens, mask, vocabulary_size)
    targets = noise_span_to_unique_sentinel(tokens, ~mask, vocabulary_size)
    inputs = append_eos_after_trim(inputs, config.lengths.inputs)
    return inputs, append_eos_after_trim(targets, config.lengths.targets)


def random_spans_noise_mask(shape: tuple[int, int], density: float, mean: float, *key: int):
    """bool [rows, length]: non-noise and noise by turns; equally many of each in every row."""
    rows, length = shape[0], max(shape[1], 2)  # a single token is not noise
    num_noise, num_spans = num_noise_tokens_and_spans(length, density, mean)
    noise = random_segments(rows, num_noise, num_spans, 'noise', length, *key)
    nonnoise = random_segments(rows, length - num_noise, num_spans, 'nonnoise', length, *key)
    ends = np.cumsum(np.stack([nonnoise, noise], axis=2).reshape(rows, -1), axis=1)
    is_start = np.zeros((rows, length), np.int8)
    np.put_along_axis(is_start, ends[:, :-1], 1, axis=1)
    return (np.cumsum(is_start, axis=1) % 2 == 1)[:, : shape[1]]


def num_noise_tokens_and_spans(length: int, density: float, mean: float) -> tuple[int, int]:
    num_noise = int(np.round(np.float32(length) * np.float32(density)))  # T5 rounds in float32
    num_noise = min(max(num_noise, 1), length - 1)
    num_spans = max(round(num_noise / mean), 1)
    # Differs from T5X, which fails where too few tokens are left to keep the spans apart.
    return num_noise, min(num_spans, length - num_noise)


def random_segments(rows: int, num_items: int, num_segments: int, *key: int | str) -> np.ndarray:
    """Segment lengths [rows, num_segments], 1 or more, uniform over all ways to cut `num_items`."""
    places = np.argsort(random_bits((rows, num_items - 1), *key), axis=1, kind='stable')
    cuts = np.sort(places[:, : num_segments - 1], axis=1) + 1
    return np.diff(cuts, axis=1, prepend=0, append=num_items)


def noise_span_to_unique_sentinel(tokens: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
    """The i-th masked span of a row becomes the i-th last of `size` ids; rows shrink equally."""
    is_first = mask.copy()
    is_first[:, 1:] &= ~mask[:, :-1]
    sentinels = size - np.cumsum(is_first, axis=1, dtype=np.int32)
    return np.where(is_first, sentinels, tokens)[is_first | ~mask].reshape(len(tokens), -1)


def append_eos_after_trim(tokens: np.ndarray, length: int | None = None) -> np.ndarray:
    trimmed = tokens if length is None else tokens[:, : length - 1]
    return np.pad(trimmed, ((0, 0), (0, 1)), constant_values=EOS_ID)
