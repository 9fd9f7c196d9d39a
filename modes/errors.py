"""Print an error: one line for a wrong value, Python's traceback for everything else. Imports no jax."""

import contextlib
import errno
import sys
import traceback

import paths
from messages import LossNotFinite, Refused

# Remedies for errors of the operating system.
NAME_REMEDY = 'correct its name or permissions, or name another'
FULL_REMEDY = 'free some space, or name a folder on another disk'
REMEDIES = {
    errno.ENOSPC: FULL_REMEDY,
    errno.EDQUOT: FULL_REMEDY,
    errno.EFBIG: 'name a folder on a disk that takes larger files',
    errno.EPIPE: 'the program that reads the output has ended',
    errno.EIO: 'check the disk, or name a folder on another one',
}
OUT_OF_MEMORY = 'RESOURCE_EXHAUSTED'  # how XLA's message begins
MEMORY_REMEDY = 'use more of train.num_microbatches, smaller batches, or more devices'


def is_one_line(error: BaseException) -> bool:
    """Return whether an error comes from a value, a file or memory, and not from a mistake in code."""
    is_value = isinstance(error, Refused | LossNotFinite | OSError)
    return is_value or str(error).startswith(OUT_OF_MEMORY)


def report(error: BaseException, of: str = '') -> None:
    """Print an error and its notes. `of`: the process, if there are several."""
    with contextlib.suppress(OSError):  # without standard error, the exit status must suffice
        if not is_one_line(error):
            if of:
                error.add_note(of)
            traceback.print_exception(error)
            return
        speaker = f'main.py: {of}: ' if of else 'main.py: '
        print(f'{speaker}{one_line(error)}', file=sys.stderr)
        for note in getattr(error, '__notes__', ()):
            if (
                'JAX_TRACEBACK_FILTERING' not in note
            ):  # JAX's note on a traceback that is not printed
                print(f'main.py: {note}', file=sys.stderr)


def one_line(error: BaseException) -> str:
    """Return the message of `error` without line breaks."""
    text = ' '.join(paths.reason(error).split())
    text = text.encode(errors='backslashreplace').decode()  # file names may not be UTF-8
    if isinstance(error, OSError) and error.errno:  # the system's
        text += f': {REMEDIES.get(error.errno, NAME_REMEDY)}'
    if text.startswith(OUT_OF_MEMORY):
        text += f': {MEMORY_REMEDY}'
    return text
