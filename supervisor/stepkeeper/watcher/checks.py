"""Whether a launch may start on this node: looked at when asked, or already while the ranks before it are ended.

A look starts processes and asks the driver: most of the time between two launches.  So it begins with the attempt, or
with the word to kill the ranks, and serves the launch that follows at once.  A launch that comes later, or a second
question, has a look of its own.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec

from stepkeeper.node_agent import checks
from stepkeeper.watcher import messages as bus

CHECKS_WITHIN_S = 20.0  # all of them together; the supervisor waits for 60 s
CLOCK_OFFSET_MAX_S = 30.0  # between this node and the supervisor's: more confuses leases, logs and deadlines
FRESH_S = 10.0  # an older look is not used


class _Look:
    """One look at GPUs and storage, on a thread of its own."""

    def __init__(self, wanted: checks.Wanted) -> None:
        self._wanted = wanted
        self.began = time.monotonic()
        self.used = False  # it has served a launch
        self._report: checks.Report | None = None
        self._thread = threading.Thread(target=self._run, name="checks ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._report = checks.run_checks(self._wanted, within_s=CHECKS_WITHIN_S)

    def report(self) -> checks.Report | None:
        """Wait for what was found; None where the look itself failed."""
        self._thread.join(CHECKS_WITHIN_S + checks.GRACE_S)
        return self._report


class NodeChecks:
    """The looks at one node."""

    def __init__(
        self, assignment: bus.Assignment, *, gpus: tuple[str, ...] | None = None, fresh_s: float = FRESH_S
    ) -> None:
        """Do nothing yet.

        Args:
            assignment: what a launch wants of each node.
            gpus: where the job's GPUs sit; None: not known, so all count.
            fresh_s: how old a look may be that was begun ahead.
        """
        self._wanted = checks.Wanted(
            gpus_min=assignment.gpus_per_node or 0,
            gpus_held=gpus,
            writable=(Path(assignment.run_directory),),
            free_bytes=assignment.free_bytes_min,
        )
        self._fresh_s = fresh_s
        self._lock = threading.Lock()
        self._newest: _Look | None = None  # of those begun ahead

    def begin(self) -> None:
        """A launch comes soon: look already."""
        with self._lock:
            if self._newest is None or not self._is_usable(self._newest):
                self._newest = _Look(self._wanted)

    def wait(self) -> None:
        """Wait for the end of a look that was begun ahead."""
        with self._lock:
            look = self._newest
        if look is not None:
            look.report()

    def report(self, asked: bus.Clear | bus.Check, heard_at: float) -> checks.Report:
        """Return whether the node is fit.

        Args:
            asked: the question, with the supervisor's clock.
            heard_at: when it arrived, by our clock.
        """
        assert asked.at is not None, "who asks without a clock wants no checks"
        # the clock first: whatever is waited for would count as its offset
        clock = checks.Wanted(
            nvml=False, reference_time=asked.at + (time.time() - heard_at), clock_offset_s=CLOCK_OFFSET_MAX_S
        )
        now = checks.run_checks(clock, within_s=CHECKS_WITHIN_S)
        found = self._take() if isinstance(asked, bus.Clear) else None
        if found is None:
            found = checks.run_checks(self._wanted, within_s=CHECKS_WITHIN_S)
        return msgspec.structs.replace(
            found, problems=(*now.problems, *found.problems), warnings=(*now.warnings, *found.warnings)
        )

    def _take(self) -> checks.Report | None:
        """Return what was found ahead: once, and only where it is fresh."""
        with self._lock:
            look = self._newest
            if look is None or not self._is_usable(look):
                return None
            look.used = True
        return look.report()

    def _is_usable(self, look: _Look) -> bool:
        return not look.used and time.monotonic() - look.began <= self._fresh_s
