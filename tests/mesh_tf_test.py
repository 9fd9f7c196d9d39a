"""Mesh-TF checkpoints: TensorFlow's own and T5X's import of it, a writer of ours, damage, strangers.

golden/mtf_t5_1_1: written by TensorFlow 2.21's Saver under Mesh-TF's names; `imported/*` of golden.npz is
what T5X's importer (commit cc342d4) made of it, weights cast to float32, `logits` T5X's of those. No slot
in it is factored.
"""

import itertools
import json
import os
import random
import re
import shutil
import tracemalloc
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from small_models import assert_close, golden_batch, t5_config
from tensor_bundle import bundle, proto, table

import checkpoint
import convert
import infer
import mesh_tf
import model
import optimizer
import partition
from configs import base

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / 'tests/golden/mtf_t5_1_1'
MTF_TINY = ROOT.parent / 'shared/testdata/t5x/mtf_tiny_t5'  # of google-research/t5x


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
    t5 = infer.T5(config, params, partition.make_mesh(1, 1, jax.devices()[:1]))
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
    config = convert.config_from_shapes(shapes)
    assert shapes == model.shapes(config)
    for path, shape in shapes.items():
        assert index[f'target/{path}'].dtype == ml_dtypes.bfloat16
        slot = index[f'state/param_states/{path}/v']
        assert (slot.shape, slot.dtype) == (shape, np.float32)
    with pytest.raises(
        ValueError, match=r'ckpt-0\.data-00001-of-00002 is missing: bring all files'
    ):
        entries['shared/embedding'].read()


# Bundles of our own writer.


CONFIG = t5_config(
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


def variable_shapes():
    """{Mesh-TF's name: shape} of the parameters of CONFIG."""
    emb_dim = CONFIG.emb_dim
    shapes = {
        'shared/embedding': (CONFIG.vocab_size, emb_dim),
        'decoder/logits/kernel': (emb_dim, CONFIG.vocab_size),
    }
    for stack, attentions in (('encoder', ['Self']), ('decoder', ['Self', 'EncDec'])):
        block = f'{stack}/block_000'
        shapes[f'{stack}/final_layer_norm/scale'] = (emb_dim,)
        bias = f'{block}/layer_000/SelfAttention/relative_attention_bias'
        shapes[bias] = (CONFIG.num_heads, model.NUM_BUCKETS)
        for i, kind in enumerate(attentions):
            shapes[f'{block}/layer_{i:03d}/rms_norm/scale'] = (emb_dim,)
            for letter in 'qkvo':
                joined_heads_dim = CONFIG.num_heads * CONFIG.head_dim
                name = f'{block}/layer_{i:03d}/{kind}Attention/{letter}'
                shapes[name] = (emb_dim, joined_heads_dim)
        mlp = f'{block}/layer_{len(attentions):03d}'
        shapes[f'{mlp}/layer_norm/scale'] = (emb_dim,)
        shapes[f'{mlp}/DenseReluDense/wi_0/kernel'] = (emb_dim, CONFIG.mlp_dim)
        shapes[f'{mlp}/DenseReluDense/wi_1/kernel'] = (emb_dim, CONFIG.mlp_dim)
        shapes[f'{mlp}/DenseReluDense/wo/kernel'] = (CONFIG.mlp_dim, emb_dim)
    return shapes


def mesh_tf_variables():
    """{Mesh-TF's name: bfloat16 weight} of CONFIG, with all of Mesh-TF's slots and a step."""
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


def test_variables_get_the_names_of_t5x(tmp_path):
    arrays = mesh_tf_variables()
    found = read_all(bundle(tmp_path / 'model.ckpt-1000000', arrays))
    params = checkpoint.parameters(found)
    assert checkpoint.shapes(params) == model.shapes(CONFIG)
    assert len(found) == 1 + 5 * len(params)  # four slots each
    assert (found['state/step'].dtype, found['state/step'].shape) == (np.int32, ())
    assert found['state/step'] == 1_000_000
    block = 'decoder/block_000/layer_001/EncDecAttention/'
    cross = found['target/decoder/layers_0/encoder_decoder_attention/out/kernel']
    assert_same({'': cross}, {'': arrays[block + 'o']})
    zeros = np.zeros(1, np.float32)

    def slots(parameter):
        names = ('m', 'v', 'v_row', 'v_col')
        return {name: found[f'state/param_states/{parameter}/{name}'] for name in names}

    name = 'encoder/block_000/layer_001/layer_norm/scale_slot_v'
    expected = {'m': zeros, 'v': arrays[name], 'v_row': zeros, 'v_col': zeros}
    assert_same(slots('encoder/layers_0/pre_mlp_layer_norm/scale'), expected)
    name = 'encoder/block_000/layer_001/DenseReluDense/wi_0/kernel_slot_v'
    expected = {'m': zeros, 'v': zeros, 'v_row': arrays[name + 'r'], 'v_col': arrays[name + 'c']}
    assert_same(slots('encoder/layers_0/mlp/wi_0/kernel'), expected)


def test_factored_slots_are_those_of_our_optimizer(tmp_path):
    """Means of the same squared gradients, of the dimensions that Mesh-TF and ours reduce."""
    rng = np.random.default_rng(1)
    grads = {}
    shapes = {'q': (128, 128), 'k': (128, 160), 'v': (160, 128)}
    for letter, shape in shapes.items():
        path = f'encoder/layers_0/attention/{mesh_tf.ATTENTION_KERNELS[letter]}/kernel'
        grads[path] = rng.standard_normal(shape).astype(np.float32)
    params = jax.tree.map(np.ones_like, grads)
    adafactor = optimizer.make_optimizer(base.get_config().optimizer, lambda step: 0.1)
    _, state = jax.jit(adafactor.update)(grads, adafactor.init(params), params)
    expected = optimizer.to_t5x(1, params, state)
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


@pytest.mark.parametrize(
    'arrays, paths',
    [
        (
            {f'{t}/block_000/layer_000/{BIAS}': X for t in ('encoder', 'decoder')},
            [
                'target/decoder/relpos_bias/rel_embedding',
                'target/encoder/relpos_bias/rel_embedding',
            ],
        ),
        (
            {f'encoder/block_{n}/layer_000/{BIAS}': X for n in ('000', '012')},
            [f'target/encoder/layers_{n}/relpos_bias/rel_embedding' for n in (0, 12)],
        ),
        ({'decoder/embedding': X}, ['target/decoder/token_embedder/embedding']),
        ({'encoder/rms_norm/scale': X}, ['target/encoder/encoder_norm/scale']),
        (
            {'decoder/block_010/layer_002/DenseReluDense/wi/kernel': X},
            ['target/decoder/layers_10/mlp/wi/kernel'],
        ),
    ],
)
def test_names_that_the_golden_checkpoint_lacks(tmp_path, arrays, paths):
    assert sorted(read_all(bundle(tmp_path / 'model.ckpt-1', arrays))) == paths


@pytest.mark.parametrize(
    'arrays, message',
    [
        ({'shared/embedding_slot_m': X}, r'1 variables .*\(shared/embedding_slot_m\)'),
        ({'shared/embedding_slot_': X}, r'has 1 variables'),
        (
            {f'lora/{i:02d}': X for i in range(12)},
            r'12 variables that .*\(lora/00, .*lora/09 and 2 more\): only',
        ),
        ({'encoder/rms_norm/scale': X, 'encoder/final_layer_norm/scale': X}, 'has 1 variables'),
        ({'../../etc/passwd': X}, r'has 1 variables'),
        ({'encoder/block_00/layer_000/SelfAttention/q': X}, r'has 1 variables'),
        ({'shared/embedding\u0663': X}, 'cannot be read .*ascii'),
        ({'transformer/logits/kernel': X}, r'has 1 variables that T5 1.0 and 1.1 lack \(tr'),
        (
            {'shared/embedding': X, 'shared/embedding_slot_vr': X},
            'has only the slots v_row: Adafactor has v, or v_row and v_col',
        ),
        ({'global_step': np.array(2**31)}, 'global_step 2147483648: it must be an int32'),
        ({'global_step': np.array(1, 'f4')}, 'global_step 1.0'),
        ({'global_step': np.array([1])}, r'global_step \[1\]'),
    ],
)
def test_what_has_no_place_in_t5x_is_named(tmp_path, arrays, message):
    prefix = bundle(tmp_path / 'model.ckpt-1', arrays)
    with pytest.raises(ValueError, match=message):
        mesh_tf.read_index(prefix)


# Which files are meant.


def test_a_folder_or_prefix_leads_to_the_checkpoint(tmp_path):
    assert mesh_tf.find_prefix(tmp_path) is None
    first = bundle(tmp_path / 'model.ckpt-1', {'a': X})
    assert mesh_tf.find_prefix(tmp_path) == mesh_tf.find_prefix(str(first)) == first
    bundle(tmp_path / 'model.ckpt-2', {'a': X})
    with pytest.raises(ValueError, match=r'2 checkpoints \(model.ckpt-1, model.ckpt-2\): name one'):
        mesh_tf.find_prefix(tmp_path)
    (tmp_path / 'checkpoint').write_text('model_checkpoint_path: "model.ckpt-1"\n')
    assert mesh_tf.find_prefix(tmp_path) == first
    assert mesh_tf.find_prefix(tmp_path / 'model.ckpt-3') is None
    with pytest.raises(ValueError, match='model.ckpt-3.index is missing'):
        mesh_tf.read_bundle_index(tmp_path / 'model.ckpt-3')


def test_a_pointer_never_leaves_its_folder(tmp_path):
    for target in ('/etc/passwd', '../../etc/passwd', 'gs://t5/x/passwd'):
        (tmp_path / 'checkpoint').write_text(f'model_checkpoint_path: "{target}"\n')
        assert mesh_tf.find_prefix(tmp_path) == tmp_path / 'passwd'
    for target in ('', '..', '/', 'a/'):
        (tmp_path / 'checkpoint').write_text(f'model_checkpoint_path: "{target}"\n')
        prefix = mesh_tf.find_prefix(tmp_path)
        assert prefix is None or prefix.parent == tmp_path


@pytest.mark.parametrize('name', ['index', 'data-00001-of-00003', 'checkpoint'])
def test_a_link_never_leaves_its_folder(tmp_path, name):
    folder = tmp_path / 'checkpoint'
    shutil.copytree(GOLDEN, folder)
    file = folder / ('checkpoint' if name == 'checkpoint' else f'model.ckpt-1000000.{name}')
    file.rename(tmp_path / 'elsewhere')
    file.symlink_to('../elsewhere')
    with pytest.raises(ValueError, match=f'{file} links to {tmp_path}/elsewhere, outside'):
        read_all(mesh_tf.find_prefix(folder))
    (tmp_path / 'elsewhere').rename(folder / 'beside')
    file.unlink()
    file.symlink_to('beside')
    assert read_all(mesh_tf.find_prefix(folder))


def test_a_checkpoint_of_t5x_is_not_taken_for_one(tmp_path):
    """T5X's data iterator leaves a bundle of its own in there."""
    shutil.copy(ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_0/checkpoint', tmp_path)
    bundle(tmp_path / 'train_ds-00000-of-00001', {'a': X})
    assert mesh_tf.find_prefix(tmp_path) is None


# Damage.


def damage(folder, rng):
    """Does one thing to one file of `folder` that changes it; says what."""
    file = rng.choice(sorted(f for f in folder.iterdir() if 'model.ckpt' in f.name))
    before = content = file.read_bytes()
    kind = rng.choice(['flip', 'truncate', 'zero', 'swap', 'swap files'])
    a, b = sorted(rng.sample(range(len(content)), 2))
    length = min(rng.choice([1, 16, 4096]), b - a, len(content) - b)
    if kind == 'flip':
        content = content[:a] + bytes([content[a] ^ 1 << rng.randrange(8)]) + content[a + 1 :]
    elif kind == 'truncate':
        content = content[:a]
    elif kind == 'zero':
        content = content[:a] + bytes(length) + content[a + length :]
    elif kind == 'swap':
        between, behind = content[a + length : b], content[b + length :]
        parts = (content[:a], content[b : b + length], between, content[a : a + length], behind)
        content = b''.join(parts)
    else:
        other = rng.choice(sorted(f for f in folder.iterdir() if '.data-' in f.name))
        content = other.read_bytes()
        other.write_bytes(before)
    file.write_bytes(content)
    return content != before and f'{kind} in {file.name} at {a}, {b}, {length}'


@pytest.mark.parametrize('num_faults', [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize('of', ['golden', 'ours'])
def test_every_one_of_many_random_faults_is_detected(tmp_path, of, num_faults):
    whole, rng, found = tmp_path / 'whole', random.Random(of), 0
    if of == 'golden':
        shutil.copytree(GOLDEN, whole, ignore=shutil.ignore_patterns('*.npz', '*.json'))
    else:
        whole.mkdir()
        bundle(whole / 'model.ckpt-7', mesh_tf_variables())
    prefix = mesh_tf.find_prefix(whole)
    read_all(prefix)
    while found < num_faults:
        shutil.rmtree(tmp_path / 'copy', ignore_errors=True)
        shutil.copytree(whole, tmp_path / 'copy')
        if fault := damage(tmp_path / 'copy', rng):
            with pytest.raises(ValueError, match=r'model\.ckpt-'):
                read_all(tmp_path / 'copy' / prefix.name)
                pytest.fail(f'{fault} went undetected')
            found += 1


def test_no_bit_of_an_index_and_no_byte_of_the_arrays_is_without_protection(tmp_path):
    names = ('global_step', 'encoder/final_layer_norm')
    arrays = {n: x for n, x in mesh_tf_variables().items() if n.startswith(names)}
    prefix = bundle(tmp_path / 'model.ckpt-7', arrays)
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        for at, bit in itertools.product(range(len(content)), range(8)):
            if file.suffix == '.index' or bit == at % 8:
                flipped = bytes([content[at] ^ 1 << bit])
                file.write_bytes(content[:at] + flipped + content[at + 1 :])
                with pytest.raises(ValueError):
                    read_all(prefix)
                    pytest.fail(f'bit {bit} of byte {at} of {file.name}')
        file.write_bytes(content)
    read_all(prefix)


# Strangers, whose checksums are right.


@pytest.mark.parametrize(
    'lie, message',
    [
        ({1: 7}, "TensorFlow's dtype 7"),
        ({1: 0}, "TensorFlow's dtype 0"),
        ({1: b'float'}, "field 1 is b'float'"),
        ({3: 3}, 'in shard 3 of 3'),
        ({3: 2**63}, 'in shard 9223372036854775808 of 3'),
        ({3: b'../x'}, r"field 3 is b'../x'"),
        ({4: b'1'}, "field 4 is b'1'"),
        ({5: 2**40}, '1099511627776 bytes'),
        ({2: proto((2, proto((1, 2**62))), (2, proto((1, 4)))), 5: 2**60}, 'has shape'),
        ({2: proto((2, proto((1, 2**64 - 2))), (2, proto((1, 2**64 - 3))))}, 'has shape'),
        ({2: proto((2, proto((1, 0)))), 5: 0}, 'has shape'),
        ({2: proto(*((2, proto((1, 1))) for _ in range(65))), 5: 4}, 'has shape'),
        ({2: b'\x12\x7f\x08'}, '127 bytes should follow'),
        ({2: b'\xff' * 30}, 'no integer ends'),
        ({2: b'\x0b'}, 'wire type 3'),
        ({2: 6}, 'field 2 is 6'),
        ({7: b''}, 'partitioned into slices'),
    ],
)
def test_an_entry_that_lies_is_refused(tmp_path, lie, message):
    entry = lambda name, fields: fields | lie  # noqa: E731
    prefix = bundle(tmp_path / 'model.ckpt-1', {'a': X}, entry=entry)
    with pytest.raises(ValueError, match=f'model.ckpt-1.index cannot be read.*{message}|{message}'):
        mesh_tf.read_bundle_index(prefix)


@pytest.mark.parametrize('lie', [{4: 1}, {4: 2**62}, {4: 2**64 - 8}])
def test_an_array_beyond_its_file_takes_no_memory(tmp_path, lie):
    n = 2**40  # consistent in shape and size, so only the file tells
    shape = proto((2, proto((1, n))))
    lie = {2: shape, 5: 4 * n} if lie == {4: 1} else lie
    entry = lambda name, fields: fields | lie  # noqa: E731
    prefix = bundle(tmp_path / 'model.ckpt-1', {'a': X}, entry=entry)
    with pytest.raises(
        ValueError, match=r'data-00000-of-00003 has 24 bytes, but a ends at byte \d+: copy it again'
    ):
        mesh_tf.read_bundle_index(prefix)['a'].read()


@pytest.mark.parametrize(
    'content, message',
    [
        (b'', 'does not end with the magic'),
        (b'model_checkpoint_path: "x"' * 9, 'does not end with the magic'),
        (bytes(40) + bytes.fromhex('57fb808b247547db'), 'has changed'),
        (b'\xff' * 40 + bytes.fromhex('57fb808b247547db'), 'no integer ends'),
        (bytes(2**22 + 1), 'more than 4194304 bytes'),
        (table([(b'a', b'')]), 'it has no header'),
        (table([(b'', proto((1, 1), (2, 1)))]), 'big-endian'),
        (table([(b'', b''), (b'b', b''), (b'a', b'')]), "b'a' is out of order"),
        (table([(b'', b''), (b'a', b''), (b'a', b'')]), "b'a' is out of order"),
        (table([(b'', b''), (b'a' * 1001, b'')]), r'a name of 0 \+ 1001 bytes'),
        (table([(b'', b'')], change=lambda block: b'\x01' + block), 'a name of 1'),
        (table([(b'', b'')], change=lambda block: b'\x00\x00\x09' + block), 'bytes should follow'),
        (table([(b'', b'')], change=lambda block: block[:-4] + b'\xff' * 4), 'bytes should follow'),
        (table([(b'', b'')], change=lambda block: b''), 'bytes should follow'),
        (table([(b'', b'')], compress=(2,)), 'has compression 2'),
        (table([(b'', b'')], gap=b'gap'), 'no block begins at byte 0'),
        (table([(b'', b'')])[:-48] + b'gap' + table([(b'', b'')])[-48:], 'no block ends at byte'),
    ],
)
def test_a_table_that_lies_is_refused(tmp_path, content, message):
    (tmp_path / 'x.index').write_bytes(content)
    with pytest.raises(ValueError, match=f'x.index cannot be read.*{message}.*copy it again'):
        mesh_tf.read_bundle_index(tmp_path / 'x')


@pytest.mark.parametrize(
    'content, expected',
    [
        ('00', b''),
        ('05 10 68656c6c6f', b'hello'),
        ('3d f0 3c' + '62' * 61, b'b' * 61),  # literals with their length in one, four bytes
        ('3d fc 3c000000' + '62' * 61, b'b' * 61),
        ('06 04 6162 01 02', b'ababab'),  # four bytes from two back: it runs into itself
        ('07 04 6162 05 02', b'abababa'),
        ('8c02 f4 0001' + ''.join(f'{i % 256:02x}' for i in range(257)) + '3d 01', None),
        ('41 00 61 fe 0100', b'a' * 65),
        ('41 00 61 ff 01000000', b'a' * 65),
        ('06 04 6162 01 00', 'copies from 0 bytes back at byte 2'),
        ('06 04 6162 01 03', 'copies from 3 bytes back at byte 2'),
        ('ffffffff0f 04 6162 01 02', 'yields 6 bytes, not 4294967295'),
        ('05 04 6162 01 02', 'yields 6 bytes, not 5'),
        ('06 14 6162', '6 bytes should follow'),
        ('06 f4 00', '2 bytes should follow'),
        ('06 04 6162 02 02', '2 bytes should follow'),
        ('ffffffffffffffffffff01', 'no integer ends'),
        ('ffffffffffffffffff7f', 'no integer ends'),
        ('8000', 'no integer ends'),
    ],
)
def test_snappy_by_hand(content, expected):
    content = bytes.fromhex(content)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            mesh_tf._decompress_snappy(content)
    else:
        literal = bytes(i % 256 for i in range(257))
        expected = literal + literal[:11] if expected is None else expected
        assert mesh_tf._decompress_snappy(content) == expected


def test_arrays_take_no_memory_but_their_own(tmp_path):
    x = np.zeros(2**23, np.float32)
    entry = mesh_tf.read_bundle_index(bundle(tmp_path / 'model.ckpt-1', {'a': x}))['a']
    tracemalloc.start()
    found = entry.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.size == x.size and peak < x.nbytes + 2**20


def test_a_file_that_never_ends_is_not_opened(tmp_path):
    prefix = bundle(tmp_path / 'model.ckpt-1', {'a': X})
    entry = mesh_tf.read_bundle_index(prefix)['a']
    entry.file.unlink()
    os.mkfifo(entry.file)
    with pytest.raises(ValueError, match='is missing'):
        entry.read()
    Path(f'{prefix}.index').unlink()
    os.mkfifo(f'{prefix}.index')
    assert mesh_tf.find_prefix(prefix) is None
    with pytest.raises(ValueError, match='is missing'):
        mesh_tf.read_bundle_index(prefix)


def test_nonsense_under_right_checksums_ends_in_a_value_error(tmp_path):
    rng, refused = random.Random(3), 0

    def change(body):
        body = bytearray(body)
        for _ in range(rng.choice([0, 0, 0, 0, 0, 1, 3])):
            body[rng.randrange(len(body))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        return bytes(body)

    arrays = {f'encoder/x{i}': X for i in range(20)}
    for _ in range(200):
        prefix = bundle(tmp_path / 'x', arrays, compress=(0,), change=change)
        try:
            for entry in mesh_tf.read_bundle_index(prefix).values():
                entry.read()
        except ValueError:
            refused += 1
    assert 100 < refused < 190  # of 200, the others were not changed or not much


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
