"""What a run keeps in its workdir, and whether a folder is a run.

    lock               held by the process that uses the workdir
    config.json        the resolved settings; marks the folder as a run of this program
    model-info.txt     parameters and optimizer state: shapes and shardings
    vocabulary.model   the SentencePiece model
    metrics.jsonl      a line per logged step and per evaluation
    train/ ...         the same numbers as TensorBoard events
    inference_eval/    task metrics, and what they are computed from (results.py)
    results.csv        a table of the task metrics
    checkpoint_STEP/   a checkpoint (checkpoint.py)

With several processes, the first one writes.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorboard.summary
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

import checkpoint
import partition
import paths
from configs import base
from configs.check import read_stored
from formats import best
from sources.files import describe_changes, file_from_json
from stream import OpenMixture

# The files that a run writes into its workdir. It refuses another folder that has one.
NAMES = (
    'lock',
    'config.json',
    'model-info.txt',
    'vocabulary.model',
    'metrics.jsonl',
    'train',
    'training_eval',
    'inference_eval',
    'results.csv',
    'checkpoint_*',
    # Checkpoints of other programs, which infer.load could not tell from a run.
    'checkpoint',
    '*.safetensors',
    '*.ckpt-*',
)
# The settings that may change when a run goes on. The contents of files are compared instead.
MAY_CHANGE = (
    'train/steps',
    'train/relative_steps',
    'train/epochs',
    'train/early_stopping',
    'train/on_not_finite',
    'train/max_not_finite',
    'train/num_microbatches',
    'mesh/',
    'log/',
    'save/',
    'eval/',
    'infer_eval/',
    'decode/',
    'model/remat',
    'model/scan_layers',
    'model/module',
    'data/files',
    'data/validation_files',
    'data/test_files',
    'data/metrics',
    'data/module',
    'data/cache_dirs',
    'data/use_cached',
    'data/num_workers',
    'data/allow_changed_files',
    'data/tfds',
    'data/vocabulary',
    'data/on_bad_line',
    'data/max_bad_fraction',
)
LOCK_TEXT = b'process '  # how our lock begins
SECONDS_TO_SEE = 10  # in which a file of the first process appears for the others
LOCK_SECONDS = 120.0  # after which a lock in a bucket that nobody has renewed counts no more
LAST_STEP = 'last_step'  # in config.json: where a run ended before train.steps


def check_is_run(workdir: Any) -> None:
    """Raise ValueError where `workdir` is no run of this program and a run would overwrite files."""
    paths.check_new(workdir)
    if is_run(workdir):
        return
    for path in sorted(checkpoint.list_folder(workdir)):
        if not any(path.match(pattern) for pattern in NAMES):
            continue
        if path.name == 'lock' and path.is_file():  # that of a start that was refused or stopped
            if path.read_bytes()[: len(LOCK_TEXT)] in (b'', LOCK_TEXT):
                continue
        raise ValueError(
            f'{workdir} is not a run of this program; name another --workdir '
            f'({path.name} is in it, which a run would overwrite)'
        )


def is_run(workdir: Any) -> bool:
    """Return whether the config.json of a folder, or of one of its checkpoints, is that of a run."""
    for path in checkpoint.list_folder(workdir):  # a client's glob lists all that lies below
        if path.name.startswith('checkpoint_') and is_own_config(path / 'config.json'):
            read_stored(workdir)
            return True
    return is_own_config(workdir / 'config.json')


def is_own_config(file: Any) -> bool:
    """Return whether `file` is a config.json that a run of this program has written."""
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    return isinstance(settings, dict) and {'data_fingerprint', 'model', 'train'} <= settings.keys()


def lock(file: Any, title: str, remedy: str) -> Any:
    """Lock `file` in the first process, until the returned one is closed or that process ends.

    Raises ValueError, which names the process that holds the lock.
    """
    holder = f'process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}'
    if not isinstance(file, Path):
        return BucketLock(file, holder, title, remedy)
    stream = file.open('a+')
    if jax.process_index() > 0:
        return stream
    try:
        with paths.naming(file):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.seek(0)
        other = stream.read()
        stream.close()
        raise ValueError(f'{title} is in use by {other}: {remedy}') from None
    with paths.naming(file.parent, file.parent):
        stream.truncate(0)
        stream.write(holder)
        stream.flush()
    return stream


def check_shared(workdir: Any) -> None:
    """Raise ValueError where a process does not see what the first one writes into `workdir`."""
    if jax.process_count() == 1 or not isinstance(workdir, Path):
        return
    number = partition.from_first_process(np.array(secrets.randbits(32)))
    file = workdir / f'.seen-{number}'
    if jax.process_index() == 0:
        file.touch()
    deadline = time.monotonic() + SECONDS_TO_SEE
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    is_seen = partition.from_processes(np.array(file.exists()))
    if jax.process_index() == 0:
        file.unlink()
    if not is_seen.all():
        raise ValueError(
            f'--workdir={workdir}: process {is_seen.argmin()} of {len(is_seen)} does not see what process 0 '
            'writes there: name a folder on a disk that all hosts share, or in a bucket'
        )


class BucketLock:
    """A lock in a bucket: a file that only one process can create, and that it writes again while it lives.

    The lock of a process that was killed counts for LOCK_SECONDS. A process that finds the lock of another one in
    place of its own, because it was suspended for so long, ends at once: two would write the same checkpoints.
    """

    def __init__(self, file: Any, holder: str, title: str, remedy: str):
        self.file = file
        self.content = f'{holder}\n{secrets.token_hex(8)}'.encode()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        if jax.process_index() > 0:
            return
        # A request that is sent again may find what it has written itself.
        while not create_object(file, self.content) and self._read() != self.content:
            other = self._read()
            if self._age() < LOCK_SECONDS:
                name = other.decode().partition('\n')[0]
                raise ValueError(
                    f'{title} is in use by {name}: {remedy}; if that process was killed, wait '
                    f'{LOCK_SECONDS:.0f} seconds, or remove {file}'
                )
            if self._read() == other:
                file.unlink(missing_ok=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()
            self.file.unlink(missing_ok=True)

    def __enter__(self) -> 'BucketLock':
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _renew(self) -> None:
        while not self._closing.wait(LOCK_SECONDS / 6):
            with contextlib.suppress(Exception):  # of the network: the next time may be better
                if self._read() not in (self.content, b''):  # b'': somebody has removed it
                    line = f'{self.file} is now held by another process: this one ends'
                    print(line, file=sys.stderr, flush=True)
                    os._exit(1)
                paths.replace_file(self.file, self.content)

    def _read(self) -> bytes:
        try:
            return self.file.read_bytes()
        except FileNotFoundError:
            return b''

    def _age(self) -> float:
        """Return how many seconds ago the lock was written, by the clock of the store."""
        now = self.file.with_name('lock.now')
        paths.replace_file(now, b'')
        client = paths.client_of(str(now))
        try:
            return (client.modified(str(now)) - client.modified(str(self.file))).total_seconds()
        except FileNotFoundError:  # its holder has removed it
            return LOCK_SECONDS
        finally:
            now.unlink(missing_ok=True)


def create_object(file: Any, content: bytes) -> bool:
    """Write a file of a bucket that is not there yet, and return whether this call has: of several only one has."""
    with paths.client_errors(str(file), 'written', OSError):
        try:
            paths.client_of(str(file)).pipe_file(str(file), content, mode='create')
        except OSError:  # of several kinds
            if not file.exists():
                raise
            return False
    return True


def check_saving(workdir: Any, num_bytes: int) -> None:
    """Raise OSError where `workdir` cannot hold a checkpoint of `num_bytes`. Every process calls it.

    Saves and restores a small array: it finds missing permissions, names and full disks.
    """
    folder = workdir / '.saving'
    try:
        if jax.process_index() == 0 and folder.exists():
            paths.remove_folder(folder)
        multihost_utils.sync_global_devices(f'{folder} is removed')
        checkpoint.restore(checkpoint.save(folder, 0, {'target/values': np.zeros(8, np.float32)}))
        multihost_utils.sync_global_devices(f'{folder} is read')
        if jax.process_index() == 0:
            paths.remove_folder(folder)
    except (OSError, ValueError) as error:
        reason = paths.reason(error.__cause__ or error)
        raise OSError(
            f'{workdir} cannot hold checkpoints ({reason}): correct its permissions or disk, or name '
            'another --workdir'
        ) from error
    if not isinstance(workdir, Path):
        return
    free = shutil.disk_usage(workdir).free
    if free < num_bytes:
        raise OSError(
            f'{workdir} has {free / 1e9:.1f} GB of free space, a checkpoint takes {num_bytes / 1e9:.1f}:'
            ' free some, or name another --workdir'
        )


def check_never_saved(workdir: Any, lines: Sequence[Mapping]) -> None:
    """Raise ValueError where a run has lost its checkpoints: a new start would erase its metrics.

    `lines`: those of metrics.jsonl.
    """
    is_saving = bool(checkpoint.unfinished(workdir))  # the first save was interrupted
    if is_saving or not is_own_config(workdir / 'config.json'):
        return
    stored = read_stored(workdir)
    last = stored['train']['steps']
    first_save = min(stored['save']['every_steps'], last)
    num_steps = max((line['step'] for line in lines), default=0)
    is_finished = any(line['step'] == last and line['run'] != 'train' for line in lines)
    if num_steps > first_save or is_finished:
        raise ValueError(
            f'{workdir} has the metrics of {num_steps:,} steps but no checkpoint: put its checkpoints '
            'back, remove metrics.jsonl to start at step 0, or name another --workdir'
        )


def compare_settings(
    directory: Any, settings: Mapping, options: Mapping, mixture: OpenMixture, step: int
) -> OpenMixture:
    """Return the mixture as a run reads it that goes on from the checkpoint of a step.

    `settings`: the content of config.json today; `options`: the defaults of model.options. Raises
    ValueError for changes with which the run may not continue. The text is compared by content, not by
    the names of files.
    """
    workdir = directory.parent
    old = json.loads((directory / 'config.json').read_text())
    is_other_text = old['data_fingerprint'] != settings['data_fingerprint']
    may_change: tuple[str, ...] = MAY_CHANGE
    if 'base' in settings:  # of adapters: base/fingerprint stands for its content
        may_change += ('restore/path', 'base/directory')
    if is_other_text:
        may_change += ('data_fingerprint', 'corpus')
    # A setting that the run does not have did not exist yet.
    defaults = checkpoint.flatten(json.loads(base.get_config().to_json()))
    defaults |= checkpoint.flatten({'model': {'options': options}})
    changes = changed_settings(defaults | checkpoint.flatten(old), settings, may_change)
    if changes:
        raise ValueError(
            f'{workdir} holds a run with other settings ({"; ".join(changes)}): go on with those, or '
            'name another --workdir'
        )
    file = directory / 'data_files.json'
    old_files = json.loads(file.read_bytes()) if file.exists() else None
    may_differ = settings['data']['allow_changed_files']
    if old_files is not None and (may_differ or not is_other_text):
        files = [file_from_json(record) for record in old_files]
        going_on = mixture.going_on(files, old['data_fingerprint'], step)
        if going_on is not None:
            return going_on
    if is_other_text:
        rule = ''
        if may_differ:
            rule = ', and data.allow_changed_files=True needs files of the same number and names'
        changes_of_text = describe_changes(old_files, mixture.files_as_json())
        raise ValueError(f'{workdir} holds a run on other text{rule}: {changes_of_text}')
    return mixture


def changed_settings(old: Mapping, new: Mapping, may_change: tuple[str, ...] = ()) -> list[str]:
    """Return 'name: old -> new' for each setting that differs and does not begin as `may_change`."""
    old = checkpoint.flatten(old)
    new = checkpoint.flatten(new)
    changes = []
    for name in sorted(old | new):
        if old.get(name) != new.get(name) and not name.startswith(may_change):
            changes.append(f'{name}: {old.get(name)!r} -> {new.get(name)!r}')
    return changes


def record_end(workdir: Any, step: int) -> None:
    """Write into config.json, until the run goes on, that it has ended before train.steps."""
    if jax.process_index() > 0:
        return
    file = workdir / 'config.json'
    content = json.loads(file.read_bytes())
    content[LAST_STEP] = step
    paths.replace_file(file, json.dumps(content, indent=1).encode())


show_error_of_thread = threading.excepthook


def show_unless_of_events(args: Any) -> None:
    """Show the error that ended a thread, but no OSError of a thread of TensorBoard's writers.

    Their next `flush` raises the same error, which then ends the run with its line.
    """
    is_of_events = 'AsyncWriter' in type(args.thread).__name__
    if not (is_of_events and isinstance(args.exc_value, OSError)):
        show_error_of_thread(args)


threading.excepthook = show_unless_of_events


class Workdir(NamedTuple):
    """The folder of a run."""

    path: paths.AnyPath
    lock: Any  # while it is open, no other process uses the workdir
    metrics: 'Metrics'
    saver: checkpoint.Saver
    files: dict[str, bytes]  # of every checkpoint: the settings, the vocabulary, an own model


def missing_lines(
    lines: Sequence[Mapping], directory: paths.AnyPath, num_unlogged: int, may_be_unlogged: bool
) -> str:
    """Return a line about steps before a checkpoint that metrics.jsonl lacks, '' if it has all.

    `lines`: those of metrics.jsonl; `num_unlogged`: the steps since the last logged one.
    """
    logged = [line['step'] for line in lines if line['run'] == 'train']
    if not logged and may_be_unlogged:
        return ''
    step = checkpoint.step_of(directory)
    assert step is not None
    every_steps = read_stored(directory)['log']['every_steps']
    expected = min(step // every_steps * every_steps, step - num_unlogged)
    last = max(logged, default=0)
    if last >= expected:
        return ''
    file = directory.parent / 'metrics.jsonl'
    return (
        f'{file} has no lines of the steps {last + 1:,} to {expected:,}: it is gone or cut. The run '
        'continues without them.'
    )


class Events:
    """TensorBoard's events, in a folder of their own for each name.

    For a bucket they are written on the disk first, and each file is copied as a whole.
    """

    def __init__(self, folder: Any):
        self.folder = folder
        self.local = folder
        if not isinstance(folder, Path):
            self._temporary = tempfile.TemporaryDirectory()  # is removed with this object
            self.local = Path(self._temporary.name)
        self.writers: dict[str, tensorboard.summary.Writer] = {}

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

    def __init__(self, workdir: Any, lines: Sequence[Mapping], corpus: str):
        self.corpus = corpus
        self.workdir = workdir
        self.file = workdir / 'metrics.jsonl'
        self.events = Events(workdir)
        # The lines of evaluations; only the first process has them.
        self.evaluations: list[Mapping] = []
        if jax.process_index() == 0:
            self._begin(lines)

    def _begin(self, lines: Sequence[Mapping]) -> None:
        """Begin with `lines`, those before the next step: later steps are taken again."""
        self.evaluations = [line for line in lines if line['run'] != 'train']
        self.content = ''.join(json.dumps(line) + '\n' for line in lines).encode()
        paths.replace_file(self.file, self.content)

    def go_back(self, step: int) -> None:
        """Drop the lines of the steps after `step`, which are taken again."""
        if jax.process_index() == 0:
            lines = best.read_metrics(self.workdir)
            self._begin([line for line in lines if line['step'] <= step])

    def history(self, save: Mapping) -> best.History:
        """Return the values of `save.best_metric` so far; only the first process has them."""
        return best.history(save, self.evaluations)

    def missing(self, names: Sequence[str], step: int) -> list[str]:
        """Return the names of the evaluations after `step` that the first process has not written."""
        if not names:
            return []
        written = [line['run'] for line in self.evaluations if line['step'] == step]
        is_written = [name in written for name in names]
        of_first = partition.from_first_process(np.array(is_written))
        return [name for name, x in zip(names, of_first, strict=True) if not x]

    def write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Write {T5X's tag: number} of a step of 'train', 'training_eval/TASK', 'inference_eval/TASK'.

        Each process calls it, and raises an error where the first one cannot write.
        """
        partition.in_all(lambda: self._write(name, step, values))

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
        else:  # nothing is appended to a file of a bucket
            self.content += text.encode()
            paths.replace_file(self.file, self.content)
        if name != 'train':
            self.evaluations.append(line)
        self.events.write(name, step, values)


def model_info(
    shapes: Mapping[str, Any], specs: Mapping[str, Any], trained: Collection[str]
) -> str:
    """Return T5X's model-info.txt: every array of the state, its partition spec, and what is frozen.

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
