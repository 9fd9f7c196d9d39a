"""The forms for GPUs give the numbers of the plain ones, on a CPU: cuDNN's attention as JAX's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import first_quick
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import PartitionSpec as P
from small_models import (
    FAMILIES,
    as_one_device,
    assert_close,
    make_mesh,
    random_batch,
    random_params,
    run_config,
    t5_config,
)

import kernels
import kernels_gpu
import model
import partition
import train
from prepare import make_spec

on_cpu = functools.partial(kernels_gpu.attention, implementation='xla')
# The codes are summed with the logits, near 2,000, where float32 has steps of 2^-13.
TOLERANCES = {'packed': 1e-4, 'padded': 1e-6}


def plain(q_bThK, k_bhKM, v_bhKM, relpos_1hTM, queries_bT, keys_bM, causal):
    """model.Attention.attend without dropout."""
    mask = model.segment_mask(queries_bT, keys_bM, causal)
    logits_bhTM = jnp.einsum('bThK,bhKM->bhTM', q_bThK, k_bhKM)
    probs_bhTM = model.attention_weights(logits_bhTM, mask.dense(), relpos_1hTM, q_bThK.dtype)
    return jnp.einsum('bhTM,bhKM->bThK', probs_bhTM, v_bhKM)


def segments_of(rng, rows, num_rows, length):
    """Rows with padding at their ends, and of several segments unless they are 'padded'; the last one is empty."""
    ids = np.sort(rng.integers(1, 5, (num_rows, length)), axis=1).astype(np.int32)
    ids[np.arange(length) >= rng.integers(length // 2, length + 1, (num_rows, 1))] = 0
    ids[-1] = 0
    return ids > 0 if rows == 'padded' else ids


def outputs_and_gradients(attend, mesh, causal, *arrays):
    """heads_bThK and the gradients of q, k, v and bias, of a loss of the heads that see keys."""

    def on_device(q, k, v, relpos, queries, keys, weights):
        sees_keys_bT = model.segment_mask(queries, keys).dense().any(axis=(1, 3))

        def loss(q, k, v, relpos):
            heads = attend(q, k, v, relpos, queries, keys, causal)
            heads = jnp.where(sees_keys_bT[..., None, None], heads, 0)
            return (heads * weights).sum(), heads

        # As the parameters of a step, and as an own model might have it: shared by the devices of 'data'.
        gradients, heads = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(q, k, v, relpos)
        return heads, gradients

    of_q = P(partition.BATCH_AXES, None, 'model')
    of_k = P(partition.BATCH_AXES, 'model')
    of_bias = P(None, 'model')
    in_specs = (of_q, of_k, of_k, of_bias, partition.BATCH, partition.BATCH, of_q)
    out_specs = (of_q, (of_q, of_k, of_k, of_bias))
    f = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(f)(*arrays)


@pytest.mark.parametrize('sizes', [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize('rows', TOLERANCES)
@pytest.mark.parametrize('case', ['encoder', 'decoder', 'cross'])
def test_attention_is_the_plain_one(case, rows, sizes):
    rng = np.random.default_rng(0)
    num_queries, num_keys = (6, 22) if case == 'cross' else (22, 22)
    shapes = [(8, num_queries, 4, 16), (8, 4, 16, num_keys), (8, 4, 16, num_keys)]
    q, k, v = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    weights = rng.normal(size=q.shape).astype(np.float32)
    relpos = rng.normal(size=(1, 4, num_queries, num_keys)).astype(np.float32)
    relpos *= case != 'cross'
    keys = segments_of(rng, rows, 8, num_keys)
    queries = keys if case != 'cross' else segments_of(rng, rows, 8, num_queries)
    arrays = (q, k, v, relpos, queries, keys, weights)
    mesh = make_mesh(sizes[0], sizes[2], sizes[1])
    expected = outputs_and_gradients(plain, mesh, case == 'decoder', *arrays)
    found = outputs_and_gradients(on_cpu, mesh, case == 'decoder', *arrays)
    names = ('heads', ('dq', 'dk', 'dv', 'dbias'))
    for name, x, y in zip(*map(jax.tree.leaves, (names, found, expected)), strict=True):
        scale = np.abs(y).max() * TOLERANCES[rows]
        np.testing.assert_allclose(x, y, rtol=0, atol=scale, err_msg=name)


@pytest.mark.parametrize('start, num_digits', [(0, 4), (10**6, 8)])
def test_segments_have_different_codes(start, num_digits):
    """Keys of another segment have logits that are at least 128 less: their weights are 0 in float32."""
    segments = start + np.arange(8**4)
    empty = jnp.zeros((1, 8**4, 1, 0), jnp.bfloat16)
    codes = np.float32(kernels_gpu.with_codes(empty, segments[None], num_digits))[0, :, 0]
    assert codes.shape[1] == 2 * num_digits and set(np.unique(np.abs(codes))) == {0, 16, 22}
    products = codes @ codes.T
    same = np.diag(products).copy()
    np.fill_diagonal(products, -np.inf)
    assert (same - products.max(axis=1)).min() >= 128


def test_devices_sum_the_gradient_of_a_bias_that_they_share(monkeypatch):
    """JAX would not ask cuDNN for it: without vary_alike, the program has no psum, and the gradient is wrong.

    Nothing here can run cuDNN; JAX traces it, but for its question after the version.
    """
    monkeypatch.setattr(fused_attention_stablehlo, 'check_cudnn_version', lambda: 91000)
    q, k = jnp.ones((8, 6, 4, 16), jnp.bfloat16), jnp.ones((8, 4, 16, 6), jnp.bfloat16)
    bias, segments = jnp.ones((1, 4, 6, 6)), jnp.ones((8, 6), bool)

    def gradient(q, k, v, bias, segments):
        attend = functools.partial(kernels_gpu.attention, q, k, v)
        return jax.grad(lambda bias: attend(bias, segments, segments, False).sum())(bias)

    rows, of_bias = partition.BATCH, P(None, 'model')
    in_specs = (P(*rows, None, 'model'), P(*rows, 'model'), P(*rows, 'model'), of_bias, rows)
    f = jax.shard_map(gradient, mesh=make_mesh(2, 2, 2), in_specs=in_specs, out_specs=of_bias)
    program = str(jax.make_jaxpr(f)(q, k, k, bias, segments))
    assert program.count('psum') == 1
    assert "f32[1,2,6,6]{V:model} = psum_invariant[axes=('data', 'fsdp')]" in program


def test_a_recomputed_function_and_its_gradient(monkeypatch):
    monkeypatch.setattr(kernels, 'is_on_hopper', lambda: True)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(3, 5)), jnp.float32) for _ in range(3)]

    def gated(x, y):
        return model.ACTIVATIONS['gelu'](x) * y

    def both(f, x, y, grad):
        result, pull = jax.vjp(f, x, y)
        return result, pull(grad)

    def on_device(x, y, grad):
        return both(kernels_gpu.recomputed(gated), x, y, grad)

    rows = partition.BATCH
    f = jax.shard_map(on_device, mesh=make_mesh(3, 1), in_specs=rows, out_specs=rows)
    assert_close(jax.jit(f)(*arrays), both(gated, *arrays), 1e-6)
    # Kept for the backward pass: the arrays alone.
    kept = jax.eval_shape(lambda x, y: jax.vjp(kernels_gpu.recomputed(gated), x, y)[1], *arrays[:2])
    assert len(jax.tree.leaves(kept)) == 2


def test_on_which_devices_and_of_which_shapes_attention_is_fused(monkeypatch):
    names = ('NVIDIA H200', 'NVIDIA H100 80GB HBM3', 'NVIDIA GH200 480GB', 'NVIDIA H100 PCIe')
    others = ('NVIDIA A100-SXM4-80GB', 'NVIDIA B200', 'TPU v5', 'cpu')
    assert [x for x in names + others if kernels.HOPPER.match(x)] == [*names]

    def fuses(dtype='bfloat16', num_queries=114, num_keys=512, head_dim=64, has_segments=True):
        q_bThK = jax.ShapeDtypeStruct((2, num_queries, 4, head_dim), dtype)
        k_bhKM = jax.ShapeDtypeStruct((2, 4, head_dim, num_keys), dtype)
        segments = np.ones((2, num_queries)) if has_segments else None
        return kernels.fuses_attention(q_bThK, k_bhKM, segments)

    with jax.sharding.use_abstract_mesh(make_mesh(1, 1).abstract_mesh):
        assert not fuses()
    monkeypatch.setattr(kernels, 'is_on_hopper', lambda: True)
    assert fuses() and fuses(num_queries=2, num_keys=8192, head_dim=112)
    for change in (
        {'dtype': 'float32'},
        {'num_queries': 113},
        {'num_keys': 511},
        {'head_dim': 12},
        {'head_dim': 128},
        {'has_segments': False},  # decoding
    ):
        assert not fuses(**change), change


def step_numbers(config, is_packed, seed=1):
    """The gradients and sums of a step with dropout."""
    batch = random_batch(0)
    if is_packed:
        for stack, name in (
            ('encoder', 'encoder_input_tokens'),
            ('decoder', 'decoder_target_tokens'),
        ):
            of_row = 1 + np.arange(batch[name].shape[1]) // 4
            batch[f'{stack}_segment_ids'] = np.minimum(of_row, 3)[None] * (batch[name] > 0)
    spec = make_spec(config)
    params = random_params(spec.model_config)
    f = jax.jit(functools.partial(train.gradients, spec))
    return jax.tree.map(np.asarray, f(params, batch, np.arange(8), jax.random.key(seed)))


def use_forms_for_gpus(monkeypatch):
    """Return a list to which calls of attention will be added."""
    calls = []

    def attend(*arguments):
        calls.append(arguments)
        return on_cpu(*arguments)

    monkeypatch.setattr(kernels_gpu, 'attention', attend)
    monkeypatch.setattr(kernels, 'fuses_attention', lambda q, k, queries: queries is not None)
    monkeypatch.setattr(kernels, 'is_on_hopper', lambda: True)
    return calls


@pytest.mark.parametrize(
    'module, is_packed',
    first_quick([('', True), ('', False), ('long_t5', True), ('long_t5', False)]),
)
def test_a_step_with_the_forms_for_gpus(module, is_packed, monkeypatch):
    """With dropout, on a mesh, the numbers are those of one device with the plain forms."""
    options = {'module': module, 'options': FAMILIES.get(module, {})}
    expected = step_numbers(run_config(1, 1, **options), is_packed)
    calls = use_forms_for_gpus(monkeypatch)
    found = step_numbers(run_config(2, 2, 2, **options), is_packed)
    assert_close(found, expected, 1e-4 if is_packed else 1e-5)
    for call in calls:
        assert (call[4].dtype == bool) == (not is_packed)


FAMILY_CASES = [
    ({}, 3),
    ({'float32_attention_logits': True}, 0),
    ({'module': 'long_t5'}, 2),
    ({'module': 'grouped_heads', 'options': {'num_kv_heads': 2}}, 3),
    ({'module': 'soft_caps'}, 0),
    ({'module': 't5gemma'}, 0),
]


@pytest.mark.parametrize('settings, num_fused', FAMILY_CASES, ids=str)
def test_families_whose_attention_has_a_form_for_gpus(settings, num_fused, monkeypatch):
    """Of three attentions in a layer of both stacks. Not those with logits or masks of their own."""
    options = {'options': FAMILIES.get(settings.get('module'), {})}
    config = t5_config(**run_config(1, 1, **options | settings).model)
    params = random_params(config)
    calls = use_forms_for_gpus(monkeypatch)

    def forward(params, batch):
        return model.apply(model.logits, params, config, batch)[0]

    forward = as_one_device(forward, (model.param_specs(config), partition.BATCH))
    jax.eval_shape(forward, params, random_batch(0))
    assert len(calls) == num_fused
