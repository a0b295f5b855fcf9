"""Calls of Slurm, on threads of their own: a slow controller must not stop the loop."""

from __future__ import annotations

import threading
from pathlib import Path

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.slurm import requeue as slurm_requeue
from stepkeeper.slurm.client import SlurmError
from stepkeeper.slurm.jobs import SlurmCommands
from stepkeeper.supervisor.sources.process import Inbox, Part
from stepkeeper.watcher.messages import Assignment
from stepkeeper_trainer.formats.lease import Lease

UNREADABLE = (SlurmError, ValueError)  # ValueError: an answer that this version cannot read


def query_job(client: SlurmCommands, job: str, *, inbox: Inbox) -> None:
    """Ask for the facts of our job; `SlurmAnswered` comes."""
    inbox.ask(
        Part.ASK_SLURM,
        lambda: on.SlurmAnswered(job=client.job(job), at=inbox.clock.now()),
        lambda error: on.SlurmAnswered(at=inbox.clock.now(), error=error),
        expected=UNREADABLE,
    )


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

    def act() -> on.NodesReleased:
        client.keep(job, keep)
        return on.NodesReleased(at=inbox.clock.now(), ok=True)

    def failed(error: str) -> on.NodesReleased:
        return on.NodesReleased(at=inbox.clock.now(), ok=False, error=error)

    inbox.ask(Part.RELEASE_NODES, act, failed, expected=(SlurmError, OSError))


def query_idle_nodes(client: SlurmCommands, job: str, effect: do.AskIdleNodes, *, inbox: Inbox) -> None:
    """Ask for idle nodes like some of ours; `IdleNodes` comes."""
    inbox.ask(
        Part.ASK_IDLE_NODES,
        lambda: on.IdleNodes(nodes=client.idle_nodes(job, effect.like), at=inbox.clock.now()),
        lambda error: on.IdleNodes(at=inbox.clock.now(), error=error),
        expected=UNREADABLE,
    )


def requeue(client: SlurmCommands, assignment: Assignment, ours: Lease, effect: do.Requeue, *, inbox: Inbox) -> None:
    """Requeue our own job; `RequeueAnswered` comes, or `Superseded` where a newer attempt holds the run."""

    def failed(error: str, *, forbidden: bool = False) -> on.RequeueAnswered:
        return on.RequeueAnswered(at=inbox.clock.now(), ok=False, error=error, forbidden=forbidden)

    def act() -> on.Event:
        # where it is not known who holds the run, the next attempt compares the leases again
        if (newer := inbox.superseded(Path(assignment.run_directory), ours)) is not None:
            return newer
        still = slurm_requeue.give_back(client, assignment.slurm_name, effect.keep) if effect.keep else ""
        try:
            if effect.resubmit:
                new = slurm_requeue.resubmit(client, assignment, exclude=effect.exclude, readmit=effect.readmit)
                outcome, job_id = new.besides, new.job_id
            else:
                outcome = slurm_requeue.requeue(
                    client,
                    assignment,
                    exclude=effect.exclude,
                    readmit=effect.readmit,
                    shrunk=bool(effect.keep),
                )
                job_id = None
        except SlurmError as error:
            # whatever refuses a new job (a limit, a filter) does so while this one is there
            forbidden = error.forbidden or (effect.resubmit and not error.unreachable)
            return failed(str(error), forbidden=forbidden)
        besides = "; ".join(filter(None, (still, outcome)))
        return on.RequeueAnswered(at=inbox.clock.now(), ok=True, error=besides, job_id=job_id)

    inbox.ask(Part.REQUEUE, act, failed, expected=(OSError,))
