"""A run on one screen, for whoever is woken at night: 24 lines of 80 columns are enough.  Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence

from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.printing import clean, duration
from stepkeeper.seeing.glance import Glance, is_over
from stepkeeper.seeing.model import SECOND, Accounts, Use, micro, patience
from stepkeeper.store.journal import Record
from stepkeeper.store.status import NO_LIBRARY

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
    if seen.status is None:
        top.append("no supervisor has worked on this run yet, or its status cannot be read")
    else:
        top += _facts(seen, now, width, plain=plain)
    if accounts is not None and accounts.wall_total:
        top += _time(accounts, width, plain=plain)
    stop = f"to stop: scancel {seen.status.job_id}" if seen.status is not None and not is_over(seen) else ""
    keys = "   ".join(part for part in ("more: stepkeeper explain, logs, report", stop, "Ctrl-C leaves") if part)
    room = height - len(top) - 3
    told = [line for record in seen.told for line in _told(record)][-max(0, room) :] if room > 0 else []
    rule = ("-" if plain else "─") * width
    lines = [*top, rule, *told, *([""] * max(0, room - len(told))), rule, keys]
    return [_fit(clean(line), width) for line in lines][:height]


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "~"


def _row(label: str, text: str) -> str:
    return f"{label:<{LABEL}}{text}"


def _facts(seen: Glance, now: float, width: int, *, plain: bool) -> list[str]:
    status = seen.status
    assert status is not None, "the caller looks"
    phase = status.phase.upper()
    if seen.phase_since is not None:
        phase += f" for {duration(max(0.0, now - seen.phase_since))}"
    if status.exit_code is not None:
        meaning = next((each.meaning for each in ExitCode if each.value == status.exit_code), "")
        phase = f"ENDED ({status.exit_code}): {meaning}"
    restarts = f" (restart {status.restart_count})" if status.restart_count else ""
    rows = [_row(phase + "  ", f"job {status.job_id}{restarts}, attempt {status.attempt}, launch {status.launch}")]
    if status.library is False and status.checkpoint_step is None:
        rows += _wrapped("library", NO_LIBRARY, width)
    else:
        rows += [_row("step", _step(seen, now)), _row("saved", _saved(seen, now))]
    if seen.losses or seen.loss_not_finite:
        wrong = "no finite number now" if seen.loss_not_finite else ""
        drawn = _curve(seen.losses, width - LABEL - 24 - len(wrong), plain=plain) if seen.losses else ""
        rows.append(_row("loss", f"{wrong}  {drawn}".strip()))
    nodes = f"{len(status.nodes)} in use"
    if seen.left:
        count = f" {len(seen.left)}" if len(seen.left) > 1 else ""
        nodes += f"; left{count}: " + ", ".join(f"{node} ({why})" for node, why in seen.left)
    rows.append(_row("nodes", nodes))
    rows += _wrapped("why", status.why or "no decision yet", width)
    age = now - status.updated_at
    if status.phase != Phase.DONE and age * SECOND > patience(micro(status.step_seconds or 0.0)):
        rows.append(_row("SILENT", f"for {duration(age)}: is the job there, or suspended? squeue -j {status.job_id}"))
    return rows


def _wrapped(label: str, text: str, width: int) -> list[str]:
    parts = textwrap.wrap(text, max(1, width - LABEL), max_lines=WHY_LINES, placeholder=" ~")
    return [_row("" if index else label, part) for index, part in enumerate(parts)]


def _step(seen: Glance, now: float) -> str:
    status = seen.status
    if status is None or status.step is None:
        return "none completed yet"
    parts = [f"{status.step:,}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.5g}")
    if status.step_seconds is not None:
        parts.append(f"{duration(status.step_seconds)} a step")
    if status.tokens:
        parts.append(f"{status.tokens / MANY:,.0f} M tokens" if status.tokens >= MANY else f"{status.tokens:,} tokens")
    return ", ".join([*parts, f"heard {duration(max(0.0, now - status.updated_at))} ago"])


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
    return [f"{at} {record.attempt}.{record.launch} {record.phase.value:<10} {record.why}"]


def line(seen: Glance, now: float) -> str:
    """Return one line, for where there is no terminal to draw on."""
    status = seen.status
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    if status is None:
        return f"{at}  no status yet"
    where = f"{status.attempt}.{status.launch}"
    step = f"step {status.step}" if status.step is not None else "no step yet"
    if status.step is None and status.library is False:
        step = "no trainer library"
    loss = f" loss {status.loss:.5g}" if status.loss is not None else ""
    return clean(f"{at}  {where:<6} {status.phase:<10}  {step}{loss}")
