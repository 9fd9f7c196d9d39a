"""What processes do that tests/chaos/kills_test.py kills: save small checkpoints, whose every value is the step."""

import pathlib

import numpy as np

import checkpoint
from run import verify

FILES = {'config.json': b'{"model": {}}', 'data_position.npy': b'a position'}
LAST_STEP = 4


def tree_of(step, num_arrays=3, shape=(4, 8)):
    tree = {f'target/{i}': np.full(shape, step, np.float32) for i in range(num_arrays)}
    return tree | {'state/step': np.int32(step)}


def save_once(workdir):
    """Go on as a run does: set damage aside, remove what is unfinished, save up to LAST_STEP, delete old ones."""
    workdir = pathlib.Path(workdir)
    step = verify.newest_valid(workdir, report=lambda text: None) or 0
    saver = checkpoint.Saver(workdir, keep=2)
    for number in range(step + 1, LAST_STEP + 1):
        saver.save(number, tree_of(number), FILES)
    saver.wait()
    saver.prune()
    saver.close()


def save_forever(workdir):
    """Save one step after the other, and say in a file which are handed over."""
    workdir = pathlib.Path(workdir)
    step = verify.newest_valid(workdir, report=lambda text: None) or 0
    saver = checkpoint.Saver(workdir, keep=2)
    with (workdir / 'handed_over').open('w') as file:
        while True:
            step += 1
            saver.save(step, tree_of(step, num_arrays=12, shape=(256, 1024)), FILES)
            saver.check()
            file.write(f'{step}\n')
            file.flush()
