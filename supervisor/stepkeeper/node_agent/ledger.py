"""What the agent writes: `incidents.jsonl`, which it must not forget, and `verdict.json`, for Slurm's hooks.

The ledger outlives the agent and a reboot.  One JSON line a change, each durable when it is written; a later line of
the same incident replaces the earlier one.  A torn last line is passed over, and closed by the next.  When the file
has grown, it is written anew with what still matters.  Writing has a thread of its own: a slow disk delays no drain.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from stepkeeper.errors import UsageError
from stepkeeper.loop_tools import reraise, thread
from stepkeeper.node_agent.core.incidents import forget
from stepkeeper.node_agent.core.plan import pending, waits_for_crowd
from stepkeeper.node_agent.core.state import Drain, Incident, Mode, Policy, Repair, State
from stepkeeper.run_store import lines
from stepkeeper_trainer.formats.durable import append_line, write_atomically
from stepkeeper_trainer.formats.plain import open_plain

NAME = "incidents.jsonl"
BYTES_MAX = 4 * 1024 * 1024
RETRY_S = 5.0
WAITING_MAX = 10_000
VERSION = 1


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    v: int = VERSION


class IncidentLine(_Line, frozen=True, kw_only=True, tag="incident"):
    """An incident, as it is now."""

    incident: Incident


class DrainLine(_Line, frozen=True, kw_only=True, tag="drain"):
    """The drain that we hold, or none."""

    drain: Drain | None


class GpusLine(_Line, frozen=True, kw_only=True, tag="gpus"):
    """Which GPUs were there since the boot: a lost one cannot be asked for its UUID any more."""

    boot_id: str
    gpus: tuple[tuple[str, str], ...] = ()
    driver: str = ""
    sequence: int = -1  # kernel records up to here were dealt with, in incidents that are forgotten now


Line = IncidentLine | DrainLine | GpusLine
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class Book(msgspec.Struct, kw_only=True):
    """The content of a ledger."""

    incidents: dict[str, Incident] = {}
    drain: Drain | None = None
    gpus: GpusLine | None = None
    unreadable: int = 0  # lines

    def take(self, line: Line) -> None:
        """Take in one line."""
        match line:
            case IncidentLine():
                self.incidents[line.incident.id] = line.incident
            case DrainLine():
                self.drain = line.drain
            case GpusLine():
                self.gpus = line

    def state(self, node: str, boot_id: str) -> State:
        """Return where an agent that starts now stands."""
        incidents = tuple(sorted(self.incidents.values(), key=lambda each: each.first_at))
        boot = self.gpus if self.gpus is not None and self.gpus.boot_id == boot_id else GpusLine(boot_id=boot_id)
        return State(
            node=node,
            boot_id=boot_id,
            known_sequence=max([boot.sequence, *(each.sequence for each in incidents if each.boot_id == boot_id)]),
            gpus=boot.gpus,
            driver=boot.driver,
            incidents=incidents,
            drain=self.drain,
        )

    def lines(self) -> list[Line]:
        """Return the fewest lines that say the same."""
        found: list[Line] = [IncidentLine(incident=each) for each in self.incidents.values()]
        if self.drain is not None:
            found.append(DrainLine(drain=self.drain))
        if self.gpus is not None:
            found.append(self.gpus)
        return found


def read(path: Path) -> Book:
    """Read a ledger; an empty book where there is none yet.

    Raises:
        OSError: it is there, and is no plain file or cannot be read.
    """
    book = Book()
    try:
        file = open_plain(path)
    except FileNotFoundError:
        return book
    with file:
        for raw in lines.forwards(file):
            if not raw:
                continue
            if (line := lines.parsed(_decoder, raw)) is not None:
                book.take(line)
            else:
                book.unreadable += 1
    return book


def own_directory(path: Path) -> None:
    """Make a directory that is ours and that nobody else can write in; refuse one that is not.

    Raises:
        StepkeeperError: it cannot be made, or it is somebody else's.
    """
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: the agent cannot use it") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise UsageError(f"{path}: must be a directory, no link, owned by the agent's user and writable by nobody else")


class Ledger:
    """Appends lines on a thread.  `append` returns at once; `flush` waits."""

    def __init__(self, path: Path, book: Book, policy: Policy) -> None:
        self._path = path
        self._book = book
        self._policy = policy
        self._changed = threading.Condition()
        self._waiting: deque[Line] = deque(maxlen=WAITING_MAX)
        self._busy = False
        self.on_failure: Callable[[BaseException], object] = reraise  # of a mistake of ours: the thread ends with it
        self.failed = ""  # why the newest write failed; empty when it did not
        thread("ledger", self._write, lambda error: self.on_failure(error)).start()  # noqa: PLW0108 - set later

    def append(self, line: Line) -> None:
        """Hand over one line; returns at once."""
        with self._changed:
            self._waiting.append(line)
            self._changed.notify_all()

    def flush(self, within_s: float) -> bool:
        """Wait until all that was handed over is durable; False if that takes longer, or fails."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._busy) or self.failed, timeout=within_s)
            return not (self._waiting or self._busy)

    def _write(self) -> None:
        while True:
            with self._changed:
                if self.failed:
                    self._changed.wait(RETRY_S)
                self._changed.wait_for(lambda: self._waiting)
                line = self._waiting[0]
                self._busy = True
            failed = self._write_one(line)
            with self._changed:
                self._busy = False
                self.failed = failed
                if not failed and self._waiting and self._waiting[0] is line:
                    self._waiting.popleft()
                self._changed.notify_all()

    def _write_one(self, line: Line) -> str:
        try:
            if self._path.exists() and self._path.lstat().st_size > BYTES_MAX:
                self._compact(line)
            else:
                append_line(self._path, msgspec.json.encode(line))
        except OSError as error:
            return f"{self._path}: {error.strerror}"
        self._book.take(line)
        return ""

    def _compact(self, line: Line) -> None:
        """Write the ledger anew, with `line`.  Raises OSError: the old one stands."""
        book = msgspec.structs.replace(self._book, incidents=dict(self._book.incidents))
        book.take(line)
        boot_id = book.gpus.boot_id if book.gpus is not None else ""
        state = book.state("", boot_id)
        if book.gpus is not None:
            book.gpus = msgspec.structs.replace(book.gpus, sequence=state.known_sequence)
        newest = max((each.last_at for each in state.incidents), default=0.0)
        kept = {each.id for each in forget(state, newest, self._policy).incidents}
        book.incidents = {key: each for key, each in book.incidents.items() if key in kept}
        write_atomically(self._path, b"".join(msgspec.json.encode(each) + b"\n" for each in book.lines()), mode=0o600)
        self._book = book


# `verdict.json`: whether the node is fit for jobs, for Slurm's hooks, which read this file and ask nobody.
#
# Unfit is only what the agent drains, or will as soon as Slurm answers: a hook that failed where the circuit breaker
# forbids a drain would make Slurm itself drain the node.  For the same reason three more are fit: a node whose drain
# waits because many agents ask Slurm, one that Slurm returned after the reboot that we asked for, until its checks
# say otherwise, and one that has passed them, before it is returned.

VERDICT_NAME = "verdict.json"
REFRESH_S = 60.0
"""The file is written anew this often: hooks take an old one for none."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One line of JSON; `fit` comes first, so that a shell can find it."""

    fit: bool
    updated_at: int  # Unix seconds
    node: str
    mode: Mode
    why: str = ""
    incident: str = ""
    format: int = 1


def verdict(state: State, at: float, policy: Policy) -> Verdict:
    """Return what the hooks shall read."""
    wanted = pending(state)
    fit, why, incident = True, "", ""
    if policy.mode is Mode.ACT:
        if wanted and not waits_for_crowd(state, at):
            why, incident = f"{wanted[0].name} {wanted[0].gpu_label}: {wanted[0].why}", wanted[0].id
            fit = False
        if state.drain is not None:
            why = state.drain.reason
            if fit and (comes_back := _comes_back(state.drain)):
                why = f"{comes_back}: {why}"
            else:
                fit = False
    return Verdict(fit=fit, updated_at=int(at), node=state.node, mode=policy.mode, why=why, incident=incident)


def _comes_back(drain: Drain) -> str:
    """Say why a node that we hold may take jobs any moment; "" where it may not."""
    if drain.passed:
        return "the checks have passed"
    if drain.slurm_returns and drain.repair is Repair.REBOOT:
        return "rebooted, and returned by Slurm itself; the checks are under way"
    return ""
