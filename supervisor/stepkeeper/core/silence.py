"""Training that falls silent: look at the ranks' stacks, and end it only where none of them moves.  Pure.

Never judged by a fixed time, and by silence alone only if no watcher answers: an evaluation that does not `poll` is
silent too.  Where steps
were even, a short silence is looked at already, and ends the launch only if no rank does anything.  A silence of
seconds ends it only where a rank is sure to do nothing for longer than the next look is away: that look would end it.
"""

from __future__ import annotations

from msgspec.structs import replace

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.baseline import certain_s, is_even, silence_s, steady_s
from stepkeeper.core.causes import Cause
from stepkeeper.core.eviction import expecting
from stepkeeper.core.phases import Decision, all_ready, kill_for, query_slurm_unprompted
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Finding, Why
from stepkeeper.core.state import Phase, Silence, State, Suspended, Timer

RULE = "progress-silence"
PATIENCE_MAX = 8.0  # times the usual limit, for ranks that move and complete no step
START_TIMES = 10.0  # as long as the longest start of the run, until the trainer library's first word


def alive(state: State, at: float, policy: Policy) -> State:
    """A rank spoke: from here on silence counts anew."""
    if not policy.hang_watch or state.launch.library_withdrawn:
        return state.beside(Timer.HANG, None)
    saving = state.launch.saving is not None
    allowed = silence_s(state.pace, policy, saving=saving)
    soon = steady_s(state.pace, policy, saving=saving)
    early = allowed - soon if soon is not None else 0.0
    return _within(state, at, allowed - early, certain_s(state.pace, policy, saving=saving), early_s=early)


def printed(state: State, at: float, policy: Policy) -> State:
    """The script printed a step, and has no library: of its saves nothing is known, so silence may last long."""
    if not policy.hang_watch:
        return replace(state, silence=Silence()).beside(Timer.HANG, None)
    return _within(state, at, policy.hang_most_s, certain_s(state.pace, policy, saving=False))


def _within(state: State, at: float, allowed_s: float, first_s: float | None, *, early_s: float = 0.0) -> State:
    """Have silence looked at after `first_s` where that comes sooner than what is allowed."""
    sooner = max(0.0, allowed_s - first_s) if first_s is not None else 0.0
    silence = Silence(early_s=early_s, certain_s=sooner)
    return replace(state, silence=silence).beside(Timer.HANG, at + allowed_s - sooner)


def first_word_by(state: State, at: float, policy: Policy) -> float | None:
    """Return when a launch that starts now has taken too long for its first word; None where no launch ever said one.

    Import, rendezvous and opening the data can stand still as well, and nobody knows beforehand how long they take.
    """
    if not policy.hang_watch or not state.baseline.start_s:
        return None
    return at + _start_s(state, policy)


def _start_s(state: State, policy: Policy) -> float:
    return min(max(START_TIMES * state.baseline.start_s, policy.hang_least_s), policy.hang_most_s)


def look_at_start(state: State, at: float, policy: Policy, why: Why) -> Decision:
    """No word of the trainer library, and none from any launch before: tell what the ranks do, and end nothing."""
    known = bool(state.baseline.start_s) or state.launch.step is not None  # by what it prints
    if state.silence.looking or not policy.hang_watch or known or not all_ready(state):
        return Decision(state, (), why)
    return _look(state, at, policy, why)


def on_silence(state: State, at: float, policy: Policy) -> Decision:
    """No word for longer than is usual: have the ranks' stacks collected, twice."""
    if state.silence.looking and only_tells(state):
        return Decision(_not_watched(state), (), (because.NoStacks(),))
    if state.silence.looking and (state.silence.certain_s or state.silence.early_s):
        return Decision(_look_again(state, at, policy), (), (because.NoStacks(again=True),))
    if state.silence.looking:
        return _stands_still(state, at, None, policy)
    launch = state.launch
    # that has a deadline of its own
    unborn = not launch.library_seen and state.identity.wrapped and not launch.all_tasks_started
    starting = not launch.library_seen and launch.step is None
    if unborn or not all_ready(state):  # words may be lost with the watchers, whose deadline runs
        return Decision(_wait_on(state, at, policy))
    return _look(state, at, policy, (because.Silent(step=launch.step, starting=starting),))


def only_tells(state: State) -> bool:
    """Tell whether the script may have no trainer library at all."""
    return not state.launch.library_seen and state.launch.step is None and not state.baseline.start_s


def _not_watched(state: State) -> State:
    """Silence means nothing until the ranks' first word."""
    return replace(state, silence=replace(state.silence, looking=False)).beside(Timer.HANG, None)


def _look(state: State, at: float, policy: Policy, why: Why) -> Decision:
    state = replace(state, silence=replace(state.silence, looking=True))
    state = state.beside(Timer.HANG, at + policy.stacks_within_s)
    effect = do.CollectStacks(
        launch=state.launch.number,
        nodes=state.launch.nodes,
        within_s=0.8 * policy.stacks_within_s,
        brief=bool(state.silence.certain_s),
    )
    return Decision(state, (effect,), why)


def on_stacks(state: State, event: on.StacksCollected, policy: Policy) -> Decision:
    """The ranks move, so they only take long; or they stand still, and nothing but an end helps."""
    if not state.silence.looking or state.phase is not Phase.TRAINING:
        return Decision(state)
    if only_tells(state):
        why: Why = (because.SilentStart(stacks=event.summary),) if event.summary else ()
        return Decision(_not_watched(state), (), why)
    silence = state.silence
    lasts = event.sure_s > 0.0 and event.at + event.sure_s >= _next_look_at(state, event.at, policy)
    if not event.moved and (lasts or (event.awaited and _is_unusual(state))):
        return _stands_still(state, event.at, event, policy)
    if silence.certain_s or (silence.early_s and (event.moved or not event.idle)):
        why = (because.StillMoves(stacks=event.summary, early=True),)
        return Decision(_look_again(state, event.at, policy), (), why)
    if event.moved:
        silence = replace(state.silence, looking=False, patience=2 * state.silence.patience)
        state = _wait_on(replace(state, silence=silence), event.at, policy)
        return Decision(state, (), (because.StillMoves(stacks=event.summary),))
    return _stands_still(state, event.at, event, policy)


def on_suspected(state: State, event: on.Suspected) -> Decision:
    """The evidence is not complete: nothing follows but that standbys start, which are no part of the training."""
    if state.phase not in (Phase.TRAINING, Phase.STARTING):
        return Decision(state)
    return Decision(state, (), (because.Suspected(nodes=event.nodes, rank=event.rank),))


def _is_unusual(state: State) -> bool:
    """Tell whether a rank that sleeps again and again is none that this run has been ended for since its last progress.

    Whoever polls for something at each such step is ended once at most.
    """
    return is_even(state.pace) and all(each.cause is not Cause.HANG for each in state.budgets.tried)


def _look_again(state: State, at: float, policy: Policy) -> State:
    """Wait for as long as without the look that was early."""
    silence = replace(state.silence, looking=False, certain_s=0.0)
    if not state.silence.certain_s:
        silence = replace(silence, early_s=0.0)
    return replace(state, silence=silence).beside(Timer.HANG, _next_look_at(state, at, policy))


def _next_look_at(state: State, at: float, policy: Policy) -> float:
    """Return when the look after this early one is due: the first one takes no time of the patience that follows."""
    if not state.silence.certain_s:
        return at + state.silence.early_s
    ends_at = state.timers.at.get(Timer.HANG, at)
    return max(at, ends_at - policy.stacks_within_s + state.silence.certain_s)


def _wait_on(state: State, at: float, policy: Policy) -> State:
    saving = state.launch.saving is not None
    allowed = silence_s(state.pace, policy, saving=saving) if state.launch.library_seen else _start_s(state, policy)
    if not state.launch.library_seen and state.launch.step is not None:
        allowed = policy.hang_most_s  # by what it prints
    hang_at = at + min(state.silence.patience, PATIENCE_MAX) * allowed
    return replace(state, silence=replace(state.silence, early_s=0.0, certain_s=0.0)).beside(Timer.HANG, hang_at)


def _stands_still(state: State, at: float, said: on.StacksCollected | None, policy: Policy) -> Decision:
    why = (because.StandsStill(step=state.launch.step, stacks=said.summary if said is not None else ""),)
    found = Finding(
        cause=Cause.HANG,
        rule=RULE,
        reasons=why,
        node=said.node if said is not None else "",
        rank=said.rank if said is not None else None,
        step=state.launch.step,
    )
    return kill_for(replace(state, silence=replace(state.silence, looking=False)), at, found, policy)


# This process did not run for a while, or its wall clock was set.  Pure.
#
# Suspended, or on a batch host that stood still: the ranks stood still too, or could not be heard.  Nothing that was
# waited for is late by that time.  Slurm's own instants stay as they are: it is asked before one of them counts.

SPANS = 0.5  # of the time that we were away: ranks are stopped a little later than we are


def on_suspended(state: State, event: on.Suspended) -> Decision:
    """Put off everything that is measured in silence; an answer that is on its way may be out of date."""
    away = event.seconds
    why = (because.Suspended(seconds=away),)
    timers = state.timers.beside(Timer.HANG, _later(state.timers.get(Timer.HANG), away))
    if state.deadline_at is not None:
        deadline = state.deadline_at + away
        if state.leaving.leave_at is not None:  # Slurm's limit is not ours to put off
            deadline = min(deadline, max(state.deadline_at, state.leaving.leave_at))
        timers = timers.waiting(timers.wait, deadline)
    failure = state.failure
    if failure is not None:
        failure = replace(failure, judge_by=failure.judge_by + away)
    seen = state.suspended
    suspended = Suspended(
        step=away if state.phase in (Phase.TRAINING, Phase.SAVING) else 0.0,
        save=seen.save + away if state.launch.saving is not None else 0.0,
    )
    state = replace(
        state,
        timers=timers,
        start=replace(
            state.start,
            wait_until=_later(state.start.wait_until, away),
            unfit_since=_later(state.start.unfit_since, away),
            slurm_away_since=_later(state.start.slurm_away_since, away),
        ),
        launch=replace(state.launch, began_at=_later(state.launch.began_at, away)),
        storage=replace(state.storage, failing_since=_later(state.storage.failing_since, away)),
        nodes=replace(
            state.nodes, growth=replace(state.nodes.growth, look_until=_later(state.nodes.growth.look_until, away))
        ),
        failure=failure,
        query=replace(state.query, stale=state.query.stale or state.query.asking),
        suspended=suspended,
    )
    return Decision(state, (), why)


def on_clock_set(state: State, event: on.ClockSet, policy: Policy) -> Decision:
    """Our own instants stay as they are; those that Slurm has told stand elsewhere among them now."""
    why = (because.ClockSet(seconds=event.seconds),)
    state = replace(
        state,
        identity=replace(state.identity, end_at=_later(state.identity.end_at, -event.seconds)),
        leaving=replace(state.leaving, preempted_at=_later(state.leaving.preempted_at, -event.seconds)),
    )
    if state.timers.get(Timer.LIMIT) is not None:  # else Slurm is being asked about it, or was
        state = expecting(state, policy)
    if state.phase is Phase.SAVING and state.leaving.leave_at is not None:  # by when was said by the clock before
        return query_slurm_unprompted(state, (*why, because.SlurmAsked(about="save")))
    return Decision(state, (), why)


def _later(at: float | None, seconds: float) -> float | None:
    return None if at is None else at + seconds


def step_seconds(state: State, seconds: float | None) -> tuple[State, float | None]:
    """Return how long a step took for the run's pace: None for the one that was suspended."""
    away = state.suspended.step
    if seconds is None or not away or seconds < SPANS * away:
        return state, seconds
    return replace(state, suspended=replace(state.suspended, step=0.0)), None


def save_seconds(state: State, seconds: float) -> tuple[State, float]:
    """Return how long a save took while the job ran."""
    away = state.suspended.save
    return replace(state, suspended=replace(state.suspended, save=0.0)), max(0.0, seconds - away)
