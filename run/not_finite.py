"""What a run does about steps that are not finite, as train.on_not_finite says.

    stop   raises FloatingPointError, which names the step and its documents
    skip   continues: the compiled step has left parameters and optimizer state as they were
    back   restores the newest checkpoint, and continues with the batches that follow

A step is not finite if its loss, gradient norm, update or optimizer state is not. At most
train.max_not_finite of these steps are skipped or gone back over in the life of a run: its checkpoints
count them.

Source: Chowdhery et al. 2022 (PaLM) §5.1, which goes back before a spike of the loss and leaves out
the batches around it; T5X's skip_nan_updates (t5x/adafactor.py) and TerminateOnNanAction.
"""

import json
import math
from collections.abc import Callable
from typing import NamedTuple

from ml_collections import ConfigDict

import checkpoint
import paths
from run.interval import Interval
from stream import Stream

COUNT_FILE = 'not_finite.json'  # of a checkpoint: `NotFinite.count`
SKIP = 'train.on_not_finite=skip'


def read_count(directory: paths.AnyPath) -> int:
    """Return the count of a checkpoint, 0 of one that is older than these files."""
    file = directory / COUNT_FILE
    return json.loads(file.read_bytes()) if file.exists() else 0


class Fault(NamedTuple):
    """A step that is not finite."""

    step: int
    loss: float
    gradient_norm: float
    documents: str

    def __str__(self) -> str:
        text = f'step {self.step} is not finite: loss {self.loss:.6g}, gradient norm '
        text += f'{self.gradient_norm:.6g}'
        if math.isfinite(self.loss + self.gradient_norm):
            text += ', but not its update or the optimizer state'
        return text


class NotFinite:
    """The steps of a run that are not finite."""

    def __init__(self, config: ConfigDict, workdir: paths.AnyPath, first_step: int, count: int):
        """`config`: config.train; `count`: of the steps that were skipped or gone back over."""
        self.action = config.on_not_finite
        self.max_count = config.max_not_finite
        self.workdir = workdir
        self.first_step = first_step
        self.count = count

    def find(
        self, interval: Interval, step: int, stream: Stream, report: Callable[[str], None]
    ) -> Fault | None:
        """Return the first step of the interval that makes the state invalid, if there is one.

        Looks at the steps since the last call, up to `step`. Reports those that were skipped.
        """
        for ago in interval.not_finite():
            metrics = interval.metrics[-1 - ago]
            documents = '; '.join(stream.describe(interval.positions[-1 - ago]))
            fault = Fault(step - ago, metrics['loss'], metrics['gradient_norm'], documents)
            if self.action != 'skip' or self.count == self.max_count:
                del interval.positions[: -1 - ago]  # of the valid steps before
                return fault
            self.count += 1
            report(
                f'{str(fault).capitalize()}. It is skipped, {self.used()}. Documents: {documents}'
            )
        interval.positions.clear()
        return None

    def check_may_go_back(self, fault: Fault) -> None:
        """Raise FloatingPointError unless the run may go back."""
        if self.action == 'stop':
            raise self.error(fault, f'{SKIP} or back')
        if self.count == self.max_count:
            reason = f'The run has used up {self.used()}'
            raise self.error(fault, 'a larger train.max_not_finite', reason)

    def used(self) -> str:
        return f'{self.count:,} of train.max_not_finite={self.max_count:,}'

    def error(self, fault: Fault, remedy: str, reason: str = '') -> FloatingPointError:
        """Return the error of a fault; `reason`: why the run may not continue."""
        found = f'{fault}. {reason}' if reason else str(fault)
        saved = checkpoint.steps(self.workdir)
        kept = f'keeps checkpoint_{saved[-1]}' if saved else 'has no checkpoint yet'
        advice = f'Try a smaller learning_rate.base_learning_rate, a longer warm-up, or {remedy}'
        if fault.step == self.first_step + 1 and not math.isfinite(fault.loss):
            advice = 'No update was made yet: look at restore.path and model.dtype'
        return FloatingPointError(
            f'{found}. {self.workdir} {kept}. {advice}. Documents: {fault.documents}'
        )
