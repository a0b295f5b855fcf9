"""What has not changed since the step before is linked, and not written again.

Tensors whose bytes stay the same from save to save (frozen layers, the base below an adapter) are laid
together into files of their own, by what was observed.  Such a file is hashed first; if its digest is the
one in the manifest of the step before, it is a hard link to that step's file.  After so many links it is
written anew, so that one spot of bad disk cannot reach every step.
"""

from __future__ import annotations

import errno
import os
from operator import eq
from typing import TYPE_CHECKING

from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from stepkeeper_trainer.formats.manifest import FileEntry

COLD_AFTER = 2  # saves without a change
COLD_BYTES_MIN = 1024 * 1024  # less is not worth a file
GROUPS_MAX = 8
LINKS_MAX = 16  # saves that share one file's blocks
_UNSUPPORTED = frozenset({errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES})


class History:
    """Which tensors of this rank's share change, and how they are grouped for it."""

    def __init__(self, sizes: Sequence[int], *, bytes_min: int | None = None) -> None:
        """Begin with everything hot; `sizes` are bytes, in the order in which tensors are told of."""
        self._sizes = list(sizes)
        self._bytes_min = COLD_BYTES_MIN if bytes_min is None else bytes_min
        self._last: list[int] | None = None
        self._same = [0] * len(sizes)  # saves since a change
        self._needed = [COLD_AFTER] * len(sizes)  # of them, to be taken for cold: doubled each time that was wrong
        self.groups: list[list[int]] = []  # cold ones; a group never gets more, so that its file stays the same

    @property
    def hot(self) -> list[int]:
        """The tensors that are in no group."""
        cold = {number for group in self.groups for number in group}
        return [number for number in range(len(self._sizes)) if number not in cold]

    def observe(self, digests: Sequence[int]) -> bool:
        """Take in one save; true if the groups are others now."""
        last, self._last = self._last, list(digests)
        if last is None:
            return False
        if not self.groups and not any(map(eq, last, digests)):  # as it mostly is: everything trains
            self._same = [0] * len(digests)
            return False
        cold = {number for group in self.groups for number in group}
        thawed: set[int] = set()
        for number, (before, now) in enumerate(zip(last, digests, strict=True)):
            if before == now:
                self._same[number] += 1
                continue
            self._same[number] = 0
            if number in cold:
                thawed.add(number)
                self._needed[number] *= 2
        changed = bool(thawed)
        if thawed:
            self.groups = [[n for n in group if n not in thawed] for group in self.groups]
            self.groups = [group for group in self.groups if group]
        fresh = [n for n in self.hot if self._same[n] >= self._needed[n]]
        if sum(self._sizes[n] for n in fresh) >= self._bytes_min:
            self.groups.append(fresh)
            changed = True
        if len(self.groups) > GROUPS_MAX:
            self.groups = [sorted(n for group in self.groups for n in group)]
        return changed


class Links:
    """How often each file has been shared: it is written anew before one spot of disk holds up every step."""

    def __init__(self) -> None:
        self._shared: dict[str, int] = {}  # by digest
        self._unsupported = False

    def link(self, source: Path, target: Path, entry: FileEntry) -> bool:
        """Link `target` to `source`, which the manifest of its step says holds `entry`; false: write it."""
        if self._unsupported or self._shared.get(entry.xxh3_128, 0) >= LINKS_MAX:
            self._shared.pop(entry.xxh3_128, None)
            return False
        try:
            if source.stat().st_size != entry.bytes:
                warn("link_refused", file=source, why="its size is not what its manifest says")
                return False
            os.link(source, target, follow_symlinks=False)
        except FileNotFoundError:
            return False  # retention was faster
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self._unsupported = error.errno != errno.EMLINK
            say("links_unsupported", file=target.name, why=error.strerror)
            return False
        self._shared[entry.xxh3_128] = self._shared.get(entry.xxh3_128, 0) + 1
        return True
