"""Every kind of checkpoint opens by one call, and goes back out bit for bit.

golden/: made by running T5X, TensorFlow's Saver and transformers; its READMEs say how.
"""

import json
import os
import pathlib
import re
import shutil
from functools import partial

import chex
import msgpack
import numpy as np
import pytest
from command_line import CommandLine
from forms import first_quick
from permissions import full_disk
from runs import small_config
from sentencepiece import sentencepiece_model_pb2
from small_models import ONE_GOLDEN_MODEL, assert_refused, t5_config

import checkpoint
import formats.open
import infer
import model
import partition
import prepare
import vocabulary as vocabularies
from formats import hugging_face, own_model, t5x
from formats.vocabulary import find_vocabulary
from modes import convert
from modes.errors import one_line
from run import verify
from run.train_vocabulary import train_vocabulary

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / 'tests/golden'
MESH_TF = GOLDEN / 'mtf_t5_1_1'
HUGGING_FACE = GOLDEN / 'hf_t5_1_1'
T5X = GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6'


def inline_array(x):
    """`x` as T5X's index has it where it has no axes: in msgpack's extension 1."""
    return msgpack.ExtType(1, msgpack.packb((x.shape, x.dtype.name, x.tobytes())))


def write_inline(directory, tree):
    """Write an index file of T5X that holds all arrays of the flat `tree`."""
    leaves = {path: inline_array(x) for path, x in tree.items()}
    content = {'version': 3, 'optimizer': checkpoint.unflatten(leaves)}
    directory.mkdir(exist_ok=True)
    (directory / 'checkpoint').write_bytes(msgpack.packb(content))


def stack_layers(params, config):
    """Return T5X's scalable_t5 tree of umT5 (t5x/examples/scalable_t5): layers on axis 1, heads apart."""
    stacked = {}
    for path, x in params.items():
        first_layer = re.fullmatch(r'(encoder|decoder)/layers_0/(.+)', path)
        if first_layer:
            stack, name = first_layer.groups()
            layers = []
            for i in range(config.num_encoder_layers):
                layer = params[f'{stack}/layers_{i}/{name}']
                if re.search('(query|key|value)/kernel', path):
                    layer = layer.reshape(config.emb_dim, config.num_heads, -1)
                elif path.endswith('out/kernel'):
                    layer = layer.reshape(config.num_heads, -1, config.emb_dim)
                layers.append(layer)
            stacked[f'{stack}/{stack}/{name}'] = np.stack(layers, axis=1)
        elif '/layers_' not in path:
            stacked[path] = x
    return stacked


@pytest.mark.slow
@pytest.mark.parametrize('inline', [False, True])
def test_stacked_layers_of_umt5(tmp_path, inline, monkeypatch):
    sizes = {'vocab_size': 384, 'emb_dim': 24, 'num_heads': 4, 'head_dim': 8, 'mlp_dim': 48}
    sizes |= {
        'num_encoder_layers': 3,
        'num_decoder_layers': 3,
        'mlp_activations': ('gelu', 'linear'),
    }
    config = t5_config(**sizes, dtype='float32', dropout_rate=0.1, relpos_bias_per_layer=True)
    rng = np.random.default_rng(0)
    params = {}
    for path, shape in model.shapes(config).items():
        params[path] = rng.standard_normal(shape).astype(np.float32)
    stacked = stack_layers(params, config)
    assert stacked['decoder/decoder/self_attention/out/kernel'].shape == (4, 3, 8, 24)
    assert stacked['encoder/encoder/relpos_bias/rel_embedding'].shape == (4, 3, 32)
    assert stacked['encoder/encoder/mlp/wo/kernel'].shape == (48, 3, 24)
    assert stacked['decoder/decoder/pre_mlp_layer_norm/scale'].shape == (24, 3)
    tree = {f'target/{path}': x for path, x in stacked.items()} | {'state/step': np.array(9, 'i4')}
    tree['state/param_states/encoder/encoder/mlp/wo/kernel/v_row'] = np.ones([24, 3], np.float32)
    if inline:
        directory = tmp_path / 'checkpoint_9'
        write_inline(directory, tree)
    else:
        directory = checkpoint.save(tmp_path, 9, tree)
    reads = []
    read = checkpoint.ZarrEntry.read
    monkeypatch.setattr(checkpoint.ZarrEntry, 'read', lambda x: reads.append(x) or read(x))
    restored = checkpoint.restore(formats.open.open_checkpoint(directory, part='').leaves)
    assert restored.pop('state/step') == 9
    chex.assert_trees_all_equal(restored, {f'target/{path}': x for path, x in params.items()})
    num_stacks = sum(path.startswith(('encoder/encoder/', 'decoder/decoder/')) for path in stacked)
    assert len(reads) == (0 if inline else num_stacks)  # each once
    opened = formats.open.open_model(directory)
    assert opened.config == config
    t5 = infer.load(directory, mesh=partition.make_mesh(data=2, model=2))
    assert t5.config == config
    chex.assert_trees_all_equal(t5.arrays, params)
    del reads[:]
    convert.convert_checkpoint(directory, tmp_path / 'hf', 'hf')
    convert.convert_checkpoint(directory, tmp_path / 'apart', 't5x')
    assert len(reads) in (0, 2 * (num_stacks + 4))  # and what is not stacked
    assert json.loads((tmp_path / 'hf/config.json').read_text())['model_type'] == 'umt5'
    written = checkpoint.restore(formats.open.open_checkpoint(tmp_path / 'hf', part='').leaves)
    chex.assert_trees_all_equal(written, {f'target/{path}': x for path, x in params.items()})


# What is no T5 in T5X's layout.


def test_shapes_that_are_no_t5(tmp_path):
    sizes = {'emb_dim': 6, 'num_heads': 2, 'head_dim': 3}
    expected = model.shapes(t5_config(**sizes, num_encoder_layers=1, num_decoder_layers=1))
    for path in ('token_embedder/embedding', 'encoder/layers_0/attention/out/kernel'):
        for shape in (None, (), (8,), (8, 6, 2)):
            shapes = {**expected, path: shape}
            if shape is None:
                del shapes[path]
            assert_refused(partial(formats.open.config_from_shapes, tmp_path, shapes), path)


def test_compare():
    model = {'target/a': (2, 3), 'target/b': (4,), 'target/c': ()}
    formats.open.compare(model, dict(reversed(model.items())))
    other = {'target/a': (3, 2), 'target/b': (4,), 'target/d': (1,)}
    for name in ('target/a', 'target/c', 'target/d'):
        assert_refused(lambda: formats.open.compare(model, other), name)


def test_a_file_alone(tmp_path):
    """T5X's index with all arrays in it, whatever its name; and the index of a folder."""
    write_inline(tmp_path, checkpoint.restore(T5X))
    (tmp_path / 'checkpoint').rename(tmp_path / 'test_t5_tiny.checkpoint_0')
    expected = infer.load(T5X).arrays
    for path in (tmp_path / 'test_t5_tiny.checkpoint_0', T5X / 'checkpoint'):
        chex.assert_trees_all_equal(infer.load(path).arrays, expected)
    assert infer.load(MESH_TF / 'checkpoint').config.emb_dim == 32


def restore(path):
    return checkpoint.restore(formats.open.open_checkpoint(path, part='').leaves)


def assert_same_bits(found, expected):
    """Two trees of numpy arrays, dtypes included."""
    chex.assert_trees_all_equal(found, expected, strict=True)


@ONE_GOLDEN_MODEL
def test_t5x_to_ours_to_t5x(golden, tmp_path):
    expected = restore(golden / 'checkpoint_6')
    first = convert.convert_checkpoint(golden / 'checkpoint_6', tmp_path / 'a', 't5x')
    assert first.name == 'checkpoint_6'
    assert verify.verify(first)
    assert_same_bits(restore(first), expected)
    second = convert.convert_checkpoint(tmp_path / 'a', tmp_path / 'b', 't5x')
    assert_same_bits(restore(second), expected)


@pytest.mark.parametrize(
    'source', first_quick([T5X, MESH_TF, HUGGING_FACE]), ids=lambda path: path.name
)
def test_through_hugging_face_and_back(source, tmp_path):
    convert.convert_checkpoint(source, tmp_path / 'hf', 'hf')
    assert hugging_face.is_folder(tmp_path / 'hf')
    convert.convert_checkpoint(tmp_path / 'hf', tmp_path / 'back', 't5x')
    expected = checkpoint.parameters(restore(source))
    assert_same_bits(checkpoint.parameters(restore(tmp_path / 'hf')), expected)
    back = restore(next((tmp_path / 'back').glob('checkpoint_*')))
    assert_same_bits(checkpoint.parameters(back), expected)
    assert back['state/step'] == 0  # Hugging Face keeps none
    of_hugging_face = formats.open.open_model(tmp_path / 'hf').config
    assert of_hugging_face == formats.open.open_model(tmp_path / 'back').config


SOURCES = {
    'T5X': T5X,
    'T5X workdir': T5X.parent,
    'Mesh-TF folder': MESH_TF,
    'Mesh-TF prefix': MESH_TF / 'model.ckpt-1000000',
    'Hugging Face': HUGGING_FACE,
}
ODD = "a b, größe 文 #?%&'[]"


def some_arrays(path):
    """{path: array} of a few parameters, as `load` finds them."""
    leaves = formats.open.open_checkpoint(path).leaves
    names = (
        'token_embedder/embedding',
        'decoder/layers_1/mlp/wo/kernel',
        'encoder/encoder_norm/scale',
    )
    return checkpoint.restore({f'target/{name}': leaves[f'target/{name}'] for name in names})


@pytest.mark.parametrize('source', first_quick(SOURCES, 2))
def test_every_form_of_a_path(source, tmp_path, monkeypatch):
    """Relative, through a link, in a folder with an odd name; of what is read and of what is written."""
    expected = some_arrays(SOURCES[source])
    folder = MESH_TF if source == 'Mesh-TF prefix' else SOURCES[source]
    name = os.path.relpath(SOURCES[source], folder.parent)
    here = tmp_path / ODD / 'here'
    (here / 'sub').mkdir(parents=True)
    shutil.copytree(folder, here / folder.name)
    (here / 'linked').symlink_to(folder.name)
    monkeypatch.chdir(here)
    linked = name.replace(folder.name, 'linked', 1)
    for path in (os.path.relpath(SOURCES[source]), f'../here/sub/../{name}', linked):
        chex.assert_trees_all_equal(some_arrays(path), expected)
    for form, to in [('t5x', 'sub/../out'), ('hf', f'new/{ODD}')]:
        written = convert.convert_checkpoint(name, to, form)
        assert written.is_relative_to(here) and '..' not in written.parts
        chex.assert_trees_all_equal(some_arrays(to), expected)


@pytest.fixture(scope='module')
def places(tmp_path_factory):
    """What users name by mistake."""
    folder = tmp_path_factory.mktemp('places')
    shutil.copytree(T5X, folder / 't5x/checkpoint_6')
    shutil.copytree(HUGGING_FACE, folder / 'hf')
    shutil.copytree(MESH_TF, folder / 'mtf')
    for name, content in {
        'longt5/config.json': '{"model_type": "longt5"}',
        'no weights/config.json': '{"model_type": "t5"}',
        'mtf lost/checkpoint': 'model_checkpoint_path: "model.ckpt-0"\n',
        'torch/config.json': '{"model_type": "umt5"}',
        'torch/pytorch_model.bin': '',
        'tf/tf_model.h5': '',
        'run/lock': '',
        'run/config.json': '{"model": {}}',
        'other/config.json': '{}',
        'peft/adapter_config.json': '{}',
        'q8.gguf': 'GGUF',
        't5.pth': 'PK',
    }.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(content)
    (folder / 'dangling').symlink_to('nothing')
    return folder


NO_CHECKPOINTS = [
    ('dangling', 'dangling'),
    ('other', 'config.json'),
    ('run', 'run'),
    ('longt5', 'longt5'),
    ('no weights', 'no weights'),
    ('tf', 'tf_model.h5'),
    ('torch/pytorch_model.bin', 'pytorch_model.bin'),
    ('peft', 'peft/adapter_config.json: peft_type=None'),
    ('q8.gguf', 'q8.gguf'),
    ('t5.pth', 't5.pth'),
    ('hf/model.safetensors', 'hf'),
    ('hf/config.json', 'hf'),
    ('t5x/checkpoint_6/target.token_embedder.embedding', '.zarray, 0.0'),
    ('t5x/checkpoint_6/README', 'README'),
    ('mtf lost', 'model.ckpt-0.index'),
]


def test_what_is_no_checkpoint(places):
    for name, named in NO_CHECKPOINTS:
        assert_refused(lambda name=name: formats.open.open_model(places / name), named)


# A checkpoint's place, its format, and whether it is taken for a LongT5.
FAMILIES = {
    'a/LongT5-Local-Base/b/checkpoint_6': (T5X, True),
    'long_t5x_runs/checkpoint_6': (T5X, False),
    'long_t5': (MESH_TF, True),
    'models--google--long-t5-local-base/snapshots/1': (HUGGING_FACE, True),
    'mLongT5.large': (HUGGING_FACE, True),
}


@pytest.mark.parametrize('import_line', ["include 'longt5/models/longt5_base.gin'", '# no longt5'])
def test_a_gin_file_that_names_another_family(tmp_path, import_line):
    folder = tmp_path / 'run/checkpoint_6'
    shutil.copytree(T5X, folder)
    (tmp_path / 'run/config.gin').write_text(import_line)
    if import_line.startswith('#'):
        formats.open.open_model(folder)
    else:
        assert_refused(lambda: formats.open.open_model(folder), 'config.gin')


@pytest.mark.parametrize('place', first_quick(FAMILIES, 2))
def test_a_path_that_names_another_family(tmp_path, place, monkeypatch, corpus):
    source, is_long = FAMILIES[place]
    folder = tmp_path / place
    shutil.copytree(source, folder)
    (tmp_path / 'link').symlink_to(folder)
    monkeypatch.chdir(folder.parent)
    for path in (folder, f'{folder}/', folder.name, tmp_path / 'link'):
        if not is_long:
            formats.open.open_model(path)
            continue
        assert_refused(partial(formats.open.open_model, path), 'model.module=long_t5')
    if is_long:
        config = small_config(corpus)
        config.data.vocabulary = 'bytes'
        config.restore.path = str(folder)
        for ask in (
            lambda: convert.convert_checkpoint(folder, tmp_path / 'out', 't5x'),
            lambda: prepare.prepare(config, tmp_path / 'run'),
        ):
            assert_refused(ask, 'model.module=long_t5')
    assert not (tmp_path / 'out').exists()


def test_folders_of_results_may_have_any_name(tmp_path):
    """Those that are written to, and checkpoints of this program, whose config says what they are."""
    convert.convert_checkpoint(T5X, tmp_path / 'longt5/out', 't5x')
    convert.convert_checkpoint(tmp_path / 'longt5/out', tmp_path / 'long-t5/hf', 'hf')


def test_single_files_of_checkpoints(tmp_path):
    """One file of Mesh-TF's names its checkpoint, one of ours does not."""
    written = convert.convert_checkpoint(T5X, tmp_path / 'x', 't5x')
    for name in ('manifest.json', 'config.json'):
        assert_refused(lambda name=name: infer.load(written / name), str(written))
    file = MESH_TF / 'model.ckpt-1000000.data-00002-of-00003'
    assert formats.open.open_model(file).config.emb_dim == 32


POINTERS = [
    'hf/model.safetensors',
    'hf/config.json',
    'hf/spiece.model',
    'mtf/checkpoint',
    'mtf/model.ckpt-1000000.index',
    'mtf/model.ckpt-1000000.data-00001-of-00003',
    't5x/checkpoint_6/checkpoint',
    't5x/checkpoint_6/vocabulary.model',
    't5x/checkpoint_6/target.encoder.encoder_norm.scale/.zarray',
    't5x/checkpoint_6/target.encoder.encoder_norm.scale/0',
]


def test_pointers_of_git_lfs(tmp_path, places):
    shutil.copytree(places, tmp_path / 'places', symlinks=True)
    for name in POINTERS:
        file = tmp_path / 'places' / name
        content = file.read_bytes() if file.exists() else None
        file.write_text('version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n')
        folder = tmp_path / 'places' / name.split('/')[0]
        assert_refused(partial(infer.load, folder), name)
        if name.endswith('spiece.model'):
            assert_refused(lambda folder=folder: infer.load(T5X, vocabulary=folder), name)
        file.unlink()
        if content is not None:
            file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize('form', ['t5x', 'hf'])
def test_converting_is_all_or_nothing(tmp_path, form):
    shutil.copytree(T5X, tmp_path / 'from/checkpoint_6')
    chunk = tmp_path / 'from/checkpoint_6/target.token_embedder.embedding/0.0'
    content = chunk.read_bytes()
    chunk.write_bytes(content[:-20])
    to = tmp_path / 'new/folders/to'
    convert_it = lambda: convert.convert_checkpoint(tmp_path / 'from', to, form)  # noqa: E731
    assert_refused(convert_it, 'target.token_embedder.embedding')
    assert os.listdir(tmp_path) == ['from']
    chunk.write_bytes(content)
    written = convert_it()
    assert os.listdir(tmp_path / 'new/folders') == ['to']
    assert_refused(convert_it, str(written))


@pytest.mark.parametrize('form', ['t5x', 'hf'])
def test_a_full_disk(tmp_path, form):
    """The error names the folder that the user gave, not the unfinished one."""
    with full_disk(1000), pytest.raises(OSError) as refused:
        convert.convert_checkpoint(T5X, tmp_path / 'new/out', form)
    message = one_line(refused.value)
    assert f'{tmp_path}/new/out' in message and 'tmp-' not in message and len(message) < 300
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope='module')
def main(tmp_path_factory):
    command_line = CommandLine(tmp_path_factory.mktemp('command'))
    yield lambda *arguments: command_line('--mode=convert', *arguments)
    command_line.close()


@pytest.mark.slow
def test_the_command(main, tmp_path):
    relative = os.path.join('tests', '..', os.path.relpath(T5X, ROOT))  # to where it starts
    result = main(f'--from={relative}', f'--to={tmp_path}/x/../hf', '--format=hf')
    assert result.status == 0, result.stderr
    assert result.stdout.strip() == f'{tmp_path}/hf'
    assert json.loads((tmp_path / 'hf/config.json').read_text())['d_model'] == 32


@pytest.fixture(scope='module')
def pieces():
    texts = [f'the {i} words of a text, {i * i}' for i in range(500)]
    return train_vocabulary(texts, 60)


def test_the_vocabulary_goes_along(tmp_path, pieces, caplog):
    shutil.copytree(HUGGING_FACE, tmp_path / 'hf')
    (tmp_path / 'hf/spiece.model').write_bytes(pieces)
    written = convert.convert_checkpoint(tmp_path / 'hf', tmp_path / 'ours', 't5x')
    assert (written / 'vocabulary.model').read_bytes() == pieces
    assert 'vocabulary.model' in json.loads((written / 'manifest.json').read_text())['files']
    t5 = infer.load(tmp_path / 'ours')
    assert t5.vocabulary.model == pieces
    shutil.copytree(written, tmp_path / 'alone')
    for path in (written, tmp_path / 'alone', written / 'checkpoint'):
        directory = formats.open.open_checkpoint(path).directory
        assert find_vocabulary(directory).model == pieces
    assert infer.load(tmp_path / 'alone').vocabulary.model == pieces
    own = {'model': own_model.as_settings(t5.config), 'data': {'vocabulary': 'bytes'}}
    files = {'config.json': json.dumps(own).encode()}
    checkpoint.save(tmp_path / 'bytes', 6, restore(HUGGING_FACE), files)
    convert.convert_checkpoint(tmp_path / 'bytes', tmp_path / 'of bytes', 't5x')
    assert isinstance(infer.load(tmp_path / 'of bytes').vocabulary, vocabularies.ByteVocabulary)
    assert not caplog.messages
    before = sorted(tmp_path.rglob('*'))
    ours = str(tmp_path / 'ours')
    assert_refused(lambda: convert.convert_checkpoint(T5X, ours, 't5x'), ours)
    assert sorted(tmp_path.rglob('*')) == before


@pytest.mark.parametrize('num_own, extra_ids', first_quick([(0, 7), (0, 0), (5, 7)]))
def test_the_number_of_sentinels_goes_along(tmp_path, num_own, extra_ids):
    own = ' '.join(f'<extra_id_{i}>' for i in range(num_own))
    model = train_vocabulary([f'the {i} words of a text, {i * i}' for i in range(500)], 60)
    if own:
        proto = sentencepiece_model_pb2.ModelProto.FromString(model)
        for piece in own.split():
            proto.pieces.add(piece=f'▁{piece}', type=proto.SentencePiece.USER_DEFINED)
        model = proto.SerializeToString()
    settings = {
        'model': own_model.as_settings(infer.load(HUGGING_FACE).config),
        'data': {'extra_ids': extra_ids},
    }
    files = {'config.json': json.dumps(settings).encode(), 'vocabulary.model': model}
    checkpoint.save(tmp_path / 'run', 6, restore(HUGGING_FACE), files)
    expected = infer.load(tmp_path / 'run').vocabulary
    assert expected.num_extra_ids == (num_own or extra_ids)
    convert.convert_checkpoint(tmp_path / 'run', tmp_path / 'hf', 'hf')
    convert.convert_checkpoint(tmp_path / 'hf', tmp_path / 'ours', 't5x')
    for folder in ('hf', 'ours'):
        assert infer.load(tmp_path / folder).vocabulary.hash == expected.hash
    tokenizer = json.loads((tmp_path / 'hf/tokenizer_config.json').read_text())
    assert tokenizer['extra_ids'] == (0 if num_own else extra_ids)


def test_where_a_vocabulary_is_found(tmp_path, pieces):
    """In the checkpoint, else in its run; in any folder that is named."""
    others = {name: pieces + b'\x0a\x07\x0a\x05' + name.encode() for name in ('run__', 'other')}
    folder = shutil.copytree(T5X, tmp_path / 'run/checkpoint_6')
    assert find_vocabulary(folder) is None

    def found(path, vocabulary=None):
        return find_vocabulary(formats.open.open_checkpoint(path).directory, vocabulary).model

    (tmp_path / 'run/vocabulary.model').write_bytes(others['run__'])
    for path in (folder, folder.parent, folder / 'checkpoint'):
        assert found(path) == others['run__']
    for path in (folder, folder.parent, folder.parent / 'vocabulary.model'):
        assert found(T5X, path) == others['run__']
    for name in ('sentencepiece.model', 'spiece.model', 'vocabulary.model'):  # the last comes first
        (folder / name).write_bytes(others['other'] if name != 'vocabulary.model' else pieces)
        assert found(folder) == (folder / name).read_bytes()
        assert found(T5X, folder) == (folder / name).read_bytes()
    copied = shutil.copytree(HUGGING_FACE, tmp_path / 'run/hf')  # it is not of that run
    assert find_vocabulary(copied) is None
    mesh_tf = shutil.copytree(MESH_TF, tmp_path / 'run/mtf')
    (mesh_tf / 'sentencepiece.model').write_bytes(pieces)
    assert found(mesh_tf) == found(mesh_tf / 'model.ckpt-1000000') == pieces
    own = {'model': {}, 'data': {'vocabulary': 'bytes'}}
    (tmp_path / 'of bytes').mkdir()
    (tmp_path / 'of bytes/config.json').write_text(json.dumps(own))
    for name in ('bytes', tmp_path / 'of bytes'):
        assert isinstance(find_vocabulary(T5X, name), vocabularies.ByteVocabulary)
    nothing = folder / 'nothing'  # though there is one beside
    assert_refused(lambda: find_vocabulary(T5X, nothing), f'{nothing}')


def test_added_tokens_without_ids_are_refused(tmp_path):
    folder = shutil.copytree(HUGGING_FACE, tmp_path / 'hf')
    shutil.copy(GOLDEN / 'hunt/good.model', folder / 'spiece.model')
    content = json.dumps({'additional_special_tokens': ['<mark>']})
    (folder / 'tokenizer_config.json').write_text(content)
    assert_refused(lambda: infer.load(folder), "'<mark>'")
    assert_refused(lambda: convert.convert_checkpoint(folder, tmp_path / 'out', 't5x'), "'<mark>'")
    assert not (tmp_path / 'out').exists()


def test_what_is_assumed_or_missing_is_said(tmp_path, caplog):
    """The activation of a gated MLP without a config, and the vocabulary."""
    for form in ('t5x', 'hf'):
        written = convert.convert_checkpoint(T5X, tmp_path / form, form)
        activation, vocabulary = caplog.messages
        assert str(T5X) in activation and "mlp_activations=('gelu', 'linear')" in activation
        assert str(T5X) in vocabulary and str(written) in vocabulary
        caplog.clear()
        infer.load(written)
        infer.load(T5X, config=infer.load(written).config)
        infer.load(HUGGING_FACE)
        assert not caplog.messages


def test_no_vocabulary_for_checkpoints_that_had_none(tmp_path, pieces):
    shutil.copytree(T5X, tmp_path / 'out/checkpoint_6')
    shutil.copytree(HUGGING_FACE, tmp_path / 'hf')
    (tmp_path / 'hf/spiece.model').write_bytes(pieces)
    convert.convert_checkpoint(tmp_path / 'hf', tmp_path / 'out', 't5x')
    assert sorted(os.listdir(tmp_path / 'out')) == ['checkpoint_0', 'checkpoint_6']
    assert find_vocabulary(tmp_path / 'out/checkpoint_0').model == pieces
    assert find_vocabulary(tmp_path / 'out/checkpoint_6') is None


def test_an_average_belongs_to_its_parameter():
    tree = {'target/a/b': 1, 'state/param_states/a/b/ema_params': 2, 'state/param_states/a/b/v': 3}
    expected = {'state/param_states/a/b/ema_params': 'target/a/b'}
    assert t5x.average_paths(tree | {'state/param_states/c/ema_params': 4}) == expected
