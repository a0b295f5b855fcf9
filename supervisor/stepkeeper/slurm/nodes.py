"""The node client over scontrol.  Each method is one call with a time limit; `jobs_here` asks no controller."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stepkeeper.slurm.client import JobsHere, NodeFacts, OwnedJob, SlurmError
from stepkeeper.slurm.jobs import call

CALL_WITHIN_S = 10.0
ROOT = 0
DELAYS = ("unable to contact", "connection refused", "timed out", "communication", "configuration source")
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
_HOSTLIST = re.compile(r"((?:[^,\[\]]|\[[^\]]*\])+)")


@dataclass(frozen=True, slots=True)
class NodeCommands:
    """Calls scontrol.  `environment` goes on top of our own: SLURM_CONF, where the site's is elsewhere."""

    environment: Mapping[str, str]
    call_within_s: float = CALL_WITHIN_S

    def node(self, name: str) -> NodeFacts:
        """See `NodeClient`."""
        # `scontrol show node NAME` has the controller send all nodes, and picks one of them
        columns = ",".join(f"{column}:{width}" for column, width in COLUMNS.items())
        words = ["sinfo", "-a", "-h", "-N", "-n", name, "-O", columns]
        text = call(words, self.call_within_s, what=f"sinfo -n {name}", delays=DELAYS, environment=self.environment)
        if text.strip():
            return parse_node(text, name)
        # sinfo shows no node that is in no partition
        return self._own(parse_nodes(self._call("-a", "-o", "show", "nodes")), name)

    def peers(self, name: str) -> tuple[NodeFacts, ...]:
        """See `NodeClient`.  One call, for all nodes: Slurm cannot be asked for those of some partitions."""
        found = parse_nodes(self._call("-a", "-o", "show", "nodes"))
        own = self._own(found, name)
        ours = set(own.partitions)
        return tuple(each for each in found if each is own or ours & set(each.partitions))

    def cluster_size(self) -> int:
        """See `NodeClient`."""
        return parse_size(self._call("-a", "-o", "show", "partitions"))

    @staticmethod
    def _own(nodes: tuple[NodeFacts, ...], name: str) -> NodeFacts:
        own = next((each for each in nodes if each.name == name), None)
        if own is None:
            raise SlurmError(f"Slurm knows no node {name}; is `node_name` right?")
        return own

    def drain(self, name: str, reason: str) -> None:
        """See `NodeClient`."""
        self._call("update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}")

    def resume(self, name: str) -> None:
        """See `NodeClient`."""
        self._call("update", f"NodeName={name}", "State=RESUME")

    def reboot(self, name: str, reason: str) -> None:
        """See `NodeClient`."""
        self._call("reboot", "ASAP", "nextstate=RESUME", f"reason={reason}", name)

    def owned_job(self, job_id: int) -> OwnedJob:
        """See `NodeClient`."""
        return parse_owned_job(self._call("-o", "show", "job", str(job_id)), job_id)

    def expedite(self, job: OwnedJob, exclude: str | None, after_s: int) -> None:
        """See `NodeClient`."""
        listed = [] if exclude is None else [f"ExcNodeList={exclude}"]
        self._call("update", f"JobId={job.address}", *listed, f"StartTime=now+{after_s}")

    def requeue(self, job: OwnedJob) -> None:
        """See `NodeClient`."""
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
        host=_field(head, "NodeHostName"),
        address=_field(head, "NodeAddr"),
        gres=_field(head, "Gres").removeprefix("(null)"),
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
    owners = list(_OWNER.finditer(line))
    if len(owners) != 1:
        raise SlurmError(
            f"scontrol show job {job_id}: it names {len(owners)} owners: do name and paths look like fields?"
        )
    (start,) = owners
    rest = line[start.end() :]
    state = _field(rest, "JobState")
    eligible = _field(rest, "EligibleTime")
    nodes = _field(rest, "NodeList")
    exclude = _field(rest, "ExcNodeList")
    reason = _field(rest, "Reason")
    return OwnedJob(
        job_id=job_id,
        uid=int(start.group(1)),
        state=state,
        restarts=int(_field(rest, "Restarts") or 0),
        nodes=() if nodes in ("", "(null)") else expand(nodes),
        exclude="" if exclude == "(null)" else exclude,
        eligible_at=float(eligible) if eligible.isdigit() else None,
        held=_field(rest, "Priority") == "0" or "held" in reason.lower(),
        reason=reason,
        exit_code=_field(rest, "ExitCode"),
        ran_s=_ran_s(_field(rest, "StartTime"), _field(rest, "EndTime")),
        task="_".join(task.groups()) if (task := _TASK.match(line)) else "",
    )


def _ran_s(start: str, end: str) -> float | None:
    return max(0.0, float(end) - float(start)) if start.isdigit() and end.isdigit() else None


def _field(text: str, name: str) -> str:
    match = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return match.group(1) if match else ""


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


def expand(hostlist: str) -> tuple[str, ...]:
    """Expand a host list as Slurm prints it: without a call.

    >>> expand("gpu[08-10,12],login1")
    ('gpu08', 'gpu09', 'gpu10', 'gpu12', 'login1')
    >>> expand("r[1-2]n[1-2]")
    ('r1n1', 'r1n2', 'r2n1', 'r2n2')
    """
    names: list[str] = []
    if re.search(r"[\[\]]", re.sub(r"\[[^\[\]]*\]", "", hostlist)):
        raise SlurmError(f"a node list that cannot be read: {hostlist}")
    for word in _HOSTLIST.findall(hostlist):
        expanded = [""]
        for text, numbers in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", word):
            parts = [text] if text else _numbers(numbers)
            expanded = [before + part for before in expanded for part in parts]
        names += expanded
    return tuple(names)


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (not last or last.isdigit())):
            raise SlurmError(f"a node list that cannot be read: [{text}]")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return found
