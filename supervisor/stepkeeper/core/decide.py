"""The rules: `decide(state, event, policy)` returns the next state, what to do, and why.

Pure, like the whole of `core`: no clock, no I/O, no log, no thread.  Time is `event.at`.  Read on in the
order of a run: `starting`, `gates`, `storage`, `training`, `silence`, `anomalies`, `recovery`, `notices`, `faults`,
 `scale_up`, `bus`, `deadlines`; all of them end in `phases`.  What they change is in `state`.

Every phase that waits has a deadline.  When it passes, the next rougher means is used.
"""

from __future__ import annotations

from typing import assert_never

from stepkeeper.core import (
    anomalies,
    bus,
    deadlines,
    faults,
    notices,
    recovery,
    scale_up,
    silence,
    starting,
    storage,
    training,
)
from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.state import Phase, State


def decide(state: State, event: on.Event, policy: Policy) -> Decision:  # noqa: C901, PLR0912 - one case an event
    """Return what changes and what to do about one event.  Never raises."""
    if state.phase is Phase.DONE:
        return Decision(state)
    if isinstance(event, on.OfRanks) and not state.launch.runs(event.launch):
        return Decision(state)  # late: of ranks that are gone
    match event:
        case on.AttemptStarted():
            return starting.on_attempt_started(state, event, policy)
        case on.Tick():
            return deadlines.on_tick(state, event, policy)
        case on.PartFailed():
            return Decision(state, (), (because.PartFailed(part=event.part, error=event.error),))
        case on.Suspended():
            return silence.on_suspended(state, event)
        case on.ClockSet():
            return silence.on_clock_set(state, event, policy)
        case on.SignalReceived():
            return notices.on_signal(state, event, policy)
        case on.NodeSignaled():
            return notices.on_node_signaled(state, event, policy)
        case on.SlurmAnswered():
            return notices.on_slurm_answered(state, event, policy)
        case on.RequeueAnswered():
            return notices.on_requeue_answered(state, event, policy)
        case on.WatcherReady():
            return starting.on_watcher_ready(state, event, policy)
        case on.WatcherLost():
            return bus.on_watcher_lost(state, event, policy)
        case on.Suspected():
            return silence.on_suspected(state, event)
        case on.SlurmdGone():
            return faults.on_slurmd_gone(state, event, policy)
        case on.BusEnded():
            return faults.on_bus_ended(state, event, policy)
        case on.NodesCleared():
            return starting.on_nodes_cleared(state, event, policy)
        case on.NodesNotCleared():
            return faults.on_nodes_not_cleared(state, event, policy)
        case on.NodeFaulted():
            return faults.on_node_faulted(state, event, policy)
        case on.NodesReleased():
            return faults.on_nodes_released(state, event)
        case on.NodesChecked():
            return scale_up.on_nodes_checked(state, event, policy)
        case on.IdleNodes():
            return scale_up.on_idle_nodes(state, event)
        case on.CheckpointChosen():
            return storage.on_chosen(state, event, policy)
        case on.ChoiceFailed():
            return starting.on_choice_failed(state, event, policy)
        case on.CheckpointVerified():
            return training.on_checkpoint_verified(state, event, policy)
        case on.StorageTested():
            return storage.on_storage_tested(state, event, policy)
        case on.LaunchBegan():
            return training.on_launch_began(state, event, policy)
        case on.RankHello():
            return training.on_rank_hello(state, event, policy)
        case on.RankExited():
            return training.on_rank_exited(state, event, policy)
        case on.Progressed():
            return training.on_progressed(state, event, policy)
        case on.NodesPaced():
            return anomalies.on_nodes_paced(state, event, policy)
        case on.Replayed():
            return anomalies.on_replayed(state, event, policy)
        case on.Corrupted():
            return anomalies.on_corrupted(state, event, policy)
        case on.SaveBegan():
            return training.on_save_began(state, event, policy)
        case on.CheckpointCommitted():
            return training.on_committed(state, event, policy)
        case on.SaveFailed():
            return training.on_save_failed(state, event, policy)
        case on.TrainingFinished():
            return training.on_finished(state, event, policy)
        case on.TrainingStopped():
            return training.on_stopped(state, event, policy)
        case on.LaunchEnded():
            return training.on_launch_ended(state, event, policy)
        case on.LaunchRefused():
            return starting.on_launch_refused(state, event, policy)
        case on.StacksCollected():
            return silence.on_stacks(state, event, policy)
        case on.Judged():
            return recovery.on_judged(state, event, policy)
        case on.RolledBack():
            return recovery.on_rolled_back(state, event, policy)
        case on.Requested():
            return notices.on_requested(state, event, policy)
        case on.RunDirectoryGone():
            return storage.on_run_directory_gone(state, event, policy)
        case on.Superseded():
            return notices.on_superseded(state, event, policy)
        case _:
            assert_never(event)  # a new event without a branch fails mypy, not production
