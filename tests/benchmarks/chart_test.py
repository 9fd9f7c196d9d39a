"""benchmarks/chart.py: thinning, ticks, and curves within their axes."""

import math
import re

import pytest

SCRIPT = 'chart.py'


@pytest.mark.parametrize('most', [4, 10, 600])
def test_thinning_keeps_the_ends_and_extremes(benchmark, most):
    points = [benchmark.Point(7 * i, math.sin(i * i) + i / 1000) for i in range(601)]
    thinned = benchmark.thin(points, most)
    assert most / 2 < len(thinned) <= most and set(thinned) <= set(points)
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    for choose in (min, max):
        assert choose(points, key=lambda point: point.value) in thinned


@pytest.mark.parametrize('is_logarithmic', [False, True])
@pytest.mark.parametrize('values', [[1.0], [3.0, 3.0], [1e30, 2.0], [1e-6, 1.0, 1e6], [5.9, 7.2]])
def test_a_curve_lies_within_its_axes(benchmark, values, is_logarithmic):
    points = [benchmark.Point(i, x) for i, x in enumerate(values, start=1)]
    drawing = benchmark.draw([benchmark.Curve('a', 'first', points)], is_logarithmic)
    [line] = drawing.lines
    places = re.findall(r'[ML]([-\d.]+) ([-\d.]+)', line.path)
    xs = [float(x) for x, _ in places]
    ys = [float(y) for _, y in places]
    assert xs == sorted(xs) and benchmark.LEFT <= xs[0] and xs[-1] <= benchmark.RIGHT
    assert benchmark.TOP <= min(ys) and max(ys) <= benchmark.BOTTOM
    assert [y for _, y in sorted(zip(values, ys, strict=True))] == sorted(ys, reverse=True)
    for ticks in (drawing.x_ticks, drawing.y_ticks):
        labels = [text for _, text in ticks]
        assert 1 <= len(labels) <= 8 and len(labels) == len(set(labels)), labels


def test_ticks(benchmark):
    assert benchmark.linear_ticks(4.7, 7.3) == [5, 5.5, 6, 6.5, 7]
    assert benchmark.logarithmic_ticks(1, 1200) == [1, 10, 100, 1000]
    texts = [benchmark.format_tick(x) for x in (0, 0.05, 1200, 20_000, 1.5e6, 2e-5, -3)]
    assert texts == ['0', '0.05', '1,200', '20k', '1.5M', '2e-5', '-3']
