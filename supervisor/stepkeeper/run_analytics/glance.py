"""A run at one moment, by a quick look: the same facts for `status`, for its screen and for its page.

Status, journal and `metrics.csv` are read from their ends: a look costs little, whatever the length of the run.
"""

from __future__ import annotations

import itertools
import math
import os
import shlex
import statistics
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.gates import Gate
from stepkeeper.core.state import Phase
from stepkeeper.printing import duration, instant
from stepkeeper.run_analytics import queue, reading, timeline
from stepkeeper.run_analytics.model import SECOND, Key, Rows, exit_meaning
from stepkeeper.run_analytics.queue import Queued, Waiting, Waits
from stepkeeper.run_store import journal, submission
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.journal import Record
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import NO_LIBRARY, Status, heard_at, is_silent
from stepkeeper_trainer.formats.steps import COMMITTED

RECORDS_BACK_MAX = 1_500  # of a look that is taken again each second
DECISIONS_MAX = 40
ROWS_MAX = 120
PAUSE_TIMES = 3.0  # a step that took longer than so many usual ones was a pause: a save, an evaluation, a suspension
NAMES_MAX = 16  # of nodes that are named; more of them are counted
WAITS_FOR: dict[str, str] = {
    Gate.STORAGE: "storage that passes its test",
    Gate.WATCHERS: "a watcher on every node",
    Gate.CHECKPOINT: "the newest verified checkpoint",
    Gate.CAUSE: "the cause of the failure before",
    Gate.PAUSE: "the pause before the next try",
    Gate.NODES: "nodes that are clear and fit",
}
_ENDED: dict[int, str] = {
    ExitCode.FINISHED: "finished",
    ExitCode.REQUEUED: "requeued",
    ExitCode.CANCELLED: "cancelled",
    ExitCode.STOPPED: "stopped",
}


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment.  Instants are Unix seconds."""

    status: Status | None
    decisions: tuple[Record, ...] = ()  # the newest decisions with a reason, oldest first
    phase_since: float | None = None
    rows: dict[Key, Rows] = {}  # the newest completed steps, by launch, oldest first
    committed_at: float | None = None  # the newest commit
    checkpoint: str = ""  # where the newest checkpoint is, as far as the journal says
    checkpoint_state: str = ""  # of `timeline.condition`, or `gone`; empty: nobody looked
    left: tuple[tuple[str, str], ...] = ()  # (node, why): used no more in this attempt
    waiting: Waiting | None = None  # the job that has not begun to work on it
    queued: Queued | None = None  # what Slurm says of that job, or of one that fell silent; None: it was not asked

    @property
    def losses(self) -> tuple[float, ...]:
        """Those of the newest steps that are finite, oldest first."""
        return tuple(loss for rows in self.rows.values() for loss in rows.loss if math.isfinite(loss))

    @property
    def loss_not_finite(self) -> bool:
        """Whether the newest known loss is NaN or infinite."""
        known = [loss for rows in self.rows.values() for loss in rows.loss if not math.isnan(loss)]
        said = self.status is not None and self.status.loss_not_finite
        return said or (bool(known) and math.isinf(known[-1]))

    @property
    def pace(self) -> float | None:
        """Seconds of a step: the mean of those of the newest launch that were no pauses; None if not known."""
        return pace([*self.rows.values()][-1]) if self.rows else None

    @property
    def share(self) -> float | None:
        """How much of the steps is done, 0 to 1; None where their number is not known."""
        status = self.status
        if status is None or not status.total_steps or status.step is None:
            return None
        return min(1.0, max(0.0, status.step / status.total_steps))

    @property
    def seconds_left(self) -> float | None:
        """For how long training goes on without pauses; None where the number of steps or the pace is not known."""
        status = self.status
        if status is None or status.total_steps is None or status.step is None:
            return None
        a_step = self.pace or status.step_seconds
        if a_step is None or not math.isfinite(a_step):
            return None
        seconds = max(0, status.total_steps - status.step) * a_step
        return seconds if math.isfinite(seconds) else None

    def trains(self, now: float) -> bool:
        """Tell whether steps are being completed; else nobody knows when all will be."""
        status = self.status
        return status is not None and self.waiting is None and status.phase == Phase.TRAINING and not self.silent(now)

    def silent(self, now: float) -> bool:
        """Tell whether a supervisor that should write has stopped writing, and no other job is waited for."""
        return self.waiting is None and self.status is not None and is_silent(self.status, now)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come by itself: it ended, and no job of it waits that Slurm knows of."""
        if self.waiting is not None:
            return self.queued is not None and queue.is_over(self.queued)
        status = self.status
        goes_on = (None, ExitCode.REQUEUED, ExitCode.SUPERSEDED)
        return status is not None and status.phase == Phase.DONE and status.exit_code not in goes_on

    def asks_slurm(self, now: float) -> str | None:
        """Return the job that only Slurm can tell of: the one that is waited for, or whose supervisor fell silent."""
        if self.waiting is not None:
            return self.waiting.job
        return queue.name(self.status) if self.status is not None and self.silent(now) else None


def glance(run: RunDirectory, status: Status | None = None, *, records_max: int = RECORDS_BACK_MAX) -> Glance:
    """Look at a run.  What is not there, or torn, tells nothing.

    Args:
        run: the run directory.
        status: of the run, where it was read already.
        records_max: how many records of the journal are read.

    Raises:
        OSError: a file is there and cannot be read.
    """
    status = status if status is not None else status_file.known(run.status)
    decisions: list[Record] = []
    since: float | None = None
    phase_over = False
    committed_at: float | None = None
    checkpoint = ""
    left: dict[str, str] = {}
    newest: Record | None = None
    records = (line.record for line in journal.read_lines(run.journal, newest_first=True) if line.record is not None)
    for record in itertools.islice(records, records_max):
        event = record.event
        if status is None or record.attempt == status.attempt:  # else the last words of a superseded attempt
            newest = newest or record
            phase_over = phase_over or (record.attempt, record.phase) != (newest.attempt, newest.phase)
            since = since if phase_over else event.at
            if isinstance(event, on.NodeFaulted) and event.leave:
                left.setdefault(event.node, event.name)
        elif newest is not None:
            phase_over = True
        if record.reasons and len(decisions) < DECISIONS_MAX and not _is_ordinary(record):
            decisions.append(record)
        if committed_at is None and isinstance(event, on.CheckpointCommitted):
            committed_at = event.at
        if not checkpoint and status is not None and status.checkpoint_step is not None:
            checkpoint = _directory(run, event, status.checkpoint_step)
        if len(decisions) >= DECISIONS_MAX and phase_over and committed_at is not None and checkpoint:
            break
    if status is not None and newest is not None and newest.phase != status.phase:
        since = None  # the journal is behind the status, or the other way round
    return Glance(
        status=status,
        decisions=tuple(reversed(decisions)),
        phase_since=since,
        rows=reading.rows(run, newest=ROWS_MAX),
        committed_at=committed_at,
        checkpoint=checkpoint,
        left=tuple(left.items()),
        waiting=queue.waiting(run, status),
    )


def _is_ordinary(record: Record) -> bool:
    """A periodic save that went well: so many of them that they would hide the rest."""
    event = record.event
    return isinstance(event, on.CheckpointCommitted) and not event.emergency and not event.drift and not record.effects


def _directory(run: RunDirectory, event: on.Event, step: int) -> str:
    """Return the directory of a checkpoint of a step that an event names; empty where it names none.

    A framework's checkpoints lie elsewhere; a run directory may have been moved, with its step directories.
    """
    directory = getattr(event, "directory", None)
    if not isinstance(directory, str) or getattr(event, "step", None) != step:
        return ""
    inside = run.checkpoints / os.path.basename(directory)
    is_elsewhere = os.path.isabs(directory) and not inside.exists() and os.path.exists(directory)
    return directory if is_elsewhere else str(inside)


def changed_at(run: RunDirectory) -> tuple[tuple[int, int], ...]:
    """Return what changes when there is something new to see: sizes and times of the files."""
    found = []
    for path in (run.status, run.journal, run.metrics, run.path / submission.NAME):
        try:
            status = path.stat()
        except OSError:
            continue  # not there yet
        found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)


def pace(rows: Rows) -> float | None:
    """Return the mean seconds of the steps that were no pauses; None where none is known."""
    times = [
        (after - before) / SECOND / (later - earlier)
        for (before, after), (earlier, later) in zip(pairwise(rows.at), pairwise(rows.step), strict=True)
        if later > earlier and after > before  # else a clock was set back, or a step was done again
    ]
    if not times:
        return None
    median = statistics.median(times)
    return statistics.fmean([each for each in times if each <= PAUSE_TIMES * median])


# In words.


def facts(seen: Glance, now: float) -> Iterator[tuple[str, str]]:
    """Yield what is known of a run, in words with a label each.

    Args:
        seen: the run.
        now: Unix seconds.
    """
    status = seen.status
    yield "phase", phase(seen, now)
    if status is not None and status.exit_code is not None and seen.waiting is not None:
        yield "before", ending(status.exit_code)
    if status is not None and seen.silent(now):
        check = f"Check it with `squeue -j {queue.name(status)}`."
        yield "silence", f"Nobody writes the status: the job is suspended or gone, or its storage hangs.  {check}"
    if seen.queued is not None:
        yield "Slurm says", queue.words(seen.queued, now)
    if status is None:
        if seen.waiting is not None and seen.waiting.log:
            yield "log", seen.waiting.log
        return
    if status.waits_for and not seen.silent(now):
        yield "waits for", ", ".join(WAITS_FOR.get(gate, gate) for gate in status.waits_for)
    yield "job", where(status)
    yield "nodes", _nodes(seen, status)
    yield from _training(seen, status, now)
    yield "last decision", status.why or "none yet"
    if status.suspended_seconds:
        yield "suspended", f"{duration(status.suspended_seconds)} of this attempt"
    updated = f"{_ago(status.updated_at, now)} ({instant(status.updated_at)})"
    if status.phase != Phase.DONE and heard_at(status) != status.updated_at:
        updated += f"; the supervisor wrote {_ago(heard_at(status), now)}"
    yield "updated", updated


def _ago(at: float, now: float) -> str:
    return f"{duration(max(0.0, now - at))} ago"


def phase(seen: Glance, now: float, *, timed: bool = True) -> str:
    """Say what the run does now; where nobody writes, what it did when somebody did.

    Args:
        seen: the run.
        now: Unix seconds.
        timed: also say for how long; without it, the words change only when what they say does.
    """
    status, waiting = seen.status, seen.waiting
    if waiting is not None:
        word = "gone before it started" if waits(seen) == "gone" else waits(seen)
        if timed:
            word += f", for {duration(max(0.0, now - waiting.since))} ({waiting.how.value} {instant(waiting.since)})"
        return f"{word}: {waits_for(seen, waiting)}"
    if status is None:
        return "no supervisor has worked on this run yet, or its status cannot be read"
    if status.exit_code is not None:
        return f"ended: {ending(status.exit_code)}"
    if seen.silent(now):
        silent_for = f" for {duration(now - heard_at(status))}" if timed else ""
        return f"unknown, no update{silent_for}; it was {status.phase}"
    if seen.phase_since is None or not timed:
        return status.phase
    return f"{status.phase}, for {duration(max(0.0, now - seen.phase_since))} (since {instant(seen.phase_since)})"


def state(seen: Glance, now: float) -> str:
    """Say in a word how it stands with a run."""
    status = seen.status
    if seen.waiting is not None:
        return waits(seen)
    if status is None:
        return "no status"
    if status.exit_code is not None:
        return _ENDED.get(status.exit_code, f"ended ({status.exit_code})")
    return "silent" if seen.silent(now) else status.phase


def waits(seen: Glance) -> str:
    """Say in a word how it stands with the job that a run waits for."""
    if seen.queued is None or seen.queued.error or queue.is_pending(seen.queued):
        return "pending"
    return "gone" if queue.is_over(seen.queued) else "starting"


def waits_for(seen: Glance, waiting: Waiting) -> str:
    """Say which job a run waits for."""
    if waiting.how is Waits.SUBMITTED or seen.status is None:
        return f"job {waiting.job} is submitted, and has not worked yet"
    if waiting.how is Waits.FOLLOWED:
        return f"job {waiting.job} is submitted in place of job {queue.name(seen.status)}"
    return f"job {waiting.job} is requeued after attempt {seen.status.attempt}"


def ending(code: int) -> str:
    """Say how a supervisor ended."""
    return f"{exit_meaning(code)} (exit code {code})"


def where(status: Status) -> str:
    """Return job, attempt and the newest launch that was started; one that is prepared has no number yet."""
    restarts = f" (restart {status.restart_count})" if status.restart_count else ""
    launch = f"launch {status.launch}" if status.launched else "no launch yet"
    if status.launched and status.phase == Phase.STARTING:
        launch += " over, the next is prepared"
    return f"{queue.name(status)}{restarts}, attempt {status.attempt}, {launch}"


def attempt(status: Status) -> str:
    """Return the attempt, and its newest launch if one was started: `2.1`."""
    return f"{status.attempt}.{status.launch}" if status.launched else str(status.attempt)


def _nodes(seen: Glance, status: Status) -> str:
    names = f": {' '.join(status.nodes)}" if len(status.nodes) <= NAMES_MAX else ""
    words = "none in use" if status.phase == Phase.DONE else f"{len(status.nodes):,} in use{names}"
    if not seen.left:
        return words
    count = f" {len(seen.left)}" if len(seen.left) > 1 else ""
    return f"{words}; left{count}: " + ", ".join(f"{node} ({why})" for node, why in seen.left)


def _training(seen: Glance, status: Status, now: float) -> Iterator[tuple[str, str]]:
    """Yield what only the trainer library can tell, or why it is not known."""
    if status.library is False and status.checkpoint_step is None:
        yield "library", NO_LIBRARY
        return
    tokens = f"{status.tokens:,} tokens" if status.tokens else ""
    a_step = seen.pace or status.step_seconds
    pace = f"{duration(a_step)} a step" if a_step is not None and status.step is not None else ""
    yield "step", ", ".join(part for part in (steps(status), loss(status), tokens, pace) if part)
    if seen.share is not None and status.exit_code != ExitCode.FINISHED:
        left = eta(seen, now)
        yield "done", f"{100 * seen.share:.1f} %" + (f", {left}" if left else "")
    yield "checkpoint", _checkpoint(seen, status, now)
    yield "resumed from", status.resumed_from or "no step directory: this attempt started from the beginning"


def _checkpoint(seen: Glance, status: Status, now: float) -> str:
    held = status.snapshot_step
    in_memory = f"; step {held:,} in the nodes' memory" if (held or 0) > (status.checkpoint_step or 0) else ""
    if status.checkpoint_step is None:
        return f"none yet{in_memory}"
    words = f"step {status.checkpoint_step:,}"
    if seen.checkpoint:
        words += f" ({os.path.basename(seen.checkpoint)})"
    if status.step is not None and status.step > status.checkpoint_step:
        words += f", {status.step - status.checkpoint_step:,} steps ago"
    if seen.committed_at is not None:
        words += f", {_ago(seen.committed_at, now)}"
    if seen.checkpoint_state:
        words += f": {timeline.in_words(seen.checkpoint_state, is_over=seen.is_over)}"
    if seen.checkpoint_state == COMMITTED and seen.checkpoint and seen.is_over:
        words += f" (to verify it: stepkeeper checkpoints verify {shlex.quote(seen.checkpoint)})"
    return words + in_memory


def steps(status: Status) -> str:
    """Return the newest step in words: `1,200 of 10,000`."""
    step = "none completed yet" if status.step is None else f"{status.step:,}"
    return step + (f" of {status.total_steps:,}" if status.total_steps else "")


def loss(status: Status) -> str:
    """Return the newest loss in words; empty where the script reports none."""
    if status.loss_not_finite:
        return "loss NaN or infinite"
    return f"loss {status.loss:.5g}" if status.loss is not None else ""


def eta(seen: Glance, now: float) -> str:
    """Return when training will be done, in words; where it does not train, how much of it is left."""
    left_s = seen.seconds_left
    if left_s is None:
        return ""
    if not seen.trains(now):
        return f"{duration(left_s)} of training left"
    return f"ETA {duration(left_s)} ({instant(now + left_s)[:-3]})"


def place(record: Record) -> str:
    """Return the attempt of a decision, and its launch where one ran: before, the number is nobody's yet."""
    ran = record.phase in (Phase.TRAINING, Phase.SAVING, Phase.STOPPING)
    return f"{record.attempt}.{record.launch}" if ran else str(record.attempt)


def line(seen: Glance, now: float) -> str:
    """Return one line of progress, for where there is no terminal to draw on."""
    status, waiting = seen.status, seen.waiting
    if waiting is not None:
        said = queue.words(seen.queued, now) if seen.queued is not None else waits_for(seen, waiting)
        return f"{instant(now)}  {waits(seen)}  {said}"
    if status is None:
        return f"{instant(now)}  no status yet"
    step = f"step {steps(status)}" if status.step is not None else "no step yet"
    if status.step is None and status.library is False:
        step = "no trainer library"
    more = ""
    if seen.silent(now):
        more = f"no update for {duration(now - heard_at(status))}"
    elif seen.trains(now):
        more = eta(seen, now)
    words = " ".join(part for part in (step, loss(status), more) if part)
    return f"{instant(now)}  {attempt(status):<6} {status.phase:<10}  {words}"
