"""`stepkeeper logs RUN --follow`: the ranks' lines as they come, over relaunches and requeues."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from stepkeeper import printing
from stepkeeper.commands.logs_lines import SRUN, launches, parse, show
from stepkeeper.core.exits import ExitCode
from stepkeeper.store import lines
from stepkeeper.store import status as status_file
from stepkeeper.store.rundir import RunDirectory
from stepkeeper_trainer.formats.plain import open_plain

LOOK_EVERY_S = 0.5
BACK_BYTES = 4096  # of each file at the start: a few last lines
LINE_BYTES_MAX = lines.LINE_BYTES_MAX


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
            data = file.read(LINE_BYTES_MAX)
            self.position = file.tell()
        *whole, self.pending = (self.pending + data).split(b"\n")
        if len(self.pending) >= LINE_BYTES_MAX:
            whole, self.pending = [*whole, self.pending], b""
        if self._skip and whole:
            whole, self._skip = whole[1:], False
        return whole


def follow(run: RunDirectory, arguments: argparse.Namespace) -> int:
    """Print lines until the attempt has ended or the reader has enough (Ctrl-C)."""
    shown: tuple[int, int] | None = None
    files: dict[str, _File] = {}
    first = True
    while True:
        done = status_file.is_over(run.status)  # asked first: what is written before the end is shown
        newest = max(launches(run).items(), default=None)
        if newest is not None and newest[0] != shown:
            if shown is not None:
                _show_new(files, arguments)
            if not arguments.json:
                printing.say(f"--- attempt {newest[0][0]}, launch {newest[0][1]}")
            shown, files = newest[0], {}
        if newest is not None:
            for path in sorted(newest[1].glob("*.log")):
                if path.stem not in files and arguments.node in (None, path.stem):
                    files[path.stem] = _File(path, run.path, from_end=first)
            _show_new(files, arguments)
            first = False
        if done:
            return ExitCode.FINISHED
        time.sleep(LOOK_EVERY_S)


def _show_new(files: dict[str, _File], arguments: argparse.Namespace) -> None:
    for node, file in files.items():
        for line in file.new():
            said = parse(line, node == SRUN)
            if arguments.rank in (None, said.rank):
                show(said, node if len(files) > 1 else None, node, as_json=arguments.json)
