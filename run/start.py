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
    shapes: checkpoint.Shapes  # the full state's, by T5X's paths
    trained: Collection[str]  # the paths of the parameters that are trained
    loss_normalizing_factor: str
    seed: int  # for the first values of adapters


class Start(NamedTuple):
    """The checkpoint or the initial values from which a run starts."""

    step: int = 0
    directory: paths.AnyPath | None = None  # a checkpoint of this run, which is resumed
    # From a checkpoint's index; other arrays get their initial value.
    leaves: Mapping[str, checkpoint.Leaf] = {}
    base: Mapping[str, str] = {}  # for adapters, formats.open.describe_base of their checkpoint
    vocabulary_model: bytes = b''  # the checkpoint's own; b'' if it has none
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
    """Return the newest valid checkpoint, else the start of a new run. `lines`: of metrics.jsonl."""
    results.Results(folder).scores()  # raises Refused for a damaged file
    step = verify.newest_valid(folder, report)
    if step is None:
        checks.check_never_saved(folder, lines)
        return choose_initial(wanted, restore, data_group)
    directory = folder / f'checkpoint_{step}'
    if not checks.is_own_config(directory / 'config.json'):
        raise Refused(f'{directory} was not saved by a run of this program: move it away')
    vocabulary_model = b''
    kept = kept_file(directory)
    if kept is not None:
        vocabulary_model = kept.read_bytes()
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

    Step and optimizer state are restored too, as in T5X. Adapters start at step 0. A stage takes leaves, and returns
    those that it keeps with a note for the user.
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

    of_vocabulary = vocabulary_paths(wanted.model_config)
    index, note_of_state = without_unused_state(opened.leaves, wanted)
    try:
        leaves, note = choose(
            index, expected_shapes(index, wanted), restore.only, restore.strict, of_vocabulary
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
    if of_vocabulary & parameters.keys():
        check_keeps_ids(restore.path, data_group, directory, vocabulary)

    # Adapters may begin with values that are made from the base.
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
    """Raise Refused unless adapters, if there are any, begin with just the parameters of their base.

    `index`: the arrays of the base; `leaves`: those that are restored.
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
            f'restore.path={restore.path!r}, restore.dtype={restore.dtype!r}: {setting} needs just the parameters of a '
            'checkpoint, in float32: set restore.only=target/.*, restore.strict=True; restore.frozen_dtype rounds a base'
        )
    of_vocabulary = vocabulary_paths(config)
    has_new_rows = any(np.shape(leaf) != np.shape(index[path]) for path, leaf in leaves.items())
    if has_new_rows and of_vocabulary.difference(wanted.trained):
        trainable = '|'.join([config.family.adapters, *sorted(of_vocabulary)])
        raise Refused(
            f'model.vocab_size={config.vocab_size} with {setting}: restore.path={restore.path} has fewer rows, '
            f'which adapters alone do not train: set optimizer.trainable={trainable!r}'
        )


def without_unused_state(leaves: Mapping[str, Any], wanted: Wanted) -> tuple[dict[str, Any], str]:
    """Return the leaves without the optimizer state of frozen parameters, and a note.

    A model with adapters takes parameters alone, and without optimizer state the step is not restored either.
    """
    kept = {}
    for path, leaf in leaves.items():
        parameter, slot = parts_of(path)
        is_known = f'{checkpoint.PARAMETER_PREFIX}{parameter}' in wanted.shapes
        if not slot or not is_known or parameter in wanted.trained:
            kept[path] = leaf
    note = ''
    num_frozen = len(leaves) - len(kept)
    if num_frozen:
        note = f'; not used: {num_frozen:,} arrays of the optimizer state of frozen parameters'
    if model.adapter_paths(wanted.model_config) or not any(map(is_slot, kept)):
        kept = only_parameters(kept)
    return kept, note


def expected_shapes(index: Mapping[str, Any], wanted: Wanted) -> checkpoint.Shapes:
    """Return the shapes of the arrays that a new run takes from `index`: no adapters, and state only if it has some.

    Averages begin with the parameters.
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
    own = find_vocabulary(directory)
    if own is None or not own.model:
        raise Refused(f'restore.path={path} has no vocabulary: set data.vocabulary')
    return of_model(own.model, data_group.extra_ids)


def vocabulary_paths(config: T5Config) -> set[str]:
    """Return the paths of the parameters whose rows or columns are the ids of the vocabulary."""
    larger = model.shapes(dataclasses.replace(config, vocab_size=2 * config.vocab_size))
    return {path for path, shape in model.shapes(config).items() if shape != larger[path]}


def with_new_rows(
    index: Mapping[str, Any], expected: checkpoint.Shapes, of_vocabulary: Collection[str]
) -> dict[str, np.ndarray]:
    """Read the leaves of `index` that have fewer ids than expected, and add new rows for the missing ids.

    In new rows a parameter, its average and its second moments are the mean of the old rows, so that an update is
    as large as theirs; a momentum is 0.
    """
    grown = {}
    for path, leaf in index.items():
        parameter, slot = parts_of(path)
        whole = f'{checkpoint.PARAMETER_PREFIX}{parameter}'
        if parameter not in of_vocabulary or not {whole, path} <= index.keys() & expected.keys():
            continue
        # The numbers of rows of the table, or of columns of the logits, before and after.
        sizes = {*zip(np.shape(index[whole]), expected[whole], strict=True)}
        changed = [(old, new) for old, new in sizes if old != new]
        if len(changed) != 1:
            continue
        [(old_size, size)] = changed
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
    missing = [entry.folder.name for entry in entries if entry.folder not in names]
    if missing:
        remedy = 'copy it again'
        if all(name.startswith('state.') for name in missing):
            remedy = 'copy them, or set restore.only=target/.*'
        raise Refused(f'restore.path={path} lacks {first_ten(missing)}: {remedy}')


def check_same_divisor(factor: str, directory: paths.AnyPath) -> None:
    """Raise Refused if the restored optimizer state has gradients of a loss with another divisor than `factor`.

    Second moments that are larger by the square of 16,384 make updates smaller by 16,384, for thousands of steps.
    """
    own = settings.read_stored(directory).get('loss', {}).get('loss_normalizing_factor')
    if own is not None and parse_normalizing_factor(own) != parse_normalizing_factor(factor):
        raise Refused(
            f'loss.loss_normalizing_factor={factor!r}: restore.path was trained with {own!r}: use that'
        )


def check_keeps_ids(
    path: str, data_group: ConfigDict, directory: paths.AnyPath, vocabulary: Vocabulary
) -> None:
    """Raise Refused if the run's vocabulary has another id for a token of the checkpoint's own."""
    vocabulary = add_tokens(vocabulary, data_group.added_tokens)
    own = own_vocabulary(directory, data_group.extra_ids)
    change = changed_id(own, vocabulary) if own else ''
    if own and change:
        taken = 'bytes' if isinstance(own, ByteVocabulary) else "''"
        raise Refused(
            f'data.vocabulary={data_group.vocabulary!r}, data.extra_ids={data_group.extra_ids}: {change}: '
            f'restore.path={path} needs data.vocabulary={taken}, data.extra_ids={own.num_extra_ids}'
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
                f'train.relative_steps={relative_steps}: {start.directory.parent} began with '
                f'train.steps={old["steps"]}: set that'
            )
        first_step = old['steps'] - old['relative_steps']
    return first_step + relative_steps


def end_of(start: Start, train: ConfigDict, history: best.History) -> End | None:
    """Return why a run takes no more steps, if it does not."""
    if start.is_resumed and start.step >= train.steps:
        return End.STEPS
    if history.ends(train.early_stopping):
        return End.EARLY_STOPPING
    return None


def is_slot(path: str) -> bool:
    """Return whether a path of T5X's tree is the optimizer's state of one parameter."""
    return path.startswith(checkpoint.SLOT_PREFIX)


def parts_of(path: str) -> tuple[str, str]:
    """Return the parameter and the slot of the optimizer that a path of T5X's tree is of; '' for none."""
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
    of_vocabulary: Collection[str] = (),
) -> tuple[dict[str, Any], str]:
    """Return the leaves of `index` to restore, whose whole path matches `pattern`, and a note about the others.

    Those of the parameters `of_vocabulary` get new rows. Raises Refused for other shapes than `expected` and, if
    `strict`, for matching paths that only `index` or only `expected` has. Without `strict` these are left out.
    """
    found = {path: leaf for path, leaf in index.items() if re.fullmatch(pattern, path)}
    known = {path: shape for path, shape in expected.items() if re.fullmatch(pattern, path)}
    if not found:
        raise Refused(
            f'{pattern!r} matches the full path of no array, as {max(index, default="")} is one'
        )
    grown = with_new_rows(found, known, of_vocabulary)
    found |= grown
    if not strict:
        found = {path: leaf for path, leaf in found.items() if path in known}
        known = {path: known[path] for path in found}
    formats.open.compare(known, checkpoint.shapes(found))
    note = ''
    for label, tree in (('initial', expected), ('not used', index)):
        others = sorted(only_parameters(tree).keys() - found)
        if others:
            note += f'; {label}: {first_ten(others)}'
    if grown:
        names = sorted(only_parameters(grown))
        note += f'; new rows, at the mean of the others: {first_ten(names)}'
    return found, note
