"""The steps since the last logged one: their metrics, their time, and those that are not finite.

Response of a run to a step whose loss, gradient norm, update or optimizer state is not finite, as
train.on_not_finite says:

    stop   raises FloatingPointError, which names the step and its documents
    skip   continues: the compiled step has left parameters and optimizer state as they were

At most train.max_not_finite of these steps are skipped in the life of a run: its checkpoints count them.
Source: T5X's TerminateOnNanAction and skip_nan_updates (t5x/adafactor.py).
"""

import contextlib
import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict
from numpy.typing import NDArray

import checkpoint
import paths
import validation
from messages import LossNotFinite
from stream import Stream


class Interval:
    """The metrics of the steps since the last logged one."""

    def __init__(self, metrics: Sequence[Mapping[str, float]] = ()):
        self.metrics = list(metrics)  # fetched steps
        self.positions: list[NDArray] = []  # in the data, of the steps not looked at yet
        self._queued: list[dict[str, jax.Array | float]] = []

    def add(self, metrics: Mapping, batch: Mapping[str, NDArray], position: NDArray) -> None:
        """Add a step. `batch`: this process's rows; `position`: where in the data they begin."""
        content = b''.join(x.tobytes() for x in batch.values())
        self._queued.append({**metrics, 'batch_crc32': float(zlib.crc32(content))})
        self.positions.append(position)

    def wait(self, all_steps: bool) -> None:
        """Wait until the devices have taken all steps, or all but the newest."""
        if all_steps:
            jax.block_until_ready(self._queued[-1])
        elif len(self._queued) > 1:
            jax.block_until_ready(self._queued[-2])

    def fetch(self) -> None:
        """Copy the metrics of the queued steps to the host, as floats."""
        for step in jax.tree.map(float, jax.device_get(self._queued)):
            # A run may continue with changed code that has other metrics: drop the steps before.
            self.metrics = [other for other in self.metrics if other.keys() == step.keys()]
            self.metrics.append(step)
        self._queued.clear()


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
    interval: Sequence[Mapping[str, float]], clock: Clock, batch_size: int, data_group: ConfigDict
) -> dict[str, float]:
    """Return T5X's metrics of some steps: means over those that made an update. Tokens include padding."""
    values: dict[str, float] = {}
    updates = [metrics for metrics in interval if metrics['finite']]
    if updates:
        values = validation.summarize(updates, batch_size, data_group)
        values['learning_rate'] = float(np.mean([x['learning_rate'] for x in updates]))
        values['weight_gradient_norm'] = float(np.mean([x['gradient_norm'] for x in updates]))
    checksums = np.array([metrics['batch_crc32'] for metrics in interval])
    steps_per_second = clock.num_steps / clock.seconds
    rows_per_second = steps_per_second * batch_size
    lengths = data_group.lengths
    num_devices = jax.device_count()
    values |= {
        'learning_rate/current': interval[-1]['learning_rate'],
        'batch_crc32': zlib.crc32(checksums.tobytes()),
        'timing/seconds': clock.seconds,
        'timing/seqs': clock.num_steps * batch_size,
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


# Steps that are not finite.


class Fault(NamedTuple):
    """A step that is not finite."""

    step: int
    loss: float
    gradient_norm: float
    documents: str

    def __str__(self) -> str:
        norm = f'{self.gradient_norm:.6g}'
        if math.isfinite(self.loss + self.gradient_norm):
            norm += ', but not its update or the optimizer state'
        return f'step {self.step} is not finite: loss {self.loss:.6g}, gradient norm {norm}'


@dataclasses.dataclass
class NotFinite:
    """The steps of a run that are not finite."""

    train: ConfigDict  # the group of settings
    workdir: paths.AnyPath
    first_step: int
    count: int  # steps that were skipped

    def find(
        self, interval: Interval, step: int, stream: Stream, report: Callable[[str], None]
    ) -> Fault | None:
        """Return the first step of the interval that ends the run, if there is one.

        Looks at the steps since the last call, up to `step`. Reports those that were skipped.
        """
        for ago in reversed(range(len(interval.positions))):
            metrics = interval.metrics[-1 - ago]
            if metrics['finite']:
                continue
            documents = '; '.join(stream.describe(interval.positions[-1 - ago]))
            fault = Fault(step - ago, metrics['loss'], metrics['gradient_norm'], documents)
            if self.train.on_not_finite != 'skip' or self.count >= self.train.max_not_finite:
                return fault
            self.count += 1
            text = str(fault).capitalize()
            report(f'{text}. It is skipped, {self.used()}. Documents: {documents}')
        interval.positions.clear()
        return None

    def used(self) -> str:
        return f'{self.count:,} of train.max_not_finite={self.train.max_not_finite:,}'

    def error(self, fault: Fault) -> LossNotFinite:
        """Return the error of a fault, with a remedy."""
        message = str(fault)
        remedy = 'train.on_not_finite=skip'
        if self.train.on_not_finite == 'skip':
            message += f'. The run has used up {self.used()}'
            remedy = 'a larger train.max_not_finite'
        saved = checkpoint.steps(self.workdir)
        kept = f'keeps checkpoint_{saved[-1]}' if saved else 'has no checkpoint yet'
        advice = f'Try a smaller learning_rate.base_learning_rate, a longer warm-up, or {remedy}'
        if fault.step == self.first_step + 1 and not math.isfinite(fault.loss):
            advice = 'No update was made yet: look at restore.path and model.dtype'
        text = f'{message}. {self.workdir} {kept}. {advice}. Documents: {fault.documents}'
        return LossNotFinite(text)
