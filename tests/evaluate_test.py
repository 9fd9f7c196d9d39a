"""Every kind of checkpoint opens by one call, computes the originals' numbers, and goes back out.

golden/: made by running T5X, TensorFlow's Saver and transformers; its READMEs say how.
"""

import dataclasses
import json
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
from parity_test import assert_close, features
from parity_test import golden as golden  # a fixture

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
    assert_close(t5.logits(features(arrays, 'batch')), arrays['logits'], 1e-5)
    assert t5.config.mlp_activations == ('gelu', 'linear') and t5.vocabulary is None


def test_hugging_face():
    t5, arrays = evaluate.load(HUGGING_FACE), np.load(HUGGING_FACE / 'golden.npz')
    batch = features(arrays, 'batch')
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
    batch = features(arrays, 'batch')
    inputs, targets = (
        ids_of(batch[f'{name}_tokens']) for name in ('encoder_input', 'decoder_target')
    )
    assert_close(t5.score(inputs, targets), arrays['score_batch'], 1e-5)
    assert_close(t5.score(inputs[:3], targets[:3]), arrays['score_batch'][:3], 1e-5)
    expected = arrays['greedy_decodes']
    found = t5.generate(inputs, max_length=expected.shape[1])
    assert found == [[i for i in row if i > 1] for row in expected.tolist()]


def test_what_cannot_be_asked_is_said_in_words():
    t5 = evaluate.load(T5X)
    for examples, words in [
        (['a text'], 'brings no vocabulary'),
        ('a text', 'no list of texts or of ids'),
        ([], 'no list of texts or of ids'),
        ([[5, 100_000]], 'vocab_size=384 has no such rows'),
    ]:
        with pytest.raises(ValueError, match=words):
            t5.generate(examples)
    with pytest.raises(ValueError, match='1 inputs for 2 targets'):
        t5.score([[5]], [[5], [6]])
    with pytest.raises(ValueError, match="vocabulary='nowhere': no file"):
        evaluate.load(T5X, vocabulary='nowhere')
    text = evaluate.load(T5X, vocabulary='bytes').generate(['hello', 'there'], max_length=4)
    assert len(text) == 2 and all(isinstance(answer, str) for answer in text)


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
    config = model.T5Config(384, emb_dim=24, num_heads=4, head_dim=8, num_encoder_layers=3)
    config = dataclasses.replace(config, num_decoder_layers=3, relpos_bias_per_layer=True)
    config = dataclasses.replace(config, mlp_dim=48, mlp_activations=('gelu', 'linear'))
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
    with pytest.raises(ValueError, match='model.safetensors is one file of a checkpoint: name its folder'):
        evaluate.load(HUGGING_FACE / 'model.safetensors')


def test_half_the_memory():
    t5, whole = evaluate.load(T5X, dtype='bfloat16'), evaluate.load(T5X)
    assert {x.dtype for x in t5.arrays.values()} == {jnp.bfloat16.dtype}
    batch = features(np.load(T5X.parent / 'golden.npz'), 'batch')
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


def main(*arguments):
    command = [sys.executable, 'main.py', '--mode=convert', *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command(tmp_path):
    result = main(f'--from={T5X}', f'--to={tmp_path}/hf', '--format=hf')
    assert result.returncode == 0 and result.stdout.strip() == f'{tmp_path}/hf', result.stderr
    assert json.loads((tmp_path / 'hf/config.json').read_text())['d_model'] == 32
    for arguments, words in [
        ([f'--from={T5X}'], 'needs --from=CHECKPOINT and --to=FOLDER'),
        ([f'--from={T5X}', f'--to={tmp_path}/hf', '--format=hf'], 'hf exists'),
        ([f'--from={tmp_path}/nothing', f'--to={tmp_path}/x'], 'name a workdir, a checkpoint'),
        ([f'--from={T5X}', f'--to={tmp_path}/x', '--format=bin'], 'should be one of'),
        ([f'--from={T5X}', '--to=gs://bucket/x'], 'gs://bucket/x: write to a disk'),
        (['--workdir=gs://bucket/x'], '--workdir=gs://bucket/x: name a folder on a disk'),
        ([f'--from=http://{T5X}', f'--to={tmp_path}/x'], 'gs:// and s3:// are read: download'),
    ]:
        result = main(*arguments)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
        assert words in result.stderr
    assert not (tmp_path / 'x').exists()


def test_the_vocabulary_goes_along(tmp_path):
    pieces = data.train_vocabulary([f'the {i} words of a text, {i * i}' for i in range(500)], 60)
    shutil.copytree(HUGGING_FACE, tmp_path / 'hf')
    (tmp_path / 'hf/spiece.model').write_bytes(pieces)
    evaluate.convert_checkpoint(tmp_path / 'hf', tmp_path / 'ours', 't5x')
    t5 = evaluate.load(tmp_path / 'ours')
    assert t5.vocabulary.model == pieces
    own = {'model': dataclasses.asdict(t5.config), 'data': {'vocabulary': 'bytes'}}
    files = {'config.json': json.dumps(own).encode()}
    checkpoint.save(tmp_path / 'bytes', 6, checkpoint.restore(HUGGING_FACE), files)
    evaluate.convert_checkpoint(tmp_path / 'bytes', tmp_path / 'of bytes', 't5x')
    assert isinstance(evaluate.load(tmp_path / 'of bytes').vocabulary, data.ByteVocabulary)
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(ValueError, match='has another vocabulary: name another folder'):
        evaluate.convert_checkpoint(T5X, tmp_path / 'ours', 't5x')
    assert sorted(tmp_path.rglob('*')) == before
    assert isinstance(t5.generate(['some text'], max_length=3)[0], str)
