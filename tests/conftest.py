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
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import jax  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')

import functools  # noqa: E402
import json  # noqa: E402

import permissions  # noqa: E402
import pytest  # noqa: E402

import settings  # noqa: E402
import train  # noqa: E402

# The settings that a step is made of. Runs that differ in others share the compiled step.
TRACED = ('seed', 'model', 'loss', 'optimizer', 'learning_rate', 'mesh')


def traced_settings(config):
    found = json.loads(config.to_json())
    kept = {name: found[name] for name in TRACED}
    kept['rows'] = (found['train']['batch_size'], found['train']['num_microbatches'])
    kept['lengths'] = found['data']['lengths']
    return json.dumps(kept, sort_keys=True)


@pytest.fixture(scope='session', autouse=True)
def steps_are_compiled_once():
    """Tracing and compiling a step takes seconds, and most tests of a run take the same one."""
    trainers, steps = {}, {}
    make_trainer, compile_step = train.make_trainer, train.compile_step

    @functools.wraps(make_trainer)
    def make_trainer_once(config, num_microbatches=1):
        settings.check(config)
        key = (traced_settings(config), num_microbatches)
        if key not in trainers:
            trainers[key] = make_trainer(config, num_microbatches)
        return trainers[key]

    @functools.wraps(compile_step)
    def compile_step_once(config, mesh, counts, console):
        key = (traced_settings(config), mesh, tuple(counts), train.memory_limit(mesh))
        if key not in steps:
            steps[key] = compile_step(config, mesh, counts, console)
        return steps[key]

    train.make_trainer, train.compile_step = make_trainer_once, compile_step_once
    yield
    train.make_trainer, train.compile_step = make_trainer, compile_step


@pytest.fixture(params=['t5x_t5_1_1_tiny', 't5x_t5_1_0_tiny', 't5x_factored'])
def golden(request):
    """A folder of T5X's own numbers: config.json, golden.npz, checkpoint_0 and checkpoint_6."""
    shared = ROOT.parent / 'shared' / 'testdata' / 'golden'
    for folder in (ROOT / 'tests' / 'golden' / request.param, shared / request.param):
        if folder.exists():
            return folder
    pytest.skip(f'{request.param} (10 MB) is not in this checkout; optimizer_test.py has its like')


@pytest.fixture
def highest_precision():
    with jax.default_matmul_precision('highest'):
        yield


@pytest.fixture
def open_path():
    """As tmp_path, but other users may enter it."""
    with permissions.open_folder() as folder:
        yield folder
