"""Hugging Face folders: transformers' own numbers, there and back to the bit, and folders not to be trusted.

golden/hf_t5_1_1: a random T5 1.1 that transformers 4.57.6 saved, and its logits in float32 on a CPU.
golden/hf_encoder.npz: what its encoders compute with `random_arrays` and `encoder_batch`, written by
PYTHONPATH=tests:tests/formats:. python -c 'import hugging_face_test; hugging_face_test.write_encoder_golden()'.
golden/hf_48_buckets.npz: logits of transformers 5.24 with 48 buckets, written in the same way by `write_buckets_golden`.
Tolerances are max|a-b| <= tol * max|b|, 1e-4 for logits: float32 sums in another order.
With transformers and torch installed, the tests at the end compare with what these compute themselves.
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import struct

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from corpora import HUNT
from forms import first_quick
from safetensors.numpy import load_file, save_file
from small_models import assert_close, assert_refused
from transformers_folders import SIZES, edit_arrays, edit_json, name_mt5, their_logits, token_batch

import checkpoint
import formats.open
import formats.vocabulary
import infer
import model
import partition
from formats import hugging_face, own_model, write_hugging_face
from formats.vocabulary import find_vocabulary
from messages import Refused
from modes import infer as infer_mode
from vocabulary import SentencePieceVocabulary

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'hf_t5_1_1'
LOGITS_TOLERANCE = 1e-4
ENCODER_GOLDEN = GOLDEN.parent / 'hf_encoder.npz'
ENCODER_TOLERANCE = 1e-5
BUCKETS_GOLDEN = GOLDEN.parent / 'hf_48_buckets.npz'
T5_1_0 = SIZES | {'mlp_activations': ('relu',), 'logits_via_embedding': True}
CONFIGS = {
    't5_1_0': model.T5Config(**T5_1_0),
    't5_1_1': model.T5Config(**SIZES | {'dropout_rate': 0.0}),
    'mt5': model.T5Config(**SIZES),
    'umt5': model.T5Config(**SIZES | {'relpos_bias_per_layer': True}),
    'ul2': model.T5Config(**SIZES | {'mlp_activations': ('silu', 'linear')}),
    'bigscience': model.T5Config(**SIZES | {'logits_via_embedding': True}),
}

# Of tFINE, and a distance that rows of `LONG` reach.
BUCKETS = {'relative_attention_num_buckets': 48, 'relative_attention_max_distance': 40}
LONG = {'rows': 2, 'inputs': 61, 'targets': 53}
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
    """Write CONFIGS[name] under its own name."""
    write_hugging_face.write(folder, CONFIGS[name], arrays, *options)
    if name == 'mt5':
        name_mt5(folder)


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
]


@pytest.mark.parametrize('content, said', SAID_OF_GENERATION)
def test_generation_settings_that_differ_are_named(tmp_path, caplog, content, said):
    folder = shutil.copytree(GOLDEN, tmp_path / 'hf')
    (folder / 'generation_config.json').write_text(json.dumps(content))
    request = infer_mode.Request(str(folder), text='a')
    infer_mode.load(infer_mode.Job(request, None, {'data.vocabulary': 'bytes'}))
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


def test_buckets_of_relative_positions(tmp_path):
    """They come from config.json, whose array must have as many, and are written back."""
    config = model.T5Config(**T5_1_0 | BUCKETS)
    folder = tmp_path / 'tfine'
    write_hugging_face.write(folder, config, random_arrays(config))
    t5 = infer.load(folder)
    assert t5.config == config
    batch = token_batch(config.vocab_size, **LONG)
    weights = batch['decoder_target_tokens'] > 0
    expected = np.load(BUCKETS_GOLDEN)['logits']
    assert_close(np.asarray(t5.logits(batch))[weights], expected[weights], 1e-5)
    shapes = model.shapes(config)
    assert formats.open.config_from_shapes(folder, shapes).relative_attention_num_buckets == 48
    for name, value, said in BAD_BUCKETS:
        edit_json(folder / 'config.json', **BUCKETS | {name: value})
        assert_refused(lambda: load(folder), said)


BAD_BUCKETS = [
    ('relative_attention_num_buckets', None, 'relpos_bias/rel_embedding is (2, 48), not (2, 32)'),
    ('relative_attention_num_buckets', 3, 'relative_attention_num_buckets=3'),
    ('relative_attention_num_buckets', '48', "relative_attention_num_buckets='48'"),
    ('relative_attention_max_distance', 24, 'relative_attention_max_distance=24'),
]


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
    edit_arrays(
        folder / 'model.safetensors',
        encoder__embed_tokens__weight=table,
        lm_head__weight=table,
        **unused,
    )
    assert_same_bits(load(folder).arrays, arrays)
    edit_arrays(folder / 'model.safetensors', shared__weight=None)  # any of the names will do
    assert_same_bits(load(folder).arrays, arrays)
    table[-1, -1] += 1
    edit_arrays(folder / 'model.safetensors', decoder__embed_tokens__weight=table)
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
        edit_arrays(folder / 'model.safetensors', lm_head__weight=lm_heads[lm_head])
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
    ({'feed_forward_proj': 'gated-tanh'}, 'feed_forward_proj=gated-tanh'),
    ({'dense_act_fn': 'gelu'}, 'dense_act_fn=gelu'),
    ({'layer_norm_epsilon': 1e-05}, 'layer_norm_epsilon=1e-05'),
    ({'decoder_start_token_id': 2}, 'decoder_start_token_id=2'),
    ({'d_model': '32'}, 'config.json'),
    ({'num_layers': 3}, 'encoder/layers_2/'),
    ({'dropout_rate': 'high'}, 'config.json'),
    ({'num_decoder_layers': 1}, 'decoder/layers_1/'),
    ({'model_type': 'umt5'}, 'layers_1/relpos_bias'),
    ({'d_ff': 128}, 'mlp/wi_0/kernel'),
    ({'model_type': 'longt5', 'encoder_attention_type': 'x'}, 'encoder_attention_type='),
    ({'model_type': 'switch_transformers', 'encoder_sparse_step': 3}, 'encoder_sparse_step='),
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


FLOATS = {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]}
GOLDEN_FILE = (GOLDEN / 'model.safetensors').read_bytes()
DAMAGED = {
    'not safetensors': b'PK\x03\x04' * 99,
    'torn': GOLDEN_FILE[:-1],
    'integers': header({'shared.weight': FLOATS | {'dtype': 'I32'}}, b'\0' * 8),
    'no table': header({'x': FLOATS}, b'\0' * 8),
}


def test_files_that_are_refused(tmp_path):
    copy_golden(tmp_path)
    edit_json(tmp_path / 'config.json', num_layers=1, num_decoder_layers=1)
    for content in DAMAGED.values():
        (tmp_path / 'model.safetensors').write_bytes(content)
        assert_refused(lambda: load(tmp_path), str(tmp_path))
    (tmp_path / 'model.safetensors').unlink()
    index = {'weight_map': {'shared.weight': 'more.safetensors'}}
    (tmp_path / hugging_face.WEIGHTS_INDEX).write_text(json.dumps(index))
    assert_refused(lambda: load(tmp_path), 'more.safetensors')


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    config = CONFIGS['t5_1_0']
    arrays = random_arrays(config)
    folder = tmp_path / 'hf'

    read = []

    class Lazy:
        def __init__(self, path, fails):
            self.path, self.fails = path, fails
            self.shape, self.dtype = arrays[path].shape, arrays[path].dtype

        def read(self):
            if self.fails and 'decoder/layers_1' in self.path:
                raise OSError('the disk is gone')
            read.append(self.path)
            return np.asarray(arrays[self.path])

    failing = {path: Lazy(path, fails=True) for path in arrays}
    with pytest.raises(OSError):
        write_hugging_face.write(folder, config, failing, shard_bytes=10_000)
    other = dataclasses.replace(config, mlp_activations=('relu', 'linear'))
    assert_refused(lambda: write_hugging_face.write(folder, other, {}), 'mlp_activations=')
    assert os.listdir(tmp_path) == []
    del read[:]
    lazy = {path: Lazy(path, fails=False) for path in arrays}
    write_hugging_face.write(folder, config, lazy, shard_bytes=10_000)
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
    ({BIAS: None}, 'encoder/relpos_bias'),
    ({'encoder__block__1__layer__1__DenseReluDense__wo__weight': None}, 'layers_1/mlp/wo'),
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
        edit_arrays(tmp_path / 'single' / 'model.safetensors', **changes)
        assert_refused(lambda: infer.load(file), str(file))
        assert_refused(lambda: infer.load(file), name)


def test_the_encoder_of_an_mt5_whose_logits_are_in_doubt(tmp_path):
    """transformers 5 saves all mt5 as tied, which its encoder does not depend on."""
    write_encoder(tmp_path, 'mt5')
    edit_json(tmp_path / 'whole/config.json', tie_word_embeddings=True)
    edit_arrays(tmp_path / 'whole' / 'model.safetensors', lm_head__weight=None)
    found = infer.load(tmp_path / 'whole', part='encoder')
    assert_same_bits(found.arrays, infer.load(tmp_path / 'encoder').arrays)


# Families whose folders look otherwise.


# Folders of MADLAD-400's form: unknown 0, BOS 1, EOS 2; padded with 1, decoded from 0. hunt's default_ids.model is
# what spm_train writes without flags.
DEFAULT_IDS = (HUNT / 'default_ids.model').read_bytes()
PROCESSOR = sentencepiece.SentencePieceProcessor(model_proto=DEFAULT_IDS)
TEXTS = ['Where lives a queen?', '', 'an Ant in 12 rains.']
MADLAD = dataclasses.replace(CONFIGS['t5_1_1'], vocab_size=PROCESSOR.vocab_size())


def write_madlad(folder):
    """Write a model with these ids, and return its parameters."""
    arrays = random_arrays(MADLAD)
    write_hugging_face.write(folder, MADLAD, arrays)
    ids = {'pad_token_id': 1, 'eos_token_id': 2, 'decoder_start_token_id': 0}
    edit_json(folder / 'config.json', **ids)
    (folder / 'generation_config.json').write_text(json.dumps(ids))
    (folder / 'spiece.model').write_bytes(DEFAULT_IDS)
    names = {'pad_token': '<s>', 'eos_token': '</s>', 'unk_token': '<unk>'}
    settings = {'tokenizer_class': 'T5Tokenizer', 'extra_ids': 0} | names
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    return arrays


def test_a_checkpoint_keeps_its_own_special_ids(tmp_path, caplog):
    folder = tmp_path / 'madlad'
    arrays = write_madlad(folder)
    t5 = infer.load(folder)
    [message] = caplog.messages
    assert 'unknown characters' in message
    assert_same_bits(t5.arrays, arrays)
    expected = PROCESSOR.encode(TEXTS)
    assert t5.vocabulary.encode(TEXTS) == expected
    assert [t5.vocabulary.decode([*ids, 2, 5]) for ids in expected] == TEXTS
    # Answers end with 2, and so do texts that are scored.
    allowed = ['in 12 rains', 'a queen']
    found = t5.generate(TEXTS, allowed=allowed, return_scores=True)
    assert found.tokens == PROCESSOR.encode(found.texts) and {*found.texts} <= {*allowed}
    inputs, targets = ([[*ids, 2] for ids in ids_of] for ids_of in (expected, found.tokens))
    for scores in (t5.score(TEXTS, found.texts), t5.score(inputs, targets)):
        assert_close(scores, found.scores, 1e-4)
    # Written, it has the same ids.
    write_hugging_face.write(tmp_path / 'written', MADLAD, arrays, t5.vocabulary)
    again = infer.load(tmp_path / 'written').vocabulary
    assert (again.eos_id, again.unk_id) == (2, 0) and again.encode(TEXTS) == expected


@pytest.mark.parametrize('name', [None, HUNT / 'good.model', 'bytes'])
def test_special_ids_that_differ(tmp_path, name):
    write_madlad(tmp_path / 'madlad')
    (tmp_path / 'madlad/spiece.model').unlink()
    assert_refused(functools.partial(find_vocabulary, tmp_path / 'madlad', name), 'eos_token_id=2')


CODET5 = GOLDEN.parent / 'codet5_tokenizer'


def test_a_checkpoint_whose_texts_begin_with_an_id(tmp_path):
    """CodeT5's <s>: before inputs, targets, prompts and allowed answers, and in no text."""
    [row, *_] = json.loads((CODET5 / 'texts.json').read_text())
    config = dataclasses.replace(CONFIGS['t5_1_1'], vocab_size=408)
    arrays = random_arrays(config)
    write_hugging_face.write(tmp_path / 'codet5', config, arrays)
    shutil.copytree(CODET5, tmp_path / 'codet5', dirs_exist_ok=True)
    edit_json(tmp_path / 'codet5/config.json', eos_token_id=2)
    t5 = infer.load(tmp_path / 'codet5')
    text, ids = row['text'], row['ids']
    encoded, _ = t5.encode([text])
    np.testing.assert_array_equal(encoded, t5.encode([ids])[0])
    scores = t5.score([text], [text])
    np.testing.assert_array_equal(scores, t5.score([ids], [ids]))
    found = t5.generate([text], allowed=[text], return_scores=True)
    assert (found.texts, found.tokens) == ([text], [ids[:-1]])
    assert_close(found.scores, scores, 1e-4)
    prompted = t5.generate([text], allowed=[text], return_scores=True, prompts=['def'])
    assert prompted.tokens == found.tokens
    # Written, it has the same ids.
    write_hugging_face.write(tmp_path / 'written', config, arrays, t5.vocabulary)
    again = infer.load(tmp_path / 'written')
    assert again.ends == t5.ends and again.vocabulary.encode([text]) == [ids[1:-1]]
    job = infer_mode.Job(infer_mode.Request(str(tmp_path / 'codet5'), text=text), None, {})
    assert job.text_ids.tolist() == ids


# Against transformers itself: `pip install -e '.[peers]'` runs these.
THEIR_SIZES = {theirs: SIZES[ours] for theirs, ours in hugging_face.SIZES.items()}


@pytest.fixture
def transformers():
    pytest.importorskip('torch')
    return pytest.importorskip('transformers')


def logits_of(transformers, module, config, batch):
    logits = their_logits(module, batch)
    version = tuple(map(int, transformers.__version__.split('.')[:2]))
    is_umt5 = config.relpos_bias_per_layer and not config.logits_via_embedding
    if is_umt5 and (5, 0) <= version < (5, 24):
        # These divide umT5's logits by sqrt(d_model) though the released ones are untied; T5X, 4 and 5.24 do not.
        return logits * config.emb_dim**0.5
    return logits


@pytest.mark.peers
@pytest.mark.parametrize('name', [*CONFIGS, *FAMILIES])
def test_transformers_computes_what_we_do(name, transformers, tmp_path):
    folder = tmp_path / 'hf'
    if name in FAMILIES:
        buckets = {'relative_attention_num_buckets': 8, 'relative_attention_max_distance': 6}
        config = dataclasses.replace(CONFIGS['t5_1_0'], **buckets)
        config = own_model.as_family(config, name, FAMILIES[name])
        arrays = random_arrays(config)
        write_hugging_face.write(folder, config, arrays)
    else:
        config = CONFIGS[name]
        arrays = random_arrays(config)
        write(folder, name, arrays)
    module = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    ours = load(folder)
    batch = token_batch(config.vocab_size)
    theirs = logits_of(transformers, module, config, batch)
    assert_same_logits(ours.logits(batch), theirs, batch['decoder_target_tokens'])
    module.save_pretrained(tmp_path / 'again', max_shard_size='30KB')
    assert (tmp_path / 'again' / 'model.safetensors.index.json').exists()
    again = load(tmp_path / 'again')
    assert again.config == config
    assert_same_bits(again.arrays, arrays)


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
    batch = token_batch(t5.config.vocab_size)
    theirs = logits_of(transformers, module, t5.config, batch)
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
def test_transformers_computes_and_answers_the_same(transformers, tmp_path):
    """With SentencePiece's own ids, padded with BOS."""
    import torch

    folder = tmp_path / 'madlad'
    write_madlad(folder)
    module = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    t5 = infer.load(folder)
    rows = [[*ids, 2] for ids in PROCESSOR.encode(TEXTS)]
    length = max(map(len, rows))
    inputs = np.array([row + [0] * (length - len(row)) for row in rows], np.int32)
    their_inputs = torch.tensor(np.where(inputs > 0, inputs, 1)).long()
    theirs = {'input_ids': their_inputs, 'attention_mask': torch.tensor(inputs > 0).long()}
    targets = np.array([[5, 9, 1, 2], [7, 2, 0, 0], [1, 8, 2, 0]], np.int32)
    shifted = np.pad(targets, [(0, 0), (1, 0)])[:, :-1]
    with torch.no_grad():
        logits = module(**theirs, decoder_input_ids=torch.tensor(shifted).long()).logits.numpy()
        answers = module.generate(**theirs, max_new_tokens=8, do_sample=False, num_beams=1)
    names = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
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
        write_hugging_face.write_peft(tmp_path / 'to', CONFIGS['t5_1_1'], kernels, None, 'base')
    assert list(tmp_path.iterdir()) == []


def write_buckets_golden():
    import tempfile

    import transformers

    config = model.T5Config(**T5_1_0 | BUCKETS)
    with tempfile.TemporaryDirectory() as folder:
        write_hugging_face.write(f'{folder}/hf', config, random_arrays(config))
        module = transformers.T5ForConditionalGeneration.from_pretrained(f'{folder}/hf')
    logits = their_logits(module, token_batch(config.vocab_size, **LONG))
    np.savez_compressed(BUCKETS_GOLDEN, logits=logits)
