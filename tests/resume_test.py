"""A run never loses its place: killed, stopped, damaged, moved, started twice."""

import dataclasses
import gzip
import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import own_task
import pytest
from runs import ENVIRONMENT, ROOT, Program, assert_same_run, run, small_config

import checkpoint
import data
import loop
from formats.best import read_metrics
from messages import Refused
from prepare import prepare
from run import results
from run.train_vocabulary import train_vocabulary


@pytest.mark.slow
def test_a_signal_saves_the_step_and_the_run_goes_on(command_line, corpus, tmp_path):
    """Stopped twice in the middle of what is logged together: not even a metric is lost."""
    program = Program(
        tmp_path, corpus, steps=600, log=100, save=600, evaluate=300, dropout_rate=0.1
    )
    arguments = program.arguments(tmp_path / 'run')
    step = 0
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR2, 140)):
        process = command_line.start(*arguments)
        process.wait_for(f'step {step + 1}/')
        process.send_signal(number)
        result = process.wait()
        assert result.status == status
        assert 'stopping after this step is saved' in result.stderr
        if step:
            assert f'Continuing after step {step:,}' in result.stdout
        step = checkpoint.steps(tmp_path / 'run')[-1]
        assert f'Stopped after step {step:,}, which is saved' in result.stdout
        assert step < 600
        assert step % 100
    result = command_line(*arguments)
    assert f'Continuing after step {step:,}' in result.stdout
    assert command_line(*program.arguments(tmp_path / 'expected')).status == 0
    assert_same_run(tmp_path / 'run', tmp_path / 'expected', 600)


@pytest.mark.slow
def test_the_signals_of_queues(command_line, corpus, tmp_path):
    """SGE, SLURM and LSF announce the end of a job with them; the kernel repeats SIGXCPU each second."""
    program = Program(tmp_path, corpus, steps=10**6, log=10, save=10**6, evaluate=10**6)
    arguments = program.arguments(tmp_path / 'run')
    for number, times in ((signal.SIGUSR1, 1), (signal.SIGXCPU, 5)):
        process = command_line.start(*arguments, '--config.data.num_workers=2')
        process.wait_for('step .*0/')
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.001)
        result = process.wait()
        assert result.status == 128 + number, result.stderr
        assert 'which is saved' in result.stdout


@pytest.mark.slow
def test_a_second_signal_ends_at_once(command_line, corpus, tmp_path):
    """Both arrive during one step, because the process is paused when they are sent."""
    program = Program(tmp_path, corpus, steps=100_000, log=4, save=100_000, evaluate=100_000)
    process = command_line.start(*program.arguments(tmp_path / 'run'))
    process.wait_for('step 1/')
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        process.send_signal(number)
    result = process.wait()
    assert result.status in (130, 143)
    assert 'stopped at once, the last checkpoint stands' in result.stderr


def test_a_signal_before_the_first_step_ends_at_once(command_line, corpus, tmp_path):
    program = Program(tmp_path, corpus, steps=600, log=4, save=6, evaluate=150)
    process = command_line.start(*program.arguments(tmp_path / 'run'))
    process.wait_for('From scratch')
    process.send_signal(signal.SIGINT)
    result = process.wait()
    assert result.status == 130
    assert 'stopped at once, no step was taken' in result.stderr
    assert not checkpoint.steps(tmp_path / 'run')


def test_a_damaged_newest_checkpoint_is_set_aside(corpus, uninterrupted, tmp_path, capsys):
    config = small_config(corpus)
    shutil.copytree(uninterrupted, tmp_path / 'run')
    [chunk] = (tmp_path / 'run/checkpoint_6').glob('target.token_embedder.embedding/0.0')
    chunk.write_bytes(chunk.read_bytes()[:-1] + b'?')
    run(config, tmp_path / 'run')
    out = capsys.readouterr().out
    assert 'target.token_embedder.embedding/0.0' in out and 'Continuing after step 3' in out
    assert_same_run(tmp_path / 'run', uninterrupted, 6)
    assert list((tmp_path / 'run').glob('checkpoint_6.damaged*'))
    for step in (3, 6):
        (tmp_path / f'run/checkpoint_{step}/manifest.json').unlink()
    with pytest.raises(Refused, match='checkpoint_6.damaged-2'):
        prepare(config, tmp_path / 'run')


@pytest.mark.slow
def test_metrics_that_a_crash_has_cut_are_written_again(corpus, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / 'cut')
    shutil.rmtree(tmp_path / 'cut/checkpoint_6')
    with (tmp_path / 'cut/metrics.jsonl').open('ab') as file:
        file.write(b'{"step": 4, "run": "train", "loss": 5.\0\0')
    run(small_config(corpus), tmp_path / 'cut')
    assert_same_run(tmp_path / 'cut', uninterrupted, 6)
    lost = sum(x.get('timing/seconds', 0) for x in read_metrics(uninterrupted) if x['step'] > 3)
    seconds = json.loads((tmp_path / 'cut/checkpoint_6/seconds.json').read_text())
    before = json.loads((uninterrupted / 'checkpoint_3/seconds.json').read_text())
    assert seconds['lost after stops'] == pytest.approx(lost)
    assert seconds['compiling'] > before['compiling']


def test_an_error_in_the_background_surfaces_within_a_step(corpus, tmp_path, monkeypatch):
    config = small_config(corpus, steps=500)
    config.eval.every_steps = 500
    prepared = prepare(config, tmp_path)
    taken = []

    def step(*arguments):
        taken.append(time.perf_counter())
        return prepared.train_step(*arguments)

    monkeypatch.setattr(checkpoint, '_write_array', full)
    with pytest.raises(OSError):
        loop.train(dataclasses.replace(prepared, train_step=step))
    assert len(taken) < 50 and not checkpoint.steps(tmp_path)


@pytest.mark.slow
def test_a_corpus_may_move_and_a_vocabulary_may_not_change(corpus, tmp_path):
    run(small_config(corpus, steps=3), tmp_path / 'run')
    moved = shutil.copy(corpus, tmp_path)
    run(small_config(str(moved), steps=6), tmp_path / 'run')
    assert checkpoint.steps(tmp_path / 'run') == [3, 6]
    kept = tmp_path / 'run/vocabulary.model'
    config = small_config(corpus, steps=9)
    config.data.vocabulary = str(shutil.copy(kept, tmp_path / 'other.model'))
    run(config, tmp_path / 'run')  # the same one under another name
    model = kept.read_bytes()
    kept.write_bytes(train_vocabulary(['other words', 'of others'], 20))
    with pytest.raises(Refused, match=str(kept)):
        prepare(small_config(str(moved)), tmp_path / 'run')
    kept.unlink()
    prepare(small_config(str(moved), steps=9), tmp_path / 'run').workdir.lock.close()
    assert kept.read_bytes() == model
    kept.unlink()
    config.data.vocabulary = 'bytes'
    with pytest.raises(Refused, match='vocabulary_hash: '):
        prepare(config, tmp_path / 'run')
    config = small_config(str(moved))
    config.update(seed=5)
    config.optimizer.decay_rate = 0.9
    remedy = f'--workdir, with --config.restore.path={tmp_path}/run'
    with pytest.raises(Refused, match=f'optimizer/decay_rate: .* seed: 0 -> 5.*{remedy}'):
        prepare(config, tmp_path / 'run')
    with open(moved, 'a') as file:
        file.write('one line more\n')
    with pytest.raises(Refused, match=f'made_up.txt.*{remedy}'):
        prepare(small_config(str(moved)), tmp_path / 'run')


PEAK = """
import json, pathlib, resource, sys
sys.path[:0] = sys.argv[1:3]
import runs
config = runs.small_config(sys.argv[3], steps=3)
config.data.validation_fraction = 0.02
config.train.batch_size = 128
config.data.lengths.inputs = 512
config.data.lengths.targets = 114
runs.run(config, pathlib.Path(sys.argv[4]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_gib(*arguments):
    command = [sys.executable, '-c', PEAK, ROOT, ROOT / 'tests', *arguments]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.splitlines()[-1]) / 2**20


def write_shards(folder, num_lines):
    """Write JSON lines of about 1 KB of words each, in 8 gzipped shards. Return their glob."""
    rng = np.random.default_rng(0)
    words = 'the of and to in is it that was for on with as at'.split()
    folder.mkdir()
    for shard in range(8):
        with gzip.open(folder / f'{shard}.json.gz', 'wt', compresslevel=1) as file:
            for i in range(shard, num_lines, 8):
                text = f'document {i} ' + ' '.join(rng.choice(words, rng.integers(10, 500)))
                file.write(json.dumps({'url': f'http://{i}', 'text': text}) + '\n')
    return f'{folder}/*.json.gz'


@pytest.mark.long
@pytest.mark.slow(takes_minutes=True)
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """200,000 lines of JSON in 8 gzipped shards against 2,000: at most 1 GB more."""
    small = peak_gib(write_shards(tmp_path / 'small', 2_000), tmp_path / 'run2k')
    large = peak_gib(write_shards(tmp_path / 'large', 200_000), tmp_path / 'run200k')
    print(f'peak memory: {large:.2f} GiB, of the small corpus {small:.2f}')
    assert large - small < 1


# An error after unsaved steps.


@pytest.mark.slow
@pytest.mark.parametrize('place', ['disk of results', 'metric'])
def test_an_error_in_an_evaluation_loses_no_step(place, tmp_path, monkeypatch, capsys):
    own_task.write(tmp_path)
    config = own_task.config(tmp_path)
    with monkeypatch.context() as patch:
        prepared = prepare(config, tmp_path / 'run')
        if place == 'disk of results':
            patch.setattr(results.Results, 'write', own_task.fail)
        patch.setenv('FAIL', place)
        with pytest.raises((ZeroDivisionError, KeyError)):
            loop.train(prepared)
    assert checkpoint.steps(tmp_path / 'run') == [4]
    assert 'Step 4 is saved before the error' in capsys.readouterr().out
    run(config, tmp_path / 'run')
    run(config, tmp_path / 'expected')
    assert_same_run(tmp_path / 'run', tmp_path / 'expected', 20)
    for name in ('results.csv', 'inference_eval/own-000004.jsonl'):
        found = (tmp_path / 'run' / name).read_bytes()
        assert found == (tmp_path / 'expected' / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    'place',
    [
        'line',
        'own preprocessor',
        pytest.param('last line', marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_bad_record_loses_no_step(place, tmp_path, monkeypatch):
    """Those after it are the steps of a run that leaves it out from the beginning."""
    own_task.write(tmp_path)
    config = own_task.config(tmp_path)
    config.infer_eval.every_steps = 0
    monkeypatch.setattr(data.TextToText, 'records_per_group', 4)
    if place == 'own preprocessor':
        monkeypatch.setenv('FAIL', 'preprocessor')
    else:
        own_task.insert_bad_line(tmp_path / 'qa.jsonl', 50 if place == 'line' else 60)
    with pytest.raises(RuntimeError if place == 'own preprocessor' else Refused):
        run(config, tmp_path / 'run')
    [step] = checkpoint.steps(tmp_path / 'run')
    assert 0 < step < 20
    config.data.on_bad_line = 'skip'
    config.data.max_bad_fraction = 0.1
    run(config, tmp_path / 'run')
    run(config, tmp_path / 'expected')
    assert_same_run(tmp_path / 'run', tmp_path / 'expected', 20)


def test_both_errors_are_told_where_the_disk_is_full_too(tmp_path, monkeypatch):
    own_task.write(tmp_path)
    config = own_task.config(tmp_path)
    prepared = prepare(config, tmp_path / 'run')
    monkeypatch.setenv('FAIL', 'metric')
    monkeypatch.setattr(checkpoint, '_write_array', full)
    with pytest.raises(ZeroDivisionError) as failed:
        loop.train(prepared)
    assert 'Step 4 ' in failed.value.__notes__[-1]
    assert not checkpoint.steps(tmp_path / 'run')


def full(*_, **__):
    raise OSError(28, 'No space left on device')


@pytest.mark.parametrize('place', ['step', 'not finite'])
def test_a_state_that_is_not_whole_is_not_saved(place, tmp_path, monkeypatch):
    """A step has consumed it, or a step before the error was not finite and not looked at."""
    own_task.write(tmp_path)
    config = own_task.config(tmp_path)
    config.log.every_steps = config.eval.every_steps = config.infer_eval.every_steps = 100
    prepared = prepare(config, tmp_path / 'run')
    steps = iter(range(1, 9))
    waits = iter(range(1, 9))

    def step(state, batch):
        number = next(steps)
        state, metrics = prepared.train_step(state, batch)
        if number == 3 and place == 'step':
            raise RuntimeError('out of memory')
        return state, metrics | {'finite': np.bool_(number != 3)}

    def wait(*_, **options):
        if next(waits) == 4:
            raise RuntimeError('a fault of the host')

    monkeypatch.setattr(loop.Interval, 'wait', wait)
    with pytest.raises(RuntimeError):
        loop.train(dataclasses.replace(prepared, train_step=step))
    assert not checkpoint.steps(tmp_path / 'run')
