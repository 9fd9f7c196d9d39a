"""A train step on CPUs is compiled without sums in stages, and without YNNPACK but for products of bfloat16."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model
import optimizer
import partition
from run import compiler

YNNPACK = 'ynn_fusion'  # in the text of a program that uses it


@pytest.fixture
def mesh():
    return partition.make_mesh(data=1, model=1, devices=jax.devices()[:1])


ARRAY = jax.ShapeDtypeStruct((256, 256), jnp.float32)


def compile_sum(options):
    return jax.jit(lambda x: jnp.tanh(x @ x).sum(0)).lower(ARRAY).compile(options).as_text()


def test_ynnpack_is_left_out(mesh, monkeypatch):
    assert YNNPACK in compile_sum(None), 'XLA does not use YNNPACK: compiler.py can go'
    for dtype, multiplies_bfloat16 in (('float32', True), ('bfloat16', False)):
        monkeypatch.setattr(compiler, 'multiplies_bfloat16', lambda has=multiplies_bfloat16: has)
        assert YNNPACK not in compile_sum(compiler.options(mesh, dtype))


def test_products_of_bfloat16_are_left_to_ynnpack(mesh, monkeypatch):
    """Not their sums; where the CPU has instructions for them."""
    monkeypatch.setattr(compiler, 'multiplies_bfloat16', lambda: True)
    options = compiler.options(mesh, 'bfloat16')
    matrix = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    multiply = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
    assert YNNPACK in multiply.lower(matrix).compile(options).as_text()
    program = jax.jit(lambda x: jnp.tanh(x).sum(0)).lower(ARRAY).compile(options)
    assert YNNPACK not in program.as_text()


@pytest.mark.skipif(
    not compiler.multiplies_bfloat16(), reason='this CPU does not multiply bfloat16'
)
def test_a_product_and_its_gradients_are_of_bfloat16(mesh):
    """All three, from matrices that are computed, as in a step: none is converted to float32."""
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 128), (128, 256)))

    def total(x, kernel):
        x, kernel = (jnp.tanh(array).astype(jnp.bfloat16) for array in (x, kernel))
        return jnp.sin(model.matmul(x, kernel).astype(jnp.float32)).sum()

    program = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(x, kernel)
    text = program.compile(compiler.options(mesh, 'bfloat16')).as_text()
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
    monkeypatch.setattr(compiler.Path, 'read_text', lambda self: f'processor : 0\n{flags}\n')
    assert compiler.multiplies_bfloat16.__wrapped__() == is_found


def test_a_system_without_cpuinfo(monkeypatch):
    def read_text(self):
        raise FileNotFoundError

    monkeypatch.setattr(compiler.Path, 'read_text', read_text)
    assert not compiler.multiplies_bfloat16.__wrapped__()


@pytest.mark.parametrize('name', [compiler.YNNPACK, compiler.WITHOUT_PASSES])
def test_flags_of_the_user_have_precedence(name, mesh, monkeypatch):
    others = compiler.options(mesh, 'float32').keys() - {name}
    monkeypatch.setenv('XLA_FLAGS', f'--xla_dump_to=/tmp --{name}=individual_dot')
    assert compiler.options(mesh, 'float32').keys() == others


def test_xla_that_lacks_the_option(mesh, monkeypatch):
    monkeypatch.setattr(compiler, 'YNNPACK', 'xla_cpu_no_such_option')
    assert not compiler.knows_ynnpack.__wrapped__(mesh)


def test_sums_are_not_made_in_stages(mesh):
    windows = 'reduce-window'
    without_ynnpack = compile_sum({compiler.YNNPACK: ''})
    assert windows in without_ynnpack, 'XLA has no such stages: this option can go'
    for dtype in model.DTYPES:
        assert windows not in compile_sum(compiler.options(mesh, dtype))


def gradients(f, options, grad, *arrays):
    program = jax.jit(lambda grad, *arrays: jax.vjp(f, *arrays)[1](grad))
    return program.lower(grad, *arrays).compile(options)(grad, *arrays)


def relative_error(found, expected):
    return np.linalg.norm(np.float64(found) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize('dtype, tolerance', [('bfloat16', 0.005), ('float32', 1e-5)])
def test_the_gradient_of_a_norms_scale_is_summed_in_float32(dtype, tolerance, mesh):
    """In bfloat16 its 4,096 terms lose 6 %, and 2 % in stages."""
    random = np.random.default_rng(0)
    x_bTD = jnp.array(random.normal(size=(8, 512, 64)), dtype)
    grad_bTD = jnp.array(random.normal(0.3, 1, x_bTD.shape), dtype)
    _, found_D = gradients(
        lambda x_bTD, scale_D: model.normalize(x_bTD, scale_D, dtype),
        compiler.options(mesh, dtype),
        grad_bTD,
        x_bTD,
        jnp.ones(64),
    )
    x_bTD, grad_bTD = np.float64(x_bTD), np.float64(grad_bTD)
    rms_bT1 = np.sqrt(np.square(x_bTD).mean(axis=-1, keepdims=True) + 1e-6)
    assert relative_error(found_D, (grad_bTD * x_bTD / rms_bT1).sum((0, 1))) < tolerance


@pytest.mark.parametrize('dtype, tolerance', [('bfloat16', 0.02), ('float32', 1e-5)])
def test_the_gradients_of_attention_weights_are_summed_in_float32(dtype, tolerance, mesh):
    """By the logits over 2,048 keys, which bfloat16 gets wrong, and by the bias over 32 rows: 0.7 %."""
    random = np.random.default_rng(0)
    logits_bhTM = jnp.array(random.normal(size=(32, 2, 4, 2048)), dtype)
    relpos_1hTM = jnp.array(random.normal(size=(1, 2, 4, 2048)), dtype)
    grad_bhTM = jnp.array(random.normal(3, 1, logits_bhTM.shape), dtype)
    mask_b1TM = jnp.ones((32, 1, 4, 2048), bool)
    found = gradients(
        lambda logits_bhTM, relpos_1hTM: model.attention_weights(
            logits_bhTM, mask_b1TM, relpos_1hTM, dtype
        ),
        compiler.options(mesh, dtype),
        grad_bhTM,
        logits_bhTM,
        relpos_1hTM,
    )
    exp_bhTM = np.exp(np.float64(logits_bhTM) + np.float64(relpos_1hTM))
    probs_bhTM = exp_bhTM / exp_bhTM.sum(axis=-1, keepdims=True)
    weighted_bhTM = probs_bhTM * np.float64(grad_bhTM)
    expected_bhTM = weighted_bhTM - probs_bhTM * weighted_bhTM.sum(axis=-1, keepdims=True)
    assert relative_error(found[0], expected_bhTM) < tolerance
    expected_1hTM = np.float64(found[0]).sum(axis=0, keepdims=True)
    assert relative_error(found[1], expected_1hTM) < tolerance / 5


@pytest.mark.parametrize('shape', [(8192, 2048), (2048, 8192), (4, 32128), (3, 700, 900), (5,), ()])
@pytest.mark.parametrize('dtype', model.DTYPES)
def test_a_norm_is_exact(dtype, shape, mesh):
    """Also that of a large matrix, of which XLA would lose a hundredth if it added up all in one sum."""
    x = np.random.default_rng(0).uniform(0.5, 1, shape).astype(np.float32)
    tree = {'x': jnp.array(x), 'y': jnp.ones(3)}
    norm = jax.jit(optimizer.norm).lower(tree).compile(compiler.options(mesh, dtype))
    expected = np.sqrt(np.square(x, dtype=np.float64).sum() + 3)
    np.testing.assert_allclose(norm(tree), expected, rtol=1e-6)
