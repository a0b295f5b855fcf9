"""Rank 0 makes a save complete: reports, `.metadata`, manifest, one rename, lineage; in this order.

Until the rename nothing counts; after it everything does.  A step directory is never overwritten, and an
attempt that a newer one has fenced off commits nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stepkeeper_trainer.errors import SaveError, SupersededError
from stepkeeper_trainer.formats import lease as leases
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.decoding import DecodeError, decode
from stepkeeper_trainer.formats.durable import STALE_S, clear_temporaries, fsync_directory, naming, write_all
from stepkeeper_trainer.formats.manifest import MANIFEST_NAME, PENDING_NAME, Manifest, seal
from stepkeeper_trainer.formats.plain import read_plain
from stepkeeper_trainer.formats.processes import birth
from stepkeeper_trainer.formats.steps import step_name
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.save.report import report_name
from stepkeeper_trainer.tiers.directory import TRASH, staging_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepkeeper_trainer.environment import Environment


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

        Args:
            directory: the save in flight.
            manifest: of all that is in it.
            world_size: how many ranks have reported.
            after: save_id of the newest commit, for the lineage: the manifest's own parent may never have come here.
            before_line: called right before the lineage's line, by an attempt that still counts.

        Raises:
            SaveError: files are there that the manifest does not name, or the other way round.
            SupersededError: a newer attempt holds the run; what was renamed just before that is in no lineage.
            OSError: the disk refuses; nothing was committed, unless only the lineage is missing.
        """
        for name in [_OWNER_NAME, PENDING_NAME, *(report_name(rank) for rank in range(world_size))]:
            (directory / name).unlink(missing_ok=True)
        found = {entry.name: entry.stat().st_size for entry in os.scandir(directory)}
        promised = {name: entry.bytes for name, entry in manifest.files.items()}
        if found != promised:
            wrong = sorted(found.items() ^ promised.items())[:3]
            raise SaveError(f"{directory}: what is there is not what was written: {wrong}")
        _write_new(directory / MANIFEST_NAME, seal(manifest))
        fsync_directory(directory)
        self.check_fence()
        final = self.checkpoints / step_name(manifest.step)
        if os.path.lexists(final):  # a replay after a rollback: the older one stays as it is
            final = self.checkpoints / f"{step_name(manifest.step)}.{manifest.save_id[:8]}"
            if os.path.lexists(final):
                raise SaveError(f"{final}: is there already")
        os.rename(directory, final)
        _remove_strays(final, {*promised, MANIFEST_NAME})
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


def _remove_strays(directory: Path, names: set[str]) -> None:
    """Remove what came into a directory between the last look and its rename: from now on nothing new does."""
    strays = [entry.name for entry in os.scandir(directory) if entry.name not in names]
    for name in strays:
        with contextlib.suppress(FileNotFoundError):  # who made it removes it
            os.unlink(directory / name)
        warn("stray_removed", directory=directory.name, name=name, why="a rank wrote it when the save was complete")
    if strays:
        fsync_directory(directory)


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with naming(path):
            write_all(descriptor, data)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
