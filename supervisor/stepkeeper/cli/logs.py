"""`stepkeeper logs RUN`: what the ranks of a launch printed."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepkeeper import printing
from stepkeeper.cli.arguments import add_launch, add_run, is_named, not_there
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis import collect, log_lines, planes
from stepkeeper.errors import NotFoundError, StepkeeperError, UsageError
from stepkeeper.run_store import find, lines
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.paths import FAILED_NAME, RunDirectory
from stepkeeper.slurm import launch as slurm_launch
from stepkeeper_trainer.formats.plain import open_plain

# Lines of the ranks' logs: whose they are, where they lie, how they are shown.

SRUN = "srun"  # srun.log: what srun itself said
_LABEL = re.compile(rb"\s{0,8}(\d{1,8}): ?")  # what `srun --label` puts before each line


class Said(NamedTuple):
    """One line of a rank; of srun itself where `rank` is None."""

    rank: int | None
    line: str


def launches(run: RunDirectory) -> dict[tuple[int, int], Path]:
    """Return the directories with logs, by attempt and launch."""
    root = run.path / "logs"
    return {
        (a, b): at / below
        for a, at in _numbered(root, "attempt").items()
        for b, below in _numbered(at, "launch").items()
    }


def _numbered(directory: Path, word: str) -> dict[int, Path]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return {}
    matches = (re.fullmatch(rf"{word}-([0-9]{{3,18}})", name) for name in names)
    return {int(match.group(1)): directory / match.group() for match in matches if match}


def parse(line: bytes, is_srun: bool) -> Said:  # noqa: FBT001 - what kind of file
    """Take the label of a line off."""
    match = None if is_srun else _LABEL.match(line)
    if match is None:
        return Said(None, line.decode(errors="replace"))
    return Said(int(match.group(1)), line[match.end() :].decode(errors="replace"))


class Shown(NamedTuple):
    """The launch whose lines are shown, and how."""

    attempt: int
    launch: int
    as_json: bool

    def show(self, said: Said, node: str, *, several: bool) -> None:
        """Print one line, with its node where there are several."""
        if self.as_json:
            where = {"attempt": self.attempt, "launch": self.launch, "node": node}
            printing.say_json_line({**where, **said._asdict()})
            return
        rank = f"{said.rank}: " if said.rank is not None else ""
        printing.say(f"{node + ' ' if several else ''}{rank}{_last_state(said.line)}")


def _last_state(line: str) -> str:
    """Return what a progress bar showed last: it overwrites its line by carriage returns."""
    if "\r" not in line:
        return line
    return next((part for part in reversed(line.split("\r")) if part.strip()), "")


def files_of(directory: Path, node: str | None) -> dict[str, Path]:
    """Return the log files by node, srun's own last."""
    names = sorted(name for name in os.listdir(directory) if name.endswith(".log"))
    files = {name.removesuffix(".log"): directory / name for name in names}
    if SRUN in files:
        files[SRUN] = files.pop(SRUN)
    if node is None:
        return files
    if node not in files:
        raise NotFoundError(f"{directory}: no log of node {node}; there are {', '.join(files) or 'none'}")
    return {node: files[node]}


def said_in(run: Path, path: Path, wanted: Callable[[Said], bool], tail: int | None) -> Iterator[Said]:
    """Yield the wanted lines of a log in a run directory, oldest first; only the newest `tail`, if that is asked."""
    is_srun = path.stem == SRUN
    with open_plain(path, within=run) as file:
        source = lines.forwards(file) if tail is None else lines.backwards(file)
        found = (said for said in (parse(line, is_srun) for line in source) if wanted(said))
        if tail is None:
            yield from found
            return
        yield from reversed(list(itertools.islice(found, tail)))


# `stepkeeper logs RUN --failed`: what the rank that failed first printed last, without what only followed from it.

_GOOD = (Cause.FINISHED, Cause.STOPPED)
TAIL = 50  # lines of each node, where `--tail` says nothing: a rank may have printed for a week


def show_failed(run: RunDirectory, shown: Shown, directory: Path, arguments: argparse.Namespace) -> None:
    """Print where the launch failed on stderr, and what was printed there last on stdout.

    Raises:
        StepkeeperError: there is no log of the node, or no line of the rank, that was asked for.
        OSError: a log cannot be read.
    """
    rank, node, words = who_failed(run, shown)
    named = arguments.rank is not None or arguments.node is not None
    files = files_of(directory, arguments.node)
    if named:
        rank = arguments.rank
    elif node in files:
        files = {node: files[node]}
    tail = arguments.tail or TAIL
    found = _newest(run.path, files, rank, tail + 1)
    if not named and all(said.rank is None for each in found.values() for said in each):
        # a launcher's ranks share one label: what their node printed is shown
        found = _newest(run.path, files, None, tail + 1)
    if arguments.node is None and len(found) > 1:
        found.pop(SRUN, None)  # the ranks say more
    printing.warn(f"attempt {shown.attempt}, launch {shown.launch}: {words}")
    if arguments.tail is None and any(len(each) > tail for each in found.values()):
        printing.warn(f"the last {tail} lines of each node follow; --tail N shows more")
    for where, each in found.items():
        for said in each[-tail:]:
            shown.show(said, where, several=len(found) > 1)
    if named and not found:
        raise _no_line(directory, rank, files)
    if not found:
        printing.warn(f"nothing was printed there; `stepkeeper explain {run.path}` shows what is known")


def _no_line(directory: Path, rank: int | None, files: Iterable[str]) -> StepkeeperError:
    whose = f"rank {rank}" if rank is not None else "a rank"
    return NotFoundError(f"{directory}: no line of {whose} in {', '.join(files)}")


def who_failed(run: RunDirectory, shown: Shown) -> tuple[int | None, str, str]:
    """Return rank and node that failed first in a launch, as far as the journal says, and that in words.

    The verdict counts, else the first rank that ended badly before we ended any.

    Raises:
        OSError: the journal cannot be read.
    """
    wanted = (each for each in collect.launches(run) if (each.attempt, each.launch) == shown[:2])
    events, killed_at = next(((each.events, each.killed_at) for each in wanted), ((), None))
    exited = [each for each in events if isinstance(each, on.RankExited) and each.launch == shown.launch]
    bad = [each for each in planes.exits(exited, killed_at=killed_at) if each.cause not in _GOOD]
    judged = next((each for each in reversed(events) if isinstance(each, on.Judged)), None)
    cause = ""
    if judged is not None and judged.launch == shown.launch and judged.cause is not Cause.UNKNOWN:
        what = judged.location or judged.text
        cause = f"{judged.cause.value}{f': {what}' if what else ''}"
        if judged.rank is not None or judged.node or not bad:
            how = next((each.text for each in bad if each.rank == judged.rank), "")
            return judged.rank, judged.node, _in_words(judged.rank, judged.node, cause, how)
    if bad:
        return bad[0].rank, bad[0].node, _in_words(bad[0].rank, bad[0].node, cause, bad[0].text)
    refused = next((each.error for each in events if isinstance(each, on.LaunchRefused)), "")
    return None, "", _in_words(None, "", cause, refused)


def _in_words(rank: int | None, node: str, *said: str) -> str:
    if rank is not None:
        who = f"rank {rank}{f' on {node}' if node else ''} failed first"
    else:
        who = f"{node} failed" if node else "no rank is known to have failed first"
    why = "; ".join(part for part in said if part)
    return who + (f" ({why})" if why else "")


def _newest(run: Path, files: dict[str, Path], rank: int | None, count: int) -> dict[str, list[Said]]:
    """Return the newest lines that count, oldest first, by node; a node without any is left out."""

    def wanted(said: Said) -> bool:
        of_slurm = said.rank is None and said.line.startswith("slurmstepd")  # memory that ran out, a time limit
        return (of_slurm or rank in (None, said.rank)) and not _follows(said.line)

    found = {node: list(said_in(run, path, wanted, count)) for node, path in files.items()}
    return {node: said for node, said in found.items() if said}


def _follows(line: str) -> bool:
    """Return whether a line is our own, or one of Slurm's that names no cause."""
    text = log_lines.parse_lines(line.encode(errors="replace"))[1]
    return not text or slurm_launch.only_follows(text)


# `stepkeeper logs RUN --follow`: the ranks' lines as they come, over relaunches and requeues.

LOOK_EVERY_S = 0.5
BACK_BYTES = 4096  # of each file at the start: a few last lines


class _File:
    """What of one log was shown."""

    def __init__(self, path: Path, within: Path, *, from_end: bool) -> None:
        self.path, self.within = path, within
        self.pending, self.position = b"", 0
        self._skip = False
        if from_end:
            with open_plain(path, within=within) as file:
                self.position = max(0, file.seek(0, 2) - BACK_BYTES)
                self._skip = self.position > 0  # it begins in the middle of a line

    def new(self) -> list[bytes]:
        """Return the whole lines that were written since; a line that never ends is cut."""
        with open_plain(self.path, within=self.within) as file:
            file.seek(self.position)
            data = file.read(lines.LINE_BYTES_MAX)
            self.position = file.tell()
        *whole, self.pending = (self.pending + data).split(b"\n")
        if len(self.pending) >= lines.LINE_BYTES_MAX:
            whole, self.pending = [*whole, self.pending], b""
        if self._skip and whole:
            whole, self._skip = whole[1:], False
        return whole


def follow(run: RunDirectory, arguments: argparse.Namespace) -> None:
    """Print lines until the attempt has ended or the reader has enough (Ctrl-C)."""
    shown: Shown | None = None
    files: dict[str, _File] = {}
    while True:
        done = status_file.is_over(run.status)  # asked first: what is written before the end is shown
        newest, directory = max(launches(run).items(), default=(None, Path()))
        if newest is not None and (shown is None or newest != shown[:2]):
            is_first = shown is None
            if shown is not None:
                _show_new(shown, files, arguments.rank)
            if not arguments.json:
                printing.say(f"--- attempt {newest[0]}, launch {newest[1]}")
            shown, files = Shown(*newest, arguments.json), {}
        if shown is not None:
            for path in sorted(directory.glob("*.log")):
                if path.stem not in files and arguments.node in (None, path.stem):
                    files[path.stem] = _File(path, run.path, from_end=is_first)
            _show_new(shown, files, arguments.rank)
            is_first = False
        if done:
            return
        time.sleep(LOOK_EVERY_S)


def _show_new(shown: Shown, files: dict[str, _File], rank: int | None) -> None:
    for node, file in files.items():
        for line in file.new():
            said = parse(line, node == SRUN)
            if rank in (None, said.rank):
                shown.show(said, node, several=len(files) > 1)


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    command = subcommands.add_parser(
        "logs",
        help="show what the ranks printed",
        description="Show what the ranks of a launch printed: the newest launch, if none is named.",
    )
    add_run(command)
    add_launch(command, "the newest")
    command.add_argument("--node", metavar="NAME", help=f"of this node only (`{SRUN}`: what srun itself said)")
    command.add_argument("--rank", type=int, metavar="R", help="of this rank only")
    command.add_argument(
        "--failed",
        action="store_true",
        help="the last lines of the rank that failed first, in the newest launch that failed",
    )
    command.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="print lines as they come, also of later launches, until the run ends",
    )
    command.add_argument("--tail", type=int, metavar="N", help="only the newest N lines of each node")
    command.add_argument("--json", action="store_true", help="JSON lines with node, rank, line")
    command.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> None:
    """Print the logs of one launch, node by node."""
    if arguments.tail is not None and arguments.tail < 1:
        raise UsageError("--tail is at least 1")
    if arguments.failed and arguments.follow:
        raise UsageError("--failed shows what ended, --follow what runs: choose one")
    run = find.find(arguments.run, os.environ)
    if arguments.follow:
        follow(run, arguments)
        return
    shown, directory = _launch(run, arguments)
    if arguments.failed:
        show_failed(run, shown, directory, arguments)
        return
    rank = arguments.rank
    files = files_of(directory, arguments.node)
    count = 0
    for node, path in files.items():
        for said in said_in(run.path, path, lambda said: rank in (None, said.rank), arguments.tail):
            count += 1
            shown.show(said, node, several=len(files) > 1)
    if rank is not None and not count:
        raise _no_line(directory, rank, files)


def _launch(run: RunDirectory, arguments: argparse.Namespace) -> tuple[Shown, Path]:
    """Return one launch and its logs; the newest of what was not named."""
    root = run.path / "logs"
    known = launches(run)
    if not known:
        raise NotFoundError(f"{root}: no launch has written logs yet")
    named = {key: path for key, path in known.items() if is_named(arguments, *key)}
    if not named:
        raise NotFoundError(f"{root}: no logs of {not_there(arguments, sorted(known))}")
    chosen = {key: path for key, path in named.items() if not arguments.failed or (path / FAILED_NAME).exists()}
    if not chosen:
        which = "that kind" if len(named) < len(known) else "this run"
        raise NotFoundError(f"{root}: no launch of {which} failed")
    newest = max(chosen)
    return Shown(*newest, arguments.json), chosen[newest]
