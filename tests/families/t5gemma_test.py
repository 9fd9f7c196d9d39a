"""T5Gemma's numbers, from transformers and Google's JAX modules: the README of each golden folder says what arrays prove.

Other folders of the same form, put into tests/golden, are tested alike.
"""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from forms import first_in_ci, first_quick
from jax.sharding import PartitionSpec as P
from small_models import (
    OWN_SIZES,
    assert_close,
    make_mesh,
    random_batch,
    random_params,
    run_config,
    sharded,
    stepwise_logits,
)

import decode
import infer
import model
import partition
import state_names
import train
from configs import base
from families import lora, prompt_tuning
from formats import gemma, own_model, write_hugging_face
from formats.names import translate
from messages import Refused
from modes import convert
from prepare import make_spec
from vocabulary import ByteVocabulary, Ends

pytestmark = pytest.mark.usefixtures('highest_precision')
ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / 'tests/golden'
# Absolute, as their READMEs say.
ENCODED = 3e-5
LOGITS = 1e-4
FEATURES = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')


@functools.cache
def arrays_of(name):
    return dict(np.load(GOLDEN / name / 'golden.npz'))


def folders(array=''):
    """Return the names of the folders whose golden.npz has an array, two of them first."""
    names = sorted(x.parent.name for x in GOLDEN.glob('t5gemma*/golden.npz'))
    names.sort(key=lambda x: (x not in ('t5gemma', 't5gemma2'), -len(x)))
    return [name for name in names if not array or array in arrays_of(name)]


@functools.cache
def load(name):
    return infer.load(GOLDEN / name / 'hf')


def batch_of(arrays, case):
    """The features of a case, whose decoder inputs begin with 2; T5X's begin with 0."""
    names = [f'{case}/{x}' for x in (*FEATURES, 'encoder_segment_ids', 'decoder_segment_ids')]
    return {name.split('/')[1]: arrays[name] for name in names if name in arrays}


def ids_of(tokens):
    return [row[row > 0].tolist() for row in tokens]


def assert_near(found, expected, tolerance):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=tolerance)


def check_logits(found, batch, expected):
    mask = (batch['decoder_target_tokens'] > 0)[..., None]
    assert_near(np.asarray(found) * mask, expected * mask, LOGITS)


# The numbers of a model.


@pytest.mark.parametrize('name', first_quick(folders(), 2))
def test_encodings(name):
    arrays = arrays_of(name)
    outputs, mask = load(name).encode(ids_of(arrays['batch/encoder_input_tokens']))
    assert_near(outputs, arrays['encoded'][:, : outputs.shape[1]] * mask[..., None], ENCODED)
    alone = infer.load(GOLDEN / name / 'hf', part='encoder')
    assert alone.config.num_decoder_layers == 0
    found, _ = alone.encode(ids_of(arrays['batch/encoder_input_tokens']))
    np.testing.assert_array_equal(found, outputs)


@pytest.mark.parametrize('name', first_quick(folders('logits'), 2))
def test_logits(name):
    arrays = arrays_of(name)
    t5 = load(name)
    batch = batch_of(arrays, 'batch')
    found = t5.logits(batch)
    check_logits(found, batch, arrays['logits'])
    batch['decoder_input_tokens'] = np.pad(batch['decoder_input_tokens'][:, 1:], ((0, 0), (1, 0)))
    np.testing.assert_array_equal(t5.logits(batch), found)


@pytest.mark.slow
@pytest.mark.parametrize('name', folders('logits'))
def test_scores(name):
    arrays = arrays_of(name)
    scores = load(name).score(
        ids_of(arrays['batch/encoder_input_tokens']), ids_of(arrays['batch/decoder_target_tokens'])
    )
    np.testing.assert_allclose(scores, arrays['log_likelihoods'], rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', folders('logits'))
def test_a_cache(name):
    """Decoding the targets one by one gives the logits of all at once."""
    arrays = arrays_of(name)
    t5 = load(name)
    batch = batch_of(arrays, 'batch')
    decode = stepwise_logits(t5.config, t5.mesh)
    found = decode(t5.arrays, batch['encoder_input_tokens'], batch['decoder_input_tokens'])
    check_logits(found, batch, arrays['logits'])


@pytest.mark.parametrize('name', first_quick(folders('packed/logits')))
def test_packed_rows(name):
    """Each example has the numbers that it has alone."""
    arrays = arrays_of(name)
    t5 = load(name)
    batch = batch_of(arrays, 'packed')
    check_logits(t5.logits(batch), batch, arrays['packed/logits'])

    def encode(params, inputs_bM, segments_bM):
        return model.apply(model.encode, params, t5.config, inputs_bM, segments_bM)[0]

    segments = batch['encoder_segment_ids']
    encode = sharded(encode, t5.config, t5.mesh)
    found = encode(t5.arrays, batch['encoder_input_tokens'], segments)
    assert_near(found * (segments > 0)[..., None], arrays['packed/encoded'], ENCODED)


@pytest.mark.parametrize('name', first_quick(folders('greedy')))
def test_greedy_answers(name):
    check_answers(name, 'greedy')


@pytest.mark.slow
@pytest.mark.parametrize('name', folders('greedy'))
def test_beams(name):
    check_answers(name, 'beam3', beam_size=3, num_return=3, alpha=0.6)
    check_answers(name, 'beam3_alpha0', beam_size=3, num_return=3, alpha=0.0)


def check_answers(name, case, **options):
    arrays = arrays_of(name)
    inputs = ids_of(arrays['batch/encoder_input_tokens'])
    max_length = arrays['greedy'].shape[1]
    found = load(name).generate(inputs, max_length=max_length, return_scores=True, **options)
    tokens = arrays[case if case == 'greedy' else f'{case}_decodes']
    scores = arrays[f'{case}_scores']
    if case != 'greedy':  # the best last
        tokens = tokens[:, ::-1]
        scores = scores[:, ::-1]
    scores = scores.reshape(len(inputs), -1)
    is_found = scores > decode.MISSING  # the others never ended
    answers = [[x] for x in found.tokens] if case == 'greedy' else found.tokens
    for i, rows in enumerate(tokens.reshape(*scores.shape, -1)):
        assert answers[i] == [row[row > 1].tolist() for row in rows[is_found[i]]]
    found_scores = found.scores.reshape(scores.shape)
    np.testing.assert_array_equal(np.isfinite(found_scores), is_found)
    np.testing.assert_allclose(found_scores[is_found], scores[is_found], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('name', folders('greedy')[:2])
def test_several_samples_share_inputs(name):
    arrays = arrays_of(name)
    inputs = ids_of(arrays['batch/encoder_input_tokens'])
    options = {'max_length': 8, 'num_return': 3, 'temperature': 1.0, 'return_scores': True}
    found = load(name).generate(inputs, **options)
    for i, ids in enumerate(inputs):
        targets = [[*answer, 1][:8] for answer in found.tokens[i]]
        scores = load(name).score([ids] * 3, targets)
        np.testing.assert_allclose(found.scores[i], scores, rtol=1e-4)


# What each part is worth: without it the logits are others. Names of options, or of T5Config.
PARTS = {
    't5gemma': [
        {'window': 1000},
        {'full_every': 1000},
        {'attention_cap': 0.0},
        {'logits_cap': 0.0},
        {'query_pre_attn_scalar': 0},
        {'rope_theta': 100.0},
    ],
    't5gemma2': [
        {'window': 1000},
        {'window': 7},  # the encoder then sees a key more to its left
        {'full_every': 1000},
        {'query_pre_attn_scalar': 0},
        {'full_rope_theta': 1e4},
        {'full_rope_factor': 8.0},
        {'eoi_id': 5},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize('name', PARTS)
def test_each_part_counts(name):
    arrays = arrays_of(name)
    t5 = load(name)
    batch = batch_of(arrays, 'batch')
    mask = (batch['decoder_target_tokens'] > 0)[..., None]
    for changes in PARTS[name]:
        config = own_model.as_family(t5.config, name, vars(t5.config.options) | changes)
        found = infer.T5(config, t5.arrays, t5.mesh).logits(batch)
        assert np.abs((found - arrays['logits']) * mask).max() > 0.05, changes


# Training.


def golden_spec(name, num_rows):
    """The spec of AdamW's run."""
    config = base.get_config()
    settings = own_model.as_settings(load(name).config)
    config.model.update(settings)
    config.loss.z_loss = 0.0
    config.loss.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'
    config.optimizer.name = 'adamw'
    config.optimizer.adamw.weight_decay = 0.0
    config.learning_rate.update(factors='constant', base_learning_rate=1e-3)
    config.train.batch_size = num_rows
    config.mesh.update(data=1, fsdp=1, model=1)
    return make_spec(config)


def as_theirs(name, params):
    """{transformers' name: array} of parameters or gradients."""
    config = load(name).config
    names = gemma.parameter_names(config, 'model.')
    renamed = {}
    for path, x in params.items():
        their_name = translate(path, names)
        suffix = '' if their_name.endswith('eoi_embedding') else '.weight'
        x = np.asarray(x, np.float64)
        renamed[their_name + suffix] = x.T if path.endswith('/kernel') else x
    return renamed


def check_fingerprints(name, kind, params, tolerance):
    """Compare norm, sum and a dot product of each array; tolerance: of the norm of an array."""
    arrays = arrays_of(name)
    found = as_theirs(name, params)
    names = {x.split('/')[1] for x in arrays if x.startswith(f'{kind}_fingerprint/')}
    assert names == found.keys()
    for their_name, x in found.items():
        expected = arrays[f'{kind}_fingerprint/{their_name}']
        x = x.flatten()
        values = [np.linalg.norm(x), x.sum(), x @ np.cos(np.arange(len(x)))]
        limit = tolerance * expected[0] * np.array([1, len(x) ** 0.5, len(x) ** 0.5]) + 1e-7
        assert (np.abs(values - expected) <= limit).all(), (their_name, values, expected)


def steps_of(name):
    arrays = arrays_of(name)
    batches = [batch_of(arrays, f'train_batch{i}') for i in range(4)]
    for i, batch in enumerate(batches):
        batch['decoder_loss_weights'] = arrays[f'train_batch{i}/decoder_loss_weights']
    return batches, golden_spec(name, len(batches[0]['decoder_target_tokens']))


@pytest.mark.slow
@pytest.mark.parametrize('name', folders('sgd_losses'))
def test_gradients_and_steps_of_sgd(name):
    arrays = arrays_of(name)
    batches, spec = steps_of(name)
    gradients = jax.jit(functools.partial(train.gradients, spec))
    params = {path: np.asarray(x, np.float32) for path, x in load(name).arrays.items()}
    losses = []
    for i, batch in enumerate(batches):
        rows = np.arange(len(batch['decoder_target_tokens']))
        grads, metrics = jax.device_get(gradients(params, batch, rows, jax.random.key(0)))
        losses.append(metrics['loss'])
        if i == 0:
            check_fingerprints(name, 'gradients', grads, 3e-5)
            found = as_theirs(name, grads)
            for key, expected in arrays.items():
                if key.startswith('gradients/'):
                    error = np.linalg.norm(found[key.split('/')[1]] - expected)
                    assert error <= 3e-5 * np.linalg.norm(expected), key
            norm = optax.tree.norm(grads)
            np.testing.assert_allclose(norm, arrays['gradient_norm'], rtol=1e-5)
        params = jax.tree.map(lambda p, g: p - 0.02 * g, params, grads)
    np.testing.assert_allclose(losses, arrays['sgd_losses'], rtol=1e-5)
    check_fingerprints(name, 'sgd_after', params, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', folders('adamw_losses'))
def test_steps_of_adamw(name):
    batches, spec = steps_of(name)
    params = {path: np.asarray(x, np.float32) for path, x in load(name).arrays.items()}
    state = train.TrainState(np.int32(0), params, spec.tx.init(params))
    losses = []
    for batch in batches:
        state, metrics = train.jit_step(spec)(state, batch)
        losses.append(float(metrics['loss']))
    np.testing.assert_allclose(losses, arrays_of(name)['adamw_losses'], rtol=1e-5)
    check_fingerprints(name, 'adamw_after', state.params, 1e-4)


# Folders of transformers.


def check_written(written, stored):
    """Compare what two config.json have both, but for what is of images."""
    for name in stored.keys() & written.keys() - {'vision_config'}:
        if isinstance(stored[name], dict):
            check_written(written[name], stored[name])
        else:
            assert written[name] == stored[name], name


@pytest.mark.parametrize('name', first_quick(folders('logits'), 2))
def test_a_folder_in_and_out(name, tmp_path):
    source = GOLDEN / name / 'hf'
    convert.convert_checkpoint(source, tmp_path / 'hf', 'hf')
    found = safetensors.numpy.load_file(tmp_path / 'hf/model.safetensors')
    expected = safetensors.numpy.load_file(source / 'model.safetensors')
    expected = {name: x for name, x in expected.items() if not gemma.IMAGES.fullmatch(name)}
    assert found.keys() == expected.keys()
    for their_name, x in expected.items():
        assert found[their_name].dtype == x.dtype
        np.testing.assert_array_equal(found[their_name], x)
    stored = json.loads((source / 'config.json').read_text())
    written = json.loads((tmp_path / 'hf/config.json').read_text())
    check_written(written, stored)
    assert {'encoder', 'decoder', 'vocab_size', 'model_type'} <= written.keys()
    assert infer.load(tmp_path / 'hf').config == load(name).config


@pytest.mark.parametrize('name', first_quick(['t5gemma_unbalanced', 't5gemma2']))
def test_a_checkpoint_in_between(name, tmp_path):
    """T5X's layout holds the config; its encoder can be opened alone."""
    source = GOLDEN / name / 'hf'
    checkpoint = convert.convert_checkpoint(source, tmp_path / 'ours', 't5x')
    t5 = infer.load(checkpoint)
    assert t5.config == load(name).config
    arrays = arrays_of(name)
    encoder = infer.load(checkpoint, part='encoder')
    outputs, mask = encoder.encode(ids_of(arrays['batch/encoder_input_tokens']))
    assert_near(outputs, arrays['encoded'][:, : outputs.shape[1]] * mask[..., None], ENCODED)
    convert.convert_checkpoint(tmp_path / 'ours', tmp_path / 'hf', 'hf')
    for path, x in infer.load(tmp_path / 'hf').arrays.items():
        np.testing.assert_array_equal(x, load(name).arrays[path])


def copied(name, tmp_path):
    """A copy of a folder that may be changed."""
    folder = shutil.copytree(GOLDEN / name / 'hf', tmp_path / 'hf')
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


def test_a_folder_of_transformers_4(tmp_path):
    folder = copied('t5gemma_untied', tmp_path)
    shutil.copy(GOLDEN / 't5gemma_untied/hf_old_config/config.json', folder / 'config.json')
    assert infer.load(folder).config == load('t5gemma_untied').config


def test_names_of_the_text_model_and_tied_copies(tmp_path):
    """T5Gemma 2: names with text_model., and the table once more for the decoder and the logits."""
    folder = copied('t5gemma2', tmp_path)
    arrays = {}
    for name, x in safetensors.numpy.load_file(folder / 'model.safetensors').items():
        if not gemma.IMAGES.fullmatch(name):
            name = name.replace('model.encoder.', 'model.encoder.text_model.')
        arrays[name] = x
    table = 'model.encoder.text_model.embed_tokens'
    arrays['lm_head.out_proj.weight'] = arrays[f'{table}.weight']
    for name in ('weight', 'eoi_embedding'):
        arrays[f'model.decoder.embed_tokens.{name}'] = arrays[f'{table}.{name}']
    safetensors.numpy.save_file(arrays, folder / 'model.safetensors')
    t5 = infer.load(folder)
    assert t5.config == load('t5gemma2').config
    for path, x in load('t5gemma2').arrays.items():
        np.testing.assert_array_equal(t5.arrays[path], x)
    arrays['lm_head.out_proj.weight'] = 2 * arrays[f'{table}.weight']
    safetensors.numpy.save_file(arrays, folder / 'model.safetensors')
    with pytest.raises(Refused, match='lm_head'):
        infer.load(folder)


def test_an_old_config_of_t5gemma_2(tmp_path):
    """Patterns and periods as folders of Gemma 3 had them."""
    folder = copied('t5gemma2_4b', tmp_path)
    settings = json.loads((folder / 'config.json').read_text())
    for stack in (settings['encoder']['text_config'], settings['decoder']):
        del stack['rope_parameters'], stack['layer_types']
        stack['sliding_window_pattern'] = 3
        stack |= {'rope_theta': 5000.0, 'rope_local_base_freq': 100.0}
        stack['rope_scaling'] = {'rope_type': 'linear', 'factor': 8.0}
    (folder / 'config.json').write_text(json.dumps(settings))
    assert infer.load(folder).config == load('t5gemma2_4b').config


@pytest.mark.parametrize('changes, named', [
    ({'hidden_size': 64}, 'hidden_size'),
    ({'num_attention_heads': 8}, 'num_attention_heads'),
    ({'num_attention_heads': '4'}, 'num_attention_heads'),
    ({'num_key_value_heads': 3}, 'num_key_value_heads'),
    ({'head_dim': 20}, 'num_'),
    ({'head_dim': 0}, 'head_dim'),
    ({'num_hidden_layers': 10**9}, 'num_hidden_layers'),
    ({'intermediate_size': 41}, 'intermediate_size'),
    ({'vocab_size': 256}, 'vocab_size'),
    ({'attention_bias': True}, 'attention_bias'),
    ({'rms_norm_eps': 1e-5}, 'rms_norm_eps'),
    ({'hidden_activation': 'silu'}, 'hidden_activation'),
    ({'bos_token_id': 0}, 'bos_token_id'),
    ({'layer_types': ['full_attention'] + ['sliding_attention'] * 3}, 'layer_types'),
    ({'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 1.0}}, 'rope_type'),
    ({'sliding_window': 6}, 'window'),
    ({'sliding_window': None}, 'window'),
])  # fmt: skip
def test_a_config_that_is_refused(changes, named, tmp_path):
    """Sizes that are not those of the arrays, and what is not supported; no model is built before."""
    folder = copied('t5gemma', tmp_path)
    settings = json.loads((folder / 'config.json').read_text())
    settings['decoder'] |= changes
    (folder / 'config.json').write_text(json.dumps(settings))
    with pytest.raises(Refused) as error:
        infer.load(folder)
    assert named in str(error.value) and '\n' not in str(error.value)


def test_special_ids_of_the_files_beside(tmp_path, caplog):
    folder = shutil.copytree(GOLDEN / 't5gemma/hf', tmp_path / 'hf')
    (folder / 'generation_config.json').write_text('{"eos_token_id": [1, 8]}')
    (folder / 'tokenizer_config.json').write_text('{"add_bos_token": false, "add_eos_token": true}')
    assert infer.load(folder).ends == Ends(answers=(1, 8), inputs=((), (1,)), start=2)
    assert 'generation_config' not in caplog.text
    plain = load('t5gemma').ends
    assert plain == Ends(answers=(1,), inputs=((2,), ()), start=2)


def test_heads_that_share_no_keys():
    config = base.get_config().model
    config.update(module='t5gemma', num_heads=6)
    config.options.update(num_kv_heads=4)
    with pytest.raises(Refused, match='num_kv_heads=4'):
        own_model.load(config)


def as_flax(name, num_rows=0, is_wide_gate=False):
    """A golden model as google-deepmind/gemma has it: nested dicts of arrays, tables with `num_rows` rows more."""
    stored = safetensors.numpy.load_file(GOLDEN / name / 'hf/model.safetensors')
    settings = json.loads((GOLDEN / name / 'hf/config.json').read_text())
    tree = {}
    for stack in ('encoder', 'decoder'):
        H = settings[stack]['head_dim']
        table = stored[f'model.{stack}.embed_tokens.weight']
        part = tree[stack] = {
            'embedder': {'input_embedding': np.pad(table, ((0, num_rows), (0, 0)))},
            'final_norm': {'scale': stored[f'model.{stack}.norm.weight']},
        }
        for i in range(settings[stack]['num_hidden_layers']):
            prefix = f'model.{stack}.layers.{i}.'
            gates = [stored[f'{prefix}mlp.{x}_proj.weight'] for x in ('gate', 'up')]
            if not is_wide_gate:
                gates = [x.T for x in gates]
            layer = part[f'layer_{i}'] = {
                'mlp': {
                    'gating_einsum': np.stack(gates),
                    'linear': stored[f'{prefix}mlp.down_proj.weight'].T,
                }
            }
            norms = {
                'attention': 'self_attn',
                'cross_attention': 'cross_attn',
                'ffw': 'feedforward',
            }
            attentions = {'attn': 'self_attn'}
            if stack == 'decoder':
                attentions['cross_attn'] = 'cross_attn'
            else:
                del norms['cross_attention']
            for place in ('pre', 'post'):
                for theirs, hf in norms.items():
                    scale = stored[f'{prefix}{place}_{hf}_layernorm.weight']
                    layer[f'{place}_{theirs}_norm'] = {'scale': scale}
            for theirs, hf in attentions.items():
                q, k, v, out = [stored[f'{prefix}{hf}.{x}_proj.weight'] for x in 'qkvo']
                # [out, in] -> [heads, in, H]
                q, k, v = [x.reshape(-1, H, x.shape[1]).transpose(0, 2, 1) for x in (q, k, v)]
                einsums = layer[theirs] = {
                    'attn_vec_einsum': {'w': out.T.reshape(-1, H, len(out))},
                }
                if len(q) == len(k) and theirs == 'attn':
                    einsums['qkv_einsum'] = {'w': np.stack([q, k, v])}
                else:
                    einsums['q_einsum'] = {'w': q}
                    einsums['kv_einsum'] = {'w': np.stack([k, v])}
    return tree


@pytest.mark.parametrize('name, is_wide_gate', first_quick([
    ('t5gemma_unbalanced', False), ('t5gemma', True), ('t5gemma_untied', False)
]))  # fmt: skip
def test_flax_arrays(name, is_wide_gate):
    """Rows that belong to no token are left out; each head's scale is its width, as in the release."""
    expected = load(name)
    tree = as_flax(name, num_rows=5, is_wide_gate=is_wide_gate)
    config, arrays = gemma.from_flax(tree, vocab_size=expected.config.vocab_size)
    for field in ('emb_dim', 'num_heads', 'num_encoder_layers', 'num_decoder_layers', 'mlp_dim'):
        assert getattr(config, field) == getattr(expected.config, field)
    options = dataclasses.asdict(expected.config.options)
    found = dataclasses.asdict(config.options)
    assert {name: found[name] for name in found if 'num' in name or 'dim' in name} == {
        name: options[name] for name in found if 'num' in name or 'dim' in name
    }
    assert (found['attention_cap'], found['window']) == (50.0, 4096)
    assert found['query_pre_attn_scalar'] == 0
    assert arrays.keys() == model.shapes(config).keys()
    for path, x in arrays.items():
        np.testing.assert_array_equal(x, expected.arrays[path])
    encoder, _ = gemma.from_flax({'encoder': tree['encoder']}, config.vocab_size)
    assert encoder.num_decoder_layers == 0


# On a mesh.

# Options, and the width of a head with which Adafactor factors the kernels of keys: see run_config.
HEAD_DIMS = {'t5gemma': 64, 't5gemma2': 128}
SIZES = {
    't5gemma': {
        'num_kv_heads': 2,
        'window': 5,
        'encoder_emb_dim': 256,
        'encoder_num_heads': 16,
        'encoder_num_kv_heads': 4,
        'encoder_head_dim': 32,
        'encoder_mlp_dim': 384,
    },
    't5gemma2': {
        'window': 6,
        'full_every': 3,
        'eoi_id': 7,
        'encoder_num_heads': 16,
        'encoder_num_kv_heads': 2,
        'encoder_head_dim': 64,
        'encoder_mlp_dim': 384,
    },
}
# A mesh, microbatches, remat, scan.
WAYS = [
    ((2, 2, 2), 2, 'full', True),
    ((1, 4, 2), 1, 'dots', False),
    ((1, 1, 8), 1, 'none', True),
]


def config_on(mesh, module, **settings):
    data, fsdp, model_axis = mesh
    settings |= {'num_encoder_layers': 5, 'num_decoder_layers': 4, 'head_dim': HEAD_DIMS[module]}
    config = run_config(data, model_axis, fsdp, module=module, **settings)
    config.model.options.update(SIZES[module])
    config.optimizer.multiply_by_parameter_scale = False  # norms are around 0
    config.learning_rate.base_learning_rate = 0.001  # so the rate is absolute
    return config


def take_steps(mesh, module, num_microbatches=1, **settings):
    spec = make_spec(config_on(mesh, module, **settings), num_microbatches)
    state = train.compile_init(spec)()
    losses = []
    for seed in range(3):
        state, metrics = train.jit_step(spec)(state, random_batch(seed))
        losses.append(float(metrics['loss']))
    found = jax.device_get(state_names.to_t5x(*state))
    for path, x in found.items():
        if path.startswith('target/') and path.endswith('_norm/scale'):
            found[path] = 1 + x  # the weight: scales are around 0
    return losses, found


@functools.cache
def on_one_device(module):
    with jax.default_matmul_precision('highest'):
        return take_steps((1, 1, 1), module)


@pytest.mark.slow
@pytest.mark.parametrize('module', SIZES)
@pytest.mark.parametrize('mesh, num_microbatches, remat, scan_layers', first_in_ci(WAYS))
def test_the_same_in_all_ways(module, mesh, num_microbatches, remat, scan_layers):
    """Losses and the state after three steps, with dropout; a scan takes a rest of layers."""
    losses, state = on_one_device(module)
    assert losses[0] != losses[2]
    ways = {'remat': remat, 'scan_layers': scan_layers}
    found_losses, found = take_steps(mesh, module, num_microbatches, **ways)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
    assert_close(found, state, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('module', SIZES)
@pytest.mark.parametrize('mesh', [(2, 2, 2), (1, 1, 8)])
def test_answers_on_a_mesh(module, mesh):
    """With heads of keys and values that several devices share, or that each one has alone."""
    config = own_model.load(config_on((1, 1, 1), module).model)
    params = random_params(config)
    data, fsdp, model_axis = mesh
    one = infer.T5(config, params, make_mesh(1, 1))
    many = infer.T5(config, params, make_mesh(data, model_axis, fsdp))
    batch = random_batch(0)
    assert_close(many.logits(batch), one.logits(batch), 1e-5)
    inputs = ids_of(batch['encoder_input_tokens'])
    for options in ({}, {'beam_size': 2}):
        options |= {'max_length': 8, 'return_scores': True}
        answers = many.generate(inputs, **options)
        expected = one.generate(inputs, **options)
        assert answers.tokens == expected.tokens
        assert_close(answers.scores, expected.scores, 1e-5)


def test_a_mesh_that_is_refused():
    config = own_model.load(config_on((1, 1, 1), 't5gemma').model)
    options = dataclasses.replace(config.options, num_kv_heads=1, encoder_num_kv_heads=1)
    odd = dataclasses.replace(config, num_heads=8, head_dim=6, options=options)
    config.family.check_mesh(config, make_mesh(1, 8))
    with pytest.raises(Refused, match='num_kv_heads'):
        config.family.check_mesh(odd, make_mesh(1, 4))
    wide = dataclasses.replace(config, options=dataclasses.replace(options, encoder_emb_dim=129))
    with pytest.raises(Refused, match='emb_dim=129'):
        config.family.check_mesh(wide, make_mesh(1, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize('module', SIZES)
def test_adapters(module):
    """A merged model computes as it does unmerged; keys that devices share have adapters too."""
    settings = {'lora_rank': 2, 'lora_targets': '.+/(query|key|value|out)/kernel'}
    config = own_model.load(config_on((1, 1, 1), module, **settings).model)
    params = random_params(config)
    assert any('key/lora_a' in path for path in model.adapter_paths(config))
    for path in model.adapter_paths(config):
        params[path] *= 0.3  # else a softmax is so sharp that it magnifies rounding
    merged = lora.without_adapters(config), lora.merge(config, params)
    batch = random_batch(0)
    expected = infer.T5(*merged, make_mesh(1, 1)).logits(batch)
    assert_close(infer.T5(config, params, make_mesh(1, 8)).logits(batch), expected, 1e-5)


@pytest.mark.parametrize('name', ['t5gemma', 't5gemma2'])
def test_adapters_of_peft(name, tmp_path):
    """A folder of peft equals a folder of transformers into which it is merged."""
    folder = copied(name, tmp_path)
    rng = np.random.default_rng(0)
    adapters = {}
    merged = safetensors.numpy.load_file(folder / 'model.safetensors')
    for array, x in merged.items():
        module = array.removesuffix('.weight')
        if module.endswith(('layers.1.self_attn.q_proj', 'layers.0.mlp.down_proj')):
            a = rng.normal(size=(2, x.shape[1])).astype(np.float32)
            b = rng.normal(size=(x.shape[0], 2)).astype(np.float32)
            adapters[f'base_model.model.{module}.lora_A.weight'] = a
            adapters[f'base_model.model.{module}.lora_B.weight'] = b
            merged[array] = x + 8 / 2 * b @ a
    peft = tmp_path / 'peft'
    peft.mkdir()
    safetensors.numpy.save_file(adapters, peft / 'adapter_model.safetensors')
    settings = {'peft_type': 'LORA', 'r': 2, 'lora_alpha': 8}
    settings['base_model_name_or_path'] = str(GOLDEN / name / 'hf')
    (peft / 'adapter_config.json').write_text(json.dumps(settings))
    safetensors.numpy.save_file(merged, folder / 'model.safetensors')
    assert len(adapters) == 8  # of two kernels in each stack
    batch = batch_of(arrays_of(name), 'batch')
    found = infer.load(peft).logits(batch)
    assert np.abs(found - load(name).logits(batch)).max() > 0.1
    assert_near(found, infer.load(folder).logits(batch), LOGITS)


@pytest.mark.parametrize('module', SIZES)
def test_a_prompt(module):
    """Options of both files are one group; the prompt has the encoder's width."""
    config = base.get_config().model
    config.update(OWN_SIZES, module=f'{module},prompt_tuning', lora_rank=2)
    config.mlp_activations = ('gelu', 'linear')
    config.options.update(length=3)
    if module == 't5gemma':
        config.options.encoder_emb_dim = 24
    config = own_model.load(config)
    width = 24 if module == 't5gemma' else 16
    assert model.shapes(config)['prompt/embedding'] == (3, width)
    params = random_params(config)
    read = params.__getitem__
    [prompt] = prompt_tuning.initial_adapters(config, read, ByteVocabulary(), seed=0).values()
    table = (
        'encoder/token_embedder/embedding' if module == 't5gemma' else 'token_embedder/embedding'
    )
    embeddings = params[table] * width**0.5
    distances = np.abs(prompt[:, None] - embeddings[None]).max(axis=-1)
    assert (distances.min(axis=1) < 1e-5).all()


@pytest.mark.slow
@pytest.mark.parametrize('module', SIZES)
def test_initial_logits(module):
    """From nothing, tied logits have a deviation of 1, though embeddings are multiplied by sqrt(emb_dim)."""
    config = config_on((1, 1, 1), module, logits_via_embedding=True)
    config = own_model.load(config.model)
    params = jax.device_get(model.init(config, jax.random.key(0)))
    table = params['token_embedder/embedding'] * config.emb_dim**0.5
    np.testing.assert_allclose(table.std(), 1, rtol=0.02)
    assert all(not params[path].any() for path in params if path.endswith('scale'))
    logits = np.asarray(infer.T5(config, params, make_mesh(1, 1)).logits(random_batch(0)))
    assert 0.5 < logits.std() < 2


# FLOPs.


@pytest.mark.slow
@pytest.mark.parametrize('module', SIZES)
def test_flops(module):
    """As XLA counts the products of a forward pass, which has a few more operations."""
    config = own_model.load(config_on((1, 1, 1), module, dropout_rate=0.0).model)
    batch = {name: jax.ShapeDtypeStruct((1, 32), np.int32) for name in FEATURES}
    shapes = {path: jax.ShapeDtypeStruct(x, np.float32) for path, x in model.shapes(config).items()}
    forward = sharded(
        lambda params, batch: model.apply(model.logits, params, config, batch)[0],
        config,
        make_mesh(1, 1),
        P(partition.BATCH_AXES, None, 'model'),
    )
    counted = forward.lower(shapes, batch).compile().cost_analysis()['flops']
    assert 1.0 <= counted / config.family.flops(config, 32, 32) < 1.1


# A user's file.


def test_a_copy_of_the_file(tmp_path):
    """It is an own model in any folder."""
    config = base.get_config().model
    config.update(
        emb_dim=16, num_heads=2, head_dim=8, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1
    )
    shapes = {}
    for module in SIZES:
        copy = shutil.copy(ROOT / f'families/{module}.py', tmp_path / f'my_{module}.py')
        config.module = str(copy)
        shapes[module] = model.shapes(own_model.load(config))
        config.module = module
        assert model.shapes(own_model.load(config)) == shapes[module]
    assert 'encoder/token_embedder/embedding' in shapes['t5gemma']
    assert 'token_embedder/eoi_embedding' in shapes['t5gemma2']


# Against transformers itself.


@pytest.mark.peers
@pytest.mark.parametrize('module', SIZES)
def test_transformers_computes_what_we_do(module, tmp_path):
    """It opens what we write. Its encoder's window is a key wider, so no input is longer than T5Gemma's."""
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers', minversion='5.24')
    tied = module == 't5gemma2'  # the other case is not in transformers
    config = config_on((1, 1, 1), module, dropout_rate=0.0, logits_via_embedding=tied)
    config.model.options.window = 24
    config = own_model.load(config.model)
    params = random_params(config)
    write_hugging_face.write(tmp_path / 'hf', config, params)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / 'hf', attn_implementation='eager', dtype=torch.float32
    ).eval()
    batch = {name: x for name, x in random_batch(0).items() if name in FEATURES}
    inputs = torch.tensor(batch['encoder_input_tokens']).long()
    shifted = np.where(np.arange(16) > 0, batch['decoder_input_tokens'], 2)
    with torch.no_grad():
        expected = theirs(
            input_ids=inputs,
            attention_mask=(inputs > 0).long(),
            decoder_input_ids=torch.tensor(shifted).long(),
        ).logits.numpy()
    found = np.asarray(infer.T5(config, params, make_mesh(1, 1)).logits(batch))
    mask = (batch['decoder_target_tokens'] > 0)[..., None]
    assert_close(found * mask, expected * mask, 1e-5)
    theirs.save_pretrained(tmp_path / 'again')
    assert infer.load(tmp_path / 'again').config == config
