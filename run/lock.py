"""One process at a time in a folder. A lock on a disk is the system's, in a bucket an object. Imports no jax."""

import contextlib
import fcntl
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import paths
from messages import Refused

if TYPE_CHECKING:
    from run.buckets import BucketPath

LOCK_SECONDS = 120.0  # a lock in a bucket expires after this time unless it is renewed
SECONDS_BETWEEN_TRIES = 0.1


def lock(file: paths.AnyPath, title: str, remedy: str, is_first: bool = True) -> 'Lock':
    """Lock `file`, in the first process only, until the lock is closed. Raises Refused that names the holder."""
    if not is_first:
        return Lock()
    try:
        return _try(file, f'process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}')
    except BlockingIOError:
        holder = file.read_bytes().decode(errors='replace').partition('\n')[0]
        if not isinstance(file, Path):
            remedy += f'; if it was killed, wait {LOCK_SECONDS:.0f} seconds, or remove {file}'
        raise Refused(f'{title} is in use by {holder}: {remedy}') from None


@contextlib.contextmanager
def alone_in(folder: paths.AnyPath) -> Iterator[None]:
    """Make a folder, and wait until no other process is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            held = _try(folder / '.lock', holder='')  # no message names the holder
            break
        except BlockingIOError:
            time.sleep(SECONDS_BETWEEN_TRIES)
    with held:
        yield


def _try(file: paths.AnyPath, holder: str) -> 'Lock':
    """Lock a file. Raises BlockingIOError if another process has the lock."""
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
    """The system's lock of a file, which ends with its process."""

    def __init__(self, file: Path, holder: str):
        with paths.naming(file):
            self._stream = file.open('a+')
            try:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._stream.close()
                raise
        with paths.naming(file.parent):
            self._stream.truncate(0)
            self._stream.write(holder)
            self._stream.flush()

    def close(self) -> None:
        super().close()
        self._stream.close()


class BucketLock(Lock):
    """A lock in a bucket: a file that only one process can create, and that it writes again while it lives.

    The lock of a process that was killed counts for LOCK_SECONDS. A process that was suspended for so long may
    find the lock of another one: `on_loss` has to end it, because two would write the same files.
    """

    def __init__(self, file: 'BucketPath', holder: str):
        self.file = file
        self.content = f'{holder}\n{secrets.token_hex(8)}'.encode()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        # A repeated request may find its own content.
        while not file.create(self.content) and self._read() != self.content:
            other = self._read()
            if self._age() < LOCK_SECONDS:
                raise BlockingIOError
            if self._read() == other:
                file.unlink()
        self._thread.start()

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._closing.set()
            self._thread.join()
            self.file.unlink()

    def _renew(self) -> None:
        while not self._closing.wait(LOCK_SECONDS / 6):
            with contextlib.suppress(Exception):  # the network failed: the next renewal may succeed
                if self._read() not in (self.content, b''):  # b'': somebody has removed it
                    self.is_lost = True
                    self.on_loss(f'{self.file} is now held by another process: this one ends')
                    return
                paths.replace_file(self.file, self.content)

    def _read(self) -> bytes:
        try:
            return self.file.read_bytes()
        except FileNotFoundError:
            return b''

    def _age(self) -> float:
        """Return how many seconds ago the lock was written, by the clock of the store."""
        now = self.file.with_name('lock.now')
        paths.replace_file(now, b'')
        try:
            modified = self.file.client.modified
            return (modified(str(now)) - modified(str(self.file))).total_seconds()
        except FileNotFoundError:  # its holder has removed it
            return LOCK_SECONDS
        finally:
            now.unlink()
