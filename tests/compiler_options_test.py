"""A train step on CPUs is compiled without YNNPACK but for products of bfloat16."""

import re

import jax
import jax.numpy as jnp
import pytest

import kernels
import partition

YNNPACK = 'ynn_fusion'  # in the text of a program that uses it


@pytest.fixture
def mesh():
    return partition.make_mesh(data=1, model=1, devices=jax.devices()[:1])


ARRAY = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def compile_sum(options):
    return jax.jit(lambda x: jnp.tanh(x @ x).sum(0)).lower(ARRAY).compile(options).as_text()


def test_ynnpack_is_left_out(mesh, monkeypatch):
    assert YNNPACK in compile_sum(None), 'XLA does not use YNNPACK: kernels.compiler_options can go'
    for dtype, multiplies_bfloat16 in (('float32', True), ('bfloat16', False)):
        monkeypatch.setattr(kernels, 'multiplies_bfloat16', lambda has=multiplies_bfloat16: has)
        assert YNNPACK not in compile_sum(kernels.compiler_options(mesh, dtype))


def test_products_of_bfloat16_are_left_to_ynnpack(mesh, monkeypatch):
    """Not their sums; where the CPU has instructions for them."""
    monkeypatch.setattr(kernels, 'multiplies_bfloat16', lambda: True)
    options = kernels.compiler_options(mesh, 'bfloat16')
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    assert YNNPACK in multiply.lower(matrix).compile(options).as_text()
    program = jax.jit(lambda x: jnp.tanh(x).sum(0)).lower(ARRAY).compile(options)
    assert YNNPACK not in program.as_text()


@pytest.mark.skipif(not kernels.multiplies_bfloat16(), reason='this CPU does not multiply bfloat16')
def test_a_product_and_its_gradients_are_of_bfloat16(mesh):
    """All three, from matrices that are computed, as in a step: none is converted to float32."""
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 128), (128, 256)))

    def total(x, kernel):
        x, kernel = (jnp.tanh(array).astype(jnp.bfloat16) for array in (x, kernel))
        return jnp.sin(kernels.matmul(x, kernel).astype(jnp.float32)).sum()

    program = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(x, kernel)
    text = program.compile(kernels.compiler_options(mesh, 'bfloat16')).as_text()
    with_products = [part for part in text.split('\n\n') if re.search(r' dot\(', part)]
    assert len(with_products) == 3
    for part in with_products:
        assert set(re.findall(r'= (\w+)\[\S+ parameter\(', part)) == {'bf16'}, part


@pytest.mark.parametrize(
    'flags, is_found',
    [
        ('flags\t\t: fma avx2 avx512_bf16 avx512_vbmi', True),
        ('flags : avx512f amx_bf16 amx_tile', True),
        ('Features\t: fp asimd sve bf16 i8mm', True),
        ('Features\t: fp asimd svebf16x', False),
        ('flags : fma avx2 avx512f', False),
        ('', False),
    ],
)
def test_instructions_for_bfloat16(flags, is_found, monkeypatch):
    monkeypatch.setattr(kernels.Path, 'read_text', lambda self: f'processor : 0\n{flags}\n')
    assert kernels.multiplies_bfloat16.__wrapped__() == is_found


def test_a_system_without_cpuinfo(monkeypatch):
    def read_text(self):
        raise FileNotFoundError

    monkeypatch.setattr(kernels.Path, 'read_text', read_text)
    assert not kernels.multiplies_bfloat16.__wrapped__()


def test_flags_of_the_user_have_precedence(mesh, monkeypatch):
    assert kernels.compiler_options(mesh, 'float32').keys() == {kernels.YNNPACK}
    monkeypatch.setenv('XLA_FLAGS', f'--xla_dump_to=/tmp --{kernels.YNNPACK}=individual_dot')
    assert not kernels.compiler_options(mesh, 'float32')


def test_xla_that_lacks_the_option(mesh, monkeypatch):
    monkeypatch.setattr(kernels, 'YNNPACK', 'xla_cpu_no_such_option')
    assert not kernels.compiler_options(mesh, 'float32')
