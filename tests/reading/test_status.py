from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import msgspec
import pytest

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.gates import closed_gates
from stepkeeper.core.state import Phase, Watchers
from stepkeeper.run_analytics.glance import glance, line
from stepkeeper.run_analytics.screen import screen
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.simulate.scenario import given_training
from stepkeeper_trainer.formats import lease
from tests.reading import build
from tests.reading.conftest import Command
from tests.run_analytics.build import Journal


def test_a_person_sees_where_a_run_stands(command: Command, run: RunDirectory) -> None:
    build.write_status(run, updated_at=time.time())
    build.write_journal(run, build.story(run))

    said = command("status", run.path)

    assert said.code == 0
    for words in (
        "training, for",
        "12 (restart 1), attempt 1, launch 0",
        "2 in use: n1 n2",
        "250, loss 2.125, 250,000 tokens, 0.5 s a step",
        "step 200 (step_00000200), 50 steps ago",
        "checkpoints/step_00000100",
        "step 200 is committed",
        f"stepkeeper logs {run.path}",
        "scancel 12",
    ):
        assert words in said.out
    assert "no update" not in said.out
    assert len(said.out.splitlines()) <= 24
    assert max(map(len, said.out.splitlines())) <= 400


def test_json_is_the_status_document_with_computed_fields(command: Command, run: RunDirectory) -> None:
    build.write_status(run)
    build.write_journal(run, build.story(run))

    document = json.loads(command("status", run.path, "--json").out)

    assert document["job_id"] == 12
    assert document["nodes"] == ["n1", "n2"]
    assert document["phase_since"] == build.START + 30
    assert document["checkpoint_directory"] == str(run.checkpoints / "step_00000200")
    assert document["checkpoint_state"] == "gone"
    build.make_steps(run)
    said = command("status", run.path).out
    assert re.search(r"step 200 \(step_00000200\), 50 steps ago, .* ago: committed, not yet verified", said)
    assert document["run_directory"] == str(run.path)
    assert document["silent"] is True
    assert document["done"] is False


@pytest.mark.parametrize("name", ["checkpoint-250", "stepkeeper-step=250.ckpt"])
def test_the_checkpoint_of_a_framework_is_looked_for_where_it_is(
    command: Command, run: RunDirectory, name: str
) -> None:
    there = run.path.parent / "outputs" / name  # a directory, or one file
    there.parent.mkdir()
    told = Journal()
    told.begin(0)
    told.launch(0)
    saved = {"launch": 0, "step": 250, "save_id": "", "bytes": 0, "seconds": 1.0, "framework": "any"}
    told.tell(on.CheckpointCommitted(at=time.time(), directory=str(there), **saved))
    build.write_status(run, checkpoint_step=250)
    build.write_journal(run, told.records)

    def told_of() -> str:
        (row,) = [row for row in command("status", run.path).out.splitlines() if row.startswith("checkpoint")]
        return row

    assert re.search(rf"step 250 \({re.escape(name)}\), .* ago: gone", told_of())

    if there.suffix:
        there.touch()
    else:
        there.mkdir()

    assert told_of().endswith(": committed, not yet verified")
    told.tell(on.CheckpointVerified(at=time.time(), directory=str(there), ok=True))
    build.write_journal(run, told.records[-1:])
    assert told_of().endswith(": verified")
    assert json.loads(command("status", run.path, "--json").out)["checkpoint_directory"] == str(there)
    reported = json.loads(command("report", run.path, "--json").out)
    [states] = [each["states"] for each in reported["checkpoints"] if each["directory"] == name]
    assert states == ["verified"]


def test_after_the_end_of_a_run_a_person_verifies_its_last_checkpoint(
    command: Command, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepkeeper_trainer.formats.verify.SETTLED_S", -1e9)  # the files are new
    build.write_journal(run, build.story(run))
    build.make_steps(run)
    last = str(run.checkpoints / "step_00000200")

    def told_of(**changes: object) -> str:
        build.write_status(run, phase="done", **changes)
        (row,) = [row for row in command("status", run.path).out.splitlines() if row.startswith("checkpoint ")]
        return row

    assert told_of(exit_code=ExitCode.REQUEUED).endswith(": committed, not yet verified"), (
        "the next attempt verifies it"
    )
    assert told_of(exit_code=ExitCode.FINISHED).endswith(
        f": committed, not verified (to verify it: stepkeeper checkpoints verify {last})"
    )
    document = json.loads(command("status", run.path, "--json").out)
    assert document["checkpoint_state"] == "committed, not yet verified", "programs compare this word"
    assert command("checkpoints", "verify", last).code == 0
    assert told_of(exit_code=ExitCode.FINISHED).endswith(": verified")


def test_a_start_says_what_it_waits_for(command: Command, run: RunDirectory) -> None:
    training = given_training()
    starting = msgspec.structs.replace(training, phase=Phase.STARTING, watchers=Watchers())
    build.write_status(run, updated_at=time.time(), phase="starting", waits_for=closed_gates(starting))
    build.write_journal(run, build.story(run))

    said = command("status", run.path)

    assert "waits for" in said.out
    assert "a watcher on every node, nodes that are clear and fit" in said.out
    assert json.loads(command("status", run.path, "--json").out)["waits_for"] == ["watchers", "nodes"]
    assert closed_gates(training) == ()


def test_a_phase_that_the_journal_does_not_tell_of_yet_has_no_beginning(command: Command, run: RunDirectory) -> None:
    build.write_status(run, updated_at=time.time(), phase="saving")
    build.write_journal(run, build.story(run))

    assert json.loads(command("status", run.path, "--json").out)["phase_since"] is None
    assert "phase          saving\n" in command("status", run.path).out


def test_what_was_suspended_is_said(command: Command, run: RunDirectory) -> None:
    build.write_status(run, suspended_seconds=7260.0)
    assert "2 h 01 min of this attempt" in command("status", run.path).out

    build.write_status(run)
    assert "of this attempt" not in command("status", run.path).out


def test_a_supervisor_that_fell_silent_is_said_honestly(command: Command, run: RunDirectory) -> None:
    build.write_status(run, updated_at=time.time() - 3662)

    said = command("status", run.path).out
    assert "unknown, no update for 1 h 01 min" in said
    assert "the job is suspended or gone, or its storage hangs" in said
    assert "Check it with `squeue -j 12`" in said

    build.write_status(run, updated_at=time.time() - 3662, step_seconds=600.0)
    assert "no update" not in command("status", run.path).out


def test_an_ended_run_shows_why_and_no_way_to_stop_it(command: Command, run: RunDirectory) -> None:
    build.write_status(run, phase="done", exit_code=0, why="the training finished at step 300")

    said = command("status", run.path)

    assert "the training is finished (exit code 0)" in said.out
    assert "the training finished at step 300" in said.out
    assert "scancel" not in said.out
    assert "to continue" not in said.out
    assert "no update" not in said.out


def test_an_ended_run_says_how_it_goes_on(command: Command, run: RunDirectory) -> None:
    """Submitted again without its directory, a training would begin anew."""
    build.write_status(run, phase="done", exit_code=27, why="games asks to save and end")

    assert f"to continue: stepkeeper resume {run.path}" in command("status", run.path).out


def test_an_exit_code_of_a_newer_version_is_shown(command: Command, run: RunDirectory) -> None:
    build.write_status(run, phase="done", exit_code=99)

    assert "does not know (exit code 99)" in command("status", run.path).out


def test_a_run_that_has_done_nothing_yet(command: Command, run: RunDirectory) -> None:
    nothing = dict.fromkeys(("step", "tokens", "loss", "step_seconds", "checkpoint_step", "resumed_from"))
    build.write_status(run, phase="starting", **nothing)

    said = command("status", run.path)

    assert said.code == 0
    assert "none yet" in said.out


def test_a_script_without_the_library_is_not_said_to_have_done_no_step(command: Command, run: RunDirectory) -> None:
    unknown = {"step": None, "loss": None, "tokens": None, "step_seconds": None, "checkpoint_step": None}
    build.write_status(run, library=False, resumed_from=None, **unknown)

    shown = command("status", str(run.path))
    followed = screen("my-run", glance(run), None, now=time.time(), width=100, height=30)
    one_line = line(glance(run), time.time())

    assert "no trainer library has answered" in shown.out
    assert "no trainer library has answered" in "\n".join(followed)
    assert "no trainer library" in one_line
    for text in (shown.out, "\n".join(followed), one_line):
        assert "none" not in text, text
        assert "resumed" not in text, text
        assert "no checkpoint yet" not in text, text


def test_escape_sequences_do_not_reach_the_terminal(command: Command, run: RunDirectory) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u009b31m\u202eabc"
    build.write_status(run, why=evil, nodes=(evil,), phase=evil)

    said = command("status", run.path)

    assert not set(said.out) & set("\x1b\x07\u009b\u202e")
    assert command("status", run.path, "--json").out.isascii()


@pytest.mark.parametrize(
    "content", [b"", b"{torn", b"[" * 200_000, b'{"loss": "\x1b[2J"}', b"\xff" * 10, b"x" * 2_000_000]
)
def test_a_torn_status_is_an_error_of_one_line(command: Command, run: RunDirectory, content: bytes) -> None:
    run.status.write_bytes(content)

    said = command("status", run.path)

    assert said.code == 32
    assert said.err.count("\n") == 1
    assert "status.json" in said.err
    assert "\x1b" not in said.err


def test_what_is_no_plain_file_is_refused_at_once(command: Command, run: RunDirectory) -> None:
    os.mkfifo(run.status)
    assert command("status", run.path).code == 32

    run.status.unlink()
    run.status.symlink_to("/etc/hostname")
    assert command("status", run.path).code == 32


def test_a_missing_status_says_so(command: Command, run: RunDirectory) -> None:
    said = command("status", run.path)

    assert (said.code, said.out) == (40, "")
    assert "no supervisor has worked on this run yet" in said.err


# --- which run ------------------------------------------------------------------------------------


def test_a_job_id_finds_its_run_by_name_or_by_what_the_run_says(command: Command, tmp_path: Path) -> None:
    named = build.make_run(tmp_path / "runs" / "gpt-7")
    build.write_status(named, job_id=7)
    saying = build.make_run(tmp_path / "runs" / "long-running")
    build.write_status(saying, job_id=12)
    renamed = build.make_run(tmp_path / "runs" / "gpt-8")  # job 9 goes on with the run that job 8 began
    build.write_status(renamed, job_id=9)
    held = build.make_run(tmp_path / "runs" / "held")
    lease.write(held.path, lease.Lease(job_id=13, restart_count=0, attempt=0, node="n", pid=1, taken_at=0))
    build.write_status(held, job_id=11)

    for job, expected in ((7, named), (12, saying), (9, renamed), (8, renamed), (13, held), (11, held)):
        document = json.loads(command("status", job, "--json").out)
        assert document["run_directory"] == str(expected.path)


def test_each_job_of_a_chain_finds_its_run(command: Command, tmp_path: Path) -> None:
    """Jobs that may not be requeued go on with one run, each by a number of its own; status names the newest."""
    chain = build.make_run(tmp_path / "runs" / "chain")
    story = build.story(chain)
    jobs = (21, 21, 25, 25, 29, 29)
    build.write_journal(
        chain, [msgspec.structs.replace(each, job_id=job) for each, job in zip(story, jobs, strict=True)]
    )
    build.write_status(chain, job_id=29)
    other = build.make_run(tmp_path / "runs" / "other-25")  # named so by hand, and another job's
    build.write_status(other, job_id=70)
    build.write_journal(other, [msgspec.structs.replace(each, job_id=70) for each in story])

    for job in jobs:
        assert json.loads(command("status", job, "--json").out)["run_directory"] == str(chain.path), job
    said = command("status", 25).out
    assert "29 (restart 1), attempt 1, launch 0" in said
    assert "job 25 worked on this run before" in said
    assert "before" not in command("status", 29).out
    for job in (20, 23, 30):
        assert command("status", job).code == 40, job


def test_a_journal_whose_numbers_began_anew_is_read_whole(command: Command, tmp_path: Path) -> None:
    """Slurm counts its jobs from FirstJobId again after MaxJobId; and a line may be torn."""
    run = build.make_run(tmp_path / "runs" / "anew")
    story = build.story(run)
    jobs = (67_043_327, 67_043_327, 5, 5, 9, 9)
    build.write_journal(run, [msgspec.structs.replace(each, job_id=job) for each, job in zip(story, jobs, strict=True)])
    run.journal.write_bytes(b'{"v":1,"job_id":' + run.journal.read_bytes() + b'{"v":1,"job_id":1')
    build.write_status(run, job_id=9)

    for job in (5, 9):
        assert json.loads(command("status", job, "--json").out)["run_directory"] == str(run.path), job
    assert command("status", 6).code == 40


def test_a_task_of_an_array_is_found_by_the_name_that_slurm_shows(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in (3, 4):
        build.write_status(
            build.make_run(tmp_path / "runs" / f"sweep{task}"), job_id=70 + task, slurm_name=f"70_{task}"
        )
    build.write_status(build.make_run(tmp_path / "runs" / "named-70_5"), job_id=80)
    build.write_status(build.make_run(tmp_path / "elsewhere" / "70-6"), job_id=81)
    monkeypatch.setenv("STEPKEEPER_RUN_DIR", str(tmp_path / "elsewhere" / "%A-%a"))

    for name, job in (("70_3", 73), ("70_4", 74), ("74", 74), ("70_5", 80), ("70_6", 81)):
        assert json.loads(command("status", name, "--json").out)["job_id"] == job
    assert "job 70_9: no run directory found" in command("status", "70_9").err


def test_a_job_id_finds_the_run_that_the_environment_names(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build.make_run(tmp_path / "elsewhere" / "r-12")
    build.write_status(run)
    for named in (run.path, tmp_path / "elsewhere" / "r-%j"):
        monkeypatch.setenv("STEPKEEPER_RUN_DIR", str(named))
        assert command("status", 12).code == 0
    assert command("status", 5).code == 40


def test_without_run_the_nearest_is_shown(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = (build.make_run(tmp_path / "runs" / name) for name in ("older", "newer"))
    for run, age in ((older, 100), (newer, 10)):
        build.write_status(run)
        for path in (run.status, run.checkpoints):
            os.utime(path, (time.time() - age, time.time() - age))

    def shown() -> str:
        return json.loads(command("status", "--json").out)["run_directory"]

    assert shown() == str(newer.path)
    monkeypatch.setenv("STEPKEEPER_RUN_DIR", str(older.path))
    assert shown() == str(older.path)
    monkeypatch.chdir(newer.path)
    assert shown() == str(newer.path)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("4711", "job 4711: no run directory found"),
        ("nowhere", "no such directory"),
        ("9" * 5000, "File name too long"),
        ("9" * 200, "no such directory"),
        ("file", "not a directory"),
        ("empty", "not a run directory"),
        ("evil\x1b[2J", "no such directory"),
        ("evil\n\udcff", "no such directory"),
    ],
)
def test_what_is_no_run_is_said_in_one_line(command: Command, tmp_path: Path, wanted: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("status", "events", "logs"):
        said = command(name, wanted)
        assert said.code in (40, 32)
        assert words in said.err
        assert said.err.count("\n") == 1
        assert "\x1b" not in said.err
        assert said.out == ""


def test_no_run_anywhere_says_where_was_looked(command: Command) -> None:
    said = command("status")

    assert said.code == 40
    assert "the working directory, runs/" in said.err


def test_a_step_that_only_the_nodes_memory_has_is_shown_beside_the_checkpoint(
    command: Command, run: RunDirectory
) -> None:
    build.write_status(run, checkpoint_step=200, snapshot_step=1234)
    assert "; step 1,234 in the nodes' memory" in command("status", run.path).out
    assert json.loads(command("status", run.path, "--json").out)["snapshot_step"] == 1234
    build.write_status(run, checkpoint_step=200, snapshot_step=195)
    assert "memory" not in command("status", run.path).out, "the checkpoint is newer"
