"""A user's own tasks.py in a folder outside the checkout, as docs/tasks.md shows it."""

import json

import pytest

import tasks
import tasks.open
import vocabulary as vocabularies
from configs import base
from messages import Refused
from stream import Stream
from tasks import t5

OWN_TASKS = """
import functools

from tasks import metrics
from tasks import preprocessors
from tasks import Mixture, Task

german_to_english = functools.partial(
    preprocessors.translate, source_language='de', target_language='en'
)

TASKS = [
    Task(
        'wmt14_deen',
        tfds='wmt14_translate/de-en:1.0.0',
        validation_split='validation',
        preprocess_fn=german_to_english,
        metric_fns=[metrics.bleu],
    ),
    Task('capitals', files='capitals.jsonl', inputs='capital of {country}', targets='{capital}'),
    Mixture('both_directions', {'wmt14_ende_v003': 1.0, 'wmt14_deen': 1.0}),
]
"""
PAIRS = [{'de': f'Das ist Nummer {i}.', 'en': f'This is number {i}.'} for i in range(40)]
CAPITALS = [{'country': f'Land {i}', 'capital': f'City {i}'} for i in range(40)]


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """An empty folder with the user's tasks.py and records, which is the current folder."""
    (tmp_path / 'tasks.py').write_text(OWN_TASKS)
    for name, rows in {'wmt': PAIRS, 'capitals': CAPITALS}.items():
        (tmp_path / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(name, **changes):
    config = base.get_config().data
    config.update_from_flattened_dict(
        {'task': name, 'module': 'tasks', 'validation_fraction': 0.2, 'pack': 'no'} | changes
    )
    return config


def examples_of(config, split='train'):
    vocabulary = vocabularies.ByteVocabulary()
    mixture = tasks.open.open_mixture(config)
    found = set()
    for batch in Stream(mixture, split, vocabulary, config, 2, seed=0, num_epochs=1):
        features = (batch['encoder_input_tokens'], batch['decoder_target_tokens'])
        for inputs, targets in zip(*features, strict=True):
            if inputs.any():
                found.add((vocabulary.decode(inputs.tolist()), vocabulary.decode(targets.tolist())))
    return found


def test_wmt_reversed_reads_raw_lines(own_folder):
    config = config_of('wmt14_deen', files='wmt.jsonl')
    expected = set()
    for pair in PAIRS:
        expected.add((f'translate German to English: {pair["de"]}', pair['en']))
    assert examples_of(config) | examples_of(config, 'validation') == expected
    task = tasks.get('wmt14_deen', module='tasks')
    assert list(task.preprocess(PAIRS[:1])) == [
        {'inputs': 'translate German to English: Das ist Nummer 0.', 'targets': 'This is number 0.'}
    ]
    [metric_fn] = task.metric_fns
    assert metric_fn([PAIRS[0]['en']], [PAIRS[0]['en']]) == {'bleu': pytest.approx(100)}


def test_own_rows_and_ours_mix(own_folder):
    mixture = tasks.get('both_directions', module='tasks')
    assert mixture.rates({}) == {'wmt14_ende_v003': 1.0, 'wmt14_deen': 1.0}
    assert mixture.tasks['wmt14_ende_v003'] is t5.table()['wmt14_ende_v003']


def test_a_row_of_ours_can_be_replaced(own_folder):
    (own_folder / 'mine.py').write_text(
        'import dataclasses, tasks\n'
        "TASKS = [dataclasses.replace(tasks.get('squad_v010_allanswers'), files='x.jsonl')]\n"
    )
    assert tasks.get('squad_v010_allanswers', module='mine').files == 'x.jsonl'
    members = tasks.get('squad_trivia_qa_equal', module='mine').tasks
    assert members['squad_v010_allanswers'].files == 'x.jsonl'


def test_the_split_test_of_an_own_task_is_in_files(tmp_path):
    """Those of its row, or of data.test_files, which leave its other records where they are."""
    (tmp_path / 'mine.py').write_text(
        'from tasks import Mixture, Task\n'
        f"FILES = {{'files': '{tmp_path}/train.jsonl', 'inputs': '{{q}}', 'targets': '{{q}}'}}\n"
        "TASKS = [Task('bare', **FILES)]\n"
        f"TASKS.append(Task('tested', test_files='{tmp_path}/test.jsonl', **FILES))\n"
        "TASKS.append(Mixture('both', {'bare': 1, 'tested': 1}))\n"
    )
    for name in ('train', 'test', 'other'):
        (tmp_path / f'{name}.jsonl').write_text(json.dumps({'q': name}))

    def questions(split, **changes):
        config = base.get_config().data
        config.update(module=f'{tmp_path}/mine.py', **changes)
        source = tasks.open.open_task(tasks.open.find(config), config).source
        return [record.fields['q'] for record in source.records(split)]

    assert questions('test', task='tested') == ['test']
    for name in ('bare', 'tested'):
        other = {'task': name, 'test_files': f'{tmp_path}/other.jsonl'}
        assert questions('test', **other) == ['other']
        assert questions('train', **other) == ['train']
    with pytest.raises(Refused, match='test'):
        questions('test', task='bare')
    with pytest.raises(Refused, match="data.test_files='x' .*'both'"):
        questions('test', task='both', test_files='x')
