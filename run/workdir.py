"""The files of a run in its workdir.

    lock               held by the process that uses the workdir
    config.json        the resolved settings; marks the folder as a run of this program
    model-info.txt     parameters and optimizer state: shapes and shardings
    vocabulary.model   the SentencePiece model, or tokenizer.json if the vocabulary is one
    metrics.jsonl      a line per logged step and per evaluation
    train/ ...         the same numbers as TensorBoard events
    inference_eval/    task metrics, and the answers behind them (results.py)
    results.csv        a table of the task metrics
    checkpoint_STEP/   a checkpoint (checkpoint.py)

With several processes, the first one writes.
"""

import io
import json
import math
import os
import sys
import tempfile
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorboard.summary
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

import checkpoint
import paths
from formats import best
from run.agreement import counts_of_all, from_first_process, from_processes, in_all
from run.lock import Lock, lock
from run.prefetch import PrefetchedBatch
from stream import Stream

LAST_STEP = 'last_step'  # in config.json, if a run has ended before train.steps


class Workdir(NamedTuple):
    """The folder of a run."""

    path: paths.AnyPath
    lock: Lock  # while it is open, no other process uses the workdir
    metrics: 'Metrics'
    saver: checkpoint.Saver
    files: dict[str, bytes]  # copied into every checkpoint: settings, vocabulary, a user's model

    def prune(self) -> None:
        """Delete old checkpoints according to the settings `save`."""
        prune(self.path, self.metrics.save, self.metrics.history().rank)


class Progress(NamedTuple):
    """The progress of a run, which its checkpoint keeps with the state and the position in the data."""

    interval: Sequence[Mapping[str, float]] = ()  # metrics of the steps since the last logged one
    num_not_finite: int = 0  # steps skipped
    seconds: Mapping[str, float] = {}  # Clock.totals
    recent: Any = None  # TrainState.recent, or lists from a checkpoint


class Events:
    """TensorBoard's events, in a folder for each name. For a bucket, written on a disk and copied."""

    def __init__(self, folder: paths.AnyPath):
        self.folder = folder
        self.local = folder
        if not isinstance(folder, Path):
            self._temporary = tempfile.TemporaryDirectory()  # removed with this object
            self.local = Path(self._temporary.name)
        self.writers: dict[str, tensorboard.summary.Writer] = {}
        # A module of this name keeps TensorBoard's writer from importing TensorFlow, which takes seconds.
        sys.modules['tensorboard.compat.notf'] = types.ModuleType('tensorboard.compat.notf')

    def write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Write {tag: number} of one step."""
        if name not in self.writers:
            self.writers[name] = tensorboard.summary.Writer(str(self.local / name))
        with paths.naming(self.local / name):
            for tag, value in values.items():
                self.writers[name].add_scalar(tag, value, step)
            self.writers[name].flush()
        if self.local != self.folder:
            for file in (self.local / name).glob('events.*'):
                paths.replace_file(self.folder / name / file.name, file.read_bytes())


class Metrics:
    """metrics.jsonl and TensorBoard. To send all numbers elsewhere as well, add a line to `write`."""

    def __init__(
        self, workdir: paths.AnyPath, lines: Sequence[Mapping], corpus: str, save: Mapping
    ):
        """Begin with `lines`, all before the next step: a resumed run repeats later steps."""
        self.corpus = corpus
        self.save = save
        self.file = workdir / 'metrics.jsonl'
        self.events = Events(workdir)
        # The lines of evaluations; only the first process has them.
        self.evaluations: list[Mapping] = []
        if jax.process_index() == 0:
            self.evaluations = [line for line in lines if line['run'] != 'train']
            self.content = ''.join(json.dumps(line) + '\n' for line in lines).encode()
            paths.replace_file(self.file, self.content)

    def history(self) -> best.History:
        """Return the values of `save.best_metric` so far; only the first process has them."""
        return best.history(self.save, self.evaluations)

    def missing(self, names: Sequence[str], step: int) -> list[str]:
        """Return the names of the evaluations after `step` that the first process has not written."""
        if not names:
            return []
        runs = [line['run'] for line in self.evaluations if line['step'] == step]
        is_written = from_first_process(np.array([name in runs for name in names]))
        return [name for name, x in zip(names, is_written, strict=True) if not x]

    def write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Write {T5X's tag: number} of a step of 'train', 'training_eval/TASK', 'inference_eval/TASK'.

        Every process calls it, and raises an error if the first one cannot write.
        """
        in_all(lambda: self._write(name, step, values))

    def _write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        if jax.process_index() > 0:
            return
        line = {'step': step, 'run': name, 'corpus': self.corpus, **values}
        text = json.dumps(line) + '\n'
        if isinstance(self.file, Path):
            with paths.naming(self.file), self.file.open('a') as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
        else:  # a bucket's files cannot be appended to
            self.content += text.encode()
            paths.replace_file(self.file, self.content)
        if name != 'train':
            self.evaluations.append(line)
        self.events.write(name, step, values)


def prune(folder: paths.AnyPath, save: ConfigDict, rank: Callable[[int], float] = float) -> None:
    """Delete old checkpoints of a run, in the first process; `rank`: step -> rank, by default the newest are best.

    Keeps: the newest; the `save.keep` best by `rank`, of finite rank (0: all); multiples of `save.keep_every`; those
    with T5X's marker file PINNED.
    """
    if not save.keep or jax.process_index() > 0:
        return
    steps = checkpoint.steps(folder)
    ranked = [step for step in steps if rank(step) > -math.inf]
    ranked.sort(key=rank, reverse=True)  # stable: of equals, the first wins
    steps_to_keep = ranked[: save.keep] + steps[-1:]
    for step in steps:
        directory = folder / f'checkpoint_{step}'
        is_multiple = bool(save.keep_every) and step % save.keep_every == 0
        if step in steps_to_keep or is_multiple or (directory / 'PINNED').exists():
            continue
        checkpoint.delete(directory)


def lock_folder(folder: paths.AnyPath) -> Lock:
    """Lock a workdir, in the first process, until the lock is closed. Raises Refused with the holder's name."""
    remedy = (
        'stop that run, or name another --workdir; if this process has prepared it before, train '
        'that run, or close its workdir.lock'
    )
    return lock(folder / 'lock', str(folder), remedy, jax.process_index() == 0)


def progress_files(stream: Stream, batch: PrefetchedBatch, progress: Progress) -> dict[str, bytes]:
    """Return the files of a checkpoint after `batch`, for `read_progress`. Every process calls it."""
    rows = np.zeros((stream.batch_size, *batch.after.shape[1:]), np.int64)
    rows[stream.rows] = batch.after
    position_file = io.BytesIO()
    np.save(position_file, from_processes(rows).max(axis=0))
    files = {
        'data_counts.json': json.dumps(counts_of_all(stream, batch)).encode(),
        'data_files.json': json.dumps([x._asdict() for x in stream.mixture.files]).encode(),
        'data_position.npy': position_file.getvalue(),
        'interval.json': json.dumps(progress.interval).encode(),
        'not_finite.json': json.dumps(progress.num_not_finite).encode(),
        'seconds.json': json.dumps(progress.seconds).encode(),
    }
    if progress.recent is not None:
        files['recent.json'] = json.dumps(np.asarray(progress.recent).tolist()).encode()
    return files


def read_progress(directory: paths.AnyPath | None, stream: Stream) -> Progress:
    """Seek `stream` to its position in the checkpoint `directory`; return the progress. None: a new run."""
    if directory is None:
        return Progress()
    positions = np.load(io.BytesIO((directory / 'data_position.npy').read_bytes()))
    stream.seek(positions[stream.rows])
    if jax.process_index() == 0:  # counts are summed over processes
        num_examples = json.loads((directory / 'data_counts.json').read_bytes())
        stream.counts[:] = [num_examples[task.name] for task in stream.tasks]
    interval = json.loads((directory / 'interval.json').read_bytes())
    progress = Progress(interval, json.loads((directory / 'not_finite.json').read_bytes()))
    for name in ('seconds', 'recent'):  # newer than some runs
        file = directory / f'{name}.json'
        if file.exists():
            progress = progress._replace(**{name: json.loads(file.read_bytes())})
    return progress


def model_info(
    shapes: Mapping[str, Any], specs: Mapping[str, Any], trained: Collection[str]
) -> str:
    """Return T5X's model-info.txt: every array of the state, its partition spec, and whether it is frozen.

    `shapes`: {path of a T5X checkpoint: jax.ShapeDtypeStruct}; `specs`: {path: PartitionSpec or
    None}; `trained`: the paths of parameters.
    """
    params = []
    state = []
    num_params = 0
    num_trained = 0
    for path, x in sorted(shapes.items()):
        prefix, name = path.split('/', 1)
        axes = tuple(specs[path]) if isinstance(specs[path], PartitionSpec) else ()
        line = f'Variable {name:<80} size {x.size:<12} shape {x.shape!s:<40} partition spec {axes}'
        if prefix != 'target':
            state.append(line)
            continue
        num_params += x.size
        if name in trained:
            num_trained += x.size
        else:
            line += ' frozen'
        params.append(line)
    params.append(f'Total number of parameters: {num_params}')
    if num_trained < num_params:
        params.append(f'Number of trained parameters: {num_trained}')
    return '\n'.join([*params, '', *state]) + '\n'


def record_end(workdir: paths.AnyPath, step: int) -> None:
    """Write into config.json, until the run resumes, that it has ended before train.steps."""
    if jax.process_index() > 0:
        return
    file = workdir / 'config.json'
    content = json.loads(file.read_bytes())
    content[LAST_STEP] = step
    paths.replace_file(file, json.dumps(content, indent=1).encode())
