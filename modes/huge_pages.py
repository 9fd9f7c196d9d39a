"""Huge pages on CPUs: main.py starts anew, once, with a setting that the C library reads at its start.

XLA asks malloc for the temporary arrays of each step anew, and a page of 4 KiB costs a fault when it is first
touched. glibc puts large arrays into pages of 2 MiB where GLIBC_TUNABLES says so before the process starts.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

VARIABLE = 'GLIBC_TUNABLES'
SETTING = 'glibc.malloc.hugetlb=1'
FIRST_VERSION = 'glibc 2.35'  # that knows it
# Of the kernel: always, madvise or never.
POLICY = Path('/sys/kernel/mm/transparent_hugepage/enabled')


def restart() -> None:
    """Start this program anew in the same process, with huge pages, where the machine gives them.

    Do nothing where the variable is set, to whatever value, and where Python runs another program, such as a
    debugger or a profiler, that runs this one.
    """
    if VARIABLE in os.environ or not is_supported() or not is_program(sys.orig_argv, sys.argv):
        return
    os.environ[VARIABLE] = SETTING
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def is_supported() -> bool:
    """Return whether JAX runs on CPUs here, and whether kernel and C library give huge pages on request."""
    has_other_devices = find_spec('jax_plugins') or find_spec('libtpu')
    if os.environ.get('JAX_PLATFORMS', '') != 'cpu' and has_other_devices:
        return False
    try:
        version = os.confstr('CS_GNU_LIBC_VERSION') or ''
        policy = POLICY.read_text()
    except (OSError, ValueError, AttributeError):  # not Linux, or another C library
        return False
    return numbers(version) >= numbers(FIRST_VERSION) and '[madvise]' in policy


def numbers(version: str) -> list[int]:
    """Return the numbers of a version: [2, 36] of 'glibc 2.36'."""
    words = version.partition(' ')[2].split('.')
    return [int(word) for word in words if word.isdecimal()]


def is_program(original: list[str], arguments: list[str]) -> bool:
    """Return whether the command line `original` is Python, its options, and the program with its arguments."""
    num_options = len(original) - len(arguments)
    for option in original[1:num_options]:
        if not option.startswith('-') or option.startswith('-m'):
            return False
    return original[num_options:] == arguments
