"""Run a model over an evaluation set: validation losses, beside a unigram baseline.

Source: T5X t5x/models.py, t5x/trainer.py (train-eval).
"""

import copy
import functools
import itertools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import data
import loss
import model
import partition
from vocabulary import EOS_ID

UNIGRAM_TOKENS = 1_000_000  # positions of training targets that the unigram baseline counts


class Evaluation:
    """A model's losses on the validation split, on the same batches every time, and the unigram baseline.
    Differs from T5X: the first `eval.steps` batches of one pass; T5X repeats a small split."""

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        training: data.Stream,
        validation: data.Stream,
        num_microbatches: int = 1,
    ):
        self.config, self.mesh, self.training, self.validation = config, mesh, training, validation
        self.batches: list[dict[str, np.ndarray]] = []
        self._are_read = False
        self.first_sentinel = validation.first_sentinel
        self.sums = make_sums(
            model.T5Config(**config.model),
            mesh,
            z_loss=config.loss.z_loss,
            label_smoothing=config.loss.label_smoothing,
            normalizing_factor=loss.parse_normalizing_factor(config.loss.loss_normalizing_factor),
            first_sentinel=self.first_sentinel,
            num_microbatches=num_microbatches,
        )

    def __call__(
        self, params: Mapping[str, jax.Array], stop: Callable[[int], int] = lambda count: 0
    ) -> dict[str, float] | None:
        """Return T5X's metrics, and nats per token of text and of all targets beside their unigram baselines.

        `stop` is called with the number of batches so far, alike in all processes. None where it gives anything
        but 0: the evaluation ended there.
        """
        if not self._read_batches(stop):
            return None
        steps = []
        for count, batch in enumerate(self.batches, start=1):
            steps.append(self.sums(params, partition.place_rows(self.mesh, batch)))
            jax.block_until_ready(steps[-2:-1])  # one batch is queued while another is computed
            if stop(count):
                return None
        steps = jax.device_get(steps)
        total = {name: sum(float(sums[name]) for sums in steps) for name in steps[0]}
        values = summarize(steps, self.config)
        values['nats_per_text_token'] = total['text_nats'] / total['text_tokens']
        values['nats_per_target_token'] = total['target_nats'] / total['decoder_tokens']
        return values | self.unigram_baselines

    def _read_batches(self, stop: Callable[[int], int]) -> bool:
        """Read this process's rows, once: a small split of a large corpus takes a while.

        Return False where `stop` ended it; several processes read at their own pace and do not ask.
        """
        if self._are_read:
            return True
        for batch in self.validation:
            self.batches.append(batch)
            if len(self.batches) == self.config.eval.steps:
                break
            if jax.process_count() == 1 and stop(0):
                return False
        del self.validation  # and with it the documents that its lanes hold
        # Lanes end apart, but all processes must take the same number of steps.
        most = int(partition.from_processes(np.array([len(self.batches)])).max())
        empty = {name: np.zeros_like(x) for name, x in self.batches[0].items()}
        self.batches += [empty] * (most - len(self.batches))
        self._are_read = True
        return True

    @functools.cached_property
    def unigram_baselines(self) -> dict[str, float]:
        """The cross entropy of the validation targets under the unigram of the training targets, in nats: what
        token frequencies alone would pay.

        Counted are the first UNIGRAM_TOKENS positions of the training targets, or their first epoch if that is
        shorter, whatever the number of steps; each token once more than it occurs.
        """
        training_counts = np.zeros(self.config.model.vocab_size, np.int64)
        validation_counts = np.zeros_like(training_counts)
        training = copy.copy(self.training)
        training.num_epochs = 1
        training.seek(np.zeros_like(training.position))
        positions_per_batch = self.config.train.batch_size * self.config.data.lengths.targets
        num_batches = math.ceil(UNIGRAM_TOKENS / positions_per_batch)
        for batch in itertools.islice(training, num_batches):
            np.add.at(training_counts, batch['decoder_target_tokens'], 1)
        for batch in self.batches:
            np.add.at(validation_counts, batch['decoder_target_tokens'], 1)
        counts = np.stack([training_counts, validation_counts])
        training_counts, validation_counts = partition.from_processes(counts).sum(axis=0)

        def baseline(first: int, stop: int | None) -> float:
            q = training_counts[first:stop] + 1
            p = validation_counts[first:stop]
            return float(-(p * np.log(q / q.sum())).sum() / p.sum())

        return {
            'unigram_nats_per_text_token': baseline(EOS_ID + 1, self.first_sentinel),
            'unigram_nats_per_target_token': baseline(EOS_ID, None),
        }


@functools.lru_cache(maxsize=16)
def make_sums(
    config: model.T5Config,
    mesh: Mesh,
    z_loss: float,
    label_smoothing: float,
    normalizing_factor: float | str,
    first_sentinel: int,
    num_microbatches: int,
) -> Callable:
    """Return a compiled function (params, batch) -> loss.weighted_sums of the global batch, and nats (no z-loss,
    no smoothing) of all targets and of those that are text: no sentinel, EOS or padding.

    Kept: two runs in one process with the same model compile it once.
    """
    specs = partition.param_specs(model.PARAMETER_SPECS, model.shapes(config))
    settings = types.SimpleNamespace(z_loss=z_loss, label_smoothing=label_smoothing)

    def device_sums(params, batch):
        weights_bT, divisor = loss.weights_and_divisor(batch, normalizing_factor)

        def part_sums(part):
            batch, weights_bT = part
            logits_bTv = model.apply(lambda: model.logits(config, batch), params)
            sums = loss.weighted_sums(logits_bTv, batch, weights_bT, divisor, settings)
            targets_bT = batch['decoder_target_tokens']
            nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
            text_bT = (targets_bT > EOS_ID) & (targets_bT < first_sentinel)
            sums['target_nats'] = (nats_bT * (targets_bT > 0)).sum()
            sums['text_nats'] = (nats_bT * text_bT).sum()
            sums['text_tokens'] = text_bT.sum()
            return sums

        sums = lax.map(part_sums, partition.cut_rows((batch, weights_bT), num_microbatches))
        return lax.psum(jax.tree.map(lambda x: x.sum(axis=0), sums), 'data')

    return jax.jit(
        jax.shard_map(
            device_sums,
            mesh=mesh,
            in_specs=(specs, partition.BATCH),
            out_specs=P(),
        )
    )


def summarize(steps: list, config: Any) -> dict[str, float]:
    """T5X's metrics (t5x/models.py) from each step's sums, and 'nats_per_token': the cross entropy
    without z-loss, whatever the normalization."""
    sums = {name: sum(float(s[name]) for s in steps) for name in steps[0]}
    rows, lengths = len(steps) * config.train.batch_size, config.data.lengths
    inputs, targets = rows * lengths.inputs, rows * lengths.targets  # positions, padding included
    weights, tokens = max(sums['weights'], 1e-9), sums['encoder_tokens'] + sums['decoder_tokens']
    metrics = {
        'nats_per_token': sums['nats'] / weights,
        'accuracy': sums['correct'] / weights,
        'loss_per_nonpadding_target_token': sums['loss'] / weights,
        'non_padding_fraction/loss_weights': sums['weights'] / targets,
        'non_padding_fraction/encoder_input_tokens': sums['encoder_tokens'] / inputs,
        'non_padding_fraction/decoder_target_tokens': sums['decoder_tokens'] / targets,
        'non_padding_fraction/overall': tokens / (inputs + targets),
    }
    sums['cross_ent_loss'] = sums['loss'] - sums['z_loss']
    for name in ('loss', 'z_loss', 'cross_ent_loss'):
        metrics |= {name: sums[name] / len(steps)}
        metrics |= {f'{name}_per_all_target_tokens': sums[name] / targets}
    return metrics
