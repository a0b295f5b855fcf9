"""Reads, once, what the journal keeps of the boot before this one: why the node went down, perhaps.

/dev/kmsg begins anew with every boot.  A node without journald, or whose journal is not kept on disk, has nothing
to tell, and that is fine.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from stepkeeper.node.sensors.readings import KernelRecord

COMMAND = ("journalctl",)
LINES_MAX = 50_000  # the newest
BYTES_MAX = 64 * 1024 * 1024
WITHIN_S = 20.0
ENDS_WITHIN_S = 1.0
LOOKS_UP_S = 0.2  # to see whether the agent stops
FIELDS = "MESSAGE,SYSLOG_IDENTIFIER,SYSLOG_FACILITY"
UNKNOWN_SEQUENCE = -1  # the journal does not keep the record's number
USEC = 1_000_000


def previous_boot(
    callback: Callable[[KernelRecord], None],
    *,
    command: Sequence[str] = COMMAND,
    within_s: float = WITHIN_S,
    bytes_max: int = BYTES_MAX,
    stopped: threading.Event | None = None,
) -> str:
    """Hand over the kernel's records of the boot before, oldest first; return what was wrong, "" where nothing was.

    Never raises; returns in time, or soon after `stopped` was set (and a second for journalctl to die).
    """
    arguments = [*command, "-k", "-b", "-1", "-o", "json", "--no-pager", "-q", "-n", str(LINES_MAX)]
    arguments.append(f"--output-fields={FIELDS}")
    try:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
    except OSError as error:
        return f"no journal: {command[0]}: {error.strerror}"
    assert process.stdout is not None
    code: int | None = None
    try:
        with process.stdout:
            problem = _read(process.stdout, callback, time.monotonic() + within_s, bytes_max, stopped)
        if not problem:
            code = process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        problem = "journalctl does not end"
    if code is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # on a disk that hangs: left behind
            process.wait(ENDS_WITHIN_S)
    return "no journal of the boot before" if code else problem


def _read(
    stream: IO[bytes],
    callback: Callable[[KernelRecord], None],
    until: float,
    bytes_max: int,
    stopped: threading.Event | None,
) -> str:
    rest = b""
    size = 0
    while size < bytes_max:
        left_s = until - time.monotonic()
        if left_s <= 0 or (stopped is not None and stopped.is_set()):
            return "the journal was not read to its end: out of time"
        if not select.select([stream], [], [], min(left_s, LOOKS_UP_S))[0]:
            continue
        data = stream.read(1 << 16)
        if not data:
            return ""
        size += len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            record = parse(line)
            if record is not None:
                callback(record)
    return f"the journal was not read to its end: more than {bytes_max} bytes"


def parse(line: bytes) -> KernelRecord | None:
    """Return one entry; None where it is not the kernel's own, or not readable."""
    try:
        entry = json.loads(line)
        if entry.get("SYSLOG_IDENTIFIER") != "kernel" or entry.get("SYSLOG_FACILITY", "0") != "0":
            return None  # user space wrote it to /dev/kmsg
        message = entry["MESSAGE"]
        return KernelRecord(
            at=int(entry["__REALTIME_TIMESTAMP"]) / USEC,
            boot_id=_dashed(str(entry["_BOOT_ID"])),
            sequence=UNKNOWN_SEQUENCE,
            text=_text(message),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # torn, or of a shape that no journald writes


def _text(message: Any) -> str:
    """Return the message: journald gives one that is not UTF-8 as a list of bytes."""
    return message if isinstance(message, str) else bytes(message).decode(errors="replace")


def _dashed(boot: str) -> str:
    """Return the boot's id as the kernel writes it."""
    return "-".join((boot[:8], boot[8:12], boot[12:16], boot[16:20], boot[20:]))
