"""The only ways into a phase that ends something, and what `decide` returns.  Pure.

Whatever ends a launch goes through SAVING or STOPPING, then CLOSING, where the watchers leave, so that no
Slurm step of ours lingers when the job is requeued.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from stepkeeper.core import effects as do
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Tried
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Finding, Why
from stepkeeper.core.state import NO_SIGNAL, Blame, BusStatus, Choice, Next, Phase, Plan, Question, Ranks, State, Timer


class Decision(msgspec.Struct, frozen=True):
    """The next state, a work order, and why (empty when nothing changed)."""

    state: State
    effects: tuple[do.Effect, ...] = ()
    why: Why = ()


REQUEUE_FOR_S = 300.0  # a controller that fails over is back by then; one that is away for longer needs a person


def can_save(state: State) -> bool:
    """Tell whether ranks that train may have something to save: done steps, or work that only their script knows of."""
    if state.launch.bus_restarted:  # what they sent meanwhile did not arrive
        return True
    if state.launch.library_seen:
        return state.launch.step is not None
    return state.launch.all_tasks_started or not state.identity.wrapped


def save(state: State, deadline: float, plan: Plan) -> Decision:
    """Ask all ranks for a save, and to leave."""
    state = replace(state, phase=Phase.SAVING, leaving=replace(state.leaving, plan=plan)).waiting(Timer.SAVE, deadline)
    why = plan.why if state.launch.library_seen else (*plan.why, because.Plain(because.Fact.STOP_SIGNAL_INSTEAD))
    return Decision(state, (request_save(state),), why)


def end_unsaved(state: State, at: float, plan: Plan, policy: Policy) -> Decision:
    """End ranks that train and have nothing to save: see `can_save`."""
    return stop(state, at, replace(plan, why=(*plan.why, because.Plain(because.Fact.NOTHING_TO_SAVE))), policy)


def request_save(state: State) -> do.RequestSave:
    """Return the word to the ranks that belongs to SAVING."""
    sent = None if state.identity.wrapped else state.launch.slurm_sent or None  # a wrapper absorbs what Slurm sends
    return do.RequestSave(stop=True, reasons=state.plan.why, deadline_at=state.deadline_at, slurm_sent=sent)


def query_slurm(state: State, why: Why) -> Decision:
    """Ask Slurm; if a question is under way, ask again when it is answered."""
    if state.query.asking:
        return Decision(replace(state, query=replace(state.query, question=Question.OUTDATED)), (), why)
    return Decision(
        replace(state, query=replace(state.query, question=Question.ASKED)), (do.AskSlurm(reasons=why),), why
    )


def query_slurm_unprompted(state: State, why: Why) -> Decision:
    """Ask Slurm though no signal came: only what ends the job counts."""
    if not state.query.asking:
        state = replace(state, query=replace(state.query, signal=NO_SIGNAL))
    return query_slurm(state, why)


def take(state: State, plan: Plan) -> State:
    """Take over a plan, unless the run ends anyway: nothing that comes later makes the job run again."""
    ends = state.leaving.plan is not None and state.leaving.plan.next is Next.END
    if not ends or plan.code is ExitCode.SUPERSEDED:
        return replace(state, leaving=replace(state.leaving, plan=plan))
    if state.leaving.fallback_plan is None or state.leaving.fallback_plan.next is not Next.END:
        return replace(state, leaving=replace(state.leaving, fallback_plan=plan))
    return state


def stop(state: State, at: float, plan: Plan, policy: Policy) -> Decision:
    """End the ranks, if there are any, without a save, and without reading back the one before."""
    why = plan.why
    state = take(state, plan)
    state = replace(state, storage=replace(state.storage, verifying=None))
    plan = state.plan
    if state.phase is Phase.CLOSING:
        return closed(state, at, policy, why)
    if not state.launch.running:
        return close(state, at, plan, policy)
    if state.launch.killed:
        return Decision(state, (), why)
    return kill(replace(state, phase=Phase.STOPPING), at, policy, why)


def stopping(state: State, plan: Plan) -> State:
    """Return the state in which the ranks leave, or are about to be killed."""
    return replace(state, phase=Phase.STOPPING, leaving=replace(state.leaving, plan=plan))


def kill_for(state: State, at: float, found: Finding, policy: Policy) -> Decision:
    """Kill ranks for what we saw ourselves; why they failed is known by that."""
    why = found.reasons
    state = stopping(state, Plan(next=Next.RELAUNCH, why=why))
    return kill(replace(state, launch=replace(state.launch, first_failure=why, found=found)), at, policy, why)


def kill(state: State, at: float, policy: Policy, why: Why) -> Decision:
    """SIGKILL the ranks, and wait for the end of their Slurm step: but the requeue must come before Slurm's limit."""
    deadline = at + policy.kill_within_s
    if state.leaving.leave_at is not None:
        deadline = min(deadline, max(state.leaving.leave_at, at) + policy.hurry_within_s)
    state = replace(state, launch=replace(state.launch, ranks=Ranks.KILLED)).waiting(Timer.KILL, deadline)
    return Decision(state, (do.KillRanks(launch=state.launch.number, reasons=why),), why)


def close(state: State, at: float, plan: Plan, policy: Policy) -> Decision:
    """No rank runs: wait for what the storage still has to do, and let the watchers leave at the end."""
    state, effects = _leave_out_what_is_wrong(replace(state, leaving=replace(state.leaving, plan=plan)))
    back = leads_back(state)
    reads = state.storage.verifying is not None or back
    deadline = at + (policy.verify_within_s if reads else policy.close_within_s)
    timer = Timer.READ_BACK if state.storage.verifying else Timer.WATCHERS_LEAVE
    if state.leaving.leave_at is not None:
        limit = max(state.leaving.leave_at, at + policy.hurry_within_s)
        deadline = limit if back else min(deadline, limit)  # a step that was not confirmed costs more than the wait
    state = replace(state, phase=Phase.CLOSING).waiting(Timer.LEAD_BACK if back else timer, deadline)
    decision = closed(state, at, policy, plan.why)
    return Decision(decision.state, (*effects, *decision.effects), decision.why)


def leads_back(state: State) -> bool:
    """Tell whether the lineage is being led back, by us: a newer attempt's lineage is its own affair."""
    return state.resume.choice is Choice.ROLLING_BACK and state.plan.code is not ExitCode.SUPERSEDED


def leave_out(state: State, below_step: int, why: Why, *, quick: bool = False, suspect: bool = True) -> do.RollBack:
    """Return the order to go on from below a step: what came later may be wrong, on shared storage and in each tier."""
    return do.RollBack(
        launch=state.launch.number,
        below_step=below_step,
        reasons=why,
        suspect=suspect,
        quick=quick,
        skipped_data=state.resume.skipped_data,
    )


def _leave_out_what_is_wrong(state: State) -> tuple[State, tuple[do.Effect, ...]]:
    """After silent corruption no attempt may go on from what was not confirmed, whatever ends this one."""
    wrong = state.launch.found
    if wrong is None or wrong.back_to is None or state.plan.code is ExitCode.SUPERSEDED:
        return state, ()
    if state.resume.went_back and not leads_back(state):  # one under way reads every byte: a quick one overtakes it
        return state, ()
    state = replace(
        state,
        resume=replace(state.resume, choice=Choice.ROLLING_BACK, went_back=True),
        storage=replace(state.storage, verifying=None),  # nobody goes on from it
    )
    return state, (leave_out(state, wrong.back_to + 1, wrong.reasons, quick=True),)


def closed(state: State, at: float, policy: Policy, why: Why) -> Decision:
    """Go on to the requeue once nothing is being read back, or to the end once the watchers left as well.

    Through the requeue the watchers stay: were the supervisor killed in it, nobody else would save the run.
    """
    plan = state.plan
    if plan.next is Next.REQUEUE and not state.identity.has_batch_script:
        why = (*plan.why, because.Plain(because.Fact.NO_BATCH_SCRIPT))
        plan = replace(plan, next=Next.END, why=why, code=ExitCode.NO_BATCH_SCRIPT)
        state = replace(state, leaving=replace(state.leaving, plan=plan))
    if plan.next is Next.END and state.watchers.status is BusStatus.OPEN:
        return Decision(
            replace(state, watchers=replace(state.watchers, status=BusStatus.LEAVING)), (do.StopBus(),), why
        )
    waits = state.storage.verifying is not None or leads_back(state)
    if waits or (plan.next is Next.END and state.watchers.open):
        return Decision(state, (), why)
    if plan.next is Next.END:
        return finish(state, plan)
    state = replace(state, phase=Phase.REQUEUEING).beside(Timer.REQUEUE_END, at + REQUEUE_FOR_S)
    state = state.waiting(Timer.SLURM_ANSWER, at + policy.ask_within_s)
    asked = query_slurm(state, (because.SlurmAsked(about="requeue"),))
    return Decision(asked.state, asked.effects, why)


def close_soon(state: State, at: float, policy: Policy, why: Why) -> Decision:
    """In CLOSING, the storage has answered: only the watchers are waited for now."""
    deadline = at + policy.close_within_s
    state = state.waiting(Timer.WATCHERS_LEAVE, min(state.deadline_at or deadline, deadline))
    return closed(state, at, policy, why)


def repeats(tried: Tried) -> int:
    """Return how often a launch failed in this way without a newly verified step."""
    return max(tried.repeats, tried.count)


def wait_for_slurm(state: State, at: float, why: Why, policy: Policy) -> Decision:
    """No launch can begin without Slurm: ask again in a moment.  That it is away is in nobody's budget."""
    plan = replace(state.plan, blame=Blame.SLURM)
    state = replace(
        state,
        leaving=replace(state.leaving, plan=plan),
        query=replace(state.query, question=None),
    ).waiting(Timer.SLURM_RETRY, at + policy.slurm_again_s)
    return Decision(state, (), (*why, because.Plain(because.Fact.WAIT_FOR_SLURM)))


def release(state: State) -> Decision:
    """Give back the nodes that were left, so that they can be repaired: all but our own, which ends with the job."""
    if not state.nodes.releasing:
        return Decision(state)
    return Decision(replace(state, nodes=replace(state.nodes, releasing=False)), (do.ReleaseNodes(keep=kept(state)),))


def kept(state: State) -> tuple[str, ...]:
    """Return the nodes that the job keeps where it gives back those that were left: our own is always among them."""
    resting = [each.node for each in state.nodes.growth.resting]
    own = () if state.identity.batch_node in state.nodes.usable else (state.identity.batch_node,)
    return tuple(dict.fromkeys([*own, *state.nodes.usable, *resting]))


def finish(state: State, plan: Plan) -> Decision:
    """End the supervisor; where the run needs a person, call one.

    After silent corruption it does, whatever the code, where the lineage was not led back.
    """
    wrong = state.launch.found
    astray = wrong is not None and wrong.back_to is not None and plan.code is not ExitCode.SUPERSEDED
    missed = state.resume.not_led_back if astray else ()
    plan = replace(plan, why=(*plan.why, *[each for each in missed if each not in plan.why]))
    state = replace(state, phase=Phase.DONE, leaving=replace(state.leaving, plan=plan)).waiting_for_nothing()
    call = do.NotifyUser(code=int(plan.code), reasons=plan.why, cause=plan.cause)
    calls = (call,) if plan.code.needs_person or missed else ()
    return Decision(state, (*calls, do.Exit(code=int(plan.code), reasons=plan.why)), plan.why)


def all_ready(state: State) -> bool:
    """Tell whether the watcher of every node answers."""
    ready = state.watchers.ready  # of ten thousand nodes a set takes time: first a look that takes none
    return len(state.nodes.usable) <= len(ready) and ready.issuperset(state.nodes.usable)
