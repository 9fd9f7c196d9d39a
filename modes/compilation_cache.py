"""JAX's persistent compilation cache, which keeps compiled programs for the next command."""

import contextlib
import hashlib
import os
import platform
from pathlib import Path

import jax

MAX_BYTES = 2 * 2**30  # JAX deletes the least recently used programs
MIN_COMPILE_SECONDS = 0.1  # faster compilations are not cached
CPU_FIELDS = ('model', 'flags', 'CPU', 'Features')  # lines of /proc/cpuinfo, on x86 and ARM


def use() -> None:
    """Cache compiled programs in the user's cache folder, unless JAX has another one.

    Not with several processes: they tune GPU programs together, and one that found its program in the
    cache would leave the others waiting. A folder that cannot be created is not used. JAX warns of a
    folder that cannot be written, and of an incomplete program, left by a kill: remove it.
    """
    if 'JAX_COMPILATION_CACHE_DIR' in os.environ or jax.distributed.is_initialized():
        return
    # A hash of the CPU's model and features: on another CPU, compiled code may crash.
    fields = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError):  # not Linux
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith(CPU_FIELDS):
                fields.add(line)
    cpu_hash = hashlib.sha256('\n'.join(sorted(fields)).encode()).hexdigest()[:16]
    root = Path(os.environ.get('XDG_CACHE_HOME') or '~/.cache')
    try:
        folder = root.expanduser().absolute() / 't5_in_haiku' / f'programs-{cpu_hash}'
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return
    jax.config.update('jax_compilation_cache_dir', str(folder))
    jax.config.update('jax_compilation_cache_max_size', MAX_BYTES)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', MIN_COMPILE_SECONDS)
