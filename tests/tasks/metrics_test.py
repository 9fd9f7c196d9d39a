"""Metrics, against the originals' numbers.

golden/seqio_t5/metrics.json was made by running t5 e081111 and multilingual_t5 9dcd60f. So was
golden/metrics.json, on random words of several languages, classes and scores with ties; it has
byt5 7d4efdd and t5_closed_book_qa 0c1bbe5, too. Libraries: sacrebleu 2.6.0, rouge_score 0.1.2,
scikit-learn 1.9.1, scipy 1.17.1, nltk 3.10.4. Each entry names its function and has its arguments:
to make it again, call the original with them (t5's rouge_mean for `rouge`). None stands for nan.
"""

import functools
import inspect
import json
import math
import pathlib

import pytest

import tasks.open
from messages import Refused
from tasks import metrics, mixtures

TESTS = pathlib.Path(__file__).parents[1]
ROUGE = TESTS.parents[1] / 'shared' / 'testdata' / 'seqio_t5' / 'rouge_fixture'


def oracle(name):
    return json.loads((TESTS / 'golden' / name).read_text())


def find_metric(name, settings):
    """Return the metric that an entry of the oracles names."""
    if name.startswith('mean_multiclass_f1'):
        num_classes = settings.pop('num_classes', None) or int(name.split('_')[-1])
        return metrics.mean_multiclass_f1(num_classes)
    if name == 'mean_group_metric_all_match':
        return metrics.mean_group_metric(metrics.all_match)
    if name == 'deduplicate_squad':
        return metrics.deduplicate_metric(metrics.squad)
    if name == 'rouge_mean':
        # The words of these entries have no suffix: stemming leaves their scores as they are.
        settings.pop('use_stemmer', None)
        return metrics.rouge
    return getattr(metrics, name.removeprefix('mt5_'))


def hashable_groups(targets):
    """Return targets with tuples for JSON's lists."""
    if not isinstance(targets[0], dict) or 'group' not in targets[0]:
        return targets
    return [{'value': target['value'], 'group': json.dumps(target['group'])} for target in targets]


def check_entry(entry):
    settings = dict(entry['kwargs'])
    metric = functools.partial(find_metric(entry['metric'], settings), **settings)
    side = 'scores' if 'scores' in entry else 'predictions'
    assert side in inspect.signature(metric).parameters
    found = metric(targets=hashable_groups(entry['targets']), **{side: entry[side]})

    expected = {}
    for name, value in entry['result'].items():
        expected[name] = math.nan if value is None else value
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9, nan_ok=True), settings
    assert {type(value) for value in found.values()} <= {int, float}


@pytest.mark.parametrize('name', ['seqio_t5/metrics.json', 'metrics.json'])
def test_every_entry_of_the_originals(name):
    entries = oracle(name)
    assert entries
    for entry in entries:
        check_entry(entry)


WITHOUT_ORACLES = [
    metrics.squad_v2,  # golden/squad_v2.json
    metrics.accuracy_of_references,  # weights_and_references_test.py
    metrics.bleu_of_references,
    metrics.word_error,  # by hand
    metrics.phoneme_error,
]


def test_every_metric_needs_as_many_outputs_as_targets_and_at_least_one():
    examples = [(metric_fn, [['a', 'b'], ['c']], ['a', 'b']) for metric_fn in WITHOUT_ORACLES]
    for entry in oracle('metrics.json'):
        settings = dict(entry['kwargs'])
        metric_fn = functools.partial(find_metric(entry['metric'], settings), **settings)
        outputs = entry['scores'] if 'scores' in entry else entry['predictions']
        examples.append((metric_fn, hashable_groups(entry['targets']), outputs))
    for metric_fn, targets, outputs in examples:
        for wrong in ([], outputs * 2, outputs[:-1]):
            with pytest.raises(ValueError, match=f'and {len(wrong)} outputs'):
                metric_fn(targets, wrong)
        for wrong in ([], outputs):
            with pytest.raises(ValueError, match='^0 targets'):
                metric_fn([], wrong)


# ROUGE.


def read_lines(name):
    if not ROUGE.exists():
        pytest.skip(f"{ROUGE} is missing: T5's summaries are not shipped")
    return (ROUGE / name).read_text().splitlines()


def test_rouge_of_t5s_summaries():
    """The expected values are medians of a bootstrap: of another draw they differ in the third digit."""
    targets = read_lines('target_large.txt')
    predictions = read_lines('prediction_large.txt')
    expected = json.loads('\n'.join(read_lines('expected_bootstrap_results.json')))
    assert metrics.rouge(targets, predictions) == pytest.approx(expected, abs=0.1)


def test_rouge_knows_the_letters_a_to_z_only():
    assert metrics.rouge(['Größe 5'], ['GR e-5'])['rouge2'] == 100.0


PERFECT = {
    'Hindi': ['मैं हिन्दी पढ़ता हूँ', 'वह स्कूल गई', 'यह एक किताब है'],
    'Thai': ['วันนี้อากาศดี', 'ฉันชอบเรียน', 'น้ำ'],
    'Japanese': ['今日は天気がいいです', 'コーヒーをください', '本を読む'],
    'Chinese': ['今天天气很好', '我喜欢学习', '他在北京工作'],
    'Russian': ['сегодня хорошая погода', 'я люблю учиться', 'он работает'],
    'Arabic': ['الطقس جميل اليوم', 'أحب التعلم', 'هو يعمل'],
    'Korean': ['오늘 날씨가 좋다', '나는 공부를 좋아한다', '그는 일한다'],
}


SACREBLEUS = {'Thai': 'char', 'Japanese': 'char', 'Chinese': 'zh'}


def test_right_answers_of_every_script_have_100():
    for language, texts in PERFECT.items():
        assert set(metrics.rouge(texts, texts).values()) == {0.0}  # as in T5
        tokenizer = SACREBLEUS.get(language, 'intl')
        assert set(metrics.rouge(texts, texts, tokenizer=tokenizer).values()) == {100.0}
        assert metrics.bleu(texts, texts, tokenizer='char')['bleu'] == pytest.approx(100)
        others = texts[1:] + texts[:1]
        assert metrics.rouge(texts, others, tokenizer=tokenizer)['rouge2'] < 60


def test_rouge_of_a_tokenizer_by_hand():
    found = metrics.rouge(['他在 GPT工作。'], ['他在Gpt 工作'], ('rouge1',), tokenizer='zh')
    assert found == {'rouge1': pytest.approx(100 * 2 * 5 / (6 + 5))}  # 他, 在, gpt, 工, 作 and 。


def test_a_tokenizer_that_cannot_be_opened(monkeypatch):
    """Refused with what sacrebleu says: its packages are not installed, or its model cannot be downloaded."""

    def fail(url, path):
        raise OSError(f'no route to {url}')

    monkeypatch.setattr('sacrebleu.tokenizers.tokenizer_ko_mecab.MeCab', None)
    monkeypatch.setattr('sacrebleu.tokenizers.tokenizer_spm.SACREBLEU_DIR', '/dev/null')
    monkeypatch.setattr('sacrebleu.tokenizers.tokenizer_spm.download_file', fail)
    for tokenizer, said in (
        ('ko-mecab', r'pip install sacrebleu\[ko\]'),
        ('flores101', 'no route'),
    ):
        with pytest.raises(Refused, match=f"data.metrics='bleu:{tokenizer}': .*{said}"):
            tasks.open.metrics_of(f'bleu:{tokenizer}')


# Edits.


def test_errors_of_words_and_phonemes_by_hand():
    """Right; right by the second reference; one edit of the second; two missing; one too many; empty."""
    targets = [['S IY D'], ['R EH D', 'R IY D'], ['T AH', 'T UW L'], ['AE N D'], ['EY'], ['AY']]
    predictions = ['S IY D', 'R IY D', 'T UW', 'AE', 'EY EY', '']
    assert metrics.word_error(targets, predictions)['word_error'] == pytest.approx(100 * 4 / 6)
    # 'T UW' is one edit from both of its references: the first, of two phonemes, counts.
    found = metrics.phoneme_error(targets, predictions)
    assert found['phoneme_error'] == pytest.approx(100 * (1 + 2 + 1 + 1) / (3 + 3 + 2 + 3 + 1 + 1))
    assert metrics.phoneme_error([['AA B', 'AA B K']], ['AA  B K']) == {'phoneme_error': 0}
    assert metrics.word_error([['AA B', 'AA B K']], ['AA B']) == {'word_error': 0}


# Cases that the originals' entries do not reach.


def test_bleu_of_empty_texts():
    assert metrics.bleu(['', 'a b c d'], ['', 'a b c d']) == {'bleu': pytest.approx(100.0)}
    assert metrics.bleu([''], ['']) == {'bleu': 0.0}


def test_squad_of_unpadded_and_unicode_text():
    assert metrics.squad([['An Évian', 'x']], ['évian']) == {'em': 100.0, 'f1': 100.0}
    assert metrics.squad([['the']], ['']) == {'em': 100.0, 'f1': 0.0}


SQUAD_V2 = oracle('squad_v2.json')


def squad_v2_of(cases):
    answers = [case['answers'] for case in cases]
    return metrics.squad_v2(answers, [case['prediction'] for case in cases])


def test_squad_v2_of_one_question():
    """golden/squad_v2.json: hand-made cases, scored by transformers 4.57.6 (squad_metrics.py).

    That is SQuAD's evaluate-v2.0.py, which has a list without answers where we have [''].
    """
    for case in SQUAD_V2['cases']:
        found = squad_v2_of([case])
        assert found == pytest.approx({'em': 100 * case['exact'], 'f1': 100 * case['f1']}), case


def test_squad_v2_of_questions_with_and_without_answers():
    totals = SQUAD_V2['totals']
    assert len(SQUAD_V2['cases']) == totals['total'] == 50
    expected = {
        'em': totals['exact'],
        'f1': totals['f1'],
        'em_with_answer': totals['HasAns_exact'],
        'f1_with_answer': totals['HasAns_f1'],
        'em_without_answer': totals['NoAns_exact'],
    }
    assert squad_v2_of(SQUAD_V2['cases']) == pytest.approx(expected)
    one_kind = [case for case in SQUAD_V2['cases'] if case['answers'] == ['']]
    assert len(one_kind) == totals['NoAns_total']
    expected = {'em': totals['NoAns_exact'], 'f1': totals['NoAns_f1']}
    assert squad_v2_of(one_kind) == pytest.approx(expected)


def test_normalized_texts():
    """As in MLQA's own script: U+9FA6 and later are no words of their own; 'ar' has no word boundary."""
    assert metrics.normalize_trivia_qa("It's ‘so’ a´b_c") == 'it s so b c'
    assert metrics.normalize_mlqa('一龥龦龦x', 'zh') == '一 龥 龦龦x'
    assert metrics.normalize_mlqa('سؤال', 'ar') == 'سؤ'


def test_natural_questions_by_hand():
    targets = [
        [('yes',), ('no',), ()],
        [('The Nile', 'Amazon'), ('Nile',)],
        [('one annotator',), ()],
        [(), ()],
    ]
    predictions = [[('no',)], [('amazon', 'nile', 'Nile!')], [('one annotator',)], [()]]
    found = metrics.natural_questions(targets, predictions)
    assert found == {'recall': 100.0, 'golden_answers': 2}
    found = metrics.natural_questions(targets, [[('',)]] * 4, non_null_threshold=1)
    assert found == {'recall': 0.0, 'golden_answers': 3}


# The scores of one example, its right choice, num_classes, accuracy.
RANKED = [
    ([-1.0, -1.0, -2.0], 1, None, 0),  # the first of equal scores is the prediction
    ([-1.0, -1.0, -2.0], 1, 3, 0),
    ([-1.0 - 1e-12, -1.0], 0, 2, 100),  # float32 for a fixed number of choices
    ([-1.0 - 1e-12, -1.0], 0, None, 0),
    ([-math.inf, -3.0], 1, 2, 100),
]


def test_rank_classification_by_hand():
    for scores, right, num_classes, accuracy in RANKED:
        targets = [((0, i), i == right, 1.0, 1) for i in range(len(scores))]
        found = metrics.rank_classification(targets, scores, num_classes)
        assert found['accuracy'] == accuracy
        assert right == 0 or found.get('f1', accuracy) == accuracy  # F1 is of choice 1


def test_no_warning_where_a_value_is_undefined(recwarn):
    assert math.isnan(metrics.pearson_corrcoef([1, 1], [1, 2])['pearson_corrcoef'])
    never = [((0, i), i == 0, 1.0, 1) for i in range(2)]
    found = metrics.rank_classification(never, [-1.0, -2.0], num_classes=2)
    expected = {'accuracy': 100, 'f1': 0, 'auc-roc': math.nan, 'auc-pr': 0}
    assert found == pytest.approx(expected, nan_ok=True)
    assert metrics.matthews_corrcoef([1, 1], [1, 0]) == {'matthews_corrcoef': 0.0}
    assert metrics.mean_multiclass_f1(3)([0], [0]) == {'mean_3class_f1': pytest.approx(100 / 3)}
    assert not recwarn.list


# Wrong input.

CHOICE = ((0, 0), True, 1.0, 2)
REFUSED = [
    (metrics.f1_score_with_invalid, [1, -1], [1, 1]),
    (metrics.rank_classification, [CHOICE], [math.nan]),
    (functools.partial(metrics.rank_classification, num_classes=2), [CHOICE], [-1.0]),
]
# Targets that no postprocessor should give: the metrics would count them without a word.
MISTAKES = [
    (metrics.rank_classification, [CHOICE, CHOICE], [-1.0, -2.0]),
    (metrics.accuracy, [1, 0], ['True', 'False']),
    (metrics.accuracy, ['a', b'b'], ['a', 'b']),
]


def test_wrong_input():
    for rows, kind in ((REFUSED, Refused), (MISTAKES, AssertionError)):
        for metric_fn, targets, outputs in rows:
            with pytest.raises(kind):
                metric_fn(targets, outputs)


def test_an_error_of_a_function_has_a_note_that_names_the_task():
    def wrong(targets, predictions):
        return {'half': targets[0] / predictions[0]}

    task = mixtures.Task('own', postprocess_fn=lambda text, *_: int(text), metric_fns=[wrong])
    for call in (lambda: task.metric(wrong, [1], [0]), lambda: task.postprocess('one')):
        with pytest.raises((ZeroDivisionError, ValueError)) as error:
            call()
        assert error.traceback[-1].path == pathlib.Path(__file__)
        assert error.value.__notes__ == ['task own']
    with pytest.raises(TypeError) as error:
        mixtures.Task('own', metric_fns=[lambda targets: {}])
    assert error.value.__notes__ == ['task own']
