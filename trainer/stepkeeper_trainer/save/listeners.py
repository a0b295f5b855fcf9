"""Who hears of each commit: retention, tiers, trackers.  What goes wrong there is said, and harms no training.

On rank 0 a listener is called right after the commit, on the saves' thread; on the other ranks when they hear of it
at a later boundary, on their saves' thread too.  It must return soon: what takes time belongs on a thread of its own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.formats.names import step_name
from stepkeeper_trainer.log import warn

if TYPE_CHECKING:
    from pathlib import Path

    from stepkeeper_trainer.formats.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A step directory that is complete and durable."""

    step: int
    save_id: str
    checkpoints: Path
    emergency: bool
    epoch_end: bool  # the script said that an epoch ended with it
    requested_at: float  # Unix seconds
    blocked_s: float  # this rank's training stood still for
    persist_s: float | None = None  # from the request to durable; rank 0 knows it
    manifest: Manifest | None = None  # rank 0 has it at hand; the others read it where they need it
    name: str | None = None  # of the directory, where it is known

    @property
    def directory(self) -> Path:
        """Where it is.  Looks at the file system, on a rank that has only heard of the commit."""
        if self.name is not None:
            return self.checkpoints / self.name
        replayed = self.checkpoints / f"{step_name(self.step)}.{self.save_id[:8]}"
        return replayed if replayed.is_dir() else self.checkpoints / step_name(self.step)


class Listener(Protocol):
    """Whoever wants to know."""

    def committed(self, step: CommittedStep, /) -> object:
        """Take note of a commit.  Returns soon."""
        ...

    def close(self, limit_at: float, /) -> object:
        """Come to an end before the process leaves, by `limit_at` (Unix seconds)."""
        ...


class Listeners:
    """Those of this rank, in the order in which they were added."""

    def __init__(self) -> None:
        """Nobody listens."""
        self._all: list[Listener] = []

    def add(self, *listeners: Listener | None) -> None:
        """Have them called from the next commit on; None is nobody."""
        self._all += [listener for listener in listeners if listener is not None]

    def tell(self, step: CommittedStep) -> None:
        """Tell all; never raises."""
        for listener in self._all:
            try:
                listener.committed(step)
            except Exception as error:  # noqa: BLE001  # the step is committed: a listener's trouble is its own
                _said(listener, "committed", error)

    def close(self, limit_at: float) -> None:
        """Have all come to an end, together by `limit_at` (Unix seconds); never raises."""
        for listener in self._all:
            try:
                listener.close(max(limit_at, time.time()))
            except Exception as error:  # noqa: BLE001  # the process leaves: nobody could handle it
                _said(listener, "close", error)


def _said(listener: Listener, act: str, error: Exception) -> None:
    warn("listener_failed", who=type(listener).__name__, act=act, why=shorten(f"{type(error).__name__}: {error}"))
