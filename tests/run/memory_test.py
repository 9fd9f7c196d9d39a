"""A step is compiled ahead of time in as few microbatches as fit into memory."""

import json
import types

import jax
import numpy as np
import pytest
from runs import run, small_config

import kernels
import partition
import train
from configs import base
from messages import Refused
from prepare import make_spec, prepare
from run import memory as plan


def compiled_bytes(spec):
    """Return the memory that the spec's step takes."""
    state_bytes = plan.num_state_bytes(spec.state_shapes)
    return plan.step_bytes(train.compile_step(spec), spec.mesh, state_bytes)


@pytest.mark.slow
def test_microbatches_to_fit_the_memory(corpus, tmp_path, monkeypatch, capsys):
    """A number that does not fit is refused; auto takes the smallest that fits."""
    config = small_config(corpus, steps=1)
    config.train.batch_size = 4  # with 2, the sums of gradients outweigh activations
    config.model.dropout_rate = 0.0  # compiles twice as fast
    needs = {n: compiled_bytes(make_spec(config, n)) for n in (1, 2)}
    assert needs[1] > needs[2]
    monkeypatch.setattr(plan, 'memory_limit', lambda mesh: (needs[1] + needs[2]) / 2)
    config.train.num_microbatches = 1
    with pytest.raises(Refused, match='num_microbatches=1.* auto'):
        prepare(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['lock']
    config.train.num_microbatches = 'auto'
    run(config, tmp_path)
    assert 'takes 2' in capsys.readouterr().out
    assert json.loads((tmp_path / 'config.json').read_text())['train']['num_microbatches'] == 2


class FakeStep:
    """A compiled step that needs some bytes."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes

    def memory_analysis(self):
        return types.SimpleNamespace(
            argument_size_in_bytes=10,
            temp_size_in_bytes=self.num_bytes - 10,
            output_size_in_bytes=7,
            alias_size_in_bytes=7,
        )


def fit(num_bytes, limit, monkeypatch, requested='auto', num_rows=8):
    """Return the plan for steps that need {count: bytes}, and the counts that were compiled."""
    compiled = []

    def compile_step(n):
        compiled.append(n)
        return FakeStep(num_bytes[n])

    monkeypatch.setattr(plan, 'memory_limit', lambda mesh: limit)
    mesh = partition.make_mesh(data=1)
    planned = plan.fit_step(compile_step, num_rows, requested, mesh, state_bytes=0)
    return planned, compiled


def test_the_first_number_of_microbatches_that_fits(monkeypatch):
    planned, compiled = fit({1: 100, 2: 60, 4: 40}, limit=50, monkeypatch=monkeypatch)
    assert planned.num_microbatches == 4
    assert planned.step.num_bytes == 40
    assert 'so it takes 4' in planned.note
    assert compiled == [1, 2, 4]
    planned, compiled = fit({1: 100}, limit=100, monkeypatch=monkeypatch)
    assert (planned.num_microbatches, planned.note, compiled) == (1, '', [1])


def test_a_step_that_a_tpu_refuses(monkeypatch):
    """XLA for TPUs raises an error where the memory of a device is too small: so much is needed."""
    message = (
        'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries '
        '({}) exceeds available HBM (15.75G).'
    )

    def compile_step(n):
        if n < 8:
            raise jax.errors.JaxRuntimeError(message.format({1: '81.74G', 4: '16128.5M'}[n]))
        return FakeStep(10 * 2**30)

    monkeypatch.setattr(plan, 'memory_limit', lambda mesh: 14 * 2**30)
    mesh = partition.make_mesh(1)
    planned = plan.fit_step(compile_step, 16, 'auto', mesh, state_bytes=0)
    assert planned.num_microbatches == 8
    assert '1 microbatch(es) needs 81.7 GiB' in planned.note


def test_what_cannot_fit_is_not_compiled(monkeypatch):
    """Half of the rows need at least about half of the memory."""
    planned, compiled = fit({1: 1000, 8: 100}, limit=120, monkeypatch=monkeypatch)
    assert planned.num_microbatches == 8
    assert compiled == [1, 8]


def test_a_requested_number_that_does_not_fit(monkeypatch):
    with pytest.raises(Refused, match='num_microbatches=2.* auto'):
        fit({2: 60}, 50, monkeypatch, requested=2, num_rows=4)
    with pytest.raises(Refused, match='8 do not fit either'):
        fit({1: 60, 2: 60, 4: 60, 8: 60}, 50, monkeypatch)


@pytest.mark.parametrize('data, fsdp, model', [(4, 1, 1), (1, 1, 4), (2, 2, 2)])
def test_the_state_of_one_device(monkeypatch, data, fsdp, model):
    """What is not split over 'fsdp' and 'model' is whole on every device: the sum of the arrays that it has."""
    config = base.get_config()
    config.model.update(num_heads=4, num_encoder_layers=1, num_decoder_layers=1)
    config.model.update(vocab_size=256, emb_dim=32, head_dim=8, mlp_dim=64)
    config.mesh.update(data=data, fsdp=fsdp, model=model)
    spec = make_spec(config)
    shardings = partition.shardings(spec.mesh, spec.state_specs)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), spec.state_shapes)
    state = jax.device_put(zeros, shardings)
    num_bytes = 0
    for x in jax.tree.leaves(state):
        num_bytes += x.addressable_shards[0].data.nbytes
    monkeypatch.setattr(
        kernels, 'is_on_cpu', lambda mesh: False
    )  # as if each had a memory of its own
    monkeypatch.setattr(plan, 'memory_limit', lambda mesh: num_bytes)
    plan.check_state_fits(spec.mesh, spec.state_shapes, spec.state_specs)
    monkeypatch.setattr(plan, 'memory_limit', lambda mesh: num_bytes - 1)
    with pytest.raises(Refused, match='mesh.fsdp'):
        plan.check_state_fits(spec.mesh, spec.state_shapes, spec.state_specs)


@pytest.mark.parametrize(
    'line, files, expected',
    [
        (
            '4:memory:/slurm/job_7/step_0',
            {'memory/slurm/job_7/memory.limit_in_bytes': '5000'},
            [5000],
        ),
        ('4:cpu,memory:/job', {'memory/memory.limit_in_bytes': '7000'}, [7000]),  # a container
        ('0::/user/job', {'user/job/memory.max': 'max', 'user/memory.max': '900'}, [900]),
        ('0::/', {'memory.max': '800'}, [800]),
        ('3:cpuset:/job', {'job/memory.max': '1'}, []),
    ],
)
def test_the_limits_of_a_job(tmp_path, line, files, expected):
    """The process's own cgroup and every level above it, in both versions of cgroups."""
    for name, text in {'proc/self/cgroup': line, **files}.items():
        file = tmp_path / (name if name.startswith('proc') else f'sys/fs/cgroup/{name}')
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'{text}\n')
    assert plan.cgroup_limits(tmp_path) == expected
