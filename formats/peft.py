"""Folders of the package peft: adapters by Hugging Face's names, and a base that adapter_config.json names.

    adapter_config.json             the kind, its settings, and base_model_name_or_path
    adapter_model.safetensors       arrays by name

peft's LoRA is ours with both matrices transposed. Its scale is alpha / rank, with rsLoRA alpha / sqrt(rank); alpha and
rank may differ between kernels. DoRA stores the length of each column of a kernel. peft's prompt tuning is
families/prompt_tuning.py; if both stacks have a prompt, T5 reads the encoder's.

Source: peft 0.21 tuners/lora/{model,layer,dora}.py, peft_model.py.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

import checkpoint
import paths
from checkpoint import Leaf
from families import lora
from formats import hugging_face
from formats.hugging_face import SafetensorsEntry
from formats.names import inverse, translate
from formats.vocabulary import ADAPTER_CONFIG
from messages import Refused, first_ten
from model import T5Config

WEIGHTS = 'adapter_model.safetensors'
FILES = (ADAPTER_CONFIG, WEIGHTS)
LORA = 'LORA'
PROMPT_TUNING = 'PROMPT_TUNING'
PROMPT_FAMILY = 'prompt_tuning'
PROMPT = 'prompt/embedding'  # our path
PROMPT_NAME = 'prompt_embeddings'
TABLE = 'token_embedder/embedding'
# {peft's array: our adapter} of a kernel.
ADAPTERS = {
    'lora_A.weight': 'lora_a',
    'lora_B.weight': 'lora_b',
    'lora_magnitude_vector': 'magnitude',
    'lora_magnitude_vector.weight': 'magnitude',
}
ARRAY = re.compile(rf'base_model\.model\.(.+?)\.({"|".join(ADAPTERS)}|(?:base_layer\.)?weight)')
MERGE = (
    "merge it into its base with peft's merge_and_unload, if it can, and save_pretrained the model"
)
# The settings of LoRA that are read, or that do not matter after training.
LORA_SETTINGS = {
    'alpha_pattern', 'auto_mapping', 'base_model_name_or_path', 'bias', 'corda_config', 'ensure_weight_tying',
    'eva_config', 'exclude_modules', 'fan_in_fan_out', 'inference_mode', 'init_lora_weights', 'layers_pattern',
    'layers_to_transform', 'loftq_config', 'lora_alpha', 'lora_dropout', 'lora_ga_config', 'megatron_config',
    'megatron_core', 'modules_to_save', 'peft_type', 'peft_version', 'qalora_group_size', 'r', 'rank_pattern',
    'revision', 'runtime_config', 'target_modules', 'task_type', 'use_dora', 'use_rslora',
}  # fmt: skip
# Values of init_lora_weights with which training first changes the base.
CHANGES_BASE = ('pissa', 'olora', 'loftq', 'corda', 'lora_ga')


@dataclass(frozen=True, eq=False)
class MergedKernel:
    """A kernel of the base with its adapters, ours or peft's: a `checkpoint.LazyArray`."""

    config: T5Config
    kernel: Leaf
    lora_a: Leaf  # [rows, rank]
    lora_b: Leaf  # [rank, columns]
    magnitude: Leaf | None = None  # the length of each column, in DoRA
    dtype: ClassVar[np.dtype] = np.dtype('float32')

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.kernel.shape)

    def read(self) -> np.ndarray:
        """Return the matrix of model.Kernel, float32."""
        leaves = (self.kernel, self.lora_a, self.lora_b)
        arrays = [jnp.asarray(checkpoint.read_leaf(leaf), jnp.float32) for leaf in leaves]
        kernel = lora.adapted_kernel(self.config, *arrays)
        if self.magnitude is not None:  # Liu et al. 2024 (DoRA) §4.1
            magnitude = jnp.asarray(checkpoint.read_leaf(self.magnitude), jnp.float32)
            kernel = kernel * (magnitude / jnp.linalg.norm(kernel, axis=0))[None]
        return np.asarray(kernel)


def is_folder(folder: paths.AnyPath) -> bool:
    """Return whether a folder holds adapters without a model."""
    names = (hugging_face.WEIGHTS, hugging_face.WEIGHTS_INDEX)
    has_model = any(paths.is_file(folder / name) for name in names)
    return paths.is_file(folder / ADAPTER_CONFIG) and not has_model


def read_settings(folder: paths.AnyPath) -> dict:
    """Return adapter_config.json."""
    file = hugging_face.on_disk(folder) / ADAPTER_CONFIG
    settings = {'peft_type': None} | paths.read_json(file)
    for name, value in settings.items():
        is_supported = name in LORA_SETTINGS or not value
        if name == 'init_lora_weights':
            is_supported = not str(value).lower().startswith(CHANGES_BASE)
        elif name == 'peft_type':
            is_supported = value in (LORA, PROMPT_TUNING)
        if not is_supported and settings['peft_type'] != PROMPT_TUNING:
            raise Refused(f'{file}: {name}={value!r:.80} is not supported: {MERGE}')
    return settings


def read_index(
    folder: Path, settings: Mapping, config: T5Config, base: Mapping[str, Leaf]
) -> dict[str, Leaf]:
    """Return {our path: leaf} of the parameters that adapters change, and of a prompt. Reads no arrays of LoRA.

    `config` and `base`, {our path: leaf}, are the base's.
    """
    file = folder / WEIGHTS
    entries = hugging_face.read_header(paths.own_file(file))
    for entry in entries.values():
        hugging_face.check_array(entry)
    if settings['peft_type'] == PROMPT_TUNING:
        return _read_prompt(file, settings, config, entries)

    # Adapters by our paths.
    names = hugging_face.parameter_names(config)
    paths_of_names = inverse(names)
    adapters_of: dict[str, dict[str, SafetensorsEntry]] = {}
    arrays: dict[str, Leaf] = {}
    unknown = []
    for name, entry in entries.items():
        match = ARRAY.fullmatch(name)
        path = ''
        if match:
            path = translate(match[1], paths_of_names)
        if not match or path not in base:
            unknown.append(name)
        elif match[2] in ADAPTERS and path.endswith('/kernel') and len(base[path].shape) == 2:
            adapters_of.setdefault(path, {})[ADAPTERS[match[2]]] = entry
        elif path != TABLE and match[2] not in ADAPTERS:
            arrays[path] = entry.T if hugging_face.is_transposed(path) else entry
        elif path != TABLE or not np.array_equal(entry.read(), checkpoint.read_leaf(base[path])):
            unknown.append(name)
    for path, x in arrays.items():
        if x.shape != tuple(base[path].shape):
            unknown.append(f'{path} {x.shape}')
    if unknown or not (adapters_of or arrays):
        faults = first_ten(unknown) or 'no arrays'
        raise Refused(f'{file} has {faults}, not adapters of a matrix of its base: {MERGE}')

    for path, adapters in adapters_of.items():
        module = translate(path, names)
        rank = _setting(settings, 'r', 'rank_pattern', module)
        alpha = _setting(settings, 'lora_alpha', 'alpha_pattern', module)
        kernel = arrays.get(path, base[path])
        rows, columns = kernel.shape
        expected: dict[str, tuple[int, ...]]
        expected = {'lora_a': (rank, rows), 'lora_b': (columns, rank)}
        if settings.get('use_dora'):
            expected['magnitude'] = (columns,)
        shapes = {name: entry.shape for name, entry in adapters.items()}
        if shapes != expected:
            raise Refused(
                f'{file}: {module} has {shapes}, not {expected} as {ADAPTER_CONFIG} and the base say'
            )
        if settings.get('use_rslora'):
            alpha *= math.sqrt(rank)
        arrays[path] = MergedKernel(
            dataclasses.replace(config, lora_rank=rank, lora_alpha=alpha),
            kernel,
            adapters['lora_a'].T,
            adapters['lora_b'].T,
            adapters.get('magnitude'),
        )
    return arrays


def _setting(settings: Mapping, name: str, patterns: str, module: str) -> Any:
    """Return a number of `settings`: from `patterns` if one matches the module, or else from `name`."""
    for pattern, value in (settings.get(patterns) or {}).items():
        if re.fullmatch(rf'(.*\.)?({pattern})', module):
            return value
    return settings[name]


def _read_prompt(
    file: Path, settings: Mapping, config: T5Config, entries: Mapping[str, SafetensorsEntry]
) -> dict[str, Leaf]:
    """Return the prompt of the encoder, which precedes the decoder's, if that has one."""
    length = settings['num_virtual_tokens']
    shapes = {name: entry.shape for name, entry in entries.items()}
    expected = [{PROMPT_NAME: (rows, config.emb_dim)} for rows in (length, 2 * length)]
    if config.module or shapes not in expected:
        raise Refused(
            f'{file} has {shapes}: must be num_virtual_tokens={length} x {config.emb_dim} in {PROMPT_NAME}'
        )
    return {PROMPT: entries[PROMPT_NAME].read()[:length]}
