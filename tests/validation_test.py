"""The numbers of an evaluation, computed once more from the logits and the counts of tokens."""

import numpy as np
import pytest
from corpora import stream_of
from forms import first_quick
from runs import ROOT, metrics_of, run, small_config, state_of, stop_after

import data
import infer
import loss
import sources.open
import train
import validation
from configs import base
from run import task_metrics
from run.train_vocabulary import find_or_train_vocabulary


def open_stream(config, workdir, split):
    vocabulary = find_or_train_vocabulary(config, workdir, None, 384)
    source = sources.open.open_source(config)
    return stream_of(source, split, vocabulary, config, 4, seed=0, num_epochs=1), vocabulary


@pytest.fixture(scope='module')
def sentinels_first(corpus, tmp_path_factory):
    """The workdir of a finished run like `uninterrupted` whose sentinels are among the first ids."""
    config = small_config(corpus)
    config.data.vocabulary = str(ROOT / 'tests/golden/hunt/sentinels_first.model')
    return run(config, tmp_path_factory.mktemp('sentinels_first'))


WHERE_SENTINELS_ARE = pytest.mark.parametrize(
    'name', first_quick(['uninterrupted', 'sentinels_first'])
)


@WHERE_SENTINELS_ARE
def test_load_a_workdir_and_compute_its_validation_loss(corpus, request, name):
    """infer.load's logits, summed up by numpy, give the loss that the run reported."""
    uninterrupted = request.getfixturevalue(name)
    t5 = infer.load(uninterrupted)
    assert t5.config.dropout_rate == 0.1
    assert t5.config.emb_dim == 16
    query = t5.params['encoder']['layers_0']['attention']['query']['kernel']
    np.testing.assert_array_equal(
        query, state_of(uninterrupted, 6)['target/encoder/layers_0/attention/query/kernel']
    )
    stream, vocabulary = open_stream(small_config(corpus).data, uninterrupted, 'validation')
    nats = 0.0
    counts = 0
    text_nats = 0.0
    text_count = 0
    for _, batch in zip(range(20), stream, strict=False):
        logits = np.asarray(t5.logits(batch), np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        targets = batch['decoder_target_tokens']
        token_nats = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        is_sentinel = np.isin(targets, vocabulary.sentinel_ids[:2])  # a row has 2 sentinels
        is_text = (targets > 1) & ~is_sentinel
        assert is_sentinel.sum(axis=1).max() == 2
        assert not np.isin(targets, vocabulary.sentinel_ids[2:]).any()
        assert targets.max() < vocabulary.size
        nats += token_nats[targets > 0].sum()
        counts += (targets > 0).sum()
        text_nats += token_nats[is_text].sum()
        text_count += is_text.sum()
    reported = metrics_of(uninterrupted)[-1]
    assert reported['nats_per_target_token'] == pytest.approx(nats / counts, rel=1e-5)
    assert reported['nats_per_text_token'] == pytest.approx(text_nats / text_count, rel=1e-5)
    assert reported['cross_ent_loss_per_all_target_tokens'] == pytest.approx(
        nats / (reported['non_padding_fraction/loss_weights'] ** -1 * counts), rel=1e-5
    )


@WHERE_SENTINELS_ARE
def test_the_baseline_is_the_cross_entropy_of_the_unigram(corpus, request, name):
    """Of the whole training split, though the run has seen six batches of it."""
    uninterrupted = request.getfixturevalue(name)
    config = small_config(corpus).data
    counts = {}
    for split, num_batches in (('train', 10**6), ('validation', 20)):
        stream, vocabulary = open_stream(config, uninterrupted, split)
        tokens = []
        for _, batch in zip(range(num_batches), stream, strict=False):
            tokens.append(batch['decoder_target_tokens'].ravel())
        counts[split] = np.bincount(np.concatenate(tokens), minlength=384)
    text = set(range(2, vocabulary.size)) - set(vocabulary.sentinel_ids[:2].tolist())
    for name, ids in (('text', sorted(text)), ('target', range(1, 384))):
        p = counts['validation'][list(ids)]
        q = counts['train'][list(ids)] + 1
        baseline = -(p * np.log(q / q.sum())).sum() / p.sum()
        key = f'unigram_nats_per_{name}_token'
        assert metrics_of(uninterrupted)[-1][key] == pytest.approx(baseline, rel=1e-12)


def clear_programs():
    for function in (
        train.jit_step,
        train.compile_step,
        validation.make_sums,
    ):
        function.cache_clear()


@pytest.fixture
def fresh_programs():
    """Programs of loss.weighted_sums as it is now, which no other test shares."""
    clear_programs()
    yield
    clear_programs()


weighted_sums = loss.weighted_sums


def weighted_sums_with_entropy(*arguments):
    """As a fork's loss.weighted_sums. The weights are the third argument."""
    return weighted_sums(*arguments) | {'entropy': 2 * arguments[2].sum()}


def test_the_name_of_a_sum_that_a_fork_adds(monkeypatch):
    monkeypatch.setattr(loss, 'weighted_sums', weighted_sums_with_entropy)
    batch = data.encoder_decoder([[]], {'inputs': 2, 'targets': 1}, pack=True)
    names = validation.sum_names(loss.LossConfig(), batch)
    assert 'entropy' in task_metrics.validation_tags(base.get_config().data, names)


@pytest.mark.slow
def test_a_sum_that_a_fork_adds(corpus, tmp_path, monkeypatch, fresh_programs, capsys):
    """It is logged, per weighted target, and may tell the best step. A run resumes from before it."""
    config = small_config(corpus, steps=3)
    config.log.every_steps = 2
    stop_after(1, config, tmp_path)
    monkeypatch.setattr(loss, 'weighted_sums', weighted_sums_with_entropy)
    clear_programs()
    config.save.best_metric = 'training_eval/span_corruption/entropy'
    config.save.best_is = 'lower'
    run(config, tmp_path)
    lines = metrics_of(tmp_path)
    assert [(line['step'], line['run']) for line in lines] == [
        (2, 'train'),
        (3, 'train'),
        (3, 'training_eval/span_corruption'),
    ]
    for line in lines:
        assert line['entropy'] == pytest.approx(2)
    assert 'The best saved step is 3, with training_eval/span_corruption/entropy 2:' in (
        capsys.readouterr().out
    )


def test_a_process_whose_rows_have_nothing_pads_all_batches(corpus, tmp_path):
    """Of a validation split of two lines, while another process has three batches more."""
    file = tmp_path / 'dev.txt'
    file.write_text('one line of text\nanother line of text\n')
    config = small_config(corpus)
    config.data.update(validation_files=str(file), vocabulary='bytes')
    vocabulary = find_or_train_vocabulary(config.data, tmp_path, None, 384)
    source = sources.open.open_source(config.data)
    gather = lambda read: read() + np.array([0, 3])  # noqa: E731
    num_weights = []
    for rows in (range(0, 32), range(32, 64)):
        stream = stream_of(
            source, 'validation', vocabulary, config.data, 64, seed=0, rows=rows, num_epochs=1
        )
        absent = dict.fromkeys(
            ('mesh', 'is_text', 'compute_sums', 'training_counts', 'metrics_of', 'report')
        )
        evaluation = validation.Evaluation(
            'dev', '', every_steps=1, max_batches=20, held_out=stream, gather=gather, **absent
        )
        assert evaluation.read_batches(stop=lambda count: 0)
        assert len(evaluation.batches) >= 3
        for batch in evaluation.batches:
            assert {name: x.shape[0] for name, x in batch.items()} == dict.fromkeys(batch, 32)
        num_weights.append(sum(x['decoder_loss_weights'].sum() for x in evaluation.batches))
    assert min(num_weights) == 0 < max(num_weights)
