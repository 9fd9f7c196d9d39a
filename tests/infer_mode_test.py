"""`--mode=infer`: its lines are T5X's; kills and shards change nothing; what it refuses.

golden/seqio_t5/infer_jsonl: spec.json has examples, ids and scores, and the other files are what T5X's
infer.py writes of them.
"""

import contextlib
import dataclasses
import errno
import gzip
import io
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from permissions import another_user
from safetensors.numpy import load_file
from small_models import assert_close

import checkpoint as checkpoints
import convert
import infer
import infer_input
import infer_mode
import vocabulary as vocabularies

ROOT = pathlib.Path(__file__).resolve().parents[1]
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
        example = {
            'inputs': f'é{i}' + ' word' * int(rng.integers(0, 5)),
            'targets': f'{i}' + ' x' * int(rng.integers(0, 5)),
            'idx': i,
        }
        content.append(example)
    file = folder / 'questions.jsonl'
    file.write_text('\n'.join(json.dumps(example) for example in content))
    return file, content


def write_encoder(folder):
    """Write an encoder alone, in T5X's layout. Return its folder."""
    opened = convert.open_checkpoint(T5X, part='encoder')
    return checkpoints.save(folder, 6, opened.leaves)


def do(changes=CHANGES, checkpoint=T5X, **request):
    job = infer_mode.prepare(infer_mode.Request(str(checkpoint), **request), None, changes)
    return infer_mode.infer_all(job)


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob('*') if path.is_file()}


# The lines.


@dataclasses.dataclass
class OracleModel:
    """The model of the oracle: it gives the ids and scores of spec.json."""

    by_inputs: dict

    def generate_tokens(self, inputs, numbers, num_rows, **options):
        rows = [self.by_inputs[tuple(ids.tolist())] for ids in inputs]
        tokens_bnT = np.array([[SPEC['predicted_ids'][row]] for row in rows])
        return tokens_bnT, np.array([[SPEC['scores'][row]] for row in rows])

    def _score(self, inputs, targets, num_rows, round_up):
        rows = [self.by_inputs[tuple(ids.tolist())] for ids in inputs]
        return np.array([SPEC['scores'][row] for row in rows])


@pytest.mark.parametrize('name', SPEC['modes'])
def test_the_lines_are_T5Xs(tmp_path, monkeypatch, name):
    model = ROOT.parent / 'shared/testdata/seqio_t5/sentencepiece/sentencepiece.model'
    if not model.exists():
        pytest.skip("SeqIO's test vocabulary is not in this checkout")
    shutil.copy(model, tmp_path / 'spiece.model')
    with (tmp_path / 'task.jsonl').open('w') as file:
        for row in SPEC['rows']:
            texts = {feature: row[f'{feature}_pretokenized'] for feature in ('inputs', 'targets')}
            file.write(json.dumps({**texts, 'idx': row['idx']}) + '\n')
    by_inputs = {tuple(row['inputs']): i for i, row in enumerate(SPEC['rows'])}
    monkeypatch.setattr(infer_mode, 'load', lambda job: OracleModel(by_inputs))
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
    merged = tmp_path / f'out/task-{mode}.jsonl'
    found = lines_of(merged)
    assert found == lines_of(ORACLE / name)
    # The oracle was given examples with the fields of spec.json. SeqIO's tokenize writes each text in
    # front of its ids.
    order = ['inputs_pretokenized', 'inputs', 'targets_pretokenized', 'targets', 'idx']
    for line, expected in zip(found, lines_of(ORACLE / name), strict=True):
        assert list(line) == list(expected)
        assert list(line['inputs']) == sorted(expected['inputs'], key=order.index)
    assert contents(tmp_path / 'out').keys() == {
        'infer.json',
        merged.name,
        f'{merged.name}-00000-of-00001',
        f'{merged.name}-00000-of-00001.COMPLETED',
    }


def test_answers_are_those_of_generate_and_in_the_order_of_the_lines(
    tmp_path, t5, loaded, monkeypatch, capsys
):
    """On standard output as in files."""
    monkeypatch.setattr(infer, 'EXAMPLES_PER_CHUNK', 8)
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


def test_examples_are_tokenized_once(tmp_path, loaded, monkeypatch):
    """What is wrong with one of them is found before anything is computed, and yet."""
    file, content = write_examples(tmp_path)
    tokenized = []
    encode = vocabularies.ByteVocabulary.encode_as_arrays

    def counted(self, texts, **options):
        tokenized.extend(texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(vocabularies.ByteVocabulary, 'encode_as_arrays', counted)
    do(input=str(file), score=True, output_dir=str(tmp_path / 'out'))
    expected = [example[name] for name in ('inputs', 'targets') for example in content]
    assert tokenized == expected


def test_a_full_disk_of_temporary_files(tmp_path, monkeypatch):
    file, _ = write_examples(tmp_path)
    spool = infer_input.Spool()
    spool.file = open('/dev/full', 'wb', buffering=0)  # noqa: SIM115
    monkeypatch.setattr(infer_input, 'Spool', lambda: spool)
    with pytest.raises(OSError, match='cannot hold the tokenized examples .No space left on dev'):
        do(input=str(file))


def test_fields_keep_their_order_and_numbers_their_kind(tmp_path, loaded, capsys):
    """Other fields stay where they are; whole numbers are written as such."""
    (tmp_path / 'a.jsonl').write_text(
        '{"idx": 3, "inputs": "ab", "weight": 1.0, "targets": "c", "tags": [1, {"x": 2}], "n": null}'
    )
    do(input=str(tmp_path / 'a.jsonl'), fields=('all',), score=True)
    line = capsys.readouterr().out
    assert line.startswith(
        '{"inputs": {"idx": 3, "inputs_pretokenized": "ab", "inputs": [100, 101, 1], "weight": 1.0, '
        '"targets_pretokenized": "c", "targets": [102, 1], "tags": [1, {"x": 2}], "n": null}, "score": '
    )


def test_texts_that_are_made_of_fields_follow_them(tmp_path, loaded, capsys):
    (tmp_path / 'a.csv').write_text('q,n\nab,1\n')
    changes = CHANGES | {'data.inputs': '{q}', 'data.targets': '{n}'}
    do(changes, input=str(tmp_path / 'a.csv'), fields=('all',))
    names = list(json.loads(capsys.readouterr().out)['inputs'])
    assert names == ['q', 'n', 'inputs_pretokenized', 'inputs', 'targets_pretokenized', 'targets']


def test_several_answers_are_lists():
    vocabulary = vocabularies.ByteVocabulary()
    answer = infer.Answer(tokens=[[100, 1], [101]], scores=[-1.0, -2.0])
    found = infer_mode.prediction(answer, vocabulary, with_scores=True, output_ids=True)
    assert found == {
        'prediction': ['a', 'b'],
        'prediction_tokens': [[100, 1], [101]],
        'aux': {'scores': [-1.0, -2.0]},
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


@pytest.mark.parametrize('form', ['text', 'gzip', 'stdin', 'stdin of JSON', 'templates'])
def test_forms_of_input(tmp_path, loaded, monkeypatch, capsys, form):
    """Windows line ends and a byte order mark are no text; a last line needs no line end."""
    lines = ['one', ' two  words ', 'drei ß', '4']
    content = '\ufeffone\r\n two  words \ndrei ß\n4'.encode()
    file = tmp_path / 'in.txt'
    changes = CHANGES
    if form == 'gzip':
        file = tmp_path / 'in.txt.gz'
        content = gzip.compress(content)
    if form in ('stdin of JSON', 'templates'):
        content = '\n'.join(json.dumps({'inputs': line}) for line in lines).encode()
    if form == 'templates':
        file = tmp_path / 'in.jsonl'
        changes = CHANGES | {'data.inputs': 'say: {inputs}', 'data.targets': '{other}'}
        lines = [f'say: {line}' for line in lines]
    file.write_bytes(content)
    name = str(file)
    if form.startswith('stdin'):
        name = '-'
        stdin = types.SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(content)))
        monkeypatch.setattr(sys, 'stdin', stdin)
    do(changes, input=name)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line['inputs'] for line in found] == [{'inputs_pretokenized': x} for x in lines]


@pytest.mark.parametrize('name', ['in.csv', 'in.csv.gz', 'in.tsv'])
def test_rows_of_a_table_are_inputs(tmp_path, loaded, capsys, name):
    """The targets may be missing. In CSV a quoted field may hold commas and newlines."""
    content = '\ufeffq,c\r\n"who, ""she""?", first\r\n"a\nb",ß\r\n'
    expected = ['who, "she"?|first', 'a\nb|ß']
    if name.endswith('.tsv'):
        content = 'q\tc\n"who\t first \nb\tß'
        expected = ['"who|first', 'b|ß']
    content = content.encode()
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
    changes = CHANGES | {'data.inputs': '{q}|{c}', 'data.targets': '{answer}'}
    do(changes, input=str(file))
    found = [json.loads(line)['inputs'] for line in capsys.readouterr().out.splitlines()]
    assert found == [{'inputs_pretokenized': text} for text in expected]


def test_the_kind_of_input_is_not_that_of_the_files_of_the_run(
    tmp_path, loaded, capsys, monkeypatch
):
    monkeypatch.setattr(infer, 'read_settings', lambda directory: {'data': {'kind': 'csv'}})
    (tmp_path / 'a.jsonl').write_text('{"inputs": "one"}')
    (tmp_path / 'a.data').write_text('inputs\none\n')
    for name, changes in (('a.jsonl', {}), ('a.data', {'data.kind': 'csv'})):
        do(CHANGES | changes, input=str(tmp_path / name))
        [line] = capsys.readouterr().out.splitlines()
        assert json.loads(line)['inputs'] == {'inputs_pretokenized': 'one'}


def write_tasks(folder):
    for name, first in (('a', 0), ('b', 5)):
        rows = [f'{i},{"x" * i}z' for i in range(first, first + 5)]
        (folder / f'{name}.csv').write_text('\n'.join(['a,b', *rows]))
    (folder / 'my_tasks.py').write_text(MODULE.replace('FOLDER', str(folder)))
    return {'data.module': str(folder / 'my_tasks.py')}


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
    assert [line['inputs']['inputs_pretokenized'] for line in found] == [
        f'add: {i}' for i in range(5, 10)
    ]
    assert [len(line['inputs']['targets']) for line in found] == [7, 8, 8, 8, 8]
    found = lines_of(folder / 'sums2-score.jsonl')
    assert [line['inputs']['targets_pretokenized'] for line in found] == list('56789')


# Kills and shards.


class Killed(BaseException):
    pass


def kill_at(step, monkeypatch):
    """Let the process die before change number `step` of a file."""
    count = 0

    def dying(change):
        def changed(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == step:
                raise Killed
            return change(*arguments, **keywords)

        return changed

    for owner, name in (
        (pathlib.Path, 'replace'),
        (pathlib.Path, 'touch'),
        (pathlib.Path, 'mkdir'),
        (pathlib.Path, 'unlink'),
        (shutil, 'rmtree'),
        (os, 'fsync'),
    ):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


def test_a_kill_at_any_change_of_a_file_changes_nothing(tmp_path, loaded, monkeypatch, capfd):
    monkeypatch.setattr(infer, 'EXAMPLES_PER_CHUNK', 8)
    file, _ = write_examples(tmp_path)
    request = {'input': str(file), 'score': True, 'fields': ('idx',)}
    do(**request, output_dir=str(tmp_path / 'whole'))
    expected = contents(tmp_path / 'whole')
    num_kills = 0
    for step in range(1, 1000):
        folder = tmp_path / f'killed{step}'
        with monkeypatch.context() as patch:
            kill_at(step, patch)
            with contextlib.suppress(Killed):
                do(**request, output_dir=str(folder))
                break
        num_kills += 1
        messages = do(**request, output_dir=str(folder))
        assert messages == [f'The results are in {folder / "questions-score.jsonl"}']
        assert contents(folder) == expected
    assert num_kills > 12


def test_finished_chunks_are_not_computed_again(tmp_path, loaded, monkeypatch):
    file, _ = write_examples(tmp_path)
    request = {'input': str(file), 'score': True, 'output_dir': str(tmp_path / 'out')}
    computed = do_until(2, monkeypatch, **request)
    do(**request)
    assert computed == [list(range(16, 20))]
    do(**request)
    assert len(computed) == 1


def cut_at_a_line_end(file):
    file.write_bytes(b''.join(file.read_bytes().splitlines(keepends=True)[:-1]))


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file):
    file.write_bytes(b'')


def cut_the_mark(file):
    mark = infer_mode.mark_of(file)
    mark.write_bytes(mark.read_bytes()[:-9])


def empty_the_mark(file):
    empty(infer_mode.mark_of(file))


def replace_the_mark_by_a_list(file):
    infer_mode.mark_of(file).write_text('[1]')


def copy_from_another_run(file):
    """A shard or chunk with its mark, of the same name."""
    for stale in (file, infer_mode.mark_of(file)):
        out = next(folder for folder in file.parents if folder.name == 'out')
        [other] = (out.parent / 'another').rglob(stale.name)
        shutil.copy(other, stale)


DAMAGES = [
    cut_at_a_line_end,
    flip_a_bit,
    empty,
    pathlib.Path.unlink,
    cut_the_mark,
    empty_the_mark,
    replace_the_mark_by_a_list,
    copy_from_another_run,
]


def do_until(num_chunks, monkeypatch, **request):
    """Let the process die after so many chunks. Return a list that grows by each chunk after that."""
    computed = []
    score_all = infer.score_all

    def counted(t5, examples, *arguments):
        if len(computed) == num_chunks and is_dying:
            raise Killed
        computed.append([example.number for example in examples])
        return score_all(t5, examples, *arguments)

    monkeypatch.setattr(infer, 'EXAMPLES_PER_CHUNK', 8)
    monkeypatch.setattr(infer, 'score_all', counted)
    is_dying = True
    with pytest.raises(Killed):
        do(**request)
    is_dying = False
    computed.clear()
    return computed


def write_another_run(folder, monkeypatch, **request):
    """Write the results of other answers, and a chunk of them that a killed process has left."""
    with monkeypatch.context() as patch:
        do_until(1, patch, **request, fields=('idx',), output_dir=str(folder))
    [chunk] = folder.glob('tmp-*/*-chunk00000')
    kept = {path: path.read_bytes() for path in (chunk, infer_mode.mark_of(chunk))}
    do(**request, fields=('idx',), output_dir=str(folder))
    chunk.parent.mkdir()
    for path, content in kept.items():
        path.write_bytes(content)


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_chunk_is_computed_again(tmp_path, loaded, monkeypatch, capsys, damage):
    file, _ = write_examples(tmp_path)
    request = {'input': str(file), 'score': True}
    do(**request, output_dir=str(tmp_path / 'whole'))
    write_another_run(tmp_path / 'another', monkeypatch, **request)
    request['output_dir'] = str(tmp_path / 'out')
    computed = do_until(2, monkeypatch, **request)
    [chunk] = (tmp_path / 'out').glob('tmp-*/*-chunk00000')
    damage(chunk)
    capsys.readouterr()
    do(**request)
    assert computed == [list(range(8)), list(range(16, 20))]
    assert f'{chunk} has changed' in capsys.readouterr().err
    assert contents(tmp_path / 'out') == contents(tmp_path / 'whole')


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_shard_is_made_anew(tmp_path, loaded, monkeypatch, capsys, damage):
    """Also where its results were merged before: those of a damaged file are merged anew."""
    file, _ = write_examples(tmp_path)
    request = {'input': str(file), 'score': True}
    write_another_run(tmp_path / 'another', monkeypatch, **request)
    request['output_dir'] = str(tmp_path / 'out')
    do(**request)
    expected = contents(tmp_path / 'out')
    shard = tmp_path / 'out/questions-score.jsonl-00000-of-00001'
    damage(shard)
    capsys.readouterr()
    do(**request)
    assert f'{shard} has changed' in capsys.readouterr().err
    assert contents(tmp_path / 'out') == expected
    flip_a_bit(tmp_path / 'out/questions-score.jsonl')
    do(**request)
    assert capsys.readouterr().err.count('has changed') == 0
    assert contents(tmp_path / 'out') == expected


@pytest.mark.parametrize('damage', DAMAGES[:-1])
def test_a_damaged_shard_of_another_command_is_not_merged(tmp_path, loaded, damage):
    file, _ = write_examples(tmp_path)
    folder = tmp_path / 'out'
    request = {'input': str(file), 'score': True, 'output_dir': str(folder), 'num_shards': 3}
    for shard in (2, 3):
        do(**request, shard=shard)
    damaged = folder / 'questions-score.jsonl-00001-of-00003'
    good = {path.name: path.read_bytes() for path in folder.glob(f'{damaged.name}*')}
    damage(damaged)
    with pytest.raises(ValueError) as error:
        do(**request, shard=1)
    assert str(damaged) in str(error.value)
    assert '--shard=2/3' in str(error.value)
    assert not (folder / 'questions-score.jsonl').exists()
    messages = do(**request, shard=2)
    assert messages == [f'The results are in {folder / "questions-score.jsonl"}']
    assert good.items() <= contents(folder).items()


def test_the_shard_of_another_is_no_shard_of_ones_own(tmp_path, loaded):
    """A copy under another name, with its mark."""
    file, _ = write_examples(tmp_path)
    folder = tmp_path / 'out'
    request = {'input': str(file), 'score': True, 'output_dir': str(folder), 'num_shards': 2}
    for shard in (1, 2):
        do(**request, shard=shard)
    expected = contents(folder)
    for end in ('', '.COMPLETED'):
        name = f'questions-score.jsonl-0000{{}}-of-00002{end}'
        shutil.copy(folder / name.format(0), folder / name.format(1))
    with pytest.raises(ValueError, match='00001-of-00002 has changed .*--shard=2/2'):
        do(**request, shard=1)
    for shard in (2, 1):
        do(**request, shard=shard)
    assert contents(folder) == expected


def test_a_shard_that_is_lost_on_the_command_line(tmp_path, loaded, command_line):
    file, _ = write_examples(tmp_path, num_examples=4)
    folder = tmp_path / 'out'
    for shard in (1, 2):
        do(input=str(file), output_dir=str(folder), num_shards=2, shard=shard)
    lost = folder / 'questions-predict.jsonl-00000-of-00002'
    lost.unlink()
    result = command_line(
        '--mode=infer',
        f'--checkpoint={T5X}',
        f'--input={file}',
        f'--output_dir={folder}',
        '--shard=2/2',
        *[f'--config.{name}={value}' for name, value in CHANGES.items()],
    )
    assert result.status == 1
    [line] = [x for x in result.stderr.splitlines() if not x.startswith('WARNING')]
    assert str(lost) in line and '--shard=1/2' in line


@pytest.mark.parametrize('num_shards', [3, 30])
def test_shards_are_merged_in_the_order_of_the_examples(tmp_path, loaded, num_shards):
    """With more shards than examples, too: those have no line."""
    file, content = write_examples(tmp_path)
    request = {'input': str(file), 'score': True, 'fields': ('idx',)}
    do(**request, output_dir=str(tmp_path / 'whole'))
    expected = lines_of(tmp_path / 'whole/questions-score.jsonl')
    folder = tmp_path / 'parts'
    for shard in [*range(2, num_shards + 1), 1]:
        assert not (folder / 'questions-score.jsonl').exists()
        [message] = do(**request, output_dir=str(folder), shard=shard, num_shards=num_shards)
        assert ('shards are missing: the last one to end merges them' in message) == (shard > 1)
    found = lines_of(folder / 'questions-score.jsonl')
    assert [line['inputs'] for line in found] == [line['inputs'] for line in expected]
    scores = [line['score'] for line in found]
    np.testing.assert_allclose(scores, [line['score'] for line in expected], rtol=1e-5)
    assert len(list(folder.glob('*.COMPLETED'))) == num_shards


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path):
    """SIGKILL, again and again, at any time; the lines are those of a run that nobody killed."""
    file, _ = write_examples(tmp_path, num_examples=400)

    def command(folder):
        program = (
            'import sys, infer, main; infer.EXAMPLES_PER_CHUNK = 8; sys.exit(main.main(sys.argv))'
        )
        flags = [f'--config.{name}={value}' for name, value in CHANGES.items()]
        return [
            sys.executable,
            '-c',
            program,
            '--mode=infer',
            f'--checkpoint={T5X}',
            f'--input={file}',
            f'--output_dir={folder}',
            '--config.decode.temperature=1.0',
            *flags,
        ]

    whole = tmp_path / 'whole'
    subprocess.run(command(whole), cwd=ROOT, check=True, capture_output=True)
    folder = tmp_path / 'killed'
    num_chunks = 0
    for _ in range(3):
        process = subprocess.Popen(command(folder), cwd=ROOT, stderr=subprocess.DEVNULL)
        while len(list(folder.glob('tmp-*/*-chunk*'))) < num_chunks + 5:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        num_chunks = len(list(folder.glob('tmp-*/*-chunk*')))
    subprocess.run(command(folder), cwd=ROOT, check=True, capture_output=True)
    assert contents(folder) == contents(whole)


# Encodings.


@pytest.mark.parametrize('num_shards', [1, 3, 30])
@pytest.mark.parametrize('pool', ['none', 'mean'])
def test_encodings(tmp_path, loaded, t5, monkeypatch, pool, num_shards):
    """Of all shards together they are those of `T5.encode`, each with the number of its example."""
    monkeypatch.setitem(infer_mode.EXAMPLES_PER_FILE, pool, 3)
    file, content = write_examples(tmp_path)
    folder = tmp_path / 'out'
    request = {'input': str(file), 'encode': True, 'pool': pool, 'output_dir': str(folder)}
    for shard in range(num_shards, 0, -1):
        [message] = do(**request, shard=shard, num_shards=num_shards)
        assert str(folder) in message
        assert ('files are missing' in message) == (shard > 1)
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


def test_encodings_after_a_kill(tmp_path, loaded, monkeypatch):
    """At any change of a file; finished files are not computed again."""
    monkeypatch.setitem(infer_mode.EXAMPLES_PER_FILE, 'none', 8)
    file, _ = write_examples(tmp_path)
    request = {'input': str(file), 'encode': True}
    do(**request, output_dir=str(tmp_path / 'whole'))
    expected = contents(tmp_path / 'whole')
    encode_all = infer.encode_all
    num_kills = 0
    for step in range(1, 1000):
        folder = tmp_path / f'killed{step}'
        with monkeypatch.context() as patch:
            kill_at(step, patch)
            with contextlib.suppress(Killed):
                do(**request, output_dir=str(folder))
                break
        num_kills += 1
        finished = len(list(folder.glob('*.safetensors.COMPLETED')))
        computed = []

        def counted(t5, examples, *arguments, computed=computed):
            computed.append(examples)
            return encode_all(t5, examples, *arguments)

        monkeypatch.setattr(infer, 'encode_all', counted)
        do(**request, output_dir=str(folder))
        assert len(computed) == 3 - finished
        assert contents(folder) == expected
    assert num_kills > 6


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_encodings_are_made_anew(tmp_path, loaded, monkeypatch, capsys, damage):
    monkeypatch.setitem(infer_mode.EXAMPLES_PER_FILE, 'mean', 8)
    examples, _ = write_examples(tmp_path)
    request = {'input': str(examples), 'encode': True, 'pool': 'mean'}
    rounded = CHANGES | {'restore.dtype': 'bfloat16'}
    do(rounded, **request, output_dir=str(tmp_path / 'another'))
    request['output_dir'] = str(tmp_path / 'out')
    do(**request)
    expected = contents(tmp_path / 'out')
    file = tmp_path / 'out/questions-encodings-00001-of-00003.safetensors'
    damage(file)
    capsys.readouterr()
    do(**request)
    assert f'{file} has changed' in capsys.readouterr().err
    assert contents(tmp_path / 'out') == expected


def test_encodings_of_a_mixture(tmp_path, loaded):
    changes = CHANGES | write_tasks(tmp_path) | {'data.task': 'both'}
    folder = tmp_path / 'out'
    do(changes, output_dir=str(folder), split='validation', encode=True, pool='mean')
    for name in ('sums', 'sums2'):
        arrays = load_file(folder / f'{name}-encodings-00000-of-00001.safetensors')
        assert arrays['indices'].tolist() == list(range(5))


# What is refused, before anything is written.


def test_results_of_other_settings_are_not_mixed(tmp_path, loaded):
    file, _ = write_examples(tmp_path, num_examples=4)
    folder = tmp_path / 'out'
    request = {'input': str(file), 'output_dir': str(folder)}
    do(**request)
    before = contents(folder)
    for changes, more, message in [
        ({'decode.beam_size': 2}, {}, 'decode/beam_size: 1 -> 2'),
        ({}, {'score': True}, "mode: 'predict' -> 'score'"),
        ({}, {'encode': True}, "mode: 'predict' -> 'encode_none'"),
        ({}, {'shard': 1, 'num_shards': 2}, 'num_shards: 1 -> 2'),
        ({}, {'checkpoint': GOLDEN / 't5x_t5_1_1_tiny/checkpoint_0'}, 'checkpoint/path: '),
    ]:
        with pytest.raises(ValueError, match=f'holds results of other settings .*{message}'):
            do(CHANGES | changes, **request, **more)
    file.write_text('{"inputs": "another"}')
    with pytest.raises(ValueError, match='other settings .examples/questions: .* another --output'):
        do(**request)
    assert contents(folder) == before
    (folder / 'infer.json').unlink()
    with pytest.raises(ValueError, match='questions-predict.jsonl is there, and infer.json beside'):
        do(**request)


def test_a_shard_is_written_by_one_process(tmp_path, loaded):
    file, _ = write_examples(tmp_path, num_examples=4)
    request = {'input': str(file), 'output_dir': str(tmp_path)}
    with infer_mode.locked(tmp_path, infer_mode.Request('', shard=1)):
        with pytest.raises(
            ValueError, match=r'shard 1/1 of .* is being written by another process'
        ):
            do(**request)


@pytest.mark.parametrize('name', ['there', 'there/new/below'])
def test_a_folder_that_may_not_be_written_is_named_before_the_model_is_read(open_path, name):
    shutil.copytree(T5X, open_path / 'checkpoint_6')
    (open_path / 'a.txt').write_text('a')
    (open_path / 'there').mkdir(mode=0o555)
    request = {'input': str(open_path / 'a.txt'), 'output_dir': str(open_path / name)}
    with pytest.raises(ValueError) as error, another_user():
        do(checkpoint=open_path / 'checkpoint_6', **request)
    assert f'{open_path / name} cannot be written' in str(error.value)
    assert '--output_dir' in str(error.value)


def test_a_full_disk_is_named_and_the_same_command_goes_on(tmp_path, loaded, monkeypatch):
    """At any write."""
    file, _ = write_examples(tmp_path, num_examples=12)
    monkeypatch.setattr(infer, 'EXAMPLES_PER_CHUNK', 8)
    request = {'input': str(file), 'score': True}
    do(**request, output_dir=str(tmp_path / 'whole'))
    folder = tmp_path / 'out'
    fsync = os.fsync
    num_failures = 0
    for num_writes in range(20):
        writes = itertools.count()

        def write(descriptor, writes=writes, num_writes=num_writes):
            if next(writes) >= num_writes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, 'fsync', write)
            try:
                do(**request, output_dir=str(folder))
                break
            except OSError as error:
                assert f'{folder} cannot be written (No space left' in str(error)
                assert '--output_dir' in str(error)
        num_failures += 1
    assert num_failures > 1
    assert contents(folder).items() >= contents(tmp_path / 'whole').items()


BAD_LINES = {
    'a.txt': ('one\n\nthree', 'line 2 of {file} is empty: remove it, each line is an example'),
    'b.txt': ('', '{file} is empty: write a line for each example'),
    'c.txt': (b'one\n\xff', 'line 2 of {file}: byte 1 is not UTF-8: convert the file'),
    'd.jsonl': ('{"inputs": "a"}\n{', 'line 2 of {file}: no JSON: '),
    'e.jsonl': ('[1]', 'line 1 of {file}: \'[1]\' is no JSON object; write {"inputs": ...}'),
    'f.jsonl': ('{"input": "a"}', "line 1 of {file}: no field 'inputs', its fields are: 'input'"),
    'g.jsonl': ('{"inputs": ["a"]}', "field 'inputs' is ['a'], no string; add it, or name others"),
    'h.txt': (
        'a' * 32,
        'the inputs in line 1 of {file} have 33 tokens, EOS included, more than data.',
    ),
    'i.parquet': ('a', 'only text, JSON Lines (.jsonl, .json, .ndjson), CSV and TSV, each also'),
    'j.csv': ('inputs,b\n1', 'line 2 of {file}: 1 columns, and the header has 2; correct the row'),
    'k.csv': ('"a\n1', 'line 1 of {file}: no CSV: '),
    'l.tsv': (
        'a\tb\n1\t2',
        "{file} has no column 'inputs', it has 'a', 'b': add it, or name others",
    ),
    'm.csv': ('inputs,b\n', 'has no example: name a split or a file with some'),
    'j.txt.gz': (gzip.compress(b'a\n' * 99)[:-9], '{file} is broken gzip'),
    'k.txt.gz': (b'no gzip', '{file} is not gzipped, and its name ends in .gz'),
    '*.none': (None, 'matches no file; correct it'),
}


@pytest.mark.parametrize('name', BAD_LINES)
def test_bad_lines(tmp_path, name):
    content, message = BAD_LINES[name]
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:
        do(input=str(file), output_dir=str(tmp_path / 'out'))
    assert message.replace('{file}', str(file)) in str(error.value)
    assert '\n' not in str(error.value)
    assert not (tmp_path / 'out').exists()


def test_a_long_text_is_cut_where_that_is_asked_for(tmp_path, loaded, capsys):
    (tmp_path / 'a.txt').write_text('a' * 99 + '\nb\nc\nd')
    messages = do(input=str(tmp_path / 'a.txt'), trim=True, fields=('inputs',))
    assert messages == ['1 of 4 examples of a (25.0%) were cut to data.lengths.']
    found = [json.loads(line)['inputs'] for line in capsys.readouterr().out.splitlines()]
    assert found[0] == {'inputs': [100] * 31 + [1], 'inputs_pretokenized': 'a' * 99}
    with pytest.raises(
        ValueError, match='words of --text have 100 tokens, EOS included, more than'
    ):
        do(text='a' * 99)
    vocabulary = vocabularies.ByteVocabulary()
    assert infer_input.encode_text('aaa', vocabulary, length=3, trim=True) == [100, 100, 1]


@pytest.mark.parametrize(
    'request_changes, changes, message',
    [
        ({'text': 'a', 'input': 'b'}, {}, '--input is not for --text, which prints one answer'),
        ({'text': ' '}, {}, "--text='' has no text: write one"),
        ({'split': 'test', 'input': 'TEXT'}, {}, '--split=test is of a task, and --input or --te'),
        ({'text': 'a', 'encode': True}, {}, '--encode is not for --text'),
        ({'input': 'TEXT', 'encode': True}, {}, '--encode needs a folder for its arrays'),
        *(
            (
                {'input': 'TEXT', 'encode': True, name: value, 'output_dir': 'x'},
                {},
                f'--{name} is not',
            )
            for name, value in (('score', True), ('fields', ('all',)), ('output_ids', True))
        ),
        ({'input': 'TEXT', 'pool': 'mean'}, {}, '--pool=mean is of encodings: add --encode'),
        ({'checkpoint': 'ENCODER', 'text': 'a'}, {}, 'is an encoder alone'),
        ({'checkpoint': 'ENCODER', 'input': 'QUESTIONS', 'score': True}, {}, 'is an encoder alone'),
        ({'split': 'tset'}, {}, '--split=tset: must be one of train, validation, test'),
        ({'num_shards': 2}, {}, '--shard=1/2 needs a folder for the results of all'),
        (
            {'num_shards': 2, 'output_dir': 'x', 'input': '-'},
            {},
            '--shard=1/2 needs a file that each shard reads',
        ),
        (
            {'input': 'QUESTIONS', 'fields': ('id',)},
            {},
            "--fields names 'id': the fields of an exa",
        ),
        (
            {'input': 'TEXT', 'score': True},
            {},
            '--score needs targets, and TEXT is plain text: write',
        ),
        (
            {},
            {'data.task': 'text'},
            "data.task='text' has no inputs to answer: name a text-to-text",
        ),
        ({}, {'data.task': 'sums'}, 'have no split test: evaluate another split'),
        ({}, {'data.task': 'sum'}, "data.task='sum' is unknown"),
        (
            {'text': 'a'},
            {'decode.top_k': 3},
            'top_k=3 with temperature=0.0: it limits what is drawn',
        ),
        ({'text': 'a'}, {'decode.batch_size': 0}, 'decode.batch_size=0: must be at least 1'),
        (
            {'text': 'a'},
            {'data.vocabulary': ''},
            'has no vocabulary: texts need the one that it was trained with: name it with --config',
        ),
        (
            {'text': 'a'},
            {'data.vocabulary': 'nowhere'},
            "vocabulary='nowhere': no file, nor a folder",
        ),
        (
            {'text': 'a'},
            {'model.dtype': 'bfloat16'},
            '--config.model.dtype changes a setting of the',
        ),
        ({'checkpoint': 'nowhere'}, {}, 'nowhere'),
        ({'checkpoint': ''}, {}, '--mode=infer needs a model: name it with --checkpoint=PATH'),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, dict) else '',
)
def test_what_is_refused(tmp_path, request_changes, changes, message):
    questions, _ = write_examples(tmp_path)
    (tmp_path / 'a.txt').write_text('a')
    files = {'QUESTIONS': str(questions), 'TEXT': str(tmp_path / 'a.txt')}
    request = {'checkpoint': T5X, 'output_dir': '', **request_changes}
    if request['checkpoint'] == 'ENCODER':
        request['checkpoint'] = write_encoder(tmp_path / 'encoder')
    request['input'] = files.get(request.get('input', ''), request.get('input', ''))
    with pytest.raises(ValueError) as error:
        do(CHANGES | write_tasks(tmp_path) | changes, **request)
    assert message.replace('TEXT', files['TEXT']) in str(error.value)
    assert '\n' not in str(error.value)


def test_another_vocabulary_is_refused(tmp_path, uninterrupted):
    """One with more ids than the model has rows, and one that is not the checkpoint's own."""
    named = CHANGES | {'data.vocabulary': str(uninterrupted), 'data.extra_ids': 300}
    with pytest.raises(ValueError, match='the vocabulary has .* ids, and .* has 384 rows for them'):
        do(named, text='a')
    checkpoint = tmp_path / 'checkpoint_6'
    shutil.copytree(T5X, checkpoint)
    (checkpoint / 'spiece.model').write_bytes(vocabularies.train_vocabulary(['abc def'] * 9, 12))
    with pytest.raises(
        ValueError, match="='bytes' .359 ids. is not the vocabulary of .*: leave it"
    ):
        do(CHANGES, checkpoint=checkpoint, text='a')


# The command.


def test_one_text_on_the_command_line(command_line, uninterrupted):
    """A run needs no config: its own settings count. The answer is all of standard output."""
    t5 = infer.load(uninterrupted)
    text = 'sentence of words'
    [expected] = t5.generate([text], max_length=5)
    result = command_line(
        '--mode=infer',
        f'--checkpoint={uninterrupted}',
        f'--text={text}',
        '--config.decode.max_length=5',
    )
    assert result.status == 0, result.stderr
    assert result.stdout == f'{expected}\n'
    long = command_line('--mode=infer', f'--checkpoint={uninterrupted}', f'--text={"word " * 99}')
    assert long.status == 2
    assert 'more than data.lengths.inputs=32: shorten them, cut them with --trim' in long.stderr


def test_encoding_on_the_command_line(command_line, tmp_path):
    """Of a checkpoint that has no decoder."""
    encoder = write_encoder(tmp_path)
    (tmp_path / 'in.txt').write_text('one\ntwo words\n')
    result = command_line(
        '--mode=infer',
        f'--checkpoint={encoder}',
        f'--input={tmp_path}/in.txt',
        f'--output_dir={tmp_path}/out',
        '--encode',
        '--pool=mean',
        '--config.data.vocabulary=bytes',
    )
    assert result.status == 0, result.stderr
    found = load_file(tmp_path / 'out/in-encodings-00000-of-00001.safetensors')
    outputs, mask = infer.load(T5X, vocabulary='bytes').encode(['one', 'two words'])
    for i in range(2):
        assert_close(found['embeddings'][i], outputs[i, mask[i]].mean(axis=0), 1e-5)


@pytest.mark.parametrize(
    'arguments',
    [
        ['--mode=infer', '--checkpoint={encoder}', '--text=a'],
        ['--mode=evaluate', '--checkpoint={encoder}', '--config.data.task=x'],
        ['--mode=convert', '--from={encoder}', '--to={folder}/to'],
        [
            '--config=configs/tiny.py',
            '--workdir={folder}/run',
            '--config.restore.path={encoder}',
            '--config.data.files={folder}/text.txt',
        ],
    ],
    ids=['infer', 'evaluate', 'convert', 'train'],
)
def test_what_needs_a_decoder(command_line, tmp_path, arguments):
    (tmp_path / 'text.txt').write_text('some words of a text\n' * 100)
    names = {'encoder': write_encoder(tmp_path), 'folder': tmp_path}
    result = command_line(*[argument.format(**names) for argument in arguments])
    assert result.status == 2, result.stderr
    assert 'is an encoder alone' in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / 'to').exists()


@pytest.mark.parametrize(
    'arguments, message',
    [
        (['--mode=infer'], '--mode=infer needs a model: name it with --checkpoint=PATH'),
        (['--mode=infer', '--config.decode.beams=2'], 'no such setting: '),
        (['--mode=infer', '--workdir=x'], '--workdir is not for --mode=infer'),
        (['--mode=infer', f'--checkpoint={T5X}', '--shard=3/2'], '--shard=3/2: write i/n with i'),
        (['--mode=infer', f'--checkpoint={T5X}', '--encode', '--pool=max'], '<none|mean>'),
        (['--config=configs/tiny.py', '--encode'], '--encode is not for --mode=train'),
        (['--mode=evaluate', f'--checkpoint={T5X}', '--pool=mean'], '--pool is not for --mode=ev'),
        (
            ['--config=configs/tiny.py', '--text=a'],
            '--text is not for --mode=train: it needs --mode',
        ),
    ],
)
def test_flags_that_are_refused(command_line, arguments, message):
    result = command_line(*arguments)
    assert result.status == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
