"""A train step on CPUs is compiled without YNNPACK."""

import jax
import jax.numpy as jnp
import pytest

import partition
from run import compiler

YNNPACK = 'ynn_fusion'  # in the text of a program that uses it


@pytest.fixture
def mesh():
    return partition.make_mesh(data=1, model=1, devices=jax.devices()[:1])


def compile_sum(options):
    array = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    return jax.jit(lambda x: jnp.tanh(x @ x).sum(0)).lower(array).compile(options).as_text()


def test_ynnpack_is_left_out(mesh):
    assert YNNPACK in compile_sum(None), 'XLA does not use YNNPACK: compiler.py can go'
    assert YNNPACK not in compile_sum(compiler.options(mesh))


def test_flags_of_the_user_have_precedence(mesh, monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', f'--{compiler.OPTION}=individual_dot')
    assert compiler.options(mesh) is None


def test_xla_that_lacks_the_option(mesh, monkeypatch):
    monkeypatch.setattr(compiler, 'OPTION', 'xla_cpu_no_such_option')
    assert not compiler.is_known.__wrapped__(mesh)
