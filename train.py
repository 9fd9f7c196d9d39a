"""The training run: state, step, loop; what is logged, evaluated and saved, and when.

One step: `jax.shard_map` hands each device its rows and its slices of the parameters; the model and the loss
are local math with collectives; `jax.grad` gives each device's own gradients and one line sums them over
'data'; outside, optax updates global arrays. Source: T5X t5x/train.py, t5x/trainer.py.
"""

import fcntl
import io
import json
import math
import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorboard.summary
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

# When a run is continued. What files and vocabulary hold is compared by its hash, wherever it lies.
MAY_CHANGE = (
    *('train/steps', 'train/num_microbatches', 'mesh/', 'log/', 'save/', 'eval/'),
    *('data/files', 'data/validation_files', 'data/vocabulary'),
    *('data/on_bad_line', 'data/max_bad_fraction'),
)
COUNTS = ('train.steps', 'train.batch_size', 'eval.steps', 'learning_rate.warmup_steps')
PERIODS = ('eval.every_steps', 'save.every_steps', 'log.every_steps')
LEAST = dict.fromkeys((*COUNTS, *PERIODS), 1) | {'save.keep': 0, 'save.keep_every': 0}
SOME_OF = {
    'save.dtype': ('float32', 'bfloat16'),
    'restore.dtype': ('float32', 'bfloat16', 'float16', ''),
}
MEMORY_FRACTION = 0.9  # that a step may need; the rest is left to data, program and system
STEPS_PER_AGREEMENT = 10  # of many processes, on whether one was asked to stop


class TrainState(NamedTuple):
    step: jax.Array  # int32, the number of steps taken
    params: dict[str, jax.Array]  # {T5X's path: float32}
    opt_state: Any


class Trainer(NamedTuple):
    """The traced parts of a run, made from its config alone."""

    mesh: Mesh
    specs: Any  # TrainState of PartitionSpecs
    init: Callable  # () -> TrainState
    gradients: Callable  # (params, batch, rows, key) -> (gradients, loss.weighted_sums)
    train_step: jax.stages.Wrapped  # (state, batch) -> (state, metrics of this step)


class Run(NamedTuple):
    """A run that is ready to start or to go on."""

    config: Any
    workdir: Path
    lock: IO  # while it is open, nobody else uses the workdir
    mesh: Mesh
    train_step: Any  # compiled; None where the run is finished
    source: data.Source
    stream: data.Stream
    evaluation: evaluate.Evaluation
    state: TrainState
    interval: list[dict]  # the metrics of the steps since the last logged one


def prepare(config: Any, workdir: str | Path) -> Run:
    """All that comes before the first step; the newest whole checkpoint is restored if there is one.
    ValueError, in words, for settings that cannot be or that an old run in `workdir` forbids."""
    workdir, batch_size = Path(workdir), config.train.batch_size
    trainer = make_trainer(config)
    mesh = trainer.mesh
    counts = microbatch_counts(config, mesh)
    source = data.open_source(config.data)
    lock = lock_workdir(workdir)
    try:
        step = checkpoint.newest_whole(workdir, say)
        directory = workdir / f'checkpoint_{step}'
        if step is None:
            leaves, own_vocabulary, start = choose_initial(config, trainer)
        else:
            own_vocabulary, start = b'', f'Going on after step {step:,}'
        where = (workdir, source, config.model.vocab_size, own_vocabulary)
        vocabulary = data.find_vocabulary(config.data, *where)
        settings = json.loads(config.to_json()) | {'corpus': source.corpus}
        settings['data_fingerprint'] = source.fingerprint
        settings['vocabulary_hash'] = vocabulary.hash
        if step is not None:
            compare_settings(directory, settings)
            leaves = checkpoint.choose(checkpoint.read_index(directory), state_shapes(trainer))
        rows = partition.own_rows(mesh, batch_size)
        place = (vocabulary, config.data, batch_size, config.seed, rows)
        stream = data.Stream(source, 'train', *place)
        validation = data.Stream(source, 'validation', *place, num_epochs=1)
        say(introduction(config, mesh, source, vocabulary))
        if step is not None and step >= config.train.steps:
            counts = []  # nothing is left to compile for
        else:
            say(f'{start}; compiling, then a line every {config.log.every_steps} steps.')
        trainer, train_step, num_microbatches = compile_step(config, mesh, counts)
        dtype = config.restore.dtype if step is None else ''
        state, interval = restore(trainer, leaves, dtype), list[dict]()
        if step is not None:
            stream.seek(np.load(directory / 'data_position.npy')[rows])
            interval = json.loads((directory / 'interval.json').read_bytes())
        settings['train']['num_microbatches'] = str(num_microbatches)
        if jax.process_index() == 0:
            if vocabulary.model:
                replace_file(workdir / 'vocabulary.model', vocabulary.model)
            replace_file(workdir / 'config.json', json.dumps(settings, indent=1).encode())
            replace_file(workdir / 'model-info.txt', model_info(trainer).encode())
    except BaseException:
        lock.close()
        raise
    evaluation = evaluate.Evaluation(config, mesh, stream, validation, num_microbatches)
    parts = (config, workdir, lock, mesh, train_step, source, stream, evaluation)
    return Run(*parts, state, interval)


def lock_workdir(workdir: Path) -> IO:
    """Keeps `workdir` for this run until the file is closed or the process ends, however it ends. ValueError
    names the run that has it."""
    workdir.mkdir(parents=True, exist_ok=True)
    file = (workdir / 'lock').open('a+')
    if jax.process_index() == 0:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            words = f'{workdir} is in use by {file.read()}'
            raise ValueError(f'{words}: stop that run, or name another --workdir') from None
        file.truncate(0)
        file.write(f'process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}')
        file.flush()
    return file


def compare_settings(directory: Path, settings: dict) -> None:
    """Raises ValueError that lists what may not change when a run goes on from a checkpoint, and has."""
    if not (directory / 'config.json').is_file():
        words = f'{directory} is not of a run of this program, which cannot go on from it'
        raise ValueError(f'{words}: move it away, or name another --workdir')
    old = checkpoint.flatten(json.loads((directory / 'config.json').read_text()))
    new = checkpoint.flatten(settings)
    names = sorted(name for name in old | new if old.get(name) != new.get(name))
    names = [name for name in names if not name.startswith(MAY_CHANGE)]
    if changes := [f'{name}: {old.get(name)!r} -> {new.get(name)!r}' for name in names]:
        words = f'{directory.parent} holds a run with other settings ({"; ".join(changes)})'
        raise ValueError(f'{words}: go on with those, or name another --workdir')


def microbatch_counts(config: Any, mesh: Mesh) -> list[int]:
    """The numbers of microbatches to try, ascending; where one is asked for, it comes first."""
    asked, rows = config.train.num_microbatches, config.train.batch_size // mesh.shape['data']
    counts = [n for n in range(1, rows + 1) if rows % n == 0]
    if asked != 'auto' and asked not in map(str, counts):
        words = f'train.num_microbatches={asked!r} does not divide the {rows} rows of a device'
        raise ValueError(f"{words}; use 'auto' or one of {', '.join(map(str, counts))}")
    return counts if asked == 'auto' else counts[counts.index(int(asked)) :]


def compile_step(
    config: Any, mesh: Mesh, counts: list[int]
) -> tuple[Trainer, Callable | None, int]:
    """The step in the first of `counts` microbatches that fits into memory. ValueError where none does, and
    where the one asked for does not: it names the smallest that does."""
    if not counts:
        return make_trainer(config), None, 1
    asked, limit = config.train.num_microbatches, memory_limit(mesh)
    tried, needs = 0, list[float]()  # bytes, of each count that was compiled
    for n in counts:
        # At best memory shrinks with the rows: what cannot fit is not compiled.
        if needs and 0.95 * needs[-1] * tried / n > limit:
            continue
        trainer, tried = make_trainer(config, n), n
        train_step = trainer.train_step.lower(*step_shapes(config, trainer)).compile()
        needs.append(memory_need(train_step, trainer))
        if needs[-1] <= limit:
            break
    words = f'a step in {counts[0]} microbatch(es) needs {needs[0] / 2**30:.1f} GiB of memory, and '
    words += f'{limit / 2**30:.1f} are to be had'
    if needs[-1] > limit:
        raise ValueError(
            f'{words}; nor do {tried} fit: use more devices or a smaller train.batch_size'
        )
    if len(needs) > 1 and asked != 'auto':
        raise ValueError(f'train.num_microbatches={asked}: {words}; use {tried}, or auto')
    if len(needs) > 1:
        say(f'train.num_microbatches=auto: {words}; so it takes {tried}, to the same gradients.')
    return trainer, train_step, tried


def step_shapes(config: Any, trainer: Trainer) -> tuple[TrainState, dict]:
    """What a step takes, as shapes with their places on the mesh."""
    like = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # noqa: E731
    places = partition.shardings(trainer.mesh, (trainer.specs, partition.BATCH))
    state = jax.tree.map(like, jax.eval_shape(trainer.init), places[0])
    names = (*evaluate.SEQUENCES, 'decoder_loss_weights')
    lengths = dict.fromkeys(names, config.data.lengths.targets)
    lengths |= {'encoder_input_tokens': config.data.lengths.inputs}
    rows = {name: np.empty((config.train.batch_size, n), np.int32) for name, n in lengths.items()}
    return state, {name: like(x, places[1]) for name, x in rows.items()}


def memory_need(train_step: Any, trainer: Trainer) -> float:
    """Bytes that a compiled step takes of a device, or of the machine where its memory is the devices'."""
    analysis = train_step.memory_analysis()
    need = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
    need += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    if (
        trainer.mesh.devices.flat[0].platform == 'cpu'
    ):  # and there the copy that is being saved, too
        state = jax.tree.leaves(jax.eval_shape(trainer.init))
        need = need * len(trainer.mesh.local_devices) + sum(
            x.size * x.dtype.itemsize for x in state
        )
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
    for key, least in LEAST.items():
        group, name = key.split('.')
        if config[group][name] < least:
            raise ValueError(f'{key}={config[group][name]}: must be at least {least}')
    for key, values in SOME_OF.items():
        group, name = key.split('.')
        if config[group][name] not in values:
            raise ValueError(f'{key}={config[group][name]!r}: must be one of {values}')
    c = model.T5Config(**config.model)
    mesh = partition.make_mesh(**config.mesh)
    model.check_mesh(c, mesh)
    partition.check_divides('train.batch_size', config.train.batch_size, 'data', mesh)
    normalizing_factor = loss.parse_normalizing_factor(config.loss.loss_normalizing_factor)
    schedule = optimizer.make_schedule(config.learning_rate)
    tx = optimizer.make_optimizer(config.optimizer, schedule)
    init_key, dropout_key = jax.random.split(jax.random.key(config.seed))

    def init() -> TrainState:
        params = model.init(c, init_key)
        return TrainState(jnp.int32(0), params, tx.init(params))

    shapes = jax.eval_shape(init)
    param_specs = partition.param_specs(model.PARAMETER_SPECS, list(shapes.params))
    opt_specs = optimizer.state_specs(shapes.opt_state, shapes.params, param_specs)
    specs: Any = TrainState(P(), param_specs, opt_specs)  # type: ignore[arg-type]

    def device_gradients(params, batch, rows_b, key):
        weights_bT, divisor = loss.weights_and_divisor(batch, normalizing_factor)
        params = partition.per_device(params, param_specs)

        def add_gradients(total, part):
            batch, weights_bT, rows_b = part

            def device_loss(params):
                logits_bTv = model.apply(lambda: model.logits(c, batch, rows_b), params, key)
                sums = loss.weighted_sums(logits_bTv, batch, weights_bT, divisor, config.loss)
                return sums['loss'], sums

            grads, sums = jax.grad(device_loss, has_aux=True)(params)
            return jax.tree.map(jnp.add, total, grads), sums

        parts = partition.cut_rows((batch, weights_bT, rows_b), num_microbatches)
        grads, sums = lax.scan(add_gradients, jax.tree.map(jnp.zeros_like, params), parts)
        sums = jax.tree.map(lambda x: x.sum(axis=0), sums)
        return partition.sum_gradients(grads, param_specs), lax.psum(sums, 'data')

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
    return Trainer(mesh, specs, jit_init, gradients, jit_step)


def train(run: Run, stop: Callable[[], int] = lambda: 0) -> int:
    """Steps until config.train.steps, or until `stop` gives the number of a signal, which is returned; logs,
    evaluates and saves on the way, and says what came of it. Raises FloatingPointError, at most one
    logged interval later, when a loss or an update is not finite, ValueError for bad data, OSError for a
    disk that does not take a checkpoint."""
    with run.lock:
        saved = checkpoint.newest(run.workdir) or 0  # a checkpoint elsewhere has no metrics here
        report = Reporter(run.workdir, saved, run.source.corpus)
        if run.train_step is None:
            say(
                f'Step {run.state.step:,} of {run.config.train.steps:,} is taken: this run is finished.'
            )
            say(outlook(run))
            return 0
        c = run.config.save
        saver = checkpoint.Saver(run.workdir, c.keep, c.keep_every, c.dtype)
        try:
            step, signal = take_steps(run, report, saver, stop)
        finally:
            saver.wait()
        stopped = (
            f'Stopped after step {step:,}, which is saved: the same command goes on from there.'
        )
        report.line(stopped if signal else outlook(run))
    return signal


def take_steps(
    run: Run, report: 'Reporter', saver: checkpoint.Saver, stop: Callable
) -> tuple[int, int]:
    """The loop of `train`. Returns the last step taken and the signal that ended it, or 0."""
    config, state, interval = run.config, run.state, run.interval
    batches = data.prefetch(run.stream)
    positions: list[np.ndarray] = []  # in the data, of the steps that nobody has looked at
    first, last, signal = int(state.step), config.train.steps, 0
    before_clock, clock, waited = len(interval), time.perf_counter(), 0.0
    seconds, spoke = math.inf, -math.inf  # that a step takes; when the last line was printed
    for step in range(first + 1, last + 1):
        saver.check()
        asked = time.perf_counter()
        batch, before, after = next(batches)
        waited += time.perf_counter() - asked
        state, metrics = run.train_step(state, partition.place_rows(run.mesh, batch))
        crc32 = zlib.crc32(b''.join(x.tobytes() for x in batch.values()))
        interval.append(metrics | {'batch_crc32': crc32})
        positions.append(before)
        log, save_now, evaluate_now = (
            step % config[name].every_steps == 0 or step == last for name in ('log', 'save', 'eval')
        )
        # While this step runs the next one is prepared and queued, no more; nor that where steps are slow,
        # so that whoever stops the run waits for one step only.
        wait = log or save_now or evaluate_now or seconds > 1
        jax.block_until_ready(interval[-1:] if wait else interval[-2:-1])
        seconds = time.perf_counter() - asked
        speak = log or time.perf_counter() - spoke > report.seconds_between_lines
        signal = agree(step, stop())
        if speak or save_now or evaluate_now or signal:
            interval = jax.tree.map(float, jax.device_get(interval))
            check_finite(run, step, interval, positions)
            positions.clear()
            untold, num_bad = run.source.faults()
            for text in untold:
                report.line(f'Left out, {num_bad:,} so far: {text}')
        if speak:
            values = evaluate.summarize(interval, config)
            timed = (len(interval) - before_clock, time.perf_counter() - clock, waited)
            values |= interval_metrics(config, interval, *timed)
            report.line(progress(step, last, values), live=True)
            spoke = time.perf_counter()
        if log:
            report.metrics('train', step, values)
            interval = []
            before_clock, clock, waited = 0, time.perf_counter(), 0.0
        paused = time.perf_counter()
        if evaluate_now:
            values = run.evaluation(state.params)
            report.metrics(f'training_eval/{config.data.task}', step, values)
            report.line(f'Step {step:,}: {learned(values)}')
        if save_now or signal:  # last: what goes on from here lacks nothing of what came before
            save(run, saver, state, after, interval)
        clock += time.perf_counter() - paused
        if signal:
            break
    return step, signal


def agree(step: int, signal: int) -> int:
    """What `signal` is for all processes; each may have heard its own."""
    if jax.process_count() == 1:
        return signal
    if step % STEPS_PER_AGREEMENT:
        return 0
    return int(partition.from_processes(np.array([signal])).max())


def check_finite(run: Run, step: int, interval: list[dict], positions: list[np.ndarray]) -> None:
    """Raises FloatingPointError for the first of the last steps, up to `step`, that was not finite."""
    for ago in reversed(range(len(positions))):
        metrics, position = interval[-1 - ago], positions[-1 - ago]
        if not metrics['finite']:
            documents = '; '.join(run.stream.describe(position))
            raise FloatingPointError(
                f'step {step - ago}: loss {metrics["loss"]:.6g}, gradient norm '
                f'{metrics["gradient_norm"]:.6g}, not finite. The run stops; {run.workdir} keeps the '
                f'checkpoints before it. Try a smaller learning rate. Documents: {documents}'
            )


def save(
    run: Run, saver: checkpoint.Saver, state: TrainState, position: np.ndarray, interval: list[dict]
) -> None:
    """A checkpoint with the settings, the place in the data and the unfinished interval beside it."""
    rows = np.zeros((run.config.train.batch_size, position.shape[1]), np.int64)
    rows[run.stream.rows] = position
    np.save(position_file := io.BytesIO(), partition.from_processes(rows).max(axis=0))
    files = {'config.json': (run.workdir / 'config.json').read_bytes()}
    files['data_position.npy'] = position_file.getvalue()
    files['interval.json'] = json.dumps(interval).encode()
    saver.save(int(state.step), optimizer.to_t5x(*state), files)


def choose_initial(config: Any, trainer: Trainer) -> tuple[dict[str, Any], bytes, str]:
    """Where a new run starts: leaves of the index of `restore.path`, its vocabulary, and words that say so.
    Step and optimizer state come along, as in T5X, where the checkpoint has them and `restore.only` does not
    leave them out. ValueError where they do not fit."""
    path, only = config.restore.path, config.restore.only
    if not path:
        return {}, b'', 'From scratch'

    def parameters(tree):
        return {name: x for name, x in tree.items() if name.startswith('target/')}

    directory, index, _ = evaluate.find_checkpoint(path)
    expected, is_slot = state_shapes(trainer), re.compile('state/param_states/.+').fullmatch
    if not any(map(is_slot, index)):  # nor then the step
        expected, index = parameters(expected), parameters(index)
    try:
        leaves = checkpoint.choose(index, expected, only, config.restore.strict)
    except re.error as error:
        raise ValueError(f'restore.only={only!r} is no regular expression: {error}') from error
    except ValueError as error:
        words = 'restore.only leaves some out, restore.strict=False whatever only one of them has'
        raise ValueError(f'restore.path={path}: {error}: {words}') from error
    taken = checkpoint.restore({x: leaves[x] for x in leaves if x == 'state/step'})
    step, steps = int(taken.get('state/step', 0)), config.train.steps
    if step >= steps:
        words = "set more train.steps, or restore.only='target/.*', which starts at step 0"
        raise ValueError(f'restore.path={path} has taken {step:,} of {steps:,}: {words}')
    vocabulary = evaluate.find_vocabulary(directory)
    if not config.data.vocabulary and not (vocabulary and vocabulary.model):
        words = 'no SentencePiece model, and a new one would have other words for its embeddings'
        raise ValueError(f'restore.path={path} brings {words}: name its own with data.vocabulary')
    slots = 'with the' if any(map(is_slot, leaves)) else 'without any'
    start = f'From step {step:,} of {directory}, {slots} optimizer state'
    for words, tree in (('initial', expected), ('not used', index)):
        if listed := sorted(parameters(tree).keys() - leaves):
            more = f' and {len(listed) - 10} more' if len(listed) > 10 else ''
            start += f'; {words}: {", ".join(listed[:10])}{more}'
    return leaves, vocabulary.model if vocabulary else b'', start


def restore(trainer: Trainer, leaves: Mapping[str, Any], dtype: str = '') -> TrainState:
    """The state that `leaves` of a checkpoint's index hold, initial where they hold nothing; each array where
    the trainer wants it, and one that is split is read in parts, each straight to its device."""
    like, specs = jax.eval_shape(trainer.init), optimizer.to_t5x(*trainer.specs)
    specs = {path: spec if isinstance(spec, P) else P() for path, spec in specs.items()}
    places = partition.shardings(trainer.mesh, specs)
    split = {path: place for path, place in places.items() if place.spec != P()}
    arrays = checkpoint.restore(leaves, split, dtype)
    missing = {path: places[path] for path in places if path not in arrays}

    def initial():  # of which XLA computes no more than these
        tree = optimizer.to_t5x(*trainer.init())
        return {path: tree[path] for path in missing}

    arrays |= jax.jit(initial, out_shardings=missing)()
    # Every count in the state is a copy of the step, to be donated.
    arrays['state/step'] = np.asarray(arrays['state/step'])
    state = TrainState(*optimizer.from_t5x(arrays, like.opt_state))
    state = jax.tree.map(lambda x, y: x.astype(y.dtype), state, like)
    return jax.device_put(state, partition.shardings(trainer.mesh, trainer.specs))


def state_shapes(trainer: Trainer) -> checkpoint.Shapes:
    """{T5X's path: shape} of all that a checkpoint of this run holds."""
    return checkpoint.shapes(optimizer.to_t5x(*jax.eval_shape(trainer.init)))


def replace_file(file: Path, content: bytes) -> None:
    """All or nothing: whoever reads the file finds the old content or the new one."""
    with file.with_suffix('.tmp').open('wb') as unfinished:
        unfinished.write(content)
        unfinished.flush()
        os.fsync(unfinished.fileno())
    file.with_suffix('.tmp').replace(file)


def model_info(trainer: Trainer) -> str:
    """T5X's model-info.txt: each array of parameters and optimizer state, and how it is split."""

    def line(path: str, x: Any, spec: Any) -> str:
        spec = tuple(spec) if isinstance(spec, P) else ()
        return f'Variable {path:<80} size {x.size:<12} shape {x.shape!s:<40} partition spec {spec}'

    shapes = optimizer.to_t5x(*jax.eval_shape(trainer.init))
    specs = optimizer.to_t5x(*trainer.specs)
    lines = {
        path: line(path.split('/', 1)[1], shapes[path], specs[path]) for path in sorted(shapes)
    }
    params = [path for path in lines if path.startswith('target/')]
    total = f'Total number of parameters: {sum(shapes[path].size for path in params)}'
    state = [text for path, text in lines.items() if path not in params]
    return '\n'.join([*(lines[path] for path in params), total, '', *state, ''])


def say(text: str) -> None:
    """Prints, of many processes in the first."""
    if jax.process_index() == 0:
        print(text, flush=True)


class Reporter:
    """Where a run speaks: the terminal, metrics.jsonl, TensorBoard. Of many processes the first does. Every
    number of a run passes `metrics`: to send them elsewhere (Weights & Biases), do it there."""

    def __init__(self, workdir: Path, first_step: int, corpus: str):
        self.workdir, self.writers = workdir, dict[str, tensorboard.summary.Writer]()
        self.silent, self.terminal = jax.process_index() != 0, sys.stdout.isatty()
        self.corpus, self.seconds_between_lines = corpus, 1 if self.terminal else 60
        file = workdir / 'metrics.jsonl'
        if not self.silent:  # what came after the checkpoint will come again, the same
            lines = file.read_text(errors='replace').splitlines() if file.exists() else []
            kept = [x for x in lines if step_of(x) <= first_step]
            replace_file(file, ''.join(line + '\n' for line in kept).encode())
            self.file = file.open('a', buffering=1)

    def metrics(self, name: str, step: int, values: dict[str, float]) -> None:
        """`name`: 'train', 'training_eval/TASK'; `values`: T5X's tags -> numbers."""
        if self.silent:
            return
        line = {'step': step, 'run': name, 'corpus': self.corpus} | values
        self.file.write(json.dumps(line) + '\n')
        os.fsync(self.file.fileno())
        if name not in self.writers:
            self.writers[name] = tensorboard.summary.Writer(str(self.workdir / name))
        for tag, value in values.items():
            self.writers[name].add_scalar(tag, value, step)
        self.writers[name].flush()

    def line(self, text: str, live: bool = False) -> None:
        """Prints; on a terminal a live line is overwritten by what comes after it."""
        if not self.silent:
            start, end = ('\r', '\x1b[K' if live else '\x1b[K\n') if self.terminal else ('', '\n')
            print(f'{start}{text}', end=end, flush=True)


def step_of(line: str) -> float:
    """Of a line of metrics.jsonl; infinite where a crash has cut the line."""
    try:
        return json.loads(line)['step']
    except (ValueError, TypeError, KeyError):
        return math.inf


def interval_metrics(
    config: Any, interval: list[dict], num_steps: int, seconds: float, waited: float
) -> dict:
    """What only training has, under T5X's tags: learning rate, gradient, a hash of the batches, and the speed
    (tokens of padding too) of the last `num_steps`, those that this process took."""
    column = {name: np.array([metrics[name] for metrics in interval]) for name in interval[0]}
    rows_per_second = num_steps * config.train.batch_size / seconds
    lengths = config.data.lengths
    return {
        'learning_rate': float(column['learning_rate'].mean()),
        'learning_rate/current': float(column['learning_rate'][-1]),
        'weight_gradient_norm': float(column['gradient_norm'].mean()),
        'batch_crc32': zlib.crc32(column['batch_crc32'].tobytes()),
        'timing/steps_per_second': num_steps / seconds,
        'timing/seqs_per_second': rows_per_second,
        'timing/target_tokens_per_second': rows_per_second * lengths.targets,
        'timing/tokens_per_second': rows_per_second * (lengths.inputs + lengths.targets),
        'timing/data_wait_seconds': waited,
    }


def progress(step: int, last: int, values: dict[str, float]) -> str:
    time_left = timedelta(seconds=round((last - step) / values['timing/steps_per_second']))
    left = f'{time_left.days} days' if time_left.days > 1 else time_left
    loss_, accuracy = values['nats_per_token'], values['accuracy']
    rate, speed = values['learning_rate/current'], values['timing/tokens_per_second']
    return (  # 80 columns: a live line must not wrap
        f'step {step}/{last} loss {loss_:.3f} accuracy {accuracy:.3f} lr {rate:.3g} '
        f'{speed:,.0f} tokens/s {left} left'
    )


def introduction(config: Any, mesh: Mesh, source: data.Source, vocabulary: Any) -> str:
    shapes = model.shapes(model.T5Config(**config.model)).values()
    size = f'{sum(math.prod(shape) for shape in shapes):,} parameters'
    where = f'{mesh.size} {mesh.devices.flat[0].platform} device(s), {dict(mesh.shape)}'
    banner = ''
    if source.corpus == 'pydoc instead of C4':
        banner = (
            f'{"!" * 80}\n'
            '!!!  THIS IS NOT C4. data.files is empty, so the run learns from the English in this\n'
            "!!!  Python's own documentation, 2 MB of it: enough to see that everything works,\n"
            '!!!  useless as a model. C4: --config.data.files=/path/to/c4-train.*.json.gz (README.md).\n'
            f'{"!" * 80}\n'
        )
    return (
        f'{banner}T5 with {size} in {config.model.dtype} on {where}.\n'
        f'Text: {source.description}; vocabulary: {vocabulary.size:,} pieces.'
    )


def learned(values: dict[str, float]) -> str:
    own, bar = values['nats_per_text_token'], values['unigram_nats_per_text_token']
    both = (values['nats_per_target_token'], values['unigram_nats_per_target_token'])
    return (
        f'validation loss {own:.3f} nats per text token, {abs(bar - own):.3f} '
        f'{"below" if own < bar else "ABOVE"} the {bar:.3f} of knowing only how frequent each token is '
        '(sentinels and all: {:.3f}, bar {:.3f})'.format(*both)
    )


def outlook(run: Run) -> str:
    files = f'--config.data.files=/path/to/*.txt --workdir={run.workdir}-mine'
    after = f'the same command with {files} learns from your text, one document a line.'
    if run.config.data.files:
        after = (
            f'tensorboard --logdir={run.workdir} shows the curves; --config.train.steps goes on.'
        )
    return (
        f"Everything is in {run.workdir}: T5X checkpoints, metrics.jsonl, TensorBoard's events, the "
        f'vocabulary.\nNext: {after}'
    )
