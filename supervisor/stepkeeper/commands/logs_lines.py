"""Lines of the ranks' logs: whose they are, where they lie, how they are shown."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from stepkeeper import printing
from stepkeeper.core.exits import ExitCode
from stepkeeper.errors import StepkeeperError
from stepkeeper.store import lines
from stepkeeper.store.rundir import RunDirectory
from stepkeeper_trainer.formats.plain import open_plain

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


def show(said: Said, where: str | None, node: str, *, as_json: bool) -> None:
    """Print one line, with its node where there are several."""
    if as_json:
        printing.say_json({"node": node, "rank": said.rank, "line": said.line})
        return
    rank = f"{said.rank}: " if said.rank is not None else ""
    printing.say(f"{where + ' ' if where else ''}{rank}{_last_state(said.line)}")


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
        raise StepkeeperError(
            f"{directory}: no log of node {node}; there are {', '.join(files) or 'none'}",
            ExitCode.NOTHING_FOUND,
        )
    return {node: files[node]}


def of_rank(rank: int | None) -> Callable[[Said], bool]:
    """Return which lines are those of a rank; None: all."""
    return lambda said: rank in (None, said.rank)


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
