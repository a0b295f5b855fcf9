"""The recovery ladder: what follows from a cause, as data.  Pure.

A row is a text of the policy, such as `relaunch, relaunch after 30 s, leave, stop`: what the first, the second, the
third failure in the same way leads to.  The last word holds for all that follow; what bounds them is said in
`settling`.  From the cheapest: `relaunch` on the same nodes, `leave` the node that failed, `rollback` to the
verified step before, `requeue` without that node, `stop`.
"""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

from stepkeeper.core.causes import Cause

_WORD = re.compile(r"(?P<rung>[a-z]+)(?: after (?P<after>\d{1,6}(?:\.\d{1,3})?) s)?")
WORDS_MAX = 20


class LadderError(ValueError):
    """A row cannot be read: says which word, and what is allowed."""


class Rung(StrEnum):
    """What can follow from a failure."""

    RELAUNCH = "relaunch"
    LEAVE = "leave"
    ROLLBACK = "rollback"
    REQUEUE = "requeue"
    STOP = "stop"


class Try(msgspec.Struct, frozen=True):
    """One word of a row."""

    rung: Rung
    after_s: float = 0.0  # a launch waits so long: the cause may pass


def parse(text: str) -> tuple[Try, ...]:
    """Return the words of a row.

    >>> [str(word.rung) for word in parse("relaunch, leave, stop")]
    ['relaunch', 'leave', 'stop']
    >>> parse("relaunch after 30 s")[0].after_s
    30.0

    Raises:
        LadderError: it cannot be read, or something stands behind `stop`.
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) > WORDS_MAX:
        raise LadderError(f"{len(words)} words; at most {WORDS_MAX}")
    row = tuple(_parse_word(word) for word in words)
    if Rung.STOP in [word.rung for word in row[:-1]]:
        raise LadderError("nothing comes after `stop`")
    return row


def _parse_word(text: str) -> Try:
    match = _WORD.fullmatch(text)
    allowed = f"one of {', '.join(Rung)} is wanted, or `relaunch after SECONDS s`"
    if match is None or match["rung"] not in set(Rung):
        raise LadderError(f"`{text[:40]}`: {allowed}")
    rung = Rung(match["rung"])
    if match["after"] and rung in (Rung.REQUEUE, Rung.STOP):
        raise LadderError(f"`{text[:40]}`: {rung} does not wait: {allowed}")
    return Try(rung, float(match["after"] or 0.0))


UNCHARGED = frozenset((Cause.NODE_FAULT, Cause.NODE_LOST, Cause.STORAGE, Cause.PREEMPTED, Cause.TIME_LIMIT))
"""Not the training's fault: in no budget of it, while its row of words lasts."""

OF_NODE = frozenset((Cause.NODE_FAULT, Cause.NODE_LOST))

IN_A_STATE = frozenset((Cause.COLLECTIVE_TIMEOUT, Cause.HANG, Cause.SEGFAULT, Cause.UNKNOWN))
"""What the state of a checkpoint can cause without saying so: where it fails at the same step twice, the step before is
tried once, whatever the row says.  Exceptions, NaN and damaged checkpoints say so: their rows hold; but NaN in the very
first step from a checkpoint, twice, is taken for its state's."""
