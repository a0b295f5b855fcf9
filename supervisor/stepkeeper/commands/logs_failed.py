"""`stepkeeper logs RUN --failed`: what the rank that failed first printed last, without what only followed from it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from stepkeeper import printing
from stepkeeper.commands.logs_lines import SRUN, Said, files_of, said_in, show
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.slurm import chatter
from stepkeeper.store.rundir import RunDirectory
from stepkeeper.verdict import gathering, planes, reading

_GOOD = (Cause.FINISHED, Cause.STOPPED)
TAIL = 50  # lines of each node, where `--tail` says nothing: a rank may have printed for a week


class First(NamedTuple):
    """Who failed first in a launch, as far as the journal tells."""

    rank: int | None = None
    node: str = ""
    how: str = ""  # `exit code 1: an error of the program`
    cause: str = ""  # `exception: ValueError at train.py:61 in main`


def show_failed(run: RunDirectory, directory: Path, arguments: argparse.Namespace) -> int:
    """Print where the launch failed on stderr, and what was printed there last on stdout.

    Raises:
        StepkeeperError: there is no log of the node, or no line of the rank, that was asked for.
        OSError: a log cannot be read.
    """
    attempt, launch = (int(path.name.rpartition("-")[2]) for path in (directory.parent, directory))
    first = who_failed(run, attempt, launch)
    named = arguments.rank is not None or arguments.node is not None
    rank = arguments.rank if named else first.rank
    files = files_of(directory, arguments.node)
    if not named and first.node in files:
        files = {first.node: files[first.node]}
    tail = arguments.tail or TAIL
    shown = _newest(run.path, files, rank, tail + 1)
    if not named and all(said.rank is None for each in shown.values() for said in each):
        shown = _newest(
            run.path, files, None, tail + 1
        )  # a launcher's ranks share one label: what their node printed is shown
    if arguments.node is None and len(shown) > 1:
        shown.pop(SRUN, None)  # the ranks say more
    printing.warn(f"attempt {attempt}, launch {launch}: {_in_words(first)}")
    if arguments.tail is None and any(len(each) > tail for each in shown.values()):
        printing.warn(f"the last {tail} lines of each node follow; --tail N shows more")
    for node, each in shown.items():
        for said in each[-tail:]:
            if arguments.json:
                printing.say_json({"attempt": attempt, "launch": launch, "node": node, **said._asdict()})
            else:
                show(said, node if len(shown) > 1 else None, node, as_json=False)
    if named and not shown:
        whose = f"rank {rank}" if rank is not None else "a rank"
        raise StepkeeperError(f"{directory}: no line of {whose} in {', '.join(files)}", ExitCode.NOTHING_FOUND)
    if not shown:
        printing.warn(f"nothing was printed there; `stepkeeper explain {run.path}` tells what is known")
    return ExitCode.FINISHED


def who_failed(run: RunDirectory, attempt: int, launch: int) -> First:
    """Return who failed first in a launch: by its verdict, else the first rank that ended badly before we ended any.

    Raises:
        OSError: the journal cannot be read.
    """
    wanted = (each for each in gathering.launches(run) if (each.attempt, each.launch) == (attempt, launch))
    found = next(wanted, None)
    if found is None:
        return First()
    exited = [each for each in found.events if isinstance(each, on.RankExited) and each.launch == launch]
    bad = [each for each in planes.exits(exited, killed_at=found.killed_at) if each.cause not in _GOOD]
    judged = next((each for each in reversed(found.events) if isinstance(each, on.Judged)), None)
    if judged is None or judged.launch != launch or judged.cause is Cause.UNKNOWN:
        refused = next((each.error for each in found.events if isinstance(each, on.LaunchRefused)), "")
        return First(bad[0].rank, bad[0].node, bad[0].text) if bad else First(how=refused)
    told = judged.location or judged.text
    cause = f"{judged.cause.value}{f': {told}' if told else ''}"
    if judged.rank is None and not judged.node and bad:
        return First(bad[0].rank, bad[0].node, bad[0].text, cause)
    how = next((each.text for each in bad if each.rank == judged.rank), "")
    return First(judged.rank, judged.node, how, cause)


def _in_words(first: First) -> str:
    said = "; ".join(part for part in (first.cause, first.how) if part)
    if first.rank is not None:
        who = f"rank {first.rank}{f' on {first.node}' if first.node else ''} failed first"
    else:
        who = f"{first.node} failed" if first.node else "no rank is known to have failed first"
    return who + (f" ({said})" if said else "")


def _newest(run: Path, files: dict[str, Path], rank: int | None, count: int) -> dict[str, list[Said]]:
    """Return the newest lines that count, oldest first, by node; a node without any is left out."""

    def wanted(said: Said) -> bool:
        of_slurm = said.rank is None and said.line.startswith("slurmstepd")  # memory that ran out, a time limit
        return (of_slurm or rank in (None, said.rank)) and not _follows(said.line)

    found = {node: list(said_in(run, path, wanted, count)) for node, path in files.items()}
    return {node: said for node, said in found.items() if said}


def _follows(line: str) -> bool:
    """Tell whether a line is our own, or one of Slurm's that tells of no cause."""
    text = reading.parse(line.encode(errors="replace"))[1]
    return not text or chatter.follows(text)
