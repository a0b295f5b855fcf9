"""Where a node's ranks are in their collectives.

Each is asked by a signal, and its trainer library writes a small file on a thread, which is read here.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from stepkeeper.watcher import kernel
from stepkeeper_trainer.formats import collectives
from stepkeeper_trainer.formats.plain import DecodeError

WITHIN_S = 12.0  # for one that runs and does not answer
POLL_S = 0.05
AGAIN_S = 1.0  # a signal that met another one's handler was dropped

Stamp = tuple[int, int]


def _catches(pid: int, number: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", text, re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (number - 1) & 1)


class FlightRecorderRequest:
    """One request to the ranks of a node."""

    def __init__(
        self,
        directory: Path,
        pids: Mapping[int, int],
        clock: Callable[[], float] = time.monotonic,
        *,
        within_s: float = WITHIN_S,
    ) -> None:
        """Ask every rank that can answer.

        Args:
            directory: the logs of the launch.
            pids: of each rank.
            clock: monotonic seconds.
            within_s: for those that run and do not answer.
        """
        self._clock = clock
        self._until = clock() + within_s
        self._files = {rank: collectives.file(directory, rank) for rank in pids}
        self._before = {rank: _stamp(path) for rank, path in self._files.items()}
        self._pids = {rank: pid for rank, pid in pids.items() if ask(pid, collectives.SIGNAL)}

    def take(self) -> dict[int, tuple[collectives.Place, ...]]:
        """Return what the ranks have written, and wait for the others only as long as they may still write."""
        again_at = self._clock() + AGAIN_S
        while self._clock() < self._until and (silent := [rank for rank in self._pids if self._may_write(rank)]):
            time.sleep(POLL_S)
            if self._clock() >= again_at:
                again_at = self._clock() + AGAIN_S
                for rank in silent:
                    ask(self._pids[rank], collectives.SIGNAL)
        found = {}
        for rank in self._pids:
            account = self._read(rank)
            if account is not None:
                found[rank] = tuple(collectives.trim(place) for place in account.places[: collectives.GROUPS_MAX])
        return found

    def _may_write(self, rank: int) -> bool:
        """Tell whether a rank has written nothing and can: it is neither gone nor stopped, nor stuck in the kernel."""
        return _stamp(self._files[rank]) == self._before[rank] and kernel.state_of(self._pids[rank]) in ("R", "S")

    def _read(self, rank: int) -> collectives.Account | None:
        path = self._files[rank]
        stamp = _stamp(path)
        if stamp is None or stamp == self._before[rank]:
            return None
        try:
            with path.open("rb") as file:
                data = file.read(collectives.FILE_BYTES_MAX + 1)
            account = collectives.decode_account(data)
        except (OSError, DecodeError):
            return None  # the same as a rank that does not answer: its stack is there
        return account if account.rank == rank else None


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def ask(pid: int, number: int) -> bool:
    """Send a signal to a process that handles it: it would end any other.  Return whether it was sent."""
    if not _catches(pid, number):
        return False
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True
