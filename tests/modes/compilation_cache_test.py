"""Commands find the programs that earlier ones compiled, in the user's cache folder."""

import json
import subprocess
import sys

import pytest
from runs import ENVIRONMENT, ROOT

# Compiles a program as a command does, and prints whether the cache had it, and its result.
COMPILE = """
import collections, json, sys
import jax, jax.numpy as jnp
from modes import compilation_cache

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name.rpartition('/')[2]]))
compilation_cache.MIN_COMPILE_SECONDS = 0
compilation_cache.use()
result = jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.full((4, 4), 0.3))
print(json.dumps([counts['cache_hits'], float(result)]))
"""


def compile_once(cache, **environment):
    """Return [number of programs that the cache had, result] of COMPILE, for a user without JAX's settings."""
    kept = {name: x for name, x in ENVIRONMENT.items() if 'CACHE' not in name}
    kept |= {'XDG_CACHE_HOME': str(cache)} | environment
    command = [sys.executable, '-c', COMPILE]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, '')
    return json.loads(done.stdout.splitlines()[-1])


def entries(cache):
    """Return {name: size} of the programs in a user's cache folder."""
    return {file.name: file.stat().st_size for file in cache.glob('*/*/*-cache')}


@pytest.mark.slow
def test_a_program_is_compiled_once(tmp_path):
    hits, result = compile_once(tmp_path)
    assert hits == 0
    kept = entries(tmp_path)
    assert compile_once(tmp_path) == [len(kept), result]


@pytest.mark.slow
def test_other_folders(tmp_path):
    """One that cannot be made is not used; JAX's own setting has precedence."""
    (tmp_path / 'file').touch()
    compile_once(tmp_path / 'file')
    compile_once(tmp_path / 'ours', JAX_COMPILATION_CACHE_DIR=str(tmp_path / 'mine'))
    assert not (tmp_path / 'ours').exists()
