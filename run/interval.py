"""The steps since the last logged one: their metrics, and the time that they took."""

import contextlib
import math
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

import evaluate
from run import console
from run.agreement import counts_of_all


class Interval:
    """The metrics of the steps since the last logged one."""

    def __init__(self, metrics: list[dict]):
        self.metrics = metrics  # the newest may still be on the devices
        self.positions: list[np.ndarray] = []  # in the data, of the steps not looked at yet

    def add(self, metrics: Mapping, batch: Mapping[str, np.ndarray], position: np.ndarray) -> None:
        """Add a step. `batch`: this process's rows; `position`: where in the data they begin."""
        content = b''.join(x.tobytes() for x in batch.values())
        step = {**metrics, 'batch_crc32': zlib.crc32(content)}
        # Steps of a checkpoint of a program with other metrics are dropped.
        self.metrics = [other for other in self.metrics if other.keys() == step.keys()]
        self.metrics.append(step)
        self.positions.append(position)

    def wait(self, all_steps: bool) -> None:
        """Wait until the devices have taken all steps, or all but the newest."""
        if all_steps:
            jax.block_until_ready(self.metrics[-1])
        elif len(self.metrics) > 1:
            jax.block_until_ready(self.metrics[-2])

    def fetch(self) -> None:
        """Copy the metrics to the host, as floats."""
        self.metrics = jax.tree.map(float, jax.device_get(self.metrics))

    def not_finite(self) -> list[int]:
        """Return how many steps ago each one was that is not finite, of those with positions."""
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


def show(run: Any, progress: Any, interval: Interval, clock: Clock, log_now: bool) -> None:
    """Show the metrics of the interval. Write them if they are to be logged.

    The means are over the steps that made an update. `run` and `progress` are those of train.py.
    """
    step = progress.step
    updates = [metrics for metrics in interval.metrics if metrics['finite']]
    values = training_metrics(interval.metrics, run.config, clock)
    text = f'step {step}: no update since {len(interval.metrics):,} step(s)'
    if updates:
        values = evaluate.summarize(updates, run.config) | means(updates) | values
        last = None if run.config.train.epochs else run.config.train.steps
        text = console.progress_line(step, last, values)
    if not log_now:
        run.console.live(text)
        return
    run.console.line(text)
    counts = counts_of_all(run.stream, progress.batch)
    for task, (num_examples, num_trimmed) in counts.items():
        values[f'data/{task}/examples'] = num_examples
        values[f'data/{task}/trimmed'] = num_trimmed
    num_skipped = len(interval.metrics) - len(updates)
    if num_skipped:
        values['skipped_steps'] = num_skipped
    run.metrics.write('train', step, values)
    num_logged = step // run.config.log.every_steps
    if num_logged.bit_count() == 1 or step == run.config.train.steps:  # 1, 2, 4, ...
        for line in console.describe_trimming(counts):
            run.console.line(line)


def means(updates: list[dict]) -> dict[str, float]:
    """Return the means that only training has, under T5X's tags."""
    learning_rates = np.array([metrics['learning_rate'] for metrics in updates])
    gradient_norms = np.array([metrics['gradient_norm'] for metrics in updates])
    return {
        'learning_rate': float(learning_rates.mean()),
        'weight_gradient_norm': float(gradient_norms.mean()),
    }


def training_metrics(interval: list[dict], config: Any, clock: Clock) -> dict[str, float]:
    """Return the other metrics that only training has. Tokens include padding."""
    checksums = np.array([metrics['batch_crc32'] for metrics in interval])
    steps_per_second = clock.num_steps / clock.seconds
    rows_per_second = steps_per_second * config.train.batch_size
    lengths = config.data.lengths
    num_devices = jax.device_count()
    return {
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
