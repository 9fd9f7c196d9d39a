"""What the program of a step depends on."""

import dataclasses

from runs import small_config

from prepare import make_spec


def test_a_step_spec_is_compared_by_value():
    """Runs with the same settings have equal ones, whatever their text."""
    spec = make_spec(small_config('a.txt'))
    same = make_spec(small_config('b.txt', steps=9))
    assert spec == same
    others = [dataclasses.replace(spec, seed=1), make_spec(small_config('a.txt'), 2)]
    config = small_config('a.txt')
    config.optimizer.decay_rate = 0.7
    others.append(make_spec(config))
    for other in others:
        assert spec != other
