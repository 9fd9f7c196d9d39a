"""Each fault in files of every kind: found and named in one line, or proven to change nothing that is read."""

import os
import random
import re
import shutil

import pytest
from checkpoint_test import assert_same
from corpora import make_config
from faults import FAULTS, contents, delete, flip, truncate
from runs import ROOT, run, small_config

import checkpoint
import tasks.open
from formats import mesh_tf
from formats.vocabulary import named_vocabulary
from messages import Refused
from modes import cache as cache_mode
from modes import errors
from modes import report as report_mode
from run import verify
from run.train_vocabulary import train_vocabulary
from sources import Share, tfrecord
from stream import TokenizedTask

GOLDEN = ROOT / 'tests/golden'


def refusal_of(read):
    """Return the line about an error that `read` raises, else None and what it returns."""
    try:
        return None, read()
    except (Refused, OSError) as error:  # main.py prints a line; a traceback of anything else
        return errors.one_line(error), None


def copied(source, folder):
    """Return `folder` as a new copy of another one."""
    shutil.rmtree(folder, ignore_errors=True)
    return shutil.copytree(source, folder)


# Checkpoints of this program.


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_comes_back(tmp_path, uninterrupted):
    """It is set aside as it is."""
    whole = contents(uninterrupted / 'checkpoint_6')
    arrays = ('target.token_embedder.embedding/0.0', 'target.token_embedder.embedding/.zarray')
    rng = random.Random(1)
    for name in (*arrays, *(name for name in whole if '/' not in name)):
        for fault in FAULTS:
            workdir = copied(uninterrupted, tmp_path / 'run')
            directory = workdir / 'checkpoint_6'
            fault(rng, directory / name, workdir / 'checkpoint_3' / name)
            damaged = contents(directory)
            if damaged == whole:  # the same in both steps
                continue
            with pytest.raises(Refused) as error:
                verify.verify(directory)
            assert name in str(error.value) and '\n' not in str(error.value)
            reports = []
            assert verify.newest_valid(workdir, reports.append) == 3
            assert reports == [f'{error.value}. It is set aside as checkpoint_6.damaged-1.']
            assert contents(workdir / 'checkpoint_6.damaged-1') == damaged


# Formats of others that have checksums.


def test_a_damaged_gzipped_array_of_t5x_is_named(tmp_path):
    """T5X's own checkpoints have no other checksums than those of gzip."""
    directory = copied(GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6', tmp_path / 'checkpoint_6')
    index = checkpoint.read_index(directory)
    chunks = sorted(directory.glob('*/[0-9]*'))
    rng = random.Random(2)
    for fault in [flip, truncate, delete] * 10:
        file = rng.choice(chunks)
        content = file.read_bytes()
        fault(rng, file, None)
        path = file.parent.name.replace('.', '/')
        refusal, arrays = refusal_of(lambda path=path: checkpoint.restore({path: index[path]}))
        damaged = file.read_bytes() if file.exists() else b''
        file.write_bytes(content)
        if refusal is not None:
            assert re.match(f'{file.parent}.*: copy ', refusal)
            continue
        # gzip has no checksum of its header, where the time and the system are. TensorStore takes a file whose
        # last eight bytes, the checksum and the size, are cut.
        is_header = damaged[10:] == content[10:]
        is_end = content.startswith(damaged) and len(damaged) >= len(content) - 8
        assert is_header or is_end, fault
        assert_same(arrays, checkpoint.restore({path: index[path]}))


def test_a_damaged_bundle_of_tensorflow_is_named(tmp_path):
    rng = random.Random(3)
    for fault in [flip, truncate, delete] * 5:
        folder = copied(GOLDEN / 'mtf_t5_1_1', tmp_path / 'copy')
        file = rng.choice(sorted(folder.glob('model.ckpt*[0-9x]')))
        fault(rng, file, None)
        with pytest.raises(Refused, match='model.ckpt-'):
            index = mesh_tf.read_index(mesh_tf.find_prefix(folder))
            for leaf in index.values():
                checkpoint.read_leaf(leaf)


# Task caches.


def write_cache(folder, first, vocabulary):
    """Cache a task of two shards in this process. Return the folder of the cache."""
    folder.mkdir()
    for part in range(2):
        rows = [f'{i},{i * i}' for i in range(first + 20 * part, first + 20 * part + 20)]
        (folder / f'{part}.csv').write_text('\n'.join(['a,b', *rows]))
    template = 'what is the square of the whole number {a}, please?'
    task = f"Task('squares', files='{folder}/*.csv', inputs={template!r}, targets='{{b}}')"
    (folder / 'own.py').write_text(f'from tasks import Task\nTASKS = [{task}]\n')
    cache_mode.cache(cache_config(folder, vocabulary, use_cached='no'))
    return folder / 'caches/squares'


def cache_config(folder, vocabulary, **changes):
    changes |= {'module': f'{folder}/own.py', 'task': 'squares', 'validation_fraction': 0.3}
    return make_config(cache_dirs=f'{folder}/caches', vocabulary=str(vocabulary), **changes)


def read_cache(folder):
    """Return all that is read of a cache: as training does, and with all that is stored."""
    config = cache_config(folder, folder / 'caches/squares', use_cached='yes')
    mixture = tasks.open.open_mixture(config)
    vocabulary = named_vocabulary('data.vocabulary', config.vocabulary, 100)
    source = TokenizedTask(mixture.tasks[0], config, vocabulary).source
    found = []
    for split in ('train', 'validation'):
        for lane in range(2):
            share = Share(seed=0, epoch=0, lane=lane, num_lanes=2)
            found += [document.record.fields for document in source.documents(split, share)]
        found += [record.fields for record in source.records(split, whole=True)]
    return repr(found)


def drop_a_record(rng, file, older):
    os.truncate(file, tfrecord.record_offsets(file)[-1])


def zero_entries(rng, file, older):
    content = file.read_bytes()
    file.write_bytes(content[:96] + bytes(96) + content[192:])


CACHE_FAULTS = {
    'train.tfrecord-*': [*FAULTS, drop_a_record],
    'train.ids-*': FAULTS,
    'train.index-*': [*FAULTS, zero_entries],
    'info.train.json': FAULTS,
    'stats.train.json': FAULTS,
    'cache.json': FAULTS,
    'vocabulary.model': [flip, truncate, delete],
}


def test_a_damaged_task_cache_is_named(tmp_path, uninterrupted, monkeypatch):
    """Or what is read of it is the same: of a statistic that nobody reads, of a record's own ids."""
    monkeypatch.setattr(cache_mode, 'BYTES_PER_SHARD', 100)
    monkeypatch.setattr(cache_mode, 'run_jobs', lambda *jobs: list(cache_mode.reports(*jobs)))
    vocabulary = uninterrupted / 'vocabulary.model'
    folder = write_cache(tmp_path / 'cache', first=0, vocabulary=vocabulary)
    older = write_cache(tmp_path / 'older', first=7, vocabulary=vocabulary)
    expected = read_cache(tmp_path / 'cache')
    whole = contents(folder)
    rng = random.Random(4)
    num_found = 0
    for pattern, faults in CACHE_FAULTS.items():
        for fault in faults:
            file = sorted(folder.glob(pattern))[0]
            fault(rng, file, older / file.name)
            refusal, found = refusal_of(lambda: read_cache(tmp_path / 'cache'))
            for name, content in whole.items():
                (folder / name).write_bytes(content)
            what = f'{fault.__name__} of {file.name}: {refusal}'
            assert found == expected or (refusal and str(folder) in refusal), what
            num_found += refusal is not None
    assert num_found > 20


# The other files of a run.


@pytest.mark.slow
@pytest.mark.parametrize('name', ['config.json', 'metrics.jsonl', 'vocabulary.model'])
def test_a_damaged_file_beside_the_checkpoints_does_not_change_a_run(
    tmp_path, uninterrupted, corpus, name
):
    """It continues to the same state or names the file; a report does so, too."""

    def state_of(folder):
        files = contents(folder / 'checkpoint_7')
        return {name: files[name] for name in files.keys() - {'seconds.json', checkpoint.MANIFEST}}

    config = small_config(corpus, steps=7)
    expected = state_of(run(config, copied(uninterrupted, tmp_path / 'expected')))
    older = tmp_path / name
    older.write_bytes((uninterrupted / name).read_bytes().replace(b'0', b'1'))
    if name == 'vocabulary.model':
        older.write_bytes(train_vocabulary(['other words', 'of others'], 20))
    folder = tmp_path / 'copy'
    rng = random.Random(5)
    for fault in FAULTS:
        copied(uninterrupted, folder)
        fault(rng, folder / name, older)
        for read in (
            lambda: report_mode.write([str(folder)], str(tmp_path / 'report')),
            lambda: run(config, folder),
        ):
            refusal, _ = refusal_of(read)
            assert refusal is None or (str(folder) in refusal and name in refusal), refusal
        if refusal is None:
            assert state_of(folder) == expected
