"""Communication between the processes of a run: arrays, failures, the end of the data, requests to stop."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from messages import Refused
from run import prefetch
from stream import Stream

STEPS_PER_AGREEMENT = 10  # steps between agreements of several processes on whether to stop
SLOW_STEP_SECONDS = 1  # longer steps are each followed by an agreement

Result = TypeVar('Result')


def from_processes(x: NDArray) -> NDArray:
    """Return the arrays that all processes pass as `x`, stacked: [processes, ...]."""
    content = np.frombuffer(x.tobytes(), np.uint8)  # JAX would cut 64-bit numbers
    all_bytes = np.asarray(multihost_utils.process_allgather(content, tiled=True))
    return all_bytes.reshape(-1, x.nbytes).view(x.dtype).reshape(-1, *x.shape)


def from_first_process(x: NDArray) -> NDArray:
    """Return the `x` of the first process; all processes pass the same shape."""
    return from_processes(x)[0]


class ProcessFailed(OSError):
    """Another process has failed."""


def in_all(f: Callable[[], Result]) -> Result:
    """Call `f` in every process; if it fails in one, that one raises its error and all others ProcessFailed."""
    error = None
    try:
        result = f()
    except Exception as raised:
        error = raised
    failures = from_processes(np.array([error is not None]))
    if error is not None:
        raise error
    if failures.any():
        raise ProcessFailed(f'process {failures.argmax()} failed: fix the error that it reports')
    return result


def gather(f: Callable[[], NDArray]) -> NDArray:
    """Call `f` in every process, as `in_all`; return all results, stacked."""
    return from_processes(in_all(f))


class Batches:
    """The prefetched batches of a run. All processes get the same number; if one fails, all stop."""

    def __init__(self, stream: Stream, num_workers: int, may_end: bool):
        """Wait for the first batch. `may_end`: whether the stream may end."""
        self.have_ended = False
        self._prefetched = prefetch.batches(stream, num_workers)
        self._may_end = may_end
        self._following: prefetch.PrefetchedBatch | None = self._receive()

    def next(self) -> prefetch.PrefetchedBatch:
        """Return the next batch, or raise its error. It is padding if only other processes still have rows."""
        batch = self._following or self._receive()
        self._following = None
        if self._may_end:
            self._following = self._receive()
        return batch

    def _receive(self) -> prefetch.PrefetchedBatch:
        following = in_all(lambda: next(self._prefetched))
        if self._may_end:
            is_padding = from_processes(np.array(following.is_padding))
            self.have_ended = bool(is_padding.all())
        return following


def counts_of_all(stream: Stream, batch: prefetch.PrefetchedBatch) -> dict[str, list[int]]:
    """Return {task: [examples, trimmed examples]} of all processes, up to `batch`."""
    counts = from_processes(batch.counts).sum(axis=0)
    names = [task.name for task in stream.tasks]
    return dict(zip(names, counts.tolist(), strict=True))


class StopRequest:
    """A request to stop the run, on which all processes agree."""

    def __init__(self, ask: Callable[[], int]):
        self.ask = ask
        self.signal = 0  # the signal's number, once all processes agree
        self._every = 1  # counts between two agreements
        self._agreed_at = time.monotonic()

    def agree(self, count: int) -> int:
        """Return `signal`. All processes pass the same counts, from 1 on, and agree at some of them."""
        if jax.process_count() == 1:
            self.signal = self.signal or self.ask()
        elif count == 1 or count % self._every == 0:
            seconds = time.monotonic() - self._agreed_at
            self._agreed_at += seconds
            is_slow = seconds > self._every * SLOW_STEP_SECONDS
            requests = from_processes(np.array([self.signal or self.ask(), is_slow]))
            self.signal, is_slow = requests.max(axis=0).tolist()
            self._every = 1 if is_slow else STEPS_PER_AGREEMENT
        return self.signal


@contextlib.contextmanager
def remember_interrupt() -> Iterator[Callable[[], int]]:
    """Yield a function that returns SIGINT after the first one, else 0; a second SIGINT interrupts.

    If the program has set its own handler, keep that one; the function then returns 0.
    """
    received = [0]
    default = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not default:
        yield lambda: 0
        return

    def remember(number: int, frame: object) -> None:
        received[0] = number
        signal.signal(signal.SIGINT, default)
        print('Stopping after this step is saved. Interrupt again to stop at once.')

    signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: received[0]
    finally:
        signal.signal(signal.SIGINT, default)


def check_alike(name: str, digest: bytes) -> None:
    """Raise Refused unless all processes have the same digest of `name`."""
    digests = from_processes(np.frombuffer(digest, np.uint8))
    if (digests != digests[0]).any():
        raise Refused(f'{name} differ between the processes: use a disk that all of them see')
