"""The files in launch/: a stub scheduler runs the batch script, and the flags of all exist."""

import os
import re
import subprocess
import sys

import pytest
from absl import flags
from runs import ENVIRONMENT, ROOT, Program, assert_close_runs, run, small_config

import main  # noqa: F401  defines the flags

# As SLURM's srun: starts the command once for each task of the job, on one host, and returns the
# highest status.
SRUN = """#!{python}
import os, subprocess, sys
command = [word for word in sys.argv[1:] if not word.startswith('--kill')]
num_nodes = int(os.environ['SLURM_NNODES'])
num_tasks = num_nodes * int(os.environ['SLURM_NTASKS_PER_NODE'])
tasks = []
for number in range(num_tasks):
    of_task = {{
        'SLURM_STEP_NODELIST': 'localhost',
        'SLURM_STEP_NUM_NODES': num_nodes,
        'SLURM_STEP_NUM_TASKS': num_tasks,
        'SLURM_NTASKS': num_tasks,
        'SLURM_PROCID': number,
        'SLURM_LOCALID': number * num_nodes // num_tasks,
    }}
    of_task = {{name: str(value) for name, value in of_task.items()}}
    tasks.append(subprocess.Popen(command, env=os.environ | of_task))
sys.exit(max(task.wait() for task in tasks))
"""
PYTHON = '#!/bin/sh\nexec {python} "$@"\n'


def sbatch(script, folder, *arguments):
    """Run a batch script as SLURM does, in the checkout, with stubs for its commands."""
    stubs = folder / 'bin'
    stubs.mkdir()
    for name, text in (('srun', SRUN), ('python', PYTHON)):
        (stubs / name).write_text(text.format(python=sys.executable))
        (stubs / name).chmod(0o755)
    options = dict(re.findall(r'^#SBATCH --([\w-]+)=(.*)$', script.read_text(), re.MULTILINE))
    of_job = {
        'SLURM_JOB_ID': str(os.getpid()),
        'TF_CPP_MIN_LOG_LEVEL': '3',  # the config imports JAX, before main.py sets it
        'SLURM_NNODES': options['nodes'],
        'SLURM_NTASKS_PER_NODE': options['ntasks-per-node'],
        'SLURM_CPUS_PER_TASK': options['cpus-per-task'],
        'PATH': f'{stubs}:{os.environ["PATH"]}',
        'XLA_FLAGS': f'{ENVIRONMENT["XLA_FLAGS"]} --xla_force_host_platform_device_count=4',
    }
    return subprocess.run(
        ['bash', script, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT | of_job,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_the_batch_script_trains_on_two_nodes(corpus, tmp_path):
    program = Program(tmp_path, corpus, steps=3, log=1, save=3, evaluate=3, dropout_rate=0.1)
    workdir = tmp_path / 'run'
    mesh = ['--config.mesh.data=4', '--config.mesh.model=2']
    done = sbatch(ROOT / 'launch' / 'slurm.sh', tmp_path, *program.arguments(workdir), *mesh)
    assert (done.returncode, done.stderr) == (0, '')
    assert "8 cpu device(s), {'data': 4, 'fsdp': 1, 'model': 2}" in done.stdout
    assert done.stdout.count('Compiled in') == 1
    alone = run(small_config(corpus, steps=3, data_axis=4, model_axis=2), tmp_path / 'alone')
    assert_close_runs(workdir, alone, 3)


FILES = sorted((ROOT / 'launch').iterdir(), key=lambda file: file.name)


@pytest.mark.parametrize('file', FILES, ids=lambda file: file.name)
def test_flags_and_configs_exist(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 60  # a page
    for config in re.findall(r'--config=(configs/\w+\.py)', text):
        assert (ROOT / config).is_file()
    for flag in re.findall(r'--([a-z]+_[a-z_]+)', text):  # those of other programs have hyphens
        assert flag in flags.FLAGS, flag
