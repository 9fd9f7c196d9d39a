"""Vocabularies: SentencePiece and bytes, ids and sentinels. Imports no jax.

Source: SeqIO seqio/vocabularies.py.
"""

import hashlib
import io
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

import paths
import settings

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
# What a SentencePiece model may be called, in the order in which a folder is searched.
VOCABULARY_NAMES = ('vocabulary.model', 'spiece.model', 'sentencepiece.model')
DEFAULT_EXTRA_IDS = 100  # T5's
SAMPLE_CHARACTERS = 10_000_000  # that a vocabulary is trained on
SAMPLE_LINE_CHARACTERS = 1000  # the trainer drops long lines, so they are cut


class Vocabulary:
    """`size` ids. The last `num_extra_ids` of them are sentinels, <extra_id_0> the very last."""

    size: int
    num_extra_ids: int
    model = b''  # of SentencePiece, as it was found or trained
    num_threads = -1  # that SentencePiece encodes with; -1 for all cores

    @property
    def hash(self) -> str:
        content = str([self.model, self.num_extra_ids])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def num_sentinels(self) -> int:
        """How many spans of noise span corruption can mark."""
        return self.num_extra_ids

    def encode(self, texts: list[str], glued_sentinels: bool = False) -> list[list[int]]:
        """Return the ids of each text, without EOS."""
        return [ids.tolist() for ids in self.encode_as_arrays(texts, glued_sentinels)]

    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[np.ndarray]:
        """Return the ids of each text, int32 without EOS, which may be read-only."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text before the first EOS."""
        raise NotImplementedError

    def check_size(self, max_size: int) -> None:
        """Raise ValueError if there are more than `max_size` ids."""
        if self.size > max_size:
            multiple_of_128 = -(-self.size // 128) * 128
            raise ValueError(
                f'model.vocab_size={max_size} is too small for {self.size} pieces; use '
                f'{multiple_of_128}'
            )


class ByteVocabulary(Vocabulary):
    """Byte b of the UTF-8 text is id b + 3 (ByT5)."""

    def __init__(self, extra_ids: int = 0):
        check_extra_ids(extra_ids)
        self.num_extra_ids = extra_ids
        self.size = 3 + 256 + extra_ids

    @property
    def num_sentinels(self) -> int:
        """How many spans can be marked.

        Without extra ids, as in ByT5, the sentinels are the top bytes, which are in no ASCII
        character.
        """
        return self.num_extra_ids or 128

    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[np.ndarray]:
        """Return the ids of each text, without EOS. As in SeqIO no text is a sentinel."""
        return [np.frombuffer(text.encode(), np.uint8) + np.int32(3) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text before the first EOS, without what is no byte or no character."""
        text_bytes = bytes(i - 3 for i in before_eos(ids) if 3 <= i < 259)
        return text_bytes.decode(errors='ignore')


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model, and after its pieces `extra_ids` sentinels, in reverse as in SeqIO.

    A model that has sentinels of its own (mT5's, cc_all.32000.100extra) gets no others. Raises
    ValueError for bytes that are no such model, and for a model whose pad, EOS and unknown have
    other ids than T5's.
    """

    def __init__(self, model: bytes, extra_ids: int = DEFAULT_EXTRA_IDS):
        check_extra_ids(extra_ids)
        try:
            # Without any bytes SentencePiece makes a processor that fails later.
            processor = sentencepiece.SentencePieceProcessor(model_proto=model or b'empty')
        except RuntimeError:
            raise ValueError('no SentencePiece model') from None
        special_ids = (processor.pad_id(), processor.eos_id(), processor.unk_id())
        if special_ids != (PAD_ID, EOS_ID, UNK_ID):
            raise ValueError(f'pad, eos, unk are {special_ids}, not (0, 1, 2) as in T5')
        pieces = processor.id_to_piece(list(range(processor.vocab_size())))
        self.model = model
        self.num_extra_ids = sum('<extra_id_' in piece for piece in pieces)
        if self.num_extra_ids == 0:
            self.num_extra_ids = extra_ids
            pieces = [f'▁<extra_id_{i}>' for i in reversed(range(extra_ids))]
            processor.load_from_serialized_proto(add_pieces(model, pieces))
        self.size = processor.vocab_size()
        self._processor = processor
        self._sentinels = {piece[1:] for piece in pieces if piece.startswith('▁<extra_id_')}

    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[np.ndarray]:
        """Return the ids of each text, without EOS.

        As in SeqIO `<extra_id_0>` is a sentinel where a word may begin. With `glued_sentinels` one
        in or after a word is a sentinel, too, and a word begins after it, as in transformers.
        """
        if glued_sentinels:
            texts = [re.sub(r'(?<=\S)<extra_id_\d+>', self._set_apart, text) for text in texts]
        return self._processor.encode(texts, return_type='numpy', num_threads=self.num_threads)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text before the first EOS. An id beyond the vocabulary is unknown."""
        known = []
        for i in before_eos(ids):
            known.append(i if i < self.size else UNK_ID)
        return self._processor.decode(known)

    def _set_apart(self, match: re.Match) -> str:
        """Return a sentinel with spaces around it, other text as it is."""
        if match[0] in self._sentinels:
            return f' {match[0]} '
        return match[0]


def check_extra_ids(extra_ids: int) -> None:
    settings.check_value('data.extra_ids', extra_ids, default=DEFAULT_EXTRA_IDS)


def before_eos(ids: Iterable[int]) -> Iterator[int]:
    return itertools.takewhile(lambda i: i != EOS_ID, map(int, ids))


def add_pieces(model: bytes, pieces: list[str]) -> bytes:
    """Return a SentencePiece model with more pieces, which text is never cut across."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    for piece in pieces:
        proto.pieces.add(piece=piece, type=proto.SentencePiece.USER_DEFINED)
    return proto.SerializeToString()


# Finding a vocabulary.


def find_vocabulary(folder: Any, name: str | Path | None = None) -> Vocabulary | None:
    """Return the vocabulary that `name` names, else the one of a checkpoint or run, else None.

    `name` is 'bytes', a SentencePiece model, or a folder that has one. `folder`, a path of
    `paths.to_path`, is that of the checkpoint or run; its config.json has the number of sentinels.
    Raises ValueError for a name without a vocabulary and for a file that is no SentencePiece model
    of T5's kind, and OSError for files that may not be read.
    """
    data_settings = read_settings(folder)['data']
    extra_ids = data_settings['extra_ids']
    if name:
        return named_vocabulary('vocabulary', name, extra_ids, byte_extra_ids=0)
    if data_settings['vocabulary'] == 'bytes':
        return ByteVocabulary()
    file = model_file(folder)
    if file is None:
        return None
    remedy = 'copy it again, or remove it and name the vocabulary of the model with data.vocabulary'
    return read_model(paths.own_file(file), extra_ids, remedy)


def vocabulary_of_checkpoint(directory: Any, config: Any) -> Vocabulary:
    """Return the vocabulary that `config.vocabulary` names, else that of a checkpoint or run.

    `config`: config.data. Raises ValueError for none, and for one that is not the checkpoint's.
    """
    own = find_vocabulary(directory)
    name = config.vocabulary
    if isinstance(own, ByteVocabulary):
        name = name or 'bytes'  # with as many sentinels as the settings say
    found = own
    if name:
        found = named_vocabulary(
            'data.vocabulary', name, config.extra_ids, byte_extra_ids=config.extra_ids
        )
    if found is None:
        raise ValueError(
            f'{directory} has no vocabulary: texts need the one that it was trained with: name it with '
            '--config.data.vocabulary: a SentencePiece model, a folder that holds one, or bytes'
        )
    if own is not None and own.model != found.model:
        raise ValueError(
            f'data.vocabulary={name!r} ({found.size:,} ids) is not the vocabulary of {directory} '
            f'({own.size:,} ids): leave it out, which takes that one'
        )
    return found


def check_rows(vocabulary: Vocabulary, directory: Any, num_rows: int) -> None:
    """Raise ValueError where a checkpoint has fewer rows of embeddings than a vocabulary has ids."""
    if vocabulary.size > num_rows:
        raise ValueError(
            f'the vocabulary has {vocabulary.size:,} ids, and {directory} has {num_rows:,} rows for '
            'them: name the vocabulary it was trained with (--config.data.vocabulary)'
        )


def find_or_train_vocabulary(
    config: Any, workdir: str | Path, texts: Iterable[str], max_size: int, model: bytes = b''
) -> Vocabulary:
    """Return the vocabulary of a run.

    It is what `config.vocabulary` names, else SentencePiece's `model`, which comes with a restored
    checkpoint, else the workdir's, else one trained on `texts`. The caller keeps its model as
    workdir/vocabulary.model. Raises ValueError if another model is there, and for a vocabulary that
    is missing, unreadable or has more than `max_size` ids.
    """
    kept = Path(workdir, 'vocabulary.model')
    origin = f'data.vocabulary={config.vocabulary!r}'
    remedy = 'leave it out'
    if config.vocabulary:
        vocabulary = named_vocabulary(
            'data.vocabulary', config.vocabulary, config.extra_ids, byte_extra_ids=config.extra_ids
        )
    elif model:
        origin = 'the vocabulary of restore.path'
        remedy = 'remove that file'
        vocabulary = SentencePieceVocabulary(model, config.extra_ids)
    elif kept.exists():
        remedy = 'remove it: the run takes the one of its newest checkpoint, or makes it again'
        vocabulary = read_model(kept, config.extra_ids, remedy)
    else:
        model = train_vocabulary(texts, config.num_pieces)
        vocabulary = SentencePieceVocabulary(model, config.extra_ids)
    if vocabulary.model and kept.exists() and vocabulary.model != kept.read_bytes():
        raise ValueError(f'{origin} is not {kept}: {remedy}, or name another --workdir')
    vocabulary.check_size(max_size)
    return vocabulary


def named_vocabulary(
    setting: str, name: str | Path, extra_ids: int, byte_extra_ids: int
) -> Vocabulary:
    """Return the vocabulary that `name` names. Errors begin with the name of the `setting`."""
    if name == 'bytes':
        return ByteVocabulary(byte_extra_ids)
    try:
        path = paths.to_path(name)
        if read_settings(path)['data']['vocabulary'] == 'bytes':
            return ByteVocabulary(byte_extra_ids)
        file = None
        if paths.is_file(path):
            file = path
        elif path.is_dir():
            file = model_file(path)
        if file is None:
            raise ValueError(
                f'no file, nor a folder with {", ".join(VOCABULARY_NAMES)}: name a SentencePiece '
                "model, the folder of a run or a checkpoint, or 'bytes'"
            )
        if isinstance(file, Path):
            paths.check_not_lfs(file)  # a link of the user's own may lead anywhere
        return read_model(file, extra_ids, remedy='name another vocabulary')
    except ValueError as error:
        raise ValueError(f'{setting}={str(name)!r}: {error}') from None


def model_file(folder: Any) -> Any:
    """Return the SentencePiece model in the folder of a checkpoint or run, else None.

    The model of a checkpoint may also be in the folder above, and that of a Mesh-TF prefix or of an
    index alone is beside it.
    """
    folders = [folder]
    if folder.name.startswith('checkpoint_') or not folder.is_dir():
        folders.append(folder.parent)
    for candidate in folders:
        for name in VOCABULARY_NAMES:
            if paths.is_file(candidate / name):
                return candidate / name
    return None


def read_model(file: Any, extra_ids: int, remedy: str) -> SentencePieceVocabulary:
    """Return the vocabulary of a SentencePiece model's file. Errors end with `remedy`."""
    try:
        return SentencePieceVocabulary(file.read_bytes(), extra_ids)
    except ValueError as error:
        raise ValueError(f'{file}: {error}: {remedy}') from None


def read_settings(folder: Any) -> dict[str, Any]:
    """Return config.json of a checkpoint or run of ours; else defaults for the vocabulary."""
    file = folder / 'config.json'
    content: dict[str, Any] = {}
    if paths.is_file(file):
        content = paths.read_json(file)
    if 'model' not in content:  # other formats have none
        content = {}
    settings.check_stored(content, file)
    defaults = {
        'extra_ids': DEFAULT_EXTRA_IDS,
        'vocabulary': '',
    }
    return {**content, 'data': {**defaults, **content.get('data', {})}}


# Training a vocabulary.


def train_vocabulary(texts: Iterable[str], num_pieces: int) -> bytes:
    """Return a SentencePiece unigram model of `num_pieces` pieces, or fewer for a small corpus.

    It is the same every time. The first SAMPLE_CHARACTERS of `texts` are read.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sample_lines(texts),
            model_writer=model,
            model_type='unigram',
            vocab_size=num_pieces,
            hard_vocab_limit=False,
            pad_id=PAD_ID,
            eos_id=EOS_ID,
            unk_id=UNK_ID,
            bos_id=-1,
            # Sums are taken in the order of the threads: their number must not follow the machine.
            num_threads=8,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(describe_training_error(num_pieces, str(error))) from error
    return model.getvalue()


def sample_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the first SAMPLE_CHARACTERS of `texts` in lines of at most SAMPLE_LINE_CHARACTERS."""
    remaining = SAMPLE_CHARACTERS
    for text in texts:
        text = text[:SAMPLE_CHARACTERS]
        for start in range(0, len(text), SAMPLE_LINE_CHARACTERS):
            yield text[start : start + SAMPLE_LINE_CHARACTERS]
        remaining -= len(text)
        if remaining <= 0:
            return


def describe_training_error(num_pieces: int, error: str) -> str:
    """Return what is wrong, and the remedy, for an error of SentencePiece."""
    setting = f'data.num_pieces={num_pieces}'
    sizes = re.search(r'smaller than required_chars\. (\d+) vs (\d+)', error)
    if sizes:
        return (
            f'{setting}: a piece for each character of the corpus, pad, EOS and unknown are '
            f'{sizes[2]}: use {sizes[2]} or more'
        )
    if 'sentences_.empty()' in error or 'all_chars_count' in error:
        return f'{setting}: the corpus has no text to train a vocabulary on: name files with text'
    if 'insert_id' in error:
        return f'{setting}: pad, EOS and unknown are pieces, too: use 4 or more, as T5 32,000'
    one_line = ' '.join(error.split())
    return f'{setting} does not fit the corpus: {one_line}: use another number'
