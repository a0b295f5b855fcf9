"""`stepkeeper logs RUN`: what the ranks of a launch printed."""

from __future__ import annotations

import argparse
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stepkeeper import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.store import find, lines
from stepkeeper.store.rundir import RunDirectory

SRUN = "srun"  # srun.log: what srun itself said
_LABEL = re.compile(rb"\s{0,8}(\d{1,8}): ?")  # what `srun --label` puts before each line


class Said(NamedTuple):
    """One line of a rank; of srun itself where `rank` is None."""

    rank: int | None
    line: str


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "logs",
        help="show what the ranks printed",
        description="Show what the ranks of a launch printed: the newest launch, if none is named.",
        allow_abbrev=False,
    )
    command.add_argument("run", metavar="RUN", help="run directory or job id")
    command.add_argument("--attempt", type=int, metavar="N", help="of this attempt (default: the newest)")
    command.add_argument("--launch", type=int, metavar="N", help="of this launch (default: the newest)")
    command.add_argument("--node", metavar="NAME", help=f"of this node only (`{SRUN}`: what srun itself said)")
    command.add_argument("--rank", type=int, metavar="R", help="of this rank only")
    command.add_argument("--tail", type=int, metavar="N", help="only the newest N lines of each node")
    command.add_argument("--json", action="store_true", help="JSON lines with node, rank, line")
    command.set_defaults(execute=execute)


@printing.reading
def execute(arguments: argparse.Namespace) -> int:
    """Print the logs of one launch, node by node."""
    if arguments.tail is not None and arguments.tail < 1:
        raise StepkeeperError("--tail is at least 1", ExitCode.USAGE)
    run = find.find(arguments.run, os.environ)
    directory = _launch(run, arguments.attempt, arguments.launch)
    files = _files(directory, arguments.node)
    several = len(files) > 1
    count = 0
    for node, path in files.items():
        for said in _said(path, arguments.rank, arguments.tail):
            count += 1
            if arguments.json:
                printing.say_json({"node": node, "rank": said.rank, "line": said.line})
            else:
                where = f"{node} " if several else ""
                rank = f"{said.rank}: " if said.rank is not None else ""
                printing.say(f"{where}{rank}{_last_state(said.line)}")
    if arguments.rank is not None and not count:
        raise StepkeeperError(
            f"{directory}: no line of rank {arguments.rank} in {', '.join(files)}", ExitCode.NOTHING_FOUND
        )
    return ExitCode.FINISHED


def _launch(run: RunDirectory, attempt: int | None, launch: int | None) -> Path:
    """Return the logs of one launch; the newest of what was not named."""
    root = run.path / "logs"
    launches = {
        (a, b): at / below
        for a, at in _numbered(root, "attempt").items()
        for b, below in _numbered(at, "launch").items()
    }
    chosen = [
        key for key in launches if (attempt is None or key[0] == attempt) and (launch is None or key[1] == launch)
    ]
    if chosen:
        return launches[max(chosen)]
    if not launches:
        raise StepkeeperError(f"{root}: no launch has written logs yet", ExitCode.NOTHING_FOUND)
    there = ", ".join(f"{a}.{b}" for a, b in sorted(launches)[-10:])
    asked = f"{'*' if attempt is None else attempt}.{'*' if launch is None else launch}"
    raise StepkeeperError(
        f"{root}: no logs of attempt.launch {asked}; there are those of {there}", ExitCode.NOTHING_FOUND
    )


def _numbered(directory: Path, word: str) -> dict[int, Path]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return {}
    matches = (re.fullmatch(rf"{word}-([0-9]{{3,18}})", name) for name in names)
    return {int(match.group(1)): directory / match.group() for match in matches if match}


def _files(directory: Path, node: str | None) -> dict[str, Path]:
    """Return the log files by node, srun's own last."""
    names = sorted(name for name in os.listdir(directory) if name.endswith(".log"))
    files = {name.removesuffix(".log"): directory / name for name in names}
    if SRUN in files:
        files[SRUN] = files.pop(SRUN)
    if node is None:
        return files
    if node not in files:
        raise StepkeeperError(
            f"{directory}: no log of node {node}; there are {', '.join(files) or 'none'}",
            ExitCode.NOTHING_FOUND,
        )
    return {node: files[node]}


def _said(path: Path, rank: int | None, tail: int | None) -> Iterator[Said]:
    is_srun = path.stem == SRUN
    with lines.open_plain(path) as file:
        source = lines.forwards(file) if tail is None else lines.backwards(file)
        wanted = (said for said in (_parse(line, is_srun) for line in source) if rank in (None, said.rank))
        if tail is None:
            yield from wanted
            return
        newest: deque[Said] = deque()
        for said in wanted:
            newest.appendleft(said)
            if len(newest) == tail:
                break
        yield from newest


def _parse(line: bytes, is_srun: bool) -> Said:  # noqa: FBT001 - a private helper
    match = None if is_srun else _LABEL.match(line)
    if match is None:
        return Said(None, line.decode(errors="replace"))
    return Said(int(match.group(1)), line[match.end() :].decode(errors="replace"))


def _last_state(line: str) -> str:
    """Return what a progress bar showed last: it overwrites its line by carriage returns."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part.strip()), "")
