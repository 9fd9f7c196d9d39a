"""Runs that live in a bucket: saving, killing, continuing, locks and what they log."""

import functools
import itertools
import json
import re
import signal
import subprocess
import sys
import time

import pytest
from bucket_store import ROOT, environment_of, run_in_another_process
from questions import write_task
from runs import (
    ENVIRONMENT,
    assert_close_runs,
    assert_same_run,
    in_two_processes,
    run,
    small_config,
)
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import infer
from run import verify

pytestmark = pytest.mark.peers

KEEP = """
import functools
import itertools
import json
import sys

import numpy as np
from ml_collections import ConfigDict

import checkpoint
import paths
from run import checks, verify, workdir

folder = paths.to_path(sys.argv[1])
save = ConfigDict({'keep': 2, 'keep_every': 0})
saver = checkpoint.Saver(folder, prune=lambda: workdir.prune(folder, save))
for step in range(1, 5):
    if step == 3:
        paths.replace_file(folder / 'checkpoint_1/PINNED', b'')
    tree = {'target/x': np.full([3, 4], step, np.float32), 'state/step': np.int32(step)}
    for attempt in range(2):
        try:
            saver.save(step, tree, {'config.json': b'{}', 'data_position.npy': b''})
            saver.wait()
            break
        except OSError as error:
            print(error)
    print(json.dumps(checkpoint.steps(folder)))
try:
    saver.save(3, tree)
except AssertionError as error:
    print(error)
print(checkpoint.restore(folder / 'checkpoint_3')['target/x'].sum())

# Damage, and what an interrupted save and an interrupted deletion leave.
paths.replace_file(folder / 'checkpoint_4/target.x/0.0', b'damaged')
(folder / 'checkpoint_3/checkpoint').unlink()
paths.replace_file(folder / 'checkpoint_7/target.x/0.0', b'unfinished')
print(verify.newest_valid(folder, report=print))
checkpoint.Saver(folder).close()
print(sorted(path.name for path in folder.iterdir()))
"""


def test_checkpoints_are_saved_kept_deleted_and_set_aside(scheme, store):
    """As on a disk; a checkpoint without its index is none, and the next start removes it."""
    (store.folder / 'home').mkdir()
    url = f'{scheme}://home/runs/x'
    refused = iter([403])
    store.interfere = lambda name, moment: (
        next(refused, None) if name.endswith('_2/manifest.json') else None
    )
    output = run_in_another_process(KEEP, [url], store)
    fault = output.pop(1)
    assert fault.startswith(
        f'{url}/checkpoint_2 is not saved ({url}/checkpoint_2/manifest.json cannot'
    ), fault
    *lines, exists, total, damage, newest, left = output
    assert [json.loads(line) for line in lines] == [[1], [1, 2], [1, 2, 3], [1, 3, 4]]
    assert exists == f'{url}/checkpoint_3'  # a step is saved once
    assert float(total) == 3 * 12
    assert damage.startswith(f'{url}/checkpoint_4 is damaged: target.x/0.0 has 7 bytes, not 48')
    assert damage.endswith('It is set aside as checkpoint_4.damaged-1.') and newest == '1'
    assert left == "['checkpoint_1', 'checkpoint_4.damaged-1']"
    copy = store.folder / 'home/runs/x/checkpoint_4.damaged-1'
    assert (copy / 'target.x/0.0').read_bytes() == b'damaged' and (copy / 'manifest.json').exists()


HOLD = """
import sys
import time

import paths
from modes import process
from run import lock

lock.LOCK_SECONDS = 3.0
file = paths.to_path(sys.argv[1]) / 'lock'
while True:
    try:
        held = lock.lock(file, 'x', 'stop it')
        break
    except ValueError as error:
        print(error, flush=True)
        time.sleep(float(sys.argv[2]))
held.on_loss = lambda line: process.end_now(1, line)
print('held', flush=True)
time.sleep(float(sys.argv[3]))
held.close()
print(held.closed)
"""


def start(script, store, *arguments):
    """Start a script that knows no store but ours; its output is read line by line."""
    return subprocess.Popen(
        [sys.executable, '-c', script, *arguments],
        cwd=ROOT,
        env=environment_of(store)
        | {
            'PYTHONUNBUFFERED': '1',
            'XLA_FLAGS': ENVIRONMENT['XLA_FLAGS'],
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_process_at_a_time_holds_the_lock(scheme, store):
    """One that lives keeps it, one that is killed or suspended loses it, and ends when it wakes up."""
    (store.folder / 'home').mkdir()
    url = f'{scheme}://home/x'
    first = start(HOLD, store, url, '0', '1000')
    assert first.stdout.readline() == 'held\n'
    other = start(HOLD, store, url, '4', '0')
    for _ in range(2):  # the second time after more than LOCK_SECONDS
        refusal = other.stdout.readline()
        assert f'process {first.pid} on ' in refusal and f'{url}/lock' in refusal
    first.send_signal(signal.SIGSTOP)
    lines = other.communicate(timeout=300)[0].splitlines()
    assert lines[-2:] == ['held', 'True']
    assert not list((store.folder / 'home/x').iterdir())

    # The lock that the suspended one finds is that of a third one.
    third = start(HOLD, store, url, '0', '1000')
    assert third.stdout.readline() == 'held\n'
    first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=300) == 1
    assert f'another process has taken {url}/lock' in first.stderr.read()
    third.kill()
    third.wait()


SAVE = """
import sys

import numpy as np
from ml_collections import ConfigDict

import checkpoint
import paths
from run import checks, verify, workdir

folder = paths.to_path(sys.argv[1])
newest = verify.newest_valid(folder) or 0
for step in checkpoint.steps(folder):
    assert (checkpoint.restore(folder / f'checkpoint_{step}')['target/x'] == step).all()
print('restored', newest, flush=True)
save = ConfigDict({'keep': 1, 'keep_every': 0})
saver = checkpoint.Saver(folder, prune=lambda: workdir.prune(folder, save))
for step in range(newest + 1, 5):
    tree = {'target/x': np.full([3, 4], step, np.float32), 'state/step': np.int32(step)}
    saver.save(step, tree, {'config.json': b'{}', 'data_position.npy': b''})
    saver.wait()
    print('saved', step, flush=True)
"""


def kill_at(store, process, is_reached):
    """Kill a process at the first write of which `is_reached(name, moment)` is true."""

    def interfere(name, moment):
        if is_reached(name, moment):
            process.kill()
            process.wait()

    store.interfere = interfere


def is_write(number, moment, numbers, name, when):
    return when.startswith(moment) and next(numbers) == number


@pytest.mark.slow
def test_killed_at_any_write_of_a_save_loses_no_checkpoint(scheme, store):
    """Each process is killed one write later than the one before, before it happens or after."""
    (store.folder / 'home').mkdir()
    saved = 0
    num_kills = 0
    while saved < 4:
        moment = 'after' if num_kills % 2 else 'before'
        process = start(SAVE, store, f'{scheme}://home/x')
        kill_at(
            store, process, functools.partial(is_write, num_kills % 12, moment, itertools.count())
        )
        output, errors = process.communicate(timeout=600)
        lines = [line.split() for line in output.splitlines()]
        assert lines, errors
        assert lines[0][0] == 'restored' and int(lines[0][1]) >= saved, (output, errors)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
        saved = int(lines[-1][1])
        num_kills += 1
    assert num_kills >= 6
    left = [x for x in (store.folder / 'home/x').rglob('*') if x.is_file()]
    assert {x.relative_to(store.folder / 'home/x').parts[0] for x in left} == {'checkpoint_4'}
    verify.verify(store.folder / 'home/x/checkpoint_4')


MAIN = """
import sys

import main
from run import lock

lock.LOCK_SECONDS = 3.0
sys.exit(main.main(['main.py', *sys.argv[1:]]))
"""
CONFIG = """
from questions import make_config


def get_config():
    config = make_config({folder!r})
    config.log.every_steps = 2
    config.save.best_metric = 'inference_eval/qa/f1'
    config.save.best_is = 'higher'
    return config
"""


def run_main(store, *arguments, killed_at=None):
    """Run main.py, which is killed when it has written what the name `killed_at` is in. Return its output."""
    store.interfere = lambda name, moment: None
    process = start(MAIN, store, *arguments)
    if killed_at:
        kill_at(store, process, lambda name, moment: killed_at in name and moment == 'after')
    output, errors = process.communicate(timeout=600)
    assert process.returncode == (-signal.SIGKILL if killed_at else 0), errors
    return output


@pytest.mark.slow
def test_a_run_in_a_bucket_is_the_run_on_a_disk(scheme, store, tmp_path):
    """Killed while it saves and continued, all that it leaves is the same to the bit; other modes open it."""
    (store.folder / 'home').mkdir()
    write_task(tmp_path)
    (tmp_path / 'small.py').write_text(CONFIG.format(folder=str(tmp_path)))
    config = f'--config={tmp_path}/small.py'
    url = f'{scheme}://home/runs/x'
    run_main(store, config, f'--workdir={tmp_path}/expected')
    for name in ('checkpoint_3/target.', 'checkpoint_6/manifest'):
        run_main(store, config, f'--workdir={url}', killed_at=name)
        logged = (store.folder / 'home/runs/x/metrics.jsonl').read_text().splitlines()
        assert json.loads(logged[-1])['step'] >= int(name[11])  # earlier lines survive
        time.sleep(3)  # until the lock counts no more
    output = run_main(store, config, f'--workdir={url}')
    assert 'Continuing after step 3' in output and f'Everything is in {url}' in output
    found = store.folder / 'home/runs/x'
    assert_same_run(found, tmp_path / 'expected', 6)
    assert files_of(found) == files_of(tmp_path / 'expected')
    events = [x for x in (found / 'train').iterdir() for x in EventFileLoader(str(x)).Load()]
    assert {x.step for x in events} >= {2, 4, 6}

    # Other modes.
    changes = ['--mode=evaluate', f'--checkpoint={url}', '--step=all']
    assert 'Step 3: qa is evaluated already.' in run_main(store, *changes)
    run_main(store, *changes, f'--output_dir={scheme}://home/again')
    table = (found / 'results.csv').read_bytes()
    assert (store.folder / 'home/again/results.csv').read_bytes() == table
    best = infer.load(tmp_path / 'expected', step='best')
    text = run_main(store, '--mode=infer', f'--checkpoint={url}', '--step=best', '--text=is 1 é?')
    assert text.splitlines()[-1] == best.generate(['is 1 é?'], max_length=7)[0]


def files_of(folder):
    """{path: content} of what a run leaves, without what depends on the clock or on the folder."""
    found = {}
    for file in folder.rglob('*'):
        if file.is_file() and not re.search(
            'events|metrics.jsonl|lock|config.json|manifest', file.name
        ):
            found[str(file.relative_to(folder))] = file.read_bytes()
    return found


REFUSED = """
import sys

import paths
from run import checks
from run.lock import lock

for url in sys.argv[1:]:
    try:
        folder = paths.to_path(url)
        checks.check_is_run(folder)
        lock(folder / 'lock', str(folder), 'stop it')
    except (ValueError, OSError) as error:
        print(error)
"""


def test_a_bucket_that_refuses_a_run_is_named(scheme, store):
    (store.folder / 'readonly').mkdir()
    (store.folder / 'foreign/x/checkpoint_5').mkdir(parents=True)
    (store.folder / 'foreign/x/checkpoint_5/checkpoint').write_bytes(b"a stranger's")
    store.interfere = lambda name, moment: 403 if name.startswith('readonly') else None
    faults = {
        'private/x': ' cannot be listed',
        'readonly/x': '/lock cannot be written',
        'nobucket/x': '/lock cannot be written',
        'foreign/x': ' is not a run of this program, and has checkpoint_5',
    }
    urls = [f'{scheme}://{name}' for name in faults]
    lines = run_in_another_process(REFUSED, urls, store)
    for line, url, fault in zip(lines, urls, faults.values(), strict=True):
        assert line.startswith(f'{url}{fault}'), line


IN_TWO = """
import sys

sys.path[:0] = sys.argv[1:3]
import jax

jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(sys.argv[3], 2, int(sys.argv[4]), initialization_timeout=300)
import runs

for steps in (3, 6):
    runs.run(runs.small_config(sys.argv[5], steps, data_axis=2), sys.argv[6])
"""


@pytest.mark.slow
def test_two_processes_share_a_bucket_alone(scheme, store, corpus, tmp_path):
    """They save in parts, and resume: the run of one process."""
    (store.folder / 'home').mkdir()
    names = set(environment_of(store)) - set(ENVIRONMENT) | {'PYTHONPATH'}
    environment = {name: environment_of(store)[name] for name in names}
    in_two_processes(IN_TWO, corpus, f'{scheme}://home/x', **environment)
    expected = run(small_config(corpus, data_axis=2), tmp_path / 'expected')
    found = store.folder / 'home/x'
    assert_close_runs(found, expected, 6)
    for step in (3, 6):
        assert verify.verify(found / f'checkpoint_{step}')
        assert not list((found / f'checkpoint_{step}').glob('part-*'))
