"""The table of tasks, against t5's; each row from a record to its metrics; mixing rates."""

import collections
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re

import pytest
from corpora import make_config
from originals import name_of

import sources.open
import tasks
import tasks.open
import vocabulary as vocabularies
from messages import Refused
from sources import NO_SPLIT
from stream import Stream, TokenizedTask
from tasks import t5
from tasks.mixtures import Task

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
CASES = json.loads((GOLDEN / 'seqio_t5' / 'mixing_rates.json').read_text())
# What t5 0.9.4 registers, but for a task of decoder-only models: source, metrics and classes of each task, rates of each mixture.
REGISTRY = json.loads((GOLDEN / 't5_registry.json').read_text())
ROWS = {}
for rows in t5.groups().values():
    for row in rows:
        if isinstance(row, Task) and row.tfds:
            ROWS[row.name] = row


# The table.


def test_a_row_is_t5s():
    for name in REGISTRY['tasks']:
        expected = REGISTRY['tasks'][name]
        task = tasks.get(name)
        assert task.tfds == expected['tfds']
        for split in ('train', 'validation', 'test'):
            expression = getattr(task, f'{split}_split')
            assert expression in ('', NO_SPLIT, split)
            if expected['splits'] is not None:
                assert (expression == split) == (split in expected['splits'])
        names = dict.fromkeys(
            ['matthews_corrcoef', 'mean_multiclass_f1'], 'sklearn_metrics_wrapper'
        )
        found = [name_of(metric_fn) for metric_fn in task.metric_fns]
        assert [names.get(metric_name, metric_name) for metric_name in found] == expected['metrics']
        if expected['classes']:
            for i, label in enumerate(
                [*expected['classes'], 'other', expected['classes'][0] + ' ']
            ):
                is_class = i < len(expected['classes'])
                assert task.postprocess(label) == (i if is_class else -1)


def test_every_name_of_t5_is_there_once():
    names = [row.name for rows in t5.groups().values() for row in rows]
    assert [name for name, count in collections.Counter(names).items() if count > 1] == []
    assert REGISTRY['tasks'].keys() | REGISTRY['mixtures'].keys() <= set(names)
    assert len(REGISTRY['tasks']) == 59 and len(REGISTRY['mixtures']) == 20


def test_a_name_that_is_none_names_the_nearest():
    for name, nearest in (
        ('glue_mrpc_v2', 'glue_mrpc_v002'),
        ('span_coruption', 'span_corruption'),
    ):
        with pytest.raises(Refused, match=f'data.task={name!r} .*{nearest}'):
            tasks.get(name)


# Each row, from a record to its metrics.


def records_of_rows():
    """{task: records as TFDS yields them}. Tasks on the same data set share them."""
    records = collections.defaultdict(list)
    by_data_set = collections.defaultdict(list)
    for file in ('tasks.jsonl', 'more_texts.jsonl'):
        for line in (GOLDEN / file).read_text().splitlines():
            case = json.loads(line)
            no_answers = ([], {'text': [''], 'answer_start': [0]})
            if case['examples'] and case['raw'].get('answers') not in no_answers:
                records[case['task']].append(case['raw'])
                by_data_set[ROWS[case['task']].tfds].append(case['raw'])
    by_data_set['natural_questions:0.0.2'] = [ANNOTATED_QUESTION]
    return {name: records.get(name) or by_data_set[row.tfds] for name, row in ROWS.items()}


# Two annotators answer in the same way, so that a prediction can be right.
ANSWERS = {'yes_no_answer': [-1, -1], 'short_answers': {'text': [['a b'], ['a b']]}}
ANNOTATED_QUESTION = {'question': {'text': 'what?'}, 'annotations': ANSWERS}
RECORDS = records_of_rows()
RECORDS['natural_questions_nocontext'] = [ANNOTATED_QUESTION]
# The metric knows no letters but those of ASCII.
del RECORDS['squad_v010_allanswers_span'][1:]
RECORDS['wmt16_enro_v003'] = [{'en': 'It is a good day.', 'ro': 'E o zi foarte bună.'}]


def row_config(folder, name):
    """The settings of a row that reads JSON lines: its records, once for each split."""
    lines = [json.dumps(record) for record in RECORDS[name]]
    (folder / 'train.jsonl').write_text('\n'.join(lines))
    (folder / 'validation.jsonl').write_text('\n'.join(lines) + '\n')
    lengths = {'lengths.inputs': 256, 'lengths.targets': 256}
    config = make_config(task=name, vocabulary='bytes', **lengths)
    config.validation_files = str(folder / 'validation.jsonl')
    if ROWS[name].train_split != NO_SPLIT:
        config.files = str(folder / 'train.jsonl')
    return config


@pytest.mark.parametrize('name', sorted(ROWS))
def test_a_row_runs_from_a_line_to_a_batch_to_its_metrics(tmp_path, name):
    """The stub predicts the targets in the batch, so that all metrics have their best values."""
    config = row_config(tmp_path, name)
    vocabulary = vocabularies.ByteVocabulary(extra_ids=100)
    task = tasks.open.find(config)
    if task.train_split != NO_SPLIT:
        mixture = tasks.open.open_mixture(config)
        batch = next(Stream(mixture, 'train', vocabulary, config, batch_size=2, seed=0))
        assert batch['decoder_loss_weights'].any()
    if task.preprocess_fn is None:
        assert not task.metric_fns
        return
    opened = TokenizedTask(tasks.open.open_task(task, config), config, vocabulary)
    targets = []
    predictions = []
    for record in opened.source.records('validation'):
        for example in opened.tokenize([record]):
            for made in opened.objective.examples([record.name], [example.ids]):
                prediction = vocabulary.decode(made.targets.tolist())
                targets.append(task.postprocess(example.texts['targets'], example.texts, True))
                predictions.append(task.postprocess(prediction, example.texts, False))
    assert targets
    check_best_values(task, targets, predictions)


def check_best_values(task, targets, predictions):
    """Check the metrics of predictions that are the targets."""
    for metric_fn in task.metric_fns:
        values = metric_fn(targets, predictions)
        assert values
        for key, value in values.items():
            best = 100
            if key == 'golden_answers':
                best = len(targets)
            elif name_of(task.postprocess_fn) == 'wsc_simple' or 'wsc' in task.name:
                best = 100 * targets.count(1) / len(targets)  # some targets are the wrong noun
            elif len(set(map(str, targets))) == 1 and key in ('f1', 'matthews_corrcoef'):
                best = value if value in (0, 100) else best  # a single class
            elif name_of(metric_fn) == 'mean_multiclass_f1':
                best = value if value > 0 else best  # not all classes are there
            assert value == pytest.approx(best), key


# The fields of the records, against TFDS's own builders.

# Folders of TFDS's modules that it does not find by the name of the data set alone.
FOLDERS = {
    'text': ['glue', 'super_glue', 'definite_pronoun_resolution', 'c4', 'wikipedia'],
    'question_answering': ['web_questions'],
    'summarization': ['cnn_dailymail'],
    'translate': ['wmt14', 'wmt15', 'wmt16', 'wmt19', 'wmt_t2t'],
}


@functools.cache
def builder_of(data_set):
    """TFDS's builder of a data set, which downloads nothing."""
    os.environ['EPATH_USE_TF'] = 'false'
    import tensorflow_datasets as tfds

    module = re.split('[/:]', data_set)[0].removesuffix('_translate')
    for folder, modules in FOLDERS.items():
        if module in modules:
            importlib.import_module(f'tensorflow_datasets.{folder}.{module}')
    try:
        return tfds.builder(data_set.partition(':')[0], data_dir='/nowhere')
    except ModuleNotFoundError:
        pytest.skip(f'TFDS needs TensorFlow to build {data_set}')
    except ValueError as error:
        if 'BuilderConfig' not in str(error):
            raise
        pytest.skip(f'this TFDS has no config of the name {data_set}')


class Watched(collections.UserDict):
    """A record that remembers which of its fields are read."""

    def __init__(self, fields, read, prefix=''):
        super().__init__(fields)
        self.read = read
        self.prefix = prefix

    def __getitem__(self, name):
        value = self.data[name]
        if isinstance(value, dict):
            return Watched(value, self.read, f'{self.prefix}{name}/')
        self.read.add(f'{self.prefix}{name}')
        return value


@pytest.mark.parametrize('name', ROWS)
def test_the_fields_that_a_row_reads_are_those_of_tfds(name):
    task = ROWS[name]
    builder = builder_of(task.tfds)
    version = task.tfds.partition(':')[2]
    assert version in [str(supported) for supported in builder.versions]
    read = set()
    assert list(task.preprocess([Watched(record, read) for record in RECORDS[task.name]]))
    known = set(field_names(builder.info.features))
    assert read and read <= known
    label = dict(builder.info.features.items()).get('label')
    if hasattr(label, 'names') and name_of(task.postprocess_fn) == 'string_label_to_class_id':
        assert [task.postprocess(label) for label in label.names] == list(range(len(label.names)))


def field_names(features, prefix=''):
    """Names of the features, those of nested ones with slashes."""
    for name, feature in features.items():
        inner = getattr(feature, 'feature', feature)
        if hasattr(inner, 'items'):
            yield from field_names(inner, f'{prefix}{name}/')
        else:
            yield f'{prefix}{name}'


# Mixtures.


def test_the_rates_of_a_mixture_are_t5s():
    for name in REGISTRY['mixtures']:
        expected = REGISTRY['mixtures'][name]
        sizes = {task: 1000 + 7 * i for i, task in enumerate(sorted(expected))}
        values = {'rate_unsupervised': 1e6}
        rates = {}
        for task, rate in expected.items():
            rates[task] = values.get(rate, sizes[task]) if isinstance(rate, str) else rate
        mixture = tasks.get(name)
        assert mixture.rates(sizes) == rates
        assert mixture.rates({task: sizes[task] for task in mixture.tasks_by_size}) == rates
        assert all(isinstance(task, Task) for task in mixture.tasks.values())
        shares = mixture.shares(sizes)
        total = sum(rates.values())
        assert shares == pytest.approx({task: rate / total for task, rate in rates.items()})


CONTRADICTIONS = [
    ({'task': 'glue_v002_proportional', 'files': 'x.jsonl'}, 'data.files'),
    ({'task': 'all_mix', 'tfds': 'squad'}, 'data.tfds'),
    ({'task': 'glue_ax_v002', 'files': 'x.jsonl'}, 'data.files'),
    ({'task': 'glue_cola_v002', 'targets': '{a}'}, 'data.targets'),
    ({'task': 'glue_cola_v002', 'metrics': 'bleu'}, 'data.metrics'),
    ({'task': 'prefix_lm', 'metrics': 'bleu'}, 'data.metrics'),
    ({'task': 'prompted_text_to_text', 'inputs': '{q}', 'targets': '{a}'}, 'data.targets'),
    ({'task': 'anli_GPT_3_style_r1', 'test_files': 'x.jsonl'}, 'data.test_files'),
]


def test_settings_that_contradict_a_name():
    for changes, setting in CONTRADICTIONS:
        with pytest.raises(Refused, match=f'^{setting}='):
            tasks.open.find(make_config(**changes))


ROW = {'files': 'a.jsonl', 'validation_files': 'b.jsonl', 'inputs': '{a}', 'targets': '{b}'}
# The settings, and the fields of ROW that they change.
REPLACED = [
    ({'files': 'c.jsonl'}, {'files': 'c.jsonl', 'validation_files': ''}),
    ({'tfds': 'glue/cola'}, {'tfds': 'glue/cola', 'files': '', 'validation_files': ''}),
    ({'test_files': 'c.csv', 'delimiter': ';'}, {'test_files': 'c.csv', 'delimiter': ';'}),
    ({'train_split': 'train'}, {}),  # the default
]


def test_settings_replace_the_records_of_a_row(tmp_path):
    """Its texts stay as they are."""
    (tmp_path / 'own.py').write_text(f"from tasks import Task\nTASKS = [Task('row', **{ROW})]\n")
    for settings, changes in REPLACED:
        config = make_config(task='row', module=f'{tmp_path}/own.py', **settings)
        found = dataclasses.asdict(tasks.open.find(config))
        assert found == dataclasses.asdict(Task('row', **ROW)) | changes
    for texts in ({'targets': '{c}'}, {'metrics': 'accuracy'}):
        with pytest.raises(Refused, match="data.task='row'"):
            tasks.open.find(make_config(task='row', module=f'{tmp_path}/own.py', **texts))


def test_what_is_not_prepared_is_named(tmp_path):
    config = make_config(task='glue_v002_proportional', tfds_dir=str(tmp_path))
    with pytest.raises(Refused, match="data.task='glue_cola_v002': data.tfds='glue/cola:1.0.0'"):
        tasks.open.open_mixture(config)


def test_a_line_with_a_wrong_label_is_named(tmp_path):
    lines = [json.dumps({'sentence': 'a', 'label': 2, 'idx': i}) for i in range(30)]
    (tmp_path / 'x.jsonl').write_text('\n'.join(lines))
    config = make_config(task='glue_cola_v002', files=f'{tmp_path}/x.jsonl', vocabulary='bytes')
    mixture = tasks.open.open_mixture(config)
    with pytest.raises(Refused, match='line [0-9]+ of .*x.jsonl.*label 2'):
        Stream(mixture, 'train', vocabularies.ByteVocabulary(), config, 2, seed=0)


def test_no_share_of_a_task_is_held_out():
    for name in ('dpr_v001_simple', 'super_glue_wsc_v102_simple_train'):
        settings = tasks.get(name).settings(make_config(task=name, validation_fraction=0.5))
        assert sources.open.validation_fraction_of(settings) == 0


def cases_of(kind):
    return [case for case in CASES if case['kind'] == kind]


def test_rates_by_number_of_examples_are_seqios():
    for case in cases_of('num_examples'):
        sizes = {f'task {i}': size for i, size in enumerate(case['sizes'])}
        rate = tasks.proportional(**case['kwargs'])
        found = tasks.Mixture('all', dict.fromkeys(sizes, rate)).rates(sizes)
        assert list(found) == list(sizes)
        assert list(found.values()) == pytest.approx(case['rates'], rel=1e-9)
        assert sum(found.values()) == pytest.approx(case['total'], rel=1e-9)


def test_rates_of_a_nested_mixture_are_seqios():
    for case in cases_of('nested'):
        rates = dict(zip(case['tasks'], case['submixture_rates'], strict=True))
        name, rate = case['extra']
        inner = tasks.Mixture('inner', rates)
        found = tasks.Mixture('outer', {inner: case['submixture_weight'], name: rate}).rates({})
        assert [found[task] for task in case['tasks']] == pytest.approx(case['rates'], rel=1e-9)
        assert sum(found.values()) == pytest.approx(case['total'], rel=1e-9)


BY_SIZE = tasks.proportional()
WRONG_RATES = [
    ({}, "'m'"),
    ({'a': -1.0}, "'m': .*'a'"),
    ({'a': float('nan')}, "'m': .*'a'"),
    ({'a': BY_SIZE}, "'m': .*'a'"),
    ({tasks.Mixture('n', {'b': 1.0}): BY_SIZE}, "'m': .*'n'"),
]


def test_rates_that_cannot_be_are_refused():
    for rates, named in WRONG_RATES:
        with pytest.raises((Refused, AssertionError), match=named):
            tasks.Mixture('m', rates).rates({})
