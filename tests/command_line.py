"""main.py as a command: a server imports the program once and forks a process for every command.

Starting Python and importing JAX takes seconds, a fork milliseconds. Each command has its own process, folder,
environment, standard output and exit status, as from a shell.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]

SERVER = """
import io, json, os, sys
sys.path.insert(0, sys.argv[1])
os.chdir(sys.argv[1])
import main, train, evaluate  # none of them starts JAX's threads
for line in sys.stdin:
    command = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(command['cwd'])
        os.environ.update(command['environment'])
        os.setsid()
        for number, file in ((0, os.devnull), (1, command['stdout']), (2, command['stderr'])):
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(file, flags), number)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)
        code = 70
        try:
            sys.argv = ['main.py', *command['arguments']]  # ml_collections looks there
            code = main.main(sys.argv)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 71
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)
"""


class Result(NamedTuple):
    status: int
    stdout: str
    stderr: str


class CommandLine:
    """Runs `python main.py ARGUMENTS` in processes forked from one that has imported it."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.server = subprocess.Popen(
            [sys.executable, '-c', SERVER, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'},
        )

    def __call__(self, *arguments, cwd=ROOT, **environment) -> Result:
        stdout = self.folder / 'stdout'
        stderr = self.folder / 'stderr'
        command = {
            'arguments': [str(argument) for argument in arguments],
            'cwd': str(cwd),
            'environment': environment,
            'stdout': str(stdout),
            'stderr': str(stderr),
        }
        self.server.stdin.write(json.dumps(command) + '\n')
        self.server.stdin.flush()
        status = json.loads(self.server.stdout.readline())
        return Result(
            status=status,
            stdout=stdout.read_text(errors='replace'),
            stderr=stderr.read_text(errors='replace'),
        )

    def close(self):
        self.server.stdin.close()
        self.server.send_signal(signal.SIGTERM)
        self.server.wait()
