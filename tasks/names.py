"""Looking a task or mixture up by its name: in a user's file, in T5's tables, among the objectives.

Imports no jax.
"""

import difflib
from collections.abc import Callable

import user_code
from messages import Refused
from tasks.mixtures import Mixture, Rate, Task
from tasks.objectives import OBJECTIVES
from tasks.t5 import table


def look_up(
    name: str,
    module: str,
    is_cached: Callable[[str], object] = lambda name: False,
    parents: tuple[str, ...] = (),
) -> Task | Mixture | None:
    """Return the task or mixture of a name, its members looked up as well; None if there is none.

    `module`: data.module. `is_cached`: tells whether there is a task cache of a name. `parents`: the
    mixtures that it is in. Raises Refused for a member that does not exist.
    """
    found = own_tasks(module).get(name) or table().get(name)
    if isinstance(found, Mixture):
        return with_members(found, module, is_cached, parents)
    if found is None and name in OBJECTIVES:
        return Task(name, objective=name)
    if found is None and is_cached(name):
        return Task(name)
    return found


def with_members(
    mixture: Mixture, module: str, is_cached: Callable[[str], object], parents: tuple[str, ...]
) -> Mixture:
    """Return a mixture whose members are looked up."""
    chain = ' > '.join([*parents, mixture.name])
    assert mixture.name not in parents, f'mixture {mixture.name!r} is in itself: {chain}'
    parents = (*parents, mixture.name)
    members: dict[str | Task | Mixture, Rate] = {}
    for member, rate in mixture.members.items():
        if isinstance(member, str):
            found = look_up(member, module, is_cached, parents)
            if found is None:
                raise unknown(member, module, f'task {member!r} of data.task={parents[0]!r}')
            member = found
        elif isinstance(member, Mixture):
            member = with_members(member, module, is_cached, parents)
        members[member] = rate
    return Mixture(mixture.name, members)


def own_tasks(module: str) -> dict[str, Task | Mixture]:
    """Return {name: task or mixture} of the list TASKS in data.module; none if that is ''."""
    if not module:
        return {}
    file = user_code.module_file('data.module', module)
    found = getattr(user_code.load_module(file, file.read_bytes()), 'TASKS', None)
    if not isinstance(found, list | tuple):
        raise Refused(f'{file} has no list TASKS: write TASKS = [Task(...), Mixture(...)]')
    named: dict[str, Task | Mixture] = {}
    for entry in found:
        is_new = entry.name not in named and entry.name not in OBJECTIVES
        assert is_new, f'{file}: two tasks have the name {entry.name!r}: rename one'
        named[entry.name] = entry
    return named


def takes_documents(objective: str) -> bool:
    """Return whether an objective makes examples of documents, which the settings name."""
    return objective in OBJECTIVES and 'inputs' not in OBJECTIVES[objective].features


def unknown(name: str, module: str, what: str, where: str = '') -> Refused:
    """Return the error for an unknown task; it has the nearest names. `where`: else it was looked for."""
    names = [*table(), *own_tasks(module), *filter(takes_documents, OBJECTIVES)]
    nearest = ', '.join(difflib.get_close_matches(name, names, n=3, cutoff=0))
    return Refused(f"{what} is unknown{where}: use {nearest}, or another name of '--mode=tasks'")
