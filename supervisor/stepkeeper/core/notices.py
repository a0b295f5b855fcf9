"""Signals, what Slurm says they mean, and the requeue.  Pure.

A requeue happens once, last, and only after Slurm was asked again: never for a cancelled, finished or
already requeued job.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.judge import Judgement, Notice, judge
from stepkeeper.core.phases import Decision, finish, save, stop
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Next, Phase, Plan, State

replace = msgspec.structs.replace


def on_signal(state: State, event: on.SignalReceived) -> Decision:
    """The batch process got a signal: ask Slurm what it means before deciding."""
    if event.signal in ("TERM", "INT") and state.term_at is None:
        state = replace(state, term_at=event.at)
    return ask(state, event.signal, f"got SIG{event.signal}")


def ask(state: State, signal: str, why: str) -> Decision:
    """Ask Slurm what a signal means; a batch process's signal outweighs a watcher's."""
    if state.phase is Phase.REQUEUEING:
        return Decision(state)  # it asks anyway before it acts
    if state.signal in ("", "node TERM") or signal != "node TERM":
        state = replace(state, signal=signal)
    if state.asking:
        return Decision(state)
    return Decision(replace(state, asking=True), (do.AskSlurm(why=why),), why)


def on_slurm_answered(state: State, event: on.SlurmAnswered, policy: Policy) -> Decision:
    """Act on what Slurm says of a signal, or of the requeue that we are about to make."""
    asked_for = state.signal
    state = replace(state, asking=False)
    judgement = judge(state, event.job, event.at, policy)
    if state.phase is Phase.REQUEUEING:
        return _requeue_if_right(state, event, judgement, policy)
    if event.job is not None and asked_for not in ("TERM", "INT"):
        state = replace(state, signal="")  # this signal is dealt with; the next one is asked about anew
    where = f" (Slurm says {event.job.slurm_state})" if event.job else f" ({event.error})"
    why = judgement.notice.value + where
    match judgement.notice:
        case Notice.NOT_FOR_US:
            return Decision(state, (), why)
        case Notice.ASKED_TO_SAVE:
            if state.phase is not Phase.TRAINING or not state.heard:
                return Decision(state, (), why)
            return Decision(state, (do.RequestSave(stop=False, why=asked_for),), why)
        case Notice.CANCELLED:
            plan = Plan(next=Next.END, why=why, code=ExitCode.CANCELLED)
            return stop(state, event.at, plan, policy)
        case Notice.REQUEUED:
            return _leave(state, event.at, judgement, Plan(next=Next.END, why=why), policy)
        case Notice.PREEMPTED | Notice.TIME_LIMIT | Notice.UNKNOWN:
            return _leave(state, event.at, judgement, Plan(next=Next.REQUEUE, why=why), policy)
        case _:
            assert_never(judgement.notice)


def _leave(state: State, at: float, judgement: Judgement, plan: Plan, policy: Policy) -> Decision:
    """The allocation will be taken: save if there is something to save, then leave it."""
    if state.plan is not None and state.plan.next is Next.END:
        plan = state.plan  # finished, cancelled or superseded: a notice changes nothing
    deadline = judgement.deadline_at if judgement.deadline_at is not None else at + policy.unlimited_save_s
    match state.phase:
        case Phase.TRAINING if state.heard and (state.step is not None or state.bus_restarted_in_launch):
            return save(state, deadline, plan)
        case Phase.SAVING:
            return Decision(replace(state, plan=plan, deadline_at=_earlier(state, deadline)), (), plan.why)
        case Phase.STOPPING | Phase.CLOSING:
            return Decision(replace(state, plan=plan), (), plan.why)
        case _:
            return stop(state, at, plan, policy)


def _earlier(state: State, deadline: float) -> float:
    """A second notice can only shorten the wait, unless Slurm has by then told everybody to end."""
    if state.deadline_at is None or state.term_at is not None:
        return deadline
    return min(state.deadline_at, deadline)


def _requeue_if_right(
    state: State, event: on.SlurmAnswered, judgement: Judgement, policy: Policy
) -> Decision:
    """The last look before the requeue: the world may have changed since the notice."""
    job = event.job
    if job is None:
        return _retry_requeue(state, event.at, event.error, ExitCode.UNDECIDED, policy)
    if judgement.notice is Notice.REQUEUED:
        return finish(state, Plan(next=Next.END, why=judgement.notice.value))
    if judgement.notice is Notice.CANCELLED:
        plan = Plan(next=Next.END, why=f"cancelled meanwhile ({job.slurm_state})", code=ExitCode.CANCELLED)
        return finish(state, plan)
    if not job.requeue_allowed:
        why = "Slurm does not requeue this job (Requeue=0): submit it again with the same --run-dir"
        return finish(state, Plan(next=Next.END, why=why, code=ExitCode.REQUEUE_FAILED))
    assert state.plan is not None, "REQUEUEING is entered with a plan"
    why = state.plan.why
    return Decision(replace(state, deadline_at=event.at + policy.ask_within_s), (do.Requeue(),), why)


def on_requeue_answered(state: State, event: on.RequeueAnswered, policy: Policy) -> Decision:
    """The job is requeued, or Slurm did not take it: try again for a while."""
    if state.phase is not Phase.REQUEUEING:
        return Decision(state)
    if event.ok:
        assert state.plan is not None, "REQUEUEING is entered with a plan"
        return finish(state, Plan(next=Next.END, why=f"requeued: {state.plan.why}"))
    return _retry_requeue(state, event.at, event.error, ExitCode.REQUEUE_FAILED, policy)


def _retry_requeue(state: State, at: float, error: str, code: ExitCode, policy: Policy) -> Decision:
    tries = state.requeue_tries + 1
    if tries >= policy.requeue_tries_max:
        why = f"the requeue did not succeed in {tries} tries: {error}"
        return finish(state, Plan(next=Next.END, why=why, code=code))
    wait = min(policy.requeue_retry_s * 2 ** (tries - 1), policy.requeue_retry_max_s)
    state = replace(state, requeue_tries=tries, asking=False, deadline_at=at + wait)
    return Decision(state, (), f"the requeue did not succeed ({error}); again in {wait:g} s")


def on_superseded(state: State, event: on.Superseded, policy: Policy) -> Decision:
    """A newer attempt holds the lease: leave the run to it."""
    why = f"job {event.by_job_id} (restart {event.by_restart_count}) holds the lease now"
    return stop(state, event.at, Plan(next=Next.END, why=why, code=ExitCode.SUPERSEDED), policy)
