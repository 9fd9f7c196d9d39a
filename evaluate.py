"""Checkpoints as models: load one, ask it for logits; run a model over an evaluation set.

Source: T5X t5x/models.py, t5x/trainer.py (train-eval).
"""

import functools
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoint
import data
import loss
import model
import partition

FEATURES = (
    'encoder_input_tokens',
    'decoder_input_tokens',
    'decoder_target_tokens',
    'encoder_segment_ids',
    'decoder_segment_ids',
)


class T5:
    """A checkpoint with its sizes: `.config`, `.params`, `.logits(batch)`."""

    def __init__(self, config: model.T5Config, params: Mapping[str, jax.Array], mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.flat_params = dict(params)

    @property
    def params(self) -> dict:
        """T5X's tree: {'encoder': {'layers_0': {'attention': {'query': {'kernel': ...}}}}}."""
        return checkpoint.unflatten(self.flat_params)

    def logits(self, batch: Mapping[str, Any]) -> jax.Array:
        """Teacher-forced logits, float32 [batch, target length, vocab], of T5X's features (int32
        [batch, length] each; packed when there are segment ids). The batch must divide by 'data'."""
        missing = [name for name in FEATURES[:3] if name not in batch]
        if missing:
            raise ValueError(f'batch has {sorted(batch)}: it needs {", ".join(missing)}')
        arrays = {name: jnp.asarray(batch[name], jnp.int32) for name in FEATURES if name in batch}
        for name, x in arrays.items():
            partition.check_divides(f'{name}: batch size', x.shape[0], 'data', self.mesh)
        return self._logits(self.flat_params, arrays)

    @functools.cached_property
    def _logits(self):
        specs = partition.param_specs(model.PARAMETER_SPECS, list(self.flat_params))

        def device_logits(params, batch):
            return model.apply(lambda: model.logits(self.config, batch), params)

        return jax.jit(
            jax.shard_map(
                device_logits,
                mesh=self.mesh,
                in_specs=(specs, P('data')),
                out_specs=P('data', None, 'model'),
            )
        )


def load(path: str | Path, config: model.T5Config | None = None, mesh: Mesh | None = None) -> T5:
    """Opens a workdir (its newest checkpoint) or a T5X checkpoint directory, parameters only.

    Sizes come from `config`, else from the workdir's config.json, else from the shapes of the arrays.
    On one device unless a mesh is given.
    """
    path = directory = Path(path)
    if not (path / 'checkpoint').is_file():
        step = checkpoint.newest(path)
        if step is None:
            raise ValueError(f'{path}: neither a checkpoint_STEP folder nor a workdir that has one')
        directory = path / f'checkpoint_{step}'
    found = {
        name.removeprefix('target/'): shape
        for name, shape in checkpoint.shapes(checkpoint.read_index(directory)).items()
        if name.startswith('target/')
    }
    beside = directory / 'config.json'
    if config is None and beside.is_file():
        config = model.T5Config(**json.loads(beside.read_text())['model'])
    config = config or config_from_shapes(found)
    mesh = mesh or partition.make_mesh(1, 1, jax.devices()[:1])
    model.check_mesh(config, mesh)
    checkpoint.compare(model.shapes(config), found)
    specs = partition.param_specs(model.PARAMETER_SPECS, list(found))
    placed = {f'target/{name}': NamedSharding(mesh, spec) for name, spec in specs.items()}
    arrays = checkpoint.restore(directory, placed.__contains__, placed)
    return T5(config, {name.removeprefix('target/'): x for name, x in arrays.items()}, mesh)


def config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> model.T5Config:
    """T5Config of a parameter tree; what shapes cannot tell (gelu or silu, dtype) is T5 1.1's."""

    def num_layers(stack: str) -> int:
        return len(
            [name for name in shapes if name.startswith(stack) and name.endswith('wo/kernel')]
        )

    try:
        vocab_size, emb_dim = shapes['token_embedder/embedding']
        num_heads, _ = shapes['encoder/relpos_bias/rel_embedding']
        mlp_dim, _ = shapes['encoder/layers_0/mlp/wo/kernel']
        joined, _ = shapes['encoder/layers_0/attention/out/kernel']
    except KeyError as missing:
        raise ValueError(f'not a T5 of T5X: the checkpoint has no parameter {missing}') from None
    gated = 'encoder/layers_0/mlp/wi_0/kernel' in shapes
    return model.T5Config(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=num_heads,
        num_encoder_layers=num_layers('encoder/'),
        num_decoder_layers=num_layers('decoder/'),
        head_dim=joined // num_heads,
        mlp_dim=mlp_dim,
        mlp_activations=('gelu', 'linear') if gated else ('relu',),
        logits_via_embedding='decoder/logits_dense/kernel' not in shapes,
    )


class Evaluation:
    """A model's losses on the validation split, on the same batches every time, and the bar to clear.

    Differs from T5X: the first `eval.steps` batches of one pass; T5X repeats a small split.
    """

    def __init__(self, config: Any, mesh: Mesh, source: Any, vocabulary: Any):
        self.config, self.mesh = config, mesh
        rows = partition.own_rows(mesh, config.train.batch_size)
        train, validation = (
            data.Stream(
                *(source, split, vocabulary, config.data, config.train.batch_size, config.seed),
                *(rows, num_epochs),
            )
            for split, num_epochs in (('train', None), ('validation', 1))
        )
        self.train, self.first_sentinel = train, validation.first_sentinel
        self.batches = list(itertools.islice(validation, config.eval.steps))

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
    def sums(self) -> Callable:
        """(params, batch) -> loss.weighted_sums, and nats (no z-loss, no smoothing) of all targets and
        of those that are text: no sentinel, EOS or padding; each summed over the global batch."""
        config = model.T5Config(**self.config.model)
        normalizing_factor = loss.parse_normalizing_factor(self.config.loss.loss_normalizing_factor)
        specs = partition.param_specs(model.PARAMETER_SPECS, list(model.shapes(config)))

        def device_sums(params, batch):
            logits_bTv = model.apply(lambda: model.logits(config, batch), params)
            weights = loss.weights_and_divisor(batch, normalizing_factor)
            sums = loss.weighted_sums(logits_bTv, batch, *weights, self.config.loss)
            targets_bT = batch['decoder_target_tokens']
            nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
            text_bT = (targets_bT > data.EOS_ID) & (targets_bT < self.first_sentinel)
            sums['target_nats'] = (nats_bT * (targets_bT > 0)).sum()
            sums['text_nats'], sums['text_tokens'] = (nats_bT * text_bT).sum(), text_bT.sum()
            return lax.psum(sums, 'data')

        in_specs = (specs, P('data'))
        return jax.jit(jax.shard_map(device_sums, mesh=self.mesh, in_specs=in_specs, out_specs=P()))

    @functools.cached_property
    def unigram_bars(self) -> dict[str, float]:
        """What token frequencies alone would pay: the cross entropy of the validation targets under the
        unigram of the training targets, those of the run's first batches up to a million tokens."""
        counts = np.zeros([2, self.config.model.vocab_size], np.int64)  # of training, of validation
        for batch in itertools.islice(self.train, self.config.train.steps):
            np.add.at(counts[0], batch['decoder_target_tokens'], 1)
            if counts[0, 1:].sum() >= 1e6:
                break
        for batch in self.batches:
            np.add.at(counts[1], batch['decoder_target_tokens'], 1)
        text = slice(data.EOS_ID + 1, self.first_sentinel)
        return {
            'unigram_nats_per_text_token': unigram_cross_entropy(*counts[:, text]),
            'unigram_nats_per_target_token': unigram_cross_entropy(*counts[:, data.EOS_ID :]),
        }


def unigram_cross_entropy(train_counts: np.ndarray, eval_counts: np.ndarray) -> float:
    """Nats per token; both are counts by id, those of training smoothed by adding one."""
    log_q = np.log((train_counts + 1) / (train_counts + 1).sum())
    return float(-(eval_counts * log_q).sum() / eval_counts.sum())


def summarize(steps: list[Mapping[str, Any]], config: Any) -> dict[str, float]:
    """T5X's metrics (t5x/models.py) of several steps, and 'nats_per_token': the cross entropy without
    z-loss, whatever the normalization."""
    sums = {name: sum(float(s[name]) for s in steps) for name in steps[0]}
    rows, lengths = len(steps) * config.train.batch_size, config.data.lengths
    inputs, targets = rows * lengths.inputs, rows * lengths.targets  # positions, padding included
    weights, cross_entropy = max(sums['weights'], 1e-9), sums['loss'] - sums['z_loss']
    return {
        'nats_per_token': sums['nats'] / weights,
        'accuracy': sums['correct'] / weights,
        'loss': sums['loss'] / len(steps),
        'loss_per_nonpadding_target_token': sums['loss'] / weights,
        'loss_per_all_target_tokens': sums['loss'] / targets,
        'z_loss': sums['z_loss'] / len(steps),
        'z_loss_per_all_target_tokens': sums['z_loss'] / targets,
        'cross_ent_loss': cross_entropy / len(steps),
        'cross_ent_loss_per_all_target_tokens': cross_entropy / targets,
        'non_padding_fraction/loss_weights': sums['weights'] / targets,
        'non_padding_fraction/encoder_input_tokens': sums['encoder_tokens'] / inputs,
        'non_padding_fraction/decoder_target_tokens': sums['decoder_tokens'] / targets,
        'non_padding_fraction/overall': (sums['encoder_tokens'] + sums['decoder_tokens'])
        / (inputs + targets),
    }
