"""modes/huge_pages.py: when a program starts anew, and that only its memory changes."""

import os
import pathlib
import subprocess
import sys

import pytest
from runs import ROOT

from modes import huge_pages

PROGRAM = """
import os, re, sys
sys.path.insert(0, sys.argv[1])
from modes import huge_pages
print('start')
sys.stdout.flush()
huge_pages.restart()
array = b'x' * 2**27
rollup = open('/proc/self/smaps_rollup').read()
huge = int(re.search(r'AnonHugePages: +(\\d+) kB', rollup)[1]) * 1024
print(os.getpid(), os.environ.get('GLIBC_TUNABLES'), huge // 2**20, sys.argv[2:], sys.stdin.read())
sys.exit(3)
"""
needs_huge_pages = pytest.mark.skipif(
    not huge_pages.is_supported(), reason='needs Linux with huge pages on madvise and glibc 2.35'
)


def run(tmp_path, *options, **environment):
    """Run PROGRAM as a user does. Return what it prints, by words, and its process number."""
    program = tmp_path / 'program.py'
    program.write_text(PROGRAM)
    rest = {name: x for name, x in os.environ.items() if name != huge_pages.VARIABLE}
    process = subprocess.Popen(
        [sys.executable, *options, 'program.py', str(ROOT), 'a b', '--c=*'],
        cwd=tmp_path,
        env=rest | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate('typed')
    return output.split('\n'), process


@needs_huge_pages
@pytest.mark.parametrize('options', [[], ['-u'], ['-B', '-W', 'ignore']])
def test_a_program_starts_anew_once(tmp_path, options):
    lines, process = run(tmp_path, *options)
    starts_anew = len(options) < 3  # an option with a word of its own is not told from a program
    assert lines.count('start') == 1 + starts_anew
    pid, setting, huge, rest = lines[1 + starts_anew].split(' ', 3)
    assert int(pid) == process.pid
    assert process.returncode == 3
    assert rest == "['a b', '--c=*'] typed"
    assert (setting == huge_pages.SETTING) == starts_anew
    assert (int(huge) >= 100) == starts_anew  # of 128 MiB


@needs_huge_pages
@pytest.mark.parametrize(
    'options, environment',
    [
        ([], {huge_pages.VARIABLE: ''}),
        ([], {huge_pages.VARIABLE: 'glibc.malloc.check=0'}),
        (['-m', 'cProfile'], {}),
        (['-mcProfile'], {}),
        (['-m', 'pdb', '-c', 'continue'], {}),
    ],
)
def test_the_users_own_setting_and_debuggers_are_left_alone(tmp_path, options, environment):
    lines, _ = run(tmp_path, *options, **environment)
    assert sum('start' in line.split() for line in lines) == 1
    assert not any(huge_pages.SETTING in line for line in lines)


@pytest.mark.parametrize(
    'version, policy, supported',
    [
        ('glibc 2.36', 'always [madvise] never', True),
        ('glibc 2.35', 'always [madvise] never', True),
        ('glibc 2.4', 'always [madvise] never', False),
        ('glibc 2.36', '[always] madvise never', False),  # all memory has them
        ('glibc 2.36', 'always madvise [never]', False),
        ('glibc 2.36', None, False),
        (None, 'always [madvise] never', False),
    ],
)
def test_machines(tmp_path, monkeypatch, version, policy, supported):
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    monkeypatch.setattr(os, 'confstr', lambda name: version)
    file = tmp_path / 'enabled'
    if policy is not None:
        file.write_text(policy)
    monkeypatch.setattr(huge_pages, 'POLICY', pathlib.Path(file))
    assert huge_pages.is_supported() == supported


def test_other_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'confstr', lambda name: 'glibc 2.36')
    (tmp_path / 'enabled').write_text('[madvise]')
    monkeypatch.setattr(huge_pages, 'POLICY', tmp_path / 'enabled')
    monkeypatch.setattr(huge_pages, 'find_spec', lambda name: name == 'libtpu')
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
    assert huge_pages.is_supported()
    monkeypatch.delenv('JAX_PLATFORMS')
    assert not huge_pages.is_supported()
