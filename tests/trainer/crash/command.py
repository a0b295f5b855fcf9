"""Playing crashes or faults in a process of its own, which forks ranks from one that has torch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.trainer import warm

ROOT = Path(__file__).resolve().parents[3]


def play(module: str, directory: Path, stride: int, *words: str, limit_s: float) -> list[dict[str, Any]]:
    """Return the reports of `python -m MODULE DIRECTORY STRIDE WORDS...`, one a line."""
    path = os.pathsep.join([str(ROOT / "trainer"), str(ROOT)])
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "STEPKEEPER_", "RANK", "WORLD"))}
    done = warm.run(
        [sys.executable, "-m", module, str(directory), str(stride), *words],
        cwd=ROOT,
        env=own | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
