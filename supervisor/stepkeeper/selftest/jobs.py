"""The jobs of a self-test, also where the site lets none be requeued and another one is submitted in its place."""

from __future__ import annotations

import os
import re
from typing import Protocol

from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.slurm.calling import call
from stepkeeper.slurm.client import SlurmError

WITHIN_S = 10.0
_FOLLOWS = re.compile(r"(?P<job>\d+)\|.*\bstepkeeper:after=(?P<before>\d+)\.")  # what its comment says


class Slurm(Protocol):
    """What is asked of a `SlurmClient` here."""

    def job(self, job: str) -> JobFacts:
        """Return the facts of a job."""
        ...

    def cancel(self, job: str) -> None:
        """Cancel a job of our own."""
        ...


def listed() -> str:
    """Return this user's jobs and their comments.  Raises SlurmError."""
    argv = ("squeue", "--noheader", f"--user={os.getuid()}", "--states=all", "--format=%A|%k")
    return call(argv, WITHIN_S, what="squeue")


def chain(listing: str, job: int) -> tuple[int, ...]:
    r"""Return a job and those that were submitted in its place, one after the other.

    >>> chain("9|stepkeeper:after=7.0\n8|(null)\n7|(null)\n12|mine stepkeeper:after=9.1", 7)
    (7, 9, 12)
    """
    followed = {int(match["before"]): int(match["job"]) for match in map(_FOLLOWS.match, listing.splitlines()) if match}
    found = [job]
    while (following := followed.get(found[-1])) is not None and following not in found:
        found.append(following)
    return tuple(found)


def state(slurm: Slurm, job: int) -> JobState:
    """Return the state of a job; one that Slurm has forgotten has ended.  Raises SlurmError."""
    try:
        return slurm.job(str(job)).state
    except SlurmError as error:
        if not error.forgotten:
            raise
        return JobState.ENDED


def newest(job: int) -> int:
    """Return the job that goes on in place of another one: itself, if none was submitted.  Raises SlurmError."""
    return chain(listed(), job)[-1]


def over(slurm: Slurm, job: int) -> tuple[bool, int]:
    """Tell whether a job and all in its place have ended, and which is the newest of them.

    A Slurm that does not answer says nothing of an end: it is asked again.

    Raises:
        SlurmError: Slurm refuses to tell.
    """
    try:
        if state(slurm, job) is not JobState.ENDED:
            return False, job
        last = newest(job)
        return last == job or state(slurm, last) is JobState.ENDED, last
    except SlurmError as error:
        if error.unreachable:
            return False, job
        raise


def stop(slurm: Slurm, job: int) -> None:
    """Cancel what is left of a job and of those in its place, the last one first: nobody follows it.

    Raises:
        SlurmError: Slurm does not answer, or refuses.
    """
    for each in reversed(chain(listed(), job)):
        if state(slurm, each) is not JobState.ENDED:
            slurm.cancel(str(each))
