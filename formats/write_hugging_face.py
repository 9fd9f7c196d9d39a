"""Writing Hugging Face's folders, which transformers opens; hugging_face.py reads them."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy

import checkpoint
import model
import paths
from formats import hugging_face, own_options
from formats.vocabulary import files_of
from messages import Refused, first_ten
from vocabulary import EOS_ID, PAD_ID, Vocabulary


def write(
    folder: str | paths.AnyPath,
    config: model.T5Config,
    arrays: Mapping[str, checkpoint.Leaf],
    vocabulary: Vocabulary | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a new folder that transformers opens: all or nothing.

    `arrays` is {our path: array or leaf of an index}: the parameters of `config`, of which at most `shard_bytes`, or
    one array, are in memory. Source: transformers modeling_utils.py save_pretrained.
    """
    settings = _settings(config)
    settings['eos_token_id'] = getattr(vocabulary, 'eos_id', EOS_ID)
    check_names(arrays, hugging_face.parameter_names(config))
    with new_folder(folder) as unfinished:
        write_json(unfinished / 'config.json', settings)
        for name, content in files_of(vocabulary).items():
            (unfinished / name).write_bytes(content)
        file_names: dict[Path, list[str]] = {}  # {file: its arrays}
        total_size = 0
        for shard in _shards(config, arrays, shard_bytes):
            file = unfinished / f'{len(file_names)}.safetensors'  # until their number is known
            save_arrays(file, shard)
            file_names[file] = list(shard)
            total_size += sum(x.nbytes for x in shard.values())
        num_files = len(file_names)
        if num_files == 1:
            file.rename(unfinished / hugging_face.WEIGHTS)
        else:
            weight_map: dict[str, str] = {}
            for i, (file, names) in enumerate(file_names.items(), start=1):
                file = file.rename(unfinished / f'model-{i:05}-of-{num_files:05}.safetensors')
                weight_map |= dict.fromkeys(names, file.name)
            index = {'metadata': {'total_size': total_size}, 'weight_map': weight_map}
            write_json(unfinished / hugging_face.WEIGHTS_INDEX, index)


def check_names(paths_of_ours: Iterable[str], names: Mapping[str, str]) -> None:
    """Raise Refused if `names`, {our path: transformers' name}, lacks a path."""
    unknown = sorted(set(paths_of_ours) - names.keys())
    if unknown:
        raise Refused(f'transformers has no {first_ten(unknown)}: use --format=t5x')


@contextlib.contextmanager
def new_folder(folder: str | paths.AnyPath) -> Iterator[Path]:
    """Yield a folder that gets the name `folder` at the end."""
    path = paths.disk_path(folder)
    paths.check_new(path)
    if path.exists():
        raise Refused(f'{path} exists: remove it or name another folder')
    with paths.unfinished(path) as unfinished:
        yield unfinished
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.rename(path)


def write_json(file: Path, content: Mapping) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + '\n')


def save_arrays(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a safetensors file with the permissions of its folder's other files."""
    with paths.library_errors(file):
        safetensors.numpy.save_file(arrays, file, {'format': 'pt'})
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors makes it private


def _settings(config: model.T5Config) -> dict:
    """Return the content of config.json."""
    activations = tuple(config.mlp_activations)
    if activations == ('swish', 'linear'):  # another name of silu
        activations = ('silu', 'linear')
    names = {x.mlp_activations: name for name, x in hugging_face.FEED_FORWARDS.items()}
    options = own_options.as_dict(config.options)
    is_known = activations in names
    if config.module == hugging_face.SWITCH:
        most = min(2, config.num_encoder_layers, config.num_decoder_layers)
        is_known = (
            activations == ('relu',)
            and config.logits_via_embedding
            and options['sparse_step'] <= most
        )
    if not is_known or config.module not in ('', hugging_face.LONG_T5, hugging_face.SWITCH):
        raise Refused(
            f'model.module={config.module!r}, mlp_activations={activations}, logits_via_embedding='
            f'{config.logits_via_embedding}, options={options}: transformers has no such model: use --format=t5x'
        )
    name = names[activations]
    model_type = 't5'
    if config.relpos_bias_per_layer:
        model_type = 'umt5'
    sizes = {theirs: getattr(config, ours) for theirs, ours in hugging_face.SIZES.items()}
    for theirs, (ours, _) in hugging_face.FAMILY_SETTINGS.get(config.module, {}).items():
        sizes[theirs] = options[ours]
    if config.module == hugging_face.LONG_T5:
        model_type = 'longt5'
        attention, _ = hugging_face.LONG_T5_ATTENTIONS[options['encoder_attention']]
        sizes['encoder_attention_type'] = attention
    if config.module == hugging_face.SWITCH:
        model_type = 'switch_transformers'
        step = options['sparse_step']
        if any(options[factor] for factor in hugging_face.CAPACITY_FACTORS):
            settings = hugging_face.FAMILY_SETTINGS[hugging_face.SWITCH]
            _, sizes['expert_capacity'] = settings['expert_capacity']
        for stack in ('encoder', 'decoder'):
            sizes[f'{stack}_sparse_step'] = step
            sizes[f'num_sparse_{stack}_layers'] = getattr(config, f'num_{stack}_layers') // step
    return {
        'architectures': [hugging_face.ARCHITECTURES[model_type]],
        'model_type': model_type,
        **sizes,
        'dropout_rate': config.dropout_rate,
        'feed_forward_proj': name,
        'dense_act_fn': hugging_face.FEED_FORWARDS[name].dense_act_fn,
        'is_gated_act': len(activations) > 1,
        'tie_word_embeddings': config.logits_via_embedding,
        'is_encoder_decoder': True,
        'pad_token_id': PAD_ID,
        **hugging_face.FIXED_SETTINGS,
    }


def _shards(
    config: model.T5Config,
    arrays: Mapping[str, checkpoint.Leaf],
    shard_bytes: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield {Hugging Face's name: array} of each file, in the order of `arrays`."""
    names = hugging_face.parameter_names(config)
    shard: dict[str, np.ndarray] = {}
    num_bytes = 0
    for path in arrays:
        x = np.asarray(checkpoint.read_leaf(arrays[path]))
        by_name = {names[path]: x}
        if x.ndim == 3:  # experts, stored one by one
            start, end = names[path].split('.experts.')
            by_name = {f'{start}.experts.expert_{i}.{end}': matrix for i, matrix in enumerate(x)}
        for name, matrix in by_name.items():
            if shard and num_bytes + matrix.nbytes > shard_bytes:
                yield shard
                shard = {}
                num_bytes = 0
            num_bytes += matrix.nbytes
            if hugging_face.is_transposed(path):
                shard[name] = hugging_face.transpose(matrix)
            else:
                shard[name] = np.ascontiguousarray(matrix)
    yield shard
