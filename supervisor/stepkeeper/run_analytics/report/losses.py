"""The loss curve across all launches, with their boundaries, in as many points as a screen has pixels.

Each column of the picture keeps its first, least, greatest and last value, so that no spike is lost.  Steps that count
make one line, whatever launches completed them; the learning rate is drawn below, over the same steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from stepkeeper.run_analytics.model import Launch, Rows
from stepkeeper.run_analytics.report.lanes import text
from stepkeeper.run_analytics.timeline import Timeline

WIDTH, HEIGHT = 1000, 260
RATE_HEIGHT = 80
COLUMNS = 1000
MARKS_MAX = 300
RESUMES_TALL_MAX = 40
OUTLIER = 4.0  # a peak that is so many spreads above the rest is cut off, and marked
QUANTILE = 0.995
SAMPLES = 20_000  # values that the scale is made from

Point = tuple[int, float]


class Curve(msgspec.Struct, frozen=True):
    """What is drawn."""

    kept: list[Point]  # steps that count, over all launches
    rate: list[Point]  # the learning rate of these steps
    lost: list[list[Point]]  # steps that were done again
    resumes: list[tuple[int, Launch]]  # (step, launch) that a launch went on from
    strange: list[tuple[int, int]]  # steps whose loss is no finite number: (first, last) of those in a row
    first: int
    last: int


def curve(seen: Timeline, columns: int = COLUMNS) -> Curve | None:
    """Choose the points; None where no step has a loss.

    Of the steps that count, of their learning rate, and of those that were done again, there are four a column at most.
    """
    limits = seen.kept_until
    launches = [(each, rows) for each in seen.launches() if (rows := seen.rows.get(each.key))]
    if not launches:
        return None
    first = min(rows.step[0] for _, rows in launches)
    last = max(max(rows.step[0], rows.step[-1]) for _, rows in launches)
    width = max(1, (last - first + columns) // columns)
    kept: list[Point] = []
    rate: list[Point] = []
    lost: list[list[Point]] = []
    resumes: list[tuple[int, Launch]] = []
    strange: list[tuple[int, int]] = []
    for launch, rows in launches:
        limit = limits[launch.key]
        until = limit if limit is not None else math.inf
        kept += _thin(rows.step, rows.loss, width, first, -math.inf, until)
        rate += _thin(rows.step, rows.rate, width, first, -math.inf, until)
        if limit is not None and rows.step[-1] > limit:
            redone = list(_thin(rows.step, rows.loss, width, first, limit, math.inf))
            branches = kept[-1:] if kept and redone and kept[-1][0] < redone[0][0] else []
            lost.append([*branches, *redone])  # it branches off the line of what counts
        if launch is not launches[0][0]:
            resumes.append((launch.resumed_step, launch))
        strange += _strange(rows, MARKS_MAX - len(strange))
    if not kept and not any(lost):
        return None
    kept, rate = (_thin_again(points, width, first) for points in (kept, rate))
    lost = _newest(lost, 4 * columns)
    return Curve(kept, rate, lost, resumes, strange, first, max(last, first + 1))


def _newest(found: list[list[Point]], most: int) -> list[list[Point]]:
    """Return the newest lines that have no more than so many points together, and the newest one in any case."""
    shown: list[list[Point]] = []
    for points in reversed(found):
        most -= len(points)
        if most < 0 and shown:
            break
        shown.append(points)
    return shown[::-1]


def _strange(rows: Rows, count: int) -> list[tuple[int, int]]:
    """Return stretches of steps with a loss that is no finite number; a step without a loss has none to show."""
    found: list[tuple[int, int]] = []
    before = -1  # the row of the newest one
    for row in (row for row, value in enumerate(rows.loss) if math.isinf(value)):
        if found and row == before + 1:
            found[-1] = (found[-1][0], rows.step[row])
        elif len(found) >= count:
            break
        else:
            found.append((rows.step[row], rows.step[row]))
        before = row
    return found


def _thin(  # noqa: PLR0917 - one value each
    steps: Sequence[int], values: Sequence[float], width: int, origin: int, above: float, upto: float
) -> Iterator[Point]:
    """Yield up to four points a column of `width` steps: first, least, greatest and last."""
    column: int | None = None
    points: list[Point] = []
    for step, value in zip(steps, values, strict=True):
        if not (above < step <= upto) or not math.isfinite(value):
            continue
        at = (step - origin) // width
        if at != column:
            yield from _four(points)
            column, points = at, []
        points.append((step, value))
    yield from _four(points)


def _thin_again(points: list[Point], width: int, origin: int) -> list[Point]:
    """Join the columns that launches share, of which there may be thousands."""
    return list(_thin([step for step, _ in points], [value for _, value in points], width, origin, -math.inf, math.inf))


def _four(points: list[Point]) -> list[Point]:
    if len(points) <= 4:  # noqa: PLR2004
        return points
    chosen = {
        0,
        len(points) - 1,
        min(range(len(points)), key=lambda index: points[index][1]),
        max(range(len(points)), key=lambda index: points[index][1]),
    }
    return [points[index] for index in sorted(chosen)]


def picture(found: Curve) -> str:
    """Return the picture with its axes."""
    low, high = _range(found)
    span = high - low

    def x(step: int) -> float:
        return (step - found.first) / (found.last - found.first) * WIDTH

    def y(loss: float) -> float:
        return HEIGHT - min(1.0, max(0.0, (loss - low) / span)) * HEIGHT

    out = [_grid(low, high)]
    for lines, css in ((found.lost, "lost"), ([found.kept], "kept")):
        out += [_line(points, css, x, y) for points in filter(None, lines)]
    every = max(1, len(found.resumes) // MARKS_MAX)
    height = HEIGHT if len(found.resumes) <= RESUMES_TALL_MAX else 9  # many bars would hide the curve
    out += [
        _mark(x(step), height, "resume", f"launch {launch.name} went on from step {step:,}")
        for step, launch in found.resumes[::every]
    ]
    out += [
        _mark(x(step), 12, "peak", f"step {step:,}: loss {loss:.6g}, beyond the scale")
        for step, loss in peaks(found)[:MARKS_MAX]
    ]
    out += [
        _mark(x(first), 18, "strange", f"{which}: the loss is not a finite number", until=x(last))
        for first, last in found.strange[:MARKS_MAX]
        for which in [f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"]
    ]
    svg = (
        f'<svg class=curve viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="loss over steps">{"".join(out)}</svg>'
    )
    return f"<div class=chart>{_labels(low, high)}{svg}<div></div>{_steps(found)}{_rate(found, x)}</div>"


def _line(points: Sequence[Point], css: str, x: Callable[[int], float], y: Callable[[float], float]) -> str:
    first, last = points[0], points[-1]
    dot = [(first[0] + 1, first[1])] if first == last else []  # a single step is seen too
    path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in [*points, *dot])
    return f'<polyline class="{css}" points="{path}"/>'


def _rate(found: Curve, x: Callable[[int], float]) -> str:
    """Draw the learning rate, from zero up; nothing where no step has one."""
    high = 1.08 * max((rate for _, rate in found.rate), default=0.0)
    if high <= 0:
        return ""
    line = _line(found.rate, "rate", x, lambda rate: RATE_HEIGHT * (1 - max(0.0, rate) / high))
    ticks = _ticks(0.0, high)[:: max(1, len(_ticks(0.0, high)) // 2)]
    spans = "".join(f"<span style='bottom:{100 * value / high:.1f}%'>{value:.4g}</span>" for value in ticks)
    return (
        f"<div class=values>{spans}</div>"
        f'<svg class="curve low" viewBox="0 0 {WIDTH} {RATE_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="learning rate over steps">{line}</svg>'
    )


def peaks(found: Curve) -> list[Point]:
    """Return the points that the scale leaves out."""
    _, high = _range(found)
    return [point for line in (found.kept, *found.lost) for point in line if point[1] > high]


def _range(found: Curve) -> tuple[float, float]:
    values = [loss for line in (found.kept, *found.lost) for _, loss in line]
    values.sort()
    low, high = values[0], values[-1]
    sample = values[:: max(1, len(values) // SAMPLES)]
    typical = sample[min(len(sample) - 1, int(QUANTILE * len(sample)))]
    spread = max(typical - low, abs(statistics.median(sample)) * 1e-3, 1e-12)
    if high - low > OUTLIER * spread:
        high = low + 1.3 * spread
    margin = (high - low or abs(high) or 1.0) * 0.04
    return low - margin, high + margin


def _grid(low: float, high: float) -> str:
    lines = []
    for value in _ticks(low, high):
        at = HEIGHT - (value - low) / (high - low) * HEIGHT
        lines.append(f'<line class=grid x1="0" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
    return "".join(lines)


def _ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    if not (math.isfinite(rough) and rough > 0):
        return []
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= rough)
    first = math.ceil(low / step)
    return [round((first + index) * step, 12) for index in range(10) if (first + index) * step <= high]


def _labels(low: float, high: float) -> str:
    spans = "".join(
        f"<span style='bottom:{100 * (value - low) / (high - low):.1f}%'>{value:.4g}</span>"
        for value in _ticks(low, high)
    )
    return f"<div class=values>{spans}</div>"


def _steps(found: Curve) -> str:
    whole = found.last - found.first
    ticks = [value for value in _ticks(found.first, found.last) if value == int(value)]
    spans = "".join(
        f"<span style='left:{100 * (value - found.first) / whole:.1f}%'>{int(value):,}</span>"
        for value in ticks
        if (value - found.first) / whole < 0.95  # noqa: PLR2004 - the word would stand out
    )
    return f"<div class=axis>{spans}</div>"


def _mark(x: float, height: float, css: str, said: str, *, until: float = 0.0) -> str:
    title = f"<title>{text(said)}</title>"
    width = max(0.0, until - x) + 1.8
    return f'<rect class="{css}" x="{x - 0.9:.1f}" y="0" width="{width:.1f}" height="{height}">{title}</rect>'
