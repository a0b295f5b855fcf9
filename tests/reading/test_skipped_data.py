"""Data that training left out, for an auditor who has the checkpoints and no journal, and in explain and report."""

from __future__ import annotations

import json

from stepkeeper.core import events as on
from stepkeeper.core.causes import SkippedData
from stepkeeper.run_analytics.history import Incidents
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper_trainer.formats import lineage
from stepkeeper_trainer.formats.manifest import read_manifest, seal
from tests.reading import build
from tests.reading.conftest import Command

WINDOW = {"step": 250, "steps": 2}
SAMPLES = {"step": 250, "epoch": 0, "consumed": 1992, "samples": 16}


def leave_out(run: RunDirectory) -> None:
    """Go back from step 300, leaving out data, and save it anew without."""
    _, second, _ = build.make_steps(run)
    window = lineage.LeftOut(**WINDOW)
    back = lineage.Rollback(at=build.START, save_id=read_manifest(second).save_id, why="a spike", left_out=(window,))
    lineage.append(run.checkpoints, back)
    made = build.make_step(run, 300, save_id="deadbeef-save", parent="00000001-save", name="step_00000300.deadbeef")
    manifest = read_manifest(made)
    manifest.state["left_out"] = [SAMPLES]
    (made / "MANIFEST.json").write_bytes(seal(manifest))


def test_the_list_of_steps_says_what_no_step_of_the_lineage_has_seen(command: Command, run: RunDirectory) -> None:
    leave_out(run)

    listed = command("checkpoints", "ls", run.path)
    document = json.loads(command("checkpoints", "ls", run.path, "--json").out)

    assert listed.out.splitlines()[-1] == "left out: the data of 2 steps, at step 250"
    assert document["left_out"] == [WINDOW]
    assert {row["directory"]: row["left_out"] for row in document["steps"]} == {
        "step_00000300.deadbeef": [SAMPLES],
        "step_00000300": [],
        "step_00000200": [],
        "step_00000100": [],
    }


def test_a_step_directory_alone_tells_which_samples_it_has_not_seen(command: Command, run: RunDirectory) -> None:
    leave_out(run)
    (run.checkpoints / lineage.LINEAGE_NAME).unlink()

    said = command("checkpoints", "verify", run.checkpoints / "step_00000300.deadbeef", "--json")

    document = json.loads(said.out)
    assert (said.code, document["ok"], document["left_out"]) == (0, True, [SAMPLES])


def test_where_nothing_was_left_out_nothing_is_said(command: Command, run: RunDirectory) -> None:
    build.make_steps(run)

    assert "left out" not in command("checkpoints", "ls", run.path).out
    assert json.loads(command("checkpoints", "ls", run.path, "--json").out)["left_out"] == []


def test_explain_says_that_the_run_goes_on_without_the_data(command: Command, run: RunDirectory) -> None:
    leave_out(run)
    events = [
        on.AttemptStarted(
            at=1.0, job_id=12, restart_count=1, attempt=1, nodes=("n1",), batch_node="n1", kill_wait_s=30.0
        ),
        on.LaunchBegan(at=2.0, launch=0),
        on.RankExited(at=3.0, launch=0, rank=0, node="n1", code=1),
        on.LaunchEnded(at=4.0, launch=0, code=1),
    ]
    build.write_journal(run, [build.record(event) for event in events])

    said = command("explain", run.path)

    assert "left out   the data of 2 steps, at step 250: the run continues without it" in said.out.splitlines()
    assert json.loads(command("explain", run.path, "--json").out)["left_out"] == [WINDOW]


def test_each_window_is_an_incident_once_though_the_next_attempt_takes_it_over() -> None:
    first, second = SkippedData(step=18, steps=1), SkippedData(step=1250, steps=2)
    seen = Incidents()
    for at, (attempt, windows) in enumerate([(0, ()), (0, (first,)), (1, (first,)), (1, (first, second))]):
        seen.take(build.record(on.Tick(at=at), attempt=attempt, skipped_data=windows, why="rollback"), at, 0)

    assert [(each.at, each.kind, each.what, each.decided) for each in seen.found] == [
        (1, "data left out", "the data of 1 step, at step 18", "rollback"),
        (3, "data left out", "the data of 2 steps, at step 1,250", "rollback"),
    ]
