"""Mesh-TF checkpoints: TensorFlow's own and T5X's import of it, a writer of ours, damage, strangers.

golden/mtf_t5_1_1: written by TensorFlow 2.21's Saver under Mesh-TF's names; `imported/*` of golden.npz is
what T5X's importer (commit cc342d4) made of it, weights cast to float32, `logits` T5X's of those. No slot
in it is factored.
"""

import itertools
import json
import os
import random
import shutil
import tracemalloc
from pathlib import Path

import google_crc32c
import jax
import ml_dtypes
import numpy as np
import pytest
from small_models import t5_config

import convert
import evaluate
import model
import optimizer
import partition
from configs import base

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / 'tests/golden/mtf_t5_1_1'
MTF_TINY = ROOT.parent / 'shared/testdata/t5x/mtf_tiny_t5'  # of google-research/t5x


def read_all(prefix):
    index = convert.mesh_tf_index(prefix)
    is_entry = lambda leaf: isinstance(leaf, convert.BundleEntry)  # noqa: E731
    return {p: x.read() if is_entry(x) else x for p, x in index.items()}


def assert_same(found, expected):
    """Bit for bit, with dtypes and shapes."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        assert found[name].tobytes() == x.tobytes(), name


# Theirs.


def test_golden_is_what_the_importer_of_t5x_makes_of_it_and_gives_its_logits():
    golden = np.load(GOLDEN / 'golden.npz')
    names = [name for name in golden.files if name.startswith('imported/')]
    expected = {name.removeprefix('imported/'): golden[name] for name in names}
    found = read_all(convert.mesh_tf_prefix(GOLDEN))
    weights = {path for path in found if path.startswith('target/')}
    assert len(found) == 261 and {found[path].dtype.name for path in weights} == {'bfloat16'}
    assert_same(
        {p: x.astype(np.float32) if p in weights else x for p, x in found.items()}, expected
    )
    config = t5_config(**json.loads((GOLDEN / 'config.json').read_text()))
    params = {p.removeprefix('target/'): found[p].astype(np.float32) for p in weights}
    assert {path: x.shape for path, x in params.items()} == model.shapes(config)
    t5 = evaluate.T5(config, params, partition.make_mesh(1, 1, jax.devices()[:1]))
    batch = {n.split('/')[1]: golden[n] for n in golden.files if n.startswith('batch/')}
    error = np.abs(t5.logits(batch) - golden['logits']).max()
    assert error <= 1e-5 * np.abs(golden['logits']).max()


def test_tiny_checkpoint_of_t5x_lacks_its_weights_and_says_so():
    """Its index is compressed. The model's sizes are those that T5X's test of this file set."""
    if not MTF_TINY.exists():
        pytest.skip(f'{MTF_TINY} is not there; the tables that we write are compressed, too')
    prefix = convert.mesh_tf_prefix(MTF_TINY)
    entries = convert.read_bundle_index(prefix)
    assert len(entries) == 105 and entries['global_step'].read() == np.int64(0)
    assert sum(entry.size for entry in entries.values()) == 13_077_504 + 8
    index = convert.mesh_tf_index(prefix)
    assert len(index) == 1 + 52 * 5 and index['state/step'] == np.int32(0)
    sizes = t5_config(
        vocab_size=32128,
        emb_dim=32,
        num_heads=2,
        num_encoder_layers=2,
        num_decoder_layers=2,
        head_dim=64,
        mlp_dim=64,
    )
    for path, shape in model.shapes(sizes).items():
        weight, slot = index[f'target/{path}'], index[f'state/param_states/{path}/v']
        assert (weight.shape, weight.dtype) == (shape, ml_dtypes.bfloat16)
        assert (slot.shape, slot.dtype) == (shape, np.float32)
    listing = (MTF_TINY / 'model-info.txt').read_text()
    for name in entries:
        assert name in listing or name == 'global_step' or name.endswith('_slot_v'), name
    with pytest.raises(
        ValueError, match=r'ckpt-0\.data-00001-of-00002 is missing: bring all files'
    ):
        entries['shared/embedding'].read()


# Ours: a writer of the format that shares nothing with the reader.


def varint(number):
    low, high = number % 128, number // 128
    return bytes([low | 128]) + varint(high) if high else bytes([low])


def proto(*fields):
    """(number, value): int as varint, bytes with their length, ('fixed32', int)."""
    content = b''
    for number, value in fields:
        if isinstance(value, bytes):
            content += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, tuple):
            content += varint(number << 3 | 5) + value[1].to_bytes(4, 'little')
        else:
            content += varint(number << 3) + varint(value)
    return content


def masked(content):
    crc32c = google_crc32c.value(content)
    rotated = (crc32c >> 15) | (crc32c << 17) & 0xFFFFFFFF
    return (rotated + 0xA282EAD8) & 0xFFFFFFFF


def snappy(content):
    """Compresses with every element of the format: literals of both sorts, copies of all three."""
    output, at, literal = varint(len(content)), 0, b''

    def flush():
        n = len(literal)
        if n == 0:
            return b''
        head = (
            bytes([(n - 1) << 2]) if n <= 60 else bytes([61 << 2]) + (n - 1).to_bytes(2, 'little')
        )
        return head + literal

    for kind in itertools.cycle((1, 2, 3)):
        if at >= len(content):
            return output + flush()
        longest = {1: 11, 2: 64, 3: 64}[kind]
        best = (0, 0)
        for start in range(max(0, at - (2047 if kind == 1 else 5000)), at):
            n = 0
            while n < longest and at + n < len(content) and content[start + n] == content[at + n]:
                n += 1
            best = max(best, (n, at - start))
        n, offset = best
        if n < 4:
            literal += content[at : at + 1]
            at += 1
            continue
        output, literal = output + flush(), b''
        if kind == 1:
            output += bytes([offset >> 8 << 5 | (n - 4) << 2 | 1, offset & 255])
        else:
            output += bytes([(n - 1) << 2 | kind]) + offset.to_bytes(2 * kind - 2, 'little')
        at += n


def block(pairs, interval=4):
    content, restarts, last = b'', [], b''
    for i, (key, value) in enumerate(pairs):
        shared = len(os.path.commonprefix([last, key])) if i % interval else 0
        if i % interval == 0:
            restarts.append(len(content))
        rest, last = key[shared:], key
        content += varint(shared) + varint(len(rest)) + varint(len(value)) + rest + value
    numbers = [*(restarts or [0]), len(restarts or [0])]
    return content + b''.join(n.to_bytes(4, 'little') for n in numbers)


def table(pairs, compress=(0, 1), pairs_a_block=6, change=lambda content: content, gap=b''):
    """A LevelDB table whose blocks are plain (0) and compressed (1) in turn; `change` is done to them."""
    content, handles, kinds = gap, [], itertools.cycle(compress)

    def add(entries):
        nonlocal content
        kind, body = next(kinds), change(block(entries))
        body = (snappy(body) if kind else body) + bytes([kind])
        handle = varint(len(content)) + varint(len(body) - 1)
        content += body + masked(body).to_bytes(4, 'little')
        return handle

    for i in range(0, len(pairs), pairs_a_block):
        part = pairs[i : i + pairs_a_block]
        handles.append((part[-1][0], add(part)))
    footer = add([]) + add(handles)
    return content + footer.ljust(40, b'\0') + bytes.fromhex('57fb808b247547db')


DTYPES = {'float32': 1, 'int32': 3, 'int64': 9, 'bfloat16': 14}


def bundle(prefix, arrays, num_shards=3, entry=lambda name, fields: fields, header=(), **options):
    """Writes it: array i into shard i % num_shards. `entry` may lie about (field, value) of an array."""
    shards, pairs = [b''] * num_shards, {b'': proto((1, num_shards), (3, proto((1, 1))), *header)}
    for i, (name, x) in enumerate(arrays.items()):
        shard, content = i % num_shards, x.tobytes()
        shape = proto(*((2, proto((1, n))) for n in x.shape))
        fields = {1: DTYPES[x.dtype.name], 2: shape, 3: shard, 4: len(shards[shard])}
        fields |= {5: len(content), 6: ('fixed32', masked(content))}
        shards[shard] += content
        fields = {n: value for n, value in entry(name, fields).items() if value != 0}
        pairs[name.encode()] = proto(*fields.items())
    for i, content in enumerate(shards):
        Path(f'{prefix}.data-{i:05d}-of-{num_shards:05d}').write_bytes(content)
    Path(f'{prefix}.index').write_bytes(table(sorted(pairs.items()), **options))
    return Path(prefix)


def mesh_tf_variables():
    """T5 1.1 of one layer: {Mesh-TF's name: bfloat16 weight}, with all of Mesh-TF's slots and a step."""
    d, h, k, f, v = 6, 2, 3, 8, 10
    shapes = {'shared/embedding': (v, d), 'decoder/logits/kernel': (d, v)}
    for tower, attentions in (('encoder', ['Self']), ('decoder', ['Self', 'EncDec'])):
        shapes[f'{tower}/final_layer_norm/scale'] = (d,)
        here = f'{tower}/block_000/layer_000/SelfAttention/relative_attention_bias'
        shapes[here] = (h, 32)
        for i, kind in enumerate(attentions):
            shapes[f'{tower}/block_000/layer_{i:03d}/rms_norm/scale'] = (d,)
            for letter in 'qkvo':
                here = f'{tower}/block_000/layer_{i:03d}/{kind}Attention/{letter}'
                shapes[here] = (d, h * k)  # square
        here = f'{tower}/block_000/layer_{len(attentions):03d}'
        shapes[f'{here}/layer_norm/scale'] = (d,)
        for name, shape in (('wi_0', (d, f)), ('wi_1', (d, f)), ('wo', (f, d))):
            shapes[f'{here}/DenseReluDense/{name}/kernel'] = shape
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    arrays = {'global_step': np.array(1_000_000)}
    for name, shape in shapes.items():
        arrays[name] = draw(shape).astype(ml_dtypes.bfloat16)
        if len(shape) == 1 or 'bias' in name:
            arrays[f'{name}_slot_v'] = draw(shape)
        else:  # mesh_tensorflow/optimize.py: vr lacks the first of the largest dimensions, vc the other
            largest = max(range(2), key=lambda axis: (shape[axis], -axis))
            arrays[f'{name}_slot_vr'] = draw(shape[1 - largest])
            arrays[f'{name}_slot_vc'] = draw(shape[largest])
    return arrays


@pytest.mark.parametrize('compress', [(0,), (1,), (1, 0)])
def test_a_bundle_of_ours_comes_back(tmp_path, compress):
    arrays = mesh_tf_variables() | {f'x{i}': np.arange(1 + i % 3, dtype='i4') for i in range(150)}
    prefix = bundle(tmp_path / 'model.ckpt-7', arrays, compress=compress)
    entries = convert.read_bundle_index(prefix)
    assert list(entries) == sorted(arrays)
    assert_same({name: entry.read() for name, entry in entries.items()}, arrays)


def test_variables_get_the_names_of_t5x(tmp_path):
    arrays = mesh_tf_variables()
    found = read_all(bundle(tmp_path / 'model.ckpt-1000000', arrays))
    config = t5_config(
        vocab_size=10,
        emb_dim=6,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=1,
        head_dim=3,
        mlp_dim=8,
    )
    weights = {path: x for path, x in found.items() if path.startswith('target/')}
    expected = {f'target/{path}': shape for path, shape in model.shapes(config).items()}
    assert {path: x.shape for path, x in weights.items()} == expected
    assert len(found) == 1 + 5 * len(weights)  # four slots each
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
    rng, names = np.random.default_rng(1), {'q': (128, 128), 'k': (128, 160), 'v': (160, 128)}
    config = base.get_config().optimizer
    params = {f'encoder/layers_0/attention/{n}/kernel': np.ones(x, 'f4') for n, x in names.items()}
    grads = {path: rng.standard_normal(x.shape).astype(np.float32) for path, x in params.items()}
    adafactor = optimizer.make_optimizer(config, lambda step: 0.1)
    _, state = adafactor.update(grads, adafactor.init(params), params)
    expected = optimizer.to_t5x(1, params, state)
    arrays = {}
    for path, grad in grads.items():
        name = f'encoder/block_000/layer_000/SelfAttention/{path.split("/")[3]}'
        first = int(np.argmax(grad.shape))  # the first of the largest: axis 0 of a square
        arrays[name] = grad
        arrays[f'{name}_slot_vr'] = np.mean(grad**2, first)
        arrays[f'{name}_slot_vc'] = np.mean(grad**2, 1 - first)
    found = read_all(bundle(tmp_path / 'model.ckpt-1', arrays))
    for path in params:
        ours = '/'.join(convert.MATRICES.get(part, part) for part in path.split('/'))
        for slot in ('v_row', 'v_col'):
            a = found[f'state/param_states/{ours}/{slot}']
            b = np.asarray(expected[f'state/param_states/{path}/{slot}'])
            assert a.shape == b.shape and np.abs(a - b).max() <= 1e-6 * b.max(), (path, slot)


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
        ({'shared/embedding_slot_m': X}, r'for 1 variables \(shared/embedding_slot_m\)'),
        ({'shared/embedding_slot_': X}, r'1 variables'),
        ({f'lora/{i:02d}': X for i in range(12)}, r'12 variables \(lora/00, .*lora/09\): bring'),
        ({'encoder/rms_norm/scale': X, 'encoder/final_layer_norm/scale': X}, '1 variables'),
        ({'../../etc/passwd': X}, r'1 variables'),
        ({'encoder/block_00/layer_000/SelfAttention/q': X}, r'1 variables'),
        ({'shared/embedding\u0663': X}, 'cannot be read .*ascii'),
        ({'transformer/logits/kernel': X}, r'T5 1.0 and 1.1 have no place for 1 variables \(tr'),
        (
            {'shared/embedding': X, 'shared/embedding_slot_vr': X},
            "only {'v_row'}, not v, or v_row and v_col",
        ),
        ({'global_step': np.array(2**31)}, 'global_step 2147483648, not an int32'),
        ({'global_step': np.array(1, 'f4')}, 'global_step 1.0'),
        ({'global_step': np.array([1])}, r'global_step \[1\]'),
    ],
)
def test_what_has_no_place_in_t5x_is_named(tmp_path, arrays, message):
    prefix = bundle(tmp_path / 'model.ckpt-1', arrays)
    with pytest.raises(ValueError, match=message):
        convert.mesh_tf_index(prefix)


# Which files are meant.


def test_a_folder_or_prefix_leads_to_the_checkpoint(tmp_path):
    assert convert.mesh_tf_prefix(tmp_path) is None
    first = bundle(tmp_path / 'model.ckpt-1', {'a': X})
    assert convert.mesh_tf_prefix(tmp_path) == convert.mesh_tf_prefix(str(first)) == first
    bundle(tmp_path / 'model.ckpt-2', {'a': X})
    with pytest.raises(ValueError, match=r'2 checkpoints \(model.ckpt-1, model.ckpt-2\): name one'):
        convert.mesh_tf_prefix(tmp_path)
    (tmp_path / 'checkpoint').write_text('model_checkpoint_path: "model.ckpt-1"\n')
    assert convert.mesh_tf_prefix(tmp_path) == first
    assert convert.mesh_tf_prefix(tmp_path / 'model.ckpt-3') is None
    with pytest.raises(ValueError, match='model.ckpt-3.index is missing'):
        convert.read_bundle_index(tmp_path / 'model.ckpt-3')


def test_a_pointer_never_leaves_its_folder(tmp_path):
    for target in ('/etc/passwd', '../../etc/passwd', 'gs://t5/x/passwd'):
        (tmp_path / 'checkpoint').write_text(f'model_checkpoint_path: "{target}"\n')
        assert convert.mesh_tf_prefix(tmp_path) == tmp_path / 'passwd'
    for target in ('', '..', '/', 'a/'):
        (tmp_path / 'checkpoint').write_text(f'model_checkpoint_path: "{target}"\n')
        prefix = convert.mesh_tf_prefix(tmp_path)
        assert prefix is None or prefix.parent == tmp_path


@pytest.mark.parametrize('name', ['index', 'data-00001-of-00003', 'checkpoint'])
def test_a_link_never_leaves_its_folder(tmp_path, name):
    folder = tmp_path / 'checkpoint'
    shutil.copytree(GOLDEN, folder)
    file = folder / ('checkpoint' if name == 'checkpoint' else f'model.ckpt-1000000.{name}')
    file.rename(tmp_path / 'elsewhere')
    file.symlink_to('../elsewhere')
    with pytest.raises(ValueError, match=f'{file} links to {tmp_path}/elsewhere, outside'):
        read_all(convert.mesh_tf_prefix(folder))
    (tmp_path / 'elsewhere').rename(folder / 'beside')
    file.unlink()
    file.symlink_to('beside')
    assert read_all(convert.mesh_tf_prefix(folder))


def test_a_checkpoint_of_t5x_is_not_taken_for_one(tmp_path):
    """T5X's data iterator leaves a bundle of its own in there."""
    shutil.copy(ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_0/checkpoint', tmp_path)
    bundle(tmp_path / 'train_ds-00000-of-00001', {'a': X})
    assert convert.mesh_tf_prefix(tmp_path) is None


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


@pytest.mark.parametrize('of', ['golden', 'ours'])
def test_every_one_of_200_random_faults_is_detected(tmp_path, of):
    whole, rng, found = tmp_path / 'whole', random.Random(of), 0
    if of == 'golden':
        shutil.copytree(GOLDEN, whole, ignore=shutil.ignore_patterns('*.npz', '*.json'))
    else:
        whole.mkdir()
        bundle(whole / 'model.ckpt-7', mesh_tf_variables())
    prefix = convert.mesh_tf_prefix(whole)
    read_all(prefix)
    while found < 200:
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
        ({1: 7}, 'dtype 7 of TensorFlow'),
        ({1: 0}, 'dtype 0 of TensorFlow'),
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
        ({2: b'\x12\x7f\x08'}, '127 bytes wanted'),
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
        convert.read_bundle_index(prefix)


@pytest.mark.parametrize('lie', [{4: 1}, {4: 2**62}, {4: 2**64 - 8}])
def test_an_array_beyond_its_file_takes_no_memory(tmp_path, lie):
    n = 2**40  # consistent in shape and size, so only the file tells
    shape = proto((2, proto((1, n))))
    lie = {2: shape, 5: 4 * n} if lie == {4: 1} else lie
    entry = lambda name, fields: fields | lie  # noqa: E731
    prefix = bundle(tmp_path / 'model.ckpt-1', {'a': X}, entry=entry)
    with pytest.raises(
        ValueError, match=r'data-00000-of-00003 ends at 24, a at \d+: copy it again'
    ):
        convert.read_bundle_index(prefix)['a'].read()


@pytest.mark.parametrize(
    'content, message',
    [
        (b'', 'does not end with the magic'),
        (b'model_checkpoint_path: "x"' * 9, 'does not end with the magic'),
        (bytes(40) + bytes.fromhex('57fb808b247547db'), 'has changed'),
        (b'\xff' * 40 + bytes.fromhex('57fb808b247547db'), 'no integer ends'),
        (bytes(2**22 + 1), 'more than 4194304 bytes'),
        (table([(b'a', b'')]), "''"),  # no header
        (table([(b'', proto((1, 1), (2, 1)))]), 'big-endian'),
        (table([(b'', b''), (b'b', b''), (b'a', b'')]), "b'a' is out of order"),
        (table([(b'', b''), (b'a', b''), (b'a', b'')]), "b'a' is out of order"),
        (table([(b'', b''), (b'a' * 1001, b'')]), r'a name of 0 \+ 1001 bytes'),
        (table([(b'', b'')], change=lambda block: b'\x01' + block), 'a name of 1'),
        (table([(b'', b'')], change=lambda block: b'\x00\x00\x09' + block), 'bytes wanted'),
        (table([(b'', b'')], change=lambda block: block[:-4] + b'\xff' * 4), 'bytes wanted'),
        (table([(b'', b'')], change=lambda block: b''), 'bytes wanted'),
        (table([(b'', b'')], compress=(2,)), 'has compression 2'),
        (table([(b'', b'')], gap=b'gap'), 'no block begins at byte 0'),
        (table([(b'', b'')])[:-48] + b'gap' + table([(b'', b'')])[-48:], 'no block ends at byte'),
    ],
)
def test_a_table_that_lies_is_refused(tmp_path, content, message):
    (tmp_path / 'x.index').write_bytes(content)
    with pytest.raises(ValueError, match=f'x.index cannot be read.*{message}.*copy it again'):
        convert.read_bundle_index(tmp_path / 'x')


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
        ('06 04 6162 01 00', 'copies from 0 bytes back at 2'),
        ('06 04 6162 01 03', 'copies from 3 bytes back at 2'),
        ('ffffffff0f 04 6162 01 02', 'yields 6 bytes, not 4294967295'),
        ('05 04 6162 01 02', 'yields 6 bytes, not 5'),
        ('06 14 6162', '6 bytes wanted'),
        ('06 f4 00', '2 bytes wanted'),
        ('06 04 6162 02 02', '2 bytes wanted'),
        ('ffffffffffffffffffff01', 'no integer ends'),
        ('ffffffffffffffffff7f', 'no integer ends'),
        ('8000', 'no integer ends'),
    ],
)
def test_snappy_by_hand(content, expected):
    content = bytes.fromhex(content)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            convert._decompress_snappy(content)
    else:
        literal = bytes(i % 256 for i in range(257))
        expected = literal + literal[:11] if expected is None else expected
        assert convert._decompress_snappy(content) == expected


def test_arrays_take_no_memory_but_their_own(tmp_path):
    x = np.zeros(2**23, np.float32)
    entry = convert.read_bundle_index(bundle(tmp_path / 'model.ckpt-1', {'a': x}))['a']
    tracemalloc.start()
    found = entry.read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.size == x.size and peak < x.nbytes + 2**20


def test_a_file_that_never_ends_is_not_opened(tmp_path):
    prefix = bundle(tmp_path / 'model.ckpt-1', {'a': X})
    entry = convert.read_bundle_index(prefix)['a']
    entry.file.unlink()
    os.mkfifo(entry.file)
    with pytest.raises(ValueError, match='is missing'):
        entry.read()
    Path(f'{prefix}.index').unlink()
    os.mkfifo(f'{prefix}.index')
    assert convert.mesh_tf_prefix(prefix) is None
    with pytest.raises(ValueError, match='is missing'):
        convert.read_bundle_index(prefix)


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
            for entry in convert.read_bundle_index(prefix).values():
                entry.read()
        except ValueError:
            refused += 1
    assert 100 < refused < 190  # of 200, the others were not changed or not much


# TensorFlow itself, where it is installed.


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
    assert convert.mesh_tf_prefix(tmp_path) == prefix
    entries = convert.read_bundle_index(prefix)
    assert len({entry.file for entry in entries.values()}) == 3
    assert_same({name: entry.read() for name, entry in entries.items()}, arrays)
    ours = bundle(tmp_path / 'ours', arrays)
    reader = tf.train.load_checkpoint(str(ours))
    assert_same({name: np.asarray(reader.get_tensor(name)) for name in arrays}, arrays)
    assert_same(read_all(ours), read_all(prefix))
