"""What Slurm says: errors, facts of jobs and nodes; how answers and host lists are read.  Nothing is asked here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import msgspec

_HOSTLIST = re.compile(r"((?:[^,\[\]]|\[[^\]]*\])+)")
_DIGITS_MAX = 9  # of a number in a host list: more are part of a name
_FORBIDDEN = ("presently disabled", "permission denied", "not permitted", "invalid user id")


class SlurmError(Exception):
    """A call failed: `unreachable` if the controller did not answer, else Slurm refused it."""

    def __init__(self, message: str, *, unreachable: bool = False, no_such_job: bool = False) -> None:
        super().__init__(message)
        self.unreachable = unreachable
        self._no_such_job = no_such_job

    @property
    def forbidden(self) -> bool:
        """Whether the site does not let us do this: to try it again is of no use."""
        said = str(self).lower()
        return not self.unreachable and any(words in said for words in _FORBIDDEN)

    @property
    def forgotten(self) -> bool:
        """Whether Slurm knows no such job, or none any more."""
        return self._no_such_job or (not self.unreachable and "invalid job id" in str(self).lower())


def is_unconfigured(error: str) -> bool:
    """Tell whether Slurm's commands found neither a slurm.conf nor a server that has one."""
    said = error.lower()
    return "could not establish a configuration source" in said or "unable to process configuration file" in said


class Resubmitted(msgspec.Struct, frozen=True, kw_only=True):
    """A job that goes on with the run of another one, which Slurm may not requeue."""

    job_id: int
    found: bool = False  # it was there: submitted by somebody who was ended before he could say so
    unknown: tuple[str, ...] = ()  # in what it may differ from the job before


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a cluster that deadlines depend on."""

    kill_wait_s: float
    version: str
    accounting: bool  # in a database


# What the node agent needs to know.

REASON_PREFIX = "stepkeeper:"
_GPUS = re.compile(r"(?:^|,)gpu(:[^,:(]+)?:(\d+)")
_MIG = re.compile(r"\dg\.\d+gb")


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One node as Slurm sees it."""

    name: str
    states: frozenset[str]  # upper case, without flags' decoration: {"IDLE", "DRAIN"}, {"DOWN"}, ...
    reason: str = ""
    reason_at: float | None = None  # Unix seconds
    partitions: tuple[str, ...] = ()
    gres: str = ""  # what Slurm counts here, such as `gpu:h100:8(S:0-1)`
    host: str = ""  # NodeHostName
    address: str = ""  # NodeAddr: a name or an IP address

    @property
    def drained(self) -> bool:
        """Whether no new job is put here."""
        return bool(self.states & {"DRAIN", "DRAINED", "DRAINING"})

    @property
    def ours(self) -> bool:
        """Whether the reason is Stepkeeper's."""
        return self.reason.startswith(REASON_PREFIX)

    @property
    def gpus(self) -> int:
        """Return how many GPUs `gres` names, without slices of MIG: one GPU has up to seven.

        >>> NodeFacts(name="n", states=frozenset(), gres="gpu:h100:8(S:0-1),gpu:a100_1g.5gb:7,shard:32").gpus
        8
        """
        whole = re.sub(r"\([^)]*\)", "", self.gres)
        return sum(int(count) for kind, count in _GPUS.findall(whole) if not _MIG.search(kind))


class JobsHere(msgspec.Struct, frozen=True, kw_only=True):
    """Who is on a node now, as the node itself says."""

    jobs: tuple[int, ...] = ()
    uids: tuple[int, ...] = ()  # the jobs' owners; empty where the owner of any of them is not known


class OwnedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What decides whether a caller may have a job expedited."""

    job_id: int
    uid: int
    state: str  # as Slurm prints it: PENDING, COMPLETING, RUNNING, ...
    restarts: int
    nodes: tuple[str, ...] = ()  # now; empty while it is pending
    exclude: str = ""  # ExcNodeList
    eligible_at: float | None = None
    held: bool = False  # by a person, or requeued in held state
    reason: str = ""  # why it waits or failed, as Slurm prints it: Resources, JobLaunchFailure, ...
    exit_code: str = ""  # of an attempt that is over, as Slurm prints it: 1:0
    ran_s: float | None = None  # how long an attempt that is over ran
    task: str = ""  # `12_3`: an array's last task has the array's own job id, which stands for all its tasks

    @property
    def address(self) -> str:
        """Return the arguments of Slurm's commands that name this job and no other."""
        return self.task or str(self.job_id)


# What Slurm's commands print of a job, a node or the cluster, field by field.

_FIELD = re.compile(r"(?:^|\s)([A-Z][^\s=]*)=(\S*)")
_UNSET = ("", "(null)", "N/A", "None", "Unknown")


class ShownJob(msgspec.Struct, frozen=True):
    """One job of `scontrol -o show job`."""

    name: str  # may hold anything
    fields: Mapping[str, str]  # behind the name; those that are not set are left out


def shown_job(shown: str) -> ShownJob:
    """Read the first line of `scontrol -o show job`.

    Raises:
        SlurmError: Slurm's answer is none that this version can read.
    """
    line = shown.strip().partition("\n")[0]
    behind_the_name = r" UserId=[^=]*\(\d+\) GroupId="
    named = re.search(rf" JobName=(.*){behind_the_name}", line.partition(" Command=")[0])
    named = named or re.search(rf" JobName=(.*?){behind_the_name}", line)
    if named is None:
        raise SlurmError(f"scontrol show job: unexpected answer: {shown[:200]!r}")
    return ShownJob(named.group(1), _job_fields(line[named.end() :]))


def _job_fields(text: str) -> dict[str, str]:
    """Return the fields behind a job's name.  Words of the user's stand in Command, SubmitLine and the comments."""
    before, _, rest = text.partition(" Command=")
    command, _, rest = rest.rpartition(" WorkDir=")
    command, _, line = command.partition(" SubmitLine=")
    _, errors, streams = rest.rpartition(" StdErr=")
    fields = dict(_FIELD.findall(streams)) | dict(_FIELD.findall(before))
    found = re.search(r" StdErr=(.*) StdIn=(.*) StdOut=(.*?)(?= [A-Z]\w*=| *$)", errors + streams)
    if found is not None:
        fields |= dict(zip(("StdErr", "StdIn", "StdOut"), found.groups(), strict=True))
    directory = re.match(r"(.*?)(?= (?:[A-Z]\w*Comment|Comment|StdErr)=|$)", rest)
    fields |= {"Command": command, "SubmitLine": line, "WorkDir": directory.group(1) if directory else ""}
    return {name: value for name, value in fields.items() if value not in _UNSET}


def field_of(text: str, name: str) -> str:
    """Return the value of the first field of that name; "" where it is not set."""
    match = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return match.group(1) if match and match.group(1) not in _UNSET else ""


def parse_config(text: str) -> dict[str, str]:
    r"""Parse `scontrol show config`.

    >>> parse_config("KillWait                = 30 sec\nJobRequeue = 1\n\nSlurmctld(primary) at a is UP\n")
    {'KillWait': '30 sec', 'JobRequeue': '1'}
    """
    pairs = (line.partition("=") for line in text.splitlines() if re.match(r"\w[\w\[\]]*\s*=", line))
    return {key.strip(): value.strip() for key, _, value in pairs}


# --- host lists -----------------------------------------------------------------------------------


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


def fold(names: Sequence[str]) -> str:
    """Return a host list of nodes in their order: a word of a command line holds 128 KiB, and thousands of names more.

    >>> fold(("gpu08", "gpu09", "gpu10", "gpu12", "login"))
    'gpu[08-10,12],login'
    >>> fold(("n10", "n9", "n1"))
    'n10,n[9,1]'
    """
    words: list[str] = []
    for (text, width), group in itertools.groupby(names, _text_and_width):
        if not width:
            words += group
            continue
        ranges: list[list[int]] = []
        for number in (int(name[len(text) :]) for name in group):
            if ranges and number == ranges[-1][1] + 1:
                ranges[-1][1] = number
            else:
                ranges.append([number, number])
        shown = [f"{first:0{width}d}" + (f"-{last:0{width}d}" if last > first else "") for first, last in ranges]
        alone = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
        words.append(f"{text}{shown[0]}" if alone else f"{text}[{','.join(shown)}]")
    return ",".join(words)


def _text_and_width(name: str) -> tuple[str, int]:
    """Return a name without the number at its end, and how many digits that has; 0: none that Slurm counts."""
    text = name.rstrip("0123456789")
    width = len(name) - len(text)
    return (text, width) if width <= _DIGITS_MAX else (name, 0)


def _numbers(text: str) -> list[str]:
    found: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (not last or last.isdigit())):
            raise SlurmError(f"a node list that cannot be read: [{text}]")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return found
