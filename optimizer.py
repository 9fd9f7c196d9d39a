"""Adafactor as T5 has it, T5X's learning-rate schedules, and T5X's names for the optimizer's state.

Plain optax on global arrays: it runs outside `shard_map`, where a mean over a parameter is the mean over
all of it. optax's Adafactor follows T5X's as long as parameters are T5X's unstacked one- and
two-dimensional arrays, which ours are. Source: T5X t5x/adafactor.py, t5x/utils.py; Shazeer & Stern 2018.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

SLOTS = (
    'm',
    'v',
    'v_col',
    'v_row',
)  # T5X keeps all four for each parameter, [1] zeros where unused


def make_optimizer(config: Any, learning_rate: Callable) -> optax.GradientTransformation:
    """Adafactor from `config.optimizer` (names and defaults of T5X), optionally after a global clip.

    min_dim_size_to_factor, decay_rate and both epsilons are T5X's in optax too; they are no settings.
    """
    adafactor = optax.adafactor(
        learning_rate,
        min_dim_size_to_factor=128,
        decay_rate=config.decay_rate,
        decay_offset=config.step_offset,
        multiply_by_parameter_scale=config.multiply_by_parameter_scale,
        clipping_threshold=config.clipping_threshold,
        momentum=config.beta1 or None,
        weight_decay_rate=config.weight_decay_rate or None,
        factored=config.factored,
    )
    if not config.global_norm_clip_threshold:
        return adafactor
    return optax.chain(optax.clip_by_global_norm(config.global_norm_clip_threshold), adafactor)


def make_schedule(config: Any) -> Callable:
    """T5X's product of factors: step (before it is incremented) -> learning rate, float32.

    `config.factors` is 'constant * linear_warmup * rsqrt_decay' and the like; ValueError names one that
    T5X does not have. The product never falls below min_learning_rate, not even at step 0 of a warm-up.
    """
    names = [name.strip() for name in config.factors.split('*')]
    warmup = config.warmup_steps
    known = {
        'constant': lambda t: config.base_learning_rate,
        'linear_warmup': lambda t: jnp.minimum(1.0, t / warmup),
        'linear_decay': lambda t: (
            config.base_learning_rate
            * jnp.minimum(t / warmup, 1.0 + config.decay_factor * (warmup - t))
        ),
        'rsqrt_decay': lambda t: lax.rsqrt(jnp.maximum(t, 1.0 * warmup)),
        'rsqrt_normalized_decay': lambda t: (
            jnp.sqrt(warmup) * lax.rsqrt(jnp.maximum(t, 1.0 * warmup))
        ),
        'decay_every': lambda t: config.decay_factor ** (t // config.steps_per_decay),
        'cosine_decay': lambda t: (
            0.5
            * (
                1.0
                + jnp.cos(jnp.pi * (jnp.maximum(0.0, t - warmup) / config.steps_per_cycle % 1.0))
            )
        ),
    }
    for name in names:
        if name not in known:
            raise ValueError(
                f'optimizer.schedule.factors={config.factors!r}: no factor {name!r}; use {", ".join(known)}'
            )

    def schedule(step):
        t = jnp.maximum(0, jnp.asarray(step) - config.step_offset).astype(jnp.float32)
        rate = jnp.float32(1.0)
        for name in names:
            rate = rate * known[name](t)
        return jnp.maximum(rate, config.min_learning_rate).astype(jnp.float32)

    return schedule


def to_t5x(opt_state: Any, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The state under T5X's paths, 'PARAM/v_row' and so on, all four slots for each parameter."""
    slots = {name: optax.tree_utils.tree_get(opt_state, name) for name in ('v', 'v_col', 'v_row')}
    slots['m'] = optax.tree_utils.tree_get(opt_state, 'ema')
    unused = {path: jnp.zeros([1], jnp.float32) for path in params}
    return {
        f'{path}/{name}': (slots[name] or unused)[path] for path in sorted(params) for name in SLOTS
    }


def from_t5x(opt_state: Any, slots: dict[str, jax.Array], step: jax.Array) -> Any:
    """`opt_state` (arrays or shapes) with T5X's `slots` and every count at `step`: undoes to_t5x."""
    trees: dict[str, dict[str, jax.Array]] = {name: {} for name in SLOTS}
    for path, x in slots.items():
        param, name = path.rsplit('/', 1)
        trees[name][param] = x
    state = optax.tree_utils.tree_set(
        opt_state, v=trees['v'], v_col=trees['v_col'], v_row=trees['v_row'], count=step
    )
    has_momentum = optax.tree_utils.tree_get(opt_state, 'ema') is not None
    return optax.tree_utils.tree_set(state, ema=trees['m']) if has_momentum else state


def state_specs(opt_state: Any, params: dict[str, jax.Array], specs: dict[str, P]) -> Any:
    """PartitionSpecs for `opt_state`: a slot of its parameter's shape is split like it, others whole."""

    def spec(path, x):
        name = next((key.key for key in path if isinstance(key, jax.tree_util.DictKey)), None)
        return specs[name] if name is not None and x.shape == params[name].shape else P()

    return jax.tree_util.tree_map_with_path(spec, opt_state)
