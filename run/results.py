"""Results of task metrics: T5's table of them, and the files that keep them.

    inference_eval/TASK-STEP.jsonl      a line per example: input, target, output, prediction, score
    inference_eval/TASK-metrics.jsonl   a line per step: {"step": 1000, "accuracy": 71.5}
    inference_eval/TASK-settings.json   {step: hashes of everything on which its line depends}
    results.csv                         T5's table: a row per step, a column per metric

The first two have the format of SeqIO's loggers. Each evaluation rebuilds the table from the second.
Results from other files or settings are never replaced. Source: seqio/loggers.py;
t5/scripts/parse_tb.py, t5/evaluation/eval_utils.py. Imports no jax.
"""

import csv
import io
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import paths
from formats.best import read_lines
from messages import Refused
from paths import AnyPath
from run.lock import alone_in

FOLDER = 'inference_eval'
METRICS_SUFFIX = '-metrics.jsonl'
SETTINGS_SUFFIX = '-settings.json'

Scores = Mapping[str, Mapping[int, float]]  # {'TASK/METRIC': {step: value}}
Line = dict[str, Any]  # one of TASK-metrics.jsonl: a step, numbers and texts


# T5's table.

GLUE = {
    'glue_cola_v002/matthews_corrcoef': 'CoLA',
    'glue_sst2_v002/accuracy': 'SST-2',
    'glue_mrpc_v002/f1': 'MRPC (F1)',
    'glue_mrpc_v002/accuracy': 'MRPC (accuracy)',
    'glue_stsb_v002/pearson_corrcoef': 'STSB (Pearson)',
    'glue_stsb_v002/spearman_corrcoef': 'STSB (Spearman)',
    'glue_qqp_v002/f1': 'QQP (F1)',
    'glue_qqp_v002/accuracy': 'QQP (accuracy)',
    'glue_mnli_matched_v002/accuracy': 'MNLIm',
    'glue_mnli_mismatched_v002/accuracy': 'MNLImm',
    'glue_qnli_v002/accuracy': 'QNLI',
    'glue_rte_v002/accuracy': 'GLUE RTE',
}
SUPER_GLUE = {
    'super_glue_boolq_v102/accuracy': 'BoolQ (accuracy)',
    'super_glue_cb_v102/mean_3class_f1': 'CB (F1)',
    'super_glue_cb_v102/accuracy': 'CB (accuracy)',
    'super_glue_copa_v102/accuracy': 'CoPA',
    'super_glue_multirc_v102/f1': 'MultiRC (F1)',
    'super_glue_multirc_v102/exact_match': 'MultiRC (EM)',
    'super_glue_record_v102/f1': 'ReCoRD (F1)',
    'super_glue_record_v102/em': 'ReCoRD (EM)',
    'super_glue_rte_v102/accuracy': 'SuperGLUE RTE',
    'super_glue_wic_v102/accuracy': 'WiC',
    'super_glue_wsc_v102_simple_eval/accuracy': 'WSC',
}
AVERAGES = {
    'Average GLUE Score': GLUE,
    'Average SuperGLUE Score': SUPER_GLUE,
}
# The averages and the columns of T5's table, in its order: {'TASK/METRIC': title}.
KNOWN = {
    'Average GLUE Score': 'Average GLUE Score',
    **GLUE,
    'cnn_dailymail_v002/rouge1': 'CNN/DM (ROUGE-1)',
    'cnn_dailymail_v002/rouge2': 'CNN/DM (ROUGE-2)',
    'cnn_dailymail_v002/rougeL': 'CNN/DM (ROUGE-L)',
    'cnn_dailymail_v002/rougeLsum': 'CNN/DM (ROUGE-L)',
    'squad_v010_allanswers/em': 'SQuAD (EM)',
    'squad_v010_allanswers/f1': 'SQuAD (F1)',
    'Average SuperGLUE Score': 'Average SuperGLUE Score',
    **SUPER_GLUE,
    'dpr_v001_simple/accuracy': 'DPR',
    'wmt_t2t_ende_v003/bleu': 'WMT T2T En-De',
    'wmt14_ende_v003/bleu': 'WMT14 En-De',
    'wmt15_enfr_v003/bleu': 'WMT15 En-Fr',
    'wmt16_enro_v003/bleu': 'WMT16 En-Ro',
}


def table(scores: Scores) -> str:
    """Return T5's table of scores as CSV: a row per step, the best values, and their steps.

    T5's columns come first, in its order, then other tasks by name. The best step of a
    group, such as F1 and accuracy of MRPC, is the one with the best mean.
    """
    scores = dict(scores) | averages(scores)
    columns = columns_of(scores)
    steps = sorted({step for values in scores.values() for step in values})
    rows = [['step', *columns.values()]]
    for step in steps:
        rows.append([str(step), *[format_value(scores[tag].get(step)) for tag in columns]])
    best = best_steps(scores)
    rows += [['max'], ['step']]
    for tag in columns:
        step = best[group_of(tag)]
        rows[-2].append(format_value(scores[tag].get(step)))
        rows[-1].append(str(step))
    file = io.StringIO()
    csv.writer(file, lineterminator='\n').writerows(rows)
    return file.getvalue().removesuffix('\n')


def columns_of(tags: Collection[str]) -> dict[str, str]:
    """Return the titles of 'TASK/METRIC': T5's table in its order, then others by name."""
    columns = {tag: title for tag, title in KNOWN.items() if tag in tags}
    return columns | {tag: tag for tag in sorted(tags) if tag not in KNOWN}


def group_of(tag: str) -> str:
    """Return the group of columns with a common best step: T5's of one task or of MNLI; else the tag itself."""
    if tag not in KNOWN:
        return tag
    return tag.partition('/')[0].replace('_mismatched', '_matched')


def averages(scores: Scores) -> dict[str, dict[int, float]]:
    """Return the averages of the groups' means over GLUE and SuperGLUE, for the steps that have all columns."""
    per_average: dict[str, dict[int, float]] = {}
    for title, columns in AVERAGES.items():
        if not columns.keys() <= scores.keys():
            continue
        for step in sorted(set.intersection(*[set(scores[tag]) for tag in columns])):
            groups: dict[str, list[float]] = {}
            for tag in columns:
                groups.setdefault(group_of(tag), []).append(scores[tag][step])
            average = mean([mean(values) for values in groups.values()])
            per_average.setdefault(title, {})[step] = average
    return per_average


def best_steps(scores: Scores) -> dict[str, int]:
    """Return {group: the first step with the largest mean over its columns}. nan is worse than any number."""
    groups: dict[str, dict[int, list[float]]] = {}
    for tag in columns_of(scores):
        values_of_step = groups.setdefault(group_of(tag), {})
        for step, value in scores[tag].items():
            values_of_step.setdefault(step, []).append(value)
    best = {}
    for group, values_of_step in groups.items():
        means = {}
        for step in sorted(values_of_step):
            average = mean(values_of_step[step])
            means[step] = -math.inf if math.isnan(average) else average
        best[group] = max(means, key=means.__getitem__)
    return best


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def format_value(value: float | None) -> str:
    """Return a cell of the table: '' for a step without a value."""
    return '' if value is None else f'{value:.3f}'


# The files.


def check_writable(folder: AnyPath) -> None:
    """Raise Refused if this process may not create `folder` or write into it. Buckets are not checked."""
    if not isinstance(folder, Path):
        return
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        raise Refused(f'{folder}: {existing} is read-only for you: name another --output_dir')


class Results:
    """The results of a run, in its workdir or in another folder."""

    def __init__(self, folder: AnyPath):
        self.table_file = folder / 'results.csv'
        self.folder = folder / FOLDER

    def settings_of(self, name: str, step: int) -> str | None:
        """Return the settings of a task's results at a step; None without results."""
        entry = self.entries(name).get(str(step))
        if isinstance(entry, dict) and step in [line['step'] for line in self.lines(name)]:
            return str(entry.get('settings'))
        return None

    def write(
        self,
        name: str,
        step: int,
        values: Mapping[str, float],
        examples: Iterable[Mapping[str, object]],
        settings: str,
    ) -> bool:
        """Write the results of a task at a step, and replace results of the same settings.

        The line in TASK-metrics.jsonl is written last, so it implies the others. Returns False, and writes nothing,
        if there are results of other settings.
        """
        with alone_in(self.folder):  # several evaluations may write at once
            if self.settings_of(name, step) not in (None, settings):
                return False
            content = ''.join(map(as_line, examples))
            paths.replace_file(self.file(name, f'-{step:06}.jsonl'), content.encode())
            entries = self.entries(name) | {str(step): {'settings': settings}}
            content = json.dumps(entries, indent=1)
            paths.replace_file(self.file(name, SETTINGS_SUFFIX), content.encode())
            others = [line for line in self.lines(name) if line['step'] != step]
            lines = sorted([*others, {'step': step, **values}], key=lambda line: line['step'])
            content = ''.join(map(as_line, lines))
            paths.replace_file(self.file(name, METRICS_SUFFIX), content.encode())
        return True

    def write_table(self) -> None:
        scores = self.scores()
        if scores:
            paths.replace_file(self.table_file, f'{table(scores)}\n'.encode())

    def scores(self) -> dict[str, dict[int, float]]:
        """Return all results as {'TASK/METRIC': {step: value}}."""
        scores: dict[str, dict[int, float]] = {}
        for file in sorted(self.folder.glob(f'*{METRICS_SUFFIX}')):
            name = file.name.removesuffix(METRICS_SUFFIX)
            for line in self.lines(name):
                for metric, value in line.items():
                    if metric != 'step':
                        scores.setdefault(f'{name}/{metric}', {})[line['step']] = value
        return scores

    def lines(self, name: str) -> list[Line]:
        """Return the lines of TASK-metrics.jsonl. Raises Refused for one that is damaged."""
        return read_lines(self.file(name, METRICS_SUFFIX))

    def entries(self, name: str) -> dict[str, object]:
        """Return {step: {'settings': …}} of TASK-settings.json."""
        file = self.file(name, SETTINGS_SUFFIX)
        return paths.read_json(file) if file.exists() else {}

    def file(self, name: str, suffix: str) -> AnyPath:
        return self.folder / f'{file_name(name)}{suffix}'


def file_name(name: str) -> str:
    """Return the name of a task as part of a file name."""
    return name.replace('/', '_')


def as_line(content: Mapping[str, object]) -> str:
    return json.dumps(content, default=json_default) + '\n'


def json_default(value: object) -> object:
    """Convert a value of NumPy or TFDS for JSON, and anything else to its text."""
    if hasattr(value, 'tolist'):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode(errors='replace')
    return str(value)


def describe(step: int, split: str, task: str, values: Mapping[str, float]) -> str:
    """Return a small table of {metric: value} for the terminal."""
    texts = {metric: f'{value:,.3f}' for metric, value in values.items()}
    metric_width = max(map(len, texts), default=0)
    text_width = max(map(len, texts.values()), default=0)
    lines = [f'Step {step:,}, {split}:']
    for metric, text in texts.items():
        lines.append(f'  {task}  {metric:{metric_width}}  {text:>{text_width}}')
    return '\n'.join(lines)
