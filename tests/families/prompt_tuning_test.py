"""Prompt tuning: a prompt is trained and saved alone, and the encoder reads it before the inputs."""

import numpy as np
import pytest
from runs import run, small_config, state_of
from small_models import (
    assert_close,
    assert_refused,
    check_answers,
    make_mesh,
    random_batch,
    stepwise_logits,
)

import checkpoint
import infer
from formats import own_model
from formats.vocabulary import find_vocabulary
from modes import convert
from prepare import make_spec, prepare, wanted
from run.start import choose_initial


def prompt_config(corpus, base, steps=2, mesh=(1, 1), **settings):
    config = small_config(corpus, steps, *mesh)
    config.model.update(module='prompt_tuning', dropout_rate=0.0, **settings)
    config.model.options.length = 3
    config.data.pack = 'no'
    config.restore.path = str(base)
    config.save.every_steps = 1
    config.optimizer.multiply_by_parameter_scale = False  # LoRA's adapters begin at 0
    config.learning_rate.base_learning_rate = 0.1
    return config


@pytest.fixture(scope='module')
def prompted(corpus, uninterrupted, make_once):
    """The workdir of such a run of two steps. Tests only read it."""
    return make_once('prompted', lambda folder: run(prompt_config(corpus, uninterrupted), folder))


def test_a_prompt_needs_a_base(corpus):
    config = prompt_config(corpus, '')
    config.restore.path = ''
    spec = make_spec(config)
    assert spec.trained == ('prompt/embedding',)
    assert spec.state_shapes.params['prompt/embedding'].shape == (3, 16)
    assert_refused(
        lambda: choose_initial(wanted(spec), config.restore, config.data), "restore.path=''"
    )
    config.model.lora_rank = 2
    trained = make_spec(config).trained
    assert 'prompt/embedding' in trained and len(trained) == 1 + 2 * 2 * 3


# What it begins with.


def initial_prompt(corpus, base, **options):
    config = prompt_config(corpus, base)
    config.model.options.update(length=6, **options)
    start = choose_initial(wanted(make_spec(config)), config.restore, config.data)
    assert start.base['directory'].startswith(str(base))
    return start.leaves['target/prompt/embedding']


def test_a_prompt_begins_with_texts_and_frequent_pieces(corpus, uninterrupted):
    table = state_of(uninterrupted, 6)['target/token_embedder/embedding']
    found = initial_prompt(corpus, uninterrupted, texts=('yes', 'a long line'))
    ids = find_vocabulary(uninterrupted).encode(['yes', 'a long line'])
    assert len(ids[1]) > 1
    for vector, of_text in zip(found, ids, strict=False):
        assert_close(vector, table[of_text].mean(axis=0), 1e-6)
    # The others are pieces, each another one.
    rows = [np.flatnonzero((table == vector).all(axis=1)).tolist() for vector in found[2:]]
    assert all(len(row) == 1 and row[0] > 2 for row in rows)
    assert len({row[0] for row in rows}) == 4
    np.testing.assert_array_equal(initial_prompt(corpus, uninterrupted)[2:], found[2:])


@pytest.mark.parametrize('texts, name', [
    (tuple('abcdefg'), 'model.options.length=6'),
    (('yes', ' '), "model.options.texts[1]=' ' has no pieces"),
])  # fmt: skip
def test_texts_that_begin_no_prompt(corpus, uninterrupted, texts, name):
    assert_refused(lambda: initial_prompt(corpus, uninterrupted, texts=texts), name)


@pytest.mark.parametrize('pack', ['tightly', 'greedily'])
def test_packed_rows_are_refused(corpus, uninterrupted, pack):
    config = prompt_config(corpus, uninterrupted)
    config.data.pack = pack
    assert_refused(lambda: make_spec(config), f"data.pack='{pack}'")


# Runs.


@pytest.mark.slow
def test_a_checkpoint_has_the_prompt_alone(corpus, uninterrupted, prompted, tmp_path):
    found = state_of(prompted, 2)
    assert [path for path in found if checkpoint.is_parameter(path)] == ['target/prompt/embedding']
    assert sum(x.size for x in found.values()) < 200
    first = state_of(prompted, 1)['target/prompt/embedding']
    assert np.abs(found['target/prompt/embedding'] - first).max() > 1e-3
    # The run resumes with the same steps, on other devices too.
    run(prompt_config(corpus, uninterrupted, steps=1), tmp_path / 'again')
    run(prompt_config(corpus, uninterrupted), tmp_path / 'again')
    np.testing.assert_array_equal(
        state_of(tmp_path / 'again', 2)['target/prompt/embedding'], found['target/prompt/embedding']
    )
    run(prompt_config(corpus, uninterrupted, mesh=(2, 2)), tmp_path / 'mesh')
    assert_close(state_of(tmp_path / 'mesh', 2), found, 1e-4)
    assert_refused(lambda: prepare(small_config(corpus), prompted), "'prompt_tuning'")
    config = prompt_config(corpus, prompted)
    spec = make_spec(config)
    assert_refused(
        lambda: choose_initial(wanted(spec), config.restore, config.data), 'prompt/embedding'
    )


@pytest.mark.slow
def test_a_prompt_is_merged_into_its_base(uninterrupted, prompted, tmp_path):
    """By infer.load: it generates, scores and encodes, also on a mesh; encodings are of the inputs alone."""
    base = infer.load(uninterrupted)
    t5 = infer.load(prompted)
    embedding = state_of(prompted, 2)['target/prompt/embedding']
    np.testing.assert_array_equal(t5.arrays['prompt/embedding'], embedding)
    for path, x in base.arrays.items():
        np.testing.assert_array_equal(t5.arrays[path], x)
    batch = check_answers(t5, is_long=False)
    on_mesh = infer.load(prompted, mesh=make_mesh(2, 2))
    assert_close(on_mesh.logits(batch), t5.logits(batch), 1e-5)
    expected = np.asarray(t5.logits(batch))
    stepwise = stepwise_logits(t5.config, make_mesh(2, 2))
    tokens = [batch[name] for name in ('encoder_input_tokens', 'decoder_input_tokens')]
    is_target = batch['decoder_target_tokens'] > 0
    assert_close(
        np.asarray(stepwise(on_mesh.arrays, *tokens))[is_target], expected[is_target], 1e-5
    )
    # The base reads other inputs, and the length of encodings is that of the inputs.
    assert np.abs(base.logits(batch) - expected).max() > 1e-3
    inputs = [[5, 6, 7, 1], [8, 1]]
    encoded, mask = t5.encode(inputs)
    assert encoded.shape == (2, 4, 16) and mask.sum() == 6
    assert_close(t5.encode(inputs[1:])[0][0], encoded[1, :2], 1e-5)
    assert np.abs(encoded - base.encode(inputs)[0]).max() > 1e-3
    beams = t5.generate(inputs, max_length=8, beam_size=3, num_return=2)
    assert on_mesh.generate(inputs, max_length=8, beam_size=3, num_return=2) == beams
    scores = t5.score([inputs[0]] * 2, beams[0])
    [of_choices] = infer.score_batch(t5, [infer.Question(inputs[0], beams[0])])
    assert_close(of_choices, scores, 1e-5)
    # An encoder alone, and a conversion.
    assert_close(infer.load(prompted, part='encoder').encode(inputs)[0], encoded, 1e-6)
    convert.convert_checkpoint(prompted, tmp_path / 't5x', 't5x')
    assert_close(infer.load(tmp_path / 't5x').logits(batch), expected, 1e-6)
    convert.convert_checkpoint(prompted, tmp_path / 'peft', 'peft')
    found = infer.load(tmp_path / 'peft')
    assert_close(found.logits(batch), expected, 1e-6)
    assert found.config.options.length == 3


@pytest.mark.slow
def test_a_prompt_and_lora(corpus, uninterrupted, tmp_path):
    config = prompt_config(corpus, uninterrupted, lora_rank=2, mesh=(2, 2))
    run(config, tmp_path / 'run')
    found = checkpoint.parameters(state_of(tmp_path / 'run', 2))
    base = infer.load(uninterrupted)
    assert 'prompt/embedding' in found and len(found) == 1 + 2 * 2 * 3
    unmerged = infer.T5(own_model.load(config.model), base.arrays | found, base.mesh)
    assert_refused(
        lambda: convert.convert_checkpoint(tmp_path / 'run', tmp_path / 'peft', 'peft'),
        '--format=t5x',
    )
    t5 = infer.load(tmp_path / 'run')
    batch = random_batch(seed=0, vocab_size=300)
    assert_close(t5.logits(batch), unmerged.logits(batch), 1e-5)
    check_answers(t5, is_long=False)
    config.train.steps = 3
    run(config, tmp_path / 'run')
