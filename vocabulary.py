"""Vocabularies: SentencePiece and bytes, ids and sentinels. Imports no jax.

Source: SeqIO seqio/vocabularies.py.
"""

import abc
import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import sentencepiece
from numpy.typing import NDArray
from sentencepiece import sentencepiece_model_pb2

from configs import check as settings
from messages import Refused
from randomness import digest

PAD_ID = 0  # in all vocabularies; the decoder starts from it
EOS_ID = 1  # T5's
UNK_ID = 2
SPECIAL_TOKENS = ('<pad>', '</s>', '<unk>')  # as transformers calls them
DEFAULT_EXTRA_IDS = 100  # T5's
SENTINEL = re.compile(r'▁?<extra_id_(0|[1-9][0-9]{0,8})>')
GLUED = re.compile(r'(?<=\S)<extra_id_(0|[1-9][0-9]{0,8})>')


class Ends(NamedTuple):
    """The special ids of a model. `getattr` reads `inputs` and `targets`."""

    answers: tuple[int, ...]  # each ends an answer; the first is EOS
    inputs: tuple[tuple[int, ...], tuple[int, ...]]  # before and after a text
    start: int = PAD_ID  # the decoder reads it where batches begin with 0
    begin: tuple[int, ...] = ()  # before targets

    @property
    def targets(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.begin, self.answers[:1]


class Vocabulary(abc.ABC):
    """`size` ids; some are sentinels, which mark spans of noise."""

    size: int
    pieces: list[str]  # by id
    num_extra_ids: int
    added_tokens: dict[str, int]  # from transformers and data.added_tokens; bytes have none
    eos_id = EOS_ID
    begin_ids: tuple[int, ...] = ()  # before inputs and targets: RoBERTa's <s>
    unk_id = UNK_ID  # -1 for none
    sentinel_ids: NDArray  # int32: the id of <extra_id_N> at N
    model = b''  # its file as a run keeps it: SentencePiece's, or a tokenizer.json
    num_threads = -1  # for encoding; -1: all cores

    @functools.cached_property
    def ends(self) -> Ends:  # a family may replace them
        return self.own_ends

    @property
    def own_ends(self) -> Ends:
        eos = (self.eos_id,)
        return Ends(answers=eos, inputs=(self.begin_ids, eos), begin=self.begin_ids)

    @property
    def num_sentinels(self) -> int:
        return len(self.sentinel_ids)

    @property
    def hash(self) -> str:
        return digest([self.model, self.num_extra_ids])

    def encode(self, texts: list[str], glued_sentinels: bool = False) -> list[list[int]]:
        """Return the ids of each text, without EOS."""
        return [ids.tolist() for ids in self.encode_as_arrays(texts, glued_sentinels)]

    @abc.abstractmethod
    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[NDArray]:
        """Return the ids of each text without EOS, int32; arrays may be read-only."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text before the first EOS; an id without a token is left out or unknown."""

    def before_eos(self, ids: Iterable[int]) -> Iterator[int]:
        return itertools.takewhile(lambda i: i != self.eos_id, map(int, ids))


class ByteVocabulary(Vocabulary):
    """Byte b of the UTF-8 text is id b + 3 (ByT5). Without extra ids, the sentinels are the top, non-ASCII bytes."""

    def __init__(self, extra_ids: int = 0):
        self.num_extra_ids = extra_ids
        self.size = 3 + 256 + extra_ids
        self.pieces = [*SPECIAL_TOKENS, *[f'<0x{byte:02X}>' for byte in range(256)]]
        self.pieces += [''] * extra_ids
        self.sentinel_ids = self.size - 1 - np.arange(extra_ids or 128, dtype=np.int32)

    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[NDArray]:
        """Encode bytes; as in SeqIO, no text is a sentinel."""
        return [np.frombuffer(text.encode(), np.uint8) + np.int32(3) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        text_bytes = bytes(i - 3 for i in self.before_eos(ids) if 3 <= i < 259)
        return text_bytes.decode(errors='ignore')


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model, and after its pieces `extra_ids` sentinels in reverse order, as in SeqIO.

    A model with pieces `<extra_id_N>` or `▁<extra_id_N>`, such as mT5's, has its own sentinels and gets no others.

    `added_tokens`, {token: id}, are never split: a text is cut at them and its parts are encoded alone, as in
    transformers. The model's `added_settings` list them: pieces, or tokens that follow all pieces.
    """

    def __init__(self, model: bytes, extra_ids: int = DEFAULT_EXTRA_IDS):
        settings.check_value('data.extra_ids', extra_ids)
        try:
            # From empty bytes, SentencePiece makes a processor that fails later.
            processor = sentencepiece.SentencePieceProcessor(model_proto=model or b'empty')
        except RuntimeError as error:
            raise Refused(f'not a SentencePiece model ({error})') from None
        self.model = model
        self.eos_id = processor.eos_id()
        self.unk_id = processor.unk_id()
        pads = processor.is_control(PAD_ID) or processor.is_unknown(PAD_ID)
        if not pads or self.eos_id <= PAD_ID:
            raise Refused(
                f'eos is {self.eos_id}, and id 0 must pad: use spm_train --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=-1'
            )
        pieces = processor.id_to_piece(list(range(processor.vocab_size())))
        proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
        if len(sentinel_ids_of(pieces)) == 0:
            for i in reversed(range(extra_ids)):
                pieces.append(f'▁<extra_id_{i}>')
                # SentencePiece never cuts a text across a piece of this type.
                proto.pieces.add(piece=pieces[-1], type=proto.SentencePiece.USER_DEFINED)
        self.added_tokens = {}
        content = added_settings(proto)
        if 'model' in content:
            raise Refused('version 0.2 made it from a tokenizer.json: replace it with that file')
        for token in content.get('added_tokens', []):
            self.added_tokens[token['content']] = token['id']
            if token['id'] == len(pieces):
                name = f'▁{token["content"]}'
                name = token['content'] if name in pieces else name
                # SentencePiece itself never finds a piece of this type.
                proto.pieces.add(piece=name, type=proto.SentencePiece.UNUSED)
                pieces.append(token['content'])
        self._added = longest_of(self.added_tokens)
        if len(pieces) > processor.vocab_size():
            processor.load_from_serialized_proto(proto.SerializeToString())
        self.sentinel_ids = sentinel_ids_of(pieces)
        self.num_extra_ids = self.num_sentinels
        self.pieces = pieces
        self.size = len(pieces)
        self._processor = processor

    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[NDArray]:
        """Return the ids of each text, without EOS.

        As in SeqIO, `<extra_id_0>` is a sentinel at the beginning of a word. With `glued_sentinels`, as in
        transformers, also within and after a word, and a new word begins after it.
        """
        rows = [[text] for text in texts]
        if self.added_tokens:
            rows = [self._added.split(text) for text in texts]  # texts, and tokens between them
        parts = [part for row in rows for part in row[::2]]
        if glued_sentinels:
            parts = [GLUED.sub(self.separate, part) for part in parts]
        encoded = self._processor.encode(parts, return_type='numpy', num_threads=self.num_threads)
        if len(parts) == len(rows):
            return encoded
        ids_of_parts = iter(encoded)
        arrays = []
        for row in rows:
            ids = [next(ids_of_parts)]
            for token in row[1::2]:
                ids += [[self.added_tokens[token]], next(ids_of_parts)]
            arrays.append(np.concatenate(ids).astype(np.int32))
        return arrays

    def separate(self, sentinel: re.Match) -> str:
        """Return <extra_id_N> with blanks: SentencePiece finds `▁<extra_id_N>` only at the beginning of a word."""
        number = int(sentinel[1])
        names = [self.pieces[i] for i in self.sentinel_ids[number : number + 1]]
        if not any(map(SENTINEL.fullmatch, names)):
            return sentinel[0]
        return names[0].replace('▁', ' ') + ' '

    def decode(self, ids: Iterable[int]) -> str:
        ids = self.before_eos(ids)
        return self._processor.decode([i if i < self.size else self.unk_id for i in ids])


def added_settings(proto) -> dict:
    """Return our settings in a ModelProto, {'added_tokens': [{'id', 'content'}]}: JSON in a field unused otherwise."""
    text = proto.normalizer_spec.normalization_rule_tsv
    # A text that is not UTF-8 comes as bytes.
    return json.loads(text) if isinstance(text, str) and text.startswith('{') else {}


def longest_of(tokens: Iterable[str]) -> re.Pattern:
    """Return a pattern, in a group, that finds the longest token at a position."""

    def tree(ends: Collection[str]) -> str:
        by_first: dict[str, set[str]] = {}
        for end in ends:
            if end:
                by_first.setdefault(end[0], set()).add(end[1:])
        branches = [re.escape(first) + tree(tails) for first, tails in by_first.items()]
        optional = '?' if '' in ends else ''
        return f'(?:{"|".join(branches)}){optional}' if branches else ''

    return re.compile(f'({tree(set(tokens))})')


def sentinel_ids_of(pieces: Sequence[str]) -> NDArray:
    """Return the ids of the pieces <extra_id_N>, in the order of N."""
    matches = map(SENTINEL.fullmatch, pieces)
    numbered = sorted((int(match[1]), i) for i, match in enumerate(matches) if match)
    for expected, (number, _) in enumerate(numbered):
        if number != expected:
            raise Refused(
                f'<extra_id_{number}> without <extra_id_{expected}>: number them from 0, each once'
            )
    return np.array([i for _, i in numbered], np.int32)
