from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.core.causes import Cause
from stepkeeper.core.events import JobFacts, JobState, NodeFaulted, RankExited
from stepkeeper.diagnosis import planes
from stepkeeper.diagnosis.classify import NO_EVIDENCE, Evidence, Plane, Role, classify

AT = 1_790_000_000.0
EXITED = RankExited(at=AT, launch=0, rank=3, node="n2", code=1)
FAULT = NodeFaulted(
    at=AT - 1, node="n2", incident="i1", name="XID 79", action="drain_reboot", leave=True, why="fallen off the bus"
)


def piece(cause: Cause, role: Role = Role.ROOT, confidence: float = 0.9, **more: object) -> Evidence:
    fields = {"plane": Plane.APPLICATION, "rule": f"rule-{cause.value}", "text": "x", **more}
    return Evidence(cause=cause, role=role, confidence=confidence, **fields)  # type: ignore[arg-type]


def job(**changes: object) -> JobFacts:
    fields = {"state": JobState.COMPLETING, "slurm_state": "COMPLETING", "restarts": 0, **changes}
    return JobFacts(**fields)  # type: ignore[arg-type]


EVIDENCE = st.builds(
    piece,
    st.sampled_from(Cause),
    st.sampled_from(Role),
    st.floats(0.05, 0.97),
    rank=st.none() | st.integers(0, 3),
    at=st.none() | st.floats(AT, AT + 100),
    line=st.none() | st.integers(1, 50),
    plane=st.sampled_from(Plane),
    node=st.sampled_from(["", "n1", "n2"]),
)


@settings(max_examples=150, phases=(Phase.explicit, Phase.generate))
@given(st.lists(EVIDENCE, max_size=8), st.randoms(use_true_random=False))
def test_the_order_in_which_evidence_comes_does_not_matter(evidence: list[Evidence], chance: object) -> None:
    """The verdict is replayed from journals, and ranks report in any order."""
    other = list(evidence)
    chance.shuffle(other)  # type: ignore[attr-defined]

    assert classify(other) == classify(evidence)


@settings(max_examples=150, phases=(Phase.explicit, Phase.generate))
@given(st.lists(EVIDENCE, max_size=8))
def test_a_cascade_is_the_verdict_only_where_no_root_failed(evidence: list[Evidence]) -> None:
    verdict = classify(evidence)
    failures = {Cause.FINISHED, Cause.UNKNOWN}
    roots = [each for each in evidence if each.role is Role.ROOT and each.cause not in failures]

    assert verdict.role is not Role.CASCADE or not roots
    assert 0.0 <= verdict.confidence < 1.0


def test_without_evidence_nothing_is_claimed() -> None:
    verdict = classify([])

    assert (verdict.cause, verdict.rule, verdict.confidence) == (Cause.UNKNOWN, NO_EVIDENCE, 0.0)


def test_the_rank_that_failed_first_is_the_root() -> None:
    """Each rank had an error of its own: the others' come of the first one's."""
    first = [piece(Cause.EXCEPTION, confidence=0.75, rank=3, line=90), *planes.exits([EXITED])]
    later = RankExited(at=AT + 5, launch=0, rank=0, node="n1", code=1)
    both = [*first, piece(Cause.GPU_MEMORY, confidence=0.95, rank=0, line=2), *planes.exits([EXITED, later])]

    verdict = classify(both)

    assert (verdict.cause, verdict.rank) == (Cause.EXCEPTION, 3)
    assert verdict.otherwise is not None
    assert verdict.otherwise.cause is Cause.GPU_MEMORY


def test_a_collective_timeout_gives_way_to_a_rank_that_says_more() -> None:
    timeout = piece(Cause.COLLECTIVE_TIMEOUT, Role.CASCADE, 0.8, rank=0)

    assert classify([timeout]).cause is Cause.COLLECTIVE_TIMEOUT
    assert classify([timeout, piece(Cause.GPU_MEMORY, rank=1)]).cause is Cause.GPU_MEMORY
    assert classify([timeout, *planes.exits([RankExited(at=AT, launch=0, rank=1, node="n", signal=9)])]).cause is (
        Cause.HOST_MEMORY
    )


def test_a_fault_of_the_node_explains_a_cuda_error_but_not_a_full_gpu() -> None:
    fault = planes.faults([FAULT])
    cuda = piece(Cause.EXCEPTION, confidence=0.85, rule="cuda-program-error", rank=3, node="n2")

    assert classify([*fault, cuda]).cause is Cause.NODE_FAULT
    assert classify([*fault, piece(Cause.GPU_MEMORY, rank=3, node="n2")]).cause is Cause.GPU_MEMORY
    assert classify([*fault, piece(Cause.CONFIGURATION, rank=3)]).cause is Cause.CONFIGURATION


def test_a_program_fault_of_the_driver_is_no_fault_of_the_node() -> None:
    hint = planes.faults(
        [NodeFaulted(at=AT, node="n2", incident="i", name="XID 13", action="log", leave=False, why="")]
    )

    assert classify(hint).cause is not Cause.UNKNOWN or classify(hint).confidence == 0.0
    assert classify([*hint, piece(Cause.EXCEPTION, confidence=0.85)]).cause is Cause.EXCEPTION


def test_slurms_word_comes_last_unless_it_came_first() -> None:
    preempted = planes.slurm([(AT - 20, job(preempt_at=AT - 20))], restarts=0)
    after = planes.slurm([(AT + 20, job(preempt_at=AT + 20))], restarts=0)
    crash = [piece(Cause.EXCEPTION, confidence=0.75, rank=3, node="n2"), *planes.exits([EXITED])]

    assert classify(preempted).cause is Cause.PREEMPTED
    assert classify([*preempted, *crash]).cause is Cause.PREEMPTED
    assert classify([*after, *crash]).cause is Cause.EXCEPTION


def test_what_slurm_says_of_a_jobs_end_is_told_apart() -> None:
    said = {
        "OUT_OF_MEMORY": Cause.HOST_MEMORY,
        "NODE_FAIL": Cause.NODE_LOST,
        "PREEMPTED": Cause.PREEMPTED,
        "TIMEOUT": Cause.TIME_LIMIT,
        "CANCELLED by 1000": Cause.CANCELLED,
    }
    for state, cause in said.items():
        assert classify(planes.slurm([(AT, job(slurm_state=state))], restarts=0)).cause is cause
    assert classify(planes.slurm([(AT, job(reason="TimeLimit"))], restarts=0)).cause is Cause.TIME_LIMIT
    assert classify(planes.slurm([(AT, job(restarts=1))], restarts=0)).cause is Cause.PREEMPTED
    assert planes.slurm([(AT, job(slurm_state="RUNNING"))], restarts=0) == []


def test_exits_name_the_first_rank_and_count_a_death_once() -> None:
    killed = RankExited(at=AT + 1, launch=0, rank=0, node="n1", signal=9)
    told_by_srun = RankExited(at=AT + 2, launch=0, rank=3, node="n2", signal=11)
    unknown = RankExited(at=AT - 5, launch=0, rank=3, node="n2")
    crash = RankExited(at=AT, launch=0, rank=3, node="n2", signal=11)

    found = planes.exits([killed, told_by_srun, unknown, crash])

    assert sorted((each.rank, each.rule, each.role) for each in found) == [
        (0, "exit-killed", Role.CASCADE),
        (3, "exit-segfault", Role.ROOT),
    ]
    assert classify(found).cause is Cause.SEGFAULT


def test_an_exit_code_above_128_is_a_signal() -> None:
    found = planes.exits([RankExited(at=AT, launch=0, rank=0, node="n", code=139)])

    assert classify(found).cause is Cause.SEGFAULT


def test_all_ranks_with_code_zero_are_finished() -> None:
    found = planes.exits([RankExited(at=AT, launch=0, rank=rank, node="n", code=0) for rank in range(2)])

    assert classify(found).cause is Cause.FINISHED


def test_independent_evidence_raises_and_another_root_lowers_the_confidence() -> None:
    one = piece(Cause.GPU_MEMORY, confidence=0.9, rank=0, line=1)
    same = piece(Cause.GPU_MEMORY, confidence=0.7, rule="other", rank=1, line=2)
    else_ = piece(Cause.STORAGE, confidence=0.9, rank=1, line=3)

    assert classify([one, same]).confidence > classify([one]).confidence > classify([one, else_]).confidence


def test_a_verdict_names_the_node_that_all_lines_of_its_rule_name() -> None:
    killed = piece(Cause.HOST_MEMORY, rule="oom", line=1)
    on_n1 = piece(Cause.HOST_MEMORY, rule="oom", line=2, rank=3, node="n1")
    on_n2 = piece(Cause.HOST_MEMORY, rule="oom", line=3, rank=9, node="n2")

    verdicts = [classify([killed, on_n1]), classify([killed, on_n1, on_n2]), classify([killed])]

    assert [(each.rank, each.node) for each in verdicts] == [(3, "n1"), (None, ""), (None, "")]


def test_the_exit_that_had_the_ranks_killed_is_no_kill_of_ours() -> None:
    """The order to kill the others has the instant of the exit that it follows from."""
    first = RankExited(at=AT, launch=0, rank=1, node="n2", signal=9)
    ours = RankExited(at=AT + 0.1, launch=0, rank=0, node="n1", signal=9)

    found = planes.exits([first, ours], killed_at=AT)

    assert [(each.rank, each.rule) for each in found] == [(1, "exit-killed")]
    assert classify(found).cause is Cause.HOST_MEMORY


def test_being_told_to_end_gives_way_to_whatever_failed() -> None:
    told = piece(Cause.CANCELLED, Role.CASCADE, 0.4, rank=0)
    reported = piece(Cause.EXCEPTION, Role.CONFIRMATION, 0.35, rank=1)

    assert classify([told]).cause is Cause.CANCELLED
    assert classify([told, reported]).cause is Cause.EXCEPTION
    assert classify([told, piece(Cause.COLLECTIVE_TIMEOUT, Role.CASCADE, 0.3)]).cause is Cause.COLLECTIVE_TIMEOUT
