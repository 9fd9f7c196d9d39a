"""Disks that refuse: another user's folders (root, which CI is, may read and write everything), and full ones."""

import contextlib
import os
import pathlib
import resource
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


@contextlib.contextmanager
def full_disk(num_bytes):
    """Refuses to write more than `num_bytes` of any file, here and in processes that start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
