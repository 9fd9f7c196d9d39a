"""What a run does about steps that are not finite, as train.on_not_finite says.

    stop   raises FloatingPointError, which names the step and its documents
    skip   goes on: the compiled step has left parameters and optimizer state as they were
    back   restores the newest checkpoint, and goes on with the batches that follow

A step is not finite where its loss, gradient norm, update or optimizer state is not. Of these steps
train.max_not_finite may be skipped or gone back over in the life of a run, which its checkpoints count.

Source: Chowdhery et al. 2022 (PaLM) §5.1, which goes back before a spike of the loss and leaves out
the batches around it; T5X's skip_nan_updates (t5x/adafactor.py) and TerminateOnNanAction.
"""

import json
import math
from typing import Any

import checkpoint
from run.interval import Interval

COUNT_FILE = 'not_finite.json'  # of a checkpoint: `NotFinite.count`


def read_count(directory: Any) -> int:
    """Return the count of a checkpoint, 0 of one that is older than these files."""
    file = directory / COUNT_FILE
    return json.loads(file.read_bytes()) if file.exists() else 0


class NotFinite:
    """The steps of a run that are not finite. `run` and `progress` are train.Run and train.Progress."""

    def __init__(self, config: Any, count: int):
        self.action = config.train.on_not_finite
        self.max_count = config.train.max_not_finite
        self.count = count  # of the steps that were skipped or gone back over

    def leaves_valid(self, run: Any, progress: Any) -> bool:
        """Return whether the state is valid after the steps since the last look. Say what was skipped."""
        interval = progress.interval
        for ago in interval.not_finite():
            if self.action != 'skip' or self.count == self.max_count:
                del interval.positions[: -1 - ago]  # of the steps before are looked at
                return False
            self.count += 1
            found = describe(run, progress, ago).capitalize()
            names = documents(run, interval, ago)
            run.console.line(f'{found}. It is skipped, {self.used()}. {names}')
        interval.positions.clear()
        return True

    def check(self, run: Any, saver: checkpoint.Saver, progress: Any) -> bool:
        """Return whether the state is valid; where it is not, the run may go back.

        Raises FloatingPointError where it may not.
        """
        if self.leaves_valid(run, progress):
            return True
        saver.wait()
        if self.action == 'stop':
            raise self.error(run, progress, remedy='train.on_not_finite=skip or back')
        if self.count == self.max_count:
            reason = f'The run has used up {self.used()}'
            raise self.error(run, progress, 'a larger train.max_not_finite', reason)
        return False

    def go_back(self, run: Any, saver: checkpoint.Saver, progress: Any, can_follow: bool) -> None:
        """Restore the newest checkpoint into `progress`. The batches since then are left out.

        A replay of the same batches would reach the same state. `can_follow`: whether others are left.
        """
        remedy = 'train.on_not_finite=skip'
        if not checkpoint.steps(run.workdir):
            raise self.error(run, progress, remedy, 'There is nothing to go back to')
        if not can_follow:
            raise self.error(run, progress, remedy, 'No batch is left to go on with')
        [ago, *_] = progress.interval.not_finite()
        found = describe(run, progress, ago).capitalize()
        names = documents(run, progress.interval, ago)
        progress.state = None  # the devices may not have the memory for two
        step, state, metrics = run.restore_newest()
        self.count += 1
        run.metrics.go_back(step)
        run.console.line(
            f'{found}. The run goes back to checkpoint_{step} and leaves out the {progress.step - step:,} '
            f'batch(es) since, {self.used()}. {names}'
        )
        progress.step = step
        progress.state = state
        progress.interval = Interval(metrics)

    def used(self) -> str:
        return f'{self.count:,} of train.max_not_finite={self.max_count:,}'

    def error(self, run: Any, progress: Any, remedy: str, reason: str = '') -> FloatingPointError:
        """Return the error of the first step that is not finite; `reason`: why the run may not go on."""
        [ago, *_] = progress.interval.not_finite()
        found = describe(run, progress, ago)
        if reason:
            found += f'. {reason}'
        saved = checkpoint.steps(run.workdir)
        kept = 'has no checkpoint yet'
        if saved:
            kept = f'keeps checkpoint_{saved[-1]}'
        advice = f'Try a smaller learning_rate.base_learning_rate, a longer warm-up, or {remedy}'
        is_first = progress.step - ago == run.first_step + 1
        if is_first and not math.isfinite(progress.interval.metrics[-1 - ago]['loss']):
            advice = 'No update was made yet: look at restore.path and model.dtype'
        names = documents(run, progress.interval, ago)
        return FloatingPointError(f'{found}. {run.workdir} {kept}. {advice}. {names}')


def describe(run: Any, progress: Any, ago: int) -> str:
    """Return what is not finite of the step that was taken `ago` steps ago."""
    metrics = progress.interval.metrics[-1 - ago]
    text = f'step {progress.step - ago} is not finite: loss {metrics["loss"]:.6g}, gradient norm '
    text += f'{metrics["gradient_norm"]:.6g}'
    if math.isfinite(metrics['loss'] + metrics['gradient_norm']):
        text += ', but not its update or the optimizer state'
    return text


def documents(run: Any, interval: Interval, ago: int) -> str:
    """Return the names of the documents of the step that was taken `ago` steps ago."""
    return f'Documents: {"; ".join(run.stream.describe(interval.positions[-1 - ago]))}'
