"""Curves over steps as SVG: axes, ticks, and lines that are thinned to what a figure can show.

A figure is an element of xml.etree, so that every name is escaped. Colors are left to CSS: the
curves of a run have its class. Knows no runs and no files.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.etree import ElementTree

# Sizes in units of the figure, which is scaled to the width of the page.
WIDTH = 380
HEIGHT = 220
LEFT = 48
RIGHT = 356  # the last label of the steps, such as '1.00005M', reaches beyond it
TOP = 10
BOTTOM = 194
MOST_DOTS = 20  # Curves of up to so many points show each of them.
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


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` of the points, at least 4.

    They are the first and the last one, and the lowest and the highest of equal parts between.
    """
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
    kept.append(points[-1])
    return kept


class Axis(NamedTuple):
    """A range of values, and where it lies in the figure."""

    low: float
    high: float
    ticks: list[float]
    begin: float  # where `low` is
    end: float  # where `high` is
    is_logarithmic: bool

    def position(self, value: float) -> float:
        """Return where a value is in the figure."""
        if self.is_logarithmic:
            fraction = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            fraction = (value - self.low) / (self.high - self.low)
        return self.begin + fraction * (self.end - self.begin)


def make_axis(values: Sequence[float], begin: float, end: float, is_logarithmic: bool) -> Axis:
    """Return an axis that holds all values."""
    low = min(values)
    high = max(values)
    if high - low <= 1e-5 * abs(high):  # no label could tell them apart
        margin = abs(low) / 10 or 1.0
        low -= margin
        high += margin
    if is_logarithmic:
        ticks = logarithmic_ticks(low, high)
    else:
        ticks = linear_ticks(low, high)
    return Axis(low, high, ticks, begin=begin, end=end, is_logarithmic=is_logarithmic)


def linear_ticks(low: float, high: float) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10((high - low) / NUM_TICKS))
    for multiple in (1, 2, 5, 10):
        distance = multiple * power
        if (high - low) / distance <= NUM_TICKS:
            break
    first = math.ceil(low / distance - 1e-9)
    last = math.floor(high / distance + 1e-9)
    return [i * distance for i in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, with their doubles and fives on a short axis.

    On a very short one they are the linear ticks.
    """
    decades = math.log10(high / low)
    multiples = [1.0]
    if decades < 2:
        multiples = [1.0, 2.0, 5.0]
    every = math.ceil(decades / NUM_TICKS)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = []
    for exponent, multiple in itertools.product(exponents, multiples):
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
    if abs(value) < 1e-12:
        return '0'
    return f'{value:,.6g}'


def format_value(value: float) -> str:
    """Return a number of four digits, or all digits before the point."""
    if abs(value) >= 1000:
        return f'{value:,.0f}'
    return f'{value:.4g}'


def can_be_logarithmic(curves: Sequence[Curve]) -> bool:
    """Return whether all steps and values are positive."""
    return all(min(point) > 0 for curve in curves for point in curve.points)


def draw(
    title: str, curves: Sequence[Curve], from_zero: bool = False, is_logarithmic: bool = False
) -> ElementTree.Element:
    """Return the SVG of curves. With `from_zero` the linear axis of values includes 0."""
    steps = [point.step for curve in curves for point in curve.points]
    values = [point.value for curve in curves for point in curve.points]
    if from_zero and not is_logarithmic:
        values.append(0)
    if max(steps) > 5 * min(steps) > 0 and not is_logarithmic:
        steps.append(0)  # the run began there
    x_axis = make_axis(steps, LEFT + 4, RIGHT - 4, is_logarithmic)
    y_axis = make_axis(values, BOTTOM - 4, TOP + 4, is_logarithmic)
    attributes = {
        'class': 'logarithmic' if is_logarithmic else 'linear',
        'viewBox': f'0 0 {WIDTH} {HEIGHT}',
        'role': 'img',
        'tabindex': '0',
        'aria-label': describe(title, curves),
    }
    svg = ElementTree.Element('svg', attributes)
    add_axes(svg, x_axis, y_axis)
    for curve in curves:
        add_curve(svg, curve, x_axis, y_axis)
    return svg


def describe(title: str, curves: Sequence[Curve]) -> str:
    """Return what a figure shows, for who cannot see it."""
    sentences = [title]
    for curve in curves:
        first = curve.points[0]
        last = curve.points[-1]
        sentences.append(
            f'{curve.name}: {format_value(first.value)} at step {first.step:,}, '
            f'{format_value(last.value)} at step {last.step:,}'
        )
    return '. '.join(sentences)


def add_axes(svg: ElementTree.Element, x_axis: Axis, y_axis: Axis) -> None:
    """Add a thin line at each tick of the values, and the axis of the steps."""
    for tick in y_axis.ticks:
        y = round(y_axis.position(tick), 1)
        add_line(svg, 'grid', LEFT, y, RIGHT, y)
        add_label(svg, 'y', LEFT - 6, y + 3.5, format_tick(tick))
    add_line(svg, 'axis', LEFT, BOTTOM, RIGHT, BOTTOM)
    for tick in x_axis.ticks:
        if tick != round(tick):
            continue  # a step is a whole number
        x = round(x_axis.position(tick), 1)
        add_line(svg, 'axis', x, BOTTOM, x, BOTTOM + 4)
        add_label(svg, 'x', x, BOTTOM + 17, format_tick(tick))


def add_line(
    svg: ElementTree.Element, css_class: str, x1: float, y1: float, x2: float, y2: float
) -> None:
    path = f'M{x1} {y1}L{x2} {y2}'
    ElementTree.SubElement(svg, 'path', {'class': css_class, 'd': path})


def add_label(svg: ElementTree.Element, css_class: str, x: float, y: float, text: str) -> None:
    attributes = {'class': css_class, 'x': f'{x:.1f}', 'y': f'{y:.1f}'}
    ElementTree.SubElement(svg, 'text', attributes).text = text


def add_curve(svg: ElementTree.Element, curve: Curve, x_axis: Axis, y_axis: Axis) -> None:
    """Add the line of a curve, and its points if they are few.

    The script reads steps and values from the line of the linear figure.
    """
    places = []
    for point in curve.points:
        x = x_axis.position(point.step)
        y = y_axis.position(point.value)
        places.append(f'{x:.1f} {y:.1f}')
    attributes = {
        'class': f'curve {curve.css_class}{" dashed" if curve.is_dashed else ""}',
        'd': 'M' + 'L'.join(places),
        'data-name': curve.name,
    }
    if not x_axis.is_logarithmic:
        attributes['data-steps'] = ' '.join(str(point.step) for point in curve.points)
        attributes['data-values'] = ' '.join(f'{point.value:.5g}' for point in curve.points)
    ElementTree.SubElement(svg, 'path', attributes)
    if curve.is_dashed or len(curve.points) > MOST_DOTS:
        return
    for place in places:
        x_text, y_text = place.split()
        dot = {'class': f'dot {curve.css_class}', 'cx': x_text, 'cy': y_text, 'r': '2.4'}
        ElementTree.SubElement(svg, 'circle', dot)
