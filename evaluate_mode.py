"""`--mode=evaluate`: task metrics of one checkpoint, of some steps of a run, or of each new one.

Source: T5X t5x/eval.py.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import best
import checkpoint
import convert
import infer
import infer_eval
import partition
import paths
import results
import settings
import sources
import workdir
from vocabulary import check_rows, vocabulary_of_checkpoint

SECONDS_BETWEEN_LOOKS = 10.0  # for a new checkpoint


class Chosen(NamedTuple):
    """The checkpoints that the flags choose."""

    folder: Any  # of the run, or the checkpoint itself
    is_run: bool
    steps: list[int]  # of the run; [] for a checkpoint that is in none


class CheckpointEvaluation:
    """Task metrics of one checkpoint, of some steps of a run, or of each new one.

    `path` is a run, or a checkpoint that `infer.load` opens; the results go to `output_dir`, by
    default the run. `step` is 'last', 'best', 'all', or numbers separated by commas. With `watch` all
    steps are evaluated, and each new one as it appears, until the last one of the run. What is there is
    not computed again. Raises ValueError or OSError, before anything is compiled, for what cannot be
    evaluated.
    """

    def __init__(
        self,
        config: Any,
        path: str,
        output_dir: str = '',
        step: str = '',
        split: str = '',
        watch: bool = False,
    ):
        self.config = config
        self.watch = watch
        self.split = split or config.infer_eval.split
        splits = settings.CHOICES['infer_eval.split']
        if self.split not in splits:
            raise ValueError(f'--split={split}: must be one of {", ".join(splits)}')
        self.console = workdir.Console()
        chosen = choose(path, step, watch)
        self.chosen = chosen._replace(steps=of_first_process(chosen.steps))
        self.folder = output_folder(self.chosen, output_dir)
        self.results = results.Results(self.folder)
        self.results.scores()  # raises ValueError for a file that is damaged
        self.mesh = partition.make_mesh(**config.mesh)
        self.t5: infer.T5 | None = None  # compiled once for all steps
        self.loaded_path: Any = None  # of the checkpoint whose parameters it has
        opened = infer_eval.open_tasks(config, self.split)
        self.vocabulary = vocabulary_of_checkpoint(self.first_checkpoint(), config.data)
        with self.console.working('Reading the tasks'):
            self.task_metrics = infer_eval.TaskMetrics(
                config,
                self.split,
                self.vocabulary,
                opened,
                self.console.line,
            )
        self.events = workdir.Events(self.folder / results.FOLDER)

    def first_checkpoint(self) -> Any:
        """Return the folder of a checkpoint that is evaluated, or the run that has none yet."""
        if self.chosen.steps:
            return self.chosen.folder / f'checkpoint_{self.chosen.steps[0]}'
        return self.chosen.folder

    def run(self) -> None:
        """Evaluate the checkpoints. Raises ValueError or OSError for one that cannot be opened."""
        if jax.process_index() == 0:
            with paths.writing_results(self.folder):
                self.results.write_table()  # a kill may have come before it
        if not self.chosen.is_run:
            path = self.chosen.folder
            self.evaluate(path, checkpoint.saved_step(convert.open_checkpoint(path).leaves))
        elif not self.watch:
            for step in self.chosen.steps:
                self.evaluate(self.chosen.folder / f'checkpoint_{step}', step)
        else:
            self.evaluate_as_they_appear()
        self.console.line(f'Results are in {self.results.table_file} and {self.results.folder}.')

    def evaluate_as_they_appear(self) -> None:
        """Evaluate the checkpoints of a run until there are those of its last step."""
        run = self.chosen.folder
        evaluated: set[int] = set()
        newest = 0
        while True:
            steps = of_first_process(checkpoint.steps(run))
            for step in steps:
                if step not in evaluated and self.evaluate_if_there(run, step):
                    evaluated.add(step)
                newest = max(newest, step)
            has_ended = newest >= last_step(run) and evaluated.issuperset(steps)
            if partition.from_first_process(np.array(has_ended)):
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def evaluate_if_there(self, run: Path, step: int) -> bool:
        """Evaluate a checkpoint that training may delete meanwhile. Return whether it was there."""
        directory = run / f'checkpoint_{step}'
        try:
            self.evaluate(directory, step)
        except (ValueError, OSError):
            if partition.from_processes(np.array(directory.exists())).all():
                raise
            self.console.line(f'{directory} was deleted before it was evaluated.')
            return False
        return True

    def evaluate(self, path: Any, step: int) -> None:
        """Evaluate a checkpoint on each task that has no results of it."""
        values = {}
        for task in self.task_metrics.tasks:
            identity = self.settings_of(task, path)
            is_evaluated = self.results.has(task.name, step, identity)
            if partition.from_first_process(np.array(is_evaluated)):
                self.console.line(f'Step {step:,}: {task.name} is evaluated already.')
                continue
            with self.console.working(f'Evaluating {task.name}, step {step:,}'):
                found = self.task_metrics(self.load(path), task)
            assert found is not None
            if jax.process_index() == 0:
                with paths.writing_results(self.folder):
                    self.events.write(task.name, step, infer_eval.events_of(found.values))
                    self.results.write(task.name, step, found.values, found.examples, identity)
                    self.results.write_table()
            values[task.name] = found.values
        if values:
            self.console.line(results.describe(step, self.split, values))

    def load(self, path: Any) -> infer.T5:
        """Return the model with the parameters of a checkpoint.

        Raises ValueError or OSError in all processes where one of them cannot read it.
        """
        if self.t5 is not None and path == self.loaded_path:
            return self.t5
        error: ValueError | OSError | None = None
        try:
            loaded = infer.load(path, mesh=self.mesh)
            check_rows(self.vocabulary, path, loaded.config.vocab_size)
        except (ValueError, OSError) as caught:
            error = caught
        num_failed = partition.from_processes(np.array(error is not None)).sum()
        if error is not None:
            raise error
        if num_failed:
            raise OSError(
                f'{num_failed} of {jax.process_count()} processes cannot read {path}: put it on a '
                'disk that all of them see'
            )
        self.loaded_path = path
        if self.t5 is None or self.t5.config != loaded.config:
            self.t5 = loaded
        else:
            self.t5.set_parameters(loaded.arrays)
        return self.t5

    def settings_of(self, task: infer_eval.EvaluatedTask, path: Any) -> str:
        """Return the hash that results have; of other folders than a run's own, with the path."""
        if self.folder in (path, path.parent):
            return task.settings
        return sources.digest([task.settings, str(path)])


def choose(path: str, step: str, watch: bool) -> Chosen:
    """Return the checkpoints that --checkpoint, --step and --watch choose."""
    folder = paths.to_path(path)
    steps = checkpoint.steps(folder)
    is_run = bool(steps)
    if watch and isinstance(folder, Path) and not (folder / 'checkpoint').exists():
        is_run = is_run or workdir.is_run(folder)
    if not is_run:
        for flag, value in (('--watch', watch), (f'--step={step}', step)):
            if value:
                raise ValueError(
                    f'{flag}: --checkpoint={path} is no run with checkpoint_STEP folders: name the '
                    f'folder of a run, or leave {flag.partition("=")[0]} out'
                )
        opened = convert.open_checkpoint(path)
        return Chosen(opened.directory, is_run=False, steps=[])
    if watch:
        if step:
            raise ValueError(
                f'--step={step} with --watch: all checkpoints are evaluated with --watch: leave one '
                'of them out'
            )
        return Chosen(folder, is_run=True, steps=steps)
    return Chosen(folder, is_run=True, steps=chosen_steps(folder, step or 'last', steps))


def chosen_steps(folder: Any, text: str, available: Sequence[int]) -> list[int]:
    """Return the steps that --step names."""
    if text.lower() == 'last':
        return [available[-1]]
    if text.lower() == 'all':
        return list(available)
    if text.lower() == 'best':
        return [best.best_step(folder, available)]
    names = [name.strip() for name in text.split(',')]
    unknown = [name for name in names if name not in map(str, available)]
    if unknown:
        raise ValueError(
            f'--step={text}: {folder} has no checkpoint_{unknown[0]}, but those of '
            f'{settings.first_ten([str(step) for step in available])}: name some of these, last, best '
            'or all'
        )
    return sorted({int(name) for name in names})


def output_folder(chosen: Chosen, output_dir: str) -> Path:
    """Return the folder of the results: --output_dir, or the run of the checkpoint."""
    if output_dir:
        folder = paths.disk_path(output_dir)
    elif chosen.is_run:
        folder = chosen.folder
    else:
        folder = chosen.folder.parent
    is_own_run = isinstance(folder, Path) and workdir.is_run(folder)
    if not output_dir and not is_own_run:
        raise ValueError(
            f'{chosen.folder} is in no run of this program, which would take the results: name a '
            'folder with --output_dir'
        )
    file = paths.blocking_file(folder)
    if file is not None:
        raise ValueError(f'--output_dir={folder}: {file} is a file: name a folder')
    if jax.process_index() == 0:
        paths.check_writable(folder)
    return folder


def of_first_process(steps: Sequence[int]) -> list[int]:
    """Return the steps that the first process has found: training may save one meanwhile."""
    num_steps = int(partition.from_first_process(np.array(len(steps))))
    if num_steps == 0:
        return []
    same_number = np.zeros(num_steps, np.int64)
    same_number[: len(steps)] = steps[:num_steps]
    return partition.from_first_process(same_number).tolist()


def last_step(run: Path) -> float:
    """Return the step at which a run ends or has ended, infinity while nobody knows."""
    try:
        content = json.loads((run / 'config.json').read_bytes())
        return content.get(workdir.LAST_STEP, content['train']['steps'])
    except (OSError, ValueError, KeyError):
        return math.inf
