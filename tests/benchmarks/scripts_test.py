"""Every script of benchmarks/ starts from any folder."""

import subprocess
import sys

import pytest
from runs import ENVIRONMENT, ROOT

# Programs that another one runs, in a Python with the packages of a rival.
RIVALS = {'train_t5x.py', 'train_transformers.py', 'curve_t5x.py', 'quality_transformers.py'}
MODULES = {'figure.py', 'main_runs.py', 'no_attention.py'}
SCRIPTS = sorted(
    file.name for file in (ROOT / 'benchmarks').glob('*.py') if file.name not in RIVALS | MODULES
)


@pytest.mark.slow
@pytest.mark.parametrize('script', SCRIPTS)
def test_help(script, tmp_path):
    command = [sys.executable, str(ROOT / 'benchmarks' / script), '--help']
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert 'Traceback' not in done.stderr
    assert '--' in done.stdout
