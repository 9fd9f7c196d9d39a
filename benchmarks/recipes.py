"""Run small recipes of configs/ to the end, for their scores and times: rows of docs/results.md.

    python benchmarks/recipes.py [--folder=runs/recipes] [--only=REGEX] [--seeds=1] [--svg=FILE]

All train from scratch on this Python's documentation or on questions generated here, and take minutes on two
cores. A recipe that starts from another one needs it in --folder; runs already finished there are not repeated.
Prints a Markdown row for each: the recipe, the steps, the minutes and the numbers after the last step, as means over
the seeds with their range. --svg draws the training losses of up to four recipes, over steps and over seconds, as
means over the seeds.
"""

import csv
import json
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chart
import main_runs
import numpy as np
import turns
from absl import app, flags

CLASSES = ('first', 'second', 'third', 'fourth')  # CSS classes of curves
NUM_QUESTIONS = 2000
NAMES = ('Ada', 'Bert', 'Carla', 'Dan', 'Eva', 'Finn', 'Gus', 'Hanna', 'Ivo', 'Jane')
CITIES = ('Oslo', 'Rome', 'Paris', 'Lima', 'Cairo', 'Bonn', 'Kyoto', 'Lagos', 'Delhi', 'Turin')

FLAGS = flags.FLAGS
flags.DEFINE_string('folder', 'runs/recipes', 'The folder of the runs and their data.')
flags.DEFINE_string(
    'only', '^(?!g2p)', "Regular expression of the recipes to run; '^g2p' takes hours."
)
flags.DEFINE_integer('seeds', 1, 'Seeds of each recipe: 0, 1, ...', lower_bound=1)
flags.DEFINE_string('svg', '', 'A figure of the training losses.')


class Recipe(NamedTuple):
    """A config, the settings that change it, and the metrics of its score."""

    config: str
    settings: Mapping[str, Any]
    metrics: Sequence[str]  # EVALUATION:TAG in metrics.jsonl


# Adapters and all parameters learn a second kind of question on the model that knows the first kind.
OF_NEIGHBOURS = {
    'data.files': '{folder}/neighbours.csv',
    'restore.path': '{folder}/answers_0',
    'train.epochs': 20,
}
DROPOUT = {'model.dropout_rate': 0.1}  # base of the settings compared on configs/g2p.py
LOSS = 'training_eval/{task}:nats_per_text_token'
ANSWERS = ('inference_eval/text_to_text:eval/em', 'inference_eval/text_to_text:eval/f1')
SUMMARIES = (LOSS.format(task='pydoc_summary'), 'inference_eval/pydoc_summary:eval/rougeL')
WORDS = [f'inference_eval/cmudict_g2p-test:eval/{name}_error' for name in ('word', 'phoneme')]
TASKS = """
from t5_in_haiku.tasks import Mixture, Task, metrics, proportional


def question(fields):
    yield {{'inputs': fields['question'] + ' ' + fields['context'], 'targets': fields['answer']}}


TASKS = [
    Task('answers', files={file!r}, preprocess_fn=question, metric_fns=[metrics.accuracy]),
    Mixture('answers_and_summaries', {{'answers': proportional(), 'pydoc_summary': proportional()}}),
]
"""
SWITCH = {'model.module': 'switch', 'model.options.num_experts': 8}
GROUPED = {'model.module': 'grouped_heads', 'model.options.num_kv_heads': 2}
UNSCALED = {
    'optimizer.multiply_by_parameter_scale': False,
    'learning_rate.base_learning_rate': 0.1 * (50 / 128) ** 0.5,  # as configs/t5gemma.py:tiny
}
SPANS = [LOSS.format(task='span_corruption')]
RECIPES = {
    'tiny': Recipe('tiny.py', {}, SPANS),
    'switch': Recipe('tiny.py', SWITCH, SPANS),
    'gemma': Recipe('t5gemma.py:tiny', {}, SPANS),
    'gemma part, rotary': Recipe('tiny.py', {'model.module': 'rotary'}, SPANS),
    'gemma part, post-norms': Recipe('tiny.py', {'model.module': 'post_norms'}, SPANS),
    'gemma part, caps': Recipe('tiny.py', {'model.module': 'soft_caps'}, SPANS),
    'gemma part, grouped heads': Recipe('tiny.py', GROUPED, SPANS),
    'gemma part, tied logits': Recipe('tiny.py', {'model.logits_via_embedding': True}, SPANS),
    'gemma part, rate': Recipe('tiny.py', UNSCALED, SPANS),
    'ul2': Recipe('ul2.py:tiny', {}, [LOSS.format(task='ul2')]),
    'summaries': Recipe(
        'finetune_pydoc.py',
        {'restore.path': '{folder}/tiny_0', 'infer_eval.every_steps': 400},
        SUMMARIES,
    ),
    'summaries from scratch': Recipe(
        'finetune_pydoc.py',
        {
            'restore.path': '',
            'data.vocabulary': '{folder}/tiny_0',
            'infer_eval.every_steps': 400,
        },
        SUMMARIES,
    ),
    'answers': Recipe(
        'qa_csv.py:tiny',
        {
            'data.files': '{folder}/people.csv',
            'restore.path': '{folder}/tiny_0',
            'train.epochs': 100,
        },
        ANSWERS,
    ),
    'neighbours': Recipe('qa_csv.py:tiny', OF_NEIGHBOURS, ANSWERS),
    'neighbours with LoRA': Recipe(
        'qa_csv.py:tiny',
        OF_NEIGHBOURS
        | {
            'model.lora_rank': 8,
            'optimizer.name': 'adamw',
            'learning_rate.base_learning_rate': 0.0025,
        },
        ANSWERS,
    ),
    'neighbours with a prompt': Recipe('prompt_tuning.py:tiny', OF_NEIGHBOURS, ANSWERS),
    'instructions': Recipe(
        'flan_jsonl.py',
        {
            'data.files': '{folder}/instructions.jsonl',
            'restore.path': '{folder}/tiny_0',
            'data.lengths.inputs': 128,
            'data.lengths.targets': 32,
            'train.batch_size': 16,
            'train.epochs': 30,
            'learning_rate.base_learning_rate': 0.01,
            'loss.loss_normalizing_factor': '',  # as in the run whose optimizer state it restores
        },
        ['inference_eval/text_to_text:eval/accuracy', 'inference_eval/text_to_text:eval/rougeLsum'],
    ),
    'two tasks': Recipe(
        'finetune_pydoc.py',
        {
            'data.module': '{folder}/both.py',
            'data.task': 'answers_and_summaries',
            'restore.path': '{folder}/tiny_0',  # answers_0 has seen questions of this validation
            'train.steps': 2400,
            'infer_eval.every_steps': 2400,
        },
        ['inference_eval/answers:eval/accuracy', 'inference_eval/pydoc_summary:eval/rougeL'],
    ),
    'g2p': Recipe('g2p.py', {}, WORDS),
    'g2p long': Recipe('g2p.py:long', {}, WORDS),
    'g2p dropout': Recipe('g2p.py', DROPOUT, WORDS),
    'g2p dropout, twice the steps': Recipe('g2p.py', DROPOUT | {'train.steps': 5000}, WORDS),
    'g2p dropout, 384 wide': Recipe(
        'g2p.py',
        DROPOUT | {'model.emb_dim': 384, 'model.num_heads': 6, 'model.mlp_dim': 768},
        WORDS,
    ),
    'g2p dropout, 4 + 4 layers': Recipe(
        'g2p.py',
        DROPOUT | {'model.num_encoder_layers': 4, 'model.num_decoder_layers': 4},
        WORDS,
    ),
    'g2p dropout, no smoothing': Recipe('g2p.py', DROPOUT | {'loss.label_smoothing': 0.0}, WORDS),
    'g2p dropout, average': Recipe('g2p.py', DROPOUT | {'optimizer.ema_decay': 0.99}, WORDS),
    'g2p dropout, 32 rows': Recipe(
        'g2p.py',
        DROPOUT | {'train.steps': 5000, 'train.batch_size': 32, 'learning_rate.warmup_steps': 1000},
        WORDS,
    ),
    'g2p dropout, bytes': Recipe(
        'g2p.py',
        DROPOUT
        | {
            'data.vocabulary': 'bytes',
            'data.added_tokens': '()',
            'model.vocab_size': 384,
            'data.lengths.inputs': 128,
            'data.lengths.targets': 144,
            'decode.max_length': 96,
        },
        WORDS,
    ),
}


def main(argv: list[str]) -> None:
    folder = Path(FLAGS.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder)
    turns.print_header('recipe', 'config', 'steps', 'minutes', 'score')
    over_steps = []
    over_seconds = []
    for name, recipe in RECIPES.items():
        if not re.search(FLAGS.only, name):
            continue
        scores = []
        losses = []
        seconds_of_steps = []
        for seed in range(FLAGS.seeds):
            workdir = folder / f'{name.replace(" ", "_")}_{seed}'
            settings: dict[str, Any] = {'seed': seed}
            for key, value in recipe.settings.items():
                settings[key] = str(value).replace('{folder}', str(folder))
            main_runs.finish(recipe.config, workdir, settings)
            values = []
            for metric in recipe.metrics:
                evaluation, _, tag = metric.partition(':')
                values.append(main_runs.last_metrics(workdir, evaluation)[tag])
            scores.append(values)
            lines = main_runs.lines_of(workdir, 'train')
            losses.append([line['nats_per_token'] for line in lines])
            seconds_of_steps.append(np.cumsum([line['timing/seconds'] for line in lines]))
        cells = []
        for metric, *values in zip(recipe.metrics, *scores, strict=True):
            cells.append(f'{re.split("[:/]", metric)[-1]} {describe(values)}')
        seconds = float((workdir / 'seconds').read_text())
        steps = max(int(path.name.partition('_')[2]) for path in workdir.glob('checkpoint_*'))
        minutes = f'{seconds / 60:.1f}'
        turns.print_row(name, f'`{recipe.config}`', f'{steps:,}', minutes, '; '.join(cells))
        mean_losses = np.mean(losses, axis=0).tolist()
        over_steps.append((name, [line['step'] for line in lines], mean_losses))
        over_seconds.append((name, np.mean(seconds_of_steps, axis=0).tolist(), mean_losses))
    if FLAGS.svg:
        panels = [panel('nats per target token, over steps', over_steps)]
        panels.append(panel('over seconds of training', over_seconds))
        Path(FLAGS.svg).write_text(chart.svg(*panels))


def panel(title: str, recipes: Sequence[tuple[str, Sequence, Sequence]]) -> chart.Panel:
    """Return a panel of curves from their names, positions and losses."""
    curves = []
    for css_class, (name, positions, losses) in zip(CLASSES, recipes, strict=False):
        points = [chart.Point(*point) for point in zip(positions, losses, strict=True)]
        curves.append(chart.Curve(name, css_class, points))
    return chart.Panel(title, curves, curves_fall=True)


def write_data(folder: Path) -> None:
    """Write questions on two people each, a fifth of them without an answer, instructions, and two tasks."""
    rng = random.Random(0)
    people = []
    neighbours = []
    instructions = []
    for _ in range(NUM_QUESTIONS):
        names = rng.sample(NAMES, 3)
        cities = rng.sample(CITIES, 3)
        person = rng.choice((0, 0, 1, 1, 2))
        context = f'{names[0]} lives in {cities[0]}. {names[1]} lives in {cities[1]}.'
        city, other = (cities[person], cities[1 - person]) if person < 2 else ('', '')
        name = names[person]
        row = {'question': f'Where does {name} live?', 'context': context, 'answer': city}
        people.append(row)
        question = f"Where does {name}'s neighbour live?"
        neighbours.append(row | {'question': question, 'answer': other})
        inputs = f'{row["question"]} {context}'
        instructions.append({'inputs': inputs, 'targets': city or 'unknown'})
        instructions.append({'inputs': f'Name the first person: {context}', 'targets': names[0]})
    for kind, rows in {'people': people, 'neighbours': neighbours}.items():
        with (folder / f'{kind}.csv').open('w', newline='') as file:
            writer = csv.DictWriter(file, fieldnames=['question', 'context', 'answer'])
            writer.writeheader()
            writer.writerows(rows)
    with_answer = [row for row in people if row['answer']]
    for kind, rows in {'known': with_answer, 'instructions': instructions}.items():
        lines = [json.dumps(row) + '\n' for row in rows]
        (folder / f'{kind}.jsonl').write_text(''.join(lines))
    (folder / 'both.py').write_text(TASKS.format(file=str(folder / 'known.jsonl')))


def describe(values: Sequence[float]) -> str:
    text = f'{statistics.mean(values):.4g}'
    if len(values) > 1:
        text += f' ({min(values):.4g} to {max(values):.4g})'
    return text


if __name__ == '__main__':
    app.run(main)
