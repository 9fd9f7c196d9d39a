"""Tasks by name, and mixtures of them: names with rates. Imports no jax."""

import dataclasses
import math
from collections.abc import Callable, Mapping

# A number, or a function from the number of examples of a task.
Rate = float | Callable[[int], float]


def proportional(
    maximum: float | None = None, temperature: float = 1.0, scale: float = 1.0
) -> Callable[[int], float]:
    """Return the rate of a task by its number of examples.

    That is min(examples * scale, maximum)^(1 / temperature): the limit comes before the
    temperature. Source: seqio/utils.py `mixing_rate_num_examples`; T5 (Raffel et al. 2020) §3.5.2.
    """
    settings = {'maximum': maximum, 'temperature': temperature, 'scale': scale}
    for name, value in settings.items():
        if value is not None and not value > 0:
            raise ValueError(f'{name}={value}: must be above 0')

    def rate(num_examples: int) -> float:
        limited = num_examples * scale
        if maximum is not None:
            limited = min(limited, maximum)
        return limited ** (1 / temperature)

    return rate


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Tasks and mixtures with rates. Of a mixture within, the tasks share its rate."""

    name: str
    members: Mapping['str | Mixture', Rate]

    def rates(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return the rate of each task, not normalized, the same task's rates summed.

        `sizes`: the number of examples of each task whose rate depends on it. Raises ValueError for
        a rate that is no number of 0 or more, and if all are 0.
        """
        total: dict[str, float] = {}
        for member, rate in self.members.items():
            if isinstance(member, Mixture):
                shares = member.shares(sizes)
                weight = self.weight_of(member, rate)
            else:
                shares = {member: 1.0}
                weight = self.rate_of(member, rate, sizes)
            for task, share in shares.items():
                total[task] = total.get(task, 0.0) + weight * share
        if not total:
            raise ValueError(f'mixture {self.name!r} has no task: name one with its rate')
        if not any(total.values()):
            raise ValueError(f'mixture {self.name!r}: all rates are 0: give one task a rate')
        return total

    def shares(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return the rates divided by their sum."""
        rates = self.rates(sizes)
        total = sum(rates.values())
        return {task: rate / total for task, rate in rates.items()}

    def weight_of(self, mixture: 'Mixture', rate: Rate) -> float:
        """Return the rate of a mixture within this one."""
        if callable(rate):
            raise ValueError(
                f'mixture {self.name!r}: the rate of mixture {mixture.name!r} depends on a number '
                'of examples: give it a number'
            )
        return self.checked(f'mixture {mixture.name!r}', rate)

    def rate_of(self, task: str, rate: Rate, sizes: Mapping[str, int]) -> float:
        """Return the rate of a task as a number."""
        if not callable(rate):
            return self.checked(repr(task), rate)
        if task not in sizes:
            raise ValueError(
                f'mixture {self.name!r}: {task!r} has a rate by its number of examples, which is '
                'unknown: cache the task, or give it a number'
            )
        return self.checked(repr(task), rate(sizes[task]))

    def checked(self, member: str, rate: float) -> float:
        """Return `rate`, or raise ValueError."""
        if not (math.isfinite(rate) and rate >= 0):
            raise ValueError(
                f'mixture {self.name!r}: the rate of {member} is {rate}: use a finite number, 0 or '
                'more'
            )
        return float(rate)
