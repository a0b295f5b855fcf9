"""Take a lab down: processes, cgroups, directory.  Used by its guardian, and on leftovers of one that was killed."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab import processes

PARENTS = (Path("/tmp"),)
PREFIX = "stepkeeper-lab-"
KEEP_VARIABLE = "STEPKEEPER_LAB_KEEP"


def take_down(
    directory: Path, find_more: Callable[[], set[int]] = set, between: Callable[[], None] = lambda: None
) -> set[int]:
    """Kill every process of a lab, remove its cgroups and directory; return the processes that would not die."""
    facts = read(directory)
    mountpoint = Path(facts["cgroup_mountpoint"]) if facts.get("cgroup_mountpoint") else None
    nodes: list[str] = facts.get("nodes", [])
    cgroups = [path for node in nodes for path in processes.cgroups_of(mountpoint, node)]

    def find() -> set[int]:
        between()
        return find_more() | processes.pids_in(cgroups)

    left = processes.kill_all(find)
    left |= processes.kill_all(lambda: processes.by_environment(processes.LAB_VARIABLE, str(directory)), 10.0)
    between()
    processes.remove_cgroups(path for node in nodes for path in processes.cgroups_of(mountpoint, node))
    if not os.environ.get(KEEP_VARIABLE):
        shutil.rmtree(directory, ignore_errors=True)
    return left


def read(directory: Path) -> dict[str, Any]:
    """Return what `up` noted about a lab; empty where it did not come that far."""
    with contextlib.suppress(OSError, ValueError):
        noted: dict[str, Any] = json.loads((directory / "lab.json").read_text())
        return noted
    return {}


def sweep() -> list[Path]:
    """Take down labs whose guardian is dead (killed with -9, or by a crash of the machine); return them."""
    swept = []
    for parent in PARENTS:
        for directory in parent.glob(f"{PREFIX}*"):
            guardian = read(directory).get("guardian")
            if isinstance(guardian, list) and not processes.alive(*guardian):
                take_down(directory)
                swept.append(directory)
    return swept
