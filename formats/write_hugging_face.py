"""Write folders for transformers and peft; hugging_face.py and peft.py read them."""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy

import checkpoint
import model
import paths
from formats import gemma, hugging_face, own_model, peft
from formats.names import translate
from formats.vocabulary import ADAPTER_CONFIG, files_of
from messages import Refused, first_ten
from run import hub
from vocabulary import EOS_ID, PAD_ID, Vocabulary


def write(
    folder: str | paths.AnyPath,
    config: model.T5Config,
    arrays: Mapping[str, checkpoint.Leaf],
    vocabulary: Vocabulary | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a new folder that transformers opens: all or nothing.

    `arrays`: {our path: array or leaf of an index}, the parameters of `config`. At most `shard_bytes` of them, or one
    array, are in memory. Source: transformers modeling_utils.py save_pretrained.
    """
    settings = _settings(config)
    settings['eos_token_id'] = EOS_ID
    if vocabulary is not None:
        vocabulary.ends = config.family.ends(config, vocabulary.own_ends)
        eos_id, *others = vocabulary.ends.answers
        settings['eos_token_id'] = [eos_id, *others] if others else eos_id
    names = names_of(config, arrays)
    files: list[list[str]] = [[]]  # the paths in each
    num_bytes = 0
    for path, x in arrays.items():
        size = math.prod(x.shape) * x.dtype.itemsize
        if files[-1] and num_bytes + size > shard_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(path)
        num_bytes += size
    with new_folder(folder) as unfinished:
        write_json(unfinished / 'config.json', settings)
        for name, content in files_of(vocabulary).items():
            (unfinished / name).write_bytes(content)
        weight_map: dict[str, str] = {}
        total_size = 0
        for i, paths_of_file in enumerate(files, start=1):
            file_name = f'model-{i:05}-of-{len(files):05}.safetensors'
            if len(files) == 1:
                file_name = hugging_face.WEIGHTS
            shard: dict[str, np.ndarray] = {}
            for path in paths_of_file:
                shard |= _named_arrays(path, names[path], arrays[path])
            save_arrays(unfinished / file_name, shard)
            weight_map |= dict.fromkeys(shard, file_name)
            total_size += sum(x.nbytes for x in shard.values())
        if len(files) > 1:
            index = {'metadata': {'total_size': total_size}, 'weight_map': weight_map}
            write_json(unfinished / hugging_face.WEIGHTS_INDEX, index)


def names_of(config: model.T5Config, our_paths: Iterable[str]) -> dict[str, str]:
    """Return {our path: transformers' name without .weight}. Raise Refused for a path without one."""
    table = hugging_face.parameter_names(config)
    names = {path: translate(path, table) for path in our_paths}
    unknown = [path for path in sorted(names) if not names[path]]
    if unknown:
        raise Refused(f'transformers has no {first_ten(unknown)}: use --format=t5x')
    return names


@contextlib.contextmanager
def new_folder(folder: str | paths.AnyPath) -> Iterator[Path]:
    """Yield an unfinished folder, which is renamed to `folder` at the end."""
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
    safetensors.numpy.save_file(arrays, file, {'format': 'pt'})
    file.chmod(file.parent.stat().st_mode & 0o666)  # safetensors makes it private


def _settings(config: model.T5Config) -> dict:
    """Return the content of config.json."""
    if config.module in gemma.ARCHITECTURES:
        return gemma.settings_of(config)
    activations = tuple(config.mlp_activations)
    if activations == ('swish', 'linear'):  # another name of silu
        activations = ('silu', 'linear')
    names = {x: name for name, x in hugging_face.FEED_FORWARDS.items()}
    options = own_model.as_dict(config.options)
    is_supported = activations in names
    if config.module == hugging_face.SWITCH:
        max_step = min(2, config.num_encoder_layers, config.num_decoder_layers)
        is_supported = (
            activations == ('relu',)
            and config.logits_via_embedding
            and options['sparse_step'] <= max_step
        )
    if not is_supported or config.module not in ('', hugging_face.LONG_T5, hugging_face.SWITCH):
        raise Refused(
            f'model.module={config.module!r}, mlp_activations={activations}, logits_via_embedding='
            f'{config.logits_via_embedding}, options={options}: transformers cannot open this model: use --format=t5x'
        )
    name = names[activations]
    model_type = 't5'
    if config.relpos_bias_per_layer:
        model_type = 'umt5'
    sizes = {key: getattr(config, field) for key, field in hugging_face.SIZES.items()}
    for field in hugging_face.BUCKETS:
        sizes[field] = getattr(config, field)
    for key, (option, _) in hugging_face.FAMILY_SETTINGS.get(config.module, {}).items():
        sizes[key] = options[option]
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
        'dense_act_fn': hugging_face.DENSE_ACT_FNS[activations[0]],
        'is_gated_act': len(activations) > 1,
        'tie_word_embeddings': config.logits_via_embedding,
        'is_encoder_decoder': True,
        'pad_token_id': PAD_ID,
        **hugging_face.FIXED_SETTINGS,
    }


def _named_arrays(path: str, name: str, leaf: checkpoint.Leaf) -> dict[str, np.ndarray]:
    """Return {transformers' name: array} of a parameter: one array, or one for each expert."""
    x = np.asarray(checkpoint.read_leaf(leaf))
    arrays = {name if name.endswith('eoi_embedding') else f'{name}.weight': x}
    if x.ndim == 3:
        start, end = name.split('.experts.')
        arrays = {f'{start}.experts.expert_{i}.{end}.weight': matrix for i, matrix in enumerate(x)}
    for name, matrix in arrays.items():
        if hugging_face.is_transposed(path):
            arrays[name] = hugging_face.transpose(matrix)
        else:
            arrays[name] = np.ascontiguousarray(matrix)
    return arrays


# Adapters.


def write_peft(
    folder: str | paths.AnyPath,
    config: model.T5Config,
    kernels: Mapping[str, tuple[checkpoint.Leaf, checkpoint.Leaf]],
    prompt: checkpoint.Leaf | None,
    base: str,
) -> None:
    """Write a new folder that peft opens: all or nothing.

    The adapters are `kernels`, {our path of a kernel: (lora_a, lora_b)}, all of config.lora_rank, or a `prompt`. `base`:
    the path or name of the base.
    """
    settings: dict = {
        'base_model_name_or_path': base,
        'inference_mode': True,
        'task_type': 'SEQ_2_SEQ_LM',
    }
    if hub.is_name(base):
        repository, revision, _ = hub.parse(base)
        settings |= {'base_model_name_or_path': repository, 'revision': revision}
    arrays = {}
    if prompt is not None:
        arrays[peft.PROMPT_NAME] = np.asarray(checkpoint.read_leaf(prompt))
        settings |= {
            'peft_type': peft.PROMPT_TUNING,
            'num_virtual_tokens': len(arrays[peft.PROMPT_NAME]),
            'num_transformer_submodules': 1,
            'token_dim': config.emb_dim,
        }
    else:
        modules = names_of(config, kernels)
        for path, (lora_a, lora_b) in kernels.items():
            for name, leaf in (('lora_A', lora_a), ('lora_B', lora_b)):
                x = np.asarray(checkpoint.read_leaf(leaf))
                full_name = f'base_model.model.{modules[path]}.{name}.weight'
                arrays[full_name] = hugging_face.transpose(x)
        alpha = config.lora_alpha
        settings |= {
            'peft_type': peft.LORA,
            'r': config.lora_rank,
            'lora_alpha': int(alpha) if alpha == int(alpha) else alpha,
            'lora_dropout': 0.0,
            'bias': 'none',
            'target_modules': sorted(modules.values()),
        }
    with new_folder(folder) as unfinished:
        write_json(unfinished / ADAPTER_CONFIG, settings)
        save_arrays(unfinished / peft.WEIGHTS, arrays)
