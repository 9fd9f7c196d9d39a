"""`--mode=report`: one HTML page of one run or of several, from their files alone.

    python main.py --mode=report --runs=runs/a,runs/b

The page has curves, results, a sample of the predictions, and the settings that differ. It needs
nothing else: no network, no other file. The elements are of xml.etree, so that every text of a user
is escaped; report.css has the looks, and report.js shows values below the pointer. Imports no jax.
"""

import base64
import datetime
import functools
import hashlib
import json
import math
import os
import random
import re
import shlex
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from ml_collections import ConfigDict

import chart
import paths
import results
import settings
from best import read_metrics, read_settings
from chart import Curve, Point
from configs import base

FILE = 'report.html'
# Bytes of the parts of a page, 2 MB together. A part that is larger shows less.
MAX_BYTES_OF_FIGURES = 1_000_000
MAX_BYTES_OF_RESULTS = 200_000
MAX_BYTES_OF_PREDICTIONS = 600_000
MAX_BYTES_OF_SETTINGS = 100_000
MOST_POINTS = 600  # of a curve
MOST_FIGURES = 240
MOST_RESULTS = 1000  # rows of the table
MOST_EXAMPLES = 60  # of a task
MOST_CHARACTERS = 1500  # of a text
MIN_SCALE = 1 / MOST_CHARACTERS
MAX_RUNS = 8  # that colors tell apart
HERE = Path(__file__).parent


Series = Mapping[int, float]  # {step: value}


class Metric(NamedTuple):
    """A metric of metrics.jsonl and the figure of it."""

    tag: str
    title: str
    unit: str = ''
    from_zero: bool = False
    baseline: str = ''  # the tag of a dashed line


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
    'nats_per_text_token',
    'Validation loss',
    'nats per text token (dashed: unigram)',
    baseline='unigram_nats_per_text_token',
)
VALIDATION = 'training_eval/'  # what begins the name of an evaluation in metrics.jsonl
LOSS_SUFFIX = ', validation loss'
MORE = 'More of training'  # the title of the figures that are shown on request
NO_CURVE = ('batch_crc32', 'data/')  # what begins the tags that are no curves


class Run(NamedTuple):
    """What the files of a run say."""

    name: str  # without what the folders of all runs have in common
    folder: Path
    metrics: dict[str, dict[str, dict[int, float]]]  # of metrics.jsonl: {'train': {tag: values}}
    corpora: set[str]  # in words
    scores: results.Scores  # of task metrics
    settings: dict[str, Any]
    num_parameters: str


def write(names: Sequence[str], output_dir: str = '') -> Path:
    """Write the report of some runs to `output_dir`, else into the first run. Return its path.

    Raises ValueError for a folder that is no run, and OSError where the file cannot be written.
    """
    runs = read_runs(names)
    folder = runs[0].folder
    if output_dir:
        folder = paths.disk_path(output_dir)
    paths.check_new(folder)
    paths.check_writable(folder)
    command = shlex.join(['python', 'main.py', '--mode=report', f'--runs={",".join(names)}'])
    content = render(runs, command)
    file = folder / FILE
    with paths.writing_results(folder):
        folder.mkdir(parents=True, exist_ok=True)
        paths.replace_file(file, content)
    return file


# Reading.


def read_runs(names: Sequence[str]) -> list[Run]:
    """Return the runs in these folders. Raises ValueError where one of them is no run."""
    if not names:
        raise ValueError('--mode=report needs a run: name it with --runs=RUN, or several RUN,RUN')
    if len(names) > MAX_RUNS:
        raise ValueError(
            f'--runs has {len(names)} runs: a page can show {MAX_RUNS}, write several reports'
        )
    folders: list[Path] = []
    for name in names:
        if paths.is_in_bucket(name):
            raise ValueError(
                f'--runs={name}: a report reads folders on a disk: copy the run without its '
                'checkpoints, and name the copy'
            )
        folder = paths.disk_path(name)
        check_is_run(name, folder)
        if folder in folders:
            raise ValueError(f'--runs names {folder} twice: name each run once')
        folders.append(folder)
    common = os.path.commonpath([folder.parent for folder in folders])
    return [read_run(str(folder.relative_to(common)), folder) for folder in folders]


def check_is_run(name: str, folder: Path) -> None:
    """Raise ValueError unless there is something to report in `folder`."""
    if not folder.is_dir():
        raise ValueError(f'--runs={name}: there is no such folder: name the folder of a run')
    if read_metrics(folder) or results.Results(folder).scores():
        return
    below = sorted(file.parent.name for file in folder.glob('*/metrics.jsonl'))
    remedy = 'name the folder of a run, after its first logged step (log.every_steps)'
    if below:
        remedy = f'name the runs in it: --runs={",".join(f"{name}/{run}" for run in below[:3])}'
    raise ValueError(f'--runs={name}: the folder has neither metrics nor results: {remedy}')


def read_run(name: str, folder: Path) -> Run:
    """Return what is in the folder of a run. Files of a run that has just begun may be missing."""
    metrics: dict[str, dict[str, dict[int, float]]] = {}
    corpora = set()
    for line in read_metrics(folder):
        of_name = metrics.setdefault(line['run'], {})
        for tag, value in line.items():
            if tag not in ('step', 'run', 'corpus'):
                of_name.setdefault(tag, {})[line['step']] = value
        corpora.add(line['corpus'])
    scores = results.Results(folder).scores()
    return Run(
        name=name,
        folder=folder,
        metrics=metrics,
        corpora=corpora,
        scores=scores | results.averages(scores),
        settings=dict(settings.leaves(ConfigDict(read_settings(folder)))),
        num_parameters=read_num_parameters(folder / 'model-info.txt'),
    )


def read_num_parameters(file: Path) -> str:
    """Return the number of parameters that model-info.txt states, '' where there is none."""
    if not file.exists():
        return ''
    match = re.search(r'^Total number of parameters: (\d+)', file.read_text(), re.MULTILINE)
    if match is None:
        return ''
    return f'{int(match[1]):,}'


def values_of(run: Run, name: str, tag: str) -> Series:
    """Return the values of a tag in the lines of metrics.jsonl with a name, as 'train'."""
    return run.metrics.get(name, {}).get(tag, {})


# The page.


def render(runs: Sequence[Run], command: str) -> bytes:
    """Return the page as UTF-8."""
    title = ', '.join(run.name for run in runs)
    script = (HERE / 'report.js').read_text()
    page = Element('html', {'lang': 'en'})
    add_head(page, title, script)
    body = add(page, 'body')
    main = add(body, 'main')
    add(main, 'h1', title)
    add_summary(main, runs)
    figures = all_figures(runs)
    if figures:
        add_legend(main, runs)
        main.append(fitting(functools.partial(draw_figures, figures), MAX_BYTES_OF_FIGURES))
    main.append(fitting(functools.partial(make_results, runs), MAX_BYTES_OF_RESULTS))
    predictions = functools.partial(make_predictions, runs, find_predictions(runs))
    main.append(fitting(predictions, MAX_BYTES_OF_PREDICTIONS))
    main.append(fitting(functools.partial(make_settings, runs), MAX_BYTES_OF_SETTINGS))
    now = datetime.datetime.now().astimezone().strftime('%Y-%m-%d %H:%M %Z')
    footer = add(body, 'footer', f'Made {now} by ')
    add(footer, 'code', command)
    add(body, 'script', script)
    return f'<!DOCTYPE html>\n{to_html(page)}\n'.encode(errors='replace')


def fitting(make: Callable[[float], Element], max_bytes: int) -> Element:
    """Return `make(scale)` for the first scale of 1, 1/2, 1/4 ... that gives at most `max_bytes`."""
    scale = 1.0
    part = make(scale)
    while len(to_html(part).encode(errors='replace')) > max_bytes and scale > MIN_SCALE:
        scale /= 2
        part = make(scale)
    return part


def to_html(element: Element) -> str:
    return ElementTree.tostring(element, encoding='unicode', method='html')


def add_head(page: Element, title: str, script: str) -> None:
    """Add what a browser has to know. The policy lets it load nothing and run our script alone."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    head = add(page, 'head')
    add(head, 'meta', charset='utf-8')
    add(head, 'meta', http_equiv='Content-Security-Policy', content=policy)
    add(head, 'meta', name='viewport', content='width=device-width, initial-scale=1')
    add(head, 'link', rel='icon', href='data:,')
    add(head, 'title', f'{title} – report')
    add(head, 'style', (HERE / 'report.css').read_text())


def add(parent: Element, tag: str, text: str = '', css: str = '', **attributes: str) -> Element:
    """Append an element with a text, a class and attributes. An underscore stands for a hyphen."""
    named = {name.rstrip('_').replace('_', '-'): value for name, value in attributes.items()}
    if css:
        named['class'] = css
    element = ElementTree.SubElement(parent, tag, named)
    element.text = text
    return element


def add_table(parent: Element, columns: Iterable[str], css: str = '') -> tuple[Element, Element]:
    """Add a table that scrolls where it is too wide. Return its head's row, and its body."""
    table = add(add(parent, 'div', css='wide'), 'table', css=css)
    head = add(add(table, 'thead'), 'tr')
    for column in columns:
        add(head, 'th', column, scope='col')
    return head, add(table, 'tbody')


def add_summary(main: Element, runs: Sequence[Run]) -> None:
    """Add a table with a row for each run."""
    columns = (
        'run',
        'step',
        'parameters',
        'training loss',
        'tokens a second',
        'time in steps',
        'text',
    )
    head, body = add_table(main, columns)
    for cell in list(head)[1:-1]:
        cell.set('class', 'number')
    for i, run in enumerate(runs):
        row = add(body, 'tr')
        add(row, 'th', run.name, css=f'run{i}', scope='row', title=str(run.folder))
        add(row, 'td', describe_step(run), css='number')
        add(row, 'td', run.num_parameters, css='number')
        loss = values_of(run, 'train', 'nats_per_token')
        last = loss[max(loss)] if loss else None
        add(row, 'td', results.format_value(last), css='number')
        speed = values_of(run, 'train', 'timing/tokens_per_second')
        median = f'{statistics.median(speed.values()):,.0f}' if speed else ''
        add(row, 'td', median, css='number')
        add(row, 'td', describe_time(run), css='number')
        add(row, 'td', ', '.join(sorted(run.corpora)), css='value')


def describe_step(run: Run) -> str:
    """Return the last step with metrics, and of how many where the run has not ended."""
    steps = values_of(run, 'train', 'nats_per_token')
    if not steps:
        return ''
    step = max(steps)
    last = run.settings.get('train.steps', step)
    if step == last:
        return f'{step:,}'
    return f'{step:,} of {last:,}'


def describe_time(run: Run) -> str:
    """Return the time that the logged steps took, without evaluating and saving."""
    seconds = 0.0
    before = None
    for step, speed in values_of(run, 'train', 'timing/steps_per_second').items():
        if before is not None:
            seconds += (step - before) / speed
        before = step
    if not seconds:
        return ''
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{seconds:02}'


def add_legend(main: Element, runs: Sequence[Run]) -> None:
    """Add a bar that names the color of each run and switches runs off."""
    legend = add(main, 'div', css='legend')
    if len(runs) > 1:
        for i, run in enumerate(runs):
            label = add(legend, 'label', css=f'run{i}')
            add_checkbox(label, run.name, id=f'show{i}', checked='')
    add_checkbox(add(legend, 'label'), 'logarithmic axes', id='logarithmic')


def add_checkbox(label: Element, text: str, **attributes: str) -> None:
    checkbox = add(label, 'input', type='checkbox', autocomplete='off', **attributes)
    checkbox.tail = text


# Curves.


class Figure(NamedTuple):
    """One of the small figures."""

    section: str
    title: str
    unit: str
    curves: list[Curve]
    from_zero: bool
    num_not_finite: int


def all_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the figures of everything that was logged, the main ones first."""
    figures = [make_figure('Training', runs, 'train', metric) for metric in TRAINING]
    validations = names_of_validations(runs)
    for name in validations:
        metric = VALIDATION_LOSS
        if len(validations) > 1:
            metric = metric._replace(title=f'{metric.title}, {name.removeprefix(VALIDATION)}')
        figures.append(make_figure('Validation', runs, name, metric))
    for tag in tags_of_scores(runs):
        series = [run.scores.get(tag, {}) for run in runs]
        title = results.KNOWN[tag].title if tag in results.AVERAGES else tag
        figures.append(figure_of('Task metrics', runs, Metric(tag, title), series))
    tags: set[str] = set()
    for run in runs:
        tags |= run.metrics.get('train', {}).keys()
    tags -= {metric.tag for metric in TRAINING}
    for tag in sorted(tags):
        if not tag.startswith(NO_CURVE):
            figures.append(make_figure(MORE, runs, 'train', Metric(tag, tag)))
    return [figure for figure in figures if figure.curves]


def names_of_validations(runs: Sequence[Run]) -> list[str]:
    """Return the names of the validation losses in metrics.jsonl of all runs."""
    names: set[str] = set()
    for run in runs:
        names |= run.metrics.keys()
    return sorted(name for name in names if name.startswith(VALIDATION))


def tags_of_scores(runs: Sequence[Run]) -> list[str]:
    """Return 'TASK/METRIC' of all runs, in the order of T5's table and then by name."""
    tags: set[str] = set()
    for run in runs:
        tags |= run.scores.keys()
    known = [tag for tag in results.KNOWN if tag in tags]
    return known + sorted(tags - set(known))


def make_figure(section: str, runs: Sequence[Run], name: str, metric: Metric) -> Figure:
    """Return the figure of a metric in the lines of metrics.jsonl with a name."""
    series = [values_of(run, name, metric.tag) for run in runs]
    figure = figure_of(section, runs, metric, series)
    if metric.baseline and figure.curves:
        series = [values_of(run, name, metric.baseline) for run in runs]
        baselines = figure_of(section, runs, metric, series)
        for curve in baselines.curves:
            figure.curves.append(curve._replace(name=f'{curve.name}, unigram', is_dashed=True))
    return figure


def figure_of(
    section: str, runs: Sequence[Run], metric: Metric, series: Sequence[Series]
) -> Figure:
    """Return a figure with a curve for each run that has finite values, {step: value}."""
    curves = []
    num_not_finite = 0
    for i, (run, values) in enumerate(zip(runs, series, strict=True)):
        points = [Point(step, x) for step, x in sorted(values.items()) if math.isfinite(x)]
        num_not_finite += len(values) - len(points)
        if points:
            curves.append(Curve(run.name, css_class=f'run{i}', points=points))
    return Figure(
        section=section,
        title=metric.title,
        unit=metric.unit,
        curves=curves,
        from_zero=metric.from_zero,
        num_not_finite=num_not_finite,
    )


def draw_figures(figures: Sequence[Figure], scale: float) -> Element:
    """Return the figures, a heading for each section of them. What is left out is counted."""
    most_points = max(round(MOST_POINTS * scale), 4)
    most_figures = round(MOST_FIGURES * scale)
    all_sections = Element('div')
    section = ''
    for figure in figures[:most_figures]:
        if figure.section != section:
            section = figure.section
            grid = add_section_of_figures(all_sections, section)
        add_figure(grid, figure, most_points)
    num_left_out = len(figures) - most_figures
    if num_left_out > 0:
        text = f'{num_left_out:,} more curves are in metrics.jsonl and in TensorBoard.'
        add(all_sections, 'p', text)
    return all_sections


def add_section_of_figures(parent: Element, title: str) -> Element:
    """Add a heading, and a grid for figures, which is returned."""
    section = add(parent, 'section')
    if title == MORE:
        section = add(section, 'details')
        add(section, 'summary', title)
    else:
        add(section, 'h2', title)
    return add(section, 'div', css='figures')


def add_figure(grid: Element, figure: Figure, most_points: int) -> None:
    """Add a figure: title, linear and logarithmic curves, and the last values."""
    curves = []
    for curve in figure.curves:
        curves.append(curve._replace(points=chart.thin(curve.points, most_points)))
    element = add(grid, 'figure')
    caption = add(element, 'figcaption', f'{figure.title} ')
    notes = [figure.unit] if figure.unit else []
    if figure.num_not_finite:
        notes.append(f'{figure.num_not_finite} values are not finite')
    if notes:
        add(caption, 'small', '; '.join(notes))
    element.append(chart.draw(figure.title, curves, figure.from_zero))
    if figure.section != 'Task metrics' and chart.can_be_logarithmic(curves):
        element.append(chart.draw(figure.title, curves, is_logarithmic=True))
    add_last_values(element, [curve for curve in curves if not curve.is_dashed])


def add_last_values(element: Element, curves: Sequence[Curve]) -> None:
    """Add a line of text. The script shows other values in its place."""
    output = add(element, 'output')
    last_step = max(curve.points[-1].step for curve in curves)
    add(output, 'span', f'step {last_step:,}')
    for curve in curves:
        last = curve.points[-1]
        text = f'{curve.name} {chart.format_value(last.value)}'
        if last.step != last_step:
            text += f' at {last.step:,}'
        add(output, 'span', text, css=curve.css_class)


# Results.


class Score(NamedTuple):
    """The values of a metric that the table of results has of a run. A missing one is None."""

    best: float | None
    step: int | None  # of the best value
    last: float | None


def make_results(runs: Sequence[Run], scale: float) -> Element:
    """Return a table with a row for each validation loss and task metric."""
    section = Element('section')
    rows = scores_of_losses(runs) | scores_of_tasks(runs)
    if not rows:
        return section
    add(section, 'h2', 'Results')
    head, body = add_table(section, ['metric'])
    for i, run in enumerate(runs):
        best = 'best' if len(runs) == 1 else f'{run.name}: best'
        add(head, 'th', best, css=f'run{i} number', scope='col')
        add(head, 'th', 'at step', css='number', scope='col')
        add(head, 'th', 'last', css='number', scope='col')
    most_rows = round(MOST_RESULTS * scale)
    for title, scores in list(rows.items())[:most_rows]:
        row = add(body, 'tr')
        add(row, 'th', title, scope='row')
        add_scores(row, scores, choose=min if title.endswith(LOSS_SUFFIX) else max)
    if len(rows) > most_rows:
        text = f'{len(rows) - most_rows:,} more are in results.csv and in metrics.jsonl.'
        add(section, 'p', text)
    return section


def scores_of_losses(runs: Sequence[Run]) -> dict[str, list[Score]]:
    """Return {title: scores of the runs} of the validation losses. The best is the lowest one."""
    rows = {}
    for name in names_of_validations(runs):
        scores = []
        for run in runs:
            values = values_of(run, name, VALIDATION_LOSS.tag)
            finite = {step: x for step, x in values.items() if math.isfinite(x)}
            lowest = min(finite, key=lambda step: finite[step], default=None)
            scores.append(make_score(values, lowest))
        rows[name.removeprefix(VALIDATION) + LOSS_SUFFIX] = scores
    return rows


def scores_of_tasks(runs: Sequence[Run]) -> dict[str, list[Score]]:
    """Return {title: scores of the runs} of the task metrics.

    The best value is T5's: the largest one, where metrics of a task that belong together share the
    step with their best mean.
    """
    rows: dict[str, list[Score]] = {}
    columns = {}
    for tag in tags_of_scores(runs):
        columns[tag] = results.KNOWN.get(tag, results.Column(title=tag, group=tag))
    best_steps = []
    for run in runs:
        own_columns = {tag: columns[tag] for tag in run.scores}
        best_steps.append(results.best_steps(run.scores, own_columns))
    for tag, column in columns.items():
        scores = []
        for run, best in zip(runs, best_steps, strict=True):
            scores.append(make_score(run.scores.get(tag, {}), best.get(column.group)))
        rows[column.title] = scores
    return rows


def make_score(values: Series, best_step: int | None) -> Score:
    if best_step not in values:
        best_step = None
    return Score(
        best=None if best_step is None else values[best_step],
        step=best_step,
        last=values[max(values)] if values else None,
    )


def add_scores(row: Element, scores: Sequence[Score], choose: Callable) -> None:
    """Add the scores of the runs. Of several, the best one is bold."""
    finite = []
    for score in scores:
        if score.best is not None and math.isfinite(score.best):
            finite.append(score.best)
    for score in scores:
        css = 'number'
        if len(scores) > 1 and finite and score.best == choose(finite):
            css = 'number best'
        add(row, 'td', results.format_value(score.best), css=css)
        step = '' if score.step is None else f'{score.step:,}'
        add(row, 'td', step, css='number step')
        add(row, 'td', results.format_value(score.last), css='number')


# Predictions.


class Predictions(NamedTuple):
    """The predictions of a run on a task: the file of its last step."""

    run: int  # its index
    file: Path
    step: int
    num_examples: int


class Example(NamedTuple):
    """What tells an example apart from others."""

    number: int
    inputs: str
    target: str


def make_predictions(
    runs: Sequence[Run], tasks: Mapping[str, Sequence[Predictions]], scale: float
) -> Element:
    """Return a sample of the predictions of each task beside their targets."""
    most_examples = max(round(MOST_EXAMPLES * scale), 1)
    most_characters = round(MOST_CHARACTERS * scale)
    section = Element('section')
    if tasks:
        add(section, 'h2', 'Predictions')
    for position, (task, of_task) in enumerate(tasks.items()):
        examples = sample(of_task, most_examples)
        num_examples = min(predictions.num_examples for predictions in of_task)
        details = add(section, 'details', css='task')
        if position == 0:
            details.set('open', '')
        steps = sorted({predictions.step for predictions in of_task})
        of_steps = ', '.join(f'{step:,}' for step in steps)
        counts = f'{len(examples):,} of {num_examples:,} examples'
        add(details, 'summary', f'{task}, step {of_steps}: {counts}')
        add_filters(details)
        part = add(details, 'div', css='examples', tabindex='0')
        for example, answers in examples.items():
            add_example(part, runs, example, answers, most_characters)
    return section


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


def sample(of_task: Sequence[Predictions], most: int) -> dict[Example, dict[int, Any]]:
    """Return {example: {index of a run: line of its file}} of the same random examples of all runs.

    A run that has other text at the same place has examples of its own.
    """
    num_examples = min(predictions.num_examples for predictions in of_task)
    chosen = set(random.Random(0).sample(range(num_examples), min(most, num_examples)))
    found: dict[Example, dict[int, Any]] = {}
    for predictions in of_task:
        with predictions.file.open('rb') as stream:
            for number, text in enumerate(stream):
                if number not in chosen:
                    continue
                line = read_prediction(text, f'line {number + 1} of {predictions.file}')
                fields = line['input']
                example = Example(
                    number=number,
                    inputs=fields['inputs_pretokenized'] or f'ids {fields["inputs"]}',
                    target=fields['targets_pretokenized'] or f'ids {fields["targets"]}',
                )
                found.setdefault(example, {})[predictions.run] = line
    return dict(sorted(found.items()))


def read_prediction(text: bytes, title: str) -> dict[str, Any]:
    """Return a line of TASK-STEP.jsonl. Raises ValueError, which has its title, for a damaged one."""
    line = paths.json_object(text, title)
    try:
        fields = line['input']
        has_texts = (
            type(fields['inputs_pretokenized']) is type(fields['targets_pretokenized']) is str
        )
        has_answer = type(line.get('score')) is float
        if 'output' in line:
            has_answer = type(line['output']) is str and 'prediction' in line
        is_whole = has_texts and has_answer and 'target' in line
    except (KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise ValueError(f'{title} is damaged (no input, target and answer): {paths.RESTORE_LINE}')
    return line


def add_filters(details: Element) -> None:
    """Add a search field and a switch, which the script shows."""
    form = add(details, 'form', hidden='')
    add(form, 'input', type='search', placeholder='Search', aria_label='Search these examples')
    add_checkbox(add(form, 'label'), 'only those that differ from the target')
    add(form, 'output')


def add_example(
    part: Element,
    runs: Sequence[Run],
    example: Example,
    answers: Mapping[int, Any],
    most_characters: int,
) -> None:
    """Add an example: its input, its target, and the prediction or score of each run."""
    article = add(part, 'article')
    items = add(article, 'dl')
    add(items, 'dt', 'input')
    add(items, 'dd', cut(example.inputs, most_characters), dir='auto')
    add(items, 'dt', 'target')
    add(items, 'dd', cut(example.target, most_characters), dir='auto')
    for i, line in answers.items():
        name = 'prediction' if len(runs) == 1 else runs[i].name
        css = f'run{i}'
        add(items, 'dt', name, css=css)
        if 'output' not in line:
            add(items, 'dd', f'score {line["score"]:.5g}', css=css)
            continue
        if is_same(line['prediction'], line['target']):
            css += ' same'
        else:
            css += ' differs'
            article.set('data-differs', '')
        add(items, 'dd', cut(line['output'], most_characters), css=css, dir='auto')


def is_same(prediction: Any, target: Any) -> bool:
    """Return whether a prediction is the target, or one of several that are right."""
    return prediction == target or (isinstance(target, list) and prediction in target)


def cut(text: str, most_characters: int) -> str:
    """Return the beginning of a long text, and how much more there is."""
    if len(text) <= most_characters:
        return text
    num_more = len(text) - most_characters
    return f'{text[:most_characters]} … {num_more:,} characters more'


# Settings.


def make_settings(runs: Sequence[Run], scale: float) -> Element:
    """Return the settings that differ between the runs; of one run, those that are not the default."""
    known = [(i, run) for i, run in enumerate(runs) if run.settings]
    section = Element('section')
    if not known:
        return section
    defaults = dict(settings.leaves(ConfigDict(json.loads(base.get_config().to_json()))))
    of_all = [run.settings for _, run in known]
    if len(known) == 1:
        title = 'Settings that are not the default'
        of_all.append(defaults)
    else:
        title = 'Settings that differ'
    add(section, 'h2', title)
    keys: dict[str, None] = {}  # in the order of config.json
    for of_run in of_all:
        keys |= dict.fromkeys(of_run)
    different = [key for key in keys if has_differences(key, of_all)]
    if not different:
        add(section, 'p', 'None.')
        return section
    head, body = add_table(section, ['setting'])
    for i, run in known:
        add(head, 'th', run.name, css=f'run{i}', scope='col')
    add(head, 'th', 'default', scope='col')
    for key in different:
        row = add(body, 'tr')
        add(add(row, 'th', scope='row'), 'code', key)
        for of_run in [*of_all[: len(known)], defaults]:
            text = json.dumps(of_run[key], ensure_ascii=False) if key in of_run else ''
            add(row, 'td', cut(text, round(MOST_CHARACTERS * scale)), css='value')
    return section


def has_differences(key: str, of_all: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether some have another value for a key, or none."""
    return any(of_run.get(key) != of_all[0].get(key) for of_run in of_all)
