"""How a run is prepared, from a config to a run that is ready for its next step. loop.py takes the steps."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict, FrozenConfigDict

import checkpoint
import data
import formats.open
import infer
import loop
import partition
import paths
import state_names
import tasks.open
import train
import validation
from configs import check as settings
from families import lora
from formats import best, own_model, t5x
from formats.vocabulary import kept_files
from messages import Refused
from randomness import digest
from run import checks, console, memory, results, start, task_metrics, workdir
from run.agreement import check_alike
from run.examples import changes_of_targets
from run.interval import Interval, NotFinite
from run.introduction import introduction
from run.lock import Lock, lock
from run.task_metrics import TaskMetrics
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
        loss_config=FrozenConfigDict(config.loss),
        optimizer_config=FrozenConfigDict(config.optimizer),
        learning_rate_config=FrozenConfigDict(config.learning_rate),
        mesh=partition.make_mesh(**config.mesh, devices=devices),
        seed=config.seed,
        batch_size=config.train.batch_size,
        feature_lengths=FrozenConfigDict(data.feature_lengths(config.data)),
        has_weights=bool(config.data.weight),
        num_microbatches=num_microbatches,
        gradient_dtype=config.train.gradient_dtype,
        skips_not_finite=config.train.on_not_finite == 'skip',
    )
    spec.model_config.family.check_mesh(spec.model_config, spec.mesh)
    partition.check_divides('train.batch_size', spec.batch_size, partition.BATCH_AXES, spec.mesh)
    # Some properties are parsed when first used: do it now.
    if spec.normalizing_factor == 'AVERAGE_PER_SEQUENCE' and spec.has_weights:
        raise Refused(
            'data.weight has no effect with loss.loss_normalizing_factor=AVERAGE_PER_SEQUENCE'
        )
    _ = spec.tx  # and its schedule
    checks.check_adapters(spec.model_config)
    if config.data.pack != 'no' and not model_config.family.may_pack:
        raise Refused(
            f"data.pack={config.data.pack!r}: model.module={model_config.module!r} needs 'no'"
        )
    checks.check_scan(spec.model_config)
    _ = spec.trained
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

    Restores the workdir's newest valid checkpoint if there is one. Raises Refused or OSError, before
    anything is compiled, for invalid settings, files and folders.
    """
    spec = make_spec(config)
    best.check_settings(config)
    folder = paths.to_path(folder)
    checks.check_is_run(folder)
    terminal = console.Console()
    with terminal.working('Reading the text'):
        text = open_text(config)
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(lock_workdir(folder))
        checks.check_shared(folder)
        lines = best.read_metrics(folder)
        with terminal.working('Verifying the newest checkpoint'):
            begin = start.find_start(config, folder, wanted(spec), lines, terminal.line)
        config = start.with_last_step(config, folder, begin)
        lines = [line for line in lines if begin.is_resumed and line['step'] <= begin.step]
        saver = checkpoint.Saver(  # removes unfinished saves, which may fill the disk
            folder,
            config.save.dtype,
            lambda: workdir.prune(folder, config.save, metrics.history(config.save).rank),
        )
        with terminal.working('Preparing the vocabulary'):
            texts = training_texts(text.training)
            vocabulary = find_or_train_vocabulary(
                config.data, folder, texts, config.model.vocab_size, begin.vocabulary_model
            )
        resolved = resolve_settings(config, spec, text.training, vocabulary, begin, folder)
        with terminal.working('Opening the text'):
            open_split = functools.partial(open_stream, config, spec, vocabulary)
            training = open_split(text.training, 'train', config.train.epochs or None)
            held_out = open_split(text.held_out, 'validation', num_epochs=1)
        introduce(terminal, config, spec, training, begin)
        answered = task_metrics.read_tasks(
            terminal, text.answered, vocabulary, config.data, config.infer_eval, config.decode
        )
        if config.save.best_metric:
            task_metrics.check_best_metric(config.save.best_metric, held_out, answered)
        end = end_of(config, begin, lines)
        planned, state = compile_and_restore(config, spec, begin, folder, end, terminal)
        progress = SavedProgress()
        if begin.is_resumed:
            progress = seek(training, folder / f'checkpoint_{begin.step}')
        resolved['train']['num_microbatches'] = planned.num_microbatches
        files = write_files(folder, resolved, spec, vocabulary)
        metrics = workdir.Metrics(folder, lines, text.training.corpus)
        kept = workdir.Workdir(folder, held, metrics, saver, files)
        losses = validation.open_evaluations(
            config.eval,
            spec.loss_config,
            spec.model_config,
            spec.mesh,
            training,
            held_out,
            planned.num_microbatches,
            report=terminal.validation_losses,
        )
        t5 = answering_model(spec, vocabulary)
        answers = [TaskMetrics(task, spec.model_config, t5, folder, terminal) for task in answered]
        stack.pop_all()  # the run keeps its lock
    return loop.Run(
        config=config,
        workdir=kept,
        console=terminal,
        stream=training,
        evaluations=[*losses, *answers],
        spec=spec,
        train_step=planned.step,
        not_finite=NotFinite(config.train, folder, begin.step, progress.num_not_finite),
        step=begin.step,
        state=state,
        interval=Interval(progress.interval),
        end=end,
    )


class Text(NamedTuple):
    """The open tasks of a run."""

    training: OpenMixture
    held_out: OpenMixture  # with the tasks that are evaluated alone
    answered: list[OpenTask]  # tasks with metrics of answers


def open_text(config: ConfigDict) -> Text:
    mixture = tasks.open.open_mixture(config.data)
    evaluated_alone = tasks.open.open_evaluated_alone(config.data, mixture)
    answered = []
    if config.infer_eval.every_steps:
        answered = task_metrics.open_tasks(config.data, config.infer_eval, config.decode)
    held_out = dataclasses.replace(mixture, tasks=(*mixture.tasks, *evaluated_alone))
    checks.check_mixture(mixture, held_out, config.train.epochs)
    return Text(mixture, held_out, answered)


def lock_workdir(folder: paths.AnyPath) -> Lock:
    remedy = (
        'stop that run, or name another --workdir; if this process has prepared it before, train '
        'that run, or close its workdir.lock'
    )
    return lock(folder / 'lock', str(folder), remedy, jax.process_index() == 0)


def resolve_settings(
    config: ConfigDict,
    spec: train.StepSpec,
    mixture: OpenMixture,
    vocabulary: Vocabulary,
    begin: start.Start,
    folder: paths.AnyPath,
) -> dict:
    """Return the content of config.json: the settings, and the values that they stand for.

    Raises Refused if they are not those of the run that is resumed.
    """
    text = digest([mixture.fingerprint, vocabulary.hash, *spec.model_config.family.files])
    check_alike('the text, the vocabulary or the file of model.module', text.encode())
    resolved = json.loads(config.to_json())
    resolved['model']['module'] = spec.model_config.module
    resolved['model']['options'] = own_model.as_dict(spec.model_config.options)
    resolved['corpus'] = mixture.corpus
    resolved['data_fingerprint'] = mixture.fingerprint
    resolved['vocabulary_hash'] = vocabulary.hash
    if begin.base:
        resolved['base'] = begin.base
    if begin.is_resumed:
        directory = folder / f'checkpoint_{begin.step}'
        own_model.check_same(directory, spec.model_config, otherwise='name another --workdir')
        options = own_model.default_options(spec.model_config)
        checks.compare_settings(directory, resolved, options, mixture)
        formats.open.compare(wanted(spec).shapes, checkpoint.shapes(begin.leaves))
    results.Results(folder).scores()  # raises Refused for a damaged file
    return resolved


def open_stream(
    config: ConfigDict,
    spec: train.StepSpec,
    vocabulary: Vocabulary,
    mixture: OpenMixture,
    split: str,
    num_epochs: int | None,
) -> Stream:
    """Return the batches of a split, with this process's rows."""
    sharding = NamedSharding(spec.mesh, partition.BATCH)
    parts = sharding.addressable_devices_indices_map((spec.batch_size,)).values()
    rows = np.concatenate([np.arange(spec.batch_size)[part] for part in parts])
    return Stream(
        mixture,
        split,
        vocabulary,
        config.data,
        batch_size=spec.batch_size,
        seed=config.seed,
        rows=range(rows.min(), rows.max() + 1),
        num_epochs=num_epochs,
    )


def introduce(
    terminal: console.Console,
    config: ConfigDict,
    spec: train.StepSpec,
    training: Stream,
    begin: start.Start,
) -> None:
    """Describe the model, the devices and the data."""
    has_task_metrics = config.infer_eval.every_steps > 0
    lines = introduction(training, spec.model_config, spec.trained, spec.mesh, has_task_metrics)
    if not begin.is_resumed:
        with terminal.working('Reading the first targets'):
            lines += changes_of_targets(training.tasks)
    for line in lines:
        terminal.line(line)


def end_of(config: ConfigDict, begin: start.Start, lines: Sequence[Mapping]) -> loop.End | None:
    """Return why a run takes no more steps, if it does not. `lines`: of metrics.jsonl."""
    if begin.is_resumed and begin.step >= config.train.steps:
        return loop.End.STEPS
    if best.history(config.save, lines).ends(config.train.early_stopping):
        return loop.End.EARLY_STOPPING
    return None


def compile_and_restore(
    config: ConfigDict,
    spec: train.StepSpec,
    begin: start.Start,
    folder: paths.AnyPath,
    end: loop.End | None,
    terminal: console.Console,
) -> tuple[memory.Plan, train.TrainState[jax.Array]]:
    """Return the compiled step, none for a finished run, and the state before it."""
    planned = memory.Plan(step=None, num_microbatches=1, note='')
    if end is None:
        offset = config.optimizer.step_offset
        if offset > begin.step:  # T5X's formula has no value there
            raise Refused(f'optimizer.step_offset={offset}: use {begin.step}, the first step')
        saved = train.saved_tree(spec, spec.state_shapes)
        checks.check_saving(folder, memory.num_state_bytes(saved))
        terminal.line(
            f'{begin.description}; compiling, then a line every {config.log.every_steps} steps.'
        )
        memory.check_state_fits(spec.mesh, spec.state_shapes, spec.state_specs)
        began = time.monotonic()
        with terminal.working('Compiling'), futures.ThreadPoolExecutor(1) as thread:
            if not begin.leaves:  # in parallel: both take about as long
                initialize = thread.submit(train.compile_init, spec)
            planned = fit_step(config, spec)
        if planned.note:
            terminal.line(planned.note)
        terminal.line(f'Compiled in {time.monotonic() - began:.1f} s.')
    with terminal.working('Restoring' if begin.leaves else 'Initializing'):
        if not begin.leaves:
            return planned, initialize.result()()
        dtype = '' if begin.is_resumed else config.restore.dtype
        return planned, restore(spec, begin.leaves, dtype)


class SavedProgress(NamedTuple):
    """What loop.save keeps of a run beside its state."""

    interval: Sequence[dict[str, float]] = ()  # metrics of the steps since the last logged one
    num_not_finite: int = 0  # steps skipped


def seek(training: Stream, directory: paths.AnyPath) -> SavedProgress:
    """Continue a stream at the position that a checkpoint keeps; return the rest of its progress."""
    positions = np.load(io.BytesIO((directory / 'data_position.npy').read_bytes()))
    training.seek(positions[training.rows])
    if jax.process_index() == 0:  # counts are summed over processes
        num_examples = json.loads((directory / 'data_counts.json').read_bytes())
        training.counts[:] = [num_examples[task.name] for task in training.tasks]
    interval = json.loads((directory / 'interval.json').read_bytes())
    return SavedProgress(interval, json.loads((directory / 'not_finite.json').read_bytes()))


def write_files(
    folder: paths.AnyPath, resolved: Mapping, spec: train.StepSpec, vocabulary: Vocabulary
) -> dict[str, bytes]:
    """Write the files of a run; return those that each checkpoint keeps."""
    # config.json comes first: it marks the folder as a run.
    files = {'config.json': json.dumps(resolved, indent=1).encode(), **kept_files(vocabulary)}
    if jax.process_index() == 0:
        shapes = state_names.to_t5x(*spec.state_shapes)
        info = workdir.model_info(shapes, state_names.to_t5x(*spec.state_specs), spec.trained)
        for name, content in {**files, 'model-info.txt': info.encode()}.items():
            paths.replace_file(folder / name, content)
    return files | own_model.files_of(spec.model_config)


def answering_model(spec: train.StepSpec, vocabulary: Vocabulary) -> infer.T5:
    """Return the model, without adapters, that answers with parameters given later."""
    base = lora.without_adapters(spec.model_config)
    merge = functools.partial(lora.merge, spec.model_config)
    params = jax.eval_shape(merge, spec.state_shapes.params)
    return infer.T5(base, params, spec.mesh, vocabulary)


def wanted(spec: train.StepSpec) -> start.Wanted:
    """Return the contents that a checkpoint needs for a run to start from it."""
    shapes = checkpoint.shapes(state_names.to_t5x(*spec.state_shapes))
    return start.Wanted(spec.model_config, shapes, spec.trained)


def restore(
    spec: train.StepSpec, leaves: Mapping[str, checkpoint.Leaf], dtype: str = ''
) -> train.TrainState[jax.Array]:
    """Return the state in `leaves` of a checkpoint's index, with initial values for the rest."""
    shardings = {}
    for path, array_spec in state_names.to_t5x(*spec.state_specs).items():
        if not isinstance(array_spec, P):
            array_spec = P()  # a slot that this optimizer does not use
        shardings[path] = partition.shardings(spec.mesh, array_spec)
    split = {path: sharding for path, sharding in shardings.items() if sharding.spec != P()}
    arrays = checkpoint.restore(leaves, split, dtype)
    averages = t5x.average_paths(shardings)

    # Compute the missing initial arrays; XLA computes no others.
    missing = {}
    for path, sharding in shardings.items():
        if path not in arrays and path not in averages:
            missing[path] = sharding

    def initial_arrays():
        tree = state_names.to_t5x(*train.init(spec))
        return {path: tree[path] for path in missing}

    if missing:
        arrays |= jax.jit(initial_arrays, out_shardings=missing)()
    for average, parameter in averages.items():
        if average not in arrays:
            arrays[average] = arrays[parameter].copy()

    state = train.TrainState(*state_names.from_t5x(arrays, spec.state_shapes.opt_state))
    state = jax.tree.map(lambda x, like: x.astype(like.dtype), state, spec.state_shapes)
    return jax.device_put(state, partition.shardings(spec.mesh, spec.state_specs))
