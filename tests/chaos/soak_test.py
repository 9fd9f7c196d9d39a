"""A run of many steps that logs, evaluates, saves and is killed: its memory and its files do not grow."""

import os
import pathlib
import re
import signal

import pytest
from runs import Program

import checkpoint

MEBIBYTE = 2**20


def resources_of(pid):
    """Return the resident bytes, the open files and the threads of a process."""
    status = pathlib.Path(f'/proc/{pid}/status').read_text()
    resident = int(re.search(r'VmRSS:\s+(\d+) kB', status)[1]) * 1024
    threads = int(re.search(r'Threads:\s+(\d+)', status)[1])
    return resident, len(os.listdir(f'/proc/{pid}/fd')), threads


def files_of(workdir):
    """Return the number of files but TensorBoard's, of which each start makes its own."""
    files = [file for file in workdir.rglob('*') if file.is_file()]
    return sum(not file.name.startswith('events.') and '.tmp-' not in str(file) for file in files)


@pytest.mark.parametrize(
    'num_steps, num_kills',
    [
        pytest.param(600, 2, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param(20_000, 10, marks=pytest.mark.chaos),
    ],
)
def test_memory_and_files_do_not_grow(command_line, corpus, tmp_path, num_steps, num_kills):
    """Killed in the first half; the second half is one process."""
    log = num_steps // 200
    program = Program(tmp_path, corpus, num_steps, log=log, save=5 * log, evaluate=20 * log)
    workdir = tmp_path / 'run'
    flags = ['--config.save.keep=3']
    num_files = []
    samples = []  # the last process's step and resources
    for number in range(1, num_kills + 2):
        process = command_line.start(*program.arguments(workdir), *flags)
        last = num_steps
        if number <= num_kills:
            last = number * num_steps // (2 * num_kills)
        step = 0
        samples.clear()
        while step < last:
            step = int(process.wait_for('step ').split()[1].partition('/')[0])
            samples.append((step, *resources_of(process.pid)))
        if number <= num_kills:
            process.send_signal(signal.SIGKILL)
            assert process.wait().status == -signal.SIGKILL
        else:
            assert process.wait().status == 0
        if len(checkpoint.steps(workdir)) == 3:  # save.keep
            num_files.append(files_of(workdir))
    print()
    for step, resident, num_open, threads in samples[:: max(len(samples) // 8, 1)]:
        print(
            f'step {step:,}: {resident / MEBIBYTE:.0f} MiB, {num_open} open files, {threads} threads'
        )
    print(f'files beside events: {num_files}')
    early = [x for x in samples if num_steps * 5 // 8 <= x[0] < num_steps * 6 // 8]
    late = [x for x in samples if x[0] >= num_steps * 7 // 8]
    growth = min(x[1] for x in late) - min(x[1] for x in early)
    print(
        f'growth of memory from steps {early[0][0]:,} to {num_steps:,}: {growth / MEBIBYTE:.1f} MiB'
    )
    assert growth < 4 * MEBIBYTE
    assert max(x[2] for x in late) <= max(x[2] for x in early) + 2
    assert max(x[3] for x in late) <= max(x[3] for x in early) + 2
    assert len(num_files) > 1 and len(set(num_files)) == 1, num_files
    assert not list(workdir.glob('*.tmp-*'))
