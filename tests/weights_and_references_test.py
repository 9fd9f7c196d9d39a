"""data.weight, data.references and data.target_choice: from a record to the loss and the metrics."""

import collections
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sacrebleu
from corpora import HUNT, make_config
from runs import small_config
from small_models import as_one_device

import data
import loop
import loss
import partition
import tasks.open
from formats.vocabulary import named_vocabulary
from messages import Refused
from prepare import prepare
from sources import weight_at
from stream import Stream
from tasks import metrics

BYTES = named_vocabulary('data.vocabulary', 'bytes', 100)


def write_lines(path, records):
    path.write_text('\n'.join(map(json.dumps, records)))
    return str(path)


def open_stream(config, split='train', batch_size=4, **options):
    mixture = tasks.open.open_mixture(config)
    return Stream(mixture, split, BYTES, config, batch_size=batch_size, seed=0, **options)


def targets_of(stream):
    """The texts of the targets of all examples of a stream of one epoch that is not packed."""
    found = []
    for batch in stream:
        for ids in batch['decoder_target_tokens']:
            if ids.any():
                found.append(BYTES.decode(ids[ids > 0][:-1]))
    return found


# Weights.


def examples_with(*weights):
    sizes = [3, 2, 4]
    examples = []
    for weight, size in zip(weights, sizes, strict=False):
        ids = np.arange(5, 5 + size, dtype=np.int32)
        examples.append(data.Example(ids, ids, names=[], weight=weight))
    return examples


@pytest.mark.parametrize('pack', [True, False])
def test_weights_of_a_row(pack):
    lengths = {'inputs': 8, 'targets': 8}
    rows = [examples_with(0.5, 2.0), examples_with(0.25), []]
    if not pack:
        rows = [row[:1] for row in rows]
    weights = data.encoder_decoder(rows, lengths, pack, has_weights=True)['decoder_loss_weights']
    expected = np.zeros([3, 8], np.float32)
    expected[0, :3] = 0.5
    expected[1, :3] = 0.25
    if pack:
        expected[0, 3:5] = 2.0
    np.testing.assert_array_equal(weights, expected, strict=True)
    plain = data.encoder_decoder(rows, lengths, pack)['decoder_loss_weights']
    np.testing.assert_array_equal(plain, (expected > 0).astype(np.int32), strict=True)


@pytest.mark.parametrize('kind', ['jsonl', 'csv', 'parquet', 'own'])
def test_weights_come_from_the_records(tmp_path, kind):
    """Each target's weight is that of its record, packed with others; the text is 'W' + its weight."""
    weights = [0, 0.5, 1, 2.25]
    records = [{'q': f'{i}', 'a': f'W{weights[i % 4]}', 'w': weights[i % 4]} for i in range(40)]
    config = make_config(inputs='{q}', targets='{a}', weight='{meta/w}', pack='tightly')
    config.validation_fraction = 0.0
    if kind == 'csv':
        config.weight = '{w}'
        lines = [f'{x["q"]},{x["a"]},{x["w"]}' for x in records]
        (tmp_path / 'a.csv').write_text('\n'.join(['q,a,w', *lines]))
        config.files = f'{tmp_path}/a.csv'
    else:
        nested = [{'q': x['q'], 'a': x['a'], 'meta': {'w': x['w']}} for x in records]
        config.files = write_lines(tmp_path / 'a.jsonl', nested)
    if kind == 'parquet':
        nested = [row | {'meta': {'w': float(row['meta']['w'])}} for row in nested]
        pq.write_table(pa.Table.from_pylist(nested), tmp_path / 'a.parquet')
        config.files = f'{tmp_path}/a.parquet'
    if kind == 'own':
        (tmp_path / 'mine.py').write_text(
            'from tasks import Task\n'
            'def f(record):\n'
            "    yield {'inputs': record['q'], 'targets': record['a'], 'w': record['meta']['w']}\n"
            f"TASKS = [Task('mine', files='{config.files}', preprocess_fn=f)]\n"
        )
        config.update(module=f'{tmp_path}/mine.py', task='mine', files='', inputs='', targets='')
        config.weight = '{w}'
    stream = open_stream(config, num_epochs=1)
    counts = collections.Counter()
    for batch in stream:
        assert batch['decoder_loss_weights'].dtype == np.float32
        assert batch.keys() == tasks.names.features(config).keys()
        for ids, segments, row in zip(
            batch['decoder_target_tokens'],
            batch['decoder_segment_ids'],
            batch['decoder_loss_weights'],
            strict=True,
        ):
            assert not row[segments == 0].any()
            for segment in range(1, segments.max() + 1):
                [weight] = set(row[segments == segment].tolist())
                text = BYTES.decode(ids[segments == segment][:-1])
                assert float(text.removeprefix('W')) == weight
                counts[weight] += 1
    assert counts == dict.fromkeys(map(float, weights), 10)


def test_a_wrong_weight_is_a_bad_record(tmp_path):
    for weight in (-1, None, 'much', float('nan'), '1e31', [1], {}, 10**400):
        with pytest.raises(Refused, match="'w'"):
            weight_at({'w': weight}, 'w')
    records = [{'q': 'q', 'a': 'a', 'w': 1}] * 3 + [{'q': 'q', 'a': 'a', 'w': -1}]
    path = write_lines(tmp_path / 'a.jsonl', records)
    config = make_config(files=path, inputs='{q}', targets='{a}', weight='{w}')
    config.validation_fraction = 0.0
    with pytest.raises(Refused, match="line 4 of .*'w'"):
        list(open_stream(config, num_epochs=1))
    config.on_bad_line = 'skip'
    assert len(targets_of(open_stream(config, num_epochs=1))) == 3


def test_a_batch_of_weight_0_has_loss_0():
    batch = {'decoder_loss_weights': np.zeros([2, 4], np.float32)}
    _, divisor = as_one_device(
        lambda batch: loss.weights_and_divisor(batch, 'NUM_REAL_TARGET_TOKENS'), partition.BATCH
    )(batch)
    assert divisor == 1


def weighted_run(tmp_path, name, records, weight):
    config = small_config('', steps=2)
    config.model.vocab_size = 384
    config.data.update(
        files=write_lines(tmp_path / f'{name}.jsonl', records), inputs='{q}', targets='{a}'
    )
    config.data.update(vocabulary='bytes', weight=weight, validation_fraction=0.0)
    config.data.validation_files = write_lines(tmp_path / 'valid.jsonl', records[:4])
    config.loss.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'
    config.train.batch_size = 8
    return config


@pytest.mark.slow
def test_training_with_weights(tmp_path):
    """Equal weights are those of a run without any; with weight 0 an example counts for nothing."""
    words = [{'q': f'question {i}', 'a': f'answer{i}', 'w': 0.5} for i in range(30)]
    lines = {}
    for name, records, weight in [
        ('plain', words, ''),
        ('halves', words, '{w}'),
        ('zeros', [x | {'w': int(i % 2)} for i, x in enumerate(words)], '{w}'),
    ]:
        config = weighted_run(tmp_path, name, records, weight)
        loop.train(prepare(config, tmp_path / name))
        file = tmp_path / name / 'metrics.jsonl'
        lines[name] = [json.loads(line) for line in file.read_text().splitlines()]
    for plain, halves, zeros in zip(*lines.values(), strict=True):
        for key in ('loss', 'nats_per_target_token', 'accuracy'):
            if key in plain:
                assert halves[key] == pytest.approx(plain[key], rel=1e-5), key
                assert np.isfinite(zeros[key]) and (key != 'loss' or zeros[key] != plain[key])


def test_a_cache_has_no_weights():
    for name, value in {'weight': '{w}', 'target_choice': 'random'}.items():
        with pytest.raises(Refused, match=f'data.{name}'):
            tasks.open.sources.open.check_not_of_records(make_config(**{name: value}))


# References.


def test_the_references_of_squad_as_the_hub_has_it():
    config = make_config(
        files=str(HUNT / 'squad.parquet'),
        inputs='question: {question} context: {context}',
        references='{answers/text}',
        metrics='squad,accuracy',
        allow_empty_targets=True,
        validation_fraction=0.0,
    )
    mixture = tasks.open.open_mixture(config)
    [task] = mixture.tasks
    rows = pq.read_table(HUNT / 'squad.parquet').to_pylist()
    records = list(mixture.tasks[0].source.records('train'))
    for row, record in zip(rows, records, strict=True):
        [texts] = task.texts_of(record)
        answers = row['answers']['text'] or ['']
        assert texts['references'] == answers and texts['targets'] == answers[0]
        assert texts['inputs'] == f'question: {row["question"]} context: {row["context"]}'
        assert task.task.postprocess(answers[0], texts, is_target=True) == answers
        assert task.task.postprocess('text', texts) == 'text'
    targets = [row['answers']['text'] or [''] for row in rows]
    second = [answers[-1] for answers in targets]
    for metric_fn in task.task.metric_fns:
        values = task.task.metric(metric_fn, targets, second)
        assert all(value == pytest.approx(100) for value in values.values()), metric_fn


@pytest.mark.parametrize('kind', ['jsonl', 'csv'])
def test_an_empty_list_and_a_text_are_references(tmp_path, kind):
    config = make_config(inputs='{q}', references='{a}', allow_empty_targets=True)
    config.validation_fraction = 0.0
    if kind == 'csv':
        (tmp_path / 'a.csv').write_text('q,a\nx,one\ny,\n')
        config.files = f'{tmp_path}/a.csv'
    else:
        config.files = write_lines(
            tmp_path / 'a.jsonl', [{'q': 'x', 'a': 'one'}, {'q': 'y', 'a': []}]
        )
    [task] = tasks.open.open_mixture(config).tasks
    found = [texts for record in task.source.records('train') for texts in task.texts_of(record)]
    assert [(x['targets'], x['references']) for x in found] == [('one', ['one']), ('', [''])]
    if kind == 'jsonl':
        config.files = write_lines(
            tmp_path / 'a.jsonl', [{'q': 'x', 'a': ['b']}, {'q': 'y', 'a': ['c', 1]}]
        )
        [task] = tasks.open.open_mixture(config).tasks
        with pytest.raises(Refused, match="line 2 of .*'a/1'"):
            list(task.source.records('train'))


def test_which_reference_is_the_target(tmp_path):
    records = [{'q': f'{i}', 'a': [f'{i} {letter}' for letter in 'abc']} for i in range(60)]
    path = write_lines(tmp_path / 'a.jsonl', records)
    config = make_config(files=path, inputs='{q}', references='{a}', validation_files='')
    config.validation_fraction = 0.2
    first = targets_of(open_stream(config, num_epochs=3))
    assert {text[-1] for text in first} == {'a'}
    config.target_choice = 'random'
    drawn = targets_of(open_stream(config, num_epochs=3))
    assert drawn == targets_of(open_stream(config, num_epochs=3))
    counts = collections.Counter(text[-1] for text in drawn)
    assert set(counts) == set('abc') and min(counts.values()) > len(drawn) / 6
    of_first_record = {text for text in drawn if text.startswith(drawn[0][:-1])}
    assert len(drawn) == len(first) and len(of_first_record) > 1  # another one in another epoch
    assert {text[-1] for text in targets_of(open_stream(config, 'validation', num_epochs=1))} == {
        'a'
    }


def test_metrics_of_several_references():
    """Against sacrebleu, and for ROUGE against the best of the references one by one."""
    targets = [
        ['the cat sat on the mat', 'a cat was on the mat'],
        ['dogs bark at night'],
        ['one', 'two', '3'],
    ]
    predictions = ['a cat sat on a mat', 'dogs bark at noon', 'two']
    padded = [[x[i] if i < len(x) else None for x in targets] for i in range(3)]
    expected = sacrebleu.metrics.BLEU(tokenize='intl').corpus_score(predictions, padded).score
    assert metrics.bleu_of_references(targets, predictions)['bleu'] == pytest.approx(expected)
    found = metrics.rouge(targets, predictions)
    for key, value in found.items():
        best = []
        for references, prediction in zip(targets, predictions, strict=True):
            best.append(max(metrics.rouge([x], [prediction])[key] for x in references))
        assert value == pytest.approx(np.mean(best))
    assert metrics.accuracy_of_references(targets, predictions)['accuracy'] == pytest.approx(
        100 / 3
    )
