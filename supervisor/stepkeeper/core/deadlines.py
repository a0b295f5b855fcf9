"""What happens when a phase has waited long enough: the next rougher means.  Pure."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.bus import on_no_watcher
from stepkeeper.core.eviction import on_limit_near
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.faults import are_lost, lose_nodes
from stepkeeper.core.gates import Gate, closed_gates, go_on_starting, relaunch
from stepkeeper.core.notices import give_up_requeue, retry_requeue
from stepkeeper.core.phases import (
    Decision,
    all_ready,
    close,
    closed,
    kill,
    leads_back,
    query_slurm,
    query_slurm_unprompted,
    stop,
    stopping,
    wait_for_slurm,
)
from stepkeeper.core.policy import Policy
from stepkeeper.core.recovery import on_judge_late
from stepkeeper.core.scale_up import on_due
from stepkeeper.core.silence import look_at_start, on_silence
from stepkeeper.core.state import Blame, BusStatus, Choice, Next, Phase, Plan, SlurmReachability, State, Timer
from stepkeeper.core.storage import on_storage_late


def on_tick(state: State, event: on.Tick, policy: Policy) -> Decision:
    """Something is due: what the phase waits for, or what falls due beside it."""
    match state.timers.due(state.phase, event.at):
        case None:
            return on_due(state, event.at, policy) if state.phase is Phase.TRAINING else Decision(state)
        case Timer.LIMIT:
            return on_limit_near(state)
        case Timer.STORAGE_TEST | Timer.STORAGE_RETRY:
            return on_storage_late(state, event.at, policy)
        case Timer.HANG:
            return on_silence(state, event.at, policy)
        case Timer.REQUEUE_END:
            return give_up_requeue(state, event.at, policy)
        case _:
            return _on_late(state, event, policy)


def _on_late(state: State, event: on.Tick, policy: Policy) -> Decision:
    """What the phase waits for did not come."""
    match state.phase:
        case Phase.STARTING:
            return _on_start_late(state, event.at, policy)
        case Phase.TRAINING if not all_ready(state):
            return _on_watchers_late(state, event.at, policy)
        case Phase.TRAINING:
            return _on_launch_late(state, event.at, policy)
        case Phase.SAVING:
            saved = state.timers.wait is Timer.RANKS_LEAVE
            why = (because.Late(timer=Timer.RANKS_LEAVE if saved else Timer.SAVE),)
            return kill(replace(state, phase=Phase.STOPPING), event.at, policy, why)
        case Phase.STOPPING:
            return _on_ranks_late(state, event.at, policy)
        case Phase.CLOSING:
            return _on_closing_late(state, event.at, policy)
        case Phase.REQUEUEING | Phase.DONE:  # DONE has no deadline: nothing comes here
            if state.query.asking or state.requesting:
                within_s = policy.requeue_within_s if state.requesting else policy.ask_within_s
                late = f"Slurm did not answer in {within_s:g} s"
                return retry_requeue(state, event.at, late, ExitCode.UNDECIDED, policy)
            state = state.waiting(Timer.SLURM_ANSWER, event.at + policy.ask_within_s)
            return query_slurm(state, (because.SlurmAsked(about="requeue"),))
        case _:
            assert_never(state.phase)


def _on_closing_late(state: State, at: float, policy: Policy) -> Decision:
    """The storage took too long, or the watchers did not leave: they end with the job."""
    if leads_back(state):
        late = Timer.LEAD_BACK
        missed = (because.Late(timer=late),)
        state = replace(state, resume=replace(state.resume, choice=Choice.OPEN, not_led_back=missed))
        state = state.waiting(Timer.WATCHERS_LEAVE, at + policy.hurry_within_s)
    elif state.storage.verifying is not None:
        late = Timer.READ_BACK
        state = replace(state, storage=replace(state.storage, verifying=None))
        state = state.waiting(Timer.WATCHERS_LEAVE, at + policy.hurry_within_s)
    else:
        late = Timer.WATCHERS_LEAVE
        state = replace(state, watchers=replace(state.watchers, status=BusStatus.ENDED))
    return closed(state, at, policy, (because.Late(timer=late),))


def _on_ranks_late(state: State, at: float, policy: Policy) -> Decision:
    plan, away_since = state.plan, state.start.slurm_away_since
    if not state.launch.running and away_since is not None:
        return _on_slurm_still_away(state, at, away_since, policy)
    if not state.launch.running and plan.next is Next.END:
        return close(state, at, plan, policy)
    if not state.launch.running:
        return relaunch(
            state, at, (*plan.why, because.Late(timer=Timer.SLURM_ANSWER, within_s=policy.ask_within_s)), policy
        )
    if not state.launch.killed:
        return kill(state, at, policy, (because.Late(timer=Timer.RANKS_LEAVE),))
    why = (*plan.why, because.Late(timer=Timer.KILL))
    if plan.next is Next.RELAUNCH:  # nothing can be started beside ranks that do not die
        plan = Plan(next=Next.REQUEUE, why=why)
    return close(replace(state, launch=state.launch.ended()), at, plan, policy)


def _on_slurm_still_away(state: State, at: float, since: float, policy: Policy) -> Decision:
    """Ask whether a launch could begin now; in the end try it, on the training's account."""
    if state.query.asking:
        return wait_for_slurm(
            state, at, (because.Late(timer=Timer.SLURM_ANSWER, within_s=policy.ask_within_s),), policy
        )
    if at - since < policy.slurm_away_for_s:
        state = state.waiting(Timer.SLURM_ANSWER, at + policy.ask_within_s)
        return query_slurm_unprompted(state, (because.SlurmAsked(),))
    plan = replace(state.plan, blame=Blame.TRAINING)
    state = replace(state, leaving=replace(state.leaving, plan=plan))
    return relaunch(state, at, (*plan.why, because.SlurmAway(for_s=policy.slurm_away_for_s)), policy)


def _on_launch_late(state: State, at: float, policy: Policy) -> Decision:
    """Not every task has started, or no rank has the trainer library."""
    may_have_started = state.launch.all_tasks_started or not state.identity.wrapped
    if may_have_started or state.launch.bus_restarted:  # an older bus may have got the report
        return look_at_start(state.waiting_for_nothing(), at, policy, (because.Plain(because.Fact.NO_LIBRARY),))
    why = (because.Late(timer=Timer.TASKS_STARTED, within_s=policy.begin_within_s),)
    state = stopping(state, Plan(next=Next.RELAUNCH, why=why))
    state = replace(state, launch=replace(state.launch, first_failure=why))
    return kill(state, at, policy, why)


def _on_start_late(state: State, at: float, policy: Policy) -> Decision:
    """What the launch waited for at its first closed gate did not come."""
    match closed_gates(state)[0]:
        case Gate.STORAGE:  # what is late may hang with the storage: it is waited for anew then
            return Decision(state.waiting_for_nothing())
        case Gate.WATCHERS:
            return _on_watchers_late(state, at, policy)
        case Gate.CHECKPOINT:
            plan = Plan(next=Next.END, why=(because.Late(timer=Timer.CHECKPOINT_CHOICE),), code=ExitCode.STORAGE)
            return stop(state, at, plan, policy)
        case Gate.CAUSE:
            return on_judge_late(state, at, policy)
        case Gate.PAUSE:
            return go_on_starting(state, at, policy, (because.Plain(because.Fact.WAIT_OVER),))
        case _:  # the nodes
            return _on_nodes_late(state, at, policy)


def _on_nodes_late(state: State, at: float, policy: Policy) -> Decision:
    match state.timers.wait:
        case Timer.UNFIT_RETRY:
            return go_on_starting(state, at, policy, (because.CheckAgain(),))
        case Timer.CLEARING:
            state = state.waiting(Timer.NOT_CLEARED, at + policy.ask_within_s)
            return Decision(
                state, (do.AskUncleared(launch=state.launch.number),), (because.Late(timer=Timer.CLEARING),)
            )
        case _:
            return stop(state, at, Plan(next=Next.REQUEUE, why=(because.Late(timer=Timer.CLEARING),)), policy)


def _on_watchers_late(state: State, at: float, policy: Policy) -> Decision:
    watchers = state.watchers
    missing = [node for node in state.nodes.usable if node not in watchers.ready]
    nobody = state.phase is Phase.TRAINING and not watchers.ready
    if nobody and watchers.reachability is not SlurmReachability.LAST:
        return on_no_watcher(state, at, policy)
    if state.phase is Phase.TRAINING and watchers.answered.issuperset(missing):
        # they answered a moment ago, on another bus: it is this one that is slow, and they get its time once more
        watchers = replace(watchers, answered=watchers.answered.difference(missing))
        state = replace(state, watchers=watchers).waiting(Timer.WATCHERS, at + policy.watcher_back_within_s)
        return Decision(state, (), (because.Late(timer=Timer.WATCHERS),))
    # one lost node keeps the whole bus from starting: name that one, whose watcher fell silent, or has never answered
    silent = [node for node in missing if node in watchers.silent]
    lost = tuple(silent or [node for node in missing if node not in watchers.answered] or missing)
    return lose_nodes(state, at, lost, (are_lost(state, lost),), policy)
