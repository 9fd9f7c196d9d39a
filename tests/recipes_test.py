"""The recipes of configs/, with a tiny model on data shaped like their own, up to results.csv.

Their full-size steps are traced by shape alone.
"""

import csv
import importlib
import json

import jax
import pytest
import recipe_data
import runs
from forms import first_in_ci

import tasks
import tasks.open
import train
from configs import t0
from modes.evaluate import CheckpointEvaluation
from prepare import make_spec
from run import memory
from tasks import metrics


def recipe_of(recipe):
    """The config of 'NAME' or 'NAME:ARGUMENT'."""
    name, *arguments = recipe.split(':')
    return importlib.import_module(f'configs.{name}').get_config(*arguments)


def rows_of(folder):
    with (folder / 'results.csv').open() as file:
        return list(csv.DictReader(file))


def config_of(recipe, **data_of_recipe):
    """A recipe with a model and lengths that compile in a second."""
    config = recipe_of(recipe)
    small = runs.small_config('')
    config.model = small.model
    config.mesh = small.mesh
    config.data.update(data_of_recipe)
    config.data.lengths.inputs = 64
    config.data.lengths.targets = 16
    config.train.batch_size = 4
    config.train.num_microbatches = 'auto'
    config.loss.loss_normalizing_factor = ''  # as in the run whose optimizer state it restores
    config.log.every_steps = 1
    config.decode.max_length = 4
    config.infer_eval.batch_size = 16
    return config


def run_recipe(config, checkpoint, workdir):
    """Take two steps, or the epochs, from `checkpoint`. Return results.csv's rows as dictionaries.

    `checkpoint` is the fixture `uninterrupted`, which has taken six steps, or None for none.
    """
    config.restore.path = '' if checkpoint is None else str(checkpoint)
    config.train.steps = 2 if checkpoint is None else 8
    if config.train.relative_steps and not config.train.epochs:
        config.train.relative_steps = 2
    runs.run(config, workdir)
    return rows_of(workdir) if config.infer_eval.every_steps else []


# From a CSV.


def qa_config(folder):
    recipe_data.write_questions(folder / 'train.csv')
    recipe_data.write_questions(folder / 'dev.csv', num_rows=3)
    return config_of('qa_csv', files=f'{folder}/train.csv', validation_files=f'{folder}/dev.csv')


@pytest.mark.slow
def test_questions_of_a_csv(tmp_path, uninterrupted, capsys):
    """Three epochs, and exact match and F1 as JSON. An empty answer is an answer."""
    config = qa_config(tmp_path)
    [row, *_] = run_recipe(config, uninterrupted, tmp_path / 'run')
    [next_commands] = [x for x in capsys.readouterr().out.splitlines() if x.startswith('Next: ')]
    assert f"--mode=infer --checkpoint={tmp_path}/run --text='...' answers; " in next_commands
    assert next_commands.endswith('; a larger --config.train.epochs continues.')
    columns = ['em', 'em_with_answer', 'em_without_answer', 'f1', 'f1_with_answer']
    assert list(row) == ['step', *[f'text_to_text/{name}' for name in columns]]
    lines = [line for line in runs.metrics_of(tmp_path / 'run') if line['run'] == 'train']
    assert max(line['data/text_to_text/examples'] for line in lines) == 3 * 12
    folder = tmp_path / 'run' / 'inference_eval'
    [scores] = (folder / 'text_to_text-metrics.jsonl').read_text().splitlines()
    assert json.loads(scores).keys() == {'step', *columns}
    [examples] = folder.glob('text_to_text-0*.jsonl')
    lines = [json.loads(line) for line in examples.read_text().splitlines()]
    assert [line['target'] for line in lines] == recipe_data.ANSWERS
    expected = '{question}\n{context}'.format(**recipe_data.QUESTIONS[0])
    assert lines[0]['input']['inputs_pretokenized'] == expected


def test_empty_answers_are_refused_where_nobody_expects_them(tmp_path, uninterrupted):
    config = qa_config(tmp_path)
    config.data.allow_empty_targets = False
    with pytest.raises(ValueError, match='data.allow_empty_targets=True'):
        run_recipe(config, uninterrupted, tmp_path / 'run')


def test_a_cached_task_has_metrics_too(tmp_path):
    example = recipe_data.p3_example('Where is Ada?', 'Oslo', choices=['Oslo'])
    recipe_data.write_split(tmp_path / 'qa', 'train', [example])
    (tmp_path / 'qa' / 'COMPLETED').touch()
    config = config_of('squad', task='qa', cache_dirs=str(tmp_path), metrics='squad, rouge').data
    assert tasks.open.find(config).metric_fns == [metrics.squad_v2, metrics.rouge]


# The others.

TFDS_RECIPES = {
    'wmt_from_scratch': 'WMT T2T En-De',
    'glue': 'STSB (Pearson)',
    'wmt': 'WMT T2T En-De',
    'squad': 'SQuAD (EM)',
    'cnn_dailymail': 'CNN/DM (ROUGE-1)',
    'superglue': 'Average SuperGLUE Score',
}


@pytest.fixture(scope='module')
def tfds_dir(make_once):
    names = ['wmt_t2t_ende_v003', 'squad_v010_allanswers', 'cnn_dailymail_v002']
    for mixture in ('glue_v002_proportional', 'super_glue_v102_proportional'):
        names += list(tasks.get(mixture).tasks)
    return make_once('recipes', lambda folder: recipe_data.prepare_tfds(folder, names))


@pytest.mark.slow
@pytest.mark.parametrize('recipe', first_in_ci(TFDS_RECIPES))
def test_a_recipe_on_tfds(recipe, tfds_dir, uninterrupted, tmp_path):
    config = config_of(recipe, tfds_dir=str(tfds_dir))
    checkpoint = uninterrupted
    if recipe == 'wmt_from_scratch':
        checkpoint = None
        config.data.vocabulary = str(uninterrupted)
    [row, *_] = run_recipe(config, checkpoint, tmp_path / 'run')
    assert row['step'] == ('8' if checkpoint else '2')
    assert row[TFDS_RECIPES[recipe]]


@pytest.mark.slow
def test_the_average_of_glue(tfds_dir, uninterrupted, tmp_path):
    """The second command of glue.py, and T5's average: a mean over groups of their means."""
    config = config_of('glue', tfds_dir=str(tfds_dir))
    config.infer_eval.task = 'glue_v002_proportional'
    CheckpointEvaluation(config, str(uninterrupted), str(tmp_path)).run()
    [row, *_] = rows_of(tmp_path)
    groups = [[name] for name in ('CoLA', 'SST-2', 'QNLI', 'GLUE RTE')]
    groups += [['MNLIm', 'MNLImm'], ['STSB (Pearson)', 'STSB (Spearman)']]
    groups += [[f'{name} (F1)', f'{name} (accuracy)'] for name in ('MRPC', 'QQP')]
    means = [sum(float(row[name]) for name in group) / len(group) for group in groups]
    assert row['Average GLUE Score'] == pytest.approx(f'{sum(means) / 8:.3f}')


@pytest.mark.long
@pytest.mark.slow
def test_t0_on_p3(uninterrupted, tmp_path):
    """All 313 tasks of the mixture, and the 116 that are ranked, at a chosen step and split."""
    names = [*tasks.get('t0_train').tasks, *tasks.get('t0_eval_score_eval').tasks]
    recipe_data.write_p3(tmp_path / 'P3', names)
    config = config_of('t0', cache_dirs=str(tmp_path / 'P3'))
    run_recipe(config, uninterrupted, tmp_path / 'run')
    CheckpointEvaluation(config, f'{tmp_path}/run', step='8', split='validation').run()
    [row, *_] = rows_of(tmp_path / 'run')
    assert row['step'] == '8'
    assert 'super_glue_copa_best_option_score_eval/accuracy' in row
    assert len({name.partition('/')[0] for name in row} - {'step'}) == 116


@pytest.mark.slow
def test_flan_on_json_lines(uninterrupted, tmp_path):
    rows = [{'inputs': f'Add 1 to {i}.', 'targets': str(i + 1)} for i in range(12)]
    recipe_data.write_json_lines(tmp_path / 'train.jsonl', rows)
    config = config_of('flan_jsonl', files=f'{tmp_path}/train.jsonl', validation_fraction=0.3)
    [row, *_] = run_recipe(config, uninterrupted, tmp_path / 'run')
    assert row.keys() >= {'text_to_text/accuracy', 'text_to_text/rouge1'}


@pytest.mark.slow
@pytest.mark.parametrize('recipe', ['t5_1_1_lm', 'ul2', 't5_1_1'])
def test_a_recipe_on_documents(recipe, corpus, uninterrupted, tmp_path):
    """These have no task metrics: the validation loss is their result."""
    config = config_of(recipe, files=corpus, validation_fraction=0.1)
    config.data.lengths.targets = 64
    checkpoint = uninterrupted if recipe == 't5_1_1_lm' else None
    if checkpoint is None:
        config.data.vocabulary = 'bytes'  # the modes of UL2 begin with [
    run_recipe(config, checkpoint, tmp_path / 'run')
    last = runs.metrics_of(tmp_path / 'run')[-1]
    assert last['step'] == (8 if checkpoint else 2) and last['run'].startswith('training_eval/')
    assert last['nats_per_text_token'] > 0


# T0's batches in tokens.


@pytest.mark.parametrize('replicas, expected', [('1', 512), ('64', 8), ('512', 1)])
def test_the_tokens_of_t0(replicas, expected):
    """t-zero's 2^20 tokens in rows of 1,024 for the longer side, 2,048 in a replica's microbatch."""
    config = t0.get_config(f'11b:{replicas}')
    assert config.train.batch_size == 1024
    assert config.train.num_microbatches == expected
    rows_of_replica = config.train.batch_size // int(replicas)
    assert rows_of_replica / expected * max(config.data.lengths.values()) == 2048
    assert expected in memory.microbatch_counts(expected, rows_of_replica)
    assert config.infer_eval.batch_size * 1024 == 262_144
    assert t0.get_config('3b').train.num_microbatches == 'auto'


@pytest.mark.parametrize('replicas', ['3', '1024', '0', 'x', '-1'])
def test_replicas_that_cannot_share_the_batch(replicas):
    with pytest.raises(ValueError, match=f't0.py: {replicas} replicas cannot share 512 microbatch'):
        t0.get_config(f'3b:{replicas}')


# Full size, by shape.

RECIPES = [
    'prompt_tuning',
    'qa_csv',
    't0:11b',
    't5_1_1_lm',
    'ul2',
    'flan_jsonl',
    'qa_csv:tiny',
    *TFDS_RECIPES,
]


def step_shapes(config):
    """Trace a training step on a mesh of two devices. Return the state before and after, as shapes."""
    config.mesh.model = 2
    config.train.num_microbatches = 1
    spec = make_spec(config)
    after, _ = train.lower_step(spec).out_info
    return spec.state_shapes, after


@pytest.mark.slow
@pytest.mark.parametrize('recipe', first_in_ci(RECIPES, 3))
def test_a_step_of_full_size(recipe):
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in step_shapes(recipe_of(recipe))]
    assert shapes[0] == shapes[1]
