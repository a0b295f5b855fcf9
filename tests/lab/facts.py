"""What `scontrol -o show` prints about jobs and nodes, parsed.  Pure."""

import re
from dataclasses import dataclass, field
from datetime import datetime

_PAIR = re.compile(r"(?:^|\s)([A-Z][A-Za-z:/]*)=")
_AWAY = frozenset(("DRAIN", "FAIL", "NOT_RESPONDING"))
_HOSTLIST = re.compile(r"([^,\[\]]+)(?:\[([^\]]*)\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job as slurmctld sees it now."""

    job_id: int
    state: str
    reason: str
    restarts: int
    exit_code: str
    nodes: tuple[str, ...]
    """The allocation now; empty while the job waits."""
    batch_host: str
    excluded: tuple[str, ...]
    preempted_at: datetime | None
    started_at: datetime | None
    ends_at: datetime | None
    eligible_at: datetime | None
    raw: dict[str, str] = field(repr=False)
    """All the rest, by Slurm's own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node as slurmctld sees it now."""

    name: str
    state: str
    """Base state and flags as printed, as in `IDLE+DRAIN`; a node that does not answer ends in `*`."""
    reason: str
    raw: dict[str, str] = field(repr=False)

    @property
    def is_up(self) -> bool:
        """Tell whether jobs can run: registered, answering, not down and not drained."""
        base, *flags = self.state.rstrip("*").split("+")
        return base in {"IDLE", "ALLOCATED", "MIXED"} and not self.state.endswith("*") and _AWAY.isdisjoint(flags)


def pairs(line: str) -> dict[str, str]:
    """Split one line of `scontrol -o`; values may hold blanks.

    >>> pairs("JobId=7 JobName=a b Reason=None")
    {'JobId': '7', 'JobName': 'a b', 'Reason': 'None'}
    """
    found = list(_PAIR.finditer(line))
    ends = [match.start() for match in found[1:]] + [len(line)]
    return {match[1]: line[match.end() : end].strip() for match, end in zip(found, ends, strict=True)}


def hosts(hostlist: str) -> tuple[str, ...]:
    """Expand a host list.

    >>> hosts("k1n[1-3,5],k1n9")
    ('k1n1', 'k1n2', 'k1n3', 'k1n5', 'k1n9')
    """
    if hostlist in {"", "(null)", "None"}:
        return ()
    result = []
    for prefix, numbers in _HOSTLIST.findall(hostlist):
        if not numbers:
            result.append(prefix)
        for part in filter(None, numbers.split(",")):
            first, _, last = part.partition("-")
            result += [f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return tuple(result)


def job(line: str) -> JobFacts:
    """Parse one job."""
    raw = pairs(line)
    return JobFacts(
        job_id=int(raw["JobId"]),
        state=raw["JobState"],
        reason=raw.get("Reason", "None"),
        restarts=int(raw.get("Restarts", "0")),
        exit_code=raw.get("ExitCode", ""),
        nodes=hosts(raw.get("NodeList", "")),
        batch_host=raw.get("BatchHost", ""),
        excluded=hosts(raw.get("ExcNodeList", "")),
        preempted_at=_instant(raw.get("PreemptTime")),
        started_at=_instant(raw.get("StartTime")),
        ends_at=_instant(raw.get("EndTime")),
        eligible_at=_instant(raw.get("EligibleTime")),
        raw=raw,
    )


def node(line: str) -> NodeFacts:
    """Parse one node."""
    raw = pairs(line)
    return NodeFacts(name=raw["NodeName"], state=raw["State"], reason=raw.get("Reason", ""), raw=raw)


def _instant(text: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        return None  # Unknown, None, N/A
