"""Prunes, and is killed before its Nth act on the disk: `python -m tests.trainer.pruning CHECKPOINTS KEEP N`.

Prints how many acts there were where it is not killed.  Acts are the system calls that change names, and each write.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from pathlib import Path

from stepkeeper_trainer.formats import durable, verify
from stepkeeper_trainer.store.retention import Policy, empty_trash, prune

ACTS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}


class Killer:
    def __init__(self, at: int, below: str) -> None:
        self.count, self.at, self.below = 0, at, below

    def act(self) -> None:
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def hear(self, event: str, arguments: tuple[object, ...]) -> None:
        opened_new = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if event in ACTS or (opened_new and str(arguments[0]).startswith(self.below)):
            self.act()


def main(checkpoints: Path, keep: int, at: int) -> None:
    killer = Killer(at, str(checkpoints))
    sys.addaudithook(killer.hear)
    write_all, fsync = durable.write_all, os.fsync

    def write(descriptor: int, data: bytes) -> None:
        killer.act()
        half = len(data) // 2
        write_all(descriptor, data[:half])
        killer.act()  # a line that was written in part
        write_all(descriptor, data[half:])

    def sync(descriptor: int) -> None:
        killer.act()
        fsync(descriptor)

    durable.write_all, os.fsync = write, sync
    verify.SETTLED_S = math.inf  # else a machine that is slow to start this would have more acts: it remembers files
    prune(checkpoints, Policy(keep_last=keep))
    empty_trash(checkpoints)
    print(killer.count)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
