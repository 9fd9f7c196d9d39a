"""What tests of T5's, mT5's and T0's tasks compare with what the originals register."""

import functools

from tasks.mixtures import Mixture, Task


def name_of(function):
    """Return the name of a function or of the one that made it; '' for None."""
    if isinstance(function, functools.partial):
        function = function.func
    return getattr(function, '__qualname__', '').partition('.')[0]


def check_names_and_rates(golden, rows):
    """`golden`: 'tasks', and {mixture: {task: rate or 'by size'}} in 'mixtures'."""
    assert {x for x, row in rows.items() if isinstance(row, Task)} == golden['tasks'].keys()
    assert {x for x, row in rows.items() if isinstance(row, Mixture)} == golden['mixtures'].keys()
    for name, rates in golden['mixtures'].items():
        members = rows[name].members
        assert members.keys() == rates.keys()
        for task, rate in rates.items():
            assert callable(members[task]) if rate == 'by size' else members[task] == rate, task
