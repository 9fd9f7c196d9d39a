"""The best step of a run, by a metric of its evaluations.

It decides which checkpoints are kept (`save.keep`), when a run ends early (`train.early_stopping`)
and which checkpoint `--step=best` opens. The values are those in metrics.jsonl, so a resumed run
decides as if it had never stopped. Source: T5X t5x/checkpoints.py SaveBestCheckpointer,
t5x/trainer.py EarlyStoppingAction. Imports no jax.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

import paths
from configs import base
from configs import check as settings
from messages import Refused, first_ten


class History(NamedTuple):
    """The values of a run's `save.best_metric`."""

    metric: str  # '' if the run has none
    best_is: str  # 'higher' or 'lower'
    values: dict[int, float]  # {step: value}

    def rank(self, step: int) -> float:
        """Return a number that is larger for a better step: -inf for nan, `step` without a metric."""
        if not self.metric:
            return step
        value = self.values.get(step, math.nan)
        if math.isnan(value):
            return -math.inf
        if self.best_is == 'lower':
            return -value
        return value

    def best_of(self, steps: Iterable[int]) -> int | None:
        """Return the best of some steps, the first if several are; None if none has a value."""
        best = max(sorted(steps), key=self.rank, default=None)
        if not self.metric or best is None or self.rank(best) == -math.inf:
            return None
        return best

    def ends(self, early_stopping: int) -> bool:
        """Return whether `early_stopping` evaluations followed the best one. T5X compares consecutive values."""
        steps = sorted(self.values)
        best = self.best_of(steps)
        num_after_best = len(steps)
        if best is not None:
            num_after_best = len(steps) - 1 - steps.index(best)
        return 0 < early_stopping <= num_after_best


def history(save: Mapping, lines: Iterable[Mapping]) -> History:
    """Return the values, in lines of metrics.jsonl, of the metric that the settings `save` name."""
    metric = save['best_metric']
    values = {}
    for line in lines:
        for tag in line:
            if metric_name(line['run'], tag) == metric:
                values[line['step']] = line[tag]
    return History(metric, save['best_is'], values)


def metric_name(run: str, tag: str) -> str:
    """Return the name that `save.best_metric` has for a tag of metrics.jsonl: without T5X's 'eval/'."""
    return f'{run}/{tag.removeprefix("eval/")}'


def read_metrics(folder: paths.AnyPath) -> list[dict]:
    """Return the lines of a run's metrics.jsonl."""
    return read_lines(folder / 'metrics.jsonl', texts=('run', 'corpus'), may_be_cut=True)


def read_lines(
    file: paths.AnyPath, texts: Sequence[str] = (), may_be_cut: bool = False
) -> list[dict]:
    """Return the lines of a file of metrics. Each has a step, numbers, and texts under the names `texts`.

    A missing file has no lines. With `may_be_cut`, skip a last line that a killed process left
    incomplete.
    """
    if not paths.is_file(file):
        return []
    contents = file.read_bytes().split(b'\n')
    if may_be_cut and contents[-1].startswith(b'{'):
        try:
            paths.json_object(contents[-1], title='')
        except Refused:
            contents.pop()
    lines = []
    for number, content in enumerate(contents, start=1):
        if not content.strip():
            continue
        title = f'line {number} of {file}'
        line = paths.json_object(content, title)
        kinds = {
            **dict.fromkeys(line, (int, float)),
            'step': (int,),
            **dict.fromkeys(texts, (str,)),
        }
        for name, kind in kinds.items():
            if type(line.get(name)) not in kind:
                raise Refused(f'{title}: {name}={line.get(name)!r:.60}: {paths.RESTORE_LINE}')
        lines.append(line)
    return lines


def best_step(folder: paths.AnyPath, steps: Sequence[int]) -> int:
    """Return the best of `steps` of the run in `folder`."""
    save = base.get_config().save.to_dict() | settings.read_stored(folder).get('save', {})
    scores = history(save, read_metrics(folder))
    best = scores.best_of(steps)
    if best is None:
        names = first_ten(list(map(str, steps)))
        raise Refused(
            f'step=best: {folder} has no save.best_metric={scores.metric!r}: name a step, {names}'
        )
    return best


def check_settings(save: ConfigDict, early_stopping: int, periods: Mapping[str, int]) -> None:
    """Raise Refused for inconsistent settings of the best step.

    `periods`: `every_steps` of the groups eval and infer_eval.
    """
    metric = save.best_metric
    if (metric and not save.best_is) or (early_stopping and not metric):
        raise Refused(
            f'save.best_metric={metric!r} with train.early_stopping={early_stopping}: name a metric, such as '
            'training_eval/TASK/loss, and set save.best_is=higher or lower'
        )
    if not metric:
        return
    group = 'infer_eval' if metric.startswith('inference_eval/') else 'eval'
    evaluate_every = periods[group]
    save_every = save.every_steps
    if evaluate_every == 0 or (save_every % evaluate_every and evaluate_every % save_every):
        raise Refused(
            f'save.best_metric={metric!r} with save.every_steps={save_every} and {group}.every_steps='
            f'{evaluate_every}: evaluate, and make one a multiple of the other'
        )
