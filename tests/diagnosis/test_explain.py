from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.core.reasons import Finding
from stepkeeper.core.state import Phase
from stepkeeper.diagnosis import rules
from stepkeeper.logtext import as_text
from stepkeeper.printing import instant
from stepkeeper.run_store import journal
from stepkeeper.run_store.paths import RunDirectory
from tests.diagnosis.test_logs import OOM, STACK
from tests.reading import build
from tests.reading.conftest import Command, command, run
from tests.reasons import in_words

__all__ = ["command", "run"]  # fixtures of the reading commands
START = build.START


def failing(run: RunDirectory, *, attempt: int = 0, launch: int = 0, code: int | None = 1, at: float = START) -> None:
    """Write a launch of two ranks on two nodes, of which rank 1 dies first."""
    started = on.AttemptStarted(
        at=at,
        job_id=12,
        restart_count=attempt,
        attempt=attempt,
        nodes=("n1", "n2"),
        batch_node="n1",
        kill_wait_s=30.0,
    )
    signal = None if code is not None else 9
    events: list[on.Event] = [
        started,
        on.LaunchBegan(at=at + 1, launch=launch),
        on.RankExited(at=at + 9, launch=launch, rank=1, node="n2", code=code, signal=signal),
        on.RankExited(at=at + 12, launch=launch, rank=0, node="n1", signal=9),
        on.LaunchEnded(at=at + 13, launch=launch, code=1, error="srun: error: n2: task 1: Exited with exit code 1"),
    ]
    write(run, events, attempt=attempt, launch=launch)


def write(run: RunDirectory, events: list[on.Event], *, attempt: int = 0, launch: int = 0) -> None:
    build.write_journal(
        run, [build.record(event, phase=Phase.TRAINING, attempt=attempt, launch=launch) for event in events]
    )


def labelled(rank: int, text: str) -> bytes:
    return "".join(f"{rank}: {line}\n" for line in text.splitlines()).encode()


def explained(command: Command, *argv: object) -> dict[str, object]:
    said = command("explain", *argv, "--json")
    assert said.code == 0, said.err
    document: dict[str, object] = json.loads(said.out)
    return document


def test_the_newest_failed_launch_is_explained_from_journal_and_logs(command: Command, run: RunDirectory) -> None:
    failing(run)
    build.write_log(run, "n1", b"0: step 1 loss 2.5\n0: RuntimeError: Connection reset by peer\n")
    build.write_log(run, "n2", labelled(1, STACK))

    document = explained(command, run.path)

    assert (document["cause"], document["rank"], document["node"]) == ("gpu_memory", 1, "n2")
    assert document["location"] == "OutOfMemoryError at /w/train.py:61 in main"
    assert (document["attempt"], document["launch"]) == (0, 0)
    assert {"confidence", "evidence", "otherwise", "rule", "happened", "todo"} <= set(document)
    rules = [piece["rule"] for piece in document["evidence"]]  # type: ignore[attr-defined]
    assert {"cuda-out-of-memory", "peer-gone", "exit-error", "exit-killed"} <= set(rules)


def test_people_read_what_happened_why_and_what_to_do(command: Command, run: RunDirectory) -> None:
    failing(run)
    build.write_log(run, "n2", labelled(1, STACK))

    said = command("explain", run.path)

    assert said.code == 0
    log = run.logs(0, 0) / "n2.log"
    for words in (
        "gpu_memory", "A GPU ran out of memory", "train.py:61", "because", "to do", f"message    {OOM}",
        f"who        rank 1, node n2, {log}:4", f"last lines {log}:4 rank 1: {OOM}",
        "next       Stepkeeper starts the ranks again on the same nodes; if it fails in the same way again, it stops",
        "confirm    on n2: nvidia-smi",
    ):  # fmt: skip
        assert words in said.out, said.out
    for internal in ("root,", "cascade", "confirmation", "were it not for", "application"):
        assert internal not in said.out


def test_where_no_rule_knows_the_cause_the_last_lines_and_the_next_step_are_shown(
    command: Command, run: RunDirectory
) -> None:
    failing(run, code=3)
    lines = "step 1 loss 2.5\nbuffer of the frobnicator cannot be swapped\nit/s 3\nbye\n"
    build.write_log(run, "n2", labelled(1, lines) + b'1: save_failed error="No space left on device"\n')

    said = command("explain", run.path).out
    document = explained(command, run.path)

    assert document["cause"] == "exception"
    assert float(str(document["confidence"])) < 0.6
    assert [line["text"] for line in document["last_lines"]] == [  # type: ignore[attr-defined]
        "buffer of the frobnicator cannot be swapped"
    ]
    for words in ("(a guess, 30 %", "next       ", "to do      First confirm it.", "confirm    stepkeeper logs"):
        assert words in said, said


def test_a_log_without_any_error_shows_its_last_lines(command: Command, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"step {step}\n" for step in range(30)))

    document = explained(command, "--log", tmp_path / "log")

    assert document["cause"] == "unknown"
    assert [line["text"] for line in document["last_lines"]][-1] == "step 29"  # type: ignore[attr-defined]
    assert all("RUN" not in line for line in document["confirm"])  # type: ignore[attr-defined]


def test_a_rank_that_somebody_killed_is_a_guess_to_be_confirmed(command: Command, run: RunDirectory) -> None:
    """The order to kill the others has the very instant of its exit."""
    killed = on.RankExited(at=START + 9, launch=0, rank=1, node="n2", signal=9)
    build.write_journal(
        run,
        [
            build.record(on.LaunchBegan(at=START + 1, launch=0), attempt=0),
            build.record(killed, attempt=0, effects=(do.KillRanks(launch=0, reasons=in_words("rank 1 ended")),)),
            build.record(on.RankExited(at=START + 9.5, launch=0, rank=0, node="n1", signal=9), attempt=0),
            build.record(on.LaunchEnded(at=START + 10, launch=0, code=137), attempt=0, phase=Phase.STARTING),
        ],
    )

    said = command("explain", run.path).out
    document = explained(command, run.path)

    assert (document["cause"], document["rule"], document["rank"]) == ("host_memory", "exit-killed", 1)
    assert "a guess, 50 %" in said
    assert "confirm    on n2: dmesg -T" in said
    assert "to do      First confirm it." in said


def test_what_stepkeeper_does_next_goes_by_the_settings_of_the_run(command: Command, run: RunDirectory) -> None:
    failing(run)
    build.write_log(run, "n2", labelled(1, STACK))
    recorded = run.path / "attempts" / "attempt-000" / "config.json"
    recorded.parent.mkdir(parents=True)
    settings = {"policy.on_gpu_memory": {"value": "relaunch after 30 s, requeue, stop"}}
    recorded.write_text(json.dumps({"settings": settings}))

    following = explained(command, run.path)["next"]

    assert following == (
        "Stepkeeper starts the ranks again on the same nodes after 30 s; if it fails in the same way again, "
        "it requeues the job; later: stops, and runs notify_command"
    )


def test_a_launch_that_another_one_followed_names_it(command: Command, run: RunDirectory) -> None:
    failing(run, attempt=0, launch=0)
    failing(run, attempt=1, launch=2, at=START + 100)
    build.write_log(run, "n2", labelled(1, STACK), 0, 0)

    assert "launch 1.2 followed" in str(explained(command, run.path, "--attempt", 0)["next"])


@pytest.mark.parametrize("cause", Cause)
def test_every_cause_says_how_to_confirm_it_and_what_to_do(cause: Cause) -> None:
    meaning = rules.load().meanings[cause]

    assert meaning.happened
    assert meaning.todo
    assert meaning.confirm


def test_without_logs_the_exits_are_what_is_left(command: Command, run: RunDirectory) -> None:
    failing(run, code=None)

    document = explained(command, run.path)

    assert (document["cause"], document["rule"], document["rank"]) == ("host_memory", "exit-killed", 1)
    assert float(str(document["confidence"])) < 0.7


def test_a_fault_of_the_node_outweighs_what_its_ranks_say(command: Command, run: RunDirectory) -> None:
    fault = on.NodeFaulted(
        at=START + 8, node="n2", incident="i", name="XID 79", action="drain_reboot", leave=True, why="off the bus"
    )
    write(run, [on.LaunchBegan(at=START + 1, launch=0), fault])
    failing(run)
    build.write_log(run, "n2", b"1: RuntimeError: CUDA error: unspecified launch failure\n")

    assert explained(command, run.path)["cause"] == "node_fault"


def test_a_preemption_before_the_ranks_fell_is_the_reason(command: Command, run: RunDirectory) -> None:
    facts = on.JobFacts(state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0, preempt_at=START + 3)
    write(run, [on.LaunchBegan(at=START + 1, launch=0), on.SlurmAnswered(at=START + 4, job=facts)])
    failing(run)
    build.write_log(run, "n2", labelled(1, 'Traceback (most recent call last):\n  File "t.py", line 3\nOSError: x'))

    assert explained(command, run.path)["cause"] == "preempted"


def test_earlier_launches_are_named_by_attempt_and_launch(command: Command, run: RunDirectory) -> None:
    failing(run, attempt=0, launch=0)
    failing(run, attempt=1, launch=2, at=START + 100)
    build.write_log(run, "n2", labelled(1, STACK), 0, 0)
    build.write_log(run, "n2", b"1: OSError: [Errno 28] No space left on device\n", 1, 2)

    assert explained(command, run.path)["cause"] == "storage"
    assert explained(command, run.path, "--attempt", 0)["cause"] == "gpu_memory"
    assert explained(command, run.path, "--launch", 2)["attempt"] == 1
    said = command("explain", run.path, "--attempt", 7)
    assert (said.code, "0.0, 1.2" in said.err) == (40, True)


def test_a_finished_launch_is_no_failure(command: Command, run: RunDirectory) -> None:
    ended = on.LaunchEnded(at=START + 9, launch=0, code=0, finished=True)
    write(run, [on.LaunchBegan(at=START + 1, launch=0), ended])

    assert explained(command, run.path)["cause"] == "finished"


def test_a_launch_that_runs_has_not_failed(command: Command, run: RunDirectory) -> None:
    write(run, [on.LaunchBegan(at=START + 1, launch=0)])
    build.write_status(run, attempt=0, alive_at=time.time())

    said = command("explain", run.path)
    assert (said.code, said.out) == (40, "")
    assert "launch 0.0 runs, and nothing in it has failed: stepkeeper status" in said.err

    build.write_status(run, attempt=0, alive_at=time.time() - 3600)  # its supervisor is lost
    assert explained(command, run.path)["cause"] == "unknown"


def test_logs_are_judged_on_their_own(command: Command, tmp_path: Path) -> None:
    (tmp_path / "n1.log").write_text("0: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n")
    (tmp_path / "n2.log").write_bytes(labelled(1, STACK))
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": "ValueError: bad", "extraInfo": {}}}))

    together = explained(command, "--log", tmp_path / "n1.log", tmp_path / "n2.log")

    assert (together["cause"], together["node"]) == ("gpu_memory", "n2")
    assert explained(command, "--log", tmp_path / "n1.log")["cause"] == "collective_timeout"
    assert explained(command, "--log", tmp_path / "error.json")["cause"] == "exception"


def test_secrets_in_a_log_are_not_shown(command: Command, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("RuntimeError: login failed, api_key=abcdef123456\n")

    for options in ((), ("--json",)):
        assert "abcdef123456" not in command("explain", "--log", tmp_path / "log", *options).out


def test_wrong_use_is_said_in_one_line(command: Command, run: RunDirectory, tmp_path: Path) -> None:
    for argv, code in (
        ((), 2),
        ((run.path, "--log", "x"), 2),
        (("--log", tmp_path / "missing"), 40),
        (("--log", tmp_path), 40),
        ((run.path,), 40),
        (("999",), 40),
    ):
        said = command("explain", *argv)

        assert (said.code, said.err.count("\n")) == (code, 1), argv


def test_what_the_supervisor_saw_of_a_hang_is_explained(command: Command, run: RunDirectory) -> None:
    """Its ranks were ended by us: that they were killed says nothing."""
    found = Finding(
        cause=Cause.HANG,
        rule="progress-silence",
        reasons=in_words("stands still: rank 1 is in load"),
        rank=1,
        node="n2",
    )
    ended = on.LaunchEnded(at=START + 13, launch=0, code=137)
    records = [
        build.record(on.LaunchBegan(at=START + 1, launch=0), attempt=0),
        build.record(
            on.StacksCollected(at=START + 9, launch=0, moved=False, summary="rank 1 is in load"),
            attempt=0,
            effects=(do.KillRanks(launch=0, reasons=in_words("stands still")),),
        ),
        build.record(on.RankExited(at=START + 10, launch=0, rank=0, node="n1", signal=9), attempt=0),
        build.record(
            ended, attempt=0, launch=1, phase=Phase.STARTING, effects=(do.JudgeLaunch(launch=0, found=found),)
        ),
    ]
    build.write_journal(run, records)

    document = explained(command, run.path)

    assert (document["cause"], document["rule"], document["rank"]) == ("hang", "progress-silence", 1)
    assert [piece["rule"] for piece in document["evidence"]] == ["progress-silence"]  # type: ignore[attr-defined]


def stopping(event: on.Event, why: str, *answers: do.Effect) -> list[journal.Record]:
    """A launch that saves and leaves because of an event; its ranks do as they are asked."""
    save = do.RequestSave(stop=True, reasons=in_words(why), deadline_at=START + 900)
    saving = {"phase": Phase.SAVING, "attempt": 0}
    return [
        build.record(on.LaunchBegan(at=START + 1, launch=0), attempt=0),
        build.record(event, why=why, effects=(*answers, save), **saving),
        build.record(on.RankExited(at=START + 12, launch=0, rank=0, node="n1", code=75), **saving),
        build.record(
            on.LaunchEnded(at=START + 13, launch=0, code=75, stopped=True), phase=Phase.CLOSING, attempt=0, why=why
        ),
    ]


def over(code: int, reason: str) -> journal.Record:
    end = on.BusEnded(at=START + 14, bus=1, code=0)
    return build.record(
        end, phase=Phase.DONE, attempt=0, why=reason, effects=(do.Exit(code=code, reasons=in_words(reason)),)
    )


def test_a_run_that_somebody_had_stopped_names_him_and_when(command: Command, run: RunDirectory) -> None:
    why = "ada asks to save and end"
    ask = on.Requested(at=START + 9, name="stop-1", kind="stop", by="ada")
    build.write_journal(
        run, [*stopping(ask, why, do.AnswerRequest(name="stop-1", reasons=in_words(why))), over(27, why)]
    )

    said = command("explain", run.path).out
    document = explained(command, run.path)

    assert (document["cause"], document["rule"], document["confidence"]) == ("stopped", "asked-to-stop", 0.979)
    assert f"ada asked to save and end (stepkeeper stop), {instant(START + 9)}" in said
    assert f"ended {instant(START + 14)} with 27: {why}" in said
    assert "who cancelled it" not in said
    assert f"to resume from its newest checkpoint: stepkeeper resume {run.path}" in said
    assert "rule" not in next(line for line in said.splitlines() if line.startswith("cause"))
    assert document["end"] == {"at": START + 14, "code": 27, "reason": why}


def test_an_ask_that_was_refused_is_no_reason(command: Command, run: RunDirectory) -> None:
    ask = on.Requested(at=START + 5, name="stop-1", kind="stop", by="ada")
    refused = do.AnswerRequest(name="stop-1", reasons=in_words("refused: no rank"), ok=False)
    build.write_journal(run, [build.record(ask, phase=Phase.SAVING, attempt=0, why="refused", effects=(refused,))])
    failing(run)
    build.write_log(run, "n2", labelled(1, STACK))

    document = explained(command, run.path)

    assert document["cause"] == "gpu_memory"
    assert "asked-to-stop" not in str(document["evidence"])


def test_a_rank_that_fails_in_the_save_that_somebody_asked_for_is_the_cause(
    command: Command, run: RunDirectory
) -> None:
    why = "ada asks to save and end"
    ask = on.Requested(at=START + 5, name="stop-1", kind="stop", by="ada")
    build.write_journal(run, stopping(ask, why, do.AnswerRequest(name="stop-1", reasons=in_words(why)))[:2])
    failing(run)
    build.write_log(run, "n2", labelled(1, STACK))

    document = explained(command, run.path)

    assert document["cause"] == "gpu_memory"
    assert "ada asked to save and end" in str(document["evidence"])


@pytest.mark.parametrize("ahead_of_limit", [True, False])
def test_what_the_supervisor_leaves_for_is_not_called_cancelled(
    command: Command, run: RunDirectory, *, ahead_of_limit: bool
) -> None:
    """Slurm sends no signal ahead of a time limit, and none for what the supervisor decides by itself."""
    event: on.Event
    if ahead_of_limit:
        facts = on.JobFacts(state=on.JobState.RUNNING, slurm_state="RUNNING", restarts=0)
        event, why = on.SlurmAnswered(at=START + 9, job=facts), "time limit (Slurm says RUNNING)"
        expected = ("time_limit", "limit-notice")
    else:
        event, why = build.story(run)[-1].event, "2 nodes are missing: the job is requeued to get them"
        expected = ("stopped", "left-on-purpose")
    build.write_journal(run, [*stopping(event, why), over(10, why)])

    document = explained(command, run.path)

    assert (document["cause"], document["rule"]) == expected
    assert why in str(document["evidence"])
    assert "the run    ended" not in command("explain", run.path).out, "it goes on"


def test_of_a_chain_of_jobs_the_one_that_is_named_is_explained(command: Command, tmp_path: Path) -> None:
    run = build.make_run(tmp_path / "runs" / "chain")
    failing(run)
    build.write_log(run, "n2", labelled(1, STACK))
    later = [
        msgspec.structs.replace(build.record(event, attempt=1, launch=0), job_id=15)
        for event in (
            on.LaunchBegan(at=START + 101, launch=0),
            on.RankExited(at=START + 109, launch=0, rank=1, node="n2", code=1),
            on.LaunchEnded(at=START + 113, launch=0, code=1),
        )
    ]
    build.write_journal(run, later)
    build.write_log(run, "n2", b"1: OSError: [Errno 28] No space left on device\n", 1, 0)
    build.write_status(run, job_id=15)

    assert explained(command, 15)["cause"] == "storage"
    assert explained(command, 12)["cause"] == "gpu_memory"
    assert explained(command, run.path)["cause"] == "storage"


@pytest.mark.parametrize("as_json", [False, True])
def test_the_supervisors_own_lines_in_a_jobs_log_are_no_evidence(
    command: Command, tmp_path: Path, *, as_json: bool
) -> None:
    """They quote what failed in an earlier launch, and name signals and exit codes that were our own doing."""
    event = {"event": "decision", "level": "info", "why": "rank 1 on n2: CUDA out of memory. Tried to allocate 2 GiB"}
    stamped = {"timestamp": "2026-09-21T10:00:00.000000Z", "level": "info", **event}
    own = json.dumps(stamped) if as_json else as_text(event, START)
    log = tmp_path / "job.log"
    log.write_text(
        f"{own}\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-09-21T10:00:01 DUE TO TIME LIMIT ***\n"
    )

    document = explained(command, "--log", log)

    assert document["cause"] == "time_limit"
    log.write_text(f"{own}\n")
    assert explained(command, "--log", log)["rule"] == "no-evidence"
