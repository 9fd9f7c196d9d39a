"""`--mode=infer`: its lines are T5X's; kills and shards change no line; what it refuses.

golden/seqio_t5/infer_jsonl: spec.json has examples, ids and scores, and the other files are what T5X's
infer.py writes of them.
"""

import codecs
import contextlib
import gzip
import io
import itertools
import json
import os
import pathlib
import pty
import shutil
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pyarrow.parquet
import pytest
from corpora import oracle
from faults import contents
from forms import first_quick
from permissions import another_user
from runs import ENVIRONMENT
from safetensors.numpy import load_file
from small_models import assert_close

import checkpoint as checkpoints
import formats.open
import infer
import vocabulary as vocabularies
from configs import check
from messages import Refused
from modes import infer as infer_mode
from modes import process
from run.lock import lock
from run.train_vocabulary import train_vocabulary

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / 'tests/golden'
T5X = GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6'
ORACLE = GOLDEN / 'seqio_t5/infer_jsonl'
SPEC = json.loads((ORACLE / 'spec.json').read_text())
CHANGES = {
    'data.vocabulary': 'bytes',
    'data.lengths.inputs': 32,
    'data.lengths.targets': 32,
    'decode.batch_size': 4,
    'decode.max_length': 8,
}
MODULE = """
from tasks import Mixture, Task

TASKS = [
    Task('sums', files='FOLDER/a.csv', validation_files='FOLDER/b.csv', inputs='add: {a}', targets='{b}'),
    Task('text', files='FOLDER/a.csv', objective='span_corruption'),
    Mixture('both', {'sums': 1.0, 'sums2': 1.0}),
    Task('sums2', files='FOLDER/a.csv', validation_files='FOLDER/b.csv', inputs='{b}', targets='{a}'),
]
"""


@pytest.fixture(scope='module')
def t5():
    return infer.load(T5X, vocabulary='bytes')


@pytest.fixture
def loaded(t5, monkeypatch):
    """Jobs use the same model, whose programs are compiled once."""
    monkeypatch.setattr(infer_mode, 'load', lambda job: t5)


def write_examples(folder, num_examples=20):
    """Write JSON Lines of several lengths. Return the file and its content."""
    rng = np.random.default_rng(0)
    content = []
    for i in range(num_examples):
        inputs = f'é{i}' + ' word' * int(rng.integers(0, 5))
        targets = f'{i}' + ' x' * int(rng.integers(0, 5))
        content.append({'inputs': inputs, 'targets': targets, 'idx': i})
    file = folder / 'questions.jsonl'
    file.write_text('\n'.join(json.dumps(example) for example in content))
    return file, content


def write_encoder(folder):
    """Write an encoder alone, in T5X's layout. Return its folder."""
    opened = formats.open.open_checkpoint(T5X, part='encoder')
    return checkpoints.save(folder, 6, opened.leaves)


def do(changes=CHANGES, checkpoint=T5X, **request):
    job = infer_mode.Job(infer_mode.Request(str(checkpoint), **request), None, changes)
    return infer_mode.infer_all(job)


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


# The lines.


def oracle_answers(model, decoding, examples, num_rows):
    """The ids and scores of spec.json; `model`: {ids of inputs: row}, and the vocabulary."""
    by_inputs, vocabulary = model
    for example in examples:
        row = by_inputs[tuple(example.inputs.tolist())]
        ids = np.trim_zeros(SPEC['predicted_ids'][row], 'b')
        yield infer.Answer([ids], [vocabulary.decode(ids)], [SPEC['scores'][row]])


def oracle_scores(model, examples, num_rows):
    for example in examples:
        yield np.array([SPEC['scores'][model[0][tuple(example.inputs.tolist())]]])


@pytest.mark.parametrize('name', SPEC['modes'])
def test_the_lines_are_T5Xs(tmp_path, monkeypatch, name):
    shutil.copy(oracle('sentencepiece/sentencepiece.model'), tmp_path / 'spiece.model')
    with (tmp_path / 'task.jsonl').open('w') as task:
        for row in SPEC['rows']:
            texts = {feature: row[f'{feature}_pretokenized'] for feature in ('inputs', 'targets')}
            task.write(json.dumps({**texts, 'idx': row['idx']}) + '\n')
    by_inputs = {tuple(row['inputs']): i for i, row in enumerate(SPEC['rows'])}
    monkeypatch.setattr(infer_mode, 'load', lambda job: (by_inputs, job.vocabulary))
    monkeypatch.setattr(infer, 'answer_batch', oracle_answers)
    monkeypatch.setattr(infer, 'score_batch', oracle_scores)
    settings = SPEC['modes'][name]
    fields = tuple(settings.get('input_fields_to_include', []))
    if settings.get('include_all_inputs'):
        fields = ('all',)
    changes = CHANGES | {
        'data.vocabulary': str(tmp_path),
        'data.extra_ids': 0,
        'decode.return_scores': name == 'predict_with_aux.jsonl',
    }
    do(
        changes,
        input=str(tmp_path / 'task.jsonl'),
        output_dir=str(tmp_path / 'out'),
        score=name == 'score.jsonl',
        fields=fields,
        output_ids=settings.get('output_ids', False),
    )
    mode = 'predict' if name.startswith(('predict_ids', 'predict_fields')) else name[:-6]
    file = tmp_path / f'out/task-{mode}.jsonl'
    found = lines_of(file)
    assert found == lines_of(ORACLE / name)
    # The oracle was given examples with the fields of spec.json. SeqIO's tokenize writes each text in
    # front of its ids.
    order = ['inputs_pretokenized', 'inputs', 'targets_pretokenized', 'targets', 'idx']
    for line, expected in zip(found, lines_of(ORACLE / name), strict=True):
        assert list(line) == list(expected)
        assert list(line['inputs']) == sorted(expected['inputs'], key=order.index)
    assert contents(tmp_path / 'out').keys() == {'infer.json', file.name}


def test_answers_are_those_of_generate_and_in_the_order_of_the_lines(
    tmp_path, t5, loaded, monkeypatch, capsys
):
    """On standard output as in files."""
    monkeypatch.setattr('answers.batches.EXAMPLES_PER_CHUNK', 8)
    file, content = write_examples(tmp_path)
    inputs = [example['inputs'] for example in content]
    do(input=str(file), output_dir=str(tmp_path / 'out'))
    found = lines_of(tmp_path / 'out/questions-predict.jsonl')
    assert [line['inputs']['inputs_pretokenized'] for line in found] == inputs
    expected = []
    for start in range(0, len(inputs), 4):
        expected += t5.generate(inputs[start : start + 4], max_length=8)
    assert [line['prediction'] for line in found] == expected
    do(input=str(file))
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == found


def test_fields_keep_their_order_and_numbers_their_kind(tmp_path, loaded, capsys):
    """Other fields stay where they are, and in front of texts that are made of them."""
    (tmp_path / 'a.jsonl').write_text(
        '{"idx": 3, "inputs": "ab", "weight": 1.0, "targets": "c", "tags": [1, {"x": 2}], "n": null}'
    )
    do(input=str(tmp_path / 'a.jsonl'), fields=('all',), score=True)
    line = capsys.readouterr().out
    assert line.startswith(
        '{"inputs": {"idx": 3, "inputs_pretokenized": "ab", "inputs": [100, 101, 1], "weight": 1.0, '
        '"targets_pretokenized": "c", "targets": [102, 1], "tags": [1, {"x": 2}], "n": null}, "score": '
    )
    (tmp_path / 'a.csv').write_text('q,n\nab,1\n')
    changes = CHANGES | {'data.inputs': '{q}', 'data.targets': '{n}'}
    do(changes, input=str(tmp_path / 'a.csv'), fields=('all',))
    names = list(json.loads(capsys.readouterr().out)['inputs'])
    assert names == ['q', 'n', 'inputs_pretokenized', 'inputs', 'targets_pretokenized', 'targets']


def test_several_answers_are_lists(tmp_path, loaded, monkeypatch, capsys):
    (tmp_path / 'a.txt').write_text('c')
    tokens = [[100, 1], [101], [100, 0, 102, 1]]
    texts = list(map(vocabularies.ByteVocabulary().decode, tokens))
    answer = infer.Answer(tokens=tokens, texts=texts, scores=[-1.0, -2.0, -3.0])
    monkeypatch.setattr(infer, 'answer_batch', lambda *arguments: [answer])
    several = {'decode.return_scores': True, 'decode.beam_size': 3, 'decode.num_return': 3}
    do(CHANGES | several, input=str(tmp_path / 'a.txt'), output_ids=True)
    found = json.loads(capsys.readouterr().out)
    del found['inputs']
    assert found == {
        'prediction': ['a', 'b', 'ac'],  # padding within an answer decodes to nothing
        'prediction_tokens': [[100, 1], [101], [100]],  # and ends T5X's tokens
        'aux': {'scores': [-1.0, -2.0, -3.0]},
    }


def test_scores_are_those_of_score(tmp_path, t5, loaded):
    file, content = write_examples(tmp_path)
    do(input=str(file), output_dir=str(tmp_path / 'out'), score=True, fields=('idx',))
    found = lines_of(tmp_path / 'out/questions-score.jsonl')
    expected = []
    for start in range(0, len(content), 4):
        group = content[start : start + 4]
        expected += list(t5.score([x['inputs'] for x in group], [x['targets'] for x in group]))
    np.testing.assert_allclose([line['score'] for line in found], expected, rtol=1e-5)
    assert [line['inputs'] for line in found] == [{'idx': i} for i in range(len(content))]


TEXTS = ['one', ' two  words ', 'drei ß', '4']
TEXT = '\ufeffone\r\n two  words \ndrei ß\n4'.encode()
OBJECTS = '\n'.join(json.dumps({'inputs': text}) for text in TEXTS).encode()
TABLE = '\ufeffq,c\r\n"who, ""she""?", first\r\n"a\nb",ß\r\n'.encode()
IN_TABLE = ['who, "she"?|first', 'a\nb|ß']
COLUMNS = {'data.inputs': '{q}|{c}', 'data.targets': '{answer}'}
FORMS = [
    ('in.txt', TEXT, {}, TEXTS),
    ('in.txt.gz', gzip.compress(TEXT, mtime=0), {}, TEXTS),
    ('-', TEXT, {}, TEXTS),
    ('-', OBJECTS, {}, TEXTS),
    ('-', b' ' + OBJECTS.removeprefix(codecs.BOM_UTF8), {}, TEXTS),
    ('-', codecs.BOM_UTF8 + OBJECTS.removeprefix(codecs.BOM_UTF8), {}, TEXTS),
    (
        'in.jsonl',
        OBJECTS,
        {'data.inputs': 'say: {inputs}', 'data.targets': '{other}'},
        [f'say: {text}' for text in TEXTS],
    ),
    ('in.csv', TABLE, COLUMNS, IN_TABLE),
    ('in.csv.gz', gzip.compress(TABLE, mtime=0), COLUMNS, IN_TABLE),
    ('in.tsv', 'q\tc\n"who\t first \nb\tß'.encode(), COLUMNS, ['"who|first', 'b|ß']),
]


@pytest.mark.parametrize('name, content, changes, expected', FORMS)
def test_forms_of_input(tmp_path, loaded, monkeypatch, capsys, name, content, changes, expected):
    """Windows line ends and a byte order mark are no text; a last line needs no line end.

    The targets may be missing. In CSV a quoted field may hold commas and newlines.
    """
    if name == '-':
        stdin = types.SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content)))
        monkeypatch.setattr(sys, 'stdin', stdin)
    else:
        name = str(tmp_path / name)
        pathlib.Path(name).write_bytes(content)
    do(CHANGES | changes, input=name)
    found = [json.loads(line)['inputs'] for line in capsys.readouterr().out.splitlines()]
    assert found == [{'inputs_pretokenized': text} for text in expected]


def test_parquet_is_read_as_in_training(tmp_path, loaded, capsys):
    """Bytes are texts, and only the columns that are named are read."""
    table = {
        'q': ['a', 'b', 'ß'],
        'n': [1.0, None, 3.0],
        'image': [b'\xff', None, b'\xfe'],
        'targets': ['x', 'y', 'z'],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / 'a.parquet', row_group_size=2)
    request = {'input': str(tmp_path / 'a.parquet'), 'score': True}
    do(CHANGES | {'data.inputs': 'say: {q}'}, fields=('n',), **request)
    found = [json.loads(line)['inputs'] for line in capsys.readouterr().out.splitlines()]
    assert found == [{'n': 1.0}, {'n': None}, {'n': 3.0}]
    do(CHANGES | {'data.inputs': 'say: {q}'}, **request)
    found = [json.loads(line)['inputs'] for line in capsys.readouterr().out.splitlines()]
    assert found[2] == {'inputs_pretokenized': 'say: ß', 'targets_pretokenized': 'z'}
    with pytest.raises(Refused, match="a.parquet .*'x'"):
        do(CHANGES | {'data.inputs': '{x}', 'data.targets': '{x}'}, **request)
    with pytest.raises(Refused, match=r"row 2 of .*a.parquet: field 'n'"):
        do(CHANGES | {'data.inputs': '{n}'}, **request)


@pytest.mark.parametrize(
    'of_run, name, content, changes',
    [
        ({'kind': 'csv'}, 'a.jsonl', '{"inputs": "o, ne"}', {}),
        ({'kind': 'tsv'}, 'a.data', 'inputs\n"o, ne"\n', {'data.kind': 'csv'}),
        ({'delimiter': 'tab'}, 'a.csv', 'n,inputs\n1,"o, ne"\n', {}),
        ({'delimiter': 'tab'}, 'a.csv', 'n;inputs\n1;"o, ne"\n', {'data.delimiter': ';'}),
    ],
)
def test_the_form_of_input_is_not_that_of_the_files_of_the_run(
    tmp_path, loaded, capsys, monkeypatch, of_run, name, content, changes
):
    monkeypatch.setattr(check, 'read_stored', lambda directory: {'data': of_run})
    (tmp_path / name).write_text(content)
    do(CHANGES | changes, input=str(tmp_path / name))
    line = json.loads(capsys.readouterr().out)
    assert line['inputs'] == {'inputs_pretokenized': 'o, ne'}


def write_tasks(folder):
    for name, first in (('a', 0), ('b', 5)):
        rows = [f'{i},{"x" * i}z' for i in range(first, first + 5)]
        (folder / f'{name}.csv').write_text('\n'.join(['a,b', *rows]))
    (folder / 'my_tasks.py').write_text(MODULE.replace('FOLDER', str(folder)))
    return {'data.module': str(folder / 'my_tasks.py')}


def test_a_file_takes_the_templates_of_the_task_of_the_run(tmp_path, loaded, monkeypatch, capsys):
    """Settings come first, as in a run."""
    of_run = {name.removeprefix('data.'): x for name, x in write_tasks(tmp_path).items()}
    of_run['task'] = 'sums'
    monkeypatch.setattr(check, 'read_stored', lambda directory: {'data': of_run})
    (tmp_path / 'new.jsonl').write_text('{"a": 7, "b": "8", "c": 9}')
    for changes, inputs, targets in [
        ({}, 'add: 7', '8'),
        ({'data.targets': '{c}!'}, 'add: 7', '9!'),
        ({'data.inputs': '{c}'}, '9', None),
        ({'data.task': 'sums2'}, '8', '7'),
    ]:
        do(CHANGES | changes, input=f'{tmp_path}/new.jsonl', fields=('all',))
        found = json.loads(capsys.readouterr().out)['inputs']
        assert found['inputs_pretokenized'] == inputs
        assert found.get('targets_pretokenized') == targets
    with pytest.raises(Refused, match="'a'"):
        (tmp_path / 'new.csv').write_text('c,d\n1,2')
        do(CHANGES, input=f'{tmp_path}/new.csv')


def test_a_mixture_is_inferred_task_by_task_and_cut_as_in_training(tmp_path, loaded):
    changes = CHANGES | write_tasks(tmp_path) | {'data.task': 'both', 'data.lengths.targets': 8}
    folder = tmp_path / 'out'
    messages = do(changes, output_dir=str(folder), split='validation', score=True, fields=('all',))
    assert messages == [
        '3 of 5 examples of sums (60.0%) were cut to data.lengths.',
        f'The results are in {folder / "sums-score.jsonl"}',
        f'The results are in {folder / "sums2-score.jsonl"}',
    ]
    found = lines_of(folder / 'sums-score.jsonl')
    texts = [line['inputs']['inputs_pretokenized'] for line in found]
    assert texts == [f'add: {i}' for i in range(5, 10)]
    assert [len(line['inputs']['targets']) for line in found] == [7, 8, 8, 8, 8]
    found = lines_of(folder / 'sums2-score.jsonl')
    assert [line['inputs']['targets_pretokenized'] for line in found] == list('56789')
    folder = tmp_path / 'encodings'
    do(changes, output_dir=str(folder), split='validation', encode=True, pool='mean')
    for name in ('sums', 'sums2'):
        arrays = load_file(folder / f'{name}-encodings-00000-of-00001.safetensors')
        assert arrays['indices'].tolist() == list(range(5))


# Kills and shards.


class Killed(BaseException):
    pass


def kill_at(step, monkeypatch):
    """Let the process die before change number `step` of a file."""
    count = itertools.count(1)

    def dying(change):
        def changed(*arguments, **keywords):
            if next(count) == step:
                raise Killed
            return change(*arguments, **keywords)

        return changed

    for owner, names in ((pathlib.Path, ('replace', 'mkdir', 'unlink')), (os, ('fsync',))):
        for name in names:
            monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.fixture
def questions(tmp_path):
    """A file of 20 examples."""
    return str(write_examples(tmp_path)[0])


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks and files of 8 examples."""
    monkeypatch.setattr('answers.batches.EXAMPLES_PER_CHUNK', 8)
    for pool in infer_mode.EXAMPLES_PER_FILE:
        monkeypatch.setitem(infer_mode.EXAMPLES_PER_FILE, pool, 8)


@pytest.fixture
def computed(monkeypatch):
    """A list that grows by the numbers of the examples of each file that is scored or encoded."""
    files = []
    in_batches = infer.in_batches

    def counted(compute, examples, *arguments):
        files.append([example.number for example in examples])
        return in_batches(compute, examples, *arguments)

    monkeypatch.setattr(infer, 'in_batches', counted)
    return files


@pytest.mark.slow
@pytest.mark.parametrize(
    'kind, least_kills',
    first_quick([({'score': True, 'fields': ('idx',)}, 5), ({'encode': True}, 9)]),
)
def test_a_kill_at_any_change_of_a_file_changes_nothing(
    tmp_path, loaded, questions, small_chunks, computed, monkeypatch, kind, least_kills
):
    """A file that was finished is not computed again."""
    request = {'input': questions, **kind}
    do(**request, output_dir=str(tmp_path / 'whole'))
    expected = contents(tmp_path / 'whole')
    num_files = len(computed)
    for step in range(1, 1000):
        folder = tmp_path / f'killed{step}'
        with monkeypatch.context() as patch:
            kill_at(step, patch)
            with contextlib.suppress(Killed):
                do(**request, output_dir=str(folder))
                break
        num_finished = len(list(folder.glob('questions-*')))
        computed.clear()
        do(**request, output_dir=str(folder))
        assert len(computed) == num_files - num_finished
        assert contents(folder) == expected
    assert step - 1 > least_kills


def test_shards(tmp_path, loaded, computed):
    """Each has every n-th example."""
    num_shards = 3
    file, content = write_examples(tmp_path)
    request = {'input': str(file), 'score': True, 'fields': ('idx',)}
    do(**request, output_dir=str(tmp_path / 'whole'))
    expected = lines_of(tmp_path / 'whole/questions-score.jsonl')
    folder = tmp_path / 'parts'
    request |= {'output_dir': str(folder), 'num_shards': num_shards}
    for shard in range(1, num_shards + 1):
        [message] = do(**request, shard=shard)
        name = f'questions-score.jsonl-{shard - 1:05}-of-{num_shards:05}'
        assert message == f'The results are in {folder / name}'
        found = lines_of(folder / name)
        own = expected[shard - 1 :: num_shards]
        assert [line['inputs'] for line in found] == [line['inputs'] for line in own]
        scores = [line['score'] for line in found]
        np.testing.assert_allclose(scores, [line['score'] for line in own], rtol=1e-5)
    assert len(contents(folder)) == num_shards + 1
    computed.clear()
    do(**request, shard=2)
    assert not computed


# Encodings.


@pytest.mark.parametrize(
    'num_shards',
    [
        3,
        pytest.param(30, marks=pytest.mark.slow),
        pytest.param(1, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
@pytest.mark.parametrize('pool', ['none', 'mean'])
def test_encodings(tmp_path, loaded, t5, monkeypatch, pool, num_shards):
    """Of all shards together they are those of `T5.encode`, each with the number of its example."""
    monkeypatch.setitem(infer_mode.EXAMPLES_PER_FILE, pool, 3)
    file, content = write_examples(tmp_path)
    folder = tmp_path / 'out'
    request = {'input': str(file), 'encode': True, 'pool': pool, 'output_dir': str(folder)}
    for shard in range(num_shards, 0, -1):
        [message] = do(**request, shard=shard, num_shards=num_shards)
        assert message == f'The encodings of questions are in {folder}'
    files = sorted(folder.glob('*.safetensors'))
    assert [file.name for file in files] == [
        f'questions-encodings-{i:05}-of-{len(files):05}.safetensors' for i in range(len(files))
    ]
    assert len(files) == {1: 7, 3: 8, 30: 20}[num_shards]
    outputs, mask = t5.encode([example['inputs'] for example in content])
    numbers = []
    for file in files:
        arrays = load_file(file)
        assert arrays['embeddings'].dtype == np.float32
        indices = arrays['indices'].tolist()
        numbers += indices
        if pool == 'mean':
            expected = np.stack([outputs[i, mask[i]].mean(axis=0) for i in indices])
        else:
            np.testing.assert_array_equal(arrays['lengths'], mask[indices].sum(axis=1))
            expected = np.concatenate([outputs[i, mask[i]] for i in indices])
        assert_close(arrays['embeddings'], expected, 1e-5)
    shards = [list(range(shard, 20, num_shards)) for shard in range(min(num_shards, 20))]
    assert numbers == [number for shard in shards for number in shard]


# What is refused, before anything is written.


def test_results_of_other_settings_are_not_mixed(tmp_path, loaded):
    file, _ = write_examples(tmp_path, num_examples=4)
    folder = tmp_path / 'out'
    request = {'input': str(file), 'output_dir': str(folder)}
    do(**request)
    before = contents(folder)
    for changes, more, named in [
        ({'decode.beam_size': 2}, {}, 'decode/beam_size: 1 -> 2'),
        ({}, {'score': True}, "mode: 'predict' -> 'score'"),
        ({}, {'encode': True}, "mode: 'predict' -> 'encode_none'"),
        ({}, {'shard': 1, 'num_shards': 2}, 'num_shards: 1 -> 2'),
        ({}, {'checkpoint': GOLDEN / 't5x_t5_1_1_tiny/checkpoint_0'}, 'checkpoint/path: '),
    ]:
        with pytest.raises(Refused, match=named):
            do(CHANGES | changes, **request, **more)
    file.write_text('{"inputs": "another"}')
    with pytest.raises(Refused, match='examples/questions: '):
        do(**request)
    assert contents(folder) == before
    (folder / 'infer.json').unlink()
    with pytest.raises(Refused, match='questions-predict.jsonl'):
        do(**request)


def test_results_of_a_model_that_was_exchanged_are_not_taken(tmp_path, loaded):
    """Nor those of adapters whose base was. Results in the model's own folder are no part of it."""
    file, _ = write_examples(tmp_path, num_examples=4)
    base = shutil.copytree(GOLDEN / 'hf_t5_1_1', tmp_path / 'base')
    adapters = shutil.copytree(GOLDEN / 'peft/rslora', tmp_path / 'adapters')
    settings = json.loads((adapters / 'adapter_config.json').read_text())
    settings['base_model_name_or_path'] = str(base)
    (adapters / 'adapter_config.json').write_text(json.dumps(settings))
    single = tmp_path / 'single.safetensors'
    shutil.copy(base / 'model.safetensors', single)
    t5x = shutil.copytree(T5X, tmp_path / 'checkpoint_6')
    (t5x / 'manifest.json').unlink(missing_ok=True)
    array = next(t5x.glob('target.*/0.0'))
    for model, exchanged in [
        (base, base / 'model.safetensors'),
        (base, base / 'config.json'),
        (single, single),
        (adapters, adapters / 'adapter_model.safetensors'),
        (adapters, base / 'model.safetensors'),
        (t5x, array),
    ]:
        folder = model if model == base else tmp_path / f'out-{model.name}'
        request = {'checkpoint': model, 'input': str(file), 'output_dir': str(folder)}
        do(**request)
        do(**request)
        time_ns = exchanged.stat().st_mtime_ns
        os.utime(exchanged, ns=(0, time_ns + 1))
        with pytest.raises(Refused, match='checkpoint/files: .*: name another folder'):
            do(**request)
        os.utime(exchanged, ns=(0, time_ns))


def test_a_shard_is_written_by_one_process(tmp_path, loaded, questions):
    with lock(tmp_path / '.lock-1-of-1', 'the shard', 'wait for it'):
        with pytest.raises(Refused, match='shard 1/1'):
            do(input=questions, output_dir=str(tmp_path))


def test_a_folder_that_may_not_be_written_is_named_before_the_model_is_read(open_path):
    checkpoint = shutil.copytree(T5X, open_path / 'checkpoint_6')
    (open_path / 'a.txt').write_text('a')
    (open_path / 'there').mkdir(mode=0o555)
    for name in ('there', 'there/new/below'):
        folder = str(open_path / name)
        with pytest.raises(Refused, match=folder), another_user():
            do(checkpoint=checkpoint, input=str(open_path / 'a.txt'), output_dir=folder)


BAD_LINES = {
    'a.txt': ('one\n\nthree', 'line 2 of {file}'),
    'b.txt': ('', 'b '),
    'c.txt': (b'one\n\xff', 'line 2 of {file}'),
    'd.jsonl': ('{"inputs": "a"}\n{', 'line 2 of {file}'),
    'f.jsonl': ('{"input": "a"}', "line 1 of {file}: field 'inputs'"),
    'h.txt': ('a' * 32, 'line 1 of {file}'),
    'i.parquet': ('a', '{file}'),
    'j.csv': ('inputs,b\n1', 'line 2 of {file}'),
    'l.tsv': ('a\tb\n1\t2', '{file}'),
    'm.csv': ('inputs,b\n', 'm '),
    'j.txt.gz': (gzip.compress(b'a\n' * 99)[:-9], '{file}'),
    '*.none': (None, '{file}'),
}


def test_bad_lines(tmp_path):
    for name, (content, named) in BAD_LINES.items():
        file = tmp_path / name
        if content is not None:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(Refused) as error:
            do(input=str(file), output_dir=str(tmp_path / 'out'))
        assert named.replace('{file}', str(file)) in str(error.value)
    assert not (tmp_path / 'out').exists()


def test_a_long_text_is_cut_where_that_is_asked_for(tmp_path, loaded, capsys):
    (tmp_path / 'a.txt').write_text('a' * 99 + '\nb\nc\nd')
    messages = do(input=str(tmp_path / 'a.txt'), trim=True, fields=('inputs',))
    assert messages == ['1 of 4 examples of a (25.0%) were cut to data.lengths.']
    found = [json.loads(line)['inputs'] for line in capsys.readouterr().out.splitlines()]
    assert found[0] == {'inputs': [100] * 31 + [1], 'inputs_pretokenized': 'a' * 99}
    with pytest.raises(Refused, match='--text'):
        do(text='a' * 99)


ONE = {'text': 'a'}
ENCODE = {'input': 'TEXT', 'encode': True, 'output_dir': 'x'}
REFUSED = [
    (ONE | {'input': 'b'}, {}, '--input'),
    (ONE | {'encode': True}, {}, '--encode'),
    ({'text': ' '}, {}, '--text'),
    ({'split': 'test', 'input': 'TEXT'}, {}, '--split'),
    ({'split': 'tset'}, {}, '--split=tset'),
    (ENCODE | {'output_dir': ''}, {}, '--output_dir'),
    (ENCODE | {'score': True}, {}, '--score'),
    ({'input': 'TEXT', 'pool': 'mean'}, {}, '--pool=mean'),
    (ONE | {'checkpoint': 'ENCODER'}, {}, 'encoder/checkpoint_6'),
    ({'checkpoint': 'ENCODER', 'input': 'QUESTIONS', 'score': True}, {}, 'encoder/checkpoint_6'),
    ({'num_shards': 2}, {}, '--shard=1/2'),
    ({'num_shards': 2, 'output_dir': 'x', 'input': '-'}, {}, '--shard=1/2'),
    ({'input': '-'}, {'data.kind': 'parquet'}, '--input=-'),
    ({'input': 'QUESTIONS', 'fields': ('id',)}, {}, "'id'"),
    ({'input': 'TEXT', 'score': True}, {}, "field 'targets'"),
    ({}, {'data.task': 'text'}, "data.task='text'"),
    ({}, {'data.task': 'sums'}, 'test'),
    (ONE, {'decode.top_k': 3}, 'top_k=3'),
    (ONE, {'decode.top_k': 3000, 'decode.temperature': 1.0}, 'decode.top_k=3000'),
    (ONE, {'mesh.model': 3}, 'mesh.model=3'),
    (ONE, {'mesh.model': 8, 'mesh.data': 1}, 'mesh.model=8'),
    (ONE, {'data.vocabulary': ''}, 'data.vocabulary'),
    (ONE, {'model.dtype': 'bfloat16'}, '--config.model.dtype'),
    ({'checkpoint': ''}, {}, '--checkpoint'),
]


def test_what_is_refused(tmp_path):
    questions, _ = write_examples(tmp_path)
    (tmp_path / 'a.txt').write_text('a')
    files = {'QUESTIONS': str(questions), 'TEXT': str(tmp_path / 'a.txt')}
    encoder = write_encoder(tmp_path / 'encoder')
    tasks = write_tasks(tmp_path)
    for flags, changes, named in REFUSED:
        request = {'checkpoint': T5X, 'output_dir': '', 'input': '', **flags}
        if request['checkpoint'] == 'ENCODER':
            request['checkpoint'] = encoder
        request['input'] = files.get(request['input'], request['input'])
        with pytest.raises(Refused) as error:
            do(CHANGES | tasks | changes, **request)
        assert named in str(error.value)


@pytest.mark.slow
def test_another_vocabulary_is_refused(tmp_path, uninterrupted):
    """One with more ids than the model has rows, and one that is not the checkpoint's own."""
    named = CHANGES | {'data.vocabulary': str(uninterrupted), 'data.extra_ids': 300}
    with pytest.raises(Refused, match='data.vocabulary .* 384'):
        do(named, text='a')
    checkpoint = tmp_path / 'checkpoint_6'
    shutil.copytree(T5X, checkpoint)
    (checkpoint / 'spiece.model').write_bytes(train_vocabulary(['abc def'] * 9, 12))
    with pytest.raises(Refused, match="data.vocabulary='bytes'"):
        do(CHANGES, checkpoint=checkpoint, text='a')


# A prompt, and lines that are answered when they come.


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that types lines; an exception is what a key raises."""

    def type_lines(*lines):
        stream = types.SimpleNamespace(isatty=lambda: True, buffer=io.BytesIO())
        monkeypatch.setattr(sys, 'stdin', stream)
        monkeypatch.setattr(sys.stdout, 'isatty', lambda: True, raising=False)
        typed = iter([*lines, EOFError()])

        def read_line(prompt):
            line = next(typed)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(process, 'read_line', read_line)

    return type_lines


def test_a_prompt(terminal, t5, capsys):
    """Empty lines, those that are too long, Ctrl-C and text that is not UTF-8 lead to the next line."""
    no_utf8 = UnicodeDecodeError('utf-8', b'\xff', 0, 1, 'invalid start byte')
    terminal('one', '', ' ', 'a' * 99, KeyboardInterrupt(), no_utf8, '\udcff', 'two words')
    changes = CHANGES | {'decode.beam_size': 2, 'decode.num_return': 2}
    job = infer_mode.Job(infer_mode.Request(str(T5X)), None, changes)
    assert job.is_prompt
    infer_mode.answer_typed_lines(job, t5)
    captured = capsys.readouterr()
    first, second = t5.generate(['one', 'two words'], max_length=8, beam_size=2, num_return=2)
    assert captured.out == '\n'.join([*first, '', *second, '', ''])
    heading, *faults = captured.err.splitlines()
    assert 'Ctrl-D' in heading
    assert ['100 tokens' in faults[0], len(faults)] == [True, 3]
    assert faults[1:] == ['this line is not UTF-8: write it in UTF-8'] * 2


@pytest.mark.parametrize(
    'request_, changes',
    [({'split': 'test'}, {}), ({'output_dir': 'x'}, {}), ({}, {'data.task': 'sums'})],
)
def test_what_is_no_prompt(terminal, request_, changes):
    terminal()
    assert not infer_mode.asks_for_prompt(infer_mode.Request('', **request_), changes)
    assert infer_mode.asks_for_prompt(infer_mode.Request(''), {})


@pytest.mark.parametrize('kind', ['text', 'jsonl', 'csv'])
def test_each_line_is_answered_when_it_comes(loaded, monkeypatch, kind):
    """The next line is written only after the answer to the one before has been read."""
    rows = {
        'text': ['one\n', 'two\n'],
        'jsonl': ['{"inputs": "one"}\n', '{"inputs": "two"}\n'],
        'csv': ['inputs,b\n"one",2\n', 'two,3\n'],
    }[kind]
    read_in, write_in = os.pipe()
    read_out, write_out = os.pipe()
    stdin = types.SimpleNamespace(buffer=open(read_in, 'rb'), isatty=lambda: False)  # noqa: SIM115
    monkeypatch.setattr(sys, 'stdin', stdin)
    changes = CHANGES | ({'data.kind': 'csv'} if kind == 'csv' else {})
    answers = []

    def type_and_read():
        with open(write_in, 'w') as lines, open(read_out) as file:
            for row in rows:
                lines.write(row)
                lines.flush()
                answers.append(file.readline())

    thread = threading.Thread(target=type_and_read)
    thread.start()
    with open(write_out, 'w') as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, 'stdout', stdout)
        do(changes, input='-')
    thread.join()
    found = [json.loads(answer)['inputs']['inputs_pretokenized'] for answer in answers]
    assert found == ['one', 'two']


def test_lines_before_a_bad_one_are_answered(loaded, monkeypatch, capsys):
    content = b'{"inputs": "one"}\n{"inputs": 1.5}\n{"input": "three"}\n{"inputs": "four"}\n'
    stdin = types.SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content)))
    monkeypatch.setattr(sys, 'stdin', stdin)
    with pytest.raises(Refused, match="line 3 of standard input: field 'inputs'"):
        do(input='-')
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.slow
def test_a_prompt_of_a_terminal():
    """Ctrl-C during an answer and at the prompt, a line, Ctrl-D: status 0."""
    flags = [f'--config.{name}={value}' for name, value in CHANGES.items()]
    command = [str(ROOT / 'main.py'), '--mode=infer', f'--checkpoint={T5X}', *flags]
    terminal, standard = pty.openpty()
    # A session of its own, whose terminal sends Ctrl-C.
    start = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
    process = subprocess.Popen(
        [sys.executable, '-c', start, *command],
        stdin=standard,
        stdout=standard,
        env=os.environ | ENVIRONMENT,
        start_new_session=True,
    )
    os.close(standard)
    shown = b''

    def wait_for(text):
        nonlocal shown
        while text not in shown:
            shown += os.read(terminal, 1000)
        shown = shown.split(text, 1)[1]

    wait_for(b'> ')
    # CPython misses a signal that arrives between the prompt and its select: wait until it sleeps.
    while pathlib.Path(f'/proc/{process.pid}/stat').read_text().rsplit(')')[-1].split()[0] != 'S':
        time.sleep(0.01)
    os.write(terminal, b'half a line\x03')
    wait_for(b'> ')
    os.write(terminal, b'one\n')
    wait_for(b'one')
    wait_for(b'> ')
    os.write(terminal, b'\x04')
    assert process.wait() == 0
    os.close(terminal)


# The command.


def test_one_text_on_the_command_line(command_line, uninterrupted):
    """A run needs no config: its own settings count. The answer is all of standard output."""
    t5 = infer.load(uninterrupted)
    text = 'sentence of words'
    [expected] = t5.generate([text], max_length=5)
    flags = [f'--checkpoint={uninterrupted}', f'--text={text}', '--config.decode.max_length=5']
    result = command_line('--mode=infer', *flags)
    assert result.status == 0, result.stderr
    assert result.stdout == f'{expected}\n'


def test_encoding_with_a_checkpoint_that_has_no_decoder(tmp_path, t5):
    (tmp_path / 'in.txt').write_text('one\ntwo words\n')
    request = {'input': f'{tmp_path}/in.txt', 'output_dir': f'{tmp_path}/out'}
    do(checkpoint=write_encoder(tmp_path), encode=True, pool='mean', **request)
    found = load_file(tmp_path / 'out/in-encodings-00000-of-00001.safetensors')
    outputs, mask = t5.encode(['one', 'two words'])
    for i in range(2):
        assert_close(found['embeddings'][i], outputs[i, mask[i]].mean(axis=0), 1e-5)
