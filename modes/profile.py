"""--profile: a trace of some steps of a run, for TensorBoard's profile plugin or Perfetto."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax

import train
from configs.check import INT32_MAX

FOLDER = 'profile'  # in the workdir


def parse(text: str, workdir: str) -> range:
    """Return the steps of --profile=FIRST:LAST, none for ''. Raises ValueError for another text."""
    if not text:
        return range(0)
    if '://' in workdir:
        raise ValueError(f'--profile={text}: a trace is written to a disk, and --workdir={workdir}')
    first, separator, last = text.partition(':')
    if (
        separator
        and first.isdecimal()
        and last.isdecimal()
        and 1 <= int(first) <= int(last) <= INT32_MAX
    ):
        return range(int(first), int(last) + 1)
    raise ValueError(f'--profile={text}: write FIRST:LAST with steps from 1, such as 10:13')


def train_traced(
    run: train.ReadyRun | train.FinishedRun, steps: range, stop: Callable[[], int]
) -> int:
    """Train as train.train does. The first process traces `steps`, those that the run takes."""
    if isinstance(run, train.FinishedRun) or not steps or jax.process_index() > 0:
        return train.train(run, stop)
    first = run.progress.step + 1
    last = run.config.train.steps
    taken = range(max(steps[0], first), min(steps[-1], last) + 1)
    if len(taken) < len(steps):
        run.console.line(
            f'--profile={steps[0]}:{steps[-1]}: this run takes the steps {first:,} to {last:,}.'
        )
    if not taken:
        return train.train(run, stop)
    folder = run.workdir.path / FOLDER
    numbers = itertools.count(first)

    def train_step(state: Any, batch: Any) -> Any:
        step = next(numbers)
        if step == taken[0]:
            jax.block_until_ready(state)
            jax.profiler.start_trace(folder, create_perfetto_trace=True)
            at_end.callback(write)
        with jax.profiler.StepTraceAnnotation('train', step_num=step):
            results = run.train_step(state, batch)
        if step == taken[-1]:
            jax.block_until_ready(results)
            at_end.close()
        return results

    def write() -> None:
        try:
            jax.profiler.stop_trace()
        except (RuntimeError, OSError) as error:  # a full disk does not end the run
            run.console.line(f'{folder} has no trace: {error}')
            return
        run.console.line(f'The trace is in {folder}.')

    with contextlib.ExitStack() as at_end:  # also where the run ends before the last of `steps`
        return train.train(dataclasses.replace(run, train_step=train_step), stop)
