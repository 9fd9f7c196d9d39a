"""`--mode=train`: prepare a run. train.py takes its steps."""

import collections
import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import json
import math
import re
import time
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from ml_collections import FrozenConfigDict

import data
import evaluate
import infer
import model
import optimizer
import partition
import paths
import sources
import tasks.open
import train
from configs import check as settings
from formats import own_model
from messages import first_ten
from model import T5Config
from modes import start
from modes.train_vocabulary import find_or_train_vocabulary, training_texts
from randomness import digest
from run import best, console, memory, not_finite, results, task_metrics, workdir
from run.agreement import check_alike
from run.lock import lock
from sources.open import find_cache
from stream import Stream

UNIGRAM_TOKENS = 1_000_000  # positions of training targets that the unigram baseline counts
LINES_OF_A_SLOW_EVALUATION = 1_000_000  # that are read in about ten seconds or more


def make_trainer(
    config: Any, num_microbatches: int = 1, devices: list | None = None
) -> train.Trainer:
    """Return the trainer of a config. Raises ValueError for settings that do not fit together.

    `devices`: those of the mesh; None takes all that are here.
    """
    settings.check(config)
    model_config = own_model.load(config.model)
    trainer = train.Trainer(
        model_config=model_config,
        loss_config=FrozenConfigDict(config.loss),
        optimizer_config=FrozenConfigDict(config.optimizer),
        learning_rate_config=FrozenConfigDict(config.learning_rate),
        mesh=partition.make_mesh(**config.mesh, devices=devices),
        seed=config.seed,
        batch_size=config.train.batch_size,
        feature_lengths=FrozenConfigDict(data.feature_lengths(config.data)),
        num_microbatches=num_microbatches,
        gradient_dtype=config.train.gradient_dtype,
        skips_not_finite=config.train.on_not_finite == 'skip',
    )
    model.check_mesh(trainer.model_config, trainer.mesh)
    partition.check_divides(
        'train.batch_size', trainer.batch_size, partition.BATCH_AXES, trainer.mesh
    )
    # These names are parsed when they are first used: parse them now.
    _ = trainer.normalizing_factor
    _ = trainer.tx  # and its schedule
    check_adapters(trainer.model_config)
    check_scan(trainer.model_config)
    _ = trainer.trained
    return trainer


def check_adapters(config: T5Config) -> None:
    """Raise ValueError where adapters are asked for and no kernel has one."""
    shapes = model.shapes(config)
    if config.lora_rank and not any(re.fullmatch(model.ADAPTER, path) for path in shapes):
        kernels = [path for path in shapes if path.endswith('/kernel')]
        raise ValueError(
            f'model.lora_targets={config.lora_targets!r} matches none of the {len(kernels)} kernels: '
            f'it must match the whole path of one or more, such as {kernels[0]!r}'
        )


def check_scan(config: T5Config) -> None:
    """Raise ValueError where a scan over layers is asked for and its periods are not alike."""
    if not config.scan_layers:
        return
    period = config.modules.period
    num_layers = {'encoder': config.num_encoder_layers, 'decoder': config.num_decoder_layers}
    for stack, count in num_layers.items():
        if count % period:
            raise ValueError(
                f'model.num_{stack}_layers={count} with model.scan_layers=True: {config.module} scans '
                f'{period} layers at a time: set a multiple of {period}, or model.scan_layers=False'
            )
    counts: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for path in model.shapes(config):
        match = re.fullmatch(r'(encoder|decoder)/layers_(\d+)/(.+)', path)
        if match:
            counts[match[1], match[3], int(match[2]) % period] += 1
    for (stack, name, _), count in counts.items():
        if count != num_layers[stack] // period:
            raise ValueError(
                f'model.scan_layers=True: {count} of the layers have {stack}/layers_*/{name}, which all or '
                'none must have: set it to False, model.lora_targets to the kernels of all layers, or the '
                'period of an own model to the layers after which they repeat'
            )


def microbatch_counts(config: Any, trainer: train.Trainer) -> list[int]:
    """Return the numbers of microbatches to try. Raises ValueError for one that does not divide."""
    rows = trainer.batch_size // partition.axes_size(trainer.mesh, partition.BATCH_AXES)
    return memory.microbatch_counts(config.train.num_microbatches, rows)


def fit_step(config: Any, trainer: train.Trainer) -> memory.Plan:
    """Compile the step in as few microbatches as fit. Raises ValueError where none fits."""
    return memory.fit_step(
        lambda n: train.compile_step(dataclasses.replace(trainer, num_microbatches=n)),
        counts=microbatch_counts(config, trainer),
        requested=config.train.num_microbatches,
        mesh=trainer.mesh,
        state_bytes=memory.num_state_bytes(trainer.shapes),
    )


def num_lines_to_start(stream: Stream) -> int:
    """Return about how many lines all lanes read before the first batch."""
    total = 0
    for task in stream.tasks:
        num_records = stream.batch_size * task.objective.records_per_group
        total += task.source.num_lines_to_find(stream.split, num_records)
    return total


def own_rows(mesh: Mesh, batch_size: int) -> range:
    """Return the rows of a global batch that this process feeds to its devices."""
    indices = NamedSharding(mesh, partition.BATCH).addressable_devices_indices_map((batch_size,))
    rows = np.concatenate([np.arange(batch_size)[index] for index in indices.values()])
    return range(rows.min(), rows.max() + 1)


def prepare(config: Any, folder: Any) -> train.Run:
    """Return a run in the workdir `folder`, ready for its first step.

    Restores the newest valid checkpoint in the workdir if there is one. Raises ValueError or
    OSError, before anything is compiled, for settings, files and folders that are not valid.
    """
    # The settings.
    settings.check(config)
    best.check_settings(config)
    tasks.open.find(config.data)
    folder = paths.to_path(folder, may_be_new=True)
    workdir.check_is_run(folder)
    terminal = console.Console()
    trainer = make_trainer(config)
    microbatch_counts(config, trainer)  # raises ValueError for train.num_microbatches

    # The text.
    with terminal.working('Reading the text'):
        mixture = tasks.open.open_mixture(config.data)
        evaluated_alone = tasks.open.open_evaluated_alone(config.data, mixture)
        evaluated_tasks = []
        if config.infer_eval.every_steps:
            evaluated_tasks = task_metrics.open_tasks(config, config.infer_eval.split)
    if config.train.epochs and not mixture.is_single:
        raise ValueError(
            f'train.epochs={config.train.epochs}: data.task={config.data.task!r} is a mixture, whose tasks end at '
            'different times: set train.epochs=0 and train.steps'
        )
    for task in mixture.tasks:
        if task.task.train_split == sources.NO_SPLIT:
            raise ValueError(
                f'data.task={task.name!r} has no split for training, it is for evaluation alone: name a '
                "task that 'python main.py --mode=tasks' lists with a t"
            )

    with contextlib.ExitStack() as stack:
        # The workdir and what the run starts from.
        paths.make_folder(folder)
        remedy = (
            'stop that run, or name another --workdir; if this process has prepared it before, train '
            'that run, or close its .lock'
        )
        held = stack.enter_context(
            lock(folder / 'lock', str(folder), remedy, jax.process_index() == 0)
        )
        workdir.check_shared(folder)
        lines = best.read_metrics(folder)
        with terminal.working('Verifying the newest checkpoint'):
            begin = start.find_start(config, folder, trainer, lines, terminal)
        directory = folder / f'checkpoint_{begin.step}'  # where it is resumed
        num_logged = begin.step if begin.is_resumed else 0
        kept_lines = [line for line in lines if line['step'] <= num_logged]
        config = start.with_last_step(config, folder, begin)

        # The vocabulary: the run's own, that of what it starts from, or a new one.
        with terminal.working('Preparing the vocabulary'):
            vocabulary = find_or_train_vocabulary(
                config.data,
                folder,
                texts=training_texts(mixture),
                max_size=config.model.vocab_size,
                model=begin.vocabulary_model,
            )

        text = digest([mixture.fingerprint, vocabulary.hash, trainer.model_config.modules.source])
        check_alike('the text, the vocabulary or the file of model.module', text.encode())

        # The content of config.json: the settings, and what they stand for.
        resolved = json.loads(config.to_json())
        resolved['model']['module'] = trainer.model_config.module
        resolved['model']['options'] = own_model.as_dict(trainer.model_config.options)
        resolved['corpus'] = mixture.corpus
        resolved['data_fingerprint'] = mixture.fingerprint
        resolved['vocabulary_hash'] = vocabulary.hash
        if begin.base:
            resolved['base'] = begin.base
        if begin.is_resumed:
            own_model.check_same(
                directory, trainer.model_config, otherwise='name another --workdir'
            )
            options = own_model.default_options(trainer.model_config)
            mixture = workdir.compare_settings(directory, resolved, options, mixture, begin.step)
            start.choose(begin.leaves, start.state_shapes(trainer))
            changed = [file.path for file in mixture.files if file.is_changed_at(begin.step)]
            if changed:
                terminal.line(f'Changed since step {begin.step:,}: {first_ten(changed)}.')
        results.Results(folder).scores()  # raises ValueError for a file that is damaged

        # This process's rows of the batches: training without end or in epochs, validation once.
        with terminal.working('Opening the text'):
            open_stream = functools.partial(
                Stream,
                vocabulary=vocabulary,
                config=config.data,
                batch_size=config.train.batch_size,
                seed=config.seed,
                rows=own_rows(trainer.mesh, config.train.batch_size),
            )
            training = open_stream(mixture, 'train', num_epochs=config.train.epochs or None)
            evaluated = dataclasses.replace(mixture, tasks=(*mixture.tasks, *evaluated_alone))
            validation = open_stream(evaluated, 'validation', num_epochs=1)

        # Say what the model, the devices and the data are.
        params = trainer.shapes.params
        introduction = console.introduction(
            num_parameters=sum(x.size for x in params.values()),
            num_trained=sum(params[path].size for path in trainer.trained),
            dtype=config.model.dtype,
            module=trainer.model_config.module,
            mesh=trainer.mesh,
            mixture=mixture,
            vocabulary_size=vocabulary.size,
        )
        introduction += tasks.open.other_versions(mixture)
        cached = [find_cache(config.data, task.name) for task in mixture.tasks]
        if config.data.cache_dirs and not any(cached):
            introduction.append(
                f'data.cache_dirs={config.data.cache_dirs!r} has no effect: it holds no complete cache '
                f'of data.task={config.data.task!r}.'
            )
        num_lines = num_lines_to_start(validation)
        if num_lines > LINES_OF_A_SLOW_EVALUATION:
            introduction.append(
                f'The first evaluation reads about {num_lines:,} lines to find the share '
                f'data.validation_fraction={config.data.validation_fraction}: data.validation_files names '
                'a file of its own instead.'
            )
        for text in introduction:
            terminal.line(text)

        # The examples of task metrics, and whether train.early_stopping has ended the run.
        with terminal.working('Reading the examples of task metrics'):
            metrics_of_tasks = task_metrics.TaskMetrics(
                config, config.infer_eval.split, vocabulary, evaluated_tasks, terminal.line
            )
        if not metrics_of_tasks.tasks:
            with terminal.working('Reading the first texts'):
                for line in task_metrics.changes_of_first_texts(training.tasks):
                    terminal.line(line)
        if config.save.best_metric:
            task_metrics.check_best_metric(config, validation, metrics_of_tasks.tasks)
        history = best.history(config.save, kept_lines)
        has_stopped_early = history.ends(config.train.early_stopping)
        has_all_steps = begin.is_resumed and begin.step >= config.train.steps

        # The compiled step, unless the run is finished.
        planned = memory.Plan(step=None, num_microbatches=1, note='')
        if not has_stopped_early and not has_all_steps:
            if config.optimizer.step_offset > begin.step:  # where T5X's formula has no value
                raise ValueError(
                    f'optimizer.step_offset={config.optimizer.step_offset} lies after step {begin.step}, where the run '
                    f'starts: use {begin.step} or less'
                )
            saved = train.saved_tree(trainer, trainer.shapes)
            workdir.check_saving(folder, memory.num_state_bytes(saved))
            terminal.line(
                f'{begin.description}; compiling, then a line every {config.log.every_steps} steps.'
            )
            memory.check_state_fits(trainer.mesh, trainer.shapes, trainer.specs)
            began = time.monotonic()
            with terminal.working('Compiling'), futures.ThreadPoolExecutor(1) as thread:
                if not begin.leaves:  # beside the step, which takes about as long
                    thread.submit(train.compile_init, trainer)
                planned = fit_step(config, trainer)
            if planned.note:
                terminal.line(planned.note)
            terminal.line(f'Compiled in {time.monotonic() - began:.1f} s.')

        # The state, the position in the data, and the metrics since the last logged step.
        with terminal.working('Restoring' if begin.leaves else 'Initializing'):
            dtype = '' if begin.is_resumed else config.restore.dtype
            state = start.restore(trainer, begin.leaves, dtype)
        interval = []
        num_not_finite = 0
        if begin.is_resumed:
            num_not_finite = not_finite.read_count(directory)
            positions = np.load(io.BytesIO((directory / 'data_position.npy').read_bytes()))
            training.seek(positions[training.rows], step=begin.step)
            if jax.process_index() == 0:  # the counts of all processes are added
                num_examples = json.loads((directory / 'data_counts.json').read_bytes())
                training.counts[:] = [num_examples[task.name] for task in training.tasks]
            interval = json.loads((directory / 'interval.json').read_bytes())
            logged = [line['step'] for line in lines if line['run'] == 'train']
            # Of a run that began at a checkpoint elsewhere all steps may be in the interval.
            may_be_unlogged = config.restore.path and (folder / 'metrics.jsonl').exists()
            if logged or not may_be_unlogged:
                every_steps = settings.read_stored(directory)['log']['every_steps']
                expected = min(begin.step // every_steps * every_steps, begin.step - len(interval))
                last = max(logged, default=0)
                if last < expected:
                    terminal.line(
                        f'{folder / "metrics.jsonl"} has no lines of the steps {last + 1:,} to '
                        f'{expected:,}: it is gone or cut. The run goes on without them.'
                    )

        # The files of the run. config.json comes first: it marks the folder as a run.
        resolved['train']['num_microbatches'] = planned.num_microbatches
        config_json = json.dumps(resolved, indent=1).encode()
        if jax.process_index() == 0:
            paths.replace_file(folder / 'config.json', config_json)
            if vocabulary.model:
                paths.replace_file(folder / 'vocabulary.model', vocabulary.model)
            shapes = optimizer.to_t5x(*trainer.shapes)
            info = workdir.model_info(shapes, optimizer.to_t5x(*trainer.specs), trainer.trained)
            paths.replace_file(folder / 'model-info.txt', info.encode())
        files = {'config.json': config_json, **own_model.files_of(trainer.model_config)}
        if vocabulary.model:
            files['vocabulary.model'] = vocabulary.model
        base = model.without_adapters(trainer.model_config)
        merge = functools.partial(model.merge_adapters, trainer.model_config)
        base_params = jax.eval_shape(merge, trainer.shapes.params)
        run = train.Run(
            config=config,
            files=files,
            workdir=folder,
            console=terminal,
            metrics=workdir.Metrics(folder, kept_lines, mixture.corpus),
            lock=held,
            trainer=trainer,
            train_step=planned.step,
            stream=training,
            vocabulary=vocabulary,
            evaluations=open_evaluations(
                config, trainer, training, validation, planned.num_microbatches
            ),
            task_metrics=metrics_of_tasks,
            t5=infer.T5(base, base_params, trainer.mesh, vocabulary),
            missing_evaluations=[],
            first_step=begin.step,
            state=state,
            interval=interval,
            not_finite=not_finite.NotFinite(config, num_not_finite),
            restore_newest=functools.partial(
                start.restore_newest, config, folder, trainer, terminal
            ),
        )
        if begin.is_resumed:
            is_last = begin.step == config.train.steps or has_stopped_early
            due = train.due_evaluations(run, begin.step, is_last)
            run = run._replace(missing_evaluations=run.metrics.missing(due, begin.step))
        stack.pop_all()  # the run keeps its lock
    return run


def open_evaluations(
    config: Any, trainer: train.Trainer, training: Stream, validation: Stream, num_microbatches: int
) -> list[evaluate.Evaluation]:
    """Return the evaluations of the tasks with text for validation, all beside one baseline."""
    training_counts = functools.cache(functools.partial(count_targets, config, training))
    compute_sums = evaluate.make_sums(
        config=trainer.model_config,
        mesh=trainer.mesh,
        loss_config=FrozenConfigDict(config.loss),
        sentinel_ids=validation.sentinel_ids,
        num_microbatches=num_microbatches,
    )
    evaluations = []
    for stream in validation.of_each_task():
        evaluation = evaluate.Evaluation(
            config=config,
            mesh=trainer.mesh,
            name=f'training_eval/{stream.mixture.name}',
            validation=stream,
            vocabulary_size=validation.vocabulary.size,
            sentinel_ids=validation.sentinel_ids,
            compute_sums=compute_sums,
            training_counts=training_counts,
        )
        evaluations.append(evaluation)
    return evaluations


def count_targets(config: Any, training: Stream) -> np.ndarray:
    """Return how often each token is a training target in this process's rows: int64 [vocab_size].

    Counts the first UNIGRAM_TOKENS positions, or a shorter first epoch.
    """
    positions_per_batch = config.train.batch_size * config.data.lengths.targets
    num_batches = math.ceil(UNIGRAM_TOKENS / positions_per_batch)
    counts = np.zeros(config.model.vocab_size, np.int64)
    first_epoch = copy.copy(training)  # of a mixture, without end
    if training.mixture.is_single:
        first_epoch.num_epochs = 1
    first_epoch.counts = np.zeros_like(training.counts)
    first_epoch.seek(np.zeros_like(training.position))
    for batch in itertools.islice(first_epoch, num_batches):
        np.add.at(counts, batch['decoder_target_tokens'], 1)
    return counts
