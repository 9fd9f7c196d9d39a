"""Own models with an attention of their own: a sliding window, grouped heads, and rotary positions with norms and caps.

Training is the same on every mesh; a cache changes no logits, no answers and no beams.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import first_in_ci, first_quick
from runs import ROOT, small_config
from small_models import (
    OWN_SIZES,
    as_one_device,
    assert_close,
    assert_refused,
    check_on_meshes,
    device_beams,
    load_own,
    make_mesh,
    random_batch,
    random_params,
    run_config,
    sharded,
    sharp_params,
    stepwise_logits,
    t5_config,
)

import decode
import infer
import model
import train
from prepare import make_spec, prepare

WINDOW = str(ROOT / 'examples/sliding_window/sliding_window.py')
GROUPED = str(ROOT / 'families/grouped_heads.py')
# (model.module, model.options)
VALUES = [
    (WINDOW, {'window': 3}),
    (GROUPED, {'num_kv_heads': 4}),
    ('rotary,post_norms,soft_caps', {'attention_cap': 1.0, 'logits_cap': 2.0}),
]
NAMES = ['window', 'grouped', 'gemma']
EXAMPLES = pytest.mark.parametrize('module, options', VALUES, ids=NAMES)
FIRST_QUICK = pytest.mark.parametrize('module, options', first_quick(VALUES), ids=NAMES)
FIRST_IN_CI = pytest.mark.parametrize('module, options', first_in_ci(VALUES), ids=NAMES)
pytestmark = pytest.mark.usefixtures('highest_precision')


def full_batch():
    """Rows without padding."""
    batch = random_batch(seed=0)
    return {name: np.where(x == 0, 5, x) for name, x in batch.items()}


# A step of training, on one device and on a mesh.


def trained(config):
    """The losses of three steps, and the parameters after them."""
    spec = make_spec(config)
    state = train.compile_init(spec)()
    losses = []
    for i in range(3):
        state, metrics = train.jit_step(spec)(state, random_batch(i))
        losses.append(float(metrics['loss']))
    return losses, jax.tree.map(np.asarray, state.params)


@pytest.mark.slow
@FIRST_IN_CI
@pytest.mark.parametrize(
    'remat, is_scan', [('dots', True), pytest.param('none', False, marks=pytest.mark.long)]
)
def test_training_is_the_same_on_a_mesh_with_remat_and_in_a_scan(module, options, remat, is_scan):
    """Dropout is on. With 128 columns, Adafactor factors the kernels of four heads, too."""

    def config(shape, **settings):
        data, fsdp, split = shape
        sizes = {'num_encoder_layers': 2, 'num_decoder_layers': 2, 'head_dim': 32}
        own = {'module': module, 'options': options}
        return run_config(data, split, fsdp, **sizes, **own, **settings)

    losses, params = trained(config((1, 1, 1)))
    assert losses[0] != losses[2]
    found_losses, found = trained(config((2, 2, 2), remat=remat, scan_layers=is_scan))
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    assert_close(found, params, 1e-5)


# Decoding with a cache.


def example_of(module, options):
    """A T5Config with two layers in each stack, and parameters."""
    sizes = {'num_heads': 8, 'num_encoder_layers': 2, 'num_decoder_layers': 2}
    config = load_own(module, options=options, **sizes)
    return config, sharp_params(config)


@FIRST_QUICK
def test_cached_logits_are_the_uncached_ones(module, options):
    config, params = example_of(module, options)
    batch = random_batch(seed=0)
    expected = np.asarray(infer.T5(config, params, make_mesh(1, 1)).logits(batch))
    tokens = (batch['encoder_input_tokens'], batch['decoder_input_tokens'])
    found = np.asarray(stepwise_logits(config, make_mesh(1, 1))(params, *tokens))
    is_token = batch['decoder_target_tokens'] > 0
    assert_close(found[is_token], expected[is_token], 1e-5)


@pytest.mark.slow
@EXAMPLES
def test_greedy_answers_are_those_of_the_uncached_logits(module, options):
    check_on_meshes(*example_of(module, options))


@pytest.mark.slow
@FIRST_IN_CI
def test_beams_are_those_of_an_uncached_search(module, options):
    """On 2 x 2 x 2 devices, too. Without reordering, they would be others."""
    config, params = example_of(module, options)
    inputs = random_batch(seed=0)['encoder_input_tokens']
    prompt = np.zeros((8, 14), np.int32)

    def beams(mesh, **kwargs):
        def f(params, inputs_bM, prompt_bT):
            return device_beams(config, params, inputs_bM, prompt_bT, num_beams=3, **kwargs)

        return jax.tree.map(np.asarray, sharded(f, config, mesh)(params, inputs, prompt))

    one_device = make_mesh(1, 1)
    expected_tokens, expected_scores = beams(one_device, is_cached=False)
    for mesh in (one_device, make_mesh(2, 2, 2)):
        tokens, scores = beams(mesh)
        np.testing.assert_array_equal(tokens, expected_tokens)
        np.testing.assert_allclose(scores, expected_scores, rtol=1e-4)
    unordered, _ = beams(one_device, reorder_cache=lambda cache, parents_bn: cache)
    assert (unordered != expected_tokens).any()


# What a window sees.


def test_a_window_of_one_layer_hides_all_tokens_outside_it():
    """In the encoder on both sides, in the decoder on the left, with a cache or without."""
    config = load_own(WINDOW, options={'window': 4})
    params = sharp_params(config)
    batch = full_batch()
    inputs = batch['encoder_input_tokens']
    tokens = batch['decoder_input_tokens']
    mesh = make_mesh(1, 1)

    def changes(f, x):
        """The positions whose results change with the token at position 6 of x."""
        changed = np.where(np.arange(x.shape[1]) == 6, 383 - x, x)
        difference = np.abs(np.asarray(f(x)) - np.asarray(f(changed)))
        return np.nonzero(difference.max(axis=(0, 2)))[0].tolist()

    def device_encode(params, inputs_bM):
        return model.apply(model.encode, params, config, inputs_bM)[0]

    encode = sharded(device_encode, config, mesh)
    assert changes(lambda x: encode(params, x), inputs) == [3, 4, 5, 6, 7, 8, 9]
    logits = infer.T5(config, params, mesh).logits
    assert changes(lambda x: logits(batch | {'decoder_input_tokens': x}), tokens) == [6, 7, 8, 9]
    stepwise = stepwise_logits(config, mesh)
    assert changes(lambda x: stepwise(params, inputs, x), tokens) == [6, 7, 8, 9]
    # Cross attention has no window.
    assert changes(lambda x: stepwise(params, x, tokens), inputs) == list(range(16))


# Heads of keys and values.


def test_grouped_heads_are_plain_heads_with_repeated_kernels():
    """With as many as query heads they are plain ones. Each of two devices has two groups."""
    batch = random_batch(seed=0)
    plain = t5_config(**OWN_SIZES | {'num_heads': 8})
    as_many = load_own(GROUPED, num_heads=8, options={'num_kv_heads': 8})
    assert model.shapes(as_many) == model.shapes(plain)
    config = load_own(GROUPED, num_heads=8, options={'num_kv_heads': 4})
    params = sharp_params(config)
    repeated = {}
    for path, x in params.items():
        if path.endswith(('key/kernel', 'value/kernel')):
            assert x.shape == (16, 4 * 8)
            x = x.reshape(16, 4, 8).repeat(2, axis=1).reshape(16, 8 * 8)
        repeated[path] = x
    mesh = make_mesh(1, 2)
    expected = np.asarray(infer.T5(plain, repeated, mesh).logits(batch))
    assert_close(infer.T5(config, params, mesh).logits(batch), expected, 1e-5)
    assert_close(infer.T5(as_many, repeated, mesh).logits(batch), expected, 1e-6)


def test_grouped_heads_have_a_smaller_cache():
    def num_kept(num_kv_heads):
        """The numbers of targets and of inputs that a layer keeps."""
        config = load_own(GROUPED, num_heads=4, options={'num_kv_heads': num_kv_heads})

        def start(params):
            inputs_bM = jnp.ones([3, 7], jnp.int32)
            cache = model.apply(model.start_decoding, params, config, inputs_bM)
            return decode.grow_cache(cache, 5)

        params = random_params(config)
        on_one = as_one_device(start, (model.param_specs(config),))
        return [x.size for x in jax.tree.leaves(jax.eval_shape(on_one, params).layers)]

    assert num_kept(4) == [3 * 4 * 8 * 5] * 2 + [3 * 4 * 8 * 7] * 2
    assert num_kept(1) == [3 * 1 * 8 * 5] * 2 + [3 * 1 * 8 * 7] * 2


# Norms after blocks, and caps.


def test_norms_after_blocks():
    """With scales of 0 no layer adds anything to the residual stream."""
    config, params = example_of('post_norms', {})
    plain = example_of('', {})[0]
    for path in params:
        if 'post_layer_norm' in path:
            params[path] = np.zeros_like(params[path])
    batch = random_batch(seed=0)
    found = infer.T5(config, params, make_mesh(1, 1)).logits(batch)
    shallow = dataclasses.replace(plain, num_encoder_layers=1, num_decoder_layers=1)
    silent = {path: params[path] for path in model.shapes(shallow)}
    for path in silent:
        if path.endswith(('/out/kernel', '/wo/kernel')):
            silent[path] = np.zeros_like(silent[path])
    assert_close(found, infer.T5(shallow, silent, make_mesh(1, 1)).logits(batch), 1e-6)


def test_caps():
    config, params = example_of('soft_caps', {'attention_cap': 0.0, 'logits_cap': 0.0})
    batch = random_batch(seed=0)

    def logits(**options):
        changed = dataclasses.replace(
            config, options=dataclasses.replace(config.options, **options)
        )
        return np.asarray(infer.T5(changed, params, make_mesh(1, 1)).logits(batch))

    plain = infer.T5(example_of('', {})[0], params, make_mesh(1, 1)).logits(batch)
    np.testing.assert_array_equal(logits(), plain)
    np.testing.assert_allclose(logits(logits_cap=2.0), 2 * np.tanh(plain / 2), rtol=1e-6)
    assert np.abs(logits(attention_cap=1e-4) - logits(attention_cap=1e-6)).max() < 1e-3
    assert np.abs(logits(attention_cap=1e-4) - plain).max() > 0.1


# What is refused.


def test_options_that_do_not_fit(corpus, tmp_path):
    assert_refused(lambda: load_own(WINDOW, options={'window': 0}), 'model.options.window=0')
    three = {'num_kv_heads': 3}
    name = 'model.options.num_kv_heads=3'
    assert_refused(lambda: load_own(GROUPED, num_heads=4, options=three), name)
    config = small_config(corpus, model_axis=2)
    config.model.update(module=GROUPED, options={'num_kv_heads': 1})
    assert_refused(lambda: prepare(config, tmp_path), 'model.options.num_kv_heads=1')
    assert not list(tmp_path.iterdir())
