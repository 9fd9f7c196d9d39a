"""From config.data to a task or mixture with open sources. Imports no jax.

data.task names a row, which has its own preprocessors and metrics. Its records come from data.files,
data.tfds or a task cache if these are set, else from the row. A template, data.targets or
data.references, makes a text-to-text task, whose name is in no table.
"""

import dataclasses
import functools

from ml_collections import ConfigDict
from sacrebleu.metrics import BLEU

import sources.open
from messages import Refused, named
from randomness import digest
from sources import NO_SPLIT
from sources.templates import templates_of
from stream import OpenMixture, OpenTask
from tasks import metrics
from tasks.mixtures import MetricFn, Mixture, Task, settings_of_a_row, tasks_of
from tasks.names import look_up, own_tasks, takes_documents, unknown
from tasks.objectives import OBJECTIVES
from tasks.t5 import table

RECORDS = ('files', 'validation_files', 'test_files', 'tfds')
TEXTS = ('targets', 'inputs', 'references', 'metrics')


def find(data_group: ConfigDict) -> Task | Mixture:
    """Return the task or mixture that config.data names, with the settings in its rows."""
    name = data_group.task
    is_cached = functools.partial(sources.open.find_cache, data_group)
    texts = {setting: data_group[setting] for setting in TEXTS if data_group[setting]}
    if texts and name == 'span_corruption':  # the default
        name = 'text_to_text'
    if texts and name != 'text_to_text' and look_up(name, data_group.module) is not None:
        settings = ', '.join(f'data.{setting}={text!r}' for setting, text in texts.items())
        raise Refused(
            f'{settings}: data.task={name!r} has texts and metrics of its own: use another name, or '
            + ' '.join(f'--config.data.{setting}=' for setting in texts)
        )
    row = look_up(name, data_group.module, is_cached)
    if row is None and (data_group.targets or data_group.references):
        row = Task(name)
    if row is None:
        where = ''
        if data_group.cache_dirs:
            where = f', also in data.cache_dirs={data_group.cache_dirs!r}'
        raise unknown(name, data_group.module, f'data.task={name!r}', where)
    has_records = isinstance(row, Mixture) or row.cache
    for setting in RECORDS:
        is_for_evaluation = setting == 'files' and getattr(row, 'train_split', '') == NO_SPLIT
        if data_group[setting] and (has_records or is_for_evaluation):
            raise Refused(
                f'data.{setting}={data_group[setting]!r} is not for data.task={name!r}: a mixture and a task of P3 '
                'have their own records, and a task without training takes data.validation_files'
            )
    task = configured(row, data_group)
    is_of_texts = name in OBJECTIVES and not takes_documents(name)
    if is_of_texts and not data_group.targets and not data_group.references and not is_cached(name):
        raise Refused(f"data.task={name!r} needs data.inputs, and data.targets like '{{answer}}'")
    return task


def configured(row: str | Task | Mixture, data_group: ConfigDict) -> Task | Mixture:
    """Return a row whose fields are replaced by the settings that differ from their defaults.

    A row of T5's tables reads the newest version of its data set if T5's is not prepared, and Python's
    documentation if C4 is missing.
    """
    if isinstance(row, Mixture):
        return row.with_members(functools.partial(configured, data_group=data_group))
    assert not isinstance(row, str)  # all names are looked up
    if data_group.weight and not row.takes_inputs:
        raise Refused(
            f"data.weight={data_group.weight!r} is not for data.task={row.name!r}: use ''"
        )
    templates_of(data_group)  # refuses invalid settings
    defaults = settings_of_a_row(data_group)
    changes = {name: data_group[name] for name in defaults if data_group[name] != defaults[name]}
    if row.train_split == NO_SPLIT:
        changes.pop('train_split', None)
    is_ours = row is table().get(row.name)
    replacements = {name: data_group[name] for name in ('files', 'validation_files', 'tfds')}
    if any(replacements.values()):  # they replace all records of the row
        changes |= replacements
    if data_group.files or data_group.validation_files:  # these have splits of their own
        changes['validation_split'] = data_group.validation_split
        if row.train_split != NO_SPLIT:
            changes['train_split'] = data_group.train_split
    elif row.tfds and is_ours and not data_group.tfds:
        prepared = sources.open.prepared_version(data_group, row.tfds)
        if prepared is not None:
            changes['tfds'] = prepared
        elif row.name.startswith('c4_') or data_group.test_files:
            changes['tfds'] = ''
    if data_group.metrics:
        changes['metric_fns'] = metrics_of(data_group.metrics)
    task = dataclasses.replace(row, **changes)
    # Without records, objectives and T5's rows read Python's documentation.
    if not is_ours and row.name not in OBJECTIVES:
        files = task.files or task.validation_files or task.test_files
        has_records = files or task.tfds or task.cache
        if not has_records and sources.open.find_cache(data_group, task.name) is None:
            raise Refused(f'task {row.name!r} needs records: set data.files or data.tfds')
    return task


def settings_of_task(data_group: ConfigDict, name: str) -> ConfigDict:
    """Return config.data for a task. The settings of the records of data.task do not apply to other tasks."""
    if name == data_group.task:
        return data_group
    settings = data_group.copy_and_resolve_references()
    settings.update(settings_of_a_row(data_group), task=name, metrics='')
    return settings


def metrics_of(names: str) -> list[MetricFn]:
    """Return the metrics that data.metrics names."""
    metric_fns: dict[str, MetricFn] = {}
    with named(f'data.metrics={names!r}'):
        for text in filter(None, map(str.strip, names.split(','))):
            name, colon, tokenizer = text.partition(':')
            takes_tokenizer = name in ('bleu', 'rouge')
            if name not in TEXT_METRICS or name in metric_fns or (colon and not takes_tokenizer):
                choices = ', '.join(TEXT_METRICS)
                raise Refused(f'use some of {choices}, each once, such as bleu:zh and rouge:zh')
            metric_fns[name] = TEXT_METRICS[name]
            if colon:
                try:
                    BLEU(tokenize=tokenizer)
                except (KeyError, RuntimeError, OSError) as error:  # or packages are missing
                    reason = ' '.join(str(error).split())
                    raise Refused(f'{reason}: use one of {", ".join(BLEU.TOKENIZERS)}') from error
                metric_fns[name] = functools.partial(metric_fns[name], tokenizer=tokenizer)
    return list(metric_fns.values())


# The values of data.metrics. The targets are texts, or lists of references.
TEXT_METRICS: dict[str, MetricFn] = {
    'accuracy': metrics.accuracy_of_references,
    'bleu': metrics.bleu_of_references,
    'rouge': metrics.rouge,
    'squad': metrics.squad_v2,
}


# Opening their sources.


def open_mixture(data_group: ConfigDict) -> OpenMixture:
    """Open the sources of config.data.task for training."""
    row = find(data_group)
    if isinstance(row, Task):
        tasks = [open_task(row, data_group)]
    else:
        tasks = open_tasks(row, data_group)
    content: list = []  # texts and rates, without the code of functions
    for task, source, rate in tasks:
        if task.train_split != NO_SPLIT and not source.may_hold('train'):
            source.check_not_empty('train')  # raises
        targets = task.targets or task.references
        content.append([task.name, task.objective_name, task.inputs, targets])
        content.append([source.fingerprint, round(rate, 12)])
    fingerprint = digest(content)
    if len(tasks) == 1 and row.name not in own_tasks(data_group.module):
        fingerprint = source.fingerprint  # config.json has the texts of this task
    return OpenMixture(row.name, tuple(tasks), fingerprint, open_mixture)


def open_evaluated_alone(data_group: ConfigDict, mixture: OpenMixture) -> list[OpenTask]:
    """Open the tasks that have a validation split but are not trained on, as T5X's get_training_eval_datasets."""
    trained = {task.name for task in mixture.tasks}
    opened = []
    for name, task in tasks_of(find(data_group)).items():
        if name not in trained and task.validation_split != NO_SPLIT:
            opened.append(open_task(task, data_group))
    return [task for task in opened if task.source.may_hold('validation')]


def other_versions(mixture: OpenMixture) -> list[str]:
    """Return a line for each data set of T5's tables that is read in a version other than T5's."""
    lines = []
    for task in mixture.tasks:
        row = table().get(task.name)
        if isinstance(row, Task) and task.task.tfds == row.tfds.partition(':')[0] != row.tfds:
            lines.append(
                f'{row.tfds} is not prepared: {task.name} reads {task.source.description}.'
            )
    return lines


def open_tasks(mixture: Mixture, data_group: ConfigDict) -> list[OpenTask]:
    """Open the sources of a mixture's tasks that have a training split and a rate above 0."""
    opened: dict[str, OpenTask] = {}
    sizes: dict[str, int] = {}
    for name in sorted(mixture.tasks_by_size):
        num_records: int | None = 0
        if mixture.tasks[name].train_split != NO_SPLIT:
            opened[name] = open_task(mixture.tasks[name], data_group)
            num_records = opened[name].source.train.count_records()
        if num_records is not None:
            sizes[name] = num_records
    rates = {}
    for name, rate in sorted(mixture.rates(sizes).items()):
        if rate > 0 and mixture.tasks[name].train_split != NO_SPLIT:
            rates[name] = rate
    if not rates:
        raise Refused(f'mixture {mixture.name!r} has no task with a training split and a rate')
    total = sum(rates.values())
    tasks = []
    for name, rate in rates.items():
        task = opened.get(name) or open_task(mixture.tasks[name], data_group)
        tasks.append(task._replace(rate=rate / total))
    return tasks


def open_task(task: Task, data_group: ConfigDict) -> OpenTask:
    """Open the source of a task."""
    if task.cache and sources.open.find_cache(data_group, task.name) is None:
        where = (
            f'data.cache_dirs={data_group.cache_dirs!r} (data.use_cached={data_group.use_cached!r})'
        )
        raise Refused(f'data.task={task.name!r} has no cache in {where}: copy {task.cache} there')
    with named(f'data.task={task.name!r}'):
        source = sources.open.open_source(
            task.settings(data_group),
            whole_records=task.preprocess_fn is not None,
            test_split=task.test_split,
        )
    return OpenTask(task, source)
