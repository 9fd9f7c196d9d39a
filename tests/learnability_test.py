"""A tiny model learns 64 examples by heart: all answers right, greedy, by beams and by rank."""

import json

import numpy as np
import pytest
from runs import run, small_config

import infer
from modes import evaluate as evaluate_mode
from run import results

MODULE = """
from tasks import metrics
from tasks import t0 as tasks_t0
from tasks import Task

FILES = {{'files': {folder!r} + '/train.jsonl', 'validation_files': {folder!r} + '/validation.jsonl'}}


def choices(fields):
    for i, choice in enumerate(fields['choices']):
        yield {{
            'inputs': fields['inputs'],
            'targets': choice,
            'idx': [fields['number'], i],
            'is_correct': choice == fields['targets'],
        }}


TASKS = [
    Task('recall', **FILES, inputs='{{inputs}}', targets='{{targets}}',
         metric_fns=[metrics.accuracy]),
    Task('rank', **FILES, preprocess_fn=choices, postprocess_fn=tasks_t0.rank_classification,
         metric_fns=[metrics.rank_classification]),
]
"""
NUM_EXAMPLES = 64


def write_examples(folder):
    """Write 64 names with numbers that belong to them, some of them twice, and the task."""
    rng = np.random.default_rng(0)
    names = set()
    while len(names) < NUM_EXAMPLES:
        names.add(''.join(rng.choice(list('abcdeé'), rng.integers(2, 5))))
    targets = [str(rng.integers(0, 10 ** rng.integers(1, 4))) for _ in names]
    rows = []
    for number, name in enumerate(sorted(names)):
        others = [target for target in targets if target != targets[number]]
        choices = [targets[number], *rng.choice(others, number % 4, replace=False).tolist()]
        rng.shuffle(choices)
        rows.append(
            {
                'number': number,
                'inputs': name,
                'targets': targets[number],
                'choices': choices,
            }
        )
    (folder / 'train.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    other = {'number': 0, 'inputs': 'zz', 'targets': '0', 'choices': ['0']}
    (folder / 'validation.jsonl').write_text(json.dumps(other))
    (folder / 'mine.py').write_text(MODULE.format(folder=str(folder)))
    return rows


def make_config(folder, data_axis, model_axis, pack, num_microbatches):
    config = small_config('', steps=200, data_axis=data_axis, model_axis=model_axis)
    config.model.emb_dim = 64
    config.model.mlp_dim = 128
    config.model.dropout_rate = 0.0
    config.data.files = ''
    config.data.module = f'{folder}/mine.py'
    config.data.task = 'recall'
    config.data.vocabulary = 'bytes'
    config.data.pack = pack
    config.data.lengths.inputs = 32
    config.data.lengths.targets = 16
    config.learning_rate.base_learning_rate = 0.02
    config.train.batch_size = 32
    config.train.num_microbatches = num_microbatches
    config.log.every_steps = 50
    config.save.every_steps = 200
    config.eval.every_steps = 200
    config.infer_eval.every_steps = 200
    config.infer_eval.task = 'recall,rank'
    config.infer_eval.split = 'train'
    config.decode.max_length = 8
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    'data_axis, model_axis, pack, num_microbatches',
    [
        pytest.param(1, 1, 'no', 1, marks=pytest.mark.long),
        pytest.param(2, 2, 'no', 1, marks=pytest.mark.long),
        pytest.param(1, 1, 'tightly', 2, marks=pytest.mark.long),
        (2, 2, 'tightly', 2),
    ],
)
def test_64_examples_are_learned(tmp_path, data_axis, model_axis, pack, num_microbatches):
    rows = write_examples(tmp_path)
    config = make_config(tmp_path, data_axis, model_axis, pack, num_microbatches)
    workdir = run(config, tmp_path / 'run')
    perfect = {'recall-train/accuracy': {200: 100.0}, 'rank-train/accuracy': {200: 100.0}}
    assert results.Results(workdir).scores() == perfect

    config.decode.beam_size = 4
    evaluation = evaluate_mode.CheckpointEvaluation(config, str(workdir), str(tmp_path / 'beams'))
    evaluation.run()
    assert results.Results(tmp_path / 'beams').scores() == perfect

    t5 = infer.load(workdir)  # on one device
    inputs = [row['inputs'] for row in rows]
    targets = [row['targets'] for row in rows]
    assert t5.generate(inputs, max_length=8) == targets
    assert t5.generate(inputs, max_length=8, beam_size=4) == targets
    best = []
    for row in rows:
        scores = t5.score([row['inputs']] * len(row['choices']), row['choices'])
        best.append(row['choices'][scores.argmax()])
    assert best == targets
