"""The public API: logits, scores, encodings and greedy answers are the originals', from every format and on every mesh.

golden/: made by running T5X, TensorFlow's Saver and transformers; its READMEs say how.
"""

import dataclasses
import os
import pathlib
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forms import first_quick
from small_models import (
    ONE_GOLDEN_MODEL,
    as_one_device,
    assert_close,
    assert_refused,
    golden_batch,
    make_mesh,
)

import checkpoint
import decode
import infer
import model
import partition
import vocabulary as vocabularies
from modes import convert

GOLDEN = pathlib.Path(__file__).parent / 'golden'
MESH_TF = GOLDEN / 'mtf_t5_1_1'
HUGGING_FACE = GOLDEN / 'hf_t5_1_1'
T5X = GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6'
pytestmark = pytest.mark.usefixtures('highest_precision')


@pytest.fixture(scope='module')
def t5():
    return infer.load(T5X, vocabulary='bytes')


@pytest.fixture(scope='module')
def untrained():
    """The checkpoint of the golden tokens, whose answers are long."""
    return infer.load(T5X.parent / 'checkpoint_0')


def two_inputs():
    """Inputs whose answers by `untrained` have more than 20 tokens."""
    return ids_of(np.load(T5X.parent / 'golden.npz')['batch/encoder_input_tokens'])[3::3]


class Series:
    """A column of pandas after a filter: its rows have other numbers than 0, 1, …"""

    ndim = 1

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        return iter(self.values)

    def __getitem__(self, label):
        raise KeyError(label)


def ids_of(rows):
    """The rows without padding."""
    return [[int(i) for i in row if i > 0] for row in rows]


@pytest.mark.parametrize('mesh_shape', [pytest.param((1, 1), marks=pytest.mark.slow), (2, 2)])
def test_mesh_tf(mesh_shape):
    t5 = infer.load(MESH_TF, mesh=make_mesh(*mesh_shape))
    arrays = np.load(MESH_TF / 'golden.npz')
    assert_close(t5.logits(golden_batch(arrays, 'batch')), arrays['logits'], 1e-5)
    assert t5.config.mlp_activations == ('gelu', 'linear')
    assert t5.vocabulary is None
    of_prefix = infer.load(MESH_TF / 'model.ckpt-1000000', mesh=make_mesh(*mesh_shape))
    chex.assert_trees_all_equal(of_prefix.arrays, t5.arrays)
    assert of_prefix.config == t5.config
    assert of_prefix.vocabulary is None


def test_hugging_face():
    t5 = infer.load(HUGGING_FACE)
    arrays = np.load(HUGGING_FACE / 'golden.npz')
    batch = golden_batch(arrays, 'batch')
    seen = batch['decoder_loss_weights'] > 0
    assert_close(np.asarray(t5.logits(batch))[seen], arrays['logits'][seen], 1e-4)
    expected = arrays['greedy'][:, 1:]
    found = t5.generate(ids_of(batch['encoder_input_tokens']), max_length=expected.shape[1])
    for row, tokens in zip(expected.tolist(), found, strict=True):
        end = row.index(1) if 1 in row else len(row)
        assert tokens == row[:end]


def check_scores_and_greedy(golden, path, mesh_shape):
    t5 = infer.load(path, mesh=make_mesh(*mesh_shape))
    arrays = np.load(golden / 'golden.npz')
    batch = golden_batch(arrays, 'batch')
    inputs = ids_of(batch['encoder_input_tokens'])
    targets = ids_of(batch['decoder_target_tokens'])
    assert_close(t5.score(inputs, targets), arrays['score_batch'], 1e-5)
    fewer = len(inputs) - 1  # not a multiple of 'data'
    found = t5.score(inputs[:fewer], targets[:fewer])
    assert_close(found, arrays['score_batch'][:fewer], 1e-5)
    expected = arrays['greedy_decodes']
    found = t5.generate(inputs, max_length=expected.shape[1])
    assert found == [[i for i in row if i > 1] for row in expected.tolist()]
    # A training run gives parameters that 'fsdp' splits: they are gathered once.
    specs = partition.param_specs(model.PARAMETER_SPECS, t5.arrays)
    split = jax.device_put(t5.arrays, partition.shardings(t5.mesh, specs))
    t5.arrays = split
    is_split = any('fsdp' in x.sharding.spec for x in t5.arrays.values())
    assert t5.mesh.shape['fsdp'] == 1 or not is_split
    assert t5.generate(inputs, max_length=expected.shape[1]) == found


@ONE_GOLDEN_MODEL
def test_scores_and_greedy_answers_are_T5Xs(golden, monkeypatch):
    """On a mesh, and by a relative path."""
    monkeypatch.chdir(GOLDEN)
    relative = os.path.join('..', 'golden', os.path.relpath(golden / 'checkpoint_0'))
    check_scores_and_greedy(golden, relative, mesh_shape=(2, 2, 2))


def best_first(arrays, num_beams):
    """T5X's sequences without EOS and padding, their scores, and which of them are real."""
    decodes = arrays[f'beam{num_beams}_decodes'][:, ::-1]
    scores = arrays[f'beam{num_beams}_scores'][:, ::-1]
    answers = [[[i for i in row if i > 1] for row in rows] for rows in decodes.tolist()]
    return answers, scores, scores > -1e6


@pytest.mark.parametrize(
    'num_beams, mesh_shape',
    [
        (4, (2, 2)),
        pytest.param(2, (2, 4), marks=pytest.mark.slow),
        pytest.param(2, (1, 1), marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
@pytest.mark.parametrize(
    'name', [pytest.param('t5x_t5_1_0_tiny', marks=pytest.mark.slow), 't5x_t5_1_1_tiny']
)
def test_beams_are_T5Xs(name, num_beams, mesh_shape):
    """All of them, the best first; of fewer examples than devices, too."""
    arrays = np.load(GOLDEN / name / 'golden.npz')
    t5 = infer.load(GOLDEN / name / 'checkpoint_0', mesh=make_mesh(*mesh_shape))
    inputs = ids_of(arrays['batch/encoder_input_tokens'])
    length = arrays[f'beam{num_beams}_decodes'].shape[2]
    expected, expected_scores, is_real = best_first(arrays, num_beams)
    options = {'beam_size': num_beams, 'num_return': num_beams, 'return_scores': True}
    _, answers, scores = t5.generate(inputs, max_length=length, **options)
    np.testing.assert_allclose(scores[is_real], expected_scores[is_real], atol=1e-4)
    assert (scores[~is_real] == -np.inf).all()
    for row, column in np.argwhere(is_real):
        assert answers[row][column] == expected[row][column]
    fewer = len(inputs) - 1  # padding rows do not differ from T5X's, either
    _, found, found_scores = t5.generate(inputs[:fewer], max_length=length, **options)
    assert found == answers[:fewer]
    np.testing.assert_allclose(found_scores, scores[:fewer], rtol=1e-6)


def test_an_answer_continues_after_padding(t5, monkeypatch):
    """A sample may hold id 0: what follows it belongs to the answer, until EOS."""
    rows = np.array([[[5, 0, 6, 1, 0, 0]], [[7, 8, 0, 0, 0, 0]]], np.int32)
    decoding = infer.Decoding(max_length=6)
    monkeypatch.setattr(t5, '_compute', lambda *arguments: (rows, None))
    answers = infer.answer_batch(t5, decoding, [infer.Question([5]), infer.Question([5])])
    assert [answer.tokens for answer in answers] == [[[5, 0, 6, 1]], [[7, 8]]]


def test_prompts_scores_and_lengths(untrained):
    """An answer continues its prompt; its score is `score` of what follows; shorter ones are prefixes."""
    t5, inputs = untrained, two_inputs()
    _, answers, scores = t5.generate(inputs, max_length=12, return_scores=True)
    assert_close(scores, t5.score(inputs, answers), 1e-5)
    assert t5.generate(inputs, max_length=7) == [answer[:7] for answer in answers]
    assert t5.generate(inputs[1:], max_length=12) == answers[1:]  # the neighbour changes nothing
    decoding = infer.Decoding(max_length=7)
    [without_scores] = infer.answer_batch(t5, decoding, [infer.Question(inputs[0])])
    assert without_scores.tokens == [answers[0][:7]]
    assert without_scores.scores == []
    prompts = [answers[0][:3], [*answers[1][:4], 77]]
    _, found, prompted_scores = t5.generate(
        inputs, max_length=12, prompts=prompts, return_scores=True
    )
    assert found[0] == answers[0]
    assert found[1][:5] == prompts[1]
    whole = t5.score(inputs, found)
    assert_close(prompted_scores, whole - t5.score(inputs, prompts), 1e-4)


def test_an_input_without_a_prompt_beside_one_that_has_one(untrained, monkeypatch):
    t5, inputs = untrained, two_inputs()
    _, answers, scores = t5.generate(inputs, max_length=12, return_scores=True)
    prompt = [*answers[0][:4], 77]
    _, whole, whole_scores = t5.generate(
        inputs, max_length=12, prompts=[prompt, [77]], return_scores=True
    )
    for nothing in (None, []):
        prompts = [prompt, nothing]
        _, found, found_scores = t5.generate(
            inputs, max_length=12, prompts=prompts, return_scores=True
        )
        assert found == [whole[0], answers[1]]
        assert_close(found_scores, np.stack([whole_scores[0], scores[1]]), 1e-6)
    monkeypatch.setattr(t5, 'vocabulary', vocabularies.ByteVocabulary())
    for nothing in (None, ''):
        _, found, _ = t5.generate(
            inputs, max_length=12, prompts=[nothing, 'ab'], return_scores=True
        )
        assert found[0] == answers[0]
        assert found[1][:2] == [100, 101]


SAMPLES = {'temperature': 1.0, 'top_k': 200, 'top_p': 0.9, 'num_return': 2}


@pytest.mark.slow
@pytest.mark.parametrize('options', [{'beam_size': 2}, {}, SAMPLES])
def test_64_bits_change_nothing(untrained, options):
    """A notebook that sets jax_enable_x64 gets the same answers, scores and encodings."""
    inputs = two_inputs()
    found = []
    for has_64_bits in (False, True):
        with jax.enable_x64(has_64_bits):
            _, answers, scores = untrained.generate(
                inputs, max_length=5, return_scores=True, **options
            )
            encoded, _ = untrained.encode(inputs)
            found.append([answers, scores, encoded, untrained.score(inputs, [[7, 8, 1]] * 2)])
    assert found[0][0] == found[1][0]
    for first, second in zip(found[0][1:], found[1][1:], strict=True):
        assert first.dtype == second.dtype == np.float32
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_samples(untrained):
    """They depend on the seed, on the temperature of their input, and not on their neighbours."""
    t5, inputs = untrained, two_inputs()
    options = {'max_length': 12, 'num_return': 4, 'return_scores': True}
    _, answers, scores = t5.generate(inputs, temperature=[1.0, 0.0], **options)
    assert len({tuple(answer) for answer in answers[0]}) == 4
    assert answers[1] == t5.generate(inputs[1:], max_length=12) * 4
    assert (np.diff(scores, axis=1) <= 0).all()
    assert_close(scores[0], t5.score([inputs[0]] * 4, answers[0]), 1e-5)
    _, again, _ = t5.generate(inputs[:1], temperature=1.0, **options)
    assert again[0] == answers[0]
    _, others, _ = t5.generate(inputs[:1], temperature=1.0, seed=1, **options)
    assert others[0] != answers[0]


@pytest.mark.slow
@pytest.mark.parametrize('beam_size', [1, 3])
def test_the_ways_to_decode_agree(untrained, beam_size, monkeypatch):
    """Kernels transposed or not; a cache that grows twice, and one that has room from the start."""
    t5, inputs = untrained, two_inputs()
    prompts = np.random.default_rng(0).integers(2, 384, (2, 140))
    options = {'beam_size': beam_size, 'return_scores': True, 'prompts': prompts}
    _, answers, scores = t5.generate(inputs, max_length=150, **options)
    assert max(map(len, answers)) > 128
    plain = infer.T5(t5.config, t5.arrays, t5.mesh)
    plain._step_arrays = plain.arrays
    monkeypatch.setattr(decode, 'FIRST_ROOM', 256)
    _, found, found_scores = plain.generate(inputs, max_length=150, **options)
    assert found == answers
    assert_close(found_scores, scores, 1e-5)


# (what the message names, options)
BAD_OPTIONS = [
    *(('max_length', {'max_length': x}) for x in (0, 1.5, 2**40, True, '3')),
    ('beam_size', {'beam_size': 0}),
    ('beam_size', {'beam_size': 4, 'temperature': 1.0}),
    ('top_k', {'top_k': 4}),  # without a temperature
    ('top_p', {'top_p': 1.5}),
    ('num_return', {'beam_size': 2, 'num_return': 3}),
    *(('temperature', {'temperature': x}) for x in (-1, 'hot', float('nan'), [1.0], [1.0, None])),
    ('min_length', {'min_length': 128}),
    ('seed', {'seed': -1}),
    ('use beam_size', {'num_beams': 4}),  # a name of Hugging Face
    ('prompts', {'prompts': [[7]]}),
    ('prompts[1]', {'prompts': [[7], [7, 7, 7]], 'max_length': 2}),
    ('prompts[1]', {'prompts': [[7], [0, 7]]}),
]


def test_options_that_are_refused(t5):
    for name, options in BAD_OPTIONS:
        assert_refused(lambda options=options: t5.generate([[5], [6]], **options), name)
    with pytest.raises(TypeError, match='return_score'):
        t5.generate([[5]], return_score=True)


@pytest.mark.parametrize(
    'options',
    [{}, pytest.param({'num_return': 2, 'temperature': 1.0}, marks=pytest.mark.slow)],
    ids=['one', 'several'],
)
def test_answers_have_texts_tokens_and_scores(t5, options):
    """Each has the form of what `generate` returns without scores; ids have texts as well."""
    texts = ['hello', 'a']
    found = t5.generate(texts, max_length=3, return_scores=True, **options)
    assert found.texts == t5.generate(texts, max_length=3, **options)
    ids = [[*x, 1] for x in t5.vocabulary.encode(texts)]
    assert found.tokens == t5.generate(ids, max_length=3, **options)
    assert found.scores.dtype == np.float32
    assert found.scores.shape == np.shape(found.texts)
    of_ids = t5.generate(ids, max_length=3, return_scores=True, **options)
    assert (of_ids.texts, of_ids.tokens) == (found.texts, found.tokens)
    without = infer.T5(t5.config, t5.arrays, t5.mesh)
    without._program = t5._program
    assert without.generate(ids, max_length=3, return_scores=True, **options).texts is None


EXAMPLES = [
    ['hello', ''],
    ('hello', 'a'),
    np.array(['a', 'b']),
    [[5, 6], [7]],
    ((5, 6), (7,)),
    [range(3, 6), [8]],
    [np.array([5]), np.array([6, 7], np.int64)],
    np.array([[5, 6], [7, 0]], np.int32),
    np.array([[5, 6], [7, 8]], np.int64),
    np.array([[5, 6], [7, 8]], np.uint8),
    jnp.array([[5, 6], [7, 8]]),
]


@pytest.mark.parametrize('examples', first_quick(EXAMPLES, 5), ids=lambda value: repr(value)[:40])
def test_what_may_be_asked(t5, examples):
    answers = t5.generate(examples, max_length=2)
    kind = str if isinstance(examples[0], str) else list
    assert [type(answer) for answer in answers] == [kind, kind]
    assert t5.score(examples, examples).shape == (2,)
    assert t5.encode(examples)[0].shape[0] == 2


# (what the message names, the inputs)
NO_INPUTS = [
    *(('inputs=', x) for x in ('a text', [], np.zeros([0, 3], np.int32))),
    *(('inputs[0]', x) for x in (b'bytes', {'a': 1}, np.array([5, 6]), ['a', [5]])),
    *(('inputs[1]', [[5], x]) for x in ([1.5], [True], ['a'], [[5]], 5, {5, 6}, None)),
    *(('inputs[1]', [[5], x]) for x in ([], [0, 0], [-1], [384], [2**31], np.array([2**32 + 5]))),
    *(('inputs[2]', ['a', 'b', x, 'c']) for x in (None, np.nan, b'c', 5)),
    ('inputs[1]', ['b', 'a' * 512]),  # too long
]


def test_what_may_not_be_asked(t5):
    """The message names the argument, and the example of a list."""
    for name, examples in NO_INPUTS:
        assert_refused(lambda examples=examples: t5.generate(examples), name)
    assert_refused(lambda: t5.encode(['a' * 512]), 'inputs[0]')
    assert_refused(lambda: t5.score([[5]], [[-1]]), 'targets[0]')
    assert_refused(lambda: t5.score([[5]], [[5], [6]]), 'targets')
    without = infer.T5(t5.config, t5.arrays, t5.mesh)
    assert_refused(lambda: without.generate(['a text']), 'vocabulary=PATH')
    encoder = infer.T5(dataclasses.replace(t5.config, num_decoder_layers=0), t5.arrays, t5.mesh)
    for ask in (lambda: encoder.generate([[5]]), lambda: encoder.score([[5]], [[5]])):
        assert_refused(ask, 'encoder')


def test_texts_of_any_list(t5):
    assert t5.generate(Series(['a', 'b']), max_length=2) == t5.generate(['a', 'b'], max_length=2)
    assert t5.generate([[5], [6]], max_length=np.int64(2)) == t5.generate(
        np.array([[5, 0], [6, 0]]), max_length=2
    )


# The encoder.


def encoder_outputs(t5, ids):
    """What the decoder of the whole model reads of a batch, whose parts are not packed."""

    def f(params, ids):
        batch = dict.fromkeys(infer.SEQUENCES, ids)
        return model.apply(model.logits, params, t5.config, batch)[0]

    specs = (model.param_specs(t5.config), partition.BATCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            model.Decoder, '__call__', lambda self, x, encoded_bMD, **_: (encoded_bMD, (), {})
        )
        return np.asarray(as_one_device(f, specs)(t5.arrays, jnp.asarray(ids)))


@pytest.mark.parametrize(
    'path', first_quick([T5X, MESH_TF, HUGGING_FACE]), ids=['t5x', 'mesh_tf', 'hf']
)
def test_the_encoder_of_every_format(path):
    """It has the outputs of the whole model's encoder."""
    whole = infer.load(path)
    t5 = infer.load(path, part='encoder', mesh=make_mesh(2, 2))
    without = {'num_decoder_layers': 0, 'logits_via_embedding': True}
    assert t5.config == dataclasses.replace(whole.config, **without)
    kept = {name: x for name, x in whole.arrays.items() if not name.startswith('decoder/')}
    chex.assert_trees_all_equal(t5.arrays, kept)
    ids = np.random.default_rng(0).integers(2, 90, [5, 32])
    ids[1, 7:] = 0
    expected = encoder_outputs(whole, ids)
    for model_ in (t5, whole):
        outputs, mask = model_.encode(ids)
        np.testing.assert_array_equal(mask, ids > 0)
        assert_close(outputs[mask], expected[mask], 1e-5)
        assert not outputs[~mask].any()


@pytest.mark.parametrize('ours', [False, True])
def test_of_an_encoder_no_file_of_the_decoder_is_read(tmp_path, ours):
    """In T5X's layout, with checksums and without, where the encoder's still count."""
    run = tmp_path / 'run'
    if ours:
        convert.convert_checkpoint(T5X, run, 't5x')
    else:
        shutil.copytree(T5X, run / 'checkpoint_6')
    expected = infer.load(T5X, part='encoder').arrays
    deleted = list((run / 'checkpoint_6').glob('*.decoder.*'))
    assert len(deleted) > 20
    for folder in deleted:
        if folder.is_dir():
            shutil.rmtree(folder)
        else:
            folder.unlink()
    chex.assert_trees_all_equal(infer.load(run, part='encoder').arrays, expected)
    assert_refused(lambda: infer.load(run), 'decoder')
    chunk = run / 'checkpoint_6/target.encoder.encoder_norm.scale/0'
    chunk.write_bytes(chunk.read_bytes()[:-1] + b'x')
    name = 'target.encoder.encoder_norm.scale'
    assert_refused(lambda: infer.load(run, part='encoder'), name)


def test_a_checkpoint_of_an_encoder_alone(tmp_path):
    """In T5X's layout it needs no `part`."""
    t5 = infer.load(T5X, part='encoder')
    tree = {f'target/{path}': x for path, x in t5.arrays.items()} | {'state/step': np.int32(3)}
    checkpoint.save(tmp_path, 3, tree)
    found = infer.load(tmp_path)
    assert found.config == t5.config
    chex.assert_trees_all_equal(found.arrays, t5.arrays)
    infer.load(tmp_path, part='encoder')
    assert_refused(lambda: infer.load(tmp_path, part='whole'), 'checkpoint_3')


def test_any_number_of_inputs_are_encoded_in_their_order(t5):
    """As each alone. The length is that of the longest."""
    inputs = [[*range(5, 5 + n % 50), 1] for n in range(0, 75, 3)]
    outputs, mask = t5.encode(inputs, batch_size=8)
    assert outputs.shape == (25, 49, t5.config.emb_dim) and mask.shape == (25, 49)
    assert mask.sum(axis=1).tolist() == [len(ids) for ids in inputs]
    for i in (0, 24):
        alone, _ = t5.encode([inputs[i]], batch_size=8)
        assert_close(outputs[i, : len(inputs[i])], alone[0], 1e-5)


def test_texts_are_encoded_as_they_are_answered(t5):
    """With EOS, and glued sentinels as everywhere."""
    outputs, mask = t5.encode(['ab', 'a', ''])
    ids = [[97 + 3, 98 + 3, 1], [97 + 3, 1], [1]]
    expected, expected_mask = t5.encode(ids)
    np.testing.assert_array_equal(mask, expected_mask)
    np.testing.assert_array_equal(outputs, expected)


INPUTS, SHIFTED, TARGETS = infer.SEQUENCES
SEGMENTS = {name: np.ones([2, 4], np.int32) for name in infer.SEGMENTS}


ONES = np.ones([2, 4], np.int32)
GOOD_BATCHES = [
    {},
    {INPUTS: [[1, 2, 3, 4], [5, 6, 7, 8]]},
    {INPUTS: np.ones([2, 4], np.int64)},
    SEGMENTS,
    {'decoder_loss_weights': np.ones([2, 4])},
]
# (what the message names, the changes)
BAD_BATCHES = [
    (INPUTS, {INPUTS: 384 * ONES}),
    (INPUTS, {INPUTS: np.full([2, 4], 2**32 + 5)}),
    (SHIFTED, {SHIFTED: -ONES}),
    (TARGETS, {TARGETS: jnp.full([2, 4], 384)}),
    (INPUTS, {INPUTS: np.ones(4, int)}),
    (INPUTS, {name: np.ones([0, 4], int) for name in infer.SEQUENCES}),
    (INPUTS, {INPUTS: np.ones([2, 4])}),
    ('encoder_segment_ids', {'encoder_segment_ids': ONES}),
    ('input_ids', {'input_ids': ONES}),
]


def a_batch():
    return {name: np.full([2, 4], 5, np.int32) for name in infer.SEQUENCES}


def test_batches(t5):
    for changes in GOOD_BATCHES:
        assert t5.logits(a_batch() | changes).shape == (2, 4, 384)
    assert jax.jit(t5.logits)(a_batch()).shape == (2, 4, 384)
    for name, changes in BAD_BATCHES:
        assert_refused(lambda changes=changes: t5.logits(a_batch() | changes), name)


def test_what_load_refuses():
    for name, value in [
        *(('dtype', x) for x in ('int8', None)),
        *(('part', x) for x in ('decoder', None)),
        *(('vocabulary', x) for x in ('nowhere', T5X, __file__, 'http://x')),
    ]:
        assert_refused(lambda name=name, value=value: infer.load(T5X, **{name: value}), str(value))


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_parameters_that_are_not_finite_are_named(tmp_path, caplog, t5, dtype):
    """Of a run that diverged, or of values beyond float16; in any shard."""
    tree = {f'target/{name}': np.array(x) for name, x in t5.arrays.items()}
    bad = ['target/decoder/decoder_norm/scale', 'target/token_embedder/embedding']
    tree[bad[0]][-1] = np.nan if dtype == 'float32' else 1e5
    tree[bad[1]].T[-1, -1] = -np.inf
    folder = checkpoint.save(tmp_path, 1, {**tree, 'state/step': np.int32(1)})
    for mesh_shape in ((1, 1), (1, 2)):
        caplog.clear()
        infer.load(folder, config=t5.config, dtype=dtype, mesh=make_mesh(*mesh_shape))
        [record] = caplog.records
        assert ', '.join(bad) in record.getMessage()


@pytest.mark.filterwarnings('ignore:os.fork')
def test_a_fork_after_load_is_an_error(t5):
    """JAX would wait for ever for threads that the child does not have."""
    child = os.fork()
    if child == 0:
        calls = [
            lambda: t5.generate([[5]], max_length=3),
            lambda: t5.score([[5]], [[6]]),
            lambda: t5.encode([[5]]),
        ]
        for call in calls:
            try:
                call()
            except AssertionError as error:
                if 'spawn' in str(error):
                    continue
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_dtypes_of_load(t5):
    """Parameters of half the size give close logits."""
    for path, dtype, expected in [(T5X, '', 'float32'), (MESH_TF, '', 'bfloat16')]:
        found = infer.load(path, dtype=dtype).arrays.values()
        assert {x.dtype.name for x in found} == {expected}
    half = infer.load(T5X, dtype=jnp.bfloat16)
    assert {x.dtype for x in half.arrays.values()} == {jnp.bfloat16.dtype}
    batch = {name: np.arange(5, 13).reshape(2, 4) for name in infer.SEQUENCES}
    logits = half.logits(batch)
    assert logits.dtype == jnp.float32
    assert_close(logits, t5.logits(batch), 2e-2)  # eight bits of mantissa


def random_examples(num_examples, max_length, seed=0):
    rng = np.random.default_rng(seed)
    examples = []
    for i in range(num_examples):
        inputs, targets = (rng.integers(3, 256, rng.integers(1, max_length)) for _ in range(2))
        examples.append(infer.Question([*inputs, 1], [*targets, 1], number=i))
    return examples


@pytest.mark.parametrize('num_examples', [0, 1, 10, 25])
def test_batches_are_sorted_by_length_and_results_are_in_order(monkeypatch, num_examples):
    """Chunks of 10: in each the longest come first, and batches have the same number of rows."""
    monkeypatch.setattr('answers.batches.EXAMPLES_PER_CHUNK', 10)
    examples = random_examples(num_examples, max_length=200)
    batches = []
    done = []

    def compute(batch, num_rows):
        assert len(batch) <= num_rows == min(4, num_in_chunk(batch[0].number))
        batches.append(batch)
        return [example.number for example in batch]

    def num_in_chunk(number):
        return min(10, num_examples - number // 10 * 10)

    found = list(infer.in_batches(compute, iter(examples), 4, done.append))
    assert found == list(range(num_examples))
    assert sum(done) == num_examples
    assert max(done, default=0) <= 4
    for batch, following in zip(batches, batches[1:], strict=False):
        if batch[0].number // 10 == following[0].number // 10:
            shortest = min(len(example.inputs) for example in batch)
            assert len(following[0].inputs) <= shortest + 64  # the lengths compiled for are coarse


def test_a_text_that_is_too_long(t5):
    """It is cut if that is asked for; ids are taken as they are."""
    text = 'a' * 512
    ids = [100] * 511 + [1]
    [found], _, scores = t5.generate([text], max_length=1, trim=True, return_scores=True)
    _, _, expected = t5.generate([ids], max_length=1, return_scores=True)
    assert isinstance(found, str)
    np.testing.assert_array_equal(scores, expected)
