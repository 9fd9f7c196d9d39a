"""`--mode=report`: a table of one or more runs, from their files alone.

    python main.py --mode=report --runs=runs/a,runs/b

Each run has a column. The rows are the settings that differ, losses, times, the load of the experts, task
metrics, and a few examples with their answers. TensorBoard draws curves. Imports no jax.
"""

import collections
import itertools
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl.flags import FlagValues
from ml_collections import ConfigDict

import paths
from configs import base, check
from formats.best import read_metrics
from messages import Refused
from modes import process
from run import results

NUM_EXAMPLES = 3  # per task
MAX_CHARACTERS = 60  # per text; more for names and settings, which may differ at their ends
VALIDATION = 'training_eval/'  # the prefix of an evaluation's name in metrics.jsonl
LOAD = 'experts/load/'  # the prefix of the load of each expert of families/switch.py
Column = dict[str, str]  # {title of a row: its cell}, of one run
Tags = dict[str, dict[int, float]]  # {tag: {step: value}}


def main(config: None, flags: FlagValues, signals: process.Signals) -> int:
    lines = write(flags.runs, flags.output_dir)
    signals.begin_work()
    process.print_lines(lines, sys.stdout)
    return 0


def write(names: Sequence[str], output_dir: str = '') -> list[str]:
    """Write the table of some runs to `output_dir`, else into the first run. Return its lines."""
    if not names:
        raise Refused('--runs is missing: name one or more runs, as in --runs=RUN,RUN')
    folders = [paths.disk_path(name) for name in names]
    numbers = [numbers_of(folder) for folder in folders]
    common = os.path.commonpath([folder.parent for folder in folders])
    target = paths.disk_path(output_dir or folders[0])
    paths.check_new(target)
    results.check_writable(target)
    lines = table(
        [code(str(folder.relative_to(common)), limit=1000) for folder in folders],
        [differing_settings(folders), numbers, [answers_of(folder) for folder in folders]],
    )
    with paths.naming(target):
        target.mkdir(parents=True, exist_ok=True)
        paths.replace_file(target / 'report.md', '\n'.join([*lines, '']).encode())
    return lines


def table(names: Sequence[str], parts: Sequence[Sequence[Column]]) -> list[str]:
    """Return a table in Markdown whose cells are padded, for a terminal. Each part has a column for each run."""
    rows = [['', *names]]
    for columns in parts:
        for title in dict.fromkeys(itertools.chain(*columns)):
            rows.append([title, *[column.get(title, '') for column in columns]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ['-' * width for width in widths])
    lines = []
    for row in rows:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f'| {" | ".join(padded)} |')
    return lines


def differing_settings(folders: Sequence[Path]) -> list[Column]:
    """Return the settings that differ between runs; for one run, between it and the defaults."""
    run_settings = [check.read_stored(folder) for folder in folders]
    if len(folders) == 1:
        run_settings.append(json.loads(base.get_config().to_json()))  # with lists for tuples
    all_settings = [dict(check.leaves(ConfigDict(x, allow_dotted_keys=True))) for x in run_settings]
    compared = [settings for settings in all_settings if settings]  # a folder of results has none
    columns: list[Column] = [{} for _ in folders]
    for key in dict.fromkeys(itertools.chain(*compared)):
        if all(settings.get(key) == compared[0].get(key) for settings in compared):
            continue
        for column, settings in zip(columns, all_settings, strict=False):  # without the defaults
            if key in settings:
                column[code(key)] = code(json.dumps(settings[key], ensure_ascii=False), limit=1000)
    return columns


def numbers_of(folder: Path) -> Column:
    """Return the losses, the times and the task metrics of a run, each with its step."""
    metrics: dict[str, Tags] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for line in read_metrics(folder):
        tags = metrics[line['run']]
        for tag in line.keys() - {'run', 'step', 'corpus'}:
            tags[tag][line['step']] = line[tag]
    column: Column = {}

    def add(title: str, values: Mapping[int, float], best: int = -1) -> None:
        for name, step in (('best', best), ('last', max(values, default=-1))):
            if step in values:
                column[f'{title}, {name}'] = f'{results.format_value(values[step])} at {step:,}'

    # Training: the times exclude evaluating and saving.
    train = metrics['train']
    add('training loss', train['nats_per_token'])
    speeds = [x for x in train['timing/steps_per_second'].values() if x > 0]
    if speeds:
        column['seconds a step, median'] = f'{1 / statistics.median(speeds):.4g}'
        column['seconds of all steps'] = f'{sum(train["timing/seconds"].values()):,.1f}'
    for tag in sorted(train, key=lambda tag: (len(tag), tag)):
        if tag.startswith(LOAD):
            add(f'load of expert {tag.removeprefix(LOAD)}', train[tag])

    # Evaluations: the best steps are those in results.csv.
    for name, tags in sorted(metrics.items()):
        if name.startswith(VALIDATION):
            losses = tags['nats_per_text_token']
            finite = [step for step, loss in losses.items() if math.isfinite(loss)]
            best = min(finite, key=losses.__getitem__, default=-1)
            add(f'validation loss of {name.removeprefix(VALIDATION)}', losses, best)
    scores = results.Results(folder).scores()
    scores |= results.averages(scores)
    best_steps = results.best_steps(scores)
    for tag, title in results.columns_of(scores).items():
        add(title, scores[tag], best_steps[results.group_of(tag)])
    if not column:
        raise Refused(f'--runs: {folder} has neither metrics.jsonl nor results: name a run')
    return column


def answers_of(folder: Path) -> Column:
    """Return the answers to the first examples of each task, or their scores, at its last step."""
    last_steps: dict[str, int] = {}
    for tag, values in results.Results(folder).scores().items():
        task = tag.partition('/')[0]
        last_steps[task] = max(*values, last_steps.get(task, 0))
    column = {}
    for task, step in last_steps.items():
        file = folder / results.FOLDER / f'{task}-{step:06}.jsonl'
        if not file.exists():
            continue
        with file.open('rb') as stream:
            for number, content in enumerate(itertools.islice(stream, NUM_EXAMPLES), start=1):
                title, answer = read_example(content, f'line {number} of {file}')
                column[f'{task}: {title}'] = answer
    return column


def read_example(content: bytes, title: str) -> tuple[str, str]:
    """Return the texts of an example in TASK-STEP.jsonl, 'input → target', and its answer or score."""
    line = paths.json_object(content, title)
    fields = line['input']
    inputs = fields['inputs_pretokenized'] or f'ids {fields["inputs"]}'
    target = fields['targets_pretokenized'] or f'ids {fields["targets"]}'
    answer = code(line['output']) if 'output' in line else f'score {line["score"]:.5g}'
    return f'{code(inputs)} → {code(target)}', answer


def code(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Return a text as code in a table of Markdown, which shows '<extra_id_0>' unchanged."""
    # Replace characters that end the row, control the terminal, or cannot be encoded.
    text = re.sub(r'[\s\x00-\x1f\x7f-\x9f\ud800-\udfff]+', ' ', text)
    if len(text) > limit:
        text = f'{text[:limit]} …'
    text = text.replace('|', r'\|')
    if '`' in text:
        return f'`` {text} ``'
    return f'`{text or " "}`'
