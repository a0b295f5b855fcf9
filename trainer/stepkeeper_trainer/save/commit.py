"""Rank 0 makes a save complete: reports, `.metadata`, manifest, one rename, lineage; in this order.

Until the rename nothing counts; after it everything does.  A step directory is never overwritten, and an
attempt that a newer one has fenced off commits nothing.

Where the nodes' own disks come first, the commit comes when the copies on shared storage are complete.

Listeners hear of each commit: retention, tiers, trackers.  What goes wrong there is said, and harms no training.  On
rank 0 a listener is called right after the commit, on the saves' thread; on the other ranks when they hear of it at a
later boundary, on their saves' thread too.  It must return soon: what takes time belongs on a thread of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from stepkeeper_trainer.errors import DriftError, SaveError, SupersededError
from stepkeeper_trainer.formats import lease as leases
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.durable import STALE_S, clear_temporaries, fsync_directory, write_new
from stepkeeper_trainer.formats.lease import birth
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME, PENDING_NAME, FileEntry, Manifest, seal, step_name
from stepkeeper_trainer.formats.messages import Committed, SaveFailed, shorten
from stepkeeper_trainer.formats.metadata import METADATA_NAME
from stepkeeper_trainer.formats.plain import DecodeError, decode, read_plain
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.save.dcp_metadata import VALUES_NAME, Description, Values
from stepkeeper_trainer.save.replicas import compare
from stepkeeper_trainer.save.report import GivenUp, RankReport, gather, report_name
from stepkeeper_trainer.save.save import conditions, versions
from stepkeeper_trainer.save.writer import HashingFile, in_threads, read_back
from stepkeeper_trainer.tiers.directory import TRASH, staging_directory
from stepkeeper_trainer.tiers.search import ANCESTORS, ANCESTORS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepkeeper_trainer.environment import Environment
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.save.planner import Share
    from stepkeeper_trainer.save.save import Save
    from stepkeeper_trainer.tiers.uploader import Upload, Uploader

    BeforeCommit = Callable[[float, Callable[[], bool]], object]  # a limit (Unix seconds), and whether it is unwanted


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
    """A function or object that is called at each commit."""

    def committed(self, step: CommittedStep, /) -> object:
        """Take note of a commit.  Returns soon."""
        ...

    def close(self, limit_at: float, /) -> object:
        """Come to an end before the process leaves, by `limit_at` (Unix seconds)."""
        ...


class Listeners:
    """Those of this rank, in the order in which they were added."""

    def __init__(self) -> None:
        self._all: list[Listener] = []

    def add(self, *listeners: Listener | None) -> None:
        """Have them called from the next commit on; None is nobody."""
        self._all += [listener for listener in listeners if listener is not None]

    def notify(self, step: CommittedStep) -> None:
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


CHECKPOINTS_NAME = "checkpoints"
_IN_FLIGHT = ".tmp-step_"
_OWNER_NAME = "owner.json"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes a save in flight: leftovers of the dead are cleared, saves of the living are not."""

    node: str
    pid: int
    epoch: tuple[int, int] | None
    launch: tuple[int, int]


_owner = msgspec.json.Decoder(Owner)


@dataclass(frozen=True, slots=True)
class Commits:
    """The `checkpoints/` directory of a run, as its rank 0 writes it."""

    run_directory: Path
    environment: Environment

    @property
    def checkpoints(self) -> Path:
        """Where the step directories are."""
        return self.run_directory / CHECKPOINTS_NAME

    def in_flight(self, step: int, save_id: str) -> Path:
        """Return the directory of a save in flight."""
        return self.checkpoints / f"{_IN_FLIGHT}{step:08d}.{save_id}"

    def claim(self, directory: Path) -> None:
        """Say who writes a save in flight.  Raises OSError."""
        environment = self.environment
        owner = Owner(
            node=environment.node,
            pid=os.getpid(),
            epoch=environment.epoch,
            launch=(environment.attempt, environment.launch),
        )
        (directory / _OWNER_NAME).write_bytes(msgspec.json.encode(owner))

    def check_fence(self) -> None:
        """Refuse to act for an attempt that a newer one has replaced.

        Raises:
            SupersededError: the lease names a higher (job id, restart count).
            OSError: the lease cannot be read.
        """
        own = self.environment.epoch
        if own is None:
            return
        try:
            lease = leases.read(self.run_directory)
        except leases.LeaseError as error:
            warn("lease_unreadable", why=error)  # it names nobody, so it fences nobody off
            return
        if lease is not None and lease.epoch > own:
            if lease.job_id == leases.NO_JOB:
                raise SupersededError(
                    f"a training that was started later (process {lease.pid} on {lease.node}) has taken over "
                    f"{self.run_directory}: this one must stop"
                )
            raise SupersededError(
                f"job {lease.job_id} (restart {lease.restart_count}, on {lease.node}) "
                f"has taken over {self.run_directory}: "
                f"job {own[0]} (restart {own[1]}) must stop"
            )

    def commit(
        self,
        directory: Path,
        manifest: Manifest,
        world_size: int,
        *,
        after: str | None,
        before_line: Callable[[], object] = lambda: None,
    ) -> Path:
        """Turn a complete save in flight into a step directory, and return where it is.

        `after` is the save_id of the newest commit, for the lineage: the manifest's own parent may never have come
        here.  `before_line` is called right before the lineage's line, by an attempt that still counts.

        Raises:
            SaveError: files are there that the manifest does not name, or the other way round.
            SupersededError: a newer attempt holds the run; what was renamed just before that is in no lineage.
            OSError: the disk refuses; nothing was committed, unless only the lineage is missing.
        """
        for name in [_OWNER_NAME, PENDING_NAME, *(report_name(rank) for rank in range(world_size))]:
            (directory / name).unlink(missing_ok=True)
        promised = set(manifest.files)
        if wrong := promised.symmetric_difference(os.listdir(directory)):  # each writer has looked at its sizes
            raise SaveError(f"{directory}: what is there is not what was written: {sorted(wrong)[:3]}")
        write_new(directory / MANIFEST_NAME, seal(manifest))
        fsync_directory(directory)  # the names of all ranks' files: one sync, however many ranks there are
        self.check_fence()
        final = self.checkpoints / step_name(manifest.step)
        if os.path.lexists(final):  # a replay after a rollback: the older one stays as it is
            final = self.checkpoints / f"{step_name(manifest.step)}.{manifest.save_id[:8]}"
            if os.path.lexists(final):
                raise SaveError(f"{final}: is there already")
        os.rename(directory, final)
        _remove_strays(final, promised | {MANIFEST_NAME})
        fsync_directory(self.checkpoints)
        self.check_fence()  # the rename may have taken long; unrecorded, it harms no newer attempt
        before_line()
        lineage.append(
            self.checkpoints,
            lineage.Commit(
                at=time.time(),
                attempt=self.environment.attempt,
                step=manifest.step,
                save_id=manifest.save_id,
                parent=after,
                directory=final.name,
            ),
        )
        return final

    def mark_epoch_end(self, save_id: str) -> None:
        """Mark a save as the end of an epoch, before it is committed: a crash between the two costs no milestone.

        Raises:
            OSError: the lineage cannot be written.
        """
        lineage.append(self.checkpoints, lineage.Mark(at=time.time(), save_id=save_id, mark=lineage.EPOCH))

    def take_lease(self) -> None:
        """Without a supervisor: fence off an older attempt of the same run, as the supervisor would.

        Raises:
            SupersededError: a newer one holds the run.
            OSError: the lease cannot be read or written.
        """
        environment = self.environment
        if environment.epoch is None:
            return
        self.check_fence()
        job_id, restart_count = environment.epoch
        leases.write(
            self.run_directory,
            leases.Lease(
                job_id=job_id,
                restart_count=restart_count,
                attempt=environment.attempt,
                node=environment.node,
                pid=os.getpid(),
                taken_at=time.time(),
                birth=birth(os.getpid()),
            ),
        )

    def clear_leftovers(self) -> None:
        """Remove saves in flight whose writers are dead.  A failure to is logged, and harmless."""
        for directory in (self.run_directory, self.checkpoints):
            clear_temporaries(directory)
        for path in self.checkpoints.glob(f"{TRASH}{_IN_FLIGHT}*"):
            shutil.rmtree(path, ignore_errors=True)  # given up, by whomever
        for path in sorted(self.checkpoints.glob(f"{_IN_FLIGHT}*")):
            why = self._dead(path)
            if why is None:
                continue
            if (path / PENDING_NAME).exists() and self._keep_for_copies(path):
                continue
            shutil.rmtree(path, ignore_errors=True)
            say("leftover_removed", directory=path.name, why=why, gone=not path.exists())

    def _keep_for_copies(self, path: Path) -> bool:
        """Leave what was copied from the nodes' disks to those who may go on with it; true if that was done."""
        name = path.name.removeprefix(_IN_FLIGHT)
        step, _, save_id = name.partition(".")
        try:
            os.rename(path, staging_directory(self.checkpoints, int(step), save_id))
        except (OSError, ValueError):
            return False
        say("leftover_kept", directory=path.name, why="the nodes' disks may have the rest")
        return True

    def _dead(self, path: Path) -> str | None:
        """Say why nobody writes this any more; None where somebody may."""
        environment = self.environment
        try:
            owner = decode(_owner, read_plain(path / _OWNER_NAME, within=self.checkpoints))
        except (OSError, DecodeError):
            try:
                age_s = time.time() - path.stat().st_mtime
            except OSError:
                return None
            return "no owner, and old" if age_s > STALE_S else None
        if owner.epoch is not None and environment.epoch is not None and owner.epoch < environment.epoch:
            return "of an earlier attempt"
        if owner.epoch == environment.epoch is not None and owner.launch < (
            environment.attempt,
            environment.launch,
        ):
            return "of an earlier launch"  # the supervisor starts one only when the other's ranks are gone
        if owner.node == environment.node and not os.path.exists(f"/proc/{owner.pid}"):
            return "its writer is dead"
        return None


ROWS_WITHIN_S = 60.0  # the rows of a step are durable, before a commit that nobody waits for


class Completer:
    """On rank 0, for all saves of a launch."""

    def __init__(
        self,
        *,
        commits: Commits,
        world_size: int,
        link: Link,
        parent: str | None,
        before_commit: BeforeCommit,
        on_committed: Callable[[Save], object],
        uploader: Uploader | None,
        before_line: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare.

        `before_commit` makes a step's rows durable, by a limit and while they are wanted; `before_line`
        precedes the lineage's.
        """
        self._commits = commits
        self._world_size = world_size
        self._link = link
        self._before_commit = before_commit
        self._on_committed = on_committed
        self._uploader = uploader
        self._before_line = before_line
        self._description = Description()
        self.parent = parent  # save_id of the newest save that was sealed
        self._ancestors: tuple[str | None, ...] = (parent,)
        self._newest_here = parent  # save_id of the newest commit
        self.committed: tuple[Path, Manifest] | None = None  # the newest step directory of this launch

    def complete(
        self, save: Save, share: Share, given_up: GivenUp, upload: Upload, *, values: Values | None = None
    ) -> None:
        """Wait for all ranks' reports and commit; with disks of the nodes, once shared storage has all of it.

        `values` are what only stock DCP needs besides the tensors.

        Raises:
            SaveError, SupersededError, OSError: the save came to nothing.
        """
        reports = gather(
            save.directory,
            save_id=save.save_id,
            world_size=self._world_size,
            limit_at=save.limit_at,
            given_up=given_up,
        )
        manifest, own = self._describe(save, share, reports, values)
        if self._uploader is None:
            self._commit(save, manifest)
        else:
            save.check()
            upload.files = {**upload.files, **own}
            upload.commit = lambda: self._commit(save, manifest)
            upload.give_up = lambda why: self._report_failure(save, why)
            self._uploader.seal(upload, manifest.files, seal(manifest))
        self.parent = save.save_id
        self._ancestors = (save.save_id, *self._ancestors[: ANCESTORS_MAX - 1])

    def describe_snapshot(
        self, save: Save, share: Share, reports: list[RankReport], *, values: Values | None = None
    ) -> Manifest:
        """Return the manifest of a snapshot, of all ranks' reports.  A snapshot is no parent of what is saved later.

        Raises:
            SaveError, OSError: the snapshot came to nothing.
        """
        for report in reports:
            if report.error is not None:
                raise SaveError(f"rank {report.rank}: {report.error}")
        manifest, _ = self._describe(save, share, reports, values)
        self._before_commit(min(save.limit_at, time.time() + ROWS_WITHIN_S), lambda: save.cancelled is not None)
        save.check()
        return manifest

    def _describe(
        self, save: Save, share: Share, reports: list[RankReport], values: Values | None
    ) -> tuple[Manifest, dict[str, FileEntry]]:
        """Write what rank 0 alone writes; return the manifest, and what was written."""
        if drifts := compare({report.rank: report.replicas for report in reports}, share.groups):
            names = ", ".join(name for drift in drifts for name in drift.names)
            raise DriftError(f"ranks hold different values of {shorten(names)}: each is saved by the next save")
        small: dict[str, bytes] = {}  # only rank 0 writes them: beside each other, so that one fsync counts
        if values is not None and values.data:
            small[VALUES_NAME] = values.data
            reports.append(RankReport(rank=0, save_id=save.save_id, items=values.items))
        small[METADATA_NAME] = self._description.of(save.save_id, share, reports)
        written = in_threads([partial(self._write_own, save, name, data) for name, data in small.items()])
        own = dict(zip(small, written, strict=True))
        files = {name: entry for report in reports for name, entry in report.files.items()} | own
        summary = save.summary
        manifest = Manifest(
            step=summary.step,
            tokens=summary.tokens,
            world_size=self._world_size,
            created_at=datetime.now(timezone.utc).isoformat(),
            save_id=save.save_id,
            parent=self.parent,
            files=dict(sorted(files.items())),
            state=summary.parts | self._led_here(save),
            versions=versions(),
            conditions=conditions(),
            loss=summary.loss,
            metrics=summary.metrics,
        )
        return manifest, own

    def _write_own(self, save: Save, name: str, data: bytes) -> FileEntry:
        """Write a file of rank 0 beside this rank's files: where their disk does not take it, to shared storage."""
        try:
            return _write_hashed(save, save.data / name, data)
        except OSError as error:
            if self._uploader is None or save.local is None or save.snapshot:
                raise
            self._uploader.refused(save.summary.step, error)
        return _write_hashed(save, save.directory / name, data)

    def _led_here(self, save: Save) -> dict[str, object]:
        """Return what a step of the nodes' own is known by: the steps that led to it, which may never come here."""
        return {ANCESTORS: self._ancestors} if self._uploader is not None or save.snapshot else {}

    def _commit(self, save: Save, manifest: Manifest) -> None:
        """Commit what is complete on shared storage."""
        if self._uploader is None:
            self._before_commit(save.limit_at, lambda: save.cancelled is not None)
            save.check()
        else:  # nobody waits for it, and nothing cancels it any more
            self._before_commit(time.time() + ROWS_WITHIN_S, lambda: False)
        final = self._commits.commit(
            save.directory, manifest, self._world_size, after=self._newest_here, before_line=self._before_line
        )
        self._newest_here = save.save_id
        self.committed = (final, manifest)
        self._report_commit(save, final, sum(entry.bytes for entry in manifest.files.values()))
        self._on_committed(save)

    def _report_failure(self, save: Save, why: str) -> None:
        self._link.send(
            SaveFailed(step=save.summary.step, save_id=save.save_id, error=shorten(why), emergency=save.emergency),
            keep=True,
        )

    def _report_commit(self, save: Save, final: Path, size: int) -> None:
        step, seconds = save.summary.step, round(time.time() - save.requested_at, 3)
        say("committed", step=step, directory=final.name, bytes=size, seconds=seconds)
        self._link.send(
            Committed(
                step=step,
                save_id=save.save_id,
                directory=final.name,
                bytes=size,
                seconds=seconds,
                emergency=save.emergency,
                drift=shorten(", ".join(save.summary.parts.get("drift", ()))),
                by_disk=self._uploader is not None,
            ),
            keep=True,
        )


def _write_hashed(save: Save, path: Path, data: bytes) -> FileEntry:
    with HashingFile(path) as file:
        file.write(data)
    read_back(save, path.parent, {path.name: file.entry})
    return file.entry


def _remove_strays(directory: Path, names: set[str]) -> None:
    """Remove what came into a directory between the last look and its rename: from now on nothing new does."""
    strays = [entry.name for entry in os.scandir(directory) if entry.name not in names]
    for name in strays:
        with contextlib.suppress(FileNotFoundError):  # who made it removes it
            os.unlink(directory / name)
        warn("stray_removed", directory=directory.name, name=name, why="a rank wrote it when the save was complete")
    if strays:
        fsync_directory(directory)
