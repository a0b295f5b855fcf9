"""Trying in a child process whether something comes to an end: what a stranger wrote may take for ever, or all memory.

A pickle of 300 bytes can do that, without running anything: tuples that hold each one before them twice are hashed in
time that doubles with each, in one call that nothing interrupts.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")


def comes_to_an_end(work: Callable[[], object], *, seconds: int, bytes_more: int) -> bool:
    """Tell whether `work` ends, with whatever result or error, within so much of processor time and more memory.

    Raises:
        OSError: no process can be made.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _limit(seconds, bytes_more)
            work()
            code = 0
        except MemoryError:
            pass
        except Exception:  # noqa: BLE001 - it is an end too, and who does it again meets it
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _limit(seconds: int, bytes_more: int) -> None:
    used = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    size = int(_STATM.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    for which, wanted in ((resource.RLIMIT_CPU, used + seconds), (resource.RLIMIT_AS, size + bytes_more)):
        hard = resource.getrlimit(which)[1]
        resource.setrlimit(which, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
