"""The training run: state, step, loop; what is logged, evaluated and saved, and when.

One step: `jax.shard_map` hands each device its rows and its slices of the parameters; the model and the loss
are local math with collectives; `jax.grad` gives each device's own gradients and one line sums them over
'data'; outside, optax updates global arrays. Source: T5X t5x/train.py, t5x/trainer.py.
"""

import contextlib
import io
import json
import math
import os
import re
import shlex
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import checkpoint
import data
import evaluate
import loss
import model
import optimizer
import partition
import paths
import settings
import workdir

# Settings that may change when a run goes on. Files and vocabulary may move: their contents are compared.
MAY_CHANGE = (
    'train/steps',
    'train/num_microbatches',
    'mesh/',
    'log/',
    'save/',
    'eval/',
    'data/files',
    'data/validation_files',
    'data/vocabulary',
    'data/on_bad_line',
    'data/max_bad_fraction',
)
MEMORY_FRACTION = 0.9  # that a step may need; the rest is left to data, program and system
STEPS_PER_AGREEMENT = 10  # of many processes, on whether one was asked to stop
MAX_COLUMNS = 79  # of a line of progress


class TrainState(NamedTuple):
    step: jax.Array  # int32, the number of steps taken
    params: dict[str, jax.Array]  # {T5X's path: float32}
    opt_state: Any


class Trainer(NamedTuple):
    """The traced parts of a run, made from its config alone."""

    mesh: Mesh
    shapes: Any  # TrainState of jax.ShapeDtypeStructs
    specs: Any  # TrainState of PartitionSpecs
    init: Callable  # () -> TrainState
    gradients: Callable  # (params, batch, rows, key) -> (gradients, loss.weighted_sums)
    train_step: jax.stages.Wrapped  # (state, batch) -> (state, metrics of this step)


class Run(NamedTuple):
    """A run that is ready to start or to go on."""

    config: Any
    workdir: Path
    console: workdir.Console
    lock: IO  # while it is open, nobody else uses the workdir
    mesh: Mesh
    train_step: Any  # compiled; None where the run is finished
    source: data.Source
    stream: data.Stream
    vocabulary: data.Vocabulary
    evaluation: evaluate.Evaluation
    evaluation_is_due: bool  # of the step it goes on from, where a signal ended it
    first_step: int  # steps taken before
    state: TrainState
    interval: list[dict]  # the metrics of the steps since the last logged one


class Start(NamedTuple):
    """What a run starts from."""

    step: int
    is_resumed: bool  # from a checkpoint in its own workdir
    leaves: dict[str, Any]  # of the index of a checkpoint; what is missing is initialized
    vocabulary_model: bytes  # the checkpoint's own; b'' if it has none
    description: str


def prepare(config: Any, folder: str | Path) -> Run:
    """Return a run in the workdir `folder`, all that comes before its first step done.

    The newest valid checkpoint in the workdir is restored if there is one. Raises ValueError or OSError, before
    anything is compiled, for settings that cannot be or that an old run forbids, and for a workdir that is not
    a run of ours or cannot hold checkpoints.
    """
    settings.check(config)
    folder = paths.disk_path(folder)
    workdir.check_is_run(folder)
    console = workdir.Console()
    trainer = make_trainer(config)
    counts = microbatch_counts(config, trainer.mesh)
    data.check_task(config.data.task)
    with console.working('Reading the text'):
        source = data.open_source(config.data)
    lock = workdir.lock(folder)
    try:
        return prepare_locked(config, folder, console, trainer, counts, source, lock)
    except BaseException:
        lock.close()
        raise


def prepare_locked(
    config: Any,
    folder: Path,
    console: workdir.Console,
    trainer: Trainer,
    counts: list[int],
    source: data.Source,
    lock: IO,
) -> Run:
    """The part of `prepare` that reads and writes in the workdir."""
    mesh = trainer.mesh
    with console.working('Verifying the newest checkpoint'):
        start = find_start(config, folder, trainer, console)
    with console.working('Preparing the vocabulary'):
        vocabulary = data.find_vocabulary(
            config.data, folder, source, config.model.vocab_size, start.vocabulary_model
        )
    resolved = json.loads(config.to_json())
    resolved['corpus'] = source.corpus
    resolved['data_fingerprint'] = source.fingerprint
    resolved['vocabulary_hash'] = vocabulary.hash
    if start.is_resumed:
        compare_settings(folder / f'checkpoint_{start.step}', resolved, source)
        checkpoint.choose(start.leaves, state_shapes(trainer))
    with console.working('Opening the text'):
        stream = open_stream(config, mesh, source, vocabulary, 'train')
        validation = open_stream(config, mesh, source, vocabulary, 'validation')
    for line in introduction(config, mesh, source, vocabulary):
        console.line(line)

    is_finished = start.is_resumed and start.step >= config.train.steps
    if is_finished:
        train_step, num_microbatches = None, 1
    else:
        check_step_offset(config, start)
        workdir.check_saving(folder, state_bytes(trainer))
        console.line(
            f'{start.description}; compiling, then a line every {config.log.every_steps} steps.'
        )
        check_state_fits(trainer)
        began = time.monotonic()
        with console.working('Compiling'):
            trainer, train_step, num_microbatches = compile_step(config, mesh, counts, console)
        console.line(f'Compiled in {time.monotonic() - began:.1f} s.')
    with console.working('Restoring' if start.leaves else 'Initializing'):
        dtype = '' if start.is_resumed else config.restore.dtype
        state = restore(trainer, start.leaves, dtype)
    interval: list[dict] = []
    evaluation_is_due = False
    if start.is_resumed:
        directory = folder / f'checkpoint_{start.step}'
        stream.seek(np.load(directory / 'data_position.npy')[stream.rows])
        interval = json.loads((directory / 'interval.json').read_bytes())
        evaluation_is_due = lacks_evaluation(config, folder, start.step)

    resolved['train']['num_microbatches'] = str(num_microbatches)
    if jax.process_index() == 0:
        write_run_files(folder, resolved, vocabulary, trainer)
    return Run(
        config=config,
        workdir=folder,
        console=console,
        lock=lock,
        mesh=mesh,
        train_step=train_step,
        source=source,
        stream=stream,
        vocabulary=vocabulary,
        evaluation=evaluate.Evaluation(config, mesh, stream, validation, num_microbatches),
        evaluation_is_due=evaluation_is_due,
        first_step=start.step,
        state=state,
        interval=interval,
    )


def open_stream(
    config: Any, mesh: Mesh, source: data.Source, vocabulary: data.Vocabulary, split: str
) -> data.Stream:
    """Return this process's rows of the batches of a split: training without end, validation once."""
    return data.Stream(
        source,
        split,
        vocabulary,
        config.data,
        batch_size=config.train.batch_size,
        seed=config.seed,
        rows=partition.own_rows(mesh, config.train.batch_size),
        num_epochs=1 if split == 'validation' else None,
    )


def write_run_files(
    folder: Path, resolved: Mapping, vocabulary: data.Vocabulary, trainer: Trainer
) -> None:
    """Write what a run leaves in its workdir before its first step."""
    # First, because it marks the folder as a run of this program.
    workdir.replace_file(folder / 'config.json', json.dumps(resolved, indent=1).encode())
    if vocabulary.model:
        workdir.replace_file(folder / 'vocabulary.model', vocabulary.model)
    shapes = optimizer.to_t5x(*trainer.shapes)
    info = workdir.model_info(shapes, optimizer.to_t5x(*trainer.specs))
    workdir.replace_file(folder / 'model-info.txt', info.encode())


def find_start(config: Any, folder: Path, trainer: Trainer, console: workdir.Console) -> Start:
    """Return the newest valid checkpoint of the workdir, else what a new run starts from."""
    step = checkpoint.newest_whole(folder, console.line)
    if step is None:
        workdir.check_never_saved(folder)
        return choose_initial(config, trainer)
    directory = folder / f'checkpoint_{step}'
    if not workdir.is_own_config(directory / 'config.json'):
        raise ValueError(
            f'{directory} is not of a run of this program, which cannot go on from it: move it away, or name '
            'another --workdir'
        )
    vocabulary_model = b''
    if not (folder / 'vocabulary.model').exists() and (directory / 'vocabulary.model').exists():
        vocabulary_model = (directory / 'vocabulary.model').read_bytes()
    return Start(
        step=step,
        is_resumed=True,
        leaves=checkpoint.read_index(directory),
        vocabulary_model=vocabulary_model,
        description=f'Going on after step {step:,}',
    )


def compare_settings(directory: Path, resolved: Mapping, source: data.Source) -> None:
    """Raise ValueError that lists what may not change when a run goes on from a checkpoint, and has.

    `resolved`: the content of config.json today. Of files the content counts, not the name.
    """
    old = json.loads((directory / 'config.json').read_text())
    other_text = old['data_fingerprint'] != resolved['data_fingerprint']
    text = ('data_fingerprint', 'corpus') if other_text else ()
    changes = workdir.compare_settings(old, resolved, MAY_CHANGE + text)
    if changes:
        raise ValueError(
            f'{directory.parent} holds a run with other settings ({"; ".join(changes)}): go on with those, or '
            'name another --workdir'
        )
    if other_text:
        file = directory / 'data_files.json'
        old_files = json.loads(file.read_bytes()) if file.exists() else None
        changes_of_text = data.describe_changes(old_files, source.files_as_json())
        raise ValueError(f'{directory.parent} holds a run on other text: {changes_of_text}')


def lacks_evaluation(config: Any, folder: Path, step: int) -> bool:
    """Return whether the evaluation that was due after `step` is missing: a signal ended it."""
    lines = workdir.read_metrics(folder)
    was_made = any(line['step'] == step and line['run'] != 'train' for line in lines)
    is_missing = is_due(config.eval, step, config.train.steps) and not was_made
    return bool(partition.from_processes(np.array([is_missing]))[0, 0])


def check_step_offset(config: Any, start: Start) -> None:
    """Raise ValueError where Adafactor's decay would begin after the first step: T5X's formula has no value."""
    if config.optimizer.step_offset > start.step:
        raise ValueError(
            f'optimizer.step_offset={config.optimizer.step_offset} lies after step {start.step}, where the run '
            f'starts: use {start.step} or less'
        )


def microbatch_counts(config: Any, mesh: Mesh) -> list[int]:
    """Return the numbers of microbatches to try, ascending; where one is asked for, it comes first."""
    asked = config.train.num_microbatches
    rows = config.train.batch_size // partition.axes_size(mesh, partition.BATCH_AXES)
    counts = [n for n in range(1, rows + 1) if rows % n == 0]
    if asked == 'auto':
        return counts
    if asked not in map(str, counts):
        raise ValueError(
            f'train.num_microbatches={asked!r} does not divide the {rows} rows of a device; '
            f"use 'auto' or one of {', '.join(map(str, counts))}"
        )
    return counts[counts.index(int(asked)) :]


def compile_step(
    config: Any, mesh: Mesh, counts: list[int], console: workdir.Console
) -> tuple[Trainer, Callable, int]:
    """Return the step in the first of `counts` microbatches that fits into memory.

    Raises ValueError where none does, and where the one asked for does not: it names the smallest that does.
    """
    asked = config.train.num_microbatches
    limit = memory_limit(mesh)
    tried = 0
    needs: list[float] = []  # bytes, of each count that was compiled
    for n in counts:
        # At best memory shrinks with the rows: what cannot fit is not compiled.
        if needs and 0.95 * needs[-1] * tried / n > limit:
            continue
        trainer, tried = make_trainer(config, n), n
        train_step = trainer.train_step.lower(*step_shapes(config, trainer)).compile()
        needs.append(memory_need(train_step, trainer))
        if needs[-1] <= limit:
            break
    comparison = (
        f'a step in {counts[0]} microbatch(es) needs {needs[0] / 2**30:.1f} GiB of memory, and '
        f'{limit / 2**30:.1f} are available'
    )
    if needs[-1] > limit:
        raise ValueError(
            f'{comparison}; nor do {tried} fit: use more devices or a smaller train.batch_size'
        )
    if len(needs) > 1 and asked != 'auto':
        raise ValueError(f'train.num_microbatches={asked}: {comparison}; use {tried}, or auto')
    if len(needs) > 1:
        console.line(
            f'train.num_microbatches=auto: {comparison}; so it takes {tried}, to the same gradients.'
        )
    return trainer, train_step, tried


def check_state_fits(trainer: Trainer) -> None:
    """Raise ValueError where parameters and optimizer state alone are larger than the memory: no step is tried."""
    limit = memory_limit(trainer.mesh)
    need = state_bytes(trainer) / trainer.mesh.size
    if need > limit:
        raise ValueError(
            f'parameters and optimizer state take {need / 2**30:,.1f} GiB of a device, which has '
            f'{limit / 2**30:,.1f}: use more devices or a smaller model'
        )


def step_shapes(config: Any, trainer: Trainer) -> tuple[TrainState, dict]:
    """Return what a step takes, as shapes with their shardings."""
    state_shardings, batch_sharding = partition.shardings(
        trainer.mesh, (trainer.specs, partition.BATCH)
    )

    def shape_of(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = jax.tree.map(shape_of, trainer.shapes, state_shardings)
    lengths = dict.fromkeys(
        (*evaluate.SEQUENCES, 'decoder_loss_weights'), config.data.lengths.targets
    )
    lengths['encoder_input_tokens'] = config.data.lengths.inputs
    batch = {}
    for name, length in lengths.items():
        shape = (config.train.batch_size, length)
        batch[name] = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding)
    return state, batch


def state_bytes(trainer: Trainer) -> int:
    """Return the bytes of parameters and optimizer state, which are those of a checkpoint."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trainer.shapes))


def memory_need(train_step: Any, trainer: Trainer) -> float:
    """Return the bytes that a compiled step takes of a device, on a CPU of the machine, which has one memory."""
    analysis = train_step.memory_analysis()
    need = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    need += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    if trainer.mesh.devices.flat[0].platform == 'cpu':
        need *= len(trainer.mesh.local_devices)
        need += state_bytes(trainer)  # the copy that is being saved
    return need


def memory_limit(mesh: Mesh) -> float:
    """Bytes that a step may take; of many processes the least, so that all decide alike."""
    limits = [(device.memory_stats() or {}).get('bytes_limit') for device in mesh.local_devices]
    if mesh.devices.flat[0].platform == 'cpu':
        limits = [os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')]
        for file in ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory/memory.limit_in_bytes'):
            if os.path.exists(file) and (text := Path(file).read_text().strip()).isdigit():
                limits.append(int(text))  # a container's
    limit = min((x for x in limits if x), default=math.inf)
    return MEMORY_FRACTION * float(partition.from_processes(np.array([limit])).min())


def make_trainer(config: Any, num_microbatches: int = 1) -> Trainer:
    """Raises ValueError, in words, for whatever in `config` cannot be. Nothing is compiled yet.

    In microbatches a step has the gradients of its whole batch: they are divided by the weights of all
    rows, and each row keeps its own dropout. Differs from T5X, which divides each microbatch by its own
    weights and drops the same places in all of them."""
    settings.check(config)
    c = model.T5Config(**config.model)
    mesh = partition.make_mesh(**config.mesh)
    model.check_mesh(c, mesh)
    partition.check_divides('train.batch_size', config.train.batch_size, partition.BATCH_AXES, mesh)
    normalizing_factor = loss.parse_normalizing_factor(config.loss.loss_normalizing_factor)
    schedule = optimizer.make_schedule(config.learning_rate)
    tx = optimizer.make_optimizer(config.optimizer, schedule)
    init_key, dropout_key = jax.random.split(jax.random.key(config.seed))

    def init() -> TrainState:
        params = model.init(c, init_key)
        return TrainState(jnp.int32(0), params, tx.init(params))

    params = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in model.shapes(c).items()
    }
    opt_state = jax.eval_shape(tx.init, params)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = TrainState(step, params, opt_state)  # type: ignore[arg-type]
    param_specs = partition.param_specs(model.PARAMETER_SPECS, params)
    opt_specs = optimizer.state_specs(opt_state, params, param_specs)
    specs: Any = TrainState(P(), param_specs, opt_specs)  # type: ignore[arg-type]

    def device_gradients(params, batch, rows_b, key):
        weights_bT, divisor = loss.weights_and_divisor(batch, normalizing_factor)
        params = partition.per_device(params, param_specs)

        def add_gradients(total, part):
            batch, weights_bT, rows_b = part

            def device_loss(params):
                logits_bTv = model.apply(lambda: model.logits(c, batch, rows_b), params, key)
                sums = loss.weighted_sums(
                    logits_bTv,
                    batch,
                    weights_bT,
                    divisor,
                    z_loss=config.loss.z_loss,
                    label_smoothing=config.loss.label_smoothing,
                )
                return sums['loss'], sums

            grads, sums = jax.grad(device_loss, has_aux=True)(params)
            return jax.tree.map(jnp.add, total, grads), sums

        parts = partition.cut_rows((batch, weights_bT, rows_b), num_microbatches)
        grads, sums = lax.scan(add_gradients, jax.tree.map(jnp.zeros_like, params), parts)
        sums = jax.tree.map(lambda x: x.sum(axis=0), sums)
        return partition.sum_gradients(grads, param_specs), lax.psum(sums, partition.BATCH_AXES)

    specs_in, specs_out = (param_specs, partition.BATCH, partition.BATCH, P()), (param_specs, P())
    gradients = jax.shard_map(device_gradients, mesh=mesh, in_specs=specs_in, out_specs=specs_out)

    def train_step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        rows = jnp.arange(len(batch['decoder_target_tokens']))
        key = jax.random.fold_in(dropout_key, state.step)
        grads, metrics = gradients(state.params, batch, rows, key)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics['learning_rate'] = schedule(state.step)
        metrics['gradient_norm'] = optax.tree.norm(grads)
        metrics['finite'] = jnp.isfinite(metrics['loss'] + optax.tree.norm(updates))
        return TrainState(state.step + 1, params, opt_state), metrics

    placed = partition.shardings(mesh, (specs, P()))
    jit_init = jax.jit(init, out_shardings=placed[0])
    jit_step = jax.jit(train_step, out_shardings=placed, donate_argnums=0)
    return Trainer(
        mesh=mesh,
        shapes=shapes,
        specs=specs,
        init=jit_init,
        gradients=gradients,
        train_step=jit_step,
    )


class StopRequest:
    """Whether the run was asked to stop. Of many processes each may have heard its own signal; all agree."""

    def __init__(self, ask: Callable[[], int]):
        self.ask = ask
        self.signal = 0  # the number of the signal that all processes agreed on

    def agree(self, count: int) -> int:
        """Return `signal`. Every process calls it with the same counts, and many of them rarely talk."""
        if jax.process_count() == 1:
            self.signal = self.signal or self.ask()
        elif count % STEPS_PER_AGREEMENT == 0:
            signals = partition.from_processes(np.array([self.signal or self.ask()]))
            self.signal = int(signals.max())
        return self.signal


class Clock:
    """The time that the steps since the last logged one took, without evaluating and saving."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.num_steps = 0
        self.data_wait_seconds = 0.0
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._start += time.perf_counter() - began

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.data_wait_seconds += time.perf_counter() - began


def train(run: Run, stop: Callable[[], int] | None = None) -> int:
    """Take the steps up to config.train.steps; log, evaluate and save on the way, and say what came of it.

    Ends early when `stop` gives the number of a signal, which is returned after the step is saved. Without
    `stop` (in a notebook) an interrupt does that. Raises FloatingPointError, at most one logged interval later,
    when a loss or an update is not finite, ValueError for bad data, OSError for a disk that does not take a
    checkpoint.
    """
    if run.lock.closed:
        raise ValueError(f'the run in {run.workdir} has ended: prepare it once more to go on')
    with run.lock, contextlib.ExitStack() as stack:
        if stop is None:
            stop = stack.enter_context(remember_interrupt())
        stop_request = StopRequest(stop)
        saved = checkpoint.newest(run.workdir) or 0  # a checkpoint elsewhere has no metrics here
        metrics = workdir.Metrics(run.workdir, saved, run.source.corpus)
        if run.train_step is None:
            step = int(run.state.step)
            if run.evaluation_is_due:
                evaluate_step(run, metrics, step, run.state, stop_request)
            run.console.line(
                f'Step {step:,} of {run.config.train.steps:,} is taken: this run is finished.'
            )
        else:
            step = train_and_save(run, metrics, stop_request)
        if stop_request.signal:
            run.console.line(
                f'Stopped after step {step:,}, which is saved: the same command goes on from there.'
            )
        else:
            run.console.line(next_command(run))
    return stop_request.signal


@contextlib.contextmanager
def remember_interrupt() -> Iterator[Callable[[], int]]:
    """Give a function that returns SIGINT once it was received, else 0. A second one raises KeyboardInterrupt.

    A handler that the program has set itself stays; then the function returns 0.
    """
    received: list[int] = []
    default = signal.default_int_handler
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not default:
        yield lambda: 0
        return

    def remember(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, default)
        print('Stopping: this step is finished and saved. Interrupt once more to stop at once.')

    signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: received[0] if received else 0
    finally:
        signal.signal(signal.SIGINT, default)


def train_and_save(run: Run, metrics: workdir.Metrics, stop_request: StopRequest) -> int:
    """Take the steps; return the last one when all that was saved is on the disk."""
    saver = checkpoint.Saver(
        run.workdir, run.config.save.keep, run.config.save.keep_every, run.config.save.dtype
    )
    try:
        return take_steps(run, metrics, saver, stop_request)
    finally:
        with run.console.working('Saving'):
            saver.wait()


def take_steps(
    run: Run, metrics: workdir.Metrics, saver: checkpoint.Saver, stop_request: StopRequest
) -> int:
    """The loop of `train`. Return the last step taken."""
    config = run.config
    state = run.state
    interval = run.interval
    batches = data.prefetch(run.stream)
    positions: list[np.ndarray] = []  # in the data, of the steps whose metrics nobody has looked at
    clock = Clock()
    seconds_per_step = math.inf
    first = run.first_step
    last = config.train.steps
    if run.evaluation_is_due:
        with clock.paused():
            evaluate_step(run, metrics, first, state, stop_request)
        if stop_request.signal:
            return first
    for step in range(first + 1, last + 1):
        saver.check()
        began = time.perf_counter()
        with clock.waiting_for_data():
            batch, before, after = next(batches)
        state, step_metrics = run.train_step(state, partition.place_rows(run.mesh, batch))
        content = b''.join(x.tobytes() for x in batch.values())
        interval.append({**step_metrics, 'batch_crc32': zlib.crc32(content)})
        positions.append(before)
        clock.num_steps += 1
        log_now = is_due(config.log, step, last)
        save_now = is_due(config.save, step, last)
        evaluate_now = is_due(config.eval, step, last)
        # While this step runs the next one is prepared and queued, no more; nor that where steps are slow,
        # so that whoever stops the run waits for one step only.
        if log_now or save_now or evaluate_now or seconds_per_step > 1:
            jax.block_until_ready(interval[-1])
        elif len(interval) > 1:
            jax.block_until_ready(interval[-2])
        seconds_per_step = time.perf_counter() - began
        show_now = log_now or run.console.is_due() or step == first + 1
        stop_request.agree(step)
        if show_now or save_now or evaluate_now or stop_request.signal:
            interval = jax.tree.map(float, jax.device_get(interval))
            check_finite(run, step, interval, positions)
            positions.clear()
            report_faults(run)
        if show_now:
            values = evaluate.summarize(interval, config)
            values |= interval_metrics(config, interval, clock)
            show = run.console.line if log_now else run.console.live
            show(progress(step, last, values))
        if log_now:
            metrics.write('train', step, values)
            interval = []
            clock.restart()
        with clock.paused():
            if evaluate_now and not stop_request.signal:
                evaluate_step(run, metrics, step, state, stop_request)
            if save_now or stop_request.signal:
                # Last: what goes on from here lacks nothing of what came before.
                save(run, saver, state, after, interval)
        if stop_request.signal:
            break
    return step


def is_due(periods: Any, step: int, last: int) -> bool:
    """Return whether `step` is one of `every_steps`, or the last one."""
    return step % periods.every_steps == 0 or step == last


def evaluate_step(
    run: Run, metrics: workdir.Metrics, step: int, state: TrainState, stop_request: StopRequest
) -> None:
    """Evaluate after `step`. A signal ends it without a result; the run that goes on makes up for it."""
    with run.console.working(f'Evaluating step {step:,}'):
        values = run.evaluation(state.params, stop_request.agree)
    if values is not None:
        metrics.write(f'training_eval/{run.config.data.task}', step, values)
        run.console.line(f'Step {step:,}: {compare_with_baseline(values)}')


def report_faults(run: Run) -> None:
    """Print the lines of the corpus that were left out since the last call."""
    new_faults, num_faults = run.source.faults()
    for text in new_faults:
        run.console.line(f'Left out, {num_faults:,} so far: {text}')


def check_finite(run: Run, step: int, interval: list[dict], positions: list[np.ndarray]) -> None:
    """Raise FloatingPointError for the first of the last steps, up to `step`, that was not finite."""
    for ago in reversed(range(len(positions))):
        metrics = interval[-1 - ago]
        if metrics['finite']:
            continue
        saved = checkpoint.steps(run.workdir)
        kept = f'keeps checkpoint_{saved[-1]}' if saved else 'has no checkpoint yet'
        remedy = 'Try a smaller learning_rate.base_learning_rate, or a longer warm-up.'
        is_first = step - ago == run.first_step + 1
        if is_first and not math.isfinite(metrics['loss']):
            remedy = 'No update was made yet: look at restore.path and model.dtype.'
        documents = '; '.join(run.stream.describe(positions[-1 - ago]))
        raise FloatingPointError(
            f'step {step - ago}: loss {metrics["loss"]:.6g}, gradient norm {metrics["gradient_norm"]:.6g}, not '
            f'finite. The run stops; {run.workdir} {kept}. {remedy} Documents: {documents}'
        )


def save(
    run: Run, saver: checkpoint.Saver, state: TrainState, position: np.ndarray, interval: list[dict]
) -> None:
    """Save a checkpoint with settings, vocabulary, position in the data and unfinished interval beside it."""
    rows = np.zeros((run.config.train.batch_size, position.shape[1]), np.int64)
    rows[run.stream.rows] = position
    position_file = io.BytesIO()
    np.save(position_file, partition.from_processes(rows).max(axis=0))
    files = {
        'config.json': (run.workdir / 'config.json').read_bytes(),
        'data_files.json': json.dumps(run.source.files_as_json()).encode(),
        'data_position.npy': position_file.getvalue(),
        'interval.json': json.dumps(interval).encode(),
    }
    if run.vocabulary.model:
        files['vocabulary.model'] = run.vocabulary.model
    saver.save(int(state.step), optimizer.to_t5x(*state), files)


def choose_initial(config: Any, trainer: Trainer) -> Start:
    """Return what a new run starts from: leaves of the index of `restore.path`, and its vocabulary.

    Step and optimizer state come along, as in T5X, where the checkpoint has them and `restore.only` does not
    leave them out. Raises ValueError where they do not fit.
    """
    path = config.restore.path
    if not path:
        return Start(
            step=0, is_resumed=False, leaves={}, vocabulary_model=b'', description='From scratch'
        )
    directory, index, _ = evaluate.find_checkpoint(path)
    expected = state_shapes(trainer)
    if not any(map(is_slot, index)):  # nor then the step
        expected = only_parameters(expected)
        index = only_parameters(index)
    try:
        leaves = checkpoint.choose(index, expected, config.restore.only, config.restore.strict)
    except re.error as error:
        raise ValueError(
            f'restore.only={config.restore.only!r} is no regular expression: {error}'
        ) from error
    except ValueError as error:
        raise ValueError(
            f'restore.path={path}: {error}: restore.only leaves some out, restore.strict=False whatever only one '
            'of them has'
        ) from error
    taken = checkpoint.restore({x: leaves[x] for x in leaves if x == 'state/step'})
    step = int(taken.get('state/step', 0))
    if step >= config.train.steps:
        raise ValueError(
            f'restore.path={path} has taken {step:,} of {config.train.steps:,}: set more train.steps, or '
            "restore.only='target/.*', which starts at step 0"
        )
    vocabulary = evaluate.find_vocabulary(directory)
    model_file = vocabulary.model if vocabulary else b''
    if not config.data.vocabulary and not model_file:
        raise ValueError(
            f'restore.path={path} brings no SentencePiece model, and a new one would have other pieces for its '
            'embeddings: name its own with data.vocabulary'
        )
    slots = 'with the' if any(map(is_slot, leaves)) else 'without any'
    description = f'From step {step:,} of {directory}, {slots} optimizer state'
    for label, tree in (('initial', expected), ('not used', index)):
        listed = sorted(only_parameters(tree).keys() - leaves)
        if listed:
            more = f' and {len(listed) - 10} more' if len(listed) > 10 else ''
            description += f'; {label}: {", ".join(listed[:10])}{more}'
    return Start(
        step=step,
        is_resumed=False,
        leaves=leaves,
        vocabulary_model=model_file,
        description=description,
    )


def is_slot(path: str) -> bool:
    """Return whether a path of T5X's tree is of the optimizer's state of a parameter."""
    return path.startswith('state/param_states/')


def only_parameters(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a flat tree, under the same paths."""
    return {path: x for path, x in tree.items() if path.startswith('target/')}


def restore(trainer: Trainer, leaves: Mapping[str, Any], dtype: str = '') -> TrainState:
    """The state that `leaves` of a checkpoint's index hold, initial where they hold nothing; each array where
    the trainer wants it, and one that is split is read in parts, each straight to its device."""
    if not leaves:
        return trainer.init()
    like, specs = trainer.shapes, optimizer.to_t5x(*trainer.specs)
    specs = {path: spec if isinstance(spec, P) else P() for path, spec in specs.items()}
    places = partition.shardings(trainer.mesh, specs)
    split = {path: place for path, place in places.items() if place.spec != P()}
    arrays = checkpoint.restore(leaves, split, dtype)
    missing = {path: places[path] for path in places if path not in arrays}

    def initial():  # of which XLA computes no more than these
        tree = optimizer.to_t5x(*trainer.init())
        return {path: tree[path] for path in missing}

    if missing:
        arrays |= jax.jit(initial, out_shardings=missing)()
    # Every count in the state is a copy of the step, to be donated.
    arrays['state/step'] = np.asarray(arrays['state/step'])
    state = TrainState(*optimizer.from_t5x(arrays, like.opt_state))
    state = jax.tree.map(lambda x, y: x.astype(y.dtype), state, like)
    return jax.device_put(state, partition.shardings(trainer.mesh, trainer.specs))


def state_shapes(trainer: Trainer) -> checkpoint.Shapes:
    """{T5X's path: shape} of all that a checkpoint of this run holds."""
    return checkpoint.shapes(optimizer.to_t5x(*trainer.shapes))


def interval_metrics(config: Any, interval: list[dict], clock: Clock) -> dict:
    """Return what only training has, under T5X's tags: learning rate, gradient, a hash of the batches, speed.

    The speed is of the steps that this process took; tokens of padding count.
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
    }


def progress(step: int, last: int, values: Mapping[str, float]) -> str:
    """Return a line that fits into 80 columns: one that wraps cannot be overwritten."""
    time_left = format_seconds((last - step) / values['timing/steps_per_second'])
    begin = f'step {step}/{last} loss {values["nats_per_token"]:.3f}'
    accuracy = f' accuracy {values["accuracy"]:.3f}'
    end = (
        f' lr {values["learning_rate/current"]:.3g} {values["timing/tokens_per_second"]:,.0f} tokens/s '
        f'{time_left} left'
    )
    if len(begin + accuracy + end) > MAX_COLUMNS:
        accuracy = ''
    return begin + accuracy + end


def format_seconds(seconds: float) -> str:
    """Return 'H:MM:SS', or days and hours."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f'{days}d {hours}h'
    return f'{hours}:{minutes:02}:{seconds:02}'


def introduction(
    config: Any, mesh: Mesh, source: data.Source, vocabulary: data.Vocabulary
) -> list[str]:
    """Return the first lines of a run: its model, devices and data."""
    lines = []
    if source.corpus == 'pydoc instead of C4':
        lines = [
            '!' * 80,
            '!!!  THIS IS NOT C4. data.files is empty, so the run learns from the English in this',
            "!!!  Python's own documentation, 2 MB of it: enough to see that everything works,",
            '!!!  useless as a model. C4: --config.data.files=/path/to/c4-train.*.json.gz (README.md).',
            '!' * 80,
        ]
    shapes = model.shapes(model.T5Config(**config.model)).values()
    num_parameters = sum(math.prod(shape) for shape in shapes)
    platform = mesh.devices.flat[0].platform
    return [
        *lines,
        f'T5 with {num_parameters:,} parameters in {config.model.dtype} on {mesh.size} {platform} device(s), '
        f'{dict(mesh.shape)}.',
        f'Text: {source.description}; vocabulary: {vocabulary.size:,} pieces.',
    ]


def compare_with_baseline(values: Mapping[str, float]) -> str:
    """Return the validation loss beside what a model of token frequencies alone would have."""
    own = values['nats_per_text_token']
    baseline = values['unigram_nats_per_text_token']
    side = 'below' if own < baseline else 'ABOVE'
    return (
        f'validation loss {own:.3f} nats per text token, {abs(baseline - own):.3f} {side} the unigram baseline '
        f'of {baseline:.3f} (sentinels and all: {values["nats_per_target_token"]:.3f}, baseline '
        f'{values["unigram_nats_per_target_token"]:.3f})'
    )


def next_command(run: Run) -> str:
    """Return where the results are and a command to try next, quoted for a shell."""
    folder = run.workdir
    if folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    results = f"{folder}: T5X checkpoints, metrics.jsonl, TensorBoard's events, the vocabulary."
    if run.config.data.files:
        tensorboard = shlex.join(['tensorboard', f'--logdir={folder}'])
        after = f'{tensorboard} shows the curves; --config.train.steps goes on.'
    else:
        flags = shlex.join(['--config.data.files=/path/to/*.txt', f'--workdir={folder}-mine'])
        after = f'the same command with {flags} learns from your text, one document a line.'
    return f'Everything is in {results}\nNext: {after}'
