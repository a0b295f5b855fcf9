"""A save between two steps: a notice finds the main thread in an evaluation, a compilation, or behind a slow loader.

The main thread answers a notice at the end of its step.  Where that is far, a thread of the library does: once all
ranks have heard of the stop, and all stand behind the same step with a state that nothing has changed since, it saves
that state.  Meanwhile no rank's optimizer begins a step.  The thread talks to those of the other ranks over a group of
its own, so it waits for no main thread.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from stepkeeper_trainer.coordinate.agreement import Agreement, Call
from stepkeeper_trainer.formats.messages import Stopped
from stepkeeper_trainer.log import say, warn

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from stepkeeper_trainer.coordinate.boundary import Boundary
    from stepkeeper_trainer.coordinate.requests import Requests
    from stepkeeper_trainer.link import Link
    from stepkeeper_trainer.save.saver import Saver
    from stepkeeper_trainer.state.last_step import LastStep
    from stepkeeper_trainer.state.training import Counters

LISTEN_EVERY_S = 0.2
AGAIN_AFTER_S = 0.5  # between two attempts
PATIENCE_S = 2.0  # for the main thread to come to the end of its step
PATIENCE_STEPS = 4  # or for so many usual steps
PATIENCE_SHARE = 0.25  # and never longer than this share of the time that is left
HELD_MAX_S = 30.0  # that the main thread is held up, whatever happens
NEVER_MS = 1 << 62
END_WITHIN_S = 10.0
TRIES_MAX = 4  # saves that may fail before the end of the step is left to answer


class Gate:
    """Whether the main thread is changing the state: another thread closes it while it copies the state."""

    def __init__(self) -> None:
        """Begin with the main thread inside."""
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._inside = True

    def enter(self) -> None:
        """Say in the main thread that it is going to change the state; wait while the gate is closed."""
        limit_at = time.monotonic() + HELD_MAX_S
        while True:
            with self._lock:
                if time.monotonic() >= limit_at:
                    self._open.set()  # the thread that has closed it is late, and finds the state changed
                if self._inside or self._open.is_set():
                    self._inside = True
                    return
            self._open.wait(limit_at - time.monotonic())

    def leave(self) -> None:
        """Say in the main thread that the state is that of a whole step."""
        with self._lock:
            self._inside = False

    def close(self) -> bool:
        """Hold the main thread up where it comes next; false where it is inside."""
        with self._lock:
            if self._inside:
                return False
            self._open.clear()
            return True

    def open(self) -> None:
        """Let the main thread go on."""
        self._open.set()


class BetweenSteps:
    """Of one rank."""

    def __init__(
        self,
        *,
        group: Any | None,
        within_s: float,
        boundary: Boundary,
        requests: Requests,
        last_step: LastStep,
        counters: Counters,
        saved_step: int | None,
        save_within_s: float,
        saver: Saver,
        rank: int,
        link: Link,
    ) -> None:
        """Begin to listen, once the state is resumed; `saved_step` is the step of the checkpoint."""
        self.gate = Gate()
        self.begun = False  # this rank's thread talks to the others
        self.agreement = Agreement(group, within_s=within_s)
        self._boundary, self._requests, self._last_step = boundary, requests, last_step
        self._counters, self._saved_step, self._save_within_s = counters, saved_step, save_within_s
        self._saver, self._rank, self._link = saver, rank, link
        self._received_at: float | None = None
        self._served = threading.Event()  # the main threads answer
        self._finishing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stepkeeper-notices", daemon=True)
        self._thread.start()

    def serve(self) -> None:
        """Say in the main thread that all ranks' main threads have agreed to stop."""
        self._served.set()

    def begin_change(self) -> None:
        """Say in the main thread that the state is going to change; wait while another thread copies it."""
        self.gate.enter()
        self._last_step.forget()

    def end_change(self) -> None:
        """Say in the main thread that the state is that of a whole step, which another thread may copy."""
        if self._requests.stop_agreed:
            self.serve()
        self._last_step.mark()
        self.gate.leave()

    def end(self, *, begun: bool) -> bool:
        """Wait for the end of all ranks' threads, where any of them has `begun` to talk; false if that is late."""
        self.begun = self.begun or begun
        self._served.set()
        self._finishing.set()
        self._thread.join(END_WITHIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self.begun:
                if self._finishing.wait(LISTEN_EVERY_S) and not self.begun:
                    return
                self._requests.receive()
                if not self._served.is_set() and self._requests.stop_asked and self._patience_is_over():
                    self.begun = True
            self._talk()
        except Exception as error:  # noqa: BLE001  # training and its own saves go on without
            warn("notices_wait_for_a_step", why=str(error).splitlines()[0] if str(error) else type(error).__name__)
        finally:
            self.gate.open()

    def _patience_is_over(self) -> bool:
        now = time.time()
        self._received_at = self._received_at or now
        wait_s = max(PATIENCE_S, PATIENCE_STEPS * self._boundary.usual_step_s)
        deadline_at = self._requests.deadline_asked
        if deadline_at is not None:
            wait_s = min(wait_s, PATIENCE_SHARE * max(0.0, deadline_at - self._received_at))
        return now >= self._received_at + wait_s

    def _talk(self) -> None:
        """Try until the state is saved, or a main thread answers; all ranks go through the same rounds.

        Raises:
            RuntimeError, StepkeeperError: another rank ended, or did not come.
        """
        self.agreement.settle(Call.NOTICE, [])  # all have heard
        said = ""
        for _ in range(TRIES_MAX):
            while not self._hold_together():
                if self._any(self._served.is_set()):
                    return
                if (why := self._last_step.why_not) != said:
                    say("notice_waits", step=self._counters.step, why=why)
                    said = why
                time.sleep(AGAIN_AFTER_S)
            if not self._any(not self._is_saved_here()):
                self.gate.open()
                if not self._any(not self._saver.wait_shared(self._limit_at())):
                    self._report_nothing_to_save()
                    return
            else:
                collect = self._last_step.take()
                if not self._any(collect is None) and collect is not None and self._save(collect):
                    return
            self.gate.open()
            time.sleep(AGAIN_AFTER_S)

    def _hold_together(self) -> bool:
        """Hold the main threads of all ranks up behind the same step; false where one has gone on."""
        held = not self._served.is_set() and not self._saver.busy and self.gate.close() and self._is_known()
        step = self._counters.step
        moving, highest, lowest = self.agreement.settle(Call.NOTICE, [int(not held), step, -step])
        together = not moving and highest == -lowest
        if not together:
            self.gate.open()
        return together

    def _is_known(self) -> bool:
        try:
            return self._is_saved_here() or self._last_step.unchanged
        except Exception as error:  # noqa: BLE001  # the other ranks must hear that this one does not stand
            self._last_step.why_not = f"{type(error).__name__}: {error}".splitlines()[0]
            return False

    def _is_saved_here(self) -> bool:
        """Whether the step is saved or being saved, as far as this rank knows; the beginning needs no save."""
        return self._counters.step in (self._saved_step or 0, self._boundary.saved_step)

    def _report_nothing_to_save(self) -> None:
        """Say that the step is on disk already, or none is done: the ranks may end."""
        step = self._counters.step
        say("nothing_to_save", step=step, why="no step was done since the last one that is saved")
        if self._rank == 0:
            last = self._saver.last_save
            self._link.send(Stopped(step=step, save_id=last.save_id if last is not None else None), keep=True)

    def _save(self, collect: Callable[[], dict[str, torch.Tensor]]) -> bool:
        """Save the state of the last step, and wait for the end of that; true where it has not failed on any rank."""
        self._requests.deadline_at = self._earliest(self._requests.deadline_asked)
        limit_at = self._limit_at()
        try:
            begun = self._boundary.begin_together(
                Call.NOTICE,
                limit_at=limit_at,
                emergency=True,
                agreement=self.agreement,
                collect=collect,
            )
            changed = self._any(begun and not self._last_step.unchanged)
        finally:
            self.gate.open()
        if changed:
            self._saver.cancel("the state changed while it was copied")
        elif begun:
            say(
                "save_between_steps", step=self._counters.step, why="a stop is asked for, and the next step is not done"
            )
        return not self._any(not (begun and self._saver.wait_shared(limit_at)))

    def _limit_at(self) -> float:
        return self._requests.limit_at(self._save_within_s)

    def _earliest(self, deadline_at: float | None) -> float | None:
        """Return the earliest deadline that any rank was given, in Unix seconds."""
        own = -int(1000 * deadline_at) if deadline_at is not None else -NEVER_MS
        (latest,) = self.agreement.settle(Call.NOTICE, [own])
        return None if latest == -NEVER_MS else -latest / 1000

    def _any(self, own: bool) -> bool:  # noqa: FBT001
        return bool(self.agreement.settle(Call.NOTICE, [int(own)])[0])


def end_notices(between: BetweenSteps | None, agreement: Agreement, limit_at: float) -> Agreement | None:
    """End what answers notices between steps, on all ranks; return its agreement, where that can be closed.

    Ranks that go on with their steps get an error here, before anybody waits for a save.
    """
    begun = between is not None and between.begun
    try:
        begun = bool(agreement.settle(Call.FINISH, [int(begun)], within_s=max(0.0, limit_at - time.time()))[0])
    except RuntimeError as error:
        warn("rank_lost", why=str(error).splitlines()[0])
    return between.agreement if between is not None and between.end(begun=begun) else None
