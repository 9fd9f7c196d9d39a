"""The example of preferences: its loss, its pairs in rows, and a run on them."""

import json
import re
import shutil

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jax.sharding import PartitionSpec as P
from runs import ROOT, metrics_of, run, small_config, stop_after
from small_models import assert_refused

import infer
import partition
import tasks.names
import tasks.open
import user_code
import vocabulary as vocabularies
from configs import base
from data import TextToText
from loss import LossConfig, Outputs
from modes import infer_input
from stream import Stream
from tasks.objectives import OwnObjective

FILE = ROOT / 'examples/preferences/preferences.py'
preferences = user_code.load_module(FILE, FILE.read_bytes())
# The segments of the targets of some rows: pairs, then padding.
SEGMENTS = [
    [1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 0, 0],
    [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0],
]


def packed_batch():
    """Return logits, and a batch with rows of pairs, whose margins are drawn."""
    rng = np.random.default_rng(0)
    segments = np.array(SEGMENTS, np.int32)
    targets = rng.integers(1, 8, segments.shape, np.int32) * (segments > 0)
    positions = np.zeros_like(segments)
    margins = np.zeros(segments.shape, np.float32)
    for row, row_positions, row_margins in zip(segments, positions, margins, strict=True):
        for segment in np.unique(row[row > 0]):
            row_positions[row == segment] = np.arange((row == segment).sum())
        for pair in np.unique((row[row > 0] + 1) // 2):
            row_margins[(row + 1) // 2 == pair] = rng.normal()
    batch = {
        'encoder_input_tokens': targets,
        'decoder_target_tokens': targets,
        'decoder_segment_ids': segments,
        'decoder_positions': positions,
        'decoder_margin': margins,
    }
    return rng.normal(0, 1, (*segments.shape, 8)).astype(np.float32), batch


def by_hand(logits, batch, kind, beta, label_smoothing):
    """Return the mean loss of the pairs, its gradient, and how many chosen answers are more likely, in float64."""
    logits = np.float64(logits)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    losses = []
    num_preferred = 0
    gradient = np.zeros_like(logits)
    segments = batch['decoder_segment_ids']
    for row in range(len(segments)):
        for first in range(1, segments[row].max(), 2):
            likelihoods = []
            slopes = np.zeros_like(logits[row])
            for segment, sign in ((first, 1), (first + 1, -1)):
                likelihood = 0.0
                for t in np.flatnonzero(segments[row] == segment):
                    target = batch['decoder_target_tokens'][row, t]
                    likelihood += np.log(probabilities[row, t, target])
                    slopes[t] -= sign * probabilities[row, t]
                    slopes[t, target] += sign
                likelihoods.append(likelihood)
            num_preferred += likelihoods[0] > likelihoods[1]
            margin = batch['decoder_margin'][row, np.flatnonzero(segments[row] == first)[0]]
            h = likelihoods[0] - likelihoods[1] - np.float64(margin)
            if kind == 'dpo':
                right = 1 / (1 + np.exp(-beta * h))
                losses.append(
                    -(1 - label_smoothing) * np.log(right) - label_smoothing * np.log(1 - right)
                )
                slope = beta * (label_smoothing * right - (1 - label_smoothing) * (1 - right))
            elif kind == 'ipo':
                losses.append((h - 1 / (2 * beta)) ** 2)
                slope = 2 * (h - 1 / (2 * beta))
            else:
                losses.append(-likelihoods[0])
                slope = -1.0
                slopes[segments[row] != first] = 0
            gradient[row] += slope * slopes
    return np.mean(losses), gradient / len(losses), num_preferred


@pytest.mark.parametrize('mesh', [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize(
    'kind, label_smoothing', [('dpo', 0.0), ('dpo', 0.2), ('ipo', 0.0), ('chosen', 0.0)]
)
def test_loss_and_gradients(mesh, kind, label_smoothing):
    beta = 0.3
    logits, batch = packed_batch()
    options = preferences.Options(kind=kind, beta=beta, label_smoothing=label_smoothing)
    settings = LossConfig(options=options)

    def loss_and_gradient(logits_bTv, batch):
        segments_bT = batch['decoder_segment_ids']
        divisor = 8.0  # answers of SEGMENTS

        def loss(logits_bTv):
            outputs = Outputs(logits_bTv, None, None, {})
            weights_bT = (segments_bT > 0).astype(np.float32)
            sums = preferences.weighted_sums(
                outputs, batch, weights_bT, jax.numpy.float32(divisor), settings
            )
            return sums['loss'], sums

        gradient, sums = jax.grad(loss, has_aux=True)(logits_bTv)
        return jax.lax.psum(sums, partition.BATCH_AXES), gradient

    specs = P(partition.BATCH_AXES, None, 'model')
    data, fsdp, model_axis = mesh
    compute = jax.shard_map(
        loss_and_gradient,
        mesh=partition.make_mesh(data=data, fsdp=fsdp, model=model_axis),
        in_specs=(specs, partition.BATCH),
        out_specs=(P(), specs),
    )
    sums, gradient = jax.jit(compute)(logits, batch)
    expected, expected_gradient, num_preferred = by_hand(logits, batch, kind, beta, label_smoothing)
    np.testing.assert_allclose(sums['loss'], expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-6)
    assert 0 < num_preferred < 4 and sums['preferred'] == 2 * num_preferred


def write_pairs(folder):
    rows = []
    for i in range(40):
        pair = {'prompt': f'Where? {i}', 'chosen': f'In {i}', 'rejected': f'It is in {i} of them'}
        rows.append(json.dumps(pair | {'chosen_score': -i / 8, 'rejected_score': -3.0}))
    file = folder / 'scored.jsonl'
    file.write_text('\n'.join(rows))
    return str(file)


@pytest.mark.parametrize('pack', ['no', 'greedily', 'tightly'])
def test_pairs_share_rows(tmp_path, pack):
    """Each pair lies in one row, in order, with its number at all its positions; a stream resumes between pairs."""
    config = base.get_config().data
    config.update(task='preferences', module=str(FILE), files=write_pairs(tmp_path), pack=pack)
    config.lengths.update(inputs=128, targets=100)
    config.validation_fraction = 0.0
    stream = Stream(
        tasks.open.open_mixture(config),
        'train',
        vocabularies.ByteVocabulary(),
        config,
        batch_size=2,
        seed=0,
        num_epochs=1,
        **tasks.names.own_features(config)._asdict(),
    )
    pairs = []
    positions = [stream.position]
    batches = []
    for batch in stream:
        positions.append(stream.position)
        batches.append(batch)
        features = {name: (x.shape[1], x.dtype.name) for name, x in batch.items()}
        assert features == tasks.names.features(config)
        for row in range(2):
            segments = batch['decoder_segment_ids'][row]
            assert segments.max() % 2 == 0
            assert pack != 'no' or segments.max() <= 2
            for first in range(1, segments.max(), 2):
                texts = []
                for segment in (first, first + 1):
                    ids = batch['decoder_target_tokens'][row][segments == segment]
                    texts.append(bytes((ids[:-1] - 3).tolist()).decode())
                i = int(texts[0].removeprefix('In '))
                assert texts == [f'In {i}', f'It is in {i} of them']
                is_pair = (segments == first) | (segments == first + 1)
                assert (batch['decoder_margin'][row][is_pair] == np.float32(3 - i / 8)).all()
                of_inputs = batch['encoder_segment_ids'][row]
                is_pair = (of_inputs == first) | (of_inputs == first + 1)
                assert (batch['encoder_margin'][row][is_pair] == np.float32(3 - i / 8)).all()
                pairs.append(i)
            assert (batch['decoder_margin'][row][segments == 0] == 0).all()
    assert sorted(pairs) == list(range(40))
    assert (len(batches) < 12) == (pack != 'no')
    for i in (1, len(batches) - 1):
        stream.seek(positions[i])
        for name, x in next(stream).items():
            np.testing.assert_array_equal(x, batches[i][name], err_msg=name)


def test_a_run_on_pairs(tmp_path):
    """Its metrics are means over the pairs: those of T5.score on the held-out ones. It resumes with the same file alone."""
    module = tmp_path / 'own.py'
    shutil.copy(FILE, module)
    config = small_config(write_pairs(tmp_path), steps=4)
    config.data.update(task='preferences', module=str(FILE), pack='no', vocabulary='bytes')
    config.data.validation_fraction = 0.3
    config.data.lengths.update(inputs=48, targets=64)
    config.model.update(vocab_size=512, dropout_rate=0.0)
    config.loss.update(
        module=str(module), z_loss=0.0, loss_normalizing_factor='AVERAGE_PER_SEQUENCE'
    )
    config.loss.options.kind = 'ipo'
    config.train.batch_size = 1  # the loss of a step is then that of one pair
    config.eval.steps = 20
    workdir = tmp_path / 'run'
    stop_after(2, config, workdir)
    assert (workdir / 'checkpoint_2/own_loss.py').read_bytes() == FILE.read_bytes()
    module.write_bytes(FILE.read_bytes() + b'#')
    assert_refused(lambda: run(config, workdir), 'loss.module')
    shutil.copy(FILE, module)
    run(config, workdir)
    last = metrics_of(workdir)[-1]
    t5 = infer.load(workdir)
    mixture = tasks.open.open_mixture(config.data)
    records = [record.fields for record in mixture.tasks[0].source.records('validation')]
    scores = {}
    for name in ('chosen', 'rejected'):
        scores[name] = t5.score([x['prompt'] for x in records], [x[name] for x in records])
        assert last[name] == pytest.approx(scores[name].mean(), rel=1e-4)
    margins = np.array([x['chosen_score'] - x['rejected_score'] for x in records])
    losses = (scores['chosen'] - scores['rejected'] - margins - 5) ** 2
    share = (scores['chosen'] > scores['rejected']).mean()
    assert last['preferred'] == pytest.approx(share, rel=1e-6)
    assert last['loss'] == pytest.approx(losses.mean(), rel=1e-4)


@pytest.mark.parametrize('changes, reason', [
    ({'shares_rows': False}, 'shares_rows'),
    ({'numbers': ()}, "numbers = ('margin',)"),
    ({'numbers': ('margin', 'domain')}, "numbers = ('margin',)"),
    ({'__init__': TextToText.__init__}, '50 ids share a row of 40'),  # each example may fill a row
])  # fmt: skip
def test_a_class_that_says_otherwise_than_its_examples(changes, reason):
    config = base.get_config().data
    config.lengths.update(inputs=40, targets=40)
    own = type('Own', (preferences.Preferences,), changes)
    objective = OwnObjective(own, config, vocabularies.ByteVocabulary())
    ids = np.arange(5, 29, dtype=np.int32)
    record = dict.fromkeys(('inputs', 'targets', 'rejected'), ids)
    record['fields'] = {'chosen_score': -1.0, 'rejected_score': -2.0}
    with pytest.raises(AssertionError, match=re.escape(reason)):
        objective.examples(['a'], [record], 0)


@pytest.mark.parametrize('kind', ['jsonl', 'csv', 'parquet'])
def test_a_column_of_numbers(tmp_path, kind):
    rows = [{'inputs': f'a {i}', 'margin': value} for i, value in enumerate([0.5, -2])]
    table = pa.Table.from_pylist(rows)
    file = tmp_path / f'a.{kind}'
    if kind == 'jsonl':
        file.write_text('\n'.join(map(json.dumps, rows)))
    elif kind == 'csv':
        file.write_text('inputs,margin\na 0,0.5\na 1,-2\n')
    else:
        pq.write_table(table, file)
    config = base.get_config().data
    config.update(task='preferences', module=str(FILE))

    def read():
        vocabulary = vocabularies.ByteVocabulary()
        lines = infer_input.FileExamples(str(file), config, vocabulary, False, False)
        return [example.numbers for example in lines]

    assert read() == [{'margin': 0.5}, {'margin': -2.0}]
    if kind == 'csv':
        file.write_text('inputs,margin\na 0,none\n')
        assert_refused(read, 'margin')
