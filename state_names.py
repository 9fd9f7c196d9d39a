"""T5X's names for a training state: `to_t5x` and `from_t5x`, and how the optimizer's state is split.

They cover every optax optimizer. Source: T5X t5x/train_state.py, t5x/adafactor.py, t5x/utils.py.
"""

import collections
from collections.abc import Collection, Mapping
from typing import TypeVar

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

Leaf = TypeVar('Leaf')  # an array, its shape, or how it is split

STEP = 'state/step'
SLOT_PREFIX = 'state/param_states/'
T5X_SLOTS = ('m', 'v', 'v_col', 'v_row')  # Adafactor's; an unused one is [1] zeros
FACTORED_SLOTS = {'v_row': -1, 'v_col': -2}  # the dimension, by size, that a slot averages over
AVERAGE_SLOT = 'ema_params'  # optimizer.ParameterAverage


def to_t5x(
    step: Leaf, params: Mapping[str, Leaf], opt_state: optax.OptState, recent: Leaf | None = None
) -> dict[str, Leaf | NDArray]:
    """Return a training state as a flat tree of T5X's paths, 'target/PARAM' and `state_paths`.

    A random key, as in optax.add_noise, cannot be saved. Frozen parameters have no state. T5X has no `recent`.
    """
    tree: dict[str, Leaf | NDArray] = {STEP: step}
    for path, x in params.items():
        tree[f'target/{path}'] = x
    for path, x in zip(state_paths(opt_state, params), jax.tree.leaves(opt_state), strict=True):
        tree[path] = x
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

    An array of a parameter is 'state/param_states/PARAM/SLOT', with the last field or label on the way to it as SLOT;
    other leaves are 'state/optimizer/NAME', with all fields as NAME. A repeated path ends in '_1', and so on.
    """
    occurrences: collections.Counter[str] = collections.Counter()
    paths = []
    for keys, _ in jax.tree_util.tree_leaves_with_path(opt_state):
        owner = ''
        fields = ['value']  # a name for an array that has none
        for key in keys:
            name = jax.tree_util.keystr((key,), simple=True)
            if isinstance(key, jax.tree_util.DictKey) and name in params:
                owner = name
            elif not isinstance(key, jax.tree_util.SequenceKey):
                fields.append(name)
        path = '/'.join(['state/optimizer', *fields[1:]])
        if owner:
            path = f'{SLOT_PREFIX}{owner}/{fields[-1]}'
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

    def spec(path: str, x: jax.ShapeDtypeStruct) -> P:
        owner, _, slot = path.removeprefix(SLOT_PREFIX).rpartition('/')
        if owner not in params:
            return P()
        shape = params[owner].shape
        if x.shape == shape:
            return specs[owner]
        if slot in FACTORED_SLOTS and len(shape) >= 2:
            dim = -1 - np.argsort(shape[-2:])[FACTORED_SLOTS[slot]]
            if x.shape == (*shape[:-2], shape[dim]):
                return P(*specs[owner][:-2], specs[owner][dim])
        return P()

    leaves, structure = jax.tree.flatten(opt_state)
    return jax.tree.unflatten(structure, map(spec, state_paths(opt_state, params), leaves))
