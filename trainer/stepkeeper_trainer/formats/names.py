"""How step directories are called."""

from __future__ import annotations

import re

_STEP_NAME = re.compile(r"step_([0-9]{8,})(?:\.([0-9a-f]{8}))?")


def step_name(step: int) -> str:
    """Return the name of the directory of a step, as long as it is not taken.

    >>> step_name(100)
    'step_00000100'
    """
    return f"step_{step:08d}"


def parse_step_name(name: str) -> int | None:
    """Return the step number of a directory name; None if it is no step directory's.

    >>> parse_step_name("step_00000100"), parse_step_name("step_00000100.0a1b2c3d")
    (100, 100)
    >>> parse_step_name(".tmp-step_00000100") is None
    True
    """
    match = _STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match else None
