"""Going on in a new allocation: our own job is requeued, or submitted again in the same way.

A requeue is away from faulty nodes, and eligible at once where a node agent helps.  Used by the supervisor and, when
that is gone, by the watcher that rescues the run.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from stepkeeper import __version__
from stepkeeper.node_agent.protocol import AgentError, connect
from stepkeeper.run_store import submission as submissions
from stepkeeper.run_store.submission import Submission
from stepkeeper.slurm import resubmission
from stepkeeper.slurm.client import SlurmError, shown_job
from stepkeeper.slurm.jobs import SlurmCommands, call, parse_submitted
from stepkeeper.slurm.launch import as_submitted, node_name
from stepkeeper.watcher.messages import Assignment

# Slurm 22.05 delays an update of a shrunk job that its database does not know, for 5 s.  It carries the update out once
# the job has ended, which waits for us; so nobody waits for the answer.
UNKNOWN_S = 1.0
AGENT_WITHIN_S = 2.0  # of the time that Slurm leaves us


def requeue(
    client: SlurmCommands,
    assignment: Assignment,
    *,
    exclude: Sequence[str] = (),
    readmit: Sequence[str] = (),
    shrunk: bool = False,
) -> str:
    """Requeue the job; return what did not succeed besides, in words.

    Args:
        client: Slurm's.
        assignment: names the job and the attempt that ends.
        exclude: nodes to add to those on which the job may not run, the weakest reason first.
        readmit: nodes to take off that list.
        shrunk: the job has given back nodes a moment ago.

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
            unknown = shrunk and not assignment.accounting
            client.exclude(job, listed, within_s=UNKNOWN_S if unknown else None)
        except SlurmError as error:
            trouble.append(f"Slurm has not confirmed the excluded nodes: {error}")
    return "; ".join(trouble)


def give_back(client: SlurmCommands, job: str, keep: Sequence[str]) -> str:
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
    client: SlurmCommands, assignment: Assignment, *, exclude: Sequence[str] = (), readmit: Sequence[str] = ()
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
    client: SlurmCommands, job: str, nodes: Sequence[str], exclude: Sequence[str], readmit: Sequence[str]
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


# How a job was submitted, as its supervisor and Slurm know it, and submitting it again in the same way.

CALL_WITHIN_S = 20.0
SUBMIT_WITHIN_S = 60.0
_OF_THAT_TIME = ("--dependency=", "--comment=", "--deadline=")  # options that make no sense for a later job
_SCRIPT = "batch.sh"  # name of a script that came from sbatch's standard input


def find_out(
    job: str, environment: Mapping[str, str], words: Sequence[str] = (), nodes: int | None = None
) -> Submission:
    """Ask Slurm how a job was submitted.

    Args:
        job: as Slurm's commands name it.
        environment: of the batch process; empty where it is not known.
        words: the supervisor's own command line.
        nodes: of the job as it was submitted; what Slurm shows, if that is not known.

    Raises:
        SlurmError: Slurm does not know the job any more, keeps no batch script of it, or does not answer.
    """
    shown = call(["scontrol", "-o", "show", "job", job], CALL_WITHIN_S, what="scontrol show job").splitlines()[0]
    script = call(["scontrol", "write", "batch_script", job, "-"], CALL_WITHIN_S, what="scontrol write batch_script")
    if not script.startswith("#!"):
        raise SlurmError(f"scontrol write batch_script: Slurm keeps no batch script of job {job}")
    fields = shown_job(shown).fields
    planned = resubmission.plan(
        shown,
        script,
        as_submitted(environment),
        words,
        nodes=nodes or _nodes(fields),
        exclude=fields.get("ExcNodeList", ""),
        comment="",
    )
    return Submission(
        job=job,
        at=float(fields["SubmitTime"]) if fields.get("SubmitTime", "").isdigit() else time.time(),
        directory=environment.get("SLURM_SUBMIT_DIR") or planned.directory,
        log=fields.get("StdOut", ""),
        script=script,
        path=planned.script or "",
        options=tuple(option for option in planned.options if not option.startswith(_OF_THAT_TIME)),
        arguments=planned.arguments,
        environment=submissions.settings(as_submitted(environment)),
        unknown=planned.unknown if environment else (*planned.unknown, "settings that were variables of its shell"),
    )


def log_of(job: str) -> str:
    """Return where Slurm writes the log of a job, as a help for people; empty where it does not say, or not answer."""
    try:
        shown = call(["scontrol", "-o", "show", "job", job], CALL_WITHIN_S, what="scontrol show job")
    except SlurmError:
        return ""
    return shown_job(shown).fields.get("StdOut", "")


def options(submission: Submission, more: Sequence[str] = ()) -> list[str]:
    """Return the options of sbatch for the same job again: those of then, what must be exported, and `more`."""
    found = list(submission.options)
    if not any(option.startswith("--export=") for option in found):
        directive = re.search(r"^#SBATCH\s+(?:.*\s)?--export[= ](\S+)", submission.script, re.MULTILINE)
        if directive is not None:  # else it is ALL
            found.append(f"--export={resubmission.export(directive.group(1))}")
    return [*found, *more]


def submit(submission: Submission, run_directory: Path, number: int, more: Sequence[str] = ()) -> str:
    """Submit a job again, to go on with its run, and return the new one as Slurm's commands name it.

    Args:
        submission: how it was submitted.
        run_directory: absolute.
        number: of the job that had the run last.
        more: options of sbatch besides.

    Raises:
        SlurmError: Slurm refuses it, or does not answer.
        OSError: its script cannot be handed over.
    """
    environment = {
        **resubmission.environment_of(os.environ, str(run_directory), str(number)),
        **submission.environment,
    }
    place = submission.directory if os.path.isdir(submission.directory) else os.getcwd()
    with tempfile.TemporaryDirectory(prefix="stepkeeper-") as directory:  # ours alone
        path = Path(directory, os.path.basename(submission.path) or _SCRIPT)
        path.write_text(submission.script, encoding="utf-8", errors="surrogateescape")
        argv = ["sbatch", "--parsable", *options(submission, more), str(path), *submission.arguments]
        said = call(
            argv, SUBMIT_WITHIN_S, what="sbatch", environment=environment, instead_of_ours=True, directory=place
        )
    job = parse_submitted(said)
    task = next((option.partition("=")[2] for option in submission.options if option.startswith("--array=")), "")
    return f"{job}_{task}" if task else str(job)


def _nodes(fields: Mapping[str, str]) -> int:
    """Return how many nodes Slurm shows: `2`, or `2-4` of a job that waits."""
    match = re.match(r"\d+", fields.get("NumNodes", ""))
    return int(match.group()) if match else 1
