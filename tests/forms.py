"""Which forms of a test are quick; the others are left to `pytest -m slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_quick(values: Iterable[Any], num_quick: int = 1) -> list[Any]:
    """Return values for pytest.mark.parametrize; all but the first `num_quick` are slow."""
    values = list(values)
    return values[:num_quick] + _slow(values[num_quick:])


def every_second_quick(values: Iterable[Any]) -> list[Any]:
    """Return values for pytest.mark.parametrize; every second one is slow."""
    values = list(values)
    return values[::2] + _slow(values[1::2])


def _slow(values):
    params = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        params.append(pytest.param(*arguments, marks=pytest.mark.slow))
    return params
