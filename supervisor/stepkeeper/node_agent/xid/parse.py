r"""One record of the kernel log: is it a fault report?

Every pattern is anchored at the start of the *record*, never searched for and never multi-line: any local user can put
text of his choice into the middle of a genuine kernel record (the name of a program that crashes, the path of one that
is started), but not at its start.  One kind of record does begin with a user's text: netfilter's, with the prefix of a
`log` rule, which any user may have in a network namespace of his own where `net.netfilter.nf_log_all_netns` is 1.
Netfilter always adds `IN=... OUT=...` and the packet behind the prefix, so a record that holds that is no report.  Each
form of it is longer than a process name, or ends the record: so no process name can hide a real report.  The code
stands before the process name, so that cannot change it; and the name is cut off so that no part of it is ever taken
for the driver's text.

Drivers wrote the report in these ways, oldest first; the function number is in the tracepoint's and the switches'.

    NVRM: Xid (0000:01:00): 31, Ch 0000000b
    NVRM: Xid (PCI:0000:02:00): 79, GPU has
    NVRM: Xid (PCI:0000:02:00): 79, pid=1896, GPU has
    NVRM: Xid (PCI:0000:02:00): 79, pid='<unknown>', name=<unknown>, GPU has
    NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, pid=7194, name=python3, Contained
    Xid (PCI:0000:3b:00.0): 79, GPU has
    nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, Final

import msgspec

from stepkeeper.node_agent.xid.catalogue import TEXT_CHARACTERS_MAX, Kind
from stepkeeper.run_store import lines

SYSCTL = "net.netfilter.nf_log_all_netns"  # with it, records of netfilter begin with any user's text
RECORD_CHARACTERS_MAX = 16_384  # the kernel's own limit is far below
NAME_CHARACTERS_MAX = 15  # of a process, as the kernel keeps it

_PCI = r"(?P<domain>[0-9a-fA-F]{4}(?:[0-9a-fA-F]{4})?):(?P<bus>[0-9a-fA-F]{2}):(?P<device>[0-9a-fA-F]{2})"
_XID = re.compile(
    rf"(?:NVRM: )?Xid \((?:PCI:)?{_PCI}(?:\.(?P<function>[0-7]))?"
    r"(?: GPU-I:(?P<gi>[0-9]{1,3}))?(?: GPU-CI:(?P<ci>[0-9]{1,3}))?\): (?P<code>[0-9]{1,5})(?:,[ ]?|\Z)"
)
_SXID = re.compile(
    rf"nvidia-nvswitch[0-9]{{1,4}}: SXid \(PCI:{_PCI}(?:\.(?P<function>[0-7]))?\): (?P<code>[0-9]{{1,5}})(?:,[ ]?|\Z)"
)
_SXID_DETAIL = re.compile(r"Severity [0-9]|Data \{")  # lines that belong to a report that was printed before
_OFF_THE_BUS = re.compile(rf"NVRM: GPU {_PCI}\.(?P<function>[0-7]): GPU has fallen off the bus")
# one record of three lines, printed where the driver meets the GPU for the first time; no XID comes with it
_LOST_AT_PROBE = re.compile(
    rf"NVRM: The NVIDIA GPU {_PCI}(?:\.(?P<function>[0-7]))?\s+(?:NVRM:\s+)?"
    r"\(PCI ID: [0-9a-fA-F]{4}:[0-9a-fA-F]{4}\)\s+(?:NVRM:\s+)?installed in this system has\s+"
    r"(?:NVRM:\s+)?fallen off the bus"
)
_ANNOUNCEMENT = re.compile(rf"NVRM: GPU at PCI:{_PCI}(?:\.(?P<function>[0-7]))?: (?P<uuid>GPU-[0-9a-fA-F-]{{36}})\s*\Z")
# IN=lo OUT= MAC=... SRC=...: the kernel allows no space in the name of an interface, but all else that looks like one.
# What follows is what nf_log_syslog and ebt_log print there.  Each is longer than NAME_CHARACTERS_MAX, or ends the
# record, so that no process name is one.
_NETFILTER = re.compile(
    r"IN=[^ ]* OUT=[^ ]*(?: PHYSIN=| PHYSOUT=| MACSRC=| MAC source = | MAC=[0-9a-f]{2}[: ]"
    r"|(?: MAC=)?(?: SRC=[^ ]+ DST=| TUNNEL=| TRUNCATED| ARP HTYPE=| ?\Z))"
)
_DRIVER_LOADED = "NVRM: loading NVIDIA UNIX "
_PID = re.compile(r"pid=(?:[0-9]{1,10}|'?<unknown>'?)(?:,[ ]?|\Z)")
_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one record says, without a judgement."""

    kind: Kind  # XID, SXID or LOST
    pci: str  # `0000:3b:00.0`
    code: int | None = None  # None where the GPU was lost and the driver gave no number
    instance: str = ""  # of MIG: `GI 5`, `GI 5 CI 0`
    payload: str = ""  # the driver's text, behind code and process
    record: str = ""  # the whole, at most TEXT_CHARACTERS_MAX


class Announcement(msgspec.Struct, frozen=True):
    """The driver says which GPU sits where, in front of a GPU's first XID."""

    pci: str
    uuid: str


def parse(record: str) -> Report | None:
    """Return what a kernel record reports; None for all others.  Never raises.

    `record` is the text alone: without priority, time stamp or `kernel:`, and with the kernel's escapes undone.
    """
    if len(record) > RECORD_CHARACTERS_MAX or _NETFILTER.search(record):
        return None
    if match := _XID.match(record):
        return Report(
            kind=Kind.XID,
            code=int(match["code"]),
            pci=_address(match),
            instance=instance(match["gi"], match["ci"]),
            payload=_without_process(record[match.end() :]),
            record=record[:TEXT_CHARACTERS_MAX],
        )
    if match := _SXID.match(record):
        payload = record[match.end() :].strip()
        if _SXID_DETAIL.match(payload):
            return None
        return Report(
            kind=Kind.SXID,
            code=int(match["code"]),
            pci=_address(match),
            payload=payload,
            record=record[:TEXT_CHARACTERS_MAX],
        )
    if match := _OFF_THE_BUS.match(record) or _LOST_AT_PROBE.match(record):
        return Report(kind=Kind.LOST, pci=_address(match), record=record[:TEXT_CHARACTERS_MAX])
    return None


def announcement(record: str) -> Announcement | None:
    """Return which GPU a record says is where; None for all others."""
    match = _ANNOUNCEMENT.match(record) if len(record) <= RECORD_CHARACTERS_MAX else None
    return Announcement(_address(match), match["uuid"]) if match else None


def driver_loaded(record: str) -> bool:
    """Tell whether a record says that the driver was loaded, which sets up every GPU anew."""
    return record.startswith(_DRIVER_LOADED) and not _NETFILTER.search(record)


def canonical(pci: str) -> str:
    """Return an address as this program writes it: `0000:3b:00.0`.  NVML writes `00000000:3B:00.0`.

    Text that is no address comes back in lower case.

    >>> canonical("00000000:3B:00.0"), canonical("0009:01:00")
    ('0000:3b:00.0', '0009:01:00.0')
    """
    match = re.fullmatch(rf"{_PCI}(?:\.(?P<function>[0-7]))?", pci)
    return _address(match) if match else pci.lower()


def unescape(text: bytes) -> str:
    r"""Undo the escapes of /dev/kmsg.  Split records first: `\x0a` is a line feed *in* a record.

    >>> unescape(rb"has\x0aNVRM: fallen")
    'has\nNVRM: fallen'
    """
    if b"\\x" in text:
        text = _ESCAPE.sub(lambda match: bytes((int(match[1], 16),)), text)
    return text.decode(errors="replace")


def _address(match: re.Match[str]) -> str:
    domain, bus, device = (int(match[part], 16) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match['function'] or 0}"


def instance(gi: str | int | None, ci: str | int | None) -> str:
    """Return the slice of a GPU that a report is about: `GI 5 CI 0`; "" where it is about the whole."""
    if gi is None:
        return ""
    return f"GI {int(gi)}" if ci is None else f"GI {int(gi)} CI {int(ci)}"


def _without_process(text: str) -> str:
    """Return the driver's text behind `pid=` and `name=`.

    A name may hold ", " itself.  The last one that a name of full length leaves room for is taken for its end: so the
    result may lack the beginning of the driver's text, but never holds a character of the name.
    """
    if match := _PID.match(text):
        text = text[match.end() :]
    if not text.startswith("name="):
        return text.strip()
    behind = text[len("name=") :]
    end = behind.rfind(", ", 0, NAME_CHARACTERS_MAX + len(", "))
    return behind[end + len(", ") :].strip() if end >= 0 else ""


# Lines of a kernel log, as files and other programs hold them: strip what stands before the record, and parse that.
#
# Known beginnings, each anchored, each exactly as the program writes it:
#
# 6,6410,1242183175,-;text                      /dev/kmsg
# <4>[ 12.345678] text                          dmesg --raw
# kern  :warn  : [ 12.345678] text              dmesg --decode
# [ 12.345678] text   [  +0.000844] text   [Fri Aug 30 11:43:09 2024] text   2024-08-30T11:43:09,123456+00:00 text
# Nov 22 18:29:55 host kernel: [ 12.345678] text                            syslog, journalctl
# 2024-08-30T11:43:09.123456+00:00 host kernel: text
#
# A file is weaker evidence than /dev/kmsg: an account that may write to syslog as `kernel` can put a line there, and
# a record that holds a line feed becomes several lines.  Only what this host reads from /dev/kmsg leads to a drain.

LINE_BYTES_MAX: Final = 16_384  # a longer one is no kernel record, and is passed over
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
    record = unescape(line[match.end() :].encode(errors="replace"))
    return record.replace("#012", "\n") if record.startswith(_LOST_BEGINS) else record  # rsyslog's line feed


def scan(file: BinaryIO, *, allow_injected: bool = False) -> Iterator[Sighting]:
    """Yield the fault reports of a log, whatever its bytes are.  Memory is bounded.

    Raises:
        OSError: it cannot be read.
    """
    announced: dict[str, str] = {}  # PCI address: UUID
    started: list[str] = []  # lines of a record that reports a lost GPU, as far as it was read
    whole = ""  # their record
    for data in lines.forwards(file, holes=True):
        begun, started = started, []
        if not _may_matter(data):
            continue
        line = data.removesuffix(b"\r").decode("utf-8", errors="backslashreplace")
        record = record_of(line, allow_injected=allow_injected) or ""
        if report := parse(record):
            yield Sighting(line=line, report=report, gpu=announced.get(report.pci, ""))
        elif found := announcement(record):
            if len(announced) < ANNOUNCED_MAX:
                announced[found.pci] = found.uuid
        elif record.startswith(_LOST_BEGINS):
            started, whole = [line], record
        elif begun and record:
            # some programs indent what continues a record, others repeat the beginning of the line
            begun.append(line)
            whole += "\n" + record.strip()
            if report := parse(whole):
                yield Sighting(line="\n".join(begun), report=report, gpu=announced.get(report.pci, ""))
            elif len(begun) < LOST_LINES_MAX:
                started = begun


def _may_matter(line: bytes) -> bool:
    return len(line) <= LINE_BYTES_MAX and any(token in line for token in _TOKENS)
