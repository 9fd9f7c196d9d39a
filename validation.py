"""The validation losses of a model, teacher-forced, next to a unigram baseline ("training_eval").

run/task_metrics.py has the metrics of answers. Source: T5X t5x/models.py, t5x/trainer.py (train-eval).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict
from numpy.typing import NDArray

import loss
import model
import partition
from loss import LossConfig
from model import T5Config
from stream import Stream
from vocabulary import PAD_ID

# Values that train_step, all_sums and make_sums add to the sums of loss.weighted_sums.
OTHERS: tuple[str, ...] = ('learning_rate', 'gradient_norm', 'finite', 'spike', 'batch_crc32')
OTHERS += ('aux_loss', 'target_nats', 'text_nats', 'text_tokens')
UNIGRAM_TOKENS = 1_000_000  # positions of training targets that the unigram baseline counts
Gather = Callable[[Callable[[], NDArray]], NDArray]  # call in every process, stack the results


@dataclasses.dataclass(eq=False)
class Evaluation:
    """A model's losses on fixed batches of the validation split, next to the unigram baseline.

    Differs from T5X: takes the first `max_batches` of one pass. T5X repeats a small split.
    """

    name: str
    title: str  # in its line on the terminal
    every_steps: int
    max_batches: int
    mesh: Mesh
    held_out: Stream | None  # None after its batches are read
    is_text: NDArray  # bool, by id: not padding, EOS or a sentinel
    compute_sums: Callable
    training_counts: Callable[[], NDArray]  # per token, in this process's targets
    gather: Gather
    metrics_of: Callable[[Sequence[Mapping[str, float]]], dict[str, float]]  # `summarize`
    report: Callable[[str, Mapping[str, float]], None]  # (step and title, values)
    batches: list[dict[str, NDArray]] = dataclasses.field(default_factory=list)  # own rows

    def __call__(
        self, params: Mapping[str, jax.Array], step: int, stop: Callable[[int], int]
    ) -> dict[str, float] | None:
        """Report and return T5X's metrics and the nats per token, of text and of all targets, next to the unigram's.

        `stop` is called with the number of batches so far and must return the same in all processes; unless it
        returns 0, return None.
        """
        if not self.read_batches(stop):
            return None
        steps = []
        for count, batch in enumerate(self.batches, start=1):
            steps.append(self.compute_sums(params, partition.place_rows(self.mesh, batch)))
            if count > 1:
                jax.block_until_ready(steps[-2])  # compute one batch, queue one
            if stop(count):
                return None
        values = self.metrics_of(jax.device_get(steps)) | self.unigram_baselines
        self.report(f'Step {step:,}{self.title}', values)
        return values

    def read_batches(self, stop: Callable[[int], int]) -> bool:
        """Read the batches, once: a small split of a large corpus takes a while.

        Returns False if `stop` ended the reading. Several processes read at different speeds and do not call it.
        """
        if self.held_out is None:
            return True
        held_out = self.held_out

        def read() -> NDArray:
            for batch in itertools.islice(held_out, self.max_batches - len(self.batches)):
                self.batches.append(batch)
                if jax.process_count() == 1 and stop(0):
                    return np.array(-1)
            return np.array(len(self.batches))

        num_batches = int(self.gather(read).max())
        if num_batches < 0:
            return False
        self.held_out = None  # frees the documents that its lanes hold
        # All processes must take the same number of steps, but the rows of some end first.
        padding = held_out.batch_of([[] for _ in held_out.rows])
        self.batches += [padding] * (num_batches - len(self.batches))
        return True

    @functools.cached_property
    def unigram_baselines(self) -> dict[str, float]:
        """The loss in nats of a model that knows only token frequencies: counts in training targets, plus one."""

        def count() -> NDArray:
            training_counts = self.training_counts()
            validation_counts = np.zeros_like(training_counts)
            for batch in self.batches:
                np.add.at(validation_counts, batch['decoder_target_tokens'], 1)
            return np.stack([training_counts, validation_counts])

        training_counts, validation_counts = self.gather(count).sum(axis=0)
        baselines = {}
        for name, tokens in (('text', self.is_text), ('target', slice(PAD_ID + 1, None))):
            counts = validation_counts[tokens]
            q = training_counts[tokens] + 1
            nats = -(counts * np.log(q / q.sum())).sum()
            baselines[f'unigram_nats_per_{name}_token'] = float(nats / max(counts.sum(), 1))
        return baselines


def open_evaluations(
    eval_group: ConfigDict,
    loss_config: LossConfig,
    model_config: T5Config,
    mesh: Mesh,
    training: Stream,
    held_out: Stream,
    num_microbatches: int,
    gather: Gather,
    report: Callable[[str, Mapping[str, float]], None],
) -> list[Evaluation]:
    """Return the evaluations of the tasks with text for validation, all next to one baseline."""
    not_text = (PAD_ID, held_out.vocabulary.eos_id, *held_out.sentinel_ids)
    ids = np.arange(model_config.vocab_size)

    @functools.cache
    def training_counts() -> NDArray:
        """Count each token in the first UNIGRAM_TOKENS own targets, or in a shorter first epoch."""
        counts = np.zeros(model_config.vocab_size, np.int64)
        positions_per_batch = training.batch_size * training.data_group.lengths.targets
        num_batches = -(-UNIGRAM_TOKENS // positions_per_batch)
        first_epoch = dataclasses.replace(training, num_epochs=1)  # a mixture has no end
        for batch in itertools.islice(first_epoch, num_batches):
            np.add.at(counts, batch['decoder_target_tokens'], 1)
        return counts

    is_text = (ids < held_out.vocabulary.size) & ~np.isin(ids, not_text)
    compute_sums = make_sums(model_config, mesh, loss_config, not_text, num_microbatches)
    metrics_of = functools.partial(
        summarize, batch_size=held_out.batch_size, data_group=held_out.data_group
    )
    streams = held_out.of_each_task()
    evaluations = []
    for stream in streams:
        name = stream.mixture.name
        evaluation = Evaluation(
            name=f'training_eval/{name}',
            title=f', {name}' if len(streams) > 1 else '',
            every_steps=eval_group.every_steps,
            max_batches=eval_group.steps,
            mesh=mesh,
            held_out=stream,
            is_text=is_text,
            compute_sums=compute_sums,
            training_counts=training_counts,
            gather=gather,
            metrics_of=metrics_of,
            report=report,
        )
        evaluations.append(evaluation)
    return evaluations


def make_sums(
    config: T5Config,
    mesh: Mesh,
    loss_config: LossConfig,
    not_text: tuple[int, ...],
    num_microbatches: int,
) -> Callable[[Mapping, Mapping], dict[str, jax.Array]]:
    """Return a compiled function (params, batch) -> sums of the global batch: loss.all_sums and nats."""
    specs = model.param_specs(config)
    coefficients = config.family.losses(config)
    normalizing_factor = loss.parse_normalizing_factor(loss_config.loss_normalizing_factor)

    def device_sums(params, batch):
        weights_bT, divisor = loss.weights_and_divisor(batch, normalizing_factor)
        num_rows = lax.psum(len(weights_bT), partition.BATCH_AXES)

        def microbatch_sums(microbatch):
            batch, weights_bT = microbatch
            outputs = model.apply(model.logits, params, config, batch)
            sums = loss.all_sums(
                outputs, batch, weights_bT, divisor, loss_config, coefficients, num_rows
            )
            # Nats without z-loss and smoothing.
            targets_bT = batch['decoder_target_tokens']
            nats_bT, _ = loss.cross_entropy(outputs.logits_bTv, targets_bT)
            text_bT = ~jnp.isin(targets_bT, jnp.array(not_text, jnp.int32))
            sums['target_nats'] = (nats_bT * (targets_bT > 0)).sum()
            sums['text_nats'] = (nats_bT * text_bT).sum()
            sums['text_tokens'] = text_bT.sum()
            return sums

        microbatches = partition.cut_rows((batch, weights_bT), num_microbatches)
        sums = lax.map(microbatch_sums, microbatches)
        sums = jax.tree.map(lambda x: x.sum(axis=0), sums)
        return lax.psum(sums, partition.BATCH_AXES)

    sums = jax.shard_map(device_sums, mesh=mesh, in_specs=(specs, partition.BATCH), out_specs=P())
    return jax.jit(sums)


def summarize(
    steps: Sequence[Mapping[str, float]], batch_size: int, data_group: ConfigDict
) -> dict[str, float]:
    """Return T5X's metrics (t5x/models.py) from the sums of some steps.

    'nats_per_token' is the cross entropy without z-loss. Sums that are not T5X's are divided by the weights, like
    'accuracy', and sums of aux by the rows.
    """
    total = {name: sum(float(sums[name]) for sums in steps) for name in steps[0]}
    num_rows = len(steps) * batch_size
    inputs = num_rows * data_group.lengths.inputs  # positions, padding included
    targets = num_rows * data_group.lengths.targets
    weights = max(total['weights'], 1e-9)
    tokens = total['encoder_tokens'] + total['decoder_tokens']
    encoder, decoder = 'encoder', 'decoder'
    if data_group.pack == 'no':
        encoder, decoder = 'encoder_input_tokens', 'decoder_target_tokens'
    metrics = {}
    for name, value in total.items():
        if name.startswith(loss.AUX):
            metrics[name.removeprefix(loss.AUX)] = value / num_rows
        elif name not in (*loss.T5X_SUMS, *OTHERS):
            metrics[name] = value / weights
    metrics |= {
        'nats_per_token': total['nats'] / weights,
        'accuracy': total['correct'] / weights,
        'loss_per_nonpadding_target_token': total['loss'] / weights,
        'non_padding_fraction/loss_weights': total['weights'] / targets,
        f'non_padding_fraction/{encoder}': total['encoder_tokens'] / inputs,
        f'non_padding_fraction/{decoder}': total['decoder_tokens'] / targets,
        'non_padding_fraction/overall': tokens / (inputs + targets),
        f'effective_batch_size/{encoder}': total['encoder_examples'] / len(steps),
        f'effective_batch_size/{decoder}': total['decoder_examples'] / len(steps),
    }
    total['cross_ent_loss'] = total['loss'] - total['z_loss'] - total.get('aux_loss', 0.0)
    for name in ('loss', 'z_loss', 'cross_ent_loss'):
        metrics[name] = total[name] / len(steps)
        metrics[f'{name}_per_all_target_tokens'] = total[name] / targets
    if 'text_nats' in total:
        metrics['nats_per_text_token'] = total['text_nats'] / max(total['text_tokens'], 1)
        metrics['nats_per_target_token'] = total['target_nats'] / total['decoder_tokens']
    return metrics


def sum_names(loss_config: LossConfig, batch: Mapping[str, NDArray]) -> list[str]:
    """Return the names of weighted_sums of a loss, by tracing it for a `batch`: a file or a fork may add some."""

    def sums(logits_bTv):
        ones_bM = jnp.ones_like(batch['encoder_input_tokens'])
        ones_bT = jnp.ones(logits_bTv.shape[:2])
        outputs = loss.Outputs(logits_bTv, jnp.ones((*ones_bM.shape, 8)), ones_bM, aux={})
        return loss.all_sums(outputs, batch, ones_bT, jnp.float32(1), loss_config, {}, num_rows=1)

    logits_bTv = jnp.zeros((*batch['decoder_target_tokens'].shape, 128))
    return list(jax.eval_shape(partition.one_device(sums, P(None, None, 'model')), logits_bTv))
