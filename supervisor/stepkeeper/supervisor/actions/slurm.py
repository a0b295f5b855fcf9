"""Calls of Slurm, on threads of their own: a slow controller must not stop the loop."""

from __future__ import annotations

import threading
from pathlib import Path

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.run_store import lease
from stepkeeper.slurm import requeue as slurm_requeue
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.supervisor.sources.process import Inbox, Part
from stepkeeper.watcher.messages import Assignment
from stepkeeper_trainer.formats.lease import Lease, LeaseError


def query_job(client: SlurmCommands, job: str, *, inbox: Inbox) -> None:
    """Ask for the facts of our job; `SlurmAnswered` comes."""

    def work() -> None:
        try:
            facts, error = client.job(job), ""
        except (SlurmError, ValueError) as failure:  # ValueError: an answer that this version cannot read
            facts, error = None, str(failure)
        inbox.put(on.SlurmAnswered(at=inbox.clock.now(), job=facts, error=error))

    inbox.run(Part.ASK_SLURM, work, answer=lambda error: on.SlurmAnswered(at=inbox.clock.now(), job=None, error=error))


def ask_time(*, inbox: Inbox) -> threading.Thread:
    """Ask how Slurm's clock stands to ours; `ClockSet` comes where it has moved among our instants."""

    def work() -> None:
        try:
            slurm_now = SlurmCommands().time()
        except SlurmError:
            slurm_now = None  # then the wall clock is believed
        moved_s = inbox.clock.slurm_set(slurm_now)
        if moved_s:
            inbox.put(on.ClockSet(at=inbox.clock.now(), seconds=moved_s))

    return inbox.run(Part.SLURMS_TIME, work)


def release(client: SlurmCommands, job: str, keep: tuple[str, ...], *, inbox: Inbox) -> None:
    """Give back all nodes of our job but some; `NodesReleased` comes."""

    def work() -> None:
        try:
            client.keep(job, keep)
        except (SlurmError, OSError) as failure:
            inbox.put(on.NodesReleased(at=inbox.clock.now(), ok=False, error=str(failure)))
        else:
            inbox.put(on.NodesReleased(at=inbox.clock.now(), ok=True))

    inbox.run(
        Part.RELEASE_NODES, work, answer=lambda error: on.NodesReleased(at=inbox.clock.now(), ok=False, error=error)
    )


def query_idle_nodes(client: SlurmCommands, job: str, effect: do.AskIdleNodes, *, inbox: Inbox) -> None:
    """Ask for idle nodes like some of ours; `IdleNodes` comes."""

    def work() -> None:
        try:
            nodes, error = client.idle_nodes(job, effect.like), ""
        except (SlurmError, ValueError) as failure:  # ValueError: an answer that this version cannot read
            nodes, error = (), str(failure)
        inbox.put(on.IdleNodes(at=inbox.clock.now(), nodes=nodes, error=error))

    inbox.run(Part.ASK_IDLE_NODES, work, answer=lambda error: on.IdleNodes(at=inbox.clock.now(), error=error))


def requeue(client: SlurmCommands, assignment: Assignment, ours: Lease, effect: do.Requeue, *, inbox: Inbox) -> None:
    """Requeue our own job; `RequeueAnswered` comes, or `Superseded` where a newer attempt holds the run."""

    def work() -> None:
        try:
            newer = lease.superseded(Path(assignment.run_directory), ours)
        except (OSError, LeaseError):
            newer = None  # it is not known: the next attempt compares the leases again
        at = inbox.clock.now()
        if newer is not None:
            inbox.put(on.Superseded(at=at, by_job_id=newer.job_id, by_restart_count=newer.restart_count))
            return
        still = slurm_requeue.give_back(client, assignment.slurm_name, effect.keep) if effect.keep else ""
        try:
            if effect.resubmit:
                new = slurm_requeue.resubmit(client, assignment, exclude=effect.exclude, readmit=effect.readmit)
                outcome, job_id = new.besides, new.job_id
            else:
                outcome = slurm_requeue.requeue(client, assignment, exclude=effect.exclude, readmit=effect.readmit)
                job_id = None
        except (SlurmError, OSError) as failure:
            # whatever refuses a new job (a limit, a filter) does so while this one is there
            refused = isinstance(failure, SlurmError) and not failure.unreachable
            forbidden = isinstance(failure, SlurmError) and (failure.forbidden or (refused and effect.resubmit))
            at = inbox.clock.now()
            inbox.put(on.RequeueAnswered(at=at, ok=False, error=str(failure), forbidden=forbidden))
        else:
            error = "; ".join(filter(None, (still, outcome)))
            inbox.put(on.RequeueAnswered(at=inbox.clock.now(), ok=True, error=error, job_id=job_id))

    inbox.run(Part.REQUEUE, work, answer=lambda error: on.RequeueAnswered(at=inbox.clock.now(), ok=False, error=error))
