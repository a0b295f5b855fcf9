"""A run on one screen, for the engineer on call: 24 lines of 80 columns are enough.  Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence

from stepkeeper.printing import clean, duration
from stepkeeper.run_analytics import queue
from stepkeeper.run_analytics.glance import Glance, facts, place
from stepkeeper.run_analytics.model import Accounts, Use
from stepkeeper.run_store.journal import Record

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-=*#%@"
BAR_MOST, BAR_LEAST = 40, 10  # columns
LABEL = 15  # columns
WORDS_LINES = 2  # of one fact
LEFT_OUT = ("resumed from",)  # of the facts: `stepkeeper status` has them


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
    for label, words in facts(seen, now):
        if label not in LEFT_OUT:
            top += _wrapped(label, with_bar(label, words, seen, width - LABEL, plain=plain), width)
    if seen.losses or seen.loss_not_finite:
        wrong = "NaN or infinite now" if seen.loss_not_finite else ""
        drawn = _curve(seen.losses, width - LABEL - 24 - len(wrong), plain=plain) if seen.losses else ""
        top.append(_row("loss", f"{wrong}  {drawn}".strip()))
    if accounts is not None and accounts.wall_total:
        top += _time(accounts, width, plain=plain)
    job = seen.waiting.job if seen.waiting is not None else queue.name(seen.status) if seen.status is not None else ""
    stop = f"to stop: scancel {job}" if job and not seen.is_over else ""
    keys = "   ".join(part for part in ("more: stepkeeper explain, logs, report", stop, "Ctrl-C leaves") if part)
    room = max(0, height - len(top) - 3)
    said = [_line(record) for record in seen.decisions[-room:]] if room else []
    rule = ("-" if plain else "─") * width
    lines = [*top, rule, *said, *([""] * (room - len(said))), rule, keys]
    return [_fit(clean(line), width) for line in lines][:height]


def with_bar(label: str, words: str, seen: Glance, room: int, *, plain: bool) -> str:
    """Return the words of a fact, and before those of what is done a bar: of at most `room` columns together."""
    if label != "done" or seen.share is None:
        return words
    return f"{_bar(seen.share, max(BAR_LEAST, min(BAR_MOST, room - len(words) - 2)), plain=plain)}  {words}"


def _bar(share: float, width: int, *, plain: bool) -> str:
    full, empty = ("#", ".") if plain else ("█", "░")
    filled = int(share * width)
    return full * filled + empty * (width - filled)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "~"


def _row(label: str, text: str) -> str:
    return f"{label:<{LABEL}}{text}"


def _wrapped(label: str, text: str, width: int) -> list[str]:
    parts = textwrap.wrap(text, max(1, width - LABEL), max_lines=WORDS_LINES, placeholder=" ~")
    return [_row("" if index else label, part) for index, part in enumerate(parts)]


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
    rows = [_row("time", f"{duration(whole / 1e6)}: {words}")]
    if accounts.ettr is not None:
        bar = _bar(accounts.wall[Use.PRODUCTIVE] / whole, max(10, min(50, width - LABEL - 16)), plain=plain)
        rows.append(_row("ETTR", f"{bar}  {100 * accounts.ettr:.1f} %"))
    return rows


def _line(record: Record) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(record.event.at))
    return f"{at} {place(record):<3} {record.phase.value:<10} {record.why}"
