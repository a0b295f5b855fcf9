"""Asking and telling Slurm, on threads of their own: a slow controller must not stop the loop."""

from __future__ import annotations

from stepkeeper.core import events as on
from stepkeeper.slurm.client import SlurmClient, SlurmError
from stepkeeper.sources.inbox import Inbox

TRAINING_STEP_KILL_AFTER_S = 3.0


def ask(client: SlurmClient, job_id: int, *, inbox: Inbox) -> None:
    """Ask for the facts of our job; `SlurmAnswered` comes."""

    def work() -> None:
        try:
            job, error = client.job(job_id), ""
        except SlurmError as failure:
            job, error = None, str(failure)
        inbox.put(on.SlurmAnswered(at=inbox.clock.now(), job=job, error=error))

    inbox.run_thread("ask-slurm", work)


def requeue(client: SlurmClient, job_id: int, *, inbox: Inbox) -> None:
    """Requeue our own job; `RequeueAnswered` comes."""

    def work() -> None:
        try:
            client.requeue(job_id)
        except SlurmError as failure:
            inbox.put(on.RequeueAnswered(at=inbox.clock.now(), ok=False, error=str(failure)))
        else:
            inbox.put(on.RequeueAnswered(at=inbox.clock.now(), ok=True))

    inbox.run_thread("requeue", work)
