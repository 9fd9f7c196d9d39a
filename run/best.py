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

from configs import base
from configs import check as settings
from messages import first_ten
from run import results


class History(NamedTuple):
    """The values of the metric that a run is judged by."""

    metric: str  # '' where the run has none
    best_is: str  # 'higher' or 'lower'
    values: dict[int, float]  # {step: value}

    def rank(self, step: int) -> float:
        """Return a number that is larger for a better step, -inf for nan; without a metric `step`."""
        if not self.metric:
            return step
        value = self.values.get(step, math.nan)
        if math.isnan(value):
            return -math.inf
        if self.best_is == 'lower':
            return -value
        return value

    def best_of(self, steps: Iterable[int]) -> int | None:
        """Return the first of the best ones among some steps, None where none has a value."""
        best = max(sorted(steps), key=self.rank, default=None)
        if not self.metric or best is None or self.rank(best) == -math.inf:
            return None
        return best

    def num_without_improvement(self) -> int:
        """Return the number of evaluations after the best one. T5X compares consecutive values."""
        steps = sorted(self.values)
        best = self.best_of(steps)
        if best is None:
            return len(steps)
        return len(steps) - 1 - steps.index(best)

    def ends(self, early_stopping: int) -> bool:
        """Return whether a run with this `train.early_stopping` has ended."""
        return 0 < early_stopping <= self.num_without_improvement()


def history(save: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> History:
    """Return the values in lines of metrics.jsonl of the metric that the settings `save` name."""
    metric = save['best_metric']
    values = {}
    for line in lines:
        for tag in line:
            if metric_name(line['run'], tag) == metric:
                values[line['step']] = line[tag]
    return History(metric, save['best_is'], values)


def metric_name(run: str, tag: str) -> str:
    """Return how `save.best_metric` names a tag of metrics.jsonl; T5X's 'eval/' is left out."""
    return f'{run}/{tag.removeprefix("eval/")}'


def read_metrics(folder: Any) -> list[dict]:
    """Return the lines of a run's metrics.jsonl. Raises ValueError for one that is damaged."""
    file = folder / 'metrics.jsonl'
    return results.read_metrics(file, texts=('run', 'corpus'), may_be_cut=True)


# A run in its folder.


def best_step(folder: Any, steps: Sequence[int]) -> int:
    """Return the best of the steps of a run. Raises ValueError where nothing tells it."""
    save = base.get_config().save.to_dict() | settings.read_stored(folder).get('save', {})
    found = history(save, read_metrics(folder))
    best = found.best_of(steps)
    if best is not None:
        return best
    missing = 'no save.best_metric, which tells the best step'
    if found.metric:
        missing = f'no value of save.best_metric={found.metric!r} for its steps'
    names = first_ten([str(step) for step in steps])
    raise ValueError(f'step=best: {folder} has {missing}: name one of its steps, {names}')


# Settings.


def check_settings(config: Any) -> None:
    """Raise ValueError for settings of the best step that do not fit together."""
    metric = config.save.best_metric
    if not metric and config.train.early_stopping:
        raise ValueError(
            f'train.early_stopping={config.train.early_stopping} counts evaluations without a better '
            "save.best_metric, which is '': name one, such as training_eval/TASK/loss"
        )
    if not metric:
        return
    if not config.save.best_is:
        raise ValueError(
            f"save.best_metric={metric!r} with save.best_is='': set save.best_is=higher or lower"
        )
    group = 'eval'
    if metric.startswith(f'{results.FOLDER}/'):
        group = 'infer_eval'
    evaluate_every = config[group].every_steps
    save_every = config.save.every_steps
    if evaluate_every == 0:
        raise ValueError(
            f'save.best_metric={metric!r} with {group}.every_steps=0: set that to a number of steps'
        )
    if save_every % evaluate_every and evaluate_every % save_every:
        raise ValueError(
            f'save.every_steps={save_every} and {group}.every_steps={evaluate_every}: with '
            'save.best_metric, make one a multiple of the other'
        )


def check_metric(metric: str, available: Sequence[str]) -> None:
    """Raise ValueError unless a metric is one of those that the evaluations of a run give."""
    if metric not in available:
        nearest = difflib.get_close_matches(metric, available, n=len(available), cutoff=0)
        raise ValueError(
            f'save.best_metric={metric!r}: this run has {first_ten(nearest)}: name one'
        )
