"""A process that tests/chaos/kills_test.py kills: it saves small checkpoints, and dies before or after an operation.

python tests/kills.py WORKDIR MOMENT     MOMENT counts operations on files from 1; at 0 it lives
"""

import io
import itertools
import os
import pathlib
import signal
import threading

import numpy as np
from ml_collections import ConfigDict

import checkpoint  # starts none of JAX's threads, which a fork does not have
from run import verify, workdir

FILES = {'config.json': b'{"model": {}}', 'data_position.npy': b'a position'}
LAST_STEP = 4
OPERATIONS = (
    (os, ('open', 'fsync', 'rename', 'replace', 'unlink', 'mkdir', 'rmdir')),
    (io, ('open',)),
    (checkpoint, ('_write_array', 'checksum')),
)


def tree_of(step):
    """Return a state whose every value is the step."""
    tree = {f'target/{i}': np.full((4, 8), step, np.float32) for i in range(3)}
    return tree | {'state/step': np.int32(step)}


def save_once(folder):
    """Go on as a run does: set damage aside, remove what is unfinished, save up to LAST_STEP, delete old ones."""
    folder = pathlib.Path(folder)
    step = verify.newest_valid(folder, report=lambda text: None) or 0
    save = ConfigDict({'keep': 2, 'keep_every': 0})
    saver = checkpoint.Saver(folder, prune=lambda: workdir.prune(folder, save))
    for number in range(step + 1, LAST_STEP + 1):
        saver.save(number, tree_of(number), FILES)
    saver.wait()
    saver.prune()
    saver.close()


def save_and_die(workdir, moment):
    """Be killed before or after an operation on files; `moment` counts both from 1."""
    count = itertools.count(1)
    lock = threading.Lock()

    def pass_moment():
        with lock:
            if next(count) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(operation):
        def passed(*arguments, **keywords):
            pass_moment()
            result = operation(*arguments, **keywords)
            pass_moment()
            return result

        return passed

    for owner, names in OPERATIONS:
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))
    save_once(workdir)
