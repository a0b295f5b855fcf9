"""Open a run directory that can be written, and hold it: one training has it at a time.

A resume decides which commits count from now on, and which data is left out: the lineage then says so.  By what rules
steps are kept, and which other places have steps, is recorded too, for those who look later.

Where neither Slurm nor a supervisor counts attempts, the newest start holds it.  On one node a living holder is refused
outright.  On another it cannot be seen: the newer start takes over, and the older one commits nothing from then on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stepkeeper_trainer.environment import Environment
from stepkeeper_trainer.errors import RunDirectoryError, StepkeeperError
from stepkeeper_trainer.formats import lease as leases
from stepkeeper_trainer.formats import lineage, records
from stepkeeper_trainer.formats.durable import make_directories
from stepkeeper_trainer.formats.steps import StepDirectory, list_steps
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.sampler import Skips
from stepkeeper_trainer.save.commit import Commits
from stepkeeper_trainer.store.retention import Policy, Retention

if TYPE_CHECKING:
    from stepkeeper_trainer.coordinate.agreement import Agreement
    from stepkeeper_trainer.formats.lease import Lease
    from stepkeeper_trainer.formats.manifest import Manifest
    from stepkeeper_trainer.tiers.tier import Tiers
    from stepkeeper_trainer.tiers.tiering import Tiering


def open_run_directory(
    run_dir: str | os.PathLike[str] | None, environment: Environment, agreement: Agreement, rank: int
) -> Commits:
    """Make, try and hold the run directory on rank 0; every rank hears what is wrong with it.

    Raises:
        RunDirectoryError: it cannot be made or written.
        SupersededError: a newer attempt holds it.
    """
    given = Path(run_dir) if run_dir else environment.run_directory
    path = given or agreement.share(default_run_directory(environment, sys.argv[0]))
    problem: StepkeeperError | None = None
    epoch = environment.epoch
    if rank == 0:
        try:
            if given is None:
                _make_default(path, environment.node)
            epoch = prepare(path, environment)
        except StepkeeperError as error:
            problem = error
    problem, epoch = agreement.share((problem, epoch))
    if problem is not None:
        raise problem
    return Commits(path, replace(environment, epoch=epoch))


def default_run_directory(environment: Environment, script: str) -> Path:
    """Return where a run goes that names no directory: below `runs`, by the script and the Slurm job.

    Two jobs never share one, and a requeued job keeps its own.
    """
    path = Path(script)
    stem = path.parent.name if path.stem == "__main__" else path.stem
    name = stem if stem and not stem.startswith("-") else "run"
    return Path.cwd() / "runs" / (name if environment.epoch is None else f"{name}-{environment.epoch[0]}")


def _make_default(path: Path, node: str) -> None:
    """Make `runs`; two trainings of one script in one job would have one directory: the second is refused."""
    try:
        path.parent.mkdir(exist_ok=True)
        refuse_holder(path, node)
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename}: {error.strerror}; give CheckpointManager(run_dir=...), or set STEPKEEPER_RUN_DIR"
        ) from error
    warn(
        "run_directory_chosen", path=path, why="none was given by CheckpointManager(run_dir=...) or STEPKEEPER_RUN_DIR"
    )


def prepare(path: Path, environment: Environment) -> tuple[int, int] | None:
    """Make the directories, take the lease where no supervisor does, clear what the dead left; return the epoch.

    Raises:
        RunDirectoryError: it cannot be made or written, or another training holds it.
        SupersededError: a newer attempt holds it.
    """
    commits = Commits(path, environment)
    if not path.parent.is_dir():
        raise RunDirectoryError(f"{path.parent} is no directory: make it, or choose another run directory than {path}")
    try:
        make_directories(path, mode=0o700)
        make_directories(commits.checkpoints)
        for directory in (path, commits.checkpoints):
            with tempfile.TemporaryFile(dir=directory):
                pass  # can be written
        if environment.socket is None:
            if environment.epoch is None:
                commits = Commits(path, replace(environment, epoch=next_epoch(path, environment.node)))
            commits.take_lease()
        commits.clear_leftovers()
    except OSError as error:
        raise RunDirectoryError(
            f"{error.filename or path}: cannot be written: {error.strerror}; mend it, or choose another run directory"
        ) from error
    return commits.environment.epoch


NO_JOB = leases.NO_JOB
_CLOCK_SLACK_S = 2.0


def next_epoch(run_directory: Path, node: str) -> tuple[int, int] | None:
    """Return the epoch of a start by hand; None where a Slurm job held the run last: its attempts are not counted on.

    Raises:
        RunDirectoryError: a process that lives trains in it.
        OSError: the lease cannot be read.
    """
    try:
        held = leases.read(run_directory)
    except leases.LeaseError as error:
        warn("lease_unreadable", why=error)
        return NO_JOB, 0
    if held is None:
        return NO_JOB, 0
    if held.job_id != NO_JOB:
        warn("run_directory_of_a_job", job=held.job_id, why="two trainings must not share it: is that job over?")
        return None
    _refuse(run_directory, held, node)
    return NO_JOB, held.restart_count + 1


def refuse_holder(run_directory: Path, node: str) -> None:
    """Refuse a run directory in which a process of this node trains.

    Raises:
        RunDirectoryError: it lives.
        OSError: the lease cannot be read.
    """
    with contextlib.suppress(leases.LeaseError):  # said where the lease is taken
        if (held := leases.read(run_directory)) is not None:
            _refuse(run_directory, held, node)


def _refuse(run_directory: Path, held: Lease, node: str) -> None:
    if held.node == node and held.pid != os.getpid() and lives(held):
        raise RunDirectoryError(
            f"{run_directory}: process {held.pid} on {node} trains in it: "
            "wait for its end, stop it, or choose another run directory"
        )


def lives(held: Lease) -> bool:
    """Tell whether the process that took a lease on this node is still there, and not another one of its number.

    Raises:
        OSError: the kernel does not tell.
    """
    found = leases.birth(held.pid)
    if found is None:
        return False
    return _began_before(found, held.taken_at) if held.birth is None else found.is_that_of(held.birth)


def _began_before(found: leases.Birth, instant: float) -> bool:
    """Tell whether a process is older than a lease of 0.1, which has no birth: by a clock that may have been set."""
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    age_s = uptime_s - found.ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s <= instant + _CLOCK_SLACK_S


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
                why="training starts from the very beginning: `latest` as resume_from resumes from a whole step",
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

    `sampler` has its state loaded; `windows` are those that the launch is told to leave out.

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
                why=f"continues after step {done} with other data left out",
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
    return Retention(commits.checkpoints, policy, fence=commits.check_fence) if policy is not None else None


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
