"""Commands find the programs that earlier ones compiled, in the user's cache folder."""

import json
import subprocess
import sys

import jax
import pytest
from permissions import full_disk
from runs import ENVIRONMENT, ROOT, Program, assert_same_run

# Compiles a program as a command does, and prints whether the cache had it, and its result.
COMPILE = """
import collections, json, sys
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp
from modes import compilation_cache

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: counts.update([name.rpartition('/')[2]]))
compilation_cache.MIN_COMPILE_SECONDS = 0
compilation_cache.use()
result = jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.full((4, 4), 0.3))
print(json.dumps([counts['cache_hits'], float(result)]))
"""


def start(*arguments, **environment):
    """Start Python as a user does who has set nothing of JAX's cache."""
    kept = {name: x for name, x in ENVIRONMENT.items() if 'CACHE' not in name}
    kept.pop('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', None)
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=kept | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process):
    """Return the lines of a process that ends with status 0 and without errors or warnings."""
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, ''), errors
    return output.splitlines()


def compile_once(cache, **environment):
    """Return [number of programs that the cache had, result] of COMPILE."""
    process = start('-c', COMPILE, ROOT, XDG_CACHE_HOME=str(cache), **environment)
    return json.loads(output_of(process)[-1])


def entries(cache):
    """Return {name: size} of the programs in a user's cache folder."""
    return {file.name: file.stat().st_size for file in cache.glob('*/*/*-cache')}


@pytest.mark.slow
def test_a_program_is_compiled_once_and_a_damaged_cache_is_emptied(tmp_path):
    hits, result = compile_once(tmp_path)
    assert hits == 0
    kept = entries(tmp_path)
    assert compile_once(tmp_path) == [len(kept), result]

    # A part of an entry, which a kill leaves.
    for file in tmp_path.glob('*/*/*-cache'):
        file.write_bytes(file.read_bytes()[:100])
    assert compile_once(tmp_path) == [0, result]
    assert entries(tmp_path) == kept

    # An entry without the time of its last use. JAX 0.11 lets it be; else the first program that is
    # not kept empties the cache.
    for file in tmp_path.glob('*/*/*-cache'):
        file.rename(file.with_name('other-cache'))
    compile_once(tmp_path)
    compile_once(tmp_path)
    left = entries(tmp_path)
    if jax.__version_info__ >= (0, 11):
        del left['other-cache']
    assert left == kept
    assert compile_once(tmp_path) == [len(kept), result]


@pytest.mark.slow
def test_a_folder_that_takes_no_files_is_not_used(tmp_path):
    (tmp_path / 'file').touch()
    _, result = compile_once(tmp_path / 'file')
    with full_disk(100):
        assert compile_once(tmp_path / 'full') == [0, result]
    assert not entries(tmp_path / 'full')


@pytest.mark.slow
def test_settings_of_jax_win(tmp_path):
    compile_once(tmp_path / 'a', JAX_ENABLE_COMPILATION_CACHE='false')
    compile_once(tmp_path / 'b', JAX_COMPILATION_CACHE_DIR=str(tmp_path / 'mine'))
    assert not entries(tmp_path / 'a')
    assert not (tmp_path / 'b').exists()


@pytest.mark.long
@pytest.mark.slow
def test_commands_that_share_a_cache_have_the_same_results(corpus, tmp_path):
    """Two at once that compile, and one that finds their programs."""
    program = Program(tmp_path, corpus, steps=4, log=1, save=2, evaluate=2, dropout_rate=0.1)
    folders = [tmp_path / name for name in ('first', 'second', 'warm')]
    commands = [['main.py', *program.arguments(folder)] for folder in folders]
    cache = {'XDG_CACHE_HOME': str(tmp_path / 'cache')}
    for process in [start(*command, **cache) for command in commands[:2]]:
        output_of(process)
    kept = entries(tmp_path / 'cache')
    assert any(name.startswith('jit_train_step') for name in kept)
    output_of(start(*commands[2], **cache))
    found = entries(tmp_path / 'cache')
    assert kept.items() <= found.items()
    # What takes about 0.1 s to compile may be kept only now.
    assert not any('train_step' in name for name in found.keys() - kept.keys())
    for folder in folders[1:]:
        assert_same_run(folder, folders[0], 4)
