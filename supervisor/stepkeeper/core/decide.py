"""The rules.  `decide(state, event, policy)` returns the next state, what to do, and why.

This module is pure: no clock, no I/O, no log, no thread.  Time is `event.at`.  Rules that hold throughout:

1. A launch starts only when every watcher answers, the checkpoint is chosen and verified, and every node
   has confirmed that nothing of an earlier launch is left.
2. Whatever ends a launch goes through SAVING or STOPPING, then CLOSING, where the watchers leave, so that
   no Slurm step of ours lingers when the job is requeued.
3. A requeue happens once, last, and only after Slurm was asked again: never for a cancelled, finished or
   already requeued job.
4. Every phase that waits has a deadline.  When it passes, the next rougher means is used.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.exits import ExitCode
from stepkeeper.core.judge import Judgement, Notice, judge
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Next, Phase, Plan, State

EXIT_GAVE_UP = 93  # NVIDIA's ft_launcher: do not start me again


class Decision(msgspec.Struct, frozen=True):
    """The next state, a work order, and one clause that says why (empty when nothing changed)."""

    state: State
    effects: tuple[do.Effect, ...] = ()
    why: str = ""


def decide(state: State, event: on.Event, policy: Policy) -> Decision:  # noqa: C901, PLR0912 - one case an event
    """Return what changes and what to do about one event.  Never raises."""
    if state.phase is Phase.DONE:
        return Decision(state)
    match event:
        case on.AttemptStarted():
            return _on_attempt_started(event, policy)
        case on.Tick():
            return _on_tick(state, event, policy)
        case on.SignalReceived():
            return _on_signal(state, event)
        case on.NodeSignaled():
            return _ask(state, "node TERM", f"Slurm sent SIGTERM to the steps on {event.node}")
        case on.SlurmAnswered():
            return _on_slurm_answered(state, event, policy)
        case on.RequeueAnswered():
            return _on_requeue_answered(state, event, policy)
        case on.WatcherReady():
            return _on_watcher_ready(state, event, policy)
        case on.WatcherLost():
            return _on_watcher_lost(state, event, policy)
        case on.BusEnded():
            return _on_bus_ended(state, event, policy)
        case on.NodesCleared():
            return _on_nodes_cleared(state, event)
        case on.CheckpointChosen():
            return _on_checkpoint_chosen(state, event, policy)
        case on.ChoiceFailed():
            plan = Plan(next=Next.END, why=f"step directories: {event.error}", code=ExitCode.STORAGE)
            return _stop(state, event.at, plan, policy)
        case on.CheckpointVerified():
            return _on_checkpoint_verified(state, event, policy)
        case on.RankHello():
            return _on_rank_hello(state, event)
        case on.RankExited():
            return _on_rank_exited(state, event, policy)
        case on.Progressed():
            return _on_progressed(state, event)
        case on.SaveBegan():
            return _on_save_began(state, event)
        case on.CheckpointCommitted():
            return _on_committed(state, event, policy)
        case on.SaveGaveUp():
            return _on_save_gave_up(state, event, policy)
        case on.TrainingFinished():
            return _on_finished(state, event, policy)
        case on.TrainingStopped():
            return _on_stopped(state, event, policy)
        case on.LaunchEnded():
            return _on_launch_ended(state, event, policy)
        case on.LaunchRefused():
            return _on_launch_refused(state, event, policy)
        case on.Superseded():
            return _on_superseded(state, event, policy)
        case _:
            assert_never(event)  # a new event without a branch fails mypy, not production


# --- from start to launch -------------------------------------------------------------------------


def _on_attempt_started(event: on.AttemptStarted, policy: Policy) -> Decision:
    state = State(
        job_id=event.job_id,
        restart_count=event.restart_count,
        attempt=event.attempt,
        nodes=event.nodes,
        batch_node=event.batch_node,
        kill_wait_s=event.kill_wait_s,
        failures=event.failures,
        node_losses=event.node_losses,
        best_step=event.best_step,
        bus=1,
        bus_open=True,
        deadline_at=event.at + policy.start_within_s,
    )
    if event.finished_step is not None:
        why = f"the training finished at step {event.finished_step} in an earlier attempt"
        return _finish(replace(state, bus_open=False), Plan(next=Next.END, why=why, code=ExitCode.FINISHED))
    return Decision(state, (do.StartBus(bus=1), do.ChooseCheckpoint()), "the attempt starts")


def _on_watcher_ready(state: State, event: on.WatcherReady, policy: Policy) -> Decision:
    if event.bus != state.bus or event.node not in state.nodes:
        return Decision(state)
    state = replace(state, ready=state.ready | {event.node})
    if not _all_ready(state):
        return Decision(state)
    if state.phase is Phase.TRAINING:
        return Decision(replace(state, deadline_at=None), (), "every watcher answers")
    return _go_on_starting(state, event.at, policy, "every watcher answers")


def _on_checkpoint_chosen(state: State, event: on.CheckpointChosen, policy: Policy) -> Decision:
    if state.phase is not Phase.STARTING:
        return Decision(state)
    progressed = event.step is not None and (state.best_step is None or event.step > state.best_step)
    state = replace(
        state,
        chosen=True,
        resume_from=event.directory,
        best_step=event.step if progressed else state.best_step,
        failures=0 if progressed else state.failures,
        node_losses=0 if progressed else state.node_losses,
    )
    if event.directory is None:
        why = "no verified step directory: the training starts from the beginning"
    else:
        why = f"newest verified step directory: {event.directory}"
    if event.skipped:
        why += "; passed over: " + ", ".join(f"{s.directory} ({s.problem})" for s in event.skipped)
    return _go_on_starting(state, event.at, policy, why)


def _go_on_starting(state: State, at: float, policy: Policy, why: str) -> Decision:
    """In STARTING, clear the nodes once watchers answer and the checkpoint is chosen."""
    if state.phase is not Phase.STARTING:
        return Decision(state)
    if not _all_ready(state):
        return Decision(state, (), why)
    if not state.chosen:
        return Decision(replace(state, deadline_at=at + policy.choose_within_s), (), why)
    state = replace(state, clearing=True, deadline_at=at + policy.clear_within_s)
    return Decision(state, (do.ClearNodes(launch=state.launch),), why)


def _on_nodes_cleared(state: State, event: on.NodesCleared) -> Decision:
    if state.phase is not Phase.STARTING or not state.clearing or event.launch != state.launch:
        return Decision(state)
    state = replace(
        state,
        phase=Phase.TRAINING,
        deadline_at=None,
        clearing=False,
        running=True,
        heard=False,
        bus_restarted_in_launch=False,
        step=None,
        saving=None,
        killed=False,
        first_failure="",
        plan=None,
    )
    effect = do.StartLaunch(
        launch=state.launch, resume_from=state.resume_from, address=event.address, port=event.port
    )
    return Decision(state, (effect,), "the nodes are clear")


def _on_launch_refused(state: State, event: on.LaunchRefused, policy: Policy) -> Decision:
    if event.launch != state.launch or not state.running:
        return Decision(state)
    state = replace(state, running=False)
    plan = Plan(next=Next.END, why=f"the training step: {event.error}", code=ExitCode.START_FAILED)
    return _close(state, event.at, plan, policy)


# --- signals and Slurm's answers ------------------------------------------------------------------


def _on_signal(state: State, event: on.SignalReceived) -> Decision:
    if event.signal in ("TERM", "INT") and state.term_at is None:
        state = replace(state, term_at=event.at)
    return _ask(state, event.signal, f"got SIG{event.signal}")


def _ask(state: State, signal: str, why: str) -> Decision:
    """Ask Slurm what a signal means; a batch process's signal outweighs a watcher's."""
    if state.phase is Phase.REQUEUEING:
        return Decision(state)  # it asks anyway before it acts
    if state.signal in ("", "node TERM") or signal != "node TERM":
        state = replace(state, signal=signal)
    if state.asking:
        return Decision(state)
    return Decision(replace(state, asking=True), (do.AskSlurm(why=why),), why)


def _on_slurm_answered(state: State, event: on.SlurmAnswered, policy: Policy) -> Decision:
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
            return _stop(state, event.at, plan, policy)
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
            return _save(state, deadline, plan)
        case Phase.SAVING:
            return Decision(replace(state, plan=plan, deadline_at=_earlier(state, deadline)), (), plan.why)
        case Phase.STOPPING | Phase.CLOSING:
            return Decision(replace(state, plan=plan), (), plan.why)
        case _:
            return _stop(state, at, plan, policy)


def _earlier(state: State, deadline: float) -> float:
    """A second notice can only shorten the wait, unless Slurm has by then told everybody to end."""
    if state.deadline_at is None or state.term_at is not None:
        return deadline
    return min(state.deadline_at, deadline)


# --- what the ranks say ---------------------------------------------------------------------------


def _on_rank_hello(state: State, event: on.RankHello) -> Decision:
    if event.launch != state.launch or not state.running or state.heard:
        return Decision(state)
    return Decision(replace(state, heard=True), (), "the trainer library answers: this script can save and resume")


def _on_progressed(state: State, event: on.Progressed) -> Decision:
    if event.launch != state.launch or not state.running:
        return Decision(state)
    return Decision(replace(state, step=event.step, heard=True))


def _on_save_began(state: State, event: on.SaveBegan) -> Decision:
    if event.launch != state.launch or not state.running:
        return Decision(state)
    return Decision(replace(state, saving=event.save_id, heard=True))


def _on_committed(state: State, event: on.CheckpointCommitted, policy: Policy) -> Decision:
    if event.launch != state.launch or not state.running:
        return Decision(state)
    state = replace(state, saving=None)
    why = f"step {event.step} is committed"
    if state.phase is Phase.SAVING and event.emergency:
        deadline = min(state.deadline_at or event.at, event.at + policy.leave_within_s)
        state = replace(state, verifying=event.directory, deadline_at=deadline)
        return Decision(state, (do.VerifyCheckpoint(directory=event.directory),), why)
    if state.phase is Phase.STOPPING and not state.killed:
        return _kill(state, event.at, policy, why)
    return Decision(state, (), why)


def _on_save_gave_up(state: State, event: on.SaveGaveUp, policy: Policy) -> Decision:
    if event.launch != state.launch or not state.running:
        return Decision(state)
    state = replace(state, saving=None)
    why = f"the save of step {event.step} failed: {event.error}; older steps are untouched"
    if state.phase is Phase.STOPPING and not state.killed:
        return _kill(state, event.at, policy, why)
    return Decision(state, (), why)


def _on_finished(state: State, event: on.TrainingFinished, policy: Policy) -> Decision:
    if event.launch != state.launch or not state.running or state.killed:
        return Decision(state)
    why = f"the training finished at step {event.step}"
    plan = Plan(next=Next.END, why=why, code=ExitCode.FINISHED)
    state = replace(state, phase=Phase.STOPPING, plan=plan, deadline_at=event.at + policy.leave_within_s)
    return Decision(state, (), why)


def _on_stopped(state: State, event: on.TrainingStopped, policy: Policy) -> Decision:
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


def _on_rank_exited(state: State, event: on.RankExited, policy: Policy) -> Decision:
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
            return _kill(replace(state, phase=Phase.STOPPING), event.at, policy, why)
        return Decision(state, (), why + "; the commit in flight may still come")
    if event.code == EXIT_GAVE_UP:
        plan = Plan(next=Next.END, why=why, code=ExitCode.TRAINING_GAVE_UP)
    else:
        plan = Plan(next=Next.RELAUNCH, why=why)
    state = replace(state, phase=Phase.STOPPING, plan=plan)
    if state.saving is not None:
        state = replace(state, deadline_at=event.at + policy.commit_grace_s)
        return Decision(state, (), why + "; the commit in flight may still come")
    return _kill(state, event.at, policy, why)


# --- the end of a launch --------------------------------------------------------------------------


def _on_launch_ended(state: State, event: on.LaunchEnded, policy: Policy) -> Decision:
    if event.launch != state.launch or not state.running:
        return Decision(state)
    state = replace(state, running=False, saving=None)
    if event.finished:
        plan = Plan(next=Next.END, why="the training is finished", code=ExitCode.FINISHED)
        return _close(state, event.at, plan, policy)
    if state.phase is Phase.TRAINING:
        return _after_unasked_end(state, event, policy)
    assert state.plan is not None, "SAVING and STOPPING are entered with a plan"
    if state.plan.next is Next.END and state.plan.code is ExitCode.FINISHED:
        failed = f"rank 0 said that it finished, yet outcome.json does not: {event.error or event.code}"
        return _after_failure(state, event.at, failed, policy)
    if state.plan.next is Next.RELAUNCH:
        return _after_failure(state, event.at, state.plan.why, policy)
    return _close(state, event.at, state.plan, policy)


def _after_unasked_end(state: State, event: on.LaunchEnded, policy: Policy) -> Decision:
    if not state.heard and event.code == 0:
        why = "the command ended with 0 (it has no trainer library to say more)"
        plan = Plan(next=Next.END, why=why, code=ExitCode.FINISHED)
        return _close(state, event.at, plan, policy)
    if event.code == EXIT_GAVE_UP:
        plan = Plan(next=Next.END, why="the command ended with 93", code=ExitCode.TRAINING_GAVE_UP)
        return _close(state, event.at, plan, policy)
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
        return _close(state, at, Plan(next=Next.END, why=why, code=ExitCode.TRAINING_FAILED), policy)
    state = replace(
        state,
        phase=Phase.STARTING,
        plan=None,
        chosen=False,
        clearing=False,
        deadline_at=at + (policy.start_within_s if _all_ready(state) else policy.watcher_back_within_s),
    )
    return Decision(state, (do.ChooseCheckpoint(),), f"relaunch: {why}")


# --- the bus --------------------------------------------------------------------------------------


def _on_watcher_lost(state: State, event: on.WatcherLost, policy: Policy) -> Decision:
    if event.bus != state.bus or not state.bus_open or state.phase in (Phase.CLOSING, Phase.REQUEUEING):
        return Decision(state)
    return _restart_bus(state, event.at, f"the watcher of {event.node} is gone: {event.why}", policy)


def _on_bus_ended(state: State, event: on.BusEnded, policy: Policy) -> Decision:
    if event.bus != state.bus or not state.bus_open:
        return Decision(state)
    if state.phase is Phase.CLOSING:
        return _closed(replace(state, bus_open=False, ready=frozenset()), event.at, policy, "the watchers left")
    why = f"the watchers' Slurm step ended with {event.code} {event.error}".rstrip()
    return _restart_bus(state, event.at, why, policy)


def _restart_bus(state: State, at: float, why: str, policy: Policy) -> Decision:
    """Start a new bus beside the training; a node that does not come back is lost."""
    restarts = state.bus_restarts + 1
    if restarts > policy.bus_restarts_max:
        plan = Plan(next=Next.END, why=f"{why}; {restarts - 1} restarts of the bus", code=ExitCode.START_FAILED)
        return _stop(state, at, plan, policy)
    deadline = state.deadline_at
    if state.phase in (Phase.STARTING, Phase.TRAINING):
        back = at + policy.watcher_back_within_s
        # a node that was lost already keeps its deadline: restarts must not put it off for ever
        deadline = min(deadline, back) if deadline is not None else back
    state = replace(
        state,
        bus=state.bus + 1,
        bus_restarts=restarts,
        bus_restarted_in_launch=True,
        ready=frozenset(),
        clearing=False,
        deadline_at=deadline,
    )
    return Decision(state, (do.StartBus(bus=state.bus),), why)


# --- deadlines ------------------------------------------------------------------------------------


def _on_tick(state: State, event: on.Tick, policy: Policy) -> Decision:
    if state.deadline_at is None or event.at < state.deadline_at:
        return Decision(state)
    match state.phase:
        case Phase.STARTING | Phase.TRAINING:
            return _on_start_or_bus_late(state, event.at, policy)
        case Phase.SAVING:
            late = "the deadline of the save has passed"
            return _kill(replace(state, phase=Phase.STOPPING), event.at, policy, late)
        case Phase.STOPPING if not state.killed:
            return _kill(state, event.at, policy, "the ranks did not leave in time")
        case Phase.STOPPING:
            assert state.plan is not None, "STOPPING is entered with a plan"
            why = f"{state.plan.why}; the training step did not end in {policy.kill_within_s:g} s after SIGKILL"
            plan = state.plan
            if plan.next is Next.RELAUNCH:  # nothing can be started beside ranks that do not die
                plan = Plan(next=Next.REQUEUE, why=why)
            return _close(replace(state, running=False), event.at, plan, policy)
        case Phase.CLOSING:
            late = "the watchers or the verification took too long"
            return _closed(replace(state, bus_open=False, verifying=None), event.at, policy, late)
        case Phase.REQUEUEING:
            state = replace(state, deadline_at=event.at + policy.ask_within_s, asking=True)
            return Decision(state, (do.AskSlurm(why="may the job be requeued?"),), "try the requeue again")
        case Phase.DONE:
            return Decision(state)
        case _:
            assert_never(state.phase)


def _on_start_or_bus_late(state: State, at: float, policy: Policy) -> Decision:
    missing = [node for node in state.nodes if node not in state.ready]
    if not missing:
        what = "clearing the nodes" if state.clearing else "choosing the checkpoint"
        code = ExitCode.START_FAILED if state.clearing else ExitCode.STORAGE
        if state.clearing:
            return _stop(state, at, Plan(next=Next.REQUEUE, why=f"{what} took too long"), policy)
        return _stop(state, at, Plan(next=Next.END, why=f"{what} took too long", code=code), policy)
    losses = state.node_losses + 1
    state = replace(state, node_losses=losses)
    why = f"no watcher answers on {', '.join(missing)}: taken for lost"
    if losses > policy.node_losses_max:
        return _stop(state, at, Plan(next=Next.END, why=why, code=ExitCode.NODES_LOST), policy)
    return _stop(state, at, Plan(next=Next.REQUEUE, why=why), policy)


# --- the only ways into a phase -------------------------------------------------------------------


def _save(state: State, deadline: float, plan: Plan) -> Decision:
    """Ask all ranks for a save, and to leave."""
    state = replace(state, phase=Phase.SAVING, plan=plan, deadline_at=deadline)
    return Decision(state, (do.RequestSave(stop=True, why=plan.why, deadline_at=deadline),), plan.why)


def _stop(state: State, at: float, plan: Plan, policy: Policy) -> Decision:
    """End the ranks, if there are any, without a save."""
    if state.plan is not None and state.plan.next is Next.END and plan.code is not ExitCode.SUPERSEDED:
        plan = state.plan  # finished, cancelled: nothing that comes later makes the job run again
    if state.phase in (Phase.CLOSING, Phase.REQUEUEING):
        return Decision(replace(state, plan=plan), (), plan.why)
    if not state.running:
        return _close(state, at, plan, policy)
    if state.phase is Phase.STOPPING and state.killed:
        return Decision(replace(state, plan=plan), (), plan.why)
    return _kill(replace(state, phase=Phase.STOPPING, plan=plan), at, policy, plan.why)


def _kill(state: State, at: float, policy: Policy, why: str) -> Decision:
    state = replace(state, killed=True, deadline_at=at + policy.kill_within_s)
    return Decision(state, (do.KillRanks(launch=state.launch, why=why),), why)


def _close(state: State, at: float, plan: Plan, policy: Policy) -> Decision:
    """No rank runs: let the watchers leave, and wait for the last checkpoint to be read back."""
    wait = policy.verify_within_s if state.verifying else policy.close_within_s
    state = replace(state, phase=Phase.CLOSING, plan=plan, deadline_at=at + wait)
    if not state.bus_open:
        return _closed(state, at, policy, plan.why)
    return Decision(state, (do.StopBus(),), plan.why)


def _on_checkpoint_verified(state: State, event: on.CheckpointVerified, policy: Policy) -> Decision:
    if event.directory != state.verifying:
        return Decision(state)
    state = replace(state, verifying=None)
    if event.ok:
        why = f"{event.directory} is verified"
    else:
        why = f"{event.directory} is NOT what its manifest says: {event.problem}; the one before will be used"
    if state.phase is Phase.CLOSING:
        return _closed(state, event.at, policy, why)
    return Decision(state, (), why)


def _closed(state: State, at: float, policy: Policy, why: str) -> Decision:
    """Go on to the requeue or the end, once the watchers left and nothing is being read back."""
    if state.bus_open or state.verifying is not None:
        return Decision(state, (), why)
    assert state.plan is not None, "CLOSING is entered with a plan"
    if state.plan.next is Next.END:
        return _finish(state, state.plan)
    state = replace(state, phase=Phase.REQUEUEING, asking=True, deadline_at=at + policy.ask_within_s)
    return Decision(state, (do.AskSlurm(why="may the job be requeued?"),), why)


def _on_superseded(state: State, event: on.Superseded, policy: Policy) -> Decision:
    why = f"job {event.by_job_id} (restart {event.by_restart_count}) holds the lease now"
    return _stop(state, event.at, Plan(next=Next.END, why=why, code=ExitCode.SUPERSEDED), policy)


def _finish(state: State, plan: Plan) -> Decision:
    """End the supervisor."""
    state = replace(state, phase=Phase.DONE, plan=plan, deadline_at=None)
    return Decision(state, (do.Exit(code=int(plan.code), reason=plan.why),), plan.why)


# --- requeue --------------------------------------------------------------------------------------


def _requeue_if_right(
    state: State, event: on.SlurmAnswered, judgement: Judgement, policy: Policy
) -> Decision:
    """The last look before the requeue: the world may have changed since the notice."""
    job = event.job
    if job is None:
        return _retry_requeue(state, event.at, event.error, ExitCode.UNDECIDED, policy)
    if judgement.notice is Notice.REQUEUED:
        return _finish(state, Plan(next=Next.END, why=judgement.notice.value))
    if judgement.notice is Notice.CANCELLED:
        plan = Plan(next=Next.END, why=f"cancelled meanwhile ({job.slurm_state})", code=ExitCode.CANCELLED)
        return _finish(state, plan)
    if not job.requeue_allowed:
        why = "Slurm does not requeue this job (Requeue=0): submit it again with the same --run-dir"
        return _finish(state, Plan(next=Next.END, why=why, code=ExitCode.REQUEUE_FAILED))
    assert state.plan is not None, "REQUEUEING is entered with a plan"
    state = replace(state, deadline_at=event.at + policy.ask_within_s)
    return Decision(state, (do.Requeue(),), state.plan.why)


def _on_requeue_answered(state: State, event: on.RequeueAnswered, policy: Policy) -> Decision:
    if state.phase is not Phase.REQUEUEING:
        return Decision(state)
    if event.ok:
        assert state.plan is not None, "REQUEUEING is entered with a plan"
        return _finish(state, Plan(next=Next.END, why=f"requeued: {state.plan.why}"))
    return _retry_requeue(state, event.at, event.error, ExitCode.REQUEUE_FAILED, policy)


def _retry_requeue(state: State, at: float, error: str, code: ExitCode, policy: Policy) -> Decision:
    tries = state.requeue_tries + 1
    if tries >= policy.requeue_tries_max:
        why = f"the requeue did not succeed in {tries} tries: {error}"
        return _finish(state, Plan(next=Next.END, why=why, code=code))
    wait = min(policy.requeue_retry_s * 2 ** (tries - 1), policy.requeue_retry_max_s)
    state = replace(state, requeue_tries=tries, asking=False, deadline_at=at + wait)
    return Decision(state, (), f"the requeue did not succeed ({error}); again in {wait:g} s")


# --- small words ----------------------------------------------------------------------------------


def _all_ready(state: State) -> bool:
    return set(state.nodes) <= state.ready


replace = msgspec.structs.replace
