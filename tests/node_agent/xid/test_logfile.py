"""Files with kernel logs: every program's way to write them, and whatever else a file may hold."""

from __future__ import annotations

import io
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stepkeeper.node_agent.xid import parse as logfile
from stepkeeper.node_agent.xid.catalogue import Kind
from stepkeeper.node_agent.xid.parse import LINE_BYTES_MAX, Sighting, record_of, scan
from tests.node_agent.xid import samples

MIB = 1 << 20
QUICKLY = settings(max_examples=150, phases=(Phase.explicit, Phase.generate), deadline=None)
RECORD = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
LOST = (
    "NVRM: The NVIDIA GPU 0000:b3:00.0",
    "NVRM: (PCI ID: 10de:26b5) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


def seen(data: bytes | str, *, allow_injected: bool = False) -> list[Sighting]:
    return list(scan(io.BytesIO(data.encode() if isinstance(data, str) else data), allow_injected=allow_injected))


@pytest.mark.parametrize(
    "before",
    [
        "",
        "[24128.828315] ",
        "[    1.000000] ",
        "[  +0.000844] ",
        "[  966.503025 <    0.000844>] ",
        "[    0.000000][    T0] ",
        "[    0.000000] [ T1234] ",
        "[Wed Jul 31 23:14:18 2024] ",
        "[Mon Aug  5 03:54:13 2024] ",
        "[Aug30 11:43] ",
        "2024-08-30T11:43:09,123456+00:00 ",
        "<4>[ 2476.689778] ",
        "<4>",
        "kern  :warn  : [ 2476.689778] ",
        "kern  :err   : 2024-08-30T11:43:09,123456+00:00 ",
        "Nov 22 18:29:55 hostname kernel: [ 966.503025] ",
        "Dec  2 11:38:47 worker4 kernel: [  219.471050] ",
        "kwi 15 07:56:59 testowy kernel: ",
        "2024-11-22T18:29:55.123456+00:00 host.example kernel: [   12.300000] ",
        "2024-11-22T18:29:55+0000 host kernel: ",
        "Fri 2024-08-30 11:43:09 UTC host kernel: ",
        "Fri 2024-08-30 11:43:09.123456 UTC host kernel: ",
        "[  966.503025] host kernel: ",
        "1725018189.123456 host kernel: ",
        "kernel: ",
        "4,6410,1242183175,-;",
        "4,6410,1242183175,-,caller=T123;",
        "4,6410,1242183175,c;",
    ],
)
def test_what_programs_write_before_a_record_is_taken_off(before: str) -> None:
    (found,) = seen(before + RECORD + "\n")

    assert (found.line, found.report.code, found.report.record) == (before + RECORD, 79, RECORD)


@pytest.mark.parametrize(
    "before",
    [
        " ",
        "               ",
        "[24128.828315]  ",
        "[24128.828315] [24128.828315] x ",
        "[x] ",
        "host kernel: ",
        "Nov 22 18:29:55 host python[12]: ",
        "Nov 22 18:29:55 host logger: ",
        "Nov 22 18:29:55 logger: kernel: ",
        "Nov 22 18:29:55 host kernel: x ",
        "kernel: kernel: ",
        "4,6410,1242183175;",
        "4,6410,1242183175,-;[ 1.000000] ",
        "11,6410,1242183175,-;",
        "<11>[ 1.000000] ",
        "user  :warn  : [ 2476.689778] ",
        "daemon:warn  : ",
    ],
)
def test_behind_anything_else_there_is_no_record(before: str) -> None:
    assert seen(before + RECORD + "\n") == []


@pytest.mark.parametrize("before", ["11,6410,1242183175,-;", "<11>[ 1.000000] ", "user  :warn  : [ 2476.689778] "])
def test_what_programs_injected_counts_only_where_that_is_allowed(before: str) -> None:
    assert [found.report.code for found in seen(before + RECORD, allow_injected=True)] == [79]


def test_all_samples_are_found_in_one_file() -> None:
    lines = [sample.line for sample in samples.samples()]
    expected = [sample for sample in samples.samples() if sample.kind is not None and not sample.injected]

    found = seen("\n".join(lines))

    assert [each.line for each in found] == [sample.line for sample in expected]
    assert [each.report.code for each in found] == [sample.code for sample in expected]
    gpus = {each.gpu for each in found if each.gpu}
    assert gpus == {"GPU-509665ad-b600-ac93-3616-d754b23d636d"}  # told by the driver two lines before its 119


@pytest.mark.parametrize(
    "lines",
    [
        LOST,
        tuple("[    9.100000] " + line for line in LOST),
        ("[    9.100000] " + LOST[0], "               " + LOST[1], "               " + LOST[2]),
        tuple("Nov 22 18:29:55 host kernel: " + line for line in LOST),
    ],
)
def test_a_lost_gpu_reported_over_three_lines_is_one_report(lines: tuple[str, ...]) -> None:
    text = "\n".join(("[    9.000000] other", *lines, "[    9.200000] other", ""))

    (found,) = seen(text)

    assert (found.report.kind, found.report.pci, found.line) == (Kind.LOST, "0000:b3:00.0", "\n".join(lines))


@pytest.mark.parametrize("between", ["\\x0a", "#012"])
def test_such_a_report_is_read_from_one_line_too(between: str) -> None:
    (found,) = seen("Nov 22 18:29:55 host kernel: " + between.join(LOST))
    assert (found.report.kind, found.report.pci) == (Kind.LOST, "0000:b3:00.0")


@pytest.mark.parametrize(
    "lines",
    [
        (LOST[0], "something between", *LOST[1:]),
        (LOST[0], LOST[2]),
        LOST[1:],
        LOST[:2],
        (LOST[0], "11,1,1,-;" + LOST[1], LOST[2]),
    ],
)
def test_parts_of_such_a_report_are_none(lines: tuple[str, ...]) -> None:
    assert seen("\n".join(lines)) == []


def test_a_report_behind_the_beginning_of_another_is_found() -> None:
    found = seen("\n".join((LOST[0], LOST[0], *LOST[1:], LOST[0], RECORD)))
    assert [each.report.code for each in found] == [None, 79]


def test_lines_end_in_any_way() -> None:
    assert [each.line for each in seen(f"{'x' * 100}\r\n{RECORD}\r\n{RECORD}")] == [RECORD, RECORD]


def test_a_line_that_is_too_long_is_passed_over_and_the_next_is_read() -> None:
    for length in (LINE_BYTES_MAX - len(RECORD), LINE_BYTES_MAX, MIB, 3 * MIB + 5):
        found = seen(f"{RECORD}{'x' * length}\n{RECORD}\n")
        assert [each.line for each in found][-1] == RECORD
        assert all(len(each.line) <= LINE_BYTES_MAX for each in found)


class Endless(io.RawIOBase):
    """One piece over and over, up to a limit."""

    def __init__(self, piece: bytes, total: int) -> None:
        self._piece, self._left = piece, total

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), len(self._piece), self._left)
        buffer[:count] = self._piece[:count]
        self._left -= count
        return count


def test_a_hole_of_a_crash_is_passed_over(tmp_path: Path) -> None:
    """Such logs are sparse, and may be larger than what other readers pass over."""
    log = tmp_path / "kern.log"
    log.touch()
    os.truncate(log, 300 * MIB)
    with log.open("ab") as file:
        file.write(f"\n{RECORD}\n".encode())
    with log.open("rb") as file:
        assert [each.line for each in scan(file)] == [RECORD]


@pytest.mark.parametrize("piece", [b"\x00" * 65_536, b"x" * 65_536, b"Xid (" * 13_000, (RECORD + "\n").encode() * 100])
def test_memory_is_bounded_whatever_comes(piece: bytes) -> None:
    log = io.BufferedReader(Endless(piece, 64 * MIB if b"\n" not in piece else 2 * MIB), len(piece))
    tracemalloc.start()

    count = sum(1 for _ in scan(log))

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (count > 0) == (b"\n" in piece)
    assert peak < 8 * MIB


def test_announcements_do_not_pile_up() -> None:
    lines = (
        f"NVRM: GPU at PCI:{number:04x}:00:00: GPU-509665ad-b600-ac93-3616-d754b23d636d"
        for number in range(logfile.ANNOUNCED_MAX + 50)
    )
    last = f"{logfile.ANNOUNCED_MAX + 49:04x}"
    data = "\n".join(lines) + f"\nNVRM: Xid (PCI:{last}:00:00): 79, x\nNVRM: Xid (PCI:0001:00:00): 79, x"
    assert [bool(found.gpu) for found in seen(data)] == [False, True]


@given(st.lists(st.sampled_from([RECORD.encode(), b"\n", b"Xid (", LOST[0].encode(), b"\\x", b"<4>"]) | st.binary()))
@QUICKLY
def test_no_bytes_make_it_raise_and_each_line_found_stands_in_the_input(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    text = data.decode(errors="backslashreplace")
    for found in seen(data):
        assert found.line in text


@given(st.text(max_size=60))
@QUICKLY
def test_a_known_beginning_never_hides_what_is_behind_it(text: str) -> None:
    assert record_of("6,1,1,-;" + text.replace("\\x", "")) == text.replace("\\x", "")
