"""From the staging arena to a committed step directory: in the save's thread, beside training.

    plan (planner) -> files of this rank (dividing) -> bytes (writer, incremental) -> report -> complete (completing)

Only what every rank does is here; rank 0 alone completes a save.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from stepkeeper_trainer.completing import Completer
from stepkeeper_trainer.dcp_values import Encoder, skeletons
from stepkeeper_trainer.dividing import Division, Sheets
from stepkeeper_trainer.formats.manifest import Manifest, ManifestError
from stepkeeper_trainer.formats.steps import read_manifest, step_name
from stepkeeper_trainer.incremental import Links
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.reading_back import read_back
from stepkeeper_trainer.replicas import digest
from stepkeeper_trainer.report import GivenUp, RankReport, publish
from stepkeeper_trainer.tiers.placing import Placed
from stepkeeper_trainer.writer import Sheet, Written, digest_sheet, in_threads, write_sheet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import torch

    from stepkeeper_trainer.commit import Commits
    from stepkeeper_trainer.comparing import Hash
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.planner import Planner
    from stepkeeper_trainer.saves import Save
    from stepkeeper_trainer.staging import Staging
    from stepkeeper_trainer.tiers.placing import Placing


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
        placing: Placing | None = None,
    ) -> None:
        self._rank = rank
        self._staging = staging
        self._planner = planner
        self._placing = placing  # where the nodes' own disks come first
        self._division = Division(rank, staging)
        self._completer = Completer(
            commits=commits,
            world_size=world_size,
            link=link,
            parent=parent,
            before_commit=before_commit,
            on_committed=on_committed,
            placing=placing,
        )
        self._values = Encoder()
        self._links = Links()
        self._hashes: dict[str, Hash | None] = {}  # of what others hold too, as the last save has it
        self._before: tuple[int, str] | None = None  # step and save_id of the last save that this rank reported

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
        self._division.forget()

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
        if changed or not self._division.is_of(share):
            self._staging.take(tensors)
            self._division.begin(share)

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
        sheets = self._division.of(share)
        began = time.monotonic()
        written = self._write(save, sheets)
        seconds = time.monotonic() - began
        with save.doing(f"reading back what is in {save.data}"):
            read_back(save, save.data, {one.sheet.name: one.entry for one in written if not one.linked})
        save.check()  # one that is late was given up, and has nowhere to report
        with save.doing(f"reporting in {save.directory}"):
            self._report(save, sheets, written)
        placed = self._placed(save, written)
        if self._rank == 0:
            with save.doing(f"completing {save.directory}"):
                values = self._values.encode(skeletons(tensors))
                self._completer.complete(save, share, given_up, placed, values=values)
        if self._placing is not None:
            self._placing.written(placed, seconds)
        self._before = (save.summary.step, save.save_id)
        try:
            self._division.learn(share, written)
        except Exception as error:  # noqa: BLE001  # what is on disk is no less committed for it
            self._staging.signature = None
            warn("regroup_failed", why=error)

    def _write(self, save: Save, sheets: Sheets) -> list[Written]:
        """Write this rank's files: to the node's own disk where there is one and it takes them."""
        if self._placing is not None:
            left_s = save.limit_at - time.time()
            save.local = self._placing.begin(save.summary.step, save.save_id, leaving=save.emergency, left_s=left_s)
        try:
            return self._bring_all(save, sheets)
        except OSError as error:
            if self._placing is None or save.local is None:
                raise
            save.check()  # one that was given up has lost its directory
            self._placing.refused(save.summary.step, error)
            self._placing.forget(save.summary.step, save.save_id)
            save.local = None  # to shared storage from now on
        return self._bring_all(save, sheets)

    def _bring_all(self, save: Save, sheets: Sheets) -> list[Written]:
        before = self._step_before(save) if any(sheet.cold for sheet in sheets.sheets) else None
        return in_threads([partial(self._bring, save, sheet, before) for sheet in sheets.sheets])

    def _placed(self, save: Save, written: list[Written]) -> Placed:
        return Placed(
            step=save.summary.step,
            save_id=save.save_id,
            directory=save.directory,
            files={one.sheet.name: one.entry for one in written},
            is_local=save.local is not None,
        )

    def _bring(self, save: Save, sheet: Sheet, before: tuple[Path, Manifest] | None) -> Written:
        """Bring one file to disk: by a link where the step before has the same, else by writing it."""
        with save.doing(f"writing {save.data / sheet.name}"):
            return self._link_or_write(save, sheet, before)

    def _link_or_write(self, save: Save, sheet: Sheet, before: tuple[Path, Manifest] | None) -> Written:
        entry = before[1].files.get(sheet.name) if before is not None and sheet.cold else None
        if before is not None and entry is not None:
            path = before[0] / sheet.name
            own, crcs = digest_sheet(self._staging.arena.view, sheet, save.check)
            if own == entry and self._links.link(path, save.data / sheet.name, own):
                return Written(sheet, own, crcs, linked=True)
        # In an emergency nothing trains beside, and what is read back soon is better in the page cache.
        return write_sheet(save.data, self._staging.arena.view, sheet, save.check, direct=not save.emergency)

    def _step_before(self, save: Save) -> tuple[Path, Manifest] | None:
        """Return the step before and its manifest, if this run has committed it where this save goes."""
        if self._before is None:
            return None
        step, save_id = self._before
        for name in (f"{step_name(step)}.{save_id[:8]}", step_name(step)):
            directory = save.data.parent / name
            try:
                manifest = read_manifest(directory)
            except (ManifestError, OSError):
                continue  # never committed, or gone: then everything is written
            if manifest.save_id == save_id:
                return directory, manifest
        return None

    def _report(self, save: Save, sheets: Sheets, written: list[Written]) -> None:
        self._hashes = {name: self._staging.hash_of(name) for name in sheets.share.replicas.names}
        digests = digest(sheets.share.replicas, self._hashes.get)
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
