"""A run on one screen, for the engineer on call: 24 lines of 80 columns are enough.  Pure."""

from __future__ import annotations

import itertools
import math
import textwrap
import time
from collections.abc import Sequence

import msgspec

from stepkeeper.cli.printing import clean, duration
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.gates import Gate
from stepkeeper.core.state import Phase
from stepkeeper.run_analytics import progress, queue
from stepkeeper.run_analytics.model import AT_MAX, Accounts, Use
from stepkeeper.run_analytics.progress import Row
from stepkeeper.run_analytics.queue import Queued, Waiting, Waits, is_pending, name, words
from stepkeeper.run_analytics.queue import is_over as is_gone
from stepkeeper.run_analytics.reading import METRICS_NAME
from stepkeeper.run_store import journal, lines, submission
from stepkeeper.run_store import status as status_file
from stepkeeper.run_store.journal import Record
from stepkeeper.run_store.paths import RunDirectory
from stepkeeper.run_store.status import NO_LIBRARY, Status, heard_at, is_silent
from stepkeeper_trainer.formats.plain import open_plain

# What a look at a running run costs little to know: its status, and the ends of journal and metrics.

RECORDS_BACK_MAX = 1_500
DECISIONS_MAX = 40
ROWS = 120


class Glance(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment.  Instants are Unix seconds."""

    status: Status | None
    decisions: tuple[Record, ...] = ()  # the newest decisions with a reason, oldest first
    phase_since: float | None = None
    rows: tuple[Row, ...] = ()  # the newest completed steps, oldest first
    committed_at: float | None = None  # the newest commit
    left: tuple[tuple[str, str], ...] = ()  # (node, why): used no more in this attempt
    waiting: Waiting | None = None  # the job that has not begun to work on it
    queued: Queued | None = None  # what Slurm says of that job, or of one that fell silent; None: it was not asked

    @property
    def losses(self) -> tuple[float, ...]:
        """Those of the newest steps that are finite, oldest first."""
        return tuple(row.loss for row in self.rows if row.loss is not None and math.isfinite(row.loss))

    @property
    def loss_not_finite(self) -> bool:
        """Whether the newest known loss is NaN or infinite."""
        losses = [row.loss for row in self.rows if row.loss is not None]
        if self.status is not None and self.status.loss_not_finite:
            return True
        return bool(losses) and not math.isfinite(losses[-1])


def glance(run: RunDirectory) -> Glance:
    """Look at a run.  What is not there, or torn, tells nothing.

    Raises:
        OSError: a file is there and cannot be read.
    """
    status = status_file.known(run.status)
    decisions: list[Record] = []
    since: float | None = None
    phase_over = False
    committed_at: float | None = None
    left: dict[str, str] = {}
    newest: Record | None = None
    records = (line.record for line in journal.read_lines(run.journal, newest_first=True) if line.record is not None)
    for record in itertools.islice(records, RECORDS_BACK_MAX):
        newest = newest or record
        same = record.attempt == newest.attempt
        if same and not phase_over:
            phase_over = record.phase is not newest.phase
            since = since if phase_over else record.event.at
        if record.reasons and len(decisions) < DECISIONS_MAX and not _is_ordinary(record):
            decisions.append(record)
        if committed_at is None and isinstance(record.event, on.CheckpointCommitted):
            committed_at = record.event.at
        if same and isinstance(record.event, on.NodeFaulted) and record.event.leave:
            left.setdefault(record.event.node, record.event.name)
        if len(decisions) >= DECISIONS_MAX and phase_over and committed_at is not None:
            break
    return Glance(
        status=status,
        decisions=tuple(reversed(decisions)),
        phase_since=since,
        rows=rows(run),
        committed_at=committed_at,
        left=tuple(left.items()),
        waiting=queue.waiting(run, status),
    )


def _is_ordinary(record: Record) -> bool:
    """A periodic save that went well: so many of them that they would hide the rest."""
    event = record.event
    return isinstance(event, on.CheckpointCommitted) and not event.emergency and not event.drift and not record.effects


def changed_at(run: RunDirectory) -> tuple[tuple[int, int], ...]:
    """Return what changes when there is something new to see: sizes and times of the files."""
    found = []
    for path in (run.status, run.journal, run.path / METRICS_NAME, run.path / submission.NAME):
        try:
            status = path.stat()
        except OSError:
            continue  # not there yet
        found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)


def rows(run: RunDirectory) -> tuple[Row, ...]:
    """Return the newest completed steps, oldest first.

    Raises:
        OSError: they cannot be read.
    """
    try:
        file = open_plain(run.path / METRICS_NAME, within=run.path)
    except FileNotFoundError:
        return ()
    found: list[Row] = []
    with file:
        for line in itertools.islice(lines.backwards(file), 2 * ROWS):
            cells = line.split(b",")
            try:
                loss = float(cells[1]) if cells[1] else None
                at = float(cells[5])
                found.append(Row(int(cells[0]), loss, at if 0 < at < AT_MAX else 0.0, (int(cells[6]), int(cells[7]))))
            except (ValueError, IndexError):
                continue  # the header, or torn
            if len(found) == ROWS:
                break
    return tuple(reversed(found))


def is_over(seen: Glance) -> bool:
    """Tell whether nothing more will come by itself: it ended, and no job of it waits that Slurm knows of."""
    if seen.waiting is not None:
        return seen.queued is not None and queue.is_over(seen.queued)
    status = seen.status
    goes_on = (None, ExitCode.REQUEUED, ExitCode.SUPERSEDED)
    return status is not None and status.phase == Phase.DONE and status.exit_code not in goes_on


def asks_slurm(seen: Glance, now: float) -> str | None:
    """Return the job that only Slurm can tell of: the one that is waited for, or whose supervisor fell silent."""
    if seen.waiting is not None:
        return seen.waiting.job
    if seen.status is not None and status_file.is_silent(seen.status, now):
        return queue.name(seen.status)
    return None


WAITS_FOR: dict[str, str] = {
    Gate.STORAGE: "storage that passes its test",
    Gate.WATCHERS: "a watcher on every node",
    Gate.CHECKPOINT: "the newest verified checkpoint",
    Gate.CAUSE: "the cause of the failure before",
    Gate.PAUSE: "the pause before the next try",
    Gate.NODES: "nodes that are clear and fit",
}
BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=*#%@"
MANY = 1_000_000
LABEL = 8  # columns
WHY_LINES = 2  # the reason is what a person looks for first


def screen(
    name: str, seen: Glance, accounts: Accounts | None, *, now: float, width: int, height: int, plain: bool = False
) -> list[str]:
    """Return the lines, none longer than `width`, at most `height`.

    Args:
        name: of the run.
        seen: the run.
        accounts: where its time went, if that is known.
        now: Unix seconds.
        width: columns of the terminal.
        height: lines of it.
        plain: ASCII only.
    """
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    room = max(0, width - len(clock) - 1)
    title = name if len(name) <= room else "~" + name[len(name) - room + 1 :]  # what tells runs apart stands at the end
    top = [title + " " * max(1, width - len(title) - len(clock)) + clock]
    top += _facts(seen, now, width, plain=plain)
    if accounts is not None and accounts.wall_total:
        top += _time(accounts, width, plain=plain)
    stop = f"to stop: scancel {_job(seen)}" if _job(seen) and not is_over(seen) else ""
    keys = "   ".join(part for part in ("more: stepkeeper explain, logs, report", stop, "Ctrl-C leaves") if part)
    room = height - len(top) - 3
    said = [line for record in seen.decisions for line in _in_lines(record)][-max(0, room) :] if room > 0 else []
    rule = ("-" if plain else "─") * width
    lines = [*top, rule, *said, *([""] * max(0, room - len(said))), rule, keys]
    return [_fit(clean(line), width) for line in lines][:height]


def _job(seen: Glance) -> str:
    if seen.waiting is not None:
        return seen.waiting.job
    return name(seen.status) if seen.status is not None else ""


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "~"


def _row(label: str, text: str) -> str:
    return f"{label:<{LABEL}}{text}"


def _facts(seen: Glance, now: float, width: int, *, plain: bool) -> list[str]:
    status = seen.status
    rows = _standing(seen, now, width)
    if status is None:
        return rows
    if status.library is False and status.checkpoint_step is None:
        rows += _wrapped("library", NO_LIBRARY, width)
    else:
        rows += [*_step(seen, now, width, plain=plain), _row("saved", saved(seen, now))]
    if seen.losses or seen.loss_not_finite:
        wrong = "NaN or infinite now" if seen.loss_not_finite else ""
        drawn = _curve(seen.losses, width - LABEL - 24 - len(wrong), plain=plain) if seen.losses else ""
        rows.append(_row("loss", f"{wrong}  {drawn}".strip()))
    nodes = f"{len(status.nodes)} in use"
    if status.phase == Phase.DONE:
        nodes = "none in use"
    if seen.left:
        count = f" {len(seen.left)}" if len(seen.left) > 1 else ""
        nodes += f"; left{count}: " + ", ".join(f"{node} ({why})" for node, why in seen.left)
    rows.append(_row("nodes", nodes))
    return rows + _wrapped("why", status.why or "no decision yet", width)


def _standing(seen: Glance, now: float, width: int) -> list[str]:
    """Return what the run does now, and where only Slurm can tell, what that says."""
    status = seen.status
    if seen.waiting is not None:
        waits = waits_word(seen)
        rows = [_row(f"{waits} for {duration(max(0.0, now - seen.waiting.since))}  ", after(seen))]
        rows += _wrapped("queue", words(seen.queued, now) if seen.queued is not None else "asking Slurm", width)
        if status is None and seen.waiting.log:
            rows += _wrapped("log", seen.waiting.log, width)
        return rows
    if status is None:
        return ["no supervisor has worked on this run yet, or its status cannot be read"]
    restarts = f" (restart {status.restart_count})" if status.restart_count else ""
    where = f"job {status.job_id}{restarts}, attempt {status.attempt}, {launch_in_words(status)}"
    if status.exit_code is not None:
        meaning = next((each.meaning for each in ExitCode if each.value == status.exit_code), "")
        return [_row(f"ENDED ({status.exit_code}): {meaning}  ", where)]
    age = max(0.0, now - heard_at(status))
    if is_silent(status, now):
        rows = [_row(f"NO WORD for {duration(age)}, was {status.phase.upper()}  ", where)]
        doubt = f"nobody writes the status: is the job there, or suspended? squeue -j {status.job_id}"
        return [*rows, *_wrapped("Slurm", words(seen.queued, now) if seen.queued is not None else doubt, width)]
    phase = status.phase.upper()
    if seen.phase_since is not None:
        phase += f" for {duration(max(0.0, now - seen.phase_since))}"
    return [_row(f"{phase}  ", where)]


def waits_word(seen: Glance) -> str:
    """Say in a word how it stands with the job that a run waits for."""
    queued = seen.queued
    if queued is None or queued.error or is_pending(queued):
        return "PENDING"
    return "GONE" if is_gone(queued) else "STARTING"


def after(seen: Glance) -> str:
    """Say what the run waits for."""
    waiting, status = seen.waiting, seen.status
    assert waiting is not None, "the caller looks"
    if waiting.how is Waits.SUBMITTED or status is None:
        return f"job {waiting.job} is submitted, and has not worked yet"
    if waiting.how is Waits.FOLLOWED:
        return f"job {waiting.job} is submitted in place of job {name(status)}"
    return f"job {waiting.job} is requeued after attempt {status.attempt}"


def exit_meaning(code: int) -> str:
    """Say what an exit code of a supervisor means, that of a newer version included."""
    return next((each.meaning for each in ExitCode if each.value == code), "a code that this Stepkeeper does not know")


def launch_in_words(status: Status) -> str:
    """Return the newest launch that was started; the number of one that is prepared is nobody's yet."""
    if not status.launched:
        return "no launch yet"
    preparing = status.phase == Phase.STARTING
    return f"launch {status.launch}" + (" over, the next is prepared" if preparing else "")


def _wrapped(label: str, text: str, width: int) -> list[str]:
    parts = textwrap.wrap(text, max(1, width - LABEL), max_lines=WHY_LINES, placeholder=" ~")
    return [_row("" if index else label, part) for index, part in enumerate(parts)]


def _step(seen: Glance, now: float, width: int, *, plain: bool) -> list[str]:
    status = seen.status
    assert status is not None, "the caller looks"
    if status.step is None:
        return [_row("step", progress.steps(status))]
    parts = [progress.steps(status), progress.loss(status)]
    if status.step_seconds is not None:
        parts.append(f"{duration(progress.pace(seen.rows) or status.step_seconds)} a step")
    if status.tokens:
        parts.append(f"{status.tokens / MANY:,.0f} M tokens" if status.tokens >= MANY else f"{status.tokens:,} tokens")
    parts.append(f"updated {duration(max(0.0, now - status.updated_at))} ago")
    rows = [_row("step", ", ".join(part for part in parts if part))]
    done = progress.share(status)
    if done is not None and status.exit_code != ExitCode.FINISHED:
        works = status.phase == Phase.TRAINING and not is_silent(status, now)
        left = progress.eta(progress.seconds_left(status, seen.rows), now, works=works)
        said = f"{100 * done:.1f} %" + (f", {left}" if left else "")
        rows.append(_row("done", f"{progress.bar(done, width - LABEL - len(said) - 2, plain=plain)}  {said}"))
    return rows


def saved(seen: Glance, now: float) -> str:
    """Say what the newest checkpoint is, and how old."""
    status = seen.status
    if status is None or status.checkpoint_step is None:
        held = held_in_memory(status) if status is not None else ""
        return f"no checkpoint yet, {held}" if held else "no checkpoint yet"
    parts = [f"step {status.checkpoint_step:,}"]
    if status.step is not None and status.step >= status.checkpoint_step:
        parts.append(f"{status.step - status.checkpoint_step:,} steps ago")
    if seen.committed_at is not None:
        parts.append(f"{duration(max(0.0, now - seen.committed_at))} ago")
    if held := held_in_memory(status):
        parts.append(held)
    return ", ".join(parts)


def held_in_memory(status: Status) -> str:
    """Say which step is in the nodes' memory, where that is newer than the newest checkpoint."""
    held = status.snapshot_step
    return f"step {held:,} in the nodes' memory" if held is not None and held > (status.checkpoint_step or 0) else ""


def _curve(values: Sequence[float], width: int, *, plain: bool) -> str:
    shown = values[-max(1, width) :]
    low, high = min(shown), max(shown)
    bars = ASCII_BARS if plain else BARS
    heights = [round((value - low) / (high - low) * (len(bars) - 1)) if high > low else 0 for value in shown]
    return "".join(bars[height] for height in heights) + f"  {low:.4g} to {high:.4g}"


def _time(accounts: Accounts, width: int, *, plain: bool) -> list[str]:
    whole = accounts.wall_total
    parts = sorted(((length, use) for use, length in accounts.wall.items() if length), reverse=True)
    words = ", ".join(f"{use.value} {100 * length / whole:.1f} %" for length, use in parts)
    ettr = accounts.ettr
    rows = [_row("time", f"{duration(whole / 1e6)}: {words}")]
    if ettr is not None:
        room = max(10, min(50, width - LABEL - 16))
        filled = round(room * accounts.wall[Use.PRODUCTIVE] / whole)
        full, empty = ("#", ".") if plain else ("█", "░")
        rows.append(_row("ETTR", f"{full * filled}{empty * (room - filled)}  {100 * ettr:.1f} %"))
    return rows


def _in_lines(record: Record) -> list[str]:
    at = time.strftime("%H:%M:%S", time.localtime(record.event.at))
    return [f"{at} {place(record):<3} {record.phase.value:<10} {record.why}"]


def place(record: Record) -> str:
    """Return the attempt of a decision, and its launch where one ran: before, the number is nobody's yet."""
    ran = record.phase in (Phase.TRAINING, Phase.SAVING, Phase.STOPPING)
    return f"{record.attempt}.{record.launch}" if ran else str(record.attempt)


def line(seen: Glance, now: float) -> str:
    """Return one line, for where there is no terminal to draw on."""
    status = seen.status
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    if seen.waiting is not None:
        said = words(seen.queued, now) if seen.queued is not None else after(seen)
        return clean(f"{at}  {waits_word(seen).lower()}  {said}")
    if status is None:
        return f"{at}  no status yet"
    where = f"{status.attempt}.{status.launch}" if status.launched else f"{status.attempt}"
    step = f"step {progress.steps(status)}" if status.step is not None else "no step yet"
    if status.step is None and status.library is False:
        step = "no trainer library"
    parts = [step, progress.loss(status)]
    if is_silent(status, now):
        parts.append(f"no update for {duration(now - heard_at(status))}")
    elif status.phase == Phase.TRAINING:
        parts.append(progress.eta(progress.seconds_left(status, seen.rows), now, works=True))
    return clean(f"{at}  {where:<6} {status.phase:<10}  " + " ".join(part for part in parts if part))
