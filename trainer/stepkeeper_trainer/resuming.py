"""Finding, checking and loading what a launch resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepkeeper_trainer.conditions import warn_of_changes
from stepkeeper_trainer.errors import DamagedError, KeeperError, ResumeError
from stepkeeper_trainer.formats.manifest import Manifest, ManifestError
from stepkeeper_trainer.formats.steps import newest_verified, read_manifest
from stepkeeper_trainer.history import record_start
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.reader import CheckedReader, load

if TYPE_CHECKING:
    from stepkeeper_trainer.agreement import Agreement
    from stepkeeper_trainer.commit import Commits
    from stepkeeper_trainer.state import TrainingState

LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where training goes on; all None for a start from the very beginning."""

    step: int | None
    saved: tuple[int, str] | None  # step and save_id of what is on disk already
    parent: str | None  # of the next commit; known on rank 0 only


def resume(
    resume_from: str | None,
    *,
    commits: Commits,
    state: TrainingState,
    agreement: Agreement,
    group: Any | None,
    world_size: int,
) -> Resumed:
    """Load `resume_from` into `state`, on all ranks together, and record it in the lineage.

    Raises:
        ResumeError: it is not there, or does not fit.
        DamagedError: its bytes are not what its manifest says.
    """
    if resume_from == LATEST:
        found = _newest(commits.checkpoints) if state.rank == 0 else None
        resume_from = agreement.share(found)
    if resume_from is None:
        parent = _record(commits, None, None) if state.rank == 0 else None
        return Resumed(None, None, parent)
    directory = Path(resume_from)
    manifest = _open(directory)
    warn_of_changes(manifest, world_size)
    reader = CheckedReader(directory, manifest)
    try:
        tensors = state.template(reader.read_metadata())
    except OSError as error:
        raise DamagedError(f"{error.filename or directory}: cannot be read: {error.strerror}") from error
    load(reader, tensors, group)
    state.apply(tensors)
    parent = _record(commits, directory, manifest) if state.rank == 0 else None
    if state.rank == 0:
        say("resumed", step=manifest.step, directory=directory, save_id=manifest.save_id)
    return Resumed(manifest.step, (manifest.step, manifest.save_id), parent)


def _newest(checkpoints: Path) -> str | None:
    choice = newest_verified(checkpoints)
    for skipped, problems in choice.skipped:
        warn("step_skipped", directory=skipped.path.name, why="; ".join(problems))
    if choice.chosen is None:
        say("started_anew", why="no verified step directory")
        return None
    return str(choice.chosen.path)


def _open(directory: Path) -> Manifest:
    if not directory.is_dir():
        raise ResumeError(f"{directory}: no such step directory; give one below checkpoints/, or `{LATEST}`")
    try:
        return read_manifest(directory)
    except ManifestError as error:
        raise ResumeError(f"{error}; give another step directory, or `{LATEST}`") from error
    except OSError as error:
        raise ResumeError(f"{error.filename or directory}: cannot be read: {error.strerror}") from error


def _record(commits: Commits, directory: Path | None, manifest: Manifest | None) -> str | None:
    try:
        return record_start(commits.checkpoints, directory, manifest, commits.environment.attempt)
    except OSError as error:
        raise KeeperError(f"{error.filename}: the lineage cannot be written: {error.strerror}") from error
