"""The steps since the last logged one, skipped steps, and the time of a run.

train.on_not_finite is the response to a step whose loss, gradient norm, update or optimizer state is
not finite:

    stop   raise FloatingPointError, which names the step and its documents
    skip   continue: the compiled step has left parameters and optimizer state unchanged

A run skips at most train.max_not_finite of these steps; its checkpoints store the count.
train.on_spike=skip also skips spikes (train.is_spike), at most train.spike_window in succession.
Source: T5X's TerminateOnNanAction and skip_nan_updates (t5x/adafactor.py).
"""

import collections
import contextlib
import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
        self.positions: list[NDArray] = []  # data positions of the steps not checked yet
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
            # A run may resume with changed code that has other metrics: drop the earlier steps.
            self.metrics = [other for other in self.metrics if other.keys() == step.keys()]
            self.metrics.append(step)
        self._queued.clear()


class Clock:
    """The time of a run by activity, and of the steps since the last logged one."""

    def __init__(self):
        self.totals: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.seconds_of_last_step = math.inf
        self._activity = 'starting'
        self._began = time.perf_counter()
        self.restart()

    def restart(self) -> None:
        """Begin a logged interval."""
        self.num_steps = 0
        self._before = self.totals.copy()

    @property
    def seconds(self) -> float:
        return self.data_wait_seconds + self.totals['steps'] - self._before['steps']

    @property
    def data_wait_seconds(self) -> float:
        return self.totals['waiting for data'] - self._before['waiting for data']

    @contextlib.contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Count the time of the body as `activity`, and not as the activity around it."""
        outer = self._activity
        self._turn_to(activity)
        yield
        self._turn_to(outer)

    def _turn_to(self, activity: str) -> None:
        now = time.perf_counter()
        self.totals[self._activity] += now - self._began
        self._activity = activity
        self._began = now

    def add(self, totals: Mapping[str, float]) -> None:
        """Add the seconds of activities in earlier processes of the run."""
        for activity, seconds in totals.items():
            self.totals[activity] += seconds

    @contextlib.contextmanager
    def taking_step(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds_of_last_step = time.perf_counter() - began
        self.num_steps += 1


def logged_seconds(lines: Sequence[Mapping]) -> float:
    """Return the time of the steps in `lines` of metrics.jsonl."""
    return sum(line.get('timing/seconds', 0.0) for line in lines)


def training_metrics(
    interval: Sequence[Mapping[str, float]], clock: Clock, batch_size: int, data_group: ConfigDict
) -> dict[str, float]:
    """Return T5X's metrics of some steps: means over those that made an update. Tokens include padding."""
    values: dict[str, float] = {}
    updates = [metrics for metrics in interval if makes_update(metrics)]
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


# Steps that make no update.


def recent_steps(saved: Any, unknown: jax.Array) -> jax.Array:
    """Return a checkpoint's TrainState.recent in the shape of `unknown`, padded with inf."""
    if saved is None:
        return unknown
    values = np.append(np.asarray(unknown), np.array(saved, np.float32), axis=1)
    return jax.device_put(values[:, -unknown.shape[1] :], unknown.sharding)


def makes_update(metrics: Mapping[str, float]) -> bool:
    return bool(metrics['finite'] and not metrics.get('spike'))


class Fault(NamedTuple):
    """A step that makes no update."""

    step: int
    is_spike: bool  # else not finite
    loss: float
    gradient_norm: float
    documents: str

    def __str__(self) -> str:
        norm = f'{self.gradient_norm:.6g}'
        kind = 'not finite'
        if self.is_spike:
            kind = 'a spike'
        elif math.isfinite(self.loss + self.gradient_norm):
            norm += ', with a non-finite update or optimizer state'
        return f'step {self.step} is {kind}: loss {self.loss:.6g}, gradient norm {norm}'


@dataclasses.dataclass
class Skips:
    """The steps of a run that make no update."""

    train: ConfigDict  # the group of settings
    workdir: paths.AnyPath
    first_step: int
    num_not_finite: int  # skipped in the life of the run
    num_spikes: int = 0  # in succession

    def find(
        self, interval: Interval, step: int, stream: Stream, report: Callable[[str], None]
    ) -> Fault | None:
        """Return the first step that ends the run, if there is one, and report the skipped ones.

        Checks the steps since the last call, up to `step`.
        """
        for ago in reversed(range(len(interval.positions))):
            metrics = interval.metrics[-1 - ago]
            if makes_update(metrics):
                self.num_spikes = 0
            else:
                is_spike = bool(metrics['finite'])
                norm = metrics['gradient_norm']
                documents = '; '.join(stream.describe(interval.positions[0]))
                fault = Fault(step - ago, is_spike, metrics['loss'], norm, documents)
                if self.ends(fault):
                    return fault  # its position stays: another call returns it again
                if is_spike:
                    self.num_spikes += 1
                else:
                    self.num_not_finite += 1
                text = str(fault).capitalize()
                report(f'{text}. It is skipped, {self.used(fault)}. Documents: {documents}')
            del interval.positions[0]
        return None

    def ends(self, fault: Fault) -> bool:
        if fault.is_spike:
            return self.num_spikes >= self.train.spike_window
        return (
            self.train.on_not_finite != 'skip' or self.num_not_finite >= self.train.max_not_finite
        )

    def used(self, fault: Fault) -> str:
        """Return how many steps of the fault's kind were skipped, and how many may be."""
        if fault.is_spike:
            return f'{self.num_spikes:,} in succession of train.spike_window={self.train.spike_window:,}'
        return f'{self.num_not_finite:,} of train.max_not_finite={self.train.max_not_finite:,}'

    def error(self, fault: Fault) -> LossNotFinite:
        message = str(fault)
        remedy = 'train.on_not_finite=skip'
        if fault.is_spike or self.train.on_not_finite == 'skip':
            message += f'. The run has used up {self.used(fault)}'
            remedy = 'a larger train.max_not_finite'
        if fault.is_spike:
            remedy = 'train.on_spike=no'
        steps = checkpoint.steps(self.workdir)
        newest = f'keeps checkpoint_{steps[-1]}' if steps else 'has no checkpoint yet'
        advice = f'Try a smaller learning_rate.base_learning_rate, a longer warm-up, or {remedy}'
        if fault.step == self.first_step + 1 and not math.isfinite(fault.loss):
            advice = 'No update was made yet: look at restore.path and model.dtype'
        text = f'{message}. {self.workdir} {newest}. {advice}. Documents: {fault.documents}'
        return LossNotFinite(text)
