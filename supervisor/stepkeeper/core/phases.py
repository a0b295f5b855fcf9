"""The only ways into a phase that ends something, and what `decide` returns.  Pure.

Whatever ends a launch goes through SAVING or STOPPING, then CLOSING, where the watchers leave, so that no
Slurm step of ours lingers when the job is requeued.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import Tried
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import NodesLeft, Why
from stepkeeper.core.state import NO_SIGNAL, Blame, Failure, Next, Phase, Plan, State

# Which nodes a launch gets.  Pure.


def places(state: State) -> tuple[str, ...]:
    """Return the nodes of the next launch, in the allocation's order; none where too few are left.

    Nodes of the launch before come first, spares fill up.
    """
    wanted = state.nodes_wanted
    if len(state.nodes) < wanted:
        wanted = _fewer(state, len(state.nodes))
    again = [node for node in state.launched if node in state.nodes][:wanted]
    spares = [node for node in state.nodes if node not in again]
    chosen = {*again, *spares[: wanted - len(again)]}
    return tuple(node for node in state.nodes if node in chosen)


def _fewer(state: State, left: int) -> int:
    """Return how many of so many nodes a smaller launch has; 0 where it may not be so small."""
    if not 0 < state.nodes_min <= left:
        return 0
    return largest(state.node_counts, state.nodes_min, left)


def largest(counts: Sequence[int], least: int, most: int) -> int:
    """Return the largest number of nodes within bounds that a launch may have; 0 where there is none.

    >>> largest((1, 2, 4, 8), 2, 7)
    4
    >>> largest((), 2, 7)
    7
    """
    return most if not counts else max((each for each in counts if least <= each <= most), default=0)


def room(state: State) -> NodesLeft:
    """Tell how many nodes are left, and how many a launch needs."""
    counts = state.node_counts
    return NodesLeft(usable=len(state.nodes), wanted=state.nodes_wanted, least=state.nodes_min, counts=counts)


replace = msgspec.structs.replace


class Decision(msgspec.Struct, frozen=True):
    """The next state, a work order, and why (empty when nothing changed)."""

    state: State
    effects: tuple[do.Effect, ...] = ()
    why: Why = ()


REQUEUE_FOR_S = 300.0  # a controller that fails over is back by then; one that is away for longer needs a person


def can_save(state: State) -> bool:
    """Tell whether ranks that train may have something to save: done steps, or work that only their script knows of."""
    if state.bus_restarted_in_launch:  # what they said meanwhile was not heard
        return True
    return state.step is not None if state.library_seen else state.all_tasks_started or not state.wrapped


def save(state: State, deadline: float, plan: Plan) -> Decision:
    """Ask all ranks for a save, and to leave."""
    state = replace(state, phase=Phase.SAVING, plan=plan, deadline_at=deadline)
    why = plan.why if state.library_seen else (*plan.why, because.StopSignalInstead())
    return Decision(state, (request_save(state),), why)


def request_save(state: State) -> do.RequestSave:
    """Return the word to the ranks that belongs to SAVING."""
    assert state.plan is not None, "SAVING is entered with a plan"
    sent = None if state.wrapped else state.slurm_sent or None  # a wrapper absorbs what Slurm sends
    return do.RequestSave(stop=True, reasons=state.plan.why, deadline_at=state.deadline_at, slurm_sent=sent)


def query_slurm(state: State, why: Why) -> Decision:
    """Ask Slurm; if a question is under way, ask again when it is answered."""
    if state.asking:
        return Decision(replace(state, requery=True), (), why)
    return Decision(replace(state, asking=True), (do.AskSlurm(reasons=why),), why)


def query_slurm_unprompted(state: State, why: Why) -> Decision:
    """Ask Slurm though no signal came: only what ends the job counts."""
    return query_slurm(replace(state, signal=state.signal if state.asking else NO_SIGNAL), why)


def take(state: State, plan: Plan) -> State:
    """Take over a plan, unless the run ends anyway: nothing that comes later makes the job run again."""
    ends = state.plan is not None and state.plan.next is Next.END
    if not ends or plan.code is ExitCode.SUPERSEDED:
        return replace(state, plan=plan)
    if state.fallback_plan is None or state.fallback_plan.next is not Next.END:
        return replace(state, fallback_plan=plan)
    return state


def stop(state: State, at: float, plan: Plan, policy: Policy) -> Decision:
    """End the ranks, if there are any, without a save, and without reading back the one before."""
    why = plan.why
    state = replace(take(state, plan), verifying=None)
    assert state.plan is not None, "just taken"
    plan = state.plan
    if state.phase is Phase.CLOSING:
        return closed(state, at, policy, why)
    if not state.running:
        return close(state, at, plan, policy)
    if state.killed:
        return Decision(state, (), why)
    return kill(replace(state, phase=Phase.STOPPING), at, policy, why)


def kill(state: State, at: float, policy: Policy, why: Why) -> Decision:
    """SIGKILL the ranks, and wait for the end of their Slurm step: but the requeue must come before Slurm's limit."""
    deadline = at + policy.kill_within_s
    if state.leave_at is not None:
        deadline = min(deadline, max(state.leave_at, at) + policy.hurry_within_s)
    state = replace(state, killed=True, deadline_at=deadline)
    return Decision(state, (do.KillRanks(launch=state.launch, reasons=why),), why)


def close(state: State, at: float, plan: Plan, policy: Policy) -> Decision:
    """No rank runs: wait for the last checkpoint to be read back, and let the watchers leave at the end."""
    deadline = at + (policy.verify_within_s if state.verifying else policy.close_within_s)
    if state.leave_at is not None:
        deadline = min(deadline, max(state.leave_at, at + policy.hurry_within_s))
    state = replace(state, phase=Phase.CLOSING, plan=plan, deadline_at=deadline)
    return closed(state, at, policy, plan.why)


def closed(state: State, at: float, policy: Policy, why: Why) -> Decision:
    """Go on to the requeue once nothing is being read back, or to the end once the watchers left as well.

    Through the requeue the watchers stay: were the supervisor killed in it, nobody else would save the run.
    """
    plan = state.plan
    assert plan is not None, "CLOSING is entered with a plan"
    if plan.next is Next.REQUEUE and not state.batch:
        why = (*plan.why, because.NoBatchScript())
        plan = replace(plan, next=Next.END, why=why, code=ExitCode.NO_BATCH_SCRIPT)
        state = replace(state, plan=plan)
    if plan.next is Next.END and state.bus_open and not state.bus_told:
        return Decision(replace(state, bus_told=True), (do.StopBus(),), why)
    if state.verifying is not None or (plan.next is Next.END and state.bus_open):
        return Decision(state, (), why)
    if plan.next is Next.END:
        return finish(state, plan)
    by = at + REQUEUE_FOR_S
    state = replace(state, phase=Phase.REQUEUEING, deadline_at=at + policy.ask_within_s, requeue_by=by)
    asked = query_slurm(state, (because.RequeueAsked(),))
    return Decision(asked.state, asked.effects, why)


def relaunch(state: State, at: float, why: Why, policy: Policy) -> Decision:
    """Start again in the same allocation, while it is found out why the launch failed.

    What follows from that, and whether the budget lasts, is known with the newest checkpoint: `settling`.
    """
    if not places(state):
        return close(state, at, Plan(next=Next.REQUEUE, why=(*why, room(state)), blame=Blame.NODE), policy)
    charged = state.plan is None or state.plan.blame is Blame.TRAINING
    unseen = (
        not state.library_seen
        and state.best_step is None  # else checkpoints tell of progress: those of a framework, where no library does
        and state.launched_at is not None
        and at - state.launched_at >= policy.unseen_progress_s
    )
    if unseen:  # unknown progress is not none: rows begin again, but the same failure stays counted (`settling`)
        tried = tuple(replace(each, count=0, repeats=repeats(each)) for each in state.tried)
        state = replace(state, failures=0, tried=tried)
    judged = charged and (state.all_tasks_started or not state.wrapped)  # else it says nothing of the training
    failure = Failure(launch=state.launch, step=state.step, judge_by=at + policy.judge_within_s) if judged else None
    judge = (do.JudgeLaunch(launch=state.launch, found=state.found),) if judged else ()
    released = release(state)
    state = released.state
    wait = policy.choose_within_s if all_ready(state) else policy.watcher_back_within_s
    state = replace(
        state,
        phase=Phase.STARTING,
        failures=state.failures + charged,
        failure_counted=charged,
        failure=failure,
        launch=state.launch + 1,
        first_failure=why,
        plan=None,
        fallback_plan=None,
        chosen=False,
        clearing=False,
        deadline_at=at + wait,
    )
    return Decision(state, (*released.effects, do.ChooseCheckpoint(), *judge), (because.Relaunch(), *why))


def repeats(tried: Tried) -> int:
    """Return how often a launch failed in this way without a newly verified step."""
    return max(tried.repeats, tried.count)


def wait_for_slurm(state: State, at: float, why: Why, policy: Policy) -> Decision:
    """No launch can begin without Slurm: ask again in a moment.  That it is away is in nobody's budget."""
    assert state.plan is not None, "STOPPING is entered with a plan"
    plan = replace(state.plan, blame=Blame.SLURM)
    state = replace(state, plan=plan, asking=False, requery=False, deadline_at=at + policy.slurm_again_s)
    return Decision(state, (), (*why, because.WaitForSlurm()))


def release(state: State) -> Decision:
    """Give back the nodes that were left, so that they can be repaired: all but our own, which ends with the job."""
    if not state.releasing:
        return Decision(state)
    return Decision(replace(state, releasing=False), (do.ReleaseNodes(keep=kept(state)),))


def kept(state: State) -> tuple[str, ...]:
    """Return the nodes that the job keeps where it gives back those that were left: our own is always among them."""
    resting = [each.node for each in state.growth.resting]
    own = () if state.batch_node in state.nodes else (state.batch_node,)
    return tuple(dict.fromkeys([*own, *state.nodes, *resting]))


def go_on_starting(state: State, at: float, policy: Policy, why: Why) -> Decision:
    """In STARTING, clear the nodes once watchers answer, the checkpoint is chosen, and no failure is to be settled."""
    if state.phase is not Phase.STARTING:
        return Decision(state)
    if not all_ready(state) or state.testing or state.storage_since is not None:
        return Decision(state, (), why)
    if not state.chosen:
        return Decision(replace(state, deadline_at=at + policy.choose_within_s), (), why)
    if state.failure is not None:
        return Decision(replace(state, deadline_at=state.failure.judge_by), (), why)
    if state.wait_until is not None and at < state.wait_until:
        return Decision(replace(state, deadline_at=state.wait_until), (), why)
    state = replace(
        state, wait_until=None, clearing=True, asked_uncleared=False, deadline_at=at + policy.clear_within_s
    )
    clear = do.ClearNodes(launch=state.launch, nodes=state.nodes, first=places(state)[0])
    return Decision(state, (clear,), why)


def finish(state: State, plan: Plan) -> Decision:
    """End the supervisor; where the run needs a person, call one."""
    state = replace(state, phase=Phase.DONE, plan=plan, deadline_at=None)
    call = do.NotifyUser(code=int(plan.code), reasons=plan.why, cause=plan.cause)
    calls = (call,) if plan.code.needs_person else ()
    return Decision(state, (*calls, do.Exit(code=int(plan.code), reasons=plan.why)), plan.why)


def all_ready(state: State) -> bool:
    """Tell whether the watcher of every node answers."""
    return set(state.nodes) <= state.ready
