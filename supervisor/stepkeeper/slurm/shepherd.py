"""srun's second process, which ends a Slurm step when srun itself is killed.

Seen on Slurm 22.05: every srun forks a child that waits for its end, and has the step's tasks SIGKILLed when that end
was not in order.  When the supervisor is killed, slurmstepd kills its sruns one after the other, and whether the child
is faster decides whether watchers and ranks live: those that should save the training and the job.  So the child is
dismissed as soon as it is there; srun itself ends, and ends its tasks on SIGTERM, as before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

FOUND_WITHIN_S = 20.0
LOOK_EVERY_S = 0.05
NOISE = "write(shepherd)"  # srun's complaint at its end: no reason for anything


def dismiss(srun: int) -> bool:
    """SIGKILL the shepherd of an srun once it is there; False if none was seen in time, or srun ended."""
    give_up_at = time.monotonic() + FOUND_WITHIN_S
    while time.monotonic() < give_up_at:
        try:
            children = _children(srun)
        except OSError:
            return False  # srun is over
        for pid in children:
            with contextlib.suppress(ProcessLookupError):  # gone is what we wanted
                os.kill(pid, signal.SIGKILL)
        if children:
            return True
        time.sleep(LOOK_EVERY_S)
    return False


def _children(srun: int) -> list[int]:
    """Return the children of an srun that are an srun too (not yet: they are something else in between).

    Raises:
        OSError: there is no such process.
    """
    os.stat(f"/proc/{srun}")
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue  # ended meanwhile
        comm = stat[stat.index(b"(") + 1 : stat.rindex(b")")]
        state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
        if comm == b"srun" and int(parent) == srun and state not in b"ZX":
            found.append(int(name))
    return found
