"""One process at a time in a folder. Imports no jax."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paths


@contextlib.contextmanager
def alone_in(folder: Any) -> Iterator[None]:
    """Make a folder, and on a disk wait until no other process is in it."""
    paths.make_folder(folder)
    with contextlib.ExitStack() as stack:
        if isinstance(folder, Path):
            stack.enter_context(paths.naming(folder))
            file = stack.enter_context((folder / '.lock').open('w'))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
