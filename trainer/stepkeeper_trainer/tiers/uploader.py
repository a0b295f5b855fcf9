"""A save on its way from the nodes' own disks to shared storage, beside training.

Each rank has written its files to its node's disk and reported; rank 0 has sealed the manifest and laid it beside
the reports, on shared storage.  From then on, on threads of each rank: the first rank of each node makes its node's
part a step of the local tier; every rank copies its own files into the save in flight on shared storage, makes their
names durable there, and takes its report away, which nobody needs any more; rank 0 sees by that who is through, and
commits, by the rules of every commit.  A rank that could not write to its node's disk has written to shared storage at
once, and has nothing to copy: its files are there already when the manifest is sealed.

What is complete on its disks only is no step of the run yet: nobody hears `committed` before shared storage has it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats.durable import fsync_directory, write_atomically
from stepkeeper_trainer.formats.manifest import MANIFEST_BYTES_MAX, PENDING_NAME, FileEntry
from stepkeeper_trainer.formats.plain import read_plain
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.save.report import report_name
from stepkeeper_trainer.tiers.copying import CopyStoppedError, Pace, Rate, first_tier, push
from stepkeeper_trainer.tiers.directory import InFlight, LocalTier, give_up, mark_failed, require_none_failed
from stepkeeper_trainer.tiers.tier import Held, TierError, writer_of

RETRY_S, RETRY_MAX_S, TRIES_MAX = 1.0, 60.0, 6
SEALED_WITHIN_S = 3600.0  # all ranks have written
STALLED_S = 600.0  # no rank's copy has got on for so long
NODE_WITHIN_S = 120.0  # the first rank of a node makes its part a step
_PAUSE_S = (0.02, 0.5)
ASKED_EVERY_S = 5.0  # shared storage, by a rank whose node's first rank asks it, too
SIZES_EVERY_S = 30.0  # of files that are being copied still: they only show whether anybody gets on


@dataclass(slots=True, kw_only=True)
class Upload:
    """One save of this rank, from its report to shared storage."""

    step: int
    save_id: str
    directory: Path  # in flight, on shared storage
    files: Mapping[str, FileEntry]  # of this rank
    is_local: bool  # written to the node's disk
    to_come: frozenset[int] = frozenset()  # rank 0: who copies
    commit: Callable[[], object] | None = None  # of rank 0
    give_up: Callable[[str], object] | None = None  # of rank 0: tell that it came to nothing
    settled: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Ready:
    """A save whose manifest is known."""

    save: Upload
    held: Held
    part: str | None  # this node's, on its disk


@dataclass(slots=True)
class _Ending:
    settled: bool = True


class Uploader:
    """One a rank; nothing is in it where the run has no local tier."""

    def __init__(
        self,
        local: LocalTier,
        *,
        rank: int,
        leads: bool,
        shared: Path,
        pace: Pace,
        ranks: int = 1,
        on_local: Callable[[Held], object] = lambda _held: None,
        retry_s: float = RETRY_S,
    ) -> None:
        """Start the threads.

        `leads`: this is the first rank of its node, of so many `ranks`, for all of which there must be room.
        `on_local` is told of each step that this node has, on the leading rank.
        """
        self.local = local
        self._rank, self._leads, self._shared, self._pace = rank, leads, shared, pace
        self._ranks, self._on_local, self._retry_s = ranks, on_local, retry_s
        self._local_rate, self._shared_rate = Rate(), Rate()
        self._size = 0  # of the save before
        self._changed = threading.Condition()
        self._written: deque[Upload] = deque()  # by this rank
        self._waiting: deque[_Ready] = deque()  # to be copied
        self._given_up: set[str] = set()  # save_ids that shared storage will not have
        self._stopping = False
        self.leaving = False  # the process ends after the next save
        self.ended: Callable[[Iterable[int]], list[int]] = lambda _ranks: []  # which of these are gone
        self.last: Upload | None = None
        self._threads = [
            threading.Thread(target=work, name=f"stepkeeper-{name}", daemon=True)
            for name, work in (("parts", self._part_all), ("copies", self._copy_all))
        ]
        for thread in self._threads:
            thread.start()

    # --- the save's thread calls -----------------------------------------------------------------------

    def begin(self, step: int, save_id: str, *, leaving: bool, left_s: float | None) -> Path | None:
        """Return where this rank writes a save first; None: to shared storage."""
        leaving |= self.leaving
        choice = first_tier(
            leaving=leaving, left_s=left_s, size=self._size, shared_bytes_per_s=self._shared_rate.bytes_per_s
        )
        if leaving:
            self._pace.lift()
        if choice == "shared":
            return None
        try:
            return self.local.begin(step, save_id, self._ranks * self._size)
        except OSError as error:
            self.refused(step, error)
            return None

    def forget(self, step: int, save_id: str) -> None:
        """Give the node's disk back what this rank has written of a save that is not wanted there."""
        self.local.forget(step, save_id, self._rank)

    def refused(self, step: int, error: OSError) -> None:
        """Say that the node's disk did not take a save."""
        warn("local_tier_failed", step=step, rank=self._rank, why=error, instead="shared storage")

    def written(self, save: Upload, seconds: float) -> None:
        """Take over a save that this rank has reported."""
        size = self._size = sum(entry.bytes for entry in save.files.values())
        (self._local_rate if save.is_local else self._shared_rate).measured(size, seconds)
        with self._changed:
            self.last = save
            self._written.append(save)
            self._changed.notify_all()

    def seal(self, save: Upload, files: Iterable[str], raw: bytes) -> None:
        """Lay the manifest where all nodes see it (rank 0): the save is complete on its disks.  Raises OSError."""
        there = set(os.listdir(save.directory))  # nobody has begun to copy
        save.to_come = frozenset(writer_of(name) for name in files if name not in there)
        write_atomically(save.directory / PENDING_NAME, raw)

    def wait(self, limit_at: float) -> bool:
        """Wait until the newest save is through on this rank, at most until `limit_at` (Unix seconds).

        True if it is: rank 0 has committed, another has copied its files.
        """
        last = self.last
        if last is None:
            return True
        last.settled.wait(max(0.0, limit_at - time.time()))
        return last.settled.is_set() and last.error is None

    def close(self, limit_at: float) -> bool:
        """Let what waits be copied until `limit_at` (Unix seconds), then stop; true if all of it was."""
        through = self.wait(limit_at)
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, limit_at - time.time()) + 1.0)
        return through

    # --- its own threads -----------------------------------------------------------------------------------

    def _part_all(self) -> None:
        """Make this node's part of each save a step of its disk, when its manifest is there: no copy delays it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._written or self._stopping)
                if self._stopping:
                    return
                save = self._written.popleft()
            with self._ending(save) as ready:
                held = self._sealed(save)
                part = self._part(save, held)
                with self._changed:
                    self._waiting.append(_Ready(save, held, part))
                    self._changed.notify_all()
                ready.settled = False  # by the copies

    def _copy_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                ready = self._waiting.popleft()
                newer = bool(self._waiting)
            save = ready.save
            with self._ending(save):
                if self._rank == 0 and newer:
                    self._leave_out(save)
                    continue
                if ready.part is not None and save.is_local:
                    self._copy(save, Held(ready.part, ready.held.manifest, ready.held.raw))
                if self._rank == 0:
                    self._commit(save, ready.held)

    @contextmanager
    def _ending(self, save: Upload) -> Iterator[_Ending]:
        """Record how a save ended, unless it has not; nothing is raised, for training must go on."""
        ending = _Ending()
        try:
            yield ending
        except CopyStoppedError as stopped:
            ending.settled = True
            if save.is_local or self._rank == 0:  # else there was nothing to copy, and rank 0 may have committed
                save.error = str(stopped)
                self._given_up.add(save.save_id)
        except Exception as error:  # noqa: BLE001 - told
            ending.settled = True
            save.error = str(error) if isinstance(error, TierError) else f"{type(error).__name__}: {error}"
            self._given_up.add(save.save_id)
            self._report_failure(save)
        finally:
            if ending.settled:
                if save.error is not None and not (self._stopping and save.directory.is_dir()):
                    self.forget(save.step, save.save_id)  # unless the next launch may go on with it
                save.settled.set()

    def _sealed(self, save: Upload) -> Held:
        """Wait for the manifest: on the node's own disk, once its first rank has seen it on shared storage."""
        path = save.directory / PENDING_NAME
        limit_at = time.monotonic() + SEALED_WITHIN_S
        aside = save.is_local and not self._leads
        for asks in self._pauses(save, aside=aside):
            if aside and (held := self.local.committed(save.step, save.save_id)) is not None:
                return held
            if not asks:
                continue
            with suppress(FileNotFoundError):  # not yet
                data = read_plain(path, MANIFEST_BYTES_MAX, within=save.directory)
                return Held.read(save.directory.name, data, source=str(path))
            if time.monotonic() > limit_at:
                raise TierError(f"{path}: did not come within {SEALED_WITHIN_S:g} s")
        raise AssertionError("the pauses end by an error only")

    def _part(self, save: Upload, held: Held) -> str | None:
        """Make this node's part a step of its disk, or wait until the node's first rank has; return its name."""
        if self._leads:
            try:
                name = self.local.commit(held)
            except OSError as error:
                if save.is_local:
                    raise
                self.refused(save.step, error)  # as it has refused this rank's files: they are on shared storage
                return None
            if name is not None:
                say("held_locally", step=save.step, save_id=save.save_id, directory=self.local.checkpoints / name)
                self._on_local(Held(name, held.manifest, held.raw))
                lineage = lineages.read(self._shared)
                if removed := self.local.prune({*(lineage.commits if lineage is not None else ())}, self._given_up):
                    say("local_steps_removed", directories=",".join(removed))
            return name
        if not save.is_local:
            return None
        limit_at = time.monotonic() + NODE_WITHIN_S
        for _ in self._pauses(save, aside=True):
            if (name := self.local.find(held)) is not None:
                return name
            if time.monotonic() > limit_at:
                raise TierError(f"{self.local.checkpoints}: the node's first rank did not commit step {save.step}")
        raise AssertionError("the pauses end by an error only")

    def _copy(self, save: Upload, held: Held) -> None:
        """Copy this rank's files into the save in flight; a failure is told and tried again."""
        delay_s = self._retry_s
        for attempt in range(1, TRIES_MAX + 1):
            began, waited_s = time.monotonic(), self._pace.waited_s
            try:
                pushed = push(
                    self.local.tier,
                    held,
                    InFlight(save.directory),
                    list(save.files),
                    pace=self._pace,
                    should_stop=lambda: self._dropped(save),
                )
                if not pushed.missing:
                    self._through(save)
            except CopyStoppedError:
                raise
            except (TierError, OSError) as error:
                if self._dropped(save) or attempt == TRIES_MAX:
                    raise
                warn("copy_failed", step=save.step, rank=self._rank, attempt=attempt, why=error)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, delay_s)
                delay_s = min(2 * delay_s, RETRY_MAX_S)
                continue
            if pushed.missing:
                raise TierError(f"{self.local.checkpoints / held.directory}: lacks {pushed.missing[0]}")
            taken_s = time.monotonic() - began
            self._shared_rate.measured(pushed.bytes_copied, taken_s - (self._pace.waited_s - waited_s))
            return

    def _through(self, save: Upload) -> None:
        """Make the names of this rank's files durable, by the node that gave them; then tell rank 0."""
        fsync_directory(save.directory)
        (save.directory / report_name(self._rank)).unlink(missing_ok=True)

    def _commit(self, save: Upload, held: Held) -> None:
        """On rank 0: wait for the files of all ranks, and commit."""
        assert save.commit is not None, "rank 0 commits"
        sizes = _Sizes(save.directory, held.manifest.files, {report_name(rank) for rank in save.to_come})
        since = time.monotonic()
        for _ in self._pauses(save):
            changed = sizes.look()
            require_none_failed(save.directory, sizes.names, "copy")
            lacking = sizes.lacking()
            gone = self.ended(range(held.manifest.world_size))
            if not lacking and all(rank in gone for rank in save.to_come if report_name(rank) in sizes.names):
                break
            if theirs := [name for name in lacking if writer_of(name) in gone]:
                raise TierError(f"{theirs[0]} will never be copied: its rank has ended")
            if changed:
                since = time.monotonic()
            elif time.monotonic() > since + STALLED_S:
                what = lacking[0] if lacking else "a rank's word that it is through"
                raise TierError(f"no rank has copied anything for {STALLED_S:g} s: {what} is missing")
        save.commit()

    def _report_failure(self, save: Upload) -> None:
        warn("place_failed", step=save.step, save_id=save.save_id, rank=self._rank, why=save.error)
        if self._rank == 0:
            give_up(save.directory)
            if save.give_up is not None:
                save.give_up(save.error or "")
            return
        try:
            mark_failed(save.directory, self._rank, save.error or "")
        except OSError as error:
            warn("failure_unsaid", step=save.step, rank=self._rank, why=error)  # rank 0 hears nothing: see `_pauses`

    def _leave_out(self, save: Upload) -> None:
        """A newer one waits, and is complete: this one stays on the nodes' disks only."""
        give_up(save.directory)
        self._given_up.add(save.save_id)
        save.error = "left out: a newer save is waiting"
        warn(
            "copy_left_out", step=save.step, save_id=save.save_id, why="copies are slower than saves: a newer one waits"
        )
        if save.give_up is not None:
            save.give_up(save.error)

    def _dropped(self, save: Upload) -> bool:
        return self._stopping or not save.directory.is_dir()

    def _pauses(self, save: Upload, *, aside: bool = False) -> Iterator[bool]:
        """Yield at once and then after growing pauses, until nobody needs the save any more.

        What is yielded tells whether shared storage may be asked now: seldom, by one that waits `aside` for another
        rank of its node.

        Raises:
            CopyStoppedError: it was given up or left out, or this process leaves.
        """
        pause_s, asked_at = _PAUSE_S[0], time.monotonic()
        while True:
            asks = not aside or time.monotonic() >= asked_at + ASKED_EVERY_S
            if asks:
                asked_at = time.monotonic()
            yield asks
            if self._dropped(save) if asks else self._stopping:
                raise CopyStoppedError(f"step {save.step}: given up, or the process leaves")
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, pause_s)
            pause_s = min(1.5 * pause_s, _PAUSE_S[1])


class _Sizes:
    """What is there of a save in flight, for rank 0: a listing a look, and each file's size once it is complete."""

    def __init__(self, directory: Path, wanted: Mapping[str, FileEntry], reports: Collection[str]) -> None:
        """Know nothing yet; `reports` only have to be gone."""
        self._directory, self._wanted, self._reports = directory, wanted, reports
        self._sizes: dict[str, int] = {}
        self._sized_at = 0.0  # those of files that are not complete

    @property
    def names(self) -> Collection[str]:
        """What is there; what another node renames meanwhile may be missing."""
        return self._sizes

    def lacking(self) -> list[str]:
        """Return the files that are not there with their full size."""
        return [name for name in self._wanted if not self._is_whole(name)]

    def look(self) -> bool:
        """Look again; true where something has changed."""
        now = time.monotonic()
        sizes_all = now >= self._sized_at + SIZES_EVERY_S
        if sizes_all:
            self._sized_at = now
        found = {}
        for entry in os.scandir(self._directory):
            known = self._sizes.get(entry.name)
            if entry.name in self._reports:
                known = 0
            elif known is not None and not self._is_whole(entry.name) and (sizes_all or entry.name in self._wanted):
                known = None
            with suppress(FileNotFoundError):
                found[entry.name] = entry.stat().st_size if known is None else known
        changed = found != self._sizes
        self._sizes = found
        return changed

    def _is_whole(self, name: str) -> bool:
        entry = self._wanted.get(name)
        return entry is not None and self._sizes.get(name) == entry.bytes
