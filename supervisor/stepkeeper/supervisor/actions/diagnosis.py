"""Why a launch failed: its evidence is gathered and joined on a thread of its own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.diagnosis import collect, log_lines
from stepkeeper.diagnosis.classify import classify as join
from stepkeeper.redaction import redact
from stepkeeper.run_store import lines
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.supervisor.sources.process import Inbox, Part

TEXT_CHARACTERS_MAX = 300
READING_SHARE = 0.25  # of the time for a verdict: other logs than the first ones wait no relaunch longer
EVENTS_MAX = 4096  # events of one launch: exits of so many ranks, and what nodes and Slurm said besides
_EVIDENCE = (
    on.RankExited,
    on.NodeFaulted,
    on.WatcherReady,
    on.WatcherLost,
    on.SlurmAnswered,
    on.LaunchRefused,
    on.LaunchEnded,
)


class EvidenceBuffer:
    """Remembers of the newest launch what a verdict on it needs: the journal may be late, and is long."""

    def __init__(self, attempt: int, restarts: int) -> None:
        self._attempt = attempt
        self._restarts = restarts
        self._events: deque[on.Event] = deque(maxlen=EVENTS_MAX)
        self._killed_at: float | None = None

    def add(self, event: on.Event, effects: Sequence[do.Effect]) -> None:
        """Take in an event and what was ordered because of it."""
        if isinstance(event, _EVIDENCE):
            self._events.append(event)
        for effect in effects:
            if isinstance(effect, do.StartLaunch):
                before = [each for each in self._events if isinstance(each, on.NodeFaulted)]
                recent = [each for each in before if each.at >= event.at - collect.FAULTS_BEFORE_S]
                self._events.clear()
                self._events.extend(recent)
                self._killed_at = None
            elif isinstance(effect, do.KillRanks) and self._killed_at is None:
                self._killed_at = event.at

    def launch(self, effect: do.JudgeLaunch) -> collect.Launch:
        """Return the launch that is to be judged."""
        events = tuple(self._events)
        ended = next((each for each in events if isinstance(each, on.LaunchEnded)), None)
        return collect.Launch(
            self._attempt,
            effect.launch,
            ended,
            events,
            self._restarts,
            newest=True,
            killed_at=self._killed_at,
            found=effect.found,
        )


def diagnose(run: RunDirectory, launch: collect.Launch, *, within_s: float, inbox: Inbox) -> None:
    """Tell why a launch failed; `Judged` comes, unless the storage hangs.

    The logs of the nodes whose ranks failed are read first, then others for as long as there is time: of a thousand
    nodes most say the same.
    """
    until = time.monotonic() + READING_SHARE * within_s
    first = dict.fromkeys(each.node for each in launch.events if isinstance(each, on.RankExited))

    def act() -> on.Judged:
        evidence = collect.of_journal(launch)
        unread = ""
        try:
            evidence += collect.of_logs(
                run.logs(launch.attempt, launch.launch),
                first=tuple(first),
                ends=log_lines.QUICK,
                enough=lambda: time.monotonic() > until,
            )
            ended = lines.ended_at(run.path, launch.attempt, launch.launch)
        except OSError as error:  # what is known besides counts
            unread, ended = f"{error.filename}: {error.strerror}", None
        verdict = join(evidence)
        seen = launch.found.step if launch.found is not None else None  # by words, at most one a second
        step = ended.step if ended is not None else seen
        if verdict.cause is Cause.NUMERICAL:
            wrong = [each for each in (seen, ended.wrong_step if ended else None) if each is not None]
            step = min(wrong, default=step)
        text = verdict.evidence[0].text if verdict.evidence else unread
        return on.Judged(
            at=inbox.clock.now(),
            launch=launch.launch,
            cause=verdict.cause,
            rule=verdict.rule,
            confidence=verdict.confidence,
            text=redact(text)[:TEXT_CHARACTERS_MAX],
            location=redact(verdict.location)[:TEXT_CHARACTERS_MAX],
            rank=verdict.rank,
            node=verdict.node,
            step=step,
            second_cause=verdict.otherwise.cause if verdict.otherwise is not None else Cause.UNKNOWN,
        )

    def failed(error: str) -> on.Judged:
        at, text, rule = inbox.clock.now(), redact(error), "diagnosis-failed"
        return on.Judged(at=at, launch=launch.launch, cause=Cause.UNKNOWN, rule=rule, confidence=0.0, text=text)

    inbox.ask(Part.DIAGNOSIS, act, failed)
