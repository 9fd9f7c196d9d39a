"""Plans for TPUs and GPUs that need not be here: rewrites the figures of benchmarks/plans.csv.

    pip install -e '.[tpu,cuda]'
    python benchmarks/plans.py [--only=REGEX] [--file=benchmarks/plans.csv]

The first four columns of a row say what is planned:

    config                   a file in configs/, such as t5_1_1.py:xl
    topology                 as --topology takes it: v5e:16x16, v5p:4x4x4, h100:8
    settings                 of the config, separated by spaces: mesh.fsdp=-1 model.remat=full
    asynchronous_gradients   yes: LIBTPU_INIT_ARGS is ASYNCHRONOUS; no: it is empty

For a new plan, add a row with these alone. Each plan runs in a new process

    python main.py --mode=plan --config=configs/CONFIG --topology=TOPOLOGY --config.SETTING ...

and its figures replace the other columns: GiB of a device and the limit, microbatches, GB that each
device exchanges and the share of it that is asynchronous; on TPUs the estimated seconds of a step, its
MFU and the seconds of collectives that nothing hides; GiB for decoding; CPU seconds and GB of memory
that the plan itself took; versions, host and date. A row whose plan fails keeps its figures.

--only selects the rows whose config, topology and settings, joined by spaces, contain the regular
expression. Each row is written as soon as it is planned. A row takes 1 to 13 CPU minutes and up to
10 GB; all of them take hours.
"""

import csv
import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

ROOT = Path(__file__).resolve().parents[1]
ASYNCHRONOUS = (
    '--xla_enable_async_all_reduce=true '
    '--xla_tpu_enable_async_collective_fusion_fuse_all_reduce=true'
)
# The figures of a plan, in the order in which main.py prints them.
FIGURES = (
    r'Fits: yes, in (?P<microbatches>\d+) microbatch\(es\): (?P<gib>[\d.]+) of (?P<of_gib>[\d.]+) GiB',
    r'Estimate: (?P<step_seconds>\S+) s a step, MFU (?P<mfu>[\d.]+)\..*; '
    r'(?P<exposed_seconds>\S+) s of collectives that nothing hides',
    r'Decoding .*: (?P<decoding_gib>[\d.]+) of ',
)
COLLECTIVE = re.compile(r'^  [a-z-]+ .* ([\d,.]+) +[\d,.]+  (\d+)%$', re.MULTILINE)

FLAGS = flags.FLAGS
flags.DEFINE_string('only', '', 'Regular expression of the rows that are planned.')
flags.DEFINE_string('file', str(ROOT / 'benchmarks' / 'plans.csv'), 'The table.')

Row = dict[str, str]  # {column: cell}


class Done(NamedTuple):
    """A process that has ended."""

    status: int
    output: str  # stdout and stderr
    cpu_seconds: float
    peak_bytes: int


def main(argv: list[str]) -> int:
    path = Path(FLAGS.file)
    rows = read(path)
    num_failed = 0
    for row in rows:
        name = f'{row["config"]} {row["topology"]} {row["settings"]}'
        if not re.search(FLAGS.only, name):
            continue
        print(name, flush=True)
        done = plan(row)
        if done.status:
            num_failed += 1
            print(f'  not planned: {done.output[-300:].strip()}', flush=True)
            continue
        figures = figures_of(done.output)
        row.update(figures | conditions_of(row, done))
        write(path, rows)
        print(f'  {", ".join(f"{key} {value}" for key, value in figures.items())}', flush=True)
    return 1 if num_failed else 0


def read(path: Path) -> list[Row]:
    with path.open(newline='') as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Row]) -> None:
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, rows[0], lineterminator='\n')
        writer.writeheader()
        writer.writerows(rows)


def command_of(row: Mapping[str, str]) -> list[str]:
    """Return the command that plans a row."""
    command = [sys.executable, 'main.py', '--mode=plan', f'--config=configs/{row["config"]}']
    command.append(f'--topology={row["topology"]}')
    return command + [f'--config.{setting}' for setting in row['settings'].split()]


def plan(row: Mapping[str, str]) -> Done:
    """Plan a row in a new process."""
    is_asynchronous = row['asynchronous_gradients'] == 'yes'
    environment = os.environ | {
        'LIBTPU_INIT_ARGS': ASYNCHRONOUS if is_asynchronous else '',
        'JAX_ENABLE_COMPILATION_CACHE': 'false',
    }
    process = subprocess.Popen(
        command_of(row),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Done(
        status=process.returncode,
        output=output,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
    )


def figures_of(output: str) -> Row:
    """Return the figures that a plan prints; those that it does not print are ''."""
    figures: Row = {}
    for pattern in FIGURES:
        found = re.search(pattern, output)
        names = re.compile(pattern).groupindex
        figures.update(found.groupdict() if found else dict.fromkeys(names, ''))
    total = 0.0
    hidden = 0.0
    for megabytes, percent in COLLECTIVE.findall(output):
        moved = float(megabytes.replace(',', ''))
        total += moved
        hidden += moved * int(percent) / 100
    figures['exchanged_gb'] = f'{total / 1000:.3g}'
    figures['asynchronous_share'] = f'{hidden / total:.2f}' if total else ''
    return figures


def conditions_of(row: Mapping[str, str], done: Done) -> Row:
    """Return what a plan took, with which versions, where and when."""
    compilers = {'h': ('jax-cuda13-plugin', 'jax-cuda12-plugin'), 'v': ('libtpu',)}
    installed = {x.name: x.version for x in metadata.distributions()}
    names = [x for x in compilers.get(row['topology'][0], ()) if x in installed]
    return {
        'cpu_seconds': f'{done.cpu_seconds:.0f}',
        'peak_gb': f'{done.peak_bytes / 1e9:.1f}',
        'jax': installed['jax'],
        'compiler': f'{names[0]} {installed[names[0]]}' if names else '',
        'host': f'{cpu_name()}, {len(os.sched_getaffinity(0))} cores',
        'date': datetime.date.today().isoformat(),
    }


def cpu_name() -> str:
    """Return the name of this CPU, as Linux knows it."""
    try:
        found = re.search(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())
    except OSError:
        found = None
    return found[1] if found else platform.machine()


if __name__ == '__main__':
    app.run(main)
