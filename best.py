"""The best step of a run, by a metric of its evaluations.

It decides which checkpoints are kept (`save.keep`), when a run ends early (`train.early_stopping`)
and which checkpoint `--step=best` opens. The values are those in metrics.jsonl, so a run that goes
on decides as one that was never stopped. Source: T5X t5x/checkpoints.py SaveBestCheckpointer,
t5x/trainer.py EarlyStoppingAction. Imports no jax.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import paths
import results
import settings
from configs import base


class History(NamedTuple):
    """The values of the metric that a run is judged by."""

    metric: str  # '' where the run has none
    best_is: str  # 'higher' or 'lower'
    values: dict[int, float]  # {step: value}

    def rank(self, step: int) -> float:
        """Return a number that is larger for a better step; -inf for nan and without a value."""
        value = self.values.get(step, math.nan)
        if math.isnan(value):
            return -math.inf
        if self.best_is == 'lower':
            return -value
        return value

    def best_of(self, steps: Iterable[int]) -> int | None:
        """Return the first of the best ones among some steps, None where none has a value."""
        best = max(sorted(steps), key=self.rank, default=None)
        if best is None or self.rank(best) == -math.inf:
            return None
        return best

    def num_without_improvement(self) -> int:
        """Return the number of evaluations after the best one.

        Differs from T5X's EarlyStoppingAction, which compares each value with the one before it.
        """
        steps = sorted(self.values)
        best = self.best_of(steps)
        if best is None:
            return len(steps)
        return len(steps) - 1 - steps.index(best)

    def ends(self, early_stopping: int) -> bool:
        """Return whether a run with this `train.early_stopping` has ended."""
        return 0 < early_stopping <= self.num_without_improvement()


def history(metric: str, best_is: str, lines: Iterable[Mapping[str, Any]]) -> History:
    """Return the values of `save.best_metric` in lines of metrics.jsonl."""
    values = {}
    for line in lines:
        for tag in line:
            if metric_name(line['run'], tag) == metric:
                values[line['step']] = line[tag]
    return History(metric, best_is, values)


def metric_name(run: str, tag: str) -> str:
    """Return the name of a metric in `save.best_metric`.

    `run` and `tag` are those of metrics.jsonl; the tags of task metrics begin with T5X's 'eval/'.
    """
    return f'{run}/{tag.removeprefix("eval/")}'


def read_metrics(folder: Any) -> list[dict]:
    """Return the lines of a run's metrics.jsonl. Raises ValueError for one that is damaged."""
    file = folder / 'metrics.jsonl'
    return results.read_metrics(file, texts=('run', 'corpus'), may_be_cut=True)


# A run in its folder.


def read_settings(folder: Any) -> dict[str, Any]:
    """Return a run's config.json, {} where there is none. Raises ValueError for a damaged one."""
    file = folder / 'config.json'
    if not paths.is_file(file):
        return {}
    content = paths.read_json(file)
    settings.check_stored(content, file)
    return content


def history_of(folder: Any) -> History:
    """Return the history of the run in a folder."""
    saving = base.get_config().save.to_dict() | read_settings(folder).get('save', {})
    return history(saving['best_metric'], saving['best_is'], read_metrics(folder))


def best_step(folder: Any, steps: Sequence[int]) -> int:
    """Return the best of the steps of a run. Raises ValueError where nothing tells it."""
    found = history_of(folder)
    names = settings.first_ten([str(step) for step in steps])
    if not found.metric:
        raise ValueError(
            f'step=best: {folder} has no save.best_metric, which tells the best step: name one of '
            f'its steps, {names}'
        )
    best = found.best_of(steps)
    if best is None:
        raise ValueError(
            f'step=best: {folder} has no value of save.best_metric={found.metric!r} for its steps: '
            f'name one of them, {names}'
        )
    return best


# Settings.


def check_settings(config: Any) -> None:
    """Raise ValueError for settings of the best step that do not fit together."""
    metric = config.save.best_metric
    if not metric:
        if config.train.early_stopping:
            raise ValueError(
                f'train.early_stopping={config.train.early_stopping} counts evaluations without a '
                "better save.best_metric, which is '': name one, such as training_eval/TASK/loss"
            )
        return
    if not config.save.best_is:
        raise ValueError(
            f'save.best_metric={metric!r}: whether higher or lower values are better is not set: set '
            'save.best_is=higher or save.best_is=lower'
        )
    group = 'eval'
    if metric.startswith(f'{results.FOLDER}/'):
        group = 'infer_eval'
    check_periods(metric, group, config[group].every_steps, config.save.every_steps)


def check_periods(metric: str, group: str, evaluate_every: int, save_every: int) -> None:
    """Raise ValueError where few of the saved steps are evaluated."""
    if evaluate_every == 0:
        raise ValueError(
            f'save.best_metric={metric!r} is a task metric, and {group}.every_steps=0 computes none: '
            'set it to a number of steps'
        )
    if save_every % evaluate_every and evaluate_every % save_every:
        raise ValueError(
            f'save.every_steps={save_every} and {group}.every_steps={evaluate_every}: most saved '
            f'steps would have no value of save.best_metric={metric!r}: make one a multiple of the '
            'other'
        )


def check_metric(metric: str, available: Sequence[str]) -> None:
    """Raise ValueError unless a metric is one of those that the evaluations of a run give."""
    if metric in available:
        return
    nearest = difflib.get_close_matches(metric, available, n=len(available), cutoff=0)
    raise ValueError(
        f'save.best_metric={metric!r} is none of the metrics of this run: name one of '
        f'{settings.first_ten(nearest)}'
    )
