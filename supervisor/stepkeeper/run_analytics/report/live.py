"""The report of a run that goes on: what it does now, its nodes and its last decisions, above the report's own parts.

Pure.  A page is made of parts with names; a browser asks for those that have changed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from stepkeeper.core.exits import ExitCode
from stepkeeper.core.state import Phase
from stepkeeper.run_analytics import nodes as node_states
from stepkeeper.run_analytics import progress, queue
from stepkeeper.run_analytics.model import Checkpoint
from stepkeeper.run_analytics.nodes import Node
from stepkeeper.run_analytics.report import page
from stepkeeper.run_analytics.report.lanes import hours, instant, table, text, when
from stepkeeper.run_analytics.report.page import About, Detail, section
from stepkeeper.run_analytics.screen import (
    WAITS_FOR,
    Glance,
    after,
    exit_meaning,
    launch_in_words,
    place,
    saved,
    waits_word,
)
from stepkeeper.run_analytics.timeline import Timeline
from stepkeeper.run_store.status import NO_LIBRARY, Status, heard_at, is_silent
from stepkeeper_trainer.formats.steps import COMMITTED, VERIFIED

DETAIL = Detail(columns=150, losses=160, rows=30)  # at most 1,920 points of losses and learning rates
DECISIONS_MAX = 12
ORDER = (
    *("head", "said", "now", "figures", "going-on", "decisions", "loss", "timeline", "nodes", "spent", "failures"),
    *("checkpoints", "started", "incidents", "definitions"),
)
SCRIPTS = ("page.js", page.LIVE_SCRIPT)


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
    word, css = _standing(seen, now)
    return {
        "head": f"<header><h1>{text(about.name)} <em class=s-{css}>{text(word)}</em></h1></header>",
        "said": f"<p>{text(_sentence(seen, now))}</p>",
        "now": _now(seen, checkpoints, now),
        "decisions": _decisions(seen),
    }


def whole_parts(seen: Timeline, about: About, nodes: Sequence[Node]) -> dict[str, str]:
    """Return the parts that need the whole run: those of the report, and the nodes."""
    found = page.sections(seen, about, DETAIL)
    found["figures"] = page.cards(page.figures(seen))
    found["nodes"] = _nodes(seen, nodes)
    return found


def _standing(seen: Glance, now: float) -> tuple[str, str]:
    """Return one word for how it stands, and its class."""
    status = seen.status
    if seen.waiting is not None:
        word = waits_word(seen).lower()
        return word, "silent" if word == "gone" else "waiting"
    if status is None:
        return "no status", "silent"
    if status.exit_code is not None:
        words = {ExitCode.FINISHED: ("finished", "finished"), ExitCode.REQUEUED: ("requeued", "waiting")}
        return next((said for code, said in words.items() if code == status.exit_code), ("ended", "ended"))
    if is_silent(status, now):
        return "silent", "silent"
    return status.phase, "running" if status.phase == Phase.TRAINING else "other"


def _sentence(seen: Glance, now: float) -> str:
    """Say how it stands, in words that change only when that does."""
    status = seen.status
    if seen.waiting is not None:
        return f"{waits_word(seen).capitalize()}: {after(seen)}."
    if status is None:
        return "No supervisor has worked on this run yet, or its status cannot be read."
    if status.exit_code is not None:
        return f"It ended: {exit_meaning(status.exit_code)} (exit code {status.exit_code})."
    restarts = f" (restart {status.restart_count})" if status.restart_count else ""
    where = f"job {queue.name(status)}{restarts}, attempt {status.attempt}, {launch_in_words(status)}"
    if is_silent(status, now):
        return f"The supervisor writes nothing any more: {where}. Its last phase was {status.phase}."
    return f"{status.phase.capitalize()}: {where}."


def _now(seen: Glance, checkpoints: Sequence[Checkpoint], now: float) -> str:
    status = seen.status
    rows: list[tuple[str, str]] = []
    if seen.waiting is not None:
        rows.append(("waits", f"for {_ago(seen.waiting.since, now)}, since {instant(round(seen.waiting.since * 1e6))}"))
    if seen.queued is not None:
        rows.append(("Slurm says", text(queue.words(seen.queued, now))))
    if status is not None:
        rows += _of_status(seen, status, checkpoints, now)
    body = "".join(f"<tr><th scope=row>{name}</th><td>{value}</td></tr>" for name, value in rows)
    return section("Now", f"<table class=facts><tbody>{body}</tbody></table>") if rows else ""


def _of_status(seen: Glance, status: Status, checkpoints: Sequence[Checkpoint], now: float) -> list[tuple[str, str]]:
    rows = []
    lives = status.exit_code is None and seen.waiting is None
    if lives and seen.phase_since is not None:
        rows.append(("phase", f"{text(status.phase)}, for {_ago(seen.phase_since, now)}"))
    if status.waits_for:
        rows.append(("waits for", text(", ".join(WAITS_FOR.get(gate, gate) for gate in status.waits_for))))
    if status.library is False and status.checkpoint_step is None:
        rows.append(("library", text(NO_LIBRARY)))
    else:
        rows += _progress(seen, status, checkpoints, now)
    rows.append(("nodes", f"{len(status.nodes):,} in use" if lives else "none in use"))
    rows.append(("last decision", f"<div class=words>{text(status.why or 'none yet')}</div>"))
    heard = f"the supervisor wrote {_ago(heard_at(status), now)} ago"
    rows.append(("updated", heard if lives else f"{instant(round(status.updated_at * 1e6))}"))
    return rows


def _progress(seen: Glance, status: Status, checkpoints: Sequence[Checkpoint], now: float) -> list[tuple[str, str]]:
    a_step = progress.pace(seen.rows) or status.step_seconds
    tokens = f"{status.tokens:,} tokens" if status.tokens else ""
    pace = f"{hours(round(a_step * 1e6))} a step" if a_step is not None and status.step is not None else ""
    rows = [("step", text(", ".join(filter(None, (progress.steps(status), tokens, pace)))))]
    done = progress.share(status)
    if done is not None and status.exit_code != ExitCode.FINISHED:
        works = status.phase == Phase.TRAINING and not is_silent(status, now) and seen.waiting is None
        left = progress.eta(progress.seconds_left(status, seen.rows), now, works=works)
        said = f"{100 * done:.1f} %" + (f", {left}" if left else "")
        rows.append(
            ("done", f'<progress value="{done:.4f}" max=1 aria-label="share of the steps"></progress> {text(said)}')
        )
    if loss := progress.loss(status).removeprefix("loss "):
        rows.append(("loss", f"<b class=wrong>{text(loss)}</b>" if status.loss_not_finite else text(loss)))
    states = next((each.states for each in reversed(checkpoints) if each.step == status.checkpoint_step), ())
    if not states and status.checkpoint_step is not None:
        states = (COMMITTED,)  # it is newer than the newest look at the step directories
    rows.append(("checkpoint", f"{text(saved(seen, now))} {page.state_words(states)}"))
    verified = next(
        (each.step for each in reversed(checkpoints) if page.is_usable(each) and VERIFIED in each.states), None
    )
    if verified is not None and verified != status.checkpoint_step:
        rows.append(("verified", f"step {verified:,}"))
    return rows


def _ago(since: float, now: float) -> str:
    return text(hours(round(max(0.0, now - since) * 1e6)))


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
            "" if each.slowest_rank is None else str(each.slowest_rank),
            f"<div class=words>{text(each.why)}</div>",
        )
        for each in shown
    ]
    note = f"<p class=note>{len(found):,} nodes of the newest attempt{gpus}: {summary}.{left_out}{over}</p>"
    head = ("node", "state", "own work a step", "slowest rank", "why")
    return section("Nodes and ranks", note + table(head, rows, right=frozenset((2, 3))))
