"""`--mode=report`: what the page shows of runs, finished or not; its size; the text of users in it."""

import html.parser
import json
import math
import os
import re
import shutil

import pytest
from permissions import another_user
from report_runs import (
    DAMAGED_LINES,
    QA,
    answered,
    curve_line,
    damage_line,
    scored,
    write_results,
    write_run,
)

from benchmarks import chart
from benchmarks.chart import Curve, Point
from formats import best
from messages import Refused
from modes import report

VOID = {'meta', 'link', 'input'}


class Page(html.parser.HTMLParser):
    """The elements of a page: (tag, attributes, own text), and the script and style apart."""

    def __init__(self, file):
        super().__init__()
        self.source = file.read_text()
        self.elements = []
        self.open = []
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        element = [tag, dict(attributes), '']
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            self.open[-1][2] += data

    def texts(self, tag, css=''):
        found = []
        for name, attributes, text in self.elements:
            if name == tag and css in (attributes.get('class') or '').split(' ') + ['']:
                found.append(text)
        return found

    def curves(self, title):
        """The attributes of the linear curves of a figure."""
        found = []
        is_there = False
        for tag, attributes, text in self.elements:
            if tag == 'figcaption':
                is_there = text == f'{title} '
            if tag == 'path' and is_there and 'data-steps' in attributes:
                found.append(attributes)
        return found

    def values(self, title):
        """{name of a curve: {step: value}} of a figure."""
        found = {}
        for curve in self.curves(title):
            steps = map(int, curve['data-steps'].split())
            values = map(float, curve['data-values'].split())
            found[curve['data-name']] = dict(zip(steps, values, strict=True))
        return found

    def rows(self):
        """The cells of all tables, as texts."""
        rows = []
        for tag, _, text in self.elements:
            if tag == 'tr':
                rows.append([])
            if tag in ('th', 'td', 'code') and rows and text:
                rows[-1].append(text)
            if tag == 'footer':
                break
        return rows


def make_page(*runs, output_dir=''):
    return Page(report.write([str(run) for run in runs], str(output_dir)))


def test_a_real_run(uninterrupted, tmp_path, command_line):
    result = command_line('--mode=report', f'--runs={uninterrupted}', f'--output_dir={tmp_path}/x')
    assert result.status == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f'{tmp_path}/x/report.html'
    page = Page(tmp_path / 'x' / 'report.html')
    lines = best.read_metrics(uninterrupted)
    logged = [line for line in lines if line['run'] == 'train']
    evaluated = [line for line in lines if line['run'] == 'training_eval/span_corruption']
    expected = {
        'Training loss': ('nats_per_token', logged),
        'Learning rate': ('learning_rate/current', logged),
        'Throughput': ('timing/tokens_per_second', logged),
        'Validation loss': ('nats_per_text_token', evaluated),
        'z_loss': ('z_loss', logged),
    }
    for title, (tag, of_lines) in expected.items():
        values = {line['step']: line[tag] for line in of_lines}
        assert page.values(title)[uninterrupted.name] == pytest.approx(values, rel=1e-4)
    baselines = page.values('Validation loss')[f'{uninterrupted.name}, unigram']
    assert set(baselines) == {3, 6}
    [row] = [row for row in page.rows() if row[0] == 'span_corruption, validation loss']
    assert row[-1] == f'{evaluated[-1]["nats_per_text_token"]:.3f}'
    assert ['model.vocab_size', '384', '32128'] in page.rows()
    assert not page.texts('article')
    assert len(page.source.encode()) < 200_000


def test_a_report_lies_in_its_run(tmp_path, command_line):
    write_run(tmp_path / 'a', num_steps=3)
    before = set(os.listdir(tmp_path / 'a'))
    result = command_line('--mode=report', '--runs=a', cwd=tmp_path)
    assert (result.status, result.stdout) == (0, f'{tmp_path}/a/report.html\n')
    assert set(os.listdir(tmp_path / 'a')) == before | {'report.html'}


# Runs that have ended, and runs that have not.


def append(run, line):
    with (run / 'metrics.jsonl').open('a') as file:
        file.write(line)


def test_a_run_that_was_killed(tmp_path):
    """A step that is there twice counts once."""
    run = write_run(tmp_path / 'run', num_steps=40, of_steps=100, metric_of_a_fork=0.5)
    append(run, json.dumps(curve_line(2) | {'nats_per_token': 9.0}) + '\n')
    append(run, '{"step": 41, "run": "train", "nats_per_t')
    page = make_page(run)
    assert list(page.values('Training loss')['run']) == list(range(1, 41))
    assert page.values('Training loss')['run'][2] == 9.0
    assert set(page.values('metric_of_a_fork')['run'].values()) == {0.5}
    assert any('40 of 100' in row for row in page.rows())


def test_a_run_of_one_step(tmp_path):
    page = make_page(write_run(tmp_path / 'run', num_steps=1))
    assert page.values('Training loss') == {'run': {1: 5.01}}
    [curve] = page.curves('Training loss')
    assert re.fullmatch(r'M[\d.]+ [\d.]+', curve['d'])
    assert len(page.texts('circle', 'dot')) == len(page.texts('path', 'curve')) > 0


def test_a_run_that_began_at_a_checkpoint_elsewhere(tmp_path):
    run = write_run(tmp_path / 'run', num_steps=50, first_step=1_000_000)
    page = make_page(run)
    assert min(page.values('Training loss')['run']) == 1_000_001
    assert {'1.00001M', '1.00005M'} <= set(page.texts('text', 'x'))


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_values_that_are_not_finite(tmp_path, value):
    """Without a validation loss the baseline alone is not a figure."""
    run = write_run(tmp_path / 'run', num_steps=5, validation={'qa': [value]})
    append(run, json.dumps(curve_line(6) | {'nats_per_token': value}) + '\n')
    write_results(run, 'qa', 5, [QA], f1=value, em=50.0)
    page = make_page(run)
    assert list(page.values('Training loss')['run']) == [1, 2, 3, 4, 5]
    assert '1 values are not finite' in page.texts('small')[0]
    assert not page.curves('qa/f1') and not page.curves('Validation loss')
    assert ['qa/f1', f'{value:.3f}', '5', f'{value:.3f}'] in page.rows()
    assert ['qa, validation loss', f'{value:.3f}'] in page.rows()


@pytest.mark.parametrize('value', [1e308, -1e308, 1e-320])
def test_values_at_the_ends_of_floats(tmp_path, value):
    run = write_run(tmp_path / 'run', num_steps=5, validation={'qa': [value]})
    more = {'nats_per_token': value, 'timing/steps_per_second': 0.0}
    append(run, json.dumps(curve_line(6) | more) + '\n')
    assert list(make_page(run).values('Training loss')['run']) == [1, 2, 3, 4, 5]


def test_results_without_a_run(tmp_path):
    """What --mode=evaluate leaves in a folder of its own."""
    write_results(tmp_path / 'only', 'qa', 1000, [QA], f1=71.5)
    page = make_page(tmp_path / 'only')
    assert page.values('qa/f1') == {'only': {1000: 71.5}}
    assert not page.curves('Training loss')
    assert ['qa/f1', '71.500', '1,000', '71.500'] in page.rows()


# Several runs and tasks.


def test_two_runs_side_by_side(tmp_path):
    a = write_run(tmp_path / 'runs' / 'a', num_steps=4, changes={'seed': 1})
    b = write_run(tmp_path / 'other' / 'b', num_steps=2, changes={'train': {'batch_size': 64}})
    for run, f1, answer in ((a, 40.0, 'Rome'), (b, 60.0, 'Paris')):
        write_results(run, 'qa', 100, [answered(output='Lyon')], f1=99.0)
        write_results(run, 'qa', 200, [answered(output=answer)], f1=f1)
    page = make_page(a, b, output_dir=tmp_path)
    assert list(page.values('Training loss')) == ['runs/a', 'other/b']
    rows = page.rows()
    assert ['seed', '1', '0', '0'] in rows
    assert ['train.batch_size', '128', '64', '128'] in rows
    assert not any(row[0] == 'model.emb_dim' for row in rows)
    assert ['qa/f1', '99.000', '100', '40.000', '99.000', '100', '60.000'] in rows
    assert page.texts('dt') == ['input', 'target', 'runs/a', 'other/b']
    assert page.texts('dd') == ['capital of France?', 'Paris', 'Rome', 'Paris']
    assert page.texts('dd', 'differs') == ['Rome']
    assert page.texts('dd', 'same') == ['Paris']
    assert 'show1' in page.source and 'runs/a, other/b' == page.texts('h1')[0]


def test_the_load_of_experts_is_one_figure(tmp_path):
    loads = {f'experts/load/{i}': i / 66 for i in range(12)}
    run = write_run(tmp_path / 'a', num_steps=3, **loads)
    page = make_page(run, write_run(tmp_path / 'b', num_steps=3))
    values = page.values('Load of the experts, a')
    assert list(values) == [str(i) for i in range(12)]
    assert 'experts/load/' not in page.source and 'experts, b' not in page.source


def test_the_best_of_several_runs_is_bold(tmp_path):
    runs = []
    for name, loss, f1 in (('a', 3.0, 50.0), ('b', 2.0, 40.0), ('c', 4.0, 50.0)):
        run = write_run(tmp_path / name, num_steps=2, validation={'qa': [loss + 1, loss]})
        write_results(run, 'qa', 2, [QA], f1=f1)
        runs.append(run)
    page = make_page(*runs, output_dir=tmp_path)
    assert page.texts('td', 'best') == ['2.000', '50.000', '50.000']


def test_three_tasks(tmp_path):
    run = write_run(tmp_path / 'run', 4, validation={'x': [3.0, 2.5], 'y': [4.0, 3.5], 'z': [2.0]})
    for task in ('x', 'y', 'z'):
        write_results(run, task, 4, [QA], accuracy=50.0)
    page = make_page(run)
    for task in ('x', 'y', 'z'):
        assert page.curves(f'Validation loss, {task}')
        assert page.curves(f'{task}/accuracy')
    assert [text.split(',')[0] for text in page.texts('summary')][-3:] == ['x', 'y', 'z']


def test_average_and_best_steps_are_those_of_t5(tmp_path):
    """F1 and accuracy of MRPC share the step with their best mean."""
    for step, f1, accuracy in ((1, 90.0, 10.0), (2, 60.0, 60.0)):
        write_results(tmp_path / 'run', 'glue_mrpc_v002', step, [QA], f1=f1, accuracy=accuracy)
    rows = make_page(tmp_path / 'run').rows()
    assert ['MRPC (F1)', '60.000', '2', '60.000'] in rows
    assert ['MRPC (accuracy)', '60.000', '2', '60.000'] in rows


# Predictions.


def test_a_sample_of_the_predictions(tmp_path):
    examples = [answered(f'question {i}', output=f'answer {i}') for i in range(500)]
    runs = [write_run(tmp_path / name, num_steps=1) for name in 'ab']
    for run in runs:
        write_results(run, 'qa', 7, examples, f1=0.0)
    page = make_page(*runs, output_dir=tmp_path)
    assert 'qa, step 7: 60 of 500 examples' in page.texts('summary')
    texts = page.texts('dd')
    assert len(page.texts('article')) == 60 and len(texts) == 60 * 4
    numbers = [int(text.split()[1]) for text in texts[::4]]
    assert numbers == sorted(set(numbers)) and numbers[-1] > 400
    for i, number in enumerate(numbers):
        assert texts[4 * i + 2 : 4 * i + 4] == [f'answer {number}'] * 2


@pytest.mark.parametrize(
    'line, css, texts',
    [
        (scored('', score=-1.25), '', ['ids [5, 6, 1]', 'Paris', 'score -1.25']),
        (answered(output='in Paris') | {'target': ['Paris', 'in Paris']}, 'same', ['in Paris']),
        (answered(output='a \ud800 b'), 'differs', ['a ? b']),
        (None, '', []),
    ],
)
def test_what_is_shown_of_an_example(tmp_path, line, css, texts):
    """A score; one of several targets; text that is not Unicode; no example at all."""
    write_results(tmp_path / 'run', 'qa', 3, [line] if line else [], f1=0.0)
    page = make_page(tmp_path / 'run')
    assert page.texts('dd', css) == texts
    assert len(page.texts('article')) == (line is not None)


# Text of users.

EVIL = [
    '</script><script>alert(1)</script>',
    '<img src=x onerror=alert(1)>',
    '"><svg onload=alert(1)>',
    "' onmouseover='alert(1)",
    '<!-- ]]> &lt;b&gt; &amp;',
    '  two\nlines\tand größe 文 \u2028 \U0001f600',
]


@pytest.mark.parametrize('text', EVIL)
def test_text_of_users_is_text(tmp_path, text):
    plain = make_page(write_run(tmp_path / 'plain', num_steps=2, novelty=0.5))
    tags = {tag for tag, _, _ in plain.elements} | {'article', 'details', 'form', 'dl', 'dt', 'dd'}
    name = text.replace('/', '_').replace(',', '_')[:40]
    run = write_run(
        tmp_path / name, num_steps=2, changes={'data': {'files': text}}, corpus=text, **{text: 0.5}
    )
    example = answered(text, text, text)
    write_results(run, name, 2, [example], **{text: 1.0})
    page = make_page(run)
    assert {tag for tag, _, _ in page.elements} <= tags
    assert not any(key.startswith('on') for _, attributes, _ in page.elements for key in attributes)
    assert page.texts('dd') == [text] * 3
    assert page.texts('h1') == [name]
    assert text in page.texts('td', 'value')
    assert json.dumps(text, ensure_ascii=False) in page.texts('td', 'value')
    assert page.values(text) and page.values(f'{name}/{text}')


def test_the_page_stands_alone(tmp_path):
    page = make_page(write_run(tmp_path / 'run', num_steps=2))
    for tag, attributes, _ in page.elements:
        assert not {'src', 'xlink:href', 'srcset', 'action'} & set(attributes)
        assert tag not in ('iframe', 'object', 'embed', 'base')
    assert [x[1]['href'] for x in page.elements if x[0] == 'link'] == ['data:,']
    [style] = page.texts('style')
    assert 'url(' not in style and '@import' not in style
    for name in ('report.css', 'report.js'):
        assert '</' not in (report.HERE / name).read_text()


# Size.


@pytest.mark.slow
def test_many_steps_and_long_predictions_fit(tmp_path):
    runs = []
    for name in 'abc':
        run = write_run(tmp_path / name, num_steps=3000)
        for task in range(10):
            long = answered('文' * 3000, output='"<&' * 500)
            write_results(run, f'task_{task}', 2, [long] * 40, f1=1.0, em=2.0)
        runs.append(run)
    page = make_page(*runs, output_dir=tmp_path)
    assert len(page.source.encode()) <= 2_000_000
    values = page.values('Training loss')
    assert set(values) == {'a', 'b', 'c'} and {1, 3000} <= set(values['a'])
    losses = [line['nats_per_token'] for line in best.read_metrics(runs[0])]
    for choose in (min, max):
        assert choose(values['a'].values()) == pytest.approx(choose(losses), rel=1e-4)
    assert any('characters more' in text for text in page.texts('dd'))


def test_figures_over_the_limit_are_counted(tmp_path):
    run = write_run(tmp_path / 'run', num_steps=2, **{f'metric_{i}': 1.0 for i in range(300)})
    page = make_page(run)
    num_figures = len(page.texts('figcaption'))
    [note] = [text for text in page.texts('p') if 'more curves' in text]
    assert int(note.split()[0]) == 307 - num_figures and num_figures == report.MOST_FIGURES


@pytest.mark.parametrize('num_points', [1, 2, 4, 5, 11, 600, 601, 9973])
@pytest.mark.parametrize('most', [4, 5, 10, 600])
def test_thinning(num_points, most):
    points = [Point(7 * i, math.sin(i * i) + i / 1000) for i in range(num_points)]
    thinned = chart.thin(points, most)
    assert len(thinned) <= most or thinned == points
    assert thinned == sorted(set(thinned)) and set(thinned) <= set(points)
    for choose in (min, max):
        assert choose(points, key=lambda point: point.value) in thinned
    assert thinned[0] == points[0] and thinned[-1] == points[-1]
    if num_points > most >= 10:
        assert len(thinned) > most / 2


# Figures.

SERIES = {
    'one': [1.0],
    'zero': [0.0],
    'constant': [3.0, 3.0],
    'negative': [-5.0, -1.0],
    'tiny': [1e-12, 3e-12],
    'huge': [1e30, 2.0],
    'close': [1.0, 1.0 + 1e-9],
    'across zero': [-1.0, 0.0, 1.0],
    'decades': [1e-6, 1.0, 1e6],
    'short': [5.9, 7.2],
}


@pytest.mark.parametrize('is_logarithmic', [False, True])
@pytest.mark.parametrize('name', SERIES)
def test_a_curve_lies_within_its_axes(name, is_logarithmic):
    points = [Point(i + 1, x) for i, x in enumerate(SERIES[name])]
    curve = Curve('a', css_class='run0', points=points)
    if is_logarithmic and not chart.can_be_logarithmic([curve]):
        return
    drawing = chart.draw('x', [curve], is_logarithmic=is_logarithmic)
    [line] = drawing.lines
    places = re.findall(r'[ML]([-\d.]+) ([-\d.]+)', line.path)
    assert len(places) == len(points)
    xs = [float(x) for x, _ in places]
    assert xs == sorted(xs) and chart.LEFT <= xs[0] and xs[-1] <= chart.RIGHT
    ys = [float(y) for _, y in places]
    assert chart.TOP <= min(ys) and max(ys) <= chart.BOTTOM
    by_value = sorted(zip(SERIES[name], ys, strict=True))
    assert [y for _, y in by_value] == sorted(ys, reverse=True)
    assert len(set(ys)) > 1 or name in ('one', 'zero', 'constant', 'close')
    for ticks in (drawing.x_ticks, drawing.y_ticks):
        labels = [text for _, text in ticks]
        assert 1 <= len(labels) <= 8 and len(labels) == len(set(labels)), labels


@pytest.mark.parametrize('is_logarithmic', [False, True])
@pytest.mark.parametrize(
    'first, last',
    [(1, 9_500), (1, 100), (1, 524_288), (1_000_000, 1_000_050), (1_000_000, 1_000_300), (5, 5)],
)
def test_the_labels_of_steps_lie_within_the_figure(first, last, is_logarithmic):
    """A digit of a wide font, DejaVu Sans, has 0.64 of the size of report.css. Labels are centered."""
    curve = Curve('a', css_class='run0', points=[Point(first, 1.0), Point(last, 2.0)])
    ticks = chart.draw('x', [curve], is_logarithmic=is_logarithmic).x_ticks
    assert ticks
    for x, text in ticks:
        half = 0.64 * 10.5 * len(text) / 2
        assert half <= x <= chart.WIDTH - half, text


def test_ticks():
    assert chart.linear_ticks(0.0, 1200.0) == [0, 200, 400, 600, 800, 1000, 1200]
    assert chart.linear_ticks(4.7, 7.3) == [5, 5.5, 6, 6.5, 7]
    assert chart.logarithmic_ticks(1, 1200) == [1, 10, 100, 1000]
    assert chart.logarithmic_ticks(3, 60) == [5, 10, 20, 50]
    texts = [chart.format_tick(x) for x in (0, 0.05, 1200, 20_000, 1.5e6, 2e-5, -3)]
    assert texts == ['0', '0.05', '1,200', '20k', '1.5M', '2e-5', '-3']


# Bad input.

STEPS = ('null', '"5"', '[5]', '{"a": 5}')
DAMAGED_SETTINGS = ['{"model": {}, "train": {"steps": 5', '', '[1]', '{"model": {}, "train": 5}']
DAMAGED_SETTINGS += [f'{{"model": {{}}, "train": {{"steps": {x}}}}}' for x in STEPS]
DAMAGED_SETTINGS.append('{"model": {}, "train": {"steps": 3}, "save": [5]}')
DAMAGED = DAMAGED_LINES | {
    'config.json': DAMAGED_SETTINGS,
    'inference_eval/qa-000003.jsonl': [
        '{"input": {"inputs_pretokeni',
        '{}',
        json.dumps(QA | {'input': 5}),
        json.dumps(QA | {'input': {'inputs_pretokenized': 'a'}}),
        json.dumps(QA | {'output': 5}),
        json.dumps({name: x for name, x in QA.items() if name != 'target'}),
        json.dumps(scored('a', score='b')),
    ],
}


@pytest.mark.parametrize('name', DAMAGED)
def test_a_damaged_line_is_named(tmp_path, name):
    run = write_run(tmp_path / 'run', num_steps=3)
    for step in (1, 2, 3):
        write_results(run, 'qa', step, [QA, QA], f1=5.0)
    file = run / name
    valid = file.read_bytes() if file.exists() else b''
    for text in DAMAGED[name]:
        if name == 'config.json':
            file.write_text(text)
        else:
            damage_line(file, 2, text)
        with pytest.raises(Refused) as error:
            report.write([str(run)])
        assert ('' if name == 'config.json' else 'line 2 of ') + str(file) in str(error.value)
        assert '\n' not in str(error.value)
        file.write_bytes(valid)
    assert not (run / 'report.html').exists()


def test_a_folder_that_cannot_be_written_is_named(open_path, monkeypatch):
    """A disk that is full, and one that is read-only."""
    run = write_run(open_path / 'run', num_steps=1)
    run.chmod(0o555)
    for output_dir in ('', run / 'new'):
        with pytest.raises(Refused) as error, another_user():
            report.write([str(run)], str(output_dir))
        assert str(output_dir or run) in str(error.value)
    run.chmod(0o755)
    monkeypatch.setattr(
        os, 'fsync', lambda descriptor: os.write(os.open('/dev/full', os.O_WRONLY), b'a')
    )
    with pytest.raises(OSError) as error:
        report.write([str(run)], str(open_path / 'full'))
    assert str(open_path / 'full') in str(error.value)


def test_bad_input(tmp_path, monkeypatch):
    runs = {name: write_run(tmp_path / 'runs' / name, num_steps=1) for name in 'abcdefghi'}
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'file').write_text('')
    shutil.copytree(runs['a'], tmp_path / 'no steps')
    (tmp_path / 'no steps' / 'metrics.jsonl').write_text('')
    damage_line(shutil.copytree(runs['a'], tmp_path / 'cut') / 'metrics.jsonl', 1, '{"step": 3\n{}')
    monkeypatch.chdir(tmp_path)
    for names, output_dir, named in (
        ([], '', '--runs'),
        (['none'], '', '--runs=none'),
        (['file'], '', '--runs=file'),
        (['empty'], '', '--runs=empty'),
        (['no steps'], '', '--runs=no steps'),
        (['cut'], '', f'line 1 of {tmp_path}/cut/metrics.jsonl'),
        (['runs'], '', '--runs=runs'),
        (['gs://bucket/run'], '', 'gs://bucket/run'),
        ([f'runs/{name}' for name in runs], '', '--runs'),
        (['runs/a'], 'file/x', 'file/x'),
        (['runs/a'], '/proc/x', '/proc/x'),
    ):
        with pytest.raises((Refused, OSError)) as error:
            report.write(names, output_dir)
        assert named in str(error.value)
