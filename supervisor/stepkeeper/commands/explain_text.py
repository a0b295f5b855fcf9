"""A verdict for people: what happened, who says so, what Stepkeeper does next, how to confirm it, what to do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepkeeper import printing
from stepkeeper.core import ladder
from stepkeeper.core.causes import Cause
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.ladder import Rung
from stepkeeper.redaction import redact
from stepkeeper.seeing.model import left_out_in_words
from stepkeeper.verdict import rules
from stepkeeper.verdict.causes import Evidence, Role, Verdict
from stepkeeper.verdict.joining import NO_EVIDENCE

SHOWN_MAX = 6  # pieces of evidence
SURE, LIKELY = 0.85, 0.6
GOES_ON = (ExitCode.REQUEUED, ExitCode.SUPERSEDED)  # ends of attempts that do not end the run
_RUNGS = {
    Rung.RELAUNCH: "starts the ranks again on the same nodes",
    Rung.LEAVE: "goes on without that node",
    Rung.ROLLBACK: "goes back to a verified checkpoint before it",
    Rung.REQUEUE: "requeues the job",
    Rung.STOP: "stops, and calls a person (notify_command)",
}
_PLACES = re.compile(r"\b(?:RUN|JOB|NODE)\b")


def message(verdict: Verdict) -> str:
    """Return what the program or Slurm itself said; of an exit, what the same rank said besides."""
    if not verdict.evidence:
        return ""
    first = verdict.evidence[0]
    if not first.rule.startswith("exit-"):
        return first.text
    return next((each.text for each in verdict.evidence if each.location and each.rank in (None, first.rank)), "")


def who(verdict: Verdict) -> dict[str, Any]:
    """Return who failed and where the log has it, by the first piece of evidence and others of the same rank."""
    pieces = [each for each in verdict.evidence if each is verdict.evidence[0] or each.rank == verdict.rank is not None]
    found = {
        "rank": verdict.rank,
        "node": verdict.node or next((each.node for each in pieces if each.node), ""),
        "pid": next((each.pid for each in pieces if each.pid is not None), None),
        "gpu": next((each.gpu for each in pieces if each.gpu), ""),
        "log": next((f"{each.log}:{each.line}" for each in pieces if each.log and each.line is not None), ""),
    }
    return {key: value for key, value in found.items() if value not in (None, "")}


def commands(cause: Cause, known: Mapping[str, str]) -> list[str]:
    """Return what confirms a cause, with what is known of RUN, JOB and NODE filled in."""
    filled = [
        _PLACES.sub(lambda place: known.get(place[0]) or place[0], command)
        for command in rules.load().meanings[cause].confirm
    ]
    return [command for command in filled if "RUN" in known or not re.search(r"\bRUN\b", command)]


def following(cause: Cause, row: Sequence[ladder.Try], about: Mapping[str, Any]) -> str:
    """Say what Stepkeeper does next, or did."""
    end = about.get("end")
    if about.get("followed"):
        return f"launch {about['followed']} followed: stepkeeper events {about['run']}"
    if end is not None and end["code"] == ExitCode.FINISHED:
        return "nothing: the training is finished"
    if end is not None and end["code"] not in GOES_ON:
        resume = f"stepkeeper resume {shlex.quote(str(about['run']))}"
        return f"nothing: the run has ended; to go on from its newest checkpoint: {resume}"
    supervised = "" if "run" in about else "in a supervised run, "
    if fixed := rules.load().meanings[cause].next:
        return f"{supervised}{fixed}"
    words = [f"{_RUNGS[word.rung]}{f' after {word.after_s:g} s' if word.after_s else ''}" for word in row]
    again = "".join(f"; if it fails in the same way again, it {word}" for word in words[1:2])
    later = f"; later: {', '.join(words[2:])}" if words[2:] else ""
    return f"{supervised}Stepkeeper {words[0]}{again}{later}"


def show(verdict: Verdict, about: Mapping[str, Any]) -> None:
    """Print a verdict."""
    for label, text in lines(verdict, about):
        printing.say(f"{label:<10} {text}")


def lines(verdict: Verdict, about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each line, with the label before it; empty where the one before goes on."""
    table = rules.load()
    if "attempt" in about:
        yield "launch", f"{about['attempt']}.{about['launch']} of {about['run']} (job {about['job_id']})"
    yield "cause", f"{verdict.cause.value} ({_how_sure(verdict)})"
    if verdict.cause is not Cause.UNKNOWN or verdict.rule == NO_EVIDENCE:
        yield "", table.meanings[verdict.cause].happened
    said = redact(message(verdict))
    found = who(verdict)
    for label, text in (("message", said), ("where", verdict.location), ("who", _who(found))):
        if text:
            yield label, text
    yield from _because(verdict, said)
    for index, line in enumerate(about["last_lines"]):
        rank = f" rank {line['rank']}" if line["rank"] is not None else ""
        yield "" if index else "last lines", f"{line['log']}:{line['line']}{rank}: {line['text']}"
    if (end := about.get("end")) is not None and end["code"] not in GOES_ON:
        yield "the run", f"ended {printing.instant(end['at'])} with {end['code']}: {end['reason']}"
    for window in about.get("left_out", ()):
        yield "left out", f"{left_out_in_words(window['step'], window['steps'])}: the run goes on without it"
    yield "next", about["next"]
    for index, command in enumerate(about["confirm"]):
        yield "" if index else "confirm", command
    unsure = verdict.cause is not Cause.UNKNOWN and verdict.confidence < LIKELY
    yield "to do", f"{'First confirm it.  Then: ' if unsure else ''}{table.todo(verdict.rule, verdict.cause)}"


def _because(verdict: Verdict, said: str) -> Iterator[tuple[str, str]]:
    table = rules.load()
    for index, piece in enumerate(verdict.evidence[:SHOWN_MAX]):
        yield "" if index else "because", _piece(piece, table.says(piece.rule))
        if (text := redact(piece.text)) != said:
            yield "", f"  {text}"
    if len(verdict.evidence) > SHOWN_MAX:
        yield "", f"and {len(verdict.evidence) - SHOWN_MAX} more: --json"
    other = verdict.otherwise
    if other is not None and other.cause not in (verdict.cause, Cause.UNKNOWN):
        yield "or", f"{other.cause.value}: the second most likely cause"


def _how_sure(verdict: Verdict) -> str:
    if verdict.cause is Cause.UNKNOWN:
        return "nothing is known for sure"
    words = "sure" if verdict.confidence >= SURE else "likely" if verdict.confidence >= LIKELY else "a guess"
    seen = ", and what led to it was not seen" if verdict.role is Role.CASCADE else ""
    return f"{words}, {100 * verdict.confidence:.0f} %{seen}"


def _who(found: Mapping[str, Any]) -> str:
    names = {"rank": "rank ", "node": "node ", "pid": "process ", "gpu": "GPU ", "log": ""}
    return ", ".join(f"{names[key]}{value}" for key, value in found.items())


def _piece(piece: Evidence, says: str) -> str:
    who = [f"rank {piece.rank}" if piece.rank is not None else "", piece.node]
    times = f"{piece.count} times" if piece.count > 1 else ""
    line = f"line {piece.line}" if piece.line is not None else ""
    words = ", ".join(part for part in (*who, line, times) if part)
    return f"{words}{': ' if words and says else ''}{says}" or piece.rule
