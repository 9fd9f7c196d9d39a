"""T5 with grouped-query attention: query heads share keys and values in groups.

A group of adjacent query heads has one key head and one value head. This shrinks their kernels and the
decoding caches, in self-attention and in cross-attention.

Source: Ainslie et al. 2023 (GQA) §2.2.
"""

import dataclasses

import jax.numpy as jnp

import partition
from messages import Refused


@dataclasses.dataclass(frozen=True)
class Options:
    num_kv_heads: int = dataclasses.field(
        default=1, metadata={'help': 'key and value heads: must divide model.num_heads'}
    )

    def __post_init__(self):
        if self.num_kv_heads < 1:
            raise Refused(f'model.options.num_kv_heads={self.num_kv_heads}: use at least 1')


def modules(family):
    class Attention(family.parts.attention):
        def keys_values(self, memory_bMD, positions):
            initializer = self.config.parts.initializers.attention
            num_heads = self.config.options.num_kv_heads
            k_bMhK = self.heads(memory_bMD, 'key', initializer, num_heads)
            return k_bMhK, self.heads(memory_bMD, 'value', initializer, num_heads)

        def attend(self, q_bThK, k_bhKM, v_bhKM, *others):
            group_size, remainder = divmod(q_bThK.shape[2], k_bhKM.shape[1])
            if remainder:
                raise Refused(
                    f'model.options.num_kv_heads={self.config.options.num_kv_heads}: must divide '
                    f'model.num_heads={self.config.num_heads}'
                )
            k_bhKM = jnp.repeat(k_bhKM, group_size, axis=1)
            v_bhKM = jnp.repeat(v_bhKM, group_size, axis=1)
            return super().attend(q_bThK, k_bhKM, v_bhKM, *others)

    def check_mesh(config, mesh):
        family.check_mesh(config, mesh)
        num_heads = config.options.num_kv_heads
        partition.check_divides('model.options.num_kv_heads', num_heads, ('model',), mesh)

    parts = dataclasses.replace(family.parts, attention=Attention)
    return dataclasses.replace(family, parts=parts, check_mesh=check_mesh)
