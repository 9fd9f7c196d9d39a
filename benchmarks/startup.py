"""How long main.py takes until its first step, and how large its environment is.

    python benchmarks/startup.py [--rounds=3]

Starts T5 1.1 small (512 + 114 tokens, batch 4, bfloat16 and float32, one device) on the documentation of
Python, as a user does, each time with a new workdir, and ends it where the first step would be taken:
`cold` with an empty compilation cache and no vocabulary, `warm` with those of the cold start. Before
that the modules of training are imported in a new process, whose files Python has compiled.

Prints medians and the range of the rounds, and the size of the packages that setup.py asks for.

The goals: import in at most 0.7 s, warm in at most 8 s, 1.2 GB.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer('rounds', 3, 'How often each start is measured.', lower_bound=1)

DTYPES = ('bfloat16', 'float32')
ROOT = Path(__file__).resolve().parents[1]
IMPORT = 'import time; began = time.time(); import train, prepare; print(time.time() - began)'
# Run main.py up to its first step.
START = """
import os, sys, time
import main, train

def end(*_):
    print(time.time(), flush=True)
    os._exit(0)

train.Progress.take_step = end
sys.exit(main.main(sys.argv))
"""
FLAGS_OF_START = [
    '--config=configs/t5_1_1.py:small',
    '--config.data.task=span_corruption',
    '--config.data.files=',
    '--config.train.batch_size=4',
    '--config.train.num_microbatches=1',
    '--config.eval.steps=1',
]


def main(argv: list[str]) -> None:
    print(f'{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}')
    imports = [float(run(IMPORT).stdout) for _ in range(FLAGS.rounds + 1)]
    report('import', imports[1:])
    for dtype in DTYPES:
        cold = []
        warm = []
        for _ in range(FLAGS.rounds):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(seconds_to_first_step(folder, 'cold', dtype, ''))
                vocabulary = f'{folder}/cold/vocabulary.model'
                warm.append(seconds_to_first_step(folder, 'warm', dtype, vocabulary))
        report(f'cold, {dtype}', cold)
        report(f'warm, {dtype}', warm)
    size = 0
    names = required('t5-haiku', set())
    for name in names:
        for file in metadata.distribution(name).files or []:
            path = Path(file.locate())
            if path.is_file():
                size += path.stat().st_size
    print(f'environment: {len(names)} packages, {size / 1e9:.2f} GB')


def report(name: str, seconds: list[float]) -> None:
    print(
        f'{name}: {statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})',
        flush=True,
    )


def seconds_to_first_step(folder: str, name: str, dtype: str, vocabulary: str) -> float:
    """Return the seconds from the command to the first step of a run in `folder`/`name`."""
    arguments = [
        f'--workdir={folder}/{name}',
        f'--config.data.vocabulary={vocabulary}',
        f'--config.model.dtype={dtype}',
    ]
    began = time.time()
    return float(run(START, *FLAGS_OF_START, *arguments, cache=folder).stdout.split()[-1]) - began


def run(program: str, *arguments: str, cache: str = '') -> subprocess.CompletedProcess[str]:
    """Run a program of Python in the folder of main.py; `cache`: of compiled programs."""
    environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
    environment.pop('PYTHONDONTWRITEBYTECODE', None)  # else each start compiles our files
    if cache:
        environment['XDG_CACHE_HOME'] = cache
    return subprocess.run(
        [sys.executable, '-c', program, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )


def required(name: str, found: set[str]) -> set[str]:
    """Return the names of the distributions that `name` needs, without its extras, and `found`."""
    for requirement in metadata.requires(name) or []:
        other = re.match(r'[\w.-]+', requirement)
        assert other is not None
        if 'extra ==' in requirement or other[0] in found:
            continue
        try:
            metadata.distribution(other[0])
        except metadata.PackageNotFoundError:  # for another Python or system
            continue
        found.add(other[0])
        required(other[0], found)
    return found


if __name__ == '__main__':
    app.run(main)
