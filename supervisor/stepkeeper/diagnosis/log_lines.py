"""The lines of a log: what stands before each message (labels, times, levels, writers), and tracebacks in them.  Pure.

Collectors, launchers and loggers each put their prefix before the one of the program below them, so they are taken off
one by one, from the left, as far as their form is known.  What says who wrote the line is kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

from stepkeeper import logtext

PREFIXES_MAX = 6  # of one line
_WORDS_MAX = 6  # behind an instant

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_LABELS = (
    re.compile(r"(?!\d{1,2}:\d\d:\d\d)\s{0,8}(?P<rank>\d{1,8}): ?(?=\S|\s|$)"),  # srun --label
    re.compile(r"\[(?:rank|default)(?P<rank>\d{1,8})\]: ?"),  # torch itself; torchrun --tee
    re.compile(r"\[\d{1,8}\] (?=\[rank\d)"),  # collectors number their lines
    re.compile(r"\[(?P<writer>\d{1,4},(?:mpirank:)?(?P<rank>\d{1,8})(?:,[\w.-]{1,80})?)\]<\w{3,6}>: ?"),  # mpirun
    re.compile(
        r"\((?P<writer>(?:[^()\s]{1,80}(?:\([^()]{0,80}\))? )?pid=\d{1,9}(?:, ip=[\w.:]{1,60})?)[^()]{0,80}\) ?"
    ),  # Ray, vLLM
    re.compile(r"\((?P<writer>(?:raylet|gcs_server|autoscaler)(?:,? [^()]{0,60})?)\) ?"),
    re.compile(r"\[(?P<writer>pod/[\w./-]{1,200})\] ?"),  # kubectl logs --prefix
    re.compile(r"(?P<writer>[a-z0-9][a-z0-9.]{0,60}(?:[-_][a-z0-9.]{1,60}){1,8}) {1,40}\| "),  # docker compose
    re.compile(r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL):[\w.]{1,80}:"),  # Python's logging without a format
    re.compile(r"(?:stdout|stderr): "),
    re.compile(
        r"(?P<writer>(?!error:|[\w.]{0,80}(?:Error|Exception|Interrupt|Warning)\b)[a-z0-9][\w.-]{0,100}): "
        r"(?=\s|[\u256d-\u2570\u2502]|Traceback \(|\[rank\d|[A-Za-z_][\w.]{1,80}(?:Error|Exception|Interrupt)(?::|$))"
    ),  # pdsh, and whatever else puts a host before each line
)
_CLOCK = r"\d{1,2}:\d\d:\d\d(?:[.,]\d{1,9})?"
_DAY = (
    r"(?:\d{4}[-/.]\d\d[-/.]\d\d|\d\d[-/]\d\d(?:[-/]\d{2,4})?"
    r"|(?:[A-Z][a-z]{2} )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) {1,2}\d{1,2}(?:,? \d{4})?)"
)
_INSTANT = re.compile(
    rf"\|? ?[\[(]?(?:{_DAY}(?:T|, ?|[ _:]{{1,2}}))?{_CLOCK}(?: ?(?:Z\b|UTC\b|[+-]\d\d:?\d\d))?[\])]?[:,]?"
)
# what stands between an instant and the message: stream, level, thread, logger, place in the code
_WORD = re.compile(
    r" {0,8}(?:(?:stdout|stderr) [FP](?= )"
    r"|\|?(?:TRACE|DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL|SEVERE)\b:?(?= )"
    r"|\[(?!rank|default|Rank|\d)[^\[\]]{1,80}\]:?(?= |$)"
    r"|(?:[\w.-]{1,80} )?(?!slurm)[\w./-]{1,80}\[\d{1,9}\]:(?= )"  # syslog
    r"|[\w.$<>/-]{1,80}:[\w.<>]{1,80}:\d{1,6}:?(?= (?!\[\d{1,2}\] ))"  # not NCCL's HOST:PROCESS:THREAD [GPU]
    r"|[\w./-]{1,80}:\d{1,6}[\]:]{0,2}(?= )"
    r"|[\w.]{1,80}(?= - )"
    r"|(?!srun|slurm|sbatch|salloc|bash|error|fatal|warning|NVRM|[\w.]*(?:Error|Exception|Exit|Interrupt)\b)"
    r"[\w./@$-]{1,80}:(?= )"
    r"|[-|>]{1,2}(?= ))"
)
_REPEATED = re.compile(r" \[repeated \d+x across \w+(?: \w+)?\].{0,200}$")  # Ray says so of lines of several processes
_SAYS_RANK = re.compile(r"\[rank(\d{1,8})\]|\[(?:[Gg]lobal )?[Rr]ank[ :]?\s?(\d{1,8})\]|\bRank (\d{1,8})\] ")
# Stepkeeper's own besides what `logtext` writes today: a line of a console, a line of the library, a message of a
# command, wrapper or watcher; that a command cannot be started is output of the training
_OWN = re.compile(
    r"(?:[\d:TZ.+-]{5,40} )?\[(?:debug|info|warning|error|critical) *\] ?[a-z]+(?:_[a-z]+)*\s+"
    r"(?:[a-z_]+=\S+\s+){0,8}(?:why|reason|error|effects|said|node|code)="
    r"|[a-z]+(?:_[a-z]+)+ (?:[a-z_]+=[^ =\"]+ )*[a-z_]+=(?![-+]?(?:\d|nan\b|inf\b))\S"
    r"|stepkeeper(?: watcher \S{1,80})?: (?!cannot start )"
)
# of the library through any logger, such as `WARNING:stepkeeper_trainer:save_failed step=20`
_OWN_LOGGER = re.compile(
    r"\bstepkeeper_trainer\b(?!/)(?:.{0,40}?[a-z]+(?:_[a-z]+)* [a-z_]+=|[\s:\]|-]{1,4}[a-z]+(?:_[a-z]+)*$)"
)


class Said(NamedTuple):
    """What a line says, and who wrote it, as far as it says."""

    rank: int | None
    text: str  # empty where it is one of Stepkeeper's own
    writer: str = ""  # as its prefix names it: a host, a pod, a process of Ray


def parse_line(text: str) -> Said:
    r"""Return the rank and the writer that a line names, and the line without colours and prefixes.

    >>> parse_line("3: [rank3]: ValueError: \x1b[31mbad\x1b[0m")
    Said(rank=3, text='ValueError: bad', writer='')
    >>> parse_line('0:   File "train.py", line 3, in main')
    Said(rank=0, text='  File "train.py", line 3, in main', writer='')
    >>> parse_line("(Worker pid=41, ip=10.0.0.1) 2026-01-02 03:04:05,678 ERROR worker.py:41 -- ValueError: bad")
    Said(rank=None, text='ValueError: bad', writer='Worker pid=41, ip=10.0.0.1')
    """
    text = _ESCAPES.sub("", text).rstrip()
    rank: int | None = None
    writer = ""
    for _ in range(PREFIXES_MAX):
        if is_own(text):
            return Said(rank, "", writer)
        match = next((found for label in _LABELS if (found := label.match(text)) is not None), None)
        if match is not None:
            groups = match.groupdict()
            rank = int(groups["rank"]) if groups.get("rank") else rank
            writer = groups.get("writer") or writer
        elif (match := _INSTANT.match(text)) is None:
            break
        rest = text[match.end() :]
        text = rest if match.re is not _INSTANT else _without_words(rest)
    text = _REPEATED.sub("", text)
    if rank is None or "[Rank" in text:
        match = _SAYS_RANK.search(text)
        if match is not None:
            rank = int(next(group for group in match.groups() if group))
    return Said(rank, text, writer)


def _without_words(text: str) -> str:
    for _ in range(_WORDS_MAX):
        match = _WORD.match(text)
        if match is None:
            break
        text = text[match.end() :]
    return text.removeprefix(" ")


def is_own(text: str) -> bool:
    """Return whether Stepkeeper wrote a line: it is no output of the training.

    A supervisor's line has its keys in a fixed order; one of the library is an event and its values.
    """
    return (
        logtext.is_own(text)
        or _OWN.match(text) is not None
        or ("stepkeeper_trainer" in text and _OWN_LOGGER.search(text) is not None)
    )


# Logs of any size and content, as lines with their rank.
#
# A log is read at both ends only: how it began, and how it ended.  Colours, progress bars and the prefixes of
# launchers and log collectors are taken off (prefixes.py), and so are Stepkeeper's own lines: they are no output of the
# training.

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


def read_log(file: BinaryIO, ends: Ends = THOROUGH) -> Log:
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
            line, *inside = _unfold(state)
            said = parse_lines(line)
            yield Line(number, said.rank, said.text, said.writer)
            for each in inside:
                yield Line(number, said.rank, each[:LINE_CHARACTERS_MAX].decode(errors="replace"), said.writer)


_FOLDED = b"Traceback (most recent call last):\\n"
_IN_JSON = re.compile(rb'(?:[^"\\]|\\.)*+')  # possessive: it keeps no place for each character
_IN_PYTHON = re.compile(rb"(?:[^'\\]|\\.)*+")
UNFOLDED_MAX = 1000  # lines of one traceback; the last ones have the exception
_ESCAPED = re.compile(rb"\\(.)")
_MEANT = {b"n": b"\n", b"t": b"\t"}


def _unfold(raw: bytes) -> list[bytes]:
    r"""Return a line, and behind it those of a traceback that it has as one string of JSON or Python.

    >>> _unfold(rb'{"error": "Traceback (most recent call last):\n  File \"a.py\", line 1\nKeyError: 1", "rank": 3}')
    [b'{"error": "Traceback (most recent call last):', b'  File "a.py", line 1', b'KeyError: 1', b'", "rank": 3}']
    """
    at = raw.find(_FOLDED)
    string = (_IN_JSON if b'File \\"' in raw else _IN_PYTHON).match(raw, at) if at >= 0 else None
    if string is None:
        return [raw]
    first, *lines = _ESCAPED.sub(lambda escaped: _MEANT.get(escaped[1], escaped[1]), string[0]).split(b"\n")
    return [raw[:at] + first, *lines[-UNFOLDED_MAX:], raw[string.end() :]]


def parse_lines(raw: bytes) -> Said:
    """Return what a line says, without colours and prefixes; of a very long one both ends."""
    if len(raw) > LINE_CHARACTERS_MAX:
        half = LINE_CHARACTERS_MAX // 2
        raw = raw[:half] + b" ... " + raw[-half:]
    return parse_line(raw.decode(errors="replace"))


# Python's tracebacks: which exception, and where in the user's own code.

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
    r"|\[ERROR\] \d{4}-|E[A-Z]\d{4}: "  # of Ascend's CANN
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


def find_raised(lines: Iterable[Line]) -> list[Raised]:
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
