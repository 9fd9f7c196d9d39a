"""Whether a checkpoint is as it was saved, and the newest step of a workdir that is."""

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

import checkpoint
import paths

FAULT_BYTES = 2**16  # of the faults that a process sends to the others


class Damaged(ValueError):
    """Some files of a checkpoint are not as they were saved."""


class Fault(NamedTuple):
    """What is wrong with a checkpoint, in one line."""

    kind: str  # 'refused' (not to be trusted), 'unreadable', 'damaged', or 'no checksums': T5X saves none
    message: str


class Manifest(NamedTuple):
    """The content of manifest.json: the checksum of every other file by its name."""

    step: int
    checksums: dict[str, checkpoint.Checksum]


def newest_valid(workdir: Any, report: Callable[[str], None] = logging.warning) -> int | None:
    """Return the newest step that verifies; None if `workdir` has no checkpoint. Every process calls it.

    Reports a damaged checkpoint in one line and renames it `checkpoint_STEP.damaged-N`. Raises ValueError if no
    other is left, and OSError for one that cannot be read, which may be valid and stays. In a bucket, leaves out
    unfinished ones.
    """
    workdir = paths.to_path(workdir, may_be_new=True)
    for step, directory in reversed(checkpoint.step_folders(workdir).items()):
        if not directory.is_dir() or not checkpoint.commit_of(directory).exists():
            continue
        names = (f'{directory.name}.damaged-{number}' for number in itertools.count(1))
        set_aside = next(workdir / name for name in names if not (workdir / name).exists())
        try:
            verify(directory)
            return step
        except Damaged as error:
            report(f'{error}. It is set aside as {set_aside.name}.')
        if jax.process_index() == 0:
            rename_folder(directory, set_aside)
        multihost_utils.sync_global_devices(f'{directory} is set aside')
    damaged = sorted(
        x for x in checkpoint.list_folder(workdir) if x.match('checkpoint_*.damaged-*')
    )
    if damaged:
        raise ValueError(
            f'{workdir} has only damaged checkpoints, the last {damaged[-1].name}: repair one and '
            'name it checkpoint_STEP, or use another workdir'
        )
    return None


def rename_folder(folder: Any, new: Any) -> None:
    """Rename a folder, which a bucket does by copying its files inside of the store."""
    if isinstance(folder, Path):
        folder.rename(new)
        return
    client = paths.client_of(str(folder))
    with paths.client_errors(str(folder), 'renamed', OSError):
        names = client.find(str(folder))  # without gs://
        old = str(folder).partition('://')[2]
        client.copy(names, [f'{new}{name.removeprefix(old)}' for name in names])
    paths.remove_folder(folder)


def verify(directory: str | paths.AnyPath, ignored: str = '') -> bool:
    """Return True if every file is as it was saved; False if there are no checksums, as in T5X.

    Files whose names match `ignored` are not read. Raises Damaged, which names up to ten files, OSError for files
    that cannot be read, ValueError for what is not to be trusted. Every process reads its share; all raise alike.
    """
    messages: dict[str, list[str]] = {}
    for fault in _from_all_processes(_find_faults(paths.to_path(directory), ignored)):
        messages.setdefault(fault.kind, []).append(fault.message)
    if 'refused' in messages:
        raise ValueError(messages['refused'][0])
    if 'unreadable' in messages:
        named = '; '.join(messages['unreadable'][:10])
        raise OSError(f'{directory} cannot be read ({named}): correct its permissions or its disk')
    if 'damaged' in messages:
        named = '; '.join(messages['damaged'][:10])
        raise Damaged(f'{directory} is damaged: {named}: use an older one')
    return not messages


def _find_faults(directory: Any, ignored: str) -> list[Fault]:
    """Return the faults of the checkpoint, or else of this process's share of its files."""
    try:
        if not _should_have_manifest(directory):
            return [Fault('no checksums', '')]
        manifest = _read_manifest(directory)
        files = [name for name in sorted(manifest.checksums) if not re.fullmatch(ignored, name)]
        own_files = files[jax.process_index() :: jax.process_count()]
        find_fault = functools.partial(_find_fault, directory, manifest)
        with futures.ThreadPoolExecutor(checkpoint.ARRAYS_IN_FLIGHT) as pool:
            faults = [fault for fault in pool.map(find_fault, own_files) if fault]
        if 'checkpoint' in own_files and not faults:
            step = checkpoint.read_index(directory).get('state/step', manifest.step)
            if step != manifest.step:
                faults.append(Fault('damaged', f'checkpoint holds step {step}'))
        return faults
    except (ValueError, OSError) as error:
        return [_fault_of(error)]


def _find_fault(directory: Any, manifest: Manifest, name: str) -> Fault | None:
    """Compare one file with its checksum."""
    file = directory / name
    saved = manifest.checksums[name]
    try:
        if not paths.is_file(file):  # a foreign manifest may name a device, which never ends
            return Fault('damaged', f'{name} is missing')
        found = checkpoint.checksum(file)
        if found.num_bytes < checkpoint.LFS_POINTER_BYTES and found.num_bytes != saved.num_bytes:
            paths.check_not_lfs(file)
    except (ValueError, OSError) as error:
        return _fault_of(error)
    if found.num_bytes != saved.num_bytes:
        return Fault('damaged', f'{name} has {found.num_bytes} bytes, not {saved.num_bytes}')
    if found.crc32c != saved.crc32c:
        return Fault('damaged', f'{name} has changed')
    return None


def _fault_of(error: Exception) -> Fault:
    if isinstance(error, OSError):
        return Fault('unreadable', paths.reason(error))
    if isinstance(error, Damaged):
        return Fault('damaged', str(error))
    return Fault('refused', str(error))


def _from_all_processes(faults: Sequence[Fault]) -> Sequence[Fault]:
    """Return the first ten faults of each process, the same list in all."""
    if jax.process_count() == 1:
        return faults
    lines = [(fault.kind, fault.message[:1000]) for fault in faults[:10]]
    sent = np.frombuffer(json.dumps(lines).encode().ljust(FAULT_BYTES), np.uint8)
    found = []
    for received in multihost_utils.process_allgather(sent):
        found += [Fault(*line) for line in json.loads(received.tobytes())]
    return found


def _should_have_manifest(directory: Any) -> bool:
    """Return whether this program has saved the checkpoint, not T5X or another program."""
    if paths.is_file(directory / checkpoint.MANIFEST):
        return True
    if not paths.is_file(directory / 'checkpoint') and checkpoint.step_of(directory) is None:
        return False  # a workdir without checkpoints, which has a config.json, too
    if paths.is_file(directory / 'data_position.npy'):
        return True
    config = directory / 'config.json'
    return paths.is_file(config) and 'model' in paths.read_json(config)  # other formats have none


def _read_manifest(directory: Any) -> Manifest:
    """Return the manifest. Raises Damaged unless it is as it was saved, and of this checkpoint."""
    try:
        content = (directory / checkpoint.MANIFEST).read_bytes()
        top = json.loads(content)
        checksums = {name: checkpoint.Checksum(*saved) for name, saved in top['files'].items()}
        manifest = Manifest(top['step'], checksums)
        is_named = checkpoint.step_of(directory) in (None, manifest.step)
        if not is_named or content != checkpoint.pack_manifest(manifest.step, checksums):
            raise ValueError(f'it has changed, or is of step {manifest.step}')
    except (FileNotFoundError, IsADirectoryError, *checkpoint.UNPACK_ERRORS) as error:
        raise Damaged(f'{checkpoint.MANIFEST} is missing or damaged ({error})') from error
    return manifest
