"""The vocabulary of a tokenizer.json, or of RoBERTa's vocab.json and merges.txt. Imports no jax.

The library tokenizers computes the ids, as for transformers.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

import paths
from messages import Refused
from paths import AnyPath
from vocabulary import PAD_ID, Vocabulary, sentinel_ids_of

UNKNOWN = '▁⁇ '  # SentencePiece decodes unknown tokens as ' ⁇ '
# The class that replaces a file's steps, except the charsmap, and the models that have it by default.
T5_TOKENIZER = 'T5Tokenizer'
T5_MODELS = ('t5', 'mt5', 'switch_transformers')
T5_PRE_TOKENIZER = {
    'type': 'Sequence',
    'pretokenizers': [
        {'type': 'WhitespaceSplit'},
        {'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'always', 'split': True},
    ],
}
# The one with the lowest id is EOS, unless tokenizer_config.json names another.
EOS_NAMES = ('</s>', '<eos>')
BOS = '<bos>'  # Gemma's
NOT_IN_A_TEXT = '\U0010ffff'  # not a character
# CodeT5's class, and its special tokens unless tokenizer_config.json names others.
ROBERTA_TOKENIZER = 'RobertaTokenizer'
ROBERTA_TOKENS = {
    'bos_token': '<s>',
    'eos_token': '</s>',
    'unk_token': '<unk>',
    'sep_token': '</s>',
    'pad_token': '<pad>',
    'cls_token': '<s>',
    'mask_token': '<mask>',
}
ROBERTA_ENDS = 'RobertaProcessing'  # the step that adds <s> and </s> to a text
ROBERTA_VOCAB = 'vocab.json'
ROBERTA_MERGES = 'merges.txt'
RUN_KEYS = ('bos_token', 'eos_token')  # only in the content that a run stores
# Flags of each token in transformers; False unless stored.
TOKEN_FLAGS = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized', 'special'), False)


class TokenizerVocabulary(Vocabulary):
    """The vocabulary of a tokenizer.json, whose content is in `model`. No sentinels are added to its own."""

    def __init__(self, content: Mapping):
        self.model = json.dumps(content, ensure_ascii=False).encode()
        model = dict(content['model'])
        if model['type'] == 'Unigram':
            ids = {piece: i for i, (piece, _) in enumerate(model['vocab'])}
            self.unk_id = model['unk_id']
        else:
            ids = dict(model['vocab'])
            self.unk_id = ids.get(model.get('unk_token') or '<unk>', -1)
        for token in content['added_tokens']:
            ids[token['content']] = token['id']
        names: tuple[str, ...] = EOS_NAMES
        if 'eos_token' in content:
            names = (content['eos_token'],)
        self.eos_id = min((ids[name] for name in names if name in ids), default=-1)
        self._not_text = [PAD_ID, ids.get(BOS, PAD_ID)]
        if 'bos_token' in content:
            self.begin_ids = (ids[content['bos_token']],)
            self._not_text += self.begin_ids
        # As in SentencePiece, the names of padding, EOS and unknown in a text are plain characters: neither the added
        # tokens nor Unigram may match them.
        special = {PAD_ID, self.eos_id, self.unk_id}
        if model['type'] == 'Unigram':
            model['vocab'] = [*model['vocab']]
            for i in special:
                piece, score = model['vocab'][i]
                model['vocab'][i] = [piece + NOT_IN_A_TEXT, score]
        tokens = [token for token in content['added_tokens'] if token['id'] not in special]
        steps = {**without_run_keys(content), 'model': model, 'added_tokens': tokens}
        steps |= {'post_processor': None, 'truncation': None, 'padding': None}
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(steps, ensure_ascii=False))
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
        # By id; the last text is for ids without a token.
        self._texts = [*self.pieces, UNKNOWN]
        self._texts[self.unk_id] = UNKNOWN

    def encode_as_arrays(self, texts: list[str], glued_sentinels: bool = False) -> list[NDArray]:
        """Return the ids of each text, without EOS. A sentinel may be anywhere, as in transformers."""
        if self.num_threads == 1:  # encode_batch uses all cores
            encodings = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        else:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        ids = [min(i, self.size) for i in self.before_eos(ids) if i not in self._not_text]
        tokens = [self._texts[i] for i in ids]
        return self._tokenizer.decoder.decode(tokens)

    def with_tokens(self, tokens: Iterable[tuple[str, int | None]]) -> 'TokenizerVocabulary':
        """Return a vocabulary with additional tokens. Each has its own id, of a piece or after all pieces."""
        content = json.loads(self.model)
        for name, i in tokens:
            content['added_tokens'].append(TOKEN_FLAGS | {'id': i, 'content': name})
        content['added_tokens'].sort(key=lambda token: token['id'])
        return TokenizerVocabulary(content)


def read_tokenizer(file: AnyPath) -> TokenizerVocabulary:
    """Return the vocabulary of a tokenizer.json or vocab.json, with the settings in its folder."""
    content = paths.read_json(file)
    settings: dict = {}
    for name in ('config.json', 'tokenizer_config.json'):
        if paths.is_file(file.parent / name):
            settings |= paths.read_json(file.parent / name)
    model_type = settings.get('model_type')
    name = settings.get('tokenizer_class') or (T5_TOKENIZER if model_type in T5_MODELS else '')
    try:
        if file.name == ROBERTA_VOCAB:
            content = roberta_content(file.parent, content, settings)
        if name.removesuffix('Fast') == T5_TOKENIZER and model_type != 'umt5':
            content |= t5_steps(content)
            content['model']['byte_fallback'] = False
        ends = content.get('post_processor') or {}
        # The file of a run has RUN_KEYS instead of settings in its folder.
        if ends.get('type') == ROBERTA_ENDS and 'tokenizer_class' in settings:
            content['bos_token'], _ = ends['cls']
        vocabulary = TokenizerVocabulary(content)
        eos = settings.get('eos_token')
        if isinstance(eos, dict):
            eos = eos['content']
        if eos and eos != vocabulary.pieces[vocabulary.eos_id]:
            vocabulary = TokenizerVocabulary(content | {'eos_token': eos})
        special = [token['id'] for token in content['added_tokens'] if token['special']]
        if PAD_ID not in special or vocabulary.eos_id <= PAD_ID:
            name = vocabulary.pieces[PAD_ID]
            raise Refused(
                f'id 0 is {name!r}, eos_token {eos}: must be a special token, for padding, and a later one'
            )
        return vocabulary
    except Refused:
        raise
    except Exception as error:  # the library has no class of its own for errors
        raise Refused(f'not a {file.name} of transformers ({error!r})') from error


def without_run_keys(content: Mapping) -> dict[str, Any]:
    """Return the content as a tokenizer.json."""
    return {name: value for name, value in content.items() if name not in RUN_KEYS}


def roberta_content(folder: AnyPath, vocab: Mapping, config: Mapping) -> dict[str, Any]:
    """Return the tokenizer.json that transformers 5 makes from a folder with vocab.json and merges.txt."""
    name = str(config.get('tokenizer_class'))
    if name.removesuffix('Fast') != ROBERTA_TOKENIZER or not paths.is_file(folder / ROBERTA_MERGES):
        raise Refused(
            f'tokenizer_class={name}: must be {ROBERTA_TOKENIZER}, with {ROBERTA_MERGES}; others need a tokenizer.json'
        )
    merges = []
    for line in (folder / ROBERTA_MERGES).read_bytes().decode().split('\n'):
        if line and not line.startswith('#version'):
            merges.append(line)
    settings = dict(config)
    if paths.is_file(folder / 'special_tokens_map.json'):
        settings |= paths.read_json(folder / 'special_tokens_map.json')
    tokens: dict[str, Mapping] = {}  # {content: flags}; the last list with a token decides
    names = {}
    for key, usual in ROBERTA_TOKENS.items():
        names[key], flags = content_and_flags(settings.get(key) or usual)
        tokens[names[key]] = {**flags, 'special': True}
    for special_token in settings.get('additional_special_tokens') or ():
        name, flags = content_and_flags(special_token)
        tokens[name] = {**flags, 'special': True}
    ids = dict(vocab)
    if paths.is_file(folder / 'added_tokens.json'):
        for name, i in paths.read_json(folder / 'added_tokens.json').items():
            tokens[name] = {'special': name in names.values()}
            ids[name] = i
    for i, flags in settings.get('added_tokens_decoder', {}).items():
        tokens[flags['content']] = flags
        ids[flags['content']] = int(i)
    added_tokens = []
    for name, flags in tokens.items():
        token: dict[str, Any] = {'id': ids.setdefault(name, len(ids)), 'content': name}
        for flag, default in TOKEN_FLAGS.items():
            token[flag] = flags.get(flag, default)
        added_tokens.append(token)
    step = {'add_prefix_space': settings.get('add_prefix_space', False), 'trim_offsets': True}
    ends = {
        'sep': (names['sep_token'], ids[names['sep_token']]),
        'cls': (names['cls_token'], ids[names['cls_token']]),
    }
    return {
        'version': '1.0',
        'added_tokens': sorted(added_tokens, key=lambda token: token['id']),
        'normalizer': None,
        'pre_tokenizer': {'type': 'ByteLevel', 'use_regex': True, **step},
        'post_processor': {'type': ROBERTA_ENDS, **ends, **step},
        'decoder': {'type': 'ByteLevel', 'use_regex': True, **step},
        'model': {'type': 'BPE', 'vocab': dict(vocab), 'merges': merges},
    }


def content_and_flags(token: str | Mapping) -> tuple[str, Mapping]:
    """Return the content and the flags of a token in tokenizer_config.json."""
    if isinstance(token, str):
        return token, {}
    return token['content'], token


def t5_steps(content: Mapping) -> dict[str, Any]:
    """Return the steps by which T5Tokenizer of transformers 5 replaces a file's."""
    normalizer = content.get('normalizer') or {}
    charsmaps = []
    for step in normalizer.get('normalizers', [normalizer]):
        if step.get('type') == 'Precompiled':
            charsmaps.append(step)
    return {
        'normalizer': {'type': 'Sequence', 'normalizers': charsmaps},
        'pre_tokenizer': T5_PRE_TOKENIZER,
    }
