"""Vocabularies, span corruption and the stream, against SeqIO's numbers and by counting everything.

tests/golden/seqio_t5 was made by running SeqIO b898b9f and t5 e081111; masks are random there, so
their counts and their structure are compared.
"""

import dataclasses
import functools
import gzip
import io
import itertools
import json
import os
import pathlib
import re
import shutil
import sys
import threading
import zlib

import ml_collections
import numpy as np
import pytest

import data
import sources
import vocabulary as vocabularies

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'seqio_t5'
ORACLES = pathlib.Path(__file__).parents[1].parent / 'shared' / 'testdata' / 'seqio_t5'


def golden(name):
    return json.loads((GOLDEN / f'{name}.json').read_text())


def batch_hash(batch):
    return zlib.crc32(b''.join(batch[key].tobytes() for key in sorted(batch)))


def documents_of(source):
    blocks = source.train
    return [document for block in range(blocks.num_blocks) for document in blocks.read(block)]


def make_config(**changes):
    config = ml_collections.ConfigDict(
        {
            'task': 'span_corruption',
            'files': '',
            'validation_files': '',
            'text_field': 'text',
            'on_bad_line': 'stop',
            'max_bad_fraction': 0.01,
            'vocabulary': '',
            'num_pieces': 1000,
            'extra_ids': 100,
            'lengths': {'inputs': 64, 'targets': 14},
            'noise_density': 0.15,
            'mean_noise_span_length': 3.0,
            'validation_fraction': 0.01,
        }
    )
    config.update_from_flattened_dict(changes)
    return config.lock()


@pytest.fixture(scope='session')
def pydoc():
    return sources.open_source(make_config())


@pytest.fixture(scope='session')
def model(pydoc):
    return vocabularies.train_vocabulary([text for _, text in documents_of(pydoc)[::10]], 1000)


@pytest.fixture(scope='session')
def vocabulary(model):
    return vocabularies.SentencePieceVocabulary(model)


@pytest.fixture(scope='session')
def oracle_vocabulary():
    path = ORACLES / 'sentencepiece' / 'sentencepiece.model'
    if not path.exists():
        pytest.skip(f"{path} is missing: SeqIO's test model is not shipped")
    return path.read_bytes()


def uncorrupt(inputs, targets, sentinels):
    """Raw ids from inputs and targets without EOS; `sentinels` are all ids that may be one."""
    spans, current = {}, None
    for token in targets:
        if token in sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    return [
        raw for token in inputs for raw in (spans.pop(token) if token in sentinels else [token])
    ]


def without_eos(row):
    tokens = [int(token) for token in row if token != vocabularies.PAD_ID]
    assert tokens[-1] == vocabularies.EOS_ID and vocabularies.EOS_ID not in tokens[:-1]
    return tokens[:-1]


def sentinels_of(vocabulary):
    return {(vocabulary.size - 1 - i) for i in range(100)}


LFS_POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n'


# Vocabularies.


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


def test_sentencepiece_vocabulary_matches_seqio(oracle_vocabulary):
    cases = [case for case in golden('vocab') if case['vocab'] == 'sentencepiece_test']
    assert len(cases) == 3
    for case in cases:
        check_vocabulary_case(
            vocabularies.SentencePieceVocabulary(oracle_vocabulary, case['extra_ids']), case
        )


def test_byte_vocabulary_matches_seqio():
    cases = [case for case in golden('vocab') if case['vocab'] == 'byte']
    assert len(cases) == 2
    for case in cases:
        check_vocabulary_case(vocabularies.ByteVocabulary(case['extra_ids']), case)


def test_extra_ids_count_down_from_the_end(model):
    plain = vocabularies.SentencePieceVocabulary(model, extra_ids=0)
    vocabulary = vocabularies.SentencePieceVocabulary(model)
    assert (plain.size, vocabulary.size, vocabulary.num_extra_ids) == (1000, 1100, 100)
    assert plain.model == vocabulary.model == model and plain.hash != vocabulary.hash
    text = 'the <extra_id_0> of a <extra_id_99> string <extra_id_1>s'
    [ids] = vocabulary.encode([text])
    assert (
        [i for i in ids if i >= 1000]
        == [(vocabulary.size - 1 - i) for i in (0, 99, 1)]
        == [1099, 1000, 1098]
    )
    assert vocabulary.decode(ids) == text
    assert vocabulary.encode(['plain words']) == plain.encode(['plain words'])


def test_baked_in_extra_ids_are_not_doubled(model):
    own = vocabularies.SentencePieceVocabulary(model)
    baked = vocabularies.SentencePieceVocabulary(own._processor.serialized_model_proto())
    assert (baked.size, baked.num_extra_ids) == (1100, 100)
    text = ['a <extra_id_5> b']
    assert baked.encode(text) == own.encode(text)


# What SeqIO (seqio-nightly, encode and encode_tf) makes of a text, and what transformers 4.57.6 (T5TokenizerFast
# and T5Tokenizer) and 5.23.0 make of it by default; S0 stands for <extra_id_0>. None: each letter is a piece.
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
    """Alone SeqIO counts where it finds the sentinel, with glued_sentinels transformers where SeqIO does not."""
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
    """(text, whether each sentinel that SeqIO finds has a space, a sentinel or nothing after it)."""
    random = np.random.default_rng(0)
    words = ' '.join(text for _, text in documents_of(pydoc)[:50] if text.isascii()).split()
    words = [word for word in words if '<' not in word]
    for _ in range(count):
        sentinels = [f'<extra_id_{i}>' for i in random.integers(0, 100, 4)]
        parts = list(random.choice([*random.choice(words, 8), *sentinels], 10))
        yield ''.join(part + ' ' * int(random.integers(0, 3)) for part in parts)


def test_texts_are_encoded_as_seqio_does(pydoc, model, vocabulary, tmp_path):
    seqio = pytest.importorskip('seqio', reason="SeqIO is not installed: pip install -e '.[peers]'")
    (tmp_path / 'spiece.model').write_bytes(model)
    theirs = seqio.SentencePieceVocabulary(str(tmp_path / 'spiece.model'), extra_ids=100)
    texts = [text for text, *_ in SENTINELS_IN_TEXT] + [*random_texts_with_sentinels(pydoc)]
    assert vocabulary.encode(texts) == [list(map(int, theirs.encode(text))) for text in texts]


def test_glued_sentinels_are_those_of_transformers(pydoc, model, vocabulary, tmp_path):
    reason = "transformers is not installed: pip install -e '.[peers]'"
    transformers = pytest.importorskip('transformers', reason=reason)
    (tmp_path / 'spiece.model').write_bytes(model)
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


def test_training_gives_the_same_model_on_any_number_of_cores(pydoc, model):
    texts = [text for _, text in documents_of(pydoc)[::10]]
    cores = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cores)})
        assert vocabularies.train_vocabulary(texts, 1000) == model
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


def test_find_vocabulary(tmp_path, pydoc, model):
    model_file, workdir = tmp_path / 'own.model', tmp_path / 'run'
    model_file.write_bytes(model)
    folder = tmp_path / 'published'
    folder.mkdir()
    (folder / 'spiece.model').write_bytes(model)
    byte = vocabularies.find_vocabulary_of_run(
        make_config(vocabulary='bytes', extra_ids=0), str(workdir), pydoc, 384
    )
    assert (byte.size, byte.model) == (259, b'')

    trained = vocabularies.find_vocabulary_of_run(make_config(), str(workdir), pydoc, 32128)
    assert not workdir.exists()
    workdir.mkdir()
    (workdir / 'vocabulary.model').write_bytes(trained.model)
    kept = vocabularies.find_vocabulary_of_run(make_config(), str(workdir), None, 32128)
    assert (kept.model, kept.hash) == (trained.model, trained.hash)
    with pytest.raises(ValueError, match='own.model.*is not .*vocabulary.model: use that'):
        vocabularies.find_vocabulary_of_run(
            make_config(vocabulary=str(model_file)), str(workdir), pydoc, 32128
        )

    for path in (model_file, folder):
        config = make_config(vocabulary=str(path))
        found = vocabularies.find_vocabulary_of_run(config, str(tmp_path / path.stem), pydoc, 32128)
        assert found.model == model and not (tmp_path / path.stem / 'vocabulary.model').exists()
    hashes = {vocabularies.SentencePieceVocabulary(model, n).hash for n in (0, 100)}
    assert len(hashes | {kept.hash, byte.hash, vocabularies.ByteVocabulary(100).hash}) == 5


def test_the_folders_that_hold_a_vocabulary(tmp_path, model, monkeypatch):
    """A run's, a checkpoint's in it, a published model's; the nearest file counts."""
    monkeypatch.setenv('HOME', str(tmp_path))
    run, lone = tmp_path / 'run', tmp_path / 'checkpoint_3'
    (run / 'checkpoint_800').mkdir(parents=True)
    lone.mkdir()
    (run / 'other').mkdir()
    (run / 'vocabulary.model').write_bytes(model)
    for name in (f'{run}', f'{run}/', f'{run}/checkpoint_800', '~/run', f'{run}/other/..'):
        config = make_config(vocabulary=name)
        assert (
            vocabularies.find_vocabulary_of_run(config, tmp_path / 'new', None, 32128).model
            == model
        )
        assert vocabularies.named_vocabulary_file(name).read_bytes() == model
    for folder in (lone, run / 'other', tmp_path / 'nowhere'):
        assert vocabularies.named_vocabulary_file(folder) is None
        with pytest.raises(ValueError, match='vocabulary.model, spiece.model, sentencepiece.model'):
            vocabularies.find_vocabulary_of_run(
                make_config(vocabulary=str(folder)), tmp_path / 'n', None, 32128
            )
    (lone / 'vocabulary.model').write_bytes(model)
    assert vocabularies.named_vocabulary_file(lone) == lone / 'vocabulary.model'
    for name in ('spiece.model', 'sentencepiece.model'):
        folder = tmp_path / name.split('.')[0]
        folder.mkdir()
        (folder / name).write_bytes(model)
        assert vocabularies.named_vocabulary_file(folder) == folder / name


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
    config = make_config(vocabulary=name.replace('{}', str(tmp_path)))
    with pytest.raises(ValueError, match=f'^data.vocabulary=.*: .*{message}'):
        vocabularies.find_vocabulary_of_run(config, tmp_path / 'run', None, 32128)


@pytest.mark.parametrize('content', [None, b'', b'no model', b'\n'])
def test_a_vocabulary_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / 'broken.model'
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match='broken.model'):
        vocabularies.find_vocabulary_of_run(
            make_config(vocabulary=str(path)), str(tmp_path / 'run'), None, 32128
        )
    assert not (tmp_path / 'run').exists()


# Span corruption.


def test_random_spans_helper_matches_t5():
    for case in golden('random_spans_helper'):
        result = tuple(case.pop('result'))
        assert data.random_spans_helper(*case.values()) == result, case


def count_spans(mask):
    return int(np.sum(mask[:, 0]) + np.sum(mask[:, 1:] & ~mask[:, :-1]))


def test_noise_masks_have_t5s_counts_and_structure():
    for case in golden('noise_masks'):
        length, density, mean = (
            case['length'],
            case['noise_density'],
            case['mean_noise_span_length'],
        )
        masks = data.random_spans_noise_mask((16, length), density, mean, length)
        assert masks.shape == (16, length) and masks.dtype == bool
        for mask in masks:
            assert mask.sum() == case['num_noise_tokens'][0]
            assert count_spans(mask[None]) == case['num_noise_spans'][0]
            assert not mask[0] and (mask[-1] or length == 1)


def test_noise_is_uniform_over_all_ways_to_cut():
    lengths = data.random_segments(6000, 5, 3, 'test')  # 4 choose 2: six ways
    ways, counts = np.unique(lengths, axis=0, return_counts=True)
    assert len(ways) == 6 and np.all(ways.sum(axis=1) == 5) and np.all(ways >= 1)
    assert np.all(np.abs(counts - 1000) < 5 * np.sqrt(1000))


def test_full_rows_have_exactly_15_percent_noise_in_spans_of_three():
    masks = data.random_spans_noise_mask((200, 568), 0.15, 3.0, 1)
    assert np.all(masks.sum(axis=1) == 85) and count_spans(masks) == 200 * 28
    assert len(np.unique(masks, axis=0)) == 200
    # Everywhere but at the ends a token is noise as often as any other.
    assert np.abs(masks[:, 50:500].mean() - 0.15) < 0.01


def test_masks_stay_possible_where_t5_fails():
    for length in range(1, 30):
        mask = data.random_spans_noise_mask((2, length), 0.5, 1.0, length)
        assert not mask[:, 0].any()


def test_unique_sentinels_match_t5():
    for case in golden('denoise_fns'):
        tokens, mask = np.array([case['tokens']], np.int32), np.array([case['noise_mask']])
        for key, spans in (('noise', mask), ('nonnoise', ~mask)):
            found = data.noise_span_to_unique_sentinel(tokens, spans, case['vocab_size'])
            assert found[0].tolist() == case[f'{key}_span_to_unique_sentinel']


def test_concatenating_and_splitting_match_seqio():
    case = golden('split_concat')
    documents = [example['targets'] for example in case['examples']]

    def split(tokens):
        return [
            row.tolist() for rows in data.split_tokens(np.array(tokens, int), 8) for row in rows
        ]

    whole = [sum(documents[i : i + 3], []) for i in range(0, len(documents), 3)]
    assert whole == [example['targets'] for example in case['reduce_concat_batch3']]
    for key, groups in (('split_tokens_max8', documents), ('concat3_then_split8', whole)):
        expected = [example['targets'] for example in case[key]]
        assert [piece for tokens in groups for piece in split(tokens)] == expected


def test_append_eos_after_trim_matches_seqio():
    for case in golden('append_eos'):
        for example, expected in zip(case['examples'], case['append_eos_after_trim'], strict=True):
            for key in ('inputs', 'targets'):
                if case[f'{key}_add_eos']:
                    length = (case['sequence_length'] or {}).get(key)
                    tokens = np.array([example[key]], np.int32)
                    assert data.append_eos_after_trim(tokens, length)[0].tolist() == expected[key]


def test_select_random_chunk_takes_aligned_chunks():
    ids = list(range(2 * data.MAX_DOCUMENT_TOKENS + 5))
    lengths, starts = set(), set()
    for i in range(30):
        chunk = data.select_random_chunk(ids, i)
        starts.add(chunk[0])
        lengths.add(len(chunk))
    assert starts == {0, 65536, 131072} and lengths == {65536, 5}
    assert data.select_random_chunk(ids[:65536], 0) == ids[:65536]


def test_corrupted_rows_match_seqio(oracle_vocabulary):
    """Counts of rows and their lengths are SeqIO's, and both sides un-corrupt to the same ids."""
    case = golden('span_corruption_e2e')
    vocabulary = vocabularies.SentencePieceVocabulary(oracle_vocabulary)
    assert vocabulary.size == case['vocab_size']
    assert vocabulary.encode(case['docs']) == case['tokenized']
    config = make_config(**{'lengths.inputs': 32, 'lengths.targets': 16})
    assert data.span_corruption_sizes(config, vocabulary)[0] == case['raw_tokens_length']
    tokens = np.array(sum(case['tokenized'], []), np.int32)
    sentinels, rows = sentinels_of(vocabulary), []
    for pieces in data.split_tokens(tokens, case['raw_tokens_length']):
        inputs, targets = data.span_corruption(pieces, config, vocabulary.size, 0)
        rows += zip(inputs.tolist(), targets.tolist(), strict=True)
    for ours, theirs in zip(rows, case['outputs'], strict=True):
        assert [len(part) for part in ours] == [len(theirs['inputs']), len(theirs['targets'])]
        raw = uncorrupt(theirs['inputs'][:-1], theirs['targets'][:-1], sentinels)
        assert uncorrupt(ours[0][:-1], ours[1][:-1], sentinels) == raw


def test_features_are_shifted_and_weighted(pydoc, vocabulary):
    """SeqIO's rule for rows that are not packed: the shifted input keeps the EOS after the last target."""
    config = make_config(**{'lengths.inputs': 70, 'lengths.targets': 40})
    for batch in take(data.Stream(pydoc, 'train', vocabulary, config, 4, 0), 5):
        assert all(array.dtype == np.int32 for array in batch.values())
        assert batch['encoder_input_tokens'].shape == (4, 70)
        for row, targets in enumerate(batch['decoder_target_tokens'].tolist()):
            length = targets.index(vocabularies.EOS_ID) + 1
            assert not any(targets[length:]) and len(targets) == 40
            assert batch['decoder_input_tokens'][row].tolist() == [0, *targets[:-1]]
            weights = batch['decoder_loss_weights'][row].tolist()
            assert weights == [1] * length + [0] * (40 - length)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'task': 'span_coruption'}, 'use span_corruption'),
        ({'files': __file__, 'text_field': ''}, "text_field='' names no field"),
        ({'files': __file__, 'on_bad_line': 'ignore'}, "'ignore': must be 'stop' or 'skip'"),
        ({'files': __file__, 'max_bad_fraction': 1.5}, 'max_bad_fraction=1.5: must be in'),
        ({'files': __file__, 'validation_files': __file__}, 'a file is for one split'),
        ({'files': '', 'validation_files': __file__}, 'needs data.files'),
        ({'files': __file__, 'validation_files': 'no/*'}, "validation_files: 'no/\\*' matches no"),
        ({'lengths.targets': 13}, 'lengths.targets=13: too short .*use 14'),
        ({'lengths.inputs': 2048, 'lengths.targets': 456}, '114 noise spans.*100 sentinels'),
        ({'noise_density': 15.0}, 'noise_density=15.0'),
        ({'files': 'nowhere/*.txt'}, "'nowhere/\\*.txt' matches no file"),
        ({'validation_fraction': 0.0}, "no document is in split 'validation'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(pydoc, vocabulary, changes, message):
    config = make_config(**changes)
    with pytest.raises(ValueError, match=message):
        source = (
            sources.open_source(config)
            if config.files or config.validation_files
            else sources.in_memory('', documents_of(pydoc), 0.0)
        )
        data.Stream(source, 'validation', vocabulary, config, 2, 0)


@pytest.mark.parametrize('density', [0.01, 0.15, 0.5, 0.99])
@pytest.mark.parametrize('mean', [1.0, 3.0, 20.0])
@pytest.mark.parametrize('length', [3, 4, 8])
def test_short_rows_train_and_evaluate(pydoc, vocabulary, density, mean, length):
    """From three tokens on, with the shortest targets allowed: every full row has text to predict."""
    lengths = {'lengths.inputs': length, 'lengths.targets': 2}
    noise = {'noise_density': density, 'mean_noise_span_length': mean}
    with pytest.raises(ValueError, match='too short for the inputs; use') as error:
        data.span_corruption_sizes(make_config(**lengths, **noise), vocabulary)
    lengths['lengths.targets'] = int(str(error.value).split('use ')[1].split()[0])
    config = make_config(**lengths, **noise)
    for split in ('train', 'validation'):
        stream = data.Stream(pydoc, split, vocabulary, config, 2, 0)
        for batch in take(stream, 3):
            targets = batch['decoder_target_tokens']
            assert np.all(targets[:, 0] == vocabulary.size - 1)
            is_text = (targets > vocabularies.EOS_ID) & (targets < stream.first_sentinel)
            assert is_text.any()
            assert np.all((targets == vocabularies.EOS_ID).sum(axis=1) == 1)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'lengths.inputs': -1}, 'lengths.inputs=-1 is too short: .*: use 3 or more'),
        ({'lengths.inputs': 0}, 'lengths.inputs=0 is too short: .*: use 3 or more'),
        ({'lengths.inputs': 2}, 'lengths.inputs=2 is too short: .*: use 3 or more'),
        ({'lengths.inputs': 10**12}, 'lengths.inputs=1000000000000 is too long: use 1,048,576'),
        ({'lengths.targets': -1}, 'lengths.targets=-1: too short for the inputs; use 14'),
        ({'lengths.targets': 0}, 'lengths.targets=0: too short for the inputs; use 14'),
        ({'lengths.targets': 10**12}, 'lengths.targets=1000000000000 is too long: use 1,048,576'),
        ({'noise_density': 0.0}, r'noise_density=0.0, .*must lie in \(0, 1\)'),
        ({'noise_density': 1.0}, r'noise_density=1.0, .*must lie in \(0, 1\)'),
        ({'noise_density': float('nan')}, r'noise_density=nan, .*must lie in \(0, 1\)'),
        ({'noise_density': float('inf')}, r'noise_density=inf, .*must lie in \(0, 1\)'),
        ({'mean_noise_span_length': 0.5}, 'span_length=0.5: .* be 1 or more and finite'),
        ({'mean_noise_span_length': float('nan')}, 'span_length=nan: .* be 1 or more and finite'),
        ({'mean_noise_span_length': float('inf')}, 'span_length=inf: .* be 1 or more and finite'),
        (
            {'noise_density': 1 - 1e-12, 'mean_noise_span_length': 1e12},
            'would hold 1,048,576 tokens or more before the corruption: lower the density',
        ),
        ({'validation_fraction': 0.0}, 'validation_fraction=0.0: both splits need documents'),
    ],
)
def test_sizes_that_cannot_be_are_refused(pydoc, vocabulary, changes, message):
    source = dataclasses.replace(
        pydoc, validation_fraction=changes.get('validation_fraction', 0.01)
    )
    with pytest.raises(ValueError, match=message) as error:
        data.Stream(source, 'validation', vocabulary, make_config(**changes), 2, 0)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('fraction', [-1.0, 2.0, float('nan'), float('inf')])
def test_fractions_that_cannot_be_are_refused(fraction):
    with pytest.raises(ValueError, match='data.validation_fraction=.*: must lie in'):
        sources.open_source(make_config(validation_fraction=fraction))
    with pytest.raises(ValueError, match='data.max_bad_fraction=.*: must be in'):
        sources.open_source(make_config(max_bad_fraction=fraction))


def test_all_documents_for_validation_leave_none_to_train_on(pydoc, vocabulary):
    source = dataclasses.replace(pydoc, validation_fraction=1.0)
    with pytest.raises(ValueError, match="no document is in split 'train' .*=1.0: both splits"):
        data.Stream(source, 'train', vocabulary, make_config(), 2, 0)


def test_sentinels_are_enough_or_the_settings_refused(pydoc, model):
    for extra_ids in (-1, 10**9):
        for name in ('', 'bytes'):
            config = make_config(extra_ids=extra_ids, vocabulary=name)
            with pytest.raises(ValueError, match=r'data.extra_ids=.*: must lie in \[0, 100,000\]'):
                vocabularies.find_vocabulary_of_run(config, 'nowhere', pydoc, 32128, model)
    plain = vocabularies.SentencePieceVocabulary(model, extra_ids=0)
    with pytest.raises(ValueError, match='data.extra_ids=0: .* this vocabulary has none: use 3'):
        data.Stream(pydoc, 'train', plain, make_config(), 2, 0)
    few = vocabularies.SentencePieceVocabulary(model, extra_ids=2)
    with pytest.raises(ValueError, match='3 noise spans for 2 sentinels: use shorter inputs'):
        data.Stream(pydoc, 'train', few, make_config(), 2, 0)
    data.Stream(pydoc, 'train', vocabularies.SentencePieceVocabulary(model, 3), make_config(), 2, 0)
    long_rows = make_config(**{'lengths.inputs': 4096, 'lengths.targets': 1000})
    with pytest.raises(ValueError, match='227 noise spans for 128 sentinels'):  # ASCII's bytes
        data.Stream(pydoc, 'train', vocabularies.ByteVocabulary(), long_rows, 2, 0)


@pytest.mark.parametrize(
    'num_pieces, texts, message',
    [
        (-1, ['some letters'], r'num_pieces=-1: must lie in \[1, 1,000,000\]'),
        (0, ['some letters'], r'num_pieces=0: must lie in \[1, 1,000,000\]'),
        (10**12, ['some letters'], r'num_pieces=1000000000000: must lie in \[1, 1,000,000\]'),
        (1, ['some letters'], 'num_pieces=1: pad, EOS and unknown are pieces, too: use 4 or more'),
        (4, ['some letters'], 'num_pieces=4: a piece for each character.* are 11: use 11 or more'),
        (50, [], 'num_pieces=50: the corpus has no text to train a vocabulary on'),
        (50, ['  '], 'num_pieces=50: the corpus has no text to train a vocabulary on'),
    ],
)
def test_a_vocabulary_that_cannot_be_trained_says_why(num_pieces, texts, message):
    with pytest.raises(ValueError, match=message) as error:
        vocabularies.train_vocabulary(texts, num_pieces)
    assert '\n' not in str(error.value)


def test_byte_vocabulary_may_have_more_spans_than_it_has_extra_ids(pydoc):
    config = make_config(vocabulary='bytes', extra_ids=0)
    vocabulary = vocabularies.find_vocabulary_of_run(config, '', pydoc, 384)
    batch = next(data.Stream(pydoc, 'train', vocabulary, config, 2, 0))
    assert batch['decoder_target_tokens'][:, 0].tolist() == [258, 258]


# Sources.


def epoch_documents(source, epoch=0, num_lanes=3, splits=('train', 'validation'), seed=0):
    return [
        [(name, text) for *_, name, text in source.documents(split, epoch, lane, num_lanes, seed)]
        for split in splits
        for lane in range(num_lanes)
    ]


def test_pydoc_is_two_megabytes_of_distinct_prose(pydoc):
    texts = [text for _, text in documents_of(pydoc)]
    size = sum(map(len, texts))
    assert 1_500_000 < size < 4_000_000 and len(texts) > 5000
    assert len(set(texts)) == len(texts) and all(text == ' '.join(text.split()) for text in texts)
    letters = sum(c.isalpha() or c == ' ' for text in texts for c in text)
    assert letters > 0.85 * size
    assert 'json.decoder.decode' in dict(documents_of(pydoc))
    again = sources.open_source(make_config())
    assert documents_of(again) == documents_of(pydoc) and again.fingerprint == pydoc.fingerprint
    assert sources.in_memory('', documents_of(pydoc)[:-1], 0.01).fingerprint != pydoc.fingerprint


def test_pydoc_without_help_topics(monkeypatch):
    """Some distributions leave pydoc_data out, the package and all."""
    monkeypatch.setitem(sys.modules, 'pydoc_data', None)
    monkeypatch.delitem(sys.modules, 'pydoc_data.topics', raising=False)
    names = [name for name, _ in sources.pydoc_documents()]
    assert len(names) > 5000 and not any(name.startswith('topics.') for name in names)


def test_every_pydoc_document_comes_once_per_epoch(pydoc):
    first, second = (sum(epoch_documents(pydoc, epoch), []) for epoch in (0, 1))
    assert sorted(first) == sorted(second) == sorted(documents_of(pydoc))
    assert first != second and first != sorted(first)


def test_splits_are_disjoint_and_sized_as_asked(pydoc):
    train, validation = (
        {text for lane in epoch_documents(pydoc, splits=[split]) for _, text in lane}
        for split in ('train', 'validation')
    )
    assert not train & validation
    assert 0.005 < len(validation) / len(train) < 0.015
    twice = sources.in_memory('', [('a', 'same text'), ('b', 'same text')], 0.5)
    assert [] in epoch_documents(twice, num_lanes=1)


def write_random_text(folder, random):
    """Files of lines of every kind; returns {name: text} of what must be read from them."""
    expected, letters = {}, ['a', 'b ', 'é', '日', '😀', '\u2028', '\x0b', ' ']
    for number in range(random.integers(1, 5)):
        path, content = folder / f'{number}.txt', b''
        for _ in range(random.integers(0, 12)):
            size = random.choice([0, 1, 5, 200])
            text = ''.join(random.choice(letters, size))
            if text.strip():
                expected[f'{path}:{len(content)}'] = text.strip()
            content += text.encode() + random.choice([b'\n', b'\r\n', b'\n\n', b'\n \n'])
        path.write_bytes((content.rstrip(b'\n') if random.integers(2) else content) or b'\n')
    return expected


@pytest.mark.parametrize('block_bytes', [1, 3, 16, 1000])
def test_every_line_of_random_files_comes_once_per_epoch(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(sources, 'MAX_BLOCK_BYTES', block_bytes)
    monkeypatch.setattr(sources, 'MIN_BLOCKS', 1)
    random = np.random.default_rng(block_bytes)
    for trial in range(12):
        folder = tmp_path / str(trial)
        folder.mkdir()
        expected = write_random_text(folder, random)
        source = sources.open_source(make_config(files=f'{folder}/*.txt', validation_fraction=0.3))
        found = sum(epoch_documents(source, epoch=trial), [])
        assert sorted(found) == sorted(expected.items())


def test_text_files_are_found_once_and_shuffled_over_lanes(tmp_path):
    lines = [f'line number {i}' for i in range(3000)]
    for part in range(3):
        (tmp_path / f'{part}.txt').write_text('\n'.join(lines[part::3]))
    files = f'{tmp_path}/0.txt, {tmp_path}/*.txt'
    source = sources.open_source(make_config(files=files, validation_fraction=0.1))
    lanes = epoch_documents(source, num_lanes=8, splits=['train'])
    assert all(200 < len(lane) < 500 for lane in lanes)
    other = epoch_documents(source, num_lanes=8, splits=['train'], epoch=1)
    assert sorted(sum(lanes, [])) == sorted(sum(other, [])) and lanes != other
    validation = sum(epoch_documents(source, splits=['validation']), [])
    assert sorted(text for _, text in sum(lanes, []) + validation) == sorted(lines)
    assert source.fingerprint == sources.open_source(make_config(files=files)).fingerprint
    (tmp_path / '2.txt').write_text('shorter')
    assert source.fingerprint != sources.open_source(make_config(files=files)).fingerprint


def test_a_lane_goes_on_from_any_document(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'MIN_BLOCKS', 64)
    (tmp_path / 'a.txt').write_text('\n'.join(f'line number {i}' for i in range(300)))
    source = sources.open_source(make_config(files=str(tmp_path / 'a.txt')))
    documents = list(source.documents('train', 2, 1, 2, 7))
    assert len({unit for unit, *_ in documents}) > 2
    for i, (unit, index, *_) in enumerate(documents):
        assert list(source.documents('train', 2, 1, 2, 7, unit, index)) == documents[i:]
        assert list(source.documents('train', 2, 1, 2, 7, unit, index + 1)) == documents[i + 1 :]


def write_shards(folder, sizes, kind='.jsonl.gz', start=0):
    """Files of `sizes` lines each, one of them blank; {name: text} of their documents."""
    expected, number = {}, itertools.count(start)
    for shard, size in enumerate(sizes):
        path, content = folder / f'{shard:02}{kind}', b''
        for line in range(size):
            text, is_gzipped = f'document {next(number)} é', kind.endswith('.gz')
            if line == 1:
                content += b' \r\n'
                continue
            expected[f'{path}:{line + 1 if is_gzipped else len(content)}'] = text
            record = json.dumps({'url': 'u', 'text': text}) if '.json' in kind else text
            content += record.encode() + b'\n'
        path.write_bytes(gzip.compress(content) if is_gzipped else content)
    return expected


@pytest.mark.parametrize('kind', ['.txt', '.jsonl', '.json', '.txt.gz', '.jsonl.gz', '.json.gz'])
def test_every_kind_of_file_is_read(tmp_path, kind):
    expected = write_shards(tmp_path, [7, 1, 30], kind)
    source = sources.open_source(make_config(files=f'{tmp_path}/*{kind}'))
    assert source.corpus == 'files'
    assert sorted(sum(epoch_documents(source), [])) == sorted(expected.items())


def test_files_of_another_split(tmp_path, pydoc):
    train, validation = tmp_path / 'train', tmp_path / 'validation'
    train.mkdir()
    validation.mkdir()
    expected = {
        'train': write_shards(train, [40, 9]),
        'validation': write_shards(validation, [20], '.txt', start=30),  # some texts are in both
    }
    files = {'files': f'{train}/*.gz', 'validation_files': f'{validation}/*'}
    source = sources.open_source(make_config(**files))
    for split, documents in expected.items():
        found = sum(epoch_documents(source, splits=[split]), [])
        assert sorted(found) == sorted(documents.items())
    train_only = sources.open_source(make_config(files=files['files']))
    fingerprints = {source.fingerprint, train_only.fingerprint}
    assert len(fingerprints) == 2
    (validation / '00.txt').write_text('shorter')
    assert sources.open_source(make_config(**files)).fingerprint not in fingerprints


def test_c4_without_files_is_pydoc_and_says_so(pydoc):
    c4 = sources.open_source(make_config(task='c4_v220_span_corruption'))
    assert (pydoc.corpus, c4.corpus) == ('pydoc', 'pydoc instead of C4')
    assert c4.fingerprint == pydoc.fingerprint


def test_gzipped_and_plain_files_do_not_mix(tmp_path):
    write_shards(tmp_path, [3], '.txt')
    write_shards(tmp_path, [3], '.txt.gz')
    with pytest.raises(ValueError, match='00.txt.gz is gzipped, .*00.txt is not: gzip all'):
        sources.open_source(make_config(files=f'{tmp_path}/*'))


# Faults: a good file, and beside it one whose fourth line cannot be read.

BAD_LINES = {
    'json': [
        (b'{"text": "cut', 'no JSON: Unterminated string starting at at character 10; correct it'),
        (b'plain words', 'no JSON: Expecting value at character 1; correct it'),
        (b'["text"]', """'["text"]' is no JSON object; write {"text": ...}"""),
        (b'{"txt": "", "url": ""}', "no field 'text', its fields are: 'txt', 'url'; set data.text"),
        (b'{}', "no field 'text', its fields are: none; set data.text_field"),
        (b'{"text": 7}', "field 'text' is 7, no string; set data.text_field"),
        (b'{"text": null}', "field 'text' is None, no string; set data.text_field"),
        (b'{"text": "\\ud800"}', "field 'text' holds half a surrogate pair; correct it"),
        (b'{"text": "\xff"}', 'byte 11 is not UTF-8; convert the file'),
        (b'{"text": ' + b'[' * 100_000, 'JSON that is nested too deeply; correct it'),
        (b'{"text": ' + b'1' * 5000 + b'}', 'Exceeds the limit'),
    ],
    'txt': [(b'sch\xf6n', 'byte 4 is not UTF-8; convert the file')],
}
GZIP_HEADER = gzip.compress(b'')[:10]
BROKEN_GZIPS = {
    'truncated': (lambda good, rest: good + gzip.compress(rest)[:-9], 'Compressed file ended'),
    'no checksum': (lambda good, rest: good[:-8], 'Compressed file ended before'),
    'crc': (lambda good, rest: good[:-8] + b'\1\2\3\4' + good[-4:], 'CRC check failed'),
    'deflate': (lambda good, rest: good + GZIP_HEADER + b'\xff' * 99, 'Error -3 while decompress'),
    'garbage': (lambda good, rest: good + b'garbage', 'Not a gzipped file'),
}
GOOD_LINES = {
    'txt': [b'first', b'', b'third', b'fifth'],
    'json': [b'{"text": "first"}', b'', b'{"text": "third"}', b'{"text": "fifth"}'],
}
FAULTS = [
    *[(kind + gz, *bad) for kind in BAD_LINES for gz in ('', '.gz') for bad in BAD_LINES[kind]],
    *[(f'{kind}.gz', *broken) for kind in BAD_LINES for broken in BROKEN_GZIPS.values()],
]


def check_fault(folder, kind, message, line, left):
    """It stops the run, or is left out, told and counted once however often it is read."""
    files = {'files': f'{folder}/*.{kind}', 'validation_fraction': 0.3}
    message = f'line {line} of {folder}/bad.{kind}: {message}'
    with pytest.raises(ValueError) as error:
        epoch_documents(sources.open_source(make_config(**files)))
    assert str(error.value).startswith(f'data.on_bad_line=stop (skip leaves it out): {message}')
    assert '\n' not in str(error.value)
    source = sources.open_source(make_config(**files, on_bad_line='skip'))
    for epoch in range(2):
        texts = [text for _, text in sum(epoch_documents(source, epoch, num_lanes=2), [])]
        assert sorted(texts) == sorted([f'good {i}' for i in range(20)] + left)
    messages, count = source.faults()
    assert len(messages) == count == 1 and messages[0].startswith(message)
    assert source.faults() == ([], 1)


def write_good_file(folder, kind):
    texts = [f'good {i}' for i in range(20)]
    lines = [json.dumps({'text': text}) if 'json' in kind else text for text in texts]
    write = gzip.open if kind.endswith('.gz') else open
    with write(folder / f'good.{kind}', 'wb') as file:
        file.write('\n'.join(lines).encode())


@pytest.mark.parametrize('kind, bad, message', FAULTS)
def test_a_bad_line_is_named_and_stops_or_is_left_out(tmp_path, kind, bad, message):
    write_good_file(tmp_path, kind)
    *good, last = GOOD_LINES[kind.removesuffix('.gz')]
    good, left = b''.join(line + b'\n' for line in good), ['first', 'third']
    if callable(bad):
        content, message = bad(gzip.compress(good), last), f'broken gzip ({message}'
    else:
        content, left = good + bad + b'\n' + last + b'\n', [*left, 'fifth']
        content = gzip.compress(content) if kind.endswith('.gz') else content
    (tmp_path / f'bad.{kind}').write_bytes(content)
    check_fault(tmp_path, kind, message, 4, left)


@pytest.mark.parametrize(
    'kind, content',
    [(kind, b'') for kind in ('txt', 'json', 'txt.gz', 'json.gz')]
    + [(kind, gzip.compress(b'', mtime=0)) for kind in ('txt.gz', 'json.gz')],
)
def test_an_empty_file_is_a_fault(tmp_path, kind, content):
    write_good_file(tmp_path, kind)
    (tmp_path / f'bad.{kind}').write_bytes(content)
    check_fault(tmp_path, kind, 'the file is empty; copy it again, or remove it', 1, [])
    (tmp_path / f'good.{kind}').unlink()
    if not content:
        with pytest.raises(ValueError, match='matches empty files only'):
            sources.open_source(make_config(files=f'{tmp_path}/*', on_bad_line='skip'))


@pytest.mark.parametrize('size', [100, 70_000])
def test_the_line_of_a_fault_far_inside_a_file(tmp_path, size, monkeypatch):
    monkeypatch.setattr(sources, 'MIN_BLOCKS', 64)
    lines = [b'%d ' % i + b'x' * size for i in range(40)]
    lines[33] = b'\xff'
    (tmp_path / 'a.txt').write_bytes(b'\n'.join(lines))
    with pytest.raises(ValueError, match='line 34 of .*a.txt: byte 1 is not UTF-8'):
        epoch_documents(sources.open_source(make_config(files=f'{tmp_path}/a.txt')))
    whole = gzip.compress(b'\n'.join(lines[:33]))
    half = whole[: len(whole) // 2]
    (tmp_path / 'a.txt.gz').write_bytes(half)
    line = zlib.decompressobj(31).decompress(half).count(b'\n') + 1
    with pytest.raises(ValueError, match=f'line {line} of .*a.txt.gz: broken gzip'):
        epoch_documents(sources.open_source(make_config(files=f'{tmp_path}/a.txt.gz')))


@pytest.mark.parametrize('kind', ['.jsonl', '.jsonl.gz'])
@pytest.mark.parametrize(
    'num_bad, fraction, allowed', [(10, 0.0, 10), (11, 0.001, 10), (30, 0.05, 30)]
)
def test_bad_lines_must_be_few(tmp_path, kind, num_bad, fraction, allowed):
    lines = [b'{"text": "good"}'] * 2000
    for i in range(num_bad):
        lines[50 * i + 60] = b'{}'
    content = b'\n'.join(lines)
    path = tmp_path / f'a{kind}'
    path.write_bytes(gzip.compress(content) if kind.endswith('.gz') else content)
    config = make_config(files=str(path), on_bad_line='skip', max_bad_fraction=fraction)
    source = sources.open_source(config)
    if num_bad > allowed:
        rule = (
            rf'11 bad lines among the [\d,]+ read, more than 10 \(data.max_bad_fraction={fraction}'
        )
        with pytest.raises(ValueError, match=rule + r', or 10\): .* line \d+ of .*: no field'):
            epoch_documents(source, num_lanes=1, splits=['train'])
    else:
        for epoch in range(3):
            epoch_documents(source, epoch, num_lanes=1)
        messages, count = source.faults()
        assert count == num_bad and len(messages) == 10  # the last ten are told
        assert all('line' in message and 'no field' in message for message in messages)


# The names of files.


@pytest.mark.parametrize(
    'name',
    [
        'plain.txt',
        './plain.txt',
        'folder/../plain.txt',
        '~/plain.txt',
        'plain.txt/',
        ' plain.txt ',
        'with space é日.txt',
        'a, comma.txt',
        'link.txt',
        'set[1].txt',
        'folder[1]/*.txt',
        'fold*/inside.txt',
        '*ain.txt, ,plain.txt',
    ],
)
def test_names_of_files(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'folder[1]').mkdir()
    for path in ('plain.txt', 'with space é日.txt', 'a, comma.txt', 'set[1].txt', 'set1.txt'):
        (tmp_path / path).write_text(path)
    (tmp_path / 'folder[1]/inside.txt').write_text('plain.txt')
    (tmp_path / 'folder/other.txt').write_text('other')
    (tmp_path / 'link.txt').symlink_to('plain.txt')
    source = sources.open_source(make_config(files=name))
    [file] = source.files
    assert file.split == 'train' and os.path.isabs(file.path) and '..' not in file.path
    text = name if ' ' in name.strip() and '*' not in name or '[1].' in name else 'plain.txt'
    assert [text for _, text in documents_of(source)] == [text.strip()]


@pytest.mark.parametrize('key', ['files', 'validation_files'])
@pytest.mark.parametrize(
    'name, message',
    [
        (',,', "=',,' names no file: name one, or set it to ''"),
        (' , ', "=' , ' names no file: name one, or set it to ''"),
        ('  ', "='  ' names no file: name one, or set it to ''"),
        ('http://a.b/c.txt', ": 'http://a.b/c.txt' is not on a disk"),
        ('gs://a/b*.txt', ": 'gs://a/b*.txt' is not on a disk"),
        ('{}/folder', ": '{}/folder' is a folder: name its files: {}/folder/*.txt"),
        ('{}/folder/', ": '{}/folder/' is a folder: name its files: {}/folder/*.txt"),
        ('{}/fold*', ": '{}/fold*' matches no file; correct it"),
        ('{}/loop.txt', ': {}/loop.txt cannot be opened (Too many levels of symbolic links)'),
        ('{}/loop*', ': {}/loop.txt cannot be opened (Too many levels of symbolic links)'),
        ('{}/gone*', ': {}/gone.txt is a link to nothing, or no regular file: restore it'),
        ('{}/gone.txt', ': {}/gone.txt is a link to nothing, or no regular file: restore it'),
        ('/dev/null', ': /dev/null is a link to nothing, or no regular file: restore it'),
        ('{}/lfs.txt', ': {}/lfs.txt is a pointer of git-lfs, not the file itself: run `git lfs'),
        ('~nobody-here/a.txt', ': ~nobody-here/a.txt: there is no such home folder'),
        ('{}/empty*', "='{}/empty*' matches empty files only"),
        ('{}/secret.txt', ': {}/secret.txt cannot be read (Permission denied): correct its'),
        ('a\0b', ": 'a\\x00b' is no path"),
        ('a' * 5000, 'cannot be opened (File name too long)'),
    ],
)
def test_names_that_cannot_be_read_are_refused(tmp_path, monkeypatch, key, name, message):
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'loop.txt').symlink_to('loop.txt')
    (tmp_path / 'gone.txt').symlink_to('nowhere')
    (tmp_path / 'lfs.txt').write_bytes(LFS_POINTER)
    (tmp_path / 'empty.txt').write_bytes(b'')
    (tmp_path / 'good.txt').write_text('good')
    (tmp_path / 'secret.txt').write_text('secret')
    check_not_lfs = sources.paths.check_not_lfs

    def refuse(path):  # for root, who may read everything
        if path.name == 'secret.txt':
            raise PermissionError(13, 'Permission denied')
        check_not_lfs(path)

    monkeypatch.setattr(sources.paths, 'check_not_lfs', refuse)
    files = {'files': f'{tmp_path}/good.txt', key: name.replace('{}', str(tmp_path))}
    with pytest.raises(ValueError) as error:
        sources.open_source(make_config(**files))
    words = str(error.value)
    assert words.startswith(f'data.{key}') and '\n' not in words
    assert message.replace('{}', str(tmp_path)) in words


@pytest.mark.parametrize('content', [b' \n\n \r\n', '\u3000\n'.encode()])
def test_validation_files_without_a_document_are_named(tmp_path, vocabulary, content):
    (tmp_path / 'train.txt').write_text('some words\n' * 20)
    (tmp_path / 'blank.txt').write_bytes(content)
    config = make_config(files=f'{tmp_path}/train.txt', validation_files=f'{tmp_path}/blank.txt')
    source = sources.open_source(config)
    with pytest.raises(ValueError, match='data.validation_files=.*blank.txt.* holds no document'):
        data.Stream(source, 'validation', vocabulary, config, 2, 0)


@pytest.mark.parametrize('name', ['a.JSONL', 'a.Json', 'a.ndjson', 'a.NDJSON.gz', 'a.json.GZ'])
def test_extensions_in_any_case(tmp_path, name):
    content = b'{"text": "first"}\n{"text": "second"}\n{}\n'
    is_gzipped = name.lower().endswith('gz')
    (tmp_path / name).write_bytes(gzip.compress(content) if is_gzipped else content)
    config = make_config(files=f'{tmp_path}/*', on_bad_line='skip')
    source = sources.open_source(config)
    found = sum(epoch_documents(source), [])
    assert sorted(text for _, text in found) == ['first', 'second']
    assert 'line 3 of' in source.faults()[0][0]


@pytest.mark.parametrize(
    'content, is_told',
    [
        (b'\n{"text": "a"}\n\n{"text": "b"}', True),
        (b'{}\n' * 20 + b'words\n', True),
        (b'{"text": "a"}\nwords\n', False),
        (b'words\n{"text": "a"}\n', False),
        (b'[1]\n2\n', False),
        (b'\n \n', False),
        (b'{"text": "\xff"}\n', False),
        (b'{"a": ' * 100_000, False),
    ],
)
@pytest.mark.parametrize('name', ['a.txt', 'a.txt.gz'])
def test_json_in_a_text_file_is_told(tmp_path, caplog, content, is_told, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith('gz') else content)
    with caplog.at_level('WARNING'):
        sources.open_source(make_config(files=str(path)))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == is_told * [
        f'{path} is read as plain text, but its lines are JSON objects: rename it to .jsonl to read '
        'a field of them'
    ]


def test_a_file_is_of_one_split_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'a.txt').write_text('some words')
    (tmp_path / 'soft.txt').symlink_to('a.txt')
    os.link(tmp_path / 'a.txt', tmp_path / 'hard.jsonl')
    shutil.copy(tmp_path / 'a.txt', tmp_path / 'copy.txt')
    for name in ('./a.txt', 'folder/../a.txt', 'soft.txt', 'hard.jsonl', 'copy.txt'):
        with pytest.raises(ValueError, match=rf'a.txt of data.files and .*{name[-5:]} of data.val'):
            sources.open_source(make_config(files='a.txt', validation_files=name))


# What files hold, not their names, makes a corpus.


def write_corpus(folder, changes=None):
    folder.mkdir(parents=True)
    for i in range(4):
        (folder / f'{i}.txt').write_text('\n'.join(f'line {i} {j}' for j in range(200 - i)))
    for name, text in (changes or {}).items():
        (folder / name).write_text(text)
    return sources.open_source(make_config(files=f'{folder}/*.txt', validation_fraction=0.1))


def test_moved_and_renamed_files_are_the_same_corpus(tmp_path):
    old = write_corpus(tmp_path / 'old')
    new_folder = tmp_path / 'new'
    new_folder.mkdir()
    for i, name in enumerate(['z', 'b', 'y', 'a']):
        shutil.copy(tmp_path / f'old/{i}.txt', new_folder / f'{name}.txt')
    files = ','.join(f'{new_folder}/{name}.txt' for name in 'azby')
    new = sources.open_source(make_config(files=files, validation_fraction=0.1))
    assert new.fingerprint == old.fingerprint and len(old.fingerprint) == 32
    assert [file.content for file in new.files] == [file.content for file in old.files]
    streams = [
        data.Stream(source, 'train', vocabularies.ByteVocabulary(), make_config(), 4, 0)
        for source in (old, new)
    ]
    for _ in range(20):
        assert_equal_batches(*map(next, streams))
    assert sources.describe_changes(old.files_as_json(), new.files_as_json()) == (
        'the files hold what they held'
    )


def test_a_file_of_equal_name_and_size_and_other_content_is_named(tmp_path):
    old = write_corpus(tmp_path / 'run')
    kept = json.loads(json.dumps(old.files_as_json()))
    path = tmp_path / 'run/2.txt'
    path.write_text(path.read_text().replace('line 2 7', 'line 2 8', 1))
    new = sources.open_source(make_config(files=f'{tmp_path}/run/*.txt'))
    assert new.fingerprint != old.fingerprint
    assert sources.describe_changes(kept, new.files_as_json()) == (
        f"the files do not hold what the run's held: {path} (changed): restore those files, or "
        'name another --workdir'
    )


def test_changes_of_files_are_described(tmp_path):
    old = write_corpus(tmp_path / 'a')
    (tmp_path / 'a/0.txt').rename(tmp_path / 'moved.txt')
    (tmp_path / 'a/1.txt').unlink()
    (tmp_path / 'a/3.txt').write_text('changed')
    (tmp_path / 'a/4.txt').write_text('new')
    files = f'{tmp_path}/a/*.txt,{tmp_path}/moved.txt'
    new = sources.open_source(make_config(files=files))
    words = sources.describe_changes(old.files_as_json(), new.files_as_json())
    assert f'{tmp_path}/a/3.txt (changed), {tmp_path}/a/1.txt (missing), ' in words
    assert f'{tmp_path}/a/4.txt (new): restore those files' in words and 'moved' not in words
    many = [{'split': 'train', 'path': f'{i}', 'num_bytes': i, 'digest': ''} for i in range(1234)]
    words = sources.describe_changes(many, old.files_as_json())
    assert words.count('(missing)') == 10 and ' and 1,228 more: restore' in words
    twice = sources.describe_changes(many[:3], many[:3] + many[2:3])
    assert ' 2 (new): restore' in twice


def test_changes_of_pydoc_are_described(pydoc, tmp_path):
    files = write_corpus(tmp_path / 'a').files_as_json()
    assert pydoc.files_as_json() == []
    assert "another Python's documentation: use that Python" in sources.describe_changes([], [])
    assert "from this Python's documentation, not from files" in sources.describe_changes([], files)
    assert '0.txt (missing)' in sources.describe_changes(files, [])
    assert 'kept no list of its files' in sources.describe_changes(None, files)


def test_a_file_moved_to_the_other_split_is_a_change(tmp_path):
    write_corpus(tmp_path / 'a')
    names = [f'{tmp_path}/a/{i}.txt' for i in range(4)]
    fingerprints = set()
    for i in range(4):
        train = ','.join(names[:i] + names[i + 1 :])
        config = make_config(files=train, validation_files=names[i])
        fingerprints.add(sources.open_source(config).fingerprint)
    assert len(fingerprints) == 4


def test_large_files_are_sampled(tmp_path):
    path = tmp_path / 'a.txt'
    size = 3_000_001
    content = bytearray(os.urandom(size))
    digests = set()
    seen = [0, 4095, size - 4096, size - 1, (size - 4096) // 15, 14 * (size - 4096) // 15 + 4095]
    for place in (None, *seen):
        changed = bytearray(content)
        if place is not None:
            changed[place] ^= 1
        path.write_bytes(changed)
        digests.add(sources.content_digest(str(path), size))
    assert len(digests) == 1 + len(seen)
    path.write_bytes(content[: size - 1])
    assert sources.content_digest(str(path), size - 1) not in digests
    path.write_bytes(content[: 1 << 20])
    whole = sources.content_digest(str(path), 1 << 20)
    content[500_000] ^= 1
    path.write_bytes(content[: 1 << 20])
    assert sources.content_digest(str(path), 1 << 20) != whole


# Long lines.


def write_long_and_short_lines(path, random):
    """Lines of 0 to 300 bytes, one of exactly 64: with and without spaces, of one byte and more."""
    alphabets = ['ab ', 'é😀', 'aé日😀 ', 'xyz', 'a\u3000\x0b\t\r ']
    content = b''
    for size in [*random.choice([0, 1, 5, 30, 63, 65, 130, 300], 8), 64]:
        letters = list(alphabets[random.integers(len(alphabets))])
        line = ''.join(random.choice(letters, size)).encode()[:size]
        if size == 64:
            line = b'b' * 63  # with its newline exactly the limit
        content += line + [b'\n', b'\r\n', b'\n\n'][random.integers(3)]
    if random.integers(2):
        content = content.rstrip(b'\n')
    path.write_bytes(content)
    return content


@pytest.mark.parametrize('cut_bytes', [1, 7, 1000])
@pytest.mark.parametrize('block_bytes', [1, 3, 5, 16, 32])
def test_every_byte_of_long_lines_comes_once(tmp_path, monkeypatch, block_bytes, cut_bytes):
    monkeypatch.setattr(sources, 'MAX_LINE_BYTES', 64)
    monkeypatch.setattr(sources, 'CUT_BYTES', cut_bytes)
    monkeypatch.setattr(sources, 'MAX_BLOCK_BYTES', block_bytes)
    monkeypatch.setattr(sources, 'MIN_BLOCKS', 1)
    random = np.random.default_rng(block_bytes)
    for trial in range(15):
        path = tmp_path / f'{trial}.txt'
        content = write_long_and_short_lines(path, random)
        blocks = sources.blocks_of_bytes([str(path)], lambda path, offset, line: (offset, line))
        parts = [part for block in range(blocks.num_blocks) for part in blocks.read(block)]
        assert b''.join(line for _, line in parts) == content
        assert [offset for offset, _ in parts] == np.cumsum(
            [0] + [len(line) for _, line in parts][:-1]
        ).tolist()
        assert all(len(line) <= 64 for _, line in parts)
        short = {line for line in content.splitlines(keepends=True) if len(line) <= 64}
        if b'\r' not in content and b'\x0b' not in content:
            assert short <= {line for _, line in parts}  # they are not cut


def test_a_long_line_is_cut_between_words_and_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'MAX_LINE_BYTES', 64)
    monkeypatch.setattr(sources, 'CUT_BYTES', 16)
    monkeypatch.setattr(sources, 'MIN_BLOCKS', 8)
    words = ' '.join(f'word{i}' for i in range(200))
    characters = ''.join(map(chr, range(0x3041, 0x3041 + 500)))
    for kind, text in (('words', words), ('characters', characters)):
        for name in (f'{kind}.txt', f'{kind}.txt.gz'):
            path = tmp_path / name
            open_file = gzip.open if name.endswith('.gz') else open
            with open_file(path, 'wb') as file:
                file.write(f'first\n{text}\nlast'.encode())
            source = sources.open_source(make_config(files=str(path), validation_fraction=0.2))
            found = sum(epoch_documents(source), [])
            texts = sorted(text for _, text in found)
            assert len(texts) > 20 and 'first' in texts and 'last' in texts
            texts.remove('first')
            texts.remove('last')
            if kind == 'words':
                assert sorted(' '.join(texts).split()) == sorted(words.split())
            else:
                assert sorted(''.join(texts)) == sorted(text)
            splits = [epoch_documents(source, splits=[split]) for split in ('train', 'validation')]
            assert all(any(lanes) for lanes in splits) and all(splits[0])
            if name.endswith('.gz'):
                assert {name.rsplit(':')[-1] for name, _ in found} == {'1', '2', '3'}


def test_a_fault_after_a_long_line_has_its_line_number(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, 'MAX_LINE_BYTES', 64)
    monkeypatch.setattr(sources, 'CUT_BYTES', 16)
    content = b'a b ' * 100 + b'\n' + b'c ' * 100 + b'\xff ' + b'd ' * 100 + b'\nlast\n'
    (tmp_path / 'a.txt').write_bytes(content)
    (tmp_path / 'b.txt.gz').write_bytes(gzip.compress(content))
    (tmp_path / 'c.txt.gz').write_bytes(gzip.compress(content.replace(b'\xff', b'e'))[:-8])
    for name, message in [
        ('a.txt', 'line 2 of .*a.txt: byte .* is not UTF-8'),
        ('b.txt.gz', 'line 2 of .*b.txt.gz: byte .* is not UTF-8'),
        ('c.txt.gz', 'line 4 of .*c.txt.gz: broken gzip'),
    ]:
        with pytest.raises(ValueError, match=message):
            epoch_documents(sources.open_source(make_config(files=f'{tmp_path}/{name}')))


class CountingFile(io.FileIO):
    num_bytes = 0

    def readinto(self, buffer):
        count = super().readinto(buffer)
        CountingFile.num_bytes += count
        return count


@pytest.mark.parametrize('kind', ['txt', 'jsonl'])
def test_a_long_line_is_read_once(tmp_path, monkeypatch, kind):
    """Reading is bounded by what a block has and MAX_LINE_BYTES around it: it is not quadratic."""
    monkeypatch.setattr(sources, 'MAX_LINE_BYTES', 1 << 16)
    monkeypatch.setattr(sources, 'MAX_BLOCK_BYTES', 1 << 14)
    monkeypatch.setattr(sources, 'MIN_BLOCKS', 1)
    monkeypatch.setattr(CountingFile, 'num_bytes', 0)
    monkeypatch.setattr(
        data, 'open', lambda path, mode: io.BufferedReader(CountingFile(path)), raising=False
    )
    text = 'some words ' * 200_000
    path = tmp_path / f'a.{kind}'
    path.write_text(json.dumps({'text': text}) if kind == 'jsonl' else text)
    source = sources.open_source(make_config(files=str(path), validation_fraction=0.0))
    documents = sum(epoch_documents(source, splits=['train']), [])
    assert ' '.join(text for _, text in sorted(documents, key=offset_of)).split() == text.split()
    assert CountingFile.num_bytes < 12 * path.stat().st_size


def offset_of(document):
    return int(document[0].rsplit(':')[-1])


def test_a_file_of_one_long_line_trains(tmp_path, vocabulary):
    """As text8: both splits have documents, and every lane."""
    path = tmp_path / 'a.txt'
    path.write_text(' '.join(f'the word of number {i}' for i in range(100_000)))
    config = make_config(files=str(path))
    source = sources.open_source(config)
    data.Stream(source, 'validation', vocabulary, config, 4, 0)
    batch = next(data.Stream(source, 'train', vocabulary, config, 8, 0))
    assert batch['decoder_loss_weights'].any(axis=1).all()


# Gzipped shards.


@pytest.fixture
def small_pools(monkeypatch):
    monkeypatch.setattr(sources, 'POOL_LINES', 60)
    monkeypatch.setattr(sources, 'MIN_POOL_LINES', 4)


SHARD_SIZES = [40, 3, 1, 77, 250, 12, 0, 31, 18]


@pytest.mark.parametrize(
    'num_lanes, copies', [(1, 1), (1, 4), (2, 4), (4, 1), (8, 1), (9, 1), (10, 1), (15, 1), (40, 1)]
)
def test_every_line_of_shards_comes_once_per_epoch(tmp_path, small_pools, num_lanes, copies):
    """Lanes that share shards, in whatever order they read, give what each gives alone."""
    expected = write_shards(tmp_path, SHARD_SIZES * copies)  # in one round or several
    config = make_config(files=f'{tmp_path}/*', validation_fraction=0.0, on_bad_line='skip')
    source = sources.open_source(config)
    lanes, random, epochs = range(num_lanes), np.random.default_rng(num_lanes), 3
    together = source.open('train', num_lanes, 5, dict.fromkeys(lanes, (0, 0)))
    one_lane = functools.partial(map, together, range(epochs))  # epochs are opened one by one
    reading = {
        lane: itertools.chain.from_iterable(one_lane(itertools.repeat(lane))) for lane in lanes
    }
    found = {lane: [] for lane in lanes}
    while reading:
        lane = int(random.choice(list(reading)))
        documents = list(itertools.islice(reading[lane], int(random.integers(1, 60))))
        found[lane] += documents
        if not documents:
            del reading[lane]
    orders = []
    for epoch in range(epochs):
        alone = [list(source.documents('train', epoch, lane, num_lanes, 5)) for lane in lanes]
        orders.append([document[2:] for own in alone for document in own])
        assert sorted(orders[-1]) == sorted(expected.items())
        for lane in lanes:
            own, found[lane] = found[lane][: len(alone[lane])], found[lane][len(alone[lane]) :]
            assert own == alone[lane]
    assert orders[0] != orders[1] != orders[2] and not any(found.values())


def test_a_lane_of_shards_goes_on_from_any_document(tmp_path, small_pools):
    write_shards(tmp_path, [40, 33, 77, 31, 58])
    source = sources.open_source(make_config(files=f'{tmp_path}/*'))
    for lane, num_lanes in [(0, 1), (1, 2), (0, 8), (7, 8)]:
        documents = list(source.documents('train', 2, lane, num_lanes, 7))
        assert len({unit for unit, *_ in documents}) > 2
        for i, (unit, index, *_) in enumerate(documents):
            rest = source.documents('train', 2, lane, num_lanes, 7, unit, index + 1)
            assert list(rest) == documents[i + 1 :]


def test_a_pool_mixes_sixteen_shards(tmp_path):
    write_shards(tmp_path, [50] * 20)
    source = sources.open_source(make_config(files=f'{tmp_path}/*', validation_fraction=0.0))
    for num_lanes, num_open in [(1, 16), (2, 8), (5, 4), (20, 1)]:
        documents = list(source.documents('train', 0, 0, num_lanes, 0))
        first = {name.split(':')[0] for unit, _, name, _ in documents if unit == 0}
        assert len(first) == num_open


def test_nothing_waits_for_a_lane_that_is_through(tmp_path, small_pools):
    write_shards(tmp_path, [40, 33, 77])
    source = sources.open_source(make_config(files=f'{tmp_path}/*'))
    # As when resuming: lane 2 is in the next epoch, and lane 7 is another process's.
    starts = dict.fromkeys(range(7), (0, 0)) | {2: (1, 0)}
    reader = sources.ShardReader(source.train, 8, 0, starts, keep=lambda *document: document)
    for epoch in range(3):
        lanes = [lane for lane in range(7) if epoch or lane != 2]
        opened = [reader.pools(epoch, lane, 0) for lane in lanes]
        for pools in opened:
            next(pools)
            waiting = sum(len(shard.waiting) for shard in reader.shared.values())
            assert waiting < len(lanes)
        assert not reader.shared  # all have come, so only who reads on holds a shard


def test_lines_wait_for_few_and_not_for_ever():
    """Where one member runs ahead, little is kept for the others; who falls far behind reads alone."""
    num_read = itertools.count()

    def open_lines():
        return ((next(num_read), i) for i in range(100_000))

    def document(line):  # every second one of member 3 is in the other split
        return ('', '') if line[1] % 8 == 7 else ('name', str(line[1]))

    shard = sources.SharedShard(open_lines, document, 4, {0: 0, 1: 7, 3: 0}, 50)
    fast, *slow = (shard.documents(member) for member in (0, 1, 3))
    next(fast)
    assert next(num_read) == 1  # nothing is read ahead
    assert [int(text) for _, text in itertools.islice(fast, 1000)] == list(range(4, 4004, 4))
    assert {i: len(lines) for i, lines in shard.waiting.items()} == {0: 0, 1: 50, 3: 99}
    assert [int(text) for _, text in slow[0]] == list(range(1, 100_000, 4))[7:]
    texts = [text for _, text in slow[1]]
    assert texts == [document((0, i))[1] for i in range(3, 100_000, 4)]
    assert [int(text) for _, text in fast] == list(range(4004, 100_000, 4))


# The stream.


def assert_equal_batches(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key in ours:
        np.testing.assert_array_equal(ours[key], theirs[key])


def take(stream, count):
    return [next(stream) for _ in range(count)]


@pytest.fixture(scope='session')
def long_and_short_documents():
    """Documents of one byte to exactly the 65,536 ids of a whole chunk, in bytes."""
    random = np.random.default_rng(0)
    sizes = [1, 2, 65536, 5000, 30000] + [int(n) for n in random.integers(1, 400, 600)]
    return sources.in_memory(
        '',
        [
            (f'document {i}', bytes(random.integers(97, 123, n, np.uint8)).decode())
            for i, n in enumerate(sizes)
        ],
        0.0,
    )


@pytest.mark.parametrize('kind', ['pydoc', 'long and short'])
def test_no_token_is_lost_or_doubled_in_an_epoch(
    request, pydoc, vocabulary, long_and_short_documents, kind
):
    """Every group's examples un-corrupt to its concatenated documents, cut; describe names them."""
    config = make_config(**{'lengths.inputs': 256, 'lengths.targets': 58})
    source, vocabulary = pydoc, vocabulary
    if kind == 'long and short':
        # The top bytes are its sentinels, as in ByT5; the texts have none of them.
        source, vocabulary = long_and_short_documents, vocabularies.ByteVocabulary()
    expected, names = {}, {}
    for lane in range(3):
        documents = list(source.documents('train', 0, lane, 3, 5))
        unit, index = 0, 0
        for i in range(0, len(documents), 128):
            group = documents[i : i + 128]
            encoded = vocabulary.encode([text for *_, text in group])
            ids = sum(encoded, [])
            name_of_id = [
                name for (*_, name, _), part in zip(group, encoded, strict=True) for _ in part
            ]
            pieces = [tuple(ids[j : j + 284]) for j in range(0, len(ids), 284)]
            for j, piece in enumerate(pieces):
                names[piece] = ', '.join(dict.fromkeys(name_of_id[j * 284 : (j + 1) * 284]))
            expected[lane, 0, unit, index] = pieces
            unit, index = group[-1][0], group[-1][1] + 1

    stream = data.Stream(source, 'train', vocabulary, config, 3, 5, num_epochs=1)
    sentinels, found, position = sentinels_of(vocabulary), {}, stream.position.copy()
    for i, batch in enumerate(stream):
        described = stream.describe(position) if i % 50 == 0 else None
        rows = zip(
            position, batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True
        )
        for lane, (place, inputs, targets) in enumerate(rows):
            if inputs.any():
                raw = tuple(uncorrupt(without_eos(inputs), without_eos(targets), sentinels))
                found.setdefault((lane, *place[:3].tolist()), []).append(raw)
                assert described is None or described[lane] == names[raw]
        position = stream.position.copy()
    assert {place: sorted(pieces) for place, pieces in found.items()} == {
        place: sorted(pieces) for place, pieces in expected.items()
    }
    assert found != expected  # the pieces are shuffled


def test_stream_is_a_function_of_the_seed(pydoc, vocabulary):
    config = make_config()
    hashes = [
        [
            batch_hash(batch)
            for batch in take(data.Stream(pydoc, 'train', vocabulary, config, 4, seed), 5)
        ]
        for seed in (0, 0, 1)
    ]
    assert hashes[0] == hashes[1] and len(set(hashes[0] + hashes[2])) == 10


def test_first_batch_is_the_same_on_every_machine():
    """Pins the stream: numpy, Python and the machine have no part in it."""
    texts = [f'document {i} is about the number {i * i}' for i in range(300)]
    source = sources.in_memory('', [(str(i), text) for i, text in enumerate(texts)], 0.1)
    batch = next(data.Stream(source, 'train', vocabularies.ByteVocabulary(), make_config(), 4, 0))
    assert batch_hash(batch) == FIRST_BATCH_HASH


FIRST_BATCH_HASH = 3602360344


def test_epochs_differ(vocabulary, pydoc):
    small = sources.in_memory('', documents_of(pydoc)[:40], 0.1)
    stream = data.Stream(small, 'train', vocabulary, make_config(), 2, 0)
    epochs = {}
    while stream.position[:, 0].min() < 3:
        epoch = int(stream.position[0, 0])
        epochs.setdefault(epoch, []).append(next(stream)['encoder_input_tokens'][0].tolist())
    assert epochs[0] != epochs[1] and epochs[1] != epochs[2]


@pytest.fixture(scope='session')
def text_source(tmp_path_factory, pydoc):
    folder = tmp_path_factory.mktemp('text')
    for part in range(4):
        texts = [text for _, text in documents_of(pydoc)[part * 40 : part * 40 + 40]]
        (folder / f'{part}.txt').write_text('\n'.join(texts))
    return sources.open_source(make_config(files=f'{folder}/*.txt', validation_fraction=0.1))


def gzipped_source(folder, pydoc, sizes):
    """Shards of prose; the lanes of the uneven ones drift apart."""
    texts = iter(documents_of(pydoc))
    for shard, size in enumerate(sizes):
        records = [json.dumps({'text': text}) for _, text in itertools.islice(texts, size)]
        (folder / f'{shard}.jsonl.gz').write_bytes(gzip.compress('\n'.join(records).encode()))
    return sources.open_source(make_config(files=f'{folder}/*', validation_fraction=0.1))


@pytest.fixture(params=['text', 'few shards', 'as many shards', 'many shards'])
def any_source(request, text_source, tmp_path, pydoc, small_pools):
    sizes = {
        'few shards': [50, 30, 20],
        'as many shards': [60, 50, 40, 30],
        'many shards': [9] * 21,
    }
    if request.param == 'text':
        return text_source
    return gzipped_source(tmp_path, pydoc, sizes[request.param])


@pytest.mark.parametrize('num_epochs', [None, 2])
def test_resuming_anywhere_gives_the_identical_remainder(any_source, vocabulary, num_epochs):
    def open_stream():
        return data.Stream(
            any_source, 'train', vocabulary, make_config(), 4, 3, num_epochs=num_epochs
        )

    stream, batches, positions = open_stream(), [], []
    while len(batches) < 200:
        positions.append(stream.position.copy())
        assert positions[-1].dtype == np.int64 and positions[-1].nbytes <= 32 * 4
        try:
            batches.append(next(stream))
        except StopIteration:
            break
    assert positions[-1][:, 0].min() >= 1 and (num_epochs is None) == (len(batches) == 200)
    resumed = open_stream()
    for i, position in list(enumerate(positions))[::7]:
        resumed.seek(position)
        np.testing.assert_array_equal(resumed.position, position)
        for batch in batches[i : i + 12]:
            assert_equal_batches(next(resumed), batch)
    if num_epochs:
        resumed.seek(positions[-1])
        assert next(resumed, None) is None


class CountingVocabulary(vocabularies.SentencePieceVocabulary):
    count = 0

    def encode(self, texts):
        self.count += len(texts)
        return super().encode(texts)


@pytest.mark.parametrize('kind', ['pydoc', 'jsonl', 'few shards', 'many shards'])
def test_any_number_of_processes_makes_the_same_batches_of_the_same_documents(
    pydoc, model, tmp_path, kind, monkeypatch
):
    monkeypatch.setattr(sources, 'MIN_POOL_LINES', 16)
    monkeypatch.setattr(sources, 'POOL_LINES', 300)
    source = pydoc
    if kind == 'jsonl':
        records = [json.dumps({'text': text}) for _, text in documents_of(pydoc)[:3000]]
        (tmp_path / 'a.jsonl').write_text('\n'.join(records))
        source = sources.open_source(make_config(files=f'{tmp_path}/*'))
    elif kind != 'pydoc':
        sizes = [300, 100, 200] if kind == 'few shards' else [40] * 15
        source = gzipped_source(tmp_path, pydoc, sizes)
    expected, counts, parsed, epochs = None, [], [], []
    for num_processes in (1, 2, 4):
        size = 8 // num_processes
        shards = []
        for process in range(num_processes):
            vocabulary, rows = (
                CountingVocabulary(model),
                range(process * size, (process + 1) * size),
            )
            stream = data.Stream(source, 'train', vocabulary, make_config(), 8, 0, rows)
            vocabulary.count, source.bad_lines.num_read = 0, 0
            shards.append((vocabulary, take(stream, 150)))
            parsed.append((num_processes, source.bad_lines.num_read))
            epochs.append(stream.position[:, 0].max())
        batches = [
            {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
            for parts in zip(*(batches for _, batches in shards), strict=True)
        ]
        expected = expected or batches
        for ours, theirs in zip(batches, expected, strict=True):
            assert_equal_batches(ours, theirs)
        counts.append(sum(vocabulary.count for vocabulary, _ in shards))
    assert counts[0] == counts[1] == counts[2] > 0
    # What waits for its lane is parsed, too.
    sums = [sum(lines for n, lines in parsed if n == num_processes) for num_processes in (1, 2, 4)]
    assert max(sums) <= 1.25 * min(sums)
    assert kind == 'pydoc' or kind == 'jsonl' or max(epochs) > 0


@pytest.mark.parametrize('num_processes', [1, 2])
def test_a_process_decompresses_a_shard_once_per_epoch(
    tmp_path, pydoc, vocabulary, small_pools, monkeypatch, num_processes
):
    monkeypatch.setattr(sources, 'MIN_POOL_LINES', 100)  # so that nobody is left behind
    source, opened = gzipped_source(tmp_path, pydoc, [600, 610, 620]), []
    own_lanes = range(8 // num_processes)
    place = ('train', vocabulary, make_config(), 8, 0, own_lanes)
    stream, gzip_open = data.Stream(source, *place, num_epochs=3), gzip.open
    monkeypatch.setattr(gzip, 'open', lambda path: opened.append(path) or gzip_open(path))
    position = [stream.position.copy() for _ in stream]
    if num_processes == 1:
        assert sorted(opened) == sorted(source.train.paths * 3)
    else:  # of 8 lanes that share 3 shards, any 4 neighbours have lines of two or three
        assert 3 * 2 <= len(opened) <= 3 * 3
    opened.clear()
    stream.seek(position[len(position) // 2])
    list(stream)
    epochs = len(set(position[len(position) // 2][:, 0].tolist()) | {2})
    assert len(opened) <= 3 * epochs


def test_only_pools_are_read(tmp_path, pydoc, vocabulary, small_pools):
    """Of many lines no more are parsed than the lanes' pools hold, nor kept than wait for their turn."""
    for sizes in ([900] * 2, [400] * 6):
        source = gzipped_source(tmp_path, pydoc, sizes)
        place = ('train', vocabulary, make_config(), 4, 0)
        stream = data.Stream(source, *place)
        source.bad_lines.num_read = 0
        next(stream)
        # Groups of 128 documents, of which one in ten is in the other split, from pools of 15 lines.
        assert 4 * 128 < source.bad_lines.num_read < 4 * 200


def test_one_epoch_ends_lane_by_lane(vocabulary):
    texts = ['word ' * 2000] + [f'few words {i}' for i in range(5)]
    source = sources.in_memory('', [(str(i), text) for i, text in enumerate(texts)], 0.0)
    stream = data.Stream(source, 'train', vocabulary, make_config(), 3, 0, num_epochs=1)
    batches = list(stream)
    is_padding = [[not row.any() for row in batch['decoder_loss_weights']] for batch in batches]
    assert [row.count(False) for row in is_padding][-1] == 1 and is_padding[0].count(False) > 1
    assert all(after >= before for before, after in zip(is_padding, is_padding[1:], strict=False))
    assert stream.describe(stream.position) == ['', '', '']


def test_lanes_without_documents_wait_for_their_epoch(vocabulary):
    source = sources.in_memory('', [('only', 'the only document')], 0.0)
    epochs = [epoch_documents(source, epoch, num_lanes=4, splits=['train']) for epoch in range(4)]
    assert all(any(lane) for lane in zip(*epochs, strict=True))
    stream = data.Stream(source, 'train', vocabulary, make_config(), 4, 0)
    for batch in take(stream, 3):
        assert batch['decoder_loss_weights'].any(axis=1).all()
    assert stream.describe(stream.position) == ['only'] * 4


def test_prefetch_gives_the_plain_stream(pydoc, vocabulary):
    config = make_config()
    plain = data.Stream(pydoc, 'train', vocabulary, config, 2, 0)
    prefetch = data.prefetch(data.Stream(pydoc, 'train', vocabulary, config, 2, 0))
    num_threads = threading.active_count()  # the thread starts with the first `next`
    for _ in range(20):
        before = plain.position.copy()
        expected = next(plain)
        batch, position_before, position_after = next(prefetch)
        assert_equal_batches(batch, expected)
        np.testing.assert_array_equal(position_before, before)
        np.testing.assert_array_equal(position_after, plain.position)
    prefetch.close()
    assert threading.active_count() == num_threads


def test_prefetch_passes_on_errors_and_the_end(tmp_path, vocabulary):
    path = tmp_path / 'bad.txt'
    path.write_bytes(b'good line\n' * 20 + b'\xff\n')
    source = sources.open_source(make_config(files=str(path), validation_fraction=0.0))
    plain = data.Stream(source, 'train', vocabulary, make_config(), 1, 1, num_epochs=1)
    with pytest.raises(ValueError, match='line 21 of .*: byte 1 is not UTF-8'):
        list(data.prefetch(plain))
    path.write_bytes(b'good line\n' * 20)
    source = sources.open_source(make_config(files=str(path), validation_fraction=0.0))
    stream = data.Stream(source, 'train', vocabulary, make_config(), 1, 1, num_epochs=1)
    assert len(list(data.prefetch(stream))) == len(
        list(data.Stream(source, 'train', vocabulary, make_config(), 1, 1, num_epochs=1))
    )
