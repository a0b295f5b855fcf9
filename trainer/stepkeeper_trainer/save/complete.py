"""Rank 0 makes a save complete: all ranks' reports -> `.metadata` -> manifest -> commit -> told.

Where the nodes' own disks come first, the commit comes when the copies on shared storage are complete.

`.metadata` of a save, from the plan and what all ranks have written: the same bytes as last time, mostly.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING

import torch
import xxhash
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, StorageMeta

from stepkeeper_trainer.errors import DriftError, SaveError
from stepkeeper_trainer.formats.decoding import collection_paused
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, seal
from stepkeeper_trainer.formats.messages import Committed, SaveFailed, shorten
from stepkeeper_trainer.formats.metadata import METADATA_NAME
from stepkeeper_trainer.log import say
from stepkeeper_trainer.save.dcp_values import VALUES_NAME, Values
from stepkeeper_trainer.save.replicas import compare
from stepkeeper_trainer.save.report import GivenUp, RankReport, decode_items, gather
from stepkeeper_trainer.save.save import conditions, versions
from stepkeeper_trainer.save.writer import HashingFile, in_threads, read_back
from stepkeeper_trainer.tiers.search import ANCESTORS, ANCESTORS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.save.commit import Commits
    from stepkeeper_trainer.save.planner import Share
    from stepkeeper_trainer.save.save import Save
    from stepkeeper_trainer.tiers.uploader import Upload, Uploader


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
        uploader: Uploader | None,
        before_line: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare; `before_commit` makes a step's rows durable, by a limit; `before_line` precedes the lineage's."""
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
            state=summary.parts | self._led_here(),
            versions=versions(),
            conditions=conditions(),
            loss=summary.loss,
            metrics=summary.metrics,
        )
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

    def _write_own(self, save: Save, name: str, data: bytes) -> FileEntry:
        """Write a file of rank 0 beside this rank's files: where their disk does not take it, to shared storage."""
        try:
            return _write_hashed(save, save.data / name, data)
        except OSError as error:
            if self._uploader is None or save.local is None:
                raise
            self._uploader.refused(save.summary.step, error)
        return _write_hashed(save, save.directory / name, data)

    def _led_here(self) -> dict[str, object]:
        """Return what a step of the nodes' disks is known by: the steps that led to it, which may never come here."""
        return {ANCESTORS: self._ancestors} if self._uploader is not None else {}

    def _commit(self, save: Save, manifest: Manifest) -> None:
        """Commit what is complete on shared storage."""
        if self._uploader is None:
            self._before_commit(save.limit_at)
            save.check()
        else:  # nobody waits for it, and nothing cancels it any more
            self._before_commit(time.time() + ROWS_WITHIN_S)
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


_NO_SAVE_ID = "0" * 32  # in its place, until a save is known
_DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # of the format; an older torch names none


class Description:
    """Pickled once for a layout; only the save's name differs from save to save."""

    def __init__(self) -> None:
        self._made_from: tuple[object, ...] | None = None
        self._data = b""

    def of(self, save_id: str, share: Share, reports: list[RankReport]) -> bytes:
        """Return the bytes of `.metadata`.

        Raises:
            SaveError: what was written is not what was planned.
        """
        made_from = (share, *(xxhash.xxh3_128_digest(bytes(report.items)) for report in reports))
        if self._made_from is None or self._made_from[0] is not share or self._made_from != made_from:
            with collection_paused():
                self._data = _encode(share, reports)
            self._made_from = made_from
        return self._data.replace(_NO_SAVE_ID.encode(), save_id.encode())


def _encode(share: Share, reports: list[RankReport]) -> bytes:
    metadata = share.metadata
    assert metadata is not None, "rank 0 knows the whole"
    storage: dict[MetadataIndex, _StorageInfo] = {}
    places: dict[tuple[str, int, int], _StorageInfo] = {}  # equal values share one: `.metadata` holds it once
    written: set[tuple[str, tuple[int, ...] | None]] = set()
    entries, names = metadata.state_dict_metadata, metadata.planner_data
    for report in reports:
        for item in decode_items(report):
            if item.file == VALUES_NAME and item.name in entries:
                continue  # a tensor has that name already
            offset = None if item.offsets is None else torch.Size(item.offsets)
            place = (item.file, item.start, item.length)
            storage[MetadataIndex(item.name, offset, item.index)] = places.get(place) or places.setdefault(
                place, _StorageInfo(*place)
            )
            written.add((item.name, item.offsets))
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata) and (name, None) not in written:
            raise SaveError(f"nobody wrote {name}")
        for chunk in getattr(entry, "chunks", []):
            if (name, chunk.offsets) not in written and (name, None) not in written:
                raise SaveError(f"nobody wrote {name} at {tuple(chunk.offsets)}")
    values = [index.fqn for index in storage if index.fqn not in entries]
    whole = replace(
        metadata,
        state_dict_metadata=entries | dict.fromkeys(values, BytesStorageMetadata()),
        planner_data=names | {name: (name,) for name in values} if names is not None else None,
        storage_data=storage,
        storage_meta=StorageMeta(save_id=_NO_SAVE_ID),
    )
    if _DCP_VERSION is not None:
        whole.version = _DCP_VERSION
    data = pickle.dumps(whole)
    if data.count(_NO_SAVE_ID.encode()) != 1:
        raise SaveError(f"a tensor's name contains {_NO_SAVE_ID}")
    return data
