"""A Slurm that knows some jobs and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.slurm.client import SlurmError


class Answering:
    """Answers with the states of its jobs; remembers which it was asked to cancel."""

    def __init__(self, jobs: Mapping[int, JobState], *, away: bool = False) -> None:
        self._jobs, self._away = jobs, away
        self.cancelled: list[str] = []

    def job(self, job: str) -> JobFacts:
        if self._away:
            raise SlurmError("slurmctld is away", unreachable=True)
        if int(job) not in self._jobs:
            raise SlurmError("slurm_load_jobs error: Invalid job id specified")
        state = self._jobs[int(job)]
        return JobFacts(state=state, slurm_state=state.value, restarts=0)

    def cancel(self, job: str) -> None:
        self.cancelled.append(job)
