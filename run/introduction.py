"""The introduction that a run prints before its first step: its model, its devices and its data."""

import math
from collections.abc import Collection, Sequence

from jax.sharding import Mesh

import model
import tasks.open
from messages import first_ten
from model import T5Config
from run.console import Console
from run.examples import changes_of_targets
from run.start import Start
from sources.open import find_cache
from stream import OpenTask, Stream


def introduce(
    terminal: Console,
    training: Stream,
    model_config: T5Config,
    trained: Collection[str],
    mesh: Mesh,
    answered: Sequence[OpenTask],
    start: Start,
) -> None:
    """Print the first lines of a run.

    `trained`: the parameters that are not frozen; `answered`: the tasks with metrics in this run.
    """
    data_group = training.data_group
    mixture = training.mixture
    lines = []
    if mixture.corpus == 'pydoc instead of C4':
        lines += [
            '!' * 80,
            '!!!  THIS IS NOT C4. data.files is empty, and data.tfds_dir holds no prepared c4/en, so',
            "!!!  the run learns from the English in this Python's own documentation, 2 MB of it:",
            '!!!  enough to see that everything works, useless as a model.',
            "!!!  C4: --config.data.files='hf://datasets/allenai/c4/en/c4-train.*.json.gz' (docs/data.md),",
            '!!!  whose shards are fetched once each, 305 GB in all.',
            '!' * 80,
        ]
    sizes = {path: math.prod(shape) for path, shape in model.shapes(model_config).items()}
    num_parameters = sum(sizes.values())
    num_trained = sum(sizes[path] for path in trained)
    note = ''
    if num_trained < num_parameters:
        note = f' ({num_trained:,} of them trained)'
    description = mixture.tasks[0].source.description
    if not mixture.is_single:
        rates = [f'{task.name} {task.rate:.3g}' for task in mixture.tasks]
        description = f'mixture of {len(rates)} tasks: {first_ten(rates)}'
    platform = mesh.devices.flat[0].platform
    lines += [
        f'T5 with {num_parameters:,} parameters{note} in {model_config.dtype} on {mesh.size} {platform} device(s), '
        f'{dict(mesh.shape)}.',
        f'Text: {description}; vocabulary: {training.vocabulary.size:,} pieces.',
    ]
    if model_config.module:
        lines.append(f'The model is model.py with the changes of {model_config.module}.')
    lines += tasks.open.other_versions(mixture)
    cached = [find_cache(data_group, task.name) for task in mixture.tasks]
    if data_group.cache_dirs and not any(cached):
        lines.append(
            f'data.cache_dirs={data_group.cache_dirs!r} has no effect: it holds no complete cache '
            f'of data.task={data_group.task!r}.'
        )
    with_metrics = [task.name for task in mixture.tasks if task.task.metric_fns]
    if with_metrics and not answered:
        names = first_ten(with_metrics)
        lines.append(
            f'infer_eval.every_steps=0: no metrics of {names}; --mode=evaluate computes them later.'
        )
    if not start.is_resumed:
        with terminal.working('Reading the first targets'):
            lines += changes_of_targets(training.tasks)
    for line in lines:
        terminal.line(line)
