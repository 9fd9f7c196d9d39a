"""LoRA: frozen kernels, each with two small trained matrices.

The settings are model.lora_rank, lora_alpha and lora_targets. formats/own_model.py applies this family last, if the rank
is above 0. A checkpoint holds only the adapters; restore.path names the checkpoint of the base.

Source: Hu et al. 2021 (LoRA) §4.1.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import haiku as hk
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import model

ADAPTER = r'.+/lora_[ab]'  # paths of adapters
# Adapters are split like the rows and columns of their kernel.
SPECS = (
    (r'.+/(query|key|value|wi(_\d)?|logits_dense)/lora_a', P(None, None)),  # [rows, rank]
    (r'.+/(query|key|value|wi(_\d)?|logits_dense)/lora_b', P(None, 'model')),  # [rank, columns]
    (r'.+/(out|wo)/lora_a', P('model', None)),  # [rows, rank]
    (r'.+/(out|wo)/lora_b', P(None, None)),  # [rank, columns]
)

Leaf = TypeVar('Leaf')  # a parameter: an array, or one not read yet


def adapted_kernel(
    config: model.T5Config, kernel: jax.Array, lora_a: jax.Array, lora_b: jax.Array
) -> jax.Array:
    """Return a kernel with its adapters, float32."""
    product = jnp.matmul(lora_a, lora_b, precision='highest')
    return kernel + config.lora_alpha / config.lora_rank * product


def merge(
    config: model.T5Config, params: Mapping[str, Leaf], merge_kernel: Callable = adapted_kernel
) -> dict[str, Leaf]:
    """Replace each kernel and its adapters by `merge_kernel(config, kernel, lora_a, lora_b)`."""
    leaves = {}
    for path, x in params.items():
        scope, name = path.rsplit('/', 1)
        if name == 'kernel' and f'{scope}/lora_a' in params:
            leaves[path] = merge_kernel(
                config, x, params[f'{scope}/lora_a'], params[f'{scope}/lora_b']
            )
        elif not re.fullmatch(ADAPTER, path):
            leaves[path] = x
    return leaves


def without_adapters(config: model.T5Config) -> model.T5Config:
    """Return the config of the model after `merge`."""
    return dataclasses.replace(config, lora_rank=0)


def modules(family):
    """Return the family with adapters for the kernels that model.lora_targets matches."""
    if ADAPTER in family.adapters:  # model.module also names it
        return family

    class Kernel(family.parts.kernel):
        @hk.name_like('__call__')
        def matrix(self, dtype):
            c = self.config
            rank = c.lora_rank
            if not rank or not re.fullmatch(c.lora_targets, f'{self.module_name}/kernel'):
                return super().matrix(dtype)
            kernel = super().matrix(jnp.float32)
            rows, columns = self.shape
            lora_a = hk.get_parameter('lora_a', (rows, rank), jnp.float32, model.NORMAL)
            lora_b = hk.get_parameter('lora_b', (rank, columns), jnp.float32, jnp.zeros)
            return adapted_kernel(c, kernel, lora_a, lora_b)

    return dataclasses.replace(
        family,
        parts=dataclasses.replace(family.parts, kernel=Kernel),
        specs=(*family.specs, *SPECS),
        adapters='|'.join(filter(None, [family.adapters, ADAPTER])),
    )
