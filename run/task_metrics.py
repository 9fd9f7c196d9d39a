"""Task metrics of a model's answers to the inputs of a split, or of its scores of the targets.

Computed during training ("inference_eval") and by `--mode=evaluate`. Source: SeqIO seqio/evaluation.py.
"""

import difflib
import functools
import hashlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import infer
import model
import tasks.open
import user_code
import validation
from answers import words
from answers.options import SETTINGS, Decoding
from configs import check
from families import lora
from formats import best
from loss import LossConfig
from messages import Refused, first_ten
from model import T5Config
from paths import AnyPath
from randomness import digest
from run import results
from run.agreement import check_alike, in_all
from run.console import Console, describe_trimming
from run.examples import PRETOKENIZED, RecordExample, read_split
from sources import FEATURES
from stream import OpenTask, Stream, TokenizedTask
from tasks.mixtures import MetricFn, Task
from tasks.preprocessors import UNKNOWN
from vocabulary import Vocabulary


class TaskMetrics(NamedTuple):
    """The metrics of a task in a run. All tasks share one model, `t5`."""

    task: 'EvaluatedTask'
    model_config: T5Config  # for the run's parameters, adapters included
    t5: infer.T5
    workdir: AnyPath
    console: Console

    @property
    def name(self) -> str:
        return f'{results.FOLDER}/{self.task.name}'

    @property
    def every_steps(self) -> int:
        return self.task.infer_eval.every_steps

    def __call__(
        self, params: Mapping[str, jax.Array], step: int, stop: Callable[[int], int]
    ) -> dict[str, float] | None:
        """Evaluate parameters, write and report the results, and return them under T5X's tags.

        Returns None if `stop`, see `EvaluatedTask.results`, ends the evaluation.
        """
        self.t5.arrays = lora.merge(self.model_config, params)
        result = self.task.results(self.t5, stop)
        self.t5.arrays = {}
        if result is None:
            return None
        in_all(lambda: write_results(self.workdir, self.task, step, result, self.console.line))
        self.console.line(results.describe(step, self.task.split, self.task.name, result.values))
        return result.events()


def of_run(
    tasks: 'Sequence[EvaluatedTask]',
    model_config: T5Config,
    mesh: Mesh,
    workdir: AnyPath,
    console: Console,
) -> list[TaskMetrics]:
    """Return the metrics of tasks in a run. Their model has no adapters; each evaluation sets its parameters."""
    if not tasks:
        return []
    params = {}
    for path, shape in model.shapes(model_config).items():
        params[path] = jax.ShapeDtypeStruct(shape, np.float32)
    merged = jax.eval_shape(functools.partial(lora.merge, model_config), params)
    base = lora.without_adapters(model_config)
    t5 = infer.T5(base, merged, mesh, tasks[0].vocabulary)
    return [TaskMetrics(task, model_config, t5, workdir, console) for task in tasks]


class EvaluatedTask(NamedTuple):
    """The examples of a split of a task, and the name of their results."""

    task: Task
    name: str
    split: str
    examples: list[RecordExample]
    vocabulary: Vocabulary
    infer_eval: ConfigDict
    settings: str  # hashes of the files, settings and examples behind the results
    decoding: infer.Decoding = infer.Decoding()

    def postprocess(self, text: str, example: RecordExample, is_target: bool) -> object:
        """Convert a text, an example's targets or an answer to it, to the value that metrics compare."""
        assert example.targets is not None
        fields = {**example.fields, 'num_target_tokens': len(example.targets)}
        return self.task.postprocess(text, fields, is_target=is_target)

    def target(self, example: RecordExample) -> object:
        """Return the value that metrics compare with answers to an example."""
        return self.postprocess(example.text('targets', self.vocabulary), example, is_target=True)

    def results(
        self, t5: infer.T5, stop: Callable[[int], int] = lambda count: 0
    ) -> 'TaskResults | None':
        """Return the results of a model.

        `stop` is called with the number of batches so far. All processes must get the same answer.
        If it is not 0, the evaluation ends and returns None.
        """
        num_batches = itertools.count(start=1)

        def progress(num_examples: int) -> None:
            if stop(next(num_batches)):
                raise Stopped

        answers = None
        scores = None
        batch_size = self.infer_eval.batch_size
        try:
            if not all(map(takes_scores, self.task.metric_fns)):
                results = infer.in_batches(
                    functools.partial(infer.answer_batch, t5, self.decoding),
                    [
                        infer.Question(x.inputs, number=i, numbers=x.numbers)
                        for i, x in enumerate(self.examples)
                    ],
                    batch_size,
                    progress,
                )
                answers = [answer.texts[0] for answer in results]
            if any(map(takes_scores, self.task.metric_fns)):
                scores = score(t5, self.examples, batch_size, progress)
        except Stopped:
            return None
        return compute_metrics(self, answers, scores)


class TaskResults(NamedTuple):
    """The values of a task's metrics, and a line of `results.Results` for each example."""

    values: dict[str, float]
    lines: list[dict[str, object]]

    def events(self) -> dict[str, float]:
        """Return the values under T5X's tags."""
        return {f'eval/{name}': value for name, value in self.values.items()}


class Stopped(Exception):
    """A signal ended an evaluation."""


# Opening and reading the tasks.


def decoding_of(
    decode: ConfigDict, vocabulary: Vocabulary | None = None, vocab_size: int = 0
) -> Decoding:
    """Return the options of config.decode.

    Without a vocabulary, its texts are not checked, and its module's filters are left out.
    """
    options = {name: decode[name] for name in SETTINGS}
    if decode.module:
        file = user_code.module_file('decode.module', decode.module)
        module = user_code.load_module(file, file.read_bytes())
        if not hasattr(module, 'filters'):
            raise Refused(f'decode.module={decode.module!r}: {file} has no function filters')
        if vocabulary is not None:
            options['filters'] = tuple(module.filters(vocabulary))
    decoding = Decoding(**options)
    if decoding.is_allowed_per_input:
        raise Refused(f'decode.allowed={decoding.allowed}: name texts, the same for all inputs')
    decoding.check()
    if vocabulary is not None:
        words.words_of(decoding, vocabulary, vocab_size)  # raises Refused
    return decoding


def open_tasks(
    data_group: ConfigDict, infer_eval: ConfigDict, decode: ConfigDict
) -> list[OpenTask]:
    """Open the sources of the tasks of infer_eval.task, or of data.task, that can be evaluated.

    Skips the tasks of a mixture without metrics or without the split. Raises Refused if none is left.
    """
    split = infer_eval.split
    if decode.num_return > 1:
        raise Refused(f'decode.num_return={decode.num_return}: an evaluation needs 1')
    decoding_of(decode)  # raises Refused for options that do not fit together
    opened: dict[str, OpenTask] = {}
    for name in (infer_eval.task or data_group.task).split(','):
        task_settings = tasks.open.settings_of_task(data_group, name.strip())
        matches = {}
        for task in tasks.open.tasks_of(tasks.open.find(task_settings)).values():
            if task.metric_fns and task.takes_inputs:
                open_task = tasks.open.open_task(task, task_settings)
                if open_task.source.may_hold(split):
                    matches[task.name] = open_task
        if not matches:
            raise Refused(
                f'infer_eval.task={name.strip()!r} has no metrics, no inputs or no split {split!r}: name another task'
            )
        opened |= matches
    return list(opened.values())


def read_tasks(
    console: Console,
    opened: Sequence[OpenTask],
    vocabulary: Vocabulary,
    data_group: ConfigDict,
    infer_eval: ConfigDict,
    decode: ConfigDict,
) -> list[EvaluatedTask]:
    """Read the examples of a split of tasks, at most infer_eval.num_examples of each; report how many were cut."""
    split = infer_eval.split
    limit = infer_eval.num_examples or None
    decoding = decoding_of(decode, vocabulary, vocabulary.size)
    evaluated = []
    for open_task in opened:
        tokenized_task = TokenizedTask(open_task, data_group, vocabulary)
        depends_on = [
            [split, limit, open_task.source.fingerprint, vocabulary.hash],
            sorted(check.leaves(decode)),
            sorted(data_group.lengths.items()),
        ]
        if data_group.metrics:
            depends_on.append([data_group.metrics])
        is_ranked = any(map(takes_scores, open_task.task.metric_fns))
        with console.working(f'Reading the examples of {open_task.name}'):
            examples = list(read_split(tokenized_task, split, limit, with_choices=is_ranked))
        texts = {example.text('targets', vocabulary) for example in examples}
        name = open_task.name
        if texts <= {'', UNKNOWN}:
            raise Refused(f'task {name!r} has no target in split {split!r}: name another split')
        content = hashlib.blake2b(digest_size=16)
        for example in examples:
            assert example.targets is not None
            content.update(example.inputs.tobytes() + example.targets.tobytes())
        check_alike(f'the examples of {name}', content.digest())
        if split != 'validation':
            name += f'-{split}'
        settings = f'{digest(depends_on)} {content.hexdigest()}'
        task = EvaluatedTask(
            open_task.task, name, split, examples, vocabulary, infer_eval, settings, decoding
        )
        for example in examples:
            task.target(example)  # an error should end the run before it begins
        num_trimmed = sum(example.is_trimmed for example in examples)
        for line in describe_trimming({name: [len(examples), num_trimmed]}):
            console.line(line)
        evaluated.append(task)
    return evaluated


def takes_scores(metric_fn: MetricFn) -> bool:
    """Return whether a metric takes the scores of the targets instead of predictions."""
    return 'scores' in inspect.signature(metric_fn).parameters


def score(
    t5: infer.T5,
    examples: Sequence[RecordExample],
    batch_size: int,
    progress: Callable[[int], None],
) -> list[float]:
    """Return the targets' log-likelihoods in nats. Adjacent examples with the same inputs are choices of one input."""
    choices = []
    for _, group in itertools.groupby(examples, lambda x: (x.inputs.tobytes(), x.numbers)):
        same_inputs = list(group)
        for start in range(0, len(same_inputs), batch_size):
            part = same_inputs[start : start + batch_size]
            targets = [example.targets for example in part if example.targets is not None]
            choices.append(infer.Question(part[0].inputs, targets, numbers=part[0].numbers))
    most_choices = max(len(example.targets) for example in choices)

    score_batch = functools.partial(infer.score_batch, t5)
    scores = infer.in_batches(score_batch, choices, max(batch_size // most_choices, 1), progress)
    return np.concatenate(list(scores)).tolist()


def compute_metrics(
    task: EvaluatedTask, answers: Sequence[str] | None, scores: Sequence[float] | None
) -> TaskResults:
    targets = []
    predictions = []
    lines: list[dict[str, object]] = []
    for i, example in enumerate(task.examples):
        targets.append(task.target(example))
        features = example.features()
        for name in FEATURES:  # a task cache may lack these texts
            features[name + PRETOKENIZED] = example.text(name, task.vocabulary)
        line: dict[str, object] = {'input': dict(sorted(features.items())), 'target': targets[i]}
        if answers is not None:
            predictions.append(task.postprocess(answers[i], example, is_target=False))
            line |= {'output': answers[i], 'prediction': predictions[i]}
        if scores is not None:
            line['score'] = scores[i]
        lines.append(line)
    values: dict[str, float] = {}
    for metric_fn in task.task.metric_fns:
        outputs = scores if takes_scores(metric_fn) else predictions
        assert outputs is not None
        for name, value in task.task.metric(metric_fn, list(targets), list(outputs)).items():
            assert name not in values, f'two metrics of task {task.name!r} give {name!r}'
            values[name] = value
    return TaskResults(values, lines)


def write_results(
    folder: AnyPath,
    task: EvaluatedTask,
    step: int,
    result: TaskResults,
    report: Callable[[str], object],
) -> bool:
    """Write a task's results in the first process, or report that others exist. Return whether it wrote them."""
    if jax.process_index() > 0:
        return False
    store = results.Results(folder)
    is_written = store.write(task.name, step, result.values, result.lines, task.settings)
    if not is_written:
        report(
            f'Step {step:,}: {store.folder} keeps its results of {task.name}, from other files or settings; '
            'the new ones are not written.'
        )
    store.write_table()
    return is_written


def check_best_metric(
    metric: str,
    held_out: Stream,
    evaluated_tasks: Sequence[EvaluatedTask],
    loss_config: LossConfig,
) -> None:
    """Raise Refused unless an evaluation of the run computes `metric`, save.best_metric.

    The names of task metrics come from computing them with the targets as answers.
    """
    available = []
    sums = validation.sum_names(loss_config, held_out.batch_of([[]]))
    for stream in held_out.of_each_task():
        for tag in validation_tags(held_out.data_group, sums):
            available.append(best.metric_name(f'training_eval/{stream.mixture.name}', tag))
    for task in evaluated_tasks:
        run = f'{results.FOLDER}/{task.name}'
        names: Iterable[str] = ['METRIC']
        if metric.startswith(f'{run}/'):
            answers = [example.text('targets', task.vocabulary) for example in task.examples]
            names = compute_metrics(task, answers, [0.0] * len(answers)).values
        available += [best.metric_name(run, name) for name in names]
    if metric not in available:
        nearest = difflib.get_close_matches(metric, available, n=len(available), cutoff=0)
        raise Refused(f'save.best_metric={metric!r}: this run has {first_ten(nearest)}: name one')


def validation_tags(data_group: ConfigDict, sums: Iterable[str]) -> list[str]:
    """Return the names of the metrics that an `Evaluation` returns. `sums`: the names of its loss's sums."""
    zeros = dict.fromkeys(sums, 0.0)
    tags = list(validation.summarize([zeros], batch_size=1, data_group=data_group))
    for name in ('nats_per_text_token', 'nats_per_target_token'):
        tags += [name, f'unigram_{name}']
    return tags
