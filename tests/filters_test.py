"""Filters of decoding: transformers' answers with the same settings, and what each option promises.

golden/filters.json: written by `python tests/filters_test.py` with transformers 5.24 and torch.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import assert_refused, make_mesh

import decode
import infer
import partition
from answers import filters, words
from answers.options import Decoding
from configs import base
from messages import Refused
from run.task_metrics import decoding_of
from vocabulary import EOS_ID, ByteVocabulary, SentencePieceVocabulary

HERE = pathlib.Path(__file__).parent / 'golden'
MODEL = HERE / 'hf_t5_1_1'
GOLDEN = HERE / 'filters.json'
MAX_LENGTH = 24  # tokens, EOS included
NUM_INPUTS = 50
LIKE_EOS = (
    15  # EOS gets 1.1 times the logit of this token: the model, of random numbers, never ends else
)

# Ours, and the names that transformers has for them.
SETTINGS = [
    {'repetition_penalty': 1.5},
    {'repetition_penalty': 0.7},
    {'no_repeat_ngram_size': 1},
    {'no_repeat_ngram_size': 2},
    {'no_repeat_ngram_size': 3},
    {'min_length': 7},
    {'bad_words': 'common'},
    {'allowed': 'answers'},
    {'repetition_penalty': 1.3, 'no_repeat_ngram_size': 2, 'min_length': 3, 'bad_words': 'common'},
    # Transformers keeps fewer beams that end than T5X: here none ends.
    {'beam_size': 3, 'without_eos': True},
    {'beam_size': 3, 'without_eos': True, 'repetition_penalty': 1.5, 'bad_words': 'common'},
    {'beam_size': 4, 'without_eos': True, 'no_repeat_ngram_size': 2, 'num_return': 2},
]


@pytest.fixture
def transformers():
    pytest.importorskip('torch')
    return pytest.importorskip('transformers')


def their_answers(transformers, settings, ids, inputs):
    """The answers of transformers, ids without EOS."""
    import torch

    names = {'min_length': 'min_new_tokens', 'beam_size': 'num_beams', 'bad_words': 'bad_words_ids'}
    names['num_return'] = 'num_return_sequences'
    module = transformers.AutoModelForSeq2SeqLM.from_pretrained(MODEL).eval()
    weights = module.lm_head.weight.data
    weights[EOS_ID] = weights[LIKE_EOS] * 1.1
    given = {names.get(name, name): ids.get(value, value) for name, value in settings.items()}
    answers = given.pop('allowed', None)
    if given.pop('without_eos', False):
        given['suppress_tokens'] = [EOS_ID]
    if answers is not None:

        def allowed_next(row, tokens):
            decoded = tokens.tolist()[1:]
            n = len(decoded)
            found = {[*answer, EOS_ID][n] for answer in answers if answer[:n] == decoded}
            return sorted(found) or [EOS_ID]

        given['prefix_allowed_tokens_fn'] = allowed_next
    tensor = torch.tensor(inputs)
    found = module.generate(
        tensor,
        attention_mask=(tensor > 0).long(),
        max_length=1 + MAX_LENGTH,
        do_sample=False,
        length_penalty=0.0,
        **given,
    )
    return [without_eos(row[1:]) for row in found.tolist()]


def without_eos(tokens):
    """As ours, without padding that the model chose."""
    end = tokens.index(EOS_ID) if EOS_ID in tokens else len(tokens)
    return [i for i in tokens[:end] if i]


@functools.cache
def golden():
    return json.loads(GOLDEN.read_text())


@functools.cache
def model_on(data, model_size):
    t5 = infer.load(MODEL, mesh=make_mesh(data, model_size))
    kernel = np.array(t5.arrays['decoder/logits_dense/kernel'])
    kernel[:, EOS_ID] = kernel[:, LIKE_EOS] * 1.1
    t5.arrays = {**t5.arrays, 'decoder/logits_dense/kernel': jnp.asarray(kernel)}
    return t5


def never_eos(logits_rv, tokens_rT, ids_v):
    return jnp.where(ids_v[None] == EOS_ID, -jnp.inf, logits_rv)


def our_answers(t5, settings, inputs=None):
    ids = golden()['ids']
    given = {name: ids.get(value, value) for name, value in settings.items()}
    if given.pop('without_eos', False):
        given['filters'] = [never_eos]
    answers = t5.generate(inputs or golden()['inputs'], max_length=MAX_LENGTH, alpha=0.0, **given)
    if settings.get('num_return', 1) > 1:
        answers = [answer for of_input in answers for answer in of_input]
    return answers


OFTEN = (8, 9, 11)  # cases that run often, over a split vocabulary too
ANSWERS = []
for i in range(1 + len(SETTINGS)):
    ANSWERS.append(pytest.param(i, (1, 1), marks=() if i == OFTEN[-1] else pytest.mark.slow))
for i in OFTEN:
    ANSWERS.append(pytest.param(i, (2, 4), marks=pytest.mark.slow))


@pytest.mark.parametrize('case, mesh_shape', ANSWERS)
def test_answers_are_those_of_transformers(case, mesh_shape):
    case = golden()['cases'][case]
    assert case['settings'] in [{}, *SETTINGS]
    assert our_answers(model_on(*mesh_shape), case['settings']) == case['answers']


@pytest.mark.peers
def test_transformers_still_answers_so(transformers):
    for case in golden()['cases']:
        found = their_answers(transformers, case['settings'], golden()['ids'], golden()['inputs'])
        assert found == case['answers'], case['settings']


def write_golden():
    import transformers

    rng = np.random.default_rng(0)
    vocab_size = json.loads((MODEL / 'config.json').read_text())['vocab_size']
    inputs = rng.integers(2, vocab_size, (NUM_INPUTS, 12))
    inputs[np.arange(12)[None] >= rng.integers(1, 13, (NUM_INPUTS, 1))] = 0
    inputs = inputs.tolist()
    plain = their_answers(transformers, {}, {}, inputs)
    ids = {'common': [], 'answers': []}
    tokens, counts = np.unique(np.concatenate(plain), return_counts=True)
    most = tokens[np.argsort(-counts)].tolist()
    print('the most common tokens:', most[:20])
    ids['common'] = [[most[0]], [most[1], most[2]], [most[2], most[2]], plain[0][:3]]
    ids['answers'] = [plain[0][:4], plain[0][:2], plain[1][:5], [most[0]], [7, 8, 9], [7, 8]]
    cases = [{'settings': {}, 'answers': plain}]
    for settings in SETTINGS:
        answers = their_answers(transformers, settings, ids, inputs)
        cases.append({'settings': settings, 'answers': answers})
    content = {'made_with': transformers.__version__, 'inputs': inputs, 'ids': ids, 'cases': cases}
    GOLDEN.write_text(json.dumps(content) + '\n')


# Filters alone, over a split vocabulary.

V = 16


def apply(change, logits, tokens, mesh=(2, 4)):
    """The logits [rows, V] that a filter makes after tokens, lists of ids."""
    length = max(map(len, tokens))
    output = np.zeros((len(tokens), 10), np.int32)
    for row, of_row in enumerate(tokens):
        assert len(of_row) == length, 'rows are at the same position'
        output[row, :length] = of_row

    def device_apply(logits_rV, output_rT):
        logits_rv = partition.own_slice(logits_rV, 'model', 1)
        return decode.filtered([change], logits_rv, output_rT, jnp.int32(length))

    rows = partition.BATCH
    out = jax.sharding.PartitionSpec(partition.BATCH_AXES, 'model')
    mapped = jax.shard_map(
        device_apply, mesh=make_mesh(*mesh), in_specs=(rows, rows), out_specs=out
    )
    return np.asarray(jax.jit(mapped)(np.asarray(logits, np.float32), output))


def test_a_filter_sees_bos_the_tokens_and_its_ids():
    def only_seen(logits_rv, tokens_rT, ids_v):
        last_r1 = tokens_rT.max(axis=1, keepdims=True)
        return logits_rv + 100.0 * (ids_v[None] == last_r1) + (tokens_rT >= 0).sum(1)[:, None]

    found = apply(only_seen, np.zeros((2, V)), [[3, 5], [9, 2]])
    expected = np.full((2, V), 3.0)
    expected[0, 5] += 100
    expected[1, 9] += 100
    np.testing.assert_array_equal(found, expected)


def random_rows(seed, num_rows=8, length=9):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_rows, V)), rng.integers(2, 6, (num_rows, length)).tolist()


@pytest.mark.peers
def test_the_processors_of_transformers(transformers):
    """On the same logits: what they forbid, and the bits of what they leave."""
    import torch
    from transformers.generation import logits_process as theirs

    logits, tokens = random_rows(0)
    bad_words = [[7], [2, 3], [3, 3, 4], [tokens[0][-1], 9], [*tokens[1][-2:], 5]]
    words_1nW = np.array([[[-1] * (3 - len(word)) + word for word in bad_words]], np.int32)
    partial = functools.partial
    pairs = [
        (partial(filters.penalize_repetition, p), theirs.RepetitionPenaltyLogitsProcessor(p))
        for p in (0.5, 1.3, 7.0)
    ]
    pairs += [
        (partial(filters.forbid_repeated_ngrams, n), theirs.NoRepeatNGramLogitsProcessor(n))
        for n in (1, 2, 3, 4, 20)
    ]
    processor = theirs.NoBadWordsLogitsProcessor(bad_words, eos_token_id=EOS_ID)
    pairs.append((partial(filters.forbid_words, words_1nW), processor))
    for n in (5, 9, 10, 20):
        minimum = theirs.MinNewTokensLengthLogitsProcessor(1, n, EOS_ID, device='cpu')
        pairs.append((partial(filters.forbid_early_end, EOS_ID, jnp.full(1, 1 + n)), minimum))
    their_logits = torch.tensor(logits, dtype=torch.float32)
    read = torch.tensor([[0, *of_row] for of_row in tokens])
    for ours, processor in pairs:
        expected = processor(read, their_logits.clone()).numpy()
        found = apply(ours, logits, tokens)
        # XLA multiplies by 1 / penalty.
        np.testing.assert_allclose(found, expected, rtol=2e-7, err_msg=str(processor))
    for kept in (
        {'top_k': 3, 'top_p': 0.5},
        {'min_p': 0.3},
        {'top_k': 9, 'top_p': 0.9, 'min_p': 0.2},
    ):
        warped = their_logits
        for name, warper in (
            ('top_k', theirs.TopKLogitsWarper),
            ('top_p', theirs.TopPLogitsWarper),
            ('min_p', theirs.MinPLogitsWarper),
        ):
            if name in kept:
                warped = warper(kept[name])(read, warped)
        given = {'top_k': 0, 'top_p': 0.0, **kept}
        found = apply(lambda x, _, __: decode.keep_largest(x, **given), logits, tokens)  # noqa: B023
        np.testing.assert_array_equal(found == decode.MASKED, np.isneginf(warped.numpy()))


# Texts that end an answer.

BYTES = ByteVocabulary()


@pytest.mark.parametrize('text', ['the', 'e', '.', 'the end', ' the', 'ﬁ'])
def test_tokens_that_end_an_answer_have_its_stop_text(text):
    """So the device never ends too early; what it misses is cut from the whole answer."""
    vocabulary = SentencePieceVocabulary((HERE / 'hunt/good.model').read_bytes())
    decoding = Decoding(stop=(text,))
    found = words.words_of(decoding, vocabulary, vocabulary.size)['stop_bnW'][0]
    for ids in found[(found != words.NO_WORD).any(axis=1)]:
        ids = ids[ids >= 0].tolist()
        assert text in vocabulary.decode(ids)
        assert len(ids) == 1 or ids == vocabulary.encode([text])[0]
    assert len(found) > 0 or text in (' the', 'ﬁ')


# The promises of `generate` and the settings.


@functools.cache
def of_bytes():
    """A model that answers bytes."""
    t5 = model_on(1, 1)
    return infer.T5(t5.config, t5.arrays, t5.mesh, BYTES)


@pytest.mark.slow
def test_a_stop_text_ends_an_answer_and_is_not_part_of_it():
    t5 = of_bytes()
    texts = ['one', 'two words', 'three']
    answers = t5.generate(texts, max_length=20)
    stop = answers[0][2:4]
    found = t5.generate(texts, max_length=20, stop=[stop], return_scores=True)
    expected = [answer.split(stop)[0] for answer in answers]
    assert found.texts == expected
    assert [BYTES.decode(ids) for ids in found.tokens] == expected
    first, second = answers[0][1:3], answers[0][4]
    assert t5.generate(texts, max_length=20, stop=(second, first))[0] == answers[0][:1]
    answers = t5.generate(texts, max_length=20, prompts=['so: '] * 3)
    assert t5.generate(texts, max_length=20, prompts=['so: '] * 3, stop=': ') == answers


@pytest.mark.slow
def test_own_filters_and_texts():
    t5 = of_bytes()
    letters = np.array([i for i in range(BYTES.size) if BYTES.decode([i]).isalpha()])

    def only_letters(logits_rv, tokens_rT, ids_v):
        is_letter_v = (ids_v[:, None] == letters[None]).any(axis=1) | (ids_v == EOS_ID)
        return jnp.where(is_letter_v[None], logits_rv, -jnp.inf)

    for beam_size in (1, 2):
        answers = t5.generate(
            ['one', 'two'], max_length=9, filters=[only_letters], beam_size=beam_size
        )
        assert ''.join(answers).isalpha()
    assert t5.generate(['one', 'two'], max_length=9, allowed=['yes', 'no'])[0] in ('yes', 'no')
    drawn = t5.generate(
        ['one'], max_length=9, allowed=['yes', 'no'], temperature=9.0, num_return=20
    )
    assert set(drawn[0]) == {'yes', 'no'}
    [answer] = t5.generate(['one'], max_length=9)
    [other] = t5.generate(['one'], max_length=9, bad_words=[answer[:2], answer[-1]])
    assert answer[:2] not in other and answer[-1] not in other
    [answer] = t5.generate(['one'], max_length=9, prompts=['y'], allowed=['yes', 'no'])
    assert answer == 'yes'
    # A bare text is one text. A list for each input, of any length. Another text is no new program.
    assert t5.generate(['one', 'two'], max_length=9, allowed='yes') == ['yes', 'yes']
    num_programs = t5._program.cache_info().currsize
    lists = [['no'], ('a', 'b', 'c')]
    assert t5.generate(['one', 'two'], max_length=9, allowed=lists)[0] == 'no'
    assert t5._program.cache_info().currsize == num_programs
    found = t5.generate(['one', 'two'], max_length=9, allowed=lists, beam_size=4, num_return=4)
    assert [sorted(x) for x in found] == [['no'], ['a', 'b', 'c']]
    found = t5.generate(['one', 'two'], max_length=9, allowed=[[BYTES.encode(['no'])[0]], ['yes']])
    assert found == ['no', 'yes']


@pytest.mark.slow
def test_beams_find_the_best_of_the_answers_that_are_allowed():
    t5 = model_on(1, 1)
    inputs = golden()['inputs'][:8]
    answers = golden()['ids']['answers']
    found = t5.generate(
        inputs,
        max_length=MAX_LENGTH,
        allowed=answers,
        beam_size=8,
        num_return=8,
        alpha=0.0,
        return_scores=True,
    )
    for i, of_input in enumerate(inputs):
        scores = t5.score([of_input] * len(answers), [[*x, EOS_ID] for x in answers])
        order = np.argsort(-scores)
        assert found.tokens[i] == [answers[k] for k in order], 'no others are there'
        np.testing.assert_allclose(found.scores[i][: len(answers)], scores[order], rtol=1e-5)
        assert (found.scores[i][len(answers) :] == -np.inf).all()


# (what the message names, options)
BAD_OPTIONS = [
    ('prompts[0]', {'allowed': ['yes'], 'prompts': ['n']}),
    ('allowed', {'allowed': ['yes', 'a long answer']}),
    ('allowed has (5, 0)', {'allowed': [[5, 0]]}),
    ('bad_words has (384,)', {'bad_words': [[384]]}),
    ("allowed has ''", {'allowed': [['yes', '']]}),
    ('allowed', {'allowed': [['yes'], ['no']]}),  # for one input
    ("stop has ''", {'stop': ['.', '']}),
    ('min_length', {'min_length': 9}),
    ('repetition_penalty', {'repetition_penalty': 0.0}),
    ('no_repeat_ngram_size', {'no_repeat_ngram_size': 1.5}),
    ('min_p', {'min_p': 0.1}),  # without a temperature
]


def test_options_that_are_refused():
    for name, options in BAD_OPTIONS:
        assert_refused(
            lambda options=options: of_bytes().generate(['one'], max_length=9, **options), name
        )
    assert_refused(
        lambda: model_on(1, 1).generate([[5, 6]], max_length=9, stop=['yes']), 'vocabulary'
    )


def test_words_that_the_vocabulary_lacks():
    vocabulary = SentencePieceVocabulary((HERE / 'hunt/good.model').read_bytes())
    for name in ('allowed', 'bad_words'):
        decoding = Decoding(**{name: ('the', 'the 漢字')})
        with pytest.raises(Refused) as error:
            words.words_of(decoding, vocabulary, vocabulary.size)
        assert f"{name} has 'the 漢字'" in str(error.value) and "'漢', '字'" in str(error.value)


NO_DIGITS = """
import jax.numpy as jnp


def filters(vocabulary):
    digits = jnp.array([i for i in range(vocabulary.size) if vocabulary.decode([i]).isdigit()])
    return [lambda logits_rv, tokens_rT, ids_v: jnp.where(jnp.isin(ids_v, digits)[None], -jnp.inf, logits_rv)]
"""


def test_settings_and_a_file_of_filters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'no_digits.py').write_text(NO_DIGITS)
    config = base.get_config().decode
    config.module = 'no_digits'
    config.stop = ('.',)
    config.max_length = 9
    decoding = decoding_of(config, BYTES, BYTES.size)
    assert (len(decoding.filters), decoding.stop) == (1, ('.',))
    answers = infer.answer_batch(
        of_bytes(), decoding, [infer.Question([5 + i, 1]) for i in range(9)]
    )
    text = ''.join(answer.texts[0] for answer in answers)
    assert text and not any(c in '0123456789.' for c in text)
    (tmp_path / 'none.py').write_text('a = 1')
    config.module = 'none'
    assert_refused(lambda: decoding_of(config), 'decode.module')


if __name__ == '__main__':
    write_golden()
