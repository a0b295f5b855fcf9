"""One save: what it is of, its phases, and what is said and given back when it fails.

`Save` is the record, `Phase` its machine.  `Failing` tells of a save that fails or hangs.  `conditions` are what the
losses depend on besides the state.
"""

from __future__ import annotations

import contextlib
import platform
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from stepkeeper_trainer import __version__
from stepkeeper_trainer.errors import SaveError, UnequalError
from stepkeeper_trainer.formats.messages import SaveFailed, shorten
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.save.report import RankReport, publish_failure
from stepkeeper_trainer.tiers.directory import give_up
from stepkeeper_trainer.tiers.tier import TierError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stepkeeper_trainer.formats.manifest import Manifest
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.store.guard import Guard
    from stepkeeper_trainer.tiers.uploader import Uploader


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the manifest says of the state that is saved."""

    step: int
    tokens: int
    loss: float | None
    parts: dict[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)  # that the best step may be chosen by
    epoch_end: bool = False


class Phase(Enum):
    """How far a save is on this rank; where there is none, the saver is idle."""

    STAGING = "staging"  # training waits while its state is copied
    WRITING = "writing"
    REPORTED = "reported"  # this rank's files are durable, and rank 0 can read so
    COMMITTED = "committed"  # the step directory counts; ranks other than 0 hear of it at a later step
    FAILED = "failed"


NEXT = {
    Phase.STAGING: (Phase.WRITING, Phase.FAILED),
    Phase.WRITING: (Phase.REPORTED, Phase.FAILED),
    Phase.REPORTED: (Phase.COMMITTED, Phase.FAILED),
    Phase.COMMITTED: (),
    Phase.FAILED: (),
}


@dataclass(slots=True, kw_only=True)
class Save:
    """One save; once `settled` is set, this rank has done its part, or the save has failed here."""

    sequence: int
    save_id: str
    summary: Summary
    emergency: bool
    requested_at: float  # Unix seconds
    limit_at: float  # Unix seconds
    directory: Path
    local: Path | None = None  # where this rank writes its files, if that is its node's own disk or memory
    snapshot: bool = False  # held in the nodes' memory, and never on shared storage
    ask_room: bool = False  # whether it is given up where there is no room for it
    read_back: bool = False  # what was written is compared with what the disk has, before it counts
    blocked_s: float = 0.0  # training stood still for
    phase: Phase = Phase.STAGING
    settled: threading.Event = field(default_factory=threading.Event)
    error: str | None = None  # why it has failed
    cancelled: str | None = None  # why nobody needs it any more
    reported_stuck: bool = False
    _acts: list[str] = field(default_factory=list)  # what is being done, by several threads

    def advance(self, phase: Phase) -> None:
        """Go on to a phase; one that the save has left does not come back."""
        assert phase in NEXT[self.phase], f"a save that is {self.phase.value} cannot become {phase.value}"
        self.phase = phase

    @property
    def over(self) -> bool:
        """Whether this rank has done its part, or the save has failed here."""
        return self.settled.is_set()

    @property
    def failed(self) -> bool:
        """Whether it has failed on this rank."""
        return self.phase is Phase.FAILED

    @contextmanager
    def doing(self, what: object) -> Iterator[None]:
        """Have it known what is being done, should the storage never answer."""
        act = str(what)
        self._acts.append(act)
        try:
            yield
        finally:
            self._acts.remove(act)

    @property
    def at(self) -> str:
        """What is being done now."""
        return ", ".join(list(self._acts)) or "it has not begun: its thread has not come to it"

    @property
    def data(self) -> Path:
        """Where this rank writes its files."""
        return self.local or self.directory

    def check(self) -> None:
        """Raise where the save must not go on.

        Raises:
            SaveError: it was cancelled, or its time is over.
        """
        if self.cancelled is not None:
            raise SaveError(f"cancelled: {self.cancelled}")
        if time.time() >= self.limit_at:
            raise SaveError("not written in time")


def versions() -> dict[str, str]:
    """Return the versions that wrote a checkpoint."""
    return {
        "torch": str(torch.__version__),
        "stepkeeper_trainer": __version__,
        "python": platform.python_version(),
    }


def conditions() -> dict[str, Any]:
    """Return what must be the same for losses to be the same bit for bit."""
    return {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def warn_of_changes(manifest: Manifest, world_size: int) -> dict[str, tuple[Any, Any]]:
    """Log what differs from the checkpoint's conditions, and return it: name to (then, now)."""
    then = {
        **manifest.conditions,
        "world_size": manifest.world_size,
        "torch": manifest.versions.get("torch"),
    }
    now = {**conditions(), "world_size": world_size, "torch": str(torch.__version__)}
    changes = {name: (then[name], now[name]) for name in now if name in then and then[name] != now[name]}
    for name, (before, after) in changes.items():
        warn("condition_changed", name=name, then=before, now=after, why="losses may differ in their last bits")
    return changes


STUCK_AFTER_S = 15.0  # beyond its limit: between two pieces a save would have ended


class Failing:
    """Of one rank."""

    def __init__(self, *, rank: int, link: Link, guard: Guard, uploader: Uploader | None) -> None:
        """Prepare; rank 0 tells the supervisor."""
        self._rank, self._link, self._guard, self._uploader = rank, link, guard, uploader

    def failed(self, save: Save, why: str) -> None:
        """Tell that a save has failed, and give the disks back what this rank can."""
        warn("save_failed", step=save.summary.step, save_id=save.save_id, rank=self._rank, why=why)
        if not save.reported_stuck:
            self._report_to_supervisor(save, why)
        self._give_back(save, why)

    def snapshot_failed(self, save: Save, error: BaseException, why: str) -> None:
        """Tell of a snapshot that has failed: the one before is there still.

        Rank 0 tells for all but for what befell one rank's memory.  One that gave way to a save, or is taken again
        when it is known how values differ, has not failed.
        """
        own = isinstance(error, (OSError, TierError))
        if save.cancelled is None and not isinstance(error, UnequalError) and (own or self._rank == 0):
            warn("snapshot_failed", step=save.summary.step, save_id=save.save_id, rank=self._rank, why=why)

    def taken_again(self, save: Save, why: str) -> None:
        """Give back what a save wrote that is taken again: the supervisor hears of the next one only."""
        if self._rank == 0:
            say("save_taken_again", step=save.summary.step, save_id=save.save_id, why=why)
        self._give_back(save, why)

    def _give_back(self, save: Save, why: str) -> None:
        if self._uploader is not None and save.local is not None:
            self._uploader.forget(save.summary.step, save.save_id)
        if self._rank == 0:
            give_up(save.directory)  # nothing of it counts
            return
        with contextlib.suppress(OSError):  # rank 0 hears of it at the next boundary
            publish_failure(save.directory, RankReport(rank=self._rank, save_id=save.save_id, error=why))

    def if_stuck(self, save: Save | None) -> None:
        """Tell once of a save that hangs in the storage: it heeds no limit there, and no other begins beside it.

        Nothing can end its thread, which still reads what the next save would write: training goes on without saves
        until the storage answers.
        """
        if save is None or save.snapshot or save.over or save.reported_stuck:
            return
        if time.time() < save.limit_at + STUCK_AFTER_S:
            return
        save.reported_stuck = True
        why = shorten(f"the storage does not answer: {save.at}")
        warn(
            "save_stuck",
            step=save.summary.step,
            save_id=save.save_id,
            rank=self._rank,
            why=why,
            to_do="look at the storage and this node's mount of it: no step is saved until it answers",
        )
        self._report_to_supervisor(save, f"stuck: {why}")
        self._guard.trouble(why)

    def _report_to_supervisor(self, save: Save, why: str) -> None:
        if self._rank == 0:
            failed = SaveFailed(
                step=save.summary.step, save_id=save.save_id, error=shorten(why), emergency=save.emergency
            )
            self._link.send(failed, keep=True)
