"""How soon ours and transformers' Seq2SeqTrainer reach the same word errors on configs/g2p.py's task.

    pip install -e '.[peers,g2p]'
    python benchmarks/time_to_quality.py [--minutes=20] [--trial_minutes=1.5]

Both train the model of configs/g2p.py with its dropout and label smoothing on the words of its split, with the ids
of one vocabulary, on all cores. Ours is `python main.py --config=configs/g2p.py` with fewer and smaller steps, and like
the rival it neither validates nor saves between them. The rival has a T5Config of the same sizes, batches by length,
and trials of `trial_minutes` first: the Trainer's AdamW and Adafactor, and Adafactor with updates in proportion to the
parameters, which T5 was trained with, at several rates; two more batch sizes; bfloat16 autocast. The setting with the
lowest loss then trains for `minutes`, ours for half of that in the faster of float32 and bfloat16, and both again in
the other order.

The steps follow from the speed of some steps before, which are not counted; both orders have as many. Three times, at
equal distances, each answers the same NUM_WORDS words of the test greedily. Prints the word error, in percent, and the
seconds from the command to that line, evaluations and compiling included.

Then, of both orders, how many times sooner ours has the higher one of the two last word errors, which both reach; the
seconds are those of the lines through the evaluations. The goal: twice as soon.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

# Before the folder of this file, so that ours are the modules of the checkout.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ['JAX_PLATFORMS'] = 'cpu'

import main_runs
import numpy as np
from absl import app, flags

import prepare
from configs import g2p
from formats import hugging_face
from vocabulary import EOS_ID

ROOT = Path(__file__).resolve().parents[1]
NUM_EVALUATIONS = 3
NUM_WORDS = 4000
NUM_TRIAL_WORDS = 500
BATCH_SIZE = 16  # rows of ours, some 120 words: after four minutes better than 32 and 64
SPEED_STEPS = 300  # of ours
SPEED_SECONDS = 30  # of theirs

FLAGS = flags.FLAGS
flags.DEFINE_float('minutes', 20, "The rival's time.", lower_bound=0.1)
flags.DEFINE_float(
    'trial_minutes',
    1.5,
    'The time of each trial; 0: half a minute for each dtype, with the other settings that were best here.',
    lower_bound=0,
)


class Setting(NamedTuple):
    """How the rival trains."""

    optimizer: str  # as quality_transformers.py names it
    learning_rate: float
    schedule: str
    batch_size: int
    dtype: str


BATCH_SIZES = [32, 256]  # beside the 64 of FIRST
# Optimizer, schedule and rates.
FIRST = [
    Setting(optimizer, rate, schedule, 64, 'float32')
    for optimizer, schedule, rates in (
        ('adamw_torch', 'linear', (3e-4, 1e-3)),
        ('adafactor', 'constant', (3e-4, 1e-3)),
        ('adafactor_scaled', 'linear', (1e-2, 3e-2, 1e-1)),
    )
    for rate in rates
]
# The best of trials on two cores of a Xeon. After 90 seconds 32 words are as good, after 12 minutes they are not.
BEST = Setting('adafactor_scaled', 3e-2, 'linear', 64, 'float32')
DTYPES = ('float32', 'bfloat16')  # which one is faster depends on the CPU


class Evaluation(NamedTuple):
    seconds: float  # since the command
    word_error: float  # in percent
    step: int = 0  # of theirs
    loss: float = 0.0  # theirs after the last step, in nats per token


def main(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_examples(folder)
        best = best_of_trials(folder)
        speeds = {dtype: speed_of_ours(folder, dtype) for dtype in DTYPES}
        dtype = max(speeds, key=speeds.__getitem__)
        print(f'steps of ours per second: {speeds}', flush=True)
        seconds = 60 * FLAGS.minutes
        their_steps = 0
        runs: dict[str, list[list[Evaluation]]] = {'ours': [], 'transformers': []}
        for turn, contender in enumerate(['ours', 'transformers', 'transformers', 'ours']):
            if contender == 'ours':
                num_steps = int(seconds / 2 * speeds[dtype])
                evaluations = run_ours(folder / f'ours_{turn}', folder, dtype, num_steps)
            else:
                evaluations = run_theirs(
                    folder, best, seconds, NUM_WORDS, NUM_EVALUATIONS, their_steps
                )
                their_steps = evaluations[-1].step  # the same in the other order
            runs[contender].append(evaluations)
            cells = [f'{x.word_error:6.2f} after {x.seconds:6.0f} s' for x in evaluations]
            print(f'{contender:12} ' + '   '.join(cells), flush=True)
        for ours, theirs in zip(runs['ours'], runs['transformers'], strict=True):
            print(sooner(ours, theirs))


def sooner(ours: Sequence[Evaluation], theirs: Sequence[Evaluation]) -> str:
    """Say how many times sooner ours has the higher one of the last word errors, which both reach."""
    goal = max(ours[-1].word_error, theirs[-1].word_error)
    seconds = seconds_to(goal, ours)
    their_seconds = seconds_to(goal, theirs)
    return (
        f'{goal:.2f} %: ours after {seconds:.0f} s, transformers after {their_seconds:.0f} s: '
        f'{their_seconds / seconds:.2f} times'
    )


def seconds_to(goal: float, evaluations: Sequence[Evaluation]) -> float:
    """Return when the line through the evaluations first has the word error `goal`, which the last one has."""
    i = next(i for i, x in enumerate(evaluations) if x.word_error <= goal)
    around = evaluations[max(0, i - 1) : i + 1]
    return float(np.interp(-goal, [-x.word_error for x in around], [x.seconds for x in around]))


def best_of_trials(folder: Path) -> Setting:
    """Train with each of FIRST, then the best one with other batch sizes, then the best in bfloat16."""
    print('trials of transformers: loss and word error after the seconds of training', flush=True)
    losses: dict[Setting, float] = {}

    def best_with(settings: Iterable[Setting]) -> Setting:
        for setting in settings:
            seconds = 60 * (FLAGS.trial_minutes or 0.5)
            (found,) = run_theirs(folder, setting, seconds, NUM_TRIAL_WORDS, num_evaluations=1)
            losses[setting] = found.loss
            scores = f'{found.loss:.3f}, {found.word_error:.1f} %'
            print(f'  {setting}: {scores} after {found.seconds:.0f} s', flush=True)
        return min(losses, key=losses.__getitem__)

    best = best_with(FIRST if FLAGS.trial_minutes else [BEST])
    if FLAGS.trial_minutes:
        best = best_with(best._replace(batch_size=size) for size in BATCH_SIZES)
    return best_with([best._replace(dtype='bfloat16')])


def write_examples(folder: Path) -> None:
    """Write the vocabulary, and as ids, with EOS, the letters of each word and its pronunciations."""
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
    num_steps -= num_steps % NUM_EVALUATIONS  # the last step is then the last evaluation
    begin = time.monotonic()
    process = subprocess.Popen(
        command(workdir, folder, dtype, num_steps), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = []
    for line in process.stdout:
        word_error = re.search(r'word_error +([\d.]+)', line)
        if word_error:
            found.append(Evaluation(time.monotonic() - begin, float(word_error[1])))
    if process.wait() != 0:
        sys.exit(f'{workdir}: ours ended with {process.returncode}')
    return found


# Theirs.


def run_theirs(
    folder: Path,
    setting: Setting,
    seconds: float,
    num_words: int,
    num_evaluations: int,
    num_steps: int = 0,
) -> list[Evaluation]:
    """Train for some seconds, or for `num_steps` if that is not 0."""
    config = g2p.get_config()
    sizes = {theirs: config.model[ours] for theirs, ours in hugging_face.SIZES.items()}
    arguments = {
        'examples': str(folder / 'examples.json'),
        'sizes': sizes | {'dropout_rate': config.model.dropout_rate},
        'label_smoothing': config.loss.label_smoothing,
        'max_length': config.decode.max_length,
        'seconds': seconds,
        'num_steps': num_steps,
        'num_words': num_words,
        'num_evaluations': num_evaluations,
        'speed_seconds': SPEED_SECONDS,
        'begin': time.monotonic(),
        **setting._asdict(),
    }
    program = Path(__file__).with_name('quality_transformers.py')
    done = subprocess.run(
        [sys.executable, program, json.dumps(arguments)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [Evaluation(**found) for found in json.loads(done.stdout.splitlines()[-1])]


if __name__ == '__main__':
    app.run(main)
