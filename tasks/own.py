"""A user's own file of tasks: a Python file with a list TASKS. Imports no jax."""

import user_code
from tasks.mixtures import Mixture, Task
from tasks.objectives import OBJECTIVES


def own_tasks(module: str) -> dict[str, Task | Mixture]:
    """Return {name: task or mixture} of the list TASKS in data.module; none if that is ''."""
    if not module:
        return {}
    file = user_code.module_file('data.module', module)
    found = getattr(user_code.load_module(file, file.read_bytes()), 'TASKS', None)
    if not isinstance(found, list | tuple):
        raise ValueError(f'{file} has no list TASKS: write TASKS = [Task(...), Mixture(...)]')
    named: dict[str, Task | Mixture] = {}
    for entry in found:
        if not isinstance(entry, Task | Mixture):
            raise ValueError(f'{file}: TASKS has {entry!r:.40}: use tasks.Task and tasks.Mixture')
        if entry.name in named or entry.name in OBJECTIVES:
            raise ValueError(f'{file}: two tasks have the name {entry.name!r}: rename one')
        named[entry.name] = entry
    return named
