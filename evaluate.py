"""Checkpoints as models: load one, ask it for logits; run a model over an evaluation set.

Source: T5X t5x/models.py, t5x/trainer.py (train-eval).
"""

import copy
import functools
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import checkpoint
import data
import loss
import model
import partition

SEQUENCES = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
FEATURES = (*SEQUENCES, 'encoder_segment_ids', 'decoder_segment_ids')  # what the model reads


class T5:
    """A checkpoint that runs: `.config`, `.params` (T5X's tree), `.logits(batch)`."""

    def __init__(self, config: model.T5Config, arrays: Mapping[str, Any], mesh: Mesh):
        self.config, self.mesh, self.arrays = config, mesh, arrays
        self.params = checkpoint.unflatten(arrays)
        specs = partition.param_specs(model.PARAMETER_SPECS, arrays)

        def device_logits(params, batch):
            return model.apply(lambda: model.logits(config, batch), params)

        in_specs, out_specs = (specs, partition.BATCH), P('data', None, 'model')
        sharded = jax.shard_map(device_logits, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        self._logits = jax.jit(sharded)

    def logits(self, batch: Mapping[str, Any]) -> jax.Array:
        """Teacher-forced logits, float32 [batch, target length, vocab], of T5X's features (int32
        [batch, length] each; packed when there are segment ids). The batch must divide by 'data'."""
        if missing := [name for name in SEQUENCES if name not in batch]:
            raise ValueError(f'the batch has {sorted(batch)}: it needs {", ".join(missing)}')
        features = {name: jnp.asarray(batch[name], jnp.int32) for name in FEATURES if name in batch}
        for name, x in features.items():
            partition.check_divides(f'{name}: batch size', x.shape[0], 'data', self.mesh)
        return self._logits(self.arrays, features)


def load(path: str | Path, config: model.T5Config | None = None, mesh: Mesh | None = None) -> T5:
    """Opens a workdir (its newest checkpoint) or a T5X checkpoint directory, parameters only. Sizes come
    from `config`, else from the checkpoint's config.json, else from its shapes. On one device if no mesh."""
    step = checkpoint.newest(Path(path))
    directory = Path(path) if step is None else Path(path, f'checkpoint_{step}')
    checkpoint.verify(directory)
    index = checkpoint.read_index(directory)
    found = {p: leaf for p, leaf in checkpoint.shapes(index).items() if p.startswith('target/')}
    if config is None and (directory / 'config.json').is_file():
        config = model.T5Config(**json.loads((directory / 'config.json').read_text())['model'])
    config = config or config_from_shapes({p.removeprefix('target/'): x for p, x in found.items()})
    mesh = mesh or partition.make_mesh(1, 1, jax.devices()[:1])
    model.check_mesh(config, mesh)
    expected = model.shapes(config)
    checkpoint.compare({f'target/{p}': shape for p, shape in expected.items()}, found)
    specs = partition.param_specs(model.PARAMETER_SPECS, expected)
    placed = {f'target/{p}': x for p, x in partition.shardings(mesh, specs).items()}
    arrays = checkpoint.restore(directory, placed.__contains__, placed)
    return T5(config, {p: arrays[f'target/{p}'] for p in expected}, mesh)


def config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> model.T5Config:
    """T5Config of a parameter tree; what shapes cannot tell (gelu or silu, dtype) is T5 1.1's."""
    layers = [name.split('/')[0] for name in shapes if name.endswith('/mlp/wo/kernel')]
    try:
        vocab_size, emb_dim = shapes['token_embedder/embedding']
        num_heads, _ = shapes['encoder/relpos_bias/rel_embedding']
        mlp_dim, _ = shapes['encoder/layers_0/mlp/wo/kernel']
        joined, _ = shapes['encoder/layers_0/attention/out/kernel']
    except KeyError as missing:
        raise ValueError(f'not a T5 of T5X: the checkpoint has no parameter {missing}') from None
    activations = ('gelu', 'linear') if 'encoder/layers_0/mlp/wi_0/kernel' in shapes else ('relu',)
    depths = (layers.count('encoder'), layers.count('decoder'))
    sizes = (emb_dim, num_heads, *depths, joined // num_heads, mlp_dim)
    tied = 'decoder/logits_dense/kernel' not in shapes
    return model.T5Config(
        vocab_size, 'float32', *sizes, mlp_activations=activations, logits_via_embedding=tied
    )


class Evaluation:
    """A model's losses on the validation split, on the same batches every time, and the bar to clear.
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
        self.first_sentinel = validation.first_sentinel
        c, factor = model.T5Config(**config.model), config.loss.loss_normalizing_factor
        normalizing_factor = loss.parse_normalizing_factor(factor)
        specs = partition.param_specs(model.PARAMETER_SPECS, model.shapes(c))

        def device_sums(params, batch):
            """loss.weighted_sums, and nats (no z-loss, no smoothing) of all targets and of those that
            are text: no sentinel, EOS or padding; each summed over the global batch."""
            weights_bT, divisor = loss.weights_and_divisor(batch, normalizing_factor)

            def part_sums(part):
                batch, weights_bT = part
                logits_bTv = model.apply(lambda: model.logits(c, batch), params)
                sums = loss.weighted_sums(logits_bTv, batch, weights_bT, divisor, config.loss)
                targets_bT = batch['decoder_target_tokens']
                nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
                text_bT = (targets_bT > data.EOS_ID) & (targets_bT < self.first_sentinel)
                sums['target_nats'] = (nats_bT * (targets_bT > 0)).sum()
                sums['text_nats'], sums['text_tokens'] = (nats_bT * text_bT).sum(), text_bT.sum()
                return sums

            sums = lax.map(part_sums, partition.cut_rows((batch, weights_bT), num_microbatches))
            return lax.psum(jax.tree.map(lambda x: x.sum(axis=0), sums), 'data')

        in_specs = (specs, partition.BATCH)
        self.sums = jax.jit(jax.shard_map(device_sums, mesh=mesh, in_specs=in_specs, out_specs=P()))

    def __call__(self, params: Mapping[str, jax.Array]) -> dict[str, float]:
        """T5X's metrics, and nats per token of text and of all targets beside their unigram bars."""
        steps = [self.sums(params, partition.place_rows(self.mesh, b)) for b in self.batches]
        steps = jax.device_get(steps)
        total = {name: sum(float(sums[name]) for sums in steps) for name in steps[0]}
        return summarize(steps, self.config) | {
            'nats_per_text_token': total['text_nats'] / total['text_tokens'],
            'nats_per_target_token': total['target_nats'] / total['decoder_tokens'],
            **self.unigram_bars,
        }

    @functools.cached_property
    def batches(self) -> list[dict[str, np.ndarray]]:
        """This process's rows. Made when first asked for: a small split of a large corpus takes a while."""
        batches = list(itertools.islice(self.validation, self.config.eval.steps))
        del self.validation  # and with it the documents that its lanes hold
        # Lanes end apart, but all processes must take the same number of steps.
        most = int(partition.from_processes(np.array([len(batches)])).max())
        empty = {name: np.zeros_like(x) for name, x in batches[0].items()}
        return batches + [empty] * (most - len(batches))

    @functools.cached_property
    def unigram_bars(self) -> dict[str, float]:
        """What token frequencies alone would pay: the cross entropy of the validation targets under the
        unigram of the training targets, those of the run's first batches up to a million tokens, each
        counted once more than it occurred."""
        counts = np.zeros([2, self.config.model.vocab_size], np.int64)  # of training, of validation
        training = copy.copy(self.training)
        training.seek(np.zeros_like(training.position))
        for batch in itertools.islice(training, self.config.train.steps):
            np.add.at(counts[0], batch['decoder_target_tokens'], 1)
            if counts[0, 1:].sum() >= 1e6:
                break
        for batch in self.batches:
            np.add.at(counts[1], batch['decoder_target_tokens'], 1)
        counts = partition.from_processes(counts).sum(axis=0)

        def bar(first: int, stop: int | None) -> float:
            q, p = counts[0, first:stop] + 1, counts[1, first:stop]
            return float(-(p * np.log(q / q.sum())).sum() / p.sum())

        return {
            'unigram_nats_per_text_token': bar(data.EOS_ID + 1, self.first_sentinel),
            'unigram_nats_per_target_token': bar(data.EOS_ID, None),
        }


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
