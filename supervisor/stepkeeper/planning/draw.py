"""The plot of `stepkeeper plan`: productive share over the interval, in the terminal and as an SVG file."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from stepkeeper import printing
from stepkeeper.planning.plan import Plan, Point, curve, span

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


def text(plans: list[Plan], *, columns: int = 72, rows: int = 16) -> list[str]:
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


def svg(plans: list[Plan]) -> str:
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
