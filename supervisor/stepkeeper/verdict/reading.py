"""Logs of any size and content, as lines with their rank.

A log is read at both ends only: how it began, and how it ended.  Colours, progress bars and the prefixes of srun,
torchrun and log collectors are taken off.  The supervisor's own lines in a job's log are passed over: they quote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from stepkeeper.logtext import is_own

HEAD_BYTES_MAX = 512 * 1024
TAIL_BYTES_MAX = 4 * 1024 * 1024
LINE_CHARACTERS_MAX = 2048  # of one longer than that, both ends are kept: no line keeps a rule busy for long
STATES_MAX = 4  # of a progress bar: it overwrites its line by carriage returns

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_PREFIXES = (
    re.compile(r"\s{0,8}(?P<rank>\d{1,8}): ?(?=\S|\s|$)"),  # srun --label
    re.compile(r"\[(?:rank|default)(?P<rank>\d{1,8})\]: ?"),  # torch itself; torchrun --tee
    re.compile(r"\[\d{1,8}\] (?=\[rank\d)"),  # log collectors number their lines
    re.compile(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:?\d\d)? ?(?:(?:stdout|stderr) [FP] )?"
    ),  # kubernetes
    re.compile(r"\((?:\w+ )?pid=\d+(?:, ip=[\d.]+)?\) ?"),  # ray
)
_SAYS_RANK = re.compile(r"\[rank(\d{1,8})\]|\[(?:[Gg]lobal )?[Rr]ank[ :]?\s?(\d{1,8})\]|\bRank (\d{1,8})\] ")


class Line(NamedTuple):
    """One line, without what surrounds it."""

    number: int  # from 1; after a gap, those of the gap are estimated as one
    rank: int | None
    text: str


class Log(NamedTuple):
    """What was read of a log."""

    lines: tuple[Line, ...]
    skipped_bytes: int  # between its two ends


class Ends(NamedTuple):
    """How much of a log is read."""

    head_bytes: int
    tail_bytes: int


THOROUGH = Ends(HEAD_BYTES_MAX, TAIL_BYTES_MAX)
QUICK = Ends(64 * 1024, 256 * 1024)  # while a relaunch waits for it


def read(file: BinaryIO, ends: Ends = THOROUGH) -> Log:
    """Read both ends of a log, from a file or a pipe.

    Raises:
        OSError: it cannot be read.
    """
    head = file.read(ends.head_bytes)
    tail, skipped = _tail(file, ends.tail_bytes)
    if not skipped:
        head, tail = head + tail, b""
    pieces = list(_lines(head, 1))
    if tail:
        _, _, tail = tail.partition(b"\n")  # the first one is torn
        pieces += _lines(tail, head.count(b"\n") + 3)
    return Log(tuple(pieces), skipped)


def _tail(file: BinaryIO, most: int) -> tuple[bytes, int]:
    """Return what follows, at most so much of its end, and how much was passed over."""
    if file.seekable():
        position = file.tell()
        size = file.seek(0, os.SEEK_END)
        start = max(position, size - most)
        file.seek(start)
        return file.read(most), start - position
    kept = bytearray()
    skipped = 0
    while block := file.read(256 * 1024):
        kept += block
        if len(kept) > 2 * most:
            skipped += len(kept) - most
            del kept[:-most]
    if skipped and len(kept) > most:
        skipped += len(kept) - most
        del kept[:-most]
    return bytes(kept), skipped


def _lines(data: bytes, first: int) -> Iterator[Line]:
    for number, raw in enumerate(data.split(b"\n"), first):
        states = [state for state in raw.split(b"\r") if state.strip()]
        for state in states[-STATES_MAX:]:
            rank, text = parse(state)
            if not is_own(text):
                yield Line(number, rank, text)


def parse(raw: bytes) -> tuple[int | None, str]:
    r"""Return the rank that a line names, and the line without colours and prefixes.

    >>> parse(b"3: [rank3]: ValueError: \x1b[31mbad\x1b[0m")
    (3, 'ValueError: bad')
    >>> parse(b"0:   File \"train.py\", line 3, in main")
    (0, '  File "train.py", line 3, in main')
    """
    if len(raw) > LINE_CHARACTERS_MAX:
        half = LINE_CHARACTERS_MAX // 2
        raw = raw[:half] + b" ... " + raw[-half:]
    text = _ESCAPES.sub("", raw.decode(errors="replace")).rstrip()
    rank: int | None = None
    for prefix in _PREFIXES:
        match = prefix.match(text)
        if match is not None:
            text = text[match.end() :]
            found = match.groupdict().get("rank")
            rank = int(found) if found else rank
    if rank is None or "[Rank" in text:
        match = _SAYS_RANK.search(text)
        if match is not None:
            rank = int(next(group for group in match.groups() if group))
    return rank, text
