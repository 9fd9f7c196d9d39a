"""Random faults in files of every kind: found and named, or proven to change nothing that is read.

`pytest -m chaos` injects about 2,700 of them and prints how each kind ended; the short forms run in every suite.
"""

import collections
import io
import json
import os
import random
import re
import shutil

import numpy as np
import pytest
import questions
from checkpoint_test import assert_same, example_tree, mesh, sharded
from corpora import make_config
from faults import FAULTS, contents, delete, flip, stale, truncate, zero
from runs import ROOT, run, small_config
from tensor_bundle import bundle

import checkpoint
import infer
import tasks.open
from formats import mesh_tf
from formats.vocabulary import named_vocabulary
from messages import Refused
from modes import cache as cache_mode
from modes import errors
from modes import evaluate as evaluate_mode
from modes import infer as infer_mode
from modes import report as report_mode
from run import verify
from run.train_vocabulary import train_vocabulary
from sources import Share, tfrecord
from stream import TokenizedTask

GOLDEN = ROOT / 'tests/golden'


def numbers(chaos, quick=0, slow=0):
    """Run a test with a few faults in the quick or the slow suite, and with many in that of chaos."""
    params = [pytest.param(chaos, marks=pytest.mark.chaos)]
    if slow:
        params.insert(0, pytest.param(slow, marks=pytest.mark.slow))
    if quick:
        params.insert(0, quick)
    return pytest.mark.parametrize('num_faults', params)


def report(kind, seen):
    """Print how the faults of a kind of file have ended."""
    counts = collections.Counter(seen)
    print(f'\n{kind}: {sum(counts.values())} faults: {dict(sorted(counts.items()))}')


def refusal_of(read):
    """Return the line about an error that `read` raises, else None and what it returns."""
    try:
        return None, read()
    except (Refused, OSError) as error:  # main.py prints a line
        return errors.one_line(error), None
    except Exception as error:  # main.py would print a traceback
        return f'CRASH: {error!r}', None


# Checkpoints of this program.

CHECKPOINT_FILES = {
    'index': 'checkpoint',
    'chunk': 'target.embedding/[0-9]*',
    '.zarray': 'target.*/.zarray',
    'manifest': 'manifest.json',
    'config': 'config.json',
    'counts': 'data_counts.json',
    'files': 'data_files.json',
    'position': 'data_position.npy',
    'interval': 'interval.json',
    'vocabulary': 'vocabulary.model',
}
# Each fault of each file, but one: .zarray is the same in every step.
EVERY = [
    (kind, fault)
    for kind in CHECKPOINT_FILES
    for fault in FAULTS
    if (kind, fault) != ('.zarray', stale)
]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """A workdir with checkpoints 3 and 5, and the tree of each."""
    workdir = tmp_path_factory.mktemp('saved')
    trees = {3: example_tree(), 5: example_tree()}
    trees[5] |= {'target/embedding': -trees[3]['target/embedding'], 'state/step': np.int32(5)}
    for step, tree in trees.items():
        position = io.BytesIO()
        np.save(position, np.full((8, 4), step))
        files = {
            'config.json': b'{"train": {"steps": %d}}' % step,
            'data_counts.json': b'{"text": [%d, 0]}' % step,
            'data_files.json': b'[{"path": "text-%d"}]' % step,
            'data_position.npy': position.getvalue(),
            'interval.json': b'[{"loss": %d}]' % step,
            'vocabulary.model': b'pieces of step %d' % step,
        }
        checkpoint.save(workdir, step, sharded(tree, mesh(4, 2)), files)
    assert verify.newest_valid(workdir, pytest.fail) == 5
    return workdir, trees


@numbers(slow=len(EVERY), chaos=800)
def test_a_damaged_checkpoint_is_named_and_the_one_before_comes_back(tmp_path, saved, num_faults):
    """Bit for bit; the damaged one is set aside as it is."""
    source, trees = saved
    rng = random.Random(1)
    seen = []
    while len(seen) < num_faults:
        kind, fault = EVERY[len(seen) % len(EVERY)]
        workdir = tmp_path / 'run'
        directory = workdir / 'checkpoint_5'
        shutil.rmtree(workdir, ignore_errors=True)
        shutil.copytree(source, workdir)
        original = contents(directory)
        file = rng.choice(sorted(directory.glob(CHECKPOINT_FILES[kind])))
        others = sorted(
            other for other in directory.rglob('*') if other.is_file() and other != file
        )
        fault(rng, file, others, workdir / 'checkpoint_3' / file.relative_to(directory))
        damaged = contents(directory)
        changed = {name for name in original if damaged.get(name) != original[name]}
        if not changed:  # zeros that are zeroed: another one is drawn
            continue
        if 'manifest.json' in changed:
            changed = {'manifest.json'}  # then nobody knows what should be in the others
        with pytest.raises(Refused) as error:
            verify.verify(directory)
        reports = []
        assert verify.newest_valid(workdir, reports.append) == 3
        assert reports == [f'{error.value}. It is set aside as checkpoint_5.damaged-1.']
        assert all(name in reports[0] for name in changed), (changed, reports)
        assert checkpoint.steps(workdir) == [3]
        assert contents(workdir / 'checkpoint_5.damaged-1') == damaged
        assert_same(checkpoint.restore(workdir / 'checkpoint_3'), trees[3])
        seen.append(f'{kind} {fault.__name__}')
    report('checkpoints', ['found and survived'] * len(seen))
    assert len(set(seen)) == len(EVERY)


# Formats of others that have checksums.


@numbers(quick=40, chaos=400)
def test_a_damaged_gzipped_array_of_t5x_is_named(tmp_path, num_faults):
    """T5X's own checkpoints have no other checksums than those of gzip."""
    golden = GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6'
    expected = checkpoint.restore(golden)
    shutil.copytree(golden, tmp_path / 'checkpoint_6')
    chunks = sorted((tmp_path / 'checkpoint_6').glob('*/[0-9]*'))
    rng = random.Random(2)
    seen = []
    while len(seen) < num_faults:
        file = rng.choice(chunks)
        fault = rng.choice([flip, truncate, delete, zero])
        content = file.read_bytes()
        fault(rng, file, None, None)
        path = file.parent.name.replace('.', '/')
        leaf = {path: checkpoint.read_index(tmp_path / 'checkpoint_6')[path]}
        damaged = file.read_bytes() if file.exists() else b''
        refusal, arrays = refusal_of(lambda leaf=leaf: checkpoint.restore(leaf))
        # gzip has no checksum of its header, where the time and the system are. TensorStore takes a file whose
        # last eight bytes, the checksum and the size, are cut: one fault leaves the numbers as they are then.
        is_header = damaged[10:] == content[10:]
        is_end = content.startswith(damaged) and len(damaged) >= len(content) - 8
        if refusal is not None:
            assert re.match(f'{file.parent}.*: copy ', refusal)
            seen.append('found')
        elif damaged != content:
            assert is_header or is_end, (fault, file)
            assert_same(arrays, {path: expected[path]})
            seen.append('harmless')
        file.write_bytes(content)
    report("T5X's gzipped arrays", seen)
    assert seen.count('found') > 0.9 * num_faults


@numbers(quick=20, chaos=200)
@pytest.mark.parametrize('of', ['golden', 'ours'])
def test_a_damaged_bundle_of_tensorflow_is_named(tmp_path, of, num_faults):
    whole = tmp_path / 'whole'
    left_out = shutil.ignore_patterns('*.npz', '*.json')
    shutil.copytree(GOLDEN / 'mtf_t5_1_1', whole, ignore=left_out)
    prefix = mesh_tf.find_prefix(whole)
    entries = mesh_tf.read_bundle_index(prefix)
    arrays = {name: entry.read() for name, entry in entries.items()}
    if of == 'ours':  # with compressed blocks, and in three shards
        shutil.rmtree(whole)
        whole.mkdir()
        bundle(whole / prefix.name, arrays)

    def read(folder):
        index = mesh_tf.read_index(folder / prefix.name)
        return {path: checkpoint.read_leaf(leaf) for path, leaf in index.items()}

    read(whole)
    older = tmp_path / 'older'
    older.mkdir()
    bundle(older / prefix.name, {name: np.zeros_like(x) for name, x in arrays.items()})
    rng = random.Random(of)
    seen = []
    while len(seen) < num_faults:
        folder = tmp_path / 'copy'
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        files = sorted(file for file in folder.iterdir() if 'model.ckpt' in file.name)
        file = rng.choice(files)
        others = [other for other in files if other != file and other.suffix != '.index']
        older_files = sorted(older.glob(f'*{file.suffix[:5]}*'))
        fault = rng.choice([*FAULTS, swap_parts])
        fault(rng, file, others, rng.choice(older_files))
        if contents(folder) == contents(whole):
            continue
        with pytest.raises(Refused) as error:
            read(folder)
            pytest.fail(f'{fault.__name__} in {file.name} went undetected')
        assert 'model.ckpt-' in str(error.value)
        seen.append('found')
    report(f"TensorFlow's bundles, {of}", seen)


def swap_parts(rng, file, others, older):
    """Swap two parts of one file."""
    content = file.read_bytes()
    a, b = sorted(rng.sample(range(len(content)), 2))
    length = min(rng.choice([1, 16, 4096]), b - a, len(content) - b)
    between = content[a + length : b]
    behind = content[b + length :]
    parts = (content[:a], content[b : b + length], between, content[a : a + length], behind)
    file.write_bytes(b''.join(parts))


# Task caches.

CACHE_FILES = [
    '*.tfrecord-*',
    '*.ids-*',
    '*.index-*',
    'info.*',
    'stats.*',
    'cache.json',
    'vocabulary.model',
]


def write_cache(folder, first, vocabulary, **changes):
    """Cache a task of two shards in this process. Return the folder of the cache."""
    folder.mkdir()
    for part in range(2):
        rows = [f'{i},{i * i}' for i in range(first + 20 * part, first + 20 * part + 20)]
        (folder / f'{part}.csv').write_text('\n'.join(['a,b', *rows]))
    template = 'what is the square of the whole number {a}, please?'
    task = f"Task('squares', files='{folder}/*.csv', inputs={template!r}, targets='{{b}}')"
    (folder / 'own.py').write_text(f'from tasks import Task\nTASKS = [{task}]\n')
    cache_mode.cache(cache_config(folder, vocabulary, use_cached='no', **changes))
    return folder / 'caches/squares'


def cache_config(folder, vocabulary, **changes):
    return make_config(
        module=f'{folder}/own.py',
        task='squares',
        cache_dirs=f'{folder}/caches',
        vocabulary=str(vocabulary),
        **{'validation_fraction': 0.3} | changes,
    )


def read_cache(folder, vocabulary='', **changes):
    """Return all that is read of a cache: as training does, and with all that is stored."""
    vocabulary = vocabulary or folder / 'caches/squares'
    config = cache_config(folder, vocabulary, use_cached='yes', **changes)
    mixture = tasks.open.open_mixture(config)
    vocabulary = named_vocabulary('data.vocabulary', config.vocabulary, 100)
    source = TokenizedTask(mixture.tasks[0], config, vocabulary).source
    found = []
    for split in ('train', 'validation'):
        for lane in range(2):
            share = Share(seed=0, epoch=0, lane=lane, num_lanes=2)
            found += [document.record.fields for document in source.documents(split, share)]
        found += [record.fields for record in source.records(split, whole=True)]
    assert found
    return repr(found)


@pytest.fixture
def in_this_process(monkeypatch):
    """Caches are written in small shards by this process."""
    monkeypatch.setattr(cache_mode, 'BYTES_PER_SHARD', 100)
    monkeypatch.setattr(cache_mode, 'run_jobs', lambda *jobs: list(cache_mode.reports(*jobs)))


def replace_records(folder, older):
    shutil.copy(older / 'train.tfrecord-00000-of-00002', folder)
    return 'train.tfrecord-00000-of-00002'


def swap_records(folder, older):
    files = sorted(folder.glob('train.tfrecord-*'))
    first = files[0].read_bytes()
    files[0].write_bytes(files[1].read_bytes())
    files[1].write_bytes(first)
    return 'train.tfrecord-0000'  # one of the two


def empty_records(folder, older):
    (folder / 'train.tfrecord-00000-of-00002').write_bytes(b'')
    return 'stats.train.json'


def drop_a_record(folder, older):
    file = folder / 'train.tfrecord-00000-of-00002'
    os.truncate(file, tfrecord.record_offsets(file)[-1])
    return file.name


def zero_entries(folder, older):
    file = folder / 'train.index-00000-of-00002'
    content = file.read_bytes()
    file.write_bytes(content[:96] + bytes(96) + content[192:])
    return 'train.ids-00000-of-00002'


def remove_info(folder, older):
    (folder / 'info.train.json').unlink()
    return 'info.train.json'


def rename_hash(folder, older):
    file = folder / 'cache.json'
    file.write_text(file.read_text().replace('vocabulary_hash', 'vocabulary_hasi'))
    return 'data.vocabulary'


@pytest.mark.parametrize(
    'fault',
    [
        replace_records,
        swap_records,
        empty_records,
        drop_a_record,
        zero_entries,
        remove_info,
        rename_hash,
    ],
)
def test_faults_of_a_task_cache_that_no_checksum_finds(tmp_path, in_this_process, fault):
    """The shards of the older cache have as many records."""
    folder = write_cache(tmp_path / 'whole', first=0, vocabulary='bytes', validation_fraction=0.0)
    older = write_cache(tmp_path / 'older', first=7, vocabulary='bytes', validation_fraction=0.0)
    read_cache(tmp_path / 'whole', vocabulary='bytes', validation_fraction=0.0)
    named = fault(folder, older)
    refusal, _ = refusal_of(
        lambda: read_cache(tmp_path / 'whole', vocabulary='bytes', validation_fraction=0.0)
    )
    assert refusal is not None and 'CRASH' not in refusal
    assert str(folder) in refusal and named in refusal


@numbers(quick=15, chaos=500)
def test_a_damaged_task_cache_is_named(tmp_path, uninterrupted, in_this_process, num_faults):
    """Or what is read of it is the same: of a statistic that nobody reads, of a record's own ids."""
    vocabulary = uninterrupted / 'vocabulary.model'
    write_cache(tmp_path / 'whole', first=0, vocabulary=vocabulary)
    older = write_cache(tmp_path / 'older', first=7, vocabulary=vocabulary)
    shutil.copytree(tmp_path / 'whole', tmp_path / 'copy')
    folder = tmp_path / 'copy/caches/squares'
    assert len(list(folder.glob('train.*-of-00002'))) == 6
    expected = read_cache(tmp_path / 'copy')
    whole = contents(folder)
    rng = random.Random(3)
    seen = []
    undetected = []
    while len(seen) < num_faults:
        file = rng.choice(sorted(folder.glob(rng.choice(CACHE_FILES))))
        others = sorted(other for other in folder.iterdir() if other != file)
        fault = rng.choice(FAULTS)
        fault(rng, file, others, older / file.name)
        damaged = contents(folder)
        changed = {name for name in whole if damaged.get(name) != whole[name]}
        if changed:
            refusal, found = refusal_of(lambda: read_cache(tmp_path / 'copy'))
            what = f'{fault.__name__} of {changed}: {refusal}'
            if refusal is not None and str(folder) in refusal and 'CRASH' not in refusal:
                seen.append('found')
            elif refusal is None and found == expected:
                seen.append('harmless')
            else:
                seen.append('undetected')
                undetected.append(what)
        for name, content in whole.items():
            (folder / name).write_bytes(content)
    report('task caches', seen)
    assert not undetected, '\n'.join(undetected)
    assert seen.count('found') > 0.5 * num_faults


# Answers of --mode=infer.

SETTINGS = {
    'data.vocabulary': 'bytes',
    'data.lengths.inputs': 32,
    'data.lengths.targets': 32,
    'decode.batch_size': 4,
}
T5X = GOLDEN / 't5x_t5_1_1_tiny/checkpoint_6'


def answer(**request):
    job = infer_mode.prepare(infer_mode.Request(str(T5X), score=True, **request), None, SETTINGS)
    return infer_mode.infer_all(job)


@numbers(slow=12, chaos=200)
def test_damaged_answers_are_made_anew(tmp_path, monkeypatch, num_faults):
    """Those of two shards, their marks, their merged file and infer.json, which may be refused."""
    t5 = infer.load(T5X, vocabulary='bytes')
    monkeypatch.setattr(infer_mode, 'load', lambda job: t5)  # compiled once
    monkeypatch.setattr(infer, 'EXAMPLES_PER_CHUNK', 4)
    for name, suffix in (('whole', 'é'), ('older', 'è')):
        lines = [{'inputs': f'{i} {suffix}', 'targets': f'{i}' * (i % 5)} for i in range(12)]
        file = tmp_path / f'{name}.jsonl'
        file.write_text('\n'.join(map(json.dumps, lines)))
        shutil.copy(file, tmp_path / 'questions.jsonl')
        for shard in (1, 2):
            output_dir = str(tmp_path / name)
            request = {'input': str(tmp_path / 'questions.jsonl'), 'num_shards': 2}
            answer(**request, output_dir=output_dir, shard=shard)
    shutil.copy(tmp_path / 'whole.jsonl', tmp_path / 'questions.jsonl')
    whole = contents(tmp_path / 'whole')
    folder = tmp_path / 'copy'
    rng = random.Random(4)
    seen = []
    undetected = []
    while len(seen) < num_faults:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / 'whole', folder)
        file = folder / rng.choice(sorted(whole))
        others = sorted(other for other in folder.iterdir() if other != file)
        fault = rng.choice(FAULTS)
        fault(rng, file, others, tmp_path / 'older' / file.name)
        damaged = contents(folder)
        changed = {name for name in whole if damaged.get(name) != whole[name]}
        if not changed:
            continue
        refusals = []
        for shard in (1, 2, 1):  # the first may name what the second has to make
            refusal, _ = refusal_of(
                lambda shard=shard: answer(**request, output_dir=str(folder), shard=shard)
            )
            refusals.append(refusal)
        found = contents(folder)
        if found == whole and refusals[-1] is None:
            seen.append('made again')
        elif infer_mode.SETTINGS in changed and found == damaged and str(folder) in refusals[-1]:
            seen.append('found')
        elif found | {infer_mode.SETTINGS: b''} == whole | {infer_mode.SETTINGS: b''}:
            assert json.loads(found[infer_mode.SETTINGS]) == json.loads(whole[infer_mode.SETTINGS])
            seen.append('harmless')
        else:
            seen.append('undetected')
            undetected.append(f'{fault.__name__} of {changed}: {refusals}')
    report('answers', seen)
    assert not undetected, '\n'.join(undetected)


# The other files of a run.


def drawn_file(rng, folder):
    """Return a file of a run that is in no checkpoint, and the others."""
    files = []
    for file in sorted(folder.rglob('*')):
        if file.is_file() and 'checkpoint_' not in str(file.relative_to(folder)):
            files.append(file)
    file = rng.choice(files)
    files.remove(file)
    return file, files


def outcomes(folder, whole, readers):
    """Return how reading a run ends that has faults: {reader: 'read' or 'found'}, or what is wrong."""
    found = contents(folder)
    changed = {name for name in whole if found.get(name) != whole[name]}
    ended = {}
    for title, read in readers.items():
        refusal, problem = refusal_of(read)
        ended[title] = 'read'
        if refusal is not None:
            ended[title] = 'found'
            problem = None
            if 'CRASH' in refusal or not any(str(folder / name) in refusal for name in changed):
                problem = refusal
        if problem:
            ended[title] = f'{title} with faults in {changed}: {problem}'
    return ended


def assert_no_problem(kind, seen):
    """Print the counts; fail where reading ended otherwise than by reading or by a line."""
    report(kind, [' '.join(sorted(set(each.values()) & {'read', 'found'})) for each in seen])
    problems = [text for each in seen for text in each.values() if text not in ('read', 'found')]
    assert not problems, '\n'.join(problems)


@numbers(slow=8, chaos=200)
def test_a_damaged_file_beside_the_checkpoints_does_not_change_a_run(
    tmp_path, uninterrupted, corpus, num_faults, capsys
):
    """It continues to the same state or names the file; a report does so, too."""
    config = small_config(corpus, steps=9)
    expected = run(config, shutil.copytree(uninterrupted, tmp_path / 'expected'))
    of_end = contents(expected / 'checkpoint_9')
    older = shutil.copytree(uninterrupted, tmp_path / 'older')
    other_words = train_vocabulary(['other words', 'of others'], 20)
    (older / 'vocabulary.model').write_bytes(other_words)
    folder = tmp_path / 'copy'

    def go_on():
        run(config, folder)
        if contents(folder / 'checkpoint_9') != of_end:
            return 'another state'
        return None

    def write_report():
        report_mode.write([str(folder)], str(tmp_path / 'report'))

    rng = random.Random(5)
    seen = []
    while len(seen) < num_faults:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(uninterrupted, folder)
        file, others = drawn_file(rng, folder)
        rng.choice(FAULTS)(rng, file, others, older / file.relative_to(folder))
        whole = contents(uninterrupted)
        seen.append(outcomes(folder, whole, {'report': write_report, 'run': go_on}))
    capsys.readouterr()
    assert_no_problem('files of a run', seen)


@numbers(slow=8, chaos=200)
def test_damaged_results_are_named_or_made_anew(tmp_path, evaluated, num_faults, capsys):
    folder = tmp_path / 'copy'
    t5 = infer.load(evaluated / 'run/checkpoint_6')
    older = shutil.copytree(evaluated / 'run', tmp_path / 'older')
    for file in (older / 'inference_eval').glob('*.json*'):
        file.write_bytes(file.read_bytes().replace(b'0', b'1'))

    def write_report():
        report_mode.write([str(folder)], str(tmp_path / 'report'))

    def evaluate():
        config = questions.make_config(evaluated)
        evaluation = evaluate_mode.CheckpointEvaluation(config, str(folder), step='all')
        evaluation.t5 = t5  # compiled once
        evaluation.run()

    rng = random.Random(6)
    seen = []
    whole = contents(evaluated / 'run')
    while len(seen) < num_faults:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(evaluated / 'run', folder)
        file, others = drawn_file(rng, folder)
        rng.choice(FAULTS)(rng, file, others, older / file.relative_to(folder))
        seen.append(outcomes(folder, whole, {'report': write_report, 'evaluate': evaluate}))
    capsys.readouterr()
    assert_no_problem('results', seen)
