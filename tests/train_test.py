"""The step and the small parts of the loop."""

import dataclasses

import jax
import numpy as np
from runs import small_config

import train


def test_trainers_are_compared_by_value():
    """Runs with the same settings share the compiled step, whatever their text."""
    trainer = train.make_trainer(small_config('a.txt'))
    same = train.make_trainer(small_config('b.txt', steps=9))
    assert trainer == same
    assert train.jit_step(trainer) is train.jit_step(same)
    others = [dataclasses.replace(trainer, seed=1), train.make_trainer(small_config('a.txt'), 2)]
    config = small_config('a.txt')
    config.optimizer.decay_rate = 0.7
    others.append(train.make_trainer(config))
    for other in others:
        assert trainer != other
        assert train.jit_step(trainer) is not train.jit_step(other)


def test_processes_agree_on_the_first_signal():
    signals = iter([0, 15, 2])
    request = train.StopRequest(lambda: next(signals))
    assert [request.agree(count) for count in (1, 2, 3)] == [0, 15, 15]


def test_the_clock_leaves_pauses_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(train.time, 'perf_counter', lambda: now[0])
    clock = train.Clock()
    with clock.taking_step():
        with clock.waiting_for_data():
            now[0] += 1
        now[0] += 2
    with clock.paused():
        now[0] += 50
    assert (clock.num_steps, clock.data_wait_seconds) == (1, 1)
    assert (clock.seconds, clock.seconds_of_last_step) == (3, 3)
    clock.restart()
    assert (clock.num_steps, clock.data_wait_seconds, clock.seconds) == (0, 0, 0)


def test_an_interval_hashes_batches_and_becomes_floats():
    interval = train.Interval([{'loss': 1.0, 'batch_crc32': 7.0}])
    interval.add({'loss': jax.numpy.float32(2)}, {'a': np.arange(2)}, position=np.zeros(4))
    interval.wait(all_steps=True)
    interval.fetch()
    assert [metrics['loss'] for metrics in interval.metrics] == [1.0, 2.0]
    assert all(type(x) is float for metrics in interval.metrics for x in metrics.values())


def test_steps_with_other_metrics_leave_an_interval():
    """A checkpoint from before a metric existed, or from before it was removed."""
    for restored in ({'loss': 1.0}, {'loss': 1.0, 'entropy': 3.0, 'batch_crc32': 7.0}):
        interval = train.Interval([restored])
        interval.add({'loss': 2.0}, {'a': np.arange(2)}, position=np.zeros(4))
        assert [metrics['loss'] for metrics in interval.metrics] == [2.0]
