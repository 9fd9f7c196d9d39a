"""Writing folders of adapters, which the package peft opens; peft.py reads them."""

from collections.abc import Mapping

import numpy as np

import checkpoint
import paths
from checkpoint import Leaf
from formats import hugging_face, peft, write_hugging_face
from formats.vocabulary import ADAPTER_CONFIG
from model import T5Config


def write(
    folder: str | paths.AnyPath,
    config: T5Config,
    kernels: Mapping[str, tuple[Leaf, Leaf]],
    prompt: Leaf | None,
    base: str,
) -> None:
    """Write a new folder that peft opens: all or nothing.

    `config`: of the model with `kernels`, {our path of a kernel: (lora_a, lora_b)}, of one rank, or with a `prompt`;
    `base`: the path or name of the base.
    """
    settings: dict = {
        'base_model_name_or_path': base,
        'inference_mode': True,
        'task_type': 'SEQ_2_SEQ_LM',
    }
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
        names = hugging_face.parameter_names(config)
        write_hugging_face.check_names(kernels, names)
        modules = []
        for path, (lora_a, lora_b) in kernels.items():
            module = names[path].removesuffix('.weight')
            modules.append(module)
            for name, leaf in (('lora_A', lora_a), ('lora_B', lora_b)):
                x = np.asarray(checkpoint.read_leaf(leaf))
                arrays[f'base_model.model.{module}.{name}.weight'] = hugging_face.transpose(x)
        alpha = config.lora_alpha
        settings |= {
            'peft_type': peft.LORA,
            'r': config.lora_rank,
            'lora_alpha': int(alpha) if alpha == int(alpha) else alpha,
            'lora_dropout': 0.0,
            'bias': 'none',
            'target_modules': _targets(modules, names),
        }
    with write_hugging_face.new_folder(folder) as unfinished:
        write_hugging_face.write_json(unfinished / ADAPTER_CONFIG, settings)
        write_hugging_face.save_arrays(unfinished / peft.WEIGHTS, arrays)


def _targets(modules: list[str], names: Mapping[str, str]) -> list[str]:
    """Return peft's target_modules for these modules: the ends of their names, such as q, if they suffice."""
    ends = sorted({module.rpartition('.')[2] for module in modules})
    matched = []
    for path, name in names.items():
        module = name.removesuffix('.weight')
        if path.endswith('/kernel') and module.rpartition('.')[2] in ends:
            matched.append(module)
    return ends if sorted(matched) == sorted(modules) else sorted(modules)
