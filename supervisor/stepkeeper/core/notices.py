"""Signals, what Slurm says they mean, the requeue, and the requests of people.  Pure.

A requeue happens once, last, and only after Slurm was asked again: never for a cancelled, finished or
already requeued job.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.baseline import least_save_s, stop_within_s
from stepkeeper.core.bus import try_bus_again
from stepkeeper.core.causes import Notice
from stepkeeper.core.events import JobState
from stepkeeper.core.eviction import Judgement, expecting, judge_eviction
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.faults import uncount_failure, without_lost
from stepkeeper.core.gates import relaunch
from stepkeeper.core.phases import (
    Decision,
    can_save,
    close,
    closed,
    end_unsaved,
    kill,
    query_slurm,
    request_save,
    save,
    stop,
    stopping,
    take,
    wait_for_slurm,
)
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Reason, Why
from stepkeeper.core.state import NO_SIGNAL, NODE_TERM, Next, Phase, Plan, Question, SlurmReachability, State, Timer


def on_signal(state: State, event: on.SignalReceived, policy: Policy) -> Decision:
    """The batch process got a signal: ask Slurm what it means before deciding."""
    if event.signal in ("TERM", "INT") and state.leaving.term_at is None:
        state = replace(state, leaving=replace(state.leaving, term_at=event.at))
    if event.signal in ("TERM", "INT") and state.phase is Phase.REQUEUEING:  # the sender does not wait for longer
        end = _earlier(state.timers.get(Timer.REQUEUE_END), event.at + state.identity.kill_wait_s)
        state = state.beside(Timer.REQUEUE_END, end)
    state = replace(state, query=replace(state.query, signal=event.signal))
    return _ask_about(state, event.at, (because.GotSignal(signal=event.signal),), policy)


def on_node_signaled(state: State, event: on.NodeSignaled, policy: Policy) -> Decision:
    """A watcher got SIGTERM: ask Slurm once for all nodes; a signal of our own outweighs it."""
    if not state.identity.wrapped:
        state = replace(state, launch=replace(state.launch, slurm_sent=event.signal))
    if _leaves(state):
        return Decision(state)  # on a thousand nodes it comes a thousand times
    if state.query.asking and state.query.signal in (NODE_TERM, "TERM", "INT"):
        return Decision(state)
    if state.query.signal in ("", NO_SIGNAL):
        state = replace(state, query=replace(state.query, signal=NODE_TERM))
    return _ask_about(state, event.at, (because.GotSignal(signal=event.signal, node=event.node),), policy)


def _leaves(state: State) -> bool:
    """The job is left for the signal that Slurm sent to the steps, or no rank is left to get a request.

    A user signal near the time limit is not that: a preemption may leave less time than the limit does.
    """
    if state.leaving.plan is None or state.leaving.plan.next is Next.RELAUNCH:
        return False
    confirmed = state.leaving.eviction_confirmed or state.launch.killed
    return confirmed and state.phase in (Phase.SAVING, Phase.STOPPING, Phase.CLOSING)


def _ask_about(state: State, at: float, why: Why, policy: Policy) -> Decision:
    if state.phase is Phase.CLOSING and state.leaving.plan is not None and state.leaving.plan.next is Next.END:
        return Decision(state)  # it ends anyway; after a requeue Slurm sends us SIGTERM at once
    if state.phase is Phase.REQUEUEING:
        if state.requesting:
            return Decision(state)  # Slurm ends what it requeues: the answer to that is on its way
        if not state.query.asking:  # between two tries: what it means cannot wait
            state = state.waiting(Timer.SLURM_ANSWER, at + policy.ask_within_s)
    return query_slurm(state, why)


def on_slurm_answered(state: State, event: on.SlurmAnswered, policy: Policy) -> Decision:
    """Act on what Slurm says of a signal, or of the requeue that we are about to make."""
    if not state.query.asking:  # too late: it was given up
        return Decision(replace(state, query=replace(state.query, stale=False)))
    if state.query.stale:
        state = replace(state, query=replace(state.query, question=Question.ASKED, stale=False))
        why = (because.AskedAgain(suspended=True),)
        return Decision(state, (do.AskSlurm(reasons=why),), why)
    again = state.query.question is Question.OUTDATED
    state = replace(state, query=replace(state.query, question=None))
    if event.job is not None:
        state = expecting(replace(state, identity=replace(state.identity, end_at=event.job.end_at)), policy)
        if event.job.state is JobState.RUNNING:
            state = replace(state, leaving=replace(state.leaving, preempted_at=event.job.preempt_at))
    if state.phase is Phase.REQUEUEING and again:
        state = state.waiting(Timer.SLURM_ANSWER, event.at + policy.ask_within_s)
        return query_slurm(state, (because.AskedAgain(),))
    judgement = judge_eviction(state, event.job, event.at, policy)
    if state.phase is Phase.REQUEUEING:
        return _requeue_if_right(state, event, judgement, policy)
    decision = _act(state, event, judgement, policy, final=not again)
    if not again or decision.state.phase is Phase.DONE or decision.state.query.asking:
        return decision
    more = query_slurm(decision.state, (because.AskedAgain(),))
    return Decision(more.state, (*decision.effects, *more.effects), decision.why)


def _act(  # noqa: C901, PLR0912 - one case a notice
    state: State, event: on.SlurmAnswered, judgement: Judgement, policy: Policy, *, final: bool
) -> Decision:
    """Act on why Slurm signaled; if not `final`, a newer signal is still to be asked about."""
    asked_for = state.query.signal
    nothing_ends = judgement.notice in (Notice.ASKED_TO_SAVE, Notice.NOT_FOR_US)
    if final:
        state = _dealt_with(state, event, nothing_ends=nothing_ends)
    why: Why = (_meaning(event, judgement),)
    if nothing_ends and final and state.phase is Phase.STOPPING and not state.launch.running:
        if event.job is None and state.start.slurm_away_since is not None:
            return wait_for_slurm(state, event.at, why, policy)
        if state.plan.next is Next.END:  # its status said the end, and Slurm did not ask for it
            return close(state, event.at, state.plan, policy)
        return relaunch(state, event.at, state.plan.why, policy)  # the launch failed on its own account
    if nothing_ends and final and state.phase is Phase.TRAINING and state.launch.first_failure:
        plan = Plan(next=Next.RELAUNCH, why=state.launch.first_failure)  # no notice explains how that rank ended
        return kill(stopping(state, plan), event.at, policy, plan.why)
    match judgement.notice:
        case Notice.NOT_FOR_US if (
            final and state.phase is Phase.TRAINING and state.watchers.reachability is SlurmReachability.ASKED
        ):
            said = event.job.slurm_state if event.job is not None else ""
            answered = event.job is not None
            return try_bus_again(state, event.at, policy, answered=answered, slurm_state=said, error=event.error)
        case Notice.NOT_FOR_US:
            return Decision(state, (), why)
        case Notice.ASKED_TO_SAVE if not state.identity.has_batch_script and asked_for in ("INT", "TERM"):
            return _end_by_hand(state, event.at, asked_for, policy)
        case Notice.ASKED_TO_SAVE:
            if state.phase is not Phase.TRAINING or not state.launch.library_seen:
                return Decision(state, (), why)
            return Decision(state, (do.RequestSave(stop=False, reasons=(because.GotSignal(signal=asked_for),)),), why)
        case Notice.CANCELLED:
            plan = Plan(next=Next.END, why=why, code=ExitCode.CANCELLED)
            return stop(state, event.at, plan, policy)
        case Notice.REQUEUED:
            return _leave(state, event.at, judgement, Plan(next=Next.END, why=why), policy)
        case Notice.PREEMPTED | Notice.TIME_LIMIT | Notice.UNKNOWN:
            return _leave(state, event.at, judgement, Plan(next=Next.REQUEUE, why=why), policy)
        case _:
            assert_never(judgement.notice)


def _end_by_hand(state: State, at: float, signal: str, policy: Policy) -> Decision:
    """Nobody but the person at the terminal sends such a signal: save and end; the second time, end."""
    plan = Plan(next=Next.END, why=(because.EndedByHand(signal=signal, saves=True),), code=ExitCode.STOPPED)
    if state.phase is Phase.TRAINING and can_save(state):
        return save(state, at + stop_within_s(state.pace, policy), plan)
    by_hand = state.leaving.plan is not None and state.leaving.plan.code is ExitCode.STOPPED
    if state.phase is Phase.SAVING and not by_hand:
        return Decision(take(state, plan), (), plan.why)
    plan = replace(plan, why=(because.EndedByHand(signal=signal, saves=False),))
    end = end_unsaved if state.phase is Phase.TRAINING else stop
    return end(state, at, plan, policy)


def _meaning(event: on.SlurmAnswered, judgement: Judgement) -> Reason:
    if event.job is None:
        return because.SlurmUnreachable(error=event.error)
    return because.SlurmSaid(notice=judgement.notice, slurm_state=event.job.slurm_state)


def _dealt_with(state: State, event: on.SlurmAnswered, *, nothing_ends: bool) -> State:
    """The signal is dealt with, if Slurm said what it means: the next one is asked about anew."""
    if event.job is None:
        return replace(state, query=replace(state.query, signal="")) if state.query.signal == NO_SIGNAL else state
    state = replace(state, query=replace(state.query, signal=""))
    if nothing_ends:  # `scancel -s TERM`: nobody is killed after it
        state = replace(state, leaving=replace(state.leaving, term_at=None))
    return state


def _leave(state: State, at: float, judgement: Judgement, plan: Plan, policy: Policy) -> Decision:
    """The allocation will be taken: save if there is something to save, then leave it."""
    deadline = judgement.deadline_at if judgement.deadline_at is not None else at
    runs_out = judgement.notice is Notice.TIME_LIMIT and state.leaving.term_at is None  # announced, not yet carried out
    if not runs_out:
        state = replace(state, leaving=replace(state.leaving, eviction_confirmed=True))
    if not runs_out and state.phase is Phase.STARTING and state.failure is not None:
        # ranks that get the signal before we do die of it: what ended the launch a moment ago was most likely this
        state = uncount_failure(replace(state, failure=None))
    # a second notice can only shorten the wait, unless Slurm has signaled everybody by then
    later = state.leaving.term_at is not None or state.leaving.leave_at is None
    leave_at = deadline if later else _earlier(state.leaving.leave_at, deadline)
    state = replace(state, leaving=replace(state.leaving, leave_at=leave_at))
    match state.phase:
        case Phase.TRAINING if can_save(state):
            return _save_if_it_can(state, at, deadline, plan, policy)
        case Phase.TRAINING:
            return end_unsaved(state, at, plan, policy)
        case Phase.SAVING:
            return _save_until(take(state, plan), deadline)
        case Phase.STOPPING if not state.launch.running:
            return close(state, at, plan, policy)
        case Phase.STOPPING if state.launch.killed:
            return Decision(take(state, plan), (), plan.why)
        case Phase.STOPPING | Phase.CLOSING:
            state = take(state, plan).waiting_until(_earlier(state.deadline_at, deadline))
            return Decision(state, (), plan.why)
        case _:
            return stop(state, at, plan, policy)


def _save_if_it_can(state: State, at: float, deadline: float, plan: Plan, policy: Policy) -> Decision:
    """Ask for a save, unless no save could become durable in what is left: then leave with what is verified.

    Which way is the best one in time is decided by the ranks, with rates that they have measured: a new save, the one
    in flight, or their nodes' disks.
    """
    least_s = least_save_s(state.pace)
    left_s = max(0.0, deadline - at)
    if not state.launch.library_seen or state.launch.saving is not None or left_s >= least_s:
        return save(state, deadline, plan)
    why = (*plan.why, because.NoTimeToSave(left_s=left_s, quickest_s=state.pace.quickest))
    return stop(state, at, replace(plan, why=why), policy)


def _save_until(state: State, deadline: float) -> Decision:
    """A notice while the ranks save: it reaches them if they have less time than they know of."""
    before = state.deadline_at
    if state.storage.verifying is not None or state.leaving.term_at is None:  # committed: nothing is left but to leave
        deadline = _earlier(before, deadline)
    shorter = before is not None and deadline < before and state.storage.verifying is None
    why = state.plan.why
    state = state.waiting_until(deadline)  # for the save, or for ranks that leave after it
    return Decision(state, (request_save(state),) if shorter else (), why)


def _earlier(one: float | None, other: float) -> float:
    return other if one is None else min(one, other)


def _requeue_if_right(state: State, event: on.SlurmAnswered, judgement: Judgement, policy: Policy) -> Decision:
    """The last look before the requeue: the world may have changed since the notice."""
    job = event.job
    if job is None:
        return retry_requeue(state, event.at, event.error, ExitCode.UNDECIDED, policy)
    why: Why = (_meaning(event, judgement),)
    if judgement.notice is Notice.REQUEUED:
        return close(state, event.at, Plan(next=Next.END, why=why), policy)
    if judgement.notice is Notice.CANCELLED:
        return close(state, event.at, Plan(next=Next.END, why=why, code=ExitCode.CANCELLED), policy)
    anew = state.requeue.resubmitting or not job.requeue_allowed
    why = state.plan.why
    state, keep = without_lost(state, event.at, policy)
    now = tuple(exclusion for exclusion in state.nodes.excluded if exclusion.until > event.at)
    over = [exclusion.node for exclusion in state.nodes.excluded if exclusion not in now]
    readmit = tuple(dict.fromkeys([*state.nodes.readmit, *over]))
    if now:
        why += (because.WithoutNodes(nodes=tuple(exclusion.node for exclusion in now)),)
    state = replace(
        state,
        nodes=replace(state.nodes, excluded=now, readmit=readmit),
    ).waiting(Timer.REQUEUE_ANSWER, event.at + policy.requeue_within_s)
    exclude = tuple(exclusion.node for exclusion in now)
    if anew:
        state = replace(state, requeue=replace(state.requeue, resubmitting=True))
        why += (because.Plain(because.Fact.SUBMITTED_INSTEAD),)
    return Decision(state, (do.Requeue(keep=keep, exclude=exclude, readmit=readmit, resubmit=anew),), why)


def on_requeue_answered(state: State, event: on.RequeueAnswered, policy: Policy) -> Decision:
    """The job is requeued, or Slurm did not take it: try again for a while."""
    if state.phase is not Phase.REQUEUEING:
        return Decision(state)
    if event.ok:
        requeued = because.Requeued(job_id=event.job_id, besides=event.error)
        return close(state, event.at, Plan(next=Next.END, why=(requeued, *state.plan.why)), policy)
    if not state.requesting:
        return Decision(state)  # too late: it was given up, and counted
    if event.forbidden and state.requeue.resubmitting:
        why = (because.Failed(what="submit", error=event.error),)
        return close(state, event.at, Plan(next=Next.END, why=why, code=ExitCode.REQUEUE_FAILED), policy)
    if event.forbidden:
        deadline = event.at + policy.ask_within_s
        requeue = replace(state.requeue, resubmitting=True)
        state = replace(state, requeue=requeue).waiting(Timer.SLURM_ANSWER, deadline)
        return query_slurm(state, (because.Failed(what="requeue", error=event.error),))
    return retry_requeue(state, event.at, event.error, ExitCode.REQUEUE_FAILED, policy)


def retry_requeue(state: State, at: float, error: str, code: ExitCode, policy: Policy) -> Decision:
    """Try again after a pause, as often as the policy allows."""
    tries = state.requeue.tries + 1
    if tries >= policy.requeue_tries_max:
        why = (because.RequeueFailed(error=error, tries=tries),)
        return close(state, at, Plan(next=Next.END, why=why, code=code), policy)
    wait = min(policy.requeue_retry_s * 2 ** (tries - 1), policy.requeue_retry_max_s)
    state = replace(
        state,
        requeue=replace(state.requeue, tries=tries),
        query=replace(state.query, question=None),
    ).waiting(Timer.REQUEUE_TRY, at + wait)
    return Decision(state, (), (because.RequeueFailed(error=error, again_s=wait, tries=tries),))


def give_up_requeue(state: State, at: float, policy: Policy) -> Decision:
    """End without a requeue: a person can still requeue the job, or resume the run."""
    code = ExitCode.REQUEUE_FAILED if state.requesting else ExitCode.UNDECIDED
    return close(state, at, Plan(next=Next.END, why=(because.Late(timer=Timer.REQUEUE_END),), code=code), policy)


def on_superseded(state: State, event: on.Superseded, policy: Policy) -> Decision:
    """A newer attempt holds the lease: leave the run to it."""
    why = (because.Superseded(job_id=event.by_job_id, restart_count=event.by_restart_count),)
    return stop(state, event.at, Plan(next=Next.END, why=why, code=ExitCode.SUPERSEDED), policy)


# What a person asks of a run that is under way: save now, or save and end.
#
# A request comes again until it is answered, so what cannot be done at the moment is simply left for later: through a
# requeue it waits for the next attempt.

ANSWERED_MAX = 16


def on_requested(state: State, event: on.Requested, policy: Policy) -> Decision:
    """Somebody asks for a checkpoint, or for the end of the run."""
    if event.name in state.answered:
        return Decision(state)  # the answer is on its way
    decision = _asked_to_save(state, event) if event.kind == "save" else _asked_to_stop(state, event, policy)
    if decision is None:
        return Decision(state)
    ok = not any(isinstance(reason, because.SaveRefused) for reason in decision.why)
    answered = replace(decision.state, answered=(*decision.state.answered, event.name)[-ANSWERED_MAX:])
    effects = (do.AnswerRequest(name=event.name, reasons=decision.why, ok=ok), *decision.effects)
    return Decision(answered, effects, decision.why)


def _asked_to_save(state: State, event: on.Requested) -> Decision | None:
    """Ask the ranks; without any that could, it is refused at once: the asker waits for an answer."""
    why = (because.Requested(by=event.by, kind="save"),)
    if state.phase is Phase.SAVING or (state.phase is Phase.TRAINING and state.launch.saving is not None):
        return None  # one is under way; the next one can be asked for then
    if state.phase is not Phase.TRAINING:
        return Decision(state, (), (because.SaveRefused(phase=state.phase.value),))
    if not state.launch.library_seen:
        return Decision(state, (), (because.SaveRefused(),))
    return Decision(state, (do.RequestSave(stop=False, reasons=why),), why)


def _asked_to_stop(state: State, event: on.Requested, policy: Policy) -> Decision | None:
    why = (because.Requested(by=event.by, kind="stop"),)
    plan = Plan(next=Next.END, why=why, code=ExitCode.STOPPED)
    match state.phase:
        case Phase.TRAINING if can_save(state):
            return save(state, event.at + stop_within_s(state.pace, policy), plan)
        case Phase.TRAINING:
            return end_unsaved(state, event.at, plan, policy)
        case Phase.SAVING:
            return Decision(take(state, plan), (), why)
        case Phase.STOPPING if state.launch.running:
            return Decision(take(state, plan), (), why)
        case Phase.CLOSING:
            return closed(take(state, plan), event.at, policy, why)
        case Phase.REQUEUEING if state.requesting:
            return None  # the next attempt gets it
        case Phase.REQUEUEING:
            return close(take(state, plan), event.at, plan, policy)
        case _:
            return stop(state, event.at, plan, policy)
