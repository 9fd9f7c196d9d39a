"""modes/process.py: standard streams, huge pages, and that nothing else changes the process."""

import json
import os
import subprocess
import sys

import pytest
from forms import first_in_ci
from runs import ENVIRONMENT, ROOT

import checkpoint
from modes import errors, process

# Standard streams that are closed, on a full disk or a closed pipe: one line on stderr, no traceback.
T5X = ROOT / 'tests/golden/t5x_t5_1_1_tiny/checkpoint_6'
INFER = (
    f'--mode=infer --checkpoint={T5X} --config.data.vocabulary=bytes --config.decode.max_length=3'
)
TRAIN = f'--config={ROOT}/configs/tiny.py --config.train.steps=1 --config.data.vocabulary=bytes'
TRAIN += ' --config.eval.steps=1'
FULL = f'standard output: No space left on device: {errors.FULL_REMEDY}'


def shell(command, folder, **environment):
    """Run `python main.py COMMAND` in a shell, which redirects its streams."""
    return subprocess.run(
        ['bash', '-c', f'set -o pipefail; {sys.executable} {ROOT}/main.py {command}'],
        cwd=folder,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
    )


def test_random_numbers_of_gpus_come_from_a_kernel():
    """A name that JAX does not know would cost a GPU 70 % of the time to the first step, and say nothing."""
    read = 'import jax; print(jax.config.jax_threefry_gpu_kernel_lowering)'
    command = [sys.executable, '-c', f'from modes import process; process.begin(); {read}']
    found = subprocess.check_output(command, cwd=ROOT, env=ENVIRONMENT, text=True)
    assert found == 'True\n'


NOT_OPTIMIZED = 'Haiku needs assertions: run python without -O and PYTHONOPTIMIZE'


@pytest.mark.slow
@pytest.mark.parametrize('option', ['-O', '-OO'])
@pytest.mark.parametrize(
    'flags', [f'{TRAIN} --workdir=out', INFER, f'--mode=convert --from={T5X} --to=out']
)
def test_python_without_assertions_is_refused(tmp_path, option, flags):
    command = [sys.executable, option, f'{ROOT}/main.py', *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f'main.py: {NOT_OPTIMIZED}\n')
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_a_script_without_assertions_is_refused():
    program = f"import infer; infer.load('{T5X}')"
    environment = ENVIRONMENT | {'PYTHONOPTIMIZE': '1'}
    command = [sys.executable, '-c', program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith(f'Refused: {NOT_OPTIMIZED}\n')


@pytest.mark.slow
def test_a_closed_output_is_refused(tmp_path):
    """A file would get its number, and what libraries print."""
    done = shell('--mode=tasks >&-', tmp_path)
    assert (done.returncode, done.stderr.count('\n')) == (1, 1) and '/dev/null' in done.stderr


def test_an_output_on_a_full_disk_is_an_error(command_line, tmp_path):
    result = command_line.start('--mode=tasks', cwd=tmp_path, stdout='/dev/full').wait()
    assert (result.status, result.stderr.splitlines()[-1]) == (1, f'main.py: {FULL}')


@pytest.mark.slow
def test_inference_without_standard_input(tmp_path):
    (tmp_path / 'in.txt').write_text('a\nb\n')
    done = shell(f'{INFER} --input=in.txt <&-', tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 2
    done = shell(f'{INFER} --input=- <&-', tmp_path)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.startswith('main.py: --input=-') and done.stderr.count('\n') == 1


@pytest.mark.slow
@pytest.mark.parametrize('name', first_in_ci(['-', 'in.txt']))
def test_the_reader_of_answers_ends(tmp_path, name):
    (tmp_path / 'in.txt').write_text('a\n' * 20_000)
    command = f'{INFER} --config.decode.max_length=1 --config.decode.batch_size=512 --input={name}'
    done = shell(f'{command} < in.txt | head -1', tmp_path)
    assert done.returncode == 1 and json.loads(done.stdout)
    lines = done.stderr.splitlines()
    assert 'standard output: Broken pipe' in lines[-1] and 'Traceback' not in done.stderr


@pytest.mark.slow
def test_a_run_needs_no_reader(tmp_path):
    done = shell(f'{TRAIN} --workdir=run | head -1', tmp_path)
    assert (done.returncode, done.stderr) == (0, '')
    assert checkpoint.steps(tmp_path / 'run') == [1]


# The environment tells JAX what to use.


@pytest.mark.parametrize('platforms', ['cuda', 'nonsense'])
def test_platforms_that_are_not_here(tmp_path, platforms):
    done = shell(f'{TRAIN} --workdir=run', tmp_path, JAX_PLATFORMS=platforms)
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and not done.stdout and not list(tmp_path.iterdir())
    assert line.startswith(f'main.py: JAX_PLATFORMS={platforms}: ')


# Huge pages: when a program starts again, and that only its memory changes.

PROGRAM = """
import os, re, sys
sys.path.insert(0, sys.argv[1])
from modes import process
print('start')
sys.stdout.flush()
process.restart()
array = b'x' * 2**27
rollup = open('/proc/self/smaps_rollup').read()
huge = int(re.search(r'AnonHugePages: +(\\d+) kB', rollup)[1]) * 1024
print(os.getpid(), os.environ.get('GLIBC_TUNABLES'), huge // 2**20, sys.argv[2:], sys.stdin.read())
sys.exit(3)
"""
needs_huge_pages = pytest.mark.skipif(
    not process.is_supported(), reason='needs Linux with huge pages on madvise and glibc 2.35'
)


def run_program(tmp_path, *options, **environment):
    """Run PROGRAM as a user does. Return what it prints, by words, and its process number."""
    program = tmp_path / 'program.py'
    program.write_text(PROGRAM)
    rest = {name: x for name, x in os.environ.items() if name != process.VARIABLE}
    started = subprocess.Popen(
        [sys.executable, *options, 'program.py', str(ROOT), 'a b', '--c=*'],
        cwd=tmp_path,
        env=rest | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = started.communicate('typed')
    return output.split('\n'), started


@needs_huge_pages
@pytest.mark.parametrize('options', [[], ['-u'], ['-B', '-W', 'ignore']])
def test_a_program_starts_anew_once(tmp_path, options):
    lines, done = run_program(tmp_path, *options)
    starts_anew = len(options) < 3  # an option with a word of its own is not told from a program
    assert lines.count('start') == 1 + starts_anew
    pid, setting, huge, rest = lines[1 + starts_anew].split(' ', 3)
    assert int(pid) == done.pid
    assert done.returncode == 3
    assert rest == "['a b', '--c=*'] typed"
    assert (setting == process.SETTING) == starts_anew
    assert (int(huge) >= 100) == starts_anew  # out of 128 MiB


@needs_huge_pages
@pytest.mark.parametrize(
    'options, environment', [([], {process.VARIABLE: ''}), (['-m', 'cProfile'], {})]
)
def test_the_users_own_setting_and_debuggers_are_left_alone(tmp_path, options, environment):
    lines, _ = run_program(tmp_path, *options, **environment)
    assert sum('start' in line.split() for line in lines) == 1
    assert not any(process.SETTING in line for line in lines)


@pytest.mark.parametrize(
    'policy, supported',
    [
        ('always [madvise] never', True),
        ('[always] madvise never', False),  # all memory has them
        ('always madvise [never]', False),
        (None, False),
    ],
)
def test_machines(tmp_path, monkeypatch, policy, supported):
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    file = tmp_path / 'enabled'
    if policy is not None:
        file.write_text(policy)
    monkeypatch.setattr(process, 'POLICY', file)
    assert process.is_supported() == supported
