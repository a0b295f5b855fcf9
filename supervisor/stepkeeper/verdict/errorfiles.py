"""Torch's error files: what `torch.distributed.elastic`'s `record` writes where TORCHELASTIC_ERROR_FILE says.

Their shape: `{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "...", "timestamp": "..."}}}`, or a
plain text as the outer `message`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from stepkeeper.verdict import logs, rules, tracebacks
from stepkeeper.verdict.causes import Evidence
from stepkeeper.verdict.prefixes import parse as parse_line
from stepkeeper.verdict.reading import Line
from stepkeeper.verdict.tracebacks import Raised

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
        text=logs.shorten(statement),
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
    found = tracebacks.find(lines)
    return next((one for one in found if one.statement.startswith(message[:80])), found[-1] if found else None)


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _instant(value: Any) -> float | None:
    number = _number(value)
    return float(number) if number is not None and 0 < number < INSTANT_MAX else None
