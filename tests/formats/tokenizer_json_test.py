"""A tokenizer.json without spiece.model gives transformers' ids.

golden/tokenizer_json: tokenizer.json as transformers 5.24 saves it (T5Tokenizer, no normalizer), and ids.json, made by
`python tests/formats/tokenizer_json_test.py` with tokenizers.
"""

import io
import json
import pathlib
import random

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from formats.tokenizer_json import read_tokenizer
from formats.vocabulary import find_vocabulary, named_vocabulary
from vocabulary import ByteVocabulary, SentencePieceVocabulary

GOLDEN = pathlib.Path(__file__).parent.parent / 'golden/tokenizer_json'

WORDS = 'the The end. log lo ll x=y 1,234.5 <b> > < ... naïve Straße l’été “q”'.split()
WORDS += [
    'ﬁne',
    'Ｆｕｌｌ',
    'cafe\u0301',
    '日本語',
    'ﾃｽﾄ',
    '한국어',
    'हिन्दी',
    'عربي',
    '①',
    '½',
    '™',
    'İ',
]
WORDS += [
    '👍',
    '👩‍👩‍👧',
    '🇩🇪',
    '❤️',
    'a' * 30,
    '\u200b',
    '\ufeff',
    '\u00ad',
    '<extra_id_0>',
    '<extra_id_31>',
]
GAPS = [' ', ' ', ' ', '  ', '   ', '\t', '\n', '\r\n', '\xa0', '\u3000', '\u2003', '\u2028']


def odd_texts(num_texts):
    """Texts with blanks of all kinds, and added tokens with and without blanks around them."""
    rng = random.Random(0)
    texts = ['', ' ', '\t', '\u3000', '<extra_id_0>', ' <extra_id_0> ']
    while len(texts) < num_texts:
        text = rng.choice(['', '', ' ', '\t', '\u3000', '  '])
        for word in rng.choices(WORDS, k=rng.randint(1, 8)):
            is_glued = rng.random() < 0.2
            text += word + ('' if is_glued else rng.choice(GAPS))
        texts.append(text)
    return texts


def our_ids(file, texts):
    vocabulary = SentencePieceVocabulary(read_tokenizer(file))
    return vocabulary.encode(texts, glued_sentinels=True)


def write_golden():
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(GOLDEN / 'tokenizer.json'))
    texts = odd_texts(300)
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    (GOLDEN / 'ids.json').write_text(json.dumps({'texts': texts, 'ids': ids}) + '\n')


def test_ids_are_those_of_transformers():
    golden = json.loads((GOLDEN / 'ids.json').read_text())
    assert our_ids(GOLDEN / 'tokenizer.json', golden['texts']) == golden['ids']


def test_a_folder_opens_with_its_tokenizer(tmp_path):
    (tmp_path / 'tokenizer.json').write_bytes((GOLDEN / 'tokenizer.json').read_bytes())
    for found in (find_vocabulary(tmp_path), named_vocabulary('data.vocabulary', tmp_path, 100)):
        assert (found.size, found.num_sentinels) == (174, 100)
        assert found.sentinel_ids.tolist() == list(range(171, 71, -1))
        assert found.added_tokens['<sep>'] == 173
        [ids] = found.encode(['lo<extra_id_0> ll<sep>'])
        assert found.decode(ids) == 'lo <extra_id_0> ll <sep>'
        again = SentencePieceVocabulary(found.model)  # as a run keeps it
        assert again.encode(odd_texts(50)) == found.encode(odd_texts(50))


def test_a_folder_of_byt5_has_bytes(tmp_path):
    (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    found = find_vocabulary(tmp_path)
    assert isinstance(found, ByteVocabulary)
    assert found.num_extra_ids == 0


def edited(**changes):
    return json.loads((GOLDEN / 'tokenizer.json').read_text()) | changes


@pytest.mark.parametrize(
    'content, named',
    [
        (edited(model={'type': 'BPE', 'vocab': {}, 'merges': []}), 'a BPE, not a Unigram'),
        (edited(model={'type': 'WordPiece', 'vocab': {}}), 'a WordPiece, not'),
        (edited(model={'vocab': []}), 'a model without a type'),
        (edited(normalizer={'type': 'Lowercase'}), 'a tokenizer with the step Lowercase'),
        (edited(pre_tokenizer={'type': 'ByteLevel'}), 'a tokenizer with the step ByteLevel'),
        (edited(model={'type': 'Unigram', 'unk_id': 2}), 'no tokenizer.json of transformers'),
        ({}, 'no tokenizer.json of transformers'),
        ([], '.* is damaged'),
    ],
    ids=str,
)
def test_other_tokenizers_are_refused_by_name(tmp_path, content, named):
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf'tokenizer\.json: {named}'):
        find_vocabulary(tmp_path)


# Other forms, made with tokenizers.


def trained(rule, byte_fallback):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([' '.join(WORDS)] * 20),
        model_writer=model,
        vocab_size=200 + 256 * byte_fallback,
        normalization_rule_name=rule,
        byte_fallback=byte_fallback,
        character_coverage=0.99,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())


@pytest.mark.peers
@pytest.mark.parametrize(
    'rule, byte_fallback', [('nmt_nfkc', False), ('nfkc', True), ('identity', True)]
)
@pytest.mark.parametrize(
    'form', ['T5 of transformers 5', 'T5 of transformers 4', 'any model of transformers 5']
)
def test_other_forms(form, rule, byte_fallback, tmp_path):
    pytest.importorskip('transformers')
    import tokenizers
    from tokenizers import Regex, normalizers, pre_tokenizers

    proto = trained(rule, byte_fallback)
    vocab = [(piece.piece, piece.score) for piece in proto.pieces]
    vocab += [(f'<extra_id_{i}>', 0.0) for i in reversed(range(100))]
    model = tokenizers.models.Unigram(vocab, unk_id=2, byte_fallback=byte_fallback)
    tokenizer = tokenizers.Tokenizer(model)
    charsmap = proto.normalizer_spec.precompiled_charsmap
    steps = [normalizers.Precompiled(charsmap)] if charsmap else []
    splits = [pre_tokenizers.Metaspace(split=form != 'any model of transformers 5')]
    texts = odd_texts(2000)
    if form == 'T5 of transformers 5':
        splits.insert(0, pre_tokenizers.WhitespaceSplit())
    elif form == 'T5 of transformers 4':
        steps += [normalizers.Strip(left=False), normalizers.Replace(Regex(' {2,}'), '▁')]
    else:
        steps += [
            normalizers.Replace(Regex(r'\A +| +\z'), ''),
            normalizers.Replace(Regex(' {2,}'), ' '),
            normalizers.Replace(' ', '▁'),
        ]
    if (
        rule != 'nmt_nfkc' and form != 'T5 of transformers 5'
    ):  # other whitespace stays, also around sentinels
        texts = [' '.join(text.split()) for text in texts]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.add_special_tokens([f'<extra_id_{i}>' for i in range(100)])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    found = our_ids(tmp_path / 'tokenizer.json', texts)
    for text, ours, theirs in zip(texts, found, expected, strict=True):
        # '..' and '.' may be in either order: both have the same score, to rounding.
        assert ours == theirs or (sorted(ours) == sorted(theirs) and '...' in text), text


if __name__ == '__main__':
    write_golden()
