"""The rules of expediting a requeued job, and the thread that follows them; Slurm is a small one of our own."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.node_agent.expedite_requeue import (
    GIVE_UP_S,
    POLL_MAX_S,
    POLL_S,
    REQUESTS_MAX,
    REQUESTS_PER_UID_MAX,
    Next,
    Progress,
    RequeueExpediter,
    RequeueRequest,
    judge_request,
    pause_s,
)
from stepkeeper.slurm.client import NodeFacts, OwnedJob, SlurmError
from tests.node_agent.socket.people import until

WISH = RequeueRequest(job_id=7, uid=5, restart_count=1, exclude=("n1", "n2"))
ASKED = Progress()
SENT = Progress(sent_at=1010.0, sent_restarts=2)
PENDING = OwnedJob(job_id=7, uid=5, state="PENDING", restarts=2, eligible_at=1130.0)


def job(**changes: Any) -> OwnedJob:
    return msgspec.structs.replace(PENDING, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Next.SEND),
        ({"state": "REQUEUED"}, Next.SEND),
        ({"eligible_at": None}, Next.SEND),
        ({"eligible_at": 1009.0}, Next.SEND),  # soon, but onto the wrong nodes
        ({"eligible_at": 1009.0, "exclude": "n1,n2"}, Next.DONE),
        ({"state": "COMPLETING"}, Next.WAIT),
        ({"state": "RUNNING", "restarts": 1}, Next.WAIT),
        ({"restarts": 1}, Next.WAIT),
        ({"state": "FAILED", "restarts": 1}, Next.WAIT),  # a rescuer may still requeue it
        ({"state": "RUNNING"}, Next.DONE),
        ({"uid": 9}, Next.DONE),
        ({"held": True}, Next.DONE),
        ({"held": True, "state": "COMPLETING"}, Next.DONE),
        ({"state": "CANCELLED"}, Next.DONE),
        ({"state": "CANCELLED", "restarts": 1}, Next.DONE),
    ],
)
def test_the_update_is_sent_to_a_requeued_job_that_waits_and_to_no_other(
    changes: dict[str, Any], expected: Next
) -> None:
    assert judge_request(WISH, ASKED, job(**changes), 1010.0).next is expected


def test_an_attempt_that_ended_for_good_is_not_waited_for() -> None:
    ended = msgspec.structs.replace(ASKED, ended_at=1000.0)

    assert judge_request(WISH, ended, job(state="COMPLETED", restarts=1), 1020.0).next is Next.WAIT
    assert judge_request(WISH, ended, job(state="COMPLETED", restarts=1), 1031.0).why == "it ended: COMPLETED"


@pytest.mark.parametrize(
    ("changes", "at", "expected"),
    [
        ({"eligible_at": 1012.0}, 1013.0, Next.WAIT),
        ({"eligible_at": 1012.0, "reason": "Resources"}, 1033.0, Next.DONE),
        ({"eligible_at": 9000.0}, 1033.0, Next.DONE),
        ({"state": "RUNNING"}, 1013.0, Next.WAIT),  # Slurm may fail it in the next moment
        ({"state": "COMPLETING"}, 1013.0, Next.WAIT),
        ({"state": "COMPLETED"}, 1013.0, Next.DONE),
        ({"state": "FAILED", "reason": "NonZeroExitCode", "exit_code": "1:0", "ran_s": 0.0}, 1013.0, Next.REQUEUE),
        ({"state": "FAILED", "reason": "NonZeroExitCode", "exit_code": "1:0", "ran_s": 2.0}, 1013.0, Next.DONE),
        ({"state": "FAILED", "reason": "NonZeroExitCode", "exit_code": "2:0", "ran_s": 0.0}, 1013.0, Next.DONE),
        ({"state": "FAILED", "reason": "NonZeroExitCode", "exit_code": "1:0"}, 1013.0, Next.DONE),
        ({"state": "FAILED", "reason": "JobLaunchFailure"}, 1013.0, Next.REQUEUE),
        ({"state": "FAILED", "reason": "JobLaunchFailure", "restarts": 3}, 1013.0, Next.DONE),  # of a later attempt
        ({"state": "CANCELLED", "reason": "JobLaunchFailure"}, 1013.0, Next.DONE),
        ({"held": True}, 1013.0, Next.DONE),
    ],
)
def test_after_the_update_only_a_launch_that_slurm_failed_is_requeued(
    changes: dict[str, Any], at: float, expected: Next
) -> None:
    assert judge_request(WISH, SENT, job(**changes), at).next is expected


def test_an_attempt_that_runs_for_a_while_has_begun() -> None:
    running = msgspec.structs.replace(SENT, running_at=1012.0)

    assert judge_request(WISH, running, job(state="RUNNING"), 1013.0).next is Next.WAIT
    assert judge_request(WISH, running, job(state="RUNNING"), 1014.0).why == "the next attempt started: RUNNING"


def test_a_launch_that_slurm_fails_again_and_again_is_given_up() -> None:
    tried = msgspec.structs.replace(SENT, requeues=2)

    verdict = judge_request(WISH, tried, job(state="FAILED", reason="JobLaunchFailure"), 1013.0)

    assert verdict.next is Next.DONE
    assert "3 times" in verdict.why


@settings(max_examples=300, phases=(Phase.explicit, Phase.generate), deadline=None)
@given(
    state=st.sampled_from(
        ("PENDING", "RUNNING", "COMPLETING", "CANCELLED", "FAILED", "TIMEOUT", "REQUEUE_HOLD", "NEW?")
    ),
    uid=st.sampled_from((5, 9)),
    restarts=st.integers(0, 4),
    held=st.booleans(),
    eligible_at=st.none() | st.floats(900, 1200),
    reason=st.sampled_from(("", "JobLaunchFailure", "Resources")),
    sent=st.booleans(),
    now=st.floats(1000, 2000),
)
def test_no_history_lets_it_touch_what_it_must_not(
    *, state: str, uid: int, restarts: int, held: bool, eligible_at: float | None, reason: str, sent: bool, now: float
) -> None:
    facts = OwnedJob(
        job_id=7, uid=uid, state=state, restarts=restarts, held=held, eligible_at=eligible_at, reason=reason
    )
    verdict = judge_request(WISH, SENT if sent else ASKED, facts, now)

    if verdict.next in (Next.SEND, Next.REQUEUE):
        assert uid == WISH.uid
        assert not held
        assert state != "CANCELLED"
        assert restarts > WISH.restart_count
    if verdict.next is Next.SEND:
        assert state in ("PENDING", "REQUEUE_HOLD")
        assert not (sent and restarts >= SENT.sent_restarts), "one update an attempt"
    assert bool(verdict.why) or verdict.next in (Next.WAIT, Next.SEND)


class SmallSlurm:
    """One job after another from a list; the last one stays.  Remembers what it was told."""

    def __init__(self, *answers: OwnedJob | SlurmError, refuses: tuple[SlurmError, ...] = ()) -> None:
        self.answers = list(answers)
        self.refuses = list(refuses)
        self.told: list[tuple[Any, ...]] = []
        self.asked = 0
        self.after_expedite: list[OwnedJob | SlurmError] = []

    def owned_job(self, job_id: int) -> OwnedJob:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, SlurmError):
            raise answer
        return msgspec.structs.replace(answer, job_id=job_id)

    def expedite(self, job: OwnedJob, exclude: str, after_s: int) -> None:
        self.told.append(("hasten", job.job_id, exclude, after_s))
        if self.refuses:
            raise self.refuses.pop(0)
        if self.after_expedite:
            self.answers = list(self.after_expedite)

    def requeue(self, of: OwnedJob) -> None:
        self.told.append(("requeue", of.job_id))
        self.answers = [job(restarts=3, eligible_at=time.time() + 120)]
        self.after_expedite = [job(state="RUNNING", restarts=3)]

    def node(self, name: str) -> NodeFacts:
        raise AssertionError(name)

    def peers(self, name: str) -> tuple[NodeFacts, ...]:
        raise AssertionError(name)

    def cluster_size(self) -> int:
        raise AssertionError

    def drain(self, name: str, reason: str) -> None:
        raise AssertionError(name, reason)

    def resume(self, name: str) -> None:
        raise AssertionError(name)

    def reboot(self, name: str, reason: str) -> None:
        raise AssertionError(name, reason)


def over(slurm: SmallSlurm, job_request: RequeueRequest = WISH, **options: Any) -> str:
    """Follow a request to its end, and return why it ended."""
    ends: list[str] = []
    expediter = RequeueExpediter(slurm, _log(ends.append), poll_s=0.01, **options)
    expediter.start()
    assert expediter.add(job_request)
    until(lambda: ends, "the end of a request", lambda: slurm.told)
    assert expediter.waiting == 0
    assert expediter.alive
    expediter.close(60.0)
    assert not expediter.alive
    return ends[0]


def _log(over: Callable[[str], object]) -> structlog.typing.FilteringBoundLogger:
    def keep(_: Any, __: str, event: Any) -> Any:
        if event["event"] == "expedite_over":
            over(event["why"])
        raise structlog.DropEvent

    wrapped: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(structlog.PrintLogger(), processors=[keep])
    return wrapped


def test_one_call_after_completing_and_the_next_attempt_is_seen() -> None:
    slurm = SmallSlurm(job(state="RUNNING", restarts=1), job(state="COMPLETING"), job(eligible_at=time.time() + 120))
    slurm.after_expedite = [job(), job(state="RUNNING")]

    assert over(slurm) == "the next attempt started: RUNNING"
    assert slurm.told == [("hasten", 7, "n1,n2", 2)]


def test_a_launch_with_a_revoked_credential_is_requeued_and_expedited_again() -> None:
    slurm = SmallSlurm(job(eligible_at=time.time() + 120))
    slurm.after_expedite = [job(state="FAILED", reason="JobLaunchFailure")]

    assert over(slurm) == "the next attempt started: RUNNING"
    assert slurm.told == [("hasten", 7, "n1,n2", 2), ("requeue", 7), ("hasten", 7, "n1,n2", 2)]


def test_a_controller_that_is_away_is_waited_for() -> None:
    away = SlurmError("timed out", unreachable=True)
    slurm = SmallSlurm(away, away, away, away, away, job(eligible_at=time.time() + 120), refuses=(away,))
    slurm.after_expedite = [job(state="RUNNING")]

    assert over(slurm) == "the next attempt started: RUNNING"
    assert len(slurm.told) == 2, "the first call had no effect: the job was seen waiting still"


def test_slurms_refusals_end_it() -> None:
    no = SlurmError("Job is no longer pending execution")

    slurm = SmallSlurm(job(eligible_at=time.time() + 120), refuses=(no,) * 9)

    assert "refused it 3 times" in over(slurm)
    assert len(slurm.told) == 3


def test_a_request_has_an_end_whatever_slurm_says() -> None:
    slurm = SmallSlurm(job(state="RUNNING", restarts=1))

    assert over(slurm, give_up_s=0.5) == "given up after 0.5 s"
    assert slurm.told == []


def test_there_is_room_for_other_users_beside_a_greedy_one() -> None:
    expediter = RequeueExpediter(SmallSlurm(job(state="COMPLETING")), _log(lambda _: None))
    greedy = [
        expediter.add(RequeueRequest(job_id=i, uid=5, restart_count=0, exclude=()))
        for i in range(REQUESTS_PER_UID_MAX + 1)
    ]
    others = [
        expediter.add(RequeueRequest(job_id=1000 + i, uid=1000 + i, restart_count=0, exclude=()))
        for i in range(REQUESTS_MAX)
    ]

    assert greedy == [True] * REQUESTS_PER_UID_MAX + [False]
    assert others == [True] * (REQUESTS_MAX - REQUESTS_PER_UID_MAX) + [False] * REQUESTS_PER_UID_MAX
    assert expediter.add(RequeueRequest(job_id=0, uid=5, restart_count=0, exclude=())), "asking again is no new request"


def test_the_word_of_the_next_attempt_ends_the_request_and_that_of_the_same_one_does_not() -> None:
    ends: list[str] = []
    expediter = RequeueExpediter(SmallSlurm(job(state="COMPLETING")), _log(ends.append))
    expediter.add(WISH)

    expediter.joined(7, 1)
    expediter.joined(8, 2)
    assert expediter.waiting == 1
    expediter.joined(7, 2)

    assert expediter.waiting == 0
    assert ends == ["the next attempt has joined"]


def test_the_longer_a_job_keeps_us_waiting_the_rarer_are_our_questions() -> None:
    """Thousands of jobs may wait at once, for minutes: each costs slurmctld two RPCs a question."""
    asked_at: list[list[float]] = []
    for job_id in range(100):
        times = [0.0]
        while (waited_s := times[-1]) < GIVE_UP_S:
            pause = pause_s(waited_s, 0.01, job_id)
            assert POLL_S <= pause <= max(POLL_S, 0.125 * waited_s), "late by an eighth of the wait at most"
            times.append(waited_s + pause)
        asked_at.append(times)

    assert max(map(len, asked_at)) < 70
    late = Counter(int(at) for times in asked_at for at in times if at > 100)
    assert max(late.values()) < 50, "they do not ask in step"


def test_a_slurm_that_answers_late_is_asked_less() -> None:
    asked = sum(pause_s(1.0, 0.25, job_id) for job_id in range(100)) / 100

    assert 4.5 < asked < 5.5
    assert pause_s(1.0, 10.0, 7) <= 1.25 * POLL_MAX_S, "one call without an answer does not end it"


def test_an_idle_expediter_asks_nothing() -> None:
    slurm = SmallSlurm(job())
    expediter = RequeueExpediter(slurm, _log(lambda _: None), poll_s=0.01)
    expediter.start()
    threading.Event().wait(0.3)
    expediter.close(5.0)

    assert slurm.asked == 0


def test_a_user_who_changes_his_requests_asks_slurm_no_more_often() -> None:
    slurm = SmallSlurm(job(state="RUNNING", restarts=1))
    expediter = RequeueExpediter(slurm, _log(lambda _: None), poll_s=0.2)
    expediter.start()
    began = time.monotonic()
    number = 0
    while time.monotonic() - began < 2.0:
        number += 1
        for job_id in (7, 8, 9, 10):
            expediter.add(RequeueRequest(job_id=job_id, uid=1000, restart_count=1, exclude=(f"n{number}",)))
        time.sleep(0.01)
    lasted_s = time.monotonic() - began
    expediter.close(5.0)

    assert 3 <= slurm.asked <= lasted_s / 0.2 + 2
