"""Small models and batches for several tests, and how their numbers are compared."""

import dataclasses
import functools
import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import decode
import infer
import model
import partition
from configs import base
from formats import own_model

# The fixture `golden` has these for what takes long to compile: the others are for `pytest -m slow`.
ONE_GOLDEN_MODEL = pytest.mark.parametrize(
    'golden',
    [
        't5x_t5_1_1_tiny',
        pytest.param('t5x_t5_1_0_tiny', marks=pytest.mark.slow),
        pytest.param('t5x_factored', marks=pytest.mark.slow),
    ],
    indirect=True,
)


def t5_config(**settings):
    """A T5Config of configs/base.py's values, but for `settings`."""
    return own_model.load(base.get_config().model.to_dict() | settings)


def with_parts(config, **parts):
    """A T5Config with other parts."""
    parts = dataclasses.replace(config.parts, **parts)
    return dataclasses.replace(config, own=dataclasses.replace(config.family, parts=parts))


def with_adapters(config, **lora):
    return own_model.load(own_model.as_settings(config) | lora)


# Of a T5 1.1, for files of checkpoints.
SMALLEST = t5_config(
    vocab_size=10,
    dtype='float32',
    emb_dim=6,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    head_dim=3,  # with two heads the attention's kernels are square
    mlp_dim=8,
    mlp_activations=('gelu', 'linear'),
    logits_via_embedding=False,
    relpos_bias_per_layer=False,
)

# An own model with settings of its own.
OPTIONS = """
import dataclasses

import model
from messages import Refused


@dataclasses.dataclass(frozen=True)
class Options:
    num: int = dataclasses.field(default=2, metadata={'help': 'How many.'})
    rate: float = dataclasses.field(default=0.5, metadata={'mine': 1})  # ignored
    gated: bool = False
    kind: str = 'a'
    which: tuple[str, ...] = ('p', 'q')
    widths: tuple = ()

    def __post_init__(self):
        if self.num > 8:
            raise Refused(f'model.options.num={self.num}: use at most 8')


class Mlp(model.Mlp):
    def __call__(self, x_bTD, rows_b, mask):
        y_bTD, aux = super().__call__(x_bTD, rows_b, mask)
        return y_bTD * self.config.options.num * self.config.options.rate, aux


def modules(family):
    parts = dataclasses.replace(family.parts, mlp=Mlp)
    return dataclasses.replace(family, parts=parts)
"""


# An own model in tests.
OWN_SIZES = {
    'vocab_size': 384,
    'emb_dim': 16,
    'num_heads': 2,
    'num_encoder_layers': 1,
    'num_decoder_layers': 1,
    'head_dim': 8,
    'mlp_dim': 16,
    'mlp_activations': ('relu',),
}


# The options of a small model of each family in families/, for rows of 32 ids.
FAMILIES = {
    'long_t5': {
        'encoder_attention': 'transient_global',
        'local_radius': 3,
        'tokens_per_block': 2,
    },
    'switch': {'num_experts': 4, 'sparse_step': 1},
    't5gemma': {
        'num_kv_heads': 1,
        'window': 5,
        'encoder_num_heads': 4,
        'encoder_num_kv_heads': 2,
        'encoder_mlp_dim': 64,
    },
    't5gemma2': {'window': 6, 'full_every': 2, 'eoi_id': 7},
}


def load_own(file, **settings):
    """The T5Config of an own model."""
    return own_model.load(
        base.get_config().model.to_dict() | OWN_SIZES | {'module': str(file)} | settings
    )


def run_config(mesh_data, mesh_model, mesh_fsdp=1, **model_settings):
    """Matrices of 128 x 128 and more, so that Adafactor factors them.

    Where it does not, its first update is the gradient's sign: an element that is zero but for
    rounding would differ between any two meshes.
    """
    config = base.get_config()
    config.model.update(
        vocab_size=384,
        emb_dim=128,
        num_heads=8,
        num_encoder_layers=1,
        num_decoder_layers=1,
        head_dim=16,
        mlp_dim=128,
        dropout_rate=0.1,
    )
    config.model.update(model_settings)
    config.loss.label_smoothing = 0.1
    config.loss.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'
    config.learning_rate.update(factors='constant', base_learning_rate=0.01)
    config.train.batch_size = 8
    config.mesh.update(data=mesh_data, fsdp=mesh_fsdp, model=mesh_model)
    return config


def random_params(config):
    """Parameters whose values matter to no test: these need no compiling, `model.init` does."""
    rng = np.random.default_rng(0)
    params = {}
    for path, shape in model.shapes(config).items():
        if path.endswith('scale'):
            params[path] = np.ones(shape, np.float32)
            continue
        std = 1.0 if path.endswith('embedding') else shape[0] ** -0.5
        if path.endswith('query/kernel'):
            std *= config.head_dim**-0.5
        params[path] = rng.normal(0, std, shape).astype(np.float32)
    return params


def random_batch(seed, vocab_size=384, num_rows=8):
    """Rows of T5X's features, padded to random lengths."""
    rng = np.random.default_rng(seed)
    lengths = {'encoder_input_tokens': 24, 'decoder_target_tokens': 16}
    batch = {}
    for name, length in lengths.items():
        batch[name] = rng.integers(2, vocab_size, (num_rows, length), np.int32)
    for x in batch.values():
        x[np.arange(x.shape[1]) >= rng.integers(4, x.shape[1] + 1, (num_rows, 1))] = 0
    targets = batch['decoder_target_tokens']
    batch['decoder_input_tokens'] = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    batch['decoder_loss_weights'] = (targets > 0).astype(np.int32)
    return batch


def golden_batch(arrays, prefix):
    """The features that golden.npz has as PREFIX/NAME."""
    batch = {}
    for name in arrays:
        if name.startswith(f'{prefix}/'):
            batch[name.split('/')[1]] = arrays[name].astype(np.int32)
    return batch


def golden_run_config(settings, num_rows, **model_settings):
    """Our config for the run that the config.json of a golden folder describes."""
    config = base.get_config()
    config.model.update(model_settings)
    for name in set(settings) & set(config.model):
        config.model[name] = tuple(settings[name]) if name == 'mlp_activations' else settings[name]
    config.loss.z_loss = settings['z_loss']
    config.loss.label_smoothing = settings['label_smoothing']
    assert settings['learning_rate'] == 'constant(0.05) * rsqrt_decay, warmup_steps=10'
    config.learning_rate.update(
        factors='constant * rsqrt_decay', base_learning_rate=0.05, warmup_steps=10
    )
    config.train.batch_size = num_rows
    config.mesh.update(data=1, fsdp=1, model=1)
    return config


def check_scores_and_answers(t5, arrays, case, batch):
    """Compare scores, greedy answers and those of two beams with CASE/NAME of golden.npz."""
    inputs = [row[row > 0].tolist() for row in batch['encoder_input_tokens']]
    targets = [row[row > 0].tolist() for row in batch['decoder_target_tokens']]
    assert_close(np.array(t5.score(inputs, targets)), arrays[f'{case}/score'], 1e-5)
    length = batch['decoder_target_tokens'].shape[1]
    for name, options in (('greedy', {}), ('beam2', {'beam_size': 2, 'num_return': 2})):
        found = t5.generate(inputs, max_length=length, return_scores=True, **options)
        decodes = arrays[f'{case}/{name}_decodes']
        if name == 'beam2':  # the best last; of greedy answers the file has no scores
            decodes = decodes[:, ::-1]
            scores = arrays[f'{case}/{name}_scores'][:, ::-1]
            assert_close(np.array(found.scores), scores, 1e-5)
        expected = [[row[row > 1].tolist() for row in np.atleast_2d(x)] for x in decodes]
        of_each = found.tokens if name == 'beam2' else [[x] for x in found.tokens]
        assert of_each == expected


def check_same_folder(found, expected):
    """Compare Hugging Face's arrays bit by bit, and the settings that both have; return those of `found`."""
    theirs = safetensors.numpy.load_file(expected / 'model.safetensors')
    ours = safetensors.numpy.load_file(found / 'model.safetensors')
    assert sorted(ours) == sorted(theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)
    stored = json.loads((expected / 'config.json').read_text())
    written = json.loads((found / 'config.json').read_text())
    assert {name: written[name] for name in stored.keys() & written.keys()} == {
        name: stored[name] for name in stored.keys() & written.keys()
    }
    return written


def check_merged(merged, unmerged, base, tolerance):
    """Assert that a model with merged adapters computes as it does unmerged, and not as its base."""
    batch = random_batch(0, base.config.vocab_size)
    expected = np.asarray(unmerged.logits(batch))
    assert_close(merged.logits(batch), expected, tolerance)
    difference = np.abs(base.logits(batch) - expected).max()
    assert difference > 1e-3 * np.abs(expected).max()
    assert model.shapes(merged.config) == model.shapes(base.config)


def make_mesh(data_size, model_size, fsdp_size=1):
    return partition.make_mesh(data=data_size, fsdp=fsdp_size, model=model_size)


def sharded(f, config, mesh, out_specs=partition.BATCH):
    """f(params, *arrays of rows), a function for one device's part, on whole arrays."""
    specs = model.param_specs(config)

    def on_mesh(params, *rows):
        in_specs = (specs, *[partition.BATCH] * len(rows))
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(params, *rows)

    return jax.jit(on_mesh)


def as_one_device(f, in_specs):
    """partition.one_device of a function whose outputs a mesh would split: they are what the one device has."""

    def alike(x):  # pmax only tells JAX's checker
        axes = partition.varying(x)
        return jax.lax.pmax(x, tuple(sorted(axes))) if axes else x

    return partition.one_device(lambda *xs: jax.tree.map(alike, f(*xs)), in_specs)


@functools.cache
def stepwise_logits(config, mesh):
    """(params, inputs_bM, tokens_bT) -> logits_bTv of decoding one forced token after the other."""

    def device_logits(params, inputs_bM, tokens_bT):
        start = functools.partial(model.start_decoding, config, inputs_bM)

        def step(cache, tokens_b):
            step = functools.partial(model.decode_step, config, tokens_b, cache)
            return model.apply(step, params)[::-1]

        cache = decode.grow_cache(model.apply(start, params), tokens_bT.shape[1])
        logits_Tbv = jax.lax.scan(step, cache, tokens_bT.T)[1]
        return logits_Tbv.swapaxes(0, 1)

    return sharded(device_logits, config, mesh, P(partition.BATCH_AXES, None, 'model'))


def reorder_rows(cache, parents_bn):
    """Return a cache of arrays [r, ...] with the rows of each beam's parent."""

    def reordered(x):
        beams = x.reshape(*parents_bn.shape, *x.shape[1:])
        return decode.pick(beams, parents_bn).reshape(x.shape)

    return jax.tree.map(reordered, cache)


def device_beams(
    config,
    params,
    inputs_bM,
    prompt_bT,
    num_beams,
    is_cached=True,
    reorder_cache=decode.reorder_beams,
):
    """The beams of one device's examples; uncached, each step reads all tokens again."""
    num_rows, length = prompt_bT.shape
    if is_cached:
        start = functools.partial(
            model.start_decoding, config, inputs_bM, num_beams, is_beam_search=True
        )

        def step(tokens_r, cache):
            return model.apply(model.decode_step, params, config, tokens_r, cache)

        cache, reorder, grow = model.apply(start, params), reorder_cache, decode.grow_cache
    else:
        inputs_rM = jnp.repeat(inputs_bM, num_beams, axis=0)

        def step(tokens_r, cache):
            position_r, read_rT = cache
            read_rT = read_rT.at[:, position_r[0]].set(tokens_r)
            batch = {
                'encoder_input_tokens': inputs_rM,
                'decoder_input_tokens': read_rT,
                'decoder_target_tokens': jnp.ones_like(read_rT),
            }
            logits_rTv, *_ = model.apply(model.logits, params, config, batch)
            return logits_rTv[:, position_r[0]], (position_r + 1, read_rT)

        position_r = jnp.zeros_like(inputs_rM[:, 0])
        cache = (position_r, jnp.zeros_like(inputs_rM, shape=(len(inputs_rM), length)))
        reorder, grow = reorder_rows, lambda cache, room: cache
    lengths_b = jnp.full_like(prompt_bT[:, 0], length)
    return decode.beam_search(
        step, reorder, cache, prompt_bT, lengths_b, num_beams, alpha=0.6, grow=grow
    )


def sharp_params(config):
    rng = np.random.default_rng(0)
    params = {}
    for path, shape in model.shapes(config).items():
        params[path] = rng.normal(0, 0.5, shape).astype(np.float32)
    return params


def check_on_meshes(config, params):
    t5 = infer.T5(config, params, make_mesh(2, 2))
    batch = check_answers(t5)
    one_device = infer.T5(config, params, make_mesh(1, 1))
    assert_close(one_device.logits(batch), t5.logits(batch), 1e-5)


def check_answers(t5, is_long=True):
    """Assert that each token of a cached greedy answer is the most likely one of the logits.

    Return the batch of the answers.
    """
    batch = random_batch(seed=0)
    inputs = [[int(i) for i in row if i > 0] for row in batch['encoder_input_tokens']]
    decoding = infer.Decoding(max_length=16, return_scores=True)
    answers = list(infer.answer_batch(t5, decoding, [infer.Question(ids) for ids in inputs]))
    answers_bT = np.zeros((len(inputs), 16), np.int32)
    for i, answer in enumerate(answers):
        answers_bT[i, : len(answer.tokens[0])] = answer.tokens[0]
    batch['decoder_target_tokens'] = answers_bT
    batch['decoder_input_tokens'] = np.pad(answers_bT[:, :-1], ((0, 0), (1, 0)))
    logits_bTV = np.asarray(t5.logits(batch))
    is_token_bT = np.cumprod(answers_bT > 0, axis=1) > 0
    is_whole_b = (is_token_bT == (answers_bT > 0)).all(axis=1)  # has no 0, which pads the batch
    if is_long:
        assert is_token_bT.sum() > 20 and len(np.unique(answers_bT)) > 3
    np.testing.assert_array_equal(logits_bTV.argmax(axis=-1)[is_token_bT], answers_bT[is_token_bT])
    log_probs_bTV = jax.nn.log_softmax(logits_bTV)
    log_probs_bT = np.take_along_axis(log_probs_bTV, answers_bT[:, :, None], axis=2)[:, :, 0]
    scores_b = np.array([x.scores[0] for x in answers])
    assert_close(scores_b[is_whole_b], (log_probs_bT * is_token_bT).sum(axis=1)[is_whole_b], 1e-5)
    return batch


def assert_refused(ask, name):
    """Assert that a ValueError names what is wrong, in one line."""
    with pytest.raises(ValueError, match=re.escape(name)) as error:
        ask()
    assert '\n' not in str(error.value)


def assert_close(found, expected, tolerance):
    """Assert max|found - expected| <= tolerance * max|expected| for each array of two trees."""

    def error_and_scale(x, y):
        x = np.asarray(x, np.float64)
        y = np.asarray(y, np.float64)
        return np.abs(x - y).max(), np.abs(y).max()

    def is_close(x, y):
        error, scale = error_and_scale(x, y)
        return error <= tolerance * scale

    def message(x, y):
        error, scale = error_and_scale(x, y)
        return f'the largest error is {error:.3g}, more than {tolerance} * {scale:.3g}'

    found = jax.tree.map(np.asarray, found)
    expected = jax.tree.map(np.asarray, expected)
    chex.assert_trees_all_equal_shapes(found, expected)
    chex.assert_trees_all_equal_comparator(is_close, message, found, expected)
