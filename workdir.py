"""What a run leaves behind in its workdir, and what it prints.

    lock               held by the process that uses the workdir
    config.json        the resolved settings; marks the folder as a run of this program
    model-info.txt     parameters and optimizer state: shapes and shardings
    vocabulary.model   the SentencePiece model
    metrics.jsonl      a line per logged step and per evaluation
    train/ ...         the same numbers as TensorBoard events
    checkpoint_STEP/   checkpoint.py

Of several processes the first one writes and prints.
"""

import contextlib
import fcntl
import json
import math
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
import tensorboard.summary
from jax.experimental import multihost_utils

import checkpoint
from configs import base

# What a run writes into its workdir. A folder that holds one of these is a run of ours, or is left alone.
NAMES = (
    'lock',
    'config.json',
    'model-info.txt',
    'vocabulary.model',
    'metrics.jsonl',
    'train',
    'training_eval',
    'checkpoint_*',
    # Checkpoints of other programs. A run among their files would be taken for one.
    'checkpoint',
    '*.safetensors',
    '*.ckpt-*',
)
LOCK_TEXT = 'process '  # the first word of our lock
SECONDS_BETWEEN_LINES = 60  # of progress where the output is no terminal


def check_is_run(workdir: Path) -> None:
    """Raise ValueError unless `workdir` is a run of this program, or holds nothing that a run would write.

    Nothing is written. A folder with other files is fine: a run never touches those.
    """
    for parent in (workdir, *workdir.parents):
        if parent.exists() and not parent.is_dir():
            raise ValueError(f'{parent} is a file, not a folder: name another --workdir')
    if workdir == Path(workdir.root) or workdir == Path(__file__).parent:
        raise ValueError(
            f'{workdir} is not a run of this program; name another --workdir, for example '
            f'{workdir / "runs" / "mine"}'
        )
    if is_run(workdir):
        return
    for pattern in NAMES:
        for path in sorted(workdir.glob(pattern)):
            if path.name == 'lock' and is_own_lock(path):
                continue  # left by a start that was refused or stopped
            raise ValueError(
                f'{workdir} is not a run of this program; name another --workdir '
                f'({path.name} is in it, which a run would overwrite)'
            )


def is_run(workdir: Path) -> bool:
    """Return whether this program has written `workdir`: its config.json, or else those of its checkpoints."""
    files = [workdir / 'config.json']
    if not files[0].exists():
        files = sorted(workdir.glob('checkpoint_*/config.json'))
    return any(is_own_config(file) for file in files)


def is_own_config(file: Path) -> bool:
    """Return whether `file` is the config.json of a run."""
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError, FileNotFoundError, IsADirectoryError):
        return False
    return isinstance(settings, dict) and {'data_fingerprint', 'model', 'train'} <= settings.keys()


def is_own_lock(file: Path) -> bool:
    """Return whether `file` is a lock that a run has left, or an empty file."""
    if not file.is_file():
        return False
    with file.open('rb') as stream:
        content = stream.read(len(LOCK_TEXT))
    return content in (b'', LOCK_TEXT.encode())


def lock(workdir: Path) -> IO:
    """Make `workdir` and keep it for this run until the returned file is closed or the process ends.

    Raises ValueError that names the process which has it.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    file = (workdir / 'lock').open('a+')
    if jax.process_index() > 0:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read()
        file.close()
        remedy = 'stop that run, or name another --workdir'
        if holder.startswith(f'{LOCK_TEXT}{os.getpid()} on {socket.gethostname()},'):
            remedy = (
                'this process has prepared it before: train that run, or close its .lock, or name another '
                '--workdir'
            )
        raise ValueError(f'{workdir} is in use by {holder}: {remedy}') from None
    file.truncate(0)
    file.write(f'{LOCK_TEXT}{os.getpid()} on {socket.gethostname()}, since {time.ctime()}')
    file.flush()
    return file


def check_saving(workdir: Path, num_bytes: int) -> None:
    """Save a small array in `workdir` and read it back as checkpoints are, and see to the room on the disk.

    Raises OSError where a checkpoint of `num_bytes` would be lost for a missing permission, a name that
    TensorStore refuses or a full disk. Every process calls it.
    """
    folder = workdir / '.saving'
    values = np.arange(8, dtype=np.float32)
    try:
        if jax.process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        multihost_utils.sync_global_devices(f'{folder} is removed')
        path = checkpoint.save(folder, 0, {'target/values': values})
        found = checkpoint.restore(path)['target/values']
        if not np.array_equal(found, values):
            raise OSError(f'{path} holds other numbers than were saved')
        multihost_utils.sync_global_devices(f'{folder} is read')
        if jax.process_index() == 0:
            shutil.rmtree(folder)
    except (OSError, ValueError) as error:
        raise OSError(
            f'{workdir} cannot hold checkpoints ({error}): correct its permissions, name or disk, or name '
            'another --workdir'
        ) from error
    free = shutil.disk_usage(workdir).free
    if free < num_bytes:
        raise OSError(
            f'{workdir} has {free / 1e9:.1f} GB of free space, a checkpoint takes {num_bytes / 1e9:.1f}: '
            'free some, or name another --workdir'
        )


def check_never_saved(workdir: Path) -> None:
    """Raise ValueError where a run without checkpoints had some: starting anew would erase its metrics."""
    if not is_own_config(workdir / 'config.json'):
        return
    if list(workdir.glob('checkpoint_*.tmp-*')):
        return  # the first save was interrupted
    settings = json.loads((workdir / 'config.json').read_bytes())
    last = settings['train']['steps']
    first_save = min(settings['save']['every_steps'], last)
    lines = read_metrics(workdir)
    num_steps = max((line['step'] for line in lines), default=0)
    is_finished = any(line['step'] == last and line['run'] != 'train' for line in lines)
    if num_steps > first_save or is_finished:
        raise ValueError(
            f'{workdir} has the metrics of {num_steps:,} steps but no checkpoint to go on from: put its '
            'checkpoints back, remove metrics.jsonl to start at step 0, or name another --workdir'
        )


def compare_settings(old: Mapping, new: Mapping, may_change: tuple[str, ...]) -> list[str]:
    """Return 'name: old -> new' for each setting that changed, except those that `may_change` begin.

    A setting that `old`, of an older version, lacks has its default.
    """
    defaults = json.loads(base.get_config().to_json())
    old = checkpoint.flatten(defaults) | checkpoint.flatten(old)
    new = checkpoint.flatten(new)
    changes = []
    for name in sorted(old | new):
        if old.get(name) != new.get(name) and not name.startswith(may_change):
            changes.append(f'{name}: {old.get(name)!r} -> {new.get(name)!r}')
    return changes


def replace_file(file: Path, content: bytes) -> None:
    """Write all of `file` or nothing: a reader finds the old content or the new one, even after a crash."""
    unfinished = file.with_name(f'.{file.name}.unfinished')
    with unfinished.open('wb') as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def read_metrics(workdir: Path) -> list[dict]:
    """Return the lines of metrics.jsonl, without those that a crash has cut."""
    file = workdir / 'metrics.jsonl'
    if not file.exists():
        return []
    lines = []
    for text in file.read_text(errors='replace').splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {'step', 'run'} <= line.keys():
                lines.append(line)
    return lines


class Metrics:
    """metrics.jsonl and TensorBoard. Every number of a run passes `write`: to send them elsewhere (Weights &
    Biases), do it there."""

    def __init__(self, workdir: Path, first_step: int, corpus: str):
        """Lines after `first_step` are dropped: the steps will be taken again, with the same numbers."""
        self.workdir = workdir
        self.corpus = corpus
        self.writers: dict[str, tensorboard.summary.Writer] = {}
        if jax.process_index() > 0:
            return
        kept = [line for line in read_metrics(workdir) if line['step'] <= first_step]
        file = workdir / 'metrics.jsonl'
        replace_file(file, ''.join(json.dumps(line) + '\n' for line in kept).encode())
        self.file = file.open('a', buffering=1)

    def write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """`name`: 'train' or 'training_eval/TASK'; `values`: T5X's tags -> numbers."""
        if jax.process_index() > 0:
            return
        line = {'step': step, 'run': name, 'corpus': self.corpus, **values}
        self.file.write(json.dumps(line) + '\n')
        os.fsync(self.file.fileno())
        if name not in self.writers:
            self.writers[name] = tensorboard.summary.Writer(str(self.workdir / name))
        for tag, value in values.items():
            self.writers[name].add_scalar(tag, value, step)
        self.writers[name].flush()


class Console:
    """What a run prints: lines that stay and, on a terminal, one live line below them."""

    def __init__(self):
        self.is_silent = jax.process_index() > 0
        self.is_terminal = sys.stdout.isatty()
        # How often something that changes is worth a line.
        self.seconds_between_lines = 1 if self.is_terminal else SECONDS_BETWEEN_LINES
        self._last_line = time.monotonic()
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        """Print a line that stays."""
        start, end = ('\r', '\x1b[K\n') if self.is_terminal else ('', '\n')
        self._print(f'{start}{text}{end}')

    def live(self, text: str) -> None:
        """Show a line that the next one overwrites; where the output is no terminal, print it."""
        if not self.is_terminal:
            return self.line(text)
        width = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be overwritten
        self._print(f'\r{text[:width]}\x1b[K')

    def is_due(self) -> bool:
        """Return whether nothing was printed for `seconds_between_lines`."""
        return time.monotonic() - self._last_line > self.seconds_between_lines

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """While the body runs, show `text` and the seconds since it began, whenever a line is due."""
        start = time.monotonic()
        done = threading.Event()

        def show():
            while not done.wait(0.5):
                if self.is_due():
                    self.live(f'{text}: {time.monotonic() - start:.0f} s')

        thread = threading.Thread(target=show, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self.is_silent:
            return
        with self._lock:
            try:
                print(text, end='', flush=True)
            except (
                OSError
            ):  # the terminal or the pipe is closed: the run is worth more than its lines
                self.is_silent = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def model_info(shapes: Mapping[str, Any], specs: Mapping[str, Any]) -> str:
    """Return T5X's model-info.txt: each array of parameters and optimizer state, and its partition spec.

    `shapes` and `specs`: {path of a T5X checkpoint: jax.ShapeDtypeStruct, PartitionSpec or None}.
    """

    def describe(path: str) -> str:
        name = path.split('/', 1)[1]
        x = shapes[path]
        spec = specs[path]
        spec = tuple(spec) if isinstance(spec, jax.sharding.PartitionSpec) else ()
        return f'Variable {name:<80} size {x.size:<12} shape {x.shape!s:<40} partition spec {spec}'

    params = [path for path in sorted(shapes) if path.startswith('target/')]
    state = [path for path in sorted(shapes) if not path.startswith('target/')]
    num_params = sum(math.prod(shapes[path].shape) for path in params)
    lines = [describe(path) for path in params]
    lines += [f'Total number of parameters: {num_params}', '']
    lines += [describe(path) for path in state]
    return '\n'.join(lines) + '\n'
