"""The Slurm client over Slurm's own commands: scontrol and scancel."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.slurm.calling import call
from stepkeeper.slurm.client import ClusterSettings, SlurmError

CALL_WITHIN_S = 6.0  # of a notice of 30 s, most is left when the controller does not answer
_UNREACHABLE = ("unable to contact", "connection refused", "timed out", "socket timed out", "communication")
# a state that is not listed here is none that decisions depend on: never take it for the end of a job
_STATES = {
    "PENDING": JobState.PENDING,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "COMPLETING": JobState.COMPLETING,
    **dict.fromkeys(
        (
            "BOOT_FAIL",
            "CANCELLED",
            "COMPLETED",
            "DEADLINE",
            "FAILED",
            "LAUNCH_FAILED",
            "NODE_FAIL",
            "OUT_OF_MEMORY",
            "PREEMPTED",
            "RECONFIG_FAIL",
            "REVOKED",
            "TIMEOUT",
        ),
        JobState.ENDED,
    ),
}


@dataclass(frozen=True, slots=True)
class SlurmCommands:
    """Calls scontrol and scancel with a time limit each."""

    call_within_s: float = CALL_WITHIN_S

    def job(self, job: str) -> JobFacts:
        """See `SlurmClient`."""
        return parse_job(self._call("scontrol", "-o", "show", "job", job))

    def job_runs(self, job: str) -> bool:
        """See `SlurmClient`."""
        try:
            facts = self.job(job)
        except SlurmError as error:
            if not error.unreachable and "invalid job id" in str(error).lower():
                return False
            raise
        return facts.state not in (JobState.PENDING, JobState.ENDED)

    def settings(self) -> ClusterSettings:
        """See `SlurmClient`."""
        return parse_settings(self._call("scontrol", "show", "config"))

    def hostnames(self, node_list: str) -> tuple[str, ...]:
        """See `SlurmClient`."""
        return tuple(self._call("scontrol", "show", "hostnames", node_list).split())

    def requeue(self, job: str) -> None:
        """See `SlurmClient`."""
        self._call("scontrol", "requeue", job)

    def exclude(self, job: str, nodes: Sequence[str]) -> None:
        """See `SlurmClient`."""
        self._call("scontrol", "update", f"JobId={job}", f"ExcNodeList={','.join(nodes)}")

    def usable_nodes(self, job: str) -> tuple[str, ...]:
        """See `SlurmClient`."""
        shown = self._call("scontrol", "-o", "show", "job", job)
        partition = _field(_behind_the_name(shown), "Partition")
        if partition is None:
            raise SlurmError(f"scontrol show job {job}: it names no partition")
        states = "idle,allocated,mixed,completing,reserved,planned"
        found = self._call(
            "sinfo", "--noheader", "--Node", f"--partition={partition}", f"--states={states}", "--format=%N"
        )
        drained = self._call(
            "sinfo", "--noheader", "--Node", f"--partition={partition}", "--states=drain,down", "--format=%N"
        )
        return tuple(sorted(set(found.split()) - set(drained.split())))

    def keep(self, job: str, nodes: Sequence[str]) -> None:
        """See `SlurmClient`."""
        with tempfile.TemporaryDirectory(prefix="stepkeeper-") as directory:  # scontrol leaves shell scripts there
            self._call("scontrol", "update", f"JobId={job}", f"NodeList={','.join(nodes)}", directory=directory)

    def comment(self, job: str, text: str) -> None:
        """See `SlurmClient`."""
        self._call("scontrol", "update", f"JobId={job}", f"Comment={text}")

    def cancel(self, job: str) -> None:
        """See `SlurmClient`."""
        self._call("scancel", job)

    def _call(self, *argv: str, directory: str | None = None) -> str:
        """Run one command and return what it prints."""
        return call(argv, self.call_within_s, what=" ".join(argv), delays=_UNREACHABLE, directory=directory)


def parse_job(text: str) -> JobFacts:
    """Parse one line of `scontrol -o show job`, with times printed as Unix seconds.

    >>> parse_job("JobId=7 JobName=a b UserId=u(1) GroupId=g(1) JobState=RUNNING Reason=None Requeue=1 Restarts=2 "
    ...           "EndTime=1790000000 PreemptTime=None").restarts
    2
    """
    rest = _behind_the_name(text)
    slurm_state = _field(rest, "JobState") or "?"
    return JobFacts(
        state=job_state(slurm_state),
        slurm_state=slurm_state,
        restarts=int(_field(rest, "Restarts") or 0),
        reason=_field(rest, "Reason") or "",
        preempt_at=_time(_field(rest, "PreemptTime")),
        end_at=_time(_field(rest, "EndTime")),
        requeue_allowed=_field(rest, "Requeue") != "0",
        excluded="" if (listed := _field(rest, "ExcNodeList")) in (None, "(null)") else listed,
    )


def _behind_the_name(text: str) -> str:
    """Return what follows a job's name, which may hold anything and comes before all that we read."""
    start = re.search(r" UserId=[^=]*\(\d+\) GroupId=", text)
    if start is None:
        raise SlurmError(f"scontrol show job: unexpected answer: {text[:200]!r}")
    return text[start.end() :]


def parse_settings(text: str) -> ClusterSettings:
    r"""Parse `scontrol show config`.

    >>> parse_settings("KillWait                = 30 sec\nSLURM_VERSION           = 22.05.8\n").kill_wait_s
    30.0
    """
    kill_wait = re.search(r"^KillWait\s*=\s*(\d+)", text, re.MULTILINE)
    version = re.search(r"^SLURM_VERSION\s*=\s*(\S+)", text, re.MULTILINE)
    if kill_wait is None:
        raise SlurmError("scontrol show config: it does not tell KillWait")
    return ClusterSettings(kill_wait_s=float(kill_wait.group(1)), version=version.group(1) if version else "?")


def job_state(slurm_state: str) -> JobState:
    """Return what a state means that Slurm prints: `OTHER` is none that decisions depend on."""
    return _STATES.get(slurm_state, JobState.OTHER)


def _field(text: str, name: str) -> str | None:
    match = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return match.group(1) if match else None


def _time(value: str | None) -> float | None:
    return float(value) if value and value.isdigit() else None
