"""The train step.

`jax.shard_map` hands each device its rows of the batch and its slices of the parameters; the model and the loss are
local math with collectives; `jax.grad` gives each device's own gradients, and one line sums them over the rows of all
devices; outside, optax updates global arrays. loop.py calls the step. Source: T5X t5x/trainer.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ml_collections import FrozenConfigDict
from numpy.typing import NDArray

import checkpoint
import kernels
import loss
import model
import optimizer
import partition
import state_names
from loss import LossConfig
from model import T5Config

Leaf = TypeVar('Leaf')


class TrainState(NamedTuple, Generic[Leaf]):
    """A training state; leaves are arrays, shapes or specs."""

    step: Leaf  # int32: steps taken
    params: dict[str, Leaf]  # {T5X's path: float32, or StepSpec.frozen_dtype if frozen}
    opt_state: optax.OptState
    # The losses and gradient norms of the last updates, float32 [2, spike_window], newest last, inf before the
    # first. A checkpoint has them in a side file, outside T5X's tree.
    recent: Leaf | None = None


def train_step(
    spec: 'StepSpec', state: TrainState[jax.Array], batch: Mapping[str, jax.Array]
) -> tuple[TrainState[jax.Array], dict[str, jax.Array]]:
    """Take one step: return the next state and float32 metrics. Rows of `batch` are split over BATCH_AXES."""
    rows = jnp.arange(len(batch['decoder_target_tokens']))
    _, dropout_key = jax.random.split(jax.random.key(spec.seed))
    key = jax.random.fold_in(dropout_key, state.step)
    grads, metrics = gradients(spec, state.params, batch, rows, key)
    trained = spec.trained_of(state.params)
    updates, opt_state = spec.tx.update(grads, state.opt_state, trained, step=state.step)
    params = state.params | optax.apply_updates(trained, updates)
    metrics['learning_rate'] = spec.schedule(state.step)
    metrics['gradient_norm'] = optimizer.norm(grads)
    totals = [metrics['loss'], metrics['gradient_norm'], optimizer.norm(updates)]
    totals += map(kernels.sum, jax.tree.leaves(opt_state))
    metrics['finite'] = jnp.isfinite(sum(totals))
    makes_update = metrics['finite']
    recent = state.recent
    if recent is not None:
        latest = jnp.stack([metrics['loss'], metrics['gradient_norm']])
        metrics['spike'] = is_spike(recent, latest, spec.spike_sigma)
        makes_update &= ~metrics['spike']
        recent = jnp.concatenate([recent[:, 1:], latest[:, None]], axis=1)
    new = TrainState(state.step + 1, params, opt_state, recent)
    if spec.skips_not_finite or recent is not None:
        old = state._replace(step=new.step)
        new = jax.tree.map(functools.partial(jnp.where, makes_update), new, old)
    return new, metrics


def is_spike(recent: jax.Array, latest: jax.Array, sigma: float) -> jax.Array:
    """Return whether a value of `latest` lies `sigma` standard deviations above the mean of its row of `recent`.

    False until half of `recent` is filled. Source: OLMo-core's SkipStepOptimizer.
    """
    is_filled = jnp.isfinite(recent)
    deviation = recent.std(axis=1, where=is_filled, ddof=1)
    limits = recent.mean(axis=1, where=is_filled) + sigma * deviation
    return (is_filled[0].sum() >= recent.shape[1] // 2) & (latest > limits).any()


def gradients(
    spec: 'StepSpec', params: Mapping, batch: Mapping, rows: jax.Array, key: jax.Array
) -> tuple[dict, dict]:
    """Return the gradients of the trained parameters, and loss.all_sums of the batch."""
    specs = spec.state_specs.params
    sharded_gradients = jax.shard_map(
        functools.partial(device_gradients, spec),
        mesh=spec.mesh,
        in_specs=(specs, partition.BATCH, partition.BATCH, P()),
        out_specs=(spec.trained_of(specs), P()),
    )
    return sharded_gradients(params, batch, rows, key)


def device_gradients(spec, params, batch, rows_b, key):
    """Return one device's part of `gradients`, from its rows and its slices of the parameters.

    Differs from T5X, which divides each microbatch by its own weights and repeats the same dropout: here the
    gradients do not depend on the microbatches.
    """
    config = spec.model_config
    weights_bT, divisor = loss.weights_and_divisor(batch, spec.normalizing_factor)
    num_rows = lax.psum(len(rows_b), partition.BATCH_AXES)
    trained_specs = spec.trained_of(spec.state_specs.params)
    trained = partition.per_device(spec.trained_of(params), trained_specs)

    def microbatch_loss(trained, microbatch):
        batch, weights_bT, rows_b = microbatch
        outputs = model.apply(
            model.logits,
            params | trained,
            config,
            batch,
            rows_b,
            key=key,
            gradient_dtype=spec.gradient_dtype,
        )
        coefficients = config.family.losses(config)
        sums = loss.all_sums(
            outputs, batch, weights_bT, divisor, spec.loss_config, coefficients, num_rows
        )
        return sums['loss'], sums

    def add_gradients(total, microbatch):
        grads, sums = jax.grad(microbatch_loss, has_aux=True)(trained, microbatch)
        return jax.tree.map(jnp.add, total, grads), sums

    zeros = jax.tree.map(jnp.zeros_like, trained)
    microbatches = partition.cut_rows((batch, weights_bT, rows_b), spec.num_microbatches)
    grads, sums = lax.scan(add_gradients, zeros, microbatches)
    sums = jax.tree.map(lambda x: x.sum(axis=0), sums)
    grads = partition.sum_gradients(grads, trained_specs)
    return grads, lax.psum(sums, partition.BATCH_AXES)


def init(spec: 'StepSpec') -> TrainState[jax.Array]:
    """Return the state before the first step."""
    init_key, _ = jax.random.split(jax.random.key(spec.seed))
    params = model.init(spec.model_config, init_key)
    recent = jax.tree.map(lambda x: jnp.full(x.shape, jnp.inf), spec.state_shapes.recent)
    opt_state = spec.tx.init(spec.trained_of(params))
    params = jax.tree.map(lambda x, like: x.astype(like.dtype), params, spec.state_shapes.params)
    return TrainState(jnp.int32(0), params, opt_state, recent)


@dataclasses.dataclass(frozen=True, repr=False)  # no repr: JAX would begin its messages with it
class StepSpec:
    """Everything that a compiled step depends on; prepare.make_spec makes it from a config."""

    model_config: T5Config
    loss_config: LossConfig
    optimizer_config: FrozenConfigDict
    learning_rate_config: FrozenConfigDict
    mesh: Mesh
    seed: int
    batch_size: int
    features: FrozenConfigDict  # {feature of a batch: (length, dtype)}
    num_microbatches: int
    gradient_dtype: str
    skips_not_finite: bool  # a step that is not finite leaves the state unchanged
    spike_window: int  # a spike does too; 0: no guard
    spike_sigma: float
    frozen_dtype: str  # dtype of frozen parameters; trained ones are float32

    @property
    def rows_per_device(self) -> int:
        return self.batch_size // partition.axes_size(self.mesh, partition.BATCH_AXES)

    @functools.cached_property
    def normalizing_factor(self) -> float | str:
        return loss.parse_normalizing_factor(self.loss_config.loss_normalizing_factor)

    @functools.cached_property
    def schedule(self) -> Callable[[jax.Array], jax.Array]:
        return optimizer.make_schedule(self.learning_rate_config)

    @functools.cached_property
    def tx(self) -> optax.GradientTransformation:
        return optimizer.make_optimizer(self.optimizer_config, self.schedule)

    @functools.cached_property
    def trained(self) -> tuple[str, ...]:
        pattern = self.optimizer_config.trainable
        if pattern:
            return optimizer.trained_paths(pattern, model.shapes(self.model_config))
        return model.adapter_paths(self.model_config) or tuple(model.shapes(self.model_config))

    def trained_of(self, tree: Mapping[str, Leaf]) -> dict[str, Leaf]:
        """Return the leaves of the trained parameters in `tree`, {path: leaf}."""
        return {path: tree[path] for path in self.trained}

    @functools.cached_property
    def state_shapes(self) -> TrainState[jax.ShapeDtypeStruct]:
        step = jax.ShapeDtypeStruct((), jnp.int32)
        params = {}
        for path, shape in model.shapes(self.model_config).items():
            dtype = 'float32' if path in self.trained else self.frozen_dtype
            params[path] = jax.ShapeDtypeStruct(shape, dtype)
        opt_state = jax.eval_shape(self.tx.init, self.trained_of(params))
        recent = None
        if self.spike_window:
            recent = jax.ShapeDtypeStruct((2, self.spike_window), jnp.float32)
        return TrainState(step, params, opt_state, recent)

    @functools.cached_property
    def state_specs(self) -> TrainState[P]:
        _, params, opt_state, recent = self.state_shapes
        param_specs = model.param_specs(self.model_config)
        opt_specs = state_names.state_specs(opt_state, params, param_specs)
        return TrainState(P(), param_specs, opt_specs, jax.tree.map(lambda _: P(), recent))


def compile_init(spec: StepSpec) -> jax.stages.Compiled:
    """Return `init`, compiled ahead of time."""
    shardings = partition.shardings(spec.mesh, spec.state_specs)
    return jax.jit(functools.partial(init, spec), out_shardings=shardings).lower().compile()


def jit_step(spec: StepSpec) -> jax.stages.Wrapped:
    """Return `train_step` as a compiled function (state, batch) -> (state, metrics) that donates `state`."""
    shardings = partition.shardings(spec.mesh, (spec.state_specs, P()))

    def train_step_on_mesh(state, batch):
        # Tells kernels.py how many devices share the arrays of the optimizer.
        with jax.sharding.use_abstract_mesh(spec.mesh.abstract_mesh):
            return train_step(spec, state, batch)

    return jax.jit(train_step_on_mesh, out_shardings=shardings, donate_argnums=0)


def lower_step(spec: StepSpec) -> jax.stages.Lowered:
    """Return `jit_step`, lowered for the shapes of a state and a batch."""
    shardings, rows = partition.shardings(spec.mesh, (spec.state_specs, partition.BATCH))
    state = jax.tree.map(lambda x, to: x.update(sharding=to), spec.state_shapes, shardings)
    batch = {}
    for name, (length, dtype) in spec.features.items():
        batch[name] = jax.ShapeDtypeStruct((spec.batch_size, length), dtype, sharding=rows)
    return jit_step(spec).lower(state, batch)


def compile_step(spec: StepSpec) -> jax.stages.Compiled:
    """Return `jit_step`, compiled ahead of time."""
    return lower_step(spec).compile(kernels.compiler_options(spec.mesh, spec.model_config.dtype))


def saved_tree(spec: StepSpec, state: TrainState[Leaf]) -> dict[str, Leaf | NDArray]:
    """Return a state as a checkpoint stores it: with adapters, without the frozen parameters of the base."""
    tree = state_names.to_t5x(*state)
    adapters = model.adapter_paths(spec.model_config)
    if adapters:
        for path in state.params.keys() - {*adapters, *spec.trained}:
            del tree[f'{checkpoint.PARAMETER_PREFIX}{path}']
    return tree
