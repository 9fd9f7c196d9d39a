"""Settings and small corpora for the tests of data, sources and vocabularies."""

import gzip
import itertools
import json
import pathlib

import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2

import sources.open
import sources.pydoc
import tasks
import tasks.open
from configs import base
from configs import check as settings
from stream import OpenMixture, OpenTask, Stream

# The output of SeqIO b898b9f and t5 e081111 for the same texts, and SeqIO's test model.
GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'seqio_t5'
HUNT = pathlib.Path(__file__).parent / 'golden' / 'hunt'  # SentencePiece models
ORACLES = pathlib.Path(__file__).parents[2] / 'shared' / 'testdata' / 'seqio_t5'
LFS_POINTER = b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n'


def golden(name):
    return json.loads((GOLDEN / f'{name}.json').read_text())


def oracle(name):
    """Return a file or folder that is not copied; beside each stands an equivalent of our own."""
    path = ORACLES / name
    if not path.exists():
        pytest.skip(f'{path} is not in this checkout; the tests beside this one have its like')
    return path


def model_with(names, place):
    """good.model with other pieces before its piece number `place`."""
    proto = sentencepiece_model_pb2.ModelProto.FromString((HUNT / 'good.model').read_bytes())
    pieces = list(proto.pieces)
    del proto.pieces[:]
    proto.pieces.extend(pieces[:place])
    for name in names:
        proto.pieces.add(piece=name, type=proto.SentencePiece.USER_DEFINED)
    proto.pieces.extend(pieces[place:])
    return proto.SerializeToString()


def is_near(count, expected):
    """Whether a number of random hits is within five standard deviations."""
    return abs(count - expected) < 5 * np.sqrt(expected)


def make_config(**changes):
    """config.data with short rows, not packed."""
    config = base.get_config().data
    config.pack = 'no'
    config.num_pieces = 1000
    config.lengths.inputs = 64
    config.lengths.targets = 14
    config.update_from_flattened_dict(changes)
    return config


def check_settings(config):
    """Check what `settings.check` does of config.data."""
    for key, value in settings.leaves(config, 'data.'):
        settings.check_value(key, value)


def source_of(documents, validation_fraction=0.0):
    """A source of (name, text) pairs in memory."""
    records = [sources.Record(name, {'text': text}) for name, text in documents]
    return sources.pydoc.in_memory(
        records, name='', corpus='memory', validation_fraction=validation_fraction
    )


def mixture_of(source, config):
    """The task of the settings as a mixture of one, with a source that is already open."""
    task = tasks.open.find(config)
    return OpenMixture(task.name, (OpenTask(task, source),), source.fingerprint)


def stream_of(source, split, vocabulary, config, batch_size, seed, rows=None, num_epochs=None):
    """The stream of the task of the settings, with a source that is already open."""
    return Stream(
        mixture_of(source, config),
        split,
        vocabulary,
        config,
        batch_size=batch_size,
        seed=seed,
        rows=rows,
        num_epochs=num_epochs,
    )


def documents_of(source):
    """(name, text) of every document of a source that can be read in any order."""
    found = []
    for block in range(source.train.num_blocks):
        for record in source.train.read(block):
            if record is not None:
                found.append((record.name, record.fields['text']))
    return found


def lane_documents(source, split, epoch, lane, num_lanes, seed, pool=0, offset=0):
    """(pool, offset, name, text) of the documents of one lane."""
    share = sources.Share(seed=seed, epoch=epoch, lane=lane, num_lanes=num_lanes)
    for document in source.documents(split, share, pool, offset):
        name = document.record.name
        fields = document.record.fields
        yield document.pool, document.offset, name, fields['text']


def epoch_documents(source, epoch=0, num_lanes=3, splits=('train', 'validation'), seed=0):
    """(name, text) of the documents of each lane of each split."""
    lanes = []
    for split in splits:
        for lane in range(num_lanes):
            documents = lane_documents(source, split, epoch, lane, num_lanes, seed)
            lanes.append([(name, text) for *_, name, text in documents])
    return lanes


def write_shards(folder, sizes, kind='.jsonl.gz', start=0):
    """Write files of `sizes` lines, the second one blank; return {name: text} of the documents."""
    expected = {}
    number = itertools.count(start)
    is_gzipped = kind.endswith('.gz')
    for shard, size in enumerate(sizes):
        path = folder / f'{shard:02}{kind}'
        content = b''
        for line in range(size):
            text = f'document {next(number)} é'
            if line == 1:
                content += b' \r\n'
                continue
            expected[f'{path}:{line + 1 if is_gzipped else len(content)}'] = text
            record = json.dumps({'url': 'u', 'text': text}) if '.json' in kind else text
            content += record.encode() + b'\n'
        path.write_bytes(gzip.compress(content) if is_gzipped else content)
    return expected


def write_text_files(folder, changes=None):
    """Write four files of text, and `changes` of them as {name: text}. Return their source."""
    folder.mkdir(parents=True)
    for i in range(4):
        (folder / f'{i}.txt').write_text('\n'.join(f'line {i} {j}' for j in range(200 - i)))
    for name, text in (changes or {}).items():
        (folder / name).write_text(text)
    return sources.open.open_source(make_config(files=f'{folder}/*.txt', validation_fraction=0.1))
