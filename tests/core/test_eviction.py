"""The table of how cancel, time limit, requeue and preemption are told apart, row by row."""

from __future__ import annotations

import pytest

from stepkeeper.core.causes import Notice
from stepkeeper.core.events import JobFacts, JobState
from stepkeeper.core.eviction import Judgement, judge_eviction
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Identity, Leaving, Query, State

AT = 1000.0
POLICY = Policy()
RUNNING = JobFacts(state=JobState.RUNNING, slurm_state="RUNNING", restarts=2, reason="None", end_at=AT + 90_000)


def facts(**changes) -> JobFacts:
    return JobFacts(**{field: getattr(RUNNING, field) for field in RUNNING.__struct_fields__} | changes)


def judged(job: JobFacts | None, signal: str = "", **leaving: float) -> Judgement:
    state = State(
        identity=Identity(restart_count=2, kill_wait_s=30.0), query=Query(signal=signal), leaving=Leaving(**leaving)
    )
    return judge_eviction(state, job, AT, POLICY)


COMPLETING = {"state": JobState.COMPLETING, "slurm_state": "COMPLETING", "end_at": AT}


@pytest.mark.parametrize(
    ("cause", "changes", "expected"),
    [
        ("scancel", COMPLETING, Notice.CANCELLED),
        ("scancel, seen late", COMPLETING | {"state": JobState.ENDED}, Notice.CANCELLED),
        ("time limit", COMPLETING | {"reason": "TimeLimit"}, Notice.TIME_LIMIT),
        ("preempted without grace time", COMPLETING | {"preempt_at": AT}, Notice.PREEMPTED),
        ("scancel in grace time", COMPLETING | {"preempt_at": AT - 3}, Notice.CANCELLED),
        ("admin's requeue", COMPLETING | {"restarts": 3}, Notice.REQUEUED),
        ("end of grace, NODE_FAIL", COMPLETING | {"restarts": 3, "preempt_at": AT - 60}, Notice.REQUEUED),
        (
            "requeuehold",
            COMPLETING | {"restarts": 3, "reason": "job_requeued_in_held_state"},
            Notice.REQUEUED,
        ),
        ("requeued, pending", {"state": JobState.PENDING, "restarts": 3}, Notice.REQUEUED),
        ("scancel -f -s TERM", {}, Notice.ASKED_TO_SAVE),
    ],
)
def test_sigterm_to_everybody(cause, changes, expected):
    """All arrive as the same SIGTERM."""
    judgement = judged(facts(**changes), term_at=AT, signal="TERM")

    assert judgement.notice is expected, cause
    limited = expected is not Notice.ASKED_TO_SAVE
    assert judgement.deadline_at == (AT + 30.0 - POLICY.save_margin_s if limited else None)


def test_slurm_that_cannot_be_asked():
    assert judged(None, term_at=AT) == Judgement(notice=Notice.UNKNOWN, deadline_at=AT + 26.0)


def test_kill_wait_runs_from_the_signal_not_from_the_answer():
    """Slurm may take ten seconds to answer."""
    judgement = judged(None, term_at=AT - 10)

    assert judgement.deadline_at == AT + 16.0


def test_a_watchers_sigterm_is_a_notice_only_with_a_preempt_time():
    told = {"signal": "node TERM"}

    assert judged(facts(), **told).notice is Notice.NOT_FOR_US
    assert judged(facts(end_at=AT + 60), **told).notice is Notice.NOT_FOR_US
    preempted = judged(facts(preempt_at=AT, end_at=AT + 60), **told)
    assert preempted == Judgement(notice=Notice.PREEMPTED, deadline_at=AT + 56.0)


def test_a_user_signal_near_the_time_limit_is_its_notice():
    near = facts(end_at=AT + POLICY.time_limit_notice_s)

    assert judged(near, signal="USR1").notice is Notice.TIME_LIMIT
    assert judged(near, signal="TERM").notice is Notice.ASKED_TO_SAVE
    assert judged(facts(end_at=AT + POLICY.time_limit_notice_s + 1), signal="USR1").notice is Notice.ASKED_TO_SAVE
    assert judged(facts(end_at=None), signal="USR1").notice is Notice.ASKED_TO_SAVE


def test_a_user_signal_may_announce_a_preemption():
    assert judged(facts(preempt_at=AT, end_at=AT + 60), signal="USR1").notice is Notice.PREEMPTED


@pytest.mark.parametrize("end_at", [None, AT, AT - 5, AT + 0.5])
def test_a_preemption_without_grace_leaves_kill_wait(end_at):
    assert judged(facts(preempt_at=AT, end_at=end_at)).deadline_at == AT + 26.0


def test_a_short_notice_keeps_four_fifths_for_the_save():
    assert judged(facts(preempt_at=AT, end_at=AT + 5)).deadline_at == AT + 4.0


def test_the_end_of_grace_time_is_a_preemption_and_scancel_in_its_first_second_is_not():
    """PreemptMode=CANCEL: Slurm sets PreemptTime once more when it carries the preemption out."""
    ending = COMPLETING | {"preempt_at": AT}
    assert judged(facts(**ending), term_at=AT, preempted_at=AT - 60).notice is Notice.PREEMPTED
    assert judged(facts(**ending), term_at=AT, preempted_at=AT).notice is Notice.CANCELLED
