"""main.py as a command: a server imports the program once and forks a process for every command.

Starting Python and importing JAX takes seconds, a fork milliseconds. Each command has its own
process, process group, folder, environment, standard output and exit status, as from a shell.
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from runs import ENVIRONMENT

ROOT = pathlib.Path(__file__).resolve().parents[1]
TIMEOUT = 300  # seconds, for a command or for its next line

SERVER = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
os.chdir(sys.argv[1])
# XLA reads it when it is imported; main.py sets it for several processes.
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '2'
import main, train, validation, modes.infer  # none of them starts JAX's threads


def run(command):
    os.chdir(command['cwd'])
    os.environ.update(command['environment'])
    os.setsid()
    for number, file in ((0, os.devnull), (1, command['stdout']), (2, command['stderr'])):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(file, flags), number)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)
    # The tests themselves may run below nohup.
    on_hangup = signal.SIG_IGN if command['ignores_hangup'] else signal.SIG_DFL
    signal.signal(signal.SIGHUP, on_hangup)
    sys.argv = ['main.py', *command['arguments']]  # ml_collections looks there
    return main.main(sys.argv)


for line in sys.stdin:
    command = json.loads(line)
    if 'poll' in command:
        pid, status = os.waitpid(command['poll'], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    child = os.fork()
    if child:
        print(json.dumps(child), flush=True)
        continue
    code = 70
    try:
        code = run(command)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 71
    except BaseException:
        sys.excepthook(*sys.exc_info())  # as Python does
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
"""


class Result(NamedTuple):
    status: int
    stdout: str
    stderr: str


class CommandLine:
    """Runs `python main.py ARGUMENTS` in processes forked from one that has imported it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.num_commands = 0
        self.server = subprocess.Popen(
            [sys.executable, '-c', SERVER, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT | {'PYTHONFAULTHANDLER': '1'},
        )

    def __call__(self, *arguments, cwd=ROOT, **environment) -> Result:
        """Run a command to its end."""
        return self.start(*arguments, cwd=cwd, **environment).wait()

    def start(
        self, *arguments, cwd=ROOT, stdout=None, ignores_hangup=False, **environment
    ) -> 'Process':
        """Start a command.

        `stdout`: a file, pipe or terminal to open; `ignores_hangup`: as below nohup.
        """
        self.num_commands += 1
        stdout = stdout or self.folder / f'stdout-{self.num_commands}'
        stderr = self.folder / f'stderr-{self.num_commands}'
        command = {
            'arguments': [str(argument) for argument in arguments],
            'cwd': str(cwd),
            'environment': environment,
            'stdout': str(stdout),
            'stderr': str(stderr),
            'ignores_hangup': ignores_hangup,
        }
        return Process(self, pid=self.ask(command), stdout=stdout, stderr=stderr)

    def ask(self, command: dict):
        self.server.stdin.write(json.dumps(command) + '\n')
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def close(self):
        self.server.stdin.close()
        self.server.wait()


class Process:
    """A command that runs."""

    def __init__(self, command_line, pid, stdout, stderr):
        self.command_line = command_line
        self.pid = pid
        self.stdout = pathlib.Path(stdout)
        self.stderr = pathlib.Path(stderr)
        self.status: int | None = None  # while it runs; a negative number is a signal's
        self.num_read = 0

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""
        if self.status is None:
            self.status = self.command_line.ask({'poll': self.pid})
        return self.status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def sleep_or_end(self, deadline: float) -> None:
        """Sleep for a moment. Past the deadline, end the process, which says where its threads are."""
        if time.monotonic() > deadline:
            os.killpg(self.pid, signal.SIGABRT)
            time.sleep(5)
            os.killpg(self.pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(0.003)
            raise TimeoutError(self.stderr.read_text(errors='replace'))
        time.sleep(0.003)

    def wait_until_open(self) -> None:
        """Wait until the process has opened its stdout; stderr is opened after that."""
        deadline = time.monotonic() + TIMEOUT
        while not self.stderr.exists():
            assert self.poll() is None
            self.sleep_or_end(deadline)

    def wait_for(self, pattern: str) -> str:
        """Return the first new line of stdout that begins with a regular expression."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            has_ended = self.poll() is not None
            lines = (
                self.stdout.read_text().splitlines(keepends=True) if self.stdout.exists() else []
            )
            for line in lines[self.num_read :]:
                if not line.endswith('\n'):
                    break
                self.num_read += 1
                if re.match(pattern, line):
                    return line
            if has_ended:
                raise AssertionError(self.stderr.read_text())
            self.sleep_or_end(deadline)

    def wait(self) -> Result:
        """Return the result when the process has ended."""
        deadline = time.monotonic() + TIMEOUT
        while self.poll() is None:
            self.sleep_or_end(deadline)
        stdout = ''
        if self.stdout.is_file():
            stdout = self.stdout.read_text(errors='replace')
        return Result(
            status=self.status or 0,
            stdout=stdout,
            stderr=self.stderr.read_text(errors='replace'),
        )
