"""The bus beside training and everything else: watchers that are lost, and buses that end.  Pure."""

from __future__ import annotations

from msgspec.structs import replace

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.phases import Decision, all_ready, closed, query_slurm, query_slurm_unprompted, release, stop
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Why
from stepkeeper.core.scale_up import dismiss, give_up
from stepkeeper.core.state import NO_SIGNAL, BusStatus, Next, Phase, Plan, SlurmReachability, State, Timer


def on_watcher_lost(state: State, event: on.WatcherLost, policy: Policy) -> Decision:
    """A watcher is gone: start a new bus beside the training."""
    if event.bus != state.watchers.bus or not state.watchers.open or state.phase in (Phase.CLOSING, Phase.REQUEUEING):
        return Decision(state)
    if event.node not in state.nodes.usable:  # it was left: Slurm ends what runs there
        return give_up(state, event.node, (because.WatcherGone(node=event.node, text=event.why),))
    silent, answered = state.watchers.silent | {event.node}, state.watchers.answered - {event.node}
    state = replace(state, watchers=replace(state.watchers, silent=silent, answered=answered))
    return restart_bus(state, event.at, (because.WatcherGone(node=event.node, text=event.why),), policy)


def on_bus_ended(state: State, event: on.BusEnded, policy: Policy) -> Decision:
    """All watchers are gone: as we wanted, or a new bus is started beside the training."""
    if event.bus != state.watchers.bus or not state.watchers.open:
        return Decision(state)
    if state.phase in (Phase.CLOSING, Phase.REQUEUEING):
        state = replace(state, watchers=replace(state.watchers, status=BusStatus.ENDED, ready=frozenset()))
        if state.phase is Phase.CLOSING:
            return closed(state, event.at, policy, (because.Plain(because.Fact.WATCHERS_LEFT),))
        return Decision(state, (), (because.Plain(because.Fact.WATCHERS_LEFT),))
    why = (because.BusEnded(code=event.code, error=event.error),)
    state = replace(state, watchers=replace(state.watchers, status=BusStatus.ENDED, error=event.error))
    return restart_bus(state, event.at, why, policy)


def restart_bus(
    state: State, at: float, why: Why, policy: Policy, *, without: frozenset[str] = frozenset(), counts: bool = True
) -> Decision:
    """Start a new bus beside the training; a node that does not come back is lost.

    It does not count where nodes are lost together with others: the number of nodes bounds that.
    """
    # beside training, a bus on which nobody answered is in no budget: its deadline asks Slurm first
    unanswered = state.phase is Phase.TRAINING and not state.watchers.ready
    complete_at = state.watchers.complete_at
    lasted = complete_at is not None and at - complete_at >= policy.bus_lasts_s
    restarts = (0 if lasted else state.watchers.restarts) + (counts and not unanswered)
    tries = state.watchers.tries + unanswered
    if restarts > policy.bus_restarts_max:
        why = (*why, because.BusRestarts(restarts=restarts - 1))
        if state.leaving.plan is not None:  # we leave already: a save may still come to its end
            return _without_bus(state, why)
        return stop(state, at, Plan(next=Next.END, why=why, code=ExitCode.START_FAILED), policy)
    nodes = tuple(node for node in state.nodes.usable if node not in without)
    if not nodes:
        return _without_bus(state, (*why, because.Plain(because.Fact.NOTHING_TO_WATCH)))
    timers = state.timers
    if state.phase in (Phase.STARTING, Phase.TRAINING):
        back = at + policy.watcher_back_within_s
        # a node that was lost already keeps its deadline: restarts must not put it off for ever; the deadline of
        # something else, such as that of clearing the nodes, is none of a watcher's
        known = state.deadline_at if not all_ready(state) else None
        # while Slurm is asked whether it is there, its answer is waited for first
        wait = timers.wait if timers.wait is Timer.SLURM_ANSWER else Timer.WATCHERS
        timers = timers.waiting(wait, back if known is None else min(known, back))
    state = replace(
        state,
        watchers=replace(
            state.watchers,
            bus=state.watchers.bus + 1,
            status=BusStatus.OPEN,
            without=without,
            complete_at=None,
            restarts=restarts,
            tries=tries,
            ready=frozenset(),
        ),
        launch=replace(state.launch, bus_restarted=True),
        timers=timers,
    )
    given_back: tuple[do.Effect, ...] = ()
    if resting := frozenset(each.node for each in state.nodes.growth.resting):
        # they get no new watcher: one that is broken would keep the whole bus from starting
        released = release(dismiss(state, resting))
        state, given_back = released.state, released.effects
    # a bus that cannot start must not spin; the first restarts are at once
    number = restarts + tries + (not counts)
    after_s = min(policy.bus_retry_max_s, 0.25 * 2.0 ** min(number, 30)) if number > 1 else 0.0
    return Decision(state, (*given_back, do.StartBus(bus=state.watchers.bus, nodes=nodes, after_s=after_s)), why)


def _without_bus(state: State, why: Why) -> Decision:
    return Decision(
        replace(state, watchers=replace(state.watchers, status=BusStatus.ENDED, ready=frozenset())), (), why
    )


def on_no_watcher(state: State, at: float, policy: Policy) -> Decision:
    """Beside training, no watcher at all came back in time: are the nodes lost, or is only Slurm away?"""
    if state.watchers.reachability is SlurmReachability.ASKED and state.query.asking:
        prompted = state.query.signal != NO_SIGNAL
        signal = state.query.signal if prompted else ""
        state = replace(state, query=replace(state.query, signal=signal, question=None))
        late = f"no answer in {policy.ask_within_s:g} s"
        decision = try_bus_again(state, at, policy, answered=False, error=late)
        if not prompted:
            return decision
        more = query_slurm(decision.state, decision.why)  # what the signal means cannot wait for the bus
        return Decision(more.state, (*decision.effects, *more.effects), decision.why)
    watchers = replace(state.watchers, reachability=SlurmReachability.ASKED)
    state = replace(state, watchers=watchers).waiting(Timer.SLURM_ANSWER, at + policy.ask_within_s)
    why = (because.Plain(because.Fact.NO_WATCHER),)
    return Decision(state, (), why) if state.query.asking else query_slurm_unprompted(state, why)


def try_bus_again(
    state: State, at: float, policy: Policy, *, answered: bool, slurm_state: str = "", error: str = ""
) -> Decision:
    """Training goes on; without Slurm for as long as it takes, with it for one more time."""
    watchers = replace(state.watchers, reachability=SlurmReachability.AWAY)
    if answered:  # the time is short: almost at once
        watchers = replace(state.watchers, reachability=SlurmReachability.LAST, tries=0)
    state = replace(state, watchers=watchers).waiting(Timer.WATCHERS, at + policy.watcher_back_within_s)
    some = answered and watchers.silent < set(state.nodes.usable)
    suspects = watchers.silent if some else frozenset[str]()
    without = tuple(sorted(suspects))
    why = because.BusTriedAgain(answered=answered, slurm_state=slurm_state, error=error, without=without)
    return restart_bus(state, at, (why,), policy, without=suspects)
