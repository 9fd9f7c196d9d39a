"""Batches prefetched in a thread, or in worker processes that divide the rows.

Neither changes a batch: a worker makes its rows as another host would. Imports no jax.
"""

import atexit
import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import signal
import traceback
from collections.abc import Generator, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from messages import Refused
from stream import Stream

DEPTH = 2  # batches prefetched
DEPTH_OF_WORKER = 8  # more, to even out differences between workers


class PrefetchedBatch(NamedTuple):
    """A batch, and the messages of its stream."""

    features: dict[str, NDArray]
    before: NDArray  # the stream's positions
    after: NDArray
    counts: NDArray  # the stream's, int64 [tasks, 2]
    faults: list[str]  # reports of skipped lines since the previous batch, at most ten per task
    num_faults: int  # lines skipped so far
    is_padding: bool  # no rows were left


def batches(stream: Stream, num_workers: int = 0) -> Iterator[PrefetchedBatch]:
    """Yield the batches of a stream from its position on, prefetched in a thread, then padding without end.

    With `num_workers`, that many processes divide the rows, and the position of `stream` does not change.
    An error in a process is raised instead of its batch.
    """
    batches = batches_of(stream)
    if num_workers > 0:
        batches = batches_of_workers(stream, num_workers)
    with contextlib.closing(batches):
        yield from ahead_in_thread(batches)


def batches_of(stream: Stream) -> Generator[PrefetchedBatch, None, None]:
    """Yield the batches of a stream, with its positions and counts, then padding without end."""
    before = stream.position
    padding = stream.batch_of([[] for _ in stream.rows])
    while True:
        features = next(stream, None)
        after = stream.position
        yield PrefetchedBatch(
            features or padding,
            before,
            after,
            stream.counts.copy(),
            *stream.mixture.faults(),
            is_padding=features is None,
        )
        before = after


def ahead_in_thread(
    batches: Iterator[PrefetchedBatch], depth: int = DEPTH
) -> Iterator[PrefetchedBatch]:
    """Yield the endless `batches`, prefetched by a thread."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        ahead = collections.deque(thread.submit(next, batches) for _ in range(depth))
        while True:
            batch = ahead.popleft().result()
            ahead.append(thread.submit(next, batches))
            yield batch


# Worker processes.


def batches_of_workers(stream: Stream, num_workers: int) -> Generator[PrefetchedBatch, None, None]:
    """Yield batches whose rows are divided among processes; each opens config.data itself."""
    num_bounds = min(num_workers, len(stream.rows)) + 1
    bounds = np.linspace(stream.rows.start, stream.rows.stop, num_bounds).astype(int)
    with contextlib.ExitStack() as stack:
        workers = []
        for begin, end in itertools.pairwise(bounds.tolist()):
            workers.append(Worker(range(begin, end)))
            stack.callback(workers[-1].stop)
        for worker in workers:  # after all processes have started to import
            worker.begin(stream)
        while True:
            parts = [worker.receive() for worker in workers]
            features = {}
            for name in parts[0].features:
                features[name] = np.concatenate([part.features[name] for part in parts])
            before = np.concatenate([part.before for part in parts])
            after = np.concatenate([part.after for part in parts])
            counts = stream.counts.copy()
            faults, num_faults = stream.mixture.faults()
            for part in parts:
                counts += part.counts
                faults = faults + part.faults
                num_faults += part.num_faults
            is_padding = all(part.is_padding for part in parts)
            yield PrefetchedBatch(features, before, after, counts, faults, num_faults, is_padding)


class Worker:
    """A process that makes some rows of a stream."""

    def __init__(self, rows: range):
        self.rows = rows
        # A forked process would inherit the locks of this one's threads.
        context = multiprocessing.get_context('spawn')
        self.connection, workers_end = context.Pipe()
        self.process = context.Process(target=make_batches, args=(workers_end,), daemon=True)
        self.process.start()
        workers_end.close()
        atexit.register(self.stop)

    def begin(self, stream: Stream) -> None:
        """Send the process its work."""
        options = {field.name: getattr(stream, field.name) for field in dataclasses.fields(stream)}
        mixture = options.pop('mixture')  # has functions that cannot be sent
        options['rows'] = self.rows
        first = self.rows.start - stream.rows.start
        position = stream.position[first : first + len(self.rows)]
        work = (mixture.reopen, mixture.fingerprint, position, options)
        send(work, self.connection)  # if the process has ended, `receive` raises

    def receive(self) -> PrefetchedBatch:
        """Return the next batch of these rows. Raise the worker's error."""
        try:
            received = self.connection.recv()
        except (EOFError, ConnectionError):  # ConnectionError if it has not read its work
            self.process.join()
            raise ChildProcessError(
                f'the process that reads data for rows {self.rows.start} to {self.rows.stop - 1} ended with exit code '
                f'{self.process.exitcode}: use fewer data.num_workers if memory is short'
            ) from None
        if isinstance(received, Exception):
            raise received
        return received

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        atexit.unregister(self.stop)
        self.process.kill()
        self.process.join()
        self.connection.close()


def make_batches(connection: Connection) -> None:
    """Receive a worker's work, and send its batches."""
    # Records have no reference cycles; Python's default threshold costs a fifth of the time.
    gc.set_threshold(100_000)

    def messages() -> Iterator[PrefetchedBatch]:
        reopen, fingerprint, position, options = connection.recv()
        data_group = options['data_group']
        options['vocabulary'].num_threads = 1  # the other cores have workers of their own
        opened = reopen(data_group)
        if opened.fingerprint != fingerprint:
            raise Refused(
                f'data.task={data_group.task!r}: its files changed meanwhile: start again'
            )
        stream = Stream(opened, **options)
        stream.seek(position)
        # The parent process has reported the faults found on opening.
        _, num_told = stream.mixture.faults()
        for batch in ahead_in_thread(batches_of(stream), DEPTH_OF_WORKER):
            yield batch._replace(num_faults=batch.num_faults - num_told)

    send_all(messages(), connection)


def send_all(messages: Iterable[object], connection: Connection) -> None:
    """Send messages, or an error, from a child process until nobody receives them."""
    # The parent process handles signals, and ends this one.
    for name in ('SIGHUP', 'SIGINT', 'SIGTERM', 'SIGUSR1', 'SIGUSR2', 'SIGXCPU'):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    try:
        for message in messages:
            if not send(message, connection):
                return
    except (Refused, OSError) as error:
        send(error, connection)
    except Exception:  # pickle may not rebuild it
        send(RuntimeError(f'in a child process:\n{traceback.format_exc()}'), connection)


def send(message: object, connection: Connection) -> bool:
    """Send a message. Return whether its receiver still exists."""
    try:
        connection.send(message)
    except ConnectionError:
        return False
    return True
