"""The training run: state, step, loop; what is logged, evaluated and saved, and when.

One step: `jax.shard_map` hands each device its rows and its slices of the parameters; inside, the model
and the loss are local math with collectives; `jax.grad` gives each device's own gradients; one line sums
them over 'data'; outside, optax updates global arrays. Source: T5X t5x/train.py, t5x/trainer.py.
"""

import io
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import checkpoint
import data
import evaluate
import loss
import model
import optimizer
import partition

# What a continued run may set anew; all else decides the numbers, and the error lists the differences.
MAY_CHANGE = ('train.steps', 'mesh.', 'log.', 'save.', 'eval.')


class TrainState(NamedTuple):
    step: jax.Array  # int32, the number of steps taken
    params: dict[str, jax.Array]  # {T5X's path: float32}
    opt_state: Any


class Trainer(NamedTuple):
    """The traced parts of a run, made from its config alone."""

    mesh: Mesh
    specs: TrainState  # of PartitionSpecs
    init: Callable  # () -> TrainState
    gradients: Callable  # (params, batch, rows, key) -> (gradients, sums of loss.weighted_sums)
    train_step: Callable  # (state, batch) -> (state, metrics of this step)


def make_trainer(config: Any) -> Trainer:
    """Raises ValueError, in words, for whatever in `config` cannot be. Nothing is compiled yet."""
    c = model.T5Config(**config.model)
    mesh = partition.make_mesh(**config.mesh)
    model.check_mesh(c, mesh)
    partition.check_divides('train.batch_size', config.train.batch_size, 'data', mesh)
    loss.parse_normalizing_factor(config.loss.loss_normalizing_factor)
    schedule = optimizer.make_schedule(config.learning_rate)
    tx = optimizer.make_optimizer(config.optimizer, schedule)
    init_key, dropout_key = jax.random.split(jax.random.key(config.seed))

    def init() -> TrainState:
        params = model.init(c, init_key)
        return TrainState(jnp.int32(0), params, tx.init(params))

    shapes = jax.eval_shape(init)
    param_specs = partition.param_specs(model.PARAMETER_SPECS, list(shapes.params))
    opt_specs = optimizer.state_specs(shapes.opt_state, shapes.params, param_specs)
    specs = TrainState(P(), param_specs, opt_specs)

    def device_gradients(params, batch, rows_b, key):
        weights_bT, divisor = loss.weights_and_divisor(batch, config.loss.loss_normalizing_factor)

        def device_loss(params):
            logits_bTv = model.apply(lambda: model.logits(c, batch, rows_b), params, key)
            sums = loss.weighted_sums(logits_bTv, batch, weights_bT, divisor, config.loss)
            return sums['loss'], sums

        own_params = partition.per_device(params, param_specs)
        grads, sums = jax.grad(device_loss, has_aux=True)(own_params)
        return partition.sum_gradients(grads, param_specs), lax.psum(sums, 'data')

    gradients = jax.shard_map(
        device_gradients,
        mesh=mesh,
        in_specs=(param_specs, P('data'), P('data'), P()),
        out_specs=(param_specs, P()),
    )

    def train_step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        rows = jnp.arange(len(batch['decoder_target_tokens']))
        key = jax.random.fold_in(dropout_key, state.step)
        grads, metrics = gradients(state.params, batch, rows, key)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics['learning_rate'] = schedule(state.step)
        metrics['gradient_norm'] = optax.tree.norm(grads)
        metrics['finite'] = jnp.isfinite(metrics['loss'] + optax.tree.norm(updates))
        for name in ('encoder_input_tokens', 'decoder_target_tokens'):
            metrics[f'num_{name}'] = jnp.sum(batch[name] > 0)
        return TrainState(state.step + 1, params, opt_state), metrics

    placed = partition.shardings(mesh, specs)
    return Trainer(
        mesh=mesh,
        specs=specs,
        init=jax.jit(init, out_shardings=placed),
        gradients=gradients,
        train_step=jax.jit(
            train_step, out_shardings=(placed, NamedSharding(mesh, P())), donate_argnums=0
        ),
    )


def to_t5x(state: TrainState) -> dict[str, jax.Array]:
    """The state under the paths of a T5X checkpoint."""
    slots = optimizer.to_t5x(state.opt_state, state.params)
    return (
        {f'target/{path}': x for path, x in state.params.items()}
        | {f'state/param_states/{path}': x for path, x in slots.items()}
        | {'state/step': state.step}
    )


def from_t5x(trainer: Trainer, arrays: dict[str, Any]) -> TrainState:
    """Undoes to_t5x; the arrays are copied to where the trainer wants them."""

    def below(prefix: str) -> dict[str, Any]:
        return {p.removeprefix(prefix): x for p, x in arrays.items() if p.startswith(prefix)}

    step = np.asarray(
        arrays['state/step'], np.int32
    )  # each count gets its own copy: they are donated
    opt_state = jax.eval_shape(trainer.init).opt_state
    opt_state = optimizer.from_t5x(opt_state, below('state/param_states/'), step)
    state = TrainState(step, below('target/'), opt_state)
    return jax.device_put(state, partition.shardings(trainer.mesh, trainer.specs))
