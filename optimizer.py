"""Adafactor as T5 has it, T5X's learning-rate schedules, and T5X's names for a training state.

Plain optax on global arrays: it runs outside `shard_map`, where a mean over a parameter is the mean over all
of it. optax's Adafactor follows T5X's as long as parameters are T5X's unstacked one- and two-dimensional
arrays, which ours are. Source: T5X t5x/adafactor.py, t5x/utils.py; Shazeer & Stern 2018 (Adafactor).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

# T5X's slots of a parameter and optax's names for them. T5X keeps all four, [1] zeros for an unused one.
SLOTS = {'m': 'ema', 'v': 'v', 'v_col': 'v_col', 'v_row': 'v_row'}


def make_optimizer(config: Any, learning_rate: Callable) -> optax.GradientTransformation:
    """Adafactor with T5X's hyper-parameters (0 is off); its minimum of 128 to factor and its epsilons 1e-30
    and 1e-3 are optax's defaults too. It comes after a clip of the global norm, if there is one."""
    clip = config.global_norm_clip_threshold
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
    return optax.chain(optax.clip_by_global_norm(clip), adafactor) if clip else adafactor


def make_schedule(config: Any) -> Callable:
    """T5X's product of factors: step (before it is incremented) -> learning rate, float32; never below
    min_learning_rate, not even at step 0 of a warm-up. ValueError names a factor that T5X does not have."""
    base, warmup = config.base_learning_rate, float(config.warmup_steps)
    decay, cycle = config.decay_factor, config.steps_per_cycle
    known = {
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
    names = [name.strip() for name in config.factors.split('*')]
    if unknown := [name for name in names if name not in known]:
        words = f'{unknown[0]!r} is none of {", ".join(known)}'
        raise ValueError(f'learning_rate.factors={config.factors!r}: {words}')

    def schedule(step):
        t = jnp.maximum(0, step - config.step_offset).astype(jnp.float32)
        rate = math.prod(known[name](t) for name in names)
        return jnp.maximum(rate, config.min_learning_rate).astype(jnp.float32)

    return schedule


def state_specs(opt_state: Any, params: Mapping[str, Any], specs: Mapping[str, P]) -> Any:
    """PartitionSpecs for `opt_state`: a slot of its parameter's shape is split like it, others whole."""

    def spec(keys, x):
        path = next((key.key for key in keys if isinstance(key, jax.tree_util.DictKey)), None)
        return specs[path] if path is not None and x.shape == params[path].shape else P()

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def to_t5x(step: Any, params: Mapping[str, Any], opt_state: Any) -> dict[str, Any]:
    """A training state under the paths of a T5X checkpoint, 'target/PARAM' and 'state/...'."""
    tree = {'state/step': step} | {f'target/{path}': x for path, x in params.items()}
    for slot, name in SLOTS.items():
        arrays = optax.tree_utils.tree_get(opt_state, name)
        for path in params:
            array = arrays[path] if arrays else np.zeros([1], np.float32)
            tree[f'state/param_states/{path}/{slot}'] = array
    return tree


def from_t5x(tree: Mapping[str, Any], opt_state: Any) -> tuple[Any, dict[str, Any], Any]:
    """(step, params, optimizer state), the last in the structure of `opt_state`: undoes to_t5x."""
    step = tree['state/step']
    params = {p.removeprefix('target/'): x for p, x in tree.items() if p.startswith('target/')}
    slots = {
        name: {path: tree[f'state/param_states/{path}/{slot}'] for path in params}
        for slot, name in SLOTS.items()
        if optax.tree_utils.tree_get(opt_state, name) is not None
    }
    return step, params, optax.tree_utils.tree_set(opt_state, count=step, **slots)
