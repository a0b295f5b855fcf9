"""The page: headline, how to go on, where the time went, timeline, loss, failures, checkpoints, what ran, incidents."""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from stepkeeper.core.causes import Cause
from stepkeeper.core.exits import ExitCode
from stepkeeper.diagnosis import rules
from stepkeeper.printing import size
from stepkeeper.run_analytics.model import SECOND, Checkpoint, Launch, Use, exit_meaning
from stepkeeper.run_analytics.reading import Started
from stepkeeper.run_analytics.report import lanes, losses
from stepkeeper.run_analytics.report.lanes import (
    hours,
    instant,
    percent,
    table,
    text,
    unit_hours,
    when,
    zone,
)
from stepkeeper.run_analytics.timeline import RunState, Timeline, in_words
from stepkeeper_trainer.formats.steps import COMMITTED, DAMAGED, VERIFIED

# How to go on with a run that does not do so by itself: what to mend, and what to type.

_OUT = {DAMAGED, "pruned", "gone", "rolled back"}
_BY_CAUSE = frozenset((ExitCode.TRAINING_FAILED, ExitCode.TRAINING_GAVE_UP, ExitCode.CAUSE_STAYS, ExitCode.NODES_LOST))


class Advice(msgspec.Struct, frozen=True):
    """One thing to do."""

    say: str
    type: str = ""  # a command line, where there is one


def advice(seen: Timeline, path: str) -> list[Advice]:
    """Return what to do, in its order; nothing where the run goes on, or is finished."""
    job = seen.attempts[-1].job_id if seen.attempts else 0
    if seen.run_state is RunState.SILENT:
        return [
            Advice("See whether the job is there, or suspended:", f"squeue --jobs={job}"),
            _again(seen, path),
        ]
    if seen.run_state is not RunState.ENDED:
        return []
    return [*_mend(seen, path), _again(seen, path)]


def _mend(seen: Timeline, path: str) -> list[Advice]:
    """Say what has to change first."""
    code = next((each for each in ExitCode if each == seen.exit_code), None)
    last = next((each for each in reversed(list(seen.launches())) if each.cause), None)
    if code in _BY_CAUSE and last is not None and last.cause in set(Cause):
        meaning = rules.load().meanings[Cause(last.cause)]
        return [
            Advice(f"{meaning.happened} {meaning.todo}"),
            Advice("What the rank that failed first printed last:", f"stepkeeper logs {shlex.quote(path)} --failed"),
        ]
    return [Advice(f"Mend this first: {code.meaning}.")] if code is not None and code.needs_person else []


def _again(seen: Timeline, path: str) -> Advice:
    newest = next((each for each in reversed(seen.checkpoints) if is_usable(each)), None)
    where = (
        f"step {newest.step:,} ({newest.states[0]})" if newest is not None else "the beginning: no step was committed"
    )
    return Advice(f"Submit it again as it was. It resumes from {where}.", f"stepkeeper resume {shlex.quote(path)}")


def is_usable(found: Checkpoint) -> bool:
    """Tell whether a next launch may start from it."""
    return not _OUT.intersection(found.states)


COMMAND_MAX = 4_000  # characters of a command line
LIVE_SCRIPT = "live.js"  # asks for what has changed
NORMAL = {COMMITTED, VERIFIED}
_STATE_CLASSES = {COMMITTED: "committed"}  # of CSS, where the word itself is none
_WORDS = {
    RunState.RUNNING: "It is running.",
    RunState.WAITING: "It was requeued, and waits for nodes.",
    RunState.SILENT: "It has not ended, and writes nothing any more.",
    RunState.FINISHED: "The training is finished.",
    RunState.ENDED: "It ended without a word.",
    RunState.EMPTY: "No supervisor has worked on it yet.",
}


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What stands above the page."""

    name: str  # of the run directory
    path: str
    made_at: int  # microseconds
    version: str  # of Stepkeeper
    started: list[Started] = []  # what each attempt was started with


class Detail(NamedTuple):
    """How much a page shows."""

    columns: int = lanes.COLUMNS  # of the timeline
    losses: int = losses.COLUMNS  # columns of the loss curve
    rows: int = 60  # of each table: the newest; what is left out is counted


def page(seen: Timeline, about: About) -> str:
    """Return the whole document."""
    body = "\n".join((_headline(seen, about), *sections(seen, about).values()))
    return document(about, body, scripts=("page.js",), footer=f"made {instant(about.made_at)} {text(zone())}")


def sections(seen: Timeline, about: About, detail: Detail | None = None) -> dict[str, str]:
    """Return the parts below the headline by name, in their order; one that has nothing to say is empty."""
    detail = detail or Detail()
    return {
        "going-on": _going_on(seen, about),
        "spent": _spent(seen),
        "timeline": _timeline(seen, detail),
        "loss": _losses(seen, detail),
        "failures": _failures(seen, detail),
        "checkpoints": _checkpoints(seen, detail),
        "started": _started(about, detail),
        "incidents": _incidents(seen, detail),
        "definitions": _definitions(seen),
    }


def document(about: About, body: str, *, scripts: Sequence[str], footer: str) -> str:
    """Return a page that runs these scripts of ours, and needs nothing else."""
    sources = [_asset(name) for name in scripts]
    tags = "".join(f"<script>{source}</script>" for source in sources)
    icon = '<link rel=icon href="data:,">' if LIVE_SCRIPT in scripts else ""  # else a browser asks the server for one
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts)}">'
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{text(about.name)} – Stepkeeper</title>{icon}<style>{_asset('page.css')}</style></head>\n"  # noqa: RUF001
        f"<body><main>{body}</main>"
        f"<footer>Stepkeeper {text(about.version)} · {footer} · "
        f"<code>{text(about.path)}</code></footer>{tags}</body></html>\n"
    )


def policy(scripts: Sequence[str]) -> str:
    """Return the content security policy of a page that runs these scripts, and asks its own server only."""
    digests = (base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode() for name in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    sources = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    if LIVE_SCRIPT in scripts:
        sources += "; connect-src 'self'; img-src data:"
    return f"{sources}; base-uri 'none'; form-action 'none'"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _headline(seen: Timeline, about: About) -> str:
    facts = [
        ("step", "–" if seen.step is None else f"{seen.step:,}", _loss_and_tokens(seen)),  # noqa: RUF001
        *figures(seen),
    ]
    span = f"{instant(seen.began)} to {instant(seen.until)}" if seen.spans else ""
    return (
        f"<header><h1>{text(about.name)} <em class=s-{seen.run_state.value}>{seen.run_state.value}</em></h1>"
        f"<p>{text(_sentence(seen))} <span class=quiet>{span}</span></p></header>{cards(facts)}"
    )


def figures(seen: Timeline) -> list[tuple[str, str, str]]:
    """Return the figures of the whole run: name, value, what it means."""
    accounts = seen.accounts
    launches = sum(1 for _ in seen.launches())
    lost = accounts.wall[Use.LOST]
    each, unit = _unit(seen)
    return [
        ("ETTR", percent(accounts.ettr), "of the time became progress"),
        ("goodput", percent(accounts.goodput), f"of the {unit} became progress"),
        ("steps done again", f"{seen.steps_lost:,}", f"{hours(lost)} of training lost"),
        ("launches", f"{launches:,}", f"in {len(seen.attempts):,} attempt{'s' * (len(seen.attempts) != 1)}"),
        ("time", hours(accounts.wall_total), f"{unit_hours(each * accounts.node_total)} {unit}"),
    ]


def cards(facts: Sequence[tuple[str, str, str]]) -> str:
    """Return figures as cards."""
    shown = "".join(
        f"<div class=card><span>{text(name)}</span><b>{text(value)}</b><small>{text(note)}</small></div>"
        for name, value, note in facts
    )
    return f"<div class=cards>{shown}</div>"


def _sentence(seen: Timeline) -> str:
    """Say in one short sentence how it stands; the whole reason stands below, with what to do."""
    if seen.run_state is not RunState.ENDED or seen.exit_code is None:
        return _WORDS[seen.run_state]
    short = exit_meaning(seen.exit_code).partition(":")[0].partition(";")[0]
    return f"{short[0].upper()}{short[1:]} (exit code {seen.exit_code})."


def _going_on(seen: Timeline, about: About) -> str:
    """Say how to go on, where the run does not do so by itself."""
    said = advice(seen, about.path)
    if not said:
        return ""
    why = f"<p class=note>{text(seen.why)}</p>" if seen.why else ""
    items = "".join(
        f"<li>{text(each.say)}{f'<pre>{text(each.type, longest=COMMAND_MAX)}</pre>' if each.type else ''}</li>"
        for each in said
    )
    return section("How to continue", f"{why}<ol>{items}</ol>")


def _unit(seen: Timeline) -> tuple[int, str]:
    """Return what a node-hour is shown as: so many GPU-hours, where that is known."""
    return (seen.gpus_per_node, "GPU-hours") if seen.gpus_per_node else (1, "node-hours")


def _loss_and_tokens(seen: Timeline) -> str:
    parts = [f"loss {seen.loss:.5g}"] if seen.loss is not None else []
    if seen.loss_not_finite:
        parts.append("its loss is no finite number")
    if seen.rate is not None:
        parts.append(f"learning rate {seen.rate:.3g}")
    if seen.tokens:
        parts.append(f"{seen.tokens:,} tokens")
    return ", ".join(parts) or "no step was reported"


def _spent(seen: Timeline) -> str:
    accounts = seen.accounts
    each, unit = _unit(seen)
    uses = [use for use in (*lanes.ORDER, Use.SPARE) if accounts.wall[use] or accounts.node_time[use]]
    bar = "".join(_part(use, accounts.wall[use], accounts.wall_total) for use in uses if accounts.wall[use])
    rows = [
        (
            f'<i class="dot u-{use.value}"></i>{use.value}',
            hours(accounts.wall[use]),
            percent(accounts.wall[use], accounts.wall_total),
            unit_hours(each * accounts.node_time[use]),
            percent(accounts.node_time[use], accounts.node_total),
            f"<span class=aside>{text(use.meaning)}</span>",
        )
        for use in uses
    ]
    whole = unit_hours(each * accounts.node_total)
    rows.append(("<b>all</b>", hours(accounts.wall_total), "100 %", whole, "100 %", ""))
    head = ("use", "time", "share", unit, "share", "<span class=aside>what is counted</span>")
    body = f"<div class=bar>{bar}</div>{table(head, rows, right=frozenset((1, 2, 3, 4)))}"
    return section("Where the time went", body if seen.spans else "<p>Nowhere yet.</p>")


def _part(use: Use, length: int, whole: int) -> str:
    said = text(f"{use.value}: {hours(length)}, {percent(length, whole)}")
    return f'<i class="u-{use.value}" style="flex:{length}" tabindex=0 data-t="{said}"></i>'


def _timeline(seen: Timeline, detail: Detail) -> str:
    if not seen.spans:
        return ""
    note = (
        f"<p class=note>Time since the first attempt began, {instant(seen.began)}. Point at anything to learn more.</p>"
    )
    return section("Timeline", note + lanes.timeline(seen, detail.columns))


def _losses(seen: Timeline, detail: Detail) -> str:
    found = losses.curve(seen, detail.losses)
    if found is None:
        return section("Loss", "<p>No step with a loss was reported.</p>")
    source = "the journal, about one step a minute" if seen.coarse else "metrics.csv"
    words = [("kept", "counts"), ("lost", "done again"), ("resume", "a launch resumed")]
    words += [("peak", "beyond the scale, or no number")] if found.strange or losses.peaks(found) else []
    words += [("rate", "learning rate, below")] if any(rate > 0 for _, rate in found.rate) else []
    key = " ".join(f"<span class=key><i class='line {name}'></i>{word}</span>" for name, word in words)
    note = f"Over steps, from {source}; every column keeps its least and greatest value. {key}"
    return section("Loss", f"<p class=note>{note}</p>{losses.picture(found)}")


def _failures(seen: Timeline, detail: Detail) -> str:
    ended = lanes.ends_of(seen)
    if not ended:
        return ""
    counts = Counter(launch.ending.value for launch in ended)
    summary = ", ".join(f"{what} {count:,}" for what, count in counts.most_common())
    shown = ended[-detail.rows :]
    rows = [_failure(launch, seen) for launch in reversed(shown)]
    head = ("launch", "ended", "by", "why", "decided", "steps", "redone")
    body = f"<p class=note>{text(summary)}.{_left_out(len(ended) - len(shown))}</p>"
    return section("How launches ended", body + table(head, rows, right=frozenset((5, 6))))


def _failure(launch: Launch, seen: Timeline) -> tuple[str, ...]:
    last = launch.last_step
    limit = seen.kept_until.get(launch.key)
    redone = max(0, last - max(limit, launch.resumed_step)) if last is not None and limit is not None else 0
    why = f"<div class=words>{text(launch.why)}</div>"
    if launch.cause:
        why += f"<small>verdict: <b>{text(launch.cause)}</b> {text(launch.evidence)}</small>"
    return (
        launch.name,
        when(lanes.ended_at(launch, seen)),
        f"<em class=e-{launch.ending.name.lower()}>{launch.ending.value}</em>",
        why,
        f"<div class=phrase>{text(launch.decided or '–')}</div>",  # noqa: RUF001
        "–" if last is None else f"{launch.resumed_step:,} → {last:,}",  # noqa: RUF001
        f"{redone:,}" if redone else "",
    )


def _checkpoints(seen: Timeline, detail: Detail) -> str:
    found = seen.checkpoints
    if not found:
        return section("Checkpoints", "<p>None yet.</p>")
    is_over = seen.run_state in {RunState.FINISHED, RunState.ENDED}
    counts = Counter(in_words(state, is_over=is_over) for each in found for state in each.states)
    summary = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
    special = [each for each in found if set(each.states) - NORMAL - {"pruned"} or each.resumed][-detail.rows :]
    newest = found[-detail.rows // 3 :]
    shown = sorted({id(each): each for each in (*special, *newest)}.values(), key=lambda each: -each.step)
    rows = [_checkpoint(each, is_over=is_over) for each in shown]
    head = ("step", "committed", "took", "size", "state", "resumed", "directory")
    body = f"<p class=note>{summary}.{_left_out(len(found) - len(shown))}</p>"
    return section("Checkpoints", body + table(head, rows, right=frozenset((0, 2, 3, 5))))


def _checkpoint(each: Checkpoint, *, is_over: bool) -> tuple[str, ...]:
    states = state_words(each.states, is_over=is_over)
    problem = f"<br><small>{text(each.problem)}</small>" if each.problem else ""
    return (
        f"{each.step:,}",
        when(each.at) if each.at is not None else "–",  # noqa: RUF001
        hours(round(each.seconds * SECOND)) if each.seconds else "",
        size(each.bytes) if each.bytes else "",
        states + ("<em>emergency</em>" if each.emergency else "") + problem,
        str(each.resumed) if each.resumed else "",
        f"<code>{text(each.directory)}</code>",
    )


def state_words(states: Sequence[str], *, is_over: bool) -> str:
    """Return the states of a step directory, each in its colour."""
    classes = (_STATE_CLASSES.get(state, state.replace(" ", "-")) for state in states)
    words = (in_words(state, is_over=is_over) for state in states)
    return "".join(f"<em class='c-{css}'>{word}</em>" for css, word in zip(classes, words, strict=True))


def _started(about: About, detail: Detail) -> str:
    """Show what each attempt was started with; those that were started alike stand in one row."""
    if not about.started:
        return ""
    shown = about.started[-detail.rows :]
    rows = [
        (
            str(each.first) if each.first == each.last else f"{each.first} to {each.last}",
            f"<pre>{text(each.command_line or 'not recorded', longest=COMMAND_MAX)}</pre>",
            f"<div class=words>{text(each.code)}</div>",
            text(each.stepkeeper),
            "".join(f"<div class=words>{text(key)} = {text(value)}</div>" for key, value in each.settings.items()),
        )
        for each in reversed(shown)
    ]
    head = ("attempts", "command", "code", "Stepkeeper", "settings that are not the defaults")
    note = f"<p class=note>{_left_out(len(about.started) - len(shown))}</p>" if len(shown) < len(about.started) else ""
    return section("What ran", note + table(head, rows))


def _incidents(seen: Timeline, detail: Detail) -> str:
    found = seen.incidents
    if not found:
        return section("Incidents", "<p>No fault of a node, no failed save, no damaged step directory.</p>")
    shown = found[-detail.rows :]
    rows = [
        (
            when(each.at),
            f"{each.attempt}.{each.launch}" if each.launch is not None else str(each.attempt),
            text(each.kind),
            text(each.node),
            f"<div class=words>{text(each.what)}</div>",
            f"<div class=words>{text(each.decided)}</div>",
        )
        for each in reversed(shown)
    ]
    counts = Counter(each.kind for each in found)
    summary = ", ".join(f"{kind} {count:,}" for kind, count in counts.most_common())
    body = f"<p class=note>{text(summary)}.{_left_out(len(found) - len(shown) + seen.incidents_left_out)}</p>"
    return section("Incidents", body + table(("when", "launch", "kind", "node", "what", "decided"), rows))


def _left_out(count: int) -> str:
    return f" {count:,} older or ordinary ones are left out here." if count > 0 else ""


def _definitions(seen: Timeline) -> str:
    return (
        "<details><summary>What the figures mean</summary>"
        "<p><b>ETTR</b>, the effective training time ratio: productive time over all time from the first attempt's "
        "start, the queue between attempts included (Kokolis et al., arXiv 2410.21680). The wait before the first "
        "attempt is not known to the run.</p><p><b>Goodput</b>: productive node-time over the node-time that the run "
        "held, spares included (the runtime part of Google's ML Productivity Goodput). A step is productive where no "
        "later launch did it again; time in which a command reported no steps is in neither figure.</p>"
        f"<p>All times {text(zone())}. The parts add up to the whole: "
        f"{sum(seen.accounts.wall.values()):,} of {seen.accounts.wall_total:,} microseconds.</p></details>"
    )


def section(title: str, body: str) -> str:
    """Return a part of the page below its heading."""
    return f"<section><h2>{title}</h2>{body}</section>"


def for_programs(seen: Timeline, path: str = "", ran: Sequence[Started] = ()) -> dict[str, Any]:
    """Return the figures for programs.  Times are seconds, instants Unix seconds."""
    accounts = seen.accounts
    return {
        "standing": seen.run_state.value,
        "began": seen.began / SECOND,
        "until": seen.until / SECOND,
        "step": seen.step,
        "tokens": seen.tokens,
        "loss": seen.loss,
        "loss_not_finite": seen.loss_not_finite,
        "learning_rate": seen.rate,
        "exit_code": seen.exit_code,
        "why": seen.why or None,
        "how_to_go_on": msgspec.to_builtins(advice(seen, path)),
        "started": [{**msgspec.to_builtins(each), "code": each.code} for each in ran],
        "steps_lost": seen.steps_lost,
        "ettr": accounts.ettr,
        "goodput": accounts.goodput,
        "wall_s": {use.value: accounts.wall[use] / SECOND for use in Use},
        "wall_total_s": accounts.wall_total / SECOND,
        "node_s": {use.value: accounts.node_time[use] / SECOND for use in Use},
        "gpus_per_node": seen.gpus_per_node or None,
        "node_total_s": accounts.node_total / SECOND,
        "launches": [
            {
                "attempt": launch.attempt,
                "launch": launch.number,
                "began": launch.began / SECOND,
                "ended": None if launch.ended is None else launch.ended / SECOND,
                "nodes": list(launch.nodes),
                "resumed_step": launch.resumed_step,
                "last_step": launch.last_step,
                "ending": launch.ending.value,
                "why": launch.why,
                "reason": launch.reason,
                "cause": launch.cause or None,
                "decided": launch.decided,
            }
            for launch in seen.launches()
        ],
        "checkpoints": [
            {**msgspec.to_builtins(each), "at": None if each.at is None else each.at / SECOND}
            for each in seen.checkpoints
        ],
        "incidents": [{**msgspec.to_builtins(each), "at": each.at / SECOND} for each in seen.incidents],
    }
