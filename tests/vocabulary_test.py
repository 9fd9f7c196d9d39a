"""Vocabularies, against SeqIO's numbers and transformers' rules.

tests/golden/seqio_t5 was made by running SeqIO b898b9f and t5 e081111.
"""

import json
import os
import pathlib
import re

import numpy as np
import pytest
from corpora import LFS_POINTER, check_settings, documents_of, make_config

import vocabulary as vocabularies

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'seqio_t5'


ORACLES = pathlib.Path(__file__).parents[1].parent / 'shared' / 'testdata' / 'seqio_t5'


def golden(name):
    return json.loads((GOLDEN / f'{name}.json').read_text())


def check_vocabulary_case(vocabulary, case):
    assert vocabulary.size == case['vocab_size']
    assert (vocabularies.PAD_ID, vocabularies.EOS_ID, vocabularies.UNK_ID) == (
        case['pad_id'],
        case['eos_id'],
        case['unk_id'],
    )
    assert vocabulary.encode([c['text'] for c in case['cases']]) == [
        c['ids'] for c in case['cases']
    ]
    for one in case['cases'] + case['decode_cases']:
        assert vocabulary.decode(one['ids']) == one['decode']


@pytest.mark.parametrize('name', ['{oracles}', '{relative}', '{relative}/../sentencepiece'])
def test_sentencepiece_vocabulary_matches_seqio(monkeypatch, name):
    """The model is found under absolute and relative names of its folder."""
    folder = ORACLES / 'sentencepiece'
    if not folder.exists():
        pytest.skip(f"{folder} is missing: SeqIO's test model is not shipped")
    monkeypatch.chdir(pathlib.Path(__file__).parent)
    name = name.replace('{oracles}', str(folder)).replace('{relative}', os.path.relpath(folder))
    cases = [case for case in golden('vocab') if case['vocab'] == 'sentencepiece_test']
    assert len(cases) == 3
    for case in cases:
        config = make_config(vocabulary=name, extra_ids=case['extra_ids'])
        found = vocabularies.find_or_train_vocabulary(config, 'nowhere', [], max_size=32128)
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
    assert (
        [i for i in ids if i >= 1000]
        == [(vocabulary.size - 1 - i) for i in (0, 99, 1)]
        == [1099, 1000, 1098]
    )
    assert vocabulary.decode(ids) == text
    assert vocabulary.encode(['plain words']) == plain.encode(['plain words'])


def test_baked_in_extra_ids_are_not_doubled(pydoc_model):
    own = vocabularies.SentencePieceVocabulary(pydoc_model)
    baked = vocabularies.SentencePieceVocabulary(own._processor.serialized_model_proto())
    assert (baked.size, baked.num_extra_ids) == (1100, 100)
    text = ['a <extra_id_5> b']
    assert baked.encode(text) == own.encode(text)


# What SeqIO (seqio-nightly, encode and encode_tf) makes of a text, and what transformers 4.57.6
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


def test_bytes_know_no_sentinels_in_text():
    vocabulary = vocabularies.ByteVocabulary(100)
    text = 'a<extra_id_0> <extra_id_1>'
    assert vocabulary.encode([text]) == vocabulary.encode([text], glued_sentinels=True)
    assert vocabulary.decode(vocabulary.encode([text])[0]) == text


def test_decode_undoes_encode(pydoc, vocabulary):
    texts = [text for _, text in documents_of(pydoc)[:200] if text.isascii()]
    for text, ids in zip(texts, vocabulary.encode(texts), strict=True):
        assert (
            vocabularies.UNK_ID in ids or vocabulary.decode(ids + [vocabularies.EOS_ID, 5]) == text
        )
    byte = vocabularies.ByteVocabulary()
    assert [byte.decode(ids) for ids in byte.encode(texts)] == texts


def test_training_gives_the_same_model_on_any_number_of_cores(pydoc, pydoc_model):
    texts = [text for _, text in documents_of(pydoc)[::10]]
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert vocabularies.train_vocabulary(texts, 1000) == pydoc_model
    finally:
        os.sched_setaffinity(0, cores)


def test_training_uses_long_lines_and_gives_fewer_pieces_for_a_small_corpus():
    long_line = ' '.join(['walking', 'talking', 'singing', 'bringing'] * 1000 + ['XYZ'] * 1000)
    vocabulary = vocabularies.SentencePieceVocabulary(
        vocabularies.train_vocabulary([long_line], 32000), 0
    )
    assert 10 < vocabulary.size < 100
    assert vocabularies.UNK_ID not in vocabulary.encode([long_line])[0]
    with pytest.raises(ValueError, match='num_pieces=3'):
        vocabularies.train_vocabulary(['some letters'], 3)
    with pytest.raises(ValueError, match='num_pieces=100'):
        vocabularies.train_vocabulary([], 100)


def test_training_reads_the_beginning_of_a_long_document(monkeypatch):
    monkeypatch.setattr(vocabularies, 'SAMPLE_CHARACTERS', 3000)
    text = 'some words ' * 300
    assert vocabularies.train_vocabulary([text + 'z' * 5000], 20) == vocabularies.train_vocabulary(
        [text], 20
    )


def find(workdir, texts=(), max_size=32128, **changes):
    return vocabularies.find_or_train_vocabulary(make_config(**changes), workdir, texts, max_size)


def test_the_vocabulary_of_a_run(tmp_path, pydoc_model):
    workdir = tmp_path / 'run'
    own_model = tmp_path / 'own.model'
    own_model.write_bytes(pydoc_model)
    folder = tmp_path / 'published'
    folder.mkdir()
    (folder / 'spiece.model').write_bytes(pydoc_model)
    byte = find(workdir, max_size=384, vocabulary='bytes', extra_ids=0)
    assert (byte.size, byte.model) == (259, b'')

    texts = [f'some words of text {i}' for i in range(100)]
    trained = find(str(workdir), texts, num_pieces=40)
    assert not workdir.exists()
    workdir.mkdir()
    (workdir / 'vocabulary.model').write_bytes(trained.model)
    kept = find(str(workdir), texts=None)
    assert (kept.model, kept.hash) == (trained.model, trained.hash)
    with pytest.raises(ValueError, match='own.model.*is not .*vocabulary.model: leave it out'):
        find(workdir, vocabulary=str(own_model))

    for path in (own_model, folder):
        found = find(tmp_path / path.stem, vocabulary=str(path))
        assert found.model == pydoc_model
        assert not (tmp_path / path.stem / 'vocabulary.model').exists()
    hashes = {vocabularies.SentencePieceVocabulary(pydoc_model, n).hash for n in (0, 100)}
    assert len(hashes | {kept.hash, byte.hash, vocabularies.ByteVocabulary(100).hash}) == 5


def test_the_model_of_a_restored_checkpoint_comes_before_the_workdirs(tmp_path, pydoc_model):
    other = vocabularies.train_vocabulary([f'some words of text {i}' for i in range(100)], 40)
    config = make_config()
    found = vocabularies.find_or_train_vocabulary(config, tmp_path, None, 32128, pydoc_model)
    assert found.model == pydoc_model
    (tmp_path / 'vocabulary.model').write_bytes(other)
    with pytest.raises(
        ValueError, match='the vocabulary of restore.path is not .*vocabulary.model'
    ):
        vocabularies.find_or_train_vocabulary(config, tmp_path, None, 32128, pydoc_model)


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match='model.vocab_size=300 is too small for 359 pieces; use 384'
    ):
        find(tmp_path, max_size=300, vocabulary='bytes')


def test_the_folders_that_hold_a_vocabulary(tmp_path, pydoc_model, monkeypatch):
    """A run's, a checkpoint's in it, a published model's; the nearest file counts."""
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = tmp_path / 'run'
    lone = tmp_path / 'checkpoint_3'
    (run / 'checkpoint_800').mkdir(parents=True)
    lone.mkdir()
    (run / 'other').mkdir()
    (run / 'vocabulary.model').write_bytes(pydoc_model)
    for name in (f'{run}', f'{run}/', f'{run}/checkpoint_800', '~/run', f'{run}/other/..', 'run'):
        assert find(tmp_path / 'new', vocabulary=name).model == pydoc_model
        assert vocabularies.find_vocabulary(lone, name).model == pydoc_model
    for folder in (lone, run / 'other', tmp_path / 'nowhere'):
        message = 'vocabulary.model, spiece.model, sentencepiece.model'
        with pytest.raises(ValueError, match=f'^data.vocabulary=.*{message}'):
            find(tmp_path / 'n', vocabulary=str(folder))
        with pytest.raises(ValueError, match=f'^vocabulary=.*{message}'):
            vocabularies.find_vocabulary(run, folder)
    (lone / 'vocabulary.model').write_bytes(pydoc_model)
    assert vocabularies.model_file(lone) == lone / 'vocabulary.model'
    for name in ('spiece.model', 'sentencepiece.model'):
        folder = tmp_path / name.split('.')[0]
        folder.mkdir()
        (folder / name).write_bytes(pydoc_model)
        assert vocabularies.model_file(folder) == folder / name


@pytest.mark.parametrize(
    'name, message',
    [
        ('http://a.b/spiece.model', 'only paths on a disk, gs:// and s3:// are read'),
        ('{}/loop.model', 'cannot be opened .Too many levels of symbolic links'),
        ('{}/lfs.model', 'lfs.model is a pointer of git-lfs'),
        ('  ', 'is no path'),
    ],
)
def test_names_of_vocabularies_that_cannot_be_read(tmp_path, name, message):
    (tmp_path / 'loop.model').symlink_to('loop.model')
    (tmp_path / 'lfs.model').write_bytes(LFS_POINTER)
    with pytest.raises(ValueError, match=f'^data.vocabulary=.*: .*{message}'):
        find(tmp_path / 'run', vocabulary=name.replace('{}', str(tmp_path)))


@pytest.mark.parametrize('content', [None, b'', b'no model', b'\n'])
def test_a_vocabulary_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / 'broken.model'
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match='broken.model'):
        find(tmp_path / 'run', vocabulary=str(path))
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    'num_pieces, texts, message',
    [
        (-1, ['some letters'], 'num_pieces=-1: must be at least 1 and at most 1,000,000'),
        (0, ['some letters'], 'num_pieces=0: must be at least 1 and at most 1,000,000'),
        (10**12, ['some letters'], 'num_pieces=1000000000000: must be at least 1 and at most'),
        (1, ['some letters'], 'num_pieces=1: pad, EOS and unknown are pieces, too: use 4 or more'),
        (4, ['some letters'], 'num_pieces=4: a piece for each character.* are 11: use 11 or more'),
        (50, [], 'num_pieces=50: the corpus has no text to train a vocabulary on'),
        (50, ['  '], 'num_pieces=50: the corpus has no text to train a vocabulary on'),
    ],
)
def test_a_vocabulary_that_cannot_be_trained_says_why(num_pieces, texts, message):
    config = make_config(num_pieces=num_pieces)
    with pytest.raises(ValueError, match=message) as error:
        check_settings(config)
        find('nowhere', texts, num_pieces=num_pieces)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('name', ['', 'bytes'])
@pytest.mark.parametrize('extra_ids', [-1, 10**9])
def test_numbers_of_sentinels_that_cannot_be_are_refused(pydoc_model, name, extra_ids):
    config = make_config(extra_ids=extra_ids, vocabulary=name)
    with pytest.raises(
        ValueError, match='data.extra_ids=.*: must be at least 0 and at most 100,000'
    ):
        vocabularies.find_or_train_vocabulary(config, 'nowhere', [], 32128, pydoc_model)
