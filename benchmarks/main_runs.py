"""Runs of main.py: their command, and what they leave. The benchmarks that train or fine-tune make them."""

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
    found = None
    for line in (workdir / 'metrics.jsonl').read_text().splitlines():
        values = json.loads(line)
        if values['run'] == name:
            found = values
    if found is None:
        raise ValueError(f'{workdir} has no metrics of {name}: delete the folder and start again')
    return found
