"""How many bytes a step moves on a GPU that is not here."""

import re
from importlib.util import find_spec

import pytest
from benchmarks.scripts_test import run


@pytest.mark.slow
@pytest.mark.parametrize('pack, most', [('tightly', 124), ('no', 114)])
def test_a_step_of_four_layers_on_an_h200(pack, most, tmp_path):
    """Without the forms in kernels_gpu.py, 186 GB: no array has a number for each query and key of a row."""
    if not find_spec('jax_cuda12_plugin') and not find_spec('jax_cuda13_plugin'):
        pytest.skip("compiling for GPUs needs pip install -e '.[cuda]'")
    file = tmp_path / 'program'
    done = run('bytes.py', tmp_path, '--layers=2', f'--pack={pack}', f'--text={file}')
    assert done.returncode == 0, done.stderr
    [gigabytes] = re.findall(r'^\| base \| \S+ \| (\S+) \|', done.stdout, re.MULTILINE)
    assert float(gigabytes) <= most
    program = file.read_text()
    assert not re.findall(r'\[(?:256,12|3072),(?:512|114|120),(?:512|114|120)\]', program)
    assert 'threefry2x32_ffi' in program
