"""Runs of main.py: their command and their files. The benchmarks that train or fine-tune make them."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def command(config: str, workdir: Path, settings: Mapping[str, Any]) -> list[str]:
    """Return the command that runs configs/`config` in the checkout, with some settings."""
    words = [sys.executable, 'main.py', f'--config=configs/{config}', f'--workdir={workdir}']
    return words + [f'--config.{key}={value}' for key, value in settings.items()]


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
