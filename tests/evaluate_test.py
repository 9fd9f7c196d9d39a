"""Every kind of checkpoint opens by one call, computes the originals' numbers, and goes back out.

golden/: made by running T5X, TensorFlow's Saver and transformers; its READMEs say how.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import checkpoint_test
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import assert_close, golden_batch, t5_config

import checkpoint
import convert
import data
import evaluate
import model
import partition

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / 'tests/golden'
MESH_TF, HUGGING_FACE = GOLDEN / 'mtf_t5_1_1', GOLDEN / 'hf_t5_1_1'
T5X = GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6'


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision('highest'):
        yield


def ids_of(rows):
    return [[int(i) for i in row if i > 0] for row in rows]


@pytest.mark.parametrize('path', [MESH_TF, MESH_TF / 'model.ckpt-1000000'])
@pytest.mark.parametrize('mesh_shape', [(1, 1), (2, 2)])
def test_mesh_tf(path, mesh_shape):
    mesh = partition.make_mesh(*mesh_shape, jax.devices()[: mesh_shape[0] * mesh_shape[1]])
    t5, arrays = evaluate.load(path, mesh=mesh), np.load(MESH_TF / 'golden.npz')
    assert_close(t5.logits(golden_batch(arrays, 'batch')), arrays['logits'], 1e-5)
    assert t5.config.mlp_activations == ('gelu', 'linear') and t5.vocabulary is None


def test_hugging_face():
    t5, arrays = evaluate.load(HUGGING_FACE), np.load(HUGGING_FACE / 'golden.npz')
    batch = golden_batch(arrays, 'batch')
    seen = batch['decoder_loss_weights'] > 0
    assert_close(np.asarray(t5.logits(batch))[seen], arrays['logits'][seen], 1e-4)
    expected = arrays['greedy'][:, 1:]
    found = t5.generate(ids_of(batch['encoder_input_tokens']), max_length=expected.shape[1])
    for row, tokens in zip(expected, found, strict=True):
        end = list(row).index(1) if 1 in row else len(row)
        assert tokens == row[:end].tolist()


@pytest.mark.parametrize('mesh_shape', [(1, 1), (4, 2)])
def test_scores_and_greedy_answers_are_T5Xs(golden, mesh_shape):
    mesh = partition.make_mesh(*mesh_shape, jax.devices()[: mesh_shape[0] * mesh_shape[1]])
    arrays, t5 = np.load(golden / 'golden.npz'), evaluate.load(golden / 'checkpoint_0', mesh=mesh)
    batch = golden_batch(arrays, 'batch')
    inputs, targets = (
        ids_of(batch[f'{name}_tokens']) for name in ('encoder_input', 'decoder_target')
    )
    assert_close(t5.score(inputs, targets), arrays['score_batch'], 1e-5)
    assert_close(t5.score(inputs[:3], targets[:3]), arrays['score_batch'][:3], 1e-5)
    expected = arrays['greedy_decodes']
    found = t5.generate(inputs, max_length=expected.shape[1])
    assert found == [[i for i in row if i > 1] for row in expected.tolist()]


@pytest.fixture(scope='module')
def t5():
    return evaluate.load(T5X, vocabulary='bytes')


NO_LIST = 'is no list of texts or of ids: give one or more'
NEITHER = 'is neither a text nor a list of ids'
NO_ROWS = 'model.vocab_size=384 has no such rows, only 0 to 383'


@pytest.mark.parametrize(
    'examples, expected',
    [
        (['hello', ''], ['text', 'text']),
        (('hello', 'a'), ['text', 'text']),
        (np.array(['a', 'b']), ['text', 'text']),
        ([[5, 6], [7]], ['ids', 'ids']),
        (((5, 6), (7,)), ['ids', 'ids']),
        ([range(3, 6), [8]], ['ids', 'ids']),
        ([np.array([5]), np.array([6, 7], np.int64)], ['ids', 'ids']),
        (np.array([[5, 6], [7, 0]], np.int32), ['ids', 'ids']),
        (np.array([[5, 6], [7, 8]], np.int64), ['ids', 'ids']),
        (np.array([[5, 6], [7, 8]], np.uint8), ['ids', 'ids']),
        (jnp.array([[5, 6], [7, 8]]), ['ids', 'ids']),
        ('a text', f"='a text' {NO_LIST}"),
        (b'bytes', f"=b'bytes' {NO_LIST}"),
        ([], f'=[] {NO_LIST}'),
        (np.zeros([0, 3], np.int32), NO_LIST),
        (None, f'=None {NO_LIST}'),
        (5, f'=5 {NO_LIST}'),
        (np.array(5), NO_LIST),
        ({'a': 1}, NO_LIST),
        ([5, 6], f'[0]=5 {NEITHER}'),
        (np.array([5, 6]), NEITHER),
        ([None], f'[0]=None {NEITHER}'),
        ([[5], b'bytes'], f"[1]=b'bytes' {NEITHER}"),
        ([[1.5]], f'[0]=[1.5] {NEITHER}'),
        (np.array([[5.0]]), NEITHER),
        ([[True]], NEITHER),
        ([['a']], NEITHER),
        ([[[5]]], NEITHER),
        ([[5, [6]]], NEITHER),
        ([{5, 6}], NEITHER),
        ([[5], []], '[1]=[] has no ids but padding: give one or more, 1 is EOS'),
        ([[0, 0]], 'has no ids but padding'),
        (['a', [5]], '[0] is a text, inputs[1] is not: give either texts or ids'),
        ([[5], 'a'], '[1] is a text, inputs[0] is not'),
        ([[5], [-1]], f'[1] has id -1: {NO_ROWS}'),
        ([[384]], f'[0] has id 384: {NO_ROWS}'),
        ([[2**31]], f'has id 2147483648: {NO_ROWS}'),
        ([np.array([2**32 + 5])], f'has id 4294967301: {NO_ROWS}'),
        ([[2**70]], f'has id {2**70}: {NO_ROWS}'),
        (['\ud800'], 'has half a character (a surrogate)'),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_may_be_asked(t5, examples, expected):
    if isinstance(expected, list):
        answers = t5.generate(examples, max_length=2)
        kinds = {'text': str, 'ids': list}
        assert [type(answer) for answer in answers] == [kinds[kind] for kind in expected]
        assert t5.score(examples, examples).shape == (len(expected),)
        return
    name = '' if expected.startswith(('is ', 'has ')) else 'inputs'
    words = re.escape(name + expected).replace('inputs', 'INPUTS', 1)
    for ask, argument in [
        (lambda: t5.generate(examples), 'inputs'),
        (lambda: t5.score(examples, [[5]]), 'inputs'),
        (lambda: t5.score([[5]], examples), 'targets'),
    ]:
        pattern = words.replace('INPUTS', argument).replace(r'inputs\[', rf'{argument}\[')
        with pytest.raises(ValueError, match=pattern) as error:
            ask()
        assert '\n' not in str(error.value)


def test_the_rest_of_a_question(t5):
    for max_length in (0, -1, 1.5, 2**40, True, '3', None):
        words = re.escape(f'max_length={max_length!r}: must be a number of tokens from 1 to 32768')
        with pytest.raises(ValueError, match=words):
            t5.generate([[5]], max_length)
    assert t5.generate([[5], [6]], np.int64(2)) == t5.generate(np.array([[5, 0], [6, 0]]), 2)
    with pytest.raises(ValueError, match='1 inputs for 2 targets'):
        t5.score([[5]], [[5], [6]])
    without = evaluate.T5(t5.config, t5.arrays, t5.mesh)
    with pytest.raises(ValueError, match='brings no vocabulary: load.*vocabulary=PATH'):
        without.generate(['a text'])


INPUTS, SHIFTED, TARGETS = evaluate.SEQUENCES
SEGMENTS = {name: np.ones([2, 4], np.int32) for name in evaluate.SEGMENTS}


@pytest.mark.parametrize(
    'changes, words',
    [
        ({}, None),
        ({INPUTS: [[1, 2], [3, 4]]}, None),
        ({INPUTS: np.ones([2, 9], np.int64)}, None),
        (SEGMENTS, None),
        ({'decoder_loss_weights': np.ones([2, 4])}, None),
        ({TARGETS: None}, f'{TARGETS} is object []: must be integers [batch, length]'),
        ({INPUTS: np.full([2, 4], 384)}, f'{INPUTS} has id 384: {NO_ROWS}'),
        ({INPUTS: np.full([2, 4], 2**32 + 5)}, 'has id 4294967301'),
        ({SHIFTED: np.full([2, 4], -1)}, f'{SHIFTED} has id -1: {NO_ROWS}'),
        ({TARGETS: jnp.full([2, 4], 384)}, f'{TARGETS} has id 384'),
        ({INPUTS: np.ones(4, int)}, f'{INPUTS} is int64 [4]: must be integers [batch, length]'),
        ({INPUTS: np.ones([2, 0], int)}, f'{INPUTS} is int64 [2, 0]: must be'),
        ({name: np.ones([0, 4], int) for name in evaluate.SEQUENCES}, 'int64 [0, 4]: must be'),
        ({INPUTS: np.ones([2, 4])}, f'{INPUTS} is float64 [2, 4]: must be integers'),
        ({INPUTS: [[1], [2, 3]]}, f'{INPUTS} is object []'),
        ({INPUTS: 'text'}, f'{INPUTS} is <U4 []'),
        ({INPUTS: np.ones([3, 4], int)}, f'{SHIFTED} has shape [2, 4]: must be [3, 4], with the'),
        ({SHIFTED: np.ones([2, 5], int)}, f'{TARGETS} has shape [2, 4]: must be [2, 5], with the'),
        (
            SEGMENTS | {evaluate.SEGMENTS[0]: np.ones([2, 5], int)},
            'has shape [2, 5]: must be [2, 4]',
        ),
        (
            SEGMENTS | {evaluate.SEGMENTS[1]: np.full([2, 4], -1)},
            'decoder_segment_ids has -1 to -1: must be int32, 1 or more, and 0 for padding',
        ),
        ({evaluate.SEGMENTS[0]: np.ones([2, 4], int)}, 'has only one of encoder_segment_ids, dec'),
        ({'encoder_segments': 1}, "the batch has 'encoder_segments': the features are"),
    ],
    ids=lambda value: ', '.join(value) if isinstance(value, dict) else '',
)
def test_batches(t5, changes, words):
    batch = {name: np.full([2, 4], 5, np.int32) for name in evaluate.SEQUENCES} | changes
    if words is None:
        assert t5.logits(batch).shape == (2, 4, 384)
        return
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        t5.logits(batch)
    assert '\n' not in str(error.value)


def test_batches_that_are_none(t5):
    with pytest.raises(ValueError, match=f"has .'x'.: it needs {INPUTS}, {SHIFTED}, {TARGETS}"):
        t5.logits({'x': 1})
    with pytest.raises(ValueError, match='a list is no batch: give a dict of T5X features'):
        t5.logits([1])
    batch = {name: np.full([2, 4], 5, np.int32) for name in evaluate.SEQUENCES}
    assert jax.jit(t5.logits)(batch).shape == (2, 4, 384)  # inside of another function, too


@pytest.mark.parametrize(
    'argument, value, words',
    [
        *(
            ('dtype', x, f"dtype={x!r}: must be one of 'float32', 'bfloat16', 'float16', ''")
            for x in ('int8', 'float64', 'nonsense', None)
        ),
        ('mesh', (2, 2), "mesh=(2, 2): must have the axes 'data' and 'model': use partition"),
        ('mesh', {'data': 8}, "must have the axes 'data' and 'model'"),
        ('mesh', {'data': 1, 'model': 8}, 'model.num_heads=4 cannot be split over mesh.model=8'),
        ('vocabulary', 'nowhere', "vocabulary='nowhere': no file, nor a folder with vocabulary.mo"),
        ('vocabulary', T5X, f"vocabulary='{T5X}': no file, nor a folder with"),
        ('vocabulary', __file__, f'{__file__}: no SentencePiece model: name another'),
        ('vocabulary', 5, '5 is no path'),
        ('vocabulary', 'http://x', 'http://x: only paths on a disk'),
    ],
)
def test_what_load_refuses(argument, value, words):
    if argument == 'mesh' and isinstance(value, dict):
        value = jax.make_mesh(tuple(value.values()), tuple(value))
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        evaluate.load(T5X, **{argument: value})
    assert '\n' not in str(error.value)


def test_dtypes_of_load():
    for dtype, expected in [('', 'float32'), (jnp.bfloat16, 'bfloat16'), ('float16', 'float16')]:
        found = evaluate.load(T5X, dtype=dtype).arrays.values()
        assert {x.dtype.name for x in found} == {expected}
    stored = {x.dtype.name for x in evaluate.load(MESH_TF, dtype='').arrays.values()}
    assert stored == {'bfloat16'}


def stack(params, config):
    """T5X's scalable_t5 tree of umT5 (t5x/examples/scalable_t5): layers on axis 1, heads apart."""
    stacked = {}
    for path, x in params.items():
        if match := re.fullmatch(r'(encoder|decoder)/layers_0/(.+)', path):
            layers = [
                params[f'{match[1]}/layers_{i}/{match[2]}']
                for i in range(config.num_encoder_layers)
            ]
            if re.search('(query|key|value)/kernel', path):
                layers = [x.reshape(config.emb_dim, config.num_heads, -1) for x in layers]
            elif path.endswith('out/kernel'):
                layers = [x.reshape(config.num_heads, -1, config.emb_dim) for x in layers]
            stacked[f'{match[1]}/{match[1]}/{match[2]}'] = np.stack(layers, axis=1)
        elif '/layers_' not in path:
            stacked[path] = x
    return stacked


@pytest.mark.parametrize('inline', [False, True])
def test_stacked_layers_of_umt5(tmp_path, inline, monkeypatch):
    config = t5_config(
        vocab_size=384,
        emb_dim=24,
        num_heads=4,
        head_dim=8,
        num_encoder_layers=3,
        num_decoder_layers=3,
        mlp_dim=48,
        mlp_activations=('gelu', 'linear'),
        dropout_rate=0.1,
        relpos_bias_per_layer=True,
    )
    params = {path: np.asarray(x) for path, x in model.init(config, jax.random.key(0)).items()}
    stacked = stack(params, config)
    assert stacked['decoder/decoder/self_attention/out/kernel'].shape == (4, 3, 8, 24)
    assert stacked['encoder/encoder/relpos_bias/rel_embedding'].shape == (4, 3, 32)
    assert stacked['encoder/encoder/mlp/wo/kernel'].shape == (48, 3, 24)
    assert stacked['decoder/decoder/pre_mlp_layer_norm/scale'].shape == (24, 3)
    tree = {f'target/{path}': x for path, x in stacked.items()} | {'state/step': np.int32(9)}
    tree['state/param_states/encoder/encoder/mlp/wo/kernel/v_row'] = np.ones([24, 3], np.float32)
    directory = checkpoint.save(tmp_path, 9, tree)
    if inline:  # as T5X writes what has no axes
        leaves = {path: checkpoint_test.extension(1, x) for path, x in tree.items()}
        shutil.rmtree(directory)
        checkpoint_test.write_index(directory, checkpoint.unflatten(leaves))
    reads, read = [], checkpoint.ZarrEntry.read
    monkeypatch.setattr(checkpoint.ZarrEntry, 'read', lambda x: reads.append(x) or read(x))
    restored = checkpoint.restore(directory)
    assert restored.pop('state/step') == 9
    assert restored.keys() == {f'target/{path}' for path in params}
    for path, x in params.items():
        np.testing.assert_array_equal(restored[f'target/{path}'], x, err_msg=path)
    num_stacks = sum(
        f'/{stack}/{stack}/' in f'/{p}' for p in stacked for stack in ('encoder', 'decoder')
    )
    assert len(reads) == (0 if inline else num_stacks)  # each once
    t5 = evaluate.load(directory, mesh=partition.make_mesh(2, 2, jax.devices()[:4]))
    assert t5.config == config
    del reads[:]
    evaluate.convert_checkpoint(directory, tmp_path / 'hf', 'hf')
    evaluate.convert_checkpoint(directory, tmp_path / 'apart', 't5x')
    assert len(reads) in (0, 2 * (num_stacks + 4))  # and what is not stacked
    assert json.loads((tmp_path / 'hf/config.json').read_text())['model_type'] == 'umt5'
    for path, x in checkpoint.restore(tmp_path / 'hf').items():
        np.testing.assert_array_equal(x, params[path.removeprefix('target/')], err_msg=path)


def test_a_file_alone(tmp_path):
    """T5X's index with all arrays in it, whatever its name; and the index of a folder."""
    arrays = checkpoint.restore(T5X)
    leaves = {path: checkpoint_test.extension(1, x) for path, x in arrays.items()}
    checkpoint_test.write_index(tmp_path, checkpoint.unflatten(leaves))
    (tmp_path / 'checkpoint').rename(tmp_path / 'test_t5_tiny.checkpoint_0')
    expected = evaluate.load(T5X).arrays
    for path in (tmp_path / 'test_t5_tiny.checkpoint_0', T5X / 'checkpoint'):
        found = evaluate.load(path).arrays
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name], x, err_msg=name)
    assert evaluate.load(MESH_TF / 'checkpoint').config.emb_dim == 32
    with pytest.raises(
        ValueError, match='model.safetensors is one file of a checkpoint: name its folder'
    ):
        evaluate.load(HUGGING_FACE / 'model.safetensors')


def test_half_the_memory():
    t5, whole = evaluate.load(T5X, dtype='bfloat16'), evaluate.load(T5X)
    assert {x.dtype for x in t5.arrays.values()} == {jnp.bfloat16.dtype}
    batch = golden_batch(np.load(T5X.parent / 'golden.npz'), 'batch')
    logits = t5.logits(batch)
    assert logits.dtype == jnp.float32
    assert_close(logits, whole.logits(batch), 2e-2)  # eight bits of mantissa


def assert_same_bits(found, expected):
    a, b = checkpoint.restore(found), checkpoint.restore(expected)
    assert sorted(a) == sorted(b)
    for path, x in b.items():
        assert (a[path].dtype, a[path].tobytes()) == (x.dtype, x.tobytes()), path


def test_t5x_to_ours_to_t5x(golden, tmp_path):
    first = evaluate.convert_checkpoint(golden / 'checkpoint_6', tmp_path / 'a', 't5x')
    assert first.name == 'checkpoint_6' and checkpoint.verify(first)
    assert_same_bits(first, golden / 'checkpoint_6')
    second = evaluate.convert_checkpoint(tmp_path / 'a', tmp_path / 'b', 't5x')
    assert_same_bits(second, golden / 'checkpoint_6')


@pytest.mark.parametrize('source', [T5X, MESH_TF, HUGGING_FACE], ids=lambda path: path.name)
def test_through_hugging_face_and_back(source, tmp_path):
    evaluate.convert_checkpoint(source, tmp_path / 'hf', 'hf')
    assert convert.is_hugging_face(tmp_path / 'hf')
    evaluate.convert_checkpoint(tmp_path / 'hf', tmp_path / 'back', 't5x')
    found, expected = checkpoint.restore(tmp_path / 'hf'), checkpoint.restore(source)
    back = checkpoint.restore(next((tmp_path / 'back').glob('checkpoint_*')))
    for path, x in expected.items():
        if path.startswith('target/'):
            for other in (found, back):
                assert (other[path].dtype, other[path].tobytes()) == (x.dtype, x.tobytes()), path
    assert back['state/step'] == 0  # Hugging Face keeps none
    assert evaluate.load(tmp_path / 'hf').config == evaluate.load(tmp_path / 'back').config


def test_mesh_tf_keeps_its_optimizer_state(tmp_path):
    written = evaluate.convert_checkpoint(MESH_TF, tmp_path, 't5x')
    arrays, found = np.load(MESH_TF / 'golden.npz'), checkpoint.restore(written)
    assert written.name == 'checkpoint_1000000' and found['state/step'] == 1_000_000
    for name in arrays:
        if name.startswith('imported/'):
            path, x = name.removeprefix('imported/'), arrays[name]
            np.testing.assert_array_equal(found[path].astype(x.dtype), x, path)


SOURCES = {
    'T5X': T5X,
    'T5X workdir': T5X.parent,
    'Mesh-TF folder': MESH_TF,
    'Mesh-TF prefix': MESH_TF / 'model.ckpt-1000000',
    'Hugging Face': HUGGING_FACE,
}
FORMS = ['{}', './{}', '../here/{}', 'sub/../{}', 'link/../{}', '~/{}', 'linked {}', '{}/']
ODD = "a b, größe 文 #?%&'[]"


def some_arrays(path):
    """{path: array} of a few parameters, as `load` finds them."""
    _, index, _ = evaluate.find_checkpoint(path)
    names = (
        'token_embedder/embedding',
        'decoder/layers_1/mlp/wo/kernel',
        'encoder/encoder_norm/scale',
    )
    return checkpoint.restore({f'target/{name}': index[f'target/{name}'] for name in names})


def assert_same_arrays(found, expected):
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)


@pytest.mark.parametrize('source', SOURCES)
def test_every_form_of_a_path_opens(source, tmp_path, monkeypatch):
    """Relative to the checkout; through links; in a folder with an odd name."""
    expected = some_arrays(SOURCES[source])
    monkeypatch.chdir(ROOT / 'tests')
    relative = os.path.join('..', 'tests', os.path.relpath(SOURCES[source]))
    assert_same_arrays(some_arrays(relative), expected)
    loaded = evaluate.load(relative).arrays
    assert_same_arrays({path: loaded[path.removeprefix('target/')] for path in expected}, expected)
    here = tmp_path / ODD / 'here'
    (here / 'sub').mkdir(parents=True)
    folder, name = SOURCES[source], SOURCES[source].name
    if source == 'Mesh-TF prefix':
        folder, name = MESH_TF, f'{MESH_TF.name}/{name}'
    shutil.copytree(folder, here / folder.name)
    monkeypatch.chdir(here)
    monkeypatch.setenv('HOME', str(here))
    (here / 'link').symlink_to(here / 'sub')
    (here / f'linked {folder.name}').symlink_to(folder.name)
    for form in FORMS:
        path = form.format(name)
        if path != 'mtf_t5_1_1/model.ckpt-1000000/':  # which is no folder
            assert_same_arrays(some_arrays(path), expected)
    if source != 'T5X workdir':
        restored = checkpoint.restore(os.path.join('..', 'here', name))
        assert_same_arrays({path: restored[path] for path in expected}, expected)


@pytest.mark.parametrize('form', ['t5x', 'hf'])
def test_every_form_of_a_path_converts(form, tmp_path, monkeypatch):
    here = tmp_path / ODD / 'here'
    (here / 'sub').mkdir(parents=True)
    (here / 'link').symlink_to('sub')
    monkeypatch.chdir(here)
    monkeypatch.setenv('HOME', str(here))
    source = os.path.relpath(HUGGING_FACE)
    assert source.startswith('..')
    expected = some_arrays(HUGGING_FACE)
    for to in ('../here/sub/../out', 'link/../linked/', '~/home', f'new/{ODD}'):
        written = evaluate.convert_checkpoint(source, to, form)
        assert written.is_relative_to(here) and '..' not in written.parts
        assert_same_arrays(some_arrays(to), expected)
    assert sorted(os.listdir(here)) == ['home', 'link', 'linked', 'new', 'out', 'sub']


@pytest.fixture(scope='module')
def places(tmp_path_factory):
    """What users name by mistake."""
    folder = tmp_path_factory.mktemp('places')
    shutil.copytree(T5X, folder / 't5x/checkpoint_6')
    shutil.copytree(HUGGING_FACE, folder / 'hf')
    shutil.copytree(MESH_TF, folder / 'mtf')
    for name, content in {
        'text.txt': 'plain text',
        'bert/config.json': '{"model_type": "bert"}',
        'bert/model.safetensors': '',
        'longt5/config.json': '{"model_type": "longt5"}',
        'no weights/config.json': '{"model_type": "t5"}',
        'flax/config.json': '{"model_type": "mt5"}',
        'flax/flax_model.msgpack': '',
        'torch/config.json': '{"model_type": "umt5"}',
        'torch/pytorch_model.bin': '',
        'tf/tf_model.h5': '',
        'run/lock': '',
        'run/config.json': '{"model": {}}',
        'other/config.json': '{}',
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    (folder / 'empty').mkdir()
    (folder / 'loop').symlink_to('loop')
    (folder / 'dangling').symlink_to('nothing')
    return folder


FORM = 'name a workdir, a checkpoint_STEP folder, a Mesh-TensorFlow prefix or a Hugging Face folder'
PICKLE = 'pickle can run code: load it with transformers, if you trust it, and save_pretrained it'


@pytest.mark.parametrize(
    'name, words',
    [
        ('nowhere', f'nowhere/checkpoint is missing: {FORM}, not '),
        ('nowhere', 'nowhere, which does not exist'),
        ('dangling', 'not a link to nothing, which does not exist'),
        ('loop', 'loop cannot be opened (Too many levels of symbolic links)'),
        ('empty', 'empty, which is empty'),
        ('other', 'other, which holds config.json'),
        ('http://x/y', 'http://x/y: only paths on a disk, gs:// and s3:// are read: download it'),
        ('run', 'run has no checkpoint yet: wait until its run has saved one, or name'),
        ('text.txt', f'text.txt is no T5X index (unpack(b) received extra data.): {FORM}'),
        ('bert', 'bert/config.json: model_type=bert: only t5, mt5, umt5 are read'),
        ('longt5', 'longt5/config.json: model_type=longt5: only t5, mt5, umt5 are read'),
        ('no weights', 'no weights has a config.json but no weights: copy model.safetensors'),
        ('flax', 'flax has no model.safetensors but flax_model.msgpack: only safetensors are'),
        ('flax', 'save_pretrained it as safetensors (from_flax=True)'),
        ('torch', f'torch has no model.safetensors but pytorch_model.bin: a {PICKLE}'),
        ('tf', 'tf has no model.safetensors but tf_model.h5: only safetensors are read'),
        ('torch/pytorch_model.bin', f'pytorch_model.bin is not read: a {PICKLE}'),
        ('hf/model.safetensors', 'is one file of a checkpoint: name its folder, '),
        ('hf/config.json', 'it is one file of a checkpoint: name its folder, '),
        ('t5x/checkpoint_6/target.token_embedder.embedding', 'which holds .zarray, 0.0'),
    ],
)
def test_what_is_no_checkpoint(places, name, words):
    path = name if '://' in name else places / name
    for ask in (evaluate.load, lambda path: evaluate.convert_checkpoint(path, places / 'x', 't5x')):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            ask(path)
        assert '\n' not in str(error.value)
    assert not (places / 'x').exists()


def test_the_root_is_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=f'^/checkpoint is missing: {FORM}, not /, which holds '):
        evaluate.load('/')
    with pytest.raises(ValueError, match='is or lies in /, which is read'):
        evaluate.convert_checkpoint('/', tmp_path / 'x', 't5x')


def test_a_file_of_a_checkpoint_of_ours(tmp_path):
    written = evaluate.convert_checkpoint(T5X, tmp_path / 'x', 't5x')
    for name in ('manifest.json', 'config.json'):
        with pytest.raises(ValueError, match=f'it is one file of a checkpoint: name .*{written}$'):
            evaluate.load(written / name)


@pytest.mark.parametrize('name', ['index', 'data-00000-of-00003', 'data-00002-of-00003'])
def test_a_file_of_a_mesh_tf_checkpoint_names_it(name):
    assert evaluate.open_model(MESH_TF / f'model.ckpt-1000000.{name}')[1].emb_dim == 32


@pytest.mark.parametrize(
    'name',
    [
        *('hf/model.safetensors', 'hf/config.json', 'hf/spiece.model'),
        *('mtf/checkpoint', 'mtf/model.ckpt-1000000.index'),
        'mtf/model.ckpt-1000000.data-00001-of-00003',
        *('t5x/checkpoint_6/checkpoint', 't5x/checkpoint_6/vocabulary.model'),
        *(
            f't5x/checkpoint_6/target.encoder.encoder_norm.scale/{file}'
            for file in ('.zarray', '0')
        ),
    ],
)
def test_pointers_of_git_lfs(places, name):
    file = places / name
    content = file.read_bytes() if file.exists() else None
    file.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n')
    try:
        with pytest.raises(ValueError, match=f'{name} is a pointer of git-lfs.*run `git lfs pull`'):
            evaluate.load(places / name.split('/')[0])
        if name.endswith('spiece.model'):
            with pytest.raises(ValueError, match=f'{name} is a pointer of git-lfs'):
                evaluate.load(T5X, vocabulary=places / 'hf')
    finally:
        file.unlink()
        if content is not None:
            file.write_bytes(content)


@pytest.mark.parametrize('form', ['t5x', 'hf'])
@pytest.mark.parametrize(
    'to, words',
    [
        ('text.txt', 'text.txt cannot be written: .*text.txt is a file: name another folder'),
        ('text.txt/x', 'text.txt/x cannot be written: .*text.txt is a file'),
        ('dangling', 'dangling is a link to nothing: remove it'),
        ('loop', 'loop cannot be opened'),
        ('t5x', 't5x is or lies in .*t5x, which is read: name a folder elsewhere'),
        ('t5x/new', 't5x/new is or lies in .*t5x, which is read'),
        ('hf/../t5x/checkpoint_6', 't5x/checkpoint_6 is or lies in'),
        ('hf', 'hf (holds config.json: name a new folder|exists: remove it)'),
        ('mtf', 'mtf (holds checkpoint: name a new folder|exists: remove it)'),
        ('run', "run (is a run's|exists)"),
    ],
)
def test_folders_that_are_not_written_to(places, to, words, form):
    before = sorted(places.rglob('*'))
    with pytest.raises(ValueError, match=words) as error:
        evaluate.convert_checkpoint(places / 't5x', places / to, form)
    assert '\n' not in str(error.value) and sorted(places.rglob('*')) == before


@pytest.mark.parametrize('form', ['t5x', 'hf'])
def test_converting_is_all_or_nothing(tmp_path, form):
    shutil.copytree(T5X, tmp_path / 'from/checkpoint_6')
    chunk = tmp_path / 'from/checkpoint_6/target.token_embedder.embedding/0.0'
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-20])
    for to in ('to', 'new/folders/to'):
        with pytest.raises(ValueError, match='target.token_embedder.embedding'):
            evaluate.convert_checkpoint(tmp_path / 'from', tmp_path / to, form)
        assert os.listdir(tmp_path) == ['from']
    chunk.write_bytes(content)
    written = evaluate.convert_checkpoint(tmp_path / 'from', tmp_path / 'new/folders/to', form)
    assert os.listdir(tmp_path / 'new/folders') == ['to']
    with pytest.raises(ValueError, match=f'{written} exists: remove it or name another folder'):
        evaluate.convert_checkpoint(tmp_path / 'from', tmp_path / 'new/folders/to', form)


def main(*arguments):
    command = [sys.executable, 'main.py', '--mode=convert', *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command(tmp_path):
    relative = os.path.join('tests', '..', os.path.relpath(T5X, ROOT))  # to where it starts
    result = main(f'--from={relative}', f'--to={tmp_path}/x/../hf', '--format=hf')
    assert result.returncode == 0 and result.stdout.strip() == f'{tmp_path}/hf', result.stderr
    assert json.loads((tmp_path / 'hf/config.json').read_text())['d_model'] == 32
    for arguments, words in [
        ([f'--from={T5X}'], 'needs --from=CHECKPOINT and --to=FOLDER'),
        ([f'--from={T5X}', f'--to={tmp_path}/hf', '--format=hf'], 'hf exists'),
        ([f'--from={tmp_path}/nothing', f'--to={tmp_path}/x'], 'name a workdir, a checkpoint'),
        ([f'--from={T5X}', f'--to={tmp_path}/x', '--format=bin'], 'should be one of'),
        ([f'--from={T5X}', '--to=gs://bucket/x'], 'gs://bucket/x: write to a disk'),
        ([f'--from=http://{T5X}', f'--to={tmp_path}/x'], 'gs:// and s3:// are read: download'),
    ]:
        result = main(*arguments)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
        assert words in result.stderr
    assert not (tmp_path / 'x').exists()


@pytest.fixture(scope='module')
def pieces():
    texts = [f'the {i} words of a text, {i * i}' for i in range(500)]
    return data.train_vocabulary(texts, 60)


def test_the_vocabulary_goes_along(tmp_path, pieces, caplog):
    shutil.copytree(HUGGING_FACE, tmp_path / 'hf')
    (tmp_path / 'hf/spiece.model').write_bytes(pieces)
    written = evaluate.convert_checkpoint(tmp_path / 'hf', tmp_path / 'ours', 't5x')
    assert (written / 'vocabulary.model').read_bytes() == pieces
    assert 'vocabulary.model' in json.loads((written / 'manifest.json').read_text())['files']
    t5 = evaluate.load(tmp_path / 'ours')
    assert t5.vocabulary.model == pieces
    shutil.copytree(written, tmp_path / 'alone')
    for path in (written, tmp_path / 'alone', written / 'checkpoint'):
        assert evaluate.find_vocabulary(evaluate.find_checkpoint(path)[0]).model == pieces
    assert evaluate.load(tmp_path / 'alone').vocabulary.model == pieces
    own = {'model': dataclasses.asdict(t5.config), 'data': {'vocabulary': 'bytes'}}
    files = {'config.json': json.dumps(own).encode()}
    checkpoint.save(tmp_path / 'bytes', 6, checkpoint.restore(HUGGING_FACE), files)
    evaluate.convert_checkpoint(tmp_path / 'bytes', tmp_path / 'of bytes', 't5x')
    assert isinstance(evaluate.load(tmp_path / 'of bytes').vocabulary, data.ByteVocabulary)
    assert not caplog.messages
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(ValueError, match='has another vocabulary: name another folder'):
        evaluate.convert_checkpoint(T5X, tmp_path / 'ours', 't5x')
    assert sorted(tmp_path.rglob('*')) == before
    assert isinstance(t5.generate(['some text'], max_length=3)[0], str)


def test_where_a_vocabulary_is_found(tmp_path, pieces):
    """In the checkpoint, else in its run; in any folder that is named."""
    others = {
        name: pieces + b'\x0a\x07\x0a\x05' + name.encode()[:5] for name in 'run__ other'.split()
    }
    folder = shutil.copytree(T5X, tmp_path / 'run/checkpoint_6')
    assert evaluate.find_vocabulary(folder) is None

    def found(path, vocabulary=None):
        return evaluate.find_vocabulary(evaluate.find_checkpoint(path)[0], vocabulary).model

    (tmp_path / 'run/vocabulary.model').write_bytes(others['run__'])
    for path in (folder, folder.parent, folder / 'checkpoint'):
        assert found(path) == others['run__']
    for path in (folder, folder.parent, folder.parent / 'vocabulary.model'):
        assert found(T5X, path) == others['run__']
    for name in ('sentencepiece.model', 'spiece.model', 'vocabulary.model'):  # the last comes first
        (folder / name).write_bytes(others['other'] if name != 'vocabulary.model' else pieces)
        assert found(folder) == (folder / name).read_bytes()
        assert found(T5X, folder) == (folder / name).read_bytes()
    copied = shutil.copytree(HUGGING_FACE, tmp_path / 'run/hf')  # which is not of that run
    assert evaluate.find_vocabulary(copied) is None
    mesh_tf = shutil.copytree(MESH_TF, tmp_path / 'run/mtf')
    (mesh_tf / 'sentencepiece.model').write_bytes(pieces)
    assert found(mesh_tf) == found(mesh_tf / 'model.ckpt-1000000') == pieces
    own = {'model': {}, 'data': {'vocabulary': 'bytes'}}
    (tmp_path / 'of bytes').mkdir()
    (tmp_path / 'of bytes/config.json').write_text(json.dumps(own))
    for name in ('bytes', tmp_path / 'of bytes'):
        assert isinstance(evaluate.find_vocabulary(T5X, name), data.ByteVocabulary)
    with pytest.raises(ValueError, match='no file, nor a folder'):
        evaluate.find_vocabulary(T5X, folder / 'nothing')  # though there is one beside


def test_what_has_no_vocabulary_is_said(tmp_path, caplog):
    for form in ('t5x', 'hf'):
        written = evaluate.convert_checkpoint(T5X, tmp_path / form, form)
        assert caplog.messages == [
            f'{T5X} brings no vocabulary file, so {written} has none: '
            'pass vocabulary=... to load it, or copy spiece.model into it'
        ]
        caplog.clear()


def test_no_vocabulary_for_checkpoints_that_had_none(tmp_path, pieces):
    shutil.copytree(T5X, tmp_path / 'out/checkpoint_6')
    shutil.copytree(HUGGING_FACE, tmp_path / 'hf')
    (tmp_path / 'hf/spiece.model').write_bytes(pieces)
    evaluate.convert_checkpoint(tmp_path / 'hf', tmp_path / 'out', 't5x')
    assert sorted(os.listdir(tmp_path / 'out')) == ['checkpoint_0', 'checkpoint_6']
    assert evaluate.find_vocabulary(tmp_path / 'out/checkpoint_0').model == pieces
    assert evaluate.find_vocabulary(tmp_path / 'out/checkpoint_6') is None
