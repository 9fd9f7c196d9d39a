"""Task metrics and `--mode=infer` in two processes on loopback give the files of one process."""

import json
import socket
import subprocess
import sys

import numpy as np
import own_task
import pytest
from questions import make_config, write_task
from runs import ENVIRONMENT, ROOT, assert_close_runs, metrics_of, run

import checkpoint
import evaluate_mode
import infer
import infer_mode
import objectives
import partition

MESH = {'mesh.data': 2, 'mesh.model': 1}
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
jax.distributed.initialize(address, 2, process, initialization_timeout=120)
import evaluate_mode, infer, infer_mode, processes_test, questions, runs
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
    infer.EXAMPLES_PER_CHUNK = 3
    flags = infer_mode.Request(checkpoint, output_dir=str(output_dir or ''), **request)
    messages = infer_mode.infer_all(infer_mode.prepare(flags, None, INFER))
    print(*messages, sep='\n', file=sys.stderr)


def in_two_processes(folder, program=PROGRAM, statuses=(0, 0), **environment):
    """Run a program. Return the standard output and the errors of both processes."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{free.getsockname()[1]}'
    flags = f'{ENVIRONMENT["XLA_FLAGS"]} --xla_force_host_platform_device_count=1'
    processes = []
    for i in range(2):
        process = subprocess.Popen(
            [sys.executable, '-c', program, ROOT, ROOT / 'tests', address, str(i), folder],
            env=ENVIRONMENT | {'XLA_FLAGS': flags} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    outputs = []
    for process in processes:
        output, errors = process.communicate(timeout=300)
        lines = output.splitlines(keepends=True)
        output = ''.join(line for line in lines if not line.startswith('[Gloo]'))
        outputs.append((output, errors))
    found = tuple(process.returncode for process in processes)
    if statuses is None:
        assert 0 not in found, outputs
    else:
        assert found == statuses, outputs
    return outputs


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


def kill_after_two_chunks(monkeypatch, folder, checkpoint, request):
    """Leave in `folder` what a killed job leaves."""
    score_all = infer.score_all
    num_chunks = 0

    def counted(*arguments):
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == 3:
            raise Killed
        return score_all(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(infer, 'score_all', counted)
        with pytest.raises(Killed):
            infer_into(folder, checkpoint, request)
    assert len(list(folder.glob('tmp-*/*-chunk*.COMPLETED'))) == 2


@pytest.mark.slow
def test_two_processes_leave_the_files_of_one(tmp_path, monkeypatch, capsys):
    """Training with task metrics, --mode=evaluate and --mode=infer, the last two half done before."""
    monkeypatch.setattr(infer, 'EXAMPLES_PER_CHUNK', 3)  # put back after the test
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
    kill_after_two_chunks(monkeypatch, begun / 'scored', checkpoint, named['scored'])

    (output, errors), (other_output, other_errors) = in_two_processes(tmp_path)
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
    monkeypatch.setattr(partition, 'from_processes', lambda digest: digests)
    with pytest.raises(ValueError, match='the examples of qa differ between the 2 processes: each'):
        partition.check_alike('the examples of qa', b'12')


def test_standard_input_in_two_processes_is_refused(monkeypatch):
    monkeypatch.setattr(infer_mode.jax, 'process_count', lambda: 2)
    with pytest.raises(ValueError, match='--input=- in 2 processes: each reads all examples, and'):
        infer_mode.check_request(infer_mode.Request('runs/a', input='-'))


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
    address, 2, process, initialization_timeout=120, heartbeat_timeout_seconds=20
)
import checkpoint, objectives, own_task, processes_test, runs, train
if os.environ['FAIL'] == 'metric of one' and process == 1:
    os.environ['FAIL'] = 'metric'
if os.environ['FAIL'] == 'save' and process == 1:
    train.save = own_task.fail
objectives.TextToText.records_per_group = 4
config = own_task.config(folder)
config.update_from_flattened_dict(processes_test.MESH)
if os.environ['FAIL'] == 'save':
    config.save.every_steps = 2
config.data.on_bad_line = os.environ.get('ON_BAD_LINE', 'stop')
config.data.max_bad_fraction = 0.1
if 'line' in os.environ['FAIL']:
    config.infer_eval.every_steps = 0  # it reads all lines before the first step
try:
    runs.run(config, folder / 'run')
except Exception as error:
    print(type(error).__name__, error, *getattr(error, '__notes__', ()), file=sys.stderr)
    sys.exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize('place', ['line', 'line of validation', 'metric', 'metric of one'])
def test_two_processes_save_the_same_step_before_an_error(place, tmp_path, monkeypatch):
    """A line that one of them reads, and a metric."""
    own_task.write(tmp_path)
    file = tmp_path / ('dev.jsonl' if place == 'line of validation' else 'qa.jsonl')
    if 'line' in place:
        own_task.insert_bad_line(file, 5 if place == 'line of validation' else 50)
    outputs = in_two_processes(tmp_path, FAILING, statuses=(1, 1), FAIL=place)
    assert 'is saved before the error' in outputs[0][0]
    [step] = checkpoint.steps(tmp_path / 'run')
    reasons = [errors for _, errors in outputs if file.name in errors or 'no examples' in errors]
    others = [errors for _, errors in outputs if 'ProcessFailed' in errors]
    assert (len(reasons), len(others)) == ((2, 0) if place == 'metric' else (1, 1))
    remedied = place if 'line' in place else ''
    in_two_processes(tmp_path, FAILING, FAIL=remedied, ON_BAD_LINE='skip')
    monkeypatch.setattr(objectives.TextToText, 'records_per_group', 4)
    config = own_task.config(tmp_path)
    config.data.on_bad_line = 'skip'
    config.data.max_bad_fraction = 0.1
    if 'line' in place:
        config.infer_eval.every_steps = 0
    expected = run(config, tmp_path / 'expected')
    assert_close_runs(tmp_path / 'run', expected, config.train.steps)


@pytest.mark.slow
def test_processes_that_cannot_agree_do_not_save(tmp_path):
    """One of them fails where the others are within a save."""
    own_task.write(tmp_path)
    in_two_processes(tmp_path, FAILING, statuses=None, FAIL='save')
    assert not checkpoint.steps(tmp_path / 'run')
