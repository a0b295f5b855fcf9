"""`stepkeeper explain RUN`: why a launch failed, why we think so, and what to do."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stepkeeper import printing
from stepkeeper.cli.arguments import add_launch, is_named, not_there, opened
from stepkeeper.config import resolve
from stepkeeper.core import causes
from stepkeeper.core.causes import Cause, Rung
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase
from stepkeeper.diagnosis import collect, log_lines, logs, rules
from stepkeeper.diagnosis.classify import NO_EVIDENCE, Evidence, Role, Verdict, classify
from stepkeeper.diagnosis.collect import Launch
from stepkeeper.errors import NotFoundError, UsageError
from stepkeeper.redaction import redact
from stepkeeper.run_analytics.model import left_out_in_words
from stepkeeper.run_store import find
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper_trainer.formats import lineage as lineages

# A verdict for people: what happened, who says so, what Stepkeeper does next, how to confirm it, what to do.

SHOWN_MAX = 6  # pieces of evidence
SURE, LIKELY = 0.85, 0.6
GOES_ON = (ExitCode.REQUEUED, ExitCode.SUPERSEDED)  # ends of attempts that do not end the run
_RUNGS = {
    Rung.RELAUNCH: "starts the ranks again on the same nodes",
    Rung.LEAVE: "continues without that node",
    Rung.ROLLBACK: "goes back to a verified checkpoint before it",
    Rung.REQUEUE: "requeues the job",
    Rung.STOP: "stops, and runs notify_command",
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


def following(cause: Cause, row: Sequence[causes.Try], about: Mapping[str, Any]) -> str:
    """Say what Stepkeeper does next, or did."""
    end = about.get("end")
    if about.get("followed"):
        return f"launch {about['followed']} followed: stepkeeper events {about['run']}"
    if end is not None and end["code"] == ExitCode.FINISHED:
        return "nothing: the training is finished"
    if end is not None and end["code"] not in GOES_ON:
        resume = f"stepkeeper resume {shlex.quote(str(about['run']))}"
        return f"nothing: the run has ended; to resume from its newest checkpoint: {resume}"
    supervised = "" if "run" in about else "in a supervised run, "
    if fixed := rules.load().meanings[cause].next:
        return f"{supervised}{fixed}"
    words = [f"{_RUNGS[word.rung]}{f' after {word.after_s:g} s' if word.after_s else ''}" for word in row]
    again = "".join(f"; if it fails in the same way again, it {word}" for word in words[1:2])
    later = f"; later: {', '.join(words[2:])}" if words[2:] else ""
    return f"{supervised}Stepkeeper {words[0]}{again}{later}"


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
        yield "left out", f"{left_out_in_words(window['step'], window['steps'])}: the run continues without it"
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
        help="show why a launch failed, and what to do",
        description="Show why the newest failed launch of a run failed, or what log files show (docs/verdicts.md).",
        epilog=_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("run", metavar="RUN", nargs="?", help="run directory or job id")
    command.add_argument(
        "--log",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="judge these logs instead, one for each node (-: stdin; also error files of torchrun)",
    )
    add_launch(command, "the newest that failed")
    command.add_argument("--json", action="store_true", help="one JSON document")
    command.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> None:
    """Print a verdict."""
    if arguments.log:
        if arguments.run is not None or arguments.attempt is not None or arguments.launch is not None:
            raise UsageError("--log goes without RUN, --attempt and --launch")
        verdict, about = _of_files(arguments.log)
    elif arguments.run is None:
        raise UsageError("name a run directory or a job id, or logs with --log")
    else:
        verdict, about = _of_run(find.find(arguments.run, os.environ), arguments)
    if arguments.json:
        printing.say_json({**_document(verdict), **about})
    else:
        for label, text in lines(verdict, about):
            printing.say(f"{label:<10} {text}")


def _of_run(run: RunDirectory, arguments: argparse.Namespace) -> tuple[Verdict, dict[str, Any]]:
    known = collect.launches(run)
    wanted = [each for each in known if is_named(arguments, each.attempt, each.launch)]
    if arguments.attempt is None:  # of a chain of jobs, the one that was named
        wanted = [each for each in wanted if str(each.job_id) == arguments.run] or wanted
    if not known:
        raise NotFoundError(f"{run.journal}: holds no launch yet; see `stepkeeper events {run.path}`")
    if not wanted:
        there = not_there(arguments, [(each.attempt, each.launch) for each in known])
        raise NotFoundError(f"{run.path}: no launch of {there}")
    failed = [each for each in wanted if each.failed]
    chosen = (failed or wanted)[-1]
    verdict = classify(collect.of_launch(run, chosen))
    if not chosen.failed and chosen.ended is None and verdict.rule == NO_EVIDENCE and _works(run, chosen):
        raise NotFoundError(
            f"{run.path}: launch {chosen.attempt}.{chosen.launch} runs, and nothing in it has failed: "
            f"stepkeeper status {run.path}"
        )
    later = known[known.index(chosen) + 1 :]
    end, lineage = collect.end(run), lineages.read(run.checkpoints)
    about = {
        "run": str(run.path),
        "attempt": chosen.attempt,
        "launch": chosen.launch,
        "job_id": chosen.job_id,
        "followed": f"{later[0].attempt}.{later[0].launch}" if later else "",
        "end": None if end is None else {**end._asdict(), "reason": redact(end.reason)},
        "left_out": msgspec.to_builtins(lineage.left_out) if lineage is not None else [],
        "last_lines": [],
    }
    said = next((each.log for each in verdict.evidence if each.log), "")
    path = said or str(collect.log_of(run.logs(chosen.attempt, chosen.launch), verdict.node) or "")
    if path:
        about["last_lines"] = _last_lines(path, _read(path), verdict.rank)
    names = {"RUN": str(run.path), "JOB": str(chosen.job_id or ""), "NODE": who(verdict).get("node", "")}
    about["confirm"] = commands(verdict.cause, names)
    row = _row(verdict, resolve.read_record(run.path, chosen.attempt).policy())
    about["next"] = following(verdict.cause, row, about)
    return verdict, about


def _works(run: RunDirectory, launch: Launch) -> bool:
    """Tell whether the supervisor of a launch still writes, and its ranks may run."""
    status = status_file.known(run.status)
    return (
        status is not None
        and (status.attempt, status.launch, status.phase) == (launch.attempt, launch.launch, Phase.TRAINING)
        and not status_file.is_silent(status, time.time())
    )


def _row(verdict: Verdict, policy: Policy) -> tuple[causes.Try, ...]:
    """Return the row of the ladder by which a verdict is decided."""
    return policy.row(verdict.cause if verdict.confidence >= policy.judged_from else Cause.UNKNOWN)


def _last_lines(name: str, log: log_lines.Log, rank: int | None) -> list[dict[str, Any]]:
    return [
        {"log": name, "line": line.number, "rank": line.rank, "text": redact(line.text[: logs.CHARACTERS_MAX])}
        for line in logs.error_lines(log, rank=rank)
    ]


def _of_files(names: list[str]) -> tuple[Verdict, dict[str, Any]]:
    several = len(names) > 1
    found: list[Evidence] = []
    read: dict[str, log_lines.Log] = {}
    for name in names:
        node = Path(name).stem if several and name != "-" else ""
        log = _read(name)
        data = "\n".join(line.text for line in log.lines[:2]).lstrip()
        if data.startswith('{"message"'):
            said = logs.error_file_evidence(
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
        "confirm": commands(verdict.cause, {"NODE": who(verdict).get("node", "")}),
    }
    return verdict, {**about, "next": following(verdict.cause, _row(verdict, Policy()), about)}


def _read(name: str) -> log_lines.Log:
    with opened(name, "log files") as file:
        return log_lines.read_log(file)


def _document(verdict: Verdict) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(verdict)
    for piece in document["evidence"]:
        piece["text"] = redact(piece["text"])
    table = rules.load()
    return {
        **document,
        "happened": table.meanings[verdict.cause].happened,
        "todo": table.todo(verdict.rule, verdict.cause),
        "message": redact(message(verdict)),
        "who": who(verdict),
    }
