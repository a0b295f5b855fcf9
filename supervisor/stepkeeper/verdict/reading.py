"""Logs of any size and content, as lines with their rank.

A log is read at both ends only: how it began, and how it ended.  Colours, progress bars and the prefixes of launchers
and log collectors are taken off (prefixes.py), and so are Stepkeeper's own lines: they are no word of the training.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from stepkeeper.verdict import prefixes
from stepkeeper.verdict.prefixes import Said

HEAD_BYTES_MAX = 512 * 1024
TAIL_BYTES_MAX = 4 * 1024 * 1024
LINE_CHARACTERS_MAX = 2048  # of one longer than that, both ends are kept: no line keeps a rule busy for long
STATES_MAX = 4  # of a progress bar: it overwrites its line by carriage returns


class Line(NamedTuple):
    """One line, without what surrounds it."""

    number: int  # from 1; after a gap, those of the gap are estimated as one
    rank: int | None
    text: str
    writer: str = ""  # as its prefix names it: a host, a pod, a process of Ray


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
        pieces += _lines(tail, pieces[-1].number + 2)
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
            said = parse(state)
            yield Line(number, said.rank, said.text, said.writer)


def parse(raw: bytes) -> Said:
    """Return what a line says, without colours and prefixes; of a very long one both ends."""
    if len(raw) > LINE_CHARACTERS_MAX:
        half = LINE_CHARACTERS_MAX // 2
        raw = raw[:half] + b" ... " + raw[-half:]
    return prefixes.parse(raw.decode(errors="replace"))
