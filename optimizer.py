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
from jax.sharding import PartitionSpec as P

SLOTS = tuple('m v v_col v_row'.split())  # T5X keeps all for each parameter, [1] zeros if unused


def make_optimizer(config: Any, learning_rate: Callable) -> optax.GradientTransformation:
    """Adafactor with T5X's hyper-parameters (0 is off), after a clip of the global norm if there is one.

    T5X's min_dim_size_to_factor 128 and epsilons 1e-30 and 1e-3 are optax's defaults too.
    """
    adafactor = optax.adafactor(
        learning_rate,
        decay_rate=config.decay_rate,
        decay_offset=config.step_offset,
        multiply_by_parameter_scale=config.multiply_by_parameter_scale,
        clipping_threshold=config.clipping_threshold or None,
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
    base, warmup = config.base_learning_rate, float(config.warmup_steps)

    def cycles(t):
        return jnp.maximum(0.0, t - warmup) / config.steps_per_cycle

    known = {
        'constant': lambda t: base,
        'linear_warmup': lambda t: jnp.minimum(1.0, t / warmup),
        'linear_decay': lambda t: (
            base * jnp.minimum(t / warmup, 1.0 + config.decay_factor * (warmup - t))
        ),
        'rsqrt_decay': lambda t: 1.0 / jnp.sqrt(jnp.maximum(t, warmup)),
        'rsqrt_normalized_decay': lambda t: jnp.sqrt(warmup / jnp.maximum(t, warmup)),
        'decay_every': lambda t: config.decay_factor ** (t // config.steps_per_decay),
        'cosine_decay': lambda t: 0.5 * (1.0 + jnp.cos(jnp.pi * (cycles(t) % 1.0))),
    }
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f'learning_rate.factors={config.factors!r}: {unknown[0]!r} is none of {", ".join(known)}'
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
    paths = {path.rsplit('/', 1)[0] for path in slots}
    new = {name: {path: slots[f'{path}/{name}'] for path in paths} for name in SLOTS}
    new['ema'] = new.pop('m')
    if optax.tree_utils.tree_get(opt_state, 'ema') is None:
        del new['ema']
    return optax.tree_utils.tree_set(opt_state, count=step, **new)


def state_specs(opt_state: Any, params: dict[str, jax.Array], specs: dict[str, P]) -> Any:
    """PartitionSpecs for `opt_state`: a slot of its parameter's shape is split like it, others whole."""

    def spec(path, x):
        name = next((key.key for key in path if isinstance(key, jax.tree_util.DictKey)), None)
        return specs[name] if name is not None and x.shape == params[name].shape else P()

    return jax.tree_util.tree_map_with_path(spec, opt_state)
