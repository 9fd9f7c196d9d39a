"""Optimizers, and T5X's learning-rate schedules.

They run outside `shard_map`, on global arrays: means are over full parameters. Source: T5X t5x/adafactor.py, utils.py;
Shazeer & Stern 2018 (Adafactor); Loshchilov & Hutter 2019 (AdamW); Jordan 2024 (Muon); Polyak & Juditsky 1992 (averages).
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

import kernels
import partition
from messages import Refused


def make_optimizer(optimizer: ConfigDict, schedule: Callable) -> optax.GradientTransformation:
    """Return the optimizer `optimizer.name`, after a clip of the global norm and before a moving average, if set.

    Its `update` also takes the training step, `step`.
    """
    if optimizer.name not in OPTIMIZERS:
        raise Refused(f'optimizer.name={optimizer.name!r}: must be one of {", ".join(OPTIMIZERS)}')
    chain = [OPTIMIZERS[optimizer.name](optimizer, schedule)]
    if optimizer.global_norm_clip_threshold:
        chain.insert(0, clip_by_norm(optimizer.global_norm_clip_threshold))
    if optimizer.ema_decay:
        chain.append(average_parameters(optimizer.ema_decay))
    return optax.chain(*chain)


class Moments(NamedTuple):
    """Adafactor's moving averages for one parameter, float32; None for unused ones."""

    v_row: jax.Array | None = None  # squared gradients, their mean over the largest dimension
    v_col: jax.Array | None = None  # the same over the second largest dimension
    v: jax.Array | None = None  # squared gradients
    m: jax.Array | None = None  # updates


def adafactor(optimizer: ConfigDict, schedule: Callable) -> optax.GradientTransformation:
    """Return T5X's Adafactor; its state is {path: Moments}. A hyper-parameter of 0 turns its part off.

    Each parameter is updated separately, so JAX traces one update per shape; kernels of experts, [experts, rows,
    columns], matrix by matrix, after their gradients are multiplied by the number of experts (T5X t5x/contrib/moe).
    """
    update_one = jax.jit(partial(update_parameter, optimizer))

    def init(params):
        moments = {}
        for path, param in params.items():
            if is_of_experts(path):
                moments[path] = jax.vmap(partial(init_moments, optimizer, min_dim_size=1))(param)
            else:
                moments[path] = init_moments(optimizer, param)
        return moments

    def update(grads, state, params, *, step, **_):
        decay = 1.0 - (step - optimizer.step_offset + 1.0) ** -optimizer.decay_rate
        rate = schedule(step)
        updates = {}
        moments = {}
        for path, grad in grads.items():
            f = update_one
            if is_of_experts(path):
                grad = grad * len(grad)
                f = jax.vmap(update_one, (None, None, 0, 0, 0))
            updates[path], moments[path] = f(decay, rate, grad, state[path], params[path])
        return updates, moments

    return optax.GradientTransformationExtraArgs(init, update)


def is_of_experts(path: str) -> bool:
    """Return whether a parameter has a matrix for each expert."""
    return 'expert' in path.split('/')


def init_moments(optimizer: ConfigDict, param: jax.Array, min_dim_size: int = 128) -> Moments:
    """Return zeros: `v_row` and `v_col` if two dimensions have `min_dim_size` or more, else `v`."""
    m = jnp.zeros(param.shape) if optimizer.beta1 else None
    if not optimizer.factored or param.ndim < 2 or sorted(param.shape)[-2] < min_dim_size:
        return Moments(v=jnp.zeros(param.shape), m=m)
    second, largest = np.argsort(param.shape)[-2:]  # dimensions
    v_row = jnp.zeros(np.delete(param.shape, largest))
    return Moments(v_row, v_col=jnp.zeros(np.delete(param.shape, second)), m=m)


def update_parameter(optimizer, decay, rate, grad, moments, param):
    """Return the update of one parameter and its new moments; `decay` is for the squared gradients.

    Shazeer & Stern 2018, algorithms 4 and 5.
    """
    v_row, v_col, v, m = moments
    square = grad**2 + 1e-30
    if v is not None:
        v = decay * v + (1.0 - decay) * square
        update = grad * v**-0.5
    else:
        second, largest = map(int, np.argsort(grad.shape)[-2:])  # dimensions
        v_row = decay * v_row + (1.0 - decay) * kernels.mean(square, largest)
        v_col = decay * v_col + (1.0 - decay) * kernels.mean(square, second)
        dim = second - (largest < second)  # `second`, as a dimension of v_row
        row = (v_row / v_row.mean(dim, keepdims=True)) ** -0.5
        update = grad * jnp.expand_dims(row, largest) * jnp.expand_dims(v_col**-0.5, second)
    if optimizer.clipping_threshold:
        rms = norm(update) / math.sqrt(update.size)
        update = update / jnp.maximum(1.0, rms / optimizer.clipping_threshold)
    if optimizer.multiply_by_parameter_scale:
        rms = norm(param) / math.sqrt(param.size)
        update = update * jnp.maximum(rms, 1e-3)
    update = rate * update
    if optimizer.beta1:
        update = m = (1 - optimizer.beta1) * update + optimizer.beta1 * m
    if optimizer.weight_decay_rate:
        update = update + optimizer.weight_decay_rate * param
    return -update, Moments(v_row, v_col, v, m)


def adamw(optimizer: ConfigDict, schedule: Callable, inner=None) -> optax.GradientTransformation:
    """Return AdamW. `inner`, if set, wraps its Adam: `muon`."""
    settings = optimizer.adamw

    def is_decayed(params):
        return {path: not path.endswith(('/scale', '/rel_embedding')) for path in params}

    def descend(updates, state, params=None, *, step, **_):
        rate = -schedule(step)
        return jax.tree.map(lambda update: rate * update, updates), state

    adam = optax.scale_by_adam(b1=settings.beta1, b2=settings.beta2, eps=settings.epsilon)
    chain = [inner(adam) if inner else adam]
    if settings.multiply_by_parameter_scale:
        chain.append(optax.scale_by_param_block_rms(min_scale=1e-3))
    mask = None if settings.decay_norms else is_decayed
    chain.append(optax.add_decayed_weights(settings.weight_decay, mask))
    chain.append(optax.GradientTransformationExtraArgs(optax.init_empty_state, descend))
    return optax.chain(*chain)


def muon(adam: optax.GradientTransformation, momentum=0.95) -> optax.GradientTransformation:
    """Return Muon's directions for kernels of layers, scaled like Adam's (Liu et al. 2025); Adam's for the others."""

    def init(params):
        state = adam.init(params)
        return state._replace(nu=split_kernels(state.nu)[1])

    def update(grads, state, params=None):
        matrices, others = split_kernels(grads)
        mu, mu_of_others = split_kernels(state.mu)
        directions, state = adam.update(others, state._replace(mu=mu_of_others))
        mu = optax.tree_utils.tree_update_moment(matrices, mu, momentum, 1)
        # Nesterov's look-ahead. Both terms have the same bias, which makes no difference.
        weight = momentum * (1 - momentum**state.count) / (1 - momentum ** (state.count + 1))
        ahead = jax.tree.map(lambda m, grad: weight * m + (1 - momentum) * grad, mu, matrices)
        return directions | orthogonalized(ahead), state._replace(mu=state.mu | mu)

    return optax.GradientTransformation(init, update)


def split_kernels(params: Mapping[str, jax.Array]) -> tuple[dict, dict]:
    """Return the kernels of layers, and the other parameters."""
    is_kernel = re.compile(r'(en|de)coder/layers_\d+/.+/kernel').fullmatch
    matrices = {path: x for path, x in params.items() if is_kernel(path)}
    others = {path: x for path, x in params.items() if path not in matrices}
    return matrices, others


def orthogonalized(matrices: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return matrices, [..., rows, columns], after five Newton-Schulz iterations (Jordan et al. 2024).

    Singular values become about 0.2 sqrt(longer side). Matrices of one shape are stacked: deep models compile as fast.
    """
    stacks: dict[tuple, dict[str, jax.Array]] = {}
    for path, x in matrices.items():
        wide = x.mT if x.shape[-2] > x.shape[-1] else x
        stacks.setdefault(wide.shape, {})[path] = wide
    results = {}
    for stack in stacks.values():
        x = partition.split_stack(jnp.stack(list(stack.values())))
        x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
        for _ in range(5):
            square = x @ x.mT
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        for path, y in zip(stack, 0.2 * math.sqrt(x.shape[-1]) * x, strict=True):
            results[path] = y if y.shape == matrices[path].shape else y.mT
    return results


# The choices of `optimizer.name`: functions of the settings `optimizer` and the schedule.
OPTIMIZERS: dict = {'adafactor': adafactor, 'adamw': adamw, 'muon': partial(adamw, inner=muon)}


def clip_by_norm(threshold: float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm`, with our sums."""

    def clip(updates, params=None):
        total = norm(updates)
        return jax.tree.map(
            lambda update: jnp.where(total < threshold, update, update / total * threshold), updates
        )

    return optax.stateless(clip)


def norm(tree: optax.Updates) -> jax.Array:
    return jnp.sqrt(sum(kernels.sum(x**2) for x in jax.tree.leaves(tree)))


class ParameterAverage(NamedTuple):
    """The state of `average_parameters`."""

    ema_params: dict[str, jax.Array]  # {path: moving average}; state_names.AVERAGE_SLOT


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Return a transformation that averages the new parameters and leaves the updates alone; it ends a chain.

    average = decay * average + (1 - decay) * parameter, starting at the initial parameters and therefore
    without bias correction, as in TensorFlow's tf.train.ExponentialMovingAverage and timm's ModelEma.
    """

    def init(params):
        return ParameterAverage(params)

    def update(updates, state, params):
        new_params = optax.apply_updates(params, updates)
        average = optax.incremental_update(new_params, state.ema_params, step_size=1 - decay)
        return updates, ParameterAverage(average)

    return optax.GradientTransformation(init, update)


def averaged(params: Mapping[str, jax.Array], opt_state: optax.OptState) -> Mapping[str, jax.Array]:
    """Return the parameters, or their moving averages where the optimizer has them."""
    return {**params, **optax.tree_utils.tree_get(opt_state, 'ema_params', default={})}


def make_schedule(learning_rate: ConfigDict) -> Callable:
    """Return (step before its increment) -> float32 rate: T5X's product of factors, at least min_learning_rate."""
    base = learning_rate.base_learning_rate
    warmup = float(learning_rate.warmup_steps)
    decay = learning_rate.decay_factor
    cycle = learning_rate.steps_per_cycle
    factors = {  # functions of the float32 step
        'constant': lambda t: base,
        'linear_warmup': lambda t: jnp.minimum(1.0, t / warmup),
        'linear_warmup_from_half': lambda t: jnp.minimum(1.0, 0.5 + 0.5 * t / warmup),  # nanoT5's
        'linear_decay': lambda t: base * jnp.minimum(t / warmup, 1.0 + decay * (warmup - t)),
        'rsqrt_decay': lambda t: 1.0 / jnp.sqrt(jnp.maximum(t, warmup)),
        'rsqrt_normalized_decay': lambda t: jnp.sqrt(warmup / jnp.maximum(t, warmup)),
        'decay_every': lambda t: decay ** (t // learning_rate.steps_per_decay),
        'cosine_decay': lambda t: (
            0.5 * (1.0 + jnp.cos(jnp.pi * (jnp.maximum(0.0, t - warmup) / cycle % 1.0)))
        ),
    }
    names = [name.strip() for name in learning_rate.factors.split('*')]
    if not set(names) <= factors.keys():
        raise Refused(f'learning_rate.factors={learning_rate.factors!r}: use {", ".join(factors)}')

    def schedule(step):
        t = jnp.maximum(0, step - learning_rate.step_offset).astype(jnp.float32)
        rate = math.prod(factors[name](t) for name in names)
        return jnp.maximum(rate, learning_rate.min_learning_rate).astype(jnp.float32)

    return schedule


def trained_paths(pattern: str, paths: Collection[str]) -> tuple[str, ...]:
    """Return the parameters that `pattern`, optimizer.trainable, matches in full."""
    try:
        matches = tuple(path for path in paths if re.fullmatch(pattern, path))
    except (re.error, OverflowError) as error:
        raise Refused(f'optimizer.trainable={pattern!r}: not a valid regex: {error}') from error
    if not matches:
        raise Refused(f'optimizer.trainable={pattern!r} must match a full path like {min(paths)!r}')
    return matches
