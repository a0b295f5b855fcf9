"""`stepkeeper explain RUN`: why a launch failed, why we think so, and what to do."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper import printing
from stepkeeper.commands import explain_text
from stepkeeper.config import record
from stepkeeper.core import ladder
from stepkeeper.core.causes import Cause
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase
from stepkeeper.errors import StepkeeperError
from stepkeeper.redaction import redact
from stepkeeper.store import find
from stepkeeper.store import status as status_file
from stepkeeper.store.rundir import RunDirectory
from stepkeeper.verdict import errorfiles, gathering, lasting, logs, reading, rules
from stepkeeper.verdict.causes import Evidence, Verdict
from stepkeeper.verdict.gathering import Launch
from stepkeeper.verdict.joining import NO_EVIDENCE, classify
from stepkeeper_trainer.formats import lineage as lineages

_CODES = f"""
exit codes:
  {ExitCode.FINISHED:<3} a verdict was given, `unknown` included
  {ExitCode.USAGE:<3} an argument is wrong
  {ExitCode.NOTHING_FOUND:<3} no such run, launch or FILE; or the launch runs, and nothing in it has failed
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
        verdict, about = _of_files(arguments.log)
    elif arguments.run is None:
        raise StepkeeperError("name a run directory or a job id, or logs with --log", ExitCode.USAGE)
    else:
        verdict, about = _of_run(find.find(arguments.run, os.environ), arguments)
    if arguments.json:
        printing.say_json({**_document(verdict), **about}, indent=2)
    else:
        explain_text.show(verdict, about)
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
    verdict = classify(gathering.of_launch(run, chosen))
    if not chosen.failed and chosen.ended is None and verdict.rule == NO_EVIDENCE and _works(run, chosen):
        raise StepkeeperError(
            f"{run.path}: launch {chosen.attempt}.{chosen.launch} runs, and nothing in it has failed: "
            f"stepkeeper status {run.path}",
            ExitCode.NOTHING_FOUND,
        )
    later = known[known.index(chosen) + 1 :]
    about = {
        "run": str(run.path),
        "attempt": chosen.attempt,
        "launch": chosen.launch,
        "job_id": chosen.job_id,
        "followed": f"{later[0].attempt}.{later[0].launch}" if later else "",
        "end": _end(run),
        "left_out": _left_out(run),
        "last_lines": [],
    }
    said = next((each.log for each in verdict.evidence if each.log), "")
    path = said or str(gathering.log_of(run.logs(chosen.attempt, chosen.launch), verdict.node) or "")
    if path:
        about["last_lines"] = _last_lines(path, _read(path), verdict.rank)
    names = {"RUN": str(run.path), "JOB": str(chosen.job_id or ""), "NODE": explain_text.who(verdict).get("node", "")}
    about["confirm"] = explain_text.commands(verdict.cause, names)
    row = _row(verdict, record.read(run.path, chosen.attempt).policy())
    about["next"] = explain_text.following(verdict.cause, row, about)
    return verdict, about


def _works(run: RunDirectory, launch: Launch) -> bool:
    """Tell whether the supervisor of a launch still writes, and its ranks may run."""
    try:
        status = status_file.read(run.status)
    except msgspec.MsgspecError:
        return False
    return (
        status is not None
        and (status.attempt, status.launch, status.phase) == (launch.attempt, launch.launch, Phase.TRAINING)
        and not status_file.is_silent(status, time.time())
    )


def _row(verdict: Verdict, policy: Policy) -> tuple[ladder.Try, ...]:
    """Return the row of the ladder by which a verdict is decided."""
    return policy.row(verdict.cause if verdict.confidence >= policy.judged_from else Cause.UNKNOWN)


def _last_lines(name: str, log: reading.Log, rank: int | None) -> list[dict[str, Any]]:
    return [
        {"log": name, "line": line.number, "rank": line.rank, "text": redact(line.text[: lasting.CHARACTERS_MAX])}
        for line in lasting.error_lines(log, rank=rank)
    ]


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


def _of_files(names: list[str]) -> tuple[Verdict, dict[str, Any]]:
    several = len(names) > 1
    found: list[Evidence] = []
    read: dict[str, reading.Log] = {}
    for name in names:
        node = Path(name).stem if several and name != "-" else ""
        log = _read(name)
        data = "\n".join(line.text for line in log.lines[:2]).lstrip()
        if data.startswith('{"message"'):
            said = errorfiles.error_file_evidence(
                "\n".join(line.text for line in log.lines).encode(errors="replace"), node=node
            )
            found += [said] if said is not None else []
        else:
            read[name] = log
            found += [msgspec.structs.replace(each, log=name) for each in logs.log_evidence(log, node=node)]
    verdict = classify(found)
    by = next((each.log for each in verdict.evidence if each.log), next(iter(read), ""))
    about = {
        "logs": names,
        "last_lines": _last_lines(by, read[by], verdict.rank) if by else [],
        "confirm": explain_text.commands(verdict.cause, {"NODE": explain_text.who(verdict).get("node", "")}),
    }
    return verdict, {**about, "next": explain_text.following(verdict.cause, _row(verdict, Policy()), about)}


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
    table = rules.load()
    return {
        **document,
        "happened": table.meanings[verdict.cause].happened,
        "todo": table.todo(verdict.rule, verdict.cause),
        "message": redact(explain_text.message(verdict)),
        "who": explain_text.who(verdict),
    }
