"""Options of XLA for the train step."""

import functools
import os

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

OPTION = 'xla_cpu_experimental_ynn_fusion_type'


def options(mesh: Mesh) -> dict[str, str | bool] | None:
    """Return compiler options for a train step on a mesh; XLA_FLAGS of the user have precedence.

    On CPUs, XLA of JAX 0.10 gives sums and products to YNNPACK, which plans each one again in every
    step. When a program is loaded, each one is looked for among all instructions. Without YNNPACK a step
    is faster, and a compiled one is loaded in less than half the time: docs/log.md.
    """
    is_cpu = mesh.devices.flat[0].platform == 'cpu'
    if is_cpu and OPTION not in os.environ.get('XLA_FLAGS', '') and is_known(mesh):
        return {OPTION: ''}
    return None


@functools.cache
def is_known(mesh: Mesh) -> bool:
    """Return whether the XLA of the mesh has OPTION."""
    program = jax.jit(lambda: 0, out_shardings=NamedSharding(mesh, PartitionSpec())).lower()
    try:
        program.compile({OPTION: ''})
    except jax.errors.JaxRuntimeError:
        return False
    return True
