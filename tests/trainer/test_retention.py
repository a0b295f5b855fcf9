"""Retention: what is kept, and that a crash at any point takes nothing that should be there."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.steps import newest_verified
from stepkeeper_trainer.formats.verify import CACHE_NAME, verify
from stepkeeper_trainer.store import retention
from stepkeeper_trainer.store.retention import Candidate, Policy, Retention, decide, empty_trash, prune
from tests.trainer.test_formats import make_step


def made(
    *steps: int, broken: tuple[int, ...] = (), metrics: dict[int, float] | None = None, **marks: tuple[int, ...]
) -> list[Candidate]:
    """Return candidates, newest first."""
    return [
        Candidate(
            name=str(step),
            step=step,
            save_id=f"id{step}",
            verified=step not in broken,
            marks=frozenset(mark for mark, marked in marks.items() if step in marked),
            metric=(metrics or {}).get(step),
        )
        for step in sorted(steps, reverse=True)
    ]


def kept(candidates: list[Candidate], **policy: object) -> list[int]:
    plan = decide(candidates, Policy(**{"epochs": True, **policy}))  # type: ignore[arg-type]
    return sorted(int(name) for name in plan.kept)


HUNDREDS = tuple(range(100, 1100, 100))


def test_the_newest_are_kept() -> None:
    assert kept(made(*HUNDREDS), keep_last=2) == [900, 1000]
    assert kept(made(*HUNDREDS), keep_last=20) == list(HUNDREDS)
    assert kept([], keep_last=1) == []


def test_only_verified_steps_count_and_broken_ones_are_never_removed() -> None:
    assert kept(made(*HUNDREDS, broken=(900, 700)), keep_last=3) == [600, 700, 800, 900, 1000]


def test_nothing_is_removed_while_the_newest_is_not_verified() -> None:
    candidates = made(*HUNDREDS, broken=(1000,))

    plan = decide(candidates, Policy(keep_last=1))

    assert plan.removed == ()
    assert plan.blocked == "the newest step, 1000, is not verified"
    assert decide(made(1, 2, 3, broken=(1, 2, 3)), Policy(keep_last=1)).removed == ()


def test_a_step_off_the_lineage_neither_counts_nor_blocks() -> None:
    candidates = [replace(c, current=c.step <= 500) for c in made(*HUNDREDS, broken=(1000,))]

    assert kept(candidates, keep_last=2) == [400, 500, 1000]


def test_milestones_are_the_first_at_or_past_each_mark() -> None:
    assert kept(made(*HUNDREDS), keep_last=1, every_steps=300) == [300, 600, 900, 1000]
    assert kept(made(90, 310, 320, 599, 601, 650, 1000), keep_last=1, every_steps=300) == [310, 601, 1000]
    assert kept(made(*HUNDREDS), keep_last=1, every_percent=25.0, total_steps=1000) == [300, 500, 800, 1000]
    assert kept(made(*HUNDREDS, broken=(300,)), keep_last=1, every_steps=300) == [300, 400, 600, 900, 1000]


def test_a_milestone_stays_one_when_steps_before_it_are_gone() -> None:
    """Otherwise each pruning would choose another, and remove the one before."""
    left = made(*HUNDREDS)
    for _ in range(5):
        plan = decide(left, Policy(keep_last=1, every_steps=300))
        left = [c for c in left if c.name not in plan.removed]
        assert [c.step for c in left] == [1000, 900, 600, 300]


def test_marks_keep() -> None:
    candidates = made(*HUNDREDS, pinned=(100,), suspect=(1000, 800), epoch=(200,))

    assert kept(candidates, keep_last=2) == [100, 200, 700, 800, 900, 1000], "a suspect one does not count"
    assert kept(candidates, keep_last=2, epochs=False) == [100, 700, 800, 900, 1000]


def test_the_best_are_kept() -> None:
    losses = {step: abs(step - 430) / 100 for step in HUNDREDS} | {600: float("nan"), 300: float("-inf")}

    assert kept(made(*HUNDREDS, metrics=losses), keep_last=1, best=2) == [400, 500, 1000]
    assert kept(made(*HUNDREDS, metrics=losses), keep_last=1, best=1, best_is_highest=True) == [1000]
    assert kept(made(*HUNDREDS, metrics=losses, broken=(400,)), keep_last=1, best=1) == [400, 500, 1000]


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"every_steps": 0},
        {"every_percent": 10.0},
        {"every_percent": 101.0, "total_steps": 5},
        {"best": -1},
    ],
    ids=str,
)
def test_a_policy_that_cannot_be_meant_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"below|above"):
        Policy(**wrong)  # type: ignore[arg-type]


candidate = st.builds(
    Candidate,
    name=st.just(""),
    step=st.integers(1, 50),
    save_id=st.just("x"),
    verified=st.booleans(),
    current=st.booleans(),
    marks=st.frozensets(st.sampled_from(["pinned", "suspect", "epoch"])),
    metric=st.none() | st.floats(),
)
policies = st.builds(
    Policy,
    keep_last=st.integers(1, 4),
    every_steps=st.none() | st.integers(1, 20),
    epochs=st.booleans(),
    best=st.integers(0, 3),
)


@given(candidates=st.lists(candidate, max_size=12), policy=policies)
@settings(
    max_examples=200, deadline=None, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)
def test_whatever_the_policy_the_newest_verified_step_stays(candidates: list[Candidate], policy: Policy) -> None:
    ordered = sorted(candidates, key=lambda c: c.step, reverse=True)
    named = [replace(c, name=str(at)) for at, c in enumerate(ordered)]

    plan = decide(named, policy)

    assert set(plan.kept) | set(plan.removed) == {c.name for c in named}
    assert not set(plan.kept) & set(plan.removed)
    by_name = {c.name: c for c in named}
    for name in plan.removed:
        gone = by_name[name]
        assert gone.verified
        assert not gone.marks & {"pinned", "suspect"}
        better = [c for c in named if c.verified and c.current and "suspect" not in c.marks and c.name in plan.kept]
        assert better, "something to go on from is left"
    good = [c for c in named if c.verified and c.current and "suspect" not in c.marks]
    assert all(c.name in plan.kept for c in good[: policy.keep_last])
    if (newest := next((c for c in named if c.current), None)) and not newest.verified:
        assert plan.removed == ()
    again = decide([c for c in named if c.name in plan.kept], policy)
    assert again.removed == (), "what is kept once is kept again"


# On disk ----------------------------------------------------------------------------------------------------------


def make_run(path: Path, count: int = 6) -> Path:
    for step in range(1, count + 1):
        make_step(path, step, parent=f"{step - 1:032x}" if step > 1 else None)
        commit = lineage.Commit(
            at=1.0,
            step=step,
            save_id=f"{step:032x}",
            parent=f"{step - 1:032x}" if step > 1 else None,
            directory=f"step_{step:08d}",
        )
        lineage.append(path, commit)
    return path


def names(checkpoints: Path) -> list[str]:
    return sorted(name for name in os.listdir(checkpoints) if not name.startswith((CACHE_NAME, "lineage")))


def steps(checkpoints: Path) -> list[int]:
    return [int(name[5:13]) for name in names(checkpoints) if name.startswith("step_")]


def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    before = names(tmp_path)

    outcome = prune(tmp_path, Policy(keep_last=2), dry_run=True)

    assert outcome.plan.removed == tuple(f"step_{step:08d}" for step in (1, 2, 3, 4))
    assert outcome.removed == ()
    assert names(tmp_path) == before


def test_what_is_removed_goes_by_one_rename_and_the_bytes_follow(tmp_path: Path) -> None:
    make_run(tmp_path)

    prune(tmp_path, Policy(keep_last=2))

    assert steps(tmp_path) == [5, 6]
    assert [name for name in names(tmp_path) if name.startswith(".trash-")] == [
        f".trash-step_{step:08d}.0" for step in (1, 2, 3, 4)
    ]
    assert empty_trash(tmp_path) == 4
    assert names(tmp_path) == ["step_00000005", "step_00000006"]
    found = lineage.read(tmp_path)
    assert found is not None
    assert all(lineage.PRUNED in found.marks[f"{step:032x}"] for step in (1, 2, 3, 4))
    assert newest_verified(tmp_path).chosen.step == 6  # type: ignore[union-attr]


def test_damaged_steps_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    make_run(tmp_path)
    os.truncate(tmp_path / "step_00000002/__0_0.distcp", 3)
    data = bytearray((tmp_path / "step_00000005/__0_0.distcp").read_bytes())
    data[5] ^= 1
    (tmp_path / "step_00000005/__0_0.distcp").write_bytes(data)

    prune(tmp_path, Policy(keep_last=2))

    assert steps(tmp_path) == [2, 4, 5, 6]


def test_a_damaged_newest_step_saves_all_others(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "step_00000006/.metadata").unlink()

    outcome = prune(tmp_path, Policy(keep_last=1))

    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert outcome.plan.blocked == "the newest step, step_00000006, is not verified"


def test_a_pin_or_a_rollback_after_the_plan_was_made_is_heard(tmp_path: Path) -> None:
    make_run(tmp_path)
    policy = Policy(keep_last=1)
    candidates = retention.look(tmp_path, policy)
    plan = decide(candidates, policy)
    lineage.append(tmp_path, lineage.Mark(at=1.0, save_id=f"{1:032x}", mark=lineage.PINNED))
    lineage.append(tmp_path, lineage.Rollback(at=1.0, save_id=f"{3:032x}", why="poison"))

    outcome = retention.remove(tmp_path, plan, candidates)

    assert steps(tmp_path) == [1, 3, 6]
    assert dict(outcome.spared) == {
        "step_00000001": "pinned",
        "step_00000003": "training continues from it",
    }


def test_an_attempt_that_was_fenced_off_removes_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)

    def fence() -> None:
        raise PermissionError("a newer attempt has taken over")

    with pytest.raises(PermissionError):
        prune(tmp_path, Policy(keep_last=1), fence=fence)

    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_the_same_step_number_can_be_thrown_away_twice(tmp_path: Path) -> None:
    for _ in range(2):
        make_run(tmp_path, 3)
        prune(tmp_path, Policy(keep_last=1))
        shutil.rmtree(tmp_path / "step_00000003")
        (tmp_path / "lineage.jsonl").unlink()

    assert names(tmp_path) == [f".trash-step_0000000{step}.{count}" for step in (1, 2) for count in (0, 1)]
    assert empty_trash(tmp_path) == 4


def test_linked_files_outlive_the_step_they_came_from(tmp_path: Path) -> None:
    make_run(tmp_path, 2)
    (tmp_path / "step_00000002/__0_0.distcp").unlink()
    os.link(tmp_path / "step_00000001/__0_0.distcp", tmp_path / "step_00000002/__0_0.distcp")

    prune(tmp_path, Policy(keep_last=1))
    empty_trash(tmp_path)

    assert verify(tmp_path / "step_00000002").ok


def run_pruning(checkpoints: Path, keep: int, at: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.trainer.pruning", str(checkpoints), str(keep), str(at)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.campaign
def test_a_kill_at_any_act_of_a_pruning_takes_nothing_that_is_kept(tmp_path: Path) -> None:
    pristine = make_run(tmp_path / "pristine", 5)
    shutil.copytree(pristine, tmp_path / "whole")
    acts = int(run_pruning(tmp_path / "whole", 2, -1).stdout)
    assert acts >= 30, "renames, unlinks, writes and syncs of three removals"
    for at in range(acts):
        checkpoints = tmp_path / f"killed-{at}"
        shutil.copytree(pristine, checkpoints)

        killed = run_pruning(checkpoints, 2, at)

        assert killed.returncode == -signal.SIGKILL, f"act {at} was not reached: {killed.stderr}"
        left = steps(checkpoints)
        assert left[-2:] == [4, 5], f"act {at}"
        assert all(verify(checkpoints / f"step_{step:08d}").ok for step in left), f"a step is there in part: act {at}"
        chosen = newest_verified(checkpoints).chosen
        assert chosen is not None
        assert chosen.step == 5
        prune(checkpoints, Policy(keep_last=2))
        empty_trash(checkpoints)
        assert names(checkpoints) == ["step_00000004", "step_00000005"], f"act {at}"
        shutil.rmtree(checkpoints)


def test_it_works_beside_training_and_survives_what_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "SETTLED_S", 0.0)
    make_run(tmp_path)
    caplog.set_level("INFO")
    trouble = [OSError(5, "Input/output error")]

    def fence() -> None:
        if trouble:
            raise trouble.pop()

    keeper = Retention(tmp_path, Policy(keep_last=2), fence=fence)
    limit_at = time.monotonic() + 90
    for expected in ("retention_failed", "steps_removed"):
        keeper.request()
        while expected not in caplog.text:
            assert time.monotonic() < limit_at
            time.sleep(0.01)
    while names(tmp_path) != ["step_00000005", "step_00000006"]:
        assert time.monotonic() < limit_at
        time.sleep(0.01)
    keeper.close(math.inf)
    assert "retention_late" not in caplog.text


def test_what_was_never_asked_closes_at_once(tmp_path: Path) -> None:
    Retention(tmp_path, Policy()).close(0.0)
