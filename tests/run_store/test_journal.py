"""The journal: what survives, what is skipped, and what an attempt takes over."""

from __future__ import annotations

import io
import os
import threading
import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase
from stepkeeper.run_store import journal, lines
from tests.reasons import in_words

WITHIN_S = 60.0


def record(*, at: float = 1000.0, job: int = 7, restarts: int = 0, attempt: int = 0, **more: object) -> journal.Record:
    event = on.Progressed(at=at, launch=0, step=int(at), tokens=1, loss=0.5)
    fields = {"event": event, "phase": Phase.TRAINING, "launch": 0, **more}
    return journal.Record(v=journal.VERSION, job_id=job, restart_count=restarts, attempt=attempt, **fields)  # type: ignore[arg-type]


def write(path: Path, *records: journal.Record) -> None:
    writer = journal.JournalWriter(path)
    for each in records:
        writer.append(each)
    assert writer.flush(WITHIN_S)


@pytest.fixture(autouse=True)
def spool_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path_factory.mktemp("node")))


def test_records_read_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = record(
        effects=(do.AskSlurm(reasons=in_words("x")), do.Requeue(), do.Exit(code=10, reasons=in_words("r"))),
        why="because",
        reasons=in_words("because"),
    )
    records = [first, *(record(at=float(i)) for i in range(1000))]

    write(path, *records)

    assert list(journal.read(path)) == records
    assert [line.record for line in journal.read_lines(path, newest_first=True)] == records[::-1]


def test_a_missing_journal_has_no_records_and_starts_attempt_0(tmp_path: Path) -> None:
    assert list(journal.read(tmp_path / "none")) == []
    assert journal.reconstruct(tmp_path / "none") == journal.Carried(attempt=0)


@pytest.mark.parametrize(
    "torn",
    [
        b'{"v":1,"job_id":7,"att',
        b"\0" * 5000,
        b'{"v":2,"something":"else"}\n',
        b"\xff\xfe\n\n\n",
        b'{"x":' + b"[" * 100_000 + b"\n",
        b"x" * (3 * lines.LINE_BYTES_MAX),
    ],
)
def test_torn_lines_are_skipped_and_the_next_writer_goes_on(tmp_path: Path, torn: bytes) -> None:
    """A crash, or a newer version, hides only its own line."""
    path = tmp_path / "journal.jsonl"
    write(path, record(at=1.0, failures=2))
    with path.open("ab") as file:
        file.write(torn)

    assert journal.reconstruct(path).failures == 2
    write(path, record(at=2.0, failures=3), record(at=3.0, failures=4))

    assert [each.event.at for each in journal.read(path)] == [1.0, 2.0, 3.0]
    assert journal.reconstruct(path).failures == 4


def test_what_is_carried_over_from_an_attempt_that_said_how_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, record(attempt=3, phase=Phase.DONE, why="requeued", failures=1, node_losses=2, best_step=500))

    assert journal.reconstruct(path) == journal.Carried(
        attempt=4, failures=1, node_losses=2, best_step=500, previous="attempt 3 ended: requeued", ended=True, at=1000.0
    )


def test_what_is_carried_over_from_an_attempt_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, record(at=1000.0, attempt=0, phase=Phase.SAVING, best_step=5))

    carried = journal.reconstruct(path, now=1030.0)

    assert (carried.attempt, carried.best_step) == (1, 5)
    assert "without a final record while saving, 30 s ago" in carried.previous
    assert "0 s ago" in journal.reconstruct(path, now=900.0).previous  # clocks of two nodes differ


def test_the_last_word_of_a_superseded_attempt_hides_nothing(tmp_path: Path) -> None:
    """slurmd comes back with the old supervisor alive: it says "superseded" after the newer one's start."""
    path = tmp_path / "journal.jsonl"
    write(
        path,
        record(restarts=0, attempt=0, failures=0),
        record(restarts=1, attempt=1, failures=2, best_step=300),
        record(restarts=0, attempt=0, phase=Phase.DONE, why="superseded", failures=0),
    )

    carried = journal.reconstruct(path)

    assert (carried.attempt, carried.failures, carried.best_step) == (2, 2, 300)
    assert "attempt 1 ended without a final record" in carried.previous


NODES = tuple(f"gpu-rack{rack:02d}-node{number:02d}" for rack in range(50) for number in range(40))
WEEK_S, MOST_BYTES_A_WEEK = 7 * 86_400, 100_000_000


def test_a_week_of_2000_nodes_stays_far_below_100_mb(tmp_path: Path) -> None:
    """Their names stand where they change, and often enough that a reader from the end finds them."""
    path = tmp_path / "journal.jsonl"
    words = 1000
    write(path, *(record(at=float(at), nodes=NODES) for at in range(words)))

    each_bytes = path.stat().st_size / words
    assert each_bytes * WEEK_S / Policy().progress_every_s < MOST_BYTES_A_WEEK / 5
    assert each_bytes < len("".join(NODES)) / 20
    assert journal.reconstruct(path).nodes == NODES


def test_a_start_of_2000_watchers_does_not_repeat_all_names_2000_times(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    ready = (record(event=on.WatcherReady(at=float(i), node=node, bus=1), nodes=NODES) for i, node in enumerate(NODES))

    write(path, *ready)

    assert path.stat().st_size < 3_000_000


def test_nodes_are_found_wherever_they_stood_last(tmp_path: Path) -> None:
    """In the record of their change, however many others followed, and beside those of a superseded attempt."""
    path = tmp_path / "journal.jsonl"
    for written in range(0, 3 * journal.NODES_EVERY, 11):
        write_on = journal.JournalWriter(path)
        for at in range(written):
            write_on.append(record(at=float(at), nodes=("a", "b", "c")))
        write_on.append(record(at=1000.0, nodes=("a", "b")))
        write_on.append(record(at=1001.0, nodes=("a", "b")))
        assert write_on.flush(WITHIN_S)
        write(path, record(at=1002.0, restarts=-1, nodes=("x",)))

        assert journal.reconstruct(path).nodes == ("a", "b")
        path.unlink()


def test_journals_that_name_the_nodes_in_every_record_are_read_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    data = [lines.encode(record(at=float(at), nodes=("a", "b")[: 2 - at // 5])) for at in range(10)]
    path.write_bytes(b"\n".join(data) + b"\n")

    assert [each.nodes for each in journal.read(path)] == [("a", "b")] * 5 + [("a",)] * 5
    assert journal.reconstruct(path).nodes == ("a",)


def bytes_read() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def test_reconstruct_of_100_mb_takes_neither_memory_nor_time(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    line = lines.encode(record()) + b"\n"
    block = line * (1_000_000 // len(line))
    with path.open("wb") as file:
        for _ in range(100):
            file.write(block)
        file.write(lines.encode(record(attempt=8)))  # torn only in that its end is missing
    tracemalloc.start()
    before = bytes_read()

    carried = journal.reconstruct(path)

    assert bytes_read() - before < 5_000_000
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()
    assert carried.attempt == 9


def test_100_mb_without_a_line_end_take_no_memory(tmp_path: Path) -> None:
    """A file system that comes back from a crash may give zeros for what was not written."""
    path = tmp_path / "journal.jsonl"
    write(path, record(attempt=2))
    with path.open("ab") as file:
        file.truncate(100_000_000)
    tracemalloc.start()

    carried = journal.reconstruct(path)
    found = sum(1 for _ in journal.read(path))

    assert tracemalloc.get_traced_memory()[1] < 8_000_000
    tracemalloc.stop()
    assert (carried.attempt, found) == (3, 1)


def test_storage_that_fails_is_tried_again_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "away" / "journal.jsonl"
    writer = journal.JournalWriter(path)
    writer.append(record(at=1.0))

    assert not writer.flush(WITHIN_S)
    assert "No such file" in writer.failed
    assert [(each.event.at, each.note) for each in journal.read(journal.spool_path(path))] == [(1.0, "spooled")]

    path.parent.mkdir()
    writer.append(record(at=2.0))
    assert writer.flush(WITHIN_S)
    assert writer.failed == ""
    assert [each.event.at for each in journal.read(path)] == [1.0, 2.0]


def test_a_record_is_spooled_once(tmp_path: Path) -> None:
    path = tmp_path / "away" / "journal.jsonl"
    writer = journal.JournalWriter(path)
    for at in (1.0, 2.0, 3.0):
        writer.append(record(at=at))
        assert not writer.flush(WITHIN_S)

    assert [each.event.at for each in journal.read(journal.spool_path(path))] == [1.0, 2.0, 3.0]


def test_the_spool_is_for_the_owner_alone(tmp_path: Path) -> None:
    writer = journal.JournalWriter(tmp_path / "away" / "journal.jsonl")
    writer.append(record())
    writer.flush(WITHIN_S)

    assert journal.spool_path(tmp_path / "away" / "journal.jsonl").stat().st_mode & 0o777 == 0o600


def test_storage_that_hangs_does_not_hang_a_flush(tmp_path: Path) -> None:
    """A pipe nobody reads stands for shared storage that does not answer."""
    path = tmp_path / "journal.jsonl"
    os.mkfifo(path)
    read_end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = journal.JournalWriter(path)
    for _ in range(2000):
        writer.append(record(why="x" * 500))
    started = time.monotonic()

    flushed = writer.flush(0.3)

    assert not flushed
    assert time.monotonic() - started < 60.0  # not for ever: a busy disk takes its time for the spool
    assert sum(1 for _ in journal.read(journal.spool_path(path))) == 2000
    os.close(read_end)


def test_a_file_name_that_is_no_utf_8_does_not_end_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    skipped = (on.Skipped(directory="step_00000001", problem="extra \udcff: not in the manifest"),)
    chosen = on.CheckpointChosen(at=1.0, directory=None, step=None, skipped=skipped)

    write(path, record(event=chosen, why="passed over \udcff"), record(at=2.0))

    first, second = journal.read(path)
    assert first.why == "passed over ?"
    assert second.event.at == 2.0


def test_many_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writer = journal.JournalWriter(path)
    threads = [
        threading.Thread(target=lambda n=n: [writer.append(record(at=float(n), launch=i)) for i in range(200)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)

    assert writer.flush(WITHIN_S)
    assert sum(1 for _ in journal.read(path)) == 800


def test_the_group_reads_the_journal_of_a_group_readable_run(tmp_path: Path) -> None:
    for mode, expected in ((0o750, 0o640), (0o700, 0o600)):
        directory = tmp_path / f"{mode:o}"
        directory.mkdir()
        directory.chmod(mode)
        write(directory / "journal.jsonl", record())
        assert (directory / "journal.jsonl").stat().st_mode & 0o777 == expected


def test_a_link_in_the_place_of_the_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").symlink_to("/etc/passwd")

    with pytest.raises(OSError, match="symbolic link"):
        list(journal.read(tmp_path / "journal.jsonl"))


@given(st.binary(max_size=300), st.integers(1, 7), st.integers(1, 40))
def test_lines_are_the_same_from_both_ends(data: bytes, block: int, copies: int) -> None:
    data = data.replace(b"a", b"\n") * copies
    before, lines.BLOCK_BYTES = lines.BLOCK_BYTES, block
    try:
        backwards = list(lines.backwards(io.BytesIO(data)))
    finally:
        lines.BLOCK_BYTES = before

    assert backwards[::-1] == list(lines.forwards(io.BytesIO(data)))


def test_the_journal_has_no_field_for_an_environment_or_arguments() -> None:
    """Records hold what events and effects declare; none of them declares an environment or a command."""
    schema = msgspec.json.schema(journal.Record)
    names = {name for part in schema["$defs"].values() for name in part.get("properties", {})}

    assert not names & {"environment", "env", "argv", "command", "cmd", "token", "password"}
