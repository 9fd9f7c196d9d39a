"""The scripts of benchmarks/, run as their user does or opened as modules."""

import contextlib
import importlib.util
import subprocess
import sys

from absl import flags
from runs import ENVIRONMENT, ROOT


def run(name, *arguments):
    """Run benchmarks/`name`."""
    script = str(ROOT / 'benchmarks' / name)
    return subprocess.run(
        [sys.executable, script, *arguments], env=ENVIRONMENT, capture_output=True, text=True
    )


def assert_refuses(name, argument, flag):
    """Assert that benchmarks/`name` ends with a line that has `flag`, before its table."""
    done = run(name, argument)
    assert done.returncode != 0
    assert 'Traceback' not in done.stderr
    assert flag in done.stderr
    assert not done.stdout


@contextlib.contextmanager
def opened(name):
    """The script as a module, whose flags are removed again."""
    names = set(flags.FLAGS)
    module_name = name.replace('.py', '_benchmark')
    spec = importlib.util.spec_from_file_location(module_name, ROOT / 'benchmarks' / name)
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(ROOT / 'benchmarks'))  # its imports
    spec.loader.exec_module(module)
    try:
        yield module
    finally:
        sys.path.remove(str(ROOT / 'benchmarks'))
        flags.FLAGS.remove_flag_values(set(flags.FLAGS) - names)
