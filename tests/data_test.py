"""Span corruption and the stream, against SeqIO's numbers and by counting everything.

tests/golden/seqio_t5 was made by running SeqIO b898b9f and t5 e081111; masks are random there, so
their counts and their structure are compared.
"""

import dataclasses
import gzip
import itertools
import json
import re
import shutil
from pathlib import Path

import chex
import numpy as np
import pytest
from corpora import (
    documents_of,
    golden,
    lane_documents,
    make_config,
    oracle,
    source_of,
    stream_of,
    write_text_files,
)
from forms import first_quick

import data
import sources.cache
import sources.deal
import sources.files
import sources.gzipped
import sources.open
import tasks
import tasks.open
import vocabulary as vocabularies
from messages import Refused
from run import prefetch
from run.train_vocabulary import find_or_train_vocabulary, training_texts
from sources import cache as task_cache
from sources import tfrecord
from stream import Stream, TaskPosition


def uncorrupt(inputs, targets, sentinels):
    """Raw ids from inputs and targets without EOS; `sentinels` are all ids that may be one."""
    spans = {}
    for token in targets:
        if token in sentinels:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    raw = []
    for token in inputs:
        raw += spans.pop(token) if token in sentinels else [token]
    return raw


def without_eos(row):
    tokens = [int(token) for token in row if token != vocabularies.PAD_ID]
    assert tokens[-1] == vocabularies.EOS_ID and vocabularies.EOS_ID not in tokens[:-1]
    return tokens[:-1]


def test_corrupted_rows_match_seqio():
    """Counts of rows and their lengths are SeqIO's, and both sides un-corrupt to the same ids."""
    oracle_model = oracle('sentencepiece/sentencepiece.model').read_bytes()
    case = golden('span_corruption_e2e')
    num_pieces = vocabularies.SentencePieceVocabulary(oracle_model, extra_ids=0).size
    extra_ids = case['vocab_size'] - num_pieces
    vocabulary = vocabularies.SentencePieceVocabulary(oracle_model, extra_ids)
    assert vocabulary.size == case['vocab_size']
    assert vocabulary.encode(case['docs']) == case['tokenized']
    config = make_config(lengths=case['sequence_length'])
    objective = data.SpanCorruption(config, vocabulary)
    assert objective.raw_length == case['raw_tokens_length']
    names = [str(i) for i in range(len(case['tokenized']))]
    examples = objective.examples(names, [{'targets': ids} for ids in case['tokenized']], 0)
    sentinels = set(range(num_pieces, vocabulary.size))
    for ours, theirs in zip(examples, case['outputs'], strict=True):
        inputs = ours.inputs.tolist()
        targets = ours.targets.tolist()
        assert (len(inputs), len(targets)) == (len(theirs['inputs']), len(theirs['targets']))
        assert inputs[-1] == targets[-1] == vocabularies.EOS_ID
        raw = uncorrupt(theirs['inputs'][:-1], theirs['targets'][:-1], sentinels)
        assert uncorrupt(inputs[:-1], targets[:-1], sentinels) == raw


# Settings, and the one that the message names. refusals_test.py has others, and what is out of range.
REFUSED = [
    ({'files': __file__, 'validation_files': 'no/*'}, 'data.validation_files'),
    *[({'lengths.inputs': n}, f'data.lengths.inputs={n}') for n in (1, 2)],
    *[({'lengths.targets': n}, f'data.lengths.targets={n}') for n in (1, 13)],
    ({'lengths.inputs': 2048, 'lengths.targets': 456}, 'data.lengths.inputs=2048'),
    ({'noise_density': 1 - 1e-12, 'mean_noise_span_length': 2.0**20}, 'data.lengths.targets'),
    ({'extra_ids': 0}, 'data.extra_ids=0'),
    ({'extra_ids': 2}, 'data.lengths.inputs=64'),
    ({'vocabulary': 'bytes', 'lengths.inputs': 4096, 'lengths.targets': 1000}, 'sentinels'),
]


def test_settings_that_do_not_fit_are_refused(pydoc, pydoc_model):
    for changes, named in REFUSED:
        config = make_config(**changes)
        source = pydoc
        vocabulary = vocabularies.ByteVocabulary()
        with pytest.raises(Refused) as error:
            if config.files:
                source = sources.open.open_source(config)
            if not config.vocabulary:
                vocabulary = vocabularies.SentencePieceVocabulary(pydoc_model, config.extra_ids)
            for split in ('train', 'validation'):
                stream_of(source, split, vocabulary, config, 2, 0)
        assert named in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('density', first_quick([0.15, 0.01, 0.5, 0.99]))
@pytest.mark.parametrize('mean', [1.0, 3.0, 20.0])
@pytest.mark.parametrize('length', [3, 4, 8])
def test_short_rows_train_and_evaluate(pydoc, vocabulary, density, mean, length):
    """From three tokens on, with the shortest targets allowed, a full row has text to predict."""
    lengths = {'lengths.inputs': length, 'lengths.targets': 2}
    noise = {'noise_density': density, 'mean_noise_span_length': mean}
    with pytest.raises(Refused, match='data.lengths.targets=2: .* use') as error:
        data.SpanCorruption(make_config(**lengths, **noise), vocabulary)
    lengths['lengths.targets'] = int(str(error.value).split('use ')[1])
    config = make_config(**lengths, **noise)
    for split in ('train', 'validation'):
        stream = stream_of(pydoc, split, vocabulary, config, 2, 0)
        for batch in take(stream, 3):
            targets = batch['decoder_target_tokens']
            assert np.all(targets[:, 0] == vocabulary.size - 1)
            is_text = (targets > vocabularies.EOS_ID) & ~np.isin(targets, stream.sentinel_ids)
            assert is_text.any()
            assert np.all((targets == vocabularies.EOS_ID).sum(axis=1) == 1)


def test_validation_is_packed_as_training_is(tmp_path):
    """T5X packs both. One pass has each example once; segments keep them apart."""
    rows = [f'{i}\t{"x" * (i % 7)}' for i in range(50)]
    (tmp_path / 'a.tsv').write_text('\n'.join(['q\ta', *rows]))
    (tmp_path / 'train.tsv').write_text('q\ta\nb\tc\n')
    targets = {}
    for pack in ('no', 'tightly'):
        config = make_config(
            files=f'{tmp_path}/train.tsv',
            validation_files=f'{tmp_path}/a.tsv',
            inputs='{q}',
            targets='{a}',
            pack=pack,
            allow_empty_targets=True,
        )
        vocabulary = vocabularies.ByteVocabulary()
        mixture = tasks.open.open_mixture(config)
        stream = Stream(mixture, 'validation', vocabulary, config, 4, seed=0, num_epochs=1)
        batches = list(stream)
        assert ('decoder_segment_ids' in batches[0]) == (pack == 'tightly')
        ids = np.concatenate([batch['decoder_target_tokens'].ravel() for batch in batches])
        parts = np.split(ids, np.flatnonzero(ids == vocabularies.EOS_ID) + 1)
        targets[pack] = sorted(vocabulary.decode(part) for part in parts)
        assert len(batches) > 10 if pack == 'no' else len(batches) < 6
    assert targets['no'] == targets['tightly']


def test_byte_vocabulary_may_have_more_spans_than_it_has_extra_ids(pydoc):
    config = make_config(vocabulary='bytes', extra_ids=0)
    vocabulary = find_or_train_vocabulary(config, Path(), [], 384)
    batch = next(stream_of(pydoc, 'train', vocabulary, config, 2, 0))
    assert batch['decoder_target_tokens'][:, 0].tolist() == [258, 258]


def test_moved_and_renamed_files_are_the_same_corpus(tmp_path):
    old = write_text_files(tmp_path / 'old')
    new_folder = tmp_path / 'new'
    new_folder.mkdir()
    for i, name in enumerate(['z', 'b', 'y', 'a']):
        shutil.copy(tmp_path / f'old/{i}.txt', new_folder / f'{name}.txt')
    files = ','.join(f'{new_folder}/{name}.txt' for name in 'azby')
    new = sources.open.open_source(make_config(files=files, validation_fraction=0.1))
    assert new.fingerprint == old.fingerprint and len(old.fingerprint) == 32
    assert [file.content for file in new.files] == [file.content for file in old.files]
    batches = []
    for source in (old, new):
        stream = stream_of(source, 'train', vocabularies.ByteVocabulary(), make_config(), 4, 0)
        batches.append(take(stream, 20))
    chex.assert_trees_all_equal(*batches)


@pytest.fixture
def small_pools(monkeypatch):
    monkeypatch.setattr(sources.gzipped, 'POOL_LINES', 60)
    monkeypatch.setattr(sources.gzipped, 'MIN_POOL_LINES', 4)


def take(stream, count):
    return [next(stream) for _ in range(count)]


@pytest.fixture(scope='session')
def long_and_short_documents():
    """Documents of one byte to exactly the 65,536 ids of a whole chunk, in bytes."""
    random = np.random.default_rng(0)
    sizes = [1, 2, 65536, 5000, 30000] + [int(n) for n in random.integers(1, 400, 600)]
    documents = []
    for i, size in enumerate(sizes):
        text = bytes(random.integers(97, 123, size, np.uint8)).decode()
        documents.append((f'document {i}', text))
    return source_of(documents)


@pytest.mark.parametrize('kind', ['pydoc', 'long and short'])
def test_no_token_is_lost_or_doubled_in_an_epoch(
    request, pydoc, vocabulary, long_and_short_documents, kind
):
    """Every group's examples un-corrupt to its concatenated documents, cut; describe names them."""
    config = make_config(**{'lengths.inputs': 256, 'lengths.targets': 58})
    source = source_of(documents_of(pydoc)[::5], 0.1)
    if kind == 'long and short':
        # The top bytes are its sentinels, as in ByT5; the texts have none of them.
        source = long_and_short_documents
        vocabulary = vocabularies.ByteVocabulary()
    expected = {}
    names = {}
    for lane in range(3):
        documents = list(lane_documents(source, 'train', 0, lane, 3, 5))
        start = TaskPosition()
        for i in range(0, len(documents), 128):
            group = documents[i : i + 128]
            encoded = vocabulary.encode([text for *_, text in group])
            ids = sum(encoded, [])
            name_of_id = []
            for (*_, name, _), document_ids in zip(group, encoded, strict=True):
                name_of_id += [name] * len(document_ids)
            expected[lane, start] = []
            for j in range(0, len(ids), 284):
                raw = tuple(ids[j : j + 284])
                expected[lane, start].append(raw)
                names[raw] = ', '.join(dict.fromkeys(name_of_id[j : j + 284]))
            pool, offset, *_ = group[-1]
            start = TaskPosition(epoch=0, pool=pool, offset=offset + 1)

    stream = stream_of(source, 'train', vocabulary, config, 3, 5, num_epochs=1)
    sentinels = range(vocabulary.size - 100, vocabulary.size)
    found = {}
    position = stream.position
    for i, batch in enumerate(stream):
        described = stream.describe(position) if i % 50 == 0 else None
        for lane in range(3):
            inputs = batch['encoder_input_tokens'][lane]
            targets = batch['decoder_target_tokens'][lane]
            if inputs.any():
                raw = tuple(uncorrupt(without_eos(inputs), without_eos(targets), sentinels))
                start = TaskPosition(*position[lane, 0].tolist())._replace(given=0)
                found.setdefault((lane, start), []).append(raw)
                assert described is None or described[lane] == names[raw]
        position = stream.position
    assert {key: sorted(rows) for key, rows in found.items()} == {
        key: sorted(rows) for key, rows in expected.items()
    }
    assert found != expected  # the rows are shuffled


def test_stream_is_a_function_of_the_seed(pydoc, vocabulary):
    config = make_config()
    inputs = []
    for seed in (0, 0, 1):
        [batch] = take(stream_of(pydoc, 'train', vocabulary, config, 4, seed), 1)
        inputs.append(batch['encoder_input_tokens'].tolist())
    assert inputs[0] == inputs[1] != inputs[2]


def test_epochs_differ(vocabulary, pydoc):
    small = source_of(documents_of(pydoc)[:40], 0.1)
    stream = stream_of(small, 'train', vocabulary, make_config(), 2, 0)
    epochs = {}
    while stream.position[:, 0, 0].min() < 3:
        epoch = int(stream.position[0, 0, 0])
        epochs.setdefault(epoch, []).append(next(stream)['encoder_input_tokens'][0].tolist())
    assert epochs[0] != epochs[1] and epochs[1] != epochs[2]


@pytest.fixture(scope='session')
def text_source(tmp_path_factory, pydoc):
    folder = tmp_path_factory.mktemp('text')
    for part in range(4):
        texts = [text for _, text in documents_of(pydoc)[part * 40 : part * 40 + 40]]
        (folder / f'{part}.txt').write_text('\n'.join(texts))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sources.deal, 'MIN_BLOCKS', 256)  # each opens its file
        return sources.open.open_source(
            make_config(files=f'{folder}/*.txt', validation_fraction=0.1)
        )


def gzipped_source(folder, pydoc, sizes):
    """Shards of prose; the lanes of the uneven ones drift apart."""
    texts = iter(documents_of(pydoc))
    for shard, size in enumerate(sizes):
        records = [json.dumps({'text': text}) for _, text in itertools.islice(texts, size)]
        (folder / f'{shard}.jsonl.gz').write_bytes(gzip.compress('\n'.join(records).encode()))
    return sources.open.open_source(make_config(files=f'{folder}/*', validation_fraction=0.1))


AS_MANY_SHARDS = pytest.param('as many shards', marks=pytest.mark.slow)


@pytest.fixture(params=['text', 'few shards', AS_MANY_SHARDS, 'many shards'])
def any_source(request, text_source, tmp_path, pydoc, small_pools):
    sizes = {
        'few shards': [50, 30, 20],
        'as many shards': [60, 50, 40, 30],
        'many shards': [9] * 21,
    }
    if request.param == 'text':
        return text_source
    return gzipped_source(tmp_path, pydoc, sizes[request.param])


@pytest.mark.parametrize('num_epochs', first_quick([2, None]))
def test_resuming_anywhere_gives_the_identical_remainder(any_source, vocabulary, num_epochs):
    def open_stream():
        return stream_of(
            any_source, 'train', vocabulary, make_config(), 4, 3, num_epochs=num_epochs
        )

    stream = open_stream()
    batches = []
    positions = []
    while len(batches) < 200:
        positions.append(stream.position)
        assert positions[-1].dtype == np.int64 and positions[-1].shape == (4, 2, 4)
        try:
            batches.append(next(stream))
        except StopIteration:
            break
    assert positions[-1][:, 0, 0].min() >= 1 and (num_epochs is None) == (len(batches) == 200)
    resumed = open_stream()
    for i, position in list(enumerate(positions))[::7]:
        resumed.seek(position)
        np.testing.assert_array_equal(resumed.position, position)
        for batch in batches[i : i + 12]:
            chex.assert_trees_all_equal(next(resumed), batch)
    if num_epochs:
        resumed.seek(positions[-1])
        assert next(resumed, None) is None


class CountingVocabulary(vocabularies.SentencePieceVocabulary):
    count = 0

    def encode_as_arrays(self, texts):
        self.count += len(texts)
        return super().encode_as_arrays(texts)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ('jsonl', 'many shards')]


@pytest.mark.parametrize('kind', ['pydoc', 'few shards', *SLOW])
def test_any_number_of_processes_makes_the_same_batches_of_the_same_documents(
    pydoc, pydoc_model, tmp_path, kind, monkeypatch
):
    monkeypatch.setattr(sources.gzipped, 'MIN_POOL_LINES', 16)
    monkeypatch.setattr(sources.gzipped, 'POOL_LINES', 300)
    source = pydoc
    if kind == 'jsonl':
        records = [json.dumps({'text': text}) for _, text in documents_of(pydoc)[:3000]]
        (tmp_path / 'a.jsonl').write_text('\n'.join(records))
        source = sources.open.open_source(make_config(files=f'{tmp_path}/*'))
    elif kind != 'pydoc':
        sizes = [300, 100, 200] if kind == 'few shards' else [40] * 15
        source = gzipped_source(tmp_path, pydoc, sizes)
    expected = None
    num_encoded = []
    num_parsed = []
    epochs = []
    for num_processes in (1, 2, 4):
        size = 8 // num_processes
        batches_of_processes = []
        num_encoded.append(0)
        num_parsed.append(0)
        for process in range(num_processes):
            vocabulary = CountingVocabulary(pydoc_model)
            rows = range(process * size, (process + 1) * size)
            stream = stream_of(source, 'train', vocabulary, make_config(), 8, 0, rows)
            vocabulary.count = 0
            source.bad_lines.num_read = 0
            batches_of_processes.append(take(stream, 150))
            num_encoded[-1] += vocabulary.count
            num_parsed[-1] += source.bad_lines.num_read
            epochs.append(stream.position[:, 0, 0].max())
        batches = []
        for parts in zip(*batches_of_processes, strict=True):
            batches.append({key: np.concatenate([x[key] for x in parts]) for key in parts[0]})
        expected = expected or batches
        chex.assert_trees_all_equal(batches, expected)
    assert num_encoded[0] == num_encoded[1] == num_encoded[2] > 0
    assert num_parsed[0] == num_parsed[1] == num_parsed[2]
    assert kind == 'pydoc' or kind == 'jsonl' or max(epochs) > 0


def test_only_pools_are_read(tmp_path, pydoc, vocabulary, small_pools):
    """No more lines are parsed than the lanes' pools hold, with and without shared shards."""
    for sizes in ([900] * 2, [400] * 6):
        source = gzipped_source(tmp_path, pydoc, sizes)
        stream = stream_of(source, 'train', vocabulary, make_config(), 4, 0)
        source.bad_lines.num_read = 0
        next(stream)
        # Groups of 128 documents, one in ten is in the other split, from pools of 15 lines.
        assert 4 * 128 < source.bad_lines.num_read < 4 * 200


def test_one_epoch_ends_lane_by_lane(vocabulary):
    texts = ['word ' * 2000] + [f'few words {i}' for i in range(5)]
    source = source_of([(str(i), text) for i, text in enumerate(texts)], 0.0)
    stream = stream_of(source, 'train', vocabulary, make_config(), 3, 0, num_epochs=1)
    batches = list(stream)
    is_padding = [[not row.any() for row in batch['decoder_loss_weights']] for batch in batches]
    assert [row.count(False) for row in is_padding][-1] == 1 and is_padding[0].count(False) > 1
    assert np.all(np.diff(np.array(is_padding, int), axis=0) >= 0)
    assert stream.describe(stream.position) == ['', '', '']


def test_prefetch_passes_on_errors(tmp_path, vocabulary):
    path = tmp_path / 'bad.txt'
    path.write_bytes(b'good line\n' * 200 + b'\xff\n')
    source = sources.open.open_source(make_config(files=str(path), validation_fraction=0.0))
    plain = stream_of(source, 'train', vocabulary, make_config(), 1, 1, num_epochs=1)
    with pytest.raises(Refused, match=f'line 201 of {path}'):
        list(prefetch.batches(plain))


# Text to text.


def qa_config(tmp_path, **changes):
    rows = [{'q': f'what is {i}', 'a': f'it is {i}'} for i in range(100)]
    rows[7]['q'] = 'long ' * 50
    (tmp_path / 'qa.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    settings = {'vocabulary': 'bytes', 'validation_fraction': 0.1}
    templates = {'inputs': 'question: {q}', 'targets': '{a}'} | settings
    return make_config(files=f'{tmp_path}/qa.jsonl', **templates | changes)


def test_a_vocabulary_is_trained_on_what_the_templates_give(tmp_path):
    config = qa_config(tmp_path)
    texts = set(training_texts(tasks.open.open_mixture(config)))
    assert {'question: what is 3', 'it is 3'} <= texts


def unpack(batch):
    """(inputs, targets) without EOS of every example of a batch, packed or not."""
    inputs = batch['encoder_input_tokens']
    targets = batch['decoder_target_tokens']
    inputs_segments = batch.get('encoder_segment_ids', inputs > 0)
    targets_segments = batch.get('decoder_segment_ids', targets > 0)
    for r in range(len(inputs)):
        for segment in range(1, int(targets_segments[r].max()) + 1):
            ids = inputs[r][inputs_segments[r] == segment]
            yield without_eos(ids), without_eos(targets[r][targets_segments[r] == segment])


@pytest.mark.parametrize('pack', ['greedily', 'tightly'])
def test_packed_rows_have_every_example_once(tmp_path, monkeypatch, pack):
    """The same examples as rows that are not packed, in fewer rows, several of them in a window."""
    monkeypatch.setattr('stream.ROWS_PER_WINDOW', 5)
    config = qa_config(tmp_path, **{'lengths.targets': 40})
    vocabulary = vocabularies.ByteVocabulary()
    source = sources.open.open_source(config)
    expected = []
    for batch in stream_of(source, 'train', vocabulary, config, 3, 0, num_epochs=1):
        expected += unpack(batch)
    config.pack = pack
    found = []
    num_rows = 0
    stream = stream_of(source, 'train', vocabulary, config, 3, 0, num_epochs=1)
    position = stream.position
    for batch in stream:
        assert batch.keys() == tasks.names.features(config).keys()
        examples = list(unpack(batch))
        found += examples
        num_rows += int(batch['encoder_input_tokens'].any(axis=1).sum())
        names = sum((row.split(', ') for row in stream.describe(position) if row), [])
        assert len(names) == len(examples)
        position = stream.position
    assert sorted(found) == sorted(expected)
    assert num_rows < 0.6 * len(expected)


def test_a_record_in_no_file_is_named(pydoc, vocabulary):
    stream = stream_of(pydoc, 'train', vocabulary, make_config(), 2, 0)
    with pytest.raises(Refused, match='json.decoder: no weight'):
        stream.tasks[0].source.bad_lines.add_record('json.decoder', 'no weight')


# Task caches.


def write_task_cache(root, examples, split='train', features=('inputs', 'targets')):
    """A cache of dicts of ids, in three shards, one of them empty where there are few."""
    folder = root / 'my/task_v1'
    folder.mkdir(parents=True, exist_ok=True)
    info = {name: {'dtype': 'int32', 'shape': [None]} for name in features}
    content = {'features': info, 'num_shards': 3, 'seqio_version': '0.0.20'}
    (folder / f'info.{split}.json').write_text(json.dumps(content))
    for shard in range(3):
        with (folder / f'{split}.tfrecord-0000{shard}-of-00003').open('wb') as file:
            for example in examples[shard::3]:
                arrays = {name: np.array(example[name], np.int32) for name in features}
                tfrecord.write_record(file, task_cache.encode(arrays))
    (folder / 'COMPLETED').touch()
    return folder


def cache_config(root, **changes):
    settings = {'task': 'my:task_v1', 'cache_dirs': str(root), 'vocabulary': 'bytes'}
    return make_config(**{'validation_fraction': 0.0} | settings | changes)


CACHED = [{'inputs': [40 + i, 41, 42], 'targets': [50 + i, 60, 1][: 2 + i % 2]} for i in range(100)]


def examples_of_cache(config, split='train', batch_size=4):
    vocabulary = vocabularies.ByteVocabulary()
    found = []
    source = sources.open.open_source(config)
    for batch in stream_of(source, split, vocabulary, config, batch_size, 0, num_epochs=1):
        for inputs, targets in unpack(batch):
            found.append({'inputs': inputs, 'targets': targets})
    return sorted(found, key=str)


def test_a_task_cache_is_read_as_ids(tmp_path):
    """EOS is appended, unless the ids end with it."""
    expected = [
        {'inputs': x['inputs'], 'targets': [i for i in x['targets'] if i != 1]} for x in CACHED
    ]
    write_task_cache(tmp_path, CACHED)
    write_task_cache(tmp_path, CACHED[:2], split='validation')
    config = cache_config(f'{tmp_path / "nowhere"}, {tmp_path}')
    assert examples_of_cache(config) == sorted(expected, key=str)
    assert examples_of_cache(config, 'validation') == sorted(expected[:2], key=str)
    description = sources.open.open_source(config).description
    assert description == f'100 cached examples of {tmp_path}/my/task_v1'


def test_a_large_cache_is_read_without_an_index(tmp_path, monkeypatch):
    """In blocks of bytes: every example once, but for one whose bytes are damaged."""
    examples = [
        {'inputs': [70 + i % 9] * (i % 50), 'targets': [80, 70 + i % 9]} for i in range(300)
    ]
    folder = write_task_cache(tmp_path, examples)
    config = cache_config(tmp_path, on_bad_line='skip')
    expected = examples_of_cache(config)
    monkeypatch.setattr(sources.cache, 'MAX_INDEXED_BYTES', 0)
    for block_bytes in (100, 1000, 1 << 16):
        monkeypatch.setattr(sources.deal, 'MAX_BLOCK_BYTES', block_bytes)
        assert isinstance(sources.open.open_source(config).train, sources.cache.LargeCache)
        assert examples_of_cache(config) == expected
    file = folder / 'train.tfrecord-00001-of-00003'
    content = bytearray(file.read_bytes())
    for position in (14, 3, len(content) - 1):  # content, length, the last footer
        damaged = content.copy()
        damaged[position] ^= 1
        file.write_bytes(damaged)
        for block_bytes in (100, 1 << 16):
            monkeypatch.setattr(sources.deal, 'MAX_BLOCK_BYTES', block_bytes)
            source = sources.open.open_source(config)
            assert len(examples_of_cache(config)) == len(expected) - 1
            list(source.records('train'))
            assert source.faults()[1] == 1


def test_cached_features_that_are_no_ids_are_named(tmp_path):
    folder = write_task_cache(tmp_path, CACHED[:3])
    file = folder / 'info.train.json'
    content = json.loads(file.read_text())
    for dtype in ('string', 'int32'):
        content['features']['inputs'] = {'dtype': dtype, 'shape': []}
        file.write_text(json.dumps(content))
        with pytest.raises(Refused, match=f"{folder}.*'inputs'"):
            examples_of_cache(cache_config(tmp_path))


def test_an_objective_that_makes_no_example_is_refused(tmp_path):
    """Here each answer is beyond the inputs that are kept."""
    records = [{'inputs': 'x' * 99 + str(i), 'targets': str(i)} for i in range(5)]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, records)))

    class NoExamples(data.TextToText):
        def examples(self, names, all_ids, *key):
            return []

    config = make_config(
        files=f'{tmp_path}/a.jsonl', inputs='{inputs}', targets='{targets}', task='text_to_text'
    )
    mixture = tasks.open.open_mixture(config)
    [opened] = mixture.tasks
    task = dataclasses.replace(opened.task, objective=NoExamples)
    mixture = dataclasses.replace(mixture, tasks=(opened._replace(task=task),))
    with pytest.raises(Refused, match="split 'train'"):
        Stream(mixture, 'train', vocabularies.ByteVocabulary(), config, batch_size=2, seed=0)


def test_span_corruption_reads_cached_targets(tmp_path):
    folder = write_task_cache(tmp_path, [{'targets': [70] * 200}] * 5, features=('targets',))
    folder.parent.rename(tmp_path / 'other')
    (tmp_path / 'other/task_v1').rename(tmp_path / 'span_corruption')
    config = cache_config(tmp_path, task='span_corruption')
    # One of four lanes has two documents: rows of 70 ids, and a tail in each lane.
    assert len(examples_of_cache(config)) == -(-400 // 70) + 3 * -(-200 // 70)
    config.use_cached = 'no'
    (tmp_path / 'a.txt').write_text('a text')
    config.files = f'{tmp_path}/a.txt'
    assert sources.open.open_source(config).corpus == 'files'


def test_cached_examples_that_do_not_fit_are_named(tmp_path):
    folder = write_task_cache(tmp_path, CACHED[:30])
    file = folder / 'train.tfrecord-00001-of-00003'
    content = bytearray(file.read_bytes())
    content[14] ^= 1  # in the content of the first record
    file.write_bytes(content)
    with pytest.raises(Refused, match=re.escape(str(file))):
        examples_of_cache(cache_config(tmp_path))
    assert len(examples_of_cache(cache_config(tmp_path, on_bad_line='skip'))) == 29
    write_task_cache(tmp_path, [{'inputs': [5], 'targets': [6, 400]}])
    with pytest.raises(Refused, match='data.vocabulary'):
        examples_of_cache(cache_config(tmp_path))
    write_task_cache(tmp_path, CACHED, features=('targets',))
    with pytest.raises(Refused, match="task_v1.*'inputs'"):
        examples_of_cache(cache_config(tmp_path))
    with pytest.raises(Refused, match='data.vocabulary'):
        list(training_texts(tasks.open.open_mixture(cache_config(tmp_path, vocabulary=''))))
