r"""Lines of a kernel log, as files and other programs hold them: strip what stands before the record, and parse that.

Known beginnings, each anchored, each exactly as the program writes it:

    6,6410,1242183175,-;text                      /dev/kmsg
    <4>[ 12.345678] text                          dmesg --raw
    kern  :warn  : [ 12.345678] text              dmesg --decode
    [ 12.345678] text   [  +0.000844] text   [Fri Aug 30 11:43:09 2024] text   2024-08-30T11:43:09,123456+00:00 text
    Nov 22 18:29:55 host kernel: [ 12.345678] text                            syslog, journalctl
    2024-08-30T11:43:09.123456+00:00 host kernel: text

A file is weaker evidence than /dev/kmsg: an account that may write to syslog as `kernel` can put a line there, and
a record that holds a line feed becomes several lines.  Only what this host reads from /dev/kmsg leads to a drain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from stepkeeper.node_agent.xid.parse import Announcement, Report, announcement, parse, unescaped

LINE_BYTES_MAX: Final = 16_384  # a longer one is no kernel record, and is passed over
CHUNK_BYTES: Final = 1 << 20
LOST_LINES_MAX: Final = 3  # of the record that a lost GPU is reported in
ANNOUNCED_MAX: Final = 1024  # GPUs

_RECORD = re.compile(r"(?P<priority>[0-9]{1,4}),[0-9]{1,20},[0-9]{1,20},[^;\s]{1,80};")
_MONTH = r"[^\W\d_]{3,5}\.?"  # in the language of the host
_TIME = r"[0-9]{2}:[0-9]{2}:[0-9]{2}"
_ISO = rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[T ]{_TIME}(?:[.,][0-9]{{1,9}})?(?:Z|[+-][0-9]{{2}}:?[0-9]{{2}})?"
_FULL = rf"[^\W\d_]{{2,5}}\.? [0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}} {_TIME}(?:\.[0-9]{{1,9}})? [A-Z0-9+:-]{{1,9}}"
_HOST = r"\S{0,254}[^\s:]"  # no colon at the end: that would be a program's name, in a log without hosts
_UNIX = r"[0-9]{9,11}\.[0-9]{1,9}"
_STAMP = (
    r"\[(?:[ ]*\+?[0-9]{1,10}\.[0-9]{1,9}(?: <[ ]*[0-9]{1,10}\.[0-9]{1,9}>)?"
    rf"|[^\W\d_]{{2,5}}\.? {_MONTH} [ 0-9]?[0-9] {_TIME} [0-9]{{4}}"
    rf"|{_MONTH} ?[0-9]{{1,2}} [0-9]{{2}}:[0-9]{{2}})\]"
)
_BEGINNING = re.compile(
    r"(?:<(?P<priority>[0-9]{1,4})>)?"
    r"(?:(?P<facility>[a-z][a-z0-9]{2,9}) *:[a-z]{3,6} *: )?"
    rf"(?:(?:{_MONTH} [ 0-9]?[0-9] {_TIME}|{_ISO}|{_FULL}|{_STAMP}|{_UNIX}) {_HOST} kernel: |kernel: )?"
    rf"(?:(?:{_STAMP}(?: ?\[ *[TC][0-9]{{1,8}}\])?|{_ISO}) )?"
)
_LOST_BEGINS: Final = "NVRM: The NVIDIA GPU "  # the first of the lines that report a lost GPU
# one of these is in every line that matters; looking for plain bytes costs a hundredth of trying the patterns
_TOKENS: Final = (b"Xid (", b"fallen off the bus", b"GPU at PCI:", b"The NVIDIA GPU ", b"installed in this system has")


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A report in a log."""

    line: str  # as it stands there; of a record of several lines, all of them
    report: Report
    gpu: str = ""  # UUID, where the log gave it before


def record_of(line: str, *, allow_injected: bool = False) -> str | None:
    """Return the kernel record that a line holds, unescaped; None where a program wrote it, not the kernel.

    The kernel gives facility 0 to its own records only.  A line without a priority is taken for the kernel's.
    """
    match = _RECORD.match(line)
    facility = None
    if match is None:
        match = _BEGINNING.match(line)
        assert match is not None, "the pattern matches the empty string"
        facility = match["facility"]
    user = (match["priority"] is not None and int(match["priority"]) >> 3 != 0) or facility not in (None, "kern")
    if user and not allow_injected:
        return None
    record = unescaped(line[match.end() :])
    return record.replace("#012", "\n") if record.startswith(_LOST_BEGINS) else record  # rsyslog's line feed


def scan(read: Callable[[int], bytes], *, allow_injected: bool = False) -> Iterator[Sighting]:
    """Yield the fault reports of a log, whatever its bytes are.

    `read` returns up to that many bytes and none at the end, as `read1` does.  Memory is bounded by `CHUNK_BYTES`.
    """
    log = _Log(allow_injected=allow_injected)
    for line, adjacent in _candidates(read):
        yield from log.look(line, adjacent=adjacent)


class _Log:
    """What lines before say about this one."""

    def __init__(self, *, allow_injected: bool) -> None:
        self._allow_injected = allow_injected
        self._announced: dict[str, str] = {}  # PCI address: UUID
        self._started: list[str] = []  # lines of a record that reports a lost GPU, as far as it was read
        self._started_record = ""

    def look(self, data: bytes, *, adjacent: bool) -> Iterator[Sighting]:
        line = data.decode("utf-8", errors="backslashreplace")
        record = record_of(line, allow_injected=self._allow_injected)
        begun, self._started = self._started if adjacent else [], []
        if record is None:
            return
        if report := parse(record):
            yield self._sighting(line, report)
        elif found := announcement(record):
            self._remember(found)
        elif record.startswith(_LOST_BEGINS):
            self._started, self._started_record = [line], record
        elif begun:
            # some programs indent what continues a record, others repeat the beginning of the line
            begun.append(line)
            self._started_record += "\n" + record.strip()
            if report := parse(self._started_record):
                yield self._sighting("\n".join(begun), report)
            elif len(begun) < LOST_LINES_MAX:
                self._started = begun

    def _sighting(self, line: str, report: Report) -> Sighting:
        return Sighting(line=line, report=report, gpu=self._announced.get(report.pci, ""))

    def _remember(self, found: Announcement) -> None:
        if len(self._announced) < ANNOUNCED_MAX:
            self._announced[found.pci] = found.uuid


def _candidates(read: Callable[[int], bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield each line that holds a token, and whether it follows at once upon the one yielded before."""
    rest = b""
    offset = 0  # of `rest`, in the input
    follows = -1  # offset behind the line that was yielded last
    skipping = False  # inside a line that is too long
    while True:
        chunk = read(CHUNK_BYTES)
        buffer = rest + chunk
        whole = buffer.rfind(b"\n") + 1 if chunk else len(buffer)
        begin = 0
        if skipping:
            begin = buffer.find(b"\n") + 1
            skipping = begin == 0
        if not skipping:
            for start, end in _lines_with_tokens(buffer, begin, whole):
                if end - start <= LINE_BYTES_MAX:
                    yield buffer[start:end].removesuffix(b"\r"), offset + start == follows
                    follows = offset + end + 1
        if not chunk:
            return
        rest = b"" if skipping else buffer[whole:]
        if len(rest) > LINE_BYTES_MAX:
            rest, skipping = b"", True
        offset += len(buffer) - len(rest)


def _lines_with_tokens(buffer: bytes, begin: int, whole: int) -> list[tuple[int, int]]:
    """Return where the lines start and end that hold a token, in order."""
    found: dict[int, int] = {}
    for token in _TOKENS:
        position = buffer.find(token, begin, whole)
        while position >= 0:
            end = buffer.find(b"\n", position, whole)
            end = end if end >= 0 else whole
            found[max(begin, buffer.rfind(b"\n", 0, position) + 1)] = end
            position = buffer.find(token, end, whole)
    return sorted(found.items())
