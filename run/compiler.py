"""Options of XLA for the train step."""

import functools
import os
import re
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

YNNPACK = 'xla_cpu_experimental_ynn_fusion_type'
PRODUCTS = 'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'  # the value that leaves products alone to YNNPACK
WITHOUT_PASSES = 'xla_disable_hlo_passes'
STAGES_OF_SUMS = 'tree_reduction_rewriter'  # the pass that computes a long sum in stages of 32
# What /proc/cpuinfo says of a CPU, x86 or ARM, that multiplies bfloat16.
BFLOAT16_PRODUCTS = re.compile(r'\b(avx512_bf16|amx_bf16|bf16)\b')


def options(mesh: Mesh, dtype: str) -> dict[str, str | bool]:
    """Return compiler options for a train step on a mesh that computes in `dtype`.

    XLA_FLAGS of the user have precedence. Both options are for CPUs; docs/log.md has their figures.

    XLA of JAX 0.10 gives sums and products to YNNPACK, which plans each one again in every step. When
    a program is loaded, each one is looked for among all instructions. But YNNPACK alone multiplies
    with a CPU's instructions for bfloat16.

    XLA computes a long sum in stages, half of the program of a step. One float32 number after another
    is as fast for sums of rows, and as exact for the lengths of a step. It is not for sums over rows
    (`optimizer.mean`) and for all numbers of a large matrix (`optimizer.sum_of_squares`). No
    sum of a step is one of bfloat16 numbers.
    """
    if mesh.devices.flat[0].platform != 'cpu':
        return {}
    flags = os.environ.get('XLA_FLAGS', '')
    found: dict[str, str | bool] = {}
    if WITHOUT_PASSES not in flags:
        found[WITHOUT_PASSES] = STAGES_OF_SUMS
    if YNNPACK not in flags and knows_ynnpack(mesh):
        found[YNNPACK] = PRODUCTS if dtype == 'bfloat16' and multiplies_bfloat16() else ''
    return found


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
