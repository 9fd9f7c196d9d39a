"""Tasks, and mixtures of tasks with rates. Imports no jax."""

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from configs import check
from data import Objective
from messages import Refused, named, noting
from sources import NO_SPLIT
from sources.templates import Template, templates_of
from tasks.objectives import OBJECTIVES, OwnObjective
from tasks.preprocessors import Fields, Texts, text_of
from vocabulary import Vocabulary

# A number, or a function from the number of examples of a task.
Rate = float | Callable[[int], float]
# From the fields of a record to its examples.
PreprocessFn = Callable[[Fields], Iterable[Texts]]
# From a text (targets or a prediction), the example, and whether it is the targets.
PostprocessFn = Callable[..., object]
# (targets, predictions) or (targets, scores): {name of the metric: value}.
MetricFn = Callable[..., Mapping[str, float]]


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Where the records of a task come from, how each becomes texts, and how answers are scored.

    The fields from `files` to `references` are the settings of that name in config.data; other settings, such as
    the lengths, are the config's. A split is like data.train_split, or sources.NO_SPLIT if the task has none.
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
    # Instead of `inputs` and `targets`: makes none, one or several examples from the fields of a record.
    # Each has the texts 'inputs' and 'targets', and may have other fields, for `postprocess_fn`.
    preprocess_fn: PreprocessFn | None = None
    # A key of objectives.OBJECTIVES, or a class with the protocol data.Objective.
    objective: str | type[Objective] = 'text_to_text'
    # For a task that is read only from its cache: where to get the cache.
    cache: str = ''
    # From a text to the value that `metric_fns` compare. None: the text itself.
    postprocess_fn: PostprocessFn | None = None
    metric_fns: Sequence[MetricFn] = ()

    def __post_init__(self):
        check_name(self.name)
        with named(f'task {self.name!r}'):
            for field in dataclasses.fields(self):
                if f'data.{field.name}' in check.declared():
                    check.check_value(f'data.{field.name}', getattr(self, field.name))
            has_two = self.templates and self.preprocess_fn is not None
        assert not has_two, f'task {self.name!r} has preprocess_fn and targets: leave one out'
        # A metric with other arguments raises Python's TypeError here, not at the first evaluation.
        with noting(f'task {self.name}'):
            for metric_fn in self.metric_fns:
                inspect.signature(metric_fn).bind('targets', 'predictions')

    def settings(self, data_group: ConfigDict) -> ConfigDict:
        """Return config.data with the values of this task."""
        settings = copy.deepcopy(data_group)
        settings.task = self.name
        for name in settings_of_a_row(data_group):
            settings[name] = getattr(self, name)
        return settings

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

    def open_objective(self, data_group: ConfigDict, vocabulary: Vocabulary) -> Objective:
        """Return the objective for config.data. Raises Refused for settings that do not fit."""
        if isinstance(self.objective, str):
            return self.objective_class(data_group, vocabulary)
        return OwnObjective(self.objective, data_group, vocabulary)

    def preprocess(self, records: Iterable[Fields]) -> Iterator[Texts]:
        """Yield the examples of records, {'inputs': text, 'targets': text, ...}."""
        for fields in records:
            if self.preprocess_fn is not None:
                for example in self.preprocess_fn(fields):
                    # Raises Python's own errors unless both are texts without unpaired surrogates, which no vocabulary takes.
                    ''.join([example.get('inputs', ''), example['targets']]).encode()
                    yield dict(example)
            elif self.references:
                name = self.references[1:-1]
                value = fields[name]
                references = [value] if isinstance(value, str) else value or ['']
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
        """Convert targets or a predicted text to the value that the metrics compare."""
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
            values = metric_fn(targets, outputs)
            return {name: float(value) for name, value in values.items()}


def check_name(name: str) -> None:
    """Assert that the name of a task or mixture is valid for a file and for a setting."""
    is_plain = name and name.isprintable() and not set(name) & set('/\\,')
    assert is_plain, f'name={name!r:.60}: must be the name of a file, without / \\ and commas'


def settings_of_a_row(data_group: ConfigDict) -> dict[str, str]:
    """Return {name: default} of the fields of a Task that are settings of config.data."""
    defaults = {}
    for field in dataclasses.fields(Task):
        if isinstance(field.default, str) and field.name in data_group:
            defaults[field.name] = field.default
    return defaults


class Splits(NamedTuple):
    """The splits of a data set that a task uses, like data.train_split; NO_SPLIT for none."""

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
    maximum: float = math.inf, temperature: float = 1.0, scale: float = 1.0
) -> Callable[[int], float]:
    """Return a function from the number of examples of a task to its rate.

    The rate is min(examples * scale, maximum)^(1 / temperature): the limit comes before the
    temperature. Source: seqio/utils.py `mixing_rate_num_examples`; T5 (Raffel et al. 2020) §3.5.2.
    """
    return lambda num_examples: min(num_examples * scale, maximum) ** (1 / temperature)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
    """Tasks and mixtures, or their names, with rates. The tasks of an inner mixture share its rate."""

    name: str
    members: Mapping[str, Rate] | Mapping['str | Task | Mixture', Rate]

    def __post_init__(self):
        check_name(self.name)
        names = [name_of(member) for member in self.members]
        is_set = names and len(set(names)) == len(names) and self.name not in names
        assert is_set, f'mixture {self.name!r} has members={names!r:.60}: name others, each once'
        for member, rate in self.members.items():
            if not callable(rate):
                self._check_rate(name_of(member), rate)

    def with_members(
        self, replace: 'Callable[[str | Task | Mixture], Task | Mixture]'
    ) -> 'Mixture':
        """Return the mixture with `replace` applied to each member, at the same rates."""
        members: dict[str | Task | Mixture, Rate] = {}
        for member, rate in self.members.items():
            members[replace(member)] = rate
        return Mixture(self.name, members)

    @property
    def tasks(self) -> dict[str, Task]:
        """The tasks, by name, of a mixture in which all names are looked up."""
        members: dict[str, Task] = {}
        for member in self.members:
            if isinstance(member, Task):
                members[member.name] = member
            elif isinstance(member, Mixture):
                members |= member.tasks
        return members

    @property
    def tasks_by_size(self) -> set[str]:
        """The names of the tasks whose rate depends on their number of examples."""
        names = set()
        for member, rate in self.members.items():
            if isinstance(member, Mixture):
                names |= member.tasks_by_size
            elif callable(rate):
                names.add(name_of(member))
        return names

    def rates(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return the rate of each task, not normalized, the same task's rates summed.

        `sizes`: the number of examples of each task whose rate depends on it.
        """
        total: dict[str, float] = {}
        for member, rate in self.members.items():
            name = name_of(member)
            shares = {name: 1.0}
            if isinstance(member, Mixture):
                shares = member.shares(sizes)
            if callable(rate):
                if name not in sizes:  # the sizes of mixtures are also unknown
                    rule = 'depends on its number of examples, which is unknown: name a number'
                    raise Refused(f'mixture {self.name!r}: the rate of {name!r} {rule}')
                rate = rate(sizes[name])
                self._check_rate(name, rate)
            for task, share in shares.items():
                total[task] = total.get(task, 0.0) + float(rate) * share
        return total

    def shares(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return the rates divided by their sum."""
        rates = self.rates(sizes)
        total = sum(rates.values())
        return {task: rate / total for task, rate in rates.items()}

    def _check_rate(self, name: str, rate: float) -> None:
        assert 0 <= rate < math.inf, f'mixture {self.name!r}: {name!r} has the rate {rate!r}'


def name_of(member: str | Task | Mixture) -> str:
    return member if isinstance(member, str) else member.name


def tasks_of(row: Task | Mixture) -> dict[str, Task]:
    return {row.name: row} if isinstance(row, Task) else row.tasks
