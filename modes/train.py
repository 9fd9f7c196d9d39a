"""`--mode=train`, and --profile: a trace of some steps, for TensorBoard's profile plugin or Perfetto."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Mapping

import jax
from absl.flags import FlagValues
from ml_collections import ConfigDict, config_flags

import loop
import paths
import train
from configs.setting import INT32_MAX
from messages import Refused
from modes import command_line, process
from modes.of_checkpoint import with_commits, with_restored_sizes
from prepare import prepare
from run.console import Console

FOLDER = 'profile'  # in the workdir


def main(config: ConfigDict, flags: FlagValues, signals: process.Signals) -> int:
    """Train, and return the exit status: 128 + the number of the signal that stopped it, else 0."""
    workdir = flags.workdir
    if workdir is None:
        name = config_flags.get_config_filename(flags['config'])
        workdir = os.path.join('runs', pathlib.Path(name).stem)
    steps = parse(flags.profile, workdir)
    config = with_commits(config, workdir)
    config, line = with_restored_sizes(config, command_line.changes(), workdir)
    if line:
        Console().line(line)
    run = prepare(config, workdir)
    run.workdir.lock.on_loss = lambda text: process.end_now(1, text)
    signals.begin_work(can_wait=True)
    number = train_traced(run, steps, lambda: signals.number)
    return 128 + number if number else 0


def parse(text: str, workdir: str) -> range:
    """Return the steps of --profile=FIRST:LAST, none for ''. Raises Refused for any other text."""
    if not text:
        return range(0)
    match = re.fullmatch(r'(\d{1,10}):(\d{1,10})', text)
    steps = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if not steps or steps[0] < 1 or steps[-1] > INT32_MAX or paths.is_in_bucket(workdir):
        raise Refused(f'--profile={text}: write FIRST:LAST, like 10:13, and a --workdir on disk')
    return steps


def train_traced(run: loop.Run, steps: range, stop: Callable[[], int]) -> int:
    """Train as loop.train does. The first process traces the `steps` that the run takes."""
    if run.train_step is None or not steps or jax.process_index() > 0:
        return loop.train(run, stop)
    compiled_step = run.train_step
    first = run.step + 1
    last = run.train.steps
    span = range(max(steps[0], first), min(steps[-1], last) + 1)
    if len(span) < len(steps):
        run.console.line(
            f'--profile={steps[0]}:{steps[-1]}: this run takes the steps {first:,} to {last:,}.'
        )
    if not span:
        return loop.train(run, stop)
    folder = run.workdir.path / FOLDER
    numbers = itertools.count(first)

    def train_step(
        state: train.TrainState, batch: Mapping[str, jax.Array]
    ) -> tuple[train.TrainState, Mapping[str, jax.Array]]:
        step = next(numbers)
        if step == span[0]:
            jax.block_until_ready(state)
            jax.profiler.start_trace(folder, create_perfetto_trace=True)
            at_end.callback(write)
        with jax.profiler.StepTraceAnnotation('train', step_num=step):
            results = compiled_step(state, batch)
        if step == span[-1]:
            jax.block_until_ready(results)
            at_end.close()
        return results

    def write() -> None:
        jax.profiler.stop_trace()
        run.console.line(f'The trace is in {folder}.')

    with contextlib.ExitStack() as at_end:  # also if the run ends before the last of `steps`
        return loop.train(dataclasses.replace(run, train_step=train_step), stop)
