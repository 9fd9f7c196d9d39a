"""The loop of a run: for each batch, step; then call each hook that is due.

Source: T5X t5x/train.py.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

import checkpoint
import optimizer
import partition
from run import agreement
from run.agreement import Batches, StopRequest, counts_of_all, remember_interrupt
from run.console import Console, End, describe_time, describe_trimming, ending, progress_line
from run.interval import Clock, Fault, Interval, Skips, training_metrics
from run.prefetch import PrefetchedBatch
from run.workdir import Progress, Workdir, progress_files, record_end
from stream import Stream
from train import StepSpec, TrainState, saved_tree


def train(run: 'Run', stop: Callable[[], int] | None = None) -> int:
    """Take the steps up to train.steps. Log, evaluate and save on the way.

    When `stop` returns the number of a signal, save the step and return the number. Without `stop` (in a
    notebook), an interrupt does the same. For a non-finite step or a spike, depending on train.on_not_finite
    and train.on_spike, raise FloatingPointError, at most one logged interval later. Before any other error,
    such as bad data or a full disk, save the steps so far.
    """
    assert not run.workdir.lock.closed, 'this run has ended: prepare it again to continue'
    with run.workdir.lock, contextlib.ExitStack() as stack:
        if stop is None:
            stop = stack.enter_context(remember_interrupt())
        run.stop = StopRequest(stop)
        try:
            with run.clock.doing('steps'):
                take_steps(run)
            with run.clock.doing('saving'), run.console.working('Saving'):
                agreement.in_all(run.workdir.saver.wait)
        except Exception as error:
            save_before_error(run, error)
            raise
        except BaseException:  # a second interrupt
            run.workdir.saver.wait()
            raise
        run.workdir.prune()  # the last evaluation may follow the checkpoint
        lines = [
            f'Stopped after step {run.step:,}, which is saved: the same command continues from there.'
        ]
        if not run.stop.signal:
            lines = ending(
                run.workdir,
                run.train,
                run.stream.mixture,
                run.step,
                run.end,
                took_steps=run.step > run.first_step,
            )
        if run.step > run.first_step:
            lines.insert(0, describe_time(run.clock.totals))
        for line in lines:
            run.console.line(line)
    return run.stop.signal


def take_steps(run: 'Run') -> None:
    """For each batch, step; then call each hook that is due."""
    if run.end is None:
        with run.clock.doing('starting'), run.console.working('Making the first batch'):
            num_workers = run.stream.data_group.num_workers
            batches = Batches(run.stream, num_workers, may_end=run.train.epochs > 0)
        if batches.have_ended:
            run.end = End.EPOCHS
    if run.step in checkpoint.steps(run.workdir.path):  # a signal or a kill prevented evaluations
        with run.clock.doing('evaluating'):
            evaluate(run)
            stop_early(run)
    run.clock.restart()
    while run.end is None and not run.stop.signal:
        run.workdir.saver.check()
        if run.workdir.lock.is_lost:
            raise OSError(f'{run.workdir.path} is in use by another process: this run ends')
        with run.clock.taking_step():
            with run.clock.doing('waiting for data'):
                batch = batches.next()
            run.take_step(batch)
            if batches.have_ended:
                run.end = End.EPOCHS
            run.is_shown = run.step == run.first_step + 1 or run.console.is_due()
            # Queue at most one step ahead; none if steps take over a second: a stop waits for one step.
            is_due = any(hook.is_due(run) for hook in run.hooks)
            run.interval.wait(all_steps=is_due or run.clock.seconds_of_last_step > 1)
        run.stop.agree(run.step)
        for text in batch.faults:
            run.console.line(f'Left out, {batch.num_faults:,} so far: {text}')
        for hook in run.hooks:
            if hook.is_due(run):
                with run.clock.doing(hook.name):
                    hook.call(run)
    if run.end in (End.EPOCHS, End.EARLY_STOPPING):
        record_end(run.workdir.path, run.step)


class Hook(NamedTuple):
    """A function that the loop calls after some steps."""

    name: str  # labels its time in the clock
    is_due: Callable[['Run'], bool | int]
    call: Callable[['Run'], None]


def default_hooks() -> list[Hook]:
    """Return the hooks of a run, in the order of the calls.

    Saving comes last, so that a run resumed from the checkpoint has the log and the evaluations.
    """
    others = [
        Hook('logging', lambda run: run.is_shown or run.is_due(run.log_every_steps), log),
        Hook('evaluating', lambda run: len(due_evaluations(run)) > 0, evaluate),
        Hook('evaluating', lambda run: len(due_evaluations(run)) > 0, stop_early),
        Hook('saving', lambda run: run.stop.signal or run.is_due(run.save_every_steps), save),
    ]
    check = Hook('checking', lambda run: any(x.is_due(run) for x in others), check_finite)
    return [check, *others]


class Evaluation(Protocol):
    """Numbers computed from the parameters every so many steps: validation losses, metrics of a task."""

    @property
    def name(self) -> str: ...  # names its lines in metrics.jsonl

    @property
    def every_steps(self) -> int: ...

    def __call__(
        self, params: Mapping[str, jax.Array], step: int, stop: Callable[[int], int]
    ) -> Mapping[str, float] | None:
        """Report and return {T5X's tag: value}; None if `stop`, called with the number of batches so far, ended it."""


@dataclasses.dataclass
class Run:
    """A run in its workdir, after `step` steps; `prepare.prepare` makes one."""

    train: ConfigDict  # the group of settings
    log_every_steps: int
    save_every_steps: int
    workdir: Workdir
    console: Console
    stream: Stream
    evaluations: Sequence[Evaluation]
    spec: StepSpec
    # (state, batch) -> (state, metrics); None if `end` is set
    train_step: Callable[[TrainState, Mapping], tuple[TrainState, Mapping]] | None
    skips: Skips
    step: int  # steps taken
    state: TrainState[jax.Array]
    interval: Interval  # the steps since the last logged one
    end: End | None = None  # why it takes no more steps
    hooks: list[Hook] = dataclasses.field(default_factory=default_hooks)
    stop: StopRequest = dataclasses.field(default_factory=lambda: StopRequest(lambda: 0))
    clock: Clock = dataclasses.field(default_factory=Clock)
    batch: PrefetchedBatch | None = None  # the batch of the last step
    is_shown: bool = False  # the terminal shows the last step

    def __post_init__(self):
        self.first_step = self.step

    def is_due(self, every_steps: int) -> bool:
        """Return whether something is due that is done every so many steps and after the last."""
        return self.end is not None or self.step % every_steps == 0

    def take_step(self, batch: PrefetchedBatch) -> None:
        assert self.train_step is not None
        on_devices = partition.place_rows(self.spec.mesh, batch.features)
        self.state, metrics = self.train_step(self.state, on_devices)
        self.step += 1
        self.batch = batch
        self.interval.add(metrics, batch.features, batch.before)
        if self.step == self.train.steps:
            self.end = End.STEPS


# The hooks.


def check_finite(run: Run) -> None:
    """Raise LossNotFinite for a step that ends the run; report skipped steps."""
    fault = find_fault(run)
    if fault is not None:
        run.workdir.saver.wait()  # the error names the newest checkpoint
        raise run.skips.error(fault)


def find_fault(run: Run) -> Fault | None:
    """Fetch the metrics of the steps so far, and return the first fault that ends the run, if any."""
    run.interval.fetch()
    return run.skips.find(run.interval, run.step, run.stream, run.console.line)


def log(run: Run) -> None:
    """Write the metrics of the steps since the last logged one, or only show them if logging is not due."""
    step = run.step
    values = training_metrics(
        run.interval.metrics, run.clock, run.spec.batch_size, run.stream.data_group
    )
    text = progress_line(step, run.train, values)
    if not run.is_due(run.log_every_steps):
        run.console.live(text)
        return
    run.console.line(text)
    run.interval = Interval()
    assert run.batch is not None
    counts = counts_of_all(run.stream, run.batch)
    for task, (num_examples, num_trimmed) in counts.items():
        values[f'data/{task}/examples'] = num_examples
        values[f'data/{task}/trimmed'] = num_trimmed
    run.workdir.metrics.write('train', step, values)
    num_logged = step // run.log_every_steps
    if num_logged.bit_count() == 1 or step == run.train.steps:  # 1, 2, 4, ...
        for line in describe_trimming(counts):
            run.console.line(line)
    run.clock.restart()


def due_evaluations(run: Run) -> list[Evaluation]:
    return [x for x in run.evaluations if run.is_due(x.every_steps)]


def evaluate(run: Run) -> None:
    """Run the evaluations of this step that metrics.jsonl lacks, with the averaged parameters.

    A signal interrupts them; a run that resumes from this step does the others.
    """
    due = due_evaluations(run)
    names = run.workdir.metrics.missing([x.name for x in due], run.step)
    params = optimizer.averaged(run.state.params, run.state.opt_state)
    for evaluation in due:
        if run.stop.signal:
            return
        if evaluation.name not in names:
            continue
        with run.console.working(f'Evaluating {evaluation.name}, step {run.step:,}'):
            values = evaluation(params, run.step, run.stop.agree)
        if values is not None:
            run.workdir.metrics.write(evaluation.name, run.step, values)


def stop_early(run: Run) -> None:
    """End the run, after all of its evaluations, if train.early_stopping says so."""
    early_stopping = run.train.early_stopping
    if not early_stopping or run.stop.signal:
        return
    ends = run.workdir.metrics.history().ends(early_stopping)
    if agreement.from_first_process(np.array(ends)):
        run.end = End.EARLY_STOPPING
        evaluate(run)


def save(run: Run) -> None:
    """Save a checkpoint of this step, with the files that a run needs to continue."""
    assert run.batch is not None
    progress = Progress(run.interval.metrics, run.skips.num_not_finite, run.clock.totals)
    progress = progress._replace(recent=run.state.recent)
    files = run.workdir.files | progress_files(run.stream, run.batch, progress)
    run.workdir.saver.save(run.step, saved_tree(run.spec, run.state), files)


def save_before_error(run: Run, error: Exception) -> None:
    """Save the last step before `error`, unless it is saved or its state is not valid.

    All processes save the same step, or none. If saving fails, a note on `error` says why.
    """
    if run.train_step is None:  # already finished
        return
    try:
        with run.console.working('Saving'):
            run.workdir.saver.wait()
            own_step = -1
            # The failed step may have consumed its donated buffers.
            has_state = not any(x.is_deleted() for x in jax.tree.leaves(run.state))
            is_saved = run.step in checkpoint.steps(run.workdir.path)
            is_new = run.batch is not None and not is_saved
            if has_state and is_new and not run.workdir.lock.is_lost and find_fault(run) is None:
                own_step = run.step
            # Wait until every process is here: the others fail at their next agreement.
            while not agreement.from_processes(np.array([True])).all():
                pass
            steps = agreement.from_processes(np.array([own_step]))
            if own_step < 0 or (steps != own_step).any():
                return
            save(run)
            run.workdir.saver.wait()
    except Exception as second:
        error.add_note(f'Step {run.step:,} could not be saved either: {second}')
        return
    run.console.line(f'Step {run.step:,} is saved before the error: a run resumes from there.')
