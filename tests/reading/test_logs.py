from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest

from stepkeeper.commands import logs_follow
from stepkeeper.core import events as on
from stepkeeper.store import logs
from stepkeeper.store.rundir import RunDirectory
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


def test_of_a_failed_launch_the_rank_that_failed_first_is_shown(command: Command, run: RunDirectory) -> None:
    build.write_log(run, "n1", b"0: fine\n1: Traceback\n", attempt=0, launch=1)
    build.write_log(run, "n1", b"0: goes on\n", attempt=0, launch=2)
    assert command("logs", run.path, "--failed").code == 40, "none is marked"
    logs.mark_failed(run.path / "logs" / "attempt-000" / "launch-001", "rank 1 on n1 ended with exit code 1")
    exited = on.RankExited(at=build.START, launch=1, rank=1, node="n1", code=1, signal=None)
    build.write_journal(run, [build.record(exited, attempt=0)])

    said = command("logs", run.path, "--failed")

    assert said.out == "1: Traceback\n"
    assert "attempt-000, launch-001 failed: rank 1 on n1 ended with exit code 1" in said.err
    assert command("logs", run.path, "--failed", "--rank", 0).out == "0: fine\n"
    assert command("logs", run.path, "--failed", "--follow").code == 2


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
    monkeypatch.setattr(logs_follow, "time", SimpleNamespace(sleep=lambda _seconds: next(between_looks)()))
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
