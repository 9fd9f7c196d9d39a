"""How long main.py takes until its first step.

    python benchmarks/startup.py [--rounds=3]

Starts T5 1.1 small (512 + 114 tokens, batch 4, bfloat16 and float32, one device) on the documentation of
Python, as a user does, each time with a new workdir, and ends it just before the first step: `cold` with
an empty compilation cache and no vocabulary, `warm` with the cache and vocabulary of the cold start.
Before that, it imports the modules of training in a new process, with files that Python has compiled.

Prints medians and the range of the rounds, in seconds.

The goals: import in at most 0.7 s, warm in at most 8 s.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import turns
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer('rounds', 3, 'How often each start is measured.', lower_bound=1)

DTYPES = ('float32', 'bfloat16')
ROOT = Path(__file__).resolve().parents[1]
IMPORT = 'import time; began = time.time(); import loop, prepare; print(time.time() - began)'
# Run main.py up to its first step.
START = """
import os, sys, time
import main, loop

def end(*_):
    print(time.time(), flush=True)
    os._exit(0)

loop.Run.take_step = end
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
    turns.print_conditions('jax')
    turns.print_header('', 'cold', 'warm')
    imports = [float(output_of(IMPORT)) for _ in range(FLAGS.rounds + 1)]
    turns.print_row('imports', '', turns.spread(imports[1:]))
    for dtype in DTYPES:
        cold = []
        warm = []
        for _ in range(FLAGS.rounds):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(seconds_to_first_step(folder, 'cold', dtype, ''))
                vocabulary = f'{folder}/cold/vocabulary.model'
                warm.append(seconds_to_first_step(folder, 'warm', dtype, vocabulary))
        turns.print_row(f'first step, {dtype}', turns.spread(cold), turns.spread(warm))


def seconds_to_first_step(folder: str, name: str, dtype: str, vocabulary: str) -> float:
    """Return the seconds from the command to the first step of a run in `folder`/`name`."""
    arguments = [
        f'--workdir={folder}/{name}',
        f'--config.data.vocabulary={vocabulary}',
        f'--config.model.dtype={dtype}',
    ]
    began = time.time()
    return float(output_of(START, *FLAGS_OF_START, *arguments, cache=folder)) - began


def output_of(program: str, *arguments: str, cache: str = '') -> str:
    """Run a program in the folder of main.py and return its last line. `cache`: folder of compiled programs."""
    environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
    environment.pop('PYTHONDONTWRITEBYTECODE', None)  # otherwise each start compiles our files
    if cache:
        environment['XDG_CACHE_HOME'] = cache
    done = subprocess.run(
        [sys.executable, '-c', program, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return done.stdout.splitlines()[-1]


if __name__ == '__main__':
    app.run(main)
