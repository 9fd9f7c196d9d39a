"""A step is compiled ahead of time in as few microbatches as fit into memory."""

import json

import pytest
from runs import run, small_config

import plan
import train


def compiled_bytes(trainer):
    """Return the memory that the trainer's step takes."""
    state_bytes = plan.num_state_bytes(trainer.shapes)
    return plan.step_bytes(train.compile_step(trainer), trainer.mesh, state_bytes)


def test_microbatches_to_fit_the_memory(corpus, tmp_path, monkeypatch, capsys):
    """A number that does not fit is refused and the error names the smallest that fits; auto takes that."""
    config = small_config(corpus)
    needs = {n: compiled_bytes(train.make_trainer(config, n)) for n in (2, 4)}
    assert needs[2] > needs[4]
    monkeypatch.setattr(plan, 'memory_limit', lambda mesh: (needs[2] + needs[4]) / 2)
    config.train.num_microbatches = 2
    with pytest.raises(ValueError, match='num_microbatches=2: a step .* GiB .*; use 4, or auto'):
        train.prepare(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['lock']
    config.train.num_microbatches = 'auto'
    run(config, tmp_path)
    assert 'takes 4' in capsys.readouterr().out
    assert json.loads((tmp_path / 'config.json').read_text())['train']['num_microbatches'] == 4


def test_a_model_that_does_not_fit(corpus, tmp_path, monkeypatch):
    config = small_config(corpus)
    state_bytes = plan.num_state_bytes(train.make_trainer(config).shapes)
    monkeypatch.setattr(plan, 'memory_limit', lambda mesh: state_bytes - 1)
    with pytest.raises(
        ValueError, match='optimizer state take .*: use more devices or a smaller model'
    ):
        train.prepare(config, tmp_path)
    monkeypatch.setattr(plan, 'memory_limit', lambda mesh: state_bytes + 1)
    with pytest.raises(ValueError, match='use more devices or a smaller train.batch_size'):
        train.prepare(config, tmp_path)


@pytest.mark.parametrize('requested', [3, 0, 8])
def test_a_number_that_does_not_divide_the_rows(corpus, tmp_path, requested):
    config = small_config(corpus)
    config.train.num_microbatches = requested
    with pytest.raises(ValueError, match="use 'auto' or one of 1, 2, 4"):
        train.prepare(config, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_counts_begin_with_the_requested_one():
    assert plan.microbatch_counts('auto', num_rows=12) == [1, 2, 3, 4, 6, 12]
    assert plan.microbatch_counts(3, num_rows=12) == [3, 4, 6, 12]
