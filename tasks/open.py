"""Looking a task or mixture up by its name, and opening its sources. Imports no jax."""

import dataclasses
import difflib
import functools
from collections.abc import Sequence
from typing import Any

import sources.open
from sources import NO_SPLIT, Source
from stream import OpenMixture, OpenTask, fingerprint_of
from tasks import metrics
from tasks.mixtures import MetricFn, Mixture, Rate, Task
from tasks.objectives import OBJECTIVES
from tasks.own import own_tasks
from tasks.t5 import REFUSED, TABLE


def find(config: Any) -> Task | Mixture:
    """Return the task or mixture that `config`, config.data, names, with the records that it names.

    Raises ValueError for an unknown name, and for settings that contradict it.
    """
    if config.task in REFUSED:
        raise ValueError(f'data.task={config.task!r} {REFUSED[config.task]}')
    found = look_up(config.task, config)
    if isinstance(found, Mixture):
        for setting in ('files', 'validation_files', 'test_files', 'tfds'):
            if config[setting]:
                raise ValueError(
                    f'data.{setting}={config[setting]!r} are the records of one task, and '
                    f"data.task={config.task!r} is a mixture: set data.{setting}=''"
                )
    return configured(found, config)


def open_mixture(config: Any) -> OpenMixture:
    """Open the sources of what config.data.task names, for training.

    Raises ValueError for names, rates and sources that are not valid.
    """
    found = find(config)
    opened = open_sources(found, config)
    for task in opened.tasks:
        if task.task.train_split != NO_SPLIT and not task.source.may_hold('train'):
            task.source.check_not_empty('train')  # raises
    if opened.is_single and found.name not in own_tasks(config.module):
        # config.json has the texts of this task.
        return dataclasses.replace(opened, fingerprint=opened.tasks[0].source.fingerprint)
    return opened


def open_evaluated_alone(config: Any, mixture: OpenMixture) -> list[OpenTask]:
    """Open the tasks of data.task that `mixture`, of training, leaves out: those with a validation split.

    Source: T5X t5x/utils.py get_training_eval_datasets.
    """
    trained = {task.name for task in mixture.tasks}
    opened = []
    for name, task in tasks_of(find(config)).items():
        if name not in trained and task.validation_split != NO_SPLIT:
            opened.append(opened_task(task, open_task(task, config)))
    return [task for task in opened if task.source.may_hold('validation')]


def other_versions(mixture: OpenMixture) -> list[str]:
    """Return a line for each data set of TABLE that is read in another version than T5's."""
    lines = []
    for task in mixture.tasks:
        row = TABLE.get(task.name)
        if isinstance(row, Task) and task.task.tfds == row.tfds.partition(':')[0] != row.tfds:
            lines.append(
                f'{row.tfds} is not prepared: {task.name} reads {task.source.description}.'
            )
    return lines


def look_up(name: str, config: Any, parents: tuple[str, ...] = ()) -> Task | Mixture:
    """Return the task or mixture of this name. `parents`: the mixtures that it is in."""
    found = own_tasks(config.module).get(name) or TABLE.get(name)
    if found is None:
        return task_of_settings(name, config)
    for setting in ('metrics', 'targets', 'inputs'):
        if config[setting] and not parents:
            raise not_of_texts(setting, name, config)
    if isinstance(found, Mixture):
        return with_members(found, config, parents)
    return found


def with_members(found: Mixture, config: Any, parents: tuple[str, ...]) -> Mixture:
    """Return a mixture with tasks and mixtures in place of their names."""
    if found.name in parents:
        chain = ' > '.join([*parents, found.name])
        raise ValueError(f'mixture {found.name!r} is in itself ({chain}): leave one of them out')
    parents = (*parents, found.name)
    members: dict[str | Task | Mixture, Rate] = {}
    for member, rate in found.members.items():
        if isinstance(member, str):
            member = look_up(member, config, parents)
        elif isinstance(member, Mixture):
            member = with_members(member, config, parents)
        members[member] = rate
    return Mixture(found.name, members)


def configured(found: Task | Mixture, config: Any) -> Task | Mixture:
    """Return a task or mixture that reads the records that the settings name, if they name any.

    A row of TABLE reads the newest version of its data set where T5's is not prepared, and without
    C4 Python's documentation.
    """
    if isinstance(found, Mixture):
        members = {}
        for member, rate in found.members.items():
            assert not isinstance(member, str)  # all are looked up
            members[configured(member, config)] = rate
        return Mixture(found.name, members)
    task = found
    is_ours = task is TABLE.get(task.name)
    changes: dict[str, Any] = {}
    if config.files or config.validation_files:
        if task.train_split == NO_SPLIT and config.files:
            raise ValueError(
                f'data.files={config.files!r} are for training, and data.task={task.name!r} is for '
                "evaluation alone: name them with data.validation_files, and set data.files=''"
            )
        changes = {
            'files': config.files,
            'validation_files': config.validation_files,
            'tfds': config.tfds,
            'train_split': NO_SPLIT if task.train_split == NO_SPLIT else 'train',
            'validation_split': '',
        }
    elif config.tfds:
        changes['tfds'] = config.tfds
    elif task.tfds and is_ours:
        prepared = sources.open.prepared_version(config, task.tfds)
        if prepared is not None:
            changes['tfds'] = prepared
        elif task.name.startswith('c4_') or config.test_files:
            changes['tfds'] = ''
    if config.train_split != 'train' and task.train_split != NO_SPLIT:
        changes['train_split'] = config.train_split
    defaults = {
        'kind': '',
        'delimiter': '',
        'validation_split': '',
        'text_field': 'text',
        'test_files': '',
    }
    for setting, default in defaults.items():
        if config[setting] != default:
            changes[setting] = config[setting]
    changed = dataclasses.replace(task, **changes)
    # Without records an objective and the rows of TABLE read Python's documentation.
    if not is_ours and task.name not in OBJECTIVES:
        files = changed.files or changed.validation_files or changed.test_files
        has_records = files or changed.tfds or changed.cache
        if not has_records and sources.open.find_cache(config, changed.name) is None:
            raise ValueError(
                f'task {task.name!r} needs records: name its files or tfds in data.module, or with '
                'data.files or data.tfds'
            )
    return changed


def task_of_settings(name: str, config: Any) -> Task:
    """Return the task that the settings describe: templates, an objective, or a task cache."""
    objective = name
    if config.targets:
        objective = 'text_to_text'
        if name == 'span_corruption':  # the default
            name = 'text_to_text'
        elif name in OBJECTIVES and name != 'text_to_text':
            raise not_of_texts('targets', name, config)
    elif not takes_documents(name):
        if sources.open.find_cache(config, name) is not None:
            return Task(name, metric_fns=metrics_of(config))
        if name in OBJECTIVES:
            raise ValueError(
                f'data.task={name!r} needs data.inputs and data.targets: name the fields of a record '
                "in them, as '{question}' and '{answer}'"
            )
        raise unknown(name, config)
    elif config.metrics:
        raise not_of_texts('metrics', name, config)
    return Task(
        name=name,
        files=config.files,
        validation_files=config.validation_files,
        test_files=config.test_files,
        kind=config.kind,
        delimiter=config.delimiter,
        tfds=config.tfds,
        train_split=config.train_split,
        validation_split=config.validation_split,
        text_field=config.text_field,
        inputs=config.inputs,
        targets=config.targets,
        objective=objective,
        metric_fns=metrics_of(config),
    )


def metrics_of(config: Any) -> list[MetricFn]:
    """Return the metrics that data.metrics names."""
    found: dict[str, MetricFn] = {}
    for given in filter(None, map(str.strip, config.metrics.split(','))):
        name, colon, tokenizer = given.partition(':')
        if name not in TEXT_METRICS:
            raise ValueError(
                f'data.metrics={config.metrics!r}: {name!r} is none: use some of '
                f'{", ".join(TEXT_METRICS)}, or write a task with metric_fns in data.module'
            )
        if name in found:
            raise ValueError(
                f'data.metrics={config.metrics!r} has {name} twice, whose values have the same names: '
                'leave one out'
            )
        found[name] = TEXT_METRICS[name]
        if not colon:
            continue
        if metrics.tokenizer_of(found[name]) is None:
            raise ValueError(
                f'data.metrics={config.metrics!r}: {name} has no tokenizer: write {name} alone; bleu and '
                'rouge take one, as bleu:zh and rouge:unicode'
            )
        metric_fn: Any = found[name]
        found[name] = functools.partial(metric_fn, tokenizer=tokenizer)
        try:
            metrics.tokenizer_of(found[name])
        except ValueError as error:
            raise ValueError(f'data.metrics={config.metrics!r}: {error}') from error
    return list(found.values())


def not_of_texts(setting: str, name: str, config: Any) -> ValueError:
    """Return the error for data.metrics or data.targets beside a task that they are not for."""
    return ValueError(
        f'data.{setting}={config[setting]!r} is for text to text with data.targets, and data.task='
        f"{name!r} is not: set data.{setting}='', or data.task='text_to_text'"
    )


def takes_documents(objective: str) -> bool:
    """Return whether an objective makes examples of documents, which the settings name."""
    return objective in OBJECTIVES and 'inputs' not in OBJECTIVES[objective].features


def unknown(name: str, config: Any) -> ValueError:
    """Return the error for an unknown task; it has the nearest names."""
    what = f'data.task={name!r}'
    if name != config.task:
        what = f'task {name!r} of data.task={config.task!r}'
    where = ''
    if config.cache_dirs:
        where = f' and has no cache in data.cache_dirs={config.cache_dirs!r}'
    names = [*TABLE, *own_tasks(config.module), *filter(takes_documents, OBJECTIVES)]
    nearest = ', '.join(difflib.get_close_matches(name, names, n=3, cutoff=0))
    return ValueError(
        f'{what} is unknown{where}: the nearest names are {nearest}: use one of these, or one that '
        "'python main.py --mode=tasks' lists"
    )


def squad_of_one_answer(targets: Sequence[str], predictions: Sequence[str]) -> metrics.Values:
    """Return `metrics.squad_v2` of questions with one answer, '' for none."""
    return metrics.squad_v2([[target] for target in targets], predictions)


TEXT_METRICS: dict[str, MetricFn] = {
    'accuracy': metrics.accuracy,
    'bleu': metrics.bleu,
    'rouge': metrics.rouge,
    'squad': squad_of_one_answer,
}


# Opening their sources.


def tasks_of(found: Task | Mixture) -> dict[str, Task]:
    """Return {name: task} of a task or mixture."""
    return {found.name: found} if isinstance(found, Task) else found.tasks


def open_sources(found: Task | Mixture, config: Any) -> OpenMixture:
    """Open the source of a task, or those of a mixture in which all names are looked up.

    Raises ValueError for rates and sources that are not valid.
    """
    if isinstance(found, Task):
        tasks = [opened_task(found, open_task(found, config))]
    else:
        tasks = open_tasks(found, config)
    return OpenMixture(found.name, tuple(tasks), fingerprint_of(tasks))


def opened_task(task: Task, source: Source, rate: float = 1.0) -> OpenTask:
    """Return a task with its open source."""
    return OpenTask(task, source, task.open_objective, rate)


def open_tasks(mixture: Mixture, config: Any) -> list[OpenTask]:
    """Open the sources of a mixture whose names are looked up, for training.

    Tasks of rate 0 and tasks without a split for training are left out.
    """
    if all(task.train_split == NO_SPLIT for task in mixture.tasks.values()):
        raise ValueError(f'mixture {mixture.name!r} is for evaluation alone: train on another')
    opened = {}
    sizes: dict[str, int] = {}
    for name in sorted(mixture.tasks_by_size):
        num_records: int | None = 0
        if mixture.tasks[name].train_split != NO_SPLIT:
            opened[name] = open_task(mixture.tasks[name], config)
            num_records = opened[name].train.count_records()
        if num_records is not None:
            sizes[name] = num_records
    rates = {}
    for name, rate in sorted(mixture.rates(sizes).items()):
        if rate > 0 and mixture.tasks[name].train_split != NO_SPLIT:
            rates[name] = rate
    if not rates:
        raise ValueError(
            f'mixture {mixture.name!r}: no task with a training split has a rate: give one to one'
        )
    total = sum(rates.values())
    tasks = []
    for name, rate in rates.items():
        task = mixture.tasks[name]
        source = opened.get(name) or open_task(task, config)
        tasks.append(opened_task(task, source, rate / total))
    return tasks


def open_task(task: Task, config: Any) -> Source:
    """Open the source of a task. Raises ValueError that names the task, where its data set is missing."""
    if task.cache:
        if task.files or task.validation_files or task.test_files or task.tfds:
            raise ValueError(
                f'data.task={task.name!r} is read from its cache alone: set data.files, '
                "data.validation_files, data.test_files and data.tfds to ''"
            )
        if sources.open.find_cache(config, task.name) is None:
            raise ValueError(
                f'data.task={task.name!r} has no cache in data.cache_dirs={config.cache_dirs!r} '
                f'(data.use_cached={config.use_cached!r}): put {task.cache} into one of its folders'
            )
    try:
        return sources.open.open_source(
            task.settings(config),
            whole_records=task.preprocess_fn is not None,
            test_split=task.test_split,
        )
    except ValueError as error:
        if task.tfds and task.tfds != config.tfds:  # the settings do not name it
            raise ValueError(f'data.task={task.name!r}: {error}') from None
        raise
