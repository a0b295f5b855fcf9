from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from stepkeeper.cli import logs as cli_logs
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.run_store import paths
from stepkeeper.run_store.paths import RunDirectory
from tests.reading import build
from tests.reading.conftest import Command


def rows(out: str) -> list[tuple[str, int | None, str]]:
    return [(row["node"], row["rank"], row["line"]) for row in map(json.loads, out.splitlines())]


def test_the_newest_launch_is_shown_node_by_node(command: Command, run: RunDirectory) -> None:
    build.write_log(run, "n1", b"0: old\n", attempt=0, launch=5)
    build.write_log(run, "n2", b"1: hello from 1\n", attempt=1, launch=2)
    build.write_log(run, "n1", b"0: hello from 0\nwithout a label\n", attempt=1, launch=2)
    build.write_log(run, "srun", b"srun: error: node failure\n", attempt=1, launch=2)

    said = command("logs", run.path)

    assert said.out.splitlines() == [
        "n1 0: hello from 0",
        "n1 without a label",
        "n2 1: hello from 1",
        "srun srun: error: node failure",
    ]
    assert rows(command("logs", run.path, "--json").out)[0] == ("n1", 0, "hello from 0")


def test_attempts_and_launches_beyond_three_digits_are_newer(command: Command, run: RunDirectory) -> None:
    for attempt, launch in ((999, 0), (1000, 9), (1000, 10)):
        build.write_log(run, "n1", f"0: {attempt}.{launch}\n".encode(), attempt, launch)

    assert command("logs", run.path).out == "0: 1000.10\n"
    assert command("logs", run.path, "--launch", 0).out == "0: 999.0\n"
    assert command("logs", run.path, "--attempt", 1000, "--launch", 9).out == "0: 1000.9\n"


def test_node_rank_and_tail_choose(command: Command, run: RunDirectory) -> None:
    build.write_log(run, "n1", b"".join(b" %d: line %d\n" % (i % 2, i) for i in range(10)))
    build.write_log(run, "n2", b"2: a\n3: b\n2: c")

    assert rows(command("logs", run.path, "--json", "--rank", 1, "--tail", 2).out) == [
        ("n1", 1, "line 7"),
        ("n1", 1, "line 9"),
    ]
    assert rows(command("logs", run.path, "--json", "--node", "n2", "--tail", 2).out) == [
        ("n2", 3, "b"),
        ("n2", 2, "c"),
    ]
    assert command("logs", run.path, "--node", "n2").out == "2: a\n3: b\n2: c\n"


def test_what_is_not_there_is_said_with_what_is(command: Command, run: RunDirectory) -> None:
    said = command("logs", run.path)
    assert (said.code, said.out) == (40, "")
    assert "no launch has written logs yet" in said.err

    build.write_log(run, "n1", b"0: x\n", 2, 1)
    for argv, words in (
        (("--attempt", 7), "those of 2.1"),
        (("--launch", 0), "those of 2.1"),
        (("--node", "n9"), "there are n1"),
        (("--node", "../../../secret"), "there are n1"),
        (("--rank", 5), "no line of rank 5"),
    ):
        said = command("logs", run.path, *argv)
        assert said.code == 40
        assert words in said.err
        assert said.err.count("\n") == 1
    assert command("logs", run.path, "--tail", 0).code == 2


def test_escape_sequences_do_not_reach_the_terminal(command: Command, run: RunDirectory) -> None:
    build.write_log(run, "n1", b"0: \x1b[31mred\x1b[0m \x1b]0;t\x07\xff\xc2\x9b\x00\n")

    said = command("logs", run.path)
    assert said.code == 0
    assert not set(said.out) & set("\x1b\x07\x00\u009b")

    as_json = command("logs", run.path, "--json").out
    assert as_json.isascii()
    assert json.loads(as_json)["line"].startswith("\x1b[31mred")  # a program gets what was printed


def test_a_progress_bar_shows_its_last_state(command: Command, run: RunDirectory) -> None:
    build.write_log(run, "n1", b"0: 1%\r 50%\r100%\r\n")

    assert command("logs", run.path).out == "0: 100%\n"


def test_a_line_without_end_takes_no_memory(command: Command, run: RunDirectory) -> None:
    path = build.write_log(run, "n1", b"0: start")
    os.truncate(path, 300_000_000)

    assert len(command("logs", run.path, "--json").out) < 10_000_000
    assert len(command("logs", run.path, "--json", "--tail", 1).out) < 10_000_000


def test_links_are_not_followed(command: Command, run: RunDirectory) -> None:
    path = build.write_log(run, "n1", b"")
    path.unlink()
    path.symlink_to("/etc/passwd")

    said = command("logs", run.path)

    assert said.code == 32
    assert "root:" not in said.out


FAILS = b"""1: Traceback (most recent call last):
1:   File "train.py", line 61, in main
1: ValueError: a label lies beyond the vocabulary
1: 2026-09-21 10:00:00 stepkeeper_trainer save_failed step=20 error="its rank is gone"
1: stepkeeper: no warm standby for this rank: it has ended; it starts without one
slurmstepd: error: *** STEP 7.2 ON n1 CANCELLED AT 2026-09-21T10:00:00 ***
"""
SRUN_SAYS = b"""srun: warning: can't honor --ntasks-per-node set to 1
srun: error: n1: task 1: Exited with exit code 1
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
srun: cluster configuration lacks support for cpu binding
srun: error: n2: task 2: Killed
"""


def fails(run: RunDirectory, *events: on.Event) -> None:
    """A launch that ends as ours do: srun's last words are a warning, and that we killed the others."""
    build.write_log(run, "n1", b"0: fine\n" + FAILS, attempt=0, launch=1)
    build.write_log(run, "n2", b"2: fine too\n", attempt=0, launch=1)
    build.write_log(run, "srun", SRUN_SAYS, attempt=0, launch=1)
    build.write_log(run, "n1", b"0: goes on\n", attempt=0, launch=2)
    paths.mark_failed(run.path / "logs" / "attempt-000" / "launch-001", "srun ended with -9; srun: error: n2: Killed")
    told = [on.LaunchBegan(at=build.START, launch=1), *events]
    build.write_journal(run, [build.record(event, attempt=0, launch=1) for event in told])


def exited(rank: int, node: str, after: float, **how: int | None) -> on.RankExited:
    return on.RankExited(at=build.START + after, launch=1, rank=rank, node=node, **how)


def test_of_a_failed_launch_the_rank_that_failed_first_is_shown(command: Command, run: RunDirectory) -> None:
    """Neither our own kill nor a warning of srun's is the reason, nor do they stand among its last words."""
    build.write_log(run, "n1", b"0: fine\n", attempt=0, launch=1)
    assert command("logs", run.path, "--failed").code == 40, "none is marked"
    fails(run, exited(1, "n1", 5, code=1), exited(0, "n1", 6, signal=9), exited(2, "n2", 6, signal=9))

    said = command("logs", run.path, "--failed")

    assert said.out.splitlines() == [
        "1: Traceback (most recent call last):",
        '1:   File "train.py", line 61, in main',
        "1: ValueError: a label lies beyond the vocabulary",
    ]
    assert said.err == "attempt 0, launch 1: rank 1 on n1 failed first (exit code 1: an error of the program)\n"
    assert command("logs", run.path, "--failed", "--tail", 1).out.endswith("vocabulary\n")
    document = json.loads(command("logs", run.path, "--failed", "--json").out.splitlines()[-1])
    assert [document[key] for key in ("attempt", "launch", "node", "rank")] == [0, 1, "n1", 1]
    assert command("logs", run.path, "--failed", "--rank", 0).out == "0: fine\n"
    assert "no line of rank 7" in command("logs", run.path, "--failed", "--rank", 7).err
    assert command("logs", run.path, "--failed", "--follow").code == 2


def test_the_verdict_says_who_failed_first_where_a_follower_ended_first(command: Command, run: RunDirectory) -> None:
    """A rank that lost its peer may be gone before the interpreter of the one that raised has ended."""
    said = {"cause": Cause.EXCEPTION, "rule": "python-exception", "confidence": 0.8, "text": "ValueError: a label"}
    judged = on.Judged(
        at=build.START + 9, launch=1, rank=1, node="n1", location="ValueError at train.py:61 in main", **said
    )
    fails(run, exited(2, "n2", 5, code=1), exited(1, "n1", 6, code=1), judged)

    said = command("logs", run.path, "--failed")

    assert said.out.endswith("1: ValueError: a label lies beyond the vocabulary\n")
    assert "rank 1 on n1 failed first (exception: ValueError at train.py:61 in main; exit code 1" in said.err


def test_where_no_rank_failed_by_itself_the_last_words_of_every_node_are_shown(
    command: Command, run: RunDirectory
) -> None:
    """A loss that went wrong, a training that stood still: we ended the ranks."""
    wrong = "the loss is no finite number since step 21"
    judged = on.Judged(
        at=build.START, launch=1, cause=Cause.NUMERICAL, rule="loss-not-finite", confidence=0.9, text=wrong
    )
    fails(run, judged)

    said = command("logs", run.path, "--failed", "--tail", 2)

    assert said.out.splitlines() == [
        'n1 1:   File "train.py", line 61, in main',
        "n1 1: ValueError: a label lies beyond the vocabulary",
        "n2 2: fine too",
    ]
    assert said.err == f"attempt 0, launch 1: no rank is known to have failed first (numerical: {wrong})\n"


def test_a_launchers_ranks_share_one_label_and_their_node_is_shown(command: Command, run: RunDirectory) -> None:
    """torchrun's rank 11 prints as task 1; what Slurm says of the memory of its node stands there too."""
    build.write_log(run, "n1", b"0: [default3]:fine\n", attempt=0, launch=1)
    killed = b"slurmstepd: error: Detected 1 oom_kill event in StepId=7.2. Some of the step tasks have been killed.\n"
    build.write_log(run, "n2", b"1: [default3]:RuntimeError: no\n" + killed, attempt=0, launch=1)
    paths.mark_failed(run.path / "logs" / "attempt-000" / "launch-001", "srun ended with 1")
    said = {"cause": Cause.EXCEPTION, "rule": "python-exception", "confidence": 0.8, "text": "RuntimeError: no"}
    told = [on.LaunchBegan(at=build.START, launch=1), on.Judged(at=build.START, launch=1, rank=11, node="n2", **said)]
    build.write_journal(run, [build.record(event, attempt=0, launch=1) for event in told])

    assert command("logs", run.path, "--failed").out == "1: [default3]:RuntimeError: no\n" + killed.decode()


def test_where_slurm_started_nothing_its_own_words_are_the_reason(command: Command, run: RunDirectory) -> None:
    refused = b"srun: error: Unable to create step for job 7: Invalid generic resource (gres) specification\n"
    build.write_log(run, "srun", b"srun: warning: x\n" + refused, attempt=0, launch=0)
    paths.mark_failed(run.path / "logs" / "attempt-000" / "launch-000", "srun ended with 1")

    assert command("logs", run.path, "--failed").out == refused.decode()


def test_only_the_last_lines_of_a_failed_rank_are_shown(command: Command, run: RunDirectory) -> None:
    """It may have printed for a week."""
    build.write_log(run, "n1", b"".join(b"1: line %d\n" % i for i in range(1000)), attempt=0, launch=1)
    paths.mark_failed(run.path / "logs" / "attempt-000" / "launch-001", "srun ended with 1")
    build.write_journal(run, [build.record(exited(1, "n1", 5, code=1), attempt=0, launch=1)])

    said = command("logs", run.path, "--failed")

    assert said.out.splitlines()[0] == "1: line 950"
    assert "the last 50 lines" in said.err
    assert len(command("logs", run.path, "--failed", "--tail", 700).out.splitlines()) == 700


def test_lines_are_followed_over_a_relaunch_until_the_run_ends(
    command: Command, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.write_status(run, phase="training", exit_code=None)
    build.write_log(run, "n1", b"".join(b"0: old line %d\n" % i for i in range(1000)), attempt=0, launch=0)

    def wrote(data: bytes) -> None:
        with (run.path / "logs" / "attempt-000" / "launch-000" / "n1.log").open("ab") as log:
            log.write(data)

    def relaunched() -> None:
        wrote(b"line\n")
        build.write_log(run, "n1", b"0: relaunched\n", attempt=0, launch=1)

    between_looks = iter(
        (lambda: wrote(b"0: half a "), relaunched, lambda: build.write_status(run, phase="done", exit_code=0))
    )
    monkeypatch.setattr(cli_logs, "time", SimpleNamespace(sleep=lambda _seconds: next(between_looks)()))
    said = command("logs", run.path, "--follow")

    told = said.out.splitlines()
    assert told[0] == "--- attempt 0, launch 0"
    assert 0 < told.count("0: old line 999") < 2
    assert "0: old line 1" not in told, "only the last lines of what was there"
    assert told[-3:] == ["0: half a line", "--- attempt 0, launch 1", "0: relaunched"]


def test_in_a_run_directory_it_need_not_be_named(
    command: Command, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.write_log(run, "n1", b"0: fine\n")
    build.write_journal(run, [build.record(on.LaunchBegan(at=build.START, launch=0))])
    monkeypatch.chdir(run.path)

    assert command("logs").out == "0: fine\n"
    assert "launch" in command("events").out
