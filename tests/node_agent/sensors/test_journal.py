"""The journal of the boot before: a program in journalctl's place, and journalctl itself where it is installed."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from stepkeeper.node_agent.kernel import UNKNOWN_SEQUENCE, parse_journal, previous_boot
from stepkeeper.node_agent.readings import KernelRecord
from tests.node_agent.sensors.collect import Collected

LOST = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


def entry(message: object, **others: str) -> str:
    fields = {
        "MESSAGE": message,
        "SYSLOG_IDENTIFIER": "kernel",
        "SYSLOG_FACILITY": "0",
        "_BOOT_ID": "0123456789abcdef0123456789abcdef",
        "__REALTIME_TIMESTAMP": "1700000000250000",
        **others,
    }
    return json.dumps(fields)


def program(path: Path, script: str) -> tuple[str, ...]:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return (str(path),)


def test_records_of_the_kernel_are_handed_over_with_the_id_of_their_boot(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("\n".join([entry("booting"), entry(LOST), "torn {"]) + "\n")
    seen = Collected()
    arguments = tmp_path / "arguments"
    command = program(tmp_path / "journalctl", f'echo "$@" > {arguments}\ncat {lines}')
    assert previous_boot(seen, command=command) == ""
    assert [record.text for record in seen.of(KernelRecord)] == ["booting", LOST]
    last = seen.of(KernelRecord)[1]
    assert last.boot_id == "01234567-89ab-cdef-0123-456789abcdef"  # as /proc writes it
    assert last.at == 1700000000.25
    assert last.sequence == UNKNOWN_SEQUENCE
    assert "-k -b -1 -o json" in arguments.read_text()


@pytest.mark.parametrize(
    "line",
    [
        entry("Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", SYSLOG_IDENTIFIER="NVRM"),
        entry(LOST, SYSLOG_IDENTIFIER="kernel", SYSLOG_FACILITY="1"),
        entry(LOST, SYSLOG_IDENTIFIER="root"),
    ],
)
def test_what_user_space_wrote_is_not_believed(line: str) -> None:
    assert parse_journal(line.encode()) is None
    assert parse_journal(entry(LOST).encode()) is not None


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b"1", b'"x"', b"{", b"\xff", entry(None).encode(), entry([300]).encode(), b"[" * 100_000],
)
def test_what_is_no_entry_is_none(line: bytes) -> None:
    assert parse_journal(line) is None


def test_a_message_that_is_not_utf8_comes_as_bytes() -> None:
    record = parse_journal(entry(list(b"NVRM \xff")).encode())
    assert record is not None
    assert record.text == "NVRM \ufffd"


def test_a_machine_without_journald_has_nothing_to_tell(tmp_path: Path) -> None:
    seen = Collected()
    assert "No such file" in previous_boot(seen, command=(str(tmp_path / "none"),))
    assert len(seen) == 0


def test_no_boot_before_is_told(tmp_path: Path) -> None:
    assert previous_boot(Collected(), command=program(tmp_path / "journalctl", "exit 1")) == (
        "no journal of the boot before"
    )


def test_a_journalctl_that_hangs_is_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = program(tmp_path / "journalctl", f"echo $$ > {pid}\nexec sleep 1000")
    for within_s in (0.3, 3.0, 30.0):  # it has to start before it can hang
        assert "out of time" in previous_boot(Collected(), command=command, within_s=within_s)
        if pid.exists() and pid.read_text():
            break
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_an_agent_that_stops_leaves_no_journalctl_behind(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command = program(tmp_path / "journalctl", f"echo $$ > {pid}\nexec sleep 1000")
    stopped = threading.Event()
    reading = threading.Thread(
        target=previous_boot, args=(Collected(),), kwargs={"command": command, "stopped": stopped}
    )
    reading.start()
    until = time.monotonic() + 60
    while not (pid.exists() and pid.read_text().strip()):
        assert time.monotonic() < until
        time.sleep(0.02)

    stopped.set()
    reading.join(15.0)

    assert not reading.is_alive()
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_an_endless_journal_is_read_up_to_a_limit(tmp_path: Path) -> None:
    command = program(tmp_path / "journalctl", f"exec yes '{entry('again')}'")
    seen = Collected()
    problem = previous_boot(seen, command=command, bytes_max=1_000_000)
    assert "more than 1000000 bytes" in problem
    assert 0 < len(seen) < 10_000


def test_the_real_journalctl_takes_our_arguments() -> None:
    if shutil.which("journalctl") is None:
        pytest.skip("journalctl is not installed")
    seen = Collected()
    problem = previous_boot(seen)
    assert problem in {"no journal of the boot before", ""} or "not read to its end" in problem  # a long one
    assert all(record.boot_id for record in seen.of(KernelRecord))
