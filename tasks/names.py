"""Look up a task or mixture by name: in a user's file, in T5's tables, among the objectives.

Imports no jax.
"""

import difflib
from collections.abc import Callable

from ml_collections import ConfigDict

import data
import user_code
from messages import Refused
from tasks import objectives
from tasks.mixtures import Mixture, Task, tasks_of
from tasks.objectives import OBJECTIVES, OwnFeatures
from tasks.t5 import table


def look_up(
    name: str, module: str, is_cached: Callable[[str], object] = lambda name: False
) -> Task | Mixture | None:
    """Return the task or mixture of a name, its members looked up as well; None if there is none.

    `module`: data.module. `is_cached`: whether a name has a task cache. Raises Refused for a member that
    does not exist.
    """

    def with_members(row: str | Task | Mixture) -> Task | Mixture:
        if isinstance(row, str):
            entry = look_up(row, module, is_cached)
            if entry is None:
                raise unknown(row, module, f'task {row!r} of data.task={name!r}')
            return entry
        return row.with_members(with_members) if isinstance(row, Mixture) else row

    entry = own_tasks(module).get(name) or table().get(name)
    if entry is not None:
        return with_members(entry)
    if name in OBJECTIVES:
        return Task(name, objective=name)
    return Task(name) if is_cached(name) else None


def own_features(data_group: ConfigDict) -> OwnFeatures:
    """Return the features of a batch that the objectives of data.module add. Opens no records."""
    row = None
    if data_group.module:
        row = look_up(data_group.task, data_group.module)
    members = {} if row is None else tasks_of(row)
    return objectives.own_features([task.objective_class for task in members.values()])


def features(data_group: ConfigDict) -> dict[str, tuple[int, str]]:
    """Return {feature of a batch: (length, dtype)}. Opens no records."""
    numbers, shares_rows = own_features(data_group)
    is_packed = shares_rows or data.PACKINGS[data_group.pack] is not None
    has_weights = bool(data_group.weight)
    empty = data.encoder_decoder([], data_group.lengths, is_packed, has_weights, numbers)
    return {name: (x.shape[1], x.dtype.name) for name, x in empty.items()}


def own_tasks(module: str) -> dict[str, Task | Mixture]:
    """Return {name: task or mixture} of the list TASKS in data.module; {} if that is ''."""
    if not module:
        return {}
    file = user_code.module_file('data.module', module)
    rows = getattr(user_code.load_module(file, file.read_bytes()), 'TASKS', None)
    if not isinstance(rows, list | tuple):
        raise Refused(f'{file} has no list TASKS: write TASKS = [Task(...), Mixture(...)]')
    by_name: dict[str, Task | Mixture] = {}
    for entry in rows:
        is_new = entry.name not in by_name and entry.name not in OBJECTIVES
        assert is_new, f'{file}: two tasks have the name {entry.name!r}: rename one'
        by_name[entry.name] = entry
    return by_name


def takes_documents(objective: str) -> bool:
    """Return whether an objective makes examples from documents."""
    return objective in OBJECTIVES and 'inputs' not in OBJECTIVES[objective].features


def unknown(name: str, module: str, what: str, where: str = '') -> Refused:
    """Return the error for an unknown task, with the nearest names. `where`: other places searched."""
    names = [*table(), *own_tasks(module), *filter(takes_documents, OBJECTIVES)]
    nearest = ', '.join(difflib.get_close_matches(name, names, n=3, cutoff=0))
    return Refused(f"{what} is unknown{where}: use {nearest}, or another name of '--mode=tasks'")
