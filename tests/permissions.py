"""Another user, and folders that another user may enter: root, which CI is, may read and write everything."""

import contextlib
import os
import pathlib
import tempfile


@contextlib.contextmanager
def another_user():
    """Lets permissions count, which they do not for root."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@contextlib.contextmanager
def open_folder():
    """A new folder; pytest's own are closed to other users."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.chmod(name, 0o755)
        yield pathlib.Path(name)
