"""What the node agent asks of Slurm: nodes, drains, and a requeued job's eligibility.  Needs root or SlurmUser."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stepkeeper.slurm.client import JobsHere, NodeFacts, OwnedJob, SlurmError, expand, field_of, shown_job
from stepkeeper.slurm.jobs import AWAY, call

CALL_WITHIN_S = 10.0
ROOT = 0
DELAYS = (*AWAY, "configuration source")
# base states and flags as Slurm 22.05 to 26.05 print them; a trailing sign says how the node answers
_SIGNS = "*~#!%$@^-"
_OWNER = re.compile(r" UserId=[^=]*\((\d+)\) GroupId=")
_REASON = re.compile(r" Reason=(.*?) \[[^\[\]@\s]*@([^\]\s]*)\](?= [A-Z][A-Za-z]*=|\s*$)")
_REASON_ALONE = re.compile(r" Reason=(.*?)(?= [A-Z][A-Za-z]*=|\s*$)")
_TOTAL_NODES = re.compile(r"\sTotalNodes=(\d+)(K?)")
_TASK = re.compile(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\d+)\s")  # before the name, which is its user's
COLUMNS = {
    "NodeHost": 256,
    "NodeAddr": 256,
    "StateComplete": 256,
    "Partition": 256,
    "Gres": 512,
    "Timestamp": 64,
    "Reason": 1024,
}


@dataclass(frozen=True, slots=True)
class NodeCommands:
    """Calls scontrol, each method once and with a time limit; all raise `SlurmError`.  `jobs_here` asks no controller.

    `environment` goes on top of our own: SLURM_CONF, where the site's is elsewhere.
    """

    environment: Mapping[str, str]
    call_within_s: float = CALL_WITHIN_S

    def node(self, name: str) -> NodeFacts:
        """Return one node, at a small cost for the controller: two RPCs, 0.4 ms of slurmctld among 10,000 nodes."""
        # `scontrol show node NAME` has the controller send all nodes, and picks one of them
        columns = ",".join(f"{column}:{width}" for column, width in COLUMNS.items())
        words = ["sinfo", "-a", "-h", "-N", "-n", name, "-O", columns]
        text = call(words, self.call_within_s, what=f"sinfo -n {name}", delays=DELAYS, environment=self.environment)
        if text.strip():
            return parse_node(text, name)
        # sinfo shows no node that is in no partition
        return self._own(parse_nodes(self._call("-a", "-o", "show", "nodes")), name)

    def peers(self, name: str) -> tuple[NodeFacts, ...]:
        """Return every node that shares a partition with this one, itself included: for the circuit breaker.

        Slurm cannot be asked for counts, or for a part of the nodes: it packs all of them, 1 to 7 microseconds each.
        """
        found = parse_nodes(self._call("-a", "-o", "show", "nodes"))
        own = self._own(found, name)
        ours = set(own.partitions)
        return tuple(each for each in found if each is own or ours & set(each.partitions))

    def cluster_size(self) -> int:
        """Return about how many nodes there are, never too few, at a small cost for the controller."""
        return parse_size(self._call("-a", "-o", "show", "partitions"))

    @staticmethod
    def _own(nodes: tuple[NodeFacts, ...], name: str) -> NodeFacts:
        own = next((each for each in nodes if each.name == name), None)
        if own is None:
            raise SlurmError(f"Slurm knows no node {name}; is `node_name` right?")
        return own

    def drain(self, name: str, reason: str) -> None:
        """Set the state DRAIN with a reason."""
        self._call("update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")

    def resume(self, name: str) -> None:
        """Return a node to service."""
        self._call("update", f"NodeName={name}", "State=RESUME")

    def reboot(self, name: str, reason: str) -> None:
        """Have Slurm reboot the node as soon as its jobs are gone, and return it to service afterwards."""
        self._call("reboot", "ASAP", "nextstate=RESUME", f"reason={reason}", name)

    def owned_job(self, job_id: int) -> OwnedJob:
        """Return whose job it is and where it runs."""
        return parse_owned_job(self._call("-o", "show", "job", str(job_id)), job_id)

    def expedite(self, job: OwnedJob, exclude: str | None, after_s: int) -> None:
        """Set StartTime of a pending job and, unless it is None, ExcNodeList, in one call."""
        listed = [] if exclude is None else [f"ExcNodeList={exclude}"]
        self._call("update", f"JobId={job.address}", *listed, f"StartTime=now+{after_s}")

    def requeue(self, job: OwnedJob) -> None:
        """Requeue a job whose expedited attempt Slurm failed before it began."""
        self._call("requeue", job.address)

    def jobs_here(self, name: str) -> JobsHere:
        """Return the jobs that run on this node and their owners, asked of the node's own slurmstepds.

        Raises:
            SlurmError: they did not answer.
        """
        try:
            pids = parse_pids(self._call("listpids", "*", name))
        except SlurmError as error:
            if "no job steps exist" in str(error).lower():
                return JobsHere()
            raise
        return JobsHere(jobs=tuple(sorted(pids)), uids=owners(pids))

    def _call(self, *arguments: str) -> str:
        return call(
            ["scontrol", *arguments],
            self.call_within_s,
            what=f"scontrol {' '.join(arguments[:4])}",
            delays=DELAYS,
            environment=self.environment,
        )


def parse_nodes(text: str) -> tuple[NodeFacts, ...]:
    """Parse `scontrol -o show nodes`, with times printed as Unix seconds.

    >>> (one,) = parse_nodes("NodeName=a Arch=x State=MIXED+DRAIN* Partitions=p,q  CfgTRES=cpu=8 "
    ...                      "Reason=stepkeeper: XID 79 State=IDLE [a.1] [root@1790000000]")
    >>> sorted(one.states), one.reason, one.reason_at, one.partitions
    (['DRAIN', 'MIXED'], 'stepkeeper: XID 79 State=IDLE [a.1]', 1790000000.0, ('p', 'q'))
    """
    return tuple(_node(line) for line in text.splitlines() if line.startswith("NodeName="))


def _node(line: str) -> NodeFacts:
    name = line.split(maxsplit=1)[0].removeprefix("NodeName=")
    head = line.split(" Reason=", 1)[0]  # a reason may look like anything; all that we read stands before it
    states = re.search(r"\sState=(\S+)", head)
    if states is None:
        raise SlurmError(f"scontrol show nodes: unexpected answer about {name}: {line[:200]!r}")
    partitions = re.search(r"\sPartitions=(\S+)", head)
    reason, reason_at = _reason(line)
    return NodeFacts(
        name=name,
        states=frozenset(word.strip(_SIGNS) for word in states.group(1).upper().split("+")),
        reason=reason,
        reason_at=reason_at,
        partitions=tuple(sorted(partitions.group(1).split(","))) if partitions else (),
        host=field_of(head, "NodeHostName"),
        address=field_of(head, "NodeAddr"),
        gres=field_of(head, "Gres"),
    )


def parse_node(text: str, name: str) -> NodeFacts:
    """Parse what `sinfo -N -n NAME -O ...` prints: a line for each partition of the node, and one at least."""
    rows = [_cells(line) for line in text.splitlines() if line.strip()]
    first = rows[0]
    since, reason = first["Timestamp"], first["Reason"]
    return NodeFacts(
        name=name,
        states=frozenset(word.strip(_SIGNS) for word in first["StateComplete"].upper().split("+")),
        reason="" if reason == "none" and not since.isdigit() else reason,
        reason_at=float(since) if since.isdigit() else None,
        partitions=tuple(sorted(row["Partition"].rstrip("*") for row in rows if row["Partition"])),
        host=first["NodeHost"],
        address=first["NodeAddr"],
        gres=first["Gres"].removeprefix("(null)"),
    )


def parse_size(text: str) -> int:
    r"""Sum up the nodes of all partitions in `scontrol -o show partitions`: a node in two of them counts twice.

    >>> parse_size("PartitionName=a State=UP TotalNodes=4 QOS=N/A\nPartitionName=b TotalCPUs=8K TotalNodes=2K ")
    2052
    """
    return sum(int(number) * (1024 if thousands else 1) for number, thousands in _TOTAL_NODES.findall(text))


def _cells(line: str) -> dict[str, str]:
    """Cut a line into its columns, all of a fixed width; the reason, which may hold anything, is the last one."""
    cells, at = {}, 0
    for column, width in COLUMNS.items():
        cells[column] = line[at : at + width].strip()
        at += width
    return cells


def _reason(line: str) -> tuple[str, float | None]:
    if match := _REASON.search(line):
        return match.group(1), float(match.group(2)) if match.group(2).isdigit() else None
    match = _REASON_ALONE.search(line)
    return (match.group(1) if match else ""), None


def parse_owned_job(text: str, job_id: int) -> OwnedJob:
    """Parse the line of one job in `scontrol -o show job`, which shows a whole array for its leader.

    A job's name, directory and comment are its user's, and may look like any field.  The name stands before all that
    is read here, the others behind it: a line that names two owners is refused.

    >>> parse_owned_job("JobId=7 JobName=x UserId=me(1000) GroupId=g(1) JobState=PENDING Reason=None Restarts=1 "
    ...                 "EligibleTime=1790000000 ExcNodeList=a NodeList=(null)", 7).uid
    1000

    Raises:
        SlurmError: no such job in it, or its owner is not known.
    """
    line = next((line for line in text.splitlines() if re.match(rf"JobId={job_id}\s", line)), None)
    if line is None:
        raise SlurmError(f"scontrol show job {job_id}: the answer is about another job: {text[:100]!r}")
    owners = _OWNER.findall(line)
    if len(owners) != 1:
        raise SlurmError(
            f"scontrol show job {job_id}: it names {len(owners)} owners: do name and paths look like fields?"
        )
    fields = shown_job(line).fields
    eligible, reason = fields.get("EligibleTime", ""), fields.get("Reason", "")
    return OwnedJob(
        job_id=job_id,
        uid=int(owners[0]),
        state=fields.get("JobState", ""),
        restarts=int(fields.get("Restarts", 0)),
        nodes=expand(fields["NodeList"]) if "NodeList" in fields else (),
        exclude=fields.get("ExcNodeList", ""),
        eligible_at=float(eligible) if eligible.isdigit() else None,
        held=fields.get("Priority") == "0" or "held" in reason.lower(),
        reason=reason,
        exit_code=fields.get("ExitCode", ""),
        ran_s=_ran_s(fields.get("StartTime", ""), fields.get("EndTime", "")),
        task="_".join(task.groups()) if (task := _TASK.match(line)) else "",
    )


def _ran_s(start: str, end: str) -> float | None:
    return max(0.0, float(end) - float(start)) if start.isdigit() and end.isdigit() else None


def parse_pids(text: str) -> dict[int, tuple[int, ...]]:
    r"""Parse `scontrol listpids`: each job with its processes.

    >>> parse_pids("PID      JOBID    STEPID\n22926    12       batch\n22927    7        0\n")
    {12: (22926,), 7: (22927,)}
    """
    found: dict[int, tuple[int, ...]] = {}
    for row in (line.split() for line in text.splitlines()):
        if len(row) > 1 and row[1].isdigit() and re.fullmatch(r"-?\d+", row[0]):
            own = (int(row[0]),) if row[0].isdigit() else ()  # a step without processes has -1
            found[int(row[1])] = found.get(int(row[1]), ()) + own
    return {job: pids for job, pids in found.items() if pids}


def owners(pids: Mapping[int, tuple[int, ...]], *, proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Return the users whom the jobs' processes belong to; () where that is not known of every job.

    Root's processes say nothing: Slurm keeps one of its own in a job.
    """
    found: set[int] = set()
    for of_job in pids.values():
        uids = {uid for pid in of_job if (uid := _real_uid(proc / str(pid) / "status")) is not None} - {ROOT}
        if not uids:
            return ()
        found |= uids
    return tuple(sorted(found))


def _real_uid(status: Path) -> int | None:
    """Return who started a process: the owner of its directory is root where it may not be traced."""
    try:
        match = re.search(r"^Uid:\s+(\d+)", status.read_text(errors="replace"), re.MULTILINE)
    except OSError:  # it has ended
        return None
    return int(match.group(1)) if match else None
