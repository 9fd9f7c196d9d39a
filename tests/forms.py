"""Which forms of a test are quick; the others are left to `pytest -m slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_quick(values: Iterable[Any], num_quick: int = 1) -> list[Any]:
    """Return values for pytest.mark.parametrize; all but the first `num_quick` are slow."""
    values = list(values)
    return values[:num_quick] + slow(values[num_quick:])


def first_in_ci(values: Iterable[Any], num_in_ci: int = 1) -> list[Any]:
    """Return values of a slow test for pytest.mark.parametrize; CI runs the first `num_in_ci`."""
    values = list(values)
    return values[:num_in_ci] + marked(values[num_in_ci:], pytest.mark.long)


def slow(values: Iterable[Any]) -> list[Any]:
    """Return values for pytest.mark.parametrize, all of them slow."""
    return marked(values, pytest.mark.slow)


def marked(values: Iterable[Any], mark: pytest.MarkDecorator) -> list[Any]:
    """Return values for pytest.mark.parametrize, all of them with `mark`."""
    params = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        params.append(pytest.param(*arguments, marks=mark))
    return params
