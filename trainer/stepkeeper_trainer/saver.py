"""One save at a time: staged at a step boundary, then written and committed by a thread beside training.

Never two in flight; a failure is said and leaves training alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from stepkeeper_trainer.conditions import conditions, versions
from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.manifest import Manifest
from stepkeeper_trainer.formats.messages import Committed, SaveFailed, SaveStarted, shorten
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.planner import CollectivePlanner
from stepkeeper_trainer.reader import root_cause
from stepkeeper_trainer.report import Item, RankReport, gather, publish, publish_failure
from stepkeeper_trainer.writer import StepWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from stepkeeper_trainer.commit import Commits
    from stepkeeper_trainer.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the manifest says of the state that is saved."""

    step: int
    tokens: int
    loss: float | None
    parts: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Save:
    """One save; its outcome is known once `settled` is set."""

    sequence: int
    save_id: str
    summary: Summary
    emergency: bool
    requested_at: float  # Unix seconds
    limit_at: float  # Unix seconds
    directory: Path
    settled: threading.Event = field(default_factory=threading.Event)
    error: str | None = None


class Saver:
    """Starts saves and knows how they ended; on rank 0 it also commits them."""

    def __init__(
        self,
        *,
        commits: Commits,
        rank: int,
        world_size: int,
        group: Any | None,
        link: Link,
        nonce: str,
        parent: str | None,
        limit_s: float,
        before_commit: Callable[[float], object],
    ) -> None:
        """Prepare; `nonce` is the same on all ranks, `before_commit` makes a step's rows durable, by a limit."""
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # our planner sees to it
        self._commits = commits
        self._rank, self._world_size, self._group = rank, world_size, group
        self._link = link
        self._nonce = nonce
        self._limit_s = limit_s
        self._before_commit = before_commit
        self._planner = CollectivePlanner(rank=rank, world_size=world_size, group=group)
        cuda = torch.cuda.is_available()
        self._stager = DefaultStager(StagingOptions(cuda, False, False, cuda))  # noqa: FBT003
        self._failed_elsewhere = 0
        self.parent = parent  # save_id of the newest commit that this run builds on
        self.last: Save | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self.last is not None and not self.last.settled.is_set()

    @property
    def failed_save(self) -> int:
        """Sequence number of the last save, if it came to nothing on this rank."""
        last = self.last
        return last.sequence if last is not None and last.settled.is_set() and last.error is not None else 0

    @property
    def sequence(self) -> int:
        """Sequence number of the newest save that was begun; 0 before the first."""
        return self.last.sequence if self.last is not None else 0

    def hear_failure(self, sequence: int) -> None:
        """Take note that a save came to nothing on some rank, so that rank 0 does not wait for it."""
        self._failed_elsewhere = max(self._failed_elsewhere, sequence)

    def start(
        self,
        tensors: dict[str, torch.Tensor],
        summary: Summary,
        *,
        sequence: int,
        emergency: bool = False,
        requested_at: float | None = None,
        deadline_at: float | None = None,
    ) -> Save:
        """Copy the state and begin to write it, on all ranks at the same boundary.

        All ranks give the same `sequence`, higher than any before: the save's name comes from it.
        Whatever goes wrong is an outcome of the save: nothing is raised for it.
        """
        assert not self.busy, "never two saves in flight"
        now = time.time()
        save_id = hashlib.blake2b(f"{self._nonce}/{sequence}".encode(), digest_size=16).hexdigest()
        save = Save(
            sequence=sequence,
            save_id=save_id,
            summary=summary,
            emergency=emergency,
            requested_at=requested_at or now,
            limit_at=min(now + self._limit_s, deadline_at or now + self._limit_s),
            directory=self._commits.in_flight(summary.step, save_id),
        )
        self.last = save
        if self._rank == 0:
            self._link.send(SaveStarted(step=summary.step, save_id=save_id, emergency=emergency), keep=True)
        writer = StepWriter(
            save.directory,
            rank=self._rank,
            save_id=save_id,
            prepare=lambda: self._make_directory(save.directory),
            on_written=lambda writer, metadata, written: self._written(save, writer, metadata, written),
        )
        self._planner.problem = lambda: writer.problem
        try:
            future = async_save(
                cast("dict[str, Any]", tensors),
                storage_writer=writer,
                planner=self._planner,
                process_group=self._group,
                async_stager=self._stager,
                no_dist=True,  # planner and reports bring the ranks together: a dead one stops no commit
            )
        except (Exception, CheckpointException) as error:  # noqa: BLE001  # torch's; training must go on
            threading.Thread(target=self._planner.decline, daemon=True).start()
            self._settle(save, error)
            return save
        say(
            "save_started",
            step=summary.step,
            save_id=save_id,
            emergency=emergency,
            blocked_s=round(time.time() - now, 4),
        )
        cast("Future[Any]", future).add_done_callback(lambda done: self._settle(save, done.exception()))
        return save

    def wait(self, limit_at: float) -> bool:
        """Wait for the save in flight until `limit_at` (Unix seconds); true unless it failed or is late."""
        last = self.last
        if last is None:
            return True
        last.settled.wait(max(0.0, limit_at - time.time()))
        return last.settled.is_set() and last.error is None

    def _make_directory(self, directory: Path) -> None:
        os.makedirs(directory, exist_ok=True)  # the run directory keeps others out
        if self._rank == 0:
            self._commits.claim(directory)

    def _written(self, save: Save, writer: StepWriter, metadata: Metadata, written: list[WriteResult]) -> None:
        """Report this rank's share; on rank 0 gather all and commit.  In the save's thread."""
        items = tuple(_item(result) for result in written)
        publish(
            save.directory,
            RankReport(rank=self._rank, save_id=save.save_id, items=items, files=dict(writer.files.entries)),
        )
        if self._rank != 0:
            return
        reports = gather(
            save.directory,
            save_id=save.save_id,
            world_size=self._world_size,
            limit_at=save.limit_at,
            given_up=lambda: "another rank could not write" if self._failed_elsewhere >= save.sequence else None,
        )
        _check_coverage(metadata, reports)
        writer.write_metadata(metadata, [[_result(item) for item in report.items] for report in reports])
        files = {name: entry for report in reports for name, entry in report.files.items()}
        files |= writer.files.entries
        summary = save.summary
        manifest = Manifest(
            step=summary.step,
            tokens=summary.tokens,
            world_size=self._world_size,
            created_at=datetime.now(UTC).isoformat(),
            save_id=save.save_id,
            parent=self.parent,
            files=dict(sorted(files.items())),
            state=summary.parts,
            versions=versions(),
            conditions=conditions(),
            loss=summary.loss,
        )
        self._before_commit(save.limit_at)
        final = self._commits.commit(save.directory, manifest, self._world_size)
        self.parent = save.save_id
        seconds = time.time() - save.requested_at
        size = sum(entry.bytes for entry in files.values())
        say("committed", step=summary.step, directory=final.name, bytes=size, seconds=round(seconds, 3))
        self._link.send(
            Committed(
                step=summary.step,
                save_id=save.save_id,
                directory=final.name,
                bytes=size,
                seconds=round(seconds, 3),
                emergency=save.emergency,
            ),
            keep=True,
        )

    def _settle(self, save: Save, error: BaseException | None) -> None:
        """Record how a save ended, and tell who waits for it."""
        try:
            if error is not None:
                save.error = shorten(root_cause(error))
                self._tell_failure(save)
        finally:
            save.settled.set()

    def _tell_failure(self, save: Save) -> None:
        assert save.error is not None
        warn("save_failed", step=save.summary.step, save_id=save.save_id, rank=self._rank, why=save.error)
        if self._rank == 0:
            self._link.send(
                SaveFailed(step=save.summary.step, save_id=save.save_id, error=save.error, emergency=save.emergency),
                keep=True,
            )
            shutil.rmtree(save.directory, ignore_errors=True)  # gives the space back; nothing of it counts
            return
        with contextlib.suppress(OSError):  # rank 0 hears of it at the next boundary
            report = RankReport(rank=self._rank, save_id=save.save_id, error=save.error)
            publish_failure(save.directory, report)


def _item(result: WriteResult) -> Item:
    offset = None if result.index.offset is None else tuple(result.index.offset)
    info = result.storage_data
    return Item(result.index.fqn, offset, result.index.index, info.relative_path, info.offset, info.length)


def _result(item: Item) -> WriteResult:
    offset = None if item.offsets is None else torch.Size(item.offsets)
    return WriteResult(
        index=MetadataIndex(item.name, offset, item.index),
        size_in_bytes=item.length,
        storage_data=_StorageInfo(item.file, item.start, item.length),
    )


def _check_coverage(metadata: Metadata, reports: list[RankReport]) -> None:
    """Refuse a save that lacks a chunk of a tensor: planned by all must equal written by all."""
    written = {(item.name, item.offsets or ()) for report in reports for item in report.items}
    for name, entry in metadata.state_dict_metadata.items():
        for chunk in getattr(entry, "chunks", []):
            offsets = tuple(chunk.offsets)
            if (name, offsets) not in written and (offsets.count(0) != len(offsets) or (name, ()) not in written):
                raise SaveError(f"nobody wrote {name} at {offsets}")
