"""Names on the hub: the real client asks a server of our own on loopback."""

import json
import shutil
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest
import runs
from command_line import ROOT
from corpora import make_config
from huggingface_hub import constants
from safetensors.numpy import load_file
from small_models import assert_refused
from transformers_folders import edit_json

import formats.open
import infer
import sources.open
from formats import write_hugging_face
from formats.vocabulary import named_vocabulary
from modes.convert import convert_checkpoint
from modes.of_checkpoint import with_commits
from paths import source_path

GOLDEN = ROOT / 'tests/golden/hf_t5_1_1'
DEAD = 'http://127.0.0.1:9'
BIN = {'config.json': b'{"model_type": "t5"}', 'pytorch_model.bin': b'x'}


@pytest.fixture(scope='module')
def folder(uninterrupted, tmp_path_factory):
    """A model in a folder of transformers, with a file that is not read."""
    folder = tmp_path_factory.mktemp('hub') / 'tiny'
    convert_checkpoint(uninterrupted, folder, 'hf')
    (folder / 'pytorch_model.bin').write_bytes(b'x')
    return folder


def assert_same_model(name, folder):
    arrays = infer.load(name).arrays
    expected = infer.load(folder).arrays
    assert arrays.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_array_equal(arrays[path], x)


# Models.


def test_processes_with_one_cache(command_line, hub, folder, tmp_path):
    """One of two fetches what is read and continues a broken download; later the cache is enough."""
    hub.add('org/tiny', folder)
    hub.breaks_once.add('model.safetensors')  # which gives the other process a second to come
    environment = {'HF_ENDPOINT': hub.url, 'HF_HOME': str(tmp_path / 'home')}
    flags = ('--mode=convert', '--from=hf://org/tiny', '--format=hf')
    processes = []
    for name in ('a', 'b'):
        processes.append(command_line.start(*flags, f'--to={name}', cwd=tmp_path, **environment))
    results = [process.wait() for process in processes]
    results.append(command_line(*flags, '--to=c', cwd=tmp_path, HF_HUB_OFFLINE='1', **environment))
    for name, result in zip('abc', results, strict=True):
        assert result.status == 0, result.stderr
        for file in ('model.safetensors', 'spiece.model'):
            assert (tmp_path / name / file).read_bytes() == (folder / file).read_bytes()
    assert hub.num_fetched('model.safetensors') == 2  # the second asked for the rest
    assert hub.num_fetched('pytorch_model.bin') == 0


def test_files_that_are_read(home, hub):
    read = ['config.json', 'spiece.model', 'vocab.json', 'merges.txt', 'modules.json']
    read += ['1_Pooling/config.json', '2_Dense/model.safetensors', 'model.safetensors']
    others = ['README.md', 'model.fp16.safetensors', 'onnx/model.onnx', 'flax_model.msgpack']
    hub.add('org/tiny', dict.fromkeys([*read, *others], b'x'))
    folder = source_path('hf://org/tiny')
    files = {str(file.relative_to(folder)) for file in folder.rglob('*') if file.is_file()}
    assert files == set(read)


def test_revisions(home, hub, folder):
    old = hub.add('org/tiny', GOLDEN)
    hub.add('org/tiny', folder, 'refs/pr/12')
    assert_same_model('hf://org/tiny', GOLDEN)
    assert_same_model('hf://org/tiny@refs/pr/12', folder)
    hub.add('org/tiny', folder)
    assert_same_model('hf://org/tiny', folder)
    assert_same_model(f'hf://org/tiny@{old}', GOLDEN)
    num_requests = len(hub.requests)
    assert_same_model(f'hf://org/tiny@main@{old}', GOLDEN)
    assert len(hub.requests) == num_requests  # a commit does not change


def test_the_only_pull_request_with_safetensors(home, hub, folder, monkeypatch, caplog):
    hub.add('org/tiny', BIN)
    hub.add('org/tiny', BIN | {'README.md': b'x'}, 'refs/pr/1')
    hub.add('org/tiny', folder, 'refs/pr/2')
    assert_same_model('hf://org/tiny', folder)
    assert 'refs/pr/2' in caplog.text
    monkeypatch.setattr(constants, 'ENDPOINT', DEAD)
    assert_same_model('hf://org/tiny', folder)
    assert 'out of reach' in caplog.text


def packed(node, name=''):
    """A tree as flax.serialization.to_bytes packs it, arrays above 4,000 bytes in chunks."""
    if isinstance(node, dict):
        return {key: packed(x, key) for key, x in node.items()}
    if node.nbytes > 4000 and name:
        flat = node.reshape(-1)
        chunks = [packed(flat[i : i + 1000]) for i in range(0, flat.size, 1000)]
        numbered = {
            key: {str(i): x for i, x in enumerate(items)}
            for key, items in {'shape': node.shape, 'chunks': chunks}.items()
        }
        return {'__msgpack_chunked_array__': True, **numbered}
    content = (node.shape, node.dtype.name, node.tobytes())
    return msgpack.ExtType(1, msgpack.packb(content))


def write_flax(folder, target):
    """Write the weights of a folder as transformers' Flax models have them."""
    target.mkdir()
    shutil.copy(folder / 'config.json', target)
    tree: dict = {}
    for name, x in load_file(folder / 'model.safetensors').items():
        *modules, last, _ = name.split('.')
        node = tree
        for module in (*modules, last):
            node = node.setdefault(module, {})
        if last in ('shared', 'relative_attention_bias'):
            node['embedding'] = x
        elif 'norm' in last:
            node['weight'] = x
        else:
            node['kernel'] = x.T.copy()
    (target / 'flax_model.msgpack').write_bytes(msgpack.packb(packed(tree)))
    return tree


def test_weights_of_flax(home, hub, tmp_path):
    write_flax(GOLDEN, tmp_path / 'flax')
    hub.add('org/flax', tmp_path / 'flax')
    assert_same_model('hf://org/flax', GOLDEN)
    assert_same_model(tmp_path / 'flax', GOLDEN)
    identity = formats.open.identity(tmp_path / 'flax')
    (tmp_path / 'flax/flax_model.msgpack').write_bytes(b'\x81\xa1')
    assert formats.open.identity(tmp_path / 'flax') != identity
    assert_refused(lambda: infer.load(tmp_path / 'flax'), 'flax_model.msgpack')


@pytest.mark.peers
def test_flax_packs_so(tmp_path, monkeypatch):
    serialization = pytest.importorskip('flax.serialization')
    monkeypatch.setattr(serialization, 'MAX_CHUNK_SIZE', 4000)
    tree = write_flax(GOLDEN, tmp_path / 'flax')
    content = (tmp_path / 'flax/flax_model.msgpack').read_bytes()
    assert serialization.to_bytes(tree) == content


def test_adapters_and_their_base(home, hub, tmp_path):
    shutil.copytree(ROOT / 'tests/golden/peft/rslora', tmp_path / 'adapters')
    edit_json(tmp_path / 'adapters/adapter_config.json', base_model_name_or_path=str(GOLDEN))
    expected = infer.load(tmp_path / 'adapters').arrays
    edit_json(tmp_path / 'adapters/adapter_config.json', base_model_name_or_path='org/base')
    commit = hub.add('org/base', GOLDEN)
    hub.add('org/adapters', tmp_path / 'adapters')
    for name in ('hf://org/adapters', tmp_path / 'adapters'):
        arrays = infer.load(name).arrays
        for path, x in expected.items():
            np.testing.assert_array_equal(arrays[path], x)

    # The base of a run's adapters keeps its name, also in peft's form.
    recorded = formats.open.describe_base(formats.open.open_checkpoint('hf://org/base'))
    assert recorded['directory'] == f'hf://org/base@{commit}'
    prompt = np.ones((2, 16), np.float32)
    config = infer.load('hf://org/base').config
    write_hugging_face.write_peft(tmp_path / 'peft', config, {}, prompt, recorded['directory'])
    settings = json.loads((tmp_path / 'peft/adapter_config.json').read_text())
    assert (settings['base_model_name_or_path'], settings['revision']) == ('org/base', commit)


def test_a_run_keeps_its_revision(home, hub, folder, corpus, tmp_path):
    commit = hub.add('org/tiny', folder)
    commit_of_text = hub.add('datasets/org/text', Path(corpus).parent)

    def config(steps):
        small = runs.small_config('hf://datasets/org/text/*.txt', steps)
        small.restore.path = 'hf://org/tiny'
        small.data.vocabulary = 'hf://org/tiny@main'
        return with_commits(small, str(tmp_path / 'run'))

    runs.run(config(1), tmp_path / 'run')
    hub.add('org/tiny', GOLDEN)
    hub.add('datasets/org/text', {'made_up.txt': b'another text\n' * 99})
    runs.run(config(2), tmp_path / 'run')
    stored = json.loads((tmp_path / 'run/config.json').read_text())
    assert stored['train']['steps'] == 2
    assert stored['restore']['path'] == f'hf://org/tiny@{commit}'
    assert stored['data']['vocabulary'] == f'hf://org/tiny@main@{commit}'
    assert stored['data']['files'] == f'hf://datasets/org/text@{commit_of_text}/*.txt'


def test_a_vocabulary_comes_without_weights(home, hub, folder):
    hub.add('org/tiny', folder)
    ids = named_vocabulary('data.vocabulary', 'hf://org/tiny', 100).encode('a b')
    assert ids == infer.load(folder).vocabulary.encode('a b')
    assert hub.num_fetched('model.safetensors') == 0
    assert_same_model('hf://org/tiny', folder)


@pytest.mark.parametrize(
    'name, text',
    [
        ('hf://org/none', 'not on the hub'),
        ('hf://org/gated', '/org/gated, and put your token into HF_TOKEN'),
        ('hf://org/bin', 'spaces/safetensors/convert'),
        ('hf://org/bin@v2', 'lacks this revision'),
        ('hf://org/pulls', 'refs/pr/3, refs/pr/4'),
        ('hf://org/bin/config.json', 'write hf://ORG/NAME'),
        ('hf://datasets/org/data/x.txt', 'data'),
        ('org/none', 'name hf://org/none'),
    ],
)
def test_a_name_that_does_not_open(home, hub, name, text):
    hub.add('org/bin', BIN)
    hub.add('org/pulls', BIN)
    hub.add('org/pulls', {'model.safetensors': b'x'}, 'refs/pr/3')
    hub.add('org/pulls', {'model.safetensors': b'y'}, 'refs/pr/4')
    hub.add('org/gated', GOLDEN)
    hub.gated.add('org/gated')
    start = time.monotonic()
    assert_refused(lambda: infer.load(name), text)
    assert_refused(lambda: named_vocabulary('data.vocabulary', 'org/none', 0), 'hf://org/none')
    assert time.monotonic() - start < 3


def test_a_token_opens_the_gate(home, hub, monkeypatch):
    hub.add('org/gated', GOLDEN)
    hub.gated.add('org/gated')
    monkeypatch.setenv('HF_TOKEN', 'hf_mine')
    assert_same_model('hf://org/gated', GOLDEN)


def test_out_of_reach(home, monkeypatch):
    monkeypatch.setattr(constants, 'ENDPOINT', DEAD)
    start = time.monotonic()
    assert_refused(lambda: infer.load('hf://org/tiny'), 'out of reach')
    config = make_config(files='hf://datasets/org/data/*.txt')
    assert_refused(lambda: sources.open.open_source(config), 'data.files')
    assert time.monotonic() - start < 3


def test_nothing_is_written_to_the_hub(home, tmp_path):
    for write in (
        lambda: runs.run(runs.small_config('x.txt'), 'hf://org/tiny'),
        lambda: convert_checkpoint(GOLDEN, 'hf://org/tiny', 'hf'),
    ):
        assert_refused(write, 'hf://org/tiny')
