"""The newest undamaged checkpoint of a workdir."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import jax
from absl import logging
from jax.experimental import multihost_utils

import checkpoint
import paths
from formats.t5x import Damaged, verify
from messages import Refused
from run import buckets


def newest_valid(
    workdir: str | Path | paths.AnyPath, report: Callable[[str], None] = logging.warning
) -> int | None:
    """Return the newest step that verifies; None if `workdir` has no checkpoint. Every process calls it.

    Reports a damaged checkpoint in one line and renames it `checkpoint_STEP.damaged-N`. Raises Refused if no
    other is left, and OSError if one cannot be read: it may be valid, and stays. In a bucket, skips unfinished ones.
    """
    workdir = paths.to_path(workdir)
    for step, directory in reversed(checkpoint.step_folders(workdir).items()):
        if not directory.is_dir() or not checkpoint.commit_of(directory).exists():
            continue
        names = (f'{directory.name}.damaged-{number}' for number in itertools.count(1))
        set_aside = next(name for name in names if not (workdir / name).exists())
        try:
            verify(directory)
            return step
        except Damaged as error:
            report(f'{error}. It is set aside as {set_aside}.')
        if jax.process_index() == 0:
            if isinstance(directory, Path):
                directory.rename(directory.with_name(set_aside))
            else:
                buckets.rename(directory, directory.with_name(set_aside))
        multihost_utils.sync_global_devices(f'{directory} is set aside')
    for path in sorted(paths.list_folder(workdir), reverse=True):
        if re.fullmatch(r'checkpoint_.*\.damaged-.*', path.name):
            raise Refused(
                f'{workdir} has only damaged checkpoints, such as {path.name}: restore one from a copy, or name '
                'another --workdir'
            )
    return None
