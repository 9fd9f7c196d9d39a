"""The folder of a run: whose it is, whether it can hold checkpoints, what is printed."""

import json
import os
import pty
import re
import shutil
import signal
import sys
import threading
import time

import jax
import numpy as np
import pytest
from permissions import another_user, full_disk
from runs import Program, assert_same_run, metrics_of, run, small_config

import checkpoint
import infer
import paths
import train
import workdir
from configs import base


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
    """Every name is resolved once to the folder that the shell means.

    TensorStore refuses names with '..'.
    """
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


def test_caches_without_the_task_are_named_first(corpus, tmp_path, monkeypatch, capsys):
    config = small_config(corpus)
    config.data.cache_dirs = str(tmp_path)
    monkeypatch.setattr(train, 'compile_step', None)  # comes after
    with pytest.raises(TypeError):
        train.prepare(config, tmp_path / 'run')
    assert f"data.cache_dirs='{tmp_path}' has no effect: it holds" in capsys.readouterr().out


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
    monkeypatch.setattr(train, 'compile_step', None)  # comes after the check
    with pytest.raises(OSError, match='ermission denied.*run/lock'), another_user():
        train.prepare(small_config(text), folder)
    (folder / 'lock').touch()
    (folder / 'lock').chmod(0o666)
    with pytest.raises(OSError, match='cannot hold checkpoints .*ermission'), another_user():
        workdir.check_saving(folder, num_bytes=1)
    os.chmod(folder, 0o755)


def test_a_full_disk_is_reported_before_the_first_step(tmp_path):
    with pytest.raises(OSError, match=r'has .* GB of free space, a checkpoint takes 1000000000\.0'):
        workdir.check_saving(tmp_path, num_bytes=10**18)
    with full_disk(16), pytest.raises(OSError) as refused:
        workdir.check_saving(tmp_path, num_bytes=1)
    assert f'{tmp_path} cannot hold checkpoints' in str(refused.value)
    assert 'name another --workdir' in str(refused.value)


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


@pytest.mark.slow
def test_hangup_saves_and_nohup_goes_on(command_line, corpus, tmp_path):
    program = Program(tmp_path, corpus, steps=10**6, log=10, save=10**6, evaluate=10**6)
    arguments = program.arguments(tmp_path / 'run')
    process = command_line.start(*arguments)
    process.wait_for('step 10/')
    process.send_signal(signal.SIGHUP)
    result = process.wait()
    assert result.status == 129, result.stderr
    [step] = checkpoint.steps(tmp_path / 'run')
    process = command_line.start(*arguments, ignores_hangup=True)
    process.wait_for(f'Going on after step {step:,}')
    process.wait_for('step .*0/')
    process.send_signal(signal.SIGHUP)  # as a terminal does that is closed
    process.wait_for('step .*0/')
    process.send_signal(signal.SIGTERM)
    assert process.wait().status == 143


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_and_the_next_run_repeats_it(corpus, uninterrupted, tmp_path):
    config = small_config(corpus, steps=6)
    interrupted = train.prepare(config, tmp_path / 'run')
    calls = []

    def stop():
        calls.append(1)
        return signal.SIGTERM if sys._getframe(2).f_code.co_name == '__call__' else 0

    assert train.train(interrupted, stop) == signal.SIGTERM
    assert checkpoint.steps(tmp_path / 'run') == [3]
    assert [line['run'] for line in metrics_of(tmp_path / 'run')] == ['train'] * 3
    train.train(train.prepare(config, tmp_path / 'run'))
    assert_same_run(tmp_path / 'run', uninterrupted, 6)
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
        assert_same_run(tmp_path / 'last', uninterrupted, 6)


def test_an_interrupted_notebook_cell_saves(corpus, tmp_path):
    """A notebook sends SIGINT, without main.py's handlers, while `train` runs in the main thread."""
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


def read_terminal(file, process, seconds):
    """Return what a process prints on a terminal until it ends."""
    printed = ''
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            text = os.read(file, 65536)
        except OSError:  # Linux, when the process has ended
            break
        if not text:
            break
        printed += text.decode()
    return printed


@pytest.mark.slow
def test_a_terminal_keeps_logged_lines_and_shows_one_live_line(command_line, corpus, tmp_path):
    program = Program(tmp_path, corpus, steps=400, log=100, save=60_000, evaluate=60_000)
    own, other = pty.openpty()
    process = command_line.start(*program.arguments(tmp_path / 'run'), stdout=os.ttyname(other))
    process.wait_until_open()
    os.close(other)
    text = read_terminal(own, process, seconds=100)
    os.close(own)
    result = process.wait()
    assert result.status == 0, result.stderr
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
        'timing/data_wait_fraction': 0.0,
        'timing/steps_per_second': 50_000 / max(seconds_left, 1e-9),
    }
    line = workdir.progress(50_000, 100_000, values)
    assert len(line) < 80 and line.startswith('step 50000/100000 loss 10.895')
    assert line.endswith(f'{words} left') and '1,234,568 tokens/s' in line
    values['timing/data_wait_fraction'] = 0.123
    line = workdir.progress(50_000, 100_000, values)
    assert len(line) < 80 and line.endswith(f'{words} left, data wait 12%')
    line = workdir.progress(50_000, None, values)  # of a run that ends after its epochs
    assert line.startswith('step 50000 loss 10.895') and line.endswith('tokens/s, data wait 12%')


@pytest.mark.slow
def test_a_console_that_is_gone_does_not_end_the_run(command_line, corpus, tmp_path):
    """As `| head -1` and a closed terminal do."""
    program = Program(tmp_path, corpus, steps=200, log=10, save=200, evaluate=200)
    pipe = tmp_path / 'pipe'
    os.mkfifo(pipe)
    process = command_line.start(*program.arguments(tmp_path / 'run'), stdout=pipe)
    with pipe.open() as lines:
        lines.readline()
    result = process.wait()
    assert result.status == 0, result.stderr
    assert checkpoint.steps(tmp_path / 'run') == [200]


def test_a_setting_that_an_older_run_lacks_counts_as_its_default(
    corpus, uninterrupted, tmp_path, monkeypatch
):
    """A setting is newer than the run: it goes on with the default and with nothing else."""
    shutil.copytree(uninterrupted, tmp_path / 'run')
    get_config = base.get_config

    def get_newer_config():
        config = get_config()
        with config.unlocked():
            config.optimizer.name = 'adafactor'
        return config

    monkeypatch.setattr(base, 'get_config', get_newer_config)
    config = small_config(corpus)
    config.optimizer.name = 'adamw'
    with pytest.raises(ValueError, match="[(]optimizer/name: 'adafactor' -> 'adamw'[)]: go on"):
        train.prepare(config, tmp_path / 'run')
    config.optimizer.name = 'adafactor'
    train.train(train.prepare(config, tmp_path / 'run'))
    settings = json.loads((tmp_path / 'run/config.json').read_text())
    assert settings['optimizer']['name'] == 'adafactor'


def test_a_setting_that_no_longer_exists_is_a_change():
    changes = workdir.changed_settings({'optimizer': {'momentum': 0.5}}, {}, may_change=())
    assert 'optimizer/momentum: 0.5 -> None' in changes


def test_config_json_marks_a_run(finished):
    assert workdir.is_run(finished)
    settings = json.loads((finished / 'config.json').read_text())
    assert settings['train']['steps'] == 3
    assert np.isfinite(metrics_of(finished)[-1]['loss']) and jax.process_count() == 1
