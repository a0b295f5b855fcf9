"""The watcher's lines to its supervisor: through a pipe that may be full for a while, because Slurm or srun is slow.

Of what only says how something stands now, the newest line is enough.  What the supervisor decides by is kept.  What
has to be dropped at last is counted, and the supervisor is told once it reads again.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Hashable

from stepkeeper.watcher import messages as bus
from stepkeeper_trainer.formats.messages import Progress, shorten

LINES_MAX = 4096
IMPORTANT_LINES_MAX = 65_536  # some 30 MB: a supervisor that has read nothing for so long has lost more than lines
_FOR_PEOPLE = (bus.Note, bus.DoesNothing, bus.Stood, bus.StoodBelow, bus.Entered)  # dropped first, the oldest first


class Channel:
    """Whole lines, each with one write: a line is shorter than PIPE_BUF, so it is written whole or not at all."""

    def __init__(self, descriptor: int, node: str, *, lines_max: int = LINES_MAX) -> None:
        """Write to a descriptor that does not block."""
        self._descriptor = descriptor
        self._node = node
        self._lines_max = lines_max
        self._lines: dict[int, tuple[bus.FromWatcher, bytes]] = {}  # by number, the oldest first
        self._newest: dict[Hashable, int] = {}  # key of what is replaced by a newer line -> its number
        self._number = 0
        self._dropped: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        """How many lines wait."""
        return len(self._lines)

    def put(self, message: bus.FromWatcher) -> None:
        """Queue one line, and write what the pipe takes.  Never waits."""
        self._add(message)
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes."""
        while self._lines:
            number = next(iter(self._lines))
            try:
                os.write(self._descriptor, self._lines[number][1])
            except BlockingIOError:
                return
            except OSError:  # srun is gone: nobody reads any more, and who is alive is decided elsewhere
                self._lines.clear()
                self._newest.clear()
                return
            self._forget(number)
            if not self._lines and self._dropped:
                self._add(bus.Note(node=self._node, text=shorten(self._in_words())))
                self._dropped.clear()

    def _add(self, message: bus.FromWatcher) -> None:
        key = _state_of(message)
        if key is not None and key in self._newest:
            self._forget(self._newest[key])
        cut: list[str] = []
        line = bus.encode(message, on_cut=cut.append)
        self._number += 1
        self._lines[self._number] = message, line
        if key is not None:
            self._newest[key] = self._number
        for what in cut:
            self._add(bus.Note(node=self._node, text=shorten(what)))
        if len(self._lines) > self._lines_max:
            self._drop()

    def _drop(self) -> None:
        """Drop the oldest line that nothing is decided by; where there is none, wait longer before one is dropped."""
        unimportant = (number for number, (message, _) in self._lines.items() if isinstance(message, _FOR_PEOPLE))
        number = next(unimportant, None)
        if number is None and len(self._lines) > max(self._lines_max, IMPORTANT_LINES_MAX):
            number = next(iter(self._lines))
        if number is not None:
            self._dropped[type(self._lines[number][0]).__name__] += 1
            self._forget(number)

    def _forget(self, number: int) -> None:
        message, _ = self._lines.pop(number)
        key = _state_of(message)
        if key is not None and self._newest.get(key) == number:
            del self._newest[key]

    def _in_words(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self._dropped.most_common())
        return f"the supervisor did not read for a while: {self._dropped.total()} lines were dropped ({kinds})"


def _state_of(message: bus.FromWatcher) -> Hashable | None:
    """Return what a line tells the newest state of; None for what happened once."""
    match message:
        case bus.Alive():
            return "alive"
        case bus.Rank(message=Progress() as progress):
            return "progress", progress.launch, progress.rank
        case bus.Paced():
            return "paced", message.launch
        case bus.ShardRead(done=False):
            return "read", message.number, message.index
        case _:
            return None
