"""Shared by the benchmarks: contenders that take turns, each in a new process, and rows of a table."""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

NUM_CALLS = 5  # timed by `fastest_seconds`


def print_conditions(*packages: str) -> list[str]:
    """Print versions, cores and load. Return the packages that are not installed."""
    versions = []
    missing = []
    for name in packages:
        try:
            versions.append(f'{name} {version(name)}')
        except PackageNotFoundError:
            missing.append(name)
    cores = f'{len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}'
    print(f'{", ".join(versions)}; {cores}', flush=True)
    if missing:
        names = ', '.join(missing)
        print(f'Not installed: {names}. The docstring of the script has the commands.')
    return missing


def output_of(
    python: str, file: str, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> Any:
    """Run a program of this folder with the Python `python`; return the JSON that it prints last."""
    done = subprocess.run(
        [python, Path(__file__).with_name(file), json.dumps(arguments)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    return json.loads(done.stdout.splitlines()[-1])


def in_new_process(function: Callable, *arguments: Any) -> Any:
    """Return function(*arguments), computed by a new process, which prints to stderr only."""
    context = get_context('spawn')
    with futures.ProcessPoolExecutor(1, context, initializer=os.dup2, initargs=(2, 1)) as pool:
        return pool.submit(function, *arguments).result()


def take_turns(
    contenders: Mapping[str, Callable], num_rounds: int, *arguments: Any
) -> dict[str, list[Any]]:
    """Return the results of each contender, one per round. Each measurement gets a new process."""
    measurements: dict[str, list[Any]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name, measure in contenders.items():
            measurements[name].append(in_new_process(measure, *arguments))
    return measurements


def print_header(*titles: str) -> None:
    print_row(*titles)
    print_row(*['---'] * len(titles))


def print_row(*cells: str) -> None:
    """Print a row of a Markdown table."""
    print(f'| {" | ".join(cells)} |', flush=True)


def spread(values: Sequence[float]) -> str:
    """Return the median of some values and their range."""
    return f'{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})'


def fastest_seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of some calls, after one that is not counted."""
    call()
    seconds = []
    for _ in range(NUM_CALLS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
