"""T5X's names for a training state: `to_t5x` and `from_t5x`, and how the optimizer's state is split.

Any optax optimizer has them. Source: T5X t5x/train_state.py, t5x/adafactor.py, t5x/utils.py.
"""

import collections
from collections.abc import Collection, Mapping
from typing import TypeVar

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath
from numpy.typing import NDArray

Leaf = TypeVar('Leaf')  # an array, its shape, or how it is split

STEP = 'state/step'
T5X_SLOTS = ('m', 'v', 'v_col', 'v_row')  # Adafactor's; an unused one is [1] zeros
FACTORED_SLOTS = {'v_row': -1, 'v_col': -2}  # the dimension, by size, that a slot averages over
AVERAGE_SLOT = 'ema_params'  # optimizer.ParameterAverage


def to_t5x(
    step: Leaf, params: Mapping[str, Leaf], opt_state: optax.OptState
) -> dict[str, Leaf | NDArray]:
    """Return a training state as a flat tree of T5X's paths, 'target/PARAM' and those of `state_paths`.

    A random key, as in optax.add_noise, cannot be saved. Frozen parameters have no state.
    """
    tree: dict[str, Leaf | NDArray] = {STEP: step}
    for path, x in params.items():
        tree[f'target/{path}'] = x
    paths = state_paths(opt_state, params)
    for path, x in zip(paths, jax.tree.leaves(opt_state), strict=True):
        tree[path] = x
    for path in paths:
        owner, _, slot = path.rpartition('/')
        if slot in T5X_SLOTS:
            for t5x_slot in T5X_SLOTS:
                tree.setdefault(f'{owner}/{t5x_slot}', np.zeros([1], np.float32))
    return tree


def from_t5x(
    tree: Mapping[str, Leaf], opt_state: optax.OptState
) -> tuple[Leaf, dict[str, Leaf], optax.OptState]:
    """Return (step, params, optimizer state with `opt_state`'s structure), the inverse of `to_t5x`."""
    params = {k.removeprefix('target/'): x for k, x in tree.items() if k.startswith('target/')}
    leaves = [tree[path] for path in state_paths(opt_state, params)]
    structure = jax.tree.structure(opt_state)
    return tree[STEP], params, jax.tree.unflatten(structure, leaves)


def state_paths(opt_state: optax.OptState, params: Collection[str]) -> list[str]:
    """Return the path in T5X's tree of each leaf of the state of an optax optimizer.

    An array of a parameter is 'state/param_states/PARAM/SLOT', other leaves are 'state/optimizer/NAME', by the names of
    fields and labels. A path that occurs again ends in '_1', and so on.
    """
    occurrences: collections.Counter[str] = collections.Counter()
    paths = []
    for keys, _ in jax.tree_util.tree_leaves_with_path(opt_state):
        path = leaf_path(keys, params)
        number = occurrences[path]
        occurrences[path] += 1
        paths.append(f'{path}_{number}' if number else path)
    return paths


def state_specs(
    opt_state: optax.OptState, params: Mapping[str, jax.ShapeDtypeStruct], specs: Mapping[str, P]
) -> optax.OptState:
    """Return PartitionSpecs for `opt_state`.

    An array with the shape of its parameter is split like it, a row or column of Adafactor like the dimension that it
    keeps. Others are not split.
    """

    def spec(keys: KeyPath, x: jax.ShapeDtypeStruct) -> P:
        index = parameter_index(keys, params)
        if index is None:
            return P()
        path = keys[index].key
        shape = params[path].shape
        if x.shape == shape:
            return specs[path]
        slot = leaf_path(keys, params).rpartition('/')[2]
        if slot not in FACTORED_SLOTS or len(shape) < 2:
            return P()
        kept = 1 - np.argsort(shape[-2:])[FACTORED_SLOTS[slot]] + len(shape) - 2
        if x.shape != (*shape[:-2], shape[kept]):
            return P()
        return P(*specs[path][:-2], specs[path][kept])

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def leaf_path(keys: KeyPath, params: Collection[str]) -> str:
    """Return the path in T5X's tree of the leaf at `keys`, without a number."""
    index = parameter_index(keys, params)
    names = field_names(keys)
    if index is None:
        return '/'.join(['state/optimizer', *names])
    path = keys[index].key
    # The fields of a record of this parameter, as Adafactor's, or the field that has a dict of parameters.
    slot = field_names(keys[index + 1 :]) or field_names(keys[:index])[-1:] or ['value']
    return '/'.join(['state/param_states', path, *slot])


def parameter_index(keys: KeyPath, params: Collection[str]) -> int | None:
    """Return the index in `keys` of the path of a parameter; None without one."""
    for i, key in enumerate(keys):
        if isinstance(key, jax.tree_util.DictKey) and key.key in params:
            return i
    return None


def field_names(keys: KeyPath) -> list[str]:
    """Return the names of fields and labels in `keys`, without positions in tuples and lists."""
    named = [key for key in keys if not isinstance(key, jax.tree_util.SequenceKey)]
    return [jax.tree_util.keystr((key,), simple=True) for key in named]
