"""mT5's and ByT5's tasks, against what the originals register and make of texts.

golden/tasks_mt5.json was made by running multilingual_t5 9dcd60f and byt5 7d4efdd with t5 0.9.4 and
TensorFlow 2.21: 'tasks' has the data set, the splits, the metrics and the postprocessor of each,
'mixtures' the rates, 'texts' what the preprocessors make of invented records, and 'padded' the
ranges of the characters that preprocessors._pad_punctuation puts spaces around.
"""

import json
import pathlib
import unicodedata

import pytest
from originals import check_names_and_rates, name_of

from sources import NO_SPLIT
from tasks import mt5 as tasks_mt5
from tasks import t5

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / 'golden/tasks_mt5.json').read_text())
ROWS = {row.name: row for row in tasks_mt5.tasks(t5.table())}
ALL_SPLITS = {'train', 'validation', 'test'}
# T5's own rows name the splits that their data sets have, and metrics that make others.
OWN_SPLITS = ('mnli', 'dpr')
OWN_METRICS = ('cola', 'cb', 'multirc', 'record')


def test_the_names_and_rates():
    check_names_and_rates(GOLDEN, ROWS)
    assert ROWS.keys() <= t5.table().keys()


def test_data_sets_splits_and_metrics():
    for name, (tfds, splits, metric_names, postprocessor) in GOLDEN['tasks'].items():
        task = ROWS[name]
        own = {
            'train': task.train_split,
            'validation': task.validation_split,
            'test': task.test_split,
        }
        found = {split: expression for split, expression in own.items() if expression != NO_SPLIT}
        if splits == 'all':
            if '_wiki.' not in name and not any(part in name for part in OWN_SPLITS):
                assert found.keys() == ALL_SPLITS, name
        else:
            assert found == splits, name
        if tfds is not None:
            assert task.tfds == tfds, name
        if not any(f'_{part}_v' in name for part in OWN_METRICS):
            assert [name_of(metric) for metric in task.metric_fns] == metric_names, name
        assert (name_of(task.postprocess_fn) or None) == postprocessor, name


def test_all_languages_are_several_data_sets():
    languages = ['ar', 'de', 'el', 'es', 'hi', 'ru', 'th', 'tr', 'vi', 'zh', 'en']
    expected = ','.join(f'xquad/{language}:3.0.0' for language in languages)
    assert ROWS['mt5_xquad_test.all_langs'].tfds == expected
    assert ROWS['byt5_pawsx_dev_test.all_langs'].tfds.count('paws_x_wiki/') == 7


def test_the_texts():
    for case in GOLDEN['texts']:
        task = ROWS[case['task']]
        assert list(task.preprocess([case['example']])) == case['outputs'], task.name


@pytest.mark.parametrize('is_right', [True, False])
def test_from_a_prediction_to_metrics(is_right):
    """A stub that predicts the targets has all points, one that predicts another text none."""
    values = []
    for case in GOLDEN['texts']:
        if case['task'] == 'mt5_ner_eval.fr':
            continue  # its targets have no entity, so nobody gets a point
        task = ROWS[case['task']]
        for example in task.preprocess([case['example']]):
            if example['targets'] == '<unk>':
                continue  # no class, as the other text
            targets = task.postprocess(example['targets'], example, is_target=True)
            text = example['targets'] if is_right else 'LOC: nowhere'
            prediction = task.postprocess(text, example)
            for metric in task.metric_fns:
                values += metric([targets], [prediction]).items()
    expected = {'accuracy': 100, 'em': 100, 'f1': 100, 'span_f1': 1, 'rougeLsum': 100}
    assert expected.keys() <= dict(values).keys()
    for name, value in values:
        if name in expected:
            assert value == pytest.approx(expected[name] if is_right else 0, abs=1e-6), name


def test_punctuation_of_every_language():
    padded = set()
    for first, last in GOLDEN['padded']:
        padded |= set(range(first, last + 1))
    for code in range(0x20000):
        character = chr(code)
        category = unicodedata.category(character)
        # Neither surrogates nor characters that are newer than this Python.
        if category in ('Cs', 'Cn'):
            continue
        # Nor letters that are newer than the original, which is of Unicode 15.1.
        if unicodedata.unidata_version > '15.1.0' and code in padded and category[0] in 'LMN':
            continue
        is_padded = tasks_mt5.pad_punctuation(character) == f' {character} '
        assert is_padded == (code in padded), hex(code)
