"""The folder of a run: whose it is, whether it can hold checkpoints, signals, settings."""

import json
import os
import shutil
import signal
import sys
import threading
import time

import pytest
from permissions import another_user, full_disk
from runs import Program, assert_same_run, metrics_of, run, small_config

import checkpoint
import loop
import paths
import train
from formats.best import read_metrics
from messages import Refused
from prepare import prepare
from run import checks
from run.lock import lock


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
    checks.check_is_run(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder / 'lock', str(folder), remedy='').close()
    checks.check_saving(folder, num_bytes=1000)
    assert [path.name for path in folder.iterdir()] == ['lock']
    assert os.path.samefile(os.path.expanduser(name), folder)


def test_caches_without_the_task_are_named_first(corpus, tmp_path, monkeypatch, capsys):
    config = small_config(corpus)
    config.data.cache_dirs = str(tmp_path)
    monkeypatch.setattr(train, 'compile_step', None)  # comes after
    with pytest.raises(TypeError):
        prepare(config, tmp_path / 'run')
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
    with pytest.raises(OSError, match='run/lock'), another_user():
        prepare(small_config(text), folder)
    (folder / 'lock').touch()
    (folder / 'lock').chmod(0o666)
    with pytest.raises(OSError, match=str(folder)), another_user():
        checks.check_saving(folder, num_bytes=1)
    os.chmod(folder, 0o755)


def test_a_full_disk_is_reported_before_the_first_step(tmp_path):
    with pytest.raises(OSError, match=r'1000000000\.0'):
        checks.check_saving(tmp_path, num_bytes=10**18)
    with full_disk(16), pytest.raises(OSError, match=str(tmp_path)):
        checks.check_saving(tmp_path, num_bytes=1)


def test_a_run_whose_checkpoints_are_gone_is_not_started_anew(corpus, finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'run')
    for step in (2, 3):
        shutil.rmtree(tmp_path / f'run/checkpoint_{step}')
    before = (tmp_path / 'run/metrics.jsonl').read_bytes()
    with pytest.raises(Refused, match='metrics.jsonl'):
        prepare(small_config(corpus, steps=3), tmp_path / 'run')
    assert (tmp_path / 'run/metrics.jsonl').read_bytes() == before
    (tmp_path / 'run/metrics.jsonl').unlink()
    run(small_config(corpus, steps=3), tmp_path / 'run')


def test_a_run_that_never_saved_starts_anew(finished, tmp_path):
    """Killed before its first checkpoint, during it, or between its two first files."""
    for name in ('before', 'during', 'early'):
        (tmp_path / name).mkdir()
        for file in ('lock', 'config.json', 'metrics.jsonl'):
            shutil.copy(finished / file, tmp_path / name)
    lines = (finished / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (tmp_path / 'before/metrics.jsonl').write_text(''.join(lines[:2]))
    (tmp_path / 'during/checkpoint_2.tmp-17').mkdir()
    (tmp_path / 'early/metrics.jsonl').unlink()
    for name in ('before', 'during', 'early'):
        checks.check_is_run(tmp_path / name)
        checks.check_never_saved(tmp_path / name, read_metrics(tmp_path / name))


def test_the_checkpoints_say_whose_a_folder_is(finished, tmp_path):
    shutil.copytree(finished, tmp_path / 'run')
    (tmp_path / 'run/config.json').write_text('{"model_type": "t5"}')
    checks.check_is_run(tmp_path / 'run')
    (tmp_path / 'run/config.json').unlink()
    checks.check_is_run(tmp_path / 'run')
    for copy in (tmp_path / 'run').glob('checkpoint_*/config.json'):
        copy.unlink()
    with pytest.raises(Refused, match='checkpoint_2'):
        checks.check_is_run(tmp_path / 'run')


@pytest.mark.slow
def test_other_files_in_the_folder_are_left_alone(corpus, tmp_path):
    (tmp_path / 'notes.txt').write_text('mine')
    (tmp_path / 'my.tmp').write_text('mine')
    run(small_config(corpus, steps=1), tmp_path)
    (tmp_path / 'checkpoint_1.tmp-backup').mkdir()
    (tmp_path / 'checkpoint_1.tmp-17').mkdir()
    run(small_config(corpus, steps=2), tmp_path)
    assert (tmp_path / 'notes.txt').read_text() == (tmp_path / 'my.tmp').read_text() == 'mine'
    assert [path.name for path in tmp_path.glob('*.tmp-*')] == ['checkpoint_1.tmp-backup']


def test_a_workdir_belongs_to_one_run(corpus, finished):
    config = small_config(corpus, steps=3)
    first = prepare(config, finished)
    with pytest.raises(Refused, match=f'process {os.getpid()} '):
        prepare(config, finished)
    loop.train(first)
    assert loop.train(prepare(config, finished)) == 0
    with pytest.raises(AssertionError):
        loop.train(first)
    with pytest.raises(Refused, match="''"):
        prepare(config, '')


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
    process.wait_for(f'Continuing after step {step:,}')
    process.wait_for('step .*0/')
    process.send_signal(signal.SIGHUP)  # as a terminal does that is closed
    process.wait_for('step .*0/')
    process.send_signal(signal.SIGTERM)
    assert process.wait().status == 143


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_and_the_next_run_repeats_it(corpus, uninterrupted, tmp_path):
    """At step 3, and after the last step, when nothing else is left to do."""
    config = small_config(corpus, steps=6)
    for name, num_lines, steps in (('run', 3, [3]), ('last', 7, [3, 6])):
        folder = tmp_path / name

        def stop(folder=folder, num_lines=num_lines):
            is_evaluating = sys._getframe(2).f_code.co_name == '__call__'
            return signal.SIGTERM * (is_evaluating and len(metrics_of(folder)) == num_lines)

        assert loop.train(prepare(config, folder), stop) == signal.SIGTERM
        assert checkpoint.steps(folder) == steps
        assert len(metrics_of(folder)) == num_lines
        for _ in range(2):
            loop.train(prepare(config, folder))
            assert_same_run(folder, uninterrupted, 6)


def test_an_interrupted_notebook_cell_saves(corpus, tmp_path):
    """A notebook sends SIGINT, without main.py's handlers, while `train` runs in the main thread."""
    config = small_config(corpus, steps=10**6)
    config.eval.every_steps = config.save.every_steps = 10**6
    prepared = prepare(config, tmp_path)

    def interrupt():
        while not len(metrics_of(tmp_path)) > 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    (tmp_path / 'metrics.jsonl').touch()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert loop.train(prepared) == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    [step] = checkpoint.steps(tmp_path)
    assert metrics_of(tmp_path)[-1]['step'] == step


# Settings.


def test_a_setting_that_a_run_lacks_counts_as_its_default(finished, tmp_path):
    directory = shutil.copytree(finished / 'checkpoint_3', tmp_path / 'checkpoint_3')
    settings = json.loads((directory / 'config.json').read_text())
    z_loss = settings['loss'].pop('z_loss')
    (directory / 'config.json').write_text(json.dumps(settings))
    settings['loss']['z_loss'] = z_loss
    checks.compare_settings(directory, settings, options={}, mixture=None)
    settings['loss']['z_loss'] = 2 * z_loss
    with pytest.raises(Refused, match='loss/z_loss'):
        checks.compare_settings(directory, settings, options={}, mixture=None)


def test_a_setting_that_no_longer_exists_is_a_change():
    changes = checks.changed_settings({'optimizer': {'momentum': 0.5}}, {}, may_change=())
    assert 'optimizer/momentum: 0.5 -> None' in changes
