"""Optimizers on the text and the model of configs/tiny.py: a table of docs/results.md.

    python benchmarks/optimizers.py [--folder=runs/optimizers] [--steps=1200]

Each optimizer runs at three rates with seed 0, then twice more at the best rate with other seeds: 25 runs of 2 to 4
minutes on two cores. Runs already finished in --folder are not repeated. All have nanoT5's clip and mean loss; a cosine
rises from half the rate for 15 % of the steps. Prints for each optimizer the best rate, the validation loss after the
last step, and the steps and seconds of training until the mean loss reaches the final loss of the worst optimizer.
Seconds exclude compiling, evaluating and saving.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import main_runs
import numpy as np
import turns
from absl import app, flags

SEEDS = (0, 1, 2)
NUM_EVALUATIONS = 12

FLAGS = flags.FLAGS
flags.DEFINE_string('folder', 'runs/optimizers', 'The folder of the runs.')
flags.DEFINE_integer('steps', 1200, 'Steps of each run.', lower_bound=100)


class Contender(NamedTuple):
    factors: str
    settings: Mapping[str, Any]
    rates: Sequence[float]  # the largest rate of a step


RSQRT = 'constant * linear_warmup * rsqrt_normalized_decay'
COSINE = 'constant * linear_warmup_from_half * cosine_decay'
ADAMW = {'optimizer.name': 'adamw', 'optimizer.adamw.weight_decay': 0.0}
IN_PROPORTION = {'optimizer.adamw.multiply_by_parameter_scale': True}
CONTENDERS = {
    'Adafactor, rsqrt': Contender(RSQRT, {}, (0.025, 0.05, 0.1)),
    'Adafactor, cosine': Contender(COSINE, {}, (0.03, 0.06, 0.12)),
    'AdamW, cosine': Contender(COSINE, ADAMW, (0.0003, 0.001, 0.003)),
    'AdamW in proportion, cosine': Contender(COSINE, ADAMW | IN_PROPORTION, (0.02, 0.04, 0.08)),
    'Muon, cosine': Contender(
        COSINE, ADAMW | IN_PROPORTION | {'optimizer.name': 'muon'}, (0.04, 0.08, 0.16)
    ),
}


class Run(NamedTuple):
    steps: list[int]  # steps with evaluations
    losses: list[float]  # validation, nats per text token
    seconds_per_step: float


def main(argv: list[str]) -> None:
    turns.print_conditions('jax', 'optax')
    best: dict[str, list[Run]] = {}
    rates = {}
    for name, contender in CONTENDERS.items():
        runs = {rate: run(name, rate, seed=0) for rate in contender.rates}
        rate = min(runs, key=lambda rate: runs[rate].losses[-1])
        losses = [f'{runs[rate].losses[-1]:.3f}' for rate in contender.rates]
        rates[name] = f'{rate:g} ({", ".join(losses)})'
        best[name] = [runs[rate], *[run(name, rate, seed) for seed in SEEDS[1:]]]
    worst = max(mean_losses(runs)[-1] for runs in best.values())
    header = ('optimizer', 'best rate (losses of all)', 'loss', 'ms a step')
    turns.print_header(*header, f'steps to {worst:.3f}', 'seconds')
    for name, runs in best.items():
        losses = [run.losses[-1] for run in runs]
        loss = f'{np.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})'
        seconds = float(np.mean([run.seconds_per_step for run in runs]))
        steps = steps_to(worst, runs)
        cells = (f'{1000 * seconds:.0f}', f'{steps:.0f}', f'{steps * seconds:.0f}')
        turns.print_row(name, rates[name], loss, *cells)


def run(name: str, rate: float, seed: int) -> Run:
    """Run to the end, unless this is done, and return the run."""
    folder = Path(FLAGS.folder).resolve()
    workdir = folder / f'{name.replace(", ", "_").replace(" ", "_")}_{rate:g}_{seed}'
    contender = CONTENDERS[name]
    warmup = 50 if contender.factors == RSQRT else round(0.15 * FLAGS.steps)
    settings = {
        'seed': seed,
        'train.steps': FLAGS.steps,
        'eval.every_steps': FLAGS.steps // NUM_EVALUATIONS,
        'save.every_steps': FLAGS.steps,
        'loss.loss_normalizing_factor': 'NUM_REAL_TARGET_TOKENS',
        'optimizer.global_norm_clip_threshold': 1.0,
        'learning_rate.factors': contender.factors,
        'learning_rate.base_learning_rate': rate,
        'learning_rate.warmup_steps': warmup,
        'learning_rate.steps_per_cycle': FLAGS.steps - warmup,
        **contender.settings,
    }
    main_runs.finish('tiny.py', workdir, settings)
    evaluations = main_runs.lines_of(workdir, 'training_eval/span_corruption')
    seconds = [line['timing/seconds'] for line in main_runs.lines_of(workdir, 'train')]
    return Run(
        steps=[line['step'] for line in evaluations],
        losses=[line['nats_per_text_token'] for line in evaluations],
        seconds_per_step=sum(seconds) / FLAGS.steps,
    )


def mean_losses(runs: Sequence[Run]) -> list[float]:
    return np.mean([run.losses for run in runs], axis=0).tolist()


def steps_to(loss: float, runs: Sequence[Run]) -> float:
    """Return the interpolated step at which the mean loss first falls to `loss`, as it does in the end."""
    losses = np.minimum.accumulate(mean_losses(runs))
    return float(np.interp(-loss, -losses, runs[0].steps))


if __name__ == '__main__':
    app.run(main)
