"""A run on one screen, for whoever is woken at night: 24 lines of 80 columns are enough.  Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence

from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.printing import clean, duration
from stepkeeper.seeing import progress
from stepkeeper.seeing.glance import Glance, is_over
from stepkeeper.seeing.model import Accounts, Use
from stepkeeper.seeing.queue import Waits, is_pending, name, words
from stepkeeper.seeing.queue import is_over as is_gone
from stepkeeper.store.journal import Record
from stepkeeper.store.status import Status, heard_at, is_silent

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
    told = [line for record in seen.told for line in _told(record)][-max(0, room) :] if room > 0 else []
    rule = ("-" if plain else "─") * width
    lines = [*top, rule, *told, *([""] * max(0, room - len(told))), rule, keys]
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
    rows += _step(seen, now, width, plain=plain)
    rows.append(_row("saved", _saved(seen, now)))
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
        waits = _waits_word(seen)
        rows = [_row(f"{waits} for {duration(max(0.0, now - seen.waiting.since))}  ", _after(seen))]
        rows += _wrapped("queue", words(seen.queued, now) if seen.queued is not None else "asking Slurm", width)
        if status is None and seen.waiting.log:
            rows += _wrapped("log", seen.waiting.log, width)
        return rows
    if status is None:
        return ["no supervisor has worked on this run yet, or its status cannot be read"]
    restarts = f" (restart {status.restart_count})" if status.restart_count else ""
    where = f"job {status.job_id}{restarts}, attempt {status.attempt}, {_launch(status)}"
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


def _waits_word(seen: Glance) -> str:
    queued = seen.queued
    if queued is None or queued.error or is_pending(queued):
        return "PENDING"
    return "GONE" if is_gone(queued) else "STARTING"


def _after(seen: Glance) -> str:
    """Say what the run waits for."""
    waiting, status = seen.waiting, seen.status
    assert waiting is not None, "the caller looks"
    if waiting.how is Waits.SUBMITTED or status is None:
        return f"job {waiting.job} is submitted, and has not worked yet"
    if waiting.how is Waits.FOLLOWED:
        return f"job {waiting.job} is submitted in place of job {name(status)}"
    return f"job {waiting.job} is requeued after attempt {status.attempt}"


def _launch(status: Status) -> str:
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
    parts.append(f"heard {duration(max(0.0, now - status.updated_at))} ago")
    rows = [_row("step", ", ".join(part for part in parts if part))]
    done = progress.share(status)
    if done is not None and status.exit_code != ExitCode.FINISHED:
        works = status.phase == Phase.TRAINING and not is_silent(status, now)
        left = progress.eta(progress.seconds_left(status, seen.rows), now, works=works)
        said = f"{100 * done:.1f} %" + (f", {left}" if left else "")
        rows.append(_row("done", f"{progress.bar(done, width - LABEL - len(said) - 2, plain=plain)}  {said}"))
    return rows


def _saved(seen: Glance, now: float) -> str:
    status = seen.status
    if status is None or status.checkpoint_step is None:
        return "no checkpoint yet"
    parts = [f"step {status.checkpoint_step:,}"]
    if status.step is not None and status.step >= status.checkpoint_step:
        parts.append(f"{status.step - status.checkpoint_step:,} steps ago")
    if seen.committed_at is not None:
        parts.append(f"{duration(max(0.0, now - seen.committed_at))} ago")
    return ", ".join(parts)


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


def _told(record: Record) -> list[str]:
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
        said = words(seen.queued, now) if seen.queued is not None else _after(seen)
        return clean(f"{at}  {_waits_word(seen).lower()}  {said}")
    if status is None:
        return f"{at}  no status yet"
    where = f"{status.attempt}.{status.launch}" if status.launched else f"{status.attempt}"
    parts = [f"step {progress.steps(status)}" if status.step is not None else "no step yet", progress.loss(status)]
    if is_silent(status, now):
        parts.append(f"no word for {duration(now - heard_at(status))}")
    elif status.phase == Phase.TRAINING:
        parts.append(progress.eta(progress.seconds_left(status, seen.rows), now, works=True))
    return clean(f"{at}  {where:<6} {status.phase:<10}  " + " ".join(part for part in parts if part))
