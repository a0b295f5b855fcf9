"""The lineage at a resume, and older steps after each commit: what rank 0 does in the run directory beside training.

A resume decides which commits count from now on, and which data is left out.  After a commit older steps are removed
as the policy says.  By what rules that is, and which other places have steps, is recorded at the start, for those who
look later.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from stepkeeper_trainer.errors import UsageError
from stepkeeper_trainer.formats import lineage, records
from stepkeeper_trainer.formats.messages import shorten
from stepkeeper_trainer.formats.reading import Reading
from stepkeeper_trainer.formats.steps import StepDirectory, list_steps
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.sampler import Skips
from stepkeeper_trainer.store.retention import Outcome, Policy, Pruner, parse_policy

if TYPE_CHECKING:
    from pathlib import Path

    from stepkeeper_trainer.formats.manifest import Manifest
    from stepkeeper_trainer.save.commit import Commits, CommittedStep
    from stepkeeper_trainer.tiers.tier import Tiers
    from stepkeeper_trainer.tiers.tiering import Tiering


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
        _append_record(checkpoints, [s for i, s in steps.items() if i not in commits], attempt)
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
        _append_record(checkpoints, _ancestors(manifest.save_id, steps, commits), attempt)
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


def _append_record(checkpoints: Path, steps: list[StepDirectory], attempt: int) -> None:
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


READ_THREADS = 2  # each new step is read once to be counted: training has the other cores
READ_BYTES_PER_S = 2e9
BEHIND_STEPS = 3  # committed while it reads older ones: it is too slow for them
STOP_WITHIN_S = 5.0  # it stops between two reads, unless the storage hangs


class Retention:
    """Removes steps that no rule wants, once newer ones are verified."""

    def __init__(self, commits: Commits, policy: Policy) -> None:
        """Prepare; nothing is done before the first commit."""
        self._blocked: str | None = None
        self._look, self._meanwhile = 0, 0  # the look that is under way, and commits since it began
        self._behind = False
        self._pruner = Pruner(
            commits.checkpoints,
            policy,
            on_done=self._done,
            on_error=_failed,
            fence=commits.check_fence,
            reading=Reading(threads=READ_THREADS, bytes_per_s=READ_BYTES_PER_S),
        )

    def committed(self, _step: CommittedStep) -> None:
        """Look at the steps soon."""
        if self._pruner.looking:
            self._note_late(self._pruner.looks)
        self._pruner.request()

    def _note_late(self, look: int) -> None:
        """Say it once when steps come faster than they are read: they pile up, for only read ones are removed."""
        self._meanwhile = self._meanwhile + 1 if look == self._look else 1
        self._look = look
        if self._meanwhile < BEHIND_STEPS or self._behind:
            return
        self._behind = True
        warn(
            "retention_behind",
            steps=self._meanwhile,
            why=f"older ones are still being read, by rank 0 alone and at most at {READ_BYTES_PER_S / 1e9:g} GB/s, and "
            "removed: save less often, or have all nodes read with `--read-back all`",
        )

    def request(self) -> None:
        """Look at the steps soon, for space is short."""
        self._pruner.request()

    def close(self, limit_at: float) -> None:
        """Stop; what is not done now is done after the next commit."""
        if not self._pruner.close(max(0.0, min(STOP_WITHIN_S, limit_at - time.time()))):
            warn("retention_late", why="it still waits for the storage: it is left behind")

    def _done(self, outcome: Outcome) -> None:
        if outcome.removed:
            say("steps_removed", steps=",".join(outcome.removed), kept=len(outcome.plan.kept))
        for name, why in outcome.spared:
            say("step_spared", step=name, why=why)
        if outcome.plan.blocked != self._blocked and outcome.plan.blocked is not None:
            warn("retention_blocked", why=outcome.plan.blocked)
        self._blocked = outcome.plan.blocked


def keep_house(commits: Commits, policy: Policy | None, tiering: Tiering | None, rank: int) -> Retention | None:
    """Record how steps are kept, and return what removes those that need not be; on rank 0, else nothing is done."""
    if rank != 0:
        return None
    try:
        records.write_keeping(
            commits.run_directory, _keeping(commits, policy, tiering.tiers if tiering is not None else None)
        )
    except OSError as error:
        warn("keeping_unrecorded", why=error)  # it is for those who look later: training does without
    return Retention(commits, policy) if policy is not None else None


def _keeping(commits: Commits, policy: Policy | None, tiers: Tiers | None) -> records.Keeping:
    launch, at = commits.environment.launch_name, time.time()
    places = []
    if tiers is not None and tiers.local is not None:
        places.append(records.Place(kind="local", where=tiers.local, launch=launch, at=at))
    if tiers is not None and tiers.cold is not None:
        places.append(records.Place(kind="cold", where=tiers.cold, launch=launch, at=at))
    return records.Keeping(
        launch=launch,
        at=at,
        retention=dataclasses.asdict(policy) if policy is not None else None,
        places=tuple(places),
    )


def choose_policy(environment: str | None, wanted: str | Policy | None, *, total_steps: int | None) -> Policy | None:
    """Return the policy that counts: the environment's, else the script's, else the usual one; None keeps all steps.

    Raises:
        UsageError: it cannot be read or meant.
    """
    choice = environment if environment is not None else wanted
    if choice is None:
        return Policy(total_steps=total_steps)
    if isinstance(choice, Policy):
        return choice
    try:
        return parse_policy(choice, total_steps=total_steps)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _failed(error: Exception) -> None:
    warn("retention_failed", why=shorten(f"{type(error).__name__}: {error}"))


def mark_epoch_end(commits: Commits, save_id: str) -> None:
    """Mark a save as the end of an epoch, before it is committed: a crash between the two costs no milestone.

    Raises:
        OSError: the lineage cannot be written.
    """
    lineage.append(commits.checkpoints, lineage.Mark(at=time.time(), save_id=save_id, mark=lineage.EPOCH))
