"""A tokenizer.json gives transformers' ids: those of the library tokenizers, as T5Tokenizer of transformers 5 uses it.

golden/codet5_tokenizer: a byte-level BPE in CodeT5's files, and what transformers 5.24 makes of texts, written by
PYTHONPATH=tests:tests/formats:. python -c 'import tokenizer_json_test; tokenizer_json_test.write_codet5_golden()'.
"""

import io
import json
import pathlib
import pickle
import random
import shutil
from functools import partial

import numpy as np
import pytest
import sentencepiece
from corpora import HUNT, make_config, oracle
from sentencepiece import sentencepiece_model_pb2
from small_models import assert_refused
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers_folders import edit_json

from data import TextToText
from formats.tokenizer_json import ROBERTA_TOKENS, TOKEN_FLAGS
from formats.vocabulary import (
    add_tokens,
    files_of,
    find_vocabulary,
    kept_files,
    named_vocabulary,
    of_model,
)
from run.train_vocabulary import find_or_train_vocabulary
from vocabulary import ByteVocabulary, SentencePieceVocabulary

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


# Tokenizers of several kinds, made with the library.


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


def t5():
    """As version 4 of transformers saves T5TokenizerFast."""
    proto = trained('nmt_nfkc', byte_fallback=False)
    vocab = [(piece.piece, piece.score) for piece in proto.pieces]
    vocab += [(f'<extra_id_{i}>', 0.0) for i in reversed(range(100))]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=2))
    charsmap = proto.normalizer_spec.precompiled_charsmap
    tokenizer.normalizer = normalizers.Precompiled(charsmap)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(['<pad>', '</s>', '<unk>'])
    return tokenizer


def codet5():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=['<pad>', '<s>', '</s>', '<unk>', '<mask>'],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([' '.join(WORDS[:60])] * 20, trainer)
    return tokenizer


# A tokenizer, and its ids of EOS and unknown.
FORMS = {'t5': (t5, 1, 2), 'codet5': (codet5, 2, 3)}


CODET5 = pathlib.Path(__file__).parents[1] / 'golden/codet5_tokenizer'
CODE = [
    'def f(self, x):\n    return x+1',
    'a <extra_id_0> b<extra_id_1>c',
    '  <mask>  y<mask> ',
    '',
]
CODE += ['naïve “ß”\t日本語 👍', "it's 12,345 ▁x"]


def write_codet5(folder):
    """Write the files that Salesforce/codet5-base has."""
    codet5().model.save(str(folder))
    size = len(json.loads((folder / 'vocab.json').read_text()))
    ids = {f'<extra_id_{7 - i}>': size + i for i in range(8)}
    (folder / 'added_tokens.json').write_text(json.dumps(ids))
    flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip'), False)
    flags |= {'normalized': True, '__type': 'AddedToken'}
    settings = {'tokenizer_class': 'RobertaTokenizer', 'add_prefix_space': False}
    for key, name in ROBERTA_TOKENS.items():
        settings[key] = flags | {'content': name, 'lstrip': key == 'mask_token'}
    settings['additional_special_tokens'] = [flags | {'content': name} for name in ids]
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))


def write_codet5_golden():
    import transformers

    CODET5.mkdir(exist_ok=True)
    write_codet5(CODET5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(CODET5)
    rows = []
    for text in CODE:
        ids = tokenizer(text).input_ids
        rows.append({'text': text, 'ids': ids, 'decoded': tokenizer.decode(ids[1:-1])})
    content = json.dumps(rows, indent=1, ensure_ascii=False)
    (CODET5 / 'texts.json').write_text(content + '\n')


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """A folder of each kind, with tokens that were added."""
    parent = tmp_path_factory.mktemp('tokenizers')
    for form, (make, _, _) in FORMS.items():
        tokenizer = make()
        tokenizer.add_special_tokens([f'<extra_id_{i}>' for i in range(100)])
        tokenizer.add_tokens(['<sep>', 'new word', AddedToken('Ｆｕｌｌ', lstrip=True)])
        folder = parent / form
        folder.mkdir()
        tokenizer.save(str(folder / 'tokenizer.json'))
    return parent


@pytest.mark.parametrize('form', FORMS)
def test_ids_are_those_of_the_library(folders, form):
    found = find_vocabulary(folders / form)
    theirs = Tokenizer.from_file(str(folders / form / 'tokenizer.json'))
    texts = odd_texts(250)
    expected = [theirs.encode(text, add_special_tokens=False).ids for text in texts]
    assert found.encode(texts) == expected
    assert found.num_sentinels == 100
    assert (found.eos_id, found.unk_id) == FORMS[form][1:]
    kept = of_model(found.model, extra_ids=100)  # as a run keeps it
    assert (kept.model, kept.hash) == (found.model, found.hash)
    worker = pickle.loads(pickle.dumps(kept))
    worker.num_threads = 1
    assert worker.encode(texts) == expected
    # The names of special tokens are characters in a text, as for SentencePiece.
    for i in (0, found.eos_id, found.unk_id):
        [ids] = found.encode([f'b{found.pieces[i]}b'])
        assert len(ids) > 4 and not {0, found.eos_id} & {*ids}
        assert ids.count(found.unk_id) < 2  # the slash


def test_ids_of_codet5(tmp_path):
    """With <s> before each text, also in the folder that convert writes and in a run's own file."""
    found = find_vocabulary(CODET5)
    for name, content in files_of(found).items():
        (tmp_path / name).write_bytes(content)
    kept = of_model(found.model, extra_ids=100)
    for vocabulary in (found, find_vocabulary(tmp_path), kept):
        assert (vocabulary.eos_id, vocabulary.unk_id, vocabulary.num_sentinels) == (2, 3, 8)
        begin, end = vocabulary.ends.inputs
        assert vocabulary.ends.targets == (begin, end)
        for row in json.loads((CODET5 / 'texts.json').read_text()):
            [ids] = vocabulary.encode([row['text']])
            assert [*begin, *ids, *end] == row['ids']
            assert vocabulary.decode([*row['ids'], 5]) == row['decoded']
    objective = TextToText(make_config(), found)
    record = {'inputs': np.array([7, 8]), 'targets': np.array([9])}
    [example] = objective.examples(['a'], [record])
    assert (example.inputs.tolist(), example.targets.tolist()) == ([1, 7, 8, 2], [1, 9, 2])


@pytest.mark.parametrize(
    'changes, said',
    [
        ({'tokenizer_class': 'GPT2Tokenizer'}, 'tokenizer_class=GPT2Tokenizer'),
        ({'eos_token': 'none'}, "lacks 'none'"),
        ({'merges.txt': None}, 'merges.txt'),
        ({'merges.txt': 'x'}, 'vocab.json'),
    ],
)
def test_vocabularies_of_bpe_that_are_refused(tmp_path, changes, said):
    shutil.copytree(CODET5, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / 'tokenizer_config.json', **changes)
    if 'merges.txt' in changes:
        (tmp_path / 'merges.txt').unlink()
    if changes.get('merges.txt'):
        (tmp_path / 'merges.txt').write_text(changes['merges.txt'])
    assert_refused(partial(find_vocabulary, tmp_path), said)


def test_ids_of_gemma():
    folder = oracle('../golden/t5gemma_tokenizer')
    found = find_vocabulary(folder / 'as_saved')
    assert (found.size, found.eos_id, found.unk_id) == (700, 1, 3)
    for row in json.loads((folder / 'texts.json').read_text())['texts']:
        [ids] = found.encode([row['text']])
        assert ids == row['transformers_without_special']
        if '<bos>' not in row['text']:  # transformers leaves special tokens out
            assert found.decode([*ids, 1, 5]) == row['decoded_by_transformers']


def test_texts_of_ids(folders):
    """Unknown tokens as SentencePiece writes them, and no padding; added tokens as they were added."""
    found = find_vocabulary(folders / 't5')
    full, word = found.added_tokens['Ｆｕｌｌ'], found.added_tokens['new word']
    [the] = found.encode(['the'])
    assert found.decode([0, *the, 2, full, 0, word, 10**6, 1, *the]) == 'the ⁇ Ｆｕｌｌnew word ⁇ '


def copy_with(folder, source, **changes):
    """Write a tokenizer.json with other content."""
    content = json.loads((source / 'tokenizer.json').read_text())
    (folder / 'tokenizer.json').write_text(json.dumps(content | changes))


def test_eos_is_that_of_the_folder(folders, tmp_path):
    """Runs and convert keep it, and examples end with it."""
    copy_with(tmp_path, folders / 'codet5')
    (tmp_path / 'config.json').write_text('{"model_type": "t5", "eos_token_id": 2}')
    settings = {'tokenizer_class': 'RobertaTokenizer', 'eos_token': '</s>'}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    found = find_vocabulary(tmp_path)
    objective = TextToText(make_config(), found)
    [ids] = found.encode_as_arrays(['the end'])
    [example] = objective.examples(['a'], [{'inputs': ids, 'targets': ids}])
    assert example.targets.tolist() == [*ids, 2] and found.decode([*ids, 2, 5]) == 'the end'
    settings['eos_token'] = {'content': '<s>'}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
    assert_refused(partial(find_vocabulary, tmp_path), 'eos_token_id=2')
    (tmp_path / 'config.json').unlink()
    other = find_vocabulary(tmp_path)
    assert other.eos_id == of_model(other.model, 100).eos_id == 1
    for name, content in files_of(other).items():
        (tmp_path / name).write_bytes(content)
    assert find_vocabulary(tmp_path).eos_id == 1
    Tokenizer.from_file(str(tmp_path / 'tokenizer.json'))


def test_a_run_keeps_its_tokenizer(folders, tmp_path):
    """It resumes with the file, with and without data.vocabulary."""
    config = make_config(vocabulary=str(folders / 't5'))
    find = partial(find_or_train_vocabulary, workdir=tmp_path, texts=[], max_size=512)
    found = find(config)
    [(name, content)] = kept_files(found).items()
    assert name == 'tokenizer.json'
    (tmp_path / name).write_bytes(content)
    for config.vocabulary in (str(folders / 't5'), ''):
        assert find(config).hash == found.hash
    config.vocabulary = str(folders / 'codet5')
    assert_refused(partial(find, config), 'tokenizer.json')
    more = add_tokens(found, ['<more>'])
    assert more.encode(['<more>']) == [[found.size]] and [*kept_files(more)] == ['tokenizer.json']


def test_a_model_that_version_0_2_made_of_a_tokenizer(tmp_path):
    proto = sentencepiece_model_pb2.ModelProto.FromString((HUNT / 'good.model').read_bytes())
    proto.normalizer_spec.normalization_rule_tsv = '{"model": {}, "added_tokens": []}'
    assert_refused(partial(SentencePieceVocabulary, proto.SerializeToString()), 'tokenizer.json')


def test_a_folder_is_written_with_its_tokenizer(folders, tmp_path):
    found = named_vocabulary('data.vocabulary', folders / 't5', 100)
    text = 'lo<extra_id_0> ll<sep>'
    assert found.decode(*found.encode([text])) == text
    for name, content in files_of(found).items():  # as convert writes it
        (tmp_path / name).write_bytes(content)
    again = find_vocabulary(tmp_path)
    assert again.pieces == found.pieces
    assert again.encode(odd_texts(50)) == found.encode(odd_texts(50))


def test_the_steps_are_those_of_the_class(folders, tmp_path):
    """T5Tokenizer of transformers 5 makes its own steps, whatever version 4 saved."""
    cut = {'direction': 'Right', 'max_length': 2, 'strategy': 'LongestFirst', 'stride': 0}
    copy_with(tmp_path, folders / 't5', truncation=cut)  # texts are not cut
    texts = [' the  end. ', 'the\v<sep> end.']
    plain = find_vocabulary(tmp_path).encode(texts)
    assert plain == find_vocabulary(folders / 't5').encode(texts)
    (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "T5TokenizerFast"}')
    found = find_vocabulary(tmp_path)
    assert b'"T5Tokenizer"' in files_of(found)['tokenizer_config.json']
    [one, two] = found.encode(['the end.', 'the<sep>end.'])
    assert found.encode(texts) == [one, two] != plain
    (tmp_path / 'config.json').write_text('{"model_type": "umt5"}')
    assert find_vocabulary(tmp_path).encode(texts) == plain


def test_a_folder_of_byt5_has_bytes(tmp_path):
    (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    found = find_vocabulary(tmp_path)
    assert isinstance(found, ByteVocabulary)
    assert found.num_extra_ids == 0


def token(content, i):
    return {'added_tokens': [TOKEN_FLAGS | {'content': content, 'id': i}]}


OTHERS = [
    {'model': {'type': 'BPE', 'vocab': {'!': 0, '</s>': 1}, 'merges': []}, 'added_tokens': []},
    {'model': {'type': 'BPE', 'vocab': {}, 'merges': []}},
    {'model': {'type': 'Unigram', 'unk_id': 2}},
    {'model': None},
    {'pre_tokenizer': {'type': 'None'}},
    token('<sep>', 10**6),
    token('<sep>', 30),
    token('<extra_id_1>', None),
    {'added_tokens': [7]},
]


def test_other_tokenizers_are_refused(folders, tmp_path):
    for changes in OTHERS:
        copy_with(tmp_path, folders / 't5', **changes)
        assert_refused(lambda: find_vocabulary(tmp_path), 'tokenizer.json')
    copy_with(tmp_path, folders / 't5')
    (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": {"content": "no token"}}')
    assert_refused(lambda: find_vocabulary(tmp_path), f'{tmp_path}/tokenizer.json')


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
def test_bpe_of_transformers(folders, tmp_path):
    """As tokenizer.json, in CodeT5's files, in those of transformers 4, and in the folder that convert writes."""
    transformers = pytest.importorskip('transformers')
    file = folders / 'codet5/tokenizer.json'
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    texts = odd_texts(2000)
    expected = theirs(texts, add_special_tokens=False).input_ids
    assert find_vocabulary(folders / 'codet5').encode(texts) == expected
    for form in ('codet5', '4', 'prefix'):
        folder = tmp_path / form
        folder.mkdir()
        write_codet5(folder)
        settings = {'add_prefix_space': form == 'prefix'}
        if form == '4':
            ids = json.loads((folder / 'added_tokens.json').read_text())
            (folder / 'added_tokens.json').unlink()
            names = dict.fromkeys(ROBERTA_TOKENS.values())
            vocab = json.loads((folder / 'vocab.json').read_text())
            ids = {name: vocab[name] for name in names} | ids
            tokens = {}
            for name, i in ids.items():
                flags = {'lstrip': name == '<mask>', 'special': True}
                tokens[i] = TOKEN_FLAGS | {'content': name, **flags}
            settings |= ROBERTA_TOKENS | {'added_tokens_decoder': tokens}
        edit_json(folder / 'tokenizer_config.json', **settings)
        found = find_vocabulary(folder)
        expected = transformers.AutoTokenizer.from_pretrained(folder)(texts).input_ids
        begin, end = found.ends.inputs
        assert [[*begin, *ids, *end] for ids in found.encode(texts)] == expected
        written = tmp_path / f'{form}_written'
        written.mkdir()
        for name, content in files_of(found).items():
            (written / name).write_bytes(content)
        assert transformers.AutoTokenizer.from_pretrained(written)(texts).input_ids == expected
