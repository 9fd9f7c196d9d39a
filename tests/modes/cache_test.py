"""`--mode=cache`: its layout, its content, its parts, and what SeqIO reads in it."""

import json
import os

import chex
import data_sets
import numpy as np
import own_task
import pytest
from corpora import make_config
from faults import contents
from permissions import full_disk

import tasks
import tasks.open
import vocabulary as vocabularies
from messages import Refused
from modes import cache, command_line, errors
from sources import cache as task_cache
from stream import Stream

NUM_ROWS = 60
MODULE = """
from tasks import Mixture, Task, proportional

TASKS = [
    Task('my:sums', files='FOLDER/*.csv', inputs='add: {a} {b}', targets='{sum}'),
    Task('text', files='FOLDER/text.txt', objective='span_corruption'),
    Mixture('both', {'my:sums': proportional(), 'text': proportional()}),
]
"""

TEST_SPLIT_ALONE = """
splits = {'train_split': 'none', 'validation_split': 'none', 'test_split': 'test'}
TASKS.append(Task('for_test', tfds='made_up', inputs='{a}', targets='{b}', **splits))
TASKS.append(Mixture('mixed', {'for_test': 1, 'text': 1}))
"""


def write_data(folder):
    """Two tables and a text. Return {inputs: targets} of the tables, and the lines."""
    expected = {}
    for name, first in (('a', 0), ('b', NUM_ROWS // 2)):
        rows = ['a,b,sum']
        for i in range(first, first + NUM_ROWS // 2):
            rows.append(f'{i},{i % 3},{i + i % 3}')
            expected[f'add: {i} {i % 3}'] = str(i + i % 3)
        (folder / f'{name}.csv').write_text('\n'.join(rows))
    lines = [f'line {i}' + ' word' * i for i in range(20)]
    (folder / 'text.txt').write_text('\n'.join(lines))
    (folder / 'my_tasks.py').write_text(MODULE.replace('FOLDER', str(folder)))
    return expected, lines


def cache_config(folder, **changes):
    settings = {'module': f'{folder}/my_tasks.py', 'task': 'both', 'cache_dirs': f'{folder}/caches'}
    settings |= {'vocabulary': 'bytes', 'extra_ids': 100, 'num_workers': 1}
    return make_config(**settings | {'validation_fraction': 0.2} | changes)


def read(folder, *splits):
    found = []
    for split in splits or ('train', 'validation'):
        found += data_sets.cached_examples(task_cache.open_split(folder, split))
    return found


def texts_of(folder):
    return sorted(example['targets_pretokenized'] for example in read(folder))


def next_batches(config, num_batches=1):
    mixture = tasks.open.open_mixture(config)
    stream = Stream(mixture, 'train', vocabularies.ByteVocabulary(100), config, 2, seed=0)
    return [next(stream) for _ in range(num_batches)], stream, mixture


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(cache, 'BYTES_PER_SHARD', 100)


@pytest.fixture
def expected(tmp_path):
    return write_data(tmp_path)


@pytest.fixture
def in_this_process(monkeypatch):
    """Shards are written without processes of their own, which take a second to start."""
    monkeypatch.setattr(cache, 'run_jobs', lambda *arguments: list(cache.reports(*arguments)))


def test_a_cache_has_each_record_once_as_texts_and_ids(tmp_path, expected):
    sums, lines = expected
    messages = cache.cache(cache_config(tmp_path))
    assert [message.split(':')[0] for message in messages] == [
        'my',
        f'text is cached in {tmp_path}/caches/text',
    ]
    vocabulary = vocabularies.ByteVocabulary(100)
    found = []
    folder = tmp_path / 'caches/my/sums'
    for split in ('train', 'validation'):
        examples = read(folder, split)
        stats = json.loads((folder / f'stats.{split}.json').read_text())
        assert stats['examples'] == len(examples)
        for feature in ('inputs', 'targets'):
            lengths = [len(example[feature]) for example in examples]
            assert stats[f'{feature}_tokens'] == sum(lengths)
            assert stats[f'{feature}_max_tokens'] == max(lengths)
            for example in examples:
                [ids] = vocabulary.encode([example[f'{feature}_pretokenized']])
                assert example[feature].tolist() == ids
        found += [(x['inputs_pretokenized'], x['targets_pretokenized']) for x in examples]
    assert sorted(found) == sorted(sums.items())
    assert texts_of(tmp_path / 'caches/text') == sorted(lines)
    names = {'.lock', 'COMPLETED', 'cache.json'}
    for split in ('train', 'validation'):
        names |= {f'info.{split}.json', f'stats.{split}.json'}
        names |= {f'{split}.{kind}-00000-of-00001' for kind in ('ids', 'index', 'tfrecord')}
    assert {path.name for path in folder.iterdir()} == names


def test_a_mixture_is_read_from_its_caches(tmp_path, expected, in_this_process):
    """Rates by size are known then; the same command uses the caches by itself."""
    config = cache_config(tmp_path)
    cache.cache(config)
    _, stream, mixture = next_batches(config, num_batches=20)
    assert mixture.corpus == 'cache'
    sizes = [task.source.train.num_records for task in mixture.tasks]
    assert [task.rate for task in mixture.tasks] == pytest.approx(np.array(sizes) / sum(sizes))
    assert (stream.counts[:, 0] > 0).all()
    with pytest.raises(Refused, match='vocabulary'):
        Stream(mixture, 'train', vocabularies.ByteVocabulary(), config, 2, seed=0)
    assert 'my:sums is cached already, in ' in cache.cache(config)[0]
    (tmp_path / 'caches/my/sums/cache.json').unlink()  # it names the vocabulary
    with pytest.raises(OSError, match='cache.json'):
        tasks.open.open_mixture(config)


@pytest.mark.parametrize('examples_per_block', [1, 7])
@pytest.mark.usefixtures('expected', 'small_shards', 'in_this_process')
def test_ids_in_their_own_files_are_those_of_the_records(tmp_path, monkeypatch, examples_per_block):
    """The same stream comes from both; damaged ids are bad records."""
    config = cache_config(tmp_path, on_bad_line='skip')
    cache.cache(config)

    def batches(reader):
        found, _, mixture = next_batches(config, num_batches=40)
        assert {type(task.source.train) for task in mixture.tasks} == {reader}
        return found, mixture

    found, mixture = batches(task_cache.CachedIds)
    task = mixture.tasks[0].source
    monkeypatch.setattr(task_cache, 'MAX_CACHE_BLOCKS', -(-NUM_ROWS // examples_per_block))
    every = list(tasks.open.open_mixture(config).tasks[0].source.records('train'))
    assert len(every) == task.train.num_records
    damaged = max((tmp_path / 'caches/my/sums').glob('train.ids-*'), key=os.path.getsize)
    content = bytearray(damaged.read_bytes())
    content[1] ^= 1
    damaged.write_bytes(content)
    source = tasks.open.open_mixture(config).tasks[0].source
    assert len(list(source.records('train'))) == len(every) - 1
    [fault] = source.faults()[0]
    assert f'{damaged}: example 0 ' in fault
    damaged.write_bytes(content[:-4])
    with pytest.raises(Refused, match=str(damaged)):
        tasks.open.open_mixture(config)
    for file in (tmp_path / 'caches').rglob('*.ids-*'):
        file.unlink()
    monkeypatch.setattr(task_cache, 'MAX_CACHE_BLOCKS', 1 << 20)
    for features, others in zip(found, batches(task_cache.CachedRecords)[0], strict=True):
        chex.assert_trees_all_equal(features, others)


def test_a_task_with_a_test_split_alone_is_not_cached(tmp_path, expected, in_this_process):
    """An empty cache would hide the split."""
    with (tmp_path / 'my_tasks.py').open('a') as file:
        file.write(TEST_SPLIT_ALONE)
    messages = cache.cache(cache_config(tmp_path, task='for_test'))
    assert messages == ['for_test is not cached: it has neither train nor validation.']
    assert not (tmp_path / 'caches/for_test').exists()
    messages = cache.cache(cache_config(tmp_path, task='mixed'))
    assert messages[0].startswith('for_test is not cached')
    assert messages[1].startswith('text is cached in')


@pytest.mark.slow
def test_parts_and_processes_change_nothing(tmp_path, expected, small_shards):
    whole = cache_config(tmp_path, cache_dirs=str(tmp_path / 'whole'), num_workers=2)
    cache.cache(whole)
    parts = cache_config(tmp_path, cache_dirs=str(tmp_path / 'parts'))
    for part in (3, 1):
        for message in cache.cache(parts, part, 3):
            assert 'files of other parts are still missing: the last part' in message
    assert not (tmp_path / 'parts/text/COMPLETED').exists()
    for message in cache.cache(parts, 2, 3):
        assert 'is cached in' in message
    assert contents(tmp_path / 'parts') == contents(tmp_path / 'whole')
    assert len(contents(tmp_path / 'whole/text')) > 15


def test_an_interrupted_cache_goes_on(tmp_path, expected, small_shards, in_this_process):
    """Complete shards are not written again; others are; nothing else is left."""
    config = cache_config(tmp_path)
    cache.cache(config, 1, 2)
    folder = tmp_path / 'caches/text'
    done = {file: file.stat().st_mtime_ns for file in folder.glob('*.tfrecord-*')}
    (folder / '.train.tfrecord-00001-of-00016.unfinished-1').write_bytes(b'half')
    assert done
    cache.cache(config)
    assert {file: file.stat().st_mtime_ns for file in done} == done
    assert not list(folder.glob('.*.unfinished*'))
    assert not (folder / '.progress').exists()


def test_a_half_written_cache_is_not_read_and_not_mixed(
    tmp_path, expected, small_shards, in_this_process
):
    config = cache_config(tmp_path, task='text')
    cache.cache(config, 1, 2)
    assert tasks.open.open_mixture(config).corpus == 'files'
    config.use_cached = 'yes'
    with pytest.raises(Refused, match='data.cache_dirs=.*data.task=.text.'):
        tasks.open.open_mixture(config)
    (tmp_path / 'text.txt').write_text('another text')
    for changes in ({'use_cached': 'auto'}, {'vocabulary': ''}, {'cache_dirs': ''}):
        config.update(changes)
        with pytest.raises(Refused, match=f'data.{min(changes)}|fingerprint'):
            cache.cache(config)


def test_a_bad_line_stops_the_cache_or_is_left_out(tmp_path, expected, capfd):
    with (tmp_path / 'b.csv').open('a') as file:
        file.write('\n1,2')
    config = cache_config(tmp_path, task='my:sums')
    with pytest.raises(Refused, match=f'line 32 of {tmp_path}/b.csv'):
        cache.cache(config)
    config.on_bad_line = 'skip'
    cache.cache(config)
    assert f'line 32 of {tmp_path}/b.csv' in capfd.readouterr().out
    assert len(read(tmp_path / 'caches/my/sums')) == 60


def test_a_full_disk(tmp_path, expected, capfd):
    """The error of a process that writes shards names the file, and the processes print nothing."""
    with full_disk(1000), pytest.raises(OSError) as refused:
        cache.cache(cache_config(tmp_path, task='text'))
    message = errors.one_line(refused.value)
    assert f'{tmp_path}/caches/text/' in message and 'File too large: ' in message
    assert 'unfinished' not in message and 'rrno' not in message
    assert 'Traceback' not in capfd.readouterr().err
    cache.cache(cache_config(tmp_path, task='text'))
    assert len(read(tmp_path / 'caches/text', 'train')) > 0


def test_parts_that_cannot_be():
    for text in ('', '1', '0/2', '3/2', 'a/b', '1/0', '1/2/3', '-1/2'):
        with pytest.raises(Refused, match=f'--shard={text}: '):
            command_line.parse_shard(text)


@pytest.mark.peers
def test_seqio_reads_the_same_content(tmp_path, expected, monkeypatch):
    seqio = pytest.importorskip('seqio', reason="SeqIO is not installed: pip install -e '.[peers]'")
    cache.cache(cache_config(tmp_path))
    features = {}
    for name in ('inputs', 'targets'):
        features[name] = seqio.Feature(seqio.ByteVocabulary(100), add_eos=False)
    splits = ['train', 'validation']
    source = seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=splits)
    steps = [seqio.CacheDatasetPlaceholder()]
    task = seqio.Task('my:sums', source=source, preprocessors=steps, output_features=features)
    folder = tmp_path / 'caches/my/sums'
    with monkeypatch.context() as patch:
        patch.setattr(seqio.utils, '_GLOBAL_CACHE_DIRECTORIES', [str(tmp_path / 'caches')])
        for split in splits:
            assert task.cache_dir == str(folder)
            dataset = task.get_dataset(None, split=split, use_cached=True, shuffle=False)
            found = [[x[name].tolist() for name in features] for x in dataset.as_numpy_iterator()]
            ours = [[x[name].tolist() for name in features] for x in read(folder, split)]
            assert sorted(found) == sorted(ours)
            assert task.get_cached_stats(split)['examples'] == len(ours)


def test_other_fields_of_an_example_are_cached_too(tmp_path, in_this_process):
    """Postprocessors and metrics read them; SeqIO's caches have them, too."""
    records = []
    for i in range(8):
        records.append(
            {
                'question': f'who {i}',
                'context': 'ann bob',
                'answers': ['ann', 'bob'][: i % 3],
                'id': f'q{i}',
                'number': i,
                'share': i / 4,
                'is_odd': i % 2 == 1,
                'sometimes': i if i % 2 else 'text',  # two dtypes
                'nested': {'a': i},
            }
        )
        if i:
            records[i]['only_later'] = 'yes'
    lines = [json.dumps(record) for record in records]
    (tmp_path / 'data.jsonl').write_text('\n'.join(lines))
    (tmp_path / 'my_tasks.py').write_text(
        f"""
from tasks import Task

def preprocess(record):
    yield record | {{'inputs': record['question'], 'targets': record['context']}}

TASKS = [Task('qa', files='{tmp_path}/data.jsonl', preprocess_fn=preprocess)]
"""
    )
    cache.cache(cache_config(tmp_path, task='qa', validation_fraction=0.0))
    found = read(tmp_path / 'caches' / 'qa', 'train')
    assert {example['id'] for example in found} == {record['id'] for record in records}
    for example in found:
        record = records[example['number']]
        kept = {'question', 'context', 'answers', 'id', 'number', 'share', 'is_odd'}
        texts = {'inputs', 'targets', 'inputs_pretokenized', 'targets_pretokenized'}
        assert example.keys() - texts == kept
        assert {name: example[name] for name in kept} == {name: record[name] for name in kept}


def test_tasks_with_own_objectives(tmp_path, in_this_process):
    """The cache has what an objective takes; the objective makes examples of it."""
    config = cache_config(tmp_path, task='all', module=own_task.write_objectives(tmp_path))
    cache.cache(config)
    lines = (tmp_path / 'text.txt').read_text().splitlines()
    assert texts_of(tmp_path / 'caches' / 'text') == sorted(line.strip() for line in lines)
    config.task = 'add'
    [batch], stream, _ = next_batches(config)
    assert stream.tasks[0].source.is_tokenized
    given = [f'add: {i} {i % 7}' for i in range(90)]
    for ids in batch['encoder_input_tokens'].tolist():
        inputs = stream.vocabulary.decode(ids)
        assert inputs not in given
        assert sorted(inputs) in [sorted(text) for text in given]
