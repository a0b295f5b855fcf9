"""Why a launch ended, in one word, and what a verdict on it tells the rules.  Pure."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec


class Cause(StrEnum):
    """Why a launch ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    NODE_FAULT = "node_fault"
    NODE_LOST = "node_lost"
    NETWORK = "network"
    GPU_MEMORY = "gpu_memory"
    HOST_MEMORY = "host_memory"
    EXCEPTION = "exception"
    NUMERICAL = "numerical"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    HANG = "hang"
    STORAGE = "storage"
    CHECKPOINT = "checkpoint"
    CONFIGURATION = "configuration"
    VERSION_MISMATCH = "version_mismatch"
    SEGFAULT = "segfault"
    UNKNOWN = "unknown"


class Notice(StrEnum):
    """Why Slurm signaled the job, by Slurm's own answer."""

    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    REQUEUED = "requeued"
    CANCELLED = "cancelled"
    ASKED_TO_SAVE = "asked_to_save"
    NOT_FOR_US = "not_for_us"
    UNKNOWN = "unknown"  # Slurm could not be asked


class SkippedData(msgspec.Struct, frozen=True, kw_only=True):
    """Data that the training leaves out: that of `steps` steps from `step` on."""

    step: int
    steps: int


class Tried(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How often launches failed in the same way, since a step beyond that point was verified."""

    cause: Cause
    place: str  # an exception with its line, a node, or the rule; empty where several rules find the same failure
    count: int = 1  # position in the recovery ladder; 0 again after a launch that may have progressed unseen
    step: int | None = None  # the step at which it failed last
    repeats: int = 0  # number of all such failures; 0: written by a release that did not count them
    stepped_back: bool = False  # true: a rollback of one checkpoint was tried, after two failures at the same step


# The recovery ladder: what follows from a cause, as data.  Pure.
#
# A row is a text of the policy, such as `relaunch, relaunch after 30 s, leave, stop`: what the first, the second, the
# third failure in the same way leads to.  The last word holds for all that follow; what bounds them is said in
# `recovery`.  From the cheapest: `relaunch` on the same nodes, `leave` the node that failed, `rollback` to the
# verified step before, `requeue` without that node, `stop`.

_WORD = re.compile(r"(?P<rung>[a-z]+)(?: after (?P<after>\d{1,6}(?:\.\d{1,3})?) s)?")
WORDS_MAX = 20


class LadderError(ValueError):
    """A row cannot be read: says which word, and what is allowed."""


class Rung(StrEnum):
    """The actions of the recovery ladder."""

    RELAUNCH = "relaunch"
    LEAVE = "leave"
    ROLLBACK = "rollback"
    REQUEUE = "requeue"
    STOP = "stop"


class Try(msgspec.Struct, frozen=True):
    """One word of a row."""

    rung: Rung
    after_s: float = 0.0  # a launch waits so long: the cause may pass


def parse_ladder(text: str) -> tuple[Try, ...]:
    """Return the words of a row.

    >>> [str(word.rung) for word in parse_ladder("relaunch, leave, stop")]
    ['relaunch', 'leave', 'stop']
    >>> parse_ladder("relaunch after 30 s")[0].after_s
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

BY_EVIDENCE = frozenset((Cause.COLLECTIVE_TIMEOUT, Cause.HANG, Cause.HOST_MEMORY, Cause.SEGFAULT))
"""One failure is recognised by several rules: by a signal, or by a log or a stack, whichever arrives in time."""
