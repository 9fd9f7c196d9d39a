"""`python tasks.py`: lists, mixtures and examples."""

import gzip
import json
import subprocess
import sys
from typing import NamedTuple

import pytest
from runs import ROOT

import task_listing
import tasks

COLA = {'sentence': 'A book läuft.', 'label': 1, 'idx': 3}


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys, monkeypatch):
    """A function that does what `python tasks.py` does, in this process."""

    def run(*arguments, cwd=ROOT):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, 'argv', ['tasks.py', *arguments])
        try:
            status = task_listing.main(tasks.LISTED, tasks.find)
        except SystemExit as error:  # of argparse
            status = error.code
        return Done(status, *capsys.readouterr())

    return run


def test_it_runs_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / 'tasks.py'), 'no_such_task']
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.startswith("tasks.py: data.task='no_such_task' is unknown: the nearest ")
    assert len(done.stderr.splitlines()) == 1


def test_the_list_has_every_row_in_100_columns(run):
    done = run()
    assert (done.returncode, done.stderr) == (0, '')
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    first_words = {line.split()[0] for line in lines if line.startswith('  ')}
    assert {row.name for rows in tasks.GROUPS.values() for row in rows} <= first_words
    [cola] = [line.split() for line in lines if ' glue_cola_v002 ' in line]
    assert cola == ['glue_cola_v002', 'glue/cola:1.0.0', 'tvx', 'matthews_corrcoef']


def test_a_mixture_says_what_to_put_where(run, tmp_path):
    done = run('glue_v002_proportional', f'--tfds_dir={tmp_path}')
    assert done.returncode == 1
    rows = done.stdout.splitlines()
    assert rows[0] == 'glue_v002_proportional, a mixture of 11 tasks'
    assert rows[1].split()[:3] == ['8,551', '0.90%', 'glue_cola_v002:']
    assert len(rows) == 12
    assert f"data.tfds='glue/cola:1.0.0': {tmp_path} holds no such data set" in done.stderr
    assert "prepare it there with 'tfds build glue/cola'" in done.stderr


def test_a_mixture_of_unknown_size(run, tmp_path):
    """Gzipped lines are not counted: the rate is unknown, and the line says why."""
    with gzip.open(tmp_path / 'b.txt.gz', 'wt') as file:
        file.write('one line of text\n')
    (tmp_path / 'a.txt').write_text('one line of text\nanother line\n')
    (tmp_path / 'mine.py').write_text(
        'from tasks import Mixture, Task, proportional\n'
        f"a = Task('a', files='{tmp_path}/a.txt', objective='span_corruption')\n"
        f"b = Task('b', files='{tmp_path}/b.txt.gz', objective='span_corruption')\n"
        "TASKS = [a, b, Mixture('both', {'a': proportional(), 'b': proportional()}),\n"
        "         Mixture('one', {'b': proportional()})]\n"
    )
    done = run('both', '--module=mine', cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, '')
    _, a, b = done.stdout.splitlines()
    assert a.split()[:2] == ['2', 'a:'] and 'unknown' not in a
    assert b.split()[:3] == ['by', 'size', 'b:'] and 'number of examples is unknown: cache' in b
    done = run('one', '--module=mine', cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, '')
    assert 'by size' in done.stdout


@pytest.mark.parametrize('vocabulary', ['', 'bytes'])
def test_examples_of_a_task(run, tmp_path, vocabulary):
    (tmp_path / 'cola.jsonl').write_text((json.dumps(COLA) + '\n') * 5)
    files = f'--files={tmp_path}/cola.jsonl'
    done = run('glue_cola_v002', '--examples=2', files, f'--vocabulary={vocabulary}')
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.count("  inputs: 'cola sentence: A book läuft.'") == 2
    assert done.stdout.count("  targets: 'acceptable'") == 2
    ids = [*(byte + 3 for byte in b'acceptable'), 1]
    assert done.stdout.count(f'  ids of the targets: {ids}') == (2 if vocabulary else 0)


def test_examples_of_documents_and_of_a_user(run, tmp_path):
    (tmp_path / 'text.txt').write_text('one line of text\nanother line\n')
    (tmp_path / 'mine.py').write_text(
        f"from tasks import Task\nTASKS = [Task('mine', files='{tmp_path}/text.txt', "
        "objective='span_corruption')]\n"
    )
    done = run('mine', '--module=mine', '--examples=1', '--vocabulary=bytes', cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, '')
    assert "targets: 'one line of text'" in done.stdout
    assert '  ids of the inputs: [' in done.stdout


@pytest.mark.parametrize(
    'arguments, status, message',
    [
        (
            ['glue_cola'],
            2,
            "data.task='glue_cola' is unknown: the nearest names are glue_cola_v002",
        ),
        (
            ['glue_cola_v002', '--tfds_dir=/nowhere'],
            1,
            "prepare it there with 'tfds build glue/cola'",
        ),
        (['t0_train', '--cache_dirs=/nowhere'], 2, "='/nowhere': /nowhere is no folder: correct"),
        (['en_mix', '--files=x'], 2, "data.files='x' are the records of one task"),
        (['glue_cola_v002', '--split=dev'], 2, 'invalid choice'),
        (['glue_cola_v002', '--examples=-1'], 2, '--examples=-1: must be 0 or more'),
    ],
)
def test_what_is_wrong_is_named(run, arguments, status, message):
    done = run(*arguments)
    assert done.returncode == status
    assert message in done.stderr
    assert done.stderr.count('tasks.py: ') == 1 or 'usage' in done.stderr
    assert 'Traceback' not in done.stderr
