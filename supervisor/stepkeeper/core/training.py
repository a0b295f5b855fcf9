"""What the ranks say, how they end, and what comes then.  Pure."""

from __future__ import annotations

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.phases import Decision, all_ready, close, closed, kill
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Next, Phase, Plan, State

EXIT_GAVE_UP = 93  # NVIDIA's ft_launcher: do not start me again

replace = msgspec.structs.replace


def on_rank_hello(state: State, event: on.RankHello) -> Decision:
    """The script can save, stop and resume."""
    if event.launch != state.launch or not state.running or state.heard:
        return Decision(state)
    return Decision(_heard(state), (), "the trainer library answers: this script can save and resume")


def _heard(state: State) -> State:
    """The trainer library is there: it need not be waited for.  A lost watcher keeps its deadline."""
    if state.heard or state.phase is not Phase.TRAINING or not all_ready(state):
        return replace(state, heard=True)
    return replace(state, heard=True, deadline_at=None)


def on_progressed(state: State, event: on.Progressed) -> Decision:
    """A step was completed."""
    if event.launch != state.launch or not state.running:
        return Decision(state)
    return Decision(replace(_heard(state), step=event.step))


def on_save_began(state: State, event: on.SaveBegan) -> Decision:
    """A save is in flight."""
    if event.launch != state.launch or not state.running:
        return Decision(state)
    return Decision(replace(_heard(state), saving=event.save_id))


def on_committed(state: State, event: on.CheckpointCommitted, policy: Policy) -> Decision:
    """A step directory is complete; an emergency one is read back while the ranks leave."""
    if event.launch != state.launch or not state.running:
        return Decision(state)
    state = replace(state, saving=None)
    why = f"step {event.step} is committed"
    if state.phase is Phase.SAVING and event.emergency:
        deadline = min(state.deadline_at or event.at, event.at + policy.leave_within_s)
        state = replace(state, verifying=event.directory, deadline_at=deadline)
        return Decision(state, (do.VerifyCheckpoint(directory=event.directory),), why)
    if state.phase is Phase.STOPPING and not state.killed:
        return kill(state, event.at, policy, why)
    return Decision(state, (), why)


def on_save_gave_up(state: State, event: on.SaveGaveUp, policy: Policy) -> Decision:
    """A save failed: training goes on, and older steps are untouched."""
    if event.launch != state.launch or not state.running:
        return Decision(state)
    state = replace(state, saving=None)
    why = f"the save of step {event.step} failed: {event.error}; older steps are untouched"
    if state.phase is Phase.STOPPING and not state.killed:
        return kill(state, event.at, policy, why)
    return Decision(state, (), why)


def on_finished(state: State, event: on.TrainingFinished, policy: Policy) -> Decision:
    """The work is done: that wins over every notice."""
    if event.launch != state.launch or not state.running or state.killed:
        return Decision(state)
    why = f"the training finished at step {event.step}"
    plan = Plan(next=Next.END, why=why, code=ExitCode.FINISHED)
    state = replace(state, phase=Phase.STOPPING, plan=plan, deadline_at=event.at + policy.leave_within_s)
    return Decision(state, (), why)


def on_stopped(state: State, event: on.TrainingStopped, policy: Policy) -> Decision:
    """The ranks leave, on request or on their own."""
    if event.launch != state.launch or not state.running:
        return Decision(state)
    if state.phase is not Phase.TRAINING:
        deadline = event.at + policy.leave_within_s
        state = replace(state, deadline_at=min(state.deadline_at or deadline, deadline))
        return Decision(state, (), f"the ranks leave at step {event.step}")
    why = f"the ranks left on their own at step {event.step}"
    plan = Plan(next=Next.RELAUNCH, why=why)
    state = replace(
        state, phase=Phase.STOPPING, plan=plan, asking=True, deadline_at=event.at + policy.leave_within_s
    )
    return Decision(state, (do.AskSlurm(why=why),), why)


def on_rank_exited(state: State, event: on.RankExited, policy: Policy) -> Decision:
    """A rank ended: if it failed, end the others, but let a commit in flight come to its end."""
    failed = event.signal is not None or event.code not in (0, 75, None)
    if event.launch != state.launch or not state.running or not failed:
        return Decision(state)
    how = f"signal {event.signal}" if event.signal is not None else f"exit code {event.code}"
    why = f"rank {event.rank} on {event.node} ended with {how}"
    first = state.first_failure or why
    state = replace(state, first_failure=first)
    if state.phase is not Phase.TRAINING and state.phase is not Phase.SAVING:
        return Decision(state)
    if state.phase is Phase.SAVING:
        if state.saving is None:
            return kill(replace(state, phase=Phase.STOPPING), event.at, policy, why)
        return Decision(state, (), why + "; the commit in flight may still come")
    if event.code == EXIT_GAVE_UP:
        plan = Plan(next=Next.END, why=why, code=ExitCode.TRAINING_GAVE_UP)
    else:
        plan = Plan(next=Next.RELAUNCH, why=why)
    state = replace(state, phase=Phase.STOPPING, plan=plan)
    if state.saving is not None:
        state = replace(state, deadline_at=event.at + policy.commit_grace_s)
        return Decision(state, (), why + "; the commit in flight may still come")
    return kill(state, event.at, policy, why)


def on_launch_ended(state: State, event: on.LaunchEnded, policy: Policy) -> Decision:
    """No rank runs any more: go on with the plan, or find out what happened."""
    if event.launch != state.launch or not state.running:
        return Decision(state)
    state = replace(state, running=False, saving=None)
    if event.finished:
        plan = Plan(next=Next.END, why="the training is finished", code=ExitCode.FINISHED)
        return close(state, event.at, plan, policy)
    if state.phase is Phase.TRAINING:
        return _after_unasked_end(state, event, policy)
    assert state.plan is not None, "SAVING and STOPPING are entered with a plan"
    if state.plan.next is Next.END and state.plan.code is ExitCode.FINISHED:
        failed = f"rank 0 said that it finished, yet outcome.json does not: {event.error or event.code}"
        return _after_failure(state, event.at, failed, policy)
    if state.plan.next is Next.RELAUNCH:
        return _after_failure(state, event.at, state.plan.why, policy)
    return close(state, event.at, state.plan, policy)


def _after_unasked_end(state: State, event: on.LaunchEnded, policy: Policy) -> Decision:
    if not state.heard and event.code == 0:
        why = "the command ended with 0 (it has no trainer library to say more)"
        plan = Plan(next=Next.END, why=why, code=ExitCode.FINISHED)
        return close(state, event.at, plan, policy)
    if event.code == EXIT_GAVE_UP:
        plan = Plan(next=Next.END, why="the command ended with 93", code=ExitCode.TRAINING_GAVE_UP)
        return close(state, event.at, plan, policy)
    how = state.first_failure or event.error or f"srun ended with {event.code}"
    if event.stopped:
        how = "the ranks left on their own with a checkpoint"
    elif event.code == 0:
        how = "the ranks ended with 0, but rank 0 never said that the training is finished"
    return _after_failure(state, event.at, how, policy)


def _after_failure(state: State, at: float, why: str, policy: Policy) -> Decision:
    """Relaunch in the same allocation, as long as the budget of failures lasts."""
    state = replace(state, failures=state.failures + 1, launch=state.launch + 1)
    if state.failures >= policy.failures_max:
        why = f"{why}; {state.failures} launches without a newly verified step"
        return close(state, at, Plan(next=Next.END, why=why, code=ExitCode.TRAINING_FAILED), policy)
    state = replace(
        state,
        phase=Phase.STARTING,
        plan=None,
        chosen=False,
        clearing=False,
        deadline_at=at + (policy.start_within_s if all_ready(state) else policy.watcher_back_within_s),
    )
    return Decision(state, (do.ChooseCheckpoint(),), f"relaunch: {why}")


def on_checkpoint_verified(state: State, event: on.CheckpointVerified, policy: Policy) -> Decision:
    """The emergency checkpoint was read back."""
    if event.directory != state.verifying:
        return Decision(state)
    state = replace(state, verifying=None)
    if event.ok:
        why = f"{event.directory} is verified"
    else:
        why = f"{event.directory} is NOT what its manifest says: {event.problem}; the one before will be used"
    if state.phase is Phase.CLOSING:
        return closed(state, event.at, policy, why)
    return Decision(state, (), why)
