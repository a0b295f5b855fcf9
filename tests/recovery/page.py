"""`docs/benchmarks-recovery.md`, from what rounds have found."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from tests.recovery.playing import Fault, Outcome
from tests.recovery.rounds import Round
from tests.recovery.ways import Way

OURS = "stepkeeper"


def page(
    rounds: Sequence[Round],
    *,
    ways: Sequence[Way],
    faults: Sequence[Fault],
    head: str,
    notes: str,
    absent: Mapping[str, str],
    title: str = "Recovery, side by side",
) -> str:
    """Return the page.

    Args:
        rounds: what was played, each in one run.
        ways: the rows.
        faults: the columns.
        head: on what machine, under what conditions.
        notes: what the figures come to, and what they cannot say.
        absent: way to why it was not played.
        title: of the page.
    """
    parts = [f"# {title}", head]
    parts.append(_table("Seconds to the next new step", rounds, ways, faults, _seconds))
    parts.append(_table("Steps done twice", rounds, ways, faults, _redone))
    outcomes = [each for one in rounds for each in one.outcomes]
    reasons = sorted({f"- {each.way}, {each.fault}: {each.why_not}" for each in outcomes if each.why_not})
    if reasons:
        parts.append("**Does not recover**:\n\n" + "\n".join(reasons))
    if absent:
        parts.append("**Not played**:\n\n" + "\n".join(f"- {way}: {why}" for way, why in sorted(absent.items())))
    parts.append("## The ways\n\n" + "\n".join(f"- **{way.name}**: {way.what}." for way in ways))
    for what in dict.fromkeys(what for one in rounds for what in one.pieces):
        of_way = {way.name: [one.pieces.get(what, {}).get(way.name, {}) for one in rounds] for way in ways}
        parts.append(_pieces(what, {way: found for way, found in of_way.items() if any(found)}))
    parts.append(notes)
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _pieces(what: str, found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    pieces: dict[str, dict[str, list[float]]] = {}
    for way, of_round in found.items():
        for one in sorted(of_round, key=len, reverse=True):
            for name, seconds in one.items():
                pieces.setdefault(way, {}).setdefault(name, []).append(seconds)
    repeats = max(len(each) for of_way in pieces.values() for each in of_way.values())
    lines = [
        f"## {what} under Stepkeeper, piece by piece",
        "",
        f"Medians of {repeats}.",
        "",
        "| piece | " + " | ".join(pieces) + " |",
        "|---" * (len(pieces) + 1) + "|",
    ]
    longest_first = sorted(pieces.values(), key=len, reverse=True)
    names = list(dict.fromkeys(name for of_way in longest_first for name in of_way))
    names.sort(key=lambda name: name.startswith("**"))  # sums come last
    for name in names:
        cells = [
            f"{statistics.median(of_way[name]):.3f} ({_all(of_way[name], 3)})" if name in of_way else ""
            for of_way in pieces.values()
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _table(
    title: str,
    rounds: Sequence[Round],
    ways: Sequence[Way],
    faults: Sequence[Fault],
    cell: Callable[[Sequence[Outcome], Sequence[Round]], str],
) -> str:
    lines = [
        f"## {title}",
        "",
        "| way | " + " | ".join(fault.what for fault in faults) + " |",
        "|---" * (len(faults) + 1) + "|",
    ]
    for way in ways:
        row = []
        for fault in faults:
            played = [each for one in rounds for each in one.outcomes]
            own = [each for each in played if (each.way, each.fault) == (way.name, fault.name)]
            row.append(cell(own, rounds) if own else "not played")
        lines.append(f"| {way.name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _seconds(own: Sequence[Outcome], rounds: Sequence[Round]) -> str:
    found = _known(each.seconds for each in own)
    lost = len(own) - len(found)
    if not found:
        return "does not recover"
    median = statistics.median(found)
    text = f"**{median:.1f}**"
    way, fault = own[0].way, own[0].fault
    pairs = [(one.seconds(way, fault), one.seconds(OURS, fault)) for one in rounds]
    ratios = [theirs / ours for theirs, ours in pairs if theirs is not None and ours is not None]
    if ratios and way != OURS:
        text += f", {statistics.median(ratios):.2f}x ours"
    if len(found) > 1:
        text += f" ({_all(found, 1)})"
    return text + (f"; {lost} of {len(own)} did not recover" if lost else "")


def _redone(own: Sequence[Outcome], _: Sequence[Round]) -> str:
    found = _known(each.redone for each in own)
    if not found:
        return "does not recover"
    return f"{statistics.median(found):g}" + (f" ({_all(found, 0)})" if len(set(found)) > 1 else "")


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _all(values: Iterable[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)
