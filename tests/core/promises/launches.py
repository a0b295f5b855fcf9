"""Promises on launches: one at a time, on what is ready and sound, ended by nothing but a reason."""

from __future__ import annotations

from stepkeeper.core import effects as do
from stepkeeper.core import events as on
from stepkeeper.core.causes import Cause
from stepkeeper.core.gates import Gate, closed_gates
from stepkeeper.core.state import Phase, Timer
from tests.core.promises.register import POLICY, all_watched, promise


@promise
def a_launch_starts_alone_and_only_when_all_is_ready(turns):
    """Two launches at once write the same step directories."""
    for turn in turns:
        for effect in turn.ordered(do.StartLaunch):
            assert all_watched(turn.before)
            assert turn.before.resume.chosen
            assert closed_gates(turn.before) == (Gate.NODES,)
            assert isinstance(turn.event, on.NodesCleared)
            assert turn.event.launch == effect.launch == turn.before.launch.number
            assert not turn.before.launch.running
            assert turn.after.launch.running


WAITS = {
    Gate.STORAGE: (None,),  # its timers run beside
    Gate.WATCHERS: (Timer.WATCHERS,),
    Gate.CHECKPOINT: (Timer.CHECKPOINT_CHOICE,),
    Gate.CAUSE: (Timer.CAUSE,),
    Gate.PAUSE: (Timer.PAUSE,),
    Gate.NODES: (Timer.CLEARING, Timer.NOT_CLEARED, Timer.UNFIT_RETRY),
}


@promise
def a_start_waits_at_a_closed_gate_and_the_nodes_are_asked_last(turns):
    """Its timer names what is waited for; and no answer of the nodes is older than what else had to come."""
    for turn in turns:
        state = turn.after
        closed = closed_gates(state)
        assert bool(closed) == (state.phase is Phase.STARTING)
        if closed and state.watchers.bus:
            assert state.timers.wait in [timer for gate in closed for timer in WAITS[gate]]
        if turn.ordered(do.ClearNodes):
            assert closed == (Gate.NODES,)


@promise
def a_launch_ends_only_by_its_end(turns):
    """`running` is what everything else trusts."""
    for turn in turns:
        if turn.before.launch.running and not turn.after.launch.running:
            ended = isinstance(turn.event, on.LaunchEnded | on.LaunchRefused)
            given_up = isinstance(turn.event, on.Tick) and turn.before.launch.killed
            assert ended or given_up


@promise
def no_launch_starts_on_storage_that_failed_its_test_or_is_under_test(turns):
    """Hours of training that nobody can save are lost hours."""
    for turn in turns:
        if turn.ordered(do.StartLaunch):
            assert turn.before.timers.get(Timer.STORAGE_TEST) is None
            assert turn.before.storage.failing_since is None
        lied = isinstance(turn.event, on.StorageTested) and turn.event.untrue and not turn.event.ok
        assert not (lied and turn.after.phase is Phase.STARTING)


@promise
def silence_ends_a_launch_only_after_a_look_at_its_stacks(turns):
    """What is only slow must not be killed; and a look has an end."""
    for turn in turns:
        looked = turn.before.silence.looking
        assert not turn.ordered(do.CollectStacks) or not looked
        found = turn.after.launch.found  # a wrong loss, and a rank that computes wrongly, are found without a look
        if found is not None and found.cause is Cause.HANG and turn.before.launch.found is None:
            assert looked
            assert turn.ordered(do.KillRanks)
        if turn.after.silence.looking:
            assert turn.after.timers.get(Timer.HANG) is not None


@promise
def a_first_look_ends_only_what_the_next_one_would_end(turns):
    """Seconds of silence are no hang: a rank is sure to do nothing until more patience than ever is used up."""
    for turn in turns:
        certain_s = turn.before.silence.certain_s
        if turn.after.launch.found is not None and turn.before.launch.found is None and certain_s:
            assert isinstance(turn.event, on.StacksCollected)
            if turn.event.awaited:  # the run is even, and was not ended for a hang since it progressed
                assert not turn.event.moved
                assert len(turn.before.pace.recent) >= 32
                assert all(each.cause is not Cause.HANG for each in turn.before.budgets.tried)
                continue
            assert turn.event.sure_s > 0.0
            looked_at = turn.before.timers.get(Timer.HANG) - POLICY.stacks_within_s
            assert turn.event.at + turn.event.sure_s >= looked_at + certain_s


@promise
def a_library_that_withdrew_is_revived_by_rank_0_alone(turns):
    """Its silence means nothing, and a notice is a signal: a late word of another rank must not change that."""
    for turn in turns:
        before, after = turn.before.launch, turn.after.launch
        if after.library_withdrawn and turn.after.phase is Phase.TRAINING:
            assert not after.library_seen
            assert not turn.after.has_library
            assert turn.after.timers.get(Timer.HANG) is None
        if before.library_withdrawn and after.library_seen:
            assert isinstance(turn.event, on.RankHello)
            assert turn.event.rank == 0


@promise
def a_rollback_goes_back(turns):
    """Never to the step that training came from, unless that is confirmed, and never while ranks run."""
    for turn in turns:
        for effect in turn.ordered(do.RollBack):
            wrong = turn.before.launch.found
            if effect.quick:
                assert effect.below_step == wrong.back_to + 1
                assert turn.after.phase is not Phase.STARTING
            elif isinstance(turn.event, on.CheckpointChosen) and wrong is not None and wrong.back_to is not None:
                chosen = wrong.back_to if turn.event.step is None else turn.event.step
                assert effect.below_step <= min(wrong.back_to, chosen) + 1
            else:
                assert effect.below_step <= turn.after.resume.step  # which the same turn may have chosen
            assert not turn.after.launch.running
            assert turn.after.deadline_at is not None or Gate.STORAGE in closed_gates(turn.after)
            assert not turn.after.resume.chosen


@promise
def after_silent_corruption_a_launch_begins_with_what_was_confirmed(turns):
    """Nor may its ranks take anything newer from a tier."""
    for turn in turns:
        wrong = turn.before.launch.found
        for effect in turn.ordered(do.StartLaunch):
            if wrong is not None and wrong.back_to is not None:
                assert effect.went_back
                assert turn.before.resume.step is None or turn.before.resume.step <= wrong.back_to


@promise
def data_that_is_left_out_stays_so(turns):
    """The next attempt, each launch and the lineage know of all of it, in its order."""
    for turn in turns:
        begins = isinstance(turn.event, on.AttemptStarted) and not turn.before.watchers.bus
        before = turn.event.skipped_data if begins else turn.before.resume.skipped_data
        assert turn.after.resume.skipped_data[: len(before)] == before
        for effect in (*turn.ordered(do.StartLaunch), *turn.ordered(do.RollBack)):
            assert effect.skipped_data == turn.after.resume.skipped_data


@promise
def a_restarted_bus_hears_the_standing_order(turns):
    """What the watchers before were told died with them."""
    for turn in turns:
        back = isinstance(turn.event, on.WatcherReady) and turn.after.watchers.ready != turn.before.watchers.ready
        # twice is enough: the first that is back, and all
        back = back and (len(turn.after.watchers.ready) == 1 or all_watched(turn.after))
        if back and turn.before.phase is Phase.SAVING and turn.before.storage.verifying is None:
            assert [e.deadline_at for e in turn.ordered(do.RequestSave)] == [turn.after.deadline_at]
        if back and turn.before.launch.killed and turn.before.launch.running:
            assert turn.ordered(do.KillRanks)


@promise
def ranks_that_move_are_left_alone(turns):
    """Slow is no hang, however long the silence."""
    for turn in turns:
        if isinstance(turn.event, on.StacksCollected) and turn.event.moved:
            assert not turn.ordered(do.KillRanks)
