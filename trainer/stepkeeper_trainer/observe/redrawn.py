"""Whether a step after a resume draws the random numbers that it drew before: `random.json` has what is compared.

After each save, rank 0 records the generators as they were saved, and as they were at the next `step_done`: hashes of
a few bytes.  A resume that starts from the same generators and comes to others at that `step_done` has drawn otherwise.
A step that itself draws at random comes to the same.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

from stepkeeper_trainer.formats.decoding import DecodeError, decode_format
from stepkeeper_trainer.formats.durable import write_atomically
from stepkeeper_trainer.formats.plain import read_plain
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.state import random_state

if TYPE_CHECKING:
    from pathlib import Path

    from stepkeeper_trainer.load.resume import Resumed


NAME = "random.json"
SAVES_MAX = 16  # that are remembered, the newest
BYTES_MAX = 64 * 1024


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """Hashes of the generators around the step after a save."""

    step: int  # that was saved
    saved: dict[str, str]
    next: dict[str, str]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    format: int = 1
    saves: tuple[Drawn, ...] = ()


_DECODER = msgspec.json.Decoder(Record)


class Redrawn:
    """Of rank 0; used by its main thread alone."""

    def __init__(self, run_directory: Path, resumed: Resumed, *, comparable: bool) -> None:
        """Begin right after a resume; one on other hardware, ranks or data is not `comparable`."""
        self._path = run_directory / NAME
        self._record = _read(self._path)
        self._saved: tuple[int, dict[str, str]] | None = None  # by the newest save, at its step
        self._expected: Drawn | None = None
        if comparable and resumed.step is not None:
            here = random_state.digests()
            same = [each for each in self._record.saves if each.step == resumed.step and each.saved == here]
            self._expected = same[-1] if same else None
        self._writing: threading.Thread | None = None

    def saved(self, step: int) -> None:
        """Note the generators of a save that has just begun."""
        self._saved = step, random_state.digests()

    def arrive(self, step: int) -> None:
        """Compare, or record, the generators at a `step_done`."""
        saved, self._saved = self._saved, None
        expected, self._expected = self._expected, None
        if saved is None and expected is None:
            return
        here = random_state.digests()
        if expected is not None:
            others = sorted(
                name for name in expected.next if here.get(name, expected.next[name]) != expected.next[name]
            )
            if others:
                _say_differs(step, others)
        if saved is not None:
            self._append(Drawn(step=saved[0], saved=saved[1], next=here))

    def _append(self, drawn: Drawn) -> None:
        others = [each for each in self._record.saves if (each.step, each.saved) != (drawn.step, drawn.saved)]
        self._record = Record(saves=(*others, drawn)[-SAVES_MAX:])
        if self._writing is None or not self._writing.is_alive():  # on a disk that hangs the next one has it all
            data = msgspec.json.encode(self._record)
            self._writing = threading.Thread(
                target=_write, args=(self._path, data), name="stepkeeper-random", daemon=True
            )
            self._writing.start()


def _say_differs(step: int, generators: list[str]) -> None:
    warn(
        "random_numbers_differ",
        step=step,
        generators=",".join(generators),
        why="this step has drawn others after the resume than before it, so losses differ",
        remedy="evaluate before manager.step_done(), make iterators after manager.resume(), "
        "and call manager.restore_random_state() next",
    )


def _read(path: Path) -> Record:
    try:
        return decode_format(_DECODER, read_plain(path, BYTES_MAX, within=path.parent), newest=1)
    except (OSError, DecodeError):
        return Record()  # there may be none yet; what cannot be compared is not


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        say("random_numbers_unrecorded", file=path, why=error.strerror)
