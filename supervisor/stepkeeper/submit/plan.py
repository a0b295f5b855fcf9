"""The figures of `stepkeeper plan`: for each size of the job, the best interval and what it leaves of the time."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

from stepkeeper.cli import printing
from stepkeeper.core import events as on
from stepkeeper.core.state import Phase
from stepkeeper.run_store import journal, lines
from stepkeeper_trainer.coordinate.cadence import (
    Costs,
    FailureRate,
    best_interval_s,
    daly_s,
    floor_interval_s,
    productive_share,
    young_s,
)
from stepkeeper_trainer.formats.plain import open_plain

FIXED_S = (600.0, 1800.0, 3600.0, 4 * 3600.0)  # what people set by hand
CURVE_POINTS = 97
CURVE_DECADES = 2.0  # to each side of the best interval


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One interval and what comes of it."""

    interval_s: float
    share: float  # of wall time that becomes durable progress


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a job."""

    nodes: int
    costs: Costs
    best: Point
    bound: Point | None  # where the allowed overhead makes the interval longer than the best one
    blocked_share: float  # of training time, at the interval to use
    young_s: float
    daly_s: float
    fixed: tuple[Point, ...]

    @property
    def use(self) -> Point:
        """The interval to use: the best one that keeps within the allowed overhead."""
        return self.bound or self.best


def plan(nodes: int, costs: Costs, *, overhead_max: float) -> Plan:
    """Find the best interval for one size of a job."""
    best_s = best_interval_s(costs)
    best = Point(interval_s=best_s, share=productive_share(best_s, costs) if math.isfinite(best_s) else 1.0)
    least_s = costs.blocked_s * (1 / overhead_max - 1)
    bound = Point(interval_s=least_s, share=productive_share(least_s, costs)) if least_s > best_s else None
    use = bound or best
    fixed = [max(seconds, floor_interval_s(costs)) for seconds in FIXED_S]
    return Plan(
        nodes=nodes,
        costs=costs,
        best=best,
        bound=bound,
        blocked_share=costs.blocked_s / (use.interval_s + costs.blocked_s) if use.interval_s else 0.0,
        young_s=young_s(costs),
        daly_s=daly_s(costs),
        fixed=tuple(Point(interval_s=seconds, share=productive_share(seconds, costs)) for seconds in fixed),
    )


def curve(costs: Costs, low_s: float, high_s: float) -> list[Point]:
    """Return the productive share over intervals from `low_s` to `high_s`, evenly spaced on a logarithmic axis."""
    first_s = max(low_s, floor_interval_s(costs), 1e-3)
    if first_s >= high_s:
        return []
    ratio = (high_s / first_s) ** (1 / (CURVE_POINTS - 1))
    intervals = (first_s * ratio**index for index in range(CURVE_POINTS))
    return [Point(interval_s=seconds, share=productive_share(seconds, costs)) for seconds in intervals]


def span(plans: list[Plan]) -> tuple[float, float]:
    """Return the intervals between which the curves of all plans say something."""
    best = [each.use.interval_s for each in plans if math.isfinite(each.use.interval_s) and each.use.interval_s > 0]
    low, high = min(best, default=60.0), max(best, default=3600.0)
    floor = min(floor_interval_s(each.costs) for each in plans)
    return max(low / 10 ** (CURVE_DECADES / 2), floor, 1e-3), high * 10 ** (CURVE_DECADES / 2)


# What a run has measured itself: how long saves take and block, restarts last, and how often nodes were lost.
#
# From `journal.jsonl` (commits, nodes, losses) and `metrics.csv` (the time of each step).  Reads only.

METRICS_NAME = "metrics.csv"
SAVES_KEPT = 50  # the newest: an older library or file system is no guide
RESTARTS_KEPT = 20
CLOCK_STEP_S = 0.001  # metrics.csv has milliseconds


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """One committed save that nobody waited for.  Unix seconds."""

    requested_at: float
    durable_at: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run; None where nothing is known."""

    nodes: int | None = None  # of the newest attempt
    saves: int = 0
    persist_s: float | None = None  # median, from request to durable
    blocked_s: float | None = None  # median, of what a save took from training: blocked and slowed steps in sum
    restart_s: float | None = None  # median, from the last step of a launch to the first of the next
    node_hours: float = 0.0
    failures: int = 0  # of the infrastructure
    rate: FailureRate = msgspec.field(default_factory=FailureRate)


class _Attempt(msgspec.Struct):
    nodes: int
    began_at: float
    last_at: float
    ended: bool = False


class _Step(msgspec.Struct, frozen=True):
    at: float
    launch: tuple[int, int]


class _Measured(msgspec.Struct):
    """What the journal holds."""

    saves: list[Save]
    attempts: list[_Attempt]
    lost_at: list[float]  # failures of the infrastructure


def measure(run_journal: Path, metrics: Path) -> Measured:
    """Read what a run has measured.  Missing files say nothing; damaged lines are passed over.

    Raises:
        OSError: a file is there and cannot be read.
    """
    found = _read_journal(run_journal)
    saves, attempts = found.saves[-SAVES_KEPT:], found.attempts
    steps = list(_read_steps(metrics))
    return Measured(
        nodes=attempts[-1].nodes if attempts else None,
        saves=len(saves),
        persist_s=_median([save.durable_at - save.requested_at for save in saves]),
        blocked_s=_median(_taken_by_saves(saves, steps)),
        restart_s=_median(_restarts(steps)[-RESTARTS_KEPT:]),
        node_hours=sum(_hours(attempt) for attempt in attempts),
        failures=len(found.lost_at),
        rate=_rate(found),
    )


def reliability(run_journal: Path) -> FailureRate:
    """Return how often the infrastructure has failed in a run, as far as its journal shows.

    Raises:
        OSError: the journal is there and cannot be read.
    """
    return _rate(_read_journal(run_journal))


def _read_journal(run_journal: Path) -> _Measured:
    found = _Measured([], [], [])
    attempts = found.attempts
    losses = 0
    for record in journal.read(run_journal):
        event = record.event
        if isinstance(event, on.AttemptStarted):
            if attempts and not attempts[-1].ended:
                found.lost_at.append(attempts[-1].last_at)  # its batch node went, or it was killed: not distinguished
            attempts.append(_Attempt(max(1, len(event.nodes)), event.at, event.at))
        if attempts:
            attempts[-1].last_at = max(attempts[-1].last_at, event.at)
            attempts[-1].ended |= record.phase is Phase.DONE
        if record.node_losses > losses:
            found.lost_at.extend([event.at] * (record.node_losses - losses))
        losses = record.node_losses
        if isinstance(event, on.CheckpointCommitted) and not event.emergency:
            found.saves.append(Save(requested_at=event.at - event.seconds, durable_at=event.at))
    return found


def _rate(found: _Measured) -> FailureRate:
    rate = FailureRate()
    for attempt in found.attempts:
        rate.observe(attempt.last_at, node_hours=_hours(attempt))
        failed = [at for at in found.lost_at if attempt.began_at <= at <= attempt.last_at]
        rate.observe(attempt.last_at, node_hours=0.0, failures=len(failed))
    return rate


def _hours(attempt: _Attempt) -> float:
    return attempt.nodes * (attempt.last_at - attempt.began_at) / 3600


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _read_steps(metrics: Path) -> Iterator[_Step]:
    """Yield the rows of `metrics.csv` that can be read, as they were written."""
    try:
        file = open_plain(metrics, within=metrics.parent)
    except FileNotFoundError:
        return
    with file:
        for line in lines.forwards(file):
            cells = line.decode(errors="replace").split(",")
            try:
                at, launch = float(cells[5]), (int(cells[6]), int(cells[7]))
            except (ValueError, IndexError):
                continue  # the header, or torn
            if math.isfinite(at):
                yield _Step(at, launch)


def _restarts(steps: list[_Step]) -> list[float]:
    """Return the times from the last step of one launch to the first of the next."""
    return [
        after.at - before.at
        for before, after in pairwise(steps)
        if after.launch != before.launch and after.at > before.at
    ]


def _taken_by_saves(saves: list[Save], steps: list[_Step]) -> list[float]:
    """Return what each save took from training: how much longer than the median its steps lasted, in sum.

    Steps count from the request until the first step that began after the save was durable.
    """
    pairs = [(before, after) for before, after in pairwise(steps) if before.launch == after.launch]
    if not pairs:
        return []
    usual_s = statistics.median(after.at - before.at for before, after in pairs)
    ends = [after.at for _, after in pairs]
    taken = []
    for save in saves:
        excess: list[float] = []
        for before, after in pairs[bisect_right(ends, save.requested_at + CLOCK_STEP_S) :]:
            if before.at >= save.durable_at:
                break
            excess.append(after.at - before.at - usual_s)
        if excess:
            taken.append(max(0.0, sum(excess)))
    return taken


# The plot of `stepkeeper plan`: productive share over the interval, in the terminal and as an SVG file.

MARKS = "*+xo#%@&"
TICKS_S = (1, 10, 60, 300, 600, 1800, 3600, 4 * 3600, 12 * 3600, 86400, 7 * 86400)
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7b4b94", "#b8860b", "#4a4a4a", "#008080", "#a52a2a")  # dark on white
WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 30, 60
SHARE_STEP = 0.05  # of the vertical axis
DEPTH_MAX = 0.35  # below the best: what is worse is off the plot


class Frame:
    """Where an interval and a share lie between 0 and 1 of the axes."""

    def __init__(self, plans: list[Plan]) -> None:
        """Make room for all curves near their best intervals."""
        self.low_s, self.high_s = span(plans)
        curves = [(each, curve(each.costs, self.low_s, self.high_s)) for each in plans]
        lowest = min((point.share for _, points in curves for point in points), default=0.0)
        best = min(each.use.share for each in plans)
        self.bottom = max(0.0, math.floor(max(lowest, best - DEPTH_MAX) / SHARE_STEP) * SHARE_STEP)
        self.curves = [(each, [point for point in points if point.share >= self.bottom]) for each, points in curves]

    def across(self, interval_s: float) -> float:
        """Return the horizontal place of an interval, logarithmic."""
        return math.log(interval_s / self.low_s) / math.log(self.high_s / self.low_s)

    def up(self, share: float) -> float:
        """Return the vertical place of a share."""
        return (share - self.bottom) / (1.0 - self.bottom)

    def ticks(self) -> list[float]:
        """Return the intervals to name on the axis."""
        return [float(tick) for tick in TICKS_S if self.low_s <= tick <= self.high_s]


def plot_text(plans: list[Plan], *, columns: int = 72, rows: int = 16) -> list[str]:
    """Return the plot as lines of characters; `|` stands at the interval to use of each curve."""
    frame = Frame(plans)
    grid = [[" "] * columns for _ in range(rows)]

    def put(point: Point, mark: str) -> None:
        column = round(frame.across(point.interval_s) * (columns - 1))
        row = rows - 1 - round(frame.up(point.share) * (rows - 1))
        if 0 <= column < columns and 0 <= row < rows:
            grid[row][column] = mark

    for index, (_, points) in enumerate(frame.curves):
        for point in points:
            put(point, MARKS[index % len(MARKS)])
    for each, _ in frame.curves:
        if math.isfinite(each.use.interval_s) and each.use.interval_s > 0:
            put(each.use, "|")
    labels = [frame.bottom + (1 - frame.bottom) * (rows - 1 - row) / (rows - 1) for row in range(rows)]
    lines = [
        f"{label:>6.1%} {''.join(row)}".rstrip()
        if index % 3 == 0 or index == rows - 1
        else f"{'':>6} {''.join(row)}".rstrip()
        for index, (label, row) in enumerate(zip(labels, grid, strict=True))
    ]
    axis = [" "] * (columns + 8)
    free_from = 0
    for tick in frame.ticks():
        word = short(tick)
        at = round(frame.across(tick) * (columns - 1))
        if at >= free_from and at + len(word) <= len(axis):
            axis[at : at + len(word)] = word
            free_from = at + len(word) + 1
    legend = ", ".join(f"{MARKS[index % len(MARKS)]} {_nodes(each)}" for index, (each, _) in enumerate(frame.curves))
    return [*lines, f"{'':>6} {''.join(axis).rstrip()}", f"{'':>6} interval between saves; {legend}; | the one to use"]


def plot_svg(plans: list[Plan]) -> str:
    """Return the plot as an SVG document that needs nothing else: no script, no font, no style sheet."""
    frame = Frame(plans)
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(point: Point) -> tuple[float, float]:
        return LEFT + frame.across(point.interval_s) * inner_width, TOP + (1 - frame.up(point.share)) * inner_height

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">',
        '<g font-family="sans-serif" font-size="12">',
        "<title>Expected share of productive time over the interval between saves</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    count = round((1 - frame.bottom) / SHARE_STEP)
    every = max(1, count // 8)
    for index in range(0, count + 1, every):
        share = frame.bottom + index * SHARE_STEP
        y = TOP + (1 - frame.up(share)) * inner_height
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + inner_width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for tick in frame.ticks():
        x = LEFT + frame.across(tick) * inner_width
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + inner_height}" stroke="#eee"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{TOP + inner_height + 18}" text-anchor="middle">{escape(short(tick))}</text>'
        )
    parts.append(
        f'<text x="{LEFT + inner_width / 2}" y="{HEIGHT - 14}" text-anchor="middle">interval between saves</text>'
    )
    parts.append(f'<text x="{LEFT - 8}" y="{TOP - 12}" text-anchor="start">share of productive time</text>')
    for index, (each, points) in enumerate(frame.curves):
        colour = COLOURS[index % len(COLOURS)]
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, points))
        parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if math.isfinite(each.use.interval_s) and each.use.interval_s > 0:
            x, y = place(each.use)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        at = TOP + 14 + index * 34
        parts.append(f'<text x="{LEFT + inner_width + 14}" y="{at}" fill="{colour}">{escape(_nodes(each))}</text>')
        parts.append(
            f'<text x="{LEFT + inner_width + 14}" y="{at + 14}" fill="{colour}">'
            f"{escape(f'{each.use.share:.1%} at {short(each.use.interval_s)}')}</text>"
        )
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _nodes(each: Plan) -> str:
    return f"{each.nodes} node{'s' if each.nodes != 1 else ''}"


def short(seconds: float) -> str:
    """Return a span in few characters.

    >>> short(3600), short(float("inf"))
    ('1 h', 'never')
    """
    return "never" if math.isinf(seconds) else printing.duration(seconds).replace(" 00 min", "")
