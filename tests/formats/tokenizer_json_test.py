"""A tokenizer.json without spiece.model gives transformers' ids.

golden/tokenizer_json, made by `python tests/formats/tokenizer_json_test.py` with tokenizers: `t5` as transformers 5.24
saves T5Tokenizer, without a normalizer; `backend` as it saves umT5's, with a small charsmap; `metaspace` with a Metaspace
alone; `bpe` of Gemma's kind, with unknown at 3. Each has 250 texts and their ids. `former` has the vocabulary.model that
version 0.2 kept of `t5`.
"""

import io
import json
import pathlib
import pickle
import random
import shutil
from functools import partial

import pytest
import sentencepiece
from corpora import make_config, oracle
from sentencepiece import sentencepiece_model_pb2
from small_models import assert_refused

from formats.tokenizer_json import TOKEN_FLAGS, read_tokenizer
from formats.vocabulary import (
    add_tokens,
    files_of,
    find_vocabulary,
    kept_files,
    named_vocabulary,
    of_model,
)
from run.train_vocabulary import find_or_train_vocabulary
from vocabulary import ByteVocabulary

GOLDEN = pathlib.Path(__file__).parent.parent / 'golden/tokenizer_json'
FORMS = ('t5', 'backend', 'metaspace', 'bpe')

# No text has '...': '..' and '.' then have the same score in either order, to rounding.
# Ligatures, full and half width, combined and composed marks, emoji, controls, and tokens that are added.
WORDS = """the The end. log lo ll x=y 1,234.5 <b> > < naïve Straße l’été “q” 日本語 한국어 हिन्दी عربي пример ① ½ ™ İ ẞ ﷺ ㈱ ²
    ﬁne Ｆｕｌｌ Full ﾃｽﾄ ｶﾞ か\u3099 ハ\u309a cafe\u0301 e\u0302\u0301 ｅ\u0301 Å A\u030a \u1112\u1161\u11ab 👍 👩‍👩‍👧 🇩🇪 ❤️ 1️⃣
    <extra_id_0> <extra_id_31> a<extra_id_2>b <extra_id_3>. <sep> a<sep>b""".split(' ')
WORDS = [word for word in ' '.join(WORDS).replace('\n', ' ').split(' ') if word]
WORDS += ['a' * 30, '\x07', '\x85', '\u200b', '\u200d', '\ufeff', '\u00ad', '▁x', 'new word']
GAPS = [*[' '] * 4, '', '  ', '   ', '\t', '\n', '\r\n', '\v', '\xa0', '\u3000', '\u2003', '\u2028']


def odd_texts(num_texts):
    rng = random.Random(0)
    texts = ['', ' ', '\t', '\u3000', '\x07', '<extra_id_0>', ' <extra_id_0> ', '<sep>', ' <sep> ']
    while len(texts) < num_texts:
        text = rng.choice(['', '', ' ', '\t', '\u3000', '  '])
        for word in rng.choices(WORDS, k=rng.randint(1, 8)):
            text += word + rng.choice(GAPS)
        texts.append(text if rng.random() < 0.7 else text.strip())
    return texts


def write_golden():
    import tokenizers
    from tokenizers import Regex, normalizers, pre_tokenizers

    entries = {
        'ﬁ': 'fi',
        '\t': ' ',
        '\xa0': ' ',
        '\u3000': ' ',
        '\x07': '',
        'Ｆ': 'F',
        'ｕ': 'u',
        'ｌ': 'l',
    }
    entries |= {
        'e\u0301': 'é',
        'e\u0302': 'ê',
        'e\u0302\u0301': 'ế',
        'か\u3099': 'が',
        'ｅ': 'e',
        '½': '1⁄2',
    }
    small = sentencepiece.SentencePieceNormalizer(norm_map=list(entries.items()))
    spec = sentencepiece_model_pb2.NormalizerSpec.FromString(small.serialized_normalizer_spec())
    charsmap = normalizers.Precompiled(spec.precompiled_charsmap)
    proto = trained('identity', byte_fallback=False)
    for form in ('t5', 'backend', 'metaspace'):
        vocab = [(piece.piece, piece.score) for piece in proto.pieces]
        if form != 'backend':
            vocab += [(f'<extra_id_{i}>', 0.0) for i in reversed(range(100))]
        tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=2))
        split = pre_tokenizers.Metaspace(split=form != 'backend')
        if form == 't5':
            split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
        if form == 'backend':
            steps = [charsmap, normalizers.Replace(Regex(r'\A +| +\z'), '')]
            steps += [normalizers.Replace(Regex(' {2,}'), ' '), normalizers.Replace(' ', '▁')]
            steps += [normalizers.Replace(Regex(r'\A▁'), '▁▁')]
            tokenizer.normalizer = normalizers.Sequence(steps)
        if form == 'metaspace':
            tokenizer.normalizer = charsmap
        tokenizer.pre_tokenizer = split
        tokenizer.add_special_tokens(['<pad>', '</s>', '<unk>'])
        tokenizer.add_special_tokens([f'<extra_id_{i}>' for i in range(100)])
        tokenizer.add_tokens(['<sep>', 'new word', 'Ｆｕｌｌ'])  # found in normalized texts
        write_form(form, tokenizer)
    write_form('bpe', trained_bpe())


def write_form(form, tokenizer):
    (GOLDEN / form).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(GOLDEN / form / 'tokenizer.json'), pretty=False)
    texts = odd_texts(250)
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    content = {'texts': texts, 'ids': ids}
    (GOLDEN / form / 'ids.json').write_text(json.dumps(content) + '\n')


@pytest.mark.parametrize('form', FORMS)
def test_ids_are_those_of_transformers(form):
    golden = json.loads((GOLDEN / form / 'ids.json').read_text())
    found = read_tokenizer(GOLDEN / form / 'tokenizer.json')
    assert found.encode(golden['texts']) == golden['ids']
    assert found.num_sentinels == 100
    kept = of_model(found.model, extra_ids=100)  # as a run keeps it
    assert (kept.model, kept.hash) == (found.model, found.hash)
    worker = pickle.loads(pickle.dumps(kept))
    worker.num_threads = 1
    assert worker.encode(golden['texts']) == golden['ids']


def test_ids_of_gemma():
    folder = oracle('../golden/t5gemma_tokenizer')
    found = find_vocabulary(folder / 'as_saved')
    assert (found.size, found.unk_id) == (700, 3)
    for row in json.loads((folder / 'texts.json').read_text())['texts']:
        [ids] = found.encode([row['text']])
        assert ids == row['transformers_without_special']
        if '<bos>' not in row['text']:  # transformers leaves special tokens out
            assert found.decode([*ids, 1, 5]) == row['decoded_by_transformers']


def test_texts_of_ids():
    """Unknown tokens as SentencePiece writes them, and no padding; added tokens as they were added."""
    found = read_tokenizer(GOLDEN / 't5/tokenizer.json')
    full, word = found.added_tokens['Ｆｕｌｌ'], found.added_tokens['new word']
    [the] = found.encode(['the'])
    assert found.decode([0, *the, 2, full, 0, word, 10**6, 1, *the]) == 'the ⁇ Ｆｕｌｌnew word ⁇ '


def test_a_run_keeps_its_tokenizer(tmp_path):
    """It resumes with the file, with and without data.vocabulary, also one of version 0.2 with its own."""
    config = make_config(vocabulary=str(GOLDEN / 't5'))
    find = partial(find_or_train_vocabulary, workdir=tmp_path, texts=[], max_size=256)
    found = find(config)
    [(name, content)] = kept_files(found).items()
    assert name == 'tokenizer.json'
    (tmp_path / name).write_bytes(content)
    former = (GOLDEN / 'former/vocabulary.model').read_bytes()
    for config.vocabulary in (str(GOLDEN / 't5'), ''):
        assert find(config).hash == found.hash
    config.vocabulary = str(GOLDEN / 'metaspace')
    assert_refused(partial(find, config), 'tokenizer.json')
    (tmp_path / name).unlink()
    (tmp_path / 'vocabulary.model').write_bytes(former)
    golden = json.loads((GOLDEN / 't5/ids.json').read_text())
    for config.vocabulary in (str(GOLDEN / 't5'), ''):
        again = find(config)
        assert again.encode(golden['texts']) == golden['ids']
        assert again.names == found.names
        assert again.hash == '6c3b556f9d129ed43985536f4022dae5'
        assert kept_files(again) == {'vocabulary.model': former}
    more = add_tokens(again, ['<more>'])
    assert more.encode(['<more>']) == [[found.size]] and [*kept_files(more)] == ['tokenizer.json']
    config.vocabulary = str(GOLDEN / 'bpe')
    assert_refused(partial(find, config), 'vocabulary.model')


def test_a_folder_opens_with_its_tokenizer(tmp_path):
    for found in (
        find_vocabulary(GOLDEN / 't5'),
        named_vocabulary('data.vocabulary', GOLDEN / 't5', 100),
    ):
        assert found.num_sentinels == 100 and found.sentinel_ids[0] == found.size - 4
        assert found.added_tokens['<sep>'] == found.size - 3
        text = 'lo<extra_id_0> ll<sep>'
        [ids] = found.encode([text])
        assert ids == [
            *found.encode(['lo'])[0],
            found.size - 4,
            *found.encode(['ll'])[0],
            found.size - 3,
        ]
        assert found.decode(ids) == text
    for name, content in files_of(found).items():  # as convert writes it
        (tmp_path / name).write_bytes(content)
    again = find_vocabulary(tmp_path)
    assert again.pieces == found.pieces
    assert again.encode(odd_texts(50)) == found.encode(odd_texts(50))


def test_the_steps_are_those_of_the_class(tmp_path):
    """T5Tokenizer of transformers 5 makes its own steps, whatever version 4 saved."""
    shutil.copy(GOLDEN / 'metaspace/tokenizer.json', tmp_path)
    texts = [' the  end. ', 'the\v<sep> end.']
    plain = find_vocabulary(tmp_path).encode(texts)
    (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "T5TokenizerFast"}')
    found = find_vocabulary(tmp_path)
    assert b'"T5Tokenizer"' in files_of(found)['tokenizer_config.json']
    assert (
        found.encode(texts) == read_tokenizer(GOLDEN / 't5/tokenizer.json').encode(texts) != plain
    )
    (tmp_path / 'config.json').write_text('{"model_type": "umt5"}')
    assert find_vocabulary(tmp_path).encode(texts) == plain


@pytest.mark.parametrize('form', FORMS)
def test_special_tokens_in_a_text_are_characters(form):
    found = find_vocabulary(GOLDEN / form)
    for i in (0, 1, found.unk_id):
        [ids] = found.encode([f'b{found.pieces[i]}b'])
        assert len(ids) > 5 and not {0, 1} & {*ids}
        assert ids.count(found.unk_id) < 2  # the slash


def test_texts_are_not_cut_off(tmp_path):
    content = json.loads((GOLDEN / 't5/tokenizer.json').read_text())
    cut = {'direction': 'Right', 'max_length': 2, 'strategy': 'LongestFirst', 'stride': 0}
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content | {'truncation': cut}))
    texts = ['the end. the end.']
    assert find_vocabulary(tmp_path).encode(texts) == find_vocabulary(GOLDEN / 't5').encode(texts)


def test_a_folder_of_byt5_has_bytes(tmp_path):
    (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    found = find_vocabulary(tmp_path)
    assert isinstance(found, ByteVocabulary)
    assert found.num_extra_ids == 0


def token(content, i):
    return {'added_tokens': [TOKEN_FLAGS | {'content': content, 'id': i}]}


def bpe(*names):
    return {'type': 'BPE', 'vocab': {name: i for i, name in enumerate(names)}, 'merges': []}


OTHERS = [
    {'model': bpe('<pad>', '<s>', '</s>', '<unk>'), 'added_tokens': []},  # CodeT5's
    {'model': bpe()},
    {'model': {'type': 'Unigram', 'unk_id': 2}},
    {'model': None},
    {'pre_tokenizer': {'type': 'None'}},
    {'normalizer': {'type': 'Precompiled', 'precompiled_charsmap': 'YWJj'}},
    token('<sep>', 10**6),
    token('<sep>', 30),
    token('<extra_id_1>', None),
    {'added_tokens': [7]},
    [],
]


def test_other_tokenizers_are_refused(tmp_path):
    content = json.loads((GOLDEN / 't5/tokenizer.json').read_text())
    for changes in OTHERS:
        (tmp_path / 'tokenizer.json').write_text(json.dumps(content | changes if changes else []))
        assert_refused(lambda: find_vocabulary(tmp_path), 'tokenizer.json')
    (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
    for names in ({'eos_token': '<unk>'}, {'pad_token': {'content': 'the'}}):
        (tmp_path / 'tokenizer_config.json').write_text(json.dumps(names))
        assert_refused(lambda: find_vocabulary(tmp_path), f'{tmp_path}/tokenizer.json')


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


def trained_bpe():
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE(unk_token='<unk>', fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(' ', '▁')
    tokenizer.pre_tokenizer = pre_tokenizers.Split(' ', 'merged_with_previous')
    steps = [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ['<pad>', '<eos>', '<bos>', '<unk>', *[f'<0x{byte:02X}>' for byte in range(256)]]
    trainer = BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([' '.join(WORDS[:60])] * 20, trainer)
    content = json.loads(tokenizer.to_str())
    content['added_tokens'] = content['added_tokens'][:4]  # bytes are found by falling back alone
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens([f'<extra_id_{i}>' for i in range(100)])
    tokenizer.add_tokens([AddedToken('<sep>', lstrip=True), '\n'])
    return tokenizer


@pytest.mark.peers
@pytest.mark.parametrize(
    'rule, byte_fallback', [('nmt_nfkc', False), ('nfkc', True), ('identity', False)]
)
def test_folders_that_transformers_saves(rule, byte_fallback, tmp_path):
    """T5's and mT5's class, and umT5's, with and without tokens that are added; also written again by us."""
    transformers = pytest.importorskip('transformers', minversion='5')
    proto = trained(rule, byte_fallback)
    extra_ids = 100
    if rule == 'identity':  # as in mT5's and umT5's, sentinels are pieces
        extra_ids = 0
        for i in reversed(range(100)):
            proto.pieces.add(piece=f'▁<extra_id_{i}>', type=proto.SentencePiece.USER_DEFINED)
    (tmp_path / 'spiece.model').write_bytes(proto.SerializeToString())
    texts = odd_texts(2000)
    file = str(tmp_path / 'spiece.model')
    opened = {
        't5': transformers.T5Tokenizer.from_pretrained(tmp_path, extra_ids=extra_ids),
        'umt5': transformers.TokenizersBackend.from_pretrained(tmp_path, vocab_file=file),
    }
    for name, tokenizer in opened.items():
        for added in ([], ['<sep>', 'new word', 'Ｆｕｌｌ']):
            tokenizer.add_tokens(added)
            folder = tmp_path / f'{name}_{len(added)}'
            tokenizer.save_pretrained(folder)
            (folder / 'config.json').write_text(json.dumps({'model_type': name}))
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            expected = theirs(texts, add_special_tokens=False).input_ids
            found = find_vocabulary(folder)
            assert found.encode(texts) == expected
            written = tmp_path / f'{name}_{len(added)}_written'
            written.mkdir()
            for file_name, content in files_of(found).items():
                (written / file_name).write_bytes(content)
            again = transformers.AutoTokenizer.from_pretrained(written)
            assert again(texts, add_special_tokens=False).input_ids == expected


@pytest.mark.peers
def test_bpe_of_transformers():
    transformers = pytest.importorskip('transformers')
    file = GOLDEN / 'bpe/tokenizer.json'
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    texts = odd_texts(2000)
    expected = theirs(texts, add_special_tokens=False).input_ids
    assert read_tokenizer(file).encode(texts) == expected


if __name__ == '__main__':
    write_golden()
