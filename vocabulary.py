"""Vocabularies: SentencePiece and bytes, ids and sentinels. Imports no jax.

Source: SeqIO seqio/vocabularies.py.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
from numpy.typing import NDArray
from sentencepiece import sentencepiece_model_pb2

import paths
from configs import check as settings
from messages import first_ten
from paths import AnyPath
from randomness import digest

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
SPECIAL_TOKENS = ('<pad>', '</s>', '<unk>')  # as transformers calls them
# What a SentencePiece model may be called, in the order in which a folder is searched.
VOCABULARY_NAMES = ('vocabulary.model', 'spiece.model', 'sentencepiece.model')
DEFAULT_EXTRA_IDS = 100  # T5's
SENTINEL = re.compile(r'▁?<extra_id_(0|[1-9][0-9]{0,8})>')


class Vocabulary:
    """`size` ids, some of which are sentinels: they mark spans of noise."""

    size: int
    pieces: list[str]  # by id
    num_extra_ids: int
    sentinel_ids: NDArray  # int32: at N the id of <extra_id_N>
    model = b''  # of SentencePiece, as it was found or trained
    num_threads = -1  # that SentencePiece encodes with; -1 for all cores

    @property
    def num_sentinels(self) -> int:
        return len(self.sentinel_ids)

    @property
    def names(self) -> list[str]:
        """What each id stands for: <extra_id_N>, also where that is a byte, or its piece."""
        names = list(self.pieces)
        for number, i in enumerate(self.sentinel_ids):
            names[i] = f'<extra_id_{number}>'
        return names

    @property
    def hash(self) -> str:
        return digest([self.model, self.num_extra_ids])

    def encode(self, texts: list[str], glued_sentinels: bool = False) -> list[list[int]]:
        """Return the ids of each text, without EOS."""
        return [ids.tolist() for ids in self.encode_as_arrays(texts, glued_sentinels)]

    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[NDArray]:
        """Return the ids of each text, int32 without EOS, which may be read-only."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text before the first EOS; an id of no token is left out or unknown."""
        raise NotImplementedError


class ByteVocabulary(Vocabulary):
    """Byte b of the UTF-8 text is id b + 3 (ByT5).

    Without extra ids, as in ByT5, the sentinels are the top bytes, which are in no ASCII character.
    """

    def __init__(self, extra_ids: int = 0):
        self.num_extra_ids = extra_ids
        self.size = 3 + 256 + extra_ids
        self.pieces = [*SPECIAL_TOKENS, *[f'<0x{byte:02X}>' for byte in range(256)]]
        self.pieces += [''] * extra_ids
        self.sentinel_ids = self.size - 1 - np.arange(extra_ids or 128, dtype=np.int32)

    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[NDArray]:
        """As in SeqIO no text is a sentinel."""
        return [np.frombuffer(text.encode(), np.uint8) + np.int32(3) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        text_bytes = bytes(i - 3 for i in before_eos(ids) if 3 <= i < 259)
        return text_bytes.decode(errors='ignore')


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model, and after its pieces `extra_ids` sentinels, in reverse as in SeqIO.

    A model with pieces called `<extra_id_N>` or `▁<extra_id_N>` (mT5's, cc_all.32000.100extra) has its
    own sentinels, in any order and place, and gets no others. Raises ValueError for other bytes, for
    sentinels that are missing or there twice, and where pad, EOS and unknown have other ids than T5's.
    """

    def __init__(self, model: bytes, extra_ids: int = DEFAULT_EXTRA_IDS):
        settings.check_value('data.extra_ids', extra_ids)
        try:
            # Without any bytes SentencePiece makes a processor that fails later.
            processor = sentencepiece.SentencePieceProcessor(model_proto=model or b'empty')
        except RuntimeError as error:
            raise ValueError(f'no SentencePiece model ({error})') from None
        special_ids = (processor.pad_id(), processor.eos_id(), processor.unk_id())
        if special_ids != (PAD_ID, EOS_ID, UNK_ID):
            raise ValueError(f'pad, eos, unk are {special_ids}, not (0, 1, 2) as in T5')
        pieces = processor.id_to_piece(list(range(processor.vocab_size())))
        self.sentinel_ids = sentinel_ids_of(pieces)
        if self.num_sentinels == 0:
            proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
            for i in reversed(range(extra_ids)):
                added = f'▁<extra_id_{i}>'
                # SentencePiece never cuts a text across a piece of this type.
                proto.pieces.add(piece=added, type=proto.SentencePiece.USER_DEFINED)
                pieces.append(added)
            processor.load_from_serialized_proto(proto.SerializeToString())
            self.sentinel_ids = sentinel_ids_of(pieces)
        self.num_extra_ids = self.num_sentinels
        self.model = model
        self.pieces = pieces
        self.size = len(pieces)
        self._processor = processor
        # `▁<extra_id_N>` is found only where a word begins: blanks around it make it one.
        self._glued_sentinels = []
        for begin, replacement in (('▁', r' \g<0> '), ('', r'\g<0> ')):
            names = []
            for number, i in enumerate(self.sentinel_ids):
                if pieces[i] == f'{begin}<extra_id_{number}>':
                    names.append(f'<extra_id_{number}>')
            if names:
                pattern = re.compile(rf'(?<=\S)({"|".join(names)})')
                self._glued_sentinels.append((pattern, replacement))

    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[NDArray]:
        """Return the ids of each text, without EOS.

        As in SeqIO `<extra_id_0>` is a sentinel where a word may begin. With `glued_sentinels` one
        in or after a word is a sentinel, too, and a word begins after it, as in transformers.
        """
        if glued_sentinels:
            for pattern, replacement in self._glued_sentinels:
                texts = [pattern.sub(replacement, text) for text in texts]
        return self._processor.encode(texts, return_type='numpy', num_threads=self.num_threads)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([i if i < self.size else UNK_ID for i in before_eos(ids)])


def sentinel_ids_of(pieces: Sequence[str]) -> NDArray:
    """Return the ids of the pieces <extra_id_N>, in the order of N. Raises ValueError if one is missing."""
    found = []
    for i, piece in enumerate(pieces):
        match = SENTINEL.fullmatch(piece)
        if match:
            found.append((int(match[1]), i))
    found.sort()
    for expected, (number, _) in enumerate(found):
        if number != expected:
            fault = f'<extra_id_{number}> and no <extra_id_{expected}>'
            raise ValueError(
                f'its {len(found)} sentinels have {fault}: number them from 0, each once'
            )
    return np.array([i for _, i in found], np.int32)


def changed_id(old: Vocabulary, new: Vocabulary) -> str:
    """Return which id of `old` is another token in `new`, '' if all tokens of `old` keep their ids."""
    new_names = new.names
    for i, name in enumerate(old.names):
        new_name = new_names[i] if i < len(new_names) else None
        if name != new_name:
            return f'id {i} is {new_name!r} instead of {name!r}'
    return ''


def before_eos(ids: Iterable[int]) -> Iterator[int]:
    return itertools.takewhile(lambda i: i != EOS_ID, map(int, ids))


# Finding a vocabulary.


def find_vocabulary(folder: AnyPath, name: str | AnyPath | None = None) -> Vocabulary | None:
    """Return the vocabulary that `name` names, else the one of a checkpoint or run, else None.

    `name` is 'bytes', a SentencePiece model, or a folder that has one; its number of sentinels is that of the
    checkpoint. Raises ValueError for a name without a vocabulary of T5's kind, and for tokens of a folder that the
    vocabulary lacks.
    """
    found: Vocabulary | None
    if name == 'bytes':
        found = ByteVocabulary()
    elif name:
        found = named_vocabulary('vocabulary', name, stored_data(folder)['extra_ids'])
    else:
        found = own_vocabulary(folder)
    check_tokens(folder, found)
    return found


def own_vocabulary(folder: AnyPath, extra_ids: int = DEFAULT_EXTRA_IDS) -> Vocabulary | None:
    """Return the vocabulary of a checkpoint or run; `extra_ids`: if the folder does not say it."""
    stored = stored_data(folder, extra_ids)
    if stored['vocabulary'] == 'bytes':
        return ByteVocabulary(stored['extra_ids'])
    file = model_file(folder)
    if file is None:
        return None
    remedy = 'copy it again, or remove it and name the vocabulary of the model with data.vocabulary'
    return read_model(paths.own_file(file), stored['extra_ids'], remedy)


def named_vocabulary(setting: str, name: str | AnyPath, extra_ids: int) -> Vocabulary:
    """Return the vocabulary that `name` names. Errors begin with the name of the `setting`."""
    if name == 'bytes':
        return ByteVocabulary(extra_ids)
    try:
        path = paths.to_path(name)
        if stored_data(path)['vocabulary'] == 'bytes':
            return ByteVocabulary(extra_ids)
        file = path if paths.is_file(path) else None
        if path.is_dir():
            file = model_file(path)
        if file is None:
            raise ValueError(
                f'no file, nor a folder with {", ".join(VOCABULARY_NAMES)}: name a SentencePiece '
                "model, the folder of a run or a checkpoint, or 'bytes'"
            )
        if isinstance(file, Path):
            paths.check_not_lfs(file)  # a link of the user's own may lead anywhere
        found = read_model(file, extra_ids, remedy='name another vocabulary')
        check_added_tokens(file.parent, found)
        return found
    except ValueError as error:
        raise ValueError(f'{setting}={str(name)!r}: {error}') from None


def model_file(folder: AnyPath) -> AnyPath | None:
    """Return the SentencePiece model in the folder of a checkpoint or run, or beside it, else None."""
    for candidate in folders_of(folder):
        for name in VOCABULARY_NAMES:
            if paths.is_file(candidate / name):
                return candidate / name
    return None


def folders_of(folder: AnyPath) -> list[AnyPath]:
    """Return the folders in which files that belong to a checkpoint may be, as its vocabulary."""
    if folder.name.startswith('checkpoint_') or not folder.is_dir():
        return [folder, folder.parent]
    return [folder]


def read_model(file: AnyPath, extra_ids: int, remedy: str) -> SentencePieceVocabulary:
    """Return the vocabulary of a SentencePiece model's file. Errors end with `remedy`."""
    try:
        return SentencePieceVocabulary(file.read_bytes(), extra_ids)
    except ValueError as error:
        raise ValueError(f'{file}: {error}: {remedy}') from None


def stored_data(folder: AnyPath, extra_ids: int = DEFAULT_EXTRA_IDS) -> dict:
    """Return the settings `data` of a checkpoint or run, else transformers' extra_ids or `extra_ids`."""
    defaults = {'extra_ids': extra_ids, 'vocabulary': ''}
    tokenizer = folder / 'tokenizer_config.json'
    if paths.is_file(tokenizer):
        defaults['extra_ids'] = paths.read_json(tokenizer).get('extra_ids', extra_ids)
    return defaults | settings.read_stored(folder).get('data', {})


# Tokens that transformers has added to a vocabulary.

TOKEN_FILES = [
    'added_tokens.json',
    'special_tokens_map.json',
    'tokenizer_config.json',
    'tokenizer.json',
]


def check_tokens(checkpoint: AnyPath, vocabulary: Vocabulary | None) -> None:
    """Check the folders of a checkpoint as `check_added_tokens` does."""
    for folder in folders_of(checkpoint):
        check_added_tokens(folder, vocabulary)


def check_added_tokens(folder: AnyPath, vocabulary: Vocabulary | None) -> None:
    """Raise ValueError for tokens that transformers lists in a folder and `vocabulary` lacks.

    A sentinel must have the same id in both; those of ByT5 are bytes here, as in T5X. Without a
    SentencePiece model the pieces are those of tokenizer.json.
    """
    files = []
    tokens: list[tuple[str, int | None]] = []
    pieces: list[str] = []
    for file in [folder / name for name in TOKEN_FILES]:
        if not paths.is_file(file):
            continue
        content = paths.read_json(file)
        files.append(file.name)
        try:
            if file.name == 'added_tokens.json':
                tokens += content.items()
            else:
                tokens += listed_tokens(content)
            vocab = content.get('model', {}).get('vocab', [])  # {piece: id} or [[piece, score]]
            pieces += [piece if isinstance(piece, str) else str(piece[0]) for piece in vocab]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'{file} does not list tokens as transformers does ({error!r}): copy it again'
            ) from None
    sentinel_ids: dict[str, int] = {}
    if isinstance(vocabulary, SentencePieceVocabulary):
        sentinel_ids = {f'<extra_id_{n}>': int(i) for n, i in enumerate(vocabulary.sentinel_ids)}
        tokens += [(piece, None) for piece in set(pieces) - set(vocabulary.pieces)]
        pieces = vocabulary.pieces
    ids = {piece: i for i, piece in enumerate(pieces)}
    added = []
    for name, i in tokens:
        if SENTINEL.fullmatch(name):
            own_id = sentinel_ids.get(name.removeprefix('▁'))
            if sentinel_ids and i not in (None, own_id):
                raise ValueError(
                    f'{folder}: {name} is id {i} in {", ".join(files)}, and {own_id} with the {len(sentinel_ids)} '
                    'sentinels of its model: set data.extra_ids, or extra_ids in tokenizer_config.json, to as many'
                )
        elif i in (PAD_ID, EOS_ID, UNK_ID) or name in SPECIAL_TOKENS:
            continue
        elif name not in ids or i not in (None, ids[name]):
            added.append(name)
    if added:
        names = sorted(set(added))
        raise ValueError(
            f'{folder}: {len(names)} token(s) were added to its vocabulary: {first_ten(list(map(repr, names)))}: '
            f'take the model from before, or, if no text has them, remove them from {", ".join(files)}'
        )


def listed_tokens(content: Mapping) -> Iterator[tuple[str, int | None]]:
    """Yield (name, id) of the tokens that a file of transformers lists; None for an id that it leaves out."""
    for i, token in content.get('added_tokens_decoder', {}).items():
        yield str(token['content']), int(i)
    for token in content.get('added_tokens', ()):
        yield str(token['content']), token['id']
    names: list = []
    for key, value in content.items():
        if key.endswith('_special_tokens') and isinstance(value, dict):
            names += value.values()
        elif key.endswith('_special_tokens'):
            names += value or ()
        elif key.endswith('_token'):
            names.append(value)
    for name in names:
        if isinstance(name, dict):
            name = name['content']
        if name and isinstance(name, str):
            yield name, None
