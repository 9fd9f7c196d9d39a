"""The start of a run: its newest valid checkpoint, `restore.path`, or the initial parameters."""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

import checkpoint
import formats.open
import model
import paths
from configs import check as settings
from formats import best, own_model, t5x
from formats.vocabulary import (
    add_tokens,
    changed_id,
    check_tokens,
    find_vocabulary,
    kept_file,
    named_vocabulary,
    of_model,
    own_vocabulary,
)
from loss import parse_normalizing_factor
from messages import Refused, first_ten
from model import T5Config
from run import checks, hub, results, verify
from run.console import End
from vocabulary import ByteVocabulary, Vocabulary

MOMENTA = ('m', 'mu')  # the slots of first moments: Adafactor's, AdamW's


class Wanted(NamedTuple):
    """The requirements of a run for its start."""

    model_config: T5Config
    shapes: checkpoint.Shapes  # the full state, by T5X's paths
    trained: Collection[str]  # paths of the trained parameters
    loss_normalizing_factor: str
    seed: int  # for the first values of adapters


class Start(NamedTuple):
    """The checkpoint or the initial values from which a run starts."""

    step: int = 0
    directory: paths.AnyPath | None = None  # this run's checkpoint to resume
    # Entries of a checkpoint's index; other arrays get their initial value.
    leaves: Mapping[str, checkpoint.Leaf] = {}
    base: Mapping[str, str] = {}  # with adapters, formats.open.describe_base of their checkpoint
    vocabulary_model: bytes = b''  # from the checkpoint, if it has one
    description: str = 'From scratch'

    @property
    def is_resumed(self) -> bool:
        return self.directory is not None


def find_start(
    folder: paths.AnyPath,
    wanted: Wanted,
    restore: ConfigDict,
    data_group: ConfigDict,
    lines: Sequence[Mapping],
    report: Callable[[str], None],
) -> Start:
    """Return the newest valid checkpoint, else the start of a new run. `lines`: metrics.jsonl."""
    results.Results(folder).scores()  # raises Refused for a damaged file
    step = verify.newest_valid(folder, report)
    if step is None:
        checks.check_never_saved(folder, lines)
        return choose_initial(wanted, restore, data_group)
    directory = folder / f'checkpoint_{step}'
    if not checks.is_own_config(directory / 'config.json'):
        raise Refused(f'{directory} was not saved by a run of this program: move it away')
    vocabulary_model = b''
    vocabulary_file = kept_file(directory)
    if vocabulary_file is not None:
        vocabulary_model = vocabulary_file.read_bytes()
    leaves = checkpoint.read_index(directory)
    base = {}
    opened = formats.open.open_base(directory, restore.path)
    if opened is not None:
        leaves = only_parameters(opened.leaves) | leaves
        # open_base has compared its fingerprint.
        base = settings.read_stored(directory)['base'] | {
            'directory': hub.name_of(opened.directory)
        }
    return Start(
        step=step,
        directory=directory,
        leaves=leaves,
        base=base,
        vocabulary_model=vocabulary_model,
        description=f'Continuing after step {step:,}',
    )


def choose_initial(wanted: Wanted, restore: ConfigDict, data_group: ConfigDict) -> Start:
    """Choose the arrays and the vocabulary that a new run loads from `restore.path`.

    As in T5X, also restore the step and the optimizer state. Adapters start at step 0.
    """
    if not restore.path:
        check_adapters(wanted, restore, index={}, leaves={})
        return Start()
    try:
        opened = formats.open.open_checkpoint(restore.path, part='whole' if restore.strict else '')
    except (Refused, OSError) as error:
        raise Refused(f'restore.path={restore.path}: {error}') from error
    directory = opened.directory
    formats.open.check_family(directory, wanted.model_config)
    if restore.strict:
        remedy = 'restore its parameters with restore.strict=False'
        own_model.check_same(directory, wanted.model_config, remedy, may_be_plain=True)

    vocab_paths = vocabulary_paths(wanted.model_config)
    index, note_of_state = without_unused_state(opened.leaves, wanted)
    try:
        leaves, note = choose(
            index, expected_shapes(index, wanted), restore.only, restore.strict, vocab_paths
        )
    except (Refused, re.error) as error:
        raise Refused(
            f'restore.path={restore.path}, restore.only={restore.only!r}: {error}: change it, or set restore.strict=False'
        ) from error
    check_files(restore.path, leaves)
    check_adapters(wanted, restore, index, leaves)
    slots = 'without any'
    if any(map(is_slot, leaves)):
        slots = 'with the'
        check_same_divisor(wanted.loss_normalizing_factor, directory)
    vocabulary = initial_vocabulary(restore.path, data_group, directory)
    parameters = checkpoint.parameters(leaves)
    if vocab_paths & parameters.keys():
        check_keeps_ids(restore.path, data_group, directory, vocabulary)

    # A family may compute the initial adapters from the base.
    base = {}
    if model.adapter_paths(wanted.model_config):
        base = formats.open.describe_base(opened)
        initial = wanted.model_config.family.initial_adapters
        if initial is not None:
            read = lambda path: checkpoint.read_leaf(parameters[path])  # noqa: E731
            adapters = initial(wanted.model_config, read, vocabulary, wanted.seed)
            leaves |= {f'{checkpoint.PARAMETER_PREFIX}{path}': x for path, x in adapters.items()}
    step = formats.open.saved_step(leaves)  # 0 if it is not restored
    return Start(
        step=step,
        leaves=leaves,
        base=base,
        vocabulary_model=vocabulary.model,
        description=f'From step {step:,} of {hub.name_of(directory)}, {slots} optimizer state{note}{note_of_state}',
    )


def check_adapters(
    wanted: Wanted, restore: ConfigDict, index: Mapping[str, Any], leaves: Mapping[str, Any]
) -> None:
    """Raise Refused if there are adapters, unless exactly the parameters of their base are restored.

    `index`: the arrays of the base; `leaves`: the restored arrays.
    """
    config = wanted.model_config
    if not model.adapter_paths(config):
        return
    setting = f'model.module={config.module!r}'
    if config.lora_rank:
        setting = f'model.lora_rank={config.lora_rank}'
    is_base = leaves.keys() == index.keys() == expected_shapes(index, wanted).keys()
    if not is_base or restore.dtype not in ('float32', ''):
        raise Refused(
            f'restore.path={restore.path!r}, restore.dtype={restore.dtype!r}: {setting} needs exactly the parameters of '
            'a checkpoint, in float32: set restore.only=target/.*, restore.strict=True; restore.frozen_dtype rounds a base'
        )
    vocab_paths = vocabulary_paths(config)
    has_new_rows = any(np.shape(leaf) != np.shape(index[path]) for path, leaf in leaves.items())
    if has_new_rows and vocab_paths.difference(wanted.trained):
        trainable = '|'.join([config.family.adapters, *sorted(vocab_paths)])
        raise Refused(
            f'model.vocab_size={config.vocab_size} with {setting}: restore.path={restore.path} has fewer rows, '
            f'and adapters do not train the new ones: set optimizer.trainable={trainable!r}'
        )


def without_unused_state(leaves: Mapping[str, Any], wanted: Wanted) -> tuple[dict[str, Any], str]:
    """Return the leaves without the optimizer state of frozen parameters, and a note.

    With adapters, or if no optimizer state is left, return only parameters, so the step is not restored either.
    """
    remaining = {}
    for path, leaf in leaves.items():
        parameter, slot = parts_of(path)
        is_known = f'{checkpoint.PARAMETER_PREFIX}{parameter}' in wanted.shapes
        if not slot or not is_known or parameter in wanted.trained:
            remaining[path] = leaf
    note = ''
    num_frozen = len(leaves) - len(remaining)
    if num_frozen:
        note = f'; not used: {num_frozen:,} arrays of the optimizer state of frozen parameters'
    if model.adapter_paths(wanted.model_config) or not any(map(is_slot, remaining)):
        remaining = only_parameters(remaining)
    return remaining, note


def expected_shapes(index: Mapping[str, Any], wanted: Wanted) -> checkpoint.Shapes:
    """Return the shapes of the arrays that a new run takes from `index`: optimizer state only if it has any.

    A new run initializes adapters itself, and averages with the parameters.
    """
    expected = dict(wanted.shapes)
    if not any(map(is_slot, index)):
        expected = only_parameters(expected)
    for path in model.adapter_paths(wanted.model_config):
        expected.pop(f'{checkpoint.PARAMETER_PREFIX}{path}')
    for average in t5x.average_paths(expected):
        del expected[average]
    return expected


def initial_vocabulary(path: str, data_group: ConfigDict, directory: paths.AnyPath) -> Vocabulary:
    """Return the vocabulary that data.vocabulary names, else the checkpoint's own. `path`: restore.path."""
    if data_group.vocabulary:
        return named_vocabulary('data.vocabulary', data_group.vocabulary, data_group.extra_ids)
    vocabulary = find_vocabulary(directory)
    if vocabulary is None or not vocabulary.model:
        raise Refused(f'restore.path={path} has no vocabulary: set data.vocabulary')
    return of_model(vocabulary.model, data_group.extra_ids)


def vocabulary_paths(config: T5Config) -> set[str]:
    """Return the paths of the parameters whose rows or columns are the ids of the vocabulary."""
    larger = model.shapes(dataclasses.replace(config, vocab_size=2 * config.vocab_size))
    return {path for path, shape in model.shapes(config).items() if shape != larger[path]}


def with_new_rows(
    index: Mapping[str, Any], expected: checkpoint.Shapes, vocab_paths: Collection[str]
) -> dict[str, np.ndarray]:
    """Read the leaves of `index` that have fewer ids than expected, and add new rows for the missing ids.

    The new rows of a parameter, its average and its second moments are the mean of the old rows, so that their
    updates are as large; the new rows of a momentum are 0.
    """
    grown = {}
    for path, leaf in index.items():
        parameter, slot = parts_of(path)
        target = f'{checkpoint.PARAMETER_PREFIX}{parameter}'
        if parameter not in vocab_paths or not {target, path} <= index.keys() & expected.keys():
            continue
        # The old and new numbers of ids: rows of the table, or columns of the logits.
        sizes = {*zip(np.shape(index[target]), expected[target], strict=True)}
        changes = [(old, new) for old, new in sizes if old != new]
        if len(changes) != 1:
            continue
        [(old_size, size)] = changes
        for axis in range(len(np.shape(leaf))):
            shape = list(np.shape(leaf))
            num_old = shape[axis]
            shape[axis] = size
            if num_old != old_size or size < old_size or tuple(shape) != expected[path]:
                continue
            old = np.asarray(checkpoint.read_leaf(leaf))
            new = old.mean(axis, keepdims=True, dtype=np.float32).astype(old.dtype)
            if slot in MOMENTA:
                new = np.zeros_like(new)
            grown[path] = np.concatenate([old, new.repeat(size - old_size, axis)], axis)
    return grown


def check_files(path: str, leaves: Mapping[str, Any]) -> None:
    """Raise Refused if the folder of an array in T5X's layout is missing, as in a copy without state.*."""
    entries = [leaf for leaf in leaves.values() if isinstance(leaf, checkpoint.ZarrEntry)]
    names = {file for entry in entries[:1] for file in checkpoint.list_folder(entry.folder.parent)}
    missing_names = [entry.folder.name for entry in entries if entry.folder not in names]
    if missing_names:
        remedy = 'copy it again'
        if all(name.startswith('state.') for name in missing_names):
            remedy = 'copy them, or set restore.only=target/.*'
        raise Refused(f'restore.path={path} lacks {first_ten(missing_names)}: {remedy}')


def check_same_divisor(factor: str, directory: paths.AnyPath) -> None:
    """Raise Refused if the restored optimizer state comes from a loss with another divisor than `factor`.

    Second moments 16,384 squared times too large make updates 16,384 times too small for thousands of steps.
    """
    old = settings.read_stored(directory).get('loss', {}).get('loss_normalizing_factor')
    if old is not None and parse_normalizing_factor(old) != parse_normalizing_factor(factor):
        raise Refused(
            f'loss.loss_normalizing_factor={factor!r}: restore.path was trained with {old!r}: use that'
        )


def check_keeps_ids(
    path: str, data_group: ConfigDict, directory: paths.AnyPath, vocabulary: Vocabulary
) -> None:
    """Raise Refused if the run's vocabulary gives a token of the checkpoint's vocabulary another id."""
    vocabulary = add_tokens(vocabulary, data_group.added_tokens)
    old_vocabulary = own_vocabulary(directory, data_group.extra_ids)
    change = changed_id(old_vocabulary, vocabulary) if old_vocabulary else ''
    if old_vocabulary and change:
        setting = 'bytes' if isinstance(old_vocabulary, ByteVocabulary) else "''"
        raise Refused(
            f'data.vocabulary={data_group.vocabulary!r}, data.extra_ids={data_group.extra_ids}: {change}: '
            f'restore.path={path} needs data.vocabulary={setting}, data.extra_ids={old_vocabulary.num_extra_ids}'
        )
    check_tokens(directory, vocabulary)


def last_step(start: Start, train: ConfigDict) -> int:
    """Return the step after which a run ends: train.steps, or train.relative_steps after its first one."""
    relative_steps = train.relative_steps
    if relative_steps == 0:
        if not start.is_resumed and start.step >= train.steps:
            raise Refused(
                f'restore.path is at step {start.step}: set train.steps, train.relative_steps or restore.only'
            )
        return train.steps
    first_step = start.step
    if start.directory is not None:
        old = json.loads((start.directory / 'config.json').read_bytes())['train']
        if not old['relative_steps']:
            raise Refused(
                f'train.relative_steps={relative_steps}: {start.directory.parent} was started with '
                f'train.steps={old["steps"]}: set that'
            )
        first_step = old['steps'] - old['relative_steps']
    return first_step + relative_steps


def end_of(start: Start, train: ConfigDict, history: best.History) -> End | None:
    """Return why a run is finished; None if it is not."""
    if start.is_resumed and start.step >= train.steps:
        return End.STEPS
    if history.ends(train.early_stopping):
        return End.EARLY_STOPPING
    return None


def is_slot(path: str) -> bool:
    """Return whether a path of T5X's tree is the optimizer's state of one parameter."""
    return path.startswith(checkpoint.SLOT_PREFIX)


def parts_of(path: str) -> tuple[str, str]:
    """Split a path of T5X's tree into the parameter and the optimizer's slot; '' for none."""
    if is_slot(path):
        parameter, _, slot = path.removeprefix(checkpoint.SLOT_PREFIX).rpartition('/')
        return parameter, slot
    return path.removeprefix(checkpoint.PARAMETER_PREFIX), ''


def only_parameters(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a flat tree, under the same paths."""
    return {path: x for path, x in tree.items() if checkpoint.is_parameter(path)}


def choose(
    index: Mapping[str, Any],
    expected: checkpoint.Shapes,
    pattern: str = '.*',
    strict: bool = True,
    vocab_paths: Collection[str] = (),
) -> tuple[dict[str, Any], str]:
    """Return the leaves of `index` to restore, whose full path matches `pattern`, and a note about the others.

    The parameters `vocab_paths` get new rows. Raises Refused for shapes other than `expected` and, if `strict`,
    for matching paths that only `index` or only `expected` has. Without `strict` it leaves these out.
    """
    leaves = {path: leaf for path, leaf in index.items() if re.fullmatch(pattern, path)}
    shapes = {path: shape for path, shape in expected.items() if re.fullmatch(pattern, path)}
    if not leaves:
        raise Refused(
            f'{pattern!r} matches the full path of no array: one is {max(index, default="")}'
        )
    grown = with_new_rows(leaves, shapes, vocab_paths)
    leaves |= grown
    if not strict:
        leaves = {path: leaf for path, leaf in leaves.items() if path in shapes}
        shapes = {path: shapes[path] for path in leaves}
    formats.open.compare(shapes, checkpoint.shapes(leaves))
    note = ''
    for label, tree in (('initial', expected), ('not used', index)):
        others = sorted(only_parameters(tree).keys() - leaves)
        if others:
            note += f'; {label}: {first_ten(others)}'
    if grown:
        names = sorted(only_parameters(grown))
        note += f'; new rows, at the mean of the others: {first_ten(names)}'
    return leaves, note
