"""Taking and keeping the lease of a run directory: who may act for the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.run_store import lines
from stepkeeper_trainer.formats import lease as leases
from stepkeeper_trainer.formats.lease import Lease, birth
from stepkeeper_trainer.formats.plain import naming, open_plain


def take(run_directory: Path, wanted: Lease, *, job_runs: Callable[[int], bool]) -> Lease:
    """Take the lease with a higher epoch than its holder's, or refuse.

    Args:
        run_directory: of the run.
        wanted: our lease; its attempt is raised above the holder's.
        job_runs: asked once about the holder's job, if that is another one than ours.

    Raises:
        StepkeeperError: a live job holds the run, or a newer job took it over.
    """
    try:
        held = leases.read(run_directory)
        if held is not None:
            if held.job_id not in {wanted.job_id, leases.NO_JOB} and job_runs(held.job_id):
                raise StepkeeperError(
                    f"{run_directory}: job {held.job_id} on {held.node} works on this run; "
                    f"wait for its end, or stop it with `scancel {held.job_id}`",
                    ExitCode.RUN_BUSY,
                )
            if held.epoch > wanted.epoch:
                raise StepkeeperError(
                    f"{run_directory}: job {held.job_id} (restart {held.restart_count}) took this run over "
                    f"after job {wanted.job_id}; submit a new job to continue it",
                    ExitCode.SUPERSEDED,
                )
            if held.epoch == wanted.epoch and held.pid != wanted.pid and not _is_gone(held, wanted):
                raise StepkeeperError(
                    f"{run_directory}: this very attempt of job {held.job_id} has a supervisor already "
                    f"(pid {held.pid} on {held.node}); start one `stepkeeper run` a job",
                    ExitCode.RUN_BUSY,
                )
        attempt = max(wanted.attempt, held.attempt + 1 if held is not None else 0)
        taken = Lease(
            job_id=wanted.job_id,
            restart_count=wanted.restart_count,
            attempt=attempt,
            node=wanted.node,
            pid=wanted.pid,
            taken_at=wanted.taken_at,
            birth=wanted.birth,
        )
        leases.write(run_directory, taken)
    except leases.LeaseError as error:
        raise StepkeeperError(str(error), ExitCode.RUN_DIRECTORY) from error
    except OSError as error:
        raise StepkeeperError(
            f"{run_directory}: the lease cannot be taken: {error.strerror}", ExitCode.RUN_DIRECTORY
        ) from error
    return taken


def _is_gone(held: Lease, wanted: Lease) -> bool:
    """Tell whether the holder has ended: within one `salloc` a run may be started again and again."""
    if held.node != wanted.node:
        return False
    found = birth(held.pid)
    return found is None or (held.birth is not None and not found.is_that_of(held.birth))


def superseded(run_directory: Path, ours: Lease, *, opened: Path | None = None) -> Lease | None:
    """Return the lease of a newer attempt, if there is one; put ours back if an older one overwrote it.

    Args:
        run_directory: where the lease is read.
        ours: the lease of this attempt.
        opened: a path of the same directory by its descriptor; ours is put back there, whatever replaces the directory.

    Raises:
        OSError, LeaseError: it is not known now; ask again later.
    """
    held = leases.read(run_directory)
    if held is not None and held.epoch > ours.epoch:
        return held
    if held is None or held.epoch < ours.epoch:
        with naming(run_directory / leases.LEASE_NAME, always=True):
            leases.write(opened or run_directory, ours)
    return None


# `rescues.jsonl`: watchers that had the job run again because its supervisor was gone.

RESCUES_NAME = "rescues.jsonl"


class Rescued(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    at: float  # Unix seconds
    job_id: int
    restart_count: int
    node: str


_rescued = msgspec.json.Decoder(Rescued)


def read_rescues(run_directory: Path) -> Iterator[Rescued]:
    """Return the rescues of a run, oldest first; a line torn by a crash is passed over.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        file = open_plain(run_directory / RESCUES_NAME, within=run_directory)
    except FileNotFoundError:
        return
    with file:
        for line in lines.forwards(file):
            if (rescued := lines.parsed(_rescued, line)) is not None:
                yield rescued
