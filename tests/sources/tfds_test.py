"""TFDS data sets that TFDS itself prepared, against what TFDS reads from them."""

import itertools
import json
import pathlib
import re
import shutil
import subprocess
import sys

import corpora
import data_sets
import numpy as np
import pytest
from data_sets import FORMATS, SIZES, SIZES_OF_GLUE, example, prepare, prepare_glue

import sources.files
import sources.open
import sources.tfds
import tasks
import tasks.open
import vocabulary as vocabularies
from configs import tiny
from messages import Refused
from prepare import prepare as prepare_run
from sources import tfds as tfds_source
from sources.tables import LineParser

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPRESSIONS = [
    'train',
    'train[:90%]',
    'train[30:50]',
    'train[25:26]',
    'train[1shard:3shard]',
    'train+test',
    'train[50:100]+test[5:]',
    'test+train[26:52]+train[3:4]',
    'all',
]


@pytest.fixture(scope='session')
def roots(make_once):
    return make_once('tfds', data_sets.write_roots)


@pytest.fixture(params=FORMATS)
def root(request, roots):
    return roots / request.param


@pytest.fixture
def own_root(root, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(root, tmp_path / 'own')


def make_config(root, **changes):
    config = corpora.make_config(**{'tfds': 'made_up', 'tfds_dir': str(root)} | changes)
    corpora.check_settings(config)
    return config


def open_part(root, expression='train', field=''):
    data_set = tfds_source.DataSet(tfds_source.find(root, 'made_up'))
    bad_lines = sources.BadLines('stop', max_fraction=0.0)
    config = corpora.make_config(text_field=field or 'text')
    parser = LineParser(config, bad_lines, whole_records=not field)
    return tfds_source.open_all([data_set], expression, data_set.decoder(parser.fields), parser)


def records_of(part):
    return list(itertools.chain.from_iterable(map(part.read, range(part.num_blocks))))


def read_by_tfds(root, expression):
    """What TFDS's own data source gives, with the types of Python."""
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(root / 'array_record/made_up/1.0.0')
    return [tfds_source.as_python(x) for x in builder.as_data_source(expression)]


@pytest.mark.parametrize('expression', EXPRESSIONS)
def test_slices_are_those_of_tfds(roots, expression):
    expected = read_by_tfds(roots, expression)
    for file_format in FORMATS:
        part = open_part(roots / file_format, expression)
        found = records_of(part)
        assert [record.fields for record in found] == expected
        assert part.num_records == len(expected)


def test_every_value_is_exact(root):
    for split, size in SIZES.items():
        expected = {}
        for i in range(size):
            expected[2**40 + i] = example(split, i)
            del expected[2**40 + i]['words']
            if i % 5 == 0:  # bytes are text if they are UTF-8
                expected[2**40 + i]['raw'] = ''
        records = records_of(open_part(root, split))
        assert {record.fields['number']: record.fields for record in records} == expected


@pytest.mark.parametrize('block_bytes', [7, 300, 1 << 16])
def test_blocks_of_any_size(root, block_bytes, monkeypatch):
    """Records that are longer than blocks, blocks without a record, one block for all."""
    reference = [record.fields for record in records_of(open_part(root))]
    monkeypatch.setattr(tfds_source, 'block_size', lambda *sizes: block_bytes)
    part = open_part(root)
    found = records_of(part)
    assert [record.fields for record in found] == reference
    assert len({record.name for record in found}) == SIZES['train']
    if block_bytes == 7:
        assert part.num_blocks >= SIZES['train']


def test_more_files_than_readers(roots, monkeypatch):
    reference = records_of(open_part(roots / 'array_record'))
    monkeypatch.setattr(tfds_source, 'NUM_READERS', 1)
    monkeypatch.setattr(tfds_source, 'BLOCKS_OF_LARGE_FILE', 5)
    part = open_part(roots / 'array_record')
    assert part.num_blocks == 23  # 25 or 26 records of a file in blocks of 5
    assert records_of(part) == reference


# The settings.


def make_stream(config, split='train', batch_size=4, **options):
    source = sources.open.open_source(config)
    vocabulary = vocabularies.ByteVocabulary()
    return corpora.stream_of(source, split, vocabulary, config, batch_size, seed=1, **options)


def texts_of(stream, feature):
    texts = []
    for batch in stream:
        texts += [stream.vocabulary.decode(row.tolist()) for row in batch[feature]]
    return texts


def test_text_to_text_gives_each_record_once_per_epoch(root):
    """Slots of a label, a number, a nested text and a translation."""
    config = make_config(
        root,
        inputs='{label} {number} {score} {translation/en}',
        targets='{translation/de}',
        train_split='train[:50%]+test',
    )
    stream = make_stream(config, num_epochs=2)
    of_epoch = []
    for record in records_of(open_part(root, config.train_split)):
        x = record.fields
        of_epoch.append(f'{x["label"]} {x["number"]} {x["score"]} {x["translation"]["en"]}')
    assert len(of_epoch) == 62
    found = [text for text in texts_of(stream, 'encoder_input_tokens') if text]
    assert sorted(found) == sorted(2 * of_epoch)


def test_a_nested_text(root):
    settings = {'inputs': '{text}', 'targets': '{answers/text/0}'}
    config = make_config(root, **settings, on_bad_line='skip', max_bad_fraction=0.5)
    source = sources.open.open_source(config)
    records = [record for record in records_of(source.train) if record]
    numbers = [int(record.fields['text'].split()[1]) for record in records]
    assert sorted(numbers) == [i for i in range(103) if i % 4]
    assert all(record.fields['answers/text/0'].startswith('0 of') for record in records)
    lines, count = source.faults()
    assert count == 26
    assert "'answers/text/0'" in lines[0]
    source = sources.open.open_source(make_config(root, text_field='raw'))
    with pytest.raises(Refused, match="'raw'"):  # bytes that are not UTF-8
        records_of(source.train)


def test_a_list_of_references(root):
    config = make_config(root, inputs='{text}', references='{answers/text}')
    source = sources.open.open_source(config)
    for record in records_of(source.train):
        number = int(record.fields['text'].split()[1])
        assert record.fields['answers/text'] == [f'{j} of {number}' for j in range(number % 4)]


def test_the_split_validation(root):
    """By default it is the split of this name."""
    source = sources.open.open_source(make_config(root))
    assert (source.corpus, source.train.num_records) == ('tfds', 103)
    assert source.validation.num_records == 20
    assert 'made_up:1.0.0' in source.description
    source = sources.open.open_source(make_config(root, validation_split='test[:3]'))
    assert source.validation.num_records == 3
    names = {pathlib.Path(file.path).name.split('.')[0] for file in source.files}
    assert names == {'made_up-train', 'made_up-test'}


def test_a_share_is_held_out_without_validation(root):
    settings = {'tfds': 'made_up_translate/de-en', 'text_field': 'en', 'validation_fraction': 0.5}
    source = sources.open.open_source(make_config(root, **settings))
    assert source.validation is None
    found = [*source.records('train'), *source.records('validation')]
    assert sorted(record.fields['en'] for record in found) == [f'{i} words' for i in range(5)]


def test_the_fingerprint_is_of_the_content(own_root, root, tmp_path):
    old = sources.open.open_source(make_config(root))
    assert sources.open.open_source(make_config(own_root)).fingerprint == old.fingerprint
    other = sources.open.open_source(make_config(root, train_split='train[:50]'))
    assert other.fingerprint != old.fingerprint
    shard = next((own_root / 'made_up/1.0.0').glob('*train*00002-of*'))
    damage(shard, 100)
    new = sources.open.open_source(make_config(own_root))
    assert new.fingerprint != old.fingerprint
    changes = sources.files.describe_changes(old.files, new.files)
    assert shard.name in changes


def damage(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 4
    file.write_bytes(content)


# C4.


def test_a_prepared_c4_is_found(root, tmp_path, monkeypatch):
    task = 'c4_v220_span_corruption'
    for version in ('2.2.1', '2.10.0', '3.1.0'):
        copy_as_c4(root, tmp_path, version)
    config = make_config(tmp_path, tfds='', task=task)
    source = open_c4(config)
    assert (source.corpus, source.train.num_records) == ('tfds', 103)
    assert f'{tmp_path}/c4/en/3.1.0' in source.description
    copy_as_c4(root, tmp_path, '2.2.0')
    assert f'{tmp_path}/c4/en/2.2.0' in open_c4(config).description
    monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
    config.tfds_dir = ''
    assert f'{tmp_path}/c4/en/2.2.0' in open_c4(config).description
    config.update(files='', tfds_dir=f'{tmp_path}/unfinished')  # does not lead to pydoc
    (tmp_path / 'unfinished/c4/en/incomplete.ABC123_3.0.1').mkdir(parents=True)
    with pytest.raises(Refused, match="data.tfds='c4/en'"):
        open_c4(config)


def open_c4(config):
    return tasks.open.open_mixture(config).tasks[0].source


def copy_as_c4(root, new, version):
    """The data set made_up under the name of C4, whose config is en."""
    folder = new / 'c4/en' / version
    shutil.copytree(root / 'made_up/1.0.0', folder)
    info = json.loads((folder / 'dataset_info.json').read_text())
    for file in folder.glob('made_up-*'):
        file.rename(folder / file.name.replace('made_up', 'c4'))
    info |= {'name': 'c4', 'configName': 'en', 'version': version}
    (folder / 'dataset_info.json').write_text(json.dumps(info))


# Tasks by name.


@pytest.fixture(scope='session')
def glue(make_once):
    return make_once('glue', prepare_glue)


def open_task(root, name, **changes):
    config = corpora.make_config(task=name, tfds_dir=str(root), **changes)
    return tasks.open.open_task(tasks.open.find(config), config).source


def sizes_of(source):
    splits = filter(source.may_hold, ('train', 'validation', 'test'))
    return {split: len(list(source.records(split))) for split in splits}


def test_a_named_task_reads_its_splits_and_holds_nothing_out(glue):
    source = open_task(glue, 'glue_cola_v002')
    assert sizes_of(source) == SIZES_OF_GLUE['cola']
    for record in source.records('test'):
        text = f'test sentence {record.fields["idx"]} '
        assert record.fields == {'sentence': text, 'label': -1, 'idx': record.fields['idx']}
    assert sizes_of(open_task(glue, 'glue_mnli_v002')) == {'train': 20}
    assert sizes_of(open_task(glue, 'glue_ax_v002')) == {'test': 6}
    source = open_task(
        glue, 'glue_cola_v002', train_split='train[:20]', validation_split='train[20:]'
    )
    assert sizes_of(source) == {'train': 20, 'validation': 10, 'test': 4}
    source = open_task(glue, 'glue_mnli_v002', validation_split='validation_matched')
    assert sizes_of(source) == {'train': 20, 'validation': 5}


def test_a_mixture_trains_on_tasks_that_have_records_and_a_rate(glue, tmp_path):
    """What is evaluated alone is not even opened."""
    (tmp_path / 'mine.py').write_text(
        """from tasks import Mixture, proportional
by_size = proportional()
names = ['glue_cola_v002', 'glue_mnli_v002', 'glue_ax_v002']
TASKS = [
    Mixture('sizes', dict.fromkeys(names, by_size)),
    Mixture('equal', dict.fromkeys([*names, 'glue_mnli_matched_v002'], 1.0)),
    Mixture('only_evaluated', {'glue_ax_v002': 1.0}),
]"""
    )
    config = corpora.make_config(task='sizes', tfds_dir=str(glue), module=f'{tmp_path}/mine.py')
    opened = tasks.open.open_mixture(config)
    shares = {task.name: task.rate for task in opened.tasks}
    assert shares == pytest.approx({'glue_cola_v002': 0.6, 'glue_mnli_v002': 0.4})
    config.task = 'equal'
    opened = tasks.open.open_mixture(config)
    assert {task.name: task.rate for task in opened.tasks} == dict.fromkeys(shares, 0.5)
    config.task = 'only_evaluated'
    with pytest.raises(Refused, match="'only_evaluated'"):
        tasks.open.open_mixture(config)


def test_another_version_is_read_and_named(glue, tmp_path):
    """T5's, else the newest that is prepared, else the one that the settings name."""
    shutil.copytree(glue / 'glue/cola/1.0.0', tmp_path / 'glue/cola/2.0.0')
    config = corpora.make_config(task='glue_cola_v002', tfds_dir=str(tmp_path))
    opened = tasks.open.open_mixture(config)
    [line] = tasks.open.other_versions(opened)
    assert re.match('glue/cola:1.0.0 is not prepared: glue_cola_v002 reads 30 .*/2.0.0.$', line)
    shutil.copytree(glue / 'glue/cola/1.0.0', tmp_path / 'glue/cola/1.0.0')
    assert tasks.open.other_versions(tasks.open.open_mixture(config)) == []
    config.tfds = 'glue/cola:2.0.0'
    assert tasks.open.open_mixture(config).tasks[0].source.description.endswith('/glue/cola/2.0.0')


@pytest.mark.parametrize('name', ['glue_mnli_v002', 'glue_ax_v002'])
def test_a_task_without_a_split_is_refused_for_training(glue, tmp_path, name):
    config = tiny.get_config()
    config.data.update(task=name, tfds_dir=str(glue), vocabulary='bytes')
    with pytest.raises(Refused, match=name):
        prepare_run(config, tmp_path / 'run')


# Faults.


# Settings, and what the message names.
WRONG = [
    ({'tfds': 'made'}, "its versions of 'made': none"),
    ({'tfds': 'made_up:2.0.0'}, "data.tfds='made_up:2.0.0': "),
    ({'tfds': 'made_up:2.0'}, "its versions of 'made_up': 1.0.0"),
    ({'tfds': '../made_up'}, "data.tfds='../made_up'"),
    ({'train_split': 'trian'}, "data.train_split='trian'"),
    ({'validation_split': 'dev'}, "data.validation_split='dev'"),
    ({'validation_split': 'train[99%:]'}, 'data.validation_split'),
    ({'text_field': 'content'}, "'content'"),
    ({'targets': '{en}'}, "'en'"),
    ({'files': 'x.txt'}, "data.tfds='made_up' and files, 'x.txt'"),
    ({'tfds': '', 'train_split': 'test'}, "data.train_split='test'"),
]


def test_a_wrong_setting_is_one_line(roots):
    for changes, part in WRONG:
        with pytest.raises(Refused) as error:
            sources.open.open_source(make_config(roots / 'tfrecord', **changes))
        assert part in str(error.value) and '\n' not in str(error.value)


def test_a_folder_without_a_part(own_root):
    folder = own_root / 'made_up/1.0.0'
    config = make_config(own_root)
    shard = next(folder.glob('*train*00001-of*'))
    for file in (shard, folder / 'features.json', folder / 'dataset_info.json'):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(Refused, match=f"data.tfds='made_up'|{shard}"):
            sources.open.open_source(config)
        file.write_bytes(b'')
        with pytest.raises(Refused, match=str(folder)) as empty:
            sources.open.open_source(config)
        assert '\n' not in str(empty.value)
        file.write_bytes(content)


def test_a_damaged_record_or_a_truncated_shard_stops_the_run(own_root):
    [shard] = (own_root / 'made_up/1.0.0').glob('*train*00002-of*')
    content = shard.read_bytes()
    damage(shard, 200)
    source = sources.open.open_source(make_config(own_root))
    with pytest.raises(Refused, match=str(shard)) as error:
        records_of(source.train)
    assert '\n' not in str(error.value)
    shard.write_bytes(content[:-20])
    with pytest.raises(Refused, match=str(shard)):
        records_of(open_part(own_root, 'train[60:70]'))


# Without TensorFlow.

READ_ALL = """
import sys
sys.path.insert(0, {tests!r})
import corpora, sources
for root in {roots!r}:
    config = corpora.make_config(tfds='made_up', tfds_dir=root, inputs='{{label}}', targets='{{text}}')
    part = sources.open.open_source(config).train
    assert sum(len(part.read(block)) for block in range(part.num_blocks)) == 103
print([name for name in sys.modules if name.split('.')[0] in ('tensorflow', 'jax', 'torch')])
"""


def test_reading_imports_no_tensorflow(roots):
    tests = str(ROOT / 'tests')
    program = READ_ALL.format(tests=tests, roots=[str(roots / name) for name in FORMATS])
    output = subprocess.check_output([sys.executable, '-c', program], cwd=ROOT, text=True)
    assert output.strip() == '[]'


@pytest.mark.peers
def test_what_tfds_writes_with_tensorflow(roots, tmp_path):
    """The same files as `copy_as_tfrecord`, and the same records in both formats."""
    pytest.importorskip('tensorflow')
    for file_format in FORMATS:
        prepare(tmp_path / file_format, file_format)
        for split in SIZES:
            found = records_of(open_part(tmp_path / file_format, split))
            reference = records_of(open_part(roots / file_format, split))
            assert [x.fields for x in found] == [x.fields for x in reference]
    for file in (roots / 'tfrecord/made_up/1.0.0').glob('*.tfrecord-*'):
        assert file.read_bytes() == (tmp_path / 'tfrecord/made_up/1.0.0' / file.name).read_bytes()


@pytest.mark.peers
@pytest.mark.parametrize('file_format', FORMATS)
def test_sequences_of_sequences(tmp_path, file_format):
    """TFDS writes them with TensorFlow alone."""
    pytest.importorskip('tensorflow')

    def nested_features(tfds):
        words = tfds.features.Sequence(tfds.features.Sequence(tfds.features.Text()))
        return {'number': np.int64, 'words': words}

    prepare(tmp_path, file_format, features_of=nested_features)
    for record in records_of(open_part(tmp_path)):
        i = record.fields['number'] - 2**40
        assert record.fields['words'] == example('train', i)['words']
    part = open_part(tmp_path, field='words/1/0')
    part.bad_lines = sources.BadLines('skip', max_fraction=1.0)
    texts = [record.fields['words/1/0'] for record in records_of(part) if record]
    assert texts == ['w1'] * len(range(2, 103, 3))


def test_several_data_sets_are_read_as_one(roots, tmp_path):
    for number, file_format in enumerate(['tfrecord', 'tfrecord', 'array_record']):
        shutil.copytree(roots / file_format / 'made_up', tmp_path / f'made_up_{number}')
    source = sources.open.open_source(make_config(tmp_path, tfds='made_up_0,made_up_1'))
    texts = [record.fields['text'] for record in source.records('validation')]
    one = [example('validation', i)['text'].strip() for i in range(SIZES['validation'])]
    assert sorted(texts) == sorted(one * 2)
    assert source.train.num_records == 2 * SIZES['train']
    with pytest.raises(Refused, match='array_record and tfrecord'):
        sources.open.open_source(make_config(tmp_path, tfds='made_up_1, made_up_2'))
