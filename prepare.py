"""How a run is prepared, from a config to a run that is ready for its next step. train.py takes the steps."""

import contextlib
import dataclasses
import functools
import io
import json
import os
import time
from collections.abc import Mapping
from concurrent import futures

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict, FrozenConfigDict

import checkpoint
import data
import infer
import partition
import paths
import state_names
import tasks.open
import train
import validation
from configs import check as settings
from families import lora
from formats import best, own_model, own_options, t5x
from messages import Refused, first_ten
from randomness import digest
from run import checks, console, memory, results, start, task_metrics, workdir
from run.agreement import check_alike
from run.examples import changes_of_targets
from run.interval import NotFinite
from run.introduction import introduction
from run.lock import lock
from run.task_metrics import TaskMetrics
from run.train_vocabulary import find_or_train_vocabulary, training_texts
from stream import Stream


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
    checks.check_packing(spec.model_config, config.data.pack)
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


def prepare(config: ConfigDict, folder: str | os.PathLike) -> train.ReadyRun | train.FinishedRun:
    """Return a run in the workdir `folder` that is ready for its next step, or finished.

    Restores the workdir's newest valid checkpoint if there is one. Raises Refused or OSError, before
    anything is compiled, for invalid settings, files and folders.
    """
    # The settings.
    settings.check(config)
    best.check_settings(config)
    tasks.open.find(config.data)
    folder = paths.to_path(folder, may_be_new=True)
    checks.check_is_run(folder)
    terminal = console.Console()
    spec = make_spec(config)

    # The text.
    with terminal.working('Reading the text'):
        mixture = tasks.open.open_mixture(config.data)
        evaluated_alone = tasks.open.open_evaluated_alone(config.data, mixture)
        evaluated_tasks = []
        if config.infer_eval.every_steps:
            evaluated_tasks = task_metrics.open_tasks(config, config.infer_eval.split)
    checks.check_mixture(config, mixture)

    with contextlib.ExitStack() as stack:
        # The workdir, and the checkpoint to start from.
        folder.mkdir(parents=True, exist_ok=True)
        remedy = (
            'stop that run, or name another --workdir; if this process has prepared it before, train '
            'that run, or close its workdir.lock'
        )
        held = stack.enter_context(
            lock(folder / 'lock', str(folder), remedy, jax.process_index() == 0)
        )
        checks.check_shared(folder)
        lines = best.read_metrics(folder)
        with terminal.working('Verifying the newest checkpoint'):
            begin = start.find_start(config, folder, wanted(spec), lines, terminal.line)
        # Removes unfinished saves, which may fill the disk, before anything is written.
        # Differs from T5X's SaveBestCheckpointer, which by default also keeps checkpoints without a
        # value. Here a stop between two evaluations does not change which checkpoints a run leaves.
        saver = checkpoint.Saver(
            folder,
            keep=config.save.keep,
            keep_every=config.save.keep_every,
            dtype=config.save.dtype,
            rank=lambda step: metrics.history(config.save).rank(step),
        )
        directory = folder / f'checkpoint_{begin.step}'  # if the run resumes
        num_logged = begin.step if begin.is_resumed else 0
        kept_lines = [line for line in lines if line['step'] <= num_logged]
        config = start.with_last_step(config, folder, begin)

        # The vocabulary: the run's own, that of its starting checkpoint, or a new one.
        with terminal.working('Preparing the vocabulary'):
            vocabulary = find_or_train_vocabulary(
                config.data,
                folder,
                texts=training_texts(mixture),
                max_size=config.model.vocab_size,
                model=begin.vocabulary_model,
            )

        text = digest([mixture.fingerprint, vocabulary.hash, *spec.model_config.family.files])
        check_alike('the text, the vocabulary or the file of model.module', text.encode())

        # The content of config.json: the settings, and the values that they stand for.
        resolved = json.loads(config.to_json())
        resolved['model']['module'] = spec.model_config.module
        resolved['model']['options'] = own_options.as_dict(spec.model_config.options)
        resolved['corpus'] = mixture.corpus
        resolved['data_fingerprint'] = mixture.fingerprint
        resolved['vocabulary_hash'] = vocabulary.hash
        if begin.base:
            resolved['base'] = begin.base
        if begin.is_resumed:
            own_model.check_same(directory, spec.model_config, otherwise='name another --workdir')
            options = own_options.default_options(spec.model_config)
            checks.compare_settings(directory, resolved, options, mixture)
            start.choose(begin.leaves, wanted(spec).shapes)
        results.Results(folder).scores()  # raises Refused for a damaged file

        # This process's rows of the batches: training in epochs or without end, validation once.
        batch_size = config.train.batch_size
        sharding = NamedSharding(spec.mesh, partition.BATCH)
        parts = sharding.addressable_devices_indices_map((batch_size,)).values()
        rows = np.concatenate([np.arange(batch_size)[part] for part in parts])
        with terminal.working('Opening the text'):
            open_stream = functools.partial(
                Stream,
                vocabulary=vocabulary,
                config=config.data,
                batch_size=batch_size,
                seed=config.seed,
                rows=range(rows.min(), rows.max() + 1),
            )
            training = open_stream(mixture, 'train', num_epochs=config.train.epochs or None)
            evaluated = dataclasses.replace(mixture, tasks=(*mixture.tasks, *evaluated_alone))
            held_out = open_stream(evaluated, 'validation', num_epochs=1)

        # Describe the model, the devices and the data.
        for line in introduction(
            config.data,
            spec.model_config,
            spec.state_shapes.params,
            spec.trained,
            spec.mesh,
            mixture,
            held_out,
        ):
            terminal.line(line)

        with_metrics = [task.name for task in held_out.tasks if task.task.metric_fns]
        if with_metrics and not config.infer_eval.every_steps:
            names = first_ten(with_metrics)
            terminal.line(
                f'infer_eval.every_steps=0: no metrics of {names}; --mode=evaluate gives them later.'
            )

        # The examples of task metrics, and whether train.early_stopping has ended the run.
        with terminal.working('Reading the examples of task metrics'):
            read_tasks = task_metrics.read_tasks(
                config, config.infer_eval.split, vocabulary, evaluated_tasks, terminal.line
            )
        with terminal.working('Reading the first targets'):
            for line in changes_of_targets(training.tasks):
                terminal.line(line)
        if config.save.best_metric:
            task_metrics.check_best_metric(config, held_out, read_tasks)

        # The compiled step, unless the run is finished.
        end = None
        planned = memory.Plan(step=None, num_microbatches=1, note='')
        if begin.is_resumed and begin.step >= config.train.steps:
            end = train.End.STEPS
        elif best.history(config.save, kept_lines).ends(config.train.early_stopping):
            end = train.End.EARLY_STOPPING
        else:
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

        # The state, the position in the data, and the metrics since the last logged step.
        with terminal.working('Restoring' if begin.leaves else 'Initializing'):
            if begin.leaves:
                dtype = '' if begin.is_resumed else config.restore.dtype
                state = restore(spec, begin.leaves, dtype)
            else:
                state = initialize.result()()
        interval = []
        num_not_finite = 0
        if begin.is_resumed:
            num_not_finite = json.loads((directory / 'not_finite.json').read_bytes())
            positions = np.load(io.BytesIO((directory / 'data_position.npy').read_bytes()))
            training.seek(positions[training.rows])
            if jax.process_index() == 0:  # counts are summed over processes
                num_examples = json.loads((directory / 'data_counts.json').read_bytes())
                training.counts[:] = [num_examples[task.name] for task in training.tasks]
            interval = json.loads((directory / 'interval.json').read_bytes())
            # A run started from restore.path may not have logged yet.
            may_be_unlogged = config.restore.path and (folder / 'metrics.jsonl').exists()
            gap = checks.missing_lines(lines, directory, len(interval), may_be_unlogged)
            if gap:
                terminal.line(gap)

        # The files of the run. config.json comes first: it marks the folder as a run.
        resolved['train']['num_microbatches'] = planned.num_microbatches
        config_json = json.dumps(resolved, indent=1).encode()
        if jax.process_index() == 0:
            paths.replace_file(folder / 'config.json', config_json)
            if vocabulary.model:
                paths.replace_file(folder / 'vocabulary.model', vocabulary.model)
            shapes = state_names.to_t5x(*spec.state_shapes)
            info = workdir.model_info(shapes, state_names.to_t5x(*spec.state_specs), spec.trained)
            paths.replace_file(folder / 'model-info.txt', info.encode())
        files = {'config.json': config_json, **own_model.files_of(spec.model_config)}
        if vocabulary.model:
            files['vocabulary.model'] = vocabulary.model
        base = lora.without_adapters(spec.model_config)
        merge = functools.partial(lora.merge, spec.model_config)
        base_params = jax.eval_shape(merge, spec.state_shapes.params)
        t5 = infer.T5(base, base_params, spec.mesh, vocabulary)
        metrics = workdir.Metrics(folder, kept_lines, mixture.corpus)
        evaluations: list[train.Evaluation] = [
            *validation.open_evaluations(
                config,
                spec.model_config,
                spec.mesh,
                training,
                held_out,
                planned.num_microbatches,
                report=terminal.validation_losses,
            ),
            *(TaskMetrics(task, spec.model_config, t5, folder, terminal) for task in read_tasks),
        ]
        progress = train.Progress(begin.step, state, interval, end)
        kept = workdir.Workdir(folder, held, metrics, saver, files)
        stack.pop_all()  # the run keeps its lock
    if planned.step is None:
        return train.FinishedRun(config, kept, terminal, training, evaluations, progress)
    return train.ReadyRun(
        config,
        kept,
        terminal,
        training,
        evaluations,
        progress,
        spec=spec,
        train_step=planned.step,
        not_finite=NotFinite(config.train, folder, begin.step, num_not_finite),
    )


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

    # Optimizer counters alias the step; NumPy's array gives each its own buffer, because a buffer can
    # be donated once.
    arrays['state/step'] = np.asarray(arrays['state/step'])
    state = train.TrainState(*state_names.from_t5x(arrays, spec.state_shapes.opt_state))
    state = jax.tree.map(lambda x, like: x.astype(like.dtype), state, spec.state_shapes)
    return jax.device_put(state, partition.shardings(spec.mesh, spec.state_specs))
