"""Killed at any moment and at every operation on files: no saved step is lost, and nobody has to clean up.

`pytest -m chaos` kills a Saver in a process of its own before and after each operation on files and at random
moments, and real training runs at random moments.
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import kills
import pytest
from faults import contents
from runs import ENVIRONMENT, ROOT, Program, assert_same_run

import checkpoint
from run import verify

# A process that imports once and forks a child for each command: {'workdir', 'die_at', 'is_endless'}.
SERVER = """
import io, itertools, json, os, signal, sys, threading
sys.path[:0] = sys.argv[1:3]
import numpy as np
import checkpoint  # starts none of JAX's threads
import kills


def die_at(moment):
    count = itertools.count(1)
    lock = threading.Lock()

    def pass_moment():
        with lock:
            if next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(operation):
        def passed(*arguments, **keywords):
            pass_moment()
            result = operation(*arguments, **keywords)
            pass_moment()
            return result

        return passed

    for owner, names in (
        (os, ('open', 'fsync', 'rename', 'replace', 'unlink', 'mkdir', 'rmdir')),
        (io, ('open',)),
        (checkpoint, ('_write_array', 'checksum')),
    ):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))


for line in sys.stdin:
    command = json.loads(line)
    if 'wait' in command:
        print(json.dumps(os.waitpid(command['wait'], 0)[1]), flush=True)
        continue
    child = os.fork()
    if child:
        print(json.dumps(child), flush=True)
        continue
    status = 1
    try:
        die_at(command['die_at'])
        if command['is_endless']:
            kills.save_forever(command['workdir'])
        else:
            kills.save_once(command['workdir'])
        status = 0
    finally:
        os._exit(status)
"""


class Server:
    """Starts processes that save and are killed, in milliseconds each."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, '-c', SERVER, str(ROOT), str(ROOT / 'tests')],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    def ask(self, **command):
        self.process.stdin.write(json.dumps(command) + '\n')
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, workdir, die_at=0, is_endless=False):
        """Return the process id of a child that dies at a moment, counted from 1."""
        return self.ask(workdir=str(workdir), die_at=die_at, is_endless=is_endless)

    def wait(self, pid):
        """Return the exit status of a child, negative for the number of a signal."""
        return os.waitstatus_to_exitcode(self.ask(wait=pid))

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope='module')
def server():
    server = Server()
    yield server
    server.close()


def assert_valid(workdir, step):
    """Assert that a checkpoint verifies and holds its own step, bit for bit."""
    directory = workdir / f'checkpoint_{step}'
    assert verify.verify(directory)
    restored = checkpoint.restore(directory)
    assert restored and all((array == step).all() for array in restored.values())


# A Saver alone.


@pytest.fixture
def begun(tmp_path):
    """A workdir with checkpoint 1, which is pinned, 2 and 3, a damaged one, and what two kills have left."""
    workdir = tmp_path / 'begun'
    for step in (1, 2, 3, 4):
        checkpoint.save(workdir, step, kills.tree_of(step), kills.FILES)
    (workdir / 'checkpoint_1/PINNED').touch()
    (workdir / 'checkpoint_4/target.0/0.0').write_bytes(b'damaged')
    for name in ('checkpoint_4.tmp-1', 'checkpoint_0.tmp-deleted'):
        shutil.copytree(workdir / 'checkpoint_2/target.0', workdir / name / 'target.0')
    return workdir


@pytest.mark.parametrize(
    'every',
    [
        pytest.param(29, id='short'),
        pytest.param(9, marks=pytest.mark.slow, id='slow'),
        pytest.param(1, marks=pytest.mark.chaos, id='chaos'),
    ],
)
def test_killed_at_each_operation_on_files(tmp_path, begun, server, every):
    """Of starting, saving, committing and deleting: the next start ends as if nobody had been killed."""
    expected = tmp_path / 'expected'
    shutil.copytree(begun, expected)
    kills.save_once(expected)
    assert checkpoint.steps(expected) == [1, 3, 4]
    assert (expected / 'checkpoint_4.damaged-1').exists()
    whole = contents(expected)
    workdir = tmp_path / 'killed'
    num_kills = 0
    num_committed = 0
    for moment in itertools.count(1, every):
        shutil.rmtree(workdir, ignore_errors=True)
        shutil.copytree(begun, workdir)
        status = server.wait(server.start(workdir, die_at=moment))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        num_kills += 1
        newest = verify.newest_valid(workdir, lambda text: None)
        assert newest in (3, 4)
        num_committed += newest == 4
        steps = checkpoint.steps(workdir)
        assert steps in ([1, 2, 3], [1, 2, 3, 4], [1, 3, 4])
        for step in steps:
            assert_valid(workdir, step)
        kills.save_once(workdir)
        assert contents(workdir) == whole
    print(f'\n{num_kills} kills at operations on files, {num_committed} after the commit')
    assert contents(workdir) == whole
    assert 0 < num_committed < num_kills
    assert num_kills * every > 200


@pytest.mark.parametrize(
    'num_kills',
    [
        3,
        pytest.param(40, marks=pytest.mark.slow),
        pytest.param(300, marks=pytest.mark.chaos),
    ],
)
def test_killed_at_random_moments(tmp_path, server, num_kills):
    """Only the newest valid checkpoint is promised, and it is never a damaged one."""
    random_seconds = random.Random(0)
    num_torn = 0
    steps = []
    for _ in range(num_kills):
        before = steps
        (tmp_path / 'handed_over').unlink(missing_ok=True)
        pid = server.start(tmp_path, is_endless=True)
        while not (tmp_path / 'handed_over').exists() or not lines_of(tmp_path / 'handed_over'):
            time.sleep(0.002)
        time.sleep(random_seconds.uniform(0, 0.2))
        os.kill(pid, signal.SIGKILL)
        assert server.wait(pid) == -signal.SIGKILL
        handed_over = lines_of(tmp_path / 'handed_over')[-1]
        num_torn += len(list(tmp_path.glob('*.tmp-*')))
        steps = checkpoint.steps(tmp_path)
        if not steps:
            assert handed_over == 1  # killed within the very first save
            continue
        assert steps[-1] >= max([handed_over - 1, *before])
        for step in steps:
            assert_valid(tmp_path, step)
    print(f'\n{num_kills} kills at random moments, {num_torn} within a save or a deletion')
    if num_kills >= 40:  # with fewer, none may hit a save
        assert num_torn > num_kills / 4
    checkpoint.Saver(tmp_path).close()
    (tmp_path / 'handed_over').unlink()
    assert sorted(os.listdir(tmp_path)) == sorted(f'checkpoint_{step}' for step in steps)


def lines_of(file):
    """Return the numbers in the whole lines of a file."""
    return [int(line) for line in file.read_text().splitlines(keepends=True) if line.endswith('\n')]


# Training runs.


def is_saving(workdir):
    return bool(list(workdir.glob('checkpoint_*.tmp-*')))


def kill_after(process, step, workdir, inside_saving, rng):
    """Kill a run some moments after a step, while it saves if asked. Return whether it was saving."""
    while int(process.wait_for('step ').split()[1].partition('/')[0]) < step:
        pass
    time.sleep(rng.uniform(0, 0.05))
    while inside_saving and not is_saving(workdir):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.wait().status == -signal.SIGKILL  # it did not end by itself
    return is_saving(workdir)


@pytest.mark.parametrize(
    'num_kills, steps',
    [
        pytest.param(8, 600, marks=[pytest.mark.long, pytest.mark.slow(takes_minutes=True)]),
        pytest.param(100, 3600, marks=pytest.mark.chaos),
    ],
)
def test_killed_and_continued_is_the_run_never_killed(
    command_line, corpus, tmp_path, num_kills, steps
):
    """Killed on the way, half the times or more while it saves: all that a run leaves, to the bit.

    In the long form each third kill comes at any moment of the start, too.
    """
    program = Program(tmp_path, corpus, steps, log=4, save=6, evaluate=150, dropout_rate=0.1)
    killed = tmp_path / 'killed'
    rng = random.Random(0)
    inside = 0
    seconds_to_start = []
    for number in range(num_kills):
        before = checkpoint.steps(killed)
        began = time.monotonic()
        process = command_line.start(*program.arguments(killed))
        if num_kills > 8 and number % 3 == 2:
            time.sleep(rng.uniform(0, 1.2 * max(seconds_to_start)))
            process.send_signal(signal.SIGKILL)
            assert process.wait().status == -signal.SIGKILL
            inside += is_saving(killed)
        else:
            step = max(before, default=0) + rng.randrange(8, 40)
            inside += kill_after(process, step, killed, inside < num_kills / 2, rng)
            seconds_to_start.append(time.monotonic() - began)
        assert checkpoint.steps(killed)[: len(before)] == before
    print(f'\n{num_kills} kills of a training run, {inside} with a torn save in the workdir')
    assert inside >= num_kills / 2
    assert max(checkpoint.steps(killed)) > 100
    for name in ('killed', 'expected'):
        result = command_line(*program.arguments(tmp_path / name))
        assert result.status == 0, result.stderr
    assert_same_run(killed, tmp_path / 'expected', steps)
    assert not list(killed.glob('*tmp*'))
