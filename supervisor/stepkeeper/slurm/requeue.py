"""Requeueing our own job: away from faulty nodes, and eligible at once where a node agent helps.

Used by the supervisor and, when that is gone, by the watcher that rescues the run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import msgspec

from stepkeeper import __version__
from stepkeeper.node_agent.client import AgentError, connect
from stepkeeper.slurm.client import SlurmClient, SlurmError
from stepkeeper.slurm.launch import node_name
from stepkeeper.watcher.messages import Assignment

AGENT_WITHIN_S = 2.0  # of the time that Slurm leaves us


def requeue(
    client: SlurmClient, assignment: Assignment, *, exclude: Sequence[str] = (), readmit: Sequence[str] = ()
) -> str:
    """Requeue the job; return what did not succeed besides, in words.

    Args:
        client: Slurm's.
        assignment: names the job and the attempt that ends.
        exclude: nodes to add to those on which the job may not run, the weakest reason first.
        readmit: nodes to take off that list.

    Raises:
        SlurmError: it is not requeued.
    """
    job = assignment.slurm_name
    listed: tuple[str, ...] | None = None  # None: as it is
    trouble = []
    if exclude or readmit:
        try:
            listed, allowed = _merged(client, job, assignment.nodes, exclude, readmit)
            trouble += allowed
        except SlurmError as error:
            trouble.append(f"the job's excluded nodes are not changed: {error}")
    try:
        _expedite(assignment, listed)
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


class RequeuePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The job that goes on with the run in place of ours."""

    job_id: int
    besides: str  # what did not succeed, or may differ, in words


def resubmit(
    client: SlurmClient, assignment: Assignment, *, exclude: Sequence[str] = (), readmit: Sequence[str] = ()
) -> RequeuePlan:
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
            listed, allowed = _merged(client, job, assignment.nodes, exclude, readmit)
            trouble += allowed
        elif known := client.job(job).excluded:
            listed = client.hostnames(known)
    except SlurmError as error:
        trouble.append(f"no nodes are excluded: {error}")
    new = client.resubmit(job, assignment.run_directory, len(assignment.nodes), assignment.words, listed)
    if new.found:
        trouble.append("it had been submitted before")
    if new.unknown:
        trouble.append(f"what it may lack of job {job}: {'; '.join(new.unknown)}")
    return RequeuePlan(job_id=new.job_id, besides="; ".join(trouble))


def _expedite(assignment: Assignment, excluded: tuple[str, ...] | None) -> None:
    """Have this node's agent, if there is one, end Slurm's delay after the requeue.  Raises AgentError."""
    agent = connect(os.environ, node_name())
    if agent is None:
        return
    with agent:
        agent.join(assignment.job_id, assignment.restart_count, version=__version__, within_s=AGENT_WITHIN_S)
        agent.expedite(assignment.job_id, assignment.restart_count, excluded, within_s=AGENT_WITHIN_S)


def affordable(exclude: Sequence[str], fit: Collection[str], wanted: int) -> tuple[str, ...]:
    """Return the nodes that a job can do without, of those that it should not get.

    As few as possible are given up, from the front.  Where all of them are not enough either, nodes are down: then the
    job can do without none, and starts as soon as any returns.

    Args:
        exclude: the weakest reason first.
        fit: all nodes that the job could get; only such a one is a loss.
        wanted: so many nodes the job has to get, spares included.

    >>> affordable(["lost", "old", "new"], ["a", "lost", "old", "new"], 2)
    ('old', 'new')
    """
    lacking = wanted - len(set(fit).difference(exclude))
    of_use = [node for node in exclude if node in fit]
    if lacking > len(of_use):
        return ()
    given_up = of_use[: max(0, lacking)]
    return tuple(node for node in exclude if node not in given_up)


def _merged(
    client: SlurmClient, job: str, nodes: Sequence[str], exclude: Sequence[str], readmit: Sequence[str]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the job's whole list, which an update replaces, and what is not in it though it should be, in words.

    What would leave too few nodes is not excluded: nobody lifts an exclusion while the job waits.  A job that takes a
    range of numbers counts as wanting as many nodes as it has now; a node that its user excludes too counts as ours.

    Raises:
        SlurmError: the list is not known.
    """
    facts = client.job(job)
    before = client.hostnames(facts.excluded) if facts.excluded else ()
    required = client.hostnames(facts.required) if facts.required else ()  # Slurm refuses a node in both lists
    kept = tuple(node for node in before if node not in readmit and node not in exclude)
    wished = tuple(dict.fromkeys(node for node in exclude if node not in required))
    if not wished:
        return kept, []
    fit = set(client.usable_nodes(job, nodes)).difference(kept)
    excluded = affordable(wished, fit, len(nodes))
    if excluded == wished:
        return (*kept, *excluded), []
    allowed = ", ".join(node for node in wished if node not in excluded)
    left = len(fit.difference(wished))
    why = f"without {', '.join(wished)} the job has {left} usable nodes, and wants {len(nodes)}"
    return (*kept, *excluded), [f"not excluded, for want of others: {allowed} ({why})"]
