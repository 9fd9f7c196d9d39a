"""From documents to batches: sources, vocabularies, span corruption, a stream that resumes.

    documents -> ids -> groups of 128 documents -> pieces of 568 ids -> {'inputs', 'targets'} -> batch

Host side only: numpy, no devices. Row r of every batch is lane r, and each lane owns a disjoint part of
every epoch, so a process parses and tokenizes what its own rows need. All randomness is a function of the
seed and of a place in the stream, so a place is all that resuming needs.
"""

import ast
import collections
import concurrent.futures
import dataclasses
import functools
import glob
import gzip
import hashlib
import importlib
import io
import itertools
import json
import math
import os
import pathlib
import sysconfig
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import numpy as np
import sentencepiece

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
TASKS = ('span_corruption', 'c4_v220_span_corruption')
DOCUMENTS_PER_GROUP, MAX_DOCUMENT_TOKENS = 128, 65536  # as in t5/data/preprocessors.py
MAX_BLOCK_BYTES, MIN_BLOCKS, BLOCKS_PER_POOL = 1 << 16, 4096, 8  # a lane holds one pool of blocks
# Of gzipped shards: lines in all pools together, in one pool at least; shards open at least.
POOL_LINES, MIN_POOL_LINES, MIN_OPEN_SHARDS = 100_000, 256, 16
SAMPLE_CHARACTERS = 10_000_000  # that a vocabulary is trained on


class Stream:
    """Iterator of batches: this process's `rows` of them, a dict of int32 arrays [rows, length].

    `position` is int64 [rows, 4]: the epoch, unit and index where a row's current group of documents
    begins, and how many of its pieces were given out. After `num_epochs` a row is padding, and when all
    are, the stream ends. Raises ValueError for settings that do not fit together.
    """

    def __init__(
        self, source, split, vocabulary, config, batch_size, seed, rows=None, num_epochs=None
    ):
        if config.task not in TASKS:
            raise ValueError(f'data.task={config.task!r} is unknown; use {", ".join(TASKS)}')
        self.source, self.split, self.vocabulary, self.config = source, split, vocabulary, config
        self.batch_size, self.seed, self.num_epochs = batch_size, seed, num_epochs
        self.rows = range(batch_size) if rows is None else rows
        self.raw_length, num_spans = span_corruption_sizes(config, vocabulary)
        self.first_sentinel = vocabulary.size - num_spans  # <extra_id_0> is the last id
        documents = source.open(split, batch_size, seed, dict.fromkeys(range(batch_size), (0, 0)))
        texts = (text for lane in range(batch_size) for *_, text in documents(0, lane))
        if not any(vocabulary.encode([text])[0] for text in texts):
            fraction = f'data.validation_fraction={config.validation_fraction}'
            words = f'no document is in split {split!r} of {source.description} at {fraction}'
            raise ValueError(f'{words}; change it or the files')
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
    if not (0 < density < 1 <= mean):
        given = f'data.noise_density={density}, data.mean_noise_span_length={mean}'
        raise ValueError(f'{given}: the first must lie in (0, 1), the second be 1 or more')
    raw_length, targets = random_spans_helper(lengths.inputs, density, mean)
    if lengths.targets < targets:
        given = f'data.lengths.targets={lengths.targets}'
        raise ValueError(f'{given}: too short for the inputs; use {targets} or more')
    _, num_spans = num_noise_tokens_and_spans(raw_length, density, mean)
    # ByT5 has no extra ids: its sentinels count down from the top bytes, rare in UTF-8.
    if 0 < vocabulary.num_extra_ids < num_spans:
        limit = f'{num_spans} noise spans for {vocabulary.num_extra_ids} sentinels'
        raise ValueError(f'data.lengths.inputs={lengths.inputs} gives {limit}; use shorter inputs')
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
    while corrupted_lengths(raw_length + 1)[0] <= inputs_length:
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


# Sources: a part is files that are read alike; `part.open` gives pools of documents, lane by lane.


@dataclasses.dataclass(frozen=True)
class Source:
    """A corpus. Where `validation` is None, the hash of a document's text says which split it is in."""

    description: str
    corpus: str  # 'files', 'pydoc' or 'pydoc instead of C4'
    fingerprint: str  # a run goes on with the same corpus only
    validation_fraction: float
    bad_lines: 'BadLines'
    train: 'Blocks | Shards'
    validation: 'Blocks | Shards | None' = None

    def open(self, split: str, num_lanes: int, seed: int, starts: dict) -> Callable:
        """-> documents(epoch, lane, unit, index), which yields (unit, index, name, text) from a pool of the
        lane on, and a document in it. `starts`: lane -> (epoch, unit) where each lane of this process begins;
        a lane asks for each of its epochs once, in order."""
        part = self.validation if split == 'validation' and self.validation else self.train

        def keep(name: str, text: str) -> tuple[str, str]:
            """No document keeps the place, in its pool, of one that is in the other split."""
            is_in_split = self.validation or split == self.split_of(text)
            return (name, text) if text and is_in_split else ('', '')

        pools = part.open(num_lanes, seed, starts, keep)

        def documents(epoch: int, lane: int, unit=0, index=0) -> Iterator[tuple]:
            for at, pool in pools(epoch, lane, unit):
                order = permutation(len(pool), 'pool', seed, epoch, lane, at)
                for i in range(index, len(pool)):
                    name, text = pool[order[i]]
                    if text:
                        yield at, i, name, text
                index = 0

        return documents

    def split_of(self, text: str) -> str:
        is_validation = zlib.crc32(text.encode()) < self.validation_fraction * 2**32
        return 'validation' if is_validation else 'train'

    def documents(
        self, split: str, epoch: int, lane: int, num_lanes: int, seed: int, unit=0, index=0
    ) -> Iterator[tuple[int, int, str, str]]:
        """Those of one lane alone."""
        documents = self.open(split, num_lanes, seed, {lane: (epoch, unit)})
        return documents(epoch, lane, unit, index)

    def faults(self) -> tuple[list[str], int]:
        """The lines left out since the last call, described (the last 10 at most), and the number of all."""
        return self.bad_lines.take()


def open_source(config) -> Source:
    """The files of `config.files` (globs, comma-separated), else the prose of this Python. Raises ValueError
    for settings that do not fit together and, unless it may skip them, for empty files."""
    if not config.text_field:
        raise ValueError("data.text_field='' names no field; C4's is 'text'")
    bad_lines = BadLines(config.on_bad_line, config.max_bad_fraction)
    train, validation = (
        find_files(f'data.{name}', config[name], bad_lines)
        for name in ('files', 'validation_files')
    )
    if validation and (not train or set(train) & set(validation)):
        rule = 'needs data.files besides, and none of them twice'
        raise ValueError(f'data.validation_files={config.validation_files!r} {rule}')
    if not train:
        what, c4 = "this Python's documentation", config.task.startswith('c4')
        source = in_memory(what, pydoc_documents(), config.validation_fraction)
        return dataclasses.replace(source, corpus='pydoc instead of C4' if c4 else 'pydoc')
    parts = [train, validation] if validation else [train]
    content: list[list] = []
    for paths in parts:
        sizes = [os.path.getsize(path) for path in paths]
        content += [[os.path.basename(path) for path in paths], sizes]
    return Source(
        f'{len(train):,} text file(s), {sum(content[1]):,} bytes',
        'files',
        digest(content),
        config.validation_fraction,
        bad_lines,
        *(text_files(paths, config.text_field, bad_lines) for paths in parts),
    )


def find_files(key: str, patterns: str, bad_lines: 'BadLines') -> list[str]:
    paths: set[str] = set()
    for pattern in filter(None, patterns.split(',')):
        found = {path for path in glob.glob(pattern.strip()) if os.path.isfile(path)}
        if not found:
            raise ValueError(f'{key}: {pattern.strip()!r} matches no file; correct it')
        paths |= found
    empty = {path for path in paths if os.path.getsize(path) == 0}
    for path in sorted(empty):
        bad_lines.add(path, 0, EMPTY)
    if paths and paths == empty:
        raise ValueError(f'{key}={patterns!r} matches empty files only; correct it')
    return sorted(paths - empty)


def text_files(paths: list[str], text_field: str, bad_lines: 'BadLines') -> 'Blocks | Shards':
    """A document per line, names are path:offset; in a gzipped file path:line."""
    gzipped = [path for path in paths if path.endswith('.gz')]
    if gzipped and len(gzipped) < len(paths):
        one = next(path for path in paths if path not in gzipped)
        raise ValueError(f'{gzipped[0]} is gzipped, {one} is not: gzip all files, or none')

    def parse(path: str, place: int, line: bytes) -> tuple[str, str]:
        """(name, text); '' where the line holds no document."""
        bad_lines.num_read += 1
        is_json = path.removesuffix('.gz').endswith(('.json', '.jsonl'))
        try:
            return f'{path}:{place}', line_text(line, text_field if is_json else None)
        except ValueError as error:
            bad_lines.add(path, place, str(error))
            return f'{path}:{place}', ''

    return Shards(paths, parse, bad_lines) if gzipped else blocks_of_bytes(paths, parse)


def line_text(line: bytes, field: str | None) -> str:
    """A line, or a field of the JSON object on it; ValueError says what is wrong with it."""
    try:
        text = line.decode().strip()
        if not text or field is None:
            return text
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError(f'{text!r:.40} is no JSON object; write {{"{field}": ...}}')
        if field not in record:
            has = ', '.join(map(repr, list(record)[:10])) or 'none'
            raise ValueError(f'no field {field!r}, its fields are: {has}; set data.text_field')
        if not isinstance(record[field], str):
            value = f'field {field!r} is {record[field]!r:.40}'
            raise ValueError(f'{value}, no string; set data.text_field')
        record[field].encode()
        return record[field].strip()
    except UnicodeDecodeError as error:
        raise ValueError(f'byte {error.start + 1} is not UTF-8; convert the file') from None
    except UnicodeEncodeError:  # JSON can write half a surrogate pair, as \ud800
        raise ValueError(f'field {field!r} holds half a surrogate pair; mend it') from None
    except json.JSONDecodeError as error:
        raise ValueError(f'no JSON: {error.msg} at character {error.pos + 1}; mend it') from None
    except RecursionError:
        raise ValueError('JSON that is nested too deeply; mend it') from None


EMPTY = 'the file is empty; copy it again, or remove it'


class BadLines:
    """Lines that cannot be read. They stop the run, or are left out and counted, each once, as long as they
    are few. Threads may share it."""

    def __init__(self, action: str = 'stop', max_fraction: float = 0.0):
        if action not in ('stop', 'skip'):
            raise ValueError(f"data.on_bad_line={action!r}: must be 'stop' or 'skip'")
        if not 0 <= max_fraction <= 1:
            raise ValueError(f'data.max_bad_fraction={max_fraction}: must be in [0, 1]')
        self.action, self.max_fraction = action, max_fraction
        self.num_read = 0  # a bound's measure: two threads may lose a line
        self.places: set[tuple[str, int]] = set()
        self.untold: collections.deque[tuple] = collections.deque(maxlen=10)
        self.lock = threading.Lock()

    def add(self, path: str, place: int, why: str) -> None:
        """`place`: a byte offset, in a gzipped file the number of the line. Raises ValueError."""
        if self.action == 'stop':
            hint = 'data.on_bad_line=stop (skip leaves it out)'
            raise ValueError(f'{hint}: {self.describe(path, place, why)}')
        with self.lock:
            if (path, place) in self.places:
                return
            self.places.add((path, place))
            self.untold.append((path, place, why))
            bound = max(10, self.max_fraction * self.num_read)
            if len(self.places) > bound:
                found = f'{len(self.places):,} bad lines among the {self.num_read:,} read'
                rule = f'more than {bound:,.0f} (data.max_bad_fraction={self.max_fraction}, or 10)'
                last = self.describe(path, place, why)
                raise ValueError(f'{found}, {rule}: mend the files; the last is {last}')

    def take(self) -> tuple[list[str], int]:
        with self.lock:
            untold, num_bad = list(self.untold), len(self.places)
            self.untold.clear()
        return [self.describe(*fault) for fault in untold], num_bad

    @staticmethod
    def describe(path: str, place: int, why: str) -> str:
        if path.endswith('.gz'):
            line = max(place, 1)  # an empty file has none
        else:  # counted only now: that reads the file up to the place
            with open(path, 'rb') as file:
                chunks = iter(lambda: file.read(min(1 << 20, place - file.tell())), b'')
                line = 1 + sum(chunk.count(b'\n') for chunk in chunks)
        return f'line {line} of {path}: {why}'


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Documents that can be read anywhere; `read(block)` gives those of one block as (name, text).

    An epoch permutes the blocks and deals them out to the lanes, each of which reads pools of them.
    """

    num_blocks: int
    read: Callable[[int], list[tuple[str, str]]]

    def open(self, num_lanes: int, seed: int, starts: dict, keep: Callable) -> Callable:
        """-> pools(epoch, lane, unit), which yields (unit, documents), from a pool of the lane on; each
        document is what `keep(name, text)` makes of it."""

        def pools(epoch: int, lane: int, unit: int) -> Iterator[tuple[int, list]]:
            order = epoch_order(self.num_blocks, seed, epoch)
            # Where blocks are fewer than lanes, every lane has its turn.
            blocks = order[(lane + epoch) % num_lanes :: num_lanes].tolist()
            for start in range(unit * BLOCKS_PER_POOL, len(blocks), BLOCKS_PER_POOL):
                own = map(self.read, blocks[start : start + BLOCKS_PER_POOL])
                documents = itertools.chain.from_iterable(own)
                yield start // BLOCKS_PER_POOL, [keep(*document) for document in documents]

        return pools


def in_memory(what: str, documents: list[tuple[str, str]], validation_fraction: float) -> Source:
    """(name, text) of each document, each a block."""
    fingerprint = digest([text for _, text in documents])
    what = f'{len(documents):,} texts of {what}'
    blocks = Blocks(len(documents), lambda block: [documents[block]])
    return Source(what, 'memory', fingerprint, validation_fraction, BadLines(), blocks)


def blocks_of_bytes(paths: list[str], parse: Callable) -> Blocks:
    """A line is in the block where it starts."""
    sizes = [os.path.getsize(path) for path in paths]
    block_bytes = min(max(sum(sizes) // MIN_BLOCKS, 1), MAX_BLOCK_BYTES)
    first_blocks = np.cumsum([0] + [-(-size // block_bytes) for size in sizes])

    def read(block: int) -> list[tuple[str, str]]:
        file_index = int(np.searchsorted(first_blocks, block, side='right')) - 1
        path, start = paths[file_index], (block - int(first_blocks[file_index])) * block_bytes
        documents = []
        with open(path, 'rb') as file:
            if start:
                file.seek(start - 1)
                file.readline()  # ends a line that began in an earlier block
            while (offset := file.tell()) < start + block_bytes and (line := file.readline()):
                documents.append(parse(path, offset, line))
        return documents

    return Blocks(int(first_blocks[-1]), read)


@dataclasses.dataclass(frozen=True)
class Shards:
    """Gzipped files, read from their beginnings only. `parse(path, number, line)` gives (name, text).

    An epoch permutes the shards and deals them out to the lanes, each of which reads rounds of some shards,
    interleaved. Where shards are fewer, neighbouring lanes share one, line by line. A unit is the number of
    the round << 32 | the number of the pool in it.
    """

    paths: list[str]
    parse: Callable[[str, int, bytes], tuple[str, str]]
    bad_lines: BadLines

    def open(self, num_lanes: int, seed: int, starts: dict, keep: Callable) -> Callable:
        """As that of Blocks."""
        return ShardReader(self, num_lanes, seed, starts, keep).pools

    def lines(self, path: str) -> Iterator[tuple[str, int, bytes]]:
        """(path, number, line) of each line that can be read."""
        number = 0
        try:
            with gzip.open(path) as file:
                for number, line in enumerate(file, 1):
                    yield path, number, line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.bad_lines.add(path, number + 1, f'broken gzip ({error}); copy the file again')
            return
        if number == 0:
            self.bad_lines.add(path, 0, EMPTY)


class ShardReader:
    """Shards as the lanes of one process read them: what lanes share is decompressed once."""

    def __init__(self, shards: Shards, num_lanes: int, seed: int, starts: dict, keep: Callable):
        self.shards, self.num_lanes, self.seed, self.keep = shards, num_lanes, seed, keep
        self.starts = dict(starts)  # own lane -> (epoch, unit) where it opens a shard next
        self.shared: dict[tuple[int, int], SharedShard] = {}  # that own lanes will come to
        self.pool_lines = max(POOL_LINES // num_lanes, MIN_POOL_LINES)

    def pools(self, epoch: int, lane: int, unit: int) -> Iterator[tuple[int, list]]:
        turn, pool = divmod(unit, 1 << 32)
        while own := self.documents_of_round(epoch, lane, turn, pool * self.pool_lines):
            while documents := list(itertools.islice(own, self.pool_lines)):
                yield turn << 32 | pool, documents
                pool += 1
            turn, pool = turn + 1, 0

    def documents_of_round(self, epoch: int, lane: int, turn: int, first: int) -> Iterator | None:
        """The lane's documents from the `first` line of a round on; None after the last round."""
        num_shards, num_lanes = len(self.shards.paths), self.num_lanes
        order = epoch_order(num_shards, self.seed, epoch)
        seat = (lane + epoch) % num_lanes  # every lane has its turn
        if num_shards < num_lanes:
            k = seat * num_shards // num_lanes
            seats = range(-(-k * num_lanes // num_shards), -(-(k + 1) * num_lanes // num_shards))
            members = [(seat - epoch) % num_lanes for seat in seats]
            return None if turn else self.share(epoch, lane, members, self.shards.paths[order[k]])
        num_open = -(-MIN_OPEN_SHARDS // num_lanes)
        own = order[seat::num_lanes][turn * num_open : (turn + 1) * num_open]
        if not len(own):
            return None
        by_turns = itertools.zip_longest(*(self.shards.lines(self.shards.paths[i]) for i in own))
        lines = filter(None, itertools.chain.from_iterable(by_turns))
        return map(self.document, itertools.islice(lines, first, None))

    def document(self, line: tuple[str, int, bytes]) -> tuple[str, str]:
        return self.keep(*self.shards.parse(*line))

    def share(self, epoch: int, lane: int, members: list[int], path: str) -> Iterator:
        """The lane's documents of the shard that the lanes `members` share in this epoch."""
        firsts = {}  # member of this process that is still to come -> the first of its lines
        for member, owner in enumerate(members):
            at, unit = self.starts.get(owner, (epoch + 1, 0))
            if at <= epoch:
                firsts[member] = unit * self.pool_lines if at == epoch else 0
        opened = self.shared.pop((epoch, members[0]), None)
        open_lines = functools.partial(self.shards.lines, path)
        shard = opened or SharedShard(
            open_lines, self.document, len(members), firsts, 4 * self.pool_lines
        )
        if len(firsts) > 1:
            self.shared[epoch, members[0]] = shard
        self.starts[lane] = epoch + 1, 0
        return shard.documents(members.index(lane))


class SharedShard:
    """Deals out the lines of a shard: line j is of member j % num_members, and its document waits for those
    in `firsts`, from the first of its own lines on that each wants. A member for whom `most_waiting` texts
    wait is left behind and reads on by itself, so that little is held."""

    def __init__(self, open_lines: Callable, document: Callable, num_members, firsts, most_waiting):
        self.settings = open_lines, document, num_members
        self.next, self.most_waiting = firsts, most_waiting  # member -> the next of its lines
        self.waiting: dict[int, collections.deque] = {i: collections.deque() for i in firsts}
        self.num_texts: collections.Counter[int] = collections.Counter()  # that wait
        self.left_behind: set[int] = set()
        self.numbered = enumerate(open_lines())

    def documents(self, member: int) -> Iterator[tuple[str, str]]:
        own = self.waiting[member]
        while own or member not in self.left_behind and self.read_for(member):
            name, text = own.popleft()
            self.num_texts[member] -= bool(text)
            yield name, text
        if member in self.left_behind:
            rest = {member: self.next[member]}
            yield from SharedShard(*self.settings, rest, self.most_waiting).documents(member)

    def read_for(self, member: int) -> bool:
        """Reads until something waits for the member; False at the end."""
        _, document, num_members = self.settings
        for number, line in self.numbered:
            turn, owner = divmod(number, num_members)
            if turn == self.next.get(owner):
                if self.num_texts[owner] == self.most_waiting:
                    self.left_behind.add(owner)
                    continue
                self.waiting[owner].append(document(line))
                self.num_texts[owner] += bool(self.waiting[owner][-1][1])
                self.next[owner] += 1
                if owner == member:
                    return True
        return False


def digest(content: list) -> str:
    return hashlib.blake2b(str(content).encode(), digest_size=16).hexdigest()


def pydoc_documents() -> list[tuple[str, str]]:
    """(name, text) of the English that comes with every Python: help topics and docstrings."""
    names: dict[str, str] = {}  # text -> name; equal texts count once
    root = pathlib.Path(sysconfig.get_path('stdlib'))
    left_out = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
    definitions = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob('*.py')):
        parts = path.relative_to(root).with_suffix('').parts
        try:
            nodes = [] if left_out & set(parts) else ast.walk(ast.parse(path.read_bytes()))
        except (SyntaxError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, definitions) and (text := ast.get_docstring(node, clean=False)):
                name = '.'.join([*parts, getattr(node, 'name', '')]).rstrip('.')
                names.setdefault(' '.join(text.split()), name)
    try:
        topics = importlib.import_module('pydoc_data.topics').topics
    except ImportError:  # some distributions leave it out
        topics = {}
    for topic in sorted(topics):
        names.setdefault(' '.join(topics[topic].split()), f'topics.{topic}')
    return [(name, text) for text, name in names.items() if len(text) >= 40]


# Vocabularies: SeqIO seqio/vocabularies.py.


class Vocabulary:
    """`size` ids, the `num_extra_ids` sentinels among them at the end, <extra_id_0> the very last."""

    size: int
    num_extra_ids: int
    model = b''  # SentencePiece's, as it was found or trained

    @property
    def hash(self) -> str:
        return digest([self.model, self.num_extra_ids])

    def within(self, max_size: int) -> Self:
        """Itself; raises ValueError where it has more than `max_size` ids."""
        if self.size > max_size:
            wish = f'{self.size} pieces; use {-(-self.size // 128) * 128}'
            raise ValueError(f'model.vocab_size={max_size} is too small for {wish}')
        return self


def find_vocabulary(
    config, workdir: str | pathlib.Path, source: Source, max_size: int, model: bytes = b''
) -> Vocabulary:
    """What `config.vocabulary` names ('bytes', a SentencePiece model or its folder), else `model`, else the
    workdir's, else one trained on a sample of `source`. The caller keeps its `model` as
    workdir/vocabulary.model. Raises ValueError where that is another one, and where a model is missing,
    unreadable or has more than `max_size` ids."""
    if config.vocabulary == 'bytes':
        return ByteVocabulary(config.extra_ids).within(max_size)
    kept = pathlib.Path(workdir, 'vocabulary.model')
    name = f'data.vocabulary={config.vocabulary!r}'
    if config.vocabulary:
        if not (file := vocabulary_file(config.vocabulary)):
            raise ValueError(f'{name}: no file, nor a folder with spiece.model')
        model = file.read_bytes()
    elif model:
        name = 'the vocabulary of restore.path'
    elif kept.exists():
        name, model = str(kept), kept.read_bytes()
    else:
        documents = source.documents('train', 0, 0, 1, seed=0)  # from all over the corpus
        model = train_vocabulary((text for *_, text in documents), config.num_pieces)
    if kept.exists() and model != kept.read_bytes():
        raise ValueError(f'{name} is not {kept}: use that, or another workdir')
    try:
        return SentencePieceVocabulary(model, config.extra_ids).within(max_size)
    except ValueError as error:
        raise ValueError(f'{name}: {error}') from None


def vocabulary_file(name):
    """The SentencePiece model that `name`, a string or path, is or, if it is a folder, holds; else None."""
    path = pathlib.Path(name) if isinstance(name, str) else name
    files = [path, path / 'spiece.model', path / 'sentencepiece.model']
    return next((file for file in files if file.is_file()), None)


def train_vocabulary(texts: Iterable[str], num_pieces: int) -> bytes:
    """A SentencePiece unigram model of at most `num_pieces` pieces, the same ones every time, from the
    first SAMPLE_CHARACTERS of `texts`."""

    def lines():  # the trainer drops long ones, so they are cut
        left = SAMPLE_CHARACTERS
        for text in texts:
            yield from (text[i : i + 1000] for i in range(0, len(text), 1000))
            if (left := left - len(text)) <= 0:
                return

    model = io.BytesIO()
    options: dict = {'vocab_size': num_pieces, 'hard_vocab_limit': False, 'model_type': 'unigram'}
    options |= {'pad_id': PAD_ID, 'eos_id': EOS_ID, 'unk_id': UNK_ID, 'bos_id': -1}
    # Sums are taken in the order of the threads: their number must not follow the machine.
    options |= {'num_threads': 8, 'minloglevel': 2}
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines(), model_writer=model, **options
        )
    except RuntimeError as error:
        raise ValueError(f'data.num_pieces={num_pieces} does not fit the corpus: {error}') from None
    return model.getvalue()


class ByteVocabulary(Vocabulary):
    """Byte b of the UTF-8 text is id b + 3 (ByT5)."""

    def __init__(self, extra_ids: int = 0):
        self.num_extra_ids, self.size = extra_ids, 3 + 256 + extra_ids

    def encode(self, texts: list[str]) -> list[list[int]]:
        """ids of each text, without EOS."""
        return [[byte + 3 for byte in text.encode()] for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first EOS; what is no byte or no character is left out."""
        ids = itertools.takewhile(lambda i: i != EOS_ID, map(int, ids))
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode(errors='ignore')


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model, and after its pieces `extra_ids` sentinels, reversed as SeqIO does. A model
    that brings its own (mT5's, cc_all.32000.100extra) gets no others."""

    def __init__(self, model: bytes, extra_ids: int = 100):
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model or b'empty')
        except RuntimeError:
            raise ValueError('no SentencePiece model') from None
        special = (processor.pad_id(), processor.eos_id(), processor.unk_id())
        if special != (PAD_ID, EOS_ID, UNK_ID):
            raise ValueError(f'pad, eos, unk are {special}, not (0, 1, 2) as in T5')
        self.model = model
        pieces = processor.id_to_piece(list(range(processor.vocab_size())))
        self.num_extra_ids = sum('<extra_id_' in piece for piece in pieces)
        if self.num_extra_ids == 0:
            self.num_extra_ids = extra_ids
            for i in reversed(range(extra_ids)):  # more fields of the model's protocol buffer
                text = f'▁<extra_id_{i}>'.encode()
                piece = b'\x0a' + bytes([len(text)]) + text + b'\x18\x04'  # 3: 4, user-defined
                model += b'\x0a' + bytes([len(piece)]) + piece
            processor.load_from_serialized_proto(model)
        self._processor, self.size = processor, processor.vocab_size()

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self._processor.encode(texts)  # without EOS

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first EOS; an id beyond the vocabulary is unknown."""
        ids = itertools.takewhile(lambda i: i != EOS_ID, map(int, ids))
        return self._processor.decode([i if i < self.size else UNK_ID for i in ids])


def random_bits(shape: tuple[int, ...], *key: int | str) -> np.ndarray:
    """uint64, the same everywhere: Philox, keyed by a hash of (purpose, seed, place)."""
    generator = np.random.Philox(key=int(digest(list(key)), base=16))
    return generator.random_raw(math.prod(shape)).reshape(shape)


def permutation(length: int, *key: int | str) -> np.ndarray:
    return np.argsort(random_bits((length,), *key), kind='stable')


@functools.lru_cache(maxsize=4)
def epoch_order(num_blocks: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of all blocks; kept, because every lane asks for it."""
    return permutation(num_blocks, 'epoch', seed, epoch)
