"""Mesh-TF checkpoints: TensorFlow's own and T5X's import of it, a writer of ours, damage, strangers.

golden/mtf_t5_1_1: written by TensorFlow 2.21's Saver under Mesh-TF's names; `imported/*` of golden.npz is
what T5X's importer (commit cc342d4) made of it, weights cast to float32, `logits` T5X's of those. No slot
in it is factored.
"""

import itertools
import json
import re
import shutil
import tracemalloc
from functools import partial
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from small_models import SMALLEST, assert_close, assert_refused, golden_batch, t5_config
from tensor_bundle import bundle

import checkpoint
import formats.open
import infer
import model
import optimizer
import partition
import state_names
from configs import base
from formats import mesh_tf
from messages import Refused

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / 'tests/golden/mtf_t5_1_1'
MTF_TINY = ROOT.parent / 'shared/testdata/t5x/mtf_tiny_t5'  # from google-research/t5x


def read_all(prefix):
    index = mesh_tf.read_index(prefix)
    return {path: checkpoint.read_leaf(leaf) for path, leaf in index.items()}


def read_bundle(prefix):
    entries = mesh_tf.read_bundle_index(prefix)
    return {name: entry.read() for name, entry in entries.items()}


def assert_same(found, expected):
    """Bit for bit, with dtypes and shapes."""
    chex.assert_trees_all_equal(found, expected, strict=True)


# Checkpoints of TensorFlow and of Mesh-TF.


def test_golden_is_what_the_importer_of_t5x_makes_of_it_and_gives_its_logits():
    golden = np.load(GOLDEN / 'golden.npz')
    expected = {}
    for name in golden.files:
        if name.startswith('imported/'):
            expected[name.removeprefix('imported/')] = golden[name]
    found = read_all(mesh_tf.find_prefix(GOLDEN))
    params = checkpoint.parameters(found)
    assert {x.dtype.name for x in params.values()} == {'bfloat16'}
    params = {path: x.astype(np.float32) for path, x in params.items()}
    assert_same(found | {f'target/{path}': x for path, x in params.items()}, expected)
    config = t5_config(**json.loads((GOLDEN / 'config.json').read_text()))
    assert checkpoint.shapes(params) == model.shapes(config)
    t5 = infer.T5(config, params, partition.make_mesh(data=1))
    assert_close(t5.logits(golden_batch(golden, 'batch')), golden['logits'], 1e-5)


def listed_variables(text):
    """{name: (size, shape)} of Mesh-TF's model-info.txt."""
    variables = {}
    pattern = r'Variable (\S+) +size (\d+) .*Shape\[(.*)\]'
    for name, size, dims in re.findall(pattern, text):
        shape = tuple(int(dim.split('=')[1]) for dim in dims.split(', '))
        variables[name] = (int(size), shape)
    return variables


def test_tiny_checkpoint_of_t5x_lacks_its_weights_and_says_so():
    """Its index is compressed. model-info.txt beside it has the names and sizes."""
    if not MTF_TINY.exists():
        pytest.skip(f'{MTF_TINY} is not there; the tables that we write are compressed, too')
    prefix = mesh_tf.find_prefix(MTF_TINY)
    entries = mesh_tf.read_bundle_index(prefix)
    listed = listed_variables((MTF_TINY / 'model-info.txt').read_text())
    assert entries.keys() == {'global_step', *listed, *(f'{name}_slot_v' for name in listed)}
    assert entries['global_step'].read() == np.int64(0)
    for name, (size, shape) in listed.items():
        weight = entries[name]
        slot = entries[f'{name}_slot_v']
        assert (weight.shape, weight.dtype, weight.size) == (shape, ml_dtypes.bfloat16, 2 * size)
        assert (slot.shape, slot.dtype, slot.size) == (shape, np.float32, 4 * size)
    index = mesh_tf.read_index(prefix)
    assert len(index) == 1 + 5 * len(listed)  # the step; each parameter and its four slots
    assert index['state/step'] == np.int32(0)
    shapes = checkpoint.shapes(checkpoint.parameters(index))
    config = formats.open.config_from_shapes(MTF_TINY, shapes)
    assert shapes == model.shapes(config)
    for path, shape in shapes.items():
        assert index[f'target/{path}'].dtype == ml_dtypes.bfloat16
        slot = index[f'state/param_states/{path}/v']
        assert (slot.shape, slot.dtype) == (shape, np.float32)
    assert_refused(entries['shared/embedding'].read, 'ckpt-0.data-00001-of-00002')


# Bundles of our own writer.


def variable_shapes():
    """{Mesh-TF's name: shape} of the parameters of SMALLEST."""
    emb_dim = SMALLEST.emb_dim
    shapes = {
        'shared/embedding': (SMALLEST.vocab_size, emb_dim),
        'decoder/logits/kernel': (emb_dim, SMALLEST.vocab_size),
    }
    joined_heads_dim = SMALLEST.num_heads * SMALLEST.head_dim
    for stack, attentions in (('encoder', ['Self']), ('decoder', ['Self', 'EncDec'])):
        block = f'{stack}/block_000'
        shapes[f'{stack}/final_layer_norm/scale'] = (emb_dim,)
        bias = f'{block}/layer_000/SelfAttention/relative_attention_bias'
        shapes[bias] = (SMALLEST.num_heads, SMALLEST.relative_attention_num_buckets)
        for i, kind in enumerate(attentions):
            shapes[f'{block}/layer_{i:03d}/rms_norm/scale'] = (emb_dim,)
            for letter in 'qkvo':
                name = f'{block}/layer_{i:03d}/{kind}Attention/{letter}'
                shapes[name] = (emb_dim, joined_heads_dim)
        mlp = f'{block}/layer_{len(attentions):03d}'
        shapes[f'{mlp}/layer_norm/scale'] = (emb_dim,)
        for name in ('wi_0', 'wi_1'):
            shapes[f'{mlp}/DenseReluDense/{name}/kernel'] = (emb_dim, SMALLEST.mlp_dim)
        shapes[f'{mlp}/DenseReluDense/wo/kernel'] = (SMALLEST.mlp_dim, emb_dim)
    return shapes


def mesh_tf_variables():
    """{Mesh-TF's name: bfloat16 weight} of SMALLEST, with all of Mesh-TF's slots and a step."""
    rng = np.random.default_rng(0)

    def draw(shape):
        return rng.standard_normal(shape).astype(np.float32)

    arrays = {'global_step': np.array(1_000_000)}
    for name, shape in variable_shapes().items():
        arrays[name] = draw(shape).astype(ml_dtypes.bfloat16)
        if len(shape) == 1 or 'bias' in name:
            arrays[f'{name}_slot_v'] = draw(shape)
        else:  # mesh_tensorflow/optimize.py: vr lacks the first of the largest dimensions, vc the other
            largest = int(np.argmax(shape))
            arrays[f'{name}_slot_vr'] = draw(shape[1 - largest])
            arrays[f'{name}_slot_vc'] = draw(shape[largest])
    return arrays


@pytest.mark.parametrize('compress', [(0,), (1,), (1, 0)])
def test_a_bundle_of_ours_comes_back(tmp_path, compress):
    arrays = mesh_tf_variables() | {f'x{i}': np.arange(1 + i % 3, dtype='i4') for i in range(150)}
    prefix = bundle(tmp_path / 'model.ckpt-7', arrays, compress=compress)
    found = read_bundle(prefix)
    assert list(found) == sorted(arrays)
    assert_same(found, arrays)


def test_factored_slots_are_those_of_our_optimizer(tmp_path):
    """Means of the same squared gradients, of the dimensions that Mesh-TF and ours reduce."""
    rng = np.random.default_rng(1)
    grads = {}
    shapes = {'q': (128, 128), 'k': (128, 160), 'v': (160, 128)}
    for name, shape in zip(('query', 'key', 'value'), shapes.values(), strict=True):
        path = f'encoder/layers_0/attention/{name}/kernel'
        grads[path] = rng.standard_normal(shape).astype(np.float32)
    params = jax.tree.map(np.ones_like, grads)
    adafactor = optimizer.make_optimizer(base.get_config().optimizer, lambda step: 0.1)
    _, state = jax.jit(adafactor.update)(grads, adafactor.init(params), params, step=0)
    expected = state_names.to_t5x(1, params, state)
    arrays = {}
    for letter, grad in zip(shapes, grads.values(), strict=True):
        name = f'encoder/block_000/layer_000/SelfAttention/{letter}'
        first = int(np.argmax(grad.shape))  # the first of the largest: axis 0 of a square
        arrays[name] = grad
        arrays[f'{name}_slot_vr'] = np.mean(grad**2, first)
        arrays[f'{name}_slot_vc'] = np.mean(grad**2, 1 - first)
    found = read_all(bundle(tmp_path / 'model.ckpt-1', arrays))
    for path in grads:
        for slot in ('v_row', 'v_col'):
            name = f'state/param_states/{path}/{slot}'
            assert_close(found[name], expected[name], 1e-6)


X = np.ones((2, 3), np.float32)
BIAS = 'SelfAttention/relative_attention_bias'


BIASES = {f'{stack}/block_000/layer_000/{BIAS}': X for stack in ('encoder', 'decoder')}
UMT5_BIASES = {f'encoder/block_{n}/layer_000/{BIAS}': X for n in ('000', '012')}
WI = 'decoder/block_010/layer_002/DenseReluDense/wi/kernel'
NAMES = [
    (BIASES, [f'target/{x}/relpos_bias/rel_embedding' for x in ('decoder', 'encoder')]),
    (UMT5_BIASES, [f'target/encoder/layers_{n}/relpos_bias/rel_embedding' for n in (0, 12)]),
    ({'encoder/rms_norm/scale': X}, ['target/encoder/encoder_norm/scale']),
    ({WI: X}, ['target/decoder/layers_10/mlp/wi/kernel']),
]


def test_names_that_the_golden_checkpoint_lacks(tmp_path):
    for arrays, paths in NAMES:
        assert sorted(read_all(bundle(tmp_path / 'model.ckpt-1', arrays))) == paths


NO_PLACE = [
    ({'shared/embedding_slot_m': X}, 'shared/embedding_slot_m'),
    ({'shared/embedding_slot_': X}, 'shared/embedding_slot_'),
    ({'encoder/block_00/layer_000/SelfAttention/q': X}, 'encoder/block_00/'),
    ({'transformer/logits/kernel': X}, 'transformer/logits/kernel'),
    ({'encoder/rms_norm/scale': X, 'encoder/final_layer_norm/scale': X}, 'norm/scale'),
    ({'shared/embedding\u0663': X}, 'ascii'),
]


def test_what_has_no_place_in_t5x_is_named(tmp_path):
    for arrays, name in NO_PLACE:
        prefix = bundle(tmp_path / 'model.ckpt-1', arrays)
        assert_refused(partial(mesh_tf.read_index, prefix), str(prefix))
        assert_refused(partial(mesh_tf.read_index, prefix), name)


# Which files are meant.


def test_a_folder_or_prefix_leads_to_the_checkpoint(tmp_path):
    assert mesh_tf.find_prefix(tmp_path) is None
    first = bundle(tmp_path / 'model.ckpt-1', {'a': X})
    assert mesh_tf.find_prefix(tmp_path) == mesh_tf.find_prefix(str(first)) == first
    bundle(tmp_path / 'model.ckpt-2', {'a': X})
    assert_refused(partial(mesh_tf.find_prefix, tmp_path), 'model.ckpt-1, model.ckpt-2')
    for place in ('', '/home/of/others/'):
        (tmp_path / 'checkpoint').write_text(f'model_checkpoint_path: "{place}model.ckpt-1"\n')
        assert mesh_tf.find_prefix(tmp_path) == first
    assert mesh_tf.find_prefix(tmp_path / 'model.ckpt-3') is None
    missing = partial(mesh_tf.read_bundle_index, tmp_path / 'model.ckpt-3')
    assert_refused(missing, 'model.ckpt-3.index')


def test_a_checkpoint_of_t5x_is_not_taken_for_one(tmp_path):
    """T5X's data iterator leaves a bundle of its own in there."""
    shutil.copy(ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_0/checkpoint', tmp_path)
    bundle(tmp_path / 'train_ds-00000-of-00001', {'a': X})
    assert mesh_tf.find_prefix(tmp_path) is None


# Damage.


@pytest.mark.parametrize(
    'num_bits', [1, pytest.param(8, marks=[pytest.mark.slow, pytest.mark.long])]
)
def test_no_byte_is_without_protection(tmp_path, num_bits):
    names = ('global_step', 'encoder/final_layer_norm')
    arrays = {n: x for n, x in mesh_tf_variables().items() if n.startswith(names)}
    prefix = bundle(tmp_path / 'model.ckpt-7', arrays)
    expected = read_all(prefix)
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        for at, i in itertools.product(range(len(content)), range(num_bits)):
            flipped = bytes([content[at] ^ 1 << (at + i) % 8])
            file.write_bytes(content[:at] + flipped + content[at + 1 :])
            try:
                found = read_all(prefix)
            except Refused:
                continue
            assert_same(found, expected)  # of a byte that nobody reads
        file.write_bytes(content)


def test_arrays_take_no_memory_but_their_own(tmp_path):
    x = np.zeros(2**21, np.float32)
    entry = mesh_tf.read_bundle_index(bundle(tmp_path / 'model.ckpt-1', {'a': x}))['a']
    tracemalloc.start()
    found = entry.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.size == x.size and peak < x.nbytes + 2**20


# TensorFlow itself, where it is installed.


@pytest.mark.peers
def test_what_tensorflow_saves_we_read_and_what_we_write_it_reads(tmp_path):
    tf = pytest.importorskip('tensorflow', reason='needs TensorFlow; golden/mtf_t5_1_1 is its work')
    v1, arrays, prefix = tf.compat.v1, mesh_tf_variables(), tmp_path / 'model.ckpt-1000000'
    with tf.Graph().as_default():
        for i, (name, x) in enumerate(arrays.items()):
            with tf.device(f'/cpu:{i % 3}'):
                v1.get_variable(name, initializer=tf.constant(x), use_resource=False)
        saver = v1.train.Saver(sharded=True)
        with v1.Session(config=v1.ConfigProto(device_count={'CPU': 3})) as session:
            session.run(v1.global_variables_initializer())
            saver.save(session, str(prefix), latest_filename='checkpoint')
    assert mesh_tf.find_prefix(tmp_path) == prefix
    entries = mesh_tf.read_bundle_index(prefix)
    assert len({entry.file for entry in entries.values()}) == 3
    assert_same(read_bundle(prefix), arrays)
    ours = bundle(tmp_path / 'ours', arrays)
    reader = tf.train.load_checkpoint(str(ours))
    assert_same({name: np.asarray(reader.get_tensor(name)) for name in arrays}, arrays)
    assert_same(read_all(ours), read_all(prefix))
