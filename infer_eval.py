"""Task metrics: of what a model answers to the inputs of a split, or of the scores that it gives.

Training computes them on the way ("inference_eval"), and `--mode=evaluate` of checkpoints
(evaluate_mode.py). Source: SeqIO seqio/evaluation.py.
"""

import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import best
import data
import evaluate
import infer
import mixtures
import partition
import results
import settings
import sources
import tasks
import workdir
from mixtures import MetricFn, Mixture, OpenTask, Task
from objectives import takes_inputs
from preprocessors import UNKNOWN, text_of
from vocabulary import Vocabulary


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
    own.kind = ''
    own.tfds = ''
    own.train_split = 'train'
    own.validation_split = ''
    own.text_field = 'text'
    own.inputs = ''
    own.targets = ''
    own.metrics = ''
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
            'some (infer_eval.task), or give it metric_fns in a file of your own (data.module); '
            'training without them: infer_eval.every_steps=0'
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
        self, t5: infer.T5, task: EvaluatedTask, stop: Callable[[int], int] = lambda count: 0
    ) -> TaskResults | None:
        """Return the results of a task.

        `stop` is called with the number of batches so far. All processes must get the same answer.
        Where it is not 0 the evaluation ends and returns None.
        """
        num_batches = itertools.count(start=1)

        def progress(num_examples: int) -> None:
            if stop(next(num_batches)):
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
    depends_on = [
        [split, limit, opened.source.fingerprint, vocabulary.hash],
        sorted(settings.leaves(config.decode)),
        sorted(config.data.lengths.items()),
    ]
    if config.data.metrics:
        depends_on.append([config.data.metrics])
    examples = []
    num_trimmed = 0
    for example, is_trimmed in itertools.islice(read_examples(tokenized_task, split), limit):
        examples.append(example)
        num_trimmed += is_trimmed
    check_targets(opened.name, split, examples)
    digest = hashlib.blake2b()
    for example in examples:
        digest.update(example.inputs.tobytes() + example.targets.tobytes())
    partition.check_alike(f'the examples of {opened.name}', digest.digest())
    name = opened.name
    if split != 'validation':
        name += f'-{split}'
    return EvaluatedTask(
        task=opened.task,
        name=name,
        examples=examples,
        num_trimmed=num_trimmed,
        settings=sources.digest(depends_on),
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
    """Return the metrics of a task. Raises UserError, which names the task, where one fails."""
    targets = []
    for example in task.examples:
        targets.append(task.task.postprocess(example.targets_text, example.fields, is_target=True))
    predictions = []
    for example, answer in zip(task.examples, answers or [], strict=False):
        predictions.append(task.task.postprocess(answer, example.fields, is_target=False))
    values: dict[str, float] = {}
    for metric_fn in task.task.metric_fns:
        outputs = scores if takes_scores(metric_fn) else predictions
        assert outputs is not None
        for name, value in task.task.metric(metric_fn, list(targets), list(outputs)).items():
            if name in values:
                raise ValueError(
                    f'task {task.name!r}: two metrics give {name!r}: give each of them a name of its own'
                )
            values[name] = value
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
    return TaskResults(values, lines)


def events_of(values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under T5X's tags."""
    return {f'eval/{name}': value for name, value in values.items()}


def check_best_metric(
    metric: str, validation: data.Stream, evaluated_tasks: Sequence[EvaluatedTask]
) -> None:
    """Raise ValueError unless one of the evaluations of a run gives `save.best_metric`.

    The names of task metrics are those of the targets, taken as answers.
    """
    available = []
    for stream in validation.of_each_task():
        for tag in evaluate.validation_tags():
            available.append(best.metric_name(f'training_eval/{stream.mixture.name}', tag))
    for task in evaluated_tasks:
        run = f'{results.FOLDER}/{task.name}'
        if not metric.startswith(f'{run}/'):
            available.append(f'{run}/METRIC')
            continue
        answers = [example.targets_text for example in task.examples]
        scores = [0.0] * len(task.examples)
        for name in compute_metrics(task, answers, scores).values:
            available.append(best.metric_name(run, name))
    best.check_metric(metric, available)
