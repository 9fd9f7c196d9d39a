"""From config.data to a task or mixture with open sources. Imports no jax.

The rule: data.task names a row. Each setting of config.data that is a field of a row and differs from
its default replaces that field, in a mixture that of each task. LACKS has the settings that rows refuse.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict
from sacrebleu.metrics import BLEU

import sources.open
from messages import Refused, named
from randomness import digest
from sources import NO_SPLIT, Source
from sources.templates import templates_of
from stream import OpenMixture, OpenTask
from tasks import metrics
from tasks.mixtures import MetricFn, Mixture, PreprocessFn, Rate, Task, settings_of_a_row
from tasks.names import look_up, own_tasks, takes_documents, unknown
from tasks.objectives import OBJECTIVES
from tasks.preprocessors import Example, Fields
from tasks.t5 import REFUSED, table

RECORDS = ('files', 'validation_files', 'test_files', 'tfds')
TEXTS = ('targets', 'inputs', 'references', 'metrics')
# {the form of a row: the settings that it refuses}
LACKS = {
    'a mixture': (*RECORDS, *TEXTS),
    'read from its cache alone': (*RECORDS, *TEXTS),
    'for evaluation alone, with data.validation_files': ('files', *TEXTS),
    'not made of data.inputs and data.targets': TEXTS,
    'text to text': (),
}


def find(config: ConfigDict) -> Task | Mixture:
    """Return the task or mixture that config.data names, with the settings in its rows."""
    name = config.task
    if name in REFUSED:
        raise Refused(f'data.task={name!r} {REFUSED[name]}')
    targets = config.targets or config.references
    if (config.inputs or targets) and name == 'span_corruption':  # the default
        name = 'text_to_text'
    is_cached = functools.partial(sources.open.find_cache, config)
    row = look_up(name, config.module, is_cached)
    if row is None and targets:
        row = Task(name)
    if row is None:
        where = f', also in data.cache_dirs={config.cache_dirs!r}' if config.cache_dirs else ''
        raise unknown(name, config.module, f'data.task={name!r}', where)
    form = 'text to text'
    if isinstance(row, Mixture):
        form = 'a mixture'
    elif row.cache:
        form = 'read from its cache alone'
    elif row.train_split == NO_SPLIT:
        form = 'for evaluation alone, with data.validation_files'
    elif row.objective != 'text_to_text' or row.preprocess_fn is not None:
        form = 'not made of data.inputs and data.targets'
    for setting in LACKS[form]:
        if config[setting]:
            other = f'data.task={name!r}, which is {form}'
            raise Refused(f'data.{setting}={config[setting]!r} is not for {other}: leave one out')
    found = configured(row, config)
    is_of_texts = name in OBJECTIVES and not takes_documents(name)
    if is_of_texts and not targets and not is_cached(name):
        raise Refused(f"data.task={name!r} needs data.targets, as '{{answer}}', and data.inputs")
    return found


def configured(row: Task | Mixture, config: ConfigDict) -> Task | Mixture:
    """Return a row whose fields are replaced by the settings that differ from their defaults.

    A row of T5's tables reads the newest version of its data set if T5's is not prepared, and Python's
    documentation if C4 is missing.
    """
    if isinstance(row, Mixture):
        members: dict[str | Task | Mixture, Rate] = {}
        for member, rate in row.members.items():
            assert not isinstance(member, str)  # all are looked up
            members[configured(member, config)] = rate
        return Mixture(row.name, members)
    if config.weight and not row.takes_inputs:
        raise Refused(f"data.weight={config.weight!r} is not for data.task={row.name!r}: use ''")
    templates_of(config)  # refuses what the settings say
    defaults = settings_of_a_row(config)
    changes = {name: config[name] for name in defaults if config[name] != defaults[name]}
    if row.train_split == NO_SPLIT:
        changes.pop('train_split', None)
    is_ours = row is table().get(row.name)
    if is_ours and row.preprocess_fn is not None:
        changes['preprocess_fn'] = functools.partial(with_all_fields, row.preprocess_fn)
    if 'files' in changes or 'validation_files' in changes:  # replace all records and their splits
        changes = {name: defaults[name] for name in ('files', 'validation_files', 'tfds')} | changes
        changes.setdefault('validation_split', '')
        changes.setdefault('train_split', NO_SPLIT if row.train_split == NO_SPLIT else 'train')
    elif 'tfds' in changes:
        changes = {'files': '', 'validation_files': ''} | changes
    elif row.tfds and is_ours:
        prepared = sources.open.prepared_version(config, row.tfds)
        if prepared is not None:
            changes['tfds'] = prepared
        elif row.name.startswith('c4_') or config.test_files:
            changes['tfds'] = ''
    if config.metrics:
        references = changes.get('references', row.references)
        of_texts = METRICS_OF_REFERENCES if references else TEXT_METRICS
        changes['metric_fns'] = metrics_of(config, of_texts)
    changed = dataclasses.replace(row, **changes)
    # Without records an objective and T5's rows read Python's documentation.
    if not is_ours and row.name not in OBJECTIVES:
        files = changed.files or changed.validation_files or changed.test_files
        has_records = files or changed.tfds or changed.cache
        if not has_records and sources.open.find_cache(config, changed.name) is None:
            raise Refused(f'task {row.name!r} needs records: set data.files or data.tfds')
    return changed


def replacements(config: ConfigDict) -> list[str]:
    """Return a line if texts of config.data replace those of the row that data.task names."""
    row = look_up(config.task, config.module)
    names = []
    for name in TEXTS if isinstance(row, Task) else ():
        own = getattr(row, 'metric_fns' if name == 'metrics' else name)
        if own and config[name] not in ('', own):
            names.append(name)
    if not names:
        return []
    settings = ', '.join(f'data.{name}={config[name]!r}' for name in names)
    remedy = ' '.join(f'--config.data.{name}=' for name in names)
    return [f'{settings} instead of what data.task={config.task!r} has: {remedy} restores that.']


def with_all_fields(preprocess_fn: PreprocessFn, fields: Fields) -> list[Example]:
    """Return the examples of a record of T5's data sets, whose fields a user's file may lack."""
    try:
        return list(preprocess_fn(fields))
    except KeyError as error:
        raise Refused(f'it has no field {error}, only {", ".join(map(repr, fields))}') from error


def settings_of_task(config: ConfigDict, name: str) -> ConfigDict:
    """Return config.data for a task. What it says of the records of data.task is not of others."""
    if name == config.task:
        return config
    own = config.copy_and_resolve_references()
    own.update(settings_of_a_row(config), task=name, metrics='')
    return own


def metrics_of(config: ConfigDict, of_texts: Mapping[str, MetricFn]) -> list[MetricFn]:
    """Return those of the metrics `of_texts` that data.metrics names."""
    found: dict[str, MetricFn] = {}
    with named(f'data.metrics={config.metrics!r}'):
        for given in filter(None, map(str.strip, config.metrics.split(','))):
            name, colon, tokenizer = given.partition(':')
            takes_tokenizer = name in ('bleu', 'rouge')
            if name not in of_texts or name in found or (colon and not takes_tokenizer):
                names = ', '.join(of_texts)
                raise Refused(f'use some of {names}, each once, as bleu:zh and rouge:zh')
            found[name] = of_texts[name]
            if not colon:
                continue
            if tokenizer not in BLEU.TOKENIZERS:
                known = ', '.join(BLEU.TOKENIZERS)
                raise Refused(f'{tokenizer!r} is no tokenizer: use one of {known}')
            try:
                BLEU(tokenize=tokenizer)
            except (RuntimeError, OSError) as error:  # its packages or its model are missing
                raise Refused(' '.join(str(error).split())) from error
            found[name] = functools.partial(found[name], tokenizer=tokenizer)
    return list(found.values())


def squad_of_one_answer(targets: Sequence[str], predictions: Sequence[str]) -> metrics.Values:
    """Return `metrics.squad_v2` of questions with one answer, '' for none."""
    return metrics.squad_v2([[target] for target in targets], predictions)


TEXT_METRICS: dict[str, MetricFn] = {
    'accuracy': metrics.accuracy,
    'bleu': metrics.bleu,
    'rouge': metrics.rouge,
    'squad': squad_of_one_answer,
}
# The same for targets that are lists of references.
METRICS_OF_REFERENCES: dict[str, MetricFn] = {
    'accuracy': metrics.accuracy_of_references,
    'bleu': metrics.bleu_of_references,
    'rouge': metrics.rouge,
    'squad': metrics.squad_v2,
}


# Opening their sources.


def open_mixture(config: ConfigDict) -> OpenMixture:
    """Open the sources of what config.data.task names, for training."""
    found = find(config)
    if isinstance(found, Task):
        tasks = [opened_task(found, open_task(found, config))]
    else:
        tasks = open_tasks(found, config)
    content: list = []  # texts and rates; a function's code is not in it
    for task, source, _, rate in tasks:
        if task.train_split != NO_SPLIT and not source.may_hold('train'):
            source.check_not_empty('train')  # raises
        targets = task.targets or task.references
        content.append([task.name, task.objective_name, task.inputs, targets])
        content.append([source.fingerprint, round(rate, 12)])
    fingerprint = digest(content)
    if len(tasks) == 1 and found.name not in own_tasks(config.module):
        fingerprint = source.fingerprint  # config.json has the texts of this task
    return OpenMixture(found.name, tuple(tasks), fingerprint, open_mixture)


def open_evaluated_alone(config: ConfigDict, mixture: OpenMixture) -> list[OpenTask]:
    """Open the tasks with a validation split that training leaves out, as T5X's get_training_eval_datasets."""
    trained = {task.name for task in mixture.tasks}
    opened = []
    for name, task in tasks_of(find(config)).items():
        if name not in trained and task.validation_split != NO_SPLIT:
            opened.append(opened_task(task, open_task(task, config)))
    return [task for task in opened if task.source.may_hold('validation')]


def other_versions(mixture: OpenMixture) -> list[str]:
    """Return a line for each data set of T5's tables that is read in another version than T5's."""
    lines = []
    for task in mixture.tasks:
        row = table().get(task.name)
        if isinstance(row, Task) and task.task.tfds == row.tfds.partition(':')[0] != row.tfds:
            lines.append(
                f'{row.tfds} is not prepared: {task.name} reads {task.source.description}.'
            )
    return lines


def tasks_of(found: Task | Mixture) -> dict[str, Task]:
    """Return {name: task} of a task or mixture."""
    return {found.name: found} if isinstance(found, Task) else found.tasks


def opened_task(task: Task, source: Source, rate: float = 1.0) -> OpenTask:
    """Return a task with its open source."""
    return OpenTask(task, source, task.open_objective, rate)


def open_tasks(mixture: Mixture, config: ConfigDict) -> list[OpenTask]:
    """Open the sources of a mixture for training: of the tasks with a training split and a rate above 0."""
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
        raise Refused(f'mixture {mixture.name!r} has no task with a training split and a rate')
    total = sum(rates.values())
    tasks = []
    for name, rate in rates.items():
        task = mixture.tasks[name]
        source = opened.get(name) or open_task(task, config)
        tasks.append(opened_task(task, source, rate / total))
    return tasks


def open_task(task: Task, config: ConfigDict) -> Source:
    """Open the source of a task. A refusal names the task, where its data set is missing."""
    if task.cache and sources.open.find_cache(config, task.name) is None:
        where = f'data.cache_dirs={config.cache_dirs!r} (data.use_cached={config.use_cached!r})'
        raise Refused(f'data.task={task.name!r} has no cache in {where}: copy {task.cache} there')
    try:
        return sources.open.open_source(
            task.settings(config),
            whole_records=task.preprocess_fn is not None,
            test_split=task.test_split,
        )
    except Refused as error:
        if task.tfds and task.tfds != config.tfds:  # the settings do not name it
            raise Refused(f'data.task={task.name!r}: {error}') from None
        raise
