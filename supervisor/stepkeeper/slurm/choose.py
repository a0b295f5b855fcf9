"""Which Slurm client: Slurm's commands, which fit every Slurm, or pyslurm where it was asked for and fits."""

from __future__ import annotations

import sys
from enum import StrEnum

import msgspec

from stepkeeper.slurm.client import SlurmClient, SlurmError
from stepkeeper.slurm.commands import SlurmCommands
from stepkeeper.slurm.pyslurm_client import PyslurmClient


class ClientKind(StrEnum):
    """The clients that there are."""

    COMMANDS = "commands"
    PYSLURM = "pyslurm"


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The client that was chosen, and why: for the caller's log."""

    client: SlurmClient
    kind: ClientKind
    why: str


def choose(wanted: ClientKind = ClientKind.COMMANDS, *, job: str | None = None, python: str = sys.executable) -> Choice:
    """Return a client that works here: a wish that does not fit is no reason to stop a run.

    Whether pyslurm fits is asked of it, not read off versions: it must tell the same of this cluster, and of `job`,
    as Slurm's commands do.

    Args:
        wanted: What the settings ask for.
        job: Our own job, if we are in one.
        python: The interpreter that has pyslurm.

    Raises:
        SlurmError: Slurm's commands do not answer either.
    """
    commands = SlurmCommands()
    if wanted is ClientKind.COMMANDS:
        return Choice(client=commands, kind=ClientKind.COMMANDS, why="Slurm's commands, as set")
    client = PyslurmClient(python=python, commands=commands)
    if misfit := _misfit(client, commands, job):
        client.close()
        return Choice(
            client=commands, kind=ClientKind.COMMANDS, why=f"Slurm's commands, for pyslurm does not fit: {misfit}"
        )
    return Choice(client=client, kind=ClientKind.PYSLURM, why="pyslurm, as set: it tells the same as Slurm's commands")


def _misfit(client: SlurmClient, commands: SlurmClient, job: str | None) -> str:
    """Return what speaks against a client; empty where nothing does."""
    known = commands.settings()
    facts = commands.job(job) if job is not None else None
    try:
        told = client.settings()
        if told != known:
            return f"it tells {told}, Slurm's commands {known}"
        if job is not None and facts is not None and (of_job := client.job(job)) != facts:
            return f"it tells {of_job} of job {job}, Slurm's commands {facts}"
    except SlurmError as error:
        return str(error)
    return ""
