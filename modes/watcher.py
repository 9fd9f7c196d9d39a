"""Watch one process of several from outside. Where one dies or hangs, stop the others with one line.

modes/processes.py runs this file beside each process of a run, in a process of its own: a process that
compiles, saves or holds Python's interpreter for minutes is alive; one that was killed (SIGKILL, out of
memory) or stopped (SIGSTOP) is not. Every watcher has a connection with that of process 0, and both
sides say once a second what they know: whether a process is lost, without which none can go on.
"""

import contextlib
import json
import os
import pathlib
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable

TICK_SECONDS = 0.05  # between two looks at the process
GRACE_SECONDS = 5  # in which processes may end by themselves after one that ended with an error
STOP_SECONDS = 2  # in which a process that is told to stop has to
LENGTH_OF_HELLO = 512  # bytes
LOG_BYTES = 10_000  # the last ones, that are shown
DONE = 'done'  # what a process says that ends without an error
GO_ON = 'all others are stopped, and the same command goes on from what is saved'


class Peer:
    """The watcher of another process: the connection with it, and what it said last."""

    def __init__(self, title: str, connection: socket.socket | None = None):
        self.title = title
        self.connection = connection
        if connection:
            connection.setblocking(False)
        self.is_heard = False
        self.is_lost = False  # the connection was closed
        self.loss: list | None = None
        self.is_done = False
        self.heard_at = time.monotonic()
        self._text = b''  # the begin of its next message

    def send(self, message: list) -> None:
        # It may be gone, which `receive` finds, or not read, and is silent then.
        with contextlib.suppress(OSError):
            if self.connection:
                self.connection.send(json.dumps(message).encode() + b'\n')

    def receive(self) -> None:
        """Read what came. Forget the connection if the other side has closed it."""
        if self.connection is None:
            return
        received = b''
        try:
            received = self.connection.recv(2**16)
        except BlockingIOError:
            return
        except OSError:
            pass
        if not received:
            self.connection = None
            self.is_lost = True
        self.heard_at = time.monotonic()
        *lines, self._text = (self._text + received).split(b'\n')
        for line in lines:
            self.loss, self.is_done = json.loads(line)
            self.is_heard = True


class Watcher:
    """Watches the process `pid` that started it, number `process` of `num_processes`.

    `channel`: in process 0 the socket on which it listens for the watchers of the others, in these the
    connection with it. They say `token` first, so that nobody else is taken for one. `log`: the file of
    what libraries print in the process, which is shown where it dies.
    """

    def __init__(
        self,
        process: int,
        num_processes: int,
        titles: list[str],
        heartbeat: int,
        token: str,
        pid: int,
        channel: int,
        log: int,
    ):
        self.process = process
        self.title = titles[0]
        self.heartbeat = heartbeat
        self.token = token
        self.log = log
        self.pid = pid
        self.said = ''  # by the process: that it is done, or how it ended
        self.ran_at = time.monotonic()  # when the process was last seen not to be stopped
        self.loss: list | None = None  # what `look` has found
        self.listener = None
        if process == 0:
            self.listener = socket.socket(fileno=channel)
            self.listener.setblocking(False)
            self.peers = {i: Peer(f'process {i}') for i in range(1, num_processes)}
        else:
            self.peers = {0: Peer(titles[1], socket.socket(fileno=channel))}

    def watch(self) -> None:
        """Watch until the process has ended, or has to."""
        told: list = []
        told_at = 0.0
        is_ready = False
        while True:
            self.listen()
            self.look()
            if not is_ready and all(peer.is_heard for peer in self.peers.values()):
                is_ready = True
                print('ready', flush=True)  # to the process
            message = [self.loss, self.said == DONE]
            if message != told or time.monotonic() - told_at > 1:
                told = message
                told_at = time.monotonic()
                for peer in self.peers.values():
                    peer.send(message)
            if self.loss:
                self.stop(*self.loss)
                return
            if self.said == DONE and self.has_ended():
                return

    def listen(self) -> None:
        """Wait for a tick, and hear what was said in it."""
        time.sleep(TICK_SECONDS)
        for peer in self.peers.values():
            peer.receive()
        with contextlib.suppress(BlockingIOError):
            while self.listener:
                self.accept(self.listener.accept()[0])
        with contextlib.suppress(BlockingIOError):
            self.said = os.read(0, 100).decode().strip() or self.said

    def accept(self, connection: socket.socket) -> None:
        """Take a connection for that of a watcher if it begins with the token."""
        connection.settimeout(1)
        with contextlib.suppress(OSError, ValueError):
            token, process, title = json.loads(connection.recv(LENGTH_OF_HELLO))
            if token == self.token:
                self.peers[process] = Peer(title, connection)

    def look(self) -> None:
        """Find a process that is lost: its number, one line, and the seconds that the others have."""
        now = time.monotonic()
        if not self.is_stopped():
            self.ran_at = now
        if self.said not in ('', DONE):
            self.loss = [self.process, f'{self.title} {self.said}; {GO_ON}', GRACE_SECONDS]
        elif not self.said and self.has_ended():
            self.loss = [self.process, f'{self.title} died (killed? out of memory?); {GO_ON}', 0]
            last_bytes = max(0, os.lseek(self.log, 0, os.SEEK_END) - LOG_BYTES)
            print(
                os.pread(self.log, LOG_BYTES, last_bytes).decode(errors='replace'),
                end='',
                file=sys.stderr,
            )
        elif now - self.ran_at > self.heartbeat / 2:
            self.loss = [self.process, f'{self.title} is stopped by a signal; {GO_ON}', 0]
        for number, peer in self.peers.items():
            if peer.loss:
                self.loss = peer.loss
            elif peer.is_lost and not peer.is_done:
                self.loss = [number, f'{peer.title} died with its watcher; {GO_ON}', 0]
            elif now - peer.heard_at > self.heartbeat * 0.8 and not peer.is_lost:
                seconds = round(now - peer.heard_at)
                self.loss = [number, f'{peer.title} is silent for {seconds} s; {GO_ON}', 0]

    def stop(self, number: int, text: str, grace: float) -> None:
        """End the process, after the others, because process `number` is lost."""
        if number != self.process:
            self.wait(grace, lambda: bool(self.said) or self.has_ended())
            if not self.said and 0 in (number, self.process):
                print(f'main.py: {text}', file=sys.stderr, flush=True)
        if self.process == 0:
            seconds = grace + STOP_SECONDS + 1
            self.wait(seconds, lambda: not any(peer.connection for peer in self.peers.values()))
        os.close(1)  # a thread of the process waits for this, and ends it
        if not self.is_stopped():
            self.wait(STOP_SECONDS, self.has_ended)
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not is_over():
            self.listen()

    def has_ended(self) -> bool:
        return os.getppid() != self.pid

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal, or by a debugger."""
        with contextlib.suppress(OSError):
            status = pathlib.Path(f'/proc/{self.pid}/stat').read_text()
            return status.rpartition(') ')[2][0] in 'Tt'
        return False


def hello(token: str, process: int, title: str) -> bytes:
    """Return what a connection begins with."""
    return json.dumps([token, process, title]).encode().ljust(LENGTH_OF_HELLO)


if __name__ == '__main__':
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the process
    with open(0, 'rb', buffering=0, closefd=False) as stdin:
        settings = json.loads(stdin.readline())
    os.set_blocking(0, False)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each process
    Watcher(**settings).watch()
