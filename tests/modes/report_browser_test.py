"""The page of `--mode=report` in Chromium: every curve is drawn, nothing is reported, nothing loaded.

Needs `pip install playwright` and a Chromium (`apt-get install chromium`); skipped without them.
"""

import shutil

import pytest
from questions import make_config, write_task
from report_runs import answered, write_results, write_run
from runs import run

from modes import report

pytestmark = pytest.mark.browser
PHONE = {'width': 360, 'height': 740}
DESKTOP = {'width': 1280, 'height': 900}
# Without what Chromium would ask of the network at its start.
ARGUMENTS = ['--no-sandbox', '--disable-gpu', '--disable-sync']
ARGUMENTS += ['--disable-background-networking', '--disable-component-update']
# For each curve: its color, its box and that of its figure, in pixels, and the dots in its color.
CURVES = """
() => [...document.querySelectorAll('path.curve')]
  .filter((path) => getComputedStyle(path.ownerSVGElement).display !== 'none')
  .map((path) => {
    const svg = path.ownerSVGElement;
    const style = getComputedStyle(path);
    return {
      color: style.stroke,
      width: style.strokeWidth,
      length: path.getTotalLength(),
      box: path.getBoundingClientRect().toJSON(),
      frame: svg.getBoundingClientRect().toJSON(),
      dots: svg.querySelectorAll('circle.dot.' + path.classList[1]).length,
    };
  })
"""


@pytest.fixture(scope='module')
def chromium():
    playwright = pytest.importorskip('playwright.sync_api')
    program = shutil.which('chromium') or shutil.which('google-chrome')
    if program is None:
        pytest.skip('no Chromium on the path')
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """A function that opens a file and returns the page; no message of it is allowed."""
    faults = []
    contexts = []

    def open_page(file, scheme='light', viewport=DESKTOP):
        context = chromium.new_context(color_scheme=scheme, viewport=viewport, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.on('console', lambda message: faults.append(f'{message.type}: {message.text}'))
        page.on('pageerror', lambda error: faults.append(str(error)))
        page.on('dialog', lambda dialog: faults.append(dialog.message))
        page.on('requestfailed', lambda request: faults.append(request.url))
        requests = []
        page.on('request', lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        assert [url for url in requests if not url.startswith('data:')] == [file.as_uri()]
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture(scope='module')
def three_tasks(tmp_path_factory):
    """The report of a finished run on three tasks, two of which are scored."""
    folder = tmp_path_factory.mktemp('three')
    write_task(folder)
    config = make_config(folder)
    config.data.task = 'all'
    run(config, folder / 'run')
    return report.write([str(folder / 'run')])


@pytest.fixture
def two_runs(tmp_path):
    names = []
    for name, answer in (('a', 'Rome'), ('b', 'Paris')):
        folder = write_run(tmp_path / name, num_steps=3000, validation={'qa': [3.0, 2.5, 2.0]})
        others = answered('of Italy?', target='Rome')
        examples = [answered(output=answer), others]
        write_results(folder, 'qa', 3000, examples, f1=50.0)
        names.append(str(folder))
    return report.write(names)


@pytest.mark.parametrize('viewport', [DESKTOP, PHONE])
@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_every_curve_is_drawn(three_tasks, open_page, scheme, viewport):
    page = open_page(three_tasks, scheme, viewport)
    page.evaluate("document.querySelectorAll('details').forEach((x) => { x.open = true; })")
    background = page.evaluate('getComputedStyle(document.body).backgroundColor')
    assert background == {'light': 'rgb(255, 255, 255)', 'dark': 'rgb(20, 20, 20)'}[scheme]
    captions = page.locator('figcaption').all_text_contents()
    for title in ('Training loss', 'Throughput', 'Learning rate', 'Validation loss, qa'):
        assert any(caption.startswith(title) for caption in captions)
    for metric in ('qa/em', 'qa/f1', 'rank/accuracy', 'rank_by_length/accuracy'):
        assert f'{metric} ' in captions
    check_curves(page, at_least=len(captions), background=background)
    assert page.evaluate('document.documentElement.scrollWidth') <= viewport['width']
    assert three_tasks.stat().st_size <= 2_000_000
    page.locator('#logarithmic').check()
    check_curves(page, at_least=len(captions), background=background)


def check_curves(page, at_least, background):
    """Assert that every curve that is shown lies in its figure and differs from the page."""
    curves = page.evaluate(CURVES)
    assert len(curves) >= at_least
    for curve in curves:
        box = curve['box']
        frame = curve['frame']
        assert curve['color'] not in ('none', background) and curve['width'] != '0px'
        assert curve['length'] > 10 or curve['dots'] == 1
        assert frame['width'] > 250
        assert frame['left'] < box['left'] and box['right'] < frame['right']
        assert frame['top'] < box['top'] and box['bottom'] < frame['bottom']


def test_the_curves_need_no_script(two_runs, chromium):
    context = chromium.new_context(java_script_enabled=False, viewport=DESKTOP)
    page = context.new_page()
    page.goto(two_runs.as_uri())
    assert page.locator('svg.linear path.curve').count() > 10
    assert page.locator('figure output').first.text_content().startswith('step 3,000')
    assert page.locator('article').first.is_visible()
    assert not page.locator('form').first.is_visible()
    page.locator('#logarithmic').check()
    assert page.locator('svg.logarithmic').first.is_visible()
    context.close()


def test_values_below_the_pointer_and_by_keys(two_runs, open_page):
    page = open_page(two_runs)
    figure = page.locator('figure').first
    svg = figure.locator('svg.linear')
    output = figure.locator('output')
    at_rest = output.inner_text()
    svg.hover(position={'x': 60, 'y': 60})
    text = output.inner_text()
    assert text != at_rest and text.startswith('step ')
    assert 1 < int(text.split()[1].replace(',', '')) < 600
    assert figure.locator('svg.linear path.cursor').get_attribute('d')
    page.mouse.move(0, 0)
    assert output.inner_text() == at_rest
    svg.focus()
    page.keyboard.press('Home')
    assert output.inner_text().split()[:4] == ['step', '1', 'a', '5.01']
    page.keyboard.press('ArrowRight')
    second = output.inner_text()
    assert not second.startswith('step 1\n')
    page.keyboard.press('ArrowRight')
    page.keyboard.press('ArrowLeft')
    assert output.inner_text() == second
    page.keyboard.press('End')
    assert output.inner_text().startswith('step 3,000')
    page.keyboard.press('Escape')
    assert output.inner_text() == at_rest


def test_a_run_is_switched_off_and_predictions_are_filtered(two_runs, open_page):
    page = open_page(two_runs)
    articles = page.locator('article:visible')
    assert articles.count() == 2
    search = page.locator('input[type=search]')
    search.fill('ITALY')
    assert articles.count() == 1 and 'of Italy?' in articles.first.inner_text()
    assert page.locator('form output').inner_text() == '1 shown'
    search.fill('nothing')
    assert articles.count() == 0
    search.fill('')
    page.get_by_label('only those that differ').check()
    assert articles.count() == 2  # each run has one that differs
    curve = page.locator('svg.linear path.curve.run1').first
    answer = page.locator('dd.run1').first
    assert curve.is_visible() and answer.is_visible()
    page.locator('#show1').focus()
    page.keyboard.press('Space')
    assert not curve.is_visible() and not answer.is_visible()
    page.locator('figure svg.linear').first.hover(position={'x': 100, 'y': 60})
    assert ' b ' not in page.locator('figure output').first.inner_text()


def test_text_of_users_does_not_run(tmp_path, open_page):
    evil = '</script><script>alert(1)</script><img src=x onerror=alert(2)>'
    folder = write_run(tmp_path / 'run', num_steps=2, corpus=evil, **{evil: 1.0})
    example = answered(evil, evil, evil)
    write_results(folder, 'qa', 2, [example], **{evil: 1.0})
    page = open_page(report.write([str(folder)]))
    assert page.locator('dd').all_inner_texts() == [evil] * 3
    assert page.locator('img').count() == 0 and page.locator('script').count() == 1
    page.evaluate("document.querySelectorAll('details').forEach((x) => { x.open = true; })")
    figure = page.locator('figure', has_text=evil).last
    figure.locator('svg.linear').hover()
    assert figure.locator('output').inner_text().startswith('step ')
