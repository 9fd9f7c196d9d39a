"""Special ids of a family other than T5's: Gemma's tokenizer, BOS before inputs, several ends of answers, its sentinels.

golden/t5gemma_tokenizer: a tokenizer of Gemma's kind and the ids of sentencepiece and transformers; see its README.
"""

import json
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from corpora import make_config
from runs import assert_same_run, run, small_config, write_corpus
from sentencepiece import sentencepiece_model_pb2
from small_models import make_mesh, random_params, t5_config

import infer
from answers import filters
from answers.options import Decoding
from formats import own_model
from formats.vocabulary import files_of, find_vocabulary, mark_sentinels, named_vocabulary
from messages import Refused
from modes import evaluate as evaluate_mode
from modes import infer as infer_mode
from prepare import prepare
from tasks.objectives import OBJECTIVES
from vocabulary import Ends, SentencePieceVocabulary

GOLDEN = pathlib.Path(__file__).parent / 'golden/t5gemma_tokenizer'
FOLDERS = [GOLDEN, GOLDEN / 'as_saved']
TEXTS = json.loads((GOLDEN / 'texts.json').read_text())['texts']
PAD, EOS, BOS, UNK, TURN = 0, 1, 2, 3, 8  # TURN: <end_of_turn>
T5_ENDS = Ends(answers=(EOS,), inputs=((), (EOS,)))
OWN_MODEL = """
import dataclasses


@dataclasses.dataclass(frozen=True)
class Options:
    bos: bool = True
    eos: bool = False


def modules(family):
    def ends(c, t5):
        return t5._replace(
            answers=(*t5.answers, 8),
            inputs=((2,) * c.options.bos, t5.answers * c.options.eos),
            start=2,
        )

    return dataclasses.replace(family, ends=ends)
"""


@pytest.fixture(params=FOLDERS, ids=['tokenizer.model', 'tokenizer.json'])
def vocabulary(request):
    found = find_vocabulary(request.param)
    found.ends = T5_ENDS._replace(inputs=((BOS,), ()), answers=(EOS, TURN))
    return found


@pytest.fixture(scope='module')
def own_file(tmp_path_factory):
    file = tmp_path_factory.mktemp('ends') / 'gemma_ends.py'
    file.write_text(OWN_MODEL)
    return file


# Gemma's tokenizer.


@pytest.mark.parametrize('folder', FOLDERS)
def test_ids_and_texts_are_transformers(folder):
    for vocabulary in (find_vocabulary(folder), named_vocabulary('data.vocabulary', folder, 0)):
        assert (vocabulary.size, vocabulary.eos_id, vocabulary.unk_id) == (700, EOS, UNK)
        assert vocabulary.num_sentinels == 0
        for case in TEXTS:
            for glued in (False, True):
                [ids] = vocabulary.encode([case['text']], glued)
                assert ids == case['transformers_without_special'], case['text']
            assert vocabulary.decode(case['transformers']) == case['decoded_by_transformers']


def test_written_files_have_the_same_ids(vocabulary, tmp_path):
    for name, content in files_of(vocabulary).items():
        (tmp_path / name).write_bytes(content)
    config = json.loads((tmp_path / 'tokenizer_config.json').read_text())
    names = ('tokenizer_class', 'add_bos_token', 'add_eos_token')
    assert [config[name] for name in names] == ['GemmaTokenizer', True, False]
    again = find_vocabulary(tmp_path)
    assert again.size == 700
    for case in TEXTS:
        assert again.encode([case['text']]) == [case['transformers_without_special']]


@pytest.mark.slow
def test_transformers_opens_written_files(vocabulary, tmp_path):
    transformers = pytest.importorskip('transformers')
    for name, content in files_of(vocabulary).items():
        (tmp_path / name).write_bytes(content)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for case in TEXTS:
        assert tokenizer(case['text'])['input_ids'] == case['transformers']


@pytest.mark.parametrize(
    'eos, is_refused', [(1, False), ([1, 8], False), (8, True), ([8, 9], True)]
)
def test_several_ends_in_config(tmp_path, eos, is_refused):
    for name in ('tokenizer.model', 'tokenizer_config.json'):
        shutil.copy(GOLDEN / name, tmp_path)
    (tmp_path / 'config.json').write_text(json.dumps({'eos_token_id': eos}))
    if is_refused:
        with pytest.raises(Refused, match='eos_token_id'):
            find_vocabulary(tmp_path)
    else:
        find_vocabulary(tmp_path)


# Sentinels that are pieces of the table.


def with_unused(num_pieces):
    """A vocabulary of Gemma's kind that has <unused0> to <unusedN>."""
    proto = sentencepiece_model_pb2.ModelProto.FromString((GOLDEN / 'tokenizer.model').read_bytes())
    for i in range(1, num_pieces):
        proto.pieces.add(piece=f'<unused{i}>', type=proto.SentencePiece.USER_DEFINED)
    found = SentencePieceVocabulary(proto.SerializeToString(), extra_ids=0)
    found.ends = T5_ENDS._replace(inputs=((BOS,), ()))
    return found


def marked(num_pieces, pattern='<unused{}>'):
    found = with_unused(num_pieces)
    mark_sentinels(found, pattern)
    return found


def test_sentinels_are_the_pieces_of_a_pattern():
    vocabulary = marked(5)
    assert vocabulary.sentinel_ids.tolist() == [6, 700, 701, 702, 703]
    assert [vocabulary.pieces[i] for i in vocabulary.sentinel_ids][4] == '<unused4>'
    plain = with_unused(5)
    assert vocabulary.hash == plain.hash
    text = ['a<extra_id_1>']
    assert vocabulary.encode(text, glued_sentinels=True) == plain.encode(text)
    for pattern, count in (('', 0), ('<unused0>', 1), ('<none{}>', 0)):
        assert marked(5, pattern).num_sentinels == count


@pytest.mark.parametrize('pattern', ['', '<unused{}>', '<none{}>'])
@pytest.mark.parametrize('task', ['span_corruption', 'text_to_text_1_sentinel'])
def test_too_few_sentinels_are_refused(task, pattern):
    config = make_config(**{'lengths.inputs': 128, 'lengths.targets': 40})
    if task == 'span_corruption' or pattern != '<unused{}>':
        with pytest.raises(Refused, match='data.sentinels'):
            OBJECTIVES[task](config, marked(2, pattern))


# Objectives.


DOCUMENTS = [
    (f'{i}', 'of the test and of all texts. It is one, not two. ' * n)
    for i, n in enumerate((9, 2, 4, 7))
]
DENOISING = sorted(
    name for name in OBJECTIVES if 'text_to_text' not in name and 'trivia' not in name
)


@pytest.mark.parametrize('bos, eos', [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize('name', DENOISING)
def test_documents_become_rows_between_the_ends(name, bos, eos):
    vocabulary = marked(60)
    vocabulary.ends = T5_ENDS._replace(inputs=((BOS,) * bos, (EOS,) * eos))
    lengths = {'lengths.inputs': 32, 'lengths.targets': 32}
    objective = OBJECTIVES[name](make_config(**lengths), vocabulary)
    records = [{'targets': ids} for ids in vocabulary.encode_as_arrays([x for _, x in DOCUMENTS])]
    examples = objective.examples([x for x, _ in DOCUMENTS], records, 0)
    longest = max(len(x.inputs) for x in examples)
    is_lm = name in ('lm', 'full_lm')
    full_rows = name in ('full_lm', 'pack_prefix_lm_encoder_decoder')
    assert len(examples) > 4 and longest <= 32 and max(len(x.targets) for x in examples) <= 32
    if name in ('span_corruption', 'deshuffling', 'mass_style', 'bert_style'):
        assert longest == 32
    for example in examples:
        inputs = example.inputs.tolist()
        assert len(inputs) and (BOS in inputs) == bos
        if bos:
            assert inputs[0] == BOS and BOS not in inputs[1:]
        if not full_rows:
            assert (inputs[-1] == EOS) == eos and EOS not in inputs[:-1]
        if is_lm:
            assert inputs == [BOS] * bos + [EOS] * eos
        targets = example.targets.tolist()
        assert BOS not in targets and (full_rows or targets[-1] == EOS)


def test_T5s_rows_are_those_of_gemma_but_for_the_ends():
    """One id in front instead of one at the end: the same noise, from the same rows."""
    gemma = marked(60)
    t5 = marked(60)
    t5.ends = T5_ENDS
    texts = gemma.encode_as_arrays([x for _, x in DOCUMENTS])
    for name in DENOISING:
        found = []
        for vocabulary in (gemma, t5):
            objective = OBJECTIVES[name](
                make_config(**{'lengths.inputs': 32, 'lengths.targets': 32}), vocabulary
            )
            if name == 'pack_prefix_lm_encoder_decoder':  # it takes two ids less
                continue
            found.append(objective.examples(list('abcd'), [{'targets': ids} for ids in texts], 0))
        for ours, theirs in zip(*found, strict=True) if found else ():
            assert ours.targets.tolist() == theirs.targets.tolist()
            inputs = theirs.inputs.tolist()
            if inputs[-1:] == [EOS]:
                assert ours.inputs.tolist() == [BOS, *inputs[:-1]], name


def test_pairs_of_prefixes_fill_a_row():
    vocabulary = with_unused(2)
    config = make_config(**{'lengths.inputs': 32, 'lengths.targets': 32})
    objective = OBJECTIVES['pack_prefix_lm_encoder_decoder'](config, vocabulary)
    [ids] = vocabulary.encode_as_arrays(['of the test. ' * 200])
    examples = objective.examples(['a'], [{'targets': ids}], 0)
    for first, second in (examples[:2], examples[2:4]):
        assert len(first.inputs) + len(second.inputs) == 32
        assert len(first.targets) + len(second.targets) == 30


@pytest.mark.parametrize('bos, eos', [(True, False), (True, True), (False, True)])
def test_texts_get_their_ends_and_are_cut(vocabulary, bos, eos):
    vocabulary.ends = T5_ENDS._replace(inputs=((BOS,) * bos, (EOS,) * eos))
    config = make_config(**{'lengths.inputs': 6, 'lengths.targets': 4})
    pairs = [('', 'it'), ('Hello', 'world is one'), ('Hello world, and more', '')]
    records = []
    for inputs, targets in pairs:
        ids = vocabulary.encode_as_arrays([inputs, targets])
        records.append({'inputs': ids[0], 'targets': ids[1]})
    examples = OBJECTIVES['text_to_text'](config, vocabulary).examples(list('abc'), records)
    for record, example in zip(records, examples, strict=True):
        inputs = [BOS] * bos + record['inputs'].tolist()
        is_cut = len(inputs) + eos > 6 or len(record['targets']) + 1 > 4
        assert example.inputs.tolist() == inputs[: 6 - eos] + [EOS] * eos
        assert example.targets.tolist() == record['targets'].tolist()[:3] + [EOS]
        assert example.is_trimmed == is_cut
    prompted = OBJECTIVES['prompted_text_to_text'](config, vocabulary).examples(
        list('abc'), records
    )
    assert prompted[0].inputs.tolist() == ([BOS] if bos else [EOS])
    assert prompted[1].inputs.tolist() == ([BOS] * bos + records[1]['inputs'].tolist())[:6]


def test_a_sentinel_ends_inputs_that_have_no_EOS():
    vocabulary = marked(1)
    config = make_config(**{'lengths.inputs': 5, 'lengths.targets': 5})
    objective = OBJECTIVES['text_to_text_1_sentinel'](config, vocabulary)
    for ids, expected in (([50, 51], [BOS, 50, 51, 6]), ([50, 51, 52, 53], [BOS, 50, 51, 52, 6])):
        record = {'inputs': np.array(ids, np.int32), 'targets': np.array([9], np.int32)}
        [example] = objective.examples(['a'], [record])
        assert example.inputs.tolist() == expected and example.targets.tolist() == [6, 9, EOS]


# A model that has such ends.


def model_of(own_file, vocabulary, **options):
    config = own_model.as_family(t5_config(vocab_size=704), str(own_file), options)
    return infer.T5(config, random_params(config), make_mesh(1, 1), vocabulary)


def test_texts_of_a_model(own_file):
    t5 = model_of(own_file, find_vocabulary(GOLDEN))
    ids = {case['text']: case['transformers'] for case in TEXTS}
    hello, nothing = ids['Hello world'], ids['']
    of_ids = t5.encode([hello, nothing])
    for ours, theirs in zip(t5.encode(['Hello world', '']), of_ids, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    targets = t5.vocabulary.encode(['it is'])[0]
    score = t5.score(['Hello world'], ['it is'])
    np.testing.assert_array_equal(score, t5.score([hello], [[*targets, EOS]]))
    assert t5.generate(['Hello world']) == t5.generate([hello], return_scores=True).texts
    t5.max_input_length = len(hello)
    t5.encode(['Hello world'])
    with pytest.raises(Refused, match='max_input_length'):
        t5.encode(['Hello world.'])
    cut, _ = t5.encode(['Hello world...'], trim=True)
    assert cut.shape[1] == len(hello)
    np.testing.assert_array_equal(cut, t5.encode([hello])[0])


def often_turn(logits_rv, tokens_rT, ids_v):
    """A filter: TURN is likely from the third token on, EOS never."""
    is_late_r1 = ((tokens_rT >= 0).sum(axis=1) > 3)[:, None]
    logits_rv = jnp.where((ids_v == TURN)[None] & is_late_r1, logits_rv + 6.0, logits_rv)
    return jnp.where((ids_v == EOS)[None], -jnp.inf, logits_rv)


@pytest.mark.parametrize('options', [{}, {'temperature': 3.0}, {'beam_size': 2}])
def test_answers_end_at_any_of_the_ends(own_file, options):
    """Answers are those of a model without the second end, cut there."""
    t5 = model_of(own_file, find_vocabulary(GOLDEN))
    inputs = np.random.default_rng(0).integers(4, 700, (24, 5)).tolist()
    options |= {'max_length': 12, 'return_scores': True, 'filters': (often_turn,)}
    answers = t5.generate(inputs, **options)
    ended = [len(row) < 12 for row in answers.tokens]
    assert 2 < sum(ended)
    for row, text in zip(answers.tokens, answers.texts, strict=True):
        assert TURN not in row and text == t5.vocabulary.decode(row)
    t5.ends = t5.ends._replace(answers=(EOS,))
    if 'beam_size' not in options:
        for row, longer in zip(answers.tokens, t5.generate(inputs, **options).tokens, strict=True):
            assert row == longer[: [*longer, TURN].index(TURN)]


def test_prompts_begin_answers(own_file):
    t5 = model_of(own_file, find_vocabulary(GOLDEN))
    text = 'it <start_of_turn>'
    [ids] = t5.vocabulary.encode([text])
    [answer] = t5.generate(['Hello'], prompts=[text], max_length=len(ids) + 2)
    assert answer.startswith(text)
    found = t5.generate([[BOS, 50]], prompts=[ids], max_length=len(ids) + 2, return_scores=True)
    assert found.tokens[0][: len(ids)] == ids


def test_filters_see_the_start_and_all_ends():
    """As transformers: the penalty falls on the start token, 2, not on 0; no end comes too early."""
    ends = T5_ENDS._replace(answers=(EOS, TURN), start=BOS)
    rows = {'prompt_bT': jnp.zeros((1, 4), jnp.int32)}
    logits = jnp.ones((1, 12))
    tokens = jnp.array([[0, 5, 6, -1, -1]])
    ids = jnp.arange(12)

    def changed(ends, **options):
        [change] = filters.filters_of(Decoding(**options), rows, ends)
        return np.flatnonzero(np.asarray(change(logits, tokens, ids))[0] != 1).tolist()

    assert changed(ends, repetition_penalty=2.0) == [BOS, 5, 6]
    assert changed(T5_ENDS, repetition_penalty=2.0) == [0, 5, 6]
    assert changed(ends, min_length=3) == [EOS, TURN]
    assert changed(ends, min_length=2) == []
    assert changed(T5_ENDS, min_length=3) == [EOS]


# Runs.


@pytest.fixture(scope='module')
def run_of(own_file):
    """A run of three steps of span corruption, and its config."""
    folder = own_file.parent
    (folder / 'tokenizer.model').write_bytes(with_unused(20).model)
    config = small_config(write_corpus(folder), steps=3)
    config.model.vocab_size = 768
    config.model.module = str(own_file)
    config.data.vocabulary = str(folder / 'tokenizer.model')
    config.data.extra_ids = 0
    config.data.sentinels = '<unused{}>'
    return run(config, folder / 'run'), config


def test_a_run_reads_rows_with_such_ends(run_of, tmp_path):
    workdir, config = run_of
    config = config.copy_and_resolve_references()
    config.train.steps = 6
    batch = next(prepare(config, tmp_path / 'new').stream)
    inputs, targets = batch['encoder_input_tokens'], batch['decoder_target_tokens']
    is_first = batch['encoder_positions'] == 0
    assert ((inputs == BOS) == (is_first & (inputs > 0))).all() and not (inputs == EOS).any()
    assert set(targets[:, 0].tolist()) == {6} and (targets == EOS).any()
    assert (batch['decoder_input_tokens'][:, 0] == 0).all()
    assert np.isin(inputs, [700, 701]).any()
    shutil.copytree(workdir, tmp_path / 'resumed')
    assert_same_run(run(config, tmp_path / 'resumed'), run(config, tmp_path / 'at once'), 6)
    config.data.sentinels = ''
    with pytest.raises(Refused, match='data/sentinels'):
        prepare(config, tmp_path / 'resumed')


def test_modes_answer_a_run(run_of, tmp_path):
    workdir, config = run_of
    [hello] = [case['transformers'] for case in TEXTS if case['text'] == 'Hello world']
    t5 = infer.load(workdir)
    assert t5.ends == t5.vocabulary.ends == Ends((EOS, TURN), ((BOS,), ()), BOS)
    np.testing.assert_array_equal(t5.encode(['Hello world'])[0], t5.encode([hello])[0])
    job = infer_mode.Job(infer_mode.Request(str(workdir), text='Hello world'), None, {})
    assert job.text_ids.tolist() == hello
    file = tmp_path / 'questions.jsonl'
    file.write_text(json.dumps({'inputs': 'Hello world', 'targets': 'it'}) + '\n')
    other = tmp_path / 'other.jsonl'
    other.write_text(json.dumps({'inputs': 'Hello', 'targets': 'that'}) + '\n')
    request = infer_mode.Request(str(workdir), input=str(file), score=True)
    [part] = infer_mode.Job(request, None, {}).parts
    [question] = part.examples
    assert question.inputs.tolist() == hello
    assert question.targets.tolist() == [*t5.vocabulary.encode(['it'])[0], EOS]
    changes = {
        'data.files': str(other),
        'data.validation_files': str(file),
        'data.metrics': 'accuracy',
    }
    changes |= {'data.inputs': '{inputs}', 'data.targets': '{targets}'}
    for checkpoint in (workdir, workdir / 'checkpoint_3'):
        evaluation = evaluate_mode.prepare(None, changes, str(checkpoint), str(tmp_path / 'out'))
        [example] = evaluation.tasks[0].examples
        assert example.inputs.tolist() == hello
    # Watched from before its first checkpoint.
    begun = tmp_path / 'begun'
    shutil.copytree(workdir, begun, ignore=shutil.ignore_patterns('checkpoint_*'))
    evaluation = evaluate_mode.prepare(
        None, changes, str(begun), str(tmp_path / 'watched'), watch=True
    )
    [example] = evaluation.tasks[0].examples
    assert example.inputs.tolist() == hello
