"""From shared storage to the cold tier, beside training: every rank sends its own files, rank 0 the manifest last.

Rank 0 says which step goes next, by a small directory beside the step directories (`.cold-step_….<save_id>`); each
rank sends its files, reads them back, and lays a mark there.  A file of that name says that rank 0 gave the step up.
The newest step goes first; those that waited behind it are left out.  What was sent is not sent
again after a failure or a kill.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stepkeeper_trainer.formats.manifest import ManifestError, step_name
from stepkeeper_trainer.log import say, warn
from stepkeeper_trainer.tiers.copying import CopyStoppedError, Pace, push
from stepkeeper_trainer.tiers.directory import FAILED, DirectoryTier, LocalTier, mark_failed, require_none_failed
from stepkeeper_trainer.tiers.tier import DamagedCopyError, Held, Tier, TierError, writer_of

BOARD = ".cold-"
DONE = "done-"  # and a rank
RETRY_S, RETRY_MAX_S, TRIES_MAX = 5.0, 300.0, 6
FAILING_AFTER = 4  # tries: then the end of a run does not wait for the tier any more
RANKS_WITHIN_S = 3600.0  # the slowest rank's share; then the next step is tried
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Going:
    """A committed step that is to go."""

    step: int
    save_id: str
    directory: Path


def share_of(held: Held, rank: int, world_size: int) -> list[str]:
    """Return the files that a rank sends: its own, where it has written the step."""
    return [name for name in held.manifest.files if writer_of(name) % world_size == rank]


class ColdCopies:
    """One a rank: `offer` returns at once."""

    def __init__(
        self,
        cold: Tier,
        *,
        shared: DirectoryTier,
        local: LocalTier | None,
        rank: int,
        world_size: int,
        pace: Pace,
        fence: Callable[[], object],
        after: Callable[[], object] = lambda: None,
        retry_s: float = RETRY_S,
    ) -> None:
        """Start the thread.

        Files are read from this node's disk where they are.  `fence` raises where this attempt must not commit any
        more; `after` is called on rank 0 when a step has arrived.
        """
        self._cold, self._shared, self._local = cold, shared, local
        self._rank, self._world_size = rank, world_size
        self._pace, self._fence, self._after, self._retry_s = pace, fence, after, retry_s
        self._changed = threading.Condition()
        self._waiting: list[Going] = []
        self._in_hand = False
        self._failing = False  # several tries in a row came to nothing
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="stepkeeper-cold", daemon=True)
        self._thread.start()

    def offer(self, going: Going) -> None:
        """Have a step of the run sent."""
        with self._changed:
            self._waiting.append(going)
            self._failing = False  # a new step has its tries
            self._changed.notify_all()

    def close(self, limit_at: float) -> bool:
        """Let what waits go until `limit_at` (Unix seconds), then stop between two chunks; true if all went.

        A tier that fails again and again is not waited for.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failing or not (self._waiting or self._in_hand), max(0.0, limit_at - time.time())
            )
            through = not (self._waiting or self._in_hand)
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(max(0.0, limit_at - time.time()) + 1.0)
        return through

    # --- the thread ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._in_hand = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                self._in_hand = True
            going = self._next()
            if going is None:
                self._pause(_PAUSE_S)
                continue
            try:
                self._send(going)
                self._failing = False
            except CopyStoppedError:
                if self._rank != 0 and self._board(going).is_dir():  # else it was given up: nobody waits
                    self._mark_failed(going, "its process leaves")
            except Exception as error:  # noqa: BLE001 - told; training must go on
                self._report_failure(going, error)

    def _next(self) -> Going | None:
        """Take the step that goes now: rank 0 takes the newest, the others what rank 0 has taken."""
        with self._changed:
            waiting = list(self._waiting)
        chosen = next((each for each in reversed(waiting) if self._rank == 0 or self._board(each).exists()), None)
        if chosen is None:
            return None
        older = waiting[: waiting.index(chosen)]
        with self._changed:
            self._waiting = [each for each in self._waiting if each not in older and each is not chosen]
        if self._rank != 0 and not self._board(chosen).is_dir():
            return None  # rank 0 has passed it
        if self._rank == 0:
            for each in older:
                say("cold_copy_left_out", step=each.step, why="a newer step goes first")
            self._open(chosen)
        return chosen

    def _open(self, going: Going) -> None:
        with suppress(FileNotFoundError):  # the run's directory is there, or the copy fails and says so
            for name in os.listdir(self._shared.checkpoints):
                path = self._shared.checkpoints / name
                if name.startswith(BOARD) and (path != self._board(going) or path.is_file()):
                    _remove(path)  # of an earlier launch, or given up
            # one for this very step may be there: others may have begun by it, and what was sent is sent
            self._board(going).mkdir(exist_ok=True)
            for mark in self._board(going).glob(f"{FAILED}*"):
                mark.unlink(missing_ok=True)

    def _board(self, going: Going) -> Path:
        return self._shared.checkpoints / f"{BOARD}{step_name(going.step)}.{going.save_id}"

    def _send(self, going: Going) -> None:
        began = time.monotonic()
        held = self._shared.held(going.directory.name)
        own = share_of(held, self._rank, self._world_size)
        copied = self._patiently(going, held, own)
        if self._rank != 0:
            (self._board(going) / f"{DONE}{self._rank}").touch()
            return
        self._wait_for_ranks(going)
        self._fence()
        self._cold.staging(held).commit()
        shutil.rmtree(self._board(going), ignore_errors=True)
        seconds = round(time.monotonic() - began, 3)
        say("cold_copied", step=going.step, save_id=going.save_id, tier=self._cold.name, bytes=copied, seconds=seconds)
        self._after()

    def _patiently(self, going: Going, held: Held, own: list[str]) -> int:
        """Send and read back this rank's files; a failure is told and tried again."""
        delay_s = self._retry_s
        for attempt in range(1, TRIES_MAX + 1):
            try:
                return self._push(going, held, own)
            except CopyStoppedError:
                raise
            except (TierError, ManifestError, OSError) as error:
                if self._dropped(going):
                    raise CopyStoppedError(f"step {going.step}: given up") from error
                if attempt == TRIES_MAX:
                    raise
                if attempt >= FAILING_AFTER:
                    with self._changed:
                        self._failing = True
                        self._changed.notify_all()
                warn("cold_copy_failed", step=going.step, rank=self._rank, attempt=attempt, why=error)
            self._pause(delay_s)
            delay_s = min(2 * delay_s, RETRY_MAX_S)
        raise AssertionError("the last try returns or raises")

    def _push(self, going: Going, held: Held, own: list[str]) -> int:
        staging = self._cold.staging(held)
        sent = [name for name in own if not staging.done(name, held.manifest.files[name])]
        copied = 0
        local = self._local.find(held) if self._local is not None else None
        if self._local is not None and local is not None:
            part = Held(local, held.manifest, held.raw)
            try:
                copied += push(
                    self._local.tier, part, staging, sent, pace=self._pace, should_stop=lambda: self._dropped(going)
                ).bytes_copied
            except DamagedCopyError as error:
                warn("local_copy_damaged", step=going.step, rank=self._rank, why=error, instead="shared storage")
        copied += push(
            self._shared, held, staging, own, pace=self._pace, should_stop=lambda: self._dropped(going)
        ).bytes_copied
        for name in own:  # those of an earlier try too: it may have ended before it had read them
            staging.check(name, held.manifest.files[name], lambda: self._dropped(going))
        return copied

    def _wait_for_ranks(self, going: Going) -> None:
        """Wait for the marks of all others (rank 0)."""
        wanted = {f"{DONE}{rank}" for rank in range(1, self._world_size)}
        limit_at = time.monotonic() + RANKS_WITHIN_S
        while True:
            names = set(os.listdir(self._board(going)))
            require_none_failed(self._board(going), names, "send its files")
            if wanted <= names:
                return
            if time.monotonic() > limit_at:
                raise TierError(f"{min(wanted - names)} did not come within {RANKS_WITHIN_S:g} s")
            self._pause(_PAUSE_S / 5)
            if self._stopping:
                raise CopyStoppedError("the process leaves")

    def _report_failure(self, going: Going, error: Exception) -> None:
        text = str(error) if isinstance(error, TierError) else f"{type(error).__name__}: {error}"
        warn("cold_copy_given_up", step=going.step, save_id=going.save_id, rank=self._rank, why=text)
        if self._rank == 0:
            self._pass(going)
        else:
            self._mark_failed(going, text)

    def _pass(self, going: Going) -> None:
        """Let ranks that have not come to a step yet know that it was given up: they need not wait for it."""
        _remove(self._board(going))
        with suppress(OSError):  # the directory is not there any more, or takes nothing: they wait for the next step
            self._board(going).touch()

    def _mark_failed(self, going: Going, why: str) -> None:
        """Let rank 0 know that it need not wait."""
        try:
            mark_failed(self._board(going), self._rank, why)
        except FileNotFoundError:
            return  # rank 0 has given it up already
        except OSError as unsaid:
            warn("failure_unsaid", step=going.step, rank=self._rank, why=unsaid)

    def _dropped(self, going: Going) -> bool:
        return self._stopping or not self._board(going).is_dir()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, seconds)


def forget_given_up(checkpoints: Path) -> None:
    """Remove the words that earlier launches gave steps up: this one tries again.  Before any rank begins to send."""
    for path in checkpoints.glob(f"{BOARD}*"):
        if path.is_file():
            path.unlink(missing_ok=True)


def _remove(board: Path) -> None:
    if board.is_dir():
        shutil.rmtree(board, ignore_errors=True)
    else:
        board.unlink(missing_ok=True)
