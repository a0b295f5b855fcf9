"""The reference script over a disk that is slow or full: `python -m tests.trainer.faulty_disk FAULT ARGS…`.

FAULT is `slow:RANK:PATTERN:SECONDS` or `full:RANK:PATTERN`: what happens when that rank syncs a file whose
path matches PATTERN.
"""

from __future__ import annotations

import errno
import os
import re
import runpy
import sys
import time

_sync = os.fsync


def install(fault: str) -> None:
    """Put a fault below every fsync of this process."""
    kind, rank, pattern, *rest = fault.split(":")
    if rank not in ("any", os.environ.get("RANK", "0")):
        return

    def faulty(descriptor: int) -> None:
        if re.search(pattern, os.readlink(f"/proc/self/fd/{descriptor}")):
            if kind == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            time.sleep(float(rest[0]))
        _sync(descriptor)

    os.fsync = faulty


if __name__ == "__main__":
    install(sys.argv[1])
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    runpy.run_module("stepkeeper_trainer.examples.train_lm", run_name="__main__")
