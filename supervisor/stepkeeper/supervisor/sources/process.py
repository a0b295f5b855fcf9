"""The queue between the sources and the supervisor's loop, and what may end the loop by failing.

Essential is what training cannot be kept alive without: there a failure ends the supervisor, so that the watchers take
over.  Every other part may fail: it is logged once with its traceback, comes as an event, and the training goes on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

from stepkeeper import loop_tools
from stepkeeper.core.events import Event, PartFailed, SignalReceived, Superseded
from stepkeeper.loop_tools import shown
from stepkeeper.run_store import lease
from stepkeeper_trainer.formats.lease import Lease, LeaseError


class Part(StrEnum):
    """What runs beside the loop, or is called by it."""

    # essential
    SIGNALS = "signals"
    BUS = "bus"
    LAUNCH = "launch"
    KILL = "kill"
    # optional: each is answered, or nobody waits for it
    ASK_SLURM = "ask-slurm"
    ASK_IDLE_NODES = "ask-idle-nodes"
    RELEASE_NODES = "release-nodes"
    REQUEUE = "requeue"
    CHOOSE_CHECKPOINT = "choose-checkpoint"
    VERIFY_CHECKPOINT = "verify-checkpoint"
    ROLL_BACK = "roll-back"
    TEST_STORAGE = "test-storage"
    DIAGNOSIS = "diagnosis"
    EVIDENCE = "evidence"
    STACKS = "stacks"
    READERS = "readers"
    LOG_PROGRESS = "log-progress"
    STANDBYS = "standbys"
    NOTIFY = "notify"
    ANSWER = "answer"
    REQUESTS = "requests"
    LEASE = "lease"
    SHEPHERD = "shepherd"
    SLURMD = "slurmd"
    BUS_ERRORS = "bus-errors"
    PACE = "pace"  # which nodes are slow
    SLURMS_TIME = "slurms-time"
    FRAMEWORK = "framework"
    RANK_FILES = "rank-files"
    LAUNCH_LOGS = "launch-logs"
    METRICS = "metrics"
    JOURNAL = "journal"
    LOG = "log"
    OTHER = "other"  # threads without a part of their own


ESSENTIAL = frozenset((Part.SIGNALS, Part.BUS, Part.LAUNCH, Part.KILL))


class Inbox(loop_tools.Inbox[Event]):
    """Events on their way to the loop."""

    def run(self, part: Part, work: Callable[[], object], *, name: str = "") -> threading.Thread:
        """Run a part on a thread, as `run_optional` where it is not essential."""
        if part in ESSENTIAL:
            return self.run_thread(name or part.value, work)
        return self.run_optional(part.value, work, name=name)

    def superseded(self, run_directory: Path, ours: Lease) -> Superseded | None:
        """Return that a newer attempt holds the run; None where that is not so, or cannot be known now."""
        try:
            newer = lease.superseded(run_directory, ours)
        except (OSError, LeaseError):
            return None  # `watch_lease` looks again
        return None if newer is None else superseded(self.clock.now(), newer)

    def failed(self, part: str, error: BaseException) -> bool:
        """Report a failure of an optional part as an event, too."""
        new = super().failed(part, error)
        if new:
            self.put(PartFailed(at=self.clock.now(), part=str(part), error=shown(error)))
        return new


def superseded(at: float, newer: Lease) -> Superseded:
    """Return the event of a newer attempt that holds the run."""
    return Superseded(at=at, by_job_id=newer.job_id, by_restart_count=newer.restart_count)


# Signals to the batch process become events.

NOTICED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def listen_for_signals(inbox: Inbox) -> None:
    """Begin.  Only the main thread may."""

    def take(number: signal.Signals) -> None:
        inbox.put(SignalReceived(at=inbox.clock.now(), signal=number.name.removeprefix("SIG")))

    loop_tools.listen_for_signals(NOTICED, take, inbox.run_thread)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost terminal is no reason to end a training
