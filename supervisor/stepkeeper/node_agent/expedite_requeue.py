"""A requeued job waits 120 s for nothing: this makes it eligible at once.

Slurm keeps a requeued job back until its old credential has run out.  Once the job has left COMPLETING, one update of
StartTime and ExcNodeList ends that wait.  Earlier it would be overwritten; with a start in the very same second as the
credential's revocation the job would fail, so the start is set two seconds ahead, and watched.

`judge` decides, and is pure; `RequeueExpediter` asks, acts and waits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from enum import Enum, auto

import msgspec

from stepkeeper.core.events import JobState
from stepkeeper.log import Log
from stepkeeper.loop_tools import reraise, thread
from stepkeeper.node_agent.core.plan import fraction
from stepkeeper.slurm.client import OwnedJob, SlurmError
from stepkeeper.slurm.jobs import job_state
from stepkeeper.slurm.nodes import NodeCommands

AFTER_S = 2
GIVE_UP_S = 300.0
CONFIRM_S = 20.0  # after StartTime: by then it runs, or waits for something else
ENDED_S = 30.0  # an attempt that ended may still be requeued by its rescuer
POLL_S = 0.5
POLL_MAX_S = 10.0
POLL_SHARE = 0.1
"""A pause is this share of what was waited already: what Slurm delays for 120 s is a tenth of the wait late at most."""
BUSY_TIMES = 20
"""And so many times as long as Slurm took to answer: where many agents ask, or it is busy, all ask less."""
PACE_S = 0.1  # between two calls of all jobs
REQUEUES_MAX = 2
REFUSALS_MAX = 3
SAME_TIME_S = 5.0  # clocks of controller and node may differ by this
REQUESTS_MAX = 64
REQUESTS_PER_UID_MAX = 8
_PENDING = frozenset(("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "REQUEUE_FED"))
LAUNCH_FAILED_S = 1.0  # a launch that Slurm fails is over in some milliseconds, counted in whole seconds
BEGAN_S = 1.5  # so an attempt that runs this long has begun


class RequeueRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is about to be requeued."""

    job_id: int
    uid: int | None  # who asked; None: root
    restart_count: int  # of the attempt that asked
    exclude: tuple[str, ...] | None  # None: as it is


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a request has come.  Times are Unix seconds."""

    sent_at: float | None = None  # the update was accepted
    sent_restarts: int = 0  # the attempt that it is about
    ended_at: float | None = None  # the asker's attempt was seen ended, and not requeued yet
    running_at: float | None = None  # the attempt after the update was seen running
    requeues: int = 0
    refusals: int = 0


class Next(Enum):
    """What to do about a request."""

    WAIT = auto()
    SEND = auto()
    REQUEUE = auto()
    DONE = auto()


class Verdict(msgspec.Struct, frozen=True):
    """What to do, and why: one clause for the log, empty while it waits."""

    next: Next
    why: str = ""


_WAIT = Verdict(Next.WAIT)


def judge_request(job_request: RequeueRequest, progress: Progress, job: OwnedJob, now: float) -> Verdict:
    """Return what to do about a job as Slurm shows it now.  Pure."""
    if job_request.uid is not None and job.uid != job_request.uid:
        return Verdict(Next.DONE, "it is another user's job")
    if job.held:
        return Verdict(Next.DONE, "it is held")
    if job.state == "CANCELLED":
        return Verdict(Next.DONE, "it was cancelled")
    if progress.sent_at is not None and job.restarts >= progress.sent_restarts:
        return _after(progress, progress.sent_at, job, now)
    return _before(job_request, progress, job, now)


def _before(job_request: RequeueRequest, progress: Progress, job: OwnedJob, now: float) -> Verdict:
    if job.state == "COMPLETING":
        return _WAIT
    if _ended(job):
        long_ended = progress.ended_at is not None and now - progress.ended_at > ENDED_S
        return Verdict(Next.DONE, f"it ended: {job.state}") if long_ended else _WAIT
    if job.restarts <= job_request.restart_count:
        return _WAIT  # not requeued yet
    if job.state not in _PENDING:
        return Verdict(Next.DONE, f"the next attempt is {job.state} already")
    soon = job.eligible_at is not None and job.eligible_at <= now + AFTER_S
    if soon and (job_request.exclude is None or job.exclude == ",".join(job_request.exclude)):
        return Verdict(Next.DONE, "it is eligible already")
    return Verdict(Next.SEND)


def _after(progress: Progress, sent_at: float, job: OwnedJob, now: float) -> Verdict:
    if job.state in _PENDING:
        if now < sent_at + AFTER_S + CONFIRM_S:
            return _WAIT
        if job.eligible_at is not None and job.eligible_at > now + SAME_TIME_S:
            return Verdict(Next.DONE, "it is kept back again, by somebody else")
        return Verdict(Next.DONE, f"it is eligible and waits: {job.reason or 'for its turn'}")
    if job.state == "COMPLETING":
        return _WAIT  # Slurm may just have failed it
    if not _ended(job) and (progress.running_at is None or now - progress.running_at < BEGAN_S):
        return _WAIT
    if _never_began(job) and job.restarts == progress.sent_restarts:
        if progress.requeues >= REQUEUES_MAX:
            return Verdict(Next.DONE, f"Slurm failed it {progress.requeues + 1} times before it began: {job.reason}")
        return Verdict(Next.REQUEUE, f"Slurm failed it before it began: {job.reason}")
    return Verdict(Next.DONE, f"the next attempt started: {job.state}")


def _ended(job: OwnedJob) -> bool:
    return job_state(job.state) is JobState.ENDED


def _never_began(job: OwnedJob) -> bool:
    """Tell whether Slurm failed the launch.

    With a revoked credential it looks like a script that ends with 1 at once: the same state, reason and exit code.  A
    script that really does so is started at most `REQUEUES_MAX` times more.
    """
    if job.state not in ("FAILED", "LAUNCH_FAILED"):
        return False
    at_once = job.exit_code == "1:0" and job.ran_s is not None and job.ran_s <= LAUNCH_FAILED_S
    return at_once or job.reason == "JobLaunchFailure"


def pause_s(waited_s: float, took_s: float, job_id: int, poll_s: float = POLL_S) -> float:
    """Return how long Slurm is not asked about a job again, in seconds: all jobs of a failed switch wait at once.

    >>> [round(pause_s(waited_s, 0.01, 7), 1) for waited_s in (0.0, 4.0, 30.0, 250.0)]
    [0.5, 0.5, 3.0, 11.9]
    >>> [round(pause_s(0.0, took_s, 7), 1) for took_s in (0.01, 0.1, 10.0)]
    [0.5, 2.0, 9.9]
    """
    spread = 0.75 + 0.5 * fraction(f"{job_id} {waited_s}")
    return max(poll_s, min(POLL_MAX_S, max(POLL_SHARE * waited_s, BUSY_TIMES * took_s)) * spread)


class _Entry:
    """A request on its way."""

    def __init__(self, job_request: RequeueRequest, before: _Entry | None = None) -> None:
        """`before`: the request that it replaces, whose pace it keeps."""
        self.job_request = job_request
        self.progress = Progress()
        self.began_at = self.next_at = self.changed_at = time.monotonic()  # changed: by us, or with the request
        self.unreachable = False
        if before is not None:
            self.next_at = before.next_at
            if before.job_request.restart_count == job_request.restart_count:
                self.began_at, self.changed_at = before.began_at, before.changed_at


class RequeueExpediter:
    """Sees to the requests on one thread.  `add` may be called on any thread and returns at once."""

    def __init__(
        self,
        client: NodeCommands,
        log: Log,
        *,
        give_up_s: float = GIVE_UP_S,
        poll_s: float = POLL_S,
        on_failure: Callable[[BaseException], object] = reraise,
    ) -> None:
        self._client = client
        self._log = log
        self._give_up_s = give_up_s
        self._poll_s = poll_s
        self._changed = threading.Condition()
        self._entries: dict[int, _Entry] = {}
        self._turns: dict[int | None, float] = {}  # by user: no call before; of those who have a request
        self._closing = False
        self._thread = thread("expedite", self._work, on_failure)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread works."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """How many requests are on their way."""
        with self._changed:
            return len(self._entries)

    def add(self, job_request: RequeueRequest) -> bool:
        """Take a request; a later one for the same job replaces it.  False: there are too many."""
        with self._changed:
            known = self._entries.get(job_request.job_id)
            if known is None:
                each_uid = Counter(each.job_request.uid for each in self._entries.values())
                if len(self._entries) >= REQUESTS_MAX or each_uid[job_request.uid] >= REQUESTS_PER_UID_MAX:
                    return False
            elif known.job_request == job_request:
                return True  # asked again: it goes on
            self._entries[job_request.job_id] = _Entry(job_request, known)
            self._changed.notify()
        return True

    def newest_attempt(self, job_id: int) -> int:
        """Return the restart count of the request on its way for a job; 0: none is."""
        with self._changed:
            entry = self._entries.get(job_id)
            return 0 if entry is None else entry.job_request.restart_count

    def joined(self, job_id: int, restart_count: int) -> None:
        """Note that an attempt of a job has begun for sure: its own processes say so."""
        with self._changed:
            entry = self._entries.get(job_id)
            if entry is None or restart_count <= entry.job_request.restart_count:
                return
            del self._entries[job_id]
        self._tell_over(entry, "the next attempt has joined")

    def close(self, within_s: float) -> None:
        """End the thread, after the call that it may be in; requests on their way are given up."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def _work(self) -> None:
        while (entry := self._due()) is not None:
            self._see_to(entry)

    def _due(self) -> _Entry | None:
        """Return the request whose turn it is, when it is; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing, PACE_S)
            now, users = time.monotonic(), {each.job_request.uid for each in self._entries.values()}
            self._turns = {uid: at for uid, at in self._turns.items() if uid in users or at > now}
            while not self._closing:
                first = min(self._entries.values(), key=self._turn_at, default=None)
                wait_s = None if first is None else self._turn_at(first) - time.monotonic()
                if first is not None and wait_s is not None and wait_s <= 0:
                    self._turns[first.job_request.uid] = time.monotonic() + self._poll_s
                    return first
                self._changed.wait(wait_s)
        return None

    def _turn_at(self, entry: _Entry) -> float:
        """Return when a request may be seen to: all requests of one user together are seen to once in `poll_s`."""
        return max(entry.next_at, 0.0 if entry.job_request.uid is None else self._turns.get(entry.job_request.uid, 0.0))

    def _see_to(self, entry: _Entry) -> None:
        began_s = time.monotonic()
        if began_s - entry.began_at > self._give_up_s:
            self._finish(entry, f"given up after {self._give_up_s:g} s")
            return
        job_id, waited_s = entry.job_request.job_id, began_s - entry.changed_at
        entry.next_at = began_s + self._poll_s  # for a request that replaces this one meanwhile
        try:
            job = self._client.owned_job(job_id)
        except SlurmError as error:
            self._refused(entry, error)
            return
        finally:
            ended_s = time.monotonic()
            entry.next_at = ended_s + pause_s(waited_s, ended_s - began_s, job_id, self._poll_s)
        now = time.time()
        self._note(entry, job, now)
        verdict = judge_request(entry.job_request, entry.progress, job, now)
        match verdict.next:
            case Next.WAIT:
                pass
            case Next.SEND:
                self._send(entry, job)
            case Next.REQUEUE:
                self._requeue(entry, job, verdict.why)
            case Next.DONE:
                self._finish(entry, verdict.why)

    def _note(self, entry: _Entry, job: OwnedJob, now: float) -> None:
        """Note since when the job is ended, or running after the update."""
        progress = entry.progress
        runs = progress.sent_at is not None and not (_ended(job) or job.state in _PENDING or job.state == "COMPLETING")
        entry.progress = msgspec.structs.replace(
            progress,
            ended_at=(progress.ended_at or now) if _ended(job) else None,
            running_at=(progress.running_at or now) if runs else None,
        )

    def _send(self, entry: _Entry, job: OwnedJob) -> None:
        try:
            exclude = None if entry.job_request.exclude is None else ",".join(entry.job_request.exclude)
            self._client.expedite(job, exclude, AFTER_S)
        except SlurmError as error:
            self._refused(entry, error)
            return
        now = time.time()
        entry.progress = msgspec.structs.replace(entry.progress, sent_at=now, sent_restarts=job.restarts)
        self._ask_soon(entry)
        self._log.info(
            "job_expedited",
            job=job.job_id,
            uid=job.uid,
            restart=job.restarts,
            exclude=entry.job_request.exclude,
            saved_s=None if job.eligible_at is None else round(job.eligible_at - now - AFTER_S, 1),
        )

    def _requeue(self, entry: _Entry, job: OwnedJob, why: str) -> None:
        self._log.warning("expedited_job_requeued", job=job.job_id, uid=job.uid, why=why)
        try:
            self._client.requeue(job)
        except SlurmError as error:
            self._refused(entry, error)
            return
        entry.job_request = msgspec.structs.replace(entry.job_request, restart_count=job.restarts)
        requeues = entry.progress.requeues + 1
        entry.progress = msgspec.structs.replace(entry.progress, sent_at=None, requeues=requeues)
        self._ask_soon(entry)

    def _ask_soon(self, entry: _Entry) -> None:
        """Ask as often as at the begin: we have changed something."""
        entry.changed_at = time.monotonic()
        entry.next_at = entry.changed_at + self._poll_s

    def _refused(self, entry: _Entry, error: SlurmError) -> None:
        """Ask again later: the next answer shows whether the call took effect."""
        if error.unreachable:
            if not entry.unreachable:
                self._log.warning("expedite_waits_for_slurm", job=entry.job_request.job_id, why=str(error))
            entry.unreachable = True
            return
        refusals = entry.progress.refusals + 1
        entry.progress = msgspec.structs.replace(entry.progress, refusals=refusals)
        if refusals >= REFUSALS_MAX:
            self._finish(entry, f"Slurm refused it {refusals} times: {error}")

    def _finish(self, entry: _Entry, why: str) -> None:
        with self._changed:
            if self._entries.get(entry.job_request.job_id) is not entry:
                return  # a later request has replaced it, or the next attempt has joined
            del self._entries[entry.job_request.job_id]
        self._tell_over(entry, why)

    def _tell_over(self, entry: _Entry, why: str) -> None:
        done = entry.progress.sent_at is not None
        self._log.info(
            "expedite_over", job=entry.job_request.job_id, uid=entry.job_request.uid, expedited=done, why=why
        )
