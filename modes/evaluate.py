"""`--mode=evaluate`: task metrics of one checkpoint, of some steps of a run, or of each new step.

Source: T5X t5x/eval.py.
"""

import functools
import json
import math
import time
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl.flags import FlagValues
from ml_collections import ConfigDict

import checkpoint
import formats.open
import infer
import partition
import paths
import tasks.open
from checkpoint import MANIFEST
from configs import check
from messages import Refused, first_ten
from model import T5Config
from modes import command_line, process
from modes.of_checkpoint import check_rows, settings_and_model, vocabulary_of_checkpoint
from paths import AnyPath
from randomness import digest
from run import agreement, checks, results, task_metrics, workdir
from run.console import Console
from run.examples import check_split
from sources.files import FileRecord
from stream import OpenTask

SECONDS_BETWEEN_LOOKS = 10.0  # for a new checkpoint


def main(config: ConfigDict | None, flags: FlagValues, signals: process.Signals) -> int:
    signals.advice = process.SAME_COMMAND
    evaluation = prepare(config, command_line.changes(), **command_line.values_of_mode())
    signals.begin_work()
    evaluation.run()
    return 0


def prepare(
    config: ConfigDict | None,
    changes: Mapping[str, check.Value],
    checkpoint: str,
    output_dir: str = '',
    step: str = '',
    split: str = '',
    watch: bool = False,
) -> 'CheckpointEvaluation':
    """Return an evaluation with `config`, or with the run's settings and `changes` of them."""
    if not checkpoint:
        raise Refused('--mode=evaluate needs --checkpoint=RUN, or a checkpoint')
    config, model_config = settings_and_model(paths.source_path(checkpoint), config, changes)
    return CheckpointEvaluation(config, checkpoint, output_dir, step, split, watch, model_config)


class Deleted(Refused):
    """Training has deleted a checkpoint."""


class CheckpointEvaluation:
    """An evaluation. Existing results are not computed again, and never replaced.

    `path` is a run, or a checkpoint that `infer.load` opens; the results go to `output_dir`, by
    default the run. `step` is 'last', 'best', 'all', or numbers separated by commas. With `watch`, evaluate
    all steps, and each new one as it appears, until the last one of the run. `model_config` is by default
    the checkpoint's. Raises Refused or OSError before anything is compiled.
    """

    def __init__(
        self,
        config: ConfigDict,
        path: str,
        output_dir: str = '',
        step: str = '',
        split: str = '',
        watch: bool = False,
        model_config: T5Config | None = None,
    ):
        self.watch = watch
        self.model_config = model_config
        self.dtype = config.restore.dtype
        infer_eval = config.infer_eval.copy_and_resolve_references()
        infer_eval.split = split or infer_eval.split
        check_split(infer_eval.split)
        self.console = Console()
        self.run_folder, self.checkpoints = choose(path, step, watch)
        self.folder = output_folder(self.run_folder, output_dir)
        self.results = results.Results(self.folder)
        self.results.scores()  # raises Refused for a damaged file
        self.mesh = partition.make_mesh(**config.mesh)
        self.t5: infer.T5 | None = None  # compiled once for all steps
        self.loaded_path: AnyPath | None = None  # the checkpoint of its parameters
        opened = task_metrics.open_tasks(config.data, infer_eval, config.decode)
        first = self.run_folder  # if it has no checkpoint yet
        if self.checkpoints:
            first, _ = self.checkpoints[0]
        if self.folder in (first, first.parent):
            check_files_of_run(first, config, opened, infer_eval.split)
        if model_config is None:
            model_config = formats.open.config_beside(first)
        if model_config is None:
            model_config = formats.open.open_model(first, part='').config
        self.vocabulary = vocabulary_of_checkpoint(first, config.data, model_config)
        self.tasks = task_metrics.read_tasks(
            self.console, opened, self.vocabulary, config.data, infer_eval, config.decode
        )
        agreement.in_all(self.check_others)
        self.events = workdir.Events(self.folder / results.FOLDER)

    def run(self) -> None:
        """Evaluate the checkpoints. Raises Refused or OSError for one that cannot be opened."""
        if jax.process_index() == 0:
            with paths.naming(self.folder):
                self.results.write_table()  # an earlier call may have been killed before it
        if self.watch:
            self.evaluate_as_they_appear()
        else:
            for path, step in self.checkpoints:
                self.evaluate(path, step)
        self.console.line(f'Results are in {self.results.table_file} and {self.results.folder}.')

    def check_others(self) -> None:
        """Raise Refused, in the first process, if results of other files or settings are in the way."""
        if jax.process_index() > 0:
            return
        for task in self.tasks:
            steps = []
            for path, step in self.checkpoints:
                settings = self.results.settings_of(task.name, step)
                if settings not in (None, self.identity(task, path)):
                    steps.append(f'{step:,}')
            if steps:
                raise Refused(
                    f'{self.folder} has {task.name} at step {first_ten(steps)} from other files or settings: '
                    'name another --output_dir'
                )

    def identity(self, task: task_metrics.EvaluatedTask, path: AnyPath) -> str:
        """Return hashes of everything on which the results of a task and a checkpoint depend."""
        settings, examples = task.settings.split()
        is_of_run = self.folder == path.parent and paths.is_file(path / MANIFEST)
        if not is_of_run:
            settings = digest([settings, str(path), formats.open.identity(path)])
        if self.model_config is not None or self.dtype != 'float32':
            settings = digest([settings, str(self.model_config), self.dtype])
        return f'{settings} {examples}'

    def evaluate_as_they_appear(self) -> None:
        """Evaluate the checkpoints of a run up to its last step. Training may delete some meanwhile."""
        run = self.run_folder
        evaluated: set[int] = set()
        newest = 0
        while True:
            steps = steps_of_first_process(checkpoint.steps(run))
            for step in steps:
                newest = max(newest, step)
                if step in evaluated:
                    continue
                try:
                    self.evaluate(run / f'checkpoint_{step}', step)
                    evaluated.add(step)
                except Deleted as error:
                    self.console.line(str(error))
            has_ended = newest >= last_step(run) and evaluated.issuperset(steps)
            if agreement.from_first_process(np.array(has_ended)):
                return
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def evaluate(self, path: AnyPath, step: int) -> None:
        """Evaluate a checkpoint on each task that has no results for it."""
        for task in self.tasks:
            identity = self.identity(task, path)
            is_evaluated = self.results.settings_of(task.name, step) == identity
            if agreement.from_first_process(np.array(is_evaluated)):
                self.console.line(f'Step {step:,}: {task.name} is evaluated already.')
                continue
            with self.console.working(f'Evaluating {task.name}, step {step:,}'):
                result = task.results(self.load(path))
            assert result is not None
            evaluated = task._replace(settings=identity)
            agreement.in_all(functools.partial(self.write, evaluated, step, result))
            self.console.line(results.describe(step, task.split, task.name, result.values))

    def write(
        self, task: task_metrics.EvaluatedTask, step: int, results: task_metrics.TaskResults
    ) -> None:
        """Write the results of a task at a step, and their events, in the first process."""
        with paths.naming(self.folder):
            if task_metrics.write_results(self.folder, task, step, results, self.console.line):
                self.events.write(task.name, step, results.events())

    def load(self, path: AnyPath) -> infer.T5:
        """Return the model with the parameters of a checkpoint. All processes fail if one does."""
        if self.t5 is not None and path == self.loaded_path:
            return self.t5

        def read() -> infer.T5:
            t5 = infer.load(str(path), config=self.model_config, mesh=self.mesh, dtype=self.dtype)
            check_rows(self.vocabulary, path, t5.config.vocab_size)
            t5.vocabulary = self.vocabulary
            return t5

        try:
            t5 = agreement.in_all(read)
        except (ValueError, OSError):
            if not agreement.from_processes(np.array(path.exists())).all():
                raise Deleted(f'{path} was deleted meanwhile: name another --step') from None
            raise
        self.loaded_path = path
        if self.t5 is None or self.t5.config != t5.config:
            self.t5 = t5
        else:
            self.t5.arrays = t5.arrays
        return self.t5


def choose(path: str, step: str, watch: bool) -> tuple[AnyPath, list[tuple[AnyPath, int]]]:
    """Return the run, and the checkpoints that --checkpoint, --step and --watch choose, with their steps.

    For a checkpoint outside a run, the first is its parent folder.
    """
    folder = paths.source_path(path)
    steps = checkpoint.steps(folder)
    is_run = bool(steps)
    if watch and not (folder / 'checkpoint').exists():
        is_run = is_run or checks.is_run(folder)
    if (step or watch) and not is_run:
        flag = '--watch' if watch else f'--step={step}'
        raise Refused(f'{flag}: --checkpoint={path} has no checkpoint_STEP folders: name a run')
    if step and watch:
        raise Refused(f'--step={step} with --watch, which evaluates all: leave one out')
    if not is_run:
        opened = formats.open.open_checkpoint(folder)
        return opened.directory.parent, [(opened.directory, formats.open.saved_step(opened.leaves))]
    if not watch:
        steps = formats.open.choose_steps(folder, step, steps)
    return folder, [(folder / f'checkpoint_{x}', x) for x in steps_of_first_process(steps)]


def output_folder(run: AnyPath, output_dir: str) -> AnyPath:
    """Return the folder of the results: --output_dir, or the run of the checkpoint."""
    folder = run
    if output_dir:
        folder = paths.to_path(output_dir)
    elif not checks.is_run(run):
        raise Refused(f'{run} is not a run: name --output_dir for the results')
    paths.check_new(folder)
    if jax.process_index() == 0:
        results.check_writable(folder)
    return folder


def check_files_of_run(
    directory: AnyPath, config: ConfigDict, opened: Sequence[OpenTask], split: str
) -> None:
    """Raise Refused if a run's own task reads files other than the run that saved `directory` did.

    Their results would have the names of the run's own results. The test split may be in any files.
    """
    if split == 'test':
        return
    run_settings = check.read_stored(directory)
    file = directory / 'data_files.json'
    if not run_settings or run_settings['data']['task'] != config.data.task or not file.exists():
        return
    contents = {FileRecord(**record).content for record in json.loads(file.read_bytes())}
    row = tasks.open.find(config.data)
    for task in opened:
        if task.name != row.name or task.source.corpus != run_settings['corpus']:
            continue
        part = 'train' if task.source.validation is None else split
        files = [record for record in task.source.files if record.split == part]
        others = [record.path for record in files if record.content not in contents]
        if others:
            raise Refused(
                f'{first_ten(others)}: the run has results of other files: name --output_dir, or --split=test'
            )


def steps_of_first_process(steps: Sequence[int]) -> list[int]:
    """Return the first process's steps: the processes may look before and after a save."""
    num_steps = int(agreement.from_first_process(np.array(len(steps))))
    if num_steps == 0:
        return []
    same_number = np.zeros(num_steps, np.int64)
    same_number[: len(steps)] = steps[:num_steps]
    return agreement.from_first_process(same_number).tolist()


def last_step(run: AnyPath) -> float:
    """Return the step at which a run ends or has ended; infinity if unknown."""
    try:
        content = json.loads((run / 'config.json').read_bytes())
        return content.get(workdir.LAST_STEP, content['train']['steps'])
    except (OSError, ValueError, KeyError):
        return math.inf
