"""What a task is, mixtures of tasks with rates, and the sources of both.

tasks.py has the tasks by name. Imports no jax.
"""

import copy
import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import settings
import sources
import user_code
from objectives import OBJECTIVES
from preprocessors import text_of
from sources import NO_SPLIT, FileRecord, Source, Template

MAX_NAME_BYTES = 200  # of a task; a file's name has room for more words

# A number, or a function from the number of examples of a task.
Rate = float | Callable[[int], float]
# From the fields of a record to its examples.
PreprocessFn = Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]]
# From a text (targets, or what the model predicts), the example, and whether it is the targets.
PostprocessFn = Callable[[str, Any, bool], Any]
# (targets, predictions) or (targets, scores): {name of the metric: value}.
MetricFn = Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Where the records of a task come from, how each becomes texts, and how answers are scored.

    The fields from `files` to `targets` are the settings of that name in config.data. All others,
    such as the lengths, are the config's. A split is as data.train_split; sources.NO_SPLIT for one
    that the task has not.
    """

    name: str
    files: str = ''
    validation_files: str = ''
    kind: str = ''
    tfds: str = ''
    train_split: str = 'train'
    validation_split: str = ''
    test_split: str = ''  # '' is the split test, if there is one
    text_field: str = 'text'
    inputs: str = ''
    targets: str = ''
    # From the fields of a record to its examples: none, one or several. Each has the texts 'inputs'
    # and 'targets', and may have other fields, for `postprocess_fn`. Instead of `inputs` and
    # `targets`.
    preprocess_fn: PreprocessFn | None = None
    objective: str = 'text_to_text'  # a key of objectives.OBJECTIVES
    # Where its cache comes from, of a task that is read from its cache alone.
    cache: str = ''
    # From a text to what `metric_fns` compare. None leaves it a text.
    postprocess_fn: PostprocessFn | None = None
    metric_fns: Sequence[MetricFn] = ()

    def __post_init__(self):
        check_name(self.name)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is str and not isinstance(value, str):
                raise ValueError(
                    f'{field.name}={value!r:.60} of task {self.name!r}: must be a text'
                )
        if self.objective not in OBJECTIVES:
            raise ValueError(
                f'objective={self.objective!r} of task {self.name!r}: use one of '
                f'{", ".join(OBJECTIVES)}'
            )
        if self.kind not in settings.CHOICES['data.kind']:
            raise ValueError(
                f'kind={self.kind!r} of task {self.name!r}: use one of '
                f'{", ".join(map(repr, settings.CHOICES["data.kind"]))}'
            )
        if not isinstance(self.metric_fns, list | tuple):
            raise ValueError(
                f'metric_fns={self.metric_fns!r:.60} of task {self.name!r}: must be a list of functions'
            )
        if self.preprocess_fn is not None:
            self.check_takes('preprocess_fn', self.preprocess_fn, ['record'])
            if self.inputs or self.targets:
                raise ValueError(
                    f'task {self.name!r} has preprocess_fn and templates (inputs, targets): leave one out'
                )
        _ = self.templates  # raises ValueError for what is no template
        if self.postprocess_fn is not None:
            self.check_takes(
                'postprocess_fn', self.postprocess_fn, ['text', 'example', 'is_target']
            )
        for metric_fn in self.metric_fns:
            self.check_takes('metric_fns', metric_fn, ['targets', 'predictions'])

    def check_takes(self, field: str, function: Any, arguments: Sequence[str]) -> None:
        """Raise ValueError unless a function can be called with these arguments, in this order."""
        signature = f'{field} of task {self.name!r} takes ({", ".join(arguments)})'
        if not callable(function):
            raise ValueError(f'{field}={function!r:.60}: {signature}: give a function')
        try:
            inspect.signature(function).bind(*arguments)
        except (TypeError, ValueError) as error:
            raise ValueError(f'{field}={function!r:.60}: {signature}: {error}') from None

    def settings(self, config: Any) -> Any:
        """Return config.data with the values of this task."""
        own = copy.deepcopy(config)
        own.task = self.name
        own.files = self.files
        own.validation_files = self.validation_files
        own.kind = self.kind
        own.tfds = self.tfds
        own.train_split = self.train_split
        own.validation_split = self.validation_split
        own.text_field = self.text_field
        own.inputs = self.inputs
        own.targets = self.targets
        return own

    @functools.cached_property
    def templates(self) -> dict[str, Template]:
        """{feature: template} of `inputs` and `targets`."""
        return sources.templates_of(self)

    def preprocess(self, records: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the examples of records, {'inputs': text, 'targets': text, ...}.

        Raises UserError where `preprocess_fn` fails or gives an example without text.
        """
        for fields in records:
            if self.preprocess_fn is not None:
                yield from self.preprocess_one(self.preprocess_fn, fields)
            elif self.templates:
                yield {name: template.fill(fields) for name, template in self.templates.items()}
            else:
                yield {'inputs': '', 'targets': text_of(fields[self.text_field])}

    def preprocess_one(
        self, preprocess_fn: PreprocessFn, fields: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Return the examples of a record."""
        with user_code.running(preprocess_fn, self.name):
            given = preprocess_fn(fields)
            if isinstance(given, Mapping) or not isinstance(given, Iterable):
                raise ValueError(
                    f'preprocess_fn gave {given!r:.60}: give a list of examples, or yield them'
                )
            examples = []
            for example in given:
                check_texts(example)
                examples.append(dict(example))
            return examples

    def postprocess(
        self, text: str, example: Mapping[str, Any] | None = None, is_target: bool = False
    ) -> Any:
        """Return what the metrics compare, of targets or of a text that the model predicts.

        Raises UserError where `postprocess_fn` fails.
        """
        if self.postprocess_fn is None:
            return text
        with user_code.running(self.postprocess_fn, self.name):
            return self.postprocess_fn(text, example, is_target)

    def metric(
        self, metric_fn: MetricFn, targets: Sequence[Any], outputs: Sequence[Any]
    ) -> dict[str, float]:
        """Return the values of one of `metric_fns`. `outputs`: predictions or scores.

        Raises UserError where it fails or gives no numbers; nan is one.
        """
        with user_code.running(metric_fn, self.name):
            given = metric_fn(targets, outputs)
            check_values(given)
            return {name: float(value) for name, value in given.items()}


class Splits(NamedTuple):
    """The splits of a data set that a task has, as data.train_split; NO_SPLIT for none."""

    train: str = 'train'
    validation: str = 'validation'
    test: str = 'test'


ALL_SPLITS = Splits()
NO_TRAIN = Splits(train=NO_SPLIT)
NO_TEST = Splits(test=NO_SPLIT)
ONLY_TRAIN = Splits(validation=NO_SPLIT, test=NO_SPLIT)
ONLY_TEST = Splits(train=NO_SPLIT, validation=NO_SPLIT)


def supervised(
    name: str,
    tfds: str,
    preprocess_fn: PreprocessFn,
    metric_fns: Sequence[MetricFn] = (),
    postprocess_fn: PostprocessFn | None = None,
    splits: Splits = ALL_SPLITS,
    objective: str = 'text_to_text',
) -> Task:
    """Return a task on some splits of a data set."""
    return Task(
        name,
        tfds=tfds,
        train_split=splits.train,
        validation_split=splits.validation,
        test_split=splits.test,
        preprocess_fn=preprocess_fn,
        objective=objective,
        postprocess_fn=postprocess_fn,
        metric_fns=metric_fns,
    )


def check_texts(example: Any) -> None:
    """Raise ValueError unless a user's function gave an example."""
    if not isinstance(example, Mapping) or 'targets' not in example:
        raise ValueError(
            f"preprocess_fn gave {example!r:.60}: give {{'inputs': ..., 'targets': ...}}"
        )
    for name in ('inputs', 'targets'):
        if not isinstance(example.get(name, ''), str):
            raise ValueError(
                f'preprocess_fn gave {name!r} as {example[name]!r:.40}, no text: give a str'
            )


def check_values(given: Any) -> None:
    """Raise ValueError unless a user's metric gave numbers by name."""
    if not isinstance(given, Mapping):
        raise ValueError(f"a metric gave {given!r:.60}: give {{'name': number}}")
    for name, value in given.items():
        is_number = hasattr(value, '__float__') and getattr(value, 'ndim', 0) == 0
        if not isinstance(name, str) or not is_number:
            raise ValueError(
                f"a metric gave {name!r:.60} as {value!r:.40}: give {{'name': number}}"
            )


def check_name(name: Any) -> None:
    """Raise ValueError for the name of a task or mixture after which no file can be named.

    A colon in it is a folder.
    """
    is_text = isinstance(name, str) and name.isprintable() and name == name.strip()
    if is_text and not set(name) & set('/\\,') and len(name.encode()) <= MAX_NAME_BYTES:
        if all(part and not part.startswith('.') for part in name.split(':')):
            return
    raise ValueError(
        f'name={name!r:.60}: files are named after a task or mixture: use a text of at most '
        f'{MAX_NAME_BYTES} bytes without / \\ comma and control characters, without spaces around it, '
        'that does not begin with a dot'
    )


def proportional(
    maximum: float | None = None, temperature: float = 1.0, scale: float = 1.0
) -> Callable[[int], float]:
    """Return the rate of a task by its number of examples.

    That is min(examples * scale, maximum)^(1 / temperature): the limit comes before the
    temperature. Source: seqio/utils.py `mixing_rate_num_examples`; T5 (Raffel et al. 2020) §3.5.2.
    """
    settings = {'maximum': maximum, 'temperature': temperature, 'scale': scale}
    for name, value in settings.items():
        if value is None and name == 'maximum':
            continue
        if not isinstance(value, numbers.Real) or not value > 0:
            raise ValueError(f'{name}={value!r}: must be a number above 0')

    def rate(num_examples: int) -> float:
        limited = num_examples * scale
        if maximum is not None:
            limited = min(limited, maximum)
        return limited ** (1 / temperature)

    return rate


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Tasks and mixtures, or their names, with rates.

    The tasks of a mixture within share its rate.
    """

    name: str
    members: Mapping[Any, Rate]  # of str, Task or Mixture

    def __post_init__(self):
        check_name(self.name)
        if not isinstance(self.members, Mapping):
            raise ValueError(
                f'mixture {self.name!r} has members={self.members!r:.60}: give {{task: rate}}'
            )
        if not self.members:
            raise ValueError(f'mixture {self.name!r} has no task: name one with its rate')
        for member, rate in self.members.items():
            if not isinstance(member, str | Task | Mixture):
                raise ValueError(
                    f'mixture {self.name!r} has the member {member!r:.60}: use names, Task and Mixture'
                )
            if not callable(rate):
                self.checked(repr(getattr(member, 'name', member)), rate)
        if not any(self.members.values()):
            raise ValueError(f'mixture {self.name!r}: all rates are 0: give one task a rate')

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks, by name, of a mixture in which all names are looked up."""
        found: dict[str, Task] = {}
        for member in self.members:
            if isinstance(member, Task):
                found[member.name] = member
            elif isinstance(member, Mixture):
                found |= member.tasks
        return found

    @property
    def tasks_by_size(self) -> set[str]:
        """The names of the tasks whose rate depends on their number of examples."""
        found = set()
        for member, rate in self.members.items():
            if isinstance(member, Mixture):
                found |= member.tasks_by_size
            elif callable(rate):
                found.add(member if isinstance(member, str) else member.name)
        return found

    def rates(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return the rate of each task, not normalized, the same task's rates summed.

        `sizes`: the number of examples of each task whose rate depends on it. Raises ValueError for
        a rate that is no number of 0 or more, and if all are 0.
        """
        total: dict[str, float] = {}
        for member, rate in self.members.items():
            if isinstance(member, Mixture):
                shares = member.shares(sizes)
                weight = self.weight_of(member, rate)
            else:
                name = member.name if isinstance(member, Task) else member
                shares = {name: 1.0}
                weight = self.rate_of(name, rate, sizes)
            for task, share in shares.items():
                total[task] = total.get(task, 0.0) + weight * share
        if not any(total.values()):
            raise ValueError(f'mixture {self.name!r}: all rates are 0: give one task a rate')
        return total

    def shares(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return the rates divided by their sum."""
        rates = self.rates(sizes)
        total = sum(rates.values())
        return {task: rate / total for task, rate in rates.items()}

    def weight_of(self, mixture: 'Mixture', rate: Rate) -> float:
        """Return the rate of a mixture within this one."""
        if callable(rate):
            raise ValueError(
                f'mixture {self.name!r}: the rate of mixture {mixture.name!r} depends on a number '
                'of examples: give it a number'
            )
        return self.checked(f'mixture {mixture.name!r}', rate)

    def rate_of(self, task: str, rate: Rate, sizes: Mapping[str, int]) -> float:
        """Return the rate of a task as a number."""
        if not callable(rate):
            return self.checked(repr(task), rate)
        if task not in sizes:
            raise ValueError(
                f'mixture {self.name!r}: {task!r} has a rate by its number of examples, which is '
                'unknown: cache the task, or give it a number'
            )
        with user_code.running(rate, task):
            return self.checked(repr(task), rate(sizes[task]))

    def checked(self, member: str, rate: float) -> float:
        """Return `rate`, or raise ValueError."""
        if not (isinstance(rate, numbers.Real) and math.isfinite(rate) and rate >= 0):
            raise ValueError(
                f'mixture {self.name!r}: the rate of {member} is {rate!r}: use a finite number, 0 or '
                'more'
            )
        return float(rate)


# Opening their sources.


class OpenTask(NamedTuple):
    """A task whose source is open. `rate` is its share of the mixture."""

    task: Task
    source: Source
    rate: float

    @property
    def name(self) -> str:
        return self.task.name


@dataclasses.dataclass(frozen=True)
class OpenMixture:
    """What config.data.task names, open: the tasks, sorted by name. A task is a mixture of one."""

    name: str
    tasks: tuple[OpenTask, ...]
    fingerprint: str  # a run may go on with a mixture of the same fingerprint only

    @property
    def is_single(self) -> bool:
        return len(self.tasks) == 1

    @property
    def corpus(self) -> str:
        """What Source.corpus says of the tasks."""
        return ', '.join(sorted({task.source.corpus for task in self.tasks}))

    @property
    def description(self) -> str:
        """One line: the source of a task, or the rates of a mixture."""
        if self.is_single:
            return self.tasks[0].source.description
        rates = [f'{task.name} {task.rate:.3g}' for task in self.tasks]
        return f'mixture of {len(self.tasks)} tasks: {settings.first_ten(rates)}'

    @property
    def files(self) -> list[FileRecord]:
        """The files of all tasks."""
        return [file for task in self.tasks for file in task.source.files]

    def files_as_json(self) -> list[dict[str, Any]]:
        """Return the files of all tasks, as `sources.describe_changes` takes them."""
        return [file for task in self.tasks for file in task.source.files_as_json()]

    def going_on(
        self, old: Sequence[FileRecord], fingerprint: str, step: int
    ) -> 'OpenMixture | None':
        """Return the mixture with its files cut as in a run whose `files` were `old` at `step`.

        `fingerprint`: of that run. None unless at most the text in its files has changed.
        """
        tasks = []
        tasks_then = []
        first = 0
        for task in self.tasks:
            own = old[first : first + len(task.source.files)]
            first += len(own)
            source = task.source.going_on(own, step)
            if source is None:
                return None
            tasks.append(task._replace(source=source))
            if source.parser is not None:
                then = sources.fingerprint_of_files(own, source.parser)
                source = dataclasses.replace(source, fingerprint=then)
            tasks_then.append(task._replace(source=source))
        is_same = fingerprint in (fingerprint_of(tasks_then), tasks_then[0].source.fingerprint)
        if first < len(old) or not is_same:
            return None
        return dataclasses.replace(self, tasks=tuple(tasks))

    def faults(self) -> tuple[list[str], int]:
        """Return the lines left out since the last call, and the number of all."""
        descriptions = []
        total = 0
        for task in self.tasks:
            new, count = task.source.faults()
            descriptions += new
            total += count
        return descriptions, total


def tasks_of(found: Task | Mixture) -> dict[str, Task]:
    """Return the tasks that a name stands for, by name."""
    if isinstance(found, Task):
        return {found.name: found}
    return found.tasks


def open_sources(found: Task | Mixture, config: Any) -> OpenMixture:
    """Open the source of a task, or those of a mixture in which all names are looked up.

    Raises ValueError for rates and sources that are not valid.
    """
    if isinstance(found, Task):
        tasks = [OpenTask(found, open_task(found, config), rate=1.0)]
    else:
        tasks = open_tasks(found, config)
    return OpenMixture(found.name, tuple(tasks), fingerprint_of(tasks))


def open_tasks(mixture: Mixture, config: Any) -> list[OpenTask]:
    """Open the sources of a mixture whose names are looked up, for training.

    Tasks of rate 0 and tasks without a split for training are left out.
    """
    if all(task.train_split == NO_SPLIT for task in mixture.tasks.values()):
        raise ValueError(
            f'mixture {mixture.name!r} is for evaluation alone: train on a mixture whose tasks have a '
            'training split'
        )
    opened = {}
    sizes = {}
    for name in sorted(mixture.tasks_by_size):
        sizes[name] = 0
        if mixture.tasks[name].train_split != NO_SPLIT:
            opened[name] = open_task(mixture.tasks[name], config)
            num_records = opened[name].train.count_records()
            if num_records is None:
                del sizes[name]
            else:
                sizes[name] = num_records
    rates = {}
    for name, rate in sorted(mixture.rates(sizes).items()):
        if rate > 0 and mixture.tasks[name].train_split != NO_SPLIT:
            rates[name] = rate
    if not rates:
        raise ValueError(
            f'mixture {mixture.name!r} has no task to train on: give one with a training split a rate'
        )
    total = sum(rates.values())
    tasks = []
    for name, rate in rates.items():
        task = mixture.tasks[name]
        source = opened.get(name) or open_task(task, config)
        tasks.append(OpenTask(task, source, rate / total))
    return tasks


def fingerprint_of(tasks: Sequence[OpenTask]) -> str:
    """Return a hash of the texts and the rates of tasks; a function's code is not in it."""
    content: list[Any] = []
    for task, source, rate in tasks:
        content.append([task.name, task.objective, task.inputs, task.targets])
        content.append([source.fingerprint, round(rate, 12)])
    return sources.digest(content)


def open_task(task: Task, config: Any) -> Source:
    """Open the source of a task. Raises ValueError that names the task, where its data set is missing."""
    check_cache(task, config)
    try:
        return sources.open_source(
            task.settings(config),
            whole_records=task.preprocess_fn is not None,
            test_split=task.test_split,
        )
    except ValueError as error:
        if task.tfds and task.tfds != config.tfds:  # the settings do not name it
            raise ValueError(f'data.task={task.name!r}: {error}') from None
        raise


def check_cache(task: Task, config: Any) -> None:
    """Raise ValueError for a task that is read from its cache alone, if that is not there."""
    if not task.cache:
        return
    if task.files or task.validation_files or task.tfds:
        raise ValueError(
            f'data.task={task.name!r} is read from its cache alone, and the settings name files or a '
            "data set: set data.files, data.validation_files and data.tfds to ''"
        )
    if sources.find_cache(config, task.name) is None:
        raise ValueError(
            f'data.task={task.name!r} is read from its cache, and data.cache_dirs='
            f'{config.cache_dirs!r} holds none (data.use_cached={config.use_cached!r}): put '
            f'{task.cache} into a folder, and name that folder with data.cache_dirs'
        )
