"""From the staging arena to a committed step directory: in the save's thread, beside training.

    plan (planner) -> files of this rank -> bytes (writer) -> report -> complete

What this rank writes, by file: how its share of the tensors is split, and where in the arena each file lies.  Only
what every rank does is here; rank 0 alone completes a save.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from stepkeeper_trainer.errors import DriftError, SaveError
from stepkeeper_trainer.formats.manifest import FileEntry, seal
from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.formats.plain import collection_paused
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.save.commit import Completer
from stepkeeper_trainer.save.dcp_metadata import Encoder, skeletons
from stepkeeper_trainer.save.replicas import digest
from stepkeeper_trainer.save.report import GivenUp, Item, RankReport, encode_items, publish
from stepkeeper_trainer.save.save import Phase
from stepkeeper_trainer.save.writer import FilePlan, in_threads, places_in_file, read_back, write_file
from stepkeeper_trainer.tiers.tier import TierError
from stepkeeper_trainer.tiers.uploader import Upload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from stepkeeper_trainer.save.dcp_metadata import Values
    from stepkeeper_trainer.save.planner import Planner, Share
    from stepkeeper_trainer.save.replicas import Hash
    from stepkeeper_trainer.save.save import Save
    from stepkeeper_trainer.save.staging import Staging
    from stepkeeper_trainer.tiers.memory import Snapshots
    from stepkeeper_trainer.tiers.uploader import Uploader


SAME = msgspec.Raw(b"null")  # items that rank 0 knows
FILES_MAX = 4  # of a rank, written beside each other; more where they would be too large
FILE_BYTES_MIN = 64 * 1024 * 1024  # a share is split where each file still gets so much
FILE_BYTES_MAX = 4 * 1024 * 1024 * 1024  # about: what a copy to an object store sends again after it was interrupted


@dataclass(frozen=True, slots=True)
class ShareFiles:
    """The files of one rank's share, as they lie in the arena."""

    share: Share
    plans: tuple[FilePlan, ...]
    items: msgspec.Raw  # as reported

    @property
    def bytes(self) -> int:
        """How much they take, about: gaps between neighbours are written too."""
        return sum(extent[5] - extent[0] for plan in self.plans for extent in plan.extents)


class FilePlanner:
    """Splits the share of one rank into files, and lays the arena out by them."""

    def __init__(self, rank: int, staging: Staging) -> None:
        self._rank = rank
        self._staging = staging
        self._files: ShareFiles | None = None
        self._by_file = False  # the arena is laid out by the files of the share in force

    def forget(self) -> None:
        """Take note that the arena was laid out anew: by the state's order, and not by file."""
        self._files, self._by_file = None, False

    def is_of(self, share: Share) -> bool:
        """Whether this share is the one that is laid out."""
        return self._by_file and self._files is not None and self._files.share is share

    def lay_out(self, share: Share) -> None:
        """Lay the arena out so that each file is one stretch of whole pages; no save may use it meanwhile.

        Raises:
            SaveError: something of the share is not staged.
            OSError: there is not enough memory.
        """
        self._files = None
        with collection_paused():
            self._staging.regroup(self._groups(share), share.replicas.names)
            self._files = self._divide(share)
        self._by_file = True

    def of(self, share: Share) -> ShareFiles:
        """Return the files of a share, as the arena is laid out now.

        Raises:
            SaveError: something of the share is not staged, since another rank's state has changed: the next save
                stages it.
        """
        if self._files is None or self._files.share is not share:
            self._by_file = False
            with collection_paused():
                self._files = self._divide(share)
        return self._files

    def _groups(self, share: Share) -> list[list[str]]:
        """Return the tensors of each file of this rank, and then small ones that are only compared."""
        groups = split_evenly(list(share.names), self._staging.size_of)
        others = share.replicas.names - set(share.names)
        return [*groups, sorted(others - self._staging.large(others))] if others else groups

    def _divide(self, share: Share) -> ShareFiles:
        """Say what is written from where.  Raises SaveError."""
        layout = self._staging.layout
        assert layout is not None
        indices = {index.fqn: index for index in share.items}
        plans: list[FilePlan] = []
        items: list[Item] = []
        for number, names in enumerate(split_evenly(list(share.names), self._staging.size_of)):
            file = f"__{self._rank}_{number}.distcp"
            try:
                pieces = sorted((layout.pieces[name] for name in names), key=lambda piece: piece.start)
            except KeyError as error:
                self._staging.signature = None
                raise SaveError(f"{error.args[0]} fell to this rank, which has not staged it") from None
            plan = FilePlan(file, tuple(piece.extent for piece in pieces))
            plans.append(plan)
            places = zip(pieces, places_in_file(plan.extents), strict=True)
            items += [Item.of(indices[piece.name], file, start, length) for piece, (start, length) in places]
        return ShareFiles(share, tuple(plans), encode_items(tuple(items)))


def split_evenly(names: list[str], size_of: Callable[[str], int]) -> list[list[str]]:
    """Split into files of about one size, in order; one file where there is not much."""
    sizes = [size_of(name) for name in names]
    total = sum(sizes)
    count = max(1, min(FILES_MAX, total // FILE_BYTES_MIN), -(-total // FILE_BYTES_MAX))
    groups: list[list[str]] = []
    at = 0
    for name, size in zip(names, sizes, strict=True):
        if not groups or (len(groups) < count and at >= total * len(groups) // count):
            groups.append([])
        groups[-1].append(name)
        at += size
    return groups


@dataclass(frozen=True, slots=True)
class _Answer:
    """What rank 0 tells all of a snapshot: its manifest, or why there is none."""

    manifest: bytes | None = None
    why: str = ""
    drifted: bool = False  # ranks hold different values under one name


class Persister:
    """Writes this rank's share of each save, and on rank 0 commits it."""

    def __init__(
        self,
        *,
        rank: int,
        staging: Staging,
        planner: Planner,
        completer: Completer,
        uploader: Uploader | None,
        snapshots: Snapshots | None,
        dcp_values: bool,
    ) -> None:
        """Prepare; `dcp_values`: numbers and text of the state are written for stock DCP too."""
        self._rank, self._staging, self._planner, self._completer = rank, staging, planner, completer
        self._uploader = uploader  # where the nodes' own disks come first
        self._snapshots = snapshots
        self._files = FilePlanner(rank, staging)
        self._values = Encoder() if dcp_values else None
        self._items_told: msgspec.Raw | None = None  # of this rank, to rank 0, by the newest snapshot
        self._items: dict[int, msgspec.Raw] = {}  # rank 0: what each rank has told
        self._hashes: dict[str, Hash | None] = {}  # of what others hold too, as the last save has it

    def forget(self) -> None:
        """The arena was laid out anew: by the state's order, and not by file."""
        self._files.forget()

    def prepare(self, tensors: Mapping[str, torch.Tensor], within_s: float, *, compare: bool = False) -> None:
        """Agree on the shares and lay the arena out by file, before the first save.

        With `compare` the values of the save before tell which ranks hold different ones.

        Raises:
            SaveError, RuntimeError, StateError, OSError: it is tried again by the save itself.
        """
        changed = compare or not self._staging.fits(tensors)
        share = self._planner.agree(
            tensors, changed=changed, problem=None, within_s=within_s, contents=self._hashes if compare else {}
        )
        if changed or not self._files.is_of(share):
            self._staging.take(tensors)
            self._files.lay_out(share)
        if self._snapshots is not None:
            self._snapshots.expect(self._files.of(share).bytes)

    def persist(
        self,
        save: Save,
        tensors: Mapping[str, torch.Tensor],
        *,
        changed: bool,
        given_up: GivenUp,
    ) -> None:
        """Write, report, and on rank 0 commit.

        Raises:
            SaveError, SupersededError, OSError, RuntimeError: the save came to nothing.
        """
        self._staging.finish()
        within_s = save.limit_at - time.time()
        with save.doing("agreeing with the other ranks"):
            share = self._planner.agree(tensors, changed=changed, problem=None, within_s=within_s)
        files = self._files.of(share)
        began = time.monotonic()
        written = self._write(save, files)
        seconds = time.monotonic() - began
        with save.doing(f"reading back what is in {save.data}"):
            read_back(save, save.data, written)
        save.check()  # one that is late was given up, and has nowhere to report
        with save.doing(f"reporting in {save.directory}"):
            self._report(save, files, written)
        save.advance(Phase.REPORTED)
        upload = self._upload(save, written)
        if self._rank == 0:
            with save.doing(f"completing {save.directory}"):
                self._completer.complete(save, share, given_up, upload, values=self._encode(tensors))
        if self._uploader is not None:
            self._uploader.written(upload, seconds)
        self._lay_out(share)

    def hold(self, save: Save, tensors: Mapping[str, torch.Tensor], *, changed: bool) -> None:
        """Have a snapshot held in the memory of all nodes: the ranks tell each other, and shared storage has no part.

        A rank that cannot go on takes part to the end, so that no other waits for it.

        Raises:
            SaveError, TierError, OSError, RuntimeError: the snapshot came to nothing.
        """
        assert self._snapshots is not None, "no snapshot is begun without"
        self._staging.finish()
        share = self._planner.agree(tensors, changed=changed, problem=None, within_s=save.limit_at - time.time())
        problem: Exception | None = None
        hashes: dict[str, Hash | None] = {}
        try:
            files = self._files.of(share)
            self._snapshots.expect(files.bytes)
            save.local = self._snapshots.begin(save.summary.step, save.save_id)
            written = self._write_all(save, files)
            hashes = self._hash(files)
            report = self._report_of(save, files, written, hashes)
        except Exception as error:  # noqa: BLE001  # raised below, when the others know
            problem = error
            report = RankReport(rank=self._rank, save_id=save.save_id, error=shorten(str(error)))
        reports = self._gather(report)
        answer = _Answer()
        if reports is not None:
            try:
                manifest = self._completer.describe_snapshot(save, share, reports, values=self._encode(tensors))
                answer = _Answer(seal(manifest))
            except Exception as error:  # noqa: BLE001  # the same
                problem = problem or error
                answer = _Answer(why=str(error) or type(error).__name__, drifted=isinstance(error, DriftError))
        answer = self._planner.share_out(answer)
        self._items_told = report.items  # rank 0 has answered: it has them
        if answer.manifest is not None or answer.drifted:
            self._hashes = hashes  # every rank has those of this step
        if answer.manifest is None:
            raise problem or SaveError(answer.why)
        try:
            self._snapshots.commit(answer.manifest)
        except (OSError, TierError) as error:
            problem = error
        try:
            self._planner.confirm(str(problem) if problem is not None else None, save.limit_at - time.time())
        except SaveError as error:
            raise problem or error from None
        self._snapshots.held()
        save.advance(Phase.REPORTED)
        save.advance(Phase.COMMITTED)
        self._lay_out(share)

    def _gather(self, report: RankReport) -> list[RankReport] | None:
        """Return all ranks' reports, on rank 0: what they said of their items before is not sent again."""
        known = report.items is self._items_told
        received = self._planner.gather(msgspec.structs.replace(report, items=SAME) if known else report)
        if received is None:
            return None
        self._items.update({each.rank: each.items for each in received if each.items != SAME})
        return [msgspec.structs.replace(each, items=self._items[each.rank]) for each in received]

    def give_back(self, save: Save, error: BaseException) -> None:
        """Give back what this rank has written of a snapshot that came to nothing."""
        assert self._snapshots is not None
        self._snapshots.failed(save.summary.step, save.save_id, error)

    def _lay_out(self, share: Share) -> None:
        """Lay the arena out by file, where the save has found another share than was laid out."""
        if not self._files.is_of(share):
            try:
                self._files.lay_out(share)
            except Exception as error:  # noqa: BLE001  # what is saved is no less so for it
                self._staging.signature = None
                warn("layout_failed", why=error)

    def _encode(self, tensors: Mapping[str, torch.Tensor]) -> Values | None:
        return self._values.encode(skeletons(tensors)) if self._values is not None else None

    def _write(self, save: Save, files: ShareFiles) -> dict[str, FileEntry]:
        """Write this rank's files: to the node's own disk where there is one and it takes them."""
        if self._uploader is not None:
            left_s = save.limit_at - time.time()
            save.local = self._uploader.begin(save.summary.step, save.save_id, leaving=save.emergency, left_s=left_s)
        try:
            return self._write_all(save, files)
        except OSError as error:
            if self._uploader is None or save.local is None:
                raise
            save.check()  # one that was given up has lost its directory
            self._uploader.refused(save.summary.step, error)
            self._uploader.forget(save.summary.step, save.save_id)
            save.local = None  # to shared storage from now on
        return self._write_all(save, files)

    def _write_all(self, save: Save, files: ShareFiles) -> dict[str, FileEntry]:
        entries = in_threads([partial(self._write_one, save, plan) for plan in files.plans])
        return {plan.name: entry for plan, entry in zip(files.plans, entries, strict=True)}

    def _write_one(self, save: Save, plan: FilePlan) -> FileEntry:
        with save.doing(f"writing {save.data / plan.name}"):
            # In an emergency nothing trains beside, and what is read back soon is better in the page cache.
            return write_file(save.data, self._staging.arena.view, plan, save.check, direct=not save.emergency)

    def _upload(self, save: Save, written: dict[str, FileEntry]) -> Upload:
        return Upload(
            step=save.summary.step,
            save_id=save.save_id,
            directory=save.directory,
            files=written,
            is_local=save.local is not None,
        )

    def _report(self, save: Save, files: ShareFiles, written: dict[str, FileEntry]) -> None:
        self._hashes = self._hash(files)
        publish(save.directory, self._report_of(save, files, written, self._hashes))

    def _hash(self, files: ShareFiles) -> dict[str, Hash | None]:
        return {name: self._staging.hash_of(name) for name in files.share.replicas.names}

    def _report_of(
        self, save: Save, files: ShareFiles, written: dict[str, FileEntry], hashes: Mapping[str, Hash | None]
    ) -> RankReport:
        return RankReport(
            rank=self._rank,
            save_id=save.save_id,
            items=files.items,
            files=written,
            replicas=digest(files.share.replicas, hashes.get),
        )
