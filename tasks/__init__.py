"""Tasks and mixtures by name: `get`, and what a row of your own is made of. Imports no jax."""

from configs import base
from tasks.mixtures import Mixture, Task, proportional
from tasks.open import look_up

__all__ = ['Mixture', 'Task', 'get', 'proportional']


def get(name: str, module: str = '') -> Task | Mixture:
    """Return the task or mixture of a name; all names in a mixture are looked up.

    `module`: a Python file with a list TASKS of your own. Raises ValueError for a name that does not
    exist, with the nearest ones.
    """
    config = base.get_config().data
    config.task = name
    config.module = module
    return look_up(name, config)
