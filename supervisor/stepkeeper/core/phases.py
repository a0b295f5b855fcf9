"""The only ways into a phase that ends something, and what `decide` returns.  Pure.

Whatever ends a launch goes through SAVING or STOPPING, then CLOSING, where the watchers leave, so that no
Slurm step of ours lingers when the job is requeued.
"""

from __future__ import annotations

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Next, Phase, Plan, State

replace = msgspec.structs.replace


class Decision(msgspec.Struct, frozen=True):
    """The next state, a work order, and one clause that says why (empty when nothing changed)."""

    state: State
    effects: tuple[do.Effect, ...] = ()
    why: str = ""


def save(state: State, deadline: float, plan: Plan) -> Decision:
    """Ask all ranks for a save, and to leave."""
    state = replace(state, phase=Phase.SAVING, plan=plan, deadline_at=deadline)
    return Decision(state, (do.RequestSave(stop=True, why=plan.why, deadline_at=deadline),), plan.why)


def stop(state: State, at: float, plan: Plan, policy: Policy) -> Decision:
    """End the ranks, if there are any, without a save."""
    if state.plan is not None and state.plan.next is Next.END and plan.code is not ExitCode.SUPERSEDED:
        plan = state.plan  # finished, cancelled: nothing that comes later makes the job run again
    if state.phase in (Phase.CLOSING, Phase.REQUEUEING):
        return Decision(replace(state, plan=plan), (), plan.why)
    if not state.running:
        return close(state, at, plan, policy)
    if state.phase is Phase.STOPPING and state.killed:
        return Decision(replace(state, plan=plan), (), plan.why)
    return kill(replace(state, phase=Phase.STOPPING, plan=plan), at, policy, plan.why)


def kill(state: State, at: float, policy: Policy, why: str) -> Decision:
    """SIGKILL the ranks, and wait for the end of their Slurm step."""
    state = replace(state, killed=True, deadline_at=at + policy.kill_within_s)
    return Decision(state, (do.KillRanks(launch=state.launch, why=why),), why)


def close(state: State, at: float, plan: Plan, policy: Policy) -> Decision:
    """No rank runs: let the watchers leave, and wait for the last checkpoint to be read back."""
    wait = policy.verify_within_s if state.verifying else policy.close_within_s
    state = replace(state, phase=Phase.CLOSING, plan=plan, deadline_at=at + wait)
    if not state.bus_open:
        return closed(state, at, policy, plan.why)
    return Decision(state, (do.StopBus(),), plan.why)


def closed(state: State, at: float, policy: Policy, why: str) -> Decision:
    """Go on to the requeue or the end, once the watchers left and nothing is being read back."""
    if state.bus_open or state.verifying is not None:
        return Decision(state, (), why)
    assert state.plan is not None, "CLOSING is entered with a plan"
    if state.plan.next is Next.END:
        return finish(state, state.plan)
    state = replace(state, phase=Phase.REQUEUEING, asking=True, deadline_at=at + policy.ask_within_s)
    return Decision(state, (do.AskSlurm(why="may the job be requeued?"),), why)


def finish(state: State, plan: Plan) -> Decision:
    """End the supervisor."""
    state = replace(state, phase=Phase.DONE, plan=plan, deadline_at=None)
    return Decision(state, (do.Exit(code=int(plan.code), reason=plan.why),), plan.why)


def all_ready(state: State) -> bool:
    return set(state.nodes) <= state.ready
