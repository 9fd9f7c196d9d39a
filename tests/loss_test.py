"""Cross entropy against numpy in float64, and T5X's own cases (t5x/losses_test.py) for its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from small_models import as_one_device

import loss
from messages import Refused
from partition import BATCH, BATCH_AXES

LOGITS = P(BATCH_AXES, None, 'model')


def numpy_cross_entropy(logits, targets, z_loss, label_smoothing):
    """The definition, float64: soft targets against log softmax, minus the soft targets' entropy."""
    logits, vocab_size = logits.astype(np.float64), logits.shape[-1]
    top = logits.max(-1)
    log_z = top + np.log(np.exp(logits - top[..., None]).sum(-1))
    on, off = 1 - label_smoothing, label_smoothing / (vocab_size - 1)
    soft = np.where(np.arange(vocab_size) == targets[..., None], on, off)
    entropy = -(on * np.log(on) + (vocab_size - 1) * off * np.log(off + 1e-20))
    cross = -(soft * (logits - log_z[..., None])).sum(-1)
    return cross + z_loss * log_z**2 - entropy, z_loss * log_z**2


@pytest.mark.parametrize('z_loss', [0.0, 1e-4, 0.1])
@pytest.mark.parametrize('label_smoothing', [0.0, 0.1, 0.7])
def test_cross_entropy(z_loss, label_smoothing):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 5, 64), scale=5).astype(np.float32)
    targets = rng.integers(0, 64, (3, 5))
    cross_entropy = lambda x, t: loss.cross_entropy(x, t, z_loss, label_smoothing)  # noqa: E731
    found = as_one_device(cross_entropy, (LOGITS, BATCH))(logits, targets)
    expected = numpy_cross_entropy(logits, targets, z_loss, label_smoothing)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_gradient_is_the_one_T5X_writes_by_hand():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(2, 3, 16)).astype(np.float32)
    targets, z_loss, smoothing = rng.integers(0, 16, (2, 3)), 0.01, 0.2

    def gradient(x, t):
        return jax.grad(lambda x: loss.cross_entropy(x, t, z_loss, smoothing)[0].sum())(x)

    log_z = np.log(np.exp(logits).sum(-1, keepdims=True))
    soft = np.where(np.arange(16) == targets[..., None], 1 - smoothing, smoothing / 15)
    expected = (1 + 2 * z_loss * log_z) * np.exp(logits - log_z) - soft
    found = as_one_device(gradient, (LOGITS, BATCH))(logits, targets)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_the_examples_of_packed_rows():
    """T5X's count_packed_examples: changes of the segment, and one more unless padding is last."""
    segments = np.array([[1, 1, 3, 3, 0, 0], [2, 2, 2, 2, 2, 2], [2, 7, 7, 7, 7, 0]])
    assert loss.num_segments(segments) == 5
    assert loss.num_segments(segments[:, :1]) == 3
    assert loss.num_segments(np.zeros((2, 4), int)) == 0
    assert loss.num_segments(np.array([[True, True, False], [False, False, False]])) == 1


def weights_and_divisor(batch, name):
    factor = loss.parse_normalizing_factor(name)
    return as_one_device(lambda b: loss.weights_and_divisor(b, factor), BATCH)(batch)


def test_normalizing_factors():
    targets = np.array([[1, 2, 3, 4, 0], [5, 6, 0, 0, 0]])
    batch = {'decoder_target_tokens': targets, 'decoder_loss_weights': (targets > 0).astype(int)}
    ones = (targets > 0).astype(float)
    quarter = np.array([[0.25] * 4 + [0], [0.5] * 2 + [0] * 3])
    for name, divisor, weights in [
        ('', 1, ones),
        ('233472', 233472, ones),
        ('num_real_target_tokens', 6, ones),
        ('NUM_TOTAL_TARGET_TOKENS', 10, ones),
        ('AVERAGE_PER_SEQUENCE', 2, quarter),
    ]:
        found = weights_and_divisor(batch, name)
        np.testing.assert_allclose(found[0], weights)
        assert found[1] == divisor


def test_average_per_sequence_of_packed_rows():
    weights = np.array([[0.5, 1, 0.25, 2, 1.5], [1, 2, 3, 4, 5]])
    segments = np.array([[1, 1, 1, 2, 3], [1, 2, 2, 3, 0]])
    sums = np.array([[1.75, 1.75, 1.75, 2, 1.5], [1, 5, 5, 4, np.inf]])
    batch = {
        'decoder_target_tokens': np.ones([2, 5], int),
        'decoder_loss_weights': weights,
        'decoder_segment_ids': segments,
    }
    found, divisor = weights_and_divisor(batch, 'AVERAGE_PER_SEQUENCE')
    np.testing.assert_allclose(found, weights / sums, rtol=1e-6)
    np.testing.assert_allclose(divisor, 6, rtol=1e-6)


@pytest.mark.parametrize('value', ['-1', '0', 'TOKENS', 'nan'])
def test_an_unknown_normalizing_factor_is_refused(value):
    with pytest.raises(Refused):
        loss.parse_normalizing_factor(value)


def test_the_lowest_of_equal_logits_counts():
    logits = np.random.default_rng(0).integers(0, 40, (2, 3, 1000)).astype(np.float32)
    found = as_one_device(loss.argmax, (LOGITS,))(logits)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, logits.argmax(axis=-1))
