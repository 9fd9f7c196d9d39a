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
# The slots that T5X's Adafactor keeps for each parameter. One that is unused is [1] zeros.
T5X_SLOTS = ('m', 'v', 'v_col', 'v_row')
T5X_NAMES = {'ema': 'm'}  # of slots that have another name in optax
# Each of these slots of optax's Adafactor lacks a dimension of its parameter: the largest, the second.
FACTORED_SLOTS = {'v_row': -1, 'v_col': -2}
AVERAGE_SLOT = 'ema_params'  # of `average_parameters`


def to_t5x(
    step: Leaf, params: Mapping[str, Leaf], opt_state: optax.OptState
) -> dict[str, Leaf | NDArray]:
    """Return a training state as a flat tree of T5X's paths, 'target/PARAM' and 'state/...'.

    The arrays of the state of any optax optimizer are in it, under the paths of `state_paths`, but
    a random key, which optax.add_noise has, cannot be saved. Frozen parameters have no state.
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
    """Return (step, params, optimizer state), the inverse of `to_t5x`; of `opt_state`'s structure."""
    params = {k.removeprefix('target/'): x for k, x in tree.items() if k.startswith('target/')}
    leaves = [tree[path] for path in state_paths(opt_state, params)]
    structure = jax.tree.structure(opt_state)
    return tree[STEP], params, jax.tree.unflatten(structure, leaves)


def state_paths(opt_state: optax.OptState, params: Collection[str]) -> list[str]:
    """Return the path in T5X's tree of each leaf of the state of an optax optimizer.

    An array of a parameter is 'state/param_states/PARAM/SLOT'. SLOT is T5X's name for a slot of
    Adafactor, else optax's, such as 'mu'. Other leaves are 'state/optimizer/NAME', NAME being
    optax's fields and labels. Where a path occurs again, the second one ends in '_1', and so on.

    Two kinds of counts are copies of the step; they have its path and are not stored again:
      - every count, where Adafactor's slots are all that there is besides, and averages of the
        parameters: T5X stores none;
      - the count of a learning-rate schedule that no other transformation wraps, so that a run that
        takes over a step but no optimizer state has the learning rate of that step.
    """

    def is_schedule(x: optax.OptState) -> bool:
        return isinstance(x, optax.ScaleByScheduleState)

    keys_of_schedules = []  # that nothing but `chain` holds
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

    An array that belongs to a parameter and has its shape is split like it, and so is a row or
    column of Adafactor along the dimension that it keeps; others are not split.
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
    """Return the path in T5X's tree of the leaf at `keys`, before it is numbered."""
    index = parameter_index(keys, params)
    if index is None:
        return '/'.join(['state/optimizer', *field_names(keys)])
    names = field_names(keys[:index])[-1:] or ['value']
    slot = T5X_NAMES.get(names[0], names[0])
    return '/'.join(['state/param_states', keys[index].key, slot, *field_names(keys[index + 1 :])])


def parameter_index(keys: KeyPath, params: Collection[str]) -> int | None:
    """Return where in `keys` the path of a parameter stands; None where there is none."""
    for i, key in enumerate(keys):
        if isinstance(key, jax.tree_util.DictKey) and key.key in params:
            return i
    return None


def field_names(keys: KeyPath) -> list[str]:
    """Return the names of the fields and labels in `keys`, not positions in tuples and lists."""
    names = []
    for key in keys:
        if isinstance(key, jax.tree_util.GetAttrKey):
            names.append(key.name)
        if isinstance(key, jax.tree_util.DictKey):
            names.append(str(key.key))
    return names
