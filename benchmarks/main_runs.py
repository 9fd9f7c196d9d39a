"""Runs of main.py, for the benchmarks that train or fine-tune: their command and their files."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def command(config: str, workdir: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the command that runs configs/`config` in the checkout with `settings`."""
    words = [sys.executable, 'main.py', f'--config=configs/{config}', f'--workdir={workdir}']
    return words + [f'--config.{key}={value}' for key, value in settings.items()]


def finish(config: str, workdir: Path, settings: Mapping[str, Any]) -> None:
    """Run a command to its end and write its seconds to the file `seconds`. Does not repeat a finished run."""
    if (workdir / 'seconds').exists():
        return
    begin = time.monotonic()
    subprocess.run(command(config, workdir, settings), cwd=ROOT, check=True, stdout=sys.stderr)
    (workdir / 'seconds').write_text(f'{time.monotonic() - begin:.1f}')


def last_metrics(workdir: Path, name: str) -> dict[str, Any]:
    """Return the last values of an evaluation of a run. Raises ValueError if it has none."""
    lines = lines_of(workdir, name)
    if not lines:
        raise ValueError(f'{workdir} has no metrics of {name}: delete the folder and start again')
    return lines[-1]


def lines_of(workdir: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of an evaluation of a run, or of 'train'."""
    lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
    return [line for line in lines if line['run'] == name]
