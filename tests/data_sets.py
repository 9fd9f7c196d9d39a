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


def prepare(root, file_format='array_record', version='1.0.0', features_of=features_of):
    """Prepare two data sets with TFDS: made_up, and made_up_translate with a config."""
    import tensorflow_datasets as tfds

    class MadeUp(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        name = 'made_up'

        def _info(self):
            features = tfds.features.FeaturesDict(features_of(tfds))
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(split) for split in SIZES}

        def _generate_examples(self, split):
            for i in range(SIZES[split]):
                yield i, {name: example(split, i)[name] for name in features_of(tfds)}

    class MadeUpTranslate(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name='de-en')]
        name = 'made_up_translate'

        def _info(self):
            features = tfds.features.Translation(languages=['de', 'en'])
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {'train': self._generate_examples()}

        def _generate_examples(self):
            for i in range(5):
                yield i, example('train', i)['translation']

    config = tfds.download.DownloadConfig(num_shards=NUM_SHARDS)
    for builder in (MadeUp, MadeUpTranslate):
        made = builder(data_dir=root, file_format=file_format)
        made.download_and_prepare(download_config=config)


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


def prepare_glue(root, version):
    """Prepare three data sets of GLUE, as TFDS names their splits and fields."""
    import tensorflow_datasets as tfds

    class Glue(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in SIZES_OF_GLUE]
        name = 'glue'

        def _info(self):
            features = {name: tfds.features.Text() for name in self.text_fields()}
            classes = ['a', 'b'] if self.builder_config.name == 'cola' else ['a', 'b', 'c']
            features['label'] = tfds.features.ClassLabel(names=classes)
            features['idx'] = np.int32
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def text_fields(self):
            return ['sentence'] if self.builder_config.name == 'cola' else ['premise', 'hypothesis']

        def _split_generators(self, dl_manager):
            sizes = SIZES_OF_GLUE[self.builder_config.name]
            return {split: self._generate_examples(split, sizes[split]) for split in sizes}

        def _generate_examples(self, split, size):
            for i in range(size):
                texts = {name: f'{split} {name} {i} ' for name in self.text_fields()}
                yield i, texts | {'label': -1 if split == 'test' else i % 2, 'idx': i}

    for name in SIZES_OF_GLUE:
        Glue(data_dir=root, config=name, file_format='array_record').download_and_prepare()


def cached_examples(split):
    """All features of the examples of a split of a task cache, in the order of its files."""
    bad_lines = BadLines('stop', max_fraction=0.0)
    statuses = {str(file): paths.status_of(file) for file in split.files}
    files = read_records('train', statuses)
    files.sort(key=lambda file: file.path)
    part = task_cache.CachedRecords(split, files, bad_lines, split.features)
    return [record.fields for record in part.in_order()]
