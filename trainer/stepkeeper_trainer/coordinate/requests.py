"""What this rank was asked for, by the supervisor or by a signal, and what all ranks agreed to do of it.

SIGTERM and SIGUSR1 set a flag, and nothing else: what they mean is decided at a step boundary.
"""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from stepkeeper_trainer.coordinate.agreement import Want, Wish
from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from types import FrameType

    from stepkeeper_trainer.formats.messages import SaveRequest
    from stepkeeper_trainer.link import Link


ALONE_AFTER_S = 30.0  # without a watcher; a restarted one is back within a second
SIGNAL_COUNTS_S = 300.0  # a supervisor that has not stopped the run by then does not mean to


class Requests:
    """Asked is what this rank heard; agreed is what all ranks will do, at the same boundary."""

    def __init__(self, link: Link, *, signals: bool = True) -> None:
        """Listen to the supervisor, and with `signals` to SIGTERM and SIGUSR1."""
        self._link = link
        self._signals = SignalFlag(attach=signals)
        self._signal_said: Heard | None = None
        self._signal_done: Heard | None = None  # acted upon, or forgotten
        self._heard: set[tuple[int, bool, float | None]] = set()
        self._saves_asked: set[int] = set()
        self._saves_agreed: set[int] = set()
        self._lock = threading.Lock()  # two threads listen
        self.stop_asked = False
        self.deadline_asked: float | None = None  # Unix seconds
        self.asked_at: float | None = None  # Unix seconds; of the oldest request that is not served
        self.save_agreed = False
        self.stop_agreed = False
        self.deadline_at: float | None = None  # agreed; Unix seconds

    def hear(self) -> None:
        """Take in what has arrived since the last time.  Never blocks."""
        with self._lock:
            self._hear()

    def _hear(self) -> None:
        for request in self._link.receive():
            self._say_once(request)
            if request.stop:
                self.stop_asked = True
            elif request.request_id in self._saves_agreed:
                continue  # every node's watcher sends it: ours came later than another's
            else:
                self._saves_asked.add(request.request_id)
            self.asked_at = self.asked_at or time.time()
            if request.deadline_at is not None:
                self.deadline_asked = min(request.deadline_at, self.deadline_asked or request.deadline_at)
        heard = self._signals.heard
        if heard is not None and heard is not self._signal_done:
            self._weigh(heard)

    def _say_once(self, request: SaveRequest) -> None:
        """Log a request; a watcher repeats it each second until it is served."""
        key = (request.request_id, request.stop, request.deadline_at)
        if key in self._heard:
            return
        self._heard.add(key)
        say(
            "request_heard",
            id=request.request_id,
            stop=request.stop,
            deadline_at=request.deadline_at,
            why=request.why,
        )

    def _weigh(self, heard: Heard) -> None:
        """Obey a signal where no supervisor is there to decide; forget it where one has decided otherwise."""
        now = time.monotonic()
        link = self._link
        if not link.attached or (link.dead and now - link.dead_since >= ALONE_AFTER_S):
            self._signal_done = heard
            if not self.stop_asked:
                self.stop_asked = True
                self.asked_at = self.asked_at or time.time()
                say("stop_asked", why=f"{heard.signal.name}, and no supervisor to decide")
            return
        if heard is not self._signal_said:
            self._signal_said = heard
            warn("signal_heard", signal=heard.signal.name, why="left to the supervisor")
        if not link.dead and (link.back_at > heard.at or now - heard.at > SIGNAL_COUNTS_S):
            self._signal_done = heard
            say("signal_forgotten", signal=heard.signal.name, why="the supervisor is there, and did not ask to stop")

    def wish(self, rank: Wish, *, due: bool = False) -> Wish:
        """Return what this rank has to say to the others: what it was asked for, besides how its saves are.

        Args:
            rank: how its saves are.
            due: whether this rank's clock asks for a periodic save (rank 0's does).
        """
        idle = Want.DUE if due else Want.NOTHING
        want = Want.STOP if self.stop_asked else Want.SAVE if self._saves_asked else idle
        return replace(
            rank,
            want=want,
            deadline_at=self.deadline_asked,
            request_id=max(self._saves_asked, default=0),
        )

    def agree(self, agreed: Wish) -> None:
        """Take over what all ranks said."""
        asked = agreed.want >= Want.SAVE  # less is a clock's word, and nobody's request
        if asked:
            self.deadline_at = agreed.deadline_at
        if agreed.want is Want.STOP:
            self.stop_agreed = True
        if asked and agreed.request_id not in self._saves_agreed:
            self.save_agreed = True
            self._saves_agreed.add(agreed.request_id)
        self._saves_asked -= self._saves_agreed

    def limit_at(self, within_s: float) -> float:
        """Return when a save that begins now must be done: Unix seconds, the deadline at the latest."""
        limit_at = time.time() + within_s
        return limit_at if self.deadline_at is None else min(limit_at, self.deadline_at)

    def close(self) -> None:
        """Give the signals back to the script; a run that stops has no more to hear of them."""
        if not self.stop_agreed:
            self._signals.detach()

    def served(self) -> None:
        """Forget the agreed save: it was begun.  A stop stays agreed."""
        self.save_agreed = False
        self.asked_at = None
        if not (self.stop_agreed or self.stop_asked):
            self.deadline_at = self.deadline_asked = None


CAUGHT = (signal.SIGTERM, signal.SIGUSR1)


class Heard(NamedTuple):
    """One signal that arrived."""

    signal: signal.Signals
    at: float  # of the monotonic clock


class SignalFlag:
    """Remembers the newest of Slurm's signals; a handler of the script's own is still called."""

    def __init__(self, *, attach: bool) -> None:
        """Install the handlers, where this is the main thread (Python allows it nowhere else)."""
        self.heard: Heard | None = None
        self._before: dict[int, Any] = {}
        if attach and threading.current_thread() is threading.main_thread():
            for number in CAUGHT:
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.heard = Heard(signal.Signals(number), time.monotonic())
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def detach(self) -> None:
        """Put back the handlers that were there before."""
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}
