"""How much memory a call takes at its peak, beyond what the process had."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path


def peak_growth(call: Callable[[], object]) -> int:
    """Return bytes; peaks of before do not count."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = _status("VmRSS:")
    call()
    return _status("VmHWM:") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
