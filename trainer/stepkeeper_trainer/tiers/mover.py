"""Copies committed steps from tier to tier beside training, on one thread.

The newest step is what counts: where the copies cannot keep up, older ones that still wait are left out.
A failure is told, tried again, and never harms training or what is already copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stepkeeper_trainer.tiers.copying import CopyStoppedError, Pace, copy_step
from stepkeeper_trainer.tiers.tier import Held, Tier, TierError

RETRY_S, RETRY_MAX_S = 5.0, 300.0
TRIES_MAX = 6  # of one copy; the next step is tried anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a step on its way from one tier to the next."""

    save_id: str
    step: int
    source: str
    target: str
    directory: str | None = None  # in the target; None where it failed, or was left out
    bytes_copied: int = 0
    seconds: float = 0.0
    error: str = ""
    left_out: bool = False  # a newer one was waiting


class Mover:
    """One a process: `offer` returns at once, `wait` is for the end."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        pace: Pace | None = None,
        tell: Callable[[Outcome], None] = lambda _outcome: None,
        before_commit: Callable[[], None] = lambda: None,
        counts: Callable[[Held], bool] = lambda _held: True,
        retry_s: float = RETRY_S,
    ) -> None:
        """Start the thread.

        Args:
            tiers: in the order of copies: the first is where steps are committed.
            pace: of all copies together.
            tell: called on the mover's thread with each outcome.
            before_commit: raises where this process must not commit any more.
            counts: whether a step is still on the run's lineage: one that was rolled back is not copied on.
            retry_s: after a failure; it doubles up to five minutes.
        """
        assert len(tiers) > 1, "there is nothing to copy between"
        self._tiers, self._pace, self._tell = list(tiers), pace or Pace(), tell
        self._before_commit, self._counts, self._retry_s = before_commit, counts, retry_s
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, Held]] = []  # the tier where it is, oldest first
        self._arrived: dict[str, int] = {}  # save_id: the last tier that has it
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="stepkeeper-mover", daemon=True)
        self._thread.start()

    def offer(self, held: Held) -> None:
        """Have a step of the first tier copied."""
        with self._changed:
            self._waiting.append((0, held))
            self._changed.notify_all()

    def wait(self, save_id: str, tier: int, limit_at: float) -> bool:
        """Wait until tier number `tier` has a step, at most until `limit_at` (monotonic); true if it has."""
        with self._changed:
            return (
                self._changed.wait_for(
                    lambda: self._arrived.get(save_id, 0) >= tier or self._stopping,
                    max(0.0, limit_at - time.monotonic()),
                )
                and self._arrived.get(save_id, 0) >= tier
            )

    def close(self, within_s: float) -> bool:
        """Stop between two chunks; a next mover goes on there.  True if the thread has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        failures = 0  # of the copy at hand, in a row
        while True:
            with self._changed:
                if failures:
                    delay_s = min(RETRY_MAX_S, self._retry_s * 2 ** (failures - 1))
                    self._changed.wait_for(lambda: self._stopping, delay_s)
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                left_out = self._drop_older()
                number, held = self._waiting[0]
            for each in left_out:
                self._tell(each)
            outcome = self._copy(number, held)
            if outcome is None:
                return  # it was asked to stop
            failures = failures + 1 if outcome.error else 0
            with self._changed:
                if not outcome.error or failures == TRIES_MAX:
                    failures = 0
                    self._waiting.remove((number, held))
                if outcome.directory is not None:
                    self._arrived[held.manifest.save_id] = number + 1
                    if number + 2 < len(self._tiers):
                        self._waiting.append((number + 1, replace(held, directory=outcome.directory)))
                self._changed.notify_all()
            self._tell(outcome)

    def _drop_older(self) -> list[Outcome]:
        """Keep the newest of those that wait in each tier; first come first served among tiers."""
        newest = dict(self._waiting)  # the later one replaces the earlier
        dropped = [(number, held) for number, held in self._waiting if newest[number] is not held]
        self._waiting = [(number, held) for number, held in self._waiting if newest[number] is held]
        return [self._outcome(number, held, left_out=True) for number, held in dropped]

    def _copy(self, number: int, held: Held) -> Outcome | None:
        began = time.monotonic()
        try:
            if not self._counts(held):
                return self._outcome(number, held, left_out=True)
            pushed = copy_step(
                self._tiers[number],
                held,
                self._tiers[number + 1],
                pace=self._pace,
                should_stop=lambda: self._stopping,
                before_commit=self._before_commit,
            )
        except CopyStoppedError:
            return None
        except Exception as error:  # noqa: BLE001 - told, tried again; training must go on
            text = str(error) if isinstance(error, TierError) else f"{type(error).__name__}: {error}"
            return self._outcome(number, held, error=text, seconds=time.monotonic() - began)
        return self._outcome(
            number,
            held,
            directory=pushed.directory,
            bytes_copied=pushed.bytes_copied,
            seconds=time.monotonic() - began,
        )

    def _outcome(self, number: int, held: Held, **more: object) -> Outcome:
        return Outcome(
            save_id=held.manifest.save_id,
            step=held.manifest.step,
            source=self._tiers[number].name,
            target=self._tiers[number + 1].name,
            **more,  # type: ignore[arg-type]
        )
