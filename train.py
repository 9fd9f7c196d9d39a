"""The train step and the loop: for each batch, step; when due, log, evaluate, save.

One step: `jax.shard_map` hands each device its rows of the batch and its slices of the parameters; the model and the
loss are local math with collectives; `jax.grad` gives each device's own gradients, and one line sums them over the
rows of all devices; outside, optax updates global arrays. Source: T5X t5x/train.py, t5x/trainer.py.
"""

import contextlib
import dataclasses
import enum
import functools
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict, FrozenConfigDict
from numpy.typing import NDArray

import checkpoint
import kernels
import loss
import model
import optimizer
import partition
import state_names
from model import T5Config
from run import console
from run.agreement import Batches, StopRequest, counts_of_all, remember_interrupt
from run.console import Console
from run.interval import Clock, Fault, Interval, Metrics, NotFinite, training_metrics
from run.prefetch import PrefetchedBatch
from run.workdir import Workdir, record_end
from stream import Stream

Leaf = TypeVar('Leaf')


class TrainState(NamedTuple, Generic[Leaf]):
    """A training state; leaves are arrays, shapes or specs."""

    step: Leaf  # int32: steps taken
    params: dict[str, Leaf]  # {T5X's path: float32}
    opt_state: optax.OptState


def train_step(
    spec: 'StepSpec', state: TrainState[jax.Array], batch: Mapping[str, jax.Array]
) -> tuple[TrainState[jax.Array], dict[str, jax.Array]]:
    """Take one step: return the next state and float32 metrics. Rows of `batch` are split over BATCH_AXES."""
    rows = jnp.arange(len(batch['decoder_target_tokens']))
    _, dropout_key = jax.random.split(jax.random.key(spec.seed))
    key = jax.random.fold_in(dropout_key, state.step)
    grads, metrics = gradients(spec, state.params, batch, rows, key)
    trained = spec.trained_of(state.params)
    updates, opt_state = spec.tx.update(grads, state.opt_state, trained)
    params = state.params | optax.apply_updates(trained, updates)
    metrics['learning_rate'] = spec.schedule(state.step)
    metrics['gradient_norm'] = optimizer.norm(grads)
    totals = [metrics['loss'], metrics['gradient_norm'], optimizer.norm(updates)]
    totals += map(kernels.sum, state_names.slots(opt_state, trained))
    metrics['finite'] = jnp.isfinite(sum(totals))
    new = TrainState(state.step + 1, params, opt_state)
    if spec.skips_not_finite:
        new = skip_unless(metrics['finite'], new, state)
    return new, metrics


def skip_unless(
    condition: jax.Array, new: TrainState[jax.Array], old: TrainState[jax.Array]
) -> TrainState[jax.Array]:
    """Return `new` if `condition` holds, else `old` with the step of `new` and the counters that mirror it."""
    tree = state_names.to_t5x(new.step, old.params, old.opt_state)
    skipped = TrainState(*state_names.from_t5x(tree, old.opt_state))
    return jax.tree.map(functools.partial(jnp.where, condition), new, skipped)


def gradients(
    spec: 'StepSpec', params: Mapping, batch: Mapping, rows: jax.Array, key: jax.Array
) -> tuple[dict, dict]:
    """Return the gradients of the trained parameters, and loss.weighted_sums of the batch."""
    specs = spec.state_specs.params
    sharded_gradients = jax.shard_map(
        functools.partial(device_gradients, spec),
        mesh=spec.mesh,
        in_specs=(specs, partition.BATCH, partition.BATCH, P()),
        out_specs=(spec.trained_of(specs), P()),
    )
    return sharded_gradients(params, batch, rows, key)


def device_gradients(spec, params, batch, rows_b, key):
    """Return one device's part of `gradients`, from its rows and its slices of the parameters.

    Differs from T5X, which divides each microbatch by its own weights and repeats the same dropout: here the
    gradients do not depend on the microbatches.
    """
    config = spec.model_config
    weights_bT, divisor = loss.weights_and_divisor(batch, spec.normalizing_factor)
    num_rows = lax.psum(len(rows_b), partition.BATCH_AXES)
    trained_specs = spec.trained_of(spec.state_specs.params)
    trained = partition.per_device(spec.trained_of(params), trained_specs)

    def microbatch_loss(trained, microbatch):
        batch, weights_bT, rows_b = microbatch
        logits_bTv, aux = model.apply(
            model.logits,
            params | trained,
            config,
            batch,
            rows_b,
            key=key,
            gradient_dtype=spec.gradient_dtype,
        )
        sums = loss.weighted_sums(
            logits_bTv,
            batch,
            weights_bT,
            divisor,
            z_loss=spec.loss_config.z_loss,
            label_smoothing=spec.loss_config.label_smoothing,
        )
        sums = loss.add_aux(sums, aux, config.family.losses(config), num_rows)
        return sums['loss'], sums

    def add_gradients(total, microbatch):
        grads, sums = jax.grad(microbatch_loss, has_aux=True)(trained, microbatch)
        return jax.tree.map(jnp.add, total, grads), sums

    zeros = jax.tree.map(jnp.zeros_like, trained)
    microbatches = partition.cut_rows((batch, weights_bT, rows_b), spec.num_microbatches)
    grads, sums = lax.scan(add_gradients, zeros, microbatches)
    sums = jax.tree.map(lambda x: x.sum(axis=0), sums)
    grads = partition.sum_gradients(grads, trained_specs)
    return grads, lax.psum(sums, partition.BATCH_AXES)


def init(spec: 'StepSpec') -> TrainState[jax.Array]:
    """Return the state before the first step."""
    init_key, _ = jax.random.split(jax.random.key(spec.seed))
    params = model.init(spec.model_config, init_key)
    return TrainState(jnp.int32(0), params, spec.tx.init(spec.trained_of(params)))


@dataclasses.dataclass(frozen=True, repr=False)  # no repr: JAX puts it in front of its messages
class StepSpec:
    """Everything that the program of a step depends on; prepare.make_spec makes it from a config."""

    model_config: T5Config
    loss_config: FrozenConfigDict
    optimizer_config: FrozenConfigDict
    learning_rate_config: FrozenConfigDict
    mesh: Mesh
    seed: int
    batch_size: int
    feature_lengths: FrozenConfigDict  # {feature of a batch: length}
    has_weights: bool  # examples have weights: decoder_loss_weights is float32
    num_microbatches: int
    gradient_dtype: str
    skips_not_finite: bool  # a step that is not finite leaves the state as it was

    @property
    def rows_per_device(self) -> int:
        return self.batch_size // partition.axes_size(self.mesh, partition.BATCH_AXES)

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
        pattern = self.optimizer_config.trainable
        if pattern:
            return optimizer.trained_paths(pattern, model.shapes(self.model_config))
        return model.adapter_paths(self.model_config) or tuple(model.shapes(self.model_config))

    def trained_of(self, tree: Mapping[str, Leaf]) -> dict[str, Leaf]:
        """Return the leaves of the trained parameters in `tree`, {path: leaf}."""
        return {path: tree[path] for path in self.trained}

    @functools.cached_property
    def unsaved(self) -> frozenset[str]:
        """The paths of the parameters that are in the base's checkpoint alone, in a run with adapters."""
        adapters = model.adapter_paths(self.model_config)
        if not adapters:
            return frozenset()
        return frozenset(model.shapes(self.model_config)).difference(adapters, self.trained)

    @functools.cached_property
    def state_shapes(self) -> TrainState[jax.ShapeDtypeStruct]:
        step = jax.ShapeDtypeStruct((), jnp.int32)
        params = {}
        for path, shape in model.shapes(self.model_config).items():
            params[path] = jax.ShapeDtypeStruct(shape, jnp.float32)
        opt_state = jax.eval_shape(self.tx.init, self.trained_of(params))
        return TrainState(step, params, opt_state)

    @functools.cached_property
    def state_specs(self) -> TrainState[P]:
        _, params, opt_state = self.state_shapes
        param_specs = model.param_specs(self.model_config)
        opt_specs = state_names.state_specs(opt_state, params, param_specs)
        return TrainState(P(), param_specs, opt_specs)


def compile_init(spec: StepSpec) -> jax.stages.Compiled:
    """Return `init`, compiled ahead of time."""
    shardings = partition.shardings(spec.mesh, spec.state_specs)
    return jax.jit(functools.partial(init, spec), out_shardings=shardings).lower().compile()


def jit_step(spec: StepSpec) -> jax.stages.Wrapped:
    """Return `train_step` as a compiled function (state, batch) -> (state, metrics); donates state."""
    shardings = partition.shardings(spec.mesh, (spec.state_specs, P()))

    def train_step_on_mesh(state, batch):
        # Tells kernels.py how many devices share the arrays of the optimizer.
        with jax.sharding.use_abstract_mesh(spec.mesh.abstract_mesh):
            return train_step(spec, state, batch)

    return jax.jit(train_step_on_mesh, out_shardings=shardings, donate_argnums=0)


def lower_step(spec: StepSpec) -> jax.stages.Lowered:
    """Return `jit_step`, lowered for the shapes of a state and a batch."""
    shardings, rows = partition.shardings(spec.mesh, (spec.state_specs, partition.BATCH))
    state = jax.tree.map(lambda x, to: x.update(sharding=to), spec.state_shapes, shardings)
    batch = {}
    for name, length in spec.feature_lengths.items():
        shape = (spec.batch_size, length)
        is_float = spec.has_weights and name == 'decoder_loss_weights'
        dtype = jnp.float32 if is_float else jnp.int32
        batch[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=rows)
    return jit_step(spec).lower(state, batch)


def compile_step(spec: StepSpec) -> jax.stages.Compiled:
    """Return `jit_step`, compiled ahead of time."""
    return lower_step(spec).compile(kernels.compiler_options(spec.mesh, spec.model_config.dtype))


# The loop.


class End(enum.Enum):
    """Why a run takes no more steps."""

    STEPS = 'train.steps'
    EPOCHS = 'train.epochs'
    EARLY_STOPPING = 'train.early_stopping'


class Evaluation(Protocol):
    """Numbers computed from the parameters every so many steps: validation losses, metrics of a task."""

    @property
    def name(self) -> str: ...  # names its lines in metrics.jsonl

    @property
    def every_steps(self) -> int: ...

    def __call__(
        self, params: Mapping[str, jax.Array], step: int, stop: Callable[[int], int]
    ) -> Mapping[str, float] | None:
        """Report, and return {T5X's tag: value}; None if `stop`, called with the batches so far, ended it."""


@dataclasses.dataclass
class Run:
    """A run in its workdir; `prepare.prepare` makes one."""

    config: ConfigDict
    workdir: Workdir
    console: Console
    stream: Stream
    evaluations: Sequence[Evaluation]
    progress: 'Progress'


@dataclasses.dataclass
class ReadyRun(Run):
    """A run that is ready for its next step."""

    spec: StepSpec
    train_step: Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, Metrics]]
    not_finite: NotFinite


@dataclasses.dataclass
class FinishedRun(Run):
    """A run after its last step. A signal may have ended it before its last evaluations."""


class Progress:
    """How far a run has come, as a checkpoint keeps it."""

    def __init__(
        self,
        step: int,
        state: TrainState[jax.Array],
        interval: Sequence[dict[str, float]],
        end: End | None,
    ):
        """`interval`: the metrics of the steps since the last logged one."""
        self.first_step = step
        self.step = step  # steps taken
        self.state = state
        self.batch: PrefetchedBatch | None = None  # the batch of the last step
        self.interval = Interval(interval)
        self.clock = Clock()
        self.end = end

    def take_step(self, run: ReadyRun, batch: PrefetchedBatch) -> None:
        on_devices = partition.place_rows(run.spec.mesh, batch.features)
        self.state, metrics = run.train_step(self.state, on_devices)
        self.step += 1
        self.batch = batch
        self.interval.add(metrics, batch.features, batch.before)
        if self.step == run.config.train.steps:
            self.end = End.STEPS


def train(run: ReadyRun | FinishedRun, stop: Callable[[], int] | None = None) -> int:
    """Take the steps up to config.train.steps. Log, evaluate and save on the way.

    When `stop` returns the number of a signal, save the step and return the number. Without `stop` (in a
    notebook) an interrupt has this effect. Raises FloatingPointError, at most one logged interval later,
    for a step that is not finite, as train.on_not_finite says; other errors, such as bad data or a full
    disk, are raised after the steps before them are saved.
    """
    assert not run.workdir.lock.closed, 'this run has ended: prepare it again to continue'
    with run.workdir.lock, contextlib.ExitStack() as stack:
        if stop is None:
            stop = stack.enter_context(remember_interrupt())
        request = StopRequest(stop)
        try:
            if isinstance(run, ReadyRun):
                take_steps(run, request)
            else:
                finish(run, request)
            with run.console.working('Saving'):
                partition.in_all(run.workdir.saver.wait)
        except Exception as error:
            if isinstance(run, ReadyRun):
                save_before_error(run, error)
            raise
        except BaseException:  # a second interrupt
            run.workdir.saver.wait()
            raise
        run.workdir.saver.prune()  # an evaluation may have come after the checkpoint
        saved_steps = checkpoint.steps(run.workdir.path)
        if request.signal:
            run.console.line(
                f'Stopped after step {run.progress.step:,}, which is saved: the same command continues from there.'
            )
        else:
            lines = console.ending(
                run.workdir.path,
                run.config.train,
                run.stream.mixture,
                run.progress.step,
                run.workdir.metrics.history(run.config.save),
                saved_steps,
            )
            for line in lines:
                run.console.line(line)
    return request.signal


def finish(run: FinishedRun, stop: StopRequest) -> None:
    """Do the evaluations that a signal or a kill prevented."""
    evaluate_step(run, missing_evaluations(run), stop)
    step = run.progress.step
    if run.progress.end == End.EARLY_STOPPING:
        record_end(run.workdir.path, step)
        run.console.line(console.stopped_early(step, run.config))
    else:
        run.console.line(f'Already at step {step:,} of {run.config.train.steps:,}: nothing to do.')


def take_steps(run: ReadyRun, stop: StopRequest) -> None:
    """For each batch, step; when due, log, evaluate, save."""
    progress = run.progress
    clock = progress.clock
    with run.console.working('Making the first batch'):
        epochs = run.config.train.epochs
        batches = Batches(run.stream, run.config.data.num_workers, may_end=epochs > 0)
    clock.restart()
    if batches.have_ended:
        progress.end = End.EPOCHS
    if progress.step in checkpoint.steps(run.workdir.path):
        with clock.paused():
            evaluate_or_end(run, missing_evaluations(run), stop)
    if batches.have_ended:
        run.console.line(
            f'train.epochs={epochs} are over after step {progress.step:,}: this run is finished.'
        )
    while progress.end is None and not stop.signal:
        run.workdir.saver.check()
        if run.workdir.lock.is_lost:
            raise OSError(f'{run.workdir.path} is in use by another process: this run ends')
        with clock.taking_step():
            with clock.waiting_for_data():
                batch = batches.next()
            progress.take_step(run, batch)
            if batches.have_ended:
                progress.end = End.EPOCHS
            due = due_after(run)
            # Queue at most one step ahead; none if steps take over a second: a stop waits for one step.
            progress.interval.wait(all_steps=any(due) or clock.seconds_of_last_step > 1)
        stop.agree(progress.step)
        for text in batch.faults:
            run.console.line(f'Left out, {batch.num_faults:,} so far: {text}')
        is_shown = progress.step == progress.first_step + 1 or run.console.is_due()
        if not (any(due) or is_shown or stop.signal):
            continue
        progress.interval.fetch()
        fault = find_fault(run)
        if fault is not None:
            run.workdir.saver.wait()  # the error names the newest checkpoint
            raise run.not_finite.error(fault)
        if due.log or is_shown:
            log(run, due)
        with clock.paused():
            evaluate_or_end(run, due.evaluations, stop)
            # Save last: a run that resumes from it has the log and the evaluations.
            if due.save or progress.end or stop.signal:
                save(run)
    if progress.end in (End.EPOCHS, End.EARLY_STOPPING):
        record_end(run.workdir.path, progress.step)


class Due(NamedTuple):
    log: bool
    evaluations: Sequence[Evaluation]
    save: bool


def due_after(run: Run) -> Due:
    """Return what is due after the last step; everything if it is the last of the run."""
    step = run.progress.step
    is_last = run.progress.end is not None
    return Due(
        log=is_last or step % run.config.log.every_steps == 0,
        evaluations=[x for x in run.evaluations if is_last or step % x.every_steps == 0],
        save=is_last or step % run.config.save.every_steps == 0,
    )


def log(run: ReadyRun, due: Due) -> None:
    """Show the metrics of the steps since the last logged one; write them if that is due."""
    progress = run.progress
    step = progress.step
    values = training_metrics(progress.interval.metrics, run.config, progress.clock)
    text = console.progress_line(step, run.config.train, values)
    if not due.log:
        run.console.live(text)
        return
    run.console.line(text)
    progress.interval = Interval()
    assert progress.batch is not None
    counts = counts_of_all(run.stream, progress.batch)
    for task, (num_examples, num_trimmed) in counts.items():
        values[f'data/{task}/examples'] = num_examples
        values[f'data/{task}/trimmed'] = num_trimmed
    run.workdir.metrics.write('train', step, values)
    num_logged = step // run.config.log.every_steps
    if num_logged.bit_count() == 1 or step == run.config.train.steps:  # 1, 2, 4, ...
        for line in console.describe_trimming(counts):
            run.console.line(line)
    progress.clock.restart()


def evaluate_or_end(run: Run, due: Sequence[Evaluation], stop: StopRequest) -> None:
    """Do evaluations after the last step. If train.early_stopping then ends the run, do the others."""
    evaluate_step(run, due, stop)
    early_stopping = run.config.train.early_stopping
    if not due or not early_stopping or stop.signal:
        return
    ends = run.workdir.metrics.history(run.config.save).ends(early_stopping)
    if partition.from_first_process(np.array(ends)):
        run.progress.end = End.EARLY_STOPPING
        evaluate_step(run, missing_evaluations(run), stop)
        run.console.line(console.stopped_early(run.progress.step, run.config))


def evaluate_step(run: Run, due: Sequence[Evaluation], stop: StopRequest) -> None:
    """Evaluate the averaged parameters after the last step. A resumed run repeats an evaluation that a signal ended."""
    step = run.progress.step
    state = run.progress.state
    params = optimizer.averaged(state.params, state.opt_state)
    for evaluation in due:
        if stop.signal:
            break
        with run.console.working(f'Evaluating {evaluation.name}, step {step:,}'):
            values = evaluation(params, step, stop.agree)
        if values is not None:
            run.workdir.metrics.write(evaluation.name, step, values)


def missing_evaluations(run: Run) -> list[Evaluation]:
    """Return the evaluations that are due after the last step and not in metrics.jsonl."""
    due = due_after(run).evaluations
    missing = run.workdir.metrics.missing([x.name for x in due], run.progress.step)
    return [x for x in due if x.name in missing]


def find_fault(run: ReadyRun) -> Fault | None:
    """Return the first step that ends the run; report the steps that were skipped."""
    progress = run.progress
    return run.not_finite.find(progress.interval, progress.step, run.stream, run.console.line)


def save(run: ReadyRun) -> None:
    """Save a checkpoint after the last step, and beside it what a run needs to continue."""
    progress = run.progress
    batch = progress.batch
    assert batch is not None
    rows = np.zeros((run.config.train.batch_size, *batch.after.shape[1:]), np.int64)
    rows[run.stream.rows] = batch.after
    position_file = io.BytesIO()
    np.save(position_file, partition.from_processes(rows).max(axis=0))
    files = {
        **run.workdir.files,
        'data_counts.json': json.dumps(counts_of_all(run.stream, batch)).encode(),
        'data_files.json': json.dumps([x._asdict() for x in run.stream.mixture.files]).encode(),
        'data_position.npy': position_file.getvalue(),
        'interval.json': json.dumps(progress.interval.metrics).encode(),
        'not_finite.json': json.dumps(run.not_finite.count).encode(),
    }
    run.workdir.saver.save(progress.step, saved_tree(run.spec, progress.state), files)


def saved_tree(spec: StepSpec, state: TrainState[Leaf]) -> dict[str, Leaf | NDArray]:
    """Return a state as a checkpoint holds it, without the parameters in its base's checkpoint."""
    tree = state_names.to_t5x(*state)
    for path in spec.unsaved:
        del tree[f'{checkpoint.PARAMETER_PREFIX}{path}']
    return tree


def save_before_error(run: ReadyRun, error: Exception) -> None:
    """Save the last step before `error`, unless it is saved or its state is not valid.

    All processes save the same step, or none. If saving fails, a note of `error` says why.
    """
    progress = run.progress
    step = progress.step
    try:
        with run.console.working('Saving'):
            run.workdir.saver.wait()
            own_step = -1
            # The failed step may have consumed its donated buffers.
            is_there = not any(x.is_deleted() for x in jax.tree.leaves(progress.state))
            is_new = progress.batch is not None and step not in checkpoint.steps(run.workdir.path)
            if is_there and is_new and not run.workdir.lock.is_lost:
                progress.interval.fetch()
                if find_fault(run) is None:
                    own_step = step
            # Wait until every process is here: the others fail at their next agreement.
            while not partition.from_processes(np.array([True])).all():
                pass
            steps = partition.from_processes(np.array([own_step]))
            if own_step < 0 or (steps != own_step).any():
                return
            save(run)
            run.workdir.saver.wait()
    except Exception as second:
        error.add_note(f'Step {step:,} could not be saved, too: {second}')
        return
    run.console.line(f'Step {step:,} is saved before the error: a run resumes from there.')
