"""Signals that end a run after its step: SIGHUP, SIGINT and SIGTERM."""

import contextlib
import os
import signal
import socket
import sys
import threading
from typing import Any


class Signals:
    """A listener for SIGHUP, SIGINT and SIGTERM.

    `number` is the first signal, which the loop asks for between two steps. A second signal ends
    the process at once, and so does the first while there is nothing to save (`can_wait` is False).
    A thread listens, because a handler in Python would have to wait for XLA, which may compile for
    minutes. SIGHUP stays ignored below nohup.
    """

    def __init__(self):
        self.number = 0
        self.can_wait = False
        self.is_silent = False
        self.advice = 'no step was taken'
        self.incoming, self.outgoing = socket.socketpair()
        self.outgoing.setblocking(False)
        signal.set_wakeup_fd(self.outgoing.fileno())
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            # Without a handler nothing is written to the descriptor.
            signal.signal(number, ignore)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while True:
            [number] = self.incoming.recv(1)
            if not self.can_wait:
                self.report(f'main.py: stopped at once, {self.advice}')
                os._exit(128 + number)
            if self.number:
                self.report('main.py: stopped at once, the last checkpoint stands')
                os._exit(128 + number)
            self.number = number
            self.report(
                'main.py: stopping, this step is finished and saved; once more to stop at once'
            )

    def report(self, text: str) -> None:
        """Print to a terminal that may be gone."""
        if self.is_silent:
            return
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def ignore(number: int, frame: Any) -> None:
    """Handle a signal by doing nothing: Signals reads it from the descriptor."""
