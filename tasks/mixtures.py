"""What a task is, and mixtures of tasks with rates. Imports no jax."""

import copy
import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import check
from data import Objective
from messages import Refused, noting
from sources import NO_SPLIT
from sources.templates import Template, templates_of
from tasks.objectives import OBJECTIVES, OwnObjective, problem_of
from tasks.preprocessors import Example, Fields, text_of
from vocabulary import Vocabulary

MAX_NAME_BYTES = 200  # leaves room for more words in a file's name

# A number, or a function from the number of examples of a task.
Rate = float | Callable[[int], float]
# From the fields of a record to its examples.
PreprocessFn = Callable[[Fields], Iterable[Example]]
# From a text (targets, or what the model predicts), the example, and whether it is the targets.
PostprocessFn = Callable[..., object]
# (targets, predictions) or (targets, scores): {name of the metric: value}.
MetricFn = Callable[..., Mapping[str, float]]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Where the records of a task come from, how each becomes texts, and how answers are scored.

    The fields from `files` to `targets` are the settings of that name in config.data. All others, such
    as the lengths, are the config's. A split is as data.train_split, or sources.NO_SPLIT where the task has none.
    """

    name: str
    files: str = ''
    validation_files: str = ''
    test_files: str = ''
    kind: str = ''
    delimiter: str = ''
    tfds: str = ''
    train_split: str = 'train'
    validation_split: str = ''
    test_split: str = ''  # '' is the split test, if there is one; test_files take precedence
    text_field: str = 'text'
    inputs: str = ''
    targets: str = ''
    references: str = ''
    # From the fields of a record to its examples: none, one or several. Each has the texts 'inputs'
    # and 'targets', and may have other fields, for `postprocess_fn`. Instead of `inputs` and
    # `targets`.
    preprocess_fn: PreprocessFn | None = None
    # A key of objectives.OBJECTIVES, or a class with the protocol data.Objective.
    objective: str | type[Objective] = 'text_to_text'
    # For a task that is read from its cache alone: where to get the cache.
    cache: str = ''
    # From a text to what `metric_fns` compare. None leaves it a text.
    postprocess_fn: PostprocessFn | None = None
    metric_fns: Sequence[MetricFn] = ()

    def __post_init__(self):
        check_name(self.name)
        for setting in (field.name for field in dataclasses.fields(self)):
            if f'data.{setting}' in check.declared():
                try:
                    check.check_value(f'data.{setting}', getattr(self, setting))
                except ValueError as error:
                    raise Refused(f'task {self.name!r}: {error}') from None
        if isinstance(self.objective, type):
            problem = problem_of(self.objective)
            if problem:
                raise self._wrong('objective', self.objective, problem)
        elif self.objective not in OBJECTIVES:
            names = ', '.join(map(repr, OBJECTIVES))
            rule = f'use one of {names}, or a class such as data.SpanCorruption'
            raise self._wrong('objective', self.objective, rule)
        _ = self.templates  # raises ValueError
        if self.preprocess_fn is not None:
            if self.templates:
                raise Refused(
                    f'task {self.name!r} has preprocess_fn and templates (inputs, targets, references): leave one out'
                )
            self._check_takes('preprocess_fn', self.preprocess_fn, 'record')
        if self.postprocess_fn is not None:
            self._check_takes('postprocess_fn', self.postprocess_fn, 'text', 'example', 'is_target')
        for metric_fn in self.metric_fns:
            self._check_takes('metric_fns', metric_fn, 'targets', 'predictions')

    def _check_takes(self, field: str, function: Callable, *arguments: str) -> None:
        """Raise ValueError unless a function can be called with these arguments, in this order."""
        try:
            inspect.signature(function).bind(*arguments)
        except (TypeError, ValueError) as error:
            rule = f'takes ({", ".join(arguments)}): {error}'
            raise self._wrong(field, function, rule) from None

    def _wrong(self, field: str, value: object, rule: str) -> ValueError:
        shown = value.__name__ if isinstance(value, type) else f'{value!r:.60}'
        return Refused(f'{field}={shown} of task {self.name!r}: {rule}')

    def settings(self, config: ConfigDict) -> ConfigDict:
        """Return config.data with the values of this task."""
        own = copy.deepcopy(config)
        own.task = self.name
        for name in settings_of_a_row(config):
            own[name] = getattr(self, name)
        return own

    @functools.cached_property
    def templates(self) -> dict[str, Template]:
        """{feature: template} of `inputs` and `targets`."""
        return templates_of(self)

    @property
    def objective_class(self) -> type[Objective]:
        return OBJECTIVES[self.objective] if isinstance(self.objective, str) else self.objective

    @property
    def objective_name(self) -> str:
        return self.objective if isinstance(self.objective, str) else self.objective.__name__

    @property
    def takes_inputs(self) -> bool:
        """Whether the task is from text to text."""
        return 'inputs' in self.objective_class.features

    def open_objective(self, config: ConfigDict, vocabulary: Vocabulary) -> Objective:
        """Return the objective for config.data. Raises Refused for settings that do not fit."""
        if isinstance(self.objective, str):
            return self.objective_class(config, vocabulary)
        return OwnObjective(self.objective, config, vocabulary)

    def preprocess(self, records: Iterable[Fields]) -> Iterator[Example]:
        """Yield the examples of records, {'inputs': text, 'targets': text, ...}."""
        for fields in records:
            if self.preprocess_fn is not None:
                yield from examples_given(self.preprocess_fn(fields))
            elif self.references:
                name = self.references[1:-1]
                given = fields[name]
                references = [given] if isinstance(given, str) else given or ['']
                texts = {**fields, name: references[0]}
                filled = {key: template.fill(texts) for key, template in self.templates.items()}
                yield {**filled, 'references': references}
            elif self.templates:
                yield {name: template.fill(fields) for name, template in self.templates.items()}
            else:
                yield {'inputs': '', 'targets': text_of(fields[self.text_field])}

    def postprocess(
        self, text: str, example: Fields | None = None, is_target: bool = False
    ) -> object:
        """Return what the metrics compare, of targets or of a predicted text."""
        if self.postprocess_fn is None:
            if self.references and is_target:
                return (example or {}).get('references', [text])
            return text
        with noting(f'task {self.name}'):
            return self.postprocess_fn(text, example, is_target)

    def metric(
        self, metric_fn: MetricFn, targets: Sequence[object], outputs: Sequence[object]
    ) -> dict[str, float]:
        """Return the values, nan included, of one of `metric_fns` for predictions or scores."""
        with noting(f'task {self.name}'):
            given = metric_fn(targets, outputs)
            pairs = given.items() if isinstance(given, Mapping) else [('', given)]
            for name, value in pairs:
                is_number = hasattr(value, '__float__') and getattr(value, 'ndim', 0) == 0
                if not name or not isinstance(name, str) or not is_number:
                    raise TypeError(
                        f"a metric gave {given!r:.60}, {name!r:.60} as {value!r:.40}: give {{'name': number}}"
                    )
            return {name: float(value) for name, value in pairs}


def examples_given(given: Iterable[Fields]) -> list[Example]:
    """Return the examples that a user's function gave. Raise ValueError if they are none."""
    rule = "give a list of {'inputs': text, 'targets': text}, or yield them"
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise TypeError(f'preprocess_fn gave {given!r:.60}: {rule}')
    examples = []
    for example in given:
        texts = [None]
        if isinstance(example, Mapping):
            texts = [example.get('inputs', ''), example.get('targets')]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f'preprocess_fn gave {example!r:.60}: {rule}')
        # Raises for half a surrogate pair, which no vocabulary takes.
        ''.join(map(str, texts)).encode()
        examples.append(dict(example))
    return examples


def check_name(name: str) -> None:
    """Raise ValueError for a name of a task or mixture that no file can have. A colon in it is a folder."""
    is_text = isinstance(name, str) and name.isprintable() and name == name.strip()
    if is_text and not set(name) & set('/\\,') and len(name.encode()) <= MAX_NAME_BYTES:
        if all(part and not part.startswith('.') for part in name.split(':')):
            return
    raise Refused(
        f'name={name!r:.60}: files are named after a task or mixture: use a text of at most '
        f'{MAX_NAME_BYTES} bytes without / \\ comma and control characters, without spaces around it, '
        'that does not begin with a dot'
    )


def settings_of_a_row(config: ConfigDict) -> dict[str, str]:
    """Return {name: default} of the fields of a Task that are settings of config.data."""
    defaults = {}
    for field in dataclasses.fields(Task):
        if isinstance(field.default, str) and field.name in config:
            defaults[field.name] = field.default
    return defaults


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
    objective: str | type[Objective] = 'text_to_text',
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


def proportional(
    maximum: float | None = None, temperature: float = 1.0, scale: float = 1.0
) -> Callable[[int], float]:
    """Return the rate of a task by its number of examples.

    That is min(examples * scale, maximum)^(1 / temperature): the limit comes before the
    temperature. Source: seqio/utils.py `mixing_rate_num_examples`; T5 (Raffel et al. 2020) §3.5.2.
    """
    limit = math.inf if maximum is None else maximum
    for name, value in {'maximum': limit, 'temperature': temperature, 'scale': scale}.items():
        if not isinstance(value, numbers.Real) or not value > 0:
            raise Refused(f'{name}={value!r}: must be a number above 0')
    return lambda num_examples: min(num_examples * scale, limit) ** (1 / temperature)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Tasks and mixtures, or their names, with rates. The tasks of a mixture within share its rate."""

    name: str
    members: Mapping[str, Rate] | Mapping['str | Task | Mixture', Rate]

    def __post_init__(self):
        check_name(self.name)
        is_of_tasks = isinstance(self.members, Mapping) and bool(self.members)
        if not is_of_tasks or not all(isinstance(x, str | Task | Mixture) for x in self.members):
            raise Refused(
                f'mixture {self.name!r} has members={self.members!r:.60}: give {{task: rate}}, where a task '
                'is a name, a Task or a Mixture'
            )
        names = [name_of(member) for member in self.members]
        if len(set(names)) < len(names):
            raise Refused(
                f'mixture {self.name!r} has members of one name ({names!r:.60}): give each a name of its own'
            )
        for member, rate in self.members.items():
            if not callable(rate):
                self._check_rate(name_of(member), rate)

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
                found.add(name_of(member))
        return found

    def rates(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return the rate of each task, not normalized, the same task's rates summed.

        `sizes`: the number of examples of each task whose rate depends on it. Raises ValueError for
        a rate that is not a number of 0 or more, and if all are 0.
        """
        total: dict[str, float] = {}
        for member, rate in self.members.items():
            name = name_of(member)
            shares = {name: 1.0}
            if isinstance(member, Mixture):
                shares = member.shares(sizes)
            if callable(rate):
                if name not in sizes:  # the sizes of mixtures are unknown, too
                    raise Refused(
                        f'mixture {self.name!r}: {name!r} has a rate by its number of examples, which '
                        'is unknown: cache the task, or give it a number'
                    )
                rate = rate(sizes[name])
                self._check_rate(name, rate)
            for task, share in shares.items():
                total[task] = total.get(task, 0.0) + float(rate) * share
        if not any(total.values()):
            raise Refused(f'mixture {self.name!r}: all rates are 0: give one task a rate')
        return total

    def shares(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return the rates divided by their sum."""
        rates = self.rates(sizes)
        total = sum(rates.values())
        return {task: rate / total for task, rate in rates.items()}

    def _check_rate(self, name: str, rate: float) -> None:
        """Raise ValueError unless the rate of a task or mixture is a number of 0 or more."""
        if not (isinstance(rate, numbers.Real) and math.isfinite(rate) and rate >= 0):
            raise Refused(
                f'mixture {self.name!r}: the rate of {name!r} is {rate!r}: use a finite number, 0 or more'
            )


def name_of(member: str | Task | Mixture) -> str:
    return member if isinstance(member, str) else member.name
