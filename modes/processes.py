"""Several processes of one run: they find each other, and where one is lost, the others stop.

`start` comes before anything that touches JAX's devices. `fail` and `end` say how a process ends; for
one that is alone they do nothing more. Process 0 alone prints, but for errors that only others have.
"""

import contextlib
import ctypes
import glob
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NoReturn

from messages import first_ten
from modes import errors, streams, watcher

FLAGS = ('coordinator_address', 'num_processes', 'process_id', 'heartbeat')
GIVE_FLAGS = (
    'give --coordinator_address=HOST:PORT --num_processes=N --process_id=I, I from 0 to N - 1'
)
SECONDS_TO_SAY = 1  # in which process 0 reports an error that all processes have


def start(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    heartbeat: int,
) -> int:
    """Join the other processes, if there are any. Return the number of this one.

    The flags tell how, or the launcher that started it: SLURM's srun, Open MPI's mpirun, a TPU pod, an
    indexed job of Kubernetes. Raises ValueError for wrong flags.
    """
    global _group
    options: dict[str, Any] = {
        'coordinator_address': coordinator_address,
        'num_processes': num_processes,
        'process_id': process_id,
    }
    if any(value is not None for value in options.values()):
        check_flags(**options)
        options['cluster_detection_method'] = 'deactivate'
    elif not is_launched(os.environ):
        return 0
    elif not shares_host(os.environ):
        options['local_device_ids'] = []  # JAX takes that for all, and None for one
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')  # before JAX is imported
    import jax
    from jax._src import distributed  # its key-value store has no public name

    jax.config.update('jax_enable_preemption_service', False)  # signals.py listens to SIGTERM
    # JAX aborts a process that misses others, and its limits come after ours, but for process 0, which it
    # misses at once. So the handler of SIGABRT is the C library's sleep: it is given the signal's number, 6, and
    # the watcher has six seconds to report first.
    libc = ctypes.CDLL(None)
    libc.signal(signal.SIGABRT, libc.sleep)
    seconds = 10 * heartbeat
    late = (
        f'not all processes have met within {seconds} s: start all of them, with the same '
        '--coordinator_address and --num_processes, or give a longer --heartbeat'
    )
    alarm = threading.Timer(seconds, end_early, [late])
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            **options,
            initialization_timeout=seconds + 60,
            heartbeat_timeout_seconds=seconds,
            shutdown_timeout_seconds=24 * 3600,
        )
    except (RuntimeError, ValueError) as error:
        raise ValueError(f'JAX does not find the other processes ({error}): {GIVE_FLAGS}') from None
    finally:
        alarm.cancel()
    state = distributed.global_state
    if state.num_processes > 1:
        _group = Group(state, heartbeat)
        sys.excepthook = _group.crash
    return state.process_id


def check_flags(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Raise ValueError unless the three flags fit together."""
    if coordinator_address is None or num_processes is None or process_id is None:
        raise ValueError(
            f'--coordinator_address={coordinator_address}, --num_processes={num_processes}, '
            f'--process_id={process_id}: {GIVE_FLAGS}'
        )
    port = re.fullmatch(r'.+:(\d{1,5})', coordinator_address)
    if not port or not 1 <= int(port[1]) < 2**16:
        raise ValueError(
            f'--coordinator_address={coordinator_address}: give the host of process 0 and a free port, HOST:PORT'
        )
    if process_id >= num_processes:
        raise ValueError(
            f'--process_id={process_id}: must be from 0 to {num_processes - 1}, below --num_processes'
        )
    if process_id == 0 and num_processes > 1:  # JAX would wait, or crash
        try:
            socket.create_server(('', int(port[1]))).close()
        except OSError as error:
            raise ValueError(
                f'--coordinator_address={coordinator_address}: process 0 cannot listen there '
                f'({error.strerror}): give a free port of this host to all processes of the run'
            ) from error


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process beside others.

    The script of sbatch is one process, and so are an interactive step and a pod without an index.
    """
    for name in ('SLURM_STEP_NUM_TASKS', 'OMPI_COMM_WORLD_SIZE', 'MEGASCALE_NUM_SLICES'):
        if int(environment.get(name) or 1) > 1:
            return True
    if 'JOB_COMPLETION_INDEX' in environment and find_spec('kubernetes'):
        return True
    hosts = environment.get('TPU_PROCESS_ADDRESSES') or environment.get('TPU_WORKER_HOSTNAMES')
    if hosts is not None:
        return ',' in hosts
    # A virtual machine with TPUs: Google's metadata tell whether it is a part of a slice.
    has_tpu = glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*')
    return bool(has_tpu and find_spec('libtpu') and 'TPU_SKIP_MDS_QUERY' not in environment)


def shares_host(environment: Mapping[str, str]) -> bool:
    """Return whether this process shares the GPUs that it sees with others: JAX gives each of them one."""
    if ',' not in environment.get('CUDA_VISIBLE_DEVICES', ','):
        return False
    if 'SLURM_STEP_NUM_NODES' in environment:
        return environment['SLURM_STEP_NUM_NODES'] != environment['SLURM_STEP_NUM_TASKS']
    return int(environment.get('OMPI_COMM_WORLD_LOCAL_SIZE') or 1) > 1


def end_early(text: str) -> NoReturn:
    """End a process that has not joined the others."""
    print(f'main.py: {text}', file=sys.stderr, flush=True)
    os._exit(2)


class Group:
    """The processes of a run, as one of them knows them."""

    def __init__(self, state: Any, heartbeat: int):
        """Start the watcher of this process. `state`: JAX's, of the processes that it has joined."""
        self.number = state.process_id
        self.store = state.client
        self.heartbeat = heartbeat
        self.status = 1  # with which the process ends when its watcher does
        title = f'process {self.number} (pid {os.getpid()} on {socket.gethostname()})'
        self.title = title
        if self.number == 0:
            has_both = socket.has_dualstack_ipv6()
            channel = socket.create_server(
                address=('', 0),
                family=socket.AF_INET6 if has_both else socket.AF_INET,
                backlog=state.num_processes,
                dualstack_ipv6=has_both,
            )
            port = channel.getsockname()[1]
            token = secrets.token_hex()
            self.store.key_value_set('watcher', json.dumps([port, token, title]))
            first_title = title
        else:
            answer = self.store.blocking_key_value_get('watcher', 1000 * heartbeat)
            port, token, first_title = json.loads(answer)
            host = state.coordinator_address.rpartition(':')[0].strip('[]')
            try:
                channel = socket.create_connection((host, port), timeout=heartbeat)
            except OSError as error:
                end_early(
                    f'{title} cannot reach port {port} of {host} ({error}): open the ports between the hosts'
                )
            channel.sendall(watcher.hello(token, self.number, title))
        log = tempfile.TemporaryFile()
        settings = {
            'process': self.number,
            'num_processes': state.num_processes,
            'titles': [title, first_title],
            'heartbeat': heartbeat,
            'token': token,
            'pid': os.getpid(),
            'channel': channel.fileno(),
            'log': log.fileno(),
        }
        self.watcher = subprocess.Popen(
            [sys.executable, '-I', '-S', watcher.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[channel.fileno(), log.fileno()],
            start_new_session=True,
            text=True,
        )
        channel.close()
        self.tell(json.dumps(settings))
        assert self.watcher.stdout
        self.watcher.stdout.readline()  # all are watched
        self.thread = threading.Thread(target=self.end_with_watcher, daemon=True)
        self.thread.start()
        # What XLA's libraries print, they print to the descriptors 1 and 2.
        if self.number == 0:
            sys.stdout = os.fdopen(os.dup(1), 'w', buffering=1, errors='backslashreplace')
        sys.stderr = os.fdopen(os.dup(2), 'w', buffering=1, errors='backslashreplace')
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(log.fileno(), 2)

    def tell(self, text: str) -> None:
        """Say something to the watcher, which may be gone."""
        assert self.watcher.stdin
        with contextlib.suppress(OSError):
            print(text, file=self.watcher.stdin, flush=True)

    def end_with_watcher(self) -> None:
        """Wait for the watcher to end, and end this process."""
        assert self.watcher.stdout
        self.watcher.stdout.read()
        os._exit(self.status)

    def check_same(self, settings: dict[str, str]) -> None:
        if self.number == 0:
            self.store.key_value_set('settings', json.dumps(settings))
            return
        answer = self.store.blocking_key_value_get('settings', 1000 * self.heartbeat)
        first = json.loads(answer)
        names = sorted(settings.keys() | first.keys())
        different = [name for name in names if settings.get(name) != first.get(name)]
        if different:
            found = [f'{name}={settings.get(name)}, not {first.get(name)}' for name in different]
            raise ValueError(
                f'other settings than in process 0: {first_ten(found, separator="; ")}: start all '
                'processes with the same command and the same configs'
            )

    def fail(self, error: BaseException, status: int) -> None:
        """Report an error, and end the process when the others know."""
        from partition import ProcessFailed  # imports JAX

        text = errors.one_line(error)
        if self.number == 0:
            self.store.key_value_set('error', text)
            errors.report(error)
        elif text != self.error_of_first() and not isinstance(error, ProcessFailed):
            errors.report(error, of=self.title)
        self.end(status)

    def error_of_first(self) -> str:
        """Return the error that process 0 reports, '' if it has none."""
        try:
            return self.store.blocking_key_value_get('error', 1000 * SECONDS_TO_SAY)
        except RuntimeError:
            return ''

    def crash(self, kind: Any, error: BaseException, trace: Any) -> None:
        """End the process after an error that nobody expects.

        Where another process is lost, XLA may fail here before this watcher hears of it.
        """
        if kind.__name__ == 'JaxRuntimeError':
            time.sleep(2 * watcher.GRACE_SECONDS)
        traceback.print_exception(kind, error, trace)
        self.end(1)

    def end(self, status: int) -> None:
        streams.finish()
        if status in (1, 2):  # the others cannot go on: JAX would wait for them at its end
            self.status = status
            self.tell(f'ended with status {status}')
            self.thread.join()
        self.tell(watcher.DONE)


_group: Group | None = None


def fail(error: BaseException, status: int) -> int:
    """Report an error, which ends the process with `status`."""
    if _group:
        _group.fail(error, status)  # does not return: the process ends with its watcher
    errors.report(error)
    return status


def check_same(settings: Mapping[str, Any]) -> None:
    """Raise ValueError in a process whose settings are not those of process 0."""
    if _group:
        _group.check_same({name: str(value) for name, value in settings.items()})


def end(status: int) -> int:
    """Tell the others that this process ends as it should, with `status`."""
    if _group:
        _group.end(status)
    return status
