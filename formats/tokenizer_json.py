"""Read a Unigram tokenizer.json, which transformers 5 saves instead of spiece.model, and give transformers' ids.

Its pieces and scores become a SentencePiece model, and the rest of it JSON in that model. What its normalizer and
pre-tokenizer do to a text is done here, step by step, as the library tokenizers does it. Imports no jax.
"""

import base64
import functools
import json
import operator
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

import paths
from messages import Refused
from paths import AnyPath
from vocabulary import EOS_ID, PAD_ID, UNK_ID, SentencePieceVocabulary, added_settings, longest_of

SPACE = '▁'
BYTE = re.compile(r'<0x[0-9A-F]{2}>')
# Unicode's White_Space
WHITESPACE = ' \t\n\v\f\r\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000'
# Patterns of a Replace, as transformers writes them -> the same for Python.
REGEXES = {' {2,}': ' {2,}', r'\A +| +\z': r'\A +| +\Z', r'\A▁': r'\A▁'}
# The class that makes its own steps of a file, but for the charsmap, and the models that have it by default.
T5_TOKENIZER = 'T5Tokenizer'
T5_MODELS = ('t5', 'mt5', 'switch_transformers')
T5_STEPS = {
    'type': 'Sequence',
    'pretokenizers': [
        {'type': 'WhitespaceSplit'},
        {'type': 'Metaspace', 'replacement': SPACE, 'prepend_scheme': 'always', 'split': True},
    ],
}

# Each token of transformers has these; False unless stored.
TOKEN_FLAGS = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized', 'special'), False)
Normalize = Callable[[str], str]


def read_tokenizer(file: AnyPath) -> 'TokenizerVocabulary':
    """Return the vocabulary of a tokenizer.json."""
    content = paths.read_json(file)
    beside: dict = {}
    for name in ('config.json', 'tokenizer_config.json'):
        if paths.is_file(file.parent / name):
            beside |= paths.read_json(file.parent / name)
    try:
        model_type = beside.get('model_type')
        name = beside.get('tokenizer_class') or (T5_TOKENIZER if model_type in T5_MODELS else '')
        model = content['model']
        if name.removesuffix('Fast') == T5_TOKENIZER and model_type != 'umt5':
            charsmaps = [x for x in steps_of(content, 'normalizer') if x['type'] == 'Precompiled']
            content['normalizer'] = charsmaps[0] if charsmaps else None
            content['pre_tokenizer'] = T5_STEPS
            model['byte_fallback'] = False
        content['tokenizer_class'] = name
        return TokenizerVocabulary(make_model(content))
    except Refused:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, re.error) as error:
        raise Refused(f'no tokenizer.json of transformers ({error!r})') from error


def make_model(content: Mapping) -> bytes:
    """Return the ModelProto of the content of a tokenizer.json."""
    model = dict(content['model'])
    vocab = model.pop('vocab')
    found = {name: model.get(name) for name in ('type', 'unk_id')}
    if found != {'type': 'Unigram', 'unk_id': UNK_ID} or len(vocab) <= UNK_ID:
        raise Refused(
            f'{found} with {len(vocab)} pieces: must be Unigram, with unknown at {UNK_ID}'
        )
    names = [piece for piece, _ in vocab]
    added = []
    for token in content.get('added_tokens', ()):
        i = operator.index(token['id'])
        if i == len(names) and token['content'] not in names:
            names.append(token['content'])
        is_there = 0 <= i < len(names) and names[i] == token['content'] != ''
        if not is_there or token.get('single_word'):
            raise Refused(f'the added token {token} has the id of another, or is a single_word')
        if i not in (PAD_ID, EOS_ID, UNK_ID):
            added.append(token)
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    types = proto.SentencePiece
    special = {PAD_ID: types.CONTROL, EOS_ID: types.CONTROL, UNK_ID: types.UNKNOWN}
    splits = any(step.get('split', True) for step in steps_of(content, 'pre_tokenizer'))
    for i, (piece, score) in enumerate(vocab):
        piece_type = special.get(i, types.NORMAL)
        if model.get('byte_fallback') and BYTE.fullmatch(piece):
            piece_type = types.BYTE
        elif splits and SPACE in piece[1:]:  # more than one word
            piece_type = types.UNUSED
        proto.pieces.add(piece=piece, score=score, type=piece_type)
    trainer = proto.trainer_spec
    trainer.pad_id, trainer.eos_id, trainer.unk_id, trainer.bos_id = PAD_ID, EOS_ID, UNK_ID, -1
    trainer.pad_piece, trainer.eos_piece, trainer.unk_piece = names[:3]
    trainer.byte_fallback = bool(model.get('byte_fallback'))
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    kept = {**content, 'model': model, 'added_tokens': added}
    proto.normalizer_spec.normalization_rule_tsv = json.dumps(kept)
    return proto.SerializeToString()


def steps_of(content: Mapping, name: str) -> Iterator[Mapping]:
    """Yield the steps of the normalizer or pre_tokenizer of a tokenizer.json."""
    queue = [content.get(name)]
    while queue:
        step = queue.pop(0)
        if step is None:
            continue
        if step['type'] == 'Sequence':
            queue = [*step.get('normalizers', step.get('pretokenizers')), *queue]
        else:
            yield step


class TokenizerVocabulary(SentencePieceVocabulary):
    """The vocabulary of a tokenizer.json, with transformers' ids. It has no sentinels but its own."""

    before_added = ''

    def __init__(self, model: bytes):
        super().__init__(model, extra_ids=0)
        self.content = added_settings(model)
        self._glued_sentinels = []  # they are cut out already
        self._normalizers = [*map(normalizer, steps_of(self.content, 'normalizer'))]
        self._splits_whitespace = False
        self._prefix = ''  # 'always', 'first'
        self._isolated: re.Pattern | None = None
        for step in steps_of(self.content, 'pre_tokenizer'):
            match step['type']:
                case 'WhitespaceSplit':
                    self._splits_whitespace = True
                case 'Metaspace':  # before version 0.15 of tokenizers with add_prefix_space
                    has_prefix = 'always' if step.get('add_prefix_space', True) else 'never'
                    self._prefix = step.get('prepend_scheme', has_prefix)
                case 'Split' if step['behavior'] == 'Isolated' and not step['invert']:
                    self._isolated = re.compile(f'({step["pattern"]["Regex"]})')
                case kind:
                    raise unknown_step(kind)

        # Tokens are found in the text as it is, or else in the normalized text.
        self._in_normalized: dict[str, int] = {}
        self._in_text: dict[str, int] = {}
        self._strips: dict[int, tuple[bool, bool]] = {}
        for token in self.content['added_tokens']:
            if token.get('normalized'):
                self._in_normalized[self.normalize(token['content'])] = token['id']
            else:
                self._in_text[token['content']] = token['id']
            self._strips[token['id']] = (bool(token.get('lstrip')), bool(token.get('rstrip')))
        self._text_pattern = longest_of(self._in_text)
        self._normalized_pattern = longest_of(self._in_normalized)

    def parts(self, text: str) -> list[str | int]:
        """Return the ids of added tokens, and words as SentencePiece is given them."""
        parts: list[str | int] = []
        is_first = True
        for part in self._cut(text, self._in_text, self._text_pattern):
            if isinstance(part, int):
                parts.append(part)
                is_first = False
                continue
            normalized = self.normalize(part)
            for sub in self._cut(normalized, self._in_normalized, self._normalized_pattern):
                if isinstance(sub, int):
                    parts.append(sub)
                elif sub:
                    parts += self._words(sub, is_first)
                is_first = False
        return parts or ['']

    def normalize(self, text: str) -> str:
        for normalizer in self._normalizers:
            text = normalizer(text)
        return text

    def decode(self, ids: Any) -> str:
        return super().decode(ids).removeprefix(' ')

    def _cut(self, text: str, ids: Mapping[str, int], pattern: re.Pattern) -> list[str | int]:
        """Return the ids of tokens, and the texts before and after each."""
        if not ids:
            return [text]
        parts: list[str | int] = list(pattern.split(text))
        for i in range(1, len(parts), 2):
            parts[i] = ids[parts[i]]  # type: ignore[index]
            strips_left, strips_right = self._strips[parts[i]]  # type: ignore[index]
            if strips_left:
                parts[i - 1] = re.sub(f'[{WHITESPACE}]+$', '', parts[i - 1])  # type: ignore
            if strips_right:
                parts[i + 1] = re.sub(f'^[{WHITESPACE}]+', '', parts[i + 1])  # type: ignore
        return parts

    def _words(self, text: str, is_first: bool) -> list[str]:
        """Return what the pre-tokenizer makes of a text: joined, where no piece has more than a word."""
        words = [text]
        if self._splits_whitespace:
            words = [word for word in re.split(f'[{WHITESPACE}]+', text) if word]
        if self._prefix:
            words = [word.replace(' ', SPACE) for word in words]
            if self._prefix == 'always' or (self._prefix == 'first' and is_first):
                words = [word if word.startswith(SPACE) else SPACE + word for word in words]
        if self._isolated is not None:
            return [part for word in words for part in self._isolated.split(word) if part]
        return [''.join(words)]


# Normalizers.


def unknown_step(kind: str) -> Refused:
    return Refused(f'a tokenizer with the step {kind}: only steps of T5, mT5 and umT5 are known')


def normalizer(step: Mapping) -> Normalize:
    """Return what a step of a normalizer does to a text."""
    match step['type']:
        case 'Precompiled':
            return of_charsmap(base64.b64decode(step['precompiled_charsmap']))
        case 'Strip':
            left = f'^[{WHITESPACE}]+' if step['strip_left'] else ''
            right = f'[{WHITESPACE}]+$' if step['strip_right'] else ''
            pattern = re.compile('|'.join(filter(None, [left, right])))
            return lambda text: pattern.sub('', text)
        case 'Replace' if 'String' in step['pattern']:
            return lambda text: text.replace(step['pattern']['String'], step['content'])
        case 'Replace' if step['pattern']['Regex'] in REGEXES:
            regex = re.compile(REGEXES[step['pattern']['Regex']])
            return lambda text: regex.sub(step['content'], text)
        case kind:
            raise unknown_step(kind)


def of_charsmap(charsmap: bytes) -> Normalize:
    """Return what tokenizers does with a charsmap of SentencePiece, from characters to texts.

    A character with its marks is looked up as a whole if it has less than six bytes, and the shortest entry that it
    begins with counts for all of it; else each character is.
    """
    if not charsmap:
        return lambda text: text
    spec = sentencepiece_model_pb2.NormalizerSpec(precompiled_charsmap=charsmap)  # type: ignore[attr-defined]
    spec.add_dummy_prefix = False
    charsmap_normalizer = sentencepiece.SentencePieceNormalizer(normalizer_spec=spec)

    @functools.cache
    def entries() -> dict[str, str]:
        """Return {characters: text}. Reading T5's takes half a second, so it waits for a text."""
        return dict(charsmap_normalizer.decompile())

    @functools.cache
    def of_characters() -> dict[int, str]:
        return {ord(key): text for key, text in entries().items() if len(key) == 1}

    def of_cluster(match: re.Match) -> str:
        cluster = match[0]
        if len(cluster.encode(errors='replace')) < 6:
            for end in range(1, len(cluster) + 1):
                if cluster[:end] in entries():
                    return entries()[cluster[:end]]
        return cluster

    def normalize(text: str) -> str:
        if not text.isascii() or '\r' in text:
            text = clusters.sub(of_cluster, text)
        return text.translate(of_characters())

    marks = '\u200c\u200d'
    for i in range(0x300, 0x10000):
        if unicodedata.category(chr(i)) in ('Mn', 'Mc', 'Me'):
            marks += chr(i)
    no_base = '\0-\x1f\x7f-\x9f\u200b\u200e\u200f\u2028-\u202e\ufeff'
    clusters = re.compile(f'\r\n|[^{no_base}][{marks}]+')
    return normalize


def written(vocabulary: TokenizerVocabulary) -> bytes:
    """Return the tokenizer.json of a vocabulary."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.model)  # type: ignore[attr-defined]
    content = dict(vocabulary.content)
    content['model'] = content['model'] | {
        'vocab': [[piece.piece, piece.score] for piece in proto.pieces]
    }
    del content['tokenizer_class']
    tokens = [
        {'id': i, 'content': proto.pieces[i].piece, 'special': True}
        for i in (PAD_ID, EOS_ID, UNK_ID)
    ]
    content['added_tokens'] = [TOKEN_FLAGS | token for token in [*tokens, *content['added_tokens']]]
    return json.dumps(content, ensure_ascii=False).encode()
