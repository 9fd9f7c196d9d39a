"""Small runs for tests: their text, their config, and what they leave behind."""

import json
import os
import pathlib
import socket
import subprocess
import sys
from concurrent import futures

import chex
import numpy as np
import pytest

import checkpoint
import loop
from configs import base
from prepare import prepare

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The environment of a process that is a user's, with one device.
FLAGS = [flag for flag in os.environ['XLA_FLAGS'].split() if 'device_count' not in flag]
ENVIRONMENT = os.environ | {
    'XLA_FLAGS': ' '.join(FLAGS),
    'JAX_PLATFORMS': 'cpu',
    'PYTHONUNBUFFERED': '1',
}
ENVIRONMENT.pop('TF_CPP_MIN_LOG_LEVEL', None)  # set by JAX
# The same with programs that XLA optimizes: they run faster and take longer to compile.
OPTIMIZED = ENVIRONMENT | {'XLA_FLAGS': ''}


def write_corpus(folder):
    """Write 400 lines of invented words, a few thousand tokens. Return the file's path."""
    rng = np.random.default_rng(0)
    words = [''.join(rng.choice(list('aeioulnrst'), rng.integers(2, 8))) for _ in range(120)]
    lines = [' '.join(rng.choice(words, rng.integers(10, 30))) for _ in range(400)]
    path = folder / 'made_up.txt'
    path.write_text('\n'.join(lines) + '\n')
    return str(path)


def small_config(corpus, steps=6, data_axis=1, model_axis=1):
    config = base.get_config()
    config.model.vocab_size = 384
    config.model.emb_dim = 16
    config.model.num_heads = 2
    config.model.head_dim = 8
    config.model.mlp_dim = 32
    config.model.num_encoder_layers = 1
    config.model.num_decoder_layers = 1
    config.model.dropout_rate = 0.1
    config.data.files = corpus
    config.data.num_pieces = 200
    config.data.validation_fraction = 0.1
    config.data.lengths.inputs = 32
    config.data.lengths.targets = 10
    config.learning_rate.factors = 'constant'
    config.learning_rate.base_learning_rate = 0.01
    config.train.steps = steps
    config.train.batch_size = 4
    config.log.every_steps = 1
    config.save.every_steps = 3
    config.eval.every_steps = 3
    config.mesh.data = data_axis
    config.mesh.model = model_axis
    return config


def run(config, workdir):
    """Train in `workdir`. Return it."""
    loop.train(prepare(config, workdir))
    return workdir


def stop_after(num_steps, config, workdir):
    """Take some steps, and be stopped by a signal."""
    counts = iter(range(1, num_steps + 1))
    loop.train(prepare(config, workdir), lambda: 2 * (next(counts) == num_steps))


def metrics_of(workdir):
    """Return the lines of metrics.jsonl without what depends on the clock."""
    lines = []
    for text in (workdir / 'metrics.jsonl').read_text().splitlines():
        line = json.loads(text)
        lines.append({k: v for k, v in line.items() if not k.startswith('timing/')})
    return lines


def damage_line(file, number, text):
    """Replace a line of a file, the first one being 1, by `text`."""
    lines = file.read_bytes().splitlines(keepends=True)
    lines[number - 1] = text.encode(errors='surrogateescape') + b'\n'
    file.write_bytes(b''.join(lines))


def state_of(workdir, step):
    return checkpoint.restore(workdir / f'checkpoint_{step}')


def position_of(workdir, step):
    return np.load(workdir / f'checkpoint_{step}' / 'data_position.npy')


def assert_same_run(found, expected, step):
    """Assert that two workdirs have the same metrics, state and position, bit for bit."""
    assert metrics_of(found) == metrics_of(expected)
    chex.assert_trees_all_equal(state_of(found, step), state_of(expected, step))
    np.testing.assert_array_equal(position_of(found, step), position_of(expected, step))


def assert_close_runs(found, expected, step):
    """Assert that two workdirs have the same steps, losses and position in the data.

    Losses are equal to float tolerance.
    """
    for line, expected_line in zip(metrics_of(found), metrics_of(expected), strict=True):
        assert (line['step'], line['run']) == (expected_line['step'], expected_line['run'])
        for name in ('loss', 'nats_per_text_token', 'unigram_nats_per_text_token'):
            if name in expected_line:
                assert line[name] == pytest.approx(expected_line[name], rel=1e-5), name
    np.testing.assert_array_equal(position_of(found, step), position_of(expected, step))


def free_address():
    """Return an address on loopback with a free port."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return f'127.0.0.1:{free.getsockname()[1]}'


def in_two_processes(
    program, *arguments, num_processes=2, num_devices=1, statuses=(0, 0), **environment
):
    """Run a program in several processes on loopback. Return the output and the errors of each.

    Its arguments are two folders of ours, the address of process 0, the number of the process, and
    `arguments`. `statuses=None`: all fail.
    """
    address = free_address()
    flags = f'{ENVIRONMENT["XLA_FLAGS"]} --xla_force_host_platform_device_count={num_devices}'
    processes = []
    for i in range(num_processes):
        process = subprocess.Popen(
            [sys.executable, '-c', program, ROOT, ROOT / 'tests', address, str(i), *arguments],
            env=ENVIRONMENT | {'XLA_FLAGS': flags} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
    # All are read at once: a process whose pipe is full waits, and the others wait for it.
    try:
        with futures.ThreadPoolExecutor(num_processes) as pool:
            printed = list(pool.map(lambda process: process.communicate(timeout=300), processes))
    finally:
        for process in processes:
            process.kill()
    outputs = []
    for output, errors in printed:
        lines = output.splitlines(keepends=True)
        output = ''.join(line for line in lines if not line.startswith('[Gloo]'))
        outputs.append((output, errors))
    found = tuple(process.returncode for process in processes)
    if statuses is None:
        assert 0 not in found, outputs
    else:
        assert found == statuses, outputs
    return outputs


CONFIG = """
import sys
sys.path.insert(0, {tests!r})
from runs import small_config

def get_config():
    config = small_config({corpus!r})
    config.model.dropout_rate = {dropout_rate}
    config.train.steps = {steps}
    config.log.every_steps = {log}
    config.save.every_steps = {save}
    config.eval.every_steps = {evaluate}
    return config
"""


class Program:
    """Arguments of main.py for the config of `small_config`.

    Without dropout a step compiles twice as fast.
    """

    def __init__(self, folder, corpus, steps, log, save, evaluate, dropout_rate=0.0):
        self.config = folder / 'small.py'
        text = CONFIG.format(
            tests=str(ROOT / 'tests'),
            corpus=corpus,
            steps=steps,
            log=log,
            save=save,
            evaluate=evaluate,
            dropout_rate=dropout_rate,
        )
        self.config.write_text(text)

    def arguments(self, workdir):
        return [f'--config={self.config}', f'--workdir={workdir}']
