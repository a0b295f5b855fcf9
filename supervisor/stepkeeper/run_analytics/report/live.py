"""The report of a run that goes on: what it does now, its nodes and its last decisions, above the report's own parts.

Pure.  A page is made of parts with names; a browser asks for those that have changed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from stepkeeper.core.state import Phase
from stepkeeper.run_analytics import nodes as node_states
from stepkeeper.run_analytics.glance import Glance, facts, phase, place, state
from stepkeeper.run_analytics.model import Checkpoint
from stepkeeper.run_analytics.nodes import Node
from stepkeeper.run_analytics.report import page
from stepkeeper.run_analytics.report.lanes import hours, table, text, when
from stepkeeper.run_analytics.report.page import About, Detail, section
from stepkeeper.run_analytics.timeline import Timeline
from stepkeeper_trainer.formats.steps import COMMITTED, VERIFIED

DETAIL = Detail(columns=150, losses=160, rows=30)  # at most 1,920 points of losses and learning rates
DECISIONS_MAX = 12
TILES_MAX = 256  # of nodes
SQUARES_MAX = 16  # of a node's ranks that are drawn one by one
ORDER = (
    *("head", "said", "now", "figures", "going-on", "decisions", "loss", "timeline", "nodes", "spent", "failures"),
    *("checkpoints", "started", "incidents", "definitions"),
)
SCRIPTS = ("page.js", page.LIVE_SCRIPT)
_CLASSES = {  # of CSS, by the words of `glance.state`
    "pending": "waiting", "starting": "waiting", "requeued": "waiting", "gone": "silent", "no status": "silent",
    "silent": "silent", "finished": "finished", Phase.TRAINING.value: "running",
}  # fmt: skip


def document(about: About, parts: dict[str, str], version: int) -> str:
    """Return the page as it is loaded; `live.js` keeps it up to date."""
    drawn = "\n".join(_part(name, parts.get(name, "")) for name in ORDER)
    body = (
        f"<div id=live data-version={version}>{drawn}</div>"
        "<p id=connection role=alert></p>"
        "<noscript><p>Without scripts this page shows one moment: reload it.</p></noscript>"
    )
    return page.document(about, body, scripts=SCRIPTS, footer=f"live; all times {text(time.strftime('%Z (UTC%z)'))}")


def _part(name: str, drawn: str) -> str:
    spoken = " role=status" if name == "said" else ""  # a screen reader speaks of a new phase, not of each step
    return f"<div id=p-{name}{spoken}>{drawn}</div>"


def now_parts(seen: Glance, about: About, checkpoints: Sequence[Checkpoint], now: float) -> dict[str, str]:
    """Return the parts that a quick look makes."""
    word, said = state(seen, now), phase(seen, now, timed=False)
    css = _CLASSES.get(word, "other" if seen.status is not None and seen.status.exit_code is None else "ended")
    return {
        "head": f"<header><h1>{text(about.name)} <em class=s-{css}>{text(word)}</em></h1></header>",
        "said": f"<p>{text(said[:1].upper() + said[1:])}.</p>",
        "now": _now(seen, checkpoints, now),
        "decisions": _decisions(seen),
    }


def whole_parts(seen: Timeline, about: About, nodes: Sequence[Node]) -> dict[str, str]:
    """Return the parts that need the whole run: those of the report, and the nodes."""
    found = page.sections(seen, about, DETAIL)
    found["figures"] = page.cards(page.figures(seen))
    found["nodes"] = _nodes(seen, nodes)
    return found


def _now(seen: Glance, checkpoints: Sequence[Checkpoint], now: float) -> str:
    newest = seen.status.checkpoint_step if seen.status is not None else None
    if newest is not None:
        states = (each.states[0] for each in reversed(checkpoints) if each.step == newest)
        # without one, it is newer than the newest look at the step directories
        seen = msgspec.structs.replace(seen, checkpoint_state=next(states, COMMITTED))
    verified = (each.step for each in reversed(checkpoints) if page.is_usable(each) and VERIFIED in each.states)
    newest_verified = next(verified, newest)
    rows = []
    for label, words in facts(seen, now):
        cell = text(words)
        if label == "done":
            cell = f'<progress value="{seen.share:.4f}" max=1 aria-label="share of the steps"></progress> {cell}'
        rows.append((label, cell))
        if label == "checkpoint" and newest_verified != newest:
            rows.append(("verified", f"step {newest_verified:,}"))
    body = "".join(f"<tr><th scope=row>{label}</th><td>{cell}</td></tr>" for label, cell in rows)
    return section("Now", f"<table class=facts><tbody>{body}</tbody></table>")


def _decisions(seen: Glance) -> str:
    shown = seen.decisions[-DECISIONS_MAX:]
    rows = [
        (
            when(round(record.event.at * 1e6)),
            text(place(record)),
            text(record.phase.value),
            f"<div class=words>{text(record.why)}</div>",
        )
        for record in reversed(shown)
    ]
    if not rows:
        return section("Last decisions", "<p>None yet.</p>")
    return section("Last decisions", table(("when", "launch", "phase", "what was decided, and why"), rows))


def _nodes(seen: Timeline, found: Sequence[Node]) -> str:
    if not found:
        return ""
    shown = found[: DETAIL.rows]
    gpus = f", {seen.gpus_per_node} GPUs each" if seen.gpus_per_node else ""
    summary = ", ".join(f"{number:,} {state.value}" for state, number in node_states.count(found).items())
    left_out = f" {len(found) - len(shown):,} more are left out here." if len(found) > len(shown) else ""
    over = (
        " The attempt has ended: this is what was known then." if seen.attempts and seen.attempts[-1].said_end else ""
    )
    rows = [
        (
            f"<code>{text(each.name)}</code>",
            f"<em class=w-{each.state.name.lower()}>{each.state.value}</em>",
            "" if each.step_seconds is None else hours(round(each.step_seconds * 1e6)),
            _ranks(each),
            "" if each.slowest_rank is None else str(each.slowest_rank),
            f"<div class=words>{text(each.why)}</div>",
        )
        for each in shown
    ]
    note = f"<p class=note>{len(found):,} nodes of the newest attempt{gpus}: {summary}.{left_out}{over}</p>"
    head = ("node", "state", "own work a step", "ranks", "slowest rank", "why")
    body = note + _tiles(found) + table(head, rows, right=frozenset((2, 4)))
    return section("Nodes and ranks", body)


def _ranks(node: Node) -> str:
    """Say which ranks a node has, and how many of them run."""
    if node.ranks is None:
        return ""
    first, last = node.ranks
    which = f"{first:,}" if first == last else f"{first:,} to {last:,}"
    state = f"{node.running:,} running" if node.running else "none running"
    return f"{which}: {state}" + (f", {len(node.ended):,} ended" if node.ended else "")


def _tiles(found: Sequence[Node]) -> str:
    """Draw each node in its state, with a square for each rank: as quick to see for 64 nodes as for two."""
    shown = [each for each in found if each.ranks is not None][:TILES_MAX]
    if not shown:
        return ""
    running, ended = sum(each.running for each in shown), sum(len(each.ended) for each in shown)
    tiles = "".join(
        f'<li class="w-{each.state.name.lower()}" title="{text(each.name)}, {each.state.value}: ranks {_ranks(each)}">'
        f"<code>{text(each.name)}</code><span>{_squares(each)}</span></li>"
        for each in shown
    )
    said = f"{running:,} ranks running" + (f", {ended:,} ended" if ended else "")
    return f"<p class=note>{said}. Each square is a rank.</p><ul class=tiles>{tiles}</ul>"


def _squares(node: Node) -> str:
    if node.ranks is None or node.ranks[1] - node.ranks[0] >= SQUARES_MAX:
        return ""
    drawn = range(node.ranks[0], node.ranks[1] + 1)
    none = "<i class=r-none></i>"
    return "".join(
        "<i class=r-ended></i>" if rank in node.ended else "<i></i>" if node.running else none for rank in drawn
    )
