"""What follows from why a launch failed: the ladder, step by step, and the budgets that bound it.  Pure.

Failures in the same way (the same cause at the same place) go along the cause's row of `Policy`, until a step is
verified that lies beyond the one at which they happened.  Besides: `failures_max` launches without a newly verified
step end the run, whatever their causes; so do as many failures in one way where launches may have progressed unseen,
since nothing verified says so; and what a checkpoint's state can cause, where it happens at the same step
twice, is tried once from the step before (which may be poisoned: `RollBack`), then ends the run.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec.structs import replace

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.causes import BY_EVIDENCE, IN_A_STATE, OF_NODE, UNCHARGED, Cause, Rung, SkippedData, Tried, Try
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.faults import exclude_nodes, leave_on_suspicion, uncount_failure
from stepkeeper.core.gates import go_on_starting, waiting
from stepkeeper.core.phases import Decision, close_soon, leave_out, repeats, stop
from stepkeeper.core.placement import places, without_nodes
from stepkeeper.core.policy import Policy
from stepkeeper.core.reasons import Reason, Why
from stepkeeper.core.state import Blame, Choice, Next, Phase, Plan, State, Timer

TRIED_MAX = 16  # ways to fail that are remembered, the newest


def on_judged(state: State, event: on.Judged, policy: Policy) -> Decision:
    """Why the launch before failed; what follows is decided with the newest checkpoint known."""
    failure = state.failure
    before = event.launch == state.launch.number - 1
    if state.phase is not Phase.STARTING or failure is None or not before or failure.judged:
        return Decision(state)
    why = (found(event),)
    state = replace(state, failure=replace(failure, judged=event))
    return settle(state, event.at, event, why, policy) if state.resume.chosen else Decision(state, (), why)


def on_judge_late(state: State, at: float, policy: Policy) -> Decision:
    """Nobody can tell in time why it failed: storage that hangs holds its logs."""
    why = (because.Late(timer=Timer.CAUSE, within_s=policy.judge_within_s),)
    launch, rule = state.launch.number - 1, "no-verdict-in-time"
    unknown = on.Judged(at=at, launch=launch, cause=Cause.UNKNOWN, rule=rule, confidence=0.0)
    return settle(state, at, unknown, why, policy)


def on_rolled_back(state: State, event: on.RolledBack, policy: Policy) -> Decision:
    """The lineage leads to an older step: choose anew, or let the job leave."""
    if (
        state.phase not in (Phase.STARTING, Phase.CLOSING)
        or state.resume.choice is not Choice.ROLLING_BACK
        or event.launch != state.launch.number
    ):
        return Decision(state)
    state = replace(state, resume=replace(state.resume, choice=Choice.OPEN))
    if state.phase is Phase.STARTING:
        state = waiting(state, event.at, policy)
    if event.error:
        failed = because.Failed(what="roll_back", error=event.error)
        why = (*state.launch.first_failure, failed)
        state = replace(state, resume=replace(state.resume, not_led_back=(failed,)))
        plan = Plan(next=Next.END, why=why, code=ExitCode.CAUSE_STAYS, cause=_newest(state))
        return stop(state, event.at, plan, policy)
    state = replace(state, resume=replace(state.resume, went_back=True, not_led_back=()))
    said: Reason = (
        because.RolledBack(directory=event.directory) if event.directory else because.Plain(because.Fact.START_OVER)
    )
    if state.phase is Phase.CLOSING:
        return close_soon(state, event.at, policy, (said,))
    return Decision(state, (do.ChooseCheckpoint(),), (said,))


def _newest(state: State) -> Cause | None:
    """Return the cause that was settled last; nothing where a node took the blame for it since."""
    return next((each.cause for each in state.budgets.tried[-1:]), None)


def past(tried: tuple[Tried, ...], step: int | None) -> tuple[Tried, ...]:
    """Forget failures that a newly verified step lies beyond."""
    return tuple(each for each in tried if each.step is not None and step is not None and each.step >= step)


def found(said: on.Judged) -> because.CauseFound:
    """Return the verdict as a reason."""
    return because.CauseFound(**{name: getattr(said, name) for name in because.CauseFound.__struct_fields__})


def settle(state: State, at: float, said: on.Judged, why: Why, policy: Policy) -> Decision:
    """Decide what follows; the newest checkpoint is known, and so is the cause, as far as anybody can tell."""
    wrong = state.launch.found
    if wrong is not None and wrong.back_to is not None:  # the ranks have proved it: no log says more
        said = replace(said, cause=wrong.cause, rule=wrong.rule, node=wrong.node, rank=wrong.rank, confidence=1.0)
    cause = said.cause if said.confidence >= policy.judged_from else Cause.UNKNOWN
    if cause in OF_NODE and said.node and said.node not in state.launch.nodes:
        cause = Cause.UNKNOWN  # a node that the launch did not run on explains nothing: it was left before
    place = _place(cause, said)
    step = next((each for each in (said.step, state.launch.step, state.resume.step) if each is not None), None)
    before = next((each for each in state.budgets.tried if (each.cause, each.place) == (cause, place)), None)
    count = before.count if before is not None else 0
    row = policy.row(cause)
    first_failure = (*state.launch.first_failure, found(said))
    state = replace(state, failure=None, launch=replace(state.launch, first_failure=first_failure))
    if cause in UNCHARGED and count < len(row):
        state = uncount_failure(state)
    if state.budgets.failures >= policy.failures_max:
        why = (*state.launch.first_failure, because.FailuresMax(failures=state.budgets.failures))
        plan = Plan(next=Next.END, why=why, code=ExitCode.TRAINING_FAILED, cause=cause)
        return stop(state, at, plan, policy)
    times = 1 + (repeats(before) if before is not None else 0)
    unseen = times > count + 1  # launches between may have progressed, and nothing verified says so
    # a full disk may be there each time the script writes; preemptions and lost nodes are news of their own
    bound = max(policy.failures_max, len(row)) if cause is Cause.STORAGE else policy.failures_max
    if unseen and (cause not in UNCHARGED or cause is Cause.STORAGE) and times >= bound:
        why = (*state.launch.first_failure, because.FailuresMax(failures=times, same=True))
        plan = Plan(next=Next.END, why=why, code=ExitCode.TRAINING_FAILED, cause=cause)
        return stop(state, at, plan, policy)
    index, word = _word(state, said.node, row, count)
    again = before is not None and _same(before.step, step)
    back = before is not None and before.stepped_back
    # where the launch resumed from a snapshot, it may have committed step directories since
    begun_from = state.launch.snapshot if state.launch.snapshot is not None else state.resume.step
    # the first step from a state was wrong, twice: the state is, though its own loss was a number
    poisoned = again and cause is Cause.NUMERICAL and step is not None and begun_from == step - 1
    if again and (cause in IN_A_STATE or poisoned) and (state.resume.directory or state.launch.snapshot is not None):
        word = Try(Rung.STOP) if back else Try(Rung.ROLLBACK)
        back = True
    tried = Tried(cause=cause, place=place, count=max(count, index) + 1, repeats=times, step=step, stepped_back=back)
    others = tuple(each for each in state.budgets.tried if each is not before)
    state = replace(state, budgets=replace(state.budgets, tried=(*others, tried)[-TRIED_MAX:]))
    case = _Case(cause=cause, step=step, node=said.node, why=why, poisoned=poisoned)
    return _act(state, at, word, case, policy)


def _same(one: int | None, other: int | None) -> bool:
    """Whether it is the same step: the word of the last one before the end may be lost with the rank that had it."""
    return one is not None and other is not None and abs(one - other) <= 1


def _place(cause: Cause, said: on.Judged) -> str:
    """Return what tells two failures of one cause apart; what is in no budget of the training has one for all."""
    if cause in UNCHARGED:
        return said.node if cause in OF_NODE else ""
    return said.location or ("" if cause in BY_EVIDENCE else said.rule)


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    cause: Cause
    step: int | None  # at which it failed
    node: str
    why: Why
    poisoned: bool = False  # the state that the launch began from is wrong


def _word(state: State, node: str, row: tuple[Try, ...], count: int) -> tuple[int, Try]:
    """Return the word of the row that this failure leads to, and its place there.

    A node that cannot be left leads to the next word; where that is the end, to a relaunch: the row's tries stay.
    """
    can_leave = node in state.nodes.usable and bool(places(without_nodes(state, (node,))))
    index = min(count, len(row) - 1)
    while row[index].rung is Rung.LEAVE and not can_leave:
        if index + 1 == len(row) or row[index + 1].rung is Rung.STOP:
            return index, Try(Rung.RELAUNCH)
        index += 1
    if row[index].rung is Rung.LEAVE and state.leaving.leave_at is not None:  # Slurm takes the others too
        return index, Try(Rung.REQUEUE)
    return index, row[index]


def _act(state: State, at: float, word: Try, case: _Case, policy: Policy) -> Decision:
    why = (*case.why, because.Recovery(action=word.rung, after_s=word.after_s))
    if word.after_s:
        state = replace(state, start=replace(state.start, wait_until=at + word.after_s))
    if case.cause in OF_NODE and word.rung is not Rung.LEAVE:  # leaving counts by itself
        state = replace(state, budgets=replace(state.budgets, node_losses=state.budgets.node_losses + 1))
        if state.budgets.node_losses > policy.node_losses_max:
            return stop(state, at, Plan(next=Next.END, why=why, code=ExitCode.NODES_LOST, cause=case.cause), policy)
    match word.rung:
        case Rung.RELAUNCH:
            return go_on_starting(state, at, policy, why)
        case Rung.LEAVE:
            why = (because.NodeIs(node=case.node, state="suspect"), *why)
            lost = case.cause is Cause.NODE_LOST
            return leave_on_suspicion(state, at, case.node, why, policy, lost=lost)
        case Rung.ROLLBACK:
            return _roll_back(state, at, case, why, policy)
        case Rung.REQUEUE:
            if case.node in state.nodes.usable and case.cause in (*OF_NODE, Cause.HANG):
                state = exclude_nodes(state, at, {case.node: why}, policy)
            blame = Blame.NODE if case.cause in OF_NODE else Blame.TRAINING
            return stop(state, at, Plan(next=Next.REQUEUE, why=why, blame=blame, cause=case.cause), policy)
        case Rung.STOP:
            why = (*state.launch.first_failure, because.Plain(because.Fact.CAUSE_STAYS))
            return stop(state, at, Plan(next=Next.END, why=why, code=ExitCode.CAUSE_STAYS, cause=case.cause), policy)
        case _:
            assert_never(word.rung)


def _skip_data(state: State, case: _Case, why: Why, policy: Policy) -> tuple[State, Why]:
    """Have the data on which a loss went wrong left out, if that is wanted, and not too often."""
    if case.cause is not Cause.NUMERICAL or case.step is None or case.step < 1 or not policy.skip_data_steps:
        return state, why
    if len(state.resume.skipped_data) >= policy.skip_data_max:
        return state, (*why, because.DataNotLeftOut(times=len(state.resume.skipped_data)))
    window = SkippedData(step=case.step, steps=policy.skip_data_steps)
    said = because.DataLeftOut(step=window.step, steps=window.steps)
    resume = replace(state.resume, skipped_data=(*state.resume.skipped_data, window))
    return replace(state, resume=resume), (*why, said)


def roll_back_below(state: State, at: float, step: int, why: Why, policy: Policy, *, suspect: bool = True) -> Decision:
    """Go back to the newest step below one: what came later may be wrong, on shared storage and in each tier.

    The lineage says so also where shared storage has nothing later: then a tier's steps return in no attempt.
    """
    resume = replace(state.resume, choice=Choice.ROLLING_BACK, went_back=True)
    state = waiting(replace(state, resume=resume), at, policy)
    return Decision(state, (leave_out(state, step, why, suspect=suspect),), (*why, because.GoBackBelow(step=step)))


def _roll_back(state: State, at: float, case: _Case, why: Why, policy: Policy) -> Decision:
    """Go on from the newest verified step before the one at which it went wrong; else one checkpoint back."""
    state, why = _skip_data(state, case, why, policy)
    wrong_at = case.step if case.cause is Cause.NUMERICAL and not case.poisoned else None
    if wrong_at is not None or state.launch.snapshot is not None:
        # what a tier has newer may hold the wrong loss, and its data; or the snapshot itself is wrong
        state = replace(state, resume=replace(state.resume, went_back=True))
    if state.resume.step is None:
        return go_on_starting(state, at, policy, (*why, because.Plain(because.Fact.START_OVER)))
    below = wrong_at if wrong_at is not None else max(state.resume.step, state.launch.snapshot or 0)
    if state.resume.step < below:
        return go_on_starting(state, at, policy, (*why, because.Plain(because.Fact.NEWEST_IS_BEFORE)))
    return roll_back_below(state, at, below, why, policy, suspect=case.cause is Cause.NUMERICAL)
