"""Everything that changes the process, in one file. Nothing outside modes/ changes it, and no import does.

| what | by | until |
|---|---|---|
| huge pages: the program replaces itself, once (execv, GLIBC_TUNABLES) | `restart` | its end |
| a standard stream that cannot be written becomes the null device | `writing`, `finish_streams` | its end |
| standard output escapes names that are not UTF-8 | `begin` | its end |
| JAX_ENABLE_X64, JAX_THREEFRY_GPU_KERNEL_LOWERING, EPATH_USE_TF, GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT | `begin` | its end |
| no search for cycles (gc) | `begin` | `Signals.begin_work` |
| `SIGNALS` | `Signals` | its end |
| line editing of `input` (readline) | `read_line` | its end |
| SIGPIPE | `end_with_reader` | its end |
| TF_CPP_MIN_LOG_LEVEL, if several processes run | `set_variables` | its end |
| XLA_FLAGS and libtpu's variables, for absent devices | `set_variables` | its end |
| the exit of a process that cannot continue (os._exit) | `end_now`, `ending_after`, `Signals` | |

Apart from these: run/prefetch.py changes its own worker processes, and train() in a notebook, without main.py,
listens to SIGINT while it runs. Imports no jax.
"""

import contextlib
import gc
import io
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn, TextIO

VARIABLE = 'GLIBC_TUNABLES'
SETTING = 'glibc.malloc.hugetlb=1'
# The kernel's policy: always, madvise or never.
POLICY = Path('/sys/kernel/mm/transparent_hugepage/enabled')

# Signals that ask a run to end: from a terminal, or from SLURM, SGE or LSF before a job's time is over.
SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)

# The advice after a signal, in modes that keep the finished parts of their work.
SAME_COMMAND = 'the same command continues'


def begin() -> None:
    """Configure the process for all modes."""
    os.environ['JAX_ENABLE_X64'] = '0'  # the settings have the dtypes
    # With JAX's own kernels for random numbers, GPU programs compile three times as fast.
    os.environ.setdefault('JAX_THREEFRY_GPU_KERNEL_LOWERING', 'true')
    os.environ['EPATH_USE_TF'] = 'false'  # else epath imports an installed TensorFlow
    # Without this, gcsfs looks for credentials for seconds at every call.
    os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names may not be UTF-8
        sys.stdout.reconfigure(errors='backslashreplace')
    gc.disable()  # prepared objects stay: searching them for cycles takes a tenth of the time


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables of the environment that a library reads when it is first used."""
    os.environ.update(variables)


# Huge pages on CPUs. XLA allocates the temporary arrays of each step again, and each page of 4 KiB costs a fault
# when first touched. glibc 2.35 and later use pages of 2 MiB if GLIBC_TUNABLES is set before the process starts.


def restart() -> None:
    """Start this program again in the same process, with huge pages, if the machine has them.

    Do nothing if the variable is set, to whatever value, or if Python runs another program, such as a
    debugger or a profiler, that runs this one.
    """
    if VARIABLE in os.environ or not is_supported() or not is_program(sys.orig_argv, sys.argv):
        return
    os.environ[VARIABLE] = SETTING
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def is_supported() -> bool:
    """Return whether JAX runs on CPUs here, and whether the kernel gives huge pages on request."""
    has_other_devices = find_spec('jax_plugins') or find_spec('libtpu')
    if os.environ.get('JAX_PLATFORMS', '') != 'cpu' and has_other_devices:
        return False
    try:
        return '[madvise]' in POLICY.read_text()
    except OSError:  # not Linux
        return False


def is_program(original: list[str], arguments: list[str]) -> bool:
    """Return whether the command line `original` is Python, its options, and the program with its arguments."""
    num_options = len(original) - len(arguments)
    for option in original[1:num_options]:
        if not option.startswith('-') or option.startswith('-m'):
            return False
    return original[num_options:] == arguments


# Signals and ends.


class Signals:
    """A listener for `SIGNALS`.

    `number` is the first signal, which the loop checks between two steps. A second signal ends
    the process at once, and so does the first if there is nothing to save (`can_wait` is False).
    A thread listens, because a handler in Python would have to wait for XLA, which may compile for
    minutes. SIGHUP stays ignored under nohup. The kernel repeats SIGXCPU each second: repeats do not count.
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_preparing = True  # errors come from flags, settings and inputs
        self.can_wait = False
        self.is_silent = False
        self.raises_interrupts = False
        self.advice = 'no step was taken'
        self.incoming, self.outgoing = socket.socketpair()
        self.outgoing.setblocking(False)
        signal.set_wakeup_fd(self.outgoing.fileno())
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            # Only a signal with a handler is written to the descriptor, from which `listen` reads.
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self.listen, daemon=True).start()

    def begin_work(self, can_wait: bool = False) -> None:
        """End the preparation: from now on, errors belong to the work, and cycles are searched for."""
        self.is_preparing = False
        self.can_wait = can_wait
        gc.enable()

    def raise_interrupts(self) -> None:
        """Let Ctrl-C raise KeyboardInterrupt in the main thread from now on."""
        self.raises_interrupts = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def listen(self) -> None:
        while True:
            [number] = self.incoming.recv(1)
            if number == signal.SIGINT and self.raises_interrupts:
                continue
            if number == signal.SIGXCPU and self.number:
                continue
            if not self.can_wait:
                self.end(number, self.advice)
            if self.number:
                self.end(number, 'the last checkpoint stands')
            self.number = number
            self.report('stopping after this step is saved; a second signal stops at once')

    def end(self, number: int, advice: str) -> NoReturn:
        self.report(f'stopped at once, {advice}')
        end_now(128 + number)

    def report(self, text: str) -> None:
        if not self.is_silent:
            say(text)


def end_with_reader() -> None:
    """Let `| head` end the program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def end_now(status: int, text: str = '') -> NoReturn:
    """End the process, whatever its other threads do, after a last line on standard error."""
    if text:
        say(text)
    os._exit(status)


def say(text: str) -> None:
    """Print to a terminal that may be gone."""
    with contextlib.suppress(OSError):
        print(f'main.py: {text}', file=sys.stderr, flush=True)


@contextlib.contextmanager
def ending_after(seconds: float, text: str) -> Iterator[None]:
    """End the process with status 2 and a line unless the body ends in time."""
    alarm = threading.Timer(seconds, end_now, [2, text])
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


# Standard output and error, which may not accept all output.


def check_streams() -> None:
    """End the program if a stream is closed: a file would get its descriptor, and the output of libraries."""
    if None in (sys.stdout, sys.stderr):
        sys.exit('main.py: standard output or error is closed: redirect it to /dev/null')


def read_line(prompt: str) -> str:
    """Return a line typed at a terminal, with the keys of readline. Raises EOFError at the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() uses it from then on
    return input(prompt)


@contextlib.contextmanager
def writing(file: TextIO) -> Iterator[None]:
    """Name a standard stream in the OSError of writing to it, and drop its buffer."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):  # else Python writes the buffer again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        error.filename = 'standard error' if file is sys.stderr else 'standard output'
        raise


def finish_streams() -> None:
    """Flush standard output. Drop its buffer if that fails."""
    with contextlib.suppress(OSError), writing(sys.stdout):
        sys.stdout.flush()


def print_lines(lines: Iterable[str], file: TextIO) -> None:
    """Print lines as they arrive. Raises OSError if that fails."""
    for line in lines:
        with writing(file):
            print(line, file=file, flush=True)
