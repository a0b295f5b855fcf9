"""Rank 0 makes a save complete: all ranks' reports -> `.metadata` -> manifest -> commit -> told.

Where the nodes' own disks come first, the commit comes when the copies on shared storage are complete.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from stepkeeper_trainer.conditions import conditions, versions
from stepkeeper_trainer.dcp_values import VALUES_NAME, Values
from stepkeeper_trainer.describing import Description
from stepkeeper_trainer.errors import DriftError
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, seal
from stepkeeper_trainer.formats.messages import Committed, SaveFailed, shorten
from stepkeeper_trainer.formats.metadata import METADATA_NAME
from stepkeeper_trainer.log import say
from stepkeeper_trainer.reading_back import read_back
from stepkeeper_trainer.replicas import compare
from stepkeeper_trainer.report import GivenUp, RankReport, gather
from stepkeeper_trainer.tiers.gathering import ANCESTORS, ANCESTORS_MAX
from stepkeeper_trainer.writer import HashingFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepkeeper_trainer.commit import Commits
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.planner import Share
    from stepkeeper_trainer.saves import Save
    from stepkeeper_trainer.tiers.placing import Placed, Placing

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
        before_commit: Callable[[float], object],
        on_committed: Callable[[Save], object],
        placing: Placing | None,
    ) -> None:
        """Prepare; `before_commit` makes a step's rows durable, by a limit."""
        self._commits = commits
        self._world_size = world_size
        self._link = link
        self._before_commit = before_commit
        self._on_committed = on_committed
        self._placing = placing
        self._description = Description()
        self.parent = parent  # save_id of the newest save that was sealed
        self._ancestors: tuple[str | None, ...] = (parent,)
        self._newest_here = parent  # save_id of the newest commit
        self.committed: tuple[Path, Manifest] | None = None  # the newest step directory of this launch

    def complete(
        self, save: Save, share: Share, given_up: GivenUp, placed: Placed, *, values: Values | None = None
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
        if drifts := compare({report.rank: report.replicas for report in reports}, share.groups):
            names = ", ".join(name for drift in drifts for name in drift.names)
            raise DriftError(f"ranks hold different values of {shorten(names)}: each is saved by the next save")
        own: dict[str, FileEntry] = {}  # that only rank 0 writes
        if values is not None and values.data:
            own[VALUES_NAME] = self._write_own(save, VALUES_NAME, values.data)
            reports.append(RankReport(rank=0, save_id=save.save_id, items=values.items))
        own[METADATA_NAME] = self._write_own(save, METADATA_NAME, self._description.of(save.save_id, share, reports))
        files = {name: entry for report in reports for name, entry in report.files.items()} | own
        summary = save.summary
        manifest = Manifest(
            step=summary.step,
            tokens=summary.tokens,
            world_size=self._world_size,
            created_at=datetime.now(UTC).isoformat(),
            save_id=save.save_id,
            parent=self.parent,
            files=dict(sorted(files.items())),
            state=summary.parts | self._led_here(),
            versions=versions(),
            conditions=conditions(),
            loss=summary.loss,
            metrics=summary.metrics,
        )
        if self._placing is None:
            self._commit(save, manifest)
        else:
            save.check()
            placed.files = {**placed.files, **own}
            placed.commit = lambda: self._commit(save, manifest)
            placed.give_up = lambda why: self._tell_failure(save, why)
            self._placing.seal(placed, manifest.files, seal(manifest))
        self.parent = save.save_id
        self._ancestors = (save.save_id, *self._ancestors[: ANCESTORS_MAX - 1])

    def _write_own(self, save: Save, name: str, data: bytes) -> FileEntry:
        """Write a file of rank 0 beside this rank's files: where their disk does not take it, to shared storage."""
        try:
            return _write_hashed(save, save.data / name, data)
        except OSError as error:
            if self._placing is None or save.local is None:
                raise
            self._placing.refused(save.summary.step, error)
        return _write_hashed(save, save.directory / name, data)

    def _led_here(self) -> dict[str, object]:
        """Return what a step of the nodes' disks is known by: the steps that led to it, which may never come here."""
        return {ANCESTORS: self._ancestors} if self._placing is not None else {}

    def _commit(self, save: Save, manifest: Manifest) -> None:
        """Commit what is complete on shared storage."""
        if self._placing is None:
            self._before_commit(save.limit_at)
            save.check()
        else:  # nobody waits for it, and nothing cancels it any more
            self._before_commit(time.time() + ROWS_WITHIN_S)
        final = self._commits.commit(save.directory, manifest, self._world_size, after=self._newest_here)
        self._newest_here = save.save_id
        self.committed = (final, manifest)
        self._tell(save, final, sum(entry.bytes for entry in manifest.files.values()))
        self._on_committed(save)

    def _tell_failure(self, save: Save, why: str) -> None:
        self._link.send(
            SaveFailed(step=save.summary.step, save_id=save.save_id, error=shorten(why), emergency=save.emergency),
            keep=True,
        )

    def _tell(self, save: Save, final: Path, size: int) -> None:
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
                by_disk=self._placing is not None,
            ),
            keep=True,
        )


def _write_hashed(save: Save, path: Path, data: bytes) -> FileEntry:
    file = HashingFile(path)
    try:
        file.write(data)
        file.close()
    except BaseException:
        file.abandon()
        raise
    assert file.entry is not None
    read_back(save, path.parent, {path.name: file.entry})
    return file.entry
