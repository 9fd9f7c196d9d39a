"""Task metrics: of the model's answers to the inputs of a split, or of its scores of the targets.

Training computes them on the way ("inference_eval"), and `--mode=evaluate` for checkpoints. Source:
SeqIO seqio/evaluation.py.
"""

import contextlib
import dataclasses
import difflib
import functools
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

import infer
import model
import partition
import tasks.open
import validation
from configs import check
from formats import best
from messages import Refused, first_ten
from model import T5Config
from paths import AnyPath
from randomness import digest
from run import results
from run.agreement import check_alike
from run.console import Console, describe_trimming
from run.decoding import decoding_of
from run.examples import PRETOKENIZED, Example, TextChanges, read_split, text_changes
from sources import FEATURES
from stream import OpenTask, Stream, TokenizedTask
from tasks import metrics
from tasks.mixtures import MetricFn, Task
from tasks.preprocessors import UNKNOWN
from vocabulary import Vocabulary

FIRST_TEXTS = 100  # training examples per task, compared if no task is evaluated


class TaskMetrics(NamedTuple):
    """The metrics of a task in a run. Its tasks share the model that answers."""

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
        return self.task.config.infer_eval.every_steps

    def __call__(
        self, params: Mapping[str, jax.Array], step: int, stop: Callable[[int], int]
    ) -> dict[str, float] | None:
        """Evaluate parameters, write and report the results, and return them under T5X's tags.

        Returns None if `stop`, see `EvaluatedTask.results`, ends the evaluation.
        """
        self.t5.arrays = model.merge_adapters(self.model_config, params)
        found = self.task.results(self.t5, stop)
        self.t5.arrays = {}
        if found is None:
            return None
        partition.in_all(
            lambda: write_results(self.workdir, self.task, step, found, self.console.line)
        )
        self.console.line(self.task.describe(step, found.values))
        return self.task.events(found.values)


class EvaluatedTask(NamedTuple):
    """The examples of a split of a task, and what their results are called."""

    task: Task
    name: str
    split: str
    examples: list[Example]
    vocabulary: Vocabulary
    config: ConfigDict
    settings: str  # hashes of what the results depend on: files and settings; the examples
    decoding: infer.Decoding = infer.Decoding()
    changes: TextChanges | None = None  # to the texts, by the vocabulary
    limits: Mapping[str, 'Limit'] = {}  # by metric; only of those that the changes make worse

    def postprocess(self, text: str, example: Example, is_target: bool) -> object:
        """Return what metrics compare of a text, the targets or an answer of an example."""
        assert example.targets is not None
        fields = {**example.fields, 'num_target_tokens': len(example.targets)}
        return self.task.postprocess(text, fields, is_target=is_target)

    def target(self, example: Example) -> object:
        """Return what metrics compare of the targets of an example."""
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
        batch_size = self.config.infer_eval.batch_size
        try:
            if not all(map(takes_scores, self.task.metric_fns)):
                found = infer.in_batches(
                    functools.partial(infer.answer_batch, t5, self.decoding),
                    [infer.Example(x.inputs, number=i) for i, x in enumerate(self.examples)],
                    batch_size,
                    progress,
                )
                answers = [answer.texts[0] for answer in found]
            if any(map(takes_scores, self.task.metric_fns)):
                scores = score(t5, self.examples, batch_size, progress)
        except Stopped:
            return None
        return compute_metrics(self, answers, scores)

    def describe(self, step: int, values: Mapping[str, float]) -> str:
        """Return a small table of metrics, and what the vocabulary changes of the texts."""
        if self.changes is None:
            return results.describe(step, self.split, self.name, values, notes={})
        targets = self.changes.changed('targets')
        notes = {}
        for metric, limit in self.limits.items():
            notes[metric] = (
                f', of {limit.side} {limit.value:,.3f}: {targets} change in the vocabulary'
            )
        table = results.describe(step, self.split, self.name, values, notes)
        return f'{table}\n{self.name}: {self.changes}'

    def events(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return metrics under T5X's tags, and what the vocabulary changes of the texts, if anything."""
        events = {f'eval/{name}': value for name, value in values.items()}
        if self.changes is not None:
            for feature, count in self.changes.num_changed.items():
                events[f'num_{feature}_changed'] = count
            events['num_unknown_tokens'] = self.changes.num_unknown_tokens
        for name, limit in self.limits.items():
            events[f'eval_limit/{name}'] = limit.value
        return events


class Limit(NamedTuple):
    """The value of a metric for the targets as the vocabulary decodes them: no answer has a better one."""

    value: float
    side: str  # 'at most' or 'at least'


class TaskResults(NamedTuple):
    """The values of a task's metrics, and a line of `results.Results` for each example."""

    values: dict[str, float]
    lines: list[dict[str, object]]


class Stopped(Exception):
    """A signal ended an evaluation."""


# Opening and reading the tasks.


def open_tasks(config: ConfigDict, split: str) -> list[OpenTask]:
    """Open the sources of the tasks of infer_eval.task, or of data.task, that can be evaluated.

    Of a mixture the tasks without metrics or without the split are left out. Raises Refused if none is left.
    """
    if config.decode.num_return > 1:
        raise Refused(f'decode.num_return={config.decode.num_return}: an evaluation needs 1')
    decoding_of(config.decode)  # raises Refused for options that do not fit together
    opened: dict[str, OpenTask] = {}
    for name in (config.infer_eval.task or config.data.task).split(','):
        data_config = tasks.open.settings_of_task(config.data, name.strip())
        of_name = {}
        for task in tasks.open.tasks_of(tasks.open.find(data_config)).values():
            if task.metric_fns and task.takes_inputs:
                source = tasks.open.open_task(task, data_config)
                if source.may_hold(split):
                    of_name[task.name] = tasks.open.opened_task(task, source)
        if not of_name:
            raise Refused(
                f'infer_eval.task={name.strip()!r} has no metrics, no inputs or no split {split!r}: name another task'
            )
        opened |= of_name
    return list(opened.values())


def read_tasks(
    config: ConfigDict,
    split: str,
    vocabulary: Vocabulary,
    opened: Sequence[OpenTask],
    report: Callable[[str], object],
) -> list[EvaluatedTask]:
    """Read the examples of tasks, and report what the vocabulary and the metrics do to them."""
    decoding = decoding_of(config.decode, vocabulary)
    infer.words_of(decoding, vocabulary, config.model.vocab_size)  # raises Refused
    found = []
    for open_task in opened:
        task = read_task(open_task, config, split, vocabulary, decoding)
        num_trimmed = sum(example.is_trimmed for example in task.examples)
        for line in describe_trimming({task.name: [len(task.examples), num_trimmed]}):
            report(line)
        if task.changes is not None:
            report(f'{task.name}: {task.changes}')
        for line in describe_tokens(task):
            report(line)
        found.append(task)
    return found


def changes_of_first_texts(training: Sequence[TokenizedTask]) -> Iterator[str]:
    """Yield what the vocabulary changes of the first training texts of each task from text to text."""
    for task in training:
        if not task.task.takes_inputs:
            continue
        examples: list[Example] = []
        with contextlib.suppress(Exception):  # of a record: training raises it again at its step
            examples.extend(read_split(task, 'train', FIRST_TEXTS))
        changes = text_changes(examples, task.vocabulary)
        if changes is not None:
            yield f'{task.name}, the first {len(examples)} training examples: {changes}'


def read_task(
    opened: OpenTask,
    config: ConfigDict,
    split: str,
    vocabulary: Vocabulary,
    decoding: infer.Decoding,
) -> EvaluatedTask:
    """Read the examples of a split of a task, at most infer_eval.num_examples."""
    tokenized_task = TokenizedTask(opened, config.data, vocabulary)
    limit = config.infer_eval.num_examples or None
    depends_on = [
        [split, limit, opened.source.fingerprint, vocabulary.hash],
        sorted(check.leaves(config.decode)),
        sorted(config.data.lengths.items()),
    ]
    if config.data.metrics:
        depends_on.append([config.data.metrics])
    is_ranked = any(map(takes_scores, opened.task.metric_fns))
    examples = list(read_split(tokenized_task, split, limit, with_choices=is_ranked))
    texts = {example.text('targets', vocabulary) for example in examples}
    if texts <= {'', UNKNOWN}:
        raise Refused(f'task {opened.name!r} has no target in split {split!r}: name another split')
    content = hashlib.blake2b(digest_size=16)
    for example in examples:
        assert example.targets is not None
        content.update(example.inputs.tobytes() + example.targets.tobytes())
    check_alike(f'the examples of {opened.name}', content.digest())
    name = opened.name
    if split != 'validation':
        name += f'-{split}'
    task = EvaluatedTask(
        opened.task,
        name,
        split,
        examples,
        vocabulary,
        config,
        decoding=decoding,
        settings=f'{digest(depends_on)} {content.hexdigest()}',
        changes=text_changes(examples, vocabulary),
    )
    for example in examples:
        task.target(example)  # fails before the run begins, if it does
    return task._replace(limits=limits_of(task))


def decoded_targets(task: EvaluatedTask) -> list[str]:
    """Return the targets of a task as its vocabulary decodes them: the answers of a perfect model."""
    texts = [example.text('targets', task.vocabulary) for example in task.examples]
    return list(map(task.vocabulary.decode, task.vocabulary.encode_as_arrays(texts)))


def metrics_of_answers(task: EvaluatedTask, answers: Sequence[str]) -> dict[str, float]:
    """Return the metrics of a task that are of answers, and not of scores."""
    metric_fns = [metric_fn for metric_fn in task.task.metric_fns if not takes_scores(metric_fn)]
    of_answers = task._replace(task=dataclasses.replace(task.task, metric_fns=metric_fns))
    return compute_metrics(of_answers, answers, scores=None).values


def limits_of(task: EvaluatedTask) -> dict[str, Limit]:
    """Return the limit of each metric that what the vocabulary changes of the targets makes worse."""
    if task.changes is None:
        return {}
    try:
        targets = [example.text('targets', task.vocabulary) for example in task.examples]
        of_targets = metrics_of_answers(task, targets)
        of_decoded = metrics_of_answers(task, decoded_targets(task))
    except Exception:  # the metric cannot take these answers
        return {}
    limits = {}
    for name, value in of_decoded.items():
        if value < of_targets[name]:
            limits[name] = Limit(value, 'at most')
        elif value > of_targets[name]:
            limits[name] = Limit(value, 'at least')
    return limits


TOKENIZERS = {
    'rouge': "data.metrics='rouge:unicode', or functools.partial(metrics.rouge, tokenizer='unicode')",
    'bleu': "data.metrics='bleu:zh', 'bleu:ja-mecab' or 'bleu:char', or functools.partial(metrics.bleu, tokenizer='zh')",
}


def describe_tokens(task: EvaluatedTask) -> Iterator[str]:
    """Yield a line for `bleu` and `rouge` if their tokenizers find no words in some targets."""
    texts = [text for text in map(task.target, task.examples) if isinstance(text, str)]
    for metric_fn in task.task.metric_fns:
        tokenizer = metrics.tokenizer_of(metric_fn)
        if tokenizer is None or not texts:
            continue
        missed = [text for text in texts if tokenizer.misses_words(text)]
        if missed:
            yield (
                f'{len(missed):,} of {len(texts):,} targets of {task.name} have letters in which '
                f'{tokenizer.metric} with tokenizer={tokenizer.name!r} finds no words, such as '
                f'{missed[0]!r:.60}: right answers score too little; use {TOKENIZERS[tokenizer.metric]}.'
            )
        elif tokenizer.metric == 'bleu' and all(len(tokenizer.tokens(x)) < 4 for x in texts):
            yield (
                f'No target of {task.name} has 4 tokens, which bleu needs: right answers have bleu 0; use '
                "accuracy, or data.metrics='bleu:char'."
            )


def takes_scores(metric_fn: MetricFn) -> bool:
    """Return whether a metric takes the scores of the targets, and not predictions."""
    return 'scores' in inspect.signature(metric_fn).parameters


def score(
    t5: infer.T5, examples: Sequence[Example], batch_size: int, progress: Callable[[int], None]
) -> list[float]:
    """Return the targets' log-likelihoods in nats. Neighbours with the same inputs are choices of one input."""
    choices = []
    for _, group in itertools.groupby(examples, key=lambda example: example.inputs.tobytes()):
        same_inputs = list(group)
        for start in range(0, len(same_inputs), batch_size):
            part = same_inputs[start : start + batch_size]
            targets = [example.targets for example in part if example.targets is not None]
            choices.append(infer.Example(part[0].inputs, targets))
    most_choices = max(len(example.targets) for example in choices)

    score_batch = functools.partial(infer.score_batch, t5)
    scores = infer.in_batches(score_batch, choices, max(batch_size // most_choices, 1), progress)
    return np.concatenate(list(scores)).tolist()


def compute_metrics(
    task: EvaluatedTask, answers: Sequence[str] | None, scores: Sequence[float] | None
) -> TaskResults:
    """Return the metrics of a task."""
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
    found: TaskResults,
    report: Callable[[str], object],
) -> bool:
    """Write a task's results in the first process, or report that there are others. Return whether it wrote."""
    if jax.process_index() > 0:
        return False
    kept = results.Results(folder)
    is_written = kept.write(task.name, step, found.values, found.lines, task.settings)
    if not is_written:
        report(
            f'Step {step:,}: {kept.folder} keeps its results of {task.name}, which other files or '
            'settings gave; these are not written there.'
        )
    kept.write_table()
    return is_written


def check_best_metric(
    config: ConfigDict, held_out: Stream, evaluated_tasks: Sequence[EvaluatedTask]
) -> None:
    """Raise Refused unless one of the evaluations of a run gives `save.best_metric`, and can exceed 0 if it has to.

    The names of task metrics are those of the targets, taken as answers.
    """
    metric = config.save.best_metric
    available = []
    for stream in held_out.of_each_task():
        for tag in validation_tags(config):
            available.append(best.metric_name(f'training_eval/{stream.mixture.name}', tag))
    for task in evaluated_tasks:
        run = f'{results.FOLDER}/{task.name}'
        if not metric.startswith(f'{run}/'):
            available.append(f'{run}/METRIC')
            continue
        answers = decoded_targets(task)
        scores = [0.0] * len(task.examples)
        for name in compute_metrics(task, answers, scores).values:
            available.append(best.metric_name(run, name))
            is_chosen = available[-1] == metric and config.save.best_is == 'higher'
            if is_chosen and cannot_exceed_zero(task, name, answers):
                raise Refused(
                    f'save.best_metric={metric!r} is at most 0, even for the targets: name a loss, or data.vocabulary'
                )
    if metric not in available:
        nearest = difflib.get_close_matches(metric, available, n=len(available), cutoff=0)
        raise Refused(f'save.best_metric={metric!r}: this run has {first_ten(nearest)}: name one')


def cannot_exceed_zero(task: EvaluatedTask, name: str, best_answers: Sequence[str]) -> bool:
    """Return whether a metric of answers is 0 for the best ones, and not less for empty ones."""
    limit = metrics_of_answers(task, best_answers).get(name, math.inf)
    if not limit <= 0:
        return False
    with contextlib.suppress(Exception):  # the metric cannot take empty answers
        return not metrics_of_answers(task, [''] * len(best_answers))[name] < limit
    return True


def validation_tags(config: ConfigDict) -> list[str]:
    """Return the names of the metrics that an `Evaluation` returns."""
    tags = list(validation.summarize([dict.fromkeys(validation.sum_names(), 0.0)], config))
    for name in ('nats_per_text_token', 'nats_per_target_token'):
        tags += [name, f'unigram_{name}']
    return tags
