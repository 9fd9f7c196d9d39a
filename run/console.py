"""The output of the first process of a run: lines that stay, a live line, and their texts."""

import contextlib
import enum
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict

import checkpoint
from run.workdir import Workdir
from stream import OpenMixture

SECONDS_BETWEEN_LINES = 60  # between progress lines in a file or pipe
MAX_COLUMNS = 79  # the width of a progress line
MIN_DATA_WAIT = 0.05  # the smallest fraction shown in a progress line


class Console:
    """The output of a run: lines that stay and, on a terminal, one live line below them."""

    def __init__(self):
        self.is_silent = jax.process_index() > 0
        self.is_terminal = sys.stdout.isatty()
        self.seconds_between_lines = 1 if self.is_terminal else SECONDS_BETWEEN_LINES
        self._last_line = time.monotonic()
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        if self.is_terminal:
            self._print(f'\r{text}\x1b[K\n')
        else:
            self._print(f'{text}\n')

    def live(self, text: str) -> None:
        """Show a line that the next one overwrites; without a terminal, a permanent one."""
        if not self.is_terminal:
            self.line(text)
            return
        width = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be overwritten
        self._print(f'\r{text[:width]}\x1b[K')

    def validation_losses(self, begin: str, values: Mapping[str, float]) -> None:
        """Print the values of a validation.Evaluation; `begin`: the step and, with several tasks, the task."""
        loss = values['nats_per_text_token']
        baseline = values['unigram_nats_per_text_token']
        side = 'below' if loss < baseline else 'ABOVE'
        self.line(
            f'{begin}: validation loss {loss:.3f} nats per text token, '
            f'{abs(baseline - loss):.3f} {side} the unigram baseline of {baseline:.3f} '
            f'(all target tokens: {values["nats_per_target_token"]:.3f}, '
            f'baseline {values["unigram_nats_per_target_token"]:.3f})'
        )

    def is_due(self) -> bool:
        """Return whether the last output is more than `seconds_between_lines` ago."""
        return time.monotonic() - self._last_line > self.seconds_between_lines

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show `text` and the seconds since the body began, whenever a line is due."""
        start = time.monotonic()
        done = threading.Event()

        def show():
            while not done.wait(0.5):
                if self.is_due():
                    self.live(f'{text}: {time.monotonic() - start:.0f} s')

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self.is_silent:
            return
        with self._lock:
            try:
                print(text, end='', flush=True)
            except OSError:  # the terminal or the pipe is closed; the run continues without output
                self.is_silent = True


def progress_line(step: int, train: ConfigDict, values: Mapping[str, float]) -> str:
    """Return a line of at most MAX_COLUMNS. `values`: training_metrics."""
    if 'nats_per_token' not in values:
        return f'step {step}: no update since {values["skipped_steps"]:,} step(s)'
    loss = f'loss {values["nats_per_token"]:.3f}'
    begin = f'step {step} {loss}'
    time_left = ''
    if train.epochs == 0:
        begin = f'step {step}/{train.steps} {loss}'
        seconds_left = (train.steps - step) / values['timing/steps_per_second']
        time_left = f' {format_seconds(seconds_left)} left'
    accuracy = f' accuracy {values["accuracy"]:.3f}'
    learning_rate = f' lr {values["learning_rate/current"]:.3g}'
    end = f' {values["timing/tokens_per_second"]:,.0f} tokens/s{time_left}'
    data_wait = values['timing/data_wait_fraction']
    if data_wait >= MIN_DATA_WAIT:
        end += f', data wait {data_wait:.0%}'
    for details in (accuracy + learning_rate, learning_rate):
        if len(begin + details + end) <= MAX_COLUMNS:
            return begin + details + end
    return begin + end


def format_seconds(seconds: float) -> str:
    """Return 'H:MM:SS', or days and hours."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f'{days}d {hours}h'
    return f'{hours}:{minutes:02}:{seconds:02}'


def describe_time(totals: Mapping[str, float]) -> str:
    """Return a line with the time of a run, in total and by activity, the longest first."""
    parts = []
    for activity in sorted(totals, key=lambda x: -totals[x]):
        if totals[activity] >= 0.5:
            parts.append(f'{activity} {format_seconds(totals[activity])}')
    return f'Time {format_seconds(sum(totals.values()))}: {", ".join(parts)}'


def describe_trimming(counts: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield a line for each task with trimmed examples; `counts`: {task: [examples, trimmed]}."""
    for task, (num_examples, num_trimmed) in counts.items():
        if num_trimmed:
            yield (
                f'{num_trimmed:,} of {num_examples:,} examples of {task} '
                f'({num_trimmed / num_examples:.1%}) were cut to data.lengths.'
            )


class End(enum.Enum):
    """Why a run is finished."""

    STEPS = 'train.steps'
    EPOCHS = 'train.epochs'
    EARLY_STOPPING = 'train.early_stopping'


def ending(
    workdir: Workdir,
    train: ConfigDict,
    mixture: OpenMixture,
    step: int,
    end: End | None,
    took_steps: bool,
) -> list[str]:
    """Return the last lines of a run: why it ended, its best step, and what to try next."""
    lines = []
    history = workdir.metrics.history()
    if end == End.EARLY_STOPPING:
        lines.append(
            f'Step {step:,}: train.early_stopping={train.early_stopping} evaluation(s) without a '
            f'better {history.metric}: this run is finished.'
        )
    elif end == End.EPOCHS and not took_steps:
        lines.append(f'train.epochs={train.epochs} ended at step {step:,}: this run is finished.')
    elif not took_steps:
        lines.append(f'Already at step {step:,} of {train.steps:,}: nothing to do.')
    best_step = history.best_of(checkpoint.steps(workdir.path))
    if best_step is not None:
        lines.append(
            f'The best saved step is {best_step:,}, with {history.metric} '
            f'{history.values[best_step]:.6g}: checkpoint_{best_step}, which --step=best opens.'
        )
    folder = workdir.path
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    lines.append(
        f"Everything is in {folder}: T5X checkpoints, metrics.jsonl, TensorBoard's events, the vocabulary."
    )
    has_inputs = all(task.task.takes_inputs for task in mixture.tasks)
    if mixture.corpus.startswith('pydoc') and not has_inputs:
        flags = shlex.join(['--config.data.files=/path/to/*.txt', f'--workdir={folder}-mine'])
        advice = f'the same command with {flags} learns from your text, one document a line.'
        return [*lines, f'Next: {advice}']
    changes = []
    if step >= train.steps:
        name = 'relative_steps' if train.relative_steps else 'steps'
        changes.append(f'a larger --config.train.{name}')
    if history.ends(train.early_stopping):
        changes.append('--config.train.early_stopping=0')
    if not changes:
        changes.append('a larger --config.train.epochs')
    tensorboard = shlex.join(['tensorboard', f'--logdir={folder}'])
    commands = f'{tensorboard} shows the curves; {" with ".join(changes)} continues.'
    if has_inputs:
        infer = shlex.join(['python', 'main.py', '--mode=infer', f'--checkpoint={folder}'])
        commands = f"{infer} --text='...' answers; {commands}"
    return [*lines, f'Next: {commands}']
