"""--pool=mean of folders with modules.json: the vectors of sentence-transformers, and of a plain numpy computation.

golden/sentence_t5.npz: what sentence-transformers 6.2 computes of the folders that `write` makes, written by
PYTHONPATH=tests:tests/formats:. python -c 'import sentence_transformers_test; sentence_transformers_test.write_golden()'.
"""

import json
import pathlib

import numpy as np
import pytest
from corpora import HUNT
from safetensors.numpy import load_file, save_file
from small_models import assert_close, assert_refused, random_params, t5_config
from transformers_folders import SIZES, edit_arrays, edit_json

import infer
from formats import sentence_transformers, write_hugging_face
from modes import infer as infer_mode
from vocabulary import SentencePieceVocabulary

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden/sentence_t5.npz'
TEXTS = [
    'A queen lives here.',
    'rain',
    'In the rains the queen and the ants live in one of the hills.',
]
MAX_LENGTH = 20  # the last text is longer
TORCH = 'torch.nn.modules'
# The modules after the pooling, and the settings of a dense layer.
FOLDERS = {
    'sentence_t5': (
        {'bias': False, 'activation_function': f'{TORCH}.linear.Identity'},
        'Normalize',
    ),
    'tanh': ({'bias': True, 'activation_function': f'{TORCH}.activation.Tanh'},),
    'gtr': ('Normalize',),
}


def write(folder, name):
    """Write an encoder with modules, in the form of Sentence-T5's folder on the hub."""
    vocabulary = SentencePieceVocabulary((HUNT / 'good.model').read_bytes())
    config = t5_config(**SIZES | {'vocab_size': vocabulary.size})
    write_hugging_face.write(folder, config, random_params(config), vocabulary)
    kinds = ['Transformer', 'Pooling']
    for module in FOLDERS[name]:
        kinds.append('Dense' if isinstance(module, dict) else module)
    listed = []
    for i, kind in enumerate(kinds):
        path = f'{i}_{kind}' if i else ''
        listed.append(
            {'idx': i, 'name': str(i), 'path': path, 'type': f'sentence_transformers.models.{kind}'}
        )
        (folder / path).mkdir(exist_ok=True)
    (folder / 'modules.json').write_text(json.dumps(listed))
    settings = {'max_seq_length': MAX_LENGTH, 'do_lower_case': False}
    (folder / 'sentence_bert_config.json').write_text(json.dumps(settings))
    modes = ('cls_token', 'mean_tokens', 'max_tokens', 'mean_sqrt_len_tokens')
    pooling = {f'pooling_mode_{mode}': mode == 'mean_tokens' for mode in modes}
    pooling['word_embedding_dimension'] = config.emb_dim
    (folder / '1_Pooling/config.json').write_text(json.dumps(pooling))
    if 'Dense' in kinds:
        settings = {'in_features': config.emb_dim, 'out_features': 12, **FOLDERS[name][0]}
        (folder / '2_Dense/config.json').write_text(json.dumps(settings))
        save_file(dense_arrays(settings['bias']), folder / '2_Dense/model.safetensors')
    return folder


def dense_arrays(has_bias):
    rng = np.random.default_rng(3)
    arrays = {'linear.weight': rng.standard_normal([12, 16]).astype(np.float32)}
    if has_bias:
        arrays['linear.bias'] = rng.standard_normal(12).astype(np.float32)
    return arrays


def their_vectors(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device='cpu').encode(TEXTS)


def write_golden():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        vectors = {name: their_vectors(write(pathlib.Path(folder, name), name)) for name in FOLDERS}
    np.savez_compressed(GOLDEN, **vectors)


def encode(folder, output, **changes):
    """Return the vectors that --encode --pool=mean writes."""
    file = output.parent / 'texts.txt'
    file.write_text('\n'.join(TEXTS))
    request = {
        'encode': True,
        'pool': 'mean',
        'input': str(file),
        'output_dir': str(output),
        'trim': True,
    }
    request = infer_mode.Request(str(folder), **request | changes)
    infer_mode.infer_all(infer_mode.Job(request, None, {}))
    [file] = output.glob('*.safetensors')
    return load_file(file)['embeddings']


@pytest.mark.parametrize('name', FOLDERS)
def test_vectors_are_those_of_sentence_transformers(tmp_path, monkeypatch, caplog, name):
    """Named by a relative path, as the command line and a call compute them."""
    folder = write(tmp_path / name, name)
    monkeypatch.chdir(tmp_path)
    found = encode(name, tmp_path / 'out')
    assert_close(found, np.load(GOLDEN)[name], 1e-5)
    t5 = infer.load(folder, part='encoder')
    pooling = sentence_transformers.read(folder)
    t5.max_input_length = pooling.max_length
    outputs, mask = t5.encode(TEXTS, trim=True)
    assert_close(pooling(outputs, mask), found, 1e-6)
    assert mask.sum(axis=1).max() == MAX_LENGTH and not caplog.messages
    # With numpy alone.
    expected = (outputs * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    if name != 'gtr':
        arrays = dense_arrays(has_bias=name == 'tanh')
        expected = np.einsum('bd,ed->be', expected, arrays['linear.weight'])
    if name == 'tanh':
        expected = np.tanh(expected + arrays['linear.bias'])
    else:
        expected /= np.sqrt((expected**2).sum(axis=1, keepdims=True))
    assert_close(found, expected, 1e-5)


def test_a_folder_without_modules_says_so(tmp_path, caplog):
    folder = write(tmp_path / 'gtr', 'gtr')
    (folder / 'modules.json').unlink()
    found = encode(folder, tmp_path / 'out')
    outputs, mask = infer.load(folder, part='encoder').encode(TEXTS)
    assert_close(found, sentence_transformers.Pooling()(outputs, mask), 1e-6)
    [message] = caplog.messages
    assert f'{folder} has no modules.json' in message


def test_modules_that_are_refused(tmp_path):
    """Before anything is written; --pool=none needs no modules."""
    folder = write(tmp_path / 'sentence_t5', 'sentence_t5')
    output = tmp_path / 'out'
    assert_refused(lambda: encode(folder, output, trim=False), 'data.lengths.inputs=20')
    changes = [
        ('sentence_bert_config.json', {'do_lower_case': True}, 'do_lower_case=True'),
        ('1_Pooling/config.json', {'pooling_mode_cls_token': True}, 'pooling_mode_cls_token'),
        ('1_Pooling/config.json', {'pooling_mode': 'max'}, 'pooling_mode=max'),
        ('2_Dense/config.json', {'activation_function': 'mine.Swish'}, 'activation_function=Swish'),
        ('2_Dense/config.json', {'use_residual': True}, 'use_residual=True'),
    ]
    for name, change, said in changes:
        content = (folder / name).read_bytes()
        edit_json(folder / name, **change)
        assert_refused(lambda: encode(folder, output), said)
        (folder / name).write_bytes(content)
    modules = json.loads((folder / 'modules.json').read_text())
    modules[3]['type'] = 'sentence_transformers.models.LayerNorm'
    (folder / 'modules.json').write_text(json.dumps(modules))
    assert_refused(lambda: encode(folder, output), 'LayerNorm')
    (folder / 'modules.json').write_text('[')
    assert_refused(lambda: encode(folder, output), 'modules.json')
    (folder / '2_Dense/model.safetensors').rename(folder / '2_Dense/pytorch_model.bin')
    del modules[3]
    (folder / 'modules.json').write_text(json.dumps(modules))
    assert_refused(lambda: encode(folder, output), '2_Dense has no model.safetensors')
    assert not output.exists()
    encode(folder, output, pool='none')


def test_vectors_of_other_modules_are_not_mixed(tmp_path):
    folder = write(tmp_path / 'sentence_t5', 'sentence_t5')
    encode(folder, tmp_path / 'out')
    edit_arrays(folder / '2_Dense/model.safetensors', linear__weight=np.ones([12, 16], np.float32))
    assert_refused(lambda: encode(folder, tmp_path / 'out'), 'checkpoint')


@pytest.mark.peers
@pytest.mark.parametrize('name', FOLDERS)
def test_folders_that_sentence_transformers_writes(tmp_path, name):
    """They hold the encoder alone, and name modules and settings in the form of its version."""
    library = pytest.importorskip('sentence_transformers')
    theirs = library.SentenceTransformer(str(write(tmp_path / 'first', name)), device='cpu')
    theirs.save_pretrained(str(tmp_path / 'saved'))
    found = encode(tmp_path / 'saved', tmp_path / 'out')
    assert_close(found, theirs.encode(TEXTS), 1e-5)
