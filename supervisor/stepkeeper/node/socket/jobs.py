"""The jobs whose processes joined here: what `Hasten` is checked against.  Pure, and bounded."""

from __future__ import annotations

from collections import Counter, OrderedDict

import msgspec

ROOT = 0


class JoinedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that ran on this node, for sure."""

    job_id: int
    uid: int  # who joined: the job's owner, or root
    restart_count: int  # the highest that joined


class JoinedJobs:
    """Remembers the newest ones; each user has a share, so that none can push out another's."""

    def __init__(self, *, jobs_max: int, per_uid_max: int) -> None:
        self._jobs_max = jobs_max
        self._per_uid_max = per_uid_max
        self._jobs: OrderedDict[int, JoinedJob] = OrderedDict()
        self._count: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job_id: int, uid: int, restart_count: int) -> None:
        """Remember a job whose owner was checked."""
        known = self._jobs.get(job_id)
        if known is not None:
            if uid == ROOT:
                uid = known.uid  # root watching a job does not take it from its owner
            if known.uid == uid:
                restart_count = max(restart_count, known.restart_count)
            self._drop(job_id)
        if self._count[uid] >= self._per_uid_max:
            self._drop(next(each.job_id for each in self._jobs.values() if each.uid == uid))
        elif len(self._jobs) >= self._jobs_max:
            self._drop(next(iter(self._jobs)))
        self._jobs[job_id] = JoinedJob(job_id=job_id, uid=uid, restart_count=restart_count)
        self._count[uid] += 1

    def joined_by(self, job_id: int, uid: int) -> JoinedJob | None:
        """Return the job if this user joined it; root may speak for every job that joined."""
        found = self._jobs.get(job_id)
        return found if found is not None and uid in (found.uid, ROOT) else None

    def _drop(self, job_id: int) -> None:
        gone = self._jobs.pop(job_id)
        self._count[gone.uid] -= 1
        if not self._count[gone.uid]:
            del self._count[gone.uid]
