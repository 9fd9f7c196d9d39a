"""Eight host devices, written-out broadcasts, and where the oracles lie."""

import os
import pathlib
import sys
import tempfile

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['XLA_FLAGS'] = ' '.join(
    [
        os.environ.get('XLA_FLAGS', ''),
        '--xla_force_host_platform_device_count=8',
        # Eight devices on two cores: a collective may wait long for its slowest member.
        '--xla_cpu_collective_call_warn_stuck_timeout_seconds=120',
        '--xla_cpu_collective_call_terminate_timeout_seconds=600',
    ]
)
# What several tests and processes compile alike is compiled once.
CACHE = pathlib.Path(tempfile.gettempdir(), f't5-haiku-tests-{os.getuid()}')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(CACHE))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')
