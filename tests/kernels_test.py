"""Each form of a function gives the numbers of the plain one, and sums are those of float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from small_models import run_config

import kernels
import model
import optimizer
import partition
import train
from prepare import make_spec

TREE_REDUCTION = {'xla_disable_hlo_passes': 'tree_reduction_rewriter'}
EMBEDDING = 'token_embedder/embedding'


@pytest.fixture
def mesh():
    return partition.make_mesh(data=1, model=1, devices=jax.devices()[:1])


def relative_error(found, expected):
    return np.linalg.norm(np.float64(found) - expected) / np.linalg.norm(expected)


def sums_of(x, tree):
    return {
        'squares': jnp.sum(x * x),
        'magnitude': jnp.mean(jnp.abs(x)),
        'std': jnp.std(x),
        'norm': optax.global_norm(tree),
    }


@pytest.mark.slow
def test_what_a_user_adds_to_a_step_is_what_it_says(monkeypatch):
    """Sums of 8,192 x 2,048 numbers of mean 1. XLA adds them up in stages, unless it is told not to."""
    monkeypatch.setitem(
        optimizer.OPTIMIZERS,
        'lamb',
        lambda config, learning_rate: optax.chain(
            optax.clip_by_global_norm(1.0), optax.lamb(learning_rate)
        ),
    )
    plain_step = train.train_step

    def step(spec, state, batch):
        new, metrics = plain_step(spec, state, batch)
        return new, metrics | sums_of(state.params[EMBEDDING], state.params)

    monkeypatch.setattr(train, 'train_step', step)
    config = run_config(1, 1, vocab_size=8192, emb_dim=2048, num_heads=1, mlp_dim=8)
    config.optimizer.name = 'lamb'
    config.train.batch_size = 1
    config.data.lengths.update(inputs=8, targets=8)
    spec = make_spec(config, devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    params = {}
    for path, x in spec.state_shapes.params.items():
        params[path] = rng.uniform(0.5, 1.5, x.shape).astype(np.float32)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), spec.state_shapes)
    batch = {}
    for name, (length, _) in spec.features.items():
        batch[name] = np.ones((1, length), np.int32)
    batch = partition.place_rows(spec.mesh, batch)
    shardings = partition.shardings(spec.mesh, spec.state_specs)
    state = jax.device_put(zeros._replace(params=params), shardings)
    _, found = train.compile_step(spec)(state, batch)
    x = np.float64(params[EMBEDDING])
    squares = sum(np.square(np.float64(x)).sum() for x in params.values())
    expected = {
        'squares': np.square(x).sum(),
        'magnitude': np.abs(x).mean(),
        'std': x.std(),
        'norm': np.sqrt(squares),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
    options = kernels.compiler_options(spec.mesh, 'float32') | TREE_REDUCTION
    one_after_another = jax.jit(sums_of).lower(params[EMBEDDING], params).compile(options)
    for name, value in one_after_another(params[EMBEDDING], params).items():
        assert relative_error(value, expected[name]) > 1e-5, name


SHAPES = [(8192, 2048), (2048, 8192), (4, 32128), (3, 704, 900), (33,), (5,), (1, 1), ()]


@pytest.mark.parametrize('shape', SHAPES)
def test_sums_and_means_are_exact(shape, mesh):
    """In stages as on a CPU, and plain as elsewhere."""
    x = np.random.default_rng(0).uniform(0.5, 1, shape).astype(np.float32)

    def numbers(x):
        found = {'sum': kernels.sum(x), 'norm': optimizer.norm({'x': x, 'y': jnp.ones(3)})}
        for axis in range(x.ndim):
            for keepdims in (False, True):
                found[f'mean {axis} {keepdims}'] = kernels.mean(x, axis, keepdims)
        return found

    exact = np.float64(x)
    expected = {'sum': exact.sum(), 'norm': np.sqrt(np.square(exact).sum() + 3)}
    for axis in range(x.ndim):
        for keepdims in (False, True):
            expected[f'mean {axis} {keepdims}'] = exact.mean(axis, keepdims=keepdims)
    options = kernels.compiler_options(mesh, 'float32')
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        in_stages = jax.jit(numbers).lower(x).compile(options)(x)
    plain = jax.jit(lambda x: numbers(x))(x)
    for found in (in_stages, plain):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


def test_arrays_that_devices_share_are_summed_plainly():
    """In stages, XLA would gather a dimension of 96 that two devices share."""
    mesh = partition.make_mesh(data=1, model=2, devices=jax.devices()[:2])
    x = jnp.arange(96 * 64.0).reshape(96, 64)
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P('model', None)))

    def numbers(x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return kernels.sum(x), kernels.mean(x, axis=0)

    program = jax.jit(numbers).lower(x).compile()
    assert 'all-reduce' in program.as_text() and 'all-gather' not in program.as_text()
    total, mean = program(x)
    assert total == np.asarray(x).sum()
    np.testing.assert_allclose(mean, np.asarray(x).mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shape', [(2, 3, 4, 512), (7, 96), (5, 33), (4,), (2, 0, 3), (2, 0)])
def test_softmax_is_that_of_jax(shape, dtype, mesh):
    logits = jnp.array(np.random.default_rng(0).normal(0, 3, shape), dtype)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = jax.jit(kernels.softmax)(logits)
    assert found.dtype == dtype
    tolerance = 1e-6 if dtype == 'float32' else 2**-8
    np.testing.assert_allclose(
        np.float32(found), np.float32(jax.nn.softmax(logits)), rtol=tolerance, atol=1e-7
    )


def gradients(f, mesh, grad, *arrays):
    program = jax.jit(lambda grad, *arrays: jax.vjp(f, *arrays)[1](grad))
    options = kernels.compiler_options(mesh, grad.dtype.name)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return program.lower(grad, *arrays).compile(options)(grad, *arrays)


@pytest.mark.parametrize('dtype, tolerance', [('bfloat16', 0.005), ('float32', 1e-5)])
def test_the_gradient_of_a_norms_scale_is_summed_in_float32(dtype, tolerance, mesh):
    """In bfloat16 its 4,096 terms lose 6 %, and 2 % in stages."""
    random = np.random.default_rng(0)
    x_bTD = jnp.array(random.normal(size=(8, 512, 64)), dtype)
    grad_bTD = jnp.array(random.normal(0.3, 1, x_bTD.shape), dtype)
    _, found_D = gradients(
        lambda x_bTD, scale_D: model.normalize(x_bTD, scale_D, dtype),
        mesh,
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
        mesh,
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


@pytest.mark.parametrize(
    'equation, rows, columns',
    [
        ('bTD,Df->bTf', (5,), (7,)),
        ('bTD,DhK->bThK', (5,), (2, 3)),
        ('bThK,hKD->bTD', (2, 3), (5,)),
        ('bTD,vD->bTv', (5,), (7,)),
    ],
)
@pytest.mark.parametrize('length', [4, 30])
@pytest.mark.parametrize('dtype, tolerance', [('float32', 1e-5), ('bfloat16', 2**-8)])
def test_products_on_a_cpu_are_those_of_other_devices(
    equation, rows, columns, length, dtype, tolerance, monkeypatch
):
    """The product and both gradients, as matrices and as the einsum; bfloat16 is rounded once."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, length, *rows)), dtype)
    shape = (*columns, *rows) if equation == 'bTD,vD->bTv' else (*rows, *columns)
    kernel = jnp.asarray(rng.standard_normal(shape), dtype)
    gradient = jnp.asarray(rng.standard_normal((3, length, *columns)), dtype)

    def compute(is_on_cpu, *arrays):
        monkeypatch.setattr(kernels, 'is_on_cpu', lambda: is_on_cpu)
        kernels.einsum.clear_cache()
        x, kernel, gradient = arrays
        y, gradients = jax.vjp(functools.partial(kernels.einsum, equation), x, kernel)
        return y, *gradients(gradient)

    found = compute(True, x, kernel, gradient)
    expected = compute(False, *(array.astype(jnp.float32) for array in (x, kernel, gradient)))
    assert found[0].shape == (3, length, *columns)
    assert {array.dtype for array in found} == {jnp.dtype(dtype)}
    found = jax.tree.map(lambda array: array.astype(jnp.float32), found)
    chex.assert_trees_all_close(found, expected, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize('rows, columns', [((5,), (7,)), ((5,), (2, 3)), ((2, 3), (5,))])
@pytest.mark.parametrize('length', [0, 1, 4, 30])
def test_a_kernel_stored_column_by_column(rows, columns, length, monkeypatch):
    """The products of few rows, of many, and of none."""
    monkeypatch.setattr(kernels, 'is_on_cpu', lambda: True)
    letters = {(5,): 'D', (7,): 'f', (2, 3): 'hK'}
    equation = f'bT{letters[rows]},{letters[rows]}{letters[columns]}->bT{letters[columns]}'
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, length, *rows)).astype(np.float32)
    kernel = rng.standard_normal((*rows, *columns)).astype(np.float32)
    matrix = kernel.reshape(np.prod(rows), -1)
    stored = kernels.Columns(jnp.asarray(matrix.T)).reshape(*kernel.shape)
    kernels.einsum.clear_cache()
    found = kernels.einsum(equation, x, stored)
    kernels.einsum.clear_cache()
    np.testing.assert_allclose(found, np.einsum(equation, x, kernel), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('spec', [jax.P(None, 'model'), jax.P('model', None)])
def test_kernels_for_decoding(spec):
    """Only those that are named; split as before, and in the dtype of their products."""
    mesh = partition.make_mesh(data=2, model=2, devices=jax.devices()[:4])
    x = np.arange(8 * 6, dtype=np.float32).reshape(8, 6)
    params = {'a/kernel': x, 'b/kernel': x}
    specs = dict.fromkeys(params, spec)
    params = jax.device_put(params, partition.shardings(mesh, specs))
    columns = kernels.for_decoding(mesh, params, {'b/kernel': 'bfloat16'})
    params |= columns
    assert columns.keys() == {'b/kernel'}
    stored = columns['b/kernel'].kernel_FD
    assert stored.dtype == 'bfloat16'
    np.testing.assert_array_equal(stored.astype('float32'), x.T)
    found = kernels.specs_of(params, specs)
    assert found == {'a/kernel': spec, 'b/kernel': jax.P(*spec[::-1])}
    sharding = jax.NamedSharding(mesh, found['b/kernel'])
    assert stored.sharding.is_equivalent_to(sharding, ndim=2)


def test_kernels_for_decoding_elsewhere_are_those_of_training(monkeypatch, mesh):
    monkeypatch.setattr(kernels, 'is_on_cpu', lambda mesh: False)
    assert kernels.for_decoding(mesh, {'a/kernel': jnp.ones([2, 3])}, {'a/kernel': 'float32'}) == {}


# Dimensions in full blocks, and not; of these numbers many are equal.
@pytest.mark.parametrize('shape', [(3, 1024), (2, 2, 384), (256,), (3, 1000), (1, 5), (0, 256)])
def test_the_largest_numbers_are_those_of_jax(shape):
    x = np.random.default_rng(0).integers(0, 40, shape).astype(np.float32)
    for k in (1, 2, 5):
        found = jax.jit(lambda x, k=k: kernels.top_k(x, k))(x)
        for ours, expected in zip(found, lax.top_k(x, k), strict=True):
            np.testing.assert_array_equal(ours, expected)


def test_compiler_options(mesh, monkeypatch):
    """A CPU's step has them, unless XLA lacks the option or the user's flags set it."""
    assert kernels.compiler_options(mesh, 'float32') == {kernels.YNNPACK: ''}
    with monkeypatch.context() as patch:
        patch.setenv('XLA_FLAGS', f'--{kernels.YNNPACK}=individual_dot')
        assert not kernels.compiler_options(mesh, 'float32')
    monkeypatch.setattr(kernels, 'YNNPACK', 'xla_cpu_no_such_option')
    assert not kernels.compiler_options(mesh, 'float32')
