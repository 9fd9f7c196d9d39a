"""Trainers and the programs that they share."""

import dataclasses

from runs import small_config

import train
from prepare import make_spec


def test_trainers_are_compared_by_value():
    """Runs with the same settings share the compiled step, whatever their text."""
    spec = make_spec(small_config('a.txt'))
    same = make_spec(small_config('b.txt', steps=9))
    assert spec == same
    assert train.jit_step(spec) is train.jit_step(same)
    others = [dataclasses.replace(spec, seed=1), make_spec(small_config('a.txt'), 2)]
    config = small_config('a.txt')
    config.optimizer.decay_rate = 0.7
    others.append(make_spec(config))
    for other in others:
        assert spec != other
        assert train.jit_step(spec) is not train.jit_step(other)
