"""What a run prints: on a terminal, in a pipe that is closed, and its line of progress."""

import os
import pty
import re
import time

import pytest
from ml_collections import ConfigDict
from runs import Program

import checkpoint
from run.console import progress_line


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
    limits = ConfigDict({'steps': 100_000, 'epochs': 0})
    values = {
        'nats_per_token': 10.8951,
        'accuracy': 0.12345,
        'learning_rate/current': 1.23456e-5,
        'timing/tokens_per_second': 1_234_567.8,
        'timing/data_wait_fraction': 0.0,
        'timing/steps_per_second': 50_000 / max(seconds_left, 1e-9),
    }
    line = progress_line(50_000, limits, values)
    assert len(line) < 80 and line.startswith('step 50000/100000 loss 10.895')
    assert line.endswith(f'{words} left') and '1,234,568 tokens/s' in line
    values['timing/data_wait_fraction'] = 0.123
    line = progress_line(50_000, limits, values)
    assert len(line) < 80 and line.endswith(f'{words} left, data wait 12%')
    limits.epochs = 2
    line = progress_line(50_000, limits, values)
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
