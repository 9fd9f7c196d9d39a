"""benchmarks/scaling.py on few points: its tables, its exponents and its figure."""

import re
import xml.etree.ElementTree as ElementTree

import jax
import pytest
from benchmark_scripts import assert_refuses, run

from prepare import make_spec

SCRIPT = 'scaling.py'


@pytest.mark.long
@pytest.mark.slow
def test_tables_and_figure(tmp_path):
    svg = tmp_path / 'figure.svg'
    done = run(SCRIPT, '--points=3', '--steps=1', '--axes=length,no attention', f'--svg={svg}')
    assert done.returncode == 0, done.stderr
    points, exponents = done.stdout.split('\n\n')
    values = {}
    for line in points.splitlines()[2:]:
        *axis, value, seconds, _, gigabytes, _, _, _ = line.split()
        assert float(seconds) > 0
        values.setdefault(' '.join(axis), []).append((int(value), float(gigabytes)))
    assert list(values) == ['length', 'no attention']
    assert [value for value, _ in values['length']] == [128, 256, 512]
    for (_, whole), (_, without) in zip(values['length'], values['no attention'], strict=True):
        assert without < whole
    slopes = {}
    for line in exponents.splitlines()[1:-1]:
        axis, first, last, _, slope = re.split(' {2,}', line)
        assert (int(first), int(last)) == (values[axis][0][0], values[axis][-1][0])
        slopes[axis] = float(slope)
    assert slopes['no attention'] < slopes['length']
    figure = ElementTree.fromstring(svg.read_text())
    curves = figure.findall('.//{*}path[@d]')
    names = [x.get('class') for x in curves if x.get('class').startswith('curve')]
    assert names == ['curve first', 'curve second'] * 2


def test_exponent(benchmark):
    def point(value):
        return benchmark.Point(value, [9e9, value**1.5, 0.0], 1e9 * value**2, 0, 0.0)

    points = [point(1)._replace(seconds=[1e6], step_bytes=1e15)]  # before the last two doublings
    points += [point(2), point(4), point(8)]
    assert benchmark.exponent('length', points, benchmark.seconds_of) == pytest.approx(1.5)
    assert benchmark.exponent('length', points, benchmark.gigabytes_of) == pytest.approx(2)


@pytest.mark.slow
def test_only_the_axis_grows(benchmark):
    def sizes(axis, value):
        config = benchmark.config_of(axis, value)
        spec = make_spec(config, devices=jax.devices()[:1])
        return (
            config.train.batch_size,
            spec.feature_lengths['encoder_input_tokens'],
            spec.feature_lengths['decoder_target_tokens'],
            config.model.num_encoder_layers,
            config.model.num_decoder_layers,
            config.model.vocab_size,
        )

    assert sizes('batch', 16) == (16, 512, 128, 2, 2, 8192)
    assert sizes('length', 1024) == sizes('no attention', 1024) == (1, 1024, 256, 2, 2, 8192)
    assert sizes('depth', 8) == (4, 512, 128, 8, 8, 8192)
    assert sizes('vocabulary', 4096) == (4, 512, 128, 2, 2, 4096)
    assert sizes('local', 4096) == sizes('global', 4096) == (1, 4096, 128, 2, 2, 8192)


@pytest.mark.slow
def test_refuses():
    assert_refuses(SCRIPT, '--axes=width', '--axes')
