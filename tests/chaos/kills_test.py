"""Killed at every operation on files and at any moment: no saved step is lost, and nobody has to clean up."""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import time

import kills
import pytest
from faults import contents
from runs import ROOT, Program, assert_same_run

import checkpoint
from run import verify


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


@pytest.fixture
def fork_server(monkeypatch):
    """Starts processes that have imported what they run, in milliseconds each."""
    monkeypatch.setenv('PYTHONPATH', f'{ROOT}{os.pathsep}{ROOT / "tests"}')
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['kills'])
    return context


@pytest.mark.parametrize(
    'every',
    [
        pytest.param(29, id='short'),
        pytest.param(9, marks=pytest.mark.slow, id='slow'),
        pytest.param(1, marks=pytest.mark.chaos, id='chaos'),
    ],
)
def test_killed_at_each_operation_on_files(tmp_path, begun, fork_server, every):
    """Of starting, saving, committing and deleting: the next start ends as if nobody had been killed."""
    expected = tmp_path / 'expected'
    shutil.copytree(begun, expected)
    kills.save_once(expected)
    assert checkpoint.steps(expected) == [1, 3, 4]
    assert (expected / 'checkpoint_4.damaged-1').exists()
    whole = contents(expected)
    workdir = tmp_path / 'killed'
    num_kills = 0
    for moment in itertools.count(1, every):
        shutil.rmtree(workdir, ignore_errors=True)
        shutil.copytree(begun, workdir)
        process = fork_server.Process(target=kills.save_and_die, args=(workdir, moment))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        num_kills += 1
        assert verify.newest_valid(workdir, lambda text: None) in (3, 4)
        steps = checkpoint.steps(workdir)
        assert steps in ([1, 2, 3], [1, 2, 3, 4], [1, 3, 4])
        for step in steps:
            directory = workdir / f'checkpoint_{step}'
            assert verify.verify(directory)
            assert all((x == step).all() for x in checkpoint.restore(directory).values())
        kills.save_once(workdir)
        assert contents(workdir) == whole
    assert contents(workdir) == whole
    assert num_kills * every > 200


def is_saving(workdir):
    return bool(list(workdir.glob('checkpoint_*.tmp-*')))


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
    """Killed after some steps, half the times or more while it saves: all that a run leaves, to the bit."""
    program = Program(tmp_path, corpus, steps, log=4, save=6, evaluate=150, dropout_rate=0.1)
    killed = tmp_path / 'killed'
    rng = random.Random(0)
    inside = 0
    for _ in range(num_kills):
        before = checkpoint.steps(killed)
        step = max(before, default=0) + rng.randrange(8, 40)
        process = command_line.start(*program.arguments(killed))
        while int(process.wait_for('step ').split()[1].partition('/')[0]) < step:
            pass
        time.sleep(rng.uniform(0, 0.05))
        while inside < num_kills / 2 and not is_saving(killed):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.wait().status == -signal.SIGKILL  # it did not end by itself
        inside += is_saving(killed)
        assert checkpoint.steps(killed)[: len(before)] == before
    assert inside >= num_kills / 2
    for name in ('killed', 'expected'):
        result = command_line(*program.arguments(tmp_path / name))
        assert result.status == 0, result.stderr
    assert_same_run(killed, tmp_path / 'expected', steps)
    assert not list(killed.glob('*tmp*'))
