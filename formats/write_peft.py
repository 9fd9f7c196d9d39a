"""Writing folders of adapters, which the package peft opens; peft.py reads them."""

from collections.abc import Mapping

import numpy as np

import checkpoint
import model
import paths
from checkpoint import Leaf
from formats import hugging_face, peft, write_hugging_face
from formats.names import translate
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
        modules = write_hugging_face.names_of(config, kernels)
        for path, (lora_a, lora_b) in kernels.items():
            for name, leaf in (('lora_A', lora_a), ('lora_B', lora_b)):
                x = np.asarray(checkpoint.read_leaf(leaf))
                arrays[f'base_model.model.{modules[path]}.{name}.weight'] = hugging_face.transpose(
                    x
                )
        alpha = config.lora_alpha
        settings |= {
            'peft_type': peft.LORA,
            'r': config.lora_rank,
            'lora_alpha': int(alpha) if alpha == int(alpha) else alpha,
            'lora_dropout': 0.0,
            'bias': 'none',
            'target_modules': _targets(config, sorted(modules.values())),
        }
    with write_hugging_face.new_folder(folder) as unfinished:
        write_hugging_face.write_json(unfinished / ADAPTER_CONFIG, settings)
        write_hugging_face.save_arrays(unfinished / peft.WEIGHTS, arrays)


def _targets(config: T5Config, modules: list[str]) -> list[str]:
    """Return peft's target_modules for these modules: the ends of their names, such as q, if they suffice."""
    ends = sorted({module.rpartition('.')[2] for module in modules})
    table = hugging_face.parameter_names(config)
    matched = []
    for path in model.shapes(config):
        module = translate(path, table)
        if path.endswith('/kernel') and module.rpartition('.')[2] in ends:
            matched.append(module)
    return ends if sorted(matched) == modules else modules
