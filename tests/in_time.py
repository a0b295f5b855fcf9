"""`python3 -m tests.in_time UNTIL MINUTES NAME COMMAND...`: a part of a run of CI, which ends in time.

UNTIL: when the whole run has to end, in seconds since 1970.  Says how long the part took.  A part that is not done in
time is interrupted, as by Ctrl-C, so that its tests clear up; what is left of it after `GRACE_S` is killed: its group
and whatever has left it.  The exit code is the command's, or 124.  It needs Python 3.11 alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

GRACE_S = 45.0
REAP_EVERY_S = 0.02
LATE = 124
"""As of coreutils' timeout."""
_PR_SET_CHILD_SUBREAPER = 36


def main(until: float, minutes: float, name: str, command: list[str]) -> int:
    """Run the command; return its exit code, or 124."""
    signal.signal(signal.SIGTERM, _end)
    # who leaves the group, as daemons do, becomes our child when its parent has ended
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.monotonic()
    limit_s = max(0.0, min(60.0 * minutes, until - time.time()))
    _say(f"{name} begins, and has {limit_s / 60:.1f} minutes")
    # a shell's background commands ignore SIGINT
    part = subprocess.Popen(command, process_group=0, preexec_fn=_default_interrupt)  # noqa: PLW1509 - no thread here
    try:
        code = _wait(part.pid, limit_s)
        if code is None:
            _say(f"{name} RAN OUT OF TIME after {limit_s / 60:.1f} minutes: its processes are ended")
            os.killpg(part.pid, signal.SIGINT)  # its pid is taken until it is waited for
            _wait(part.pid, GRACE_S)
            code = LATE
    finally:
        left = _kill_all()
        part.returncode = 0  # nobody waits for it any more
    if left:
        _say(f"{name} left behind, killed now: {', '.join(left)}")
    _say(f"{name} took {time.monotonic() - began:.0f} s, exit code {code}")
    return code


def _wait(wanted: int, within_s: float) -> int | None:
    """Return the exit code of one child, None where it has not ended in time.

    Others that end meanwhile are reaped, as init would have done: who looks for them must find them gone, not zombies.
    """
    until = time.monotonic() + within_s
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == wanted:
            return os.waitstatus_to_exitcode(status)
        if not ended:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(REAP_EVERY_S, left_s))


def _say(what: str) -> None:
    sys.stderr.write(f"=== {time.strftime('%H:%M:%S')} {what}\n")
    sys.stderr.flush()


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _kill_all() -> list[str]:
    """Kill whatever descends from us, until nothing does or the kernel does not let it go; return the commands."""
    found: dict[int, str] = {}
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    until = time.monotonic() + GRACE_S
    while (children := [int(pid) for pid in own.read_text().split()]) and time.monotonic() < until:
        for pid in children:
            with contextlib.suppress(OSError):  # ended meanwhile
                name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if name:  # a zombie has none
                    found[pid] = f"{name[:80]} ({pid})"
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    return list(found.values())


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:]))
