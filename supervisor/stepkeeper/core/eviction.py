"""What Slurm's answer means: why it signals us, until when, and whether the job may run again.

The table is that of Slurm 22.05 to 26.05, seen on live clusters: cancel, time limit, requeue and the end
of a preemption all arrive as the same SIGTERM, and only the job's state, restart count and reason distinguish
them apart.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Notice
from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.core.phases import Decision, query_slurm
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import LIMIT, NO_SIGNAL, NODE_TERM, State, Timer

# The job's time limit, ahead of it and without a signal: when to leave so that a save is durable before it.  Pure.

LEAST_S = 60.0  # of the margin, where nobody has set one
SAVES = 3.0  # times the longest save of the run
SHARE_MOST = 0.2  # of the attempt's whole time


def margin_s(state: State, policy: Policy) -> float:
    """Return how long before the time limit the job leaves: as set, else by how long the run's saves take."""
    if policy.time_limit_margin:
        return policy.time_limit_margin
    whole = max(0.0, (state.identity.end_at or 0.0) - (state.identity.started_at or 0.0))
    return min(SHARE_MOST * whole, max(LEAST_S, SAVES * state.pace.save + policy.save_margin_s))


def expecting(state: State, policy: Policy) -> State:
    """Set when to ask Slurm about the limit: it may have been changed since."""
    end_at = state.identity.end_at
    return state.beside(Timer.LIMIT, None if end_at is None else end_at - margin_s(state, policy))


def on_limit_near(state: State) -> Decision:
    """The margin has begun, as far as we know: is it still so?"""
    state = state.beside(Timer.LIMIT, None)
    if not state.query.asking:
        state = replace(state, query=replace(state.query, signal=LIMIT))
    return query_slurm(state, (because.Plain(because.Fact.TIME_LIMIT_NEAR),))


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """A notice, and the instant by which a save must be durable (None: nothing limits it)."""

    notice: Notice
    deadline_at: float | None = None


def preempted_at_last(job: JobFacts, announced_at: float | None) -> bool:
    """Tell the end of a preemption, where Slurm requeues nothing (PreemptMode=CANCEL), from a cancellation.

    Both are COMPLETING for no reason.  Slurm sets PreemptTime at the announcement and, where it carries it out, once
    more: to the very second of the end.

    Args:
        job: that is COMPLETING or over.
        announced_at: its PreemptTime while it ran; None where there was no grace time, or nobody asked.
    """
    if job.preempt_at is None or job.preempt_at != job.end_at:
        return False
    return announced_at is None or job.preempt_at > announced_at


def judge_eviction(state: State, job: JobFacts | None, at: float, policy: Policy) -> Judgement:
    """Tell why Slurm signaled.  `state.term_at` says when the batch process got SIGTERM, if it did."""
    if job is None:
        return _unreachable(state, at, policy)
    killed_at = _kill_deadline(state, at, policy)
    if job.restarts > state.identity.restart_count:
        return Judgement(notice=Notice.REQUEUED, deadline_at=killed_at)
    if job.state in (JobState.COMPLETING, JobState.ENDED):
        if job.reason == "TimeLimit":
            return Judgement(notice=Notice.TIME_LIMIT, deadline_at=killed_at)
        if preempted_at_last(job, state.leaving.preempted_at):
            return Judgement(notice=Notice.PREEMPTED, deadline_at=killed_at)
        return Judgement(notice=Notice.CANCELLED, deadline_at=killed_at)
    if job.preempt_at is not None:
        return Judgement(notice=Notice.PREEMPTED, deadline_at=_end_deadline(state, job, at, policy))
    if state.query.signal == LIMIT and job.end_at is not None and job.end_at - at <= margin_s(state, policy):
        return Judgement(notice=Notice.TIME_LIMIT, deadline_at=_end_deadline(state, job, at, policy))
    if state.query.signal in (NODE_TERM, NO_SIGNAL, LIMIT):
        return Judgement(notice=Notice.NOT_FOR_US)
    near = job.end_at is not None and job.end_at - at <= policy.time_limit_notice_s
    if near and state.query.signal != "TERM":
        return Judgement(notice=Notice.TIME_LIMIT, deadline_at=_end_deadline(state, job, at, policy))
    return Judgement(notice=Notice.ASKED_TO_SAVE)


def _unreachable(state: State, at: float, policy: Policy) -> Judgement:
    """Slurm could not be asked: a signal of its own means the worst, our own clock what Slurm said last."""
    if state.query.signal == NO_SIGNAL:
        return Judgement(notice=Notice.NOT_FOR_US)
    if state.query.signal == LIMIT and state.identity.end_at is not None:
        return Judgement(notice=Notice.TIME_LIMIT, deadline_at=_with_margin(state.identity.end_at, at, policy))
    return Judgement(notice=Notice.UNKNOWN, deadline_at=_kill_deadline(state, at, policy))


def _kill_deadline(state: State, at: float, policy: Policy) -> float:
    """SIGTERM went to everybody: KillWait seconds are left from then."""
    kill_at = (state.leaving.term_at if state.leaving.term_at is not None else at) + state.identity.kill_wait_s
    return _with_margin(kill_at, at, policy)


def _end_deadline(state: State, job: JobFacts, at: float, policy: Policy) -> float:
    """Slurm has announced the end: grace time or time limit.  At the end itself KillWait is left."""
    if job.end_at is None or job.end_at - at < 1.0:
        return _kill_deadline(state, at, policy)
    return _with_margin(job.end_at, at, policy)


def _with_margin(end_at: float, at: float, policy: Policy) -> float:
    """Keep time to requeue and leave, but never more than a fifth of a short notice."""
    return end_at - min(policy.save_margin_s, 0.2 * max(0.0, end_at - at))
