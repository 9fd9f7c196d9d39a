"""Checkpoints, data and vocabularies in buckets: the real clients of gs:// and s3:// read from a store on loopback."""

import csv
import gzip
import importlib.util
import io
import json
import shutil

import chex
import corpora
import data_sets
import numpy as np
import pytest
from bucket_store import GOLDEN, run_in_another_process

import infer
import sources.deal
import sources.files
import sources.open
from messages import Refused
from run import buckets
from sources import cache as task_cache
from sources import tfrecord

T5X = 't5x_t5_1_1_tiny'
MESH_TF = 'mtf_t5_1_1/model.ckpt-1000000'
VALID = [f'{T5X}/checkpoint_6', T5X, MESH_TF]  # the second leads to its newest, the first
REFUSED = {  # URL: how its message begins
    'golden/none': 'golden/none has no checkpoint',
    'half': 'half/checkpoint_6/target.token_embedder.embedding',
    'none/checkpoint_6': 'none/checkpoint_6',
    'private/checkpoint_6': 'private/checkpoint_6',
}
LOAD = """
import sys
import numpy as np
import infer

folder, *urls = sys.argv[1:]
for i, url in enumerate(urls):
    try:
        np.savez(f'{folder}/{i}.npz', **infer.load(url).arrays)
    except Exception as error:
        print(f'{type(error).__name__}: {error}')
"""


READ = """
import json
import sys

import corpora
import sources.deal
import sources.files
import sources.open
from formats.vocabulary import named_vocabulary

sources.deal.MAX_BLOCK_BYTES = 1 << 14
sources.deal.MIN_BLOCKS = 32  # a corpus of half a megabyte has blocks of that size
sources.files.SEQUENTIAL_READ_AHEAD = 1 << 16
for names in json.loads(sys.argv[1]):
    try:
        if names['files'].endswith('.model'):
            print(json.dumps(named_vocabulary('data.vocabulary', names['files'], 100).hash))
            continue
        source = sources.open.open_source(corpora.make_config(validation_fraction=0.0, **names))
        documents = corpora.epoch_documents(source, splits=['train'])
        texts = [[text for _, text in lane] for lane in documents]
        print(json.dumps([source.fingerprint, texts]))
    except (ValueError, OSError) as error:
        print(json.dumps(f'{type(error).__name__}: {error}'))
"""

READ_WHAT_GOES_AWAY = """
import os
import sys

import corpora
import sources.deal
import sources.files
import sources.open

sources.deal.MIN_BLOCKS = 1
for file in sys.argv[2:]:
    config = corpora.make_config(files=sys.argv[1] + os.path.basename(file), on_bad_line='skip')
    source = sources.open.open_source(config)
    if file.endswith('.gz'):
        os.remove(file)
    else:
        os.truncate(file, 1000)
    try:
        corpora.epoch_documents(source)
    except OSError as error:
        print(error)
"""


@pytest.mark.peers
def test_a_bucket_is_read_as_a_disk_is(scheme, store, tmp_path):
    """Parameters are equal; a line names what a bucket lacks or refuses. In one process."""
    half = store.folder / 'half/checkpoint_6'
    shutil.copytree(GOLDEN / T5X / 'checkpoint_6', half)
    (half / 'target.token_embedder.embedding/0.0').unlink()
    urls = [f'{scheme}://golden/{name}' for name in VALID]
    urls += [f'{scheme}://{name}' for name in REFUSED]
    messages = run_in_another_process(LOAD, [str(tmp_path), *urls], store)

    for i, name in enumerate(VALID):
        found = dict(np.load(tmp_path / f'{i}.npz'))
        expected = infer.load(GOLDEN / name).arrays
        chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
        for path, x in expected.items():
            assert found[path].tobytes() == np.asarray(x).tobytes(), path
    # What is needed came from the store, once for each load, and nothing else did.
    sent = {}
    for key, size in store.sent.items():
        if key.startswith('golden/'):
            sent[key.removeprefix('golden/')] = size
    chunks = [*(GOLDEN / T5X / 'checkpoint_6').glob('target.*/[0-9]*')]
    assert len(chunks) == 52
    for file in chunks:
        assert sent[str(file.relative_to(GOLDEN))] == 2 * file.stat().st_size, file
    assert not [key for key in sent if '/state.' in key or key.startswith(f'{T5X}/checkpoint_0')]
    shard = f'{MESH_TF}.data-00001-of-00003'  # the parameters; the next is Adafactor's
    assert sent[shard] == (GOLDEN / shard).stat().st_size
    assert f'{MESH_TF}.data-00002-of-00003' not in sent

    for message, beginning in zip(messages, REFUSED.values(), strict=True):
        assert message.startswith(f'Refused: {scheme}://{beginning}'), message


def write_corpora(folder):
    """Write a corpus of each kind, half a megabyte or more, and return globs of them."""
    random = np.random.default_rng(0)
    texts = [f'{i} ' + 'é"x, ' * int(random.integers(200)) for i in range(1500)]
    texts[700] = 'long line ' * 100_000
    rows = io.StringIO()
    csv.writer(rows).writerows([['id', 'text'], *enumerate(texts[:600] + texts[800:])])
    contents = {
        'plain.txt': '\n'.join(texts),
        'rows.csv': rows.getvalue(),
        'rows.tsv': 'id\ttext\n' + ''.join(f'{i}\t{text}\n' for i, text in enumerate(texts)),
        'lines.jsonl': ''.join(json.dumps({'text': text}) + '\n' for text in texts),
        'small.txt': '\n'.join(texts[:20]),
    }
    for name, content in contents.items():
        for part in ('one', 'three'):
            content += f'\nof part {part}' if name.endswith('.txt') else ''
            (folder / f'{part}-{name}').write_text(content)
            (folder / f'{part}-{name}.gz').write_bytes(gzip.compress(content.encode()))
    globs = [f'*-{name}{gz}' for name in contents for gz in ('', '.gz')]
    if importlib.util.find_spec('pyarrow'):
        parquet = importlib.import_module('pyarrow.parquet')
        table = importlib.import_module('pyarrow').table({'id': range(1500), 'text': texts})
        parquet.write_table(table, folder / 'a.parquet', row_group_size=400)
        globs.append('*.parquet')
    return globs


@pytest.mark.peers
def test_data_in_a_bucket_gives_the_stream_that_it_gives_on_a_disk(scheme, store, pydoc_model):
    """Text, tables, JSON Lines and Parquet, plain and gzipped, and vocabularies; what fails is named in a line."""
    bucket = store.folder / 'data/c4/en'
    bucket.mkdir(parents=True)
    (bucket / 'sub').mkdir()
    (bucket / 'sub/empty.txt').write_bytes(b'')
    globs = write_corpora(bucket)
    (bucket / 'sentencepiece.model').write_bytes(pydoc_model)
    names = [f'data/c4/en/{name}' for name in [*globs, 'one-plain.txt', 'sentencepiece.model']]
    names.append('data/*/e[n]/../en/t*-small.txt')
    names.append('data/c4/en/one-small.txt,{}data/c4/en/three-small.txt')
    store.failures['data/c4/en/one-lines.jsonl.gz'] = 1  # the client tries again
    cases = []
    for name in names:
        for root in (f'{scheme}://', f'{store.folder}/'):
            cases.append({'files': root + name.replace('{}', root)})
    lines = run_in_another_process(READ, [json.dumps(cases)], store)
    assert len(lines) == len(cases)
    for i, name in enumerate(names):
        in_bucket, on_disk = map(json.loads, lines[2 * i : 2 * i + 2])
        if name.endswith('.model'):
            assert in_bucket == on_disk and 'Error' not in on_disk
            continue
        assert isinstance(in_bucket, list) and isinstance(on_disk, list), (in_bucket, on_disk)
        assert in_bucket[1] == on_disk[1], name
    # A block is fetched with a little around it, a gzipped file once for each lane that reads it, and the
    # beginning of each file once more.
    assert store.failures['data/c4/en/one-lines.jsonl.gz'] == 0
    for name in ('one-lines.jsonl', 'one-lines.jsonl.gz'):
        assert store.sent[f'data/c4/en/{name}'] <= 3 * (bucket / name).stat().st_size, name


READ_RECORDS = """
import json
import sys

import corpora
import sources
import sources.open

for settings in json.loads(sys.argv[1]):
    try:
        source = sources.open.open_source(corpora.make_config(validation_fraction=0.0, **settings))
        share = sources.Share(seed=0, epoch=0, lane=0, num_lanes=1)
        records = [document.record.fields for document in source.documents('train', share)]
        print(json.dumps([{name: str(x) for name, x in fields.items()} for fields in records]))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.peers
def test_data_sets_and_caches_in_a_bucket_are_those_on_a_disk(scheme, store):
    """A data set in the same order; a cache, whose examples are found another way, in another one."""
    root = store.folder / 'data'
    data_sets.write_roots(root)
    write_cache(root / 'caches/a/b_1')
    made_up = {'tfds': 'made_up', 'tfds_dir': 'data/tfrecord'}
    cases = [made_up, made_up | {'train_split': 'train[7:50]'}]
    cases.append({'task': 'a:b_1', 'cache_dirs': 'data/caches', 'use_cached': 'yes'})
    cases.append({'tfds': 'made_up', 'tfds_dir': 'data/array_record'})
    cases.append({'tfds': 'nothing', 'tfds_dir': 'data/tfrecord'})
    settings = []
    for case in cases:
        for prefix in (f'{scheme}://', f'{store.folder}/'):
            names = {name: prefix + x for name, x in case.items() if x.startswith('data/')}
            settings.append(case | names)
    lines = run_in_another_process(READ_RECORDS, [json.dumps(settings)], store)
    found = [json.loads(line) for line in lines]
    assert len(found) == 2 * len(cases) and len(found[0]) == 103 and len(found[2]) == 43
    assert found[0] == found[1] and found[2] == found[3]
    assert sorted(map(str, found[4])) == sorted(map(str, found[5])) and len(found[4]) == 2
    assert 'array_record' in found[6] and len(found[7]) == 103
    assert f'{scheme}://data/tfrecord does not hold this data set' in found[8]


def write_cache(folder):
    """Write a task cache of two examples, as SeqIO does."""
    folder.mkdir(parents=True)
    features = {name: {'dtype': 'int32', 'shape': [None]} for name in ('inputs', 'targets')}
    content = {'features': features, 'num_shards': 2, 'seqio_version': '0.0.20'}
    (folder / 'info.train.json').write_text(json.dumps(content))
    for shard in range(2):
        with (folder / f'train.tfrecord-0000{shard}-of-00002').open('wb') as file:
            example = {'inputs': np.arange(shard + 3), 'targets': np.arange(5)}
            tfrecord.write_record(file, task_cache.encode(example))
    (folder / 'COMPLETED').touch()


@pytest.mark.peers
def test_a_corpus_in_a_bucket_is_known_by_its_content(scheme, store):
    """Names change nothing; a change of equal size does."""
    cases = []
    for name, text in {'one/a.txt': 'words', 'two/b.txt': 'words', 'three/a.txt': 'other'}.items():
        (store.folder / name).parent.mkdir()
        (store.folder / name).write_text(text)
        cases += [{'files': f'{scheme}://{name}'}, {'files': f'{scheme}://{name[:-5]}*'}]
    cases.append({'files': f'{scheme}://one/*', 'validation_files': f'{scheme}://two/b.txt'})
    cases.append({'files': f'{scheme}://one/*', 'validation_files': f'{scheme}://three/*'})
    *lines, same, good = run_in_another_process(READ, [json.dumps(cases)], store)
    fingerprints = [json.loads(line)[0] for line in lines]
    assert len(set(fingerprints[:4])) == 1
    assert len(set(fingerprints[4:])) == 1 and fingerprints[0] != fingerprints[-1]
    assert '://one/a.txt of data.files and ' in same and 'hold the same' in same
    assert isinstance(json.loads(good), list)


@pytest.mark.peers
def test_data_in_a_bucket_that_cannot_be_read(scheme, store):
    (store.folder / 'data/sub').mkdir(parents=True)
    (store.folder / 'data/a.txt').write_text('words')
    (store.folder / 'data/empty.txt').write_bytes(b'')
    names = ('none/*.txt', 'none/a.txt', 'private/a*.txt', 'data', 'data/b.txt', 'data/b*')
    names += ('data/nowhere/*', 'data/empty*')
    root = f'{scheme}://'
    lines = run_in_another_process(
        READ, [json.dumps([{'files': root + name} for name in names])], store
    )
    for line, name in zip(lines, names, strict=True):
        assert line.startswith('"Refused: data.files') and root + name.split('/')[0] in line


@pytest.mark.peers
def test_a_file_that_goes_away_or_shrinks_stops_the_run(scheme, store):
    """Whatever is done with bad lines: a network that fails is not one."""
    (store.folder / 'data').mkdir()
    files = [store.folder / 'data' / name for name in ('a.jsonl.gz', 'b.txt')]
    text = json.dumps({'text': 'words'}) + '\n'
    files[0].write_bytes(gzip.compress(text.encode() * 100))
    files[1].write_text('words\n' * 50_000)
    arguments = [f'{scheme}://data/', *map(str, files)]
    lines = run_in_another_process(READ_WHAT_GOES_AWAY, arguments, store)
    faults = [' cannot be read (FileNotFoundError: ', ' no longer has 300,000 bytes']
    for line, file, fault in zip(lines, files, faults, strict=True):
        assert line.startswith(f'{scheme}://data/{file.name}{fault}')


@pytest.mark.parametrize('scheme, extra', [('gs', 'gcs'), ('s3', 's3')])
def test_a_client_that_is_not_installed_is_named_with_its_remedy(scheme, extra, monkeypatch):
    monkeypatch.setattr(buckets, 'find_spec', lambda name: None)
    with pytest.raises(Refused, match=rf'\.\[{extra}\]'):
        infer.load(f'{scheme}://bucket/x')
    with pytest.raises(Refused, match='data.files'):
        sources.open.open_source(corpora.make_config(files=f'{scheme}://bucket/x.txt'))
