"""A disk that is full in the middle of a run: one line, the last checkpoint, and the same end later."""

import contextlib
import dataclasses
import resource
import subprocess
import time

import pytest
from permissions import full_disk
from runs import assert_same_run, run, small_config

import checkpoint
import loop
from modes import errors
from prepare import prepare
from run import verify


def run_until(number, event, config, workdir):
    """Train, with an event before a step."""
    prepared = prepare(config, workdir)
    first_step = prepared.step

    def step(state, batch):
        nonlocal first_step
        first_step += 1
        if first_step == number:
            event()
        return prepared.train_step(state, batch)

    loop.train(dataclasses.replace(prepared, train_step=step))


def test_a_disk_is_full_from_a_step_on(corpus, uninterrupted, tmp_path):
    """No file may grow: metrics.jsonl is the first."""
    config = small_config(corpus)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        while checkpoint.steps(tmp_path) != [3] or list(tmp_path.glob('*tmp*')):
            time.sleep(0.01)  # a save is under way
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))

    with full_disk(limits[0]), pytest.raises(OSError) as error:
        run_until(5, fill, config, tmp_path)
    line = errors.one_line(error.value)
    assert str(tmp_path) in line and 'File too large' in line
    assert verify.newest_valid(tmp_path, pytest.fail) == 3
    run(config, tmp_path)
    assert_same_run(tmp_path, uninterrupted, 6)


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
        while True:
            file.write(bytes(2**12))
    return filler


# TensorBoard's thread: main.py prints no traceback of it.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
@pytest.mark.parametrize(
    'seconds', [0.0, *[pytest.param(x / 200, marks=pytest.mark.chaos) for x in range(1, 20)]]
)
def test_a_small_disk_is_full(corpus, uninterrupted, tmp_path, seconds):
    """At any moment of a step or a save, which then ends between any two files."""
    config = small_config(corpus)
    with small_disk(tmp_path / 'disk', megabytes=16) as disk:
        workdir = disk / 'run'
        filler = None

        def fill_later():
            nonlocal filler
            time.sleep(seconds)
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
