"""Which vocabulary a folder holds and a name means, and the tokens that transformers adds to one."""

import json
import pathlib
from functools import partial

import pytest
from corpora import HUNT, make_config, model_with
from sentencepiece import sentencepiece_model_pb2
from small_models import assert_refused

from formats.vocabulary import (
    files_of,
    find_vocabulary,
    model_file,
    named_vocabulary,
    names_of,
    of_model,
)
from run.train_vocabulary import find_or_train_vocabulary
from vocabulary import SentencePieceVocabulary


def find(workdir, **changes):
    config = make_config(**changes)
    return find_or_train_vocabulary(config, pathlib.Path(workdir), (), max_size=32128)


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
        assert find_vocabulary(lone, name).model == pydoc_model
    for folder in (lone, run / 'other', tmp_path / 'nowhere'):
        named = f'vocabulary={str(folder)!r}'
        assert_refused(partial(find, tmp_path / 'n', vocabulary=str(folder)), f'data.{named}')
        assert_refused(partial(find_vocabulary, run, folder), named)
    (lone / 'vocabulary.model').write_bytes(pydoc_model)
    assert model_file(lone) == lone / 'vocabulary.model'
    for name in ('spiece.model', 'sentencepiece.model', 'tokenizer.model'):
        folder = tmp_path / name.split('.')[0]
        folder.mkdir()
        (folder / name).write_bytes(pydoc_model)
        assert model_file(folder) == folder / name


# Folders of transformers, as its versions 4.57 and 5.24 write them.


def write_tokenizer(folder, form, model=None, num_sentinels=100, added=()):
    """Write the files of a tokenizer, with tokens that were added after the sentinels."""
    pieces = []
    if model is not None:
        (folder / 'spiece.model').write_bytes(model)
        proto = sentencepiece_model_pb2.ModelProto.FromString(model)
        pieces = [piece.piece for piece in proto.pieces]
    sentinels = [f'<extra_id_{i}>' for i in range(num_sentinels)]
    ids = {f'<extra_id_{i}>': len(pieces) + num_sentinels - 1 - i for i in range(num_sentinels)}
    if form == 'ByT5':
        ids = {f'<extra_id_{i}>': 259 + i for i in range(num_sentinels)}
    ids |= {token: max(ids.values(), default=0) + 1 + i for i, token in enumerate(added)}
    special = {'<pad>': 0, '</s>': 1, '<unk>': 2}
    by_id = {}
    for token, i in (special | ids).items():
        by_id[i] = {'content': token, 'lstrip': False, 'special': token not in added}
    config = {'tokenizer_class': 'T5Tokenizer', 'extra_ids': num_sentinels, 'eos_token': '</s>'}
    files = {'tokenizer_config.json': config}
    if form in ('slow', 'ByT5'):
        config['added_tokens_decoder'] = {str(i): token for i, token in by_id.items()}
        config['additional_special_tokens'] = sentinels
        config['extra_special_tokens'] = {}
        files['added_tokens.json'] = ids
    if form in ('slow', 'ByT5', 'old', 'names'):
        files['special_tokens_map.json'] = {
            'additional_special_tokens': sentinels + list(added) * (form == 'names'),
            'pad_token': {'content': '<pad>', 'lstrip': False},
            'unk_token': '<unk>',
        }
    if form == 'old':
        files['added_tokens.json'] = {token: ids[token] for token in added}
    if form == 'fast':
        config['extra_special_tokens'] = ['<pad>', '</s>', *sentinels]
        vocab = [[token, -1.5] for token in [*pieces, *sentinels[::-1]]]
        files['tokenizer.json'] = {
            'added_tokens': [{'id': i, **token} for i, token in by_id.items()],
            'model': {'type': 'Unigram', 'unk_id': 2, 'vocab': vocab},
        }
    if form == 'vocab':
        vocab = [[token, -1.5] for token in [*pieces, *sentinels[::-1], *added]]
        files['tokenizer.json'] = {'added_tokens': [], 'model': {'vocab': vocab}}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


FORMS = ['slow', 'fast', 'old', 'names', 'vocab']
GOOD = (HUNT / 'good.model').read_bytes()


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('num_sentinels', [100, 300, 0])
def test_ordinary_folders_of_transformers_open(tmp_path, form, num_sentinels):
    write_tokenizer(tmp_path, form, GOOD, num_sentinels)
    found = find_vocabulary(tmp_path)
    assert (found.size, found.num_sentinels) == (72 + num_sentinels, num_sentinels)


ADDED = [['<mark>'], [f'[{i}]' for i in range(12)], ['▁is it', 'Who']]


@pytest.mark.parametrize('added', ADDED)
@pytest.mark.parametrize('form', ['slow', 'fast', 'old'])
def test_tokens_that_a_folder_adds_are_pieces_that_are_never_split(tmp_path, form, added):
    """Wherever the folder or its model gives the vocabulary; another vocabulary lacks them."""
    write_tokenizer(tmp_path, form, GOOD, added=added)
    config = make_config(vocabulary=str(tmp_path))
    plain = SentencePieceVocabulary(GOOD)
    before, after = plain.encode(['es st', 'te'])
    for found in (
        find_vocabulary(tmp_path),
        find_vocabulary(HUNT, tmp_path / 'spiece.model'),
        find_or_train_vocabulary(config, tmp_path / 'run', [], max_size=384),
    ):
        assert found.size == 172 + len(added) and names_of(found)[:172] == names_of(plain)
        assert found.added_tokens == {name: 172 + i for i, name in enumerate(added)}
        for i, name in enumerate(added):
            text = f'es st{name} te <extra_id_0>'
            [ids] = found.encode([text])
            assert ids == [*before, 172 + i, *after, found.sentinel_ids[0]]
            assert '▁' in name or found.encode([found.decode(ids)]) == [ids]
        kept = of_model(found.model, extra_ids=100)  # as a run keeps it
        assert kept.encode([text]) == [ids] and kept.hash == found.hash != plain.hash
    assert find_vocabulary(tmp_path).encode(['te es', '']) == plain.encode(['te es', ''])
    for name in (repr(added[0]), str(tmp_path)):
        assert_refused(lambda: find_vocabulary(tmp_path, HUNT / 'good.model'), name)
    written = tmp_path / 'written'  # as convert writes it
    written.mkdir()
    for name, content in files_of(found).items():
        (written / name).write_bytes(content)
    again = find_vocabulary(written)
    assert again.added_tokens == found.added_tokens and again.encode([text]) == [ids]


@pytest.mark.parametrize('added', ADDED)
@pytest.mark.parametrize('form', ['names', 'vocab', 'gap'])
def test_added_tokens_without_ids_are_refused_by_name(tmp_path, form, added):
    """The ids are not listed, or those of a tokenizer.json are not those of the model, or not the next ones."""
    write_tokenizer(tmp_path, 'old' if form == 'gap' else form, GOOD, added=added)
    if form == 'gap':
        ids = {token: 173 + i for i, token in enumerate(added)}
        (tmp_path / 'added_tokens.json').write_text(json.dumps(ids))
    config = make_config(vocabulary=str(tmp_path))
    for ask in (
        lambda: find_vocabulary(tmp_path),
        lambda: find_vocabulary(HUNT, tmp_path / 'spiece.model'),
        lambda: find_or_train_vocabulary(config, tmp_path / 'run', [], max_size=384),
    ):
        assert_refused(ask, repr(added[0]))
        assert_refused(ask, str(tmp_path))
    write_tokenizer(tmp_path, form, model_with(added, 72), num_sentinels=0)
    if form != 'gap':
        assert find_vocabulary(tmp_path).size == 72 + len(added)


@pytest.mark.peers
@pytest.mark.parametrize('form', ['slow', 'old'])
def test_added_tokens_have_the_ids_of_transformers(tmp_path, form, pydoc_model):
    transformers = pytest.importorskip('transformers')
    write_tokenizer(tmp_path, form, pydoc_model, num_sentinels=7, added=['<mark>', '[is it]'])
    found = find_vocabulary(tmp_path)
    texts = [
        'a <mark> string',
        'the<mark>is',
        'the [is it]<mark>',
        '[is it], <extra_id_3> of',
        '<mark>',
    ]
    (tmp_path / 'written').mkdir()
    for name, content in files_of(found).items():
        (tmp_path / 'written' / name).write_bytes(content)
    for folder in (tmp_path, tmp_path / 'written'):
        theirs = transformers.T5Tokenizer.from_pretrained(folder)
        assert theirs(texts, add_special_tokens=False).input_ids == found.encode(texts, True)


def test_pieces_that_a_folder_lists_are_no_added_tokens(tmp_path):
    """As of an mT5, whose sentinels are pieces, with the ids of these pieces alone."""
    model = model_with([f'▁<extra_id_{i}>' for i in reversed(range(100))], 72)
    write_tokenizer(tmp_path, 'fast', model, num_sentinels=0)
    file = tmp_path / 'added_tokens.json'
    file.write_text(json.dumps({'▁<extra_id_71>': 100, '▁Wh': 14}))
    assert find_vocabulary(tmp_path).num_sentinels == 100
    for content, name in (({'▁<extra_id_71>': 101}, '▁<extra_id_71>'), ({'▁Wh': 15}, '▁Wh')):
        file.write_text(json.dumps(content))
        assert_refused(lambda: find_vocabulary(tmp_path), name)


@pytest.mark.parametrize('form', ['slow', 'fast'])
def test_sentinels_that_a_folder_numbers_otherwise(tmp_path, form):
    write_tokenizer(tmp_path, form, GOOD, num_sentinels=100)
    named_vocabulary('data.vocabulary', tmp_path, extra_ids=100)
    for extra_ids in (99, 101):
        ask = partial(named_vocabulary, 'data.vocabulary', tmp_path, extra_ids)
        assert_refused(ask, 'data.extra_ids')


def test_a_folder_of_byt5(tmp_path):
    """Its sentinels are ids of their own in transformers, and bytes here."""
    write_tokenizer(tmp_path, 'ByT5', num_sentinels=125)
    assert find_vocabulary(tmp_path) is None
    assert find_vocabulary(tmp_path, 'bytes').size == 259
    write_tokenizer(tmp_path, 'ByT5', num_sentinels=125, added=['<mark>'])
    for name in (None, 'bytes'):
        assert_refused(partial(find_vocabulary, tmp_path, name), "'<mark>'")
