"""README.md and docs/*.md: their commands run, their links, excerpts, flags and settings are right.

A fenced block of `sh` or `python` is run from a folder that looks like a checkout, in the order of its
page, or an HTML comment above it says why not:

    <!-- not run: REASON -->    is not run
    <!-- slow: OPTIONS -->      is run by `pytest -m slow`; options for the commands that train
    <!-- test: OPTIONS -->      such options, for a block of the quick suite
    <!-- file: PATH -->         is the content of a file
    <!-- in: FOLDER -->         is run in a folder of the checkout
    <!-- from: FILE NAME -->    is an excerpt of a class or function, without NAME of the file; a line ...
                                stands for lines left out
    <!-- signature: FILE NAME -->  is a signature with its docstring, which `python tests/excerpts.py` writes
"""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import pyarrow.parquet
import pytest
from absl import flags
from corpora import HUNT
from excerpts import is_excerpt, lines_of, with_signatures
from runs import ENVIRONMENT, ROOT

import main  # noqa: F401  defines the flags
from configs import base, check

README = ROOT / 'README.md'
PAGES = [README, *sorted((ROOT / 'docs').glob('*.md')), ROOT / 'tests/chaos/README.md']


def id_of(page) -> str:
    return str(page.relative_to(ROOT).with_suffix(''))


IDS = list(map(id_of, PAGES))
FENCE = re.compile(r'^((?:<!-- [^\n]* -->\n)*)```(\w+)\n(.*?)```\n', re.DOTALL | re.MULTILINE)
MARKER = re.compile(r'<!-- (not run|slow|test|file|in|from|signature)(?:: (.*))? -->')
# Commands of other programs, whose flags are not those of main.py.
OTHER_PROGRAMS = (
    'pip',
    'hf',
    'pytest',
    'tensorboard',
    'tfds',
    'python benchmarks',
    'python examples',
    'sbatch',
    'XLA_FLAGS',
    'export',
)


class Block(NamedTuple):
    """A fenced block of a page, and the comments above it."""

    language: str
    text: str
    markers: dict[str, str]


def blocks_of(page) -> list[Block]:
    blocks = []
    for comments, language, text in FENCE.findall(page.read_text()):
        markers = {name: value or '' for name, value in MARKER.findall(comments)}
        blocks.append(Block(language, text, markers))
    return blocks


def commands_of(block) -> list[str]:
    """Return the commands of a shell block, each on one line, without comments."""
    lines = block.text.replace('\\\n', ' ').splitlines()
    return [line for line in lines if line.strip() and not line.startswith('#')]


# Running the blocks.


def write_hub(folder):
    """Write a few rows of data sets as they are on the Hugging Face hub."""
    multirc = []
    for i in range(40):
        fields = {
            'paragraph': f'Ada has {i}.',
            'question': 'Who?',
            'answer': ['Ada', 'Bert'][i % 2],
        }
        idx = {'paragraph': i, 'question': i, 'answer': i}
        multirc.append(fields | {'idx': idx, 'label': 1 - i % 2})
    for name, rows in {
        'squad/plain_text': pyarrow.parquet.read_table(HUNT / 'squad.parquet').to_pylist(),
        'super_glue/multirc': multirc,
    }.items():
        (folder / name).mkdir(parents=True)
        for split, some in {'train': rows[10:], 'validation': rows[:10]}.items():
            table = pyarrow.Table.from_pylist(some)
            pyarrow.parquet.write_table(table, folder / name / f'{split}-00000-of-00001.parquet')


@pytest.fixture
def checkout(tmp_path, corpus, monkeypatch):
    """A folder with the checkout's configs and a user's files."""
    for name in ('configs', 'examples'):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / 'texts').mkdir()
    shutil.copy(corpus, tmp_path / 'texts')
    (tmp_path / 'lines.txt').write_text('Return the list.\nRaise an error.\n')
    rows = []
    for i in range(300):
        answer = ['Oslo', 'Rome', ''][i % 3]
        context = f'Person {i} lives in {answer or "a house"}.'
        rows.append(
            {'question': f'Where does {i} live?', 'context': context, 'answer': answer or 'nowhere'}
        )
    for name, num_rows in (('my.csv', 60), ('questions.csv', 10)):
        with (tmp_path / name).open('w', newline='') as file:
            writer = csv.DictWriter(file, fieldnames=rows[0])
            writer.writeheader()
            writer.writerows(rows[:num_rows])
    (tmp_path / 'train-1.jsonl').write_text('\n'.join(map(json.dumps, rows[30:])))
    (tmp_path / 'dev-1.jsonl').write_text('\n'.join(map(json.dumps, rows[:30])))
    questions = [{'inputs': row['question']} for row in rows[:10]]
    (tmp_path / 'questions.jsonl').write_text('\n'.join(map(json.dumps, questions)))
    write_hub(tmp_path)
    (tmp_path / 'own').mkdir()
    (tmp_path / 'own' / 'web').mkdir()
    shutil.copy(corpus, tmp_path / 'own' / 'web')
    words = [json.dumps({'words': ['one', 'two', f'number{i}']}) for i in range(300)]
    (tmp_path / 'own' / 'words.jsonl').write_text('\n'.join(words))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(make_once, corpus, command_line):
    """The workdir of two steps of configs/tiny.py on a small corpus."""

    def train(folder):
        result = command_line(
            '--config=configs/tiny.py',
            f'--config.data.files={corpus}',
            '--config.data.num_pieces=200',
            '--config.train.steps=2',
            f'--workdir={folder}',
        )
        assert result.status == 0, result.stderr

    return make_once('tiny_for_docs', train)


def run_block(block, folder, command_line, names) -> None:
    """Run a block; `names`: those that the Python blocks of its page have defined."""
    if 'file' in block.markers:
        (folder / block.markers['file']).write_text(block.text)
        return
    if block.language == 'python':
        exec(compile(block.text, '<docs>', 'exec'), names)  # noqa: S102
        return
    folder = folder / block.markers.get('in', '')
    options = shlex.split(block.markers.get('slow', block.markers.get('test', '')))
    for command in commands_of(block):
        status, output = run_command(command, options, folder, command_line)
        assert status == 0, f'{command}\n{output}'


def run_command(command, options, folder, command_line):
    """Run a command of a page. Return its status and what it printed."""
    if '|' in command.split(' #')[0] or command.startswith('python examples/'):
        command = command.replace('python main.py', f'{sys.executable} {ROOT}/main.py')
        command = command.replace('python examples/', f'{sys.executable} examples/')
        result = subprocess.run(
            command, shell=True, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True
        )
        return result.returncode, result.stdout + result.stderr
    words = shlex.split(command.replace('CHECKOUT', str(ROOT)), comments=True)
    environment = {}
    while '=' in words[0]:
        name, value = words.pop(0).split('=', 1)
        environment[name] = f'{ENVIRONMENT[name]} {value}'
    assert words[0] == 'python' and words[1].endswith('main.py'), f'no way to run: {command}'
    if not any(word.startswith(('--mode', '--help')) for word in words):
        words += options
    result = command_line(*words[2:], cwd=folder, **environment)
    return result.status, result.stdout + result.stderr


def runs_quickly(block) -> bool:
    return is_run(block) and 'slow' not in block.markers


def is_run(block) -> bool:
    shown = block.markers.keys() & {'not run', 'from', 'signature'}
    return block.language in ('sh', 'python') and not shown


def run_blocks(blocks, tiny, checkout, command_line) -> None:
    """Run blocks of a page, one after another; `tiny`: the run that is runs/tiny."""
    shutil.copytree(tiny, checkout / 'runs' / 'tiny')
    names: dict = {}
    for block in blocks:
        run_block(block, checkout, command_line, names)


# Other tests train own models, trace runs, fine-tune, call infer, and read and stop as these pages do.
LONG = ('api', 'data', 'finetuning', 'numbers', 'own_model', 'stop_and_continue', 'tasks')
RUN_PAGES = []
for page in PAGES:
    if any(map(is_run, blocks_of(page))):
        marks = [pytest.mark.long] if page.stem in LONG else []
        RUN_PAGES.append(pytest.param(page, id=id_of(page), marks=marks))


def test_short_commands_of_the_readme(checkout, uninterrupted, command_line):
    """A smaller run than that of tiny.py, which other tests have made, stands in for runs/tiny."""
    run_blocks(filter(runs_quickly, blocks_of(README)), uninterrupted, checkout, command_line)


@pytest.mark.slow
@pytest.mark.parametrize('page', RUN_PAGES)
def test_all_commands(page, checkout, tiny, command_line):
    run_blocks(filter(is_run, blocks_of(page)), tiny, checkout, command_line)


# Reading the pages.


@pytest.mark.parametrize('page', PAGES, ids=IDS)
def test_excerpts_are_what_the_source_says(page):
    for block in blocks_of(page):
        if 'from' in block.markers:
            assert is_excerpt(block.text, lines_of(*block.markers['from'].split())), block.text


def test_signatures_are_those_of_the_source():
    text = (ROOT / 'docs/api.md').read_text()
    assert with_signatures(text) == text, 'python tests/excerpts.py writes the new ones'


@pytest.mark.parametrize('page', [*PAGES, ROOT / 'CHANGELOG.md'], ids=[*IDS, 'CHANGELOG'])
def test_links(page):
    for target in re.findall(r'\]\(([^)]+)\)', FENCE.sub('', page.read_text())):
        if target.startswith('https://'):
            continue
        name, _, heading = target.partition('#')
        file = page.parent / name if name else page
        assert file.exists(), target
        if heading:
            assert heading in anchors_of(file), target


def anchors_of(page) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    text = FENCE.sub('', page.read_text())
    headings = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


def code_of(page) -> list[str]:
    """Return the commands of a page and its code between backticks."""
    code = re.findall(r'`([^`\n]+)`', FENCE.sub('', page.read_text()))
    for block in blocks_of(page):
        if block.language == 'sh':
            code += commands_of(block)
        elif block.language == 'text':
            code += [line for line in block.text.splitlines() if line.startswith('--')]
    return [text for text in code if not text.startswith(OTHER_PROGRAMS)]


SETTINGS = dict(check.leaves(base.get_config()))
SECTIONS = '|'.join({key.partition('.')[0] for key in SETTINGS if '.' in key})
FILE = re.compile(
    r'(?<![\w/.])(?:configs|sources|tasks|formats|run|modes|families|tests|benchmarks|examples)/[\w/]+\.\w+'
)


@pytest.mark.parametrize('page', PAGES, ids=IDS)
def test_flags_settings_and_files_exist(page):
    for code in code_of(page):
        for flag in re.findall(r'(?<![\w-])--([a-z_]+)', code):
            assert flag in flags.FLAGS or flag == 'help', f'{flag} of {code}'
        settings = re.findall(r'--config\.([a-z][\w.]*)', code)
        settings += re.findall(rf'(?<![\w./])((?:{SECTIONS})\.[\w.]+)=', code)
        for name in settings:
            assert name in SETTINGS or name.startswith(check.OPTIONS), f'{name} of {code}'
        for file in FILE.findall(code):
            assert (ROOT / file).exists(), file
