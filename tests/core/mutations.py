"""Mistakes that somebody could make in the rules, each of which the property tests must find (`mutating`).

Each changes one place of one module; what it breaks is said in words.  The lines must stand there as they are: whoever
changes them changes the mutation as well.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One mistake."""

    module: str  # of core
    old: str  # stands there once
    new: str
    breaks: str  # which promise
    found_by: str = "leaves"  # a word in the name of the property test that finds it soon


MUTATIONS = (
    # --- the requeue, and the end -------------------------------------------------------------------
    Mutation(
        "notices",
        "    if state.phase is Phase.REQUEUEING and again:",
        "    if state.phase is Phase.REQUEUEING and again and event.job is None:",
        "a signal after the question is asked about before the requeue",
        "grows",
    ),
    Mutation(
        "notices",
        "    if judgement.notice is Notice.CANCELLED:",
        "    if judgement.notice is Notice.CANCELLED and job.reason:",
        "what was cancelled meanwhile is not requeued",
    ),
    Mutation(
        "notices",
        "    if judgement.notice is Notice.REQUEUED:",
        "    if judgement.notice is Notice.REQUEUED and state.batch and event.error:",
        "what Slurm requeued is not requeued again",
    ),
    Mutation(
        "notices",
        'Plan(next=Next.END, why=f"{how}: {state.plan.why}{besides}")',
        'Plan(next=Next.REQUEUE, why=f"{how}: {state.plan.why}{besides}")',
        "a requeue that was accepted is the end",
        "promises",
    ),
    Mutation(
        "judge",
        "    if job.restarts > state.restart_count:",
        "    if job.restarts > state.restart_count + 1:",
        "a restart that we did not order is seen",
    ),
    Mutation(
        "judge",
        "        return Judgement(notice=Notice.CANCELLED, deadline_at=_kill_deadline(state, at, policy))",
        "        return Judgement(notice=Notice.PREEMPTED, deadline_at=_kill_deadline(state, at, policy))",
        "COMPLETING for no reason is a cancellation",
    ),
    Mutation(
        "phases",
        "    ends = state.plan is not None and state.plan.next is Next.END",
        "    ends = state.plan is not None and state.plan.next is Next.END and state.phase is Phase.CLOSING",
        "a plan to end stays one",
        "promises",
    ),
    Mutation(
        "phases",
        "    if plan.next is Next.REQUEUE and not state.batch:",
        "    if plan.next is Next.REQUEUE and not state.batch and state.running:",
        "without a batch script nothing is requeued",
    ),
    Mutation(
        "notices",
        "            return Decision(state)  # Slurm ends what it requeues: the answer to that is on its way",
        "            state = replace(state, deadline_at=at)",
        "our own requeue's signal starts no second one",
    ),
    Mutation(
        "training",
        "    if event.finished:",
        "    if event.finished and state.phase is not Phase.SAVING:",
        "a finished training is finished, in grace time too",
        "told",
    ),
    Mutation(
        "training",
        "    if plan.code is ExitCode.FINISHED and event.code:  # with 0, rank 0's word counts without the file",
        "    if plan.code is ExitCode.FINISHED:",
        "the word that it is finished counts unless it is denied",
    ),
    Mutation(
        "training",
        "        state = take(state, Plan(next=Next.END, why=why, code=ExitCode.TRAINING_GAVE_UP))",
        "        state = take(state, Plan(next=Next.RELAUNCH, why=why))",
        "93 means: not again",
        "promises",
    ),
    Mutation(
        "phases",
        "    calls = (call,) if plan.code.needs_person else ()",
        "    calls = (call,)",
        "a person is called only where one is needed",
        "promises",
    ),
    Mutation(
        "notices",
        "    if tries >= policy.requeue_tries_max:",
        "    if tries >= 1000 * policy.requeue_tries_max:",
        "a requeue is tried only so often",
        "time",
    ),
    # --- time ---------------------------------------------------------------------------------------
    Mutation(
        "deadlines",
        "            return kill(replace(state, phase=Phase.STOPPING), event.at, policy, late)",
        "            return Decision(replace(state, deadline_at=event.at + 10.0), (), late)",
        "ranks are killed at the deadline of a save",
    ),
    Mutation(
        "phases",
        "        deadline = min(deadline, max(state.leave_at, at) + policy.hurry_within_s)\n"
        "    state = replace(state, killed=True",
        "        deadline = max(deadline, state.leave_at)\n    state = replace(state, killed=True",
        "ranks that do not die do not use up Slurm's time",
    ),
    Mutation(
        "training",
        "    return replace(state, deadline_at=deadline if known is None else min(known, deadline))",
        "    return replace(state, deadline_at=deadline)",
        "ranks that leave put off no deadline",
    ),
    Mutation(
        "suspension",
        "        deadline = min(state.deadline_at + away, max(state.deadline_at, state.leave_at))",
        "        deadline = state.deadline_at + away",
        "a suspension does not put off Slurm's limit",
    ),
    Mutation(
        "judge",
        "    return end_at - min(policy.save_margin_s, 0.2 * max(0.0, end_at - at))",
        "    return end_at + min(policy.save_margin_s, 0.2 * max(0.0, end_at - at))",
        "a save ends before Slurm does",
    ),
    Mutation(
        "notices",
        "    return Decision(state, (request_save(state),) if shorter else (), why)",
        "    return Decision(state, (), why)",
        "ranks hear of a shorter notice",
        "told",
    ),
    Mutation(
        "pace",
        "    return QUICKER_TIMES * pace.quickest if pace.saves >= SAVES_ENOUGH else 0.0",
        "    return QUICKER_TIMES * pace.quickest if pace.saves else 0.0",
        "no save is given up for lack of knowledge",
        "told",
    ),
    Mutation(
        "notices",
        "    if state.saving is not None or left_s >= least_s:",
        "    if left_s >= least_s:",
        "a save in flight is not given up",
    ),
    Mutation(
        "deadlines",
        "    if state.limit_at is not None and event.at >= state.limit_at and"
        " state.phase in (Phase.STARTING, Phase.TRAINING):",
        "    if state.limit_at is not None and event.at >= state.limit_at and state.phase is Phase.TRAINING:",
        "the time limit is seen without a signal, in a start too",
        "promises",
    ),
    Mutation(
        "starting",
        "        deadline_at=event.at + policy.start_within_s,\n",
        "",
        "a start has a deadline",
        "promises",
    ),
    Mutation(
        "silence",
        '    return _look(state, at, policy, f"{what} since {_since(state)}: the ranks\' stacks are looked at")',
        '    return _stands_still(state, at, "silent", None, policy)',
        "silence alone ends nothing",
        "promises",
    ),
    Mutation(
        "silence",
        "    if event.moved:\n        state = _wait_on(",
        "    if event.moved and state.patience > 2:\n        state = _wait_on(",
        "ranks that move are left alone",
        "promises",
    ),
    # --- launches -----------------------------------------------------------------------------------
    Mutation(
        "phases",
        "    return set(state.nodes) <= state.ready",
        "    return bool(set(state.nodes) & state.ready)",
        "a launch waits for every watcher",
        "promises",
    ),
    Mutation(
        "phases",
        "    if not all_ready(state) or state.testing or state.storage_since is not None:",
        "    if not all_ready(state) or state.testing:",
        "no launch starts on storage that failed its test",
        "failure",
    ),
    Mutation(
        "starting",
        "    if state.phase is not Phase.STARTING or not state.clearing or event.launch != state.launch:",
        "    if state.phase is not Phase.STARTING or event.launch != state.launch:",
        "a launch waits until the nodes were asked",
        "failure",
    ),
    Mutation(
        "deadlines",
        '    if not state.killed:\n        return kill(state, at, policy, "the ranks did not leave in time")\n',
        "",
        "ranks that do not leave are killed",
        "promises",
    ),
    Mutation(
        "starting",
        "    if state.killed and state.running:",
        "    if state.killed and state.running and first:",
        "an order that died with the watchers is said again",
        "nodes_that_fail",
    ),
    Mutation(
        "settling",
        "    below = case.step if numerical and case.step is not None else state.resume_step",
        "    below = case.step if numerical and case.step is not None else state.resume_step + 1",
        "a rollback goes back",
        "again",
    ),
    # --- budgets ------------------------------------------------------------------------------------
    Mutation(
        "settling",
        "    if state.failures >= policy.failures_max:",
        "    if state.failures > policy.failures_max:",
        "three launches without a new step end the run",
        "failure",
    ),
    Mutation(
        "phases",
        "        failures=state.failures + charged,",
        "        failures=state.failures + (charged and state.heard),",
        "each failure counts, also before the first word",
        "failure",
    ),
    Mutation(
        "starting",
        "        failures=0 if progressed else state.failures,",
        "        failures=0 if progressed or event.skipped else state.failures,",
        "only verified progress fills a budget again",
        "failure",
    ),
    Mutation(
        "settling",
        "    if cause in UNCHARGED and count < len(row):",
        "    if cause in UNCHARGED:",
        "a full file system is waited for only so often",
        "again",
    ),
    Mutation(
        "settling",
        "    tried = Tried(cause=cause, place=place, count=max(count, index) + 1, step=step, stepped_back=back)",
        "    tried = Tried(cause=cause, place=place, count=1, step=step, stepped_back=back)",
        "a failure in the same way goes on along its row",
        "again",
    ),
    Mutation(
        "settling",
        "        word = Try(Rung.STOP) if back else Try(Rung.ROLLBACK)",
        "        word = Try(Rung.ROLLBACK)",
        "the same step is stepped back from once",
        "again",
    ),
    Mutation(
        "settling",
        "    again = before is not None and step is not None and before.step == step",
        "    again = before is not None and step is not None and before.step == step and said.location != ''",
        "the same step twice steps back",
        "again",
    ),
    Mutation(
        "settling",
        "    return tuple(each for each in tried if each.step is not None and step is not None and each.step >= step)",
        "    return ()",
        "a failure is remembered until it is passed",
        "failure",
    ),
    Mutation(
        "phases",
        "    if unseen:  # unknown progress is not none\n        state = replace(state, failures=0, tried=())\n",
        "",
        "unknown progress is not none",
        "failure",
    ),
    Mutation(
        "bus",
        "    if restarts > policy.bus_restarts_max:",
        "    if restarts > policy.bus_restarts_max and state.plan is None and state.phase is Phase.STARTING:",
        "restarts of the bus are bounded",
        "nodes_that_fail",
    ),
    Mutation(
        "notices",
        "        state = not_charged(replace(state, failure=None))",
        "        state = replace(state, failure=None)",
        "a preemption is in no budget of the training",
        "told",
    ),
    # --- nodes --------------------------------------------------------------------------------------
    Mutation(
        "faults",
        "    return _leave(state, event.at, {event.node: what}, policy, exclude=not event.drained)",
        "    return _leave(state, event.at, {event.node: what}, policy, exclude=True)",
        "a drained node is not excluded",
        "nodes_that_fail",
    ),
    Mutation(
        "faults",
        "    return _leave(state, at, dict.fromkeys(lost, why), policy, exclude=False, lost=True)",
        "    return _leave(state, at, dict.fromkeys(lost, why), policy, exclude=True, lost=True)",
        "a lost node is not excluded",
        "nodes_that_fail",
    ),
    Mutation(
        "faults",
        "    if again and needed and state.node_losses > policy.node_losses_max:",
        "    if hit and again and state.node_losses > policy.node_losses_max:",
        "lost nodes are bounded, in a start too",
        "nodes_that_fail",
    ),
    Mutation(
        "faults",
        "    if found and shared and 2 * len(found) > len(state.nodes):",
        "    if found and shared and len(found) > len(state.nodes):",
        "what most nodes share is not theirs",
        "failure",
    ),
    Mutation(
        "places",
        "    if not 0 < state.nodes_min <= left:\n        return 0\n",
        "    if left < 1:\n        return 0\n",
        "a launch shrinks only as far as it may",
        "nodes_that_fail",
    ),
    Mutation(
        "phases",
        "dict.fromkeys([*(() if state.batch_node in state.nodes else (state.batch_node,)), *state.nodes, *resting])",
        "dict.fromkeys([*state.nodes, *resting])",
        "the supervisor's own node is kept",
        "nodes_that_fail",
    ),
    Mutation(
        "growing",
        "    nodes = tuple(node for node in state.allocated if node in state.nodes or node in back)",
        "    nodes = state.allocated",
        "only a node that rested comes back",
        "grows",
    ),
    Mutation(
        "faults",
        "    return replace(not_charged(state), failure=None)",
        "    return replace(state, charged=False, failure=None, failures=state.failures + 1)",
        "a fault of a node is in no budget of the training",
        "nodes_that_fail",
    ),
)
