"""The timeline as lanes: what the time went into, and which nodes worked when.

A lane is an SVG that is stretched to the width of the page, so it holds no text; words stand beside it.
"""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from stepkeeper import printing
from stepkeeper.redaction import redact
from stepkeeper.run_analytics.model import SECOND, Attempt, Ending, Launch, Span, Use
from stepkeeper.run_analytics.timeline import Timeline

# HTML that is safe whatever a node, a log or a path is called.

TEXT_MAX = 600


def text(value: object, *, longest: int = TEXT_MAX) -> str:
    """Return text for element content and for attributes in double quotes: redacted, cut, no control characters.

    >>> text('<b>"n1"</b>')
    '&lt;b&gt;&quot;n1&quot;&lt;/b&gt;'
    """
    said = printing.clean(redact(str(value)))
    if len(said) > longest:
        said = said[: longest - 1] + "…"
    return html.escape(said, quote=True)


def hours(length: int) -> str:
    """Return a length of time in few words."""
    return printing.duration(length / SECOND) if length else "0 s"


def unit_hours(unit_time: int) -> str:
    """Return hours of nodes or GPUs in digits that tell something, large or small.

    >>> unit_hours(3_600_000_000), unit_hours(20_000_000), unit_hours(9_000_000_000_000_000)
    ('1.0', '0.0056', '2,500,000')
    """
    value = unit_time / SECOND / 3600
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 1 or not value else f"{value:.2g}"  # noqa: PLR2004


def percent(part: float | None, whole: float = 1.0) -> str:
    """Return a share of the whole in percent; a dash where it is not known.

    >>> percent(1, 3), percent(1e-5), percent(0, 0)
    ('33.3 %', '<0.1 %', '0 %')
    """
    if part is None:
        return "–"  # noqa: RUF001 - a dash is meant
    of = 100 * part / whole if part else 0.0
    return "0 %" if not of else "<0.1 %" if of < 0.1 else f"{of:.1f} %"  # noqa: PLR2004 - what is shown has one digit


def instant(at: int) -> str:
    """Return an instant in the time zone of the machine that makes the page."""
    return printing.instant(at / SECOND)


def when(at: int) -> str:
    """Return an instant for a cell, in two lines where a screen is narrow."""
    day, _, clock = instant(at).partition(" ")
    return f"<time><span>{text(day)}</span> <span>{text(clock)}</span></time>"


def zone() -> str:
    """Return the name of that time zone."""
    return time.strftime("%Z (UTC%z)")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: frozenset[int] = frozenset()) -> str:
    """Return a table of cells that are HTML already."""

    def cells(tag: str, row: tuple[str, ...]) -> str:
        kind = f"{tag} scope=col" if tag == "th" else tag
        return "".join(
            f"<{kind}{' class=r' if index in right else ''}>{cell}</{tag}>" for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"


WIDTH = 1000  # units of a lane
COLUMNS = 500  # that spans are drawn in as shares, where there are many more of them
LANES_MAX = 24
MARKS_MAX = 400
NAMES_SHOWN = 3
ORDER = (
    Use.PRODUCTIVE,
    Use.UNKNOWN,
    Use.SAVING,
    Use.STARTING,
    Use.STOPPING,
    Use.SUSPENDED,
    Use.QUEUE,
    Use.LOST,
    Use.HUNG,
)


class Scale:
    """Instants -> places, of which so many columns can be told apart."""

    def __init__(self, seen: Timeline, columns: int = COLUMNS) -> None:
        self.columns = columns
        self.begin = seen.began
        self.length = max(1, seen.until - seen.began)

    def x(self, at: int) -> float:
        """Return a place between 0 and `WIDTH`."""
        return min(1.0, max(0.0, (at - self.begin) / self.length)) * WIDTH

    def ticks(self) -> list[tuple[float, str]]:
        """Return places and words for the axis."""
        days = [count * 86_400 for count in (1, 2, 5, 7, 14, 30, 90, 365)]
        steps = [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 12 * 3600, *days]
        seconds = self.length / SECOND
        step = next((each for each in steps if seconds / each <= 6), steps[-1])  # noqa: PLR2004 - words fit so
        count = min(int(seconds // step), 60)
        return [(100 * index * step / seconds, _since(index * step)) for index in range(count + 1)]


def _since(seconds: int) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"+{seconds // size} {unit}"
    if seconds >= 3600:  # noqa: PLR2004
        return f"+{seconds // 3600} h {seconds % 3600 // 60} min"
    return f"+{seconds} s" if seconds else "0"


def timeline(seen: Timeline, columns: int = COLUMNS) -> str:
    """Return the lanes, drawn as finely as so many columns."""
    scale = Scale(seen, columns)
    axis = "".join(f"<span style='left:{at:.2f}%'>{text(word)}</span>" for at, word in scale.ticks() if at < 97)  # noqa: PLR2004
    lanes = [_lane("the run", _uses(seen.spans, scale), css="tall"), _lane("ends", _ends(seen, scale), css="marks")]
    groups = _groups(seen.attempts)
    for nodes, drawn in groups[:LANES_MAX]:
        lanes.append(_lane(_names(nodes), _stretches(drawn, seen, scale), hint=", ".join(nodes[:200])))
    if len(groups) > LANES_MAX:
        left = sum(len(nodes) for nodes, _ in groups[LANES_MAX:])
        lanes.append(f"<div class=label></div><p class=note>and {left:,} nodes more, which came and went otherwise</p>")
    return f"<div class=lanes>{''.join(lanes)}<div class=label></div><div class=axis>{axis}</div></div>"


def _lane(label: str, drawn: str, *, css: str = "", hint: str = "") -> str:
    title = f' title="{text(hint)}"' if hint else ""
    return (
        f"<div class=label{title}>{text(label)}</div>"
        f'<svg class="lane {css}" viewBox="0 0 {WIDTH} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(label)}">{drawn}</svg>'
    )


# --- what the time went into ----------------------------------------------------------------------


def _uses(spans: Sequence[Span], scale: Scale) -> str:
    if len(spans) <= scale.columns:
        return "".join(_span(span, scale) for span in spans)
    return "".join(_columns(spans, scale))


def _span(span: Span, scale: Scale) -> str:
    begin, end = scale.x(span.begin), scale.x(span.end)
    where = f"attempt {span.attempt}" + (f", launch {span.launch}" if span.launch is not None else "")
    said = f"{span.use.value}, {hours(span.length)}: {where}, from {instant(span.begin)}\n{span.use.meaning}"
    return _rect(begin, end, f"u-{span.use.value}", said)


def _rect(begin: float, end: float, css: str, said: str, *, y: float = 0, height: float = 10) -> str:
    width = max(end - begin, 0.4)  # what is short can still be seen
    return (
        f'<rect x="{begin:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" class="{css}">'
        f"<title>{text(said)}</title></rect>"
    )


def _columns(spans: Sequence[Span], scale: Scale) -> Iterable[str]:
    """Yield columns of equal width, each divided by what its time went into: nothing short is lost."""
    columns = scale.columns
    width = scale.length / columns
    spent: list[dict[Use, float]] = [{} for _ in range(columns)]
    for span in spans:
        first = min(columns - 1, int((span.begin - scale.begin) / width))
        last = min(columns - 1, int((span.end - scale.begin) / width))
        for column in range(first, last + 1):
            left, right = scale.begin + column * width, scale.begin + (column + 1) * width
            part = min(span.end, right) - max(span.begin, left)
            if part > 0:
                spent[column][span.use] = spent[column].get(span.use, 0.0) + part
    for column, uses in enumerate(spent):
        y, whole = 0.0, sum(uses.values()) or 1.0
        begin = scale.begin + int(column * width)
        words = ", ".join(f"{use.value} {100 * uses[use] / whole:.1f} %" for use in ORDER if uses.get(use))
        said = f"{hours(int(width))} from {instant(begin)}: {words}"
        # lost time stands on top, where it is seen
        for use in reversed(ORDER):
            height = 10 * uses.get(use, 0.0) / whole
            if height:
                left = column * WIDTH / columns
                yield _rect(left, left + WIDTH / columns, f"u-{use.value}", said, y=y, height=height)
            y += height


# --- how launches ended ---------------------------------------------------------------------------


def ends_of(seen: Timeline) -> list[Launch]:
    """Return the launches that ended, oldest first."""
    return [launch for launch in seen.launches() if launch.ending is not Ending.RUNNING]


def _ends(seen: Timeline, scale: Scale) -> str:
    ended = ends_of(seen)
    most = min(MARKS_MAX, scale.columns)
    shown = ended if len(ended) <= most else [ended[i * len(ended) // most] for i in range(most)]
    out = []
    for launch in shown:
        x = scale.x(ended_at(launch, seen))
        said = f"launch {launch.name} ended: {launch.ending.value}\n{launch.why}"
        if launch.cause:
            said += f"\nverdict: {launch.cause}: {launch.evidence}"
        if launch.decided:
            said += f"\nthen: {launch.decided}"
        out.append(_rect(x - 1.2, x + 1.2, f"e-{launch.ending.name.lower()}", said))
    return "".join(out)


def ended_at(launch: Launch, seen: Timeline) -> int:
    """Return when a launch ended, as far as anybody knows."""
    if launch.ended is not None:
        return launch.ended
    rows = seen.rows.get(launch.key)
    return rows.at[-1] if rows else launch.began


# --- nodes ----------------------------------------------------------------------------------------


class Did(NamedTuple):
    """What a node did: a bit for each launch of the run, and when it was left."""

    worked: int
    spare: int
    left: tuple[tuple[int, int], ...]  # (attempt, when)


def _groups(attempts: Sequence[Attempt]) -> list[tuple[list[str], Did]]:
    """Return nodes that did the same, together: the largest group, those that were left, the others."""
    worked: dict[str, int] = {}
    spare: dict[str, int] = {}
    left: dict[str, tuple[tuple[int, int], ...]] = {}
    bit = 1
    for attempt in attempts:
        for node in attempt.nodes:
            worked.setdefault(node, 0)
        for launch in attempt.launches:
            for node in launch.nodes:
                worked[node] = worked.get(node, 0) | bit
            for node in set(attempt.nodes).difference(launch.nodes):
                if attempt.left.get(node, launch.began + 1) > launch.began:
                    spare[node] = spare.get(node, 0) | bit
            bit <<= 1
        for node, at in attempt.left.items():
            left[node] = (*left.get(node, ()), (attempt.number, at))
    groups: dict[Did, list[str]] = {}
    for node, bits in worked.items():
        groups.setdefault(Did(bits, spare.get(node, 0), left.get(node, ())), []).append(node)
    found = [(sorted(nodes), did) for did, nodes in groups.items()]
    most = max((len(nodes) for nodes, _ in found), default=0)
    return sorted(found, key=lambda each: (len(each[0]) != most, not each[1].left, -len(each[0]), each[0]))


def _names(nodes: Sequence[str]) -> str:
    if len(nodes) <= NAMES_SHOWN:
        return ", ".join(nodes)
    return f"{len(nodes):,} nodes: {nodes[0]} … {nodes[-1]}"


class _Stretch(msgspec.Struct):
    begin: float
    end: float
    what: str
    first: str
    last: str


def _stretches(did: Did, seen: Timeline, scale: Scale) -> str:
    """Draw where nodes worked; launches that follow each other within a pixel or two become one stretch."""
    merged: list[_Stretch] = []
    bit = 1
    for attempt in seen.attempts:
        for launch in attempt.launches:
            what = "worked" if did.worked & bit else "spare" if did.spare & bit else ""
            bit <<= 1
            if not what:
                continue
            until = launch.ended if launch.ended is not None else attempt.ended
            begin, end = scale.x(launch.began), scale.x(max(launch.began, until))
            if merged and merged[-1].what == what and begin - merged[-1].end < WIDTH / scale.columns:
                merged[-1].end, merged[-1].last = end, launch.name
            else:
                merged.append(_Stretch(begin, end, what, launch.name, launch.name))
    out = []
    for each in merged:
        which = f"launch {each.first}" if each.first == each.last else f"launches {each.first} to {each.last}"
        out.append(_rect(each.begin, each.end, f"n-{each.what}", f"{each.what}: {which}", y=2, height=6))
    for number, at in did.left:
        said = f"used no more from {instant(at)} (attempt {number})"
        out.append(_rect(scale.x(at) - 1.2, scale.x(at) + 1.2, "n-left", said))
    return "".join(out)
