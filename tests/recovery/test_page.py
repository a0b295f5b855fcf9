"""What the page of recoveries says: its figures are counted here, without a cluster."""

from __future__ import annotations

from tests.recovery.page import page
from tests.recovery.playing import FAULTS, Outcome, Step, cost
from tests.recovery.ways import WAYS

OLD, NEW = 100, 200


def test_what_the_old_ranks_did_after_the_fault_is_not_lost_and_counts_as_done() -> None:
    told = [Step(1, 1.0, OLD), Step(2, 2.0, OLD), Step(3, 3.5, OLD), Step(2, 9.0, NEW), Step(3, 10.0, NEW)]
    assert cost(told, OLD, struck_at=3.0) is None
    told.append(Step(4, 11.0, NEW))
    assert cost(told, OLD, struck_at=3.0) == (2, 8.0)


def test_a_launch_that_fails_before_a_new_step_has_redone_its_steps_as_well() -> None:
    told = [Step(1, 1.0, OLD), Step(2, 2.0, OLD), Step(2, 5.0, NEW), Step(2, 7.0, 300), Step(3, 8.0, 300)]
    assert cost(told, OLD, struck_at=2.5) == (2, 5.5)


def test_the_page_says_medians_ratios_and_who_does_not_recover() -> None:
    ours = [Outcome(way="stepkeeper", fault="rank", redone=17, seconds=seconds) for seconds in (4.0, 9.0, 5.0)]
    theirs = [Outcome(way="torchrun", fault="rank", redone=17, seconds=7.5)]
    lost = [Outcome(way="torchrun", fault="hang", why_not="no new step within 240 s")]
    text = page(
        [*ours, *theirs, *lost],
        {"A killed rank": {"stepkeeper": {"kill to seen, s": [0.25]}}},
        ways=[WAYS["stepkeeper"], WAYS["torchrun"]],
        faults=[FAULTS["rank"], FAULTS["hang"]],
        head="Here.",
        notes="Notes.",
        absent={"submitit": "no wheel"},
    )
    lines = text.splitlines()
    assert "| stepkeeper | **5.0** (4.0, 9.0, 5.0) | not played |" in lines
    assert "| torchrun | **7.5**, 1.50x ours | does not recover |" in lines
    assert "- torchrun, hang: no new step within 240 s" in lines
    assert "- submitit: no wheel" in lines
    assert "## A killed rank under Stepkeeper, piece by piece" in lines
    assert "| kill to seen, s | 0.250 (0.250) |" in lines
