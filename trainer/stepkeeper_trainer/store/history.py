"""What a resume means for the lineage: which commits count from now on, and which data is left out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.steps import StepDirectory, list_steps
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.observe.skipping import Skips

if TYPE_CHECKING:
    from pathlib import Path

    from stepkeeper_trainer.formats.manifest import Manifest


def record_start(
    checkpoints: Path, directory: Path | None, manifest: Manifest | None, attempt: int, *, goes_back: bool = False
) -> str | None:
    """Record where training goes on from (None: the very start), and return the parent of the next commit.

    Nothing is written where the lineage says it already.  A step directory that was renamed into place
    by a writer that died before it could record the commit is recorded now.  A launch that goes back on purpose has
    a rollback of its own, also to the newest commit: what tiers have beyond that must not return, in any attempt.

    Raises:
        OSError: the lineage cannot be read or written.
    """
    known = lineage.read(checkpoints)
    goes_back = goes_back and (known is None or known.rolled_back_at is None)
    commits = set(known.commits) if known else set()
    head = known.head if known else None
    steps = {s.manifest.save_id: s for s in list_steps(checkpoints) if s.manifest is not None}
    foreign = directory is None or directory.resolve().parent != checkpoints.resolve()
    if manifest is None or foreign:  # from the very start, or from another run's step
        _record(checkpoints, [s for i, s in steps.items() if i not in commits], attempt)
        if directory is None and steps:
            newest = max(step.step for step in steps.values())
            warn(
                "started_beside_steps",
                newest=newest,
                why="training starts from the very beginning: `latest` as resume_from goes on from what is whole",
            )
        if head is not None or steps.keys() - commits or goes_back:
            _roll_back(checkpoints, None, attempt, "started from the very start")
        return None
    recorded = manifest.save_id in commits
    if not recorded:
        _record(checkpoints, _ancestors(manifest.save_id, steps, commits), attempt)
    if goes_back or (recorded and head != manifest.save_id):
        assert directory is not None
        _roll_back(checkpoints, manifest.save_id, attempt, f"resumed from {directory.name}")
    return manifest.save_id


def record_left_out(
    checkpoints: Path, sampler: object, windows: tuple[lineage.LeftOut, ...], *, done: int, attempt: int
) -> None:
    """Record which data this launch leaves out, where the lineage says otherwise: after `record_start`.

    A supervisor that goes back has recorded it.  This is for what it cannot know: there was nothing to go back from,
    the sampler cannot leave out anything, or nobody told the launch (it runs without a supervisor).

    Args:
        checkpoints: the `checkpoints/` directory of the run.
        sampler: of the run, with its state loaded.
        windows: that the launch is told to leave out.
        done: completed steps.
        attempt: of the run.

    Raises:
        OSError: the lineage cannot be read or written.
    """
    known = lineage.read(checkpoints)
    recorded = known.left_out if known is not None else ()
    left_out: tuple[lineage.LeftOut, ...] = ()
    if isinstance(sampler, Skips):
        before = [each for each in recorded if each not in windows and sampler.skipped_at(each.step)]
        left_out = (*before, *(each for each in windows if each.step > done or sampler.skipped_at(each.step)))
    if left_out != recorded:
        lineage.append(
            checkpoints,
            lineage.Rollback(
                at=time.time(),
                attempt=attempt,
                save_id=known.head if known is not None else None,
                why=f"goes on after step {done} with other data left out",
                left_out=left_out,
            ),
        )


def _roll_back(checkpoints: Path, save_id: str | None, attempt: int, why: str) -> None:
    lineage.append(checkpoints, lineage.Rollback(at=time.time(), attempt=attempt, save_id=save_id, why=why))
    say("rolled_back", save_id=save_id, why=why)


def _ancestors(save_id: str, steps: dict[str, StepDirectory], commits: set[str]) -> list[StepDirectory]:
    """Return a step and those that led to it, as far as no line tells of them."""
    found: list[StepDirectory] = []
    at: str | None = save_id
    while at is not None and at in steps and at not in commits and steps[at] not in found:
        found.append(steps[at])
        manifest = steps[at].manifest
        at = manifest.parent if manifest is not None else None
    return found


def _record(checkpoints: Path, steps: list[StepDirectory], attempt: int) -> None:
    """Record commits, oldest first."""
    for step in reversed(steps):
        assert step.manifest is not None
        lineage.append(
            checkpoints,
            lineage.Commit(
                at=time.time(),
                attempt=attempt,
                step=step.step,
                save_id=step.manifest.save_id,
                parent=step.manifest.parent,
                directory=step.path.name,
            ),
        )
        say("commit_recorded", directory=step.path.name, why="its writer died before it could")
