"""Optimizers, and T5X's learning-rate schedules.

optax runs outside `shard_map`, on global arrays: a mean over a parameter is the mean over all of it.
Adafactor follows optax, which matches T5X for 1-D and 2-D parameters; only the sums are ours. Source:
T5X t5x/adafactor.py, t5x/utils.py; Shazeer & Stern 2018 (Adafactor); Loshchilov & Hutter 2019 (AdamW);
Polyak & Juditsky 1992 (averages of parameters).
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

import kernels
from messages import Refused


def make_optimizer(config: ConfigDict, learning_rate: Callable) -> optax.GradientTransformation:
    """Return the optimizer `config.name`, after a clip of the global norm and before a moving average, if set."""
    if config.name not in OPTIMIZERS:
        raise Refused(f'optimizer.name={config.name!r}: must be one of {", ".join(OPTIMIZERS)}')
    optimizer = OPTIMIZERS[config.name](config, learning_rate)
    threshold = config.global_norm_clip_threshold
    if threshold:
        clip = optax.stateless(lambda updates, _: clip_by_norm(updates, threshold))
        optimizer = optax.chain(clip, optimizer)
    if config.ema_decay:
        optimizer = optax.chain(optimizer, average_parameters(config.ema_decay))
    return optimizer


def adafactor(config: ConfigDict, learning_rate: Callable) -> optax.GradientTransformation:
    """Return `optax.adafactor` with our sums. A hyper-parameter of 0 turns its part off.

    Each parameter is updated separately, so JAX traces one update per shape; kernels of experts, [experts, rows,
    columns], matrix by matrix. T5X multiplies the gradients of these by the number of experts (t5x/contrib/moe).
    """
    init_one = jax.jit(optax.scale_by_factored_rms(config.factored).init)

    def init_experts(param):
        of_matrix = optax.scale_by_factored_rms(config.factored, min_dim_size_to_factor=1)
        zeros = of_matrix.init(param[0])

        def of_all(x):  # except the count, and the [1] zeros of an unused slot
            return jnp.zeros((len(param), *x.shape), x.dtype) if x.size > 1 else x

        return jax.tree.map(of_all, zeros)

    def update_experts(grad, state, param):
        axes = jax.tree.map(lambda x: 0 if x.ndim > 1 else None, state)
        return jax.vmap(update_one, (0, axes, 0), (0, axes))(grad * len(grad), state, param)

    @jax.jit
    def update_one(grad, state, param):
        update, state = scale_by_rms(config, grad, state)
        if config.clipping_threshold:
            rms = norm(update) / math.sqrt(update.size)
            update = update / jnp.maximum(1.0, rms / config.clipping_threshold)
        if config.multiply_by_parameter_scale:
            rms = norm(param) / math.sqrt(param.size)
            update = update * jnp.maximum(rms, 1e-3)
        return update, state

    def join(states: Mapping[str, optax.FactoredState]) -> optax.FactoredState:
        counts, *slots = zip(*states.values(), strict=True)  # counts are equal
        return optax.FactoredState(counts[0], *[dict(zip(states, x, strict=True)) for x in slots])

    def init(params):
        states = {}
        for path, param in params.items():
            init_path = init_experts if is_of_experts(path) else init_one
            states[path] = init_path(param)
        return join(states)

    def update(grads, state, params):
        count, *slots = state
        updates = {}
        states = {}
        for path, grad in grads.items():
            own = optax.FactoredState(count, *[slot[path] for slot in slots])
            update_path = update_experts if is_of_experts(path) else update_one
            updates[path], states[path] = update_path(grad, own, params[path])
        return updates, join(states)

    chain = [
        optax.GradientTransformation(init, update),
        optax.scale_by_learning_rate(learning_rate, flip_sign=False),
    ]
    if config.beta1:
        chain.append(optax.ema(config.beta1, debias=False))
    if config.weight_decay_rate:
        chain.append(optax.add_decayed_weights(config.weight_decay_rate))
    return optax.chain(*chain, optax.scale(-1))


def is_of_experts(path: str) -> bool:
    """Return whether a parameter has a matrix for each expert."""
    return 'expert' in path.split('/')


def scale_by_rms(
    config: ConfigDict, grad: jax.Array, state: optax.FactoredState
) -> tuple[jax.Array, optax.FactoredState]:
    """Return a gradient divided by the root of its mean square, and the averages of such squares.

    They are kept in full (`v`), or as means of rows and columns: Shazeer & Stern 2018, algorithm 4.
    """
    count, v_row, v_col, v = state
    decay = 1.0 - (count - config.step_offset + 1.0) ** -config.decay_rate
    square = grad**2 + 1e-30
    if v.shape == grad.shape:
        v = decay * v + (1.0 - decay) * square
        return grad * v**-0.5, optax.FactoredState(count + 1, v_row, v_col, v)
    second, largest = map(int, np.argsort(grad.shape)[-2:])  # dimensions
    v_row = decay * v_row + (1.0 - decay) * kernels.mean(square, largest)
    v_col = decay * v_col + (1.0 - decay) * kernels.mean(square, second)
    kept = second - (largest < second)  # the second dimension of v_row
    row = (v_row / v_row.mean(kept, keepdims=True)) ** -0.5
    update = grad * jnp.expand_dims(row, largest) * jnp.expand_dims(v_col**-0.5, second)
    return update, optax.FactoredState(count + 1, v_row, v_col, v)


def adamw(config: ConfigDict, learning_rate: Callable) -> optax.GradientTransformation:
    """Return AdamW. It decays every parameter, also the scales of norms."""
    return optax.adamw(
        learning_rate,
        b1=config.adamw.beta1,
        b2=config.adamw.beta2,
        weight_decay=config.adamw.weight_decay,
    )


def clip_by_norm(updates: optax.Updates, threshold: float) -> optax.Updates:
    """Return `optax.clip_by_global_norm` of updates, with our sums."""
    total = norm(updates)
    return jax.tree.map(
        lambda update: jnp.where(total < threshold, update, update / total * threshold), updates
    )


def norm(tree: optax.Updates) -> jax.Array:
    return jnp.sqrt(sum(kernels.sum(x**2) for x in jax.tree.leaves(tree)))


# The choices of `optimizer.name`.
OPTIMIZERS = {
    'adafactor': adafactor,
    'adamw': adamw,
}


class ParameterAverage(NamedTuple):
    """The state of `average_parameters`."""

    ema_params: dict[str, jax.Array]  # {path: moving average}; state_names.AVERAGE_SLOT


def average_parameters(decay: float) -> optax.GradientTransformation:
    """Return a transformation that keeps the updates and averages the new parameters; it comes last in a chain.

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
    """Return the parameters, or their moving averages if the optimizer keeps some."""

    def is_average(x: optax.OptState) -> bool:
        return isinstance(x, ParameterAverage)

    for x in jax.tree.leaves(opt_state, is_leaf=is_average):
        if is_average(x):
            return {**params, **x.ema_params}
    return params


def make_schedule(config: ConfigDict) -> Callable:
    """Return T5X's product of factors, at least min_learning_rate: (step before its increment) -> rate, float32."""
    factors = schedule_factors(config)
    names = [name.strip() for name in config.factors.split('*')]
    if not set(names) <= factors.keys():
        raise Refused(f'learning_rate.factors={config.factors!r}: use {", ".join(factors)}')

    def schedule(step):
        t = jnp.maximum(0, step - config.step_offset).astype(jnp.float32)
        rate = math.prod(factors[name](t) for name in names)
        return jnp.maximum(rate, config.min_learning_rate).astype(jnp.float32)

    return schedule


def schedule_factors(config: ConfigDict) -> dict[str, Callable]:
    """Return T5X's factors, {name: function of the float32 step t}."""
    base = config.base_learning_rate
    warmup = float(config.warmup_steps)
    decay = config.decay_factor
    cycle = config.steps_per_cycle
    return {
        'constant': lambda t: base,
        'linear_warmup': lambda t: jnp.minimum(1.0, t / warmup),
        'linear_decay': lambda t: base * jnp.minimum(t / warmup, 1.0 + decay * (warmup - t)),
        'rsqrt_decay': lambda t: 1.0 / jnp.sqrt(jnp.maximum(t, warmup)),
        'rsqrt_normalized_decay': lambda t: jnp.sqrt(warmup / jnp.maximum(t, warmup)),
        'decay_every': lambda t: decay ** (t // config.steps_per_decay),
        'cosine_decay': lambda t: (
            0.5 * (1.0 + jnp.cos(jnp.pi * (jnp.maximum(0.0, t - warmup) / cycle % 1.0)))
        ),
    }


def trained_paths(pattern: str, paths: Collection[str]) -> tuple[str, ...]:
    """Return the parameters that `pattern`, optimizer.trainable, matches in full."""
    try:
        trained = tuple(path for path in paths if re.fullmatch(pattern, path))
    except (re.error, OverflowError) as error:
        raise Refused(f'optimizer.trainable={pattern!r}: no regular expression: {error}') from error
    if not trained:
        raise Refused(f'optimizer.trainable={pattern!r} must match a full path, as {min(paths)!r}')
    return trained
