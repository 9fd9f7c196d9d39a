"""Curves over steps: axes, ticks, and lines that are thinned to what a figure can show.

report.html writes them as SVG. Colors are left to CSS: the curves of a run have its class. Knows no
runs and no files.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

# Sizes in units of the figure, which is scaled to the width of the page.
WIDTH = 380
HEIGHT = 220
LEFT = 48
RIGHT = 356  # leaves room for the last label of the steps, such as '1.00005M'
TOP = 10
BOTTOM = 194
MOST_DOTS = 20  # a curve with more points is a line alone
NUM_TICKS = 6


class Point(NamedTuple):
    step: int
    value: float  # finite


class Curve(NamedTuple):
    """The values of a metric, by step."""

    name: str
    css_class: str
    points: Sequence[Point]  # at least one
    is_dashed: bool = False

    @property
    def last(self) -> Point:
        return self.points[-1]


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` >= 4 points: first, last, lowest and highest of equal parts between."""
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    num_parts = (most - 2) // 2
    kept = [points[0]]
    for part in range(num_parts):
        begin = part * len(inner) // num_parts
        end = (part + 1) * len(inner) // num_parts
        of_part = inner[begin:end]
        lowest = min(of_part, key=lambda point: point.value)
        highest = max(of_part, key=lambda point: point.value)
        kept += sorted({lowest, highest})
    return [*kept, points[-1]]


class Axis(NamedTuple):
    """A range of values, and where it lies in the figure."""

    low: float
    high: float
    ticks: list[float]
    begin: float  # the position of `low`
    end: float  # the position of `high`
    is_logarithmic: bool

    def position(self, value: float) -> float:
        if self.is_logarithmic:
            fraction = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            fraction = (value - self.low) / (self.high - self.low)
        return self.begin + fraction * (self.end - self.begin)

    def labels(self, ticks: Sequence[float]) -> list[tuple[float, str]]:
        """Return the positions of some ticks and their texts."""
        return [(round(self.position(tick), 1), format_tick(tick)) for tick in ticks]


def make_axis(values: Sequence[float], begin: float, end: float, is_logarithmic: bool) -> Axis:
    """Return an axis that holds all values."""
    low = min(values)
    high = max(values)
    if high - low <= 1e-5 * abs(high):  # no label could tell them apart
        margin = abs(low) / 10 or 1.0
        low -= margin
        high += margin
    make_ticks = linear_ticks
    if is_logarithmic:
        make_ticks = logarithmic_ticks
    return Axis(low, high, make_ticks(low, high), begin, end, is_logarithmic)


def linear_ticks(low: float, high: float) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / NUM_TICKS))
    for multiple in (1, 2, 5, 10):
        distance = multiple * power
        if (high - low) / distance <= NUM_TICKS:
            break
    multiples = range(math.ceil(low / distance - 1e-9), math.floor(high / distance + 1e-9) + 1)
    return [i * distance for i in multiples]


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, with doubles and fives on a short axis; linear ticks on a very short one."""
    decades = math.log10(high / low)
    multiples = [1.0]
    if decades < 2:
        multiples = [1.0, 2.0, 5.0]
    every = math.ceil(decades / NUM_TICKS)
    ticks = []
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for multiple in multiples:
            tick = multiple * 10.0**exponent
            if low <= tick <= high and exponent % every == 0:
                ticks.append(tick)
    if len(ticks) < 2:
        return linear_ticks(low, high)
    return ticks


def format_tick(value: float) -> str:
    """Return a short text: 0.05, 1,200, 20k, 1.5M."""
    if abs(value) >= 999_999:
        return f'{value / 1e6:.6g}M'
    if abs(value) >= 10_000:
        return f'{value / 1e3:.6g}k'
    if value and abs(value) < 1e-4:
        return f'{value:.6g}'.replace('e-0', 'e-')
    return f'{value:,.6g}'


def format_value(value: float) -> str:
    """Return a number of four digits, or all digits before the point."""
    if abs(value) >= 1000:
        return f'{value:,.0f}'
    return f'{value:.4g}'


def can_be_logarithmic(curves: Sequence[Curve]) -> bool:
    return all(min(point) > 0 for curve in curves for point in curve.points)


class Line(NamedTuple):
    """The line of a curve in a figure, as SVG has it."""

    name: str
    css_class: str
    path: str
    dots: Sequence[tuple[str, str]] = ()  # x and y, of a curve of few points
    steps: str = ''  # for the script, as `values`; the linear figure alone has them
    values: str = ''


class Drawing(NamedTuple):
    """A figure, which report.html writes as SVG. `x_ticks` and `y_ticks` have positions and labels."""

    css_class: str
    label: str  # a description for screen readers
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[Line]


def draw(
    title: str, curves: Sequence[Curve], from_zero: bool = False, is_logarithmic: bool = False
) -> Drawing:
    """Return the drawing of curves. With `from_zero` the linear axis of values includes 0."""
    steps = [point.step for curve in curves for point in curve.points]
    values = [point.value for curve in curves for point in curve.points]
    if from_zero and not is_logarithmic:
        values.append(0)
    if max(steps) > 5 * min(steps) > 0 and not is_logarithmic:
        steps.append(0)  # the run began there
    x_axis = make_axis(steps, LEFT + 4, RIGHT - 4, is_logarithmic)
    y_axis = make_axis(values, BOTTOM - 4, TOP + 4, is_logarithmic)
    sentences = [title]
    lines = []
    for curve in curves:
        first = curve.points[0]
        sentences.append(
            f'{curve.name}: {format_value(first.value)} at step {first.step:,}, '
            f'{format_value(curve.last.value)} at step {curve.last.step:,}'
        )
        positions = []
        for point in curve.points:
            x = x_axis.position(point.step)
            y = y_axis.position(point.value)
            positions.append((f'{x:.1f}', f'{y:.1f}'))
        path = 'M' + 'L'.join(' '.join(position) for position in positions)
        line = Line(curve.name, curve.css_class, path)
        if curve.is_dashed:
            line = line._replace(css_class=f'{curve.css_class} dashed')
        elif len(positions) <= MOST_DOTS:
            line = line._replace(dots=positions)
        if not is_logarithmic:
            line = line._replace(
                steps=' '.join(str(point.step) for point in curve.points),
                values=' '.join(f'{point.value:.5g}' for point in curve.points),
            )
        lines.append(line)
    return Drawing(
        css_class='logarithmic' if is_logarithmic else 'linear',
        label='. '.join(sentences),
        x_ticks=x_axis.labels([tick for tick in x_axis.ticks if tick == round(tick)]),  # steps
        y_ticks=y_axis.labels(y_axis.ticks),
        lines=lines,
    )
