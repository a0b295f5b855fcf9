"""Python's tracebacks in a log: which exception, and where in the user's own code.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from stepkeeper.verdict.reading import Line

MESSAGE_LINES_MAX = 12  # of an exception
FRAMES_MAX = 400
MESSAGE_CHARACTERS_MAX = 2000

_BEGIN = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(r'\s*File "(?P<path>[^"]{1,1000})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,200}?))?\s*$')
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]{2,200})(?::\s?(?P<message>.*))?$")
_CHAINED = re.compile(r"(?P<how>During handling of the above exception|The above exception was the direct cause)")
_FOREIGN = re.compile(
    r"(?:site|dist)-packages/|/lib(?:64)?/python\d|<frozen |/bin/(?:torchrun|accelerate|deepspeed)$|^<string>"
)
_GOES_ON = re.compile(
    r"\s+\S|nccl\w+(?:Error|Usage)|Last error|CUDA kernel errors|For debugging|Compile with|Search for "
)


class Frame(NamedTuple):
    """One line of code on the way to an exception."""

    path: str
    line: int
    function: str


class Raised(NamedTuple):
    """One exception that a log shows."""

    type: str
    message: str  # its lines joined by line ends
    frames: tuple[Frame, ...]
    first_line: int
    last_line: int
    rank: int | None
    chained: bool  # raised while another one, that stands before it, was handled
    direct: bool  # ... with that one named as its cause

    @property
    def statement(self) -> str:
        """The exception as Python prints it."""
        return f"{self.type}: {self.message}" if self.message else self.type

    @property
    def location(self) -> str:
        """The deepest line of the user's own code, else the deepest of all.

        What lies in a site's packages or in Python itself is not the user's.
        """
        short = self.type.rpartition(".")[2]
        own = [frame for frame in self.frames if not _FOREIGN.search(frame.path)]
        if not self.frames:
            return short
        frame = (own or self.frames)[-1]
        function = f" in {frame.function}" if frame.function and frame.function != "<module>" else ""
        return f"{short} at {frame.path}:{frame.line}{function}"


class _Open:
    """A traceback that is being read."""

    def __init__(self, line: Line, *, chained: bool, direct: bool) -> None:
        self.first = line.number
        self.last = line.number
        self.rank = line.rank
        self.chained = chained
        self.direct = direct
        self.frames: list[Frame] = []
        self.type = ""
        self.message: list[str] = []

    def closed(self) -> Raised | None:
        """Return what was read; nothing of a traceback without its last line."""
        if not self.type:
            return None
        message = "\n".join(self.message).strip()[:MESSAGE_CHARACTERS_MAX]
        return Raised(
            self.type, message, tuple(self.frames), self.first, self.last, self.rank, self.chained, self.direct
        )


def find(lines: Iterable[Line]) -> list[Raised]:
    """Return the exceptions in the order of their last lines.

    Ranks write between each other's lines: each has a traceback of its own.
    """
    found: list[Raised] = []
    opened: dict[int | None, _Open] = {}
    chain: dict[int | None, str] = {}
    for line in lines:
        current = opened.get(line.rank)
        how = _CHAINED.match(line.text)
        if how or _BEGIN.search(line.text):
            if current is not None and (raised := current.closed()):
                found.append(raised)
            opened.pop(line.rank, None)
            if how:
                chain[line.rank] = how["how"]
                continue
            before = chain.pop(line.rank, "")
            opened[line.rank] = _Open(line, chained=bool(before), direct=before.startswith("The above"))
        elif current is not None and not _continues(current, line):
            if raised := current.closed():
                found.append(raised)
            del opened[line.rank]
    found += [raised for each in opened.values() if (raised := each.closed())]
    return sorted(found, key=lambda raised: raised.last_line)


def _continues(current: _Open, line: Line) -> bool:
    """Add a line to a traceback; False where it is none of it."""
    text = line.text
    if current.type:
        announced = current.message[-1].startswith("Last error")  # by NCCL, on a line of its own
        if len(current.message) >= MESSAGE_LINES_MAX or not (announced or _GOES_ON.match(text)):
            return False
        current.message.append(text)
        current.last = line.number
        return True
    frame = _FRAME.match(text)
    if frame is not None:
        if len(current.frames) >= FRAMES_MAX:
            del current.frames[FRAMES_MAX // 2]
        current.frames.append(Frame(frame["path"], int(frame["line"]), frame["function"] or ""))
        return True
    if not text or text[0].isspace():
        return True  # the code of a frame, and marks below it
    exception = _EXCEPTION.match(text)
    if exception is None or not current.frames:
        return line.number - current.first < MESSAGE_LINES_MAX  # another writer's line in between
    current.type = exception["type"]
    current.message.append(exception["message"] or "")
    current.last = line.number
    return True
