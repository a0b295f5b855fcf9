from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.submit.plan import measure
from stepkeeper.supervisor.actions import rank_files
from stepkeeper_trainer.coordinate.cadence import Costs, best_interval_s, productive_share
from tests.reading import build
from tests.reading.conftest import Command


def plans(command: Command, *argv: object) -> Any:
    said = command("plan", *argv, "--json")
    assert said.code == 0, said.err
    return json.loads(said.out)


def test_it_prints_the_interval_and_the_share_for_each_size(command: Command) -> None:
    document = plans(
        command, "--nodes", "8,512", "--save-s", "60", "--blocked-s", "1.5", "--restart-s", "4min",
        "--mtbf-node-hours", "4800",
    )  # fmt: skip
    small, large = document["plans"]
    costs = Costs(blocked_s=1.5, persist_s=60.0, restart_s=240.0, mtbf_s=4800 * 3600 / 512)
    assert [small["nodes"], large["nodes"]] == [8, 512]
    assert large["use"]["interval_s"] == pytest.approx(best_interval_s(costs))
    assert large["use"]["share"] == pytest.approx(productive_share(best_interval_s(costs), costs))
    assert small["use"]["share"] > large["use"]["share"]
    assert document["from"]["mtbf"] == "given"


def test_people_get_a_table_with_what_other_intervals_cost(command: Command) -> None:
    said = command("plan", "--nodes", "8,512", "--save-s", "60", "--blocked-s", "1.5")
    lines = said.out.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("NODES"))
    assert lines[head].split("  ")[-1].strip() == "AT 4 h"
    assert [line.split()[0] for line in lines[head + 1 :]] == ["8", "512"]
    assert max(map(len, lines)) <= 120


def test_the_allowed_overhead_is_kept_and_said(command: Command) -> None:
    arguments = ("--nodes", "4096", "--save-s", "120", "--blocked-s", "60")
    [each] = plans(command, *arguments, "--overhead-max", "0.02")["plans"]
    assert each["blocked_share"] == pytest.approx(0.02)
    assert each["use"]["share"] < each["best"]["share"]
    assert "allowed overhead" in command("plan", *arguments, "--overhead-max", "0.02").out
    assert "allowed overhead" not in command("plan", *arguments, "--overhead-max", "0.9").out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "--save-s is missing"),
        (("--save-s", "soon"), "is no time"),
        (("--save-s", "60", "--nodes", "0"), "is no number of nodes"),
        (("--save-s", "60", "--nodes", "8,-1"), "is no number of nodes"),
        (("--save-s", "60", "--mtbf-node-hours", "nan"), "is no number"),
        (("--save-s", "60", "--mtbf-node-hours", "0"), "is not more than 0"),
        (("--save-s", "60", "--overhead-max", "1"), "is not between 0 and 1"),
        (("--save-s", "60", "--mtbf", "3h", "--nodes", "8,64"), "of one size of the job"),
        (("--save-s", "60", "--mtbf", "0"), "mtbf_s is 0"),
        (("no-such-run",), "no such directory"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(command: Command, argv: tuple[str, ...], says: str) -> None:
    said = command("plan", *argv)
    assert said.code != 0
    assert says in said.err
    assert said.err.count("\n") == 1


# --- from a run -----------------------------------------------------------------------------------


def made_run(run: RunDirectory, *, steps: int = 200) -> None:
    """Two attempts of two nodes: steps of 1 s; a save every 50 steps slows the three steps after it by 0.5 s in sum."""
    rows, commits = ["step,loss,tokens,lr,grad_norm,time,attempt,launch"], []
    at = build.START
    for step in range(1, steps + 1):
        attempt = int(step > steps // 2)
        if step == steps // 2 + 1:
            at += 100.0  # the restart; the step itself comes on top
        after = (step - 1) % 50
        slowed = {0: 0.3, 1: 0.15, 2: 0.05}.get(after, 0.0) if step > 50 else 0.0
        at += 1.0 + slowed
        rows.append(f"{step},2.0,{step * 10},0.1,1.0,{at:.3f},{attempt},0")
        if step % 50 == 0:
            commits.append((attempt, step, at))
    (run.path / "metrics.csv").write_text("\n".join(rows) + "\n7,tor")

    def started(attempt: int, at: float) -> on.Event:
        return on.AttemptStarted(
            at=at,
            job_id=12,
            restart_count=attempt,
            attempt=attempt,
            nodes=("n1", "n2"),
            batch_node="n1",
            kill_wait_s=30,
        )

    records = [build.record(started(0, build.START), phase=Phase.STARTING, attempt=0)]
    for attempt, step, saved_at in commits:
        if attempt == 1 and len(records) == 3:
            records.append(build.record(started(1, saved_at - 120), phase=Phase.STARTING, attempt=1, node_losses=1))
        committed = on.CheckpointCommitted(
            at=saved_at + 4.0, launch=0, step=step, save_id=f"{step:x}", directory="d", bytes=1, seconds=4.0
        )
        records.append(build.record(committed, attempt=attempt, node_losses=attempt))
    build.write_journal(run, records)


def test_what_a_run_has_measured_is_read_from_its_journal_and_its_steps(run: RunDirectory) -> None:
    made_run(run)
    measured = measure(run)
    assert measured.nodes == 2
    assert measured.saves == 4
    assert measured.persist_s == pytest.approx(4.0)
    assert measured.blocked_s == pytest.approx(0.5, abs=0.02), "blocked and slowed steps, in sum"
    assert measured.restart_s == pytest.approx(101.3, abs=0.01)
    # attempt 0 ended without a word, and one node was lost
    assert measured.failures == 2
    assert measured.rate.per_node_hour > 2 * measured.rate.prior_failures / measured.rate.prior_node_hours


def test_ranks_are_told_of_the_failures_of_the_infrastructure(run: RunDirectory, tmp_path: Path) -> None:
    made_run(run)
    told = rank_files.reliability_variables(run.path)["STEPKEEPER_RELIABILITY"]
    measured = measure(run)

    failures, node_hours = (float(part) for part in told.split(":"))
    assert failures == pytest.approx(measured.rate.failures, abs=1e-3)
    assert 0 < failures <= measured.failures
    assert 0 < node_hours <= measured.node_hours
    assert rank_files.reliability_variables(tmp_path / "none") == {}, "a new run has seen nothing"
    os.mkfifo(tmp_path / "journal.jsonl")
    assert rank_files.reliability_variables(tmp_path, within_s=0.1) == {}, "storage that hangs is not waited for"


def test_a_plan_takes_what_the_run_measured_and_the_user_may_overrule(command: Command, run: RunDirectory) -> None:
    made_run(run)
    document = plans(command, run.path)
    [each] = document["plans"]
    assert each["nodes"] == 2
    assert each["costs"]["persist_s"] == pytest.approx(4.0)
    assert set(document["from"].values()) & {"measured by the run"}
    assert document["measured"]["failures"] == 2
    overruled = plans(command, run.path, "--blocked-s", "2", "--nodes", "1000")
    assert overruled["from"]["blocked-s"] == "given"
    assert overruled["plans"][0]["costs"]["blocked_s"] == 2.0


def test_a_run_without_a_commit_needs_to_be_told(command: Command, run: RunDirectory) -> None:
    said = command("plan", run.path)
    assert said.code == 2
    assert "--save-s is missing" in said.err
    assert plans(command, run.path, "--save-s", "30")["plans"][0]["nodes"] == 1


def test_damaged_files_of_a_run_do_not_end_it_in_a_traceback(command: Command, run: RunDirectory) -> None:
    run.journal.write_bytes(b'{"v":1}\n\xff\xfe\n{"' + b"x" * 5000 + b"\n")
    (run.path / "metrics.csv").write_bytes(b"step\n1,2\n\xff,,,,nan,0,0\n1,1,1,1,1,inf,0,0\n1,1,1,1,1,1e400,0,0\n")
    assert measure(run).saves == 0
    assert command("plan", run.path, "--save-s", "30").code == 0
