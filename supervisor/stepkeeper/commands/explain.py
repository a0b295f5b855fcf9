"""`stepkeeper explain RUN`: why a launch failed, why we think so, and what to do."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.redaction import redact
from stepkeeper.seeing.model import left_out_in_words
from stepkeeper.store import find
from stepkeeper.store.rundir import RunDirectory
from stepkeeper.verdict import errorfiles, gathering, logs, reading, rules
from stepkeeper.verdict.causes import Evidence, Role, Verdict
from stepkeeper.verdict.gathering import Launch
from stepkeeper.verdict.joining import judge
from stepkeeper_trainer.formats import lineage as lineages

SHOWN_MAX = 6  # pieces of evidence, for people
SURE, LIKELY = 0.85, 0.6
GOES_ON = (ExitCode.REQUEUED, ExitCode.SUPERSEDED)  # ends of attempts that do not end the run
_CODES = f"""
exit codes:
  {ExitCode.FINISHED:<3} a verdict was given, `unknown` included
  {ExitCode.USAGE:<3} an argument is wrong
  {ExitCode.NOTHING_FOUND:<3} no such run, launch or FILE
"""


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "explain",
        help="tell why a launch failed, and what to do",
        description="Tell why the newest failed launch of a run failed, or what log files say (docs/verdicts.md).",
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("run", metavar="RUN", nargs="?", help="run directory or job id")
    command.add_argument(
        "--log",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="judge these logs instead, one a node (-: stdin; torch's error files too)",
    )
    command.add_argument("--attempt", type=int, metavar="N", help="of this attempt (default: the newest that failed)")
    command.add_argument("--launch", type=int, metavar="N", help="of this launch (default: the newest that failed)")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Print a verdict."""
    if arguments.log:
        if arguments.run is not None or arguments.attempt is not None or arguments.launch is not None:
            raise StepkeeperError("--log goes without RUN, --attempt and --launch", ExitCode.USAGE)
        verdict, about = judge(_of_files(arguments.log)), {"logs": arguments.log}
    elif arguments.run is None:
        raise StepkeeperError("name a run directory or a job id, or logs with --log", ExitCode.USAGE)
    else:
        verdict, about = _of_run(find.find(arguments.run, os.environ), arguments)
    if arguments.json:
        printing.say_json({**_document(verdict), **about}, indent=2)
    else:
        _show(verdict, about)
    return ExitCode.FINISHED


def _of_run(run: RunDirectory, arguments: argparse.Namespace) -> tuple[Verdict, dict[str, Any]]:
    attempt, launch = arguments.attempt, arguments.launch
    known = gathering.launches(run)
    wanted = [
        each
        for each in known
        if (attempt is None or each.attempt == attempt) and (launch is None or each.launch == launch)
    ]
    if attempt is None:  # of a chain of jobs, the one that was named
        wanted = [each for each in wanted if str(each.job_id) == arguments.run] or wanted
    if not wanted:
        raise StepkeeperError(_nothing(run, known, attempt, launch), ExitCode.NOTHING_FOUND)
    failed = [each for each in wanted if each.failed]
    chosen = (failed or wanted)[-1]
    return judge(gathering.of_launch(run, chosen)), {
        "run": str(run.path),
        "attempt": chosen.attempt,
        "launch": chosen.launch,
        "job_id": chosen.job_id,
        "end": _end(run),
        "left_out": _left_out(run),
    }


def _end(run: RunDirectory) -> dict[str, Any] | None:
    end = gathering.end(run)
    return None if end is None else {**end._asdict(), "reason": redact(end.reason)}


def _left_out(run: RunDirectory) -> list[dict[str, int]]:
    lineage = lineages.read(run.checkpoints)
    return [msgspec.to_builtins(each) for each in lineage.left_out] if lineage is not None else []


def _nothing(run: RunDirectory, known: list[Launch], attempt: int | None, launch: int | None) -> str:
    if not known:
        return f"{run.journal}: tells of no launch yet; see `stepkeeper events {run.path}`"
    there = ", ".join(f"{each.attempt}.{each.launch}" for each in known[-10:])
    asked = f"{'*' if attempt is None else attempt}.{'*' if launch is None else launch}"
    return f"{run.path}: no launch {asked} (attempt.launch); there are {there}"


def _of_files(names: list[str]) -> list[Evidence]:
    several = len(names) > 1
    found: list[Evidence] = []
    for name in names:
        node = Path(name).stem if several and name != "-" else ""
        log = _read(name)
        data = "\n".join(line.text for line in log.lines[:2]).lstrip()
        if data.startswith('{"message"'):
            said = errorfiles.sight("\n".join(line.text for line in log.lines).encode(errors="replace"), node=node)
            found += [said] if said is not None else []
        else:
            found += [msgspec.structs.replace(each, node=node) for each in logs.sight(log)]
    return found


def _read(name: str) -> reading.Log:
    try:
        if name == "-":
            return reading.read(sys.stdin.buffer)
        with open(name, "rb") as file:
            return reading.read(file)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise StepkeeperError(f"{name}: {why}: name log files, or -", ExitCode.NOTHING_FOUND) from error


def _document(verdict: Verdict) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(verdict)
    for piece in document["evidence"]:
        piece["text"] = redact(piece["text"])
    meaning = rules.load().meanings[verdict.cause]
    return {**document, "happened": meaning.happened, "todo": meaning.todo}


def _show(verdict: Verdict, about: dict[str, Any]) -> None:
    table = rules.load()
    meaning = table.meanings[verdict.cause]
    if "attempt" in about:
        printing.say(f"launch     {about['attempt']}.{about['launch']} of {about['run']} (job {about['job_id']})")
    printing.say(f"cause      {verdict.cause.value} ({_how_sure(verdict)}; rule {verdict.rule})")
    printing.say(f"           {meaning.happened}")
    where = [verdict.location, f"rank {verdict.rank}" if verdict.rank is not None else "", verdict.node]
    if any(where):
        printing.say(f"where      {', '.join(part for part in where if part)}")
    for index, piece in enumerate(verdict.evidence[:SHOWN_MAX]):
        printing.say(f"{'because' if index == 0 else '':<10} {_piece(piece, table.says(piece.rule))}")
        printing.say(f"{'':<10}   {redact(piece.text)}")
    if len(verdict.evidence) > SHOWN_MAX:
        printing.say(f"{'':<10} and {len(verdict.evidence) - SHOWN_MAX} more: --json")
    if verdict.otherwise is not None and verdict.otherwise.cause is not verdict.cause:
        printing.say(f"otherwise  {verdict.otherwise.cause.value}: were it not for the first of these")
    if (end := about.get("end")) is not None and end["code"] not in GOES_ON:
        printing.say(f"the run    ended {printing.instant(end['at'])} with {end['code']}: {end['reason']}")
    for window in about.get("left_out", ()):
        printing.say(f"left out   {left_out_in_words(window['step'], window['steps'])}: the run goes on without it")
    printing.say(f"to do      {meaning.todo}")


def _how_sure(verdict: Verdict) -> str:
    words = "sure" if verdict.confidence >= SURE else "likely" if verdict.confidence >= LIKELY else "a guess"
    seen = ", the root itself was not seen" if verdict.role is Role.CASCADE else ""
    return f"{words}, {100 * verdict.confidence:.0f} %{seen}"


def _piece(piece: Evidence, says: str) -> str:
    who = [f"rank {piece.rank}" if piece.rank is not None else "", piece.node, piece.plane.value]
    times = f", {piece.count} times" if piece.count > 1 else ""
    line = f", line {piece.line}" if piece.line is not None else ""
    words = f": {says}" if says else ""
    return f"{piece.role.value}, {', '.join(part for part in who if part)}{line}{times}{words}"
