"""Runs whose disk is full, read-only or deleted, and whose clock goes backwards, in the middle of their steps.

They continue, or end with one line and their last checkpoint; then the same command ends as if nothing had happened.
"""

import contextlib
import dataclasses
import resource
import shutil
import subprocess
import tempfile
import time

import pytest
from permissions import another_user, full_disk
from runs import Program, assert_same_run, run, small_config, state_of

import checkpoint
import train
from modes import errors, infer_input
from prepare import prepare
from run import verify


def run_until(number, event, config, workdir):
    """Train, with an event before a step."""
    prepared = prepare(config, workdir)
    first_step = prepared.progress.step

    def step(state, batch):
        nonlocal first_step
        first_step += 1
        if first_step == number:
            event()
        return prepared.train_step(state, batch)

    train.train(dataclasses.replace(prepared, train_step=step))


def await_step_3(workdir):
    """Wait until the checkpoint of step 3 is complete, and no save is under way."""
    while checkpoint.steps(workdir) != [3] or list(workdir.glob('*tmp*')):
        time.sleep(0.01)


def assert_goes_on(workdir, config, expected):
    """Assert that the newest checkpoint is valid, and that a run continues from it to the same end."""
    assert verify.newest_valid(workdir, pytest.fail) == 3
    run(config, workdir)
    assert_same_run(workdir, expected, 6)
    assert not list(workdir.glob('*tmp*'))


@pytest.mark.parametrize(
    'num_bytes', [0, *[pytest.param(x, marks=pytest.mark.slow) for x in (500,)]]
)
def test_a_disk_is_full_from_a_step_on(corpus, uninterrupted, tmp_path, num_bytes):
    """No file may grow beyond a size: metrics.jsonl, a side file or the index of a checkpoint is the first."""
    config = small_config(corpus)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        await_step_3(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))

    with full_disk(limits[0]), pytest.raises(OSError) as error:
        run_until(5, fill, config, tmp_path)
    line = errors.one_line(error.value)
    assert str(tmp_path) in line and 'File too large' in line
    assert_goes_on(tmp_path, config, uninterrupted)


@contextlib.contextmanager
def small_disk(folder, megabytes):
    """Mount a disk of a few megabytes, which needs the rights for it."""
    command = ['mount', '-t', 'tmpfs', '-o', f'size={megabytes}m', 'tmpfs', str(folder)]
    folder.mkdir()
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip('no right to mount a small disk')
    try:
        yield folder
    finally:
        subprocess.run(['umount', '-l', str(folder)], check=True)


def fill(disk):
    """Leave no byte free. Return the file that takes them."""
    filler = disk / 'filler'
    with contextlib.suppress(OSError), filler.open('wb', buffering=0) as file:
        for size in (2**20, 2**12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return filler


# TensorBoard's thread: main.py prints no traceback of it, as the next test shows.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
@pytest.mark.parametrize(
    'seconds', [0.0, *[pytest.param(x / 20, marks=pytest.mark.chaos) for x in range(1, 20)]]
)
def test_a_small_disk_is_full(corpus, uninterrupted, tmp_path, seconds):
    """At any moment of a step or a save, which then ends between any two files."""
    config = small_config(corpus)
    with small_disk(tmp_path / 'disk', megabytes=16) as disk:
        workdir = disk / 'run'
        filler = None

        def fill_later():
            nonlocal filler
            time.sleep(seconds / 10)
            filler = fill(disk)

        with pytest.raises(OSError) as error:
            run_until(4, fill_later, config, workdir)
        lines = [errors.one_line(error.value), *getattr(error.value, '__notes__', [])]
        assert all(str(workdir) in line and 'No space left on device' in line for line in lines)
        newest = verify.newest_valid(workdir, pytest.fail)
        assert newest in (None, 3)  # the save of step 3 may not have ended yet
        assert newest == 3 or 'checkpoint_3 is not saved' in ' '.join(lines)
        leftover = workdir / f'checkpoint_5.tmp-{int(time.time())}'
        leftover.mkdir()
        filler.rename(leftover / 'array')  # what an unfinished save takes is free again
        run(config, workdir)
        assert_same_run(workdir, uninterrupted, 6)
        assert not list(workdir.glob('*tmp*'))


@pytest.mark.slow
def test_a_full_disk_on_the_command_line(corpus, command_line, tmp_path):
    """The run ends with status 1 and lines of its own, and continues when there is space."""
    with small_disk(tmp_path / 'disk', megabytes=16) as disk:
        program = Program(tmp_path, corpus, steps=120, log=1, save=20, evaluate=120)
        process = command_line.start(*program.arguments(disk / 'run'))
        process.wait_for('step 30/')
        filler = fill(disk)
        result = process.wait()
        assert result.status == 1
        for line in result.stderr.splitlines():
            assert line.startswith('main.py: ') and str(disk / 'run') in line, result.stderr
        assert verify.newest_valid(disk / 'run', pytest.fail) >= 20
        filler.unlink()
        for workdir in (disk / 'run', tmp_path / 'expected'):
            assert command_line(*program.arguments(workdir), '--config.save.keep=3').status == 0
        assert_same_run(disk / 'run', tmp_path / 'expected', 120)


def test_a_disk_becomes_read_only(corpus, uninterrupted, open_path):
    workdir = open_path / 'run'
    config = small_config(corpus)
    with contextlib.ExitStack() as stack:

        def close_folders():
            await_step_3(workdir)
            for path in (workdir, *workdir.rglob('*')):
                path.chmod(0o555 if path.is_dir() else 0o444)
            stack.enter_context(another_user())

        with pytest.raises(OSError) as error:
            run_until(5, close_folders, config, workdir)
    line = errors.one_line(error.value)
    assert str(workdir) in line and 'Permission denied' in line
    for path in (workdir, *workdir.rglob('*')):
        with contextlib.suppress(FileNotFoundError):  # a lock that TensorStore removes meanwhile
            path.chmod(0o755)
    assert_goes_on(workdir, config, uninterrupted)


def test_checkpoints_are_deleted_under_a_run(corpus, uninterrupted, tmp_path):
    """It does not need them, and saves the next ones."""

    def remove():
        while checkpoint.steps(tmp_path) != [4]:  # neither saving nor deleting is under way
            time.sleep(0.01)
        shutil.rmtree(tmp_path / 'checkpoint_4')

    config = small_config(corpus)
    config.save.every_steps = 2
    config.save.keep = 1
    run_until(6, remove, config, tmp_path)
    assert checkpoint.steps(tmp_path) == [6]
    assert verify.verify(tmp_path / 'checkpoint_6')
    assert_same_state(tmp_path, uninterrupted)


def assert_same_state(workdir, expected_workdir):
    """Assert that step 6 is the same, where lines of metrics.jsonl differ."""
    found = state_of(workdir, 6)
    expected = state_of(expected_workdir, 6)
    assert found.keys() == expected.keys()
    assert all((found[path] == expected[path]).all() for path in expected)


def test_a_checkpoint_is_deleted_while_it_is_written(
    corpus, uninterrupted, tmp_path, monkeypatch, capsys
):
    write_array = checkpoint._write_array

    def write_and_remove(directory, *arguments):
        written = write_array(directory, *arguments)
        if directory.name.startswith('checkpoint_6.'):
            shutil.rmtree(directory, ignore_errors=True)
        return written

    config = small_config(corpus)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, '_write_array', write_and_remove)
        with pytest.raises(OSError, match='checkpoint_6 is not saved .*No such file') as error:
            run(config, tmp_path)
    assert str(tmp_path) in errors.one_line(error.value)
    assert_goes_on(tmp_path, config, uninterrupted)


def test_a_workdir_is_deleted_under_a_run(corpus, uninterrupted, tmp_path):
    """It ends with a line, and saves its last step in a new folder. A new start continues from there."""
    config = small_config(corpus)
    workdir = tmp_path / 'run'

    def remove():
        await_step_3(workdir)
        shutil.rmtree(workdir)

    with pytest.raises(OSError) as error:
        run_until(5, remove, config, workdir)
    assert str(workdir) in errors.one_line(error.value)
    assert checkpoint.steps(workdir) == [5]
    run(config, workdir)
    assert_same_state(workdir, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    'start',
    [2.0**31 - 5, *[pytest.param(x, marks=pytest.mark.chaos) for x in (0.0, -1e6, 1.7e9, 1e11)]],
)
def test_a_clock_that_goes_backwards(corpus, uninterrupted, tmp_path, monkeypatch, start):
    """By an hour whenever somebody looks; it may stand before 1970 and after 2038."""
    now = start

    def tick():
        nonlocal now
        now -= 3600.0
        return now

    config = small_config(corpus)
    with monkeypatch.context() as patch:
        patch.setattr(time, 'time', lambda: start)
        run_until(6, lambda: patch.setattr(time, 'time', tick), config, tmp_path)
        shutil.rmtree(tmp_path / 'checkpoint_6')
        run(config, tmp_path)
    assert_same_run(tmp_path, uninterrupted, 6)


@pytest.mark.slow
def test_a_full_temporary_folder(corpus, command_line, tmp_path, monkeypatch):
    """Training needs none; answering takes the system's next one, or names the folder where its disk is full."""
    with small_disk(tmp_path / 'disk', megabytes=1) as disk:
        fill(disk)
        program = Program(tmp_path, corpus, steps=3, log=1, save=3, evaluate=3)
        result = command_line(*program.arguments(tmp_path / 'run'), TMPDIR=str(disk))
        assert result.status == 0, result.stderr
        assert verify.verify(tmp_path / 'run/checkpoint_3')
        monkeypatch.setattr(tempfile, 'tempdir', str(disk))
        with pytest.raises(OSError, match='No space left on device') as error:
            spool = infer_input.Spool()
            for _ in range(1000):
                spool.add(0, 'an example' * 100)
        assert str(disk) in errors.one_line(error.value)
