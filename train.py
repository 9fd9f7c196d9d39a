"""The training run: state, step, loop; what is logged, evaluated and saved, and when.

One step: `jax.shard_map` hands each device its rows and its slices of the parameters; the model and the loss
are local math with collectives; `jax.grad` gives each device's own gradients and one line sums them over
'data'; outside, optax updates global arrays. Source: T5X t5x/train.py, t5x/trainer.py.
"""

import io
import json
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

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

MAY_CHANGE = ('train/steps', 'mesh/', 'log/', 'save/', 'eval/')  # when a run is continued


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
    trainer: Trainer
    source: data.Source
    vocabulary: Any  # of data.find_vocabulary
    stream: data.Stream
    state: TrainState


def prepare(config: Any, workdir: str | Path) -> Run:
    """All that comes before the first step; the newest checkpoint is restored if there is one. ValueError,
    in words, for settings that cannot be or that an old run in `workdir` forbids."""
    workdir, batch_size = Path(workdir), config.train.batch_size
    trainer = make_trainer(config)
    source = data.open_source(config.data)
    settings = json.loads(config.to_json()) | {'data_fingerprint': source.fingerprint}
    step = checkpoint.newest(workdir)
    if step is not None:
        old = checkpoint.flatten(json.loads((workdir / 'config.json').read_text()))
        new = checkpoint.flatten(settings)
        names = sorted(name for name in old | new if old.get(name) != new.get(name))
        names = [name for name in names if not name.startswith(MAY_CHANGE)]
        if changes := [f'{name}: {old.get(name)!r} -> {new.get(name)!r}' for name in names]:
            words = f'{workdir} holds a run with other settings ({"; ".join(changes)})'
            raise ValueError(f'{words}: go on with those, or name another --workdir')
    vocabulary = data.find_vocabulary(config.data, workdir, source, config.model.vocab_size)
    rows = partition.own_rows(trainer.mesh, batch_size)
    stream = data.Stream(source, 'train', vocabulary, config.data, batch_size, config.seed, rows)
    if step is None:
        state = trainer.init()
    else:
        state = restore(trainer, workdir / f'checkpoint_{step}')
        stream.seek(np.load(workdir / f'checkpoint_{step}' / 'data_position.npy')[rows])
    if jax.process_index() == 0:
        replace_file(workdir / 'config.json', json.dumps(settings, indent=1))
    return Run(config, workdir, trainer, source, vocabulary, stream, state)


def make_trainer(config: Any) -> Trainer:
    """Raises ValueError, in words, for whatever in `config` cannot be. Nothing is compiled yet."""
    counts = [(name, key) for name in ('train', 'eval', 'save', 'log') for key in config[name]]
    for name, key in [*counts, ('learning_rate', 'warmup_steps')]:
        if config[name][key] < 1:
            raise ValueError(f'{name}.{key}={config[name][key]}: must be at least 1')
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

        def device_loss(params):
            logits_bTv = model.apply(lambda: model.logits(c, batch, rows_b), params, key)
            sums = loss.weighted_sums(logits_bTv, batch, weights_bT, divisor, config.loss)
            return sums['loss'], sums

        own_params = partition.per_device(params, param_specs)
        grads, sums = jax.grad(device_loss, has_aux=True)(own_params)
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


def train(run: Run) -> None:
    """Steps until config.train.steps; logs, saves and evaluates on the way, and says what came of it. Raises
    FloatingPointError, at most one logged interval later, when a loss or an update is not finite."""
    config, mesh, state = run.config, run.trainer.mesh, run.state
    first, last = int(state.step), config.train.steps
    report = Reporter(run.workdir, first)
    report.line(introduction(run))
    if first >= last:
        report.line(f'Step {first:,} of {last:,} is taken: this run is finished.\n{outlook(run)}')
        return
    evaluation = evaluate.Evaluation(config, mesh, run.source, run.vocabulary)
    batches = data.prefetch(run.stream)
    example = partition.place_rows(mesh, evaluation.batches[0])
    train_step = run.trainer.train_step.lower(state, example).compile()
    interval: list[dict] = []  # each step's metrics since the last logged step
    positions: list[np.ndarray] = []  # in the data, of the steps that nobody has looked at
    clock, waited = time.perf_counter(), 0.0
    for step in range(first + 1, last + 1):
        asked = time.perf_counter()
        batch, before, after = next(batches)
        waited += time.perf_counter() - asked
        state, metrics = train_step(state, partition.place_rows(mesh, batch))
        crc32 = zlib.crc32(b''.join(x.tobytes() for x in batch.values()))
        interval.append(metrics | {'batch_crc32': crc32})
        positions.append(before)
        log, save_now, evaluate_now = (
            step % config[name].every_steps == 0 or step == last for name in ('log', 'save', 'eval')
        )
        if log or save_now or evaluate_now:
            interval = jax.tree.map(float, jax.device_get(interval))
            check_finite(run, step, interval, positions)
            positions.clear()
        if log:
            values = evaluate.summarize(interval, config)
            values |= interval_metrics(config, interval, time.perf_counter() - clock, waited)
            report.metrics('train', step, values)
            report.line(progress(step, last, values), live=True)
            interval = []
            clock, waited = time.perf_counter(), 0.0
        paused = time.perf_counter()
        if evaluate_now:
            values = evaluation(state.params)
            report.metrics(f'training_eval/{config.data.task}', step, values)
            report.line(f'Step {step:,}: {learned(values)}')
        if save_now:  # last, so that what goes on from here lacks nothing of what came before
            save(run, state, after)
        clock += time.perf_counter() - paused
    report.line(outlook(run))


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


def save(run: Run, state: TrainState, position: np.ndarray) -> None:
    """Writes a checkpoint with the place in the data and the settings beside it."""
    rows = np.zeros((run.config.train.batch_size, position.shape[1]), np.int64)
    rows[run.stream.rows] = position
    np.save(position_file := io.BytesIO(), partition.from_processes(rows).max(axis=0))
    files = {'config.json': (run.workdir / 'config.json').read_bytes()}
    files['data_position.npy'] = position_file.getvalue()
    checkpoint.save(run.workdir, int(state.step), optimizer.to_t5x(*state), files)


def restore(trainer: Trainer, directory: Path) -> TrainState:
    """The state in a checkpoint, each array where the trainer wants it; one that is split is read in
    parts, each straight to its device."""
    like = jax.eval_shape(trainer.init)
    expected = checkpoint.shapes(optimizer.to_t5x(*like))
    checkpoint.compare(expected, checkpoint.shapes(checkpoint.read_index(directory)))
    specs = optimizer.to_t5x(*trainer.specs)
    # Not the step: every count in the state is a copy of it, to be donated.
    split = {path: x for path, x in specs.items() if isinstance(x, P) and path != 'state/step'}
    arrays = checkpoint.restore(directory, shardings=partition.shardings(trainer.mesh, split))
    state = TrainState(*optimizer.from_t5x(arrays, like.opt_state))
    return jax.device_put(state, partition.shardings(trainer.mesh, trainer.specs))


def replace_file(file: Path, text: str) -> None:
    """All or nothing: whoever reads the file finds the old text or the new one."""
    unfinished = file.with_suffix('.tmp')
    unfinished.write_text(text)
    unfinished.replace(file)


class Reporter:
    """Where a run speaks: the terminal, metrics.jsonl, TensorBoard. Of many processes the first does. Every
    number of a run passes `metrics`: to send them elsewhere (Weights & Biases), do it there."""

    def __init__(self, workdir: Path, first_step: int):
        self.workdir, self.writers = workdir, dict[str, tensorboard.summary.Writer]()
        self.silent, self.terminal = jax.process_index() != 0, sys.stdout.isatty()
        file = workdir / 'metrics.jsonl'
        if not self.silent:  # what came after the checkpoint will come again, the same
            lines = file.read_text().splitlines() if file.exists() else []
            kept = [x for x in lines if x.endswith('}') and json.loads(x)['step'] <= first_step]
            replace_file(file, ''.join(line + '\n' for line in kept))
            self.file = file.open('a', buffering=1)

    def metrics(self, name: str, step: int, values: dict[str, float]) -> None:
        """`name`: 'train', 'training_eval/TASK'; `values`: T5X's tags -> numbers."""
        if self.silent:
            return
        self.file.write(json.dumps({'step': step, 'run': name} | values) + '\n')
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


def interval_metrics(config: Any, interval: list[dict], seconds: float, waited: float) -> dict:
    """What only training has, under T5X's tags: learning rate, gradient, speed (tokens of padding too)
    and a hash of the batches."""
    column = {name: np.array([metrics[name] for metrics in interval]) for name in interval[0]}
    rows_per_second = len(interval) * config.train.batch_size / seconds
    lengths = config.data.lengths
    return {
        'learning_rate': float(column['learning_rate'].mean()),
        'learning_rate/current': float(column['learning_rate'][-1]),
        'weight_gradient_norm': float(column['gradient_norm'].mean()),
        'batch_crc32': zlib.crc32(column['batch_crc32'].tobytes()),
        'timing/steps_per_second': len(interval) / seconds,
        'timing/seqs_per_second': rows_per_second,
        'timing/target_tokens_per_second': rows_per_second * lengths.targets,
        'timing/tokens_per_second': rows_per_second * (lengths.inputs + lengths.targets),
        'timing/data_wait_seconds': waited,
    }


def progress(step: int, last: int, values: dict[str, float]) -> str:
    left = timedelta(seconds=round((last - step) / values['timing/steps_per_second']))
    loss_, accuracy = values['nats_per_token'], values['accuracy']
    rate, speed = values['learning_rate/current'], values['timing/tokens_per_second']
    return (  # 80 columns: a live line must not wrap
        f'step {step}/{last} loss {loss_:.3f} accuracy {accuracy:.3f} lr {rate:.3g} '
        f'{speed:,.0f} tokens/s {left} left'
    )


def introduction(run: Run) -> str:
    step, devices = int(run.state.step), run.trainer.mesh.devices
    size = f'{sum(x.size for x in run.state.params.values()):,} parameters'
    where = f'{devices.size} {devices.flat[0].platform} device(s), {dict(run.trainer.mesh.shape)}'
    return (
        f'T5 with {size} in {run.config.model.dtype} on {where}.\n'
        f'Text: {run.source.description}; vocabulary: {run.vocabulary.size:,} pieces.\n'
        f'{f"Going on after step {step:,}" if step else "From scratch"}; compiling, then a line every '
        f'{run.config.log.every_steps} steps.'
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
