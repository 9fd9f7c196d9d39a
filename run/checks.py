"""Checks before anything is compiled: whether a run may begin or continue in a folder."""

import collections
import fnmatch
import json
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

import checkpoint
import model
import paths
from configs import base
from configs.check import flatten, read_stored
from families import lora
from messages import Refused
from model import T5Config
from run.agreement import from_first_process, from_processes
from sources import NO_SPLIT
from sources.files import FileRecord, describe_changes
from stream import OpenMixture

# The files that a run writes into its workdir. A run refuses any other folder that has one.
NAMES = (
    'lock',
    'config.json',
    'model-info.txt',
    'vocabulary.model',
    'tokenizer.json',
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
# The settings that may change when a run resumes. Files are compared by content, not by name.
MAY_CHANGE = (
    'train/steps',
    'train/relative_steps',
    'train/epochs',
    'train/early_stopping',
    'train/on_not_finite',
    'train/max_not_finite',
    'train/on_spike',
    'train/spike_sigma',
    'train/spike_window',
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
    'loss/module',
    'data/files',
    'data/validation_files',
    'data/test_files',
    'data/metrics',
    'data/module',
    'data/cache_dirs',
    'data/use_cached',
    'data/num_workers',
    'data/tfds',
    'data/vocabulary',
    'data/on_bad_line',
    'data/max_bad_fraction',
)
LOCK_TEXT = b'process '  # the first bytes of our lock


def check_is_run(workdir: paths.AnyPath) -> None:
    """Raise Refused if a run would overwrite another program's files in `workdir`."""
    paths.check_new(workdir)
    if is_run(workdir):
        return
    for path in sorted(checkpoint.list_folder(workdir)):
        if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in NAMES):
            continue
        if path.name == 'lock' and path.is_file():  # left by a start that was refused or stopped
            if path.read_bytes()[: len(LOCK_TEXT)] in (b'', LOCK_TEXT):
                continue
        raise Refused(
            f'{workdir} is not a run of this program, and has {path.name}, which a run would overwrite: name '
            'another --workdir'
        )


def is_run(workdir: paths.AnyPath) -> bool:
    """Return whether the config.json of a folder, or of one of its checkpoints, belongs to a run."""
    for path in checkpoint.list_folder(workdir):  # a client's glob would list all subfolders
        if path.name.startswith('checkpoint_') and is_own_config(path / 'config.json'):
            read_stored(workdir)
            return True
    return is_own_config(workdir / 'config.json')


def is_own_config(file: paths.AnyPath) -> bool:
    """Return whether `file` is a config.json that a run of this program has written."""
    try:
        settings = json.loads(file.read_bytes())
    except (ValueError, RecursionError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return False
    return isinstance(settings, dict) and {'data_fingerprint', 'model', 'train'} <= settings.keys()


def check_mixture(training: OpenMixture, held_out: OpenMixture, epochs: int) -> None:
    """Raise Refused unless a run can train on a mixture, and validate."""
    if epochs and not training.is_single:
        raise Refused(
            f'train.epochs={epochs}: data.task={training.name!r} is a mixture: set train.steps instead'
        )
    for task in training.tasks:
        if task.task.train_split == NO_SPLIT:
            raise Refused(f'data.task={task.name!r} has no split for training: name another task')
    for task in held_out.tasks:
        if task.task.validation_split != NO_SPLIT or task.source.may_hold('validation'):
            return
    raise Refused(f'data.validation_split: task {task.name!r} has none: name one')


def check_shared(workdir: paths.AnyPath) -> None:
    """Raise Refused if a process does not see the files that the first one writes into `workdir`."""
    if jax.process_count() == 1:
        return
    number = np.array(secrets.randbits(32))
    if jax.process_index() == 0:
        paths.replace_file(workdir / f'.seen-{number}', b'')
    # A new name: a client of a network disk might remember that an old one is missing.
    file = workdir / f'.seen-{from_first_process(number)}'
    is_seen = from_processes(np.array(file.exists()))
    if jax.process_index() == 0:
        file.unlink()
    if not is_seen.all():
        raise Refused(
            f'--workdir={workdir}: process {is_seen.argmin()} does not see what process 0 writes: name a shared disk'
        )


def check_saving(workdir: paths.AnyPath, num_bytes: int) -> None:
    """Raise OSError if `workdir` cannot hold a checkpoint of `num_bytes`. Every process calls it.

    Saving and restoring a small array finds missing permissions, bad names and full disks.
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
            f'{workdir} cannot hold checkpoints ({reason}): fix that, or name another --workdir'
        ) from error
    if not isinstance(workdir, Path):
        return
    free = shutil.disk_usage(workdir).free
    if free < num_bytes:
        raise OSError(
            f'{workdir} has {free / 1e9:.1f} GB of free space, and a checkpoint takes {num_bytes / 1e9:.1f}: free some, '
            'or name another --workdir'
        )


def check_never_saved(workdir: paths.AnyPath, lines: Sequence[Mapping]) -> None:
    """Raise Refused if a run has lost its checkpoints: a new start would erase its metrics, `lines`."""
    first_save_was_interrupted = checkpoint.unfinished(workdir)
    if first_save_was_interrupted or not is_own_config(workdir / 'config.json'):
        return
    run_settings = read_stored(workdir)
    last = run_settings['train']['steps']
    first_save = min(run_settings['save']['every_steps'], last)
    num_steps = max((line['step'] for line in lines), default=0)
    is_finished = any(line['step'] == last and line['run'] != 'train' for line in lines)
    if num_steps > first_save or is_finished:
        raise Refused(f'{workdir} has lost its checkpoints: put them back, or remove metrics.jsonl')


def compare_settings(
    directory: paths.AnyPath, settings: Mapping, options: Mapping, mixture: OpenMixture
) -> None:
    """Raise Refused if the run that saved the checkpoint `directory` may not continue with `settings`.

    `settings`: the new content of config.json; `options`: the defaults of the options of users' files. Texts are
    compared by content, not by file name.
    """
    workdir = directory.parent
    old = json.loads((directory / 'config.json').read_bytes())
    may_change: tuple[str, ...] = (*MAY_CHANGE, 'data_fingerprint', 'corpus')
    if 'base' in settings:  # the base of adapters is compared by base/fingerprint
        may_change += ('restore/path', 'base/directory')
    # A setting that is not in config.json is newer than the run.
    defaults = flatten(json.loads(base.get_config().to_json()))
    defaults |= flatten(options)
    changes = changed_settings(defaults | flatten(old), settings, may_change)
    if old['data_fingerprint'] != settings['data_fingerprint']:
        files = json.loads((directory / 'data_files.json').read_bytes())
        changes.append(describe_changes([FileRecord(**file) for file in files], mixture.files))
    if changes:
        raise Refused(
            f'{workdir} holds a run with other settings or text ({"; ".join(changes)}): use those, or name another '
            f'--workdir, with --config.restore.path={workdir} to start from its parameters'
        )


def changed_settings(old: Mapping, new: Mapping, may_change: tuple[str, ...] = ()) -> list[str]:
    """Return 'name: old -> new' for each setting that differs, except the prefixes `may_change`."""
    old = flatten(old)
    new = flatten(new)
    changes = []
    for name in sorted(old | new):
        if old.get(name) != new.get(name) and not name.startswith(may_change):
            changes.append(f'{name}: {old.get(name)!r} -> {new.get(name)!r}')
    return changes


# The model.


def check_adapters(config: T5Config) -> None:
    """Raise Refused if adapters are asked for and no kernel has one."""
    shapes = model.shapes(config)
    if config.lora_rank and not any(re.fullmatch(lora.ADAPTER, path) for path in shapes):
        kernel = next(path for path in shapes if path.endswith('/kernel'))
        raise Refused(
            f'model.lora_targets={config.lora_targets!r} matches the full path of no kernel: one is {kernel}'
        )


def check_scan(config: T5Config) -> None:
    """Raise Refused if a scan over layers is asked for and its periods differ."""
    if not config.scan_layers:
        return
    period = config.family.period(config)
    num_layers = {'encoder': config.num_encoder_layers, 'decoder': config.num_decoder_layers}
    counts: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for path in model.shapes(config):
        match = re.fullmatch(r'(encoder|decoder)/layers_(\d+)/(.+)', path)
        if match:
            counts[match[1], match[3], int(match[2]) % period] += 1
    for (stack, name, place), count in counts.items():
        if count != len(range(place, num_layers[stack], period)):
            raise Refused(
                f'model.scan_layers=True: {count} of {num_layers[stack]} {stack} layers have {name}, not 1 in {period}'
            )
