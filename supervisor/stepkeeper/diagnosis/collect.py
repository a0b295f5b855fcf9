"""A run directory -> the evidence of one launch: its journal, its ranks' logs, torch's error files.

Reads only.  What is torn or missing is passed over: the evidence that is there counts.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Cause, Notice
from stepkeeper.core.events import AttemptStarted, JobFacts, NodeFaulted, RankExited
from stepkeeper.core.reasons import Finding
from stepkeeper.core.state import Phase
from stepkeeper.diagnosis import collectives, log_lines, logs, planes
from stepkeeper.diagnosis import logs as diagnosis_logs
from stepkeeper.diagnosis.classify import Evidence, Plane, Role
from stepkeeper.printing import instant
from stepkeeper.reason_text import text
from stepkeeper.run_store import journal, lease
from stepkeeper.run_store.paths import ERRORS_NAME, FAILED_NAME, RunDirectory
from stepkeeper_trainer.formats.plain import open_plain, read_plain

FILES_MAX = 4096  # logs of one launch that are read
FAULTS_BEFORE_S = 120.0  # the kernel logs a fault before the rank that it kills has ended
ANSWERS_AFTER_S = 120.0  # Slurm is asked after a launch ended
SRUN_NAME = "srun.log"
_RANK = re.compile(r"(?:rank|error)-(\d{1,8})")


class Announced(NamedTuple):
    """Why a launch was to end, as the journal says: neither logs nor Slurm do."""

    at: float
    rule: str
    cause: Cause
    plane: Plane
    text: str


class Launch(NamedTuple):
    """One launch of a run, as the journal shows it."""

    attempt: int
    launch: int
    ended: on.LaunchEnded | None  # None: nobody wrote its end
    events: tuple[on.Event, ...]  # of its time, in their order
    restarts: int  # the job's, when it ran
    newest: bool  # of the run
    killed_at: float | None = None  # we ended its ranks, from then on
    found: Finding | None = None  # what the rules saw of it while it ran
    announced: tuple[Announced, ...] = ()  # why it was to end, where that was no failure
    job_id: int = 0  # that it ran in
    started: on.AttemptStarted | None = None  # its attempt
    following: on.AttemptStarted | None = None  # the next attempt, where this launch was the last one of its own

    @property
    def failed(self) -> bool:
        """Whether it ended otherwise than by finishing or by stopping on request.

        One without an end runs, where it is the newest; else its supervisor was lost before it could say more.
        """
        if self.ended is None:
            over = not self.newest or self.following is not None
            return over or any(isinstance(event, on.LaunchRefused) for event in self.events)
        return not (self.ended.finished or self.ended.stopped)


def launches(run: RunDirectory) -> list[Launch]:
    """Return the launches of a run, oldest first.

    Raises:
        OSError: the journal cannot be read.
    """
    found: dict[tuple[int, int], list[on.Event]] = {}
    restarts: dict[tuple[int, int], int] = {}
    killed: dict[tuple[int, int], float] = {}
    seen: dict[tuple[int, int], Finding] = {}
    announced: dict[tuple[int, int], list[Announced]] = {}
    jobs: dict[tuple[int, int], int] = {}
    starts: dict[int, on.AttemptStarted] = {}
    between: list[on.Event] = []
    current: tuple[int, int] | None = None
    for record in journal.read(run.journal):
        key = (record.attempt, record.launch)
        event = record.event
        named = getattr(event, "launch", None)
        if isinstance(named, int) and isinstance(event, on.LaunchBegan | on.RankHello | on.RankExited | on.Progressed):
            key = (record.attempt, named)
            if key != current:
                current = key
                found.setdefault(key, []).extend(_faults(between))
                between = []
        elif isinstance(event, on.LaunchEnded | on.LaunchRefused):
            key = (record.attempt, event.launch)
            current = key
        if isinstance(event, on.AttemptStarted):
            starts[record.attempt] = event
        restarts[key] = record.restart_count
        jobs[key] = record.job_id
        _take_orders(record, killed, seen)
        if isinstance(event, on.Progressed):
            continue  # says nothing of the end, and a long run has many
        if current is not None and current[0] == record.attempt:
            found.setdefault(current, []).append(event)
            announced.setdefault(current, []).extend(_announced(record))
        else:
            between.append(event)
            current = None
    last = {attempt: (attempt, launch) for attempt, launch in sorted(found)}.values()
    return [
        Launch(
            attempt,
            launch,
            next((event for event in events if isinstance(event, on.LaunchEnded) and event.launch == launch), None),
            tuple(events),
            restarts.get((attempt, launch), 0),
            newest=(attempt, launch) == max(found),
            killed_at=killed.get((attempt, launch)),
            found=seen.get((attempt, launch)),
            announced=tuple({each.rule: each for each in reversed(announced.get((attempt, launch), []))}.values()),
            job_id=jobs.get((attempt, launch), 0),
            started=starts.get(attempt),
            following=_following(starts, attempt) if (attempt, launch) in last else None,
        )
        for (attempt, launch), events in sorted(found.items())
    ]


def _take_orders(
    record: journal.Record, killed: dict[tuple[int, int], float], seen: dict[tuple[int, int], Finding]
) -> None:
    """Note when the ranks of a launch were killed, and what the rules found in it."""
    for effect in record.effects:
        if isinstance(effect, do.KillRanks):
            killed.setdefault((record.attempt, effect.launch), record.event.at)
        elif isinstance(effect, do.JudgeLaunch) and effect.found is not None:
            seen[record.attempt, effect.launch] = effect.found


def _following(starts: dict[int, on.AttemptStarted], attempt: int) -> on.AttemptStarted | None:
    return next((starts[number] for number in sorted(starts) if number > attempt), None)


def _announced(record: journal.Record) -> Iterator[Announced]:
    """Yield why a launch is to end from this record on, if it says so.  What Slurm's answers show is read off them."""
    if record.phase not in (Phase.SAVING, Phase.STOPPING):
        return
    event, at = record.event, record.event.at
    said = record.reasons[0] if record.reasons and isinstance(event, on.SlurmAnswered) else None
    stops = any(isinstance(effect, do.RequestSave) and effect.stop for effect in record.effects)
    if isinstance(event, on.Requested) and event.kind == "stop":
        if any(isinstance(effect, do.AnswerRequest) and effect.ok for effect in record.effects):
            who = f"{event.by or 'somebody'} asked to save and end (stepkeeper stop), {instant(at)}"
            yield Announced(at, "asked-to-stop", Cause.STOPPED, Plane.APPLICATION, who)
    elif isinstance(said, because.SlurmSaid) and said.notice is Notice.TIME_LIMIT:
        yield Announced(at, "limit-notice", Cause.TIME_LIMIT, Plane.SLURM, f"{record.why}, {instant(at)}")
    elif stops and not isinstance(said, because.SlurmSaid | because.SlurmUnreachable):
        yield Announced(at, "left-on-purpose", Cause.STOPPED, Plane.APPLICATION, f"{record.why}, {instant(at)}")


class End(NamedTuple):
    """How a run ended, in the words of its last supervisor."""

    at: float
    code: int
    reason: str


def end(run: RunDirectory) -> End | None:
    """Return how the newest attempt of a run ended; None where it runs, or nobody said it.

    Raises:
        OSError: the journal cannot be read.
    """
    records = (line.record for line in journal.read_lines(run.journal, newest_first=True) if line.record is not None)
    last = list(itertools.islice(records, journal.LATE_RECORDS_MAX))
    newest = max((record.attempt for record in last), default=0)
    for record in last:
        exits = [effect for effect in record.effects if isinstance(effect, do.Exit)]
        if exits and record.attempt == newest:
            return End(record.event.at, exits[0].code, text(exits[0].reasons))
    return None


def _faults(events: Iterable[on.Event]) -> list[on.Event]:
    return [event for event in events if isinstance(event, NodeFaulted)]


def of_launch(run: RunDirectory, launch: Launch) -> list[Evidence]:
    """Return all evidence of a launch.

    Raises:
        OSError: its logs are there and cannot be read.
    """
    return [*of_journal(launch), *_unclean_exit(run, launch), *of_logs(run.logs(launch.attempt, launch.launch))]


def _unclean_exit(run: RunDirectory, launch: Launch) -> list[Evidence]:
    """Return the evidence of an end that nobody wrote down."""
    if launch.ended is not None or launch.started is None or launch.following is None:
        return []
    answers = (event.job for event in launch.events if isinstance(event, on.SlurmAnswered))
    if any(job is not None and job.restarts > launch.restarts for job in answers):
        return []  # the supervisor lived to see the requeue, and was killed in it: no node was lost
    return of_unclean_exit(launch.started, launch.following, rescuer(run, launch.started))


def of_journal(launch: Launch) -> list[Evidence]:
    """Return what the journal shows of a launch."""
    end = launch.ended.at if launch.ended is not None else float("inf")
    exits = [event for event in launch.events if isinstance(event, RankExited) and event.launch == launch.launch]
    faults = [event for event in launch.events if isinstance(event, NodeFaulted) and event.at <= end + FAULTS_BEFORE_S]
    answers = [(event.at, event.job) for event in launch.events if isinstance(event, on.SlurmAnswered) and event.job]
    facts: list[tuple[float, JobFacts]] = [(at, job) for at, job in answers if job and at <= end + ANSWERS_AFTER_S]
    silent = [event for event in launch.events if isinstance(event, on.WatcherLost) and event.at <= end]
    ready = {(event.node, event.bus) for event in launch.events if isinstance(event, on.WatcherReady)}
    found = [
        *planes.exits(exits, killed_at=launch.killed_at),
        *(planes.found(launch.found) if launch.found is not None else []),
        *planes.faults(faults),
        *planes.slurm(facts, restarts=launch.restarts),
    ]
    for event in silent:
        if all(node != event.node or bus <= event.bus for node, bus in ready):
            found += planes.lost([event.node], at=event.at, why=f"the watcher of {event.node} is gone: {event.why}")
    return [*found, *_reasons(launch), *_words(launch)]


def _reasons(launch: Launch) -> list[Evidence]:
    """Return why it was to end; where it failed all the same, that only supports what else is known."""
    left = launch.ended is not None and launch.ended.stopped
    return [
        Evidence(
            plane=each.plane,
            rule=each.rule,
            cause=each.cause,
            role=Role.ROOT if left else Role.CONFIRMATION,
            confidence=0.97 if each.cause is Cause.STOPPED else 0.9,
            text=each.text,
            at=each.at,
        )
        for each in launch.announced
    ]


def _words(launch: Launch) -> list[Evidence]:
    """Return what the end of the launch itself shows."""
    words: list[tuple[float, str, Cause, Role, float, str]] = []
    for event in launch.events:
        match event:
            case on.LaunchEnded(finished=True):
                text = "rank 0 says that the work is finished"
                words.append((event.at, "ended-finished", Cause.FINISHED, Role.ROOT, 0.97, text))
            case on.LaunchEnded(stopped=True):
                text = "the ranks left on request, with their state saved"
                words.append((event.at, "ended-stopped", Cause.STOPPED, Role.CONFIRMATION, 0.5, text))
            case on.LaunchRefused(error=error):
                text = f"the Slurm step could not be started: {error}"
                words.append((event.at, "launch-refused", Cause.CONFIGURATION, Role.ROOT, 0.85, text))
    return [
        Evidence(plane=Plane.APPLICATION, rule=rule, cause=cause, role=role, confidence=confidence, text=text, at=at)
        for at, rule, cause, role, confidence, text in words
    ]


def of_logs(
    directory: Path,
    *,
    first: Sequence[str] = (),
    ends: log_lines.Ends = log_lines.THOROUGH,
    enough: Callable[[], bool] = lambda: False,
) -> list[Evidence]:
    """Return what the logs, torch's error files and NCCL's dumps of a launch show; nothing where there are none.

    Args:
        directory: of the launch's logs.
        first: nodes whose logs are read before the others.
        ends: how much of each log is read.
        enough: asked before each file; true ends the reading.

    Raises:
        OSError: one of them is there and cannot be read.
    """
    found: list[Evidence] = []
    places = {node: place for place, node in enumerate(first)}
    # error files and srun's own lines are short and say most
    files = sorted(
        _files(directory),
        key=lambda path: (path.suffix != ".json" and path.name != SRUN_NAME, places.get(path.stem, len(places))),
    )
    for path in files:
        if enough():
            break
        if path.suffix == ".json":
            match = _RANK.fullmatch(path.stem)
            said = diagnosis_logs.error_file_evidence(
                read_plain(path, within=directory), rank=int(match[1]) if match else None
            )
            found += [said] if said is not None else []
        else:
            found += of_log(path, ends)
    return found + collectives.recorded_evidence(directory, enough)


def of_log(path: Path, ends: log_lines.Ends = log_lines.THOROUGH) -> list[Evidence]:
    """Return what one log shows: srun's own, or that of a node, whose name it has.

    Raises:
        OSError: it cannot be read.
    """
    with open_plain(path, within=path.parent) as file:
        log = log_lines.read_log(file, ends)
    node = "" if path.name == SRUN_NAME else path.stem
    return [msgspec.structs.replace(each, log=str(path)) for each in logs.log_evidence(log, node=node)]


def log_of(directory: Path, node: str) -> Path | None:
    """Return the log of a launch that its last lines are read from: of the node, else the one written last.

    Raises:
        OSError: the directory cannot be read.
    """
    logs = [path for path in _files(directory) if path.suffix == ".log"]
    ranks = [path for path in logs if path.name != SRUN_NAME]
    own = [path for path in ranks if path.stem == node]
    return max(own or ranks or logs, key=lambda path: path.lstat().st_mtime, default=None)


def _files(directory: Path) -> Iterator[Path]:
    """Yield the logs and torch's error files (`errors/rank-RANK.json`) of a launch, in a fixed order."""
    for place in (directory, directory / ERRORS_NAME):
        try:
            with os.scandir(place) as entries:
                names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
        except FileNotFoundError:
            continue
        wanted = [name for name in names if name.endswith((".log", ".json")) and name != FAILED_NAME]
        for name in wanted[:FILES_MAX]:
            yield place / name


# An attempt that ended without a final record: its supervisor was killed, or the node that it lived on was lost.
#
# Nobody could write down which.  The evidence is who had the job run again: Slurm itself does so where a node failed
# (NODE_FAIL); else a watcher did, and it is known on which node it was.


def rescuer(run: RunDirectory, started: AttemptStarted) -> str:
    """Return the node whose watcher requeued the job in an attempt; empty where none did.

    Raises:
        OSError: the file is there and cannot be read.
    """
    attempt = (started.job_id, started.restart_count)
    found = [one.node for one in lease.read_rescues(run.path) if (one.job_id, one.restart_count) == attempt]
    return found[-1] if found else ""


def of_unclean_exit(started: AttemptStarted, following: AttemptStarted, rescued_by: str) -> list[Evidence]:
    """Return what is known of the end of an attempt that left no record of it.

    Args:
        started: its begin.
        following: the begin of the next one.
        rescued_by: the node whose watcher requeued the job; empty: none did.
    """
    host = started.batch_node
    gone = [node for node in started.nodes if node not in following.nodes]
    node = host if host in gone else (gone[0] if len(gone) == 1 else "")
    missing = f"; {', '.join(gone)} came back to the job no more" if gone else ""
    begin = f"attempt {started.attempt} ended without a final record"
    if rescued_by == host:  # it lives: so does the node
        text = f"{begin}: the watcher on {host} requeued the job, since the supervisor there was gone (killed?)"
        return [_piece("supervisor-gone", Cause.UNKNOWN, 0.5, text, host)]
    if rescued_by:
        text = f"{begin}: the watcher on {rescued_by} requeued the job, since nobody on {host} did{missing}"
        return [_piece("batch-node-gone", Cause.NODE_LOST, 0.9 if host in gone else 0.75, text, host)]
    if (following.job_id, following.restart_count) == (started.job_id, started.restart_count + 1):
        text = f"{begin}, and Slurm requeued the job itself, as it does where a node failed (NODE_FAIL){missing}"
        return [_piece("slurm-requeued-itself", Cause.NODE_LOST, 0.85 if gone else 0.75, text, node)]
    return []  # submitted again, by whom and why ever


def _piece(rule: str, cause: Cause, confidence: float, text: str, node: str) -> Evidence:
    role = Role.CONFIRMATION if cause is Cause.UNKNOWN else Role.ROOT
    return Evidence(plane=Plane.NODE, rule=rule, cause=cause, role=role, confidence=confidence, text=text, node=node)
