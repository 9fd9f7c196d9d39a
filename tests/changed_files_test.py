"""A run goes on after text in its files was corrected (data.allow_changed_files)."""

import collections
import gzip
import json
import pathlib
import shutil

import numpy as np
import pyarrow.parquet
import pytest
from corpora import make_config
from forms import first_quick
from runs import Program, metrics_of, position_of, small_config

import checkpoint
import sources.deal
import sources.files
import sources.gzipped
import tasks
import tasks.open
import vocabulary as vocabularies
from prepare import prepare
from run import prefetch
from stream import Stream

NUM_FILES = 4
NUM_RECORDS = 150  # of each
KINDS = ['txt', 'jsonl', 'csv', 'txt.gz', 'jsonl.gz']
CHANGED = 2  # the number of the file that changes


def write_file(path, texts):
    """Write a file of any kind, a record a text."""
    kind = path.name.partition('.')[2]
    if kind == 'parquet':
        table = pyarrow.table({'text': texts})
        pyarrow.parquet.write_table(table, path, row_group_size=-(-len(texts) // 5))
        return
    lines = texts
    if kind.startswith('jsonl'):
        lines = [json.dumps({'text': text}) for text in texts]
    if kind == 'csv':
        lines = ['text', *[f'"{text},\nin quotes"' for text in texts]]
    content = ''.join(f'{line}\n' for line in lines).encode()
    path.write_bytes(gzip.compress(content) if kind.endswith('.gz') else content)


def texts_of(file):
    """The records of a file: the first word is their name, their lengths vary."""
    rng = np.random.default_rng(file)
    return [f'{file}.{i} ' + 'word ' * rng.integers(0, 12) for i in range(NUM_RECORDS)]


def write_files(folder, kind):
    folder.mkdir(exist_ok=True)
    for file in range(NUM_FILES):
        write_file(folder / f'{file}.{kind}', texts_of(file))
    return f'{folder}/*.{kind}'


def config_of(files, **changes):
    config = make_config(files=files, targets='{text}', validation_fraction=0.0, **changes)
    config.lengths.targets = 256
    return config


def open_stream(config, mixture=None, num_epochs=1, batch_size=3):
    return Stream(
        mixture or tasks.open.open_mixture(config),
        'train',
        vocabularies.ByteVocabulary(),
        config,
        batch_size=batch_size,
        seed=0,
        num_epochs=num_epochs,
    )


def names_in(row, segments):
    """The names of the records in a row of a batch."""
    for segment in range(1, segments.max() + 1):
        text = vocabularies.ByteVocabulary().decode(row[segments == segment].tolist())
        yield text.partition(' ')[0]


def rows_of(stream, num_batches=None):
    """[lane][batch]: the names of the records in the rows of a stream."""
    lanes = [[], [], []]
    for batch in stream:
        tokens = batch['decoder_target_tokens']
        segments = batch.get('decoder_segment_ids', (tokens > 0).astype(int))
        for lane in range(3):
            lanes[lane].append(list(names_in(tokens[lane], segments[lane])))
        if len(lanes[0]) == num_batches:
            break
    return lanes


def names_of(lanes):
    return collections.Counter(name for rows in lanes for row in rows for name in row)


def mixture_of_today(config, stream, step=7):
    """Return the mixture with which a run goes on after `stream`, None where it may not."""
    kept = json.loads(json.dumps(stream.mixture.files_as_json()))
    old = [sources.files.file_from_json(file) for file in kept]
    return tasks.open.open_mixture(config).going_on(old, stream.mixture.fingerprint, step)


def go_on(config, stream, step=7):
    """Return the stream that goes on after `stream` with the files of today."""
    mixture = mixture_of_today(config, stream, step)
    going_on = open_stream(config, mixture, stream.num_epochs)
    going_on.seek(stream.position, step=step)
    return going_on


def longer_text(texts):
    texts[70] += 'and corrected'


def shorter_text(texts):
    texts[3] = texts[3].split()[0]


def without_a_line(texts):
    del texts[70]


def with_lines(texts):
    texts[70:70] = [f'new.{i} text' for i in range(5)]


def with_lines_at_the_end(texts):
    texts += [f'new.{i} text' for i in range(5)]


def one_line(texts):
    del texts[1:]


def one_half(texts):
    del texts[: NUM_RECORDS // 2]


CORRECTIONS = [
    longer_text,
    shorter_text,
    without_a_line,
    with_lines,
    with_lines_at_the_end,
    one_line,
    one_half,
]


def correct(folder, kind, correction):
    """Change a file. Return its records."""
    texts = texts_of(CHANGED)
    correction(texts)
    write_file(folder / f'{CHANGED}.{kind}', texts)
    return texts


def assert_goes_on(folder, kind, correction, pack, num_batches):
    """Assert that what lanes have not read yet comes once, after a correction at some place."""
    config = config_of(write_files(folder, kind), pack=pack)
    stream = open_stream(config)
    before = rows_of(stream, num_batches)
    today = correct(folder, kind, correction)
    changed = go_on(config, stream)
    has_moved = (changed.position != stream.position).any(axis=(1, 2))
    given = names_of(before)
    after = rows_of(changed)
    given_after = names_of(after)
    for file in range(NUM_FILES):
        for name in [text.split()[0] for text in texts_of(file)]:
            if file != CHANGED and not given[name]:
                assert given_after[name] == 1, name
    for lane in range(3):
        if not has_moved[lane]:
            again = given & names_of([after[lane]])
            assert all(name.startswith(f'{CHANGED}.') for name in again)
    names = [text.split()[0] for text in today]
    left_out = [name for name in names if not given[name] and not given_after[name]]
    repeated = [name for name in names if given[name] + given_after[name] > 1]
    size_of_pool = sources.deal.BLOCKS_PER_POOL
    if kind.endswith('.gz'):
        size_of_pool = sources.gzipped.MIN_POOL_LINES
    assert len(left_out) <= 3 * size_of_pool
    assert pack != 'no' or len(repeated) <= 3 * 2 * size_of_pool
    return len(left_out)


@pytest.mark.parametrize('correction', first_quick(CORRECTIONS, 3))
@pytest.mark.parametrize('kind', first_quick(['txt', 'csv', 'parquet', 'jsonl.gz']))
def test_what_was_not_read_comes_once(tmp_path, monkeypatch, kind, correction):
    monkeypatch.setattr(sources.gzipped, 'POOL_LINES', 24)
    monkeypatch.setattr(sources.gzipped, 'MIN_POOL_LINES', 8)
    of_batches = {'no': (1, 60, 150), 'tightly': (1, 9)}
    if kind == 'jsonl.gz':  # while no shard is at its end
        of_batches = {'no': (1, 60), 'tightly': (5,)}
    if correction in {'jsonl.gz': (one_line, one_half), 'parquet': CORRECTIONS[3:]}.get(kind, ()):
        pytest.skip('a shard ends, or row groups are others')
    for pack, counts in of_batches.items():
        for num_batches in counts:
            assert_goes_on(tmp_path, kind, correction, pack, num_batches)


def test_parquet_keeps_its_number_of_row_groups(tmp_path):
    config = config_of(write_files(tmp_path, 'parquet'))
    stream = open_stream(config)
    correct(tmp_path, 'parquet', with_lines)
    path = tmp_path / f'{CHANGED}.parquet'
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path), path)
    with pytest.raises(ValueError, match=f'{path} has 1 row groups and had 5 .*row_group_size'):
        go_on(config, stream)


def rows_before_and_after(config, path, texts):
    """Return the rows that a stream gives after five batches, and those with another file there."""
    stream = open_stream(config)
    rows_of(stream, 5)
    position = stream.position
    expected = rows_of(stream)
    stream.seek(position)
    write_file(path, texts)
    return rows_of(go_on(config, stream)), expected, stream


@pytest.mark.parametrize('kind', KINDS)
def test_where_lines_keep_their_size_a_run_goes_on_exactly(tmp_path, kind):
    config = config_of(write_files(tmp_path, kind), pack='no')
    texts = texts_of(CHANGED)
    texts[70] = texts[70].upper()
    path = tmp_path / f'{CHANGED}.{kind}'
    found, expected, stream = rows_before_and_after(config, path, texts)
    has_moved = (go_on(config, stream).position != stream.position).any(axis=(1, 2))
    assert not has_moved.all()
    for lane in range(3):
        assert has_moved[lane] or found[lane] == expected[lane]


@pytest.mark.parametrize('correction', CORRECTIONS)
def test_lanes_that_read_other_files_go_on_exactly(tmp_path, correction):
    """Each lane reads one or two of four gzipped files."""
    config = config_of(write_files(tmp_path, 'txt.gz'))
    texts = texts_of(CHANGED)
    correction(texts)
    found, expected, _ = rows_before_and_after(config, tmp_path / f'{CHANGED}.txt.gz', texts)
    reads_change = []
    for lane in range(3):
        names = names_of([expected[lane]])
        reads_change.append(any(name.startswith(f'{CHANGED}.') for name in names))
        num_rows = min(len(found[lane]), len(expected[lane]))
        assert reads_change[lane] or found[lane][:num_rows] == expected[lane][:num_rows]
    assert sum(reads_change) == 1


def test_a_changed_run_goes_on_again_and_again(tmp_path):
    """Stopped once more, corrected once more, in processes: the same rows in all later epochs."""
    config = config_of(write_files(tmp_path, 'txt'), pack='no')
    stream = open_stream(config, num_epochs=None)
    rows_of(stream, 50)
    correct(tmp_path, 'txt', with_lines)
    stream = go_on(config, stream, step=7)
    rows_of(stream, 20)
    write_file(tmp_path / '0.txt', texts_of(0)[5:])
    texts = texts_of(CHANGED)
    with_lines(texts)
    shorter_text(texts)
    write_file(tmp_path / f'{CHANGED}.txt', texts)
    stream = go_on(config, stream, step=8)
    assert [len(file.changes) for file in stream.mixture.files].count(2) == 1
    (tmp_path / 'moved').mkdir()
    again = go_on(config, stream, step=9)
    np.testing.assert_array_equal(again.position, stream.position)
    work = prefetch.work_of(stream, stream.rows, stream.position)
    of_worker = prefetch.open_stream(work)
    expected = rows_of(stream, 500)  # two epochs and a half
    assert rows_of(again, 500) == expected
    assert rows_of(of_worker, 500) == expected
    names = {text.split()[0] for file in range(NUM_FILES) for text in texts_of(file)}
    names -= {f'0.{i}' for i in range(5)}
    names |= {f'new.{i}' for i in range(5)}
    assert set(names_of(expected)) == names


def test_files_of_other_names_or_numbers_are_not_those_of_the_run(tmp_path):
    config = config_of(write_files(tmp_path, 'txt'))
    stream = open_stream(config)
    (tmp_path / '4.txt').write_text('one file more\n')
    assert mixture_of_today(config, stream) is None
    (tmp_path / '4.txt').rename(tmp_path / '3.txt')
    assert mixture_of_today(config, stream) is not None
    (tmp_path / '3.txt').rename(tmp_path / 'other.txt')
    assert mixture_of_today(config, stream) is None
    (tmp_path / 'other.txt').unlink()
    assert mixture_of_today(config, stream) is None
    moved = tmp_path / 'moved'
    config = config_of(write_files(moved, 'txt'))
    correct(moved, 'txt', one_line)
    assert mixture_of_today(config, stream) is not None


def num_good_batches(files):
    """Return how many batches of a run come before a bad line."""
    num_batches = 0
    try:
        stream = open_stream(config_of(files, pack='no'), batch_size=4, num_epochs=None)
        while num_batches < 40:
            next(stream)
            num_batches += 1
    except ValueError:
        pass
    return num_batches


def write_bad_files(folder, corpus, kind):
    """Write the corpus in 80 files, one with a bad line. Return their glob, path and good text."""
    folder.mkdir()
    files = f'{folder}/*.{kind}'
    texts = pathlib.Path(corpus).read_text().splitlines()
    for file in range(80):
        write_file(folder / f'{file}.{kind}', texts[file::80])
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        good = gzip.decompress(content) if kind.endswith('.gz') else content
        lines = good.split(b'\n')
        lines[3] = b'\xff"no, ' + lines[3][:-2]
        bad = b'\n'.join(lines)
        path.write_bytes(gzip.compress(bad) if kind.endswith('.gz') else bad)
        if 8 < num_good_batches(files) < 40:
            return files, path, content
        path.write_bytes(content)
    raise AssertionError('no file is read late')


@pytest.mark.slow
def test_a_corrected_corpus_needs_the_setting(corpus, uninterrupted, tmp_path):
    """Also where its folder was moved; files that are missing or new stay refused."""
    shutil.copytree(uninterrupted, tmp_path / 'run')
    moved = pathlib.Path(shutil.copy(corpus, tmp_path))
    moved.write_text(moved.read_text() + 'one line more\n')
    config = small_config(str(moved))
    with pytest.raises(ValueError, match=rf'{moved} \(changed\).*data.allow_changed_files=True'):
        prepare(config, tmp_path / 'run')
    config.data.allow_changed_files = True
    prepared = prepare(config, tmp_path / 'run')
    prepared.workdir.lock.close()
    [file] = prepared.stream.mixture.files
    assert [change.step for change in file.changes] == [6]
    config.data.files = str(shutil.copy(moved, tmp_path / 'other.txt'))
    with pytest.raises(ValueError, match=r'made_up.txt \(missing\), .*other.txt \(new\)'):
        prepare(config, tmp_path / 'run')


LONG_KINDS = [pytest.param(kind, marks=pytest.mark.long) for kind in ('txt', 'csv')]


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['jsonl', 'txt.gz', *LONG_KINDS])
def test_a_run_goes_on_after_its_bad_line_was_corrected(corpus, command_line, tmp_path, kind):
    files, path, good = write_bad_files(tmp_path / 'text', corpus, kind)
    program = Program(tmp_path, files, steps=40, log=1, save=1, evaluate=40)
    workdir = tmp_path / 'run'
    arguments = [
        *program.arguments(workdir),
        '--config.data.vocabulary=bytes',
        '--config.data.targets={text}',
        '--config.data.pack=no',
        f'--config.data.validation_files={corpus}',
    ]
    allowed = '--config.data.allow_changed_files=True'
    result = command_line(*arguments)
    assert result.status == 1
    assert str(path) in result.stderr and 'data.allow_changed_files' in result.stderr
    step = checkpoint.steps(workdir)[-1]
    assert 2 < step < 39

    path.write_bytes(good)
    result = command_line(*arguments)
    assert result.status == 2
    assert 'data.allow_changed_files=True' in result.stderr
    extra = path.with_name(f'extra.{kind}')
    extra.write_bytes(good + good)
    result = command_line(*arguments, allowed)
    assert result.status == 2
    assert f'{extra} (new)' in result.stderr
    extra.unlink()

    shutil.copytree(workdir, tmp_path / 'stopped')
    result = command_line(*arguments, allowed)
    assert result.status == 0, result.stderr
    assert f'Changed since step {step:,}: {path}.' in result.stdout
    files = json.loads((workdir / 'checkpoint_40/data_files.json').read_bytes())
    assert [file['changes'][0][0] for file in files if file['changes']] == [step]

    arguments[1] = f'--workdir={tmp_path / "stopped"}'
    for num_steps, argument in ((step + 1, allowed), (40, '--config.data.num_workers=2')):
        result = command_line(*arguments, f'--config.train.steps={num_steps}', argument)
        assert result.status == 0, result.stderr
    assert 'Changed' not in result.stdout
    np.testing.assert_array_equal(position_of(tmp_path / 'stopped', 40), position_of(workdir, 40))
    found = [line for line in metrics_of(tmp_path / 'stopped') if line['run'] == 'train']
    expected = [line for line in metrics_of(workdir) if line['run'] == 'train']
    assert found == expected and len(found) == 40
