from __future__ import annotations

import json
import os

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
