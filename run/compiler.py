"""Options of XLA for the train step."""

import functools
import os
import re
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

YNNPACK = 'xla_cpu_experimental_ynn_fusion_type'
PRODUCTS = 'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'  # the value that leaves products alone to YNNPACK
# What /proc/cpuinfo says of a CPU, x86 or ARM, that multiplies bfloat16.
BFLOAT16_PRODUCTS = re.compile(r'\b(avx512_bf16|amx_bf16|bf16)\b')


def options(mesh: Mesh, dtype: str) -> dict[str, str | bool]:
    """Return compiler options for a train step on a mesh that computes in `dtype`.

    XLA_FLAGS of the user have precedence. The option is for CPUs; docs/log.md has its figures.

    XLA of JAX 0.10 gives sums and products to YNNPACK, which plans each one again in every step. When
    a program is loaded, each one is looked for among all instructions. But YNNPACK alone multiplies
    with a CPU's instructions for bfloat16.
    """
    if mesh.devices.flat[0].platform != 'cpu':
        return {}
    if YNNPACK in os.environ.get('XLA_FLAGS', '') or not knows_ynnpack(mesh):
        return {}
    return {YNNPACK: PRODUCTS if dtype == 'bfloat16' and multiplies_bfloat16() else ''}


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16; False where that is unknown."""
    try:
        return BFLOAT16_PRODUCTS.search(Path('/proc/cpuinfo').read_text()) is not None
    except OSError:  # not Linux
        return False


@functools.cache
def knows_ynnpack(mesh: Mesh) -> bool:
    """Return whether the XLA of the mesh has the option YNNPACK."""
    program = jax.jit(lambda: 0, out_shardings=NamedSharding(mesh, PartitionSpec())).lower()
    try:
        program.compile({YNNPACK: ''})
    except jax.errors.JaxRuntimeError:
        return False
    return True
