"""The train step and the loop: for each batch, step; when due, log, evaluate, save.

One step: `jax.shard_map` hands each device its rows of the batch and its slices of the parameters;
the model and the loss are local math with collectives; `jax.grad` gives each device's own gradients
and one line sums them over the rows of all devices; outside, optax updates global arrays. Source:
T5X t5x/train.py, t5x/trainer.py.
"""

import contextlib
import dataclasses
import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ml_collections import FrozenConfigDict

import checkpoint
import evaluate
import infer
import kernels
import loss
import model
import optimizer
import partition
from model import T5Config
from run import best, compiler, console, prefetch, results
from run.agreement import Batches, StopRequest, counts_of_all, remember_interrupt
from run.console import Console
from run.interval import Clock, Interval, show
from run.not_finite import COUNT_FILE, NotFinite
from run.task_metrics import TaskMetrics, events_of, write_results
from run.workdir import Metrics, record_end
from stream import Stream
from vocabulary import Vocabulary


class TrainState(NamedTuple):
    step: jax.Array  # int32, the number of steps taken
    params: dict[str, jax.Array]  # {T5X's path: float32}
    opt_state: Any


def train_step(trainer: 'Trainer', state: TrainState, batch: Mapping) -> tuple[TrainState, dict]:
    """Take one step: return the next state, and the metrics of this step as float32 scalars.

    `batch`: T5X's features, int32 [rows, length], rows split over BATCH_AXES.
    """
    rows = jnp.arange(len(batch['decoder_target_tokens']))
    _, dropout_key = jax.random.split(jax.random.key(trainer.seed))
    key = jax.random.fold_in(dropout_key, state.step)
    grads, metrics = gradients(trainer, state.params, batch, rows, key)
    trained = trainer.trained_of(state.params)
    updates, opt_state = trainer.tx.update(grads, state.opt_state, trained)
    params = state.params | optax.apply_updates(trained, updates)
    metrics['learning_rate'] = trainer.schedule(state.step)
    metrics['gradient_norm'] = optimizer.norm(grads)
    totals = [metrics['loss'], metrics['gradient_norm'], optimizer.norm(updates)]
    totals += map(kernels.sum, optimizer.slots(opt_state, trained))
    metrics['finite'] = jnp.isfinite(sum(totals))
    new = TrainState(state.step + 1, params, opt_state)
    if trainer.skips_not_finite:
        # Only the step goes on, and counts that are copies of it.
        tree = optimizer.to_t5x(new.step, state.params, state.opt_state)
        old = TrainState(*optimizer.from_t5x(tree, state.opt_state))
        new = jax.tree.map(functools.partial(jnp.where, metrics['finite']), new, old)
    return new, metrics


def gradients(
    trainer: 'Trainer', params: Mapping, batch: Mapping, rows: jax.Array, key: jax.Array
) -> tuple[dict, dict]:
    """Return the gradients by the trained parameters, and loss.weighted_sums of the batch.

    `rows` and `key` determine the dropout.
    """
    specs = trainer.specs.params
    sharded_gradients = jax.shard_map(
        functools.partial(device_gradients, trainer),
        mesh=trainer.mesh,
        in_specs=(specs, partition.BATCH, partition.BATCH, P()),
        out_specs=(trainer.trained_of(specs), P()),
    )
    return sharded_gradients(params, batch, rows, key)


def device_gradients(trainer, params, batch, rows_b, key):
    """Return one device's part of `gradients`, from its rows and its slices of the parameters.

    Differs from T5X, which divides each microbatch by its own weights and repeats the same dropout:
    here microbatches have the gradients of the whole batch.
    """
    config = trainer.model_config
    weights_bT, divisor = loss.weights_and_divisor(batch, trainer.normalizing_factor)
    num_rows = lax.psum(len(rows_b), partition.BATCH_AXES)
    trained_specs = trainer.trained_of(trainer.specs.params)
    trained = partition.per_device(trainer.trained_of(params), trained_specs)

    def microbatch_loss(trained, microbatch):
        batch, weights_bT, rows_b = microbatch
        logits_bTv, aux = model.apply(
            lambda: model.logits(config, batch, rows_b),
            params | trained,
            key,
            trainer.gradient_dtype,
        )
        sums = loss.weighted_sums(
            logits_bTv,
            batch,
            weights_bT,
            divisor,
            z_loss=trainer.loss_config.z_loss,
            label_smoothing=trainer.loss_config.label_smoothing,
        )
        sums = loss.add_aux(sums, aux, config.modules.losses(config), num_rows)
        return sums['loss'], sums

    def add_gradients(total, microbatch):
        grads, sums = jax.grad(microbatch_loss, has_aux=True)(trained, microbatch)
        return jax.tree.map(jnp.add, total, grads), sums

    zeros = jax.tree.map(jnp.zeros_like, trained)
    microbatches = partition.cut_rows((batch, weights_bT, rows_b), trainer.num_microbatches)
    grads, sums = lax.scan(add_gradients, zeros, microbatches)
    sums = jax.tree.map(lambda x: x.sum(axis=0), sums)
    grads = partition.sum_gradients(grads, trained_specs)
    return grads, lax.psum(sums, partition.BATCH_AXES)


def init(trainer: 'Trainer') -> TrainState:
    """Return the state before the first step."""
    init_key, _ = jax.random.split(jax.random.key(trainer.seed))
    params = model.init(trainer.model_config, init_key)
    return TrainState(jnp.int32(0), params, trainer.tx.init(trainer.trained_of(params)))


@dataclasses.dataclass(frozen=True, repr=False)  # JAX prints it in front of its messages
class Trainer:
    """Everything that the program of a step depends on; modes/train.py makes it from a config.

    It is compared by value: equal ones in one process share the compiled programs below.
    """

    model_config: T5Config
    loss_config: FrozenConfigDict
    optimizer_config: FrozenConfigDict
    learning_rate_config: FrozenConfigDict
    mesh: Mesh
    seed: int
    batch_size: int
    feature_lengths: FrozenConfigDict  # of each feature of a batch
    num_microbatches: int
    gradient_dtype: str
    skips_not_finite: bool  # whether a step that is not finite leaves the state as it was

    @functools.cached_property
    def normalizing_factor(self) -> float | str:
        return loss.parse_normalizing_factor(self.loss_config.loss_normalizing_factor)

    @functools.cached_property
    def schedule(self) -> Callable[[jax.Array], jax.Array]:
        return optimizer.make_schedule(self.learning_rate_config)

    @functools.cached_property
    def tx(self) -> optax.GradientTransformation:
        return optimizer.make_optimizer(self.optimizer_config, self.schedule)

    @functools.cached_property
    def trained(self) -> tuple[str, ...]:
        """The paths of the parameters that are trained."""
        pattern = self.optimizer_config.trainable
        if pattern:
            return optimizer.trained_paths(pattern, model.shapes(self.model_config))
        return model.adapter_paths(self.model_config) or tuple(model.shapes(self.model_config))

    def trained_of(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `tree`, {path of a parameter: leaf}, has of the trained parameters."""
        return {path: tree[path] for path in self.trained}

    @functools.cached_property
    def unsaved(self) -> frozenset[str]:
        """The paths of the parameters that a run with adapters leaves to its base's checkpoint."""
        adapters = model.adapter_paths(self.model_config)
        if not adapters:
            return frozenset()
        return frozenset(model.shapes(self.model_config)).difference(adapters, self.trained)

    @functools.cached_property
    def shapes(self) -> Any:
        """The state as a TrainState of jax.ShapeDtypeStruct."""
        step = jax.ShapeDtypeStruct((), jnp.int32)
        params = {}
        for path, shape in model.shapes(self.model_config).items():
            params[path] = jax.ShapeDtypeStruct(shape, jnp.float32)
        opt_state = jax.eval_shape(self.tx.init, self.trained_of(params))
        return TrainState(step, params, opt_state)  # type: ignore[arg-type]

    @functools.cached_property
    def specs(self) -> Any:
        """How the state is split over the mesh, as a TrainState of PartitionSpec."""
        _, params, opt_state = self.shapes
        param_specs = model.param_specs(self.model_config)
        opt_specs = optimizer.state_specs(opt_state, params, param_specs)
        return TrainState(P(), param_specs, opt_specs)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=16)
def compile_init(trainer: Trainer) -> jax.stages.Compiled:
    """Return `init`, compiled ahead of time."""
    shardings = partition.shardings(trainer.mesh, trainer.specs)
    return jax.jit(functools.partial(init, trainer), out_shardings=shardings).lower().compile()


@functools.lru_cache(maxsize=16)
def jit_step(trainer: Trainer) -> jax.stages.Wrapped:
    """Return `train_step` as a compiled function (state, batch) -> (state, metrics); donates state."""
    shardings = partition.shardings(trainer.mesh, (trainer.specs, P()))

    def train_step_on_mesh(state, batch):
        # kernels.py asks how many devices share the arrays of the optimizer.
        with jax.sharding.use_abstract_mesh(trainer.mesh.abstract_mesh):
            return train_step(trainer, state, batch)

    return jax.jit(train_step_on_mesh, out_shardings=shardings, donate_argnums=0)


def lower_step(trainer: Trainer) -> jax.stages.Lowered:
    """Return `jit_step`, lowered for the trainer's batch before there is a state or a batch."""
    shardings, rows = partition.shardings(trainer.mesh, (trainer.specs, partition.BATCH))
    state = jax.tree.map(lambda x, to: x.update(sharding=to), trainer.shapes, shardings)
    batch = {}
    for name, length in trainer.feature_lengths.items():
        shape = (trainer.batch_size, length)
        batch[name] = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)
    return jit_step(trainer).lower(state, batch)


@functools.lru_cache(maxsize=16)
def compile_step(trainer: Trainer) -> jax.stages.Compiled:
    """Return `jit_step`, compiled ahead of time."""
    return lower_step(trainer).compile(compiler.options(trainer.mesh, trainer.model_config.dtype))


# The loop.


class Run(NamedTuple):
    """A run that is ready to start or to go on: `modes.train.prepare` makes it."""

    config: Any
    files: dict[str, bytes]  # of every checkpoint: the settings, the vocabulary, an own model
    workdir: Path
    console: Console
    metrics: Metrics
    lock: Any  # while it is open, no other process uses the workdir
    trainer: Trainer
    train_step: Any  # compiled; None where the run is finished
    stream: Stream
    vocabulary: Vocabulary
    evaluations: list[evaluate.Evaluation]
    task_metrics: TaskMetrics  # of no task where infer_eval.every_steps=0
    t5: infer.T5  # the model that answers for them, which is given the parameters of a step
    missing_evaluations: list[str]  # after first_step, because a signal ended them
    first_step: int  # the steps that were taken before
    state: TrainState
    interval: list[dict]  # the metrics of the steps since the last logged one
    not_finite: NotFinite
    restore_newest: Callable[[], tuple[int, TrainState, list[dict]]]  # step, state, interval


def train(run: Run, stop: Callable[[], int] | None = None) -> int:
    """Take the steps up to config.train.steps. Log, evaluate and save on the way.

    Ends early when `stop` returns the number of a signal: the step is saved and the number
    returned. Without `stop` (in a notebook) an interrupt does that. Raises FloatingPointError, at
    most one logged interval later, for a step that is not finite, as train.on_not_finite says; other
    errors, of bad data or a full disk, are raised after the steps before them are saved.
    """
    if run.lock.closed:
        raise ValueError(f'the run in {run.workdir} has ended: prepare it once more to go on')
    with run.lock, contextlib.ExitStack() as stack:
        if stop is None:
            stop = stack.enter_context(remember_interrupt())
        stop_request = StopRequest(stop)
        progress = Progress(run)
        # Differs from T5X's SaveBestCheckpointer, which by default keeps checkpoints without a
        # value, too. Here a stop between two evaluations changes nothing of what a run leaves.
        saver = checkpoint.Saver(
            run.workdir,
            keep=run.config.save.keep,
            keep_every=run.config.save.keep_every,
            dtype=run.config.save.dtype,
            rank=lambda step: history(run).rank(step),
            period=run.config.save.every_steps if run.not_finite.action == 'back' else 1,
        )
        try:
            take_steps(run, saver, progress, stop_request)
            with run.console.working('Saving'):
                partition.in_all(saver.wait)
        except Exception as error:
            if run.train_step is not None:
                save_before_error(run, saver, progress, error)
            raise
        except BaseException:  # a second interrupt
            saver.wait()
            raise
        saver.prune()  # after an evaluation that came later than the checkpoint
        saved_steps = checkpoint.steps(run.workdir)
        if stop_request.signal:
            run.console.line(console.stopped(progress.step, saved_steps))
        else:
            for line in console.ending(run, progress.step, history(run), saved_steps):
                run.console.line(line)
    return stop_request.signal


def history(run: Run) -> best.History:
    """Return the values of `save.best_metric` so far. Only the first process has them."""
    return best.history(run.config.save, run.metrics.evaluations)


def take_steps(
    run: Run, saver: checkpoint.Saver, progress: 'Progress', stop_request: StopRequest
) -> None:
    """For each batch, step; when due, log, evaluate, save. `progress` follows."""
    config = run.config
    if run.train_step is None:  # the run is finished, but for what a signal or a kill left out
        evaluate_step(run, progress, run.missing_evaluations, stop_request)
        if progress.step < config.train.steps:
            record_end(run.workdir, progress.step)
            run.console.line(console.stopped_early(progress.step, config))
        else:
            run.console.line(
                f'Step {progress.step:,} of {config.train.steps:,} is taken: this run is finished.'
            )
        return
    with run.console.working('Making the first batch'):
        batches = Batches(run.stream, config.data.num_workers, may_end=config.train.epochs > 0)
    clock = Clock()
    step = run.first_step
    missing = run.missing_evaluations
    if batches.have_ended:
        missing = run.metrics.missing(due_evaluations(run, step, is_last=True), step)
    with clock.paused():
        evaluate_step(run, progress, missing, stop_request)
        stops_early = bool(missing) and stop_early(run, progress, stop_request)
    if batches.have_ended:
        run.console.line(
            f'train.epochs={config.train.epochs} are over after step {step:,}: this run is finished.'
        )
    while step < config.train.steps and not (
        batches.have_ended or stops_early or stop_request.signal
    ):
        saver.check()
        with clock.taking_step():
            with clock.waiting_for_data():
                batch = batches.next()
            progress.take_step(run, batch)
            step = progress.step
            interval = progress.interval
            is_last = step == config.train.steps or batches.have_ended
            log_now = is_last or step % config.log.every_steps == 0
            save_now = is_last or step % config.save.every_steps == 0
            evaluate_now = due_evaluations(run, step, is_last)
            is_due = log_now or save_now or bool(evaluate_now)
            # While a step runs, the next one is prepared and queued, but no more; and not even that
            # where steps are slow, so that a request to stop waits for one step only.
            is_slow = clock.seconds_of_last_step > 1
            interval.wait(all_steps=is_due or is_slow)
        stop_request.agree(step)
        show_now = log_now or step == run.first_step + 1 or run.console.is_due()
        for text in batch.faults:
            run.console.line(f'Left out, {batch.num_faults:,} so far: {text}')
        if is_due or show_now or stop_request.signal:
            interval.fetch()
            if not run.not_finite.check(run, saver, progress):
                # Not when progress is shown, which depends on the clock, nor after a signal: the run
                # that goes on comes here once more.
                if batches.have_ended or (is_due and not stop_request.signal):
                    run.not_finite.go_back(run, saver, progress, not batches.have_ended)
                    step = progress.step
                    clock.restart()
                continue
        if log_now:
            progress.interval = Interval([])
        if show_now:
            show(run, progress, interval, clock, log_now)
        if log_now:
            clock.restart()
        with clock.paused():
            evaluate_step(run, progress, evaluate_now, stop_request)
            stops_early = bool(evaluate_now) and stop_early(run, progress, stop_request)
            # The checkpoint comes last: a run that goes on from it has all that came before.
            if save_now or stops_early or stop_request.signal:
                save(run, saver, progress)
    if batches.have_ended or stops_early:
        record_end(run.workdir, step)


class Progress:
    """How far a run has come: what its next step begins from, and what a checkpoint holds."""

    def __init__(self, run: Run):
        self.step = run.first_step  # the last one taken
        self.state = run.state
        self.batch: prefetch.PrefetchedBatch | None = None  # that the last step took
        self.interval = Interval(run.interval)

    def take_step(self, run: Run, batch: prefetch.PrefetchedBatch) -> None:
        on_devices = partition.place_rows(run.trainer.mesh, batch.features)
        self.state, metrics = run.train_step(self.state, on_devices)
        self.step += 1
        self.batch = batch
        self.interval.add(metrics, batch.features, batch.before)


def due_evaluations(run: Run, step: int, is_last: bool) -> list[str]:
    """Return the names of the evaluations that are due after `step`."""
    names = []
    if is_last or step % run.config.eval.every_steps == 0:
        names += [evaluation.name for evaluation in run.evaluations]
    every_steps = run.config.infer_eval.every_steps
    if every_steps and (is_last or step % every_steps == 0):
        names += [f'{results.FOLDER}/{task.name}' for task in run.task_metrics.tasks]
    return names


def evaluate_step(
    run: Run, progress: Progress, names: Sequence[str], stop_request: StopRequest
) -> None:
    """Do the evaluations of these names after the last step, with the average of the parameters.

    A signal ends an evaluation without a result; the run that goes on repeats it.
    """
    step = progress.step
    params = optimizer.averaged(progress.state.params, progress.state.opt_state)
    for evaluation in run.evaluations:
        if evaluation.name not in names or stop_request.signal:
            continue
        with run.console.working(f'Evaluating step {step:,}'):
            losses = evaluation(params, stop_request.agree)
        if losses is not None:
            run.metrics.write(evaluation.name, step, losses)
            of_task = ''
            if len(run.evaluations) > 1:
                of_task = f', {evaluation.name.partition("/")[2]}'
            run.console.line(f'Step {step:,}{of_task}: {console.compare_with_baseline(losses)}')

    due = [x for x in run.task_metrics.tasks if f'{results.FOLDER}/{x.name}' in names]
    if not due or stop_request.signal:
        return
    values = {}
    run.t5.arrays = model.merge_adapters(run.trainer.model_config, params)
    for task in due:
        with run.console.working(f'Evaluating {task.name}, step {step:,}'):
            found = run.task_metrics(run.t5, task, stop_request.agree)
        if found is None:
            break
        write = functools.partial(write_results, run.workdir, task, step, found, run.console.line)
        partition.in_all(write)
        run.metrics.write(f'{results.FOLDER}/{task.name}', step, events_of(task, found.values))
        values[task.name] = found.values
    run.t5.arrays = {}
    if values:
        run.console.line(run.task_metrics.describe(step, values))


def stop_early(run: Run, progress: Progress, stop_request: StopRequest) -> bool:
    """Return whether train.early_stopping ends the run after the last step, which was evaluated.

    If it does, do the evaluations that only a last step has. The first process decides.
    """
    early_stopping = run.config.train.early_stopping
    if not early_stopping or stop_request.signal:
        return False
    ends = np.array(history(run).ends(early_stopping))
    if not partition.from_first_process(ends):
        return False
    step = progress.step
    missing = run.metrics.missing(due_evaluations(run, step, is_last=True), step)
    evaluate_step(run, progress, missing, stop_request)
    run.console.line(console.stopped_early(step, run.config))
    return True


def save(run: Run, saver: checkpoint.Saver, progress: Progress) -> None:
    """Save a checkpoint after the last step, and beside it what a run needs to go on."""
    batch = progress.batch
    assert batch is not None
    rows = np.zeros((run.config.train.batch_size, *batch.after.shape[1:]), np.int64)
    rows[run.stream.rows] = batch.after
    position_file = io.BytesIO()
    np.save(position_file, partition.from_processes(rows).max(axis=0))
    files = {
        **run.files,
        'data_counts.json': json.dumps(counts_of_all(run.stream, batch)).encode(),
        'data_files.json': json.dumps(run.stream.mixture.files_as_json()).encode(),
        'data_position.npy': position_file.getvalue(),
        'interval.json': json.dumps(progress.interval.metrics).encode(),
        COUNT_FILE: json.dumps(run.not_finite.count).encode(),
    }
    saver.save(progress.step, saved_tree(run.trainer, progress.state), files)


def saved_tree(trainer: Trainer, state: TrainState) -> dict[str, Any]:
    """Return a state as a checkpoint holds it, without the parameters that its base has."""
    tree = optimizer.to_t5x(*state)
    for path in trainer.unsaved:
        del tree[f'{checkpoint.PARAMETER_PREFIX}{path}']
    return tree


def save_before_error(
    run: Run, saver: checkpoint.Saver, progress: Progress, error: Exception
) -> None:
    """Save the last step, if it is not saved yet and its state is valid, so that `error` loses none.

    All processes save the same step, or none. If saving fails, a note of `error` says why.
    """
    try:
        with run.console.working('Saving'):
            saver.wait()
            step = progress.step
            can_save = progress.batch is not None and step not in checkpoint.steps(run.workdir)
            # A state is gone that was donated to a step that failed.
            if any(x.is_deleted() for x in jax.tree.leaves(progress.state)):
                can_save = False
            if can_save:
                progress.interval.fetch()
                can_save = run.not_finite.leaves_valid(run, progress)
            # The other processes ask this before their next step, and come here.
            while not partition.from_processes(np.array([True])).all():
                pass
            steps = partition.from_processes(np.array([step if can_save else -1]))
            if not can_save or (steps != step).any():
                return
            save(run, saver, progress)
            saver.wait()
    except Exception as second:
        error.add_note(f'Step {progress.step:,} could not be saved, too: {second}')
        return
    run.console.line(f'Step {progress.step:,} is saved before the error: a run goes on from there.')
