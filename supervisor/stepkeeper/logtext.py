"""One line of a job's log as text for people, and how to recognise such a line again.  Pure.

    [stepkeeper 2026-09-21 10:00:00] decision: rank 1 on n2 ended with signal 9 (effects=relaunch)

Readers of a job's log that look for the training's output skip our lines, in this form or as JSON.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from stepkeeper.printing import clean

_OWN = re.compile(
    r"\[stepkeeper \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] [\w ]+:|"
    r'\{"timestamp": "[\dT:.Z+-]{19,40}", "level": "[a-z]+", "event": "\w+"'
)
_LOUD = ("warning", "error", "critical")
_YELLOW, _BOLD, _PLAIN = "\x1b[33m", "\x1b[1m", "\x1b[0m"


def as_text(event: Mapping[str, object], at: float, *, colour: bool = False) -> str:
    """Return one line of text, in the time zone of the machine, as Slurm's own logs are.

    Args:
        event: `event` is its name, `level` how loud it is, `why` its sentence; the other keys follow as they are.
        at: Unix seconds.
        colour: for a terminal.

    >>> line = as_text({"event": "decision", "level": "info", "why": "the nodes are clear", "effects": ["a", "b"]}, 0.0)
    >>> line.partition("] ")[2]
    'decision: the nodes are clear (effects=a,b)'
    >>> as_text({"event": "progress", "level": "info", "step": 3, "loss": None}, 0.0).partition("] ")[2]
    'progress: step=3'
    """
    name, level, why = str(event.get("event", "")), str(event.get("level", "info")), event.get("why")
    rest = " ".join(
        f"{key}={_value(value)}"
        for key, value in event.items()
        if key not in ("event", "level", "why", "timestamp") and value not in (None, [], ())
    )
    said = rest if not why else f"{clean(str(why))} ({rest})" if rest else clean(str(why))
    loud = level.upper() + " " if level in _LOUD else ""
    stamp = time.strftime("[stepkeeper %Y-%m-%d %H:%M:%S]", time.localtime(at))
    if colour:
        return f"{stamp} {_YELLOW + loud + _PLAIN if loud else ''}{_BOLD}{name}{_PLAIN}: {said}".rstrip()
    return f"{stamp} {loud}{name}: {said}".rstrip()


def _value(value: object) -> str:
    text = ",".join(clean(str(each)) for each in (value if isinstance(value, (list, tuple)) else (value,)))
    return text if text and not re.search(r"[\s\"()]", text) else '"' + text.replace('"', "'") + '"'


def is_own(line: str) -> bool:
    """Tell whether a line of a job's log is ours, as text or as JSON.

    >>> is_own(as_text({"event": "exit", "level": "error", "code": 1}, 0.0)), is_own("ValueError: [stepkeeper]")
    (True, False)
    """
    return _OWN.match(line) is not None
