"""The folder of a run: whose it is, whether it can hold checkpoints, what is printed."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from end_to_end_test import ROOT, assert_same_run, corpus, metrics_of, run, small_config
from permissions import another_user

import checkpoint
import infer
import paths
import train
import workdir

assert corpus  # a fixture


@pytest.fixture(scope='module')
def finished(corpus, tmp_path_factory):
    """A run of three steps; a checkpoint after the second and the third."""
    config = small_config(corpus, steps=3)
    config.save.every_steps = 2
    return run(config, tmp_path_factory.mktemp('finished') / 'run')


FOLDERS = {
    'relative': 'runs/x',
    'parent': '../other/x',
    'parents': 'a/../../other/./x',
    'home': '~/x',
    'spaces': 'my runs/x y',
    'unicode': 'läufe/試/x',
    'signs': "a#b?c%20d&e'f[1],{2}:=/x",
    'slash': 'runs/x/',
    'link': 'link/x',
    'through a link': 'link/../x',
}


@pytest.mark.parametrize('name', FOLDERS.values(), ids=FOLDERS.keys())
def test_every_name_of_a_folder_takes_checkpoints(tmp_path, monkeypatch, name):
    """TensorStore refuses '..': every name is made whole once, and then it is the folder that the shell means."""
    (tmp_path / 'far/target').mkdir(parents=True)
    (tmp_path / 'here').mkdir()
    (tmp_path / 'here/link').symlink_to(tmp_path / 'far/target')
    (tmp_path / 'here/a').mkdir()
    monkeypatch.chdir(tmp_path / 'here')
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    folder = paths.disk_path(name)
    workdir.check_is_run(folder)
    workdir.lock(folder).close()
    workdir.check_saving(folder, num_bytes=1000)
    assert [path.name for path in folder.iterdir()] == ['lock']
    assert os.path.samefile(os.path.expanduser(name), folder)


def test_a_run_in_a_parent_folder(corpus, tmp_path, monkeypatch):
    """Its first save comes after step 3: all steps were lost there once."""
    (tmp_path / 'here').mkdir()
    monkeypatch.chdir(tmp_path / 'here')
    monkeypatch.setenv('HOME', str(tmp_path))
    config = small_config(corpus, steps=3)
    for name in ('../runs of mine/ü/', '~/runs of mine/ü'):  # and goes on under another name
        run(config, name)
        assert checkpoint.steps(tmp_path / 'runs of mine/ü')[-1] == config.train.steps
        config.train.steps = 6
    config.restore.path = '../runs of mine/ü'
    config.train.steps = 7
    run(config, 'third')
    assert checkpoint.steps('third') == [7]
    assert infer.load('../here/third').vocabulary.model


def test_the_next_command_can_be_pasted(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(small_config(corpus, steps=1), 'my runs/x')
    assert "tensorboard '--logdir=my runs/x' shows the curves" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_reported_before_the_first_step(
    corpus, open_path, monkeypatch
):
    folder = open_path / 'run'
    folder.mkdir()
    text = shutil.copy(corpus, open_path)
    os.chmod(text, 0o644)
    os.chmod(folder, 0o555)
    monkeypatch.setattr(train, 'compile_step', None)  # what comes next
    with pytest.raises(OSError, match='ermission denied.*run/lock'), another_user():
        train.prepare(small_config(text), folder)
    (folder / 'lock').touch()
    (folder / 'lock').chmod(0o666)
    with pytest.raises(OSError, match='cannot hold checkpoints .*ermission'), another_user():
        workdir.check_saving(folder, num_bytes=1)
    os.chmod(folder, 0o755)


FULL = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import pathlib, jax, workdir
jax.devices()
resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))  # as a full disk, for whole files
workdir.check_saving(pathlib.Path(sys.argv[2]), 1)
"""


def test_a_full_disk_is_reported_before_the_first_step(tmp_path):
    with pytest.raises(OSError, match=r'has .* GB of free space, a checkpoint takes 1000000000\.0'):
        workdir.check_saving(tmp_path, num_bytes=10**18)
    result = subprocess.run(
        [sys.executable, '-c', FULL, ROOT, tmp_path],
        capture_output=True,
        text=True,
        env=os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'},
    )
    error = result.stderr.splitlines()[-1]
    assert f'{tmp_path} cannot hold checkpoints' in error and 'name another --workdir' in error


def test_a_run_whose_checkpoints_are_gone_is_not_started_anew(corpus, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'run')
    for step in (2, 3):
        shutil.rmtree(tmp_path / f'run/checkpoint_{step}')
    before = (tmp_path / 'run/metrics.jsonl').read_bytes()
    with pytest.raises(ValueError, match='metrics of 3 steps but no checkpoint .* --workdir'):
        train.prepare(small_config(corpus, steps=3), tmp_path / 'run')
    assert (tmp_path / 'run/metrics.jsonl').read_bytes() == before
    (tmp_path / 'run/metrics.jsonl').unlink()
    run(small_config(corpus, steps=3), tmp_path / 'run')


def test_a_run_that_never_saved_starts_anew(corpus, finished, tmp_path):
    """Killed before its first checkpoint, during it, or between its two first files."""
    for name in ('before', 'during', 'early'):
        shutil.copytree(finished, tmp_path / name)
        for step in (2, 3):
            shutil.rmtree(tmp_path / name / f'checkpoint_{step}')
    lines = (finished / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (tmp_path / 'before/metrics.jsonl').write_text(''.join(lines[:2]))
    (tmp_path / 'during/checkpoint_2.tmp-17').mkdir()
    for file in (tmp_path / 'early').iterdir():
        if file.name not in ('lock', 'config.json'):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    for name in ('before', 'during', 'early'):
        workdir.check_is_run(tmp_path / name)
        workdir.check_never_saved(tmp_path / name)


def test_a_backup_in_a_run_of_ours_stays(corpus, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'run')
    (tmp_path / 'run/checkpoint_2.tmp-backup').mkdir()
    (tmp_path / 'run/checkpoint_2.tmp-17').mkdir()
    run(small_config(corpus, steps=4), tmp_path / 'run')
    assert (tmp_path / 'run/checkpoint_2.tmp-backup').exists()
    assert not (tmp_path / 'run/checkpoint_2.tmp-17').exists()


def test_a_foreign_config_in_a_run_of_ours_stays(corpus, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'run')
    (tmp_path / 'run/config.json').write_text('{"model_type": "t5"}')
    with pytest.raises(ValueError, match='not a run of this program'):
        train.prepare(small_config(corpus, steps=4), tmp_path / 'run')
    (tmp_path / 'run/config.json').unlink()  # its checkpoints say whose it is
    workdir.check_is_run(tmp_path / 'run')


def test_other_files_in_the_folder_are_left_alone(corpus, tmp_path):
    (tmp_path / 'notes.txt').write_text('mine')
    (tmp_path / 'my.tmp').write_text('mine')
    run(small_config(corpus, steps=1), tmp_path)
    assert (tmp_path / 'notes.txt').read_text() == (tmp_path / 'my.tmp').read_text() == 'mine'


def test_prepared_twice_in_one_process(corpus, finished):
    config = small_config(corpus, steps=3)
    first = train.prepare(config, finished)
    with pytest.raises(ValueError, match='this process has prepared it before'):
        train.prepare(config, finished)
    train.train(first)
    with pytest.raises(ValueError, match='has ended: prepare it once more'):
        train.train(first)
    for name in (None, '', 3):
        with pytest.raises(ValueError, match='is no path'):
            train.prepare(config, name)


def test_a_vocabulary_that_is_gone_is_that_of_the_checkpoint(corpus, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'run')
    (tmp_path / 'run/vocabulary.model').unlink()
    run(small_config(corpus, steps=4), tmp_path / 'run')
    assert (tmp_path / 'run/vocabulary.model').read_bytes() == (
        finished / 'vocabulary.model'
    ).read_bytes()
    copied = shutil.copytree(tmp_path / 'run/checkpoint_4', tmp_path / 'alone')
    assert infer.load(copied).vocabulary.size == 241


# Signals.

PROGRAM = """
import sys
sys.path[:0] = {path!r}
from end_to_end_test import small_config

def get_config():
    config = small_config({corpus!r}, steps={steps})
    config.eval.steps = 500
    config.data.validation_fraction = 0.5
    config.train.batch_size = 1
    config.eval.every_steps, config.save.every_steps, config.log.every_steps = {periods}
    return config
"""


def program(folder, corpus, steps, periods):
    file = folder / 'small.py'
    path = [str(ROOT), str(ROOT / 'tests')]
    file.write_text(PROGRAM.format(path=path, corpus=corpus, steps=steps, periods=periods))
    return [sys.executable, str(ROOT / 'main.py'), f'--config={file}', f'--workdir={folder}/run']


ENVIRONMENT = os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu', 'PYTHONUNBUFFERED': '1'}


def read_until(process, pattern):
    for line in process.stdout:
        if re.search(pattern, line):
            return line
    raise AssertionError(process.stderr.read())


def test_hangup_saves_and_nohup_goes_on(corpus, tmp_path):
    command = program(tmp_path, corpus, steps=10**6, periods=(10**6, 10**6, 10))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    read_until(process, '^step 10/')
    process.send_signal(signal.SIGHUP)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 129, error
    [step] = checkpoint.steps(tmp_path / 'run')
    process = subprocess.Popen(
        ['nohup', *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    read_until(process, f'Going on after step {step:,}')
    read_until(process, '^step .*0/')
    process.send_signal(signal.SIGHUP)  # as a terminal does that is closed
    read_until(process, '^step .*0/')
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 143


def test_a_signal_ends_an_evaluation_which_is_made_up_for(corpus, tmp_path):
    config = small_config(corpus, steps=6)
    run(config, tmp_path / 'whole')
    interrupted = train.prepare(config, tmp_path / 'run')
    calls = []

    def stop():
        calls.append(1)
        return signal.SIGTERM if sys._getframe(2).f_code.co_name == '__call__' else 0

    assert train.train(interrupted, stop) == signal.SIGTERM
    assert checkpoint.steps(tmp_path / 'run') == [3]
    assert [line['run'] for line in metrics_of(tmp_path / 'run')] == ['train'] * 3
    train.train(train.prepare(config, tmp_path / 'run'))
    assert_same_run(tmp_path / 'run', tmp_path / 'whole', 6)
    # And after the last step, when nothing else is left to do.
    interrupted = train.prepare(config, tmp_path / 'last')

    def stop_last():
        frame = sys._getframe(2)
        is_last = len(metrics_of(tmp_path / 'last')) > 4
        return signal.SIGTERM if frame.f_code.co_name == '__call__' and is_last else 0

    assert train.train(interrupted, stop_last) == signal.SIGTERM
    assert checkpoint.steps(tmp_path / 'last') == [3, 6]
    for _ in range(2):
        train.train(train.prepare(config, tmp_path / 'last'))
        assert_same_run(tmp_path / 'last', tmp_path / 'whole', 6)


def test_an_interrupted_notebook_cell_saves(corpus, tmp_path):
    """Without handlers of main.py: SIGINT, as a notebook sends it, while `train` runs in the main thread."""
    config = small_config(corpus, steps=10**6)
    config.eval.every_steps = config.save.every_steps = 10**6
    prepared = train.prepare(config, tmp_path)

    def interrupt():
        while not len(metrics_of(tmp_path)) > 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    (tmp_path / 'metrics.jsonl').touch()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert train.train(prepared) == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    [step] = checkpoint.steps(tmp_path)
    assert metrics_of(tmp_path)[-1]['step'] == step


# The terminal.


def on_a_terminal(command, seconds):
    """What a command prints on a terminal of 80 columns, as (time, text), and its exit status."""
    own, other = pty.openpty()
    process = subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=ENVIRONMENT, close_fds=True
    )
    os.close(other)
    printed = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            text = os.read(own, 65536)
        except OSError:  # Linux, when the process is gone
            break
        if not text:
            break
        printed.append((time.monotonic(), text.decode()))
    os.close(own)
    return printed, process.wait(timeout=10)


def test_a_terminal_keeps_logged_lines_and_shows_one_live_line(corpus, tmp_path):
    command = program(tmp_path, corpus, steps=60_000, periods=(60_000, 60_000, 20_000))
    printed, status = on_a_terminal(
        [*command, '--config.train.steps=400', '--config.log.every_steps=100'], 100
    )
    assert status == 0, printed
    text = ''.join(text for _, text in printed)
    lines = text.replace('\x1b[K', '').split('\r\n')
    kept = [line.split('\r')[-1] for line in lines]
    steps = [int(match[1]) for line in kept if (match := re.match(r'step (\d+)/', line))]
    assert steps == [100, 200, 300, 400]
    live = [part for line in lines for part in line.split('\r')[:-1] if part.startswith('step')]
    assert live  # at least that of the first step
    assert all(len(part) < 80 for part in live + [x for x in kept if x.startswith('step')])
    assert any('Compiled in' in line for line in kept)


@pytest.mark.parametrize(
    'seconds_left, words', [(0, '0:00:00'), (3661, '1:01:01'), (86400 * 12, '12d 0h')]
)
def test_progress_fits_into_80_columns(seconds_left, words):
    values = {
        'nats_per_token': 10.8951,
        'accuracy': 0.12345,
        'learning_rate/current': 1.23456e-5,
        'timing/tokens_per_second': 1_234_567.8,
        'timing/steps_per_second': 50_000 / max(seconds_left, 1e-9),
    }
    line = train.progress(50_000, 100_000, values)
    assert len(line) < 80 and line.startswith('step 50000/100000 loss 10.895')
    assert line.endswith(f'{words} left') and '1,234,568 tokens/s' in line


def test_a_console_that_is_gone_does_not_end_the_run(corpus, tmp_path):
    """As `| head -1` and a closed terminal do."""
    command = program(tmp_path, corpus, steps=200, periods=(200, 200, 10))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=100) == 0, error
    assert checkpoint.steps(tmp_path / 'run') == [200]


def test_config_json_marks_a_run(finished):
    assert workdir.is_run(finished)
    settings = json.loads((finished / 'config.json').read_text())
    assert settings['train']['steps'] == 3
    assert np.isfinite(metrics_of(finished)[-1]['loss']) and jax.process_count() == 1
