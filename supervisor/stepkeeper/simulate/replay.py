"""Decide a real run again, and find where today's rules differ from what was decided then.

The journal leaves out what came to nothing: most messages of steps, some of quick saves.  What these changed in the
state stands in the record after them, so the replay is exact.  Journals of 0.1 have none of that: there the state
lacks a step number, a pace or a save in flight, and a difference right after such a gap may be none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.decide import decide
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import State
from stepkeeper.reason_text import text
from stepkeeper.run_store.journal import Line, Record
from stepkeeper.run_store.recorder import changed

REPEATS_KEPT = 300  # where storage failed in the middle of a write, records may stand there twice
_SHOWN = ("phase", "launch", "failures", "node_losses", "best_step", "nodes")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One record that would be decided otherwise today."""

    line: int  # of the journal, from 1
    record: Record
    then: dict[str, Any]  # what differs: key -> as it stands there
    now: dict[str, Any]  # key -> as it is decided today


class Replayed(msgspec.Struct, kw_only=True):
    """What came of it."""

    attempts: int = 0
    records: int = 0  # that were decided again
    samples: int = 0  # records that nothing followed from: one of many of their kind
    differences: list[Difference] = msgspec.field(default_factory=list)
    unreadable: int = 0  # lines: torn, or of a newer version
    repeated: int = 0
    without_start: int = 0  # records of attempts whose beginning is missing
    unknown: int = 0  # records with changes of a state that this version does not know


def replay(
    lines: Iterable[Line], policies: Mapping[int, Policy], *, words: bool = False, stop_after: int = 1
) -> Replayed:
    """Decide every record again, in order.

    Args:
        lines: of the journal.
        policies: of the attempts; an attempt without one goes by the defaults.
        words: a reason that is worded otherwise is a difference too.
        stop_after: so many differences end it.
    """
    found = Replayed()
    states: dict[tuple[int, int, int], State] = {}
    for number, record in _readable(lines, found):
        key = (record.attempt, record.job_id, record.restart_count)
        if key not in states:
            if not isinstance(record.event, on.AttemptStarted | on.SignalReceived):
                found.without_start += 1
                continue
            states[key] = State()  # a signal may come before the attempt knows its allocation
            found.attempts += 1
        if record.sample:
            found.samples += 1
            continue
        states[key] = _with_missed(states[key], record, found)
        decision = decide(states[key], record.event, policies.get(record.attempt, Policy()))
        states[key] = decision.state
        found.records += 1
        then, now = _then(record, decision.state), _now(decision.state, decision.effects)
        if words:
            then["why"], now["why"] = record.why, text(decision.why)
        differing = [name for name in then if then[name] != now[name]]
        if differing:
            difference = Difference(
                line=number,
                record=record,
                then={name: then[name] for name in differing},
                now={name: now[name] for name in differing} | {"why": text(decision.why)},
            )
            found.differences.append(difference)
            if len(found.differences) >= stop_after:
                break
    return found


def _readable(lines: Iterable[Line], found: Replayed) -> Iterator[tuple[int, Record]]:
    """Yield the records with the numbers of their lines; the others are counted."""
    recent: dict[bytes, None] = {}
    for number, line in enumerate(lines, start=1):
        if line.record is None:
            found.unreadable += 1
        elif line.data in recent:
            found.repeated += 1
        else:
            recent[line.data] = None
            if len(recent) > REPEATS_KEPT:
                del recent[next(iter(recent))]
            yield number, line.record


def _with_missed(state: State, record: Record, found: Replayed) -> State:
    """Return the state with what the events that are not in the journal have changed."""
    try:
        return changed(state, record.missed)
    except msgspec.ValidationError:
        found.unknown += 1
        return state


def _then(record: Record, state: State) -> dict[str, Any]:
    shown = {name: getattr(record, name) for name in _SHOWN}
    if record.nodes is None:  # as in the record before, which was compared
        shown["nodes"] = state.nodes.usable
    return {**shown, "effects": [_plain(each) for each in record.effects]}


def _now(state: State, effects: Iterable[msgspec.Struct]) -> dict[str, Any]:
    return {
        "phase": state.phase,
        "launch": state.launch.number,
        "failures": state.budgets.failures,
        "node_losses": state.budgets.node_losses,
        "best_step": state.budgets.best_step,
        "nodes": state.nodes.usable,
        "effects": [_plain(each) for each in effects],
    }


def _plain(effect: msgspec.Struct) -> dict[str, Any]:
    """Return an effect without its words: a sentence may be worded better without deciding otherwise."""
    plain: dict[str, Any] = msgspec.to_builtins(effect)
    return {key: value for key, value in plain.items() if key != "reasons"}
