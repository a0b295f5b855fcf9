"""Data that is left out after a loss went wrong: the lineage says so, and the next attempt leaves it out too."""

from __future__ import annotations

from pathlib import Path

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause, SkippedData
from stepkeeper.core.decide import decide
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State
from stepkeeper.loop_tools import Clock
from stepkeeper.run_store import journal, lines
from stepkeeper.run_store.recorder import Recorder
from stepkeeper.simulate.scenario import given_training, parse
from stepkeeper.supervisor.actions import checkpoints
from stepkeeper.supervisor.sources.process import Inbox
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.lease import Lease
from tests.reading import build
from tests.reasons import in_words

WITHIN_S = 90.0
LEASE = Lease(job_id=7, restart_count=0, attempt=1, node="n1", pid=1, taken_at=0.0)
WINDOW = SkippedData(step=250, steps=2)


def rolled(tmp_path: Path, *windows: SkippedData) -> lineage.Lineage:
    run = build.make_run(tmp_path / "run")
    build.make_steps(run)
    inbox = Inbox(Clock())
    effect = do.RollBack(
        launch=3, below_step=250, reasons=in_words("cause numerical at step 250"), skipped_data=windows
    )
    checkpoints.roll_back(run.checkpoints, effect, LEASE, inbox=inbox)
    assert isinstance(inbox.get(WITHIN_S), on.RolledBack)
    told = lineage.read(run.checkpoints)
    assert told is not None
    assert told.head == "00000001-save"
    return told


def test_the_lineage_says_which_data_is_left_out_after_a_rollback(tmp_path: Path) -> None:
    told = rolled(tmp_path, WINDOW, SkippedData(step=260, steps=2))

    assert told.left_out == (lineage.LeftOut(step=250, steps=2), lineage.LeftOut(step=260, steps=2))


def test_a_rollback_that_leaves_out_nothing_says_nothing_of_it(tmp_path: Path) -> None:
    assert rolled(tmp_path).left_out == ()


def play(state: State, policy: Policy, *told: str) -> list[tuple[State, on.Event, State]]:
    found = []
    for line in told:
        event = parse(line, state)
        after = decide(state, event, policy).state
        found.append((state, event, after))
        state = after
    return found


def test_a_supervisor_that_is_killed_right_after_the_decision_leaves_it_to_the_next_attempt(tmp_path: Path) -> None:
    """The decision's own record carries the window, before anything was done about it."""
    policy = Policy(skip_data_steps=2)
    turns = play(
        given_training("given training step=250"),
        policy,
        "100 RankExited code=1",
        "101 LaunchEnded code=1",
        "102 CheckpointChosen directory=step_00000200 step=200",
        f"103 Judged cause={Cause.NUMERICAL.value} rule=loss-not-finite confidence=1.0 step=250",
    )
    recorder = Recorder(LEASE, policy)
    path = tmp_path / "journal.jsonl"
    with path.open("wb") as file:
        for before, event, _ in turns:
            record = recorder.record(before, event, decide(before, event, policy))
            assert record is not None
            file.write(lines.encode(record) + b"\n")

    assert journal.reconstruct(path).skipped_data == (WINDOW,)
