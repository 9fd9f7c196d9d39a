"""Objectives: their targets reassemble the text, and their statistics are those of their settings.

tests/golden/seqio_t5/objectives_e2e.json was made by running t5 e081111 on the documents of
span_corruption_e2e.json: its functions iid_denoising, prefix_lm and full_lm, and the steps of
t5/models/gin/objectives for the others. Masks are random there, so lengths and texts are compared.
"""

import re
import unicodedata
import zlib

import chex
import numpy as np
import pytest
from corpora import check_settings, documents_of, golden, is_near, make_config, source_of, stream_of

import data
import vocabulary as vocabularies
from configs import ul2
from messages import Refused
from run.train_vocabulary import train_vocabulary
from stream import OpenMixture, OpenTask, Stream
from tasks import metrics, mixtures
from tasks.objectives import OBJECTIVES, unicode_tokens

# Ids of text are below FIRST_SENTINEL, all different in a group of documents.
VOCABULARY = vocabularies.ByteVocabulary(extra_ids=99_741)  # 100,000 ids
FIRST_SENTINEL = 99_000
EOS = vocabularies.EOS_ID
DENOISING = [name for name, objective in OBJECTIVES.items() if objective.features == ('targets',)]


def config_of(name, **changes):
    """config.data whose lengths fit the objective."""
    lengths = {'lengths.inputs': 64, 'lengths.targets': 64}
    if name == 'ul2':
        lengths = {'lengths.inputs': 140, 'lengths.targets': 140}
    config = make_config(**{**lengths, 'task': name, 'noise_density': 0.15, **changes})
    check_settings(config)
    return config


def make_objective(name, vocabulary=VOCABULARY, **changes):
    return OBJECTIVES[name](config_of(name, **changes), vocabulary)


def with_sentinels(num_sentinels, size=VOCABULARY.size):
    """A vocabulary of `size` ids, of which the last ones are sentinels; those beyond the bytes are text."""
    vocabulary = vocabularies.ByteVocabulary(num_sentinels)
    vocabulary.size = size
    vocabulary.sentinel_ids = size - 1 - np.arange(num_sentinels, dtype=np.int32)
    return vocabulary


def group_of(sizes):
    """Names and records of documents with the ids 3, 4, 5, ..., each once."""
    records = []
    begin = 3
    for size in sizes:
        records.append({'targets': np.arange(begin, begin + size, dtype=np.int32)})
        begin += size
    assert begin <= FIRST_SENTINEL
    return [str(i) for i in range(len(sizes))], records


def without_eos(ids):
    ids = ids.tolist()
    assert ids[-1] == EOS and EOS not in ids[:-1]
    return ids[:-1]


def runs_of_text(ids):
    """The runs of ids between sentinels; sentinels are in order from the last id down."""
    runs = [[]]
    sentinels = []
    for i in ids:
        if i >= FIRST_SENTINEL:
            sentinels.append(i)
            runs.append([])
        else:
            runs[-1].append(i)
    assert sentinels == [VOCABULARY.size - 1 - i for i in range(len(sentinels))]
    return [run for run in runs if run]


def uncorrupt(inputs, targets):
    """The text of which one part is in the inputs, one in the targets, with sentinels between."""
    runs = [runs_of_text(inputs), runs_of_text(targets)]
    is_in_targets = bool(inputs) and inputs[0] >= FIRST_SENTINEL
    text = []
    for i in range(len(runs[0]) + len(runs[1])):
        text += runs[(i + is_in_targets) % 2][i // 2]
    return text


def without_mode(inputs):
    """UL2's mode as text, and the inputs after it."""
    text = bytes(i - 3 for i in inputs[:5] if i < 259).decode()
    return text, inputs[5:]


def text_of(name, example):
    """The text that an example was made of."""
    if name == 'full_lm':
        assert example.inputs.tolist() == [EOS]
        return [i for i in example.targets.tolist() if i != EOS]
    if name == 'pack_prefix_lm_encoder_decoder':
        return [i for i in [*example.inputs.tolist(), *example.targets.tolist()] if i != EOS]
    inputs = without_eos(example.inputs)
    targets = without_eos(example.targets)
    if name == 'ul2':
        mode, inputs = without_mode(inputs)
        if mode == '[S2S]':
            return inputs + targets
    if name == 'principle_sentences':  # the ids have no end of a sentence
        assert inputs in (targets, [VOCABULARY.size - 1])
        return targets
    if name == 'prefix_lm':
        assert len(inputs) >= 1 or len(targets) == 1
        return inputs + targets
    if name in ('lm', 'deshuffling', 'mass_style', 'bert_style'):
        assert len(inputs) == (0 if name == 'lm' else len(targets))
        assert name != 'deshuffling' or sorted(inputs) == sorted(targets)
        return targets
    if name == 'drop_corrupted_tokens':
        return sorted(inputs + targets)
    return uncorrupt(inputs, targets)


SIZES = {
    'long and short': [1, 2, 3, 700, 64, 63, 128, 0, 5, 40, 1, 333],
    'one': [500],
    'one token': [1],
    'none': [],
    'empty': [0, 0],
}


@pytest.mark.parametrize('name', DENOISING)
def test_examples_reassemble_every_document(name):
    for concatenate in ('auto', 'yes', 'no'):
        for sizes in SIZES.values():
            check_documents(name, concatenate, sizes)


def check_documents(name, concatenate, sizes):
    names, records = group_of(sizes)
    objective = make_objective(name, concatenate=concatenate)
    ends = np.cumsum([0, *sizes])
    texts = []
    for example in objective.examples(names, records, 7):
        assert example.inputs.dtype == example.targets.dtype == np.int32
        assert 1 <= len(example.inputs) <= objective.lengths.inputs
        assert len(example.targets) <= objective.lengths.targets
        assert not example.is_trimmed
        text = text_of(name, example)
        texts.append(text)
        if text:
            documents = np.searchsorted(ends, np.array([text[0], text[-1]]) - 3, side='right') - 1
            found = [names[i] for i in range(documents[0], documents[1] + 1) if sizes[i]]
            assert list(example.names) == found
        if not objective.concatenates:
            assert len(example.names) == 1
    may_be_eos_alone = ('full_lm', 'pack_prefix_lm_encoder_decoder')
    assert all(texts) or name in may_be_eos_alone
    assert sum(sorted(texts), []) == list(range(3, 3 + sum(sizes)))
    per_document = {'deshuffling', 'prefix_lm', 'principle_sentences'}
    assert objective.concatenates == (
        concatenate == 'yes' or (concatenate == 'auto' and name not in per_document)
    )


@pytest.fixture(scope='module')
def oracle():
    return golden('objectives_e2e')


NOISE_AND_TEXT = ('mass_style', 'bert_style', 'deshuffling')
LANGUAGE_MODELS = ('lm', 'full_lm')


@pytest.mark.parametrize(
    'name',
    ['iid_denoising', 'prefix_lm', 'drop_corrupted_tokens', *NOISE_AND_TEXT, *LANGUAGE_MODELS],
)
def test_examples_hold_the_texts_of_t5s(oracle, name):
    """The texts are T5's, and so are all lengths and ids that are not random."""
    changes = {f'lengths.{side}': length for side, length in oracle['sequence_length'].items()}
    vocabulary = with_sentinels(100, oracle['vocab_size'])
    records = [{'targets': np.array(ids, np.int32)} for ids in oracle['tokenized']]
    names = [str(i) for i in range(len(records))]
    ours = make_objective(name, vocabulary, **changes).examples(names, records, 0)
    theirs = []
    for output in oracle['outputs'][name]:
        inputs = np.array(output.get('inputs', [EOS]))
        theirs.append(data.Example(inputs, np.array(output['targets']), names=[]))
    found = []
    for examples in (ours, theirs):
        texts = []
        for example in examples:
            sides = []
            for ids in example[:2]:  # with the sentinels of VOCABULARY
                is_sentinel = ids >= vocabulary.size - 100
                sides.append(ids + is_sentinel * (VOCABULARY.size - vocabulary.size))
            texts.append(text_of(name, data.Example(*sides, names=[])))
        lengths = []
        if name in NOISE_AND_TEXT:
            lengths = sorted((len(x.inputs), len(x.targets)) for x in examples)
        rows = []
        if name in LANGUAGE_MODELS:
            rows = sorted(x.targets.tolist() for x in examples)
        found.append((sorted(texts), lengths, rows))
    assert found[0] == found[1]


# Statistics of 10,000 examples.


def many_examples(objective, count=10_000):
    """10,000 examples of full rows, each of a text of its own."""
    names, records = group_of([800] * 110)
    examples = []
    group = 0
    while len(examples) < count:
        examples += objective.examples(names, records, group)
        group += 1
    return examples[:count]


def counts_of(example):
    """Numbers of tokens of text and of spans in the targets, and of tokens of text in both."""
    num_spans = np.count_nonzero(example.targets >= FIRST_SENTINEL)
    num_noise = len(example.targets) - 1 - num_spans
    num_kept = np.count_nonzero(example.inputs < FIRST_SENTINEL) - 1
    return num_noise, num_spans, num_noise + num_kept


NOISE = [('iid_denoising', 0.15), ('iid_denoising', 0.5), ('drop_corrupted_tokens', 0.3)]


@pytest.mark.parametrize('name, density', [*NOISE, ('mass_style', 0.15)])
def test_each_token_is_noise_with_its_probability(name, density):
    objective = make_objective(name, noise_density=density)
    num_tokens = num_noise = 0
    by_place = np.zeros(63)
    for example in many_examples(objective):
        text = text_of(name, example)
        kept = set(example.inputs.tolist())
        is_noise = np.array([i not in kept for i in text])
        num_tokens += len(text)
        num_noise += is_noise.sum()
        if len(text) == 63:
            by_place += is_noise
    assert is_near(num_noise, density * num_tokens)
    assert is_near(by_place[0], by_place.mean()) and is_near(by_place[-1], by_place.mean())


def test_bert_replaces_nine_of_ten_by_sentinels():
    num_noise = num_random = num_tokens = 0
    for example in many_examples(make_objective('bert_style', noise_density=0.3)):
        changed = example.inputs != example.targets
        num_tokens += len(changed) - 1
        num_noise += changed.sum()
        num_random += (example.inputs[changed] != VOCABULARY.size - 1).sum()
        assert example.inputs.min() >= EOS and 2 not in example.inputs
    assert is_near(num_noise, 0.3 * num_tokens)
    assert is_near(num_random, 0.1 * num_noise)


def test_tokens_of_any_script():
    assert unicode_tokens('मैं हिन्दी, पढ़ता!') == ['मैं', 'हिन्दी', 'पढ़ता']
    assert unicode_tokens('他用GPT4 写。') == ['他', '用', 'gpt4', '写']
    assert unicode_tokens('コーヒー한국어 단어') == [*'コーヒー', '한국어', '단어']
    assert unicode_tokens('กิน น้ำ') == ['กิ', 'น', 'น้ํ', 'า']
    assert unicode_tokens("Größe isn't 5²") == ['größe', 'isn', 't', '52']
    decomposed = unicodedata.normalize('NFD', 'Größe क़')
    assert unicode_tokens(decomposed) == unicode_tokens('Größe क़')


SENTENCES = (
    'It rains in the north. Does it rain in the south, too? The south is dry! One. It is true '
    'that the rain in the north fills the rivers of the south. Nobody knows version 1.2 of this. '
    'Rivers are long? The rivers of the south are dry. Nothing else'
)


def straightforward_choice(text, number):
    """The sentences of `number` highest scores, in order."""
    sentences = re.split(r'(?<=[.!?])(?=\s)', text)
    words = [unicode_tokens(sentence) for sentence in sentences]
    scores = []
    for i in range(len(sentences)):
        rest = sum(words[:i] + words[i + 1 :], [])
        scores.append(metrics.overlap_f1(rest, words[i]))
    best = sorted(range(len(sentences)), key=lambda i: -scores[i])[:number]
    return sentences, sorted(best)


@pytest.mark.parametrize('kind', ['bytes', 'pieces'])
def test_principle_sentences_are_those_of_a_straightforward_choice(pydoc_model, kind):
    for ratio, number in [(0.0, 1), (0.2, 1), (0.25, 2), (0.5, 4), (1.0, 9)]:
        for kept in (0.0, 1.0):
            check_choice(pydoc_model, kind, ratio, number, kept)


def check_choice(pydoc_model, kind, ratio, number, kept):
    vocabulary = vocabularies.ByteVocabulary(100)
    text = SENTENCES
    if kind == 'pieces':
        text = text.replace('?', '!')  # is unknown to this vocabulary
        vocabulary = vocabularies.SentencePieceVocabulary(pydoc_model)
    lengths = {'lengths.inputs': 600, 'lengths.targets': 500}
    settings = {'ratio': ratio, 'min_ratio': 1.0, 'noise': 0.0, 'kept': kept}
    changes = lengths | {f'sentences.{name}': x for name, x in settings.items()}
    objective = make_objective('principle_sentences', vocabulary, **changes)
    records = [{'targets': ids} for ids in vocabulary.encode_as_arrays([text])]
    [example] = objective.examples(['x'], records, 0)
    sentences, chosen = straightforward_choice(text, number)
    expected = [vocabulary.encode([sentences[i]])[0] for i in chosen]
    assert without_eos(example.targets) == sum(expected, []) and not example.is_trimmed
    inputs = []
    for i, sentence in enumerate(sentences):
        if i in chosen and not kept:
            inputs.append(vocabulary.sentinel_ids[0])
        else:
            inputs += vocabulary.encode([sentence])[0]
    assert without_eos(example.inputs) == inputs


@pytest.mark.slow
def test_principle_sentences_have_their_shares():
    """Of 25 sentences 1 to 4 are targets, nine of ten of these a sentinel; long targets are cut."""
    vocabulary = vocabularies.ByteVocabulary(100)
    text = ' '.join(f'Sentence number {i} is about {i % 7}.' for i in range(25))
    changes = {'lengths.inputs': len(text) + 1, 'lengths.targets': 100}
    objective = make_objective('principle_sentences', vocabulary, **changes)
    names = [str(i) for i in range(2000)]
    records = [{'targets': vocabulary.encode_as_arrays([text])[0]}] * 2000
    num_masked = num_chosen = num_trimmed = 0
    counts = np.zeros(6)
    choices = set()
    for example in objective.examples(names, records, 0):
        assert len(example.targets) <= 100
        num_trimmed += example.is_trimmed
        answer = vocabulary.decode(example.targets)
        choices.add(answer)
        if not example.is_trimmed:
            counts[answer.count('.')] += 1
            num_chosen += answer.count('.')
            num_masked += np.count_nonzero(example.inputs == vocabulary.sentinel_ids[0])
        assert example.is_trimmed == (answer.count('.') > 3 or not answer.endswith('.'))
    assert len(choices) > 50
    # A share from 0.066 to 0.2 of 25 is 1.65 to 5 sentences, of which 5 has no probability.
    assert is_near(counts[1], 2000 * 0.35 / 3.35) and is_near(counts[2], 2000 / 3.35)
    assert num_trimmed == 2000 - counts.sum() and is_near(num_masked, 0.9 * num_chosen)


# Mode, noise, spans and raw ids of full rows of 512 - 5 ids of inputs. `random_spans_helper` has 758
# raw ids for the third, with 126 spans, but UL2 20B's vocabulary has 100 sentinels.
UL2_ROWS = [
    ('[NLU]', 84, 28, 562),
    ('[NLU]', 87, 11, 582),
    ('[NLG]', 301, 100, 602),
    ('[NLG]', 450, 56, 900),
    ('[NLG]', 89, 1, 594),
    ('[NLG]', 498, 8, 996),
]


def test_ul2s_denoisers_have_their_shares_and_their_noise():
    """R .4, X .4, S .2, equal inside a group. The lengths and the sentinels are UL2 20B's."""
    vocabulary = with_sentinels(100)
    objective = OBJECTIVES['ul2'](ul2.get_config('20b').data, vocabulary)
    names, records = group_of([800] * 110)
    counts = np.zeros(7)
    num_groups = 0
    num_others = 0
    while counts.sum() < 10_000:
        for example in objective.examples(names, records, num_groups):
            assert not example.is_trimmed
            mode, inputs = without_mode(example.inputs.tolist())
            row = (mode, *counts_of(example._replace(inputs=np.array(inputs))))
            if mode == '[S2S]':
                assert row[2] == 0 and 1 <= row[1] <= row[3] - 1 <= 505
                counts[6] += 1
            elif row in UL2_ROWS:
                counts[UL2_ROWS.index(row)] += 1
            else:
                num_others += 1
        num_groups += 1
    assert num_others <= num_groups  # the last row of a group is shorter
    shares = [0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.2]
    for count, share in zip(counts, shares, strict=True):
        assert is_near(count, share * counts.sum())


# Sentinels, modes and lengths.


def test_noise_ends_where_the_sentinels_do():
    vocabulary = with_sentinels(8)
    config = config_of('iid_denoising', **{'lengths.inputs': 32, 'noise_density': 0.3})
    objective = OBJECTIVES['iid_denoising'](config, vocabulary)
    assert objective.num_sentinels == 8
    names, records = group_of([800] * 110)
    most = 0
    for example in objective.examples(names, records, 0):
        text_of('iid_denoising', example)
        for ids in (example.inputs, example.targets):
            most = max(most, np.count_nonzero(ids >= FIRST_SENTINEL))
    assert most == 8
    config.lengths.inputs = 12  # then the sentinels are as many as spans can be
    assert OBJECTIVES['iid_denoising'](config, vocabulary).num_sentinels == 6


def test_targets_that_are_too_long_are_cut_and_counted():
    """LM adaptation has 1,024 and 256 tokens, and splits texts of 1,023."""
    objective = make_objective('prefix_lm', **{'lengths.targets': 20})
    names, records = group_of([400] * 20)
    examples = objective.examples(names, records, 0)
    assert len(set(example.is_trimmed for example in examples)) == 2
    for example in examples:
        assert example.targets[-1] == EOS
        text = np.array(text_of('prefix_lm', example))
        assert (np.diff(text) == 1).all() and (len(text) < 22 or example.inputs.size >= 2)
        if example.is_trimmed:
            assert len(example.targets) == 20


WITH_SENTINELS = ('principle_sentences', 'ul2', 'iid_denoising', 'mass_style', 'bert_style')
# Objectives, settings, and what the message names.
REFUSED = [
    ('ul2', {'lengths.targets': 114}, 'data.lengths.targets=114'),
    ('ul2', {'lengths.inputs': 4}, 'data.lengths.inputs=4'),
    ('iid_denoising', {'lengths.inputs': 2}, 'data.lengths.inputs=2'),
    ('iid_denoising', {'lengths.targets': 18}, 'data.lengths.targets=18'),
    (
        'iid_denoising',
        {'lengths.inputs': 1024, 'lengths.targets': 1024},
        'data.lengths.inputs=1024',
    ),
    ('drop_corrupted_tokens', {'lengths.targets': 10}, 'data.lengths.targets=10'),
    *[(name, {'lengths.targets': 63}, 'data.lengths.targets=63') for name in NOISE_AND_TEXT],
    ('prefix_lm', {'lengths.targets': 1}, 'data.lengths.targets=1'),
    ('pack_prefix_lm_encoder_decoder', {'lengths.inputs': 63}, 'data.lengths.inputs=63'),
    ('principle_sentences', {'lengths.targets': 1}, 'data.lengths.targets=1'),
    *[(name, {'extra_ids': 0}, 'data.extra_ids=0') for name in WITH_SENTINELS],
]


def test_settings_that_do_not_fit_are_refused(pydoc_model):
    for name, changes, named in REFUSED:
        extra_ids = changes.get('extra_ids', 100)
        vocabulary = vocabularies.SentencePieceVocabulary(pydoc_model, extra_ids)
        with pytest.raises(Refused, match=named):
            make_objective(name, vocabulary, **changes)
    letters = vocabularies.SentencePieceVocabulary(
        train_vocabulary(['only a few letters'] * 20, 16)
    )
    with pytest.raises(Refused, match='data.vocabulary'):
        make_objective('ul2', letters)


@pytest.mark.parametrize('name', ['drop_corrupted_tokens', 'deshuffling', 'prefix_lm', 'full_lm'])
def test_others_need_none(pydoc_model, name):
    plain = vocabularies.SentencePieceVocabulary(pydoc_model, extra_ids=0)
    assert make_objective(name, plain).num_sentinels == 0


@pytest.mark.parametrize('num_sentinels', [1, 2, 5, 99])
def test_fewer_sentinels_make_shorter_texts(num_sentinels):
    vocabulary = with_sentinels(num_sentinels)
    lengths = {'lengths.inputs': 512, 'lengths.targets': 512}
    objective = make_objective('ul2', vocabulary, **lengths)
    assert objective.num_sentinels == num_sentinels
    names, records = group_of([3000] * 3)
    for example in objective.examples(names, records, 0):
        text_of('ul2', example)
        assert np.count_nonzero(example.targets >= FIRST_SENTINEL) <= num_sentinels


# The stream.


# Pins the streams: numpy, Python and the machine have no part in them.
FIRST_BATCHES = {
    'span_corruption': 230638696,
    'iid_denoising': 2355336501,
    'drop_corrupted_tokens': 4234382335,
    'mass_style': 2780643079,
    'bert_style': 1756030118,
    'deshuffling': 4255175574,
    'principle_sentences': 3504453804,
    'prefix_lm': 2094069458,
    'lm': 3416866162,
    'full_lm': 4252558468,
    'ul2': 4119171372,
}


@pytest.mark.parametrize('name', FIRST_BATCHES)
def test_first_batches_are_the_same_on_every_machine(name):
    texts = [f'document {i} is about the number {i * i}' for i in range(300)]
    source = source_of([(str(i), text) for i, text in enumerate(texts)], 0.1)
    config = config_of(name, pack='tightly')
    stream = stream_of(source, 'train', vocabularies.ByteVocabulary(100), config, 4, 0)
    content = b''
    for _ in range(3):
        content += b''.join(array.tobytes() for array in next(stream).values())
    assert zlib.crc32(content) == FIRST_BATCHES[name]


@pytest.mark.parametrize('name', DENOISING)
def test_streams_resume_anywhere_and_have_no_empty_row(pydoc, vocabulary, name):
    source = source_of(documents_of(pydoc)[:200], 0.1)

    def open_stream(split='train'):
        return stream_of(source, split, vocabulary, config_of(name, pack='tightly'), 4, 0)

    stream = open_stream()
    positions = []
    batches = []
    for _ in range(12):
        positions.append(stream.position)
        batches.append(next(stream))
    resumed = open_stream()
    for i in (0, 5, 11):
        resumed.seek(positions[i])
        chex.assert_trees_all_equal(next(resumed), batches[i])
    for batch in [*batches, next(open_stream('validation'))]:
        assert batch['decoder_loss_weights'].any(axis=1).all()
        assert batch['encoder_input_tokens'].any(axis=1).all()
        text = batch['decoder_target_tokens']
        assert ((text > 2) & ~np.isin(text, stream.sentinel_ids)).any()


def test_objectives_mix_and_share_rows(vocabulary, pydoc):
    """Each example has inputs, so that the segments of a row are the same on both sides."""
    config = config_of('span_corruption', pack='tightly')
    source = source_of(documents_of(pydoc)[:200])
    opened = []
    for objective in ('lm', 'prefix_lm', 'span_corruption'):
        task = mixtures.Task(objective, objective=objective)
        opened.append(OpenTask(task, source))
    mixture = OpenMixture('all', tuple(opened), 'fingerprint')
    stream = Stream(mixture, 'train', vocabulary, config, batch_size=4, seed=0)
    num_alone = 0
    for _ in range(30):
        batch = next(stream)
        rows = zip(batch['encoder_segment_ids'], batch['decoder_segment_ids'], strict=True)
        for inputs, targets in rows:
            assert set(inputs[inputs > 0]) == set(targets[targets > 0])
            num_alone += (np.bincount(inputs[inputs > 0]) == 1).sum()
    assert num_alone > 0 and (stream.counts[:, 0] > 0).all()


def test_the_inputs_of_two_full_rows_fill_a_row():
    """T5 packs the two: of n ids each, one has p inputs and the other n - p."""
    objective = make_objective('pack_prefix_lm_encoder_decoder')
    examples = objective.examples(*group_of([64 * 20 + 7]), 7)
    sizes = [len(example.inputs) for example in examples if len(example.inputs) < 64]
    assert min(sizes) > 0
    assert [a + b for a, b in zip(sizes[:20:2], sizes[1:20:2], strict=True)] == [64] * 10
    assert len(set(sizes)) > 5
