"""TFDS data sets that tests prepare with TFDS itself.

TFDS writes TFRecord files with TensorFlow alone. So `copy_as_tfrecord` writes the records of an
ArrayRecord data set again; a test with TensorFlow shows that TFDS writes the same.
"""

import shutil

import numpy as np

import paths
from sources import BadLines, tfrecord
from sources import cache as task_cache
from sources.files import read_records

FORMATS = ['array_record', 'tfrecord']
SIZES = {'train': 103, 'validation': 20, 'test': 10}
NUM_SHARDS = 4


def example(split, i):
    """Record number i of a split."""
    return {
        'text': f'{split} {i} läuft ' + 'word ' * (i % 7),
        'number': 2**40 + i,
        'label': i % 3,
        'score': i / 4,
        'answers': {'text': [f'{j} of {i}' for j in range(i % 4)], 'start': list(range(i % 4))},
        'translation': {'de': f'{i} Wörter', 'en': f'{i} words'},
        'words': [[f'w{j}'] * j for j in range(i % 3)],
        'raw': b'\xff\x00\x00\x00\x00' * (i % 5),
    }


def features_of(tfds):
    return {
        'text': tfds.features.Text(),
        'number': np.int64,
        'label': tfds.features.ClassLabel(names=['no', 'maybe', 'yes']),
        'score': np.float32,
        'answers': tfds.features.Sequence({'text': tfds.features.Text(), 'start': np.int32}),
        'translation': tfds.features.Translation(languages=['de', 'en']),
        'raw': tfds.features.Tensor(shape=(), dtype=np.object_),
    }


def prepare(root, file_format='array_record', features_of=features_of):
    """Prepare two data sets: made_up, and made_up_translate with a config."""
    import tensorflow_datasets as tfds

    features = features_of(tfds)
    splits = {}
    for split, size in SIZES.items():
        splits[split] = [{name: example(split, i)[name] for name in features} for i in range(size)]
    options = {'file_format': file_format, 'num_shards': NUM_SHARDS}
    prepare_data_set(root, 'made_up:1.0.0', splits, features=features, **options)
    translations = {'train': [example('train', i)['translation'] for i in range(5)]}
    prepare_data_set(root, 'made_up_translate/de-en:1.0.0', translations, **options)


def prepare_data_set(
    root, data_set, splits, features=None, file_format='array_record', num_shards=None
):
    """Prepare NAME[/CONFIG]:VERSION with the records of each split, {split: records}."""
    import tensorflow_datasets as tfds

    full_name, _, version = data_set.partition(':')
    builder_name, _, config_name = full_name.partition('/')
    if features is None:
        features = feature_of(tfds, next(iter(splits.values()))[0])

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = builder_name
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config_name)] if config_name else []

        def _info(self):
            found = features
            if isinstance(found, dict):
                found = tfds.features.FeaturesDict(found)
            return tfds.core.DatasetInfo(builder=self, features=found)

        def _split_generators(self, dl_manager):
            return {split: enumerate(records) for split, records in splits.items()}

        def _generate_examples(self):
            raise AssertionError('the splits are records')

    config = tfds.download.DownloadConfig(num_shards=num_shards)
    Builder(data_dir=root, file_format=file_format).download_and_prepare(download_config=config)


def feature_of(tfds, value):
    """Return the feature of a value of a record."""
    if isinstance(value, dict):
        features = {name: feature_of(tfds, x) for name, x in value.items()}
        if all(isinstance(x, list) for x in value.values()):
            return tfds.features.Sequence({name: x.feature for name, x in features.items()})
        return tfds.features.FeaturesDict(features)
    if isinstance(value, list):
        return tfds.features.Sequence(feature_of(tfds, value[0]))
    if isinstance(value, str):
        return tfds.features.Text()
    return tfds.features.Scalar(np.float32 if isinstance(value, float) else np.int64)


def copy_as_tfrecord(folder, new):
    """Copy the folder of a data set, and write its records as TFRecord files."""
    from array_record.python import array_record_module

    new.mkdir(parents=True)
    for file in folder.iterdir():
        if '.array_record-' not in file.name:
            shutil.copy(file, new)
            continue
        records = array_record_module.ArrayRecordReader(str(file)).read_all()
        with (new / file.name.replace('array_record', 'tfrecord')).open('wb') as shard:
            for record in records:
                tfrecord.write_record(shard, record)
    info = new / 'dataset_info.json'
    info.write_text(info.read_text().replace('array_record', 'tfrecord'))


def write_roots(folder):
    """Write a root of TFDS data sets for each format."""
    prepare(folder / 'array_record')
    for name in ('made_up/1.0.0', 'made_up_translate/de-en/1.0.0'):
        copy_as_tfrecord(folder / 'array_record' / name, folder / 'tfrecord' / name)


SIZES_OF_GLUE = {
    'cola': {'train': 30, 'validation': 5, 'test': 4},
    'mnli': {'train': 20, 'validation_matched': 5},
    'ax': {'test': 6},
}


def prepare_glue(root):
    """Prepare three data sets of GLUE, as TFDS names their splits and fields."""
    for config, sizes in SIZES_OF_GLUE.items():
        fields = ['sentence'] if config == 'cola' else ['premise', 'hypothesis']
        splits = {}
        for split, size in sizes.items():
            records = []
            for i in range(size):
                texts = {name: f'{split} {name} {i} ' for name in fields}
                records.append(texts | {'label': -1 if split == 'test' else i % 2, 'idx': i})
            splits[split] = records
        prepare_data_set(root, f'glue/{config}:1.0.0', splits)


def cached_examples(split):
    """All features of the examples of a split of a task cache, in the order of its files."""
    bad_lines = BadLines('stop', max_fraction=0.0)
    statuses = {str(file): paths.status_of(file) for file in split.files}
    files = read_records('train', statuses)
    files.sort(key=lambda file: file.path)
    part = task_cache.CachedRecords(split, files, bad_lines, split.features)
    return [record.fields for record in part.in_order()]
