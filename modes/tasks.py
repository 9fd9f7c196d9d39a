"""`--mode=tasks`: list all tasks, a mixture with its sources, or examples of a task.

Imports no jax.
"""

import functools
import itertools
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from absl.flags import FlagValues
from ml_collections import ConfigDict

import tasks.names
import tasks.open
from formats import own_model
from formats.vocabulary import mark_sentinels, named_vocabulary
from messages import Refused
from modes import process
from run.examples import SPLITS, check_split
from sources import NO_SPLIT, Record, Source
from sources.open import find_cache
from stream import OpenTask, Tokenized, TokenizedTask
from tasks import t0, t5
from tasks.mixtures import MetricFn, Mixture, Task
from tasks.objectives import OBJECTIVES
from vocabulary import Vocabulary

WIDTH = 100


def main(config: ConfigDict, flags: FlagValues, signals: process.Signals) -> int:
    process.end_with_reader()
    vocabulary = None
    if flags.vocabulary:
        vocabulary = named_vocabulary('--vocabulary', flags.vocabulary, config.data.extra_ids)
        mark_sentinels(vocabulary, config.data.sentinels)
        model_config = own_model.load(config.model)
        vocabulary.ends = model_config.family.ends(model_config, vocabulary.ends)
    lines = describe(config.data, flags.split, flags.examples, vocabulary)
    signals.begin_work()
    process.print_lines(lines, sys.stdout)
    return 0


def describe(
    config: ConfigDict, split: str = '', num_examples: int = 0, vocabulary: Vocabulary | None = None
) -> Iterator[str]:
    """Return the lines about the task or mixture config.task, or about all if it is ''.

    `config`: config.data. `split`: of the examples, by default the first that the task has. `vocabulary`:
    also prints their ids. Raises Refused for an unknown name; the lines raise it if a source does not open.
    """
    if split:
        check_split(split)
    task = tasks.open.find(config) if config.task else None
    if (split or num_examples or vocabulary is not None) and not isinstance(task, Task):
        raise Refused(f'--split, --examples and --vocabulary need a task, not {config.task!r}')
    if task is None:
        return list_of(groups(config.module))
    find_cache(config, config.task)  # raises Refused for data.cache_dirs
    if isinstance(task, Mixture):
        return describe_mixture(task, config)
    return describe_task(task, config, split, num_examples, vocabulary)


# The list of all tasks.


def groups(module: str) -> dict[str, Sequence[Task | Mixture]]:
    """Return all tasks and mixtures by title, data.module first.

    The tasks of mT5, ByT5 and T0 are listed with one of their mixtures.
    """
    groups: dict[str, Sequence[Task | Mixture]] = {}
    if module:
        groups[f'From data.module={module!r}:'] = list(tasks.names.own_tasks(module).values())
    t0_mixtures = t0.mixtures()
    names = {row.name for rows in [*t5.groups().values(), t0_mixtures] for row in rows}
    mixtures = [row for row in t5.table().values() if isinstance(row, Mixture)]
    groups |= t5.groups()
    groups['Mixtures of mT5 and ByT5'] = [row for row in mixtures if row.name not in names]
    groups['Mixtures of T0'] = t0_mixtures
    return groups


def list_of(groups: Mapping[str, Sequence[Task | Mixture]]) -> Iterator[str]:
    documents = filter(tasks.names.takes_documents, OBJECTIVES)
    yield from textwrap.wrap(
        f'On the documents of data.files: {", ".join(documents)}.', width=WIDTH
    )
    yield 'On the records of data.files, with data.inputs and data.targets: text_to_text.'
    yield ''
    yield 'Splits: t is train, v is validation, x is test. (v) is there or a part of train.'
    for title, rows in groups.items():
        yield ''
        yield title
        sources_of_tasks = [source_of(row) for row in rows if isinstance(row, Task)]
        name_width = max((len(row.name) for row in rows), default=0)
        source_width = max(map(len, sources_of_tasks), default=0)
        for row in rows:
            if isinstance(row, Task):
                names = ', '.join(map(name_of_metric, row.metric_fns))
                line = f'  {row.name:{name_width}}  {source_of(row):{source_width}}  {splits_of(row):4}'
                if len(line) + 2 + len(names) > WIDTH:
                    yield line.rstrip()
                    line = '    '
                yield f'{line}  {names}'.rstrip()
            else:
                line = f'  {row.name:{name_width}}  {len(row.members)} tasks'
                if row.tasks_by_size:
                    line += f', {len(row.tasks_by_size)} with a rate by their number of examples'
                yield line


def source_of(task: Task) -> str:
    """Return the name of a task's data set or files."""
    if task.name.startswith(('pydoc_', 'cmudict_')):
        return task.name.partition('_')[0]
    files = task.files or task.validation_files or task.test_files
    return task.tfds or files or ('cache' if task.cache else 'pydoc')


def splits_of(task: Task) -> str:
    """Return the splits of a task as letters."""
    letters = ''
    if task.train_split != NO_SPLIT:
        letters += 't'
    if task.validation_split == '':
        letters += '(v)'
    elif task.validation_split != NO_SPLIT:
        letters += 'v'
    if task.test_files or task.test_split not in ('', NO_SPLIT):
        letters += 'x'
    return letters


def name_of_metric(metric_fn: MetricFn) -> str:
    """Return the name of a metric, or of the function that made it."""
    if isinstance(metric_fn, functools.partial):
        metric_fn = metric_fn.func
    return getattr(metric_fn, '__qualname__', type(metric_fn).__name__).partition('.')[0]


# A mixture.


def describe_mixture(mixture: Mixture, config: ConfigDict) -> Iterator[str]:
    """Yield a line for each task of a mixture: its rate and whether its source opens.

    Raises Refused, with a remedy, if one does not open.
    """
    opened: dict[str, Source] = {}
    problems: dict[str, str] = {}
    sizes: dict[str, int] = {}
    unknown = set(mixture.tasks_by_size)
    for name, task in mixture.tasks.items():
        try:
            opened[name] = tasks.open.open_task(task, config).source
        except Refused as error:
            problems[name] = str(error)
            continue
        num_records = opened[name].train.count_records()
        if num_records is not None:
            sizes[name] = num_records
            unknown.discard(name)
    if all(task.train_split == NO_SPLIT for task in mixture.tasks.values()):
        rates = dict.fromkeys(mixture.tasks, 0.0)  # a mixture for evaluation only
    else:
        rates = mixture.rates(sizes | dict.fromkeys(unknown, 1))
    total = sum(rates.values())
    yield f'{mixture.name}, a mixture of {len(rates)} tasks'
    for name, rate in rates.items():
        rate_text = 'by size' if name in unknown else f'{rate:,.6g}'
        share = '' if unknown or not total else f'{rate / total:.2%}'
        state = f'does not open ({source_of(mixture.tasks[name])})'
        if name in opened:
            state = opened[name].description
            if name in unknown:
                state += ' (its number of examples is unknown: cache the task)'
        yield f'{rate_text:>12} {share:>8}  {name}: {state}'
    if problems:
        first, *others = problems.values()
        refusal = Refused(first)
        for problem in others:
            refusal.add_note(problem)
        raise refusal


# A task.


def describe_task(
    task: Task, config: ConfigDict, split: str, num_examples: int, vocabulary: Vocabulary | None
) -> Iterator[str]:
    """Yield the description of a task, and some of its examples. Raises Refused if its source does not open."""
    metric_names = ', '.join(name_of_metric(metric_fn) for metric_fn in task.metric_fns)
    yield f'{task.name}: {source_of(task)}'
    yield f'splits: {splits_of(task)}; objective: {task.objective_name}; metrics: {metric_names or "none"}'
    opened = tasks.open.open_task(task, config)
    yield f'{opened.source.description}.'
    if num_examples:
        records = records_of(opened.source, task, split)
        lines = examples_of(opened, records, config, vocabulary)
        yield from itertools.chain.from_iterable(itertools.islice(lines, num_examples))


def records_of(source: Source, task: Task, split: str) -> Iterator[Record]:
    """Return the records of a split, by default of the first one available."""
    available = [name for name in SPLITS if source.may_hold(name)]
    split = split or ''.join(available[:1])
    if split not in available:
        raise Refused(f'--split={split}: {task.name} has {", ".join(available) or "no records"}')
    return source.records(split)


def examples_of(
    task: OpenTask, records: Iterator[Record], config: ConfigDict, vocabulary: Vocabulary | None
) -> Iterator[list[str]]:
    """Yield the lines of each example of a task: texts, and with a vocabulary ids."""
    tokenized = None
    if vocabulary is not None:
        tokenized = TokenizedTask(task, config, vocabulary)
    for record in records:
        examples: Iterable[Tokenized] = [Tokenized(record.name, record.fields, {})]
        if tokenized is not None:
            examples = tokenized.tokenize([record])
        elif not task.source.is_tokenized:  # a record of a task cache is one example
            examples = [Tokenized(record.name, texts, {}) for texts in task.texts_of(record)]
        for example in examples:
            lines = ['', record.name]
            for name, value in (example.texts or record.fields).items():
                lines.append(f'  {name}: {value!r}')
            if tokenized is not None:
                for one in itertools.chain(*tokenized.examples([example], 0)):
                    lines.append(f'  ids of the inputs: {one.inputs.tolist()}')
                    lines.append(f'  ids of the targets: {one.targets.tolist()}')
                    if one.numbers:
                        lines.append(f'  numbers: {dict(one.numbers)}')
            yield lines
