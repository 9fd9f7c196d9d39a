"""Curves over steps as SVG: axes, ticks, and lines thinned to the resolution of a figure."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

# Sizes of a panel in units of the figure, which is scaled to the width of the page.
WIDTH = 380
HEIGHT = 240
LEFT = 48
RIGHT = 356  # leaves room for the last label of the steps
TOP = 30  # leaves room for the title
BOTTOM = 214
NUM_TICKS = 6
STYLE = """
text { font: 11px sans-serif; fill: #333; }
.y { text-anchor: end; }
.x, .title { text-anchor: middle; }
.grid { stroke: #ddd; }
.axis { stroke: #888; }
.curve { fill: none; stroke-width: 1.6; }
.first { stroke: #0b62a4; }
.second { stroke: #c2571a; }
.third { stroke: #4a8f29; }
.fourth { stroke: #999; }
.dashed { stroke-dasharray: 4 4; }
"""


class Point(NamedTuple):
    step: float
    value: float


class Curve(NamedTuple):
    """The values of a metric, by step."""

    name: str
    css_class: str
    points: Sequence[Point]
    is_dashed: bool = False


class Panel(NamedTuple):
    title: str
    curves: Sequence[Curve]
    is_logarithmic: bool = False  # both axes
    curves_fall: bool = False  # the names are then above them, on the right


def svg(*panels: Panel) -> str:
    """Return a figure of panels, from left to right."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}" role="img">',
        f'<style>{STYLE}</style>',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for i, panel in enumerate(panels):
        lines.append(f'<g transform="translate({i * WIDTH} 0)">')
        lines += lines_of(panel)
        lines.append('</g>')
    return '\n'.join([*lines, '</svg>\n'])


def lines_of(panel: Panel) -> list[str]:
    """Return the elements of a panel."""
    points = [point for curve in panel.curves for point in curve.points]
    steps = [point.step for point in points]
    if not panel.is_logarithmic:
        steps.append(0)
    x_axis = make_axis(steps, LEFT + 4, RIGHT - 4, panel.is_logarithmic)
    values = [point.value for point in points]
    y_axis = make_axis(values, BOTTOM - 4, TOP + 4, panel.is_logarithmic)
    lines = [f'<text class="title" x="{WIDTH / 2}" y="18">{html.escape(panel.title)}</text>']
    for tick in y_axis.ticks:
        y = y_axis.position(tick)
        lines.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
        lines.append(f'<text class="y" x="{LEFT - 6}" y="{y + 3.5:.1f}">{format_tick(tick)}</text>')
    lines.append(f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    for tick in x_axis.ticks:
        x = x_axis.position(tick)
        lines.append(f'<path class="axis" d="M{x:.1f} {BOTTOM}v4"/>')
        lines.append(f'<text class="x" x="{x:.1f}" y="{BOTTOM + 17}">{format_tick(tick)}</text>')
    first_name = TOP + 8 if panel.curves_fall else BOTTOM - 14 * len(panel.curves)
    for i, curve in enumerate(panel.curves):
        css_class = f'curve {curve.css_class}'
        if curve.is_dashed:
            css_class += ' dashed'
        y = first_name + 14 * i
        lines.append(f'<path class="{css_class}" d="M{RIGHT - 160} {y}h20"/>')
        lines.append(f'<text x="{RIGHT - 134}" y="{y + 3.5}">{html.escape(curve.name)}</text>')
        positions = []
        for point in curve.points:
            x = x_axis.position(point.step)
            positions.append(f'{x:.1f} {y_axis.position(point.value):.1f}')
        lines.append(f'<path class="{css_class}" d="M{"L".join(positions)}"/>')
    return lines


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` >= 4 points: first, last, and the lowest and highest of equal parts between them."""
    if len(points) <= most:
        return list(points)
    inner = points[1:-1]
    num_parts = (most - 2) // 2
    sample = [points[0]]
    for i in range(num_parts):
        begin = i * len(inner) // num_parts
        end = (i + 1) * len(inner) // num_parts
        part = inner[begin:end]
        lowest = min(part, key=lambda point: point.value)
        highest = max(part, key=lambda point: point.value)
        sample += sorted({lowest, highest})
    return [*sample, points[-1]]


class Axis(NamedTuple):
    """A range of values, and its position in the panel."""

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


def make_axis(values: Sequence[float], begin: float, end: float, is_logarithmic: bool) -> Axis:
    """Return an axis that holds all values."""
    low = min(values)
    high = max(values)
    if low == high:
        high += 1e-9
    ticks = logarithmic_ticks(low, high) if is_logarithmic else linear_ticks(low, high)
    return Axis(low, high, ticks, begin, end, is_logarithmic)


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
    """Return powers of ten."""
    every = math.ceil(math.log10(high / low) / NUM_TICKS)
    exponents = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return [10.0**exponent for exponent in exponents if exponent % every == 0]


def format_tick(value: float) -> str:
    """Return a short text: 0.05, 1,200, 1e-7."""
    if 0 < value < 1e-4:
        return f'{value:.6g}'.replace('e-0', 'e-')
    return f'{value:,.6g}'
