"""Decoding: T5X's tokens; the cache changes nothing; the same tokens on every mesh.

golden/t5x_* and golden/seqio_t5/decoding.*: made by running google-research/t5x at cc342d4.
"""

import functools
import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import slow
from jax.sharding import PartitionSpec as P
from small_models import (
    assert_close,
    make_mesh,
    random_batch,
    random_params,
    reorder_rows,
    run_config,
    sharded,
    stepwise_logits,
    t5_config,
)

import decode
import loss
import model
import partition
import vocabulary as vocabularies

HERE = pathlib.Path(__file__).parent / 'golden'
MESHES = [(1, 1), (4, 2), (2, 4)]
pytestmark = pytest.mark.usefixtures('highest_precision')


@functools.cache
def generator(config, mesh, eos_id=vocabularies.EOS_ID):
    """(params, inputs_bM, prompt_bT) -> greedy tokens_bT."""

    def device_generate(params, inputs_bM, prompt_bT):
        def step(tokens_b, cache):
            return model.apply(model.decode_step, params, config, tokens_b, cache)

        lengths_b = jnp.full_like(prompt_bT[:, 0], prompt_bT.shape[1])
        cache = model.apply(model.start_decoding, params, config, inputs_bM)
        cache = decode.grow_cache(cache, prompt_bT.shape[1])
        return decode.sample(step, cache, prompt_bT, lengths_b, eos_id=eos_id)[0]

    return sharded(device_generate, config, mesh)


DECODING = json.loads((HERE / 'seqio_t5/decoding.json').read_text())


@functools.cache
def decoding_arrays():
    return dict(np.load(HERE / 'seqio_t5/decoding.npz'))


class RecurrentModel(NamedTuple):
    """The language model of decoding.json; its cache is acc."""

    E: np.ndarray
    W: np.ndarray
    b: np.ndarray

    def step(self, tokens_r, acc_rD):
        acc_rD = acc_rD / 2 + jnp.asarray(self.E)[tokens_r]
        logits_rV = jnp.tanh(acc_rD) @ self.W + self.b[None]
        return partition.own_slice(logits_rV, 'model', 1), acc_rD


def on_rows(f, mesh, *rows):
    """f(*rows), a function for one device's rows, on whole arrays."""
    specs = (partition.BATCH,) * len(rows)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=partition.BATCH)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*rows))


def decoded(case, arrays, mesh):
    """The tokens [b, n, L] and scores [b, n] of a case, decoded by us as its keywords say."""
    kwargs = dict(case['kwargs'])
    network = RecurrentModel(arrays['E'], arrays['W'], arrays['b'])
    inputs = arrays['inputs']  # T5X's begin with BOS
    prompt = np.pad(inputs[:, 1:], ((0, 0), (0, 1)))
    num_rows, length = prompt.shape
    lengths = np.full(num_rows, length, np.int32)
    eos_id = kwargs.pop('eos_id')
    if case['kind'] == 'beam_search':
        lengths[:] = kwargs.pop('max_decode_len', length)
        num_beams = kwargs.pop('num_decodes', 4)
        alpha = kwargs.pop('alpha', 0.6)
        assert not kwargs

        def search(acc_bD, prompt_bT, lengths_b):
            acc_rD = jnp.repeat(acc_bD, num_beams, axis=0)
            step, reorder = network.step, reorder_rows
            return decode.beam_search(
                step, reorder, acc_rD, prompt_bT, lengths_b, num_beams, alpha, eos_id
            )

        tokens, scores = on_rows(search, mesh, arrays['acc0'], prompt, lengths)
        return tokens[:, :, : lengths[0]], scores

    if 'max_decode_steps' in kwargs:
        limit = kwargs.pop('max_decode_steps')
        limit = min(limit, kwargs.pop('max_decode_steps_hard_limit', limit))
        lengths = np.minimum(lengths, (prompt > 0).sum(axis=1) + limit).astype(np.int32)
    first_tokens = np.zeros(num_rows, np.int32)
    begin = np.array(kwargs.pop('initial_index', first_tokens))
    if begin.any():  # acc0 has read the prompts but for their last tokens
        first_tokens = inputs[np.arange(num_rows), begin]
        prompt = np.zeros_like(prompt)
        lengths = (lengths - begin).astype(np.int32)
    temperature = kwargs.pop('temperature', 1.0)
    top_k = kwargs.pop('topk', 1)
    kwargs.pop('rescale_log_probs', None)  # see check_case
    assert not kwargs

    def sample(acc_bD, prompt_bT, lengths_b, first_tokens_b):
        def step(tokens_b, acc_bD):
            return network.step(jnp.where(tokens_b == 0, first_tokens_b, tokens_b), acc_bD)

        keys_b = jax.vmap(jax.random.key)(first_tokens_b)
        temperature_b = jnp.full(lengths_b.shape, temperature)
        choose = decode.random_tokens(keys_b, temperature_b, top_k=top_k)
        return decode.sample(step, acc_bD, prompt_bT, lengths_b, choose, eos_id=eos_id)

    tokens, scores = on_rows(sample, mesh, arrays['acc0'], prompt, lengths, first_tokens)
    rows = []
    for row in range(num_rows):
        prefix = inputs[row, 1 : begin[row] + 1]
        rows.append(np.concatenate([prefix, tokens[row]])[:length])
    return np.stack(rows)[:, None], scores[:, None]


def check_case(case, mesh):
    """Tokens are equal and scores within 1e-4; T5X leaves junk where a sequence is missing."""
    prefix = f'{case["case"]}_'
    arrays = {}
    for name, x in decoding_arrays().items():
        if name.startswith(prefix):
            arrays[name.removeprefix(prefix)] = x
    tokens, scores = decoded(case, arrays, mesh)
    is_real = arrays['scores'] > -1e6
    assert is_real.any(axis=1).all()
    np.testing.assert_array_equal(scores > -1e6, is_real)
    if case['kind'] == 'beam_search' or not case['kwargs'].get('rescale_log_probs', True):
        np.testing.assert_allclose(scores[is_real], arrays['scores'][is_real], atol=1e-4)
    np.testing.assert_array_equal(tokens[is_real], arrays['decodes'][is_real])


# Each compiles: one of each kind and what is rare are quick.
QUICK_CASES = ('c12', 'c20', 'c21', 'c30', 'c32')
CASES = []
for case in DECODING['cases']:
    is_quick = case['case'] in QUICK_CASES
    CASES.append(pytest.param(case, 1, marks=() if is_quick else pytest.mark.slow))
    marks = [pytest.mark.slow] if is_quick else [pytest.mark.slow, pytest.mark.long]
    CASES.append(pytest.param(case, 2, marks=marks))


@pytest.mark.parametrize('case, model_size', CASES)
def test_tokens_and_scores_of_any_step_are_T5Xs(case, model_size):
    """Beam search and temperature_sample of T5X over a recurrent network, with prompts and limits.

    The rows of the cases, three or four, stay on one device; the vocabulary may be split.
    """
    check_case(case, make_mesh(1, model_size))


@pytest.mark.slow
def test_what_top_k_and_top_p_keep_is_what_T5X_keeps():
    arrays = decoding_arrays()
    logits = arrays['mask_logits']
    mask_value = DECODING['mask_value']
    assert mask_value == decode.MASKED
    cases = [name for name in arrays if name.startswith(('topk_mask', 'topp_mask'))]
    assert len(cases) == 8

    def device_masks(logits_rv):
        found = {}
        for name in cases:
            kind, limit = name.split('_mask_')
            top_k, top_p = (int(limit), 0.0) if kind == 'topk' else (0, float(limit))
            found[name] = decode.keep_largest(logits_rv, top_k, top_p)
        return found

    specs = P('data', 'model')
    mesh = make_mesh(1, 2 if logits.shape[1] % 2 == 0 else 1)
    f = jax.shard_map(device_masks, mesh=mesh, in_specs=specs, out_specs=specs)
    for name, found in jax.jit(f)(logits).items():
        np.testing.assert_array_equal(np.asarray(found), arrays[name], err_msg=name)


@pytest.mark.parametrize('limits', [(3, 0.0, 0.0), (0, 0.7, 0.0), (0, 0.0, 0.1)])
def test_what_is_kept_of_a_split_vocabulary(limits):
    """top_k, top_p and min_p keep the tokens that they keep on one device."""
    logits = np.random.default_rng(0).normal(0, 2, (5, 16)).astype(np.float32)
    found = []
    for size in (1, 4):
        specs = P(None, 'model')
        f = jax.shard_map(
            lambda logits_rv: decode.keep_largest(logits_rv, *limits),
            mesh=make_mesh(1, size),
            in_specs=specs,
            out_specs=specs,
        )
        found.append(np.asarray(jax.jit(f)(logits)))
    np.testing.assert_array_equal(*found)
    assert 0 < (found[0] == decode.MASKED).mean() < 1


def random_network(seed, vocab_size=6, size=5):
    """A RecurrentModel and the acc [3, size] that its examples begin with."""
    rng = np.random.default_rng(seed)
    network = RecurrentModel(
        E=rng.normal(0, 2, (vocab_size, size)).astype(np.float32),
        W=rng.normal(0, 2, (size, vocab_size)).astype(np.float32),
        b=rng.normal(0, 1, vocab_size).astype(np.float32),
    )
    return network, rng.normal(0, 1, (3, size)).astype(np.float32)


def all_sequences(network, acc, length, alpha):
    """{tokens: score} of every sequence of one example that ends with EOS within `length`."""
    found = {}
    live = [((), acc, 0.0)]
    for num_tokens in range(1, length + 1):
        penalty = ((5 + num_tokens) / 6) ** alpha
        longer = []
        for tokens, acc, total in live:
            acc = acc / 2 + network.E[tokens[-1] if tokens else 0]
            logits = np.tanh(acc).astype(np.float64) @ network.W + network.b
            log_probs = logits - np.log(np.exp(logits).sum())
            for token, log_prob in enumerate(log_probs):
                if token == vocabularies.EOS_ID:
                    found[(*tokens, token)] = (total + log_prob) / penalty
                else:
                    longer.append(((*tokens, token), acc, total + log_prob))
        live = longer
    return found


def test_beam_search_against_every_sequence_of_six_words():
    """With a beam for each prefix it finds all 156 sequences of up to four tokens, in order."""
    length, num_beams = 4, 5**4

    @jax.jit
    def search(network, acc, alpha):
        def device_search(acc_bD):
            acc_rD = jnp.repeat(acc_bD, num_beams, axis=0)
            prompt = jnp.zeros_like(acc_bD, jnp.int32, shape=(len(acc_bD), length))
            lengths = jnp.full_like(prompt[:, 0], length)
            step, reorder = network.step, reorder_rows
            return decode.beam_search(step, reorder, acc_rD, prompt, lengths, num_beams, alpha)

        spec = partition.BATCH
        mapped = jax.shard_map(device_search, mesh=make_mesh(1, 2), in_specs=spec, out_specs=spec)
        return mapped(acc)

    for seed, alpha in [(0, 0.6), (1, 0.0), (2, 1.0), (3, 2.0)]:
        network, acc = random_network(seed)
        tokens, scores = jax.tree.map(np.asarray, search(network, acc, alpha))
        for row in range(len(acc)):
            expected = all_sequences(network, acc[row], length, alpha)
            assert len(expected) == 156
            best_first = scores[row, ::-1]
            assert (best_first[156:] < -1e6).all()
            np.testing.assert_allclose(best_first[:156], sorted(expected.values())[::-1], 1e-4)
            for found, score in zip(tokens[row, ::-1][:156].tolist(), best_first, strict=False):
                end = found.index(vocabularies.EOS_ID) + 1
                assert not any(found[end:])
                assert score == pytest.approx(expected[tuple(found[:end])], rel=1e-4)


def test_an_EOS_in_a_prompt_ends_no_beam():
    network, acc = random_network(0)
    prompt = np.zeros((len(acc), 6), np.int32)
    prompt[1, :3] = 2, vocabularies.EOS_ID, 3

    def search(acc_bD, prompt_bT):
        acc_rD = jnp.repeat(acc_bD, 2, axis=0)
        lengths_b = jnp.full_like(prompt_bT[:, 0], 6)
        step, reorder = network.step, reorder_rows
        return decode.beam_search(step, reorder, acc_rD, prompt_bT, lengths_b, 2, alpha=0.6)

    tokens, _ = on_rows(search, make_mesh(1, 1), acc, prompt)
    np.testing.assert_array_equal(tokens[1, -1, :3], prompt[1, :3])
    assert tokens[1, -1, 3]


def sampled_tokens(logits, mesh, **options):
    """One random token for each of the rows, which have the same logits, and its score."""
    num_rows = 4000
    rows = np.arange(num_rows, dtype=np.int32)
    temperature = np.broadcast_to(options.pop('temperature'), num_rows).astype(np.float32)

    def device_sample(rows_r, temperature_r):
        keys_r = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), rows_r)
        all_logits = jnp.broadcast_to(logits[None], (len(rows_r), len(logits)))
        own_logits = partition.own_slice(all_logits, 'model', 1)
        choose = decode.random_tokens(keys_r, temperature_r, **options)
        prompt = jnp.zeros_like(rows_r)[:, None]
        step = lambda tokens, cache: (own_logits, cache)  # noqa: E731
        return decode.sample(step, (), prompt, jnp.ones_like(rows_r), choose)

    tokens, scores = on_rows(device_sample, mesh, rows, temperature)
    return tokens[:, 0], scores


LOGITS = np.array([0.5, 2.0, -1.0, 1.0, 1.2, -3.0, 0.0, 1.9], np.float32)
LOG_PROBS = LOGITS - np.log(np.exp(LOGITS).sum())


@pytest.mark.parametrize(
    'options, kept',
    [
        pytest.param({'temperature': 1.0}, range(8), marks=pytest.mark.slow),
        ({'temperature': 2.0, 'top_k': 3}, [1, 4, 7]),
        ({'temperature': 1.0, 'top_p': 0.6}, [1, 7]),
        pytest.param({'temperature': 1.0, 'top_k': 8}, range(8), marks=pytest.mark.slow),
    ],
)
def test_frequencies_of_samples_are_the_softmax(options, kept):
    """Of 4,000 draws, within four standard deviations; the same draws on every mesh."""
    tokens, scores = sampled_tokens(LOGITS, make_mesh(1, 1), **options)
    on_mesh, _ = sampled_tokens(LOGITS, make_mesh(2, 4), **options)
    np.testing.assert_array_equal(on_mesh, tokens)
    weights = np.exp(LOGITS / options['temperature'])
    weights[[i for i in range(8) if i not in kept]] = 0.0
    expected = weights / weights.sum()
    found = np.bincount(tokens, minlength=8) / len(tokens)
    deviation = np.sqrt(expected * (1 - expected) / len(tokens))
    assert (np.abs(found - expected) <= 4 * deviation).all()
    np.testing.assert_allclose(scores, LOG_PROBS[tokens], atol=1e-5)


def test_each_row_has_its_temperature_and_its_score():
    temperature = np.where(np.arange(4000) % 2 == 0, 0.0, 1.0)
    tokens, scores = sampled_tokens(LOGITS, make_mesh(1, 1), temperature=temperature)
    assert (tokens[::2] == 1).all()
    assert len(np.unique(tokens[1::2])) == 8
    np.testing.assert_allclose(scores, LOG_PROBS[tokens], atol=1e-5)


@pytest.mark.parametrize('size', [24, 512, 16 * 128 + 1])
def test_top_k_over_a_split_dimension_is_top_k(size):
    """Values that repeat are taken from the lowest index on."""
    rng = np.random.default_rng(size)
    x = rng.integers(0, 40, (4, size * 4)).astype(np.float32)
    expected = jax.lax.top_k(x, 5)
    top_k = lambda x: decode.top_k(x, 5)  # noqa: E731
    spec = P('data', 'model')
    f = jax.shard_map(top_k, mesh=make_mesh(2, 4), in_specs=spec, out_specs=partition.BATCH)
    for found, values in zip(jax.jit(f)(x), expected, strict=True):
        np.testing.assert_array_equal(found, values)


def test_the_brevity_penalty_is_T5Xs():
    for case in DECODING['brevity_penalty']:
        found = decode.brevity_penalty(case['alpha'], case['length'])
        assert found == pytest.approx(case['value'], rel=1e-6)


def test_the_lowest_id_wins_among_equals():
    logits = np.zeros([4, 16], np.float32)
    logits[0, [3, 9]] = logits[1, [9, 15]] = logits[2, 12] = 1.0
    mesh = make_mesh(2, 4)
    specs = P('data', 'model')
    f = jax.shard_map(loss.argmax, mesh=mesh, in_specs=specs, out_specs=partition.BATCH)
    np.testing.assert_array_equal(jax.jit(f)(logits), [3, 9, 12, 0])


VARIANTS = {
    't5_1_1': {},
    't5': {'mlp_activations': ('relu',), 'logits_via_embedding': True},
    'umt5': {'relpos_bias_per_layer': True, 'float32_attention_logits': True},
}


@functools.cache
def variant(name):
    sizes = {'num_encoder_layers': 1, 'num_decoder_layers': 2}
    config = t5_config(**run_config(1, 1, **(sizes | VARIANTS[name])).model)
    params = random_params(config)
    # So that attention is sharp, and what a token says does not drown what the layers make of it.
    factors = {'query/kernel': 3.0, 'token_embedder/embedding': 0.1}
    for path in params:
        params[path] *= next((x for end, x in factors.items() if path.endswith(end)), 1.0)
    return config, params


def long_batch():
    """With targets beyond the last bucket of relative positions, which begins at 113."""
    targets = np.random.default_rng(1).integers(2, 384, (8, 140), np.int32)
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    return random_batch(1) | {'decoder_target_tokens': targets, 'decoder_input_tokens': shifted}


def device_logits(config):
    return lambda params, batch: model.apply(model.logits, params, config, batch)[0]


@functools.cache
def teacher_forced(config):
    return sharded(
        device_logits(config), config, make_mesh(1, 1), P(partition.BATCH_AXES, None, 'model')
    )


@pytest.mark.parametrize(
    'name, shape',
    [
        ('t5_1_1', (1, 1)),
        *slow([('t5_1_1', (4, 2)), ('t5_1_1', (2, 4)), ('t5', (2, 4)), ('umt5', (2, 4))]),
    ],
)
def test_cached_equals_uncached(name, shape):
    config, params = variant(name)
    batch = long_batch()
    expected = teacher_forced(config)(params, batch)
    tokens = (batch['encoder_input_tokens'], batch['decoder_input_tokens'])
    assert_close(stepwise_logits(config, make_mesh(*shape))(params, *tokens), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', VARIANTS)
def test_same_tokens_on_every_mesh(name):
    config, params = variant(name)
    inputs, prompt = random_batch(2)['encoder_input_tokens'], np.zeros([8, 20], np.int32)
    found = [
        np.asarray(generator(config, make_mesh(*shape))(params, inputs, prompt)) for shape in MESHES
    ]
    assert len(np.unique(found[0])) > 10  # not one token again and again
    for tokens in found[1:]:
        np.testing.assert_array_equal(tokens, found[0])
