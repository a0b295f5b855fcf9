"""The step directories of a run: list, verify, choose the newest verified one.

A step directory is in one of three conditions, in these words everywhere: `verified` (every byte was compared with its
manifest, and no file has changed since), `committed, not yet verified`, or `damaged`.

Reads only; a damaged directory is reported, never removed.  Needs no torch.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepkeeper_trainer.formats import lineage as lineages
from stepkeeper_trainer.formats.manifest import Manifest, ManifestError, parse_step_name, read_manifest, step_name
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.verify import Cache, Verdict, look_again, verify

if TYPE_CHECKING:
    from collections.abc import Callable

VERIFIED, COMMITTED, DAMAGED = "verified", "committed, not yet verified", "damaged"

__all__ = [  # with what a caller of this module needs besides
    "COMMITTED",
    "DAMAGED",
    "VERIFIED",
    "Choice",
    "StepDirectory",
    "Verdict",
    "current_lineage",
    "entries",
    "list_steps",
    "look_again",
    "newest_verified",
    "open_step",
    "parse_step_name",
    "read_manifest",
    "step_name",
    "verify",
]


@dataclass(frozen=True, slots=True)
class StepDirectory:
    """One directory whose name says that it is a committed step."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None  # why there is no manifest


@dataclass(frozen=True, slots=True)
class Choice:
    """The newest verified step directory, and those that were passed over, newest first."""

    chosen: StepDirectory | None
    skipped: tuple[tuple[StepDirectory, tuple[str, ...]], ...]


def open_step(path: Path, *, within: Path | None = None) -> StepDirectory:
    """Read one step directory, which may be known to lie `within` another one.

    Never raises for what is wrong inside it: that is its `problem`.
    """
    step = parse_step_name(path.name)
    try:
        manifest = read_manifest(path, within=within)
    except (ManifestError, OSError) as error:
        return StepDirectory(path, step if step is not None else -1, None, str(error))
    if step is not None and manifest.step != step:
        return StepDirectory(path, step, None, f"{path}: its manifest is of step {manifest.step}")
    return StepDirectory(path, manifest.step, manifest, None)


def entries(checkpoints: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a directory whose names say that they are step directories, in no order.

    Raises:
        OSError: the directory is there and cannot be listed.  A missing one has none.
    """
    try:
        with os.scandir(checkpoints) as found:
            return [e for e in found if parse_step_name(e.name) is not None and e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def list_steps(checkpoints: Path) -> list[StepDirectory]:
    """Return all step directories, newest first (by step, then by time of creation).

    Raises:
        OSError: the directory is there and cannot be listed.  A missing one is an empty list.
    """
    steps = [open_step(checkpoints / entry.name, within=checkpoints) for entry in entries(checkpoints)]
    return sorted(steps, key=lambda s: (s.step, s.manifest.created_at if s.manifest else "", s.path.name), reverse=True)


def current_lineage(steps: list[StepDirectory], lineage: lineages.Lineage | None) -> list[StepDirectory]:
    """Keep the directories that lead to the state training is in now, newest first.

    Without a lineage file every directory counts.  A directory that was renamed into place when its
    writer died before it could record the commit counts too, if its manifest's parent does.
    A directory whose manifest cannot be read is kept: it is passed over later, with its problem.
    """
    if lineage is None or not lineage.has_steps:
        return steps
    manifests = {entry.path: entry.manifest for entry in steps if entry.manifest is not None}
    parents = {manifest.save_id: manifest.parent for manifest in manifests.values()}
    chain = lineage.chain(parents)
    counted = set(chain)
    # where the chain breaks off at an unknown ancestor, whatever is older than its known part may be one
    broken = (lineage.parent(chain[-1], parents) if chain else lineage.head) is not None
    oldest = min((m.step for m in manifests.values() if m.save_id in counted), default=None)

    def counts(entry: StepDirectory) -> bool:
        manifest = entry.manifest
        if manifest is None or manifest.save_id in counted:
            return True
        if manifest.save_id not in lineage.commits and manifest.parent == lineage.head:
            return True
        return broken and (oldest is None or entry.step < oldest)

    return [entry for entry in steps if counts(entry)]


def newest_verified(
    checkpoints: Path,
    *,
    deep: bool = True,
    below_step: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    reading: Reading | None = None,
    cached: bool = True,
    check: Callable[[Path, Cache | None], Verdict] | None = None,
) -> Choice:
    """Choose the newest verified step directory of the current lineage.

    Args:
        checkpoints: the `checkpoints/` directory of a run.
        deep: every byte must be right; otherwise names, sizes and coverage only.
        below_step: pass over this step and newer ones.
        should_stop: asked while reading; true ends the search with nothing chosen.
        reading: how to read.
        cached: bytes that were found right before, and have not been written to since, are not read again.
        check: verifies one step directory instead of `verify`; `deep` and `reading` are its own affair then.

    Raises:
        OSError: the directory cannot be listed or the lineage not read.
    """
    how = dataclasses.replace(reading or Reading(), first_only=True)
    cache = Cache(checkpoints) if cached else None
    steps = current_lineage(list_steps(checkpoints), lineages.read(checkpoints))
    skipped: list[tuple[StepDirectory, tuple[str, ...]]] = []
    for entry in steps:
        if below_step is not None and entry.step >= below_step:
            continue
        if entry.manifest is None:
            skipped.append((entry, (entry.problem or "no manifest",)))
            continue
        if check is not None:
            verdict = check(entry.path, cache)
        else:
            verdict = verify(entry.path, deep=deep, should_stop=should_stop, reading=how, cache=cache)
        if should_stop():
            return Choice(None, tuple(skipped))
        if verdict.ok:
            return Choice(entry, tuple(skipped))
        skipped.append((entry, verdict.problems))
    return Choice(None, tuple(skipped))
