"""Standard input, output and error where they are closed or cannot be written. Imports no jax."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any


def open_closed() -> None:
    """Open the null device for the standard streams that are closed; writing to standard output then fails.

    Otherwise the next file that is opened would get a number of theirs, and what libraries print there.
    """
    for number, flags in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)  # takes the lowest free number
    if sys.stdout is None:
        sys.stdout = open(1, 'w', closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, 'w', closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def writing(file: Any) -> Iterator[None]:
    """Name a standard stream in the OSError of writing to it, and drop what it holds."""
    try:
        yield
    except OSError as error:
        drop(file)
        name = 'standard error' if file is sys.stderr else 'standard output'
        raise OSError(error.errno, error.strerror, name) from error


def drop(file: Any) -> None:
    """Send what a standard stream holds, which Python writes at its end, to the null device."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def finish() -> None:
    """Write what standard output holds. Drop it if that fails."""
    try:
        sys.stdout.flush()
    except OSError:
        drop(sys.stdout)


def print_lines(lines: Iterable[str], file: Any) -> None:
    """Print lines as they are made. If that fails, the others are made all the same, and OSError follows."""
    fault = None
    for line in lines:
        if fault is None:
            try:
                with writing(file):
                    print(line, file=file, flush=True)
            except OSError as error:
                fault = error
    if fault is not None:
        raise fault
