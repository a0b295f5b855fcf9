"""Lines of files that somebody else writes, may have torn, or wrote to hurt: from either end.

Memory stays small whatever the file holds: a line beyond the limit is cut, and its rest passed over.  So is time:
what is passed over has a limit too, since a file of a terabyte without a line end may take no room on a disk.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import msgspec

from stepkeeper.redaction import redact
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.plain import DecodeError, decode, open_plain

LINE_BYTES_MAX = 1024 * 1024
BLOCK_BYTES = 64 * 1024
PASSED_OVER_MAX = 256 * 1024 * 1024  # of one file
T = TypeVar("T")


def forwards(file: BinaryIO, *, holes: bool = False) -> Iterator[bytes]:
    """Yield the lines without their ends, oldest first; of one beyond the limit, its beginning.

    Args:
        file: to be read.
        holes: it may have long parts without a line, as a crash leaves them.

    Raises:
        OSError: it cannot be read, or holds next to no line.
    """
    for line, _, _ in _measured(file, holes=holes):
        yield line.removesuffix(b"\n")


def _measured(file: BinaryIO, passed_over: int = 0, *, holes: bool = False) -> Iterator[tuple[bytes, int, bool]]:
    """Yield each line as far as it is kept, how many bytes it takes in the file, and whether it has its end."""
    while line := file.readline(LINE_BYTES_MAX):
        rest, length = line, len(line)
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(LINE_BYTES_MAX)
            length += len(rest)
            if not holes:
                passed_over = _pass_over(file, passed_over + len(rest))
        yield line, length, bool(rest)


def backwards(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines without their ends, newest first; of one beyond the limit, its end.

    Raises:
        OSError: it cannot be read, or holds next to no line.
    """
    position = file.seek(0, os.SEEK_END)
    tail = b""  # of the line that begins before `position`
    is_first = True
    passed_over = 0
    while position > 0:
        count = min(BLOCK_BYTES, position)
        position -= count
        file.seek(position)
        pieces = file.read(count).split(b"\n")
        if len(pieces) > 1:
            last = pieces[-1] + tail
            if last or not is_first:  # what follows the last line end is no line
                yield last
            yield from reversed(pieces[1:-1])
            is_first = False
            tail = pieces[0]
        else:
            whole = pieces[0] + tail
            tail = whole[-LINE_BYTES_MAX:]
            passed_over = _pass_over(file, passed_over + len(whole) - len(tail))
    if tail or not is_first:
        yield tail


class Growing:
    """A file of lines that somebody appends to: each look takes the lines that it has got since the one before.

    A line without its end is still being written, and belongs to the next look.  A file that was replaced or cut off
    is read anew from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None  # device and inode of the file that was read
        self._at = 0  # where the next line begins
        self._passed_over = 0

    @contextlib.contextmanager
    def look(self) -> Iterator[tuple[bool, Iterator[bytes]]]:
        """Give whether the file is another one than before, so that what was taken counts no more; and its new lines.

        A missing file has no lines.

        Raises:
            OSError: it is there and cannot be read, or holds next to no line.
        """
        try:
            file = open_plain(self._path, within=self._path.parent)
        except FileNotFoundError:
            another, self._file = self._file is not None, None
            yield another, iter(())
            return
        with file:
            found = os.fstat(file.fileno())
            same = self._file == (found.st_dev, found.st_ino) and found.st_size >= self._at
            another = self._file is not None and not same
            if not same:
                self._file, self._at, self._passed_over = (found.st_dev, found.st_ino), 0, 0
            yield another, self._lines(file)

    def _lines(self, file: BinaryIO) -> Iterator[bytes]:
        file.seek(self._at)
        for line, length, has_end in _measured(file, self._passed_over):
            if not has_end:
                return
            self._passed_over += length - len(line)
            self._at += length
            yield line.removesuffix(b"\n")


def _pass_over(file: BinaryIO, count: int) -> int:
    if count > PASSED_OVER_MAX:
        raise OSError(errno.EFBIG, f"{PASSED_OVER_MAX} bytes of it are no lines: it is damaged", file.name)
    return count


def parsed(decoder: msgspec.json.Decoder[T], data: bytes) -> T | None:
    """Return what a line says; None where it is torn, of a newer version, or stray output."""
    try:
        return decode(decoder, data)
    except DecodeError:
        return None


def encode(record: msgspec.Struct | dict[str, Any]) -> bytes:
    """Return a record as one line of JSON, without its end.  Never raises for what strings hold.

    A file name that is no UTF-8 reaches us with surrogates, which JSON cannot hold: they become `?`.  What looks like
    a secret is hidden, in text of any origin.
    """
    try:
        data = msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(_harmless(msgspec.to_builtins(record)))
    text = data.decode()
    return data if redact(text) == text else msgspec.json.encode(_harmless(msgspec.to_builtins(record)))


def _harmless(value: Any) -> Any:
    match value:
        case str():
            return redact(value.encode(errors="replace").decode())
        case dict():
            return {key: _harmless(item) for key, item in value.items()}
        case list() | tuple():
            return [_harmless(item) for item in value]
        case _:
            return value


class NewestWriter:
    """Writes the newest version of a small file on a thread of its own: slow storage delays nobody.

    A power cut may bring back an older version, until the last one is written.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_error: Callable[[OSError], None],
        on_failure: Callable[[BaseException], object],
        every_s: float = 0.0,
    ) -> None:
        """Write no more often than `every_s`; `on_failure` gets a mistake of ours."""
        self._path, self._every_s = path, every_s
        self._on_error, self._on_failure = on_error, on_failure
        self._newest: msgspec.Struct | None = None
        self._changed, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._write, name=path.stem, daemon=True)
        self._thread.start()

    def show(self, newest: msgspec.Struct) -> None:
        """Hand over the newest version; returns at once."""
        self._newest = newest
        self._changed.set()

    def close(self, last: msgspec.Struct, within_s: float) -> None:
        """Write the last version, if the storage takes it in time."""
        self._newest = last  # before the word that it is the last: the thread looks at that first
        self._closing.set()
        self._changed.set()
        self._thread.join(within_s)

    def _write(self) -> None:
        while self._changed.wait():
            self._changed.clear()
            last, newest = self._closing.is_set(), self._newest
            try:
                if newest is not None:
                    write_atomically(self._path, encode(newest) + b"\n", mode=0o644, name_durable=last)
            except OSError as error:
                self._on_error(error)
            except Exception as error:  # noqa: BLE001 - handed over
                self._on_failure(error)
            if last:
                return
            self._closing.wait(self._every_s)


# `metrics.csv`, from its end: how far a launch came, and what the losses were.

METRICS_NAME = "metrics.csv"
BYTES_MAX = 512 * 1024  # of its end that are read: thousands of steps
LOSSES_MAX = 64  # for the loss watch of the next attempt: enough though a resume drops the newest half of them


class Ended(NamedTuple):
    """How far a launch came."""

    step: int
    wrong_step: int | None  # the first whose loss is no finite number


def ended_at(run: Path, attempt: int, launch: int) -> Ended | None:
    """Return the last step of a launch; None where it completed none, or the script writes none.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        rows = _newest_rows(run)
    except FileNotFoundError:
        return None
    step = wrong = None
    for row in rows:
        if (row.get("attempt"), row.get("launch")) != (str(attempt), str(launch)):
            continue
        number, loss = _number(row.get("step")), _number(row.get("loss"))
        if number is None or not number.is_integer():
            continue
        step = int(number)
        if wrong is None and loss is not None and not math.isfinite(loss):
            wrong = step
    return Ended(step, wrong) if step is not None else None


def losses_before(run: Path) -> tuple[tuple[int, float], ...]:
    """Return steps and losses of the newest state, oldest first: at most so many, spread over the end of the file.

    Steps that were done again count once, as they were done last.  What cannot be read says nothing: the loss watch
    then begins anew.
    """
    try:
        rows = _newest_rows(run)
    except OSError:
        return ()
    found: list[tuple[int, float]] = []
    for row in reversed(rows):
        step, loss = _number(row.get("step")), _number(row.get("loss"))
        if step is None or loss is None or not (step.is_integer() and math.isfinite(loss)):
            continue
        if not found or step < found[-1][0]:  # else it was done again later
            found.append((int(step), loss))
    every = max(1, -(-len(found) // LOSSES_MAX))
    return tuple(reversed(found[::every]))


def _newest_rows(run: Path) -> list[dict[str, str | None]]:
    """Return what the end of the file holds, oldest first.  Raises OSError."""
    with open_plain(run / METRICS_NAME, within=run) as file:
        header = file.readline(4096).decode(errors="replace").strip().split(",")
        start = max(file.tell(), file.seek(0, 2) - BYTES_MAX)
        file.seek(start)
        text = file.read(BYTES_MAX).decode(errors="replace")
    return list(csv.DictReader(text.splitlines(), fieldnames=header))


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:  # torn, or left out
        return None
