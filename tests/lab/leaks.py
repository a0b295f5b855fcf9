"""What this process's labs left behind, by the ids recorded when they started."""

import os
import time

from tests.lab import cluster, processes, teardown

SETTLE_S = 60.0
"""A child that has been told to end may take this long."""


def leftovers() -> list[str]:
    """Return a line for each daemon, child process and lab directory of ours that is still there."""
    until = time.monotonic() + SETTLE_S
    while (found := _now()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _now() -> list[str]:
    found = [
        f"daemon {pid}: {processes.title(pid)}" for pid, started in cluster.recorded if processes.alive(pid, started)
    ]
    children = processes.descendants(os.getpid())
    found += [f"child {pid}: {processes.title(pid)}" for pid in children if pid not in dict(cluster.recorded)]
    ours = {pid for pid, _ in cluster.recorded}
    for parent in teardown.PARENTS:
        for directory in parent.glob(f"{teardown.PREFIX}*"):
            guardian = teardown.read(directory).get("guardian")
            if guardian and guardian[0] in ours:
                found.append(f"directory {directory}")
    return found
