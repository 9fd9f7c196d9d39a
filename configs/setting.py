"""A setting: its default, and the values that it may have. Imports no jax."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from messages import Refused

Value = bool | int | float | str | tuple

INT32_MAX = 2**31 - 1  # steps and token ids are int32
LARGEST_FLOAT = 1e30  # float32's largest is not much larger


class Range(NamedTuple):
    """The numbers from `low` to `high`, both included unless they are in `without`."""

    low: float
    high: float
    without: tuple[float, ...] = ()

    def holds(self, value: float) -> bool:
        """Return whether `value` is in the range; nan and infinities are in none."""
        return self.low <= value <= self.high and value not in self.without

    def __str__(self) -> str:
        low = 'above' if self.low in self.without else 'at least'
        high = 'below' if self.high in self.without else 'at most'
        if self.low < 0 and self.without:
            return f'{self.low}, or at least 1 and at most {self.high:,}'
        if self.high == LARGEST_FLOAT:
            return f'{low} {self.low:g} and finite'
        return f'{low} {self.low:,} and {high} {self.high:,}'


class Setting(NamedTuple):
    """A setting: its default, and the range of a number or the choices of a text."""

    default: Value
    range: Range | None = None
    choices: Sequence[str] = ()


STEPS = Range(1, INT32_MAX)
STEPS_OR_NONE = Range(0, INT32_MAX)
SIZE = Range(1, 2**20)
LAYERS = Range(1, 1000)
WINDOW = Range(4, 10_000)
NOT_NEGATIVE = Range(0, LARGEST_FLOAT)
POSITIVE = Range(0, LARGEST_FLOAT, without=(0,))
FRACTION = Range(0, 1)
BELOW_ONE = Range(0, 1, without=(1,))
DEVICES = Range(-1, 2**20, without=(0,))

# The names of types in messages.
KINDS: dict[type, str] = {
    bool: 'true or false',
    int: 'a whole number',
    float: 'a number',
    str: 'text',
    tuple: 'values in parentheses',
}


def check_allowed(
    key: str,
    value: Value,
    default: Value,
    limits: Range | None,
    choices: Collection[Value] | None = None,
) -> None:
    """Refuse a `value` that has not the type of `default` or is outside of the range or the choices."""
    if not has_type_of(default, value):
        raise Refused(f'{key}={value!r}: {kind_of(default)}')
    if limits is not None and isinstance(value, int | float) and not limits.holds(value):
        raise Refused(f'{key}={value}: must be {limits}; the default is {default!r}')
    if choices and value not in choices:
        raise Refused(f'{key}={value!r}: must be one of {", ".join(map(repr, choices))}')


def kind_of(default: Value) -> str:
    """Return the rule for the type of a setting, for a message about a value that breaks it."""
    example = ('a', 'b') if default == () else default
    return f'must be {KINDS[type(default)]}, such as {example!r}'


def has_type_of(default: Value, value: object) -> bool:
    """Return whether `value` has the type of `default`: an int may stand for a float, a list for a tuple."""
    if isinstance(default, bool) or isinstance(value, bool):
        return type(value) is type(default)
    others = {float: int, tuple: list}
    return isinstance(value, (type(default), others.get(type(default), type(default))))
