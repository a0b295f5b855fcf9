"""A log, line by line, as evidence.  Pure but for the rules, which are read once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis import rules
from stepkeeper.diagnosis.classify import Evidence, Plane, Role
from stepkeeper.diagnosis.log_lines import Line, Log, Raised, find_raised, parse_line

# The last lines of a log that look like errors, whatever the rules make of them.  Pure.

LINES_MAX = 8
CHARACTERS_MAX = 300
_ERROR_LIKE = re.compile(
    r"(?i)error\b|exception|\bfail(?:ed|ure|s)?\b|\bfatal\b|panic|abort(?:ed|ing)?\b|\bkill(?:ed|ing)\b|refused|denied"
    r"|\bcannot\b|can't|could not|couldn't|unable to|timed? ?out|terminat|\bsig[a-z]{3,5}\b|no such|not found"
    r"|core dumped|assert|out of memory|\boom\b|\bnan\b|corrupt|invalid|unreachable|expired"
)
_CHATTER = re.compile(
    r"NCCL INFO|^Traceback|(?i:\bwarn(?:ing)?\b)|^\s+File \"|^frame #\d+|^\s*[~^]+\s*$|\b0 (?:errors|failures)\b"
)


def error_lines(log: Log, *, rank: int | None = None) -> tuple[Line, ...]:
    """Return the last error-like lines of a log, of one rank where it has any; else simply its last lines."""
    said = [line for line in log.lines if line.text.strip()]
    of_rank = [line for line in said if line.rank == rank] if rank is not None else []
    for lines in (of_rank, said):
        found = _distinct(line for line in lines if _ERROR_LIKE.search(line.text) and not _CHATTER.search(line.text))
        if found:
            return tuple(found[-LINES_MAX:])
    return tuple((of_rank or said)[-LINES_MAX:])


def _distinct(lines: Iterable[Line]) -> list[Line]:
    """Return lines without those that say the same as the one before."""
    found: list[Line] = []
    for line in lines:
        if not found or found[-1].text != line.text:
            found.append(line)
    return found


# Who a line is about: node, process, GPU, as far as it says.  Pure.

_OF_ANOTHER = r"\b(?:Worker IP|Owner Ip) address: ([\d.]+|[\da-f:]+)(?= |$)"  # Ray tells of it wherever the driver runs
_ELSEWHERE = re.compile(_OF_ANOTHER)
_NCCL = r"^(?:[\w.-]+):"  # HOST:PROCESS:THREAD [GPU]
_NODE = re.compile(
    r"\bfailed on node ([\w.-]+)|^srun: error: ([\w.-]+): tasks? \d|^srun: error: Node failure on ([\w.-]+)"
    r"|\*\*\* (?:STEP|JOB) \S+ ON ([\w.-]+) |\bhost\s*: ([\w.-]+)$|^slurmstepd-([\w.-]+): "
    rf"|^([\w.-]+):\d+:\d+ \[\d+\] |{_OF_ANOTHER}"
    r"|^\[([A-Za-z][\w.-]*):\d+:\d+:\d+\] |\b[Rr]ank \d+, node ([\w.-]+), device "
)
_PID = re.compile(
    r"\bpid=(\d{1,9})\b|\(pids?(?:\(s\))?:? (\d{1,9})\)|\b(?:PID|pid):? (\d{1,9})\b"
    rf"|{_NCCL}(\d{{1,9}}):\d+ \[\d+\] "
    r"|\bProcess (\d{1,9}) (?:got|has|was|\()|\bKilled process (\d{1,9})\b"
)
_GPU = re.compile(rf"\bGPU (\d{{1,2}})\b|\bcuda:(\d{{1,2}})\b|{_NCCL}\d+:\d+ \[(\d{{1,2}})\] |\bXid \((PCI:[\w:.]+)\)")
_TASK = re.compile(r"^srun: error: [\w.-]+: task (\d{1,8}): |\b[Rr]ank (\d{1,8}), node ")
_WRITER_IP = re.compile(r"\bip=([\w.:]+)")
_WRITER_HOST = re.compile(r"(?!(?:raylet|gcs_server|autoscaler)$)[\w.-]+$")  # those are programs of Ray


class Who(NamedTuple):
    """Whom a line is about."""

    node: str = ""
    pid: int | None = None
    gpu: str = ""
    rank: int | None = None


def find_who(text: str, writer: str = "") -> Who:
    """Return whom a line names, or who wrote it.

    >>> find_who("srun: error: gpu-33: task 3: Out Of Memory")
    Who(node='gpu-33', pid=None, gpu='', rank=3)
    >>> find_who("ValueError: bad", "Worker pid=41, ip=10.0.0.1")
    Who(node='10.0.0.1', pid=41, gpu='', rank=None)
    >>> find_who("A worker died. Worker IP address: 10.0.0.7 Worker port: 10015 Worker PID: 41", "raylet")
    Who(node='10.0.0.7', pid=41, gpu='', rank=None)
    >>> find_who("[n7:4711:0:4711] Caught signal 11 (Segmentation fault: address not mapped to object)").node
    'n7'
    >>> find_who("RuntimeError: Rank 1, node n4, device 1, iteration 0: Unexpected result nan")
    Who(node='n4', pid=None, gpu='', rank=1)
    """
    by_prefix = _WRITER_IP.search(writer)
    host = by_prefix[1] if by_prefix else writer if _WRITER_HOST.match(writer) and "=" not in writer else ""
    pid = _first(_PID, text) or _first(_PID, writer)
    task = _first(_TASK, text)
    return Who(
        node=_first(_NODE, text) or host,
        pid=int(pid) if pid else None,
        gpu=_first(_GPU, text),
        rank=int(task) if task else None,
    )


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return next((group for group in match.groups() if group), "") if match else ""


TEXT_CHARACTERS_MAX = 400
EVIDENCE_MAX = 200  # of one log; the first of each rule and rank
END_LINES = 20
SURVIVED_AFTER_STEPS = 5  # that one rank tells of behind an error: training went on
SURVIVED_THE_END_AFTER_STEPS = 30  # where Slurm ends the job: ranks write on until it kills them (KillWait)
ENDS_OF_SLURM = frozenset({Cause.TIME_LIMIT, Cause.PREEMPTED, Cause.CANCELLED, Cause.NODE_LOST})
_GENERIC = frozenset({"python-exception", "exception-without-traceback", "loader-died"})
_LAST_ERROR = re.compile(r"Last error:\s*(?P<said>\S.*)", re.DOTALL)  # NCCL's own word, in an exception of torch
_WARNING = re.compile(r"(?:\[rank\d+\]:)?\[W\d{0,4}[ :]|.{0,200}\b\w*Warning: ")  # of torch's C++ and of Python
WARNING_SHARE = 0.6  # of a rule's confidence that is left where the program only warns
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?")
_TELLING_NUMBER = re.compile(r"(?i)scale|errno|exit|code|signal|xid|status")
_PROGRESS = re.compile(
    r"(?i)\bloss\w*['\"]?\s*[:=|]?\s*\d|\d(?:it/s|s/it)\b|\biter(?:ation)?s?\W{1,3}\d|\b(?:global_)?step\W{1,3}\d+\b"
)
_STEP = re.compile(r"(?i)(?:\b(?:global_)?(?:step|iter\w*|batch)s?\W{1,3}|\b(?=\d+ ?/ ?\d))(\d+)")


def log_evidence(log: Log, *, node: str = "") -> list[Evidence]:
    """Return what the rules make of a log, in its order; the same rule for the same rank once, with a count.

    Args:
        log: what was read of it.
        node: whose log it is; empty: the node is the one that a line names, if it does.  What a line says of a process
            elsewhere is not of this node.
    """
    table = rules.load()
    raised = find_raised(log.lines)
    inside = _inside(raised)
    last = len(log.lines) - END_LINES
    found = [each for each in (_of_exception(one, table, node) for one in raised) if each is not None]
    progress: set[str] = set()  # shapes of progress lines that no rule matches: a log has a million of few shapes
    for index, line in enumerate(log.lines):
        if (line.rank, line.number) in inside or not line.text:
            continue
        shape = _shape(line.text)
        if shape in progress and index < last:
            continue
        row = table.of_line(line.text, end=index >= last)
        if row is None and shape:
            progress.add(shape)
        if row is not None:
            said = _evidence(row, line, node)
            found.append(_weakened(said) if _WARNING.match(line.text) else said)
    found = _unchain(sorted(found, key=lambda each: each.line or 0), raised)
    return _once(_survived(found, log.lines, table))


def _shape(text: str) -> str:
    """Return a line of progress or chatter without its numbers; nothing of any other, nor where a number may matter."""
    if "NCCL INFO" not in text and (_PROGRESS.search(text) is None or _TELLING_NUMBER.search(text)):
        return ""
    return _NUMBER.sub("0", text)


def _inside(raised: list[Raised]) -> set[tuple[int | None, int]]:
    """Return the lines of tracebacks: only their last ones speak, through the exception."""
    return {(one.rank, number) for one in raised for number in range(one.first_line, one.last_line + 1)}


def _of_exception(one: Raised, table: rules.Rules, node: str) -> Evidence | None:
    last = _LAST_ERROR.search(one.statement)
    row = table.of_line(last["said"], end=False) if last is not None else None
    if row is None:
        row = table.of_exception(one.statement, [f"{frame.path}:{frame.function}" for frame in one.frames])
    if row is None:
        return None
    line = Line(one.last_line, one.rank, one.statement, one.writer)
    return msgspec.structs.replace(_evidence(row, line, node), location=one.location if one.frames else "")


def _evidence(row: rules.Row, line: Line, node: str) -> Evidence:
    about = find_who(line.text, line.writer)
    return Evidence(
        plane=row.plane,
        rule=row.id,
        cause=row.cause,
        role=row.role,
        confidence=row.confidence,
        text=shorten(line.text),
        rank=line.rank if line.rank is not None else about.rank,
        node=_first(_ELSEWHERE, line.text) or node or about.node,
        line=line.number,
        pid=about.pid,
        gpu=about.gpu,
    )


def _weakened(said: Evidence) -> Evidence:
    """Return what a warning is worth: the program goes on after it."""
    if said.role is not Role.ROOT:
        return said
    return msgspec.structs.replace(said, role=Role.CASCADE, confidence=round(WARNING_SHARE * said.confidence, 3))


def shorten(text: str) -> str:
    """Return a text in one line, at most so long as a person reads it."""
    words = " ".join(text.split())
    return words if len(words) <= TEXT_CHARACTERS_MAX else words[:TEXT_CHARACTERS_MAX] + "..."


def _unchain(found: list[Evidence], raised: list[Raised]) -> list[Evidence]:
    """Of exceptions raised one from another, drop the ones that say less.

    What another process raised again says nothing of its own.  Where a rule knows one of two, it counts; else the one
    that was named as the cause, else the last, which nobody handled.
    """
    specific = {each.line for each in found if each.role is Role.ROOT and each.rule not in _GENERIC}
    generic = {each.line for each in found if each.rule in _GENERIC}
    dropped: set[int | None] = set()
    before: dict[tuple[int | None, str], Raised] = {}
    for one in sorted(raised, key=lambda each: each.last_line):
        writer = (one.rank, one.writer)
        previous = before.get(writer)
        before[writer] = one
        if previous is None or not (one.chained or one.original):
            continue
        inner, outer = previous.last_line, one.last_line
        if inner == outer:
            continue  # of one record of a logger: which line is whose is not known
        if one.original:
            dropped.add(inner)
        elif outer in generic and one.direct:
            dropped.add(outer)
            before[writer] = previous
        elif inner in generic and (outer in specific or outer in generic):
            dropped.add(inner)
    return [each for each in found if each.line not in dropped]


def _once(found: list[Evidence]) -> list[Evidence]:
    """Return the first piece of each rule and rank, or the first that training did not outlive, with a count."""
    first: dict[tuple[str, int | None], Evidence] = {}
    for each in found:
        key = (each.rule, each.rank)
        known = first.get(key)
        if known is not None:
            kept, other = (each, known) if each.confidence > known.confidence else (known, each)
            location = kept.location or other.location
            first[key] = msgspec.structs.replace(kept, count=known.count + 1, location=location)
        elif len(first) < EVIDENCE_MAX:
            first[key] = each
    return list(first.values())


def _survived(found: list[Evidence], lines: tuple[Line, ...], table: rules.Rules) -> list[Evidence]:
    """Make errors that training went on after confirmations: they did not end it."""
    progress = [line for line in lines if _PROGRESS.search(line.text)]
    before, before_the_end = (
        _last_behind_which(progress, enough) for enough in (SURVIVED_AFTER_STEPS, SURVIVED_THE_END_AFTER_STEPS)
    )
    persists = {rule.row.id for rule in table.rules if rule.row.persists}
    result = []
    for each in found:
        is_the_end = each.plane is Plane.SLURM and each.cause in ENDS_OF_SLURM
        survived = (each.line or 0) < (before_the_end if is_the_end else before)
        if survived and each.role is not Role.CONFIRMATION and each.rule not in persists:
            result.append(msgspec.structs.replace(each, role=Role.CONFIRMATION, confidence=0.3 * each.confidence))
        else:
            result.append(each)
    return result


def _last_behind_which(progress: list[Line], enough: int) -> int:
    """Return the last line from which on a rank tells of so many steps: what stands before it did not end training.

    Each rank for itself: when one fails, all others may still tell of the step that they are in.  Where no label says
    whose a line is, the numbers in it say whether it is another step.
    """
    steps: dict[int | None, set[object]] = {}
    for line in reversed(progress):
        of_rank = steps.setdefault(line.rank, set())
        step = _STEP.search(line.text)  # the first number: micro-batches may be counted behind it
        of_rank.add(step[1] if step else line.number)
        if len(of_rank) >= enough:
            return line.number
    return 0


# Torch's error files: what `torch.distributed.elastic`'s `record` writes where TORCHELASTIC_ERROR_FILE says.
#
# Their shape: `{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "...", "timestamp": "..."}}}`,
# or a plain text as the outer `message`.

BYTES_MAX = 1024 * 1024
INSTANT_MAX = 1e11  # Unix seconds; a larger one is no instant


def error_file_evidence(data: bytes, *, rank: int | None = None, node: str = "") -> Evidence | None:
    """Return what an error file says; None where it is empty, torn, or of another shape."""
    try:
        document = msgspec.json.decode(data[:BYTES_MAX])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    message, extra = _parts(document)
    if not message:
        return None
    stack = extra.get("py_callstack")
    exception = _last(str(stack), message) if isinstance(stack, str) else None
    statement = exception.statement if exception is not None else message
    frames = [f"{frame.path}:{frame.function}" for frame in exception.frames] if exception is not None else []
    row = rules.load().of_exception(statement, frames)
    if row is None:
        return None
    return Evidence(
        plane=row.plane,
        rule=row.id,
        cause=row.cause,
        role=row.role,
        confidence=row.confidence,
        text=shorten(statement),
        rank=rank if rank is not None else _number(extra.get("rank")),
        node=node,
        at=_instant(extra.get("timestamp")),
        location=exception.location if exception is not None and exception.frames else "",
    )


def _parts(document: Any) -> tuple[str, dict[str, Any]]:
    message = document.get("message") if isinstance(document, dict) else None
    if isinstance(message, str):
        return message, {}
    if not isinstance(message, dict):
        return "", {}
    text, extra = message.get("message"), message.get("extraInfo")
    return (text if isinstance(text, str) else ""), (extra if isinstance(extra, dict) else {})


def _last(stack: str, message: str) -> Raised | None:
    lines = [Line(number, None, parse_line(text).text) for number, text in enumerate(stack[:BYTES_MAX].split("\n"), 1)]
    found = find_raised(lines)
    return next((one for one in found if one.statement.startswith(message[:80])), found[-1] if found else None)


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _instant(value: Any) -> float | None:
    number = _number(value)
    return float(number) if number is not None and 0 < number < INSTANT_MAX else None
