"""The program as its user meets it: runs, stops, resumes, refuses, and what it leaves behind."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import checkpoint
import data
import infer
import sources
import train
import vocabulary as vocabularies
from configs import base, tiny

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """400 lines of made-up words, a few thousand tokens."""
    rng = np.random.default_rng(0)
    words = [''.join(rng.choice(list('aeioulnrst'), rng.integers(2, 8))) for _ in range(120)]
    lines = [' '.join(rng.choice(words, rng.integers(10, 30))) for _ in range(400)]
    path = tmp_path_factory.mktemp('corpus') / 'made_up.txt'
    path.write_text('\n'.join(lines) + '\n')
    return str(path)


RUNS = ('train', 'training_eval/span_corruption')


def small_config(corpus, steps=6, data_axis=1, model_axis=1):
    config = base.get_config()
    sizes = dict(vocab_size=384, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32)
    config.model.update(**sizes, num_encoder_layers=1, num_decoder_layers=1, dropout_rate=0.1)
    config.data.update(files=corpus, num_pieces=200, validation_fraction=0.1)
    config.data.lengths.update(inputs=32, targets=10)
    config.learning_rate.update(factors='constant', base_learning_rate=0.01)
    config.train.update(steps=steps, batch_size=4)
    for name, every_steps in (('log', 1), ('save', 3), ('eval', 3)):
        config[name].every_steps = every_steps
    config.mesh.update(data=data_axis, model=model_axis)
    return config


def run(config, workdir):
    train.train(train.prepare(config, workdir))
    return workdir


def metrics_of(workdir):
    """metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith('timing/')} for line in lines]


def state_of(workdir, step):
    return checkpoint.restore(workdir / f'checkpoint_{step}')


def assert_same_run(found, expected, steps):
    assert metrics_of(found) == metrics_of(expected)
    a, b = state_of(found, steps), state_of(expected, steps)
    assert sorted(a) == sorted(b)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    positions = [
        np.load(w / f'checkpoint_{steps}' / 'data_position.npy') for w in (found, expected)
    ]
    np.testing.assert_array_equal(*positions)


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """A run of 6 steps that nothing interrupts."""
    return run(small_config(corpus), tmp_path_factory.mktemp('whole'))


def test_the_same_seed_twice_gives_the_same_bits(corpus, whole, tmp_path):
    assert_same_run(run(small_config(corpus), tmp_path), whole, 6)
    config = small_config(corpus)
    config.seed = 1
    other = run(config, tmp_path / 'other')
    assert metrics_of(other)[0]['batch_crc32'] != metrics_of(whole)[0]['batch_crc32']


def test_a_continued_run_is_the_whole_run(corpus, whole, tmp_path):
    """Stopped right after it saved step 3, and continued to 6."""
    config = small_config(corpus)
    stopped = train.prepare(config, tmp_path)

    def stop(run, state, *rest):
        original(run, state, *rest)
        raise KeyboardInterrupt

    original, train.save = train.save, stop
    try:
        with pytest.raises(KeyboardInterrupt):
            train.train(stopped)
    finally:
        train.save = original
    assert checkpoint.steps(tmp_path) == [3]
    run(config, tmp_path)
    assert_same_run(tmp_path, whole, 6)


def test_another_mesh_goes_on_where_one_stopped(corpus, whole, tmp_path):
    run(small_config(corpus, steps=3, data_axis=4, model_axis=2), tmp_path)
    run(small_config(corpus, steps=6, data_axis=2, model_axis=1), tmp_path)
    for found, expected in zip(metrics_of(tmp_path)[-2:], metrics_of(whole)[-2:], strict=True):
        assert found.get('batch_crc32') == expected.get('batch_crc32')
        assert found['loss'] == pytest.approx(expected['loss'], rel=1e-5)


TWO_PROCESSES = """
import sys
import jax
sys.path[:0] = sys.argv[1:3]
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(sys.argv[3], 2, int(sys.argv[4]), initialization_timeout=120)
import end_to_end_test, pathlib, partition, numpy as np
large = 2**40 + int(sys.argv[4])  # as the units of gzipped shards are
assert partition.from_processes(np.array([[large]])).tolist() == [[[2**40]], [[2**40 + 1]]]
config = end_to_end_test.small_config(sys.argv[5], data_axis=2, model_axis=2)
first = end_to_end_test.run(config, pathlib.Path(sys.argv[6], 'first'))
end_to_end_test.run(end_to_end_test.second_config(config, first), first.parent / 'second')
"""


def second_config(config, first):
    """From the run `first`, all but some slots."""
    config.restore.update(path=str(first), only='(?!.*encoder_norm/scale/v).*')
    config.train.steps = 9
    return config


def test_two_processes_train_as_one_does(corpus, whole, tmp_path):
    """Two processes of two devices each, data split between them: losses, bar, checkpoint, position; and a
    second run that starts from the first."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{free.getsockname()[1]}'
    environment = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=2'}
    processes = [
        subprocess.Popen(
            [sys.executable, '-c', TWO_PROCESSES, ROOT, ROOT / 'tests', address, str(i), corpus, tmp_path],
            env=environment | {'JAX_PLATFORMS': 'cpu'}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    second = run(second_config(small_config(corpus), tmp_path / 'first'), tmp_path / 'alone')
    for two, one in [(tmp_path / 'first', whole), (tmp_path / 'second', second)]:
        for found, expected in zip(metrics_of(two), metrics_of(one), strict=True):
            assert (found['step'], found['run']) == (expected['step'], expected['run'])
            for name in ('loss', 'nats_per_text_token', 'unigram_nats_per_text_token'):
                if name in expected:
                    assert found[name] == pytest.approx(expected[name], rel=1e-5), name
        positions = [
            np.load(w / f'checkpoint_{max(checkpoint.steps(w))}/data_position.npy')
            for w in (two, one)
        ]
        np.testing.assert_array_equal(*positions)


def test_what_a_run_leaves(whole):
    names = {path.name for path in whole.iterdir()}
    assert names == {
        *('checkpoint_3', 'checkpoint_6', 'config.json', 'lock', 'metrics.jsonl'),
        *('model-info.txt', 'train', 'training_eval', 'vocabulary.model'),
    }
    settings = json.loads((whole / 'config.json').read_text())
    assert settings['model']['emb_dim'] == 16 and len(settings['data_fingerprint']) == 32
    steps = {name: [m['step'] for m in metrics_of(whole) if m['run'] == name] for name in RUNS}
    assert steps == {RUNS[0]: [1, 2, 3, 4, 5, 6], RUNS[1]: [3, 6]}
    [file] = (whole / 'train').iterdir()
    events = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    assert {event.step for event in events} == {1, 2, 3, 4, 5, 6}
    tags = {value.tag for event in events for value in event.summary.value if event.step == 1}
    assert tags >= {
        *('accuracy', 'loss', 'loss_per_nonpadding_target_token', 'loss_per_all_target_tokens'),
        *('z_loss', 'z_loss_per_all_target_tokens', 'cross_ent_loss', 'learning_rate'),
        *('cross_ent_loss_per_all_target_tokens', 'learning_rate/current'),
        *('non_padding_fraction/loss_weights', 'non_padding_fraction/overall'),
        *('timing/seqs_per_second', 'timing/steps_per_second'),
        'timing/target_tokens_per_second',
    }


def test_load_a_workdir_and_compute_its_validation_loss(corpus, whole):
    """infer.load's logits, summed up by numpy, give the loss that the run reported."""
    t5 = infer.load(whole)
    assert t5.config.dropout_rate == 0.1 and t5.config.emb_dim == 16
    query = t5.params['encoder']['layers_0']['attention']['query']['kernel']
    np.testing.assert_array_equal(
        query, state_of(whole, 6)['target/encoder/layers_0/attention/query/kernel']
    )
    config = small_config(corpus).data
    vocabulary = vocabularies.find_or_train_vocabulary(config, str(whole), None, 384)
    source = sources.open_source(config)
    stream = data.Stream(source, 'validation', vocabulary, config, 4, seed=0, num_epochs=1)
    nats, counts, text_nats, text_count = 0.0, 0, 0.0, 0
    for _, batch in zip(range(20), stream, strict=False):
        logits = np.asarray(t5.logits(batch), np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        targets = batch['decoder_target_tokens']
        token_nats = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        is_text = (targets > 1) & (targets < vocabulary.size - 2)  # a row has 2 sentinels
        assert (targets >= vocabulary.size - 2).sum(
            1
        ).max() == 2 and targets.max() < vocabulary.size
        nats, counts = nats + token_nats[targets > 0].sum(), counts + (targets > 0).sum()
        text_nats, text_count = text_nats + token_nats[is_text].sum(), text_count + is_text.sum()
    reported = metrics_of(whole)[-1]
    assert reported['nats_per_target_token'] == pytest.approx(nats / counts, rel=1e-5)
    assert reported['nats_per_text_token'] == pytest.approx(text_nats / text_count, rel=1e-5)
    assert reported['cross_ent_loss_per_all_target_tokens'] == pytest.approx(
        nats / (reported['non_padding_fraction/loss_weights'] ** -1 * counts), rel=1e-5
    )


def test_the_baseline_is_the_cross_entropy_of_the_unigram(corpus, whole):
    """Of the whole training split, though the run has seen six batches of it."""
    config = small_config(corpus).data
    vocabulary, source = (
        vocabularies.find_or_train_vocabulary(config, str(whole), None, 384),
        sources.open_source(config),
    )
    counts = {}
    for split, num in (('train', 10**6), ('validation', 20)):
        stream = data.Stream(source, split, vocabulary, config, 4, 0, num_epochs=1)
        tokens = [
            b['decoder_target_tokens'].ravel() for _, b in zip(range(num), stream, strict=False)
        ]
        counts[split] = np.bincount(np.concatenate(tokens), minlength=384)
    for name, low, high in (('text', 2, vocabulary.size - 2), ('target', 1, 384)):
        p, q = counts['validation'][low:high], counts['train'][low:high] + 1
        bar = -(p * np.log(q / q.sum())).sum() / p.sum()
        key = f'unigram_nats_per_{name}_token'
        assert metrics_of(whole)[-1][key] == pytest.approx(bar, rel=1e-12)


def test_a_loss_that_is_not_finite_stops_the_run(corpus, tmp_path):
    config = small_config(corpus, steps=40)
    config.learning_rate.base_learning_rate = 1e30
    config.log.every_steps = 5
    with pytest.raises(FloatingPointError) as stopped:
        run(config, tmp_path)
    words = str(stopped.value)
    step = int(re.match(r'step (\d+): ', words)[1])
    assert 'made_up.txt:' in words and 'not finite' in words
    saved = checkpoint.steps(tmp_path)
    kept = f'keeps checkpoint_{saved[-1]}' if saved else 'has no checkpoint yet'
    assert kept in words
    assert 'Try a smaller learning_rate.base_learning_rate' in words
    assert all(saved < step for saved in checkpoint.steps(tmp_path))
    for saved in checkpoint.steps(tmp_path):
        assert all(np.isfinite(x).all() for x in state_of(tmp_path, saved).values())


def test_parameters_that_are_not_finite_are_named_as_such(corpus, whole, tmp_path):
    """No learning rate mends a checkpoint that is restored."""
    tree = state_of(whole, 3)
    tree['target/encoder/encoder_norm/scale'] = np.full(16, np.nan, np.float32)
    checkpoint.save(tmp_path / 'broken', 3, tree)
    config = small_config(corpus)
    config.restore.path = str(tmp_path / 'broken')
    config.data.vocabulary = str(whole / 'vocabulary.model')
    with pytest.raises(
        FloatingPointError, match='has no checkpoint yet. No update was made yet'
    ) as stopped:
        run(config, tmp_path / 'run')
    assert 'learning_rate' not in str(stopped.value)


def snapshot(workdir):
    files = (path for path in workdir.rglob('*') if path.name != 'lock')
    return sorted((path, path.stat().st_mtime_ns) for path in files)


def test_other_settings_on_resume_are_refused(corpus, whole):
    before = snapshot(whole)
    config = small_config(corpus)
    config.seed, config.model.mlp_dim, config.log.every_steps = 5, 64, 3
    with pytest.raises(ValueError, match='model/mlp_dim: 32 -> 64; seed: 0 -> 5') as refused:
        train.prepare(config, whole)
    assert 'log' not in str(refused.value)
    assert before == snapshot(whole)


SHORT = [f'--config.{name}=8' for name in ('train.steps', 'eval.every_steps', 'save.every_steps')]


def main(*arguments, **environment):
    command = [sys.executable, 'main.py', *arguments]
    flags = {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'} | environment
    environment = os.environ | flags
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_command_of_the_readme(tmp_path):
    """configs/tiny.py, cut to a few steps: from the first line to the last, and again when finished."""
    command = [
        '--config=configs/tiny.py',
        f'--workdir={tmp_path}',
        *SHORT,
        '--config.log.every_steps=4',
    ]
    first = main(*command)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert re.match(r'T5 with 1,869,568 parameters in float32 on 1 cpu device', lines[0])
    line = r'step {}/8 loss \d+\.\d+ accuracy \d\.\d+ lr \S+ [\d,]+ tokens/s \d+:\d\d:\d\d left$'
    assert re.match(r'Compiled in \d+\.\d s\.$', lines[3])
    for i, step in enumerate((1, 4, 8)):  # the first one at once
        assert re.match(line.format(step), lines[4 + i])
    assert re.match(r'Step 8: validation loss \d+\.\d+ nats per text token', lines[-3])
    assert str(tmp_path) in lines[-2] and lines[-1].startswith('Next: ')
    assert checkpoint.steps(tmp_path) == [8]
    again = main(*command)
    assert again.returncode == 0 and 'this run is finished' in again.stdout
    assert checkpoint.steps(tmp_path) == [8]


def test_a_bad_line_that_training_comes_to_exits_1(corpus, tmp_path):
    """Found while training, not before, and skipped if that is asked for; named each time."""
    lines = [json.dumps({'text': line}) for line in open(corpus)]
    bad = tmp_path / 'bad.jsonl'
    bad.write_text('\n'.join([*lines[:200], '{"text": ', *lines[200:]]))
    command = ['--config=configs/tiny.py', f'--workdir={tmp_path}/run', *SHORT]
    command += ['--config.data.vocabulary=bytes', f'--config.data.files={bad}']
    command += [f'--config.data.validation_files={corpus}']
    result = main(*command)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert f'line 201 of {bad}: ' in result.stderr and 'skip leaves it out' in result.stderr
    result = main(*command, '--config.data.on_bad_line=skip')
    assert result.returncode == 0, result.stderr
    assert f'Left out, 1 so far: line 201 of {bad}: ' in result.stdout


@pytest.mark.parametrize(
    'file', sorted((ROOT / 'configs').glob('*.py')), ids=lambda file: file.stem
)
def test_every_config_builds(file):
    if file.stem != '__init__':
        module = __import__(f'configs.{file.stem}', fromlist=['get_config'])
        train.make_trainer(module.get_config())


@pytest.mark.slow
def test_tiny_learns(tmp_path):
    """The whole of configs/tiny.py, about two minutes: 0.4 nats below the bar on text."""
    result = main('--config=configs/tiny.py', f'--workdir={tmp_path}')
    assert result.returncode == 0, result.stderr
    last = metrics_of(tmp_path)[-1]
    assert last['step'] == tiny.get_config().train.steps
    assert last['unigram_nats_per_text_token'] - last['nats_per_text_token'] >= 0.4


def test_no_other_framework_is_loaded():
    modules = 'tensorflow torch flax gin seqio t5x clu orbax'.split()
    code = f'import sys, main, train; print([m for m in {modules} if m in sys.modules])'
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == '[]', result.stderr


def test_the_state_is_eight_devices_here():
    assert jax.device_count() == 8  # or the mesh tests prove nothing
