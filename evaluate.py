"""Checkpoints as models: load one, ask it for logits; run a model over an evaluation set.

Source: T5X t5x/models.py, t5x/trainer.py (train-eval).
"""

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
