"""Figures of several panels as SVG, which the benchmarks write for docs/."""

import html
from collections.abc import Sequence
from typing import NamedTuple

import chart

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
circle { fill: #fff; }
"""


class Panel(NamedTuple):
    title: str
    drawing: chart.Drawing
    curves_fall: bool = False  # names then go above them, on the right


def svg(rows: Sequence[Sequence[Panel]]) -> str:
    """Return a figure of rows of panels."""
    width = chart.WIDTH * max(map(len, rows))
    height = len(rows) * (chart.HEIGHT + 20)
    parts = []
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            position = f'{j * chart.WIDTH} {i * (chart.HEIGHT + 20) + 20}'
            parts.append(f'<g transform="translate({position})">{svg_of_panel(panel)}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f'<style>{STYLE}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n'
        + '\n'.join(parts)
        + '\n</svg>\n'
    )


def svg_of_panel(panel: Panel) -> str:
    middle = chart.WIDTH / 2
    lines = [f'<text class="title" x="{middle}" y="-2">{html.escape(panel.title)}</text>']
    for y, text in panel.drawing.y_ticks:
        lines.append(f'<path class="grid" d="M{chart.LEFT} {y}H{chart.RIGHT}"/>')
        lines.append(f'<text class="y" x="{chart.LEFT - 6}" y="{y + 3.5:.1f}">{text}</text>')
    lines.append(f'<path class="axis" d="M{chart.LEFT} {chart.BOTTOM}H{chart.RIGHT}"/>')
    for x, text in panel.drawing.x_ticks:
        lines.append(f'<path class="axis" d="M{x} {chart.BOTTOM}v4"/>')
        lines.append(f'<text class="x" x="{x}" y="{chart.BOTTOM + 17}">{text}</text>')
    first_name = chart.BOTTOM - 14 * len(panel.drawing.lines)
    if panel.curves_fall:
        first_name = chart.TOP + 8
    for i, line in enumerate(panel.drawing.lines):
        y = first_name + 14 * i
        lines.append(f'<path class="curve {line.css_class}" d="M{chart.RIGHT - 160} {y}h20"/>')
        name = html.escape(line.name)
        lines.append(f'<text x="{chart.RIGHT - 134}" y="{y + 3.5}">{name}</text>')
        lines.append(f'<path class="curve {line.css_class}" d="{line.path}"/>')
        for left, top in line.dots:
            lines.append(f'<circle class="{line.css_class}" cx="{left}" cy="{top}" r="2.4"/>')
    return '\n'.join(lines)
