"""Hugging Face folders: transformers' own numbers, there and back to the bit, and folders not to be trusted.

golden/hf_t5_1_1: a random T5 1.1 that transformers 4.57.6 saved, and its logits in float32 on a CPU.
golden/hf_encoder.npz: what its encoders compute with `random_arrays` and `encoder_batch`, written by
PYTHONPATH=tests:. python -c 'import hugging_face_test; hugging_face_test.write_encoder_golden()'.
Tolerances are max|a-b| <= tol * max|b|, 1e-4 for logits: float32 sums in another order.
With transformers and torch installed, the tests at the end compare with what these compute themselves.
"""

import dataclasses
import io
import json
import os
import pathlib
import re
import shutil
import struct

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import sentencepiece
from corpora import HUNT
from forms import first_quick
from safetensors.numpy import load_file, save_file
from small_models import assert_close, assert_refused, with_adapters

import checkpoint
import formats.open
import formats.vocabulary
import infer
import model
import partition
from families import lora
from formats import hugging_face, own_model, peft, write_hugging_face, write_peft
from formats.vocabulary import files_of, find_vocabulary
from messages import Refused
from modes import infer as infer_mode
from vocabulary import SentencePieceVocabulary

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'hf_t5_1_1'
LOGITS_TOLERANCE = 1e-4
ENCODER_GOLDEN = GOLDEN.parent / 'hf_encoder.npz'
ENCODER_TOLERANCE = 1e-5
SIZES = {
    'vocab_size': 96,
    'dtype': 'float32',
    'emb_dim': 16,
    'num_heads': 2,
    'num_encoder_layers': 3,
    'num_decoder_layers': 2,
    'head_dim': 6,
    'mlp_dim': 24,
    'mlp_activations': ('gelu', 'linear'),
    'dropout_rate': 0.1,
    'logits_via_embedding': False,
    'float32_attention_logits': False,
    'relpos_bias_per_layer': False,
}
T5_1_0 = SIZES | {'mlp_activations': ('relu',), 'logits_via_embedding': True}
CONFIGS = {
    't5_1_0': model.T5Config(**T5_1_0),
    't5_1_1': model.T5Config(**SIZES | {'dropout_rate': 0.0}),
    'mt5': model.T5Config(**SIZES),
    'umt5': model.T5Config(**SIZES | {'relpos_bias_per_layer': True}),
    'ul2': model.T5Config(**SIZES | {'mlp_activations': ('silu', 'linear')}),
    'bigscience': model.T5Config(**SIZES | {'logits_via_embedding': True}),
}

# Options with which transformers computes the same.
FAMILIES = {
    'long_t5': {'encoder_attention': 'transient_global', 'local_radius': 3, 'tokens_per_block': 2},
    'switch': {
        'num_experts': 4,
        'train_expert_capacity_factor': 0.0,
        'eval_expert_capacity_factor': 0.0,
        'min_expert_capacity': 2,
        'zero_padding': False,
    },
}


def random_arrays(config, dtype='float32'):
    """Return parameters of a size that keeps logits near one and every term of them in play."""
    rng = np.random.default_rng(0)
    arrays = {}
    for path, shape in model.shapes(config).items():
        x = rng.standard_normal(shape)
        if path.endswith('kernel'):
            x /= np.sqrt(shape[0])
        elif path.endswith('scale'):
            x = 1 + 0.3 * x
        arrays[path] = jnp.asarray(x, dtype)
    return arrays


def write(folder, name, arrays, *options):
    """Write CONFIGS[name] under its own name, though an mt5 is a t5 to us."""
    write_hugging_face.write(folder, CONFIGS[name], arrays, *options)
    if name == 'mt5':
        architectures = ['MT5ForConditionalGeneration']
        edit_json(folder / 'config.json', model_type='mt5', architectures=architectures)


def load(folder):
    """As infer.load opens a checkpoint: config, headers, shapes compared, then the arrays."""
    config, entries, _ = hugging_face.read_index(folder)
    entries = checkpoint.parameters(entries)
    formats.open.compare(model.shapes(config), checkpoint.shapes(entries))
    arrays = {path: jnp.asarray(entry.read()) for path, entry in entries.items()}
    return infer.T5(config, arrays, partition.make_mesh(data=1))


def assert_same_bits(found, expected):
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, found), expected, strict=True)


def assert_same_logits(found, expected, weights):
    seen = weights > 0
    assert_close(np.asarray(found)[seen], np.asarray(expected)[seen], LOGITS_TOLERANCE)


def edit_json(file, **changes):
    """Changes some keys; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: x for key, x in content.items() if x is not None}))


def edit_arrays(folder, **changes):
    """Changes some arrays, '__' in a name standing for '.'; None removes one."""
    changes = {name.replace('__', '.'): x for name, x in changes.items()}
    arrays = load_file(folder / 'model.safetensors') | changes
    arrays = {name: x for name, x in arrays.items() if x is not None}
    save_file(arrays, folder / 'model.safetensors', {'format': 'pt'})


def test_what_transformers_wrote_we_write(tmp_path):
    t5 = load(GOLDEN)
    write_hugging_face.write(tmp_path / 'hf', t5.config, t5.arrays)
    found = load_file(tmp_path / 'hf/model.safetensors')
    assert_same_bits(found, load_file(GOLDEN / 'model.safetensors'))
    ours = json.loads((tmp_path / 'hf/config.json').read_text())
    theirs = json.loads((GOLDEN / 'config.json').read_text())
    assert ours.items() <= theirs.items()


BEAMS = {'num_beams': 5, 'length_penalty': 0.0, 'early_stopping': True}
DRAWS = {'do_sample': True, 'top_p': 0.9}
SAID_OF_GENERATION = [
    # generation_config.json, and what the line names, in order
    (BEAMS, 'num_beams=5 (use beam_size)|length_penalty=0.0 (use alpha|early_stopping=true (not'),
    (DRAWS, 'temperature=1.0 (use temp|top_k=50 (|do_sample=true (use temp|top_p=0.9 (use top_p)'),
    (
        {'min_length': 8, 'max_length': 200},
        'min_length=8 (use min_l|max_length=200 (use max_length, one',
    ),
    ({'max_new_tokens': 60, 'max_length': 20}, 'max_new_tokens=60 (use max_length'),
    ({'no_repeat_ngram_size': 1, 'repetition_penalty': 1}, 'no_repeat_ngram_size=1 (use no_repeat'),
    (
        {'eos_token_id': [1, 32], 'forced_eos_token_id': 1},
        'eos_token_id=[1, 32] (use stop|forced_eos_token_id=1 (not',
    ),
    ({'length_penalty': 2.0, 'top_k': 9, 'temperature': 0.3, 'use_cache': False}, ''),
    ({'num_beams': 1, 'eos_token_id': [1], '_x': 3, 'bad_words_ids': [], 'top_p': 1.0}, ''),
    ('[1', 'generation_config.json is damaged'),
]


@pytest.mark.parametrize('content, said', SAID_OF_GENERATION)
def test_generation_settings_that_differ_are_named(tmp_path, caplog, content, said):
    folder = shutil.copytree(GOLDEN, tmp_path / 'hf')
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / 'generation_config.json').write_text(text)
    request = infer_mode.Request(str(folder), text='a')
    infer_mode.load(infer_mode.prepare(request, None, {'data.vocabulary': 'bytes'}))
    infer.load(folder, part='encoder')  # does not generate
    message = ''.join(caplog.messages)
    assert len(caplog.messages) == bool(said)
    assert re.search('.*'.join(map(re.escape, said.split('|'))), message)
    assert re.findall(r'\w+=', message) == re.findall(r'\w+=', said)  # no others


SHARDS = [*((name, 10_000, 'float32') for name in CONFIGS), ('t5_1_1', 5 * 10**9, 'bfloat16')]


@pytest.mark.parametrize('name, shard_bytes, dtype', SHARDS)
def test_there_and_back(tmp_path, name, shard_bytes, dtype):
    config = CONFIGS[name]
    arrays = random_arrays(config, dtype)
    folder = tmp_path / 'new' / 'hf'
    vocabulary = SentencePieceVocabulary((HUNT / 'good.model').read_bytes())
    write(folder, name, arrays, vocabulary, shard_bytes)
    assert hugging_face.is_folder(folder)
    assert (folder / 'spiece.model').read_bytes() == vocabulary.model
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1  # of the user's umask
    t5 = load(folder)
    assert t5.config == config
    assert_same_bits(t5.arrays, arrays)
    assert os.listdir(tmp_path / 'new') == ['hf']
    files = sorted(folder.glob('*.safetensors'))
    if shard_bytes == 10_000:
        assert len(files) >= 3 and files[1].name == f'model-00002-of-{len(files):05}.safetensors'
        index = json.loads((folder / 'model.safetensors.index.json').read_text())
        assert index['metadata']['total_size'] == sum(x.nbytes for x in arrays.values())
        for file in files:
            shard = load_file(file)
            assert len(shard) == 1 or sum(x.nbytes for x in shard.values()) <= shard_bytes
            assert {x for x, f in index['weight_map'].items() if f == file.name} == shard.keys()
    else:
        assert [file.name for file in files] == ['model.safetensors']


def test_a_config_without_what_old_folders_lack(tmp_path):
    config = model.T5Config(**T5_1_0 | {'num_decoder_layers': 3})
    folder = tmp_path / 'hf'
    write_hugging_face.write(folder, config, random_arrays(config))
    names = ('feed_forward_proj', 'dense_act_fn', 'is_gated_act', 'num_decoder_layers')
    names += ('relative_attention_max_distance', 'tie_word_embeddings')
    edit_json(folder / 'config.json', **dict.fromkeys(names))
    assert hugging_face.read_index(folder)[0] == config


def test_copies_of_the_token_table(tmp_path):
    config = model.T5Config(**T5_1_0 | {'vocab_size': 5000})
    arrays = random_arrays(config)
    folder = tmp_path / 'hf'
    write_hugging_face.write(folder, config, arrays)
    table = np.array(arrays['token_embedder/embedding'])
    unused = {hugging_face.UNUSED.replace('.', '__'): np.zeros([32, 2], np.float32)}
    edit_arrays(folder, encoder__embed_tokens__weight=table, lm_head__weight=table, **unused)
    assert_same_bits(load(folder).arrays, arrays)
    edit_arrays(folder, shared__weight=None)  # any of the names will do
    assert_same_bits(load(folder).arrays, arrays)
    table[-1, -1] += 1
    edit_arrays(folder, decoder__embed_tokens__weight=table)
    assert_refused(lambda: load(folder), 'decoder.embed_tokens.weight')


# lm_head.weight, changes of config.json, and whether the logits are those of the token table; else what is refused.
LOGITS = [
    (None, {}, 'tied'),
    ('equal', {}, 'tied'),
    ('own', {}, 'untied'),  # arrays are believed before the config
    ('own', {'tie_word_embeddings': True}, 'untied'),
    ('own', {'tie_word_embeddings': True, 'model_type': 'mt5'}, 'untied'),
    ('own', {'tie_word_embeddings': True, 'scale_decoder_outputs': False}, 'untied'),
    ('own', {'scale_decoder_outputs': True}, 'scale_decoder_outputs=false'),
    ('equal', {'tie_word_embeddings': False}, 'untied'),
    (None, {'tie_word_embeddings': True, 'scale_decoder_outputs': False}, 'untied'),
    # transformers 5 saves every mt5 without an lm_head of its own like this.
    (None, {'tie_word_embeddings': True, 'model_type': 'mt5'}, 'tie_word_embeddings=false'),
    (None, {'tie_word_embeddings': False, 'model_type': 'mt5'}, 'untied'),
]


def test_which_logits_are_tied(tmp_path):
    """Both versions of transformers compute like this, or the arrays say what their config no longer can."""
    config = CONFIGS['t5_1_0']
    arrays = random_arrays(config)
    table = np.asarray(arrays['token_embedder/embedding'])
    lm_heads = {None: None, 'equal': table, 'own': 2 * table}
    for i, (lm_head, settings, expected) in enumerate(LOGITS):
        folder = tmp_path / str(i)
        write_hugging_face.write(folder, config, arrays)
        edit_json(folder / 'config.json', **{'tie_word_embeddings': None, **settings})
        edit_arrays(folder, lm_head__weight=lm_heads[lm_head])
        if expected not in ('tied', 'untied'):
            assert_refused(lambda folder=folder: load(folder), expected)
            continue
        t5 = load(folder)
        assert t5.config.logits_via_embedding == (expected == 'tied')
        if expected == 'untied':
            weight = 2 * table if lm_head == 'own' else table
            np.testing.assert_array_equal(t5.arrays['decoder/logits_dense/kernel'], weight.T)


# Folders that are refused, and what the message names.

BAD_CONFIGS = [
    ({'model_type': 'bart'}, 'model_type=bart'),
    ({'model_type': ['t5']}, 'model_type='),
    ({'feed_forward_proj': 'gated-tanh'}, 'feed_forward_proj=gated-tanh'),
    ({'feed_forward_proj': ['relu']}, 'config.json'),
    ({'dense_act_fn': 'gelu'}, 'dense_act_fn=gelu'),
    ({'layer_norm_epsilon': 1e-05}, 'layer_norm_epsilon=1e-05'),
    ({'relative_attention_num_buckets': 64}, 'relative_attention_num_buckets=64'),
    ({'decoder_start_token_id': 2}, 'decoder_start_token_id=2'),
    ({'d_model': '32'}, 'd_model=32'),
    ({'d_model': 0}, 'd_model=0'),
    ({'d_model': 384.0}, 'd_model=384.0'),
    ({'d_model': None}, 'd_model=None'),
    ({'num_layers': 10**12}, 'num_layers=1000000000000'),
    ({'num_layers': 3}, 'num_layers=3'),
    ({'dropout_rate': 'high'}, 'config.json'),
    ({'num_decoder_layers': 1}, 'decoder.block.1.'),
    ({'model_type': 'umt5'}, 'block.1.layer.0.SelfAttention.relative_attention_bias'),
    ({'d_ff': 128}, 'mlp/wi_0/kernel'),
    ({'model_type': 'longt5', 'encoder_attention_type': ['local']}, 'encoder_attention_type='),
    ({'model_type': 'switch_transformers', 'encoder_sparse_step': [1]}, 'encoder_sparse_step='),
]


def test_configs_that_are_refused(tmp_path):
    for settings, name in BAD_CONFIGS:
        copy_golden(tmp_path)
        edit_json(tmp_path / 'config.json', **settings)
        assert_refused(lambda: load(tmp_path), name)


def copy_golden(folder):
    for name in ('config.json', 'model.safetensors'):
        (folder / name).write_bytes((GOLDEN / name).read_bytes())


def header(content, data=b''):
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack('<Q', len(content)) + content + data


def described(**changes):
    described = {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]}
    return {'shared.weight': described | changes}


GOLDEN_FILE = (GOLDEN / 'model.safetensors').read_bytes()
HOSTILE = {
    'empty': b'',
    'not safetensors': b'PK\x03\x04' * 99,
    'endless header': struct.pack('<Q', 2**62) + b'{}',
    'torn': GOLDEN_FILE[:-1],
    'longer': GOLDEN_FILE + b'x',
    'huge': header(described(shape=[2**40, 2**40]), b'\0' * 8),
    'bigger than its file': header(described(data_offsets=[0, 80]), b'\0' * 8),
    'bigger than its bytes': header(described(shape=[3]), b'\0' * 8),
    'integers': header(described(dtype='I32'), b'\0' * 8),
    'no rows': header(described(shape=[], data_offsets=[0, 4]), b'\0' * 4),
    'no columns': header(described(shape=[2**62, 0], data_offsets=[0, 0])),
    'no table': header({'x': described()['shared.weight']}, b'\0' * 8),
    'nothing': header({}),
}
INDEX = 'model.safetensors.index.json'
BAD_INDICES = [
    ({'weight_map': {'shared.weight': '../model.safetensors'}}, INDEX),
    ({'weight_map': {'shared.weight': '/etc/passwd'}}, INDEX),
    ({'weight_map': {'shared.weight': 'pytorch_model.bin'}}, INDEX),
    ({'weight_map': {'shared.weight': {'a': 1}}}, INDEX),
    ({'weight_map': {'shared.weight': 'more.safetensors'}}, 'more.safetensors'),
    ({'weight_map': {'a': 'a.safetensors', 'b': 'b.safetensors'}}, 'b.safetensors'),
    ({'weight_map': {}}, 'shared.weight'),
    ({'weight_map': []}, INDEX),
    ({}, INDEX),
    ([], INDEX),
]


def test_files_that_are_refused(tmp_path):
    copy_golden(tmp_path)
    edit_json(tmp_path / 'config.json', num_layers=1, num_decoder_layers=1)
    for content in HOSTILE.values():
        (tmp_path / 'model.safetensors').write_bytes(content)
        assert_refused(lambda: load(tmp_path), str(tmp_path))
    (tmp_path / 'model.safetensors').unlink()
    for name in ('a.safetensors', 'b.safetensors'):
        (tmp_path / name).write_bytes(GOLDEN_FILE)
    for index, name in BAD_INDICES:
        (tmp_path / INDEX).write_text(json.dumps(index))
        assert_refused(lambda: load(tmp_path), name)


@pytest.mark.parametrize('name', ['model.safetensors', 'config.json'])
@pytest.mark.parametrize(
    'place, target',
    [
        ('model/snapshots/0123', 'model/blobs'),
        ('model/snapshots/0123/text_encoder_2', 'model/blobs'),
        ('repository/models/t5', 'repository/.dvc/cache/files/md5'),
    ],
)
def test_a_link_never_leaves_its_folder(tmp_path, name, place, target):
    """But the caches of Hugging Face and DVC, which consist of links, open, also by a link to the folder."""
    folder, blobs = tmp_path / place, tmp_path / target
    folder.mkdir(parents=True)
    blobs.mkdir(parents=True)
    copy_golden(folder)
    (folder / name).rename(blobs / 'abc')
    (folder / name).symlink_to(blobs / 'abc')
    (tmp_path / 'link').symlink_to(folder)
    for path in (folder, tmp_path / 'link'):
        formats.open.open_model(path)
    for secret in (tmp_path / 'secret', tmp_path / place.split('/')[0] / 'secret'):
        (folder / name).resolve().rename(secret)
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
        assert_refused(lambda: load(folder), str(folder / name))


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    config = CONFIGS['t5_1_0']
    arrays = random_arrays(config)
    folder = tmp_path / 'hf'

    read = []

    class Lazy(dict):
        def __getitem__(self, path):
            if self == {} and 'decoder/layers_1' in path:
                raise OSError('the disk is gone')
            read.append(path)
            return arrays[path]

        def __iter__(self):
            return iter(arrays)

    with pytest.raises(OSError):
        write_hugging_face.write(folder, config, Lazy(), shard_bytes=10_000)
    other = dataclasses.replace(config, mlp_activations=('relu', 'linear'))
    assert_refused(lambda: write_hugging_face.write(folder, other, {}), 'mlp_activations=')
    assert os.listdir(tmp_path) == []
    del read[:]
    write_hugging_face.write(folder, config, Lazy(any=1), shard_bytes=10_000)
    assert read == list(arrays)  # each once
    assert_refused(lambda: write_hugging_face.write(folder, config, arrays), str(folder))
    assert_same_bits(load(folder).arrays, arrays)


# Encoders alone.


def encoder_batch():
    """Ids of three rows, two of them padded."""
    ids = np.random.default_rng(2).integers(2, 96, [3, 11])
    return np.where(np.arange(11)[None] < np.array([[11], [7], [1]]), ids, 0)


def assert_same_encodings(path, expected, inputs, **options):
    t5 = infer.load(path, **options)
    assert not [name for name in t5.arrays if name.startswith('decoder')]
    outputs, mask = t5.encode(inputs)
    np.testing.assert_array_equal(mask, inputs > 0)
    assert outputs.dtype == np.float32 and not outputs[~mask].any()
    assert_close(outputs[mask], expected[mask], ENCODER_TOLERANCE)
    return t5


def write_encoder(folder, name, dtype='float32'):
    """Write a folder of a whole model, and what transformers writes of its encoder: `single` is its file."""
    config = CONFIGS[name]
    arrays = random_arrays(config, dtype)
    write(folder / 'whole', name, arrays)
    stored = load_file(folder / 'whole/model.safetensors')
    stored = {x: stored[x] for x in stored if x.startswith(('encoder.', 'shared.'))}
    (folder / 'encoder').mkdir()
    save_file(stored, folder / 'encoder/model.safetensors', {'format': 'pt'})
    config_json = json.loads((folder / 'whole/config.json').read_text())
    model_class = config_json['architectures'][0].replace(
        'ForConditionalGeneration', 'EncoderModel'
    )
    # UMT5EncoderModel leaves is_encoder_decoder true.
    config_json |= {'architectures': [model_class], 'is_encoder_decoder': name == 'umt5'}
    (folder / 'encoder/config.json').write_text(json.dumps(config_json))
    (folder / 'single').mkdir()
    save_file(stored, folder / 'single/t5_fp32.safetensors')


@pytest.mark.parametrize('name', first_quick(CONFIGS))
def test_encoders_of_transformers(tmp_path, name):
    """A folder of an encoder, the encoder of a whole folder, and a single file."""
    write_encoder(tmp_path, name)
    expected = np.load(ENCODER_GOLDEN)[name]
    encoder = dataclasses.replace(CONFIGS[name], num_decoder_layers=0, logits_via_embedding=True)
    t5 = assert_same_encodings(tmp_path / 'encoder', expected, encoder_batch())
    assert t5.config == encoder
    assert_same_bits(infer.load(tmp_path / 'whole', part='encoder').arrays, t5.arrays)
    config = None
    if name == 'ul2':  # its shapes do not tell
        config = encoder
    single = infer.load(tmp_path / 'single/t5_fp32.safetensors', config=config)
    assert_same_bits(single.arrays, t5.arrays)
    assert single.config == dataclasses.replace(encoder, dropout_rate=single.config.dropout_rate)


def test_a_single_file(tmp_path, caplog, monkeypatch):
    """By a relative path, in half precision. What is assumed of the activation is said, where it may be wrong."""
    write_encoder(tmp_path, 't5_1_1', 'float16')
    write_encoder(tmp_path / 'ungated', 't5_1_0')
    monkeypatch.chdir(tmp_path / 'single')
    t5 = infer.load('t5_fp32.safetensors')
    assert {x.dtype.name for x in t5.arrays.values()} == {'float32'}
    [message] = caplog.messages
    assert 't5_fp32.safetensors' in message and "mlp_activations=('gelu', 'linear')" in message
    caplog.clear()
    silu = dataclasses.replace(t5.config, mlp_activations=('silu', 'linear'))
    assert infer.load('t5_fp32.safetensors', config=silu).config == silu
    infer.load(tmp_path / 'ungated/single/t5_fp32.safetensors')
    assert not caplog.messages


@pytest.mark.parametrize('name', ['t5_1_0', 'umt5'])
def test_a_single_file_of_a_whole_model(tmp_path, name):
    write_encoder(tmp_path, name)
    expected = load(tmp_path / 'whole')
    file = (tmp_path / 'whole/model.safetensors').rename(tmp_path / 'model.safetensors')
    t5 = infer.load(file)
    assert t5.config == expected.config
    assert_same_bits(t5.arrays, expected.arrays)
    encoder = infer.load(file, part='encoder')
    assert_same_bits(encoder.arrays, infer.load(tmp_path / 'single/t5_fp32.safetensors').arrays)


BIAS = 'encoder__block__0__layer__0__SelfAttention__relative_attention_bias__weight'
MATRIX = np.zeros([2, 2], np.float32)
BAD_SINGLE_FILES = [
    ({'shared__weight': None}, 'shared.weight'),
    ({BIAS: None}, 'relative_attention_bias.weight'),
    ({'encoder__block__1__layer__1__DenseReluDense__wo__weight': None}, 'wo.weight'),
    (
        {'encoder__block__0__layer__1__mlp__router__classifier__weight': np.zeros([], np.float32)},
        'router',
    ),
    ({'classification_head__dense__weight': MATRIX}, 'classification_head.dense.weight: save'),
    ({'t5_encoder__shared__weight': MATRIX}, 't5_encoder.shared.weight: save'),  # RankGen
    ({'spiece_model': np.zeros([9], np.uint8)}, 'spiece_model: save'),  # ComfyUI
    (
        {'shared__weight': None, 'token_embedding__weight': MATRIX},
        'token_embedding.weight: save',
    ),  # Wan
    (
        {'text_encoders__t5xxl__transformer__shared__weight': MATRIX},
        'former.shared.weight: save',
    ),  # SD3
]


def test_single_files_that_are_refused(tmp_path):
    write_encoder(tmp_path, 't5_1_1')
    content = (tmp_path / 'single/t5_fp32.safetensors').read_bytes()
    file = tmp_path / 'single/model.safetensors'
    for changes, name in BAD_SINGLE_FILES:
        file.write_bytes(content)
        edit_arrays(tmp_path / 'single', **changes)
        assert_refused(lambda: infer.load(file), str(file))
        assert_refused(lambda: infer.load(file), name)


# Single files in FP8.


def float8_file(file, arrays):
    """Write arrays, some of them in FP8, which safetensors does not write from NumPy."""
    kinds = {'float8_e4m3fn': 'F8_E4M3', 'float32': 'F32', 'uint8': 'U8'}
    content = {}
    data = b''
    for name, x in arrays.items():
        end = len(data) + x.nbytes
        content[name] = {'dtype': kinds[x.dtype.name], 'shape': x.shape}
        content[name]['data_offsets'] = [len(data), end]
        data += x.tobytes()
    file.write_bytes(header(content, data))


def test_a_file_in_fp8(tmp_path):
    """Its values are those of FP8 times its scales, as Comfy stores both."""
    write_encoder(tmp_path, 't5_1_1')
    stored = load_file(tmp_path / 'single/t5_fp32.safetensors')
    content = {'scaled_fp8': np.zeros([2], ml_dtypes.float8_e4m3fn)}
    rounded = {}
    for i, (name, x) in enumerate(stored.items()):
        content[name] = x
        rounded[name] = x
        if x.ndim == 2:
            content[name] = x.astype(ml_dtypes.float8_e4m3fn)
            rounded[name] = content[name].astype(np.float32)
        if x.ndim == 2 and '.layer.' in name and 'bias' not in name:
            scale = np.float32([2.5, np.arange(len(x))[:, None]][i % 2])
            content[name.replace('weight', ['scale_weight', 'weight_scale'][i % 2])] = scale
            content[name.replace('weight', 'scale_input')] = np.float32(3)
            rounded[name] *= scale
    save_file(rounded, tmp_path / 'encoder/model.safetensors')
    file = tmp_path / 'fp8.safetensors'
    float8_file(file, {name: np.asarray(x) for name, x in content.items()})
    assert_same_bits(infer.load(file).arrays, infer.load(tmp_path / 'encoder').arrays)
    content['encoder.block.0.layer.0.SelfAttention.q.scale_weight'] = np.ones([12], np.float32)
    float8_file(file, {name: np.asarray(x) for name, x in content.items()})
    assert_refused(lambda: infer.load(file), 'q.scale_weight')


def test_a_folder_of_sentence_transformers(tmp_path, caplog):
    write_encoder(tmp_path, 't5_1_1')
    (tmp_path / 'encoder/2_Dense').mkdir()
    (tmp_path / 'encoder/2_Dense/config.json').write_text('{}')
    infer.load(tmp_path / 'encoder')
    assert '2_Dense' in caplog.messages[0]


def test_the_encoder_of_an_mt5_whose_logits_are_in_doubt(tmp_path):
    """transformers 5 saves all mt5 as tied, which its encoder does not depend on."""
    write_encoder(tmp_path, 'mt5')
    edit_json(tmp_path / 'whole/config.json', tie_word_embeddings=True)
    edit_arrays(tmp_path / 'whole', lm_head__weight=None)
    found = infer.load(tmp_path / 'whole', part='encoder')
    assert_same_bits(found.arrays, infer.load(tmp_path / 'encoder').arrays)


# Families whose folders look otherwise.


# Folders of MADLAD-400's form: unknown 0, BOS 1, EOS 2; padded with 1, decoded from 0. hunt's default_ids.model is
# what spm_train writes without flags.
DEFAULT_IDS = (HUNT / 'default_ids.model').read_bytes()
PROCESSOR = sentencepiece.SentencePieceProcessor(model_proto=DEFAULT_IDS)
TEXTS = ['Some text of words', '', 'a zyx € of the a']
MADLAD = dataclasses.replace(CONFIGS['t5_1_1'], vocab_size=PROCESSOR.vocab_size())


def llama_like():
    """A SentencePiece model of Llama's form: BPE, bytes for unknown characters, no normalization."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(['Some text of the words, and of other words: 12 of them.'] * 20),
        model_writer=written,
        model_type='bpe',
        vocab_size=320,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name='identity',
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return written.getvalue()


def test_a_folder_like_pile_t5s(tmp_path):
    """umT5's layers with Llama's tokenizer.model: unknown 0, which is also padding and start, BOS 1, EOS 2."""
    content = llama_like()
    processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    config = dataclasses.replace(CONFIGS['umt5'], vocab_size=processor.vocab_size() + 128)
    arrays = random_arrays(config)
    folder = tmp_path / 'pile'
    write_hugging_face.write(folder, config, arrays)
    edit_json(folder / 'config.json', eos_token_id=2, decoder_start_token_id=0, pad_token_id=0)
    (folder / 'tokenizer.model').write_bytes(content)
    texts = [*TEXTS, 'zyx é € 123', '\tof  them ']
    expected = processor.encode(texts)
    settings = {'tokenizer_class': 'LlamaTokenizer', 'bos_token': '<s>', 'eos_token': '</s>'}
    for tokens in ({}, {'pad_token': '<unk>'}):
        (folder / 'tokenizer_config.json').write_text(json.dumps(settings | tokens))
        t5 = infer.load(folder)
        encoded = t5.vocabulary.encode(texts)
        assert [in_default_order(ids) for ids in encoded] == expected
        assert [t5.vocabulary.decode(ids) for ids in encoded] == processor.decode(expected)
        assert t5.vocabulary.num_sentinels == 100
    stored = np.array(arrays['token_embedder/embedding'])
    found = np.asarray(t5.arrays['token_embedder/embedding'])
    np.testing.assert_array_equal(found[:4], stored[[0, 2, 0, 3]])


def in_default_order(ids):
    return [{0: 1, 1: 2, 2: 0}.get(i, i) for i in map(int, ids)]


def write_madlad(folder, start=0):
    """Write a model with these ids, and return its parameters with T5's."""
    arrays = random_arrays(MADLAD)
    table = np.array(arrays['token_embedder/embedding'])
    table[2] = table[0] if start == 0 else table[2]
    arrays['token_embedder/embedding'] = table
    write_hugging_face.write(folder, MADLAD, arrays)
    weights = load_file(folder / 'model.safetensors')
    tokens, logits = weights['shared.weight'].copy(), weights['lm_head.weight'].copy()
    weights['shared.weight'][:3] = [
        tokens[2],
        tokens[0] if start == 1 else 7 * tokens[0],
        tokens[1],
    ]
    weights['lm_head.weight'][:3] = logits[[2, 0, 1]]
    save_file(weights, folder / 'model.safetensors', {'format': 'pt'})
    edit_json(folder / 'config.json', pad_token_id=1, eos_token_id=2, decoder_start_token_id=start)
    (folder / 'spiece.model').write_bytes(DEFAULT_IDS)
    names = {'pad_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'}
    settings = {'tokenizer_class': 'T5Tokenizer', 'extra_ids': 0} | names
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    return arrays


@pytest.mark.parametrize('start', [0, 1])
def test_parameters_and_vocabulary_have_t5s_ids(tmp_path, caplog, start):
    folder = tmp_path / 'madlad'
    arrays = write_madlad(folder, start)
    generation = {'pad_token_id': 1, 'eos_token_id': 2, 'decoder_start_token_id': start}
    (folder / 'generation_config.json').write_text(json.dumps(generation))
    table = load_file(folder / 'model.safetensors')['shared.weight']
    edit_arrays(folder, shared__weight=None, decoder__embed_tokens__weight=table)  # as released
    t5 = infer.load(folder)
    assert not caplog.messages
    assert_same_bits(t5.arrays, arrays)
    encoded = t5.vocabulary.encode(TEXTS)
    assert [in_default_order(ids) for ids in encoded] == PROCESSOR.encode(TEXTS)
    assert [t5.vocabulary.decode(ids) for ids in encoded] == PROCESSOR.decode(
        PROCESSOR.encode(TEXTS)
    )
    assert any(2 in ids for ids in encoded), 'no text has an unknown token'
    # Written, it is a T5 like others.
    vocabulary_files = files_of(t5.vocabulary)
    write_hugging_face.write(tmp_path / 'written', MADLAD, arrays)
    for name, content in vocabulary_files.items():
        (tmp_path / 'written' / name).write_bytes(content)
    again = infer.load(tmp_path / 'written')
    assert_same_bits(again.arrays, arrays)
    assert [list(x) for x in again.vocabulary.encode(TEXTS)] == [list(x) for x in encoded]
    encoder = formats.open.open_model(folder, part='encoder')
    table = encoder.leaves['target/token_embedder/embedding'].read()
    np.testing.assert_array_equal(table, arrays['token_embedder/embedding'])


def test_other_ids(tmp_path):
    folder = tmp_path / 'madlad'
    write_madlad(folder)
    config = (folder / 'config.json').read_text()
    for settings in ({'decoder_start_token_id': 5}, {'eos_token_id': 3, 'pad_token_id': 0}):
        edit_json(folder / 'config.json', **settings)
        assert_refused(lambda: hugging_face.read_index(folder), next(iter(settings)))
        (folder / 'config.json').write_text(config)
    for content in ((HUNT / 'good.model').read_bytes(), b'', b'no model'):
        (folder / 'spiece.model').write_bytes(content)
        assert_refused(lambda: find_vocabulary(folder), 'spiece.model')
    edit_json(folder / 'config.json', tie_word_embeddings=True)
    edit_arrays(folder, lm_head__weight=None)
    assert_refused(lambda: hugging_face.read_index(folder), 'decoder_start_token_id=0')


# Against transformers itself: `pip install -e '.[peers]'` runs these.
THEIR_SIZES = {theirs: SIZES[ours] for theirs, ours in hugging_face.SIZES.items()}


@pytest.fixture
def transformers():
    pytest.importorskip('torch')
    return pytest.importorskip('transformers')


def token_batch(config, rows=3, inputs=13, targets=7):
    """Rows of several lengths, T5X's features."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, [inputs, targets], size=[rows, 2], endpoint=True)
    tokens = [rng.integers(2, config.vocab_size, [rows, n], np.int32) for n in (inputs, targets)]
    encoder, decoder = (
        np.where(np.arange(x.shape[1])[None] < lengths[:, i, None], x, 0)
        for i, x in enumerate(tokens)
    )
    shifted = np.pad(decoder, [(0, 0), (1, 0)])[:, :-1]
    names = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
    return dict(zip(names, (encoder, shifted, decoder), strict=True))


def their_logits(transformers, module, config, batch):
    import torch

    inputs = torch.tensor(batch['encoder_input_tokens']).long()
    shifted = torch.tensor(batch['decoder_input_tokens']).long()
    with torch.no_grad():
        mask = (inputs > 0).long()
        logits = module.eval()(inputs, attention_mask=mask, decoder_input_ids=shifted).logits
    version = tuple(map(int, transformers.__version__.split('.')[:2]))
    is_umt5 = config.relpos_bias_per_layer and not config.logits_via_embedding
    if is_umt5 and (5, 0) <= version < (5, 24):
        # These divide umT5's logits by sqrt(d_model) though the released ones are untied; T5X, 4 and 5.24 do not.
        return logits.numpy() * config.emb_dim**0.5
    return logits.numpy()


@pytest.mark.peers
@pytest.mark.parametrize('name', [*CONFIGS, *FAMILIES])
def test_transformers_computes_what_we_do(name, transformers, tmp_path):
    folder = tmp_path / 'hf'
    if name in FAMILIES:
        config = own_model.as_family(CONFIGS['t5_1_0'], name, FAMILIES[name])
        arrays = random_arrays(config)
        write_hugging_face.write(folder, config, arrays)
    else:
        config = CONFIGS[name]
        arrays = random_arrays(config)
        write(folder, name, arrays)
    module = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    ours = load(folder)
    batch = token_batch(config)
    theirs = their_logits(transformers, module, config, batch)
    assert_same_logits(ours.logits(batch), theirs, batch['decoder_target_tokens'])
    module.save_pretrained(tmp_path / 'again', max_shard_size='30KB')
    assert (tmp_path / 'again' / 'model.safetensors.index.json').exists()
    again = load(tmp_path / 'again')
    assert again.config == config
    assert_same_bits(again.arrays, arrays)


@pytest.mark.peers
@pytest.mark.parametrize('name', CONFIGS)
def test_transformers_computes_a_model_with_adapters(name, transformers, tmp_path):
    """Written with merged kernels, it is what we compute with the adapters beside them."""
    config = with_adapters(CONFIGS[name], lora_rank=3, lora_targets='.+/kernel')
    arrays = random_arrays(config)
    ours = infer.T5(config, arrays, partition.make_mesh(data=1))
    merged = lora.merge(config, arrays, peft.MergedKernel)
    write(tmp_path / 'hf', name, merged)
    module = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / 'hf')
    batch = token_batch(config)
    theirs = their_logits(transformers, module, config, batch)
    assert_same_logits(ours.logits(batch), theirs, batch['decoder_target_tokens'])


@pytest.mark.peers
@pytest.mark.parametrize('name', ['T5', 'T5 untied', 'MT5', 'MT5 untied', 'UMT5', 'UMT5 untied'])
def test_we_compute_what_transformers_does(transformers, tmp_path, name):
    """Weights and settings all from transformers; its version 5 ties whatever is new, so untie it here."""
    import torch

    torch.manual_seed(0)
    kind = name.split()[0]
    is_untied = name.endswith('untied')
    settings = THEIR_SIZES | {'tie_word_embeddings': not is_untied}
    if name != 'T5':
        settings['feed_forward_proj'] = 'gated-gelu'
    config = getattr(transformers, f'{kind}Config')(**settings)
    module = getattr(transformers, f'{kind}ForConditionalGeneration')(config)
    if is_untied:
        module.lm_head.weight = torch.nn.Parameter(torch.randn(96, 16) / 4)
    module.save_pretrained(tmp_path)
    if name == 'MT5':  # do what the message says
        assert_refused(lambda: load(tmp_path), 'tie_word_embeddings=false')
        if transformers.__version__.startswith('4.'):  # it rescales its logits
            return
        edit_json(tmp_path / 'config.json', tie_word_embeddings=False)
    t5 = load(tmp_path)
    assert t5.config.logits_via_embedding == (name in ('T5', 'UMT5'))
    batch = token_batch(t5.config)
    theirs = their_logits(transformers, module, t5.config, batch)
    assert_same_logits(t5.logits(batch), theirs, batch['decoder_target_tokens'])


def their_encodings(transformers, folder, inputs):
    import torch

    settings = json.loads((folder / 'config.json').read_text())
    [model_class] = settings['architectures']
    model_class = model_class.replace('ForConditionalGeneration', 'EncoderModel')
    module = getattr(transformers, model_class).from_pretrained(folder).eval()
    ids = torch.tensor(inputs).long()
    with torch.no_grad():
        return module(ids, attention_mask=(ids > 0).long()).last_hidden_state.numpy()


def write_encoder_golden():
    import tempfile

    import transformers

    outputs = {}
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            write_encoder(pathlib.Path(folder), name)
            encoder = pathlib.Path(folder, 'encoder')
            outputs[name] = their_encodings(transformers, encoder, encoder_batch())
    np.savez(ENCODER_GOLDEN, **outputs)


@pytest.mark.peers
@pytest.mark.parametrize('name', CONFIGS)
def test_transformers_encodes_what_we_do(name, transformers, tmp_path):
    """From the same folders, with padding and without."""
    write_encoder(tmp_path, name)
    for inputs in (encoder_batch(), encoder_batch()[:1]):
        expected = their_encodings(transformers, tmp_path / 'encoder', inputs)
        assert_same_encodings(tmp_path / 'encoder', expected, inputs)
        assert_same_encodings(tmp_path / 'whole', expected, inputs, part='encoder')


@pytest.mark.peers
@pytest.mark.parametrize('form', ['encoder', 'whole', 'single'])
@pytest.mark.parametrize('kind', ['T5', 'T5 gated', 'MT5', 'UMT5'])
def test_we_encode_what_transformers_does(transformers, tmp_path, kind, form):
    """Weights and settings all from transformers."""
    import torch

    torch.manual_seed(0)
    kind, *is_gated = kind.split()
    settings = dict(THEIR_SIZES)
    if is_gated:
        settings['feed_forward_proj'] = 'gated-gelu'
    config = getattr(transformers, f'{kind}Config')(**settings)
    model_class = 'ForConditionalGeneration' if form == 'whole' else 'EncoderModel'
    module = getattr(transformers, f'{kind}{model_class}')(config)
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    module.save_pretrained(tmp_path / 'hf')
    path = tmp_path / 'hf'
    if form == 'single':
        path = tmp_path / 't5.safetensors'
        path.write_bytes((tmp_path / 'hf/model.safetensors').read_bytes())
    part = 'encoder' if form == 'whole' else ''
    for inputs in (encoder_batch(), encoder_batch()[:1]):
        expected = their_encodings(transformers, tmp_path / 'hf', inputs)
        assert_same_encodings(path, expected, inputs, part=part)


@pytest.mark.peers
@pytest.mark.parametrize('start', [0, 1])
def test_transformers_computes_and_answers_the_same(transformers, tmp_path, start):
    """From SentencePiece's ids, padded with BOS."""
    import torch

    folder = tmp_path / 'madlad'
    write_madlad(folder, start)
    module = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    t5 = infer.load(folder)
    their_rows = [[*ids, 2] for ids in PROCESSOR.encode(TEXTS)]
    rows = [[*ids, 1] for ids in t5.vocabulary.encode(TEXTS)]
    length = max(map(len, rows))
    inputs = np.array([row + [0] * (length - len(row)) for row in rows], np.int32)
    their_inputs = torch.tensor([row + [1] * (length - len(row)) for row in their_rows])
    theirs = {'input_ids': their_inputs, 'attention_mask': torch.tensor(inputs > 0).long()}
    targets = np.array([[5, 9, 2, 1], [7, 1, 0, 0], [2, 8, 1, 0]], np.int32)
    shifted = np.pad(targets, [(0, 0), (1, 0)])[:, :-1]
    names = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
    their_shifted = torch.tensor([[start, *in_default_order(row[1:])] for row in shifted])
    with torch.no_grad():
        logits = module(**theirs, decoder_input_ids=their_shifted).logits.numpy()
        answers = module.generate(**theirs, max_new_tokens=8, do_sample=False, num_beams=1)
    logits = np.concatenate([logits[..., [1, 2, 0]], logits[..., 3:]], axis=-1)
    batch = dict(zip(names, (inputs, shifted, targets), strict=True))
    assert_same_logits(t5.logits(batch), logits, targets)
    expected = PROCESSOR.decode([row[1:].tolist() for row in answers])
    assert t5.generate(TEXTS, max_length=8) == expected


def test_parameters_that_transformers_lacks_are_named(tmp_path):
    """Those of a fork that changed model.py."""
    arrays = random_arrays(CONFIGS['t5_1_1']) | {
        'encoder/gate/bias': np.zeros(3),
        'domains/table': 0,
    }
    with pytest.raises(Refused, match='domains/table, encoder/gate/bias: .*--format=t5x'):
        write_hugging_face.write(tmp_path / 'to', CONFIGS['t5_1_1'], arrays)
    kernels = {'encoder/gate/kernel': (np.zeros([2, 1]), np.zeros([1, 2]))}
    with pytest.raises(Refused, match='encoder/gate/kernel: .*--format=t5x'):
        write_peft.write(tmp_path / 'to', CONFIGS['t5_1_1'], kernels, None, 'base')
    assert list(tmp_path.iterdir()) == []
