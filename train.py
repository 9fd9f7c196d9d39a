"""The training run: the step, the loop around it, and what a run starts from.

One step: `jax.shard_map` hands each device its rows of the batch and its slices of the parameters;
the model and the loss are local math with collectives; `jax.grad` gives each device's own gradients
and one line sums them over 'data'; outside, optax updates global arrays. Source: T5X t5x/train.py,
t5x/trainer.py.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import re
import signal
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ml_collections import FrozenConfigDict

import best
import checkpoint
import convert
import data
import evaluate
import infer
import infer_eval
import loss
import model
import optimizer
import own_model
import partition
import paths
import plan
import prefetch
import results
import settings
import sources
import tasks
import workdir
from mixtures import OpenMixture, OpenTask
from vocabulary import Vocabulary, find_or_train_vocabulary, find_vocabulary, read_settings

LINES_OF_A_SLOW_EVALUATION = 1_000_000  # that are read in about ten seconds or more
STEPS_PER_AGREEMENT = 10  # between the times when several processes ask each other whether to stop


class TrainState(NamedTuple):
    step: jax.Array  # int32, the number of steps taken
    params: dict[str, jax.Array]  # {T5X's path: float32}
    opt_state: Any


def train_step(trainer: 'Trainer', state: TrainState, batch: Mapping) -> tuple[TrainState, dict]:
    """Take one step: return the next state, and the metrics of this step as float32 scalars.

    `batch`: T5X's features, int32 [rows, length], rows split over 'data'.
    """
    rows = jnp.arange(len(batch['decoder_target_tokens']))
    _, dropout_key = jax.random.split(jax.random.key(trainer.seed))
    key = jax.random.fold_in(dropout_key, state.step)
    grads, metrics = gradients(trainer, state.params, batch, rows, key)
    trained = trainer.trained_of(state.params)
    updates, opt_state = trainer.tx.update(grads, state.opt_state, trained)
    params = state.params | optax.apply_updates(trained, updates)
    metrics['learning_rate'] = trainer.schedule(state.step)
    metrics['gradient_norm'] = optax.tree.norm(grads)
    metrics['finite'] = jnp.isfinite(metrics['loss'] + optax.tree.norm(updates))
    return TrainState(state.step + 1, params, opt_state), metrics


def gradients(
    trainer: 'Trainer', params: Mapping, batch: Mapping, rows: jax.Array, key: jax.Array
) -> tuple[dict, dict]:
    """Return the gradients of the batch's loss by the trained parameters, and its loss.weighted_sums.

    `rows` and `key` determine the dropout.
    """
    specs = trainer.specs.params
    sharded_gradients = jax.shard_map(
        functools.partial(device_gradients, trainer),
        mesh=trainer.mesh,
        in_specs=(specs, partition.BATCH, partition.BATCH, P()),
        out_specs=(trainer.trained_of(specs), P()),
    )
    return own_model.traced(trainer.model_config, sharded_gradients)(params, batch, rows, key)


def device_gradients(trainer, params, batch, rows_b, key):
    """Return one device's part of `gradients`, from its rows and its slices of the parameters.

    In microbatches a step has the gradients of its whole batch: they are divided by the weights of
    all rows, and each row keeps its own dropout. Differs from T5X, which divides each microbatch by
    its own weights and repeats the same dropout in all of them.
    """
    weights_bT, divisor = loss.weights_and_divisor(batch, trainer.normalizing_factor)
    trained_specs = trainer.trained_of(trainer.specs.params)
    trained = partition.per_device(trainer.trained_of(params), trained_specs)
    model = own_model.of(trainer.model_config)

    def microbatch_loss(trained, microbatch):
        batch, weights_bT, rows_b = microbatch
        logits_bTv = model.apply(
            lambda: model.logits(trainer.model_config, batch, rows_b), params | trained, key
        )
        sums = loss.weighted_sums(
            logits_bTv,
            batch,
            weights_bT,
            divisor,
            z_loss=trainer.loss_config.z_loss,
            label_smoothing=trainer.loss_config.label_smoothing,
        )
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
    model = own_model.of(trainer.model_config)
    params = model.init(trainer.model_config, init_key)
    return TrainState(jnp.int32(0), params, trainer.tx.init(trainer.trained_of(params)))


@dataclasses.dataclass(frozen=True, repr=False)  # JAX prints it in front of its messages
class Trainer:
    """Everything that the program of a step depends on; `make_trainer` makes it from a config.

    It is compared by value, so that runs with the same settings in one process share the compiled
    programs below.
    """

    model_config: model.T5Config
    loss_config: FrozenConfigDict
    optimizer_config: FrozenConfigDict
    learning_rate_config: FrozenConfigDict
    mesh: Mesh
    seed: int
    batch_size: int
    feature_lengths: FrozenConfigDict  # of each feature of a batch
    num_microbatches: int

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
        model = own_model.of(self.model_config)
        pattern = self.optimizer_config.trainable or '.+'
        if self.model_config.lora_rank and not self.optimizer_config.trainable:
            pattern = model.ADAPTER
        return optimizer.trained_paths(pattern, model.shapes(self.model_config))

    def trained_of(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `tree`, {path of a parameter: leaf}, has of the trained parameters."""
        return {path: tree[path] for path in self.trained}

    @functools.cached_property
    def unsaved(self) -> frozenset[str]:
        """The paths of the parameters that a run with adapters leaves to its base's checkpoint."""
        if not self.model_config.lora_rank:
            return frozenset()
        model = own_model.of(self.model_config)
        base = model.shapes(model.without_adapters(self.model_config))
        return frozenset(base) - frozenset(self.trained)

    @functools.cached_property
    def shapes(self) -> Any:
        """The state as a TrainState of jax.ShapeDtypeStruct."""
        step = jax.ShapeDtypeStruct((), jnp.int32)
        model = own_model.of(self.model_config)
        params = {}
        for path, shape in model.shapes(self.model_config).items():
            params[path] = jax.ShapeDtypeStruct(shape, jnp.float32)
        opt_state = jax.eval_shape(self.tx.init, self.trained_of(params))
        return TrainState(step, params, opt_state)  # type: ignore[arg-type]

    @functools.cached_property
    def specs(self) -> Any:
        """How the state is split over the mesh, as a TrainState of PartitionSpec."""
        _, params, opt_state = self.shapes
        model = own_model.of(self.model_config)
        param_specs = partition.param_specs(model.PARAMETER_SPECS, params)
        opt_specs = optimizer.state_specs(opt_state, params, param_specs)
        return TrainState(P(), param_specs, opt_specs)  # type: ignore[arg-type]


def make_trainer(config: Any, num_microbatches: int = 1) -> Trainer:
    """Return the trainer of a config.

    Raises ValueError for settings that are invalid or that do not fit together.
    """
    settings.check(config)
    trainer = Trainer(
        model_config=own_model.make_config(config.model),
        loss_config=FrozenConfigDict(config.loss),
        optimizer_config=FrozenConfigDict(config.optimizer),
        learning_rate_config=FrozenConfigDict(config.learning_rate),
        mesh=partition.make_mesh(**config.mesh),
        seed=config.seed,
        batch_size=config.train.batch_size,
        feature_lengths=FrozenConfigDict(data.feature_lengths(config.data)),
        num_microbatches=num_microbatches,
    )
    model = own_model.of(trainer.model_config)
    model.check_mesh(trainer.model_config, trainer.mesh)
    partition.check_divides(
        'train.batch_size', trainer.batch_size, partition.BATCH_AXES, trainer.mesh
    )
    # These names are parsed when they are first used: parse them now.
    _ = trainer.normalizing_factor
    _ = trainer.tx  # and its schedule
    model.check_adapters(trainer.model_config)
    _ = trainer.trained
    return trainer


@functools.lru_cache(maxsize=16)
def jit_init(trainer: Trainer) -> Callable[[], TrainState]:
    """Return `init` as a compiled function."""
    shardings = partition.shardings(trainer.mesh, trainer.specs)
    return jax.jit(functools.partial(init, trainer), out_shardings=shardings)


@functools.lru_cache(maxsize=16)
def jit_step(trainer: Trainer) -> jax.stages.Wrapped:
    """Return `train_step` as a compiled function (state, batch) -> (state, metrics).

    It donates the state.
    """
    shardings = partition.shardings(trainer.mesh, (trainer.specs, P()))
    step = functools.partial(train_step, trainer)
    return jax.jit(step, out_shardings=shardings, donate_argnums=0)


def lower_step(trainer: Trainer) -> jax.stages.Lowered:
    """Return `jit_step`, lowered for the trainer's batch before there is a state or a batch."""
    state, batch = plan.step_shapes(
        mesh=trainer.mesh,
        state=trainer.shapes,
        state_specs=trainer.specs,
        feature_lengths=trainer.feature_lengths,
        batch_size=trainer.batch_size,
    )
    return jit_step(trainer).lower(state, batch)


@functools.lru_cache(maxsize=16)
def compile_step(trainer: Trainer) -> jax.stages.Compiled:
    """Return `lower_step` as a compiled function."""
    return lower_step(trainer).compile()


# The loop.


class Run(NamedTuple):
    """A run that is ready to start or to go on."""

    config: Any
    workdir: Path
    console: workdir.Console
    metrics: workdir.Metrics
    lock: IO  # while it is open, no other process uses the workdir
    mesh: Mesh
    train_step: Any  # compiled; None where the run is finished
    stream: data.Stream
    vocabulary: Vocabulary
    evaluations: list[evaluate.Evaluation]
    task_metrics: infer_eval.TaskMetrics  # of no task where infer_eval.every_steps=0
    model_config: model.T5Config
    t5: infer.T5  # the model that answers for them, which is given the parameters of a step
    missing_evaluations: list[str]  # after first_step, because a signal ended them
    first_step: int  # the steps that were taken before
    unsaved: frozenset[str]  # the parameters that checkpoints do not hold
    state: TrainState
    interval: list[dict]  # the metrics of the steps since the last logged one


def train(run: Run, stop: Callable[[], int] | None = None) -> int:
    """Take the steps up to config.train.steps. Log, evaluate and save on the way.

    Ends early when `stop` returns the number of a signal: the step is saved and the number
    returned. Without `stop` (in a notebook) an interrupt does that. Raises FloatingPointError, at
    most one logged interval later, when a loss or an update is not finite; ValueError for bad data;
    OSError for a disk that does not take a checkpoint. Any error but the first is raised after the
    steps before it are saved; if that fails, a note of the error says so.
    """
    if run.lock.closed:
        raise ValueError(f'the run in {run.workdir} has ended: prepare it once more to go on')
    with run.lock, contextlib.ExitStack() as stack:
        if stop is None:
            stop = stack.enter_context(remember_interrupt())
        stop_request = StopRequest(stop)
        if run.train_step is None:
            step = finish(run, stop_request)
        else:
            step = train_and_save(run, stop_request)
        if stop_request.signal:
            run.console.line(
                f'Stopped after step {step:,}, which is saved: the same command goes on from there.'
            )
        else:
            report_best(run)
            run.console.line(
                workdir.next_command(run.workdir, run.stream.mixture, what_goes_on(run, step))
            )
    return stop_request.signal


def what_goes_on(run: Run, step: int) -> str:
    """Return the settings with which a run that has ended after `step` goes on."""
    limits = run.config.train
    flags = []
    if step == limits.steps:
        name = 'relative_steps' if limits.relative_steps else 'steps'
        flags.append(f'a larger --config.train.{name}')
    if history(run).ends(limits.early_stopping):
        flags.append('--config.train.early_stopping=0')
    if not flags:
        flags.append('a larger --config.train.epochs')
    return ' with '.join(flags)


def finish(run: Run, stop_request: 'StopRequest') -> int:
    """Do what a signal or a kill has left out at the end of a finished run. Return the last step."""
    step = int(run.state.step)
    evaluate_step(run, step, run.state, run.missing_evaluations, stop_request)
    open_saver(run).prune()
    if step < run.config.train.steps:
        workdir.record_end(run.workdir, step)
        run.console.line(describe_early_stop(run, step))
    else:
        run.console.line(
            f'Step {step:,} of {run.config.train.steps:,} is taken: this run is finished.'
        )
    return step


def train_and_save(run: Run, stop_request: 'StopRequest') -> int:
    """Take the steps. Return the last one when all that was saved is on the disk."""
    saver = open_saver(run)
    progress = Progress(run)
    try:
        take_steps(run, saver, progress, stop_request)
        with run.console.working('Saving'):
            saver.wait()
    except Exception as error:
        save_before_error(run, saver, progress, error)
        raise
    except BaseException:  # a second interrupt
        saver.wait()
        raise
    saver.prune()  # after an evaluation that came later than the checkpoint
    return progress.step


def save_before_error(
    run: Run, saver: checkpoint.Saver, progress: 'Progress', error: Exception
) -> None:
    """Save the last step, if it is not saved yet and its state is valid, so that `error` loses none.

    All processes save the same step, or none does. If saving fails, a note of `error` says why.
    """
    try:
        with run.console.working('Saving'):
            saver.wait()
            if not agree_to_save(progress.unsaved_step(run.workdir)):
                return
            save(run, saver, progress)
            saver.wait()
    except Exception as second:
        error.add_note(f'Step {progress.step:,} could not be saved, too: {second}')
        return
    run.console.line(f'Step {progress.step:,} is saved before the error: a run goes on from there.')


def agree_to_save(step: int | None) -> bool:
    """Return whether all processes can save `step`. Each calls it after its error."""
    while not partition.from_processes(np.array([True])).all():
        pass  # the others ask before their next step, and come here
    steps = partition.from_processes(np.array([-1 if step is None else step]))
    return step is not None and bool((steps == step).all())


def open_saver(run: Run) -> checkpoint.Saver:
    """Return what saves the checkpoints of a run and deletes those that `save.keep` does not keep.

    Differs from T5X's SaveBestCheckpointer, which by default keeps those without a value, too: here
    a run that was stopped between two evaluations leaves what it leaves without the stop.
    """
    save = run.config.save
    rank: Callable[[int], float] = float  # the newest are kept

    def rank_by_metric(step: int) -> float:
        return history(run).rank(step)

    if save.best_metric:
        rank = rank_by_metric
    return checkpoint.Saver(
        run.workdir,
        keep=save.keep,
        keep_every=save.keep_every,
        dtype=save.dtype,
        rank=rank,
    )


def history(run: Run) -> best.History:
    """Return the values of `save.best_metric` so far. Only the first process has them."""
    save = run.config.save
    return best.history(save.best_metric, save.best_is, run.metrics.evaluations)


def report_best(run: Run) -> None:
    """Print the best one of the checkpoints that are kept."""
    found = history(run)
    step = found.best_of(checkpoint.steps(run.workdir))
    if step is not None:
        run.console.line(
            f'The best saved step is {step:,}, with {found.metric} {found.values[step]:.6g}: '
            f'checkpoint_{step}, which --step=best opens.'
        )


def take_steps(
    run: Run, saver: checkpoint.Saver, progress: 'Progress', stop_request: 'StopRequest'
) -> None:
    """Take the steps of a run until it ends or is stopped; `progress` follows."""
    config = run.config
    batches = Batches(run)
    clock = Clock()
    step = run.first_step
    missing = run.missing_evaluations
    if batches.have_ended:
        missing = run.metrics.missing(due_evaluations(run, step, is_last=True), step)
    with clock.paused():
        evaluate_step(run, step, progress.state, missing, stop_request)
        stops_early = bool(missing) and stop_early(run, step, progress.state, stop_request)
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
            # While a step runs, the next one is prepared and queued, but no more; and not even that
            # where steps are slow, so that a request to stop waits for one step only.
            is_slow = clock.seconds_of_last_step > 1
            interval.wait(all_steps=log_now or save_now or bool(evaluate_now) or is_slow)
        stop_request.agree(step)
        show_now = log_now or step == run.first_step + 1 or run.console.is_due()
        if show_now or save_now or evaluate_now or stop_request.signal:
            interval.fetch()
            check_finite(run, step, interval)
        report_faults(run, batch)
        if log_now:
            progress.interval = Interval([])
        if show_now:
            report_progress(run, step, interval, clock, batch, log_now)
        if log_now:
            clock.restart()
        with clock.paused():
            evaluate_step(run, step, progress.state, evaluate_now, stop_request)
            stops_early = bool(evaluate_now) and stop_early(run, step, progress.state, stop_request)
            # The checkpoint comes last: a run that goes on from it has all that came before.
            if save_now or stops_early or stop_request.signal:
                save(run, saver, progress)
    if batches.have_ended or stops_early:
        workdir.record_end(run.workdir, step)


class Progress:
    """How far a run has come: what its next step begins from, and what a checkpoint holds."""

    def __init__(self, run: Run):
        self.step = run.first_step  # the last one taken
        self.state = run.state
        self.batch: prefetch.PrefetchedBatch | None = None  # that the last step took
        self.interval = Interval(run.interval)

    def take_step(self, run: Run, batch: prefetch.PrefetchedBatch) -> None:
        on_devices = partition.place_rows(run.mesh, batch.features)
        self.state, metrics = run.train_step(self.state, on_devices)
        self.step += 1
        self.batch = batch
        self.interval.add(metrics, batch.features, batch.before)

    def unsaved_step(self, folder: Path) -> int | None:
        """Return the last step if it can be saved and `folder` does not have it yet.

        It cannot be saved if its state is not finite, or was donated to a step that failed.
        """
        if self.batch is None or self.step in checkpoint.steps(folder):
            return None
        if any(x.is_deleted() for x in jax.tree.leaves(self.state)):
            return None
        self.interval.fetch()
        if self.interval.first_not_finite() is not None:
            return None
        return self.step


class Batches:
    """The batches of a run, made ahead.

    All processes have the same number of them: with train.epochs they end together, and where one
    process fails, none goes on.
    """

    def __init__(self, run: Run):
        self.have_ended = False
        self._made = prefetch.batches(run.stream, run.config.data.num_workers)
        self._may_end = run.config.train.epochs > 0
        self._newest = prefetch.padding_before(run.stream, run.stream.rows)
        self._following: prefetch.PrefetchedBatch | None = None
        with run.console.working('Making the first batch'):
            self._following = self._receive()

    def next(self) -> prefetch.PrefetchedBatch:
        """Return the next batch, unless they have ended. Raise the error of its making."""
        self._newest = self._following or self._receive()
        self._following = None
        if self._may_end:
            self._following = self._receive()
        return self._newest

    def _receive(self) -> prefetch.PrefetchedBatch:
        """Return the batch that follows: padding where the rows of other processes go on longer."""
        following = partition.in_all(lambda: next(self._made, None))
        if self._may_end:
            is_there = np.array([following is not None])
            self.have_ended = not partition.from_processes(is_there).any()
        return following or prefetch.padding_after(self._newest)


class StopRequest:
    """Whether the run was asked to stop.

    Several processes may receive signals at different times; all agree.
    """

    def __init__(self, ask: Callable[[], int]):
        self.ask = ask
        self.signal = 0  # the number of the signal that all processes agreed on

    def agree(self, count: int) -> int:
        """Return `signal`.

        Every process calls it with the same counts; at multiples of ten they ask each other.
        """
        if jax.process_count() == 1:
            self.signal = self.signal or self.ask()
        elif count % STEPS_PER_AGREEMENT == 0:
            signals = partition.from_processes(np.array([self.signal or self.ask()]))
            self.signal = int(signals.max())
        return self.signal


class Clock:
    """The time that the steps since the last logged one took, without evaluating and saving."""

    def __init__(self):
        self.seconds_of_last_step = math.inf
        self.restart()

    def restart(self) -> None:
        self.num_steps = 0
        self.data_wait_seconds = 0.0
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def taking_step(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds_of_last_step = time.perf_counter() - began
        self.num_steps += 1

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.data_wait_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._start += time.perf_counter() - began


class Interval:
    """The metrics of the steps since the last logged one."""

    def __init__(self, metrics: list[dict]):
        self.metrics = metrics  # the newest may still be on the devices
        self.positions: list[np.ndarray] = []  # in the data, of the steps since the last `fetch`

    def add(self, metrics: Mapping, batch: Mapping[str, np.ndarray], position: np.ndarray) -> None:
        """Add a step. `batch`: this process's rows; `position`: where in the data they begin.

        Steps of a checkpoint that has other metrics than this program are dropped.
        """
        content = b''.join(x.tobytes() for x in batch.values())
        step = {**metrics, 'batch_crc32': zlib.crc32(content)}
        self.metrics = [other for other in self.metrics if other.keys() == step.keys()]
        self.metrics.append(step)
        self.positions.append(position)

    def wait(self, all_steps: bool) -> None:
        """Wait until the devices have taken all steps, or all but the newest."""
        if all_steps:
            jax.block_until_ready(self.metrics[-1])
        elif len(self.metrics) > 1:
            jax.block_until_ready(self.metrics[-2])

    def fetch(self) -> None:
        """Copy the metrics to the host, as floats."""
        self.metrics = jax.tree.map(float, jax.device_get(self.metrics))

    def first_not_finite(self) -> int | None:
        """Return how many steps ago the first one was that is not finite, of those with positions."""
        for ago in reversed(range(len(self.positions))):
            if not self.metrics[-1 - ago]['finite']:
                return ago
        return None


def check_finite(run: Run, step: int, interval: Interval) -> None:
    """Raise FloatingPointError for the first step since the last call that was not finite.

    `step` is the last step of the interval.
    """
    ago = interval.first_not_finite()
    if ago is None:
        interval.positions.clear()
        return
    metrics = interval.metrics[-1 - ago]
    what = 'the update'
    for name in ('gradient_norm', 'loss'):
        if not math.isfinite(metrics[name]):
            what = f'the {name.replace("_", " ")}'
    saved = checkpoint.steps(run.workdir)
    kept = 'has no checkpoint yet'
    if saved:
        kept = f'keeps checkpoint_{saved[-1]}'
    remedy = 'Try a smaller learning_rate.base_learning_rate, or a longer warm-up.'
    is_first = step - ago == run.first_step + 1
    if is_first and what == 'the loss':
        remedy = 'No update was made yet: look at restore.path and model.dtype.'
    documents = '; '.join(run.stream.describe(interval.positions[-1 - ago]))
    raise FloatingPointError(
        f'step {step - ago}: {what} is not finite (loss {metrics["loss"]:.6g}, gradient norm '
        f'{metrics["gradient_norm"]:.6g}). The run stops; {run.workdir} {kept}. {remedy} Documents: '
        f'{documents}'
    )


def report_faults(run: Run, batch: prefetch.PrefetchedBatch) -> None:
    """Print the lines of the corpus that were left out while the batch was made."""
    for text in batch.faults:
        run.console.line(f'Left out, {batch.num_faults:,} so far: {text}')


def report_progress(
    run: Run,
    step: int,
    interval: Interval,
    clock: Clock,
    batch: prefetch.PrefetchedBatch,
    log_now: bool,
) -> None:
    """Show the metrics of the interval, whose last step took `batch`.

    Write them to metrics.jsonl and TensorBoard if they are to be logged.
    """
    values = evaluate.summarize(interval.metrics, run.config)
    values |= interval_metrics(run.config, interval.metrics, clock)
    last = None if run.config.train.epochs else run.config.train.steps
    text = workdir.progress(step, last, values)
    if not log_now:
        run.console.live(text)
        return
    run.console.line(text)
    counts = counts_of_all(run.stream, batch)
    for task, (num_examples, num_trimmed) in counts.items():
        values[f'data/{task}/examples'] = num_examples
        values[f'data/{task}/trimmed'] = num_trimmed
    run.metrics.write('train', step, values)
    num_logged = step // run.config.log.every_steps
    if num_logged.bit_count() == 1 or step == run.config.train.steps:  # 1, 2, 4, ...
        for line in workdir.describe_trimming(counts):
            run.console.line(line)


def interval_metrics(config: Any, interval: list[dict], clock: Clock) -> dict[str, float]:
    """Return the metrics that only training has, under T5X's tags.

    These are the learning rate, the norm of the gradient, a hash of the batches, and the speed. The
    speed is of the steps that this process took. Tokens include padding.
    """
    column = {name: np.array([metrics[name] for metrics in interval]) for name in interval[0]}
    steps_per_second = clock.num_steps / clock.seconds
    rows_per_second = steps_per_second * config.train.batch_size
    lengths = config.data.lengths
    return {
        'learning_rate': float(column['learning_rate'].mean()),
        'learning_rate/current': float(column['learning_rate'][-1]),
        'weight_gradient_norm': float(column['gradient_norm'].mean()),
        'batch_crc32': zlib.crc32(column['batch_crc32'].tobytes()),
        'timing/steps_per_second': steps_per_second,
        'timing/seqs_per_second': rows_per_second,
        'timing/target_tokens_per_second': rows_per_second * lengths.targets,
        'timing/tokens_per_second': rows_per_second * (lengths.inputs + lengths.targets),
        'timing/data_wait_seconds': clock.data_wait_seconds,
        'timing/data_wait_fraction': clock.data_wait_seconds / clock.seconds,
    }


def due_evaluations(run: Run, step: int, is_last: bool) -> list[str]:
    """Return the names of the evaluations that are due after `step`."""
    names = []
    if is_last or step % run.config.eval.every_steps == 0:
        names += [evaluation.name for evaluation in run.evaluations]
    every_steps = run.config.infer_eval.every_steps
    if every_steps and (is_last or step % every_steps == 0):
        names += [task_run(task) for task in run.task_metrics.tasks]
    return names


def stop_early(run: Run, step: int, state: TrainState, stop_request: StopRequest) -> bool:
    """Return whether train.early_stopping ends the run after `step`, which has been evaluated.

    If it does, do the evaluations that only a last step has. All processes agree on the first one's
    answer.
    """
    early_stopping = run.config.train.early_stopping
    if not early_stopping or stop_request.signal:
        return False
    ends = np.array([history(run).ends(early_stopping)])
    if not partition.from_processes(ends)[0].item():
        return False
    missing = run.metrics.missing(due_evaluations(run, step, is_last=True), step)
    evaluate_step(run, step, state, missing, stop_request)
    run.console.line(describe_early_stop(run, step))
    return True


def describe_early_stop(run: Run, step: int) -> str:
    """Return why a run ended before its last step."""
    return (
        f'Step {step:,}: train.early_stopping={run.config.train.early_stopping} evaluation(s) without '
        f'a better {run.config.save.best_metric}: this run is finished.'
    )


def task_run(task: infer_eval.EvaluatedTask) -> str:
    """Return the name under which the metrics of a task are written."""
    return f'{results.FOLDER}/{task.name}'


def evaluate_step(
    run: Run, step: int, state: TrainState, names: Sequence[str], stop_request: StopRequest
) -> None:
    """Do the evaluations of these names after `step`.

    They are of the moving average of the parameters, if there is one. A signal ends an evaluation
    without a result; the run that goes on repeats it.
    """
    params = optimizer.averaged(state.params, state.opt_state)
    for evaluation in run.evaluations:
        if evaluation.name not in names or stop_request.signal:
            continue
        with run.console.working(f'Evaluating step {step:,}'):
            values = evaluation(params, stop_request.agree)
        if values is not None:
            run.metrics.write(evaluation.name, step, values)
            of_task = ''
            if len(run.evaluations) > 1:
                of_task = f', {evaluation.name.partition("/")[2]}'
            run.console.line(f'Step {step:,}{of_task}: {workdir.compare_with_baseline(values)}')
    compute_task_metrics(run, step, params, names, stop_request)


def compute_task_metrics(
    run: Run, step: int, params: Mapping, names: Sequence[str], stop_request: StopRequest
) -> None:
    """Compute and write the task metrics of these names."""
    due = [task for task in run.task_metrics.tasks if task_run(task) in names]
    if not due or stop_request.signal:
        return
    kept = results.Results(run.workdir)
    values = {}
    run.t5.set_parameters(merged_parameters(run.model_config, params))
    for task in due:
        with run.console.working(f'Evaluating {task.name}, step {step:,}'):
            found = run.task_metrics(run.t5, task, stop_request.agree)
        if found is None:
            break
        if jax.process_index() == 0:
            kept.write(task.name, step, found.values, found.examples, task.settings)
            kept.write_table()
        run.metrics.write(task_run(task), step, infer_eval.events_of(found.values))
        values[task.name] = found.values
    run.t5.set_parameters({})
    if values:
        run.console.line(results.describe(step, run.task_metrics.split, values))


def merged_parameters(
    config: model.T5Config, params: Mapping[str, jax.Array]
) -> Mapping[str, jax.Array]:
    """Return the parameters without adapters, merged where there are some."""
    if not config.lora_rank:
        return params
    model = own_model.of(config)
    return model.merge_adapters(params, functools.partial(model.adapted_kernel, config))


def save(run: Run, saver: checkpoint.Saver, progress: Progress) -> None:
    """Save a checkpoint after the last step, and beside it what a run needs to go on.

    That is the settings, the vocabulary, the position in the data and the unfinished interval.
    """
    batch = progress.batch
    assert batch is not None
    rows = np.zeros((run.config.train.batch_size, *batch.after.shape[1:]), np.int64)
    rows[run.stream.rows] = batch.after
    position_file = io.BytesIO()
    np.save(position_file, partition.from_processes(rows).max(axis=0))
    files = {
        'config.json': (run.workdir / 'config.json').read_bytes(),
        'data_counts.json': json.dumps(counts_of_all(run.stream, batch)).encode(),
        'data_files.json': json.dumps(run.stream.mixture.files_as_json()).encode(),
        'data_position.npy': position_file.getvalue(),
        'interval.json': json.dumps(progress.interval.metrics).encode(),
        **own_model.record_of(run.t5.config),
    }
    if run.vocabulary.model:
        files['vocabulary.model'] = run.vocabulary.model
    saver.save(progress.step, saved_tree(run.unsaved, progress.state), files)


def saved_tree(unsaved: Collection[str], state: TrainState) -> dict[str, Any]:
    """Return a state as a checkpoint holds it, without the parameters `unsaved`."""
    tree = optimizer.to_t5x(*state)
    for path in unsaved:
        del tree[f'{checkpoint.PARAMETER_PREFIX}{path}']
    return tree


def counts_of_all(stream: data.Stream, batch: prefetch.PrefetchedBatch) -> dict[str, list[int]]:
    """Return {task: [examples given, examples cut]} of all processes, up to `batch`."""
    counts = partition.from_processes(batch.counts).sum(axis=0)
    names = [task.name for task in stream.tasks]
    return dict(zip(names, counts.tolist(), strict=True))


@contextlib.contextmanager
def remember_interrupt() -> Iterator[Callable[[], int]]:
    """Give a function that returns SIGINT once it was received, else 0.

    A second one raises KeyboardInterrupt. A handler that the program has set itself stays in place;
    then the function returns 0.
    """
    received = [0]
    default = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not default:
        yield lambda: 0
        return

    def remember(number: int, frame: Any) -> None:
        received[0] = number
        signal.signal(signal.SIGINT, default)
        print('Stopping: this step is finished and saved. Interrupt once more to stop at once.')

    signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: received[0]
    finally:
        signal.signal(signal.SIGINT, default)


# Preparing a run.


class Start(NamedTuple):
    """What a run starts from."""

    step: int
    is_resumed: bool  # from a checkpoint in its own workdir
    leaves: dict[str, Any]  # of a checkpoint's index; what is missing there gets its initial value
    base: dict[str, str]  # of adapters: convert.describe_base of the checkpoint they belong to
    vocabulary_model: bytes  # the checkpoint's own; b'' if it has none
    description: str

    @property
    def num_logged_steps(self) -> int:
        """The steps whose metrics are in the workdir; those of a checkpoint elsewhere are not."""
        return self.step if self.is_resumed else 0


def prepare(config: Any, folder: str | Path) -> Run:
    """Return a run in the workdir `folder`, ready for its first step.

    Restores the newest valid checkpoint in the workdir if there is one. Raises ValueError or
    OSError, before anything is compiled, for invalid settings, for settings that differ from an old
    run's, and for a workdir that is not a run of this program or cannot hold checkpoints.
    """
    settings.check(config)
    best.check_settings(config)
    tasks.find(config.data)
    folder = paths.disk_path(folder)
    workdir.check_is_run(folder)
    console = workdir.Console()
    trainer = make_trainer(config)
    rows_per_device = trainer.batch_size // partition.axes_size(trainer.mesh, partition.BATCH_AXES)
    counts = plan.microbatch_counts(config.train.num_microbatches, rows_per_device)
    with console.working('Reading the text'):
        mixture = tasks.open_mixture(config.data)
        evaluated_tasks = []
        if config.infer_eval.every_steps:
            evaluated_tasks = infer_eval.open_tasks(config, config.infer_eval.split)
    check_mixture(config, mixture)
    lock = workdir.lock(folder)
    try:
        return prepare_locked(
            config, folder, console, trainer, counts, mixture, evaluated_tasks, lock
        )
    except BaseException:
        lock.close()
        raise


def check_mixture(config: Any, mixture: OpenMixture) -> None:
    """Raise ValueError for what cannot be trained on as the settings say."""
    if config.train.epochs and not mixture.is_single:
        raise ValueError(
            f'train.epochs={config.train.epochs}: data.task={config.data.task!r} is a mixture, whose tasks end at '
            'different times: set train.epochs=0 and train.steps'
        )
    for task in mixture.tasks:
        if task.task.train_split == sources.NO_SPLIT:
            raise ValueError(
                f'data.task={task.name!r} has no split for training, it is for evaluation alone: name a '
                "task that 'python tasks.py' lists with a t"
            )


def prepare_locked(
    config: Any,
    folder: Path,
    console: workdir.Console,
    trainer: Trainer,
    counts: list[int],
    mixture: OpenMixture,
    evaluated_tasks: Sequence[OpenTask],
    lock: IO,
) -> Run:
    """Do the part of `prepare` that reads and writes in the workdir."""
    with console.working('Verifying the newest checkpoint'):
        start = find_start(config, folder, trainer, console)
    config = with_last_step(config, folder, start)
    with console.working('Preparing the vocabulary'):
        vocabulary = prepare_vocabulary(config, folder, mixture, start)
    resolved = resolved_settings(config, trainer, mixture, vocabulary, start)
    if start.is_resumed:
        mixture = check_resumed(folder, trainer, mixture, resolved, start)
        changed = [file.path for file in mixture.files if file.is_changed_at(start.step)]
        if changed:
            console.line(f'Changed since step {start.step:,}: {settings.first_ten(changed)}.')
    results.Results(folder).scores()  # raises ValueError for a file that is damaged
    with console.working('Opening the text'):
        stream = open_stream(config, trainer.mesh, mixture, vocabulary, 'train')
        validation = open_stream(config, trainer.mesh, mixture, vocabulary, 'validation')
    introduce(config, trainer, validation, vocabulary, console)
    task_metrics = open_task_metrics(config, vocabulary, evaluated_tasks, validation, console)
    has_stopped_early = stopped_early(config, folder, start)
    planned = compile_unless_finished(
        config, folder, trainer, counts, start, has_stopped_early, console
    )
    state = restore_start(config, trainer, start, console)
    interval = resume_data(folder, start, stream)
    report_lost_metrics(config, folder, start, interval, console)
    resolved['train']['num_microbatches'] = planned.num_microbatches
    write_run_files(folder, resolved, vocabulary, trainer)
    metrics = workdir.Metrics(folder, start.num_logged_steps, mixture.corpus)
    run = Run(
        config=config,
        workdir=folder,
        console=console,
        metrics=metrics,
        lock=lock,
        mesh=trainer.mesh,
        train_step=planned.step,
        stream=stream,
        vocabulary=vocabulary,
        evaluations=evaluate.open_evaluations(
            config, trainer.model_config, trainer.mesh, stream, validation, planned.num_microbatches
        ),
        task_metrics=task_metrics,
        model_config=trainer.model_config,
        t5=make_t5(trainer, vocabulary),
        missing_evaluations=[],
        first_step=start.step,
        unsaved=trainer.unsaved,
        state=state,
        interval=interval,
    )
    if not start.is_resumed:
        return run
    is_last = start.step == config.train.steps or has_stopped_early
    due = due_evaluations(run, start.step, is_last)
    return run._replace(missing_evaluations=metrics.missing(due, start.step))


def prepare_vocabulary(config: Any, folder: Path, mixture: OpenMixture, start: Start) -> Vocabulary:
    """Return the vocabulary of the run, of what it starts from, or a new one."""
    return find_or_train_vocabulary(
        config.data,
        folder,
        texts=data.training_texts(mixture),
        max_size=config.model.vocab_size,
        model=start.vocabulary_model,
    )


def check_resumed(
    folder: Path, trainer: Trainer, mixture: OpenMixture, resolved: Mapping, start: Start
) -> OpenMixture:
    """Return the mixture as the run goes on with it.

    Raises ValueError unless a run with these settings can go on from its checkpoint.
    """
    directory = folder / f'checkpoint_{start.step}'
    own_model.check_same(directory, trainer.model_config, 'name another --workdir')
    going_on = workdir.compare_settings(directory, resolved, mixture, start.step)
    checkpoint.choose(start.leaves, state_shapes(trainer))
    return going_on


def open_task_metrics(
    config: Any,
    vocabulary: Vocabulary,
    opened: Sequence[OpenTask],
    validation: data.Stream,
    console: workdir.Console,
) -> infer_eval.TaskMetrics:
    """Read the examples of task metrics. Raises ValueError if nothing gives `save.best_metric`."""
    with console.working('Reading the examples of task metrics'):
        task_metrics = infer_eval.TaskMetrics(
            config, config.infer_eval.split, vocabulary, opened, console.line
        )
    if config.save.best_metric:
        infer_eval.check_best_metric(config.save.best_metric, validation, task_metrics.tasks)
    return task_metrics


def make_t5(trainer: Trainer, vocabulary: Vocabulary) -> infer.T5:
    """Return the model that answers for task metrics, which has no parameters yet."""
    merge = functools.partial(merged_parameters, trainer.model_config)
    model = own_model.of(trainer.model_config)
    return infer.T5(
        model.without_adapters(trainer.model_config),
        jax.eval_shape(merge, trainer.shapes.params),
        trainer.mesh,
        vocabulary,
    )


def resolved_settings(
    config: Any, trainer: Trainer, mixture: OpenMixture, vocabulary: Vocabulary, start: Start
) -> dict[str, Any]:
    """Return the content of config.json: the settings, and what they stand for."""
    resolved = json.loads(config.to_json())
    resolved['model']['module'] = trainer.model_config.module
    resolved['corpus'] = mixture.corpus
    resolved['data_fingerprint'] = mixture.fingerprint
    resolved['vocabulary_hash'] = vocabulary.hash
    if start.base:
        resolved['base'] = start.base
    return resolved


def open_stream(
    config: Any, mesh: Mesh, mixture: OpenMixture, vocabulary: Vocabulary, split: str
) -> data.Stream:
    """Return this process's rows of a split's batches: training without end, validation once."""
    return data.Stream(
        mixture,
        split,
        vocabulary,
        config.data,
        batch_size=config.train.batch_size,
        seed=config.seed,
        rows=partition.own_rows(mesh, config.train.batch_size),
        num_epochs=1 if split == 'validation' else config.train.epochs or None,
    )


def introduce(
    config: Any,
    trainer: Trainer,
    validation: data.Stream,
    vocabulary: Vocabulary,
    console: workdir.Console,
) -> None:
    """Print the model, the devices and the data of a run, and what a slow evaluation costs."""
    lines = workdir.introduction(
        num_parameters=plan.num_elements(trainer.shapes.params),
        num_trained=plan.num_elements(trainer.trained_of(trainer.shapes.params)),
        dtype=config.model.dtype,
        mesh=trainer.mesh,
        mixture=validation.mixture,
        vocabulary_size=vocabulary.size,
    )
    if trainer.model_config.module:
        lines.append(f'The model is model.py as {trainer.model_config.module} changes it.')
    lines += tasks.other_versions(validation.mixture)
    names = [task.name for task in validation.mixture.tasks]
    if config.data.cache_dirs and not any(sources.find_cache(config.data, x) for x in names):
        lines.append(
            f'data.cache_dirs={config.data.cache_dirs!r} has no effect: it holds no complete cache of '
            f'data.task={config.data.task!r}.'
        )
    num_lines = validation.num_lines_to_start()
    if num_lines > LINES_OF_A_SLOW_EVALUATION:
        lines.append(
            f'The first evaluation reads about {num_lines:,} lines, because the share '
            f'data.validation_fraction={config.data.validation_fraction} has to be found among all: '
            'data.validation_files names a file of its own instead.'
        )
    for line in lines:
        console.line(line)


def stopped_early(config: Any, folder: Path, start: Start) -> bool:
    """Return whether train.early_stopping has ended the run after its newest checkpoint."""
    lines = best.read_metrics(folder)
    evaluations = [line for line in lines if line['step'] <= start.num_logged_steps]
    found = best.history(config.save.best_metric, config.save.best_is, evaluations)
    return found.ends(config.train.early_stopping)


def compile_unless_finished(
    config: Any,
    folder: Path,
    trainer: Trainer,
    counts: list[int],
    start: Start,
    has_stopped_early: bool,
    console: workdir.Console,
) -> plan.Plan:
    """Compile the step, unless the run has taken all its steps.

    Raises ValueError or OSError where the step does not fit into memory or a checkpoint on the
    disk.
    """
    if has_stopped_early or (start.is_resumed and start.step >= config.train.steps):
        return plan.Plan(step=None, num_microbatches=1, note='')
    check_step_offset(config, start)
    state_bytes = plan.num_state_bytes(trainer.shapes)
    workdir.check_saving(folder, plan.num_state_bytes(saved_tree(trainer.unsaved, trainer.shapes)))
    console.line(
        f'{start.description}; compiling, then a line every {config.log.every_steps} steps.'
    )
    plan.check_state_fits(trainer.mesh, trainer.shapes, trainer.specs)

    def compile_with(num_microbatches: int) -> jax.stages.Compiled:
        return compile_step(dataclasses.replace(trainer, num_microbatches=num_microbatches))

    began = time.monotonic()
    with console.working('Compiling'):
        planned = plan.fit_step(
            compile_with,
            counts=counts,
            requested=config.train.num_microbatches,
            mesh=trainer.mesh,
            state_bytes=state_bytes,
        )
    if planned.note:
        console.line(planned.note)
    console.line(f'Compiled in {time.monotonic() - began:.1f} s.')
    return planned


def check_step_offset(config: Any, start: Start) -> None:
    """Raise ValueError where Adafactor's decay would begin after the first step.

    T5X's formula has no value there.
    """
    if config.optimizer.step_offset > start.step:
        raise ValueError(
            f'optimizer.step_offset={config.optimizer.step_offset} lies after step {start.step}, where the run '
            f'starts: use {start.step} or less'
        )


def write_run_files(
    folder: Path, resolved: Mapping, vocabulary: Vocabulary, trainer: Trainer
) -> None:
    """Write what a run leaves in its workdir before its first step; the first process does."""
    if jax.process_index() > 0:
        return
    # config.json comes first: it marks the folder as a run of this program.
    paths.replace_file(folder / 'config.json', json.dumps(resolved, indent=1).encode())
    if vocabulary.model:
        paths.replace_file(folder / 'vocabulary.model', vocabulary.model)
    shapes = optimizer.to_t5x(*trainer.shapes)
    info = workdir.model_info(shapes, optimizer.to_t5x(*trainer.specs), trainer.trained)
    paths.replace_file(folder / 'model-info.txt', info.encode())


def resume_data(folder: Path, start: Start, stream: data.Stream) -> list[dict]:
    """Move the stream to where the run goes on. Return the metrics of the unfinished interval."""
    if not start.is_resumed:
        return []
    directory = folder / f'checkpoint_{start.step}'
    positions = np.load(directory / 'data_position.npy')
    stream.seek(positions[stream.rows], step=start.step)
    file = directory / 'data_counts.json'
    if file.exists() and jax.process_index() == 0:  # the counts of all processes are added
        counts = json.loads(file.read_bytes())
        stream.counts[:] = [counts[task.name] for task in stream.tasks]
    return json.loads((directory / 'interval.json').read_bytes())


def report_lost_metrics(
    config: Any, folder: Path, start: Start, interval: list[dict], console: workdir.Console
) -> None:
    """Say so where metrics.jsonl is gone, or ends before the steps that were logged."""
    if not start.is_resumed:
        return
    file = folder / 'metrics.jsonl'
    logged = [line['step'] for line in best.read_metrics(folder) if line['run'] == 'train']
    if config.restore.path and file.exists() and not logged:
        return  # the steps may all be in the unfinished interval
    every_steps = read_settings(folder / f'checkpoint_{start.step}')['log']['every_steps']
    expected = min(start.step // every_steps * every_steps, start.step - len(interval))
    last = max(logged, default=0)
    if last < expected:
        console.line(
            f'{file} has no lines of the steps {last + 1:,} to {expected:,}: it is gone or cut. The run '
            'goes on without them.'
        )


# What a run starts from.


def find_start(config: Any, folder: Path, trainer: Trainer, console: workdir.Console) -> Start:
    """Return the newest valid checkpoint of the workdir, else what a new run starts from."""
    step = checkpoint.newest_valid(folder, console.line)
    if step is None:
        workdir.check_never_saved(folder)
        return choose_initial(config, trainer)
    directory = folder / f'checkpoint_{step}'
    if not workdir.is_own_config(directory / 'config.json'):
        raise ValueError(
            f'{directory} was not saved by a run of this program, which cannot go on from it: move it away, or name '
            'another --workdir'
        )
    vocabulary_model = b''
    if not (folder / 'vocabulary.model').exists() and (directory / 'vocabulary.model').exists():
        vocabulary_model = (directory / 'vocabulary.model').read_bytes()
    leaves = checkpoint.read_index(directory)
    base = {}
    opened = convert.open_base(directory, config.restore.path)
    if opened is not None:
        leaves = only_parameters(opened.leaves) | leaves
        # Its fingerprint is the one that open_base has compared.
        base = read_settings(directory)['base'] | {'directory': str(opened.directory)}
    return Start(
        step=step,
        is_resumed=True,
        leaves=leaves,
        base=base,
        vocabulary_model=vocabulary_model,
        description=f'Going on after step {step:,}',
    )


def choose_initial(config: Any, trainer: Trainer) -> Start:
    """Return what a new run starts from: leaves of the index of `restore.path`, and its vocabulary.

    Step and optimizer state come along, as in T5X, where the checkpoint has them and `restore.only`
    does not leave them out. Adapters start at step 0. Raises ValueError where the checkpoint does
    not fit the model.
    """
    has_adapters = config.model.lora_rank > 0
    if has_adapters:
        check_base_settings(config)
    if not config.restore.path:
        return Start(
            step=0,
            is_resumed=False,
            leaves={},
            base={},
            vocabulary_model=b'',
            description='From scratch',
        )
    opened = open_initial(config.restore, trainer)
    index = without_frozen_state(opened.leaves, trainer)
    num_frozen = len(opened.leaves) - len(index)
    expected = state_shapes(trainer)
    # Averages begin with the parameters that a run starts from.
    for average in optimizer.average_paths(expected):
        del expected[average]
    # Without optimizer state the step does not come along either.
    if has_adapters or not any(is_optimizer_state(name) for name in index):
        expected = only_parameters(expected)
        index = only_parameters(index)
    adapter = own_model.of(trainer.model_config).ADAPTER
    expected = {name: x for name, x in expected.items() if not re.fullmatch(adapter, name)}
    leaves = choose_leaves(config.restore, index, expected)
    if has_adapters and not leaves.keys() == index.keys() == expected.keys():
        raise ValueError(
            f'restore.only={config.restore.only!r}, restore.strict={config.restore.strict}: adapters '
            f'(model.lora_rank={config.model.lora_rank}) need all parameters of their base, and no others: set '
            "restore.only='target/.*' and restore.strict=True"
        )
    step = restored_step(config, leaves)
    description = describe_initial(step, opened.directory, leaves, index, expected)
    if num_frozen:
        description += (
            f'; not used: {num_frozen:,} arrays of the optimizer state of frozen parameters'
        )
    return Start(
        step=step,
        is_resumed=False,
        leaves=leaves,
        base=convert.describe_base(opened) if has_adapters else {},
        vocabulary_model=own_vocabulary(config, opened.directory),
        description=description,
    )


def open_initial(config: Any, trainer: Trainer) -> convert.OpenedCheckpoint:
    """Open the checkpoint `config.path`. Raises ValueError for what is none, or of another own model."""
    try:
        opened = convert.open_checkpoint(config.path, part='whole' if config.strict else '')
    except (ValueError, OSError) as error:
        raise ValueError(f'restore.path={config.path}: {error}') from error
    if config.strict and own_model.recorded(opened.directory):
        own_model.check_same(
            opened.directory,
            trainer.model_config,
            'restore its parameters with restore.strict=False',
        )
    return opened


def restored_step(config: Any, leaves: Mapping[str, Any]) -> int:
    """Return the step of a checkpoint, 0 where it comes without. Raises ValueError for the last one."""
    step = checkpoint.saved_step(leaves)
    if step >= config.train.steps and not config.train.relative_steps:
        raise ValueError(
            f'restore.path={config.restore.path} has taken {step:,} of {config.train.steps:,}: set more train.steps, '
            "or train.relative_steps, or restore.only='target/.*', which starts at step 0"
        )
    return step


def own_vocabulary(config: Any, directory: Any) -> bytes:
    """Return the SentencePiece model of a checkpoint, b'' where data.vocabulary names one in its place.

    Raises ValueError if a run would make a new one.
    """
    if config.data.vocabulary:
        return b''
    vocabulary = find_vocabulary(directory)
    vocabulary_model = b'' if vocabulary is None else vocabulary.model
    if not vocabulary_model:
        raise ValueError(
            f'restore.path={config.restore.path} brings no SentencePiece model, and a new one would have other pieces '
            'for its embeddings: name its own with data.vocabulary'
        )
    return vocabulary_model


def check_base_settings(config: Any) -> None:
    """Raise ValueError unless adapters can be trained on the checkpoint that config.restore names."""
    if not config.restore.path:
        raise ValueError(
            f"model.lora_rank={config.model.lora_rank} with restore.path='': adapters change a trained model: name "
            'its checkpoint with restore.path, or set model.lora_rank=0'
        )
    if config.restore.dtype not in ('float32', ''):
        raise ValueError(
            f'restore.dtype={config.restore.dtype!r} with model.lora_rank={config.model.lora_rank}: adapters are '
            "merged into their base as it is stored: set restore.dtype='float32'"
        )


def without_frozen_state(index: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Return the leaves of a checkpoint's index but the optimizer state of frozen parameters."""
    kept = {}
    for path, leaf in index.items():
        parameter, _, _ = path.removeprefix(checkpoint.SLOT_PREFIX).rpartition('/')
        is_frozen = parameter in trainer.shapes.params and parameter not in trainer.trained
        if not is_optimizer_state(path) or not is_frozen:
            kept[path] = leaf
    return kept


def with_last_step(config: Any, folder: Path, start: Start) -> Any:
    """Return a config whose train.steps are those of train.relative_steps, if that is set.

    Raises ValueError for a run in `folder` that began without train.relative_steps.
    """
    relative_steps = config.train.relative_steps
    if relative_steps == 0:
        return config
    first_step = start.step
    if start.is_resumed:
        file = folder / f'checkpoint_{start.step}' / 'config.json'
        old = json.loads(file.read_bytes())['train']
        if not old.get('relative_steps', 0):
            raise ValueError(
                f'train.relative_steps={relative_steps}: the run in {folder} began with train.steps={old["steps"]}: '
                'set train.steps, or name another --workdir'
            )
        first_step = old['steps'] - old['relative_steps']
    config = config.copy_and_resolve_references()
    config.train.steps = first_step + relative_steps
    return config


def choose_leaves(
    config: Any, index: Mapping[str, Any], expected: checkpoint.Shapes
) -> dict[str, Any]:
    """Return the leaves of a checkpoint's index that config.restore asks for.

    Raises ValueError if they do not fit.
    """
    try:
        return checkpoint.choose(index, expected, config.only, config.strict)
    except re.error as error:
        raise ValueError(
            f'restore.only={config.only!r} is no regular expression: {error}'
        ) from error
    except ValueError as error:
        remedy = "leave those out with restore.only, as '(?!.*mlp).*' does all MLPs"
        with contextlib.suppress(ValueError):
            checkpoint.choose(index, expected, config.only, strict=False)
            remedy += ', or whatever only one of them has with restore.strict=False'
        raise ValueError(f'restore.path={config.path}: {error}: {remedy}') from error


def describe_initial(
    step: int, directory: Any, leaves: Mapping, index: Mapping, expected: Mapping
) -> str:
    """Return what a new run takes from a checkpoint, and what only one of the two has."""
    slots = 'without any'
    if any(is_optimizer_state(path) for path in leaves):
        slots = 'with the'
    description = f'From step {step:,} of {directory}, {slots} optimizer state'
    for label, tree in (('initial', expected), ('not used', index)):
        others = sorted(only_parameters(tree).keys() - leaves)
        if others:
            description += f'; {label}: {settings.first_ten(others)}'
    return description


def is_optimizer_state(path: str) -> bool:
    """Return whether a path of T5X's tree is the optimizer's state of one parameter."""
    return path.startswith(checkpoint.SLOT_PREFIX)


def only_parameters(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a flat tree, under the same paths."""
    return {path: x for path, x in tree.items() if checkpoint.is_parameter(path)}


def state_shapes(trainer: Trainer) -> checkpoint.Shapes:
    """Return {T5X's path: shape} of all that a checkpoint of this run holds."""
    return checkpoint.shapes(optimizer.to_t5x(*trainer.shapes))


def restore_start(
    config: Any, trainer: Trainer, start: Start, console: workdir.Console
) -> TrainState:
    """Return the state that a run starts from."""
    if start.is_resumed:
        dtype = ''
    else:
        dtype = config.restore.dtype
    with console.working('Restoring' if start.leaves else 'Initializing'):
        return restore(trainer, start.leaves, dtype)


def restore(trainer: Trainer, leaves: Mapping[str, Any], dtype: str = '') -> TrainState:
    """Return the state in `leaves` of a checkpoint's index, with initial values for the rest.

    Each process reads only its part of an array that is split, each part straight to its device.
    """
    if not leaves:
        return jit_init(trainer)()
    shardings = {}
    for path, spec in optimizer.to_t5x(*trainer.specs).items():
        if not isinstance(spec, P):
            spec = P()  # of a slot that this optimizer does not use
        shardings[path] = partition.shardings(trainer.mesh, spec)
    split = {path: sharding for path, sharding in shardings.items() if sharding.spec != P()}
    arrays = checkpoint.restore(leaves, split, dtype)
    averages = optimizer.average_paths(shardings)
    missing = {}
    for path, sharding in shardings.items():
        if path not in arrays and path not in averages:
            missing[path] = sharding
    if missing:
        arrays |= initial_arrays(trainer, missing)
    for average, parameter in averages.items():
        if average not in arrays:
            arrays[average] = arrays[parameter].copy()
    # Counts in the optimizer's state may be copies of the step. NumPy's array makes each of them a
    # buffer of its own, which a step can be given.
    arrays['state/step'] = np.asarray(arrays['state/step'])
    state = TrainState(*optimizer.from_t5x(arrays, trainer.shapes.opt_state))
    state = jax.tree.map(lambda x, like: x.astype(like.dtype), state, trainer.shapes)
    return jax.device_put(state, partition.shardings(trainer.mesh, trainer.specs))


def initial_arrays(trainer: Trainer, shardings: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return the initial arrays under the paths of `shardings`. XLA computes no others."""

    def arrays():
        tree = optimizer.to_t5x(*init(trainer))
        return {path: tree[path] for path in shardings}

    return jax.jit(arrays, out_shardings=dict(shardings))()
