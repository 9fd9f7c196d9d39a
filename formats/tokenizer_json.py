"""The vocabulary of a tokenizer.json, with the library tokenizers, which gives transformers its ids. Imports no jax."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from sentencepiece import sentencepiece_model_pb2

import paths
from messages import Refused
from paths import AnyPath
from vocabulary import (
    EOS_ID,
    PAD_ID,
    UNK_ID,
    Vocabulary,
    added_settings,
    before_eos,
    sentinel_ids_of,
)

UNKNOWN = '▁⁇ '  # SentencePiece decodes unknown tokens as ' ⁇ '
# The class that makes its own steps of a file, but for the charsmap, and the models that have it by default.
T5_TOKENIZER = 'T5Tokenizer'
T5_MODELS = ('t5', 'mt5', 'switch_transformers')
T5_PRE_TOKENIZER = {
    'type': 'Sequence',
    'pretokenizers': [
        {'type': 'WhitespaceSplit'},
        {'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'always', 'split': True},
    ],
}
# Names that other tokenizers have at T5's ids of padding and EOS.
NEITHER_PAD_NOR_EOS = ('<s>', '<bos>', '<unk>')
NOT_IN_A_TEXT = '\U0010ffff'  # no character
# Each token of transformers has these; False unless stored.
TOKEN_FLAGS = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized', 'special'), False)


class TokenizerVocabulary(Vocabulary):
    """The vocabulary of the content of a tokenizer.json, which `model` has. It has no sentinels but its own."""

    def __init__(self, content: Mapping):
        self.content = json.dumps(content, ensure_ascii=False)
        self.model = self.content.encode()
        # As for SentencePiece, the names of padding, EOS and unknown in a text are plain characters: they are neither
        # tokens that are cut out nor pieces that Unigram finds.
        model = dict(content['model'])
        if model['type'] == 'Unigram':
            self.unk_id = model['unk_id']
            model['vocab'] = [*model['vocab']]
            for i in (PAD_ID, EOS_ID, self.unk_id):
                piece, score = model['vocab'][i]
                model['vocab'][i] = [piece + NOT_IN_A_TEXT, score]
        else:
            self.unk_id = model['vocab'].get(model.get('unk_token'), -1)
        special = (PAD_ID, EOS_ID, self.unk_id)
        tokens = [token for token in content['added_tokens'] if token['id'] not in special]
        used = {**content, 'model': model, 'added_tokens': tokens}
        used |= {'post_processor': None, 'truncation': None, 'padding': None}
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(used, ensure_ascii=False))
        if tokenizer.decoder is None:
            tokenizer.decoder = tokenizers.decoders.Metaspace()
        self._tokenizer = tokenizer
        vocab = tokenizer.get_vocab()
        self.size = max(vocab.values()) + 1
        self.pieces = [''] * self.size
        for piece, i in vocab.items():
            self.pieces[i] = piece.removesuffix(NOT_IN_A_TEXT)
        self.added_tokens = {}
        for i, token in tokenizer.get_added_tokens_decoder().items():
            self.pieces[i] = token.content  # it may be normalized in `vocab`
            self.added_tokens[token.content] = i
        self.sentinel_ids = sentinel_ids_of(self.pieces)
        self.num_extra_ids = self.num_sentinels
        # By id; the last is of ids without a token.
        self._texts = [*self.pieces, UNKNOWN]
        self._texts[self.unk_id] = UNKNOWN

    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[NDArray]:
        """Return the ids of each text, without EOS. A sentinel is found anywhere, as in transformers."""
        if self.num_threads == 1:  # encode_batch uses all cores
            encodings = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        else:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        tokens = [self._texts[min(i, self.size)] for i in before_eos(ids) if i != PAD_ID]
        return self._tokenizer.decoder.decode(tokens)

    def with_tokens(self, tokens: Iterable[tuple[str, int | None]]) -> 'TokenizerVocabulary':
        """Return a vocabulary that also has tokens at their ids, which are pieces of it or follow them."""
        content = json.loads(self.content)
        for name, i in tokens:
            content['added_tokens'].append(TOKEN_FLAGS | {'id': i, 'content': name})
        content['added_tokens'].sort(key=lambda token: token['id'])
        return TokenizerVocabulary(content)


def read_tokenizer(file: AnyPath) -> TokenizerVocabulary:
    """Return the vocabulary of a tokenizer.json, and of the settings beside it."""
    content = paths.read_json(file)
    beside: dict = {}
    for name in ('config.json', 'tokenizer_config.json'):
        if paths.is_file(file.parent / name):
            beside |= paths.read_json(file.parent / name)
    model_type = beside.get('model_type')
    name = beside.get('tokenizer_class') or (T5_TOKENIZER if model_type in T5_MODELS else '')
    try:
        if name.removesuffix('Fast') == T5_TOKENIZER and model_type != 'umt5':
            content |= t5_steps(content)
            content['model']['byte_fallback'] = False
        vocabulary = TokenizerVocabulary(content)
        for name, i in (('pad_token', PAD_ID), ('eos_token', EOS_ID)):
            piece = vocabulary.pieces[i]
            token = beside.get(name) or piece
            if isinstance(token, dict):
                token = token['content']
            if token != piece or piece in NEITHER_PAD_NOR_EOS:
                raise Refused(f'id {i} is {piece!r}: must be the {name}')
        return vocabulary
    except Refused:
        raise
    except BaseException as error:
        # The library's errors are plain Exceptions, but for a damaged charsmap: Rust's panic is none.
        if not isinstance(error, Exception) and type(error).__name__ != 'PanicException':
            raise
        raise Refused(f'no tokenizer.json of transformers ({error!r})') from error


def t5_steps(content: Mapping) -> dict[str, Any]:
    """Return the steps that T5Tokenizer of transformers 5 makes of those in a file."""
    normalizer = content.get('normalizer') or {}
    charsmaps = []
    for step in normalizer.get('normalizers', [normalizer]):
        if step.get('type') == 'Precompiled':
            charsmaps.append(step)
    return {
        'normalizer': {'type': 'Sequence', 'normalizers': charsmaps},
        'pre_tokenizer': T5_PRE_TOKENIZER,
    }


def of_former_run(model: bytes) -> TokenizerVocabulary:
    """Return the vocabulary that version 0.2 kept as a SentencePiece model with the rest of a tokenizer.json."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    content = added_settings(model)
    del content['tokenizer_class']
    content['model']['vocab'] = [[piece.piece, piece.score] for piece in proto.pieces]
    tokens = content['added_tokens']
    content['added_tokens'] = []
    for i in (PAD_ID, EOS_ID, UNK_ID):
        token = {'id': i, 'content': proto.pieces[i].piece, 'special': True}
        content['added_tokens'].append(TOKEN_FLAGS | token)
    content['added_tokens'] += [TOKEN_FLAGS | token for token in tokens]
    vocabulary = TokenizerVocabulary(content)
    vocabulary.model = model  # its hash is in the run's config.json
    return vocabulary
