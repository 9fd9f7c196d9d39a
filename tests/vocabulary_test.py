"""Vocabularies, against SeqIO's numbers and transformers' rules.

tests/golden/seqio_t5 was made by running SeqIO b898b9f and t5 e081111.
"""

import os
import pathlib
import re
from functools import partial

import numpy as np
import pytest
from corpora import HUNT, check_settings, documents_of, golden, make_config, model_with, oracle
from small_models import assert_refused

import vocabulary as vocabularies
from formats.vocabulary import find_vocabulary
from run.train_vocabulary import find_or_train_vocabulary, train_vocabulary


def check_vocabulary_case(vocabulary, case):
    assert vocabulary.size == case['vocab_size']
    special_ids = (vocabularies.PAD_ID, vocabularies.EOS_ID, vocabularies.UNK_ID)
    assert special_ids == (case['pad_id'], case['eos_id'], case['unk_id'])
    texts = [one['text'] for one in case['cases']]
    assert vocabulary.encode(texts) == [one['ids'] for one in case['cases']]
    for one in case['cases'] + case['decode_cases']:
        assert vocabulary.decode(one['ids']) == one['decode']


def test_sentencepiece_vocabulary_matches_seqio():
    name = str(oracle('sentencepiece'))
    cases = [case for case in golden('vocab') if case['vocab'] == 'sentencepiece_test']
    assert len(cases) == 3
    for case in cases:
        config = make_config(vocabulary=name, extra_ids=case['extra_ids'])
        found = find_or_train_vocabulary(config, pathlib.Path('nowhere'), [], max_size=32128)
        check_vocabulary_case(found, case)


def test_byte_vocabulary_matches_seqio():
    cases = [case for case in golden('vocab') if case['vocab'] == 'byte']
    assert len(cases) == 2
    for case in cases:
        check_vocabulary_case(vocabularies.ByteVocabulary(case['extra_ids']), case)


def test_extra_ids_count_down_from_the_end(pydoc_model):
    plain = vocabularies.SentencePieceVocabulary(pydoc_model, extra_ids=0)
    vocabulary = vocabularies.SentencePieceVocabulary(pydoc_model)
    assert (plain.size, vocabulary.size, vocabulary.num_extra_ids) == (1000, 1100, 100)
    assert plain.model == vocabulary.model == pydoc_model and plain.hash != vocabulary.hash
    text = 'the <extra_id_0> of a <extra_id_99> string <extra_id_1>s'
    [ids] = vocabulary.encode([text])
    assert [i for i in ids if i >= 1000] == [1099, 1000, 1098]
    assert vocabulary.decode(ids) == text
    assert vocabulary.encode(['plain words']) == plain.encode(['plain words'])


UP = list(range(12))
# The numbers of sentinels in the order of their ids, how each begins, and the piece that comes after.
ORDERS = {
    'first': (UP, ['<extra_id_'], 3),
    'in the middle': (UP[::-1], ['▁<extra_id_'], 30),
    'ascending at the end': (UP, ['▁<extra_id_'], 72),
    'in no order, of both kinds': (
        UP[::3] + UP[1::3] + UP[2::3],
        ['▁<extra_id_', '<extra_id_'],
        50,
    ),
    'one': ([0], ['<extra_id_'], 71),
}


@pytest.mark.parametrize('name', ORDERS)
def test_sentinels_have_the_ids_of_their_names(name):
    numbers, begins, place = ORDERS[name]
    names = [f'{begins[n % len(begins)]}{n}>' for n in numbers]
    vocabulary = vocabularies.SentencePieceVocabulary(model_with(names, place))
    assert (vocabulary.size, vocabulary.num_extra_ids) == (72 + len(names), len(names))
    expected = [place + numbers.index(n) for n in range(len(names))]
    assert vocabulary.sentinel_ids.tolist() == expected
    assert vocabulary.sentinel_ids.dtype == np.int32
    plain = vocabularies.SentencePieceVocabulary((HUNT / 'good.model').read_bytes(), 0)
    for text in ('Who lives? <extra_id_0> it.', 'Who<extra_id_0>is it?'):
        [ids] = vocabulary.encode([text], glued_sentinels=True)
        before, after = text.split('<extra_id_0>')
        words = [vocabulary.encode([part])[0] for part in (before, after)]
        blank = vocabulary._processor.piece_to_id('▁')  # SeqIO has it before a sentinel without one
        own = [vocabulary.sentinel_ids[0]]
        if begins[0].startswith('<') and before.endswith(' '):
            own = [blank, *own]
        assert ids == [*words[0], *own, *words[1]]
        assert vocabulary.decode(words[0]) == plain.decode(plain.encode([before])[0])


WRONG_SENTINELS = [
    (['<extra_id_0>', '<extra_id_2>'], '<extra_id_1>'),
    (['▁<extra_id_1>', '▁<extra_id_2>'], '<extra_id_0>'),
    (['▁<extra_id_7>'], '<extra_id_0>'),
    (['<extra_id_1>', '▁<extra_id_0>', '▁<extra_id_1>'], '<extra_id_1>'),
    (['<extra_id_0>', '<extra_id_0>'], '<extra_id_0>'),
]


def test_gaps_and_doubles_are_refused(tmp_path):
    for names, named in WRONG_SENTINELS:
        for place in (3, 72):
            (tmp_path / 'spiece.model').write_bytes(model_with(names, place))
            assert_refused(partial(find_vocabulary, tmp_path), named)
    for name in (tmp_path, tmp_path / 'spiece.model'):
        ask = partial(find, tmp_path / 'run', vocabulary=str(name))
        assert_refused(ask, f'data.vocabulary={str(name)!r}')


def test_pieces_that_only_look_like_sentinels_are_none():
    vocabulary = vocabularies.SentencePieceVocabulary(
        model_with(['▁<extra_id_', '<extra_id_x>'], 9)
    )
    assert vocabulary.size == 174
    assert vocabulary.sentinel_ids.tolist() == list(range(173, 73, -1))


# The ids that SeqIO (seqio-nightly, encode and encode_tf) makes of a text, and what transformers 4.57.6
# (T5TokenizerFast and T5Tokenizer) and 5.23.0 make of it by default; S0 stands for <extra_id_0>.
# None: each letter is a piece.
SENTINELS_IN_TEXT = [
    ('a <extra_id_0> b', '▁a S0 ▁b', '▁a S0 ▁b'),
    ('a <extra_id_0>', '▁a S0', '▁a S0'),
    ('<extra_id_0> <extra_id_1> b', 'S0 S1 ▁b', 'S0 S1 ▁b'),
    ('\n<extra_id_0>\nb', 'S0 ▁b', 'S0 ▁b'),
    # Glued to what comes before: a sentinel for transformers alone.
    ('a<extra_id_0>', None, '▁a S0'),
    ('a<extra_id_0> b', None, '▁a S0 ▁b'),
    ('a<extra_id_0>b', None, '▁a S0 ▁b'),
    ('a<extra_id_0>, b', None, '▁a S0 ▁ , ▁b'),
    ('<extra_id_0><extra_id_1>', None, 'S0 S1'),
    ('a<extra_id_0><extra_id_1>b', None, '▁a S0 S1 ▁b'),
    ('a<extra_id_0> <extra_id_1> b', None, '▁a S0 S1 ▁b'),
    # Glued to what comes after alone: for transformers a word begins there, for SeqIO not.
    ('a <extra_id_0>b', '▁a S0 b', '▁a S0 ▁b'),
    ('<extra_id_0>b', 'S0 b', 'S0 ▁b'),
    ('a <extra_id_0>, b', '▁a S0 , ▁b', '▁a S0 ▁ , ▁b'),
    # No sentinels.
    ('a<extra_id_100>b', None, None),
    ('a<extra_id_00>b', None, None),
    ('a<EXTRA_ID_0>b', None, None),
]


def pieces_of(vocabulary, ids):
    pieces = [vocabulary._processor.id_to_piece(i) for i in ids]
    return ' '.join(piece.replace('▁<extra_id_', 'S').removesuffix('>') for piece in pieces)


@pytest.mark.parametrize('text, in_seqio, in_transformers', SENTINELS_IN_TEXT)
def test_sentinels_glued_to_a_word(vocabulary, text, in_seqio, in_transformers):
    """SeqIO counts where it finds the sentinel; with glued_sentinels transformers elsewhere."""
    [ids] = vocabulary.encode([text])
    [glued] = vocabulary.encode([text], glued_sentinels=True)
    if in_seqio is None:
        assert '<' in pieces_of(vocabulary, ids)
    else:
        assert pieces_of(vocabulary, ids) == in_seqio and glued == ids
    if in_seqio is None and in_transformers is not None:
        assert pieces_of(vocabulary, glued) == in_transformers
        spaced = ' '.join(text.replace('<', ' <').replace('>', '> ').split())
        assert vocabulary.decode(glued) == spaced and vocabulary.encode([spaced]) == [glued]
    if in_transformers is None:
        assert glued == ids and vocabulary.decode(ids) == text


def random_texts_with_sentinels(pydoc, count=300):
    """Texts of words and sentinels with no, one or two spaces between them."""
    random = np.random.default_rng(0)
    words = ' '.join(text for _, text in documents_of(pydoc)[:50] if text.isascii()).split()
    words = [word for word in words if '<' not in word]
    for _ in range(count):
        sentinels = [f'<extra_id_{i}>' for i in random.integers(0, 100, 4)]
        parts = list(random.choice([*random.choice(words, 8), *sentinels], 10))
        yield ''.join(part + ' ' * int(random.integers(0, 3)) for part in parts)


@pytest.mark.peers
def test_texts_are_encoded_as_seqio_does(pydoc, pydoc_model, vocabulary, tmp_path):
    seqio = pytest.importorskip('seqio', reason="SeqIO is not installed: pip install -e '.[peers]'")
    (tmp_path / 'spiece.model').write_bytes(pydoc_model)
    theirs = seqio.SentencePieceVocabulary(str(tmp_path / 'spiece.model'), extra_ids=100)
    texts = [text for text, *_ in SENTINELS_IN_TEXT] + [*random_texts_with_sentinels(pydoc)]
    assert vocabulary.encode(texts) == [list(map(int, theirs.encode(text))) for text in texts]


@pytest.mark.peers
def test_glued_sentinels_are_those_of_transformers(pydoc, pydoc_model, vocabulary, tmp_path):
    reason = "transformers is not installed: pip install -e '.[peers]'"
    transformers = pytest.importorskip('transformers', reason=reason)
    (tmp_path / 'spiece.model').write_bytes(pydoc_model)
    theirs = transformers.T5TokenizerFast.from_pretrained(tmp_path)
    texts = [text for text, *_ in SENTINELS_IN_TEXT] + [*random_texts_with_sentinels(pydoc)]
    num_compared = 0
    for text, ids in zip(texts, vocabulary.encode(texts, glued_sentinels=True), strict=True):
        if not re.search(r'(^|\s)<extra_id_\d\d?>[^\s<]', text):  # there SeqIO counts
            assert theirs(text, add_special_tokens=False).input_ids == ids, text
            num_compared += 1
    assert num_compared > 100


def test_decode_undoes_encode(pydoc, vocabulary):
    texts = [text for _, text in documents_of(pydoc)[:200] if text.isascii()]
    for text, ids in zip(texts, vocabulary.encode(texts), strict=True):
        if vocabularies.UNK_ID not in ids:
            assert vocabulary.decode([*ids, vocabularies.EOS_ID, 5]) == text
    byte = vocabularies.ByteVocabulary()
    assert [byte.decode(ids) for ids in byte.encode(texts)] == texts


def test_training_gives_the_same_model_on_any_number_of_cores(pydoc, pydoc_model):
    texts = [text for _, text in documents_of(pydoc)[::10]]
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert train_vocabulary(texts, 1000) == pydoc_model
    finally:
        os.sched_setaffinity(0, cores)


def test_training_uses_long_lines_and_gives_fewer_pieces_for_a_small_corpus():
    long_line = ' '.join(['walking', 'talking', 'singing', 'bringing'] * 1000 + ['XYZ'] * 1000)
    model = train_vocabulary([long_line], 32000)
    vocabulary = vocabularies.SentencePieceVocabulary(model, extra_ids=0)
    assert 10 < vocabulary.size < 100
    assert vocabularies.UNK_ID not in vocabulary.encode([long_line])[0]


def test_training_reads_the_beginning_of_a_long_document(monkeypatch):
    monkeypatch.setattr('run.train_vocabulary.SAMPLE_CHARACTERS', 3000)
    text = 'some words ' * 300
    expected = train_vocabulary([text], 20)
    assert train_vocabulary([text + 'z' * 5000], 20) == expected


def find(workdir, texts=(), max_size=32128, model=b'', **changes):
    config = make_config(**changes)
    return find_or_train_vocabulary(config, pathlib.Path(workdir), texts, max_size, model)


def test_the_vocabulary_of_a_run(tmp_path, pydoc_model):
    workdir = tmp_path / 'run'
    own_model = tmp_path / 'own.model'
    own_model.write_bytes(pydoc_model)
    byte = find(workdir, max_size=384, vocabulary='bytes', extra_ids=0)
    assert (byte.size, byte.model) == (259, b'')

    texts = [f'some words of text {i}' for i in range(100)]
    trained = find(str(workdir), texts, num_pieces=40)
    assert not workdir.exists()
    workdir.mkdir()
    (workdir / 'vocabulary.model').write_bytes(trained.model)
    kept = find(str(workdir), texts=None)
    assert (kept.model, kept.hash) == (trained.model, trained.hash)
    assert_refused(partial(find, workdir, vocabulary=str(own_model)), 'vocabulary.model')
    assert_refused(partial(find, workdir, model=pydoc_model), 'vocabulary.model')
    assert find(tmp_path, texts=None, model=pydoc_model).model == pydoc_model

    hashes = {vocabularies.SentencePieceVocabulary(pydoc_model, n).hash for n in (0, 100)}
    assert len(hashes | {kept.hash, byte.hash, vocabularies.ByteVocabulary(100).hash}) == 5


LETTERS = ['some letters']
# Settings, texts to train on, and the setting that is refused.
REFUSED = [
    *[({'num_pieces': n}, LETTERS, f'data.num_pieces={n}') for n in (-1, 0, 10**12, 1, 4)],
    *[({'num_pieces': 50}, texts, 'no text is left') for texts in ([], ['  '])],
    *[({'extra_ids': n}, LETTERS, f'data.extra_ids={n}') for n in (-1, 10**9)],
    ({'extra_ids': -1, 'vocabulary': 'bytes'}, [], 'data.extra_ids=-1'),
    ({'vocabulary': 'bytes'}, [], 'model.vocab_size=300'),
]


def test_settings_that_give_no_vocabulary_are_refused(pydoc_model):
    for changes, texts, named in REFUSED:

        def ask(changes=changes, texts=texts):
            check_settings(make_config(**changes))
            find('nowhere', texts, max_size=300, **changes)

        assert_refused(ask, named)
    # A config.json that was copied or edited has any number.
    ask = partial(vocabularies.SentencePieceVocabulary, pydoc_model, extra_ids=-1)
    assert_refused(ask, 'data.extra_ids')
