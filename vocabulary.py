"""Vocabularies: SentencePiece and bytes, ids and sentinels. Imports no jax.

Source: SeqIO seqio/vocabularies.py.
"""

import hashlib
import io
import itertools
import pathlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import sentencepiece

import paths

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
SAMPLE_CHARACTERS = 10_000_000  # that a vocabulary is trained on
MAX_PIECES = 1_000_000  # of a vocabulary that is trained: SentencePiece considers no more
MAX_EXTRA_IDS = 100_000


class Vocabulary:
    """`size` ids, the `num_extra_ids` sentinels among them at the end, <extra_id_0> the very last."""

    size: int
    num_extra_ids: int
    model = b''  # SentencePiece's, as it was found or trained

    @property
    def hash(self) -> str:
        return digest([self.model, self.num_extra_ids])

    @property
    def num_sentinels(self) -> int:
        """How many noise spans span corruption can mark."""
        return self.num_extra_ids

    def within(self, max_size: int) -> Self:
        """Itself; raises ValueError where it has more than `max_size` ids."""
        if self.size > max_size:
            wish = f'{self.size} pieces; use {-(-self.size // 128) * 128}'
            raise ValueError(f'model.vocab_size={max_size} is too small for {wish}')
        return self


def read_settings(directory: Any) -> dict[str, Any]:
    """config.json of a checkpoint of ours; where there is none only what its vocabulary is then."""
    file = directory / 'config.json'
    settings = paths.read_json(file) if paths.is_file(file) else {}
    is_ours = all(isinstance(settings.get(name, {}), dict) for name in ('model', 'data'))
    settings = settings if is_ours and 'model' in settings else {}
    return settings | {'data': {'extra_ids': 100, 'vocabulary': ''} | settings.get('data', {})}


def find_vocabulary(directory: Any, name: str | Path | None = None) -> Any:
    """Return the vocabulary that `name` names ('bytes', a SentencePiece model, or a folder that has one), else
    the one of a checkpoint or of its run, else None."""
    settings = read_settings(directory)['data']
    if name == 'bytes':
        return ByteVocabulary()
    file: Any = None
    if name:
        place = paths.to_path(name)
        if read_settings(place)['data']['vocabulary'] == 'bytes':
            return ByteVocabulary()
        file = place if paths.is_file(place) else place.is_dir() and vocabulary_file(place)
        if not file:
            raise ValueError(
                f"vocabulary={str(name)!r}: no file, nor a folder with {' or '.join(VOCABULARY_NAMES)}, nor 'bytes'"
            )
        if isinstance(file, Path):
            paths.check_not_lfs(file)  # a link of the user's own may lead anywhere
    elif settings['vocabulary'] == 'bytes':
        return ByteVocabulary()
    elif file := vocabulary_file(directory):
        file = paths.own_file(file)
    if file is None:
        return None
    try:
        return SentencePieceVocabulary(file.read_bytes(), settings['extra_ids'])
    except ValueError as error:
        raise ValueError(f'{file}: {error}: name another vocabulary') from None


def vocabulary_file(directory: Any) -> Any:
    """Return the SentencePiece model in the folder of a checkpoint or a run, else in the run's of a checkpoint,
    else in that of a Mesh-TF prefix; None where there is none."""
    folders = [directory]
    if directory.name.startswith('checkpoint_') or not directory.is_dir():
        folders.append(directory.parent)
    files = [folder / name for folder in folders for name in VOCABULARY_NAMES]
    return next((file for file in files if paths.is_file(file)), None)


def find_vocabulary_of_run(
    config, workdir: str | pathlib.Path, source: Any, max_size: int, model: bytes = b''
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
        model = read_vocabulary(name, config.vocabulary)
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


def read_vocabulary(key: str, name: str) -> bytes:
    """Return the SentencePiece model that `name` stands for. Raises ValueError that begins with `key`."""
    try:
        file = named_vocabulary_file(name)
        if file:
            paths.check_not_lfs(file)
            return file.read_bytes()
    except ValueError as error:
        raise ValueError(f'{key}: {error}') from None
    except OSError as error:
        raise ValueError(
            f'{key} cannot be read ({error.strerror}): correct its permissions, or name another'
        ) from error
    raise ValueError(
        f'{key}: no file, nor a folder with {", ".join(VOCABULARY_NAMES)}: name a SentencePiece '
        "model, the folder of a run or model, or 'bytes'"
    )


VOCABULARY_NAMES = ('vocabulary.model', 'spiece.model', 'sentencepiece.model')


def named_vocabulary_file(name: Any) -> Any:
    """Return the SentencePiece model that `name`, a string or path, is or holds; else None.

    A folder may be that of a run, of a published model, or `checkpoint_STEP` in a run's.
    """
    path = paths.to_path(name) if isinstance(name, str) else name
    files = [path, *(path / own for own in VOCABULARY_NAMES)]
    if re.fullmatch(r'checkpoint_\d+', path.name):
        files.append(path.parent / 'vocabulary.model')
    return next((file for file in files if file.is_file()), None)


def train_vocabulary(texts: Iterable[str], num_pieces: int) -> bytes:
    """A SentencePiece unigram model of at most `num_pieces` pieces, the same ones every time, from the
    first SAMPLE_CHARACTERS of `texts`."""

    def lines():  # the trainer drops long ones, so they are cut
        left = SAMPLE_CHARACTERS
        for text in texts:
            text = text[:SAMPLE_CHARACTERS]
            yield from (text[i : i + 1000] for i in range(0, len(text), 1000))
            if (left := left - len(text)) <= 0:
                return

    if not 1 <= num_pieces <= MAX_PIECES:
        raise ValueError(
            f'data.num_pieces={num_pieces}: must lie in [1, {MAX_PIECES:,}]: T5 has 32,000'
        )
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
        raise ValueError(training_fault(num_pieces, str(error))) from error
    return model.getvalue()


def training_fault(num_pieces: int, words: str) -> str:
    """Say what is wrong, given the words of SentencePiece."""
    given = f'data.num_pieces={num_pieces}'
    sizes = re.search(r'smaller than required_chars\. (\d+) vs (\d+)', words)
    if sizes:
        return (
            f'{given}: a piece for each character of the corpus, pad, EOS and unknown are '
            f'{sizes[2]}: use {sizes[2]} or more'
        )
    if 'sentences_.empty()' in words or 'all_chars_count' in words:
        return f'{given}: the corpus has no text to train a vocabulary on: name files with text'
    if 'insert_id' in words:
        return f'{given}: pad, EOS and unknown are pieces, too: use 4 or more, as T5 32,000'
    return f'{given} does not fit the corpus: {" ".join(words.split())}: use another number'


def checked_extra_ids(extra_ids: int) -> int:
    if not 0 <= extra_ids <= MAX_EXTRA_IDS:
        raise ValueError(
            f'data.extra_ids={extra_ids}: must lie in [0, {MAX_EXTRA_IDS:,}]: T5 has 100, ByT5 0'
        )
    return extra_ids


class ByteVocabulary(Vocabulary):
    """Byte b of the UTF-8 text is id b + 3 (ByT5)."""

    def __init__(self, extra_ids: int = 0):
        self.num_extra_ids = checked_extra_ids(extra_ids)
        self.size = 3 + 256 + extra_ids

    @property
    def num_sentinels(self) -> int:
        """ByT5 has no extra ids: its sentinels count down from the top bytes, of no ASCII character."""
        return self.num_extra_ids or 128

    def encode(self, texts: list[str], glued_sentinels: bool = False) -> list[list[int]]:
        """ids of each text, without EOS; as in SeqIO no text is a sentinel, glued or not."""
        return [[byte + 3 for byte in text.encode()] for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first EOS; what is no byte or no character is left out."""
        ids = itertools.takewhile(lambda i: i != EOS_ID, map(int, ids))
        return bytes(i - 3 for i in ids if 3 <= i < 259).decode(errors='ignore')


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model, and after its pieces `extra_ids` sentinels, reversed as SeqIO does. A model
    that brings its own (mT5's, cc_all.32000.100extra) gets no others."""

    def __init__(self, model: bytes, extra_ids: int = 100):
        checked_extra_ids(extra_ids)
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
            pieces = [f'▁<extra_id_{i}>' for i in reversed(range(extra_ids))]
            processor.load_from_serialized_proto(model + user_defined_pieces(pieces))
        self._sentinels = {piece[1:] for piece in pieces if piece.startswith('▁<extra_id_')}
        self._processor, self.size = processor, processor.vocab_size()

    def encode(self, texts: list[str], glued_sentinels: bool = False) -> list[list[int]]:
        """ids of each text, without EOS, as SeqIO gives them: `<extra_id_0>` is a sentinel where a word may
        begin. With `glued_sentinels` one in or after a word is a sentinel, too, and a word begins after it,
        as in transformers.
        """
        if glued_sentinels:
            texts = [re.sub(r'(?<=\S)<extra_id_\d+>', self._set_apart, text) for text in texts]
        return self._processor.encode(texts)

    def _set_apart(self, match: re.Match) -> str:
        return f' {match[0]} ' if match[0] in self._sentinels else match[0]

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first EOS; an id beyond the vocabulary is unknown."""
        ids = itertools.takewhile(lambda i: i != EOS_ID, map(int, ids))
        return self._processor.decode([i if i < self.size else UNK_ID for i in ids])


def user_defined_pieces(pieces: list[str]) -> bytes:
    """Return fields of a SentencePiece model's protocol buffer, which are appended to it."""
    fields = []
    for piece in pieces:
        text = piece.encode()
        field = b'\x0a' + bytes([len(text)]) + text + b'\x18\x04'  # 3: 4, user-defined
        fields.append(b'\x0a' + bytes([len(field)]) + field)
    return b''.join(fields)


def digest(content: list) -> str:
    return hashlib.blake2b(str(content).encode(), digest_size=16).hexdigest()
