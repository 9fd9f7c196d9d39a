"""Locks of folders: the operating system's on a disk, an object in a bucket. Imports no jax."""

import contextlib
import fcntl
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import paths
from messages import Refused
from run import buckets

if TYPE_CHECKING:
    from upath import UPath

LOCK_SECONDS = 120.0  # a lock in a bucket expires after this time unless it is renewed
SECONDS_BETWEEN_TRIES = 0.1
SECONDS_BETWEEN_WRITERS = 1.0  # within this time, competing processes replace an expired lock


def lock(file: paths.AnyPath, title: str, remedy: str, is_first: bool = True) -> 'Lock':
    """Lock `file`, in the first process only, until the lock is closed. Raises Refused with the holder's name."""
    if not is_first:
        return Lock()
    try:
        return _try(file, f'process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}')
    except BlockingIOError:
        holder = file.read_bytes().decode(errors='replace').partition('\n')[0]
        if not isinstance(file, Path):
            remedy += f'; if it was killed, wait {LOCK_SECONDS:.0f} seconds, or remove {file}'
        raise Refused(f'{title} is in use by {holder}: {remedy}') from None


def alone_in(folder: paths.AnyPath) -> 'Lock':
    """Wait until no other process is in a folder, and lock it."""
    while True:
        with contextlib.suppress(BlockingIOError):
            return _try(folder / '.lock', holder='')  # no message names the holder
        time.sleep(SECONDS_BETWEEN_TRIES)


def _try(file: paths.AnyPath, holder: str) -> 'Lock':
    """Lock a file, and create its folder. Raises BlockingIOError if another process has the lock."""
    return DiskLock(file, holder) if isinstance(file, Path) else BucketLock(file, holder)


class Lock(contextlib.AbstractContextManager):
    """A lock that this process holds until it is closed."""

    closed = False
    is_lost = False
    # Called with a line if another process has taken the lock.
    on_loss: Callable[[str], object] = staticmethod(lambda line: print(line, file=sys.stderr))

    def close(self) -> None:
        self.closed = True

    def __exit__(self, *error: object) -> None:
        self.close()


class DiskLock(Lock):
    """The operating system's lock of a file; it ends with the process."""

    def __init__(self, file: Path, holder: str):
        with paths.naming(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = file.open('a+')
            try:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._stream.close()
                raise
            self._stream.truncate(0)
            self._stream.write(holder)
            self._stream.flush()

    def close(self) -> None:
        super().close()
        self._stream.close()


class BucketLock(Lock):
    """A lock in a bucket: a file that only one process can create, and that this process keeps rewriting.

    The lock of a killed process stays valid for LOCK_SECONDS by the store's clock. A process that was suspended
    for longer may have lost its lock: `on_loss` must end it, or two processes would write the same files.
    """

    def __init__(self, file: 'UPath', holder: str):
        self.file = file
        self.content = f'{holder}\n{secrets.token_hex(8)}'.encode()
        is_ours = buckets.create(file, self.content)
        if not is_ours and self._age() >= LOCK_SECONDS:
            paths.replace_file(file, self.content)
            time.sleep(SECONDS_BETWEEN_WRITERS)
            is_ours = self._is_ours()  # not if another process wrote later
        if not is_ours:
            raise BlockingIOError
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._closing.set()
            self._thread.join()
            if not self.is_lost:
                self.file.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._closing.wait(LOCK_SECONDS / 6):
            with contextlib.suppress(Exception):  # the network failed: the next renewal may succeed
                if not self._is_ours():
                    self.is_lost = True
                    self.on_loss(f'another process has taken {self.file}: this one ends')
                    return
                paths.replace_file(self.file, self.content)

    def _is_ours(self) -> bool:
        try:
            return self.file.read_bytes() == self.content
        except FileNotFoundError:
            return False

    def _age(self) -> float:
        """Return how many seconds ago the lock was written, by the clock of the store."""
        probe = self.file.with_name(f'lock.{secrets.token_hex(8)}')
        paths.replace_file(probe, b'')
        try:
            modified = self.file.fs.modified
            return (modified(probe.path) - modified(self.file.path)).total_seconds()
        except FileNotFoundError:  # its holder has removed it
            return LOCK_SECONDS
        finally:
            probe.unlink()
