"""The environment of the tests (eight host devices, explicit broadcasts) and their fixtures."""

import fcntl
import functools
import gc
import json
import os
import pathlib
import sys
import tempfile
from importlib.metadata import version

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ['HF_ENDPOINT'] = 'http://127.0.0.1:9'  # no test asks the real hub
os.environ['XLA_FLAGS'] = ' '.join(
    [
        # Compiling takes most of the time of the tests: this makes it three times as fast.
        '--xla_backend_optimization_level=0',
        # JAX 0.11.2 has nothing else, and no flag for it.
        '--xla_cpu_use_fusion_emitters=false' if version('jax') < '0.11' else '',
        '--xla_cpu_parallel_codegen_split_count=1',
        # Eight devices on two cores: a collective may wait long for its slowest device.
        '--xla_cpu_collective_call_warn_stuck_timeout_seconds=120',
        '--xla_cpu_collective_call_terminate_timeout_seconds=600',
        os.environ.get('XLA_FLAGS', ''),  # the last of two equal flags counts
        '--xla_force_host_platform_device_count=8',
    ]
)
# Programs that several tests and processes share are compiled once.
CACHE = pathlib.Path(tempfile.gettempdir(), f't5-haiku-tests-{os.getuid()}')
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(CACHE))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import jax  # noqa: E402

jax.config.update('jax_numpy_rank_promotion', 'raise')

import command_line as command_lines  # noqa: E402
import corpora  # noqa: E402
import permissions  # noqa: E402
import pytest  # noqa: E402
import questions  # noqa: E402
import runs  # noqa: E402
from bucket_store import scheme, store  # noqa: E402, F401
from hub_server import home, hub  # noqa: E402, F401

import sources.open  # noqa: E402
import sources.pydoc  # noqa: E402
import train  # noqa: E402
import validation  # noqa: E402
import vocabulary as vocabularies  # noqa: E402
from run.train_vocabulary import train_vocabulary  # noqa: E402


def pytest_collection_finish(session):
    """Spare Python's garbage collection what is there for the whole session: a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 50)


def pytest_collection_modifyitems(items):
    """Begin with the tests that take minutes, so that the other worker is not idle at the end.

    Then come the files that train runs.small_config: one worker compiles it, for all of them.
    """

    def order(item):
        slow = item.get_closest_marker('slow')
        takes_minutes = slow is not None and slow.kwargs.get('takes_minutes', False)
        return not takes_minutes, not hasattr(item.module, 'small_config')

    items.sort(key=order)


@pytest.fixture(scope='session', autouse=True)
def shared_programs():
    """Runs with equal settings share their compiled programs."""
    for module, name in (
        (train, 'compile_init'),
        (train, 'jit_step'),
        (train, 'compile_step'),
        (validation, 'make_sums'),
    ):
        setattr(module, name, functools.lru_cache(maxsize=16)(getattr(module, name)))


@pytest.fixture(scope='session')
def make_once(tmp_path_factory):
    """A function (name, make) -> folder, which `make(folder)` fills for all workers of pytest-xdist."""
    root = tmp_path_factory.getbasetemp()
    if 'PYTEST_XDIST_WORKER' in os.environ:
        root = root.parent

    def make_once(name, make):
        folder = root / name
        with (root / f'{name}.lock').open('w') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                folder.mkdir()
                make(folder)
        return folder

    return make_once


@pytest.fixture(scope='session')
def corpus(make_once):
    """A file of 400 lines of invented words, a few thousand tokens."""
    return str(make_once('corpus', runs.write_corpus) / 'made_up.txt')


@pytest.fixture(scope='session')
def uninterrupted(corpus, make_once):
    """The workdir of a finished run of runs.small_config: 6 steps, checkpoints 3 and 6.

    Tests only read it.
    """
    return make_once('uninterrupted', lambda folder: runs.run(runs.small_config(corpus), folder))


@pytest.fixture(scope='session')
def evaluated(make_once):
    """A folder with the task and, in `run`, a finished run with task metrics of steps 3 and 6."""

    def make(folder):
        questions.write_task(folder)
        runs.run(questions.make_config(folder), folder / 'run')

    return make_once('evaluated', make)


@pytest.fixture(scope='session')
def command_line(tmp_path_factory):
    """A function that runs main.py in a process of its own and returns its status and output."""
    command = command_lines.CommandLine(tmp_path_factory.mktemp('command'))
    yield command
    command.close()


FACTORED = pytest.param('t5x_factored', marks=pytest.mark.slow)


@pytest.fixture(params=['t5x_t5_1_1_tiny', 't5x_t5_1_0_tiny', FACTORED])
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
    """A new folder like tmp_path that other users may enter."""
    with permissions.open_folder() as folder:
        yield folder


@pytest.fixture(scope='session')
def pydoc_documents(make_once):
    """[name, text] of this Python's documentation: reading it takes seconds."""

    def write_documents(folder):
        (folder / 'documents.json').write_text(json.dumps(sources.pydoc.documents()))

    return json.loads((make_once('pydoc', write_documents) / 'documents.json').read_text())


@pytest.fixture(scope='session')
def pydoc(pydoc_documents):
    """This Python's documentation as a source."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources.pydoc, 'documents', lambda: pydoc_documents)
        return sources.open.open_source(corpora.make_config())


@pytest.fixture(scope='session')
def pydoc_model(pydoc, make_once):
    """A SentencePiece model of 1,000 pieces, trained on a part of it."""

    def write_model(folder):
        texts = [text for _, text in corpora.documents_of(pydoc)[::10]]
        (folder / 'pydoc.model').write_bytes(train_vocabulary(texts, 1000))

    return (make_once('pydoc_model', write_model) / 'pydoc.model').read_bytes()


@pytest.fixture(scope='session')
def vocabulary(pydoc_model):
    return vocabularies.SentencePieceVocabulary(pydoc_model)
