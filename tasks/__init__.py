"""Tasks and mixtures by name: `get`, and the types for your own. Imports no jax."""

from tasks.mixtures import Mixture, Task, proportional

__all__ = ['Mixture', 'Task', 'get', 'proportional']


def get(name: str, module: str = '') -> Task | Mixture:
    """Return the task or mixture of a name; all names in a mixture are looked up.

    `module`: a Python file with a list TASKS of your own. Raises Refused for a name that does not
    exist, with the nearest ones.
    """
    from tasks import names  # late: T5's tables take a tenth of a second

    row = names.look_up(name, module)
    if row is None:
        raise names.unknown(name, module, f'data.task={name!r}')
    return row
