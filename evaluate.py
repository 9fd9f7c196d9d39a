"""Run a model over tasks: validation losses beside a unigram baseline, and task metrics.

`Evaluation` has the losses of one task, teacher-forced ("training_eval"). `TaskMetrics` has the
metrics of what the model answers, or of the scores that it gives ("inference_eval"); both run in
training. `CheckpointEvaluation` computes task metrics of checkpoints: `--mode=evaluate`.

Source: T5X t5x/models.py, t5x/trainer.py (train-eval), t5x/eval.py; SeqIO seqio/evaluation.py.
"""

import functools
import inspect
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ml_collections import FrozenConfigDict

import checkpoint
import convert
import data
import infer
import loss
import mixtures
import model
import partition
import paths
import results
import settings
import sources
import tasks
import workdir
from mixtures import MetricFn, Mixture, OpenTask, Task
from objectives import takes_inputs
from preprocessors import UNKNOWN, text_of
from vocabulary import EOS_ID, Vocabulary, find_vocabulary, named_vocabulary

UNIGRAM_TOKENS = 1_000_000  # positions of training targets that the unigram baseline counts
Sums = dict[str, jax.Array]  # loss.weighted_sums of a batch, and the sums of `text_sums`


# Validation losses.


def open_evaluations(
    config: Any, mesh: Mesh, training: data.Stream, validation: data.Stream, num_microbatches: int
) -> list['Evaluation']:
    """Return the evaluation of a task, or of each task of a mixture that has text for validation.

    The baseline of all is that of the mixture.
    """
    unigram = Unigram(config, training)
    evaluations = []
    for stream in validation.of_each_task():
        evaluation = Evaluation(
            config, mesh, stream, unigram, validation.first_sentinel, num_microbatches
        )
        evaluations.append(evaluation)
    return evaluations


class Unigram:
    """The token frequencies of training targets."""

    def __init__(self, config: Any, training: data.Stream):
        self.config = config
        self.training = training

    @functools.cached_property
    def own_counts(self) -> np.ndarray:
        """Of the tokens in this process's rows: int64 [vocab_size].

        They are of the first UNIGRAM_TOKENS positions of the training targets, or of their first
        epoch if that is shorter, whatever the number of steps.
        """
        positions_per_batch = self.config.train.batch_size * self.config.data.lengths.targets
        num_batches = math.ceil(UNIGRAM_TOKENS / positions_per_batch)
        counts = np.zeros(self.config.model.vocab_size, np.int64)
        for batch in itertools.islice(self.training.first_epoch(), num_batches):
            np.add.at(counts, batch['decoder_target_tokens'], 1)
        return counts


class Evaluation:
    """A model's losses on fixed batches of the validation split, and the unigram baseline.

    Differs from T5X: takes the first `eval.steps` batches of one pass. T5X repeats a small split.
    """

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        validation: data.Stream,
        unigram: Unigram,
        first_sentinel: int,
        num_microbatches: int = 1,
    ):
        self.config = config
        self.mesh = mesh
        self.name = f'training_eval/{validation.mixture.name}'
        self.validation = validation
        self.unigram = unigram
        self.first_sentinel = first_sentinel
        self.batches: list[dict[str, np.ndarray]] = []  # this process's rows
        self.batches_are_read = False
        self.compute_sums = make_sums(
            config=model.T5Config(**config.model),
            mesh=mesh,
            loss_config=FrozenConfigDict(config.loss),
            first_sentinel=self.first_sentinel,
            num_microbatches=num_microbatches,
        )

    def __call__(
        self, params: Mapping[str, jax.Array], stop: Callable[[int], int] = lambda count: 0
    ) -> dict[str, float] | None:
        """Return T5X's metrics, and nats per token beside their unigram baselines.

        The nats are those of text and of all targets. `stop` is called with the number of batches
        so far. All processes must get the same answer. Where it is not 0 the evaluation ends and
        returns None.
        """
        if not self.read_batches(stop):
            return None
        steps: list[Sums] = []
        for count, batch in enumerate(self.batches, start=1):
            steps.append(self.compute_sums(params, partition.place_rows(self.mesh, batch)))
            if count > 1:
                jax.block_until_ready(steps[-2])  # one batch is queued while another is computed
            if stop(count):
                return None
        steps = jax.device_get(steps)
        total = add_steps(steps)
        values = summarize(steps, self.config)
        values['nats_per_text_token'] = total['text_nats'] / total['text_tokens']
        values['nats_per_target_token'] = total['target_nats'] / total['decoder_tokens']
        return values | self.unigram_baselines

    def read_batches(self, stop: Callable[[int], int]) -> bool:
        """Read the batches if they are not read yet: a small split of a large corpus takes a while.

        Returns False where `stop` ended the reading. Several processes read at different speeds and
        do not call it.
        """
        if self.batches_are_read:
            return True
        for batch in self.validation:
            self.batches.append(batch)
            if len(self.batches) == self.config.eval.steps:
                break
            if jax.process_count() == 1 and stop(0):
                return False
        del self.validation  # frees the documents that its lanes hold
        # The rows of some processes may end first, but all processes must take the same number of
        # steps.
        num_batches = int(partition.from_processes(np.array([len(self.batches)])).max())
        padding = {name: np.zeros_like(x) for name, x in self.batches[0].items()}
        while len(self.batches) < num_batches:
            self.batches.append(padding)
        self.batches_are_read = True
        return True

    @functools.cached_property
    def unigram_baselines(self) -> dict[str, float]:
        """The cross entropy in nats of validation targets under the unigram of training targets.

        A model that knows nothing but token frequencies has this loss. Each token counts once more
        than it occurs.
        """
        own_counts = np.stack([self.unigram.own_counts, np.zeros_like(self.unigram.own_counts)])
        for batch in self.batches:
            np.add.at(own_counts[1], batch['decoder_target_tokens'], 1)
        training_counts, validation_counts = partition.from_processes(own_counts).sum(axis=0)

        text = slice(EOS_ID + 1, self.first_sentinel)
        targets = slice(EOS_ID, None)
        return {
            'unigram_nats_per_text_token': unigram_nats(
                training_counts[text], validation_counts[text]
            ),
            'unigram_nats_per_target_token': unigram_nats(
                training_counts[targets], validation_counts[targets]
            ),
        }


def unigram_nats(training_counts: np.ndarray, validation_counts: np.ndarray) -> float:
    """Return the cross entropy per token of validation counts under training counts plus one."""
    q = training_counts + 1
    nats = -(validation_counts * np.log(q / q.sum())).sum()
    return float(nats / validation_counts.sum())


@functools.lru_cache(maxsize=16)
def make_sums(
    config: model.T5Config,
    mesh: Mesh,
    loss_config: FrozenConfigDict,
    first_sentinel: int,
    num_microbatches: int,
) -> Callable[[Mapping[str, jax.Array], Mapping[str, jax.Array]], Sums]:
    """Return a compiled function (params, batch) -> sums over the global batch.

    It is cached: two runs of the same model in one process compile it once.
    """
    specs = partition.param_specs(model.PARAMETER_SPECS, model.shapes(config))
    normalizing_factor = loss.parse_normalizing_factor(loss_config.loss_normalizing_factor)

    def device_sums(params, batch):
        weights_bT, divisor = loss.weights_and_divisor(batch, normalizing_factor)

        def microbatch_sums(microbatch):
            batch, weights_bT = microbatch
            logits_bTv = model.apply(lambda: model.logits(config, batch), params)
            sums = loss.weighted_sums(
                logits_bTv,
                batch,
                weights_bT,
                divisor,
                z_loss=loss_config.z_loss,
                label_smoothing=loss_config.label_smoothing,
            )
            return sums | text_sums(logits_bTv, batch['decoder_target_tokens'], first_sentinel)

        microbatches = partition.cut_rows((batch, weights_bT), num_microbatches)
        sums = lax.map(microbatch_sums, microbatches)
        sums = jax.tree.map(lambda x: x.sum(axis=0), sums)
        return lax.psum(sums, partition.BATCH_AXES)

    return jax.jit(
        jax.shard_map(
            device_sums,
            mesh=mesh,
            in_specs=(specs, partition.BATCH),
            out_specs=P(),
        )
    )


def text_sums(logits_bTv: jax.Array, targets_bT: jax.Array, first_sentinel: int) -> Sums:
    """Return this device's sums of nats over all targets and over text alone.

    The nats are without z-loss and smoothing. Text is every target but sentinels, EOS and padding.
    """
    nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
    text_bT = (targets_bT > EOS_ID) & (targets_bT < first_sentinel)
    return {
        'target_nats': (nats_bT * (targets_bT > 0)).sum(),
        'text_nats': (nats_bT * text_bT).sum(),
        'text_tokens': text_bT.sum(),
    }


def add_steps(steps: list[Any]) -> dict[str, float]:
    """Return the total of each sum over the steps."""
    total = {}
    for name in steps[0]:
        total[name] = sum(float(sums[name]) for sums in steps)
    return total


def summarize(steps: list[Any], config: Any) -> dict[str, float]:
    """Return T5X's metrics (t5x/models.py) of the sums of some steps.

    'nats_per_token' is the cross entropy without z-loss, whatever the normalization.
    """
    total = add_steps(steps)
    num_rows = len(steps) * config.train.batch_size
    # Positions, padding included.
    inputs = num_rows * config.data.lengths.inputs
    targets = num_rows * config.data.lengths.targets
    weights = max(total['weights'], 1e-9)
    tokens = total['encoder_tokens'] + total['decoder_tokens']
    metrics = {
        'nats_per_token': total['nats'] / weights,
        'accuracy': total['correct'] / weights,
        'loss_per_nonpadding_target_token': total['loss'] / weights,
        'non_padding_fraction/loss_weights': total['weights'] / targets,
        'non_padding_fraction/encoder_input_tokens': total['encoder_tokens'] / inputs,
        'non_padding_fraction/decoder_target_tokens': total['decoder_tokens'] / targets,
        'non_padding_fraction/overall': tokens / (inputs + targets),
    }
    total['cross_ent_loss'] = total['loss'] - total['z_loss']
    for name in ('loss', 'z_loss', 'cross_ent_loss'):
        metrics[name] = total[name] / len(steps)
        metrics[f'{name}_per_all_target_tokens'] = total[name] / targets
    return metrics


# Task metrics.


class TaskExample(NamedTuple):
    """An example of a split. `inputs` and `targets` are ids with EOS, cut to data.lengths."""

    fields: Mapping[str, Any]  # that the postprocessor takes
    inputs: np.ndarray
    inputs_text: str
    targets: np.ndarray
    targets_text: str


class EvaluatedTask(NamedTuple):
    """The examples of a task, and what their results are called."""

    task: Task
    name: str
    examples: list[TaskExample]
    num_trimmed: int
    settings: str  # a hash of what the results depend on beside the model


class TaskResults(NamedTuple):
    """The values of a task's metrics, and the examples with what the model made of them."""

    values: dict[str, float]
    examples: list[results.Example]


class Stopped(Exception):
    """A signal ended an evaluation."""


def open_tasks(config: Any, split: str) -> list[OpenTask]:
    """Open the sources of the tasks of infer_eval.task, or of data.task, that can be evaluated.

    Raises ValueError for a task that cannot. Of a mixture the tasks without metrics or without the
    split are left out.
    """
    check_settings(config)
    opened: dict[str, OpenTask] = {}
    names = config.infer_eval.task or config.data.task
    for name in names.split(','):
        data_config = settings_of_task(config.data, name.strip())
        found = tasks.find(data_config)
        if isinstance(found, Mixture):
            of_name = open_members(found, data_config, split)
        else:
            check_metrics(found)
            of_name = [OpenTask(found, mixtures.open_task(found, data_config), rate=1.0)]
            check_split(of_name[0], split)
        for task in of_name:
            opened[task.name] = task
    return list(opened.values())


def check_settings(config: Any) -> None:
    """Raise ValueError for settings that task metrics cannot be computed with."""
    if jax.process_count() > 1:
        raise ValueError(
            f'{jax.process_count()} processes: task metrics are computed by one process: set '
            'infer_eval.every_steps=0 in training, and run --mode=evaluate in one process'
        )
    if config.decode.num_return > 1:
        raise ValueError(
            f'decode.num_return={config.decode.num_return}: an evaluation takes one answer per '
            'example: set decode.num_return=1'
        )
    infer.Decoding.of_settings(config.decode)


def settings_of_task(config: Any, name: str) -> Any:
    """Return config.data for a task. What is said of the records of data.task is not of others."""
    if name == config.task:
        return config
    own = config.copy_and_resolve_references()
    own.task = name
    own.files = ''
    own.validation_files = ''
    own.tfds = ''
    own.train_split = 'train'
    own.validation_split = ''
    own.text_field = 'text'
    own.inputs = ''
    own.targets = ''
    return own


def open_members(mixture: Mixture, config: Any, split: str) -> list[OpenTask]:
    """Open the sources of the tasks of a mixture that have metrics and the split."""
    opened = []
    for task in mixture.tasks.values():
        if task.metric_fns and takes_inputs(task.objective):
            source = mixtures.open_task(task, config)
            if source.may_hold(split):
                opened.append(OpenTask(task, source, rate=1.0))
    if not opened:
        raise ValueError(
            f'mixture {mixture.name!r} has no task with metrics and the split {split!r}: evaluate '
            "one that has: 'python tasks.py' lists the metrics and splits of each"
        )
    return opened


def check_metrics(task: Task) -> None:
    """Raise ValueError for a task without metrics, or without inputs."""
    if not task.metric_fns:
        raise ValueError(
            f"task {task.name!r} has no metrics: evaluate one that 'python tasks.py' lists with "
            'some, or give it metric_fns in a file of your own (data.module)'
        )
    if not takes_inputs(task.objective):
        raise ValueError(
            f'task {task.name!r} has documents (objective {task.objective!r}): metrics need inputs '
            'and targets: evaluate a task from text to text'
        )


def check_split(task: OpenTask, split: str) -> None:
    """Raise ValueError for a split that a task has not."""
    if task.source.may_hold(split):
        return
    available = [
        name for name in settings.CHOICES['infer_eval.split'] if task.source.may_hold(name)
    ]
    raise ValueError(
        f'task {task.name!r} has no split {split!r}, but {", ".join(available) or "none"}: name one '
        'of these with --split or infer_eval.split'
    )


class TaskMetrics:
    """The metrics of tasks on all examples of a split, which are read at once.

    Raises ValueError for examples whose targets are missing, before anything is compiled.
    """

    def __init__(
        self,
        config: Any,
        split: str,
        vocabulary: Vocabulary,
        opened: Sequence[OpenTask],
        report: Callable[[str], Any],
    ):
        self.config = config
        self.split = split
        self.vocabulary = vocabulary
        self.tasks = [read_task(task, config, split, vocabulary) for task in opened]
        trimmed = {task.name: [len(task.examples), task.num_trimmed] for task in self.tasks}
        for line in workdir.describe_trimming(trimmed):
            report(line)

    def __call__(
        self, t5: infer.T5, task: EvaluatedTask, stop: Callable[[], int] = lambda: 0
    ) -> TaskResults | None:
        """Return the results of a task, None where `stop`, called after each batch, is not 0."""

        def progress(num_examples: int) -> None:
            if stop():
                raise Stopped

        answers = None
        scores = None
        try:
            if not all(takes_scores(metric_fn) for metric_fn in task.task.metric_fns):
                answers = self.predict(t5, task.examples, progress)
            if any(takes_scores(metric_fn) for metric_fn in task.task.metric_fns):
                scores = score(t5, task.examples, self.config.infer_eval.batch_size, progress)
        except Stopped:
            return None
        return compute_metrics(task, answers, scores)

    def predict(
        self, t5: infer.T5, examples: Sequence[TaskExample], progress: Callable[[int], Any]
    ) -> list[str]:
        """Return the text that the model predicts for each example."""
        answers = infer.predict_all(
            t5,
            [infer.Example(example.inputs, number=i) for i, example in enumerate(examples)],
            batch_size=self.config.infer_eval.batch_size,
            options=infer.decoding_options(self.config.decode),
            progress=progress,
        )
        return [self.vocabulary.decode(answer.tokens[0]) for answer in answers]


def read_task(opened: OpenTask, config: Any, split: str, vocabulary: Vocabulary) -> EvaluatedTask:
    """Read the examples of a split of a task, at most infer_eval.num_examples."""
    tokenized_task = data.TokenizedTask(opened, config.data, vocabulary)
    limit = config.infer_eval.num_examples or None
    examples = []
    num_trimmed = 0
    for example, is_trimmed in itertools.islice(read_examples(tokenized_task, split), limit):
        examples.append(example)
        num_trimmed += is_trimmed
    check_targets(opened.name, split, examples)
    name = opened.name
    if split != 'validation':
        name += f'-{split}'
    return EvaluatedTask(
        task=opened.task,
        name=name,
        examples=examples,
        num_trimmed=num_trimmed,
        settings=sources.digest(
            [
                [split, limit, opened.source.fingerprint, vocabulary.hash],
                sorted(settings.leaves(config.decode)),
                sorted(config.data.lengths.items()),
            ]
        ),
    )


def read_examples(task: data.TokenizedTask, split: str) -> Iterator[tuple[TaskExample, bool]]:
    """Yield the examples of a split in the order in which they are stored, and which are trimmed."""
    for record in task.source.records(split, whole=True):
        for tokenized in task.tokenize([record]):
            fields: dict[str, Any] = dict(tokenized.texts)
            if task.source.is_tokenized:
                fields = dict(record.fields)
            for made in task.objective.examples([record.name], [tokenized.ids]):
                example = TaskExample(
                    fields=fields | {'num_target_tokens': len(made.targets)},
                    inputs=made.inputs,
                    inputs_text=text_of_feature('inputs', fields, made.inputs, task.vocabulary),
                    targets=made.targets,
                    targets_text=text_of_feature('targets', fields, made.targets, task.vocabulary),
                )
                yield example, made.is_trimmed


def text_of_feature(
    feature: str, fields: Mapping[str, Any], ids: np.ndarray, vocabulary: Vocabulary
) -> str:
    """Return the text of a feature: that of the record, or that of the ids if it has none."""
    for name in (f'{feature}_pretokenized', feature):
        if isinstance(fields.get(name), str | bytes):
            return text_of(fields[name])
    return vocabulary.decode(ids.tolist())


def check_targets(name: str, split: str, examples: Sequence[TaskExample]) -> None:
    """Raise ValueError for a split without examples, or without targets."""
    if not examples:
        raise ValueError(f'task {name!r} has no example in split {split!r}: evaluate another split')
    if all(example.targets_text in ('', UNKNOWN) for example in examples):
        raise ValueError(
            f'task {name!r}: all targets of split {split!r} are missing '
            f'({examples[0].targets_text!r}): its metrics compare answers with them: evaluate '
            'another split'
        )


def takes_scores(metric_fn: MetricFn) -> bool:
    """Return whether a metric takes the scores of the targets, and not predictions."""
    return 'scores' in inspect.signature(metric_fn).parameters


def score(
    t5: infer.T5,
    examples: Sequence[TaskExample],
    batch_size: int,
    progress: Callable[[int], Any],
) -> list[float]:
    """Return the log-likelihood of the targets of each example, in nats.

    Examples that follow each other with the same inputs are the choices of one input.
    """
    choices = []
    for _, group in itertools.groupby(examples, key=lambda example: example.inputs.tobytes()):
        same_inputs = list(group)
        for start in range(0, len(same_inputs), batch_size):
            part = same_inputs[start : start + batch_size]
            targets = [example.targets for example in part]
            choices.append(infer.Example(part[0].inputs, targets))
    most_choices = max(len(example.targets) for example in choices)

    def score_batch(batch: Sequence[infer.Example], num_rows: int) -> Iterable[np.ndarray]:
        inputs = [example.inputs for example in batch]
        targets: list[Any] = [example.targets for example in batch]
        return t5.score_choices(inputs, targets, num_rows)

    scores = infer.in_batches(score_batch, choices, max(batch_size // most_choices, 1), progress)
    return np.concatenate(list(scores)).tolist()


def compute_metrics(
    task: EvaluatedTask, answers: Sequence[str] | None, scores: Sequence[float] | None
) -> TaskResults:
    """Return the metrics of a task. Raises ValueError, which names the task, where one fails."""
    try:
        targets = []
        for example in task.examples:
            targets.append(
                task.task.postprocess(example.targets_text, example.fields, is_target=True)
            )
        predictions = []
        for example, answer in zip(task.examples, answers or [], strict=False):
            predictions.append(task.task.postprocess(answer, example.fields, is_target=False))
        values: dict[str, float] = {}
        for metric_fn in task.task.metric_fns:
            outputs = scores if takes_scores(metric_fn) else predictions
            assert outputs is not None
            values |= metric_fn(targets, outputs)
    except Exception as error:  # postprocessors and metrics may be the user's
        raise ValueError(f'task {task.name!r}: {type(error).__name__}: {error}') from error
    lines = []
    for i, example in enumerate(task.examples):
        line = results.Example(
            inputs=example.inputs.tolist(),
            inputs_text=example.inputs_text,
            targets=example.targets.tolist(),
            targets_text=example.targets_text,
            target=targets[i],
            output=None if answers is None else answers[i],
            prediction=None if answers is None else predictions[i],
            score=None if scores is None else scores[i],
        )
        lines.append(line)
    return TaskResults({name: float(value) for name, value in values.items()}, lines)


def events_of(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under T5X's tags."""
    return {f'eval/{name}': value for name, value in values.items()}


# Checkpoints.

SECONDS_BETWEEN_LOOKS = 10.0  # for a new checkpoint


class Chosen(NamedTuple):
    """The checkpoints that the flags choose."""

    folder: Any  # of the run, or the checkpoint itself
    is_run: bool
    steps: list[int]  # of the run; [] for a checkpoint that is in none


class CheckpointEvaluation:
    """Task metrics of one checkpoint, of some steps of a run, or of each new one.

    `path` is a run, or a checkpoint that `infer.load` opens; the results go to `output_dir`, by
    default the run. `step` is 'last', 'all', or numbers separated by commas. With `watch` all steps
    are evaluated, and each new one as it appears, until the last one of the run. What is there is
    not computed again. Raises ValueError or OSError, before anything is compiled, for what cannot be
    evaluated.
    """

    def __init__(
        self,
        config: Any,
        path: str,
        output_dir: str = '',
        step: str = '',
        split: str = '',
        watch: bool = False,
    ):
        self.config = config
        self.watch = watch
        self.split = split or config.infer_eval.split
        splits = settings.CHOICES['infer_eval.split']
        if self.split not in splits:
            raise ValueError(f'--split={split}: must be one of {", ".join(splits)}')
        self.console = workdir.Console()
        self.chosen = choose(path, step, watch)
        self.folder = output_folder(self.chosen, output_dir)
        self.mesh = partition.make_mesh(**config.mesh)
        self.t5: infer.T5 | None = None  # compiled once for all steps
        self.loaded_path: Any = None  # of the checkpoint whose parameters it has
        opened = open_tasks(config, self.split)
        with self.console.working('Reading the tasks'):
            self.task_metrics = TaskMetrics(
                config,
                self.split,
                find_own_vocabulary(config, self.first_checkpoint()),
                opened,
                self.console.line,
            )
        self.results = results.Results(self.folder)
        self.events = workdir.Events(self.folder / results.FOLDER)

    def first_checkpoint(self) -> Any:
        """Return the folder of a checkpoint that is evaluated, or the run that has none yet."""
        if self.chosen.steps:
            return self.chosen.folder / f'checkpoint_{self.chosen.steps[0]}'
        return self.chosen.folder

    def run(self) -> None:
        """Evaluate the checkpoints. Raises ValueError or OSError for one that cannot be opened."""
        self.results.write_table()  # a kill may have come before it
        if not self.chosen.is_run:
            path = self.chosen.folder
            self.evaluate(path, step_of(path))
        elif not self.watch:
            for step in self.chosen.steps:
                self.evaluate(self.chosen.folder / f'checkpoint_{step}', step)
        else:
            self.evaluate_as_they_appear()
        self.console.line(f'Results are in {self.results.table_file} and {self.results.folder}.')

    def evaluate_as_they_appear(self) -> None:
        run = self.chosen.folder
        seen: set[int] = set()
        while True:
            for step in checkpoint.steps(run):
                directory = run / f'checkpoint_{step}'
                if step in seen:
                    continue
                seen.add(step)
                try:
                    self.evaluate(directory, step)
                except (ValueError, OSError):
                    if directory.exists():
                        raise
                    self.console.line(f'{directory} was deleted before it was evaluated.')
            if max(seen, default=0) >= last_step(run):
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def evaluate(self, path: Any, step: int) -> None:
        """Evaluate a checkpoint on each task that has no results of it."""
        values = {}
        for task in self.task_metrics.tasks:
            identity = self.settings_of(task, path)
            if self.results.has(task.name, step, identity):
                self.console.line(f'Step {step:,}: {task.name} is evaluated already.')
                continue
            with self.console.working(f'Evaluating {task.name}, step {step:,}'):
                found = self.task_metrics(self.load(path), task)
            assert found is not None
            self.events.write(task.name, step, events_of(found.values))
            self.results.write(task.name, step, found.values, found.examples, identity)
            self.results.write_table()
            values[task.name] = found.values
        if values:
            self.console.line(results.describe(step, self.split, values))

    def load(self, path: Any) -> infer.T5:
        """Return the model with the parameters of a checkpoint."""
        if self.t5 is not None and path == self.loaded_path:
            return self.t5
        loaded = infer.load(path, mesh=self.mesh)
        self.loaded_path = path
        if self.t5 is None or self.t5.config != loaded.config:
            self.t5 = loaded
        else:
            self.t5.set_parameters(loaded.arrays)
        return self.t5

    def settings_of(self, task: EvaluatedTask, path: Any) -> str:
        """Return the hash that results have; of other folders than a run's own, with the path."""
        if self.folder in (path, path.parent):
            return task.settings
        return sources.digest([task.settings, str(path)])


def choose(path: str, step: str, watch: bool) -> Chosen:
    """Return the checkpoints that --checkpoint, --step and --watch choose."""
    folder = paths.to_path(path)
    steps = checkpoint.steps(folder)
    is_run = bool(steps)
    if watch and isinstance(folder, Path) and not (folder / 'checkpoint').exists():
        is_run = is_run or workdir.is_run(folder)
    if not is_run:
        for flag, value in (('--watch', watch), (f'--step={step}', step)):
            if value:
                raise ValueError(
                    f'{flag}: --checkpoint={path} is no run with checkpoint_STEP folders: name the '
                    f'folder of a run, or leave {flag.partition("=")[0]} out'
                )
        opened = convert.open_checkpoint(path)
        return Chosen(opened.directory, is_run=False, steps=[])
    if watch:
        if step:
            raise ValueError(
                f'--step={step} with --watch: all checkpoints are evaluated with --watch: leave one '
                'of them out'
            )
        return Chosen(folder, is_run=True, steps=steps)
    return Chosen(folder, is_run=True, steps=chosen_steps(folder, step or 'last', steps))


def chosen_steps(folder: Any, text: str, available: Sequence[int]) -> list[int]:
    """Return the steps that --step names."""
    if text.lower() == 'last':
        return [available[-1]]
    if text.lower() == 'all':
        return list(available)
    names = [name.strip() for name in text.split(',')]
    unknown = [name for name in names if name not in map(str, available)]
    if unknown:
        raise ValueError(
            f'--step={text}: {folder} has no checkpoint_{unknown[0]}, but those of '
            f'{settings.first_ten([str(step) for step in available])}: name some of these, last or '
            'all'
        )
    return sorted({int(name) for name in names})


def output_folder(chosen: Chosen, output_dir: str) -> Path:
    """Return the folder of the results: --output_dir, or the run of the checkpoint."""
    if output_dir:
        folder = paths.disk_path(output_dir)
    elif chosen.is_run:
        folder = chosen.folder
    else:
        folder = chosen.folder.parent
    is_own_run = isinstance(folder, Path) and workdir.is_run(folder)
    if not output_dir and not is_own_run:
        raise ValueError(
            f'{chosen.folder} is in no run of this program, which would take the results: name a '
            'folder with --output_dir'
        )
    file = paths.blocking_file(folder)
    if file is not None:
        raise ValueError(f'--output_dir={folder}: {file} is a file: name a folder')
    return folder


def find_own_vocabulary(config: Any, directory: Any) -> Vocabulary:
    """Return the vocabulary of a checkpoint, or data.vocabulary if that is the same one.

    Raises ValueError for two that differ, and if there is none.
    """
    own = find_vocabulary(directory)
    if not config.data.vocabulary:
        if own is None:
            raise ValueError(
                f'{directory} brings no vocabulary: tasks need the one that it was trained with: '
                'name it with data.vocabulary'
            )
        return own
    extra_ids = config.data.extra_ids
    named = named_vocabulary(
        'data.vocabulary', config.data.vocabulary, extra_ids, byte_extra_ids=extra_ids
    )
    if own is not None and own.model != named.model:
        raise ValueError(
            f'data.vocabulary={config.data.vocabulary!r} ({named.size:,} ids) is not the vocabulary '
            f"of {directory} ({own.size:,} ids): set data.vocabulary='', which takes that one"
        )
    return named


def step_of(path: Any) -> int:
    """Return the step of a checkpoint; 0 for one that does not say it, such as Hugging Face's."""
    leaves = convert.open_checkpoint(path).leaves
    if 'state/step' not in leaves:
        return 0
    return int(checkpoint.restore({'state/step': leaves['state/step']})['state/step'])


def last_step(run: Path) -> float:
    """Return the step at which a run ends, infinity while nobody knows."""
    try:
        return json.loads((run / 'config.json').read_bytes())['train']['steps']
    except (OSError, ValueError, KeyError):
        return math.inf
