"""Several processes on loopback: results of one process, losses, signals, and other numbers of them.

tests/modes/processes_test.py has how they find and watch each other.
"""

import json
import signal
import sys
import time

import jax
import numpy as np
import own_task
import pytest
from command_line import ROOT
from questions import make_config, write_task
from runs import (
    ENVIRONMENT,
    Program,
    assert_close_runs,
    free_address,
    in_two_processes,
    metrics_of,
    position_of,
    run,
    small_config,
)

import answers.batches
import checkpoint
import data
import infer
import loop
import state_names
from messages import Refused
from modes import evaluate as evaluate_mode
from modes import infer as infer_mode
from prepare import prepare
from run.agreement import check_alike

MESH = {'mesh.data': 1, 'mesh.fsdp': 2, 'mesh.model': 1}
INFER = MESH | {'decode.batch_size': 4, 'decode.max_length': 8}
# Beside two files of ours, the arguments are the address of process 0, the number of this process, and
# the folder of the task. Process 1 names other output folders: what it finds there decides nothing.
PROGRAM = """
import pathlib
import sys
sys.path[:0] = sys.argv[1:3]
import jax
address, process, folder = sys.argv[3], int(sys.argv[4]), pathlib.Path(sys.argv[5])
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(address, 2, process, initialization_timeout=300)
import infer, processes_test, questions, runs
from modes import evaluate as evaluate_mode, infer as infer_mode
config = questions.make_config(folder)
config.update_from_flattened_dict(processes_test.MESH)
runs.run(config, folder / 'in_two')
output = folder / f'output_of_{process}'
checkpoint = str(folder / 'in_one')
evaluate_mode.CheckpointEvaluation(config, checkpoint, str(output / 'evaluated'), watch=True).run()
for name, request in processes_test.requests(folder).items():
    processes_test.infer_into(output / name, checkpoint, request)
processes_test.infer_into(None, checkpoint, {'text': 'is 5 e?'})
"""


def requests(folder):
    """Return requests of --mode=infer, by name."""
    return {
        'predicted': {'split': 'validation', 'output_ids': True},
        'scored': {'input': f'{folder}/scored.jsonl', 'score': True},
    }


def infer_into(output_dir, checkpoint, request):
    answers.batches.EXAMPLES_PER_CHUNK = 3
    flags = infer_mode.Request(checkpoint, output_dir=str(output_dir or ''), **request)
    messages = infer_mode.infer_all(infer_mode.Job(flags, None, INFER))
    print(*messages, sep='\n', file=sys.stderr)


def files_of(folder):
    """{path: content} of all files but TensorBoard's, the lines of JSON Lines without their scores."""
    found = {}
    for file in folder.rglob('*'):
        if file.name.startswith('events.') or not file.is_file():
            continue
        content = file.read_bytes()
        if '.jsonl' in file.name:
            content = [json.loads(line) for line in content.splitlines()]
            for line in content:
                line.pop('score', None)
        found[str(file.relative_to(folder))] = content
    return found


def scores_of(folder):
    scores = []
    for file in sorted(folder.rglob('*.jsonl')):
        lines = [json.loads(line) for line in file.open()]
        scores += [line['score'] for line in lines if 'score' in line]
    return scores


def assert_same_results(found, expected):
    """Assert equal files. XLA rounds scores by the number of its threads: 1e-6 is a few roundings."""
    assert files_of(found) == files_of(expected)
    assert len(scores_of(expected)) > 0
    np.testing.assert_allclose(scores_of(found), scores_of(expected), rtol=1e-6)


class Killed(BaseException):
    pass


def kill_after_two_batches(monkeypatch, folder, checkpoint, request):
    """Leave in `folder` what a killed job leaves."""
    score_batch = infer.score_batch
    num_batches = 0

    def counted(*arguments):
        nonlocal num_batches
        num_batches += 1
        if num_batches == 3:
            raise Killed
        return score_batch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(infer, 'score_batch', counted)
        with pytest.raises(Killed):
            infer_into(folder, checkpoint, request)
    assert [file.name for file in folder.glob('*.json*')] == ['infer.json']


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_leave_the_files_of_one(tmp_path, monkeypatch, capsys):
    """Training with task metrics, --mode=evaluate and --mode=infer, the last two half done before."""
    monkeypatch.setattr('answers.batches.EXAMPLES_PER_CHUNK', 3)  # put back after the test
    write_task(tmp_path)
    lines = []
    for i in range(10):
        lines.append(
            json.dumps({'inputs': f'is {i}?' + ' or' * (i % 4), 'targets': 'no' * (i % 3)})
        )
    (tmp_path / 'scored.jsonl').write_text('\n'.join(lines))
    config = make_config(tmp_path)
    config.update_from_flattened_dict(MESH)
    checkpoint = str(run(config, tmp_path / 'in_one'))
    expected = tmp_path / 'expected'
    evaluation = evaluate_mode.CheckpointEvaluation(
        config, checkpoint, str(expected / 'evaluated'), step='all'
    )
    evaluation.run()
    named = requests(tmp_path)
    for name, request in named.items():
        infer_into(expected / name, checkpoint, request)
    capsys.readouterr()
    infer_into(None, checkpoint, {'text': 'is 5 e?'})
    answer = capsys.readouterr().out

    begun = tmp_path / 'output_of_0'
    config.infer_eval.task = 'rank'
    evaluate_mode.CheckpointEvaluation(config, checkpoint, str(begun / 'evaluated'), step='3').run()
    kill_after_two_batches(monkeypatch, begun / 'scored', checkpoint, named['scored'])

    (output, errors), (other_output, other_errors) = in_two_processes(PROGRAM, tmp_path)
    assert 'Step 3: rank is evaluated already' in output
    assert output.endswith(answer)
    assert 'The results are in ' in errors
    assert other_output == ''
    assert 'The results are in ' not in other_errors
    assert_same_results(begun, expected)
    assert not files_of(tmp_path / 'output_of_1')
    events = list((begun / 'evaluated').rglob('events.*'))
    assert len(events) == 4  # rank has those of its first evaluation, too

    assert_same_results(
        tmp_path / 'in_two' / 'inference_eval', tmp_path / 'in_one' / 'inference_eval'
    )
    table = (tmp_path / 'in_one' / 'results.csv').read_text()
    assert (tmp_path / 'in_two' / 'results.csv').read_text() == table
    of_tasks = []
    for workdir in (tmp_path / 'in_one', tmp_path / 'in_two'):
        of_tasks.append([x for x in metrics_of(workdir) if x['run'].startswith('inference_eval/')])
    assert of_tasks[0] == of_tasks[1]


def test_processes_that_read_other_examples_are_refused(monkeypatch):
    digests = np.array([[1, 2], [1, 3]], 'uint8')
    monkeypatch.setattr('run.agreement.from_processes', lambda digest: digests)
    with pytest.raises(Refused, match='the examples of qa'):
        check_alike('the examples of qa', b'12')


# An error after unsaved steps. The arguments are those of PROGRAM.
FAILING = """
import json
import os
import pathlib
import sys
sys.path[:0] = sys.argv[1:3]
import jax
address, process, folder = sys.argv[3], int(sys.argv[4]), pathlib.Path(sys.argv[5])
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(
    address, 2, process, initialization_timeout=300, heartbeat_timeout_seconds=20
)
import data, loop, own_task, processes_test, runs
if os.environ['FAIL'] == 'metric of one' and process == 1:
    os.environ['FAIL'] = 'metric'
if os.environ['FAIL'] == 'save' and process == 1:
    loop.save = own_task.fail
data.TextToText.records_per_group = 4
config = own_task.config(folder)
config.update_from_flattened_dict(processes_test.MESH)
if os.environ['FAIL'] == 'save':
    config.save.every_steps = 2
config.data.on_bad_line = os.environ.get('ON_BAD_LINE', 'stop')
config.data.max_bad_fraction = 0.1
if os.environ['FAIL'] == 'line':
    config.infer_eval.every_steps = 0  # it reads all lines before the first step
try:
    runs.run(config, folder / 'run')
except Exception as error:
    print(type(error).__name__, error, *getattr(error, '__notes__', ()), file=sys.stderr)
    sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    'place',
    [
        pytest.param('line', marks=pytest.mark.long),
        pytest.param('metric', marks=pytest.mark.long),
        'metric of one',
    ],
)
def test_two_processes_save_the_same_step_before_an_error(place, tmp_path, monkeypatch):
    """A line that one of them reads, and a metric."""
    own_task.write(tmp_path)
    file = tmp_path / 'qa.jsonl'
    if place == 'line':
        own_task.insert_bad_line(file, 50)
    outputs = in_two_processes(FAILING, tmp_path, statuses=(1, 1), FAIL=place)
    assert 'is saved before the error' in outputs[0][0]
    [step] = checkpoint.steps(tmp_path / 'run')
    reasons = [errors for _, errors in outputs if file.name in errors or 'no examples' in errors]
    others = [errors for _, errors in outputs if 'ProcessFailed' in errors]
    assert (len(reasons), len(others)) == ((2, 0) if place == 'metric' else (1, 1))
    remedied = place if place == 'line' else ''
    in_two_processes(FAILING, tmp_path, FAIL=remedied, ON_BAD_LINE='skip')
    monkeypatch.setattr(data.TextToText, 'records_per_group', 4)
    config = own_task.config(tmp_path)
    config.data.on_bad_line = 'skip'
    config.data.max_bad_fraction = 0.1
    if place == 'line':
        config.infer_eval.every_steps = 0
    expected = run(config, tmp_path / 'expected')
    assert_close_runs(tmp_path / 'run', expected, config.train.steps)


@pytest.mark.long
@pytest.mark.slow
def test_processes_that_cannot_agree_do_not_save(tmp_path):
    """One of them fails where the others are within a save."""
    own_task.write(tmp_path)
    in_two_processes(FAILING, tmp_path, statuses=None, FAIL='save')
    assert not checkpoint.steps(tmp_path / 'run')


# main.py.


def start_two(command_line, *arguments, folders=(ROOT, ROOT)):
    """Start main.py in two processes of four devices each, which are in `folders`."""
    flags = f'{ENVIRONMENT["XLA_FLAGS"]} --xla_force_host_platform_device_count=4'
    address = free_address()
    started = []
    for i in range(2):
        joined = [f'--coordinator_address={address}', '--num_processes=2', f'--process_id={i}']
        process = command_line.start(*arguments, *joined, cwd=folders[i], XLA_FLAGS=flags)
        started.append(process)
    return started


MESH_OF_EIGHT = ['--config.mesh.data=4', '--config.mesh.model=2']
LAST_STEP = 12


@pytest.fixture(scope='module')
def expected(corpus, make_once):
    """A run of one process with eight devices: 12 steps, of which each third is saved."""

    def train_alone(folder):
        config = small_config(corpus, steps=LAST_STEP, data_axis=4, model_axis=2)
        run(config, folder)

    return make_once('of_one_process', train_alone)


@pytest.fixture
def arguments(corpus, tmp_path):
    """The same as a command, in the folder `run`."""
    program = Program(tmp_path, corpus, LAST_STEP, log=1, save=3, evaluate=3, dropout_rate=0.1)
    return [*program.arguments(tmp_path / 'run'), *MESH_OF_EIGHT]


@pytest.mark.slow
@pytest.mark.parametrize(
    'name, number',
    [
        ('SIGKILL', 1),
        pytest.param('SIGSTOP', 1, marks=pytest.mark.long),
        pytest.param('SIGKILL', 0, marks=pytest.mark.long),
        pytest.param('SIGSTOP', 0, marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_after_one_of_two_processes_is_lost(
    name, number, arguments, command_line, expected, tmp_path
):
    both = start_two(command_line, *arguments, '--heartbeat=10')
    both[0].wait_for('step 5/')
    start = time.monotonic()
    both[number].send_signal(getattr(signal, name))
    result = both[1 - number].wait()
    assert time.monotonic() - start < 10 + 5
    both[number].send_signal(signal.SIGKILL)
    both[number].wait()
    if number == 0:  # without it, JAX ends the others
        assert result.status == -signal.SIGABRT
        assert 'JAX distributed service detected fatal errors' in result.stderr
    else:
        assert result.status == 1
        [line] = result.stderr.splitlines()
        assert line.startswith(f'main.py: process {number} (pid {both[number].pid} on ')
    saved = checkpoint.steps(tmp_path / 'run')
    assert saved[0] == 3

    results = [process.wait() for process in start_two(command_line, *arguments)]
    assert [(result.status, result.stderr) for result in results] == [(0, ''), (0, '')]
    assert f'step {saved[-1]:,}' in results[0].stdout
    assert_close_runs(tmp_path / 'run', expected, LAST_STEP)


SLOW_STEPS = """
import time, loop
log = loop.log

def log_slowly(*arguments):
    time.sleep(3)
    log(*arguments)

loop.log = log_slowly
"""


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_stops_both(
    arguments, command_line, corpus, expected, tmp_path
):
    config = tmp_path / 'small.py'
    config.write_text(config.read_text() + SLOW_STEPS)
    both = start_two(command_line, *arguments)
    both[0].wait_for('step 2/')
    start = time.monotonic()
    both[1].send_signal(signal.SIGTERM)
    results = [process.wait() for process in both]
    assert time.monotonic() - start < 30
    assert [(result.status, result.stderr) for result in results] == [(143, ''), (143, '')]
    stopped_at = checkpoint.steps(tmp_path / 'run')[-1]
    assert 2 <= stopped_at <= 5
    assert f'Stopped after step {stopped_at}' in results[0].stdout

    run(small_config(corpus, LAST_STEP, data_axis=4, model_axis=2), tmp_path / 'run')
    assert_close_runs(tmp_path / 'run', expected, LAST_STEP)


@pytest.mark.slow
def test_a_workdir_that_one_process_does_not_see(arguments, command_line, tmp_path):
    hosts = [tmp_path / 'host_0', tmp_path / 'host_1']
    for host in hosts:
        host.mkdir()
    both = start_two(command_line, *arguments, '--workdir=run', folders=hosts)
    results = [process.wait() for process in both]
    assert [result.status for result in results] == [2, 2]
    assert 'process 1 ' in results[0].stderr
    assert len(results[0].stderr.splitlines()) == 1
    assert 'ompiling' not in results[0].stdout


@pytest.mark.slow
def test_text_that_is_another_one_in_each_process(arguments, command_line, tmp_path):
    """The same command in folders whose files differ."""
    hosts = [tmp_path / 'host_0', tmp_path / 'host_1']
    for number, host in enumerate(hosts):
        host.mkdir()
        (host / 'x.txt').write_text(''.join(f'line {i} of host {number}\n' for i in range(1000)))
    flags = [flag for flag in arguments if '--config.data.files' not in flag]
    flags += ['--config.data.files=x.txt', f'--workdir={tmp_path}/run']
    results = [process.wait() for process in start_two(command_line, *flags, folders=hosts)]
    assert [result.status for result in results] == [2, 2]
    [line] = results[0].stderr.splitlines()
    assert 'the text, the vocabulary' in line and results[1].stderr == ''
    assert not list((tmp_path / 'run').glob('checkpoint_*'))


# The arguments are those of PROGRAM, the corpus, and the sizes of the mesh and the last step.
GOING_ON = """
import json
import pathlib
import sys
sys.path[:0] = sys.argv[1:3]
import jax, numpy as np
address, process, folder = sys.argv[3], int(sys.argv[4]), pathlib.Path(sys.argv[5])
num_processes, data_axis, model_axis, steps = json.loads(sys.argv[7])
jax.distributed.initialize(address, num_processes, process, initialization_timeout=300)
import loop, optimizer, processes_test
from prepare import prepare
config = processes_test.elastic_config(sys.argv[6], data_axis, model_axis, steps)
run = prepare(config, folder)
processes_test.assert_restored(run)
loop.train(run)
"""


def elastic_config(corpus, data_axis, model_axis, steps):
    config = small_config(corpus, steps, data_axis, model_axis)
    config.train.batch_size = 8
    config.save.every_steps = config.eval.every_steps = 2
    return config


def assert_restored(run):
    """Assert that this process's part of the state is that of the checkpoint, bit for bit."""
    if run.step == 0:
        return
    saved = checkpoint.restore(run.workdir.path / f'checkpoint_{run.step}')
    tree = state_names.to_t5x(*run.state)
    assert tree.keys() == saved.keys()
    for path, array in tree.items():
        whole = np.asarray(saved[path])
        if not isinstance(array, jax.Array):  # a placeholder of T5X
            np.testing.assert_array_equal(array, whole, err_msg=path)
            continue
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole[shard.index], err_msg=path)


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_processes(corpus, tmp_path):
    """2 processes of 4 devices, then 4 of 2, then 1, on other meshes, as one process without a stop."""
    folder = tmp_path / 'run'
    for num_processes, data_axis, model_axis, steps in ((2, 4, 2, 2), (4, 8, 1, 4)):
        in_two_processes(
            GOING_ON,
            folder,
            corpus,
            json.dumps([num_processes, data_axis, model_axis, steps]),
            num_processes=num_processes,
            num_devices=8 // num_processes,
            statuses=(0,) * num_processes,
        )
    last = prepare(elastic_config(corpus, data_axis=2, model_axis=2, steps=6), folder)
    assert last.step == 4
    assert_restored(last)
    loop.train(last)
    alone = run(elastic_config(corpus, data_axis=1, model_axis=1, steps=6), tmp_path / 'alone')
    assert_close_runs(folder, alone, 6)
    for step in (2, 4):
        np.testing.assert_array_equal(position_of(folder, step), position_of(alone, step))
