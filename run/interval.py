"""The steps since the last logged one: their metrics, and the time that they took."""

import contextlib
import math
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import checkpoint
from stream import Stream


class Interval:
    """The metrics of the steps since the last logged one."""

    def __init__(self, metrics: list[dict]):
        self.metrics = metrics  # the newest may still be on the devices
        self.positions: list[np.ndarray] = []  # in the data, of the steps since the last `fetch`

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

    def first_not_finite(self) -> int | None:
        """Return how many steps ago the first one was that is not finite, of those with positions."""
        for ago in reversed(range(len(self.positions))):
            if not self.metrics[-1 - ago]['finite']:
                return ago
        return None

    def check_finite(self, step: int, first_step: int, workdir: Path, stream: Stream) -> None:
        """Raise FloatingPointError for the first step up to `step`, the last one, that is not finite."""
        ago = self.first_not_finite()
        if ago is None:
            self.positions.clear()
            return
        metrics = self.metrics[-1 - ago]
        saved = checkpoint.steps(workdir)
        kept = 'has no checkpoint yet'
        if saved:
            kept = f'keeps checkpoint_{saved[-1]}'
        remedy = 'Try a smaller learning_rate.base_learning_rate, or a longer warm-up.'
        if step - ago == first_step + 1 and not math.isfinite(metrics['loss']):
            remedy = 'No update was made yet: look at restore.path and model.dtype.'
        documents = '; '.join(stream.describe(self.positions[-1 - ago]))
        raise FloatingPointError(
            f'step {step - ago} is not finite: loss {metrics["loss"]:.6g}, gradient norm '
            f'{metrics["gradient_norm"]:.6g}. {workdir} {kept}. {remedy} Documents: {documents}'
        )


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


def training_metrics(interval: list[dict], config: Any, clock: Clock) -> dict[str, float]:
    """Return the metrics that only training has, under T5X's tags. Tokens include padding."""
    column = {name: np.array([metrics[name] for metrics in interval]) for name in interval[0]}
    steps_per_second = clock.num_steps / clock.seconds
    rows_per_second = steps_per_second * config.train.batch_size
    lengths = config.data.lengths
    return {
        'learning_rate': float(column['learning_rate'].mean()),
        'learning_rate/current': float(column['learning_rate'][-1]),
        'weight_gradient_norm': float(column['gradient_norm'].mean()),
        'batch_crc32': zlib.crc32(column['batch_crc32'].tobytes()),
        'timing/steps_per_second': steps_per_second,
        'timing/seqs_per_second': rows_per_second,
        'timing/target_tokens_per_second': rows_per_second * lengths.targets,
        'timing/tokens_per_second': rows_per_second * (lengths.inputs + lengths.targets),
        'timing/data_wait_seconds': clock.data_wait_seconds,
        'timing/data_wait_fraction': clock.data_wait_seconds / clock.seconds,
    }
