"""--mode=convert: write a checkpoint of any format as T5X's or Hugging Face's, or its adapters as peft's."""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from absl import logging
from absl.flags import FlagValues

import checkpoint
import formats.open
import paths
from configs.check import read_stored
from families import lora
from formats import hugging_face, own_model, peft, write_hugging_face
from formats.vocabulary import ADAPTER_CONFIG, find_vocabulary, kept_files, stored_data
from messages import Refused, first_ten
from modes import process, topology
from vocabulary import ByteVocabulary


def main(config: None, flags: FlagValues, signals: process.Signals) -> int:
    topology.local_devices()  # raises Refused without devices of JAX_PLATFORMS
    folder = convert_checkpoint(flags['from'].value, flags.to, flags.format, flags.step)
    signals.begin_work()
    process.print_lines([str(folder)], sys.stdout)
    return 0


def convert_checkpoint(
    source: str | Path | None, target: str | Path | None, form: str, step: str = ''
) -> Path:
    """Write the checkpoint that `infer.load` would open at `source` to the folder `target`; return its path.

    `form`: 't5x' writes `target`/checkpoint_STEP, with the optimizer state if there is one; 'hf' writes parameters
    only; 'peft' writes the adapters of a run. Arrays keep their dtypes, and are read only when they are written. An
    error leaves `target` unchanged. Raises Refused for a target that has other files or lies in the source, and warns
    if the vocabulary is missing.
    """
    if not source or not target:
        raise Refused('--mode=convert needs --from=CHECKPOINT and --to=FOLDER')
    target = paths.disk_path(target)
    paths.check_new(target)
    source_path = paths.source_path(source)
    if source_path.resolve() in (target.resolve(), *target.resolve().parents):
        raise Refused(f'{target} is or lies in {source_path}: name a folder elsewhere')
    opened = formats.open.open_model(source_path, step=step)
    if form == 'peft':
        _write_peft(target, opened)
        return target
    vocabulary = find_vocabulary(opened.directory)
    vocabulary_files = kept_files(vocabulary)
    if form == 'hf':
        parameters = checkpoint.parameters(opened.leaves)
        write_hugging_face.write(target, opened.config, parameters, vocabulary)
        folder = target
    else:
        folder = _write_t5x(target, opened, vocabulary_files)
    if opened.note:
        logging.warning(opened.note)
    is_in_config = form == 't5x' and isinstance(vocabulary, ByteVocabulary)
    if not vocabulary_files and not is_in_config:
        logging.warning(
            '%s has no vocabulary file, and so %s has none: pass vocabulary=... to load it, '
            'or copy spiece.model into it',
            opened.directory,
            folder,
        )
    return folder


def _write_peft(target: Path, opened: formats.open.OpenedModel) -> None:
    """Write the adapters of a run, with the name of their base."""
    base = read_stored(opened.directory).get('base', {}).get('directory')
    if base is None:
        raise Refused(f'--format=peft: {opened.directory} has no adapters: use --format=hf')
    config = opened.config
    kernels = {}
    for path, leaf in checkpoint.parameters(opened.leaves).items():
        if isinstance(leaf, peft.MergedKernel):
            kernels[path] = (leaf.lora_a, leaf.lora_b)
            config = leaf.config
    prompt = opened.leaves.get(f'target/{peft.PROMPT}')
    kinds = lora.ADAPTER if kernels else re.escape(peft.PROMPT)
    trained = checkpoint.parameters(checkpoint.read_index(opened.directory))
    others = [path for path in trained if not re.fullmatch(kinds, path)]
    if others:
        raise Refused(
            f'--format=peft: {opened.directory} has more than the adapters of one kind, {first_ten(others)}: use '
            '--format=t5x, or --format=hf'
        )
    write_hugging_face.write_peft(target, config, kernels, prompt, base)
    if not hugging_face.is_folder(paths.source_path(base)):
        logging.warning(
            '%s is not a folder of transformers: for peft, write it as one with --mode=convert --from=%s --to=FOLDER '
            '--format=hf, and base_model_name_or_path=FOLDER in %s',
            base,
            base,
            target / ADAPTER_CONFIG,
        )


def _write_t5x(
    target: Path, opened: formats.open.OpenedModel, vocabulary_files: Mapping[str, bytes]
) -> Path:
    """Write `target`/checkpoint_STEP with the vocabulary in it and, if `target` is new, next to it."""
    tree: dict[str, checkpoint.Leaf] = {'state/step': np.array(0, np.int32), **opened.leaves}
    step = int(checkpoint.read_leaf(tree['state/step']))
    final = target / f'checkpoint_{step}'
    files_there = sorted(paths.list_folder(target))
    for file in files_there:
        is_other_step = file != final and file.name.startswith('checkpoint_')
        model = vocabulary_files.get(file.name)
        is_same_vocabulary = model is not None and file.read_bytes() == model
        if not is_other_step and not is_same_vocabulary:
            raise Refused(f'{file} exists: remove it or name another folder')

    data_settings = stored_data(opened.directory)
    settings = {
        'model': own_model.as_settings(opened.config),
        'data': {name: data_settings[name] for name in ('extra_ids', 'vocabulary')},
    }
    files = {'config.json': json.dumps(settings).encode(), **own_model.files_of(opened.config)}
    files |= vocabulary_files
    with paths.unfinished(final) as unfinished:
        try:
            checkpoint.save(unfinished, step, tree, files)
            target.mkdir(parents=True, exist_ok=True)
            (unfinished / f'checkpoint_{step}').rename(final)
        except OSError as error:  # it names the unfinished folder, which is removed
            cause = error.__cause__
            if isinstance(cause, ValueError | OSError):
                raise cause from None
            raise
        if not files_there:  # other checkpoints must not find it
            for name, content in vocabulary_files.items():
                (unfinished / name).write_bytes(content)
                (unfinished / name).rename(target / name)
    return final
