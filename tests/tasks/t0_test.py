"""T0's tasks, from the names to rank classification, against what t-zero registers.

golden/tasks_t0.json was made by running t-zero 7a699e3 with promptsource 7dab96a: 'tasks' has the
metrics and the number of fixed choices of each, 'mixtures' the rates.
"""

import csv
import dataclasses
import functools
import importlib
import json
import pathlib
import shutil

import numpy as np
import pytest
from corpora import make_config, oracle
from originals import check_names_and_rates, name_of

import tasks
import tasks.open
import vocabulary as vocabularies
from formats.vocabulary import named_vocabulary
from messages import Refused
from sources import NO_SPLIT
from stream import OpenMixture, Stream
from tasks import t0 as tasks_t0
from tasks import t5

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / 'golden/tasks_t0.json').read_text())
ROWS = {row.name: row for row in tasks_t0.tasks()}


def test_the_names_and_rates():
    check_names_and_rates(GOLDEN, ROWS)
    assert ROWS.keys() <= t5.table().keys()


def test_rates_by_size():
    sizes = {task: 600_000 for task in ROWS['t0_eval_score_eval'].members}
    some = 'super_glue_rte_can_we_infer_score_eval'
    rates = tasks.get('t0_eval_score_eval').rates(sizes | {some: 2490})
    assert rates.pop(some) == 2490
    assert set(rates.values()) == {500_000}


def test_the_metrics():
    for name, (names, num_choices) in GOLDEN['tasks'].items():
        task = ROWS[name]
        found = [name_of(metric) for metric in task.metric_fns]
        if name.endswith('_score_eval'):
            [metric] = task.metric_fns
            [expected] = names
            assert found == ['rank_classification']
            assert f"('num_classes', {metric.keywords['num_classes']})" in expected
            assert task.train_split == NO_SPLIT
        elif name.startswith('super_glue_record'):
            # T0's metric does not take its texts.
            assert found in (['squad'], ['accuracy'])
        else:
            class_metrics = {'fn': 'mean_multiclass_f1'}
            expected = {class_metrics.get(metric, metric) for metric in names}
            if name == 'app_reviews_generate_review':  # a review is no number
                expected -= {'spearman_corrcoef'}
            if num_choices is None:
                expected -= {'f1_score_with_invalid'}
                if name.startswith('glue_'):
                    expected = {'bleu', 'rouge'}
            assert set(found) == (expected or {'accuracy'}), name


@pytest.mark.parametrize(
    'predictions, expected',
    [
        (['1', '3', '2', '4'], 80),  # 1 - 6 * 2 / (4 * 15)
        (['5', '5', '2', '1'], -4.5 / 22.5**0.5 * 100),  # ranks 3.5, 3.5, 2, 1
        (['awful', '2.0', '3', '10'], 100),  # no number is the lowest, as in T5's STS-B
    ],
)
def test_the_correlation_of_ratings(predictions, expected):
    task = ROWS['app_reviews_convert_to_rating']
    texts = [task.postprocess(f' {text}\n') for text in predictions]
    targets = [task.postprocess(str(i), is_target=True) for i in (1, 2, 3, 4)]
    values = {}
    for metric in task.metric_fns:
        values |= metric(targets, texts)
    assert values.keys() == {'accuracy', 'spearman_corrcoef'}
    assert values['spearman_corrcoef'] == pytest.approx(expected)


# From P3's layout to metrics.

TINY = tasks_t0.Prompt('super_glue/rte', 'complete that', True, 'vary', ('Accuracy',))


def open_tiny(make_task, config):
    """Open a task whose cache is in P3's layout. It has the split validation alone."""
    config.cache_dirs = str(oracle('p3_like'))
    task = dataclasses.replace(make_task(TINY, 'tiny_complete_that'), train_split=NO_SPLIT)
    opened = tasks.open.open_task(task, config)
    return OpenMixture(task.name, (opened,), opened.source.fingerprint)


def task_and_examples(make_task):
    [task] = open_tiny(make_task, make_config()).tasks
    examples = [record.fields for record in task.source.records('validation', whole=True)]
    return task.task, examples


@pytest.mark.parametrize('lengths', [(64, 32), (5, 4)])
@pytest.mark.parametrize('suffix', ['', '_score_eval'])
def test_a_batch_has_the_ids_of_p3(suffix, lengths):
    """Inputs without EOS, targets with EOS, cut from the right."""
    file = oracle(f'p3_like/tiny_complete_that{suffix}/expected_validation.json')
    num_inputs, num_targets = lengths
    expected = []
    for example in json.loads(file.read_text()):
        expected.append((example['inputs'][:num_inputs], example['targets'][:num_targets]))
    config = make_config(**{'lengths.inputs': num_inputs, 'lengths.targets': num_targets})
    opened = open_tiny(tasks_t0.score_task if suffix else tasks_t0.text_task, config)
    model = str(oracle('sentencepiece/sentencepiece.model'))
    vocabulary = named_vocabulary('data.vocabulary', model, 0)
    found = []
    for batch in Stream(opened, 'validation', vocabulary, config, 1, seed=0, num_epochs=1):
        features = (batch['encoder_input_tokens'], batch['decoder_target_tokens'])
        found.append(tuple(np.trim_zeros(ids[0], 'b').tolist() for ids in features))
    assert sorted(found) == sorted(expected)


def test_rank_classification_of_a_stub():
    """The reader gives all that the metric needs; the best choice has the highest score."""
    task, examples = task_and_examples(tasks_t0.score_task)
    targets = [task.postprocess('', example, is_target=True) for example in examples]
    assert [target[0] for target in targets] == [tuple(x['idx'].tolist()) for x in examples]
    assert [target[3] for target in targets] == [len(x['targets']) for x in examples]
    [metric] = task.metric_fns
    right = [float(example['is_correct']) for example in examples]
    assert metric(targets, right) == {'accuracy': 100}
    assert metric(targets, [-score for score in right]) == {'accuracy': 0}


def test_accuracy_of_a_stub():
    """The texts of P3 begin with white space, which counts for nothing."""
    task, examples = task_and_examples(tasks_t0.text_task)
    texts = [example['targets_pretokenized'] for example in examples]
    targets = [task.postprocess(x['targets_pretokenized'], x, True) for x in examples]
    predictions = [text.strip() + ' ' for text in texts[:-1]] + ['no']
    predictions = [task.postprocess(text) for text in predictions]
    [metric] = task.metric_fns
    assert metric(targets, predictions) == {'accuracy': pytest.approx(200 / 3)}


def test_whole_records_are_in_the_same_split():
    """What is held out does not depend on which features are read."""
    source = open_tiny(tasks_t0.score_task, make_config()).tasks[0].source
    one_part = dataclasses.replace(source, train=source.validation, validation=None)
    for fraction in (0.2, 0.4, 0.6, 0.8):
        held_out = dataclasses.replace(one_part, validation_fraction=fraction)
        for split in ('train', 'validation'):
            names = [record.name for record in held_out.records(split)]
            assert names == [record.name for record in held_out.records(split, whole=True)]


def test_nothing_is_held_out_of_a_task_without_validation(tmp_path):
    """P3 has some; T0 trains on all of their examples."""
    folder = tmp_path / 'tiny_complete_that'
    shutil.copytree(oracle('p3_like/tiny_complete_that'), folder)
    for file in folder.glob('*validation*'):
        file.rename(folder / file.name.replace('validation', 'train'))
    config = make_config(cache_dirs=str(tmp_path), validation_fraction=0.9)
    source = tasks.open.open_task(tasks_t0.text_task(TINY, 'tiny_complete_that'), config).source
    assert len(list(source.records('train'))) == source.train.num_records == 3
    assert not source.may_hold('validation')


def test_classes_and_answers():
    example = {'answer_choices': ['no', 'yes']}
    assert tasks_t0.class_id(' yes\n', example) == 1
    assert tasks_t0.class_id('Yes', example) == -1
    assert tasks_t0.answer(' a b ', is_target=True) == ['a b']
    assert tasks_t0.answer(' a b ') == 'a b'


# What is not there.


# Settings, and what the message names.
MISSING = [
    ({'task': 't0_train'}, 'adversarial_qa_dbert_answer_the_following_q.*data.cache_dirs'),
    ({'task': 'story_cloze_2016_Choose_Story_Ending_score_eval'}, 'story_cloze'),
    ({'task': 'glue_mrpc_replace', 'files': 'a.jsonl'}, 'data.files'),
    ({'task': 't0_eval_score_eval'}, 't0_eval_score_eval'),
]


def test_a_task_that_cannot_be_trained_on(tmp_path):
    for settings, named in MISSING:
        with pytest.raises(Refused, match=named):
            tasks.open.open_mixture(make_config(cache_dirs=str(tmp_path), **settings))


# promptsource's templates.


@pytest.fixture
def promptsource():
    pytest.importorskip('jinja2', reason="pip install -e '.[prompts]'")
    return importlib.import_module('tasks.promptsource')


def test_every_rendered_prompt(promptsource):
    folder = oracle('promptsource')
    read = functools.cache(promptsource.read_templates)
    for line in (folder / 'rendered.jsonl').read_text().splitlines():
        case = json.loads(line)
        file = folder / case['dataset'] / (case['subset'] or '') / 'templates.yaml'
        entries = read(str(file))['templates'].values()
        [entry] = [entry for entry in entries if entry['name'] == case['template']]
        template = promptsource.Template(entry)
        prompt = promptsource.prompt_of('any', template)
        assert template.render(case['example']) == case['rendered']
        assert template.choices(case['example']) == case['answer_choices']
        fixed = case['fixed_answer_choices']
        assert prompt.num_classes == (len(fixed) if fixed else None)
        assert prompt.is_original_task == case['original_task']
        assert list(prompt.metrics) == case['metrics']
        is_rendered = len(case['rendered']) == 2
        assert len(template.examples(case['example'])) == is_rendered


# As promptsource writes them; the prompts are ours.
STORIES = """
dataset: story_cloze
subset: '2016'
templates:
  1: !Template
    answer_choices: '{{sentence_quiz1}} ||| {{sentence_quiz2}}'
    id: 1
    jinja: 'Story: {{input_sentence_1}} {{input_sentence_2}} {{input_sentence_3}}
      {{input_sentence_4}} Its end? - {{answer_choices | join("\\n- ")}} |||
      {{answer_choices[answer_right_ending -1]}}'
    metadata: !TemplateMetadata
      choices_in_prompt: true
      metrics:
      - Accuracy
      original_task: true
    name: Choose Story Ending
    reference: ''
  2: !Template
    answer_choices: null
    id: 2
    jinja: '{{ input_sentence_1 | choice }} ||| {{ story_id }}'
    metadata: !TemplateMetadata
      choices_in_prompt: false
      metrics:
      - Mean Reciprocal Rank
      original_task: false
    name: Draw
    reference: ''
"""
COLUMNS = [
    'InputStoryid',
    *[f'InputSentence{i}' for i in (1, 2, 3, 4)],
    'RandomFifthSentenceQuiz1',
    'RandomFifthSentenceQuiz2',
    'AnswerRightEnding',
]
ROWS_OF_STORIES = [
    ['a', 'One, "||| two".', 'B.', 'C.', 'D.', 'He left.', 'He stayed.', '1'],
    ['b', 'x' * 3000, '', 'läuft', 'D.', 'Yes.', 'No.', '2'],
]


@pytest.fixture
def module(promptsource, tmp_path):
    """A module with the tasks of Story Cloze, whose file is as its owner has it."""
    with (tmp_path / 'stories.csv').open('w', newline='') as file:
        csv.writer(file).writerows([COLUMNS, *ROWS_OF_STORIES])
    (tmp_path / 'templates.yaml').write_text(STORIES)
    file = tmp_path / 'my_tasks.py'
    file.write_text(
        'from tasks import promptsource\n'
        f"TASKS = promptsource.tasks('{tmp_path}/templates.yaml', "
        f"validation_files='{tmp_path}/stories.csv', fields_fn=promptsource.story_cloze)"
    )
    return str(file)


def test_story_cloze_from_the_users_own_copy(module):
    name = 'story_cloze_2016_Choose_Story_Ending_score_eval'
    config = make_config(task=name, module=module)
    task = tasks.open.find(config)
    assert task.name in tasks.get('t0_eval_score_eval', module=config.module).tasks
    source = tasks.open.open_task(task, config).source
    records = [record.fields for record in source.records('validation')]
    examples = list(task.preprocess(records))
    assert [x['targets'] for x in examples] == ['He left.', 'He stayed.', 'Yes.', 'No.']
    assert [x['is_correct'] for x in examples] == [True, False, False, True]
    assert examples[0]['inputs'] == (
        'Story: One, "||| two". B. C. D. Its end? - He left.\n- He stayed.'
    )
    assert examples[2]['inputs'].startswith(f'Story: {"x" * 2045}...  läuft D. Its end?')
    targets = [task.postprocess(x['targets'], x, is_target=True) for x in examples]
    [metric] = task.metric_fns
    assert metric(targets, [-1.0, -2.0, -3.0, -2.5]) == {'accuracy': 100}
    assert metric(targets, [-1.0, -2.0, -1.0, -2.5]) == {'accuracy': 50}


@pytest.mark.parametrize('filter_name', ['choice', 'random'])
def test_a_prompt_that_draws_is_refused(module, tmp_path, filter_name):
    file = tmp_path / 'templates.yaml'
    file.write_text(STORIES.replace('| choice', f'| {filter_name}'))
    config = make_config(task='story_cloze_2016_Draw', module=module)
    opened = tasks.open.open_mixture(config)
    with pytest.raises(Refused, match=f"line [0-9] of .*stories.csv: .*'Draw'.*{filter_name}"):
        Stream(opened, 'validation', vocabularies.ByteVocabulary(), config, batch_size=1, seed=0)
