from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.run_store import lines
from stepkeeper.run_store.paths import RunDirectory
from tests.reading import build
from tests.reading.conftest import Command


def test_the_journal_reads_as_a_timeline(command: Command, run: RunDirectory) -> None:
    build.write_journal(run, build.story(run))

    said = command("events", run.path)

    assert (said.code, said.err) == (0, "")
    for words in (
        "0.0    starting    attempt_started",
        "why: got SIGTERM",
        "-> ask_slurm reasons='got SIGTERM'",
        "-> exit code=10 reasons=preempted",
        "1.0    training    checkpoint_committed",
        "skipped=(directory=step_00000300 problem=torn ",
        "loss=2.25",
    ):
        assert words in said.out


def test_what_is_empty_or_bulk_is_in_the_json_only(command: Command, run: RunDirectory) -> None:
    fields = {"job_id": 12, "restart_count": 0, "attempt": 0, "nodes": ("n1",), "batch_node": "n1", "kill_wait_s": 0.0}
    losses = tuple((step, 19.0) for step in range(200))
    started = on.AttemptStarted(at=build.START, losses=losses, end_at=build.START, **fields)  # type: ignore[arg-type]
    launch = do.StartLaunch(launch=0, resume_from=None, address="n1", port=1, nodes=())
    build.write_journal(run, [build.record(started, effects=(do.StartBus(bus=1), launch))])

    said = command("events", run.path)

    assert "nodes=n1 batch_node=n1" in said.out
    assert "kill_wait_s=0 " in said.out, "a zero says something"
    assert "end_at=2026-" in said.out
    for hidden in (" losses=", "baseline=", "previous=", "tried=", "=none", "..."):
        assert hidden not in said.out
    assert json.loads(command("events", run.path, "--json").out)["event"]["losses"][199] == [199, 19.0]


def test_json_gives_the_records_as_they_stand(command: Command, run: RunDirectory) -> None:
    build.write_journal(run, build.story(run))

    said = command("events", run.path, "--json")

    written = run.journal.read_text().splitlines()
    assert [json.loads(line) for line in said.out.splitlines()] == [json.loads(line) for line in written]


def test_json_keeps_what_a_newer_version_added(command: Command, run: RunDirectory) -> None:
    build.write_journal(run, build.story(run))
    newer = json.loads(run.journal.read_text().splitlines()[-1]) | {"added": [1, {"x": "é\u009b"}]}
    run.journal.write_text(json.dumps(newer, ensure_ascii=False) + "\n")

    said = command("events", run.path, "--json")

    assert json.loads(said.out) == newer
    assert said.out.isascii()


def test_torn_lines_are_counted_and_passed_over(command: Command, run: RunDirectory) -> None:
    build.write_journal(run, build.story(run))
    data = run.journal.read_bytes()
    run.journal.write_bytes(b"\0\0\0\n" + data + b'{"v":1,"tor')

    said = command("events", run.path, "--json")

    assert len(said.out.splitlines()) == 6
    assert said.err.startswith("2 lines passed over")


def test_last_shows_the_newest(command: Command, run: RunDirectory) -> None:
    build.write_journal(run, build.story(run))

    names = [
        json.loads(line)["event"]["event"]
        for line in command("events", run.path, "--json", "--last", 2).out.splitlines()
    ]

    assert names == ["progressed", "checkpoint_committed"]
    assert len(command("events", run.path, "--json", "--last", 1000).out.splitlines()) == 6
    assert command("events", run.path, "--last", 0).code == 2
    assert command("events", run.path, "--last", "x").code == 2


def test_escape_sequences_do_not_reach_the_terminal(command: Command, run: RunDirectory) -> None:
    evil = "\x1b[2J\x1b]52;c;b3duZWQ=\x07\nfake line\u2028\u009b"
    event = on.LaunchEnded(at=build.START, launch=0, code=1, error=evil)
    build.write_journal(run, [build.record(event, why=evil)])

    said = command("events", run.path)

    assert not set(said.out) & set("\x1b\x07\u2028\u009b")
    assert len(said.out.splitlines()) == 2
    assert command("events", run.path, "--json").out.isascii()


def test_an_instant_that_is_none_is_shown(command: Command, run: RunDirectory) -> None:
    build.write_journal(run, [build.record(on.Tick(at=1e300))])

    assert "1e+300" in command("events", run.path).out


def test_a_journal_that_is_not_there(command: Command, run: RunDirectory) -> None:
    said = command("events", run.path)

    assert (said.code, said.out) == (40, "")


def test_a_big_journal_is_streamed(run: RunDirectory) -> None:
    """Also: a reader that leaves early is no error, and `--last` does not read it all."""
    line = lines.encode(build.story(run)[-1]) + b"\n"
    with run.journal.open("wb") as file:
        for _ in range(100):
            file.write(line * (1_000_000 // len(line)))
    program = (
        "import sys; from stepkeeper.cli.main import main; "
        "code = main(sys.argv[1:]); sys.stdout.flush(); "
        # not getrusage: its maximum is that of the process which started this one, too
        "status = open('/proc/self/status').read(); "
        "read = open('/proc/self/io').read().split('rchar:')[1].split()[0]; "
        "print(status.split('VmHWM:')[1].split()[0], read, file=sys.stderr); sys.exit(code)"
    )

    done = subprocess.run(
        [sys.executable, "-c", program, "events", str(run.path), "--last", "3", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    kib, bytes_read = map(int, done.stderr.split())
    assert len(done.stdout.splitlines()) == 3
    assert kib < 80_000
    assert bytes_read < 50_000_000, "half of the journal; its modules come to a few"

    head = subprocess.run(
        [
            "bash",
            "-o",
            "pipefail",
            "-c",
            '"$0" -m stepkeeper events "$1" | head -n 2',
            sys.executable,
            str(run.path),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (head.returncode, head.stderr) == (0, "")
    assert len(head.stdout.splitlines()) == 2


def test_an_output_that_is_full_is_said_in_one_line(run: RunDirectory) -> None:
    build.write_journal(run, build.story(run))
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stepkeeper", "events", str(run.path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )

    assert done.returncode == 32
    assert done.stderr == "stepkeeper: output: No space left on device\n"


@pytest.mark.parametrize("locale", ["C", "POSIX", "en_US.ISO-8859-1"])
def test_every_locale_prints_every_name(run: RunDirectory, locale: str) -> None:
    build.write_journal(run, [build.record(on.Tick(at=build.START), why="größer als 日本")])

    done = subprocess.run(
        [sys.executable, "-m", "stepkeeper", "events", str(run.path)],
        capture_output=True,
        check=False,
        timeout=60,
        env={"LC_ALL": locale, "PYTHONIOENCODING": "ascii", "PATH": "/usr/bin:/bin"},
    )

    assert (done.returncode, done.stderr) == (0, b"")
