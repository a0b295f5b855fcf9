"""The queue between the sources and the supervisor's loop, and what may end the loop by failing.

Essential is what training cannot be kept alive without: there a failure ends the supervisor, so that the watchers take
over.  Every other part may fail: it is logged once with its traceback, comes as an event, and the training goes on.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable
from enum import StrEnum
from typing import ParamSpec

from stepkeeper import loop_tools
from stepkeeper.core.events import Event, PartFailed, SignalReceived
from stepkeeper.loop_tools import Clock

ERROR_CHARACTERS_MAX = 300
Arguments = ParamSpec("Arguments")


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
    METRICS = "metrics"
    JOURNAL = "journal"
    LOG = "log"
    OTHER = "other"  # threads without a part of their own


ESSENTIAL = frozenset((Part.SIGNALS, Part.BUS, Part.LAUNCH, Part.KILL))
Report = Callable[[Part, BaseException, str], None]


def to_stderr(part: Part, error: BaseException, trace: str) -> None:
    """Say it where no log is there yet."""
    sys.stderr.write(f"stepkeeper: {part.value} failed: {error!r}\n{trace}")


class Inbox(loop_tools.Inbox[Event]):
    """Events on their way to the loop."""

    def __init__(self, clock: Clock, report: Report = to_stderr) -> None:
        """Begin without events.

        Args:
            clock: of the events.
            report: called once for each kind of failure of an optional part.
        """
        super().__init__(clock)
        self.report = report
        self._failures = threading.Lock()
        self._failed: set[tuple[Part, type[BaseException]]] = set()

    def run(
        self,
        part: Part,
        work: Callable[[], object],
        *,
        name: str = "",
        answer: Callable[[str], Event] | None = None,
    ) -> threading.Thread:
        """Run a part on a thread.

        Args:
            part: which.
            work: what it does.
            name: of the thread, where the part has several.
            answer: the event that the rules wait for, made of what went wrong; None: they wait for none.
        """
        if part in ESSENTIAL:
            return self.run_thread(name or part.value, work)

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - reported, and training goes on
                self.failed(part, error)
                if answer is not None:
                    self.put(answer(shown(error)))

        return self.run_thread(name or part.value, guarded)

    def guard(self, part: Part, call: Callable[Arguments, object]) -> Callable[Arguments, None]:
        """Return an optional call that never raises."""

        def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
            try:
                call(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - reported, and training goes on
                self.failed(part, error)

        return guarded

    def failed(self, part: Part, error: BaseException) -> None:
        """Report a failure of an optional part, each kind once: in the log, and as an event."""
        with self._failures:
            known = (part, type(error)) in self._failed
            self._failed.add((part, type(error)))
        if known:
            return
        self.report(part, error, "".join(traceback.format_exception(error)))
        self.put(PartFailed(at=self.clock.now(), part=part.value, error=shown(error)))

    def watch_threads(self) -> None:
        """Report what other threads of this process raise, too: nothing else would."""

        def hook(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
                self.failed(Part.OTHER, args.exc_value)

        threading.excepthook = hook


def shown(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:ERROR_CHARACTERS_MAX]


# Signals to the batch process become events.

NOTICED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def listen_for_signals(inbox: Inbox) -> None:
    """Begin.  Only the main thread may."""

    def take(number: signal.Signals) -> None:
        inbox.put(SignalReceived(at=inbox.clock.now(), signal=number.name.removeprefix("SIG")))

    loop_tools.listen_for_signals(NOTICED, take, inbox.run_thread)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost terminal is no reason to end a training
