"""`--mode=report`: one HTML page of one run or of several, from their files alone.

    python main.py --mode=report --runs=runs/a,runs/b

The page has curves, results, a sample of the predictions, and the settings that differ. It needs
nothing else: no network, no other file. report.html is its template, which escapes every text of a
user; report.css has the looks, and report.js shows values below the pointer. Imports no jax.
"""

import base64
import datetime
import hashlib
import itertools
import json
import math
import os
import random
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from absl.flags import FlagValues
from ml_collections import ConfigDict

import paths
from benchmarks import chart  # the page, which draws with it, goes next
from benchmarks.chart import Curve, Point
from configs import base, check
from formats.best import read_metrics
from messages import Refused
from modes import process
from run import results

FILE = 'report.html'
MOST_POINTS = 600  # per curve
MOST_FIGURES = 240
MOST_RESULTS = 1000  # rows of the table
MOST_EXAMPLES = 60  # per task
MOST_CHARACTERS = 1500  # per text
MIN_SCALE = 1 / MOST_CHARACTERS
MAX_RUNS = 8  # as many as there are colors
HERE = Path(__file__).parent


def main(config: None, flags: FlagValues, signals: process.Signals) -> int:
    file = write(flags.runs, flags.output_dir)
    signals.begin_work()
    process.print_lines([str(file)], sys.stdout)
    return 0


class Metric(NamedTuple):
    """A metric of metrics.jsonl and the figure of it."""

    tag: str
    title: str
    unit: str = ''
    from_zero: bool = False


TRAINING = (
    Metric('nats_per_token', 'Training loss', 'nats per target token'),
    Metric('accuracy', 'Training accuracy', 'of target tokens', from_zero=True),
    Metric('learning_rate/current', 'Learning rate', from_zero=True),
    Metric('weight_gradient_norm', 'Norm of the gradient'),
    Metric(
        'timing/tokens_per_second', 'Throughput', 'tokens a second with padding', from_zero=True
    ),
    Metric('timing/data_wait_fraction', 'Waiting for data', 'fraction of the time', from_zero=True),
)
VALIDATION_LOSS = Metric(
    'nats_per_text_token', 'Validation loss', 'nats per text token (dashed: unigram)'
)
BASELINE = 'unigram_nats_per_text_token'
VALIDATION = 'training_eval/'  # the prefix of an evaluation's name in metrics.jsonl
SCORES = results.FOLDER  # the name of the task metrics beside them
LOSS_SUFFIX = ', validation loss'
MORE = 'More of training'  # the title of the figures that are shown on request
LOADS = 'experts/load/'  # the prefix of the load of each expert of families/switch.py
NO_CURVE = ('batch_crc32', 'data/', LOADS)  # prefixes of tags without a curve


class Run(NamedTuple):
    """What the files of a run say."""

    name: str  # without what the folders of all runs have in common
    folder: Path
    metrics: Mapping[str, results.Scores]  # {'train': {tag: values}}; and SCORES
    corpus: str  # in words
    settings: dict[str, Any]
    num_parameters: str

    def values(self, name: str, tag: str) -> Mapping[int, float]:
        """Return {step: value} of a tag in the lines of metrics.jsonl with a name, as 'train'."""
        return self.metrics.get(name, {}).get(tag, {})

    def summary(self) -> list[str]:
        """Return the last step, the number of parameters, loss, tokens a second, and time."""
        step = loss = speed = time = ''
        losses = self.values('train', 'nats_per_token')
        if losses:
            last = max(losses)
            loss = results.format_value(losses[last])
            step = f'{last:,}'
            num_steps = self.settings.get('train.steps', last)
            if num_steps != last:
                step += f' of {num_steps:,}'
        speeds = self.values('train', 'timing/tokens_per_second').values()
        if speeds:
            speed = f'{statistics.median(speeds):,.0f}'
        seconds = 0.0  # the time of the logged steps, without evaluating and saving
        steps_per_second = self.values('train', 'timing/steps_per_second')
        for before, at in itertools.pairwise(steps_per_second):
            if steps_per_second[at] > 0:  # no run writes another one
                seconds += (at - before) / steps_per_second[at]
        if seconds:
            minutes, seconds = divmod(round(seconds), 60)
            time = f'{minutes // 60}:{minutes % 60:02}:{seconds:02}'
        return [step, self.num_parameters, loss, speed, time]


def write(names: Sequence[str], output_dir: str = '') -> Path:
    """Write the report of some runs to `output_dir`, else into the first run. Return its path.

    Raises Refused if one of them is not a run.
    """
    if not 1 <= len(names) <= MAX_RUNS:
        raise Refused(f'--runs has {len(names)} runs: name 1 to {MAX_RUNS}, as in --runs=RUN,RUN')
    folders = []
    for name in names:
        folder = paths.disk_path(name)
        if not read_metrics(folder) and not results.Results(folder).scores():
            raise Refused(f'--runs={name}: {folder} has neither metrics.jsonl nor results')
        folders.append(folder)
    common = os.path.commonpath([folder.parent for folder in folders])
    runs = [read_run(str(folder.relative_to(common)), folder) for folder in folders]
    folder = paths.disk_path(output_dir or runs[0].folder)
    paths.check_new(folder)
    results.check_writable(folder)
    command = shlex.join(['python', 'main.py', '--mode=report', f'--runs={",".join(names)}'])
    content = render(runs, command)
    with paths.naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
        paths.replace_file(folder / FILE, content)
    return folder / FILE


# Reading.


def read_run(name: str, folder: Path) -> Run:
    """Return what is in the folder of a run. Files of a run that has just begun may be missing."""
    metrics: dict[str, dict[str, dict[int, float]]] = {}
    corpora = set()
    for line in read_metrics(folder):
        of_name = metrics.setdefault(line.pop('run'), {})
        step = line.pop('step')
        corpora.add(line.pop('corpus'))
        for tag, value in line.items():
            of_name.setdefault(tag, {})[step] = value
    scores = results.Results(folder).scores()
    metrics[SCORES] = scores | results.averages(scores)
    num_parameters = ''
    info = folder / 'model-info.txt'
    if info.exists():
        text = info.read_text(errors='replace')  # it may be damaged
        match = re.search(r'^Total number of parameters: (\d+)', text, re.MULTILINE)
        if match:
            num_parameters = f'{int(match[1]):,}'
    stored = ConfigDict(check.read_stored(folder), allow_dotted_keys=True)
    settings = dict(check.leaves(stored))
    return Run(name, folder, metrics, ', '.join(sorted(corpora)), settings, num_parameters)


# The page.


def render(runs: Sequence[Run], command: str) -> bytes:
    """Return the page as UTF-8."""
    script = (HERE / 'report.js').read_text()
    # The browser loads nothing and runs our script alone.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.globals |= {'chart': chart, 'MORE': MORE, 'MAX_RUNS': MAX_RUNS}
    environment.filters |= {
        'count': '{:,}'.format,
        'score': results.format_value,
        'value': chart.format_value,
        'number': lambda title: ('number', title),  # a column of a table: its class and title
    }
    # Without the line ends and the indentation of the template.
    template = re.sub(r'\n *', '', (HERE / FILE).read_text())
    macros = environment.from_string(template).module

    def page(name: str, *arguments: object, **more: object) -> str:
        return getattr(macros, name)(*arguments, **more)

    figures = all_figures(runs)
    text = page(
        'page',
        policy=policy,
        style=(HERE / 'report.css').read_text(),
        script=script,
        runs=runs,
        has_figures=bool(figures),
        parts=[  # 2 MB together
            fitting(1_000_000, draw_figures, page, figures),
            fitting(200_000, write_scores, page, runs),
            fitting(600_000, write_predictions, page, runs, find_predictions(runs)),
            fitting(100_000, write_settings, page, runs),
        ],
        now=datetime.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M %Z'),
        command=command,
    )
    return f'{text}\n'.encode(errors='replace')


def fitting(max_bytes: int, make: Callable[..., str], *arguments: object) -> str:
    """Return what `make` writes on the first scale of 1, 1/2, 1/4 ... that has at most `max_bytes`."""
    scale = 1.0
    while True:
        part = make(*arguments, scale)
        if len(part.encode(errors='replace')) <= max_bytes or scale <= MIN_SCALE:
            return part
        scale /= 2


# Curves.


class Figure(NamedTuple):
    """One of the small figures."""

    section: str
    metric: Metric
    curves: list[Curve]
    notes: str  # on its values
    drawings: Sequence[chart.Drawing] = ()  # linear and logarithmic


def all_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the figures of everything that was logged, the main ones first."""
    figures = [make_figure('Training', runs, 'train', metric) for metric in TRAINING]
    validations = names_of_validations(runs)
    for name in validations:
        metric = VALIDATION_LOSS
        if len(validations) > 1:
            metric = metric._replace(title=f'{metric.title}, {name.removeprefix(VALIDATION)}')
        figure = make_figure('Validation', runs, name, metric)
        if figure.curves:
            for curve in make_figure('', runs, name, metric._replace(tag=BASELINE)).curves:
                baseline = curve._replace(name=f'{curve.name}, unigram', is_dashed=True)
                figure.curves.append(baseline)
        figures.append(figure)
    for tag, column in results.columns_of(tags_of(runs, SCORES)).items():
        title = column.title if tag in results.AVERAGES else tag
        figures.append(make_figure('Task metrics', runs, SCORES, Metric(tag, title)))
    figures += [make_loads(run) for run in runs]
    for tag in sorted(tags_of(runs, 'train') - {metric.tag for metric in TRAINING}):
        if not tag.startswith(NO_CURVE):
            figures.append(make_figure(MORE, runs, 'train', Metric(tag, tag)))
    return [figure for figure in figures if figure.curves]


def names_of_validations(runs: Sequence[Run]) -> list[str]:
    names = {name for run in runs for name in run.metrics if name.startswith(VALIDATION)}
    return sorted(names)


def tags_of(runs: Sequence[Run], name: str) -> set[str]:
    return {tag for run in runs for tag in run.metrics.get(name, {})}


def make_figure(section: str, runs: Sequence[Run], name: str, metric: Metric) -> Figure:
    """Return the figure of a metric, with a curve for each run that has finite values of it."""
    curves = []
    num_not_finite = 0
    for i, run in enumerate(runs):
        values = run.values(name, metric.tag)
        points = points_of(values)
        num_not_finite += len(values) - len(points)
        if points:
            curves.append(Curve(run.name, css_class=f'run{i}', points=points))
    notes = []
    if metric.unit:
        notes.append(metric.unit)
    if num_not_finite:
        notes.append(f'{num_not_finite} values are not finite')
    return Figure(section, metric, curves, '; '.join(notes))


def make_loads(run: Run) -> Figure:
    """Return the figure of the share of tokens that each expert is chosen for, the mean over the layers."""
    tags = [tag for tag in run.metrics.get('train', {}) if tag.startswith(LOADS)]
    curves = []
    for i, tag in enumerate(sorted(tags, key=lambda tag: (len(tag), tag))):
        points = points_of(run.values('train', tag))
        if points:
            curves.append(Curve(tag.removeprefix(LOADS), f'run{i % MAX_RUNS}', points))
    metric = Metric(LOADS, f'Load of the experts, {run.name}', from_zero=True)
    return Figure('Training', metric, curves, 'share of tokens')


def points_of(values: Mapping[int, float]) -> list[Point]:
    """Return the values that are drawn: finite, and so far from the ends of floats that an axis has ticks."""
    points = []
    for step, x in sorted(values.items()):
        if math.isfinite(x) and (x == 0 or 1e-300 < abs(x) < 1e300):
            points.append(Point(step, x))
    return points


def draw_figures(page: Callable[..., str], figures: Sequence[Figure], scale: float) -> str:
    """Return the figures by section. What is left out is counted."""
    most_points = max(round(MOST_POINTS * scale), 4)
    most_figures = round(MOST_FIGURES * scale)
    sections: dict[str, list[Figure]] = {}
    for figure in figures[:most_figures]:
        curves = []
        for curve in figure.curves:
            curves.append(curve._replace(points=chart.thin(curve.points, most_points)))
        metric = figure.metric
        drawings = [chart.draw(metric.title, curves, metric.from_zero)]
        if figure.section != 'Task metrics' and chart.can_be_logarithmic(curves):
            drawings.append(chart.draw(metric.title, curves, is_logarithmic=True))
        drawn = figure._replace(drawings=drawings)
        sections.setdefault(figure.section, []).append(drawn)
    return page('figures', sections, num_left_out=len(figures) - most_figures)


# Results.


class Score(NamedTuple):
    """The values of a metric that the table of results has of a run."""

    best: float | None  # None where the run has no value
    step: int  # where the best value is
    last: float | None
    is_bold: bool  # the best one of several runs


def write_scores(page: Callable[..., str], runs: Sequence[Run], scale: float) -> str:
    """Return a table with a row for each validation loss and task metric.

    The best loss is the lowest. The best step of task metrics is T5's, as in `results.best_steps`.
    """
    rows: dict[str, list[Score]] = {}
    for name in names_of_validations(runs):
        series = [run.values(name, VALIDATION_LOSS.tag) for run in runs]
        steps = []
        for values in series:
            finite = [step for step, x in values.items() if math.isfinite(x)]
            steps.append(min(finite, key=values.__getitem__, default=-1))
        rows[name.removeprefix(VALIDATION) + LOSS_SUFFIX] = make_scores(series, steps, choose=min)
    best_steps = [results.best_steps(run.metrics[SCORES]) for run in runs]
    for tag, column in results.columns_of(tags_of(runs, SCORES)).items():
        series = [run.values(SCORES, tag) for run in runs]
        steps = [best.get(column.group, -1) for best in best_steps]
        rows[column.title] = make_scores(series, steps, choose=max)
    columns = []
    for i, run in enumerate(runs):
        title = 'best' if len(runs) == 1 else f'{run.name}: best'
        columns += [(f'run{i} number', title), ('number', 'at step'), ('number', 'last')]
    shown = dict(list(rows.items())[: round(MOST_RESULTS * scale)])
    return page('results', columns, shown, num_left_out=len(rows) - len(shown))


def make_scores(
    series: Sequence[Mapping[int, float]], steps: Sequence[int], choose: Callable
) -> list[Score]:
    """Return the scores of the runs from their values, {step: value}, and best steps (-1: none)."""
    finite = []
    for values, step in zip(series, steps, strict=True):
        if math.isfinite(values.get(step, math.nan)):
            finite.append(values[step])
    best_of_all = choose(finite, default=None)
    scores = []
    for values, step in zip(series, steps, strict=True):
        best = values.get(step)
        is_bold = len(series) > 1 and best is not None and best == best_of_all
        scores.append(Score(best, step, values.get(max(values, default=-1)), is_bold))
    return scores


# Predictions.


class Predictions(NamedTuple):
    """The predictions of a run on a task: the file of its last step."""

    run: int  # its index
    file: Path
    step: int
    num_examples: int


class Text(NamedTuple):
    """An input, a target, or the prediction or score of a run."""

    title: str
    text: str
    css: str = ''
    mark: str = ''  # 'same' or 'differs' for a prediction that equals the target, or does not
    is_score: bool = False


def write_predictions(
    page: Callable[..., str],
    runs: Sequence[Run],
    tasks: Mapping[str, Sequence[Predictions]],
    scale: float,
) -> str:
    """Return a sample of the predictions of each task beside their targets."""
    most_examples = max(round(MOST_EXAMPLES * scale), 1)
    most_characters = round(MOST_CHARACTERS * scale)
    found = {}
    for task, of_task in tasks.items():
        examples = sample(runs, of_task, most_examples, most_characters)
        num_examples = min(predictions.num_examples for predictions in of_task)
        steps = sorted({predictions.step for predictions in of_task})
        of_steps = ', '.join(f'{step:,}' for step in steps)
        title = f'{task}, step {of_steps}: {len(examples):,} of {num_examples:,} examples'
        found[title] = examples
    return page('predictions', found)


def find_predictions(runs: Sequence[Run]) -> dict[str, list[Predictions]]:
    """Return {task: the newest predictions of each run that has some}."""
    found: dict[str, list[Predictions]] = {}
    for i, run in enumerate(runs):
        newest: dict[str, tuple[int, Path]] = {}
        for file in sorted((run.folder / results.FOLDER).glob('*.jsonl')):
            match = re.fullmatch(r'(.+)-(\d{6,})\.jsonl', file.name, re.DOTALL)
            if match:
                task = match[1]
                newest[task] = max((int(match[2]), file), newest.get(task, (-1, file)))
        for task, (step, file) in newest.items():
            with file.open('rb') as stream:
                num_examples = sum(1 for _ in stream)
            if num_examples:
                predictions = Predictions(i, file, step=step, num_examples=num_examples)
                found.setdefault(task, []).append(predictions)
    return dict(sorted(found.items()))


def sample(
    runs: Sequence[Run], of_task: Sequence[Predictions], most: int, most_characters: int
) -> list[list[Text]]:
    """Return the texts of the same random examples of all runs.

    A run that has another example at the same place has examples of its own.
    """
    num_examples = min(predictions.num_examples for predictions in of_task)
    chosen = set(random.Random(0).sample(range(num_examples), min(most, num_examples)))
    found: dict[tuple[int, str, str], list[Text]] = {}
    for predictions in of_task:
        css = f'run{predictions.run}'
        title = 'prediction'
        if len(runs) > 1:
            title = runs[predictions.run].name
        with predictions.file.open('rb') as stream:
            for number, content in enumerate(stream):
                if number not in chosen:
                    continue
                line = read_prediction(content, f'line {number + 1} of {predictions.file}')
                fields = line['input']
                inputs = fields['inputs_pretokenized'] or f'ids {fields.get("inputs")}'
                target = fields['targets_pretokenized'] or f'ids {fields.get("targets")}'
                key = (number, inputs, target)
                if key not in found:
                    shown = Text('input', cut(inputs, most_characters))
                    found[key] = [shown, Text('target', cut(target, most_characters))]
                if 'output' not in line:
                    found[key].append(Text(title, f'score {line["score"]:.5g}', css, is_score=True))
                    continue
                targets = [line['target']]
                if isinstance(line['target'], list):
                    targets += line['target']
                mark = 'differs'
                if line['prediction'] in targets:
                    mark = 'same'
                found[key].append(Text(title, cut(line['output'], most_characters), css, mark))
    return [texts for _, texts in sorted(found.items())]


def read_prediction(text: bytes, title: str) -> dict[str, Any]:
    """Return a line of TASK-STEP.jsonl. Raises Refused, which has its title, for a damaged one."""
    line = paths.json_object(text, title)
    fields = line.get('input')
    texts = [None]
    if isinstance(fields, dict):
        texts = [fields.get('inputs_pretokenized'), fields.get('targets_pretokenized')]
    is_valid = type(line.get('score')) is float
    if 'output' in line:
        texts.append(line['output'])
        is_valid = 'prediction' in line
    is_valid &= 'target' in line and all(type(text) is str for text in texts)
    if not is_valid:
        raise Refused(f'{title} is damaged (no input, target and answer): {paths.RESTORE_LINE}')
    return line


def cut(text: str, most_characters: int) -> str:
    """Return the beginning of a long text, and how much more there is."""
    if len(text) <= most_characters:
        return text
    num_more = len(text) - most_characters
    return f'{text[:most_characters]} … {num_more:,} characters more'


# Settings.


def write_settings(page: Callable[..., str], runs: Sequence[Run], scale: float) -> str:
    """Return the settings that differ between the runs; of one run, those that are not the default."""
    columns = [(f'run{i}', run.name) for i, run in enumerate(runs) if run.settings]
    of_all = [run.settings for run in runs if run.settings]
    defaults = dict(check.leaves(ConfigDict(json.loads(base.get_config().to_json()))))
    title = ''
    compared = of_all
    if len(of_all) == 1:
        title = 'Settings that are not the default'
        compared = [*of_all, defaults]
    elif of_all:
        title = 'Settings that differ'
    rows: dict[str, list[str]] = {}
    for key in itertools.chain(*compared):  # in the order of config.json
        if any(of_run.get(key) != compared[0].get(key) for of_run in compared):
            rows[key] = []
            for of_run in [*of_all, defaults]:
                text = ''
                if key in of_run:
                    text = json.dumps(of_run[key], ensure_ascii=False)
                rows[key].append(cut(text, round(MOST_CHARACTERS * scale)))
    return page('settings', title, columns, rows)
