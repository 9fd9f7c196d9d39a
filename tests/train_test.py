"""Trainers and the programs that they share."""

import dataclasses

from runs import small_config

import train
from modes.train import make_trainer


def test_trainers_are_compared_by_value():
    """Runs with the same settings share the compiled step, whatever their text."""
    trainer = make_trainer(small_config('a.txt'))
    same = make_trainer(small_config('b.txt', steps=9))
    assert trainer == same
    assert train.jit_step(trainer) is train.jit_step(same)
    others = [dataclasses.replace(trainer, seed=1), make_trainer(small_config('a.txt'), 2)]
    config = small_config('a.txt')
    config.optimizer.decay_rate = 0.7
    others.append(make_trainer(config))
    for other in others:
        assert trainer != other
        assert train.jit_step(trainer) is not train.jit_step(other)
