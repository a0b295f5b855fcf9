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

from stepkeeper_trainer.errors import SaveError
from stepkeeper_trainer.formats.manifest import Manifest
from stepkeeper_trainer.formats.plain import collection_paused
from stepkeeper_trainer.log import warn
from stepkeeper_trainer.save.commit import Commits, Completer
from stepkeeper_trainer.save.dcp_metadata import Encoder, skeletons
from stepkeeper_trainer.save.replicas import digest
from stepkeeper_trainer.save.report import GivenUp, Item, RankReport, encode_items, publish
from stepkeeper_trainer.save.save import Phase
from stepkeeper_trainer.save.writer import FilePlan, Written, in_threads, places_in_file, read_back, write_file
from stepkeeper_trainer.tiers.uploader import Upload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import msgspec
    import torch
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.save.planner import Planner, Share
    from stepkeeper_trainer.save.replicas import Hash
    from stepkeeper_trainer.save.save import Save
    from stepkeeper_trainer.save.staging import Staging
    from stepkeeper_trainer.tiers.uploader import Uploader


FILES_MAX = 4  # of a rank, written beside each other; more where they would be too large
FILE_BYTES_MIN = 64 * 1024 * 1024  # a share is split where each file still gets so much
FILE_BYTES_MAX = 4 * 1024 * 1024 * 1024  # about: what a copy to an object store sends again after it was interrupted


@dataclass(frozen=True, slots=True)
class ShareFiles:
    """The files of one rank's share, as they lie in the arena."""

    share: Share
    plans: tuple[FilePlan, ...]
    items: msgspec.Raw  # as reported


class FilePlanner:
    """Splits the share of one rank into files, and lays the arena out by them."""

    def __init__(self, rank: int, staging: Staging) -> None:
        """Begin with nothing laid out."""
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
            items += [_item(indices[piece.name], file, start, length) for piece, (start, length) in places]
        return ShareFiles(share, tuple(plans), encode_items(tuple(items)))


def _item(index: MetadataIndex, file: str, start: int, length: int) -> Item:
    offsets = None if index.offset is None else tuple(index.offset)
    return Item(index.fqn, offsets, index.index, file, start, length)


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
        on_committed: Callable[[Save], object] = lambda _save: None,
        uploader: Uploader | None = None,
        dcp_values: bool = True,
    ) -> None:
        """Prepare; `dcp_values`: numbers and text of the state are written for stock DCP too."""
        self._rank = rank
        self._staging = staging
        self._planner = planner
        self._uploader = uploader  # where the nodes' own disks come first
        self._files = FilePlanner(rank, staging)
        self._completer = Completer(
            commits=commits,
            world_size=world_size,
            link=link,
            parent=parent,
            before_commit=before_commit,
            on_committed=on_committed,
            uploader=uploader,
        )
        self._values = Encoder() if dcp_values else None
        self._hashes: dict[str, Hash | None] = {}  # of what others hold too, as the last save has it

    @property
    def parent(self) -> str | None:
        """save_id of the newest save that this run builds on (rank 0)."""
        return self._completer.parent

    @property
    def committed(self) -> tuple[Path, Manifest] | None:
        """The newest step directory of this launch, and its manifest (rank 0)."""
        return self._completer.committed

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
            read_back(save, save.data, {one.plan.name: one.entry for one in written})
        save.check()  # one that is late was given up, and has nowhere to report
        with save.doing(f"reporting in {save.directory}"):
            self._report(save, files, written)
        save.advance(Phase.REPORTED)
        upload = self._upload(save, written)
        if self._rank == 0:
            with save.doing(f"completing {save.directory}"):
                values = self._values.encode(skeletons(tensors)) if self._values is not None else None
                self._completer.complete(save, share, given_up, upload, values=values)
        if self._uploader is not None:
            self._uploader.written(upload, seconds)
        if not self._files.is_of(share):
            try:
                self._files.lay_out(share)
            except Exception as error:  # noqa: BLE001  # what is on disk is no less committed for it
                self._staging.signature = None
                warn("layout_failed", why=error)

    def _write(self, save: Save, files: ShareFiles) -> list[Written]:
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

    def _write_all(self, save: Save, files: ShareFiles) -> list[Written]:
        return in_threads([partial(self._write_one, save, plan) for plan in files.plans])

    def _write_one(self, save: Save, plan: FilePlan) -> Written:
        with save.doing(f"writing {save.data / plan.name}"):
            # In an emergency nothing trains beside, and what is read back soon is better in the page cache.
            return write_file(save.data, self._staging.arena.view, plan, save.check, direct=not save.emergency)

    def _upload(self, save: Save, written: list[Written]) -> Upload:
        return Upload(
            step=save.summary.step,
            save_id=save.save_id,
            directory=save.directory,
            files={one.plan.name: one.entry for one in written},
            is_local=save.local is not None,
        )

    def _report(self, save: Save, files: ShareFiles, written: list[Written]) -> None:
        self._hashes = {name: self._staging.hash_of(name) for name in files.share.replicas.names}
        digests = digest(files.share.replicas, self._hashes.get)
        publish(
            save.directory,
            RankReport(
                rank=self._rank,
                save_id=save.save_id,
                items=files.items,
                files={one.plan.name: one.entry for one in written},
                replicas=digests,
            ),
        )
