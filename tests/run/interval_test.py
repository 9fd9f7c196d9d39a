"""The metrics and the time of the steps since the last logged one."""

import time

import numpy as np

from run.interval import Clock, Interval


def test_the_clock_adds_up(monkeypatch):
    """All seconds are one activity's; those of the steps since the last logged one leave others out."""
    now = [100.0]
    monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
    clock = Clock()
    now[0] += 7
    with clock.doing('steps'):
        with clock.taking_step():
            with clock.doing('waiting for data'):
                now[0] += 1
            now[0] += 2
        with clock.doing('evaluating'):
            now[0] += 50
        assert (clock.num_steps, clock.data_wait_seconds) == (1, 1)
        assert (clock.seconds, clock.seconds_of_last_step) == (3, 3)
        clock.restart()
        assert (clock.num_steps, clock.data_wait_seconds, clock.seconds) == (0, 0, 0)
    clock.add({'steps': 100, 'lost after stops': 20})
    assert clock.totals == {
        'starting': 7,
        'steps': 102,
        'waiting for data': 1,
        'evaluating': 50,
        'lost after stops': 20,
    }


def test_steps_with_other_metrics_leave_an_interval():
    """A checkpoint from before a metric existed, or from before it was removed."""
    for restored in ({'loss': 1.0}, {'loss': 1.0, 'entropy': 3.0, 'batch_crc32': 7.0}):
        interval = Interval([restored])
        interval.add({'loss': 2.0}, {'a': np.arange(2)}, position=np.zeros(4))
        interval.fetch()
        assert [metrics['loss'] for metrics in interval.metrics] == [2.0]
