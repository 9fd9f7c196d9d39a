"""What a run starts from: its newest valid checkpoint, `restore.path`, or the initial parameters."""

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
from formats import own_model, t5x
from formats.vocabulary import (
    add_tokens,
    changed_id,
    check_tokens,
    find_vocabulary,
    named_vocabulary,
    of_model,
    own_vocabulary,
)
from loss import parse_normalizing_factor
from messages import Refused, first_ten
from model import T5Config
from run import checks, verify
from vocabulary import ByteVocabulary, Vocabulary

MOMENTA = ('m', 'mu')  # the slots of first moments: Adafactor's, AdamW's


class Wanted(NamedTuple):
    """What a run needs to start."""

    model_config: T5Config
    shapes: checkpoint.Shapes  # the full state's, by T5X's paths
    trained: Collection[str]  # the paths of the parameters that are trained


class Start(NamedTuple):
    """What a run starts from."""

    step: int
    is_resumed: bool  # from a checkpoint in its own workdir
    leaves: dict[str, Any]  # from a checkpoint's index; missing ones get their initial value
    base: dict[str, str]  # for adapters, formats.open.describe_base of their checkpoint
    vocabulary_model: bytes  # the checkpoint's own; b'' if it has none
    description: str


def find_start(
    config: ConfigDict,
    folder: paths.AnyPath,
    wanted: Wanted,
    lines: Sequence[Mapping],
    report: Callable[[str], None],
) -> Start:
    """Return the newest valid checkpoint, else what a new run starts from. `lines`: of metrics.jsonl."""
    step = verify.newest_valid(folder, report)
    if step is None:
        checks.check_never_saved(folder, lines)
        return choose_initial(config, wanted)
    directory = folder / f'checkpoint_{step}'
    if not checks.is_own_config(directory / 'config.json'):
        raise Refused(f'{directory} was not saved by a run of this program: move it away')
    vocabulary_model = b''
    if paths.is_file(directory / 'vocabulary.model'):
        vocabulary_model = (directory / 'vocabulary.model').read_bytes()
    leaves = checkpoint.read_index(directory)
    base = {}
    opened = formats.open.open_base(directory, config.restore.path)
    if opened is not None:
        leaves = only_parameters(opened.leaves) | leaves
        # open_base has compared its fingerprint.
        base = settings.read_stored(directory)['base'] | {'directory': str(opened.directory)}
    return Start(
        step=step,
        is_resumed=True,
        leaves=leaves,
        base=base,
        vocabulary_model=vocabulary_model,
        description=f'Continuing after step {step:,}',
    )


def choose_initial(config: ConfigDict, wanted: Wanted) -> Start:
    """Return what a new run starts from: leaves of the index of `restore.path`, and its vocabulary.

    Step and optimizer state are restored too, as in T5X. Adapters start at step 0.
    """
    chosen = config.restore
    adapters = model.adapter_paths(wanted.model_config)
    setting = f'model.module={config.model.module!r}'
    if config.model.lora_rank:
        setting = f'model.lora_rank={config.model.lora_rank}'
    if adapters and (not chosen.path or chosen.dtype not in ('float32', '')):
        raise Refused(
            f'restore.path={chosen.path!r}, restore.dtype={chosen.dtype!r}: {setting} needs a checkpoint, and float32'
        )
    if not chosen.path:
        return Start(0, False, leaves={}, base={}, vocabulary_model=b'', description='From scratch')

    # Open the checkpoint.
    try:
        opened = formats.open.open_checkpoint(chosen.path, part='whole' if chosen.strict else '')
    except (Refused, OSError) as error:
        raise Refused(f'restore.path={chosen.path}: {error}') from error
    formats.open.check_family(opened.directory, wanted.model_config)
    if chosen.strict:
        remedy = 'restore its parameters with restore.strict=False'
        own_model.check_same(opened.directory, wanted.model_config, remedy, may_be_plain=True)

    # Leave out the optimizer state of frozen parameters.
    index = {}
    for path, leaf in opened.leaves.items():
        parameter, _, _ = path.removeprefix(checkpoint.SLOT_PREFIX).rpartition('/')
        is_known = f'{checkpoint.PARAMETER_PREFIX}{parameter}' in wanted.shapes
        is_frozen = is_known and parameter not in wanted.trained
        if not is_slot(path) or not is_frozen:
            index[path] = leaf
    num_frozen = len(opened.leaves) - len(index)

    # Choose what the model needs. Averages begin with the parameters that a run starts from.
    expected = dict(wanted.shapes)
    for average in t5x.average_paths(expected):
        del expected[average]
    # Without optimizer state the step is not restored either.
    if adapters or not any(is_slot(path) for path in index):
        expected = only_parameters(expected)
        index = only_parameters(index)
    for path in adapters:
        expected.pop(f'{checkpoint.PARAMETER_PREFIX}{path}', None)
    # New rows of the token table, and columns of the logits.
    of_vocabulary = vocabulary_paths(wanted.model_config)
    grown = with_new_rows(index, expected, of_vocabulary)
    untrained = of_vocabulary.difference(wanted.trained)
    if grown and adapters and untrained:
        trainable = '|'.join([wanted.model_config.family.adapters, *sorted(of_vocabulary)])
        raise Refused(
            f'model.vocab_size={config.model.vocab_size} with {setting}: restore.path={chosen.path} has fewer rows, '
            f'which adapters alone do not train: set optimizer.trainable={trainable!r}'
        )
    index |= grown
    try:
        leaves = choose(index, expected, chosen.only, chosen.strict)
    except (Refused, re.error) as error:
        raise Refused(
            f'restore.path={chosen.path}, restore.only={chosen.only!r}: {error}: change it, or set restore.strict=False'
        ) from error
    check_files(chosen.path, leaves)
    if adapters and not leaves.keys() == index.keys() == expected.keys():
        raise Refused(
            f'restore.path={chosen.path}: {setting} needs just its parameters: set restore.only=target/.*, restore.strict=True'
        )
    has_slots = any(is_slot(path) for path in leaves)
    if has_slots:
        check_same_divisor(config, opened.directory)
    step = formats.open.saved_step(leaves)  # 0 if it is not restored
    if step >= config.train.steps and not config.train.relative_steps:
        raise Refused(
            f'restore.path={chosen.path} is at step {step}: set train.steps, train.relative_steps or restore.only'
        )

    # data.vocabulary takes precedence over the checkpoint's own vocabulary.
    name = config.data.vocabulary
    extra_ids = config.data.extra_ids
    vocabulary_model = b''
    if name:
        vocabulary = named_vocabulary('data.vocabulary', name, extra_ids)
    else:
        own = find_vocabulary(opened.directory)
        if own is None or not own.model:
            raise Refused(f'restore.path={chosen.path} has no vocabulary: set data.vocabulary')
        vocabulary_model = own.model
        vocabulary = of_model(own.model, extra_ids)
    if any(f'{checkpoint.PARAMETER_PREFIX}{path}' in leaves for path in of_vocabulary):
        check_keeps_ids(config, opened.directory, vocabulary)

    # Adapters may begin with values that are made from the base.
    made = wanted.model_config.family.initial_adapters
    if adapters and made is not None:
        read = lambda path: checkpoint.read_leaf(leaves[f'{checkpoint.PARAMETER_PREFIX}{path}'])  # noqa: E731
        initial = made(wanted.model_config, read, vocabulary, config.seed)
        leaves |= {f'{checkpoint.PARAMETER_PREFIX}{path}': x for path, x in initial.items()}

    slots = 'with the' if has_slots else 'without any'
    description = f'From step {step:,} of {opened.directory}, {slots} optimizer state'
    for label, tree in (('initial', expected), ('not used', index)):
        others = sorted(only_parameters(tree).keys() - leaves)
        if others:
            description += f'; {label}: {first_ten(others)}'
    if grown.keys() & leaves:
        description += (
            f'; new rows, at the mean of the others: {first_ten(sorted(only_parameters(grown)))}'
        )
    if num_frozen:
        description += (
            f'; not used: {num_frozen:,} arrays of the optimizer state of frozen parameters'
        )
    return Start(
        step=step,
        is_resumed=False,
        leaves=leaves,
        base=formats.open.describe_base(opened) if adapters else {},
        vocabulary_model=vocabulary_model,
        description=description,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class GrownArray:
    """An array with new rows at the mean of the others, or 0: a `checkpoint.LazyArray`."""

    leaf: checkpoint.Leaf
    axis: int
    shape: tuple[int, ...]
    at_mean: bool

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.leaf.dtype)

    def read(self) -> np.ndarray:
        old = np.asarray(checkpoint.read_leaf(self.leaf))
        mean = old.mean(self.axis, keepdims=True, dtype=np.float32)
        num_new = self.shape[self.axis] - old.shape[self.axis]
        new = np.repeat(mean if self.at_mean else 0 * mean, num_new, self.axis)
        return np.concatenate([old, new.astype(old.dtype)], self.axis)


def vocabulary_paths(config: T5Config) -> set[str]:
    """Return the paths of the parameters whose rows or columns are the ids of the vocabulary."""
    larger = model.shapes(dataclasses.replace(config, vocab_size=2 * config.vocab_size))
    return {path for path, shape in model.shapes(config).items() if shape != larger[path]}


def with_new_rows(
    index: Mapping[str, Any], expected: checkpoint.Shapes, of_vocabulary: Collection[str]
) -> dict[str, GrownArray]:
    """Return the leaves of `index` that have fewer ids than expected, with new rows for the missing ids.

    In new rows a parameter, its average and its second moments are the mean of the old rows, so that an update is
    as large as theirs; a momentum is 0.
    """
    grown = {}
    for path, leaf in index.items():
        parameter = path.removeprefix(checkpoint.PARAMETER_PREFIX)
        slot = ''
        if is_slot(path):
            parameter, _, slot = path.removeprefix(checkpoint.SLOT_PREFIX).rpartition('/')
        whole = f'{checkpoint.PARAMETER_PREFIX}{parameter}'
        if parameter not in of_vocabulary or not {whole, path} <= index.keys() & expected.keys():
            continue
        # The numbers of rows of the table, or of columns of the logits, before and after.
        sizes = {*zip(np.shape(index[whole]), expected[whole], strict=True)}
        changed = [(old, new) for old, new in sizes if old != new]
        if len(changed) != 1 or changed[0][0] > changed[0][1]:
            continue
        found = np.shape(leaf)
        for axis, size in enumerate(found):
            shape = (*found[:axis], changed[0][1], *found[axis + 1 :])
            if size == changed[0][0] and shape == tuple(expected[path]):
                grown[path] = GrownArray(leaf, axis, shape, slot not in MOMENTA)
    return grown


def check_files(path: str, leaves: Mapping[str, Any]) -> None:
    """Raise Refused if the folder of an array in T5X's layout is missing, as in a copy without state.*."""
    entries = [leaf for leaf in leaves.values() if isinstance(leaf, checkpoint.ZarrEntry)]
    names = {file for entry in entries[:1] for file in checkpoint.list_folder(entry.directory)}
    missing = [entry.folder.name for entry in entries if entry.folder not in names]
    if missing:
        remedy = 'copy it again'
        if all(name.startswith('state.') for name in missing):
            remedy = 'copy them, or set restore.only=target/.*'
        raise Refused(f'restore.path={path} lacks {first_ten(missing)}: {remedy}')


def check_same_divisor(config: ConfigDict, directory: paths.AnyPath) -> None:
    """Raise Refused if the restored optimizer state has gradients of a loss with another divisor.

    Second moments that are larger by the square of 16,384 make updates smaller by 16,384, for thousands of steps.
    """
    own = settings.read_stored(directory).get('loss', {}).get('loss_normalizing_factor')
    wanted = config.loss.loss_normalizing_factor
    if own is not None and parse_normalizing_factor(own) != parse_normalizing_factor(wanted):
        raise Refused(
            f'loss.loss_normalizing_factor={wanted!r}: restore.path was trained with {own!r}: use that'
        )


def check_keeps_ids(config: ConfigDict, directory: paths.AnyPath, vocabulary: Vocabulary) -> None:
    """Raise Refused if the run's vocabulary has another id for a token of the checkpoint's own."""
    vocabulary = add_tokens(vocabulary, config.data.added_tokens)
    own = own_vocabulary(directory, config.data.extra_ids)
    change = changed_id(own, vocabulary) if own else ''
    if own and change:
        taken = 'bytes' if isinstance(own, ByteVocabulary) else "''"
        raise Refused(
            f'data.vocabulary={config.data.vocabulary!r}, data.extra_ids={config.data.extra_ids}: {change}: '
            f'restore.path={config.restore.path} needs data.vocabulary={taken}, data.extra_ids={own.num_extra_ids}'
        )
    check_tokens(directory, vocabulary)


def with_last_step(config: ConfigDict, folder: paths.AnyPath, start: Start) -> ConfigDict:
    """Return a config whose train.steps are those of train.relative_steps, if that is set."""
    relative_steps = config.train.relative_steps
    if relative_steps == 0:
        return config
    first_step = start.step
    if start.is_resumed:
        file = folder / f'checkpoint_{start.step}' / 'config.json'
        old = json.loads(file.read_bytes())['train']
        if not old['relative_steps']:
            raise Refused(
                f'train.relative_steps={relative_steps}: {folder} began with train.steps={old["steps"]}: set that'
            )
        first_step = old['steps'] - old['relative_steps']
    config = config.copy_and_resolve_references()
    config.train.steps = first_step + relative_steps
    return config


def is_slot(path: str) -> bool:
    """Return whether a path of T5X's tree is the optimizer's state of one parameter."""
    return path.startswith(checkpoint.SLOT_PREFIX)


def only_parameters(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a flat tree, under the same paths."""
    return {path: x for path, x in tree.items() if checkpoint.is_parameter(path)}


def choose(
    index: Mapping[str, Any], expected: checkpoint.Shapes, pattern: str = '.*', strict: bool = True
) -> dict[str, Any]:
    """Return the leaves of `index` to restore: their whole path matches `pattern`.

    Raises Refused for other shapes than `expected` and, if `strict`, for matching paths that only `index` or
    only `expected` has. Without `strict` these are left out.
    """
    found = {path: leaf for path, leaf in index.items() if re.fullmatch(pattern, path)}
    known = {path: shape for path, shape in expected.items() if re.fullmatch(pattern, path)}
    if not found:
        raise Refused(
            f'{pattern!r} matches the full path of no array, as {max(index, default="")} is one'
        )
    if not strict:
        found = {path: leaf for path, leaf in found.items() if path in known}
        known = {path: known[path] for path in found}
    formats.open.compare(known, checkpoint.shapes(found))
    return found
