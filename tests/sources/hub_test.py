"""Data on the hub: listed once, each file fetched when it is read, compared by size and hash."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from corpora import make_config
from huggingface_hub import constants
from small_models import assert_refused

import sources.open
from run.buckets import ReadError
from sources import Share

NAME = 'datasets/org/data'
NUM_SHARDS = 8


def lines_of(number):
    return ''.join(json.dumps({'text': f'{number} {i}'}) + '\n' for i in range(10)).encode()


JSON = {f'en/part {i}.jsonl': lines_of(i) for i in range(3)} | {'README.md': b'# A card\n'}
GZIPPED = {f'en/{i}.json.gz': gzip.compress(lines_of(i), mtime=0) for i in range(NUM_SHARDS)}


def open_source(files, **settings):
    config = make_config(files=f'hf://{files}', validation_fraction=0.0, **settings)
    return sources.open.open_source(config)


def texts_of(source, lane=None):
    """The texts of the lane, or of all records in order."""
    if lane is None:
        return {record.fields['text'] for record in source.records('train')}
    share = Share(seed=0, epoch=0, lane=lane, num_lanes=NUM_SHARDS)
    return {document.record.fields['text'] for document in source.documents('train', share)}


def all_texts(numbers):
    return {f'{number} {i}' for number in numbers for i in range(10)}


@pytest.mark.usefixtures('home')
@pytest.mark.parametrize('files', ['**/*.jsonl', 'en/part ?.jsonl', '*/part [0-2].jsonl'])
def test_globs(hub, files):
    hub.add(NAME, JSON | {'en/deep/other.txt': b'x\n', 'parts.jsonl/x': b'x\n'})
    source = open_source(f'{NAME}/{files}')
    assert texts_of(source) == all_texts(range(3))
    assert source.train.count_records() == 30


@pytest.mark.usefixtures('home')
def test_one_file_and_several_names(hub):
    hub.add(NAME, JSON)
    hub.add('datasets/org/other', {'x.jsonl': lines_of(7)})
    one = f'{NAME}/en/part 1.jsonl'
    assert texts_of(open_source(one)) == all_texts([1])
    assert texts_of(open_source(f'{one},hf://datasets/org/other/*')) == all_texts([1, 7])


@pytest.mark.usefixtures('home')
def test_a_gzipped_shard_is_fetched_when_a_lane_opens_it(hub):
    hub.add(NAME, GZIPPED)
    source = open_source(f'{NAME}/en/*.gz')
    assert hub.num_fetched('.json.gz') == 1  # to check how it is read
    texts = set()
    for lane in range(2):
        texts |= texts_of(source, lane)
    assert len(texts) == 20
    assert 2 <= hub.num_fetched('.json.gz') <= 3
    assert texts_of(source) == all_texts(range(NUM_SHARDS))
    assert hub.num_fetched('.json.gz') == NUM_SHARDS


@pytest.mark.usefixtures('home')
def test_parquet_of_a_converted_data_set(hub, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({'text': ['a', 'b']}), tmp_path / 'x.parquet')
    content = (tmp_path / 'x.parquet').read_bytes()
    hub.add(NAME, {'README.md': b''})
    hub.add(NAME, {'default/train/0000.parquet': content}, 'refs/convert/parquet')
    files = f'{NAME}@refs/convert/parquet/**/*.parquet'
    assert texts_of(open_source(files)) == {'a', 'b'}


@pytest.mark.usefixtures('home')
def test_identity(hub):
    """A new commit changes nothing, unless it changes the files; a listing tells, without fetching."""
    old = hub.add(NAME, GZIPPED)
    files = f'{NAME}/en/*.gz'
    fingerprint = open_source(files).fingerprint
    hub.add(NAME, GZIPPED | {'README.md': b'new'})
    assert open_source(files).fingerprint == fingerprint
    hub.add(NAME, GZIPPED | {'en/3.json.gz': gzip.compress(lines_of(9), mtime=0)})
    assert open_source(files).fingerprint != fingerprint
    assert open_source(f'{NAME}@{old}/en/*.gz').fingerprint == fingerprint
    assert hub.num_fetched('.json.gz') <= 2


@pytest.mark.usefixtures('home')
def test_offline(hub, monkeypatch, caplog):
    hub.add(NAME, JSON)
    files = f'{NAME}/en/*.jsonl'
    source = open_source(files)
    texts = texts_of(source)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    again = open_source(files)
    assert '3 files are in the cache' in caplog.text
    assert again.fingerprint == source.fingerprint
    assert texts_of(again) == texts


@pytest.mark.usefixtures('home')
@pytest.mark.parametrize(
    'files, text',
    [
        ('datasets/org/none/*.txt', 'not on the hub'),
        (f'{NAME}/*.txt', 'matches no file'),
        (f'{NAME}/fr/*.txt', 'matches no file'),
        (f'{NAME}@v9/*', 'lacks this revision'),
        ('datasets/org/gated/*', '/datasets/org/gated, and put your token into HF_TOKEN'),
        ('datasets/org', 'write hf://'),
        ('org/name', 'write hf://datasets/'),
        (NAME, 'write hf://'),
        (f'{NAME}/README.md,hf://{NAME}/en/*.gz', 'README.md'),
    ],
)
def test_files_that_do_not_open(hub, files, text):
    hub.add(NAME, GZIPPED | {'README.md': b'text\n'})
    hub.add('datasets/org/gated', JSON)
    hub.gated.add('datasets/org/gated')
    assert_refused(lambda: open_source(files), text)


@pytest.mark.usefixtures('home')
def test_the_network_goes_away(hub):
    """Reading a shard that cannot be fetched raises one line; it is not a bad record."""
    hub.add(NAME, GZIPPED)
    source = open_source(f'{NAME}/en/*.gz', on_bad_line='skip')
    hub.gated.add(NAME)
    with pytest.raises(ReadError, match='gated') as error:
        texts_of(source)
    assert '\n' not in str(error.value)
