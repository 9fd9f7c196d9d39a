"""A run never loses its place: killed, stopped, damaged, moved, started twice."""

import gzip
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from end_to_end_test import ROOT, assert_same_run, corpus, metrics_of, run, small_config, state_of

import checkpoint
import sources
import train
import workdir

assert corpus  # a fixture


CONFIG = """
import sys
sys.path.append({tests!r})
from end_to_end_test import small_config

def get_config():
    config = small_config({corpus!r}, steps={steps})
    config.log.every_steps, config.save.every_steps, config.eval.every_steps = {periods}
    return config
"""


class Program:
    """main.py in a process of its own."""

    def __init__(self, folder, corpus, steps=600, periods=(4, 6, 150)):
        self.config = folder / 'small.py'
        tests = str(pathlib.Path(__file__).parent)
        text = CONFIG.format(tests=tests, corpus=corpus, steps=steps, periods=periods)
        self.config.write_text(text)

    def start(self, workdir, *flags):
        environment = os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'}
        command = [sys.executable, 'main.py', f'--config={self.config}', f'--workdir={workdir}']
        return subprocess.Popen(
            [*command, *flags], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def finish(self, workdir, *flags):
        process = self.start(workdir, *flags)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out


def wait_for(process, pattern):
    """Reads lines until one matches."""
    for line in process.stdout:
        if re.match(pattern, line):
            return line
    raise AssertionError(process.stderr.read())


def kill_at_random(program, workdir, inside_saving, rng):
    """Starts or continues the run and kills it some moments after its first step, if asked while it is
    saving. Returns whether it was."""
    process = program.start(workdir)
    wait_for(process, 'step ')
    time.sleep(rng.uniform(0, 0.3))
    while inside_saving and not list(workdir.glob('checkpoint_*.tmp-*')):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL  # it did not end by itself
    return bool(list(workdir.glob('checkpoint_*.tmp-*')))


def kill_often(corpus, folder, num_kills, num_inside, steps):
    program, rng, inside, lives = Program(folder, corpus, steps), random.Random(0), 0, 0
    while lives < num_kills or inside < num_inside:
        inside += kill_at_random(program, folder / 'killed', inside < num_inside, rng)
        lives += 1
    program.finish(folder / 'killed')
    program.finish(folder / 'whole')
    assert_same_run(folder / 'killed', folder / 'whole', steps)
    assert not list((folder / 'killed').glob('*tmp*'))


def test_killed_and_continued_is_the_run_never_killed(corpus, tmp_path):
    """Parameters, slots, places in the data, batch hashes and metrics, to the bit."""
    kill_often(corpus, tmp_path, num_kills=2, num_inside=1, steps=400)


@pytest.mark.slow
def test_killed_twenty_times(corpus, tmp_path):
    """About two minutes; ten times while it saves."""
    kill_often(corpus, tmp_path, num_kills=20, num_inside=10, steps=2000)


@pytest.fixture(scope='module')
def never_stopped(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp('never_stopped')
    Program(folder, corpus, periods=(100, 600, 300)).finish(folder / 'whole')
    return folder / 'whole'


@pytest.mark.parametrize('number, status', [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_step_and_the_run_goes_on(
    corpus, never_stopped, tmp_path, number, status
):
    """Stopped in the middle of what is logged together: not even a metric is lost."""
    program = Program(tmp_path, corpus, periods=(100, 600, 300))
    process = program.start(tmp_path / 'run')
    wait_for(process, 'step 1/')
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == status and 'stopping, this step is finished and saved' in err
    [step] = checkpoint.steps(tmp_path / 'run')
    assert f'Stopped after step {step:,}, which is saved' in out and step < 600 and step % 100
    assert f'Going on after step {step:,}' in program.finish(tmp_path / 'run')
    assert_same_run(tmp_path / 'run', never_stopped, 600)


def test_a_second_signal_ends_at_once(corpus, tmp_path):
    program = Program(tmp_path, corpus)
    slow = ['--config.model.emb_dim=512', '--config.model.mlp_dim=16384']
    process = program.start(tmp_path / 'run', *slow, '--config.train.batch_size=64')
    wait_for(process, 'step 1/')
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 143 and 'stopped at once, the last checkpoint stands' in err


def test_a_signal_before_the_first_step_ends_at_once(corpus, tmp_path):
    process = Program(tmp_path, corpus).start(tmp_path / 'run')
    wait_for(process, 'From scratch')
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and 'stopped at once, no step was taken' in err
    assert not checkpoint.steps(tmp_path / 'run')


def test_a_workdir_belongs_to_one_run(corpus, tmp_path):
    config = small_config(corpus, steps=1)
    first = train.prepare(config, tmp_path)
    with pytest.raises(
        ValueError, match=f'in use by process {os.getpid()} on .*, since .*--workdir'
    ):
        train.prepare(config, tmp_path)
    train.train(first)
    assert train.train(train.prepare(config, tmp_path)) == 0  # and when that has ended to the next


def test_another_mesh_goes_on_with_the_same_batches(corpus, tmp_path):
    run(small_config(corpus, steps=9), tmp_path / 'whole')
    run(small_config(corpus, steps=3), tmp_path / 'moved')
    run(small_config(corpus, steps=9, data_axis=2, model_axis=2), tmp_path / 'moved')
    pairs = zip(metrics_of(tmp_path / 'moved'), metrics_of(tmp_path / 'whole'), strict=True)
    pairs = [pair for pair in pairs if pair[0]['run'] == 'train']
    assert all(found['batch_crc32'] == expected['batch_crc32'] for found, expected in pairs)
    for found, expected in pairs[3:6]:
        assert found['loss'] == pytest.approx(expected['loss'], rel=1e-5)


def test_a_damaged_newest_checkpoint_is_set_aside(corpus, tmp_path, capsys):
    config = small_config(corpus)
    run(config, tmp_path / 'whole')
    shutil.copytree(tmp_path / 'whole', tmp_path / 'run')
    [chunk] = (tmp_path / 'run/checkpoint_6').glob('target.token_embedder.embedding/0.0')
    chunk.write_bytes(chunk.read_bytes()[:-1] + b'?')
    run(config, tmp_path / 'run')
    out = capsys.readouterr().out
    assert 'target.token_embedder.embedding/0.0' in out and 'Going on after step 3' in out
    assert_same_run(tmp_path / 'run', tmp_path / 'whole', 6)
    assert list((tmp_path / 'run').glob('checkpoint_6.damaged*'))
    for step in (3, 6):
        (tmp_path / f'run/checkpoint_{step}/manifest.json').unlink()
    with pytest.raises(ValueError, match='has only damaged checkpoints'):
        train.prepare(config, tmp_path / 'run')
    assert 'checkpoint_3 is damaged: manifest.json is missing' in capsys.readouterr().out


def test_a_checkpoint_of_another_program_in_the_workdir(corpus, tmp_path):
    shutil.copytree(ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6', tmp_path / 'checkpoint_6')
    with pytest.raises(
        ValueError,
        match='is not a run of this program; name another --workdir .checkpoint_6 is in it',
    ):
        train.prepare(small_config(corpus), tmp_path)


def test_metrics_that_a_crash_has_cut_are_written_again(corpus, tmp_path):
    run(small_config(corpus), tmp_path / 'whole')
    shutil.copytree(tmp_path / 'whole', tmp_path / 'cut')
    shutil.rmtree(tmp_path / 'cut/checkpoint_6')
    with (tmp_path / 'cut/metrics.jsonl').open('ab') as file:
        file.write(b'{"step": 4, "run": "train", "loss": 5.\0\0\n[1]\n{"step": 5')
    run(small_config(corpus), tmp_path / 'cut')
    assert_same_run(tmp_path / 'cut', tmp_path / 'whole', 6)


def test_an_error_in_the_background_surfaces_within_a_step(corpus, tmp_path, monkeypatch):
    config = small_config(corpus, steps=500)
    config.eval.every_steps = 500
    prepared, taken = train.prepare(config, tmp_path), []

    def full(*_, **__):
        raise OSError(28, 'No space left on device')

    def step(*arguments):
        taken.append(time.perf_counter())
        return prepared.train_step(*arguments)

    monkeypatch.setattr(checkpoint, '_write_array', full)
    with pytest.raises(OSError, match='No space left'):
        train.train(prepared._replace(train_step=step))
    assert len(taken) < 50 and not checkpoint.steps(tmp_path)


def test_a_corpus_may_move_and_a_vocabulary_may_not_change(corpus, tmp_path):
    run(small_config(corpus, steps=3), tmp_path / 'run')
    moved = shutil.copy(corpus, tmp_path)
    run(small_config(str(moved), steps=6), tmp_path / 'run')
    assert checkpoint.steps(tmp_path / 'run') == [3, 6]
    kept = tmp_path / 'run/vocabulary.model'
    config = small_config(corpus, steps=9)
    config.data.vocabulary = str(shutil.copy(kept, tmp_path / 'other.model'))
    run(config, tmp_path / 'run')  # the same one under another name
    kept.unlink()
    config.data.vocabulary = 'bytes'
    with pytest.raises(ValueError, match='vocabulary_hash: '):
        train.prepare(config, tmp_path / 'run')
    with open(moved, 'a') as file:
        file.write('one line more\n')
    with pytest.raises(
        ValueError, match=r'other text: .*made_up.txt \(new\).*: restore those files'
    ):
        train.prepare(small_config(str(moved)), tmp_path / 'run')


def test_microbatches_to_fit_the_memory(corpus, tmp_path, monkeypatch, capsys):
    """What is asked for is refused with the smallest count that fits; auto takes that."""
    config, needs = small_config(corpus), {}
    for n in (2, 4):
        config.train.num_microbatches = str(n)
        trainer, step, taken = train.compile_step(
            config, MESH, train.microbatch_counts(config, MESH), workdir.Console()
        )
        needs[taken] = train.memory_need(step, trainer)
    assert needs[2] > needs[4]
    monkeypatch.setattr(train, 'memory_limit', lambda mesh: (needs[2] + needs[4]) / 2)
    config.train.num_microbatches = '2'
    with pytest.raises(ValueError, match='num_microbatches=2: a step .* GiB .*; use 4, or auto'):
        train.prepare(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['lock']
    config.train.num_microbatches = 'auto'
    run(config, tmp_path)
    assert 'takes 4' in capsys.readouterr().out
    assert json.loads((tmp_path / 'config.json').read_text())['train']['num_microbatches'] == '4'
    state = train.state_bytes(train.make_trainer(config))
    monkeypatch.setattr(train, 'memory_limit', lambda mesh: state - 1)
    with pytest.raises(
        ValueError, match='optimizer state take .*: use more devices or a smaller model'
    ):
        train.prepare(config, tmp_path / 'other')
    monkeypatch.setattr(train, 'memory_limit', lambda mesh: state + 1)
    with pytest.raises(ValueError, match='use more devices or a smaller train.batch_size'):
        train.prepare(config, tmp_path / 'other')
    for asked in ('3', '0', 'many'):
        config.train.num_microbatches = asked
        with pytest.raises(ValueError, match="use 'auto' or one of 1, 2, 4"):
            train.prepare(config, tmp_path / 'other')


MESH = train.make_trainer(small_config('')).mesh


def test_c4_without_c4_says_so_everywhere(tmp_path):
    command = [sys.executable, 'main.py', '--config=configs/small_c4.py:test']
    flags = [f'--workdir={tmp_path}', '--config.train.steps=2', '--config.log.every_steps=1']
    environment = os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'}
    result = subprocess.run(
        [*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert 'THIS IS NOT C4' in result.stdout and result.stdout.startswith('!' * 80)
    settings = json.loads((tmp_path / 'config.json').read_text())
    assert settings['corpus'] == 'pydoc instead of C4'
    assert {line['corpus'] for line in metrics_of(tmp_path)} == {'pydoc instead of C4'}


PEAK = """
import json, pathlib, resource, sys
sys.path[:0] = sys.argv[1:3]
import end_to_end_test, train
config = end_to_end_test.small_config(sys.argv[3], steps=3)
config.data.validation_fraction, config.train.batch_size = 0.02, 128
config.data.lengths.update(inputs=512, targets=114)
end_to_end_test.run(config, pathlib.Path(sys.argv[4]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_gib(*arguments):
    command = [sys.executable, '-c', PEAK, ROOT, ROOT / 'tests', *arguments]
    environment = os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return int(result.stdout.splitlines()[-1]) / 2**20


def write_shards(folder, num_lines):
    """JSON lines of about 1 KB of words each, in 8 gzipped shards."""
    rng, words = (
        np.random.default_rng(0),
        'the of and to in is it that was for on with as at'.split(),
    )
    folder.mkdir()
    for shard in range(8):
        with gzip.open(folder / f'{shard}.json.gz', 'wt', compresslevel=1) as file:
            for i in range(shard, num_lines, 8):
                text = f'document {i} ' + ' '.join(rng.choice(words, rng.integers(10, 500)))
                file.write(json.dumps({'url': f'http://{i}', 'text': text}) + '\n')
    return f'{folder}/*.json.gz'


@pytest.fixture(scope='module')
def large_corpus(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp('large') / 'shards', 200_000)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(large_corpus, tmp_path):
    """200,000 lines of JSON in 8 gzipped shards against 2,000: at most 1 GB more."""
    small = peak_gib(write_shards(tmp_path / 'small', 2_000), tmp_path / 'run2k')
    large = peak_gib(large_corpus, tmp_path / 'run200k')
    print(f'peak memory: {large:.2f} GiB, of the small corpus {small:.2f}')
    assert large - small < 1


@pytest.mark.slow
def test_every_document_of_a_large_corpus_comes_once_wherever_it_was_stopped(large_corpus):
    """128 lanes, all killed in the middle of a shard and continued from their places."""
    config = small_config(large_corpus).data
    config.validation_fraction = 0.0
    rng = random.Random(0)
    names = []
    starts = {lane: (0, 0) for lane in range(128)}
    for stop in (True, False):
        source = sources.open_source(config)
        lanes = {}
        for lane, (pool, offset) in starts.items():
            share = sources.Share(seed=0, epoch=0, lane=lane, num_lanes=128)
            lanes[lane] = source.documents('train', share, pool, offset)
        left = {lane: rng.randrange(1, 1500) if stop else 10**9 for lane in lanes}
        while lanes:
            for lane in list(lanes):
                document = next(lanes[lane], None) if left[lane] else None
                if document is None:
                    del lanes[lane]
                    continue
                assert document.record.fields['text'].startswith('document ')
                names.append(document.record.name)
                starts[lane] = (document.pool, document.offset + 1)
                left[lane] -= 1
        assert not stop or 50_000 < len(names) < 150_000
    assert len(names) == len(set(names)) == 200_000


def test_config_json_has_what_resuming_compares(corpus, tmp_path):
    run(small_config(corpus, steps=1), tmp_path)
    settings = json.loads((tmp_path / 'config.json').read_text())
    assert settings['corpus'] == 'files' and len(settings['vocabulary_hash']) == 32
    text = (tmp_path / 'model-info.txt').read_text()
    total = sum(x.size for name, x in state_of(tmp_path, 1).items() if name.startswith('target/'))
    assert f'\nTotal number of parameters: {total}\n\n' in text
    embedding = r'Variable token_embedder/embedding +size 6144 +shape \(384, 16\) +partition spec '
    assert re.search(embedding + r"\('model', None\)\n", text)
    assert re.search(r'Variable param_states/.*/v_row ', text)
