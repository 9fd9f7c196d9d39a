"""From documents to batches: sources, vocabularies, span corruption, a stream that resumes.

    documents -> ids -> groups of 128 documents -> pieces of 568 ids -> {'inputs', 'targets'} -> batch

Host side only: numpy, no devices. Row r of every batch is lane r, and each lane owns a disjoint part of
every epoch, so a process reads and tokenizes what its own rows need. All randomness is a function of the
seed and of a place in the stream, so a place is all that resuming needs.
"""

import ast
import collections
import concurrent.futures
import dataclasses
import functools
import glob
import hashlib
import importlib
import io
import itertools
import math
import os
import pathlib
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import numpy as np
import sentencepiece

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
TASKS = ('span_corruption',)
DOCUMENTS_PER_GROUP, MAX_DOCUMENT_TOKENS = 128, 65536  # as in t5/data/preprocessors.py
MAX_BLOCK_BYTES, MIN_BLOCKS, BLOCKS_PER_POOL = 1 << 16, 4096, 8  # a lane holds one pool of blocks
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
        texts = (text for *_, text in source.documents(split, 0, 0, 1, seed))
        if not any(vocabulary.encode([text])[0] for text in texts):
            fraction = f'data.validation_fraction={config.validation_fraction}'
            raise ValueError(f'no document is in split {split!r} at {fraction}; change it')
        self.seek(np.zeros((len(self.rows), 4), np.int64))

    def seek(self, position: np.ndarray) -> None:
        """Goes to where `position` was read off."""
        self.position, self._lanes = np.array(position, np.int64), self._open_lanes(position)

    def describe(self, position: np.ndarray) -> list[str]:
        """The names of the documents in each row of the batch that starts at `position`."""
        return [', '.join(next(lane, (None, [], None))[1]) for lane in self._open_lanes(position)]

    def __iter__(self) -> 'Stream':
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        """SeqIO's EncDecFeatureConverter, unpacked."""
        inputs = np.zeros((len(self.rows), self.config.lengths.inputs), np.int32)
        targets = np.zeros((len(self.rows), self.config.lengths.targets), np.int32)
        for row, lane in enumerate(self._lanes):
            example, _, self.position[row] = next(lane, (([], []), [], self.position[row]))
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
        places = np.asarray(position).tolist()
        return [self._examples(*place) for place in zip(self.rows, places, strict=True)]

    def _examples(self, lane: int, start: list[int]) -> Iterator[tuple]:
        """Yields ((inputs, targets), names of the documents, position after it), from `start` on."""
        epoch, unit, index, piece = start
        while self.num_epochs is None or epoch < self.num_epochs:
            place = (self.split, epoch, lane, self.batch_size, self.seed, unit, index)
            documents = self.source.documents(*place)
            while group := list(itertools.islice(documents, DOCUMENTS_PER_GROUP)):
                examples = self._group_examples(group, self.seed, epoch, lane, unit, index)
                after = [(epoch, unit, index, given + 1) for given in range(len(examples))]
                unit, index = group[-1][0], group[-1][1] + 1
                after[-1:] = [(epoch, unit, index, 0)]
                yield from [(*e, a) for e, a in zip(examples, after, strict=False)][piece:]
                piece = 0
            epoch, unit, index = epoch + 1, 0, 0

    def _group_examples(self, group: list[tuple], *key: int) -> list[tuple]:
        """((inputs, targets), names of the documents) of each piece, in the stream's order."""
        encoded = self.vocabulary.encode([text for *_, text in group])
        encoded = [select_random_chunk(ids, i, *key) for i, ids in enumerate(encoded)]
        tokens = np.array(list(itertools.chain(*encoded)), np.int32)
        examples: list[tuple] = []
        for pieces in split_tokens(tokens, self.raw_length):
            corrupted = span_corruption(pieces, self.config, self.vocabulary.size, *key)
            examples += zip(*corrupted, strict=True)
        names = [name for (_, _, name, _), ids in zip(group, encoded, strict=True) for _ in ids]
        names = [names[i : i + self.raw_length] for i in range(0, len(names), self.raw_length)]
        # Differs from T5X, which shuffles in a buffer of 1,000 examples: lanes read far apart, and
        # each permutes the pieces of its group.
        order = permutation(len(examples), 'pieces', *key)
        return [(examples[i], list(dict.fromkeys(names[i]))) for i in order]


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


@dataclasses.dataclass(frozen=True)
class Source:
    """A corpus of blocks; `read(block)` gives the documents of one as (name, text).

    An epoch permutes the blocks and deals them out to the lanes; a lane permutes the documents of each
    pool of its blocks. The hash of its text says which split a document is in.
    """

    description: str
    num_blocks: int
    read: Callable[[int], list[tuple[str, str]]]
    fingerprint: str  # a run goes on with the same corpus only
    validation_fraction: float

    def documents(
        self, split: str, epoch: int, lane: int, num_lanes: int, seed: int, unit=0, index=0
    ) -> Iterator[tuple[int, int, str, str]]:
        """Yields (unit, index, name, text): from a pool of the lane on, and a document in it."""
        order = epoch_order(self.num_blocks, seed, epoch)
        # Where blocks are fewer than lanes, every lane has its turn.
        blocks = order[(lane + epoch) % num_lanes :: num_lanes].tolist()
        for start in range(unit * BLOCKS_PER_POOL, len(blocks), BLOCKS_PER_POOL):
            unit, own = start // BLOCKS_PER_POOL, blocks[start : start + BLOCKS_PER_POOL]
            pool = list(itertools.chain.from_iterable(map(self.read, own)))
            order = permutation(len(pool), 'pool', seed, epoch, lane, unit)
            for i in range(index, len(pool)):
                name, text = pool[order[i]]
                is_validation = zlib.crc32(text.encode()) < self.validation_fraction * 2**32
                if text and split == ('validation' if is_validation else 'train'):
                    yield unit, i, name, text
            index = 0


def open_source(config) -> Source:
    """The text files of `config.files` (globs, comma-separated), else the prose of this Python."""
    paths: set[str] = set()
    for pattern in filter(None, config.files.split(',')):
        found = {path for path in glob.glob(pattern.strip()) if os.path.isfile(path)}
        if not found:
            raise ValueError(f'data.files: {pattern.strip()!r} matches no file; correct it')
        paths |= found
    if paths:
        return text_files(sorted(paths), config.validation_fraction)
    return in_memory("this Python's documentation", pydoc_documents(), config.validation_fraction)


def in_memory(what: str, documents: list[tuple[str, str]], validation_fraction: float) -> Source:
    """(name, text) of each document, each a block."""
    fingerprint = digest([text for _, text in documents])
    what = f'{len(documents):,} texts of {what}'
    read = lambda block: [documents[block]]  # noqa: E731
    return Source(what, len(documents), read, fingerprint, validation_fraction)


def text_files(paths: list[str], validation_fraction: float) -> Source:
    """A document per line, in the block of bytes where the line starts; names are path:offset."""
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
                try:
                    documents.append((f'{path}:{offset}', line.decode().strip()))
                except UnicodeDecodeError as error:
                    place = f'{path}: byte {offset + error.start}'
                    raise UnicodeError(f'{place} is not UTF-8; convert the file') from None
        return documents

    what = f'{len(paths):,} text file(s), {sum(sizes):,} bytes'
    fingerprint = digest([[os.path.basename(path) for path in paths], sizes])
    return Source(what, int(first_blocks[-1]), read, fingerprint, validation_fraction)


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

    def within(self, max_size: int) -> Self:
        """Itself; raises ValueError where it has more than `max_size` ids."""
        if self.size > max_size:
            wish = f'{self.size} pieces; use {-(-self.size // 128) * 128}'
            raise ValueError(f'model.vocab_size={max_size} is too small for {wish}')
        return self


def find_vocabulary(
    config, workdir: str | pathlib.Path, source: Source, max_size: int
) -> Vocabulary:
    """What `config.vocabulary` names ('bytes', a SentencePiece model or its folder), else the workdir's,
    else one trained on a sample of `source`; a model is kept as workdir/vocabulary.model. Raises ValueError
    where that is another one, and where a model is missing, unreadable or has more than `max_size` ids."""
    if config.vocabulary == 'bytes':
        return ByteVocabulary(config.extra_ids).within(max_size)
    kept = pathlib.Path(workdir, 'vocabulary.model')
    name = config.vocabulary or str(kept)
    files = [pathlib.Path(name, end) for end in ('', 'spiece.model', 'sentencepiece.model')]
    if found := [file for file in files if file.is_file()]:
        model = found[0].read_bytes()
    elif config.vocabulary:
        raise ValueError(f'data.vocabulary={name!r}: no file, nor a folder with {files[1].name}')
    else:
        documents = source.documents('train', 0, 0, 1, seed=0)  # from all over the corpus
        model = train_vocabulary((text for *_, text in documents), config.num_pieces)
    if kept.exists() and model != kept.read_bytes():
        raise ValueError(f'data.vocabulary={name!r} is not {kept}: use that, or another workdir')
    try:
        vocabulary = SentencePieceVocabulary(model, config.extra_ids).within(max_size)
    except ValueError as error:
        raise ValueError(f'data.vocabulary={name!r}: {error}') from None
    kept.parent.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_suffix(f'.{os.getpid()}.tmp')
    unfinished.write_bytes(model)
    os.replace(unfinished, kept)
    return vocabulary


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
        pieces = processor.id_to_piece(list(range(processor.vocab_size())))
        self.num_extra_ids = sum('<extra_id_' in piece for piece in pieces)
        if self.num_extra_ids == 0:
            self.num_extra_ids = extra_ids
            for i in reversed(range(extra_ids)):  # more fields of the model's protocol buffer
                text = f'▁<extra_id_{i}>'.encode()
                piece = b'\x0a' + bytes([len(text)]) + text + b'\x18\x04'  # 3: 4, user-defined
                model += b'\x0a' + bytes([len(piece)]) + piece
            processor.load_from_serialized_proto(model)
        self.model, self._processor, self.size = model, processor, processor.vocab_size()

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
