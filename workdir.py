"""What a run leaves behind in its workdir, and what it prints.

    lock               held by the process that uses the workdir
    config.json        the resolved settings; marks the folder as a run of this program
    model-info.txt     parameters and optimizer state: shapes and shardings
    vocabulary.model   the SentencePiece model
    metrics.jsonl      a line per logged step and per evaluation
    train/ ...         the same numbers as TensorBoard events
    inference_eval/    task metrics, and what they are computed from (results.py)
    results.csv        a table of the task metrics
    checkpoint_STEP/   a checkpoint (checkpoint.py)

With several processes, the first one writes and prints.
"""

import contextlib
import fcntl
import json
import math
import os
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
import tensorboard.summary
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

import checkpoint
import partition
import paths
import sources
from best import read_metrics, read_settings
from configs import base
from mixtures import OpenMixture
from objectives import OBJECTIVES

# The files that a run writes into its workdir. A run that finds one in a folder that is no run
# refuses the folder.
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
    # Checkpoints of other programs: infer.load could not tell whether the folder is a run or such a
    # checkpoint.
    'checkpoint',
    '*.safetensors',
    '*.ckpt-*',
)
# The settings that may change when a run goes on. Of files, vocabularies and the own model the
# contents are compared instead.
MAY_CHANGE = (
    'train/steps',
    'train/relative_steps',
    'train/epochs',
    'train/early_stopping',
    'train/num_microbatches',
    'mesh/',
    'log/',
    'save/',
    'eval/',
    'infer_eval/',
    'decode/',
    'model/module',
    'data/files',
    'data/validation_files',
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
# What runs did that are older than a setting, where that is not its default.
BEFORE_THE_SETTING = {'data/pack': 'no'}
LOCK_TEXT = 'process '  # the first word of our lock
LAST_STEP = (
    'last_step'  # the key in config.json of the step at which a run ended before train.steps
)
SECONDS_BETWEEN_LINES = 60  # of progress where the output is no terminal
MAX_COLUMNS = 79  # of a line of progress
MIN_DATA_WAIT = 0.05  # of the time, that a line of progress shows


def check_is_run(workdir: Path) -> None:
    """Raise ValueError unless `workdir` is a run, or holds nothing that a run would write.

    Other files may be in it: a run does not touch them. Writes nothing.
    """
    file = paths.blocking_file(workdir)
    if file is not None:
        raise ValueError(f'{file} is a file, not a folder: name another --workdir')
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
    """Return whether `workdir` is a run of this program.

    Its config.json says so, or else that of one of its checkpoints. Raises ValueError where the
    checkpoints are of this program and config.json is damaged.
    """
    file = workdir / 'config.json'
    copies = [copy for copy in workdir.glob('checkpoint_*/config.json') if is_own_config(copy)]
    if not file.exists():
        return bool(copies)
    if copies:
        read_settings(workdir)
    return is_own_config(file)


def is_own_config(file: Path) -> bool:
    """Return whether `file` is a config.json that a run of this program has written."""
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
    """Make `workdir` and lock it until the returned file is closed or the process ends.

    Raises ValueError, which names the process that holds the lock.
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
    with paths.naming(workdir, workdir):
        file.truncate(0)
        file.write(f'{LOCK_TEXT}{os.getpid()} on {socket.gethostname()}, since {time.ctime()}')
        file.flush()
    return file


def check_saving(workdir: Path, num_bytes: int) -> None:
    """Raise OSError where `workdir` cannot hold a checkpoint of `num_bytes`.

    Saves a small array as checkpoints are saved and reads it back, which finds missing permissions,
    names that TensorStore refuses and full disks. Every process calls it.
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
        cause = error.__cause__ or error
        raise OSError(
            f'{workdir} cannot hold checkpoints ({paths.reason(cause)}): correct its permissions, name or disk, or '
            'name another --workdir'
        ) from error
    free = shutil.disk_usage(workdir).free
    if free < num_bytes:
        raise OSError(
            f'{workdir} has {free / 1e9:.1f} GB of free space, a checkpoint takes {num_bytes / 1e9:.1f}: '
            'free some, or name another --workdir'
        )


def check_never_saved(workdir: Path) -> None:
    """Raise ValueError where `workdir` has lost its checkpoints.

    A new start would erase its metrics.
    """
    if not is_own_config(workdir / 'config.json'):
        return
    if list(workdir.glob('checkpoint_*.tmp-*')):
        return  # the first save was interrupted
    stored = read_settings(workdir)
    last = stored['train']['steps']
    first_save = min(stored['save']['every_steps'], last)
    lines = read_metrics(workdir)
    num_steps = max((line['step'] for line in lines), default=0)
    is_finished = any(line['step'] == last and line['run'] != 'train' for line in lines)
    if num_steps > first_save or is_finished:
        raise ValueError(
            f'{workdir} has the metrics of {num_steps:,} steps but no checkpoint to go on from: put its '
            'checkpoints back, remove metrics.jsonl to start at step 0, or name another --workdir'
        )


def compare_settings(
    directory: Path, settings: Mapping, mixture: OpenMixture, step: int
) -> OpenMixture:
    """Return the mixture as a run that goes on from the checkpoint of a step reads it.

    Raises ValueError where it may not go on with `settings`, the content of config.json today. The
    error lists the changes. Of the text the contents count, not the names of the files.
    """
    workdir = directory.parent
    old = json.loads((directory / 'config.json').read_text())
    is_other_text = old['data_fingerprint'] != settings['data_fingerprint']
    may_change: tuple[str, ...] = MAY_CHANGE
    if 'base' in settings:  # of adapters: its content counts, which base/fingerprint stands for
        may_change += ('restore/path', 'base/directory')
    if is_other_text:
        may_change += ('data_fingerprint', 'corpus')
    changes = changed_settings(old, settings, may_change)
    if changes:
        raise ValueError(
            f'{workdir} holds a run with other settings ({"; ".join(changes)}): go on with those, or '
            'name another --workdir'
        )
    file = directory / 'data_files.json'
    old_files = json.loads(file.read_bytes()) if file.exists() else None
    may_differ = settings['data']['allow_changed_files']
    if old_files is not None and (may_differ or not is_other_text):
        files = [sources.file_from_json(record) for record in old_files]
        going_on = mixture.going_on(files, old['data_fingerprint'], step)
        if going_on is not None:
            return going_on
    if is_other_text:
        changes_of_text = sources.describe_changes(old_files, mixture.files_as_json())
        rule = ''
        if may_differ:
            rule = (
                ', and data.allow_changed_files=True takes corrected text in files of the same number '
                'and names'
            )
        raise ValueError(f'{workdir} holds a run on other text{rule}: {changes_of_text}')
    return mixture


def changed_settings(old: Mapping, new: Mapping, may_change: tuple[str, ...]) -> list[str]:
    """Return 'name: old -> new' for each setting that changed and may not change.

    A setting may change if its name begins with one of `may_change`. A setting that is missing in
    `old` did not exist yet.
    """
    defaults = checkpoint.flatten(json.loads(base.get_config().to_json()))
    old = defaults | BEFORE_THE_SETTING | checkpoint.flatten(old)
    new = checkpoint.flatten(new)
    changes = []
    for name in sorted(old | new):
        if old.get(name) != new.get(name) and not name.startswith(may_change):
            changes.append(f'{name}: {old.get(name)!r} -> {new.get(name)!r}')
    return changes


def record_end(workdir: Path, step: int) -> None:
    """Write into config.json that the run has ended at a step before train.steps.

    A run that goes on writes config.json anew.
    """
    if jax.process_index() > 0:
        return
    file = workdir / 'config.json'
    content = json.loads(file.read_bytes())
    content[LAST_STEP] = step
    paths.replace_file(file, json.dumps(content, indent=1).encode())


class Events:
    """TensorBoard's events, in a folder of their own for each name."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.writers: dict[str, tensorboard.summary.Writer] = {}

    def write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Write {tag: number} of one step."""
        if name not in self.writers:
            self.writers[name] = tensorboard.summary.Writer(str(self.folder / name))
        for tag, value in values.items():
            self.writers[name].add_scalar(tag, value, step)
        self.writers[name].flush()


class Metrics:
    """metrics.jsonl and TensorBoard.

    `write` receives every number of a run: to send them elsewhere (Weights & Biases), add a line
    there.
    """

    def __init__(self, workdir: Path, first_step: int, corpus: str):
        """Drop the lines after `first_step`: those steps are taken again, with the same numbers."""
        self.corpus = corpus
        self.events = Events(workdir)
        self.evaluations: list[dict] = []  # the lines of evaluations; the first process has them
        if jax.process_index() > 0:
            return
        kept = [line for line in read_metrics(workdir) if line['step'] <= first_step]
        self.evaluations = [line for line in kept if line['run'] != 'train']
        file = workdir / 'metrics.jsonl'
        paths.replace_file(file, ''.join(json.dumps(line) + '\n' for line in kept).encode())
        self.file = file.open('a', buffering=1)

    def missing(self, names: Sequence[str], step: int) -> list[str]:
        """Return the names of the evaluations after `step` that are not written.

        All processes agree on the first one's answer.
        """
        if not names:
            return []
        written = [line['run'] for line in self.evaluations if line['step'] == step]
        is_written = [name in written for name in names]
        of_first = partition.from_first_process(np.array(is_written, bool))
        return [name for name, x in zip(names, of_first, strict=True) if not x]

    def write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one step.

        `name`: 'train', 'training_eval/TASK' or 'inference_eval/TASK'; `values`: {T5X's tag:
        number}.
        """
        if jax.process_index() > 0:
            return
        line = {'step': step, 'run': name, 'corpus': self.corpus, **values}
        self.file.write(json.dumps(line) + '\n')
        os.fsync(self.file.fileno())
        if name != 'train':
            self.evaluations.append(line)
        self.events.write(name, step, values)


class Console:
    """The output of a run: lines that stay and, on a terminal, one live line below them."""

    def __init__(self):
        self.is_silent = jax.process_index() > 0
        self.is_terminal = sys.stdout.isatty()
        self.seconds_between_lines = SECONDS_BETWEEN_LINES
        if self.is_terminal:
            self.seconds_between_lines = 1
        self._last_line = time.monotonic()
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if self.is_terminal:
            self._print(f'\r{text}\x1b[K\n')
        else:
            self._print(f'{text}\n')

    def live(self, text: str) -> None:
        """Show a line that the next one overwrites. Print it where the output is no terminal."""
        if not self.is_terminal:
            self.line(text)
            return
        width = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be overwritten
        self._print(f'\r{text[:width]}\x1b[K')

    def is_due(self) -> bool:
        """Return whether the last output is more than `seconds_between_lines` ago."""
        return time.monotonic() - self._last_line > self.seconds_between_lines

    @contextlib.contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Show `text` and the seconds since the body began, whenever a line is due."""
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
            except OSError:
                # The terminal or the pipe is closed. The run goes on without output.
                self.is_silent = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def introduction(
    num_parameters: int,
    num_trained: int,
    dtype: str,
    mesh: Mesh,
    mixture: OpenMixture,
    vocabulary_size: int,
) -> list[str]:
    """Return the first lines of a run: its model, devices and data."""
    lines = []
    if mixture.corpus == 'pydoc instead of C4':
        lines = [
            '!' * 80,
            '!!!  THIS IS NOT C4. data.files is empty, and data.tfds_dir holds no prepared c4/en, so',
            "!!!  the run learns from the English in this Python's own documentation, 2 MB of it:",
            '!!!  enough to see that everything works, useless as a model.',
            '!!!  C4: --config.data.files=/path/to/c4-train.*.json.gz (README.md).',
            '!' * 80,
        ]
    platform = mesh.devices.flat[0].platform
    trained = ''
    if num_trained < num_parameters:
        trained = f' ({num_trained:,} of them trained)'
    return [
        *lines,
        f'T5 with {num_parameters:,} parameters{trained} in {dtype} on {mesh.size} {platform} device(s), '
        f'{dict(mesh.shape)}.',
        f'Text: {mixture.description}; vocabulary: {vocabulary_size:,} pieces.',
    ]


def progress(step: int, last: int | None, values: Mapping[str, float]) -> str:
    """Return a line that fits into 80 columns: a line that wraps cannot be overwritten.

    `last` is the last step, None of a run that ends after so many epochs.
    """
    loss = f'loss {values["nats_per_token"]:.3f}'
    begin = f'step {step} {loss}'
    time_left = ''
    if last is not None:
        begin = f'step {step}/{last} {loss}'
        seconds_left = (last - step) / values['timing/steps_per_second']
        time_left = f' {format_seconds(seconds_left)} left'
    accuracy = f' accuracy {values["accuracy"]:.3f}'
    learning_rate = f' lr {values["learning_rate/current"]:.3g}'
    end = f' {values["timing/tokens_per_second"]:,.0f} tokens/s{time_left}'
    data_wait = values['timing/data_wait_fraction']
    if data_wait >= MIN_DATA_WAIT:
        end += f', data wait {data_wait:.0%}'
    for details in (accuracy + learning_rate, learning_rate):
        if len(begin + details + end) <= MAX_COLUMNS:
            return begin + details + end
    return begin + end


def describe_trimming(counts: Mapping[str, list[int]]) -> Iterator[str]:
    """Yield a line for each task, {name: [examples given, examples cut]}, that was longer than rows."""
    for task, (num_examples, num_trimmed) in counts.items():
        if num_trimmed:
            yield (
                f'{num_trimmed:,} of {num_examples:,} examples of {task} '
                f'({num_trimmed / num_examples:.1%}) were cut to data.lengths.'
            )


def format_seconds(seconds: float) -> str:
    """Return 'H:MM:SS', or days and hours."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f'{days}d {hours}h'
    return f'{hours}:{minutes:02}:{seconds:02}'


def compare_with_baseline(values: Mapping[str, float]) -> str:
    """Return the validation loss beside the loss of a model that knows token frequencies alone."""
    own = values['nats_per_text_token']
    baseline = values['unigram_nats_per_text_token']
    side = 'below' if own < baseline else 'ABOVE'
    return (
        f'validation loss {own:.3f} nats per text token, {abs(baseline - own):.3f} {side} the unigram baseline '
        f'of {baseline:.3f} (all target tokens: {values["nats_per_target_token"]:.3f}, baseline '
        f'{values["unigram_nats_per_target_token"]:.3f})'
    )


def next_command(workdir: Path, mixture: OpenMixture, what_goes_on: str) -> str:
    """Return where the results are and commands to try next, quoted for a shell.

    `what_goes_on`: the settings with which the run goes on.
    """
    if workdir.is_relative_to(Path.cwd()):
        workdir = workdir.relative_to(Path.cwd())
    results = f"{workdir}: T5X checkpoints, metrics.jsonl, TensorBoard's events, the vocabulary."
    has_inputs = all('inputs' in OBJECTIVES[task.task.objective].features for task in mixture.tasks)
    if mixture.corpus.startswith('pydoc') and not has_inputs:
        flags = shlex.join(['--config.data.files=/path/to/*.txt', f'--workdir={workdir}-mine'])
        after = f'the same command with {flags} learns from your text, one document a line.'
    else:
        tensorboard = shlex.join(['tensorboard', f'--logdir={workdir}'])
        after = f'{tensorboard} shows the curves; {what_goes_on} goes on.'
        if has_inputs:
            infer = shlex.join(['python', 'main.py', '--mode=infer', f'--checkpoint={workdir}'])
            after = f"{infer} --text='...' answers; {after}"
    return f'Everything is in {results}\nNext: {after}'


def model_info(
    shapes: Mapping[str, Any], specs: Mapping[str, Any], trained: Collection[str]
) -> str:
    """Return T5X's model-info.txt: every array of the state, and its partition spec.

    `shapes`: {path of a T5X checkpoint: jax.ShapeDtypeStruct}; `specs`: {path: PartitionSpec or
    None}; `trained`: the paths of parameters. Where some are frozen, it marks and counts them.
    """
    params = [path for path in sorted(shapes) if path.startswith('target/')]
    state = [path for path in sorted(shapes) if not path.startswith('target/')]
    num_params = sum(math.prod(shapes[path].shape) for path in params)
    lines = []
    num_trained = 0
    for path in params:
        mark = ' frozen'
        if path.removeprefix('target/') in trained:
            mark = ''
            num_trained += math.prod(shapes[path].shape)
        lines.append(describe_array(path, shapes[path], specs[path]) + mark)
    lines.append(f'Total number of parameters: {num_params}')
    if num_trained < num_params:
        lines.append(f'Number of trained parameters: {num_trained}')
    lines.append('')
    lines += [describe_array(path, shapes[path], specs[path]) for path in state]
    return '\n'.join(lines) + '\n'


def describe_array(path: str, x: Any, spec: Any) -> str:
    """Return a line of model-info.txt."""
    _, name = path.split('/', 1)
    axes = tuple(spec) if isinstance(spec, PartitionSpec) else ()
    return f'Variable {name:<80} size {x.size:<12} shape {x.shape!s:<40} partition spec {axes}'
