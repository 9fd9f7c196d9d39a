"""T5X's layout, which is also ours: verify and read it, and split umT5's stacked layers.

Source: T5X t5x/checkpoints.py; t5x/examples/scalable_t5 for stacked layers.
"""

import functools
import json
import math
import re
from collections.abc import Collection, Mapping
from concurrent import futures
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

import checkpoint
import paths
import state_names
from checkpoint import Leaf
from messages import Refused, first_ten
from run import hub

FORMATS = 'a workdir, a checkpoint_STEP folder, a Mesh-TensorFlow prefix, a Hugging Face folder or hf://ORG/NAME'
FAULT_BYTES = 2**16  # room for the faults that a process sends to the others


class Damaged(Refused):
    """Some files of a checkpoint have changed since it was saved."""


class Fault(NamedTuple):
    """A fault of a checkpoint, in one line."""

    kind: str  # 'refused' (a pointer of git-lfs), 'unreadable', 'damaged', or 'no checksums': T5X saves none
    message: str


def read_index(directory: paths.AnyPath, ignored: str = '') -> dict[str, Leaf]:
    """Return the leaves of a checkpoint in T5X's layout.

    Moving averages (`optimizer.ema_decay`) replace the parameters, unlike in `checkpoint.read_index`.
    """
    for folder in (directory, *checkpoint.step_folders(directory).values()):
        for name in ('_METADATA', '_CHECKPOINT_METADATA'):
            if paths.is_file(folder / name):
                raise Refused(f'{folder} has the layout of Orbax: {checkpoint.ORBAX_REMEDY}')
    verify(directory, ignored)
    if not paths.is_file(directory) and not paths.is_file(directory / checkpoint.INDEX):
        files = sorted(file.name for file in paths.list_folder(directory))
        names = hub.suggestion(directory) or FORMATS
        raise Refused(
            f'{directory} has no checkpoint (it holds {first_ten(files) or "nothing"}): name {names}'
        )
    index = unstack(checkpoint.read_index(directory))
    averages = average_paths(index)
    leaves = {path: leaf for path, leaf in index.items() if path not in averages}
    for path, parameter in averages.items():
        leaves[parameter] = index[path]
    return leaves


def average_paths(tree: Collection[str]) -> dict[str, str]:
    """Return {path of a moving average: path of its parameter} in a flat tree of T5X's paths."""
    names = {}
    for path in tree:
        owner, _, slot = path.removeprefix('state/param_states/').rpartition('/')
        if slot == state_names.AVERAGE_SLOT and f'target/{owner}' in tree:
            names[path] = f'target/{owner}'
    return names


# Verification.


def verify(directory: str | paths.AnyPath, ignored: str = '') -> bool:
    """Return True if no file has changed since it was saved; False if there are no checksums, as in T5X.

    Files whose names match `ignored` are not read. Raises Damaged, which names up to ten files; OSError for files that
    cannot be read; Refused for a pointer of git-lfs. Every process reads its share; all raise the same error.
    """
    faults = _find_faults(paths.to_path(directory), ignored)
    if jax.process_count() > 1:  # share the first ten of each
        lines = [(fault.kind, fault.message[:1000]) for fault in faults[:10]]
        payload = np.frombuffer(json.dumps(lines).encode().ljust(FAULT_BYTES), np.uint8)
        faults = []
        for process_payload in multihost_utils.process_allgather(payload):
            faults += [Fault(*line) for line in json.loads(process_payload.tobytes())]
    messages: dict[str, list[str]] = {}
    for fault in faults:
        messages.setdefault(fault.kind, []).append(fault.message)
    if 'refused' in messages:
        raise Refused(messages['refused'][0])
    if 'unreadable' in messages:
        files = '; '.join(messages['unreadable'][:10])
        raise OSError(f'{directory} cannot be read ({files}): correct its permissions or its disk')
    if 'damaged' in messages:
        files = '; '.join(messages['damaged'][:10])
        raise Damaged(f'{directory} is damaged: {files}: use an older one')
    return not messages


def _find_faults(directory: paths.AnyPath, ignored: str) -> list[Fault]:
    """Return the faults of the checkpoint, or else of this process's share of its files."""
    try:
        # A workdir without checkpoints also has a config.json. In other formats, config.json has no 'model'.
        is_saved_here = paths.is_file(directory / checkpoint.MANIFEST)
        is_checkpoint = checkpoint.step_of(directory) is not None
        if not is_saved_here and (is_checkpoint or paths.is_file(directory / 'checkpoint')):
            config = directory / 'config.json'
            is_saved_here = paths.is_file(directory / 'data_position.npy') or (
                paths.is_file(config) and 'model' in paths.read_json(config)
            )
        if not is_saved_here:
            return [Fault('no checksums', '')]
        saved_step, checksums = _read_manifest(directory)
        files = [name for name in sorted(checksums) if not re.fullmatch(ignored, name)]
        share = files[jax.process_index() :: jax.process_count()]
        find_fault = functools.partial(_find_fault, directory, checksums)
        with futures.ThreadPoolExecutor(checkpoint.ARRAYS_IN_FLIGHT) as pool:
            faults = [fault for fault in pool.map(find_fault, share) if fault]
        if 'checkpoint' in share and not faults:
            step = checkpoint.read_index(directory).get('state/step', saved_step)
            if not np.array_equal(step, saved_step):  # type: ignore[arg-type]  # any leaf
                faults.append(Fault('damaged', f'checkpoint holds step {step}'))
        return faults
    except (Refused, OSError) as error:
        return [_fault_of(error)]


def _find_fault(
    directory: paths.AnyPath, checksums: Mapping[str, checkpoint.Checksum], name: str
) -> Fault | None:
    """Compare one file with its checksum."""
    file = directory / name
    expected = checksums[name]
    try:
        if not paths.is_file(file):
            return Fault('damaged', f'{name} is missing')
        actual = checkpoint.checksum(file)
    except (Refused, OSError) as error:
        return _fault_of(error)
    if actual.num_bytes != expected.num_bytes:
        return Fault('damaged', f'{name} has {actual.num_bytes} bytes, not {expected.num_bytes}')
    if actual.crc32c != expected.crc32c:
        return Fault('damaged', f'{name} has changed')
    return None


def _fault_of(error: Exception) -> Fault:
    if isinstance(error, OSError):
        return Fault('unreadable', paths.reason(error))
    if isinstance(error, Damaged):
        return Fault('damaged', str(error))
    return Fault('refused', str(error))


def _read_manifest(directory: paths.AnyPath) -> tuple[int, dict[str, checkpoint.Checksum]]:
    """Return the step and {name: checksum} of manifest.json, which lists every other file.

    Raises Damaged if it has changed or belongs to another checkpoint.
    """
    try:
        content = (directory / checkpoint.MANIFEST).read_bytes()
        top = json.loads(content)
        checksums = {name: checkpoint.Checksum(*saved) for name, saved in top['files'].items()}
        step = top['step']
        is_named = checkpoint.step_of(directory) in (None, step)
        if is_named and content == checkpoint.pack_manifest(step, checksums):
            return step, checksums
        fault = f'it has changed, or is of step {step}'
    except (FileNotFoundError, IsADirectoryError, *checkpoint.UNPACK_ERRORS) as error:
        fault = str(error)
    raise Damaged(f'{checkpoint.MANIFEST} is missing or damaged ({fault})')


# umT5 in T5X (t5x/examples/scalable_t5): one array stacks a parameter of all layers on axis 1, and heads have a
# separate axis.

STACKED_PARAMETER = re.compile(r'target/(encoder|decoder)/\1/(.+)')


@dataclass(frozen=True, eq=False)
class LayerEntry:
    """One layer of a stacked array, with its shape in our tree: a `checkpoint.LazyArray`."""

    stack: Leaf
    layer: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.stack.dtype

    def read(self) -> np.ndarray:
        """Return the layer in its stored dtype."""
        stack = self.stack
        if not isinstance(stack, np.ndarray):
            stack = _read_once(stack)  # type: ignore[arg-type]  # a ZarrEntry: hashable
        return stack[:, self.layer].reshape(self.shape)


@functools.lru_cache(maxsize=1)
def _read_once(stack: checkpoint.LazyArray) -> np.ndarray:
    """Read an array once for all its layers, which are adjacent in an index."""
    return stack.read()


def unstack(index: dict[str, Leaf]) -> dict[str, Leaf]:
    """Return the index of a T5X checkpoint with each stacked parameter split into one leaf per layer.

    A split index has no optimizer state, which was factored over all layers at once.
    """
    layers: dict[str, LayerEntry] = {}
    others: dict[str, Leaf] = {}
    for path, leaf in index.items():
        match = STACKED_PARAMETER.fullmatch(path)
        if not match:
            if not path.startswith('state/param_states/'):
                others[path] = leaf
            continue
        stack, name = match.groups()
        first, num_layers, *sizes = leaf.shape
        shape: tuple[int, ...] = (first,)  # [embed, layers]
        if path.endswith('out/kernel'):  # [heads, layers, head size, embed]
            shape = (first * math.prod(sizes[:-1]), *sizes[-1:])
        elif sizes:  # [embed, layers, heads, head size], [embed, layers, mlp]
            shape = (first, math.prod(sizes))
        for i in range(num_layers):
            layers[f'target/{stack}/layers_{i}/{name}'] = LayerEntry(leaf, i, shape)
    if not layers:
        return index
    return others | layers
