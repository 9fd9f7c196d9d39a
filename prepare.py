"""Prepare a run: turn a config into a run that is ready for its next step. loop.py takes the steps."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from concurrent import futures
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict, FrozenConfigDict

import checkpoint
import formats.open
import loop
import partition
import paths
import state_names
import tasks.names
import tasks.open
import train
import validation
from configs import check as settings
from formats import best, own_loss, own_model, t5x
from formats.vocabulary import kept_files
from messages import Refused
from randomness import digest
from run import checks, console, memory, start, task_metrics, workdir
from run.agreement import check_alike, gather
from run.interval import Clock, Interval, Skips, logged_seconds, recent_steps
from run.introduction import introduce
from run.train_vocabulary import find_or_train_vocabulary, training_texts
from stream import OpenMixture, OpenTask, Stream
from vocabulary import Vocabulary


def make_spec(
    config: ConfigDict, num_microbatches: int = 1, devices: list | None = None
) -> train.StepSpec:
    """Return the spec of a config, on a mesh of `devices`, by default all. Refuse settings that do not fit together."""
    settings.check(config)
    model_config = own_model.load(config.model)
    spec = train.StepSpec(
        model_config=model_config,
        loss_config=own_loss.load(config.loss),
        optimizer_config=FrozenConfigDict(config.optimizer),
        learning_rate_config=FrozenConfigDict(config.learning_rate),
        mesh=partition.make_mesh(**config.mesh, devices=devices),
        seed=config.seed,
        batch_size=config.train.batch_size,
        features=FrozenConfigDict(tasks.names.features(config.data)),
        num_microbatches=num_microbatches,
        gradient_dtype=config.train.gradient_dtype,
        skips_not_finite=config.train.on_not_finite == 'skip',
        spike_window=config.train.spike_window * (config.train.on_spike == 'skip'),
        spike_sigma=config.train.spike_sigma,
        frozen_dtype=config.restore.frozen_dtype or 'float32',
    )
    spec.model_config.family.check_mesh(spec.model_config, spec.mesh)
    partition.check_divides('train.batch_size', spec.batch_size, partition.BATCH_AXES, spec.mesh)
    # Some properties are parsed on first use: use them now.
    if spec.normalizing_factor == 'AVERAGE_PER_SEQUENCE' and config.data.weight:
        raise Refused(
            'data.weight has no effect with loss.loss_normalizing_factor=AVERAGE_PER_SEQUENCE'
        )
    _ = spec.tx  # and its schedule
    checks.check_adapters(spec.model_config)
    if 'decoder_segment_ids' in spec.features and not model_config.family.may_pack:
        raise Refused(
            f"data.pack={config.data.pack!r}: model.module={model_config.module!r} needs 'no'"
        )
    checks.check_scan(spec.model_config)
    if len(spec.trained) == len(spec.state_shapes.params) and config.restore.frozen_dtype:
        raise Refused(
            f'restore.frozen_dtype={spec.frozen_dtype!r} has no effect without frozen parameters: also set '
            'optimizer.trainable or model.lora_rank'
        )
    memory.microbatch_counts(config.train.num_microbatches, spec.rows_per_device)
    return spec


def fit_step(config: ConfigDict, spec: train.StepSpec) -> memory.Plan:
    """Compile the step in as few microbatches as fit. Raises Refused if none fits."""
    return memory.fit_step(
        lambda n: train.compile_step(dataclasses.replace(spec, num_microbatches=n)),
        num_rows=spec.rows_per_device,
        requested=config.train.num_microbatches,
        mesh=spec.mesh,
        state_bytes=memory.num_state_bytes(spec.state_shapes),
    )


def prepare(config: ConfigDict, folder: str | os.PathLike) -> loop.Run:
    """Return a run in the workdir `folder` that is ready for its next step, or finished.

    The order: spec, text, start, vocabulary, streams, step, state, files, evaluations. Restores the newest valid
    checkpoint if there is one. Raises Refused or OSError, before anything is compiled, for invalid settings and files.
    """
    clock = Clock()
    spec = make_spec(config)
    periods = {'eval': config.eval.every_steps, 'infer_eval': config.infer_eval.every_steps}
    best.check_settings(config.save, config.train.early_stopping, periods)
    folder = paths.to_path(folder)
    checks.check_is_run(folder)
    terminal = console.Console()
    with terminal.working('Reading the text'):
        text = open_text(config)
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(workdir.lock_folder(folder))
        checks.check_shared(folder)
        lines = best.read_metrics(folder)
        needs = wanted(spec)
        with terminal.working('Verifying the newest checkpoint'):
            begin = start.find_start(
                folder, needs, config.restore, config.data, lines, terminal.line
            )
        config = config.copy_and_resolve_references()
        config.train.steps = start.last_step(begin, config.train)
        old_lines = lines
        lines = [line for line in lines if begin.is_resumed and line['step'] <= begin.step]
        clock.add({'lost after stops': logged_seconds(old_lines) - logged_seconds(lines)})
        end = start.end_of(begin, config.train, best.history(config.save, lines))
        # Removes unfinished saves, which may fill the disk.
        saver = checkpoint.Saver(folder, config.save.dtype, prune=lambda: run_folder.prune())
        with terminal.working('Preparing the vocabulary'):
            vocabulary = find_or_train_vocabulary(
                config.data,
                folder,
                training_texts(text.training),
                config.model.vocab_size,
                begin.vocabulary_model,
            )
        # The model's family may have other special ids.
        vocabulary.ends = spec.model_config.family.ends(spec.model_config, vocabulary.ends)
        content = resolve_settings(config, spec, text.training, vocabulary, begin, needs.shapes)
        with terminal.working('Opening the text'):
            training, held_out = open_streams(config, spec, vocabulary, text)
        introduce(
            terminal, training, spec.model_config, spec.trained, spec.mesh, text.answered, begin
        )
        answered = task_metrics.read_tasks(
            terminal, text.answered, vocabulary, config.data, config.infer_eval, config.decode
        )
        if config.save.best_metric:
            task_metrics.check_best_metric(
                config.save.best_metric, held_out, answered, spec.loss_config
            )
        plan, state = compile_and_restore(config, spec, begin, folder, end, terminal, clock)
        progress = workdir.read_progress(begin.directory, training)
        clock.add(progress.seconds)
        if state.recent is not None:
            state = state._replace(recent=recent_steps(progress.recent, state.recent))
        content['train']['num_microbatches'] = plan.num_microbatches
        files = write_files(folder, content, spec, vocabulary)
        metrics = workdir.Metrics(folder, lines, text.training.corpus, config.save)
        run_folder = workdir.Workdir(folder, lock, metrics, saver, files)
        losses = validation.open_evaluations(
            config.eval,
            spec.loss_config,
            spec.model_config,
            spec.mesh,
            training,
            held_out,
            plan.num_microbatches,
            gather=gather,
            report=terminal.validation_losses,
        )
        answers = task_metrics.of_run(answered, spec.model_config, spec.mesh, folder, terminal)
        stack.pop_all()  # the run keeps its lock
    return loop.Run(
        train=config.train,
        log_every_steps=config.log.every_steps,
        save_every_steps=config.save.every_steps,
        workdir=run_folder,
        console=terminal,
        stream=training,
        evaluations=[*losses, *answers],
        spec=spec,
        train_step=plan.step,
        skips=Skips(config.train, folder, begin.step, progress.num_not_finite),
        step=begin.step,
        state=state,
        interval=Interval(progress.interval),
        end=end,
        clock=clock,
    )


class Text(NamedTuple):
    """The open tasks of a run."""

    training: OpenMixture
    held_out: OpenMixture  # with the tasks that are evaluated alone
    answered: list[OpenTask]  # tasks with metrics of answers


def open_text(config: ConfigDict) -> Text:
    mixture = tasks.open.open_mixture(config.data)
    evaluated_alone = tasks.open.open_evaluated_alone(config.data, mixture)
    held_out = dataclasses.replace(mixture, tasks=(*mixture.tasks, *evaluated_alone))
    answered = []
    if config.infer_eval.every_steps:
        answered = task_metrics.open_tasks(config.data, config.infer_eval, config.decode)
    checks.check_mixture(mixture, held_out, config.train.epochs)
    return Text(mixture, held_out, answered)


def resolve_settings(
    config: ConfigDict,
    spec: train.StepSpec,
    mixture: OpenMixture,
    vocabulary: Vocabulary,
    begin: start.Start,
    shapes: checkpoint.Shapes,
) -> dict:
    """Return the content of config.json: the settings, and the values that they stand for.

    Raises Refused if these, or the `shapes` of the state, differ from the resumed run's.
    """
    files = [*spec.model_config.family.files, spec.loss_config.content]
    text = digest([mixture.fingerprint, vocabulary.hash, *files])
    check_alike('the text, the vocabulary or a file of model or loss', text.encode())
    content = json.loads(config.to_json())
    content['model']['module'] = spec.model_config.module
    content['model']['options'] = own_model.as_dict(spec.model_config.options)
    content['loss'] |= own_loss.resolved(spec.loss_config)
    content['corpus'] = mixture.corpus
    content['data_fingerprint'] = mixture.fingerprint
    content['vocabulary_hash'] = vocabulary.hash
    if begin.base:
        content['base'] = begin.base
    if begin.directory is not None:
        otherwise = 'name another --workdir'
        own_model.check_same(begin.directory, spec.model_config, otherwise)
        own_loss.check_same(begin.directory, spec.loss_config)
        options = own_loss.default_options(spec.model_config, spec.loss_config)
        checks.compare_settings(begin.directory, content, options, mixture)
        formats.open.compare(shapes, checkpoint.shapes(begin.leaves))
    return content


def open_streams(
    config: ConfigDict, spec: train.StepSpec, vocabulary: Vocabulary, text: Text
) -> tuple[Stream, Stream]:
    """Return the streams for training and for validation, with this process's rows."""
    sharding = NamedSharding(spec.mesh, partition.BATCH)
    parts = sharding.addressable_devices_indices_map((spec.batch_size,)).values()
    rows = np.concatenate([np.arange(spec.batch_size)[part] for part in parts])
    training = Stream(
        text.training,
        'train',
        vocabulary,
        config.data,
        batch_size=spec.batch_size,
        seed=spec.seed,
        rows=range(rows.min(), rows.max() + 1),
        num_epochs=config.train.epochs or None,
        **tasks.names.own_features(config.data)._asdict(),
    )
    held_out = dataclasses.replace(
        training, mixture=text.held_out, split='validation', num_epochs=1
    )
    return training, held_out


def compile_and_restore(
    config: ConfigDict,
    spec: train.StepSpec,
    begin: start.Start,
    folder: paths.AnyPath,
    end: loop.End | None,
    terminal: console.Console,
    clock: Clock,
) -> tuple[memory.Plan, train.TrainState[jax.Array]]:
    """Return the compiled step (None for a finished run) and the state before it."""
    plan = memory.Plan(step=None, num_microbatches=1, note='')
    if end is None:
        offset = config.optimizer.step_offset
        if offset > begin.step:  # T5X's formula is undefined there
            raise Refused(f'optimizer.step_offset={offset}: use {begin.step}, the first step')
        tree = train.saved_tree(spec, spec.state_shapes)
        checks.check_saving(folder, memory.num_state_bytes(tree))
        terminal.line(
            f'{begin.description}; compiling, then a line every {config.log.every_steps} steps.'
        )
        memory.check_state_fits(spec.mesh, spec.state_shapes, spec.state_specs)
        working = terminal.working('Compiling')
        with clock.doing('compiling'), working, futures.ThreadPoolExecutor(1) as thread:
            if not begin.leaves:  # in parallel: both take about as long
                initialize = thread.submit(train.compile_init, spec)
            plan = fit_step(config, spec)
        if plan.note:
            terminal.line(plan.note)
        terminal.line(f'Compiled in {clock.totals["compiling"]:.1f} s.')
    with terminal.working('Restoring' if begin.leaves else 'Initializing'):
        if not begin.leaves:
            return plan, initialize.result()()
        dtype = '' if begin.is_resumed else config.restore.dtype
        return plan, restore(spec, begin.leaves, dtype)


def write_files(
    folder: paths.AnyPath, config_json: Mapping, spec: train.StepSpec, vocabulary: Vocabulary
) -> dict[str, bytes]:
    """Write the files of a run; return the files that each checkpoint gets."""
    # config.json comes first: it marks the folder as a run.
    files = {'config.json': json.dumps(config_json, indent=1).encode(), **kept_files(vocabulary)}
    files |= own_model.files_of(spec.model_config) | own_loss.files_of(spec.loss_config)
    if jax.process_index() == 0:
        shapes = state_names.to_t5x(*spec.state_shapes)
        info = workdir.model_info(shapes, state_names.to_t5x(*spec.state_specs), spec.trained)
        for name, content in {**files, 'model-info.txt': info.encode()}.items():
            paths.replace_file(folder / name, content)
    return files


def wanted(spec: train.StepSpec) -> start.Wanted:
    """Return the requirements for a checkpoint from which the run can start."""
    shapes = checkpoint.shapes(state_names.to_t5x(*spec.state_shapes))
    factor = spec.loss_config.loss_normalizing_factor
    return start.Wanted(spec.model_config, shapes, spec.trained, factor, spec.seed)


def restore(
    spec: train.StepSpec, leaves: Mapping[str, checkpoint.Leaf], dtype: str = ''
) -> train.TrainState[jax.Array]:
    """Return the state in `leaves` of a checkpoint's index, with initial values for other arrays."""
    shardings = {}
    for path, array_spec in state_names.to_t5x(*spec.state_specs).items():
        if not isinstance(array_spec, P):
            array_spec = P()  # a slot that this optimizer does not use
        shardings[path] = partition.shardings(spec.mesh, array_spec)
    split = {path: sharding for path, sharding in shardings.items() if sharding.spec != P()}
    # Round a frozen base as it is read: it may not fit in float32.
    shapes = state_names.to_t5x(*spec.state_shapes)
    narrow = {path: leaf for path, leaf in leaves.items() if shapes[path].dtype == 'bfloat16'}
    others = {path: leaf for path, leaf in leaves.items() if path not in narrow}
    arrays = checkpoint.restore(narrow, split, 'bfloat16')
    arrays |= checkpoint.restore(others, split, dtype)
    averages = t5x.average_paths(shardings)

    # Compute the initial arrays that are missing; XLA computes no others.
    new_shardings = dict(shardings)
    for path in (*arrays, *averages):
        new_shardings.pop(path, None)

    def initial_arrays():
        tree = state_names.to_t5x(*train.init(spec))
        return {path: tree[path] for path in new_shardings}

    if new_shardings:
        arrays |= jax.jit(initial_arrays, out_shardings=new_shardings)()
    for average, parameter in averages.items():
        if average not in arrays:
            arrays[average] = arrays[parameter].copy()

    recent = jax.tree.map(lambda x: np.full(x.shape, np.inf), spec.state_shapes.recent)
    tree = state_names.from_t5x(arrays, spec.state_shapes.opt_state)
    state = train.TrainState(*tree, recent)
    state = jax.tree.map(lambda x, like: x.astype(like.dtype), state, spec.state_shapes)
    return jax.device_put(state, partition.shardings(spec.mesh, spec.state_specs))
