"""A new run starts from a checkpoint: whole or in part, of any format, on any mesh."""

import json
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from runs import ROOT, metrics_of, run, small_config, state_of
from sentencepiece import sentencepiece_model_pb2

import checkpoint
import formats.open
import model
import state_names
from formats import own_model
from messages import Refused
from modes.of_checkpoint import ONLY_STRICT, SIZES, with_restored_sizes
from prepare import make_spec, prepare, restore, wanted
from run.start import choose, choose_initial

GOLDEN = ROOT / 'tests/golden'
T5X = GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6'  # after six steps, with Adafactor's slots
MESH_TF = GOLDEN / 'mtf_t5_1_1'  # after 1,000,000, weights in bfloat16
HUGGING_FACE = GOLDEN / 'hf_t5_1_1'  # parameters alone


def small_config_from(path, corpus, steps=8, **restore):
    """Of the size of the fixture `uninterrupted`, whose compiled functions it shares."""
    config = small_config(corpus, steps)
    config.restore.update(path=str(path), **restore)
    return config


def tiny_config(path, corpus, steps=8, vocabulary='bytes', **restore):
    """Of the golden models' sizes."""
    config = small_config_from(path, corpus, steps, **restore)
    sizes = dict(vocab_size=384, emb_dim=32, num_heads=4, head_dim=8, mlp_dim=64)
    config.model.update(**sizes, num_encoder_layers=2, num_decoder_layers=2)
    config.data.vocabulary = vocabulary
    return config


def start(config):
    """The state with which a run begins, as a checkpoint would have it, and what the run says of it."""
    spec = make_spec(config)
    begin = choose_initial(wanted(spec), config.restore, config.data)
    state = restore(spec, begin.leaves, config.restore.dtype)
    return jax.device_get(state_names.to_t5x(*state)), begin.description


def initial(config):
    config.restore.path = ''
    return start(config)[0]


def assert_equal(found, expected, paths=None):
    for path in expected if paths is None else paths:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)


def is_parameter(path):
    return path.startswith('target/')


@pytest.mark.parametrize('mesh_shape', [(1, 1, 1), (1, 2, 2)])
def test_everything_of_T5X(corpus, mesh_shape):
    config = tiny_config(T5X, corpus)
    config.mesh.data, config.mesh.fsdp, config.mesh.model = mesh_shape
    expected = checkpoint.restore(T5X)
    found, description = start(config)
    assert found.keys() == expected.keys() and found['state/step'] == 6
    assert_equal(found, expected)
    assert description == f'From step 6 of {T5X}, with the optimizer state'


def test_everything_of_mesh_tf(corpus):
    arrays = np.load(MESH_TF / 'golden.npz')
    found, _ = start(tiny_config(MESH_TF, corpus, 1_000_001))
    names = [name for name in arrays if name.startswith('imported/')]
    assert len(names) == len(found)
    for name in names:
        x = found[name.removeprefix('imported/')]
        np.testing.assert_array_equal(x, arrays[name].astype(x.dtype), err_msg=name)


def test_hugging_face_has_parameters_alone(corpus):
    found, description = start(tiny_config(HUGGING_FACE, corpus))
    expected = checkpoint.restore(formats.open.open_checkpoint(HUGGING_FACE).leaves)
    assert_equal(found, expected)
    assert description == f'From step 0 of {HUGGING_FACE}, without any optimizer state'
    rest = found.keys() - expected.keys()
    assert 'state/step' in rest and not any(found[path].any() for path in rest)


def test_parameters_alone(corpus, uninterrupted):
    """The pattern takes no more. The rest is as in any new run."""
    path = uninterrupted / 'checkpoint_6'
    config = small_config_from(path, corpus, only='target/.*')
    found, description = start(config)
    expected = checkpoint.restore(path)
    assert_equal(found, expected, filter(is_parameter, expected))
    assert description == f'From step 0 of {path}, without any optimizer state'
    fresh = initial(config)
    assert_equal(found, fresh, [name for name in fresh if not is_parameter(name)])
    table = 'target/token_embedder/embedding'
    assert (fresh[table] != found[table]).any()


@pytest.mark.slow
def test_another_vocabulary_size(corpus, uninterrupted, tmp_path):
    config = small_config_from(uninterrupted, corpus)
    config.model.vocab_size = 256  # a larger one gets new rows: added_tokens_test.py
    with pytest.raises(Refused, match='restore.only') as error:
        prepare(config, tmp_path / 'run')
    for name in ('target/token_embedder/embedding', 'target/decoder/logits_dense/kernel'):
        assert name in str(error.value)
    assert [file.name for file in (tmp_path / 'run').iterdir()] == ['lock']
    config.restore.only = '(?!.*(embedding|logits_dense)).*'
    found, _ = start(config)
    expected = state_of(uninterrupted, 6)
    taken = [path for path in expected if not re.search('embedding|logits_dense', path)]
    assert_equal(found, expected, taken)
    fresh = initial(config)
    assert_equal(found, fresh, fresh.keys() - taken)
    assert found['target/token_embedder/embedding'].shape == (256, 16)


@pytest.mark.parametrize(
    'depth, label', [(1, 'not used'), pytest.param(3, 'initial', marks=pytest.mark.slow)]
)
def test_another_depth_where_it_is_not_strict(corpus, depth, label):
    """What is missing and what is too much is left as it is, and listed."""
    config = tiny_config(T5X, corpus, strict=False)
    config.model.num_decoder_layers = depth
    found, description = start(config)
    expected = checkpoint.restore(T5X)
    layer = f'target/decoder/layers_{min(depth, 2)}'
    assert f'{label}: {layer}/encoder_decoder_attention/key/kernel' in description, description
    assert description.endswith(' and 4 more')
    assert_equal(found, expected, found.keys() & expected.keys())
    missing = found.keys() - expected.keys()
    assert bool(missing) == (label == 'initial')
    if missing:
        assert_equal(found, initial(config), missing)


@pytest.mark.slow
def test_dtypes(corpus, uninterrupted, tmp_path):
    config = small_config_from(uninterrupted, corpus, dtype='bfloat16')
    config.save.dtype = 'bfloat16'
    expected = state_of(uninterrupted, 6)
    found, _ = start(config)
    for path, x in expected.items():
        rounded = x.astype(ml_dtypes.bfloat16) if is_parameter(path) else x
        np.testing.assert_array_equal(found[path], rounded.astype(x.dtype), err_msg=path)
        assert found[path].dtype == x.dtype
    run(config, tmp_path)
    saved = state_of(tmp_path, 8)
    for path, x in saved.items():
        if is_parameter(path):
            assert x.dtype == ml_dtypes.bfloat16
        elif path.endswith('/v'):
            assert x.dtype == np.float32
    config.train.steps = 10
    run(config, tmp_path)
    assert state_of(tmp_path, 10)['state/step'] == 10


@pytest.mark.slow
def test_the_vocabulary_comes_along(corpus, tmp_path, capsys):
    """From another run of this program; its embeddings mean nothing with other pieces."""
    first = run(small_config(corpus, 3), tmp_path / 'first')
    other = tmp_path / 'other.txt'
    other.write_text('\n'.join(f'quite another text, line {i}' for i in range(300)))
    config = small_config(str(other), 6)
    config.restore.path = str(first)
    second = run(config, tmp_path / 'second')
    model = 'vocabulary.model'
    assert (second / model).read_bytes() == (first / model).read_bytes()
    stale = run(small_config(str(other), 1), tmp_path / 'stale')  # has trained one
    shutil.rmtree(stale / 'checkpoint_1')
    (stale / 'metrics.jsonl').unlink()
    with pytest.raises(Refused, match='stale/vocabulary'):
        prepare(config, stale)
    with pytest.raises(Refused, match='data.vocabulary'):
        prepare(tiny_config(T5X, str(other), vocabulary=''), stale)


@pytest.mark.slow
def test_going_on_asks_no_more_for_the_checkpoint(corpus, uninterrupted, tmp_path):
    """A run that began from one and was stopped is the run that was not, to the bit."""
    source = tmp_path / 'source'
    shutil.copytree(uninterrupted, source)
    config = small_config_from(source, corpus, 12, dtype='bfloat16')  # rounded once, not once more
    run(config, tmp_path / 'whole')
    config.train.steps = 9
    run(config, tmp_path / 'stopped')
    shutil.rmtree(source)
    config.train.steps = 12
    run(config, tmp_path / 'stopped')
    assert state_of(tmp_path / 'stopped', 12).keys() == state_of(tmp_path / 'whole', 12).keys()
    found, expected = (state_of(tmp_path / name, 12) for name in ('stopped', 'whole'))
    assert_equal(found, expected)


@pytest.mark.parametrize(
    'lost, remedy',
    [
        ('state.*', 'restore.only=target/'),
        ('state.param_states.decoder.logits_dense.kernel.v', 'restore.only=target/'),
        ('target.encoder.layers_0*', 'copy it again'),
        ('*.*', 'copy it again'),
    ],
)
def test_a_copy_without_some_arrays(corpus, tmp_path, lost, remedy):
    copied = shutil.copytree(T5X, tmp_path / 'copied')
    for folder in copied.glob(lost):
        shutil.rmtree(folder)
    config = tiny_config(copied, corpus)
    with pytest.raises(Refused, match=remedy):
        choose_initial(wanted(make_spec(config)), config.restore, config.data)
    if lost.startswith('state'):
        config.restore.only = 'target/.*'
        assert 'without any optimizer state' in start(config)[1]


def test_another_number_of_sentinels_is_refused(corpus, uninterrupted):
    config = small_config_from(uninterrupted / 'checkpoint_6', corpus)
    recorded = config.data.extra_ids
    config.data.extra_ids = recorded + 1
    for config.data.vocabulary in ('', str(uninterrupted / 'vocabulary.model')):
        with pytest.raises(Refused, match=rf'data\.extra_ids={recorded}$'):
            choose_initial(wanted(make_spec(config)), config.restore, config.data)


def test_another_divisor_of_the_loss_needs_a_new_optimizer_state(corpus, uninterrupted):
    path = uninterrupted / 'checkpoint_6'
    own = json.loads((path / 'config.json').read_bytes())['loss']['loss_normalizing_factor']
    assert own == ''
    config = small_config_from(path, corpus)
    config.loss.loss_normalizing_factor = '16384'

    def description():
        return choose_initial(wanted(make_spec(config)), config.restore, config.data).description

    with pytest.raises(Refused, match='loss.loss_normalizing_factor'):
        description()
    config.loss.loss_normalizing_factor = '1.0'  # the sum as well
    assert description().endswith('with the optimizer state')
    config.loss.loss_normalizing_factor = '16384'
    config.restore.only = 'target/.*'
    assert description().endswith('without any optimizer state')
    # What the checkpoint of another program was trained with is not known.
    config = tiny_config(T5X, corpus)
    config.loss.loss_normalizing_factor = '16384'
    assert description().endswith('with the optimizer state')


def hunt_model(name, more=()):
    """A SentencePiece model of tests/golden/hunt, with more pieces at its end."""
    model = (GOLDEN / 'hunt' / name).read_bytes()
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    for piece in more:
        proto.pieces.add(piece=piece, type=proto.SentencePiece.USER_DEFINED)
    return proto.SerializeToString()


SENTINELS = [f'▁<extra_id_{i}>' for i in reversed(range(100))]
# The vocabulary of a checkpoint; that of data.vocabulary; restore.only; whether the run may start.
OTHER_VOCABULARIES = {
    'other pieces': ('sentinels_first.model', 'good.model', (), '.*', False),
    'sentinels that move': ('good.model', 'good.model', ['more'], '.*', False),
    'bytes': ('good.model', 'bytes', (), '.*', False),
    'without the optimizer': ('good.model', 'bytes', (), 'target/.*', False),
    'one of the two arrays': ('good.model', 'bytes', (), '(?!.*token_embedder).*', False),
    'without the embeddings': (
        'good.model', 'bytes', (), '(?!.*(token_embedder|logits_dense)).*', True,
    ),
    'pieces at the end': ('sentinels_first.model', 'sentinels_first.model', ['more'], '.*', True),
    'the same ids, sentinels among the pieces': ('good.model', 'good.model', SENTINELS, '.*', True),
}  # fmt: skip


def test_another_vocabulary_than_the_checkpoints(corpus, tmp_path):
    folder = shutil.copytree(T5X, tmp_path / 'checkpoint_6')
    file = folder / 'vocabulary.model'
    of_run = wanted(make_spec(tiny_config(folder, corpus)))
    for kind, (own, name, more, only, is_allowed) in OTHER_VOCABULARIES.items():
        file.write_bytes(hunt_model(own))
        if name != 'bytes':
            (tmp_path / 'new.model').write_bytes(hunt_model(name, more))
            name = str(tmp_path / 'new.model')
        config = tiny_config(folder, corpus, vocabulary=name, only=only)
        if is_allowed:
            choose_initial(of_run, config.restore, config.data)
            continue
        with pytest.raises(Refused, match='^data.vocabulary=') as error:
            choose_initial(of_run, config.restore, config.data)
        assert repr(name) in str(error.value) and str(folder) in str(error.value), kind


def test_a_run_on_bytes_and_another_vocabulary(corpus, evaluated):
    """The number of sentinels counts, too."""
    path = evaluated / 'run'
    for changes, is_allowed in (
        ({'vocabulary': 'bytes'}, True),
        ({'vocabulary': str(path)}, True),
        ({'vocabulary': 'bytes', 'extra_ids': 0}, False),
        ({'vocabulary': str(GOLDEN / 'hunt/good.model')}, False),
    ):
        config = small_config_from(path, corpus)
        config.data.update(changes)
        of_run = wanted(make_spec(config))
        if is_allowed:
            choose_initial(of_run, config.restore, config.data)
            continue
        with pytest.raises(Refused, match='data.vocabulary=.*data.extra_ids=100'):
            choose_initial(of_run, config.restore, config.data)


def test_a_vocabulary_that_is_damaged(corpus, tmp_path):
    """The remedy works: to name the vocabulary once that file is removed."""
    shutil.copytree(HUGGING_FACE, tmp_path / 'hf')
    damaged = tmp_path / 'hf/spiece.model'
    config = tiny_config(tmp_path / 'hf', corpus, vocabulary='')
    of_run = wanted(make_spec(config))
    for content in (b'', b'damaged'):
        damaged.write_bytes(content)
        with pytest.raises(Refused, match='hf/spiece.model'):
            choose_initial(of_run, config.restore, config.data)
    damaged.unlink()
    with pytest.raises(Refused, match='data.vocabulary'):
        choose_initial(of_run, config.restore, config.data)
    config.data.vocabulary = 'bytes'
    choose_initial(of_run, config.restore, config.data)


@pytest.mark.slow
def test_relative_steps_count_from_the_checkpoint(corpus, uninterrupted, tmp_path):
    """Also if the run resumes, and if it resumes with more of them."""
    config = small_config_from(uninterrupted / 'checkpoint_3', corpus, steps=2)
    config.train.relative_steps = 2
    run(config, tmp_path)
    assert [line['step'] for line in metrics_of(tmp_path) if line['run'] == 'train'] == [4, 5]
    run(config, tmp_path)
    assert checkpoint.steps(tmp_path)[-1] == 5
    config.train.relative_steps = 3
    run(config, tmp_path)
    assert checkpoint.steps(tmp_path)[-1] == 6
    assert json.loads((tmp_path / 'config.json').read_bytes())['train']['steps'] == 6
    assert config.train.steps == 2  # nobody writes to the config of the caller


def test_the_patterns_of_the_docs():
    """Each takes what the text says: all parameters; all but the vocabulary's arrays, with their slots."""
    patterns = re.findall(r"restore\.only='([^']+)'", (ROOT / 'docs/checkpoints.md').read_text())
    index = checkpoint.read_index(GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6')
    expected = checkpoint.shapes(index)
    parameters = {path for path in index if path.startswith('target/')}
    ends = ('token_embedder/embedding', 'decoder/logits_dense/kernel')
    vocabulary = {f'target/{end}' for end in ends}
    vocabulary |= {
        f'state/param_states/{end}/{slot}' for end in ends for slot in ('m', 'v', 'v_row', 'v_col')
    }
    assert vocabulary < index.keys() and len(parameters) == 52
    others = index.keys() - vocabulary
    assert 'target/encoder/relpos_bias/rel_embedding' in others
    taken = [choose(index, expected, pattern)[0].keys() for pattern in patterns]
    assert taken == [parameters, others]


@pytest.mark.parametrize('path', [HUGGING_FACE, T5X])
def test_sizes_of_the_checkpoint(corpus, tmp_path, path):
    """A run takes those that the command line leaves, and resumes with them."""
    config = small_config_from(path, corpus)
    opened = formats.open.open_model(path).config
    found, line = with_restored_sizes(config, {}, str(tmp_path))
    expected = own_model.as_settings(opened)
    for name in (*SIZES, *ONLY_STRICT):
        assert found.model[name] == expected[name], name
    assert f'restore.path={path}: ' in line and f'emb_dim={opened.emb_dim}, num_heads=' in line
    with_sizes = make_spec(found).model_config
    formats.open.compare(model.shapes(opened), model.shapes(with_sizes))
    # Those of the command line count, as do those of what is not restored.
    found, line = with_restored_sizes(config, {'model.emb_dim': 16}, str(tmp_path))
    assert found.model.emb_dim == config.model.emb_dim and 'emb_dim' not in line
    config.restore.update(strict=False, only='(?!.*(embedding|logits_dense)).*')
    found, line = with_restored_sizes(config, {}, str(tmp_path))
    assert found.model.vocab_size == config.model.vocab_size
    assert found.model.num_decoder_layers == config.model.num_decoder_layers
    # A run has recorded them, an old one without those that are new.
    recorded = expected | {'vocab_size': 77}
    del recorded['relative_attention_num_buckets']
    content = {'model': recorded, 'restore': {'path': config.restore.path}}
    (tmp_path / 'config.json').write_text(json.dumps(content))
    config.restore.only = '.*'
    assert with_restored_sizes(config, {}, str(tmp_path))[0].model.vocab_size == 77
    # Without a checkpoint, or with equal sizes, there is nothing to say.
    config.restore.path = str(tmp_path / 'nowhere')
    assert with_restored_sizes(config, {}) == (config, '')
    config.restore.path = ''
    assert with_restored_sizes(config, {}) == (config, '')
