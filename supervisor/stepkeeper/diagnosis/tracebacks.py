"""Python's tracebacks in a log: which exception, and where in the user's own code.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from stepkeeper.diagnosis.log_lines import Line

MESSAGE_LINES_MAX = 12  # of an exception
FRAMES_MAX = 400
LEAD_CHARACTERS_MAX = 300  # before the first line of a traceback
MESSAGE_CHARACTERS_MAX = 2000
FOREIGN_LINES_MAX = 12  # of others, one after the other, between the lines of a traceback

_BEGIN = re.compile(r"(?P<lead>.*?)(?P<original>Original )?Traceback \(most recent call last\)")
_REMOTE = re.compile(r"[\w.]*RayTaskError\(")  # the frames of the other process follow, and its exception
_BOXED = re.compile(r"[\u256d\u2502\u2570|+]")  # rich draws a box
_BOXED_FRAME = re.compile(r"\u2502 (?P<path>\S{1,1000}?):(?P<line>\d{1,9}) in (?P<function>\S{1,200})\s*(?:\u2502|$)")
_FRAME = re.compile(r'\s*File "(?P<path>[^"]{1,1000})", line (?P<line>\d{1,9})(?:, in (?P<function>.{1,200}?))?\s*$')
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]{2,200})(?::\s?(?P<message>.*))?$")
_CHAINED = re.compile(r"(?P<how>During handling of the above exception|The above exception was the direct cause)")
_FOREIGN = re.compile(
    r"(?:site|dist)-packages/|/lib(?:64)?/python\d|<frozen |/bin/(?:torchrun|accelerate|deepspeed)$|^<string>"
)
_GOES_ON = re.compile(
    r"\s+\S|nccl\w+(?:Error|Usage)|Last error|CUDA kernel errors|For debugging|Compile with|Search for "
)


_Writer = tuple[int | None, str]


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
    original: bool = False  # the one before is what another process raised again: this one is where it came from
    writer: str = ""

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

    def __init__(self, line: Line, begin: re.Match[str], before: str) -> None:
        self.first = line.number
        self.last = line.number
        self.line = line
        self.chained = bool(before)
        self.direct = before.startswith("The above")
        self.original = bool(begin["original"])
        self.lead = _shape(begin["lead"])
        self.foreign = 0
        self.frames: list[Frame] = []
        self.type = ""
        self.message: list[str] = []

    def own(self, text: str) -> str:
        """Return a line without what stood before the first one, where it stands before this one, too."""
        match = self.lead.match(text) if self.lead is not None else None
        return text[match.end() :] if match is not None else text

    def closed(self) -> Raised | None:
        """Return what was read; nothing of a traceback without its last line."""
        if not self.type:
            return None
        return Raised(
            self.type,
            "\n".join(self.message).strip()[:MESSAGE_CHARACTERS_MAX],
            tuple(self.frames),
            self.first,
            self.last,
            self.line.rank,
            self.chained,
            self.direct,
            self.original,
            self.line.writer,
        )


def _shape(lead: str) -> re.Pattern[str] | None:
    """Return an expression for what stands before the lines of a traceback: the same but for its numbers."""
    if not lead.strip() or _BOXED.match(lead) or len(lead) > LEAD_CHARACTERS_MAX:
        return None
    return re.compile(re.sub(r"\d+", r"\\d+", re.escape(lead)))


def find(lines: Iterable[Line]) -> list[Raised]:
    """Return the exceptions in the order of their last lines.

    Ranks write between each other's lines: each writer has a traceback of its own.
    """
    found: list[Raised] = []
    opened: dict[_Writer, _Open] = {}
    chain: dict[_Writer, str] = {}
    for line in lines:
        writer = (line.rank, line.writer)
        current = opened.get(writer)
        text = line.text if current is None else current.own(line.text)
        how = _CHAINED.match(text)
        begin = _BEGIN.match(text) if "Traceback" in text else None
        if how or begin:
            if current is not None and (raised := current.closed()):
                found.append(raised)
            opened.pop(writer, None)
            if how:
                chain[writer] = how["how"]
            elif begin:
                # a prefix of the one before stands before this one, too
                whole = _BEGIN.match(line.text) or begin
                opened[writer] = _Open(line, whole, chain.pop(writer, ""))
        elif current is not None and not _continues(current, line.number, text):
            if raised := current.closed():
                found.append(raised)
            del opened[writer]
    found += [raised for each in opened.values() if (raised := each.closed())]
    return sorted(found, key=lambda raised: raised.last_line)


def _continues(current: _Open, number: int, text: str) -> bool:
    """Add a line to a traceback; False where it is none of it."""
    if current.type:
        announced = current.message[-1].startswith("Last error")  # by NCCL, on a line of its own
        if len(current.message) >= MESSAGE_LINES_MAX or not (announced or _GOES_ON.match(text)):
            return False
        current.message.append(text)
        current.last = number
        return True
    frame = _FRAME.match(text) or _BOXED_FRAME.match(text)
    if frame is not None:
        if len(current.frames) >= FRAMES_MAX:
            del current.frames[FRAMES_MAX // 2]
        current.frames.append(Frame(frame["path"], int(frame["line"]), frame["function"] or ""))
        current.foreign = 0
        return True
    if not text or text[0].isspace() or _BOXED.match(text):
        return True  # the code of a frame, marks below it, a box around it
    if _REMOTE.match(text):
        current.frames.clear()
        current.foreign = 0
        return True
    exception = _EXCEPTION.match(text)
    if exception is None or not current.frames:
        current.foreign += 1
        return current.foreign < FOREIGN_LINES_MAX
    current.type = exception["type"]
    current.message.append(exception["message"] or "")
    current.last = number
    return True
