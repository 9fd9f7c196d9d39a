"""The training run: state, step, loop; what is logged, evaluated and saved, and when.

One step: `jax.shard_map` hands each device its rows and its slices of the parameters; inside, the model
and the loss are local math with collectives; `jax.grad` gives each device's own gradients; one line sums
them over 'data'; outside, optax updates global arrays. Source: T5X t5x/train.py, t5x/trainer.py.
"""

import dataclasses
import io
import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer import event_file_writer

import checkpoint
import data
import evaluate
import loss
import model
import optimizer
import partition

# What a continued run may set anew; all else decides the numbers, and the error lists the differences.
MAY_CHANGE = ('train.steps', 'mesh.', 'log.', 'save.', 'eval.')


class TrainState(NamedTuple):
    step: jax.Array  # int32, the number of steps taken
    params: dict[str, jax.Array]  # {T5X's path: float32}
    opt_state: Any


class Trainer(NamedTuple):
    """The traced parts of a run, made from its config alone."""

    mesh: Mesh
    specs: TrainState  # of PartitionSpecs
    init: Callable  # () -> TrainState
    gradients: Callable  # (params, batch, rows, key) -> (gradients, sums of loss.weighted_sums)
    train_step: Callable  # (state, batch) -> (state, metrics of this step)


def make_trainer(config: Any) -> Trainer:
    """Raises ValueError, in words, for whatever in `config` cannot be. Nothing is compiled yet."""
    c = model.T5Config(**config.model)
    mesh = partition.make_mesh(**config.mesh)
    model.check_mesh(c, mesh)
    partition.check_divides('train.batch_size', config.train.batch_size, 'data', mesh)
    loss.parse_normalizing_factor(config.loss.loss_normalizing_factor)
    schedule = optimizer.make_schedule(config.learning_rate)
    tx = optimizer.make_optimizer(config.optimizer, schedule)
    init_key, dropout_key = jax.random.split(jax.random.key(config.seed))

    def init() -> TrainState:
        params = model.init(c, init_key)
        return TrainState(jnp.int32(0), params, tx.init(params))

    shapes = jax.eval_shape(init)
    param_specs = partition.param_specs(model.PARAMETER_SPECS, list(shapes.params))
    opt_specs = optimizer.state_specs(shapes.opt_state, shapes.params, param_specs)
    specs = TrainState(P(), param_specs, opt_specs)

    def device_gradients(params, batch, rows_b, key):
        weights_bT, divisor = loss.weights_and_divisor(batch, config.loss.loss_normalizing_factor)

        def device_loss(params):
            logits_bTv = model.apply(lambda: model.logits(c, batch, rows_b), params, key)
            sums = loss.weighted_sums(logits_bTv, batch, weights_bT, divisor, config.loss)
            return sums['loss'], sums

        own_params = partition.per_device(params, param_specs)
        grads, sums = jax.grad(device_loss, has_aux=True)(own_params)
        return partition.sum_gradients(grads, param_specs), lax.psum(sums, 'data')

    gradients = jax.shard_map(
        device_gradients,
        mesh=mesh,
        in_specs=(param_specs, P('data'), P('data'), P()),
        out_specs=(param_specs, P()),
    )

    def train_step(state: TrainState, batch: dict) -> tuple[TrainState, dict]:
        rows = jnp.arange(len(batch['decoder_target_tokens']))
        key = jax.random.fold_in(dropout_key, state.step)
        grads, metrics = gradients(state.params, batch, rows, key)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics['learning_rate'] = schedule(state.step)
        metrics['gradient_norm'] = optax.tree.norm(grads)
        metrics['finite'] = jnp.isfinite(metrics['loss'] + optax.tree.norm(updates))
        for name in ('encoder_input_tokens', 'decoder_target_tokens'):
            metrics[f'num_{name}'] = jnp.sum(batch[name] > 0)
        return TrainState(state.step + 1, params, opt_state), metrics

    placed = partition.shardings(mesh, specs)
    return Trainer(
        mesh=mesh,
        specs=specs,
        init=jax.jit(init, out_shardings=placed),
        gradients=gradients,
        train_step=jax.jit(
            train_step, out_shardings=(placed, NamedSharding(mesh, P())), donate_argnums=0
        ),
    )


@dataclasses.dataclass
class Interval:
    """What happened since the last logged step. It is saved with a checkpoint, so that a continued run
    logs the same numbers."""

    metrics: list[dict] = dataclasses.field(default_factory=list)  # of each step, on the device
    crc32: int = 0  # of the batches, chained


class Run(NamedTuple):
    """A run that is ready to start or to go on."""

    config: Any
    workdir: Path
    trainer: Trainer
    vocabulary: Any
    source: Any
    stream: data.Stream
    state: TrainState
    interval: Interval


def prepare(config: Any, workdir: str | Path) -> Run:
    """All that comes before the first step; the newest checkpoint is restored if there is one.

    Raises ValueError, in words, for settings that cannot be or that an old run in `workdir` forbids.
    """
    workdir = Path(workdir)
    check_positive(config)
    trainer = make_trainer(config)
    source = data.open_source(config.data)
    settings = json.loads(config.to_json()) | {'data_fingerprint': source.fingerprint}
    check_unchanged(workdir, settings)
    vocabulary = data.find_vocabulary(config.data, str(workdir), source)
    if vocabulary.size > config.model.vocab_size:
        raise ValueError(
            f'model.vocab_size={config.model.vocab_size} is smaller than the vocabulary, which has '
            f'{vocabulary.size} pieces; use {-(-vocabulary.size // 128) * 128}'
        )
    rows = partition.own_rows(trainer.mesh, config.train.batch_size)
    stream = data.Stream(
        source, 'train', vocabulary, config.data, config.train.batch_size, config.seed, rows
    )
    step = checkpoint.newest(workdir)
    if step is None:
        state, interval = trainer.init(), Interval()
    else:
        directory = workdir / f'checkpoint_{step}'
        state = restore(trainer, directory)
        stream.position = np.load(directory / 'data_position.npy')[rows]
        interval = Interval(**json.loads((directory / 'interval.json').read_text()))
    if jax.process_index() == 0:
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / 'config.json').write_text(json.dumps(settings, indent=1))
        (workdir / 'model-info.txt').write_text(model_info(trainer, state))
    return Run(config, workdir, trainer, vocabulary, source, stream, state, interval)


def check_positive(config: Any) -> None:
    counts = {
        'train': ('steps', 'batch_size'),
        'eval': ('every_steps', 'steps'),
        'save': ('every_steps',),
        'log': ('every_steps',),
        'learning_rate': ('warmup_steps', 'steps_per_decay', 'steps_per_cycle'),
    }
    for section, names in counts.items():
        for name in names:
            if config[section][name] < 1:
                raise ValueError(f'{section}.{name}={config[section][name]}: must be at least 1')


def check_unchanged(workdir: Path, settings: dict) -> None:
    """Raises ValueError that lists what differs from the run that `workdir` holds, if it may not."""
    file = workdir / 'config.json'
    if checkpoint.newest(workdir) is None or not file.exists():
        return
    old, new = checkpoint.flatten(json.loads(file.read_text())), checkpoint.flatten(settings)
    changed = [
        f'{name.replace("/", ".")}: {old.get(name)!r} -> {new.get(name)!r}'
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not name.startswith(MAY_CHANGE)
    ]
    if changed:
        raise ValueError(
            f'{workdir} holds a run with other settings ({"; ".join(changed)}): '
            'use these, or another --workdir'
        )


def restore(trainer: Trainer, directory: Path) -> TrainState:
    """The state in a checkpoint; an array that is split is read in parts, each straight to its device."""
    expected = checkpoint.shapes(to_t5x(jax.eval_shape(trainer.init)))
    checkpoint.compare(expected, checkpoint.shapes(checkpoint.read_index(directory)))
    placed = {}
    for path, spec in trainer.specs.params.items():
        for name in (f'target/{path}', f'state/param_states/{path}/v'):
            if expected[name] == expected[f'target/{path}']:
                placed[name] = NamedSharding(trainer.mesh, spec)
    return from_t5x(trainer, checkpoint.restore(directory, shardings=placed))


def save(run: Run, state: TrainState, position: np.ndarray, interval: Interval) -> None:
    """Writes a checkpoint with all that a continuation needs: the state, the place in the data, the
    settings and the unfinished interval of metrics."""
    if jax.process_count() > 1:
        position = multihost_utils.process_allgather(position, tiled=True)
    array_file = io.BytesIO()
    np.save(array_file, position)
    metrics = jax.tree.map(float, jax.device_get(interval.metrics))
    files = {
        'data_position.npy': array_file.getvalue(),
        'interval.json': json.dumps({'metrics': metrics, 'crc32': interval.crc32}).encode(),
        'config.json': (run.workdir / 'config.json').read_bytes(),
    }
    checkpoint.save(run.workdir, int(state.step), to_t5x(state), files)


def train(run: Run) -> None:
    """Steps until config.train.steps; logs, saves and evaluates on the way, and says what came of it.

    Raises FloatingPointError, at most one logged interval later, when a loss or an update is not finite.
    """
    config, mesh, state, interval = run.config, run.trainer.mesh, run.state, run.interval
    first, total = int(state.step), config.train.steps
    report = Reporter(run.workdir, first)
    report.line(introduction(run))
    if first >= total:
        report.line(f'This run is finished: {first} steps of {total}.\n{next_lines(run)}')
        return
    evaluation = evaluate.Evaluation(
        config, mesh, run.trainer.specs.params, run.source, run.vocabulary
    )
    batches = data.Prefetch(run.stream)
    unseen: list[np.ndarray] = []  # positions of the batches whose metrics were not looked at yet
    clock, clock_step, waited = time.perf_counter(), first, 0.0
    for step in range(first + 1, total + 1):
        called = time.perf_counter()
        batch, before, position = next(batches)
        waited += time.perf_counter() - called
        state, metrics = run.trainer.train_step(state, partition.place_rows(mesh, batch))
        interval.metrics.append(metrics)
        interval.crc32 = zlib.crc32(data.batch_hash(batch).to_bytes(4), interval.crc32)
        unseen.append(before)
        log, save_now, evaluate_now = (
            step % config[section].every_steps == 0 or step == total
            for section in ('log', 'save', 'eval')
        )
        if log or save_now or evaluate_now:
            interval.metrics = jax.device_get(interval.metrics)
            check_finite(run, step, interval.metrics, unseen)
            unseen.clear()
        if log:
            seconds = time.perf_counter() - clock
            values = evaluate.summarize(
                interval.metrics, config.train.batch_size * config.data.lengths.targets
            )
            values |= step_metrics(config, interval.metrics)
            values |= timing(config, (step - clock_step) / seconds, waited / seconds)
            report.metrics('train', step, values | {'batch_crc32': interval.crc32})
            report.progress(step, total, values)
            interval = Interval()
            clock, clock_step, waited = time.perf_counter(), step, 0.0
        paused = time.perf_counter()
        if save_now:
            save(run, state, position, interval)
        if evaluate_now:
            values = evaluation(state.params)
            report.metrics(f'training_eval/{config.data.task}', step, values)
            report.line(f'Step {step:,}: {learned(values)}')
        clock += time.perf_counter() - paused
    batches.close()
    report.line(next_lines(run))
    report.close()


def check_finite(run: Run, step: int, metrics: list[dict], unseen: list[np.ndarray]) -> None:
    """Raises FloatingPointError for the first of the steps up to `step` that was not finite."""
    for ago, position in zip(range(len(unseen) - 1, -1, -1), unseen, strict=True):
        bad = metrics[len(metrics) - 1 - ago]
        if not bad['finite']:
            names = sorted(set(run.stream.describe(position)))
            raise FloatingPointError(
                f'step {step - ago}: loss {bad["loss"]:.6g}, gradient norm {bad["gradient_norm"]:.6g}: '
                f'not finite. The run stops; {run.workdir} keeps the checkpoints before it. Try a '
                f'smaller learning rate. Documents in the batch: {"; ".join(names)}'
            )


def step_metrics(config: Any, metrics: list[dict]) -> dict[str, float]:
    """T5X's remaining metrics of an interval, from each step's."""

    def mean(name: str) -> float:
        return float(np.mean([m[name] for m in metrics]))

    lengths, batch_size = config.data.lengths, config.train.batch_size
    encoder, decoder = mean('num_encoder_input_tokens'), mean('num_decoder_target_tokens')
    overall = (encoder + decoder) / (lengths.inputs + lengths.targets)
    return {
        'learning_rate': mean('learning_rate'),
        'learning_rate/current': float(metrics[-1]['learning_rate']),
        'weight_gradient_norm': mean('gradient_norm'),
        'non_padding_fraction/encoder_input_tokens': encoder / batch_size / lengths.inputs,
        'non_padding_fraction/decoder_target_tokens': decoder / batch_size / lengths.targets,
        'non_padding_fraction/overall': overall / batch_size,
    }


def timing(config: Any, steps_per_second: float, wait_fraction: float) -> dict[str, float]:
    """T5X's timing tags; tokens include padding."""
    sequences, lengths = config.train.batch_size * steps_per_second, config.data.lengths
    return {
        'timing/steps_per_second': steps_per_second,
        'timing/seqs_per_second': sequences,
        'timing/target_tokens_per_second': sequences * lengths.targets,
        'timing/tokens_per_second': sequences * (lengths.inputs + lengths.targets),
        'timing/data_wait_fraction': wait_fraction,
    }


def introduction(run: Run) -> str:
    state, mesh, config = run.state, run.trainer.mesh, run.config
    parameters = sum(x.size for x in state.params.values())
    start = (
        f'continuing after step {int(state.step):,}' if int(state.step) else 'starting from scratch'
    )
    return (
        f'T5 with {parameters:,} parameters, {config.model.dtype}, on {mesh.size} '
        f'{mesh.devices.flat[0].platform} device(s) ({dict(mesh.shape)})\n'
        f'Learning span corruption on {run.source}, {run.vocabulary.size:,} pieces\n'
        f'In {run.workdir}, {start}; compiling, the first line comes after '
        f'{config.log.every_steps} steps'
    )


def learned(values: dict[str, float]) -> str:
    loss_, bar = values['nats_per_text_token'], values['unigram_nats_per_text_token']
    verdict = f'{bar - loss_:.2f} below' if loss_ < bar else f'{loss_ - bar:.2f} above'
    return (
        f'validation loss {loss_:.3f} nats per text token, {verdict} the {bar:.3f} of word frequencies '
        f'alone (all targets: {values["nats_per_target_token"]:.3f}, frequencies alone '
        f'{values["unigram_nats_per_target_token"]:.3f})'
    )


def next_lines(run: Run) -> str:
    config_file = f'configs/{run.workdir.name}.py'
    return (
        f"All of it is in {run.workdir}: checkpoints in T5X's format, metrics.jsonl, TensorBoard events, "
        'the vocabulary.\n'
        f'Next, on your own text, one document a line: python main.py --config={config_file} '
        "--config.data.files='my/*.txt' --workdir=runs/mine"
    )


def model_info(trainer: Trainer, state: TrainState) -> str:
    """T5X's model-info.txt: every parameter, its shape and split, the count, the optimizer's state."""
    lines = [
        f'Variable {path:80} size {x.size:<12} shape {str(x.shape):40} '
        f'partition spec {tuple(trainer.specs.params[path])}'
        for path, x in sorted(state.params.items())
    ]
    lines += [f'Total number of parameters: {sum(x.size for x in state.params.values())}', '']
    lines += [
        f'Variable {path.removeprefix("state/"):80} size {x.size:<12} shape {x.shape}'
        for path, x in sorted(to_t5x(state).items())
        if path.startswith('state/')
    ]
    return '\n'.join(lines) + '\n'


class Reporter:
    """Where a run speaks: the terminal, metrics.jsonl and TensorBoard's event files; one process does.

    `metrics` receives every number of a run. To send them elsewhere (Weights & Biases), do it there.
    """

    def __init__(self, workdir: Path, first_step: int):
        self.workdir, self.first_step = workdir, first_step
        self.silent = jax.process_index() != 0
        self.terminal = sys.stdout.isatty()
        self.writers: dict[str, Any] = {}
        if self.silent:
            return
        file = workdir / 'metrics.jsonl'
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        # Steps after the checkpoint will be taken, and logged, again.
        kept = [
            line for line in lines if line.endswith('\n') and json.loads(line)['step'] <= first_step
        ]
        rewritten = file.with_suffix('.tmp')
        rewritten.write_text(''.join(kept))
        rewritten.replace(file)
        self.file = file.open('a')

    def metrics(self, name: str, step: int, values: dict[str, float]) -> None:
        """`name`: 'train', 'training_eval/TASK', ...; `values`: T5X's tag -> number, nats and seconds."""
        if self.silent:
            return
        self.file.write(json.dumps({'step': step, 'run': name} | values) + '\n')
        self.file.flush()
        if name not in self.writers:
            self.writers[name] = event_file_writer.EventFileWriter(str(self.workdir / name))
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self.writers[name].add_event(
                event_pb2.Event(step=self.first_step + 1, session_log=start)
            )
        summary = Summary(
            value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        )
        event = event_pb2.Event(step=step, wall_time=time.time(), summary=summary)
        self.writers[name].add_event(event)
        self.writers[name].flush()

    def progress(self, step: int, total: int, values: dict[str, float]) -> None:
        seconds = (total - step) / values['timing/steps_per_second']
        text = (
            f'step {step:,}/{total:,}  loss {values["nats_per_token"]:.3f}  '
            f'accuracy {values["accuracy"]:.3f}  learning rate {values["learning_rate/current"]:.3g}  '
            f'{values["timing/tokens_per_second"]:,.0f} tokens/s  {duration(seconds)} left'
        )
        if self.terminal:
            print(f'\r{text}\x1b[K', end='', flush=True)
        else:
            self.line(text)

    def line(self, text: str) -> None:
        if not self.silent:
            print(f'\r\x1b[K{text}' if self.terminal else text, flush=True)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours} h {minutes:02} min' if hours else f'{minutes} min {seconds:02} s'


def to_t5x(state: TrainState) -> dict[str, jax.Array]:
    """The state under the paths of a T5X checkpoint."""
    slots = optimizer.to_t5x(state.opt_state, state.params)
    return (
        {f'target/{path}': x for path, x in state.params.items()}
        | {f'state/param_states/{path}': x for path, x in slots.items()}
        | {'state/step': state.step}
    )


def from_t5x(trainer: Trainer, arrays: dict[str, Any]) -> TrainState:
    """Undoes to_t5x; the arrays are copied to where the trainer wants them."""

    def below(prefix: str) -> dict[str, Any]:
        return {p.removeprefix(prefix): x for p, x in arrays.items() if p.startswith(prefix)}

    step = np.asarray(
        arrays['state/step'], np.int32
    )  # each count gets its own copy: they are donated
    opt_state = jax.eval_shape(trainer.init).opt_state
    opt_state = optimizer.from_t5x(opt_state, below('state/param_states/'), step)
    state = TrainState(step, below('target/'), opt_state)
    return jax.device_put(state, partition.shardings(trainer.mesh, trainer.specs))
