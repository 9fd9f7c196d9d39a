"""Processes that find each other and watch each other, on loopback. They join JAX but compute nothing."""

import json
import signal
import socket
import subprocess
import sys

import pytest
from command_line import ROOT
from forms import first_in_ci
from runs import ENVIRONMENT, free_address

from messages import Refused
from modes import processes

# Forks three processes that join, and sleep; one of them does what it is asked to. Prints the status of
# each, and the seconds from then to its end. Their output is in files.
PROGRAM = """
import json, os, pathlib, signal, subprocess, sys, time
root, address, folder, chosen, action, heartbeat = sys.argv[1:]
sys.path.insert(0, root)
from messages import Refused
from modes import errors, process, processes
process.set_variables({'TF_CPP_MIN_LOG_LEVEL': '3'})
import jax

folder = pathlib.Path(folder)


def act(number, action, group):
    if action.startswith('SIG'):
        os.kill(os.getpid(), getattr(signal, action))
    if action == 'settings':
        group.check_same({'seed': int(number == int(chosen)), 'model.emb_dim': 8})
    if action == 'line':
        raise Refused('a bad line')
    if action in ('crash', 'all'):
        assert not action


def work(number):
    group = processes.join(address, 3, number, int(heartbeat))
    (folder / f'ready-{number}').touch()
    while len(list(folder.glob('ready-*'))) < 3:
        time.sleep(0.01)
    try:
        if number == int(chosen) or action in ('all', 'settings'):
            act(number, action, group)
    except Exception as error:
        return group.fail(error, status=2 if errors.is_one_line(error) else 1)
    time.sleep(100)


children = {}
for number in range(3):
    child = os.fork()
    if child == 0:
        for descriptor, name in ((1, 'stdout'), (2, 'stderr')):
            os.dup2(os.open(folder / f'{name}-{number}', os.O_WRONLY | os.O_CREAT), descriptor)
        status = work(number)
        jax.distributed.shutdown()  # as the interpreter does at its end
        os._exit(status)
    children[child] = number
while len(list(folder.glob('ready-*'))) < 3:
    time.sleep(0.01)
start = time.monotonic()
ended = {}
while children:
    child, status = os.wait()
    number = children.pop(child)
    ended[number] = [os.waitstatus_to_exitcode(status), time.monotonic() - start]
    if action == 'SIGSTOP' and list(children.values()) == [int(chosen)]:
        os.kill(*children, signal.SIGKILL)
print(json.dumps([ended[number] for number in range(3)]))
"""


def run_three(folder, chosen, action, heartbeat):
    """Return the exit status of each, the seconds until the last one ended, and their stderr."""
    arguments = [ROOT, free_address(), folder, str(chosen), action, str(heartbeat)]
    program = [sys.executable, '-c', PROGRAM, *arguments]
    output = subprocess.run(program, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True)
    ended = json.loads(output.stdout.splitlines()[-1])
    errors = [(folder / f'stderr-{i}').read_text() for i in range(3)]
    return [status for status, _ in ended], max(seconds for _, seconds in ended), errors


LONG = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize('name, number', [('SIGKILL', 1), pytest.param('SIGSTOP', 2, marks=LONG)])
def test_the_others_stop_when_a_process_is_lost(name, number, tmp_path):
    statuses, seconds, errors = run_three(tmp_path, number, name, heartbeat=4)
    expected = [1, 1, 1]
    expected[number] = -signal.SIGKILL
    assert statuses == expected
    assert 3 < seconds < 4 + 5
    [line] = errors[0].splitlines()
    assert line.startswith(f'main.py: process {number} (pid ') and 'died or hangs' in line
    assert errors[1] == errors[2] == ''


@pytest.mark.slow
@pytest.mark.parametrize('action, status', first_in_ci([('crash', 1), ('line', 2)]))
def test_an_error_of_one_stops_all_and_names_it(action, status, tmp_path):
    statuses, _, errors = run_three(tmp_path, 1, action, heartbeat=30)
    assert statuses == [1, status, 1]
    *traceback, error, last = ['', *errors[1].splitlines()]
    if action == 'line':
        assert last.startswith('main.py: process 1 (pid ') and last.endswith(': a bad line')
    else:
        assert error == 'AssertionError' and last.startswith('process 1 (pid ')
    assert (len(traceback) > 1) == (action == 'crash')
    [line] = errors[0].splitlines()
    assert line.startswith('main.py: process 1 (pid ')
    assert errors[2] == ''


@pytest.mark.slow
@pytest.mark.parametrize('number', first_in_ci([2, 0]))
def test_settings_that_differ(number, tmp_path):
    statuses, _, errors = run_three(tmp_path, number, 'settings', heartbeat=30)
    assert statuses[2] == 2 and set(statuses) <= {1, 2}
    assert f'seed={int(number == 2)}, not {int(number == 0)}' in errors[2]
    assert 'emb_dim' not in errors[2] and not errors[2].count('\n') > 1


def test_an_error_of_all_is_reported_once(tmp_path):
    statuses, _, errors = run_three(tmp_path, 1, 'all', heartbeat=30)
    assert statuses == [1, 1, 1]
    assert errors[0].count('Traceback') == 1 and errors[0].splitlines()[-1] == 'AssertionError'
    assert errors[1:] == ['', '']


@pytest.mark.slow
def test_processes_that_do_not_meet(tmp_path):
    arguments = ['--num_processes=2', '--process_id=1', '--heartbeat=2']
    command = [sys.executable, 'main.py', '--config=configs/tiny.py', f'--workdir={tmp_path}']
    command += [*arguments, f'--coordinator_address={free_address()}']
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and '--heartbeat' in line


def test_a_port_that_is_taken_is_named():
    with socket.create_server(('', 0)) as other:
        address = f'localhost:{other.getsockname()[1]}'
        with pytest.raises(Refused, match=address):
            processes.check_flags(address, num_processes=2, process_id=0)
        processes.check_flags(address, num_processes=2, process_id=1)
    processes.check_flags(address, num_processes=2, process_id=0)


SBATCH = {'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '2', 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0'}
ONE_PER_NODE = {'SLURM_STEP_NUM_TASKS': '2', 'SLURM_STEP_NUM_NODES': '2'}
ONE_PER_GPU = {'SLURM_STEP_NUM_TASKS': '8', 'SLURM_STEP_NUM_NODES': '2'}
MPIRUN = {'OMPI_COMM_WORLD_SIZE': '8', 'OMPI_COMM_WORLD_LOCAL_SIZE': '4'}


@pytest.mark.parametrize(
    'environment, several, share',
    [
        ({}, False, False),
        (SBATCH, False, False),
        (SBATCH | {'SLURM_STEP_NUM_TASKS': '1', 'SLURM_STEP_NUM_NODES': '1'}, False, False),
        (SBATCH | ONE_PER_NODE, True, False),
        (SBATCH | ONE_PER_GPU, True, True),
        (SBATCH | ONE_PER_GPU | {'CUDA_VISIBLE_DEVICES': '0,1,2,3'}, True, True),
        (SBATCH | ONE_PER_GPU | {'CUDA_VISIBLE_DEVICES': '3'}, True, False),
        (MPIRUN, True, True),
        (MPIRUN | {'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}, True, False),
        ({'OMPI_COMM_WORLD_SIZE': '1'}, False, False),
        ({'TPU_WORKER_HOSTNAMES': 'a,b'}, True, False),
        ({'TPU_WORKER_HOSTNAMES': 'localhost'}, False, False),
        ({'TPU_WORKER_HOSTNAMES': 'a', 'MEGASCALE_NUM_SLICES': '2'}, True, False),
        ({'KUBERNETES_SERVICE_HOST': '10.0.0.1'}, False, False),
    ],
)
def test_launchers(environment, several, share):
    assert processes.is_launched(environment) == several
    assert processes.shares_host(environment) == share
