"""Tokens that a run adds to a vocabulary, and the rows that a table gets for them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpora import HUNT, make_config
from forms import first_quick
from runs import run, small_config, state_of
from small_models import assert_refused, random_params

import infer
import optimizer
import state_names
from configs import base
from formats import write_hugging_face
from formats.vocabulary import add_tokens, find_vocabulary, names_of
from messages import Refused
from modes import convert
from prepare import make_spec, restore, wanted
from run.start import choose_initial, with_new_rows
from run.train_vocabulary import find_or_train_vocabulary
from vocabulary import ByteVocabulary, SentencePieceVocabulary

GOOD = SentencePieceVocabulary((HUNT / 'good.model').read_bytes())
TOKENS = ('<sep>', 'new word', '[CLS]')


def test_tokens_follow_the_ids_of_the_vocabulary(tmp_path):
    """As transformers numbers them: a piece keeps its id, and a token that is there twice has one."""
    # As editors write lists: byte order marks, blanks at the ends of lines, blank lines.
    content = '\ufeffnew word \t\r\n\ufeff<sep>\r\n\u3000\r\n[CLS]\n\n \n'
    (tmp_path / 'tokens.txt').write_bytes(content.encode())
    piece = GOOD.pieces[20]
    for entries in (('<sep>', str(tmp_path / 'tokens.txt')), ('<sep>', *TOKENS)):
        found = add_tokens(GOOD, (*entries, piece))
        assert found.added_tokens == {**{t: 172 + i for i, t in enumerate(TOKENS)}, piece: 20}
        assert found.size == 175 and names_of(found)[:172] == names_of(GOOD)
        assert found.sentinel_ids.tolist() == GOOD.sentinel_ids.tolist()
        before, after = GOOD.encode(['es st', 'te'])
        assert found.encode(['es st<sep>te', 'es st [CLS]']) == [
            [*before, 172, *after],
            [*before, 174],
        ]
        for text in ('es st <sep> te', '<sep> te new word', '[CLS]'):
            assert found.decode(found.encode([text])[0]) == text
        assert add_tokens(found, entries) is found
        more = add_tokens(found, ('<sep>', '<more>'))
        assert more.added_tokens['<more>'] == 175 and more.encode(['<sep>']) == found.encode(
            ['<sep>']
        )


REFUSED = ['', ' ', '<extra_id_3>', '</s>', 3, '{}/nowhere.txt', '{}/latin.txt']


def test_tokens_that_are_refused(tmp_path):
    (tmp_path / 'latin.txt').write_bytes('é'.encode('latin-1'))
    for entry in REFUSED:
        if isinstance(entry, str):
            entry = entry.replace('{}', str(tmp_path))
        assert_refused(partial(add_tokens, GOOD, ('<sep>', entry)), 'data.added_tokens')
    (tmp_path / 'terms.txt').write_text('<a>\n\n<unk> \n')
    refused = partial(add_tokens, GOOD, (str(tmp_path / 'terms.txt'),))
    assert_refused(refused, f'line 3 of {tmp_path}/terms.txt')
    assert_refused(partial(add_tokens, ByteVocabulary(), ('<sep>',)), 'data.added_tokens')


def test_a_vocabulary_of_a_run_with_tokens(tmp_path):
    config = make_config(vocabulary=str(HUNT / 'good.model'), added_tokens=TOKENS)
    training = partial(find_or_train_vocabulary, config, tmp_path, [])
    assert_refused(partial(training, max_size=174), 'model.vocab_size=174')
    found = find_or_train_vocabulary(config, tmp_path, [], max_size=175)
    (tmp_path / 'vocabulary.model').write_bytes(found.model)
    assert find_or_train_vocabulary(config, tmp_path, [], 175).model == found.model
    for vocabulary in ('', str(tmp_path)):  # as in a run that resumes, with the tokens in the model
        config.vocabulary = vocabulary
        assert find_or_train_vocabulary(config, tmp_path, [], 175).model == found.model
    config.added_tokens = ('<other>',)
    config.vocabulary = str(HUNT / 'good.model')
    assert_refused(partial(training, 175), 'vocabulary.model')


def test_new_rows_of_every_array():
    """Rows and columns of the vocabulary at the mean of the others, momenta 0, means over rows as they are."""
    rng = np.random.default_rng(0)
    old = {
        'target/token_embedder/embedding': (256, 130),
        'target/decoder/logits_dense/kernel': (130, 256),
        'state/param_states/token_embedder/embedding/v_row': (130,),
        'state/param_states/token_embedder/embedding/v_col': (256,),
        'state/param_states/token_embedder/embedding/v': (1,),
        'state/param_states/token_embedder/embedding/m': (256, 130),
        'state/param_states/decoder/logits_dense/kernel/nu': (130, 256),
        'state/param_states/decoder/logits_dense/kernel/mu': (130, 256),
        'target/encoder/encoder_norm/scale': (256,),
    }
    index = {path: rng.standard_normal(shape).astype(np.float32) for path, shape in old.items()}
    changed = ('v_row', '/v', 'scale')
    expected = {}
    for path, shape in old.items():
        is_kept = path.endswith(changed)
        expected[path] = shape if is_kept else tuple(300 if n == 256 else n for n in shape)
    vocabulary = {'token_embedder/embedding', 'decoder/logits_dense/kernel'}
    grown = with_new_rows(index, expected, vocabulary)
    assert grown.keys() == {path for path in old if not path.endswith(changed)}
    for path, found in grown.items():
        axis = old[path].index(256)
        before, new = np.split(found, [256], axis)
        np.testing.assert_array_equal(before, index[path])
        mean = 0 if path.endswith(('/m', '/mu')) else index[path].mean(axis, keepdims=True)
        np.testing.assert_allclose(new, np.broadcast_to(mean, new.shape), atol=1e-6)
        assert found.shape == expected[path] and found.dtype == np.float32
    # A larger table, and one of another width, are other models.
    for shape in ((200, 130), (300, 131)):
        assert not with_new_rows(index, expected | {path: shape for path in expected}, vocabulary)


@pytest.mark.parametrize('name', ['adafactor', 'adamw'])
def test_the_first_update(name):
    """That of the old rows is what it would be, and that of a new row is as large."""
    config = base.get_config().optimizer
    config.name = name
    tx = optimizer.make_optimizer(config, lambda step: jnp.float32(0.01))
    rng = np.random.default_rng(1)
    path = 'token_embedder/embedding'
    params = {path: jnp.asarray(rng.standard_normal((512, 128)), jnp.float32)}
    state = tx.init(params)
    for step in range(5):
        grads = {path: jnp.asarray(rng.standard_normal((512, 128)), jnp.float32)}
        updates, state = tx.update(grads, state, params, step=step)
        params = {path: params[path] + updates[path]}
    index = state_names.to_t5x(jnp.int32(5), params, state)
    shapes = jax.eval_shape(tx.init, {path: jax.ShapeDtypeStruct((640, 128), jnp.float32)})
    expected = {
        p: np.shape(x)
        for p, x in state_names.to_t5x(5, {path: np.zeros((640, 128))}, shapes).items()
    }
    grown = with_new_rows(index, expected, {path})
    tree = index | {p: jnp.asarray(x) for p, x in grown.items()}
    assert {p: np.shape(x) for p, x in tree.items()} == expected
    _, new_params, new_state = state_names.from_t5x(tree, shapes)
    grads = rng.standard_normal((640, 128)).astype(np.float32)
    before, _ = tx.update({path: jnp.asarray(grads[:512])}, state, params, step=5)
    after, _ = tx.update({path: jnp.asarray(grads)}, new_state, new_params, step=5)

    def rms(x):
        return float(jnp.sqrt((x**2).mean()))

    old_rows, new_rows = after[path][:512], after[path][512:]
    # Adafactor multiplies by the RMS of the parameter, which has new rows of a small norm.
    assert 0.85 < rms(old_rows) / rms(before[path]) < 1.02
    # AdamW's momentum of a new row is 0.
    assert (0.8 if name == 'adafactor' else 0.3) < rms(new_rows) / rms(old_rows) < 1.2


# A run.


def folder_and_config(tmp_path, corpus, **settings):
    """A folder of transformers with a row for each id of GOOD, and a run that adds tokens to it."""
    config = small_config(corpus, steps=1)
    config.data.added_tokens = TOKENS
    config.restore.path = str(tmp_path / 'hf')
    config.model.update(dtype='float32', vocab_size=GOOD.size, **settings)
    model_config = make_spec(config).model_config
    arrays = random_params(model_config)
    write_hugging_face.write(tmp_path / 'hf', model_config, arrays, GOOD)
    config.model.vocab_size = 256
    return config, arrays


def logits_of(config, arrays, vocab_size):
    t5 = infer.T5(make_spec(config).model_config, arrays, make_spec(config).mesh)
    ids = np.random.default_rng(2).integers(3, GOOD.size, (2, 9)).astype(np.int32)
    batch = dict.fromkeys(infer.SEQUENCES, ids)
    return np.asarray(t5.logits(batch))[..., :vocab_size]


@pytest.mark.slow
@pytest.mark.parametrize('tied', first_quick([False, True]))
def test_logits_of_old_ids_are_the_same(tmp_path, corpus, tied):
    config, arrays = folder_and_config(tmp_path, corpus, logits_via_embedding=tied)
    spec = make_spec(config)
    begin = choose_initial(wanted(spec), config.restore, config.data)
    names = ['target/token_embedder/embedding']
    if not tied:
        names.insert(0, 'target/decoder/logits_dense/kernel')
    assert begin.description.endswith(f'; new rows, at the mean of the others: {", ".join(names)}')
    params = restore(spec, begin.leaves).params
    table = np.asarray(params['token_embedder/embedding'])
    assert table.shape[0] == 256
    np.testing.assert_allclose(table[GOOD.size :], table[None, : GOOD.size].mean(1).repeat(256 - GOOD.size, 0), atol=1e-6)  # fmt: skip
    found = logits_of(config, params, GOOD.size)
    config.model.vocab_size = GOOD.size
    np.testing.assert_array_equal(found, logits_of(config, arrays, GOOD.size))


@pytest.mark.slow
def test_a_run_of_adapters_keeps_its_tokens(tmp_path, corpus):
    config, arrays = folder_and_config(tmp_path, corpus)
    config.model.lora_rank = 2
    config.optimizer.multiply_by_parameter_scale = False
    with pytest.raises(Refused) as error:  # names what to train
        choose_initial(wanted(make_spec(config)), config.restore, config.data)
    pattern = str(error.value).partition('optimizer.trainable=')[2].strip("'")
    config.optimizer.trainable = pattern
    config.train.steps = 2
    run(config, tmp_path / 'whole')
    config.train.steps = 1
    run(config, tmp_path / 'run')
    config.train.steps = 2
    run(config, tmp_path / 'run')
    expected = state_of(tmp_path / 'whole', 2)
    found = state_of(tmp_path / 'run', 2)
    assert found.keys() == expected.keys()
    kept = {path for path in found if path.startswith('target/') and '/lora_' not in path}
    assert kept == {'target/token_embedder/embedding', 'target/decoder/logits_dense/kernel'}
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x)
    t5 = infer.load(tmp_path / 'run')
    assert t5.arrays['token_embedder/embedding'].shape[0] == 256
    path = 'encoder/layers_0/mlp/wo/kernel'  # the base's
    np.testing.assert_array_equal(np.asarray(t5.arrays[path]), np.asarray(arrays[path]))
    convert.convert_checkpoint(tmp_path / 'run', tmp_path / 'merged', 'hf')
    merged = infer.load(tmp_path / 'merged')
    for path, x in t5.arrays.items():
        np.testing.assert_array_equal(np.asarray(merged.arrays[path]), np.asarray(x))
    assert merged.vocabulary.added_tokens == add_tokens(GOOD, TOKENS).added_tokens
    writing = partial(convert.convert_checkpoint, tmp_path / 'run', tmp_path / 'peft', 'peft')
    assert_refused(writing, 'token_embedder/embedding')
    assert not (tmp_path / 'peft').exists()


@pytest.mark.slow
def test_a_run_keeps_its_tokens(tmp_path, corpus):
    """It continues, answers, and is converted with them; so is a folder of transformers that has some."""
    config, _ = folder_and_config(tmp_path, corpus)
    run(config, tmp_path / 'run')
    config.train.steps = 2
    run(config, tmp_path / 'run')
    assert state_of(tmp_path / 'run', 2)['target/token_embedder/embedding'].shape[0] == 256
    expected = add_tokens(GOOD, TOKENS)
    folders = [tmp_path / 'run']
    for form in ('hf', 't5x'):
        folders.append(tmp_path / form / 'out')
        convert.convert_checkpoint(tmp_path / 'run', folders[-1], form)
    folders.append(tmp_path / 'again')
    convert.convert_checkpoint(tmp_path / 'hf/out', tmp_path / 'again', 't5x')
    for folder in folders:
        t5 = infer.load(folder)
        assert t5.vocabulary.added_tokens == expected.added_tokens
        assert t5.vocabulary.encode(['te<sep>es']) == expected.encode(['te<sep>es'])
        assert t5.generate(['te<sep>es'], max_length=4) == infer.load(folders[0]).generate(
            ['te<sep>es'], max_length=4
        )
    config.restore.path = str(tmp_path / 'hf/out')  # a run that starts there needs not name them
    config.data.added_tokens = ()
    config.train.steps = 1
    run(config, tmp_path / 'second')
    assert find_vocabulary(tmp_path / 'second').added_tokens == expected.added_tokens
