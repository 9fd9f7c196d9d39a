"""Several processes of one run: they find each other, and if one is lost, the others stop.

`join` comes before anything that touches JAX's devices. JAX's heartbeat, which no Python thread sends, tells
which processes are alive; its key-value store holds the reason why a run ends. Only process 0 prints, except for
errors that it does not have.
"""

import contextlib
import glob
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from messages import Refused, first_ten
from modes import errors, process

if TYPE_CHECKING:
    from jax._src.lib import _jax

FLAGS = ('coordinator_address', 'num_processes', 'process_id', 'heartbeat')
GIVE_FLAGS = 'give --coordinator_address=HOST:PORT (of process 0) --num_processes=N --process_id=I, I from 0 to N - 1'
CONTINUES = 'all others are stopped, and the same command continues from the last checkpoint'
TICK_SECONDS = 1  # between checks of which processes are alive
SECONDS_TO_SAY = 1  # for process 0 to report an error that all processes have
GRACE_SECONDS = 5  # for the others to end by themselves after one has failed
STATUS_OF_XLA = re.compile(r'[A-Z]+(_[A-Z]+)*: ')  # how 'UNKNOWN: Gloo AllGather failed' begins
NEVER = 10**9  # milliseconds


def join(
    coordinator_address: str | None,
    num_processes: int | None,
    process_id: int | None,
    heartbeat: int,
) -> 'Group':
    """Join the other processes, if there are any.

    The flags describe them, or the launcher that started this process does: SLURM's srun, Open MPI's mpirun, a
    TPU pod, an indexed job of Kubernetes. Raises Refused for wrong flags.
    """
    cluster = None
    local_device_ids: list[int] | None = None
    if coordinator_address is not None or num_processes is not None or process_id is not None:
        check_flags(coordinator_address, num_processes, process_id)
        cluster = 'deactivate'
    elif not is_launched(os.environ):
        return Group()
    elif not shares_host(os.environ):
        local_device_ids = []  # to JAX, [] means all devices, and None one
    # XLA prints only fatal errors, unless the user sets this. It is read when JAX is imported.
    process.set_variables({'TF_CPP_MIN_LOG_LEVEL': os.environ.get('TF_CPP_MIN_LOG_LEVEL', '3')})
    import jax
    from jax._src import distributed  # its key-value store has no public name

    # `process.Signals` listens to SIGTERM.
    jax.config.update('jax_enable_preemption_service', False)
    # Otherwise JAX aborts all processes if one is lost, without naming it.
    jax.config.update('jax_enable_recoverability', True)
    seconds = 10 * heartbeat
    late = (
        f'not all processes have joined within {seconds} s: start all of them, with the same '
        '--coordinator_address and --num_processes, or give a longer --heartbeat'
    )
    with process.ending_after(seconds, late):  # JAX would abort
        try:
            jax.distributed.initialize(
                coordinator_address,
                num_processes,
                process_id,
                local_device_ids,
                cluster_detection_method=cluster,
                initialization_timeout=seconds + 60,
                heartbeat_timeout_seconds=heartbeat,
            )
        except (RuntimeError, ValueError) as error:
            raise Refused(
                f'JAX does not find the other processes ({error}): {GIVE_FLAGS}'
            ) from error
    state = distributed.global_state
    assert state.client is not None and state.num_processes is not None
    if state.num_processes == 1:
        return Group()
    return Group(state.client, state.process_id, state.num_processes, heartbeat)


def check_flags(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Raise Refused unless the three flags fit together."""
    address = f'--coordinator_address={coordinator_address}'
    port = re.fullmatch(r'.+:(\d{1,5})', coordinator_address or '')
    is_one_of = num_processes is not None and process_id is not None and process_id < num_processes
    if port is None or not 1 <= int(port[1]) < 2**16 or not is_one_of:
        raise Refused(
            f'{address} --num_processes={num_processes} --process_id={process_id}: {GIVE_FLAGS}'
        )
    if process_id == 0 and num_processes != 1:  # JAX would wait, or crash
        try:
            socket.create_server(('', int(port[1]))).close()
        except OSError as error:
            raise Refused(
                f'{address}: process 0 cannot listen there ({error.strerror}): give all a free port of this host'
            ) from error


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as one of several.

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
    # A virtual machine with TPUs: Google's metadata tell whether it is part of a slice.
    has_tpu = glob.glob('/dev/accel*') or glob.glob('/dev/vfio/[0-9]*')
    return bool(has_tpu and find_spec('libtpu') and 'TPU_SKIP_MDS_QUERY' not in environment)


def shares_host(environment: Mapping[str, str]) -> bool:
    """Return whether this process shares its visible GPUs with others: JAX gives each process one."""
    if ',' not in environment.get('CUDA_VISIBLE_DEVICES', ','):
        return False
    if 'SLURM_STEP_NUM_NODES' in environment:
        return environment['SLURM_STEP_NUM_NODES'] != environment['SLURM_STEP_NUM_TASKS']
    return int(environment.get('OMPI_COMM_WORLD_LOCAL_SIZE') or 1) > 1


class Group:
    """This process's view of the processes of a run; `client` is None if it runs alone."""

    def __init__(
        self,
        client: '_jax.DistributedRuntimeClient | None' = None,
        number: int = 0,
        num_processes: int = 1,
        heartbeat: int = 0,
    ):
        self.client = client
        self.number = number
        self.everyone = range(num_processes)
        self.heartbeat = heartbeat
        self.title = f'process {number} (pid {os.getpid()} on {socket.gethostname()})'
        self.has_ended = threading.Event()
        if client:
            client.key_value_set(f'title/{number}', self.title)
            threading.Thread(target=self._watch, args=(client,), daemon=True).start()
            threading.Thread(target=self._obey, args=(client,), daemon=True).start()

    def _watch(self, client: '_jax.DistributedRuntimeClient') -> None:
        """Announce lost processes. Each process asks: JAX answers once all live processes have asked."""
        with contextlib.suppress(RuntimeError):  # raised if this process leaves meanwhile
            while not self.has_ended.wait(TICK_SECONDS):
                for number in set(self.everyone) - client.get_live_nodes(self.everyone).keys():
                    title = client.key_value_try_get(f'title/{number}')
                    announce(client, number, f'{title} died or hangs', grace=0)

    def _obey(self, client: '_jax.DistributedRuntimeClient') -> None:
        """Wait for the first reason why the run ends, and end this process unless all are done."""
        number, reason, grace = json.loads(client.blocking_key_value_get('end', NEVER))
        if not reason or self.has_ended.wait(grace):
            return
        if 0 in (number, self.number):
            print(f'main.py: {reason}; {CONTINUES}', file=sys.stderr, flush=True)
        self._leave(1, others_end_within=TICK_SECONDS)

    def _leave(self, status: int, others_end_within: float) -> NoReturn:
        """End this process after an error, process 0 after the others: JAX aborts them without it."""
        self.has_ended.set()
        if self.number == 0:
            time.sleep(others_end_within)
        process.end_now(status)

    def check_same(self, settings: Mapping[str, object]) -> None:
        """Raise Refused in a process whose settings differ from process 0."""
        if self.client is None:
            return
        texts = {name: str(value) for name, value in settings.items()}
        if self.number == 0:
            self.client.key_value_set('settings', json.dumps(texts))
            return
        first = json.loads(self.client.blocking_key_value_get('settings', 1000 * self.heartbeat))
        different = []
        for name in sorted(texts | first):
            if texts.get(name) != first.get(name):
                different.append(f'{name}={texts.get(name)}, not {first.get(name)}')
        if different:
            raise Refused(
                f'other settings than in process 0: {first_ten(different, "; ")}: give all the same command'
            )

    def fail(self, error: BaseException, status: int) -> int:
        """Report an error, once if all processes have it, and end the others. Return `status` if there are none."""
        if self.client is None:
            errors.report(error)
            return status
        from run.agreement import ProcessFailed  # imports JAX

        # If another process is lost, let the heartbeat name it first. XLA's errors are JaxRuntimeError or, when
        # an array is fetched, ValueError.
        if STATUS_OF_XLA.match(str(error)):
            time.sleep(self.heartbeat + GRACE_SECONDS)
        text = f'{type(error).__name__}: {errors.one_line(error)}'  # an assert has no message
        if self.number == 0:
            self.client.key_value_set('error', text)
            errors.report(error)
        else:
            first_text = ''
            with contextlib.suppress(RuntimeError):  # process 0 has none
                first_text = self.client.blocking_key_value_get('error', 1000 * SECONDS_TO_SAY)
            if text != first_text and not isinstance(error, ProcessFailed):
                errors.report(error, of=self.title)
        process.finish_streams()
        self.has_ended.set()
        reason = f'{self.title} ended with status {status}'
        announce(self.client, self.number, reason, GRACE_SECONDS)
        self._leave(status, others_end_within=GRACE_SECONDS + TICK_SECONDS)

    def end(self, status: int) -> int:
        """Wait until all processes have done their work. Return `status`."""
        if self.client is None:
            return status
        import jax

        process.finish_streams()
        self.client.wait_at_barrier('done', NEVER)
        announce(self.client, self.number, reason='', grace=0)
        self.has_ended.set()
        if self.number > 0:
            jax.distributed.shutdown()
        else:  # without process 0, JAX aborts the processes that are still connected
            while len(self.client.get_live_nodes(self.everyone)) > 1:
                time.sleep(0.1)
            time.sleep(TICK_SECONDS)  # until the last to leave no longer ask for process 0
        return status


def announce(
    client: '_jax.DistributedRuntimeClient', number: int, reason: str, grace: float
) -> None:
    """Tell all processes why the run ends, '' if all are done. Only the first reason counts."""
    with contextlib.suppress(RuntimeError):  # there is a reason already
        client.key_value_set('end', json.dumps([number, reason, grace]))
