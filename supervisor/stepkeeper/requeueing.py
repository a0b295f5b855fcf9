"""Requeueing our own job: away from faulty nodes, and eligible at once where a node agent helps.

Used by the supervisor and, when that is gone, by the watcher that rescues the run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from stepkeeper import __version__
from stepkeeper.node.client import AgentError, connect
from stepkeeper.slurm.client import SlurmClient, SlurmError
from stepkeeper.slurm.environment import node_name
from stepkeeper.watcher.assignment import Assignment

AGENT_WITHIN_S = 2.0  # of the time that Slurm leaves us


def requeue(
    client: SlurmClient, assignment: Assignment, *, exclude: Sequence[str] = (), readmit: Sequence[str] = ()
) -> str:
    """Requeue the job; return what did not succeed besides, in words.

    Args:
        client: Slurm's.
        assignment: names the job and the attempt that ends.
        exclude: nodes to add to those on which the job may not run.
        readmit: nodes to take off that list.

    Raises:
        SlurmError: it is not requeued.
    """
    job = assignment.slurm_name
    listed: tuple[str, ...] | None = None  # None: as it is
    trouble = []
    if exclude or readmit:
        try:
            listed = _merged(client, job, len(assignment.nodes), exclude, readmit)
        except SlurmError as error:
            trouble.append(f"the job's excluded nodes are not changed: {error}")
    try:
        _hasten(assignment, listed)
    except AgentError as error:
        trouble.append(f"the node agent does not make the job eligible at once: {error}")
    client.requeue(job)
    if listed is not None:
        try:
            client.exclude(job, listed)
        except SlurmError as error:
            trouble.append(f"the excluded nodes could not be set: {error}")
    return "; ".join(trouble)


def give_back(client: SlurmClient, job: str, keep: Sequence[str]) -> str:
    """Give back all nodes but some, before the job leaves them all; return what stood against it, in words.

    A node that is lost keeps the job COMPLETING until Slurm marks it DOWN; the job asks for as many nodes as ever.
    """
    try:
        client.keep(job, keep)
    except (SlurmError, OSError) as error:
        return f"the lost nodes stay in the job, which may wait for them: {error}"
    return ""


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """The job that goes on with the run in place of ours."""

    job_id: int
    besides: str  # what did not succeed, or may differ, in words


def resubmit(
    client: SlurmClient, assignment: Assignment, *, exclude: Sequence[str] = (), readmit: Sequence[str] = ()
) -> Again:
    """Submit the job again where Slurm may not requeue it, once; the arguments are those of `requeue`.

    Raises:
        SlurmError: it is not submitted; the message says how a person does it.
        OSError: the same, for the node's own disk.
    """
    trouble = []
    listed: tuple[str, ...] = ()
    job = assignment.slurm_name
    try:
        if exclude or readmit:
            listed = _merged(client, job, len(assignment.nodes), exclude, readmit)
        elif known := client.job(job).excluded:
            listed = client.hostnames(known)
    except SlurmError as error:
        trouble.append(f"no nodes are excluded: {error}")
    new = client.resubmit(job, assignment.run_directory, len(assignment.nodes), assignment.words, listed)
    if new.found:
        trouble.append("it had been submitted before")
    if new.unknown:
        trouble.append(f"what it may lack of job {job}: {'; '.join(new.unknown)}")
    return Again(job_id=new.job_id, besides="; ".join(trouble))


def _hasten(assignment: Assignment, excluded: tuple[str, ...] | None) -> None:
    """Have this node's agent, if there is one, end Slurm's delay after the requeue.  Raises AgentError."""
    agent = connect(os.environ, node_name())
    if agent is None:
        return
    with agent:
        agent.join(assignment.job_id, assignment.restart_count, version=__version__, within_s=AGENT_WITHIN_S)
        agent.hasten(assignment.job_id, assignment.restart_count, excluded, within_s=AGENT_WITHIN_S)


def _merged(
    client: SlurmClient, job: str, nodes_wanted: int, exclude: Sequence[str], readmit: Sequence[str]
) -> tuple[str, ...]:
    """Return the job's whole list: an update replaces it.

    Raises:
        SlurmError: it is not known, or would leave the job too few nodes: it would wait until a person helps.
    """
    facts = client.job(job)
    before = client.hostnames(facts.excluded) if facts.excluded else ()
    required = client.hostnames(facts.required) if facts.required else ()  # Slurm refuses a node in both lists
    kept = [node for node in before if node not in readmit]
    merged = tuple(dict.fromkeys([*kept, *(node for node in exclude if node not in required)]))
    left = set(client.usable_nodes(job)).difference(merged)
    if exclude and len(left) < nodes_wanted:
        raise SlurmError(
            f"without {', '.join(exclude)} the partition has {len(left)} usable nodes, and the job wants {nodes_wanted}"
        )
    return merged
