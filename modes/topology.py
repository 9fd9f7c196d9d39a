"""The devices that `--topology` names, local or absent, and their published figures."""

import os
from typing import NamedTuple

import jax
from jax.experimental import topologies

from messages import Refused
from modes import process


class Chip(NamedTuple):
    """The published figures of a TPU."""

    flops: float  # bfloat16, per second
    clock: float  # Hz
    link: float  # bytes per second along a dimension of the torus, both directions together
    ring: int  # a dimension of a slice is a ring if its size is a multiple of this, else a line


# {JAX's kind of device: Chip}. FLOPs are from cloud.google.com/tpu/docs, links and rings from
# jax-ml.github.io/scaling-book/tpus. Clocks are computed: FLOPs / (2 * the multipliers of a chip), 4 matrix
# units of 128 x 128 in v5e, 8 in v5p. For v6e, 4 of 256 x 256 are assumed: the docs have two, which do 262,144
# FLOPs a cycle, but XLA (libtpu 0.0.42.1) counts 429,000 for a product of 32,768 x 32,768.
CHIPS = {
    'TPU v5 lite': Chip(flops=197e12, clock=1.5e9, link=1e11, ring=16),
    'TPU v5': Chip(flops=459e12, clock=1.75e9, link=2e11, ring=4),
    'TPU v6 lite': Chip(flops=918e12, clock=1.75e9, link=2e11, ring=16),
}
TPUS = ('v5e', 'v5p', 'v6e')  # libtpu's names
# By default libtpu looks for a TPU and admits one process; here it only compiles.
LIBTPU = {
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
}
# GPUs: {name: (JAX's kind of device, bytes of memory, bytes per second)}.
GPUS = {
    'h100': ('NVIDIA H100 80GB HBM3', 84_942_979_072, 3_350_000_000_000),
    'h200': ('NVIDIA H200', 151_397_597_184, 4_800_000_000_000),
}
GPUS_OF_A_HOST = 8
# XLA cannot try Triton's tiles on an absent GPU, and aborts if its guesses do not fit.
XLA_FLAG = '--xla_gpu_enable_triton_gemm=false'
# XLA's description of a GPU: the Hopper chip of NVIDIA's tuning guide, and its software.
HOPPER = """
platform_name: "CUDA"
device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 8 }}
gpu_device_info {{
  name: "{kind}"
  device_vendor: "NVIDIA Corporation"
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  cuda_compute_capability {{ major: 9 }}
  driver_version: "12.8.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.8.0"
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  device_address_bits: 64
}}
"""
MAX_DEVICES = 2**20  # as in mesh.*
REMEDY = 'name a slice of TPUs, such as v5e:16x16, v5p:4x4x4 or v6e:16x16, or h100:N, h200:N (8 a host) or cpu:N'


def devices_of(topology: str) -> list:
    """Return the devices that --topology names: v5e:16x16, h100:8, cpu:8, '' for the local ones."""
    if not topology:
        return local_devices()
    kind, _, size = topology.partition(':')
    num_devices = int(size) if size.isdecimal() else 0
    is_valid = kind in TPUS or (kind in ('cpu', *GPUS) and 1 <= num_devices <= MAX_DEVICES)
    if kind in GPUS and num_devices > GPUS_OF_A_HOST:
        is_valid &= num_devices % GPUS_OF_A_HOST == 0
    if not is_valid:
        raise Refused(f'--topology={topology}: {REMEDY}')
    jax.config.update('jax_platforms', 'cpu')  # JAX only compiles for the others
    if kind == 'cpu':
        jax.config.update('jax_num_cpu_devices', num_devices)
        return jax.devices()
    # JAX would cache programs of absent devices, but cannot read them.
    jax.config.update('jax_enable_compilation_cache', False)
    try:
        if kind in GPUS:
            process.set_variables({'XLA_FLAGS': f'{os.environ.get("XLA_FLAGS", "")} {XLA_FLAG}'})
            name, memory, bandwidth = GPUS[kind]
            num_hosts = max(1, num_devices // GPUS_OF_A_HOST)
            return topologies.get_topology_desc(
                platform='cuda',
                topology_name=topology,
                target_config=HOPPER.format(kind=name, memory=memory, bandwidth=bandwidth),
                topology=f'1x{num_hosts}x{num_devices // num_hosts}',
            ).devices
        process.set_variables(LIBTPU)
        return topologies.get_topology_desc(platform='tpu', topology_name=topology).devices
    except (RuntimeError, ValueError) as error:  # the plugin is missing, or does not know the slice
        raise Refused(
            f'--topology={topology}: {error}: install .[tpu] or .[cuda]: {REMEDY}'
        ) from error


def local_devices() -> list:
    """Return the local devices. Raises Refused if JAX cannot start JAX_PLATFORMS."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: cuda without its plugin
        reason = str(error).partition(' (set JAX_PLATFORMS')[0].rstrip('.')
        platforms = jax.config.jax_platforms or ''  # type: ignore[attr-defined]
        raise Refused(
            f'JAX_PLATFORMS={platforms}: JAX cannot start these ({reason or "no plugin"}): unset it, or install .[cuda] or .[tpu]'
        ) from error
