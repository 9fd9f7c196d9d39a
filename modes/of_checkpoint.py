"""The settings and the vocabulary that a mode takes from a checkpoint."""

import contextlib
import re
from collections.abc import Mapping

from ml_collections import ConfigDict

import formats.open
import paths
from configs import base, check
from formats import own_model
from formats.vocabulary import (
    changed_id,
    check_tokens,
    mark_sentinels,
    named_vocabulary,
    names_of,
    own_vocabulary,
)
from messages import Refused, named
from model import T5Config
from run import hub
from sources.open import FILE_SETTINGS, split_names
from vocabulary import Vocabulary

# Settings that a run takes from restore.path; ONLY_STRICT only with restore.strict=True.
SIZES = (
    'vocab_size',
    'emb_dim',
    'num_heads',
    'head_dim',
    'mlp_dim',
    'mlp_activations',
    'relative_attention_num_buckets',
    'relative_attention_max_distance',
)
ONLY_STRICT = (
    'num_encoder_layers',
    'num_decoder_layers',
    'logits_via_embedding',
    'relpos_bias_per_layer',
)
OF_VOCABULARY = ('vocab_size', 'logits_via_embedding')
RUN_SETTINGS = ('model.', 'data.', 'decode.', 'infer_eval.')  # kept when a run's checkpoint is used


def with_commits(config: ConfigDict, workdir: str) -> ConfigDict:
    """Add its commit to each hub name in `config`: the one that the run in `workdir` has recorded, if any."""
    keys = ['restore.path', 'data.vocabulary']
    keys += [f'data.{setting}' for setting in FILE_SETTINGS.values()]
    values = dict(check.leaves(config))
    recorded = check.flatten(check.read_stored(paths.to_path(workdir)))
    changes = {}
    for key in keys:
        names = split_names(values[key])
        if not any(map(hub.is_name, names)):
            continue
        from run import hub_client  # late: the client is large

        changes[key] = str(recorded.get(key.replace('.', '/'), ''))
        if hub.without_commits(changes[key]) != values[key]:
            with named(key):
                pinned = [
                    hub_client.with_commit(x, has_weights=key == 'restore.path') for x in names
                ]
            changes[key] = ','.join(pinned)
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(changes)
    return config


def settings_of(directory: paths.AnyPath, changes: Mapping) -> ConfigDict:
    """Return the settings of the run that saved a checkpoint, else the defaults, with `changes`.

    `changes`: {'data.task': value}. The run's mesh, training settings and data.vocabulary are not used: a
    checkpoint has its vocabulary.
    """
    config = base.get_config()
    settings = check.flatten(check.read_stored(directory))
    for key, _ in check.leaves(config):
        name = key.replace('.', '/')
        if key.startswith(RUN_SETTINGS) and key != 'data.vocabulary' and name in settings:
            config.update_from_flattened_dict({key: settings[name]})
    check.set_options(config, {name.replace('/', '.'): x for name, x in settings.items()})
    for key, value in changes.items():
        if not key.startswith(check.OPTIONS):
            config.update_from_flattened_dict({key: value})
    check.set_options(config, changes)
    return config


def with_restored_sizes(
    config: ConfigDict, changes: Mapping, workdir: str = ''
) -> tuple[ConfigDict, str]:
    """Return `config` with the sizes of `restore.path`, except for `changes`, and a line for the user or ''.

    A run in `workdir` that began there has recorded them. A checkpoint that does not open, or is of another family,
    changes nothing: the run refuses it.
    """
    restore = config.restore
    if not restore.path:
        return config, ''
    names = [*SIZES, *ONLY_STRICT] if restore.strict else list(SIZES)
    with contextlib.suppress(Refused, OSError, re.error):
        run_settings = check.read_stored(paths.to_path(workdir)) if workdir else {}
        if run_settings.get('restore', {}).get('path') == restore.path:
            sizes = {**base.get_config().model.to_dict(), **run_settings['model']}
        else:
            opened = formats.open.open_model(restore.path, part='')
            sizes = own_model.as_settings(opened.config)
            if formats.open.is_encoder(opened.leaves):
                names = list(SIZES)
            # Shapes do not determine the activation: take it from the config.
            is_gated = len(sizes['mlp_activations']) > 1 and len(config.model.mlp_activations) > 1
            if is_gated and opened.is_assumed:
                sizes['mlp_activations'] = config.model.mlp_activations
        if not re.fullmatch(restore.only, 'target/token_embedder/embedding'):
            names = [name for name in names if name not in OF_VOCABULARY]
        values = {}
        if sizes['module'] == config.model.module:
            for name in names:
                value = sizes[name]
                if isinstance(value, list):
                    value = tuple(value)
                if f'model.{name}' not in changes and value != config.model[name]:
                    values[name] = value
        if values:
            config = config.copy_and_resolve_references()
            config.model.update(values)
            listing = ', '.join(f'{name}={value}' for name, value in values.items())
            return config, (
                f'The sizes come from restore.path={restore.path}: {listing}; --config.model.NAME=VALUE sets others.'
            )
    return config, ''


def settings_and_model(
    directory: paths.AnyPath, config: ConfigDict | None, changes: Mapping
) -> tuple[ConfigDict, T5Config | None]:
    """Return the checked settings for a checkpoint or run, and the model that they name; None for the checkpoint's.

    `config` comes from --config. Without it, use `settings_of`; they name a model if `changes` has model settings.
    """
    if config is None:
        config = settings_of(directory, changes)
        check.check(config)
        keys = [key for key in changes if key.startswith('model.')]
        if not keys:
            return config, None
        if 'model' not in check.read_stored(directory):
            raise Refused(f'--config.{keys[0]}: {directory} has no settings: add --config=FILE')
        if config.model.module and 'model.module' not in changes:
            saved = formats.open.checkpoint_folder(directory)
            config.model.module = own_model.module_of(saved, config.model.module)
    check.check(config)
    model_config = own_model.load(config.model)
    options = own_model.as_dict(model_config.options)  # typed, and all of them
    check.set_options(config, {f'model.options.{name}': x for name, x in options.items()})
    return config, model_config


def vocabulary_of_checkpoint(
    directory: paths.AnyPath, config: ConfigDict, model_config: T5Config
) -> Vocabulary:
    """Return the vocabulary that `config.vocabulary` names, else that in `directory`, with the model's ends.

    `config`: config.data. Raises Refused if there is none, or if it is not the checkpoint's.
    """
    saved_vocabulary = own_vocabulary(directory)
    vocabulary = saved_vocabulary
    if config.vocabulary:
        vocabulary = named_vocabulary('data.vocabulary', config.vocabulary, config.extra_ids)
    if vocabulary is None:
        raise Refused(f'{directory} has no vocabulary: name its own with --config.data.vocabulary')
    if saved_vocabulary is not None and names_of(saved_vocabulary) != names_of(vocabulary):
        change = changed_id(saved_vocabulary, vocabulary) or 'it has more'
        raise Refused(
            f'data.vocabulary={config.vocabulary!r} is not the vocabulary of {directory}: {change}: leave it out'
        )
    check_tokens(directory, vocabulary)
    mark_sentinels(vocabulary, config.sentinels)
    vocabulary.ends = model_config.family.ends(model_config, vocabulary.ends)
    return vocabulary


def check_rows(vocabulary: Vocabulary, directory: paths.AnyPath, num_rows: int) -> None:
    """Raise Refused if a checkpoint has fewer rows of embeddings than a vocabulary has ids."""
    if vocabulary.size > num_rows:
        raise Refused(
            f'data.vocabulary has {vocabulary.size:,} ids, and {directory} {num_rows:,} rows: name its own'
        )
