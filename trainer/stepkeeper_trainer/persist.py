"""From the staging arena to a committed step directory: in the save's thread, beside training."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from stepkeeper_trainer.conditions import conditions, versions
from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.collecting import paused
from stepkeeper_trainer.formats.manifest import FileEntry, Manifest, ManifestError, seal
from stepkeeper_trainer.formats.messages import Committed, SaveFailed, shorten
from stepkeeper_trainer.formats.steps import read_manifest, step_name
from stepkeeper_trainer.incremental import History, Links
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.replicas import Drift, compare, digest
from stepkeeper_trainer.report import Item, RankReport, decode_items, encode_items, gather, publish
from stepkeeper_trainer.tiers.gathering import ANCESTORS, ANCESTORS_MAX
from stepkeeper_trainer.tiers.placing import Placed
from stepkeeper_trainer.writer import HashingFile, Sheet, Written, digest_sheet, extents, in_threads, write_sheet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import msgspec

    from stepkeeper_trainer.commit import Commits
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.planner import Planner, Share
    from stepkeeper_trainer.saver import Save
    from stepkeeper_trainer.staging import Piece, Staging
    from stepkeeper_trainer.tiers.placing import Placing

METADATA_NAME = ".metadata"
FILES_MAX = 4  # hot ones of a rank, written beside each other
FILE_BYTES_MIN = 64 * 1024 * 1024  # a share is split where each file still gets so much
ROWS_WITHIN_S = 60.0  # the rows of a step are durable, before a commit that nobody waits for
_COLD_FIRST = 100  # cold files are numbered from here
_NO_SAVE_ID = "0" * 32


@dataclass(frozen=True, slots=True)
class _Sheets:
    """The files of a share, as they lie in the arena."""

    share: Share
    sheets: tuple[Sheet, ...]
    shuffle: tuple[int, ...]  # where in the sheets each tensor of the share is, counted through
    items: msgspec.Raw  # as reported


class Persister:
    """Writes this rank's share of each save, and on rank 0 commits it."""

    def __init__(
        self,
        *,
        commits: Commits,
        rank: int,
        world_size: int,
        link: Link,
        parent: str | None,
        staging: Staging,
        planner: Planner,
        before_commit: Callable[[float], object],
        check_replicas: bool,
        on_committed: Callable[[Save], object] = lambda _save: None,
        placing: Placing | None = None,
    ) -> None:
        self._commits = commits
        self._rank, self._world_size = rank, world_size
        self._link = link
        self._staging = staging
        self._planner = planner
        self._before_commit = before_commit
        self._check_replicas = check_replicas
        self._on_committed = on_committed
        self._placing = placing  # where the nodes' own disks come first
        self._sheets: _Sheets | None = None
        self._by_file = False  # the arena is laid out by the files of the share in force
        self._history: History | None = None  # of the share in force
        self._cold_numbers: dict[tuple[int, ...], int] = {}
        self._links = Links()
        self._before: tuple[int, str] | None = None  # step and save_id of the last save that this rank reported
        self._metadata: tuple[tuple[object, ...], bytes] | None = None  # what it was made from, and `.metadata`
        self.parent = parent
        self._ancestors: tuple[str | None, ...] = (parent,)
        self._newest_here = parent  # save_id of the newest commit
        self.committed: tuple[Path, Manifest] | None = None  # the newest step directory of this launch (rank 0)

    def forget(self) -> None:
        """The arena was laid out anew: by the state's order, and not by file."""
        self._sheets, self._by_file = None, False

    def prepare(self, tensors: Mapping[str, torch.Tensor], within_s: float) -> None:
        """Agree on the shares and lay the arena out by file, before the first save.

        Raises:
            SaveError, RuntimeError, StateError, OSError: it is tried again by the save itself.
        """
        changed = not self._staging.fits(tensors)
        share = self._planner.agree(tensors, changed=changed, problem=None, within_s=within_s)
        if changed or self._sheets is None or self._sheets.share is not share:
            self._history = None
            self._staging.take(tensors)
            self._lay_out(share)

    def persist(
        self,
        save: Save,
        tensors: Mapping[str, torch.Tensor],
        *,
        changed: bool,
        given_up: Callable[[], str | None],
    ) -> None:
        """Write, report, and on rank 0 commit.

        Raises:
            SaveError, SupersededError, OSError, RuntimeError: the save came to nothing.
        """
        self._staging.finish()
        within_s = save.limit_at - time.time()
        share = self._planner.agree(tensors, changed=changed, problem=None, within_s=within_s)
        if self._sheets is None or self._sheets.share is not share:
            self._by_file = False
            self._sheets = self._divide(share)
            self._history = None
        sheets = self._sheets
        began = time.monotonic()
        written = self._write(save, sheets)
        seconds = time.monotonic() - began
        self._report(save, sheets, written)
        placed = self._placed(save, written)
        if self._rank == 0:
            self._commit(save, share, given_up, placed)
        if self._placing is not None:
            self._placing.written(placed, seconds)
        self._before = (save.summary.step, save.save_id)
        try:
            self._learn(share, written)
        except OSError as error:  # memory: what is on disk is no less committed for it
            self._staging.signature = None
            warn("regroup_failed", why=error)

    # --- what goes where -------------------------------------------------------------------------------

    def _groups(self, share: Share) -> list[list[str]]:
        """Return the tensors of each file of this rank, and then those that are only compared."""
        names = list(share.names)
        history = self._history
        hot = [names[number] for number in history.hot] if history is not None else names
        groups = _split_evenly(hot, self._staging.size_of)
        if history is not None:
            groups += [[names[number] for number in group] for group in history.groups]
        own = set(names)
        others = share.replicas.names - own if self._check_replicas else frozenset()
        if others:
            groups.append(sorted(others))
        return groups

    def _divide(self, share: Share) -> _Sheets:
        """Say what is written from where.

        Raises:
            SaveError: something of the share is not staged, since another rank's state has changed: the next save
                stages it.
        """
        layout = self._staging.layout
        assert layout is not None
        try:
            pieces = [layout.pieces[name] for name in share.names]
        except KeyError as error:
            self._staging.signature = None
            raise SaveError(f"{error.args[0]} fell to this rank, which has not staged it") from None
        place = {piece.name: number for number, piece in enumerate(pieces)}
        history = self._history
        cold = [tuple(group) for group in history.groups] if history is not None else []
        known = {number for group in cold for number in group}
        hot = [piece for number, piece in enumerate(pieces) if number not in known]
        files: list[tuple[str, list[Piece], bool]] = []
        for number, names in enumerate(_split_evenly([piece.name for piece in hot], self._staging.size_of)):
            files.append((f"__{self._rank}_{number}.distcp", [pieces[place[name]] for name in names], False))
        for group in cold:
            number = self._cold_numbers.setdefault(group, _COLD_FIRST + len(self._cold_numbers))
            files.append((f"__{self._rank}_{number}.distcp", [pieces[n] for n in group], True))
        indices = {index.fqn: index for index in share.items}
        sheets: list[Sheet] = []
        items: list[Item] = []
        for file, own, is_cold in files:
            own.sort(key=lambda piece: piece.start)
            marks = tuple(piece.mark for piece in own)
            sheets.append(Sheet(file, marks, is_cold))
            lies = zip(own, extents(marks), strict=True)
            items += [_item(indices[piece.name], file, start, length) for piece, (start, length) in lies]
        lies_at = {piece.name: number for number, piece in enumerate(p for _, own, _ in files for p in own)}
        shuffle = tuple(lies_at[name] for name in share.names)
        return _Sheets(share, tuple(sheets), shuffle, encode_items(tuple(items)))

    def _learn(self, share: Share, written: list[Written]) -> None:
        """Take note of what changes, and lay the arena out by it while nobody uses it."""
        assert self._sheets is not None
        crcs = list(itertools.chain.from_iterable(one.crcs for one in written))
        if self._history is None:
            self._history = History([self._staging.size_of(name) for name in share.names])
        if not self._history.observe([crcs[number] for number in self._sheets.shuffle]) and self._by_file:
            return
        self._lay_out(share)

    def _lay_out(self, share: Share) -> None:
        """Lay the arena out by file, so that each is one stretch of whole pages."""
        self._sheets = None
        self._staging.regroup(self._groups(share))
        self._sheets = self._divide(share)
        self._by_file = True

    # --- bytes -----------------------------------------------------------------------------------------

    def _write(self, save: Save, sheets: _Sheets) -> list[Written]:
        """Write this rank's files: to the node's own disk where there is one and it takes them."""
        jobs = [partial(self._bring, save, sheet) for sheet in sheets.sheets]
        if self._placing is not None:
            left_s = save.limit_at - time.time()
            save.local = self._placing.begin(save.summary.step, save.save_id, leaving=save.emergency, left_s=left_s)
        try:
            return in_threads(jobs)
        except OSError as error:
            if self._placing is None or save.local is None:
                raise
            self._placing.refused(save.summary.step, error)
            self._forget_local(save, [sheet.name for sheet in sheets.sheets])
        return in_threads(jobs)

    def _forget_local(self, save: Save, names: list[str]) -> None:
        """Give the node's disk back what it has of this rank, and write to shared storage from now on."""
        directory, save.local = save.local, None
        for name in names:
            with contextlib.suppress(OSError):  # the disk has failed: it is cleared at the next start
                if directory is not None:
                    (directory / name).unlink(missing_ok=True)

    def _placed(self, save: Save, written: list[Written]) -> Placed:
        return Placed(
            step=save.summary.step,
            save_id=save.save_id,
            directory=save.directory,
            files={one.sheet.name: one.entry for one in written},
            is_local=save.local is not None,
        )

    def _bring(self, save: Save, sheet: Sheet) -> Written:
        """Bring one file to disk: by a link where the step before has the same, else by writing it."""
        source = self._source(save, sheet) if sheet.cold else None
        if source is not None:
            path, entry = source
            own, crcs = digest_sheet(self._staging.arena.view, sheet, save.check)
            if own == entry and self._links.link(path, save.data / sheet.name, own):
                return Written(sheet, own, crcs, linked=True)
        # In an emergency nothing trains beside, and what is read back soon is better in the page cache.
        return write_sheet(save.data, self._staging.arena.view, sheet, save.check, direct=not save.emergency)

    def _source(self, save: Save, sheet: Sheet) -> tuple[Path, FileEntry] | None:
        """Return the file of that name in the step before, if this run has committed it."""
        if self._before is None:
            return None
        step, save_id = self._before
        for name in (f"{step_name(step)}.{save_id[:8]}", step_name(step)):
            directory = save.data.parent / name
            try:
                manifest = read_manifest(directory)
            except (ManifestError, OSError):
                continue  # never committed, or gone: then everything is written
            entry = manifest.files.get(sheet.name)
            if manifest.save_id == save_id and entry is not None:
                return directory / sheet.name, entry
        return None

    def _report(self, save: Save, sheets: _Sheets, written: list[Written]) -> None:
        digests = digest(sheets.share.replicas, self._staged) if self._check_replicas else ()
        publish(
            save.directory,
            RankReport(
                rank=self._rank,
                save_id=save.save_id,
                items=sheets.items,
                files={one.sheet.name: one.entry for one in written},
                replicas=digests,
            ),
        )
        linked = sum(one.entry.bytes for one in written if one.linked)
        if linked:
            say("linked", step=save.summary.step, rank=self._rank, bytes=linked)

    def _staged(self, name: str) -> memoryview | None:
        assert self._staging.layout is not None
        piece = self._staging.layout.pieces.get(name)
        return None if piece is None else self._staging.arena.view[piece.data : piece.tail]

    # --- rank 0 ----------------------------------------------------------------------------------------

    def _commit(self, save: Save, share: Share, given_up: Callable[[], str | None], placed: Placed) -> None:
        reports = gather(
            save.directory,
            save_id=save.save_id,
            world_size=self._world_size,
            limit_at=save.limit_at,
            given_up=given_up,
        )
        drifts = compare({report.rank: report.replicas for report in reports}, share.groups)
        metadata = self._write_metadata(save, self._metadata_of(save, share, reports))
        files = {name: entry for report in reports for name, entry in report.files.items()}
        files[METADATA_NAME] = metadata
        summary = save.summary
        drifted = sorted({name for drift in drifts for name in drift.names})
        manifest = Manifest(
            step=summary.step,
            tokens=summary.tokens,
            world_size=self._world_size,
            created_at=datetime.now(UTC).isoformat(),
            save_id=save.save_id,
            parent=self.parent,
            files=dict(sorted(files.items())),
            state=summary.parts | ({"drift": drifted[:100]} if drifted else {}) | self._led_here(),
            versions=versions(),
            conditions=conditions(),
            loss=summary.loss,
            metrics=summary.metrics,
        )
        if self._placing is None:
            self._complete(save, manifest, drifts)
        else:
            save.check()
            placed.files = {**placed.files, METADATA_NAME: metadata}
            placed.commit = lambda: self._complete(save, manifest, drifts)
            placed.give_up = lambda why: self._tell_failure(save, why)
            self._placing.seal(save.directory, seal(manifest))
        self.parent = save.save_id
        self._ancestors = (save.save_id, *self._ancestors[: ANCESTORS_MAX - 1])

    def _write_metadata(self, save: Save, data: bytes) -> FileEntry:
        """Write `.metadata` beside this rank's files: where their disk does not take it, to shared storage."""
        try:
            return _write_hashed(save.data / METADATA_NAME, data)
        except OSError as error:
            if self._placing is None or save.local is None:
                raise
            self._placing.refused(save.summary.step, error)
        return _write_hashed(save.directory / METADATA_NAME, data)

    def _led_here(self) -> dict[str, object]:
        """Return what a step of the nodes' disks is known by: the steps that led to it, which may never come here."""
        return {ANCESTORS: self._ancestors} if self._placing is not None else {}

    def _complete(self, save: Save, manifest: Manifest, drifts: list[Drift]) -> None:
        """Commit what is complete on shared storage."""
        if self._placing is None:
            self._before_commit(save.limit_at)
            save.check()
        else:  # nobody waits for it, and nothing cancels it any more
            self._before_commit(time.time() + ROWS_WITHIN_S)
        final = self._commits.commit(save.directory, manifest, self._world_size, after=self._newest_here)
        self._newest_here = save.save_id
        self.committed = (final, manifest)
        self._tell(save, final, sum(entry.bytes for entry in manifest.files.values()), drifts)
        self._on_committed(save)

    def _tell_failure(self, save: Save, why: str) -> None:
        self._link.send(
            SaveFailed(step=save.summary.step, save_id=save.save_id, error=shorten(why), emergency=save.emergency),
            keep=True,
        )

    def _tell(self, save: Save, final: Path, size: int, drifts: list[Drift]) -> None:
        step, seconds = save.summary.step, round(time.time() - save.requested_at, 3)
        for drift in drifts[:10]:
            warn(
                "replicas_differ",
                step=step,
                tensors=shorten(", ".join(drift.names)),
                ranks=",".join(map(str, drift.ranks[:16])),
                why="ranks that hold the same tensor hold other bytes: a device may compute wrongly",
            )
        say("committed", step=step, directory=final.name, bytes=size, seconds=seconds)
        self._link.send(
            Committed(
                step=step,
                save_id=save.save_id,
                directory=final.name,
                bytes=size,
                seconds=seconds,
                emergency=save.emergency,
                drift=shorten(", ".join(name for drift in drifts for name in drift.names)),
            ),
            keep=True,
        )

    def _metadata_of(self, save: Save, share: Share, reports: list[RankReport]) -> bytes:
        """Return the bytes of `.metadata`: the same as at the last save but for the save's name, mostly.

        Raises:
            SaveError: what was written is not what was planned.
        """
        made_from = (share, *(xxhash.xxh3_128_digest(bytes(report.items)) for report in reports))
        if self._metadata is None or self._metadata[0][0] is not share or self._metadata[0] != made_from:
            with paused():
                self._metadata = (made_from, _encode_metadata(share, reports))
        return self._metadata[1].replace(_NO_SAVE_ID.encode(), save.save_id.encode())


def _write_hashed(path: Path, data: bytes) -> FileEntry:
    file = HashingFile(path)
    try:
        file.write(data)
        file.close()
    except BaseException:
        file.abandon()
        raise
    assert file.entry is not None
    return file.entry


def _encode_metadata(share: Share, reports: list[RankReport]) -> bytes:
    metadata = share.metadata
    assert metadata is not None, "rank 0 knows the whole"
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for report in reports:
        for item in decode_items(report):
            offset = None if item.offsets is None else torch.Size(item.offsets)
            storage[MetadataIndex(item.name, offset, item.index)] = _StorageInfo(item.file, item.start, item.length)
    for name, entry in metadata.state_dict_metadata.items():
        for chunk in getattr(entry, "chunks", []):
            if MetadataIndex(name, chunk.offsets) not in storage and MetadataIndex(name) not in storage:
                raise SaveError(f"nobody wrote {name} at {tuple(chunk.offsets)}")
    whole = replace(
        metadata,
        storage_data=storage,
        storage_meta=StorageMeta(save_id=_NO_SAVE_ID),
        version=CURRENT_DCP_VERSION,
    )
    data = pickle.dumps(whole)
    if data.count(_NO_SAVE_ID.encode()) != 1:
        raise SaveError(f"a tensor's name contains {_NO_SAVE_ID}")
    return data


def _item(index: MetadataIndex, file: str, start: int, length: int) -> Item:
    offsets = None if index.offset is None else tuple(index.offset)
    return Item(index.fqn, offsets, index.index, file, start, length)


def _split_evenly(names: list[str], size_of: Callable[[str], int]) -> list[list[str]]:
    """Split into files of about one size, in order; one file where there is not much."""
    total = sum(map(size_of, names))
    count = max(1, min(FILES_MAX, total // FILE_BYTES_MIN))
    groups: list[list[str]] = []
    at = 0
    for name in names:
        if not groups or (len(groups) < count and at >= total * len(groups) // count):
            groups.append([])
        groups[-1].append(name)
        at += size_of(name)
    return groups
