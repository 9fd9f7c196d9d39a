"""Tasks of a user's own, mixtures of them in the stream, and the processes that feed it."""

import collections
import gzip
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import zlib

import chex
import numpy as np
import own_task
import pytest
from corpora import make_config
from forms import slow

import tasks
import tasks.open
import vocabulary as vocabularies
from messages import Refused
from run import prefetch
from run.train_vocabulary import training_texts
from stream import Stream

MODULE = """
from tasks import Mixture, Task, proportional


def spell(record):
    for word in record['words']:
        yield {'inputs': f'spell: {word}', 'targets': ' '.join(word)}


TASKS = [
    Task('add', files='FOLDER/add.jsonl', inputs='add: {a} {b}', targets='{sum}'),
    Task('spell', files='FOLDER/spell.jsonl', preprocess_fn=spell),
    Task('text', files='FOLDER/text.txt', objective='span_corruption'),
    Mixture('all', {'add': 1.0, 'spell': 2.0, 'text': 1.0}),
    Mixture('more', {'all': 3.0, 'add': 1.0}),
    Mixture('by_size', {'add': proportional(), 'spell': 1.0}),
    Mixture('lost', {'nowhere': 1.0}),
    Mixture('without', {'add': 0.0, 'spell': 1.0}),
]
"""
NUM_SUMS, NUM_WORDS, NUM_LINES = 90, 40, 60


def write_tasks(folder, module=MODULE):
    """Write the files of three tasks, and the module that names them. Return the module's path."""
    sums = [{'a': i, 'b': i % 7, 'sum': i + i % 7} for i in range(NUM_SUMS)]
    words = [{'words': [f'word{i}', f'w{i}'][: i % 3]} for i in range(NUM_WORDS)]
    (folder / 'add.jsonl').write_text('\n'.join(map(json.dumps, sums)))
    (folder / 'spell.jsonl').write_text('\n'.join(map(json.dumps, words)))
    lines = [f'this is line {i} of a text ' + 'and on ' * (i % 9) for i in range(NUM_LINES)]
    (folder / 'text.txt').write_text('\n'.join(lines))
    (folder / 'my_tasks.py').write_text(module.replace('FOLDER', str(folder)))
    return str(folder / 'my_tasks.py')


def mixture_config(folder, **changes):
    settings = {'module': write_tasks(folder), 'task': 'all', 'vocabulary': 'bytes'}
    settings |= {'validation_fraction': 0.1, 'lengths.targets': 24}
    return make_config(**settings | changes)


class CountingVocabulary(vocabularies.ByteVocabulary):
    """Counts the texts that it encodes."""

    num_texts = 0

    def encode_as_arrays(self, texts, glued_sentinels=False):
        self.num_texts += len(texts)
        return super().encode_as_arrays(texts, glued_sentinels)


def open_stream(config, split='train', batch_size=4, vocabulary=None, **options):
    return Stream(
        tasks.open.open_mixture(config),
        split,
        vocabulary or vocabularies.ByteVocabulary(),
        config,
        batch_size=batch_size,
        seed=3,
        **options,
    )


def examples_of(stream, batch):
    """(inputs, targets) of the rows of a batch as texts; rows must not be packed."""
    names = ('encoder_input_tokens', 'decoder_target_tokens')
    for ids in zip(*(batch[name].tolist() for name in names), strict=True):
        yield tuple(stream.vocabulary.decode(row) for row in ids)


# A user's own tasks.


def test_each_task_gives_each_record_once_per_epoch(tmp_path):
    found = []
    for task, split in itertools.product(('add', 'spell'), ('train', 'validation')):
        config = mixture_config(tmp_path, task=task, pack='no')
        stream = open_stream(config, split, num_epochs=1)
        for batch in stream:
            found += [example for example in examples_of(stream, batch) if any(example)]
    expected = [(f'add: {i} {i % 7}', str(i + i % 7)) for i in range(NUM_SUMS)]
    for i in range(NUM_WORDS):
        for word in [f'word{i}', f'w{i}'][: i % 3]:
            expected.append((f'spell: {word}', ' '.join(word)))
    assert sorted(found) == sorted(expected)


# Settings or the tasks of a module, whose mistakes have a traceback, and what the message names.
REFUSED = [
    ({'task': 'spel'}, "data.task='spel'"),
    ({'task': 'lost'}, "'nowhere' of data.task='lost'"),
    ("[Mixture('circle', {'circle': 1})]", "'circle'"),
    ({'module': 'absent'}, "data.module='absent'"),
    ("[Task('a'), Task('a')]", "'a'"),
    ("[Task('text_to_text')]", "'text_to_text'"),
    ("[Task('a/b')]", "name='a/b'"),
    ("[Task('all', delimiter='ab')]", "task 'all': data.delimiter='ab'"),
    ("[Task('all', preprocess_fn=lambda record: [record], targets='{a}')]", "task 'all'"),
    ("[Task('all')]", "task 'all'"),
    ("[Mixture('all', {Task('c4_mine'): 1})]", "task 'c4_mine'"),
    ('{}', 'my_tasks.py'),
]


def test_a_name_or_a_module_that_is_wrong_is_named(tmp_path):
    for wrong, named in REFUSED:
        changes = wrong if isinstance(wrong, dict) else {}
        config = mixture_config(tmp_path, **changes)
        if not changes:
            module = f'from tasks import Mixture, Task\nTASKS = {wrong}'
            (tmp_path / 'my_tasks.py').write_text(module)
        with pytest.raises((Refused, AssertionError, ValueError)) as error:
            tasks.open.open_mixture(config)
        assert named in str(error.value)


def with_fault(config, folder, fault):
    """Let the function of the task spell fail on some words."""
    config.module = write_tasks(folder, MODULE.replace('        yield', f'{fault}        yield'))
    return config


def test_an_error_of_a_function_has_a_note_that_names_the_record(tmp_path):
    config = mixture_config(tmp_path, task='spell')
    with pytest.raises(ZeroDivisionError) as error:
        open_stream(with_fault(config, tmp_path, '        1 / 0\n'))
    assert error.traceback[-1].path == tmp_path / 'my_tasks.py'
    [note] = error.value.__notes__
    assert re.match(rf"line [0-9]+ of {tmp_path}/spell.jsonl, task spell; .*'words", note)


def test_a_vocabulary_is_trained_without_the_records_on_which_a_function_fails(tmp_path):
    fault = "        if word == 'w2':\n            1 / 0\n"
    config = mixture_config(tmp_path, task='spell', on_bad_line='skip', max_bad_fraction=0.5)
    mixture = tasks.open.open_mixture(with_fault(config, tmp_path, fault))
    texts = set(training_texts(mixture))
    assert 'spell: w5' in texts and 'spell: w2' not in texts
    [description], num_bad = mixture.faults()
    assert num_bad == 1 and 'spell.jsonl' in description and 'ZeroDivisionError' in description


# An objective of a user's class: of documents, and of inputs and targets, from scratch.


def own_objectives(folder, **changes):
    config = mixture_config(folder, **changes)
    config.module = own_task.write_objectives(folder)
    return config


def test_an_objective_of_a_class(tmp_path):
    config = own_objectives(tmp_path, task='add', pack='no')
    stream = open_stream(config, num_epochs=1)
    found = [x for batch in stream for x in examples_of(stream, batch) if any(x)]
    given = [(f'add: {i} {i % 7}', str(i + i % 7)) for i in range(NUM_SUMS)]
    assert {(''.join(sorted(inputs)), targets) for inputs, targets in found} <= {
        (''.join(sorted(inputs)), targets) for inputs, targets in given
    }
    assert len(found) > 60 and not set(found) & set(given[10:])
    stream = open_stream(own_objectives(tmp_path, task='text', pack='no'))
    for inputs, targets in examples_of(stream, next(stream)):
        characters = iter(targets)  # the inputs are among them, in their order
        assert len(inputs) < 64 and all(x in characters for x in inputs[:10])


@pytest.mark.parametrize('task', ['all', *slow(['text', 'add'])])
def test_an_objective_of_a_class_in_workers_and_resumed(tmp_path, task):
    config = own_objectives(tmp_path, task=task, pack='tightly')
    stream = open_stream(config, batch_size=6)
    expected = [(stream.position, next(stream)) for _ in range(9)]
    resumed = open_stream(config, batch_size=6)
    resumed.seek(expected[3][0])
    found = prefetch.batches(resumed, num_workers=2)
    for batch, (position, features) in zip(found, expected[3:], strict=False):
        np.testing.assert_array_equal(batch.before, position)
        chex.assert_trees_all_equal(batch.features, features)
    found.close()


def test_the_fingerprint_knows_the_name_of_an_objective(tmp_path):
    """Of its code nothing, as of that of other functions of a user."""
    config = own_objectives(tmp_path)
    fingerprint = tasks.open.open_mixture(config).fingerprint
    config.module = own_task.write_objectives(tmp_path, own_task.OBJECTIVES.replace('0.5', '0.6'))
    assert tasks.open.open_mixture(config).fingerprint == fingerprint
    config.module = own_task.write_objectives(
        tmp_path, own_task.OBJECTIVES.replace('Dropping', 'Other')
    )
    assert tasks.open.open_mixture(config).fingerprint != fingerprint


# Mixtures.


def test_tasks_are_drawn_by_their_rates(tmp_path):
    config = mixture_config(tmp_path, task='more', pack='no')
    stream = open_stream(config, batch_size=8)
    shares = {task.name: task.rate for task in stream.mixture.tasks}
    # A quarter, a half and a quarter of three of four parts, and one part more of the first.
    assert shares == pytest.approx({'add': 0.4375, 'spell': 0.375, 'text': 0.1875})
    found = collections.Counter()
    for batch in itertools.islice(stream, 400):
        for inputs, _ in examples_of(stream, batch):
            found[inputs.split(':')[0] if ':' in inputs else 'text'] += 1
    assert stream.counts[:, 0].tolist() == [found['add'], found['spell'], found['text']]
    assert stream.counts.sum(axis=0)[0] == 3200
    for name, share in shares.items():
        assert found[name] / 3200 == pytest.approx(share, abs=0.03)


def test_a_task_that_ends_begins_its_next_epoch(tmp_path):
    """Each lane of a mixture gives what it gives of a task alone, in the same order."""
    config = mixture_config(tmp_path, pack='no')
    stream = open_stream(config, batch_size=2)
    found = collections.Counter()
    for batch in itertools.islice(stream, 2000):
        found.update(examples_of(stream, batch))
    found = {example: n for example, n in found.items() if example[0].startswith('add: ')}
    counts = found.values()
    # 4,000 examples, a fourth of them of the 80 records of a task: 12 or so of each.
    assert 70 <= len(found) < NUM_SUMS
    assert max(counts) - min(counts) <= 2


def test_rates_by_size_count_lines(tmp_path):
    """Of plain files; gzipped ones would have to be decompressed."""
    config = mixture_config(tmp_path, task='by_size')
    shares = [task.rate for task in tasks.open.open_mixture(config).tasks]
    assert shares == pytest.approx([NUM_SUMS / (NUM_SUMS + 1), 1 / (NUM_SUMS + 1)])
    table = 'a,b,sum\n' + '1,2,3\n' * 7
    (tmp_path / 'add.csv').write_text(table)
    config.module = write_tasks(tmp_path, MODULE.replace('add.jsonl', 'add.csv'))
    assert tasks.open.open_mixture(config).tasks[0].rate == pytest.approx(7 / 8)
    (tmp_path / 'add.csv.gz').write_bytes(gzip.compress(table.encode()))
    config.module = write_tasks(tmp_path, MODULE.replace('add.jsonl', 'add.csv.gz'))
    with pytest.raises(Refused, match="'by_size'.*'add'"):
        tasks.open.open_mixture(config)


def test_a_task_of_rate_zero_is_not_in_the_stream(tmp_path):
    config = mixture_config(tmp_path, task='without')
    assert [task.name for task in tasks.open.open_mixture(config).tasks] == ['spell']


def test_examples_that_are_cut_are_counted(tmp_path):
    config = mixture_config(tmp_path, task='add', **{'lengths.targets': 3, 'pack': 'no'})
    stream = open_stream(config, num_epochs=1)
    targets = [targets for batch in stream for _, targets in examples_of(stream, batch)]
    num_examples, num_trimmed = stream.counts[0].tolist()
    assert num_examples == len([text for text in targets if text])
    sums = [i + i % 7 for i in range(NUM_SUMS)]
    held_out = NUM_SUMS - num_examples
    assert num_trimmed <= len([x for x in sums if x > 99]) <= num_trimmed + held_out


def test_the_fingerprint_knows_rates_and_texts(tmp_path):
    def fingerprint(old='', new=''):
        config.module = write_tasks(tmp_path, MODULE.replace(old, new))
        os.utime(config.module, ns=(0, next(clock)))  # two versions in the same instant
        return tasks.open.open_mixture(config).fingerprint

    clock = itertools.count(10**18, 10**9)
    config = mixture_config(tmp_path)
    assert fingerprint() == fingerprint()
    assert fingerprint() != fingerprint("'spell': 2.0", "'spell': 3.0")
    assert fingerprint() != fingerprint('add: {a}', 'sum: {a}')


def test_many_rows_over_few_records_start_quickly(tmp_path):
    """The first batch tokenizes one record for each row, whatever the epochs that takes."""
    config = mixture_config(tmp_path, task='text', pack='tightly')
    vocabulary = CountingVocabulary()
    stream = open_stream(config, batch_size=1000, vocabulary=vocabulary)
    assert (next(stream)['decoder_loss_weights'].sum(axis=1) > 0).all()
    assert vocabulary.num_texts <= 1.01 * 1000


# The same stream for any number of processes, resumed anywhere.

QUICK = {'counts': (1, 4), 'stops': (0, 17)}
SLOW = {'counts': (1, 2, 4, 8, 16), 'stops': (0, 1, 17, 100)}
KINDS = {
    'one task': {'task': 'add', 'pack': 'no'},
    'mixture, packed': {'task': 'all', 'pack': 'tightly'},
    'task, packed greedily': {'task': 'spell', 'pack': 'greedily'},
    'span corruption': {'task': 'text', 'pack': 'tightly'},
}


def streams_of(mixture, config, num_processes, start=None):
    """The streams of all processes, from the position `start` on."""
    size = 16 // num_processes
    streams = []
    for process in range(num_processes):
        rows = range(process * size, (process + 1) * size)
        vocabulary = CountingVocabulary()
        stream = Stream(mixture, 'train', vocabulary, config, 16, seed=3, rows=rows)
        if start is not None:
            stream.seek(start[rows.start : rows.stop])
        streams.append(stream)
    return streams


def run_streams(streams, num_batches):
    """Hashes of the global batches, and the global position before each."""
    hashes = []
    positions = []
    for _ in range(num_batches):
        positions.append(np.concatenate([stream.position for stream in streams]))
        batches = [next(stream) for stream in streams]
        content = [np.concatenate([batch[name] for batch in batches]) for name in batches[0]]
        hashes.append(zlib.crc32(b''.join(x.tobytes() for x in content)))
    return hashes, positions


@pytest.mark.parametrize('scale', [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
@pytest.mark.parametrize('kind', KINDS)
def test_any_number_of_processes_gives_the_same_batches_resumed_anywhere(
    tmp_path, kind, scale, monkeypatch
):
    """As positions do not depend on processes, a run stopped on any number resumes on any other."""
    monkeypatch.setattr('stream.ROWS_PER_WINDOW', 4)
    config = mixture_config(tmp_path, **KINDS[kind])
    mixture = tasks.open.open_mixture(config)
    num_batches = max(scale['stops']) + 3
    expected = None
    texts_of_one = 0
    for num_processes in scale['counts']:
        streams = streams_of(mixture, config, num_processes)
        found, positions = run_streams(streams, num_batches)
        num_texts = sum(stream.vocabulary.num_texts for stream in streams)
        if expected is None:
            expected, expected_positions, texts_of_one = found, positions, num_texts
        assert found == expected
        np.testing.assert_array_equal(positions, expected_positions)
        assert num_texts <= 1.05 * texts_of_one
        for stop in scale['stops']:
            resumed = streams_of(mixture, config, num_processes, expected_positions[stop])
            assert run_streams(resumed, 3)[0] == expected[stop : stop + 3]
    assert len(set(expected)) == len(expected)


# Batches made ahead, in a thread and in worker processes.


@pytest.mark.slow
@pytest.mark.parametrize('num_workers', [0, 2])
def test_batches_made_ahead_are_those_of_the_stream(tmp_path, num_workers):
    """To the end of its rows."""
    options = {'batch_size': 3, 'rows': range(1, 3), 'num_epochs': 1}
    config = mixture_config(tmp_path, task='add', pack='tightly')
    plain = open_stream(config, **options)
    next(plain)
    expected = open_stream(config, **options)
    expected.seek(plain.position)
    expected.counts[:] = plain.counts
    num_threads = threading.active_count()  # the thread starts with the first `next`
    num_batches = 0
    found = prefetch.batches(plain, num_workers)
    for batch in itertools.takewhile(lambda batch: not batch.is_padding, found):
        np.testing.assert_array_equal(batch.before, expected.position)
        chex.assert_trees_all_equal(batch.features, next(expected))
        np.testing.assert_array_equal(batch.after, expected.position)
        np.testing.assert_array_equal(batch.counts, expected.counts)
        num_batches += 1
    assert num_batches >= 3
    assert not any(x.any() for x in next(found).features.values())
    found.close()
    assert threading.active_count() == num_threads
    assert next(expected, None) is None


@pytest.mark.slow
def test_errors_and_faults_of_worker_processes_arrive(tmp_path):
    config = mixture_config(tmp_path, task='add')
    stream = open_stream(config, batch_size=2)
    with (tmp_path / 'add.jsonl').open('a') as file:
        file.write('\nno json')
    with pytest.raises(Refused, match="data.task='add'"):
        list(prefetch.batches(stream, num_workers=1))
    config.on_bad_line = 'skip'
    for batch in prefetch.batches(open_stream(config, batch_size=2), num_workers=2):
        if batch.faults:
            assert re.search('line 91 of .*add.jsonl', batch.faults[0])
            break
    config.on_bad_line = 'stop'
    with pytest.raises(Refused, match='line 91 of .*add.jsonl'):
        list(prefetch.batches(open_stream(config, batch_size=2, num_epochs=1), num_workers=2))


@pytest.mark.slow
def test_an_error_of_a_function_in_a_worker_process_has_its_traceback(tmp_path):
    """Also one that pickle cannot rebuild."""
    config = mixture_config(tmp_path, task='spell')
    stream = open_stream(config, batch_size=2)
    fault = "        error = type('Odd', (Exception,), {'__init__': lambda self, a, b: None})\n"
    with_fault(config, tmp_path, f"{fault}        raise error('it is odd', 1)\n")
    with pytest.raises(RuntimeError, match='(?s)my_tasks.py.*it is odd'):
        list(prefetch.batches(stream, num_workers=1))


def test_a_worker_process_that_dies_is_reported(tmp_path):
    stream = open_stream(mixture_config(tmp_path), batch_size=2)
    batches = prefetch.batches_of_workers(stream, num_workers=2)
    next(batches)
    processes = sorted(multiprocessing.active_children(), key=lambda process: process.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # to the whole group
        os.kill(processes[1].pid, number)
    next(batches)
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(ChildProcessError, match='rows 1 to 1 .*-9'):
        list(batches)
    assert not any(process.is_alive() for process in processes)
