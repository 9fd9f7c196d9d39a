"""Read a Unigram tokenizer.json, which transformers 5 saves instead of spiece.model, as a SentencePiece model.

The model gives the same ids: pieces and scores are those of the file, what its normalizer and pre-tokenizer do to
whitespace is SentencePiece's. Imports no jax.
"""

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

import paths
from paths import AnyPath
from vocabulary import EOS_ID, OF_TRANSFORMERS, PAD_ID, SENTINEL, UNK_ID

# Replaces several blanks, or those around a text.
BLANKS = (' {2,}', r'\A +| +\z', r'\A▁')
BYTE = re.compile(r'<0x[0-9A-F]{2}>')
# Unicode's White_Space, at which a WhitespaceSplit splits; SentencePiece knows the blank alone.
WHITESPACE = '\t\n\v\f\r\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000'
WHITESPACE += ''.join(map(chr, range(0x2000, 0x200B)))


def read_tokenizer(file: AnyPath) -> bytes:
    """Return the SentencePiece model of a tokenizer.json. Raises ValueError for another tokenizer."""
    content = paths.read_json(file)
    try:
        return make_model(content).SerializeToString()
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f'no tokenizer.json of transformers ({error!r})') from None


def make_model(content: Mapping) -> Any:
    """Return the ModelProto of the content of a tokenizer.json."""
    model = content['model']
    kind = model.get('type')
    if kind != 'Unigram' or model['unk_id'] != UNK_ID:
        raise ValueError(
            f"a {kind or 'model without a type'}, not a Unigram tokenizer as T5's, mT5's and umT5's: open it with another "
            "vocabulary, such as 'bytes', and give ids that its own library makes"
        )
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    types = proto.SentencePiece
    special = {PAD_ID: types.CONTROL, EOS_ID: types.CONTROL, UNK_ID: types.UNKNOWN}
    vocab = list(model['vocab'])
    added = {int(token['id']): token['content'] for token in content.get('added_tokens', ())}
    while len(vocab) in added:
        vocab.append((added[len(vocab)], 0.0))
    for i, (piece, score) in enumerate(vocab):
        piece_type = special.get(i, types.NORMAL)
        if i not in special and (i in added or SENTINEL.fullmatch(piece)):
            # Blanks around it are no tokens: it begins a word.
            piece = '▁' + added.get(i, piece).removeprefix('▁').replace(' ', '▁')
            piece_type = types.USER_DEFINED
        elif model.get('byte_fallback') and BYTE.fullmatch(piece):
            piece_type = types.BYTE
        proto.pieces.add(piece=piece, score=score, type=piece_type)
    trainer = proto.trainer_spec
    trainer.pad_id, trainer.eos_id, trainer.unk_id, trainer.bos_id = PAD_ID, EOS_ID, UNK_ID, -1
    trainer.pad_piece = proto.pieces[PAD_ID].piece
    trainer.eos_piece = proto.pieces[EOS_ID].piece
    trainer.unk_piece = proto.pieces[UNK_ID].piece
    trainer.byte_fallback = bool(model.get('byte_fallback'))
    set_normalizer(proto.normalizer_spec, content)
    return proto


def set_normalizer(spec: Any, content: Mapping) -> None:
    """Make a NormalizerSpec do what the normalizer and the pre-tokenizer do."""
    spec.name = OF_TRANSFORMERS
    spec.add_dummy_prefix = False
    spec.remove_extra_whitespaces = False
    splits_whitespace = False
    steps = steps_of(content.get('normalizer'), 'normalizers')
    for step in [*steps, *steps_of(content.get('pre_tokenizer'), 'pretokenizers')]:
        kind = step['type']
        if kind == 'Precompiled':
            spec.precompiled_charsmap = base64.b64decode(step['precompiled_charsmap'])
        elif kind == 'Metaspace':  # before version 0.15 of tokenizers with add_prefix_space
            scheme = step.get('prepend_scheme', step.get('add_prefix_space', True))
            spec.add_dummy_prefix = scheme not in (False, 'never')
        elif kind == 'WhitespaceSplit':
            splits_whitespace = True
            spec.remove_extra_whitespaces = True
        elif kind == 'Strip' or kind == 'Replace' and step['pattern'].get('Regex') in BLANKS:
            spec.remove_extra_whitespaces = True
        elif kind != 'Replace' or step['pattern'] != {'String': ' '}:
            raise ValueError(
                f'a tokenizer with the step {kind}: only those of T5, mT5 and umT5 are known: name the SentencePiece '
                'model that it was made from with data.vocabulary'
            )
    if splits_whitespace:
        spec.precompiled_charsmap = with_whitespace(spec)


def with_whitespace(spec: Any) -> bytes:
    """Return the charsmap of a NormalizerSpec that makes whitespace blanks, too."""
    sentencepiece.set_min_log_level(2)
    norm_map: dict[str, str] = {}
    if spec.precompiled_charsmap:
        normalizer = sentencepiece.SentencePieceNormalizer(normalizer_spec=spec)
        if normalizer.normalize('a\tb') == normalizer.normalize('a b'):  # nmt_nfkc, T5's own
            return spec.precompiled_charsmap
        norm_map |= normalizer.decompile()
    norm_map |= {character: ' ' for character in WHITESPACE}
    normalizer = sentencepiece.SentencePieceNormalizer(norm_map=list(norm_map.items()))
    made = sentencepiece_model_pb2.NormalizerSpec()  # type: ignore[attr-defined]
    made.ParseFromString(normalizer.serialized_normalizer_spec())
    return made.precompiled_charsmap


def steps_of(step: Mapping | None, parts: str) -> Iterator[Mapping]:
    """Yield a step, or the steps of a sequence."""
    if step is None:
        return
    if step['type'] == 'Sequence':
        for part in step[parts]:
            yield from steps_of(part, parts)
    else:
        yield step
