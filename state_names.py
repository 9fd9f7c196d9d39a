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
T5X_NAMES = {'ema': 'm'}  # optax's name of a slot -> T5X's
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
        if path != STEP:
            tree[path] = x
    for path in paths:
        owner, _, slot = path.rpartition('/')
        if owner.startswith('state/param_states/') and slot in FACTORED_SLOTS:
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

    An array of a parameter is 'state/param_states/PARAM/SLOT'; SLOT is T5X's name for a slot of Adafactor, else
    optax's, such as 'mu'. Other leaves are 'state/optimizer/NAME'; NAME has optax's fields and labels. A path that
    occurs again ends in '_1', and so on.

    Two kinds of counts are copies of the step, have its path and are not stored again:
      - all counts of a state with no other slots than Adafactor's and averages: T5X stores none;
      - the count of a learning-rate schedule that no other transformation wraps: a run that takes over a step
        without an optimizer state then has the learning rate of that step.
    """

    def is_schedule(x: optax.OptState) -> bool:
        return isinstance(x, optax.ScaleByScheduleState)

    keys_of_schedules = []  # in chains alone
    for keys, x in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_schedule):
        if is_schedule(x) and not field_names(keys):
            keys_of_schedules.append((*keys, jax.tree_util.GetAttrKey('count')))
    keys_of_leaves = [keys for keys, _ in jax.tree_util.tree_leaves_with_path(opt_state)]
    has_t5x_state = True
    for keys in keys_of_leaves:
        name = leaf_path(keys, params).rpartition('/')[2]
        is_slot = parameter_index(keys, params) is not None
        has_t5x_state &= name in (*T5X_SLOTS, AVERAGE_SLOT) if is_slot else name == 'count'
    occurrences: collections.Counter[str] = collections.Counter()
    paths = []
    for keys in keys_of_leaves:
        is_count = parameter_index(keys, params) is None
        if is_count and (has_t5x_state or keys in keys_of_schedules):
            paths.append(STEP)
            continue
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
        slot = (field_names(keys[:index]) or [''])[-1]
        if slot not in FACTORED_SLOTS or len(shape) < 2:
            return P()
        kept = 1 - np.argsort(shape[-2:])[FACTORED_SLOTS[slot]] + len(shape) - 2
        if x.shape != (*shape[:-2], shape[kept]):
            return P()
        return P(*specs[path][:-2], specs[path][kept])

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def slots(opt_state: optax.OptState, params: Collection[str]) -> list[jax.Array]:
    """Return the arrays of an optimizer's state that belong to a parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(opt_state)
    return [x for keys, x in leaves if parameter_index(keys, params) is not None]


def leaf_path(keys: KeyPath, params: Collection[str]) -> str:
    """Return the path in T5X's tree of the leaf at `keys`, without a number."""
    index = parameter_index(keys, params)
    if index is None:
        return '/'.join(['state/optimizer', *field_names(keys)])
    names = field_names(keys[:index])[-1:] or ['value']
    slot = T5X_NAMES.get(names[0], names[0])
    return '/'.join(['state/param_states', keys[index].key, slot, *field_names(keys[index + 1 :])])


def parameter_index(keys: KeyPath, params: Collection[str]) -> int | None:
    """Return the index in `keys` of the path of a parameter; None without one."""
    for i, key in enumerate(keys):
        if isinstance(key, jax.tree_util.DictKey) and key.key in params:
            return i
    return None


def field_names(keys: KeyPath) -> list[str]:
    """Return the names of fields and labels in `keys`, without positions in tuples and lists."""
    names = []
    for key in keys:
        if isinstance(key, jax.tree_util.GetAttrKey):
            names.append(key.name)
        if isinstance(key, jax.tree_util.DictKey):
            names.append(str(key.key))
    return names
