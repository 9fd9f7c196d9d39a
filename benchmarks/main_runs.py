"""Runs of main.py: their command and their files. The benchmarks that train or fine-tune make them."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def command(config: str, workdir: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the command that runs configs/`config` in the checkout, with some settings."""
    words = [sys.executable, 'main.py', f'--config=configs/{config}', f'--workdir={workdir}']
    return words + [f'--config.{key}={value}' for key, value in settings.items()]


def finish(config: str, workdir: Path, settings: Mapping[str, Any]) -> None:
    """Run a command to its end and write its seconds into the file `seconds`. A finished run is not repeated."""
    if (workdir / 'seconds').exists():
        return
    begin = time.monotonic()
    subprocess.run(command(config, workdir, settings), cwd=ROOT, check=True, stdout=sys.stderr)
    (workdir / 'seconds').write_text(f'{time.monotonic() - begin:.1f}')


def last_metrics(workdir: Path, name: str) -> dict[str, Any]:
    """Return the last values that a run has of an evaluation. Raises ValueError if it has none."""
    lines = lines_of(workdir, name)
    if not lines:
        raise ValueError(f'{workdir} has no metrics of {name}: delete the folder and start again')
    return lines[-1]


def lines_of(workdir: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines that a run has of an evaluation, or of 'train'."""
    lines = map(json.loads, (workdir / 'metrics.jsonl').read_text().splitlines())
    return [line for line in lines if line['run'] == name]
