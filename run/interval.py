"""The steps since the last logged one: their metrics, and the time that they took."""

import contextlib
import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

import evaluate

Metrics = Mapping[str, jax.Array]  # of a step, on the devices


class Interval:
    """The metrics of the steps since the last logged one."""

    def __init__(self, metrics: Sequence[dict[str, float]] = ()):
        self.metrics = list(metrics)  # of the steps that are fetched
        self.positions: list[NDArray] = []  # in the data, of the steps not looked at yet
        self._queued: list[Metrics] = []
        self._checksums: list[float] = []  # of the batches of the queued steps

    def add(self, metrics: Metrics, batch: Mapping[str, NDArray], position: NDArray) -> None:
        """Add a step. `batch`: this process's rows; `position`: where in the data they begin."""
        content = b''.join(x.tobytes() for x in batch.values())
        self._queued.append(metrics)
        self._checksums.append(float(zlib.crc32(content)))
        self.positions.append(position)

    def wait(self, all_steps: bool) -> None:
        """Wait until the devices have taken all steps, or all but the newest."""
        if all_steps:
            jax.block_until_ready(self._queued[-1])
        elif len(self._queued) > 1:
            jax.block_until_ready(self._queued[-2])

    def fetch(self) -> None:
        """Copy the metrics of the queued steps to the host, as floats."""
        fetched = jax.tree.map(float, jax.device_get(self._queued))
        for metrics, checksum in zip(fetched, self._checksums, strict=True):
            step = {**metrics, 'batch_crc32': checksum}
            # Steps of a checkpoint of a program with other metrics are dropped.
            self.metrics = [other for other in self.metrics if other.keys() == step.keys()]
            self.metrics.append(step)
        self._queued.clear()
        self._checksums.clear()

    def not_finite(self) -> list[int]:
        """Return the age, in steps, of each non-finite step that still has a position."""
        ages = reversed(range(len(self.positions)))
        return [ago for ago in ages if not self.metrics[-1 - ago]['finite']]


class Clock:
    """The time that the steps since the last logged one took, without evaluating and saving."""

    def __init__(self):
        self.seconds_of_last_step = math.inf
        self.restart()

    def restart(self) -> None:
        self.num_steps = 0
        self.data_wait_seconds = 0.0
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def taking_step(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds_of_last_step = time.perf_counter() - began
        self.num_steps += 1

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.data_wait_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._start += time.perf_counter() - began


def training_metrics(
    interval: Sequence[dict[str, float]], config: ConfigDict, clock: Clock
) -> dict[str, float]:
    """Return the metrics of some steps under T5X's tags. Tokens include padding.

    Means are over the steps that made an update.
    """
    values: dict[str, float] = {}
    updates = [metrics for metrics in interval if metrics['finite']]
    if updates:
        values = evaluate.summarize(updates, config)
        learning_rates = np.array([metrics['learning_rate'] for metrics in updates])
        gradient_norms = np.array([metrics['gradient_norm'] for metrics in updates])
        values['learning_rate'] = float(learning_rates.mean())
        values['weight_gradient_norm'] = float(gradient_norms.mean())
    checksums = np.array([metrics['batch_crc32'] for metrics in interval])
    steps_per_second = clock.num_steps / clock.seconds
    rows_per_second = steps_per_second * config.train.batch_size
    lengths = config.data.lengths
    num_devices = jax.device_count()
    values |= {
        'learning_rate/current': interval[-1]['learning_rate'],
        'batch_crc32': zlib.crc32(checksums.tobytes()),
        'timing/seconds': clock.seconds,
        'timing/seqs': clock.num_steps * config.train.batch_size,
        'timing/steps_per_second': steps_per_second,
        'timing/seqs_per_second': rows_per_second,
        'timing/seqs_per_second_per_core': rows_per_second / num_devices,
        'timing/target_tokens_per_second': rows_per_second * lengths.targets,
        'timing/target_tokens_per_second_per_core': rows_per_second * lengths.targets / num_devices,
        'timing/tokens_per_second': rows_per_second * (lengths.inputs + lengths.targets),
        'timing/data_wait_seconds': clock.data_wait_seconds,
        'timing/data_wait_fraction': clock.data_wait_seconds / clock.seconds,
    }
    num_skipped = len(interval) - len(updates)
    if num_skipped:
        values['skipped_steps'] = num_skipped
    return values
