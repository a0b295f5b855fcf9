"""What the page of recoveries says: its figures are counted here, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recovery import rounds
from tests.recovery.page import page
from tests.recovery.playing import FAULTS, Outcome, Step, cost
from tests.recovery.rounds import Round
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
    played = []
    for ours, theirs in ((4.0, 6.0), (9.0, 18.0), (5.0, None)):
        outcomes = [Outcome(way="stepkeeper", fault="rank", redone=17, seconds=ours)]
        if theirs is not None:
            outcomes.append(Outcome(way="torchrun", fault="rank", redone=17, seconds=theirs))
        outcomes.append(Outcome(way="torchrun", fault="hang", why_not="no new step within 240 s"))
        pieces = {"A killed rank": {"stepkeeper": {"kill to seen, s": ours / 16}}}
        played.append(
            Round(at=f"2026-11-2{ours:.0f}", cores=2, load=0.5, versions={}, outcomes=outcomes, pieces=pieces)
        )
    text = page(
        played,
        ways=[WAYS["stepkeeper"], WAYS["torchrun"]],
        faults=[FAULTS["rank"], FAULTS["hang"]],
        head="Here.",
        notes="Notes.",
        absent={"submitit": "no wheel"},
    )
    lines = text.splitlines()
    assert "| stepkeeper | **5.0** (4.0, 9.0, 5.0) | not played |" in lines
    assert "| torchrun | **12.0**, 1.75x ours (6.0, 18.0) | does not recover |" in lines
    assert "- torchrun, hang: no new step within 240 s" in lines
    assert "- submitit: no wheel" in lines
    assert "## A killed rank under Stepkeeper, piece by piece" in lines
    assert "| kill to seen, s | 0.312 (0.250, 0.562, 0.312) |" in lines


def test_a_round_that_is_kept_reads_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "DIRECTORY", tmp_path / "rounds")
    kept = [
        Round(
            at=f"2026-11-{day} 09:30",
            cores=2,
            load=0.5,
            versions={"torch": "2.13.0"},
            outcomes=[Outcome(way="stepkeeper", fault="rank", redone=17, seconds=4.0)],
            pieces={"A killed rank": {"stepkeeper": {"kill to seen, s": 0.25}}},
        )
        for day in (30, 27, 29, 28)
    ]
    for each in kept:
        each.keep("recovery")
    kept[0].keep("production")

    assert rounds.newest("recovery") == sorted(kept, key=lambda each: each.at)[1:]
    assert rounds.table(kept[:1]).splitlines()[-1] == "| 2026-11-30 09:30 | 2 | 0.5 | 2.13.0 |"
