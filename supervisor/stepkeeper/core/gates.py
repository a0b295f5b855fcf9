"""What a launch waits for in STARTING: its gates.  The start follows from those that are closed, and from nothing else.

Pure.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec.structs import replace

from stepkeeper.core import effects as do
from stepkeeper.core import reasons as because
from stepkeeper.core.phases import Decision, all_ready, close, release, repeats
from stepkeeper.core.placement import places, room
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Why
from stepkeeper.core.state import Blame, Choice, Failure, Next, Phase, Plan, State, Timer


class Gate(StrEnum):
    """What must have come before a launch starts."""

    STORAGE = "storage"  # it passes the test that it failed, or that is due
    WATCHERS = "watchers"  # one answers on every node
    CHECKPOINT = "checkpoint"  # it is chosen, and verified
    CAUSE = "cause"  # why the launch before failed
    PAUSE = "pause"  # before another try
    NODES = "nodes"  # each is clear of the launch before, and fit: asked for when no other gate is closed


def closed_gates(state: State) -> tuple[Gate, ...]:
    """Return what the launch waits for, the first first; none where no launch is being started."""
    if state.phase is not Phase.STARTING:
        return ()
    closed = {
        Gate.STORAGE: any(state.timers.get(each) is not None for each in (Timer.STORAGE_TEST, Timer.STORAGE_RETRY)),
        Gate.WATCHERS: not all_ready(state),
        Gate.CHECKPOINT: not state.resume.chosen,
        Gate.CAUSE: state.failure is not None,
        Gate.PAUSE: state.start.wait_until is not None,
        Gate.NODES: True,  # their answer starts the launch
    }
    return tuple(gate for gate in Gate if closed[gate])


def waiting(state: State, at: float, policy: Policy) -> State:
    """Return the state that waits at its first closed gate; watchers that are waited for already get no more time."""
    match closed_gates(state)[0]:
        case Gate.STORAGE:  # its timers run beside: what is late may hang with it
            return state.waiting_for_nothing()
        case Gate.WATCHERS if state.timers.wait is Timer.WATCHERS:
            return state
        case Gate.WATCHERS:
            return state.waiting(Timer.WATCHERS, at + policy.watcher_back_within_s)
        case Gate.CHECKPOINT:
            return state.waiting(Timer.CHECKPOINT_CHOICE, at + policy.choose_within_s)
        case Gate.CAUSE if state.failure is not None:
            return state.waiting(Timer.CAUSE, state.failure.judge_by)
        case Gate.PAUSE if state.start.wait_until is not None:
            return state.waiting(Timer.PAUSE, state.start.wait_until)
        case _:
            return state.waiting(Timer.CLEARING, at + policy.clear_within_s)


def go_on_starting(state: State, at: float, policy: Policy, why: Why) -> Decision:
    """In STARTING, wait at the first closed gate; where only the nodes' answer is left, ask for it."""
    if state.phase is not Phase.STARTING:
        return Decision(state)
    if state.start.wait_until is not None and at >= state.start.wait_until:
        state = replace(state, start=replace(state.start, wait_until=None))
    state = waiting(state, at, policy)
    if closed_gates(state) != (Gate.NODES,):
        return Decision(state, (), why)
    clear = do.ClearNodes(launch=state.launch.number, nodes=state.nodes.usable, first=places(state)[0])
    return Decision(state, (clear,), why)


def clearing(state: State, launch: int) -> bool:
    """Tell whether the nodes were asked for this launch, and nothing has happened since that needs another answer."""
    return state.timers.wait in (Timer.CLEARING, Timer.NOT_CLEARED) and launch == state.launch.number


def relaunch(state: State, at: float, why: Why, policy: Policy) -> Decision:
    """Start again in the same allocation, while it is found out why the launch failed.

    What follows from that, and whether the budget lasts, is known with the newest checkpoint: `recovery`.
    """
    if not places(state):
        return close(state, at, Plan(next=Next.REQUEUE, why=(*why, room(state)), blame=Blame.NODE), policy)
    counts = state.leaving.plan is None or state.leaving.plan.blame is Blame.TRAINING
    launch = state.launch
    unseen = (
        not launch.library_seen
        and state.budgets.best_step is None  # else a framework's checkpoints show progress, where no library does
        and launch.began_at is not None
        and at - launch.began_at >= policy.unseen_progress_s
    )
    if unseen:  # unknown progress is not none: rows begin again, but the same failure stays counted (`recovery`)
        tried = tuple(replace(each, count=0, repeats=repeats(each)) for each in state.budgets.tried)
        state = replace(state, budgets=replace(state.budgets, failures=0, tried=tried))
    judged = counts and (launch.all_tasks_started or not state.identity.wrapped)  # else it says nothing of the training
    failure = Failure(judge_by=at + policy.judge_within_s) if judged else None
    judge = (do.JudgeLaunch(launch=launch.number, found=launch.found),) if judged else ()
    released = release(state)
    state = released.state
    state = replace(
        state,
        phase=Phase.STARTING,
        budgets=replace(state.budgets, failures=state.budgets.failures + counts, failure_counted=counts),
        failure=failure,
        launch=replace(launch, number=launch.number + 1, first_failure=why),
        leaving=replace(state.leaving, plan=None, fallback_plan=None),
        resume=replace(state.resume, choice=Choice.OPEN),
    )
    state = waiting(state.waiting_for_nothing(), at, policy)
    return Decision(state, (*released.effects, do.ChooseCheckpoint(), *judge), (because.Relaunch(), *why))
