"""HTML that is safe whatever a node, a log or a path is called."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence

from stepkeeper import printing
from stepkeeper.redaction import redact
from stepkeeper.seeing.model import SECOND

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


def count(number: int) -> str:
    """Return a large number in few characters.

    >>> count(30_720), count(16_719_056_000_000)
    ('30,720', '16.7 T')
    """
    for size, unit in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def share(part: int, whole: int) -> str:
    """Return a share of the whole in percent.

    >>> share(1, 3), share(1, 100_000), share(0, 5)
    ('33.3 %', '<0.1 %', '0 %')
    """
    if not part or not whole:
        return "0 %"
    of = 100 * part / whole
    return "<0.1 %" if of < 0.1 else f"{of:.1f} %"  # noqa: PLR2004 - what is shown has one digit


def percent(value: float | None) -> str:
    """Return a ratio in percent; a dash where it is not known."""
    return "–" if value is None else f"{100 * value:.1f} %"  # noqa: RUF001 - a dash is meant


def instant(at: int, *, day: bool = True) -> str:
    """Return an instant in the time zone of the machine that makes the page."""
    whole = printing.instant(at / SECOND)
    return whole if day else whole.partition(" ")[2]


def zone() -> str:
    """Return the name of that time zone."""
    return time.strftime("%Z (UTC%z)")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: frozenset[int] = frozenset()) -> str:
    """Return a table of cells that are HTML already."""

    def cells(tag: str, row: tuple[str, ...]) -> str:
        return "".join(f"<{tag}{' class=r' if index in right else ''}>{cell}</{tag}>" for index, cell in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"
