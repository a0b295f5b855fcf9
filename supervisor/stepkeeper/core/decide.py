"""The rules: `decide(state, event, policy)` returns the next state, what to do, and why.

Pure, like the whole of `core`: no clock, no I/O, no log, no thread.  Time is `event.at`.  Read on in the
order of a run: `starting`, `gates`, `storage`, `training`, `silence`, `anomalies`, `recovery`, `notices`, `faults`,
 `scale_up`, `bus`, `deadlines`; all of them end in `phases`.  What they change is in `state`.

Every phase that waits has a deadline.  When it passes, the next rougher means is used.
"""

from __future__ import annotations

from typing import assert_never

from stepkeeper.core import events as on
from stepkeeper.core import reasons as because
from stepkeeper.core.anomalies import on_corrupted, on_nodes_paced, on_replayed
from stepkeeper.core.bus import on_watcher_lost
from stepkeeper.core.deadlines import on_tick
from stepkeeper.core.faults import (
    on_bus_ended,
    on_node_faulted,
    on_nodes_not_cleared,
    on_nodes_released,
    on_slurmd_gone,
)
from stepkeeper.core.notices import (
    on_node_signaled,
    on_requested,
    on_requeue_answered,
    on_signal,
    on_slurm_answered,
    on_superseded,
)
from stepkeeper.core.phases import Decision
from stepkeeper.core.policy import Policy
from stepkeeper.core.recovery import on_judged, on_rolled_back
from stepkeeper.core.scale_up import on_idle_nodes, on_nodes_checked
from stepkeeper.core.silence import on_clock_set, on_stacks, on_suspended
from stepkeeper.core.starting import (
    on_attempt_started,
    on_choice_failed,
    on_launch_refused,
    on_nodes_cleared,
    on_watcher_ready,
)
from stepkeeper.core.state import Phase, State
from stepkeeper.core.storage import on_chosen, on_run_directory_gone, on_storage_tested
from stepkeeper.core.training import (
    on_checkpoint_verified,
    on_committed,
    on_finished,
    on_launch_began,
    on_launch_ended,
    on_progressed,
    on_rank_exited,
    on_rank_hello,
    on_save_began,
    on_save_failed,
    on_stopped,
)


def decide(state: State, event: on.Event, policy: Policy) -> Decision:  # noqa: C901, PLR0912 - one case an event
    """Return what changes and what to do about one event.  Never raises."""
    if state.phase is Phase.DONE:
        return Decision(state)
    if isinstance(event, on.OfRanks) and not state.launch.runs(event.launch):
        return Decision(state)  # late: of ranks that are gone
    match event:
        case on.AttemptStarted():
            return on_attempt_started(state, event, policy)
        case on.Tick():
            return on_tick(state, event, policy)
        case on.PartFailed():
            return Decision(state, (), (because.PartFailed(part=event.part, error=event.error),))
        case on.Suspended():
            return on_suspended(state, event)
        case on.ClockSet():
            return on_clock_set(state, event, policy)
        case on.SignalReceived():
            return on_signal(state, event, policy)
        case on.NodeSignaled():
            return on_node_signaled(state, event, policy)
        case on.SlurmAnswered():
            return on_slurm_answered(state, event, policy)
        case on.RequeueAnswered():
            return on_requeue_answered(state, event, policy)
        case on.WatcherReady():
            return on_watcher_ready(state, event, policy)
        case on.WatcherLost():
            return on_watcher_lost(state, event, policy)
        case on.SlurmdGone():
            return on_slurmd_gone(state, event, policy)
        case on.BusEnded():
            return on_bus_ended(state, event, policy)
        case on.NodesCleared():
            return on_nodes_cleared(state, event, policy)
        case on.NodesNotCleared():
            return on_nodes_not_cleared(state, event, policy)
        case on.NodeFaulted():
            return on_node_faulted(state, event, policy)
        case on.NodesReleased():
            return on_nodes_released(state, event)
        case on.NodesChecked():
            return on_nodes_checked(state, event, policy)
        case on.IdleNodes():
            return on_idle_nodes(state, event)
        case on.CheckpointChosen():
            return on_chosen(state, event, policy)
        case on.ChoiceFailed():
            return on_choice_failed(state, event, policy)
        case on.CheckpointVerified():
            return on_checkpoint_verified(state, event, policy)
        case on.StorageTested():
            return on_storage_tested(state, event, policy)
        case on.LaunchBegan():
            return on_launch_began(state, event, policy)
        case on.RankHello():
            return on_rank_hello(state, event, policy)
        case on.RankExited():
            return on_rank_exited(state, event, policy)
        case on.Progressed():
            return on_progressed(state, event, policy)
        case on.NodesPaced():
            return on_nodes_paced(state, event, policy)
        case on.Replayed():
            return on_replayed(state, event, policy)
        case on.Corrupted():
            return on_corrupted(state, event, policy)
        case on.SaveBegan():
            return on_save_began(state, event, policy)
        case on.CheckpointCommitted():
            return on_committed(state, event, policy)
        case on.SaveFailed():
            return on_save_failed(state, event, policy)
        case on.TrainingFinished():
            return on_finished(state, event, policy)
        case on.TrainingStopped():
            return on_stopped(state, event, policy)
        case on.LaunchEnded():
            return on_launch_ended(state, event, policy)
        case on.LaunchRefused():
            return on_launch_refused(state, event, policy)
        case on.StacksCollected():
            return on_stacks(state, event, policy)
        case on.Judged():
            return on_judged(state, event, policy)
        case on.RolledBack():
            return on_rolled_back(state, event, policy)
        case on.Requested():
            return on_requested(state, event, policy)
        case on.RunDirectoryGone():
            return on_run_directory_gone(state, event, policy)
        case on.Superseded():
            return on_superseded(state, event, policy)
        case _:
            assert_never(event)  # a new event without a branch fails mypy, not production
