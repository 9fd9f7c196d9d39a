"""`--mode=tasks`: lists, mixtures and examples."""

import gzip
import json
import subprocess
import sys

import own_task
import pytest
from runs import ROOT

from tasks import t5

COLA = {'sentence': 'A book läuft.', 'label': 1, 'idx': 3}


@pytest.fixture
def run(command_line, tmp_path):
    """A function that runs `python main.py --mode=tasks` in a folder of its own."""

    def run(*arguments):
        return command_line('--mode=tasks', *arguments, cwd=tmp_path)

    return run


@pytest.mark.slow
def test_the_reader_may_stop_early():
    """As in `python main.py --mode=tasks | head -1`."""
    command = [sys.executable, str(ROOT / 'main.py'), '--mode=tasks', 't0_train']
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    _, stderr = process.communicate()
    assert stderr == b''


def test_the_list_has_every_row_in_100_columns(run):
    done = run()
    assert (done.status, done.stderr) == (0, '')
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    first_words = {line.split()[0] for line in lines if line.startswith('  ')}
    assert {row.name for rows in t5.groups().values() for row in rows} <= first_words
    [cola] = [line.split() for line in lines if ' glue_cola_v002 ' in line]
    assert cola == ['glue_cola_v002', 'glue/cola:1.0.0', 'tvx', 'matthews_corrcoef']


def test_a_mixture_says_what_to_put_where(run, tmp_path):
    done = run('glue_v002_proportional', f'--config.data.tfds_dir={tmp_path}')
    assert done.status == 1
    rows = done.stdout.splitlines()
    assert rows[0] == 'glue_v002_proportional, a mixture of 11 tasks'
    assert rows[1].split()[:3] == ['8,551', '0.90%', 'glue_cola_v002:']
    assert len(rows) == 12
    assert "data.tfds='glue/cola:1.0.0'" in done.stderr and 'tfds build glue/cola' in done.stderr


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
    done = run('both', '--config.data.module=mine')
    assert (done.status, done.stderr) == (0, '')
    _, a, b = done.stdout.splitlines()
    assert a.split()[:2] == ['2', 'a:'] and 'unknown' not in a
    assert b.split()[:3] == ['by', 'size', 'b:'] and 'number of examples is unknown: cache' in b
    done = run('one', '--config.data.module=mine')
    assert (done.status, done.stderr) == (0, '')
    assert 'by size' in done.stdout


def test_a_mixture_that_is_evaluated_alone(run, tmp_path):
    """Its rates by size are all 0."""
    (tmp_path / 'a.jsonl').write_text('{"q": "1", "a": "2"}\n')
    (tmp_path / 'mine.py').write_text(
        'from tasks import Mixture, Task, proportional\n'
        f"a = Task('a', validation_files='{tmp_path}/a.jsonl', train_split='none', inputs='{{q}}', targets='{{a}}')\n"
        "TASKS = [a, Mixture('m', {'a': proportional()})]\n"
    )
    for name in ('a', 'm'):
        done = run(name, '--config.data.module=mine')
        assert (done.status, done.stderr) == (0, '')
        assert '1 text file(s), 21 bytes' in done.stdout


@pytest.mark.parametrize(
    'vocabulary', ['bytes', pytest.param('', marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_examples_of_a_task(run, tmp_path, vocabulary):
    (tmp_path / 'cola.jsonl').write_text((json.dumps(COLA) + '\n') * 5)
    files = f'--config.data.files={tmp_path}/cola.jsonl'
    done = run('glue_cola_v002', '--examples=2', files, f'--vocabulary={vocabulary}')
    assert (done.status, done.stderr) == (0, '')
    assert done.stdout.count("  inputs: 'cola sentence: A book läuft.'") == 2
    assert done.stdout.count("  targets: 'acceptable'") == 2
    ids = [*(byte + 3 for byte in b'acceptable'), 1]
    assert done.stdout.count(f'  ids of the targets: {ids}') == (2 if vocabulary else 0)


def test_ids_as_the_model_reads_them(run, tmp_path):
    """T5Gemma's inputs begin with bos, id 2, and do not end with EOS, id 1."""
    (tmp_path / 'cola.jsonl').write_text(json.dumps(COLA))
    vocabulary = ROOT / 'tests/golden/t5gemma_tokenizer/tokenizer.model'
    flags = ['--examples=1', f'--vocabulary={vocabulary}', '--config.model.module=t5gemma']
    flags += [f'--config.data.files={tmp_path}/cola.jsonl', '--config.data.extra_ids=0']
    done = run('glue_cola_v002', *flags, '--config.data.sentinels=<unused{}>')
    assert (done.status, done.stderr) == (0, '')
    [inputs] = [line for line in done.stdout.splitlines() if 'ids of the inputs' in line]
    ids = json.loads(inputs.partition(': ')[2])
    assert ids[0] == 2 and ids[-1] != 1


def test_examples_of_documents_and_of_a_user(run, tmp_path):
    (tmp_path / 'text.txt').write_text('one line of text\nanother line\n')
    (tmp_path / 'mine.py').write_text(
        f"from tasks import Task\nTASKS = [Task('mine', files='{tmp_path}/text.txt', "
        "objective='span_corruption')]\n"
    )
    done = run('mine', '--config.data.module=mine', '--examples=1', '--vocabulary=bytes')
    assert (done.status, done.stderr) == (0, '')
    assert "targets: 'one line of text'" in done.stdout
    assert '  ids of the inputs: [' in done.stdout


@pytest.mark.parametrize('task, name', [('text', 'Dropping'), ('add', 'Shuffled')])
def test_examples_of_an_own_objective(run, tmp_path, task, name):
    own_task.write_objectives(tmp_path)
    flags = ['--config.data.module=objectives', '--examples=2', '--vocabulary=bytes']
    done = run(task, *flags)
    assert (done.status, done.stderr) == (0, '')
    assert f'objective: {name};' in done.stdout
    assert done.stdout.count('  ids of the targets: [') == 2


def test_examples_without_an_input(run, tmp_path):
    """Empty, or not there; an own task may leave it out."""
    (tmp_path / 'qa.jsonl').write_text('{"q": "", "a": "yes"}\n{"a": "no"}\n')
    (tmp_path / 'mine.py').write_text(
        'from tasks import Task\n'
        'def read(fields):\n'
        "    inputs = {'inputs': fields['q']} if 'q' in fields else {}\n"
        "    return [{**inputs, 'targets': fields['a']}]\n"
        f"TASKS = [Task('mine', files='{tmp_path}/qa.jsonl', preprocess_fn=read)]\n"
    )
    done = run('mine', '--config.data.module=mine', '--examples=2', '--vocabulary=bytes')
    assert (done.status, done.stderr) == (0, '')
    assert done.stdout.count('  ids of the inputs: [1]') == 2
    for answer in (b'yes', b'no'):
        assert f'  ids of the targets: {[*(byte + 3 for byte in answer), 1]}' in done.stdout


# The words of a command, its status, and what its line names. refusals_test.py has settings.
WRONG = [
    (['glue_cola_v002', '--config.data.tfds_dir=/nowhere'], 1, 'tfds build glue/cola'),
    (['en_mix', '--config.data.files=x'], 2, 'data.files'),
    (['glue_cola_v002', '--split=dev'], 2, '--split=dev'),
    (['mnist', 'glue'], 2, "'glue'"),
    (['glue_v002_proportional', '--examples=2'], 2, '--examples'),
    (['glue_cola_v002', '--config.data.inputs={sentence}'], 2, "data.inputs='{sentence}'"),
]


def test_what_is_wrong_is_named(run):
    for arguments, status, words in WRONG:
        done = run(*arguments)
        [line] = done.stderr.splitlines()
        assert done.status == status and words in line
