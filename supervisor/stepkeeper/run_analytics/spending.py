"""Where the time of a run went: attempts and steps -> spans that follow each other without a gap.  Pure.

A launch is distinguished by its rows (`at` is when a step was completed):

    begin ... first row - one usual step    starting
    first row ... last row                  productive; lost beyond the step that the next launch resumed from
      of which, while a save is on its way  saving: what its steps took longer than usual, in sum
    last row ... the end of training        saving while a save is on its way; one usual step: cut off, lost;
                                            the rest: hung
    then, by the phase of the supervisor    saving, stopping

What was suspended of it (`stillness`) is taken out of each of these.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from stepkeeper.core.state import Phase
from stepkeeper.run_analytics.model import Accounts, Attempt, Ending, Key, Launch, Rows, Saved, Span, Use, patience

# What was suspended of a run's time: the supervisor did not run, and the ranks completed no steps.  Pure.
#
# The supervisor knows for how long it stood still itself.  Where the batch host alone did, steps went on meanwhile,
# and nothing was suspended: what the steps of that time took longer than usual distinguishes the two.

Stretch = tuple[int, int]
# of a stretch: where its steps were less late in sum, they went on meanwhile.  Far from 1: the supervisor was waiting
# for some seconds before it was stopped, and Slurm stops the ranks two seconds later
SHARE_MIN = 0.25


def step_time(rows: Rows, still: Sequence[Stretch]) -> int:
    """Return the median time of a step without what it was suspended for; 0 where that is not known."""
    away: dict[int, int] = {}
    for begin, end in still:
        for row in range(max(1, bisect_right(rows.at, begin)), min(len(rows), bisect_left(rows.at, end) + 1)):
            since, until = max(begin, rows.at[row - 1]), min(end, rows.at[row])
            inside = begin < rows.at[row - 1] and rows.at[row] < end  # done while the supervisor alone stood still
            if not inside:
                away[row] = away.get(row, 0) + max(0, until - since)
    if not away:
        return rows.median_step()
    times = [
        max(0, rows.at[row] - rows.at[row - 1] - away.get(row, 0)) // max(1, rows.step[row] - rows.step[row - 1])
        for row in range(1, len(rows))
    ]
    return int(statistics.median(times)) if times else 0


def stretches(attempt: Attempt, rows: Mapping[Key, Rows], step_times: Mapping[Key, int]) -> list[Stretch]:
    """Return what was suspended of an attempt, in order.

    Args:
        attempt: with the stretches in which its supervisor did not run.
        rows: the completed steps of its launches.
        step_times: what a step of each took.
    """
    taken: dict[tuple[Key, int], int] = {}  # of the time of a step, by earlier stretches
    found: list[Stretch] = []
    for begin, end in attempt.still:
        launch = _launch_at(attempt, begin, end)
        key = launch.key if launch is not None else (-1, -1)
        known = rows.get(key)
        if not known:
            found.append((begin, end))
            continue
        parts = _late(
            known, step_times[key], (begin, end), {row: part for (of, row), part in taken.items() if of == key}
        )
        if sum(until - since for since, until, _ in parts) < SHARE_MIN * (end - begin):
            continue
        for since, until, row in parts:
            taken[key, row] = taken.get((key, row), 0) + until - since
            found.append((since, until))
    return found


def _launch_at(attempt: Attempt, begin: int, end: int) -> Launch | None:
    """Return the newest launch that ran in a stretch."""
    for launch in reversed(attempt.launches):
        if launch.began < end:
            return launch if launch.ended is None or launch.ended > begin else None
    return None


def _late(rows: Rows, a_step: int, stretch: Stretch, taken: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Return how late the steps of a stretch were, in sum, as parts of it: (begin, end, row of the step)."""
    begin, end = stretch
    steps: list[tuple[int, int, int, int]] = []
    for row in range(bisect_right(rows.at, begin), min(len(rows), bisect_left(rows.at, end)) + 1):
        since = max(begin, rows.at[row - 1]) if row else begin
        until = min(end, rows.at[row]) if row < len(rows) else end
        late = until - since  # before the first step and after the last one nothing was due
        if 0 < row < len(rows):
            count = max(1, rows.step[row] - rows.step[row - 1])
            late = rows.at[row] - rows.at[row - 1] - a_step * count - taken.get(row, 0)
        steps.append((since, until, late, row))
    left = max(0, sum(late for _, _, late, _ in steps))
    parts = []
    for since, until, late, row in steps:
        part = min(left, max(0, late), until - since)
        left -= part
        if part:
            parts.append((until - part, until, row))
    return parts


def taken_out(piece: Piece, still: Sequence[Stretch]) -> Iterator[Piece]:
    """Split a piece into what was suspended and the rest; `still` is in order."""
    at, end, use = piece
    for begin, until in still[bisect_left(still, at, key=lambda each: each[1]) :]:
        if begin >= end:
            break
        since, to = max(at, begin), min(end, until)
        if since < to:
            yield at, since, use
            yield since, to, Use.SUSPENDED
            at = to
    yield at, end, use


Piece = tuple[int, int, Use]
_OF_PHASE = {
    Phase.STARTING.value: Use.STARTING,
    Phase.SAVING.value: Use.SAVING,
    Phase.STOPPING.value: Use.STOPPING,
    Phase.CLOSING.value: Use.STOPPING,
    Phase.REQUEUEING.value: Use.STOPPING,
    Phase.TRAINING.value: Use.UNKNOWN,
}


class Ends(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the end of the whole run."""

    until: int  # the end of the timeline: the last record, or now
    over: bool  # nothing runs, and nothing will without a person
    finished: bool
    durable_step: int = 0  # newest committed one of the current state


def spans(attempts: Sequence[Attempt], rows: dict[Key, Rows], ends: Ends, limits: dict[Key, int | None]) -> list[Span]:
    """Return spans from the first attempt's start to `ends.until`, in order, without gap or overlap.

    `limits` are those of `kept_until`.
    """
    reported = bool(rows)
    found: list[Span] = []
    step_times = {
        launch.key: step_time(known, attempt.still)
        for attempt in attempts
        for launch in attempt.launches
        if (known := rows.get(launch.key))
    }
    typical = int(statistics.median([each for each in step_times.values() if each] or [0]))
    step_times = {
        key: each or typical for key, each in step_times.items()
    }  # a single step does not show how long one is
    for index, attempt in enumerate(attempts):
        following = attempts[index + 1].began if index + 1 < len(attempts) else None
        last = following is None
        end = min(attempt.ended, following) if following is not None else attempt.ended
        if last and not attempt.said_end and not ends.over:
            end = max(end, ends.until)
        began = max(attempt.began, found[-1].end) if found else attempt.began
        still = stretches(attempt, rows, step_times)
        for piece, launch in _attempt(attempt, (began, end), rows, limits, step_times, reported=reported):
            for part in taken_out(piece, still):
                found += _with_nodes(part, attempt, launch)
        waits_until = following if following is not None else ends.until
        if waits_until > end:
            found.append(Span(max(began, end), waits_until, Use.QUEUE, attempt.number))
    return [span for span in found if span.length > 0]


def accounts(all_spans: Sequence[Span]) -> Accounts:
    """Add up."""
    wall = dict.fromkeys(Use, 0)
    node_time = dict.fromkeys(Use, 0)
    for span in all_spans:
        wall[span.use] += span.length
        node_time[span.use] += span.length * span.working
        node_time[Use.SPARE] += span.length * (span.held - span.working)
    begin = all_spans[0].begin if all_spans else 0
    end = all_spans[-1].end if all_spans else 0
    held = sum(span.length * span.held for span in all_spans)
    return Accounts(wall=wall, node_time=node_time, wall_total=end - begin, node_total=held)


def kept_until(attempts: Sequence[Attempt], rows: dict[Key, Rows], ends: Ends) -> dict[Key, int | None]:
    """Return the last step of each launch that counts; None where all do."""
    limits: dict[Key, int | None] = {}
    limit = None if ends.finished or not ends.over else ends.durable_step
    for attempt in reversed(attempts):
        for launch in reversed(attempt.launches):
            key = launch.key
            limits[key] = limit
            known = rows.get(key)
            began_after = min(launch.resumed_step, known.step[0] - 1) if known else launch.resumed_step
            limit = began_after if limit is None else min(limit, began_after)
    return limits


def _attempt(
    attempt: Attempt,
    within: tuple[int, int],
    rows: dict[Key, Rows],
    limits: dict[Key, int | None],
    step_times: dict[Key, int],
    *,
    reported: bool,
) -> Iterator[tuple[Piece, Launch | None]]:
    at, end = within
    for launch in attempt.launches:
        begins = min(max(at, launch.began), end)
        # one without an end must have ended when the next one began, or with the attempt
        replaced_at = next((other.began for other in attempt.launches if other.began > launch.began), end)
        ends = max(min(launch.ended, end) if launch.ended is not None else replaced_at, begins)
        for piece in _by_phase(attempt.phases, at, begins):
            yield piece, None
        key = launch.key
        known, a_step = rows.get(key), step_times.get(key, 0)
        for piece in _launch(attempt, launch, (begins, ends), known, limits[key], step_us=a_step, reported=reported):
            yield piece, launch
        at = ends
    for piece in _by_phase(attempt.phases, at, end):
        yield piece, None


def _by_phase(phases: Sequence[tuple[int, str]], begin: int, end: int) -> Iterator[Piece]:
    """Yield what the supervisor did in between launches."""
    for at, until, phase in _cut(phases, begin, end):
        use = _OF_PHASE.get(phase, Use.STOPPING)
        yield at, until, Use.STOPPING if use is Use.UNKNOWN else use


def _cut(phases: Sequence[tuple[int, str]], begin: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Yield the phases of a stretch; before the first one, that one counts."""
    for index, (at, phase) in enumerate(phases):
        since = begin if index == 0 else max(begin, at)
        until = phases[index + 1][0] if index + 1 < len(phases) else end
        if since < min(until, end):
            yield since, min(until, end), phase


def _launch(
    attempt: Attempt,
    launch: Launch,
    within: Stretch,
    rows: Rows | None,
    limit: int | None,
    *,
    step_us: int,
    reported: bool,
) -> Iterator[Piece]:
    begin, end = within
    first = bisect_left(rows.at, begin) if rows else 0
    last = bisect_right(rows.at, end) if rows else 0
    if rows is None or first >= last:
        known = launch.library_seen or reported or not launch.all_tasks_started
        for at, until, phase in _cut(attempt.phases, begin, end):
            use = _OF_PHASE.get(phase, Use.STOPPING)
            yield at, until, Use.STARTING if use is Use.UNKNOWN and known else use  # it never came to its first step
        return
    body_begins = max(begin, rows.at[first] - step_us)
    body_ends = rows.at[last - 1]
    yield begin, body_begins, Use.STARTING
    taken = _taken_by_saves(launch.saves, rows, first, last, step_us)
    turn = _turns_at(rows, body_begins, (first, last), limit)
    yield from _body(rows, body_begins, body_ends, turn, taken)
    runs = launch.ending is Ending.RUNNING
    at_hand = patience(step_us) if runs else step_us  # of one that lives, nobody knows yet how long this step takes
    phases = _cut(attempt.phases, body_ends, end)
    yield from _tail(launch, phases, at_hand, cut_off=limit is not None or not runs)


def _taken_by_saves(saves: Sequence[Saved], rows: Rows, first: int, last: int, step_us: int) -> dict[int, int]:
    """Return, by row, how much of its step saves took: what their steps lasted beyond the usual, in sum."""
    taken: dict[int, int] = {}
    for save in saves:
        index = max(first + 1, bisect_right(rows.at, save.requested))
        excess: list[tuple[int, int]] = []
        while index < last and rows.at[index - 1] < save.durable:
            steps = max(1, rows.step[index] - rows.step[index - 1])
            free = rows.at[index] - rows.at[index - 1] - step_us * steps - taken.get(index, 0)
            excess.append((index, free))
            index += 1
        left = max(0, sum(free for _, free in excess))
        for row, free in excess:
            part = min(left, max(0, free))
            if part:
                taken[row] = taken.get(row, 0) + part
                left -= part
    return taken


def _body(rows: Rows, begin: int, end: int, turn: int, taken: dict[int, int]) -> Iterator[Piece]:
    """Yield the steps: productive up to the turn, lost after it, and what saves took at the end of their steps."""
    at = begin

    def steps(until: int) -> Iterator[Piece]:
        yield at, min(max(at, turn), until), Use.PRODUCTIVE
        yield min(max(at, turn), until), until, Use.LOST

    for row in sorted(taken):
        saves_at = rows.at[row] - taken[row]
        yield from steps(saves_at)
        yield saves_at, rows.at[row], Use.SAVING
        at = rows.at[row]
    yield from steps(end)


def _turns_at(rows: Rows, begin: int, within: tuple[int, int], limit: int | None) -> int:
    """Return when the last step that counts was completed; between two coarse rows, in proportion."""
    first, last = within
    if limit is None:
        return rows.at[last - 1]
    row = first
    while row < last and rows.step[row] <= limit:
        # fast where steps are sorted: they are not where a script counts strangely
        row = max(bisect_right(rows.step, limit, row, last), row + 1)
    if row == last:
        return rows.at[last - 1]
    before_at = rows.at[row - 1] if row > first else begin
    if row == first:
        return before_at
    before = rows.step[row - 1]
    kept = max(0, limit - before)
    steps = max(1, rows.step[row] - before)
    return before_at + (rows.at[row] - before_at) * min(kept, steps) // steps


def _tail(launch: Launch, phases: Iterator[tuple[int, int, str]], step_left: int, *, cut_off: bool) -> Iterator[Piece]:
    """Yield what came after the last completed step."""
    for at, until, phase in phases:
        if phase in (Phase.CLOSING.value, Phase.REQUEUEING.value, Phase.STARTING.value):
            yield at, until, Use.STOPPING
            continue
        other = Use.SAVING if phase == Phase.SAVING.value else Use.STOPPING
        for since, to, saving in _through_saves(launch.saves, at, until):
            if saving or phase != Phase.TRAINING.value:
                leaving = any(save.emergency and save.durable <= since for save in launch.saves)
                yield since, to, Use.SAVING if saving else Use.STOPPING if leaving else other
                continue
            if launch.ending is Ending.FINISHED:
                yield since, to, Use.PRODUCTIVE
                continue
            step = min(step_left, to - since)
            step_left -= step
            yield since, since + step, Use.LOST if cut_off else Use.PRODUCTIVE
            yield since + step, to, Use.HUNG


def _through_saves(saves: Sequence[Saved], begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
    at = begin
    for save in sorted(saves, key=lambda each: each.requested):
        since, until = max(at, save.requested), min(end, save.durable)
        if since >= until:
            continue
        yield at, since, False
        yield since, until, True
        at = until
    yield at, end, False


def _with_nodes(piece: Piece, attempt: Attempt, launch: Launch | None) -> Iterator[Span]:
    """Split a piece where the number of nodes changed."""
    begin, end, use = piece
    held = attempt.held or [(attempt.began, len(attempt.nodes))]
    number = launch.number if launch is not None else None
    for index, (at, count) in enumerate(held):
        since = begin if index == 0 else max(begin, at)
        until = min(end, held[index + 1][0]) if index + 1 < len(held) else end
        if since < until:
            working = min(count, len(launch.nodes)) if launch is not None and launch.nodes else count
            yield Span(since, until, use, attempt.number, number, held=count, working=working)
