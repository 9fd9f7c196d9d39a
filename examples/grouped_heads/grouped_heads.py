"""An own model: T5 whose query heads share keys and values in groups (grouped-query attention).

Adjacent query heads form a group with one head of keys and values. Their kernels are smaller, and so
are the caches of decoding, in self-attention and in cross attention.

Source: Ainslie et al. 2023 (GQA) §2.2.
"""

import dataclasses

import jax.numpy as jnp

import model
import partition
from messages import Refused


@dataclasses.dataclass(frozen=True)
class Options:
    num_kv_heads: int = dataclasses.field(
        default=1, metadata={'help': 'heads of keys and values: must divide model.num_heads'}
    )

    def __post_init__(self):
        if self.num_kv_heads < 1:
            raise Refused(f'model.options.num_kv_heads={self.num_kv_heads}: use at least 1')


class Attention(model.Attention):
    def keys_values(self, memory_bMD, positions):
        initializer = self.config.modules.initializers.attention
        num_heads = self.config.options.num_kv_heads
        k_bMhK = self.heads(memory_bMD, 'key', initializer, num_heads)
        return k_bMhK, self.heads(memory_bMD, 'value', initializer, num_heads)

    @staticmethod
    def cache_shape(config, num_rows, num_slots):
        num_heads = partition.split(config.options.num_kv_heads, 'model')
        return num_rows, num_heads, config.head_dim, num_slots

    def attend(self, q_bThK, k_bhKM, v_bhKM, mask_b1TM, relpos_1hTM, positions, rows_b):
        group_size, rest = divmod(q_bThK.shape[2], k_bhKM.shape[1])
        if rest:
            raise ValueError(
                f'model.options.num_kv_heads={self.config.options.num_kv_heads} must divide '
                f'model.num_heads={self.config.num_heads}'
            )
        k_bhKM = jnp.repeat(k_bhKM, group_size, axis=1)
        v_bhKM = jnp.repeat(v_bhKM, group_size, axis=1)
        return super().attend(q_bThK, k_bhKM, v_bhKM, mask_b1TM, relpos_1hTM, positions, rows_b)


def check_mesh(config, mesh):
    num_heads = config.options.num_kv_heads
    partition.check_divides('model.options.num_kv_heads', num_heads, ('model',), mesh)


def modules(default):
    return dataclasses.replace(default, attention=Attention, check_mesh=check_mesh)
