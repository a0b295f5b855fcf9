"""The steps that a script without the trainer library prints, as its framework prints them.

Where a launch is between two checkpoints, and whether it goes on, nothing else shows.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from stepkeeper.core import events as on
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper_trainer.formats.plain import open_descriptor

LOOK_EVERY_S = 2.0
BYTES_MAX = 1024 * 1024  # of a file at one look; what is older of it says no more than what is newer
LINE_BYTES_MAX = 4096
DIGITS_MAX = 18
_ENDS = re.compile(rb"[\r\n]")  # a progress bar writes its line anew


class Prints:
    """What the ranks of some nodes print."""

    def __init__(self, paths: Sequence[Path], pattern: str) -> None:
        """Read nothing yet.

        Args:
            paths: one a node; rank 0 or the last rank prints steps, so others are not read.
            pattern: of a line of a step, which is group 1.
        """
        self._pattern = re.compile(pattern.encode())
        ends = dict.fromkeys((*paths[:1], *paths[-1:]))
        self._read: dict[Path, tuple[int, bytes]] = dict.fromkeys(ends, (0, b""))  # bytes, and the begun line

    def newest(self) -> int | None:
        """Return the last step of what was printed since the call before; None: there is none."""
        found: list[int] = []
        for path, (before, rest) in self._read.items():
            try:
                data, at = _new(path, before)
            except OSError:
                continue  # not there yet, or the storage does not answer: the next pass reads it
            *lines, begun = _ENDS.split(rest + data)
            self._read[path] = (at, begun[-LINE_BYTES_MAX:])
            matches = [match for line in lines if (match := self._pattern.search(line)) is not None]
            found += [int(match[1]) for match in matches[-1:] if len(match[1]) <= DIGITS_MAX]
        return max(found, default=None)


def _new(path: Path, at: int) -> tuple[bytes, int]:
    """Return what a file has more than so many bytes, the newest of it where that is much; and its size."""
    descriptor = open_descriptor(path, within=path.parent)
    try:
        size = os.fstat(descriptor).st_size
        begin = max(at, size - BYTES_MAX)
        data = os.pread(descriptor, max(0, size - begin), begin)
        return data, begin + len(data)
    finally:
        os.close(descriptor)


def follow(prints: Prints, launch: int, *, inbox: Inbox, ended: threading.Event) -> None:
    """Emit `Progressed` when a later step is printed, until the launch has ended."""
    last: int | None = None
    since = inbox.clock.now()
    while not ended.wait(LOOK_EVERY_S):
        step = prints.newest()
        if step is None or (last is not None and step <= last):
            continue
        now = inbox.clock.now()
        each = (now - since) / (step - last) if last is not None else None
        inbox.put(on.Progressed(at=now, launch=launch, step=step, tokens=0, step_seconds=each, printed=True))
        last, since = step, now
