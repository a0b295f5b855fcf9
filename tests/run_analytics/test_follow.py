from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from stepkeeper.run_analytics import follow
from stepkeeper.run_analytics.timeline import Timeline
from stepkeeper.run_store.paths import RunDirectory
from tests.reading import build
from tests.reading.conftest import Command, command, run

__all__ = ["command", "run"]  # fixtures of the reading commands

WITHIN_S = 90.0


def _of_a_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is ignored where the tests run in the background of a shell


class Terminal:
    """`stepkeeper status --follow` in a terminal of 80 columns."""

    def __init__(self, directory: Path) -> None:
        self.here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        argv = [sys.executable, "-m", "stepkeeper", "status", "--follow", str(directory)]
        self.process = subprocess.Popen(
            argv, stdin=there, stdout=there, stderr=there, env=environment, start_new_session=True,
            preexec_fn=_of_a_terminal,  # noqa: PLW1509 - so that Ctrl-C reaches it
        )  # fmt: skip
        os.close(there)
        self.seen = ""

    def until(self, words: str) -> None:
        limit = time.monotonic() + WITHIN_S
        while words not in self.seen:
            assert time.monotonic() < limit, self.seen
            self.read(0.2)

    def read(self, wait_s: float) -> bool:
        ready, _, _ = select.select([self.here], [], [], wait_s)
        if not ready:
            return True
        try:
            data = os.read(self.here, 65536)
        except OSError:  # the other end is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

    def end(self) -> int:
        code = self.process.wait(WITHIN_S)
        while self.read(0.1) and select.select([self.here], [], [], 0)[0]:
            pass
        os.close(self.here)
        return code


def test_a_terminal_is_drawn_on_and_given_back(run: RunDirectory) -> None:
    build.write_journal(run, build.story(run))
    build.write_status(run)
    terminal = Terminal(run.path)
    terminal.until("250, loss 2.125")

    build.write_status(run, step=251, loss=1.75)
    terminal.until("251, loss 1.75")
    os.write(terminal.here, b"\x03")

    assert terminal.end() == 0
    assert follow.LEAVE in terminal.seen
    assert terminal.seen.index(follow.ENTER) < terminal.seen.rindex(follow.LEAVE)
    assert "Traceback" not in terminal.seen


def test_what_is_quick_to_know_stands_there_before_the_accounts_of_a_long_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build.write_journal(run, build.story(run))
    build.write_status(run)
    drawn: list[str] = []
    see = follow.reading.Reader.see

    def slowly(reader: follow.reading.Reader) -> Timeline:
        drawn.append(capsys.readouterr().out)
        build.write_status(run, phase="done", exit_code=0)
        return see(reader)

    monkeypatch.setattr(follow.reading.Reader, "see", slowly)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80"), ("LINES", "24")):
        monkeypatch.setenv(name, value)

    follow.follow(run, sleep=lambda _: None)
    assert "250, loss 2.125" in drawn[0]
    assert "ETTR" not in drawn[0]
    assert "ETTR" in capsys.readouterr().out.rpartition(follow.LEAVE)[2], "the last screen has them"


def test_a_signal_gives_the_terminal_back_too(run: RunDirectory) -> None:
    build.write_status(run)
    terminal = Terminal(run.path)
    terminal.until("training")

    terminal.process.send_signal(signal.SIGTERM)

    assert terminal.end() == 0
    assert follow.LEAVE in terminal.seen


def test_it_ends_with_the_run_and_leaves_the_last_screen(run: RunDirectory) -> None:
    build.write_status(run)
    terminal = Terminal(run.path)
    terminal.until("training")

    build.write_status(run, phase="done", exit_code=0, why="the training is finished")

    terminal.until("ended: the training is finished")
    assert terminal.end() == 0
    assert "the training is finished" in terminal.seen.rpartition(follow.LEAVE)[2]


def test_without_a_terminal_each_decision_is_one_line(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    records = build.story(run)
    build.write_status(run)
    build.write_journal(run, records[:4])
    later = iter(
        (
            lambda: build.write_journal(run, records[4:5]),
            lambda: build.write_status(run, phase="done", exit_code=0, step=300),
        )
    )

    follow.follow(run, sleep=lambda _: next(later)())

    said = capsys.readouterr().out.splitlines()
    assert "\x1b" not in "".join(said)
    assert [line for line in said if "got SIGTERM" in line] == [said[1]]
    assert sum("preempted" in line for line in said) == 1
    assert any("step 250 loss 2.125" in line for line in said)


def test_all_runs_are_one_line_each(command: Command, tmp_path: Path) -> None:
    for name, changes in {"a-1": {"job_id": 1}, "b-2": {"job_id": 2, "phase": "done", "exit_code": 0}}.items():
        build.write_status(build.make_run(tmp_path / "runs" / name), updated_at=time.time(), **changes)
    (build.make_run(tmp_path / "runs" / "c-3").path / "status.json").write_text("{")
    build.make_run(tmp_path / "runs" / "d-4")

    said = command("status")
    documents = json.loads(command("status", "--all", "--json").out)

    assert said.code == 0, said.err
    lines = {line.split()[0]: line for line in said.out.splitlines()}
    assert "training" in lines["runs/a-1"]
    assert "finished" in lines["runs/b-2"]
    assert "its status cannot be read" in lines["runs/c-3"]
    assert "no supervisor yet" in lines["runs/d-4"]
    assert {each.get("job_id") for each in documents} == {1, 2, None}


def test_the_only_run_and_the_run_here_are_shown_whole(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = build.make_run(tmp_path / "runs" / "a-1")
    build.write_status(only)
    assert "last decision" in command("status").out
    build.write_status(build.make_run(tmp_path / "runs" / "b-2"))
    assert "last decision" not in command("status").out
    assert "runs/a-1" in command("status", "--all").out

    monkeypatch.chdir(only.path)
    assert "last decision" in command("status").out


def test_following_is_for_one_run_and_people(command: Command, run: RunDirectory) -> None:
    for options in (("--json",), ("--all",)):
        assert command("status", "--follow", *options).code == 2
    assert command("status", run.path, "--all").code == 2
